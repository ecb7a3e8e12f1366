"""Looking into the files of a partition without opening it, for ``tidemill log dump`` and ``log verify``.

Nothing is changed. ``verify`` reads every byte of every segment and compares all that was derived from the
log (indexes, producer snapshots, leader epochs) with the log itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial

from tidemill.errors import ApiError, CorruptData, StorageError
from tidemill.log.compaction.swap import list_swaps, swap_path
from tidemill.log.epochs import EPOCHS_KIND, EPOCHS_NAME, EpochHistory
from tidemill.log.notes.checked_file import read_checked
from tidemill.log.notes.checkpoint import CHECKPOINT_NAME, Checkpoint, damaged_slots, read_checkpoint
from tidemill.log.offline.segment_damage import Damage, SoundBatch, scan_segment
from tidemill.log.producer_state.producer_snapshots import SNAPSHOT_KIND, list_snapshots, snapshot_name
from tidemill.log.producer_state.producers import ProducerStates
from tidemill.log.recovery import list_segments
from tidemill.log.segments.index import SparseIndex
from tidemill.log.segments.segment import INDEX_KIND, segment_name
from tidemill.log.storage import Storage
from tidemill.records.batch import NO_TIMESTAMP, BatchHeader
from tidemill.records.record import Record, read_records
from tidemill.records.validation import check_stored_records

__all__ = ("DumpedBatch", "Problem", "ProblemKind", "VerifyReport", "dump", "verify")

Progress = Callable[[str, int, int], None]


# --- dump


@dataclass(frozen=True, slots=True)
class DumpedBatch:
    """One batch, or with ``problem`` set and no header a stretch of bytes that is none."""

    segment: str
    position: int
    size_bytes: int
    header: BatchHeader | None
    #: Empty unless they were asked for and can be decoded.
    records: tuple[Record, ...] = ()
    problem: str = ""


def dump(
    storage: Storage,
    directory: str,
    *,
    records: bool = False,
    from_offset: int = 0,
    to_offset: int | None = None,
) -> Iterator[DumpedBatch]:
    """All batches from the one that holds ``from_offset`` to the one before ``to_offset``, and all damage."""
    bases = list_segments(storage, directory)
    for base, following in zip(bases, [*bases[1:], None], strict=True):
        if (following is not None and following <= from_offset) or (
            to_offset is not None and base >= to_offset
        ):
            continue
        path = f"{directory}/{segment_name(base)}.log"
        file = storage.open(path)
        try:
            for found in scan_segment(file, base):
                if isinstance(found, Damage):
                    yield DumpedBatch(path, found.position, found.size_bytes, None, problem=found.reason)
                elif to_offset is not None and found.header.base_offset >= to_offset:
                    break
                elif found.header.last_offset >= from_offset:
                    data = file.read(found.position, found.header.size_bytes) if records else b""
                    yield _dumped(path, found, data)
        finally:
            file.close()


def _dumped(path: str, found: SoundBatch, data: bytes) -> DumpedBatch:
    header = found.header
    if not data:
        return DumpedBatch(path, found.position, header.size_bytes, header)
    try:
        return DumpedBatch(path, found.position, header.size_bytes, header, tuple(read_records(data)))
    except ApiError as error:
        return DumpedBatch(path, found.position, header.size_bytes, header, problem=error.message)


# --- verify


class ProblemKind(Enum):
    """Kinds of problems, by what is affected."""

    #: Records that were durable cannot be read.
    DATA = "data"
    #: The records of a batch cannot be read although its checksum is right: its producer sent it like that.
    #: Older releases accepted such batches; there is nothing to repair.
    RECORDS = "records"
    #: The largest timestamp of a batch is not what its header says, by which searches by time and retention
    #: go: its producer sent it like that. Older releases accepted such batches; there is nothing to repair.
    TIMESTAMP = "timestamp"
    #: Bytes above the recovery point that never became durable; opening the log cuts them off.
    TORN = "torn"
    #: The checkpoint is damaged, so that it is not known what was durable.
    CHECKPOINT = "checkpoint"
    #: An index, a producer snapshot or the epoch history is damaged; it can be built again from the log.
    DERIVED = "derived"
    #: All files of a partition that had data are gone.
    MISSING = "missing"


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that ``verify`` found, and where it is."""

    kind: ProblemKind
    path: str
    position: int
    what: str
    size_bytes: int = 0
    #: Offsets that are affected, the second exclusive; equal if it is not known how many or none is.
    first_offset: int = -1
    next_offset: int = -1

    def __str__(self) -> str:
        return f"{self.kind.value}: {self.what} ({self.path} at byte {self.position})"


