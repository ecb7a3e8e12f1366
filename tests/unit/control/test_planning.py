from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import pytest

from tidemill.control.commands import (
    AllocateProducerIds,
    BumpLeaderEpochs,
    Command,
    CreatePartitions,
    CreateTopic,
    DeleteTopic,
    Election,
    ElectLeaders,
    RegisterNode,
    SetClusterId,
    SetGroupConfigs,
    SetNodeConfigs,
    SetTopicConfigs,
    new_cluster_id,
)
from tidemill.control.image import MetadataImage
from tidemill.control.placement import ControlLimits
from tidemill.control.planning import plan
from tidemill.control.records import PartitionImage, PartitionsRecord, chunk_key, encode
from tidemill.control.stores.store import TXN_OPERATIONS_MAX, Change, ChangeBatch
from tidemill.errors import ApiError, ErrorCode, MetadataConflict

LIMITS = ControlLimits(partitions_per_topic=5_000, partitions_per_node=8_000)


def write(image: MetadataImage, writes: Any) -> MetadataImage:
    changes = tuple(Change(key, writes[key]) for key in sorted(writes))
    return image.apply(ChangeBatch(image.revision + 1, changes)) if changes else image


def run(image: MetadataImage, *commands: Command[Any]) -> MetadataImage:
    for command in commands:
        image = write(image, plan(image, command, LIMITS).writes)
    return image


def refusal(image: MetadataImage, command: Command[Any]) -> ErrorCode:
    with pytest.raises(ApiError) as caught:
        plan(image, command, LIMITS)
    return caught.value.code


def register(node_id: int, **changes: Any) -> RegisterNode:
    fields = {"name": f"n{node_id}", "host": "localhost", "port": 9092, "incarnation": UUID(int=1)}
    return RegisterNode(node_id=node_id, **{**fields, **changes})


def create(name: str, partitions: int = 1, replication: int = 1, **fields: Any) -> CreateTopic:
    topic_id = UUID(int=sum(name.encode()) * 1_000 + len(name))
    return CreateTopic(name=name, topic_id=topic_id, partitions=partitions, replication=replication, **fields)


ONE = run(MetadataImage(), register(0))
THREE = run(ONE, register(1), register(2))
WITH_T = run(THREE, create("t.1", 3, 2, configs={"retention.ms": "5"}))


def test_a_created_topic_is_in_the_image_with_its_leaders() -> None:
    topic = WITH_T.topics["t.1"]
    assert plan(THREE, create("t.1", 3, 2, configs={"retention.ms": "5"}), LIMITS).result == topic
    assert WITH_T.topic_by_id(topic.id) is topic
    assert topic.configs == {"retention.ms": "5"}
    assert not topic.internal
    assert [p.leader for p in topic.partitions] == [0, 1, 2]
    assert all(p.leader_epoch == 0 and p.isr == p.replicas and len(p.replicas) == 2 for p in topic.partitions)
    assert WITH_T.replica_counts == {0: 2, 1: 2, 2: 2}


def test_internal_topics_are_marked() -> None:
    assert run(ONE, create("__consumer_offsets")).topics["__consumer_offsets"].internal


def test_assignments_are_kept_as_given() -> None:
    command = CreateTopic(name="m", topic_id=UUID(int=9), assignments=((2, 0), (1, 2)))
    topic = run(THREE, command).topics["m"]
    assert [(p.leader, p.replicas) for p in topic.partitions] == [(2, (2, 0)), (1, (1, 2))]


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (create("a b"), ErrorCode.invalid_topic_exception),
        (CreateTopic(name="t.1", topic_id=UUID(int=8)), ErrorCode.topic_already_exists),
        (create("t_1"), ErrorCode.invalid_topic_exception),
        (create("n", 0), ErrorCode.invalid_partitions),
        (create("n", -3), ErrorCode.invalid_partitions),
        (create("n", 5_001), ErrorCode.invalid_partitions),
        (create("n", 1, 0), ErrorCode.invalid_replication_factor),
        (create("n", 1, 4), ErrorCode.invalid_replication_factor),
        (CreateTopic(name="n", topic_id=UUID(int=0), partitions=1), ErrorCode.invalid_request),
        (
            CreateTopic(name="n", topic_id=UUID(int=8), partitions=1, assignments=((0,),)),
            ErrorCode.invalid_request,
        ),
        (
            CreateTopic(name="n", topic_id=UUID(int=8), assignments=((7,),)),
            ErrorCode.invalid_replica_assignment,
        ),
    ],
)
def test_topics_that_kafka_would_not_create(command: CreateTopic, code: ErrorCode) -> None:
    assert refusal(WITH_T, command) is code


