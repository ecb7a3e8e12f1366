"""Reading a region with a cursor: order, limits, filters on the server, gaps, positions the log has not."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.client.admin.topics import delete_records
from tidemill.client.async_client import connect_async
from tidemill.client.cursors.records import arrivals_of, decode_records
from tidemill.cursors.errors import CheckpointBelowLogStart
from tidemill.cursors.position import Gap, Position, Reason
from tidemill.cursors.walking import Skipped
from tidemill.errors import ApiError, ConfigError, ConnectionClosed, TableError
from tidemill.records.record import Record, build_batch

World = Any


def values(records: list[Any]) -> list[bytes]:
    return [each.value for each in records]


def drained(cursor: Any, limit: int = 1_000) -> list[Any]:
    """Everything that is there now: an answer may take longer than the first poll waits for it."""
    found: list[Any] = []
    while batch := cursor.poll_batch(limit, timeout_ms=0) or cursor.poll_batch(limit, timeout_ms=500):
        found += batch
    return found


def test_records_come_in_order_and_at_most_as_many_as_asked_for(world: World) -> None:
    topic = world.topic()
    world.send(topic, range(150))
    with world.db.cursor(None, topic) as cursor:
        batches = [cursor.poll_batch(64) for _ in range(3)]
        assert [len(batch) for batch in batches] == [64, 64, 22]
        assert [each.value for batch in batches for each in batch] == [
            str(number).encode() for number in range(150)
        ]
        assert cursor.poll_batch(64, timeout_ms=0) == []


def test_poll_gives_one_record_with_all_that_it_is(world: World) -> None:
    topic = world.topic()
    world.send_records(topic, [Record(b"k", b"v", 77, (("h", b"1"), ("n", None)))])
    with world.db.cursor(None, topic) as cursor:
        record = cursor.poll()
        assert record == (b"k", b"v", 77, (("h", b"1"), ("n", None)), 0, topic, 0)
        assert cursor.poll(timeout_ms=0) is None


def test_an_append_wakes_a_cursor_that_waits(world: World) -> None:
    topic = world.topic()
    with world.db.cursor(None, topic) as cursor:
        timer = threading.Timer(0.05, world.send, (topic, ["late"]))
        timer.start()
        assert values(cursor.poll_batch(64, timeout_ms=20_000)) == [b"late"]
        timer.join()


def test_draining_while_others_write_gives_everything_once(world: World) -> None:
    topic = world.topic(2)
    done = threading.Event()

    def write() -> None:
        for number in range(20):
            world.send(topic, range(number * 10, number * 10 + 10), partition=number % 2)
        done.set()

    writer = threading.Thread(target=write)
    found: list[Any] = []
    with world.db.cursor(None, topic) as cursor:
        writer.start()
        while len(found) < 200 or not done.is_set():
            found += cursor.poll_batch(7, timeout_ms=1_000)
        writer.join()
        assert cursor.poll_batch(7, timeout_ms=0) == []
    assert sorted(int(each.value) for each in found) == list(range(200))
    for partition in (0, 1):
        offsets = [each.offset for each in found if each.partition == partition]
        assert offsets == list(range(100))


def test_only_named_partitions_are_read(world: World) -> None:
    topic = world.topic(3)
    for partition in range(3):
        world.send(topic, [partition], partition)
    with world.db.cursor(None, topic, partitions=[2, 0]) as cursor:
        assert sorted(values(drained(cursor))) == [b"0", b"2"]
    with pytest.raises(ConfigError, match="has 3 partitions, numbered from 0: there is no partition 3"):
        world.db.cursor(None, topic, partitions=[3])


def test_keys_are_filtered_by_prefix(world: World) -> None:
    topic = world.topic()
    keys = [b"eu-1", b"us-1", None, b"eu", b"eu-2", b"", b"e"]
    world.send_records(topic, [Record(key, key or b"none", 5) for key in keys])
    with world.db.cursor(None, topic, key_prefix="eu-") as cursor:
        assert values(drained(cursor)) == [b"eu-1", b"eu-2"]
        assert cursor.positions == {0: Position(7, 0, started=True)}
        assert cursor.gaps().ranges == (Gap(0, 1, 3, Reason.FILTERED), Gap(0, 5, 6, Reason.FILTERED))


def test_keys_are_filtered_in_batches_of_many_records(world: World) -> None:
    topic = world.topic()
    world.send_records(
        topic, [Record(b"k%03d" % (number % 100), b"%d" % number, 5) for number in range(5000)]
    )
    with world.db.cursor(None, topic, key_prefix=b"k007") as cursor:
        assert values(drained(cursor)) == [b"%d" % number for number in range(7, 5000, 100)]


def test_headers_are_matched_by_name_and_value(world: World) -> None:
    topic = world.topic()
    found = [
        (("type", b"order"),),
        (("type", b"refund"),),
        (("type", b"refund"), ("type", b"order"), ("eu", None)),
        (),
        (("type", None),),
    ]
    world.send_records(topic, [Record(None, b"%d" % number, 5, each) for number, each in enumerate(found)])
    with world.db.cursor(None, topic, headers={"type": "order"}) as cursor:
        assert values(drained(cursor)) == [b"0", b"2"]
    with world.db.cursor(None, topic, headers={"type": "order", "eu": None}) as cursor:
        assert values(drained(cursor)) == [b"2"]
    with world.db.cursor(None, topic, headers={"type": None}) as cursor:
        assert values(drained(cursor)) == [b"4"]


def test_rows_of_a_table_are_typed_and_filtered(world: World) -> None:
    table = world.db.create_table("cursors.orders", "id bigint, item string, n int", primary_key=["id"])
    table.upsert([{"id": number, "item": "ab"[number % 2], "n": number} for number in range(6)])
    table.delete([3])
    with world.db.cursor(None, "cursors.orders") as cursor:
        rows = drained(cursor)
        assert [(each.op, each.row["id"]) for each in rows] == [
            *(("upsert", number) for number in range(6)),
            ("delete", 3),
        ]
        assert rows[2].row == {"id": 2, "item": "a", "n": 2}
        assert rows[6].row == {"id": 3}
    with world.db.cursor(None, table, where="item = 'a' AND n > 1") as cursor:
        assert [(each.op, each.row["id"]) for each in drained(cursor)] == [
            ("upsert", 2),
            ("upsert", 4),
            ("delete", 3),
        ]
    with world.db.cursor(None, table, where="id >= 4") as cursor:
        assert [(each.op, each.row["id"]) for each in drained(cursor)] == [("upsert", 4), ("upsert", 5)]


def test_a_filter_over_columns_needs_a_table_and_its_columns(world: World) -> None:
    topic = world.topic()
    with pytest.raises(ConfigError, match="a topic has none"):
        world.db.cursor(None, topic, where="a = 1")
    world.db.create_table("cursors.small", "id bigint", primary_key=["id"])
    with pytest.raises(TableError, match="nope"):
        world.db.cursor(None, "cursors.small", where="nope = 1")


def test_a_partitioned_table_is_refused_with_its_topics(world: World) -> None:
    world.db.create_table(
        "cursors.days", "id bigint, day string", primary_key=["id", "day"], partition_by="day"
    )
    with pytest.raises(ConfigError, match="partitioned by 'day'"):
        world.db.cursor(None, "cursors.days")


def test_a_missing_topic_is_told(world: World) -> None:
    with pytest.raises(ApiError, match="there is no topic 'nowhere'"):
        world.db.cursor(None, "nowhere")


@pytest.mark.parametrize(("start", "first"), [("earliest", 0), ("latest", 3), (2, 2), ({0: 1}, 1)])
def test_where_a_cursor_starts(world: World, start: Any, first: int) -> None:
    topic = world.topic()
    world.send(topic, range(3))
    with world.db.cursor(None, topic, start=start) as cursor:
        assert cursor.positions[0].offset == first
        assert not cursor.positions[0].started
        world.send(topic, [3])
        assert cursor.poll(timeout_ms=20_000).offset == first


def test_a_cursor_starts_at_a_time(world: World) -> None:
    topic = world.topic()
    world.send_records(topic, [Record(None, b"", 1_000 * number) for number in range(1, 5)])
    with world.db.cursor(None, topic, start="1970-01-01T00:00:03Z") as cursor:
        assert cursor.poll().offset == 2
    with world.db.cursor(None, topic, start="-10 minutes") as cursor:
        assert cursor.positions[0].offset == 4


def test_a_rollback_redelivers_only_what_was_not_committed(world: World) -> None:
    topic = world.topic()
    world.send(topic, range(10))
    with world.db.cursor(None, topic) as cursor:
        cursor.poll_batch(4)
        cursor.commit()
        assert values(cursor.poll_batch(3)) == [b"4", b"5", b"6"]
        cursor.rollback()
        assert values(cursor.poll_batch(3)) == [b"4", b"5", b"6"]
        assert values(drained(cursor)) == [b"7", b"8", b"9"]


def test_seek_goes_anywhere(world: World) -> None:
    topic = world.topic()
    world.send(topic, range(10))
    with world.db.cursor(None, topic) as cursor:
        cursor.seek("latest")
        assert cursor.poll(timeout_ms=0) is None
        cursor.seek(7)
        assert values(drained(cursor)) == [b"7", b"8", b"9"]
        cursor.seek({0: 2})
        assert cursor.poll().value == b"2"
        with pytest.raises(ConfigError, match="does not read partition 4"):
            cursor.seek(1, partitions=[4])
        with pytest.raises(ConfigError, match=r"ends at offset 10.*no offset 11 to seek"):
            cursor.seek(11)
        assert cursor.poll().value == b"3", "it is where it was"
        cursor.seek(10)
        world.send(topic, ["next"])
        assert values(drained(cursor)) == [b"next"]
        with pytest.raises(ConfigError, match="partition 4 is not read here"):
            cursor.commit({4: 1})


def test_records_that_retention_deleted_are_an_error_until_seek_goes_behind_them(world: World) -> None:
    topic = world.topic()
    world.send(topic, range(10))
    with world.db.cursor(None, topic) as cursor:
        cursor.poll_batch(2)
        world.db.run(delete_records(world.cluster, {(topic, 0): 6}))
        # What was fetched before is still good.
        cursor.rollback()
        with pytest.raises(CheckpointBelowLogStart, match=r"offset 0.*at least offset 6"):
            cursor.poll(timeout_ms=1_000)
        with pytest.raises(CheckpointBelowLogStart):
            cursor.poll(timeout_ms=1_000)
        cursor.seek("earliest")
        assert cursor.poll().offset == 6
        assert cursor.gaps().ranges == (Gap(0, 0, 5, Reason.RETENTION),)


def test_a_column_that_is_added_meanwhile_is_read_too(world: World) -> None:
    table = world.db.create_table("cursors.grows", "id bigint", primary_key=["id"])
    with world.db.cursor(None, "cursors.grows") as cursor:
        table.upsert([{"id": 1}])
        assert cursor.poll(timeout_ms=5_000).row == {"id": 1}
        table.alter(add_columns="item string")
        table.upsert([{"id": 2, "item": "apple"}])
        assert cursor.poll(timeout_ms=5_000).row == {"id": 2, "item": "apple"}


def test_a_partition_that_has_lost_records_is_not_hidden_by_another_that_has_some(world: World) -> None:
    topic = world.topic(2)
    world.send(topic, range(10))
    with world.db.cursor(None, topic) as cursor:
        cursor.rollback()
        world.db.run(delete_records(world.cluster, {(topic, 0): 6}))
        found = []

        def read_while_the_other_one_grows() -> None:
            for number in range(5):
                world.send(topic, [number], partition=1)
                found.extend(cursor.poll_batch(9, timeout_ms=5_000))

        with pytest.raises(CheckpointBelowLogStart, match="offset 0"):
            read_while_the_other_one_grows()
        assert found
        with pytest.raises(CheckpointBelowLogStart):
            world.db.cursor(None, topic, start=0)
        cursor.seek("earliest", partitions=[0])
        assert {each.partition for each in drained(cursor)} == {0, 1}


def test_lag_is_told_in_records_and_seconds(world: World) -> None:
    topic = world.topic(2)
    world.send(topic, range(10))
    with world.db.cursor(None, topic) as cursor:
        cursor.poll_batch(4)
        lag = cursor.lag()
        assert (lag.records, lag.partitions[0].records, lag.partitions[1].records) == (6, 6, 0)
        assert lag.seconds > 1_000_000  # The records are of 1970.
        drained(cursor)
        assert cursor.lag()[:2] == (0, 0.0)


def test_a_closed_cursor_says_so(world: World) -> None:
    topic = world.topic()
    cursor = world.db.cursor(None, topic)
    cursor.close()
    cursor.close()
    with pytest.raises(ConnectionClosed, match="this cursor is closed"):
        cursor.poll()


async def test_the_async_cursor_has_the_same_names(world: World) -> None:
    topic = world.topic()
    await asyncio.to_thread(world.send, topic, range(5))
    async with (
        await connect_async(world.db.bootstrap_servers) as db,
        await db.cursor(None, topic) as cursor,
    ):
        assert len(await cursor.poll_batch(2)) == 2
        await cursor.commit()
        assert (await cursor.lag()).records == 3
        await cursor.poll()
        await cursor.rollback()
        found = []
        async for record in cursor:
            found.append(record.offset)
            if len(found) == 3:
                break
        assert found == [2, 3, 4]


def test_a_commit_between_the_records_of_a_loop_is_for_those_that_were_seen(world: World, name: str) -> None:
    topic = world.topic()
    world.send(topic, range(5))
    with world.db.cursor(name, topic) as cursor:
        assert next(iter(cursor)).offset == 0
        cursor.commit()
        assert cursor.committed[0].offset == 1


async def test_a_poll_that_cannot_fetch_ahead_gives_what_it_has(world: World) -> None:
    topic = world.topic()
    world.send(topic, range(5))
    async with await connect_async(world.cluster.servers) as db, await db.cursor(None, topic) as cursor:

        async def fail(*_: Any) -> None:
            raise ConnectionClosed("no leader")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cursor._reader, "begin", fail)
            assert len(await cursor.poll_batch(3)) == 3
        assert [each.offset for each in await cursor.poll_batch(3)] == [3, 4]


async def test_a_poll_that_is_cancelled_while_it_fetches_ahead_has_delivered_nothing(world: World) -> None:
    topic = world.topic()
    world.send(topic, range(5))
    async with await connect_async(world.cluster.servers) as db, await db.cursor(None, topic) as cursor:
        entered = asyncio.Event()

        async def hang(*_: Any) -> None:
            entered.set()
            await asyncio.Event().wait()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cursor._reader, "begin", hang)
            polling = asyncio.ensure_future(cursor.poll_batch(3))
            await entered.wait()
            polling.cancel()
            await asyncio.wait({polling})
        assert cursor.positions[0].offset == 0
        assert [each.offset for each in await cursor.poll_batch(3)] == [0, 1, 2]


def test_a_seek_to_where_it_stands_delivers_what_is_finished_again(
    world: World, name: str, tmp_path: Path
) -> None:
    topic = world.topic()
    world.send(topic, range(6))
    for number, checkpoint in enumerate((None, tmp_path / "c")):
        with world.db.cursor(f"{name}-{number}", topic, checkpoint=checkpoint) as cursor:
            cursor.poll_batch(6)
            cursor.commit({0: 2}, finished={0: [4]})
            cursor.seek(2)
            cursor.commit()
        with world.db.cursor(f"{name}-{number}", topic, checkpoint=checkpoint) as cursor:
            assert [each.offset for each in cursor.poll_batch(9)] == [2, 3, 4, 5]


def test_gaps_that_the_node_has_not_told_are_counted_and_have_no_wrong_reason() -> None:
    told = [Skipped(0, 0, Reason.COMPACTION), Skipped(2, 2, Reason.COMPACTION)]
    data = build_batch([Record(b"a", b"", 5)], base_offset=9)
    answer = SimpleNamespace(
        partition=0, next_offset=20, leader_epoch=0, records=data, skipped=told, skipped_dropped=5
    )
    (arrival,) = arrivals_of(answer, "t", 0, filtered=True, decode=decode_records)
    assert arrival.gaps == [
        Gap(0, 0, 0, Reason.COMPACTION),
        Gap(0, 1, 1, Reason.FILTERED),
        Gap(0, 2, 2, Reason.COMPACTION),
    ]
    assert arrival.gaps_dropped == 5
