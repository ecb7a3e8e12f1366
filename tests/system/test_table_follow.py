"""Rows and then changes: every change after the scan's offset is seen once, and in order.

What ``follow()`` gives is compared record by record with the log as a Kafka client reads it: the final state
alone would not show a change that was lost, repeated or out of place.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidemill
from support.processes import ClientProcess, NodeProcess, wait_until
from support.seeds import choose_seed
from support.table_following import Follower, Seen
from support.table_nodes import SOON, new_name, records_of
from tidemill.client.sync_client import Tidemill
from tidemill.client.sync_table import Table
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError

_BUCKETS = 3
_JSON = "id string, writer string, n bigint"


@pytest.fixture(scope="module")
def table_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("tables") / "data", **SOON) as running:
        yield running


@pytest.fixture(scope="module")
def db(table_node: NodeProcess) -> Iterator[Tidemill]:
    with tidemill.connect(table_node.bootstrap_servers) as connected:
        yield connected


@pytest.fixture(scope="module")
def kafka(table_node: NodeProcess, start_shared_client: Any) -> ClientProcess:
    client: ClientProcess = start_shared_client("table_kafka", table_node)
    return client


def json_table(db: Tidemill, **options: Any) -> Table:
    return db.create_table(
        new_name("followed"), _JSON, primary_key="id", buckets=_BUCKETS, row_format="json", **options
    )


def log_of(kafka: ClientProcess, topic: str, columns: list[str]) -> dict[int, list[Seen]]:
    """The committed records of each bucket, as changes."""
    log: dict[int, list[Seen]] = {bucket: [] for bucket in range(_BUCKETS)}
    for bucket, offset, key, value in kafka.call("read", topic=topic, partitions=_BUCKETS):
        row = {"id": key} if value is None else json.loads(value)
        op = "delete" if value is None else "upsert"
        log[bucket].append(Seen(topic, bucket, offset, op, {name: row.get(name) for name in columns}))
    return log


def ends_of(log: dict[int, list[Seen]], topic: str) -> dict[tuple[str, int], int]:
    return {(topic, bucket): records[-1].offset + 1 for bucket, records in log.items() if records}


def offsets_now(table: Table) -> dict[tuple[str, int], int]:
    """The log offset of each bucket's present state."""
    scan = table.scan()
    scan.to_arrow()
    return scan.log_offsets


def fold(records: list[Seen]) -> dict[str, dict[str, Any]]:
    state: dict[str, dict[str, Any]] = {}
    for record in records:
        if record.op == "delete":
            state.pop(record.row["id"], None)
        else:
            state[record.row["id"]] = record.row
    return state


def assert_follows(follower: Follower, log: dict[int, list[Seen]], topic: str) -> None:
    """The rows are the log's fold at some offset of each bucket, and the changes all that is behind it."""
    rows = {row["id"]: row for row in follower.snapshot}
    assert len(rows) == len(follower.snapshot)
    state: dict[str, dict[str, Any]] = {}
    for bucket, records in log.items():
        seen = follower.of(topic, bucket)
        # The first change tells where the rows end; nothing came behind the rows if there is none.
        first = seen[0].offset if seen else records[-1].offset + 1 if records else 0
        before = [record for record in records if record.offset < first]
        assert seen == [record for record in records if record.offset >= first]
        state |= fold(before)
    assert rows == state


# --- the issue's own case


def test_changes_of_a_kafka_client_are_seen_once_and_in_order_through_kills(
    tmp_path: Path, start_client: Any
) -> None:
    seed = choose_seed("TABLE_FOLLOW_SEED")
    with (
        NodeProcess(tmp_path / "data", **SOON) as node,
        tidemill.connect(node.bootstrap_servers) as db,
    ):
        table = json_table(db)
        writer, reader = (start_client("table_kafka", node) for _ in range(2))
        for name in ("one", "two"):
            writer.call("start_changes", topic=table.name, name=name, keys=40, seed=seed)
        writer.call("wait_for_changes", name="one", more=10)
        with Follower(node.bootstrap_servers, table.name) as early:
            writer.call("wait_for_changes", name="one", more=10)
            with Follower(node.bootstrap_servers, table.name) as late:
                for how in ("kill", "stop"):
                    writer.call("wait_for_changes", name="two", more=10)
                    getattr(node, how)()
                    node.start()
                writer.call("wait_for_changes", name="one", more=20)
                outcomes = [writer.call("stop_changes", name=name) for name in ("one", "two")]
                log = log_of(reader, table.name, table.schema.names)
                for follower in (early, late):
                    follower.wait_for(ends_of(log, table.name))
        for follower in (early, late):
            assert_follows(follower, log, table.name)
            assert len(follower.changes) > 100
        for outcome in outcomes:
            assert outcome["failures"] == []
            assert outcome["committed"] > 20
            assert outcome["aborted"] > 5
        assert len(early.changes) > len(late.changes)
        scanned = {row["id"]: row for row in table.scan().to_arrow().to_pylist()}
        assert scanned == {key: row for records in log.values() for key, row in fold(records).items()}


