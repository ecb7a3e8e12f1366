"""The shell around one shard: its log, its timer, and the replies that wait until records are durable.

- A request changes the state and appends in one step of the event loop, so steps never interleave.
- A reply leaves when everything that the shard had appended by then is committed: nobody sees, or learns
  from, what a crash could take back. Handlers whose results tell nothing of the kind need not wait.
- If the log stops, the state in memory may be ahead of what is durable. The shard then stops too: waiting
  requests are told so, and the next request loads a new shard from the log.
- When another node leads the log, the shard stops at once with NOT_COORDINATOR: what it would still answer
  from memory may not be true any more. It may not know of that yet. What it has appended and finds committed
  proves that it leads; a reply for which nothing was appended leaves once the log is known to be the newest.
- One timer per shard, set to the earliest deadline of everything in it. A turn of the event loop does a few
  of those that are due: clients can have very many fall due together.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, TypeVar

from tidemill.coordination.log import ReplayedMarker
from tidemill.coordination.turns import pause_after
from tidemill.errors import ApiError, CorruptData, ErrorCode, StorageError, SyncFailed, TidemillError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from tidemill.coordination.clock import Clock, Timer
    from tidemill.coordination.log import CoordinatorLog, ReplayedRecord

__all__ = ("TICK_RETRY_MS", "ShardShell", "resolve")

_logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_RECORDS_PER_LOADING_STEP = 1_000
_KEYS_PER_LOADING_STEP = 200
TICK_RETRY_MS = 1_000
_TICKS_PER_TURN = 10
_LOST_LEADERSHIP = frozenset({ErrorCode.not_leader_or_follower, ErrorCode.not_coordinator})


class ShardShell(ABC):
    """One partition of an internal topic and what lives in it, each thing under a key of its own.

    A subclass holds the state and says what to do at the points where the shell knows only when.
    """

    def __init__(
        self,
        topic: str,
        partition: int,
        log: CoordinatorLog,
        clock: Clock,
        on_stop: Callable[[Any], None],
    ) -> None:
        self.topic = topic
        self.partition = partition
        self.stopped: ApiError | None = None
        self.log = log
        self.clock = clock
        self._on_stop = on_stop
        self._appended = 0
        self._committed = 0
        self._held: deque[tuple[int, asyncio.Future[Any], object]] = deque()
        self._watcher: asyncio.Task[None] | None = None
        #: Done when all that is replayed is committed: that may take until other nodes are back.
        self._loading: asyncio.Future[None] | None = None
        self._heap: list[tuple[int, str]] = []
        self._due_ms: dict[str, int] = {}
        self._timer: Timer | None = None
        self._timer_due_ms = 0
        log.depend(self, lambda: self.stop(ErrorCode.not_coordinator))

    # -- what the subclass does ------------------------------------------------------------------------

    @abstractmethod
    def _replay_record(self, entry: ReplayedRecord, now_ms: int) -> bool:
        """Make a record part of the state; False if its kind is unknown. Raises StorageError if it is bad."""

    def _replay_marker(self, marker: ReplayedMarker) -> None:
        """End a producer's transaction. Shards that no transaction writes to have no markers."""
        raise StorageError("a transaction marker does not belong there")

    @abstractmethod
    def _loaded(self, now_ms: int) -> Iterable[str]:
        """Begin to serve what was replayed; gives all keys, which others have turns between."""

    @abstractmethod
    def _next_deadline_ms(self, key: str) -> int | None:
        """When ``_tick`` must be called for ``key``, if ever."""

    @abstractmethod
    def _tick(self, key: str, now_ms: int) -> None:
        """Do what is due. May raise TidemillError: it is called again a little later."""

    @abstractmethod
    def _die(self, code: ErrorCode) -> None:
        """Tell ``code`` to every waiting request of the state; nothing else happens to it any more."""

    # -- loading ---------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Fold the log into the state, and wait until all of it is committed. Other work goes on in between.

        The fold goes to the end of the log: an earlier leader may have answered from what is only found to be
        committed later.

        Raises CorruptData if a record does not check out or cannot be used: the state would be a part of what
        was committed, and nobody could tell which.
        """
        end_offset = self.log.end_offset
        try:
            await self._replay_below(end_offset)
            self._loading = asyncio.ensure_future(self.log.committed(end_offset))
            await self._loading
        except (TidemillError, asyncio.CancelledError):
            self.log.release(self)
            if self.stopped is None:
                raise
        finally:
            self._loading = None
        if self.stopped is not None:
            raise self.stopped
        for number, key in enumerate(self._loaded(self.clock.now_ms()), start=1):
            self._schedule(key)
            # Clients can have made very many.
            await pause_after(number, _KEYS_PER_LOADING_STEP)
            if self.stopped is not None:
                raise self.stopped

    async def _replay_below(self, end_offset: int) -> None:
        for count, entry in enumerate(self.log.replay(end_offset), start=1):
            try:
                self._replay(entry, self.clock.now_ms())
            except Exception as error:
                path, position = self.log.position_of(entry.offset)
                what = error.message if isinstance(error, TidemillError) else repr(error)
                raise CorruptData(
                    f"the record at offset {entry.offset} cannot be used: {what}; look at it with "
                    "'tidemill log dump'",
                    path=path,
                    position=position,
                ) from error
            if count % _RECORDS_PER_LOADING_STEP == 0:
                await asyncio.sleep(0)

    def _replay(self, entry: ReplayedRecord | ReplayedMarker, now_ms: int) -> None:
        if isinstance(entry, ReplayedMarker):
            self._replay_marker(entry)
        elif not self._replay_record(entry, now_ms):
            _logger.warning(
                "%s-%d at offset %d: skipped a record whose kind is unknown to this version",
                self.topic,
                self.partition,
                entry.offset,
            )

    # -- requests --------------------------------------------------------------------------------------

    async def call(self, key: str | None, handler: Callable[[int], _T]) -> _T:
        """Run a handler and return its result once that is committed. ``key``: what it may change.

        If it has changed nothing, its result tells what is: then no other node may know better.
        """
        appended = self._appended
        try:
            result = self.call_now(key, handler)
        except ApiError:
            # A refusal, too, tells the client something about the state, which must be the newest.
            await self.confirm_newest()
            raise
        has_written = self._appended != appended
        await self.barrier()
        if not has_written:
            await self.confirm_newest()
        return result

    async def change(self, key: str | None, handler: Callable[[int], None]) -> None:
        """Run a handler that answers no client; returns once its records are committed."""
        self.call_now(key, handler)
        await self.barrier()

    async def change_in_steps(self, steps: Callable[[int], Iterator[str | None]]) -> None:
        """Run a long change of the node's own step by step; returns once all of it is committed.

        ``steps`` yields between two steps: the key that the last one changed, if what is due or known of it
        may be different now. Others have their turn then, so each step must be right by itself.
        """
        left = self.call_now(None, steps)

        def step(now_ms: int) -> bool:
            del now_ms
            for key in left:
                if key is not None:
                    self._schedule(key)
                return True
            return False

        is_over = False
        while not is_over:
            is_over = not self.call_now(None, step)
            await pause_after(1, 1)
        await self.barrier()

    async def confirm_newest(self) -> None:
        """Return once it is certain that no other node coordinates this shard.

        For right before a reply that was read from the state. Raises ``ApiError`` if it is not certain.
        """
        if not self.log.is_newest():
            await self.log.confirm_newest()
        if self.stopped is not None:
            raise self.stopped

    def call_now(self, key: str | None, handler: Callable[[int], _T]) -> _T:
        """Run a handler whose result may be told before anything is committed."""
        if self.stopped is not None:
            raise self.stopped
        try:
            return handler(self.clock.now_ms())
        except TidemillError as error:
            self._stop_if_fatal(error)
            raise
        finally:
            if key is not None and self.stopped is None:
                self._schedule(key)

    # -- durability ------------------------------------------------------------------------------------

    def _note_appended(self, next_offset: int) -> None:
        """Note that the log ends at ``next_offset`` now."""
        self._appended = next_offset
        if self._watcher is None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    def barrier(self) -> asyncio.Future[None]:
        """Done once everything appended so far is committed; fails if the shard stops before."""
        held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.stopped is not None:
            held.set_exception(self.stopped)
        else:
            self._hold(held, None)
        return held

    def _hold(self, future: asyncio.Future[Any], result: object) -> None:
        """Resolve ``future`` once everything appended so far is committed."""
        if self._watcher is None:
            resolve(future, result)
        else:
            self._held.append((self._appended, future, result))

    async def _watch(self) -> None:
        """Follow the high watermark while something is not committed."""
        try:
            while self._committed < self._appended or self._held:
                target = self._held[0][0] if self._held else self._appended
                if target > self._committed:
                    await self.log.committed(target)
                    self._committed = target
                while self._held and self._held[0][0] <= self._committed:
                    _, future, result = self._held.popleft()
                    resolve(future, result)
        except TidemillError as error:
            # That another node leads is no error, and is known by now.
            if self.stopped is None:
                _logger.error("%s-%d stopped: %s", self.topic, self.partition, error.message)
            self.stop(ErrorCode.not_coordinator)
        except Exception:
            _logger.exception("%s-%d: waiting for the high watermark failed", self.topic, self.partition)
            self.stop(ErrorCode.not_coordinator)
        finally:
            self._watcher = None

    # -- stopping --------------------------------------------------------------------------------------

    def _stop_if_fatal(self, error: TidemillError) -> None:
        """Stop if a sync of the log failed or another node leads it; others, such as a full disk, pass."""
        if isinstance(error, SyncFailed) or error.code in _LOST_LEADERSHIP:
            self.stop(ErrorCode.not_coordinator)

    def stop(self, code: ErrorCode) -> None:
        """Stop serving; every waiting request is told ``code``. A second call changes nothing."""
        if self.stopped is not None:
            return
        self.stopped = ApiError(
            code,
            f"{self.topic}-{self.partition} is not coordinated here any more; look for its coordinator",
        )
        self.log.release(self)
        if self._loading is not None:
            self._loading.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._die(code)
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

    def _schedule(self, key: str) -> None:
        deadline_ms = self._next_deadline_ms(key)
        if deadline_ms is not None:
            self._schedule_at(key, deadline_ms)

    def _schedule_at(self, key: str, deadline_ms: int) -> None:
        """Look at the key at that time or earlier: looking too early costs little."""
        planned_ms = self._due_ms.get(key)
        if planned_ms is None or deadline_ms < planned_ms:
            self._due_ms[key] = deadline_ms
            heappush(self._heap, (deadline_ms, key))
            self._set_timer()

    def _set_timer(self) -> None:
        if not self._heap or (self._timer is not None and self._timer_due_ms <= self._heap[0][0]):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due_ms = self._heap[0][0]
        self._timer = self.clock.call_at(self._timer_due_ms, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        now_ms = self.clock.now_ms()
        ticks = 0
        while self.stopped is None and self._heap and self._heap[0][0] <= now_ms and ticks < _TICKS_PER_TURN:
            due_ms, key = heappop(self._heap)
            if self._due_ms.get(key) == due_ms:
                del self._due_ms[key]
                self._run_tick(key, now_ms)
                ticks += 1
        if self.stopped is None:
            self._set_timer()

    def _run_tick(self, key: str, now_ms: int) -> None:
        try:
            self._tick(key, now_ms)
        except TidemillError as error:
            self._warn_of_tick(key, error)
            self._stop_if_fatal(error)
            self._schedule_at(key, now_ms + TICK_RETRY_MS)
        else:
            self._schedule(key)

    def _warn_of_tick(self, key: str, error: TidemillError) -> None:
        _logger.warning(
            "%s-%d, %r: what is due cannot be persisted now: %s",
            self.topic,
            self.partition,
            key,
            error.message,
        )


def resolve(future: asyncio.Future[Any], result: object) -> None:
    """Set the result of ``future`` unless its request was cancelled."""
    if not future.done():
        future.set_result(result)
