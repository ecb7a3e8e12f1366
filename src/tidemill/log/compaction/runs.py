"""The log owner's part of compaction, on its own thread: order a run, and swap in its results.

Only the change of names on disk, ``carry_swap``, is done by the worker: it waits for the disk several times.
"""

from __future__ import annotations

from tidemill.errors import StorageError, SyncFailed
from tidemill.log.compaction.batch_owners import AbortedBatches, remembered_producers
from tidemill.log.compaction.cleaner import CleanedSegment, CleaningOrder
from tidemill.log.compaction.policy import NO_FLOOR, Cleanable, find_cleanable
from tidemill.log.compaction.swap import carry_out, commit
from tidemill.log.log import PartitionLog
from tidemill.log.producer_state.producer_snapshots import list_snapshots, snapshot_name
from tidemill.log.storage import Storage, StorageFile

__all__ = (
    "begin_swap",
    "carry_swap",
    "cleanable_part",
    "end_swap",
    "order_cleaning",
    "roll_for_compaction",
)


def cleanable_part(
    log: PartitionLog, now_ms: int, *, high_watermark: int, floor_offset: int = NO_FLOOR
) -> Cleanable:
    """The part of the log that could be compacted now, below ``floor_offset``.

    From ``floor_offset`` on somebody needs every record. A record above the high watermark may be cut, so it
    must not displace one that is committed.
    """
    return find_cleanable(
        log.segments,
        log.config,
        first_dirty_offset=max(log.first_dirty_offset, log.log_start_offset),
        upper_offset=min(log.last_stable_offset(high_watermark), floor_offset),
        now_ms=now_ms,
    )


def roll_for_compaction(log: PartitionLog, now_ms: int) -> bool:
    """Seal an active segment whose records have waited as long as they may; True if that is to be flushed."""
    segments = log.segments
    if not log.config.compacts or not segments or not segments[-1].size_bytes:
        return False
    if segments[-1].age_ms(now_ms) < log.config.max_compaction_lag_ms:
        return False
    log.roll()
    return True


def order_cleaning(
    log: PartitionLog, now_ms: int, *, high_watermark: int, floor_offset: int = NO_FLOOR
) -> CleaningOrder | None:
    """The order for a run, or None if there is nothing to compact now."""
    # Batches that producer states are read from will go: a producer snapshot behind them must be durable.
    snapshots = list_snapshots(log.storage, log.directory)
    if not snapshots:
        return None
    cleanable = cleanable_part(
        log, now_ms, high_watermark=high_watermark, floor_offset=min(floor_offset, snapshots[-1])
    )
    if not cleanable.dirty_bytes:
        return None
    segments = log.segments[: cleanable.segment_count]
    start_offset = segments[0].base_offset
    return CleaningOrder(
        log.directory,
        segments,
        cleanable,
        log.config,
        AbortedBatches(log.producers.transactions.aborted_between(start_offset, cleanable.end_offset)),
        remembered_producers(log.producers),
        log.index_cache,
        f"{log.directory}/{snapshot_name(snapshots[-1])}",
        now_ms,
    )


def begin_swap(log: PartitionLog, cleaned: CleanedSegment) -> None:
    """Prepare the log for ``carry_swap``: old segments stay readable through their open handles."""
    log.check_not_truncating()
    if not set(cleaned.old) <= set(log.segments):
        raise StorageError(f"segments of {log.directory} were deleted while they were compacted")
    for segment in cleaned.old:
        segment.hold()
    log.held = frozenset(cleaned.old)


def carry_swap(storage: Storage, directory: str, cleaned: CleanedSegment) -> None:
    """Replace the files of old segments by those of a compacted one. Slow: runs in another thread.

    Raises ``SyncFailed`` if what is on disk is not known, though it is right in any case; another
    ``StorageError`` if nothing has changed.
    """
    _drop_snapshots(storage, directory, cleaned.end_offset)
    commit(storage, directory, cleaned.base_offset, cleaned.end_offset)
    try:
        names = storage.list_dir(directory)
        carry_out(storage, directory, cleaned.base_offset, cleaned.end_offset, names)
    except StorageError as error:
        raise SyncFailed(f"a compaction is only half in place, restart to finish it: {error}") from error


def end_swap(
    log: PartitionLog, cleaned: CleanedSegment, error: StorageError | None = None
) -> list[StorageFile]:
    """Put the compacted segment into the log, or after ``error`` nothing; returns old files, to be closed."""
    log.held = frozenset()
    if error is not None:
        if isinstance(error, SyncFailed):
            log.fail(error)
        return []
    log.exchange(cleaned.old, cleaned.new)
    cleaned.new.unpin()
    log.producers.transactions.forget_aborted(cleaned.base_offset, cleaned.end_offset, cleaned.abort_markers)
    return [file for segment in cleaned.old if (file := segment.detach()) is not None]


def _drop_snapshots(storage: Storage, directory: str, end_offset: int) -> None:
    """Remove the producer snapshots below ``end_offset``; there is a newer one.

    They would only be used if that one is damaged. But replayed from one of them, a transaction whose marker
    compaction has dropped would stay open for ever; replayed from the beginning of the log it would not.
    """
    old = [offset for offset in list_snapshots(storage, directory) if offset < end_offset]
    for offset in old:
        storage.remove(f"{directory}/{snapshot_name(offset)}")
    if old:
        storage.sync_dir(directory)