def test_a_topic_that_exists_with_the_same_id_is_the_one_that_was_asked_for() -> None:
    repeated = plan(WITH_T, create("t.1", 3, 2), LIMITS)
    assert repeated.result == WITH_T.topics["t.1"]
    assert not repeated.writes


def test_a_topic_id_is_not_used_twice() -> None:
    taken = WITH_T.topics["t.1"].id
    assert refusal(WITH_T, CreateTopic(name="n", topic_id=taken, partitions=1)) is ErrorCode.invalid_request


def test_a_node_takes_only_so_many_partitions() -> None:
    image = run(ONE, create("a", 5_000), create("b", 3_000))
    assert refusal(image, create("c", 1)) is ErrorCode.policy_violation
    assert refusal(image, CreatePartitions(name="b", new_count=3_001)) is ErrorCode.policy_violation
    assert plan(run(image, DeleteTopic(name="b")), create("c", 3_000), LIMITS).writes


def test_the_largest_topic_is_created_changed_and_deleted_within_one_transaction_each() -> None:
    limits = ControlLimits(partitions_per_topic=50_000, partitions_per_node=50_000)
    creation = plan(ONE, create("big", 50_000), limits)
    image = write(ONE, creation.writes)
    every = tuple(range(50_000))
    for planned in (
        creation,
        plan(image, BumpLeaderEpochs(name="big", partitions=every), limits),
        plan(image, DeleteTopic(name="big"), limits),
    ):
        assert len(planned.writes) + len(planned.guards) <= TXN_OPERATIONS_MAX
        assert all(value is None or len(value) < 64 * 1024 for value in planned.writes.values())
    assert image.replica_counts == {0: 50_000}


def test_a_deleted_topic_leaves_no_key() -> None:
    image = run(WITH_T, DeleteTopic(name="t.1"))
    assert not image.topics
    assert not image.topic_names_by_id
    assert not image.replica_counts
    assert set(image.key_revisions) == {"nodes/0", "nodes/1", "nodes/2"}


def test_deleting_by_id_refuses_another_topic_of_that_name() -> None:
    assert refusal(WITH_T, DeleteTopic(name="t.1", topic_id=UUID(int=3))) is ErrorCode.unknown_topic_id


@pytest.mark.parametrize(
    "command",
    [
        DeleteTopic(name="no"),
        CreatePartitions(name="no", new_count=2),
        SetTopicConfigs(name="no", configs={}),
        BumpLeaderEpochs(name="no", partitions=(0,)),
        BumpLeaderEpochs(name="t.1", partitions=(3,)),
        ElectLeaders(name="no", partitions=(0,)),
        DeleteTopic(name="t_1"),
    ],
)
def test_what_is_not_there_is_unknown(command: Command[Any]) -> None:
    assert refusal(WITH_T, command) is ErrorCode.unknown_topic_or_partition


