"""The gate in front of transactional writes: who may pass, in which order, and what the others are told."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

import pytest

from support.batches import plain_batch
from tidemill.control.commands import CreateTopic
from tidemill.errors import ErrorCode
from tidemill.records.record import Record, build_batch
from tidemill.replication.coordinator_log import wait_committed
from tidemill.server.broker import Broker
from tidemill.server.handlers.records.produce import produce
from tidemill.server.requests.call import Call, ReplyBuffers
from tidemill.transactions.messages import Producer
from tidemill.wire.encode import encode_request
from tidemill.wire.requests import decode_request, decode_response, parse_header

TRANSACTIONAL = 0x10
PLACE = ("orders", 0)


class Coordinator:
    """Answers as told, and remembers what it was asked. The real one is tested with real clients."""

    def __init__(self, broker: Broker, code: ErrorCode) -> None:
        self._broker = broker
        self._code = code
        self.asked: list[str] = []

    async def verify_all(self, name: str, producer: Producer, places: Any) -> dict[Any, ErrorCode]:
        return self._answer("verify", producer, places)

    async def add_partitions(self, name: str, producer: Producer, places: Any) -> ErrorCode:
        return self._answer("add", producer, places)[PLACE]

    def _answer(self, what: str, producer: Producer, places: Any) -> dict[Any, ErrorCode]:
        self.asked.append(what)
        if self._code is ErrorCode.none:
            for topic, index in places:
                self._broker.find.partition(self._broker.find.topic(topic), index).begin_transaction(
                    *producer
                )
        return dict.fromkeys(places, self._code)


@pytest.fixture
async def orders(broker: Broker) -> Broker:
    """A broker with a topic."""
    await broker.controller.submit(CreateTopic(name="orders", topic_id=uuid4(), partitions=1, replication=1))
    return broker


def batch(sequence: int, value: bytes = b"v") -> bytes:
    return build_batch(
        [Record(None, value)],
        producer_id=7,
        producer_epoch=0,
        base_sequence=sequence,
        attributes=TRANSACTIONAL,
    )


def send(broker: Broker, version: int, records: bytes, answers: list[ReplyBuffers]) -> Call:
    body = {
        "transactional_id": "t",
        "acks": 1,
        "timeout": 1000,
        "topic_data": [{"name": "orders", "partition_data": [{"index": 0, "records": records}]}],
    }
    frame = encode_request(0, version, 1, "test", body)[4:]
    header = parse_header(frame)
    call = Call(header, decode_request(header, frame), "host", answers.append, lambda: None)
    produce(broker, call)
    return call


def code_of(version: int, answer: ReplyBuffers) -> ErrorCode:
    frame = b"".join(answer)[4:]
    response = decode_response(0, version, frame)[1]
    return ErrorCode(response.responses[0].partition_responses[0].error_code)


async def settled(broker: Broker) -> None:
    """Wait until all that was sent is through the gate, and what was written is on disk."""
    while waiting := [*broker.transactional_writes.values(), *broker.gated_writes.values()]:
        for task in waiting:
            await task
        await asyncio.sleep(0)
    partition = broker.find.partition(broker.find.topic("orders"), 0)
    await wait_committed(partition, partition.local_log.end_offset)


async def test_the_first_batch_asks_the_coordinator_and_the_next_does_not(
    orders: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator(orders, ErrorCode.none)
    monkeypatch.setattr(Broker, "transactions", coordinator)
    answers: list[ReplyBuffers] = []
    send(orders, 9, batch(0), answers)
    assert answers == [], "nothing is written before the coordinator has answered"
    await settled(orders)
    send(orders, 9, batch(1), answers)
    await settled(orders)
    assert [code_of(9, answer) for answer in answers] == [ErrorCode.none, ErrorCode.none]
    assert coordinator.asked == ["verify"]


async def test_a_failure_at_the_gate_is_logged(
    orders: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = Coordinator(orders, ErrorCode.none)
    coordinator._answer = None  # type: ignore[method-assign, assignment]
    monkeypatch.setattr(Broker, "transactions", coordinator)
    answers: list[ReplyBuffers] = []
    send(orders, 9, batch(0), answers)
    with pytest.raises(TypeError):
        await settled(orders)
    await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records] == ["a transactional write failed at the gate"]
    assert answers == []


async def test_from_version_twelve_the_partition_is_added_by_the_write(
    orders: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator(orders, ErrorCode.none)
    monkeypatch.setattr(Broker, "transactions", coordinator)
    answers: list[ReplyBuffers] = []
    send(orders, 12, batch(0), answers)
    await settled(orders)
    assert code_of(12, answers[0]) == ErrorCode.none
    assert coordinator.asked == ["add"]


async def test_requests_behind_one_that_waits_keep_their_order(
    orders: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broker, "transactions", Coordinator(orders, ErrorCode.none))
    answers: list[ReplyBuffers] = []
    for sequence in range(5):
        send(orders, 9, batch(sequence), answers)
    await settled(orders)
    assert [code_of(9, answer) for answer in answers] == [ErrorCode.none] * 5
    partition = orders.find.partition(orders.find.topic("orders"), 0)
    assert partition.local_log.end_offset == 5


@pytest.mark.parametrize(
    ("version", "code", "told"),
    [
        (9, ErrorCode.invalid_txn_state, ErrorCode.invalid_txn_state),
        (9, ErrorCode.concurrent_transactions, ErrorCode.not_enough_replicas),
        (12, ErrorCode.concurrent_transactions, ErrorCode.concurrent_transactions),
        (10, ErrorCode.transaction_abortable, ErrorCode.invalid_txn_state),
        (11, ErrorCode.transaction_abortable, ErrorCode.transaction_abortable),
        (9, ErrorCode.invalid_producer_epoch, ErrorCode.invalid_producer_epoch),
        (7, ErrorCode.producer_fenced, ErrorCode.invalid_producer_epoch),
        (11, ErrorCode.producer_fenced, ErrorCode.invalid_producer_epoch),
        (12, ErrorCode.producer_fenced, ErrorCode.invalid_producer_epoch),
    ],
)
async def test_a_refusal_is_told_in_words_that_the_client_knows(
    orders: Broker, monkeypatch: pytest.MonkeyPatch, version: int, code: ErrorCode, told: ErrorCode
) -> None:
    monkeypatch.setattr(Broker, "transactions", Coordinator(orders, code))
    answers: list[ReplyBuffers] = []
    send(orders, version, batch(0), answers)
    await settled(orders)
    assert code_of(version, answers[0]) == told
    assert orders.find.partition(orders.find.topic("orders"), 0).local_log.end_offset == 0


async def test_the_memory_of_a_request_is_kept_while_it_waits_for_the_coordinator(
    orders: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Broker, "transactions", Coordinator(orders, ErrorCode.none))
    answers: list[ReplyBuffers] = []
    value = b"x" * 20_000
    records = batch(0, value)
    body = {
        "transactional_id": "t",
        "acks": 1,
        "timeout": 1000,
        "topic_data": [{"name": "orders", "partition_data": [{"index": 0, "records": records}]}],
    }
    memory = bytearray(encode_request(0, 9, 1, "test", body)[4:])
    frame = memoryview(memory).toreadonly()
    header = parse_header(frame)
    call = Call(header, decode_request(header, frame), "host", answers.append, lambda: None)
    produce(orders, call)
    assert call.keeps_frame
    await settled(orders)
    assert code_of(9, answers[0]) == ErrorCode.none


async def test_a_plain_batch_under_a_transactional_id_does_not_ask(
    orders: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator(orders, ErrorCode.none)
    monkeypatch.setattr(Broker, "transactions", coordinator)
    answers: list[ReplyBuffers] = []
    send(orders, 9, plain_batch("v"), answers)
    await settled(orders)
    assert code_of(9, answers[0]) == ErrorCode.none
    assert coordinator.asked == []
