"""DescribeConfigs, AlterConfigs, IncrementalAlterConfigs, ListConfigResources.

- Configs of topics can be read and changed. A change is checked as a whole before anything is written.
- The settings of this node can be read, under their own names and under Kafka's where they mean the same.
  They come from flags, ``TIDEMILL_*`` and ``tidemill.toml``, so changing them over the protocol is refused.
- The dynamic configs of every node (``BROKER_KEYS``) can be changed, and their default for all nodes under
  the empty name.
- Configs of a group can be read and changed, whether the group exists or not. Those that it does not set are
  the node's settings.
- Nobody can subscribe to metrics of clients, so there are no such subscriptions to read or to change.
- Every resource of a request is answered for itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, Final

from tidemill.config.broker_keys import BROKER_KEYS, BrokerKey, apply_broker_changes, check_broker_overrides
from tidemill.config.group_keys import (
    DEAD_LETTER_TOPIC,
    GROUP_KEYS,
    GroupKey,
    apply_group_changes,
    check_group_overrides,
)
from tidemill.config.kafka_names import BROKER_CONFIGS, BROKER_CONFIGS_OF_TOPICS, KafkaName
from tidemill.config.schema import Kind, SettingInfo
from tidemill.config.settings import SETTINGS, Settings
from tidemill.config.topic import apply_changes, check_overrides
from tidemill.config.topic_keys import TOPIC_KEYS, ConfigKey, ConfigKind
from tidemill.config.topic_names import check_topic_name
from tidemill.control.commands import SetGroupConfigs, SetNodeConfigs, SetTopicConfigs
from tidemill.control.refusals import CatchUp
from tidemill.coordination.turns import give_way, in_slices, repeated_in_slices, sorted_in_slices
from tidemill.errors import ApiError, ErrorCode, MetadataConflict, TidemillError
from tidemill.server.broker import Broker
from tidemill.server.handlers.outcome import outcome, refused, repeated
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import (
    ALTER_CONFIGS,
    CLUSTER,
    CLUSTER_NAME,
    DESCRIBE_CONFIGS,
    GROUP,
    TOPIC,
    AclOperation,
    for_cluster,
    for_each,
)
from tidemill.server.requests.call import Call

__all__ = (
    "alter_configs",
    "describe_configs",
    "incremental_alter_configs",
    "list_config_resources",
    "topic_config_entries",
)

Entry = dict[str, Any]
"""One config of an answer, under the field names of DescribeConfigs."""


class ConfigResourceType(IntEnum):
    """Types of resources that have configs, in Kafka's numbers. Kafka's other types are not served."""

    TOPIC = 2
    BROKER = 4
    CLIENT_METRICS = 16
    GROUP = 32


class ConfigSource(IntEnum):
    """Sources of a config's value, in Kafka's numbers."""

    TOPIC = 1
    DYNAMIC_NODE = 2
    DYNAMIC_DEFAULT = 3
    NODE = 4
    DEFAULT = 5
    GROUP = 8


_Change = SetTopicConfigs | SetGroupConfigs | SetNodeConfigs

Values = list[tuple[str, ConfigSource]]
"""The values of a config with their sources; the one in force comes first."""

_CONFLICTS_MAX: Final = 10
_FIRST_LIST_OF_TYPES: Final = 1
#: So many resources are described before others get their turn.
_RESOURCES_AT_ONCE: Final = 20
#: The most configs of one resource that are altered together: it is done in one turn of the event loop.
_CONFIGS_MAX: Final = 1_000
_NODE_ID_DIGITS_MAX: Final = 10
_SETTINGS_BY_NAME: Final = {info.name: info for info in SETTINGS}
_FIRST_FLEXIBLE_DESCRIBE: Final = 4
_OLD_STRING_BYTES_MAX: Final = 0x7FFF

_SETTING_TYPES: Final = {
    Kind.ADDRESS: ConfigKind.STRING,
    Kind.BYTES: ConfigKind.LONG,
    Kind.COUNT: ConfigKind.INT,
    Kind.FLAG: ConfigKind.BOOLEAN,
    Kind.MS: ConfigKind.LONG,
    Kind.NAME: ConfigKind.STRING,
    Kind.PATH: ConfigKind.STRING,
    Kind.FILE: ConfigKind.STRING,
    Kind.TEXT: ConfigKind.STRING,
}


# --- reading


@serves(
    "DescribeConfigs",
    for_each(DESCRIBE_CONFIGS, TOPIC),
    for_each(DESCRIBE_CONFIGS, GROUP),
    for_each(DESCRIBE_CONFIGS, CLUSTER),
)
async def describe_configs(broker: Broker, call: Call) -> dict[str, Any]:
    """Describe configs of topics, groups and this node, all or those asked for."""
    results = []
    resources = call.request.resources
    twice = await repeated_in_slices(
        (resource.resource_type, resource.resource_name) for resource in resources
    )
    for number, resource in enumerate(resources):
        if number % _RESOURCES_AT_ONCE == _RESOURCES_AT_ONCE - 1:
            await asyncio.sleep(0)
        configs: list[Entry] = []
        error: TidemillError | None = None
        try:
            if (resource.resource_type, resource.resource_name) in twice:
                raise refused("the resource is named more than once; ask for all of its configs together")
            _authorize(call, DESCRIBE_CONFIGS, resource)
            configs = [_trimmed(call, entry) for entry in _entries(broker, resource)]
            _check_sendable(call, configs)
        except TidemillError as failure:
            configs, error = [], failure
        results.append({**outcome(error), **_resource_fields(resource), "configs": configs})
        await give_way()
    return {"results": results}


def _entries(broker: Broker, resource: Any) -> list[Entry]:
    name = resource.resource_name
    match resource.resource_type:
        case ConfigResourceType.TOPIC:
            check_topic_name(name)
            entries = topic_config_entries(broker.find.topic(name).configs, broker.settings.topic_defaults)
        case ConfigResourceType.BROKER:
            entries = _node_entries(broker) if name else _default_entries(broker)
            if name and name != str(broker.node_id):
                raise refused(f"this is node {broker.node_id}; ask node {name[:40]!r} for its own settings")
        case ConfigResourceType.CLIENT_METRICS:
            _require_name(name, "a subscription to metrics of clients")
            entries = []
        case ConfigResourceType.GROUP:
            _require_name(name, "a group")
            overrides = broker.image.group_configs.get(name) or {}
            entries = [_group_entry(each, overrides, broker.settings) for each in GROUP_KEYS.values()]
        case unserved:
            raise _unserved_type(unserved)
    # Kafka takes an empty list for all, as it does no list.
    asked = set(resource.configuration_keys or ())
    return [entry for entry in entries if not asked or entry["name"] in asked]


def topic_config_entries(overrides: Mapping[str, str], defaults: Mapping[str, str]) -> list[Entry]:
    """Every config of a topic with these overrides on a node with these defaults, sorted by name."""
    entries = (_topic_entry(key, overrides, defaults) for key in TOPIC_KEYS.values())
    # An internal config is shown only where somebody has set it.
    return [entry for entry in entries if entry["synonyms"] or not TOPIC_KEYS[entry["name"]].internal]


def _topic_entry(key: ConfigKey, overrides: Mapping[str, str], defaults: Mapping[str, str]) -> Entry:
    candidates = (
        (overrides.get(key.name), ConfigSource.TOPIC),
        (defaults.get(key.name), ConfigSource.NODE),
        (key.default, ConfigSource.DEFAULT),
    )
    values = [(value.strip(), source) for value, source in candidates if value is not None]
    return _entry(key.name, values, key.kind, key.doc, read_only=False)


def _group_entry(known: GroupKey, overrides: Mapping[str, str], settings: Settings) -> Entry:
    key = known.key
    values: Values = [(key.default or "", ConfigSource.DEFAULT)]
    if known.setting is not None:
        values = _setting_values(_SETTINGS_BY_NAME[known.setting], getattr(settings, known.setting))
    override = overrides.get(key.name)
    entry = _entry(key.name, values, key.kind, key.doc, read_only=False, set_as=known.setting)
    if override is not None:
        entry |= {"value": override.strip(), "config_source": ConfigSource.GROUP}
        own = {"name": key.name, "value": override.strip(), "source": ConfigSource.GROUP}
        entry["synonyms"] = [own, *entry["synonyms"]]
    return entry


def _node_entries(broker: Broker) -> list[Entry]:
    settings = broker.settings
    entries = [_setting_entry(info, getattr(settings, info.name)) for info in SETTINGS]
    for name, value in settings.topic_defaults.items():
        key = TOPIC_KEYS[name]
        doc = f"The default of {name} for topics of this node. {key.doc}"
        entries.append(_entry(f"topic.{name}", [(value, ConfigSource.NODE)], key.kind, doc, read_only=True))
    entries += (_named_entry(each, getattr(settings, each.setting)) for each in BROKER_CONFIGS)
    entries += (
        _topic_default_entry(name, TOPIC_KEYS[key], settings.topic_defaults)
        for name, key in BROKER_CONFIGS_OF_TOPICS.items()
    )
    entries += (_dynamic_entry(each, broker) for each in BROKER_KEYS.values())
    return entries


def _dynamic_entry(known: BrokerKey, broker: Broker) -> Entry:
    """A dynamic config of this node; its own value is in force, else that of all nodes, else the setting."""
    key, stored = known.key, broker.image.node_configs
    values: Values = []
    for of, source in ((broker.node_id, ConfigSource.DYNAMIC_NODE), (None, ConfigSource.DYNAMIC_DEFAULT)):
        text = stored.get(of, {}).get(key.name)
        if text is not None:
            values.append((text.strip(), source))
    dynamic = len(values)
    # The setting means no limit by 0, which Kafka writes as the default.
    setting = getattr(broker.settings, known.setting) if known.setting is not None else 0
    if setting:
        values.append((str(setting), ConfigSource.NODE))
    values.append((key.default or "", ConfigSource.DEFAULT))
    entry = _entry(key.name, values, key.kind, key.doc, read_only=False)
    if setting:
        entry["synonyms"][dynamic]["name"] = known.setting
    return entry


def _default_entries(broker: Broker) -> list[Entry]:
    """The dynamic configs that are set for all nodes together."""
    stored = broker.image.node_configs.get(None, {})
    return [
        _entry(
            known.key.name,
            [(stored[name].strip(), ConfigSource.DYNAMIC_DEFAULT)],
            known.key.kind,
            known.key.doc,
            read_only=False,
        )
        for name, known in BROKER_KEYS.items()
        if name in stored
    ]


def _setting_entry(info: SettingInfo, value: object) -> Entry:
    kind = _SETTING_TYPES[info.spec.kind]
    return _entry(info.name, _setting_values(info, value), kind, info.spec.doc, read_only=True)


def _setting_values(info: SettingInfo, value: object) -> Values:
    values = [(info.default_text, ConfigSource.DEFAULT)]
    if value != info.default:
        text = str(value).lower() if isinstance(value, bool) else "" if value is None else str(value)
        values.insert(0, (text, ConfigSource.NODE))
    return values


def _named_entry(known: KafkaName, value: object) -> Entry:
    """A setting under Kafka's name for it."""
    info = _SETTINGS_BY_NAME[known.setting]
    values = [(known.spellings.get(text, text), source) for text, source in _setting_values(info, value)]
    doc = f"{info.spec.doc} Set it as {info.name}."
    return _entry(known.name, values, known.kind, doc, read_only=True, set_as=info.name)


