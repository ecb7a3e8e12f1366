"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs and DescribeLogDirs, in every version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tidemill.config.broker_keys import BROKER_KEYS, FOLLOWER_RATE, LEADER_RATE
from tidemill.config.group_keys import GROUP_KEYS
from tidemill.config.kafka_names import BROKER_CONFIGS, BROKER_CONFIGS_OF_TOPICS
from tidemill.config.settings import SETTINGS
from tidemill.config.topic_keys import TOPIC_KEYS
from tidemill.control.commands import CreateTopic, SetTopicConfigs
from tidemill.errors import ErrorCode
from tidemill.records.record import Record, build_batch
from tidemill.replication.coordinator_log import wait_committed
from tidemill.server.broker import Broker
from tidemill.wire.apis import APIS_BY_NAME

Ask = Callable[..., Awaitable[Any]]
MakeBroker = Callable[..., Awaitable[Broker]]
VERSIONS = {name: api.versions for name, api in APIS_BY_NAME.items()}

TOPIC, BROKER, BROKER_LOGGER, CLIENT_METRICS, GROUP = 2, 4, 8, 16, 32
SET, DELETE, APPEND, SUBTRACT = 0, 1, 2, 3


def resource(kind: int, name: str, keys: list[str] | None = None) -> dict[str, Any]:
    return {"resource_type": kind, "resource_name": name, "configuration_keys": keys}


def change(name: str, op: int, value: str | None = None) -> dict[str, Any]:
    return {"name": name, "config_operation": op, "value": value}


def altered(kind: int, name: str, *configs: dict[str, Any]) -> dict[str, Any]:
    return {"resource_type": kind, "resource_name": name, "configs": configs}


async def create(broker: Broker, name: str, partitions: int = 1, **configs: str) -> Any:
    overrides = {key.replace("_", "."): value for key, value in configs.items()}
    return await broker.controller.submit(
        CreateTopic(name=name, topic_id=uuid4(), partitions=partitions, configs=overrides)
    )


# --- DescribeConfigs


@pytest.mark.parametrize("version", VERSIONS["DescribeConfigs"])
async def test_describe_configs_of_a_topic(make_broker: MakeBroker, ask: Ask, version: int) -> None:
    broker = await make_broker(topic_defaults={"segment.ms": "77"})
    await create(broker, "a", retention_ms="1000")
    answer = await ask(broker, "DescribeConfigs", version, resources=[resource(TOPIC, "a")])
    (result,) = answer.results
    assert (result.error_code, result.resource_type, result.resource_name) == (ErrorCode.none, TOPIC, "a")
    shown = {each.name: each for each in result.configs}
    assert set(shown) == {name for name, key in TOPIC_KEYS.items() if not key.internal}
    values = {name: (each.value, each.config_source) for name, each in shown.items()}
    assert values["retention.ms"] == ("1000", 1)
    assert values["segment.ms"] == ("77", 4)
    assert values["retention.bytes"] == ("-1", 5)
    assert not any(each.read_only or each.is_sensitive or each.synonyms for each in result.configs)
    if version >= 3:
        assert (shown["retention.ms"].config_type, shown["cleanup.policy"].config_type) == (5, 7)
        assert shown["retention.ms"].documentation is None


@pytest.mark.parametrize("version", VERSIONS["DescribeConfigs"])
async def test_describe_configs_with_synonyms_and_documentation(
    make_broker: MakeBroker, ask: Ask, version: int
) -> None:
    broker = await make_broker(topic_defaults={"retention.ms": "77"})
    await create(broker, "a", retention_ms="1000")
    asked = [resource(TOPIC, "a", ["retention.ms", "preallocate", "no.such.config"])]
    answer = await ask(
        broker,
        "DescribeConfigs",
        version,
        resources=asked,
        include_synonyms=True,
        include_documentation=True,
    )
    inert, retention = answer.results[0].configs
    assert (inert.name, retention.name) == ("preallocate", "retention.ms")
    assert [(each.value, each.source) for each in retention.synonyms] == [
        ("1000", 1),
        ("77", 4),
        ("604800000", 5),
    ]
    if version >= 3:
        assert "no effect" in inert.documentation
        assert "no effect" not in retention.documentation


