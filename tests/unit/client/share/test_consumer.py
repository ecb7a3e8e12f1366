"""A member of a share group against nodes in memory: what it takes, tells, loses and takes again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest

from support.share_peer import PeerCluster
from tidemill.client.cluster import Cluster
from tidemill.client.share.consumer import AsyncShare
from tidemill.client.share.group_configs import GroupConfigs
from tidemill.client.share.link import NodeLink
from tidemill.client.share.record import FencingToken, ShareRecord
from tidemill.errors import ApiError, ConnectionClosed, ErrorCode, NodeUnavailable, TidemillError


def member(peer: PeerCluster, *topics: str, **options: Any) -> AsyncShare:
    share = AsyncShare(cast("Cluster", peer), "g", topics or ("t",), **options)
    share.max_wait_ms = 20
    return share


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - the state is that of nodes, which tell nobody
            await asyncio.sleep(0.002)


async def take(share: AsyncShare, count: int) -> list[ShareRecord]:
    async with asyncio.timeout(120):
        return [await share.next() for _ in range(count)]


async def test_records_come_with_what_they_are_and_end_as_they_were_settled() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a", b"b", b"c", key=b"k")
    async with member(peer) as share:
        first, second, third = await take(share, 3)
        assert (first.topic, first.partition, first.offset, first.key) == ("t", 0, 0, b"k")
        assert (first.value, first.timestamp_ms, first.delivery_count) == (b"a", 1_000, 1)
        assert first.fencing_token == FencingToken(leader_epoch=1, delivery_count=1)
        first.accept()
        second.release(delay=1.5)
        third.reject("no such address")
        await share.flush()
        # These nodes hand a record out again before its delay is over, perhaps by now.
        assert (peer["t", 0].states[0], peer["t", 0].states[2]) == ("done", "dead")
        assert peer["t", 0].delays_ms == {1: 1_500}
        assert peer["t", 0].reasons == {2: "no such address"}
        counts = share.counts
        assert (counts.accepted, counts.released, counts.rejected, counts.lost) == (1, 1, 1, 0)


async def test_a_record_is_settled_once() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a")
    async with member(peer) as share:
        (record,) = await take(share, 1)
        record.accept()
        with pytest.raises(ApiError, match="was accepted before"):
            record.release()


async def test_records_that_are_not_settled_do_not_keep_others_from_coming() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(*[b"x"] * 50)
    async with member(peer) as share:
        records = await take(share, 50)
        assert [record.offset for record in records] == list(range(50))
        assert peer["t", 0].states == ["acquired"] * 50


async def test_nothing_is_fetched_before_it_is_asked_for() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(*[b"x"] * 50)
    async with member(peer) as share:
        await until(lambda: len(peer.heartbeats) > 3)
        assert peer["t", 0].states.count("acquired") == 0
        await take(share, 1)
        assert peer["t", 0].states.count("acquired") == 1


async def test_leaving_the_loop_gives_everything_back_and_leaves_the_group() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(*[b"x"] * 5)
    share = member(peer)
    records = share.records()
    async for record in records:
        if record.offset == 2:
            record.accept()
            break
    await records.aclose()
    assert peer["t", 0].states == ["available", "available", "done", "available", "available"]
    assert peer.left == [share.member_id]
    with pytest.raises(ConnectionClosed, match="open another one"):
        await share.next()


async def test_what_its_reader_never_got_goes_back_as_if_it_had_not_been_delivered() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(*[b"x"] * 50)
    async with member(peer) as share:
        (await take(share, 1))[0].accept()
        await take(share, 1)
        # What is fetched ahead is on its way, and arrives when the loop was left.
        peer.answers.clear()
        await until(lambda: peer["t", 0].states.count("acquired") > 1)
        leaving = asyncio.create_task(share.close())
        await until(lambda: share._giving_back)
        peer.answers.set()
        await leaving
    assert peer["t", 0].states == ["done"] + ["available"] * 49
    assert peer["t", 0].counts == [1, 1] + [0] * 48


@pytest.mark.parametrize(("limit", "alone_from"), [(None, 3), (10, 5), (4, 2), (1, 2)])
async def test_nothing_is_fetched_ahead_beside_a_record_that_may_end_its_reader(
    limit: int | None, alone_from: int
) -> None:
    class Configs(GroupConfigs):
        async def apply(self, cluster: Cluster, group: str) -> int | None:
            return limit

    for count in (alone_from - 1, alone_from):
        peer = PeerCluster({"t": 1})
        peer["t", 0].write(*[b"x"] * 50)
        peer["t", 0].counts[0] = count - 1
        async with member(peer, configs=Configs({})) as share:
            (record,) = await take(share, 1)
            share._pace.note(0.001)
            assert (share.wanted() == 0) == (count >= alone_from)
            record.accept()
            await share.flush()
            assert share.wanted() > 0


async def test_partitions_of_many_leaders_are_read_side_by_side() -> None:
    peer = PeerCluster({"t": 6}, nodes=3)
    for index in range(6):
        peer["t", index].write(b"x")
    async with member(peer) as share:
        records = await take(share, 6)
        assert {record.partition for record in records} == set(range(6))
        for record in records:
            record.accept()
        await share.flush()
    assert all(peer["t", index].states == ["done"] for index in range(6))


async def test_offsets_without_records_are_told_as_gaps() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a", None, b"c")
    async with member(peer, concurrency=8) as share:
        records = await take(share, 2)
        assert [record.offset for record in records] == [0, 2]
        await until(lambda: peer["t", 0].states == ["acquired", "dead", "acquired"])


async def test_settling_works_from_other_threads() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(*[b"x"] * 100)
    async with member(peer, concurrency=100) as share:
        records = await take(share, 100)
        threads = [threading.Thread(target=record.accept) for record in records]
        for thread in threads:
            thread.start()
        await share.flush()
        for thread in threads:
            thread.join()
        await share.flush()
    assert peer["t", 0].states == ["done"] * 100


async def test_one_lost_lock_does_not_take_others_down() -> None:
    """A node rolls back the whole of a partition's batch; the others are sent again."""
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(*[b"x"] * 20)
    async with member(peer, concurrency=20) as share:
        records = await take(share, 20)
        peer["t", 0].states[7] = "available"
        peer["t", 0].owners[7] = "somebody else"
        peer["t", 0].states[7] = "acquired"
        for record in records:
            record.accept()
        with pytest.raises(ApiError, match=r"1 records were not settled.*t-0 offset 7"):
            await share.flush()
        assert share.counts.accepted == 19
        assert share.counts.lost == 1
        states = [state for offset, state in enumerate(peer["t", 0].states) if offset != 7]
        assert states == ["done"] * 19
        assert peer["t", 0].states[7] == "acquired"
        await share.flush()  # What was reported once is not reported again.


