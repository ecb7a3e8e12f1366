"""ShareFetch and ShareAcknowledge, through the wire format, on the product's own assembly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

from support.broker_topics import leader
from support.share_world import ACCEPT, GAP, GROUP, REJECT, RELEASE, RENEW, RETURN, Member, ShareWorld
from support.table_world import ManualClock
from tidemill.coordination.share_state import DeliveryState
from tidemill.errors import ApiError, ErrorCode
from tidemill.records.compression import GZIP, NONE, ZSTD
from tidemill.records.record import Record, build_batch
from tidemill.replication.coordinator_log import wait_committed
from tidemill.replication.rules.assignment import PartitionAssignment
from tidemill.server.broker import Broker
from tidemill.server.coordinators.persister import Transaction
from tidemill.server.share.led_partition import LedSharePartition
from tidemill.server.share.metrics import SHARE_METRICS
from tidemill.server.share.reading import look_at
from tidemill.share.partition.values import Acknowledgement, SeenRecord

LONG_MS = 60_000
_TRANSACTIONAL = 0x10


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a state."""
    while not condition():  # noqa: ASYNC110 - the state itself
        await asyncio.sleep(0.001)


@pytest.fixture
async def share(make_broker: Callable[..., Awaitable[Broker]], clock: ManualClock) -> ShareWorld:
    world = ShareWorld(await make_broker(clock_ms=clock, group_share_max_share_sessions=3))
    await world.begin()
    return world


async def test_members_get_different_records(share: ShareWorld) -> None:
    await share.write("a", "b", "c")
    await share.write("d", "e")
    one, other = share.member("m1"), share.member("m2")
    first, second = await asyncio.gather(one.fetch(max_records=1), other.fetch())
    assert (first.values, second.values) == (["a", "b", "c"], ["d", "e"])
    assert first.acquired == [(0, 2, 1)]
    assert first.leader == (share.broker.node_id, share.led().leader_epoch)


@pytest.mark.parametrize("version", [1, 2])
async def test_accepted_records_are_done_when_the_answer_comes(share: ShareWorld, version: int) -> None:
    await share.write("a", "b", "c")
    member = share.member("m1")
    await member.fetch(version=version)
    assert await member.acknowledge((0, 2, [ACCEPT]), version=version) == 0
    assert share.persister.states[share.key()].start_offset == 3
    assert (await member.fetch(version=version)).acquired == []


async def test_acknowledgements_come_with_a_fetch(share: ShareWorld) -> None:
    await share.write("a", "b")
    member = share.member("m1")
    await member.fetch()
    fetched = await member.fetch(acknowledge=[(0, 0, 1, [ACCEPT, RELEASE])])
    assert fetched.acknowledge_error == 0
    again = fetched if fetched.acquired else await member.fetch()
    assert (again.acquired, again.values) == ([(1, 1, 2)], ["b"])


async def test_a_fetch_waits_for_records_without_looking_in_between(share: ShareWorld) -> None:
    member = share.member("m1")
    waiting = asyncio.ensure_future(member.fetch(max_wait=LONG_MS))
    await share.settle()
    assert not waiting.done()
    await share.write("a")
    assert (await waiting).values == ["a"]


