"""Streams on real Spark: where they begin, how far each batch goes; nothing is lost, nothing read twice."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

import tidemill
from support.processes import NodeProcess
from support.spark import progress_of, run_available, source_progress, stream
from support.table_nodes import SOON, new_name
from tidemill.client.sync_client import Tidemill

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TIDEMILL = str(Path(sys.executable).with_name("tidemill"))
#: Small, so that limits by bytes mean something.
SMALL_BATCH = {"linger.ms": 0, "batch.num.messages": 10}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("node") / "data", **SOON) as running:
        yield running


@pytest.fixture(scope="module")
def client(node: NodeProcess) -> Iterator[Tidemill]:
    with tidemill.connect(node.bootstrap_servers) as connected:
        yield connected


@pytest.fixture
def load(spark: SparkSession, node: NodeProcess) -> Any:
    def reading(name: str | None = None, **options: object) -> DataFrame:
        return stream(spark, node.bootstrap_servers, name, **options)

    return reading


class Collected:
    """Runs a stream until it has everything that is there, and keeps each batch's rows."""

    def __init__(self, checkpoint: Path) -> None:
        self._checkpoint = checkpoint
        self.batches: dict[int, list[Any]] = {}
        self.query: Any = None

    def run(self, frame: DataFrame, *, stop_before: int | None = None) -> list[Any]:
        """The new rows. ``stop_before``: fail instead of running that batch, as if the driver had died."""
        before = set(self.batches)

        def take(batch: DataFrame, number: int) -> None:
            if number == stop_before:
                raise RuntimeError("stopped on purpose")
            self.batches[number] = batch.collect()

        try:
            self.query = run_available(frame.writeStream.foreachBatch(take), self._checkpoint)
        except Exception as error:
            if "stopped on purpose" not in str(error):
                raise
        return [row for number in sorted(set(self.batches) - before) for row in self.batches[number]]

    @property
    def rows(self) -> list[Any]:
        return [row for number in sorted(self.batches) for row in self.batches[number]]


@pytest.fixture
def collected(tmp_path: Path) -> Collected:
    return Collected(tmp_path / "checkpoint")


def produce(node: NodeProcess, topic: str, values: range, partitions: int = 1, **conf: object) -> None:
    producer = Producer({"bootstrap.servers": node.bootstrap_servers, **conf})
    for value in values:
        producer.produce(topic, value=str(value), partition=value % partitions)
        producer.poll(0)
    assert producer.flush(120) == 0


def numbers(rows: list[Any]) -> list[int]:
    return [int(row["value"]) for row in rows]


