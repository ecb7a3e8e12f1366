"""The log behind a shard: what a coordinator needs of a partition that this node leads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Sequence

__all__ = ("CoordinatorLog", "LogAccess", "ReplayedMarker", "ReplayedRecord")


class ReplayedRecord(NamedTuple):
    """A record of the log. ``producer_id`` is that of its transaction, -1 outside of any."""

    offset: int
    key: bytes | None
    value: bytes | None
    producer_id: int = -1


class ReplayedMarker(NamedTuple):
    """The end of a producer's transaction in this log."""

    offset: int
    producer_id: int
    commit: bool


class CoordinatorLog(Protocol):
    """The partition that holds a shard's records, at its leader."""

    @property
    def leader_epoch(self) -> int:
        """Of this node's leadership: later leaders have higher ones."""

    def append(self, records: Sequence[tuple[bytes, bytes | None]]) -> int:
        """Append one batch of (key, value); returns the next offset.

        Raises StorageError or ApiError, and then nothing was appended.
        """

    def append_transactional(
        self, records: Sequence[tuple[bytes, bytes | None]], producer_id: int, producer_epoch: int
    ) -> int:
        """Append one batch as part of a producer's transaction; returns the next offset.

        Raises as ``append`` does; also if the partition is not part of such a transaction.
        """

    def append_marker(
        self, producer_id: int, producer_epoch: int, *, commit: bool, coordinator_epoch: int
    ) -> int:
        """Append the marker that ends a producer's transaction here; returns the next offset.

        Raises as ``append`` does; also if the producer or the coordinator is fenced.
        """

    def committed(self, offset: int) -> Awaitable[None]:
        """Resolves when the high watermark has reached ``offset``.

        Raises StorageError if the partition stopped.
        """

    def replay(self) -> Iterator[ReplayedRecord | ReplayedMarker]:
        """Everything in order.

        Called once, before the first append, when the high watermark has reached the end of the log: what is
        not yielded must never become committed later. Raises CorruptData at what does not check out: a part
        must not be taken for the whole.
        """

    def place_of(self, offset: int) -> tuple[str, int]:
        """File and position of the batch that holds ``offset``."""


class LogAccess(Protocol):
    """Where a coordinator gets its logs from."""

    def open_log(self, partition: int) -> CoordinatorLog:
        """The log of a partition of the coordinator's topic.

        Raises ApiError(not_coordinator) if this node does not lead it, StorageError if it is not usable.
        """