async def test_describe_configs_shows_an_internal_config_only_where_it_is_set(
    broker: Broker, ask: Ask
) -> None:
    await create(broker, "a", internal_segment_bytes="100")
    answer = await ask(broker, "DescribeConfigs", 4, resources=[resource(TOPIC, "a")])
    shown = {each.name: each.value for each in answer.results[0].configs}
    assert shown["internal.segment.bytes"] == "100"


@pytest.mark.parametrize("version", VERSIONS["DescribeConfigs"])
async def test_describe_configs_of_the_node(make_broker: MakeBroker, ask: Ask, version: int) -> None:
    broker = await make_broker(auto_create_topics=False, topic_defaults={"retention.ms": "77"})
    answer = await ask(
        broker, "DescribeConfigs", version, resources=[resource(BROKER, "1")], include_synonyms=True
    )
    (result,) = answer.results
    assert result.error_code is ErrorCode.none
    shown = {each.name: each for each in result.configs}
    kafka = {each.name for each in BROKER_CONFIGS} | set(BROKER_CONFIGS_OF_TOPICS)
    assert set(shown) == {info.name for info in SETTINGS} | {"topic.retention.ms"} | kafka | set(BROKER_KEYS)
    assert len(shown) == len(result.configs), "each name once"
    assert {each.name for each in result.configs if not each.read_only} == set(BROKER_KEYS)
    flag = shown["auto_create_topics"]
    assert (flag.value, flag.config_source) == ("false", 4)
    assert [(each.value, each.source) for each in flag.synonyms] == [("false", 4), ("true", 5)]
    assert (shown["default_partitions"].value, shown["default_partitions"].config_source) == ("1", 5)
    assert (shown["topic.retention.ms"].value, shown["topic.retention.ms"].config_source) == ("77", 4)
    if version >= 3:
        assert (flag.config_type, shown["default_partitions"].config_type) == (1, 3)


@pytest.mark.parametrize("version", VERSIONS["DescribeConfigs"])
async def test_configs_of_the_node_are_found_under_kafkas_names(
    make_broker: MakeBroker, ask: Ask, version: int
) -> None:
    broker = await make_broker(
        auto_create_topics=False, default_partitions=3, topic_defaults={"max.message.bytes": "5000"}
    )
    expected = {
        "auto.create.topics.enable": ("false", 4, 1),
        "default.replication.factor": ("1", 4, 3),
        "log.retention.ms": ("604800000", 5, 5),
        "log.segment.bytes": ("1073741824", 5, 3),
        "max.connections.per.ip": (str(2**31 - 1), 5, 3),
        "message.max.bytes": ("5000", 4, 3),
        "num.partitions": ("3", 4, 3),
        "offsets.topic.num.partitions": ("2", 4, 3),
        "socket.request.max.bytes": ("104857600", 5, 3),
    }
    more = {"include_documentation": True} if version >= 3 else {}
    answer = await ask(
        broker,
        "DescribeConfigs",
        version,
        resources=[resource(BROKER, "1", list(expected))],
        include_synonyms=True,
        **more,
    )
    shown = {each.name: each for each in answer.results[0].configs}
    assert {name: (each.value, each.config_source) for name, each in shown.items()} == {
        name: (value, source) for name, (value, source, _) in expected.items()
    }
    assert all(each.read_only for each in shown.values())
    synonyms = [(each.name, each.value, each.source) for each in shown["num.partitions"].synonyms]
    assert synonyms == [("default_partitions", "3", 4), ("default_partitions", "1", 5)]
    if version >= 3:
        assert {name: each.config_type for name, each in shown.items()} == {
            name: kind for name, (_, _, kind) in expected.items()
        }
        assert "Set it as default_partitions." in shown["num.partitions"].documentation
        assert "Set it as topic.max.message.bytes." in shown["message.max.bytes"].documentation


@pytest.mark.parametrize("version", VERSIONS["DescribeConfigs"])
async def test_configs_that_a_group_does_not_set_are_the_nodes_and_there_are_no_client_metrics(
    make_broker: MakeBroker, ask: Ask, version: int
) -> None:
    broker = await make_broker(group_consumer_session_timeout_ms=50_000)
    asked = [
        resource(GROUP, "g"),
        resource(CLIENT_METRICS, "any"),
        resource(GROUP, ""),
        resource(CLIENT_METRICS, ""),
    ]
    group, metrics, *nameless = (await ask(broker, "DescribeConfigs", version, resources=asked)).results
    shown = {each.name: (each.value, each.config_source) for each in group.configs}
    assert set(shown) == set(GROUP_KEYS)
    assert shown["consumer.heartbeat.interval.ms"] == ("5000", 5)
    assert shown["consumer.session.timeout.ms"] == ("50000", 4)
    assert shown["share.auto.offset.reset"] == ("latest", 5)
    assert (metrics.error_code, metrics.configs) == (ErrorCode.none, ())
    assert [each.error_code for each in nameless] == [ErrorCode.invalid_request] * 2