def test_a_follow_that_ends_now_has_exactly_what_is_committed(db: Tidemill, kafka: ClientProcess) -> None:
    table = json_table(db)

    def rows(first: int, count: int) -> list[Any]:
        return [(f"k{n}", {"id": f"k{n}", "writer": "w", "n": n}) for n in range(first, first + count)]

    kafka.call("write", topic=table.name, changes=rows(0, 30))
    offsets = offsets_now(table)
    kafka.call("transact", transactional_id="held", parts=[(table.name, rows(30, 10))], end="open")
    kafka.call("write", topic=table.name, changes=[*rows(0, 5), ("k6", None)])
    # What is behind an open transaction is not stable: neither rows nor changes have it.
    seen = records_of(table.follow(until_now=True))
    assert [op for *_, op, _ in seen] == ["snapshot"] * 30
    assert records_of(table.follow(snapshot=False, from_offsets=offsets, until_now=True)) == []
    kafka.call("finish", transactional_id="held", end="commit")
    log = log_of(kafka, table.name, table.schema.names)
    begun = table.follow(snapshot=False, from_offsets=dict.fromkeys(offsets, 0), until_now=True)
    changes = [Seen(*each) for each in records_of(begun)]
    for bucket in range(_BUCKETS):
        assert [seen for seen in changes if seen.bucket == bucket] == log[bucket]
    assert len(changes) == 46


def test_a_follow_goes_on_where_another_one_stopped(db: Tidemill, kafka: ClientProcess) -> None:
    table = json_table(db)
    changes = [(f"k{n % 17}", {"id": f"k{n % 17}", "writer": "w", "n": n}) for n in range(500)]
    kafka.call("write", topic=table.name, changes=changes, **{"batch.num.messages": 7, "linger.ms": 0})
    seen: list[Seen] = []
    positions: dict[tuple[str, int], int] = {(table.name, bucket): 0 for bucket in range(_BUCKETS)}
    while len(seen) < len(changes):
        for batch in table.follow(snapshot=False, from_offsets=positions, until_now=True):
            seen += [Seen(batch.topic, c.bucket, c.offset, c.op, c.row) for c in batch]
            positions[batch.topic, batch.bucket] = batch.next_offset
            break
    log = log_of(kafka, table.name, table.schema.names)
    for bucket in range(_BUCKETS):
        assert [each for each in seen if each.bucket == bucket] == log[bucket]


def test_an_offset_in_the_middle_of_a_batch_is_where_a_follow_begins(db: Tidemill) -> None:
    table = db.create_table(new_name("middle"), "id bigint, v string", primary_key="id")
    table.upsert([{"id": n, "v": f"v{n}"} for n in range(100)])
    for first in (0, 1, 50, 99, 100):
        follow = table.follow(snapshot=False, from_offsets={(table.name, 0): first}, until_now=True)
        assert [offset for _, _, offset, _, _ in records_of(follow)] == list(range(first, 100))


def test_offsets_that_the_log_has_not_reached_are_refused(db: Tidemill) -> None:
    table = db.create_table(new_name("ahead"), "id bigint", primary_key="id")
    table.upsert([{"id": n} for n in range(5)])
    assert records_of(table.follow(from_offsets={(table.name, 0): 5}, until_now=True)) == []
    for until_now in (True, False):
        follow = table.follow(from_offsets={(table.name, 0): 6}, until_now=until_now)
        with pytest.raises(ApiError, match="there is no") as caught:
            next(iter(follow))
        assert caught.value.code == ErrorCode.offset_out_of_range


