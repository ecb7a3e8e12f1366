"""Cursors that keep their position in a file or a database, made known to the cluster.

The cluster shows them in lists, measures their lag, pauses them, and retention sees where they stand. Their
lease says that the owner is alive. Nothing else depends on it: who owns the position, and where that is, is
known to its own store. What is shown is never ahead of what is stored: it is told once that is certain, with
the next sign of life.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping

from tidemill.client.cluster import Cluster
from tidemill.client.cursors.checkpoints.cluster import ClusterStore, ask_coordinator
from tidemill.cursors.errors import CheckpointRegionMismatch, CursorInUse
from tidemill.cursors.position import Position
from tidemill.cursors.region import Region
from tidemill.cursors.stored import Home
from tidemill.errors import TidemillError

__all__ = ("Registration",)

_ELSEWHERE = (Home.FILE, Home.DATABASE)


class Registration:
    """What the cluster knows of one cursor and its owner. ``owner`` names one that is to be known again."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        region: Region,
        *,
        take_over: bool,
        lease_ms: int,
        home: Home,
        owner: str | None = None,
    ) -> None:
        self._cluster = cluster
        self._name = name
        self._may_force = take_over
        self._store = ClusterStore(
            cluster, name, region, take_over=take_over, lease_ms=lease_ms, home=home, owner=owner
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        #: Partitions to register once the store has said that the cursor is begun anew.
        self._anew: dict[int, Position] | None = None

    @property
    def is_paused(self) -> bool:
        """Whether somebody has paused the cursor."""
        return self._store.is_paused

    async def take(self, partitions: Iterable[int]) -> None:
        """Become the owner in the eyes of the cluster, once the lease of another is over.

        Raises ``CursorInUse``.
        """
        self._loop = asyncio.get_running_loop()
        # Until the store has told where it is, anything may be unread.
        starts = dict.fromkeys(partitions, Position(0))
        try:
            await self._take(starts)
        except CursorInUse as error:
            raise CursorInUse(
                f"{error.message}. A name is one cursor in the whole cluster, wherever its position is kept",
                where=error.where,
            ) from error

    async def _take(self, starts: Mapping[int, Position]) -> None:
        try:
            await self._store.take_over(starts)
        except CheckpointRegionMismatch:
            found = await ask_coordinator(self._cluster, self._name, "DescribeCursor", {"name": self._name})
            if found.cursor.home not in _ELSEWHERE:
                raise
            if not self._may_force and any(each.lease_left_ms > 0 for each in found.cursor.partitions):
                raise CursorInUse("another process has it open", where=self._store.where) from None
            # Perhaps the position is begun anew. Until its store has said so, retention needs what is known.
            self._anew = dict(starts)

    def show(self, positions: Mapping[int, Position]) -> None:
        """Show positions that are certainly stored, with the next sign of life. From any thread."""
        self._store.show_soon(positions)

    async def show_now(self) -> None:
        """Show what there is to show, if the cluster can be told. Its store has taken the cursor over."""
        if self._anew is not None:
            # It is begun anew, in another region or elsewhere: what was known of it has an end.
            body = {"name": self._name, "force": self._may_force}
            await ask_coordinator(self._cluster, self._name, "DeleteCursor", body)
            await self._store.take_over(self._anew)
            self._anew = None
        with contextlib.suppress(TidemillError, OSError):
            await self._store.show_now()

    async def close(self) -> None:
        """Show what is left to show, and give the lease up."""
        await self._store.close()

    def close_soon(self) -> None:
        """``close`` from another thread than the client's, without waiting for it."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # The loop has ended, and the lease ends by itself.
                asyncio.run_coroutine_threadsafe(self.close(), self._loop)
