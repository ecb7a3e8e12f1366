from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Any

import pytest

from support.consumer_groups import FakeTopics
from support.coordination import MemoryLog, VirtualClock, settle
from tidemill.coordination.clock import LoopClock
from tidemill.coordination.shards import partition_of_key
from tidemill.errors import ApiError, DiskFull, ErrorCode
from tidemill.groups.consumer.draft import GroupDraft
from tidemill.groups.consumer.messages import ConsumerHeartbeatRequest
from tidemill.groups.coordinator import GroupCoordinator
from tidemill.groups.memory import MEMBER_BYTES
from tidemill.groups.messages import (
    CommittedOffset,
    HeartbeatRequest,
    JoinProtocol,
    JoinReply,
    JoinRequest,
    LeavingMember,
    OffsetCommitRequest,
    OffsetToCommit,
    SyncReply,
    SyncRequest,
    TransactionalCommitRequest,
)
from tidemill.groups.records import OffsetCommitRecord, encode_record
from tidemill.groups.settings import GroupSettings
from tidemill.groups.share.messages import ShareHeartbeatRequest
from tidemill.wire.consumer_protocol import pack_subscription

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable

    from tidemill.errors import TidemillError

NONE = ErrorCode.none
T0 = ("t", 0)


class Node:
    """A coordinator over in-memory logs."""

    def __init__(self, settings: GroupSettings, partitions: int = 50) -> None:
        self.settings = settings
        self.partitions = partitions
        self.clock = VirtualClock()
        self.logs: dict[int, MemoryLog] = {}
        self.refuse_open: dict[int, TidemillError] = {}
        self.opened: list[int] = []
        self.topics = FakeTopics()
        self.coordinator = GroupCoordinator(self, settings, self.clock, self.topics)

    def leads(self, partition: int) -> bool:
        return True

    def partition_count(self) -> int:
        return self.partitions

    def open_log(self, partition: int) -> MemoryLog:
        self.opened.append(partition)
        if partition in self.refuse_open:
            raise self.refuse_open[partition]
        return self.logs.setdefault(partition, MemoryLog())

    async def prepare_append(self, partition: int) -> None:
        pass

    @property
    def log(self) -> MemoryLog:
        return self.logs.setdefault(partition_of_key("g", self.partitions), MemoryLog())

    async def restart(self) -> None:
        await self.coordinator.close()
        self.coordinator = GroupCoordinator(self, self.settings, self.clock, self.topics)
        await self.coordinator.start()

    async def commit(self, offset: int, group_id: str = "g", **changes: Any) -> ErrorCode:
        request = OffsetCommitRequest(group_id, [OffsetToCommit("t", 0, offset)], **changes)
        return (await self.coordinator.commit_offsets(request))[T0]

    async def fetch(self, group_id: str = "g") -> int:
        return (await self.coordinator.fetch_offsets(group_id, [T0])).offsets[T0].offset

    def start_join(self, member_id: str = "", **changes: Any) -> asyncio.Task[JoinReply]:
        values: dict[str, Any] = {"rebalance_timeout_ms": 20_000, "client_id": "c", "version": 3} | changes
        protocols = (JoinProtocol("range", values.pop("metadata", b"m")),)
        request = JoinRequest(values.pop("group_id", "g"), member_id, "consumer", protocols, 10_000, **values)
        return asyncio.get_running_loop().create_task(self.coordinator.join(request))

    def start_sync(self, member_id: str, generation: int, **parts: bytes) -> asyncio.Task[SyncReply]:
        request = SyncRequest("g", member_id, generation, parts)
        return asyncio.get_running_loop().create_task(self.coordinator.sync(request))

    async def heartbeat(self, member_id: str, generation: int) -> ErrorCode:
        return await self.coordinator.heartbeat(HeartbeatRequest("g", member_id, generation))

    async def stable_member(self) -> str:
        join = self.start_join()
        await self.clock_until(join)
        member_id = join.result().member_id
        request = SyncRequest("g", member_id, join.result().generation, {member_id: b"part"})
        reply = await self.coordinator.sync(request)
        assert (reply.error, reply.assignment) == (NONE, b"part")
        return member_id

    async def clock_until(self, task: asyncio.Task[Any]) -> None:
        for _ in range(1_000):
            await self.clock.advance(100)
            if task.done():
                return
        raise AssertionError("never answered")


@pytest.fixture
async def node() -> AsyncIterator[Node]:
    node = Node(GroupSettings(initial_rebalance_delay_ms=3_000), partitions=3)
    yield node
    await node.coordinator.close()
    await settle()
    assert node.clock.timers == {}
    assert asyncio.all_tasks() == {asyncio.current_task()}


