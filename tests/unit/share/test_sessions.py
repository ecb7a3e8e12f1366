"""Share sessions: epochs, limits, and whose connection they belong to."""

from __future__ import annotations

from uuid import UUID

import pytest

from tidemill.errors import ApiError, ErrorCode
from tidemill.share.sessions import SessionKey, SessionPartition, ShareSessions

KEY = SessionKey("g", "m")


def _code(sessions: ShareSessions, epoch: int) -> ErrorCode:
    with pytest.raises(ApiError) as caught:
        sessions.resume(KEY, epoch)
    return caught.value.code


def test_epochs_count_up_and_wrap_to_one() -> None:
    sessions = ShareSessions(10)
    assert _code(sessions, 1) is ErrorCode.share_session_not_found
    session = sessions.open(KEY, 1)
    assert _code(sessions, 2) is ErrorCode.invalid_share_session_epoch
    assert sessions.resume(KEY, 1) is sessions.resume(KEY, 2) is session
    session.epoch = 2**31 - 1
    sessions.resume(KEY, 2**31 - 1)
    assert session.epoch == 1


def test_opening_again_replaces_the_session_and_needs_no_place() -> None:
    sessions = ShareSessions(1)
    first = sessions.open(KEY, 1)
    second = sessions.open(KEY, 2)
    assert (first.is_closed, second.is_closed, len(sessions)) == (True, False, 1)
    assert (sessions.of_connection(1), sessions.of_connection(2)) == ([], [KEY])
    with pytest.raises(ApiError) as caught:
        sessions.open(SessionKey("g", "other"), 3)
    assert caught.value.code is ErrorCode.share_session_limit_reached


def test_a_group_is_there_while_one_member_is() -> None:
    sessions = ShareSessions(10)
    other = SessionKey("g", "other")
    sessions.open(KEY, 1)
    sessions.open(other, 1)
    sessions.close(KEY)
    assert sessions.has_group("g")
    sessions.close(other)
    assert not sessions.has_group("g")
    assert sessions.close(other) is None


def test_partitions_are_added_forgotten_and_taken_in_turn() -> None:
    session = ShareSessions(10).open(KEY, 1)
    partitions = [SessionPartition(UUID(int=1), number) for number in range(3)]
    assert session.in_turn() == []
    session.update(partitions, ())
    session.update((), [partitions[1]])
    assert [session.in_turn()[0] for _ in range(3)] == [partitions[0], partitions[2], partitions[0]]


def test_all_sessions_together_have_so_many_partitions_at_most() -> None:
    sessions = ShareSessions(1_000)
    some = [SessionPartition(UUID(int=1), number) for number in range(5_000)]
    for number in range(100):
        sessions.update(sessions.open(SessionKey("g", f"m{number}"), number), some, ())
    assert sessions.partition_count == 500_000
    refused = sessions.open(SessionKey("g", "one-more"), 100)
    with pytest.raises(ApiError) as caught:
        sessions.update(refused, some[:1], ())
    assert caught.value.code is ErrorCode.share_session_limit_reached
    sessions.close(SessionKey("g", "m0"))
    sessions.update(refused, some[:1], ())
    sessions.update(refused, (), some[:1])
    assert sessions.partition_count == 495_000
