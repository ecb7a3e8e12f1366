"""Splitting what is to be read: a table's buckets into ranges of keys, and logs into ranges by bytes.

Each function takes the ``Cluster`` first, asks the leaders, and tries again what passes by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from tidemill.client.cluster import Cluster, TopicPartition
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.net.answers import check, checked
from tidemill.net.retry import is_transient

if TYPE_CHECKING:
    from tidemill.client.tables.bucket_scanner import BucketScan

__all__ = ("Measured", "Piece", "measure", "split_bucket")

#: Long, because splitting walks over a bucket, and may wait for other walks to end.
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
    """The size of a range of a log."""

    log_start_offset: int
    #: Where the range ends: as asked, at the log's end, or before that where ``max_bytes`` are full.
    end_offset: int
    size_bytes: int
    #: Why it could not be measured. With OFFSET_OUT_OF_RANGE the offsets say where the log starts and ends.
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
    async def ask() -> Sequence[Any]:
        (leader,) = await cluster.leaders([(scan.topic, scan.bucket)])
        connection = await cluster.connection(leader, purpose=_SPLIT_PURPOSE)
        response = await connection.request("SplitBucket", body, timeout_ms=_SPLIT_TIMEOUT_MS)
        pieces: Sequence[Any] = checked(response, f"splitting bucket {scan.bucket} of {scan.topic}").pieces
        return pieces

    return await cluster.retrying(ask)


async def measure(
    cluster: Cluster, ranges: Mapping[TopicPartition, tuple[int, int, int]]
) -> dict[TopicPartition, Measured]:
    """Measure ranges of logs, given as (start offset, end offset, most bytes) by topic and partition.

    An end offset of -1 is the last stable offset, most bytes of -1 are no limit. A range that cannot be
    measured has its ``error``; the others are measured nevertheless.
    """
    results: dict[TopicPartition, Measured] = {}

    async def ask() -> None:
        missing = [partition for partition in ranges if partition not in results]
        answers = await asyncio.gather(
            *(
                _measure_at(cluster, leader, partitions, ranges)
                for leader, partitions in (await _leaders(cluster, missing, results)).items()
            )
        )
        passing: TidemillError | None = None
        for partition, measured in (pair for answer in answers for pair in answer.items()):
            if measured.error is not None and is_transient(measured.error):
                passing = measured.error
            else:
                results[partition] = measured
        if passing is not None:
            raise passing

    await cluster.retrying(ask)
    return {partition: results[partition] for partition in ranges}


async def _leaders(
    cluster: Cluster, partitions: Sequence[TopicPartition], results: dict[TopicPartition, Measured]
) -> dict[int, list[TopicPartition]]:
    """The partitions by leader; those that do not exist get an error in ``results``."""
    by_leader: dict[int, list[TopicPartition]] = {}
    for partition in partitions:
        try:
            (leader,) = await cluster.leaders([partition])
        except ApiError as error:
            if error.code != ErrorCode.unknown_topic_or_partition:
                raise
            results[partition] = Measured(-1, -1, 0, error)
        else:
            by_leader.setdefault(leader, []).append(partition)
    return by_leader


async def _measure_at(
    cluster: Cluster,
    leader: int,
    partitions: Sequence[TopicPartition],
    ranges: Mapping[TopicPartition, tuple[int, int, int]],
) -> dict[TopicPartition, Measured]:
    connection = await cluster.connection(leader)
    results: dict[TopicPartition, Measured] = {}
    for first in range(0, len(partitions), _RANGES_PER_REQUEST):
        wanted = [
            {
                "topic": topic,
                "partition": partition,
                "start_offset": ranges[topic, partition][0],
                "end_offset": ranges[topic, partition][1],
                "max_bytes": ranges[topic, partition][2],
            }
            for topic, partition in partitions[first : first + _RANGES_PER_REQUEST]
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