class TestDurability:
    async def test_a_commit_is_answered_when_it_is_committed(self, node: Node) -> None:
        node.log.syncs_at_once = False
        answer = asyncio.create_task(node.commit(7))
        await settle()
        assert not answer.done()
        node.log.sync()
        assert await answer is NONE

    async def test_a_read_waits_for_what_was_appended_before_it(self, node: Node) -> None:
        await node.commit(1)
        node.log.syncs_at_once = False
        write = asyncio.create_task(node.commit(2))
        await settle()
        reads: list[asyncio.Task[Any]] = [
            asyncio.create_task(node.fetch()),
            asyncio.create_task(node.coordinator.list_groups()),
            asyncio.create_task(node.coordinator.describe_groups(["g"])),
        ]
        await settle()
        assert not any(task.done() for task in reads)
        node.log.sync()
        assert await reads[0] == 2
        assert await write is NONE
        await asyncio.gather(*reads)

    async def test_later_appends_do_not_hold_back_an_earlier_answer(self, node: Node) -> None:
        node.log.syncs_at_once = False
        first = asyncio.create_task(node.commit(1))
        await settle()
        second = asyncio.create_task(node.commit(2))
        await settle()
        node.log.sync_one()
        await settle()
        assert first.done()
        assert not second.done()
        node.log.sync()
        assert await second is NONE

    async def test_a_heartbeat_does_not_wait(self, node: Node) -> None:
        member = await node.stable_member()
        node.log.syncs_at_once = False
        commit = asyncio.create_task(node.commit(1, generation=1, member_id=member))
        await settle()
        assert await node.heartbeat(member, 1) is NONE
        node.log.sync()
        assert await commit is NONE

    async def test_assignments_leave_when_they_are_committed(self, node: Node) -> None:
        joins = [node.start_join(), node.start_join()]
        await node.clock_until(joins[0])
        leader, follower = (join.result().member_id for join in joins)
        node.log.syncs_at_once = False
        syncs = [node.start_sync(follower, 1), node.start_sync(leader, 1, **{follower: b"f", leader: b"l"})]
        await settle()
        late = node.start_sync(follower, 1)
        await settle()
        assert not any(sync.done() for sync in (*syncs, late))
        node.log.sync()
        assert [(await sync).assignment for sync in (*syncs, late)] == [b"f", b"l", b"f"]


class TestFailures:
    async def test_a_full_disk_refuses_and_changes_nothing(self, node: Node) -> None:
        await node.commit(1)
        node.log.refuse_with = DiskFull("no room")
        assert await node.commit(2) is ErrorCode.coordinator_not_available
        assert await node.fetch() == 1
        node.log.refuse_with = None
        assert await node.commit(3) is NONE
        assert node.opened.count(partition_of_key("g", 3)) == 1

    async def test_a_full_disk_refuses_a_first_join_without_a_trace(self, node: Node) -> None:
        node.log.refuse_with = DiskFull("no room")
        # A code that the application gets to see: the others are retried for ever without a word.
        assert (await node.start_join()).error is ErrorCode.unknown_server_error
        assert (await node.coordinator.list_groups()).groups == ()

    async def test_members_come_and_go_in_the_space_of_the_reserve_but_commits_do_not_take_it(
        self, node: Node
    ) -> None:
        await node.commit(1)
        node.log.refuse_with, node.log.has_reserve = DiskFull("no room"), True
        assert await node.commit(2) is ErrorCode.coordinator_not_available
        assert node.log.has_reserve
        await node.stable_member()
        assert not node.log.has_reserve

    async def test_what_is_due_is_tried_again_while_the_disk_is_full(
        self, node: Node, caplog: pytest.LogCaptureFixture
    ) -> None:
        await node.stable_member()
        node.log.refuse_with = DiskFull("no room")
        await node.clock.advance(15_000)
        [described] = await node.coordinator.describe_groups(["g"])
        assert described.state == "Stable"
        assert "cannot be persisted" in caplog.text
        node.log.refuse_with = None
        await node.clock.advance(1_000)
        [described] = await node.coordinator.describe_groups(["g"])
        assert described.state == "Empty"

    async def test_a_log_that_stops_takes_its_shard_along(self, node: Node) -> None:
        await node.commit(1)
        node.log.syncs_at_once = False
        answer = asyncio.create_task(node.commit(2))
        await settle()
        node.log.fail_sync()
        assert await answer is ErrorCode.not_coordinator
        node.log.syncs_at_once = True
        assert await node.fetch() == 1
        assert node.opened.count(partition_of_key("g", 3)) == 2

    async def test_whoever_waits_in_a_group_is_told_when_the_log_stops(self, node: Node) -> None:
        join = node.start_join()
        await settle()
        node.log.syncs_at_once = False
        commit = asyncio.create_task(node.commit(1, group_id=other_group_in_the_same_shard()))
        await settle()
        node.log.fail_sync()
        assert (await join).error is ErrorCode.not_coordinator
        assert await commit is ErrorCode.not_coordinator

    async def test_lost_leadership_stops_the_shard(self, node: Node) -> None:
        await node.commit(1)
        partition = partition_of_key("g", 3)
        node.log.refuse_with = ApiError(ErrorCode.not_leader_or_follower, "another node leads")
        node.refuse_open[partition] = ApiError(ErrorCode.not_coordinator, "another node leads")
        assert await node.commit(2) is ErrorCode.not_coordinator
        assert (await node.coordinator.fetch_offsets("g", None)).error is ErrorCode.not_coordinator
        assert (await node.coordinator.list_groups()).error is NONE

    async def test_a_corrupt_record_keeps_its_shard_from_serving_and_is_reported(
        self, node: Node, caplog: pytest.LogCaptureFixture
    ) -> None:
        await node.commit(1)
        node.log.append([(b"\x00\x01junk", b"junk")])
        await node.restart()
        assert await node.commit(2) is ErrorCode.unknown_server_error
        assert "at offset 1" in caplog.text
        assert (await node.coordinator.list_groups()).error is ErrorCode.unknown_server_error
        ((place, damage),) = node.coordinator.damaged().items()
        assert (place, damage.path, damage.position) == (("__consumer_offsets", 1), "memory.log", 1)
        tries = len(node.opened)
        await node.clock.advance(100_000)
        await node.commit(2)
        assert len(node.opened) == tries, "it is not tried again before the next start"
        await node.coordinator.expire()
        await node.coordinator.on_topics_deleted(["t"])
        del node.log.entries[1:]
        node.log.sync()
        await node.restart()
        assert await node.fetch() == 1
        assert node.coordinator.damaged() == {}

    async def test_a_record_of_an_unknown_kind_is_skipped_with_a_warning(
        self, node: Node, caplog: pytest.LogCaptureFixture
    ) -> None:
        await node.commit(1)
        node.log.append([(b"\x00\x63new", b"new")])
        with caplog.at_level(logging.WARNING):
            await node.restart()
        assert await node.fetch() == 1
        assert "unknown" in caplog.text


