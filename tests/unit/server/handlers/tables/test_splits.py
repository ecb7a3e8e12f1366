"""SplitBucket and MeasureLog through the wire format."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from support.table_world import TableWorld, batch_of, count_views, rows_of
from tidemill.errors import ErrorCode, TableCode
from tidemill.tables.definition import TableDefinition
from tidemill.tables.scanning import splitting
from tidemill.tables.scanning.sessions import BucketKey

COUNT = 100


def row(number: int, region: str = "eu") -> dict[str, Any]:
    return {"id": number, "region": region, "amount": number / 2}


@pytest.fixture
async def table(world: TableWorld) -> TableDefinition:
    """A hundred rows in one bucket."""
    table = await world.create()
    await world.upsert(table, [row(number) for number in range(COUNT)])
    return table


async def split(world: TableWorld, table: TableDefinition, **more: Any) -> Any:
    body = {
        "table_id": table.table_id,
        "partition_id": table.partitions[0].id,
        "bucket": 0,
        "leader_epoch": -1,
        "pin_id": None,
        "lease_id": None,
        "start_key": None,
        "end_key": None,
        "max_rows": 0,
        "max_bytes": 0,
        "max_pieces": 0,
    }
    return await world.ask("SplitBucket", **{**body, **more})


async def ids_by_piece(
    world: TableWorld, table: TableDefinition, pieces: Any, start: bytes | None = None, **more: Any
) -> list[list[int]]:
    """The ids that scans of the pieces give."""
    found = []
    for piece in pieces:
        response = await world.open_scan(table, start_key=start, end_key=piece.end_key, **more)
        found.append([each["id"] for each in rows_of(response)])
        start = piece.end_key
    return found


def held_views(world: TableWorld, table: TableDefinition) -> int:
    tables = world.broker.tables.loaded
    assert tables is not None
    return count_views(tables.service.bucket(BucketKey(table.table_id, 0, 0)).store)


async def test_scans_of_the_pieces_give_every_row_once(world: TableWorld, table: TableDefinition) -> None:
    answer = await split(world, table, max_rows=30)
    assert held_views(world, table) == 0
    assert [piece.row_count for piece in answer.pieces] == [30, 30, 30, 10]
    assert answer.pieces[-1].end_key is None
    found = await ids_by_piece(world, table, answer.pieces)
    assert [len(each) for each in found] == [30, 30, 30, 10]
    assert [*itertools.chain(*found)] == list(range(COUNT))
    whole = (await split(world, table)).pieces
    assert [(whole[0].row_count, whole[0].size_bytes, whole[0].end_key)] == [
        (COUNT, sum(piece.size_bytes for piece in answer.pieces), None)
    ]


async def test_a_range_is_split_in_answers_of_some_pieces(world: TableWorld, table: TableDefinition) -> None:
    every = (await split(world, table, max_rows=10)).pieces
    start, end = every[1].end_key, every[7].end_key
    first = (await split(world, table, start_key=start, end_key=end, max_rows=25, max_pieces=2)).pieces
    rest = (await split(world, table, start_key=first[-1].end_key, end_key=end, max_rows=25)).pieces
    assert [piece.row_count for piece in [*first, *rest]] == [25, 25, 10]
    assert [piece.end_key is None for piece in [*first, *rest]] == [False, False, True]


async def test_a_pin_is_split_as_it_was(world: TableWorld, table: TableDefinition) -> None:
    pinned = await world.done(
        "PinTable", table_id=table.table_id, min_offsets=(), max_wait_ms=60_000, idle_ms=0
    )
    await world.delete(table, list(range(0, COUNT, 2)))
    now = await split(world, table, max_rows=40)
    then = await split(world, table, max_rows=40, pin_id=pinned.pin_id)
    assert held_views(world, table) == 1
    assert [piece.row_count for piece in now.pieces] == [40, 10]
    assert [piece.row_count for piece in then.pieces] == [40, 40, 20]
    found = await ids_by_piece(world, table, then.pieces, pin_id=pinned.pin_id)
    assert [*itertools.chain(*found)] == list(range(COUNT))
    await world.done("ReleasePin", pin_id=pinned.pin_id)
    gone = await split(world, table, pin_id=pinned.pin_id)
    assert gone.error_code == TableCode.pin_not_found


async def test_a_leased_snapshot_is_split_as_it_was(world: TableWorld, table: TableDefinition) -> None:
    body = {"table": table.name, "holder": "a test", "duration_ms": 60_000, "fresh": True}
    lease = (await world.done("AcquireLease", **body)).lease
    await world.delete(table, list(range(COUNT)))
    assert (await split(world, table)).pieces == ()
    then = await split(world, table, max_rows=40, lease_id=lease.lease_id)
    assert [piece.row_count for piece in then.pieces] == [40, 40, 20]
    found = await ids_by_piece(world, table, then.pieces, lease_id=lease.lease_id)
    assert [*itertools.chain(*found)] == list(range(COUNT))
    world.clock.advance(60_000)
    assert (await split(world, table, lease_id=lease.lease_id)).error_code == TableCode.lease_not_found


async def test_a_walk_that_takes_long_answers_with_what_it_has(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.upsert(table, [row(number) for number in range(1_000)])
    monkeypatch.setattr("tidemill.kv.rocks.view._SLICE_SECONDS", -1.0)
    monkeypatch.setattr(splitting, "_STEP_MS", -1)
    monkeypatch.setattr(splitting, "_WALK_MS_MAX", -1)
    counts: list[int] = []
    start: bytes | None = None
    while not counts or start is not None:
        answer = await split(world, table, max_rows=400, start_key=start)
        counts += [piece.row_count for piece in answer.pieces]
        start = answer.pieces[-1].end_key
    assert sum(counts) == 1_000
    assert len(counts) > 3
    assert max(counts) <= 400


async def test_many_splits_at_a_time_are_all_answered(world: TableWorld, table: TableDefinition) -> None:
    answers = await asyncio.gather(*(split(world, table, max_rows=size) for size in range(1, 20)))
    assert [len(answer.pieces) for answer in answers] == [-(-COUNT // size) for size in range(1, 20)]
    assert held_views(world, table) == 0


async def test_what_cannot_be_split_is_refused(world: TableWorld, table: TableDefinition) -> None:
    assert (await split(world, table, bucket=7)).error_code == TableCode.bucket_not_found
    assert (await split(world, table, table_id=99)).error_code == TableCode.table_not_found
    assert (await split(world, table, leader_epoch=5)).error_code == ErrorCode.unknown_leader_epoch
    log = await world.create("shop.log", primary_key=())
    assert (await split(world, log)).error_code == TableCode.not_a_primary_key_table


# --- measuring


async def measured(world: TableWorld, topic: str, start: int, end: int = -1, max_bytes: int = -1) -> Any:
    wanted = {
        "topic": topic,
        "partition": 0,
        "start_offset": start,
        "end_offset": end,
        "max_bytes": max_bytes,
    }
    response = await world.done("MeasureLog", ranges=[wanted])
    (found,) = response.ranges
    assert (found.topic, found.partition) == (topic, 0)
    return found


async def filled(world: TableWorld) -> tuple[str, int]:
    """A topic with ten batches of three records; and the size of one."""
    await world.ask_kafka(
        "CreateTopics",
        7,
        topics=[{"name": "t", "num_partitions": 1, "replication_factor": 1}],
        timeout=10_000,
    )
    batch = batch_of(*[(b"k", b"v" * 50)] * 3)
    for _ in range(10):
        assert (await world.produce("t", 0, batch)).error_code == 0
    return "t", len(batch)


async def test_a_range_of_a_log_is_measured_and_shortened(world: TableWorld) -> None:
    topic, size = await filled(world)
    whole = await measured(world, topic, 0)
    assert (whole.error_code, whole.log_start_offset, whole.end_offset, whole.size_bytes) == (
        0,
        0,
        30,
        10 * size,
    )
    assert (await measured(world, topic, 3, 9)).size_bytes == 2 * size
    cut = await measured(world, topic, 3, -1, 2 * size + 1)
    assert (cut.end_offset, cut.size_bytes) == (9, 2 * size)
    least = await measured(world, topic, 3, -1, 0)
    assert (least.end_offset, least.size_bytes) == (6, size)
    at_the_end = await measured(world, topic, 30, -1, 0)
    assert (at_the_end.error_code, at_the_end.end_offset, at_the_end.size_bytes) == (0, 30, 0)


async def test_a_range_that_is_not_in_the_log_says_what_is(world: TableWorld) -> None:
    topic, _ = await filled(world)
    partition = world.broker.find.partition(world.broker.find.topic(topic), 0)
    partition.delete_records(6)
    for start, end in ((0, -1), (5, 9), (31, -1), (9, 31)):
        found = await measured(world, topic, start, end)
        assert found.error_code == ErrorCode.offset_out_of_range
        assert (found.log_start_offset, found.end_offset, found.size_bytes) == (6, 30, 0)
    backwards = await measured(world, topic, 12, 9)
    assert backwards.error_code == ErrorCode.invalid_request
    assert "start at offset 12 and end at 9" in backwards.error_message


async def test_a_range_of_nothing_leaves_the_others_alone(world: TableWorld) -> None:
    topic, size = await filled(world)
    ranges = [
        {"topic": name, "partition": index, "start_offset": 0, "end_offset": -1, "max_bytes": -1}
        for name, index in (("nowhere", 0), (topic, 0), (topic, 3))
    ]
    found = (await world.done("MeasureLog", ranges=ranges)).ranges
    unknown = ErrorCode.unknown_topic_or_partition
    assert [(each.error_code, each.size_bytes) for each in found] == [
        (unknown, 0),
        (ErrorCode.none, 10 * size),
        (unknown, 0),
    ]
    too_many = await world.ask("MeasureLog", ranges=ranges * 4_000)
    assert too_many.error_code == ErrorCode.invalid_request
    assert "several requests" in too_many.error_message
