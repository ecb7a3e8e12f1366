"""CreateTopics, DeleteTopics, CreatePartitions.

Topics that the cluster itself writes come into being when they are needed, with the shape that they need;
clients cannot create, delete or grow them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any, Final
from uuid import UUID

from tidemill.config.topic import check_overrides
from tidemill.config.topic_names import check_topic_name
from tidemill.control.commands import Command, CreatePartitions, CreateTopic
from tidemill.control.image import INTERNAL_TOPICS, TopicImage
from tidemill.control.refusals import CatchUp
from tidemill.coordination.turns import (
    distinct_in_slices,
    give_way,
    in_slices,
    repeated_in_slices,
)
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.server.broker import Broker
from tidemill.server.handlers.outcome import outcome, refused
from tidemill.server.handlers.topics.configs import topic_config_entries
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import (
    ALTER,
    CLUSTER,
    CREATE,
    DELETE,
    TOPIC,
    for_each,
    refusal,
)
from tidemill.server.requests.call import Call

__all__ = ("create_partitions", "create_topics", "delete_topics")

_DEFAULT: Final = -1
_RESERVED: Final = INTERNAL_TOPICS | {"__cluster_metadata"}
_CONFIG_FIELDS: Final = ("name", "value", "read_only", "config_source", "is_sensitive")
#: The codes with which planning refuses to delete a topic that is gone already.
_GONE: Final = frozenset({ErrorCode.unknown_topic_or_partition, ErrorCode.unknown_topic_id})


# --- CreateTopics


@serves("CreateTopics", for_each(CREATE, TOPIC), for_each(CREATE, CLUSTER))
async def create_topics(broker: Broker, call: Call) -> dict[str, Any]:
    """Create topics, or with ``validate_only`` tell what the result would be."""
    request = call.request
    twice = await repeated_in_slices(topic.name for topic in request.topics)
    planned: dict[str, CreateTopic | TidemillError] = {}
    catch_up = CatchUp(broker.controller.catch_up)
    for topic in request.topics:
        try:
            if topic.name in twice:
                raise refused("the topic is named more than once in the request")
            call.authorize_creation(topic.name)
            planned[topic.name] = await catch_up.check(partial(_creation, broker, topic))
        except TidemillError as error:
            planned[topic.name] = error
        await give_way()
    done = await _run(broker, planned, catch_up, check_only=request.validate_only)
    created = (_created(broker, name, done[name], request.validate_only) for name in planned)
    return {"topics": await in_slices(created)}


def _creation(broker: Broker, topic: Any) -> CreateTopic:
    name, settings = topic.name, broker.settings
    if name in _RESERVED:
        raise refused(f"topic {name!r} is internal: the cluster creates it when it is needed")
    check_topic_name(name)
    if name in broker.image.topics:
        raise ApiError(ErrorCode.topic_already_exists, f"topic {name!r} already exists")
    broker.catalogue.check_no_partition(name)
    without = [config.name for config in topic.configs if config.value is None]
    if without:
        raise ApiError(ErrorCode.invalid_config, f"no value is given for {', '.join(without)}")
    configs = {config.name: config.value for config in topic.configs}
    check_overrides(configs, settings.topic_defaults)
    count, replication = topic.num_partitions, topic.replication_factor
    if topic.assignments:
        if (count, replication) != (_DEFAULT, _DEFAULT):
            raise refused(
                f"topic {name!r} has assignments, so its number of partitions and of replicas must be -1"
            )
        assignments = _complete(topic.assignments)
        return CreateTopic(name=name, topic_id=broker.ids.uuid(), assignments=assignments, configs=configs)
    return CreateTopic(
        name=name,
        topic_id=broker.ids.uuid(),
        partitions=settings.default_partitions if count == _DEFAULT else count,
        replication=broker.catalogue.default_replication if replication == _DEFAULT else replication,
        configs=configs,
    )


def _complete(assignments: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    by_index = {each.partition_index: tuple(each.broker_ids) for each in assignments}
    if len(by_index) != len(assignments) or set(by_index) != set(range(len(by_index))):
        raise ApiError(
            ErrorCode.invalid_replica_assignment,
            "assignments must be of the partitions 0, 1, 2 and so on, each once",
        )
    return tuple(by_index[index] for index in range(len(by_index)))


def _created(
    broker: Broker, name: str, result: TopicImage | TidemillError, validate_only: bool
) -> dict[str, Any]:
    if isinstance(result, TidemillError):
        return {"name": name, **outcome(result), "configs": ()}
    entries = topic_config_entries(result.configs, broker.settings.topic_defaults)
    return {
        "name": name,
        **outcome(None),
        # The id of a topic that was not created would name nothing.
        "topic_id": None if validate_only else result.id,
        "num_partitions": len(result.partitions),
        "replication_factor": len(result.partitions[0].replicas),
        "configs": [{field: entry[field] for field in _CONFIG_FIELDS} for entry in entries],
    }


# --- CreatePartitions


@serves("CreatePartitions", for_each(ALTER, TOPIC))
async def create_partitions(broker: Broker, call: Call) -> dict[str, Any]:
    """Raise the number of partitions of topics, or with ``validate_only`` tell what the result would be."""
    request = call.request
    twice = await repeated_in_slices(topic.name for topic in request.topics)
    planned: dict[str, CreatePartitions | TidemillError] = {}
    catch_up = CatchUp(broker.controller.catch_up)
    for topic in request.topics:
        if topic.name in twice:
            planned[topic.name] = refused("the topic is named more than once in the request")
        elif not call.may(ALTER, TOPIC, topic.name):
            planned[topic.name] = refusal(ALTER, TOPIC, topic.name)
        elif topic.name in INTERNAL_TOPICS:
            planned[topic.name] = ApiError(
                ErrorCode.invalid_topic_exception,
                f"topic {topic.name!r} is internal: its number of partitions decides where things live in it",
            )
        else:
            planned[topic.name] = CreatePartitions(
                name=topic.name, new_count=topic.count, assignments=_added(topic.assignments)
            )
        await give_way()
    done = await _run(broker, planned, catch_up, check_only=request.validate_only)
    return {"results": await in_slices(_grown(name, done[name]) for name in planned)}


def _grown(name: str, result: TopicImage | TidemillError) -> dict[str, Any]:
    return {"name": name, **outcome(result if isinstance(result, TidemillError) else None)}


def _added(assignments: Sequence[Any] | None) -> tuple[tuple[int, ...], ...] | None:
    return None if assignments is None else tuple(tuple(each.broker_ids) for each in assignments)


async def _run(
    broker: Broker, planned: dict[str, Any], catch_up: CatchUp, *, check_only: bool
) -> dict[str, TopicImage | TidemillError]:
    """Run commands; gives the result of each. An error among ``planned`` is its own result."""
    done: dict[str, TopicImage | TidemillError] = {}
    commands: dict[str, Command[TopicImage]] = {}
    for name, plan in planned.items():
        if isinstance(plan, TidemillError):
            done[name] = plan
        elif check_only:
            done[name] = await _check(broker, plan, catch_up)
        else:
            commands[name] = plan
        await give_way()
    results: list[TopicImage | TidemillError]
    try:
        results = await broker.controller.submit_many(commands.values()) if commands else []
    except TidemillError as error:
        results = [error] * len(commands)
    for name, result in zip(commands, results, strict=True):
        done[name] = result
        await give_way()
    return done


async def _check(
    broker: Broker, command: Command[TopicImage], catch_up: CatchUp
) -> TopicImage | TidemillError:
    try:
        return await catch_up.check(partial(broker.controller.check, command))
    except TidemillError as error:
        return error


# --- DeleteTopics


@serves("DeleteTopics", for_each(DELETE, TOPIC))
async def delete_topics(broker: Broker, call: Call) -> dict[str, Any]:
    """Delete topics by name or, from v6 on, by id."""
    asked: list[tuple[str | None, UUID | None]]
    if call.version < 6:
        asked = await in_slices((name, None) for name in call.request.topic_names)
    else:
        asked = await in_slices((topic.name, topic.topic_id) for topic in call.request.topics)
    await give_way()
    twice = await repeated_in_slices(pair for pair in asked if pair != (None, None))
    distinct = await distinct_in_slices(asked)
    catch_up = CatchUp(broker.controller.catch_up)
    if None in await in_slices(_found(broker, name, topic_id) for name, topic_id in distinct):
        # Before anything is made of what the ids mean. A failure is told with what is still not found.
        with contextlib.suppress(TidemillError):
            await catch_up.once()
    # A name and an id in one request can mean the same topic.
    named = await in_slices(_found(broker, name, topic_id) for name, topic_id in distinct)
    topic_twice = await repeated_in_slices(topic.id for topic in named if topic is not None)
    responses = []
    for name, topic_id in distinct:
        error: TidemillError | None = None
        topic = _found(broker, name, topic_id)
        try:
            _check_named_well(name, topic_id)
            if name is not None:
                call.authorize(DELETE, TOPIC, name)
            elif topic is not None and not call.may(DELETE, TOPIC, topic.name):
                # A caller that may not describe the topic is not told its name.
                forbidden, topic = topic.name, None
                raise refusal(DELETE, TOPIC, forbidden)
            if (name, topic_id) in twice or (topic is not None and topic.id in topic_twice):
                raise refused("the topic is named more than once in the request")
            topic = await catch_up.check(partial(_named, broker, name, topic_id))
            gone = ErrorCode.unknown_topic_id if name is None else ErrorCode.unknown_topic_or_partition
            await _delete(broker, topic, gone)
        except TidemillError as failure:
            error = failure
        shown_name, shown_id = (name, topic_id) if topic is None else (topic.name, topic.id)
        responses.append({"name": shown_name, "topic_id": shown_id, **outcome(error)})
        await give_way()
    return {"responses": responses}


def _found(broker: Broker, name: str | None, topic_id: UUID | None) -> TopicImage | None:
    if name is not None:
        return broker.image.topics.get(name) if topic_id is None else None
    return None if topic_id is None else broker.image.topic_by_id(topic_id)


def _named(broker: Broker, name: str | None, topic_id: UUID | None) -> TopicImage:
    return broker.find.topic_by_id(topic_id) if name is None else broker.find.topic(name)


def _check_named_well(name: str | None, topic_id: UUID | None) -> None:
    if name is None and topic_id is None:
        raise refused("neither a name nor an id is given")
    if name is not None and topic_id is not None:
        raise refused("both a name and an id are given; give one")


async def _delete(broker: Broker, topic: TopicImage, gone: ErrorCode) -> None:
    """Delete a topic that was found. The error has the code ``gone`` if somebody else was faster."""
    if topic.internal:
        raise ApiError(
            ErrorCode.invalid_topic_exception, f"topic {topic.name!r} is internal: the cluster needs it"
        )
    try:
        await broker.catalogue.delete_topic(topic)
    except ApiError as error:
        if error.code in _GONE:
            raise ApiError(gone, f"topic {topic.name!r} was deleted by somebody else meanwhile") from error
        raise