class TestTime:
    async def test_a_join_is_answered_by_the_timer(self, node: Node) -> None:
        join = node.start_join()
        await settle()
        assert not join.done()
        await node.clock.advance(3_000)
        assert join.result().generation == 1

    async def test_one_timer_serves_all_groups_of_a_shard(self, node: Node) -> None:
        other = other_group_in_the_same_shard()
        joins = [node.start_join(), node.start_join(group_id=other)]
        await settle()
        assert len(node.clock.timers) == 1
        await node.clock.advance(3_000)
        assert all(join.result().generation == 1 for join in joins)

    async def test_heartbeats_keep_a_session_and_silence_ends_it(self, node: Node) -> None:
        member = await node.stable_member()
        for _ in range(5):
            await node.clock.advance(9_000)
            assert await node.heartbeat(member, 1) is NONE
        await node.clock.advance(10_000)
        assert await node.heartbeat(member, 1) is ErrorCode.unknown_member_id

    async def test_retention_removes_offsets_and_the_group(self, node: Node) -> None:
        await node.commit(1)
        node.clock.ms += node.settings.offsets_retention_ms
        await node.coordinator.expire()
        assert await node.fetch() == -1
        assert (await node.coordinator.list_groups()).groups == ()

    async def test_the_loop_clock_fires_at_its_time_and_not_before(self) -> None:
        clock = LoopClock()
        fired: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        due_ms = clock.now_ms() + 5
        clock.call_at(due_ms, lambda: fired.set_result(clock.now_ms()))
        assert await fired >= due_ms


class TestCancellation:
    async def test_a_cancelled_join_stays_a_member_until_its_time_is_up(self, node: Node) -> None:
        join = node.start_join()
        await settle()
        join.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await join
        other = node.start_join()
        await node.clock_until(other)
        assert other.result().error is NONE
        [described] = await node.coordinator.describe_groups(["g"])
        assert len(described.members) == 2
        await node.clock.advance(30_000)
        [described] = await node.coordinator.describe_groups(["g"])
        assert described.state == "Empty"

    async def test_a_cancelled_commit_still_happens(self, node: Node) -> None:
        node.log.syncs_at_once = False
        commit = asyncio.create_task(node.commit(5))
        await settle()
        commit.cancel()
        await settle()
        node.log.sync()
        assert await node.fetch() == 5

    async def test_a_request_cancelled_while_loading_does_not_stop_the_loading(self, node: Node) -> None:
        node.log.append([encode_record(OffsetCommitRecord("x", "t", 0, None))] * 5_000)
        first = asyncio.create_task(node.commit(1))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        second = asyncio.create_task(node.commit(2))
        await asyncio.sleep(0)
        assert node.coordinator._shards._loading
        first.cancel()
        assert await second is NONE
        assert node.opened == [partition_of_key("g", 3)]

    async def test_closing_answers_whoever_waits(self, node: Node) -> None:
        join = node.start_join()
        await settle()
        await node.coordinator.close()
        assert (await join).error is ErrorCode.coordinator_not_available
        assert await node.commit(1) is ErrorCode.coordinator_not_available


