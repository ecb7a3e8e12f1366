"""A node's way to a metadata store, which can be cut, hang, and lose answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TypeVar

from tidemill.control.stores.store import (
    ChangeBatch,
    MetadataStore,
    OutcomeUnknown,
    StoredKeys,
    StoreUnavailable,
    Txn,
)

__all__ = ("StoreProxy",)

T = TypeVar("T")


class StoreProxy:
    """A ``MetadataStore`` that passes calls on, unless a test says otherwise.

    Attributes:
        unavailable: Every call fails at once, and watches end with an error.
        deaf: Watches bring nothing; everything else is answered.
        blind: Reads of everything are not answered.
        lost_replies: That many of the next commits are done, and their answers are lost.
        lost_commits: That many of the next commits are not done, and nobody says so.
        slow_seconds_max: Calls take up to that long, on the way there.
        commits: How many were passed on.
    """

    def __init__(self, store: MetadataStore, chance: Callable[[], float] = lambda: 1.0) -> None:
        self.store = store
        self._chance = chance
        self.lost_replies = 0
        self.lost_commits = 0
        self.slow_seconds_max = 0.0
        self.commits = 0
        self.compacted: list[int] = []
        self._way = asyncio.Event()
        self._way.set()
        self._cut = asyncio.Event()
        self._hears = asyncio.Event()
        self._hears.set()
        self._sees = asyncio.Event()
        self._sees.set()

    @property
    def blind(self) -> bool:
        return not self._sees.is_set()

    @blind.setter
    def blind(self, value: bool) -> None:
        if value:
            self._sees.clear()
        else:
            self._sees.set()

    @property
    def deaf(self) -> bool:
        return not self._hears.is_set()

    @deaf.setter
    def deaf(self, value: bool) -> None:
        if value:
            self._hears.clear()
        else:
            self._hears.set()

    @property
    def unavailable(self) -> bool:
        return self._cut.is_set()

    @unavailable.setter
    def unavailable(self, value: bool) -> None:
        if value:
            self._cut.set()
        else:
            self._cut.clear()

    def hang(self) -> None:
        """From now on calls get no answer, and watches bring nothing."""
        self._way.clear()

    def go_on(self) -> None:
        """Answer again."""
        self._way.set()

    async def _pass(self) -> None:
        if self.slow_seconds_max:
            await asyncio.sleep(self.slow_seconds_max * self._chance())
        await self._way.wait()
        if self.unavailable:
            raise StoreUnavailable("the metadata store cannot be reached")

    async def read(self, prefix: str = "", *, revision: int | None = None) -> StoredKeys:
        if not prefix:
            await self._sees.wait()
        await self._pass()
        return await self.store.read(prefix, revision=revision)

    async def commit(self, txn: Txn) -> int:
        await self._pass()
        if self.lost_commits:
            self.lost_commits -= 1
            raise OutcomeUnknown("no answer to the commit")
        self.commits += 1
        revision = await self.store.commit(txn)
        if self.lost_replies:
            self.lost_replies -= 1
            raise OutcomeUnknown("no answer to the commit")
        return revision

    async def watch(self, from_revision: int) -> AsyncGenerator[ChangeBatch]:
        await self._pass()
        batches = self.store.watch(from_revision)
        try:
            while True:
                batch = await self._unless_cut(anext(batches))
                await self._hears.wait()
                await self._pass()
                yield batch
        except StopAsyncIteration:
            return
        finally:
            await batches.aclose()

    async def _unless_cut(self, call: Awaitable[T]) -> T:
        waiting = asyncio.ensure_future(call)
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait({waiting, cut}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                raise StoreUnavailable("the watch was cut")
            return waiting.result()
        finally:
            cut.cancel()
            waiting.cancel()
            await asyncio.gather(waiting, cut, return_exceptions=True)

    async def grant_lease(self, ttl_ms: int) -> int:
        await self._pass()
        return await self.store.grant_lease(ttl_ms)

    async def keep_alive(self, lease_id: int) -> None:
        await self._pass()
        await self.store.keep_alive(lease_id)

    async def revoke(self, lease_id: int) -> None:
        await self._pass()
        await self.store.revoke(lease_id)

    async def compact(self, revision: int) -> None:
        await self._pass()
        self.compacted.append(revision)

    async def close(self) -> None:
        await self.store.close()
