"""The durable state of share partitions, as its three users know it.

A share partition is one partition of a topic as one share group reads it. Its state (where it starts, and
what happened to the records in flight) is kept in ``__share_group_state`` by the share coordinator. The group
coordinator initializes and deletes it, and the leader of the data partition reads and writes it. Both do so
through a ``Persister``, which finds the coordinator on whatever node it is.
"""

from __future__ import annotations

import base64
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol
from uuid import UUID

from tidemill.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = (
    "NO_CUT",
    "NO_POSITION",
    "NO_START",
    "DeliveryState",
    "LogPosition",
    "Persister",
    "SharePartitionKey",
    "ShareState",
    "ShareStateSummary",
    "StateBatch",
)

#: The start offset of a share partition that was never read: ``share.auto.offset.reset`` decides.
NO_START = -1
#: Says of a write that the log was not cut.
NO_CUT = -1
_UUID_BYTES = 16


class DeliveryState(IntEnum):
    """State of a record, with KIP-932's numbers. ACQUIRED is never stored: a lock ends with its leader."""

    AVAILABLE = 0
    ACQUIRED = 1
    ACKNOWLEDGED = 2
    #: Its dead letter is due: the record ends when the letter is written.
    ARCHIVING = 3
    ARCHIVED = 4


class SharePartitionKey(NamedTuple):
    """Names a share partition."""

    group_id: str
    topic_id: UUID
    partition: int

    def __str__(self) -> str:
        """The key of FindCoordinator: group, topic id as Kafka spells it, partition."""
        topic_id = base64.urlsafe_b64encode(self.topic_id.bytes).rstrip(b"=").decode()
        return f"{self.group_id}:{topic_id}:{self.partition}"

    @classmethod
    def parse(cls, text: str) -> SharePartitionKey:
        """The key that ``str`` has made. A group id may have colons. Raises ApiError INVALID_REQUEST.

        >>> SharePartitionKey.parse("a:b:AAAAAAAAAAAAAAAAAAAABw:3").partition
        3
        """
        group_id, _, rest = text.rpartition(":")
        group_id, _, topic_id = group_id.rpartition(":")
        try:
            raw = base64.urlsafe_b64decode(topic_id + "==")
            partition = int(rest) if rest.isdecimal() and rest.isascii() else -1
            if group_id and partition >= 0 and len(raw) == _UUID_BYTES:
                return cls(group_id, UUID(bytes=raw), partition)
        except ValueError:
            pass
        raise ApiError(
            ErrorCode.invalid_request,
            f"{text[:200]!r} is not the key of a share partition, which is group:topic id:partition",
        )


class StateBatch(NamedTuple):
    """Records that have the same state, from the first to the last offset."""

    first_offset: int
    last_offset: int
    state: DeliveryState
    delivery_count: int
    #: Wall-clock time before which the records are not handed out again; 0: at any time.
    not_before_ms: int = 0
    #: The producer whose open transaction acknowledges the records, and its epoch; -1: none does.
    producer_id: int = -1
    producer_epoch: int = -1
    #: Why the records die, for their dead letter.
    reason: str = ""


class LogPosition(NamedTuple):
    """The offset behind the last record that a state knows of, and the leader epoch of that record.

    By it a later leader finds out whether its log is the one that the state was written for. -1: not known.
    ``history`` has the epochs of the writer's log, as in ``EpochHistory.to_bytes``: if the logs have parted,
    they tell where. A leader says them once; empty: as they were.
    """

    offset: int
    leader_epoch: int
    history: bytes = b""


#: The position of a state that was stored without one: it is not checked.
NO_POSITION = LogPosition(-1, -1)


class ShareState(NamedTuple):
    """The state of one share partition. Records at or after the start that no batch names are AVAILABLE."""

    state_epoch: int
    start_offset: int
    batches: Sequence[StateBatch]
    #: Finished records at or after the start.
    delivery_complete_count: int = 0
    log_position: LogPosition = NO_POSITION


class ShareStateSummary(NamedTuple):
    """What describing a share partition needs of its state."""

    state_epoch: int
    leader_epoch: int
    start_offset: int
    delivery_complete_count: int


class Persister(Protocol):
    """Reads and writes the state of share partitions, wherever its coordinator is.

    Every call raises ``ApiError`` if it was not carried out, or if that is not known: then it has a code that
    ``errors`` calls retriable, and the caller reads the state again before it goes on. A call that returns is
    committed.
    """

    async def initialize(self, key: SharePartitionKey, state_epoch: int, start_offset: int) -> None:
        """Begin the state, or begin it anew at a higher epoch. Repeating it at the same epoch is harmless.

        Raises FENCED_STATE_EPOCH for a lower epoch.
        """

    async def read_state(self, key: SharePartitionKey, leader_epoch: int) -> ShareState:
        """The state, for the leader of the data partition at ``leader_epoch``: earlier leaders are fenced.

        Raises FENCED_LEADER_EPOCH if a later leader has read it, INVALID_REQUEST if it was never initialized.
        """

    async def write_state(
        self,
        key: SharePartitionKey,
        state_epoch: int,
        leader_epoch: int,
        start_offset: int,
        delivery_complete_count: int,
        batches: Sequence[StateBatch],
        log_position: LogPosition = NO_POSITION,
        cut_offset: int = NO_CUT,
    ) -> None:
        """Change the state of the records in ``batches``, and move the start unless it is ``NO_START``.

        ``log_position`` is kept with the state, unless it is ``NO_POSITION``. ``cut_offset``: the log was cut
        there, so the state of all records from it on is forgotten first, and the start goes back to it.

        Raises FENCED_LEADER_EPOCH, FENCED_STATE_EPOCH (also if the state was begun since this leader has read
        it), or INVALID_REQUEST if it was never initialized.
        """

    async def delete(self, key: SharePartitionKey) -> None:
        """Forget the state. One that is not there is forgotten already."""

    async def read_summary(self, key: SharePartitionKey, leader_epoch: int) -> ShareStateSummary:
        """What describing the share partition needs; changes nothing. ``leader_epoch`` may be -1."""
