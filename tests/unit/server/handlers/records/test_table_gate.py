"""Writing to the log of a table with Kafka's own requests: what goes in, what is refused, in which order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from support.table_world import TableWorld, batch_of
from tidemill.control.commands import RegisterNode
from tidemill.errors import ErrorCode, ProtocolError
from tidemill.records import batch as batches
from tidemill.records.batch import restamp_max_timestamp
from tidemill.records.record import Record, build_batch
from tidemill.replication.coordinator_log import wait_committed
from tidemill.server.handlers.records.batch_gate import CheckedBatches
from tidemill.server.handlers.records.produce import produce
from tidemill.server.requests.call import Call
from tidemill.tables.definition import TableDefinition
from tidemill.tables.state import service
from tidemill.wire.encode import encode_request
from tidemill.wire.requests import decode_request, parse_header

Ask = Callable[..., Awaitable[Any]]

TRANSACTIONAL = 0x10
GOOD = (b"1", b'{"id":1,"name":"x"}')
NO_KEY = (None, b'{"id":1}')
BAD_ROW = (b"1", b'{"id":1,"colour":2}')


@pytest.fixture
async def table(world: TableWorld) -> TableDefinition:
    """A table that any producer can write to."""
    return await world.create("shop.orders", "id bigint, name string", row_format="json")


async def rows(world: TableWorld, table: TableDefinition) -> list[tuple[int, str | None]]:
    """What a scan finds when everything that is in the log is in the state."""
    return [(row["id"], row["name"]) for batch in await world.scan(table) for row in batch]


def end(world: TableWorld, topic: str = "shop.orders", index: int = 0) -> int:
    return world.broker.find.partition(world.broker.find.topic(topic), index).local_log.end_offset


# --- what goes in


async def test_a_kafka_producer_writes_rows_and_deletes_them(
    world: TableWorld, table: TableDefinition
) -> None:
    for records in ([GOOD, (b"2", b'{"id":2}')], [(b"1", None), (b"3", b'{"name":"z","id":3}')]):
        result = await world.produce(table.name, 0, batch_of(*records))
        assert (result.error_code, result.record_errors, result.error_message) == (0, (), None)
    assert end(world) == 4
    assert await rows(world, table) == [(2, None), (3, "z")]


@pytest.mark.parametrize("version", range(3, 14))
async def test_every_version_of_produce_can_write(
    world: TableWorld, table: TableDefinition, ask: Ask, version: int
) -> None:
    topic = (
        {"name": table.name} if version < 13 else {"topic_id": world.broker.find.topic(table.name).id}
    ) | {"partition_data": [{"index": 0, "records": batch_of(GOOD)}]}
    response = await ask(world.broker, "Produce", version, acks=-1, timeout=60_000, topic_data=[topic])
    (result,) = response.responses[0].partition_responses
    assert (result.error_code, result.base_offset) == (0, 0)
    assert await rows(world, table) == [(1, "x")]


@pytest.mark.parametrize("acks", [0, 1, -1])
async def test_rows_are_looked_at_whatever_acks_the_producer_wants(
    world: TableWorld, table: TableDefinition, ask: Ask, acks: int
) -> None:
    def part(*records: Any) -> list[dict[str, Any]]:
        entry = {"index": 0, "records": batch_of(*records)}
        return [{"name": table.name, "partition_data": [entry]}]

    if acks == 0:
        # Nobody waits for an answer; the connection is closed to tell of the refusal.
        with pytest.raises(ProtocolError, match="a frame of 0 bytes"):
            await ask(world.broker, "Produce", 9, acks=0, timeout=1_000, topic_data=part(GOOD))
        with pytest.raises(ConnectionError):
            await ask(world.broker, "Produce", 9, acks=0, timeout=1_000, topic_data=part(BAD_ROW))
    else:
        assert (await world.produce(table.name, 0, batch_of(GOOD), acks=acks)).error_code == 0
        result = await world.produce(table.name, 0, batch_of(BAD_ROW), acks=acks)
        assert result.error_code == ErrorCode.invalid_record
    assert end(world) == 1


# --- what is refused


@pytest.mark.parametrize(
    ("records", "index", "message"),
    [
        ([GOOD, NO_KEY], 1, "has no key"),
        ([GOOD, (b"5", None), BAD_ROW], 2, "colour"),
        ([(b"01", None)], 0, "not spelt canonically; spell it"),
        ([GOOD, (b"2", GOOD[1])], 1, "is not that of its row, '1'"),
    ],
)
async def test_a_batch_is_refused_whole_and_the_record_at_fault_is_named(
    world: TableWorld, table: TableDefinition, records: list[Any], index: int, message: str
) -> None:
    await world.produce(table.name, 0, batch_of((b"7", b'{"id":7}')))
    for version in (8, 9, 12):
        result = await world.produce(table.name, 0, batch_of(*records), version=version)
        assert (result.error_code, result.base_offset) == (ErrorCode.invalid_record, -1)
        assert message in result.error_message
        (fault,) = result.record_errors
        assert (fault.batch_index, fault.batch_index_error_message) == (index, result.error_message)
    assert end(world) == 1
    assert await rows(world, table) == [(7, None)]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (NO_KEY, "has no key"),
        ((b"2", GOOD[1]), "is not that of its row, '1'"),
        (BAD_ROW, "colour"),
        ((b"1", b"{"), "the row"),
    ],
)
async def test_ten_bad_rows_of_a_hundred_are_named(
    world: TableWorld, table: TableDefinition, bad: Any, message: str
) -> None:
    records = [bad if number % 10 == 3 else GOOD for number in range(100)]
    result = await world.produce(table.name, 0, batch_of(*records))
    assert result.error_code == ErrorCode.invalid_record
    assert [fault.batch_index for fault in result.record_errors] == list(range(3, 100, 10))
    assert all(message in fault.batch_index_error_message for fault in result.record_errors)
    assert end(world) == 0


@pytest.mark.parametrize("version", range(3, 8))
async def test_versions_without_records_errors_get_the_code(
    world: TableWorld, table: TableDefinition, version: int
) -> None:
    result = await world.produce(table.name, 0, batch_of(BAD_ROW), version=version)
    assert result.error_code == ErrorCode.invalid_record
    assert end(world) == 0


async def test_a_key_in_the_wrong_bucket_names_the_setting_that_librdkafka_needs(world: TableWorld) -> None:
    table = await world.create("shop.spread", "id bigint, name string", row_format="json", buckets=4)
    codes = []
    for bucket in range(4):
        result = await world.produce(table.name, bucket, batch_of(GOOD))
        codes.append(result.error_code)
        if result.error_code:
            assert "partitioner=murmur2_random" in result.error_message
    assert sorted(codes) == [0] + [ErrorCode.invalid_record] * 3


async def test_bytes_that_are_no_batch_are_refused_as_for_any_topic(
    world: TableWorld, table: TableDefinition
) -> None:
    compacted = [{"name": "cleanup.policy", "value": "compact"}]
    topic = {"name": "plain", "num_partitions": 1, "replication_factor": 1, "configs": compacted}
    await world.ask_kafka("CreateTopics", 7, topics=[topic])
    good = batch_of(GOOD)
    broken = bytearray(good)
    broken[-1] ^= 1
    for records in (b"rubbish", good[: len(good) // 2], bytes(broken), bytes(100), good + good):
        plain, ours = [await world.produce(name, 0, records) for name in ("plain", table.name)]
        assert ours.error_code == plain.error_code != 0, records
    assert end(world) == 0
    assert (await world.produce(table.name, 0, good)).error_code == 0


async def test_a_batch_that_unpacks_to_too_much_is_refused(world: TableWorld, table: TableDefinition) -> None:
    bomb = build_batch([Record(b"1", b" " * 200_000_000, 1)], codec=4)
    result = await world.produce(table.name, 0, bomb)
    assert result.error_code != 0
    assert end(world) == 0


async def test_no_batch_at_all_is_refused_as_for_any_topic(world: TableWorld, table: TableDefinition) -> None:
    result = await world.produce(table.name, 0, b"")
    assert result.error_code == ErrorCode.invalid_record
    assert result.error_message == "the request holds no record batch for this partition"


async def test_a_bucket_that_there_is_not_is_an_unknown_partition(
    world: TableWorld, table: TableDefinition
) -> None:
    result = await world.produce(table.name, 5, batch_of(GOOD))
    assert result.error_code == ErrorCode.unknown_topic_or_partition


async def test_a_node_that_does_not_lead_the_bucket_says_so_whatever_the_rows_are(world: TableWorld) -> None:
    other = RegisterNode(node_id=2, name="node-2", host="elsewhere", port=1, incarnation=uuid4())
    await world.broker.controller.submit(other)
    table = await world.create(buckets=2)
    placed = world.broker.find.topic(table.name).partitions
    (bucket,) = [index for index, each in enumerate(placed) if each.leader == 2]
    result = await world.produce(table.name, bucket, batch_of(NO_KEY))
    assert result.error_code == ErrorCode.not_leader_or_follower


async def test_each_partition_of_a_request_is_refused_or_written_for_itself(
    world: TableWorld, table: TableDefinition, ask: Ask
) -> None:
    log = await world.create("shop.clicks", "id bigint", primary_key=(), buckets=2, row_format="json")
    topic = {"name": "plain", "num_partitions": 1, "replication_factor": 1}
    await world.ask_kafka("CreateTopics", 7, topics=[topic])
    data = [
        {"name": table.name, "partition_data": [{"index": 0, "records": batch_of(BAD_ROW)}]},
        {
            "name": log.name,
            "partition_data": [
                {"index": 0, "records": batch_of((None, b'{"id":1}'), (None, None))},
                {"index": 1, "records": batch_of((None, b'{"id":1}'), (b"k", b"{}"))},
            ],
        },
        {"name": "plain", "partition_data": [{"index": 0, "records": batch_of((None, b"anything"))}]},
        {"name": "absent", "partition_data": [{"index": 0, "records": batch_of(GOOD)}]},
    ]
    response = await ask(world.broker, "Produce", 9, acks=-1, timeout=60_000, topic_data=data)
    codes = [
        (topic.name, part.index, part.error_code, [fault.batch_index for fault in part.record_errors])
        for topic in response.responses
        for part in topic.partition_responses
    ]
    assert codes == [
        (table.name, 0, ErrorCode.invalid_record, [0]),
        (log.name, 0, ErrorCode.invalid_record, [1]),
        (log.name, 1, ErrorCode.none, []),
        ("plain", 0, ErrorCode.none, []),
        ("absent", 0, ErrorCode.unknown_topic_or_partition, []),
    ]


# --- refused means untouched


def idempotent(sequence: int, *records: tuple[bytes | None, bytes | None], producer_id: int = 7) -> bytes:
    return build_batch(
        [Record(key, value, 1_000) for key, value in records],
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=sequence,
    )


async def test_a_refused_batch_takes_no_sequence_number(world: TableWorld, table: TableDefinition) -> None:
    assert (await world.produce(table.name, 0, idempotent(0, GOOD))).error_code == 0
    refused = await world.produce(table.name, 0, idempotent(1, BAD_ROW))
    assert refused.error_code == ErrorCode.invalid_record
    again = await world.produce(table.name, 0, idempotent(1, (b"2", b'{"id":2}')))
    assert (again.error_code, again.base_offset) == (0, 1)
    assert await rows(world, table) == [(1, "x"), (2, None)]


async def test_a_batch_that_is_sent_twice_is_written_once(world: TableWorld, table: TableDefinition) -> None:
    batch = idempotent(0, GOOD)
    first = await world.produce(table.name, 0, batch)
    await world.produce(table.name, 0, idempotent(1, (b"1", b'{"id":1,"name":"y"}')))
    again = await world.produce(table.name, 0, batch)
    assert (first.base_offset, again.error_code, again.base_offset) == (0, 0, 0)
    assert end(world) == 2
    assert await rows(world, table) == [(1, "y")]


# --- transactions


class Transaction:
    """A producer with a transactional id, as it writes one batch after the other."""

    def __init__(self, world: TableWorld, ask: Ask) -> None:
        self._world = world
        self._ask = ask
        self._sequence = 0
        self._producer = -1, -1

    async def start(self) -> None:
        answer = await self._ask(
            self._world.broker, "InitProducerId", 4, transactional_id="x", transaction_timeout=60_000
        )
        self._producer = answer.producer_id, answer.producer_epoch

    @property
    def _names(self) -> dict[str, Any]:
        producer_id, epoch = self._producer
        return {"transactional_id": "x", "producer_id": producer_id, "producer_epoch": epoch}

    async def add(self, topic: str) -> None:
        asked = {**self._names, "topics": [{"name": topic, "partitions": [0]}]}
        answer = await self._ask(self._world.broker, "AddPartitionsToTxn", 4, transactions=[asked])
        (result,) = answer.results_by_transaction[0].topic_results[0].results_by_partition
        assert result.partition_error_code == 0

    async def write(self, topic: str, *records: tuple[bytes | None, bytes | None]) -> Any:
        batch = build_batch(
            [Record(key, value, 1_000) for key, value in records],
            producer_id=self._producer[0],
            producer_epoch=self._producer[1],
            base_sequence=self._sequence,
            attributes=TRANSACTIONAL,
        )
        part = {"name": topic, "partition_data": [{"index": 0, "records": batch}]}
        body = {"transactional_id": "x", "acks": -1, "timeout": 60_000, "topic_data": [part]}
        response = await self._ask(self._world.broker, "Produce", 9, **body)
        (result,) = response.responses[0].partition_responses
        if result.error_code == 0:
            self._sequence += len(records)
        return result

    async def end(self, *, committed: bool) -> None:
        answer = await self._ask(self._world.broker, "EndTxn", 4, **self._names, committed=committed)
        assert answer.error_code == 0


@pytest.fixture
async def transaction(world: TableWorld, table: TableDefinition, ask: Ask) -> Transaction:
    """One that has begun, and nothing is in it yet."""
    made = Transaction(world, ask)
    await made.start()
    return made


@pytest.mark.parametrize("committed", [True, False])
async def test_the_rows_of_a_transaction_are_seen_when_it_is_committed_and_not_else(
    world: TableWorld, table: TableDefinition, transaction: Transaction, committed: bool
) -> None:
    await world.produce(table.name, 0, batch_of((b"9", b'{"id":9}')))
    await transaction.add(table.name)
    assert (await transaction.write(table.name, GOOD)).error_code == 0
    refused = await transaction.write(table.name, BAD_ROW)
    assert refused.error_code == ErrorCode.invalid_record
    assert (await transaction.write(table.name, (b"9", None), (b"2", b'{"id":2}'))).error_code == 0
    assert await rows(world, table) == [(9, None)]
    await transaction.end(committed=committed)
    partition = world.broker.find.partition(world.broker.find.topic(table.name), 0)
    await wait_committed(partition, partition.local_log.end_offset)
    assert await rows(world, table) == ([(1, "x"), (2, None)] if committed else [(9, None)])


async def test_a_batch_that_is_in_no_transaction_is_refused_as_such_before_its_rows_are_looked_at(
    world: TableWorld, table: TableDefinition, transaction: Transaction
) -> None:
    for record in (GOOD, BAD_ROW):
        result = await transaction.write(table.name, record)
        assert result.error_code == ErrorCode.invalid_txn_state
        assert result.record_errors == ()
    assert end(world) == 0


# --- timestamps


async def test_a_timestamp_from_the_future_is_refused_also_if_the_header_hides_it(
    world: TableWorld, table: TableDefinition
) -> None:
    far = batch_of(GOOD, timestamp_ms=world.broker.clock_ms() + 10**12)
    for batch in (far, bytes(restamp_max_timestamp(far, 5))):
        result = await world.produce(table.name, 0, batch)
        assert result.error_code == ErrorCode.invalid_timestamp
        assert [each.batch_index for each in result.record_errors] == [0]
    assert end(world) == 0


async def test_a_wrong_largest_timestamp_is_put_right(world: TableWorld, table: TableDefinition) -> None:
    result = await world.produce(table.name, 0, bytes(restamp_max_timestamp(batch_of(GOOD), 5)))
    assert (result.error_code, result.base_offset) == (0, 0)
    partition = world.broker.find.partition(world.broker.find.topic(table.name), 0)
    stored = partition.read(0, 1_000, at_least_one=True)
    assert batches.parse_header(stored).max_timestamp == 1_000


# --- order


async def test_batches_for_one_bucket_keep_their_order_however_long_each_is_looked_at(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.produce(table.name, 0, batch_of((b"0", b'{"id":0}')))
    first_may_go_on, check = threading.Event(), service._check
    seen: list[int] = []

    def slow_check(definition: Any, place: Any, index: int, records: bytes, limit: int) -> Any:
        checked = check(definition, place, index, records, limit)
        assert checked.changes is not None
        seen.append(len(checked.changes.offsets))
        if len(checked.changes.offsets) == 1:
            first_may_go_on.wait(120)
        return checked

    monkeypatch.setattr(service, "_check", slow_check)
    tables = world.broker.tables.loaded
    assert tables is not None
    # Two threads, so that the second batch is looked at before the first is done.
    threads = ThreadPoolExecutor(2)
    monkeypatch.setattr(tables.service, "fold_thread", threads)
    first = asyncio.ensure_future(world.produce(table.name, 0, batch_of((b"1", b'{"id":1,"name":"a"}'))))
    await asyncio.sleep(0)
    second = asyncio.ensure_future(
        world.produce(table.name, 0, batch_of((b"1", b'{"id":1,"name":"b"}'), (b"2", b'{"id":2}')))
    )
    async with asyncio.timeout(120):
        while len(seen) < 2:  # noqa: ASYNC110 - a thread's progress
            await asyncio.sleep(0.001)
    assert not second.done()
    first_may_go_on.set()
    assert [(await first).base_offset, (await second).base_offset] == [1, 2]
    assert await rows(world, table) == [(0, None), (1, "b"), (2, None)]
    assert not world.broker.gated_writes
    threads.shutdown()


async def test_a_refused_batch_does_not_hold_up_those_behind_it(
    world: TableWorld, table: TableDefinition
) -> None:
    batches = [batch_of(GOOD), batch_of(BAD_ROW), batch_of((b"2", b'{"id":2}')), b"rubbish", batch_of(GOOD)]
    results = await asyncio.gather(*(world.produce(table.name, 0, batch) for batch in batches))
    assert [result.base_offset for result in results] == [0, -1, 1, -1, 2]


async def test_the_memory_of_a_request_is_kept_while_its_rows_are_looked_at(
    world: TableWorld, table: TableDefinition
) -> None:
    records = batch_of(*((b"%d" % number, b'{"id":%d,"name":"x"}' % number) for number in range(5_000)))
    part = {"name": table.name, "partition_data": [{"index": 0, "records": records}]}
    body = {"acks": -1, "timeout": 60_000, "topic_data": [part]}
    frame = memoryview(bytearray(encode_request(0, 9, 1, "me", body)[4:]))
    header = parse_header(frame)
    answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    call = Call(header, decode_request(header, frame), "host", answered.set_result, lambda: None)
    (entry,) = call.request.topic_data[0].partition_data
    assert isinstance(entry.records, memoryview)
    del entry
    produce(world.broker, call)
    assert call.keeps_frame
    await answered
    assert len(await rows(world, table)) == 5_000


# --- tables that come and go


async def test_a_topic_that_becomes_a_tables_while_its_batch_is_under_way_takes_nothing_unlooked_at(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_yet(*_: Any) -> CheckedBatches:
        return {}

    monkeypatch.setattr("tidemill.server.handlers.records.produce.look_quickly", not_yet)
    result = await world.produce(table.name, 0, batch_of(BAD_ROW))
    assert result.error_code == ErrorCode.leader_not_available
    assert result.error_code.retriable
    assert end(world) == 0


async def test_a_table_that_is_dropped_while_a_batch_is_looked_at_is_unknown(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_go_on, check = threading.Event(), service._check

    def slow_check(*arguments: Any) -> Any:
        may_go_on.wait(120)
        return check(*arguments)

    monkeypatch.setattr(service, "_check", slow_check)
    writing = asyncio.ensure_future(world.produce(table.name, 0, batch_of(GOOD)))
    await asyncio.sleep(0)
    await world.done("DropTable", name=table.name)
    may_go_on.set()
    result = await writing
    assert result.error_code == ErrorCode.unknown_topic_or_partition


async def test_a_bug_in_the_check_closes_the_connection_and_not_the_partition(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = service._check

    def broken(*arguments: Any) -> Any:
        raise RuntimeError("a bug")

    monkeypatch.setattr(service, "_check", broken)
    with pytest.raises(ConnectionError):
        await world.produce(table.name, 0, batch_of(GOOD))
    monkeypatch.setattr(service, "_check", check)
    assert (await world.produce(table.name, 0, batch_of(GOOD))).error_code == 0


async def test_a_node_without_tables_loads_nothing_of_them_to_write(world: TableWorld) -> None:
    topic = {"name": "plain", "num_partitions": 1, "replication_factor": 1}
    await world.ask_kafka("CreateTopics", 7, topics=[topic])
    assert (await world.produce("plain", 0, batch_of(NO_KEY))).error_code == 0
    assert world.broker.tables.loaded is None


# --- partitions of tables


async def test_a_row_in_the_topic_of_another_partition_is_refused(world: TableWorld) -> None:
    table = await world.create(
        "shop.parts",
        "region string, id bigint",
        primary_key=["region", "id"],
        partition_by="region",
        row_format="json",
    )
    for value in ("eu", "us"):
        await world.done("CreateTablePartition", table=table.name, value=value)
    table = await world.definition(table.name)
    eu, us = table.partitions
    record = b'["eu",1]', b'{"region":"eu","id":1}'
    assert (await world.produce(eu.topic, 0, batch_of(record))).error_code == 0
    wrong = await world.produce(us.topic, 0, batch_of(record))
    assert wrong.error_code == ErrorCode.invalid_record
    assert "a row of partition 'eu'" in wrong.error_message
    deletion = await world.produce(us.topic, 0, batch_of((record[0], None)))
    assert deletion.error_code == ErrorCode.invalid_record
