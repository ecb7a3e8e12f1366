"""The shell around one shard: its log, its timer, and who waits for what to be durable.

- A request changes the state and appends in one step of the event loop, so steps never interleave.
- A reply leaves when everything that the shard had appended by then is committed: nobody sees, or learns
  from, what a crash could take back. Heartbeats tell nothing of the kind and do not wait.
- If the log stops, the state in memory may be ahead of what is durable. The shard then stops too: whoever
  waits is told so, and the next request loads a new shard from the log.
- One timer per shard, set to the earliest deadline of all groups.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from tidemill.errors import ApiError, ErrorCode, SyncFailed, TidemillError
from tidemill.groups.records import CorruptGroupRecord, decode_record, encode_record
from tidemill.groups.state import ShardState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from tidemill.groups.clock import Clock, Timer
    from tidemill.groups.messages import Reply
    from tidemill.groups.records import GroupRecord
    from tidemill.groups.settings import GroupSettings

__all__ = ("CoordinatorLog", "Shard")

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_RECORDS_PER_LOADING_STEP = 1_000
_TICK_RETRY_MS = 1_000
_LOST_LEADERSHIP = frozenset({ErrorCode.not_leader_or_follower, ErrorCode.not_coordinator})


class CoordinatorLog(Protocol):
    """The partition that holds a shard's records, at its leader."""

    def append(self, records: Sequence[tuple[bytes, bytes | None]]) -> int:
        """Append one batch of (key, value); returns the next offset.

        Raises StorageError or ApiError, and then nothing was appended.
        """

    def committed(self, offset: int) -> Awaitable[None]:
        """Resolves when the high watermark has reached ``offset``.

        Raises StorageError if the partition stopped.
        """

    def replay(self) -> Iterator[tuple[int, bytes | None, bytes | None]]:
        """Every record in order: (offset, key, value).

        Called once, before the first append, when the high watermark has reached the end of the log: what is
        not yielded must never become committed later.
        """


