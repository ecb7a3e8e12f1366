"""The lease of a session is told to whoever may have to revoke it."""

from __future__ import annotations

import asyncio
from uuid import UUID

from support.memory_store import MemoryStore
from tidemill.control.session import Session


async def test_whoever_watches_the_process_knows_its_lease_until_it_is_revoked() -> None:
    store = MemoryStore()
    told: list[int] = []

    async def lost() -> UUID:
        return UUID(int=2)

    session = Session(store, 1, on_lost=lost, clock_ms=lambda: 0, on_lease=told.append)
    await session.start(UUID(int=1))
    assert told == [session.lease_id]
    assert session.lease_id != 0
    await session.revoke()
    assert told[-1] == session.lease_id == 0
    assert not (await store.read("alive/")).entries


async def test_a_lease_that_replaces_a_lost_one_is_told() -> None:
    store = MemoryStore()
    told: list[int] = []

    async def lost() -> UUID:
        return UUID(int=2)

    replaced = asyncio.Event()

    def tell(lease_id: int) -> None:
        told.append(lease_id)
        if lease_id and len(told) > 1:
            replaced.set()

    # A call to the store is given up after the time between renewals: not too short on a busy machine.
    session = Session(store, 1, on_lost=lost, clock_ms=lambda: 0, renew_ms=200, on_lease=tell)
    await session.start(UUID(int=1))
    first = session.lease_id
    await store.revoke(first)
    async with asyncio.timeout(120):
        await replaced.wait()
    assert told[:2] == [first, 0], "there was none for a while"
    assert session.lease_id == told[-1] not in (0, first)
    await session.revoke()
    await store.close()
