"""The table of topic configs: every name that Kafka 4 knows for a topic, with its type, default and range.

A key that is ``effective`` changes what this node does. Every other key is checked, stored and shown like in
Kafka, so that tools which set it keep working, and its ``doc`` says that it has no effect here.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from tidemill.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = (
    "BATCH_BYTES_MAX",
    "INDEX_INTERVAL_BYTES_MAX",
    "TOPIC_KEYS",
    "ConfigKey",
    "ConfigKind",
    "ConfigValue",
    "topic_key",
)

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1
#: The largest batch that a topic can be configured for: the event loop writes and reads batches whole.
BATCH_BYTES_MAX = 11 * 1024 * 1024
#: The largest distance of index entries: a read checks all batches from the entry on, on the event loop. That
#: takes a millisecond for the smallest batches.
INDEX_INTERVAL_BYTES_MAX = 64 * 1024
_LONG_MAX_TEXT = str(LONG_MAX)
_WEEK_MS = "604800000"

_INTEGER = re.compile(r"[+-]?[0-9]{1,20}")
_DECIMAL = re.compile(r"[+-]?([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})([eE][+-]?[0-9]{1,3})?")
_REPLICA = re.compile(r"[0-9]+:[0-9]+")

_TYPE_NAMES = {1: "true or false", 3: "a 32-bit integer", 5: "a 64-bit integer", 6: "a number"}

ConfigValue = bool | int | float | str | tuple[str, ...]


class ConfigKind(IntEnum):
    """A config's type, as numbered in DescribeConfigs responses."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    LONG = 5
    DOUBLE = 6
    LIST = 7
    CLASS = 8


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One config of a topic or of a group.

    ``default`` is the text that DescribeConfigs shows, None where Kafka has none.
    """

    name: str
    kind: ConfigKind
    default: str | None
    doc: str
    effective: bool = True
    minimum: float | None = None
    maximum: float | None = None
    #: One number outside the range that is allowed too.
    also: int | None = None
    #: The allowed texts; for a list, the allowed elements.
    choices: tuple[str, ...] = ()
    #: For a list: its elements are ``partition:broker`` pairs, or it is the single element ``*``.
    replicas: bool = False
    #: Whether Kafka shows the key only where it has been set.
    internal: bool = False
    #: What has this config, for messages.
    of: str = "topic"

    @property
    def allowed(self) -> str:
        """The allowed values in words, for error messages and for the reference page."""
        if self.replicas:
            return "* or a list of partition:broker pairs"
        if self.choices:
            names = ", ".join(self.choices)
            return (
                f"a list of {names}, each at most once" if self.kind is ConfigKind.LIST else f"one of {names}"
            )
        text = _TYPE_NAMES.get(self.kind, "any text")
        if self.minimum is not None and self.maximum is not None:
            text += f" from {self.minimum} to {self.maximum}"
        elif self.minimum is not None:
            text += f" of at least {self.minimum}"
        return text if self.also is None else f"{text}, or {self.also}"

    def parse(self, text: str) -> ConfigValue:
        """The typed value of ``text``; ApiError INVALID_CONFIG that names key, value and what is allowed."""
        value = self._typed(text.strip())
        if value is None:
            raise ApiError(
                ErrorCode.invalid_config,
                f"{self.of} config {self.name} cannot be {text[:200]!r}: it must be {self.allowed}",
            )
        return value

    def parse_stored(self, text: str) -> ConfigValue:
        """The typed value of a text that an older release has accepted; a number above the range is cut."""
        value = self._typed(text.strip(), bounded=False)
        if isinstance(value, int | float) and self.maximum is not None and value > self.maximum:
            return type(value)(self.maximum)
        return self.parse(text)

    def _typed(self, text: str, *, bounded: bool = True) -> ConfigValue | None:
        match self.kind:
            case ConfigKind.BOOLEAN:
                return {"true": True, "false": False}.get(text.lower())
            case ConfigKind.INT | ConfigKind.LONG | ConfigKind.DOUBLE:
                return self._number(text, bounded=bounded)
            case ConfigKind.LIST:
                return self._list(text)
            case _:
                return text if not self.choices or text in self.choices else None

    def _number(self, text: str, *, bounded: bool) -> float | None:
        value: float
        if self.kind is ConfigKind.DOUBLE:
            if not _DECIMAL.fullmatch(text):
                return None
            value = float(text)
        else:
            if not _INTEGER.fullmatch(text):
                return None
            value = int(text)
            largest = INT_MAX if self.kind is ConfigKind.INT else LONG_MAX
            if not -largest - 1 <= value <= largest:
                return None
        if value == self.also:
            return value
        too_small = self.minimum is not None and value < self.minimum
        too_large = bounded and self.maximum is not None and value > self.maximum
        return None if too_small or too_large else value

    def _list(self, text: str) -> tuple[str, ...] | None:
        elements = split_list(text)
        if len(set(elements)) != len(elements):
            return None
        if self.replicas:
            valid = elements == ("*",) or all(_REPLICA.fullmatch(element) for element in elements)
        else:
            valid = not self.choices or set(elements) <= set(self.choices)
        return elements if valid else None


def split_list(text: str) -> tuple[str, ...]:
    """The elements of a list value. An empty text has none; an empty element is kept, to be refused."""
    stripped = text.strip()
    return tuple(element.strip() for element in stripped.split(",")) if stripped else ()


def topic_key(name: str) -> ConfigKey:
    """The key called ``name``; ApiError INVALID_CONFIG with the closest known name if there is none."""
    key = TOPIC_KEYS.get(name)
    if key is None:
        close = difflib.get_close_matches(name[:200], TOPIC_KEYS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ApiError(
            ErrorCode.invalid_config,
            f"unknown topic config {name[:200]!r}: {hint}'tidemill topic describe TOPIC --all-configs' lists "
            "the known names",
        )
    return key


def _inert(
    name: str,
    kind: ConfigKind,
    default: str,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    also: int | None = None,
) -> ConfigKey:
    return ConfigKey(
        name,
        kind,
        default,
        f"{doc} Stored and shown; it has no effect here.",
        effective=False,
        minimum=minimum,
        maximum=maximum,
        also=also,
    )


_K = ConfigKind

_EFFECTIVE = (
    ConfigKey(
        "cleanup.policy",
        _K.LIST,
        "delete",
        "What happens to old data: delete drops segments past the retention, "
        "compact keeps the last record of every key. Empty keeps everything.",
        choices=("compact", "delete"),
    ),
    ConfigKey(
        "compression.type",
        _K.STRING,
        "producer",
        "How batches are stored: as the producer compressed them, or recompressed.",
        choices=("uncompressed", "zstd", "lz4", "snappy", "gzip", "producer"),
    ),
    ConfigKey(
        "delete.retention.ms",
        _K.LONG,
        "86400000",
        "How long a compacted topic keeps the marker of a deleted key.",
        minimum=0,
    ),
    ConfigKey(
        "flush.messages",
        _K.LONG,
        _LONG_MAX_TEXT,
        "Lets batches that no producer waits for (acks=0) stay unsynced, and so unreadable, until there are "
        "this many records. By default every append is synced at once.",
        minimum=1,
    ),
    ConfigKey(
        "flush.ms",
        _K.LONG,
        _LONG_MAX_TEXT,
        "Lets batches that no producer waits for (acks=0) stay unsynced, and so unreadable, for this long. "
        "By default every append is synced at once.",
        minimum=0,
    ),
    ConfigKey(
        "index.interval.bytes",
        _K.INT,
        "4096",
        "Bytes of log between two entries of the offset index. Kafka has no upper bound; here a read checks "
        "what lies between the entry and its offset.",
        minimum=0,
        maximum=INDEX_INTERVAL_BYTES_MAX,
    ),
    ConfigKey(
        "follower.replication.throttled.replicas",
        _K.LIST,
        "",
        "Replicas that keep to follower.replication.throttled.rate of their node until they are in sync.",
        replicas=True,
    ),
    ConfigKey(
        "internal.segment.bytes",
        _K.INT,
        None,
        "Replaces segment.bytes without its lower bound. For tests. A partition that has 1,000 segments goes "
        "on with segments of at least 1 MiB.",
        minimum=1,
        internal=True,
    ),
    ConfigKey(
        "leader.replication.throttled.replicas",
        _K.LIST,
        "",
        "Leaders that keep to leader.replication.throttled.rate of their node for replicas not in sync.",
        replicas=True,
    ),
    ConfigKey(
        "max.compaction.lag.ms",
        _K.LONG,
        _LONG_MAX_TEXT,
        "The longest time a record may wait for compaction.",
        minimum=1,
    ),
    ConfigKey(
        "max.message.bytes",
        _K.INT,
        "1048588",
        "The largest record batch, as stored. Kafka has no upper bound; here a batch is written in one go.",
        minimum=0,
        maximum=BATCH_BYTES_MAX,
    ),
    ConfigKey(
        "message.timestamp.after.max.ms",
        _K.LONG,
        "3600000",
        "How far a record's create time may be ahead of the node's clock.",
        minimum=0,
    ),
    ConfigKey(
        "message.timestamp.before.max.ms",
        _K.LONG,
        _LONG_MAX_TEXT,
        "How far a record's create time may be behind the node's clock.",
        minimum=0,
    ),
    ConfigKey(
        "message.timestamp.type",
        _K.STRING,
        "CreateTime",
        "Whether a record carries the producer's time or the time of the append.",
        choices=("CreateTime", "LogAppendTime"),
    ),
    ConfigKey(
        "min.cleanable.dirty.ratio",
        _K.DOUBLE,
        "0.5",
        "The share of not yet compacted bytes from which a log is compacted.",
        minimum=0,
        maximum=1,
    ),
    ConfigKey("min.compaction.lag.ms", _K.LONG, "0", "How long a record is safe from compaction.", minimum=0),
    ConfigKey(
        "min.insync.replicas",
        _K.INT,
        "1",
        "How many in-sync replicas a write with acks=all needs.",
        minimum=1,
    ),
    ConfigKey(
        "retention.bytes",
        _K.LONG,
        "-1",
        "The size from which a partition's oldest segments are deleted; -1 is no limit.",
    ),
    ConfigKey(
        "retention.ms",
        _K.LONG,
        _WEEK_MS,
        "The age from which segments are deleted; -1 is no limit.",
        minimum=-1,
    ),
    ConfigKey(
        "segment.bytes", _K.INT, "1073741824", "The size at which a new segment begins.", minimum=1048576
    ),
    ConfigKey("segment.ms", _K.LONG, _WEEK_MS, "The age at which a new segment begins.", minimum=1),
    ConfigKey(
        "tidemill.retention.waits.for.cursors",
        _K.BOOLEAN,
        "false",
        "Whether retention keeps what the slowest cursor has not read. Kafka does not have it.",
    ),
)

_INERT = (
    _inert(
        "compression.gzip.level", _K.INT, "-1", "Level of gzip recompression.", minimum=1, maximum=9, also=-1
    ),
    _inert("compression.lz4.level", _K.INT, "9", "Level of lz4 recompression.", minimum=1, maximum=17),
    _inert(
        "compression.zstd.level", _K.INT, "3", "Level of zstd recompression.", minimum=-131072, maximum=22
    ),
    _inert(
        "file.delete.delay.ms", _K.LONG, "60000", "Delay before a deleted segment's file goes.", minimum=0
    ),
    _inert("local.retention.bytes", _K.LONG, "-2", "Local size of a tiered topic.", minimum=-2),
    _inert("local.retention.ms", _K.LONG, "-2", "Local age of a tiered topic.", minimum=-2),
    _inert("preallocate", _K.BOOLEAN, "false", "Whether segment files are allocated in full."),
    _inert("remote.copy.lag.bytes", _K.LONG, "0", "Size before tiering copies a segment.", minimum=-1),
    _inert("remote.copy.lag.ms", _K.LONG, "0", "Age before tiering copies a segment.", minimum=-1),
    _inert("remote.log.copy.disable", _K.BOOLEAN, "false", "Stops tiering from copying."),
    _inert(
        "remote.log.delete.on.disable", _K.BOOLEAN, "false", "Deletes tiered data when tiering is turned off."
    ),
    _inert("remote.storage.enable", _K.BOOLEAN, "false", "Tiered storage."),
    _inert("segment.index.bytes", _K.INT, "10485760", "Largest size of an index file.", minimum=4),
    _inert("segment.jitter.ms", _K.LONG, "0", "Random spread of segment.ms.", minimum=0),
    _inert("unclean.leader.election.enable", _K.BOOLEAN, "false", "Lets a replica that lacks data lead."),
)

#: Every known topic config by name, in alphabetical order.
TOPIC_KEYS: Mapping[str, ConfigKey] = {
    key.name: key for key in sorted((*_EFFECTIVE, *_INERT), key=lambda key: key.name)
}
