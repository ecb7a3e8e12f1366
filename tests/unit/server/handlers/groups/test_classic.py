"""The classic group protocol, committed offsets and InitProducerId, in every version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from tidemill.control.commands import CreateTopic
from tidemill.errors import ErrorCode, StorageError
from tidemill.server.broker import Broker
from tidemill.server.coordinators.groups import GROUPS
from tidemill.wire.apis import APIS_BY_NAME

Ask = Callable[..., Awaitable[Any]]
MakeBroker = Callable[..., Awaitable[Broker]]
VERSIONS = {name: api.versions for name, api in APIS_BY_NAME.items()}


async def create(broker: Broker, name: str, partitions: int = 1) -> Any:
    return await broker.controller.submit(
        CreateTopic(name=name, topic_id=uuid4(), partitions=partitions, replication=1)
    )


def join_body(member_id: str = "", group_id: str = "g", **fields: Any) -> dict[str, Any]:
    return {
        "group_id": group_id,
        "session_timeout": 10_000,
        "rebalance_timeout": 10_000,
        "member_id": member_id,
        "protocol_type": "consumer",
        "protocols": [{"name": "range", "metadata": b"subscription"}],
        **fields,
    }


async def join(broker: Broker, ask: Ask, version: int = 9, **fields: Any) -> Any:
    """Join as clients do: from v4 on the first answer gives the member's id."""
    answer = await ask(broker, "JoinGroup", version, **join_body(**fields))
    if answer.error_code is ErrorCode.member_id_required:
        fields["member_id"] = answer.member_id
        answer = await ask(broker, "JoinGroup", version, **join_body(**fields))
    return answer


async def stable_member(broker: Broker, ask: Ask) -> Any:
    """A group ``g`` with one member that has its assignment."""
    joined = await join(broker, ask)
    synced = await ask(
        broker,
        "SyncGroup",
        5,
        group_id="g",
        generation_id=joined.generation_id,
        member_id=joined.member_id,
        protocol_type="consumer",
        protocol_name="range",
        assignments=[{"member_id": joined.member_id, "assignment": b"mine"}],
    )
    assert synced.error_code is ErrorCode.none
    return joined


def stop_groups(broker: Broker, group_id: str = "g") -> None:
    """Make the group's log one that could not be opened."""
    topic, index = broker.find.topic(GROUPS.topic), broker.groups.partition_of(group_id)
    broker.replicas.offline[topic.id, index] = (
        broker.find.placement(topic, index),
        StorageError("it is damaged"),
    )


# --- JoinGroup, SyncGroup


@pytest.mark.parametrize("version", VERSIONS["JoinGroup"])
async def test_join_makes_a_generation(broker: Broker, ask: Ask, version: int) -> None:
    if version >= 4:
        first = await ask(broker, "JoinGroup", version, **join_body())
        assert first.error_code is ErrorCode.member_id_required
        assert first.member_id.startswith("the-client-")
        assert first.generation_id == -1
    answer = await join(broker, ask, version, group_id="h")
    assert (answer.error_code, answer.generation_id, answer.protocol_name) == (ErrorCode.none, 1, "range")
    assert answer.leader == answer.member_id
    (member,) = answer.members
    assert (member.member_id, member.metadata) == (answer.member_id, b"subscription")
    if version >= 5:
        assert member.group_instance_id is None
    if version >= 7:
        assert answer.protocol_type == "consumer"
    if version >= 9:
        assert not answer.skip_assignment
    (described,) = (await ask(broker, "DescribeGroups", 5, groups=["h"])).groups
    assert [(each.client_id, each.client_host) for each in described.members] == [("the-client", "10.1.2.3")]


