"""Share groups: joining, staying, leaving, and which state is initialized when."""

from __future__ import annotations

import pytest

from support.consumer_groups import FakeTopics
from support.share_groups import SETTINGS, ShareScript, stored
from tidemill.coordination.share_state import NO_START
from tidemill.errors import DiskFull, ErrorCode
from tidemill.groups.consumer.messages import ConsumerHeartbeatRequest, Refused
from tidemill.groups.messages import (
    HeartbeatRequest,
    JoinProtocol,
    JoinReply,
    JoinRequest,
    LeavingMember,
    OffsetCommitRequest,
    OffsetToCommit,
    SyncReply,
    SyncRequest,
)
from tidemill.groups.settings import GroupSettings
from tidemill.groups.share.group import ShareGroup
from tidemill.groups.share.messages import ShareHeartbeatRequest

NONE = ErrorCode.none


@pytest.fixture
def script() -> ShareScript:
    return ShareScript(FakeTopics(t=4, u=2))


def ready(script: ShareScript, *members: str, topics: tuple[str, ...] = ("t",)) -> None:
    """Let members join and have what they are to have."""
    for member in members:
        script.join(member, *topics)
        script.initialize()
    script.settle(*members)


class TestMembership:
    def test_a_member_joins_is_told_its_partitions_stays_and_leaves(self, script: ShareScript) -> None:
        joined = script.join("m", "t")
        assert (joined.error, joined.member_id, joined.member_epoch) == (NONE, "m", 1)
        assert joined.heartbeat_interval_ms == 5_000
        assert script.told(joined) == set()
        script.initialize()
        next_one = script.beat("m")
        assert (next_one.member_epoch, script.told(next_one)) == (2, script.topics.all("t"))
        stays = script.beat("m")
        assert (stays.error, stays.member_epoch, stays.assignment) == (NONE, 2, None)
        assert str(script.group.state) == "Stable"
        left = script.send("m", -1)
        assert (left.error, left.member_epoch) == (NONE, -1)
        assert str(script.group.state) == "Empty"
        assert script.send("m", 2).error is ErrorCode.unknown_member_id

    def test_a_heartbeat_that_changes_nothing_writes_nothing(self, script: ShareScript) -> None:
        ready(script, "a", "b")
        written = len(script.log)
        for _ in range(3):
            script.beat("a")
            script.beat("b")
        assert len(script.log) == written

    def test_the_previous_epoch_is_accepted_and_others_are_fenced(self, script: ShareScript) -> None:
        ready(script, "m")
        epoch = script.group.members["m"].epoch
        before = script.send("m", epoch - 1)
        assert (before.error, before.member_epoch) == (NONE, epoch)
        assert script.told(before) == script.topics.all("t")
        for wrong in (epoch + 1, epoch + 7):
            fenced = script.send("m", wrong)
            assert fenced.error is ErrorCode.fenced_member_epoch
            assert "join again" in (fenced.message or "")

    def test_a_fenced_member_joins_again_under_its_id(self, script: ShareScript) -> None:
        ready(script, "m", "n")
        assert script.send("m", 99).error is ErrorCode.fenced_member_epoch
        again = script.join("m", "t")
        assert (again.error, again.member_epoch) == (NONE, script.group.epoch)
        assert script.told(again) == script.assigned("m")

    def test_a_silent_member_is_removed_and_joins_again(self, script: ShareScript) -> None:
        ready(script, "m", "n")
        script.wait(44_000)
        script.beat("n")
        script.wait(2_000)
        assert list(script.group.members) == ["n"]
        assert script.send("m", 3).error is ErrorCode.unknown_member_id
        script.beat("n")
        assert script.assigned("n") == script.topics.all("t")
        assert script.join("m", "t").error is NONE

    def test_the_session_timeout_is_the_groups(self) -> None:
        configs = {"g": {"share.session.timeout.ms": "6000", "share.heartbeat.interval.ms": "700"}}
        settings = GroupSettings(overrides_of=lambda group_id: configs.get(group_id, {}))
        script = ShareScript(FakeTopics(t=1), settings)
        assert script.join("m", "t").heartbeat_interval_ms == 700
        script.wait(5_900)
        assert script.group.members
        script.wait(200)
        assert not script.group.members

    def test_a_full_group_takes_no_other_member(self) -> None:
        script = ShareScript(FakeTopics(t=1), GroupSettings(share_max_size=2))
        ready(script, "a", "b")
        assert script.join("c", "t").error is ErrorCode.group_max_size_reached
        assert script.join("a", "t").error is NONE
        script.send("b", -1)
        assert script.join("c", "t").error is NONE

    def test_200_members_by_default(self) -> None:
        assert GroupSettings().share_max_size == 200

    def test_another_subscription_is_another_assignment(self, script: ShareScript) -> None:
        ready(script, "a", "b")
        changed = script.beat("a", topics=frozenset({"u"}))
        assert script.told(changed) == set()
        script.initialize()
        script.settle("a", "b")
        assert script.assigned("a") == script.topics.all("u")
        assert script.assigned("b") == script.topics.all("t")

    def test_a_topic_that_comes_and_goes_is_assigned_and_taken_away(self, script: ShareScript) -> None:
        ready(script, "m", topics=("t", "later"))
        assert script.assigned("m") == script.topics.all("t")
        script.topics.create("later", 1)
        script.settle("m")
        assert script.assigned("m") == script.topics.all("t", "later")
        script.topics.delete("later")
        gone = script.beat("m")
        assert script.told(gone) == script.topics.all("t")

    @pytest.mark.parametrize(
        ("fields", "what"),
        [
            ({"member_id": " "}, "member id is empty"),
            ({"member_id": "x" * 37}, "36 characters"),
            ({"group_id": ""}, "group id is empty"),
            ({"rack_id": ""}, "rack id is empty"),
            ({"member_epoch": -2}, "epoch -2"),
            ({"topics": frozenset[str]()}, "must subscribe"),
            ({"topics": None}, "must subscribe"),
            ({"rack_id": "r" * 40_000}, "too long"),
        ],
    )
    def test_what_no_group_accepts(self, script: ShareScript, fields: dict[str, object], what: str) -> None:
        body: dict[str, object] = {
            "group_id": "g",
            "member_id": "m",
            "member_epoch": 0,
            "topics": frozenset({"t"}),
        }
        with pytest.raises(Refused, match=what) as refused:
            script.state.shares.heartbeat(ShareHeartbeatRequest(**(body | fields)), 0)  # type: ignore[arg-type]
        assert refused.value.code is ErrorCode.invalid_request
        assert not script.log

    def test_a_member_id_of_36_characters_is_accepted(self, script: ShareScript) -> None:
        assert script.join("x" * 36, "t").error is NONE

    def test_what_cannot_be_appended_has_not_happened(self, script: ShareScript) -> None:
        ready(script, "a")
        before = script.as_stored()
        script.fail_append_with = DiskFull("full")
        with pytest.raises(DiskFull):
            script.join("b", "t")
        with pytest.raises(DiskFull):
            script.send("a", -1)
        assert script.as_stored() == before
        assert script.group.next_deadline_ms() is not None