@pytest.mark.parametrize("version", VERSIONS["IncrementalAlterConfigs"])
async def test_client_metrics_are_not_altered_and_it_says_why(broker: Broker, ask: Ask, version: int) -> None:
    resources = [altered(CLIENT_METRICS, "m", change("interval.ms", SET, "1000"))]
    answer = await ask(broker, "IncrementalAlterConfigs", version, resources=resources, validate_only=False)
    assert [each.error_code for each in answer.responses] == [ErrorCode.invalid_request]
    assert "takes no metrics from clients" in answer.responses[0].error_message


@pytest.mark.parametrize("version", VERSIONS["IncrementalAlterConfigs"])
async def test_configs_of_a_group_are_changed_shown_listed_and_in_force(
    broker: Broker, ask: Ask, version: int
) -> None:
    async def alter(*changes: dict[str, Any]) -> None:
        asked = [altered(GROUP, "g/1", *changes)]
        answer = await ask(broker, "IncrementalAlterConfigs", version, resources=asked, validate_only=False)
        assert answer.responses[0].error_code is ErrorCode.none, answer

    await alter(
        change("share.auto.offset.reset", SET, "by_duration:PT1H"),
        change("share.delivery.count.limit", SET, "3"),
        change("tidemill.share.order", SET, "key"),
    )
    config = broker.group_config("g/1")
    assert (config.share_reset_duration_ms, config.share_delivery_count_limit, config.order) == (
        3_600_000,
        3,
        "key",
    )
    assert broker.group_config("other").share_delivery_count_limit == 5
    await alter(change("share.delivery.count.limit", DELETE), change("tidemill.share.order", SET, "none"))
    assert broker.group_config("g/1").share_delivery_count_limit == 5
    asked = [resource(GROUP, "g/1", ["share.auto.offset.reset", "share.delivery.count.limit"])]
    (result,) = (await ask(broker, "DescribeConfigs", 4, resources=asked)).results
    assert [(each.value, each.config_source, each.read_only) for each in result.configs] == [
        ("by_duration:PT1H", 8, False),
        ("5", 5, False),
    ]
    listed = await ask(broker, "ListConfigResources", 1, resource_types=[GROUP])
    assert [each.resource_name for each in listed.config_resources] == ["g/1"]
    replaced = await ask(broker, "AlterConfigs", 2, resources=[altered(GROUP, "g/1")], validate_only=False)
    assert replaced.responses[0].error_code is ErrorCode.none
    assert "g/1" not in broker.image.group_configs


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("share.delivery.count.limit", "11", "from 2 to 10"),
        ("share.record.lock.duration.ms", "14999", "from 15000 to 60000"),
        ("share.auto.offset.reset", "by_duration:1h", "by_duration:PT1H"),
        ("share.auto.offset.reset", "none", "latest, earliest"),
        ("share.heartbeat.interval.ms", "45000", "share.session.timeout.ms (45000)"),
        ("consumer.session.timeout.ms", "5000", "consumer.heartbeat.interval.ms (5000)"),
        ("tidemill.share.ordr", "key", "did you mean tidemill.share.order"),
        ("tidemill.share.retry.backoff.ms", "600001", "tidemill.share.retry.backoff.max.ms"),
        ("errors.deadletterqueue.topic.name", "__consumer_offsets", "does not write itself"),
        ("errors.deadletterqueue.topic.name", "a b", "the name of a topic"),
    ],
)
async def test_a_config_of_a_group_that_makes_no_sense_is_refused_and_it_says_why(
    broker: Broker, ask: Ask, name: str, value: str, said: str
) -> None:
    asked = [altered(GROUP, "g", change(name, SET, value))]
    answer = await ask(broker, "IncrementalAlterConfigs", 1, resources=asked, validate_only=False)
    assert answer.responses[0].error_code is ErrorCode.invalid_config
    assert said in answer.responses[0].error_message
    assert not broker.image.group_configs


