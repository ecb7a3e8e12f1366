"""The persister over several nodes: it finds the coordinator and follows it; silence is never a no."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from operator import methodcaller
from typing import Any

import pytest

from support.product_cluster import ProductCluster
from support.virtual_loop import run_virtual
from tidemill.coordination.share_state import (
    NO_START,
    DeliveryState,
    LogPosition,
    SharePartitionKey,
    ShareState,
    StateBatch,
)
from tidemill.errors import ApiError, ErrorCode, NodeUnavailable
from tidemill.server.coordinators.persister import NodePersister, Transaction
from tidemill.server.coordinators.share_state import SHARE_STATE
from tidemill.server.coordinators.transactions import TRANSACTIONS

Story = Callable[["World"], Awaitable[None]]


class World:
    """Three nodes, a share partition, and the node that does not coordinate it."""

    def __init__(self, cluster: ProductCluster) -> None:
        self.cluster = cluster
        topic = cluster.broker(cluster.some_id).image.topics["t"]
        self.key = SharePartitionKey("g", topic.id, 0)
        self.asker = -1

    async def begin(self) -> None:
        cluster = self.cluster
        await self.on(1, lambda persister: persister.initialize(self.key, 1, 0))
        await self.read(1)
        await cluster.until(lambda: self.coordinator != -1)
        self.asker = next(node_id for node_id in cluster.nodes if node_id != self.coordinator)

    @property
    def coordinator(self) -> int:
        return self.cluster.leader(SHARE_STATE.topic)

    async def on(self, node_id: int, call: Callable[[NodePersister], Awaitable[Any]]) -> Any:
        """Call the persister of a node, in its process."""
        return await self.cluster.run(node_id, call(self.cluster.broker(node_id).persister))

    async def write(self, *offsets: int, node_id: int | None = None) -> None:
        batches = [done(offset) for offset in offsets]
        await self.on(
            self.asker if node_id is None else node_id,
            lambda persister: persister.write_state(self.key, 1, 0, NO_START, 0, batches),
        )

    async def read(self, node_id: int | None = None, leader_epoch: int = 0) -> ShareState:
        state = await self.on(
            self.asker if node_id is None else node_id,
            lambda persister: persister.read_state(self.key, leader_epoch),
        )
        assert isinstance(state, ShareState)
        return state

    def intercept(self, before: Callable[[int, str, Mapping[str, Any]], Awaitable[None]]) -> list[str]:
        """Call ``before`` with each request of the asker to another node; gives the APIs asked for."""
        asked: list[str] = []
        broker = self.cluster.broker(self.asker)
        ask = broker.ask_node

        async def intercepted(node_id: int, api: str, version: int, body: Mapping[str, Any]) -> Any:
            asked.append(api)
            await before(node_id, api, body)
            return await ask(node_id, api, version, body)

        broker.ask_node = intercepted
        return asked


def done(offset: int) -> StateBatch:
    # One apart from the next, so that they are not joined.
    return StateBatch(2 * offset, 2 * offset, DeliveryState.ACKNOWLEDGED, 1, reason=f"r{offset}")


def on_three_nodes(story: Story) -> Callable[[], None]:
    """Run a test on the virtual loop."""

    @functools.wraps(story)
    def test() -> None:
        async def main() -> None:
            async with ProductCluster(3) as cluster:
                await cluster.create("t")
                world = World(cluster)
                await world.begin()
                await story(world)

        run_virtual(main, seed=1)

    del test.__wrapped__
    return test


@on_three_nodes
async def test_every_call_reaches_the_coordinator_from_any_node(world: World) -> None:
    for node_id in world.cluster.nodes:
        await world.write(node_id, node_id=node_id)
        state = await world.read(node_id)
        assert state.batches[-1] == done(node_id), "also what Kafka has no field for"
        summary = await world.on(node_id, lambda persister: persister.read_summary(world.key, -1))
        assert summary[:3] == (1, 0, 0)
    await world.on(world.asker, lambda persister: persister.delete(world.key))
    for node_id in world.cluster.nodes:
        with pytest.raises(ApiError) as caught:
            await world.read(node_id)
        assert caught.value.code is ErrorCode.invalid_request


@on_three_nodes
async def test_the_state_moves_with_the_leadership(world: World) -> None:
    await world.write(1)
    await world.read(leader_epoch=4)
    await world.cluster.move(SHARE_STATE.topic)
    for node_id in world.cluster.nodes:
        assert (await world.read(node_id, leader_epoch=4)).batches == (done(1),)
        with pytest.raises(ApiError) as caught:
            await world.read(node_id, leader_epoch=3)
        assert caught.value.code is ErrorCode.fenced_leader_epoch
    await world.cluster.kill(world.coordinator)
    await world.cluster.until(lambda: world.coordinator != -1)
    assert (await world.read(world.cluster.some_id, leader_epoch=4)).batches == (done(1),)


@on_three_nodes
async def test_a_node_that_does_not_answer_is_asked_again_and_then_it_is_an_error_and_not_an_empty_state(
    world: World,
) -> None:
    await world.write(1)
    failures = 3

    async def fail(node_id: int, api: str, body: Mapping[str, Any]) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise NodeUnavailable("the connection broke")

    asked = world.intercept(fail)
    assert (await world.read()).batches == (done(1),)
    assert asked == ["ReadShareGroupState"] * 4
    failures = 100
    with pytest.raises(ApiError) as caught:
        await world.read()
    assert caught.value.code.retriable
    assert len(asked) == 9, "five attempts"


@on_three_nodes
async def test_an_answer_that_leaves_a_partition_out_is_an_unknown_outcome(world: World) -> None:
    broker = world.cluster.broker(world.asker)
    ask, asked = broker.ask_node, 0

    class Empty:
        results = ()

    async def nothing(node_id: int, api: str, version: int, body: Mapping[str, Any]) -> Any:
        nonlocal asked
        asked += 1
        await ask(node_id, api, version, body)
        return Empty

    broker.ask_node = nothing
    with pytest.raises(ApiError, match="said nothing") as caught:
        await world.write(1)
    # Whoever wrote reads the state again after such an error, and finds that it was carried out.
    assert (caught.value.retriable, asked) == (True, 5)
    with pytest.raises(ApiError, match="said nothing"):
        await world.read()
    broker.ask_node = ask
    assert (await world.read()).batches == (done(1),)


@on_three_nodes
async def test_calls_that_wait_for_a_node_go_there_together(world: World) -> None:
    topic = world.cluster.broker(1).image.topics["t"]
    keys = [SharePartitionKey(f"g{group}", topic.id, index) for group in range(2) for index in range(3)]
    bodies: list[Mapping[str, Any]] = []

    async def note(node_id: int, api: str, body: Mapping[str, Any]) -> None:
        bodies.append(body)

    world.intercept(note)

    async def initialize_all(persister: NodePersister) -> None:
        await asyncio.gather(*(persister.initialize(key, 1, 5) for key in keys))

    await world.on(world.asker, initialize_all)
    assert len(bodies) <= 3, "one for each group, and what came before the rest was there"
    for key in keys:
        state = await world.on(world.asker, methodcaller("read_state", key, 0))
        assert state.start_offset == 5


@on_three_nodes
async def test_writes_of_one_share_partition_keep_their_order_when_one_is_tried_again(world: World) -> None:
    """The first attempt of the first write fails; a later write must not be overtaken by the second."""
    failed = False

    async def fail_once(node_id: int, api: str, body: Mapping[str, Any]) -> None:
        nonlocal failed
        if not failed:
            failed = True
            raise NodeUnavailable("the connection broke")

    asked = world.intercept(fail_once)

    async def write_all(persister: NodePersister) -> None:
        await asyncio.gather(
            *(
                persister.write_state(
                    world.key, 1, 0, NO_START, 0, [StateBatch(0, 0, DeliveryState.AVAILABLE, count)]
                )
                for count in range(1, 6)
            )
        )

    await world.on(world.asker, write_all)
    assert (await world.read()).batches == (StateBatch(0, 0, DeliveryState.AVAILABLE, 5),)
    assert asked.count("WriteShareGroupState") == 3, "the first twice, and the others as one"


@on_three_nodes
async def test_the_epochs_that_the_first_of_joined_writes_names_reach_the_coordinator(world: World) -> None:
    async def write_all(persister: NodePersister) -> None:
        positions = [LogPosition(1, 0), LogPosition(2, 0, b"epochs"), LogPosition(3, 0)]
        await asyncio.gather(
            *(
                persister.write_state(world.key, 1, 0, NO_START, 0, [done(position.offset)], position)
                for position in positions
            )
        )

    asked = world.intercept(lambda *_: asyncio.sleep(0))
    await world.on(world.asker, write_all)
    assert asked.count("WriteShareGroupState") == 2, "the second and the third as one"
    state = await world.on(world.asker, lambda persister: persister.read_state(world.key, 0))
    assert state.log_position == LogPosition(3, 0, b"epochs")


@on_three_nodes
async def test_a_write_that_is_refused_fails_for_all_that_went_with_it(world: World) -> None:
    async def write_all(persister: NodePersister) -> list[Any]:
        return await asyncio.gather(
            *(persister.write_state(world.key, 0, 0, NO_START, 0, [done(number)]) for number in range(3)),
            persister.write_state(world.key, 1, 0, NO_START, 0, [done(9)]),
            return_exceptions=True,
        )

    *refused, written = await world.on(world.asker, write_all)
    assert {each.code for each in refused} == {ErrorCode.fenced_state_epoch}
    assert written is None
    assert (await world.read()).batches == (done(9),)


@on_three_nodes
async def test_a_write_in_a_transaction_counts_when_it_commits_whoever_coordinates_what(world: World) -> None:
    cluster = world.cluster
    await cluster.ask(1, "FindCoordinator", 4, key_type=1, coordinator_keys=["x"])
    await cluster.until(lambda: cluster.leader(TRANSACTIONS.topic) != -1)
    while cluster.leader(TRANSACTIONS.topic) == world.coordinator:
        await cluster.move(TRANSACTIONS.topic)
    transactions = cluster.leader(TRANSACTIONS.topic)
    started = await cluster.ask(
        transactions, "InitProducerId", 4, transactional_id="x", transaction_timeout=60_000
    )
    transaction = Transaction("x", started.producer_id, started.producer_epoch)
    for node_id in cluster.nodes:
        await world.on(
            node_id,
            methodcaller("write_in_transaction", world.key, 1, 0, [done(node_id)], transaction),
        )
    state = await world.read()
    assert {each.producer_id for each in state.batches} == {started.producer_id}
    await cluster.move(SHARE_STATE.topic)
    assert (await world.read()).batches == state.batches, "it is pending on the next coordinator, too"
    ended = await cluster.ask(
        cluster.leader(TRANSACTIONS.topic),
        "EndTxn",
        3,
        transactional_id="x",
        producer_id=started.producer_id,
        producer_epoch=started.producer_epoch,
        committed=True,
    )
    assert ended.error_code is ErrorCode.none
    assert (await world.read()).batches == tuple(done(node_id) for node_id in (1, 2, 3))
