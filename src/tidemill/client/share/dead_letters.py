"""The dead records of a share group, as its dead-letter topic has them: the newest ones, without taking them.

A letter stays in its topic after it was sent back. Which ones were is known by the share group of redrives:
what it has finished is left out.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from tidemill.client.admin.share_groups import ShareRecords, share_offsets, share_records
from tidemill.client.admin.topics import EARLIEST, LATEST, list_offsets
from tidemill.client.consuming.record_reader import RecordReader
from tidemill.client.share.group_configs import group_overrides
from tidemill.config.group_keys import DEAD_LETTER_TOPIC
from tidemill.errors import ApiError, ErrorCode
from tidemill.share.letters import REDRIVE_PREFIX, read_letter

if TYPE_CHECKING:
    from tidemill.client.cluster import Cluster, TopicPartition
    from tidemill.records.record import Record

__all__ = ("DEAD", "newest_dead")

DEAD: Final = "dead"
#: Offsets of a partition that are read at once, from its end backwards, and in all.
_READ_AT_ONCE: Final = 500
_READ_MAX: Final = 10_000
_RUNS_MAX: Final = 1_000


async def newest_dead(cluster: Cluster, group: str, limit: int) -> list[tuple[TopicPartition, ShareRecords]]:
    """Dead records that were not sent back, each with its partition: ``limit`` of each partition of letters.

    Others may write letters to the same topic: only so many of the newest offsets are looked at.
    """
    topic = (await group_overrides(cluster, group)).get(DEAD_LETTER_TOPIC)
    if not topic:
        return []
    try:
        partitions = [(topic, index) for index in range(len((await cluster.topic(topic)).partitions))]
    except ApiError as error:
        if error.code == ErrorCode.unknown_topic_or_partition:
            return []
        raise
    starts = await list_offsets(cluster, dict.fromkeys(partitions, EARLIEST))
    ends = await list_offsets(cluster, dict.fromkeys(partitions, LATEST), committed=True)
    redriven = await _redriven(cluster, group, partitions)
    found: list[tuple[TopicPartition, ShareRecords]] = []
    for partition in partitions:
        high = ends[partition].offset
        low = max(starts[partition].offset, high - _READ_MAX)
        newest: list[tuple[TopicPartition, ShareRecords]] = []
        while high > low and len(newest) < limit:
            first = max(low, high - _READ_AT_ONCE)
            records = await _read(cluster, partition, first, high)
            left = [each for each in records if not redriven[partition].has(each.offset)]
            newest = [*filter(None, (_dead(group, each) for each in left)), *newest]
            high = first
        found += newest[-limit:]
    return found


class _Redriven:
    """Which letters of a partition were sent back: those below ``end`` that are in no run."""

    def __init__(self, end: int = 0, unfinished: Sequence[tuple[int, int]] = ()) -> None:
        self._end = end
        self._unfinished = unfinished

    def has(self, offset: int) -> bool:
        return offset < self._end and not any(first <= offset <= last for first, last in self._unfinished)


async def _redriven(
    cluster: Cluster, group: str, partitions: Sequence[TopicPartition]
) -> dict[TopicPartition, _Redriven]:
    """What redrives have finished. Nothing, if there was none yet."""
    redrive = REDRIVE_PREFIX + group
    found = dict.fromkeys(partitions, _Redriven())
    try:
        begun = await share_offsets(cluster, redrive)
    except ApiError as error:
        if error.code == ErrorCode.group_id_not_found:
            return found
        raise
    for partition in partitions:
        if partition in begun and begun[partition].start_offset is not None:
            state = await share_records(cluster, redrive, partition, limit=_RUNS_MAX)
            runs = [(run.first_offset, run.last_offset) for run in state.records]
            # With more runs than are told, what lies behind them is not known to be finished.
            end = state.end_offset if len(runs) < _RUNS_MAX else runs[-1][1] + 1
            found[partition] = _Redriven(end, runs)
    return found


async def _read(cluster: Cluster, partition: TopicPartition, first: int, end: int) -> list[Record]:
    """The committed records from ``first`` to before ``end``."""
    reader = RecordReader(cluster, {partition: first}, committed=True, out_of_range="earliest")
    records: list[Record] = []
    try:
        while reader.positions[partition] < end:
            records += [message.record for message in await reader.poll()]
    finally:
        await reader.close()
    return [record for record in records if record.offset < end]


def _dead(group: str, record: Record) -> tuple[TopicPartition, ShareRecords] | None:
    """What a letter says of its record; None if it is no letter of the group."""
    letter = read_letter(record.headers)
    if letter is None or letter.group_id != group:
        return None
    age_ms = max(0, int(time.time() * 1000) - record.timestamp_ms)
    said = ShareRecords(
        letter.offset, letter.offset, DEAD, letter.delivery_count, "", 0, age_ms, letter.reason
    )
    return (letter.topic, letter.partition), said