async def test_configs_of_a_group_need_a_name_and_are_only_checked_if_the_client_says_so(
    broker: Broker, ask: Ask
) -> None:
    limit = change("share.delivery.count.limit", SET, "3")
    answer = await ask(
        broker,
        "IncrementalAlterConfigs",
        1,
        resources=[altered(GROUP, "", limit), altered(GROUP, "g", limit)],
        validate_only=True,
    )
    assert [each.error_code for each in answer.responses] == [ErrorCode.invalid_request, ErrorCode.none]
    assert not broker.image.group_configs


async def test_a_resource_named_twice_is_not_described(broker: Broker, ask: Ask) -> None:
    asked = [resource(BROKER, "1"), resource(BROKER, ""), resource(BROKER, "1")]
    answer = await ask(broker, "DescribeConfigs", 4, resources=asked)
    assert [(each.error_code, len(each.configs)) for each in answer.results] == [
        (ErrorCode.invalid_request, 0),
        (ErrorCode.none, 0),
        (ErrorCode.invalid_request, 0),
    ]


async def test_config_resources_are_listed_by_type(broker: Broker, ask: Ask) -> None:
    for name in ("b", "a"):
        await create(broker, name)
    assert (await ask(broker, "ListConfigResources", 0)).config_resources == ()

    async def listed(*kinds: int) -> list[tuple[int, str]]:
        answer = await ask(broker, "ListConfigResources", 1, resource_types=list(kinds))
        assert answer.error_code is ErrorCode.none
        return [(each.resource_type, each.resource_name) for each in answer.config_resources]

    assert await listed() == [(TOPIC, "a"), (TOPIC, "b"), (BROKER, "1")]
    assert await listed(BROKER, BROKER) == [(BROKER, "1")]
    assert await listed(CLIENT_METRICS, GROUP) == []
    unknown = await ask(broker, "ListConfigResources", 1, resource_types=[TOPIC, BROKER_LOGGER])
    assert (unknown.error_code, unknown.config_resources) == (ErrorCode.unsupported_version, ())


@pytest.mark.parametrize("version", VERSIONS["DescribeConfigs"])
async def test_describe_configs_answers_every_resource_for_itself(
    broker: Broker, ask: Ask, version: int
) -> None:
    await create(broker, "a")
    asked = [
        resource(TOPIC, "missing"),
        resource(TOPIC, "bad name"),
        resource(BROKER, "2"),
        resource(BROKER, "one"),
        resource(BROKER, ""),
        resource(BROKER_LOGGER, "1"),
        resource(0, "x"),
        resource(TOPIC, "a", ["retention.ms"]),
    ]
    answer = await ask(broker, "DescribeConfigs", version, resources=asked)
    assert [(each.error_code, len(each.configs)) for each in answer.results] == [
        (ErrorCode.unknown_topic_or_partition, 0),
        (ErrorCode.invalid_topic_exception, 0),
        (ErrorCode.invalid_request, 0),
        (ErrorCode.invalid_request, 0),
        (ErrorCode.none, 0),
        (ErrorCode.invalid_request, 0),
        (ErrorCode.invalid_request, 0),
        (ErrorCode.none, 1),
    ]
    for result in answer.results:
        assert bool(result.error_message) == (result.error_code is not ErrorCode.none)


@pytest.mark.parametrize("version", VERSIONS["DescribeConfigs"])
async def test_a_value_too_long_for_an_old_version_is_refused_there(
    broker: Broker, ask: Ask, version: int
) -> None:
    throttled = ",".join(f"{index}:1" for index in range(8_000))
    await create(broker, "a", leader_replication_throttled_replicas=throttled)
    answer = await ask(broker, "DescribeConfigs", version, resources=[resource(TOPIC, "a")])
    (result,) = answer.results
    if version < 4:
        assert result.error_code is ErrorCode.invalid_request
        assert "leader.replication.throttled.replicas" in result.error_message
    else:
        shown = {each.name: each.value for each in result.configs}
        assert shown["leader.replication.throttled.replicas"] == throttled


# --- AlterConfigs


