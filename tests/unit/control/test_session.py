from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from uuid import UUID

import pytest

from support.memory_store import MemoryStore
from support.store_proxy import StoreProxy
from support.virtual_loop import run_virtual
from tidemill.control.records import AliveRecord, alive_key, decode
from tidemill.control.session import Session
from tidemill.control.stores.store import MetadataWentBack
from tidemill.errors import ApiError, ErrorCode

FIRST, SECOND = UUID(int=1), UUID(int=2)


def now_ms() -> int:
    return round(asyncio.get_running_loop().time() * 1_000)


class Node:
    """A node of number 7, as far as its session goes."""

    def __init__(self, proxy: StoreProxy) -> None:
        self.proxy = proxy
        self.lost = 0
        self.went_back: MetadataWentBack | None = None
        self.told: list[int] = []
        self.session = Session(
            proxy,
            7,
            on_lost=self.register,
            clock_ms=now_ms,
            on_lease=self.told.append,
            refusal=lambda: self.went_back,
        )

    async def register(self) -> UUID:
        self.lost += 1
        return SECOND

    async def alive(self) -> UUID | None:
        """What the others see."""
        key = alive_key(7)
        entry = (await self.proxy.store.read(key)).entries.get(key)
        return None if entry is None else decode(key, entry.value, AliveRecord).incarnation


def story(tell: Callable[[Node], Awaitable[None]]) -> None:
    """Run a story in virtual time."""

    async def main() -> None:
        node = Node(StoreProxy(MemoryStore(clock_ms=now_ms)))
        await tell(node)
        await node.session.stop()

    run_virtual(main, seed=1)


def test_a_session_is_renewed_for_as_long_as_the_node_runs() -> None:
    async def tell(node: Node) -> None:
        await node.session.start(FIRST)
        assert node.session.serving_until_ms == now_ms() + 5_000
        for _ in range(20):
            await asyncio.sleep(3)
            assert await node.alive() == FIRST
            assert node.session.serving_until_ms >= now_ms() + 3_000
        assert node.lost == 0

    story(tell)


def test_a_lease_in_a_store_that_went_back_is_neither_renewed_nor_relied_on() -> None:
    async def tell(node: Node) -> None:
        await node.session.start(FIRST)
        node.went_back = MetadataWentBack("noticed")
        await asyncio.sleep(3)
        assert node.session.serving_until_ms == 0
        assert node.session.trouble is not None
        assert "noticed" in node.session.trouble
        assert node.told[-1] == 0, "if the process dies now, nobody ends the lease"
        await asyncio.sleep(6)
        assert await node.alive() is None
        assert node.lost == 0, "it does not register either"

    story(tell)


def test_a_lease_in_a_store_that_went_back_is_not_ended_by_anybody() -> None:
    async def tell(node: Node) -> None:
        await node.session.start(FIRST)
        node.went_back = MetadataWentBack("noticed")
        await node.session.revoke()
        assert await node.alive() == FIRST, "a restored store is not written to"
        assert node.told[-1] == 0, "neither does the process that looks after this one"

    story(tell)


def test_a_session_that_is_revoked_is_over_at_once() -> None:
    async def tell(node: Node) -> None:
        await node.session.start(FIRST)
        await node.session.revoke()
        assert await node.alive() is None
        assert (node.session.serving_until_ms, node.session.lease_id) == (0, 0)

    story(tell)


def test_a_node_may_not_rely_on_its_session_longer_than_the_lease_can_live() -> None:
    async def tell(node: Node) -> None:
        await node.session.start(FIRST)
        await asyncio.sleep(5)
        node.proxy.hang()
        until_ms = node.session.serving_until_ms
        # The last answered renewal was sent a second ago.
        assert until_ms == 4_000 + 5_000
        changes = node.proxy.store.watch((await node.proxy.store.read()).revision + 1)
        await anext(changes)
        await changes.aclose()
        assert await node.alive() is None
        assert now_ms() >= until_ms + 1_000
        assert node.session.serving_until_ms == until_ms
        assert node.session.trouble is not None

    story(tell)


def test_time_counts_from_the_sending_of_a_renewal_not_from_its_answer() -> None:
    async def tell(node: Node) -> None:
        await node.session.start(FIRST)
        await asyncio.sleep(1.5)
        node.proxy.hang()
        await asyncio.sleep(1.5)
        node.proxy.go_on()
        await asyncio.sleep(0.1)
        assert node.session.serving_until_ms == 2_000 + 5_000

    story(tell)


def test_short_trouble_with_the_store_does_not_end_a_session() -> None:
    async def tell(node: Node) -> None:
        await node.session.start(FIRST)
        await asyncio.sleep(2.5)
        node.proxy.unavailable = True
        await asyncio.sleep(3)
        troubles = [node.session.trouble is not None]
        node.proxy.unavailable = False
        await asyncio.sleep(1)
        troubles.append(node.session.trouble is not None)
        assert troubles == [True, False]
        assert await node.alive() == FIRST
        assert node.lost == 0

    story(tell)


def test_a_lost_session_registers_anew_and_goes_on_as_another_incarnation() -> None:
    async def tell(node: Node) -> None:
        await node.session.start(FIRST)
        old_lease = node.session.lease_id
        node.proxy.unavailable = True
        await asyncio.sleep(20)
        assert await node.alive() is None
        node.proxy.unavailable = False
        await asyncio.sleep(1)
        assert await node.alive() == SECOND
        assert (node.lost, node.session.incarnation) == (1, SECOND)
        assert node.session.lease_id not in (0, old_lease)
        assert node.session.serving_until_ms > now_ms()
        await asyncio.sleep(30)
        assert await node.alive() == SECOND

    story(tell)


def test_a_registration_that_fails_is_tried_again() -> None:
    async def tell(node: Node) -> None:
        failures = 3

        async def register() -> UUID:
            nonlocal failures
            failures -= 1
            if failures:
                raise ApiError(ErrorCode.duplicate_broker_registration, "not yet")
            return SECOND

        node.session._on_lost = register
        await node.session.start(FIRST)
        await node.proxy.store.revoke(node.session.lease_id)
        await asyncio.sleep(10)
        assert await node.alive() == SECOND

    story(tell)


def test_a_second_process_of_the_same_node_gets_no_session() -> None:
    async def tell(node: Node) -> None:
        await node.session.start(FIRST)
        other = Node(node.proxy)
        with pytest.raises(ApiError) as caught:
            await other.session.start(SECOND)
        assert caught.value.code is ErrorCode.duplicate_broker_registration
        assert await node.alive() == FIRST

    story(tell)


@pytest.mark.parametrize("field", ["lost_replies", "lost_commits"])
def test_a_session_begins_also_if_the_answer_is_lost(field: str) -> None:
    async def tell(node: Node) -> None:
        setattr(node.proxy, field, 2)
        await node.session.start(FIRST)
        await asyncio.sleep(30)
        assert await node.alive() == FIRST

    story(tell)


def test_a_session_that_did_not_begin_leaves_nothing_behind() -> None:
    async def tell(node: Node) -> None:
        node.proxy.lost_replies = 100
        with pytest.raises(Exception, match="not known"):
            await node.session.start(FIRST)
        assert await node.alive() is None

    story(tell)
