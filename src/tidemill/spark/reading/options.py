"""The options of reading, checked: every wrong one is refused with what is right.

Names are those of Spark's Kafka source where it has them, and without regard to case.

| option | meaning |
| --- | --- |
| ``servers`` | some nodes, ``host:port,host:port``; also ``kafka.bootstrap.servers``, ``$TIDEMILL_SERVER`` |
| ``table`` | a table ``database.name`` |
| ``topic`` | topics, ``a,b``, as Kafka's columns; also ``subscribe`` |
| ``topicPattern`` | topics whose whole names match; also ``subscribePattern`` |
| path (``load("x")``) | a table of that name, or else a topic |
| ``columns`` | only these columns, ``a,b``: the server sends no others |
| ``where`` | of a table's rows: only those that pass, in SQL; the server sends no others |
| ``pushFilters`` | of a table's rows: let Spark send its filters to the server (see docs/spark.md first) |
| ``changes`` | of a table with a primary key: its changes instead of its rows |
| ``includeMetadata`` | of a table without one: where each row is in the log |
| ``includeHeaders`` | of topics: a column ``headers`` |
| ``startingOffsets``, ``endingOffsets`` | ``earliest``, ``latest``, or JSON ``{"topic": {"0": 23}}``; |
| | a stream of changes begins with ``snapshot`` |
| ``startingTime``, ``endingTime`` | ISO 8601, milliseconds, or relative: ``-10 minutes`` |
| ``startingOffsetsByTimestamp``, ``endingOffsetsByTimestamp`` | JSON ``{"topic": {"0": ms}}`` |
| ``maxRowsPerTrigger`` | how much a batch of a stream takes at most; also ``maxOffsetsPerTrigger`` |
| ``maxBytesPerTrigger`` | the same in bytes of log or state |
| ``minPartitions`` | split into at least so many tasks |
| ``failOnDataLoss`` | whether records that are gone stop the query (``true``) |
| ``groupId`` | the group under which a stream's progress is shown |
| ``cursor`` | a durable cursor: a new stream begins where it stands, and moves it with every batch |
| ``snapshotLease`` | how long a stopped query's snapshot is kept for it (``24 hours``) |
| ``pinIdle`` | how long a table's state is held while no task reads it (``10 minutes``) |
| ``timeout`` | how long a node may be away (``2 minutes``) |
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal

from tidemill.config.values import time_unit_ms
from tidemill.spark.connection import DEFAULT_TIMEOUT_MS
from tidemill.spark.errors import InvalidOption

__all__ = (
    "SERVER_NAMES",
    "Edge",
    "ReadOptions",
    "duration_ms",
    "flag",
    "refuse_misspelt",
    "servers_of",
    "whole",
)

#: Names of the option that says where the nodes are.
SERVER_NAMES: Final = ("servers", "bootstrap.servers", "kafka.bootstrap.servers")
_NAMES: Final = (
    *SERVER_NAMES,
    "table",
    "topic",
    "subscribe",
    "topicPattern",
    "subscribePattern",
    "columns",
    "where",
    "pushFilters",
    "changes",
    "includeMetadata",
    "includeHeaders",
    "startingOffsets",
    "endingOffsets",
    "startingTime",
    "startingTimestamp",
    "endingTime",
    "endingTimestamp",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "maxRowsPerTrigger",
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minPartitions",
    "failOnDataLoss",
    "groupId",
    "cursor",
    "snapshotLease",
    "pinIdle",
    "timeout",
)
_WORDS: Final[dict[str, Literal["earliest", "latest", "snapshot"]]] = {
    "earliest": "earliest",
    "latest": "latest",
    "snapshot": "snapshot",
}
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE)
_DAY_MS: Final = 86_400_000
_LIKENESS: Final = 0.8
_PARTITIONS_MAX: Final = 10_000


@dataclass(frozen=True, slots=True)
class Edge:
    """Where reading begins or ends: by a word, by offsets, by one time, or by times of partitions.

    ``relative`` times are milliseconds from the moment when the query begins.
    """

    kind: Literal["earliest", "latest", "snapshot", "offsets", "time", "relative", "times"]
    time_ms: int = 0
    by_partition: Mapping[str, Mapping[int, int]] = field(default_factory=dict)

    def at_ms(self, now_ms: int) -> int:
        """The absolute time of an edge that was given by ``time`` or ``relative``."""
        return now_ms + self.time_ms if self.kind == "relative" else self.time_ms


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The options of a read, checked."""

    servers: str
    path: str | None
    table: str | None
    topics: tuple[str, ...]
    topic_pattern: str | None
    columns: tuple[str, ...]
    where: str | None
    push_filters: bool
    changes: bool
    metadata: bool
    headers: bool
    start: Edge | None
    end: Edge | None
    max_rows: int | None
    max_bytes: int | None
    min_partitions: int
    fail_on_data_loss: bool
    group_id: str | None
    cursor: str | None
    lease_ms: int
    #: 0 means the server's default.
    pin_idle_ms: int
    timeout_ms: int

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        """Parse and check what was given to Spark's ``option``. Raises ``InvalidOption``."""
        given = {name.lower(): value for name, value in options.items()}
        refuse_misspelt(given, _NAMES)
        read = cls(
            servers=servers_of(given),
            path=given.get("path"),
            table=given.get("table"),
            topics=_names(_one_of(given, "topic", "subscribe")),
            topic_pattern=_pattern(_one_of(given, "topicPattern", "subscribePattern")),
            columns=_names(given.get("columns")),
            where=given.get("where"),
            push_filters=flag(given, "pushFilters", False),
            changes=flag(given, "changes", False),
            metadata=flag(given, "includeMetadata", False),
            headers=flag(given, "includeHeaders", False),
            start=_edge(given, "starting"),
            end=_edge(given, "ending"),
            max_rows=whole(given, "maxRowsPerTrigger", None) or whole(given, "maxOffsetsPerTrigger", None),
            max_bytes=whole(given, "maxBytesPerTrigger", None),
            min_partitions=whole(given, "minPartitions", None) or 1,
            fail_on_data_loss=flag(given, "failOnDataLoss", True),
            group_id=given.get("groupid"),
            cursor=given.get("cursor"),
            lease_ms=duration_ms(given, "snapshotLease", _DAY_MS),
            pin_idle_ms=duration_ms(given, "pinIdle", 0),
            timeout_ms=duration_ms(given, "timeout", DEFAULT_TIMEOUT_MS),
        )
        read._check()
        return read

    def _check(self) -> None:
        targets = [self.path, self.table, self.topics or None, self.topic_pattern]
        if sum(target is not None for target in targets) != 1:
            raise InvalidOption(
                'say what to read: load("database.table"), or one of the options table, topic and '
                "topicPattern"
            )
        if self.min_partitions > _PARTITIONS_MAX:
            raise InvalidOption(f"option minPartitions is {self.min_partitions}; at most {_PARTITIONS_MAX}")
        if self.cursor is not None and self.start is not None:
            raise InvalidOption("option cursor says where to begin: leave startingOffsets and the like out")
        if self.end is not None and self.end.kind == "snapshot":
            raise InvalidOption("option endingOffsets cannot be snapshot: it is earliest, latest or offsets")