@pytest.mark.parametrize("version", VERSIONS["AlterConfigs"])
async def test_alter_configs_replaces_everything(broker: Broker, ask: Ask, version: int) -> None:
    await create(broker, "a", retention_ms="1000", segment_ms="5")
    resources = [altered(TOPIC, "a", {"name": "retention.ms", "value": "7"})]
    answer = await ask(broker, "AlterConfigs", version, resources=resources, validate_only=False)
    (response,) = answer.responses
    assert (response.error_code, response.error_message) == (ErrorCode.none, None)
    assert (response.resource_type, response.resource_name) == (TOPIC, "a")
    assert dict(broker.image.topics["a"].configs) == {"retention.ms": "7"}


@pytest.mark.parametrize("version", VERSIONS["AlterConfigs"])
async def test_alter_configs_refuses_bad_resources_and_changes_the_others(
    broker: Broker, ask: Ask, version: int
) -> None:
    for name in ("a", "b", "good"):
        await create(broker, name, segment_ms="5")
    ok = {"name": "retention.ms", "value": "7"}
    resources = [
        altered(TOPIC, "a", ok),
        altered(TOPIC, "a", ok),
        altered(TOPIC, "missing", ok),
        altered(TOPIC, "b", ok, ok),
        altered(BROKER, "1", ok),
        altered(GROUP, "g", ok),
        altered(TOPIC, "good", ok),
    ]
    answer = await ask(broker, "AlterConfigs", version, resources=resources, validate_only=False)
    assert [each.error_code for each in answer.responses] == [
        ErrorCode.invalid_request,
        ErrorCode.invalid_request,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.invalid_request,
        ErrorCode.invalid_request,
        ErrorCode.invalid_config,
        ErrorCode.none,
    ]
    assert "tidemill.toml" in answer.responses[4].error_message
    assert dict(broker.image.topics["a"].configs) == {"segment.ms": "5"}
    assert dict(broker.image.topics["b"].configs) == {"segment.ms": "5"}
    assert dict(broker.image.topics["good"].configs) == {"retention.ms": "7"}


@pytest.mark.parametrize("version", VERSIONS["AlterConfigs"])
@pytest.mark.parametrize(
    ("config", "code"),
    [
        ({"name": "retention.mz", "value": "7"}, ErrorCode.invalid_config),
        ({"name": "retention.ms", "value": "much"}, ErrorCode.invalid_config),
        ({"name": "retention.ms", "value": None}, ErrorCode.invalid_request),
    ],
)
async def test_alter_configs_refuses_bad_values(
    broker: Broker, ask: Ask, version: int, config: dict[str, Any], code: ErrorCode
) -> None:
    await create(broker, "a", segment_ms="5")
    answer = await ask(broker, "AlterConfigs", version, resources=[altered(TOPIC, "a", config)])
    assert answer.responses[0].error_code is code
    assert "retention.m" in answer.responses[0].error_message
    assert dict(broker.image.topics["a"].configs) == {"segment.ms": "5"}


@pytest.mark.parametrize("api", ["AlterConfigs", "IncrementalAlterConfigs"])
async def test_very_many_configs_of_one_resource_are_refused_and_others_changed(
    broker: Broker, ask: Ask, api: str
) -> None:
    await create(broker, "many")
    await create(broker, "few")
    many = [{"name": f"no.such.{number}", "value": "7"} for number in range(1_001)]
    resources = [altered(TOPIC, "many", *many), altered(TOPIC, "few", {"name": "retention.ms", "value": "7"})]
    answer = await ask(broker, api, 1, resources=resources)
    refused, changed = answer.responses
    assert refused.error_code is ErrorCode.invalid_request
    assert "1001 configs of one resource, 1000 are the most" in refused.error_message
    assert changed.error_code is ErrorCode.none


@pytest.mark.parametrize(
    ("api", "version"),
    [(api, version) for api in ("AlterConfigs", "IncrementalAlterConfigs") for version in VERSIONS[api]],
)
async def test_altering_can_only_be_tried(broker: Broker, ask: Ask, api: str, version: int) -> None:
    await create(broker, "a", segment_ms="5")
    setting = {"name": "retention.ms", "value": "7"}
    resources = [altered(TOPIC, "a", setting), altered(TOPIC, "missing", setting)]
    answer = await ask(broker, api, version, resources=resources, validate_only=True)
    codes = [each.error_code for each in answer.responses]
    assert codes == [ErrorCode.none, ErrorCode.unknown_topic_or_partition]
    assert dict(broker.image.topics["a"].configs) == {"segment.ms": "5"}