def test_changes_are_arrow_with_what_happened_in_columns_of_their_own(db: Tidemill) -> None:
    # Also where a deletion has no value for a column that every row must have.
    table = db.create_table(new_name("columns"), "id bigint, v string not null", primary_key="id")
    before_ms = int(time.time() * 1000) - 60_000
    table.upsert([{"id": 1, "v": "a"}, {"id": 2, "v": "b"}])
    table.delete(1)
    follow = table.follow(snapshot=False, from_offsets={(table.name, 0): 0}, until_now=True)
    found = pa.Table.from_batches([batch.to_arrow() for batch in follow]).to_pylist()
    assert all(before_ms < row.pop("_tidemill_timestamp_ms") < before_ms + 3_600_000 for row in found)
    marks = ("_tidemill_op", "_tidemill_bucket", "_tidemill_offset")
    assert [tuple(row.pop(name) for name in marks) for row in found] == [
        ("upsert", 0, 0),
        ("upsert", 0, 1),
        ("delete", 0, 2),
    ]
    assert found == [{"id": 1, "v": "a"}, {"id": 2, "v": "b"}, {"id": 1, "v": None}]
    (rows,) = table.follow(until_now=True)
    (change, *_) = table.follow(snapshot=False, from_offsets={(table.name, 0): 0}, until_now=True)
    assert rows.to_arrow().schema == change.to_arrow().schema
    assert rows.to_arrow().to_pylist() == [
        {
            "id": 2,
            "v": "b",
            "_tidemill_op": "snapshot",
            "_tidemill_bucket": -1,
            "_tidemill_offset": -1,
            "_tidemill_timestamp_ms": -1,
        }
    ]


def test_changes_from_now_on_have_nothing_of_before(table_node: NodeProcess, db: Tidemill) -> None:
    table = db.create_table(new_name("now"), "id bigint, v string", primary_key="id", buckets=2)
    table.upsert([{"id": n, "v": "before"} for n in range(20)])
    with Follower(table_node.bootstrap_servers, table.name, snapshot=False) as follower:
        # Written again and again until the follower has begun: only it knows when that is.
        numbers = iter(range(1_000_000))

        def written_and_seen() -> bool:
            table.upsert({"id": 1, "v": f"after{next(numbers)}"})
            return bool(follower.changes)

        wait_until(written_and_seen, "a change")
    assert {seen.row["id"] for seen in follower.changes} == {1}
    assert all(seen.row["v"].startswith("after") for seen in follower.changes)
    offsets = [seen.offset for seen in follower.changes]
    assert offsets == list(range(offsets[0], offsets[0] + len(offsets)))


# --- tables that change


def test_a_partition_that_appears_meanwhile_is_followed_from_its_beginning(
    table_node: NodeProcess, db: Tidemill, kafka: ClientProcess
) -> None:
    table = db.create_table(
        new_name("parted"),
        "day string, id bigint, v string",
        primary_key=["day", "id"],
        partition_by="day",
        buckets=_BUCKETS,
        row_format="json",
    )

    def rows(day: str, count: int, word: str) -> list[dict[str, Any]]:
        return [{"day": day, "id": n, "v": word} for n in range(count)]

    table.upsert(rows("mon", 20, "first"))
    with Follower(table_node.bootstrap_servers, table.name) as follower:
        wait_until(lambda: len(follower.snapshot) == 20 or follower.failure, "the rows")
        table.upsert(rows("mon", 10, "second"))
        table.upsert(rows("tue", 30, "first"))
        table.delete([("tue", n) for n in range(10)])
        table.upsert(rows("wed", 3, "first"))
        written = {place: at for place, at in offsets_now(table).items() if at}
        follower.wait_for(written)
        # Dropped, and made again under the same name.
        table.drop_partition("wed")
        table.upsert(rows("wed", 2, "again"))
        wait_until(
            lambda: [seen.row["v"] for seen in follower.changes].count("again") == 2 or follower.failure,
            "changes of the new partition",
        )
    for day, count in (("mon", 10), ("tue", 40)):
        topic = f"{table.name}.{day}"
        records = kafka.call("read", topic=topic, partitions=_BUCKETS)
        records = [record for record in records if day != "mon" or '"second"' in record[3]]
        assert len(records) == count
        seen = [(each.bucket, each.offset, each.row) for each in follower.changes if each.topic == topic]
        for bucket in range(_BUCKETS):
            expected = []
            for index, offset, key, value in records:
                if index == bucket:
                    row = dict(zip(("day", "id"), json.loads(key), strict=True)) | {"v": None}
                    expected.append((bucket, offset, row if value is None else json.loads(value)))
            assert [each for each in seen if each[0] == bucket] == expected
    assert len([seen for seen in follower.changes if seen.row["day"] == "wed"]) == 5


