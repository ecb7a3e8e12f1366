"""Newest answers: by the session, or confirmed by the replicas that could lead."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from support.faulty_storage import FaultyStorage
from support.product_cluster import ProductCluster
from support.virtual_loop import run_virtual
from tidemill.cluster.messages import HeartbeatRequest, HeartbeatResponse, RequestHeader, ResponseHeader
from tidemill.config.topic import TopicConfig
from tidemill.control.image import MetadataImage, NodeImage
from tidemill.control.session import Session
from tidemill.coordination.clock import boot_clock_ms
from tidemill.errors import ApiError, ErrorCode
from tidemill.log.recovery import open_log
from tidemill.replication.fetching.peer_requests import PeerRequests
from tidemill.replication.partition import Partition
from tidemill.replication.rules.assignment import PartitionAssignment
from tidemill.server.broker import Broker
from tidemill.server.cluster.lapsed_session import LapsedSession
from tidemill.server.cluster.membership import Membership
from tidemill.server.cluster.newest_answers import ClusterNewestAnswers
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.coordinators.transactions import TRANSACTIONS

NONE = ErrorCode.none
#: Longer than a session.
LONG_S = 20

Story = Callable[[ProductCluster], Awaitable[None]]


def on_three_nodes(story: Story) -> Callable[[], None]:
    """Run a test on the virtual loop, with a group ``g`` that has committed offset 9 of ``t-0``."""

    @functools.wraps(story)
    def test() -> None:
        async def main() -> None:
            async with ProductCluster(3) as cluster:
                await cluster.create("t")
                for key_type, topic in ((0, GROUPS.topic), (1, TRANSACTIONS.topic)):
                    await cluster.ask(1, "FindCoordinator", 4, key_type=key_type, coordinator_keys=["g"])
                    await cluster.until(lambda topic=topic: cluster.leader(topic) != -1)  # type: ignore[misc]
                    led = cluster.led(topic)
                    await cluster.until(lambda led=led: len(in_sync(led)) == 3)  # type: ignore[misc]
                assert await commit(cluster, cluster.leader(GROUPS.topic), 9) is NONE
                await story(cluster)

        run_virtual(main, seed=1)

    # Not those of the story: pytest would look for fixtures.
    del test.__wrapped__
    return test


def in_sync(partition: Partition) -> tuple[int, ...]:
    return () if partition.assignment is None else partition.assignment.isr


async def commit(cluster: ProductCluster, node_id: int, offset: int) -> ErrorCode:
    entry = {"partition_index": 0, "committed_offset": offset, "committed_metadata": ""}
    answer = await cluster.ask(
        node_id,
        "OffsetCommit",
        7,
        group_id="g",
        generation_id_or_member_epoch=-1,
        member_id="",
        topics=[{"name": "t", "partitions": [entry]}],
    )
    return ErrorCode(answer.topics[0].partitions[0].error_code)


async def committed(cluster: ProductCluster, node_id: int) -> int | ErrorCode:
    """What a node says was committed, or its error."""
    topics = [{"name": "t", "partition_indexes": [0]}]
    answer = await cluster.ask(node_id, "OffsetFetch", 8, groups=[{"group_id": "g", "topics": topics}])
    group = answer.groups[0]
    return (
        ErrorCode(group.error_code)
        if group.error_code
        else int(group.topics[0].partitions[0].committed_offset)
    )


def answers_by_itself(cluster: ProductCluster, node_id: int) -> bool:
    broker = cluster.broker(node_id)
    partition = broker.replicas.peek(broker.find.topic(GROUPS.topic).id, 0)
    assert partition is not None
    return broker.newest.may_answer(partition)


# --- without the store


@on_three_nodes
async def test_without_the_store_the_in_sync_replicas_confirm_that_a_coordinator_is_one(
    cluster: ProductCluster,
) -> None:
    for way in cluster.ways.values():
        way.unavailable = True
    await asyncio.sleep(LONG_S)
    coordinator = cluster.leader(GROUPS.topic)
    assert not answers_by_itself(cluster, coordinator), "its session cannot be renewed"
    assert await committed(cluster, coordinator) == 9
    described = await cluster.ask(coordinator, "DescribeGroups", 5, groups=["g"])
    assert described.groups[0].error_code is NONE
    listed = await cluster.ask(coordinator, "ListGroups", 4)
    assert (listed.error_code, [group.group_id for group in listed.groups]) == (NONE, ["g"])
    transactions = cluster.leader(TRANSACTIONS.topic)
    assert (await cluster.ask(transactions, "ListTransactions", 1)).error_code is NONE


@on_three_nodes
async def test_an_in_sync_replica_that_is_silent_keeps_a_coordinator_without_a_session_from_answering(
    cluster: ProductCluster,
) -> None:
    for way in cluster.ways.values():
        way.unavailable = True
    await asyncio.sleep(LONG_S)
    coordinator = cluster.leader(GROUPS.topic)
    other = next(node_id for node_id in cluster.nodes if node_id != coordinator)
    cluster.network.cut(f"n{other}", f"n{coordinator}")
    assert await committed(cluster, coordinator) is ErrorCode.not_coordinator
    described = await cluster.ask(coordinator, "DescribeGroups", 5, groups=["g"])
    assert described.groups[0].error_code is ErrorCode.not_coordinator
    assert (await cluster.ask(coordinator, "ListGroups", 4)).error_code is ErrorCode.not_coordinator


# --- deposed


async def depose(cluster: ProductCluster, topic: str) -> int:
    """Cut a leader off the store until another one is elected; gives the one that does not know."""
    deposed = cluster.leader(topic)
    cluster.ways[deposed].unavailable = True
    others = [node for node_id, node in cluster.nodes.items() if node_id != deposed]

    def is_replaced() -> bool:
        return all(
            node.broker.image.topics[topic].partitions[0].leader not in (deposed, -1) for node in others
        )

    await cluster.until(is_replaced)
    return deposed


def leader_known_to(cluster: ProductCluster, node_id: int) -> int:
    return leader_at(cluster.broker(node_id))


async def commit_elsewhere(cluster: ProductCluster, deposed: int, offset: int) -> int:
    """Commit an offset at the coordinator that the other nodes know, which may still load."""
    coordinator = leader_known_to(cluster, next(node_id for node_id in cluster.nodes if node_id != deposed))
    while await commit(cluster, coordinator, offset) is not NONE:  # noqa: ASYNC110 - the state itself
        await asyncio.sleep(0.1)
    return coordinator


@on_three_nodes
async def test_a_deposed_coordinator_never_says_what_is_newest(cluster: ProductCluster) -> None:
    deposed = await depose(cluster, GROUPS.topic)
    coordinator = await commit_elsewhere(cluster, deposed, 10)
    assert leader_known_to(cluster, deposed) == deposed, "it knows nothing"
    assert await committed(cluster, deposed) is ErrorCode.not_coordinator
    assert await committed(cluster, coordinator) == 10
    beat = await cluster.ask(deposed, "Heartbeat", 4, group_id="g", generation_id=1, member_id="m")
    assert beat.error_code is ErrorCode.not_coordinator


@on_three_nodes
async def test_a_deposed_transaction_coordinator_lists_and_describes_nothing(cluster: ProductCluster) -> None:
    started = await cluster.ask(
        cluster.leader(TRANSACTIONS.topic),
        "InitProducerId",
        4,
        transactional_id="x",
        transaction_timeout=60_000,
        producer_id=-1,
        producer_epoch=-1,
    )
    assert started.error_code is NONE
    deposed = await depose(cluster, TRANSACTIONS.topic)
    listed = await cluster.ask(deposed, "ListTransactions", 1)
    assert listed.error_code is ErrorCode.not_coordinator
    described = await cluster.ask(deposed, "DescribeTransactions", 0, transactional_ids=["x"])
    assert described.transaction_states[0].error_code is ErrorCode.not_coordinator


@on_three_nodes
async def test_without_the_questions_a_deposed_coordinator_would_answer_from_the_past(
    cluster: ProductCluster,
) -> None:
    """The ablation: nobody is asked, whether the node still leads or who does."""

    async def at_once(*arguments: Any) -> None:
        pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LapsedSession, "ask_others", at_once)
        deposed = await depose(cluster, GROUPS.topic)
        newest = cast(ClusterNewestAnswers, cluster.broker(deposed).newest)
        patch.setattr(newest, "confirm", at_once)
        await commit_elsewhere(cluster, deposed, 10)
        assert await committed(cluster, deposed) == 9


# --- sessions that follow a lost one, and resignations


def membership(cluster: ProductCluster, node_id: int) -> Membership:
    found = cluster.nodes[node_id].node.membership
    assert found is not None
    return found


async def coordinator_apart_from_the_controller(cluster: ProductCluster) -> int:
    """The group coordinator, on a node that is not the controller: that one hears of its own commits."""
    controller = cluster.broker(1).image.controller
    assert controller is not None
    while cluster.leader(GROUPS.topic) in (controller.node_id, -1):
        await cluster.move(GROUPS.topic)
    coordinator = cluster.leader(GROUPS.topic)
    while await commit(cluster, coordinator, 9) is not NONE:  # noqa: ASYNC110 - the state itself
        await asyncio.sleep(0.1)
    return coordinator


@on_three_nodes
async def test_a_new_session_is_no_proof_before_the_node_has_heard_that_it_was_admitted(
    cluster: ProductCluster,
) -> None:
    deposed = await coordinator_apart_from_the_controller(cluster)
    session = membership(cluster, deposed).session
    lost = session.incarnation
    others = [way for node_id, way in cluster.ways.items() if node_id != deposed]
    for way in others:
        way.deaf = True
    await cluster.store.revoke(session.lease_id)
    # It registers again before the controller hears that the session was lost.
    await cluster.until(lambda: session.incarnation != lost)
    cluster.ways[deposed].deaf = cluster.ways[deposed].blind = True
    for way in others:
        way.deaf = False
    known = [cluster.broker(node_id) for node_id in cluster.nodes if node_id != deposed]
    await cluster.until(lambda: all(leader_at(each) not in (deposed, -1) for each in known))
    await commit_elsewhere(cluster, deposed, 10)
    assert leader_known_to(cluster, deposed) == deposed, "it knows nothing"
    assert not answers_by_itself(cluster, deposed), "its session is new"
    assert await committed(cluster, deposed) is ErrorCode.not_coordinator


@on_three_nodes
async def test_a_leader_that_has_resigned_does_not_rely_on_its_session(cluster: ProductCluster) -> None:
    resigned = await coordinator_apart_from_the_controller(cluster)
    partition = cluster.led(GROUPS.topic)
    cluster.ways[resigned].deaf = cluster.ways[resigned].blind = True
    assert answers_by_itself(cluster, resigned)
    await cluster.run(resigned, membership(cluster, resigned).resign(partition))
    known = [cluster.broker(node_id) for node_id in cluster.nodes if node_id != resigned]
    await cluster.until(lambda: all(leader_at(each) not in (resigned, -1) for each in known))
    # The new leader drops it, because it does not follow.
    await commit_elsewhere(cluster, resigned, 10)
    assert leader_known_to(cluster, resigned) == resigned, "it knows nothing"
    assert not answers_by_itself(cluster, resigned)
    assert await committed(cluster, resigned) is ErrorCode.not_coordinator


@on_three_nodes
async def test_a_leader_whose_resignation_was_refused_relies_on_its_session_again(
    cluster: ProductCluster,
) -> None:
    leader = await coordinator_apart_from_the_controller(cluster)
    partition = cluster.led(GROUPS.topic)
    for node_id in [each for each in cluster.nodes if each != leader]:
        await cluster.kill(node_id)
    await cluster.until(lambda: cluster.broker(leader).image.live_nodes == {leader})
    await cluster.until(lambda: membership(cluster, leader).elected.epoch is not None)
    await cluster.run(leader, membership(cluster, leader).resign(partition))
    assert cluster.leader(GROUPS.topic) == leader
    assert not partition.as_leader.is_resigning


@on_three_nodes
async def test_a_leader_that_does_not_know_whether_it_has_resigned_asks_the_others(
    cluster: ProductCluster,
) -> None:
    leader = await coordinator_apart_from_the_controller(cluster)
    partition = cluster.led(GROUPS.topic)
    for other in [each for each in cluster.nodes if each != leader]:
        cluster.network.cut(f"n{leader}", f"n{other}")
    await cluster.run(leader, membership(cluster, leader).resign(partition))
    assert partition.as_leader.is_resigning
    assert not answers_by_itself(cluster, leader)
    cluster.network.heal()


def leader_at(broker: Broker) -> int:
    return broker.image.topics[GROUPS.topic].partitions[0].leader


# --- the session


@pytest.mark.parametrize(
    ("now_ms", "replicas", "may"),
    [
        (4_999, (1, 2, 3), True),
        (5_000, (1, 2, 3), False),
        (9_000, (1, 2), False),
        (9_000, (1,), True),
    ],
)
def test_a_leader_relies_on_its_session_unless_it_is_the_only_replica(
    now_ms: int, replicas: tuple[int, ...], may: bool
) -> None:
    partition = partition_with(PartitionAssignment(1, 0, replicas, replicas))
    assert answers_at(now_ms, serving_until_ms=5_000).may_answer(partition) is may


def test_a_partition_without_an_assignment_relies_on_the_session() -> None:
    assert not answers_at(1, serving_until_ms=0).may_answer(partition_with(None))


def partition_with(assignment: PartitionAssignment | None) -> Partition:
    side = SimpleNamespace(is_resigning=False)
    return cast(Partition, SimpleNamespace(assignment=assignment, as_leader=side))


def answers_at(now_ms: int, *, serving_until_ms: int) -> ClusterNewestAnswers:
    own = uuid4()
    node = NodeImage(1, "n1", "n1", 9092, None, own)
    image = MetadataImage(replicated=True, nodes={1: node}, alive={1: own}, admitted={1: own})
    session = cast(Session, SimpleNamespace(serving_until_ms=serving_until_ms, incarnation=own))
    return ClusterNewestAnswers(1, session, cast(PeerRequests, None), lambda: now_ms, lambda: image)


class HeldPeers:
    """``PeerRequests`` that keeps what is asked, and answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[HeartbeatRequest] = []
        self.answers: list[asyncio.Future[HeartbeatResponse]] = []

    async def request(self, node_id: int, make: Any, answer: Any, *, timeout_ms: int) -> Any:
        self.asked.append(make(RequestHeader(1, 1, 1, timeout_ms)))
        self.answers.append(asyncio.get_running_loop().create_future())
        return await self.answers[-1]

    def confirm(self, index: int) -> None:
        confirmed = [each.partition for each in self.asked[index].partitions]
        self.answers[index].set_result(HeartbeatResponse(ResponseHeader(1), [], confirmed))


