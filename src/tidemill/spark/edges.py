"""Where reading begins and ends, from what the options say to offsets."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tidemill.client.admin import EARLIEST, LATEST, list_offsets
from tidemill.client.cluster import Cluster
from tidemill.spark.errors import DataLost, InvalidOption
from tidemill.spark.options import Edge
from tidemill.spark.positions import Place

__all__ = ("checked_start", "committed_ends", "log_starts", "resolve")


async def committed_ends(cluster: Cluster, places: Collection[Place]) -> dict[Place, int]:
    """Where the committed part of each log ends: what a batch may read up to."""
    found = await list_offsets(cluster, dict.fromkeys(places, LATEST), committed=True)
    return {place: at.offset for place, at in found.items()}


async def log_starts(cluster: Cluster, places: Collection[Place]) -> dict[Place, int]:
    """The first offset that each log still has."""
    found = await list_offsets(cluster, dict.fromkeys(places, EARLIEST))
    return {place: at.offset for place, at in found.items()}


async def resolve(cluster: Cluster, places: Collection[Place], edge: Edge, now_ms: int) -> dict[Place, int]:
    """The offset of every partition that ``edge`` means. A time behind the last record means the end."""
    ends = await committed_ends(cluster, places)
    if edge.kind == "latest":
        return ends
    if edge.kind == "earliest":
        return await log_starts(cluster, places)
    if edge.kind in ("offsets", "times"):
        _refuse_others(edge.by_partition, places)
        if edge.kind == "times":
            return await _by_time(cluster, _asked(edge.by_partition, places), ends)
        return await _by_offset(cluster, _asked(edge.by_partition, places), ends)
    assert edge.kind in ("time", "relative"), edge
    return await _by_time(cluster, dict.fromkeys(places, edge.at_ms(now_ms)), ends)


async def _by_time(
    cluster: Cluster, times: Mapping[Place, int], ends: Mapping[Place, int]
) -> dict[Place, int]:
    found = await list_offsets(cluster, times)
    return {
        place: ends[place] if at.offset < 0 else min(at.offset, ends[place]) for place, at in found.items()
    }


async def _by_offset(
    cluster: Cluster, offsets: Mapping[Place, int], ends: Mapping[Place, int]
) -> dict[Place, int]:
    starts = await log_starts(cluster, list(offsets))
    words = {EARLIEST: starts, LATEST: ends}
    return {place: words[offset][place] if offset < 0 else offset for place, offset in offsets.items()}


def _asked(by_partition: Mapping[str, Mapping[int, int]], places: Collection[Place]) -> dict[Place, int]:
    missing = [place for place in places if place[1] not in by_partition.get(place[0], {})]
    if missing:
        names = ", ".join(f"{topic}-{number}" for topic, number in sorted(missing)[:10])
        raise InvalidOption(f"the offsets that were given say nothing about {names}: name every partition")
    return {(topic, number): by_partition[topic][number] for topic, number in places}


def _refuse_others(by_partition: Mapping[str, Mapping[int, int]], places: Collection[Place]) -> None:
    known = set(places)
    for topic, entries in by_partition.items():
        for number in entries:
            if (topic, number) not in known:
                raise InvalidOption(f"the offsets that were given name {topic}-{number}, which is not read")


def checked_start(place: Place, start: int, log_start: int, log_end: int, *, fail: bool) -> int:
    """``start``, if the log still has it. Else ``DataLost``, or where to go on without what is gone."""
    if log_start <= start <= log_end:
        return start
    topic, number = place
    if fail:
        lost = f"{topic}-{number} begins at {log_start} now: offsets {start} to {log_start - 1} were deleted"
        if start > log_end:
            lost = (
                f"{topic}-{number} ends at {log_end}, and the query has read up to {start}: it was made anew"
            )
        raise DataLost(
            f"{lost}. To go on with what is there, set failOnDataLoss to false; retention.ms and "
            f"retention.bytes of the topic say how long records are kept"
        )
    return log_start
