"""Classic members in consumer groups, and groups that change their protocol while they are in use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.consumer_groups import ConsumerScript, FakeTopics, subscription
from support.group_invariants import check_groups
from tidemill.errors import DiskFull, ErrorCode
from tidemill.groups.classic.group import ClassicGroup
from tidemill.groups.consumer.group import ConsumerGroup
from tidemill.groups.messages import (
    JoinProtocol,
    JoinReply,
    JoinRequest,
    LeavingMember,
    OffsetCommitRequest,
    OffsetToCommit,
    SyncRequest,
)
from tidemill.wire.consumer_protocol import pack_assignment, parse_assignment

ALL = {("t", index) for index in range(6)}


@pytest.fixture(params=[False, True], ids=["small", "large"])
def script(request: pytest.FixtureRequest) -> ConsumerScript:
    return ConsumerScript(FakeTopics(t=6), on_drafts=request.param)


def joined(reply: JoinReply | None) -> JoinReply:
    assert reply is not None
    assert reply.error is ErrorCode.none
    return reply


def classic_group(script: ConsumerScript, *shares: dict[str, list[int]]) -> list[str]:
    """A stable classic group whose members have these shares; returns their ids, the leader first."""
    protocols = (JoinProtocol("range", subscription(["t"])),)
    ids = [f"m{number}" for number in range(len(shares))]
    request = JoinRequest("g", "", "consumer", protocols, 10_000, 20_000, client_id="old", version=3)
    for member_id in ids:
        script.state.join(request, f"join-{member_id}", member_id, script.now_ms)
    script.wait(1)
    if len(ids) > 1:  # The first one was alone in a generation of its own; all join again for the next.
        for member_id in ids:
            script.state.join(replace(request, member_id=member_id), f"again-{member_id}", "", script.now_ms)
    group = script.state.groups["g"]
    assert isinstance(group, ClassicGroup)
    for member_id in ids[1:]:
        script.state.sync(SyncRequest("g", member_id, group.generation), member_id, script.now_ms)
    packed = {each: pack_assignment(0, share) for each, share in zip(ids, shares, strict=True)}
    script.state.sync(SyncRequest("g", ids[0], group.generation, packed), "leader", script.now_ms)
    assert str(group.state) == "Stable"
    check_groups(script.state)
    script.replies.clear()
    return ids


def commit(script: ConsumerScript, member_id: str, generation: int) -> ErrorCode:
    request = OffsetCommitRequest("g", [OffsetToCommit("t", 0, 5)], generation, member_id, version=8)
    return script.state.commit_offsets(request, script.now_ms)["t", 0]


# --- upgrade


def test_a_new_member_makes_a_classic_group_a_consumer_group(script: ConsumerScript) -> None:
    first, second = classic_group(script, {"t": [0, 1, 2]}, {"t": [3, 4, 5]})
    before = script.state.groups["g"]
    assert isinstance(before, ClassicGroup)
    generation = before.generation
    assert commit(script, first, generation) is ErrorCode.none
    reply = script.join("new", "t")
    assert (reply.error, reply.assignment) == (ErrorCode.none, frozenset())
    assert reply.member_epoch == generation + 1
    assert script.assigned(first) == {("t", 0), ("t", 1), ("t", 2)}, (
        "nobody loses anything by the upgrade alone"
    )
    assert script.assigned(second) == {("t", 3), ("t", 4), ("t", 5)}
    assert script.state.offsets.get("g", "t", 0) is not None

    # The old members are sent back to join; they are eager, so they give everything up before.
    told = {}
    for member_id in (first, second):
        assert script.classic_beat(member_id, generation) is ErrorCode.rebalance_in_progress
        answer = joined(script.classic_join(member_id))
        assert (answer.generation, answer.protocol_name, answer.leader) == (generation + 1, "range", "")
        told[member_id] = script.told(script.classic_sync(member_id, answer.generation))
    script.beat("new", [])
    assert script.assigned("new") | told[first] | told[second] == ALL
    assert [len(told[first]), len(told[second]), len(script.assigned("new"))] == [2, 2, 2]
    assert script.classic_beat(first, generation + 1) is ErrorCode.none
    assert commit(script, first, generation + 1) is ErrorCode.none
    assert commit(script, first, generation) is ErrorCode.illegal_generation
    assert script.group.state == "Stable"


def test_members_that_wait_in_a_rebalance_are_told_to_join_again(script: ConsumerScript) -> None:
    (first,) = classic_group(script, {"t": [0, 1, 2, 3, 4, 5]})
    assert script.classic_join() is None, "it waits for the first one to join again"
    script.join("new", "t")
    (waiting,) = script.replies
    assert waiting.token == "join"
    assert waiting.body.error is ErrorCode.rebalance_in_progress
    assert isinstance(script.state.groups["g"], ConsumerGroup)
    assert len(script.group.members) == 3
    assert script.assigned(first) == ALL


def test_an_empty_classic_group_makes_room_and_keeps_its_offsets(script: ConsumerScript) -> None:
    (only,) = classic_group(script, {"t": [0]})
    commit(script, only, 1)
    script.classic_leave(LeavingMember(only))
    assert script.join("new", "t").member_epoch == 1
    assert script.assigned("new") == ALL
    reloaded = script.reloaded()
    assert isinstance(reloaded.groups["g"], ConsumerGroup)
    assert reloaded.offsets.get("g", "t", 0) is not None


def test_a_group_of_another_kind_is_not_upgraded(script: ConsumerScript) -> None:
    request = JoinRequest("g", "", "connect", (JoinProtocol("x", b""),), 10_000, 20_000, version=3)
    script.state.join(request, "join", "m", script.now_ms)
    script.wait(1)
    assert script.join("new", "t").error is ErrorCode.group_id_not_found
    assert isinstance(script.state.groups["g"], ClassicGroup)


def test_a_group_whose_members_cannot_be_understood_is_not_upgraded(script: ConsumerScript) -> None:
    request = JoinRequest("g", "", "consumer", (JoinProtocol("x", b"?"),), 10_000, 20_000, version=3)
    script.state.join(request, "join", "m", script.now_ms)
    script.wait(1)
    assert script.join("new", "t").error is ErrorCode.group_id_not_found
    assert isinstance(script.state.groups["g"], ClassicGroup)


def test_a_partition_that_a_leader_gave_to_two_members_is_kept_by_one(script: ConsumerScript) -> None:
    first, second = classic_group(script, {"t": [0, 1]}, {"t": [1, 2], "gone": [0]})
    script.join("new", "t")
    assert script.assigned(first) == {("t", 0), ("t", 1)}
    assert script.assigned(second) == {("t", 2)}


def test_an_upgrade_that_cannot_be_stored_did_not_happen(script: ConsumerScript) -> None:
    (only,) = classic_group(script, {"t": [0]})
    script.fail_append_with = DiskFull("no room")
    with pytest.raises(DiskFull):
        script.join("new", "t")
    script.fail_append_with = None
    assert isinstance(script.state.groups["g"], ClassicGroup)
    assert script.classic_beat(only, 1) is ErrorCode.none


# --- classic members of a consumer group


def test_a_cooperative_member_revokes_before_others_get_its_partitions(script: ConsumerScript) -> None:
    script.join("new", "t")
    script.send("new", -1)
    script.join("new", "t")
    # The classic member comes first to own all of it.
    member = joined(script.classic_join(owned=[]))
    script.beat("new", [("t", index) for index in range(3)])
    script.settle("new")
    again = joined(script.classic_join(member.member_id, owned=[]))
    mine = script.told(script.classic_sync(member.member_id, again.generation))
    assert len(mine) == 3

    script.join("third", "t")
    generation = script.group.members[member.member_id].epoch
    assert script.classic_beat(member.member_id, generation) is ErrorCode.rebalance_in_progress
    revoking = joined(script.classic_join(member.member_id, owned=mine))
    assert revoking.generation == generation, "it stays in its generation until it has revoked"
    kept = script.told(script.classic_sync(member.member_id, generation))
    assert kept < mine
    script.settle("new")
    assert not script.topics.ids(mine - kept) & script.group.members["third"].assigned

    done = joined(script.classic_join(member.member_id, owned=kept))
    assert done.generation == script.group.epoch
    script.settle("new", "third")
    assert script.assigned("new") | script.assigned("third") | kept == ALL
    assert script.group.state == "Stable"


def test_a_member_that_waits_for_others_is_called_when_they_let_go(
    script: ConsumerScript,
) -> None:
    script.join("new", "t")
    member = joined(script.classic_join())
    script.classic_sync(member.member_id, member.generation)
    assert script.classic_beat(member.member_id, member.generation) is ErrorCode.none, "nothing is free yet"
    script.beat("new", ALL)
    script.beat("new", script.assigned("new"))
    assert script.classic_beat(member.member_id, member.generation) is ErrorCode.rebalance_in_progress
    again = joined(script.classic_join(member.member_id))
    assert len(script.told(script.classic_sync(member.member_id, again.generation))) == 3


def test_a_dynamic_member_is_told_its_id_first(script: ConsumerScript) -> None:
    script.join("new", "t")
    refused = script.classic_join(version=4)
    assert refused is not None
    assert refused.error is ErrorCode.member_id_required
    assert refused.member_id not in script.group.members
    assert joined(script.classic_join(refused.member_id, version=4)).member_id == refused.member_id


@pytest.mark.parametrize(
    "fields",
    [
        {"protocols": ()},
        {"protocols": (JoinProtocol("range", b"?"),)},
        {"protocols": (JoinProtocol("other", subscription(["t"])),)},
    ],
)
def test_a_member_that_does_not_fit_is_refused(script: ConsumerScript, fields: dict[str, Any]) -> None:
    script.join("new", "t")
    joined(script.classic_join())
    refused = script.classic_join(**fields)
    assert refused is not None
    assert refused.error is ErrorCode.inconsistent_group_protocol
    assert len(script.group.members) == 2


def test_requests_of_classic_members_are_checked(script: ConsumerScript) -> None:
    script.join("new", "t")
    member = joined(script.classic_join(instance_id="i"))
    member_id, generation = member.member_id, member.generation
    assert script.classic_beat("nobody", generation) is ErrorCode.unknown_member_id
    assert script.classic_beat("new", 1) is ErrorCode.unknown_member_id
    assert script.classic_beat(member_id, generation - 1) is ErrorCode.illegal_generation
    assert script.classic_beat("other", generation, "i") is ErrorCode.fenced_instance_id
    assert script.classic_sync(member_id, generation + 1).error is ErrorCode.illegal_generation
    wrong = script.classic_sync(member_id, generation, protocol_type="consumer", protocol_name="other")
    assert wrong.error is ErrorCode.inconsistent_group_protocol
    script.join("third", "t")
    assert script.classic_sync(member_id, generation).error is ErrorCode.rebalance_in_progress
    leaving = (LeavingMember("nobody"), LeavingMember("", "j"), LeavingMember("other", "i"))
    assert script.classic_leave(*leaving) == [
        ErrorCode.unknown_member_id,
        ErrorCode.unknown_member_id,
        ErrorCode.fenced_instance_id,
    ]


def test_classic_members_leave_one_by_one_or_by_instance_id(script: ConsumerScript) -> None:
    script.join("new", "t")
    first = joined(script.classic_join())
    second = joined(script.classic_join(instance_id="i"))
    epoch = script.group.epoch
    leaving = (LeavingMember(first.member_id), LeavingMember("", "i"), LeavingMember(second.member_id, "i"))
    assert script.classic_leave(*leaving) == [ErrorCode.none, ErrorCode.none, ErrorCode.unknown_member_id]
    assert set(script.group.members) == {"new"}
    assert script.group.epoch == epoch + 1
    script.settle("new")
    assert script.assigned("new") == ALL


def test_an_operator_removes_members_of_the_new_protocol(script: ConsumerScript) -> None:
    script.join("static", "t", instance_id="i")
    script.join("dynamic", "t")
    script.join("stays", "t")
    epoch = script.group.epoch
    leaving = (LeavingMember("", "i"), LeavingMember("dynamic"), LeavingMember("static", "i"))
    assert script.classic_leave(*leaving) == [ErrorCode.none, ErrorCode.none, ErrorCode.unknown_member_id]
    assert set(script.group.members) == {"stays"}
    assert script.group.epoch == epoch + 1
    assert script.send("static", epoch, instance_id="i").error is ErrorCode.unknown_member_id
    script.settle("stays")
    assert script.assigned("stays") == ALL
    assert script.join("again", "t", instance_id="i").error is ErrorCode.none, "the instance id is free"


def test_a_static_member_that_left_for_a_while_is_removed_for_good(script: ConsumerScript) -> None:
    script.join("static", "t", instance_id="i")
    script.join("other", "t")
    assert script.send("static", -2, instance_id="i").error is ErrorCode.none
    assert script.classic_leave(LeavingMember("", "i")) == [ErrorCode.none]
    assert set(script.group.members) == {"other"}
    assert set(script.reloaded().groups["g"].members) == {"other"}


def test_removing_all_members_of_the_new_protocol_leaves_a_classic_group_behind(
    script: ConsumerScript,
) -> None:
    script.join("first", "t", instance_id="i")
    script.join("second", "t")
    stays, goes = joined(script.classic_join()), joined(script.classic_join())
    leaving = (LeavingMember("second"), LeavingMember("", "i"), LeavingMember(goes.member_id))
    assert script.classic_leave(*leaving) == [ErrorCode.none] * 3
    assert [each.member_id for each in classic(script).members] == [stays.member_id]
    reloaded = script.reloaded().groups["g"]
    assert isinstance(reloaded, ClassicGroup)
    assert [each.member_id for each in reloaded.members] == [stays.member_id]


def test_a_classic_member_has_the_session_timeout_that_it_asked_for(script: ConsumerScript) -> None:
    script.join("new", "t")
    member = joined(script.classic_join(session_timeout_ms=3_000, rebalance_timeout_ms=60_000))
    script.classic_sync(member.member_id, member.generation)
    script.wait(2_900)
    script.classic_beat(member.member_id, member.generation)
    script.wait(2_900)
    assert member.member_id in script.group.members
    script.wait(200)
    assert set(script.group.members) == {"new"}


@pytest.mark.parametrize("stops_at", ["sync", "join"])
def test_a_classic_member_that_only_heartbeats_is_removed(script: ConsumerScript, stops_at: str) -> None:
    script.join("new", "t")
    member = joined(script.classic_join(rebalance_timeout_ms=20_000))
    if stops_at == "join":
        script.classic_sync(member.member_id, member.generation)
        script.join("third", "t")
    for _ in range(10):
        script.classic_beat(member.member_id, member.generation)
        script.beat("new")
        script.wait(3_000)
    assert member.member_id not in script.group.members
    assert "new" in script.group.members


def test_a_static_member_changes_its_protocol_and_keeps_its_partitions(script: ConsumerScript) -> None:
    script.join("anchor", "t")
    old = joined(script.classic_join(instance_id="i"))
    script.settle("anchor")
    again = joined(script.classic_join(old.member_id, instance_id="i"))
    mine = script.told(script.classic_sync(old.member_id, again.generation, instance_id="i"))
    assert len(mine) == 3
    reply = script.join("new", "t", instance_id="i")
    assert reply.error is ErrorCode.none
    assert reply.assignment is not None
    assert script.topics.named(reply.assignment) == mine
    assert old.member_id not in script.group.members
    assert script.classic_beat(old.member_id, again.generation, "i") is ErrorCode.fenced_instance_id


# --- downgrade


def classic(script: ConsumerScript) -> ClassicGroup:
    group = script.state.groups["g"]
    assert isinstance(group, ClassicGroup)
    return group


def test_the_last_new_member_leaves_a_classic_group_behind(script: ConsumerScript) -> None:
    script.join("new", "t")
    member = joined(script.classic_join())
    script.settle("new")
    again = joined(script.classic_join(member.member_id))
    script.classic_sync(member.member_id, again.generation)
    commit(script, member.member_id, again.generation)
    assert script.send("new", -1).error is ErrorCode.none
    assert str(classic(script).state) == "PreparingRebalance"
    assert script.classic_beat(member.member_id, again.generation) is ErrorCode.rebalance_in_progress
    leads = joined(script.classic_join(member.member_id))
    assert leads.leader == member.member_id
    assert leads.generation > again.generation
    assert script.state.offsets.get("g", "t", 0) is not None
    assert script.send("new", 1).error is ErrorCode.group_id_not_found


def test_the_last_new_members_session_ends_and_a_classic_group_remains(script: ConsumerScript) -> None:
    script.join("new", "t")
    member = joined(script.classic_join(session_timeout_ms=60_000, rebalance_timeout_ms=100_000))
    script.classic_sync(member.member_id, member.generation)
    script.wait(46_000)
    assert [each.member_id for each in classic(script).members] == [member.member_id]
    reloaded = script.reloaded().groups["g"]
    assert isinstance(reloaded, ClassicGroup)
    assert [each.member_id for each in reloaded.members] == [member.member_id]
    assert set(parse_assignment(reloaded.members[0].assignment)) < ALL


def test_a_static_member_that_goes_back_makes_the_group_classic_without_a_rebalance(
    script: ConsumerScript,
) -> None:
    script.join("new", "t", instance_id="i")
    other = joined(script.classic_join())
    script.settle("new")
    again = joined(script.classic_join(other.member_id))
    script.classic_sync(other.member_id, again.generation)
    mine = script.assigned("new")
    back = joined(script.classic_join(instance_id="i"))
    assert str(classic(script).state) == "Stable"
    assert back.generation == classic(script).generation
    assert script.told(script.classic_sync(back.member_id, back.generation, instance_id="i")) == mine
    assert script.classic_beat(other.member_id, again.generation) is ErrorCode.none


def test_a_downgrade_that_cannot_be_stored_did_not_happen(script: ConsumerScript) -> None:
    script.join("new", "t")
    joined(script.classic_join())
    script.fail_append_with = DiskFull("no room")
    with pytest.raises(DiskFull):
        script.send("new", -1)
    script.fail_append_with = None
    assert "new" in script.group.members


def test_a_classic_member_joins_an_empty_consumer_group_as_a_classic_group(script: ConsumerScript) -> None:
    script.join("new", "t", regex="t")
    script.send("new", -1)
    unknown = script.classic_join("somebody")
    assert unknown is not None
    assert unknown.error is ErrorCode.unknown_member_id
    assert script.classic_join() is None
    script.wait(1)
    assert len(classic(script).members) == 1
    reloaded = script.reloaded().groups["g"]
    assert isinstance(reloaded, ClassicGroup)


def test_a_group_can_go_back_and_forth(script: ConsumerScript) -> None:
    (only,) = classic_group(script, {"t": [0, 1, 2, 3, 4, 5]})
    for round_number in range(3):
        name = f"new-{round_number}"
        script.join(name, "t")
        assert isinstance(script.reloaded().groups["g"], ConsumerGroup)
        again = joined(script.classic_join(only))
        script.classic_sync(only, again.generation)
        script.send(name, -1)
        assert isinstance(script.reloaded().groups["g"], ClassicGroup)
        leads = joined(script.classic_join(only))
        packed = {only: pack_assignment(0, {"t": list(range(6))})}
        script.classic_sync(only, leads.generation, assignments=packed)
    assert str(classic(script).state) == "Stable"