class TestKinds:
    """A group id is of one kind."""

    def test_other_protocols_are_refused_by_a_share_group(self, script: ShareScript) -> None:
        ready(script, "m")
        state, log = script.state, len(script.log)
        join = JoinRequest("g", "", "consumer", (JoinProtocol("range", b""),), 10_000)
        (reply,) = state.join(join, "token", "fresh", script.now_ms)
        assert isinstance(reply.body, JoinReply)
        assert reply.body.error is ErrorCode.inconsistent_group_protocol
        (reply,) = state.sync(SyncRequest("g", "m", 1), "token", script.now_ms)
        assert isinstance(reply.body, SyncReply)
        assert reply.body.error is ErrorCode.unknown_member_id
        beat = HeartbeatRequest("g", "m", 1)
        assert state.heartbeat(beat, script.now_ms) is ErrorCode.unknown_member_id
        left, _ = state.leave("g", [LeavingMember("m")], script.now_ms)
        assert left.members[0].error is ErrorCode.unknown_member_id
        request = ConsumerHeartbeatRequest(
            "g", "m", 0, topics=frozenset({"t"}), owned=frozenset(), rebalance_timeout_ms=1
        )
        answer, _ = state.consumers.heartbeat(request, "fresh", script.now_ms)
        assert answer.error is ErrorCode.group_id_not_found
        assert not state.needs_draft(request)
        commit = OffsetCommitRequest("g", [OffsetToCommit("t", 0, 5)])
        assert state.commit_offsets(commit, script.now_ms) == {("t", 0): ErrorCode.group_id_not_found}
        assert state.delete_offsets("g", [("t", 0)], script.now_ms).error is ErrorCode.group_id_not_found
        assert state.consumers.describe("g").error is ErrorCode.group_id_not_found
        assert state.describe_group("g").state == "Dead"
        list(state.expire(script.now_ms + 10**12))
        assert len(script.log) == log
        (listing,) = state.list_groups(["g"], frozenset(), frozenset({"share"}))
        assert (listing.protocol_type, listing.state) == ("share", "Stable")

    def test_an_empty_share_group_stays_one(self, script: ShareScript) -> None:
        ready(script, "m")
        script.send("m", -1)
        join = JoinRequest("g", "", "consumer", (JoinProtocol("range", b""),), 10_000)
        (reply,) = script.state.join(join, "token", "fresh", script.now_ms)
        assert isinstance(reply.body, JoinReply)
        assert reply.body.error is ErrorCode.inconsistent_group_protocol
        list(script.state.expire(script.now_ms + 10**12))
        assert str(script.group.state) == "Empty"

    def test_share_members_are_refused_by_other_groups(self, script: ShareScript) -> None:
        commit = OffsetCommitRequest("g", [OffsetToCommit("t", 0, 5)])
        assert script.state.commit_offsets(commit, script.now_ms) == {("t", 0): NONE}
        for epoch in (0, 1, -1):
            refused = script.send("m", epoch, topics=frozenset({"t"}))
            assert refused.error is ErrorCode.group_id_not_found
            assert "no share group" in (refused.message or "")

    def test_a_group_is_not_made_by_one_who_does_not_join(self, script: ShareScript) -> None:
        assert script.send("m", 1).error is ErrorCode.group_id_not_found
        assert script.send("m", -1).error is ErrorCode.group_id_not_found
        assert not script.state.groups