class TestRestart:
    async def test_members_go_on_and_offsets_are_there(self, node: Node) -> None:
        member = await node.stable_member()
        await node.commit(9, generation=1, member_id=member)
        await node.restart()
        assert await node.heartbeat(member, 1) is NONE
        assert (await node.start_sync(member, 1)).assignment == b"part"
        assert await node.fetch() == 9

    async def test_sessions_start_anew_and_expire_without_a_request(self, node: Node) -> None:
        await node.stable_member()
        await node.clock.advance(9_000)
        await node.restart()
        await node.clock.advance(9_999)
        [described] = await node.coordinator.describe_groups(["g"])
        assert described.state == "Stable"
        await node.clock.advance(1)
        [described] = await node.coordinator.describe_groups(["g"])
        assert described.state == "Empty"

    async def test_a_reloaded_shard_equals_the_live_one(self, node: Node) -> None:
        await node.stable_member()
        for offset in range(5):
            await node.commit(offset, group_id=f"simple-{offset}")
        groups = [f"simple-{offset}" for offset in range(5)] + ["g", "missing"]
        await node.coordinator.delete_groups(["simple-0"])
        before = await self.everything(node, groups)
        await node.restart()
        assert await self.everything(node, groups) == before

    async def everything(self, node: Node, groups: list[str]) -> Any:
        return (
            sorted((await node.coordinator.list_groups()).groups, key=lambda group: group.group_id),
            await node.coordinator.describe_groups(groups),
            [await node.coordinator.fetch_offsets(group, None) for group in groups],
        )


class TestRequests:
    async def test_an_empty_group_id_is_refused_where_kafka_refuses_it(self, node: Node) -> None:
        bad = ErrorCode.invalid_group_id
        coordinator = node.coordinator
        assert (await node.start_join(group_id="")).error is bad
        assert (await coordinator.sync(SyncRequest("", "m", 1))).error is bad
        assert await coordinator.heartbeat(HeartbeatRequest("", "m", 1)) is bad
        assert (await coordinator.leave("", [])).error is bad
        assert (await coordinator.delete_offsets("", [])).error is bad
        assert await node.commit(3, group_id="") is NONE
        assert await node.fetch("") == 3

    async def test_a_session_timeout_out_of_bounds_is_refused(self, node: Node) -> None:
        for timeout_ms in (5_999, 1_800_001):
            request = JoinRequest("g", "", "consumer", (JoinProtocol("range", b""),), timeout_ms)
            assert (await node.coordinator.join(request)).error is ErrorCode.invalid_session_timeout

    async def test_names_too_long_to_be_stored_are_refused(self, node: Node) -> None:
        long = "x" * 40_000
        assert (await node.start_join(instance_id=long)).error is ErrorCode.invalid_request
        assert (await node.start_join(group_id=long)).error is ErrorCode.invalid_group_id
        request = OffsetCommitRequest("g", [OffsetToCommit(long, 0, 1)])
        assert await node.coordinator.commit_offsets(request) == {(long, 0): ErrorCode.invalid_request}
        assert node.log.entries == []

    async def test_member_ids_start_with_what_the_client_is_known_by(self, node: Node) -> None:
        reply = await node.start_join(version=4, client_id="app")
        assert reply.error is ErrorCode.member_id_required
        assert reply.member_id.startswith("app-")
        assert len(reply.member_id) == len("app-") + 36

    async def test_leaving_answers_the_others(self, node: Node) -> None:
        joins = [node.start_join(), node.start_join()]
        await node.clock_until(joins[0])
        leader, follower = (join.result().member_id for join in joins)
        waiting = node.start_sync(follower, 1)
        await settle()
        answer = await node.coordinator.leave("g", [LeavingMember(leader)])
        assert answer.members[0].error is NONE
        assert (await waiting).error is ErrorCode.rebalance_in_progress

    async def test_offsets_are_deleted_by_partition_by_topic_and_by_group(self, node: Node) -> None:
        await node.commit(1)
        deleted = await node.coordinator.delete_offsets("g", [T0])
        assert deleted.partitions == {T0: NONE}
        assert await node.fetch() == -1
        await node.commit(1)
        await node.coordinator.on_topics_deleted(["t"])
        assert await node.fetch() == -1
        await node.commit(1)
        assert await node.coordinator.delete_groups(["g", "nope"]) == {
            "g": NONE,
            "nope": ErrorCode.group_id_not_found,
        }
        assert (await node.coordinator.fetch_offsets("g", [T0])).offsets == {T0: CommittedOffset()}

    async def test_a_topic_s_offsets_that_cannot_be_deleted_are_reported(self, node: Node) -> None:
        await node.commit(1)
        node.log.refuse_with = DiskFull("no room")
        with pytest.raises(DiskFull):
            await node.coordinator.on_topics_deleted(["t"])
        assert await node.fetch() == 1

    async def test_a_commit_of_many_partitions_is_one_batch(self, node: Node) -> None:
        request = OffsetCommitRequest("g", [OffsetToCommit("t", number, 1) for number in range(100)])
        await node.coordinator.commit_offsets(request)
        assert node.log.append_sizes == [100]