async def test_a_write_that_fails_for_a_while_is_said_again() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a")
    async with member(peer) as share:
        (record,) = await take(share, 1)
        peer.ack_refusals.extend([ErrorCode.coordinator_not_available, ErrorCode.not_coordinator])
        record.accept()
        await share.flush()
    assert peer["t", 0].states == ["done"]


async def test_a_partition_that_moves_is_read_from_its_new_leader() -> None:
    peer = PeerCluster({"t": 1}, nodes=2)
    peer["t", 0].write(b"a", b"b")
    async with member(peer) as share:
        (old,) = await take(share, 1)
        peer.move("t", 0, leader=1)
        again, other = await take(share, 2)
        assert [again.offset, other.offset] == [0, 1]
        assert again.delivery_count == 2
        assert again.fencing_token > old.fencing_token
        old.accept()  # Too late: it is somebody else's, were it not ours again.
        with pytest.raises(ApiError, match="its lock had ended"):
            await share.flush()
        assert peer["t", 0].states == ["acquired", "acquired"]
        again.accept()
        other.accept()
        await share.flush()
    assert peer["t", 0].states == ["done", "done"]


async def test_the_fencing_token_has_the_epoch_of_the_leader_that_gave_the_record() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].leader_epoch = 6
    async with member(peer) as share:
        await until(lambda: list(share._routing))
        # The metadata knows of a later leader than the one that answers.
        peer["t", 0].leader_epoch = 5
        peer["t", 0].write(b"a")
        (record,) = await take(share, 1)
        assert record.fencing_token == FencingToken(leader_epoch=5, delivery_count=1)


async def test_an_answer_that_comes_after_its_partition_has_moved_is_dropped() -> None:
    peer = PeerCluster({"t": 4}, nodes=2)
    async with member(peer, concurrency=10) as share:
        asking = asyncio.create_task(share.next())
        await until(lambda: share._routing.links.keys() == {0, 1})
        old, new = share._routing.links[0], share._routing.links[1]
        peer.answers.clear()
        peer["t", 0].write(b"a")
        await until(lambda: peer["t", 0].states == ["acquired"])
        peer.move("t", 0, leader=1)
        share.moved()
        await until(lambda: ("t", 0) in new.partitions and ("t", 0) not in old.partitions)
        told = len(peer.requests)
        peer.answers.set()
        await until(lambda: any(node == 0 for node, _, _ in peer.requests[told:]))
        async with asyncio.timeout(120):
            found = [await asking]
        while (record := share.take()) is not None:
            found.append(record)
        assert [record.fencing_token for record in found] == [FencingToken(2, 2)]


