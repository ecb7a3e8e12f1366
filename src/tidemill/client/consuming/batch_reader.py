"""Fetching batches of partitions from given offsets, as bytes.

Rules:

- One fetch per leader is under way at a time; the position of a partition moves only when ``poll`` hands its
  batches out, so a cancelled ``poll`` loses nothing.
- A reader that knows where it stops has the next fetch under way while its caller works on the last.
- Every batch's checksum is checked here as well: what a caller sees is what was written.
- A reader of committed data gets no batch of an aborted transaction, and none of one that is still open.
- A leader that is silent for long is doubted: who leads is asked of another node.
- A position that the log has no longer is moved to where the caller said, or reported. Where compaction has
  left nothing up to the end of what can be read, the position goes there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from tidemill.client.admin.topics import EARLIEST, LATEST, list_offsets
from tidemill.client.cluster import Cluster, TopicPartition
from tidemill.errors import ApiError, ErrorCode
from tidemill.net.answers import check
from tidemill.net.connection import Versions
from tidemill.records.batch import HEADER_BYTES, check_crc, parse_header
from tidemill.records.control import read_marker

__all__ = ("BatchReader", "FetchedBatches", "OutOfRange", "whole_batches")

OutOfRange = Literal["earliest", "latest", "error"]

# Newer versions name topics by id only.
_FETCH_VERSIONS: Final[Versions] = (4, 12)
_NO_SESSION: Final = -1
_WAIT_MARGIN_MS: Final = 30_000
#: A leader that has given nothing for so long may have been deposed, and not know it.
_QUIET_SECONDS: Final = 10.0


class FetchedBatches(NamedTuple):
    """Record batches of one partition, without control batches. ``next_offset`` is after all that was read.

    The first batch may begin below ``from_offset``: its records there are not wanted.
    """

    partition: TopicPartition
    from_offset: int
    batches: list[memoryview]
    next_offset: int
    high_watermark: int


class BatchReader:
    """Reads a set of partitions. ``positions`` holds the next offset of each."""

    def __init__(
        self,
        cluster: Cluster,
        positions: Mapping[TopicPartition, int] | None = None,
        *,
        committed: bool = False,
        max_wait_ms: int = 500,
        max_bytes: int = 16 * 1024 * 1024,
        partition_max_bytes: int = 1024 * 1024,
        out_of_range: OutOfRange = "error",
        ends: Mapping[TopicPartition, int] | None = None,
    ) -> None:
        self._cluster = cluster
        self.positions = dict(positions or {})
        self._committed = committed
        self._max_wait_ms = max_wait_ms
        self._max_bytes = max_bytes
        self._partition_max_bytes = partition_max_bytes
        self._out_of_range = out_of_range
        #: Offsets up to which batches are fetched before the caller asks for them.
        self._ends = ends or {}
        self._fetches: dict[int, asyncio.Task[list[FetchedBatches]]] = {}
        #: Since when nothing has come from a node that is asked.
        self._quiet_since: dict[int, float] = {}

    async def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read these partitions from these offsets, and no others."""
        await self.close()
        self.positions = dict(positions)

    async def poll(self) -> list[FetchedBatches]:
        """The next batches; an empty list if none came within ``max_wait_ms``."""
        return await self._cluster.retrying(self._poll_once)

    async def close(self) -> None:
        """Drop the fetches under way."""
        fetches, self._fetches = self._fetches, {}
        for task in fetches.values():
            task.cancel()
        await asyncio.gather(*fetches.values(), return_exceptions=True)

    async def _poll_once(self) -> list[FetchedBatches]:
        if not self.positions:
            await asyncio.sleep(self._max_wait_ms / 1000)
            return []
        for node_id, partitions in (await self._cluster.leaders(self.positions)).items():
            if node_id not in self._fetches:
                self._begin(node_id, partitions)
        await asyncio.wait(self._fetches.values(), return_when=asyncio.FIRST_COMPLETED)
        found: list[FetchedBatches] = []
        failure: BaseException | None = None
        for node_id, task in list(self._fetches.items()):
            if task.done():
                del self._fetches[node_id]
                failure = task.exception() or failure
                taken = [] if task.exception() is not None else self._taken(task.result())
                found += taken
                self._doubt(node_id, is_quiet=not any(each.batches for each in taken))
                # No await from here on: a poll that is cancelled now would lose what was taken.
                unread = [
                    each.partition for each in taken if each.next_offset < self._ends.get(each.partition, 0)
                ]
                if unread:
                    self._begin(node_id, unread)
        # Batches of other nodes must not get lost; the node that failed is asked again next time.
        if failure is not None and not found:
            raise failure
        return found

    def _doubt(self, node_id: int, *, is_quiet: bool) -> None:
        """Have the leaders asked for again when a node gives nothing for long: it may be cut off."""
        now = asyncio.get_running_loop().time()
        since = self._quiet_since.get(node_id, now)
        if is_quiet and now - since > _QUIET_SECONDS:
            self._cluster.doubt_leaders()
            since = now
        self._quiet_since[node_id] = since if is_quiet else now

    def _begin(self, node_id: int, partitions: list[TopicPartition]) -> None:
        self._fetches[node_id] = asyncio.get_running_loop().create_task(self._fetch(node_id, partitions))

    def _taken(self, fetched: list[FetchedBatches]) -> list[FetchedBatches]:
        # A fetch from a position that was moved meanwhile is dropped.
        current = [each for each in fetched if self.positions.get(each.partition) == each.from_offset]
        for each in current:
            self._advance(each)
        return current

    def _advance(self, fetched: FetchedBatches) -> None:
        if fetched.next_offset != fetched.from_offset:
            # Moved to the end of the order: a full answer must not starve the partitions after it.
            del self.positions[fetched.partition]
            self.positions[fetched.partition] = fetched.next_offset

    async def _fetch(self, node_id: int, partitions: list[TopicPartition]) -> list[FetchedBatches]:
        wanted = {partition: self.positions[partition] for partition in partitions}
        connection = await self._cluster.connection(node_id, purpose="fetch")
        response = await connection.request(
            "Fetch",
            self._request(wanted),
            versions=_FETCH_VERSIONS,
            timeout_ms=self._max_wait_ms + _WAIT_MARGIN_MS,
        )
        check(getattr(response, "error_code", 0), None, "fetching")
        entries = [(topic.topic, entry) for topic in response.responses for entry in topic.partitions]
        # An answer without any records was not cut short: the log has nothing up to its end.
        is_empty = not any(entry.records for _, entry in entries)
        fetched: list[FetchedBatches] = []
        for topic_name, entry in entries:
            partition = topic_name, entry.partition_index
            taken = await self._take(partition, wanted[partition], entry)
            end = entry.last_stable_offset if self._committed else entry.high_watermark
            if is_empty and entry.error_code == ErrorCode.none and end > taken.next_offset:
                taken = taken._replace(next_offset=end)
            fetched.append(taken)
        return fetched

    def _request(self, wanted: Mapping[TopicPartition, int]) -> dict[str, Any]:
        topics: dict[str, list[dict[str, Any]]] = {}
        for (topic, index), offset in wanted.items():
            topics.setdefault(topic, []).append(
                {
                    "partition": index,
                    "fetch_offset": offset,
                    "partition_max_bytes": self._partition_max_bytes,
                }
            )
        return {
            "replica_id": -1,
            "max_wait": self._max_wait_ms,
            "min_bytes": 1,
            "max_bytes": self._max_bytes,
            "isolation_level": 1 if self._committed else 0,
            "session_epoch": _NO_SESSION,
            "topics": [{"topic": name, "partitions": entries} for name, entries in topics.items()],
        }

    async def _take(self, partition: TopicPartition, offset: int, entry: Any) -> FetchedBatches:
        topic, index = partition
        if entry.error_code == ErrorCode.offset_out_of_range:
            return FetchedBatches(partition, offset, [], await self._moved(partition, offset), -1)
        check(entry.error_code, None, f"reading {topic}-{index} at offset {offset}")
        aborted = [(each.first_offset, each.producer_id) for each in entry.aborted_transactions or ()]
        batches, next_offset = [], offset
        for behind, batch in _wanted_batches(entry.records or b"", aborted, f"{topic}-{index}"):
            next_offset = max(next_offset, behind)
            if batch is not None:
                batches.append(batch)
        return FetchedBatches(partition, offset, batches, next_offset, entry.high_watermark)

    async def _moved(self, partition: TopicPartition, offset: int) -> int:
        """The offset to go on from when the log does not have ``offset``."""
        if self._out_of_range == "error":
            starts = await list_offsets(self._cluster, {partition: EARLIEST})
            ends = await list_offsets(self._cluster, {partition: LATEST})
            raise ApiError(
                ErrorCode.offset_out_of_range,
                f"{partition[0]}-{partition[1]} holds offsets {starts[partition].offset} to "
                f"{ends[partition].offset - 1}, there is no offset {offset}; begin at 'earliest' or 'latest'",
            )
        end = EARLIEST if self._out_of_range == "earliest" else LATEST
        return (await list_offsets(self._cluster, {partition: end}))[partition].offset