class TestMemory:
    """What members say and are assigned is bounded for all groups of the node together."""

    REFUSED = ErrorCode.group_max_size_reached

    async def fill(self, node: Node, host: str) -> int:
        """Have a client join one group after the other until it is refused; gives how many took it in."""
        for number in range(1_000):
            join = node.start_join(group_id=f"{host}-{number}", client_host=host, metadata=bytes(10_000))
            await settle()
            if join.done():
                assert join.result().error is self.REFUSED
                return number
        raise AssertionError("never refused")

    @pytest.fixture(autouse=True)
    def small(self, node: Node) -> None:
        node.coordinator.member_memory.limit_bytes = 1_300_000

    async def test_many_groups_of_one_client_leave_memory_to_others(self, node: Node) -> None:
        assert 60 < await self.fill(node, "10.0.0.1") < 76
        assert 10 < await self.fill(node, "10.0.0.2") < 20
        assert node.coordinator.member_memory.taken_bytes < 1_300_000

    async def test_names_of_protocols_count_as_well(self, node: Node) -> None:
        protocols = tuple(JoinProtocol(f"{number}".ljust(30_000), b"") for number in range(35))
        request = JoinRequest("g", "", "consumer", protocols, 10_000)
        assert (await node.coordinator.join(request)).error is self.REFUSED

    async def test_a_member_that_comes_back_is_not_counted_twice(self, node: Node) -> None:
        node.coordinator.member_memory.limit_bytes = 30_000
        join = node.start_join(metadata=bytes(15_000))
        await node.clock_until(join)
        again = node.start_join(join.result().member_id, metadata=bytes(15_001))
        await node.clock_until(again)
        assert again.result().error is NONE

    async def test_assignments_count_as_well(self, node: Node) -> None:
        join = node.start_join()
        await node.clock_until(join)
        member_id, generation = join.result().member_id, join.result().generation
        large = await node.start_sync(member_id, generation, **{member_id: bytes(1_000_000)})
        assert large.error is self.REFUSED
        small = await node.start_sync(member_id, generation, **{member_id: bytes(900_000)})
        assert small.error is NONE
        assert node.coordinator.member_memory.taken_bytes > 900_000

    async def test_what_members_took_is_free_when_they_leave(self, node: Node) -> None:
        member_id = await node.stable_member()
        assert node.coordinator.member_memory.taken_bytes > 0
        with_member = node.coordinator.member_memory.taken_bytes
        await node.coordinator.leave("g", [LeavingMember(member_id)])
        assert node.coordinator.member_memory.taken_bytes <= with_member - MEMBER_BYTES
        await node.coordinator.delete_groups(["g"])
        assert node.coordinator.member_memory.taken_bytes == 0

    async def test_groups_that_nobody_is_in_count_until_they_expire(self, node: Node) -> None:
        for number in range(1_000):
            reply = await node.start_join(group_id=f"never-{number}", client_host="h", version=4)
            if reply.error is self.REFUSED:
                break
            assert reply.error is ErrorCode.member_id_required
        assert 200 < number < 400
        await node.clock.advance(30_000)
        await node.coordinator.expire()
        assert node.coordinator.member_memory.taken_bytes == 0

    async def test_members_of_consumer_groups_share_the_memory(self, node: Node) -> None:
        topics = frozenset(f"a-topic-that-does-not-exist-{number}" for number in range(100))
        for number in range(1_000):
            request = ConsumerHeartbeatRequest(
                f"g{number}", "a", 0, None, None, 60_000, topics, owned=frozenset(), client_host="10.0.0.1"
            )
            reply = await node.coordinator.consumer_heartbeat(request)
            if reply.error is self.REFUSED:
                break
            assert (reply.error, reply.member_epoch) == (NONE, 1)
        else:
            raise AssertionError("never refused")
        assert 40 < number < 70
        assert "limits.md" in str(reply.message)
        # Those who are in stay, classic groups are refused as well, and other addresses have a share.
        alive = ConsumerHeartbeatRequest("g0", "a", 1, client_host="10.0.0.1")
        assert (await node.coordinator.consumer_heartbeat(alive)).error is NONE
        assert await self.fill(node, "10.0.0.1") < 5
        assert await self.fill(node, "10.0.0.2") > 10
        leaving = ConsumerHeartbeatRequest("g0", "a", -1, client_host="10.0.0.1")
        taken = node.coordinator.member_memory.taken_bytes
        assert (await node.coordinator.consumer_heartbeat(leaving)).error is NONE
        assert node.coordinator.member_memory.taken_bytes < taken - 10_000

    async def test_what_is_assigned_in_a_large_group_counts_before_it_is_stored(self, node: Node) -> None:
        node.topics.create("wide", 20_000)
        request = heartbeat_of("a", regex="wide", client_host="h")
        reply = await node.coordinator.consumer_heartbeat(request)
        assert reply.error is self.REFUSED
        assert node.log.entries == []
        joining = ShareHeartbeatRequest("s", "m", 0, topics=frozenset(["wide"]), client_host="h")
        assert (await node.coordinator.share.heartbeat(joining)).error is self.REFUSED
        assert all(log.entries == [] for log in node.logs.values())

    async def test_members_of_share_groups_share_the_memory(self, node: Node) -> None:
        topics = frozenset(f"a-topic-that-does-not-exist-{number}" for number in range(100))
        for number in range(1_000):
            request = ShareHeartbeatRequest(f"s{number}", "m", 0, topics=topics, client_host="10.0.0.1")
            reply = await node.coordinator.share.heartbeat(request)
            if reply.error is self.REFUSED:
                break
            assert reply.error is NONE
        assert 40 < number < 70
        alive = ShareHeartbeatRequest("s0", "m", 1, client_host="10.0.0.1")
        assert (await node.coordinator.share.heartbeat(alive)).error is NONE
        await node.restart()
        await node.coordinator.start()
        assert node.coordinator.member_memory.taken_bytes > 700_000

    async def test_it_is_counted_again_after_a_restart(self, node: Node) -> None:
        await node.stable_member()
        taken = node.coordinator.member_memory.taken_bytes
        old = node.coordinator
        await node.restart()
        assert old.member_memory.taken_bytes == 0
        await node.fetch()
        assert node.coordinator.member_memory.taken_bytes == taken > 0


