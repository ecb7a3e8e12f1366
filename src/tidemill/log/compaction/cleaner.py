"""One run of compaction: it reads the keys of a log's dirty part, then rewrites segments without old records.

The order describes the log as of when it was made; the run works from files alone, in a thread of its own, on
segments that nobody changes any more. After each group of segments the owner swaps the result in:

    run = CleaningRun(order, ...)
    run.map_keys()                      worker
    while (cleaned := run.next()):      worker
        begin_swap, carry_swap, end_swap   owner, worker, owner (``runs``)
    run.finish()                        worker

Memory is the key map's budget and a few chunks, however large the log is. If the map is full before the dirty
part ends, the run goes as far as the map does, and another one does the rest.

Batches are read in groups, with numpy. A node should not wait for that when it starts, so it is imported by
the first run, in its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemill.config.topic import TopicConfig
from tidemill.errors import CorruptData
from tidemill.log.compaction.batch_owners import AbortedBatches, RememberedProducer
from tidemill.log.compaction.chunks import CHUNK_BYTES, Batches, read_chunks
from tidemill.log.compaction.policy import Cleanable, group_segments
from tidemill.log.compaction.swap import cleaned_paths, remove_cleaned, save_clean_point
from tidemill.log.pace import Pace
from tidemill.log.segments.index import IndexCache
from tidemill.log.segments.segment import Segment
from tidemill.log.segments.segment_walk import BrokenBatch
from tidemill.log.storage import Buffer, Storage, StorageFile
from tidemill.records.batch import BatchHeader
from tidemill.records.record import MAX_DECOMPRESSED_BYTES, build_empty_batch

if TYPE_CHECKING:
    from tidemill.log.compaction.batch_filter import BatchFilter
    from tidemill.log.compaction.keymap import KeyMap
    from tidemill.records.columns.rewriting import RecordIndex

__all__ = ("CleanedSegment", "CleaningOrder", "CleaningRun", "CleaningStopped")

_OFFSETS_PER_BATCH_MAX = 2**31 - 1


class CleaningStopped(Exception):
    """The run was told to stop. What it had not handed over yet is removed."""


@dataclass(frozen=True, slots=True)
class CleaningOrder:
    """The input of a run, made by the log's owner. The segments are sealed, durable and final."""

    directory: str
    segments: tuple[Segment, ...]
    cleanable: Cleanable
    config: TopicConfig
    aborted: AbortedBatches
    producers: Mapping[int, RememberedProducer]
    cache: IndexCache
    #: The producer snapshot behind these segments; made durable before anything is removed.
    snapshot_path: str
    now_ms: int


@dataclass(frozen=True, slots=True)
class CleanedSegment:
    """A compacted segment on disk, whole and synced, and what it can replace."""

    old: tuple[Segment, ...]
    new: Segment
    #: Offsets of the abort markers that are in it.
    abort_markers: frozenset[int]

    @property
    def base_offset(self) -> int:
        return self.new.base_offset

    @property
    def end_offset(self) -> int:
        return self.new.next_offset


