"""A node's session: a store lease that the node renews, and the key ``alive/<id>`` that is bound to it.

The lease decides who is live, for the whole cluster. The node itself may rely on it for a shorter time only:
until ``serving_until_ms``, counted from when the last answered renewal was *sent*, with a second to spare.
Until then nobody else can have taken its leaderships.

A lease that is lost is not renewed: the controller may have given everything away. The node registers as a
new incarnation, by ``on_lost``, and the session goes on with a new lease.

In a store that has lost data or was restored a lease proves nothing. There it is not renewed, not relied on,
and not ended either, because nothing may be written to that store: ``refusal`` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeVar

from tidemill.control.records import AliveRecord, alive_key, decode, encode
from tidemill.control.stores.store import Compare, OutcomeUnknown, Put, StoreClosed, StoreLeaseNotFound, Txn
from tidemill.errors import ApiError, ErrorCode, MetadataConflict, TidemillError

if TYPE_CHECKING:
    from uuid import UUID

    from tidemill.control.stores.store import MetadataStore

__all__ = ("Session", "serving_until_ms")

SERVING_MARGIN_MS: Final = 1_000
_BIND_ATTEMPTS_MAX: Final = 5

_T = TypeVar("_T")

_log = logging.getLogger(__name__)


def serving_until_ms(sent_ms: int, ttl_ms: int) -> int:
    """Until when a lease can be relied on if its last answered renewal was sent at ``sent_ms``."""
    return sent_ms + ttl_ms - SERVING_MARGIN_MS


class Session:
    """Keeps a node's store lease. ``start`` it after the node has registered, ``revoke`` it at a clean stop.

    Attributes:
        incarnation: What the node has registered as; None before the start.
        trouble: Why the last renewal failed; None if it did not.
    """

    def __init__(
        self,
        store: MetadataStore,
        node_id: int,
        *,
        on_lost: Callable[[], Awaitable[UUID]],
        clock_ms: Callable[[], int],
        ttl_ms: int = 6_000,
        renew_ms: int = 2_000,
        on_lease: Callable[[int], None] | None = None,
        refusal: Callable[[], TidemillError | None] = lambda: None,
    ) -> None:
        self._store = store
        self._node_id = node_id
        self._on_lost = on_lost
        self._clock_ms = clock_ms
        self._ttl_ms = ttl_ms
        self._renew_ms = renew_ms
        self._serving_until_ms = 0
        self._renewals: asyncio.Task[None] | None = None
        #: Called with the lease whenever it changes, so that the parent can revoke it if this process dies.
        self._on_lease = on_lease
        self._refusal = refusal
        self._lease_id = 0
        self.incarnation: UUID | None = None
        self.trouble: str | None = None

    @property
    def lease_id(self) -> int:
        """The store lease; 0 before the start and while a lost one is not replaced."""
        return self._lease_id

    @property
    def serving_until_ms(self) -> int:
        """Until when, on the session's clock, the node may trust that its leases hold; 0 if it may not."""
        return self._serving_until_ms

    async def start(self, incarnation: UUID) -> None:
        """Begin the session of a registered incarnation. Raises ``ApiError`` if another one's lives."""
        await self._begin(incarnation)
        self._renewals = asyncio.create_task(self._renew(), name="session")

    async def revoke(self) -> None:
        """End the session at once: the node is not live from here on. Not in a store that is refused."""
        await self.stop()
        if (lease_id := self._lease_id) and self._refusal() is None:
            await self._release(lease_id)
        # Afterwards: if the process dies meanwhile, its parent still knows what to revoke.
        self._hold(0)

    async def stop(self) -> None:
        """Stop the renewals. The lease ends by itself, when its time is over."""
        self._serving_until_ms = 0
        task, self._renewals = self._renewals, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _begin(self, incarnation: UUID) -> None:
        """Get a lease and bind ``alive/<id>`` to it."""
        sent_ms = self._clock_ms()
        lease_id = await self._within(self._store.grant_lease(self._ttl_ms))
        try:
            await self._bind(incarnation, lease_id)
        except BaseException:
            await self._release(lease_id)
            raise
        self._hold(lease_id)
        self.incarnation = incarnation
        self._serving_until_ms = serving_until_ms(sent_ms, self._ttl_ms)
        self.trouble = None

    def _hold(self, lease_id: int) -> None:
        self._lease_id = lease_id
        if self._on_lease is not None:
            self._on_lease(lease_id)

    async def _bind(self, incarnation: UUID, lease_id: int) -> None:
        key = alive_key(self._node_id)
        put = Put(key, encode(AliveRecord(incarnation=incarnation)), lease_id)
        for _ in range(_BIND_ATTEMPTS_MAX):
            entry = (await self._within(self._store.read(key))).entries.get(key)
            if entry is not None and decode(key, entry.value, AliveRecord).incarnation != incarnation:
                raise ApiError(
                    ErrorCode.duplicate_broker_registration,
                    f"node {self._node_id} runs already, as another process, whose session is not over",
                )
            seen = Compare(key, 0 if entry is None else entry.mod_revision)
            # After a lost answer the key is there, perhaps bound to an earlier lease: it is written again.
            with contextlib.suppress(MetadataConflict, OutcomeUnknown, TimeoutError):
                await self._within(self._store.commit(Txn(compares=(seen,), puts=(put,))))
                return
        raise OutcomeUnknown(f"it is not known whether the session of node {self._node_id} has begun")

    async def _release(self, lease_id: int) -> None:
        with contextlib.suppress(TidemillError, TimeoutError):
            await self._within(self._store.revoke(lease_id))

    async def _renew(self) -> None:
        wait_ms = self._renew_ms
        while True:
            await asyncio.sleep(wait_ms / 1_000)
            wait_ms = self._renew_ms
            if (refusal := self._refusal()) is not None:
                self._serving_until_ms = 0
                self._hold(0)
                self._note_trouble(refusal)
                return
            sent_ms = self._clock_ms()
            try:
                await self._within(self._store.keep_alive(self.lease_id))
            except StoreLeaseNotFound:
                await self._replace()
            except StoreClosed as error:
                self._note_trouble(error)
                return
            except (TidemillError, TimeoutError) as error:
                self._note_trouble(error)
                wait_ms = self._renew_ms // 4
            else:
                self._serving_until_ms = serving_until_ms(sent_ms, self._ttl_ms)
                self.trouble = None

    async def _replace(self) -> None:
        """Register anew and begin another session, however long it takes."""
        _log.warning("the session of node %d is over; it registers anew", self._node_id)
        self._serving_until_ms = 0
        self._hold(0)
        while True:
            try:
                await self._begin(await self._on_lost())
                return
            except Exception as error:  # noqa: BLE001 - without a session the node is of no use
                self._note_trouble(error)
                await asyncio.sleep(self._renew_ms / 4_000)

    def _note_trouble(self, error: Exception) -> None:
        if self.trouble is None:
            _log.warning("the session of node %d cannot be renewed: %s", self._node_id, error)
        self.trouble = str(error) or type(error).__name__

    async def _within(self, call: Awaitable[_T]) -> _T:
        """The answer of the store. A call that hangs is given up: its answer would be too old."""
        async with asyncio.timeout(self._renew_ms / 1_000):
            return await call
