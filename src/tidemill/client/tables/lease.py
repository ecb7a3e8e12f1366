"""A lease of a table's snapshots while a block lasts."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidemill.client.keeping import keep_alive
from tidemill.client.process_bound import Unpicklable, opening_of_table
from tidemill.client.tables.leaders import PURPOSE, buckets_by_leader
from tidemill.client.tables.requests import ask_controller
from tidemill.client.tables.values import Lease, lease_from
from tidemill.errors import TableCode, TableError, TidemillError
from tidemill.net.answers import checked

if TYPE_CHECKING:
    from tidemill.client.tables.table import AsyncTable

__all__ = ("AsyncLease",)

#: Snapshots of all buckets of a node are taken, one after the other.
_ACQUIRE_MS: Final = 600_000


class AsyncLease(Unpicklable):
    """A lease that lasts as long as an ``async with`` block, inside which it has its ``lease_id``."""

    def __init__(self, table: AsyncTable, *, duration_ms: int, holder: str, fresh: bool) -> None:
        self._table = table
        self._duration_ms = duration_ms
        self._holder = holder
        self._fresh = fresh
        self._lease: Lease | None = None
        self._released = False
        self._keeper: asyncio.Task[None] | None = None

    @property
    def lease_id(self) -> str:
        """The id of the lease. Other processes can use it, too: ``table.scan(lease=lease_id)``."""
        return self._acquired.lease_id

    @property
    def log_offsets(self) -> Mapping[tuple[str, int], int]:
        """The log offset of each leased snapshot, by topic and bucket: later changes start there."""
        return self._acquired.log_offsets

    @property
    def _acquired(self) -> Lease:
        if self._lease is None:
            raise TableError(
                TableCode.lease_not_found,
                f"this lease of table {self._table.name!r} has not begun: use it in a with statement, or "
                "call acquire()",
            )
        return self._lease

    def __repr__(self) -> str:
        if self._lease is None:
            return f"<lease of {self._table.name}: not acquired>"
        lease, state = self._lease, "released"
        if not self._released:
            expires = datetime.fromtimestamp(lease.expires_at_ms / 1000, UTC)
            state = f"until {expires:%Y-%m-%d %H:%M:%S} UTC unless renewed"
        return f"<lease {lease.lease_id} of {lease.table}, held by {lease.holder!r}: {state}>"

    def _instead_of_a_pickle(self) -> str:
        opening = opening_of_table(self._table.cluster.servers, self._table.name)
        return f"Send its lease_id, and scan there: {opening}.scan(lease=lease_id)"

    async def acquire(self) -> Lease:
        """Begin the lease without a block: the caller renews and releases it."""
        self._lease, self._released = await self._acquire(None), False
        return self._lease

    async def renew(self) -> Lease:
        """Renew the lease: it lasts for its whole duration from now on."""
        self._lease = await self._acquire(self.lease_id)
        return self._lease

    async def release(self) -> None:
        """End the lease: its snapshots may be removed."""
        await ask_controller(
            self._table.cluster, "ReleaseLease", {"lease_id": self.lease_id}, "releasing a lease"
        )
        self._released = True

    async def _acquire(self, lease_id: str | None) -> Lease:
        body = {
            "table": self._table.name,
            "lease_id": lease_id,
            "holder": self._holder or f"client {secrets.token_hex(4)}",
            "duration_ms": self._duration_ms,
            "fresh": self._fresh,
        }
        what = f"leasing snapshots of table {self._table.name!r}"
        if lease_id is None:
            response = await self._table.cluster.retrying(partial(self._acquire_once, body, what))
        else:
            response = await ask_controller(self._table.cluster, "AcquireLease", body, what)
        known = self._table.definition.partition
        if any(known(each.partition_id) is None for each in response.lease.snapshots):
            await self._table.renew()
        return lease_from(response.lease, self._table.definition)

    async def _acquire_once(self, body: Mapping[str, Any], what: str) -> Any:
        """Take the lease: each node that leads buckets adds its snapshots to what the one before has begun.

        If one fails, the lease is released, and may be taken again from the beginning.
        """
        cluster, response, lease_id = self._table.cluster, None, None
        by_leader = await buckets_by_leader(cluster, self._table.definition)
        try:
            for leader, buckets in sorted(by_leader.items()):
                connection = await cluster.connection(leader, purpose=PURPOSE)
                named = {"lease_id": lease_id} | ({"buckets": buckets} if buckets else {})
                answer = await connection.request("AcquireLease", {**body, **named}, timeout_ms=_ACQUIRE_MS)
                response = checked(answer, what)
                lease_id = response.lease.lease_id
        except TidemillError:
            if lease_id is not None:
                # One that cannot be released expires.
                with contextlib.suppress(TidemillError):
                    await ask_controller(cluster, "ReleaseLease", {"lease_id": lease_id}, what)
            raise
        return response

    async def __aenter__(self) -> AsyncLease:
        await self.acquire()
        self._keeper = asyncio.get_running_loop().create_task(
            keep_alive(self._duration_ms / 3000, self.renew)
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._keeper is not None
        self._keeper.cancel()
        # A lease that cannot be released expires.
        with contextlib.suppress(TidemillError):
            await self.release()