# --- IncrementalAlterConfigs


@pytest.mark.parametrize("version", VERSIONS["IncrementalAlterConfigs"])
async def test_incremental_alter_configs_changes_single_configs(
    broker: Broker, ask: Ask, version: int
) -> None:
    await create(broker, "a", retention_ms="1000", segment_ms="5")
    changes = [
        change("retention.ms", DELETE),
        change("segment.bytes", SET, "1048576"),
        change("cleanup.policy", APPEND, "compact"),
    ]
    resources = [altered(TOPIC, "a", *changes)]
    answer = await ask(broker, "IncrementalAlterConfigs", version, resources=resources, validate_only=False)
    (response,) = answer.responses
    assert (response.error_code, response.resource_name) == (ErrorCode.none, "a")
    assert dict(broker.image.topics["a"].configs) == {
        "segment.ms": "5",
        "segment.bytes": "1048576",
        "cleanup.policy": "delete,compact",
    }
    subtraction = [altered(TOPIC, "a", change("cleanup.policy", SUBTRACT, "delete"))]
    await ask(broker, "IncrementalAlterConfigs", version, resources=subtraction)
    assert broker.image.topics["a"].configs["cleanup.policy"] == "compact"


@pytest.mark.parametrize("version", VERSIONS["IncrementalAlterConfigs"])
@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (altered(TOPIC, "a", change("retention.mz", SET, "7")), ErrorCode.invalid_config),
        (altered(TOPIC, "a", change("retention.ms", SET, "much")), ErrorCode.invalid_config),
        (altered(TOPIC, "a", change("retention.ms", APPEND, "7")), ErrorCode.invalid_config),
        (altered(TOPIC, "a", change("retention.ms", SET, None)), ErrorCode.invalid_request),
        (altered(TOPIC, "a", change("retention.ms", 9, "7")), ErrorCode.invalid_request),
        (
            altered(TOPIC, "a", change("retention.ms", SET, "7"), change("retention.ms", DELETE)),
            ErrorCode.invalid_request,
        ),
        (altered(TOPIC, "missing", change("retention.ms", SET, "7")), ErrorCode.unknown_topic_or_partition),
        (altered(BROKER, "1", change("max_connections", SET, "7")), ErrorCode.invalid_request),
        (altered(BROKER, "", change("max_connections", SET, "7")), ErrorCode.invalid_request),
        (altered(GROUP, "g", change("x", SET, "7")), ErrorCode.invalid_config),
        (altered(99, "g", change("x", SET, "7")), ErrorCode.invalid_request),
    ],
)
async def test_incremental_alter_configs_refuses_one_and_changes_the_others(
    broker: Broker, ask: Ask, version: int, bad: dict[str, Any], code: ErrorCode
) -> None:
    await create(broker, "a", segment_ms="5")
    await create(broker, "good")
    resources = [bad, altered(TOPIC, "good", change("retention.ms", SET, "7"))]
    answer = await ask(broker, "IncrementalAlterConfigs", version, resources=resources)
    refused, done = answer.responses
    assert refused.error_code is code
    assert refused.error_message
    assert done.error_code is ErrorCode.none
    assert dict(broker.image.topics["a"].configs) == {"segment.ms": "5"}
    assert dict(broker.image.topics["good"].configs) == {"retention.ms": "7"}


async def test_incremental_changes_at_the_same_time_are_all_kept(broker: Broker, ask: Ask) -> None:
    await create(broker, "a")
    names = ["retention.ms", "segment.ms", "flush.ms", "delete.retention.ms"]
    answers = await asyncio.gather(
        *(
            ask(
                broker,
                "IncrementalAlterConfigs",
                1,
                resources=[altered(TOPIC, "a", change(name, SET, "7"))],
            )
            for name in names
        )
    )
    assert [answer.responses[0].error_code for answer in answers] == [ErrorCode.none] * len(names)
    assert dict(broker.image.topics["a"].configs) == dict.fromkeys(names, "7")


