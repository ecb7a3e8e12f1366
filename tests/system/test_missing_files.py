"""A partition that had data and has no files stops, says so, and starts again once its loss is accepted."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import tidemill
from tidemill.embedded.node import EmbeddedNode
from tidemill.errors import TidemillError

ROWS = 60


def tidemill_log(*arguments: str, data: Path, exit_code: int = 0) -> list[dict[str, Any]]:
    """What ``tidemill log …`` says of the partitions."""
    done = subprocess.run(
        [sys.executable, "-m", "tidemill.cli", "log", *arguments, "--data", str(data), "--format", "json"],
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == exit_code, (done.returncode, done.stdout, done.stderr)
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def directories(data: Path, topic: str) -> list[Path]:
    return sorted((data / "logs" / topic).iterdir(), key=lambda path: int(path.name.partition("-")[2]))


def rows_of(db: EmbeddedNode) -> dict[int, str]:
    found = db.table("shop.orders").scan().to_arrow()
    return dict(zip(found["id"].to_pylist(), found["v"].to_pylist(), strict=True))


def problems(db: EmbeddedNode) -> list[str]:
    return db._node.problems()


def produce(db: EmbeddedNode, value: str) -> int | KafkaError:
    """The offset of a record that was written to ``plain``, or why it was not."""
    told: list[int | KafkaError] = []
    producer = Producer({"bootstrap.servers": db.bootstrap_servers, "message.timeout.ms": 3_000})
    producer.produce("plain", value, on_delivery=lambda error, sent: told.append(error or sent.offset()))
    producer.flush(120)
    return told[0]


def consume(db: EmbeddedNode, offset: int, count: int) -> list[tuple[int, str]]:
    consumer = Consumer({"bootstrap.servers": db.bootstrap_servers, "group.id": "g"})
    consumer.assign([TopicPartition("plain", 0, offset)])
    found = consumer.consume(count, timeout=120)
    consumer.close()
    assert not any(record.error() for record in found)
    return [(record.offset(), record.value().decode()) for record in found]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The files of a node with a topic and a table of two buckets, after an orderly stop."""
    path = tmp_path / "data"
    with tidemill.open(path) as db:
        table = db.create_table("shop.orders", "id bigint, v string", primary_key="id", buckets=2)
        table.upsert([{"id": number, "v": "old"} for number in range(ROWS)])
        table.create_snapshot()
        table.upsert([{"id": number, "v": "new"} for number in range(ROWS)])
        assert len(rows_of(db)) == ROWS
        assert [produce(db, str(number)) for number in range(3)] == [0, 1, 2]
    return path


def test_a_topic_whose_directory_is_gone_stops_and_starts_again_behind_its_old_offsets(data: Path) -> None:
    (lost,) = directories(data, "plain")
    shutil.rmtree(lost.parent)
    with tidemill.open(data) as db:
        (problem,) = problems(db)
        assert lost.name in problem
        assert "tidemill log repair plain:0 --accept-loss" in problem
        refused = produce(db, "too early")
        assert isinstance(refused, KafkaError)
        assert len(rows_of(db)) == ROWS, "the others go on"
    (report,) = [each for each in tidemill_log("verify", data=data, exit_code=1) if not each["ok"]]
    assert (report["topic"], report["problems"][0]["kind"]) == ("plain", "missing")
    (plan,) = tidemill_log("repair", "plain", "--execute", data=data, exit_code=1)
    assert not plan["executed"]
    assert "--accept-loss" in plan["refused"]
    (plan,) = tidemill_log("repair", "plain", "--accept-loss", "--execute", data=data)
    assert plan["executed"]
    tidemill_log("verify", data=data)
    with tidemill.open(data) as db:
        assert problems(db) == []
        offset = produce(db, "new")
        assert isinstance(offset, int)
        assert offset >= 3, "no offset of a lost record is given to another one"
        # A consumer that had read up to the loss goes on from there, and one that begins at the start does.
        assert consume(db, 3, 1) == consume(db, 0, 1) == [(offset, "new")]


