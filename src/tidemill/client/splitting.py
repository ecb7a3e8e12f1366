"""Sharing out what there is to read: pieces of a table's buckets, and ranges of logs by their bytes.

Each function takes the ``Cluster`` first, asks the leaders, and tries again what passes by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tidemill.client.cluster import Cluster, TopicPartition, check, passes_by_itself
from tidemill.errors import ApiError, ErrorCode, TidemillError

if TYPE_CHECKING:
    from tidemill.client.tables.scanner import BucketScan

__all__ = ("Measured", "Piece", "measure", "split_bucket")

#: A walk over a bucket may wait for those before it.
_SPLIT_TIMEOUT_MS: Final = 120_000
_SPLIT_PURPOSE: Final = "split"
_RANGES_PER_REQUEST: Final = 10_000


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a bucket from ``start_key`` up to, but without, ``end_key``; None: no bound on that side."""

    start_key: bytes | None
    end_key: bytes | None
    rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Measured:
    """How long a range of a log is."""

    log_start_offset: int
    #: Where the range ends: as asked, at the log's end, or before that where ``max_bytes`` are full.
    end_offset: int
    size_bytes: int
    #: Why it could not be measured. Of OFFSET_OUT_OF_RANGE, the offsets say where the log starts and ends.
    error: TidemillError | None = None


async def split_bucket(
    cluster: Cluster,
    scan: BucketScan,
    *,
    start_key: bytes | None = None,
    end_key: bytes | None = None,
    max_rows: int = 0,
    max_bytes: int = 0,
    max_pieces: int = 0,
) -> list[Piece]:
    """Cut the rows of a bucket, or a range of them, into pieces in order; no rows, no pieces.

    What is read, and as of when, is that of ``scan``; so is the range, unless it is given. A piece has at
    most ``max_rows`` rows and ``max_bytes`` of state, but at least one row. 0: no limit. If ``max_pieces`` do
    not cover the range, the last piece ends before the range does.
    """
    pieces: list[Piece] = []
    start_key = scan.start_key if start_key is None else start_key
    range_end = scan.end_key if end_key is None else end_key
    while True:
        wanted = max_pieces - len(pieces) if max_pieces > 0 else 0
        body = {
            "table_id": scan.table_id,
            "partition_id": scan.partition_id,
            "bucket": scan.bucket,
            "leader_epoch": -1,
            "pin_id": scan.pin_id,
            "lease_id": scan.lease_id,
            "start_key": start_key,
            "end_key": range_end,
            "max_rows": max_rows,
            "max_bytes": max_bytes,
            "max_pieces": wanted,
        }
        found = await _ask_for_pieces(cluster, scan, body)
        for each in found:
            piece_end = range_end if each.end_key is None else each.end_key
            pieces.append(Piece(start_key, piece_end, each.row_count, each.size_bytes))
            start_key = piece_end
        if not found or found[-1].end_key is None or (max_pieces > 0 and len(pieces) >= max_pieces):
            return pieces


async def _ask_for_pieces(cluster: Cluster, scan: BucketScan, body: Mapping[str, Any]) -> Sequence[Any]:
    # Here, because measuring needs no Arrow.
    from tidemill.client.tables.requests import checked, is_worth_another_try

    async def attempt() -> Sequence[Any]:
        (leader,) = await cluster.leaders([(scan.topic, scan.bucket)])
        connection = await cluster.connection(leader, purpose=_SPLIT_PURPOSE)
        response = await connection.request("SplitBucket", body, timeout_ms=_SPLIT_TIMEOUT_MS)
        pieces: Sequence[Any] = checked(response, f"splitting bucket {scan.bucket} of {scan.topic}").pieces
        return pieces

    return await cluster.retrying(attempt, passes=is_worth_another_try)


async def measure(
    cluster: Cluster, ranges: Mapping[TopicPartition, tuple[int, int, int]]
) -> dict[TopicPartition, Measured]:
    """Measure ranges of logs, given as (start offset, end offset, most bytes) by topic and partition.

    An end offset of -1 is the last stable offset, most bytes of -1 are no limit. A range that cannot be
    measured has its ``error``, the others are there all the same.
    """
    results: dict[TopicPartition, Measured] = {}

    async def attempt() -> None:
        missing = [place for place in ranges if place not in results]
        answers = await asyncio.gather(
            *(
                _measure_at(cluster, leader, places, ranges)
                for leader, places in (await _leaders(cluster, missing, results)).items()
            )
        )
        passing: TidemillError | None = None
        for place, measured in (pair for answer in answers for pair in answer.items()):
            if measured.error is not None and passes_by_itself(measured.error):
                passing = measured.error
            else:
                results[place] = measured
        if passing is not None:
            raise passing

    await cluster.retrying(attempt)
    return {place: results[place] for place in ranges}


async def _leaders(
    cluster: Cluster, places: Sequence[TopicPartition], results: dict[TopicPartition, Measured]
) -> dict[int, list[TopicPartition]]:
    """The places by leader; those that do not exist are results already."""
    by_leader: dict[int, list[TopicPartition]] = {}
    for place in places:
        try:
            (leader,) = await cluster.leaders([place])
        except ApiError as error:
            if error.code != ErrorCode.unknown_topic_or_partition:
                raise
            results[place] = Measured(-1, -1, 0, error)
        else:
            by_leader.setdefault(leader, []).append(place)
    return by_leader


async def _measure_at(
    cluster: Cluster,
    leader: int,
    places: Sequence[TopicPartition],
    ranges: Mapping[TopicPartition, tuple[int, int, int]],
) -> dict[TopicPartition, Measured]:
    connection = await cluster.connection(leader)
    results: dict[TopicPartition, Measured] = {}
    for first in range(0, len(places), _RANGES_PER_REQUEST):
        wanted = [
            {
                "topic": topic,
                "partition": partition,
                "start_offset": ranges[topic, partition][0],
                "end_offset": ranges[topic, partition][1],
                "max_bytes": ranges[topic, partition][2],
            }
            for topic, partition in places[first : first + _RANGES_PER_REQUEST]
        ]
        response = await connection.request("MeasureLog", {"ranges": wanted})
        check(response.error_code, response.error_message, "measuring logs")
        for each in response.ranges:
            error = (
                None
                if each.error_code == ErrorCode.none
                else ApiError(
                    ErrorCode(each.error_code), each.error_message or f"{each.topic}-{each.partition}"
                )
            )
            results[each.topic, each.partition] = Measured(
                each.log_start_offset, each.end_offset, each.size_bytes, error
            )
    return results
