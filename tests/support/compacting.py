"""Compaction of a log step by step, and reading it as a consumer does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tidemill.errors import StorageError
from tidemill.log.compaction.cleaner import CleanedSegment, CleaningRun
from tidemill.log.compaction.policy import NO_FLOOR
from tidemill.log.compaction.runs import begin_swap, carry_swap, end_swap, order_cleaning
from tidemill.log.log import PartitionLog
from tidemill.log.pace import Pace
from tidemill.records.batch import BatchHeader, parse_header
from tidemill.records.control import Marker
from tidemill.records.record import Record, build_batch, read_records
from tidemill.replication.partition import Partition

__all__ = (
    "ReadRecord",
    "batches_of",
    "clean",
    "consume",
    "end_transaction",
    "flush",
    "fold",
    "keyed",
    "no_pause",
    "seal",
    "swap",
    "write",
)


def no_pause() -> Pace:
    """A pace that never sleeps."""
    return Pace(clock=lambda: 0.0, sleep=lambda _: None)


def clean(
    log: PartitionLog,
    now_ms: int,
    *,
    map_bytes: int = 1 << 20,
    floor_offset: int = NO_FLOOR,
    high_watermark: int | None = None,
) -> list[CleaningRun]:
    """Compact all that may be, in as many runs as the map needs, here and now.

    The high watermark is the durable offset if it is not given.
    """
    upper = log.durable_offset if high_watermark is None else high_watermark
    runs: list[CleaningRun] = []
    while not runs or not runs[-1].is_complete:
        order = order_cleaning(log, now_ms, high_watermark=upper, floor_offset=floor_offset)
        if order is None:
            break
        run = CleaningRun(log.storage, order, map_bytes=map_bytes, pace=no_pause())
        run.map_keys()
        while (cleaned := run.next()) is not None:
            swap(log, cleaned)
        run.finish()
        log.first_dirty_offset = run.mapped_to
        runs.append(run)
    return runs


def swap(log: PartitionLog, cleaned: CleanedSegment) -> None:
    """Put a compacted segment in its place, all at once."""
    begin_swap(log, cleaned)
    try:
        carry_swap(log.storage, log.directory, cleaned)
    except StorageError as error:
        end_swap(log, cleaned, error)
        raise
    for file in end_swap(log, cleaned):
        file.close()


class ReadRecord(NamedTuple):
    """A record as a consumer gets it."""

    offset: int
    key: bytes | None
    value: bytes | None
    timestamp_ms: int


def batches_of(data: bytes | memoryview) -> Iterator[tuple[BatchHeader, bytes]]:
    """The whole batches in what a fetch returned."""
    view = memoryview(data)
    while len(view) >= 61 and parse_header(view).size_bytes <= len(view):
        header = parse_header(view)
        yield header, bytes(view[: header.size_bytes])
        view = view[header.size_bytes :]


def consume(
    log: PartitionLog, *, committed: bool, start: int | None = None, max_bytes: int = 400
) -> Iterator[ReadRecord]:
    """Everything that a consumer from ``start`` on gets, by the rules that real ones follow."""
    upper = log.last_stable_offset(log.durable_offset) if committed else log.durable_offset
    position = log.log_start_offset if start is None else start
    while position < upper:
        data = log.read(position, max_bytes, upper)
        waiting = sorted(log.aborted_in(data), key=lambda entry: entry.first_offset) if committed else []
        aborting: set[int] = set()
        before = position
        for header, batch in batches_of(data):
            while waiting and waiting[0].first_offset <= header.last_offset:
                aborting.add(waiting.pop(0).producer_id)
            if header.is_control:
                aborting.discard(header.producer_id)
            elif not (header.is_transactional and header.producer_id in aborting):
                for record in read_records(batch):
                    if record.offset >= before:
                        yield ReadRecord(record.offset, record.key, record.value, record.timestamp_ms)
            position = header.next_offset
        assert position > before, f"a consumer at {before} gets nothing"


def fold(records: Iterator[ReadRecord]) -> dict[bytes, ReadRecord]:
    """The last record of every key; a key that was deleted is not there."""
    state: dict[bytes, ReadRecord] = {}
    for record in records:
        assert record.key is not None
        if record.value is None:
            state.pop(record.key, None)
        else:
            state[record.key] = record
    return state


def keyed(key: str, value: str | None, timestamp_ms: int = 1) -> Record:
    """A record for ``build_batch``; a value of None is a tombstone."""
    return Record(key.encode(), None if value is None else value.encode(), timestamp_ms)


def write(
    log: PartitionLog,
    *records: Record,
    producer: tuple[int, int, int] | None = None,
    transactional: bool = False,
    codec: int = 0,
    now_ms: int = 1,
) -> int:
    """Append one batch; ``producer`` is (id, epoch, base sequence). Returns its base offset."""
    producer_id, epoch, sequence = producer or (-1, -1, -1)
    data = build_batch(
        records,
        codec=codec,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        attributes=0x10 if transactional else 0,
    )
    return log.append(data, parse_header(data), 0, now_ms).base_offset


def end_transaction(
    log: PartitionLog, producer_id: int, *, commit: bool, epoch: int = 0, now_ms: int = 1
) -> int:
    """Append a marker; returns its offset."""
    return log.append_markers([(producer_id, epoch, Marker(commit, 0))], 0, now_ms).base_offset


def flush(log: PartitionLog | Partition) -> None:
    """Make everything durable."""
    job = log.begin_flush()
    if job is None:
        return
    job.run()
    if isinstance(log, Partition):
        log.flushed(job)
    else:
        log.finish_flush(job)


def seal(log: PartitionLog | Partition) -> None:
    """Make everything durable and start a new segment: what is there now can be compacted."""
    (log.local_log if isinstance(log, Partition) else log).roll()
    flush(log)
