from __future__ import annotations

from typing import Any

import pytest

from support.group_invariants import check_groups
from tidemill.errors import DiskFull, ErrorCode
from tidemill.groups.messages import (
    CommittedOffset,
    JoinProtocol,
    LeavingMember,
    OffsetCommitRequest,
    OffsetToCommit,
)
from tidemill.groups.records import GroupMetadataRecord, OffsetCommitRecord

Script = Any
DAY_MS = 24 * 60 * 60 * 1_000
SUBSCRIBED_TO_T = (JoinProtocol("range", bytes.fromhex("0000 00000001 0001 74 ffffffff")),)
UNREADABLE = (JoinProtocol("range", b"\x00"),)


def commit(script: Script, *offsets: OffsetToCommit, **changes: Any) -> dict[tuple[str, int], ErrorCode]:
    results: dict[tuple[str, int], ErrorCode] = script.state.commit_offsets(
        OffsetCommitRequest("g", offsets, **changes), script.now_ms
    )
    check_groups(script.state)
    return results


def fetch(script: Script, *partitions: tuple[str, int]) -> dict[tuple[str, int], CommittedOffset]:
    return dict(script.state.fetch_offsets("g", partitions or None).offsets)


T0 = OffsetToCommit("t", 0, 10, 2, "note")


class TestCommit:
    def test_a_client_outside_any_group_commits_and_reads_back(self, script: Script) -> None:
        assert commit(script, T0) == {("t", 0): ErrorCode.none}
        assert fetch(script, ("t", 0), ("t", 1)) == {
            ("t", 0): CommittedOffset(10, 2, "note"),
            ("t", 1): CommittedOffset(-1, -1, ""),
        }
        assert script.state.describe_group("g").state == "Empty"

    def test_a_member_commits_in_its_generation_only(self, script: Script) -> None:
        [member] = script.stable("a")
        assert commit(script, T0, generation=1, member_id=member) == {("t", 0): ErrorCode.none}
        assert commit(script, T0, generation=2, member_id=member) == {("t", 0): ErrorCode.illegal_generation}
        assert commit(script, T0, generation=1, member_id="x") == {("t", 0): ErrorCode.unknown_member_id}
        assert commit(script, T0) == {("t", 0): ErrorCode.unknown_member_id}
        assert commit(script, T0, member_id=member) == {("t", 0): ErrorCode.illegal_generation}

    def test_a_fenced_static_member_cannot_commit(self, script: Script) -> None:
        [member] = script.stable("a", instance_id="one")
        script.send_join("a2", instance_id="one")
        assert commit(script, T0, generation=1, member_id=member, instance_id="one") == {
            ("t", 0): ErrorCode.fenced_instance_id
        }

    def test_members_may_commit_while_a_rebalance_is_prepared_but_not_before_the_next_sync(
        self, script: Script
    ) -> None:
        [member] = script.stable("a")
        script.send_join("b", version=3)
        assert commit(script, T0, generation=1, member_id=member) == {("t", 0): ErrorCode.none}
        script.send_join("a2", member)
        assert commit(script, T0, generation=2, member_id=member) == {
            ("t", 0): ErrorCode.rebalance_in_progress
        }

    def test_a_commit_to_no_group_with_a_generation_is_refused_in_the_client_s_words(
        self, script: Script
    ) -> None:
        assert commit(script, T0, generation=1, version=8) == {("t", 0): ErrorCode.illegal_generation}
        assert commit(script, T0, generation=1, version=9) == {("t", 0): ErrorCode.group_id_not_found}
        assert script.state.groups == {}

    def test_a_commit_counts_as_a_sign_of_life(self, script: Script) -> None:
        [member] = script.stable("a")
        script.wait(9_000)
        commit(script, T0, generation=1, member_id=member)
        script.wait(9_000)
        assert script.heartbeat(member, 1) is ErrorCode.none

    def test_too_much_metadata_is_refused_for_that_partition_only(self, script: Script) -> None:
        results = commit(script, OffsetToCommit("t", 0, 1, metadata="x" * 4_097), OffsetToCommit("t", 1, 1))
        assert results == {("t", 0): ErrorCode.offset_metadata_too_large, ("t", 1): ErrorCode.none}
        assert fetch(script) == {("t", 1): CommittedOffset(1, -1, "")}
        assert commit(script, OffsetToCommit("t", 0, 1, metadata="x" * 4_096)) == {("t", 0): ErrorCode.none}

    def test_a_commit_that_cannot_be_appended_changes_nothing(self, script: Script) -> None:
        script.fail_append_with = DiskFull("no room")
        with pytest.raises(DiskFull):
            commit(script, T0)
        assert fetch(script) == {}
        assert script.state.groups == {}


class TestFetch:
    def test_everything_is_returned_if_nothing_is_named(self, script: Script) -> None:
        commit(script, T0, OffsetToCommit("u", 3, 5))
        assert fetch(script) == {
            ("t", 0): CommittedOffset(10, 2, "note"),
            ("u", 3): CommittedOffset(5, -1, ""),
        }

    def test_an_unknown_group_has_no_offsets(self, script: Script) -> None:
        assert fetch(script) == {}
        assert fetch(script, ("t", 0)) == {("t", 0): CommittedOffset()}


