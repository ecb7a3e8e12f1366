"""Publications: the attempts of a job's batch become visible together, each batch once. Pure.

- One append holds a publication: the decision to commit every listed attempt, the decision to abort every
  other open attempt of the job up to that batch, and the batch as the last that the job has published. So
  after a crash all of it holds or nothing does.
- A batch that was published before is recognised by the last published batch, and changes nothing any more.
- A publication is checked wholly before anything is appended, also for its size.
- It is worked out as a draft, a large one in a thread, and takes effect if nothing that it rests on has
  changed meanwhile. Aborts need not be atomic: a step aborts only so many.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tidemill.errors import ApiError, ErrorCode
from tidemill.transactions import attempts as steps
from tidemill.transactions.attempts import parse_slot, slot_id
from tidemill.transactions.jobs import NOTHING_PUBLISHED, Job, Publication
from tidemill.transactions.messages import Producer
from tidemill.transactions.records import chunks, encode_record, stored_bytes
from tidemill.wire.jobs import AttemptId, job_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from tidemill.transactions.records import StoredRecord
    from tidemill.transactions.state import TransactionsState
    from tidemill.transactions.transaction import Transaction

__all__ = ("JobListing", "PublicationDraft", "Publications")

_GONE_SHOWN = 5
#: A publication of more attempts, or of more partitions in all of them, is worked out in a thread.
_SMALL_ATTEMPTS = 100
_SMALL_PARTITIONS = 5_000


class JobListing(NamedTuple):
    """One job in a listing. ``published_batch`` and ``published_ms`` are -1 if there is none."""

    job: str
    published_batch: int
    published_ms: int
    open_attempts: int
    idle_ms: int


class PublicationDraft:
    """A publication that is worked out apart from the state, from values that never change."""

    def __init__(
        self,
        state: TransactionsState,
        job: str,
        batch: int,
        committed: Mapping[str, Transaction],
        aborted: Mapping[str, Transaction],
        now_ms: int,
    ) -> None:
        self._state = state
        self._job = job
        self._batch = batch
        self._committed = committed
        self._aborted = aborted
        self._published = state.published.get(job)
        self._now_ms = now_ms
        self._records: list[StoredRecord] = []

    @property
    def is_large(self) -> bool:
        """Whether working it out would take too much of one turn of the event loop."""
        values = (*self._committed.values(), *self._aborted.values())
        partitions = sum(len(value.partitions) for value in values)
        return len(values) > _SMALL_ATTEMPTS or partitions > _SMALL_PARTITIONS

    def run(self, breathe: Callable[[], None] = lambda: None) -> list[tuple[bytes, bytes | None]]:
        """Work it out; gives its records as they go into the log. Any thread may.

        ``breathe`` is called behind every record, for a thread to let others run. Raises
        RECORD_LIST_TOO_LARGE.
        """
        now_ms = self._now_ms
        records: list[StoredRecord] = []
        for changed, change in ((self._committed, steps.commit), (self._aborted, steps.abort)):
            for name, old in changed.items():
                records.append((name, change(old, now_ms)))
                breathe()
        records.append((job_key(self._job), Publication(self._batch, now_ms)))
        self._check_size(records)
        self._records = records
        encoded = []
        for record in records:
            encoded.append(encode_record(*record))
            breathe()
        return encoded

    def _check_size(self, records: Iterable[StoredRecord]) -> None:
        size_bytes = sum(stored_bytes(name, value) for name, value in records)
        most = self._state.settings.publication_bytes_max
        if size_bytes > most:
            raise ApiError(
                ErrorCode.record_list_too_large,
                f"batch {self._batch} of job {self._job!r} is not published: what its attempts wrote to "
                f"takes about {size_bytes} bytes to note, {most} are the most; write it with fewer tasks, or "
                "to fewer partitions at a time",
            )

    def is_current(self) -> bool:
        """Whether every attempt that is concerned, and no other one, is as it was."""
        if self._state.published.get(self._job) != self._published:
            return False
        known = self._state.jobs.get(self._job, Job())
        now_open = dict(_open_up_to(self._state, self._job, known, self._batch))
        if not self._aborted.keys() <= now_open.keys() <= self._committed.keys() | self._aborted.keys():
            return False
        current = self._state.transactions
        concerned = (*self._committed.items(), *self._aborted.items())
        return all(current.get(name) is old for name, old in concerned)

    def adopt(self, batch: bytes) -> None:
        """Append the batch that the log has built of the records, and make them part of the state."""
        self._state.write(self._records, batch)
        known = self._state.jobs.get(self._job)
        if known is not None:
            known.alive_ms = max(known.alive_ms, self._now_ms)


class Publications:
    """Handlers of the requests about the jobs of one shard."""

    def __init__(self, state: TransactionsState) -> None:
        self._state = state

    def open_attempt(
        self, job: str, batch: int, timeout_ms: int, fresh_id: int | None, now_ms: int
    ) -> AttemptId | None:
        """Open an attempt of ``batch``; gives None if the batch was published before.

        Raises ``ProducerIdNeeded`` if it needs a ``fresh_id`` and has none.
        """
        self._check(job, batch)
        self._check_timeout(timeout_ms)
        if batch <= self._published(job).batch:
            return None
        self._check_room(job)
        known = self._state.jobs.get(job, Job())
        number = known.next_slot()
        name = slot_id(job, number)
        old = self._state.transactions.get(name)
        if old is None and known.slot_count >= self._state.settings.slots_max:
            raise ApiError(
                ErrorCode.policy_violation,
                f"job {job!r} has {known.slot_count} attempts that are not over, which is the most; abort "
                "what is not needed any more, or wait until it times out",
            )
        new = steps.reserve(old, batch, timeout_ms, fresh_id, now_ms)
        self._state.write([(name, new)])
        self.keep(job, now_ms)
        return AttemptId(name, *new.producer)

    def draft(
        self, job: str, batch: int, listed: Sequence[AttemptId], now_ms: int
    ) -> PublicationDraft | None:
        """Plan the publication of the listed attempts as ``batch``; None if the batch was published before.

        Other open attempts of the job up to that batch are aborted by it.
        """
        self._check(job, batch)
        steps.check_count(len(listed), self._state.settings.attempts_max)
        known = self._state.jobs.get(job, Job())
        published_batch = self._published(job).batch
        if batch <= published_batch:
            return None
        self._check_room(job)
        if any(self._value(job, number).commits for number in known.busy):
            raise ApiError(
                ErrorCode.concurrent_transactions,
                f"batch {published_batch} of job {job!r} is still being published; try again in a moment",
            )
        committed = self._check_listed(job, batch, listed)
        opened = _open_up_to(self._state, job, known, batch)
        aborted = {name: value for name, value in opened if name not in committed}
        return PublicationDraft(self._state, job, batch, committed, aborted, now_ms)

    def check_abort(self, job: str, batch: int, listed: Sequence[AttemptId]) -> None:
        """Raise ``ApiError`` for what cannot be aborted, whatever the job has."""
        self._check(job, batch)
        steps.check_count(len(listed), self._state.settings.attempts_max)

    def abort(self, job: str, listed: Sequence[AttemptId], now_ms: int) -> list[str]:
        """Abort the first of the listed attempts, as many as fit one turn; gives the slots of those.

        An attempt that is over already is passed over: asking again does no harm. What is listed must be
        asked for again until nothing is given.
        """
        # A dict, because an attempt may be listed twice.
        slots: dict[str, Transaction] = {}
        for attempt in listed:
            value = self._state.transactions.get(attempt.transactional_id)
            slot = parse_slot(attempt.transactional_id)
            ours = slot is not None and slot[0] == job and value is not None and steps.is_open(value)
            if (
                ours
                and value is not None
                and value.producer == Producer(attempt.producer_id, attempt.producer_epoch)
            ):
                slots[attempt.transactional_id] = value
        return self._abort_some(slots, now_ms)

    def abort_left(self, job: str, batch: int, now_ms: int) -> list[str]:
        """Abort open attempts up to ``batch``, as many as fit one turn; gives the slots of those."""
        known = self._state.jobs.get(job)
        slots = () if known is None else _open_up_to(self._state, job, known, batch)
        return self._abort_some(dict(slots), now_ms)

    def keep(self, job: str, now_ms: int) -> None:
        """Note that the job is alive. Does nothing for a job that is not known."""
        known = self._state.jobs.get(job)
        if known is not None:
            known.alive_ms = now_ms

    def names(self) -> list[str]:
        """The jobs that are open or have published something."""
        return [*self._state.jobs, *(name for name in self._state.published if name not in self._state.jobs)]

    def listing(self, names: Iterable[str], now_ms: int) -> Iterator[JobListing]:
        """What is known of each job, without those that are not known any more."""
        for name in names:
            if name not in self._state.jobs and name not in self._state.published:
                continue
            published, known = self._published(name), self._state.jobs.get(name)
            alive_ms = published.published_ms if known is None else known.alive_ms
            open_attempts = 0 if known is None else len(known.open)
            idle_ms = max(0, now_ms - alive_ms)
            yield JobListing(name, published.batch, published.published_ms, open_attempts, idle_ms)

    def _published(self, job: str) -> Publication:
        return self._state.published.get(job, NOTHING_PUBLISHED)

    def unfinished(self, job: str) -> list[str]:
        """The slots of a job whose decisions have not reached all partitions yet."""
        known = self._state.jobs.get(job)
        return [] if known is None else [slot_id(job, number) for number in sorted(known.busy)]

    # -- checks ----------------------------------------------------------------------------------------

    def _check(self, job: str, batch: int) -> None:
        steps.check_job(job)
        if batch < 0:
            raise ApiError(ErrorCode.invalid_request, f"job {job!r}: batches count from 0, not {batch}")

    def _check_room(self, job: str) -> None:
        """Raise POLICY_VIOLATION if this would be one job too many."""
        jobs, published, most = self._state.jobs, self._state.published, self._state.settings.jobs_max
        if job in jobs or job in published or len(jobs) + len(published) < most:
            return
        if len(self.names()) >= most:
            raise ApiError(
                ErrorCode.policy_violation,
                f"there is no room for job {job!r}: the partition of the log of transactions it goes to has "
                f"{most} jobs, which is the most; use the names of jobs again, or lower "
                "job_publication_retention_ms",
            )

    def _check_timeout(self, timeout_ms: int) -> None:
        longest_ms = self._state.settings.max_timeout_ms
        if not 0 < timeout_ms <= longest_ms:
            raise ApiError(
                ErrorCode.invalid_transaction_timeout,
                f"a timeout of {timeout_ms} ms is not within 1 … {longest_ms}; it counts from the job's last "
                "sign of life",
            )

    def _check_listed(self, job: str, batch: int, listed: Sequence[AttemptId]) -> dict[str, Transaction]:
        """The transactions of the listed attempts, all of which can be published."""
        twice = steps.repeated(listed)
        if twice is not None:
            raise ApiError(ErrorCode.invalid_request, f"attempt {_named(twice)} is listed twice")
        slots: dict[str, Transaction] = {}
        gone: list[str] = []
        for attempt in listed:
            slot = parse_slot(attempt.transactional_id)
            if slot is None or slot[0] != job:
                raise ApiError(ErrorCode.invalid_request, f"attempt {_named(attempt)} is none of job {job!r}")
            value = self._state.transactions.get(attempt.transactional_id)
            why = steps.why_gone(value, attempt, batch)
            if value is None or why is not None:
                gone.append(f"{_named(attempt)}: {why}")
            else:
                slots[attempt.transactional_id] = value
        if gone:
            more = f", and {len(gone) - _GONE_SHOWN} more" if len(gone) > _GONE_SHOWN else ""
            raise ApiError(
                ErrorCode.transaction_abortable,
                f"batch {batch} of job {job!r} is not published, {len(gone)} of {len(listed)} attempts are "
                f"gone; run the batch again. {'; '.join(gone[:_GONE_SHOWN])}{more}",
            )
        return slots

    def _value(self, job: str, number: int) -> Transaction:
        return self._state.transactions[slot_id(job, number)]

    def _abort_some(self, slots: Mapping[str, Transaction], now_ms: int) -> list[str]:
        some = next(chunks((name, steps.abort(value, now_ms)) for name, value in slots.items()), [])
        if some:
            self._state.write(some)
        return [name for name, _ in some]


def _open_up_to(
    state: TransactionsState, job: str, known: Job, batch: int
) -> Iterator[tuple[str, Transaction]]:
    """The open attempts of a job that belong to ``batch`` or an earlier one: their slots and values."""
    for number in sorted(known.open):
        name = slot_id(job, number)
        value = state.transactions[name]
        if value.batch <= batch:
            yield name, value


def _named(attempt: AttemptId) -> str:
    return f"{attempt.transactional_id!r} (producer {attempt.producer_id} epoch {attempt.producer_epoch})"