class TestMemoryOfOffsets:
    """What groups commit is bounded for all groups of the node together."""

    REFUSED = ErrorCode.invalid_commit_offset_size

    @pytest.fixture(autouse=True)
    def small(self, node: Node) -> None:
        node.coordinator.committed_memory.limit_bytes = 1_000_000

    async def fill(self, node: Node, host: str) -> int:
        """Have a client commit in one group after the other until it is refused; gives how many took it."""
        for number in range(10_000):
            error = await node.commit(1, f"{host}-{number}", client_host=host)
            if error is not NONE:
                assert error is self.REFUSED
                return number
        raise AssertionError("never refused")

    async def test_many_groups_of_one_client_leave_memory_to_others(self, node: Node) -> None:
        assert 200 < await self.fill(node, "10.0.0.1") < 320
        assert 40 < await self.fill(node, "10.0.0.2") < 80
        assert node.coordinator.committed_memory.taken_bytes < 1_000_000
        # Nobody is kept from going on.
        assert await node.commit(2, "10.0.0.1-0", client_host="10.0.0.1") is NONE

    async def test_metadata_counts_as_well(self, node: Node) -> None:
        entries = [OffsetToCommit("t", number, 1, metadata="m" * 4_000) for number in range(250)]
        request = OffsetCommitRequest("g", entries, client_host="h")
        assert set((await node.coordinator.commit_offsets(request)).values()) == {self.REFUSED}
        assert node.log.entries == []

    async def test_what_is_pending_counts_until_its_transaction_ends(self, node: Node) -> None:
        def asked(producer_id: int) -> TransactionalCommitRequest:
            entries = [OffsetToCommit("t", number, 1, metadata="m" * 1_000) for number in range(100)]
            return TransactionalCommitRequest(
                OffsetCommitRequest("g", entries, client_host="h"), producer_id, 0
            )

        memory = node.coordinator.committed_memory
        answers = [await node.coordinator.commit_transactional_offsets(asked(n)) for n in range(10)]
        codes = [answer[T0] for answer in answers]
        taken_in = codes.index(self.REFUSED)
        assert 2 < taken_in < 8
        assert codes == [NONE] * taken_in + [self.REFUSED] * (10 - taken_in)
        assert await node.coordinator.commit_transactional_offsets(asked(0)) == answers[0], "the same again"
        partition = partition_of_key("g", node.partitions)
        for producer_id in range(taken_in):
            await node.coordinator.complete_transaction(
                partition, producer_id, 0, commit=producer_id == 0, coordinator_epoch=0
            )
        assert 120_000 < memory.taken_bytes < 140_000
        await node.coordinator.on_topics_deleted(["t"])
        assert memory.taken_bytes == 0

    async def test_what_is_stored_is_loaded_whatever_the_limit(self, node: Node) -> None:
        count = await self.fill(node, "10.0.0.1")
        taken = node.coordinator.committed_memory.taken_bytes
        old = node.coordinator
        await node.restart()
        assert old.committed_memory.taken_bytes == 0
        memory = node.coordinator.committed_memory
        memory.limit_bytes = 100_000
        assert await node.fetch(f"10.0.0.1-{count - 1}") == 1
        assert memory.taken_bytes == taken
        # Whose they are is known again when somebody commits.
        assert await node.commit(2, "10.0.0.1-0", client_host="10.0.0.1") is NONE
        assert await node.commit(2, "new", client_host="10.0.0.2") is self.REFUSED
        await node.coordinator.delete_groups([f"10.0.0.1-{number}" for number in range(count)])
        assert memory.taken_bytes == 0
        assert await node.commit(2, "new", client_host="10.0.0.2") is NONE


