"""Share groups with a persister: what happens when, what is told before, and what a failure leaves."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest

from support.consumer_groups import FakeTopics
from support.coordination import MemoryLog, OneLog, VirtualClock, settle
from support.share_groups import FakePersister
from tidemill.coordination.share_state import NO_START, SharePartitionKey
from tidemill.errors import ApiError, DiskFull, ErrorCode
from tidemill.groups.consumer.messages import Refused
from tidemill.groups.coordinator import GroupCoordinator
from tidemill.groups.settings import GroupSettings
from tidemill.groups.share.messages import ShareHeartbeatReply, ShareHeartbeatRequest

NONE = ErrorCode.none
DOWN = ApiError(ErrorCode.coordinator_not_available, "the share coordinator is away")


class World:
    """A group coordinator over one log in memory, and a persister in memory."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.log = MemoryLog()
        self.topics = FakeTopics(t=3, u=1)
        self.persister = FakePersister()
        self.coordinator = self.make()

    def make(self) -> GroupCoordinator:
        return GroupCoordinator(
            OneLog(self.log), GroupSettings(), self.clock, self.topics, persister=lambda: self.persister
        )

    async def restart(self) -> None:
        """Another node leads the group."""
        await self.coordinator.close()
        self.coordinator = self.make()
        await self.coordinator.start()

    async def beat(self, member_id: str, epoch: int, *topics: str) -> ShareHeartbeatReply:
        wanted = frozenset(topics) if topics else None
        request = ShareHeartbeatRequest("g", member_id, epoch, topics=wanted)
        return await self.coordinator.share.heartbeat(request)

    async def delete(self) -> ErrorCode:
        return (await self.coordinator.delete_groups(["g"]))["g"]

    def told(self, reply: ShareHeartbeatReply) -> set[tuple[str, int]] | None:
        return None if reply.assignment is None else self.topics.named(reply.assignment)

    def key(self, name: str, index: int) -> SharePartitionKey:
        topic = self.topics.find(name)
        assert topic is not None
        return SharePartitionKey("g", topic.id, index)

    def id(self, name: str) -> UUID:
        return self.key(name, 0).topic_id


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    # A slow machine must not change what a join is answered.
    monkeypatch.setattr("tidemill.groups.share.coordinator._JOIN_WAIT_S", 120.0)
    world = World()
    yield world
    await world.coordinator.close()
    await settle()
    assert world.clock.timers == {}
    assert asyncio.all_tasks() == {asyncio.current_task()}


