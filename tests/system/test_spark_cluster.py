"""A standalone Spark cluster: master, worker, driver and node share nothing but the network.

The worker runs in a mount namespace of its own in which the driver's folder is empty: whatever the connector
would look for on the driver's disk is not there.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

import tidemill
from support.processes import NodeProcess, process_environment
from support.spark_cluster import spark_cluster

DRIVER = Path(__file__).parents[1] / "support" / "spark_jobs" / "cluster_job.py"
RECORDS = 2_000


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


@pytest.mark.timeout(300)
def test_a_stream_and_a_batch_run_on_a_cluster_that_shares_nothing(tmp_path: Path) -> None:
    own = tmp_path / "driver"
    (own / "mine").mkdir(parents=True)
    environment = process_environment() | {"PYSPARK_PYTHON": sys.executable}
    with (
        NodeProcess(tmp_path / "data") as node,
        spark_cluster(tmp_path / "cluster", environment, under=hidden(own)) as master,
    ):
        admin = AdminClient({"bootstrap.servers": node.bootstrap_servers})
        for done in admin.create_topics([NewTopic("numbers", 3)]).values():
            done.result()
        producer = Producer({"bootstrap.servers": node.bootstrap_servers})
        for number in range(RECORDS):
            producer.produce("numbers", value=str(number))
        assert producer.flush(30) == 0
        with tidemill.connect(node.bootstrap_servers) as client:
            table = client.create_table(
                "cluster.numbers", "id bigint, offset bigint, partition int", primary_key="id", buckets=2
            )
            result = subprocess.run(
                [
                    sys.executable,
                    str(DRIVER),
                    master,
                    node.bootstrap_servers,
                    "numbers",
                    table.name,
                    str(own),
                ],
                cwd=own,
                env=environment,
                capture_output=True,
                text=True,
            )
            assert result.returncode == 0, result.stderr[-3_000:]
            found = json.loads(result.stdout.splitlines()[-1])
            assert found["count"] == RECORDS - 100
            assert found["sum"] == sum(range(100, RECORDS))
            assert sorted(row["id"] for row in table.scan(["id"]).to_arrow().to_pylist()) == list(
                range(RECORDS)
            )
        assert "checkpoint" in found["folder"]
        assert found["workers"]
        for parent, seen in found["workers"]:
            assert parent != found["driver"]
            if hidden(own):
                assert seen == []
