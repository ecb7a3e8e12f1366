"""A shard and its log: what it serves, from when on, and when it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from support.coordination import MemoryLog, OneLog, VirtualClock, settle
from tidemill.coordination.log import ReplayedRecord
from tidemill.coordination.shards import Shards
from tidemill.coordination.shell import ShardShell
from tidemill.errors import ApiError, CorruptData, ErrorCode

#: Stands for the key of a record that a newer version has written.
UNKNOWN = b"?"
NOT_LED = (ErrorCode.not_leader_or_follower, ErrorCode.not_coordinator)


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

    def _replay_record(self, entry: ReplayedRecord, now_ms: int) -> bool:
        assert entry.key is not None
        if entry.key == UNKNOWN:
            return False
        self.words.append(entry.key.decode())
        return True

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


async def test_a_record_of_an_unknown_kind_is_skipped_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = log_with("a", UNKNOWN.decode(), "b")
    log.sync()
    shard = Words(log, VirtualClock())
    await shard.load()
    assert shard.words == ["a", "b"]
    assert [record.getMessage() for record in caplog.records] == [
        "words-0 at offset 1: skipped a record whose kind is unknown to this version"
    ]


async def test_a_marker_keeps_a_shard_from_serving_that_no_transaction_writes_to() -> None:
    log = log_with("a")
    log.append_marker(1, 0, commit=True, coordinator_epoch=0)
    log.sync()
    with pytest.raises(CorruptData, match="offset 1 cannot be used: a transaction marker does not belong"):
        await Words(log, VirtualClock()).load()


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


# --- what is newest


async def test_a_reply_for_which_nothing_was_written_waits_until_the_log_is_known_to_be_the_newest() -> None:
    log = MemoryLog()
    shard = Words(log, VirtualClock())
    await shard.load()
    log.newest = False
    assert await refused(asyncio.ensure_future(shard.call(None, lambda _: shard.words))) in NOT_LED
    log.confirmed = True
    assert await shard.call(None, lambda _: shard.words) == []
    assert log.questions == 2


async def test_a_refusal_of_a_shard_that_may_be_deposed_is_not_told() -> None:
    log = MemoryLog()
    shard = Words(log, VirtualClock())
    await shard.load()

    def refuse(now_ms: int) -> None:
        raise ApiError(ErrorCode.unknown_member_id, "nobody of that name")

    log.newest = False
    assert await refused(asyncio.ensure_future(shard.call(None, refuse))) in NOT_LED
    log.newest = True
    assert await refused(asyncio.ensure_future(shard.call(None, refuse))) == ErrorCode.unknown_member_id


async def test_what_a_shard_has_written_and_committed_needs_no_other_proof() -> None:
    log = MemoryLog()
    shard = Words(log, VirtualClock())
    await shard.load()
    log.newest = False
    await shard.call(None, lambda _: shard.say("a"))
    assert (shard.words, log.questions) == (["a"], 0)


class Ticking(Words):
    """A shard in which everything falls due at one time."""

    DUE_MS = 2_000_000

    def __init__(self, log: MemoryLog, clock: VirtualClock) -> None:
        super().__init__(log, clock)
        self.ticked: list[str] = []

    def _next_deadline_ms(self, key: str) -> int | None:
        return None if key in self.ticked else self.DUE_MS

    def _tick(self, key: str, now_ms: int) -> None:
        assert now_ms >= self.DUE_MS
        self.ticked.append(key)


async def test_what_falls_due_together_is_done_a_few_in_each_turn() -> None:
    clock = VirtualClock()
    shard = Ticking(log_with(), clock)
    await shard.load()
    names = [f"{number:03}" for number in range(25)]
    for name in names:
        shard.call_now(name, lambda now_ms: None)
    clock.ms = shard.DUE_MS
    for done in (10, 20, 25):
        ((_, callback),) = clock.timers.values()
        clock.timers.clear()
        callback()
        assert shard.ticked == names[:done]
    assert clock.timers == {}


async def test_the_node_s_own_changes_are_not_held_up_by_what_is_newest() -> None:
    log = MemoryLog()
    shard = Words(log, VirtualClock())
    await shard.load()
    log.newest = False
    await shard.change(None, lambda _: None)
    assert log.questions == 0


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