async def test_a_lost_connection_loses_the_locks_and_the_session_begins_anew() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a")
    async with member(peer) as share:
        (old,) = await take(share, 1)
        peer.drop(0)
        (again,) = await take(share, 1)
        assert (again.offset, again.delivery_count) == (0, 2)
        old.release()
        with pytest.raises(ApiError):
            await share.flush()
        assert peer["t", 0].states == ["acquired"]


async def test_an_answer_that_comes_as_its_session_ends_is_dropped() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a")
    async with member(peer, concurrency=2) as share:
        (first,) = await take(share, 1)
        peer.answers.clear()
        peer["t", 0].write(b"b")
        await until(lambda: peer["t", 0].states == ["acquired"] * 2)
        # The other task of the link notices first that the connection is of no use any more.
        peer.refuse("ShareAcknowledge", NodeUnavailable("the connection broke"))
        first.accept()
        await until(lambda: share.counts.lost == 1)
        peer.answers.set()
        records = await take(share, 2)
        assert {(record.offset, record.delivery_count) for record in records} == {(0, 2), (1, 2)}


async def test_records_that_wait_when_their_lock_is_lost_are_not_handed_out() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(*[b"x"] * 10)
    async with member(peer, concurrency=10) as share:
        await take(share, 1)
        await until(lambda: peer["t", 0].states.count("acquired") == 10)
        peer.drop(0)
        await until(lambda: max(peer["t", 0].counts) == 2)
        records = await take(share, 10)
        assert {record.delivery_count for record in records} == {2}


@pytest.mark.parametrize("code", [ErrorCode.share_session_not_found, ErrorCode.invalid_share_session_epoch])
async def test_a_session_that_the_node_does_not_know_is_opened_again(code: ErrorCode) -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a", b"b")
    async with member(peer) as share:
        (first,) = await take(share, 1)
        first.accept()
        await share.flush()
        peer.refuse("ShareFetch", code)
        (second,) = await take(share, 1)
        assert second.offset == 1


async def test_a_node_that_is_dead_is_waited_for() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a", b"b")
    async with member(peer) as share:
        (first,) = await take(share, 1)
        peer.dead.add(0)
        peer.drop(0)
        asked = asyncio.create_task(share.next())
        await asyncio.sleep(0.1)
        assert not asked.done()
        peer.dead.clear()
        async with asyncio.timeout(120):
            assert (await asked).offset == 0
        assert first._lost


async def test_a_member_that_the_group_put_out_joins_again() -> None:
    peer = PeerCluster({"t": 1})
    async with member(peer) as share:
        await until(lambda: len(peer.heartbeats) > 2)
        peer.refuse("ShareGroupHeartbeat", ErrorCode.fenced_member_epoch)
        await until(lambda: sum(beat["member_epoch"] == 0 for beat in peer.heartbeats) == 2)
        peer["t", 0].write(b"a")
        assert (await take(share, 1))[0].value == b"a"
        assert {beat["member_id"] for beat in peer.heartbeats} == {share.member_id}


async def test_a_coordinator_that_moves_is_followed() -> None:
    peer = PeerCluster({"t": 1})
    peer.refuse("ShareGroupHeartbeat", NodeUnavailable("gone"), ErrorCode.not_coordinator)
    peer["t", 0].write(b"a")
    async with member(peer) as share:
        assert (await take(share, 1))[0].value == b"a"


async def test_a_group_that_is_full_is_reported() -> None:
    peer = PeerCluster({"t": 1})
    peer.refuse("ShareGroupHeartbeat", ErrorCode.group_max_size_reached)
    with pytest.raises(ApiError, match="GROUP_MAX_SIZE_REACHED"):
        await member(peer).next()


async def test_an_error_that_does_not_pass_reaches_whoever_waits() -> None:
    peer = PeerCluster({"t": 1})
    async with member(peer) as share:
        asked = asyncio.create_task(share.next())
        await until(lambda: peer.requests)
        peer.refuse("ShareFetch", ErrorCode.group_authorization_failed)
        with pytest.raises(ApiError, match="GROUP_AUTHORIZATION_FAILED"):
            async with asyncio.timeout(120):
                await asked