@pytest.mark.parametrize("version", VERSIONS["JoinGroup"])
@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"group_id": ""}, ErrorCode.invalid_group_id),
        ({"session_timeout": 1}, ErrorCode.invalid_session_timeout),
        ({"member_id": "stranger"}, ErrorCode.unknown_member_id),
        ({"protocols": []}, ErrorCode.inconsistent_group_protocol),
        ({"protocols": [{"name": "range", "metadata": bytes(2**20 + 1)}]}, ErrorCode.invalid_request),
        (
            {"protocols": [{"name": f"{n}".ljust(30_000), "metadata": b""} for n in range(40)]},
            ErrorCode.invalid_request,
        ),
        ({"protocol_type": ""}, ErrorCode.inconsistent_group_protocol),
    ],
)
async def test_join_refuses(
    broker: Broker, ask: Ask, version: int, fields: dict[str, Any], code: ErrorCode
) -> None:
    answer = await ask(broker, "JoinGroup", version, **join_body(**fields))
    assert (answer.error_code, answer.members) == (code, ())
    assert answer.protocol_name == (None if version >= 7 else "")


@pytest.mark.parametrize("version", range(5, 10))
async def test_a_static_member_joins_without_being_told_its_id_first(
    broker: Broker, ask: Ask, version: int
) -> None:
    answer = await ask(broker, "JoinGroup", version, **join_body(group_instance_id="fixed"))
    assert answer.error_code is ErrorCode.none
    assert answer.members[0].group_instance_id == "fixed"


@pytest.mark.parametrize("version", VERSIONS["SyncGroup"])
async def test_sync_gives_the_assignment(broker: Broker, ask: Ask, version: int) -> None:
    joined = await join(broker, ask)
    body = {
        "group_id": "g",
        "generation_id": joined.generation_id,
        "member_id": joined.member_id,
        "protocol_type": "consumer",
        "protocol_name": "range",
        "assignments": [{"member_id": joined.member_id, "assignment": b"mine"}],
    }
    answer = await ask(broker, "SyncGroup", version, **body)
    assert (answer.error_code, answer.assignment) == (ErrorCode.none, b"mine")
    if version >= 5:
        assert (answer.protocol_type, answer.protocol_name) == ("consumer", "range")
    stale = await ask(broker, "SyncGroup", version, **{**body, "generation_id": 9})
    assert (stale.error_code, stale.assignment) == (ErrorCode.illegal_generation, b"")


async def test_sync_from_version_5_on_must_name_the_protocol(broker: Broker, ask: Ask) -> None:
    joined = await join(broker, ask)
    body = {"group_id": "g", "generation_id": joined.generation_id, "member_id": joined.member_id}
    for fields in ({}, {"protocol_type": "consumer"}, {"protocol_name": "range"}):
        answer = await ask(broker, "SyncGroup", 5, **body, **fields)
        assert answer.error_code is ErrorCode.inconsistent_group_protocol


async def test_followers_wait_for_their_leader(broker: Broker, ask: Ask) -> None:
    bodies = [join_body(group_instance_id=name) for name in ("one", "two")]
    first = await ask(broker, "JoinGroup", 9, **bodies[0])
    joins = [
        asyncio.ensure_future(ask(broker, "JoinGroup", 9, **bodies[1])),
        asyncio.ensure_future(ask(broker, "JoinGroup", 9, **{**bodies[0], "member_id": first.member_id})),
    ]
    second, leader = await asyncio.gather(*joins)
    assert (leader.generation_id, second.generation_id) == (2, 2)
    assert (len(leader.members), second.members) == (2, ())
    common = {"group_id": "g", "generation_id": 2, "protocol_type": "consumer", "protocol_name": "range"}
    follower = asyncio.ensure_future(ask(broker, "SyncGroup", 5, **common, member_id=second.member_id))
    assignments = [
        {"member_id": each.member_id, "assignment": each.member_id.encode()} for each in leader.members
    ]
    await ask(broker, "SyncGroup", 5, **common, member_id=leader.member_id, assignments=assignments)
    assert (await follower).assignment == second.member_id.encode()


# --- Heartbeat, LeaveGroup


@pytest.mark.parametrize("version", VERSIONS["Heartbeat"])
async def test_heartbeat(broker: Broker, ask: Ask, version: int) -> None:
    joined = await stable_member(broker, ask)
    beat = {"group_id": "g", "generation_id": joined.generation_id, "member_id": joined.member_id}
    codes = [
        (await ask(broker, "Heartbeat", version, **beat)).error_code,
        (await ask(broker, "Heartbeat", version, **{**beat, "generation_id": 9})).error_code,
        (await ask(broker, "Heartbeat", version, **{**beat, "member_id": "stranger"})).error_code,
        (await ask(broker, "Heartbeat", version, **{**beat, "group_id": ""})).error_code,
    ]
    assert codes == [
        ErrorCode.none,
        ErrorCode.illegal_generation,
        ErrorCode.unknown_member_id,
        ErrorCode.invalid_group_id,
    ]