@pytest.mark.parametrize("state", ["live", "snapshot", "none"])
def test_a_table_without_the_log_of_a_bucket_keeps_what_its_state_has(data: Path, state: str) -> None:
    lost, _ = directories(data, "shop.orders")
    shutil.rmtree(lost)
    kv = data / "kv" / lost.name
    if state == "snapshot":
        shutil.rmtree(kv / "live")
    elif state == "none":
        shutil.rmtree(kv)
    before = sorted(path.name for path in kv.glob("*"))
    with tidemill.open(data) as db:
        assert "shop.orders:0 --accept-loss" in problems(db)[0]
        with pytest.raises(TidemillError, match="are gone"):
            rows_of(db)
    assert sorted(path.name for path in kv.glob("*")) == before, "nothing of the state is set aside"
    tidemill_log("repair", "shop.orders:0", "--accept-loss", "--execute", data=data)
    with tidemill.open(data) as db:
        assert problems(db) == []
        found = rows_of(db)
        table = db.table("shop.orders")
        kept = {"live": {"new"}, "snapshot": {"old", "new"}, "none": {"new"}}[state]
        assert set(found.values()) == kept
        assert (len(found) == ROWS) == (state != "none")
        table.upsert([{"id": number, "v": "again"} for number in range(ROWS)])
        assert set(rows_of(db).values()) == {"again"}
    with tidemill.open(data) as db:
        assert set(rows_of(db).values()) == {"again"}
    tidemill_log("verify", data=data)


def test_a_partition_whose_files_come_back_goes_on_as_if_nothing_had_been(data: Path, tmp_path: Path) -> None:
    (lost,) = directories(data, "plain")
    shutil.move(lost, tmp_path / "aside")
    with tidemill.open(data) as db:
        assert len(problems(db)) == 1
    shutil.move(tmp_path / "aside", lost)
    with tidemill.open(data) as db:
        assert problems(db) == []
        assert consume(db, 0, 3) == [(0, "0"), (1, "1"), (2, "2")]


def test_a_topic_whose_files_are_gone_can_be_deleted(data: Path) -> None:
    (lost,) = directories(data, "plain")
    shutil.rmtree(lost.parent)
    with tidemill.open(data) as db:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "tidemill.cli",
                "topic",
                "delete",
                "plain",
                "--yes",
                "--server",
                db.bootstrap_servers,
            ],
            check=True,
            timeout=120,
        )
        assert problems(db) == []
    with tidemill.open(data) as db:
        assert problems(db) == []


def test_committed_offsets_whose_files_are_gone_are_not_taken_for_none(data: Path) -> None:
    settings = {"group.id": "g", "enable.auto.commit": False}
    place = TopicPartition("plain", 0, 2)
    with tidemill.open(data, offsets_topic_partitions=1) as db:
        consumer = Consumer({"bootstrap.servers": db.bootstrap_servers, **settings})
        consumer.commit(offsets=[place], asynchronous=False)
        consumer.close()
    shutil.rmtree(data / "logs" / "__consumer_offsets")
    with tidemill.open(data) as db:
        assert "__consumer_offsets:0 --accept-loss" in "".join(problems(db))
        consumer = Consumer({"bootstrap.servers": db.bootstrap_servers, **settings})
        with pytest.raises(KafkaException):
            consumer.committed([place], timeout=3)
        consumer.close()


def test_topic_consume_shows_what_there_is_and_names_the_stopped_partition(data: Path) -> None:

    with tidemill.open(data) as db:
        admin = AdminClient({"bootstrap.servers": db.bootstrap_servers})
        admin.create_topics([NewTopic("halves", 2)])["halves"].result(120)
        producer = Producer({"bootstrap.servers": db.bootstrap_servers})
        for index in range(2):
            producer.produce("halves", f"of {index}", partition=index)
        assert producer.flush(120) == 0
    shutil.rmtree(directories(data, "halves")[1])
    with tidemill.open(data) as db:
        command = [sys.executable, "-m", "tidemill.cli", "topic", "consume", "halves", "--exit"]
        done = subprocess.run(
            [*command, "--server", db.bootstrap_servers], capture_output=True, timeout=120, text=True
        )
    assert (done.returncode, done.stdout) == (1, "of 0\n"), done
    assert "halves-1 has no leader and cannot be read (LEADER_NOT_AVAILABLE)" in done.stderr
    assert "tidemill doctor" in done.stderr
