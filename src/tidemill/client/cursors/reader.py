"""Fetching a region: one request per leader under way, and errors of a position told by their own classes.

The next request of a leader is sent when its last answer was taken, so that it is under way while the caller
works. An answer from a position that was left meanwhile is dropped by the cursor's machine.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from tidemill.client.cluster import Cluster
from tidemill.client.cursors.records import arrivals_of
from tidemill.cursors.errors import CheckpointAheadOfLog, CheckpointBelowLogStart, CheckpointDiverged
from tidemill.cursors.machine import Arrival
from tidemill.cursors.position import Position
from tidemill.cursors.region import FETCHED_PARTITIONS_MAX, Region
from tidemill.errors import ApiError, ErrorCode, TableError, TidemillError
from tidemill.net.answers import check, checked
from tidemill.net.retry import is_transient

__all__ = ("RegionReader", "fetch_body")

_WAIT_MARGIN_MS: Final = 30_000
#: How much longer than the node's own wait an answer is waited for.
_ROUND_TRIP_MS: Final = 50
#: The wait of a request for some of a leader's partitions, if they are too many for one.
_SHARED_WAIT_MS: Final = 50
_MAX_BYTES: Final = 4 * 1024 * 1024

_numbers = itertools.count()

Decode = Callable[[memoryview, str, int], list[Any]]
Renew = Callable[[], Awaitable[bool]]
Answer = list[Arrival[Any]]


class RegionReader:
    """Reads a region. ``where`` names the checkpoint, for errors, and ``ways_out`` tells how to go on.

    ``renew`` looks up what ``decode`` knows of the rows, and gives whether that has changed.
    """

    def __init__(
        self,
        cluster: Cluster,
        region: Region,
        decode: Decode,
        renew: Renew,
        *,
        where: str,
        ways_out: Callable[[], str],
    ) -> None:
        self._cluster = cluster
        self._region = region
        self._decode = decode
        self._renew = renew
        self._where = where
        self._ways_out = ways_out
        self._fetches: dict[int, asyncio.Task[Answer]] = {}
        #: The error of some partitions that came with records of others: those are given first.
        self._failure: BaseException | None = None
        #: Answers come in the order of their requests, so nobody else's may wait behind a long poll.
        self._purpose = f"cursor {next(_numbers)}"
        #: Partitions in the order in which they are asked for: those that were served go to the end.
        self._order: dict[int, None] = {}

    async def fetch(self, positions: Mapping[int, Position], wait_ms: int) -> Answer:
        """What the leaders have from these positions on; waits for up to ``wait_ms`` for the first.

        Raises the error of a position that its log does not have.
        """
        return await self._cluster.retrying(lambda: self._fetch_once(positions, wait_ms))

    async def begin(self, positions: Mapping[int, Position], wait_ms: int) -> None:
        """Send the next requests of leaders that have none under way."""
        topic = self._region.topic
        for partition in positions:
            self._order.setdefault(partition)
        wanted = [(topic, partition) for partition in self._order if partition in positions]
        for node_id, partitions in (await self._cluster.leaders(wanted)).items():
            if node_id not in self._fetches:
                at = {index: positions[index] for _, index in partitions[:FETCHED_PARTITIONS_MAX]}
                if len(at) < len(partitions):
                    # The leader has more partitions than one request takes: these go to the end of the order.
                    for index in at:
                        self._order[index] = self._order.pop(index)
                    wait_ms = min(wait_ms, _SHARED_WAIT_MS)
                self._fetches[node_id] = asyncio.get_running_loop().create_task(
                    self._ask(node_id, at, wait_ms)
                )

    async def check(self, positions: Mapping[int, Position]) -> Answer:
        """What all leaders have at once. Raises the error of a position that its log does not have."""

        async def check() -> Answer:
            await self.begin(positions, 0)
            await asyncio.wait(self._fetches.values())
            found = self._taken()
            self._raise_failure()
            return found

        return await self._cluster.retrying(check)

    async def _fetch_once(self, positions: Mapping[int, Position], wait_ms: int) -> Answer:
        self._raise_failure()
        await self.begin(positions, wait_ms)
        patience_s = (wait_ms + _ROUND_TRIP_MS) / 1000
        await asyncio.wait(self._fetches.values(), return_when=asyncio.FIRST_COMPLETED, timeout=patience_s)
        return self._taken()

    def _taken(self) -> Answer:
        """Collect the results of the fetches that are answered; they are under way no more."""
        found: Answer = []
        failure: BaseException | None = None
        for node_id, task in list(self._fetches.items()):
            if task.done():
                del self._fetches[node_id]
                if (error := task.exception()) is not None:
                    failure = error
                else:
                    found += task.result()
        if failure is not None:
            if not found:
                raise failure
            self._put_off(failure)
        for arrival in found:
            self._order.pop(arrival.partition, None)
            self._order[arrival.partition] = None
        return found

    def _put_off(self, failure: BaseException) -> None:
        """Have an error told by the next fetch: else a busy partition would hide that another stands still.

        One that may pass by itself comes again with the next request if it has not.
        """
        if not (isinstance(failure, TidemillError) and is_transient(failure)):
            self._failure = failure

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    async def reset(self) -> None:
        """Drop the requests under way."""
        self._failure = None
        fetches, self._fetches = self._fetches, {}
        for task in fetches.values():
            task.cancel()
        await asyncio.gather(*fetches.values(), return_exceptions=True)
        if fetches:
            await self._cluster.drop_connections(self._purpose)

    async def close(self) -> None:
        """Drop the requests under way, and the connections."""
        await self.reset()
        await self._cluster.drop_connections(self._purpose)

    async def _ask(self, node_id: int, positions: Mapping[int, Position], wait_ms: int) -> Answer:
        connection = await self._cluster.connection(node_id, purpose=self._purpose)
        response = checked(
            await connection.request(
                "FetchRegion",
                fetch_body(self._region, positions, wait_ms, _MAX_BYTES),
                timeout_ms=wait_ms + _WAIT_MARGIN_MS,
            ),
            f"reading {self._region}",
        )
        found: Answer = []
        failure: TidemillError | None = None
        for entry in response.partitions:
            try:
                found += await self._take_renewed(entry, positions[entry.partition])
            except TidemillError as error:
                failure = error
        if failure is not None:
            if not found:
                raise failure
            self._put_off(failure)
        return found

    async def _take_renewed(self, entry: Any, position: Position) -> Answer:
        try:
            return self._take(entry, position)
        except TableError:
            # The rows may be of a newer schema than this client knows.
            if not await self._renew():
                raise
            return self._take(entry, position)

    def _take(self, entry: Any, position: Position) -> Answer:
        if entry.error_code == ErrorCode.offset_out_of_range:
            raise self._misplaced(entry, position)
        topic = self._region.topic
        check(
            entry.error_code,
            entry.error_message and f"{topic}-{entry.partition}: {entry.error_message}",
            f"reading {topic}-{entry.partition} at offset {position.offset}",
        )
        return arrivals_of(
            entry, topic, position.offset, filtered=self._region.is_filtered, decode=self._decode
        )

    def _misplaced(self, entry: Any, position: Position) -> ApiError:
        """The error for a position that the log does not have."""
        which = f"{self._region.topic}-{entry.partition}"
        stored = f"offset {position.offset}, leader epoch {position.leader_epoch}"
        if 0 <= position.offset < entry.log_start_offset:
            return CheckpointBelowLogStart(
                f"retention has deleted records of {which} before they were read; {self._ways_out()}",
                where=self._where,
                stored=stored,
                expected=f"at least offset {entry.log_start_offset}",
            )
        if position.offset > entry.log_end_offset:
            return CheckpointAheadOfLog(
                f"{which} has lost records that were read: it ends before the position; look at the node's "
                f"disk first; {self._ways_out()}",
                where=self._where,
                stored=stored,
                expected=f"at most offset {entry.log_end_offset}",
            )
        return CheckpointDiverged(
            f"{which} was cut below the position and has grown again: other records have these offsets now; "
            f"{self._ways_out()}",
            where=self._where,
            stored=stored,
            expected=f"leader epoch {entry.diverging_epoch} up to offset {entry.diverging_offset}",
        )


def fetch_body(
    region: Region, positions: Mapping[int, Position], wait_ms: int, max_bytes: int
) -> dict[str, Any]:
    """The request for what a region has from these positions on."""
    return {
        "topic": region.topic,
        "topic_id": region.topic_id,
        "key_prefix": region.key_prefix,
        "headers": [{"name": name, "value": value} for name, value in region.headers],
        "predicate": region.where,
        "max_wait_ms": wait_ms,
        "max_bytes": max_bytes,
        "partitions": [
            {
                "partition": partition,
                "offset": position.offset,
                "leader_epoch": position.leader_epoch,
                "current_leader_epoch": -1,
            }
            for partition, position in positions.items()
        ],
    }