class TestTurns:
    """What is done for all groups, or for a group of very many offsets, is done in many turns of the loop."""

    PARTITIONS = 3_500

    async def turns_during(self, work: Awaitable[object]) -> int:
        """How many turns others get while something is done."""
        task, turns = asyncio.ensure_future(work), 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0)
        await task
        return turns

    @pytest.fixture
    async def wide(self, node: Node) -> None:
        entries = [OffsetToCommit("t", number, 1) for number in range(self.PARTITIONS)]
        await node.coordinator.commit_offsets(OffsetCommitRequest("g", entries, retention_ms=0))

    async def test_a_group_is_deleted_some_offsets_at_a_time(self, node: Node, wide: None) -> None:
        assert await node.coordinator.delete_groups(["g"]) == {"g": NONE}
        assert node.log.append_sizes[1:] == [1_000, 1_000, 1_000, 501]
        assert await self.turns_during(node.coordinator.fetch_offsets("g", None)) < 10

    async def test_offsets_of_a_topic_are_forgotten_some_at_a_time(self, node: Node, wide: None) -> None:
        assert await self.turns_during(node.coordinator.on_topics_deleted(["t"])) > 3
        assert await node.fetch() == -1

    async def test_offsets_expire_some_at_a_time(self, node: Node, wide: None) -> None:
        assert await self.turns_during(node.coordinator.expire()) > 3
        assert await node.fetch() == -1
        assert node.coordinator.committed_memory.taken_bytes == 0

    async def test_very_many_groups_are_loaded_some_at_a_time(self, node: Node) -> None:
        for number in range(2_000):
            await node.commit(1, f"g{number}")
        await node.coordinator.close()
        node.coordinator = GroupCoordinator(node, node.settings, node.clock, node.topics)
        assert await self.turns_during(node.coordinator.start()) > 10
        assert await self.turns_during(node.coordinator.expire()) > 3
        assert await node.fetch("g7") == 1

    async def test_a_transaction_has_as_many_offsets_as_one_turn_can_settle(self, node: Node) -> None:
        entries = [OffsetToCommit("t", number, 1) for number in range(2_500)]
        request = TransactionalCommitRequest(OffsetCommitRequest("g", entries), 1, 0)
        assert (await node.coordinator.commit_transactional_offsets(request))[T0] is NONE
        refused = ErrorCode.invalid_commit_offset_size
        assert (await node.coordinator.commit_transactional_offsets(request))[T0] is refused

    async def test_ids_that_nobody_joins_with_are_bounded(self, node: Node) -> None:
        for _ in range(5_000):
            assert (await node.start_join(version=4)).error is ErrorCode.member_id_required
        assert (await node.start_join(version=4)).error is ErrorCode.group_max_size_reached


class TestPartitions:
    @pytest.mark.parametrize(
        ("group_id", "java_hash"),
        [("", 0), ("a", 97), ("hello", 99162322), ("polygenelubricants", -(2**31)), ("\U0001f600", 1772899)],
    )
    def test_the_partition_follows_java_s_hash(self, group_id: str, java_hash: int) -> None:
        assert partition_of_key(group_id, 50) == (java_hash & 0x7FFFFFFF) % 50

    async def test_shards_load_when_first_asked_for(self, node: Node) -> None:
        await node.commit(1)
        assert node.opened == [partition_of_key("g", 3)]
        await node.coordinator.start()
        assert sorted(node.opened) == [0, 1, 2]


def other_group_in_the_same_shard() -> str:
    target = partition_of_key("g", 3)
    return next(name for name in (f"other-{n}" for n in range(100)) if partition_of_key(name, 3) == target)


# --- large consumer groups: changed in a thread, on a copy


