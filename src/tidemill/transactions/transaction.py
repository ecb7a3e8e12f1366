"""One transactional id: a value, and the steps from one value to the next. Pure.

| state | meaning | goes to |
| --- | --- | --- |
| Empty | a producer, no transaction | Ongoing |
| Ongoing | partitions were added | PrepareCommit, PrepareAbort |
| PrepareCommit, PrepareAbort | it is decided; markers are on their way | CompleteCommit, CompleteAbort |
| CompleteCommit, CompleteAbort | every partition has its marker | Ongoing, Empty |

A step gives the next value or raises ``ApiError`` with Kafka's code; it changes nothing by itself. ``Dead``
and ``PrepareEpochFence`` are names that Kafka has for moments between two records; a step has no such moment.

Two kinds of clients: those of transactions V1 keep their epoch from one transaction to the next; those of V2
(EndTxn v5) get a new epoch with every end, so that nothing of an old transaction can be taken for a part of
a new one. An end that the coordinator decides by itself, because of a timeout or a new producer, always takes
a new epoch: that fences the producer that had the old one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING

from tidemill.errors import ApiError, ErrorCode
from tidemill.transactions.messages import NO_PRODUCER, Producer

if TYPE_CHECKING:
    from collections.abc import Collection

    from tidemill.transactions.messages import TopicPartition

__all__ = (
    "CLIENT_V1",
    "CLIENT_V2",
    "NO_BATCH",
    "ProducerIdNeeded",
    "Transaction",
    "TransactionState",
    "abort_and_fence",
    "add_partitions",
    "check_member",
    "complete",
    "end",
    "initialize",
)

_NO_ID = -1
_NO_EPOCH = -1
_NO_TIME = -1
_EPOCH_MAX = 0x7FFF
_LAST_CLIENT_EPOCH = _EPOCH_MAX - 1
"""The highest epoch that a client gets: one more is kept to fence it."""

CLIENT_V1 = 0
CLIENT_V2 = 2
NO_BATCH = -1


class TransactionState(IntEnum):
    """The states of a transactional id, by the numbers that Kafka stores."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6
    PREPARE_EPOCH_FENCE = 7

    @property
    def label(self) -> str:
        """The name that Kafka shows.

        >>> TransactionState.PREPARE_COMMIT.label
        'PrepareCommit'
        """
        return self.name.title().replace("_", "")


_PREPARED = frozenset({TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT})
_COMPLETE = frozenset({TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT})


class ProducerIdNeeded(Exception):
    """The step needs a producer id that nobody had before: the caller takes one and tries again."""


@dataclass(frozen=True, slots=True)
class Transaction:
    """The state of one transactional id, as it is stored.

    Attributes:
        last_producer_epoch: the epoch before a bump that the producer asked for, so that a retry of that
            request is known as one; -1 if there is none.
        next_producer_id: the id that follows when this transaction is complete, if the epochs are used up.
        client_version: how the client ended the transaction: ``CLIENT_V1`` or ``CLIENT_V2``.
        started_ms: when the transaction began; -1 if there was none yet.
        batch: the batch of its job that an attempt belongs to; see ``attempts``.
    """

    producer_id: int
    producer_epoch: int
    timeout_ms: int
    state: TransactionState
    updated_ms: int
    partitions: frozenset[TopicPartition] = frozenset()
    started_ms: int = _NO_TIME
    last_producer_epoch: int = _NO_EPOCH
    previous_producer_id: int = _NO_ID
    next_producer_id: int = _NO_ID
    client_version: int = CLIENT_V1
    batch: int = NO_BATCH

    @property
    def producer(self) -> Producer:
        """The producer that may write now; while an end is prepared, the one that may write after it."""
        if self.next_producer_id != _NO_ID:
            return Producer(self.next_producer_id, 0)
        return Producer(self.producer_id, self.producer_epoch)

    @property
    def is_prepared(self) -> bool:
        """Whether it is decided and not yet complete."""
        return self.state in _PREPARED

    @property
    def is_idle(self) -> bool:
        """Whether no transaction is under way."""
        return self.state is TransactionState.EMPTY or self.state in _COMPLETE

    @property
    def commits(self) -> bool:
        """Whether the decision is to commit."""
        return self.state in (TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT)


# -- InitProducerId --------------------------------------------------------------------------------------


