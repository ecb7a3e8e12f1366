"""DescribeNodes, DescribeReplicas, ElectReplica, SetNodeTags and UnregisterBroker, alone and in a cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from support.broker_topics import create, write
from support.other_nodes import FakeCluster
from tidemill.control.commands import ElectLeaders
from tidemill.errors import ErrorCode
from tidemill.server.broker import Broker

Ask = Callable[..., Awaitable[Any]]


async def test_a_node_that_is_alone_is_its_own_controller(broker: Broker, ask: Ask) -> None:
    answer = await ask(broker, "DescribeNodes", 0)
    assert (answer.error_code, answer.node_id, answer.controller_id) == (ErrorCode.none, 1, 1)
    assert (answer.replicated, answer.controller_epoch) == (False, -1)
    (node,) = answer.nodes
    assert (node.node_id, node.state, node.cluster_port) == (1, "live", 0)


async def test_what_the_node_calls_a_problem_is_told(broker: Broker, ask: Ask) -> None:
    broker.problems = lambda: ["the disk is full"]
    assert (await ask(broker, "DescribeNodes", 0)).problems == ("the disk is full",)


async def test_nodes_are_told_with_their_state_and_clock(broker: Broker, ask: Ask) -> None:
    cluster = await FakeCluster.around(broker, racks={2: "b", 3: "c"})
    await cluster.kill(3)
    broker.clocks_ahead_ms = lambda: {2: 12_000}
    answer = await ask(broker, "DescribeNodes", 0)
    assert answer.replicated
    assert {each.node_id: (each.state, each.clock_ahead_ms) for each in answer.nodes} == {
        1: ("live", 0),
        2: ("live", 12_000),
        3: ("down", 0),
    }


async def test_the_replicas_of_the_topics_asked_for_are_described(broker: Broker, ask: Ask) -> None:
    for name in ("orders", "other"):
        await create(broker, name)
        await write(broker, name, "one", "two")
    (replica,) = (await ask(broker, "DescribeReplicas", 0, topics=["orders"])).replicas
    assert (replica.topic, replica.partition, replica.role, replica.problem) == ("orders", 0, "leader", None)
    assert (replica.log_end_offset, replica.high_watermark, replica.last_epoch) == (2, 2, 0)
    assert replica.followers == ()
    assert len((await ask(broker, "DescribeReplicas", 0, topics=[])).replicas) == 2


async def test_an_unclean_election_of_a_named_replica_is_the_controllers(broker: Broker, ask: Ask) -> None:
    proposed: list[Any] = []

    async def propose(command: Any) -> dict[int, int]:
        proposed.append(command)
        return {5: int(ErrorCode.election_not_needed)}

    broker.propose = propose
    answer = await ask(broker, "ElectReplica", 0, topic="t", partition=5, leader=2)
    assert (answer.error_code, answer.error_message) == (ErrorCode.election_not_needed, "t-5 has a leader")
    (command,) = proposed
    assert isinstance(command, ElectLeaders)
    assert (command.name, command.partitions, command.leader) == ("t", (5,), 2)
    assert command.who, "it says who has asked"


async def test_a_node_is_tagged_by_the_controller_and_described_with_its_tags(
    broker: Broker, ask: Ask
) -> None:
    await FakeCluster.around(broker, racks={2: None})
    broker.propose = broker.controller.submit
    answer = await ask(broker, "SetNodeTags", 0, node_id=2, tags=["PERMANENT_OFFLINE"] * 2)
    assert (answer.error_code, answer.error_message) == (ErrorCode.none, None)
    nodes = (await ask(broker, "DescribeNodes", 0)).nodes
    assert {each.node_id: each.tags for each in nodes} == {1: (), 2: ("PERMANENT_OFFLINE",)}
    await ask(broker, "SetNodeTags", 0, node_id=2, tags=[])
    assert all(each.tags == () for each in (await ask(broker, "DescribeNodes", 0)).nodes)


async def test_a_tag_that_means_nothing_and_a_node_that_is_alone_are_refused(
    broker: Broker, ask: Ask
) -> None:
    unknown = await ask(broker, "SetNodeTags", 0, node_id=9, tags=[])
    assert unknown.error_code == ErrorCode.broker_id_not_registered
    alone = await ask(broker, "SetNodeTags", 0, node_id=1, tags=["PERMANENT_OFFLINE"])
    assert alone.error_code == ErrorCode.invalid_request, "no topic could be created any more"
    await FakeCluster.around(broker, racks={2: None})
    answer = await ask(broker, "SetNodeTags", 0, node_id=2, tags=["OFFLINE"])
    assert answer.error_code == ErrorCode.invalid_request
    assert "'OFFLINE' is no tag of a node; there are PERMANENT_OFFLINE" in answer.error_message


async def test_a_node_that_is_not_there_or_alone_cannot_be_removed(broker: Broker, ask: Ask) -> None:
    unknown = await ask(broker, "UnregisterBroker", 0, broker_id=9)
    assert unknown.error_code is ErrorCode.broker_id_not_registered
    alone = await ask(broker, "UnregisterBroker", 0, broker_id=1)
    assert alone.error_code is ErrorCode.invalid_request
