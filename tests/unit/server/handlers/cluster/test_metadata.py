"""Metadata, DescribeCluster, DescribeTopicPartitions and FindCoordinator, in every version."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from support.other_nodes import FakeCluster
from tidemill.control.commands import CreateTopic, RegisterNode
from tidemill.control.records import PartitionImage
from tidemill.errors import ErrorCode, StorageError
from tidemill.server.broker import Broker
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.wire.apis import APIS_BY_NAME

Ask = Callable[..., Awaitable[Any]]
MakeBroker = Callable[..., Awaitable[Broker]]
VERSIONS = {name: api.versions for name, api in APIS_BY_NAME.items()}
NOT_ASKED_FOR = -(2**31)


async def create(broker: Broker, name: str, partitions: int = 1, **fields: Any) -> Any:
    if "assignments" not in fields:
        fields["partitions"] = partitions
    return await broker.controller.submit(CreateTopic(name=name, topic_id=uuid4(), **fields))


def named(*names: str) -> list[dict[str, Any]]:
    return [{"name": name} for name in names]


# --- Metadata


@pytest.mark.parametrize("version", VERSIONS["Metadata"])
async def test_metadata_describes_nodes_and_partitions(broker: Broker, ask: Ask, version: int) -> None:
    created = await create(broker, "events", 2)
    answer = await ask(broker, "Metadata", version, topics=named("events"))
    (node,) = answer.brokers
    assert (node.node_id, node.host, node.port) == (1, "advertised", 9999)
    (topic,) = answer.topics
    assert (topic.error_code, topic.name) == (ErrorCode.none, "events")
    assert [each.partition_index for each in topic.partitions] == [0, 1]
    first = topic.partitions[0]
    assert (first.error_code, first.leader_id) == (ErrorCode.none, 1)
    assert (first.replica_nodes, first.isr_nodes) == ((1,), (1,))
    if version >= 1:
        assert (answer.controller_id, topic.is_internal, node.rack) == (1, False, None)
    if version >= 2:
        assert answer.cluster_id == "the-cluster"
    if version >= 5:
        assert first.offline_replicas == ()
    if version >= 7:
        assert first.leader_epoch == 0
    if 8 <= version <= 10:
        assert answer.cluster_authorized_operations == NOT_ASKED_FOR
    if version >= 8:
        assert topic.topic_authorized_operations == NOT_ASKED_FOR
    if version >= 10:
        assert topic.topic_id == created.id
    if version >= 13:
        assert answer.error_code is ErrorCode.none


@pytest.mark.parametrize("version", [version for version in VERSIONS["Metadata"] if version >= 8])
async def test_metadata_tells_authorized_operations_to_who_asks(
    broker: Broker, ask: Ask, version: int
) -> None:
    await create(broker, "events")
    answer = await ask(
        broker,
        "Metadata",
        version,
        topics=named("events"),
        include_cluster_authorized_operations=True,
        include_topic_authorized_operations=True,
    )
    assert answer.topics[0].topic_authorized_operations == 0b1101_1111_1000
    if version <= 10:
        assert answer.cluster_authorized_operations == 0b1_1111_1010_0000


@pytest.mark.parametrize("version", VERSIONS["Metadata"])
async def test_metadata_of_all_topics_and_of_none(broker: Broker, ask: Ask, version: int) -> None:
    await create(broker, "b")
    await create(broker, "a")
    everything = await ask(broker, "Metadata", version, topics=[] if version == 0 else None)
    assert [topic.name for topic in everything.topics] == ["a", "b"]
    if version >= 1:
        nothing = await ask(broker, "Metadata", version, topics=[])
        assert nothing.topics == ()


@pytest.mark.parametrize("version", VERSIONS["Metadata"])
async def test_metadata_creates_what_is_asked_for(broker: Broker, ask: Ask, version: int) -> None:
    answer = await ask(
        broker, "Metadata", version, topics=named("new", "bad name", "new"), allow_auto_topic_creation=True
    )
    new, bad = answer.topics
    assert (new.error_code, new.name, len(new.partitions)) == (ErrorCode.none, "new", 1)
    assert (bad.error_code, bad.name) == (ErrorCode.invalid_topic_exception, "bad name")
    assert "new" in broker.image.topics


@pytest.mark.parametrize("version", range(4, 14))
async def test_metadata_creates_nothing_if_the_client_does_not_want_it(
    broker: Broker, ask: Ask, version: int
) -> None:
    answer = await ask(
        broker, "Metadata", version, topics=named("new", "bad name"), allow_auto_topic_creation=False
    )
    codes = [topic.error_code for topic in answer.topics]
    assert codes == [ErrorCode.unknown_topic_or_partition, ErrorCode.invalid_topic_exception]
    assert not broker.image.topics


async def test_metadata_creates_nothing_if_the_node_does_not_want_it(
    make_broker: MakeBroker, ask: Ask
) -> None:
    broker = await make_broker(auto_create_topics=False)
    answer = await ask(broker, "Metadata", 1, topics=named("new"))
    assert answer.topics[0].error_code is ErrorCode.unknown_topic_or_partition
    assert not broker.image.topics


async def test_metadata_tells_why_a_topic_could_not_be_created(make_broker: MakeBroker, ask: Ask) -> None:
    broker = await make_broker(default_replication=3)
    answer = await ask(broker, "Metadata", 9, topics=named("new"), allow_auto_topic_creation=True)
    assert answer.topics[0].error_code is ErrorCode.invalid_replication_factor


async def test_metadata_answers_when_the_metadata_store_is_gone(broker: Broker, ask: Ask) -> None:
    await create(broker, "old")
    await broker.controller.stop()
    answer = await ask(broker, "Metadata", 9, topics=named("old", "new"), allow_auto_topic_creation=True)
    assert [topic.error_code for topic in answer.topics] == [ErrorCode.none, ErrorCode.broker_not_available]


async def test_metadata_creates_internal_topics_with_their_own_shape(broker: Broker, ask: Ask) -> None:
    answer = await ask(
        broker,
        "Metadata",
        9,
        topics=named(GROUPS.topic, TRANSACTIONS.topic, "__share_group_state"),
        allow_auto_topic_creation=True,
    )
    *compacted, shares = answer.topics
    for topic in answer.topics:
        assert (topic.error_code, len(topic.partitions), topic.is_internal) == (ErrorCode.none, 2, True)
    for topic in compacted:
        assert broker.image.topics[topic.name].configs["cleanup.policy"] == "compact"
    # Its coordinator prunes it: the last record of a key is not all that there is of it.
    configs = broker.image.topics[shares.name].configs
    assert (configs["cleanup.policy"], configs["retention.ms"]) == ("delete", "-1")


@pytest.mark.parametrize("version", [12, 13])
async def test_metadata_by_id(broker: Broker, ask: Ask, version: int) -> None:
    created = await create(broker, "events")
    unknown = uuid4()
    topics = [{"topic_id": each, "name": None} for each in (created.id, unknown, created.id, None)]
    answer = await ask(broker, "Metadata", version, topics=topics, allow_auto_topic_creation=True)
    known, missing, nameless = answer.topics
    assert (known.error_code, known.name, known.topic_id) == (ErrorCode.none, "events", created.id)
    assert (missing.error_code, missing.name, missing.topic_id) == (ErrorCode.unknown_topic_id, None, unknown)
    assert (nameless.error_code, nameless.name) == (ErrorCode.invalid_request, None)


@pytest.mark.parametrize("version", [10, 11])
async def test_metadata_refuses_ids_before_version_12(broker: Broker, ask: Ask, version: int) -> None:
    created = await create(broker, "events")
    topics = [{"topic_id": created.id, "name": None}, {"topic_id": None, "name": None}, *named("events")]
    answer = await ask(broker, "Metadata", version, topics=topics)
    by_id, nameless, by_name = answer.topics
    assert (by_id.error_code, by_id.name) == (ErrorCode.invalid_request, "")
    assert (nameless.error_code, nameless.name) == (ErrorCode.invalid_request, "")
    assert by_name.error_code is ErrorCode.none


@pytest.mark.parametrize("version", VERSIONS["Metadata"])
async def test_a_stopped_partition_has_no_leader(broker: Broker, ask: Ask, version: int) -> None:
    topic = await create(broker, "events", 3)
    broker.find.partition(topic, 0).flush_failed(StorageError("the disk is broken"))
    broker.replicas.offline[topic.id, 1] = broker.find.placement(topic, 1), StorageError("damaged")
    answer = await ask(broker, "Metadata", version, topics=named("events"))
    for stopped in answer.topics[0].partitions[:2]:
        assert (stopped.error_code, stopped.leader_id) == (ErrorCode.leader_not_available, -1)
        assert stopped.replica_nodes == (1,)
        if version >= 5:
            assert stopped.offline_replicas == (1,)
    well = answer.topics[0].partitions[2]
    assert (well.error_code, well.leader_id) == (ErrorCode.none, 1)
    broker.replicas.offline.clear()


@pytest.mark.parametrize("version", VERSIONS["Metadata"])
async def test_metadata_of_other_nodes(broker: Broker, ask: Ask, version: int) -> None:
    await broker.controller.submit(
        RegisterNode(node_id=2, name="node-2", host="elsewhere", port=7, rack="r", incarnation=uuid4())
    )
    await create(broker, "far", assignments=((2, 1),))
    answer = await ask(broker, "Metadata", version, topics=named("far"))
    assert [(node.node_id, node.host) for node in answer.brokers] == [(1, "advertised"), (2, "elsewhere")]
    partition = answer.topics[0].partitions[0]
    assert (partition.leader_id, partition.replica_nodes) == (2, (2, 1))
    if version >= 1:
        assert answer.brokers[1].rack == "r"


# --- DescribeCluster


@pytest.mark.parametrize("version", VERSIONS["DescribeCluster"])
async def test_describe_cluster(broker: Broker, ask: Ask, version: int) -> None:
    answer = await ask(broker, "DescribeCluster", version, endpoint_type=1)
    assert (answer.error_code, answer.cluster_id, answer.controller_id) == (ErrorCode.none, "the-cluster", 1)
    (node,) = answer.brokers
    assert (node.broker_id, node.host, node.port, node.rack) == (1, "advertised", 9999, None)
    assert answer.cluster_authorized_operations == NOT_ASKED_FOR
    asked = await ask(broker, "DescribeCluster", version, include_cluster_authorized_operations=True)
    assert asked.cluster_authorized_operations == 0b1_1111_1010_0000


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("endpoint_type", "code"),
    [(2, ErrorCode.mismatched_endpoint_type), (9, ErrorCode.unsupported_endpoint_type)],
)
async def test_describe_cluster_refuses_other_endpoints(
    broker: Broker, ask: Ask, version: int, endpoint_type: int, code: ErrorCode
) -> None:
    answer = await ask(broker, "DescribeCluster", version, endpoint_type=endpoint_type)
    assert answer.error_code is code
    assert "broker" in answer.error_message


# --- DescribeTopicPartitions


async def test_describe_topic_partitions_goes_on_at_its_cursor(broker: Broker, ask: Ask) -> None:
    for name, partitions in (("a", 2), ("b", 3), ("c", 1)):
        await create(broker, name, partitions)
    seen: list[tuple[str, int]] = []
    cursor, rounds = None, 0
    while rounds == 0 or cursor is not None:
        answer = await ask(
            broker, "DescribeTopicPartitions", 0, topics=[], response_partition_limit=2, cursor=cursor
        )
        got = [(topic.name, each.partition_index) for topic in answer.topics for each in topic.partitions]
        assert len(got) <= 2
        seen += got
        rounds += 1
        following = answer.next_cursor
        cursor = following and {
            "topic_name": following.topic_name,
            "partition_index": following.partition_index,
        }
    assert seen == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2), ("c", 0)]
    assert rounds == 3


async def test_describe_topic_partitions_says_what_it_knows_of_a_partition(broker: Broker, ask: Ask) -> None:
    created = await create(broker, "a")
    answer = await ask(broker, "DescribeTopicPartitions", 0, topics=named("a"), response_partition_limit=0)
    (topic,) = answer.topics
    assert topic.topic_authorized_operations == 0b1101_1111_1000
    assert (topic.error_code, topic.topic_id, topic.is_internal) == (ErrorCode.none, created.id, False)
    (partition,) = topic.partitions
    assert (partition.leader_id, partition.leader_epoch, partition.replica_nodes) == (1, 0, (1,))
    assert (partition.eligible_leader_replicas, partition.last_known_elr) == ((), ())
    assert answer.next_cursor is None


async def test_describe_topic_partitions_answers_unknown_topics(broker: Broker, ask: Ask) -> None:
    await create(broker, "b")
    answer = await ask(broker, "DescribeTopicPartitions", 0, topics=named("b", "a", "x y"))
    assert [(topic.name, topic.error_code) for topic in answer.topics] == [
        ("a", ErrorCode.unknown_topic_or_partition),
        ("b", ErrorCode.none),
        ("x y", ErrorCode.invalid_topic_exception),
    ]


@pytest.mark.parametrize("cursor", [("a", -1), ("elsewhere", 0)])
async def test_describe_topic_partitions_refuses_a_cursor_that_cannot_be(
    broker: Broker, ask: Ask, cursor: tuple[str, int]
) -> None:
    await create(broker, "a")
    place = {"topic_name": cursor[0], "partition_index": cursor[1]}
    answer = await ask(broker, "DescribeTopicPartitions", 0, topics=named("a"), cursor=place)
    assert [topic.error_code for topic in answer.topics] == [ErrorCode.invalid_request]


async def test_describe_topic_partitions_takes_a_cursor_behind_the_end(broker: Broker, ask: Ask) -> None:
    await create(broker, "a", 2)
    await create(broker, "b", 1)
    place = {"topic_name": "a", "partition_index": 5}
    answer = await ask(broker, "DescribeTopicPartitions", 0, topics=[], cursor=place)
    assert [(topic.name, len(topic.partitions)) for topic in answer.topics] == [("a", 0), ("b", 1)]


# --- FindCoordinator


@pytest.mark.parametrize("version", range(4))
async def test_find_coordinator_of_one_group(broker: Broker, ask: Ask, version: int) -> None:
    answer = await ask(broker, "FindCoordinator", version, key="my-group", key_type=0)
    assert (answer.error_code, answer.node_id) == (ErrorCode.none, 1)
    assert (answer.host, answer.port) == ("advertised", 9999)
    assert len(broker.image.topics[GROUPS.topic].partitions) == 2


@pytest.mark.parametrize("version", range(4, 7))
async def test_find_coordinator_of_several_groups(broker: Broker, ask: Ask, version: int) -> None:
    answer = await ask(broker, "FindCoordinator", version, key_type=0, coordinator_keys=["a", "b"])
    assert [each.key for each in answer.coordinators] == ["a", "b"]
    for each in answer.coordinators:
        assert (each.error_code, each.node_id) == (ErrorCode.none, 1)
        assert (each.host, each.port) == ("advertised", 9999)


@pytest.mark.parametrize("version", range(1, 7))
@pytest.mark.parametrize(
    ("key_type", "code", "word"),
    [
        (2, ErrorCode.invalid_request, "group:topic id:partition"),
        (9, ErrorCode.invalid_request, "type 9"),
    ],
)
async def test_find_coordinator_refuses_other_keys(
    broker: Broker, ask: Ask, version: int, key_type: int, code: ErrorCode, word: str
) -> None:
    answer = await ask(broker, "FindCoordinator", version, key_type=key_type, key="k", coordinator_keys=["k"])
    found = answer if version < 4 else answer.coordinators[0]
    assert (found.error_code, found.node_id, found.host, found.port) == (code, -1, "", -1)
    assert word in found.error_message


async def test_find_coordinator_is_not_available_if_the_group_partition_is_stopped(
    broker: Broker, ask: Ask
) -> None:
    await broker.coordinators.ensure_topic(GROUPS)
    index = broker.groups.partition_of("g")
    broker.find.partition(broker.find.topic(GROUPS.topic), index).flush_failed(StorageError("broken"))
    answer = await ask(broker, "FindCoordinator", 3, key="g", key_type=0)
    assert answer.error_code is ErrorCode.coordinator_not_available
    answer = await ask(broker, "FindCoordinator", 3, key="g", key_type=1)
    assert answer.error_code is ErrorCode.none, "transactional ids live elsewhere"


async def test_find_coordinator_is_not_available_without_the_offsets_topic(
    make_broker: MakeBroker, ask: Ask
) -> None:
    broker = await make_broker(default_replication=3)
    answer = await ask(broker, "FindCoordinator", 3, key="g", key_type=0)
    assert answer.error_code is ErrorCode.coordinator_not_available
    assert "3 replicas" in answer.error_message


# --- several nodes


@pytest.fixture
async def cluster(broker: Broker) -> FakeCluster:
    """Nodes 1 to 3, all live; node 1 is the broker's."""
    return await FakeCluster.around(broker, {2: "b", 3: None})


