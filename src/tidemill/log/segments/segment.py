"""One segment of a partition's log: a file of batches and its sparse index. ``segment_reader`` reads it."""

from __future__ import annotations

from collections.abc import Iterator

from tidemill.errors import CorruptData, StorageError
from tidemill.log.notes.checked_file import pack_checked, read_checked
from tidemill.log.segments.index import IndexCache, SegmentSummary, SparseIndex
from tidemill.log.segments.segment_walk import BrokenBatch, walk
from tidemill.log.storage import Buffer, Storage, StorageFile
from tidemill.records.batch import NO_TIMESTAMP, BatchHeader

__all__ = ("INDEX_KIND", "RELATIVE_OFFSET_MAX", "Segment", "segment_name")

INDEX_KIND = 1
#: Offsets inside a segment are kept relative, in 31 bits, as Kafka does.
RELATIVE_OFFSET_MAX = 2**31 - 1


def segment_name(base_offset: int) -> str:
    """File name, without its ending, of the segment that starts at ``base_offset``.

    >>> segment_name(42)
    '00000000000000000042'
    """
    return f"{base_offset:020d}"


class Segment:
    """Batches from ``base_offset`` to ``next_offset``, in ``size_bytes`` bytes."""

    __slots__ = (
        "_cache",
        "_file",
        "_index",
        "_index_interval_bytes",
        "_storage",
        "base_offset",
        "first_append_ms",
        "max_timestamp",
        "max_timestamp_batch",
        "next_offset",
        "path",
        "size_bytes",
    )

    def __init__(
        self, storage: Storage, directory: str, base_offset: int, index_interval_bytes: int, cache: IndexCache
    ) -> None:
        self._storage = storage
        self._cache = cache
        self._file: StorageFile | None = None
        self._index: SparseIndex | None = None
        self._index_interval_bytes = index_interval_bytes
        self.path = f"{directory}/{segment_name(base_offset)}"
        self.base_offset = base_offset
        self.next_offset = base_offset
        self.size_bytes = 0
        self.max_timestamp = NO_TIMESTAMP
        self.max_timestamp_batch = base_offset
        #: The broker's time of the first append; 0 if there was none or a crash lost it.
        self.first_append_ms = 0

    def age_ms(self, now_ms: int) -> int:
        """The time since the first append; 0 if that is not known.

        A first append in the future means that the clock was set back: then the age counts from now on, and
        not from when the clock gets there again.
        """
        self.first_append_ms = min(self.first_append_ms, now_ms)
        return now_ms - self.first_append_ms if self.first_append_ms else 0

    # --- lifecycle

    def create(self) -> None:
        """Make the file. Its name is durable only after the directory is synced."""
        self._file = self._storage.open(self.log_path, create=True)
        self._file.truncate(0)
        self._index = SparseIndex()

    def load(self) -> bool:
        """Take size and summary from the index file; False if that is missing, damaged or out of date."""
        try:
            data = read_checked(self._storage, self.index_path, INDEX_KIND)
        except StorageError:
            return False
        index, summary = SparseIndex.from_bytes(data)
        if summary.size_bytes != self.file.size():
            return False
        self._take(summary)
        self._cache.put(self.path, index)
        return True

    def rebuild(self, *, verify: bool, file: StorageFile | None = None) -> Iterator[tuple[int, BatchHeader]]:
        """Walk the whole file, noting and yielding every batch. Raises ``BrokenBatch`` if it ends early.

        ``file`` is walked instead if the segment still has another name.
        """
        file = file or self.file
        self._index = SparseIndex()
        self.next_offset, self.size_bytes = self.base_offset, 0
        self.max_timestamp, self.max_timestamp_batch = NO_TIMESTAMP, self.base_offset
        for position, header in walk(file, 0, file.size(), verify=verify):
            if header.base_offset != self.next_offset:
                # The checksum does not cover the offset; that it follows on is the only check of it.
                raise BrokenBatch(position, f"offset {header.base_offset} where {self.next_offset} must be")
            self.note(position, header, header.base_offset, header.max_timestamp)
            yield position, header

    def _take(self, summary: SegmentSummary) -> None:
        self.next_offset = summary.next_offset
        self.size_bytes = summary.size_bytes
        self.max_timestamp = summary.max_timestamp
        self.max_timestamp_batch = summary.max_timestamp_batch
        self.first_append_ms = summary.first_append_ms

    def reopen_for_append(self) -> None:
        """Make a loaded segment the active one: its index is pinned and grows."""
        self._index = self.index
        self._cache.drop(self.path)

    def seal(self) -> bytes:
        """End appends; returns the bytes of the index file. The index may be dropped from memory now."""
        data = self.index_bytes()
        self.unpin()
        return data

    def unpin(self) -> None:
        """Allow the index to be dropped from memory; its file exists or is due."""
        if self._index is not None:
            self._cache.put(self.path, self._index)
            self._index = None

    def hold(self) -> None:
        """Keep reading through the open handle: another segment is about to take over the file names."""
        _ = self.file
        self._index = self.index
        self._cache.drop(self.path)

    def cut_to(self, position: int, next_offset: int) -> Segment:
        """This segment as it is once its file ends at ``position``, where the batch of ``next_offset`` began.

        The index is cut, not built again: only the batches behind its last entry are looked at, and those
        that may hold the largest timestamp.
        """
        directory = self.path.rpartition("/")[0]
        cut = Segment(self._storage, directory, self.base_offset, self._index_interval_bytes, self._cache)
        cut._index = index = self.index.before_position(position)
        cut.size_bytes, cut.next_offset = position, next_offset
        cut.first_append_ms = self.first_append_ms
        if self.max_timestamp_batch < next_offset:
            cut.max_timestamp, cut.max_timestamp_batch = self.max_timestamp, self.max_timestamp_batch
            return cut
        try:
            cut.max_timestamp, cut.max_timestamp_batch = self._max_timestamp_before(position, index)
        except BrokenBatch as broken:
            raise CorruptData(broken.reason, path=self.log_path, position=broken.position) from broken
        return cut

    def _max_timestamp_before(self, position: int, index: SparseIndex) -> tuple[int, int]:
        """The largest timestamp of the batches before a byte, and the first batch that has it."""
        largest = NO_TIMESTAMP if index.last_time is None else index.last_time
        for _, header in walk(self.file, index.last_position, position):
            largest = max(largest, header.max_timestamp)
        if largest > NO_TIMESTAMP:
            for _, header in walk(self.file, index.entry_before_time(largest)[1], position):
                if header.max_timestamp == largest:
                    return largest, header.base_offset
        return largest, self.base_offset

    def take_file(self, other: Segment) -> None:
        """Take over the open file of ``other``, which is not used any more."""
        self._file = other.detach()
        other.close()

    def detach(self) -> StorageFile | None:
        """Hand the open file to the caller to close: nobody reads the segment any more."""
        file, self._file = self._file, None
        return file

    def index_bytes(self) -> bytes:
        summary = SegmentSummary(
            self.next_offset,
            self.size_bytes,
            self.max_timestamp,
            self.max_timestamp_batch,
            self.first_append_ms,
        )
        return pack_checked(INDEX_KIND, self.index.to_bytes(summary))

    def close(self) -> None:
        self._cache.drop(self.path)
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Delete the files of this segment."""
        self.close()
        for path in (self.log_path, self.index_path):
            if self._storage.exists(path):
                self._storage.remove(path)

    # --- access

    @property
    def log_path(self) -> str:
        return f"{self.path}.log"

    @property
    def index_path(self) -> str:
        return f"{self.path}.index"

    @property
    def file(self) -> StorageFile:
        if self._file is None:
            self._file = self._storage.open(self.log_path)
        return self._file

    @property
    def index(self) -> SparseIndex:
        if self._index is not None:
            return self._index
        index = self._cache.get(self.path)
        if index is None:
            index = self._read_index()
            self._cache.put(self.path, index)
        return index

    def _read_index(self) -> SparseIndex:
        try:
            data = read_checked(self._storage, self.index_path, INDEX_KIND)
            index, summary = SparseIndex.from_bytes(data)
            if summary.size_bytes != self.size_bytes:
                raise StorageError(f"{self.index_path} belongs to another form of the segment")
            return index
        except StorageError:
            rebuilt = Segment(
                self._storage,
                self.path.rpartition("/")[0],
                self.base_offset,
                self._index_interval_bytes,
                self._cache,
            )
            try:
                for _ in rebuilt.rebuild(verify=False):
                    pass
            except BrokenBatch as broken:
                raise CorruptData(broken.reason, path=self.log_path, position=broken.position) from broken
            finally:
                rebuilt.file.close()
            assert rebuilt._index is not None
            return rebuilt._index

    def append(self, buffers: list[Buffer], header: BatchHeader, base_offset: int, timestamp: int) -> None:
        """Write one batch at the end. After a failure the file may hold a part of it: ``truncate`` then."""
        self.file.write(self.size_bytes, buffers)
        self.note(self.size_bytes, header, base_offset, timestamp)

    def note(self, position: int, header: BatchHeader, base_offset: int, timestamp: int) -> None:
        """Note a batch at ``position``, the end of what is known so far."""
        index = self.index
        if position - index.last_position >= self._index_interval_bytes:
            index.append(base_offset - self.base_offset, position, self.max_timestamp)
        if timestamp > self.max_timestamp:
            self.max_timestamp = timestamp
            self.max_timestamp_batch = base_offset
        self.next_offset = base_offset + header.last_offset_delta + 1
        self.size_bytes = position + header.size_bytes

    def note_equal(self, count: int, size_bytes: int, timestamp: int) -> None:
        """Note batches of one record each, all of that size and with that timestamp, at the end."""
        index, position, offset = self.index, self.size_bytes, self.next_offset
        for number in range(count):
            if position - index.last_position >= self._index_interval_bytes:
                newest = self.max_timestamp if number == 0 else max(self.max_timestamp, timestamp)
                index.append(offset + number - self.base_offset, position, newest)
            position += size_bytes
        if timestamp > self.max_timestamp:
            self.max_timestamp, self.max_timestamp_batch = timestamp, offset
        self.next_offset, self.size_bytes = offset + count, position

    def read_batch(self, position: int, header: BatchHeader) -> bytes:
        """The bytes of a batch that was checked when its header was read."""
        return self.file.read(position, header.size_bytes)
