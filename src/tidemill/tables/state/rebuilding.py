"""A state at an offset, built again from the log, on a node that has no snapshot of it.

Leases are metadata of the whole cluster, and snapshots are files of one node. Every replica keeps what is
above the oldest leased offset as it was written (``SnapshotKeeper.floor``): so the fold of its log up to that
offset gives the same state as on the node that took the snapshot. What is not leased can be built again as
long as the log is not compacted beyond it: so a scan goes on whose node has failed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Final, TypeVar

from tidemill.control.tables.images import LeasedSnapshot
from tidemill.coordination.pools import run_to_end
from tidemill.errors import CorruptData, StorageError, TableCode, TableError
from tidemill.kv.contract import KvEngine, KvStore
from tidemill.kv.snapshots import SnapshotInfo, SnapshotStore
from tidemill.log.producer_state.transactions import AbortedTransaction
from tidemill.records.batch import parse_header
from tidemill.replication.partition import Partition
from tidemill.tables.definition import TableDefinition
from tidemill.tables.state.bucket import bucket_identity
from tidemill.tables.state.folding import PreparedChanges, fold_batches, read_for_fold, until_taken

__all__ = ("ANY_NODE", "check_history", "rebuild")

_T = TypeVar("_T")
#: The node of a state that nobody has leased: the leader of the bucket builds it.
ANY_NODE: Final = -2
_WORK: Final = "leased"


async def rebuild(
    log: Partition,
    held: LeasedSnapshot,
    *,
    table: Callable[[], TableDefinition],
    engine: KvEngine,
    snapshots: SnapshotStore,
    older: Sequence[SnapshotInfo],
    threads: Executor,
    fold_thread: Executor,
    created_ms: int,
    max_decompressed_bytes: int,
) -> SnapshotInfo:
    """Fold the log up to the leased offset, which must be stable, and take a snapshot of that.

    It begins with the newest of ``older`` snapshots of the log's own, newest last, that can be read. Only one
    at a time for a bucket. Raises ``TableError`` if the log does not have what it takes.
    """
    check_rebuildable(log, held)
    directory = snapshots.working_directory(_WORK)
    identity = bucket_identity(log.topic_id.hex, held.bucket)
    nothing_prepared = PreparedChanges(0)

    def step(store: KvStore, data: bytes, aborted: list[AbortedTransaction]) -> None:
        if not data or parse_header(data).base_offset >= held.log_offset:
            # Compaction has left nothing more below the offset.
            store.write([], [], [], held.log_offset, held.leader_epoch)
            return
        fold_batches(
            store,
            table(),
            data,
            aborted,
            held.log_offset,
            nothing_prepared,
            max_decompressed_bytes=max_decompressed_bytes,
            is_stopped=lambda: False,
        )

    def open_base() -> KvStore:
        engine.files.remove_tree(directory)
        for info in reversed(older):
            with contextlib.suppress(CorruptData):
                snapshots.restore(info, directory)
                return engine.open(directory, identity)
        engine.files.make_directory(directory)
        return engine.open(directory, identity)

    store = await run_to_end(threads, open_base)
    try:
        while store.applied_offset < held.log_offset:
            fold = partial(step, store, *read_for_fold(log, store.applied_offset))
            await until_taken(partial(run_to_end, fold_thread, fold))
        if store.applied_offset > held.log_offset:
            raise _not_here(log, held, f"offset {held.log_offset} is within a batch")
        return await run_to_end(threads, partial(snapshots.create, store, created_ms))
    finally:
        await run_to_end(threads, partial(_discard, store, partial(engine.files.remove_tree, directory)))


def check_rebuildable(log: Partition, held: LeasedSnapshot) -> None:
    """Raise ``TableError`` unless the fold of this log at the leased offset is the leased state."""
    if log.log_start_offset > 0:
        raise _not_here(log, held, f"the log here begins at offset {log.log_start_offset}")
    if log.compacted_offset > held.log_offset:
        raise _not_here(log, held, f"the log here is compacted up to offset {log.compacted_offset}")
    check_history(log, held)


def check_history(log: Partition, held: LeasedSnapshot) -> None:
    """Raise ``TableError`` if records of the leased state were cut from the log, by an unclean election."""
    if held.leader_epoch >= 0 and log.divergence(held.leader_epoch, held.log_offset) is not None:
        raise _not_here(
            log, held, f"leader epoch {held.leader_epoch} is not in the log's history, those records were cut"
        )


def _not_here(log: Partition, held: LeasedSnapshot, why: str) -> TableError:
    again = "start the scan again" if held.node_id == ANY_NODE else "take a new lease"
    return TableError(
        TableCode.snapshot_not_found,
        f"the state of {log.topic}-{log.index} at offset {held.log_offset} is not here, and cannot be built "
        f"again from the log: {why}; {again}",
    )


def _discard(store: KvStore, remove: Callable[[], None]) -> None:
    with contextlib.suppress(StorageError):
        store.close()
    remove()
