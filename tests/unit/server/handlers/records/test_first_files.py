"""The first files of a partition are made in a thread, whoever writes to it first."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from support.batches import plain_batch
from tidemill.control.commands import CreateTopic
from tidemill.errors import ErrorCode, StorageError
from tidemill.log.creation import LogCreation
from tidemill.log.notes.checkpoint import CheckpointFile
from tidemill.server.broker import Broker
from tidemill.server.coordinators.transaction_partitions import LocalTransactionPartitions
from tidemill.server.handlers.records.produce import produce
from tidemill.server.requests.call import Call, ReplyBuffers
from tidemill.transactions.messages import Producer, TransactionEnd
from tidemill.wire.encode import encode_request
from tidemill.wire.requests import decode_request, decode_response, parse_header


@pytest.fixture
async def new(broker: Broker) -> Broker:
    """A broker with a topic that nobody has written to."""
    await broker.controller.submit(CreateTopic(name="new", topic_id=uuid4(), partitions=9, replication=1))
    return broker


@pytest.fixture
def found_done(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each first append: whether it found the files made."""
    found: list[bool] = []
    take = LogCreation.take

    def recording(self: LogCreation) -> CheckpointFile:
        found.append(self.is_done)
        return take(self)

    monkeypatch.setattr(LogCreation, "take", recording)
    return found


async def codes_of(broker: Broker, partitions: int) -> list[int]:
    """Produce one batch to each of the first partitions; gives the error codes."""
    entries = [{"index": index, "records": plain_batch("v")} for index in range(partitions)]
    body = {"acks": 0, "timeout": 1000, "topic_data": [{"name": "new", "partition_data": entries}]}
    frame = encode_request(0, 9, 1, "test", body | {"acks": 1})[4:]
    header = parse_header(frame)
    answered: asyncio.Future[ReplyBuffers] = asyncio.get_running_loop().create_future()
    produce(broker, Call(header, decode_request(header, frame), "host", answered.set_result, lambda: None))
    response = decode_response(0, 9, b"".join(await answered)[4:])[1]
    return [each.error_code for each in response.responses[0].partition_responses]


async def test_a_first_batch_finds_the_files_made(new: Broker, found_done: list[bool]) -> None:
    assert await codes_of(new, 9) == [ErrorCode.none] * 9
    assert found_done == [True] * 9


async def test_a_batch_for_a_partition_with_files_does_not_wait_at_the_gate(new: Broker) -> None:
    await codes_of(new, 1)
    writing = asyncio.ensure_future(codes_of(new, 1))
    await asyncio.sleep(0)
    assert not new.gated_writes
    assert await writing == [ErrorCode.none]


async def test_files_that_cannot_be_made_refuse_the_batch(
    new: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: LogCreation) -> None:
        raise StorageError("no directory today")

    monkeypatch.setattr(LogCreation, "run", fail)
    assert await codes_of(new, 2) == [ErrorCode.kafka_storage_error] * 2


async def test_a_first_marker_finds_the_files_made(new: Broker, found_done: list[bool]) -> None:
    partitions = LocalTransactionPartitions.of(new)
    ends = [
        TransactionEnd(Producer(producer_id, 0), commit=True, coordinator_epoch=0) for producer_id in (1, 2)
    ]
    await asyncio.gather(
        partitions.write_markers(("new", 0), ends[:1]),
        *(partitions.write_markers(("new", index), ends) for index in range(1, 9)),
    )
    assert found_done == [True] * 9
