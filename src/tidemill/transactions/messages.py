"""What goes into and comes out of the transaction coordinator: plain values, no wire format."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from tidemill.config.values import TopicPartition
from tidemill.errors import ErrorCode, TidemillError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

__all__ = (
    "NO_PRODUCER",
    "EndResult",
    "InitResult",
    "ListResult",
    "Producer",
    "TopicPartition",
    "TransactionDescription",
    "TransactionEnd",
    "TransactionListing",
    "TransactionPartitions",
)


class Producer(NamedTuple):
    """A producer as it names itself in every request; a later epoch of the same id fences this one."""

    id: int
    epoch: int


NO_PRODUCER = Producer(-1, -1)


class InitResult(msgspec.Struct, frozen=True):
    """Answer to InitProducerId."""

    error: ErrorCode = ErrorCode.none
    producer: Producer = NO_PRODUCER


class EndResult(msgspec.Struct, frozen=True):
    """Answer to EndTxn: who the producer is from now on, if it ends transactions the new way."""

    error: ErrorCode = ErrorCode.none
    producer: Producer = NO_PRODUCER


class TransactionEnd(msgspec.Struct, frozen=True):
    """The end of a producer's transaction, for one partition."""

    producer: Producer
    commit: bool
    coordinator_epoch: int


class TransactionListing(msgspec.Struct, frozen=True):
    """One transaction in ListTransactions."""

    transactional_id: str
    producer_id: int
    state: str


class ListResult(msgspec.Struct, frozen=True):
    """Answer to ListTransactions. With an error, ``transactions`` holds those of the shards that did load."""

    error: ErrorCode = ErrorCode.none
    unknown_states: tuple[str, ...] = ()
    transactions: tuple[TransactionListing, ...] = ()


class TransactionDescription(msgspec.Struct, frozen=True):
    """One transactional id in DescribeTransactions."""

    transactional_id: str
    error: ErrorCode = ErrorCode.none
    state: str = ""
    timeout_ms: int = -1
    started_ms: int = -1
    producer: Producer = NO_PRODUCER
    topics: Mapping[str, Sequence[int]] = msgspec.field(default_factory=dict)


class TransactionPartitions(Protocol):
    """The partitions that transactions write to, on this node or on others."""

    def allow_writes(self, partition: TopicPartition, producer: Producer) -> None:
        """Let the producer write to a partition, which is part of its transaction, until the marker.

        Does nothing for a partition that is not led here: its leader asks the coordinator.
        """

    def by_leader(
        self, partitions: Collection[TopicPartition]
    ) -> tuple[list[TopicPartition], list[list[TopicPartition]]]:
        """The partitions that are led here, or exist no more; and the others, those of one leader together.

        One that has no leader at the moment is with the others.
        """

    async def write(
        self, markers: Mapping[TopicPartition, Sequence[TransactionEnd]]
    ) -> Mapping[TopicPartition, TidemillError]:
        """End transactions in partitions of one leader; returns once that is durable, with what failed.

        The markers of one partition are written so that no reader sees the end of one without the others'.
        UNKNOWN_TOPIC_OR_PARTITION says that there is no such partition any more; INVALID_PRODUCER_EPOCH that
        one of its markers is too old, and then perhaps none of them was written.
        """

    def together(self, partitions: Collection[TopicPartition]) -> AbstractAsyncContextManager[object]:
        """Held while the markers of one decision are written to these partitions, which are led here.

        A read of several partitions never falls into the middle of it, as far as partitions and readers are
        on this node; see ``coordination.moments``. Other leaders hold their own.
        """