def initialize(
    old: Transaction | None, known: Producer | None, timeout_ms: int, fresh_id: int | None, now_ms: int
) -> Transaction:
    """InitProducerId: a producer starts, or goes on after an error as the producer ``known``.

    Gives a value in Empty with the producer's new epoch, or in PrepareAbort if a transaction has to be ended
    first, by which the producer that had begun it is fenced.
    """
    if old is None:
        producer = Producer(_require(fresh_id), 0)
        return Transaction(*producer, timeout_ms, TransactionState.EMPTY, now_ms)
    if old.is_prepared:
        raise _concurrent(old)
    if known is not None:
        _check_known(old, known)
    if old.state is TransactionState.ONGOING:
        if known is not None and known.epoch != old.producer_epoch:
            raise _fenced(old, known)
        # Marked as V1: a client of V2 is told the new epoch after an abort, and would write under it.
        return replace(abort_and_fence(old, now_ms), client_version=CLIENT_V1)
    empty = replace(
        old,
        timeout_ms=timeout_ms,
        state=TransactionState.EMPTY,
        updated_ms=now_ms,
        partitions=frozenset(),
        started_ms=_NO_TIME,
        previous_producer_id=old.producer_id,
    )
    return _bump(old, empty, known, fresh_id)


def _check_known(old: Transaction, known: Producer) -> None:
    retried_rotation = (
        known.id == old.previous_producer_id
        and known.epoch == old.last_producer_epoch
        and known.epoch >= _LAST_CLIENT_EPOCH
    )
    if known.id != old.producer_id and not retried_rotation:
        raise _fenced(old, known)


def _bump(old: Transaction, empty: Transaction, known: Producer | None, fresh_id: int | None) -> Transaction:
    if known is not None and known.epoch == old.last_producer_epoch and known.epoch != old.producer_epoch:
        # The answer to an earlier request of this producer was lost: it gets the same one again.
        return replace(empty, previous_producer_id=old.previous_producer_id)
    if known is not None and known.epoch != old.producer_epoch:
        raise _fenced(old, known)
    last_epoch = _NO_EPOCH if known is None else old.producer_epoch
    if old.producer_epoch >= _LAST_CLIENT_EPOCH:
        return replace(
            empty, producer_id=_require(fresh_id), producer_epoch=0, last_producer_epoch=last_epoch
        )
    return replace(empty, producer_epoch=old.producer_epoch + 1, last_producer_epoch=last_epoch)


def abort_and_fence(old: Transaction, now_ms: int) -> Transaction:
    """End an ongoing transaction without its producer, and fence the producer's epoch.

    A client of V2 that aborts as well is told the new epoch and goes on, unless that is the last there is.
    """
    assert old.state is TransactionState.ONGOING, old
    return replace(
        old,
        state=TransactionState.PREPARE_ABORT,
        producer_epoch=old.producer_epoch + 1,
        last_producer_epoch=_NO_EPOCH,
        client_version=CLIENT_V2 if old.producer_epoch < _LAST_CLIENT_EPOCH else CLIENT_V1,
        updated_ms=now_ms,
    )


# -- AddPartitionsToTxn, AddOffsetsToTxn -----------------------------------------------------------------


def check_member(transaction: Transaction | None, producer: Producer) -> Transaction:
    """Raise ``ApiError`` unless ``producer`` owns this transactional id and no end is being carried out."""
    if transaction is None:
        raise _not_mapped(transaction, producer)
    if transaction.is_prepared and transaction.producer == producer:
        raise _concurrent(transaction)
    if transaction.producer_id != producer.id:
        raise _not_mapped(transaction, producer)
    if transaction.producer_epoch != producer.epoch:
        raise _fenced(transaction, producer)
    return transaction


def add_partitions(
    old: Transaction | None, producer: Producer, partitions: Collection[TopicPartition], now_ms: int
) -> Transaction:
    """Add partitions to the transaction, which begins with the first one.

    Gives the same value if it has all of them.
    """
    old = check_member(old, producer)
    if old.state is TransactionState.ONGOING:
        if old.partitions.issuperset(partitions):
            return old
        return replace(old, partitions=old.partitions.union(partitions), updated_ms=now_ms)
    return replace(
        old,
        state=TransactionState.ONGOING,
        partitions=frozenset(partitions),
        started_ms=now_ms,
        updated_ms=now_ms,
        client_version=CLIENT_V1,
    )


# -- EndTxn ----------------------------------------------------------------------------------------------