class Gate:
    """Lets a test act while the thread works on a group, and counts how often it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        self.entered = threading.Event()
        self.opened = threading.Event()
        self.opened.set()
        run = GroupDraft.run

        def gated(draft: GroupDraft, event: Any) -> Any:
            self.runs += 1
            self.entered.set()
            assert self.opened.wait(120)
            assert threading.current_thread() is not threading.main_thread()
            return run(draft, event)

        monkeypatch.setattr(GroupDraft, "run", gated)


@pytest.fixture
def gate(node: Node, monkeypatch: pytest.MonkeyPatch) -> Gate:
    for number in range(700):
        node.topics.create(f"t{number}", 1)
    return Gate(monkeypatch)


def heartbeat_of(member_id: str, epoch: int = 0, **fields: Any) -> ConsumerHeartbeatRequest:
    full: dict[str, Any] = {"owned": frozenset(), "regex": "t.*", "rebalance_timeout_ms": 60_000}
    return ConsumerHeartbeatRequest("g", member_id, epoch, **((full if epoch == 0 else {}) | fields))


@pytest.mark.parametrize("how", ["pattern", "grown topic", "classic member"])
async def test_a_wide_topic_is_assigned_in_a_thread_however_it_is_named(
    node: Node, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    gate = Gate(monkeypatch)
    node.topics.create("wide", 1)
    first = heartbeat_of("a", regex=None, topics=frozenset(["wide"]))
    if how == "pattern":
        first = heartbeat_of("a", regex="wide")
    else:
        assert (await node.coordinator.consumer_heartbeat(first)).error is NONE
        assert gate.runs == 0
    node.topics.create("other" if how == "classic member" else "wide", 5_000)
    if how == "classic member":
        reply = await node.start_join(metadata=pack_subscription(["other"]))
        assert reply.error is NONE
    else:
        again = first if how == "pattern" else heartbeat_of("a", 1)
        assert (await node.coordinator.consumer_heartbeat(again)).error is NONE
    assert gate.runs == 1


async def test_a_large_group_is_changed_in_a_thread_and_is_durable(node: Node, gate: Gate) -> None:
    reply = await node.coordinator.consumer_heartbeat(heartbeat_of("a"))
    assert (reply.error, reply.member_epoch, len(reply.assignment or ())) == (NONE, 1, 700)
    assert gate.runs == 1
    await node.restart()
    (described,) = await node.coordinator.describe_consumer_groups(["g"])
    assert [(member.member_id, len(member.assignment)) for member in described.members] == [("a", 700)]


async def test_a_heartbeat_that_changes_nothing_does_not_wait_for_the_thread(node: Node, gate: Gate) -> None:
    await node.coordinator.consumer_heartbeat(heartbeat_of("a"))
    gate.opened.clear()
    gate.entered.clear()
    joining = asyncio.ensure_future(node.coordinator.consumer_heartbeat(heartbeat_of("b")))
    await asyncio.to_thread(gate.entered.wait, 120)
    reply = await node.coordinator.consumer_heartbeat(heartbeat_of("a", 1))
    assert (reply.error, reply.member_epoch, reply.assignment) == (NONE, 1, None)
    assert not joining.done()
    gate.opened.set()
    assert (await joining).member_epoch == 2


@pytest.mark.parametrize("is_new", [True, False])
async def test_the_work_is_done_again_if_the_group_has_changed_meanwhile(
    node: Node, gate: Gate, is_new: bool
) -> None:
    if not is_new:
        await node.coordinator.consumer_heartbeat(heartbeat_of("z", regex=None, topics=frozenset({"t1"})))
    gate.opened.clear()
    joining = asyncio.ensure_future(node.coordinator.consumer_heartbeat(heartbeat_of("b")))
    await asyncio.to_thread(gate.entered.wait, 120)
    # By name and small, so it is not kept waiting.
    small = heartbeat_of("a", regex=None, topics=frozenset({"t1"}))
    epoch = 1 if is_new else 2
    assert (await node.coordinator.consumer_heartbeat(small)).member_epoch == epoch
    gate.opened.set()
    reply = await joining
    assert (reply.error, reply.member_epoch, gate.runs) == (NONE, epoch + 1, 2)
    (described,) = await node.coordinator.describe_consumer_groups(["g"])
    assert {"a", "b"} <= {member.member_id for member in described.members}
    targets = [topic.name for member in described.members for topic in member.target]
    assert len(targets) == len(set(targets)) == 700


async def test_overdue_members_of_a_large_group_are_removed_in_a_thread(node: Node, gate: Gate) -> None:
    await node.coordinator.consumer_heartbeat(heartbeat_of("a"))
    await node.coordinator.consumer_heartbeat(heartbeat_of("b"))
    before = gate.runs
    gate.entered.clear()
    await node.clock.advance(node.settings.consumer_session_timeout_ms + 1)
    await asyncio.to_thread(gate.entered.wait, 120)
    (described,) = await node.coordinator.describe_consumer_groups(["g"])
    assert (described.state, described.members) == ("Empty", ())
    assert gate.runs == before + 1, "both at once"


async def test_a_group_of_too_many_topics_is_refused_with_what_to_do(
    node: Node, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.groups.consumer.draft._RECORDS_BYTES_MAX", 10_000)
    reply = await node.coordinator.consumer_heartbeat(heartbeat_of("a"))
    assert reply.error is ErrorCode.invalid_request
    assert "subscribe to fewer topics" in str(reply.message)
    assert node.log.end_offset == 0
