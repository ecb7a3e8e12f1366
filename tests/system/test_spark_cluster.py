"""A standalone Spark cluster: master, workers, driver and node share nothing but the network.

The workers run in mount namespaces of their own in which the driver's folder is empty: whatever the connector
would look for on the driver's disk is not there. Slow tasks get twins there, which local Spark never does.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import tidemill
from support.number_story import BATCH, NumberStory
from support.processes import NodeProcess, process_environment
from support.spark_cluster import spark_cluster
from support.spark_copies import Copies
from support.spark_driver import SparkDriver
from support.table_nodes import SOON

RECORDS = 2_000
_CONF = {
    "spark.driver.host": "127.0.0.1",
    "spark.executor.memory": "512m",
    "spark.executor.cores": "1",
    "spark.sql.shuffle.partitions": "2",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.quantile": "0.5",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.minTaskRuntime": "100ms",
}


def hidden(folder: Path) -> list[str]:
    """What to run a command with so that it sees nothing in ``folder``; nothing if that is not allowed."""
    probe = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none '{folder}' && ls -A '{folder}'"]
    try:
        allowed = subprocess.run(probe, capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        return []
    return ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none \'{folder}\' && exec "$0" "$@"']


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("node") / "data", **SOON) as running:
        yield running


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver's folder, in which workers see nothing."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "mine").mkdir()
    return folder


@pytest.fixture(scope="module")
def driver(node: NodeProcess, own: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkDriver]:
    """A driver on the cluster; it takes five processes of Java, so the tests share it."""
    logs = tmp_path_factory.mktemp("cluster") / "logs"
    with (
        spark_cluster(logs, process_environment(), under=hidden(own)) as master,
        SparkDriver(own, node.bootstrap_servers, master, **_CONF) as running,
    ):
        yield running


def test_a_stream_and_a_batch_run_on_a_cluster_that_shares_nothing(
    node: NodeProcess, driver: SparkDriver, own: Path
) -> None:
    admin = AdminClient({"bootstrap.servers": node.bootstrap_servers})
    for done in admin.create_topics([NewTopic("numbers", 3)]).values():
        done.result()
    producer = Producer({"bootstrap.servers": node.bootstrap_servers})
    for number in range(RECORDS):
        producer.produce("numbers", value=str(number))
    assert producer.flush(120) == 0
    with tidemill.connect(node.bootstrap_servers) as client:
        table = client.create_table(
            "cluster.numbers", "id bigint, offset bigint, partition int", primary_key="id", buckets=2
        )
        found = driver.call("stream_and_read", topic="numbers", table=table.name, folder=str(own))
        assert found["count"] == RECORDS - 100
        assert found["sum"] == sum(range(100, RECORDS))
        assert sorted(row["id"] for row in table.scan(["id"]).to_arrow().to_pylist()) == list(range(RECORDS))
    assert {"checkpoint", "mine"} <= set(found["folder"])
    assert found["workers"]
    for parent, seen in found["workers"]:
        assert parent != found["driver"]
        if hidden(own):
            assert seen == []


def test_of_a_slow_task_and_its_twin_one_is_published(
    node: NodeProcess, driver: SparkDriver, tmp_path: Path
) -> None:
    story = NumberStory(node, "speculation")
    copies = Copies(story, tmp_path, ["twins", "test.twins"])
    story.fill(2)
    for batch, target in enumerate(copies.targets):
        copies.points[target].arm("after-write", batch)
    copies.begin(driver)
    copies.finish(driver)
    for batch, target in enumerate(copies.targets):
        story.check(target, 2)
        assert copies.points[target].held("after-write", batch), "one attempt was slow"
        written = copies.points[target].reached("after-write", batch)
        assert sum(each["rows"] for each in written) > BATCH, "and its twin has written all rows, too"
    assert story.open_transactions(*copies.targets) == []
