from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.group_invariants import check_groups
from tidemill.errors import DiskFull, ErrorCode
from tidemill.groups.classic.group import GROUP_METADATA_BYTES_MAX
from tidemill.groups.messages import JoinedMember, JoinProtocol, LeavingMember, LeftMember
from tidemill.groups.settings import GroupSettings

RANGE = (JoinProtocol("range", b"m"),)
OTHER_METADATA = (JoinProtocol("range", b"changed"),)
Script = Any


def subscription(*topics: str) -> bytes:
    encoded = b"".join(len(topic).to_bytes(2, "big") + topic.encode() for topic in topics)
    return b"\x00\x01" + len(topics).to_bytes(4, "big") + encoded + b"\xff\xff\xff\xff"


class TestJoining:
    def test_a_new_client_is_told_its_id_and_joins_with_it(self, script: Script) -> None:
        first = script.send_join("a1", version=4)
        assert first.error is ErrorCode.member_id_required
        assert first.member_id == "id1"
        assert script.send_join("a2", "id1", version=4) is None
        script.wait(3_000)
        reply = script.join_reply("a2")
        assert (reply.error, reply.generation, reply.leader, reply.protocol_name) == (
            ErrorCode.none,
            1,
            "id1",
            "range",
        )
        assert reply.members == (JoinedMember("id1", None, b"m"),)

    def test_an_old_client_joins_at_once(self, script: Script) -> None:
        assert script.send_join("a", version=3) is None
        script.wait(2_999)
        assert script.join_reply("a") is None
        script.wait(1)
        assert script.join_reply("a").generation == 1

    def test_an_announced_member_that_never_comes_is_forgotten_after_its_session(
        self, script: Script
    ) -> None:
        script.send_join("a1", version=4)
        script.wait(10_000)
        assert script.send_join("a2", "id1").error is ErrorCode.unknown_member_id

    def test_an_unknown_member_id_is_refused(self, script: Script) -> None:
        assert script.send_join("a", "nobody").error is ErrorCode.unknown_member_id
        assert script.state.groups == {}
        script.stable("b")
        assert script.send_join("c", "nobody").error is ErrorCode.unknown_member_id

    def test_only_the_leader_learns_the_members(self, script: Script) -> None:
        leader, follower = script.stable("a", "b")
        assert {member.member_id for member in script.join_reply("a").members} == {leader, follower}
        assert script.join_reply("b").members == ()
        assert script.join_reply("b").leader == leader

    def test_the_initial_delay_grows_while_members_arrive_but_not_beyond_the_rebalance_timeout(
        self, script: Script
    ) -> None:
        script.send_join("m0", version=3, rebalance_timeout_ms=7_000)
        for number in range(1, 4):
            script.wait(2_000)
            script.send_join(f"m{number}", version=3, rebalance_timeout_ms=7_000)
            assert script.join_reply("m0") is None
        script.wait(999)
        assert script.join_reply("m0") is None
        script.wait(3_001)
        assert script.join_reply("m0").generation == 1
        assert len(script.join_reply("m0").members) == 4

    def test_the_protocol_with_the_most_votes_among_the_shared_ones_wins(self, script: Script) -> None:
        def offer(*names: str) -> tuple[JoinProtocol, ...]:
            return tuple(JoinProtocol(name, name.encode()) for name in names)

        script.send_join("a", version=3, protocols=offer("sticky", "range", "robin"))
        script.send_join("b", version=3, protocols=offer("sticky", "robin", "range"))
        script.send_join("c", version=3, protocols=offer("robin", "range"))
        script.wait_for("a")
        assert {script.join_reply(name).protocol_name for name in "abc"} == {"robin"}

    def test_a_member_without_a_shared_protocol_is_refused(self, script: Script) -> None:
        script.stable("a")
        assert (
            script.send_join("b", protocols=(JoinProtocol("other", b""),)).error
            is ErrorCode.inconsistent_group_protocol
        )
        assert script.send_join("c", protocol_type="connect").error is ErrorCode.inconsistent_group_protocol
        assert script.send_join("d", protocols=()).error is ErrorCode.inconsistent_group_protocol
        assert str(script.group.state) == "Stable"

    def test_a_refused_first_join_creates_no_group(self, script: Script) -> None:
        assert script.send_join("a", protocols=()).error is ErrorCode.inconsistent_group_protocol
        assert script.send_join("b", protocol_type="").error is ErrorCode.inconsistent_group_protocol
        assert script.state.groups == {}
        assert script.log == []

    def test_a_full_group_turns_new_members_away(self, make_script: type[Script]) -> None:
        script = make_script(GroupSettings(max_size=2))
        script.send_join("a", version=3)
        script.send_join("b", version=3)
        assert script.send_join("c", version=3).error is ErrorCode.group_max_size_reached
        script.wait_for("a")
        assert script.join_reply("a").generation == 1
        assert script.send_join("d", version=3).error is ErrorCode.group_max_size_reached

    def test_a_group_whose_members_say_too_much_about_themselves_turns_new_ones_away(
        self, script: Script
    ) -> None:
        half = (JoinProtocol("range", bytes(GROUP_METADATA_BYTES_MAX // 2 - len("range"))),)
        script.send_join("a", version=3, protocols=half)
        script.send_join("b", version=3, protocols=half)
        assert script.send_join("c", version=3).error is ErrorCode.group_max_size_reached
        # The same again takes nothing more, and less makes room.
        assert script.send_join("b2", "id2", version=3, protocols=half) is None
        assert script.send_join("b3", "id2", version=3) is None
        assert script.send_join("d", version=3) is None

    def test_a_retried_join_answers_the_first_attempt_and_keeps_waiting(self, script: Script) -> None:
        script.send_join("a1", version=4)
        script.send_join("a2", "id1")
        assert script.send_join("a3", "id1") is None
        assert script.join_reply("a2").error is ErrorCode.rebalance_in_progress
        script.wait(3_000)
        assert script.join_reply("a3").error is ErrorCode.none

    def test_a_new_member_that_waits_too_long_for_a_rebalance_is_dropped(
        self, make_script: type[Script]
    ) -> None:
        script = make_script(GroupSettings(new_member_join_timeout_ms=5_000))
        [leader] = script.stable("a")
        script.send_join("b", version=3)
        for _ in range(5):
            script.heartbeat(leader, 1)
            script.wait(1_000)
        assert script.join_reply("b").error is ErrorCode.unknown_member_id


class TestRebalancing:
    def test_a_newcomer_makes_the_others_join_again(self, script: Script) -> None:
        [leader] = script.stable("a")
        assert script.send_join("b", version=3) is None
        assert script.heartbeat(leader, 1) is ErrorCode.rebalance_in_progress
        assert script.send_join("a2", leader) is not None
        assert script.join_reply("a2").generation == script.join_reply("b").generation == 2
        assert script.join_reply("b").leader == leader

    def test_a_member_that_does_not_join_again_in_time_is_out(self, script: Script) -> None:
        leader, follower = script.stable("a", "b")
        assert script.send_join("a2", leader) is None
        for _ in range(4):
            script.wait(4_999)
            assert script.heartbeat(follower, 1) is ErrorCode.rebalance_in_progress
        script.wait(4)
        assert script.join_reply("a2").generation == 2
        assert script.heartbeat(follower, 1) is ErrorCode.unknown_member_id

    def test_a_rebalance_waits_for_members_that_were_just_told_their_id(self, script: Script) -> None:
        [leader] = script.stable("a")
        announced = script.send_join("b", version=4).member_id
        assert script.send_join("a2", leader) is None
        script.send_join("b2", announced)
        assert script.join_reply("a2").generation == script.join_reply("b2").generation == 2

    def test_a_leader_that_does_not_join_again_loses_its_role(self, script: Script) -> None:
        leader, follower = script.stable("a", "b")
        script.send_join("b2", follower, protocols=OTHER_METADATA)
        script.wait(20_000)
        assert script.join_reply("b2").leader == follower
        assert script.heartbeat(leader, 1) is ErrorCode.unknown_member_id

    def test_a_follower_that_joins_again_unchanged_gets_the_same_generation(self, script: Script) -> None:
        _, follower = script.stable("a", "b")
        assert script.send_join("b2", follower).generation == 1
        assert str(script.group.state) == "Stable"

    def test_a_follower_that_joins_again_with_other_metadata_starts_a_rebalance(self, script: Script) -> None:
        leader, follower = script.stable("a", "b")
        assert script.send_join("b2", follower, protocols=OTHER_METADATA) is None
        assert script.heartbeat(leader, 1) is ErrorCode.rebalance_in_progress

    def test_the_leader_can_force_a_rebalance_without_a_change(self, script: Script) -> None:
        leader, follower = script.stable("a", "b")
        assert script.send_join("a2", leader) is None
        assert script.heartbeat(follower, 1) is ErrorCode.rebalance_in_progress

    def test_a_join_repeated_before_the_sync_gets_the_same_generation(self, script: Script) -> None:
        script.send_join("a", version=3)
        script.wait(3_000)
        again = script.send_join("a2", "id1")
        assert again.generation == 1
        assert again.members == script.join_reply("a").members

    def test_a_join_with_other_metadata_before_the_sync_starts_over(self, script: Script) -> None:
        script.send_join("a", version=3)
        script.send_join("b", version=3)
        script.wait_for("a")
        script.send_sync("b-sync", "id2", 1)
        assert script.send_join("a2", "id1", protocols=OTHER_METADATA) is None
        assert script.sync_reply("b-sync").error is ErrorCode.rebalance_in_progress

    def test_members_that_never_sync_are_removed(self, script: Script) -> None:
        script.send_join("a", version=3)
        script.send_join("b", version=3)
        script.wait(6_000)
        assert script.join_reply("a").generation == 1
        for _ in range(4):
            assert script.heartbeat("id1", 1) is ErrorCode.none
            assert script.heartbeat("id2", 1) is ErrorCode.none
            script.wait(4_000)
        script.send_sync("a-sync", "id1", 1)
        for _ in range(2):
            script.heartbeat("id1", 1)
            script.wait(2_000)
        assert script.heartbeat("id2", 1) is ErrorCode.unknown_member_id
        assert script.heartbeat("id1", 1) is ErrorCode.rebalance_in_progress

    def test_a_silent_member_is_removed_after_its_session(self, script: Script) -> None:
        leader, follower = script.stable("a", "b")
        script.wait(9_000)
        assert script.heartbeat(leader, 1) is ErrorCode.none
        script.wait(999)
        assert script.heartbeat(leader, 1) is ErrorCode.none
        script.wait(1)
        assert script.heartbeat(leader, 1) is ErrorCode.rebalance_in_progress
        assert script.heartbeat(follower, 1) is ErrorCode.unknown_member_id

    def test_a_member_that_waits_in_a_rebalance_needs_no_heartbeats(self, script: Script) -> None:
        leader, follower = script.stable("a", "b")
        script.send_join("a2", leader)
        for _ in range(4):
            script.wait(4_500)
            script.heartbeat(follower, 1)
        assert script.join_reply("a2") is None
        script.send_join("b2", follower)
        assert script.join_reply("a2").generation == 2

    def test_the_last_member_s_end_makes_the_group_empty_and_that_is_persisted(self, script: Script) -> None:
        script.stable("a")
        script.wait(10_000)
        assert str(script.group.state) == "Empty"
        assert script.log[-1].value.members == ()
        assert script.log[-1].value.generation == 2


class TestSyncing:
    def test_each_member_gets_the_part_the_leader_gave_it(self, script: Script) -> None:
        script.stable("a", "b")
        assert script.sync_reply("a-sync").assignment == b"part-a"
        assert script.sync_reply("b-sync").assignment == b"part-b"
        assert script.sync_reply("b-sync").protocol_type == "consumer"

    def test_a_late_follower_gets_its_part_at_once(self, script: Script) -> None:
        script.send_join("a", version=3)
        script.send_join("b", version=3)
        script.wait_for("a")
        script.send_sync("a-sync", "id1", 1, assignments={"id2": b"late", "stranger": b"x"})
        assert script.sync_reply("a-sync").assignment == b""
        assert script.send_sync("b-sync", "id2", 1).assignment == b"late"

    @pytest.mark.parametrize(
        ("member", "changes", "error"),
        [
            ("nobody", {}, ErrorCode.unknown_member_id),
            ("id1", {"generation": 7}, ErrorCode.illegal_generation),
            ("id1", {"protocol_type": "connect"}, ErrorCode.inconsistent_group_protocol),
            ("id1", {"protocol_name": "sticky"}, ErrorCode.inconsistent_group_protocol),
            ("id1", {"instance_id": "static"}, ErrorCode.unknown_member_id),
        ],
    )
    def test_wrong_syncs_are_refused(
        self, script: Script, member: str, changes: dict[str, Any], error: ErrorCode
    ) -> None:
        script.stable("a")
        generation = changes.pop("generation", 1)
        assert script.send_sync("x", member, generation, **changes).error is error

    def test_matching_protocol_names_are_accepted(self, script: Script) -> None:
        script.stable("a")
        reply = script.send_sync("x", "id1", 1, protocol_type="consumer", protocol_name="range")
        assert reply.error is ErrorCode.none

    def test_a_sync_during_the_next_rebalance_is_told_so(self, script: Script) -> None:
        [leader] = script.stable("a")
        script.send_join("b", version=3)
        assert script.send_sync("x", leader, 1).error is ErrorCode.rebalance_in_progress

    def test_a_sync_to_no_group_is_refused(self, script: Script) -> None:
        assert script.send_sync("x", "id1", 1).error is ErrorCode.unknown_member_id

    def test_a_leader_s_sync_that_cannot_be_persisted_changes_nothing(self, script: Script) -> None:
        script.send_join("a", version=3)
        script.send_join("b", version=3)
        script.wait_for("a")
        script.send_sync("b-sync", "id2", 1)
        script.fail_append_with = DiskFull("no room")
        with pytest.raises(DiskFull):
            script.send_sync("a-sync", "id1", 1, assignments={"id2": b"part"})
        assert str(script.group.state) == "CompletingRebalance"
        check_groups(script.state)
        script.fail_append_with = None
        script.send_sync("a-sync2", "id1", 1, assignments={"id2": b"part"})
        assert script.sync_reply("b-sync").assignment == b"part"


class TestHeartbeat:
    def test_wrong_heartbeats_are_refused(self, script: Script) -> None:
        assert script.heartbeat("id1", 1) is ErrorCode.unknown_member_id
        [leader] = script.stable("a")
        assert script.heartbeat("nobody", 1) is ErrorCode.unknown_member_id
        assert script.heartbeat(leader, 0) is ErrorCode.illegal_generation
        assert script.heartbeat(leader, 1, "static") is ErrorCode.unknown_member_id

    def test_heartbeats_keep_a_member_in(self, script: Script) -> None:
        [leader] = script.stable("a")
        for _ in range(10):
            script.wait(9_999)
            assert script.heartbeat(leader, 1) is ErrorCode.none


class TestLeaving:
    def test_several_members_leave_in_one_rebalance(self, script: Script) -> None:
        leader, second, third = script.stable("a", "b", "c")
        answer = script.leave(LeavingMember(leader), LeavingMember("nobody"), LeavingMember(second))
        assert answer.members == (
            LeftMember(leader, None),
            LeftMember("nobody", None, ErrorCode.unknown_member_id),
            LeftMember(second, None),
        )
        assert script.heartbeat(third, 1) is ErrorCode.rebalance_in_progress
        assert script.send_join("c2", third).leader == third

    def test_a_static_member_is_removed_by_its_instance_id(self, script: Script) -> None:
        script.stable("a", instance_id="one")
        assert script.leave(LeavingMember("", "two")).members[0].error is ErrorCode.unknown_member_id
        assert script.leave(LeavingMember("wrong", "one")).members[0].error is ErrorCode.fenced_instance_id
        assert script.leave(LeavingMember("", "one")).members[0].error is ErrorCode.none
        assert str(script.group.state) == "Empty"

    def test_leaving_answers_a_waiting_join_and_sync(self, script: Script) -> None:
        script.send_join("a", version=3)
        script.send_join("b", version=3)
        script.leave(LeavingMember("id1"))
        assert script.join_reply("a").error is ErrorCode.unknown_member_id
        script.send_join("c", version=3)
        script.wait_for("c")
        script.send_sync("c-sync", "id3", 1)
        script.leave(LeavingMember("id3"))
        assert script.sync_reply("c-sync").error is ErrorCode.unknown_member_id

    def test_an_announced_member_can_leave(self, script: Script) -> None:
        script.send_join("a", version=4)
        assert script.leave(LeavingMember("id1")).members == (LeftMember("id1", None),)
        assert script.send_join("a2", "id1").error is ErrorCode.unknown_member_id

    def test_leaving_no_group_is_refused(self, script: Script) -> None:
        assert script.leave(LeavingMember("x")).members[0].error is ErrorCode.unknown_member_id

    def test_a_leave_that_cannot_be_persisted_changes_nothing(self, script: Script) -> None:
        [leader] = script.stable("a")
        script.fail_append_with = DiskFull("no room")
        with pytest.raises(DiskFull):
            script.leave(LeavingMember(leader))
        assert script.heartbeat(leader, 1) is ErrorCode.none


class TestStaticMembers:
    def test_a_restarted_member_comes_back_without_a_rebalance(self, script: Script) -> None:
        [old_id] = script.stable("a", instance_id="one")
        reply = script.send_join("a2", instance_id="one")
        assert (reply.error, reply.generation, reply.skip_assignment) == (ErrorCode.none, 1, True)
        assert reply.leader == reply.member_id != old_id
        assert [member.member_id for member in reply.members] == [reply.member_id]
        assert script.send_sync("x", reply.member_id, 1, instance_id="one").assignment == b"part-a"
        assert script.log[-1].value.members[0].member_id == reply.member_id

    def test_a_restarted_leader_with_an_old_client_is_told_of_the_former_leader(self, script: Script) -> None:
        [old_id] = script.stable("a", instance_id="one")
        reply = script.send_join("a2", instance_id="one", version=8)
        assert (reply.leader, reply.members, reply.skip_assignment) == (old_id, (), False)

    def test_the_former_holder_of_an_instance_id_is_fenced(self, script: Script) -> None:
        [old_id] = script.stable("a", instance_id="one")
        script.send_join("a2", instance_id="one")
        assert script.heartbeat(old_id, 1, "one") is ErrorCode.fenced_instance_id
        assert script.heartbeat(old_id, 1) is ErrorCode.unknown_member_id
        assert script.send_sync("x", old_id, 1, instance_id="one").error is ErrorCode.fenced_instance_id
        assert script.send_join("y", old_id, instance_id="one").error is ErrorCode.fenced_instance_id

    def test_a_waiting_former_holder_is_fenced_at_once(self, script: Script) -> None:
        script.send_join("a", instance_id="one")
        script.send_join("a2", instance_id="one")
        assert script.join_reply("a").error is ErrorCode.fenced_instance_id
        script.wait(3_000)
        assert script.join_reply("a2").generation == 1

    def test_a_return_with_other_topics_starts_a_rebalance(self, script: Script) -> None:
        before = (JoinProtocol("range", subscription("t")),)
        after = (JoinProtocol("range", subscription("t", "u")),)
        script.send_join("a", instance_id="one", protocols=before)
        script.wait(3_000)
        script.send_sync("a-sync", "id1", 1)
        same = script.send_join("a2", instance_id="one", protocols=before)
        assert same.generation == 1
        other = script.send_join("a3", instance_id="one", protocols=after)
        assert other.generation == 2

    def test_a_return_that_changes_the_protocol_starts_a_rebalance(self, script: Script) -> None:
        both = (JoinProtocol("range", b"m"), JoinProtocol("sticky", b"m"))
        script.send_join("a", instance_id="one", protocols=both)
        script.wait(3_000)
        script.send_sync("a-sync", "id1", 1)
        assert script.send_join("a2", instance_id="one", protocols=both[::-1]).generation == 2

    def test_a_static_member_survives_a_rebalance_it_missed(self, script: Script) -> None:
        script.send_join("a", version=3, session_timeout_ms=50_000)
        script.send_join("s", instance_id="one", session_timeout_ms=50_000)
        script.wait_for("a")
        script.send_sync("s-sync", "id2", 1)
        script.send_sync("a-sync", "id1", 1)
        script.send_join("a2", "id1", session_timeout_ms=50_000)
        script.wait(20_000)
        assert {member.instance_id for member in script.join_reply("a2").members} == {None, "one"}

    def test_a_static_leader_that_missed_a_rebalance_does_not_lead_it(self, script: Script) -> None:
        script.send_join("s", instance_id="one", session_timeout_ms=50_000)
        script.send_join("a", version=3, session_timeout_ms=50_000)
        script.wait_for("a")
        script.send_sync("a-sync", "id2", 1)
        script.send_sync("s-sync", "id1", 1)
        script.send_join("a2", "id2", protocols=OTHER_METADATA, session_timeout_ms=50_000)
        script.wait(20_000)
        assert script.join_reply("a2").leader == "id2"
        assert len(script.join_reply("a2").members) == 2

    def test_a_member_that_returns_before_it_synced_is_still_expected_to(self, script: Script) -> None:
        script.send_join("a", version=3, session_timeout_ms=50_000)
        script.send_join("s", instance_id="one", session_timeout_ms=50_000)
        script.wait_for("a")
        script.send_sync("a-sync", "id1", 1)
        returned = script.send_join("s2", instance_id="one", session_timeout_ms=50_000).member_id
        assert script.heartbeat(returned, 1) is ErrorCode.none
        script.wait(20_000)
        assert script.heartbeat(returned, 1) is ErrorCode.unknown_member_id

    def test_a_return_that_cannot_be_persisted_changes_nothing(self, script: Script) -> None:
        [old_id] = script.stable("a", instance_id="one")
        script.fail_append_with = DiskFull("no room")
        with pytest.raises(DiskFull):
            script.send_join("a2", instance_id="one")
        assert script.heartbeat(old_id, 1, "one") is ErrorCode.none
        check_groups(script.state)


class TestAfterARestart:
    def test_members_go_on_with_their_generation_and_a_new_session(self, script: Script) -> None:
        leader, follower = script.stable("a", "b")
        script.wait(9_000)
        state = script.reload()
        list(state.start(script.now_ms))
        check_groups(state)
        script.state = state
        script.wait(9_999)
        assert script.heartbeat(leader, 1) is ErrorCode.none
        script.wait(1)
        assert script.heartbeat(follower, 1) is ErrorCode.unknown_member_id

    def test_assignments_come_back(self, script: Script) -> None:
        _, follower = script.stable("a", "b")
        script.state = script.reload()
        list(script.state.start(script.now_ms))
        assert script.send_sync("x", follower, 1).assignment == b"part-b"

    def test_a_group_over_a_lowered_limit_rebalances(self, make_script: type[Script]) -> None:
        script = make_script(GroupSettings())
        leader, follower = script.stable("a", "b")
        script.state.settings = replace(script.state.settings, max_size=1)
        script.state = script.reload()
        list(script.state.start(script.now_ms))
        assert script.heartbeat(leader, 1) is ErrorCode.rebalance_in_progress
        assert script.send_join("a2", leader) is None
        assert script.send_join("b2", follower).error is ErrorCode.group_max_size_reached
        assert script.join_reply("a2").generation == 2


class TestGroups:
    def test_describe_shows_metadata_only_while_stable(self, script: Script) -> None:
        [leader] = script.stable("a")
        described = script.state.describe_group("g")
        assert (described.state, described.protocol_name, described.protocol_type) == (
            "Stable",
            "range",
            "consumer",
        )
        assert [(m.member_id, m.metadata, m.assignment) for m in described.members] == [
            (leader, b"m", b"part-a")
        ]
        assert described.members[0].client_host == "/127.0.0.1"
        script.send_join("b", version=3)
        described = script.state.describe_group("g")
        assert (described.state, described.protocol_name) == ("PreparingRebalance", "")
        assert {member.metadata for member in described.members} == {b""}

    def test_a_group_that_does_not_exist_is_described_as_dead(self, script: Script) -> None:
        assert script.state.describe_group("g").state == "Dead"

    def test_list_filters_by_state_and_type(self, script: Script) -> None:
        script.stable("a")
        none: frozenset[str] = frozenset()

        def listed(states: frozenset[str] = none, types: frozenset[str] = none) -> list[str]:
            return [each.group_id for each in script.state.list_groups(["g", "gone"], states, types)]

        assert listed() == ["g"]
        assert listed(frozenset({"stable"}), frozenset({"classic"})) == ["g"]
        assert listed(frozenset({"empty"})) == []
        assert listed(types=frozenset({"share"})) == []

    def test_delete_takes_only_empty_groups(self, script: Script) -> None:
        assert script.state.delete_group("g", 0) is ErrorCode.group_id_not_found
        [leader] = script.stable("a")
        assert script.state.delete_group("g", 0) is ErrorCode.non_empty_group
        script.leave(LeavingMember(leader))
        assert script.state.delete_group("g", 0) is ErrorCode.none
        assert script.state.groups == script.reload().groups == {}

    def test_a_dead_group_answers_everybody_who_waits(self, script: Script) -> None:
        script.stable("a", "b")
        script.send_join("c", version=3)
        script._collect(script.state.die(ErrorCode.not_coordinator))
        assert script.join_reply("c").error is ErrorCode.not_coordinator
        assert script.heartbeat("id1", 1) is ErrorCode.coordinator_not_available
        assert script.send_join("d").error is ErrorCode.coordinator_not_available
        assert script.leave(LeavingMember("id1")).error is ErrorCode.coordinator_not_available
