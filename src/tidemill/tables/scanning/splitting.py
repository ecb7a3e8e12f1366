"""Splitting the state of a bucket into pieces of about one size, for readers that share the work.

The walk looks at keys and at the lengths of rows, keeps neither, and stops early when it has taken long or
its answer becomes large. The client then asks again, from behind the last piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tidemill.kv.contract import KvView
from tidemill.tables.scanning.service import OpenScan, ScanService

__all__ = ("PIECES_MAX", "Piece", "SplitLimits", "Splitting", "Walk")

#: The most pieces of one answer, and the most bytes of their keys.
PIECES_MAX = 10_000
_KEY_BYTES_MAX = 4 * 1024 * 1024
#: How long a walk may take before it answers: clients do not wait for ever.
_WALK_MS_MAX = 5_000
#: How long one step of a walk reads the view.
_STEP_MS = 50
#: How many walks run side by side: the other threads of the tables are for rows.
_WALKS_MAX = 2
_NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of rows up to ``end_key``, at which the next piece begins; None: up to the end of the scan."""

    end_key: bytes | None
    row_count: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """Limits of one piece, and of the number of pieces. 0 or less: no limit but the server's own."""

    max_rows: int
    max_bytes: int
    max_pieces: int


class Splitting:
    """Splits buckets of a node, a few at a time."""

    def __init__(self, scans: ScanService, steady_ms: Callable[[], int]) -> None:
        self._scans = scans
        self._steady_ms = steady_ms
        self._walks = asyncio.Semaphore(_WALKS_MAX)

    async def split(self, scan: OpenScan, limits: SplitLimits) -> list[Piece]:
        """The pieces of what ``scan`` would read; none if it has no rows.

        If the last one has an ``end_key``, there are more behind it.
        """
        async with self._walks:
            walk = Walk(scan.start_key or b"", scan.end_key, limits, self._steady_ms)
            deadline_ms = self._steady_ms() + _WALK_MS_MAX

            def step(view: Any) -> bool:
                walk.go_on(view)
                return not walk.is_done and self._steady_ms() < deadline_ms

            await self._scans.walk(scan, step)
            return walk.finish()


class Walk:
    """The state of one walk over a view. Call ``go_on`` until ``is_done``, and ``finish`` at any time."""

    def __init__(
        self, start: bytes, end: bytes | None, limits: SplitLimits, steady_ms: Callable[[], int]
    ) -> None:
        self._steady_ms = steady_ms
        self._end = end
        self._max_rows = limits.max_rows if limits.max_rows > 0 else _NO_LIMIT
        self._max_bytes = limits.max_bytes if limits.max_bytes > 0 else _NO_LIMIT
        self._max_pieces = min(limits.max_pieces, PIECES_MAX) if limits.max_pieces > 0 else PIECES_MAX
        self._pieces: list[Piece] = []
        self._key_bytes = 0
        self._next: bytes | None = start
        #: Rows and bytes of the piece that is being measured.
        self._rows = 0
        self._size = 0

    @property
    def is_done(self) -> bool:
        return self._next is None or len(self._pieces) >= self._max_pieces or self._key_bytes > _KEY_BYTES_MAX

    def go_on(self, view: KvView) -> None:
        """Measure for about as long as one step may take. Blocking."""
        deadline_ms = self._steady_ms() + _STEP_MS
        while not self.is_done:
            self._measure(view)
            if self._steady_ms() >= deadline_ms:
                break

    def _measure(self, view: KvView) -> None:
        assert self._next is not None
        extent = view.measure(
            self._next,
            self._end,
            self._max_bytes - self._size,
            self._max_rows - self._rows,
            at_least_one=not self._rows,
        )
        self._rows += extent.rows
        self._size += extent.size_bytes
        self._next = extent.next_start
        if extent.is_full:
            self._cut()

    def _cut(self) -> None:
        self._pieces.append(Piece(self._next, self._rows, self._size))
        self._key_bytes += len(self._next or b"")
        self._rows = self._size = 0

    def finish(self) -> list[Piece]:
        """The pieces so far. The last one may be smaller than the limits allow."""
        if self._rows:
            self._cut()
        return self._pieces
