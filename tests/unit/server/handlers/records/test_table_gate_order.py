"""What the gate of tables owes to everything else in a request, and to those that come behind it."""

from __future__ import annotations

import asyncio
import struct
import threading
from typing import Any

import pytest
from crc32c import crc32c

from support.table_world import TableWorld, batch_of
from tidemill.errors import ErrorCode, StorageError
from tidemill.records.batch import HEADER_BYTES
from tidemill.records.record import read_records
from tidemill.server.broker.gated_writes import GatedWrites
from tidemill.tables.definition import TableDefinition
from tidemill.tables.state import service

SOON = 120


@pytest.fixture
async def table(world: TableWorld) -> TableDefinition:
    """A table of one bucket, beside a topic that is no table's."""
    topic = {"name": "plain", "num_partitions": 2, "replication_factor": 1}
    await world.ask_kafka("CreateTopics", 7, topics=[topic])
    return await world.create("shop.orders", "id bigint, name string", row_format="json")


class SlowCheck:
    """Keeps batches at the gate until it is told to let them go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_go_on, self.begun, self._real = threading.Event(), threading.Event(), service._check
        monkeypatch.setattr(service, "_check", self)

    def __call__(self, *arguments: Any) -> Any:
        self.begun.set()
        self.may_go_on.wait(SOON)
        return self._real(*arguments)


async def send(world: TableWorld, *parts: tuple[str, int, bytes], acks: int = -1) -> list[Any]:
    """The results of one request with several partitions."""
    data = [
        {"name": topic, "partition_data": [{"index": index, "records": records}]}
        for topic, index, records in parts
    ]
    response = await world.ask_kafka("Produce", 9, acks=acks, timeout=60_000, topic_data=data)
    return [result for topic in response.responses for result in topic.partition_responses]


def order(world: TableWorld, topic: str, index: int = 0) -> list[bytes]:
    """The values in the log."""
    log = world.broker.find.partition(world.broker.find.topic(topic), index).local_log
    found = []
    for batch in log.read_batches(0, log.end_offset):
        found += [record.value or b"" for record in read_records(batch)]
    return found


async def test_batches_for_a_plain_topic_beside_a_table_keep_their_order(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowCheck(monkeypatch)
    row = batch_of((b"1", b'{"id":1}'))
    first = asyncio.ensure_future(
        send(world, ("plain", 0, batch_of((None, b"first"))), ("shop.orders", 0, row))
    )
    await asyncio.to_thread(slow.begun.wait, SOON)
    second = asyncio.ensure_future(send(world, ("plain", 0, batch_of((None, b"second")))))
    other = await send(world, ("plain", 1, batch_of((None, b"elsewhere"))))
    assert other[0].error_code == 0
    assert not second.done()
    slow.may_go_on.set()
    results = [*(await first), *(await second)]
    assert [result.error_code for result in results] == [0, 0, 0]
    assert order(world, "plain") == [b"first", b"second"]
    assert world.broker.gated_writes == {}


async def test_two_batches_for_one_bucket_in_one_request_are_refused(
    world: TableWorld, table: TableDefinition
) -> None:
    # Else the rows of one would be folded for the other.
    parts = [{"index": 0, "records": batch_of((b"%d" % n, b'{"id":%d}' % n))} for n in (1, 2)]
    response = await world.ask_kafka(
        "Produce", 9, acks=-1, timeout=60_000, topic_data=[{"name": "shop.orders", "partition_data": parts}]
    )
    codes = [result.error_code for result in response.responses[0].partition_responses]
    assert codes == [ErrorCode.invalid_request] * 2
    assert order(world, "shop.orders") == []


async def test_rows_that_were_looked_at_for_a_table_do_not_go_into_another_of_its_name(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowCheck(monkeypatch)
    writing = asyncio.ensure_future(send(world, ("shop.orders", 0, batch_of((b"1", b'{"id":1}')))))
    await asyncio.to_thread(slow.begun.wait, SOON)
    await world.done("DropTable", name=table.name, if_exists=False)
    await world.create("shop.orders", "id bigint not null, colour string not null", row_format="json")
    slow.may_go_on.set()
    (result,) = await writing
    assert result.error_code == ErrorCode.leader_not_available
    assert order(world, "shop.orders") == []


def renumbered(batch: bytes, *deltas: int) -> bytes:
    """A batch of small records whose offset deltas are these."""
    data = bytearray(batch)
    position = HEADER_BYTES
    for delta in deltas:
        length = data[position] >> 1
        data[position + 3] = delta << 1
        position += 1 + length
    struct.pack_into(">I", data, 17, crc32c(bytes(data[21:])))
    return bytes(data)


async def test_records_that_do_not_stand_in_their_order_are_refused(
    world: TableWorld, table: TableDefinition
) -> None:
    batch = batch_of((b"1", b'{"id":1}'), (b"2", b'{"id":2}'))
    assert renumbered(batch, 0, 1) == batch
    for deltas in ((1, 0), (0, 0), (1, 1)):
        result = await world.produce("shop.orders", 0, renumbered(batch, *deltas))
        assert result.error_code == ErrorCode.invalid_record, deltas
        assert "says that it is number" in result.error_message
    assert (await world.produce("shop.orders", 0, batch)).error_code == 0
    assert [row["id"] for found in await world.scan(table) for row in found] == [1, 2]


async def test_a_batch_that_was_damaged_on_the_way_is_to_be_sent_again(
    world: TableWorld, table: TableDefinition
) -> None:
    batch = bytearray(batch_of((b"1", b'{"id":1}')))
    batch[-3] ^= 0x40
    result = await world.produce("shop.orders", 0, bytes(batch))
    assert result.error_code == ErrorCode.corrupt_message
    assert result.error_code.retriable


async def test_a_batch_of_too_many_records_is_refused_before_they_are_unpacked(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_BATCH_RECORDS_MAX", 1)
    batch = batch_of((b"1", b'{"id":1}'), (b"2", b'{"id":2}'))
    result = await world.produce("shop.orders", 0, batch)
    assert result.error_code == ErrorCode.invalid_record
    assert "2 records" in result.error_message


async def test_a_table_without_a_key_that_is_compacted_all_the_same_takes_no_record_without_one(
    world: TableWorld,
) -> None:
    # Compaction would drop it.
    table = await world.create(
        "shop.events",
        "id bigint",
        primary_key=(),
        row_format="json",
        properties={"cleanup.policy": "compact"},
    )
    result = await world.produce(table.name, 0, batch_of((None, b'{"id":1}')))
    assert result.error_code == ErrorCode.invalid_record
    assert (await world.produce(table.name, 0, batch_of((b"k", b'{"id":1}')))).error_code == 0


async def test_a_batch_whose_state_cannot_be_opened_is_written_all_the_same(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise StorageError("no state here")

    monkeypatch.setattr(service.TableService, "bucket", fail)
    assert (await world.produce("shop.orders", 0, batch_of((b"1", b'{"id":1}')))).error_code == 0


async def test_a_node_that_stops_writes_what_waits_at_the_gate_first(
    world: TableWorld, table: TableDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowCheck(monkeypatch)
    writing = asyncio.ensure_future(send(world, ("shop.orders", 0, batch_of((b"1", b'{"id":1}')))))
    await asyncio.to_thread(slow.begun.wait, SOON)
    waits, finish = asyncio.Event(), GatedWrites.finish

    async def noted(self: GatedWrites) -> None:
        waits.set()
        await finish(self)

    monkeypatch.setattr(GatedWrites, "finish", noted)
    stopping = asyncio.ensure_future(world.broker.close())
    await waits.wait()
    slow.may_go_on.set()
    assert await stopping
    (result,) = await writing
    assert (result.error_code, result.base_offset) == (0, 0)