class TestInitialization:
    def test_new_topics_start_where_the_reset_says(self, script: ShareScript) -> None:
        script.join("m", "t", "u")
        (work,) = script.initialize()
        assert work.state_epoch == 1
        assert script.starts(work) == {
            "t": dict.fromkeys(range(4), NO_START),
            "u": dict.fromkeys(range(2), NO_START),
        }

    def test_added_partitions_start_at_0(self, script: ShareScript) -> None:
        ready(script, "m")
        script.topics.grow("t", 6)
        script.beat("m")
        (work,) = script.initialize()
        assert script.starts(work) == {"t": {4: 0, 5: 0}}
        script.settle("m")
        assert script.assigned("m") == script.topics.all("t")

    def test_a_topic_that_was_made_again_starts_anew(self, script: ShareScript) -> None:
        ready(script, "m")
        script.topics.delete("t")
        script.topics.create("t", 1)
        script.beat("m")
        (work,) = script.initialize()
        assert script.starts(work) == {"t": {0: NO_START}}

    def test_nobody_initializes_twice_at_a_time(self, script: ShareScript) -> None:
        script.join("a", "t")
        script.join("b", "t")
        script.beat("a")
        assert len(script.work) == 1
        script.topics.grow("t", 5)
        script.beat("a")
        assert len(script.work) == 1
        script.initialize()
        script.beat("a")
        (work,) = script.initialize()
        assert script.starts(work) == {"t": {4: 0}}

    def test_one_that_takes_too_long_is_begun_again(self, script: ShareScript) -> None:
        script.join("m", "t")
        script.wait(29_999)
        script.beat("m")
        assert len(script.work) == 1
        script.wait(1)
        script.beat("m")
        assert len(script.work) == 2

    def test_one_that_failed_is_begun_again_by_the_next_heartbeat(self, script: ShareScript) -> None:
        script.join("m", "t", "u")
        script.initialize(failed=["t"])
        assert script.beat("m").error is NONE
        assert not script.work
        script.settle("m")
        assert script.assigned("m") == script.topics.all("u")
        script.wait(1_000)
        assert script.beat("m").error is NONE
        (work,) = script.initialize()
        assert script.starts(work) == {"t": dict.fromkeys(range(4), NO_START)}
        script.settle("m")
        assert script.assigned("m") == script.topics.all("t", "u")

    def test_a_failure_before_anything_was_initialized_is_no_added_partition(
        self, script: ShareScript
    ) -> None:
        """Some partitions of the attempt may have worked: the topic starts anew as a whole."""
        script.join("m", "t")
        script.initialize(failed=["t"])
        script.wait(1_000)
        script.beat("m")
        (work,) = script.initialize()
        assert set(script.starts(work)["t"].values()) == {NO_START}

    def test_the_next_leader_begins_again_at_once(self, script: ShareScript) -> None:
        script.join("m", "t")
        script.restart()
        script.wait(1_000)
        script.beat("m")
        (work,) = script.initialize()
        assert script.starts(work) == {"t": dict.fromkeys(range(4), NO_START)}

    def test_state_of_an_earlier_group_raises_the_epoch_above_it(self, script: ShareScript) -> None:
        script.join("m", "t")
        script.initialize(failed=["t"], above_epoch=40)
        script.wait(1_000)
        script.beat("m")
        (work,) = script.initialize()
        assert work.state_epoch > 40
        script.settle("m")
        assert script.assigned("m") == script.topics.all("t")

    def test_a_late_end_does_not_bring_a_deleted_group_back(self, script: ShareScript) -> None:
        script.join("m", "t")
        (work,) = script.work
        script.send("m", -1)
        topics = script.state.shares.begin_delete_group("g", script.now_ms)
        assert script.state.shares.still_wanted(work) is None
        script.state.shares.deleted(
            "g", {topic.id: topic.partitions for topic in topics.deleting}, script.now_ms
        )
        assert script.state.delete_group("g", script.now_ms) is NONE
        log = len(script.log)
        script.initialize()
        assert len(script.log) == log
        assert not script.state.groups

    def test_a_topic_that_nobody_reads_any_more_costs_nothing(self, script: ShareScript) -> None:
        script.join("m", "t", "u")
        script.initialize(failed=["u"])
        script.beat("m", topics=frozenset({"t"}))
        script.settle("m")
        script.wait(40_000)
        request = ShareHeartbeatRequest(
            "g", "m", script.group.members["m"].epoch, client_id="c", client_host="/h"
        )
        script.beat("m")
        assert not script.work
        assert script.group.seen_revision == script.topics.revision
        assert not script.state.needs_share_draft(request, script.now_ms)


