"""Reading batches from given offsets, where the log has gaps and nodes fail."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tidemill.client.cluster import Cluster
from tidemill.client.consuming.batch_reader import BatchReader
from tidemill.errors import ErrorCode, NodeUnavailable
from tidemill.records.record import Record, build_batch

BATCH = build_batch([Record(None, b"a"), Record(None, b"b")], base_offset=10)


class FakeCluster:
    """Nodes that answer what they were told to."""

    timeout_ms = 1_000

    def __init__(self, answers: dict[int, list[Any]]) -> None:
        self.answers = answers

    async def leaders(self, places: Any) -> dict[int, list[tuple[str, int]]]:
        by_node: dict[int, list[tuple[str, int]]] = {}
        for place in places:
            by_node.setdefault(place[1], []).append(place)
        return by_node

    async def connection(self, node_id: int, purpose: str = "") -> Any:
        return SimpleNamespace(request=lambda *_, **__: self._answer(node_id))

    async def _answer(self, node_id: int) -> Any:
        answer = self.answers[node_id].pop(0) if self.answers[node_id] else None
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def retrying(self, attempt: Any, **_: Any) -> Any:
        return await attempt()


def entry(index: int, records: bytes = b"", *, stable: int = 12, watermark: int = 20, code: int = 0) -> Any:
    return SimpleNamespace(
        partition_index=index,
        error_code=ErrorCode(code),
        records=records,
        aborted_transactions=(),
        last_stable_offset=stable,
        high_watermark=watermark,
    )


def answer(*entries: Any) -> Any:
    return SimpleNamespace(error_code=0, responses=[SimpleNamespace(topic="t", partitions=entries)])


def reader(answers: dict[int, list[Any]], positions: dict[tuple[str, int], int], **more: Any) -> BatchReader:
    return BatchReader(cast("Cluster", FakeCluster(answers)), positions, **more)


@pytest.mark.parametrize(("committed", "end"), [(True, 12), (False, 20)])
async def test_a_position_in_front_of_a_gap_at_the_end_goes_to_the_end(committed: bool, end: int) -> None:
    reading = reader({0: [answer(entry(0))]}, {("t", 0): 10}, committed=committed)
    (fetched,) = await reading.poll()
    assert (fetched.batches, fetched.next_offset) == ([], end)
    assert reading.positions == {("t", 0): end}
    await reading.close()


async def test_a_partition_for_which_there_was_no_room_stays_where_it_is() -> None:
    places = {("t", 0): 10, ("u", 0): 5}
    full = SimpleNamespace(
        error_code=0,
        responses=[
            SimpleNamespace(topic="t", partitions=[entry(0, BATCH)]),
            SimpleNamespace(topic="u", partitions=[entry(0)]),
        ],
    )
    reading = reader({0: [full]}, places, committed=True)
    await reading.poll()
    assert reading.positions == {("t", 0): 12, ("u", 0): 5}
    await reading.close()


async def test_a_node_that_fails_costs_nothing_of_what_the_others_gave() -> None:
    lost = NodeUnavailable("gone")
    reading = reader({0: [answer(entry(0, BATCH))], 1: [lost]}, {("t", 0): 10, ("t", 1): 10})
    (fetched,) = await reading.poll()
    assert fetched.partition == ("t", 0)
    assert len(fetched.batches) == 1
    await reading.close()


async def test_a_fetch_that_failed_while_nobody_polled_is_dropped_with_the_reader() -> None:
    reading = reader({0: [answer(entry(0, BATCH))], 1: [None, NodeUnavailable("gone")]}, {("t", 0): 10})
    await reading.poll()
    reading.positions[("t", 1)] = 0
    polling = asyncio.ensure_future(reading.poll())
    await asyncio.sleep(0.01)
    polling.cancel()
    await asyncio.gather(polling, return_exceptions=True)
    await reading.close()


async def turns() -> None:
    """Let everything run that can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def test_up_to_its_end_a_reader_fetches_before_it_is_asked() -> None:
    behind = build_batch([Record(None, b"c")], base_offset=12)
    answers = {0: [answer(entry(0, BATCH)), answer(entry(0, behind)), answer(entry(0, BATCH))]}
    reading = reader(answers, {("t", 0): 10}, ends={("t", 0): 13})
    (first,) = await reading.poll()
    await turns()
    assert len(answers[0]) == 1
    assert reading.positions == {("t", 0): 12}, "what was not handed out is not read"
    (second,) = await reading.poll()
    assert (first.next_offset, second.next_offset) == (12, 13)
    await turns()
    assert len(answers[0]) == 1, "behind the end nothing is fetched"
    await reading.close()


async def test_what_was_fetched_before_it_was_asked_for_is_dropped_when_the_position_moves() -> None:
    behind = build_batch([Record(None, b"c")], base_offset=12)
    answers = {0: [answer(entry(0, BATCH)), answer(entry(0, behind)), answer(entry(0, BATCH))]}
    reading = reader(answers, {("t", 0): 10}, ends={("t", 0): 13})
    await reading.poll()
    await turns()
    reading.positions[("t", 0)] = 10
    assert await reading.poll() == []
    (again,) = await reading.poll()
    assert (again.from_offset, again.next_offset) == (10, 12)
    await reading.close()