def test_added_partitions_keep_the_old_ones_and_the_replication() -> None:
    grown = run(WITH_T, CreatePartitions(name="t.1", new_count=1_500)).topics["t.1"]
    assert grown.partitions[:3] == WITH_T.topics["t.1"].partitions
    assert len(grown.partitions) == 1_500
    assert all(len(p.replicas) == 2 for p in grown.partitions)
    again = run(
        WITH_T, CreatePartitions(name="t.1", new_count=1_500), CreatePartitions(name="t.1", new_count=2_001)
    )
    assert again.topics["t.1"].partitions[:1_500] == grown.partitions


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (CreatePartitions(name="t.1", new_count=3), ErrorCode.invalid_partitions),
        (CreatePartitions(name="t.1", new_count=2), ErrorCode.invalid_partitions),
        (CreatePartitions(name="t.1", new_count=5_001), ErrorCode.invalid_partitions),
        (
            CreatePartitions(name="t.1", new_count=5, assignments=((0, 1),)),
            ErrorCode.invalid_replica_assignment,
        ),
        (
            CreatePartitions(name="t.1", new_count=4, assignments=((0,),)),
            ErrorCode.invalid_replica_assignment,
        ),
        (
            CreatePartitions(name="t.1", new_count=4, assignments=((0, 9),)),
            ErrorCode.invalid_replica_assignment,
        ),
    ],
)
def test_partitions_that_kafka_would_not_add(command: CreatePartitions, code: ErrorCode) -> None:
    assert refusal(WITH_T, command) is code


def test_configs_are_replaced_as_a_whole() -> None:
    image = run(WITH_T, SetTopicConfigs(name="t.1", configs={"segment.bytes": "9"}))
    assert image.topics["t.1"].configs == {"segment.bytes": "9"}
    assert image.topics["t.1"].partitions == WITH_T.topics["t.1"].partitions


def test_configs_made_from_an_old_base_are_a_conflict() -> None:
    stale = SetTopicConfigs(name="t.1", configs={"a": "1"}, base={})
    with pytest.raises(MetadataConflict, match=r"t\.1"):
        plan(WITH_T, stale, LIMITS)
    fresh = SetTopicConfigs(name="t.1", configs={"a": "1"}, base={"retention.ms": "5"})
    assert run(WITH_T, fresh).topics["t.1"].configs == {"a": "1"}


def test_node_configs_of_one_node_and_of_all() -> None:
    image = run(
        THREE,
        SetNodeConfigs(node_id=1, configs={"a": "1"}),
        SetNodeConfigs(node_id=None, configs={"b": "2"}),
        SetNodeConfigs(node_id=2, configs={"c": "3"}),
        SetNodeConfigs(node_id=2, configs={}, base={"c": "3"}),
    )
    assert image.node_configs == {1: {"a": "1"}, None: {"b": "2"}}
    assert refusal(THREE, SetNodeConfigs(node_id=9, configs={})) is ErrorCode.broker_id_not_registered


def test_configs_of_groups_are_kept_by_group_until_none_is_left() -> None:
    image = run(
        THREE,
        SetGroupConfigs(group_id="a/b", configs={"x": "1"}),
        SetGroupConfigs(group_id="c", configs={"y": "2"}, base={}),
        SetGroupConfigs(group_id="c", configs={}, base={"y": "2"}),
    )
    assert dict(image.group_configs) == {"a/b": {"x": "1"}}
    with pytest.raises(MetadataConflict, match="a/b"):
        plan(image, SetGroupConfigs(group_id="a/b", configs={}, base={}), LIMITS)
    for group_id in ("", "g" * 1025):
        assert refusal(image, SetGroupConfigs(group_id=group_id, configs={})) is ErrorCode.invalid_group_id


def test_a_node_comes_back_with_a_new_incarnation_but_not_under_another_name_or_number() -> None:
    back = run(THREE, register(1, port=9999, incarnation=UUID(int=77)))
    assert (back.nodes[1].port, back.nodes[1].incarnation) == (9999, UUID(int=77))
    assert refusal(THREE, register(1, name="other")) is ErrorCode.duplicate_broker_registration
    assert refusal(THREE, register(5, name="n1")) is ErrorCode.duplicate_broker_registration


def test_the_cluster_is_named_once() -> None:
    first, second = new_cluster_id(uuid4()), new_cluster_id(uuid4())
    assert len(first) == 22
    assert first != second
    image = run(ONE, SetClusterId(cluster_id=first), SetClusterId(cluster_id=first))
    assert image.cluster_id == first
    assert refusal(image, SetClusterId(cluster_id=second)) is ErrorCode.inconsistent_cluster_id