@pytest.mark.parametrize("version", range(3))
async def test_leave_of_one_member_tells_its_error_at_the_top(broker: Broker, ask: Ask, version: int) -> None:
    joined = await stable_member(broker, ask)
    answer = await ask(broker, "LeaveGroup", version, group_id="g", member_id="stranger")
    assert answer.error_code is ErrorCode.unknown_member_id
    answer = await ask(broker, "LeaveGroup", version, group_id="g", member_id=joined.member_id)
    assert answer.error_code is ErrorCode.none
    (described,) = (await ask(broker, "DescribeGroups", 5, groups=["g"])).groups
    assert described.group_state == "Empty"
    answer = await ask(broker, "LeaveGroup", version, group_id="", member_id="m")
    assert answer.error_code is ErrorCode.invalid_group_id


@pytest.mark.parametrize("version", range(3, 6))
async def test_leave_of_several_members_tells_each_its_error(broker: Broker, ask: Ask, version: int) -> None:
    joined = await ask(broker, "JoinGroup", 9, **join_body(group_instance_id="fixed"))
    members = [
        {"member_id": "stranger", "group_instance_id": None},
        {"member_id": "", "group_instance_id": "nobody"},
        {"member_id": joined.member_id, "group_instance_id": "fixed"},
    ]
    answer = await ask(broker, "LeaveGroup", version, group_id="g", members=members)
    assert answer.error_code is ErrorCode.none
    assert [(each.group_instance_id, each.error_code) for each in answer.members] == [
        (None, ErrorCode.unknown_member_id),
        ("nobody", ErrorCode.unknown_member_id),
        ("fixed", ErrorCode.none),
    ]


# --- committed offsets


def commit_body(version: int, topics: list[tuple[Any, list[tuple[int, int]]]]) -> dict[str, Any]:
    """``topics`` is (topic image or name, [(partition, offset)])."""
    bodies = []
    for topic, offsets in topics:
        label: dict[str, Any] = {"topic_id": topic.id} if version >= 10 else {"name": topic.name}
        partitions = [
            {
                "partition_index": index,
                "committed_offset": offset,
                "committed_leader_epoch": 3,
                "committed_metadata": "note",
            }
            for index, offset in offsets
        ]
        bodies.append({**label, "partitions": partitions})
    return {"group_id": "g", "member_id": "", "generation_id_or_member_epoch": -1, "topics": bodies}


class Missing:
    """A topic that does not exist."""

    name = "missing"
    id = uuid4()


@pytest.mark.parametrize("version", VERSIONS["OffsetCommit"])
async def test_commit_stores_what_exists(broker: Broker, ask: Ask, version: int) -> None:
    topic = await create(broker, "a", 2)
    body = commit_body(version, [(topic, [(0, 5), (1, 6), (2, 7), (-1, 8)]), (Missing, [(0, 9)])])
    answer = await ask(broker, "OffsetCommit", version, **body)
    a, missing = answer.topics
    assert [(each.partition_index, each.error_code) for each in a.partitions] == [
        (0, ErrorCode.none),
        (1, ErrorCode.none),
        (2, ErrorCode.unknown_topic_or_partition),
        (-1, ErrorCode.unknown_topic_or_partition),
    ]
    unknown = ErrorCode.unknown_topic_id if version >= 10 else ErrorCode.unknown_topic_or_partition
    assert [each.error_code for each in missing.partitions] == [unknown]
    if version >= 10:
        assert (a.topic_id, missing.topic_id) == (topic.id, Missing.id)
    else:
        assert (a.name, missing.name) == ("a", "missing")
    stored = await ask(broker, "OffsetFetch", 7, group_id="g", topics=None)
    assert [
        (each.partition_index, each.committed_offset, each.committed_leader_epoch, each.metadata)
        for each in stored.topics[0].partitions
    ] == [(0, 5, 3 if version >= 6 else -1, "note"), (1, 6, 3 if version >= 6 else -1, "note")]


