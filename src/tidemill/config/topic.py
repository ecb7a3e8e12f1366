"""The configs of a topic: typed values, the check of overrides, and incremental alteration.

A topic stores only its overrides, as text under Kafka's names, and only those that ``check_overrides``
accepts. ``TopicConfig.from_overrides`` turns them into the values that the layers above work with.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, cast

from tidemill.config.topic_keys import LONG_MAX, TOPIC_KEYS, ConfigKind, split_list, topic_key
from tidemill.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tidemill.config.topic_keys import ConfigKey, ConfigValue

__all__ = ("AlterOp", "TopicConfig", "altered_configs", "apply_changes", "check_overrides")

_WEEK_MS = 7 * 24 * 60 * 60 * 1000
_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicConfig:
    """The effective configs of one topic. Without arguments: Kafka's defaults.

    >>> TopicConfig.from_overrides({"cleanup.policy": "compact"}).compacts
    True
    """

    cleanup_policy: frozenset[str] = frozenset({"delete"})
    compression_type: str = "producer"
    delete_retention_ms: int = 24 * 60 * 60 * 1000
    flush_messages: int = LONG_MAX
    flush_ms: int = LONG_MAX
    follower_replication_throttled_replicas: frozenset[str] = frozenset()
    index_interval_bytes: int = 4096
    leader_replication_throttled_replicas: frozenset[str] = frozenset()
    max_compaction_lag_ms: int = LONG_MAX
    max_message_bytes: int = 1024 * 1024 + 12
    timestamp_after_max_ms: int = 60 * 60 * 1000
    timestamp_before_max_ms: int = LONG_MAX
    timestamp_type: Literal["CreateTime", "LogAppendTime"] = "CreateTime"
    min_cleanable_dirty_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    min_insync_replicas: int = 1
    retention_bytes: int = -1
    retention_ms: int = _WEEK_MS
    segment_bytes: int = 1024 * 1024 * 1024
    segment_ms: int = _WEEK_MS
    tidemill_retention_waits_for_cursors: bool = False

    @property
    def compacts(self) -> bool:
        """Whether compaction removes all but the last record of every key."""
        return "compact" in self.cleanup_policy

    @property
    def deletes(self) -> bool:
        """Whether segments past the retention are deleted."""
        return "delete" in self.cleanup_policy

    @property
    def segment_age_max_ms(self) -> int:
        """The age at which a segment rolls: a compacted topic rolls early enough for its compaction lag."""
        return min(self.segment_ms, self.max_compaction_lag_ms) if self.compacts else self.segment_ms

    @classmethod
    def from_overrides(cls, overrides: Mapping[str, str], defaults: Mapping[str, str] = _NONE) -> TopicConfig:
        """The values of a topic with these overrides, on a node with these defaults, over Kafka's defaults.

        Both have passed ``check_overrides``, maybe that of an older release, which allowed larger numbers. A
        name that is not effective is passed over.
        """
        values: dict[str, ConfigValue | frozenset[str]] = {}
        for name, text in {**defaults, **overrides}.items():
            field = _FIELD_OF_KEY.get(name)
            if field is not None:
                values[field] = TOPIC_KEYS[name].parse_stored(text)
        for field in _SETS & values.keys():
            values[field] = frozenset(cast("tuple[str, ...]", values[field]))
        internal = overrides.get("internal.segment.bytes", defaults.get("internal.segment.bytes"))
        if internal is not None:
            values["segment_bytes"] = TOPIC_KEYS["internal.segment.bytes"].parse(internal)
        # Each field's type is the type of its key; a test walks the whole table.
        return cls(**values)  # type: ignore[arg-type]


#: Fields whose lists have no order.
_SETS = frozenset(
    {
        "cleanup_policy",
        "follower_replication_throttled_replicas",
        "leader_replication_throttled_replicas",
    }
)

_FIELD_OF_KEY: Mapping[str, str] = {
    name: name.removeprefix("message.").replace(".", "_")
    for name, key in TOPIC_KEYS.items()
    if key.effective and not key.internal
}


class AlterOp(IntEnum):
    """What IncrementalAlterConfigs does to one config."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


def check_overrides(
    overrides: Mapping[str, str], defaults: Mapping[str, str] = _NONE, stored: Mapping[str, str] = _NONE
) -> None:
    """Raise ApiError INVALID_CONFIG unless every name is known, every value allowed, and all fit together.

    Values that are ``stored`` already need not be allowed any more.
    """
    for name, text in overrides.items():
        if stored.get(name) != text:
            topic_key(name).parse(text)
    config = TopicConfig.from_overrides(overrides, defaults)
    if config.min_compaction_lag_ms > config.max_compaction_lag_ms:
        raise ApiError(
            ErrorCode.invalid_config,
            f"topic config min.compaction.lag.ms ({config.min_compaction_lag_ms}) must not be above"
            f" max.compaction.lag.ms ({config.max_compaction_lag_ms}): lower the first or raise the second",
        )


def apply_changes(
    current: Mapping[str, str],
    changes: Sequence[tuple[str, int, str | None]],
    defaults: Mapping[str, str] = _NONE,
) -> dict[str, str]:
    """The overrides after the changes ``(name, op, value)``, checked as a whole; ``current`` stays as it is.

    Append and subtract start from the override, or else from the default, as Kafka does. A deletion of a
    config that is not set changes nothing.
    """
    altered = altered_configs("topic", topic_key, current, changes, defaults)
    check_overrides(altered, defaults, current)
    return altered


def altered_configs(
    of: str,
    key_called: Callable[[str], ConfigKey],
    current: Mapping[str, str],
    changes: Sequence[tuple[str, int, str | None]],
    defaults: Mapping[str, str] = _NONE,
) -> dict[str, str]:
    """The overrides of a topic or group (``of``) after the changes; their values are not checked yet."""
    counts = Counter(name for name, _, _ in changes)
    twice = sorted(name for name, count in counts.items() if count > 1)
    if twice:
        raise ApiError(
            ErrorCode.invalid_request,
            f"{of} config {', '.join(twice)} is named more than once: send one change per config",
        )
    altered = dict(current)
    for name, op, value in changes:
        if op == AlterOp.DELETE:
            altered.pop(name, None)
        elif value is None:
            raise ApiError(
                ErrorCode.invalid_request,
                f"{of} config {name} has no value: only a deletion goes without one",
            )
        elif op == AlterOp.SET:
            altered[name] = value
        elif op in (AlterOp.APPEND, AlterOp.SUBTRACT):
            before = altered.get(name, defaults.get(name))
            altered[name] = _altered_list(key_called(name), AlterOp(op), value, before)
        else:
            raise ApiError(
                ErrorCode.invalid_request,
                f"{of} config {name}: no operation {op}; 0 sets, 1 deletes, 2 appends, 3 subtracts",
            )
    return altered


def _altered_list(key: ConfigKey, op: AlterOp, value: str, before: str | None) -> str:
    if key.kind is not ConfigKind.LIST:
        raise ApiError(
            ErrorCode.invalid_config,
            f"{key.of} config {key.name} is not a list, so nothing can be appended or subtracted:"
            " set it instead",
        )
    elements = [
        element for element in split_list(before if before is not None else key.default or "") if element
    ]
    changed = split_list(value)
    if op is AlterOp.APPEND:
        elements += [element for element in dict.fromkeys(changed) if element not in elements]
    else:
        elements = [element for element in elements if element not in changed]
    return ",".join(elements)
