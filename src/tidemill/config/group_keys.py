"""The configs of a group: the table of names, typed values, and the check of overrides.

A group stores only its overrides, as text under these names. What a group leaves out is the node's setting
(``GroupKey.setting``), or else the default. Names that begin with ``tidemill.`` are this product's own; they
are off by default.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from tidemill.config.topic import altered_configs
from tidemill.config.topic_keys import INT_MAX, ConfigKey, ConfigKind
from tidemill.config.topic_names import check_topic_name
from tidemill.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tidemill.config.settings import Settings

__all__ = (
    "DEAD_LETTER_TOPIC",
    "GROUP_KEYS",
    "GroupConfig",
    "GroupKey",
    "apply_group_changes",
    "check_group_overrides",
    "duration_ms",
    "group_key",
)

_DAY_MS = 24 * 60 * 60 * 1000
_BY_DURATION = "by_duration:"
_DURATION = re.compile(
    r"P(?:(?P<days>[0-9]{1,9})D)?"
    r"(?:T(?:(?P<hours>[0-9]{1,9})H)?(?:(?P<minutes>[0-9]{1,9})M)?"
    r"(?:(?P<seconds>[0-9]{1,9})(?:\.(?P<fraction>[0-9]{1,9}))?S)?)?",
    re.IGNORECASE,
)
_NONE: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupConfig:
    """The effective configs of one group. Without arguments: the defaults.

    >>> GroupConfig(share_auto_offset_reset="by_duration:PT1H").share_reset_duration_ms
    3600000
    """

    consumer_session_timeout_ms: int = 45_000
    consumer_heartbeat_interval_ms: int = 5_000
    share_session_timeout_ms: int = 45_000
    share_heartbeat_interval_ms: int = 5_000
    share_record_lock_duration_ms: int = 30_000
    share_auto_offset_reset: str = "latest"
    share_isolation_level: str = "read_uncommitted"
    share_delivery_count_limit: int = 5
    share_partition_max_record_locks: int = 2_000
    share_renew_acknowledge_enable: bool = True
    dead_letter_topic: str = ""
    dead_letter_copy_record: bool = True
    retry_backoff_ms: int = 0
    retry_backoff_kind: str = "fixed"
    retry_backoff_max_ms: int = 600_000
    order: str = "none"
    on_dead: str = "continue"
    deliver_at_enable: bool = False
    max_waiting_records: int = 10_000

    @property
    def share_reset_duration_ms(self) -> int | None:
        """How far back a new share partition starts; None if it starts at the earliest or latest record."""
        _, by_duration, duration = self.share_auto_offset_reset.partition(_BY_DURATION)
        return duration_ms(duration) if by_duration else None

    @classmethod
    def from_overrides(cls, overrides: Mapping[str, str], settings: Settings) -> GroupConfig:
        """The values of a group with these overrides, which have been checked, on a node."""
        values: dict[str, Any] = {}
        for each in GROUP_KEYS.values():
            text = overrides.get(each.key.name)
            if text is not None:
                values[each.field] = each.key.parse_stored(text)
            elif each.setting is not None:
                values[each.field] = getattr(settings, each.setting)
        return cls(**values)


@dataclass(frozen=True, slots=True)
class GroupKey:
    """One config of a group: its key, its field of ``GroupConfig``, the settings that stand behind it.

    ``minimum`` and ``maximum`` name the settings that bound it on a node, where such settings exist.
    """

    key: ConfigKey
    field: str
    setting: str | None = None
    minimum: str | None = None
    maximum: str | None = None


def _int(name: str, default: int, doc: str, low: int, high: int = INT_MAX) -> ConfigKey:
    return ConfigKey(name, ConfigKind.INT, str(default), doc, minimum=low, maximum=high, of="group")


def _text(name: str, default: str, doc: str, *choices: str) -> ConfigKey:
    return ConfigKey(name, ConfigKind.STRING, default, doc, choices=choices, of="group")


def _flag(name: str, default: bool, doc: str) -> ConfigKey:
    return ConfigKey(name, ConfigKind.BOOLEAN, str(default).lower(), doc, of="group")


RESET: Final = "share.auto.offset.reset"
DEAD_LETTER_TOPIC: Final = "errors.deadletterqueue.topic.name"

_KEYS = (
    GroupKey(
        _int("consumer.session.timeout.ms", 45_000, "How long a consumer group's member may be silent.", 1),
        "consumer_session_timeout_ms",
        "group_consumer_session_timeout_ms",
    ),
    GroupKey(
        _int(
            "consumer.heartbeat.interval.ms", 5_000, "How often a member of a consumer group shall speak.", 1
        ),
        "consumer_heartbeat_interval_ms",
        "group_consumer_heartbeat_interval_ms",
    ),
    GroupKey(
        _int("share.session.timeout.ms", 45_000, "How long a member of a share group may be silent.", 1),
        "share_session_timeout_ms",
        "group_share_session_timeout_ms",
    ),
    GroupKey(
        _int("share.heartbeat.interval.ms", 5_000, "How often a member of a share group shall speak.", 1),
        "share_heartbeat_interval_ms",
        "group_share_heartbeat_interval_ms",
    ),
    GroupKey(
        _int("share.record.lock.duration.ms", 30_000, "How long a member may hold a record.", 1, 3_600_000),
        "share_record_lock_duration_ms",
        "group_share_record_lock_duration_ms",
        "group_share_min_record_lock_duration_ms",
        "group_share_max_record_lock_duration_ms",
    ),
    GroupKey(
        _text(
            RESET,
            "latest",
            "Where a share partition starts that was never read: latest, earliest, or by_duration: with an"
            " ISO 8601 duration, for example by_duration:PT1H.",
        ),
        "share_auto_offset_reset",
    ),
    GroupKey(
        _text(
            "share.isolation.level",
            "read_uncommitted",
            "Whether records of transactions that are open or aborted are handed out.",
            "read_uncommitted",
            "read_committed",
        ),
        "share_isolation_level",
    ),
    GroupKey(
        _int("share.delivery.count.limit", 5, "How often a record is handed out at most.", 2, 10),
        "share_delivery_count_limit",
        "group_share_delivery_count_limit",
    ),
    GroupKey(
        _int(
            "share.partition.max.record.locks",
            2_000,
            "How many records of a partition are in flight at most.",
            100,
            4_000,
        ),
        "share_partition_max_record_locks",
        "group_share_partition_max_record_locks",
    ),
    GroupKey(
        _flag("share.renew.acknowledge.enable", True, "Whether members may renew the locks of records."),
        "share_renew_acknowledge_enable",
    ),
    GroupKey(
        _text(
            DEAD_LETTER_TOPIC,
            "",
            "The topic that records go to which were rejected, or handed out too often. Empty: none.",
        ),
        "dead_letter_topic",
    ),
    GroupKey(
        _flag(
            "errors.deadletterqueue.copy.record.enable",
            True,
            "Whether a dead letter has the key, the value and the headers of its record. Kafka's default is"
            " false.",
        ),
        "dead_letter_copy_record",
    ),
    GroupKey(
        _int(
            "tidemill.share.retry.backoff.ms",
            0,
            "How long a record that was released, or whose lock expired, waits until it is handed out again.",
            0,
            _DAY_MS,
        ),
        "retry_backoff_ms",
    ),
    GroupKey(
        _text(
            "tidemill.share.retry.backoff.kind",
            "fixed",
            "Whether the wait is always the same, or twice as long each time.",
            "fixed",
            "exponential",
        ),
        "retry_backoff_kind",
    ),
    GroupKey(
        _int("tidemill.share.retry.backoff.max.ms", 600_000, "The longest wait.", 1, 7 * _DAY_MS),
        "retry_backoff_max_ms",
    ),
    GroupKey(
        _text(
            "tidemill.share.order",
            "none",
            "key: at most one record of a key is in flight, and the next one waits until it is finished.",
            "none",
            "key",
        ),
        "order",
    ),
    GroupKey(
        _text(
            "tidemill.share.on.dead",
            "continue",
            "With an order per key: whether the key goes on after a dead letter, or is blocked.",
            "continue",
            "block",
        ),
        "on_dead",
    ),
    GroupKey(
        _flag(
            "tidemill.share.deliver.at.enable",
            False,
            "Whether a record with the header tidemill-deliver-at (ms) is not handed out before that time.",
        ),
        "deliver_at_enable",
    ),
    GroupKey(
        _int(
            "tidemill.share.max.waiting.records",
            10_000,
            "How many records of a partition may be delayed, wait for their key or for their dead letter.",
            1,
            50_000,
        ),
        "max_waiting_records",
    ),
)

#: Every known config of a group by name, in alphabetical order.
GROUP_KEYS: Mapping[str, GroupKey] = {
    each.key.name: each for each in sorted(_KEYS, key=lambda each: each.key.name)
}


def group_key(name: str) -> ConfigKey:
    """The key called ``name``; ApiError INVALID_CONFIG with the closest known name if there is none."""
    known = GROUP_KEYS.get(name)
    if known is None:
        close = difflib.get_close_matches(name[:200], GROUP_KEYS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else f"known names are {', '.join(GROUP_KEYS)}"
        raise ApiError(ErrorCode.invalid_config, f"unknown group config {name[:200]!r}: {hint}")
    return known.key


def duration_ms(text: str) -> int | None:
    """The milliseconds of an ISO 8601 duration of days, hours, minutes and seconds; None if it is none.

    >>> duration_ms("PT1H30M"), duration_ms("P1D"), duration_ms("1h")
    (5400000, 86400000, None)
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or not any(match.groupdict().values()) or text.strip().upper().endswith("T"):
        return None
    days, hours, minutes, seconds = (
        int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds")
    )
    # In whole numbers: 1.001 seconds are 1000.9999… milliseconds as a float.
    part_ms = int((match["fraction"] or "")[:3].ljust(3, "0"))
    return (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000 + part_ms


def check_group_overrides(
    overrides: Mapping[str, str], settings: Settings, stored: Mapping[str, str] = _NONE
) -> None:
    """Raise ApiError INVALID_CONFIG unless every name is known, every value allowed, and all fit together.

    Values that are ``stored`` already need not be allowed any more.
    """
    for name, text in overrides.items():
        if stored.get(name) != text:
            _check_value(name, text, settings)
    config = GroupConfig.from_overrides(overrides, settings)
    for kind, heartbeat_ms, session_ms in (
        ("consumer", config.consumer_heartbeat_interval_ms, config.consumer_session_timeout_ms),
        ("share", config.share_heartbeat_interval_ms, config.share_session_timeout_ms),
    ):
        if heartbeat_ms >= session_ms:
            raise ApiError(
                ErrorCode.invalid_config,
                f"group config {kind}.heartbeat.interval.ms ({heartbeat_ms}) must be below"
                f" {kind}.session.timeout.ms ({session_ms}): members could not speak in time",
            )
    if config.retry_backoff_ms > config.retry_backoff_max_ms:
        raise ApiError(
            ErrorCode.invalid_config,
            f"group config tidemill.share.retry.backoff.ms ({config.retry_backoff_ms}) must not be above"
            f" tidemill.share.retry.backoff.max.ms ({config.retry_backoff_max_ms})",
        )


def apply_group_changes(
    current: Mapping[str, str], changes: Sequence[tuple[str, int, str | None]], settings: Settings
) -> dict[str, str]:
    """The overrides after the changes ``(name, op, value)``, checked as a whole."""
    altered = altered_configs("group", group_key, current, changes)
    check_group_overrides(altered, settings, current)
    return altered


def _check_value(name: str, text: str, settings: Settings) -> None:
    key = group_key(name)
    value = key.parse(text)
    known = GROUP_KEYS[name]
    if known.minimum is not None and known.maximum is not None:
        low, high = getattr(settings, known.minimum), getattr(settings, known.maximum)
        if not isinstance(value, int) or not low <= value <= high:
            raise _refused(name, text, f"from {low} to {high} on this node")
    if name == RESET and value not in ("latest", "earliest"):
        before, by_duration, duration = str(value).partition(_BY_DURATION)
        if before or not by_duration or duration_ms(duration) is None:
            raise _refused(
                name, text, "latest, earliest or by_duration: with a duration, such as by_duration:PT1H"
            )
    if name == DEAD_LETTER_TOPIC and value:
        _check_dead_letter_topic(str(value))


def _check_dead_letter_topic(topic: str) -> None:
    try:
        check_topic_name(topic)
    except ApiError as error:
        raise _refused(DEAD_LETTER_TOPIC, topic, f"the name of a topic ({error.message})") from error
    if topic.startswith("__"):
        raise _refused(DEAD_LETTER_TOPIC, topic, "a topic that the cluster does not write itself")


def _refused(name: str, text: str, allowed: str) -> ApiError:
    return ApiError(
        ErrorCode.invalid_config, f"group config {name} cannot be {text[:200]!r}: it must be {allowed}"
    )