def test_the_high_watermark_of_a_later_epoch_is_not_told_with_the_epoch_of_a_call_that_waited() -> None:
    async def main() -> None:
        log, _ = open_log(FaultyStorage(), "logs/t/0", TopicConfig())
        first = PartitionAssignment(1, 5, (1, 2), (1, 2))
        partition = Partition(
            "t",
            uuid4(),
            0,
            log,
            request_flush=lambda _: None,
            max_decompressed_bytes=10**6,
            assignment=first,
            node_id=1,
        )
        peers = HeldPeers()
        session = cast(Session, SimpleNamespace(serving_until_ms=0, incarnation=None))
        answers = ClusterNewestAnswers(1, session, cast(PeerRequests, peers), lambda: 1, MetadataImage)
        earlier = asyncio.ensure_future(answers.confirm([partition]))
        await asyncio.sleep(0)
        later = asyncio.ensure_future(answers.confirm([partition]))
        await asyncio.sleep(0)
        # The second call waits for the first question; meanwhile the node follows another leader.
        partition.apply(PartitionAssignment(2, 6, (1, 2), (1, 2)), 1)
        peers.confirm(0)
        await asyncio.wait([earlier])
        while len(peers.asked) < 2:  # noqa: ASYNC110 - the state itself
            await asyncio.sleep(0)
        assert peers.asked[1].partitions == []
        peers.confirm(1)
        for call in (earlier, later):
            with pytest.raises(ApiError) as caught:
                await call
            assert caught.value.code is ErrorCode.not_leader_or_follower

    asyncio.run(main())


def test_the_clock_of_sessions_goes_on_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's CLOCK_BOOTTIME does; CLOCK_MONOTONIC, which the event loop has, stands still."""
    asked: list[int] = []

    def clock_gettime_ns(which: int) -> int:
        asked.append(which)
        return 7_000_000

    monkeypatch.setattr(time, "clock_gettime_ns", clock_gettime_ns)
    assert boot_clock_ms() == 7
    assert asked == [time.CLOCK_BOOTTIME]
