"""What the next leader of a partition finds in the stored state, through the node's own share coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from support.broker_topics import leader
from support.cutting import start_anew_at, truncate_to
from support.share_world import ACCEPT, GROUP, REJECT, RELEASE, RETURN, ShareWorld
from support.table_world import ManualClock
from tidemill.errors import ApiError, ErrorCode
from tidemill.records.record import Record
from tidemill.replication.rules.assignment import PartitionAssignment
from tidemill.server.broker import Broker
from tidemill.server.share.kept_state import KeptState


@pytest.fixture
async def share(make_broker: Callable[..., Awaitable[Broker]], clock: ManualClock) -> ShareWorld:
    world = ShareWorld(await make_broker(clock_ms=clock), stored=True)
    await world.begin()
    return world


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a state."""
    while not condition():  # noqa: ASYNC110 - the state itself
        await asyncio.sleep(0.001)


def _next_leader(share: ShareWorld) -> None:
    """What this node knows of the share partition is gone, as if another one led from now on."""
    share.led().end(ApiError(ErrorCode.not_leader_or_follower, "another leader"))


async def test_accepted_records_stay_accepted_and_locks_end(share: ShareWorld) -> None:
    await share.write(*"abcdef")
    member = share.member("m1")
    await member.fetch()
    # The first is held, so that the start cannot move over the others.
    assert await member.acknowledge((1, 3, [ACCEPT, RELEASE, REJECT])) == 0
    _next_leader(share)
    again = await share.member("m2").fetch()
    # A lock that ended with its leader was not counted; what was written was.
    assert again.acquired == [(0, 0, 1), (2, 2, 2), (4, 5, 1)]


async def test_a_delivery_that_was_taken_back_does_not_count_for_the_next_leader(share: ShareWorld) -> None:
    await share.write(*"abc")
    member = share.member("m1")
    await member.fetch()
    assert await member.acknowledge((0, 2, [RELEASE])) == 0
    assert (await member.fetch()).acquired == [(0, 2, 2)]
    assert await member.settle(0, 1, RETURN) == 0
    assert await member.acknowledge((2, 2, [RELEASE])) == 0
    _next_leader(share)
    assert (await share.member("m2").fetch()).acquired == [(0, 1, 2), (2, 2, 3)]


async def test_delays_hold_for_the_next_leader(share: ShareWorld, clock: ManualClock) -> None:
    share.configure(retry_backoff_ms=50)
    await share.write("a")
    member = share.member("m1")
    await member.fetch()
    await member.acknowledge((0, 0, [RELEASE]))
    _next_leader(share)
    assert (await member.fetch()).acquired == []
    assert share.led().machine.delayed_count == 1
    waiting = asyncio.ensure_future(member.fetch(max_wait=60_000))
    await share.settle()
    clock.advance(50)
    assert (await asyncio.wait_for(waiting, 120)).acquired == [(0, 0, 2)]


async def test_the_order_of_keys_holds_for_the_next_leader(share: ShareWorld) -> None:
    share.configure(order="key", on_dead="block")
    await share.write_records(*[Record(key, b"%d" % n) for n in range(3) for key in (b"x", b"y", b"z")])
    member = share.member("m1")
    assert (await member.fetch()).offsets == [0, 1, 2]
    # x is done, y has died and blocks its key, z is held.
    assert await member.acknowledge((0, 1, [ACCEPT, REJECT])) == 0
    _next_leader(share)
    assert (await share.member("m2").fetch()).offsets == [2, 3]


async def test_people_see_what_waits_although_the_group_has_no_members(
    share: ShareWorld, clock: ManualClock
) -> None:
    share.configure(order="key", on_dead="block")
    await share.write_records(*[Record(key, b"%d" % n) for n in range(2) for key in (b"x", b"y", b"z")])
    member = share.member("m1")
    assert (await member.fetch()).offsets == [0, 1, 2]
    assert await member.acknowledge((0, 2, [RELEASE, REJECT, ACCEPT])) == 0
    await member.close()
    await until(lambda: not share.broker.share.of_group(GROUP))
    clock.advance(500)
    shown = await share.ask(
        "DescribeShareRecords", 0, group_id=GROUP, topic="orders", partition=0, states=[], limit=10
    )
    # 3 waits for 0, and 4 for 1, which died. The next leader has looked at all keys of the log.
    assert (shown.available, shown.blocked, shown.end_offset) == (2, 2, 6)
    assert [(each.first_offset, each.last_offset, each.state) for each in shown.records] == [
        (0, 0, "available"),
        (1, 1, "dead"),
        (3, 4, "blocked"),
        (5, 5, "available"),
    ]
    # What was before it has read the state, it does not know.
    assert {each.age_ms for each in shown.records} == {shown.known_for_ms} == {0}


