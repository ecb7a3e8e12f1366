"""Consumer groups (KIP-848) as transcripts: who says what, and what it is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from support.consumer_groups import SETTINGS, ConsumerScript, FakeTopics
from tidemill.errors import DiskFull, ErrorCode
from tidemill.groups.consumer.member import MemberState
from tidemill.groups.messages import OffsetCommitRequest, OffsetToCommit
from tidemill.groups.settings import GroupSettings


@pytest.fixture(params=[False, True], ids=["small", "large"])
def script(request: pytest.FixtureRequest) -> ConsumerScript:
    return ConsumerScript(FakeTopics(t=6, u=2), on_drafts=request.param)


def two_members(script: ConsumerScript) -> None:
    """Members a and b with three partitions of t each."""
    script.join("a", "t")
    script.join("b", "t")
    script.settle("a", "b")
    assert script.assigned("a") | script.assigned("b") == script.topics.all("t")
    assert len(script.assigned("a")) == len(script.assigned("b")) == 3


# --- joining, reconciling


def test_the_first_member_gets_everything_at_once(script: ConsumerScript) -> None:
    reply = script.join("a", "t")
    assert (reply.error, reply.member_id, reply.member_epoch) == (ErrorCode.none, "a", 1)
    assert reply.heartbeat_interval_ms == 5_000
    assert reply.assignment is not None
    assert script.topics.named(reply.assignment) == script.topics.all("t")
    assert script.group.state == "Stable"


def test_a_partition_is_given_on_only_after_its_owner_stopped_reporting_it(script: ConsumerScript) -> None:
    script.join("a", "t")
    joined = script.join("b", "t")
    assert (joined.member_epoch, joined.assignment) == (2, frozenset())
    assert script.group.state == "Reconciling"

    owns_all = script.beat("a", script.topics.all("t"))
    assert owns_all.member_epoch == 1, "it stays in its epoch until it has revoked"
    assert owns_all.assignment is not None
    kept = script.topics.named(owns_all.assignment)
    assert len(kept) == 3
    assert script.beat("b", []).assignment is None

    assert script.beat("a").member_epoch == 1, "silence about partitions is not a release"
    assert script.beat("b", []).assignment is None

    released = script.beat("a", kept)
    assert (released.member_epoch, released.assignment) == (2, None)
    collected = script.beat("b", [])
    assert collected.assignment is not None
    assert script.topics.named(collected.assignment) == script.topics.all("t") - kept
    assert script.group.state == "Stable"


def test_a_member_that_must_give_up_nothing_is_not_disturbed(script: ConsumerScript) -> None:
    two_members(script)
    script.join("c", "u")
    reply = script.beat("a", script.assigned("a"))
    assert (reply.member_epoch, reply.assignment) == (script.group.epoch, None)


def test_the_assignment_is_told_again_in_answer_to_a_full_request(script: ConsumerScript) -> None:
    two_members(script)
    assert script.beat("a", script.assigned("a")).assignment is None
    full = script.send(
        "a", 2, topics=frozenset({"t"}), rebalance_timeout_ms=60_000, owned=script.group.members["a"].assigned
    )
    assert full.assignment == script.group.members["a"].assigned


def test_the_server_makes_an_id_for_an_old_client_only(script: ConsumerScript) -> None:
    assert script.join("", "t", version=0).member_id == "fresh-1"
    assert script.join("", "t", version=1).error is ErrorCode.invalid_request


def test_a_leaving_member_frees_its_partitions(script: ConsumerScript) -> None:
    two_members(script)
    reply = script.send("b", -1)
    assert (reply.error, reply.member_id, reply.member_epoch) == (ErrorCode.none, "b", -1)
    assert script.group.state == "Assigning"
    back = script.beat("a", script.assigned("a"))
    assert back.assignment is not None
    assert script.topics.named(back.assignment) == script.topics.all("t")
    assert script.send("b", 2).error is ErrorCode.unknown_member_id


def test_the_last_member_leaves_an_empty_group(script: ConsumerScript) -> None:
    script.join("a", "t")
    script.send("a", -1)
    assert script.group.state == "Empty"
    assert script.group.next_deadline_ms() is None
    assert script.join("b", "t").member_epoch == 3


def test_the_assignor_that_most_members_ask_for_is_used(script: ConsumerScript) -> None:
    script.join("b", "t", "u", assignor="range")
    script.join("a", "t", "u", assignor="range")
    script.join("c", "t", "u")
    script.settle("a", "b", "c")
    assert script.group.assignor == "range"
    assert script.assigned("a") == {("t", 0), ("t", 1), ("u", 0)}


# --- epochs


def test_the_previous_epoch_is_accepted_if_the_answer_may_have_been_lost(script: ConsumerScript) -> None:
    script.join("a", "t")
    script.join("b", "t")
    script.beat("a", script.topics.all("t"))
    kept = script.topics.ids(script.assigned("a"))
    assert script.send("a", 1, owned=kept).member_epoch == 2
    again = script.send("a", 1, owned=kept)
    assert (again.error, again.member_epoch) == (ErrorCode.none, 2)


@pytest.mark.parametrize(
    ("epoch", "owned"), [(3, None), (1, None), (1, {("t", 0), ("t", 5)}), (7, set()), (0, set())]
)
def test_another_epoch_is_fenced(script: ConsumerScript, epoch: int, owned: Any) -> None:
    script.join("a", "t", "u")
    script.join("b", "t", "u")
    script.settle("a", "b")
    script.send("b", -1)
    script.join("c", "u")
    script.settle("a", "c")
    assert script.group.members["a"].epoch == 4
    fields: dict[str, Any] = {} if epoch else {"topics": frozenset("t"), "rebalance_timeout_ms": 1}
    reply = script.send("a", epoch, owned=None if owned is None else script.topics.ids(owned), **fields)
    assert reply.error is ErrorCode.fenced_member_epoch
    assert reply.message is not None
    assert "join again" in reply.message


# --- refusals


@pytest.mark.parametrize(
    ("member_id", "epoch", "fields", "error"),
    [
        ("a", 0, {"rebalance_timeout_ms": -1}, ErrorCode.invalid_request),
        ("a", 0, {"owned": None}, ErrorCode.invalid_request),
        ("a", 0, {"owned": frozenset({("x", 1)})}, ErrorCode.invalid_request),
        ("a", 0, {"topics": None}, ErrorCode.invalid_request),
        ("a", 0, {"instance_id": " "}, ErrorCode.invalid_request),
        ("a", 0, {"rack_id": ""}, ErrorCode.invalid_request),
        ("", 5, {}, ErrorCode.invalid_request),
        ("a" * 40_000, 0, {}, ErrorCode.invalid_request),
        ("a", -3, {}, ErrorCode.invalid_request),
        ("a", -2, {}, ErrorCode.invalid_request),
        ("a", 0, {"assignor": "magic"}, ErrorCode.unsupported_assignor),
        ("a", 0, {"topics": None, "regex": "("}, ErrorCode.invalid_regular_expression),
        ("a", 0, {"regex": "x" * 3_000}, ErrorCode.invalid_regular_expression),
        ("a", 1, {}, ErrorCode.group_id_not_found),
        ("a", -1, {}, ErrorCode.group_id_not_found),
    ],
)
def test_what_is_refused_changes_nothing(
    script: ConsumerScript, member_id: str, epoch: int, fields: dict[str, Any], error: ErrorCode
) -> None:
    good = {"topics": frozenset({"t"}), "rebalance_timeout_ms": 1_000, "owned": frozenset()}
    assert script.send(member_id, epoch, **(good | fields)).error is error
    assert not script.state.groups
    assert not script.log


def test_a_full_group_takes_in_nobody_else() -> None:
    script = ConsumerScript(FakeTopics(t=2), replace(SETTINGS, consumer_max_size=1))
    script.join("a", "t")
    assert script.join("b", "t").error is ErrorCode.group_max_size_reached
    assert script.beat("a").error is ErrorCode.none


def test_a_full_disk_leaves_the_group_as_it_was(script: ConsumerScript) -> None:
    script.join("a", "t")
    before = (dict(script.group.members), script.group.epoch, len(script.log))
    script.fail_append_with = DiskFull("no room")
    with pytest.raises(DiskFull):
        script.join("b", "t")
    with pytest.raises(DiskFull):
        script.send("a", -1)
    assert (dict(script.group.members), script.group.epoch, len(script.log)) == before
    script.fail_append_with = None
    assert script.join("b", "t").error is ErrorCode.none


# --- time


def test_a_silent_member_is_removed_when_its_session_ends(script: ConsumerScript) -> None:
    two_members(script)
    script.wait(44_000)
    script.beat("a", script.assigned("a"))
    script.wait(1_500)
    assert set(script.group.members) == {"a"}
    script.settle("a")
    assert script.assigned("a") == script.topics.all("t")


def test_the_session_timeout_is_the_groups_and_a_changed_one_counts_from_the_next_heartbeat_on() -> None:
    configs = {"g": {"consumer.session.timeout.ms": "6000"}, "h": {"consumer.session.timeout.ms": "60000"}}
    settings = GroupSettings(overrides_of=lambda group_id: configs.get(group_id, {}))
    script = ConsumerScript(FakeTopics(t=1), settings)
    script.join("m", "t")
    script.wait(5_900)
    assert set(script.group.members) == {"m"}
    configs["g"] = {"consumer.session.timeout.ms": "9000"}
    script.beat("m", script.topics.all("t"))
    script.wait(8_900)
    assert set(script.group.members) == {"m"}
    script.wait(200)
    assert not script.group.members


def test_a_member_that_does_not_revoke_in_time_is_removed(script: ConsumerScript) -> None:
    script.join("a", "t", rebalance_timeout_ms=20_000)
    script.join("b", "t")
    script.beat("a", script.topics.all("t"))
    for _ in range(3):
        script.wait(7_000)
        for member_id in [each for each in ("a", "b") if each in script.group.members]:
            script.beat(member_id, script.topics.all("t") if member_id == "a" else [])
    assert set(script.group.members) == {"b"}
    assert script.assigned("b") == script.topics.all("t")


def test_revoking_in_time_ends_the_wait(script: ConsumerScript) -> None:
    script.join("a", "t", rebalance_timeout_ms=20_000)
    script.join("b", "t")
    script.beat("a", script.topics.all("t"))
    script.wait(19_000)
    script.beat("a", script.assigned("a"))
    script.wait(10_000)
    script.beat("b", [])
    assert set(script.group.members) == {"a", "b"}


# --- topics


def test_new_partitions_are_assigned_at_the_next_heartbeat(script: ConsumerScript) -> None:
    script.join("a", "t")
    script.topics.grow("t", 8)
    reply = script.beat("a", script.assigned("a"))
    assert reply.member_epoch == 2
    assert reply.assignment is not None
    assert script.topics.named(reply.assignment) == script.topics.all("t")
    assert len(reply.assignment) == 8


def test_a_topic_that_comes_later_is_assigned_when_it_comes(script: ConsumerScript) -> None:
    assert script.join("a", "later").assignment == frozenset()
    script.topics.create("later", 2)
    script.beat("a", [])
    assert script.assigned("a") == script.topics.all("later")


def test_a_deleted_topic_is_taken_away(script: ConsumerScript) -> None:
    script.join("a", "t", "u")
    owned = script.group.members["a"].assigned
    script.topics.delete("t")
    assert script.send("a", 1, owned=owned).member_epoch == 1
    script.beat("a", script.topics.all("u"))
    assert script.assigned("a") == script.topics.all("u")


def test_a_topic_made_anew_is_another_one(script: ConsumerScript) -> None:
    script.join("a", "u")
    old = script.group.members["a"].assigned
    script.topics.delete("u")
    script.topics.create("u", 2)
    script.send("a", 1, owned=old)
    script.beat("a", [])
    assert script.assigned("a") == script.topics.all("u")
    assert not old & script.group.members["a"].assigned


def test_a_change_that_is_not_of_their_topics_does_not_concern_the_group(script: ConsumerScript) -> None:
    script.join("a", "t")
    script.topics.grow("u", 5)
    assert script.beat("a", script.assigned("a")).member_epoch == 1
    assert script.group.epoch == 1


# --- patterns


def test_a_pattern_matches_whole_names_and_new_topics(script: ConsumerScript) -> None:
    script.topics.create("orders-eu", 1)
    script.topics.create("my-orders-eu", 1)
    script.join("a", regex="orders-.*")
    assert script.assigned("a") == {("orders-eu", 0)}
    script.topics.create("orders-us", 2)
    script.wait(2_000)
    script.beat("a", script.assigned("a"))
    assert script.assigned("a") == script.topics.all("orders-eu", "orders-us")


def test_names_and_pattern_add_up_and_the_pattern_can_be_dropped(script: ConsumerScript) -> None:
    script.join("a", "t", regex="u")
    assert script.assigned("a") == script.topics.all("t", "u")
    script.send("a", 1, regex="", owned=script.group.members["a"].assigned)
    script.settle("a")
    assert script.assigned("a") == script.topics.all("t")
    assert not script.group.patterns


def test_a_pattern_is_forgotten_with_its_last_member(script: ConsumerScript) -> None:
    script.join("a", "t")
    script.join("b", regex="u")
    script.send("b", -1)
    assert not script.group.patterns
    assert script.group.is_subscribed_to("t")
    assert not script.group.is_subscribed_to("u")


def test_a_pattern_that_would_ruin_a_backtracking_engine_is_matched_in_no_time(
    script: ConsumerScript,
) -> None:
    script.topics.create("a" * 200, 1)
    script.join("a", regex="(a*)*(a|aa)+$x")
    assert script.assigned("a") == set()


# --- static members


def test_a_static_member_gets_its_partitions_back_without_a_rebalance(script: ConsumerScript) -> None:
    script.join("a", "t", instance_id="i")
    script.join("b", "t")
    script.settle("a", "b")
    had, epoch = script.assigned("a"), script.group.epoch
    paused = script.send("a", -2, instance_id="i")
    assert (paused.error, paused.member_epoch) == (ErrorCode.none, -2)
    script.beat("b", script.assigned("b"))
    assert len(script.assigned("b")) == 3, "they wait for it"
    back = script.join("a2", "t", instance_id="i")
    assert (back.error, back.member_epoch) == (ErrorCode.none, epoch)
    assert back.assignment is not None
    assert script.topics.named(back.assignment) == had
    assert script.send("a", epoch, instance_id="i").error is ErrorCode.fenced_instance_id
    assert script.send("a", epoch).error is ErrorCode.unknown_member_id


def test_an_instance_id_in_use_is_refused_to_another_member(script: ConsumerScript) -> None:
    script.join("a", "t", instance_id="i")
    assert script.join("b", "t", instance_id="i").error is ErrorCode.unreleased_instance_id
    assert script.join("a", "t", instance_id="i").error is ErrorCode.none, "the same one asks again"


def test_a_static_member_that_does_not_come_back_is_removed(script: ConsumerScript) -> None:
    two_members(script)
    script.join("s", "t", instance_id="i")
    script.settle("a", "b", "s")
    script.send("s", -2, instance_id="i")
    for _ in range(6):
        script.wait(10_000)
        script.settle("a", "b")
    assert set(script.group.members) == {"a", "b"}
    assert script.assigned("a") | script.assigned("b") == script.topics.all("t")


@pytest.mark.parametrize("epoch", [-1, -2])
def test_leaving_by_instance_id_is_checked(script: ConsumerScript, epoch: int) -> None:
    script.join("a", "t", instance_id="i")
    assert script.send("b", epoch, instance_id="i").error is ErrorCode.fenced_instance_id
    assert script.send("a", epoch, instance_id="other").error is ErrorCode.unknown_member_id


# --- after a restart


def test_members_go_on_with_their_epochs_after_a_restart(script: ConsumerScript) -> None:
    script.join("a", "t", instance_id="i")
    script.join("b", "t", regex="u")
    script.beat("a", script.topics.all("t", "u"))
    before = script.group
    script.restart()
    assert script.group is not before
    for name in ("members", "targets", "epoch", "target_epoch", "subscribed_topics", "patterns"):
        assert getattr(script.group, name) == getattr(before, name), name
    assert script.group.members["a"].state is MemberState.UNREVOKED_PARTITIONS
    script.settle("a", "b")
    assert script.group.state == "Stable"


def test_a_revocation_is_waited_for_after_a_restart_too(script: ConsumerScript) -> None:
    script.join("a", "t", rebalance_timeout_ms=20_000)
    script.join("b", "t")
    script.beat("a", script.topics.all("t"))
    script.restart()
    script.wait(21_000)
    assert set(script.group.members) == {"b"}


def test_topics_that_changed_while_the_node_was_down_are_noticed(script: ConsumerScript) -> None:
    script.join("a", "t")
    script.topics.grow("t", 7)
    script.restart()
    script.beat("a", script.assigned("a"))
    assert script.assigned("a") == script.topics.all("t")


# --- offsets and other APIs


def commit(script: ConsumerScript, member_id: str, epoch: int, version: int = 9) -> ErrorCode:
    request = OffsetCommitRequest("g", [OffsetToCommit("t", 0, 5)], epoch, member_id, version=version)
    return script.state.commit_offsets(request, script.now_ms)["t", 0]


def test_offsets_are_committed_with_the_member_epoch(script: ConsumerScript) -> None:
    script.join("a", "t")
    assert commit(script, "a", 1) is ErrorCode.none
    assert commit(script, "a", 0) is ErrorCode.stale_member_epoch
    assert commit(script, "a", 2) is ErrorCode.stale_member_epoch
    assert commit(script, "b", 1) is ErrorCode.unknown_member_id
    assert commit(script, "", -1) is ErrorCode.unknown_member_id
    assert commit(script, "a", 1, version=8) is ErrorCode.unsupported_version
    script.send("a", -1)
    assert commit(script, "", -1) is ErrorCode.none, "an operator, while nobody is there"


def test_a_commit_in_a_transaction_is_refused_in_the_producers_words(script: ConsumerScript) -> None:
    script.join("a", "t")
    assert script.group.check_transactional_commit("a", None, 1) is ErrorCode.none
    assert script.group.check_transactional_commit("a", None, 0) is ErrorCode.illegal_generation
    assert script.group.check_transactional_commit("", None, -1) is ErrorCode.unknown_member_id


def test_offsets_are_read_with_the_member_epoch_or_anonymously(script: ConsumerScript) -> None:
    script.join("a", "t")
    commit(script, "a", 1)
    fetched = {
        member: script.state.fetch_offsets("g", [("t", 0)], member=member)
        for member in ((None, -1), ("a", 1), ("a", 2), ("b", 1))
    }
    assert [result.error for result in fetched.values()] == [
        ErrorCode.none,
        ErrorCode.none,
        ErrorCode.stale_member_epoch,
        ErrorCode.unknown_member_id,
    ]
    assert fetched["a", 1].offsets["t", 0].offset == 5


def test_offsets_of_consumed_topics_are_neither_deleted_nor_expired(script: ConsumerScript) -> None:
    script.join("a", regex="t")
    commit(script, "a", 1)
    result = script.state.delete_offsets("g", [("t", 0), ("u", 0)], script.now_ms)
    assert result.partitions == {
        ("t", 0): ErrorCode.group_subscribed_to_topic,
        ("u", 0): ErrorCode.none,
    }
    script.now_ms += SETTINGS.offsets_retention_ms + 1
    list(script.state.expire(script.now_ms))
    assert script.state.offsets.count("g") == 1


def test_an_empty_group_expires_with_its_offsets(script: ConsumerScript) -> None:
    script.join("a", "t", regex="u")
    commit(script, "a", 1)
    script.send("a", -1)
    list(script.state.expire(script.now_ms))
    assert "g" in script.state.groups
    script.now_ms += SETTINGS.offsets_retention_ms + 1
    list(script.state.expire(script.now_ms))
    assert not script.state.groups
    assert not script.reloaded().groups


def test_a_group_is_deleted_when_it_is_empty(script: ConsumerScript) -> None:
    script.join("a", "t")
    commit(script, "a", 1)
    assert script.state.delete_group("g", script.now_ms) is ErrorCode.non_empty_group
    script.send("a", -1)
    assert script.state.delete_group("g", script.now_ms) is ErrorCode.none
    reloaded = script.reloaded()
    assert not reloaded.groups
    assert not list(reloaded.offsets.of("g"))


def test_lists_and_descriptions_tell_the_kinds_of_groups_apart(script: ConsumerScript) -> None:
    script.join("a", "t", instance_id="i", rack_id="r")
    (listed,) = script.state.list_groups(script.state.groups, frozenset(), frozenset({"consumer"}))
    assert (listed.group_id, listed.group_type, listed.protocol_type, listed.state) == (
        "g",
        "consumer",
        "consumer",
        "Stable",
    )
    assert not script.state.list_groups(script.state.groups, frozenset(), frozenset({"classic"}))
    assert script.state.describe_group("g").state == "Dead"
    described = script.state.consumers.describe("g")
    assert (described.state, described.epoch, described.target_epoch, described.assignor) == (
        "Stable",
        1,
        1,
        "uniform",
    )
    (member,) = described.members
    assert (member.member_id, member.instance_id, member.rack_id, member.topics) == ("a", "i", "r", ("t",))
    (assigned,) = member.assignment
    assert (assigned.name, assigned.partitions) == ("t", (0, 1, 2, 3, 4, 5))
    assert member.target == member.assignment
    assert not member.is_classic
    assert script.state.consumers.describe("other").error is ErrorCode.group_id_not_found


def test_offsets_of_topics_that_are_gone_are_dropped_after_a_start(script: ConsumerScript) -> None:
    script.join("a", "t")
    commit(script, "a", 1)
    request = OffsetCommitRequest("g", [OffsetToCommit("gone", 3, 5)], 1, "a")
    script.state.commit_offsets(request, script.now_ms)
    script.restart()
    list(script.state.forget_topics(lambda name: script.topics.find(name) is None, script.now_ms))
    assert [(topic, index) for topic, index, _ in script.state.offsets.of("g")] == [("t", 0)]
    assert [(topic, index) for topic, index, _ in script.reloaded().offsets.of("g")] == [("t", 0)]
