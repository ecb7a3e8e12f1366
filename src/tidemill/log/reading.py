"""Reading a partition's log: the batches from an offset on, records by time, sizes, positions.

``ReadableLog`` is what a log holds and how it is read; nothing here changes it. ``PartitionLog`` (``log.py``)
is a ``ReadableLog`` that appends, flushes, and cuts at both ends. Every read is bounded above by the caller's
``upper_offset``, and every batch is checked before it is given (``segments/segment_reader.py``). Reads run on
the thread of the log's owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tidemill.errors import ApiError, DamagedBatch, ErrorCode
from tidemill.log.producer_state.transactions import AbortedTransaction, with_markers
from tidemill.log.segments import by_time
from tidemill.log.segments.by_time import TimeSearch
from tidemill.log.segments.segment import Segment
from tidemill.log.segments.segment_reader import ReadBudget, SegmentReader
from tidemill.records.batch import HEADER_BYTES, behind_empty_batches, parse_header

if TYPE_CHECKING:
    from tidemill.config.topic import TopicConfig
    from tidemill.log.epochs import EpochHistory
    from tidemill.log.producer_state.producers import ProducerStates

__all__ = ("ReadableLog",)

_READ_AHEAD_BYTES = 1024 * 1024
#: How many reads that give only empty batches, as compaction leaves them, one call passes over.
_EMPTY_READS_MAX = 1_000


class ReadableLog:
    """What a partition's log holds, and how it is read: segments, their epochs, their producers."""

    def __init__(
        self,
        directory: str,
        config: TopicConfig,
        *,
        segments: list[Segment],
        producers: ProducerStates,
        epochs: EpochHistory,
        log_start_offset: int,
    ) -> None:
        self._segments = segments
        self.directory = directory
        self.config = config
        self.producers = producers
        self.epochs = epochs
        self.log_start_offset = log_start_offset
        #: Below it no key occurs twice: that part was compacted. Of no meaning in logs without compaction.
        self.first_dirty_offset = 0
        self.durable_offset = self.end_offset
        #: Where the durable offset is: base offset of its segment, and the byte in it.
        self._durable_segment = segments[-1].base_offset if segments else 0
        self._durable_position = segments[-1].size_bytes if segments else 0
        #: Called with each batch that does not check out, every time that it is read.
        self.on_damage: Callable[[DamagedBatch], None] = lambda damage: None

    # --- what is where

    @property
    def end_offset(self) -> int:
        return self._segments[-1].next_offset if self._segments else self.log_start_offset

    def last_stable_offset(self, high_watermark: int) -> int:
        """The last stable offset: where readers of committed data stop, given the owner's high watermark.

        The high watermark must never be above what is committed: a transaction has ended for good once its
        marker was below it.
        """
        return self.producers.transactions.last_stable_offset(high_watermark)

    @property
    def size_bytes(self) -> int:
        return sum(segment.size_bytes for segment in self._segments)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    # --- batches from an offset on

    def read(
        self,
        offset: int,
        max_bytes: int,
        upper_offset: int,
        *,
        at_least_one: bool = True,
        budget: ReadBudget | None = None,
    ) -> memoryview:
        """Whole, checked batches from the one that holds ``offset``, none at or above ``upper_offset``.

        Empty at its end, and if the budget is spent. Raises ``DamagedBatch`` if the offset cannot be read.
        """
        self.check_readable(offset, upper_offset)
        budget = budget or ReadBudget()
        if budget.batches <= 0 and not at_least_one:
            return memoryview(b"")
        for segment in self.segments_from(offset):
            if segment.base_offset >= upper_offset:
                break
            data = self._read_segment(segment, offset, max_bytes, upper_offset, budget, at_least_one)
            if data is not None:
                return data
        return memoryview(b"")

    def _read_segment(
        self,
        segment: Segment,
        offset: int,
        max_bytes: int,
        upper_offset: int,
        budget: ReadBudget,
        at_least_one: bool,
    ) -> memoryview | None:
        end_offset = min(upper_offset, segment.next_offset)
        try:
            try:
                end = self.end_position(segment, upper_offset)
            except DamagedBatch as damage:
                # The position of the upper offset is not known; batches before the damage are below it.
                if offset >= damage.first_offset:
                    raise
                end, end_offset = damage.position, damage.first_offset
            reader = self.reader(segment, end, end_offset)
            return reader.read(offset, max_bytes, budget, at_least_one=at_least_one)
        except DamagedBatch as damage:
            self.on_damage(damage)
            raise

    def reader(
        self, segment: Segment, end: int | None = None, end_offset: int | None = None
    ) -> SegmentReader:
        """Reads a segment up to byte ``end``, where the batch of ``end_offset`` begins; all by default."""
        if end is None or end_offset is None:
            end, end_offset = segment.size_bytes, segment.next_offset
        return SegmentReader(segment, end, end_offset, self.epochs, self.on_damage)

    def read_on(
        self,
        offset: int,
        max_bytes: int,
        upper_offset: int,
        *,
        at_least_one: bool = True,
        budget: ReadBudget | None = None,
    ) -> memoryview:
        """Read as ``read`` does, but pass over batches that compaction has emptied if records follow them.

        A client that gets nothing but empty batches several times in a row takes that for an error.
        """
        budget = budget or ReadBudget()
        data = self.read(offset, max_bytes, upper_offset, at_least_one=at_least_one, budget=budget)
        for _ in range(_EMPTY_READS_MAX if self.config.compacts or self.first_dirty_offset else 0):
            behind = behind_empty_batches(data)
            if behind is None or behind >= upper_offset or budget.batches <= 0:
                break
            try:
                following = self.read(
                    behind, max_bytes, upper_offset, at_least_one=at_least_one, budget=budget
                )
            except DamagedBatch:
                break  # Raised when somebody asks for that offset.
            if not following:
                break
            data = following
        return data

    def aborted_in(self, data: memoryview) -> list[AbortedTransaction]:
        """Aborted transactions with batches in what ``read`` gave; may name a few that lie just behind it."""
        transactions = self.producers.transactions
        if not transactions.aborted_count or not data:
            return []
        first = parse_header(data).base_offset
        segment = next(self.segments_from(first))
        behind = segment.index.offset_behind(first - segment.base_offset, len(data))
        end = segment.next_offset if behind is None else segment.base_offset + behind
        found = transactions.aborted_between(first, end)
        if found and (self.config.compacts or self.first_dirty_offset):
            found = with_markers(found, data)
        return found

    def check_readable(self, offset: int, upper_offset: int) -> None:
        if offset < self.log_start_offset or offset > upper_offset:
            raise ApiError(
                ErrorCode.offset_out_of_range,
                f"offset {offset} is not within {self.log_start_offset} … {upper_offset}",
            )

    def available_bytes(self, offset: int, upper_offset: int, enough: int) -> int:
        """Bytes between the two offsets, counted until ``enough``: what a waiting fetch asks repeatedly."""
        if offset < upper_offset and enough <= HEADER_BYTES:
            return HEADER_BYTES  # No batch is smaller.
        total = 0
        for segment in self.segments_from(offset):
            if segment.base_offset >= upper_offset or total >= enough:
                break
            end = self.end_position(segment, upper_offset)
            start = 0
            if offset > segment.base_offset:
                found = self.reader(segment, end, min(upper_offset, segment.next_offset)).find(offset)
                start = end if found is None else found[0]
            total += end - start
        return total

    def read_batches(self, offset: int, upper_offset: int) -> Iterator[bytes]:
        """Each batch from the one that holds ``offset`` up to ``upper_offset``, checked.

        Raises ``DamagedBatch`` at the first that is damaged.
        """
        while offset < upper_offset:
            data = self.read(offset, _READ_AHEAD_BYTES, upper_offset)
            if not data:
                return
            position = 0
            while position < len(data):
                header = parse_header(data, position)
                yield bytes(data[position : position + header.size_bytes])
                position, offset = position + header.size_bytes, header.next_offset

    def position_of(self, offset: int) -> tuple[str, int]:
        """File and position of the batch that holds ``offset``; the end of the log if there is none."""
        path, position = self.directory, 0
        for segment in self.segments_from(offset):
            found = self.reader(segment).find(offset)
            path, position = segment.log_path, segment.size_bytes if found is None else found[0]
            if found is not None:
                break
        return path, position

    def segments_from(self, offset: int) -> Iterator[Segment]:
        """The segment that holds ``offset``, and those behind it."""
        low, high = 0, len(self._segments)
        while low < high:
            middle = (low + high) // 2
            if self._segments[middle].base_offset <= offset:
                low = middle + 1
            else:
                high = middle
        for number in range(max(low - 1, 0), len(self._segments)):
            yield self._segments[number]

    def end_position(self, segment: Segment, upper_offset: int) -> int:
        """Byte behind the last batch of ``segment`` that lies below ``upper_offset``."""
        if upper_offset == self.durable_offset:
            if segment.base_offset == self._durable_segment:
                return self._durable_position
            if segment.base_offset < self._durable_segment:
                return segment.size_bytes
        if upper_offset >= segment.next_offset:
            return segment.size_bytes
        found = self.reader(segment).find(upper_offset)
        return segment.size_bytes if found is None else found[0]

    # --- by time

    def find_time(self, timestamp: int, upper_offset: int) -> TimeSearch:
        """Search for the first record at or after ``timestamp``, below ``upper_offset``.

        Raises ``DamagedBatch``.
        """
        with self._noting_damage():
            return (yield from by_time.find_time(self, timestamp, upper_offset))

    def find_max_timestamp(self, upper_offset: int) -> TimeSearch:
        """Search for the record with the largest timestamp, the first of several, below ``upper_offset``.

        Raises ``DamagedBatch``.
        """
        with self._noting_damage():
            return (yield from by_time.find_max_timestamp(self, upper_offset))

    @contextmanager
    def _noting_damage(self) -> Iterator[None]:
        try:
            yield
        except DamagedBatch as damage:
            self.on_damage(damage)
            raise