def refuse_misspelt(given: Mapping[str, str], names: tuple[str, ...]) -> None:
    """Refuse an unknown option if it looks like one of ours: Spark adds options of its own."""
    known = {name.lower(): name for name in names}
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1, _LIKENESS)
            if close:
                raise InvalidOption(f"there is no option {name!r}; did you mean {known[close[0]]!r}?")


def servers_of(given: Mapping[str, str]) -> str:
    """The nodes to connect to; those of the environment if the options do not say."""
    servers = _one_of(given, *SERVER_NAMES)
    servers = servers or os.environ.get("TIDEMILL_SERVER")
    if not servers:
        raise InvalidOption('say where the nodes are: .option("servers", "host:9092")')
    return servers


def flag(given: Mapping[str, str], name: str, default: bool) -> bool:
    """An option that is true or false."""
    text = given.get(name.lower())
    if text is None:
        return default
    if text.strip().lower() not in ("true", "false"):
        raise InvalidOption(f"option {name} is {text!r}; it is true or false")
    return text.strip().lower() == "true"


def whole(given: Mapping[str, str], name: str, default: int | None) -> int | None:
    """An option that is a whole number above zero."""
    text = given.get(name.lower())
    if text is None:
        return default
    if not text.strip().isascii() or not text.strip().isdecimal() or int(text) < 1 or int(text) >= 2**63:
        raise InvalidOption(f"option {name} is {text!r}; it is a whole number above zero")
    return int(text)


