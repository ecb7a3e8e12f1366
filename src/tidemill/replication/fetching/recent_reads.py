"""What a leader has just written, or read for one follower, kept for the followers that want it soon. Pure.

A leader's log only grows while it leads, so what is kept stays right until its role or its followers change:
then the owner calls ``forget``. It is dropped when all followers have had it. Followers are not in step, so
several pieces of a partition are kept; the oldest of all partitions go when there are too many bytes.

A follower that is behind must not be given what the others got in many small pieces while they were at the
log's end: it would stay as far behind as it is. It gets a kept piece only if that is a large one, or has
about half of what there is by now.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from tidemill.replication.partition import Partition

__all__ = ("RecentReads",)

_BYTES_MAX: Final = 32 * 1024 * 1024


class _Read(NamedTuple):
    leader_epoch: int
    records: memoryview
    #: How many followers have not had it.
    wanted_by: int
    #: The log end when it was read or written, if it goes up to there; None if it is large.
    log_end: int | None

    def is_much(self, offset: int, log_end: int) -> bool:
        """Whether it is large, or has about half of the offsets from ``offset`` to ``log_end``."""
        return self.log_end is None or 2 * (self.log_end - offset) >= log_end - offset


class RecentReads:
    """The last reads and large writes of all partitions, of ``bytes_max`` in all."""

    def __init__(self, bytes_max: int = _BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        #: By partition and the offset that was read from; the oldest first.
        self._reads: dict[tuple[Partition, int], _Read] = {}
        #: The offsets of each partition that has reads.
        self._offsets: dict[Partition, set[int]] = {}
        self.size_bytes = 0

    def keep(
        self, partition: Partition, offset: int, records: memoryview, wanted_by: int, *, is_large: bool
    ) -> None:
        """Keep what the log has from ``offset`` on for ``wanted_by`` followers.

        ``is_large``: it is much, whatever comes behind it. Otherwise the log had no more.
        """
        self._drop(partition, offset)
        if wanted_by <= 0 or len(records) > self._bytes_max:
            return
        log_end = None if is_large else partition.log_end_offset
        self._reads[partition, offset] = _Read(partition.leader_epoch, records, wanted_by, log_end)
        self._offsets.setdefault(partition, set()).add(offset)
        self.size_bytes += len(records)
        while self.size_bytes > self._bytes_max:
            self._drop(*next(iter(self._reads)))

    def find(self, partition: Partition, offset: int, max_bytes: int) -> memoryview | None:
        """What is kept from ``offset`` on, if it is not larger; one follower less wants it then.

        None also if there is much more by now: it is read anew then.
        """
        read = self._reads.get((partition, offset))
        if read is None or len(read.records) > max_bytes or read.leader_epoch != partition.leader_epoch:
            return None
        if not read.is_much(offset, partition.log_end_offset):
            return None
        if read.wanted_by == 1:
            self._drop(partition, offset)
        else:
            self._reads[partition, offset] = read._replace(wanted_by=read.wanted_by - 1)
        return read.records

    def forget(self, partition: Partition) -> None:
        """Drop what was read of a partition."""
        for offset in list(self._offsets.get(partition, ())):
            self._drop(partition, offset)

    def _drop(self, partition: Partition, offset: int) -> None:
        read = self._reads.pop((partition, offset), None)
        if read is not None:
            self.size_bytes -= len(read.records)
            self._offsets[partition].discard(offset)
            if not self._offsets[partition]:
                del self._offsets[partition]
