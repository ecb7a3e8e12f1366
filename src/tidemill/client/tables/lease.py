"""A lease of a table's snapshots while a block lasts."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

from tidemill.client.tables.requests import ask_controller
from tidemill.client.tables.values import Lease, lease_from
from tidemill.errors import TidemillError

if TYPE_CHECKING:
    from tidemill.client.tables.table import AsyncTable

__all__ = ("AsyncLease",)


class AsyncLease:
    """A lease while an ``async with`` block lasts. ``lease_id`` is there inside."""

    def __init__(self, table: AsyncTable, *, duration_ms: int, holder: str, fresh: bool) -> None:
        self._table = table
        self._duration_ms = duration_ms
        self._holder = holder
        self._fresh = fresh
        self._lease: Lease | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def lease_id(self) -> str:
        assert self._lease is not None, "the lease is not acquired"
        return self._lease.lease_id

    @property
    def log_offsets(self) -> Mapping[tuple[str, int], int]:
        """Where changes go on behind the snapshots, by topic and bucket."""
        assert self._lease is not None, "the lease is not acquired"
        return self._lease.log_offsets

    async def acquire(self) -> Lease:
        """Begin the lease without a block: the caller renews and releases it."""
        self._lease = await self._acquire(None)
        return self._lease

    async def renew(self) -> Lease:
        """Make it last for its whole duration from now on."""
        self._lease = await self._acquire(self.lease_id)
        return self._lease

    async def release(self) -> None:
        """End it."""
        await ask_controller(
            self._table.cluster, "ReleaseLease", {"lease_id": self.lease_id}, "releasing a lease"
        )

    async def _acquire(self, lease_id: str | None) -> Lease:
        body = {
            "table": self._table.name,
            "lease_id": lease_id,
            "holder": self._holder or f"client {secrets.token_hex(4)}",
            "duration_ms": self._duration_ms,
            "fresh": self._fresh,
        }
        what = f"leasing snapshots of table {self._table.name!r}"
        response = await ask_controller(self._table.cluster, "AcquireLease", body, what)
        known = self._table.definition.partition
        if any(known(each.partition_id) is None for each in response.lease.snapshots):
            await self._table.renew()
        return lease_from(response.lease, self._table.definition)

    async def __aenter__(self) -> AsyncLease:
        await self.acquire()
        self._keeper = asyncio.get_running_loop().create_task(self._keep())
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._keeper is not None
        self._keeper.cancel()
        # It ends by itself if it cannot be released.
        with contextlib.suppress(TidemillError):
            await self.release()

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._duration_ms / 3000)
            # Tried again in time: it takes more than one failure to lose a lease.
            with contextlib.suppress(TidemillError):
                await self.renew()
