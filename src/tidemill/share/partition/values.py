"""What goes into a share partition, and what comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidemill.coordination.share_state import DeliveryState, StateBatch
    from tidemill.share.partition.runs import Wait

__all__ = (
    "GROUP_BACKOFF",
    "NO_DELIVERY_TIME",
    "AcknowledgeType",
    "Acknowledgement",
    "Acquired",
    "DueLetter",
    "PendingAccept",
    "RecordsView",
    "SeenRecord",
    "Settlement",
    "Span",
    "StateWrite",
    "Totals",
)

#: The delay of a release that leaves it to the group's configs.
GROUP_BACKOFF = -1
NO_DELIVERY_TIME = 0


class AcknowledgeType(IntEnum):
    """What a member says of records, with KIP-932's numbers; RETURN is not Kafka's."""

    GAP = 0
    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    RENEW = 4
    #: They waited with the member, and nobody has looked at them: the delivery does not count.
    RETURN = 5


class Span(NamedTuple):
    """The offsets of one batch of the log. The records of a hidden one are shown to nobody."""

    first_offset: int
    last_offset: int
    is_hidden: bool = False


class SeenRecord(NamedTuple):
    """What a share partition needs of a record whose key or headers decide when it is handed out."""

    offset: int
    key: bytes | None = None
    deliver_at_ms: int = NO_DELIVERY_TIME


class Acquired(NamedTuple):
    """Neighbouring records that a member has been given."""

    first_offset: int
    last_offset: int
    delivery_count: int


class Acknowledgement(NamedTuple):
    """What a member says of neighbouring records: one type for all of them, or one for each."""

    first_offset: int
    last_offset: int
    types: Sequence[int]
    #: For a release: how long they wait; ``GROUP_BACKOFF`` leaves it to the group.
    delay_ms: int = GROUP_BACKOFF
    #: For a rejection: why, for the dead letter.
    reason: str = ""


@dataclass(slots=True, eq=False)
class Settlement:
    """One acknowledgement on its way to the persister; the client is answered when it is written."""

    ranges: list[tuple[int, int]] = field(default_factory=list)

    @property
    def needs_write(self) -> bool:
        """Whether anything has to be written; a renewal alone is done at once."""
        return bool(self.ranges)


@dataclass(slots=True, eq=False)
class StateWrite:
    """One write to the persister, and what it is made of. One at a time is under way."""

    start_offset: int
    delivery_complete_count: int
    batches: list[StateBatch]
    settlements: list[Settlement]
    #: Ranges whose state has changed without waiting for the write.
    dirty: list[tuple[int, int]]


@dataclass(slots=True, eq=False)
class PendingAccept:
    """Records that a transaction accepts, on the way to the persister, with the locks that they had."""

    batches: list[StateBatch] = field(default_factory=list)
    #: (first, last, owner, when the lock ended).
    locks: list[tuple[int, int, str, int]] = field(default_factory=list)
    #: Of these the end of an earlier lock was not written yet.
    unwritten: list[tuple[int, int]] = field(default_factory=list)


class DueLetter(NamedTuple):
    """Dead letters that are due: the records are finished when their letters are written."""

    first_offset: int
    last_offset: int
    delivery_count: int
    reason: str


class RecordsView(NamedTuple):
    """Neighbouring records and their state, for people."""

    first_offset: int
    last_offset: int
    state: DeliveryState
    wait: Wait
    delivery_count: int
    owner: str
    #: When the lock ends or the delay is over; 0 if neither.
    until_ms: int
    since_ms: int
    reason: str


@dataclass(slots=True)
class Totals:
    """Counters of records by what happened to them in a share partition, or in several."""

    acquired: int = 0
    accepted: int = 0
    released: int = 0
    rejected: int = 0
    expired: int = 0
    #: Reached the delivery limit or were rejected.
    dead: int = 0
    #: Were not finished when the start of the log passed them.
    lost: int = 0
    #: Were finished, and an unclean election has cut them off the log.
    cut: int = 0
