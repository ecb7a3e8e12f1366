"""Batches reach a partition in order and once, whatever gets lost on the way.

The node here checks producers as a partition does: a batch is written if its sequence number is the next one,
recognised if it is one of the last five, and refused otherwise.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.client.cluster import Cluster
from tidemill.client.producing.producer import Producer
from tidemill.client.producing.sender import WINDOW, Encoded, Sender, Stamp
from tidemill.errors import ApiError, ErrorCode, NodeUnavailable
from tidemill.net.retry import RetryPolicy, retry
from tidemill.records.record import Record, read_records
from tidemill.wire.jobs import AttemptId

PLACE = ("t", 0)
LOST_REQUEST, LOST_ANSWER = "lost request", "lost answer"
NOT_LEADER = ErrorCode.not_leader_or_follower


class Node:
    """A cluster of one node and one partition. Each request takes one of ``faults``."""

    attempt_ms = 1_000

    def __init__(self, faults: Iterable[Any] = ()) -> None:
        self.faults = deque(faults)
        self.written: list[bytes] = []
        self.sent: list[tuple[Stamp, int]] = []
        self.producers = 0
        self._ends: dict[int, int] = {}
        self._recent: dict[int, deque[tuple[int, int]]] = {}

    def forget_producers(self) -> None:
        self._ends.clear()
        self._recent.clear()

    # --- as the cluster

    async def retrying(self, attempt: Any, *, policy: RetryPolicy) -> Any:
        return await retry(attempt, RetryPolicy(policy.timeout_ms, 0, 0))

    async def leaders(self, places: Any) -> dict[int, Any]:
        return {1: places}

    async def connection(self, node_id: int, purpose: str) -> Node:
        assert (node_id, purpose) == (1, "produce")
        return self

    async def topic(self, name: str, *, create: bool) -> Any:
        return SimpleNamespace(name=name, partitions=(None,))

    async def to_any(self, name: str, body: Any) -> Any:
        assert name == "InitProducerId"
        self.producers += 1
        return SimpleNamespace(error_code=0, producer_id=self.producers, producer_epoch=0)

    # --- as the connection

    async def send_unanswered(self, name: str, body: Any, **_: Any) -> None:
        self._append(body["topic_data"][0]["partition_data"][0]["records"])

    async def request(self, name: str, body: Any, **_: Any) -> Any:
        data = body["topic_data"][0]["partition_data"][0]["records"]
        await asyncio.sleep(0)
        fault = self.faults.popleft() if self.faults else None
        if fault == LOST_REQUEST:
            raise NodeUnavailable("the connection broke")
        code, offset = (fault, -1) if isinstance(fault, ErrorCode) else self._append(data)
        if fault == LOST_ANSWER:
            raise NodeUnavailable("the connection broke")
        answer = SimpleNamespace(error_code=int(code), base_offset=offset, error_message=None)
        return SimpleNamespace(responses=[SimpleNamespace(partition_responses=[answer])])

    def _append(self, data: Any) -> tuple[ErrorCode, int]:
        stamp, records = data
        self.sent.append((stamp, len(records)))
        if stamp.producer_id >= 0:
            recent = self._recent.setdefault(stamp.producer_id, deque(maxlen=5))
            for sequence, offset in recent:
                if sequence == stamp.base_sequence:
                    return ErrorCode.none, offset
            known = self._ends.get(stamp.producer_id)
            if stamp.base_sequence != (known or 0):
                return ErrorCode.out_of_order_sequence_number, -1
            self._ends[stamp.producer_id] = stamp.base_sequence + len(records)
            recent.append((stamp.base_sequence, len(self.written)))
        offset = len(self.written)
        self.written += records
        return ErrorCode.none, offset


def sender_of(node: Node, **options: Any) -> Sender:
    return Sender(cast(Cluster, node), **({"delivery_timeout_ms": 60_000} | options))


class Window:
    """Encodes some batches, the stamp and the records instead of bytes."""

    def __init__(self, *batches: list[bytes]) -> None:
        self._batches = batches

    async def __call__(self, stamp: Stamp) -> list[Encoded]:
        made = []
        for records in self._batches:
            made.append(Encoded(cast(bytes, (stamp, records)), len(records)))
            stamp = stamp.behind(len(records))
        return made


def numbered(first: int, count: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


async def test_windows_go_out_under_one_producer_with_rising_sequences() -> None:
    node = Node()
    sender = sender_of(node)
    assert await sender.send(PLACE, Window(numbered(0, 2), numbered(2, 3))) == [0, 2]
    assert await sender.send(PLACE, Window(numbered(5, 1))) == [5]
    assert [stamp.base_sequence for stamp, _ in node.sent] == [0, 2, 5]
    assert node.producers == 1


@settings(max_examples=150)
@given(
    sizes=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=WINDOW), min_size=1, max_size=4),
    faults=st.lists(st.none() | st.sampled_from([LOST_REQUEST, LOST_ANSWER, NOT_LEADER]), max_size=14),
)
def test_every_record_is_written_once_and_in_order_whatever_gets_lost(
    sizes: list[list[int]], faults: list[Any]
) -> None:
    async def story() -> None:
        node, count = Node(faults), 0
        sender = sender_of(node)
        for window in sizes:
            batches, starts = [], []
            for size in window:
                starts.append(count)
                batches.append(numbered(count, size))
                count += size
            assert await sender.send(PLACE, Window(*batches)) == starts
        assert node.written == numbered(0, count)
        assert node.producers == 1

    asyncio.run(story())


async def test_what_failed_for_good_is_left_behind_under_another_producer() -> None:
    node = Node([None, ErrorCode.message_too_large])
    sender = sender_of(node)
    await sender.send(PLACE, Window([b"a"]))
    with pytest.raises(ApiError, match="MESSAGE_TOO_LARGE"):
        await sender.send(PLACE, Window([b"large"]))
    await sender.send(PLACE, Window([b"b"]))
    assert node.written == [b"a", b"b"]
    assert [(stamp.producer_id, stamp.base_sequence) for stamp, _ in node.sent] == [(1, 0), (2, 0)]


async def test_a_producer_that_the_server_has_forgotten_is_replaced_and_nothing_is_lost() -> None:
    node = Node()
    sender = sender_of(node)
    await sender.send(PLACE, Window([b"a"]))
    node.forget_producers()
    assert await sender.send(PLACE, Window([b"b"], [b"c"])) == [1, 2]
    assert node.written == [b"a", b"b", b"c"]
    assert node.producers == 2


async def test_a_transaction_that_lost_a_batch_is_broken_for_good() -> None:
    node = Node([None, ErrorCode.message_too_large])
    sender = sender_of(node, transaction=AttemptId("job#1", 77, 3))
    await sender.send(PLACE, Window([b"a"]))
    assert node.sent == [(Stamp(77, 3, 0, is_transactional=True), 1)]
    with pytest.raises(ApiError, match="MESSAGE_TOO_LARGE"):
        await sender.send(PLACE, Window([b"large"]))
    with pytest.raises(ApiError, match="a batch of this transaction was lost on its way to t-0"):
        await sender.send(PLACE, Window([b"b"]))
    assert node.producers == 0


@pytest.mark.parametrize("acks", [0, 1])
async def test_without_acks_of_all_there_is_no_producer_and_no_sequence(acks: int) -> None:
    node = Node()
    sender = sender_of(node, acks=acks)
    for number in range(2):
        assert await sender.send(PLACE, Window([b"a"])) == [number if acks else -1]
    assert node.sent == [(Stamp(-1, -1, -1), 1)] * 2
    assert node.producers == 0


async def test_a_topic_that_is_another_one_is_begun_anew() -> None:
    node = Node()
    sender = sender_of(node)
    await sender.send(PLACE, Window([b"a"]))
    sender.forget("t")
    await sender.send(PLACE, Window([b"b"]))
    assert [(stamp.producer_id, stamp.base_sequence) for stamp, _ in node.sent] == [(1, 0), (2, 0)]


# --- the front end for single records


class Log(Node):
    """Takes real batches."""

    def _append(self, data: Any) -> tuple[ErrorCode, int]:
        offset = len(self.written)
        self.written += [record.value or b"" for record in read_records(memoryview(data))]
        return ErrorCode.none, offset


async def test_records_of_a_producer_are_told_where_they_went() -> None:
    node = Log([NOT_LEADER])
    async with Producer(cast(Cluster, node), batch_bytes=100) as producer:
        futures = [await producer.send("t", Record(None, value)) for value in numbered(0, 20)]
    assert [future.result().offset for future in futures] == list(range(20))
    assert node.written == numbered(0, 20)


async def test_a_refused_batch_fails_its_own_records_only() -> None:
    node = Log([ErrorCode.message_too_large])
    async with Producer(cast(Cluster, node), batch_bytes=1) as producer:
        first, second = [await producer.send("t", Record(None, value)) for value in (b"a", b"b")]
    assert isinstance(first.exception(), ApiError)
    assert second.result().offset == 0
    assert node.written == [b"b"]