def _wanted_batches(
    data: bytes, aborted: list[tuple[int, int]], where: str
) -> Iterator[tuple[int, memoryview | None]]:
    """(offset behind it, batch) of each whole batch; None for one that holds no records for this reader.

    ``aborted`` are (first offset, producer id) of aborted transactions: a producer's batches count again
    behind its marker.
    """
    waiting = sorted(aborted, reverse=True)
    skipped: set[int] = set()
    for batch in whole_batches(data, where):
        header = parse_header(batch)
        while waiting and waiting[-1][0] <= header.last_offset:
            skipped.add(waiting.pop()[1])
        if header.is_control:
            marker = read_marker(batch)
            if marker is not None and not marker.commit:
                skipped.discard(header.producer_id)
        is_skipped = header.is_transactional and header.producer_id in skipped
        unwanted = header.is_control or is_skipped or header.record_count == 0
        yield header.next_offset, None if unwanted else batch


def whole_batches(data: bytes, where: str) -> Iterator[memoryview]:
    """The whole batches in fetched bytes; a last one that is cut short is for the next fetch."""
    view, position = memoryview(data), 0
    while position + HEADER_BYTES <= len(view):
        header = parse_header(view, position)
        end = position + header.size_bytes
        if end > len(view):
            return
        batch = view[position:end]
        if header.size_bytes < HEADER_BYTES or not check_crc(batch, header):
            raise ApiError(
                ErrorCode.corrupt_message,
                f"{where}: the batch at offset {header.base_offset} does not fit its checksum; "
                "run 'tidemill log verify' on the node",
            )
        yield batch
        position = end