def make_topic(node: NodeProcess, topic: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": node.bootstrap_servers})
    for done in admin.create_topics([NewTopic(topic, partitions)]).values():
        done.result()


def test_a_stream_goes_on_where_it_was(
    node: NodeProcess, load: Any, topic: str, collected: Collected
) -> None:
    produce(node, topic, range(10))
    frame = load(topic=topic, startingOffsets="earliest")
    assert numbers(collected.run(frame)) == list(range(10))
    assert collected.run(frame) == []
    produce(node, topic, range(10, 15))
    assert numbers(collected.run(frame)) == list(range(10, 15))


def test_without_a_start_only_what_is_new_is_read(
    node: NodeProcess, load: Any, topic: str, collected: Collected
) -> None:
    produce(node, topic, range(10))
    frame = load(topic=topic)
    assert collected.run(frame) == []
    produce(node, topic, range(10, 13))
    assert numbers(collected.run(frame)) == [10, 11, 12]


def test_the_first_batch_is_the_same_after_a_driver_died_in_it(
    node: NodeProcess, load: Any, topic: str, collected: Collected
) -> None:
    # Spark does not store where a query began, and asks anew: "latest" is another place by then.
    produce(node, topic, range(5))
    frame = load(topic=topic, startingOffsets=json.dumps({topic: {"0": 2}}))
    collected.run(frame, stop_before=0)
    produce(node, topic, range(5, 8))
    moved = load(topic=topic, startingOffsets="latest")
    collected.run(moved)
    assert numbers(collected.rows) == [2, 3, 4, 5, 6, 7]


def test_a_stream_begins_at_a_time(node: NodeProcess, load: Any, topic: str, tmp_path: Path) -> None:
    producer = Producer({"bootstrap.servers": node.bootstrap_servers})
    now_ms = time.time_ns() // 1_000_000
    for index, age_ms in enumerate((3_600_000, 900_000, 60_000, 0)):
        producer.produce(topic, value=str(index), partition=0, timestamp=now_ms - age_ms)
    assert producer.flush(120) == 0
    for number, (start, expected) in enumerate(
        [("-10 minutes", [2, 3]), ("-2 hours", [0, 1, 2, 3]), (str(now_ms - 900_000), [1, 2, 3])]
    ):
        found = Collected(tmp_path / str(number)).run(load(topic=topic, startingTime=start))
        assert numbers(found) == expected, start


def test_a_batch_takes_no_more_rows_than_it_may(
    node: NodeProcess, load: Any, topic: str, collected: Collected
) -> None:
    make_topic(node, topic, 3)
    produce(node, topic, range(100), partitions=3)
    collected.run(load(topic=topic, startingOffsets="earliest", maxRowsPerTrigger=30))
    assert sorted(numbers(collected.rows)) == list(range(100))
    assert [len(collected.batches[number]) for number in sorted(collected.batches)] == [30, 30, 30, 10]
    # What is left of the log is in the query's progress.
    behind = [each["sources"][0]["latestOffset"]["rowsBehind"] for each in progress_of(collected.query)]
    assert behind[:4] == [70, 40, 10, 0]


def test_a_batch_takes_about_as_many_bytes_as_it_may(
    node: NodeProcess, load: Any, topic: str, collected: Collected
) -> None:
    producer = Producer({"bootstrap.servers": node.bootstrap_servers, **SMALL_BATCH})
    for index in range(200):
        producer.produce(topic, value=f"{index}".ljust(1_000), partition=0)
        producer.poll(0)
    assert producer.flush(120) == 0
    collected.run(load(topic=topic, startingOffsets="earliest", maxBytesPerTrigger=50_000))
    assert numbers(collected.rows) == list(range(200))
    sizes = [len(rows) for rows in collected.batches.values() if rows]
    # 200 KB and some, in batches of ten records.
    assert 4 <= len(sizes) <= 8
    assert max(sizes) <= 60


def test_partitions_that_come_while_the_query_runs_are_read_from_their_beginning(
    node: NodeProcess, spark: SparkSession, load: Any, topic: str, tmp_path: Path
) -> None:
    produce(node, topic, range(3))
    seen: list[int] = []
    query = (
        load(topic=topic, startingOffsets="earliest")
        .writeStream.foreachBatch(lambda batch, _: seen.extend(numbers(batch.collect())))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .start()
    )
    try:
        _until(lambda: sorted(seen) == [0, 1, 2], query)
        admin = AdminClient({"bootstrap.servers": node.bootstrap_servers})
        for done in admin.create_partitions([NewPartitions(topic, 2)]).values():
            done.result()
        producer = Producer({"bootstrap.servers": node.bootstrap_servers})
        for value in (3, 4):
            producer.produce(topic, value=str(value), partition=1)
        assert producer.flush(120) == 0
        _until(lambda: sorted(seen) == [0, 1, 2, 3, 4], query)
    finally:
        query.stop()


def test_available_now_leaves_what_comes_later_to_the_next_run(
    node: NodeProcess, load: Any, topic: str, tmp_path: Path
) -> None:
    produce(node, topic, range(20))
    found: list[int] = []

    def take(batch: DataFrame, number: int) -> None:
        found.extend(numbers(batch.collect()))
        produce(node, topic, range(100 + number, 101 + number))

    frame = load(topic=topic, startingOffsets="earliest", maxRowsPerTrigger=5)
    run_available(frame.writeStream.foreachBatch(take), tmp_path / "checkpoint")
    assert found == list(range(20))


def test_more_tasks_than_partitions_are_made_if_they_are_wanted(
    node: NodeProcess, spark: SparkSession, load: Any, topic: str, tmp_path: Path
) -> None:
    produce(node, topic, range(40))
    counts: list[tuple[int, int]] = []

    def take(batch: DataFrame, _: int) -> None:
        counts.append((batch.rdd.getNumPartitions(), batch.count()))

    frame = load(topic=topic, startingOffsets="earliest", minPartitions=4)
    run_available(frame.writeStream.foreachBatch(take), tmp_path / "checkpoint")
    assert counts[0] == (4, 40)


def test_progress_is_shown_as_a_group_with_its_lag(
    node: NodeProcess, client: Tidemill, load: Any, topic: str, collected: Collected
) -> None:
    produce(node, topic, range(10))
    collected.run(load(topic=topic, startingOffsets="earliest", groupId=f"group of {topic}"))
    produce(node, topic, range(10, 14))
    command = [TIDEMILL, "group", "describe", f"group of {topic}", "--format", "json"]
    shown = subprocess.run(
        [*command, "--server", node.bootstrap_servers], check=True, capture_output=True, text=True
    )
    # Under AvailableNow too, where Spark never says that the last batch is done.
    assert '"lag": 4' in shown.stdout, shown.stdout
    reported = source_progress(collected.query)["latestOffset"]
    assert reported["group"] == f"group of {topic}"
    assert reported["rowsBehind"] == 0


def test_deleted_records_stop_a_stream_unless_that_is_allowed(
    node: NodeProcess, load: Any, topic: str, collected: Collected
) -> None:
    produce(node, topic, range(10))
    collected.run(load(topic=topic, startingOffsets="earliest"))
    produce(node, topic, range(10, 20))
    admin = AdminClient({"bootstrap.servers": node.bootstrap_servers})
    for done in admin.delete_records([TopicPartition(topic, 0, 15)]).values():
        done.result()
    with pytest.raises(Exception) as error:  # noqa: PT011
        collected.run(load(topic=topic))
    assert "offsets 10 to 14 were deleted" in str(error.value)
    assert "failOnDataLoss" in str(error.value)
    assert numbers(collected.run(load(topic=topic, failOnDataLoss=False))) == list(range(15, 20))


def test_a_topic_that_was_made_anew_stops_a_stream(
    node: NodeProcess, load: Any, topic: str, collected: Collected
) -> None:
    produce(node, topic, range(10))
    collected.run(load(topic=topic, startingOffsets="earliest"))
    admin = AdminClient({"bootstrap.servers": node.bootstrap_servers})
    for done in admin.delete_topics([topic]).values():
        done.result()
    produce(node, topic, range(3))
    with pytest.raises(Exception, match="made anew"):
        collected.run(load(topic=topic))


def test_a_stream_of_a_table_needs_to_be_asked_for_as_changes(client: Tidemill, load: Any) -> None:
    name = new_name("orders")
    client.create_table(name, "id bigint", primary_key="id")
    with pytest.raises(Exception, match="stream of its changes"):
        load(name).writeStream.format("noop").trigger(availableNow=True).start().awaitTermination()


def test_a_typed_log_is_streamed_with_its_columns(client: Tidemill, load: Any, collected: Collected) -> None:
    name = new_name("log")
    table = client.create_table(name, "at bigint, text string")
    table.append([{"at": i, "text": "x"} for i in range(5)])
    frame = load(name, startingOffsets="earliest")
    assert [row["at"] for row in collected.run(frame)] == list(range(5))


# --- snapshot, then changes


class Changing:
    """A table that is written to all the time, and the history of its log."""

    def __init__(self, client: Tidemill, servers: str, buckets: int = 3) -> None:
        self.name = new_name("changing")
        self._servers = servers
        self.table = client.create_table(
            self.name, "id bigint, version bigint, pad string", primary_key="id", buckets=buckets
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._write)

    def _write(self) -> None:
        with tidemill.connect(self._servers) as own:
            table, version = own.table(self.name), 1
            while not self._stop.is_set():
                ids = [(version * 7 + step) % 500 for step in range(20)]
                table.upsert([{"id": id_, "version": version, "pad": "p" * (id_ % 30)} for id_ in ids])
                if version % 3 == 0:
                    table.delete([{"id": (version * 13) % 500}])
                version += 1

    def __enter__(self) -> Changing:
        self.table.upsert([{"id": i, "version": 0, "pad": "first"} for i in range(500)])
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def log(self) -> list[tuple[int, int, str, int, int | None]]:
        """Every change: bucket, offset, what happened, key, version."""
        return [
            (batch.bucket, change.offset, change.op, change.row["id"], change.row["version"])
            for batch in self.table.follow(
                from_offsets=dict.fromkeys(self.topic_partitions(), 0), until_now=True
            )
            for change in batch
        ]

    def topic_partitions(self) -> list[tuple[str, int]]:
        return [(self.name, bucket) for bucket in range(self.table.buckets)]


def check_snapshot_then_changes(rows: list[Any], began: dict[str, int], changing: Changing) -> None:
    """The snapshot is the state at the offsets where the changes begin; then every change, once, in order."""
    log = changing.log()
    state: dict[int, int | None] = {}
    for bucket, offset, op, key, version in log:
        if offset < began[str(bucket)]:
            state[key] = None if op == "delete" else version
    snapshot = [row for row in rows if row["_tidemill_op"] == "snapshot"]
    assert sorted((row["id"], row["version"]) for row in snapshot) == sorted(
        (key, version) for key, version in state.items() if version is not None
    )
    for bucket in range(changing.table.buckets):
        streamed = [
            (row["_tidemill_offset"], row["_tidemill_op"], row["id"], row["version"])
            for row in rows
            if row["_tidemill_op"] != "snapshot" and row["_tidemill_bucket"] == bucket
        ]
        end = streamed[-1][0] + 1 if streamed else began[str(bucket)]
        written = [entry[1:] for entry in log if entry[0] == bucket and began[str(bucket)] <= entry[1] < end]
        assert streamed == written


def began_at(checkpoint: Path, name: str) -> dict[str, int]:
    """Where the snapshot ends and the changes begin, from Spark's own record of the first batch."""
    first = json.loads((checkpoint / "offsets" / "0").read_text().splitlines()[2])
    began: dict[str, int] = first["began"][name]
    return began


def test_a_snapshot_is_followed_by_every_change_behind_it(
    client: Tidemill, node: NodeProcess, load: Any, tmp_path: Path
) -> None:
    collected = Collected(tmp_path / "checkpoint")
    with Changing(client, node.bootstrap_servers) as changing:
        collected.run(load(changing.name, changes=True, maxRowsPerTrigger=200), stop_before=4)
        frame = load(changing.name, changes=True)
        collected.run(frame)
    collected.run(frame)
    ops = {row["_tidemill_op"] for row in collected.rows}
    assert ops == {"snapshot", "upsert", "delete"}
    check_snapshot_then_changes(collected.rows, began_at(tmp_path / "checkpoint", changing.name), changing)
    assert client.leases() == []


@pytest.mark.parametrize("batch", [0, 1, 2])
def test_a_restart_in_the_middle_of_the_snapshot_reads_the_same_snapshot(
    client: Tidemill, node: NodeProcess, load: Any, tmp_path: Path, batch: int
) -> None:
    collected = Collected(tmp_path / "checkpoint")
    with Changing(client, node.bootstrap_servers) as changing:
        frame = load(changing.name, changes=True, maxRowsPerTrigger=150)
        collected.run(frame, stop_before=batch)
        assert len(client.leases()) == 1
        # What is compacted or overwritten meanwhile must not matter.
        changing.table.create_snapshot()
    collected.run(load(changing.name, changes=True, minPartitions=5))
    check_snapshot_then_changes(collected.rows, began_at(tmp_path / "checkpoint", changing.name), changing)
    assert client.leases() == []


def test_a_lease_that_is_gone_stops_the_query_with_what_to_do(
    client: Tidemill, node: NodeProcess, load: Any, collected: Collected
) -> None:
    with Changing(client, node.bootstrap_servers) as changing:
        frame = load(changing.name, changes=True, maxRowsPerTrigger=150)
        collected.run(frame, stop_before=1)
    for lease in client.leases():
        client.release_lease(lease.lease_id)
    with pytest.raises(Exception) as error:  # noqa: PT011
        collected.run(frame)
    assert "snapshotLease" in str(error.value)
    assert "another checkpoint folder" in str(error.value)


def test_changes_alone_are_read_from_where_it_is_said(
    client: Tidemill, load: Any, collected: Collected
) -> None:
    name = new_name("orders")
    table = client.create_table(name, "id bigint, v bigint", primary_key="id")
    table.upsert([{"id": 1, "v": 1}, {"id": 1, "v": 2}])
    table.delete([{"id": 1}])
    rows = collected.run(load(name, changes=True, startingOffsets="earliest"))
    assert [(row["_tidemill_op"], row["v"]) for row in rows] == [
        ("upsert", 1),
        ("upsert", 2),
        ("delete", None),
    ]


def _until(condition: Callable[[], bool], query: Any) -> None:
    """Wait for a state of a running query; its failure is the test's."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, query.lastProgress
        if query.exception() is not None:
            raise query.exception()
        query.processAllAvailable()


def test_a_stream_takes_over_from_a_cursor_and_hands_its_progress_back(
    load: Any, client: Tidemill, node: NodeProcess, tmp_path: Path
) -> None:
    topic, name = new_name("numbers"), new_name("copying")
    producer = Producer({"bootstrap.servers": node.bootstrap_servers})
    for number in range(30):
        producer.produce(topic, str(number), partition=0)
    producer.flush()
    with client.cursor(name, topic) as cursor:
        assert len(cursor.poll_batch(10)) == 10
        cursor.commit()
        with pytest.raises(Exception, match="in use"):
            Collected(tmp_path / "too early").run(load(None, topic=topic, cursor=name))
    rows = Collected(tmp_path / "checkpoint").run(load(None, topic=topic, cursor=name))
    assert [int(row.value) for row in rows] == list(range(10, 30))
    producer.produce(topic, "30", partition=0)
    producer.flush()
    with client.cursor(name, topic) as cursor:
        assert [each.offset for each in cursor.poll_batch(10)] == [30]