def test_no_producer_id_is_given_twice() -> None:
    image = ONE
    given: list[int] = []
    for count in (1_000, 5, 1_000):
        planned = plan(image, AllocateProducerIds(count=count), LIMITS)
        given += range(planned.result, planned.result + count)
        image = write(image, planned.writes)
    assert len(set(given)) == len(given) == 2_005
    assert image.next_producer_id == 2_005
    assert refusal(image, AllocateProducerIds(count=0)) is ErrorCode.invalid_request
    assert refusal(image, AllocateProducerIds(count=2**63)) is ErrorCode.invalid_request


def test_bumping_raises_the_epoch_of_the_partitions_that_a_node_leads_and_of_no_other() -> None:
    image = run(WITH_T, create("u", 2, 1))
    bumped = image
    for name, topic in image.topics.items():
        led = tuple(index for index, partition in enumerate(topic.partitions) if partition.leader == 1)
        bumped = run(bumped, BumpLeaderEpochs(name=name, partitions=led))
    for name, topic in image.topics.items():
        for was, now in zip(topic.partitions, bumped.topics[name].partitions, strict=True):
            assert now.leader == was.leader
            assert now.leader_epoch == was.leader_epoch + (was.leader == 1)


def led_by(*partitions: PartitionImage) -> MetadataImage:
    """WITH_T with other partition states, as an earlier leader change left them."""
    key = chunk_key(WITH_T.topics["t.1"].id, 0)
    return write(WITH_T, {key: encode(PartitionsRecord(partitions=partitions))})


def test_the_preferred_leader_is_elected_if_it_is_in_sync() -> None:
    image = led_by(
        PartitionImage(1, 4, (0, 1), (0, 1)),
        PartitionImage(2, 4, (1, 2), (2,)),
        PartitionImage(2, 4, (2, 0), (2,)),
    )
    planned = plan(image, ElectLeaders(name="t.1", partitions=(0, 1, 2, 3)), LIMITS)
    assert planned.result == {
        0: ErrorCode.none,
        1: ErrorCode.preferred_leader_not_available,
        2: ErrorCode.election_not_needed,
        3: ErrorCode.unknown_topic_or_partition,
    }
    after = write(image, planned.writes).topics["t.1"].partitions
    assert after[0] == PartitionImage(0, 5, (0, 1), (0, 1), partition_epoch=1)
    assert after[1:] == image.topics["t.1"].partitions[1:]


def test_an_unclean_election_changes_no_partition_that_has_a_leader() -> None:
    image = led_by(
        PartitionImage(1, 4, (0, 1), (0, 1)),
        PartitionImage(-1, 4, (1, 2), (2,)),
        PartitionImage(2, 4, (2, 0), (2,)),
    )
    command = ElectLeaders(name="t.1", partitions=(0, 1), election=Election.UNCLEAN)
    planned = plan(image, command, LIMITS)
    assert planned.result == {
        0: ErrorCode.election_not_needed,
        1: ErrorCode.eligible_leaders_not_available,
    }
    assert not planned.writes


@pytest.mark.parametrize(
    "command",
    [
        create("new"),
        DeleteTopic(name="t.1"),
        CreatePartitions(name="t.1", new_count=4),
        SetTopicConfigs(name="t.1", configs={}),
        BumpLeaderEpochs(name="t.1", partitions=(0,)),
        AllocateProducerIds(),
        SetClusterId(cluster_id="x"),
        register(1, port=1),
        SetNodeConfigs(node_id=None, configs={"a": "b"}),
    ],
)
def test_every_plan_is_guarded_by_the_revisions_that_it_saw(command: Command[Any]) -> None:
    planned = plan(WITH_T, command, LIMITS)
    assert planned.guards
    assert all(WITH_T.key_revision(key) == revision for key, revision in planned.guards.items())
    unguarded = planned.writes.keys() - planned.guards.keys()
    assert all(key.startswith("partitions/") for key in unguarded)


@pytest.mark.parametrize(
    "command",
    [
        SetTopicConfigs(name="t.1", configs={"retention.ms": "5"}),
        register(1),
        SetNodeConfigs(node_id=1, configs={}),
    ],
)
def test_a_command_that_changes_nothing_writes_nothing(command: Command[Any]) -> None:
    assert not plan(WITH_T, command, LIMITS).writes
