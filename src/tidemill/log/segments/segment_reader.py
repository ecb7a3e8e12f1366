"""Reading batches from a segment: the one way for them to leave a log that is in use.

Every batch is checked on its way (see ``batch_checks``), also those that are only passed over. One that does
not check out is noted, and ends a read in front of it: what is good is served first. A caller that asks for
one of its offsets gets ``DamagedBatch``; one that asks for a later offset is served, from the next position
that is known to be the start of a batch. That is where the damaged batch's own length leads, if a sound batch
is there that fits, or else the next entry of the index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tidemill.errors import DamagedBatch, StorageError
from tidemill.log.epochs import EpochHistory
from tidemill.log.segments.batch_checks import check_batches, restamp
from tidemill.log.segments.segment import Segment
from tidemill.records.batch import HEADER_BYTES, BatchHeader, parse_header

__all__ = ("ReadBudget", "SegmentReader")

#: How many batches one turn of the event loop may check: a few milliseconds' worth of the smallest.
_TURN_BATCHES_MAX = 4_096
#: Read this much more than asked, to reach from the index entry to the batch in the same call.
_SLACK_BYTES = 8 * 1024
_WALK_BYTES = 256 * 1024
_SECTOR_BYTES = 512
#: How much is looked at behind a damaged batch for one that is sound.
_RESUME_BYTES_MAX = 1024 * 1024


@dataclass(slots=True)
class ReadBudget:
    """The budget for the reads of one turn of the event loop. A first batch is read whatever it costs."""

    batches: int = _TURN_BATCHES_MAX


class _Found(NamedTuple):
    """The batch that holds an offset. Its header fits its position; its checksum is not checked yet."""

    position: int
    header: BatchHeader
    chunk: memoryview
    chunk_start: int


class SegmentReader:
    """Reads a segment up to byte ``end``, where the batch of ``end_offset`` begins or the segment ends.

    ``note`` is told of damage that a read has passed over or stopped in front of.
    """

    __slots__ = ("_end", "_end_offset", "_epochs", "_note", "_read_error", "_segment")

    def __init__(
        self,
        segment: Segment,
        end: int,
        end_offset: int,
        epochs: EpochHistory,
        note: Callable[[DamagedBatch], None],
    ) -> None:
        self._segment = segment
        self._end = end
        self._end_offset = end_offset
        self._epochs = epochs
        self._note = note
        #: The message of the last read error of the operating system.
        self._read_error = ""

    # --- reading

    def find(self, offset: int) -> tuple[int, BatchHeader] | None:
        """Position and header of the batch that holds ``offset``; None if it is not before the end."""
        start = self._entry_before(offset)
        while (found := self._seek(offset, start, _SLACK_BYTES)) is not None:
            position, header = found.position, found.header
            if header.base_offset == offset:
                return position, header
            # That it holds the offset is only what its header says: the whole batch has to check out.
            chunk = self._load(position, header.size_bytes if not self._misfit(position, header) else 0)
            checked = check_batches(chunk, header.base_offset, self._epochs, max_batches=1)
            if checked.batch_count:
                return position, header
            defect = checked.defect or self._why_not_whole(position, chunk)
            start = self._pass_over(position, header.base_offset, defect, offset)
        return None

    def read(
        self, offset: int, max_bytes: int, budget: ReadBudget, *, at_least_one: bool
    ) -> memoryview | None:
        """Whole, checked batches from the one that holds ``offset``, as many as fit; None if it is not here.

        ``at_least_one`` reads the first batch even if it alone is larger than allowed; otherwise the result
        may be empty.
        """
        start = self._entry_before(offset)
        while (found := self._seek(offset, start, max_bytes + _SLACK_BYTES)) is not None:
            position, header = found.position, found.header
            defect = self._misfit(position, header)
            if not defect:
                wanted = min(max_bytes, self._end - position)
                if header.size_bytes > wanted or budget.batches <= 0:
                    if not at_least_one:
                        return memoryview(b"")
                    wanted = max(wanted, header.size_bytes)
                data = self._bytes(found, wanted)
                checked = check_batches(
                    data, header.base_offset, self._epochs, max_batches=max(1, budget.batches)
                )
                if checked.batch_count:
                    if checked.defect:
                        behind = position + checked.size_bytes
                        self._note(self._damage(behind, checked.next_offset, checked.defect)[0])
                    budget.batches -= checked.batch_count
                    return restamp(data, checked)
                defect = checked.defect or self._why_not_whole(position, data)
            start = self._pass_over(position, header.base_offset, defect, offset)
        return None

    def batches_since(self, timestamp: int) -> Iterator[tuple[int, BatchHeader]]:
        """Position and header of the batches that hold a record at or after ``timestamp``, in order.

        Raises ``DamagedBatch`` as ``batches_from`` does.
        """
        relative, position = self._segment.index.entry_before_time(timestamp)
        for found, header in self.batches_from(self._segment.base_offset + relative, position):
            if header.max_timestamp >= timestamp:
                yield found, header

    def batches_from(self, offset: int, position: int) -> Iterator[tuple[int, BatchHeader]]:
        """Position and header of each batch, checked, from the one at a known position up to the end.

        Raises ``DamagedBatch`` at the first that is damaged.
        """
        while position < self._end:
            chunk = self._load(position, _WALK_BYTES)
            checked = check_batches(chunk, offset, self._epochs)
            batches, inside = restamp(chunk, checked), 0
            for _ in range(checked.batch_count):
                header = parse_header(batches, inside)
                yield position + inside, header
                inside += header.size_bytes
            position, offset = position + inside, checked.next_offset
            if checked.defect or not checked.batch_count:
                reason = checked.defect or self._why_not_whole(position, chunk)
                raise self._damage(position, offset, reason)[0]

    # --- finding the batch

    def _entry_before(self, offset: int) -> tuple[int, int]:
        """(offset, position) of a batch at or before the one that holds ``offset``."""
        base = self._segment.base_offset
        relative, position = self._segment.index.entry_before_offset(offset - base)
        return base + relative, position

    def _seek(self, offset: int, start: tuple[int, int], chunk_bytes: int) -> _Found | None:
        """Go from the batch at ``start``, (offset, position), to the one that holds ``offset``."""
        expected, position = start
        while position < self._end:
            chunk, chunk_start = self._read(position, chunk_bytes), position
            checked = check_batches(chunk, expected, self._epochs, stop_offset=offset)
            position, expected = position + checked.size_bytes, checked.next_offset
            if not checked.defect:
                rest = chunk[checked.size_bytes :]
                if len(rest) >= HEADER_BYTES and (header := parse_header(rest)).last_offset >= offset:
                    return _Found(position, header, chunk, chunk_start)
                if checked.batch_count:
                    continue
                # A batch that is passed over and cut short by the end of the chunk.
                chunk = self._load(position, chunk_bytes)
                checked = check_batches(chunk, expected, self._epochs, max_batches=1)
                if checked.batch_count:
                    position, expected = position + checked.size_bytes, checked.next_offset
                    continue
            defect = checked.defect or self._why_not_whole(position, chunk)
            expected, position = self._pass_over(position, expected, defect, offset)
        return None

    def _pass_over(self, position: int, expected: int, defect: str, offset: int) -> tuple[int, int]:
        """(offset, position) behind a damaged batch. Raises ``DamagedBatch`` if ``offset`` is part of it."""
        damage, resume = self._damage(position, expected, defect)
        if offset < damage.next_offset:
            raise damage
        self._note(damage)
        return damage.next_offset, resume

    # --- bytes

    def _read(self, position: int, size: int) -> memoryview:
        """Bytes from ``position``; fewer if the file ends, or the disk cannot read on."""
        file, size = self._segment.file, min(size, self._end - position)
        while True:
            try:
                return memoryview(file.read(position, size))
            except StorageError as error:
                # A bad sector, most likely. What lies before it can be read, so ask for less.
                self._read_error = error.message
                if size <= _SECTOR_BYTES:
                    return memoryview(b"")
                size //= 2

    def _load(self, position: int, size: int) -> memoryview:
        """Bytes from ``position``, with the whole first batch among them if its length can be right."""
        chunk = self._read(position, size)
        if len(chunk) >= HEADER_BYTES:
            header = parse_header(chunk)
            if header.size_bytes > len(chunk) and not self._misfit(position, header):
                return self._read(position, header.size_bytes)
        return chunk

    def _bytes(self, found: _Found, size: int) -> memoryview:
        skip = found.position - found.chunk_start
        if skip + size > len(found.chunk):
            return self._read(found.position, size)
        return found.chunk[skip : skip + size]

    # --- damage

    def _next_anchor(self, position: int) -> tuple[int, int]:
        """(offset, position) of the next batch behind ``position`` that is known without reading the log."""
        entry = self._segment.index.entry_behind_position(position)
        if entry is None or entry[1] > self._end:
            return self._end_offset, self._end
        return self._segment.base_offset + entry[0], entry[1]

    def _misfit(self, position: int, header: BatchHeader) -> str:
        """The defect of a batch whose length reaches beyond the next known batch; empty if it does not."""
        room = self._next_anchor(position)[1] - position
        if header.size_bytes > room:
            return f"the batch needs {header.size_bytes} bytes, {room} are there"
        return ""

    def _why_not_whole(self, position: int, chunk: memoryview) -> str:
        if self._read_error:
            return self._read_error
        if len(chunk) < HEADER_BYTES:
            return f"the file ends inside a batch header ({len(chunk)} bytes)"
        return self._misfit(position, parse_header(chunk)) or "the file ends inside a batch"

    def _damage(self, position: int, expected: int, reason: str) -> tuple[DamagedBatch, int]:
        """The damage from ``position`` on, and the position of the next batch that can be read."""
        next_offset, resume = self._resume(position, expected)
        damage = DamagedBatch(
            reason,
            path=self._segment.log_path,
            position=position,
            first_offset=expected,
            next_offset=next_offset,
        )
        return damage, resume

    def _resume(self, position: int, expected: int) -> tuple[int, int]:
        """(offset, position) of the first batch behind a damaged one whose offset is beyond doubt."""
        anchor_offset, anchor = self._next_anchor(position)
        head = self._read(position, HEADER_BYTES)
        if len(head) < HEADER_BYTES:
            return anchor_offset, anchor
        header = parse_header(head)
        behind = position + header.size_bytes
        if header.size_bytes < HEADER_BYTES or behind >= anchor:
            return anchor_offset, anchor
        following = self._read(behind, min(anchor - behind, _RESUME_BYTES_MAX))
        if len(following) < HEADER_BYTES:
            return anchor_offset, anchor
        offset = parse_header(following).base_offset
        if not expected < offset < anchor_offset:
            return anchor_offset, anchor
        checked = check_batches(following, offset, self._epochs, max_batches=2)
        # No checksum covers an offset, so something else has to agree with it.
        agreed = offset == expected + header.last_offset_delta + 1 or checked.batch_count == 2
        reaches_anchor = (checked.next_offset, behind + checked.size_bytes) == (anchor_offset, anchor)
        if checked.batch_count and (agreed or reaches_anchor):
            return offset, behind
        return anchor_offset, anchor
