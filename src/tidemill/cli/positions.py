"""Positions in a log as people write them, and the offsets that they mean in each partition.

===================  ==========================================================
text                 position
===================  ==========================================================
``earliest``         the oldest record that is still there
``latest``           the end: only records that come from now on
``1234``             that offset
``2025-01-31T12:00``  the first record at or after that time; local unless it names a zone
``-10m``             the first record of the last ten minutes (ms, s, m, h, d, w); also ``-10 minutes``
``-5`` ``+5``        five back or forward, from where the command says
===================  ==========================================================
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, Final

import typer

from tidemill.config.values import time_unit_ms

if TYPE_CHECKING:
    from tidemill.cli.session import Session
    from tidemill.client.cluster import Cluster, TopicPartition

__all__ = (
    "Position",
    "PositionKind",
    "offsets_at",
    "parse_position",
    "position_argument",
    "show_moves",
    "topic_partitions",
)

_OFFSET = re.compile(r"[0-9]{1,19}")
_SHIFT = re.compile(r"[+-][0-9]{1,19}")
_AGO = re.compile(r"-([0-9]{1,12})\s*([a-z]+)")
_EXPECTED: Final = (
    "earliest, latest, an offset like 1234, a time like 2025-01-31T12:00 or 2025-01-31T12:00:00Z, "
    "an age like -10m (ms, s, m, h, d, w), or a shift like -5 or +5"
)


class PositionKind(Enum):
    """The meaning of a ``Position``'s value."""

    EARLIEST = "earliest"
    LATEST = "latest"
    OFFSET = "offset"
    TIME = "time in milliseconds"
    SHIFT = "shift"


@dataclass(frozen=True, slots=True)
class Position:
    """A position in a log; ``value`` is an offset, milliseconds since 1970, or a number of records."""

    kind: PositionKind
    value: int = 0


def parse_position(text: str, now_ms: int) -> Position:
    """Parse a position. Raises ValueError that says what is allowed.

    >>> parse_position("-10m", now_ms=1_000_000).value
    400000
    """
    text = text.strip()
    if text in ("earliest", "latest"):
        return Position(PositionKind(text))
    if _OFFSET.fullmatch(text):
        return Position(PositionKind.OFFSET, int(text))
    if _SHIFT.fullmatch(text):
        return Position(PositionKind.SHIFT, int(text))
    if (match := _AGO.fullmatch(text)) and (unit_ms := time_unit_ms(match[2])):
        return Position(PositionKind.TIME, max(0, now_ms - int(match[1]) * unit_ms))
    try:
        date_time = datetime.fromisoformat(text)
        time_ms = round(date_time.timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        raise ValueError(f"{text[:100]!r} is no position in a log: use {_EXPECTED}") from None
    if time_ms < 0:
        raise ValueError(f"{text!r} lies before 1970, where no record can be")
    return Position(PositionKind.TIME, time_ms)


_TOPIC_AND_PARTITIONS = re.compile(r"([^:]+)(?::([0-9]{1,9}(?:,[0-9]{1,9})*))?")


def position_argument(text: str, option: str) -> Position:
    """Parse an option's value as a position; a mistake is a usage error."""
    try:
        return parse_position(text, time.time_ns() // 1_000_000)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


async def topic_partitions(cluster: Cluster, text: str) -> list[TopicPartition]:
    """The partitions that ``TOPIC`` or ``TOPIC:0,2`` names."""
    match = _TOPIC_AND_PARTITIONS.fullmatch(text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is neither TOPIC nor TOPIC:0,1,2", param_hint="--topic")
    topic = await cluster.topic(match[1])
    if match[2] is None:
        return [(topic.name, partition.index) for partition in topic.partitions]
    chosen = [(topic.name, int(index)) for index in match[2].split(",")]
    await cluster.leaders(chosen)  # Raises for a partition that does not exist.
    return chosen


async def offsets_at(
    cluster: Cluster,
    partitions: Sequence[TopicPartition],
    position: Position,
    shift_from: Mapping[TopicPartition, int] | None = None,
) -> dict[TopicPartition, int]:
    """The offset of ``position`` in each partition.

    A shift counts from ``shift_from``, else from the end. What lies outside of the log is moved to its nearer
    end, and a time after the last record means the end.
    """
    from tidemill.client.admin.topics import EARLIEST, LATEST, list_offsets

    starts = await list_offsets(cluster, dict.fromkeys(partitions, EARLIEST))
    ends = await list_offsets(cluster, dict.fromkeys(partitions, LATEST))
    timed = {}
    if position.kind is PositionKind.TIME:
        timed = await list_offsets(cluster, dict.fromkeys(partitions, position.value))
    found: dict[TopicPartition, int] = {}
    for partition in partitions:
        start, end = starts[partition].offset, ends[partition].offset
        offset = {PositionKind.EARLIEST: start, PositionKind.LATEST: end}.get(position.kind, position.value)
        if position.kind is PositionKind.SHIFT:
            offset += (shift_from or {}).get(partition, end)
        elif position.kind is PositionKind.TIME:
            offset = timed[partition].offset if timed[partition].offset >= 0 else end
        found[partition] = min(max(offset, start), end)
    return found


def show_moves(
    session: Session,
    group: str,
    before: Mapping[TopicPartition, int],
    after: Mapping[TopicPartition, int],
    *,
    executed: bool,
) -> None:
    """Write where each partition of a group was, and where it is after a reset, or would be."""
    from tidemill.cli.output import Table, show, write_line

    moves = [
        {"topic": name, "partition": index, "from": before.get((name, index)), "to": offset}
        for (name, index), offset in sorted(after.items())
    ]
    rows = [tuple(each.values()) for each in moves]
    value = {"group": group, "executed": executed, "offsets": moves}
    show(session, value, Table(("topic", "partition", "from", "to"), rows))
    if not session.as_json and not executed:
        write_line("nothing was changed; add --execute to do it")