async def test_a_commit_of_nothing_that_exists_creates_nothing(broker: Broker, ask: Ask) -> None:
    await ask(broker, "OffsetCommit", 8, **commit_body(8, [(Missing, [(0, 5)])]))
    assert GROUPS.topic not in broker.image.topics


@pytest.mark.parametrize("version", VERSIONS["OffsetCommit"])
async def test_commit_tells_the_error_of_the_group_for_each_partition(
    broker: Broker, ask: Ask, version: int
) -> None:
    topic = await create(broker, "a", 2)
    joined = await stable_member(broker, ask)
    body = commit_body(version, [(topic, [(0, 5), (1, 6)])])
    body |= {"member_id": joined.member_id, "generation_id_or_member_epoch": 9}
    answer = await ask(broker, "OffsetCommit", version, **body)
    codes = [each.error_code for each in answer.topics[0].partitions]
    assert codes == [ErrorCode.illegal_generation] * 2


async def test_commit_refuses_metadata_that_is_too_large_for_itself(broker: Broker, ask: Ask) -> None:
    topic = await create(broker, "a", 2)
    body = commit_body(8, [(topic, [(0, 5), (1, 6)])])
    body["topics"][0]["partitions"][0]["committed_metadata"] = "x" * 5_000
    answer = await ask(broker, "OffsetCommit", 8, **body)
    codes = [each.error_code for each in answer.topics[0].partitions]
    assert codes == [ErrorCode.offset_metadata_too_large, ErrorCode.none]


async def test_commit_keeps_offsets_for_the_retention_time_of_the_request(broker: Broker, ask: Ask) -> None:
    topic = await create(broker, "a")
    await ask(broker, "OffsetCommit", 2, **commit_body(2, [(topic, [(0, 5)])]), retention_time=0)
    await broker.groups.expire()
    stored = await ask(broker, "OffsetFetch", 7, group_id="g", topics=None)
    assert stored.topics == ()


def fetch_body(version: int, topics: list[tuple[Any, list[int]]] | None) -> dict[str, Any]:
    bodies: list[dict[str, Any]] | None = None
    if topics is not None:
        bodies = [
            {
                **({"topic_id": topic.id} if version >= 10 else {"name": topic.name}),
                "partition_indexes": indexes,
            }
            for topic, indexes in topics
        ]
    if version >= 8:
        return {"groups": [{"group_id": "g", "topics": bodies}], "require_stable": True}
    return {"group_id": "g", "topics": bodies, "require_stable": True}


@pytest.mark.parametrize("version", VERSIONS["OffsetFetch"])
async def test_fetch_of_named_partitions(broker: Broker, ask: Ask, version: int) -> None:
    topic = await create(broker, "a", 2)
    await ask(broker, "OffsetCommit", 8, **commit_body(8, [(topic, [(0, 5)])]))
    body = fetch_body(version, [(topic, [0, 1]), (Missing, [0])])
    answer = await ask(broker, "OffsetFetch", version, **body)
    group = answer.groups[0] if version >= 8 else answer
    if version >= 2:
        assert group.error_code is ErrorCode.none
    a, missing = group.topics
    assert [
        (each.partition_index, each.committed_offset, each.metadata, each.error_code) for each in a.partitions
    ] == [(0, 5, "note", ErrorCode.none), (1, -1, "", ErrorCode.none)]
    if version >= 5:
        assert [each.committed_leader_epoch for each in a.partitions] == [3, -1]
    unknown = ErrorCode.unknown_topic_id if version >= 10 else ErrorCode.none
    assert [(each.committed_offset, each.error_code) for each in missing.partitions] == [(-1, unknown)]
    if version >= 10:
        assert (a.topic_id, missing.topic_id) == (topic.id, Missing.id)


@pytest.mark.parametrize("version", range(2, 11))
async def test_fetch_of_everything(broker: Broker, ask: Ask, version: int) -> None:
    a, b = await create(broker, "a", 2), await create(broker, "b")
    await ask(broker, "OffsetCommit", 8, **commit_body(8, [(a, [(0, 5), (1, 6)]), (b, [(0, 7)])]))
    answer = await ask(broker, "OffsetFetch", version, **fetch_body(version, None))
    topics = answer.groups[0].topics if version >= 8 else answer.topics
    found = {
        topic.topic_id if version >= 10 else topic.name: [each.committed_offset for each in topic.partitions]
        for topic in topics
    }
    assert found == ({a.id: [5, 6], b.id: [7]} if version >= 10 else {"a": [5, 6], "b": [7]})


