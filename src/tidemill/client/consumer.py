"""Reading partitions from given offsets.

Rules:

- One fetch per leader is under way at a time; the position of a partition moves only when ``poll`` hands its
  records out, so a cancelled ``poll`` loses nothing.
- Every batch's checksum is checked here as well: what a caller sees is what was written.
- A position that the log has no longer is moved to where the caller said, or reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple

from tidemill.client.admin import EARLIEST, LATEST, list_offsets
from tidemill.client.cluster import Cluster, TopicPartition, check
from tidemill.client.connection import Versions
from tidemill.errors import ApiError, ErrorCode
from tidemill.records.batch import HEADER_BYTES, check_crc, parse_header
from tidemill.records.record import Record, read_records

__all__ = ("Message", "OutOfRange", "PartitionReader")

OutOfRange = Literal["earliest", "latest", "error"]

# Newer versions name topics by id only.
_FETCH_VERSIONS: Final[Versions] = (4, 12)
_NO_SESSION: Final = -1
_WAIT_MARGIN_MS: Final = 30_000


class Message(NamedTuple):
    """A record and where it was."""

    topic: str
    partition: int
    record: Record


class _Fetched(NamedTuple):
    partition: TopicPartition
    from_offset: int
    messages: list[Message]
    next_offset: int


class PartitionReader:
    """Reads a set of partitions. ``positions`` holds the next offset of each."""

    def __init__(
        self,
        cluster: Cluster,
        positions: Mapping[TopicPartition, int] | None = None,
        *,
        max_wait_ms: int = 500,
        max_bytes: int = 16 * 1024 * 1024,
        partition_max_bytes: int = 1024 * 1024,
        out_of_range: OutOfRange = "error",
    ) -> None:
        self._cluster = cluster
        self.positions = dict(positions or {})
        self._max_wait_ms = max_wait_ms
        self._max_bytes = max_bytes
        self._partition_max_bytes = partition_max_bytes
        self._out_of_range = out_of_range
        self._fetches: dict[int, asyncio.Task[list[_Fetched]]] = {}

    async def assign(self, positions: Mapping[TopicPartition, int]) -> None:
        """Read these partitions from these offsets, and no others."""
        await self.close()
        self.positions = dict(positions)

    async def poll(self) -> list[Message]:
        """The next messages; an empty list if none came within ``max_wait_ms``."""
        return await self._cluster.retrying(self._poll_once)

    async def close(self) -> None:
        """Drop the fetches under way."""
        fetches, self._fetches = self._fetches, {}
        for task in fetches.values():
            task.cancel()
        if fetches:
            await asyncio.wait(fetches.values())

    async def _poll_once(self) -> list[Message]:
        if not self.positions:
            await asyncio.sleep(self._max_wait_ms / 1000)
            return []
        loop = asyncio.get_running_loop()
        for node_id, partitions in (await self._cluster.leaders(self.positions)).items():
            if node_id not in self._fetches:
                self._fetches[node_id] = loop.create_task(self._fetch(node_id, partitions))
        await asyncio.wait(self._fetches.values(), return_when=asyncio.FIRST_COMPLETED)
        messages: list[Message] = []
        for node_id, task in list(self._fetches.items()):
            if task.done():
                del self._fetches[node_id]
                for fetched in task.result():
                    # A fetch of a position that was moved meanwhile is of no use.
                    if self.positions.get(fetched.partition) == fetched.from_offset:
                        self._advance(fetched)
                        messages += fetched.messages
        return messages

    def _advance(self, fetched: _Fetched) -> None:
        if fetched.next_offset != fetched.from_offset:
            # To the end of the line: a full answer must not starve the partitions behind.
            del self.positions[fetched.partition]
            self.positions[fetched.partition] = fetched.next_offset

    async def _fetch(self, node_id: int, partitions: list[TopicPartition]) -> list[_Fetched]:
        wanted = {partition: self.positions[partition] for partition in partitions}
        connection = await self._cluster.connection(node_id, purpose="fetch")
        response = await connection.request(
            "Fetch",
            self._request(wanted),
            versions=_FETCH_VERSIONS,
            timeout_ms=self._max_wait_ms + _WAIT_MARGIN_MS,
        )
        check(getattr(response, "error_code", 0), None, "fetching")
        fetched: list[_Fetched] = []
        for topic in response.responses:
            for entry in topic.partitions:
                partition = topic.topic, entry.partition_index
                fetched.append(await self._take(partition, wanted[partition], entry))
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
            "isolation_level": 0,
            "session_epoch": _NO_SESSION,
            "topics": [{"topic": name, "partitions": entries} for name, entries in topics.items()],
        }

    async def _take(self, partition: TopicPartition, offset: int, entry: Any) -> _Fetched:
        topic, index = partition
        if entry.error_code == ErrorCode.offset_out_of_range:
            return _Fetched(partition, offset, [], await self._moved(partition, offset))
        check(entry.error_code, None, f"reading {topic}-{index} at offset {offset}")
        records, next_offset = _records(entry.records or b"", offset, f"{topic}-{index}")
        return _Fetched(partition, offset, [Message(topic, index, record) for record in records], next_offset)

    async def _moved(self, partition: TopicPartition, offset: int) -> int:
        """The offset to go on from when the log does not have ``offset``."""
        if self._out_of_range == "error":
            starts = await list_offsets(self._cluster, {partition: EARLIEST})
            ends = await list_offsets(self._cluster, {partition: LATEST})
            raise ApiError(
                ErrorCode.offset_out_of_range,
                f"{partition[0]}-{partition[1]} holds offsets {starts[partition].offset} to "
                f"{ends[partition].offset - 1}, there is no offset {offset}",
            )
        end = EARLIEST if self._out_of_range == "earliest" else LATEST
        return (await list_offsets(self._cluster, {partition: end}))[partition].offset


def _records(data: bytes, offset: int, where: str) -> tuple[list[Record], int]:
    """(the records at or above ``offset``, the offset behind the last batch)."""
    records: list[Record] = []
    for batch, next_offset in _batches(data, where):
        offset_before, offset = offset, max(offset, next_offset)
        if not parse_header(batch).is_control:
            records += [record for record in read_records(batch) if record.offset >= offset_before]
    return records, offset


def _batches(data: bytes, where: str) -> Iterator[tuple[memoryview, int]]:
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
        yield batch, header.next_offset
        position = end
