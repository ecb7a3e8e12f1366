"""Searching the log of a partition by time, without holding the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tidemill.coordination.turns import give_way
from tidemill.errors import ApiError, ErrorCode, StorageError

if TYPE_CHECKING:
    from tidemill.log.segments.by_time import BatchLookup, TimedOffset, TimeSearch
    from tidemill.replication.partition import Partition
    from tidemill.server.broker import Broker

__all__ = ("find_time", "search")

_SEARCH_ATTEMPTS_MAX = 3


async def find_time(
    broker: Broker, partition: Partition, timestamp: int, upper_offset: int
) -> TimedOffset | None:
    """The first record at or after ``timestamp`` below ``upper_offset``; None if there is none."""
    return await search(broker, partition, lambda: partition.find_time(timestamp, upper_offset))


async def search(broker: Broker, partition: Partition, begin: Callable[[], TimeSearch]) -> TimedOffset | None:
    """Run a search by time: on the loop as long as that is quick, large batches in a thread."""
    for _ in range(_SEARCH_ATTEMPTS_MAX):
        segments = partition.segments
        try:
            return await _drive(broker, begin())
        except StorageError:
            if partition.failure is not None or partition.segments == segments:
                raise
            # Retention or compaction has removed a segment during the search: begin anew.
    raise ApiError(
        ErrorCode.leader_not_available,
        f"{partition.topic}-{partition.index} changes faster than it can be searched; try again",
    )


async def _drive(broker: Broker, search: TimeSearch) -> TimedOffset | None:
    found: TimedOffset | None = None
    while True:
        try:
            lookup = search.send(found)
        except StopIteration as done:
            result: TimedOffset | None = done.value
            return result
        found = None
        if lookup is not None:
            found = await _look_up(broker, lookup)
        await give_way()


async def _look_up(broker: Broker, lookup: BatchLookup) -> TimedOffset | None:
    max_bytes = broker.settings.max_decompressed_bytes
    if lookup.is_quick:
        return lookup.run(max_bytes)
    work = partial(lookup.run, max_bytes, broker.pace(0).breathe)
    return await asyncio.get_running_loop().run_in_executor(broker.workers, work)
