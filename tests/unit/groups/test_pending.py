"""Offsets in open transactions: what becomes of them, and who overtakes whom."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.errors import ErrorCode
from tidemill.groups.messages import OffsetCommitRequest, OffsetToCommit, TransactionalCommitRequest
from tidemill.groups.offsets import OffsetStore
from tidemill.groups.records import OffsetCommit, OffsetCommitRecord

P1, P2 = 11, 12


def record(offset: int | None, partition: int = 0, group: str = "g") -> OffsetCommitRecord:
    value = None if offset is None else OffsetCommit(offset, -1, "", 1)
    return OffsetCommitRecord(group, "t", partition, value)


def committed(store: OffsetStore, partition: int = 0, *, stable: bool = False) -> int | ErrorCode:
    found = store.fetch("g", [("t", partition)], require_stable=stable)["t", partition]
    return found.offset if found.error is ErrorCode.none else found.error


@pytest.fixture
def store() -> OffsetStore:
    return OffsetStore()


def test_a_commit_makes_pending_offsets_count(store: OffsetStore) -> None:
    store.replay(record(5), P1)
    store.replay(record(6, partition=1), P1)
    assert committed(store) == -1
    assert committed(store, stable=True) is ErrorCode.unstable_offset_commit
    store.replay_marker(P1, commit=True)
    assert (committed(store, stable=True), committed(store, 1, stable=True)) == (5, 6)


def test_an_abort_makes_them_vanish(store: OffsetStore) -> None:
    store.replay(record(3))
    store.replay(record(5), P1)
    store.replay_marker(P1, commit=False)
    assert committed(store, stable=True) == 3
    store.replay_marker(P1, commit=True)
    assert committed(store) == 3, "a marker without anything pending changes nothing"


def test_the_last_of_several_in_one_transaction_counts(store: OffsetStore) -> None:
    store.replay(record(5), P1)
    store.replay(record(4), P1)
    store.replay_marker(P1, commit=True)
    assert committed(store) == 4


def test_a_plain_commit_behind_it_wins(store: OffsetStore) -> None:
    store.replay(record(5), P1)
    store.replay(record(9))
    assert committed(store, stable=True) is ErrorCode.unstable_offset_commit
    store.replay_marker(P1, commit=True)
    assert committed(store) == 9


def test_a_plain_commit_before_it_loses(store: OffsetStore) -> None:
    store.replay(record(9))
    store.replay(record(5), P1)
    store.replay_marker(P1, commit=True)
    assert committed(store) == 5


@pytest.mark.parametrize("order", [(P1, P2), (P2, P1)])
def test_of_two_transactions_the_one_that_wrote_last_wins(store: OffsetStore, order: tuple[int, int]) -> None:
    store.replay(record(5), P1)
    store.replay(record(7), P2)
    for producer_id in order:
        store.replay_marker(producer_id, commit=True)
    assert committed(store) == 7


def test_an_aborted_one_overtakes_nobody(store: OffsetStore) -> None:
    store.replay(record(5), P1)
    store.replay(record(7), P2)
    store.replay_marker(P2, commit=False)
    store.replay_marker(P1, commit=True)
    assert committed(store) == 5


def test_a_deletion_takes_what_is_pending_with_it(store: OffsetStore) -> None:
    store.replay(record(5), P1)
    for tombstone in store.tombstones_of_group("g"):
        store.replay(tombstone)
    store.replay_marker(P1, commit=True)
    assert committed(store) == -1
    assert not store.pending.has_any("g")


def test_a_deleted_topic_takes_what_is_pending_with_it(store: OffsetStore) -> None:
    store.replay(record(5), P1)
    for tombstone in store.tombstones_of_topics("g", "t".__eq__, 10):
        store.replay(tombstone)
    assert not store.pending.has_any("g")


# --- in a shard


def transactional(
    offset: int = 5, *, generation: int = -1, member_id: str = "", version: int = 3
) -> TransactionalCommitRequest:
    commit = OffsetCommitRequest(
        "g", [OffsetToCommit("t", 0, offset)], generation, member_id, version=version
    )
    return TransactionalCommitRequest(commit, P1, 0)


def outcome(script: Any, request: TransactionalCommitRequest) -> ErrorCode:
    codes = script.state.commit_transactional_offsets(request, script.now_ms)
    code: ErrorCode = codes["t", 0]
    return code


def test_a_group_comes_into_being_by_a_pending_offset_and_stays(make_script: type) -> None:
    script = make_script()
    assert outcome(script, transactional()) is ErrorCode.none
    assert "g" in script.state.groups
    list(script.state.expire(script.now_ms + 10**12))
    assert "g" in script.state.groups, "its transaction is open"
    script.state.replay_marker(P1, commit=False)
    list(script.state.expire(script.now_ms + 10**12))
    assert "g" not in script.state.groups


def test_members_of_the_generation_may_commit_and_others_not(make_script: type) -> None:
    script = make_script()
    (member_id,) = script.stable("m")
    generation = script.group.generation
    assert outcome(script, transactional(generation=generation, member_id=member_id)) is ErrorCode.none
    stale = transactional(generation=generation - 1, member_id=member_id)
    assert outcome(script, stale) is ErrorCode.illegal_generation
    stranger = transactional(generation=generation, member_id="stranger")
    assert outcome(script, stranger) is ErrorCode.unknown_member_id
    assert outcome(script, transactional()) is ErrorCode.none, "old producers do not say who they are"


def test_an_append_that_fails_leaves_nothing_pending(make_script: type) -> None:
    script = make_script()
    script.fail_append_with = OSError("full")
    with pytest.raises(OSError, match="full"):
        outcome(script, transactional())
    assert not script.state.offsets.pending.has_any("g")
