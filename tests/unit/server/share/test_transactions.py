"""Records that a transaction accepts, and records that become dead letters, on the product's own assembly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.broker_topics import create, leader
from support.share_world import ACCEPT, GROUP, REJECT, RELEASE, Member, ShareWorld
from support.table_world import ManualClock
from tidemill.errors import ApiError, ErrorCode
from tidemill.records.record import Record, build_batch, read_records
from tidemill.server.broker import Broker
from tidemill.server.coordinators.internal_producer import InternalProducer
from tidemill.server.coordinators.persister import Transaction
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.share.letters import read_letter
from tidemill.share.partition.values import Acknowledgement
from tidemill.transactions.messages import Producer

MakeBroker = Callable[..., Awaitable[Broker]]
LOCK_MS = 100
TRANSACTIONAL = 0x10


class World(ShareWorld):
    """A share group whose state the node keeps, and a producer with the transactional id ``x``."""

    producer: Producer

    @property
    def transaction(self) -> tuple[str, int, int]:
        return "x", *self.producer

    async def start_producer(self) -> None:
        await self.broker.coordinators.ensure_topic(TRANSACTIONS)
        self.producer = (await self.broker.transactions.init_producer_id("x", 60_000)).producer

    async def end(self, *, commit: bool) -> None:
        ended = await self.broker.transactions.end("x", self.producer, commit=commit, new_epoch=False)
        assert ended.error is ErrorCode.none

    async def settled(self) -> None:
        """Wait until no transaction holds records."""
        async with asyncio.timeout(120):
            while self.led().machine.has_pending:  # noqa: ASYNC110 - the state itself
                await asyncio.sleep(0.01)

    async def started_after(self, member: Member, offset: int) -> None:
        """Wait until the start is at an offset, while a member asks for records and gets none."""
        async with asyncio.timeout(120):
            while (await self.persister.read_summary(self.key(), -1)).start_offset < offset:
                assert (await member.fetch()).acquired == []

    async def started_at(self, offset: int) -> None:
        """Wait until the start of the share partition is stored at an offset."""
        async with asyncio.timeout(120):
            while (await self.persister.read_summary(self.key(), -1)).start_offset < offset:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
async def share(make_broker: MakeBroker, clock: ManualClock) -> World:
    world = World(await make_broker(clock_ms=clock), stored=True)
    world.configure(share_record_lock_duration_ms=LOCK_MS)
    await world.begin()
    await world.start_producer()
    return world


async def test_a_commit_finishes_the_records(share: World) -> None:
    await share.write("a", "b", "c")
    member = share.member("m1")
    await member.fetch()
    assert await member.settle(0, 1, ACCEPT, transaction=share.transaction) == 0
    assert share.led().machine.acquired_count == 3, "two of them for the transaction"
    assert await member.acknowledge((2, 2, [ACCEPT])) == 0
    assert (await share.persister.read_summary(share.key(), -1)).start_offset == 0
    await share.end(commit=True)
    await share.settled()
    await share.started_at(3)
    assert share.led().machine.totals.accepted == 3
    assert (await member.fetch()).acquired == []


async def test_an_abort_gives_the_records_out_again(share: World) -> None:
    await share.write("a", "b")
    member, other = share.member("m1"), share.member("m2")
    await member.fetch()
    await member.settle(0, 1, ACCEPT, transaction=share.transaction)
    await share.end(commit=False)
    await share.settled()
    assert (await other.fetch()).acquired == [(0, 1, 2)]


@pytest.mark.parametrize("how", ["time", "session", "leader"])
async def test_neither_time_nor_a_closed_session_nor_another_leader_ends_the_hold(
    share: World, clock: ManualClock, how: str
) -> None:
    await share.write("a")
    member, other = share.member("m1"), share.member("m2")
    await member.fetch()
    await other.fetch()
    assert await member.settle(0, 0, ACCEPT, transaction=share.transaction) == 0
    if how == "time":
        clock.advance(10 * LOCK_MS)
    elif how == "session":
        await member.close()
    else:
        share.led().end(ApiError(ErrorCode.not_leader_or_follower, "another node leads"))
    for _ in range(5):
        assert (await other.fetch()).acquired == []
        await asyncio.sleep(0.02)
    await share.end(commit=True)
    await share.settled()
    await share.started_at(1)
    assert (await other.fetch()).acquired == []


async def test_a_transaction_that_aborts_after_a_failover_gives_the_records_out_again(share: World) -> None:
    await share.write("a")
    member, other = share.member("m1"), share.member("m2")
    await member.fetch()
    await member.settle(0, 0, ACCEPT, transaction=share.transaction)
    share.led().end(ApiError(ErrorCode.not_leader_or_follower, "another node leads"))
    await other.fetch()
    await share.end(commit=False)
    await share.settled()
    assert (await other.fetch()).acquired == [(0, 0, 2)]


async def test_a_transaction_that_has_to_wait_for_the_one_before_leaves_the_records_with_the_member(
    share: World, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    await share.write("a")
    member, other = share.member("m1"), share.member("m2")
    await member.fetch()

    async def busy(*_: Any, **__: Any) -> ErrorCode:
        return ErrorCode.concurrent_transactions

    with monkeypatch.context() as patch:
        patch.setattr(share.broker.transactions, "add_partitions", busy)
        code = await member.settle(0, 0, ACCEPT, transaction=share.transaction)
    assert code == ErrorCode.concurrent_transactions
    assert not share.led().machine.has_pending
    assert await member.settle(0, 0, ACCEPT, transaction=share.transaction) == 0
    await share.end(commit=True)
    await share.started_at(1)
    assert (await other.fetch()).acquired == []


async def test_a_fenced_producer_accepts_nothing_and_the_lock_goes_on(
    share: World, clock: ManualClock
) -> None:
    await share.write("a")
    member, other = share.member("m1"), share.member("m2")
    await member.fetch()
    await other.fetch()
    old = share.transaction
    await share.start_producer()
    code = await member.settle(0, 0, ACCEPT, transaction=old)
    assert code in (ErrorCode.producer_fenced, ErrorCode.invalid_producer_epoch)
    assert (await other.fetch()).acquired == []
    clock.advance(LOCK_MS)
    assert (await other.fetch()).acquired == [(0, 0, 2)]


@pytest.mark.parametrize("kind", [RELEASE, REJECT])
async def test_in_a_transaction_records_are_accepted_and_nothing_else(share: World, kind: int) -> None:
    await share.write("a")
    member = share.member("m1")
    await member.fetch()
    assert await member.settle(0, 0, kind, transaction=share.transaction) == ErrorCode.invalid_request
    assert await member.settle(0, 0, ACCEPT, transaction=(None, 5, 0)) == ErrorCode.invalid_request
    member.epoch -= 1  # It was refused before its session was looked at.
    assert await member.acknowledge((0, 0, [ACCEPT])) == 0


async def test_records_of_others_are_not_accepted(share: World) -> None:
    await share.write("a")
    one, other = share.member("m1"), share.member("m2")
    await one.fetch()
    await other.fetch()
    assert await other.settle(0, 0, ACCEPT, transaction=share.transaction) == ErrorCode.invalid_record_state
    assert await one.settle(0, 0, ACCEPT, transaction=share.transaction) == 0
    assert await one.settle(0, 0, ACCEPT, transaction=share.transaction) == ErrorCode.invalid_record_state


@pytest.mark.parametrize("was_written", [True, False])
async def test_after_an_outcome_that_nobody_knows_the_state_tells(
    share: World, monkeypatch: pytest.MonkeyPatch, was_written: bool
) -> None:
    await share.write("a")
    member, other = share.member("m1"), share.member("m2")
    await member.fetch()
    await other.fetch()
    write = share.broker.persister.write_in_transaction

    async def lost(*arguments: Any) -> None:
        if was_written:
            await write(*arguments)
        raise ApiError(ErrorCode.request_timed_out, "no answer came")

    monkeypatch.setattr(share.broker.persister, "write_in_transaction", lost)
    code = await member.settle(0, 0, ACCEPT, transaction=share.transaction)
    assert code == ErrorCode.request_timed_out
    if was_written:
        await asyncio.sleep(0.1)
        assert share.led().machine.has_pending
        await share.end(commit=False)
    await share.settled()
    assert (await other.fetch()).acquired == [(0, 0, 2)]


@pytest.mark.parametrize("commit", [True, False])
async def test_what_is_produced_and_what_is_accepted_counts_together_or_not_at_all(
    share: World, commit: bool
) -> None:
    await create(share.broker, "out", 1)
    await share.write("a")
    member, other = share.member("m1"), share.member("m2")
    await member.fetch()
    await other.fetch()
    batch = build_batch(
        [Record(None, b"made of a")],
        producer_id=share.producer.id,
        producer_epoch=share.producer.epoch,
        base_sequence=0,
        attributes=TRANSACTIONAL,
    )
    data = {"name": "out", "partition_data": [{"index": 0, "records": batch}]}
    answer = await share.ask("Produce", 12, transactional_id="x", acks=-1, timeout=9_000, topic_data=[data])
    assert answer.responses[0].partition_responses[0].error_code is ErrorCode.none
    assert await member.settle(0, 0, ACCEPT, transaction=share.transaction) == 0
    out = leader(share.broker, "out", 0)
    assert out.last_stable_offset == 0
    await share.end(commit=commit)
    await share.settled()
    assert out.last_stable_offset == 2
    aborted = out.aborted_in(out.read(0, 1 << 20, at_least_one=True, committed=True))
    assert bool(aborted) is not commit
    assert (await other.fetch()).acquired == ([] if commit else [(0, 0, 2)])


# --- dead letters


async def test_a_rejected_record_becomes_a_dead_letter_and_is_finished(share: World) -> None:
    await create(share.broker, "dlq.orders", 1)
    share.configure(dead_letter_topic="dlq.orders", share_delivery_count_limit=2)
    await share.write("good", "bad", "tired")
    member = share.member("m1")
    await member.fetch()
    assert await member.acknowledge((0, 0, [ACCEPT])) == 0
    assert await member.settle(1, 1, REJECT, reason="no such customer") == 0
    assert await member.acknowledge((2, 2, [RELEASE])) == 0
    assert (await member.fetch()).acquired == [(2, 2, 2)]
    assert await member.acknowledge((2, 2, [RELEASE])) == 0
    await share.started_at(3)
    partition = leader(share.broker, "dlq.orders", 0)
    letters = []
    for offset in (0, 2):  # Each behind the marker of the one before.
        for record in read_records(partition.read(offset, 1, at_least_one=True)):
            letter = read_letter(record.headers)
            assert letter is not None
            letters.append((record.value, letter.offset, letter.reason, letter.group_id))
    assert partition.last_stable_offset == 4
    assert (b"bad", 1, "no such customer", GROUP) in letters
    assert (b"tired", 2) in [each[:2] for each in letters]
    assert len(letters) == 2


async def test_a_letter_that_an_earlier_leader_left_open_is_decided_by_the_next_at_once(
    share: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader fails between the end of the record and the commit of both."""
    await create(share.broker, "dlq.orders", 1)
    share.configure(dead_letter_topic="dlq.orders")
    await share.write("bad")
    member = share.member("m1")
    await member.fetch()
    never = asyncio.Event()

    async def hang(producer: InternalProducer) -> None:
        await never.wait()

    with monkeypatch.context() as patch:
        patch.setattr(InternalProducer, "commit", hang)
        assert await member.settle(0, 0, REJECT, reason="no such customer") == 0
        async with asyncio.timeout(120):
            while all(  # noqa: ASYNC110 - the state itself
                each.producer_id == -1
                for each in (await share.persister.read_state(share.key(), share.led().leader_epoch)).batches
            ):
                await asyncio.sleep(0.01)
        share.led().end(ApiError(ErrorCode.not_leader_or_follower, "another node leads"))
    await member.fetch()
    await share.started_at(1)
    out = leader(share.broker, "dlq.orders", 0)
    data = out.read(0, 1 << 20, at_least_one=True, committed=True)
    assert len(out.aborted_in(data)) == 1
    assert out.last_stable_offset == out.log_end_offset == 4, "a copy that was aborted, and one that counts"


