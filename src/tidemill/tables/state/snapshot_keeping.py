"""Retention of snapshots: which snapshots of buckets are kept, and which part of their logs with them.

- The newest few stay, the leased ones, and those that somebody reads or is about to lease (``keep``).
- A log whose state is kept here is needed from its oldest snapshot on: that is its floor. It is found by
  listing the snapshots, in a thread; until that was done all of the log is needed. A floor only ever rises,
  so an old one does no harm.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Executor
from functools import partial
from uuid import UUID

from tidemill.control.image import MetadataImage
from tidemill.coordination.moments import MomentGate
from tidemill.errors import StorageError
from tidemill.kv.snapshots import SnapshotInfo, SnapshotStore
from tidemill.log.compaction.policy import NO_FLOOR
from tidemill.tables.properties import TableProperties
from tidemill.tables.scanning.sessions import BucketKey
from tidemill.tables.state.bucket import Bucket

__all__ = ("SnapshotKeeper", "is_snapshot_due", "snapshots_of_one_moment")

logger = logging.getLogger(__name__)

_BucketLog = tuple[UUID, int]


class SnapshotKeeper:
    """Decides which snapshots are kept, and from which offset on logs are needed. Runs on the event loop."""

    def __init__(
        self,
        image: Callable[[], MetadataImage],
        snapshots: Callable[[UUID, int], SnapshotStore],
        threads: Executor,
        newest_kept: int,
    ) -> None:
        self._image = image
        self._snapshots = snapshots
        self._threads = threads
        self._newest_kept = newest_kept
        self._floors: dict[_BucketLog, int] = {}
        self._listings: dict[_BucketLog, asyncio.Task[None]] = {}
        self._kept: Counter[tuple[BucketKey, int]] = Counter()
        #: Buckets with snapshots that were kept for a reader and may not be needed any more.
        self._let_go: set[BucketKey] = set()

    def keep(self, key: BucketKey, snapshot_id: int) -> None:
        """Keep a snapshot until ``let_go``. Hold ``snapshots_turn`` to choose one and keep it."""
        self._kept[key, snapshot_id] += 1

    def let_go(self, key: BucketKey, snapshot_id: int) -> None:
        self._kept[key, snapshot_id] -= 1
        if not self._kept[key, snapshot_id]:
            del self._kept[key, snapshot_id]
            self._let_go.add(key)

    def look_again(self, key: BucketKey) -> None:
        """Have the bucket pruned before long: a lease of it is over."""
        self._let_go.add(key)

    def take_let_go(self) -> set[BucketKey]:
        """The buckets that should be pruned; each is given once."""
        taken, self._let_go = self._let_go, set()
        return taken

    async def prune(self, bucket: Bucket) -> None:
        """Remove the snapshots that nobody needs."""
        async with bucket.snapshots_turn:
            leased = frozenset(self._leased_offsets(bucket.key))
            needed = {snapshot_id for key, snapshot_id in self._kept if key == bucket.key}
            work = partial(_prune, bucket.snapshots, self._newest_kept, needed, leased)
            floor = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._floors[bucket.log.topic_id, bucket.log.index] = floor

    def _leased_offsets(self, key: BucketKey) -> tuple[int, ...]:
        """The offsets of a bucket's leased snapshots, sorted, whichever node took them."""
        return self._image().catalog.leased_offsets_of(key.table_id, key.partition_id, key.bucket)

    # --- floors

    def floor(self, topic_id: UUID, index: int) -> int:
        """The offset from which on the state may need every record of the log again.

        Leases count on every replica: one that has no such snapshot builds the state again from its log.
        """
        owner = self._image().table_of_topic(topic_id)
        if owner is not None and not owner[0].primary_key:
            return NO_FLOOR
        leased = NO_FLOOR
        if owner is not None:
            leased = self.leased_floor(BucketKey(owner[0].id, owner[1].id, index))
        log = topic_id, index
        if log not in self._floors and log not in self._listings:
            self._listings[log] = asyncio.get_running_loop().create_task(self._list(log))
        return min(self._floors.get(log, 0), leased)

    def leased_floor(self, key: BucketKey) -> int:
        """The oldest leased offset of a bucket: from there on every replica keeps every record."""
        return next(iter(self._leased_offsets(key)), NO_FLOOR)

    async def _list(self, log: _BucketLog) -> None:
        try:
            work = partial(_floor, self._snapshots(*log))
            floor = await asyncio.get_running_loop().run_in_executor(self._threads, work)
            if self._image().topic_by_id(log[0]) is not None:
                self._floors[log] = floor
        except (StorageError, RuntimeError) as error:
            logger.warning("all of the log is kept for now: %s", error)
        finally:
            del self._listings[log]

    def forget(self, topic_id: UUID) -> None:
        """Forget the floors of a topic that is gone."""
        for log in [log for log in self._floors if log[0] == topic_id]:
            del self._floors[log]

    def forget_floor(self, bucket: Bucket) -> None:
        """Forget the bucket's floor, after a snapshot was taken without ``prune``."""
        self._floors.pop((bucket.log.topic_id, bucket.log.index), None)

    async def close(self) -> None:
        """Wait for listings that are under way."""
        if self._listings:
            await asyncio.wait(self._listings.values())


async def snapshots_of_one_moment(buckets: Sequence[Bucket], moments: MomentGate) -> list[SnapshotInfo]:
    """Take a snapshot of each bucket, all at one moment: no transaction over several is half visible.

    When this returns, also with an error, none is under way any more.
    """
    wanted: list[asyncio.Future[SnapshotInfo]] = []
    try:
        async with moments.moment():
            for bucket in buckets:
                wanted.append(bucket.snapshot())  # noqa: PERF401 - if one refuses, the others are waited for
    finally:
        results = await asyncio.gather(*wanted, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [future.result() for future in wanted]


def is_snapshot_due(bucket: Bucket, properties: TableProperties, now_ms: int) -> bool:
    """Whether a snapshot is due by time or by growth of the log. ``now_ms`` is the steady time."""
    if bucket.problem is not None or not 0 <= bucket.folded_offset <= bucket.log.last_stable_offset:
        return False
    newest = bucket.snapshots.newest_offset
    if newest is not None and bucket.folded_offset <= newest:
        return False
    grown_bytes = bucket.log.size_bytes - bucket.log_bytes_at_snapshot
    return (
        now_ms - bucket.last_snapshot_ms >= properties.snapshot_interval_ms
        or grown_bytes >= properties.snapshot_log_bytes
        or grown_bytes < 0
    )


def _prune(
    snapshots: SnapshotStore, keep: int, needed: Iterable[int], leased_offsets: Collection[int]
) -> int:
    leased = (info.snapshot_id for info in snapshots.list() if info.log_offset in leased_offsets)
    snapshots.prune(keep, frozenset([*needed, *leased]))
    return _floor(snapshots)


def _floor(snapshots: SnapshotStore) -> int:
    return min((snapshot.log_offset for snapshot in snapshots.list()), default=0)
