"""Positions that their log does not have: an error, or where the caller says, in every kind of store."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tidemill import IN_TRANSACTION
from tidemill.client.admin.topics import create_partitions, delete_records
from tidemill.client.cursors.admin import describe_cursor
from tidemill.client.cursors.cursor import AsyncCursor
from tidemill.cursors.errors import CheckpointAheadOfLog, CheckpointBelowLogStart, CursorFenced
from tidemill.cursors.position import Gap, Position, Reason
from tidemill.errors import ConfigError

World = Any
KINDS = ("cluster", "file", "database", "transactions")


class Kept:
    """A place where positions are kept."""

    def __init__(self, kind: str, tmp_path: Path, connection: sqlite3.Connection) -> None:
        self.kind = kind
        self.connection = connection
        self.checkpoint = {
            "cluster": None,
            "file": tmp_path / "checkpoint",
            "database": connection,
            "transactions": IN_TRANSACTION,
        }[kind]

    @contextlib.contextmanager
    def committing(self, cursor: Any) -> Iterator[None]:
        """What was delivered at the end of the block is committed."""
        if self.kind == "transactions":
            with cursor.transaction():
                yield
            return
        yield
        if self.kind == "database":
            self.connection.execute("BEGIN")
        cursor.commit()
        self.connection.commit()


@pytest.fixture(params=KINDS)
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    with contextlib.closing(sqlite3.connect(tmp_path / "effects.db")) as connection:
        yield Kept(str(request.param), tmp_path, connection)


def offsets(cursor: Any) -> dict[int, int]:
    return {partition: position.offset for partition, position in cursor.committed.items()}


def read_and_lose(world: World, name: str, topic: str, kept: Kept) -> None:
    """Commit offset 4 of both partitions; then retention deletes what is below 8 of the first."""
    for partition in (0, 1):
        world.send(topic, range(4), partition)
    with world.db.cursor(name, topic, checkpoint=kept.checkpoint) as cursor, kept.committing(cursor):
        while sum(each.offset for each in cursor.positions.values()) < 8:
            cursor.poll_batch(99)
    for partition in (0, 1):
        world.send(topic, range(6), partition)
    world.db.run(delete_records(world.cluster, {(topic, 0): 8}))


@pytest.mark.parametrize(("if_lost", "goes_on_at"), [("earliest", 8), ("latest", 10)])
def test_records_that_are_deleted_are_passed_over_only_if_the_caller_says_so(
    world: World, name: str, kept: Kept, if_lost: str, goes_on_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    topic = world.topic(2)
    read_and_lose(world, name, topic, kept)
    options = {"checkpoint": kept.checkpoint}
    with pytest.raises(CheckpointBelowLogStart, match=r"if_lost='earliest'.*stored: offset 4") as caught:
        world.db.cursor(name, topic, **options)
    # Only commands that work for this kind of store are named.
    assert ("tidemill cursor reset" in str(caught.value)) == (kept.kind in ("cluster", "transactions"))
    with (
        caplog.at_level(logging.WARNING, AsyncCursor.__module__),
        world.db.cursor(name, topic, if_lost=if_lost, **options) as cursor,
    ):
        assert offsets(cursor) == {0: goes_on_at, 1: 4}
        assert cursor.gaps().ranges == (Gap(0, 4, 7, Reason.RETENTION),)
    assert f"{topic}-0, which is {goes_on_at}" in caplog.text
    # It is stored, and what is not lost is where it was.
    with world.db.cursor(name, topic, **options) as cursor:
        assert offsets(cursor) == {0: goes_on_at, 1: 4}
        found = sorted((each.partition, each.offset) for each in drained(cursor, 10 - goes_on_at + 6))
        assert found == [(0, each) for each in range(goes_on_at, 10)] + [(1, each) for each in range(4, 10)]
    shown = world.db.run(describe_cursor(world.cluster, name)).positions
    assert {each: position.offset for each, position in shown.items()} == {0: goes_on_at, 1: 4}


def drained(cursor: Any, count: int) -> list[Any]:
    found: list[Any] = []
    while len(found) < count:
        found += cursor.poll_batch(99)
    return found


def test_a_log_that_has_lost_its_end_is_gone_on_with_if_the_caller_says_so(
    world: World, name: str, kept: Kept
) -> None:
    topic = world.topic()
    world.send(topic, range(3))
    options = {"checkpoint": kept.checkpoint}
    with world.db.cursor(name, topic, **options) as cursor, kept.committing(cursor):
        cursor.poll_batch(3)
        # As if the log had lost its end in a power failure.
        cursor._awaited._machine.seek(0, Position(7, -1, started=True))
    with pytest.raises(CheckpointAheadOfLog, match=r"if_lost='earliest'.*offset 7.*at most offset 3"):
        world.db.cursor(name, topic, **options)
    with world.db.cursor(name, topic, if_lost="latest", **options) as cursor:
        assert offsets(cursor) == {0: 3}
        assert cursor.gaps().ranges == ()
    with world.db.cursor(name, topic, **options) as cursor:
        assert offsets(cursor) == {0: 3}


def test_a_position_that_the_log_has_stays_whatever_if_lost_says(world: World, name: str, kept: Kept) -> None:
    topic = world.topic()
    world.send(topic, range(6))
    options = {"checkpoint": kept.checkpoint, "if_lost": "latest"}
    with world.db.cursor(name, topic, **options) as cursor, kept.committing(cursor):
        cursor.poll_batch(2)
    with world.db.cursor(name, topic, **options) as cursor:
        assert [each.offset for each in cursor.poll_batch(9)] == [2, 3, 4, 5]


def test_partitions_that_were_added_begin_where_their_logs_do(world: World, name: str, kept: Kept) -> None:
    topic = world.topic()
    options = {"checkpoint": kept.checkpoint, "start": "latest"}
    world.db.cursor(name, topic, **options).close()
    world.db.run(create_partitions(world.cluster, topic, 3))
    for partition in (1, 2):
        world.send(topic, range(5), partition)
    world.db.run(delete_records(world.cluster, {(topic, 2): 3}))
    with world.db.cursor(name, topic, **options) as cursor:
        assert offsets(cursor) == {0: 0, 1: 0, 2: 3}


def test_a_row_that_was_deleted_begins_where_its_log_does(world: World, name: str, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "effects.db")) as connection:
        topic, kept = world.topic(2), Kept("database", tmp_path, connection)
        read_and_lose(world, name, topic, kept)
        connection.execute("DELETE FROM tidemill_cursors WHERE partition_id = 0")
        connection.commit()
        with world.db.cursor(name, topic, checkpoint=connection) as cursor:
            assert offsets(cursor) == {0: 8, 1: 4}


def test_where_a_lost_position_goes_on_is_not_stored_by_one_who_is_not_the_owner_any_more(
    world: World, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "effects.db")) as connection:
        topic, kept = world.topic(2), Kept("database", tmp_path, connection)
        read_and_lose(world, name, topic, kept)
        store_lost_now = AsyncCursor.store_lost_now

        def taken_over_before(self: AsyncCursor) -> None:
            with contextlib.closing(sqlite3.connect(tmp_path / "effects.db")) as other, other:
                other.execute("UPDATE tidemill_cursors SET epoch = epoch + 1")
            store_lost_now(self)

        monkeypatch.setattr(AsyncCursor, "store_lost_now", taken_over_before)
        with pytest.raises(CursorFenced):
            world.db.cursor(name, topic, checkpoint=connection, if_lost="earliest")
        assert not connection.in_transaction
        rows = connection.execute("SELECT position FROM tidemill_cursors").fetchall()
        assert rows == [(4,), (4,)]


def test_a_cursor_without_a_name_goes_on_too(world: World) -> None:
    topic = world.topic()
    world.send(topic, range(5))
    with world.db.cursor(None, topic, start=9, if_lost="earliest") as cursor:
        assert len(cursor.poll_batch(9)) == 5


def test_anything_else_is_no_choice(world: World, name: str) -> None:
    with pytest.raises(ConfigError, match="if_lost is 'earliest' or 'latest', not 'none'"):
        world.db.cursor(name, world.topic(), if_lost="none")


async def test_the_awaited_client_does_the_same_with_the_callers_database(
    world: World, name: str, tmp_path: Path
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "effects.db")) as connection:
        topic, kept = world.topic(2), Kept("database", tmp_path, connection)
        read_and_lose(world, name, topic, kept)

    async def run() -> dict[int, int]:
        with contextlib.closing(sqlite3.connect(tmp_path / "effects.db")) as connection:
            options = {"checkpoint": connection, "if_lost": "earliest"}
            async with await world.db._awaited.cursor(name, topic, **options) as cursor:
                return {partition: position.offset for partition, position in cursor.committed.items()}

    assert world.db.run(run()) == {0: 8, 1: 4}