class Shard:
    """One partition of ``__consumer_offsets`` and the groups that live in it."""

    def __init__(
        self,
        partition: int,
        log: CoordinatorLog,
        settings: GroupSettings,
        clock: Clock,
        on_stop: Callable[[Shard], None],
    ) -> None:
        self.partition = partition
        self.state = ShardState(settings, self._append)
        self.stopped: ApiError | None = None
        self._log = log
        self._clock = clock
        self._on_stop = on_stop
        self._appended = 0
        self._committed = 0
        self._held: deque[tuple[int, asyncio.Future[Any], object]] = deque()
        self._watcher: asyncio.Task[None] | None = None
        self._heap: list[tuple[int, str]] = []
        self._due_ms: dict[str, int] = {}
        self._timer: Timer | None = None
        self._timer_due_ms = 0

    async def load(self) -> None:
        """Fold the log into the state. Other work goes on in between; raises CorruptGroupRecord."""
        for count, (offset, key, value) in enumerate(self._log.replay(), start=1):
            self._replay(offset, key, value)
            if count % _RECORDS_PER_LOADING_STEP == 0:
                await asyncio.sleep(0)
        self.state.start(self._clock.now_ms())
        for group_id in self.state.groups:
            self._schedule(group_id)

    def _replay(self, offset: int, key: bytes | None, value: bytes | None) -> None:
        try:
            record = decode_record(key, value)
        except CorruptGroupRecord as error:
            raise CorruptGroupRecord(
                f"__consumer_offsets-{self.partition} at offset {offset}: {error.message}. The groups of that"
                " partition are not served; look at it with 'tidemill log dump'"
            ) from error
        if record is None:
            _logger.warning(
                "__consumer_offsets-%d at offset %d: skipped a record whose kind is unknown to this version",
                self.partition,
                offset,
            )
        else:
            self.state.replay(record, self._clock.now_ms())

    # -- requests --------------------------------------------------------------------------------------

    async def request(
        self, group_id: str, handler: Callable[[asyncio.Future[_T], int], Iterable[Reply]]
    ) -> _T:
        """Run a handler that answers through replies; returns the body of the reply to its token.

        If the caller is cancelled while it waits, the group still answers, to nobody.
        """
        token: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self.call_now(group_id, lambda now_ms: self.send(handler(token, now_ms)))
        return await token

    async def call(self, group_id: str | None, handler: Callable[[int], _T]) -> _T:
        """Run a handler and return its result once that is durable. ``group_id``: the group it may change."""
        result = self.call_now(group_id, handler)
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hold(held, None)
        await held
        return result

    def call_now(self, group_id: str | None, handler: Callable[[int], _T]) -> _T:
        """Run a handler whose result tells nothing that must be durable first."""
        if self.stopped is not None:
            raise self.stopped
        try:
            return handler(self._clock.now_ms())
        except TidemillError as error:
            self._stop_if_fatal(error)
            raise
        finally:
            if group_id is not None and self.stopped is None:
                self._schedule(group_id)

    # -- durability ------------------------------------------------------------------------------------

    def _append(self, records: Sequence[GroupRecord]) -> None:
        self._appended = self._log.append([encode_record(record) for record in records])
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def send(self, replies: Iterable[Reply]) -> None:
        """Answer the requests that these replies are for, once that is durable."""
        for reply in replies:
            assert isinstance(reply.token, asyncio.Future), reply
            self._hold(reply.token, reply.body)

    def _hold(self, future: asyncio.Future[Any], result: object) -> None:
        """Resolve ``future`` once everything appended so far is committed."""
        if self._watcher is None:
            _resolve(future, result)
        else:
            self._held.append((self._appended, future, result))

    async def _watch(self) -> None:
        """Follow the high watermark while something is not committed."""
        try:
            while self._committed < self._appended or self._held:
                target = self._held[0][0] if self._held else self._appended
                if target > self._committed:
                    await self._log.committed(target)
                    self._committed = target
                while self._held and self._held[0][0] <= self._committed:
                    _, future, result = self._held.popleft()
                    _resolve(future, result)
        except TidemillError as error:
            _logger.error("__consumer_offsets-%d stopped: %s", self.partition, error.message)
            self.stop(ErrorCode.not_coordinator)
        except Exception:
            _logger.exception("__consumer_offsets-%d: waiting for the high watermark failed", self.partition)
            self.stop(ErrorCode.not_coordinator)
        finally:
            self._watcher = None

    # -- stopping --------------------------------------------------------------------------------------

    def _stop_if_fatal(self, error: TidemillError) -> None:
        """A full disk passes; a log that cannot be trusted, or that another node leads now, does not."""
        if isinstance(error, SyncFailed) or error.code in _LOST_LEADERSHIP:
            self.stop(ErrorCode.not_coordinator)

    def stop(self, code: ErrorCode) -> None:
        """Serve nothing any more; whoever waits is told ``code``. A second call changes nothing."""
        if self.stopped is not None:
            return
        self.stopped = ApiError(
            code,
            f"__consumer_offsets-{self.partition} is not coordinated here any more; look for its coordinator",
        )
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for reply in self.state.die(code):
            assert isinstance(reply.token, asyncio.Future), reply
            _resolve(reply.token, reply.body)
        for _, future, _ in self._held:
            if not future.done():
                future.set_exception(self.stopped)
        self._held.clear()
        self._on_stop(self)

    async def close(self) -> None:
        """Stop and wait until nothing of the shard runs any more."""
        self.stop(ErrorCode.coordinator_not_available)
        if (watcher := self._watcher) is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    # -- time ------------------------------------------------------------------------------------------

    def _schedule(self, group_id: str) -> None:
        group = self.state.groups.get(group_id)
        deadline_ms = None if group is None else group.next_deadline_ms()
        if deadline_ms is not None:
            self._schedule_at(group_id, deadline_ms)

    def _schedule_at(self, group_id: str, deadline_ms: int) -> None:
        """Look at the group at that time, or earlier if that is planned: too early costs little."""
        planned_ms = self._due_ms.get(group_id)
        if planned_ms is None or deadline_ms < planned_ms:
            self._due_ms[group_id] = deadline_ms
            heappush(self._heap, (deadline_ms, group_id))
            self._set_timer()

    def _set_timer(self) -> None:
        if not self._heap or (self._timer is not None and self._timer_due_ms <= self._heap[0][0]):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_ms = self._heap[0][0]
        self._timer = self._clock.call_at(self._timer_due_ms, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now_ms = self._clock.now_ms()
        while self.stopped is None and self._heap and self._heap[0][0] <= now_ms:
            due_ms, group_id = heappop(self._heap)
            if self._due_ms.get(group_id) == due_ms:
                del self._due_ms[group_id]
                self._tick(group_id, now_ms)
        if self.stopped is None:
            self._set_timer()

    def _tick(self, group_id: str, now_ms: int) -> None:
        try:
            self.send(self.state.tick(group_id, now_ms))
        except TidemillError as error:
            _logger.warning("group %r: what is due cannot be persisted now: %s", group_id, error.message)
            self._stop_if_fatal(error)
            self._schedule_at(group_id, now_ms + _TICK_RETRY_MS)
        else:
            self._schedule(group_id)


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    """A cancelled request has a cancelled future: nobody is there to be told."""
    if not future.done():
        future.set_result(result)
