"""From a place in a log, as people write it, to the offsets of partitions."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import typer

from tidemill.cli.when import Place, PlaceKind, parse_place

if TYPE_CHECKING:
    from tidemill.client.cluster import Cluster, TopicPartition

__all__ = ("offsets_at", "place_argument", "topic_partitions")

_TOPIC_AND_PARTITIONS = re.compile(r"([^:]+)(?::([0-9]{1,9}(?:,[0-9]{1,9})*))?")


def place_argument(text: str, option: str) -> Place:
    """Parse an option's value; a mistake is a usage error."""
    try:
        return parse_place(text, time.time_ns() // 1_000_000)
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
    place: Place,
    shift_from: Mapping[TopicPartition, int] | None = None,
) -> dict[TopicPartition, int]:
    """The offset of ``place`` in each partition.

    A shift counts from ``shift_from``, else from the end. What lies outside of the log is moved to its nearer
    end, and a time after the last record means the end.
    """
    from tidemill.client.admin import EARLIEST, LATEST, list_offsets

    starts = await list_offsets(cluster, dict.fromkeys(partitions, EARLIEST))
    ends = await list_offsets(cluster, dict.fromkeys(partitions, LATEST))
    timed = {}
    if place.kind is PlaceKind.TIME:
        timed = await list_offsets(cluster, dict.fromkeys(partitions, place.value))
    found: dict[TopicPartition, int] = {}
    for partition in partitions:
        start, end = starts[partition].offset, ends[partition].offset
        offset = {PlaceKind.EARLIEST: start, PlaceKind.LATEST: end}.get(place.kind, place.value)
        if place.kind is PlaceKind.SHIFT:
            offset += (shift_from or {}).get(partition, end)
        elif place.kind is PlaceKind.TIME:
            offset = timed[partition].offset if timed[partition].offset >= 0 else end
        found[partition] = min(max(offset, start), end)
    return found
