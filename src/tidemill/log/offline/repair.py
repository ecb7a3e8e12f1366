"""Making a damaged partition usable again: ``tidemill log repair``.

``plan_repair`` says what would be done and what it costs; ``apply_repair`` does it. Nothing is deleted:
whatever leaves the log is kept in a file beside it. Two ways to treat damage in the middle:

- ``SKIP`` takes out what is damaged and puts a batch without records in its place. Everything behind it stays
  readable, and no offset is ever given to another record. This is what one wants almost always.
- ``TRUNCATE`` ends the log in front of the first damage. Offsets behind it will be given out again, so
  readers that were further on must be reset.

A partition whose files are gone altogether starts again only if its loss is accepted: without records, at
the first offset that was surely not given to a lost one. A table's bucket whose state is still there starts
at the offset of the state, which is served from then on.

What is derived (indexes, producer snapshots, leader epochs) is put aside and built again by the next start.
The order of the steps is such that a crash between them leaves a log that a second repair can finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from tidemill.errors import StorageError
from tidemill.log.compaction.swap import list_swaps
from tidemill.log.epochs import EPOCHS_NAME
from tidemill.log.notes.checkpoint import CHECKPOINT_NAME, Checkpoint, CheckpointFile
from tidemill.log.notes.repaired import mark_repaired
from tidemill.log.offline.inspect import ProblemKind, VerifyReport, verify
from tidemill.log.offline.segment_damage import Damage, SoundBatch, scan_segment
from tidemill.log.producer_state.producer_snapshots import list_snapshots, snapshot_name
from tidemill.log.recovery import list_segments
from tidemill.log.segments.segment import segment_name
from tidemill.log.segments.torn import unused_name
from tidemill.log.storage import Storage, StorageFile, write_atomic
from tidemill.records.record import build_empty_batch

__all__ = ("DamageTreatment", "RepairPlan", "apply_repair", "plan_repair")

_COPY_BYTES = 1024 * 1024
_OFFSETS_PER_BATCH_MAX = 2**31 - 1


class DamageTreatment(Enum):
    """Ways to treat damage in the middle of the log."""

    SKIP = "skip"
    TRUNCATE = "truncate"


@dataclass(frozen=True, slots=True)
class _Rewrite:
    """Leave ``damages`` out of a segment; with ``filled_to`` empty batches take the place of lost offsets."""

    base_offset: int
    damages: tuple[Damage, ...]
    #: The offset that must follow the segment; None leaves its end where the last sound batch ends.
    filled_to: int | None

    def __str__(self) -> str:
        size_bytes = sum(damage.size_bytes for damage in self.damages)
        how = f", empty batches up to offset {self.filled_to}" if self.filled_to is not None else ""
        return f"take {size_bytes} damaged bytes out of segment {self.base_offset}{how}"


@dataclass(frozen=True, slots=True)
class _Fill:
    """Make a segment that holds no records, for offsets whose segment is missing."""

    base_offset: int
    next_offset: int

    def __str__(self) -> str:
        return f"make an empty segment for offsets {self.base_offset} … {self.next_offset - 1}"


@dataclass(frozen=True, slots=True)
class _PutAside:
    """Rename a file so that it is not part of the log any more."""

    path: str
    why: str

    def __str__(self) -> str:
        return f"put {self.path} aside: {self.why}"


@dataclass(frozen=True, slots=True)
class _WriteCheckpoint:
    """Write the checkpoint of the repaired log; everything in the log is made durable first."""

    checkpoint: Checkpoint

    def __str__(self) -> str:
        return (
            f"write a checkpoint: the log starts at {self.checkpoint.log_start_offset} and is durable up to "
            f"{self.checkpoint.recovery_point}"
        )


@dataclass(frozen=True, slots=True)
class _StartAgain:
    """Make a log without records for a partition whose files are gone."""

    log_start_offset: int
    next_offset: int

    def __str__(self) -> str:
        return (
            f"start the log again without records: it begins at offset {self.log_start_offset}, the next "
            f"record gets offset {self.next_offset}, so that no offset is given twice"
        )


_Step = _Rewrite | _Fill | _PutAside | _WriteCheckpoint | _StartAgain


@dataclass(slots=True)
class RepairPlan:
    """The plan of a repair. ``str`` of each step is meant for people."""

    storage: Storage
    directory: str
    treatment: DamageTreatment
    found: VerifyReport
    steps: list[_Step] = field(default_factory=list)
    #: Bytes that leave the log, into files beside it.
    bytes_put_aside: int = 0
    #: Offsets that become unreadable; those whose number cannot be known are not counted.
    offsets_lost: int = 0
    log_start_offset: int = 0
    end_offset: int = 0
    #: Why nothing is done although something is wrong; empty if the repair can be done.
    refused: str = ""
    #: Offset of a table's state that outlived its log; None if there is none.
    state_offset: int | None = None

    @property
    def is_missing(self) -> bool:
        """Whether all files of the partition are gone."""
        return any(problem.kind is ProblemKind.MISSING for problem in self.found.problems)

    @property
    def is_empty(self) -> bool:
        return not self.steps

    @property
    def loses_records(self) -> bool:
        """Whether the log has less afterwards than it promised; not if only derived files are made anew."""
        return self.offsets_lost > 0 or any(
            isinstance(step, _Rewrite | _Fill | _StartAgain)
            or (isinstance(step, _PutAside) and step.path.endswith(".log"))
            for step in self.steps
        )

    def describe(self) -> list[str]:
        """The plan in sentences, one per step, and what it costs."""
        if self.refused:
            return [self.refused]
        if self.is_empty:
            return ["nothing to repair"]
        if self.is_missing:
            return [*(str(step) for step in self.steps), self._what_is_lost()]
        cost = f"{self.bytes_put_aside} bytes are put aside, at least {self.offsets_lost} offsets are lost"
        return [*(str(step) for step in self.steps), cost]

    def _what_is_lost(self) -> str:
        if self.state_offset is None:
            return "all records that it had are lost; how many they were is not known"
        return (
            f"the table's state is kept as it was at offset {self.state_offset}; changes of rows from there "
            "on, if there were any, are lost, and so is the history of changes before it"
        )


def plan_repair(
    storage: Storage,
    directory: str,
    treatment: DamageTreatment = DamageTreatment.SKIP,
    *,
    listed_below: int = 0,
    accept_loss: bool = False,
    state_offset: int | None = None,
) -> RepairPlan:
    """Find out what is wrong and what would be done about it; changes nothing.

    ``listed_below`` is what the inventory says of the partition, ``state_offset`` how far the state of a
    table that was folded from it goes. Both only matter if its files are gone.
    """
    plan = RepairPlan(storage, directory, treatment, verify(storage, directory, is_listed=listed_below > 0))
    if plan.is_missing:
        _plan_new_start(plan, listed_below, accept_loss=accept_loss, state_offset=state_offset)
        return plan
    mended = (ProblemKind.TORN, ProblemKind.RECORDS, ProblemKind.TIMESTAMP)
    serious = [problem for problem in plan.found.problems if problem.kind not in mended]
    if serious and list_swaps(storage.list_dir(directory)):
        raise StorageError(
            f"a compaction of {directory} was interrupted: start the node once, which finishes it, and "
            "repair then"
        )
    if serious:
        _Planning(plan).run()
    return plan


def _plan_new_start(
    plan: RepairPlan, listed_below: int, *, accept_loss: bool, state_offset: int | None
) -> None:
    if not accept_loss:
        plan.refused = (
            "its files are gone: restore the directory from a backup, or give up what was in it with "
            "--accept-loss"
        )
        return
    plan.state_offset = state_offset
    plan.log_start_offset = state_offset or 0
    plan.end_offset = max(listed_below, plan.log_start_offset + 1)
    plan.steps.append(_StartAgain(plan.log_start_offset, plan.end_offset))


class _Planning:
    """Makes the plan: walks over the segments and decides what to do with each."""

    def __init__(self, plan: RepairPlan) -> None:
        self.plan = plan
        self.storage = plan.storage
        self.directory = plan.directory
        checkpoint = plan.found.checkpoint
        bases = list_segments(self.storage, self.directory)
        self.start = checkpoint.log_start_offset if checkpoint else (bases[0] if bases else 0)
        self.recovery_point = checkpoint.recovery_point if checkpoint else None
        below = [base for base in bases if base <= self.start]
        self.bases = [base for base in bases if not below or base >= below[-1]]

    def run(self) -> None:
        if self.bases and self.bases[0] > self.start:
            # Nothing is left before the first segment, so that the gap need not be filled.
            self.plan.offsets_lost += self.bases[0] - self.start
            self.start = self.bases[0]
        damaged_data = any(problem.kind is ProblemKind.DATA for problem in self.plan.found.problems)
        end_offset = self._plan_segments() if damaged_data or self.recovery_point is None else None
        for problem in self.plan.found.problems:
            if problem.kind is ProblemKind.DERIVED:
                self._put_aside(problem.path, problem.what)
        self.plan.log_start_offset = self.start
        self.plan.end_offset = self.plan.found.end_offset if end_offset is None else end_offset
        if end_offset is not None or self._needs_checkpoint():
            # If no data is damaged, what is above the recovery point was not checked: recovery does that.
            durable = self.recovery_point if end_offset is None else end_offset
            assert durable is not None
            self.plan.steps.append(_WriteCheckpoint(Checkpoint(self.start, max(durable, self.start))))

    def _needs_checkpoint(self) -> bool:
        return any(problem.kind is ProblemKind.CHECKPOINT for problem in self.plan.found.problems)

    def _put_aside(self, path: str, why: str) -> None:
        step = _PutAside(path, why)
        if self.storage.exists(path) and not any(
            isinstance(other, _PutAside) and other.path == path for other in self.plan.steps
        ):
            self.plan.steps.append(step)

    # --- segments

    def _plan_segments(self) -> int:
        """Plan the steps for all segments; returns the offset at which the log will end."""
        expected = self.start
        for number, base in enumerate(self.bases):
            if number and base != expected:
                if self.plan.treatment is DamageTreatment.TRUNCATE or base < expected:
                    return self._cut_from(number, expected)
                self._lose(expected, base)
                self.plan.steps.append(_Fill(expected, base))
            damages, end = self._damages(base)
            if damages and self.plan.treatment is DamageTreatment.TRUNCATE:
                return self._truncate(number, damages)
            expected = self._skip(number, damages, end) if damages else end
        return self._plan_end(expected)

    def _damages(self, base: int) -> tuple[list[Damage], int]:
        """The damages of a segment, and the offset behind its last sound batch."""
        damages, end = [], base
        file = self.storage.open(f"{self.directory}/{segment_name(base)}.log")
        try:
            for found in scan_segment(file, base):
                if isinstance(found, Damage):
                    damages.append(found)
                else:
                    end = found.header.next_offset
        finally:
            file.close()
        return damages, end

    def _skip(self, number: int, damages: list[Damage], end: int) -> int:
        """Plan to take the damage out; returns where the segment will end."""
        is_last = number + 1 == len(self.bases)
        behind = (self.recovery_point or 0) if is_last else self.bases[number + 1]
        filled_to = behind if behind > end else None
        for damage in damages:
            following = behind if damage.next_offset is None else damage.next_offset
            self._lose(damage.first_offset, following)
        self._rewrite(_Rewrite(self.bases[number], tuple(damages), filled_to))
        return end if filled_to is None else filled_to

    def _truncate(self, number: int, damages: list[Damage]) -> int:
        first = damages[0]
        file = self.storage.open(f"{self.directory}/{segment_name(self.bases[number])}.log")
        rest_bytes = file.size() - first.position
        file.close()
        rest = Damage(first.position, rest_bytes, first.reason, first.first_offset, None)
        self._rewrite(_Rewrite(self.bases[number], (rest,), None))
        return self._cut_from(number + 1, first.first_offset)

    def _rewrite(self, step: _Rewrite) -> None:
        self.plan.bytes_put_aside += sum(damage.size_bytes for damage in step.damages)
        self._put_aside(
            f"{self.directory}/{segment_name(step.base_offset)}.index", "its segment is rewritten"
        )
        self._put_aside(f"{self.directory}/{EPOCHS_NAME}", "it is built again from what is left")
        self.plan.steps.append(step)

    def _cut_from(self, number: int, end_offset: int) -> int:
        """Plan to end the log at ``end_offset``: all segments from ``number`` on leave it."""
        for base in self.bases[number:]:
            path = f"{self.directory}/{segment_name(base)}"
            file = self.storage.open(f"{path}.log")
            self.plan.bytes_put_aside += file.size()
            file.close()
            self._put_aside(f"{path}.log", "it follows damage")
            self._put_aside(f"{path}.index", "it follows damage")
        for offset in list_snapshots(self.storage, self.directory):
            if offset > end_offset:
                self._put_aside(f"{self.directory}/{snapshot_name(offset)}", "it speaks of what was cut")
        self._put_aside(f"{self.directory}/{EPOCHS_NAME}", "it is built again from what is left")
        self._lose(end_offset, max(self.plan.found.end_offset, self.recovery_point or 0))
        return end_offset

    def _plan_end(self, expected: int) -> int:
        """Plan for a log that ends before its recovery point without a damaged byte; returns its end."""
        if self.recovery_point is None or expected >= self.recovery_point:
            return expected
        self._lose(expected, self.recovery_point)
        if self.plan.treatment is DamageTreatment.TRUNCATE:
            return expected
        self.plan.steps.append(_Fill(expected, self.recovery_point))
        return self.recovery_point

    def _lose(self, first: int, behind: int) -> None:
        self.plan.offsets_lost += max(0, behind - first)


def apply_repair(plan: RepairPlan, *, in_cluster: bool = False) -> list[str]:
    """Do what the plan says; returns the files that were put aside.

    Nobody else may use the directory. The files must be as they were when the plan was made. A replica of a
    cluster (``in_cluster``) that loses records is marked, so that it does not count as one that has them.
    """
    if verify(plan.storage, plan.directory, is_listed=plan.is_missing).problems != plan.found.problems:
        raise StorageError(f"{plan.directory} has changed since the repair was planned; plan it again")
    work = _Work(plan.storage, plan.directory)
    if in_cluster and plan.loses_records:
        work.mark()
    for step in plan.steps:
        match step:
            case _PutAside():
                work.put_aside(step.path)
            case _Rewrite():
                work.rewrite(step)
            case _Fill():
                work.fill(step)
            case _WriteCheckpoint():
                work.write_checkpoint(step.checkpoint)
            case _StartAgain():
                work.start_again(step)
    return work.kept


class _Work:
    """Carries out the steps of a plan."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self.storage = storage
        self.directory = directory
        self.kept: list[str] = []

    def mark(self) -> None:
        """Say first, durably, that records are missing: the repair may be interrupted."""
        self.make_directory()
        mark_repaired(self.storage, self.directory)

    def make_directory(self) -> None:
        parent = self.directory
        self.storage.make_dir(parent)
        while parent:
            parent = parent.rpartition("/")[0]
            self.storage.sync_dir(parent)

    def put_aside(self, path: str) -> None:
        kept_in = unused_name(self.storage, f"{path}.damaged")
        self.storage.rename(path, kept_in)
        self.storage.sync_dir(self.directory)
        self.kept.append(kept_in)

    def rewrite(self, step: _Rewrite) -> None:
        path = f"{self.directory}/{segment_name(step.base_offset)}.log"
        source = self.storage.open(path)
        temporary = f"{path}.tmp"
        target = self.storage.open(temporary, create=True)
        try:
            target.truncate(0)
            self._copy_sound(source, target, step)
            target.sync()
            for damage in step.damages:
                if damage.size_bytes:
                    self._keep_bytes(source, path, damage)
        finally:
            source.close()
            target.close()
        self.storage.rename(temporary, path)
        self.storage.sync_dir(self.directory)

    def _copy_sound(self, source: StorageFile, target: StorageFile, step: _Rewrite) -> None:
        position, offset, epoch = 0, step.base_offset, 0
        for found in scan_segment(source, step.base_offset):
            if isinstance(found, Damage) or _is_within(found, step.damages):
                continue
            header = found.header
            if header.base_offset > offset:
                position = _write_empty(target, position, offset, header.base_offset, epoch)
            position = _copy(source, found.position, header.size_bytes, target, position)
            offset, epoch = header.next_offset, header.leader_epoch
        if step.filled_to is not None and step.filled_to > offset:
            _write_empty(target, position, offset, step.filled_to, epoch)

    def _keep_bytes(self, source: StorageFile, path: str, damage: Damage) -> None:
        kept_in = unused_name(self.storage, f"{path}.damaged-{damage.position}")
        file = self.storage.open(kept_in, create=True)
        try:
            _copy(source, damage.position, damage.size_bytes, file, 0)
            file.sync()
        finally:
            file.close()
        self.kept.append(kept_in)

    def fill(self, step: _Fill) -> None:
        path = f"{self.directory}/{segment_name(step.base_offset)}.log"
        temporary = f"{path}.tmp"
        file = self.storage.open(temporary, create=True)
        try:
            file.truncate(0)
            _write_empty(file, 0, step.base_offset, step.next_offset, 0)
            file.sync()
        finally:
            file.close()
        self.storage.rename(temporary, path)
        self.storage.sync_dir(self.directory)

    def start_again(self, step: _StartAgain) -> None:
        self.make_directory()
        self.fill(_Fill(step.log_start_offset, step.next_offset))
        self.write_checkpoint(Checkpoint(step.log_start_offset, step.next_offset))

    def write_checkpoint(self, checkpoint: Checkpoint) -> None:
        for base in list_segments(self.storage, self.directory):
            file = self.storage.open(f"{self.directory}/{segment_name(base)}.log")
            try:
                file.sync()
            finally:
                file.close()
        path = f"{self.directory}/{CHECKPOINT_NAME}"
        if self.storage.exists(path):
            kept_in = unused_name(self.storage, f"{path}.damaged")
            write_atomic(self.storage, kept_in, self.storage.read_file(path))
            self.kept.append(kept_in)
        CheckpointFile.create(self.storage, self.directory, checkpoint).close()


def _is_within(batch: SoundBatch, damages: Sequence[Damage]) -> bool:
    return any(0 <= batch.position - damage.position < damage.size_bytes for damage in damages)


def _copy(source: StorageFile, start: int, size: int, target: StorageFile, position: int) -> int:
    while size > 0:
        data = source.read(start, min(_COPY_BYTES, size))
        target.write(position, [data])
        start, position, size = start + len(data), position + len(data), size - len(data)
    return position


def _write_empty(file: StorageFile, position: int, first: int, behind: int, epoch: int) -> int:
    while first < behind:
        last = min(behind, first + _OFFSETS_PER_BATCH_MAX) - 1
        data = build_empty_batch(first, last, epoch)
        file.write(position, [data])
        position, first = position + len(data), last + 1
    return position
