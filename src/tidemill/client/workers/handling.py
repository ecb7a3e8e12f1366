"""One record and its handler: the handler's end decides what becomes of the record."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from tidemill.client.workers.logs import WORKER_LOG, record_fields
from tidemill.client.workers.outcomes import Reject, Retry

__all__ = ("Handler", "Handling", "WorkerCounts", "is_async_handler")

Handler = Callable[[Any], Any] | Callable[[Any], Awaitable[Any]]


@dataclass(slots=True)
class WorkerCounts:
    """What a worker has done so far.

    ``handled`` are handlers that have ended: those of ``accepted``, ``released`` and ``rejected`` records. Of
    ``failed`` ones the handler raised something else than ``Reject`` or ``Retry``. ``lost`` are records whose
    lock was gone before their end was known to the node: they come again. Of an ordered worker ``rejected``
    are the records that it has parked, and ``restarts`` says how often it went back to its stored position.
    """

    handled: int = 0
    accepted: int = 0
    released: int = 0
    rejected: int = 0
    failed: int = 0
    lost: int = 0
    running: int = 0
    restarts: int = 0


def is_async_handler(handler: Any) -> bool:
    """Whether a handler has to be awaited."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(
        getattr(handler, "__call__", None)  # noqa: B004 - an object whose call is awaited is a handler, too
    )


def _ends_task(error: BaseException) -> bool:
    """Whether what a handler raised is about its task, and not the handler's own failure."""
    if isinstance(error, asyncio.CancelledError):
        # The handler may only have waited for something that was cancelled, without being cancelled itself.
        task = asyncio.current_task()
        return task is None or task.cancelling() > 0
    return not isinstance(error, Exception | SystemExit)


class Handling:
    """Runs the handler of one worker, in threads or on the event loop."""

    def __init__(self, worker: str, handler: Any, counts: WorkerCounts) -> None:
        self._worker = worker
        self._handler = handler
        self.counts = counts
        self._counting = threading.Lock()

    def run(self, record: Any) -> None:
        """Handle a record and settle it, in a thread."""
        started = self._begin()
        try:
            self._handler(record)
        except BaseException as error:  # noqa: BLE001 - whatever ends a handler, its record must be settled
            self._raised(record, error, started)
        else:
            self._returned(record, started)

    async def run_async(self, record: Any) -> None:
        """Handle a record and settle it, on the event loop."""
        started = self._begin()
        try:
            await self._handler(record)
        except BaseException as error:
            self._raised(record, error, started)
            if _ends_task(error):
                raise
        else:
            self._returned(record, started)

    def _begin(self) -> float:
        with self._counting:
            self.counts.running += 1
        return time.perf_counter()

    def _returned(self, record: Any, started: float) -> None:
        accepted = not record.settled
        if accepted:
            record.accept()
        with self._counting:
            self.counts.running -= 1
            self.counts.handled += 1
            self.counts.accepted += accepted
        if WORKER_LOG.isEnabledFor(logging.DEBUG):
            self._log(logging.DEBUG, record, started, "accepted", "")

    def _raised(self, record: Any, error: BaseException, started: float) -> None:
        is_rejected = isinstance(error, Reject)
        is_failed = not isinstance(error, Reject | Retry)
        is_settled: bool = record.settled
        if not is_settled:
            if is_rejected:
                record.reject(str(error) or "rejected by its handler")
            else:
                record.release(delay=error.delay if isinstance(error, Retry) else None)
        with self._counting:
            self.counts.running -= 1
            self.counts.handled += 1
            self.counts.failed += is_failed
            self.counts.rejected += is_rejected and not is_settled
            self.counts.released += not is_rejected and not is_settled
        reason = f"{type(error).__name__}: {error}" if is_failed else str(error)
        level = logging.ERROR if is_failed else logging.WARNING if is_rejected else logging.INFO
        outcome = "rejected" if is_rejected else "released"
        self._log(level, record, started, outcome, reason, error if is_failed else None)

    def _log(
        self,
        level: int,
        record: Any,
        started: float,
        outcome: str,
        reason: str,
        error: BaseException | None = None,
    ) -> None:
        fields = record_fields(self._worker, record)
        fields |= {
            "duration_ms": round((time.perf_counter() - started) * 1000, 3),
            "outcome": outcome,
            "reason": reason or None,
        }
        WORKER_LOG.log(
            level,
            "worker %s: %s-%s offset %s, delivery %s: %s%s",
            *(self._worker, record.topic, record.partition, record.offset, fields["delivery_count"], outcome),
            f": {reason}" if reason else "",
            extra=fields,
            exc_info=error,
        )
