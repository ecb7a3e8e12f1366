"""KIP-932's cases about share groups, on the product's own assembly: groups, state and deliveries together.

Members join with heartbeats, fetch what they are assigned and acknowledge it; the state is kept in
``__share_group_state`` by the node's own share coordinator.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from support.broker_topics import create, write
from support.share_world import ACCEPT, RELEASE, Member
from support.table_world import ManualClock
from tidemill.control.commands import CreatePartitions
from tidemill.coordination.share_state import SharePartitionKey
from tidemill.errors import ErrorCode
from tidemill.server.broker import Broker

MakeBroker = Callable[..., Awaitable[Broker]]
Ask = Callable[..., Awaitable[Any]]
NONE = ErrorCode.none
HOUR_MS = 3_600_000


class World:
    """A node, and short ways to be a member of its share groups."""

    def __init__(self, broker: Broker, ask: Ask) -> None:
        self.broker = broker
        self._ask = ask
        self.topic_id: Any = None
        self._connections = 0

    async def ask(self, api: str, version: int, /, connection: int = 0, **body: Any) -> Any:
        del connection
        return await self._ask(self.broker, api, version, **body)

    async def create(self, name: str = "t", partitions: int = 1) -> None:
        self.topic_id = await create(self.broker, name, partitions)

    async def configure(self, group: str, **configs: str) -> None:
        changes = [
            {"name": name.replace("_", "."), "config_operation": 0, "value": value}
            for name, value in configs.items()
        ]
        answer = await self.ask(
            "IncrementalAlterConfigs",
            1,
            resources=[{"resource_type": 32, "resource_name": group, "configs": changes}],
            validate_only=False,
        )
        assert answer.responses[0].error_code is NONE, answer

    async def join(self, group: str = "g", name: str = "m", *topics: str) -> Participant:
        self._connections += 1
        member = Participant(self, name, group, self._connections)
        answer = await member.beat(subscribed_topic_names=list(topics or ["t"]))
        assert answer.error_code is NONE, answer
        return member

    async def offsets(self, group: str = "g") -> dict[int, tuple[int, int]]:
        """By partition: the start and the lag."""
        (found,) = (
            await self.ask("DescribeShareGroupOffsets", 1, groups=[{"group_id": group, "topics": None}])
        ).groups
        assert found.error_code is NONE, found
        return {
            each.partition_index: (each.start_offset, each.lag)
            for topic in found.topics
            for each in topic.partitions
        }

    async def alter(self, group: str = "g", **starts: int) -> ErrorCode:
        partitions = [
            {"partition_index": int(key[1:]), "start_offset": offset} for key, offset in starts.items()
        ]
        topics = [{"topic_name": "t", "partitions": partitions}]
        answer = await self.ask("AlterShareGroupOffsets", 0, group_id=group, topics=topics)
        code = ErrorCode(int(answer.error_code))
        if code is not NONE:
            return code
        assert all(each.error_code is NONE for each in answer.responses[0].partitions), answer
        return NONE

    async def delete(self, group: str = "g") -> ErrorCode:
        (result,) = (await self.ask("DeleteGroups", 2, groups_names=[group])).results
        return ErrorCode(result.error_code)


class Participant(Member):
    """A member of a share group that also belongs to it: with heartbeats and an assignment."""

    def __init__(self, world: World, name: str, group: str, connection: int) -> None:
        super().__init__(world, name, group, connection)  # type: ignore[arg-type]
        self._node = world
        self.member_epoch = 0
        self.assigned: set[tuple[Any, int]] = set()

    async def beat(self, epoch: int | None = None, **fields: Any) -> Any:
        answer = await self._node.ask(
            "ShareGroupHeartbeat",
            1,
            group_id=self.group,
            member_id=self.name,
            member_epoch=self.member_epoch if epoch is None else epoch,
            **fields,
        )
        if answer.error_code is NONE:
            self.member_epoch = answer.member_epoch
            if answer.assignment is not None:
                self.assigned = {
                    (topic.topic_id, index)
                    for topic in answer.assignment.topic_partitions
                    for index in topic.partitions
                }
        return answer

    async def take(self, index: int = 0) -> list[str]:
        """Fetch and accept everything that there is; gives the values."""
        found: list[str] = []
        while (fetched := await self.fetch(index)).acquired:
            assert fetched.error == 0
            found += fetched.values
            for first, last, _ in fetched.acquired:
                assert await self.acknowledge((first, last, [ACCEPT]), index=index) == 0
        return found

    async def leave(self) -> None:
        """Close the session and leave the group, as clients do."""
        if self.epoch:
            await self.close()
        assert (await self.beat(-1)).error_code is NONE


@pytest.fixture
async def world(make_broker: MakeBroker, ask: Ask, clock: ManualClock) -> World:
    return World(await make_broker(clock_ms=clock), ask)


async def test_a_group_starts_at_the_end_by_default(world: World) -> None:
    await world.create()
    await write(world.broker, "t", "before")
    member = await world.join()
    assert await member.take() == []
    await write(world.broker, "t", "after")
    assert await member.take() == ["after"]


async def test_a_group_starts_at_the_beginning_if_it_says_so(world: World) -> None:
    await world.create()
    await world.configure("g", share_auto_offset_reset="earliest")
    await write(world.broker, "t", "a", "b")
    assert await (await world.join()).take() == ["a", "b"]


async def test_a_group_starts_a_while_ago_if_it_says_so(world: World, clock: ManualClock) -> None:
    await world.create()
    await world.configure("g", share_auto_offset_reset="by_duration:PT1H")
    now_ms = world.broker.clock_ms()
    await write(world.broker, "t", "old", timestamp_ms=now_ms - 2 * HOUR_MS)
    await write(world.broker, "t", "recent", timestamp_ms=now_ms - HOUR_MS // 2)
    assert await (await world.join()).take() == ["recent"]


async def test_groups_are_independent(world: World) -> None:
    await world.create()
    for group in ("g", "h"):
        await world.configure(group, share_auto_offset_reset="earliest")
    await write(world.broker, "t", "a", "b")
    one, other = await world.join("g"), await world.join("h")
    assert await one.take() == ["a", "b"]
    assert await other.take() == ["a", "b"]
    assert (await world.offsets("g"), await world.offsets("h")) == ({0: (2, 0)}, {0: (2, 0)})


async def test_lag_counts_what_is_not_finished(world: World) -> None:
    await world.create(partitions=2)
    await world.configure("g", share_auto_offset_reset="earliest")
    await write(world.broker, "t", *"abcde")
    member = await world.join()
    # Nobody has read yet: where the group starts is not decided.
    assert await world.offsets() == {0: (-1, -1), 1: (-1, -1)}
    await member.fetch()
    assert await member.acknowledge((1, 2, [ACCEPT])) == 0
    assert (await world.offsets())[0] == (0, 3)
    assert await member.acknowledge((0, 0, [ACCEPT]), (3, 3, [RELEASE])) == 0
    assert (await world.offsets())[0] == (3, 2)
    await write(world.broker, "t", "f")
    assert (await world.offsets())[0] == (3, 3)


async def test_offsets_are_altered_when_the_members_have_left(world: World) -> None:
    await world.create()
    await world.configure("g", share_auto_offset_reset="earliest")
    await write(world.broker, "t", *"abcde")
    member = await world.join()
    assert await member.take() == list("abcde")
    assert await world.alter(p0=2) is ErrorCode.non_empty_group
    await member.leave()
    assert await world.alter(p0=2) is NONE
    assert await world.offsets() == {0: (2, 3)}
    assert await (await world.join(name="n")).take() == list("cde")


async def test_a_member_that_stayed_connected_reads_from_where_the_offsets_were_altered_to(
    world: World,
) -> None:
    """It left the group and kept its session: what it is given then is by the new state."""
    await world.create()
    await world.configure("g", share_auto_offset_reset="earliest")
    await write(world.broker, "t", *"abcde")
    member = await world.join()
    await member.fetch()
    assert (await member.beat(-1)).error_code is NONE
    assert await world.alter(p0=4) is NONE
    assert await member.acknowledge((0, 1, [ACCEPT])) != 0
    assert await world.offsets() == {0: (4, 1)}
    assert await (await world.join(name="n")).take() == ["e"]


async def test_a_deleted_group_begins_anew(world: World) -> None:
    await world.create()
    await world.configure("g", share_auto_offset_reset="earliest")
    await write(world.broker, "t", "a", "b")
    member = await world.join()
    assert await member.take() == ["a", "b"]
    assert await world.delete() is ErrorCode.non_empty_group
    await member.leave()
    assert await world.delete() is NONE
    key = SharePartitionKey("g", world.topic_id, 0)
    assert (await world.broker.persister.read_summary(key, -1)).start_offset == -1
    assert await (await world.join()).take() == ["a", "b"]


async def test_a_topic_that_was_forgotten_begins_anew(world: World) -> None:
    await world.create()
    await world.configure("g", share_auto_offset_reset="earliest")
    await write(world.broker, "t", "a", "b")
    member = await world.join()
    assert await member.take() == ["a", "b"]
    await member.leave()
    deleted = await world.ask("DeleteShareGroupOffsets", 0, group_id="g", topics=[{"topic_name": "t"}])
    assert deleted.responses[0].error_code is NONE
    assert await world.offsets() == {}
    assert await (await world.join()).take() == ["a", "b"]


async def test_a_group_is_full(make_broker: MakeBroker, ask: Ask) -> None:
    world = World(await make_broker(group_share_max_size=2), ask)
    await world.create()
    await world.join(name="a")
    second = await world.join(name="b")
    third = Participant(world, "c", "g", 9)
    refused = await third.beat(subscribed_topic_names=["t"])
    assert refused.error_code is ErrorCode.group_max_size_reached
    await second.leave()
    assert (await third.beat(subscribed_topic_names=["t"])).error_code is NONE


async def test_a_fenced_member_joins_again_and_reads_on(world: World) -> None:
    await world.create()
    await world.configure("g", share_auto_offset_reset="earliest")
    await write(world.broker, "t", "a")
    member = await world.join()
    fenced = await member.beat(member.member_epoch + 5)
    assert fenced.error_code is ErrorCode.fenced_member_epoch
    again = await member.beat(0, subscribed_topic_names=["t"])
    assert again.error_code is NONE
    assert member.assigned == {(world.topic_id, 0)}
    assert await member.take() == ["a"]


async def test_partitions_that_are_added_are_read_from_their_first_record(world: World) -> None:
    await world.create()
    member = await world.join()
    assert await member.take() == []
    await world.broker.controller.submit(CreatePartitions(name="t", new_count=2))
    await write(world.broker, "t", "first", index=1)
    await member.beat()
    assert member.assigned == {(world.topic_id, 0), (world.topic_id, 1)}
    assert await member.take(1) == ["first"]


async def test_members_share_one_partition(world: World) -> None:
    await world.create()
    members = [await world.join(name=f"m{number}") for number in range(3)]
    for member in members:
        await member.beat()
        assert member.assigned == {(world.topic_id, 0)}


async def test_state_of_a_deleted_topic_is_deleted(world: World) -> None:
    await world.create()
    await write(world.broker, "t", "a")
    member = await world.join()
    await member.take()
    key = SharePartitionKey("g", world.topic_id, 0)
    assert (await world.broker.persister.read_summary(key, -1)).start_offset == 1
    topic_id = world.topic_id
    await world.ask("DeleteTopics", 6, topics=[{"name": "t", "topic_id": None}], timeout=30_000)
    await world.create()
    assert world.topic_id != topic_id
    await write(world.broker, "t", "b")
    await member.beat()
    assert member.assigned == {(world.topic_id, 0)}
    for _ in range(2_000):
        if (await world.broker.persister.read_summary(key, -1)).start_offset == -1:
            break
    else:
        raise AssertionError("the state is still there")


async def test_what_was_taken_from_a_deleted_group_is_not_acknowledged_to_the_next_one(world: World) -> None:
    """A client leaves the group and keeps its session and its records; the new state has the same epoch."""
    await world.create()
    await world.configure("g", share_auto_offset_reset="earliest")
    await write(world.broker, "t", "a", "b")
    member = await world.join()
    await member.fetch()
    assert (await member.beat(-1)).error_code is NONE
    assert await world.delete() is NONE
    other = await world.join(name="n")
    assert await member.acknowledge((0, 1, [ACCEPT])) == ErrorCode.fenced_state_epoch
    assert await other.take() == ["a", "b"]


async def test_a_deleted_group_begins_anew_although_a_session_stayed_open(world: World) -> None:
    """A client that leaves the group and keeps its session must not carry the old state into the new one."""
    await world.create()
    await world.configure("g", share_auto_offset_reset="earliest")
    await write(world.broker, "t", "a", "b")
    member = await world.join()
    assert await member.take() == ["a", "b"]
    assert (await member.beat(-1)).error_code is NONE
    assert await world.delete() is NONE
    assert await (await world.join(name="n")).take() == ["a", "b"]
