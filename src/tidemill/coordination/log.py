"""The log behind a shard: what a coordinator needs of a partition that this node leads."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from tidemill.errors import DiskFull

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
        """The epoch of this node's leadership: later leaders have higher ones."""

    def append(self, records: Sequence[tuple[bytes, bytes | None]]) -> int:
        """Append one batch of (key, value); returns the next offset.

        Raises StorageError or ApiError, and then nothing was appended.
        """

    def build(self, records: Sequence[tuple[bytes, bytes | None]]) -> bytes:
        """Build the batch that ``append`` would write. Any thread may: a large batch takes milliseconds."""

    def append_built(self, batch: bytes) -> int:
        """Append a batch that ``build`` has made; returns and raises as ``append`` does."""

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

    def give_up_reserve(self, error: DiskFull) -> bool:
        """Ask for the disk's reserve because an append found no space; whether trying again may help."""

    def committed(self, offset: int) -> Awaitable[None]:
        """Resolves when the high watermark has reached ``offset``.

        Raises StorageError if the partition stopped, ApiError(not_leader_or_follower) if another node leads.
        """

    def is_newest(self) -> bool:
        """Whether it is certain that no other node has written to the log, without asking anybody."""

    async def confirm_newest(self) -> None:
        """Return once that is certain, of any moment since the call. May ask other nodes.

        Raises ApiError(not_leader_or_follower) if it is not: another node may lead.
        """

    @property
    def end_offset(self) -> int:
        """The next offset that this node gives. What lies below may not be committed yet."""

    def replay(self, end_offset: int) -> Iterator[ReplayedRecord | ReplayedMarker]:
        """Everything below ``end_offset`` in order, whether it is committed or not.

        Called once, before the first append, with the end of the log: what is not yielded must never become
        committed later. Raises CorruptData at what does not check out: a part must not be taken for the
        whole.
        """

    def delete_below(self, offset: int) -> None:
        """Give up what lies below ``offset``, as far as it is committed and no open transaction needs it.

        Later loads begin there. Raises as ``append`` does.
        """

    def depend(self, key: object, leadership_lost: Callable[[], None]) -> None:
        """Call ``leadership_lost`` once when another node leads the partition; ``release`` ends that."""

    def release(self, key: object) -> None:
        """Forget the callback that ``depend`` was given under ``key``."""

    def position_of(self, offset: int) -> tuple[str, int]:
        """File and position of the batch that holds ``offset``."""


class LogAccess(Protocol):
    """The internal topic of a coordinator: how many partitions it has, and the logs of those led here."""

    def partition_count(self) -> int:
        """How many partitions the topic has; before it exists, how many it would be given."""

    def leads(self, partition: int) -> bool:
        """Whether this node leads a partition of the topic, by the metadata."""

    def open_log(self, partition: int) -> CoordinatorLog:
        """The log of a partition of the coordinator's topic.

        Raises ApiError(not_coordinator) if this node does not lead it, StorageError if it is not usable.
        """

    async def prepare_append(self, partition: int) -> None:
        """Have the first files of a partition made, in a thread, if it was never written to.

        Raises nothing: an append says what is wrong.
        """