def duration_ms(given: Mapping[str, str], name: str, default_ms: int) -> int:
    """An option that is a length of time: ``10 minutes``, ``1h``, ``500ms``."""
    text = given.get(name.lower())
    if text is None:
        return default_ms
    found = _duration(text)
    if found is None or found < 1:
        raise InvalidOption(
            f"option {name} is {text!r}; it is a time such as '10 minutes', '1 hour' or '500 ms'"
        )
    return found


def _duration(text: str) -> int | None:
    """A length of time in milliseconds, None if it is none; several parts add up: ``1 hour 30 minutes``."""
    rest, total, position = text.strip(), 0.0, 0
    while position < len(rest):
        match = _DURATION.match(rest, position)
        if match is None:
            return None
        unit = match[2].lower()
        scale = time_unit_ms(unit)
        if scale is None:
            return None
        total += float(match[1]) * scale
        position = match.end()
        while position < len(rest) and rest[position] in " ,":
            position += 1
    return int(total) if rest else None


def _one_of(given: Mapping[str, str], *names: str) -> str | None:
    found = [name for name in names if name.lower() in given]
    if len(found) > 1:
        raise InvalidOption(f"options {' and '.join(found)} mean the same: give one of them")
    return given[found[0].lower()].strip() if found else None


def _names(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    names = tuple(name.strip() for name in text.split(","))
    if not all(names) or len(set(names)) < len(names):
        raise InvalidOption(f"{text!r} is not a list of different names: a,b,c")
    return names


def _pattern(text: str | None) -> str | None:
    if text is not None:
        try:
            re.compile(text)
        except re.error as error:
            raise InvalidOption(
                f"option topicPattern {text!r} is not a regular expression: {error}"
            ) from error
    return text


def _edge(given: Mapping[str, str], side: str) -> Edge | None:
    ways = {
        f"{side}Offsets": _by_offsets,
        f"{side}Time": _by_time,
        f"{side}Timestamp": _by_time,
        f"{side}OffsetsByTimestamp": _by_times,
    }
    found = [name for name in ways if name.lower() in given]
    if len(found) > 1:
        raise InvalidOption(f"options {' and '.join(found)} exclude each other: give one of them")
    return ways[found[0]](found[0], given[found[0].lower()].strip()) if found else None


def _by_offsets(name: str, text: str) -> Edge:
    word = text.lower()
    if word in _WORDS:
        return Edge(_WORDS[word])
    if not text.startswith("{"):
        raise InvalidOption(
            f"option {name} is {text!r}; it is earliest, latest, or offsets such as "
            '{"topic": {"0": 23, "1": -2}} (-2: earliest, -1: latest)'
        )
    return Edge("offsets", by_partition=_numbers(name, text, -2))


def _by_times(name: str, text: str) -> Edge:
    return Edge("times", by_partition=_numbers(name, text, 0))


def _numbers(name: str, text: str, least: int) -> dict[str, dict[int, int]]:
    try:
        value: Any = json.loads(text)
        found = {
            str(topic): {int(partition): _whole_json(number) for partition, number in entries.items()}
            for topic, entries in value.items()
        }
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidOption(
            f'option {name} is not JSON of the form {{"topic": {{"0": 23}}}}: {error}'
        ) from error
    for topic, entries in found.items():
        for partition, number in entries.items():
            if partition < 0 or number < least:
                raise InvalidOption(f"option {name}: {topic}-{partition} cannot be {number}")
    return found


def _whole_json(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number >= 2**63:
        raise TypeError(f"{number!r} is not a whole number")
    return number


def _by_time(name: str, text: str) -> Edge:
    if text.startswith("-") and (back := _duration(text[1:].strip())) is not None:
        return Edge("relative", -back)
    if text.isascii() and text.isdecimal():
        return Edge("time", int(text))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidOption(
            f"option {name} is {text!r}; it is a time such as 2026-11-16T09:30:00Z, milliseconds since 1970, "
            "or relative to now: -10 minutes"
        ) from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return Edge("time", int(moment.timestamp() * 1000))