async def test_locks_of_waiting_records_are_renewed_and_those_in_hand_are_not() -> None:
    peer = PeerCluster({"t": 1})
    peer.lock_ms = 4_000
    peer["t", 0].write(*[b"x"] * 4)
    async with member(peer) as share:
        first, second = await take(share, 2)
        first.accept()
        await until(lambda: share.counts.renewed >= 2)
        assert not second._lost
        await until(lambda: second._lost)
        assert len(share._holdings) == 2


async def test_a_renewal_of_a_lock_that_is_gone_gives_the_record_up() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a")
    async with member(peer) as share:
        (record,) = await take(share, 1)
        record.renew()
        await until(lambda: peer.renewals == 1)
        peer["t", 0].owners[0] = "somebody else"
        record.renew()
        await until(lambda: record._lost)


async def test_a_group_that_does_not_renew_is_left_alone() -> None:
    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a")
    async with member(peer) as share:
        (record,) = await take(share, 1)
        peer.refuse("ShareAcknowledge", ErrorCode.invalid_request)
        record.renew()
        await until(lambda: not record._link.can_renew)
        record.accept()
        await share.flush()
    assert peer["t", 0].states == ["done"]


async def test_poll_gives_what_is_there_and_nothing_when_its_time_is_over() -> None:
    peer = PeerCluster({"t": 1})
    async with member(peer) as share:
        assert await share.poll(timeout=0.05) == []
        peer["t", 0].write(*[b"x"] * 30)
        found = await share.poll(timeout=120)
        while len(found) < 30:
            found += await share.poll(max_records=4, timeout=20)
        assert [record.offset for record in found] == list(range(30))


async def test_two_members_never_have_the_same_record() -> None:
    peer = PeerCluster({"t": 2}, nodes=2)
    for index in (0, 1):
        peer["t", index].write(*[b"x"] * 100)
    seen: list[tuple[int, int]] = []

    async def work() -> None:
        async with member(peer) as share:
            while len(seen) < 200:
                for record in await share.poll(timeout=0.2):
                    seen.append((record.partition, record.offset))
                    record.accept()

    async with asyncio.timeout(120):
        await asyncio.gather(work(), work(), work())
    assert sorted(seen) == [(index, offset) for index in (0, 1) for offset in range(100)]


async def test_a_transaction_waits_for_the_end_of_the_one_before() -> None:
    peer = PeerCluster({"t": 2})
    peer["t", 0].write(b"a")
    peer["t", 1].write(b"b")
    async with member(peer) as share:
        first, second = await take(share, 2)
        busy = ErrorCode.concurrent_transactions
        peer.ack_refusals.extend([busy, busy, busy])
        async with share.transaction() as transaction:
            transaction.accept(first, second)
        assert peer.ended == [True]
        assert [peer["t", index].states for index in (0, 1)] == [["done"], ["done"]]
        assert share.counts.accepted == 2
        told = [body for _, name, body in peer.requests if name == "ShareSettle"]
        # What the node has taken is not said again.
        assert [sum(len(topic["partitions"]) for topic in body["topics"]) for body in told] == [2, 2, 1]


async def test_a_transaction_that_one_node_refuses_holds_no_records_of_others() -> None:
    peer = PeerCluster({"t": 3}, nodes=3)
    for index in range(3):
        peer["t", index].write(b"x")
    async with member(peer) as share:
        records = sorted(await take(share, 3), key=lambda record: record.partition)
        # The first node takes it, the second one does not, and the third one is not asked.
        peer.ack_refusals.extend([ErrorCode.none, ErrorCode.invalid_producer_epoch])
        with pytest.raises(ApiError, match="INVALID_PRODUCER_EPOCH"):
            async with share.transaction() as transaction:
                transaction.accept(*records)
        assert peer.ended == [False]
        # They may be fetched again as soon as they are released.
        parts = [peer["t", index] for index in (1, 2)]
        await until(lambda: all(part.states == ["available"] or part.counts == [2] for part in parts))
        assert (peer["t", 0].states, peer["t", 0].counts) == (["acquired"], [1])
        assert share.counts.accepted == 0


@pytest.mark.parametrize("step", ["_fetch", "_tell"])
async def test_a_mistake_in_the_code_ends_the_consumer_instead_of_silence(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    async def broken(*_: Any) -> None:
        raise ValueError("an error code that nobody has heard of")

    peer = PeerCluster({"t": 1})
    peer["t", 0].write(b"a")
    async with member(peer) as share:
        if step == "_tell":
            (record,) = await take(share, 1)
            record.release(delay=1.0)
        monkeypatch.setattr(NodeLink, step, broken)
        with pytest.raises(TidemillError, match="nobody has heard of"):
            await take(share, 1)
