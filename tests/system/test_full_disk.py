"""A node on a disk that is really full: killed, started again, read from, and given room."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

import tidemill
from support.batches import plain_batch
from support.processes import NodeProcess, wait_until
from support.raw import RawClient
from tidemill.errors import ErrorCode, TidemillError

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


def admin_of(node: NodeProcess) -> AdminClient:
    return AdminClient({"bootstrap.servers": node.bootstrap_servers, "log_level": 0})


def produce(node: NodeProcess, value: str) -> KafkaError | None:
    """Why a record was refused; None if it was not."""
    told: list[KafkaError | None] = []
    producer = Producer(
        {"bootstrap.servers": node.bootstrap_servers, "message.timeout.ms": 3_000, "log_level": 0}
    )
    producer.produce("t", value, on_delivery=lambda error, sent: told.append(error))
    producer.flush(120)
    return told[0]


def read_all(node: NodeProcess, count: int) -> list[str]:
    settings = {"bootstrap.servers": node.bootstrap_servers, "group.id": "g", "log_level": 0}
    # There is no room for a commit.
    consumer = Consumer(settings | {"enable.auto.commit": False})
    consumer.assign([TopicPartition("t", 0, 0)])
    found = consumer.consume(count, timeout=120)
    consumer.close()
    return [record.value().decode() for record in found]


def problems(node: NodeProcess) -> list[str]:
    found = node.readiness()
    assert found["ready"] is True
    return list(found["problems"])


def leader_epoch(node: NodeProcess) -> int:
    admin = admin_of(node)
    place = TopicPartition("t", 0)
    found: int = admin.list_offsets({place: OffsetSpec.latest()})[place].result(120).leader_epoch
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
        wait_until(lambda: not problems(node), "the node takes note of the room")
        assert produce(node, "5") is None
        assert read_all(node, 6)[5] == "5"
        assert leader_epoch(node) == 1, "the crash has begun an epoch, late but before the first write"


def test_a_node_stops_in_an_orderly_way_on_a_full_disk_and_starts_again(disk: Path) -> None:
    with NodeProcess(disk) as node:
        assert produce(node, "a") is None
        filler = fill(disk)
        assert produce(node, "x" * 10_000) is not None
        wait_until(lambda: problems(node), "the refused write is told")
        node.stop()
        node.start()
        assert read_all(node, 1) == ["a"]
        filler.unlink()
        wait_until(lambda: not problems(node), "the node takes note of the room")
        assert produce(node, "b") is None


def numbered(start: int, count: int) -> list[dict[str, object]]:
    return [{"id": number, "v": f"value-{number}"} for number in range(start, start + count)]


def check_tables_are_read_and_not_written(node: NodeProcess, count: int) -> None:
    with tidemill.connect(node.bootstrap_servers, timeout_ms=3_000) as db:
        table = db.table("shop.orders")
        found = table.lookup([{"id": 7}, {"id": count}])
        assert [row["v"] for row in found.to_pylist()] == ["value-7"]
        assert sorted(row["id"] for row in table.scan().to_arrow().to_pylist()) == list(range(count))
        with pytest.raises(TidemillError, match="disk is full"):
            table.upsert(numbered(10_000, 1))


def test_tables_are_read_on_a_full_disk_also_after_a_crash_and_deleting_makes_room(disk: Path) -> None:
    with NodeProcess(disk, disk_reserve_bytes=64 * 1024 * 1024) as node:
        admin = admin_of(node)
        admin.create_topics([NewTopic("large", 1, 1)])["large"].result(120)
        with tidemill.connect(node.bootstrap_servers) as db:
            table = db.create_table("shop.orders", "id bigint, v string", primary_key="id", buckets=4)
            table.upsert(numbered(0, 500))
        assert produce(node, "a") is None
        producer = Producer({"bootstrap.servers": node.bootstrap_servers, "log_level": 0})
        for _ in range(6):
            producer.produce("large", b"x" * 900_000)
        producer.flush(120)
        fill(disk)
        node.kill()
        node.start()
        assert problems(node)[0].startswith("disk full: ")
        check_tables_are_read_and_not_written(node, 500)
        assert read_all(node, 1) == ["a"]
        with RawClient(node.address) as client:
            client.request("ApiVersions", 2, {})
            assert client.produce("t", plain_batch("x")).error_code == ErrorCode.kafka_storage_error
        with pytest.raises(KafkaException, match="KAFKA_STORAGE_ERROR"):
            admin.create_topics([NewTopic("more", 1, 1)])["more"].result(120)
        # Again, now that the reserve is given up: from the room that is left of it.
        node.kill()
        node.start()
        check_tables_are_read_and_not_written(node, 500)
        assert "the reserve is given up" in problems(node)[0]
        admin.delete_topics(["large"])["large"].result(120)
        wait_until(lambda: not problems(node), "the node goes on by itself with the room of the topic")
        assert (disk / "disk-reserve").stat().st_size == DISK_BYTES // 16
        assert produce(node, "b") is None
        with tidemill.connect(node.bootstrap_servers) as db:
            table = db.table("shop.orders")
            table.upsert(numbered(500, 1))
            assert table.scan().count() == 501


def test_a_topic_is_deleted_with_no_byte_free(disk: Path) -> None:
    with NodeProcess(disk) as node:
        admin = admin_of(node)
        admin.create_topics([NewTopic("large", 1, 1)])["large"].result(120)
        producer = Producer({"bootstrap.servers": node.bootstrap_servers, "log_level": 0})
        for _ in range(4):
            producer.produce("large", b"x" * 900_000)
        producer.flush(120)
        consumer = Consumer({"bootstrap.servers": node.bootstrap_servers, "group.id": "g", "log_level": 0})
        consumer.commit(offsets=[TopicPartition("large", 0, 2)], asynchronous=False)
        consumer.close()
        fill(disk)
        place = TopicPartition("large", 0, 2)
        assert admin.delete_records([place])[place].result(120).low_watermark == 2
        admin.delete_topics(["large"])["large"].result(120)
        wait_until(lambda: not problems(node), "the node takes note of the room")
        assert produce(node, "b") is None


def test_a_start_on_a_full_disk_without_a_reserve_serves_topics_and_says_what_is_missing(disk: Path) -> None:
    with NodeProcess(disk) as node:
        with tidemill.connect(node.bootstrap_servers) as db:
            db.create_table("shop.orders", "id bigint, v string", primary_key="id").upsert(numbered(0, 10))
        assert produce(node, "a") is None
        node.kill()
        (disk / "disk-reserve").unlink()
        filler = fill(disk)
        node.start()
        assert read_all(node, 1) == ["a"]
        assert "the reserve is given up" in problems(node)[0]
        with tidemill.connect(node.bootstrap_servers, timeout_ms=3_000) as db:
            table = db.table("shop.orders")
            with pytest.raises(TidemillError, match="No space left"):
                table.lookup([{"id": 1}])
        filler.unlink()
        wait_until(lambda: not problems(node), "the node goes on by itself")
        with tidemill.connect(node.bootstrap_servers) as db:
            assert db.table("shop.orders").scan().count() == 10


def subscribed(node: NodeProcess, protocol: str, group: str) -> tuple[str | None, str | None]:
    """The first record that a member of a group reads; or the first error that it is told.

    Each group is in a partition of its own that has no files before.
    """
    settings = {"bootstrap.servers": node.bootstrap_servers, "group.id": group, "log_level": 0}
    settings |= {"auto.offset.reset": "earliest", "group.protocol": protocol}
    consumer = Consumer(settings | {"enable.auto.commit": False})
    consumer.subscribe(["t"])
    try:
        record = consumer.poll(60)
        assert record is not None, "neither a record nor an error within a minute"
        if record.error() is not None:
            return None, record.error().str()
        return record.value().decode(), None
    finally:
        consumer.close()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_that_subscribes_reads_on_a_full_disk_also_after_a_crash(disk: Path, protocol: str) -> None:
    with NodeProcess(disk, disk_reserve_bytes=64 * 1024 * 1024) as node:
        assert produce(node, "a") is None
        assert subscribed(node, protocol, "before") == ("a", None)
        fill(disk)
        for group in ("new", "before"):
            assert subscribed(node, protocol, group) == ("a", None)
        assert "the reserve is given up" in problems(node)[0]
        assert produce(node, "no room") is not None
        node.kill()
        node.start()
        for group in ("newer", "new"):
            assert subscribed(node, protocol, group) == ("a", None)
        consumer = Consumer({"bootstrap.servers": node.bootstrap_servers, "group.id": "g", "log_level": 0})
        with pytest.raises(KafkaException):
            consumer.commit(offsets=[TopicPartition("t", 0, 1)], asynchronous=False)
        consumer.close()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_that_cannot_join_for_want_of_space_is_told_so(disk: Path, protocol: str) -> None:
    with NodeProcess(disk, disk_reserve_bytes=0) as node:
        assert produce(node, "a") is None
        assert subscribed(node, protocol, "before") == ("a", None)
        filler = fill(disk)
        found, error = subscribed(node, protocol, "new")
        assert found is None
        assert error
        filler.unlink()
        wait_until(lambda: not problems(node), "the node takes note of the room")
        assert subscribed(node, protocol, "new") == ("a", None)
