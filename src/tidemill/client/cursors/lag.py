"""How far positions are behind the ends of their logs: in records, and in seconds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

from tidemill.client.cluster import Cluster
from tidemill.client.cursors.reader import fetch_body
from tidemill.cursors.position import Position
from tidemill.cursors.region import Region
from tidemill.errors import ErrorCode
from tidemill.net.answers import check, checked
from tidemill.records.batch import HEADER_BYTES, parse_header

__all__ = ("Lag", "PartitionLag", "measure_lag")

_PARTITIONS_PER_REQUEST: Final = 1_000


class PartitionLag(NamedTuple):
    """The lag of one partition.

    ``records`` is the distance to the last stable offset: how many records there are at most. ``seconds`` is
    the age of the next record, or 0 if there is none. A position that the log does not have has ``problem``.
    """

    position: int
    end_offset: int
    records: int
    seconds: float
    problem: str | None = None


class Lag(NamedTuple):
    """The lag of a cursor: the sum and the largest of its partitions, and each of them."""

    records: int
    seconds: float
    partitions: dict[int, PartitionLag]


async def measure_lag(cluster: Cluster, topic: str, topic_id: UUID, positions: Mapping[int, Position]) -> Lag:
    """Ask the leaders how far they are ahead of these positions."""

    async def ask() -> dict[int, PartitionLag]:
        found: dict[int, PartitionLag] = {}
        by_leader = await cluster.leaders([(topic, partition) for partition in positions])
        for part in await asyncio.gather(
            *(
                _ask(cluster, node_id, topic, topic_id, {index: positions[index] for _, index in partitions})
                for node_id, partitions in by_leader.items()
            )
        ):
            found |= part
        return found

    found = await cluster.retrying(ask)
    return Lag(
        sum(each.records for each in found.values()),
        max((each.seconds for each in found.values()), default=0.0),
        dict(sorted(found.items())),
    )


async def _ask(
    cluster: Cluster, node_id: int, topic: str, topic_id: UUID, positions: Mapping[int, Position]
) -> dict[int, PartitionLag]:
    connection = await cluster.connection(node_id, purpose="lag")
    found: dict[int, PartitionLag] = {}
    # One request for each partition: an answer holds only the first batch of the first one that has any.
    for partition, position in positions.items():
        body = fetch_body(Region(topic, topic_id), {partition: position}, 0, 1)
        answer = checked(await connection.request("FetchRegion", body), f"measuring the lag of {topic}")
        found[partition] = _lag(answer.partitions[0], position, topic)
    return found


def _lag(entry: Any, position: Position, topic: str) -> PartitionLag:
    problem = None
    if entry.error_code == ErrorCode.offset_out_of_range:
        problem = entry.error_message
    else:
        check(entry.error_code, entry.error_message, f"measuring the lag of {topic}-{entry.partition}")
    end = entry.last_stable_offset
    seconds = 0.0
    if entry.records and len(entry.records) >= HEADER_BYTES:
        seconds = max(0.0, time.time() - parse_header(entry.records).max_timestamp / 1000)
    records = max(0, end - max(position.offset, entry.log_start_offset))
    return PartitionLag(position.offset, end, records, seconds, problem)