def _topic_default_entry(name: str, key: ConfigKey, defaults: Mapping[str, str]) -> Entry:
    """The default of a topic config under Kafka's name for a broker's."""
    candidates = ((defaults.get(key.name), ConfigSource.NODE), (key.default, ConfigSource.DEFAULT))
    values = [(value.strip(), source) for value, source in candidates if value is not None]
    doc = f"The default of {key.name} for topics of this node. {key.doc} Set it as topic.{key.name}."
    return _entry(name, values, key.kind, doc, read_only=True, set_as=f"topic.{key.name}")


def _require_name(name: str, what: str) -> None:
    if not name:
        raise refused(f"the name of {what} must not be empty")


def _entry(
    name: str, values: Values, kind: ConfigKind, doc: str, *, read_only: bool, set_as: str | None = None
) -> Entry:
    """An entry for the answer. ``values`` are given under the name ``set_as``; the first is in force."""
    value, source = values[0] if values else (None, ConfigSource.DEFAULT)
    return {
        "name": name,
        "value": value,
        "config_source": source,
        "read_only": read_only,
        "is_sensitive": False,
        "synonyms": [{"name": set_as or name, "value": text, "source": origin} for text, origin in values],
        "config_type": kind,
        "documentation": doc,
    }


def _trimmed(call: Call, entry: Entry) -> Entry:
    """The entry without the parts that the client did not ask for."""
    synonyms = entry["synonyms"] if call.request.include_synonyms else ()
    documentation = entry["documentation"] if call.field("include_documentation", False) else None
    return {**entry, "synonyms": synonyms, "documentation": documentation}


