"""A partition of an internal topic, as a coordinator uses it: append records, wait for the commit, replay."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence

from tidemill.coordination.log import ReplayedMarker, ReplayedRecord
from tidemill.errors import ApiError, CorruptData, DiskFull, TidemillError
from tidemill.log.segments.segment import Segment
from tidemill.records.batch import NO_PRODUCER_ID, BatchHeader, next_sequence, parse_header
from tidemill.records.compression import NONE, ZSTD
from tidemill.records.control import read_marker
from tidemill.records.record import Record, build_batch, read_records
from tidemill.replication.partition import Partition
from tidemill.replication.rules.newest import Alone, NewestAnswers
from tidemill.replication.rules.waiting import Waiter

__all__ = ("PartitionCoordinatorLog", "wait_committed", "wait_deleted")

_TRANSACTIONAL = 0x10


def wait_committed(partition: Partition, offset: int) -> asyncio.Future[None]:
    """A future that is done when the high watermark has reached ``offset``."""
    return _wait(partition.when_committed, offset)


def wait_deleted(partition: Partition, offset: int) -> asyncio.Future[None]:
    """A future that is done when every in-sync replica has deleted everything below ``offset``."""
    return _wait(partition.as_leader.when_start_durable, offset)


def _wait(when: Callable[[int, Waiter], None], offset: int) -> asyncio.Future[None]:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def resolve(error: TidemillError | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)

    when(offset, resolve)
    return future


class PartitionCoordinatorLog:
    """The ``CoordinatorLog`` over a partition of an internal topic."""

    def __init__(
        self,
        partition: Partition,
        clock_ms: Callable[[], int],
        *,
        compress_above_bytes: int | None = None,
        give_up_reserve: Callable[[DiskFull], bool] = lambda error: False,
        discard: Callable[[Partition, list[Segment]], None] = lambda partition, segments: None,
        newest: NewestAnswers | None = None,
    ) -> None:
        self._partition = partition
        self._clock_ms = clock_ms
        self._compress_above_bytes = compress_above_bytes
        self.give_up_reserve = give_up_reserve
        self._discard = discard
        self._newest = newest or Alone()

    @property
    def leader_epoch(self) -> int:
        return self._partition.leader_epoch

    def append(self, records: Sequence[tuple[bytes, bytes | None]]) -> int:
        """Write one batch; returns the offset behind it. Raises, and then nothing was written."""
        return self.append_built(self.build(records))

    def build(self, records: Sequence[tuple[bytes, bytes | None]]) -> bytes:
        """Build one batch, compressed if it is large."""
        now_ms = self._clock_ms()
        size_bytes = sum(len(key) + len(value or b"") for key, value in records)
        large = self._compress_above_bytes is not None and size_bytes > self._compress_above_bytes
        return build_batch(
            [Record(key, value, timestamp_ms=now_ms) for key, value in records],
            codec=ZSTD if large else NONE,
        )

    def append_built(self, batch: bytes) -> int:
        """Write a batch that ``build`` has made; returns the offset behind it."""
        return self._partition.append(batch, self._clock_ms(), records_checked=True).last_offset + 1

    def append_transactional(
        self, records: Sequence[tuple[bytes, bytes | None]], producer_id: int, producer_epoch: int
    ) -> int:
        """Write one batch of a producer's transaction; returns the offset behind it.

        The batch was not numbered by its producer, so it simply follows what that producer has here.
        """
        now_ms = self._clock_ms()
        known = self._partition.local_log.producers.get(producer_id)
        goes_on = known is not None and known.epoch == producer_epoch
        batch = build_batch(
            [Record(key, value, timestamp_ms=now_ms) for key, value in records],
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=next_sequence(known.last_sequence) if known and goes_on else 0,
            attributes=_TRANSACTIONAL,
        )
        return self._partition.append(batch, now_ms, records_checked=True).last_offset + 1

    def append_marker(
        self, producer_id: int, producer_epoch: int, *, commit: bool, coordinator_epoch: int
    ) -> int:
        """End a producer's transaction here; returns the offset behind the marker."""
        appended = self._partition.write_marker(
            producer_id,
            producer_epoch,
            commit=commit,
            coordinator_epoch=coordinator_epoch,
            now_ms=self._clock_ms(),
        )
        return appended.last_offset + 1

    def committed(self, offset: int) -> asyncio.Future[None]:
        return wait_committed(self._partition, offset)

    def is_newest(self) -> bool:
        return self._newest.may_answer(self._partition)

    async def confirm_newest(self) -> None:
        await self._newest.confirm([self._partition])

    @property
    def end_offset(self) -> int:
        return self._partition.local_log.end_offset

    def delete_below(self, offset: int) -> None:
        """Move the start of the log up to ``offset``, or to the last stable offset if that is lower."""
        partition = self._partition
        target = min(offset, partition.last_stable_offset)
        if target > partition.log_start_offset:
            self._discard(partition, partition.delete_records(target))

    def depend(self, key: object, leadership_lost: Callable[[], None]) -> None:
        self._partition.depend(key, leadership_lost)

    def release(self, key: object) -> None:
        self._partition.release(key)

    def replay(self, end_offset: int) -> Iterator[ReplayedRecord | ReplayedMarker]:
        """Every record and marker below the offset in order. Raises ``CorruptData`` at what cannot be read.

        Also those above the high watermark, which may become committed later.
        """
        partition = self._partition
        for batch in partition.local_log.read_batches(partition.log_start_offset, end_offset):
            header = parse_header(batch)
            try:
                yield from _entries(batch, header)
            except ApiError as error:
                path, position = self.position_of(header.base_offset)
                raise CorruptData(
                    f"the batch at offset {header.base_offset} cannot be decoded: {error.message}",
                    path=path,
                    position=position,
                ) from error

    def position_of(self, offset: int) -> tuple[str, int]:
        """File and position of the batch that holds ``offset``, for people who look for it."""
        return self._partition.local_log.position_of(offset)


def _entries(batch: bytes, header: BatchHeader) -> Iterator[ReplayedRecord | ReplayedMarker]:
    if header.is_control:
        marker = read_marker(batch)
        if marker is not None:
            yield ReplayedMarker(header.base_offset, header.producer_id, marker.commit)
        return
    producer_id = header.producer_id if header.is_transactional else NO_PRODUCER_ID
    for record in read_records(batch):
        yield ReplayedRecord(record.offset, record.key, record.value, producer_id)