@pytest.mark.parametrize("version", range(8, 11))
async def test_fetch_of_several_groups(broker: Broker, ask: Ask, version: int) -> None:
    topic = await create(broker, "a")
    for group, offset in (("g", 5), ("h", 6)):
        await ask(
            broker, "OffsetCommit", 8, **{**commit_body(8, [(topic, [(0, offset)])]), "group_id": group}
        )
    groups = [{"group_id": name, "topics": None} for name in ("g", "h", "nobody")]
    answer = await ask(broker, "OffsetFetch", version, groups=groups)
    assert [
        (group.group_id, [each.committed_offset for topic in group.topics for each in topic.partitions])
        for group in answer.groups
    ] == [("g", [5]), ("h", [6]), ("nobody", [])]


async def test_a_group_that_is_named_twice_is_not_answered_twice_with_all_its_offsets(
    broker: Broker, ask: Ask
) -> None:
    topic = await create(broker, "a")
    await ask(broker, "OffsetCommit", 8, **commit_body(8, [(topic, [(0, 5)])]))
    groups = [{"group_id": name, "topics": None} for name in ("g", "h", "g")]
    answer = await ask(broker, "OffsetFetch", 8, groups=groups)
    refused = ErrorCode.invalid_request
    assert [(group.group_id, group.error_code, group.topics) for group in answer.groups] == [
        ("g", refused, ()),
        ("h", ErrorCode.none, ()),
        ("g", refused, ()),
    ]


async def test_a_group_that_is_named_twice_is_described_once(broker: Broker, ask: Ask) -> None:
    await stable_member(broker, ask)
    answer = await ask(broker, "DescribeGroups", 4, groups=["g", "nobody", "g"])
    assert [group.group_id for group in answer.groups] == ["g", "nobody"]


async def test_very_many_members_leave_at_once(broker: Broker, ask: Ask) -> None:
    joined = await stable_member(broker, ask)
    names = [f"nobody-{number}" for number in range(1_200)] + [joined.member_id]
    members = [{"member_id": name, "group_instance_id": None} for name in names]
    answer = await ask(broker, "LeaveGroup", 4, group_id="g", members=members)
    assert [each.member_id for each in answer.members] == names
    assert [each.error_code for each in answer.members[-2:]] == [
        ErrorCode.unknown_member_id,
        ErrorCode.none,
    ]


@pytest.mark.parametrize("version", VERSIONS["OffsetFetch"])
async def test_fetch_tells_that_the_coordinator_is_stopped(broker: Broker, ask: Ask, version: int) -> None:
    topic = await create(broker, "a")
    await broker.coordinators.ensure_topic(GROUPS)
    stop_groups(broker)
    answer = await ask(broker, "OffsetFetch", version, **fetch_body(version, [(topic, [0])]))
    group = answer.groups[0] if version >= 8 else answer
    if version >= 2:
        assert (group.error_code, group.topics) == (ErrorCode.coordinator_not_available, ())
    else:
        (partition,) = group.topics[0].partitions
        assert partition.error_code is ErrorCode.coordinator_not_available
        assert partition.committed_offset == -1


async def test_offset_delete(broker: Broker, ask: Ask) -> None:
    topic = await create(broker, "a", 2)
    await ask(broker, "OffsetCommit", 8, **commit_body(8, [(topic, [(0, 5), (1, 6)])]))
    topics = [
        {"name": "a", "partitions": [{"partition_index": 0}, {"partition_index": 9}]},
        {"name": "missing", "partitions": [{"partition_index": 0}]},
    ]
    answer = await ask(broker, "OffsetDelete", 0, group_id="g", topics=topics)
    assert answer.error_code is ErrorCode.none
    assert [(each.name, [p.error_code for p in each.partitions]) for each in answer.topics] == [
        ("a", [ErrorCode.none, ErrorCode.unknown_topic_or_partition]),
        ("missing", [ErrorCode.unknown_topic_or_partition]),
    ]
    left = await ask(broker, "OffsetFetch", 7, group_id="g", topics=None)
    assert [each.partition_index for each in left.topics[0].partitions] == [1]
    for group, code in (("nobody", ErrorCode.group_id_not_found), ("", ErrorCode.invalid_group_id)):
        answer = await ask(broker, "OffsetDelete", 0, group_id=group, topics=topics)
        assert (answer.error_code, answer.topics) == (code, ())