def end(
    old: Transaction | None,
    producer: Producer,
    *,
    commit: bool,
    client_version: int,
    fresh_id: int | None,
    now_ms: int,
) -> Transaction:
    """EndTxn: commit or abort. Gives the same value if the same end was decided before and is complete."""
    if old is None:
        raise _not_mapped(old, producer)
    is_retry = client_version >= CLIENT_V2 and _is_retried_end(old, producer)
    if not is_retry:
        if client_version >= CLIENT_V2:
            check_member(old, producer)
        if old.producer_id != producer.id:
            raise _not_mapped(old, producer)
        if old.producer_epoch != producer.epoch:
            raise _fenced(old, producer)
        # To a client of V1 the same epoch means the same transaction, so an end repeats the last one. To a
        # client of V2 it means the next one, which has not begun: that can be aborted, for the new epoch.
        is_retry = client_version < CLIENT_V2 and old.state is not TransactionState.EMPTY
    if old.state is TransactionState.ONGOING:
        return _prepared(old, commit=commit, client_version=client_version, fresh_id=fresh_id, now_ms=now_ms)
    if is_retry and old.commits == commit:
        if old.is_prepared:
            raise _concurrent(old)
        return old
    if is_retry or commit or client_version < CLIENT_V2:
        raise ApiError(
            ErrorCode.invalid_txn_state,
            f"a transaction in state {old.state.label} cannot be {'committed' if commit else 'aborted'}",
        )
    begun = replace(old, partitions=frozenset(), started_ms=now_ms)
    return _prepared(begun, commit=False, client_version=client_version, fresh_id=fresh_id, now_ms=now_ms)


def _is_retried_end(old: Transaction, producer: Producer) -> bool:
    """Whether the producer repeats an EndTxn that gave it a new epoch, under its old epoch."""
    if old.client_version < CLIENT_V2 or not (old.is_prepared or old.state in _COMPLETE):
        return False
    if old.producer_id == producer.id:
        return old.producer_epoch == producer.epoch + 1
    rotated = old.previous_producer_id == producer.id and old.producer_epoch == 0
    return rotated and producer.epoch == _LAST_CLIENT_EPOCH and old.state in _COMPLETE


def _prepared(
    old: Transaction, *, commit: bool, client_version: int, fresh_id: int | None, now_ms: int
) -> Transaction:
    state = TransactionState.PREPARE_COMMIT if commit else TransactionState.PREPARE_ABORT
    prepared = replace(old, state=state, client_version=client_version, updated_ms=now_ms)
    if client_version < CLIENT_V2:
        return prepared
    exhausted = old.producer_epoch >= _LAST_CLIENT_EPOCH
    return replace(
        prepared,
        producer_epoch=old.producer_epoch + 1,
        last_producer_epoch=old.producer_epoch,
        next_producer_id=_require(fresh_id) if exhausted else _NO_ID,
    )


def complete(old: Transaction, now_ms: int) -> Transaction:
    """The value after every partition has its marker."""
    assert old.is_prepared, old
    done = replace(
        old,
        state=TransactionState.COMPLETE_COMMIT if old.commits else TransactionState.COMPLETE_ABORT,
        partitions=frozenset(),
        updated_ms=now_ms,
        batch=NO_BATCH,
    )
    if old.client_version < CLIENT_V2:
        return done
    done = replace(done, last_producer_epoch=old.producer_epoch, previous_producer_id=old.producer_id)
    if old.next_producer_id == _NO_ID:
        return done
    return replace(done, producer_id=old.next_producer_id, producer_epoch=0, next_producer_id=_NO_ID)


# -- refusals --------------------------------------------------------------------------------------------


def _require(fresh_id: int | None) -> int:
    if fresh_id is None:
        raise ProducerIdNeeded
    return fresh_id


def _concurrent(transaction: Transaction) -> ApiError:
    return ApiError(
        ErrorCode.concurrent_transactions,
        f"the last transaction is still in state {transaction.state.label}; try again in a moment",
    )


def _fenced(transaction: Transaction, producer: Producer) -> ApiError:
    return ApiError(
        ErrorCode.producer_fenced,
        f"producer {producer.id} epoch {producer.epoch} is fenced: the transactional id belongs to producer "
        f"{transaction.producer_id} epoch {transaction.producer_epoch}",
    )


def _not_mapped(transaction: Transaction | None, producer: Producer) -> ApiError:
    current = NO_PRODUCER if transaction is None else transaction.producer
    belongs = "is unknown" if current == NO_PRODUCER else f"belongs to producer {current.id}"
    return ApiError(
        ErrorCode.invalid_producer_id_mapping,
        f"the transactional id {belongs}, not to producer {producer.id}; start the producer anew",
    )