class TestInitializing:
    async def test_a_member_that_joins_is_told_what_was_initialized_for_it(self, world: World) -> None:
        joined = await world.beat("m", 0, "t")
        assert (joined.error, world.told(joined)) == (NONE, world.topics.all("t"))
        assert world.persister.starts() == dict.fromkeys(range(3), NO_START)
        assert {state.state_epoch for state in world.persister.states.values()} == {1}
        assert joined.member_epoch == 2
        stays = await world.beat("m", 2)
        assert (stays.error, stays.member_epoch, stays.assignment) == (NONE, 2, None)

    async def test_members_that_join_together_wait_for_the_same(self, world: World) -> None:
        world.persister.goes_on.clear()
        joins = [asyncio.create_task(world.beat(f"m{number}", 0, "t")) for number in range(5)]
        await settle()
        assert not any(join.done() for join in joins)
        world.persister.goes_on.set()
        replies = await asyncio.gather(*joins)
        told = [world.told(reply) for reply in replies]
        assert all(told)
        assert len(world.persister.calls) == 3

    async def test_one_that_takes_long_does_not_hold_a_heartbeat(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("tidemill.groups.share.coordinator._JOIN_WAIT_S", 0.01)
        world.persister.goes_on.clear()
        joined = await world.beat("m", 0, "t")
        assert (joined.error, joined.member_epoch, world.told(joined)) == (NONE, 1, set())
        stays = await world.beat("m", 1)
        assert (stays.error, stays.assignment) == (NONE, None)
        world.persister.goes_on.set()
        await settle()
        assert world.told(await world.beat("m", 1)) == world.topics.all("t")

    async def test_a_persister_that_fails_never_fails_a_heartbeat(
        self, world: World, caplog: pytest.LogCaptureFixture
    ) -> None:
        world.persister.fail_with = DOWN
        with caplog.at_level(logging.WARNING):
            joined = await world.beat("m", 0, "t")
        assert (joined.error, world.told(joined)) == (NONE, set())
        assert "3 share partitions could not be initialized" in caplog.text
        assert "is away" in caplog.text
        world.persister.fail_with = None
        await world.clock.advance(5_000)
        assert world.told(await world.beat("m", 1)) == world.topics.all("t")

    async def test_a_topic_of_which_a_part_failed_is_begun_again_as_a_whole(self, world: World) -> None:
        world.persister.fail_with, world.persister.fails = DOWN, frozenset({2})
        await world.beat("m", 0, "t")
        world.persister.fail_with = None
        await world.clock.advance(5_000)
        assert world.told(await world.beat("m", 1)) == world.topics.all("t")
        assert world.persister.starts() == dict.fromkeys(range(3), NO_START)

    async def test_nothing_is_told_before_it_is_committed(self, world: World) -> None:
        world.log.syncs_at_once = False
        join = asyncio.create_task(world.beat("m", 0, "t"))
        await settle()
        assert not world.persister.calls
        world.log.sync()
        await settle()
        assert world.persister.starts() == dict.fromkeys(range(3), NO_START)
        assert not join.done()
        for _ in range(3):
            world.log.sync()
            await settle()
        assert world.told(await join) == world.topics.all("t")

    async def test_the_next_leader_goes_on(self, world: World) -> None:
        world.persister.goes_on.clear()
        join = asyncio.create_task(world.beat("m", 0, "t"))
        await settle()
        await world.restart()
        # The answer that was on its way says that there is nothing to read yet.
        assert (await join).assignment in (None, frozenset())
        world.persister.goes_on.set()
        await world.clock.advance(1_000)
        assert world.told(await world.beat("m", 1)) == world.topics.all("t")

    async def test_a_leader_that_was_deposed_notes_nothing(self, world: World) -> None:
        world.persister.goes_on.clear()
        join = asyncio.create_task(world.beat("m", 0, "t"))
        await settle()
        entries = len(world.log.entries)
        world.log.lose_leadership()
        world.persister.goes_on.set()
        await settle()
        assert len(world.log.entries) == entries
        assert (await join).member_epoch == 1

    async def test_state_that_an_earlier_group_left_is_begun_anew(self, world: World) -> None:
        world.persister.states[world.key("t", 1)] = (await self.left_over(world))._replace(start_offset=77)
        joined = await world.beat("m", 0, "t")
        assert joined.error is NONE
        await world.clock.advance(5_000)
        assert world.told(await world.beat("m", joined.member_epoch)) == world.topics.all("t")
        assert world.persister.starts() == dict.fromkeys(range(3), NO_START)

    async def left_over(self, world: World) -> Any:
        await world.persister.initialize(world.key("t", 1), 12, 0)
        return world.persister.states[world.key("t", 1)]

    async def test_a_full_disk_is_told_to_the_application(self, world: World) -> None:
        world.log.refuse_with = DiskFull("no space")
        assert (await world.beat("m", 0, "t")).error is ErrorCode.unknown_server_error

    async def test_an_accident_is_logged_and_tried_again(
        self, world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(world.persister, "initialize", None)
            joined = await world.beat("m", 0, "t")
        assert (joined.error, world.told(joined)) == (NONE, set())
        assert "work on the state of a share group failed" in caplog.text
        await world.clock.advance(30_000)
        assert world.told(await world.beat("m", 1)) == world.topics.all("t")

    async def test_a_large_group_is_worked_out_in_a_thread(self, world: World) -> None:
        world.topics.create("wide", 2_000)
        joined = await world.beat("m", 0, "wide")
        assert joined.assignment is not None
        assert len(joined.assignment) == 2_000
        other = await world.beat("n", 0, "wide")
        assert other.assignment is not None
        assert len(other.assignment) == 1_000
        moved = await world.beat("m", joined.member_epoch)
        assert moved.assignment is not None
        assert not moved.assignment & other.assignment
        await world.restart()
        (described,) = [await world.coordinator.share.describe("g")]
        assert [len(member.assigned) for member in described.members] == [1_000, 1_000]

    async def test_refusals_have_their_codes(self, world: World) -> None:
        assert (await world.beat("m", 3)).error is ErrorCode.group_id_not_found
        assert (await world.beat("m" * 37, 0, "t")).error is ErrorCode.invalid_request
        await world.beat("m", 0, "t")
        fenced = await world.beat("m", 9)
        assert fenced.error is ErrorCode.fenced_member_epoch
        assert "join again" in (fenced.message or "")


class TestDeleting:
    async def test_a_group_its_state_and_its_epochs_are_gone(self, world: World) -> None:
        joined = await world.beat("m", 0, "t", "u")
        assert await world.delete() is ErrorCode.non_empty_group
        await world.beat("m", -1)
        assert await world.delete() is NONE
        assert not world.persister.states
        assert await world.delete() is ErrorCode.group_id_not_found
        assert (await world.coordinator.list_groups()).groups == ()
        again = await world.beat("m", 0, "t", "u")
        assert (again.member_epoch, world.told(again)) == (joined.member_epoch, world.told(joined))
        assert {state.state_epoch for state in world.persister.states.values()} == {1}

    async def test_state_that_cannot_be_deleted_keeps_the_group(self, world: World) -> None:
        await world.beat("m", 0, "t")
        await world.beat("m", -1)
        world.persister.fail_with = DOWN
        assert await world.delete() is ErrorCode.coordinator_not_available
        assert len((await world.coordinator.list_groups()).groups) == 1
        world.persister.fail_with = None
        assert await world.delete() is NONE
        assert not world.persister.states

    async def test_state_of_a_deleted_topic_is_deleted_with_retries(self, world: World) -> None:
        await world.beat("m", 0, "t", "u")
        world.persister.fail_with = DOWN
        world.topics.delete("t")
        await world.coordinator.on_topics_deleted(["t"])
        await world.clock.advance(0)
        assert len(world.persister.states) == 4
        world.persister.fail_with = None
        await world.clock.advance(30_000)
        assert list(world.persister.states) == [world.key("u", 0)]
        calls = len(world.persister.calls)
        await world.clock.advance(10_000)
        assert len(world.persister.calls) == calls

    async def test_the_next_leader_deletes_what_is_left(self, world: World) -> None:
        await world.beat("m", 0, "t", "u")
        world.persister.fail_with = DOWN
        world.topics.delete("t")
        await world.coordinator.on_topics_deleted(["t"])
        await world.clock.advance(0)
        world.persister.fail_with = None
        await world.restart()
        await world.clock.advance(0)
        assert list(world.persister.states) == [world.key("u", 0)]

    async def test_a_topic_that_was_deleted_before_a_crash_is_found(self, world: World) -> None:
        await world.beat("m", 0, "t", "u")
        world.topics.delete("t")
        await world.restart()
        await world.coordinator.forget_missing_topics(lambda name: world.topics.find(name) is not None)
        await world.clock.advance(0)
        assert list(world.persister.states) == [world.key("u", 0)]

    async def test_a_deletion_goes_on_without_its_client(self, world: World) -> None:
        await world.beat("m", 0, "t")
        await world.beat("m", -1)
        world.persister.goes_on.clear()
        deleting = asyncio.create_task(world.delete())
        await settle()
        deleting.cancel()
        await settle()
        world.persister.goes_on.set()
        await settle()
        assert not world.persister.states
        assert (await world.coordinator.list_groups()).groups == ()


class TestOffsets:
    async def test_they_are_described(self, world: World) -> None:
        missing = await world.coordinator.share.describe_offsets("g", None)
        assert missing.error is ErrorCode.group_id_not_found
        await world.beat("m", 0, "t")
        world.persister.states[world.key("t", 1)] = world.persister.states[world.key("t", 1)]._replace(
            start_offset=9, leader_epoch=4, delivery_complete_count=2
        )
        found = (await world.coordinator.share.describe_offsets("g", None)).topics
        assert {index: each.start_offset for index, each in found[world.id("t")].items()} == {
            0: NO_START,
            1: 9,
            2: NO_START,
        }
        one = found[world.id("t")][1]
        assert (one.leader_epoch, one.delivery_complete_count, one.error) == (4, 2, NONE)
        wanted = {world.id("t"): [1, 7], world.id("u"): [0]}
        some = (await world.coordinator.share.describe_offsets("g", wanted)).topics
        assert some[world.id("t")].keys() == {1, 7}
        assert (some[world.id("t")][7].start_offset, some[world.id("u")][0].start_offset) == (-1, -1)

    async def test_what_cannot_be_read_is_an_error(self, world: World) -> None:
        await world.beat("m", 0, "t")
        world.persister.fail_with, world.persister.fails = DOWN, frozenset({2})
        found = (await world.coordinator.share.describe_offsets("g", None)).topics[world.id("t")]
        assert [found[index].error for index in range(3)] == [NONE, NONE, DOWN.code]
        assert found[2].message == "the share coordinator is away"

    async def test_they_are_altered_in_a_higher_epoch(self, world: World) -> None:
        await world.beat("m", 0, "t")
        with pytest.raises(Refused, match="1 members"):
            await world.coordinator.share.alter_offsets("g", {("t", 0): 5})
        await world.beat("m", -1)
        results = await world.coordinator.share.alter_offsets("g", {("t", 0): 5, ("x", 0): 5})
        assert {each: result.error for each, result in results.items()} == {
            ("t", 0): NONE,
            ("x", 0): ErrorCode.unknown_topic_or_partition,
        }
        assert world.persister.starts() == {0: 5, 1: NO_START, 2: NO_START}
        joined = await world.beat("m", 0, "t")
        assert world.told(joined) == world.topics.all("t")
        assert world.persister.starts()[0] == 5

    async def test_an_alteration_that_failed_says_so_and_keeps_the_rest(self, world: World) -> None:
        await world.beat("m", 0, "t")
        await world.beat("m", -1)
        await world.coordinator.share.alter_offsets("g", {("t", index): 5 for index in range(3)})
        world.persister.fail_with, world.persister.fails = DOWN, frozenset({1})
        results = await world.coordinator.share.alter_offsets("g", {("t", 0): 8, ("t", 1): 8})
        assert (results["t", 0].error, results["t", 1].error) == (NONE, DOWN.code)
        world.persister.fail_with = None
        await world.clock.advance(5_000)
        await world.restart()
        assert world.told(await world.beat("m", 0, "t")) == world.topics.all("t")
        await world.clock.advance(5_000)
        await world.beat("m", 0, "t")
        assert world.persister.starts() == {0: 8, 1: 5, 2: 5}

    async def test_a_topic_can_be_given_an_offset_before_it_is_read(self, world: World) -> None:
        await world.beat("m", 0, "u")
        await world.beat("m", -1)
        await world.coordinator.share.alter_offsets("g", {("t", 1): 6})
        assert world.told(await world.beat("m", 0, "t")) == world.topics.all("t")
        starts = {key.partition: state.start_offset for key, state in world.persister.states.items()}
        assert [world.persister.states[world.key("t", index)].start_offset for index in range(3)] == [
            NO_START,
            6,
            NO_START,
        ], starts

    async def test_an_offset_that_was_confirmed_stays_whatever_failed(self, world: World) -> None:
        await world.beat("m", 0, "u")
        await world.beat("m", -1)
        world.persister.fail_with, world.persister.fails = DOWN, frozenset({1})
        # Nothing of the topic was there before: it is begun as a whole, or again.
        results = await world.coordinator.share.alter_offsets("g", {("t", 0): 100, ("t", 1): 100})
        assert {result.error for result in results.values()} == {ErrorCode.coordinator_not_available}
        assert results["t", 0].message == (
            "another partition of the topic could not be initialized: alter the offsets of all of them again"
        )
        results = await world.coordinator.share.alter_offsets("g", {("t", 0): 100})
        assert results["t", 0].error == ErrorCode.coordinator_not_available
        world.persister.fail_with = None
        results = await world.coordinator.share.alter_offsets("g", {("t", 0): 100, ("t", 1): 100})
        assert {result.error for result in results.values()} == {NONE}
        world.topics.grow("t", 4)
        world.persister.fail_with = DOWN
        # The partition that was added is begun along, and does not need the one that failed.
        results = await world.coordinator.share.alter_offsets("g", {("t", 1): 200, ("t", 3): 200})
        assert (results["t", 1].error, results["t", 3].error) == (DOWN.code, NONE)
        world.persister.fail_with = None
        await world.clock.advance(5_000)
        assert world.told(await world.beat("m", 0, "t")) == world.topics.all("t")
        starts = [world.persister.states[world.key("t", index)].start_offset for index in range(4)]
        assert starts == [100, 100, NO_START, 200]

    async def test_they_are_deleted_by_topic(self, world: World) -> None:
        await world.beat("m", 0, "t", "u")
        with pytest.raises(Refused, match="1 members"):
            await world.coordinator.share.delete_offsets("g", ["t"])
        await world.beat("m", -1)
        results = await world.coordinator.share.delete_offsets("g", ["t", "x"])
        assert (results["t"].error, results["x"].error) == (NONE, ErrorCode.unknown_topic_or_partition)
        assert list(world.persister.states) == [world.key("u", 0)]
        again = await world.coordinator.share.delete_offsets("g", ["t"])
        assert again["t"].message == "There is no offset information to delete."
        assert world.told(await world.beat("m", 0, "t")) == world.topics.all("t")

    async def test_a_deletion_that_failed_is_repeated(self, world: World) -> None:
        await world.beat("m", 0, "t")
        await world.beat("m", -1)
        world.persister.fail_with, world.persister.fails = DOWN, frozenset({1})
        assert (await world.coordinator.share.delete_offsets("g", ["t"]))["t"].error is DOWN.code
        world.persister.fail_with = None
        assert (await world.coordinator.share.delete_offsets("g", ["t"]))["t"].error is NONE
        assert not world.persister.states


async def test_without_a_persister_groups_have_members_and_nothing_to_read() -> None:
    coordinator = GroupCoordinator(OneLog(MemoryLog()), GroupSettings(), VirtualClock(), FakeTopics(t=1))
    request = ShareHeartbeatRequest("g", "m", 0, topics=frozenset({"t"}))
    joined = await coordinator.share.heartbeat(request)
    assert (joined.error, joined.assignment) == (NONE, frozenset())
    await coordinator.close()
