"""Share groups through the wire format."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from support.broker_topics import write
from support.share_groups import FakePersister
from tidemill.control.commands import CreatePartitions, CreateTopic
from tidemill.errors import ErrorCode
from tidemill.server.broker import Broker

Ask = Callable[..., Awaitable[Any]]
NONE = ErrorCode.none


@pytest.fixture
def persister(monkeypatch: pytest.MonkeyPatch) -> FakePersister:
    """State of share partitions in memory."""
    persister = FakePersister()
    monkeypatch.setattr(Broker, "persister", persister)
    return persister


async def create(broker: Broker, name: str, partitions: int = 1) -> Any:
    return await broker.controller.submit(
        CreateTopic(name=name, topic_id=uuid4(), partitions=partitions, replication=1)
    )


async def beat(broker: Broker, ask: Ask, member_epoch: int = 0, **fields: Any) -> Any:
    body = {"group_id": "g", "member_id": "m", "member_epoch": member_epoch}
    return await ask(broker, "ShareGroupHeartbeat", 1, **(body | fields))


async def join(broker: Broker, ask: Ask, *names: str, **fields: Any) -> Any:
    return await beat(broker, ask, subscribed_topic_names=list(names or ["t"]), **fields)


def told(answer: Any) -> dict[Any, tuple[int, ...]]:
    return {topic.topic_id: topic.partitions for topic in answer.assignment.topic_partitions}


@pytest.mark.usefixtures("persister")
async def test_a_member_joins_stays_and_leaves(broker: Broker, ask: Ask) -> None:
    topic = await create(broker, "t", 3)
    joined = await join(broker, ask, rack_id="r")
    assert (joined.error_code, joined.member_id) == (NONE, "m")
    assert joined.heartbeat_interval.total_seconds() == 5
    assert told(joined) == {topic.id: (0, 1, 2)}
    stays = await beat(broker, ask, joined.member_epoch)
    assert (stays.error_code, stays.member_epoch, stays.assignment) == (NONE, joined.member_epoch, None)
    left = await beat(broker, ask, -1)
    assert (left.error_code, left.member_epoch) == (NONE, -1)
    after = await beat(broker, ask, joined.member_epoch)
    assert after.error_code is ErrorCode.unknown_member_id
    assert "no member 'm'" in after.error_message


@pytest.mark.usefixtures("persister")
async def test_a_member_may_name_so_many_topics(broker: Broker, ask: Ask) -> None:
    names = [f"topic-{number}" for number in range(5_001)]
    refused = await join(broker, ask, *names)
    assert refused.error_code is ErrorCode.invalid_request
    assert "5000 topics" in refused.error_message
    assert (await join(broker, ask, *names[1:])).error_code is NONE


@pytest.mark.usefixtures("persister")
async def test_groups_are_described(broker: Broker, ask: Ask) -> None:
    (missing,) = (await ask(broker, "ShareGroupDescribe", 1, group_ids=["g"])).groups
    assert missing.error_code is ErrorCode.group_id_not_found
    topic = await create(broker, "t", 2)
    await join(broker, ask, rack_id="r")
    found, other = (await ask(broker, "ShareGroupDescribe", 1, group_ids=["g", "other", "g"])).groups
    assert other.error_code is ErrorCode.group_id_not_found
    assert (found.error_code, found.group_state, found.group_epoch, found.assignment_epoch) == (
        NONE,
        "Stable",
        2,
        2,
    )
    assert found.assignor_name == "simple"
    assert found.authorized_operations == -(2**31)
    (member,) = found.members
    assert (member.member_id, member.rack_id, member.member_epoch, member.client_id) == (
        "m",
        "r",
        2,
        "the-client",
    )
    assert member.client_host == "10.1.2.3"
    assert member.subscribed_topic_names == ("t",)
    (assigned,) = member.assignment.topic_partitions
    assert (assigned.topic_id, assigned.topic_name, assigned.partitions) == (topic.id, "t", (0, 1))
    asked = await ask(broker, "ShareGroupDescribe", 1, group_ids=["g"], include_authorized_operations=True)
    assert asked.groups[0].authorized_operations == 0b1101_0100_1000


@pytest.mark.usefixtures("persister")
async def test_they_are_listed_as_share_groups_and_unknown_to_other_apis(broker: Broker, ask: Ask) -> None:
    await create(broker, "t")
    await join(broker, ask)
    (listed,) = (await ask(broker, "ListGroups", 5, types_filter=["Share"])).groups
    assert (listed.group_id, listed.group_type, listed.protocol_type, listed.group_state) == (
        "g",
        "share",
        "share",
        "Stable",
    )
    assert not (await ask(broker, "ListGroups", 5, types_filter=["consumer", "classic"])).groups
    assert not (await ask(broker, "ListGroups", 5, states_filter=["Empty"])).groups
    (described,) = (await ask(broker, "DescribeGroups", 6, groups=["g"])).groups
    assert described.error_code is ErrorCode.group_id_not_found
    assert described.group_state == "Dead"
    (described,) = (await ask(broker, "DescribeGroups", 5, groups=["g"])).groups
    assert (described.error_code, described.group_state) == (NONE, "Dead")
    (consumer,) = (await ask(broker, "ConsumerGroupDescribe", 1, group_ids=["g"])).groups
    assert consumer.error_code is ErrorCode.group_id_not_found


async def test_they_are_deleted_with_their_state(broker: Broker, ask: Ask, persister: FakePersister) -> None:
    await create(broker, "t", 2)
    await join(broker, ask)
    (refused,) = (await ask(broker, "DeleteGroups", 2, groups_names=["g"])).results
    assert refused.error_code is ErrorCode.non_empty_group
    await beat(broker, ask, -1)
    (deleted,) = (await ask(broker, "DeleteGroups", 2, groups_names=["g"])).results
    assert deleted.error_code is NONE
    assert not persister.states


async def test_partitions_that_are_added_start_at_0(
    broker: Broker, ask: Ask, persister: FakePersister
) -> None:
    topic = await create(broker, "t", 1)
    joined = await join(broker, ask)
    await broker.controller.submit(CreatePartitions(name="t", new_count=3))
    answer = await beat(broker, ask, joined.member_epoch)
    assert told(answer) == {topic.id: (0, 1, 2)}
    assert persister.starts() == {0: -1, 1: 0, 2: 0}


async def test_java_clients_find_share_groups_finalized(broker: Broker, ask: Ask) -> None:
    answer = await ask(broker, "ApiVersions", 4, client_software_name="j", client_software_version="4")
    finalized = {each.name: each.max_version_level for each in answer.finalized_features}
    assert finalized["share.version"] == 1


async def offsets(broker: Broker, ask: Ask, version: int = 1, **topics: list[int]) -> Any:
    wanted = [{"topic_name": name, "partitions": indexes} for name, indexes in topics.items()] or None
    (group,) = (
        await ask(broker, "DescribeShareGroupOffsets", version, groups=[{"group_id": "g", "topics": wanted}])
    ).groups
    return group


async def alter(broker: Broker, ask: Ask, name: str, **starts: int) -> Any:
    partitions = [{"partition_index": int(key[1:]), "start_offset": at} for key, at in starts.items()]
    return await ask(
        broker,
        "AlterShareGroupOffsets",
        0,
        group_id="g",
        topics=[{"topic_name": name, "partitions": partitions}],
    )


class TestOffsets:
    async def test_lag_is_what_is_not_finished(
        self, broker: Broker, ask: Ask, persister: FakePersister
    ) -> None:
        topic = await create(broker, "t", 3)
        await write(broker, "t", *"0123456789", index=1)
        await join(broker, ask)
        for key, state in list(persister.states.items()):
            if key.partition == 1:
                persister.states[key] = state._replace(
                    start_offset=4, delivery_complete_count=2, leader_epoch=6
                )
        group = await offsets(broker, ask)
        assert group.error_code is NONE
        (found,) = group.topics
        assert (found.topic_name, found.topic_id) == ("t", topic.id)
        assert [(each.partition_index, each.start_offset, each.lag) for each in found.partitions] == [
            (0, -1, -1),
            (1, 4, 4),
            (2, -1, -1),
        ]
        assert found.partitions[1].leader_epoch == 6
        (older,) = (await offsets(broker, ask, 0, t=[1])).topics
        assert older.partitions[0].start_offset == 4

    @pytest.mark.usefixtures("persister")
    async def test_what_is_not_there(self, broker: Broker, ask: Ask) -> None:
        missing = await offsets(broker, ask)
        assert missing.error_code is ErrorCode.group_id_not_found
        await create(broker, "t")
        await create(broker, "u")
        await join(broker, ask)
        group = await offsets(broker, ask, t=[0, 9], u=[0], x=[0])
        by_name = {topic.topic_name: topic for topic in group.topics}
        assert [each.start_offset for each in by_name["t"].partitions] == [-1, -1]
        assert by_name["u"].partitions[0].start_offset == -1
        assert by_name["x"].partitions[0].error_code is ErrorCode.unknown_topic_or_partition

    async def test_they_are_altered_while_nobody_reads(
        self, broker: Broker, ask: Ask, persister: FakePersister
    ) -> None:
        topic = await create(broker, "t", 2)
        absent = await alter(broker, ask, "t", p0=1)
        assert absent.error_code is ErrorCode.group_id_not_found
        await join(broker, ask)
        refused = await alter(broker, ask, "t", p0=1)
        assert refused.error_code is ErrorCode.non_empty_group
        assert "stop them first" in refused.error_message
        await beat(broker, ask, -1)
        altered = await alter(broker, ask, "t", p0=7, p9=1)
        assert altered.error_code is NONE
        (found,) = altered.responses
        assert found.topic_id == topic.id
        assert {each.partition_index: each.error_code for each in found.partitions} == {
            0: NONE,
            9: ErrorCode.unknown_topic_or_partition,
        }
        assert persister.starts() == {0: 7, 1: -1}

    async def test_they_are_deleted_while_nobody_reads(
        self, broker: Broker, ask: Ask, persister: FakePersister
    ) -> None:
        async def delete(*names: str) -> Any:
            topics = [{"topic_name": name} for name in names]
            return await ask(broker, "DeleteShareGroupOffsets", 0, group_id="g", topics=topics)

        await create(broker, "t", 2)
        assert (await delete("t")).error_code is ErrorCode.group_id_not_found
        await join(broker, ask)
        assert (await delete("t")).error_code is ErrorCode.non_empty_group
        await beat(broker, ask, -1)
        deleted = await delete("t", "x", "t")
        assert [(each.topic_name, each.error_code) for each in deleted.responses] == [
            ("t", NONE),
            ("x", ErrorCode.unknown_topic_or_partition),
        ]
        assert not persister.states