def _check_sendable(call: Call, entries: list[Entry]) -> None:
    if call.version >= _FIRST_FLEXIBLE_DESCRIBE:
        return
    for entry in entries:
        if len((entry["value"] or "").encode()) > _OLD_STRING_BYTES_MAX:
            raise refused(
                f"the value of {entry['name']} is too long for DescribeConfigs version {call.version};"
                f" ask with version {_FIRST_FLEXIBLE_DESCRIBE} or later, or for other configs by name"
            )


@serves("ListConfigResources", for_cluster(DESCRIBE_CONFIGS))
async def list_config_resources(broker: Broker, call: Call) -> dict[str, Any]:
    """List resources that have configs, by type. Before v1 these are subscriptions to client metrics only."""
    listed = {
        ConfigResourceType.TOPIC: await sorted_in_slices(tuple(broker.image.topics)),
        ConfigResourceType.BROKER: [str(node_id) for node_id in sorted(broker.image.nodes)],
        ConfigResourceType.CLIENT_METRICS: [],
        ConfigResourceType.GROUP: await sorted_in_slices(tuple(broker.image.group_configs)),
    }
    if call.version < _FIRST_LIST_OF_TYPES:
        asked: list[int] = [ConfigResourceType.CLIENT_METRICS]
    else:
        asked = list(dict.fromkeys(call.request.resource_types)) or list(listed)
    if any(kind not in listed for kind in asked):
        return {"error_code": ErrorCode.unsupported_version}
    resources = await in_slices(
        {"resource_name": name, "resource_type": kind}
        for kind in asked
        for name in listed[ConfigResourceType(kind)]
    )
    return {"error_code": ErrorCode.none, "config_resources": resources}