@pytest.mark.parametrize("version", VERSIONS["Metadata"])
async def test_metadata_sends_clients_to_live_nodes_only(
    broker: Broker, cluster: FakeCluster, ask: Ask, version: int
) -> None:
    await create(broker, "t", assignments=((3, 1), (1, 3)))
    await cluster.make_controller(2)
    await cluster.kill(3)
    answer = await ask(broker, "Metadata", version, topics=named("t"))
    assert [(node.node_id, node.host) for node in answer.brokers] == [(1, "advertised"), (2, "host2")]
    orphan, led = answer.topics[0].partitions
    assert (orphan.error_code, orphan.leader_id) == (ErrorCode.leader_not_available, -1)
    assert led.leader_id == 1
    if version == 0:
        assert (led.error_code, led.replica_nodes) == (ErrorCode.replica_not_available, (1,))
    else:
        assert (led.error_code, led.replica_nodes, answer.controller_id) == (ErrorCode.none, (1, 3), 2)
    if version >= 5:
        assert (orphan.offline_replicas, led.offline_replicas) == ((3,), (3,))


@pytest.mark.parametrize("controller", [None, 3])
async def test_while_there_is_no_controller_clients_are_told_a_live_node(
    broker: Broker, cluster: FakeCluster, ask: Ask, controller: int | None
) -> None:
    await cluster.make_controller(controller)
    await cluster.kill(3)
    assert (await ask(broker, "Metadata", 12, topics=[])).controller_id == 1
    await cluster.kill(1)
    assert (await ask(broker, "DescribeCluster", 1)).controller_id == 2


