"""Runs flushes in a small pool, one at a time per partition, many appends per flush."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Final

from tidemill.coordination.clock import wall_clock_ms
from tidemill.coordination.metrics import Metric, counter
from tidemill.errors import StorageError, SyncFailed, TooManyFiles
from tidemill.log.flush import FlushJob
from tidemill.replication.partition import Partition

__all__ = (
    "FLUSH_METRICS",
    "Flusher",
)

logger = logging.getLogger(__name__)

#: When a flush is tried again that could not open a file.
_RETRY_SECONDS = 1.0
_WARNING_INTERVAL_SECONDS = 10.0


class Flusher:
    """Flushes partitions in a thread pool. What is appended while a flush runs shares the next one."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        pool: Executor,
        clock_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._loop = loop
        self._pool = pool
        self._clock_ms = clock_ms
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._delayed: dict[Partition, asyncio.TimerHandle] = {}
        self._warned_at = float("-inf")
        self.flush_count = 0
        self.flush_seconds = 0.0

    def request(self, partition: Partition) -> None:
        """Start a flush of ``partition`` as soon as its configuration wants one."""
        if partition.flush_scheduled:
            if partition.flush_due_ms() == 0 and partition in self._delayed:
                self._delayed.pop(partition).cancel()
                self._loop.call_soon(self._start, partition)
            return
        partition.flush_scheduled = True
        # Never longer than the setting, whatever has happened to the clock since the first append.
        delay_ms = min(partition.flush_due_ms() - self._clock_ms(), partition.config.flush_ms)
        if delay_ms <= 0:
            # At the end of this turn of the loop, so that all requests read in it share the flush.
            self._loop.call_soon(self._start, partition)
        else:
            self._delayed[partition] = self._loop.call_later(delay_ms / 1000, self._start, partition)

    def _start(self, partition: Partition) -> None:
        self._delayed.pop(partition, None)
        job = partition.begin_flush()
        if job is None:
            partition.flush_scheduled = False
            return
        self._running += 1
        self._idle.clear()
        started = time.perf_counter()
        partition.flush_started_s = self._loop.time()
        self._pool.submit(job.run).add_done_callback(
            lambda future: self._loop.call_soon_threadsafe(self._done, partition, job, future, started)
        )

    def _done(self, partition: Partition, job: FlushJob, future: Future[None], started: float) -> None:
        self._running -= 1
        self.flush_count += 1
        self.flush_seconds += time.perf_counter() - started
        partition.flush_scheduled = False
        partition.flush_started_s = None
        if not self._running:
            self._idle.set()
        error = future.exception()
        if error is None:
            partition.flushed(job)
            if partition.is_dirty:
                self.request(partition)
        elif isinstance(error, TooManyFiles):
            # Nothing was synced that failed, so it can be tried again.
            self._warn(partition, error)
            partition.flush_put_off(job)
            partition.flush_scheduled = True
            self._delayed[partition] = self._loop.call_later(_RETRY_SECONDS, self._start, partition)
        elif isinstance(error, StorageError):
            partition.flush_failed(error)
        else:
            partition.flush_failed(SyncFailed(f"flush of {partition!r} failed: {error!r}"))

    def _warn(self, partition: Partition, error: TooManyFiles) -> None:
        """Tell that flushes are put off, but not of each of very many."""
        now = self._loop.time()
        if now - self._warned_at > _WARNING_INTERVAL_SECONDS:
            self._warned_at = now
            logger.warning("the flush of %r is put off: %s", partition, error.message)

    async def drain(self, partitions: list[Partition]) -> None:
        """Wait until no flush is under way and nothing of ``partitions`` is left to flush."""
        while True:
            await self._idle.wait()
            dirty = [partition for partition in partitions if partition.is_dirty]
            if not dirty and not self._running:
                return
            for partition in dirty:
                delayed = self._delayed.pop(partition, None)
                if delayed is not None:
                    delayed.cancel()
                    self._start(partition)
                else:
                    self.request(partition)
            await asyncio.sleep(0)

    def close(self) -> None:
        self._pool.shutdown(wait=True)


FLUSH_METRICS: Final[Sequence[Metric[Flusher]]] = (
    counter("tidemill_flushes_total", "Flushes to disk.", lambda flusher: flusher.flush_count),
    counter("tidemill_flush_seconds_total", "Time spent in flushes.", lambda flusher: flusher.flush_seconds),
)
