"""ScanKv: the sessions of one bucket, through the wire format, with a manual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from support.table_world import ManualClock, TableWorld, count_views, rows_of
from tidemill.control.commands import BumpLeaderEpochs, RegisterNode
from tidemill.errors import ErrorCode, TableCode
from tidemill.server.broker import Broker
from tidemill.tables.definition import TableDefinition
from tidemill.tables.predicates.predicate import Compare, encode
from tidemill.tables.scanning import reading
from tidemill.tables.scanning.sessions import BucketKey

MakeBroker = Callable[..., Awaitable[Broker]]
Ask = Callable[..., Awaitable[Any]]

EXPIRED, UNKNOWN, INVALID, TOO_MANY = 1066, 1067, 1068, 1069
IDLE_MS = 600_000
#: Room for three of the rows below, key and offset included.
SMALL = 128


def row(number: int, region: str = "eu") -> dict[str, Any]:
    return {"id": number, "region": region, "amount": number / 2}


ROWS = [row(number) for number in range(10)]


@pytest.fixture
async def table(world: TableWorld) -> TableDefinition:
    """Ten rows in one bucket."""
    table = await world.create()
    await world.upsert(table, ROWS)
    return table


@pytest.fixture
def make_world(make_broker: MakeBroker, ask: Ask, clock: ManualClock) -> Callable[..., Awaitable[TableWorld]]:
    async def make(**settings: Any) -> TableWorld:
        return TableWorld(await make_broker(clock_ms=clock, **settings), ask, clock)

    return make


def views(world: TableWorld, table: TableDefinition) -> int:
    """How many views of bucket 0 are held."""
    tables = world.broker.tables.loaded
    assert tables is not None
    return count_views(tables.service.bucket(BucketKey(table.table_id, 0, 0)).store)


# --- sequences


async def test_open_is_call_0_and_every_later_call_is_one_more(
    world: TableWorld, table: TableDefinition
) -> None:
    response = await world.open_scan(table, batch_size_bytes=SMALL)
    scanner_id, got, sequence = response.scanner_id, rows_of(response), 0
    assert len(scanner_id) == 16
    assert response.has_more
    while response.has_more:
        sequence += 1
        response = await world.go_on(scanner_id, sequence, batch_size_bytes=SMALL)
        assert response.scanner_id == scanner_id
        got += rows_of(response)
    assert got == ROWS
    assert sequence == 3


@pytest.mark.parametrize("sequence", [1, -1, 7])
async def test_a_scan_that_is_opened_by_another_call_than_0_is_refused(
    world: TableWorld, table: TableDefinition, sequence: int
) -> None:
    response = await world.open_scan(table, call_sequence=sequence)
    assert response.error_code == INVALID
    assert response.error_message == f"a scan is opened by call 0, not {sequence}"
    assert world.sessions == 0


async def test_the_first_answer_tells_the_offset_that_the_scan_stands_for(
    world: TableWorld, table: TableDefinition
) -> None:
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    assert first.log_offset == 10
    assert (await world.go_on(first.scanner_id, 1)).log_offset == -1


async def test_a_duplicate_call_returns_the_same_batch(world: TableWorld, table: TableDefinition) -> None:
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    assert (await world.go_on(first.scanner_id, 0, batch_size_bytes=SMALL)).records == first.records
    second = await world.go_on(first.scanner_id, 1, batch_size_bytes=SMALL)
    assert rows_of(second) == ROWS[3:6]
    # Neither another size nor a write in between makes another batch of it.
    await world.upsert(table, [row(3, "us"), row(4, "us")])
    again = await world.go_on(first.scanner_id, 1, batch_size_bytes=1)
    assert (again.records, again.next_key, again.has_more) == (second.records, second.next_key, True)
    assert rows_of(await world.go_on(first.scanner_id, 2, batch_size_bytes=SMALL)) == ROWS[6:9]


async def test_the_very_last_batch_can_be_asked_for_again(world: TableWorld, table: TableDefinition) -> None:
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    last = await world.go_on(first.scanner_id, 1)
    assert not last.has_more
    again = await world.go_on(first.scanner_id, 1)
    assert (again.error_code, again.records, again.has_more) == (0, last.records, False)
    world.clock.advance(30_000)
    await world.sweep()
    assert (await world.go_on(first.scanner_id, 1)).error_code == UNKNOWN


async def test_the_only_batch_can_be_asked_for_again(world: TableWorld, table: TableDefinition) -> None:
    only = await world.open_scan(table)
    assert not only.has_more
    again = await world.go_on(only.scanner_id, 0)
    assert (again.error_code, again.records, again.has_more) == (0, only.records, False)


async def test_the_last_batch_of_a_filtered_and_limited_scan_can_be_asked_for_again(
    world: TableWorld, table: TableDefinition
) -> None:
    only_even = encode(Compare(("amount",), ">=", 2.0))
    first = await world.open_scan(table, predicate=only_even, limit=4, batch_size_bytes=SMALL)
    batches, sequence, response = [rows_of(first)], 0, first
    while response.has_more:
        sequence += 1
        response = await world.go_on(first.scanner_id, sequence, batch_size_bytes=SMALL)
        again = await world.go_on(first.scanner_id, sequence, batch_size_bytes=SMALL)
        assert (again.records, again.has_more) == (response.records, response.has_more)
        batches.append(rows_of(response))
    assert [each for batch in batches for each in batch] == ROWS[4:8]


@pytest.mark.parametrize("wrong", [2, 3, -1])
async def test_a_wrong_call_number_is_refused_and_the_session_lives_on(
    world: TableWorld, table: TableDefinition, wrong: int
) -> None:
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    refused = await world.go_on(first.scanner_id, wrong)
    assert refused.error_code == INVALID
    assert (
        refused.error_message
        == f"the next call of this scan has number 1, not {wrong}; 0 gives the last batch again"
    )
    assert refused.records is None
    assert rows_of(await world.go_on(first.scanner_id, 1)) == ROWS[3:]


async def test_two_calls_at_once_take_their_turn(world: TableWorld, table: TableDefinition) -> None:
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    answers = await asyncio.gather(
        *(world.go_on(first.scanner_id, sequence, batch_size_bytes=SMALL) for sequence in (1, 1, 2, 2))
    )
    assert [rows_of(answer) for answer in answers] == [ROWS[3:6], ROWS[3:6], ROWS[6:9], ROWS[6:9]]


async def test_a_call_that_waits_for_its_turn_while_the_scan_is_closed_is_told_so(
    world: TableWorld, table: TableDefinition
) -> None:
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    under_way, waiting, closed = await asyncio.gather(
        world.go_on(first.scanner_id, 1, batch_size_bytes=SMALL),
        world.go_on(first.scanner_id, 2, batch_size_bytes=SMALL),
        world.close_scan(first.scanner_id),
    )
    assert closed.error_code == 0
    assert rows_of(under_way) == ROWS[3:6]
    assert waiting.error_code == UNKNOWN
    assert (world.sessions, views(world, table)) == (0, 0)


# --- expiry


async def test_a_session_expires_when_nobody_asks_for_it(world: TableWorld, table: TableDefinition) -> None:
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    world.clock.advance(IDLE_MS - 1)
    await world.sweep()
    assert (world.sessions, views(world, table)) == (1, 1)
    world.clock.advance(1)
    await world.sweep()
    assert (world.sessions, views(world, table)) == (0, 0)
    response = await world.go_on(first.scanner_id, 1)
    assert response.error_code == EXPIRED
    assert "idle for 600000 ms" in response.error_message


async def test_an_expired_id_is_remembered_for_twice_the_idle_time(
    world: TableWorld, table: TableDefinition
) -> None:
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    world.clock.advance(IDLE_MS)
    await world.sweep()
    world.clock.advance(2 * IDLE_MS - 1)
    await world.sweep()
    assert (await world.go_on(first.scanner_id, 1)).error_code == EXPIRED
    world.clock.advance(1)
    await world.sweep()
    assert (await world.go_on(first.scanner_id, 1)).error_code == UNKNOWN


async def test_an_id_that_never_was_is_unknown(world: TableWorld, table: TableDefinition) -> None:
    for scanner_id in (b"", b"made up", bytes(16)):
        response = await world.go_on(scanner_id, 1)
        assert response.error_code == UNKNOWN
        assert "knows no such scan" in response.error_message


async def test_calls_keep_a_session_alive(world: TableWorld, table: TableDefinition) -> None:
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    for sequence in (1, 2, 2):
        world.clock.advance(IDLE_MS - 1)
        await world.sweep()
        response = await world.go_on(first.scanner_id, sequence, batch_size_bytes=SMALL)
        assert response.error_code == 0


async def test_keep_alive_keeps_a_session_alive_past_its_idle_time(
    world: TableWorld, table: TableDefinition
) -> None:
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    for _ in range(3):
        world.clock.advance(IDLE_MS - 1)
        response = await world.ask("ScanKv", scanner_id=first.scanner_id, keep_alive=True)
        assert (response.error_code, response.records) == (0, None)
        await world.sweep()
    assert rows_of(await world.go_on(first.scanner_id, 1)) == ROWS[3:]


async def test_keep_alive_needs_a_scan_that_is_open(world: TableWorld, table: TableDefinition) -> None:
    assert (await world.ask("ScanKv", scanner_id=b"made up", keep_alive=True)).error_code == UNKNOWN
    response = await world.ask("ScanKv", keep_alive=True)
    assert response.error_code == ErrorCode.invalid_request
    assert "names none" in response.error_message


async def test_the_idle_time_is_a_setting(make_world: Callable[..., Awaitable[TableWorld]]) -> None:
    world = await make_world(scan_idle_ms=1_000)
    table = await world.create()
    await world.upsert(table, ROWS)
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    world.clock.advance(1_000)
    await world.sweep()
    assert (await world.go_on(first.scanner_id, 1)).error_code == EXPIRED


# --- places


async def test_a_client_takes_nine_scans_of_a_bucket_and_with_the_tenth_is_told_to_come_back(
    world: TableWorld, table: TableDefinition
) -> None:
    opened = [await world.open_scan(table, batch_size_bytes=SMALL) for _ in range(9)]
    response = await world.open_scan(table, batch_size_bytes=SMALL)
    assert response.error_code == TOO_MANY
    assert TableCode.too_many_scanners == TOO_MANY
    assert TableCode.too_many_scanners.retriable
    assert response.error_message == (
        "16 scans of bucket 0 can be open at a time (scan_sessions_per_bucket), and this connection holds 9 "
        "of them; close one, or try again later"
    )
    await world.close_scan(opened[3].scanner_id)
    assert (await world.open_scan(table, batch_size_bytes=SMALL)).error_code == 0


async def test_a_node_takes_so_many_scans_over_all_buckets(
    make_world: Callable[..., Awaitable[TableWorld]],
) -> None:
    world = await make_world(scan_sessions_per_bucket=2, scan_sessions=3)
    table = await world.create(buckets=3)
    await world.upsert(table, [row(number) for number in range(60)])
    codes = [
        (await world.open_scan(table, bucket, batch_size_bytes=SMALL)).error_code
        for bucket in (0, 0, 0, 1, 2)
    ]
    assert codes == [0, 0, TOO_MANY, 0, TOO_MANY]
    assert world.sessions == 3


async def test_opens_at_once_do_not_get_past_the_limit(
    make_world: Callable[..., Awaitable[TableWorld]],
) -> None:
    world = await make_world(scan_sessions_per_bucket=2)
    table = await world.create()
    await world.upsert(table, ROWS)
    answers = await asyncio.gather(*(world.open_scan(table, batch_size_bytes=SMALL) for _ in range(6)))
    assert sorted(answer.error_code for answer in answers) == [0, 0] + [TOO_MANY] * 4
    assert (world.sessions, views(world, table)) == (2, 2)


async def test_the_end_of_the_data_closes_the_session_and_frees_its_place(
    world: TableWorld, table: TableDefinition
) -> None:
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    assert world.sessions == 1
    assert not (await world.go_on(first.scanner_id, 1)).has_more
    assert world.sessions == 0
    assert (await world.go_on(first.scanner_id, 2)).error_code == UNKNOWN
    world.clock.advance(30_000)
    await world.sweep()
    assert views(world, table) == 0


async def test_a_close_in_the_middle_frees_the_place_at_once(
    world: TableWorld, table: TableDefinition
) -> None:
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    response = await world.close_scan(first.scanner_id)
    assert (response.error_code, response.has_more, response.records) == (0, False, None)
    assert (world.sessions, views(world, table)) == (0, 0)
    assert (await world.go_on(first.scanner_id, 1)).error_code == UNKNOWN


async def test_closing_twice_and_closing_what_never_was_is_fine(
    world: TableWorld, table: TableDefinition
) -> None:
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    for scanner_id in (first.scanner_id, first.scanner_id, b"made up"):
        assert (await world.close_scan(scanner_id)).error_code == 0
    assert (await world.ask("ScanKv", close=True)).error_code == 0


async def test_close_works_on_a_node_that_does_not_lead_and_open_does_not(world: TableWorld) -> None:
    other = RegisterNode(node_id=2, name="node-2", host="elsewhere", port=1, incarnation=uuid4())
    await world.broker.controller.submit(other)
    table = await world.create(buckets=2)
    topic = world.broker.find.topic(table.name)
    (bucket,) = [index for index, placed in enumerate(topic.partitions) if placed.leader == 2]
    response = await world.open_scan(table, bucket)
    assert response.error_code == ErrorCode.not_leader_or_follower
    assert "node 2 does" in response.error_message
    closed = await world.ask(
        "ScanKv", scanner_id=bytes(16), close=True, table_id=table.table_id, bucket=bucket
    )
    assert closed.error_code == 0


# --- isolation


async def test_a_scan_is_isolated_from_writes_that_come_between_its_fetches(
    world: TableWorld, table: TableDefinition
) -> None:
    response = await world.open_scan(table, batch_size_bytes=SMALL)
    got, sequence = rows_of(response), 0
    while response.has_more:
        await world.upsert(table, [row(number, f"after {sequence}") for number in range(-3, 15)])
        await world.delete(table, [number for number in range(15) if number % 3 == 0])
        # A look-up that waits for the write shows that it is in the state by now.
        bucket = BucketKey(table.table_id, 0, 0)
        tables = world.broker.tables.loaded
        assert tables is not None
        log = tables.service.log(bucket)
        await tables.service.ready_bucket(bucket, log.high_watermark)
        sequence += 1
        response = await world.go_on(response.scanner_id, sequence, batch_size_bytes=SMALL)
        got += rows_of(response)
    assert sequence == 3
    assert got == ROWS
    (now,) = await world.scan(table)
    assert now == [row(number, "after 2") for number in range(-3, 15) if number % 3 or number < 0]


# --- leaders


async def test_a_new_leader_epoch_ends_the_sessions_of_its_bucket(world: TableWorld) -> None:
    table = await world.create(buckets=2)
    await world.upsert(table, [row(number) for number in range(40)])
    mine, other = [await world.open_scan(table, bucket, batch_size_bytes=SMALL) for bucket in (0, 1)]
    await world.broker.controller.submit(BumpLeaderEpochs(name=table.name, partitions=(0,)))
    response = await world.go_on(mine.scanner_id, 1)
    assert response.error_code == EXPIRED
    assert "bucket 0 of table 'shop.orders' has a new leader epoch" in response.error_message
    assert (await world.go_on(mine.scanner_id, 0)).error_code == EXPIRED
    assert (await world.go_on(other.scanner_id, 1)).error_code == 0
    # Whoever starts again finds everything.
    again = [*await world.scan(table, 0), *await world.scan(table, 1)]
    assert sum(map(len, again)) == 40


async def test_a_wrong_leader_epoch_is_fenced(world: TableWorld, table: TableDefinition) -> None:
    await world.broker.controller.submit(BumpLeaderEpochs(name=table.name, partitions=(0,)))
    epoch = world.broker.find.topic(table.name).partitions[0].leader_epoch
    old, new = [await world.open_scan(table, leader_epoch=epoch + step) for step in (-1, 1)]
    assert old.error_code == ErrorCode.fenced_leader_epoch
    assert new.error_code == ErrorCode.unknown_leader_epoch
    assert f"is at leader epoch {epoch}" in old.error_message
    assert (await world.open_scan(table, leader_epoch=epoch)).error_code == 0
    assert world.sessions == 0


async def test_a_dropped_table_ends_its_sessions(world: TableWorld, table: TableDefinition) -> None:
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    await world.done("DropTable", name=table.name, if_exists=False)
    response = await world.go_on(first.scanner_id, 1)
    assert response.error_code == EXPIRED
    assert "was dropped" in response.error_message
    gone = await world.open_scan(table)
    assert gone.error_code == TableCode.table_not_found
    assert f"no table with id {table.table_id}" in gone.error_message


# --- what there is to read


async def test_an_empty_bucket_has_no_more_and_no_id(world: TableWorld) -> None:
    table = await world.create()
    response = await world.open_scan(table)
    assert (response.error_code, response.scanner_id, response.has_more) == (0, None, False)
    assert (response.records, response.log_offset) == (None, 0)
    assert world.sessions == 0


async def test_a_bucket_whose_rows_are_all_deleted_is_empty_at_its_offset(
    world: TableWorld, table: TableDefinition
) -> None:
    await world.delete(table, list(range(10)))
    response = await world.open_scan(table)
    assert (response.scanner_id, response.has_more, response.log_offset) == (None, False, 20)
    assert views(world, table) == 0


@pytest.mark.parametrize("limit", [1, 2, 3, 9, 10, 11, 2**40])
async def test_a_limit_is_kept_whatever_the_size_of_the_batches(
    world: TableWorld, table: TableDefinition, limit: int
) -> None:
    for size in (1, SMALL, 1 << 20):
        batches = await world.scan(table, limit=limit, size=size)
        assert [each for batch in batches for each in batch] == ROWS[:limit]
    assert world.sessions == 0


async def test_a_negative_limit_is_refused(world: TableWorld, table: TableDefinition) -> None:
    response = await world.open_scan(table, limit=-1)
    assert (response.error_code, response.error_message) == (INVALID, "a scan cannot give -1 rows")


async def test_columns_come_in_the_order_in_which_they_were_asked_for(
    world: TableWorld, table: TableDefinition
) -> None:
    (batch,) = await world.scan(table, columns=["amount", "id"])
    assert [list(each.items()) for each in batch] == [
        [("amount", each["amount"]), ("id", each["id"])] for each in ROWS
    ]


async def test_a_filter_may_look_at_columns_that_are_not_asked_for(
    world: TableWorld, table: TableDefinition
) -> None:
    (batch,) = await world.scan(
        table, columns=["region"], predicate=encode(Compare(("amount",), ">", 4.0)), limit=5
    )
    assert batch == [{"region": "eu"}]


async def test_an_unknown_column_is_refused_with_those_that_there_are(
    world: TableWorld, table: TableDefinition
) -> None:
    response = await world.open_scan(table, columns=["id", "colour", "size"])
    assert response.error_code == INVALID
    assert response.error_message == (
        "table 'shop.orders' has no column 'colour', 'size'; it has id, region, amount"
    )
    twice = await world.open_scan(table, columns=["id", "id"])
    assert (twice.error_code, twice.error_message) == (INVALID, "a column is asked for twice")


@pytest.mark.parametrize("predicate", [b"", b"\xff", encode(Compare(("colour",), "=", 1))])
async def test_a_filter_that_does_not_fit_is_refused(
    world: TableWorld, table: TableDefinition, predicate: bytes
) -> None:
    response = await world.open_scan(table, predicate=predicate)
    assert response.error_code == TableCode.invalid_predicate
    assert world.sessions == 0


async def test_a_range_of_keys_is_read_and_nothing_else(world: TableWorld, table: TableDefinition) -> None:
    start, end = table.keys.bound([3]), table.keys.bound([7])
    for size in (1, SMALL, 1 << 20):
        batches = await world.scan(table, start_key=start, end_key=end, size=size)
        assert [each for batch in batches for each in batch] == ROWS[3:7]
    assert (await world.open_scan(table, start_key=end, end_key=start)).scanner_id is None
    assert (await world.open_scan(table, start_key=b"", end_key=b"")).scanner_id is None


async def test_a_scan_can_be_resumed_from_the_key_that_an_answer_tells(
    world: TableWorld, table: TableDefinition
) -> None:
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    await world.close_scan(first.scanner_id)
    (rest,) = await world.scan(table, start_key=first.next_key)
    assert rows_of(first) + rest == ROWS


@pytest.mark.parametrize("bucket", [-1, 1, 2**31 - 1])
async def test_a_bucket_out_of_range_is_refused(
    world: TableWorld, table: TableDefinition, bucket: int
) -> None:
    response = await world.open_scan(table, bucket)
    assert response.error_code == TableCode.bucket_not_found
    assert response.error_message == f"table 'shop.orders' has buckets 0 to 0, not {bucket}"


async def test_a_partition_that_there_is_not_is_refused(world: TableWorld, table: TableDefinition) -> None:
    response = await world.open_scan(table, partition_id=5)
    assert response.error_code == TableCode.partition_not_found
    assert response.error_message == "table 'shop.orders' has no partition with number 5"


async def test_a_table_without_a_primary_key_cannot_be_scanned(world: TableWorld) -> None:
    table = await world.create("shop.clicks", primary_key=())
    await world.upsert(table, ROWS)
    response = await world.open_scan(table)
    assert response.error_code == TableCode.not_a_primary_key_table
    assert "consume its topic instead" in response.error_message
    looked_up = await world.ask("LookupKv", table_id=table.table_id, bucket=0, leader_epoch=-1)
    assert looked_up.error_code == TableCode.not_a_primary_key_table
    pinned = await world.ask("PinTable", table_id=table.table_id)
    assert pinned.error_code == TableCode.not_a_primary_key_table


async def test_a_filter_that_lets_nothing_pass_gives_up_its_turn_now_and_then(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_SCANNED_BYTES_MAX", 1)
    monkeypatch.setattr(reading, "_PIECE_ROWS", 3)
    batches = await world.scan(table, predicate=encode(Compare(("id",), "=", 7)))
    assert batches == [[], [], [row(7)], []]
    assert world.sessions == 0


# --- sizes


@pytest.mark.parametrize("size", [0, -1])
async def test_a_batch_of_no_bytes_is_refused(world: TableWorld, table: TableDefinition, size: int) -> None:
    response = await world.open_scan(table, batch_size_bytes=size)
    assert (response.error_code, response.error_message) == (INVALID, f"a batch cannot have {size} bytes")
    first = await world.open_scan(table, batch_size_bytes=SMALL)
    assert (await world.go_on(first.scanner_id, 1, batch_size_bytes=size)).error_code == INVALID
    assert (await world.go_on(first.scanner_id, 1)).error_code == 0


async def test_every_batch_has_a_row_even_one_larger_than_the_limit(world: TableWorld) -> None:
    table = await world.create()
    large = [row(number, "x" * 1_000 * (number % 3)) for number in range(9)]
    await world.upsert(table, large)
    batches = await world.scan(table, size=1)
    assert batches == [[each] for each in large]


async def test_a_batch_of_several_rows_is_within_the_limit(world: TableWorld) -> None:
    table = await world.create()
    many = [row(number, "x" * (number * 37 % 400)) for number in range(300)]
    await world.upsert(table, many)
    for size in (100, 500, 2_000, 10_000):
        batches = await world.scan(table, size=size)
        assert [each for batch in batches for each in batch] == many
        for batch in batches:
            # The text alone, without what else is in a row.
            assert len(batch) == 1 or sum(len(each["region"]) for each in batch) < size


async def test_the_server_caps_what_a_client_asks_for(
    make_world: Callable[..., Awaitable[TableWorld]],
) -> None:
    world = await make_world(scan_max_bytes=SMALL)
    table = await world.create()
    await world.upsert(table, ROWS)
    response = await world.open_scan(table, batch_size_bytes=2**31 - 1)
    assert rows_of(response) == ROWS[:3]
    assert rows_of(await world.go_on(response.scanner_id, 1, batch_size_bytes=2**31 - 1)) == ROWS[3:6]


async def test_the_cap_of_the_server_is_10_mib(world: TableWorld) -> None:
    assert world.broker.settings.scan_max_bytes == 10 * 1024 * 1024
