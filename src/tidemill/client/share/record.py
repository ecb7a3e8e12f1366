"""A record that a share group has handed to this consumer, and what can be done with it.

The holder of a record settles it once: ``accept``, ``release`` or ``reject``. The call does not wait: the
node is told in the background, many records at a time (``AsyncShare.flush`` waits). Any thread may call them.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from tidemill.client.arguments import millis, shown
from tidemill.errors import ApiError, ConfigError, ErrorCode
from tidemill.records.record import Header

__all__ = ("Acknowledge", "FencingToken", "RecordKeeper", "Settlement", "ShareRecord")

#: The group's own backoff decides when a released record comes back.
GROUP_BACKOFF_MS = -1


class Acknowledge(IntEnum):
    """What became of a record, with Kafka's numbers; RETURN is not Kafka's."""

    GAP = 0
    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    RENEW = 4
    #: Nobody has looked at it: the delivery does not count.
    RETURN = 5


_KAFKAS = frozenset(Acknowledge) - {Acknowledge.RETURN}


class Settlement(NamedTuple):
    """What a node is told about a record."""

    kind: Acknowledge
    #: A released record does not come back before this time is over.
    delay_ms: int = GROUP_BACKOFF_MS
    #: Why a record is rejected, for its dead letter.
    reason: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether Kafka's own requests can express this settlement, so that no ShareSettle is needed."""
        return self.kind in _KAFKAS and self.delay_ms == GROUP_BACKOFF_MS and not self.reason


class FencingToken(NamedTuple):
    """A number that rises with every delivery of a record, by which a database can refuse a late handler.

    A lock can end while its holder is still at work, and the record goes to somebody else. A store that
    keeps the highest token that it has seen of a record, and refuses lower ones, keeps the late holder out.
    Tokens of different records cannot be compared.

    >>> FencingToken(3, 1) < FencingToken(3, 2) < FencingToken(4, 1)
    True
    >>> int(FencingToken(3, 2))
    196610
    """

    leader_epoch: int
    delivery_count: int

    def __int__(self) -> int:
        return (self.leader_epoch << 16) | self.delivery_count


class RecordKeeper(Protocol):
    """The consumer of a record, which tells the node what became of it. Any thread may call it."""

    def settle(self, record: ShareRecord, settlement: Settlement) -> None:
        """Tell the node what became of the record."""

    def renew(self, record: ShareRecord) -> None:
        """Ask the node for more time."""


class ShareRecord:
    """One record of a share group, locked for this consumer until it is settled or its lock ends.

    ``headers`` are pairs of name and value, in order. ``delivery_count`` is 1 at the first delivery. Where
    the topic is a table, ``row`` is the typed row, and ``op`` says what happened to it (``insert``,
    ``upsert``, or ``delete``: then the row has the key columns only).
    """

    __slots__ = (
        "_handed_at",
        "_keeper",
        "_link",
        "_locked_until",
        "_lost",
        "_settled",
        "delivery_count",
        "headers",
        "key",
        "leader_epoch",
        "offset",
        "op",
        "partition",
        "row",
        "timestamp_ms",
        "topic",
        "value",
    )

    def __init__(
        self,
        keeper: RecordKeeper,
        topic: str,
        partition: int,
        offset: int,
        key: bytes | None,
        value: bytes | None,
        timestamp_ms: int,
        headers: tuple[Header, ...],
        delivery_count: int,
        leader_epoch: int,
    ) -> None:
        self._keeper = keeper
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.key = key
        self.value = value
        self.timestamp_ms = timestamp_ms
        self.headers = headers
        self.delivery_count = delivery_count
        self.leader_epoch = leader_epoch
        self.row: dict[str, Any] | None = None
        self.op: str | None = None
        #: What it was settled with; None while it is held.
        self._settled: Settlement | None = None
        #: For its keeper: whom it came from, when its lock ends (in the event loop's time), whether the lock
        #: is gone, and when it was handed out.
        self._link: Any = None
        self._locked_until = 0.0
        self._lost = False
        self._handed_at = 0.0

    def __repr__(self) -> str:
        return (
            f"<record {self.topic}-{self.partition} offset {self.offset}, delivery {self.delivery_count}"
            f"{'' if self._settled is None else f', {_DONE[self._settled.kind]}'}>"
        )

    # --- what it says

    @property
    def timestamp(self) -> datetime:
        """When it was written, in UTC."""
        return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)

    @property
    def fencing_token(self) -> FencingToken:
        """Rises with every delivery of this record. ``int(token)`` fits a database's integer."""
        return FencingToken(self.leader_epoch, self.delivery_count)

    @property
    def settled(self) -> bool:
        """Whether it was accepted, released or rejected."""
        return self._settled is not None

    def text(self) -> str:
        """The value as UTF-8 text."""
        return (self.value or b"").decode()

    def json(self) -> Any:
        """The value as JSON."""
        return json.loads(self.value or b"null")

    def header(self, name: str) -> bytes | None:
        """The value of the last header of that name; None if there is none."""
        return next((value for each, value in reversed(self.headers) if each == name), None)

    # --- what becomes of it

    def accept(self) -> None:
        """It is done: nobody of the group gets it again."""
        self._settle(_ACCEPT)

    def release(self, delay: float | None = None) -> None:
        """Give it back: it is delivered again, to anybody of the group.

        ``delay`` in seconds says how long it waits; without it the group's backoff decides. The last delivery
        that the group's limit allows ends as a rejection instead.
        """
        self._settle(_RELEASE if delay is None else Settlement(Acknowledge.RELEASE, millis("delay", delay)))

    def reject(self, reason: str = "") -> None:
        """It cannot be processed: it goes to the group's dead-letter topic, or away if the group has none."""
        if not isinstance(reason, str):
            raise ConfigError(f"the reason for a rejection is text, not {shown(reason)}")
        self._settle(Settlement(Acknowledge.REJECT, reason=reason) if reason else _REJECT)

    def renew(self) -> None:
        """Start its lock anew, for work that takes longer than the lock lasts."""
        if self._settled is None:
            self._keeper.renew(self)

    def _settle(self, settlement: Settlement) -> None:
        if self._settled is not None:
            raise ApiError(
                ErrorCode.invalid_record_state,
                f"record {self.topic}-{self.partition} offset {self.offset} was {_DONE[self._settled.kind]} "
                "before; settle a record once",
            )
        self._settled = settlement
        self._keeper.settle(self, settlement)


_ACCEPT = Settlement(Acknowledge.ACCEPT)
_RELEASE = Settlement(Acknowledge.RELEASE)
_REJECT = Settlement(Acknowledge.REJECT)
_DONE = {
    Acknowledge.ACCEPT: "accepted",
    Acknowledge.RELEASE: "released",
    Acknowledge.REJECT: "rejected",
    Acknowledge.RETURN: "released",
}
