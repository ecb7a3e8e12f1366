"""Attempts and their publication through the wire format, on real partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from tidemill.control.commands import CreateTopic
from tidemill.errors import ErrorCode
from tidemill.records.batch import parse_header
from tidemill.records.record import Record, build_batch, read_records
from tidemill.server.broker import Broker
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.wire.jobs import AttemptId

Ask = Callable[..., Awaitable[Any]]
NONE = ErrorCode.none
TRANSACTIONAL = 0x10


class Jobs:
    """A broker with a topic of two partitions, and short ways to ask it about jobs."""

    def __init__(self, broker: Broker, ask: Ask) -> None:
        self.broker = broker
        self._ask = ask

    async def ask(self, api: str, **body: Any) -> Any:
        return await self._ask(self.broker, api, 0, **body)

    async def kafka(self, api: str, version: int, **body: Any) -> Any:
        return await self._ask(self.broker, api, version, **body)

    async def open(self, batch: int, job: str = "j") -> AttemptId:
        answer = await self.ask("OpenAttempt", job=job, batch=batch, timeout_ms=60_000)
        assert (answer.error_code, answer.already_published) == (NONE, False), answer.error_message
        return AttemptId(answer.transactional_id, answer.producer_id, answer.producer_epoch)

    async def add(self, attempt: AttemptId, *partitions: int) -> ErrorCode:
        transaction = {**attempt._asdict(), "topics": [{"name": "t", "partitions": partitions}]}
        answer = await self.kafka("AddPartitionsToTxn", 4, transactions=[transaction])
        ((topic,),) = (each.topic_results for each in answer.results_by_transaction)
        code: ErrorCode = topic.results_by_partition[0].partition_error_code
        return code

    def write(self, attempt: AttemptId, text: str, partition: int = 0, sequence: int = 0) -> None:
        batch = build_batch(
            [Record(None, text.encode())],
            producer_id=attempt.producer_id,
            producer_epoch=attempt.producer_epoch,
            base_sequence=sequence,
            attributes=TRANSACTIONAL,
        )
        self.broker.find.partition(self.broker.find.topic("t"), partition).append(
            batch, self.broker.clock_ms()
        )

    async def attempt(self, batch: int, text: str, *partitions: int, job: str = "j") -> AttemptId:
        """An attempt that has written ``text`` to these partitions."""
        attempt = await self.open(batch, job)
        assert await self.add(attempt, *(partitions or (0,))) is NONE
        for partition in partitions or (0,):
            self.write(attempt, text, partition)
        return attempt

    async def publish(self, batch: int, *attempts: AttemptId, job: str = "j") -> Any:
        listed = [attempt._asdict() for attempt in attempts]
        return await self.ask("PublishAttempts", job=job, batch=batch, attempts=listed)

    async def published(self, batch: int, *attempts: AttemptId, job: str = "j") -> None:
        answer = await self.publish(batch, *attempts, job=job)
        assert (answer.error_code, answer.already_published) == (NONE, False), answer.error_message

    async def abort(self, batch: int, *attempts: AttemptId, job: str = "j") -> int:
        listed = [attempt._asdict() for attempt in attempts]
        answer = await self.ask("AbortAttempts", job=job, batch=batch, attempts=listed)
        assert answer.error_code == NONE
        count: int = answer.aborted_count
        return count

    async def seen(self, partition: int = 0) -> list[str]:
        """What a reader of committed data sees."""
        place = self.broker.find.partition(self.broker.find.topic("t"), partition)
        await self.broker.flusher.drain([place])
        upper = place.last_stable_offset
        aborted = place.local_log.producers.transactions.aborted_between(0, upper)
        found: list[str] = []
        for batch in place.local_log.read_batches(0, upper):
            header = parse_header(batch)
            left_out = any(
                each.producer_id == header.producer_id
                and each.first_offset <= header.base_offset <= each.last_offset
                for each in aborted
            )
            if not header.is_control and not left_out:
                found += [(record.value or b"").decode() for record in read_records(batch)]
        return found

    async def states(self) -> dict[str, str]:
        answer = await self.kafka("ListTransactions", 0, state_filters=(), producer_id_filters=())
        return {each.transactional_id: each.transaction_state for each in answer.transaction_states}


@pytest.fixture
async def jobs(broker: Broker, ask: Ask) -> Jobs:
    await broker.controller.submit(CreateTopic(name="t", topic_id=uuid4(), partitions=2, replication=1))
    return Jobs(broker, ask)


async def test_published_attempts_are_seen_and_others_are_not(jobs: Jobs) -> None:
    first = await jobs.attempt(0, "first", 0, 1)
    failed = await jobs.attempt(0, "failed", 0)
    second = await jobs.attempt(0, "second", 0)
    assert await jobs.seen() == []
    await jobs.published(0, first, second)
    assert (await jobs.seen(0), await jobs.seen(1)) == (["first", "second"], ["first"])
    assert await jobs.add(failed, 0) is ErrorCode.producer_fenced
    assert set((await jobs.states()).values()) == {"CompleteCommit", "CompleteAbort"}


async def test_a_published_batch_is_recognised(jobs: Jobs) -> None:
    await jobs.published(3, await jobs.attempt(3, "once"))
    left = await jobs.attempt(4, "left")
    for batch in (3, 2):
        answer = await jobs.ask("OpenAttempt", job="j", batch=batch, timeout_ms=60_000)
        assert (answer.error_code, answer.already_published, answer.transactional_id) == (NONE, True, "")
        assert (await jobs.publish(batch)).already_published
    # Attempts of a later batch are none of its business.
    await jobs.published(4, left)
    assert await jobs.seen() == ["once", "left"]


async def test_slots_are_used_again_with_a_new_epoch(jobs: Jobs) -> None:
    attempts: list[Any] = []
    for batch in range(3):
        attempts = [await jobs.attempt(batch, "x") for _ in range(2)]
        await jobs.published(batch, *attempts)
    assert sorted(await jobs.states()) == ["__tidemill_job:j#0", "__tidemill_job:j#1"]
    again = await jobs.open(3)
    assert again.producer_id == attempts[0].producer_id
    assert again.producer_epoch > attempts[0].producer_epoch


async def test_an_attempt_that_wrote_nothing_is_published_too(jobs: Jobs) -> None:
    await jobs.published(0, await jobs.open(0), await jobs.attempt(0, "x"))
    await jobs.published(1)
    assert await jobs.seen() == ["x"]


async def test_an_attempt_that_is_gone_is_named_and_nothing_changes(jobs: Jobs) -> None:
    good, bad = await jobs.attempt(0, "good"), await jobs.attempt(0, "bad")
    assert await jobs.abort(0, bad) == 1
    answer = await jobs.publish(0, good, bad)
    assert answer.error_code == ErrorCode.transaction_abortable
    assert bad.transactional_id in answer.error_message
    assert "aborted" in answer.error_message
    assert good.transactional_id not in answer.error_message
    assert await jobs.seen() == []
    await jobs.published(0, good)
    assert await jobs.seen() == ["good"]


async def test_attempts_are_aborted_by_name_or_all_up_to_a_batch(jobs: Jobs) -> None:
    attempts = [await jobs.attempt(batch, "x") for batch in (0, 0, 1, 2)]
    assert await jobs.abort(0, attempts[0]) == 1
    assert await jobs.abort(0, attempts[0]) == 0, "asking again does no harm"
    assert await jobs.abort(1) == 2
    await jobs.published(2, attempts[3])
    assert await jobs.seen() == ["x"]
    assert await jobs.abort(9, job="unknown") == 0


async def test_attempts_of_another_batch_or_job_cannot_be_published(jobs: Jobs) -> None:
    other, later = await jobs.open(0, "other"), await jobs.open(1)
    assert (await jobs.publish(0, other)).error_code == ErrorCode.invalid_request
    answer = await jobs.publish(0, later)
    assert answer.error_code == ErrorCode.transaction_abortable
    assert "belongs to batch 1" in answer.error_message
    twice = await jobs.publish(1, later, later)
    assert (twice.error_code, "twice" in twice.error_message) == (ErrorCode.invalid_request, True)


@pytest.mark.parametrize("name", ["", "a#b", "a\nb", "x" * 501])
@pytest.mark.parametrize("api", ["OpenAttempt", "PublishAttempts", "AbortAttempts", "KeepJob"])
async def test_a_name_that_no_job_can_have_is_refused_and_creates_nothing(
    jobs: Jobs, api: str, name: str
) -> None:
    body: dict[str, Any] = {"job": name}
    if api == "OpenAttempt":
        body |= {"batch": 0, "timeout_ms": 1_000}
    elif api != "KeepJob":
        body |= {"batch": 0, "attempts": ()}
    assert (await jobs.ask(api, **body)).error_code == ErrorCode.invalid_request
    assert TRANSACTIONS.topic not in jobs.broker.image.topics


async def test_what_makes_no_sense_is_refused(jobs: Jobs) -> None:
    for batch, timeout_ms, code in (
        (-1, 1_000, ErrorCode.invalid_request),
        (0, 0, ErrorCode.invalid_transaction_timeout),
        (0, 900_001, ErrorCode.invalid_transaction_timeout),
    ):
        answer = await jobs.ask("OpenAttempt", job="j", batch=batch, timeout_ms=timeout_ms)
        assert answer.error_code == code
    many = [AttemptId("x", 1, 1)] * 1_001
    answer = await jobs.publish(0, *many)
    assert answer.error_code == ErrorCode.invalid_request
    assert "1000 are the most" in answer.error_message


async def test_clients_neither_start_nor_commit_the_slots_of_jobs(jobs: Jobs) -> None:
    attempt = await jobs.attempt(0, "x")
    who = attempt._asdict()
    answer = await jobs.kafka(
        "InitProducerId", 4, transactional_id=attempt.transactional_id, transaction_timeout=1_000
    )
    assert answer.error_code is ErrorCode.invalid_request
    committed = await jobs.kafka("EndTxn", 4, **who, committed=True)
    assert committed.error_code is ErrorCode.invalid_request
    assert (await jobs.kafka("EndTxn", 4, **who, committed=False)).error_code is NONE
    assert await jobs.add(attempt, 0) is ErrorCode.producer_fenced
    assert (await jobs.open(0)).transactional_id == attempt.transactional_id


async def test_all_slots_of_a_job_have_one_coordinator(jobs: Jobs) -> None:
    transactions = jobs.broker.transactions
    for job in ("a", "b", "c", "d"):
        places = {transactions.partition_of(f"__tidemill_job:{job}#{slot}") for slot in range(20)}
        assert places == {transactions.partition_of(f"__tidemill_job:{job}")}


async def test_jobs_are_listed(jobs: Jobs) -> None:
    assert (await jobs.ask("ListJobs")).jobs == ()
    await jobs.published(7, await jobs.attempt(7, "x"))
    await jobs.open(0, "other")
    assert (await jobs.ask("KeepJob", job="nobody")).error_code == NONE
    listed = (await jobs.ask("ListJobs")).jobs
    assert [(each.job, each.published_batch, each.open_attempts) for each in listed] == [
        ("j", 7, 0),
        ("other", -1, 1),
    ]
    assert listed[0].published_ms > 0
    assert 0 <= listed[0].idle_ms < 60_000


async def test_a_publication_of_many_attempts_fits_the_log(jobs: Jobs) -> None:
    attempts = await asyncio.gather(*(jobs.attempt(0, f"{number}", 0, 1) for number in range(300)))
    await jobs.published(0, *attempts)
    assert sorted(map(int, await jobs.seen())) == list(range(300))
