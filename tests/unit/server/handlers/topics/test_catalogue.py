"""CreateTopics, DeleteTopics and CreatePartitions, in every version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from tidemill.control.commands import CreateTopic, RegisterNode
from tidemill.errors import ErrorCode
from tidemill.records.record import Record, build_batch
from tidemill.replication.coordinator_log import wait_committed
from tidemill.server.broker import Broker
from tidemill.server.coordinators.groups import GROUPS
from tidemill.wire.apis import APIS_BY_NAME

Ask = Callable[..., Awaitable[Any]]
MakeBroker = Callable[..., Awaitable[Broker]]
VERSIONS = {name: api.versions for name, api in APIS_BY_NAME.items()}


def wanted(name: str, partitions: int = 1, replication: int = 1, **fields: Any) -> dict[str, Any]:
    return {"name": name, "num_partitions": partitions, "replication_factor": replication, **fields}


def assigned(name: str, *replicas: tuple[int, tuple[int, ...]]) -> dict[str, Any]:
    assignments = [{"partition_index": index, "broker_ids": nodes} for index, nodes in replicas]
    return wanted(name, -1, -1, assignments=assignments)


def config(name: str, value: str | None) -> dict[str, Any]:
    return {"name": name, "value": value}


async def create(broker: Broker, name: str, partitions: int = 1, **fields: Any) -> Any:
    if "assignments" not in fields:
        fields["partitions"] = partitions
    return await broker.controller.submit(CreateTopic(name=name, topic_id=uuid4(), **fields))


async def add_node(broker: Broker) -> None:
    await broker.controller.submit(
        RegisterNode(node_id=2, name="node-2", host="elsewhere", port=7, incarnation=uuid4())
    )


# --- CreateTopics


@pytest.mark.parametrize("version", VERSIONS["CreateTopics"])
async def test_create_topics_creates(broker: Broker, ask: Ask, version: int) -> None:
    topics = [wanted("events", 3, configs=[config("retention.ms", "1000")])]
    answer = await ask(broker, "CreateTopics", version, topics=topics, timeout=1000, validate_only=False)
    (result,) = answer.topics
    assert (result.name, result.error_code, result.error_message) == ("events", ErrorCode.none, None)
    created = broker.image.topics["events"]
    assert (len(created.partitions), dict(created.configs)) == (3, {"retention.ms": "1000"})
    if version >= 5:
        assert (result.num_partitions, result.replication_factor) == (3, 1)
        assert result.topic_config_error_code == 0
        shown = {each.name: each for each in result.configs}
        assert (shown["retention.ms"].value, shown["retention.ms"].config_source) == ("1000", 1)
        assert (shown["segment.ms"].value, shown["segment.ms"].config_source) == ("604800000", 5)
        assert not shown["segment.ms"].read_only
    if version >= 7:
        assert result.topic_id == created.id


@pytest.mark.parametrize("version", VERSIONS["CreateTopics"])
async def test_create_topics_only_validates(broker: Broker, ask: Ask, version: int) -> None:
    topics = [wanted("good", 2), wanted("bad", 0)]
    answer = await ask(broker, "CreateTopics", version, topics=topics, validate_only=True)
    good, bad = answer.topics
    assert (good.error_code, bad.error_code) == (ErrorCode.none, ErrorCode.invalid_partitions)
    if version >= 5:
        assert good.num_partitions == 2
    assert not broker.image.topics


async def test_create_topics_takes_the_nodes_defaults(make_broker: MakeBroker, ask: Ask) -> None:
    broker = await make_broker(default_partitions=4, topic_defaults={"retention.ms": "5"})
    answer = await ask(broker, "CreateTopics", 5, topics=[wanted("events", -1, -1)])
    (result,) = answer.topics
    assert (result.num_partitions, result.replication_factor) == (4, 1)
    shown = {each.name: each for each in result.configs}
    assert (shown["retention.ms"].value, shown["retention.ms"].config_source) == ("5", 4)
    assert not broker.image.topics["events"].configs


@pytest.mark.parametrize("version", VERSIONS["CreateTopics"])
async def test_create_topics_places_by_assignment(broker: Broker, ask: Ask, version: int) -> None:
    await add_node(broker)
    topics = [assigned("events", (1, (2, 1)), (0, (1, 2)))]
    answer = await ask(broker, "CreateTopics", version, topics=topics)
    assert answer.topics[0].error_code is ErrorCode.none
    assert [each.replicas for each in broker.image.topics["events"].partitions] == [(1, 2), (2, 1)]


@pytest.mark.parametrize("version", VERSIONS["CreateTopics"])
@pytest.mark.parametrize(
    ("topic", "code", "word"),
    [
        (wanted("there"), ErrorCode.topic_already_exists, "exists"),
        (wanted("bad name"), ErrorCode.invalid_topic_exception, "bad name"),
        (wanted("x" * 20_000), ErrorCode.invalid_topic_exception, "20000"),
        (wanted("the.re", 1, configs=[]), ErrorCode.none, ""),
        (wanted(GROUPS.topic), ErrorCode.invalid_request, "internal"),
        (wanted("__cluster_metadata"), ErrorCode.invalid_request, "internal"),
        (wanted("t", 0), ErrorCode.invalid_partitions, "0 partitions"),
        (wanted("t", -2), ErrorCode.invalid_partitions, "-2 partitions"),
        (wanted("t", 1, 0), ErrorCode.invalid_replication_factor, "0 replicas"),
        (wanted("t", 1, 2), ErrorCode.invalid_replication_factor, "1 nodes"),
        (wanted("t", 10_001), ErrorCode.invalid_partitions, "limit"),
        (wanted("t", configs=[config("retention.mz", "1")]), ErrorCode.invalid_config, "retention.ms"),
        (wanted("t", configs=[config("retention.ms", "x")]), ErrorCode.invalid_config, "retention.ms"),
        (wanted("t", configs=[config("retention.ms", None)]), ErrorCode.invalid_config, "no value"),
        (assigned("t", (0, (9,))), ErrorCode.invalid_replica_assignment, "9"),
        (assigned("t", (1, (1,))), ErrorCode.invalid_replica_assignment, "0, 1"),
        (assigned("t", (0, (1,)), (0, (1,))), ErrorCode.invalid_replica_assignment, "once"),
        ({**assigned("t", (0, (1,))), "num_partitions": 1}, ErrorCode.invalid_request, "must be -1"),
        ({**assigned("t", (0, (1,))), "replication_factor": 1}, ErrorCode.invalid_request, "must be -1"),
    ],
)
async def test_create_topics_refuses_one_and_creates_the_others(
    broker: Broker, ask: Ask, version: int, topic: dict[str, Any], code: ErrorCode, word: str
) -> None:
    await create(broker, "there")
    answer = await ask(broker, "CreateTopics", version, topics=[topic, wanted("good")])
    bad, good = answer.topics
    assert bad.error_code is code
    assert word in (bad.error_message or "")
    assert (good.name, good.error_code) == ("good", ErrorCode.none)
    assert set(broker.image.topics) == {"there", "good"} | ({bad.name} if code is ErrorCode.none else set())


async def test_create_topics_refuses_a_topic_named_twice(broker: Broker, ask: Ask) -> None:
    topics = [wanted("a"), wanted("b"), wanted("a", 2)]
    answer = await ask(broker, "CreateTopics", 7, topics=topics)
    assert [(each.name, each.error_code) for each in answer.topics] == [
        ("a", ErrorCode.invalid_request),
        ("b", ErrorCode.none),
    ]
    assert list(broker.image.topics) == ["b"]


async def test_create_topics_answers_when_the_metadata_store_is_gone(broker: Broker, ask: Ask) -> None:
    await broker.controller.stop()
    answer = await ask(broker, "CreateTopics", 7, topics=[wanted("a"), wanted("b", 0)])
    assert [each.error_code for each in answer.topics] == [ErrorCode.broker_not_available] * 2


# --- CreatePartitions


@pytest.mark.parametrize("version", VERSIONS["CreatePartitions"])
async def test_create_partitions_adds(broker: Broker, ask: Ask, version: int) -> None:
    await add_node(broker)
    await create(broker, "a")
    await create(broker, "b", assignments=((1,),))
    topics = [
        {"name": "a", "count": 3, "assignments": None},
        {"name": "b", "count": 2, "assignments": [{"broker_ids": [2]}]},
    ]
    answer = await ask(broker, "CreatePartitions", version, topics=topics, validate_only=False)
    assert [(each.name, each.error_code) for each in answer.results] == [
        ("a", ErrorCode.none),
        ("b", ErrorCode.none),
    ]
    assert len(broker.image.topics["a"].partitions) == 3
    assert [each.replicas for each in broker.image.topics["b"].partitions] == [(1,), (2,)]


@pytest.mark.parametrize("version", VERSIONS["CreatePartitions"])
async def test_create_partitions_only_validates(broker: Broker, ask: Ask, version: int) -> None:
    await create(broker, "a")
    topics = [{"name": "a", "count": 3, "assignments": None}, {"name": "x", "count": 3, "assignments": None}]
    answer = await ask(broker, "CreatePartitions", version, topics=topics, validate_only=True)
    codes = [each.error_code for each in answer.results]
    assert codes == [ErrorCode.none, ErrorCode.unknown_topic_or_partition]
    assert len(broker.image.topics["a"].partitions) == 1


@pytest.mark.parametrize("version", VERSIONS["CreatePartitions"])
@pytest.mark.parametrize(
    ("name", "count", "assignments", "code"),
    [
        ("a", 2, None, ErrorCode.invalid_partitions),
        ("a", 1, None, ErrorCode.invalid_partitions),
        ("a", 10_001, None, ErrorCode.invalid_partitions),
        ("a", 3, [], ErrorCode.invalid_replica_assignment),
        ("a", 3, [{"broker_ids": [9]}], ErrorCode.invalid_replica_assignment),
        ("x" * 32_760, 3, None, ErrorCode.unknown_topic_or_partition),
        (GROUPS.topic, 30, None, ErrorCode.invalid_topic_exception),
    ],
)
async def test_create_partitions_refuses_one_and_grows_the_others(
    broker: Broker, ask: Ask, version: int, name: str, count: int, assignments: Any, code: ErrorCode
) -> None:
    await broker.coordinators.ensure_topic(GROUPS)
    await create(broker, "a", 2)
    await create(broker, "good")
    topics = [
        {"name": name, "count": count, "assignments": assignments},
        {"name": "good", "count": 2, "assignments": None},
    ]
    answer = await ask(broker, "CreatePartitions", version, topics=topics, validate_only=False)
    bad, good = answer.results
    assert (bad.name, bad.error_code) == (name, code)
    assert bad.error_message
    assert good.error_code is ErrorCode.none
    assert len(broker.image.topics["a"].partitions) == 2
    assert len(broker.image.topics["good"].partitions) == 2


async def test_create_partitions_refuses_a_topic_named_twice(broker: Broker, ask: Ask) -> None:
    await create(broker, "a")
    topics = [{"name": "a", "count": count, "assignments": None} for count in (2, 3)]
    answer = await ask(broker, "CreatePartitions", 3, topics=topics)
    assert [each.error_code for each in answer.results] == [ErrorCode.invalid_request]
    assert len(broker.image.topics["a"].partitions) == 1


# --- DeleteTopics


@pytest.mark.parametrize("version", VERSIONS["DeleteTopics"])
async def test_delete_topics_by_name(broker: Broker, ask: Ask, version: int) -> None:
    topic = await create(broker, "a")
    await create(broker, "kept")
    partition = broker.find.partition(topic, 0)
    partition.append(build_batch([Record(None, b"v", timestamp_ms=1)]), 1)
    await wait_committed(partition, 1)
    names = ["a", "missing"]
    answer = await ask(
        broker, "DeleteTopics", version, topic_names=names, topics=[{"name": name} for name in names]
    )
    gone, missing = answer.responses
    assert (gone.name, gone.error_code) == ("a", ErrorCode.none)
    assert (missing.name, missing.error_code) == ("missing", ErrorCode.unknown_topic_or_partition)
    if version >= 5:
        assert gone.error_message is None
        assert "missing" in missing.error_message
    if version >= 6:
        assert gone.topic_id == topic.id
    assert list(broker.image.topics) == ["kept"]
    assert broker.replicas.peek(topic.id, 0) is None


async def test_delete_topics_by_id(broker: Broker, ask: Ask) -> None:
    topic = await create(broker, "a")
    unknown = uuid4()
    topics = [{"name": None, "topic_id": topic.id}, {"name": None, "topic_id": unknown}]
    answer = await ask(broker, "DeleteTopics", 6, topics=topics)
    gone, missing = answer.responses
    assert (gone.name, gone.topic_id, gone.error_code) == ("a", topic.id, ErrorCode.none)
    assert (missing.name, missing.topic_id) == (None, unknown)
    assert missing.error_code is ErrorCode.unknown_topic_id
    assert not broker.image.topics


@pytest.mark.parametrize("by_id", [False, True])
async def test_of_two_who_delete_a_topic_at_the_same_time_one_is_told_that_it_is_gone(
    broker: Broker, ask: Ask, *, by_id: bool
) -> None:
    topic = await create(broker, "a")
    named = {"name": None, "topic_id": topic.id} if by_id else {"name": "a"}
    answers = await asyncio.gather(*(ask(broker, "DeleteTopics", 6, topics=[named]) for _ in range(2)))
    gone = ErrorCode.unknown_topic_id if by_id else ErrorCode.unknown_topic_or_partition
    assert sorted(each.responses[0].error_code for each in answers) == [ErrorCode.none, gone]
    assert broker.replicas.peek(topic.id, 0) is None


async def test_delete_topics_refuses_what_is_named_badly_and_deletes_the_rest(
    broker: Broker, ask: Ask
) -> None:
    a = await create(broker, "a")
    b = await create(broker, "b")
    c = await create(broker, "c")
    await create(broker, "d")
    topics = [
        {"name": None, "topic_id": None},
        {"name": "a", "topic_id": a.id},
        {"name": "b"},
        {"name": None, "topic_id": b.id},
        {"name": None, "topic_id": c.id},
        {"name": None, "topic_id": c.id},
        {"name": "d"},
    ]
    answer = await ask(broker, "DeleteTopics", 6, topics=topics)
    codes = [each.error_code for each in answer.responses]
    assert codes == [ErrorCode.invalid_request] * 5 + [ErrorCode.none]
    assert sorted(broker.image.topics) == ["a", "b", "c"]


@pytest.mark.parametrize("version", VERSIONS["DeleteTopics"])
async def test_delete_topics_refuses_internal_topics_and_repeated_names(
    broker: Broker, ask: Ask, version: int
) -> None:
    await broker.coordinators.ensure_topic(GROUPS)
    await create(broker, "a")
    names = [GROUPS.topic, "a", "a"]
    answer = await ask(
        broker, "DeleteTopics", version, topic_names=names, topics=[{"name": name} for name in names]
    )
    codes = [each.error_code for each in answer.responses]
    assert codes == [ErrorCode.invalid_topic_exception, ErrorCode.invalid_request]
    assert sorted(broker.image.topics) == [GROUPS.topic, "a"]


async def test_delete_topics_forgets_what_groups_committed(broker: Broker, ask: Ask) -> None:
    await create(broker, "a")
    partitions = [{"partition_index": 0, "committed_offset": 5}]
    await ask(
        broker,
        "OffsetCommit",
        8,
        group_id="g",
        topics=[{"name": "a", "partitions": partitions}],
        member_id="",
    )
    await ask(broker, "DeleteTopics", 6, topics=[{"name": "a"}])
    left = await ask(broker, "OffsetFetch", 7, group_id="g", topics=None)
    assert left.topics == ()
