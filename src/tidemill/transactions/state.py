"""The state of one shard: the transactional ids that live in one partition of ``__transaction_state``. Pure.

Every change follows one pattern: the step from ``transaction`` gives the new value, ``append`` puts it into
the log, and ``replay`` makes it part of the state; loading calls the same ``replay``. If ``append`` raises,
nothing was appended and the state is as before.

What is decided in one append is carried out as one: see ``shard``. Attempts of jobs, whose transactions are
kept here too, are opened and published by ``publications``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from tidemill.coordination.turns import in_chunks
from tidemill.errors import ApiError, ErrorCode
from tidemill.transactions import attempts
from tidemill.transactions import transaction as steps
from tidemill.transactions.attempts import parse_slot, slot_id
from tidemill.transactions.jobs import Job, Publication
from tidemill.transactions.messages import TransactionDescription, TransactionListing
from tidemill.transactions.records import chunks, is_job_key
from tidemill.transactions.transaction import Transaction, TransactionState
from tidemill.wire.jobs import JOB_PREFIX, job_key

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from tidemill.transactions.messages import Producer, TopicPartition
    from tidemill.transactions.records import StoredRecord
    from tidemill.transactions.settings import TransactionSettings

__all__ = ("TransactionsState", "listing", "parse_states")

#: Ids and jobs that are looked at in one step of expiry.
_EXPIRED_PER_STEP = 1_000


class Append(Protocol):
    """Puts records into the log as one batch, or raises and leaves the log as it was."""

    def __call__(self, records: Sequence[StoredRecord], batch: bytes | None = None) -> None:
        """Append records: pairs of a name and its new value. None forgets the name.

        The name is a transactional id or, for what a job has published, the job's key. ``batch`` is what the
        log has built of the records, if that is done already.
        """


class TransactionsState:
    """The transactional ids and jobs of one shard."""

    def __init__(self, settings: TransactionSettings, append: Append) -> None:
        self.settings = settings
        self.transactions: dict[str, Transaction] = {}
        #: How many of them are under way.
        self.open_count = 0
        #: Jobs that have slots.
        self.jobs: dict[str, Job] = {}
        #: The last publication of each job, also of jobs that have no slots any more.
        self.published: dict[str, Publication] = {}
        #: From then on the timeouts of transactions count that began under another coordinator.
        self._loaded_ms = 0
        self._append = append

    def replay(self, name: str, value: Transaction | Publication | None) -> None:
        """Make a record that is in the log part of the state."""
        if isinstance(value, Publication) or is_job_key(name):
            assert value is None or isinstance(value, Publication), name
            job = name[len(JOB_PREFIX) :]
            if value is None:
                self.published.pop(job, None)
            else:
                self.published[job] = value
            return
        before = self.transactions.pop(name, None) if value is None else self.transactions.get(name)
        if value is not None:
            self.transactions[name] = value
            self.open_count += not value.is_idle
        self.open_count -= before is not None and not before.is_idle
        slot = parse_slot(name)
        if slot is not None:
            job_of_slot = self.jobs.setdefault(slot[0], Job())
            job_of_slot.replay_slot(slot[1], value)
            if not job_of_slot.slot_count:
                del self.jobs[slot[0]]

    def loaded(self, now_ms: int) -> None:
        """Start the timeouts of what is open anew, after everything was replayed.

        When it began is the time of another process, and perhaps of another machine, whose clock may be ahead
        or behind: a client that is in time must not be fenced because another node coordinates now.
        """
        self._loaded_ms = now_ms
        for job in self.jobs.values():
            job.alive_ms = now_ms
        for name, value in self.transactions.items():
            if value.started_ms > now_ms:
                # By a clock that was ahead: the timeout would wait until this one gets there.
                self.transactions[name] = replace(value, started_ms=now_ms)

    def write(self, records: Sequence[StoredRecord], batch: bytes | None = None) -> None:
        """Put records into the log, or the ``batch`` built of them, and make them part of the state."""
        self._append(records, batch)
        for name, value in records:
            self.replay(name, value)

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
        self.write([(transactional_id, new)])
        if new.is_prepared:
            raise ApiError(
                ErrorCode.concurrent_transactions,
                f"the transaction of {transactional_id!r} is being aborted; try again in a moment",
            )
        return new.producer

    # -- partitions ------------------------------------------------------------------------------------

    def add_partitions(
        self, transactional_id: str, producer: Producer, partitions: Collection[TopicPartition], now_ms: int
    ) -> None:
        """AddPartitionsToTxn, AddOffsetsToTxn, and the implicit addition by a write of a client of V2."""
        old = self.transactions.get(transactional_id)
        slot = parse_slot(transactional_id)
        if slot is not None and old is not None:
            self._check_attempt(transactional_id, steps.check_member(old, producer))
            self.jobs[slot[0]].alive_ms = now_ms
        new = steps.add_partitions(old, producer, partitions, now_ms)
        if new is not old:
            self.write([(transactional_id, new)])

    def _check_attempt(self, transactional_id: str, value: Transaction) -> None:
        """Refuse a second transaction under the epoch of an attempt that is over."""
        if not attempts.is_open(value):
            raise ApiError(
                ErrorCode.producer_fenced,
                f"the attempt of {transactional_id!r} is over: it was published, aborted or has timed out; "
                "open another one",
            )

    def verify(
        self, transactional_id: str, producer: Producer, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode]:
        """Whether each partition is part of the producer's transaction now."""
        value = steps.check_member(self.transactions.get(transactional_id), producer)
        ongoing = value.state is TransactionState.ONGOING
        return {
            partition: ErrorCode.none
            if ongoing and partition in value.partitions
            else ErrorCode.transaction_abortable
            for partition in partitions
        }

    def under_way(self) -> dict[int, frozenset[TopicPartition]]:
        """The partitions of every transaction that is not over, by its producer's id."""
        return {
            value.producer_id: value.partitions for value in self.transactions.values() if not value.is_idle
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
        """EndTxn; gives the producer's id and epoch from now on.

        Raises ``ProducerIdNeeded`` if it needs a ``fresh_id`` and has none.
        """
        old = self.transactions.get(transactional_id)
        new = steps.end(
            old, producer, commit=commit, client_version=client_version, fresh_id=fresh_id, now_ms=now_ms
        )
        if new is not old:
            self.write([(transactional_id, new)])
        return new.producer

    def complete(self, decided: Mapping[str, Transaction], now_ms: int) -> None:
        """Complete decisions that were made in one append: every partition has its marker."""
        done: list[StoredRecord] = []
        for transactional_id, prepared in decided.items():
            assert self.transactions.get(transactional_id) == prepared, transactional_id
            done.append((transactional_id, steps.complete(prepared, now_ms)))
        self.write(done)

    def prepared(self) -> list[dict[str, Transaction]]:
        """Decisions that have not reached all partitions, grouped by job."""
        by_job: dict[str, dict[str, Transaction]] = {}
        for name, value in self.transactions.items():
            if value.is_prepared:
                by_job.setdefault(attempts.routing_key(name), {})[name] = value
        return list(by_job.values())

    # -- time ------------------------------------------------------------------------------------------

    def next_deadline_ms(self, transactional_id: str) -> int | None:
        """When the id's transaction times out; None if it does not.

        An attempt times out with its job: what early tasks wrote stays while later tasks are at work.
        """
        value = self.transactions.get(transactional_id)
        if value is None:
            return None
        if attempts.is_open(value):
            slot = parse_slot(transactional_id)
            assert slot is not None, transactional_id
            return self.jobs[slot[0]].alive_ms + value.timeout_ms
        if value.state is not TransactionState.ONGOING:
            return None
        return max(value.started_ms, self._loaded_ms) + value.timeout_ms

    def tick(self, transactional_id: str, now_ms: int) -> list[str]:
        """Abort a transaction that has timed out; gives the ids that were aborted.

        With an attempt of a job, others of the job that have timed out are aborted.
        """
        if not self._is_late(transactional_id, now_ms):
            return []
        slot = parse_slot(transactional_id)
        late: Iterable[str] = [transactional_id]
        if slot is not None:
            names = (slot_id(slot[0], number) for number in sorted(self.jobs[slot[0]].open))
            late = (name for name in names if self._is_late(name, now_ms))
        # As many as fit one turn. The others have deadlines of their own, which have passed as well.
        some = next(chunks((name, self._aborted(name, now_ms)) for name in late))
        self.write(some)
        return [name for name, _ in some]

    def _is_late(self, transactional_id: str, now_ms: int) -> bool:
        deadline_ms = self.next_deadline_ms(transactional_id)
        return deadline_ms is not None and now_ms >= deadline_ms

    def _aborted(self, transactional_id: str, now_ms: int) -> Transaction:
        value = self.transactions[transactional_id]
        step = attempts.abort if attempts.is_open(value) else steps.abort_and_fence
        return step(value, now_ms)

    def expire(self, now_ms: int) -> Iterator[None]:
        """Forget ids that nobody has used for long, and publications of jobs that ended long ago.

        Yields between the steps.
        """
        for some in in_chunks(tuple(self.transactions), _EXPIRED_PER_STEP):
            names = (name for name in some if self._is_unused(name, now_ms - self.settings.expiration_ms))
            yield from self._forget(names)
        oldest_ms = now_ms - self.settings.publication_retention_ms
        for some in in_chunks(tuple(self.published), _EXPIRED_PER_STEP):
            jobs = (job_key(job) for job in some if self._is_over(job, oldest_ms))
            yield from self._forget(jobs)

    def _forget(self, names: Iterable[str]) -> Iterator[None]:
        for chunk in chunks([(name, None) for name in names]):
            self.write(chunk)
            yield
        yield

    def _is_unused(self, transactional_id: str, oldest_ms: int) -> bool:
        value = self.transactions.get(transactional_id)
        if value is None or not value.is_idle or attempts.is_open(value):
            return False
        return value.updated_ms <= oldest_ms

    def _is_over(self, job: str, oldest_ms: int) -> bool:
        publication, known = self.published.get(job), self.jobs.get(job)
        is_worked_on = known is not None and (known.open or known.busy)
        return publication is not None and publication.published_ms <= oldest_ms and not is_worked_on

    # -- looking ---------------------------------------------------------------------------------------

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


def listing(
    transactions: Iterable[tuple[str, Transaction]],
    states: Collection[TransactionState] | None,
    producer_ids: Collection[int],
    longer_than_ms: int,
    now_ms: int,
) -> Iterator[TransactionListing]:
    """ListTransactions. ``states`` None and an empty or negative filter let everything through."""
    for name, value in transactions:
        if (
            (states is None or value.state in states)
            and (not producer_ids or value.producer_id in producer_ids)
            and (longer_than_ms < 0 or now_ms - value.started_ms > longer_than_ms)
        ):
            yield TransactionListing(name, value.producer_id, value.state.label)


def parse_states(names: Collection[str]) -> tuple[frozenset[TransactionState] | None, tuple[str, ...]]:
    """Split names into (states to let through, unknown names); None without any names.

    >>> parse_states(["Ongoing", "Lost"])
    (frozenset({<TransactionState.ONGOING: 1>}), ('Lost',))
    """
    if not names:
        return None, ()
    by_label = {state.label: state for state in TransactionState}
    known = frozenset(by_label[name] for name in names if name in by_label)
    return known, tuple(name for name in names if name not in by_label)