# --- ListGroups, DescribeGroups, DeleteGroups


@pytest.mark.parametrize("version", VERSIONS["ListGroups"])
async def test_list_groups(broker: Broker, ask: Ask, version: int) -> None:
    topic = await create(broker, "a")
    await stable_member(broker, ask)
    await ask(broker, "OffsetCommit", 8, **{**commit_body(8, [(topic, [(0, 1)])]), "group_id": "idle"})
    answer = await ask(broker, "ListGroups", version)
    assert answer.error_code is ErrorCode.none
    listed = {each.group_id: each for each in answer.groups}
    assert {name: each.protocol_type for name, each in listed.items()} == {"g": "consumer", "idle": ""}
    if version >= 4:
        assert {name: each.group_state for name, each in listed.items()} == {"g": "Stable", "idle": "Empty"}
        filtered = await ask(broker, "ListGroups", version, states_filter=["empty"])
        assert [each.group_id for each in filtered.groups] == ["idle"]
    if version >= 5:
        assert {each.group_type for each in answer.groups} == {"classic"}
        filtered = await ask(broker, "ListGroups", version, types_filter=["share"])
        assert filtered.groups == ()


@pytest.mark.parametrize("version", VERSIONS["DescribeGroups"])
async def test_describe_groups(broker: Broker, ask: Ask, version: int) -> None:
    joined = await stable_member(broker, ask)
    answer = await ask(
        broker, "DescribeGroups", version, groups=["nobody", "g"], include_authorized_operations=True
    )
    nobody, group = answer.groups
    assert (nobody.group_id, nobody.group_state, nobody.members) == ("nobody", "Dead", ())
    assert nobody.error_code is (ErrorCode.group_id_not_found if version >= 6 else ErrorCode.none)
    assert (group.error_code, group.group_state) == (ErrorCode.none, "Stable")
    assert (group.protocol_type, group.protocol_data) == ("consumer", "range")
    (member,) = group.members
    assert (member.member_id, member.member_assignment) == (joined.member_id, b"mine")
    assert member.member_metadata == b"subscription"
    if version >= 3:
        assert group.authorized_operations == 0b1101_0100_1000
        (silent,) = (await ask(broker, "DescribeGroups", version, groups=["g"])).groups
        assert silent.authorized_operations == -(2**31)
    if version >= 6:
        assert "nobody" in nobody.error_message
        assert group.error_message is None


@pytest.mark.parametrize("version", VERSIONS["DeleteGroups"])
async def test_delete_groups(broker: Broker, ask: Ask, version: int) -> None:
    topic = await create(broker, "a")
    await stable_member(broker, ask)
    await ask(broker, "OffsetCommit", 8, **{**commit_body(8, [(topic, [(0, 1)])]), "group_id": "idle"})
    answer = await ask(broker, "DeleteGroups", version, groups_names=["idle", "g", "nobody", "g"])
    assert [(each.group_id, each.error_code) for each in answer.results] == [
        ("idle", ErrorCode.none),
        ("g", ErrorCode.non_empty_group),
        ("nobody", ErrorCode.group_id_not_found),
    ]
    listed = await ask(broker, "ListGroups", 5)
    assert [each.group_id for each in listed.groups] == ["g"]


# --- without the offsets topic


