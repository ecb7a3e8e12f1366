"""Taking parked records back."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.client.admin.topics import create_topic, delete_topic
from tidemill.client.cursors.admin import delete_cursor, describe_cursor
from tidemill.client.cursors.cursor import AsyncCursor
from tidemill.client.cursors.replay import replay
from tidemill.cursors.errors import CheckpointRegionMismatch, CursorNotFound
from tidemill.errors import ApiError
from tidemill.records.record import Record
from tidemill.share.letters import Letter, letter_record

World = Any


def test_a_double_is_left_out_although_a_poll_of_earlier_letters_gives_nothing(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, letters = world.topic(), world.topic()
    letter = letter_record(
        Record(b"k", b"v", 1_000), Letter(name, topic, 0, 7, 1, "poison"), copy=True, now_ms=1_000
    )
    world.send_records(letters, [letter])
    assert world.db.run(replay(world.cluster, name, letters)).sent.total() == 1
    world.send_records(letters, [letter])
    poll_batch = AsyncCursor.poll_batch
    slow: list[AsyncCursor] = []

    async def nothing_at_first(self: AsyncCursor, limit: int = 64, *, timeout_ms: int = 500) -> Any:
        if self.name is None and not slow:
            slow.append(self)
            return []
        return await poll_batch(self, limit, timeout_ms=timeout_ms)

    monkeypatch.setattr(AsyncCursor, "poll_batch", nothing_at_first)
    found = world.db.run(replay(world.cluster, name, letters))
    assert slow
    assert (found.sent.total(), found.parked_twice) == (0, 1)


def parked(name: str, topic: str, offset: int) -> Record:
    """A letter of a worker."""
    letter = Letter(name, topic, 0, offset, 1, "poison")
    return letter_record(Record(b"k", b"v", 1_000), letter, copy=True, now_ms=1_000)


def test_a_dry_run_changes_nothing(world: World, name: str) -> None:
    topic, letters = world.topic(), world.topic(2)
    world.send_records(letters, [parked(name, topic, 7), parked(name, topic, 8)], partition=1)

    def dry_run() -> tuple[int, int]:
        found = world.db.run(replay(world.cluster, name, letters, execute=False))
        return found.sent.total(), found.parked_twice

    assert [dry_run(), dry_run()] == [(2, 0), (2, 0)]
    with pytest.raises(CursorNotFound):
        world.db.run(describe_cursor(world.cluster, f"{name}.replay"))
    assert world.db.run(replay(world.cluster, name, letters)).sent.total() == 2
    before = world.db.run(describe_cursor(world.cluster, f"{name}.replay"))
    # It knows what was sent back, and where the letters begin that were not.
    world.send_records(letters, [parked(name, topic, 9), parked(name, topic, 7)], partition=0)
    assert [dry_run(), dry_run()] == [(1, 1), (1, 1)]
    assert world.db.run(describe_cursor(world.cluster, f"{name}.replay")) == before
    found = world.db.run(replay(world.cluster, name, letters))
    assert (found.sent.total(), found.parked_twice) == (1, 1)


def test_a_dry_run_over_other_letters_is_refused_as_the_replay_itself_is(world: World, name: str) -> None:
    topic, letters, others = world.topic(), world.topic(), world.topic()
    for each in (letters, others):
        world.send_records(each, [parked(name, topic, 7)])
    assert world.db.run(replay(world.cluster, name, letters)).sent.total() == 1
    for execute in (False, True):
        with pytest.raises(CheckpointRegionMismatch):
            world.db.run(replay(world.cluster, name, others, execute=execute))
    world.db.run(delete_cursor(world.cluster, f"{name}.replay"))
    assert world.db.run(replay(world.cluster, name, others, execute=False)).sent.total() == 1


def test_letters_without_their_record_are_counted_and_not_sent_back(world: World, name: str) -> None:
    topic, letters = world.topic(), world.topic()

    def letter_of(offset: int, *, left_out: bool) -> Record:
        letter = Letter(name, topic, 0, offset, 1, "poison")
        return letter_record(
            Record(b"k", b"%d" % offset, 1_000), letter, copy=True, left_out=left_out, now_ms=1_000
        )

    world.send_records(
        letters, [letter_of(1, left_out=True), letter_of(2, left_out=False), letter_of(1, left_out=True)]
    )
    found = world.db.run(replay(world.cluster, name, letters))
    assert (found.sent.total(), found.parked_twice, found.without_contents) == (1, 1, 1)
    # Parked again, after a crash, in fewer bytes: now it is there.
    world.send_records(letters, [letter_of(3, left_out=True)])
    found = world.db.run(replay(world.cluster, name, letters))
    assert (found.sent.total(), found.parked_twice, found.without_contents) == (0, 0, 2)
    world.send_records(letters, [letter_of(1, left_out=False)])
    found = world.db.run(replay(world.cluster, name, letters))
    assert (found.sent.total(), found.parked_twice, found.without_contents) == (1, 0, 1)
    with world.db.cursor(None, topic) as cursor:
        assert [each.value for each in cursor.poll_batch(9)] == [b"2", b"1"]


@pytest.mark.parametrize("execute", [False, True])
def test_a_topic_that_is_gone_is_told_and_does_not_come_back(world: World, name: str, execute: bool) -> None:
    gone, letters = world.topic(), world.topic()
    world.send_records(letters, [parked(name, gone, 7)])
    world.db.run(delete_topic(world.cluster, gone))
    with pytest.raises(ApiError, match=f"topic '{gone}', which does not exist any more: create it"):
        world.db.run(replay(world.cluster, name, letters, execute=execute))
    world.cluster.forget()
    with pytest.raises(ApiError, match="there is no topic"):
        world.db.run(world.cluster.topic(gone))
    world.db.run(create_topic(world.cluster, gone, partitions=1))
    assert world.db.run(replay(world.cluster, name, letters)).sent.total() == 1
