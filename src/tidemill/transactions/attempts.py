"""Attempts: transactions that belong to a batch of a job, and the steps that they take. Pure.

A *job* writes in *batches*. Every task attempt of a batch writes under a transaction of its own, in a *slot*
of the job: a transactional id that the coordinator gives out, and again when the transaction is over. So a
job has as many transactional ids and producer ids as it had attempts at one time.

| a slot is | stored as | goes to |
| --- | --- | --- |
| free | Empty, CompleteCommit or CompleteAbort, without a batch | reserved |
| reserved | Empty, with the batch of its attempt | writing, free |
| writing | Ongoing, with the batch | busy |
| busy | PrepareCommit or PrepareAbort | free |

*Open* is reserved or writing. Every attempt has an epoch of its own, and every end takes one more: an earlier
user of the slot can neither write to a partition that has the marker nor add one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tidemill.errors import ApiError, ErrorCode
from tidemill.transactions.messages import Producer
from tidemill.transactions.transaction import (
    CLIENT_V1,
    NO_BATCH,
    ProducerIdNeeded,
    Transaction,
    TransactionState,
    abort_and_fence,
)
from tidemill.wire.jobs import JOB_PREFIX, AttemptId

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = (
    "abort",
    "check_count",
    "check_job",
    "commit",
    "is_free",
    "is_open",
    "parse_slot",
    "repeated",
    "reserve",
    "routing_key",
    "slot_id",
    "why_gone",
)

_JOB_BYTES_MAX = 500
_LAST_EPOCH = 0x7FFF - 4
"""Highest epoch given to an attempt; one more is kept for the bump that ends it."""


# -- names -----------------------------------------------------------------------------------------------


def check_job(job: str) -> None:
    """Raise ``ApiError`` for a name that no job can have, before anything is kept for it."""
    size_bytes = len(job.encode())
    if not 1 <= size_bytes <= _JOB_BYTES_MAX:
        raise ApiError(
            ErrorCode.invalid_request,
            f"a job's name has 1 to {_JOB_BYTES_MAX} bytes, this one has {size_bytes}; choose another",
        )
    if "#" in job or not job.isprintable():
        raise ApiError(
            ErrorCode.invalid_request,
            f"a job cannot be called {job!r}: a name has neither '#' nor characters that cannot be printed",
        )


def check_count(listed: int, most: int) -> None:
    """Raise ``ApiError`` if a request lists more attempts than one may."""
    if listed > most:
        raise ApiError(
            ErrorCode.invalid_request,
            f"{listed} attempts in one request, {most} are the most; write with fewer tasks",
        )


def slot_id(job: str, slot: int) -> str:
    """The transactional id of a slot.

    >>> slot_id("orders", 3)
    '__tidemill_job:orders#3'
    """
    return f"{JOB_PREFIX}{job}#{slot}"


def parse_slot(transactional_id: str) -> tuple[str, int] | None:
    """Job and number of a slot; None for a transactional id of a client.

    >>> parse_slot("__tidemill_job:orders#3"), parse_slot("orders#3")
    (('orders', 3), None)
    """
    if not transactional_id.startswith(JOB_PREFIX):
        return None
    job, _, number = transactional_id[len(JOB_PREFIX) :].partition("#")
    return (job, int(number)) if number.isascii() and number.isdigit() else None


def routing_key(transactional_id: str) -> str:
    """The key by which the coordinator of an id is chosen: all ids of a job have the same one.

    >>> routing_key("__tidemill_job:orders#3"), routing_key("mine#3")
    ('__tidemill_job:orders', 'mine#3')
    """
    if not transactional_id.startswith(JOB_PREFIX):
        return transactional_id
    return transactional_id.partition("#")[0]


# -- steps -----------------------------------------------------------------------------------------------


def is_free(value: Transaction) -> bool:
    """Whether the slot can be given out."""
    return value.is_idle and value.batch == NO_BATCH


def is_open(value: Transaction) -> bool:
    """Whether an attempt has the slot and it is not decided yet how that ends."""
    return value.batch != NO_BATCH and value.state in (TransactionState.EMPTY, TransactionState.ONGOING)


def reserve(
    old: Transaction | None, batch: int, timeout_ms: int, fresh_id: int | None, now_ms: int
) -> Transaction:
    """The slot as an attempt of ``batch`` gets it. It must be free, or new (None).

    Raises ``ProducerIdNeeded`` if it needs a ``fresh_id`` and has none.
    """
    assert old is None or is_free(old), old
    if old is None or old.producer_epoch >= _LAST_EPOCH:
        if fresh_id is None:
            raise ProducerIdNeeded
        producer = Producer(fresh_id, 0)
    else:
        producer = Producer(old.producer_id, old.producer_epoch + 1)
    return Transaction(*producer, timeout_ms, TransactionState.EMPTY, now_ms, batch=batch)


def commit(old: Transaction, now_ms: int) -> Transaction:
    """The slot after its attempt was published; an attempt that wrote nothing frees it at once."""
    assert is_open(old), old
    if old.state is TransactionState.EMPTY:
        return _released(old, now_ms)
    return replace(
        old,
        state=TransactionState.PREPARE_COMMIT,
        producer_epoch=old.producer_epoch + 1,
        client_version=CLIENT_V1,
        updated_ms=now_ms,
    )


def abort(old: Transaction, now_ms: int) -> Transaction:
    """The slot after its attempt was aborted."""
    assert is_open(old), old
    if old.state is TransactionState.EMPTY:
        return _released(old, now_ms)
    # Marked as V1: a client of V2 is told the new epoch after an abort, and would write under it.
    return replace(abort_and_fence(old, now_ms), client_version=CLIENT_V1)


def _released(old: Transaction, now_ms: int) -> Transaction:
    return replace(old, batch=NO_BATCH, updated_ms=now_ms)


def why_gone(value: Transaction | None, attempt: AttemptId, batch: int) -> str | None:
    """Why an attempt cannot be published with ``batch``, in words; None if it can."""
    if value is None:
        return "nobody knows it: it was never opened, or was forgotten"
    if value.producer != Producer(attempt.producer_id, attempt.producer_epoch) or not is_open(value):
        return (
            "it was aborted, by its timeout, by request, or because its job published without it; "
            f"its slot is {value.state.label} at producer {value.producer_id} epoch {value.producer_epoch}"
        )
    if value.batch != batch:
        return f"it belongs to batch {value.batch}"
    return None


def repeated(attempts: Sequence[AttemptId]) -> AttemptId | None:
    """The first attempt that is listed twice; None if there is none."""
    seen: set[str] = set()
    for attempt in attempts:
        if attempt.transactional_id in seen:
            return attempt
        seen.add(attempt.transactional_id)
    return None