async def test_without_the_offsets_topic_every_group_is_unknown(broker: Broker, ask: Ask) -> None:
    topic = await create(broker, "a")
    beat = {"group_id": "g", "generation_id": 1, "member_id": "m"}
    assert (await ask(broker, "Heartbeat", 4, **beat)).error_code is ErrorCode.unknown_member_id
    assert (await ask(broker, "SyncGroup", 3, **beat)).error_code is ErrorCode.unknown_member_id
    left = await ask(broker, "LeaveGroup", 5, group_id="g", members=[{"member_id": "m"}])
    assert [each.error_code for each in left.members] == [ErrorCode.unknown_member_id]
    fetched = await ask(broker, "OffsetFetch", 7, **fetch_body(7, [(topic, [0])]))
    assert (fetched.error_code, fetched.topics[0].partitions[0].committed_offset) == (ErrorCode.none, -1)
    assert (await ask(broker, "OffsetFetch", 7, **fetch_body(7, None))).topics == ()
    deleted = await ask(broker, "OffsetDelete", 0, group_id="g", topics=[])
    assert deleted.error_code is ErrorCode.group_id_not_found
    listed = await ask(broker, "ListGroups", 5)
    assert (listed.error_code, listed.groups) == (ErrorCode.none, ())
    (described,) = (await ask(broker, "DescribeGroups", 5, groups=["g"])).groups
    assert (described.error_code, described.group_state) == (ErrorCode.none, "Dead")
    (gone,) = (await ask(broker, "DeleteGroups", 2, groups_names=["g"])).results
    assert gone.error_code is ErrorCode.group_id_not_found
    for api, body in (("Heartbeat", beat), ("SyncGroup", beat), ("OffsetDelete", {"topics": []})):
        answer = await ask(broker, api, 0, **{**body, "group_id": ""})
        assert answer.error_code is ErrorCode.invalid_group_id
    assert GROUPS.topic not in broker.image.topics


async def test_calls_that_need_the_offsets_topic_say_that_it_cannot_be_created(
    make_broker: MakeBroker, ask: Ask
) -> None:
    broker = await make_broker(default_replication=3)
    topic = await create(broker, "a")
    joined = await ask(broker, "JoinGroup", 9, **join_body(member_id="m"))
    assert (joined.error_code, joined.member_id) == (ErrorCode.coordinator_not_available, "m")
    committed = await ask(broker, "OffsetCommit", 8, **commit_body(8, [(topic, [(0, 5)])]))
    assert committed.topics[0].partitions[0].error_code is ErrorCode.coordinator_not_available


# --- InitProducerId


@pytest.mark.parametrize("version", VERSIONS["InitProducerId"])
async def test_init_producer_id_never_gives_an_id_twice(broker: Broker, ask: Ask, version: int) -> None:
    body = {"transactional_id": None, "transaction_timeout": 1000}
    answers = [await ask(broker, "InitProducerId", version, **body) for _ in range(3)]
    # A producer that has an id already gets a new one as well.
    answers.append(await ask(broker, "InitProducerId", version, **body, producer_id=0, producer_epoch=4))
    assert [each.error_code for each in answers] == [ErrorCode.none] * 4
    assert [each.producer_epoch for each in answers] == [0] * 4
    assert len({each.producer_id for each in answers}) == 4
    if version >= 6:
        assert answers[0].ongoing_txn_producer_id == -1


@pytest.mark.parametrize("version", VERSIONS["InitProducerId"])
async def test_init_producer_id_refuses_an_empty_transactional_id(
    broker: Broker, ask: Ask, version: int
) -> None:
    answer = await ask(broker, "InitProducerId", version, transactional_id="", transaction_timeout=1_000)
    assert (answer.error_code, answer.producer_id, answer.producer_epoch) == (
        ErrorCode.invalid_request,
        -1,
        -1,
    )


@pytest.mark.parametrize("version", range(3, 7))
@pytest.mark.parametrize("known", [(5, -1), (-1, 5)])
async def test_init_producer_id_refuses_an_id_without_its_epoch(
    broker: Broker, ask: Ask, version: int, known: tuple[int, int]
) -> None:
    answer = await ask(
        broker,
        "InitProducerId",
        version,
        transactional_id=None,
        producer_id=known[0],
        producer_epoch=known[1],
    )
    assert answer.error_code is ErrorCode.invalid_request


async def test_init_producer_id_can_be_tried_again_when_the_metadata_store_is_gone(
    broker: Broker, ask: Ask
) -> None:
    await broker.controller.stop()
    answer = await ask(broker, "InitProducerId", 4, transactional_id=None)
    assert answer.error_code is ErrorCode.coordinator_not_available
