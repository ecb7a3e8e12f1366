"""The new consumer protocol through the wire format, in every version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from tidemill.control.commands import CreatePartitions, CreateTopic
from tidemill.errors import ErrorCode
from tidemill.server.broker import Broker
from tidemill.server.handlers.cluster.api_versions import api_versions_body
from tidemill.wire.apis import APIS_BY_NAME

Ask = Callable[..., Awaitable[Any]]
VERSIONS = {name: api.versions for name, api in APIS_BY_NAME.items()}
EVERY_VERSION = pytest.mark.parametrize("version", VERSIONS["ConsumerGroupHeartbeat"])


async def create(broker: Broker, name: str, partitions: int = 1) -> Any:
    return await broker.controller.submit(
        CreateTopic(name=name, topic_id=uuid4(), partitions=partitions, replication=1)
    )


async def beat(broker: Broker, ask: Ask, version: int = 1, **fields: Any) -> Any:
    body = {"group_id": "g", "member_id": "m", "member_epoch": 0, "topic_partitions": None}
    return await ask(broker, "ConsumerGroupHeartbeat", version, **(body | fields))


async def join(broker: Broker, ask: Ask, version: int = 1, **fields: Any) -> Any:
    body: dict[str, Any] = {
        "rebalance_timeout": 60_000,
        "subscribed_topic_names": ["t"],
        "topic_partitions": [],
    }
    return await beat(broker, ask, version, **(body | fields))


def told(answer: Any) -> dict[Any, tuple[int, ...]]:
    return {topic.topic_id: topic.partitions for topic in answer.assignment.topic_partitions}


async def test_a_member_may_name_so_many_topics_and_is_told_what_to_do_instead(
    broker: Broker, ask: Ask
) -> None:
    names = [f"topic-{number}" for number in range(5_001)]
    refused = await join(broker, ask, subscribed_topic_names=names)
    assert refused.error_code is ErrorCode.invalid_request
    assert "regular expression" in refused.error_message
    assert (await join(broker, ask, subscribed_topic_names=names[1:])).error_code is ErrorCode.none


@EVERY_VERSION
async def test_a_member_joins_stays_and_leaves(broker: Broker, ask: Ask, version: int) -> None:
    topic = await create(broker, "t", 3)
    joined = await join(broker, ask, version)
    assert (joined.error_code, joined.member_id, joined.member_epoch) == (ErrorCode.none, "m", 1)
    assert joined.heartbeat_interval.total_seconds() == 5
    assert told(joined) == {topic.id: (0, 1, 2)}
    owned = [{"topic_id": topic.id, "partitions": [0, 1, 2]}]
    stays = await beat(broker, ask, version, member_epoch=1, topic_partitions=owned)
    assert (stays.error_code, stays.member_epoch, stays.assignment) == (ErrorCode.none, 1, None)
    left = await beat(broker, ask, version, member_epoch=-1)
    assert (left.error_code, left.member_epoch) == (ErrorCode.none, -1)
    after = await beat(broker, ask, version, member_epoch=1)
    assert after.error_code is ErrorCode.unknown_member_id
    assert "no member 'm'" in after.error_message


async def test_the_server_names_a_member_of_the_oldest_version(broker: Broker, ask: Ask) -> None:
    answer = await join(broker, ask, 0, member_id="")
    assert answer.error_code is ErrorCode.none
    assert len(answer.member_id) == 36
    assert (await join(broker, ask, 1, member_id="")).error_code is ErrorCode.invalid_request


async def test_a_pattern_is_matched_here(broker: Broker, ask: Ask) -> None:
    await create(broker, "other")
    topic = await create(broker, "orders", 2)
    answer = await join(broker, ask, subscribed_topic_names=None, subscribed_topic_regex="ord.*|__.*")
    assert told(answer) == {topic.id: (0, 1)}
    bad = await join(broker, ask, member_id="n", subscribed_topic_names=None, subscribed_topic_regex="*")
    assert bad.error_code is ErrorCode.invalid_regular_expression


async def test_new_partitions_and_new_topics_are_assigned(broker: Broker, ask: Ask) -> None:
    topic = await create(broker, "t", 1)
    await join(broker, ask, subscribed_topic_names=["t", "later"])
    await broker.controller.submit(CreatePartitions(name="t", new_count=2))
    later = await create(broker, "later")
    owned = [{"topic_id": topic.id, "partitions": [0]}]
    answer = await beat(broker, ask, member_epoch=1, topic_partitions=owned)
    assert told(answer) == {topic.id: (0, 1), later.id: (0,)}


@pytest.mark.parametrize("version", VERSIONS["ConsumerGroupDescribe"])
async def test_groups_are_described(broker: Broker, ask: Ask, version: int) -> None:
    (missing,) = (await ask(broker, "ConsumerGroupDescribe", version, group_ids=["g"])).groups
    assert missing.error_code is ErrorCode.group_id_not_found
    topic = await create(broker, "t", 2)
    await join(broker, ask, instance_id="i", rack_id="r")
    found, other = (await ask(broker, "ConsumerGroupDescribe", version, group_ids=["g", "other"])).groups
    assert (found.error_code, found.group_state, found.group_epoch, found.assignment_epoch) == (
        ErrorCode.none,
        "Stable",
        1,
        1,
    )
    assert found.assignor_name == "uniform"
    assert found.authorized_operations == -(2**31)
    asked = await ask(
        broker, "ConsumerGroupDescribe", version, group_ids=["g"], include_authorized_operations=True
    )
    assert asked.groups[0].authorized_operations == 0b1101_0100_1000
    (member,) = found.members
    assert (member.member_id, member.instance_id, member.rack_id, member.member_epoch) == ("m", "i", "r", 1)
    assert (member.client_id, member.client_host) == ("the-client", "10.1.2.3")
    assert (member.subscribed_topic_names, member.subscribed_topic_regex) == (("t",), None)
    for assignment in (member.assignment, member.target_assignment):
        (assigned,) = assignment.topic_partitions
        assert (assigned.topic_id, assigned.topic_name, assigned.partitions) == (topic.id, "t", (0, 1))
    if version >= 1:
        assert member.member_type == 1
    assert other.error_code is ErrorCode.group_id_not_found


@pytest.mark.parametrize("version", VERSIONS["DescribeGroups"])
async def test_the_old_description_knows_no_new_groups(broker: Broker, ask: Ask, version: int) -> None:
    await join(broker, ask)
    (found,) = (await ask(broker, "DescribeGroups", version, groups=["g"])).groups
    assert found.group_state == "Dead"
    assert found.error_code is (ErrorCode.group_id_not_found if version >= 6 else ErrorCode.none)


async def test_groups_are_listed_by_type(broker: Broker, ask: Ask) -> None:
    await join(broker, ask)
    listed = (await ask(broker, "ListGroups", 5, states_filter=[], types_filter=["consumer"])).groups
    assert [(each.group_id, each.group_type, each.group_state) for each in listed] == [
        ("g", "consumer", "Stable")
    ]
    assert not (await ask(broker, "ListGroups", 5, states_filter=[], types_filter=["classic"])).groups


@pytest.mark.parametrize("version", [9, 10])
async def test_offsets_are_committed_and_read_with_the_member_epoch(
    broker: Broker, ask: Ask, version: int
) -> None:
    topic = await create(broker, "t")
    name = {"topic_id": topic.id} if version >= 10 else {"name": "t"}
    await join(broker, ask)

    async def commit(epoch: int) -> ErrorCode:
        answer = await ask(
            broker,
            "OffsetCommit",
            version,
            group_id="g",
            generation_id_or_member_epoch=epoch,
            member_id="m",
            topics=[{**name, "partitions": [{"partition_index": 0, "committed_offset": 7}]}],
        )
        return ErrorCode(answer.topics[0].partitions[0].error_code)

    async def fetch(member_id: str | None, epoch: int) -> Any:
        asked = {"group_id": "g", "member_id": member_id, "member_epoch": epoch}
        topics = [{**name, "partition_indexes": [0]}]
        answer = await ask(
            broker, "OffsetFetch", version, groups=[{**asked, "topics": topics}], require_stable=True
        )
        return answer.groups[0]

    assert await commit(1) is ErrorCode.none
    assert await commit(0) is ErrorCode.stale_member_epoch
    assert (await fetch("m", 1)).topics[0].partitions[0].committed_offset == 7
    assert (await fetch(None, -1)).topics[0].partitions[0].committed_offset == 7
    stale = await fetch("m", 0)
    assert (stale.error_code, stale.topics) == (ErrorCode.stale_member_epoch, ())
    assert (await fetch("n", 1)).error_code is ErrorCode.unknown_member_id


async def test_a_member_of_the_old_protocol_is_moved_by_one_of_the_new(broker: Broker, ask: Ask) -> None:
    await create(broker, "t", 3)
    subscription = bytes.fromhex("0000 00000001 0001 74 ffffffff")
    body = {
        "group_id": "g",
        "session_timeout": 10_000,
        "rebalance_timeout": 10_000,
        "member_id": "",
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": subscription}],
    }
    old = await ask(broker, "JoinGroup", 3, **body)
    waiting = asyncio.ensure_future(ask(broker, "JoinGroup", 3, **body))
    await asyncio.sleep(0)  # The shard is loaded, so one turn takes the request as far as it goes.
    new = await join(broker, ask)
    assert new.error_code is ErrorCode.none
    assert (await waiting).error_code is ErrorCode.rebalance_in_progress
    beat_ = await ask(
        broker, "Heartbeat", 4, group_id="g", generation_id=old.generation_id, member_id=old.member_id
    )
    assert beat_.error_code is ErrorCode.rebalance_in_progress
    again = await ask(broker, "JoinGroup", 3, **(body | {"member_id": old.member_id}))
    assert (again.error_code, again.leader, again.members) == (ErrorCode.none, "", ())
    (described,) = (await ask(broker, "ConsumerGroupDescribe", 1, group_ids=["g"])).groups
    assert sorted(member.member_type for member in described.members) == [0, 0, 1]


def test_clients_are_told_that_the_protocol_can_be_used() -> None:
    body = api_versions_body()
    assert {"name": "group.version", "min_version": 0, "max_version": 1} in body["supported_features"]
    finalized = {"name": "group.version", "min_version_level": 1, "max_version_level": 1}
    assert finalized in body["finalized_features"]
