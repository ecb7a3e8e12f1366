"""A partition of an internal topic, as a coordinator uses it: append records, wait for the commit, replay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from tidemill.errors import StorageError
from tidemill.records.record import Record, build_batch, read_records
from tidemill.replication.partition import Partition

__all__ = ("PartitionCoordinatorLog", "wait_committed")


def wait_committed(partition: Partition, offset: int) -> asyncio.Future[None]:
    """A future that is done when everything below ``offset`` is durable."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def resolve(error: StorageError | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    partition.when_committed(offset, resolve)
    return future


class PartitionCoordinatorLog:
    """Implements the ``CoordinatorLog`` that the services expect."""

    def __init__(self, partition: Partition, clock_ms: Callable[[], int]) -> None:
        self._partition = partition
        self._clock_ms = clock_ms

    def append(self, records: Sequence[tuple[bytes, bytes | None]]) -> int:
        """Write one batch; returns the offset behind it. Raises, and then nothing was written."""
        now_ms = self._clock_ms()
        batch = build_batch([Record(key, value, timestamp_ms=now_ms) for key, value in records])
        return self._partition.append(batch, now_ms).last_offset + 1

    def committed(self, offset: int) -> asyncio.Future[None]:
        return wait_committed(self._partition, offset)

    def replay(self) -> Iterator[tuple[int, bytes | None, bytes | None]]:
        """Every committed record in order: (offset, key, value)."""
        partition = self._partition
        for batch in partition.log.read_batches(partition.log_start_offset, partition.high_watermark):
            for record in read_records(batch):
                yield record.offset, record.key, record.value
