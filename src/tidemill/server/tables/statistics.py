"""Statistics of tables: what TableStats and ListSnapshots answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from tidemill.coordination.turns import give_way
from tidemill.errors import ErrorCode, TidemillError
from tidemill.kv.contract import KvStore
from tidemill.kv.snapshots import BrokenSnapshot, SnapshotInfo
from tidemill.tables.scanning.service import ScanService
from tidemill.tables.scanning.sessions import BucketKey
from tidemill.tables.state.service import TableService

__all__ = ("TableStatistics", "snapshot_body")

#: Rows of a bucket are counted up to here, and estimated beyond.
_COUNTED_ROWS_MAX = 1_000
_COUNTED_BYTES_MAX = 1024 * 1024

T = TypeVar("T")


class TableStatistics:
    """Gathers statistics of buckets and snapshots, in threads where that takes long."""

    def __init__(self, service: TableService, scans: ScanService) -> None:
        self._service = service
        self._scans = scans

    async def of_buckets(self, table_name: str, named: Sequence[BucketKey] = ()) -> list[dict[str, Any]]:
        """Rows, bytes and offsets of every bucket; for one with a problem, the problem.

        Of ``named`` ones only, if there are any: raises ``ApiError`` if this node does not lead one of them.
        """
        table = self._service.named(table_name)
        found = []
        for key in self._service.chosen_keys(table, named):
            found.append(await self._bucket_stats(key, keyed=table.has_primary_key, must_lead=bool(named)))
            await give_way()
        return found

    async def _bucket_stats(self, key: BucketKey, *, keyed: bool, must_lead: bool) -> dict[str, Any]:
        stats: dict[str, Any] = {
            "partition_id": key.partition_id,
            "bucket": key.bucket,
            "snapshot_offset": -1,
        }
        try:
            log = self._service.log(key)
            stats |= {
                "log_start_offset": log.log_start_offset,
                "log_end_offset": log.high_watermark,
                "log_bytes": log.size_bytes,
                "row_count": log.high_watermark - log.log_start_offset,
                "applied_offset": -1,
            }
            if keyed:
                stats |= await self._state_stats(key)
        except TidemillError as error:
            if must_lead and error.code == ErrorCode.not_leader_or_follower:
                raise
            stats["problem"] = str(error)
        return stats

    async def _state_stats(self, key: BucketKey) -> dict[str, Any]:
        bucket = await self._service.ready_bucket(key)
        snapshots = await self._in_thread(bucket.snapshots.list)
        store = bucket.store
        return {
            "row_count": await self._in_thread(partial(_row_count, store)),
            "state_bytes": await self._in_thread(store.size_bytes),
            "applied_offset": store.applied_offset,
            "snapshot_count": len(snapshots),
            "snapshot_offset": snapshots[-1].log_offset if snapshots else -1,
            "scanner_count": self._scans.sessions.count(key),
        }

    async def of_snapshots(self, table_name: str, named: Sequence[BucketKey] = ()) -> list[dict[str, Any]]:
        """Every snapshot of a table, or of the named buckets.

        Those that do not check out come with what is wrong with them.
        """
        table = self._service.keyed(self._service.named(table_name).table_id)
        found = []
        for key in self._service.chosen_keys(table, named):
            bucket = self._service.bucket(key)
            found += [snapshot_body(key, each) for each in await self._in_thread(bucket.snapshots.list)]
            found += [
                {
                    "partition_id": key.partition_id,
                    "bucket": key.bucket,
                    "snapshot_id": -1,
                    "problem": problem,
                }
                for problem in map(_problem, await self._in_thread(bucket.snapshots.broken))
            ]
        return found

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._service.threads, work)


def _row_count(store: KvStore) -> int:
    """The number of rows: counted if they are few, else estimated.

    The engine's estimate also counts a few keys of its own and rows that were overwritten lately, which
    matters only if there are few rows.
    """
    estimate = store.count_estimate()
    if estimate > _COUNTED_ROWS_MAX:
        return estimate
    with store.view() as view:
        rows = view.read(b"", None, _COUNTED_BYTES_MAX, _COUNTED_ROWS_MAX)
    return len(rows.keys) if rows.next_start is None else max(len(rows.keys), estimate)


def _problem(broken: BrokenSnapshot) -> str:
    return f"{broken.path.name}: {broken.reason}"


def snapshot_body(key: BucketKey, info: SnapshotInfo) -> dict[str, Any]:
    """The fields of a snapshot in answers."""
    return {
        "partition_id": key.partition_id,
        "bucket": key.bucket,
        "snapshot_id": info.snapshot_id,
        "log_offset": info.log_offset,
        "created_ms": info.created_ms,
        "size_bytes": info.size_bytes,
        "problem": None,
    }
