"""What a log's owner does for compaction, on its own thread: order a run, and put the results in place."""

from __future__ import annotations

from tidemill.errors import StorageError, SyncFailed
from tidemill.log.batch_filter import AbortedBatches, remembered_producers
from tidemill.log.cleaner import CleanedSegment, CleaningOrder
from tidemill.log.compaction import NO_FLOOR, Cleanable, find_cleanable
from tidemill.log.log import PartitionLog, list_snapshots, snapshot_name
from tidemill.log.storage import StorageFile
from tidemill.log.swap import carry_out, commit

__all__ = ("cleanable_part", "order_cleaning", "roll_for_compaction", "swap_in")


def cleanable_part(log: PartitionLog, now_ms: int, floor_offset: int = NO_FLOOR) -> Cleanable:
    """What could be compacted now. From ``floor_offset`` on somebody needs every record."""
    return find_cleanable(
        log.segments,
        log.config,
        first_dirty_offset=max(log.first_dirty_offset, log.log_start_offset),
        upper_offset=min(log.last_stable_offset, floor_offset),
        now_ms=now_ms,
    )


def roll_for_compaction(log: PartitionLog, now_ms: int) -> bool:
    """Seal an active segment whose records have waited as long as they may; True if that is to be flushed."""
    segments = log.segments
    if not log.config.compacts or not segments or not segments[-1].size_bytes:
        return False
    waited_ms = now_ms - segments[-1].first_append_ms if segments[-1].first_append_ms else 0
    if waited_ms < log.config.max_compaction_lag_ms:
        return False
    log.roll()
    return True


def order_cleaning(log: PartitionLog, now_ms: int, floor_offset: int = NO_FLOOR) -> CleaningOrder | None:
    """Everything that a run needs to know, or None if there is nothing that it could do now."""
    # Batches go that the producers' states were read from: a snapshot behind them must be durable.
    snapshots = list_snapshots(log.storage, log.directory)
    if not snapshots:
        return None
    cleanable = cleanable_part(log, now_ms, min(floor_offset, snapshots[-1]))
    if not cleanable.dirty_bytes:
        return None
    file = log.storage.open(f"{log.directory}/{snapshot_name(snapshots[-1])}")
    try:
        file.sync()
    finally:
        file.close()
    log.storage.sync_dir(log.directory)
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
        now_ms,
    )


def swap_in(log: PartitionLog, cleaned: CleanedSegment) -> list[StorageFile]:
    """Put a compacted segment in its place, on disk and in memory; returns old files, to be closed.

    Raises ``StorageError`` and then nothing has changed, unless ``log.failure`` is set: what is on disk is
    right in any case, but this process cannot go on with it.
    """
    directory, storage = log.directory, log.storage
    if not set(cleaned.old) <= set(log.segments):
        raise StorageError(f"segments of {directory} were deleted while they were compacted")
    _drop_snapshots(log, cleaned.end_offset)
    try:
        commit(storage, directory, cleaned.base_offset, cleaned.end_offset)
    except SyncFailed as error:
        log.fail(error)
        raise
    try:
        files = [segment.detach() for segment in cleaned.old]
        names = storage.list_dir(directory)
        carry_out(storage, directory, cleaned.base_offset, cleaned.end_offset, names)
    except StorageError as error:
        log.fail(error)
        raise
    log.exchange(cleaned.old, cleaned.new)
    cleaned.new.unpin()
    log.producers.transactions.forget_aborted(cleaned.base_offset, cleaned.end_offset, cleaned.abort_markers)
    return files


def _drop_snapshots(log: PartitionLog, end_offset: int) -> None:
    """Remove the snapshots of producers below the offset; there is one behind it.

    They are only there in case that one is damaged. But replayed from one of them, a transaction whose marker
    compaction has dropped would stay open for ever; replayed from the beginning of the log it would not.
    """
    old = [offset for offset in list_snapshots(log.storage, log.directory) if offset < end_offset]
    for offset in old:
        log.storage.remove(f"{log.directory}/{snapshot_name(offset)}")
    if old:
        log.storage.sync_dir(log.directory)