# --- changing


@serves(
    "AlterConfigs",
    for_each(ALTER_CONFIGS, TOPIC),
    for_each(ALTER_CONFIGS, GROUP),
    for_each(ALTER_CONFIGS, CLUSTER),
)
async def alter_configs(broker: Broker, call: Call) -> dict[str, Any]:
    """Replace all overrides of topics, groups and nodes; what is left out is reset. Deprecated by Kafka."""
    return await _alter(broker, call, _replace)


@serves(
    "IncrementalAlterConfigs",
    for_each(ALTER_CONFIGS, TOPIC),
    for_each(ALTER_CONFIGS, GROUP),
    for_each(ALTER_CONFIGS, CLUSTER),
)
async def incremental_alter_configs(broker: Broker, call: Call) -> dict[str, Any]:
    """Change single overrides of topics, groups and nodes; what others change at the same time is kept."""
    return await _alter(broker, call, _change)


async def _alter(
    broker: Broker, call: Call, change: Callable[[Broker, Call, Any, CatchUp], Awaitable[None]]
) -> dict[str, Any]:
    resources = call.request.resources
    catch_up = CatchUp(broker.controller.catch_up)
    twice = await repeated_in_slices(
        (resource.resource_type, resource.resource_name) for resource in resources
    )
    responses = []
    for resource in resources:
        error: TidemillError | None = None
        try:
            if (resource.resource_type, resource.resource_name) in twice:
                raise refused("the resource is named more than once; send all of its changes together")
            _authorize(call, ALTER_CONFIGS, resource)
            _check_alterable(resource.resource_type)
            if len(resource.configs) > _CONFIGS_MAX:
                raise refused(f"{len(resource.configs)} configs of one resource, {_CONFIGS_MAX} are the most")
            if resource.resource_type == ConfigResourceType.TOPIC:
                if resource.resource_name not in broker.image.topics:
                    await catch_up.once()
                _check_no_table(broker, resource.resource_name)
            await change(broker, call, resource, catch_up)
        except TidemillError as failure:
            error = failure
        responses.append({**outcome(error), **_resource_fields(resource)})
        await give_way()
    return {"responses": responses}


def _authorize(call: Call, operation: AclOperation, resource: Any) -> None:
    """Raise unless the caller may do this: with the topic or group, for other types with the cluster."""
    match resource.resource_type:
        case ConfigResourceType.TOPIC:
            call.authorize(operation, TOPIC, resource.resource_name)
        case ConfigResourceType.GROUP:
            call.authorize(operation, GROUP, resource.resource_name)
        case _:
            call.authorize(operation, CLUSTER, CLUSTER_NAME)


def _check_alterable(resource_type: int) -> None:
    if resource_type == ConfigResourceType.CLIENT_METRICS:
        raise refused("this node takes no metrics from clients, so nobody can subscribe to them")
    if resource_type not in (ConfigResourceType.TOPIC, ConfigResourceType.BROKER, ConfigResourceType.GROUP):
        raise _unserved_type(resource_type)


def _node_named(name: str) -> int | None:
    """The number of a node; None, which is all nodes together, for the empty name."""
    if not name:
        return None
    if not name.isascii() or not name.isdecimal() or len(name) > _NODE_ID_DIGITS_MAX:
        raise refused(f"a node is named by its number, or by nothing for all nodes, not by {name[:40]!r}")
    return int(name)


