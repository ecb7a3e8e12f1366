"""A node on a disk that is really full: killed, started again, read from, and given room."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from support.processes import NodeProcess, wait_until

DISK_BYTES = 24 * 1024 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def fill(disk: Path) -> Path:
    """Take all the room that is left."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (64 * 1024, 4096, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


def produce(node: NodeProcess, value: str) -> KafkaError | None:
    """Why a record was refused; None if it was not."""
    told: list[KafkaError | None] = []
    producer = Producer(
        {"bootstrap.servers": node.bootstrap_servers, "message.timeout.ms": 3_000, "log_level": 0}
    )
    producer.produce("t", value, on_delivery=lambda error, sent: told.append(error))
    producer.flush(60)
    return told[0]


def read_all(node: NodeProcess, count: int) -> list[str]:
    settings = {"bootstrap.servers": node.bootstrap_servers, "group.id": "g", "log_level": 0}
    # There is no room for a commit.
    consumer = Consumer(settings | {"enable.auto.commit": False})
    consumer.assign([TopicPartition("t", 0, 0)])
    found = consumer.consume(count, timeout=60)
    consumer.close()
    return [record.value().decode() for record in found]


def problems(node: NodeProcess) -> list[str]:
    found = node.readiness()
    assert found["ready"] is True
    return list(found["problems"])


def leader_epoch(node: NodeProcess) -> int:
    admin = AdminClient({"bootstrap.servers": node.bootstrap_servers, "log_level": 0})
    place = TopicPartition("t", 0)
    found: int = admin.list_offsets({place: OffsetSpec.latest()})[place].result(60).leader_epoch
    return found


def test_a_killed_node_starts_on_a_full_disk_serves_reads_and_goes_on_by_itself(disk: Path) -> None:
    with NodeProcess(disk) as node:
        for number in range(5):
            assert produce(node, str(number)) is None
        filler = fill(disk)
        node.kill()
        node.start()
        (problem,) = problems(node)
        assert problem.startswith("disk full: ")
        assert str(disk) in problem
        assert read_all(node, 5) == ["0", "1", "2", "3", "4"]
        assert produce(node, "no room") is not None
        where = ("--data", str(disk), "--server", node.bootstrap_servers, "--http", node.http)
        doctor = subprocess.run(
            [sys.executable, "-m", "tidemill.cli", "doctor", *where, "--format", "json"],
            capture_output=True,
            timeout=120,
        )
        assert doctor.returncode == 1
        findings = {each["check"]: each for each in json.loads(doctor.stdout)}
        assert findings["disk space"]["verdict"] == "fail"
        assert "disk full" in findings["health"]["detail"]
        assert "log repair" not in findings["health"]["advice"]
        filler.unlink()
        wait_until(lambda: not problems(node), "the node takes note of the room", 60)
        assert produce(node, "5") is None
        assert read_all(node, 6)[5] == "5"
        assert leader_epoch(node) == 1, "the crash has begun an epoch, late but before the first write"


def test_a_node_stops_in_an_orderly_way_on_a_full_disk_and_starts_again(disk: Path) -> None:
    with NodeProcess(disk) as node:
        assert produce(node, "a") is None
        filler = fill(disk)
        assert produce(node, "x" * 10_000) is not None
        wait_until(lambda: problems(node), "the refused write is told", 60)
        node.stop()
        node.start()
        assert read_all(node, 1) == ["a"]
        filler.unlink()
        wait_until(lambda: not problems(node), "the node takes note of the room", 60)
        assert produce(node, "b") is None