async def test_a_fetch_that_waits_looks_only_when_something_happens(
    make_broker: Callable[..., Awaitable[Broker]], clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = []
    original = LedSharePartition.acquire

    def counted(self: LedSharePartition, *arguments: Any, **named: Any) -> Any:
        looks.append(self)
        return original(self, *arguments, **named)

    monkeypatch.setattr(LedSharePartition, "acquire", counted)
    share = ShareWorld(await make_broker(clock_ms=clock))
    await share.begin(partitions=3)
    member = share.member("m1")
    waiting = asyncio.ensure_future(member.ask_fetch(range(3), max_wait=LONG_MS))
    await share.settle()
    looks.clear()
    await share.settle()
    assert looks == []
    await share.write("b", index=1)
    assert member.part(await waiting, 1).values == ["b"]
    assert len(looks) <= 6


async def test_a_fetch_that_finds_nothing_ends_with_its_time(share: ShareWorld) -> None:
    member = share.member("m1")
    for max_wait in (0, 1, 30):
        assert (await asyncio.wait_for(member.fetch(max_wait=max_wait), 120)).acquired == []


async def test_a_fetch_for_no_records_does_not_wait(share: ShareWorld) -> None:
    await share.write("a")
    assert (await share.member("m1").fetch(max_records=0, max_wait=LONG_MS)).acquired == []


async def test_a_waiting_fetch_is_woken_by_a_release(share: ShareWorld) -> None:
    await share.write("a")
    one, other = share.member("m1"), share.member("m2")
    await one.fetch()
    waiting = asyncio.ensure_future(other.fetch(max_wait=LONG_MS))
    await share.settle()
    assert not waiting.done()
    await one.acknowledge((0, 0, [RELEASE]))
    assert (await waiting).acquired == [(0, 0, 2)]


async def test_a_waiting_fetch_is_woken_by_the_end_of_a_lock(share: ShareWorld, clock: ManualClock) -> None:
    share.configure(share_record_lock_duration_ms=20)
    await share.write("a")
    await share.member("m1").fetch()
    waiting = asyncio.ensure_future(share.member("m2").fetch(max_wait=LONG_MS))
    await share.settle()
    clock.advance(20)
    assert (await asyncio.wait_for(waiting, 120)).acquired == [(0, 0, 2)]


async def test_the_delivery_limit_ends_a_record(share: ShareWorld) -> None:
    share.configure(share_delivery_count_limit=2)
    await share.write("poison")
    member = share.member("m1")
    for count in (1, 2):
        assert (await member.fetch()).acquired == [(0, 0, count)]
        await member.acknowledge((0, 0, [RELEASE]))
    assert (await member.fetch()).acquired == []
    assert share.led().machine.totals.dead == 1


async def test_last_deliveries_shrink(share: ShareWorld) -> None:
    await share.write(*map(str, range(100)))
    member = share.member("m1")
    sizes = []
    for _ in range(5):
        offsets = (await member.fetch()).offsets
        sizes.append(len(offsets))
        await member.acknowledge((offsets[0], offsets[-1], [RELEASE]))
    assert sizes == [100, 100, 100, 50, 1]


async def test_a_closed_session_gives_back_records_with_their_count(share: ShareWorld) -> None:
    await share.write("a")
    one, other = share.member("m1"), share.member("m2")
    await one.fetch()
    await other.fetch()
    await one.close()
    assert (await other.fetch()).acquired == [(0, 0, 2)]
    assert await one.acknowledge((0, 0, [ACCEPT]), epoch=2) == ErrorCode.share_session_not_found


async def test_a_dropped_connection_gives_back_records(share: ShareWorld) -> None:
    await share.write("a")
    one, other = share.member("m1"), share.member("m2")
    await one.fetch()
    await other.fetch()
    share.broker.share.connection_closed(one.connection)
    assert (await other.fetch()).acquired == [(0, 0, 2)]


async def test_a_dropped_connection_of_many_members_looks_at_the_records_in_flight_once(
    share: ShareWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await share.write("a", "b")
    members = [Member(share, f"m{number}", GROUP, 77) for number in range(3)]
    for member in members:
        await member.fetch(max_records=1)
    released: list[set[str]] = []
    release = LedSharePartition.release_members

    def counted(led: LedSharePartition, gone: set[str]) -> None:
        released.append(gone)
        release(led, gone)

    monkeypatch.setattr(LedSharePartition, "release_members", counted)
    share.broker.share.connection_closed(77)
    assert released == [{"m0", "m1", "m2"}]
    assert (await share.member("other").fetch()).values == ["a", "b"]


async def test_what_others_hold_or_held_cannot_be_acknowledged(share: ShareWorld, clock: ManualClock) -> None:
    await share.write("a", "b")
    one, other = share.member("m1"), share.member("m2")
    await one.fetch(max_records=1, share_acquire_mode=1)
    await other.fetch()
    assert await one.acknowledge((0, 1, [ACCEPT])) == ErrorCode.invalid_record_state
    assert share.led().machine.acquired_count == 2
    clock.advance(30_000)
    assert (await other.fetch()).acquired == [(0, 1, 2)]
    assert await one.acknowledge((0, 0, [ACCEPT])) == ErrorCode.invalid_record_state
    assert await other.acknowledge((0, 1, [ACCEPT])) == 0


@pytest.mark.parametrize(
    "batches",
    [
        [(1, 0, [ACCEPT])],
        [(0, 1, [])],
        [(0, 2, [ACCEPT, ACCEPT])],
        [(0, 0, [5])],
        [(0, 0, [-1])],
        [(1, 1, [ACCEPT]), (0, 0, [ACCEPT])],
        [(0, 1, [ACCEPT]), (1, 2, [ACCEPT])],
        [(0, 0, [RENEW])],
    ],
)
async def test_malformed_batches_are_refused(share: ShareWorld, batches: list[Any]) -> None:
    await share.write("a", "b", "c")
    member = share.member("m1")
    await member.fetch()
    assert await member.acknowledge(*batches) == ErrorCode.invalid_request
    assert await member.acknowledge((0, 2, [ACCEPT])) == 0


async def test_locks_are_renewed(share: ShareWorld, clock: ManualClock) -> None:
    await share.write("a", "b")
    one, other = share.member("m1"), share.member("m2")
    await one.fetch()
    clock.advance(20_000)
    writes = share.persister.write_count
    assert await one.acknowledge((0, 0, [RENEW]), is_renew_ack=True) == 0
    assert share.persister.write_count == writes
    clock.advance(15_000)
    assert (await other.fetch()).acquired == [(1, 1, 2)]
    limits = {"max_wait": 0, "min_bytes": 0, "max_bytes": 0, "max_records": 0}
    renewed = await one.fetch(acknowledge=[(0, 0, 0, [RENEW])], is_renew_ack=True, **limits)
    assert (renewed.acknowledge_error, renewed.acquired) == (0, [])
    refused = await one.ask_fetch(acknowledge=[(0, 0, 0, [RENEW])], is_renew_ack=True)
    assert refused.error_code == ErrorCode.invalid_request
    share.configure(share_renew_acknowledge_enable=False)
    assert await one.acknowledge((0, 0, [RENEW]), is_renew_ack=True, epoch=3) == ErrorCode.invalid_request


async def test_a_failed_write_leaves_the_record_acquired(share: ShareWorld) -> None:
    await share.write("a")
    member = share.member("m1")
    await member.fetch()
    share.persister.write_failures = [ApiError(ErrorCode.policy_violation, "no")]
    assert await member.acknowledge((0, 0, [ACCEPT])) == ErrorCode.policy_violation
    assert share.led().machine.acquired_count == 1
    assert share.persister.states[share.key()].start_offset == 0


@pytest.mark.parametrize("carried_out", [True, False])
async def test_an_unknown_outcome_is_looked_up(share: ShareWorld, carried_out: bool) -> None:
    await share.write("a")
    member = share.member("m1")
    await member.fetch()
    share.persister.write_failures = [ApiError(ErrorCode.request_timed_out, "who knows")]
    share.persister.carry_out = carried_out
    share.persister.read_failures = [ApiError(ErrorCode.coordinator_not_available, "not now")]
    assert await member.acknowledge((0, 0, [ACCEPT])) == ErrorCode.request_timed_out
    share.persister.read_failures = []
    await until(lambda: not share.led().machine.is_unsure)
    assert share.led().machine.acquired_count == (0 if carried_out else 1)
    code = await member.acknowledge((0, 0, [ACCEPT]))
    assert code == 0
    assert share.persister.states[share.key()].start_offset == 1


@pytest.mark.parametrize("code", [ErrorCode.request_timed_out, ErrorCode.unknown_server_error])
async def test_an_unknown_outcome_that_turns_out_well_is_a_success(
    share: ShareWorld, code: ErrorCode
) -> None:
    await share.write("a")
    member = share.member("m1")
    await member.fetch()
    share.persister.write_failures = [ApiError(code, "who knows")]
    share.persister.carry_out = True
    assert await member.acknowledge((0, 0, [ACCEPT])) == 0


async def test_a_state_that_cannot_be_read_is_an_error_and_not_empty(share: ShareWorld) -> None:
    await share.write("a")
    share.persister.read_failures = [ApiError(ErrorCode.coordinator_not_available, "not now")]
    member = share.member("m1")
    assert (await member.fetch(max_wait=LONG_MS)).error == ErrorCode.coordinator_not_available
    assert len(share.broker.share) == 0
    assert (await member.fetch()).values == ["a"]


async def test_a_group_whose_state_was_never_initialized_gets_nothing(share: ShareWorld) -> None:
    fetched = await share.member("m1", "strangers").fetch()
    assert (fetched.error, fetched.acquired) == (ErrorCode.invalid_request, [])


async def test_epochs_of_a_session_are_checked(share: ShareWorld) -> None:
    member = share.member("m1")
    assert (await member.ask_fetch(epoch=1)).error_code == ErrorCode.share_session_not_found
    assert await member.acknowledge((0, 0, [ACCEPT]), epoch=0) == ErrorCode.invalid_share_session_epoch
    assert (await member.ask_fetch(epoch=-1)).error_code == ErrorCode.share_session_not_found
    await member.fetch()
    for epoch in (2, 7):
        assert (await member.ask_fetch(epoch=epoch)).error_code == ErrorCode.invalid_share_session_epoch
    assert (await member.ask_fetch(epoch=1)).error_code == 0
    refused = await member.ask_fetch(epoch=0, acknowledge=[(0, 0, 0, [ACCEPT])])
    assert refused.error_code == ErrorCode.invalid_request
    assert (await member.ask_fetch(epoch=0)).error_code == 0


async def test_there_are_so_many_sessions_at_most(share: ShareWorld) -> None:
    members = [share.member(f"m{number}") for number in range(4)]
    codes = [(await member.ask_fetch()).error_code for member in members]
    assert codes == [0, 0, 0, ErrorCode.share_session_limit_reached]
    await members[0].close()
    assert (await members[3].ask_fetch(epoch=0)).error_code == 0


async def test_forgotten_partitions_are_not_fetched(share: ShareWorld) -> None:
    await share.write("a")
    member = share.member("m1")
    await member.fetch(max_records=0)
    response = await member.ask_fetch((), forget=[0])
    assert member.part(response).acquired == []
    response = await member.ask_fetch((0,))
    assert member.part(response).values == ["a"]


async def test_the_limit_of_locks_is_kept(share: ShareWorld) -> None:
    share.configure(share_partition_max_record_locks=100)
    await share.write(*map(str, range(150)))
    one, other = share.member("m1"), share.member("m2")
    assert len((await one.fetch()).offsets) == 100
    assert (await other.fetch()).acquired == []
    await one.acknowledge((0, 59, [ACCEPT]))
    assert (await other.fetch()).acquired == [(100, 149, 1)]


async def test_a_fetch_that_waits_for_a_lock_is_woken_when_one_is_free(share: ShareWorld) -> None:
    share.configure(share_partition_max_record_locks=100)
    for first in (0, 100):
        await share.write(*map(str, range(first, first + 100)))
    one, other = share.member("m1"), share.member("m2")
    await one.fetch()
    waiting = asyncio.ensure_future(other.fetch(max_wait=LONG_MS))
    await share.settle()
    assert not waiting.done()
    await one.acknowledge((50, 99, [ACCEPT]))
    assert (await asyncio.wait_for(waiting, 120)).acquired == [(100, 149, 1)]


async def test_record_limit_mode_gives_exactly_so_many(share: ShareWorld) -> None:
    await share.write(*map(str, range(10)))
    member = share.member("m1")
    assert (await member.fetch(max_records=3, share_acquire_mode=1)).acquired == [(0, 2, 1)]
    assert (await member.fetch(max_records=3)).acquired == [(3, 9, 1)]


async def _transaction(share: ShareWorld, producer: int, value: str, *, commit: bool) -> None:
    partition = leader(share.broker, "orders")
    partition.begin_transaction(producer, 0)
    await share.append(
        build_batch(
            [Record(None, value.encode())],
            producer_id=producer,
            producer_epoch=0,
            base_sequence=0,
            attributes=_TRANSACTIONAL,
        )
    )
    now_ms = share.broker.clock_ms()
    appended = partition.write_marker(producer, 0, commit=commit, coordinator_epoch=0, now_ms=now_ms)
    await wait_committed(partition, appended.last_offset + 1)


async def test_markers_are_never_shown_and_aborted_records_to_readers_of_committed_ones(
    share: ShareWorld,
) -> None:
    await share.initialize("careful")
    share.configure("careful", share_isolation_level="read_committed")
    await _transaction(share, 1, "aborted", commit=False)
    await _transaction(share, 2, "kept", commit=True)
    await share.write("plain")
    anybody, careful = share.member("m1"), share.member("m1", "careful")
    fetched = await anybody.fetch()
    assert (fetched.offsets, fetched.values) == ([0, 2, 4], ["aborted", "kept", "plain"])
    fetched = await careful.fetch()
    assert (fetched.offsets, fetched.values) == ([2, 4], ["kept", "plain"])
    assert await careful.acknowledge((2, 2, [ACCEPT]), (4, 4, [ACCEPT])) == 0
    assert share.persister.states[share.key("careful")].start_offset == 5


async def test_open_transactions_hold_up_readers_of_committed_records(share: ShareWorld) -> None:
    share.configure(share_isolation_level="read_committed")
    partition = leader(share.broker, "orders")
    partition.begin_transaction(1, 0)
    batch = build_batch(
        [Record(None, b"open")], producer_id=1, producer_epoch=0, base_sequence=0, attributes=_TRANSACTIONAL
    )
    await share.append(batch)
    waiting = asyncio.ensure_future(share.member("m1").fetch(max_wait=LONG_MS))
    await share.settle()
    assert not waiting.done()
    partition.write_marker(1, 0, commit=True, coordinator_epoch=0, now_ms=share.broker.clock_ms())
    assert (await waiting).values == ["open"]


async def test_deleted_records_move_the_start(share: ShareWorld) -> None:
    await share.write("a", "b", "c")
    member = share.member("m1")
    await member.fetch(max_records=2, share_acquire_mode=1)
    deleted = await share.ask(
        "DeleteRecords",
        2,
        topics=[{"name": "orders", "partitions": [{"partition_index": 0, "offset": 2}]}],
        timeout=LONG_MS,
    )
    assert deleted.topics[0].partitions[0].error_code == 0
    assert (await member.fetch()).acquired == [(2, 2, 1)]
    await share.settle()
    assert share.persister.states[share.key()].start_offset == 2
    assert await member.acknowledge((0, 1, [ACCEPT])) == 0


async def test_a_later_leader_or_state_fences_and_the_state_is_read_again(share: ShareWorld) -> None:
    await share.write("a", "b")
    member = share.member("m1")
    await member.fetch()
    share.persister.states[share.key()].leader_epoch = 1_000
    assert await member.acknowledge((0, 0, [ACCEPT])) == ErrorCode.fenced_leader_epoch
    assert len(share.broker.share) == 0
    assert (await member.fetch()).error == ErrorCode.fenced_leader_epoch
    share.persister.states[share.key()].leader_epoch = 0
    await member.fetch()
    await share.initialize(state_epoch=5, start=1)
    assert await member.acknowledge((0, 0, [ACCEPT])) == ErrorCode.fenced_state_epoch
    assert (await member.fetch()).values == ["b"]


async def test_another_leader_gets_everything_and_waiting_fetches_are_told(share: ShareWorld) -> None:
    await share.write("a")
    member = share.member("m1")
    await member.fetch()
    waiting = asyncio.ensure_future(member.fetch(max_wait=LONG_MS))
    await share.settle()
    partition = share.led().partition
    partition.become_follower(partition.leader_epoch + 1)
    fetched = await waiting
    assert fetched.error == ErrorCode.not_leader_or_follower
    assert len(share.broker.share) == 0


async def test_records_come_with_the_epoch_of_the_leader_that_gives_them(share: ShareWorld) -> None:
    """And not with the metadata's, which may be that of the next leader when the answer is written."""
    await share.write("a")
    partition = leader(share.broker, "orders", 0)
    epoch = partition.leader_epoch + 3
    partition.become_leader(PartitionAssignment.alone(share.broker.node_id, epoch))
    fetched = await share.member("m1").fetch()
    assert (fetched.values, fetched.leader) == (["a"], (share.broker.node_id, epoch))


async def test_a_group_without_members_is_read_again(share: ShareWorld) -> None:
    await share.write("a", "b")
    member = share.member("m1")
    await member.fetch()
    await member.acknowledge((0, 1, [ACCEPT]))
    await member.close()
    await share.settle()
    assert len(share.broker.share) == 0
    await share.initialize(state_epoch=1, start=1)
    assert (await share.member("m2").fetch()).values == ["b"]


@pytest.mark.parametrize(
    ("reset", "expected"),
    [("latest", ["c"]), ("earliest", ["a", "b", "c"]), ("by_duration:PT1M", ["b", "c"])],
)
async def test_a_new_group_begins_where_its_config_says(
    share: ShareWorld, clock: ManualClock, reset: str, expected: list[str]
) -> None:
    await share.write("a")
    clock.advance(120_000)
    await share.write("b")
    share.configure("new", share_auto_offset_reset=reset)
    await share.initialize("new", start=-1)
    member = share.member("m1", "new")
    found = await member.fetch()
    # It is stored at once: a later leader must not begin elsewhere.
    assert share.persister.states[share.key("new")].start_offset == 3 - len(expected)
    await share.write("c")
    found_later = await member.fetch()
    assert found.values + found_later.values == expected


async def test_groups_are_independent(share: ShareWorld) -> None:
    await share.write("a")
    await share.initialize("others")
    assert (await share.member("m1").fetch()).values == ["a"]
    assert (await share.member("m1", "others").fetch()).values == ["a"]


async def test_gaps_are_finished(share: ShareWorld) -> None:
    await share.write("a", "b")
    member = share.member("m1")
    await member.fetch()
    await member.acknowledge((0, 1, [GAP, ACCEPT]))
    assert share.persister.states[share.key()].start_offset == 2


async def test_an_unknown_topic_is_told(share: ShareWorld) -> None:
    share.topic_id = type(share.topic_id)(int=5)
    assert (await share.member("m1").fetch()).error == ErrorCode.unknown_topic_id


async def test_records_come_of_all_partitions_in_turn(
    make_broker: Callable[..., Awaitable[Broker]], clock: ManualClock
) -> None:
    share = ShareWorld(await make_broker(clock_ms=clock))
    await share.begin(partitions=2)
    for index in range(2):
        await share.write("a", index=index)
        await share.write("b", index=index)
    member = share.member("m1")
    first = await member.ask_fetch((0, 1), max_records=1)
    second = await member.ask_fetch((), max_records=1)
    assert [member.part(first, index).values for index in range(2)] == [["a"], []]
    assert [member.part(second, index).values for index in range(2)] == [[], ["a"]]


# --- extensions


async def test_a_release_with_a_delay_is_stored(share: ShareWorld, clock: ManualClock) -> None:
    await share.write("a")
    member = share.member("m1")
    await member.fetch()
    assert await member.settle(0, 0, RELEASE, delay_ms=50) == 0
    (batch,) = share.persister.states[share.key()].batches
    assert (batch.state, batch.not_before_ms) == (DeliveryState.AVAILABLE, clock.ms + 50)
    assert (await member.fetch()).acquired == []
    waiting = asyncio.ensure_future(member.fetch(max_wait=LONG_MS))
    await share.settle()
    clock.advance(50)
    assert (await asyncio.wait_for(waiting, 120)).acquired == [(0, 0, 2)]


async def test_a_record_that_nobody_has_looked_at_goes_back_uncounted_and_at_once(share: ShareWorld) -> None:
    share.configure(share_delivery_count_limit=2, retry_backoff_ms=50)
    await share.write("a", "b")
    member = share.member("m1")
    for _ in range(4):
        assert (await member.fetch()).acquired == [(0, 1, 1)]
        assert await member.settle(0, 1, RETURN) == 0
    (batch,) = share.persister.states[share.key()].batches
    assert (batch.state, batch.delivery_count, batch.not_before_ms) == (DeliveryState.AVAILABLE, 0, 0)
    assert share.led().machine.totals.dead == 0


async def test_kafkas_requests_and_older_clients_cannot_return_records(share: ShareWorld) -> None:
    await share.write("a")
    member = share.member("m1")
    await member.fetch()
    assert await member.acknowledge((0, 0, [RETURN])) == ErrorCode.invalid_request
    assert await member.settle(0, 0, RETURN, version=0) == ErrorCode.invalid_request
    assert await member.settle(0, 0, ACCEPT, version=0) == 0


async def test_order_per_key_over_the_wire(share: ShareWorld) -> None:
    share.configure(order="key")
    await share.write_records(*[Record(key, key + b"%d" % n) for n in range(3) for key in (b"x", b"y")])
    one, other = share.member("m1"), share.member("m2")
    assert (await one.fetch()).values == ["x0", "y0"]
    assert (await other.fetch()).values == []
    await one.acknowledge((1, 1, [ACCEPT]))
    assert (await other.fetch()).values == ["y1"]


async def test_large_batches_are_looked_at_in_a_thread(share: ShareWorld) -> None:
    share.configure(order="key", share_partition_max_record_locks=4_000)
    await share.write_records(*[Record(b"%d" % n, b"v") for n in range(3_000)])
    offsets = (await share.member("m1").fetch(max_records=5_000)).offsets
    assert offsets == list(range(3_000))


@pytest.mark.parametrize("codec", [NONE, GZIP, ZSTD])
async def test_what_may_unpack_to_much_is_looked_at_in_a_thread(
    share: ShareWorld, monkeypatch: pytest.MonkeyPatch, codec: int
) -> None:
    in_loop: list[bool] = []

    def look(batches: Iterable[memoryview], max_bytes: int) -> list[SeenRecord]:
        in_loop.append(threading.current_thread() is threading.main_thread())
        return look_at(batches, max_bytes)

    monkeypatch.setattr("tidemill.server.share.led_partition.look_at", look)
    share.configure(order="key")
    await share.write_records(Record(b"key", b"0" * 30_000), codec=codec)
    assert (await share.member("m1").fetch()).offsets == [0]
    assert in_loop == [codec == NONE]


@pytest.mark.parametrize(
    "after",
    [
        pytest.param({"order": "key", "on_dead": "block"}, id="records are looked at anew"),
        pytest.param({}, id="records need not be looked at"),
        pytest.param({"order": "key", "max_waiting_records": 10_000}, id="more records may wait"),
    ],
)
async def test_no_record_is_passed_over_when_configs_change_while_keys_are_looked_at(
    share: ShareWorld, monkeypatch: pytest.MonkeyPatch, after: dict[str, Any]
) -> None:
    before: dict[str, Any] = {"max_waiting_records": 100} if "max_waiting_records" in after else {}
    share.configure(order="key", **before)
    # Every key twice in a row: the second record of each waits.
    await share.write_records(*[Record(b"%d" % (n // 2), b"v") for n in range(1_200)])

    async def change() -> None:
        share.configure(share_partition_max_record_locks=4_000, **after)
        share.broker.share.of_group(GROUP)[0].refresh()

    monkeypatch.setattr("tidemill.server.share.led_partition.give_way", change)
    member, found = share.member("m1"), set[int]()
    while len(found) < 1_200:
        offsets = (await member.fetch(max_records=2_000, max_wait=10_000)).offsets
        assert offsets, f"{len(found)} records came"
        found.update(offsets)
        assert await member.acknowledge(*((offset, offset, [ACCEPT]) for offset in offsets)) == 0


async def test_delivery_time_over_the_wire(share: ShareWorld, clock: ManualClock) -> None:
    share.configure(deliver_at_enable=True)
    later = str(clock.ms + 40).encode()
    await share.write_records(
        Record(None, b"later", headers=(("tidemill-deliver-at", later),)),
        Record(None, b"odd", headers=(("tidemill-deliver-at", b"tomorrow"),)),
        Record(None, b"now"),
    )
    member = share.member("m1")
    assert (await member.fetch()).values == ["odd", "now"]
    waiting = asyncio.ensure_future(member.fetch(max_wait=LONG_MS))
    await share.settle()
    clock.advance(40)
    assert (await asyncio.wait_for(waiting, 120)).values == ["later"]


async def test_all_of_many_delays_that_end_together_are_noticed(
    share: ShareWorld, clock: ManualClock
) -> None:
    share.configure(retry_backoff_ms=5)
    await share.write(*("v" * 1_200))
    member, other = share.member("m1"), share.member("m2")
    await member.fetch(max_records=1_200)
    singly = [(offset, offset, [RELEASE]) for offset in range(0, 1_200, 2)]
    assert await member.acknowledge(*singly) == 0
    clock.advance(5)
    found: list[int] = []
    while len(found) < len(singly):
        found += (await asyncio.wait_for(other.fetch(max_wait=LONG_MS), 120)).offsets
    assert sorted(found) == list(range(0, 1_200, 2))


async def test_a_member_that_leaves_with_very_many_pieces_keeps_their_counts(share: ShareWorld) -> None:
    await share.write(*("v" * 1_400))
    member = share.member("m1")
    await member.fetch(max_records=1_400)
    # What stays locked is in pieces, and more of them than go back in one turn.
    assert await member.acknowledge(*((offset, offset, [ACCEPT]) for offset in range(1, 1_400, 2))) == 0
    await member.close()
    await asyncio.wait_for(until(lambda: not share.broker.share.of_group(GROUP)), 120)
    stored = share.persister.states[share.key()].batches
    counts = {batch.first_offset: batch.delivery_count for batch in stored if batch.first_offset % 2 == 0}
    assert counts == dict.fromkeys(range(0, 1_400, 2), 1)


async def test_people_see_what_is_locked_delayed_and_blocked(share: ShareWorld, clock: ManualClock) -> None:
    share.configure(order="key")
    await share.write_records(*[Record(b"x", b"%d" % n) for n in range(3)])
    member = share.member("m1")
    await member.fetch()
    clock.advance(700)
    asked: dict[str, Any] = {"group_id": GROUP, "topic": "orders", "partition": 0, "states": [], "limit": 10}
    shown = await share.ask("DescribeShareRecords", 0, **asked)
    assert (shown.error_code, shown.acquired, shown.blocked, shown.start_offset) == (0, 1, 2, 0)
    locked, blocked = shown.records
    assert (locked.state, locked.owner, locked.age_ms) == ("acquired", "m1", 700)
    assert (blocked.state, blocked.first_offset, blocked.last_offset) == ("blocked", 1, 2)
    await member.settle(0, 0, RELEASE, delay_ms=5_000)
    shown = await share.ask("DescribeShareRecords", 0, **(asked | {"states": ["delayed"]}))
    (delayed,) = shown.records
    assert (delayed.first_offset, delayed.until_ms, delayed.delivery_count) == (0, clock.ms + 5_000, 1)


async def test_rejected_records_are_not_delivered_again(share: ShareWorld) -> None:
    await share.write("a")
    member = share.member("m1")
    await member.fetch()
    assert await member.settle(0, 0, REJECT, reason="no such user") == 0
    assert (await member.fetch()).acquired == []
    assert share.led().machine.totals.rejected == 1


# --- dead letters, metrics, the log


class _Letters:
    """Keeps dead letters; fails as often as it is told to."""

    def __init__(self, failures: int = 0, error: Exception | None = None) -> None:
        self.failures = failures
        self.error = error or ApiError(ErrorCode.not_enough_replicas, "not now")
        self.written: list[Any] = []

    async def take_over(self, key: Any, leader_epoch: int) -> None:
        pass

    async def write(self, key: Any, leader_epoch: int, letters: Any) -> None:
        if self.failures:
            self.failures -= 1
            raise self.error
        self.written += letters


@pytest.mark.parametrize("error", [None, ValueError("a mistake in the code")])
async def test_dead_letters_are_written_before_records_end(
    share: ShareWorld, error: Exception | None
) -> None:
    letters = _Letters(failures=1, error=error)
    share.broker.share.dead_letters = letters
    share.configure(dead_letter_topic="dead")
    await share.write("a", "b")
    member = share.member("m1")
    await member.fetch()
    assert await member.settle(0, 0, REJECT, reason="no such user") == 0
    (batch,) = share.persister.states[share.key()].batches
    assert (batch.state, batch.reason) == (DeliveryState.ARCHIVING, "no such user")
    async with asyncio.timeout(120):
        await until(lambda: share.persister.states[share.key()].start_offset == 1)
    assert letters.written == [(0, 0, 1, "no such user")]


async def test_a_new_leader_writes_the_dead_letters_that_are_due(share: ShareWorld) -> None:
    share.broker.share.dead_letters = _Letters(failures=1_000_000)
    share.configure(dead_letter_topic="dead")
    await share.write("a")
    member = share.member("m1")
    await member.fetch()
    await member.settle(0, 0, REJECT, reason="why")
    share.led().end(ApiError(ErrorCode.not_leader_or_follower, "another leader"))
    letters = _Letters()
    share.broker.share.dead_letters = letters
    await member.fetch()
    await until(lambda: share.persister.states[share.key()].start_offset == 1)
    assert letters.written == [(0, 0, 1, "why")]


@pytest.mark.parametrize("change", ["deleted", "begun anew"])
async def test_dead_letters_are_given_up_when_their_state_is_gone(share: ShareWorld, change: str) -> None:
    """They fail all the time; then the members leave, and the group is deleted or its offsets are moved."""
    letters = _Letters(failures=1)
    share.broker.share.dead_letters = letters
    share.configure(dead_letter_topic="dead")
    await share.write("a", "b")
    member = share.member("m1")
    await member.fetch()
    assert await member.settle(0, 0, REJECT, reason="no such user") == 0
    await member.close()
    if change == "deleted":
        await share.persister.delete(share.key())
    else:
        await share.initialize(start=0, state_epoch=7)
    await asyncio.wait_for(until(lambda: not share.broker.share.of_group(GROUP)), 120)
    assert letters.written == [], "nobody waits for them any more"
    if change == "begun anew":
        assert (await share.member("m2").fetch()).values == ["a", "b"]


async def test_metrics_tell_what_happened_and_what_is_held(share: ShareWorld, clock: ManualClock) -> None:
    await share.write(*"abcdef")
    member = share.member("m1")
    await member.fetch(max_records=5, share_acquire_mode=1)
    await member.acknowledge((0, 2, [ACCEPT, RELEASE, REJECT]))
    clock.advance(2_000)

    def read() -> dict[str, float]:
        return {
            row.name.removeprefix("tidemill_share_"): sample.value
            for row in SHARE_METRICS
            for sample in row.samples(share.broker.share)
        }

    found = read()
    expected = {
        "acquired_total": 5,
        "accepted_total": 1,
        "released_total": 1,
        "rejected_total": 1,
        "dead_total": 1,
    }
    expected |= {"locked_records": 2, "lock_age_seconds": 2, "oldest_waiting_seconds": 2}
    expected |= {"sessions": 1, "partitions": 1, "expired_total": 0, "stalled_partitions": 0}
    assert {name: found[name] for name in expected} == expected
    await member.close()
    await share.settle()
    # What has happened is remembered when nobody uses the group any more.
    assert read()["accepted_total"] == 1


async def test_totals_of_groups_that_are_gone_do_not_pile_up(
    share: ShareWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody can make groups, use them once and delete them."""
    monkeypatch.setattr("tidemill.server.share.service._PAST_GROUPS_MAX", 2)
    await share.write("a")
    for group in ("g1", "g2", "g3", "g2"):
        await share.initialize(group)
        member = share.member("m", group)
        await member.fetch()
        await member.close()
        await until(lambda: not len(share.broker.share))
    totals = share.broker.share.totals()
    assert {group: each.acquired for group, each in totals.items()} == {"g2": 2, "g3": 1}


async def test_delayed_records_that_retention_takes_are_told(
    share: ShareWorld, caplog: pytest.LogCaptureFixture
) -> None:
    await share.write("a", "b")
    member = share.member("m1")
    await member.fetch()
    await member.settle(0, 1, RELEASE, delay_ms=60_000)
    led = share.led()
    led.partition.delete_records(1)
    await share.broker.share.check_log_starts()
    assert "1 records that waited for their time or key are gone" in caplog.text
    assert led.machine.totals.lost == 1


async def test_a_thousand_ways_to_acknowledge_do_not_hold_the_loop(share: ShareWorld) -> None:
    await share.write("a")
    member = share.member("m1")
    await member.fetch()
    await member.acknowledge((0, 0, [ACCEPT]))
    # All below the start: every one is passed over.
    batches = [(0, 0, [ACCEPT])] + [(offset, offset, [ACCEPT]) for offset in range(1, 20_000)]
    assert await member.acknowledge(*batches) == ErrorCode.invalid_record_state


async def test_another_leader_while_the_first_start_is_written_is_no_accident(
    share: ShareWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write is carried out, and this node does not lead any more: the member looks for the leader."""
    await share.initialize("fresh", start=-1)
    write_state = share.persister.write_state

    async def write_and_lose_the_lead(*arguments: Any) -> None:
        await write_state(*arguments)
        dependents = list(leader(share.broker, "orders")._dependents.items())
        for key, lost in dependents:
            if getattr(key, "key", None) == share.key("fresh"):
                lost()

    monkeypatch.setattr(share.persister, "write_state", write_and_lose_the_lead)
    fetched = await share.member("m1", "fresh").fetch()
    assert fetched.error == ErrorCode.not_leader_or_follower


async def test_a_new_session_does_not_go_on_with_a_state_that_was_begun_anew(share: ShareWorld) -> None:
    """The session of a member that hangs is open still, while the group's offsets are moved."""
    await share.write("a", "b", "c")
    hung = share.member("m1")
    await hung.fetch(max_records=1)
    await share.initialize(start=2, state_epoch=7)
    assert (await share.member("m2").fetch()).values == ["c"]
    await hung.acknowledge((0, 2, [ACCEPT]))
    assert share.persister.states[share.key()].start_offset == 2


async def test_a_new_session_does_not_go_on_with_a_state_that_was_deleted_and_has_its_epoch_again(
    share: ShareWorld,
) -> None:
    await share.write("a", "b", "c")
    await share.member("m1").fetch(max_records=1)
    await share.persister.delete(share.key())
    await share.initialize(start=2)
    assert (await share.member("m2").fetch()).values == ["c"]


async def test_a_write_whose_outcome_is_unknown_is_not_repeated_into_a_state_that_was_begun_anew(
    share: ShareWorld,
) -> None:
    await share.write("a", "b", "c")
    member = share.member("m1")
    await member.fetch()
    await member.acknowledge((0, 0, [ACCEPT]))
    share.persister.write_failures = [ApiError(ErrorCode.request_timed_out, "no answer")]
    await share.persister.delete(share.key())
    await share.initialize(start=0)
    assert await member.acknowledge((1, 1, [ACCEPT])) == ErrorCode.fenced_state_epoch
    assert (await share.member("m2").fetch()).values == ["a", "b", "c"]


async def test_an_acknowledgement_that_comes_as_its_share_partition_ends_is_answered(
    share: ShareWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leadership is lost after the share partition was found, and before the acknowledgement goes on."""
    await share.write("a")
    member = share.member("m1")
    await member.fetch()
    led = share.led()
    service = share.broker.share

    async def found_too_late(key: Any) -> LedSharePartition:
        led.end(ApiError(ErrorCode.not_leader_or_follower, "another node leads"))
        return led

    monkeypatch.setattr(service, "find", found_too_late)
    code = await asyncio.wait_for(member.acknowledge((0, 0, [ACCEPT])), 120)
    assert code == ErrorCode.not_leader_or_follower
    transaction = Transaction("x", 1, 0)
    with pytest.raises(ApiError) as caught:
        await led.accept_in_transaction("m1", [Acknowledgement(0, 0, (ACCEPT,))], transaction)
    assert caught.value.code is ErrorCode.not_leader_or_follower


async def test_a_new_session_is_refused_while_nobody_can_tell_whether_the_state_is_the_same(
    share: ShareWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    await share.write("a")
    await share.member("m1").fetch()

    async def away(*_: Any) -> Any:
        raise ApiError(ErrorCode.coordinator_not_available, "the coordinator is away")

    monkeypatch.setattr(share.persister, "read_summary", away)
    assert (await share.member("m2").fetch()).error == ErrorCode.coordinator_not_available


class TestTooMuch:
    """Requests that would hold the node up, or take memory that nobody counts."""

    async def test_partitions_of_a_fetch(self, share: ShareWorld) -> None:
        response = await share.member("m1").ask_fetch(range(5_001))
        assert response.error_code == ErrorCode.invalid_request
        assert not share.broker.share.sessions.has_group(GROUP)

    async def test_partitions_of_a_session(self, share: ShareWorld) -> None:
        member = share.member("m1")
        assert (await member.ask_fetch(range(5_000))).error_code == 0
        response = await member.ask_fetch(range(5_000, 5_002))
        assert response.error_code == ErrorCode.invalid_request
        assert "5000 partitions" in response.error_message

    async def test_partitions_of_an_acknowledgement(self, share: ShareWorld) -> None:
        member = share.member("m1")
        await member.fetch()
        partitions = [{"partition_index": n, "acknowledgement_batches": []} for n in range(5_001)]
        response = await share.ask(
            "ShareAcknowledge",
            2,
            member.connection,
            group_id=GROUP,
            member_id="m1",
            share_session_epoch=1,
            topics=[{"topic_id": share.topic_id, "partitions": partitions}],
        )
        assert response.error_code == ErrorCode.invalid_request


async def test_an_acknowledgement_that_comes_as_the_writer_ends_is_written(share: ShareWorld) -> None:
    """The writer has found nothing more to write, and the event loop has not told its end yet."""
    await share.write("a", "b")
    member = share.member("m1")
    await member.fetch()
    led = share.led()
    first = led.acknowledge("m1", [Acknowledgement(0, 0, [ACCEPT])])
    writer = led._writer
    assert first is not None
    assert writer is not None
    while not writer.done():  # noqa: ASYNC110 - the very turn in which it ends
        await asyncio.sleep(0)
    second = led.acknowledge("m1", [Acknowledgement(1, 1, [ACCEPT])])
    assert second is not None
    await share.settle()
    assert second.done(), "nobody would write it before the next fetch or the end of a lock"
    assert (first.result(), second.result()) == (None, None)