class TestDeletion:
    def test_a_group_is_deleted_once_its_state_is(self, script: ShareScript) -> None:
        ready(script, "m")
        with pytest.raises(Refused) as refused:
            script.state.shares.begin_delete_group("g", script.now_ms)
        assert refused.value.code is ErrorCode.non_empty_group
        script.send("m", -1)
        assert script.state.delete_group("g", script.now_ms) is ErrorCode.non_empty_group
        topics = script.state.shares.begin_delete_group("g", script.now_ms)
        gone = {topic.id: topic.partitions for topic in topics.deleting}
        assert list(gone.values()) == [frozenset(range(4))]
        script.state.shares.deleted("g", gone, script.now_ms)
        assert script.state.delete_group("g", script.now_ms) is NONE
        assert not script.reload().groups
        again = script.join("m", "t")
        assert again.member_epoch == 1
        (work,) = script.initialize()
        assert set(script.starts(work)["t"].values()) == {NO_START}

    def test_a_member_that_comes_while_its_topic_is_deleted_waits(self, script: ShareScript) -> None:
        ready(script, "m")
        script.send("m", -1)
        topics = script.state.shares.begin_delete_group("g", script.now_ms)
        assert script.told(script.join("m", "t")) == set()
        assert not script.work
        script.state.shares.deleted(
            "g", {topic.id: topic.partitions for topic in topics.deleting}, script.now_ms
        )
        script.beat("m")
        (work,) = script.initialize()
        assert set(script.starts(work)["t"].values()) == {NO_START}

    def test_state_of_deleted_topics_is_deleted_and_known_to_the_next_leader(
        self, script: ShareScript
    ) -> None:
        ready(script, "m", topics=("t", "u"))
        script.topics.delete("u")
        list(script.state.forget_topics("u".__eq__, script.now_ms))
        (deleting,) = script.group.topics.deleting
        assert (deleting.name, deleting.partitions) == ("u", frozenset({0, 1}))
        assert script.group.next_deadline_ms() == script.now_ms
        script.restart()
        assert script.group.delete_at_ms == script.now_ms
        assert script.group.topics.deleting == (deleting,)
        script.state.shares.deleted("g", {}, script.now_ms)
        assert script.group.delete_at_ms == script.now_ms + 30_000
        script.state.shares.deleted("g", {deleting.id: deleting.partitions}, script.now_ms)
        assert list(script.group.topics.deleting) == []
        assert script.group.next_deadline_ms() == script.group.sessions.next_ms


