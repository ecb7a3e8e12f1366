"""One partition as its leader sees it: the log, the high watermark, and who waits for it. No I/O loop of its own.

The rules of durability.md live here:

- the high watermark is the durable offset (this replica is the whole in-sync set), and nobody is
  told of, or reads, anything at or above it;
- every append asks for a flush; ``begin_flush`` / ``flushed`` / ``flush_failed`` are called by the flusher;
- a failed flush stops the partition: waiting producers and all later requests get ``KAFKA_STORAGE_ERROR``.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from uuid import UUID

from tidemill.config.topic import TopicConfig
from tidemill.errors import ApiError, ErrorCode, StorageError
from tidemill.log.flush import FlushJob
from tidemill.log.incoming import prepare_batch
from tidemill.log.log import Appended, PartitionLog
from tidemill.log.retention import retained_start
from tidemill.log.segment import Segment
from tidemill.log.storage import Buffer

__all__ = ("Partition", "Waiter")

#: Called with None when the high watermark has passed, or with the error that stopped the partition.
Waiter = Callable[[StorageError | None], None]

_NEVER = 2**63 - 1


class Partition:
    """A partition that this node leads."""

    def __init__(
        self,
        topic: str,
        topic_id: UUID,
        index: int,
        log: PartitionLog,
        *,
        leader_epoch: int,
        request_flush: Callable[[Partition], None],
        max_decompressed_bytes: int,
    ) -> None:
        self.topic = topic
        self.topic_id = topic_id
        self.index = index
        self.log = log
        self.leader_epoch = leader_epoch
        #: Owned by the flusher: a flush of this partition is planned or under way.
        self.flush_scheduled = False
        self._request_flush = request_flush
        self._max_decompressed_bytes = max_decompressed_bytes
        self._waiters: list[tuple[int, int, Waiter]] = []
        self._waiter_numbers = count()
        self._readers: dict[object, Callable[[], None]] = {}
        self._unflushed_since_ms = _NEVER

    def __repr__(self) -> str:
        return f"<Partition {self.topic}-{self.index} epoch {self.leader_epoch}>"

    # --- offsets

    @property
    def high_watermark(self) -> int:
        return self.log.durable_offset

    @property
    def last_stable_offset(self) -> int:
        return self.log.durable_offset

    @property
    def log_start_offset(self) -> int:
        return self.log.log_start_offset

    @property
    def config(self) -> TopicConfig:
        return self.log.config

    def configure(self, config: TopicConfig) -> None:
        self.log.config = config

    # --- writing

    def append(self, data: Buffer, now_ms: int) -> Appended:
        """Check and write one producer batch. Raises ``ApiError`` or ``StorageError``; then nothing changed."""
        if self.log.failure is not None:
            raise self.log.failure
        data, header = prepare_batch(data, self.log.config, now_ms, self._max_decompressed_bytes)
        appended = self.log.append(data, header, self.leader_epoch, now_ms)
        if self._unflushed_since_ms == _NEVER:
            self._unflushed_since_ms = now_ms
        self._request_flush(self)
        return appended

    def when_committed(self, offset: int, waiter: Waiter) -> None:
        """Call ``waiter`` once everything below ``offset`` is durable; at once if it is."""
        if self.log.failure is not None:
            waiter(self.log.failure)
        elif self.log.durable_offset >= offset:
            waiter(None)
        else:
            heapq.heappush(self._waiters, (offset, next(self._waiter_numbers), waiter))
            self._request_flush(self)

    # --- flushing, called by the flusher

    @property
    def is_dirty(self) -> bool:
        return self.log.failure is None and self.log.end_offset > self.log.durable_offset

    def flush_due_ms(self) -> int:
        """When the next flush should start, on the clock that ``append`` was given; a past time means now.

        ``flush.ms`` and ``flush.messages`` let appends that nobody waits for gather; both are off by default.
        """
        config = self.log.config
        unflushed = self.log.end_offset - self.log.durable_offset
        lazy = config.flush_ms < _NEVER or config.flush_messages < _NEVER
        if self._waiters or not lazy or unflushed >= config.flush_messages:
            return 0
        return min(_NEVER, self._unflushed_since_ms + config.flush_ms)

    def begin_flush(self) -> FlushJob | None:
        self._unflushed_since_ms = _NEVER
        return self.log.begin_flush()

    def flushed(self, job: FlushJob) -> None:
        self.log.finish_flush(job)
        reached = self.log.durable_offset
        while self._waiters and self._waiters[0][0] <= reached:
            heapq.heappop(self._waiters)[2](None)
        self._wake_readers()

    def flush_failed(self, error: StorageError) -> None:
        """Stop for good: after a failed sync nobody knows what is on disk."""
        self.log.fail(error)
        waiters, self._waiters = self._waiters, []
        for _, _, waiter in waiters:
            waiter(error)
        self._wake_readers()

    # --- reading

    def subscribe(self, key: object, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever there may be more to read, until ``unsubscribe``."""
        self._readers[key] = wake

    def unsubscribe(self, key: object) -> None:
        self._readers.pop(key, None)

    def _wake_readers(self) -> None:
        for wake in list(self._readers.values()):
            wake()

    def read(self, offset: int, max_bytes: int, *, at_least_one: bool) -> memoryview:
        if self.log.failure is not None:
            raise self.log.failure
        return self.log.read(offset, max_bytes, self.high_watermark, at_least_one=at_least_one)

    def delete_records(self, offset: int) -> list[Segment]:
        """Move the log start to ``offset`` (-1: the high watermark); returns what can be discarded."""
        if self.log.failure is not None:
            raise self.log.failure
        target = self.high_watermark if offset == -1 else offset
        if target < 0 or target > self.high_watermark:
            raise ApiError(
                ErrorCode.offset_out_of_range,
                f"cannot delete up to offset {target}: {self.topic}-{self.index} ends at {self.high_watermark}",
            )
        return self.log.move_start(target)

    def apply_retention(self, now_ms: int) -> list[Segment]:
        """Move the log start past segments that are too old or too many; returns what can be discarded."""
        log = self.log
        if log.failure is not None:
            return []
        start = retained_start(log.segments, log.config, durable_offset=log.durable_offset, now_ms=now_ms)
        if start is None:
            return []
        if start == log.end_offset:
            log.roll()
            self._request_flush(self)
        return log.move_start(start)

    def check_leader_epoch(self, epoch: int) -> None:
        """Compare the epoch that a client believes in; -1 means that it does not say."""
        if epoch < 0 or epoch == self.leader_epoch:
            return
        where = f"{self.topic}-{self.index} is at leader epoch {self.leader_epoch}, the request says {epoch}"
        if epoch < self.leader_epoch:
            raise ApiError(ErrorCode.fenced_leader_epoch, where)
        raise ApiError(ErrorCode.unknown_leader_epoch, where)

    def close(self) -> None:
        """Stop in an orderly way; the caller has made sure that no flush is under way."""
        if self.log.failure is None:
            self.log.close()
        else:
            self.log.abandon()

    def stop(self, error: StorageError) -> None:
        """End everything that waits, because the partition goes away."""
        self.flush_failed(error)
