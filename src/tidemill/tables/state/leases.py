"""Leases: durable promises that snapshots of a table are kept, with the log behind them, until a time.

A lease is metadata: it survives a restart, and it ends when it is released or its time is over. Leased
snapshots can be scanned at any time until then, by anybody who knows the lease's id.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from tidemill.control.tables.commands import DropExpiredLeases, DropLease, PutLease
from tidemill.control.tables.images import LeasedSnapshot, LeaseImage
from tidemill.control.tables.rules import HOLDER_CHARACTERS_MAX
from tidemill.coordination.turns import pause_after, sorted_in_slices
from tidemill.errors import TableCode, TableError
from tidemill.kv.snapshots import SnapshotInfo
from tidemill.tables.scanning.sessions import BucketKey
from tidemill.tables.state.bucket import Bucket
from tidemill.tables.state.service import TableService
from tidemill.tables.state.snapshot_keeping import snapshots_of_one_moment

__all__ = ("Leases",)

_DURATION_MS_MAX = 30 * 24 * 3_600_000
_LOOKED_AT_PER_TURN = 1_000


class Leases:
    """The leases of a node's tables: durable promises that snapshots are kept."""

    def __init__(self, service: TableService) -> None:
        self._service = service

    async def acquire(
        self,
        table_name: str,
        lease_id: str | None,
        holder: str,
        duration_ms: int,
        *,
        fresh: bool,
        named: Sequence[BucketKey] = (),
    ) -> LeaseImage:
        """Take a lease of the newest snapshots (``fresh``: of new ones), or renew ``lease_id``.

        With ``named`` buckets, only their snapshots, which are added to ``lease_id`` if that is given: so a
        client leases a table whose buckets several nodes lead.
        """
        host = self._service.host
        if not 1 <= duration_ms <= _DURATION_MS_MAX:
            raise TableError(
                TableCode.invalid_scan_request,
                f"a lease cannot last {duration_ms} ms; from 1 ms to 30 days is possible, and it can be "
                "renewed",
            )
        expires_at_ms = host.steady_ms() + duration_ms
        if lease_id is not None and not named:
            held = self.get(lease_id)
            return await host.controller.submit(
                PutLease(lease=replace(held, expires_at_ms=expires_at_ms), renew=True)
            )
        table = self._service.keyed(self._service.named(table_name).table_id)
        keys = self._service.chosen_keys(table, named)
        kept: Counter[tuple[BucketKey, int]] = Counter()
        try:
            buckets = [await self._service.ready_bucket(key) for key in keys]
            async with contextlib.AsyncExitStack() as turns:
                for bucket in buckets:
                    # Nobody may remove the snapshot between the choice and ``keep``.
                    await turns.enter_async_context(bucket.snapshots_turn)
                chosen = await self._snapshots(buckets, fresh=fresh)
                for bucket, taken in zip(buckets, chosen, strict=True):
                    kept[bucket.key, taken.snapshot_id] += 1
                    self._service.keeper.keep(bucket.key, taken.snapshot_id)
            snapshots = [
                LeasedSnapshot(
                    bucket.key.partition_id,
                    bucket.key.bucket,
                    taken.snapshot_id,
                    taken.log_offset,
                    bucket.log.epochs.epoch_at(taken.log_offset - 1),
                    host.settings.node_id,
                )
                for bucket, taken in zip(buckets, chosen, strict=True)
            ]
            return await host.controller.submit(
                PutLease(
                    lease=LeaseImage(
                        lease_id=lease_id or host.ids.uuid().hex,
                        table_id=table.table_id,
                        holder=holder[:HOLDER_CHARACTERS_MAX],
                        expires_at_ms=expires_at_ms,
                        snapshots=tuple(snapshots),
                    ),
                    add=lease_id is not None,
                )
            )
        finally:
            for key, snapshot_id in kept:
                self._service.keeper.let_go(key, snapshot_id)

    async def _snapshots(self, buckets: Sequence[Bucket], *, fresh: bool) -> list[SnapshotInfo]:
        """The newest snapshot of each bucket; a new one where there is none, and everywhere if ``fresh``."""
        newest: dict[BucketKey, SnapshotInfo] = {}
        for bucket in () if fresh else buckets:
            found = await bucket.sound_snapshots()
            if found:
                newest[bucket.key] = found[-1]
        missing = [bucket for bucket in buckets if bucket.key not in newest]
        taken = await snapshots_of_one_moment(missing, self._service.host.moments)
        for bucket, info in zip(missing, taken, strict=True):
            newest[bucket.key] = info
            self._service.keeper.forget_floor(bucket)
        return [newest[bucket.key] for bucket in buckets]

    def get(self, lease_id: str) -> LeaseImage:
        """The lease. Raises ``TableError`` if there is none or it has expired."""
        host = self._service.host
        lease = host.image.leases.get(lease_id)
        if lease is None or lease.expires_at_ms <= host.steady_ms():
            raise TableError(
                TableCode.lease_not_found,
                f"there is no lease {lease_id!r}; it was released, or its time is over",
            )
        return lease

    async def of_table(self, table_name: str | None) -> list[LeaseImage]:
        """The leases that have not expired, of one table or of all, by lease id. Works in short turns."""
        host = self._service.host
        image, now_ms = host.image, host.steady_ms()
        if table_name is not None:
            of_table = image.leases_of(self._service.named(table_name).table_id)
        else:
            lease_ids = await sorted_in_slices(tuple(image.leases))
            of_table = tuple(image.leases[lease_id] for lease_id in lease_ids)
        return [lease for lease in of_table if lease.expires_at_ms > now_ms]

    async def release(self, lease_id: str) -> None:
        """End a lease. Raises ``TableError`` if there is none."""
        await self._prune(await self._service.host.controller.submit(DropLease(lease_id=lease_id)))

    async def expire(self) -> None:
        """Drop the leases that have expired."""
        host = self._service.host
        now_ms = host.steady_ms()
        if all(host.image.leases[lease_id].expires_at_ms > now_ms for lease_id in host.image.leases):
            return
        while ended := await host.controller.submit(DropExpiredLeases(now_ms=now_ms)):
            for lease in ended:
                await self._prune(lease)

    async def _prune(self, lease: LeaseImage) -> None:
        for number, held in enumerate(lease.snapshots, start=1):
            await pause_after(number, _LOOKED_AT_PER_TURN)
            bucket = self._service.peek(BucketKey(lease.table_id, held.partition_id, held.bucket))
            if bucket is not None:
                await self._service.keeper.prune(bucket)