class TestAltering:
    def test_only_of_a_group_without_members(self, script: ShareScript) -> None:
        with pytest.raises(Refused) as missing:
            script.state.shares.begin_alter("g", {("t", 0): 5}, script.now_ms)
        assert missing.value.code is ErrorCode.group_id_not_found
        ready(script, "m")
        with pytest.raises(Refused) as refused:
            script.state.shares.begin_alter("g", {("t", 0): 5}, script.now_ms)
        assert refused.value.code is ErrorCode.non_empty_group

    def test_it_has_a_higher_epoch_and_touches_nothing_else(self, script: ShareScript) -> None:
        ready(script, "m")
        script.send("m", -1)
        epoch, topics = script.group.epoch, script.group.topics
        work, refused = script.state.shares.begin_alter(
            "g", {("t", 0): 5, ("t", 9): 1, ("x", 0): 1, ("t", 1): -3}, script.now_ms
        )
        assert work.state_epoch == epoch + 1 == script.group.epoch
        assert script.starts(work) == {"t": {0: 5}}
        assert {each: result.error for each, result in refused.items()} == {
            ("t", 9): ErrorCode.unknown_topic_or_partition,
            ("x", 0): ErrorCode.unknown_topic_or_partition,
            ("t", 1): ErrorCode.invalid_request,
        }
        # A leader that fails now leaves either the old state or the new one, and nothing to begin again.
        assert script.group.topics == topics

    def test_the_first_offset_of_a_topic_begins_all_of_it(self, script: ShareScript) -> None:
        ready(script, "m")
        script.send("m", -1)
        work, _ = script.state.shares.begin_alter("g", {("u", 1): 7}, script.now_ms)
        assert script.starts(work) == {"u": {0: NO_START, 1: 7}}
        script.state.shares.initialized(work, (), -1, script.now_ms)
        assert {topic.name: topic.partitions for topic in script.group.topics.initialized} == {
            "t": frozenset(range(4)),
            "u": frozenset(range(2)),
        }


def test_a_reload_finds_what_was_there(script: ShareScript) -> None:
    ready(script, "a", "b", topics=("t", "u"))
    script.send("a", -1)
    found = script.reload().groups["g"]
    assert isinstance(found, ShareGroup)
    assert stored(found) == stored(script.group)
    assert found.settings is SETTINGS
    assert "b" in found.sessions


def test_a_stopped_group_is_dead(script: ShareScript) -> None:
    ready(script, "m")
    script.group.die(ErrorCode.not_coordinator)
    assert str(script.group.state) == "Dead"
    assert script.group.next_deadline_ms() is None