class CleaningRun:
    """One run of compaction over a log. All methods but the constructor run in a worker thread."""

    def __init__(
        self,
        storage: Storage,
        order: CleaningOrder,
        *,
        map_bytes: int,
        pace: Pace,
        max_decompressed_bytes: int = MAX_DECOMPRESSED_BYTES,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._storage = storage
        self._order = order
        self._pace = pace
        self._max_decompressed_bytes = max_decompressed_bytes
        self._is_stopped = is_stopped
        self._map_bytes = map_bytes
        self._groups: Iterator[list[Segment]] = iter(())
        self._filter: BatchFilter | None = None
        #: Below this offset no key occurs twice once the run is through.
        self.mapped_to = order.cleanable.first_dirty_offset
        self.bytes_in = 0
        self.bytes_out = 0

    @property
    def is_complete(self) -> bool:
        """Whether all that was ordered fitted into the map."""
        return self.mapped_to >= self._order.cleanable.end_offset

    @property
    def records(self) -> tuple[int, int]:
        """How many records were read, and how many of them stay."""
        return (self._filter.records_in, self._filter.records_kept) if self._filter else (0, 0)

    # --- the keys

    def map_keys(self) -> None:
        """Read the keys of the dirty part. Raises ``StorageError``; ``CorruptData`` for a damaged batch."""
        from tidemill.log.compaction.batch_filter import BatchFilter
        from tidemill.log.compaction.keymap import KeyMap

        self._sync_snapshot()
        cleanable, first_dirty = self._order.cleanable, self.mapped_to
        keys = KeyMap(self._map_bytes, cleanable.end_offset - first_dirty)
        for segment in self._order.segments:
            if segment.next_offset > first_dirty and not self._map_segment(keys, segment, first_dirty):
                break
        order = self._order
        self._filter = BatchFilter(
            keys,
            mapped_to=self.mapped_to,
            aborted=order.aborted,
            producers=order.producers,
            now_ms=order.now_ms,
            delete_retention_ms=order.config.delete_retention_ms,
            max_decompressed_bytes=self._max_decompressed_bytes,
            breathe=self._pace.breathe,
        )
        touched = [segment for segment in order.segments if segment.base_offset < self.mapped_to]
        self._groups = iter(group_segments(touched, order.config.segment_bytes))

    def _sync_snapshot(self) -> None:
        """Sync the producer snapshot: one that an orderly stop wrote may not be durable yet."""
        file = self._storage.open(self._order.snapshot_path)
        try:
            file.sync()
        finally:
            file.close()
        self._storage.sync_dir(self._order.directory)

    def _map_segment(self, keys: KeyMap, segment: Segment, first_dirty: int) -> bool:
        """Put the keys of a segment into the map; False if the map is full before the segment ends."""
        from tidemill.records.columns.rewriting import index_batches

        aborted = self._order.aborted
        for batches in self._chunks(segment):
            dirty = [
                (header, data)
                for header, data in batches
                if header.next_offset > first_dirty
                and header.record_count
                and not header.is_control
                and header not in aborted
            ]
            # Batches that cannot be decoded are not among the parts; the filter keeps them as they are.
            for part in index_batches(dirty, self._max_decompressed_bytes, self._pace.breathe):
                if not self._map_part(keys, part):
                    return False
            self.mapped_to = max(self.mapped_to, batches[-1][0].next_offset)
        return True

    def _map_part(self, keys: KeyMap, part: RecordIndex) -> bool:
        """Put the keys of a part into the map; False if it is full before, at ``mapped_to``."""
        if keys.has_capacity(len(part.offsets)):
            self._put(keys, part, 0, len(part.offsets))
            return True
        cuts = part.cuts.tolist()
        for header, start, end in zip(part.headers, cuts[:-1], cuts[1:], strict=True):
            if not keys.has_capacity(end - start):
                if len(keys):
                    self.mapped_to = header.base_offset
                    return False
                keys.ensure_capacity(end - start)
            self._put(keys, part, start, end)
        return True

    def _put(self, keys: KeyMap, part: RecordIndex, start: int, end: int) -> None:
        for window in part.windows(start, end):
            has_key = part.key_ends[window] >= 0
            columns = (part.key_starts, part.key_ends, part.offsets)
            keys.put(part.body, *(column[window][has_key] for column in columns))
            self._pace.breathe()

    # --- the segments

    def next(self) -> CleanedSegment | None:
        """Write the next compacted segment; None if that was all. After an error nothing of it is left."""
        group = next(self._groups, None)
        if group is None:
            return None
        self._stop()
        try:
            return self._clean(group)
        except BaseException:
            remove_cleaned(self._storage, self._order.directory, group[0].base_offset)
            raise

    def _clean(self, group: list[Segment]) -> CleanedSegment:
        assert self._filter is not None, "map_keys comes first"
        log_path, index_path = cleaned_paths(self._order.directory, group[0].base_offset)
        file = self._storage.open(log_path, create=True)
        try:
            file.truncate(0)
            writer = _Writer(file, self._pace)
            self._filter.kept_aborts.clear()
            for segment in group:
                for batches in self._chunks(segment):
                    for (header, _), kept in zip(batches, self._filter.apply(batches), strict=True):
                        writer.add(header, kept)
            writer.flush()
            file.sync()
            new = self._checked(file, group)
        finally:
            file.close()
        self._write_index(index_path, new)
        self.bytes_out += new.size_bytes
        return CleanedSegment(tuple(group), new, frozenset(self._filter.kept_aborts))

    def _checked(self, file: StorageFile, group: list[Segment]) -> Segment:
        """Read back what was written, and make the segment's index on the way."""
        order = self._order
        new = Segment(
            self._storage,
            order.directory,
            group[0].base_offset,
            order.config.index_interval_bytes,
            order.cache,
        )
        try:
            for _ in new.rebuild(verify=True, file=file):
                self._pace.breathe()
        except BrokenBatch as broken:
            raise CorruptData(broken.reason, path=file.path, position=broken.position) from broken
        if new.next_offset != group[-1].next_offset:
            raise CorruptData(
                f"a compacted segment ends at offset {new.next_offset} instead of {group[-1].next_offset}",
                path=file.path,
                position=new.size_bytes,
            )
        new.first_append_ms = max(segment.first_append_ms for segment in group)
        return new

    def _write_index(self, path: str, segment: Segment) -> None:
        file = self._storage.open(path, create=True)
        try:
            file.truncate(0)
            file.write(0, [segment.index_bytes()])
            file.sync()
        finally:
            file.close()

    def finish(self) -> None:
        """Note up to where the log is clean now. Everything that ``next`` gave was swapped in."""
        save_clean_point(self._storage, self._order.directory, self.mapped_to)

    # --- reading

    def _chunks(self, segment: Segment) -> Iterator[Batches]:
        """The batches of a segment, checked, in groups, through a file handle of the run's own."""
        file = self._storage.open(segment.log_path)
        try:
            expected = segment.base_offset
            for position, batches in read_chunks(file, segment.size_bytes, self._pace, self._stop):
                for header, data in batches:
                    if header.base_offset != expected:
                        raise BrokenBatch(position, f"offset {header.base_offset} where {expected} must be")
                    expected = header.next_offset
                    position += len(data)
                    self.bytes_in += len(data)
                yield batches
            if expected != segment.next_offset:
                raise BrokenBatch(segment.size_bytes, f"the segment ends at offset {expected}")
        except BrokenBatch as broken:
            raise CorruptData(
                f"compaction stops: {broken.reason}; run 'tidemill log verify'",
                path=segment.log_path,
                position=broken.position,
            ) from broken
        finally:
            file.close()

    def _stop(self) -> None:
        if self._is_stopped():
            raise CleaningStopped


class _Writer:
    """Writes the batches that stay, and an empty batch for every range of offsets in which none does.

    So a compacted log has no gaps, and a lost segment or a damaged offset is noticed as in any other log.
    Such a range ends where the leader epoch changes, so that the epochs can be read from the log.
    """

    def __init__(self, file: StorageFile, pace: Pace) -> None:
        self._file = file
        self._pace = pace
        self._position = 0
        self._buffers: list[Buffer] = []
        self._buffered_bytes = 0
        self._gap: tuple[int, int, int] | None = None  # (first offset, last offset, leader epoch)

    def add(self, header: BatchHeader, kept: Buffer | None) -> None:
        if kept is None:
            self._widen_gap(header)
        else:
            self._close_gap()
            self._write(kept)

    def _widen_gap(self, header: BatchHeader) -> None:
        if self._gap is not None:
            first, _, epoch = self._gap
            if epoch == header.leader_epoch and header.last_offset - first < _OFFSETS_PER_BATCH_MAX:
                self._gap = first, header.last_offset, epoch
                return
        self._close_gap()
        self._gap = header.base_offset, header.last_offset, header.leader_epoch

    def _close_gap(self) -> None:
        if self._gap is not None:
            self._write(build_empty_batch(*self._gap))
            self._gap = None

    def _write(self, data: Buffer) -> None:
        self._buffers.append(data)
        self._buffered_bytes += len(data)
        if self._buffered_bytes >= CHUNK_BYTES:
            self._write_out()

    def _write_out(self) -> None:
        if self._buffers:
            self._file.write(self._position, self._buffers)
            self._pace.spend(self._buffered_bytes)
            self._position += self._buffered_bytes
            self._buffers, self._buffered_bytes = [], 0

    def flush(self) -> None:
        self._close_gap()
        self._write_out()
