"""A node that kills itself, as by kill -9, at a chosen point of a publication.

A point is a name, and where there are several of them a number: ``before-markers:1`` is before the second
partition gets its markers. Points count from the node's start.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

from tidemill.log.log import Appended, PartitionLog
from tidemill.log.storage import Buffer
from tidemill.records.control import MARKER_BATCH_BYTES, MarkerEnd
from tidemill.server.coordinators.transaction_partitions import LocalTransactionPartitions
from tidemill.transactions.jobs import Publication
from tidemill.transactions.shard import TransactionShard
from tidemill.transactions.state import TransactionsState

__all__ = ("POINTS", "die_at")

POINTS = (
    "before-decision",
    "after-decision",
    "before-markers:0",
    "before-markers:2",
    "within-markers:0",
    "after-markers:0",
    "before-complete",
    "after-complete",
)


def die_at(point: str) -> None:
    """Have this process die there."""
    name, _, number = point.partition(":")
    _PATCHES[name](int(number or 0))


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _around_decision(*, after: bool) -> None:
    append = TransactionShard._append

    def patched(self: TransactionShard, records: Sequence[Any], batch: bytes | None = None) -> None:
        publishes = any(isinstance(value, Publication) for _, value in records)
        if publishes and not after:
            _die()
        append(self, records, batch)
        if publishes:
            _die()

    TransactionShard._append = patched  # type: ignore[method-assign]


def _around_markers(number: int, *, after: bool) -> None:
    write = LocalTransactionPartitions.write_markers
    calls = iter(range(1_000))

    async def patched(self: LocalTransactionPartitions, topic_partition: Any, markers: Any) -> None:
        call = next(calls)
        if call == number and not after:
            _die()
        await write(self, topic_partition, markers)
        if call == number:
            _die()

    LocalTransactionPartitions.write_markers = patched  # type: ignore[method-assign]


def _within_markers(number: int) -> None:
    """The first of the markers is in the log, and half of the next one."""
    write = PartitionLog.append_markers
    calls = iter(range(1_000))

    def patched(self: PartitionLog, ends: Sequence[MarkerEnd], leader_epoch: int, now_ms: int) -> Appended:
        if len(ends) > 1 and next(calls) == number:
            size_bytes = MARKER_BATCH_BYTES
            segment = self._segment_for_append(len(ends) * size_bytes, len(ends) - 1, now_ms)
            whole = segment.file.write

            def torn(position: int, buffers: Sequence[Buffer]) -> None:
                whole(position, [b"".join(buffers)[: size_bytes + size_bytes // 2]])
                _die()

            segment.file.write = torn  # type: ignore[method-assign]
        return write(self, ends, leader_epoch, now_ms)

    PartitionLog.append_markers = patched  # type: ignore[method-assign]


def _around_complete(*, after: bool) -> None:
    complete = TransactionsState.complete

    def patched(self: TransactionsState, decided: Any, now_ms: int) -> None:
        if not after:
            _die()
        complete(self, decided, now_ms)
        _die()

    TransactionsState.complete = patched  # type: ignore[method-assign]


_PATCHES: dict[str, Callable[[int], None]] = {
    "before-decision": lambda _: _around_decision(after=False),
    "after-decision": lambda _: _around_decision(after=True),
    "before-markers": lambda number: _around_markers(number, after=False),
    "after-markers": lambda number: _around_markers(number, after=True),
    "within-markers": _within_markers,
    "before-complete": lambda _: _around_complete(after=False),
    "after-complete": lambda _: _around_complete(after=True),
}
