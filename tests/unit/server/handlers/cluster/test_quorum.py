"""DescribeQuorum and UpdateFeatures, in every version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.other_nodes import FakeCluster
from tidemill.errors import ErrorCode
from tidemill.server.broker import Broker
from tidemill.wire.apis import APIS_BY_NAME

Ask = Callable[..., Awaitable[Any]]
VERSIONS = {name: api.versions for name, api in APIS_BY_NAME.items()}


def asked(name: str, *indexes: int) -> dict[str, Any]:
    return {"topic_name": name, "partitions": [{"partition_index": index} for index in indexes]}


@pytest.mark.parametrize("version", VERSIONS["DescribeQuorum"])
async def test_this_node_is_the_only_voter_and_leads(broker: Broker, ask: Ask, version: int) -> None:
    answer = await ask(broker, "DescribeQuorum", version, topics=[asked("__cluster_metadata", 0)])
    assert answer.error_code is ErrorCode.none
    (topic,) = answer.topics
    (partition,) = topic.partitions
    assert (topic.topic_name, partition.partition_index) == ("__cluster_metadata", 0)
    assert (partition.error_code, partition.leader_id) == (ErrorCode.none, 1)
    assert partition.high_watermark == broker.image.revision > 0
    (voter,) = partition.current_voters
    assert (voter.replica_id, voter.log_end_offset) == (1, broker.image.revision)
    assert partition.observers == ()
    if version >= 1:
        assert (voter.last_fetch_timestamp, voter.last_caught_up_timestamp > 0) == (-1, True)
    if version >= 2:
        (node,) = answer.nodes
        (listener,) = node.listeners
        assert (node.node_id, listener.host, listener.port) == (1, "advertised", 9999)


@pytest.mark.parametrize("version", VERSIONS["DescribeQuorum"])
@pytest.mark.parametrize(
    "topics",
    [
        [],
        [asked("other", 0)],
        [asked("__cluster_metadata", 1)],
        [asked("__cluster_metadata", 0, 1)],
        [asked("__cluster_metadata", 0), asked("other", 0)],
    ],
)
async def test_no_other_partition_has_a_quorum(
    broker: Broker, ask: Ask, version: int, topics: list[dict[str, Any]]
) -> None:
    answer = await ask(broker, "DescribeQuorum", version, topics=topics)
    assert (answer.error_code, answer.topics) == (ErrorCode.unknown_topic_or_partition, ())


def update(feature: str, level: int) -> dict[str, Any]:
    return {"feature": feature, "max_version_level": level}


@pytest.mark.parametrize("version", VERSIONS["UpdateFeatures"])
async def test_the_level_that_a_feature_has_is_confirmed(broker: Broker, ask: Ask, version: int) -> None:
    updates = [update("transaction.version", 2), update("group.version", 1)]
    answer = await ask(broker, "UpdateFeatures", version, feature_updates=updates)
    assert (answer.error_code, answer.error_message) == (ErrorCode.none, None)
    if version < 2:
        assert [(each.feature, each.error_code) for each in answer.results] == [
            ("transaction.version", ErrorCode.none),
            ("group.version", ErrorCode.none),
        ]


@pytest.mark.parametrize("version", VERSIONS["UpdateFeatures"])
@pytest.mark.parametrize(
    ("updates", "code", "message"),
    [
        ([("transaction.version", 1)], ErrorCode.invalid_update_version, "always at level 2"),
        ([("transaction.version", 3)], ErrorCode.invalid_update_version, "always at level 2"),
        ([("group.version", 0)], ErrorCode.invalid_update_version, "always at level 1"),
        ([("group.version", 1), ("metadata.version", 25)], ErrorCode.invalid_update_version, "no feature"),
        ([("group.version", 1)] * 2, ErrorCode.invalid_request, "more than once"),
        ([("group.version", 1)] * 100, ErrorCode.invalid_request, "more than once"),
    ],
)
async def test_other_levels_and_features_are_refused(
    broker: Broker,
    ask: Ask,
    version: int,
    updates: list[tuple[str, int]],
    code: ErrorCode,
    message: str,
) -> None:
    body = [update(*each) for each in updates]
    answer = await ask(broker, "UpdateFeatures", version, feature_updates=body)
    assert answer.error_code is code
    assert message in answer.error_message


@pytest.mark.parametrize("version", VERSIONS["DescribeQuorum"])
async def test_in_a_cluster_the_controller_leads_and_live_nodes_vote(
    broker: Broker, ask: Ask, version: int
) -> None:
    cluster = await FakeCluster.around(broker, {2: None, 3: None})
    await cluster.make_controller(2)
    controller = broker.image.controller
    await cluster.kill(3)
    assert controller is not None
    answer = await ask(broker, "DescribeQuorum", version, topics=[asked("__cluster_metadata", 0)])
    (partition,) = answer.topics[0].partitions
    assert (partition.leader_id, partition.leader_epoch) == (2, controller.epoch)
    revision = broker.image.revision
    assert [(each.replica_id, each.log_end_offset) for each in partition.current_voters] == [
        (1, revision),
        (2, -1),
    ]
    assert [each.replica_id for each in partition.observers] == [3]
    if version >= 2:
        assert [(node.node_id, node.listeners[0].host) for node in answer.nodes] == [
            (1, "advertised"),
            (2, "host2"),
        ]
    await cluster.make_controller(None)
    without = await ask(broker, "DescribeQuorum", version, topics=[asked("__cluster_metadata", 0)])
    (partition,) = without.topics[0].partitions
    assert (partition.error_code, partition.leader_id) == (ErrorCode.leader_not_available, -1)