class TestDelete:
    def delete(self, script: Script, *partitions: tuple[str, int]) -> Any:
        return script.state.delete_offsets("g", partitions, script.now_ms)

    def test_an_empty_group_s_offsets_can_be_deleted(self, script: Script) -> None:
        commit(script, T0)
        assert self.delete(script, ("t", 0), ("t", 0), ("t", 9)).partitions == {
            ("t", 0): ErrorCode.none,
            ("t", 9): ErrorCode.none,
        }
        assert fetch(script) == {}
        assert script.log.count(OffsetCommitRecord("g", "t", 0, None)) == 1

    def test_topics_that_members_consume_are_refused(self, script: Script) -> None:
        [member] = script.stable("a", protocols=SUBSCRIBED_TO_T)
        commit(script, T0, OffsetToCommit("u", 0, 1), generation=1, member_id=member)
        assert self.delete(script, ("t", 0), ("u", 0)).partitions == {
            ("t", 0): ErrorCode.group_subscribed_to_topic,
            ("u", 0): ErrorCode.none,
        }
        assert set(fetch(script)) == {("t", 0)}

    def test_an_unreadable_subscription_may_mean_any_topic(self, script: Script) -> None:
        script.stable("a", protocols=UNREADABLE)
        assert self.delete(script, ("t", 0)).partitions == {("t", 0): ErrorCode.group_subscribed_to_topic}

    def test_a_group_of_another_kind_must_be_empty(self, script: Script) -> None:
        script.stable("a", protocol_type="connect")
        assert self.delete(script, ("t", 0)).error is ErrorCode.non_empty_group

    def test_no_group(self, script: Script) -> None:
        assert self.delete(script, ("t", 0)).error is ErrorCode.group_id_not_found

    def test_deleting_the_group_deletes_its_offsets(self, script: Script) -> None:
        commit(script, *(OffsetToCommit("t", number, 1) for number in range(2_500)))
        # Some at a time, so that others have their turn in between.
        assert script.state.delete_group("g", script.now_ms) is None
        assert script.state.delete_group("g", script.now_ms) is None
        assert script.state.delete_group("g", script.now_ms) is ErrorCode.none
        assert fetch(script) == {}
        assert list(script.reload().offsets.of("g")) == []

    def test_deleting_a_topic_deletes_its_offsets_in_all_groups(self, script: Script) -> None:
        commit(script, T0, OffsetToCommit("u", 0, 1))
        list(script.state.forget_topics({"t", "unknown"}.__contains__, script.now_ms))
        assert set(fetch(script)) == {("u", 0)}
        assert [(t, p) for t, p, _ in script.reload().offsets.of("g")] == [("u", 0)]


class TestExpiry:
    def expire(self, script: Script) -> None:
        list(script.state.expire(script.now_ms))
        check_groups(script.state)

    def test_offsets_of_a_client_outside_groups_expire_after_their_commit(self, script: Script) -> None:
        commit(script, T0)
        script.now_ms += 7 * DAY_MS - 1
        self.expire(script)
        assert set(fetch(script)) == {("t", 0)}
        script.now_ms += 1
        self.expire(script)
        assert fetch(script) == {}
        assert script.state.groups == script.reload().groups == {}
        assert script.log[-1] == GroupMetadataRecord("g", None)

    def test_a_left_group_s_offsets_expire_after_it_became_empty(self, script: Script) -> None:
        [member] = script.stable("a", protocols=SUBSCRIBED_TO_T)
        commit(script, T0, generation=1, member_id=member)
        for _ in range(10):
            script.now_ms += DAY_MS
            self.expire(script)
        assert set(fetch(script)) == {("t", 0)}
        script.leave(LeavingMember(member))
        script.now_ms += 7 * DAY_MS - 1
        self.expire(script)
        assert set(fetch(script)) == {("t", 0)}
        script.now_ms += 1
        self.expire(script)
        assert script.state.groups == {}

    def test_a_running_group_loses_only_topics_that_it_left(self, script: Script) -> None:
        [member] = script.stable("a", protocols=SUBSCRIBED_TO_T)
        commit(script, T0, OffsetToCommit("old", 0, 1), generation=1, member_id=member)
        script.now_ms += 8 * DAY_MS
        self.expire(script)
        assert set(fetch(script)) == {("t", 0)}

    def test_nothing_expires_during_a_rebalance(self, script: Script) -> None:
        [member] = script.stable("a", protocols=SUBSCRIBED_TO_T)
        commit(script, OffsetToCommit("old", 0, 1), generation=1, member_id=member)
        script.send_join("b", version=3, protocols=SUBSCRIBED_TO_T)
        script.now_ms += 8 * DAY_MS
        self.expire(script)
        assert set(fetch(script)) == {("old", 0)}

    def test_a_commit_s_own_retention_wins(self, script: Script) -> None:
        commit(script, T0, retention_ms=1_000)
        script.now_ms += 999
        self.expire(script)
        assert fetch(script)
        script.state = script.reload()
        script.now_ms += 1
        self.expire(script)
        assert fetch(script) == {}

    def test_an_announced_member_keeps_its_empty_group(self, script: Script) -> None:
        script.send_join("a", version=4)
        self.expire(script)
        assert script.send_join("a2", "id1") is None