@dataclass(slots=True)
class VerifyReport:
    """The result of ``verify``."""

    directory: str
    #: None if no slot of the checkpoint is whole, or if there is none.
    checkpoint: Checkpoint | None = None
    segments: int = 0
    batches: int = 0
    records: int = 0
    size_bytes: int = 0
    end_offset: int = 0
    problems: list[Problem] = field(default_factory=list)
    #: Remarks about what is unusual, but no problem.
    notes: list[str] = field(default_factory=list)
    #: Files that recovery or repair put aside; they are not part of the log.
    kept_aside: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems


def verify(
    storage: Storage, directory: str, progress: Progress | None = None, *, is_listed: bool = False
) -> VerifyReport:
    """Check everything; ``progress`` is told the file, the bytes done and the bytes in all.

    ``is_listed``: the inventory says that there are files.
    """
    report = _Verification(storage, directory, progress).run()
    if is_listed and not report.segments and not storage.exists(f"{directory}/{CHECKPOINT_NAME}"):
        what = "the partition had data, and its files are gone"
        report.problems.append(Problem(ProblemKind.MISSING, directory, 0, what))
    return report


class _Verification:
    """The steps of ``verify``, and what they have learned of the log."""

    def __init__(self, storage: Storage, directory: str, progress: Progress | None) -> None:
        self.storage = storage
        self.directory = directory
        self.progress = progress
        self.report = VerifyReport(directory)
        self.recovery_point = 0
        self.start = 0
        self.epochs = EpochHistory()
        self.producers = ProducerStates()
        #: Whether the log still holds everything that was written to it since its start.
        self.is_whole = True
        self.snapshots = list_snapshots(storage, directory)
        #: Paths of compacted segments that are to replace older ones at the next start, by base offset.
        self.waiting: dict[int, str] = {}

    def run(self) -> VerifyReport:
        bases = list_segments(self.storage, self.directory)
        names = self.storage.list_dir(self.directory)
        self.report.kept_aside = [
            f"{self.directory}/{name}" for name in names if ".cut-" in name or ".damaged" in name
        ]
        for base, end in list_swaps(names):
            self.report.notes.append(
                f"the compaction of offsets {base} … {end - 1} was interrupted; the next start finishes it"
            )
            self.waiting[base] = swap_path(self.directory, base, end)
            bases = sorted([*(other for other in bases if not base <= other < end), base])
        self._verify_checkpoint(bases)
        kept = self._kept(bases)
        sizes = [self._size(base) for base in kept]
        expected = self.start
        for number, base in enumerate(kept):
            if base > expected:
                self._missing(expected, base, kept[number - 1] if number else base)
            elif number and base < expected:
                self._add(ProblemKind.DATA, self._log_path(base), 0, f"offset {base} is there twice")
            expected = max(expected, self._verify_segment(base, is_last=number + 1 == len(kept)))
            if self.progress is not None:
                self.progress(self._log_path(base), sum(sizes[: number + 1]), sum(sizes))
        self._verify_end(kept, expected)
        self._verify_epochs()
        return self.report

    def _kept(self, bases: list[int]) -> list[int]:
        """The segments without left-overs of a deletion, which the next start removes."""
        below = [base for base in bases if base <= self.start]
        return [base for base in bases if not below or base >= below[-1]]

    def _log_path(self, base: int) -> str:
        return self.waiting.get(base) or f"{self.directory}/{segment_name(base)}.log"

    def _size(self, base: int) -> int:
        file = self.storage.open(self._log_path(base))
        try:
            return file.size()
        finally:
            file.close()

    def _add(self, kind: ProblemKind, path: str, position: int, what: str) -> None:
        self.report.problems.append(Problem(kind, path, position, what))

    # --- the checkpoint

    def _verify_checkpoint(self, bases: list[int]) -> None:
        path = f"{self.directory}/{CHECKPOINT_NAME}"
        checkpoint = self.report.checkpoint = read_checkpoint(self.storage, self.directory)
        if checkpoint is None:
            self.start = bases[0] if bases else 0
            if bases or self.storage.exists(path):
                what = "no slot of the checkpoint is whole" if self.storage.exists(path) else "no checkpoint"
                self._add(ProblemKind.CHECKPOINT, path, 0, what)
            return
        self.start, self.recovery_point = checkpoint.log_start_offset, checkpoint.recovery_point
        file = self.storage.open(path)
        try:
            for position in damaged_slots(file):
                # A crash can tear a slot; the other slots are there for that.
                self.report.notes.append(
                    f"the slot at byte {position} of {path} is not whole; another one is"
                )
        finally:
            file.close()

    # --- segments

    def _missing(self, first: int, following: int, base: int) -> None:
        self.is_whole = False
        torn = first >= self.recovery_point and self.report.checkpoint is not None
        kind = ProblemKind.TORN if torn else ProblemKind.DATA
        path = self._log_path(base)
        position = self._size(base) if base != following else 0
        what = f"offsets {first} … {following - 1} are missing"
        self.report.problems.append(Problem(kind, path, position, what, 0, first, following))

    def _verify_segment(self, base: int, *, is_last: bool) -> int:
        """Check one segment and its index; returns the offset behind its last sound batch."""
        path = self._log_path(base)
        file = self.storage.open(path)
        batches: dict[int, BatchHeader] = {}
        expected, sound, size = base, True, file.size()
        try:
            for found in scan_segment(file, base):
                if isinstance(found, Damage):
                    sound = self.is_whole = False
                    self._damage(path, found, is_last=is_last)
                    continue
                batches[found.position] = found.header
                self._verify_records(path, found, file.read(found.position, found.header.size_bytes))
                self._fold(found.header, partial(file.read, found.position, found.header.size_bytes))
                expected = found.header.next_offset
        finally:
            file.close()
        self._take_snapshots(expected)
        self.report.segments += 1
        self.report.batches += len(batches)
        unsound = {
            problem.position
            for problem in self.report.problems
            if problem.path == path and problem.kind is not ProblemKind.TIMESTAMP
        }
        self.report.records += sum(
            header.record_count for position, header in batches.items() if position not in unsound
        )
        self.report.size_bytes += size
        if sound and base not in self.waiting:
            self._verify_index(base, size, batches, expected)
        return expected

    def _verify_records(self, path: str, found: SoundBatch, data: bytes) -> None:
        header, kind = found.header, ProblemKind.RECORDS
        offsets = f"offsets {header.base_offset} … {header.last_offset}"
        try:
            largest = check_stored_records(data, header)
            if largest == max(header.max_timestamp, NO_TIMESTAMP):
                return
            kind, what = (
                ProblemKind.TIMESTAMP,
                f"{offsets} have timestamps up to {largest}, but their header says {header.max_timestamp}; "
                "they can be read, but a search by time may miss them, and retention.ms goes by the header",
            )
        except ApiError as error:
            what = (
                f"{offsets} cannot be read, {error.message}; "
                f"readers go on by seeking to offset {header.next_offset}"
            )
        self.report.problems.append(
            Problem(
                kind,
                path,
                found.position,
                what,
                header.size_bytes,
                header.base_offset,
                header.next_offset,
            )
        )

    def _damage(self, path: str, damage: Damage, *, is_last: bool) -> None:
        torn = damage.first_offset >= self.recovery_point and self.report.checkpoint is not None
        # Without a checkpoint it is not known what was durable; a bad tail is taken for what a crash leaves.
        torn = torn or (self.report.checkpoint is None and is_last and damage.next_offset is None)
        kind = ProblemKind.TORN if torn else ProblemKind.DATA
        following = damage.first_offset if damage.next_offset is None else damage.next_offset
        self.report.problems.append(
            Problem(
                kind, path, damage.position, damage.reason, damage.size_bytes, damage.first_offset, following
            )
        )

    def _fold(self, header: BatchHeader, read_batch: Callable[[], bytes]) -> None:
        self._take_snapshots(header.base_offset)
        # A batch without records stands where a repair left out damaged ones.
        self.is_whole = self.is_whole and header.record_count > 0
        self.epochs.assign(header.leader_epoch, header.base_offset)
        self.producers.replay(header, read_batch, header.max_timestamp)

    def _verify_index(self, base: int, size: int, batches: dict[int, BatchHeader], next_offset: int) -> None:
        path = f"{self.directory}/{segment_name(base)}.index"
        if not self.storage.exists(path):
            return
        try:
            index, summary = SparseIndex.from_bytes(read_checked(self.storage, path, INDEX_KIND))
        except StorageError as error:
            self._add(ProblemKind.DERIVED, path, 0, str(error))
            return
        if summary.size_bytes != size:
            # An orderly stop wrote it, and the segment has grown since: opening the log ignores it, too.
            return
        newest = max((header.max_timestamp for header in batches.values()), default=-1)
        if (summary.next_offset, summary.max_timestamp) != (next_offset, newest):
            self._add(ProblemKind.DERIVED, path, 0, "the summary does not fit the segment")
        for relative_offset, position, _ in index.entries():
            header = batches.get(position)
            if header is None or header.base_offset != base + relative_offset:
                self._add(
                    ProblemKind.DERIVED, path, 0, f"no batch {base + relative_offset} at byte {position}"
                )
                return

    def _verify_end(self, kept: list[int], end_offset: int) -> None:
        self.report.end_offset = end_offset
        if end_offset < self.recovery_point:
            path = self._log_path(kept[-1]) if kept else self.directory
            what = f"the log ends at offset {end_offset}, but {self.recovery_point} was durable"
            position = self._size(kept[-1]) if kept else 0
            self.report.problems.append(
                Problem(ProblemKind.DATA, path, position, what, 0, end_offset, self.recovery_point)
            )
        for offset in self.snapshots:
            path = f"{self.directory}/{snapshot_name(offset)}"
            self._add(ProblemKind.DERIVED, path, 0, f"a snapshot at {offset}, behind the end {end_offset}")

    # --- what is derived

    def _take_snapshots(self, offset: int) -> None:
        """Compare the snapshots up to ``offset`` with the producers as folded so far."""
        while self.snapshots and self.snapshots[0] <= offset:
            snapshot_offset = self.snapshots.pop(0)
            path = f"{self.directory}/{snapshot_name(snapshot_offset)}"
            try:
                data = read_checked(self.storage, path, SNAPSHOT_KIND)
            except StorageError as error:
                self._add(ProblemKind.DERIVED, path, 0, str(error))
                continue
            if snapshot_offset == offset and self.is_whole:
                self._compare_producers(ProducerStates.from_bytes(data), path)

    def _compare_producers(self, snapshot: ProducerStates, path: str) -> None:
        for producer_id, entry in self.producers:
            told = snapshot.get(producer_id)
            # A producer that is not in it has expired.
            if told is not None and (told.epoch, told.last_sequence) != (entry.epoch, entry.last_sequence):
                what = (
                    f"producer {producer_id} is at epoch {told.epoch}, sequence {told.last_sequence}; "
                    f"in the log at {entry.epoch}, {entry.last_sequence}"
                )
                self._add(ProblemKind.DERIVED, path, 0, what)

    def _verify_epochs(self) -> None:
        path = f"{self.directory}/{EPOCHS_NAME}"
        if not self.storage.exists(path):
            return
        try:
            told = EpochHistory.from_bytes(read_checked(self.storage, path, EPOCHS_KIND))
        except CorruptData as error:
            self._add(ProblemKind.DERIVED, path, 0, str(error))
            return
        told.truncate_end(self.report.end_offset)
        told.truncate_start(self.start)
        self.epochs.truncate_start(self.start)
        in_file = [entry for entry in self.epochs.entries if entry[1] < self.recovery_point]
        if list(told.entries)[: len(in_file)] != in_file and self.is_whole:
            self._add(
                ProblemKind.DERIVED, path, 0, f"it says {told.entries}, the log says {self.epochs.entries}"
            )