async def test_a_member_that_leaves_while_its_transaction_takes_a_record_does_not_give_it_to_others(
    share: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else has a session, so the share partition would end, and the next one read the old state."""
    await share.write("a")
    member, other = share.member("m1"), share.member("m2")
    await member.fetch()
    begun, may_go_on = asyncio.Event(), asyncio.Event()
    write = share.broker.persister.write_in_transaction

    async def slow(*args: Any) -> None:
        begun.set()
        await may_go_on.wait()
        await write(*args)

    monkeypatch.setattr(share.broker.persister, "write_in_transaction", slow)
    settling = asyncio.ensure_future(member.settle(0, 0, ACCEPT, transaction=share.transaction))
    await begun.wait()
    await member.close()
    await share.settle()
    assert (await other.fetch()).acquired == [], "the transaction is about to have it"
    may_go_on.set()
    assert await settling == 0
    await other.close()
    await share.settle()
    assert not share.broker.share.of_group(GROUP), "nobody uses it, and the state has everything"
    await share.end(commit=True)
    await share.started_after(member=share.member("m3"), offset=1)


async def test_a_request_that_is_given_up_while_a_transaction_takes_a_record_does_not_hold_it_for_ever(
    share: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await share.write("a")
    member, other = share.member("m1"), share.member("m2")
    await member.fetch()
    await other.fetch()
    begun = asyncio.Event()

    async def endless(*args: Any) -> None:
        begun.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(share.broker.persister, "write_in_transaction", endless)
    accepting = asyncio.ensure_future(
        share.led().accept_in_transaction(
            "m1", [Acknowledgement(0, 0, [ACCEPT])], Transaction(*share.transaction)
        )
    )
    await begun.wait()
    accepting.cancel()
    await asyncio.wait({accepting})
    await share.settled()
    assert (await other.fetch()).acquired == [(0, 0, 2)]