@pytest.mark.parametrize("version", VERSIONS["DescribeCluster"])
async def test_describe_cluster_has_dead_nodes_for_those_who_ask(
    broker: Broker, cluster: FakeCluster, ask: Ask, version: int
) -> None:
    await cluster.make_controller(2)
    await cluster.kill(3)
    answer = await ask(broker, "DescribeCluster", version)
    assert ([node.broker_id for node in answer.brokers], answer.controller_id) == ([1, 2], 2)
    if version >= 2:
        asked = await ask(broker, "DescribeCluster", version, include_fenced_brokers=True)
        assert [(node.broker_id, node.is_fenced) for node in asked.brokers] == [
            (1, False),
            (2, False),
            (3, True),
        ]


async def test_describe_topic_partitions_has_the_eligible_leader_replicas(
    broker: Broker, cluster: FakeCluster, ask: Ask
) -> None:
    await create(broker, "t", assignments=((1, 2, 3),))
    await cluster.place("t", 0, PartitionImage(1, 3, (1, 2, 3), (1,), elr=(2,), min_isr=2))
    answer = await ask(broker, "DescribeTopicPartitions", 0, topics=named("t"), response_partition_limit=9)
    (partition,) = answer.topics[0].partitions
    assert (partition.leader_id, partition.isr_nodes, partition.eligible_leader_replicas) == (1, (1,), (2,))


@pytest.mark.parametrize("version", VERSIONS["FindCoordinator"])
async def test_a_dead_node_coordinates_nothing(
    broker: Broker, cluster: FakeCluster, ask: Ask, version: int
) -> None:
    await broker.coordinators.ensure_topic(GROUPS)
    name, index = broker.coordinators.partition_of(GROUPS, "g")
    await cluster.place(name, index, PartitionImage(3, 1, (3, 1), (3, 1)))
    fields = {"key": "g"} if version < 4 else {"coordinator_keys": ["g"]}

    async def found() -> Any:
        answer = await ask(broker, "FindCoordinator", version, **fields)
        return answer if version < 4 else answer.coordinators[0]

    led = await found()
    assert (led.error_code, led.node_id, led.host, led.port) == (ErrorCode.none, 3, "host3", 9003)
    await cluster.kill(3)
    dead = await found()
    assert (dead.error_code, dead.node_id) == (ErrorCode.coordinator_not_available, -1)
