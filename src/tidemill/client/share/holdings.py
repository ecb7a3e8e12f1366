"""The records that a consumer has: those that wait or are worked on, and those whose end is not confirmed.

The time is that of the event loop, and is given. Nothing here waits or talks to anybody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tidemill.client.share.outbox import Outcome
from tidemill.client.share.record import Acknowledge, ShareRecord
from tidemill.errors import ApiError, ErrorCode

__all__ = ("Due", "Holdings", "ShareCounts")

_NAMED_FAILURES: Final = 5
#: Half of Kafka's delivery limit, for groups whose limit is not known.
_SUSPECT_FROM: Final = 3

_Key = tuple[str, int, int]


@dataclass(slots=True)
class ShareCounts:
    """What a consumer has seen and done so far.

    ``lost`` are records whose lock was gone before the node had heard what became of them.
    """

    received: int = 0
    accepted: int = 0
    released: int = 0
    rejected: int = 0
    renewed: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Due:
    """The locks that have to be renewed now, and how many have ended."""

    to_renew: Sequence[ShareRecord]
    expired: int


class Holdings:
    """Locked records of one consumer. ``lock_seconds`` is how long a lock lasts, as nodes said last."""

    def __init__(self) -> None:
        self.counts = ShareCounts()
        self.lock_seconds = 30.0
        #: From this delivery on a record may be one that makes its reader fail.
        self.suspect_from = _SUSPECT_FROM
        self._held: dict[_Key, ShareRecord] = {}
        self._suspects: set[_Key] = set()
        self._unconfirmed: dict[_Key, ShareRecord] = {}
        self._renewing: set[_Key] = set()
        self._failures: list[str] = []
        self._failure_count = 0

    def __len__(self) -> int:
        """How many records are locked and not settled."""
        return len(self._held)

    @property
    def has_suspects(self) -> bool:
        """Whether a record is held that was delivered so often that it may make its reader fail."""
        return bool(self._suspects)

    @property
    def is_confirmed(self) -> bool:
        """Whether nodes have answered everything that was said about records."""
        return not self._unconfirmed

    def add(self, records: Iterable[ShareRecord], now: float) -> None:
        """Take records that were locked just now."""
        locked_until = now + self.lock_seconds
        for record in records:
            record._locked_until = locked_until
            key = _key(record)
            self._held[key] = record
            if record.delivery_count >= self.suspect_from:
                self._suspects.add(key)
            self.counts.received += 1

    def settle(self, record: ShareRecord) -> bool:
        """Note that a node is about to be told what became of a record. False if its lock is gone."""
        key = _key(record)
        if self._held.get(key) is not record:
            self._fail(record, "its lock had ended")
            return False
        self._remove(key)
        self._unconfirmed[key] = record
        return True

    def holds(self, record: ShareRecord) -> bool:
        """Whether the record is locked for this consumer, and not settled."""
        return self._held.get(_key(record)) is record

    def let_go(self, record: ShareRecord) -> None:
        """Forget a record that is held: its end is told in a transaction."""
        self._remove(_key(record))

    def renew(self, record: ShareRecord) -> bool:
        """Note that a node is about to be asked for more time. False if it is, or the lock is gone."""
        key = _key(record)
        if self._held.get(key) is not record or key in self._renewing:
            return False
        self._renewing.add(key)
        return True

    def answered(self, outcomes: Iterable[Outcome], now: float) -> None:
        """Settle or give back held records by the outcomes that nodes have answered."""
        for partition, entry, error in outcomes:
            key = (*partition, entry.first_offset)
            kind = entry.settlement.kind
            if kind is Acknowledge.RENEW:
                self._renewed(key, error, now)
                continue
            record = self._unconfirmed.pop(key, None)
            if record is None:
                continue  # Offsets whose record nobody has seen.
            if error != ErrorCode.none:
                self._fail(record, f"the node answered {error.name.upper()}")
            elif kind is Acknowledge.ACCEPT:
                self.counts.accepted += 1
            elif kind is Acknowledge.RELEASE or kind is Acknowledge.RETURN:
                self.counts.released += 1
            else:
                self.counts.rejected += 1

    def _renewed(self, key: _Key, error: ErrorCode, now: float) -> None:
        self._renewing.discard(key)
        record = self._held.get(key)
        if record is None:
            return
        if error == ErrorCode.none:
            self.counts.renewed += 1
            record._locked_until = now + self.lock_seconds
        elif error == ErrorCode.invalid_record_state:
            self._lose(key)

    def lose(self, is_gone: Callable[[ShareRecord], bool], why: str) -> int:
        """Give up the records whose locks are gone; gives how many were not settled."""
        held = [key for key, record in self._held.items() if is_gone(record)]
        for key in held:
            self._lose(key)
        for key in [key for key, record in self._unconfirmed.items() if is_gone(record)]:
            self._fail(self._unconfirmed.pop(key), why)
        return len(held)

    def due(self, now: float, *, renew_handed_out: bool) -> Due:
        """What is to be done about locks: those that wait are renewed, and those in hand if it is said."""
        soon = now + self.lock_seconds / 2
        to_renew: list[ShareRecord] = []
        expired: list[_Key] = []
        for key, record in self._held.items():
            if record._locked_until > soon:
                continue
            if record._locked_until <= now:
                expired.append(key)
            elif renew_handed_out or not record._handed_at:
                to_renew.append(record)
        for key in expired:
            self._lose(key)
        return Due(to_renew, len(expired))

    def any_of(self, link: object) -> bool:
        """Whether records from this node are held, or wait for its answer."""
        records = (*self._held.values(), *self._unconfirmed.values())
        return any(record._link is link for record in records)

    def raise_failures(self, group: str) -> None:
        """Raise ``ApiError`` if nodes have refused settlements since the last call."""
        failures, self._failures = self._failures, []
        count, self._failure_count = self._failure_count, 0
        if count:
            more = f" and {count - len(failures)} more" if count > len(failures) else ""
            raise ApiError(
                ErrorCode.invalid_record_state,
                f"group {group!r}: {count} records were not settled, they come again: "
                f"{'; '.join(failures)}{more}",
            )

    def _lose(self, key: _Key) -> None:
        self._remove(key)._lost = True

    def _remove(self, key: _Key) -> ShareRecord:
        self._renewing.discard(key)
        self._suspects.discard(key)
        return self._held.pop(key)

    def _fail(self, record: ShareRecord, why: str) -> None:
        self.counts.lost += 1
        self._failure_count += 1
        if len(self._failures) < _NAMED_FAILURES:
            self._failures.append(f"{record.topic}-{record.partition} offset {record.offset} ({why})")


def _key(record: ShareRecord) -> _Key:
    return record.topic, record.partition, record.offset
