"""What the stores inside this process have in common: store leases, watches and waking up.

A ``LocalStore`` is a shell around a synchronous ``Engine`` that keeps keys and history. All state of the
engine and all store leases are touched only inside ``_run``, which runs one function at a time; a subclass
decides where (inline, or on one thread so that an fsync does not hold up the event loop).

Store leases live in memory: their holders live in the same process. One ends at its deadline, noticed by the
next call and by every watch that is waiting. An engine that outlives the process deletes leased keys when
it opens.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from tidemill.control.stores.store import (
    ChangeBatch,
    MetadataWentBack,
    StoreClosed,
    StoredKeys,
    StoreLeaseNotFound,
    Txn,
    check_txn,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

__all__ = ("Engine", "LocalStore", "check_watchable", "monotonic_ms")

WATCH_BATCHES_MAX = 64
"""How many transactions a watch reads ahead of its consumer."""

Result = TypeVar("Result")


class Engine(Protocol):
    """Keys with their history. Synchronous, and used by one caller at a time."""

    def read(self, prefix: str, revision: int | None) -> StoredKeys:
        """Read keys: the rules are those of ``MetadataStore.read``."""
        ...

    def commit(self, txn: Txn) -> int:
        """Commit a transaction whose limits were checked: the rules are those of ``MetadataStore.commit``."""
        ...

    def history(self, from_revision: int, batches_max: int) -> Sequence[ChangeBatch]:
        """The oldest ``batches_max`` transactions from ``from_revision`` on: the rules are ``watch``'s."""
        ...

    def compact(self, revision: int) -> None:
        """Forget the history before ``revision``: the rules are those of ``MetadataStore.compact``."""
        ...

    def keys_of_lease(self, lease_id: int) -> Sequence[str]:
        """The keys that are bound to the store lease now."""
        ...

    def delete_keys(self, keys: Sequence[str]) -> None:
        """Delete keys in one transaction without limits: a store lease may hold any number of keys."""
        ...

    def close(self) -> None:
        """Release files and memory."""
        ...


@dataclass(slots=True)
class _Lease:
    ttl_ms: int
    deadline_ms: int


def monotonic_ms() -> int:
    """Milliseconds of a clock that never goes back."""
    return time.monotonic_ns() // 1_000_000


def check_watchable(from_revision: int, newest: int) -> None:
    """Raise ``MetadataWentBack`` if the revision before ``from_revision`` was seen and is not there."""
    if from_revision > newest + 1:
        raise MetadataWentBack(
            f"a watch asked for metadata revision {from_revision}, and the newest is {newest}"
        )


class LocalStore:
    """A ``MetadataStore`` over an ``Engine``. Belongs to one event loop at a time.

    The contract of each method is ``MetadataStore``'s.
    """

    def __init__(self, engine: Engine, clock_ms: Callable[[], int] = monotonic_ms) -> None:
        self._engine = engine
        self._clock_ms = clock_ms
        self._leases: dict[int, _Lease] = {}
        self._last_lease_id = 0
        self._closed = False
        self._changed = asyncio.Event()
        self._news = False

    async def read(self, prefix: str = "", *, revision: int | None = None) -> StoredKeys:
        """All keys under ``prefix``, now or as of ``revision``."""
        return await self._run(lambda: self._engine.read(prefix, revision))

    async def commit(self, txn: Txn) -> int:
        """Commit and return the revision."""
        check_txn(txn)

        def commit() -> int:
            for put in txn.puts:
                if put.lease_id:
                    self._lease(put.lease_id)
            revision = self._engine.commit(txn)
            self._news = True
            return revision

        return await self._run(commit)

    async def watch(self, from_revision: int) -> AsyncGenerator[ChangeBatch]:
        """Every transaction from ``from_revision`` on."""
        next_revision = max(from_revision, 1)
        while not self._closed:
            # Taken before the read, so that a commit between the read and the wait is not missed.
            changed = self._changed
            try:
                batches = await self._run(partial(self._engine.history, next_revision, WATCH_BATCHES_MAX))
            except StoreClosed:
                return
            for batch in batches:
                yield batch
                next_revision = batch.revision + 1
            if not batches:
                await self._wait(changed)

    async def compact(self, revision: int) -> None:
        """Forget the history before ``revision``."""
        await self._run(lambda: self._engine.compact(revision))

    async def grant_lease(self, ttl_ms: int) -> int:
        """Grant a new store lease."""
        if ttl_ms <= 0:
            raise ValueError(f"a lease of {ttl_ms} ms would be over before it began; ask for at least 1 ms")

        def grant() -> int:
            self._last_lease_id += 1
            self._leases[self._last_lease_id] = _Lease(ttl_ms, self._clock_ms() + ttl_ms)
            return self._last_lease_id

        return await self._run(grant)

    async def keep_alive(self, lease_id: int) -> None:
        """Renew the store lease for its time to live."""

        def keep_alive() -> None:
            lease = self._lease(lease_id)
            lease.deadline_ms = self._clock_ms() + lease.ttl_ms

        await self._run(keep_alive)

    async def revoke(self, lease_id: int) -> None:
        """End the store lease and delete its keys."""

        def revoke() -> None:
            self._lease(lease_id)
            self._end_lease(lease_id)

        await self._run(revoke)

    async def close(self) -> None:
        """Release everything and end the watches."""
        if self._closed:
            return
        await self._run(self._close)

    def _close(self) -> None:
        self._closed = True
        self._news = True
        self._engine.close()

    async def _run(self, work: Callable[[], Result]) -> Result:
        """Run ``work`` alone, after ending store leases past their deadline; then wake the watches."""
        try:
            return self._guarded(work)
        finally:
            self._announce_news()

    def _guarded(self, work: Callable[[], Result]) -> Result:
        if self._closed:
            raise StoreClosed("the metadata store is closed; open it again")
        now_ms = self._clock_ms()
        for lease_id in [i for i, lease in self._leases.items() if lease.deadline_ms <= now_ms]:
            self._end_lease(lease_id)
        return work()

    def _lease(self, lease_id: int) -> _Lease:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise StoreLeaseNotFound(f"lease {lease_id} has expired or was revoked; grant a new one")
        return lease

    def _end_lease(self, lease_id: int) -> None:
        # Keys first: if deleting fails, the store lease stays and is ended by the next call.
        self._engine.delete_keys(self._engine.keys_of_lease(lease_id))
        del self._leases[lease_id]
        self._news = True

    def _announce_news(self) -> None:
        if self._news:
            self._news = False
            self._changed.set()
            self._changed = asyncio.Event()

    async def _wait(self, changed: asyncio.Event) -> None:
        """Wait until something may have changed or the next store lease ends."""
        deadlines_ms = [lease.deadline_ms for lease in list(self._leases.values())]
        timeout_s = max(0, min(deadlines_ms) - self._clock_ms()) / 1000 if deadlines_ms else None
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return