def _check_no_table(broker: Broker, name: str) -> None:
    """Refuse to change a topic of a table: its configs are kept with the table, for all of its topics."""
    topic = broker.image.topics.get(name)
    owner = None if topic is None else broker.image.table_of_topic(topic.id)
    if owner is not None:
        table = owner[0].name
        raise ApiError(
            ErrorCode.policy_violation,
            f"topic {name!r} is the log of table {table!r}, whose properties they are; change them with "
            f"'tidemill table alter {table} --set NAME=VALUE'",
        )


def _check_dead_letter_topic(broker: Broker, configs: Mapping[str, str], stored: Mapping[str, str]) -> None:
    """Refuse to send the dead letters of a group to a table, which takes rows only."""
    name = configs.get(DEAD_LETTER_TOPIC, "")
    topic = broker.image.topics.get(name)
    if topic is None or stored.get(DEAD_LETTER_TOPIC) == name:
        return
    owner = broker.image.table_of_topic(topic.id)
    if owner is not None:
        raise ApiError(
            ErrorCode.invalid_config,
            f"group config {DEAD_LETTER_TOPIC}: topic {name!r} is the log of table {owner[0].name!r}, and "
            "dead letters are no rows of it; name a topic of their own",
        )


async def _replace(broker: Broker, call: Call, resource: Any, catch_up: CatchUp) -> None:
    twice = repeated(config.name for config in resource.configs)
    if twice:
        raise refused(f"named more than once: {', '.join(sorted(twice))}; send one value per config")
    without = [config.name for config in resource.configs if config.value is None]
    if without:
        raise refused(f"no value is given for {', '.join(without)}; leave a config out to reset it")
    configs = {config.name: config.value for config in resource.configs}
    name = resource.resource_name
    if resource.resource_type == ConfigResourceType.GROUP:
        _require_name(name, "a group")
        stored = broker.image.group_configs.get(name) or {}
        check_group_overrides(configs, broker.settings, stored)
        _check_dead_letter_topic(broker, configs, stored)
        await _store(broker, call, SetGroupConfigs(group_id=name, configs=configs), catch_up)
        return
    if resource.resource_type == ConfigResourceType.BROKER:
        check_broker_overrides(configs)
        await _store(broker, call, SetNodeConfigs(node_id=_node_named(name), configs=configs), catch_up)
        return
    check_overrides(configs, broker.settings.topic_defaults)
    await _store(broker, call, SetTopicConfigs(name=name, configs=configs), catch_up)


async def _change(broker: Broker, call: Call, resource: Any, catch_up: CatchUp) -> None:
    changes = [(config.name, config.config_operation, config.value) for config in resource.configs]
    for _ in range(_CONFLICTS_MAX):
        try:
            command = await catch_up.check(partial(_changed, broker, resource, changes))
            await _store(broker, call, command, catch_up)
        except MetadataConflict:
            continue
        return
    raise ApiError(
        ErrorCode.request_timed_out,
        f"others changed the configs of {resource.resource_name!r} {_CONFLICTS_MAX} times in between;"
        " nothing was changed, try again",
    )


def _changed(broker: Broker, resource: Any, changes: Sequence[tuple[str, int, str | None]]) -> _Change:
    """The command that makes the changes to what is stored now."""
    name = resource.resource_name
    if resource.resource_type == ConfigResourceType.GROUP:
        _require_name(name, "a group")
        base = dict(broker.image.group_configs.get(name) or {})
        configs = apply_group_changes(base, changes, broker.settings)
        _check_dead_letter_topic(broker, configs, base)
        return SetGroupConfigs(group_id=name, configs=configs, base=base)
    if resource.resource_type == ConfigResourceType.BROKER:
        node_id = _node_named(name)
        base = dict(broker.image.node_configs.get(node_id, {}))
        return SetNodeConfigs(node_id=node_id, configs=apply_broker_changes(base, changes), base=base)
    base = dict(broker.find.topic(name).configs)
    configs = apply_changes(base, changes, broker.settings.topic_defaults)
    return SetTopicConfigs(name=name, configs=configs, base=base)


async def _store(broker: Broker, call: Call, command: _Change, catch_up: CatchUp) -> None:
    if call.request.validate_only:
        await catch_up.check(partial(broker.controller.check, command))
    else:
        await broker.controller.submit(command)


def _resource_fields(resource: Any) -> dict[str, Any]:
    return {"resource_type": resource.resource_type, "resource_name": resource.resource_name}


def _unserved_type(resource_type: int) -> ApiError:
    return refused(
        f"resources of type {resource_type} have no configs here; 2 is a topic, 4 a node, 16 a subscription"
        " to metrics of clients, 32 a group"
    )
