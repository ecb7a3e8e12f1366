"""Real nodes under which an older copy of etcd's data is put back, and the operator who decides."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from support.etcd import NO_ETCD, has_etcd
from support.processes import process_environment, wait_until
from support.real_cluster import SHORT_SESSION_TIMEOUT_MS, RealCluster, RealNode

pytestmark = pytest.mark.skipif(not has_etcd(), reason=NO_ETCD)

WORDS = "etcd has lost data or was restored. Stop all nodes, restore etcd's newest copy"
_WAIT_SECONDS = 240


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[RealCluster]:
    with RealCluster(tmp_path, nodes=2, session_timeout_ms=SHORT_SESSION_TIMEOUT_MS) as running:
        yield running
        print(running.logs())  # noqa: T201


def accept_metadata(node: RealNode) -> None:
    """Do what the refusal says, with an editor."""
    file = node.data_dir / "cluster-identity.json"
    edited = json.loads(file.read_text()) | {"seen_revision": 0, "incarnations": []}
    file.write_text(json.dumps(edited, indent=2) + "\n")


def wait_ready_after_its_last_session(node: RealNode) -> None:
    """Wait until a node serves, started again while it is told that its last session is not over.

    Its own stop has not ended that session: nothing may be written to an etcd that was restored.
    """
    while True:
        try:
            node.wait_ready()
            return
        except RuntimeError as error:
            if "when its session is over" not in str(error).splitlines()[-1]:
                raise
        node.launch()


def doctor(node: RealNode) -> str:
    command = [sys.executable, "-m", "tidemill.cli", "doctor", "--data", str(node.data_dir)]
    command += ["--server", node.server, "--http", node.http_url.removeprefix("http://")]
    return subprocess.run(command, capture_output=True, text=True, env=process_environment()).stdout


def values_of(cluster: RealCluster, topic: str, count: int) -> list[str]:
    consumer = Consumer(cluster.config | {"group.id": "reader", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found = consumer.consume(count, timeout=_WAIT_SECONDS)
    consumer.close()
    return [message.value().decode() for message in found]


def test_nodes_go_on_without_an_etcd_that_was_restored_until_an_operator_accepts_what_it_has(
    cluster: RealCluster, topic: str
) -> None:
    cluster.create_topic(topic, replication_factor=2)
    producer = Producer(cluster.config | {"message.timeout.ms": 200_000, "acks": "all"})

    def write(value: str) -> None:
        failed: list[str] = []
        producer.produce(topic, value, on_delivery=lambda error, _: failed.extend([str(error)] * bool(error)))
        assert producer.flush(_WAIT_SECONDS) == 0
        assert not failed

    write("before")
    copy = cluster.etcd.copy_data()
    cluster.create_topic("lost", replication_factor=2)
    cluster.etcd.kill()
    cluster.etcd.restart(put_back=copy)

    def all_have_noticed() -> bool:
        return all(any(WORDS in each for each in node.readiness()["problems"]) for node in cluster)

    wait_until(all_have_noticed, "the nodes say that etcd was restored", _WAIT_SECONDS)
    write("meanwhile")
    admin = AdminClient(cluster.config)
    with pytest.raises(KafkaException, match=r"etcd has lost data or was restored"):
        admin.create_topics([NewTopic("t", 1, 1)])["t"].result(120)
    said = doctor(cluster["n1"])
    assert "etcd has lost data or was restored" in " ".join(said.split())
    assert "log repair" not in said

    for node in cluster:
        node.stop()
    for node in cluster:
        with pytest.raises(RuntimeError, match=r"etcd has lost data or was restored"):
            node.start()
        assert "Traceback" not in node.log_text()
        accept_metadata(node)
    for node in cluster:
        node.launch()
    for node in cluster:
        wait_ready_after_its_last_session(node)
    cluster.wait_in_sync(topic, 2)
    write("after")
    assert values_of(cluster, topic, 3) == ["before", "meanwhile", "after"]
    assert not cluster.partitions("lost"), "etcd has lost it"