async def test_ages_are_counted_from_the_time_at_which_the_leader_has_read_the_state(
    share: ShareWorld, clock: ManualClock
) -> None:
    await share.write("a", "b", "c")
    member = share.member("m1")
    await member.fetch()
    assert await member.acknowledge((0, 2, [RELEASE])) == 0
    clock.advance(900)
    _next_leader(share)
    clock.advance(100)
    await member.fetch(max_records=0)
    clock.advance(30)
    await member.fetch(max_records=1, share_acquire_mode=1)
    clock.advance(7)
    shown = await share.ask(
        "DescribeShareRecords", 0, group_id=GROUP, topic="orders", partition=0, states=[], limit=10
    )
    assert shown.known_for_ms == 37
    assert [(each.state, each.age_ms) for each in shown.records] == [("acquired", 7), ("available", 37)]


async def test_records_that_nobody_has_looked_at_count_as_available(
    share: ShareWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not all of a large window is looked at: only until there is something to hand out."""
    monkeypatch.setattr("tidemill.server.share.led_partition._LOOK_BYTES", 1)
    share.configure(order="key", on_dead="block")
    for n in range(6):
        await share.write_records(Record(b"k%d" % n, b""))
    member = share.member("m1")
    for _ in range(6):
        await member.fetch()
    assert await member.acknowledge((0, 5, [RELEASE, RELEASE, ACCEPT, RELEASE, REJECT, RELEASE])) == 0
    await share.settle()
    _next_leader(share)
    shown = await share.ask(
        "DescribeShareRecords", 0, group_id=GROUP, topic="orders", partition=0, states=[], limit=10
    )
    assert (shown.available, shown.blocked, shown.end_offset) == (4, 0, 6)
    assert [(each.first_offset, each.state) for each in shown.records if each.state == "dead"] == [
        (4, "dead")
    ]


async def test_the_start_moves_for_good_and_a_new_group_keeps_where_it_began(share: ShareWorld) -> None:
    await share.write("a")
    await share.initialize("new", start=-1)
    late = share.member("m1", "new")
    assert (await late.fetch()).acquired == []
    await share.write("b")
    share.led("new").end(ApiError(ErrorCode.not_leader_or_follower, "another leader"))
    # It began at the end of that time, not of this.
    assert (await late.fetch()).values == ["b"]
    await late.acknowledge((1, 1, [ACCEPT]))
    summary = await share.persister.read_summary(share.key("new"), -1)
    assert (summary.start_offset, summary.delivery_complete_count) == (2, 0)


async def test_records_that_are_gone_when_a_group_comes_back_are_counted_and_told(
    share: ShareWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """Retention does not wait for a group whose workers are all down."""
    await share.write(*"abcdefgh")
    member = share.member("m1")
    await member.fetch(max_records=4, share_acquire_mode=1)
    # The first is released, and the start cannot move over the two that are accepted.
    assert await member.acknowledge((0, 2, [RELEASE, ACCEPT, ACCEPT])) == 0
    partition = share.led().partition
    _next_leader(share)
    partition.delete_records(5)
    assert (await share.member("m2").fetch()).offsets == [5, 6, 7]
    # Lost are 0 (released), 3 (held, then let go) and 4 (nobody had it).
    assert share.broker.share.totals()[GROUP].lost == 3
    assert "workers:orders-0: 3 records that the group had not finished are gone" in caplog.text


async def test_a_new_group_loses_nothing_that_was_deleted_before_it_began(
    share: ShareWorld, caplog: pytest.LogCaptureFixture
) -> None:
    await share.write("a", "b")
    leader(share.broker, "orders", 0).delete_records(1)
    share.configure("new", share_auto_offset_reset="earliest")
    await share.initialize("new", start=-1)
    assert (await share.member("m1", "new").fetch()).values == ["b"]
    assert share.broker.share.totals()["new"].lost == 0
    assert "are gone" not in caplog.text


async def _cut(share: ShareWorld, offset: int) -> None:
    """What an unclean election does: the next leader has the log only up to ``offset``."""
    partition = leader(share.broker, "orders", 0)
    partition.become_follower(partition.leader_epoch + 1)
    truncate_to(partition.local_log, offset, share.broker.clock_ms())
    partition.become_leader(PartitionAssignment.alone(share.broker.node_id, partition.leader_epoch + 1))
    assert partition.log_end_offset == offset


async def _finish_and_cut(share: ShareWorld) -> None:
    """The group finishes offsets 0 to 4, the log is cut at 2, and others take the offsets from there on."""
    for value in "abcdef":
        await share.write(value)
    member = share.member("m1")
    await member.fetch()
    assert await member.acknowledge((0, 4, [ACCEPT])) == 0
    await _cut(share, 2)
    for value in "XYZ":
        await share.write(value)


async def test_records_in_the_place_of_those_that_were_cut_off_are_delivered(
    share: ShareWorld, caplog: pytest.LogCaptureFixture
) -> None:
    await _finish_and_cut(share)
    member = share.member("m2")
    fetched = await member.fetch()
    assert (fetched.values, fetched.acquired) == (["X", "Y", "Z"], [(2, 4, 1)])
    assert "workers:orders-0: the log was cut at offset 2" in caplog.text
    assert share.broker.share.totals()[GROUP].cut == 3
    assert await member.acknowledge((2, 3, [ACCEPT])) == 0
    # Once only: the state is that of the new log from now on.
    _next_leader(share)
    assert (await share.member("m3").fetch()).values == ["Z"]
    assert caplog.text.count("the log was cut") == 1


async def test_without_the_check_they_would_pass_for_finished(
    share: ShareWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeptState, "_divergence", lambda *_: None)
    await _finish_and_cut(share)
    assert (await share.member("m2").fetch()).values == []


async def _two_unclean_elections(share: ShareWorld) -> None:
    """The first leader has a to f, the second only a and b of them, the third a to d.

    Under the second the group finishes what stands in the place of c and d.
    """
    for value in "abcdef":
        await share.write(value)
    partition = leader(share.broker, "orders", 0)
    first_epoch = partition.leader_epoch
    of_third = [bytes(each) for each in partition.local_log.read_batches(2, 4)]
    await _cut(share, 2)
    for value in "XYZ":
        await share.write(value)
    member = share.member("m1")
    assert (await member.fetch()).values == [*"abXYZ"]
    assert await member.acknowledge((0, 4, [ACCEPT])) == 0
    partition.become_follower(partition.leader_epoch + 1)
    truncate_to(partition.local_log, 2, share.broker.clock_ms())
    for batch in of_third:
        partition.local_log.append_as_follower(batch, first_epoch, share.broker.clock_ms())
    partition.become_leader(PartitionAssignment.alone(share.broker.node_id, partition.leader_epoch + 1))
    for value in "pq":
        await share.write(value)


async def test_after_two_unclean_elections_the_state_is_cut_where_the_logs_parted(share: ShareWorld) -> None:
    await _two_unclean_elections(share)
    member = share.member("m2")
    assert (await member.fetch()).values == ["c", "d", "p", "q"]
    assert await member.acknowledge((2, 5, [ACCEPT])) == 0
    _next_leader(share)
    assert (await share.member("m3").fetch()).values == []


async def test_without_the_epochs_of_the_second_leader_records_of_the_first_would_pass_for_finished(
    share: ShareWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KeptState, "_history", lambda _: b"")
    await _two_unclean_elections(share)
    assert (await share.member("m2").fetch()).values == ["p", "q"]


async def test_what_was_finished_behind_the_start_is_forgotten_with_its_record(share: ShareWorld) -> None:
    for value in "abcdef":
        await share.write(value)
    member = share.member("m1")
    await member.fetch()
    assert await member.acknowledge((0, 4, [RELEASE, ACCEPT, ACCEPT, REJECT, ACCEPT])) == 0
    await _cut(share, 3)
    await share.write("X")
    fetched = await share.member("m2").fetch()
    # 1 and 2 are still in the log, and finished.
    assert (fetched.values, fetched.acquired) == (["a", "X"], [(0, 0, 2), (3, 3, 1)])
    assert share.broker.share.totals()[GROUP].cut == 2


@pytest.mark.parametrize("commit", [True, False])
async def test_a_cut_above_all_that_the_group_has_done_changes_nothing(
    share: ShareWorld, caplog: pytest.LogCaptureFixture, *, commit: bool
) -> None:
    """It was handed records that are gone, and had not settled them."""
    for value in "abcd":
        await share.write(value)
    member = share.member("m1")
    await member.fetch()
    if commit:
        assert await member.acknowledge((0, 0, [ACCEPT])) == 0
    await _cut(share, 2)
    await share.write("X")
    assert (await share.member("m2").fetch()).values == (["b", "X"] if commit else ["a", "b", "X"])
    assert "the log was cut" not in caplog.text


async def test_a_state_below_the_start_of_the_log_has_nothing_to_be_compared_with(
    share: ShareWorld, caplog: pytest.LogCaptureFixture
) -> None:
    for value in "abcd":
        await share.write(value)
    member = share.member("m1")
    await member.fetch()
    assert await member.acknowledge((0, 3, [ACCEPT])) == 0
    partition = leader(share.broker, "orders", 0)
    partition.become_follower(partition.leader_epoch + 1)
    start_anew_at(partition.local_log, 4, share.broker.clock_ms())
    partition.become_leader(PartitionAssignment.alone(share.broker.node_id, partition.leader_epoch + 1))
    await share.write("e")
    assert (await share.member("m2").fetch()).values == ["e"]
    assert (share.broker.share.totals()[GROUP].cut, share.broker.share.totals()[GROUP].lost) == (0, 0)
    assert "the log was cut" not in caplog.text


async def test_a_state_without_a_position_is_not_checked(share: ShareWorld) -> None:
    """One that an earlier version has written, or that an operator has just begun."""
    for value in "abcd":
        await share.write(value)
    await share.initialize("new", start=3)
    await _cut(share, 2)
    for value in "XY":
        await share.write(value)
    assert (await share.member("m1", "new").fetch()).values == ["Y"]