async def test_an_incremental_change_gives_up_after_too_many_conflicts(
    broker: Broker, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    await create(broker, "a")
    submit, others = broker.controller.submit, iter(range(1, 1_000))

    async def submit_after_somebody_else(command: Any) -> Any:
        await submit(SetTopicConfigs(name="a", configs={"flush.ms": str(next(others))}))
        return await submit(command)

    monkeypatch.setattr(broker.controller, "submit", submit_after_somebody_else)
    resources = [altered(TOPIC, "a", change("retention.ms", SET, "7"))]
    answer = await ask(broker, "IncrementalAlterConfigs", 1, resources=resources)
    assert answer.responses[0].error_code is ErrorCode.request_timed_out
    assert "retention.ms" not in broker.image.topics["a"].configs


async def test_a_changed_config_reaches_an_open_partition(broker: Broker, ask: Ask) -> None:
    topic = await create(broker, "a")
    partition = broker.find.partition(topic, 0)
    resources = [altered(TOPIC, "a", change("retention.ms", SET, "7"))]
    await ask(broker, "IncrementalAlterConfigs", 1, resources=resources)
    assert partition.config.retention_ms == 7


# --- dynamic configs of nodes


async def rates(broker: Broker, ask: Ask, name: str) -> dict[str, tuple[str, int]]:
    asked = [resource(BROKER, name, [LEADER_RATE, FOLLOWER_RATE])]
    (result,) = (await ask(broker, "DescribeConfigs", 4, resources=asked)).results
    assert result.error_code is ErrorCode.none
    assert not any(each.read_only for each in result.configs)
    return {each.name: (each.value, each.config_source) for each in result.configs}


@pytest.mark.parametrize("version", VERSIONS["IncrementalAlterConfigs"])
async def test_rates_of_the_throttle_are_set_for_a_node_or_for_all_and_removed(
    make_broker: MakeBroker, ask: Ask, version: int
) -> None:
    broker = await make_broker(move_bytes_per_second=77)
    unlimited = (str(2**63 - 1), 5)

    async def alter(*resources: dict[str, Any], only_try: bool = False) -> None:
        answer = await ask(
            broker, "IncrementalAlterConfigs", version, resources=resources, validate_only=only_try
        )
        assert {each.error_code for each in answer.responses} == {ErrorCode.none}, answer

    assert await rates(broker, ask, "1") == {LEADER_RATE: ("77", 4), FOLLOWER_RATE: unlimited}
    assert await rates(broker, ask, "") == {}
    await alter(altered(BROKER, "1", change(LEADER_RATE, SET, "500")), only_try=True)
    assert broker.image.node_configs == {}
    await alter(
        altered(BROKER, "1", change(LEADER_RATE, SET, "500")),
        altered(BROKER, "", change(LEADER_RATE, SET, "400"), change(FOLLOWER_RATE, SET, "300")),
    )
    assert await rates(broker, ask, "1") == {LEADER_RATE: ("500", 2), FOLLOWER_RATE: ("300", 3)}
    assert await rates(broker, ask, "") == {LEADER_RATE: ("400", 3), FOLLOWER_RATE: ("300", 3)}
    asked = [resource(BROKER, "1", [LEADER_RATE])]
    (result,) = (await ask(broker, "DescribeConfigs", 4, resources=asked, include_synonyms=True)).results
    assert [(each.name, each.value, each.source) for each in result.configs[0].synonyms] == [
        (LEADER_RATE, "500", 2),
        (LEADER_RATE, "400", 3),
        ("move_bytes_per_second", "77", 4),
        (LEADER_RATE, unlimited[0], 5),
    ]
    # What kafka-reassign-partitions --verify removes from every node.
    of_log_dirs = "replica.alter.log.dirs.io.max.bytes.per.second"
    names = (LEADER_RATE, FOLLOWER_RATE, of_log_dirs)
    await alter(*(altered(BROKER, node, *(change(name, DELETE) for name in names)) for node in ("1", "")))
    assert await rates(broker, ask, "1") == {LEADER_RATE: ("77", 4), FOLLOWER_RATE: unlimited}
    assert broker.image.node_configs == {}


async def test_rates_of_the_throttle_are_replaced_as_a_whole(broker: Broker, ask: Ask) -> None:
    for value in ("500", None):
        configs = [] if value is None else [{"name": LEADER_RATE, "value": value}]
        replaced = [altered(BROKER, "1", *configs)]
        answer = await ask(broker, "AlterConfigs", 2, resources=replaced, validate_only=False)
        assert answer.responses[0].error_code is ErrorCode.none
        assert broker.image.node_configs == ({} if value is None else {1: {LEADER_RATE: value}})


@pytest.mark.parametrize(
    ("node", "changed", "code", "said"),
    [
        ("1", change(LEADER_RATE, SET, "0"), ErrorCode.invalid_config, "of at least 1"),
        ("", change(FOLLOWER_RATE, SET, "-1"), ErrorCode.invalid_config, "of at least 1"),
        ("1", change(LEADER_RATE, SET, "fast"), ErrorCode.invalid_config, "a 64-bit integer"),
        ("1", change(LEADER_RATE, APPEND, "1"), ErrorCode.invalid_config, "not a list"),
        ("1", change("num.partitions", SET, "1"), ErrorCode.invalid_request, "tidemill.toml"),
        ("1", change("replication.rate", SET, "1"), ErrorCode.invalid_request, "'replication.rate'"),
        ("", change("num.partitions", DELETE), ErrorCode.invalid_request, LEADER_RATE),
        ("9", change(LEADER_RATE, SET, "1"), ErrorCode.broker_id_not_registered, "no node 9"),
        ("one", change(LEADER_RATE, SET, "1"), ErrorCode.invalid_request, "by its number"),
    ],
)
async def test_other_configs_of_nodes_and_bad_rates_are_refused(
    broker: Broker, ask: Ask, node: str, changed: dict[str, Any], code: ErrorCode, said: str
) -> None:
    answer = await ask(broker, "IncrementalAlterConfigs", 1, resources=[altered(BROKER, node, changed)])
    assert answer.responses[0].error_code is code
    assert said in answer.responses[0].error_message
    assert broker.image.node_configs == {}


# --- DescribeLogDirs


async def write(broker: Broker, topic: Any, index: int) -> int:
    partition = broker.find.partition(topic, index)
    batch = build_batch([Record(None, b"value", timestamp_ms=1)])
    partition.append(batch, 1)
    await wait_committed(partition, 1)
    return len(batch)


@pytest.mark.parametrize("version", VERSIONS["DescribeLogDirs"])
async def test_describe_log_dirs_of_all_partitions(
    broker: Broker, ask: Ask, version: int, tmp_path: Path
) -> None:
    topic = await create(broker, "a", 3)
    await create(broker, "b")
    size = await write(broker, topic, 0)
    await write(broker, topic, 1)
    closed = broker.replicas.peek(topic.id, 1)
    assert closed is not None
    broker.replicas.close_partition(closed)
    answer = await ask(broker, "DescribeLogDirs", version, topics=None)
    (result,) = answer.results
    assert (result.error_code, result.log_dir) == (ErrorCode.none, str(tmp_path))
    assert [
        (each.name, [(part.partition_index, part.partition_size) for part in each.partitions])
        for each in result.topics
    ] == [("a", [(0, size), (1, size), (2, 0)]), ("b", [(0, 0)])]
    assert broker.replicas.peek(topic.id, 1) is None
    if version >= 3:
        assert answer.error_code is ErrorCode.none
    if version >= 4:
        assert 0 < result.usable_bytes <= result.total_bytes


@pytest.mark.parametrize("version", VERSIONS["DescribeLogDirs"])
async def test_describe_log_dirs_of_some_partitions(broker: Broker, ask: Ask, version: int) -> None:
    await create(broker, "a", 3)
    await create(broker, "b")
    asked = [{"topic": "a", "partitions": [1, 7]}, {"topic": "missing", "partitions": [0]}]
    answer = await ask(broker, "DescribeLogDirs", version, topics=asked)
    (topic,) = answer.results[0].topics
    assert (topic.name, [each.partition_index for each in topic.partitions]) == ("a", [1])
    nothing = await ask(broker, "DescribeLogDirs", version, topics=[])
    assert nothing.results[0].topics == ()


@pytest.mark.parametrize("version", VERSIONS["DescribeLogDirs"])
async def test_describe_log_dirs_says_that_the_directory_is_gone(
    broker: Broker, ask: Ask, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = replace(broker.settings, data_dir=broker.settings.data_dir / "gone")
    monkeypatch.setattr(broker, "settings", gone)
    answer = await ask(broker, "DescribeLogDirs", version, topics=None)
    assert answer.results[0].error_code is ErrorCode.kafka_storage_error
