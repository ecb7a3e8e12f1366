"""Leader-epoch history: which leader epoch wrote from which offset on. Pure.

Entries rise in both columns. It answers OffsetForLeaderEpoch, by which a reader or a follower finds where
its own log and this one part.
"""

from __future__ import annotations

import struct
from bisect import bisect_right

__all__ = ("EPOCHS_KIND", "EPOCHS_NAME", "NO_END", "EpochHistory")

#: File of a partition's history, and its kind of checked file.
EPOCHS_NAME = "leader-epochs"
EPOCHS_KIND = 3

#: The end of an epoch that is going on: no offset reaches it.
NO_END = 2**63 - 1

_ENTRY = struct.Struct(">iq")


class EpochHistory:
    """The leader epochs of a log: a list of (epoch, first offset written in it)."""

    def __init__(self, entries: list[tuple[int, int]] | None = None) -> None:
        self._entries = entries or []

    @property
    def entries(self) -> tuple[tuple[int, int], ...]:
        return tuple(self._entries)

    @property
    def latest_epoch(self) -> int:
        return self._entries[-1][0] if self._entries else -1

    def assign(self, epoch: int, start_offset: int) -> bool:
        """Note that ``epoch`` writes from ``start_offset`` on. True if that was news."""
        if self._entries and self._entries[-1][0] >= epoch:
            return False
        while self._entries and self._entries[-1][1] >= start_offset:
            self._entries.pop()
        self._entries.append((epoch, start_offset))
        return True

    def extended(self, epoch: int, start_offset: int) -> EpochHistory:
        """A copy in which ``epoch`` writes from ``start_offset`` on.

        >>> EpochHistory([(0, 0)]).extended(2, 10).entries
        ((0, 0), (2, 10))
        """
        copied = self.copy()
        copied.assign(epoch, start_offset)
        return copied

    def end_offset_for(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """The largest known epoch not above ``epoch``, and the offset where it ended; (-1, -1) if unknown.

        An epoch older than all that are known ended where the oldest begins.

        >>> history = EpochHistory([(0, 0), (2, 10)])
        >>> history.end_offset_for(0, 15), history.end_offset_for(1, 15), history.end_offset_for(2, 15)
        ((0, 10), (0, 10), (2, 15))
        """
        if not self._entries or epoch < 0 or epoch > self._entries[-1][0]:
            return -1, -1
        if epoch < self._entries[0][0]:
            return epoch, self._entries[0][1]
        index = bisect_right(self._entries, epoch, key=lambda entry: entry[0])
        end = self._entries[index][1] if index < len(self._entries) else log_end_offset
        return self._entries[index - 1][0], end

    def epoch_at(self, offset: int) -> int:
        """The epoch that wrote ``offset``; -1 if unknown."""
        index = bisect_right(self._entries, offset, key=lambda entry: entry[1])
        return self._entries[index - 1][0] if index else -1

    def span_at(self, offset: int) -> tuple[int, int]:
        """The epoch that wrote ``offset`` (-1 if unknown), and the offset where the next one begins.

        >>> history = EpochHistory([(0, 5), (2, 10)])
        >>> history.span_at(4), history.span_at(5), history.span_at(10) == (2, NO_END)
        ((-1, 5), (0, 10), True)
        """
        index = bisect_right(self._entries, offset, key=lambda entry: entry[1])
        end = self._entries[index][1] if index < len(self._entries) else NO_END
        return (self._entries[index - 1][0] if index else -1), end

    def truncate_end(self, end_offset: int) -> bool:
        """Forget epochs that start at or after ``end_offset``. True if there were any."""
        kept = [entry for entry in self._entries if entry[1] < end_offset]
        changed = len(kept) < len(self._entries)
        self._entries = kept
        return changed

    def copy(self) -> EpochHistory:
        return EpochHistory(list(self._entries))

    def truncate_start(self, start_offset: int) -> None:
        """Keep the epoch that covers ``start_offset`` and those behind it."""
        index = bisect_right(self._entries, start_offset, key=lambda entry: entry[1])
        if index > 1:
            self._entries = self._entries[index - 1 :]
        if self._entries and self._entries[0][1] < start_offset:
            self._entries[0] = (self._entries[0][0], start_offset)

    def parted_from(self, other: EpochHistory, log_end_offset: int, offset: int) -> int:
        """Where the log of this history parted from another one, whose records up to ``offset`` are compared.

        Each epoch has one leader, so two logs are equal up to where the first of them ends an epoch that both
        have. If they have none in common, the oldest epoch of the other log is all that can be told.

        >>> history = EpochHistory([(1, 0), (3, 12)])
        >>> history.parted_from(EpochHistory([(1, 0), (2, 10)]), 20, 15)
        10
        >>> history.parted_from(EpochHistory([(1, 0), (3, 12)]), 20, 15)
        15
        """
        for epoch, start in reversed(other.entries):
            if start < offset:
                known, end = self.end_offset_for(epoch, log_end_offset)
                if known == epoch:
                    return min(end, offset)
                offset = start
        return offset

    def to_bytes(self) -> bytes:
        return b"".join(_ENTRY.pack(*entry) for entry in self._entries)

    @classmethod
    def from_bytes(cls, data: bytes) -> EpochHistory:
        return cls([(epoch, offset) for epoch, offset in _ENTRY.iter_unpack(data)])
