from __future__ import annotations

import pytest

from tidemill.errors import ApiError, ErrorCode
from tidemill.server.broker.fetch_sessions import FetchSession, FetchSessions, SessionPartition, next_epoch


def follow(session: FetchSession, wanted: list[SessionPartition], forgotten: list[tuple[str, int]]) -> None:
    for _ in session.update(wanted, forgotten):
        pass


def opened(sessions: FetchSessions, wanted: list[SessionPartition]) -> FetchSession | None:
    session = sessions.open(by_id=False)
    if session is not None:
        follow(session, wanted, [])
    return session


def wanted(topic: str, index: int = 0, offset: int = 0) -> SessionPartition:
    return SessionPartition(topic, index, offset, 100, -1, -1)


def refused(sessions: FetchSessions, session_id: int, epoch: int, *, by_id: bool = False) -> ErrorCode:
    with pytest.raises(ApiError) as caught:
        sessions.resume(session_id, epoch, by_id=by_id)
    return caught.value.code


def test_a_session_goes_on_with_the_next_epoch_only() -> None:
    sessions = FetchSessions(10)
    session = opened(sessions, [wanted("a")])
    assert session is not None
    assert refused(sessions, session.session_id, 2) == ErrorCode.invalid_fetch_session_epoch
    assert sessions.resume(session.session_id, 1, by_id=False) is session
    assert refused(sessions, session.session_id, 1) == ErrorCode.invalid_fetch_session_epoch
    assert sessions.resume(session.session_id, 2, by_id=False) is session


def test_epochs_wrap_around_the_numbers_that_mean_something() -> None:
    assert next_epoch(1) == 2
    assert next_epoch(2**31 - 1) == 1


def test_an_unknown_or_closed_session_is_refused() -> None:
    sessions = FetchSessions(10)
    session = opened(sessions, [wanted("a")])
    assert session is not None
    assert refused(sessions, session.session_id + 1, 1) == ErrorCode.fetch_session_id_not_found
    sessions.close(session.session_id)
    sessions.close(session.session_id)
    assert refused(sessions, session.session_id, 1) == ErrorCode.fetch_session_id_not_found


def test_the_way_of_naming_topics_does_not_change_within_a_session() -> None:
    sessions = FetchSessions(10)
    session = opened(sessions, [wanted("a")])
    assert session is not None
    assert refused(sessions, session.session_id, 1, by_id=True) == ErrorCode.fetch_session_topic_id_error
    assert sessions.resume(session.session_id, 1, by_id=False) is session, "a refusal uses no epoch"


def test_the_session_unused_for_longest_makes_room() -> None:
    sessions = FetchSessions(2)
    first, second = (opened(sessions, [wanted("a")]) for _ in range(2))
    assert first is not None
    assert second is not None
    sessions.resume(first.session_id, 1, by_id=False)
    opened(sessions, [wanted("a")])
    assert len(sessions) == 2
    assert refused(sessions, second.session_id, 1) == ErrorCode.fetch_session_id_not_found
    assert sessions.resume(first.session_id, 2, by_id=False) is first


def test_without_sessions_none_is_opened() -> None:
    sessions = FetchSessions(0)
    assert opened(sessions, [wanted("a")]) is None
    assert len(sessions) == 0


def test_an_update_adds_moves_and_forgets() -> None:
    sessions = FetchSessions(1)
    session = opened(sessions, [wanted("a"), wanted("b"), wanted("c")])
    assert session is not None
    told = session.partitions["a", 0]
    told.told_high_watermark = 7
    follow(session, [wanted("a", offset=5), wanted("d")], [("b", 0), ("never there", 3)])
    assert [(each.topic, each.fetch_offset) for each in session.partitions.values()] == [
        ("a", 5),
        ("c", 0),
        ("d", 0),
    ]
    assert session.partitions["a", 0].told_high_watermark == 7


def test_who_was_served_goes_to_the_end_also_when_it_was_forgotten_meanwhile() -> None:
    sessions = FetchSessions(1)
    session = opened(sessions, [wanted("a"), wanted("b")])
    assert session is not None
    session.served(("a", 0))
    assert [name for name, _ in session.partitions] == ["b", "a"]
    follow(session, [], [("a", 0)])
    session.served(("a", 0))
    assert [name for name, _ in session.partitions] == ["b"]
