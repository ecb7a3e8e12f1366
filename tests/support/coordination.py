"""A coordinator under a script: time by hand, a log whose durability is a test's choice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from tidemill.coordination.log import ReplayedMarker, ReplayedRecord
from tidemill.errors import ApiError, DiskFull, ErrorCode, SyncFailed, TidemillError
from tidemill.records.record import Record, build_batch, read_records

__all__ = ("MemoryLog", "OneLog", "VirtualClock", "settle")

_TURNS = 30


async def settle() -> None:
    """Let every task go as far as it can."""
    for _ in range(_TURNS):
        await asyncio.sleep(0)


class VirtualClock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.ms = 1_000_000
        self.timers: dict[object, tuple[int, Callable[[], None]]] = {}

    def now_ms(self) -> int:
        return self.ms

    def call_at(self, when_ms: int, callback: Callable[[], None]) -> Any:
        timers = self.timers

        class Handle:
            def cancel(self) -> None:
                timers.pop(self, None)

        handle = Handle()
        timers[handle] = (when_ms, callback)
        return handle

    async def advance(self, duration_ms: int) -> None:
        end_ms = self.ms + duration_ms
        while due := [
            (when, id(handle), handle) for handle, (when, _) in self.timers.items() if when <= end_ms
        ]:
            when_ms, _, handle = min(due)
            self.ms = max(self.ms, when_ms)
            self.timers.pop(handle)[1]()
            await settle()
        self.ms = end_ms
        await settle()


class MemoryLog:
    """One partition of an internal topic. What is appended is durable at once, or when ``sync`` is called."""

    def __init__(self, *, syncs_at_once: bool = True) -> None:
        self.entries: list[ReplayedRecord | ReplayedMarker] = []
        self.start_offset = 0
        self.high_watermark = 0
        self.leader_epoch = 0
        self.syncs_at_once = syncs_at_once
        self.refuse_with: TidemillError | None = None
        #: Whether giving up the reserve would make an append work that finds no space.
        self.has_reserve = False
        #: Whether it is certain that nobody else leads; and if not, whether other nodes confirm it.
        self.newest, self.confirmed = True, False
        self.questions = 0
        self._broken: TidemillError | None = None
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []
        self._dependents: dict[object, Callable[[], None]] = {}
        #: Where each append ended: what was appended as one is lost or kept as one.
        self._ends: list[int] = []

    def append(self, records: Sequence[tuple[bytes, bytes | None]]) -> int:
        return self._append([ReplayedRecord(-1, key, value) for key, value in records])

    def build(self, records: Sequence[tuple[bytes, bytes | None]]) -> bytes:
        return build_batch([Record(key, value, 0) for key, value in records])

    def give_up_reserve(self, error: DiskFull) -> bool:
        self.refuse_with = None if self.has_reserve else self.refuse_with
        gave_up, self.has_reserve = self.has_reserve, False
        return gave_up

    def append_built(self, batch: bytes) -> int:
        return self._append([ReplayedRecord(-1, record.key, record.value) for record in read_records(batch)])

    def append_transactional(
        self, records: Sequence[tuple[bytes, bytes | None]], producer_id: int, producer_epoch: int
    ) -> int:
        return self._append([ReplayedRecord(-1, key, value, producer_id) for key, value in records])

    def append_marker(
        self, producer_id: int, producer_epoch: int, *, commit: bool, coordinator_epoch: int
    ) -> int:
        return self._append([ReplayedMarker(-1, producer_id, commit)])

    def _append(self, entries: Sequence[ReplayedRecord | ReplayedMarker]) -> int:
        if self.refuse_with is not None:
            raise self.refuse_with
        assert entries
        start = len(self.entries)
        self.entries += [entry._replace(offset=start + number) for number, entry in enumerate(entries)]
        self._ends.append(len(self.entries))
        if self.syncs_at_once:
            self.sync()
        return len(self.entries)

    def is_newest(self) -> bool:
        return self.newest

    async def confirm_newest(self) -> None:
        """Nobody can be asked: what the lease does not prove is not certain."""
        self.questions += 1
        if not self.confirmed:
            raise ApiError(ErrorCode.not_leader_or_follower, "another node may lead by now")

    def committed(self, offset: int) -> Awaitable[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((offset, future))
        self._wake()
        return future

    def position_of(self, offset: int) -> tuple[str, int]:
        return "memory.log", offset

    @property
    def end_offset(self) -> int:
        return len(self.entries)

    @property
    def append_sizes(self) -> list[int]:
        """How many entries each append brought."""
        return [end - start for start, end in pairwise([0, *self._ends])]

    def replay(self, end_offset: int) -> Iterator[ReplayedRecord | ReplayedMarker]:
        yield from self.entries[self.start_offset : end_offset]

    def delete_below(self, offset: int) -> None:
        self.start_offset = max(self.start_offset, min(offset, self.last_stable_offset))

    @property
    def last_stable_offset(self) -> int:
        """The first offset of an open transaction, or the high watermark."""
        open_since: dict[int, int] = {}
        for entry in self.entries:
            if isinstance(entry, ReplayedMarker):
                open_since.pop(entry.producer_id, None)
            elif entry.producer_id != -1:
                open_since.setdefault(entry.producer_id, entry.offset)
        return min([self.high_watermark, *open_since.values()])

    def depend(self, key: object, leadership_lost: Callable[[], None]) -> None:
        self._dependents[key] = leadership_lost

    def release(self, key: object) -> None:
        self._dependents.pop(key, None)

    def lose_leadership(self) -> None:
        """Another node becomes the leader: nothing is committed here any more."""
        lost = ApiError(ErrorCode.not_leader_or_follower, "another node leads")
        self.refuse_with = self._broken = lost
        self._wake()
        for leadership_lost in list(self._dependents.values()):
            leadership_lost()

    def sync(self) -> None:
        """Make everything durable."""
        self.high_watermark = len(self.entries)
        self._wake()

    def sync_one(self) -> None:
        """Make the next of what was appended durable."""
        self.high_watermark = next(
            (end for end in self._ends if end > self.high_watermark), len(self.entries)
        )
        self._wake()

    def fail_sync(self) -> None:
        """What an fsync that fails does: the tail is gone, the partition has stopped."""
        self._broken = SyncFailed("fsync failed")
        self.crash()
        self._wake()

    def crash(self) -> None:
        """Lose what is not durable; the next leader has a new epoch."""
        del self.entries[self.high_watermark :]
        self._ends = [end for end in self._ends if end <= self.high_watermark]
        self.leader_epoch += 1

    def _wake(self) -> None:
        waiting = []
        for offset, future in self._waiters:
            if future.done():
                continue
            if self._broken is not None:
                future.set_exception(self._broken)
            elif self.high_watermark >= offset:
                future.set_result(None)
            else:
                waiting.append((offset, future))
        self._waiters = waiting
        if not waiting:
            self._broken = None


class OneLog:
    """An internal topic of one partition; implements ``LogAccess``."""

    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    def leads(self, partition: int) -> bool:
        return True

    def partition_count(self) -> int:
        return 1

    def open_log(self, partition: int) -> MemoryLog:
        return self._log

    async def prepare_append(self, partition: int) -> None:
        pass
