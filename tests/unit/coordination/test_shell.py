"""A shard and its log: what it serves, from when on, and when it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from support.coordination import MemoryLog, OneLog, VirtualClock, settle
from tidemill.coordination.log import ReplayedMarker, ReplayedRecord
from tidemill.coordination.shards import Shards
from tidemill.coordination.shell import ShardShell
from tidemill.errors import ApiError, ErrorCode


class Words(ShardShell):
    """A shard that keeps the keys of its log."""

    def __init__(
        self, log: MemoryLog, clock: VirtualClock, on_stop: Callable[[Any], None] | None = None
    ) -> None:
        super().__init__("words", 0, log, clock, on_stop or (lambda shard: None))
        self.words: list[str] = []
        self.told: list[ErrorCode] = []

    def say(self, word: str) -> None:
        self._note_appended(self.log.append([(word.encode(), b"")]))
        self.words.append(word)

    def _replay(self, entry: ReplayedRecord | ReplayedMarker, now_ms: int) -> None:
        assert isinstance(entry, ReplayedRecord)
        assert entry.key is not None
        self.words.append(entry.key.decode())

    def _loaded(self, now_ms: int) -> Iterable[str]:
        return ()

    def _next_deadline_ms(self, key: str) -> int | None:
        return None

    def _tick(self, key: str, now_ms: int) -> None:
        pass

    def _die(self, code: ErrorCode) -> None:
        self.told.append(code)


async def refused(waiting: asyncio.Future[Any]) -> ErrorCode:
    with pytest.raises(ApiError) as caught:
        await waiting
    return caught.value.code


def log_with(*words: str) -> MemoryLog:
    log = MemoryLog(syncs_at_once=False)
    for word in words:
        log.append([(word.encode(), b"")])
    return log


async def test_a_shard_folds_to_the_log_end_and_serves_once_that_is_committed() -> None:
    """An earlier leader may have acknowledged what this one only later finds to be committed."""
    log = log_with("a", "b")
    log.sync_one()
    shard = Words(log, VirtualClock())
    loading = asyncio.create_task(shard.load())
    await settle()
    assert not loading.done(), "the high watermark has not reached the end of the take-over"
    log.sync()
    await loading
    assert shard.words == ["a", "b"]


async def test_a_shard_stops_at_once_when_another_node_leads_its_log() -> None:
    log, clock, stopped = log_with(), VirtualClock(), list[object]()
    shard = Words(log, clock, stopped.append)
    await shard.load()
    waiting = asyncio.create_task(shard.call(None, lambda now_ms: shard.say("a")))
    await settle()
    log.lose_leadership()
    assert shard.told == [ErrorCode.not_coordinator]
    assert stopped == [shard]
    assert await refused(waiting) == ErrorCode.not_coordinator
    with pytest.raises(ApiError) as caught:
        shard.call_now(None, lambda now_ms: "a heartbeat, which needs no log")
    assert caught.value.code == ErrorCode.not_coordinator


async def test_leadership_that_is_lost_while_a_shard_loads_keeps_it_from_serving() -> None:
    log = log_with("a")
    made: list[Words] = []

    def make(partition: int, _: object, on_stop: Callable[[Any], None]) -> Words:
        made.append(Words(log, VirtualClock(), on_stop))
        return made[-1]

    shards = Shards[Words]("words", OneLog(log), VirtualClock(), make)
    loading = asyncio.create_task(shards.get(0))
    await settle()
    log.lose_leadership()
    assert await refused(loading) == ErrorCode.not_coordinator
    assert shards.loaded() == []


# --- the shards of a coordinator


class MovingLog(OneLog):
    """An internal topic of one partition that this node leads, or does not."""

    def __init__(self, log: MemoryLog) -> None:
        super().__init__(log)
        self.is_led = True

    def leads(self, partition: int) -> bool:
        return self.is_led

    def open_log(self, partition: int) -> MemoryLog:
        if not self.is_led:
            raise ApiError(ErrorCode.not_coordinator, "another node leads")
        return super().open_log(partition)


def shards_over(topic: MovingLog, clock: VirtualClock) -> Shards[Words]:
    return Shards("words", topic, clock, lambda partition, log, on_stop: Words(log, clock, on_stop))  # type: ignore[arg-type]


async def test_a_shard_is_loaded_although_the_lead_was_lost_and_won_again_meanwhile() -> None:
    log, clock = log_with("a"), VirtualClock()
    shards = shards_over(MovingLog(log), clock)
    taking = [asyncio.create_task(shards.take_over(0))]
    await settle()
    log.lose_leadership()
    taking.append(asyncio.create_task(shards.take_over(0)))
    await settle()
    assert shards.loaded() == []
    log.refuse_with = log._broken = None
    log.sync()
    await clock.advance(1_000)
    await settle()
    assert [shard.words for shard in shards.loaded()] == [["a"]]
    await asyncio.gather(*taking)


async def test_a_shard_that_another_node_leads_is_not_waited_for() -> None:
    log = log_with("a")
    topic = MovingLog(log)
    shards = shards_over(topic, VirtualClock())
    taking = asyncio.create_task(shards.take_over(0))
    await settle()
    topic.is_led = False
    log.lose_leadership()
    await taking
    assert shards.loaded() == []


async def test_a_stop_does_not_wait_for_nodes_that_keep_a_shard_from_being_loaded() -> None:
    shards = shards_over(MovingLog(log_with("a")), VirtualClock())
    asked = asyncio.create_task(shards.get(0))
    taking = asyncio.create_task(shards.take_over(0))
    await settle()
    await shards.close()
    assert await refused(asked) is ErrorCode.coordinator_not_available
    taking.cancel()
