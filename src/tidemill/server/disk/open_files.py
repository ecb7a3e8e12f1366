"""The limit of open files: partitions and buckets are not opened when few descriptors are left.

Every partition in use takes two descriptors or more, every connection one, the state of a table's bucket
about six. Without any left, connections and flushes would fail. So before that, partitions and buckets that
are not open yet are refused, with an error that clients retry. Those that are open go on, and so do the
internal topics.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress

from tidemill.errors import TooManyFiles

__all__ = ("OpenFiles", "count_open_files", "open_files_limit")

_DESCRIPTORS = "/proc/self/fd"
#: Of the limit, the part that partitions of clients leave free.
_KEPT_FREE = 0.15
#: They are counted so often at most; in between, what is opened is added up. Files are opened a little after
#: they were asked for, so what was asked for shortly before a count is added to it as well.
_COUNT_AGE_SECONDS = 1.0


def open_files_limit() -> int:
    """How many files the process may have open."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def count_open_files() -> int:
    """How many files and sockets the process has open; 0 where the system does not tell."""
    with suppress(OSError):
        # The size is their number, from Linux 6.2 on. Listing them takes a microsecond for each.
        return os.stat(_DESCRIPTORS).st_size or len(os.listdir(_DESCRIPTORS))
    return 0


class OpenFiles:
    """Decides whether more files may be opened. Used on the event loop's thread, and at the start."""

    def __init__(
        self,
        limit: int | None = None,
        count: Callable[[], int] = count_open_files,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._count = count
        self._clock = clock
        self._counted = 0
        self._counted_at = float("-inf")
        #: Files that were asked for since the last count, and between the last two.
        self._opened = self._opened_before = 0
        #: The last refusal, while it holds.
        self._refusal: TooManyFiles | None = None

    def check(self, count: int, *, internal: bool = False) -> None:
        """Raise ``TooManyFiles`` if so many more files must not be opened now; else they count as opened."""
        self._look()
        if self._refusal is not None and not internal:
            raise self._refusal
        self._opened += count

    def _look(self) -> None:
        limit = open_files_limit() if self._limit is None else self._limit
        now = self._clock()
        if now - self._counted_at > _COUNT_AGE_SECONDS:
            is_long_ago = now - self._counted_at > 2 * _COUNT_AGE_SECONDS
            self._opened_before, self._opened = 0 if is_long_ago else self._opened, 0
            self._counted, self._counted_at = self._count(), now
        used = self._counted + self._opened_before + self._opened
        self._refusal = None
        if used > limit * (1 - _KEPT_FREE):
            self._refusal = TooManyFiles(
                f"{used} of {limit} files are open, so no other partition is opened; raise the limit "
                "('ulimit -n', or LimitNOFILE= of the service) and restart the node, or delete topics"
            )

    def problem(self) -> str | None:
        """Why partitions are not opened now; None if they are."""
        if self._refusal is not None:
            self._look()
        return None if self._refusal is None else self._refusal.message
