"""The state of one shard: the transactional ids that live in one partition of ``__transaction_state``. Pure.

Every change follows one pattern: the step from ``transaction`` gives the new value, ``append`` puts it into
the log, and ``replay`` makes it part of the state; loading calls the same ``replay``. If ``append`` raises,
nothing was appended and the state is as before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from tidemill.errors import ApiError, ErrorCode
from tidemill.transactions import transaction as steps
from tidemill.transactions.messages import TransactionDescription, TransactionListing
from tidemill.transactions.transaction import Transaction, TransactionState

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from tidemill.transactions.messages import Producer, TopicPartition
    from tidemill.transactions.settings import TransactionSettings

__all__ = ("TransactionsState", "parse_states")

_IDS_PER_APPEND = 1_000
Record = tuple[str, "Transaction | None"]


class Append(Protocol):
    """Puts records into the log as one batch, or raises and leaves the log as it was."""

    def __call__(self, records: Sequence[Record]) -> None:
        """Each record is a transactional id and its new value; None forgets the id."""


class TransactionsState:
    """Transactional ids and their values."""

    def __init__(self, settings: TransactionSettings, append: Append) -> None:
        self.settings = settings
        self.transactions: dict[str, Transaction] = {}
        self._append = append

    def replay(self, transactional_id: str, value: Transaction | None) -> None:
        """Make a record that is in the log part of the state."""
        if value is None:
            self.transactions.pop(transactional_id, None)
        else:
            self.transactions[transactional_id] = value

    def _write(self, *records: Record) -> None:
        self._append(records)
        for transactional_id, value in records:
            self.replay(transactional_id, value)

    # -- producers -------------------------------------------------------------------------------------

    def init_producer_id(
        self,
        transactional_id: str,
        known: Producer | None,
        timeout_ms: int,
        fresh_id: int | None,
        now_ms: int,
    ) -> Producer:
        """InitProducerId. Raises ``ProducerIdNeeded`` if it needs a ``fresh_id`` and has none.

        A transaction that is under way is ended first, and the client told to ask again.
        """
        if not 0 < timeout_ms <= self.settings.max_timeout_ms:
            raise ApiError(
                ErrorCode.invalid_transaction_timeout,
                f"a transaction timeout of {timeout_ms} ms is not within 1 … {self.settings.max_timeout_ms}",
            )
        old = self.transactions.get(transactional_id)
        new = steps.initialize(old, known, timeout_ms, fresh_id, now_ms)
        self._write((transactional_id, new))
        if new.is_prepared:
            raise ApiError(
                ErrorCode.concurrent_transactions,
                f"the transaction of {transactional_id!r} is being aborted; try again in a moment",
            )
        return new.producer

    # -- partitions ------------------------------------------------------------------------------------

    def add_partitions(
        self, transactional_id: str, producer: Producer, places: Collection[TopicPartition], now_ms: int
    ) -> None:
        """AddPartitionsToTxn, AddOffsetsToTxn, and the first write of a client of V2."""
        old = self.transactions.get(transactional_id)
        new = steps.add_partitions(old, producer, places, now_ms)
        if new is not old:
            self._write((transactional_id, new))

    def verify(
        self, transactional_id: str, producer: Producer, places: Collection[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode]:
        """Whether each partition is part of the producer's transaction now."""
        value = steps.check_member(self.transactions.get(transactional_id), producer)
        ongoing = value.state is TransactionState.ONGOING
        return {
            place: ErrorCode.none
            if ongoing and place in value.partitions
            else ErrorCode.transaction_abortable
            for place in places
        }

    # -- the end ---------------------------------------------------------------------------------------

    def end(
        self,
        transactional_id: str,
        producer: Producer,
        *,
        commit: bool,
        client_version: int,
        fresh_id: int | None,
        now_ms: int,
    ) -> Producer:
        """EndTxn. Gives who the producer is from now on.

        Raises ``ProducerIdNeeded`` if it needs a ``fresh_id`` and has none.
        """
        old = self.transactions.get(transactional_id)
        new = steps.end(
            old, producer, commit=commit, client_version=client_version, fresh_id=fresh_id, now_ms=now_ms
        )
        if new is not old:
            self._write((transactional_id, new))
        return new.producer

    def complete(self, transactional_id: str, prepared: Transaction, now_ms: int) -> None:
        """Every partition of ``prepared`` has its marker."""
        assert self.transactions.get(transactional_id) == prepared, transactional_id
        self._write((transactional_id, steps.complete(prepared, now_ms)))

    def prepared(self) -> list[tuple[str, Transaction]]:
        """Decisions that have not been carried to all partitions."""
        return [(name, value) for name, value in self.transactions.items() if value.is_prepared]

    # -- time ------------------------------------------------------------------------------------------

    def next_deadline_ms(self, transactional_id: str) -> int | None:
        """When the id's transaction is aborted unless it ends before."""
        value = self.transactions.get(transactional_id)
        if value is None or value.state is not TransactionState.ONGOING:
            return None
        return value.started_ms + value.timeout_ms

    def tick(self, transactional_id: str, now_ms: int) -> bool:
        """Abort a transaction that has taken too long; says whether there was one."""
        deadline_ms = self.next_deadline_ms(transactional_id)
        if deadline_ms is None or now_ms < deadline_ms:
            return False
        old = self.transactions[transactional_id]
        self._write((transactional_id, steps.abort_and_fence(old, now_ms)))
        return True

    def expire(self, now_ms: int) -> None:
        """Forget ids that nobody has used for long."""
        oldest_ms = now_ms - self.settings.expiration_ms
        expired: list[Record] = [
            (name, None)
            for name, value in self.transactions.items()
            if value.is_idle and value.updated_ms <= oldest_ms
        ]
        for start in range(0, len(expired), _IDS_PER_APPEND):
            self._write(*expired[start : start + _IDS_PER_APPEND])

    # -- looking ---------------------------------------------------------------------------------------

    def listing(
        self,
        states: Collection[TransactionState] | None,
        producer_ids: Collection[int],
        longer_than_ms: int,
        now_ms: int,
    ) -> Iterator[TransactionListing]:
        """ListTransactions. ``states`` None and an empty or negative filter let everything through."""
        for name, value in self.transactions.items():
            if (
                (states is None or value.state in states)
                and (not producer_ids or value.producer_id in producer_ids)
                and (longer_than_ms < 0 or now_ms - value.started_ms > longer_than_ms)
            ):
                yield TransactionListing(name, value.producer_id, value.state.label)

    def describe(self, transactional_id: str) -> TransactionDescription:
        """DescribeTransactions for one id."""
        value = self.transactions.get(transactional_id)
        if value is None:
            return TransactionDescription(transactional_id, ErrorCode.transactional_id_not_found)
        topics: dict[str, list[int]] = {}
        for topic, partition in sorted(value.partitions):
            topics.setdefault(topic, []).append(partition)
        return TransactionDescription(
            transactional_id,
            state=value.state.label,
            timeout_ms=value.timeout_ms,
            started_ms=value.started_ms,
            producer=value.producer,
            topics=topics,
        )


def parse_states(names: Collection[str]) -> tuple[frozenset[TransactionState] | None, tuple[str, ...]]:
    """(states to let through, names that are none); None without any names.

    >>> parse_states(["Ongoing", "Lost"])
    (frozenset({<TransactionState.ONGOING: 1>}), ('Lost',))
    """
    if not names:
        return None, ()
    by_label = {state.label: state for state in TransactionState}
    known = frozenset(by_label[name] for name in names if name in by_label)
    return known, tuple(name for name in names if name not in by_label)