@pytest.mark.parametrize("row_format", ["row", "json"])
def test_a_follow_goes_on_across_an_added_column(
    table_node: NodeProcess, db: Tidemill, row_format: str
) -> None:
    table = db.create_table(
        new_name("widened"), "id bigint, v string", primary_key="id", buckets=2, row_format=row_format
    )
    table.upsert([{"id": n, "v": "first"} for n in range(10)])
    with Follower(table_node.bootstrap_servers, table.name) as follower:
        wait_until(lambda: len(follower.snapshot) == 10 or follower.failure, "the rows")
        table.upsert([{"id": n, "v": "second"} for n in range(10)])
        table.alter(add_columns="more array<int>")
        table.upsert([{"id": n, "v": "third", "more": [n]} for n in range(10)])
        table.delete([3, 4])
        follower.wait_for(offsets_now(table))
    assert Counter(seen.op for seen in follower.changes) == {"upsert": 20, "delete": 2}
    for n in range(10):
        rows = [seen.row for seen in follower.changes if seen.row["id"] == n]
        assert [row["v"] for row in rows] == ["second", "third", None][: 3 if n in (3, 4) else 2]
        assert rows[1] == {"id": n, "v": "third", "more": [n]}
        assert "more" not in rows[0] or rows[0]["more"] is None


def test_a_follow_of_a_table_that_is_dropped_ends_with_an_error(
    table_node: NodeProcess, db: Tidemill
) -> None:
    table = db.create_table(new_name("dropped"), "id bigint", primary_key="id")
    table.upsert([{"id": n} for n in range(10)])
    with Follower(table_node.bootstrap_servers, table.name) as follower:
        wait_until(lambda: len(follower.snapshot) == 10, "the rows")
        table.drop()
        wait_until(lambda: follower.failure is not None, "the end")
        failure, follower.failure = follower.failure, None
    assert isinstance(failure, TableError)
    assert failure.table_code == TableCode.table_not_found


# --- leases


def test_a_lease_is_followed_across_a_restart_without_a_gap_although_the_log_is_compacted(
    tmp_path: Path,
) -> None:
    properties = {
        "internal.segment.bytes": "4000",
        "min.cleanable.dirty.ratio": "0.01",
        "delete.retention.ms": "0",
        "snapshot.log.bytes": "4000",
    }
    written: dict[int, list[str | None]] = {n: [] for n in range(20)}
    with (
        NodeProcess(tmp_path / "data", **SOON) as node,
        tidemill.connect(node.bootstrap_servers) as db,
    ):
        table = db.create_table(
            new_name("leased"), "id bigint, v string", primary_key="id", buckets=2, properties=properties
        )

        def write(word: str) -> None:
            for number in range(30):
                table.upsert([{"id": n, "v": f"{word}{number}"} for n in range(20)])
                table.delete([number % 20])
                for n in range(20):
                    written[n] += [f"{word}{number}", *([None] if n == number % 20 else [])]

        write("before")
        before = {row["id"]: row["v"] for row in table.scan().to_arrow().to_pylist()}
        held = table.lease(duration_ms=600_000, fresh=True).acquire()
        written = {n: [] for n in range(20)}
        write("between")
        node.kill()
        node.start()
        write("after")
        table.create_snapshot()
        whole = table.follow(snapshot=False, from_offsets=dict.fromkeys(held.log_offsets, 0), until_now=True)
        total = sum(held.log_offsets.values())

        def left_before_the_lease() -> int:
            places = [(topic, bucket, offset) for topic, bucket, offset, *_ in records_of(whole)]
            return sum(offset < held.log_offsets[topic, bucket] for topic, bucket, offset in places)

        wait_until(lambda: left_before_the_lease() < total / 2, "that the log before the lease is compacted")
        changes = records_of(table.follow(lease=held, until_now=True))
        db.release_lease(held.lease_id)
    snapshot = {row["id"]: row["v"] for *_, op, row in changes if op == "snapshot"}
    assert snapshot == before
    seen: dict[int, list[str | None]] = {n: [] for n in range(20)}
    for *_, op, row in changes:
        if op != "snapshot":
            seen[row["id"]].append(None if op == "delete" else row["v"])
    assert seen == written
