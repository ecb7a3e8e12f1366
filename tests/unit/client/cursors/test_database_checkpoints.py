"""Checkpoints in the caller's database: effect and position commit together, by every kind of connection."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy
from sqlalchemy.orm import Session

from support.postgres import find_postgres, running_postgres
from tidemill.client.cursors.checkpoints.database import DatabaseStore
from tidemill.cursors.checkpoint import Entry
from tidemill.cursors.errors import (
    CheckpointCorrupt,
    CheckpointRegionMismatch,
    CursorError,
    CursorFenced,
    CursorMoved,
    NoOpenTransaction,
)
from tidemill.cursors.position import FINISHED_AHEAD_MAX, Position
from tidemill.cursors.region import Region
from tidemill.errors import ConfigError

World = Any
KINDS = ("sqlite", "sqlalchemy", "session", "postgres", "postgres-sqlalchemy")


class Effects:
    """A connection of one kind, with a table of effects."""

    def __init__(self, kind: str, connection: Any) -> None:
        self.kind = kind
        self.connection = connection
        self.run("CREATE TABLE IF NOT EXISTS effects (offset_id BIGINT)")
        connection.commit()

    def run(self, sql: str) -> Any:
        """Run a statement, in the transaction that is open or begins with it."""
        if self.kind in ("sqlite", "postgres"):
            return self.connection.execute(sql)
        return self.connection.execute(sqlalchemy.text(sql))

    def begin(self) -> None:
        if self.kind == "sqlite":
            self.connection.execute("BEGIN")
        else:
            self.run("SELECT 1")

    def write(self, records: list[Any]) -> None:
        for record in records:
            self.run(f"INSERT INTO effects VALUES ({record.offset})")

    def written(self) -> list[int]:
        found = [row[0] for row in self.run("SELECT offset_id FROM effects ORDER BY offset_id").fetchall()]
        self.connection.rollback()
        return found


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    if find_postgres() is None:
        pytest.skip("there is no PostgreSQL server: apt-get install postgresql")
    with running_postgres() as dsn:
        yield dsn


@pytest.fixture(params=KINDS)
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], Effects]]:
    """Opens connections to one database, which is empty at first."""
    kind = str(request.param)
    with contextlib.ExitStack() as stack:
        if kind.startswith("postgres"):
            import psycopg

            dsn = request.getfixturevalue("postgres")
            with psycopg.connect(dsn, autocommit=True) as connection:
                connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
        else:
            dsn = str(tmp_path / "effects.db")

        def opened() -> Effects:
            connection: Any
            if kind == "sqlite":
                connection = stack.enter_context(contextlib.closing(sqlite3.connect(dsn)))
            elif kind == "postgres":
                connection = stack.enter_context(psycopg.connect(dsn))
            else:
                url = f"sqlite:///{dsn}"
                if kind.startswith("postgres"):
                    host = dsn.split()[0].removeprefix("host=")
                    url = f"postgresql+psycopg://test@/postgres?host={host}"
                engine = sqlalchemy.create_engine(url)
                stack.callback(engine.dispose)
                connection = stack.enter_context(Session(engine) if kind == "session" else engine.connect())
            return Effects(kind, connection)

        yield opened


def test_effect_and_position_commit_together(world: World, name: str, connect: Callable[[], Effects]) -> None:
    topic = world.topic()
    world.send(topic, range(10))
    effects = connect()
    with world.db.cursor(name, topic, checkpoint=effects.connection) as cursor:
        batch = cursor.poll_batch(4)
        effects.begin()
        effects.write(batch)
        cursor.commit()
        effects.connection.commit()
        # A transaction that is rolled back takes both back.
        effects.begin()
        effects.write(cursor.poll_batch(3))
        cursor.commit()
        effects.connection.rollback()
        # The next commit notices it, and the cursor goes to what is stored.
        effects.begin()
        effects.write(cursor.poll_batch(3))
        with pytest.raises(CursorMoved, match=f"cursor '{name}' .*stored: offset 4; expected: offset 7"):
            cursor.commit()
        effects.connection.rollback()
        batch = cursor.poll_batch(99)
        assert [each.offset for each in batch] == [4, 5, 6, 7, 8, 9]
        effects.begin()
        effects.write(batch)
        cursor.commit()
        effects.connection.commit()
    assert effects.written() == list(range(10))
    with world.db.cursor(name, topic, checkpoint=effects.connection) as cursor:
        assert cursor.poll_batch(9, timeout_ms=0) == []


def test_a_commit_outside_of_a_transaction_is_refused(
    world: World, name: str, connect: Callable[[], Effects]
) -> None:
    topic = world.topic()
    world.send(topic, range(3))
    effects = connect()
    with world.db.cursor(name, topic, checkpoint=effects.connection) as cursor:
        cursor.poll_batch(2)
        with pytest.raises(NoOpenTransaction, match="no open transaction"):
            cursor.commit()
        effects.begin()
        cursor.commit()
        effects.connection.commit()


def _engine(kind: str, request: pytest.FixtureRequest, tmp_path: Path, **options: Any) -> sqlalchemy.Engine:
    if kind == "sqlite":
        return sqlalchemy.create_engine(f"sqlite:///{tmp_path / 'effects.db'}", **options)
    host = request.getfixturevalue("postgres").split()[0].removeprefix("host=")
    return sqlalchemy.create_engine(f"postgresql+psycopg://test@/postgres?host={host}", **options)


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
@pytest.mark.parametrize("opened_by", ["connection", "session"])
def test_a_connection_that_commits_every_statement_by_itself_is_refused(
    world: World, name: str, kind: str, opened_by: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    topic = world.topic()
    world.send(topic, range(3))
    engine = _engine(kind, request, tmp_path, isolation_level="AUTOCOMMIT")
    request.addfinalizer(engine.dispose)
    with Session(engine) if opened_by == "session" else engine.connect() as connection:
        with pytest.raises(NoOpenTransaction, match=f"cursor '{name}'.*AUTOCOMMIT"):
            world.db.cursor(name, topic, checkpoint=connection)
        assert not connection.in_transaction()


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_a_connection_that_begins_to_commit_by_itself_is_refused_at_the_next_commit(
    world: World, name: str, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    topic = world.topic()
    world.send(topic, range(3))
    engine = _engine(kind, request, tmp_path)
    request.addfinalizer(engine.dispose)
    with engine.connect() as connection:
        with world.db.cursor(name, topic, checkpoint=connection) as cursor:
            cursor.poll_batch(2)
            connection.execution_options(isolation_level="AUTOCOMMIT")
            connection.execute(sqlalchemy.text("SELECT 1"))
            with pytest.raises(NoOpenTransaction, match="AUTOCOMMIT"):
                cursor.commit()
            connection.rollback()
        connection.execution_options(isolation_level="SERIALIZABLE")
        with world.db.cursor(name, topic, checkpoint=connection) as cursor:
            assert [each.offset for each in cursor.poll_batch(9)] == [0, 1, 2]


def test_a_program_may_begin_the_transactions_of_sqlite_itself(
    world: World, name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    topic = world.topic()
    world.send(topic, range(3))
    engine = _engine("sqlite", request, tmp_path)
    request.addfinalizer(engine.dispose)

    # As SQLAlchemy's documentation of SQLite has it: the driver begins nothing, SQLAlchemy everything.
    @sqlalchemy.event.listens_for(engine, "connect")
    def connected(driver: Any, _: Any) -> None:
        driver.isolation_level = None

    @sqlalchemy.event.listens_for(engine, "begin")
    def begun(connection: Any) -> None:
        connection.exec_driver_sql("BEGIN")

    with engine.connect() as connection:
        with world.db.cursor(name, topic, checkpoint=connection) as cursor:
            cursor.poll_batch(2)
            with connection.begin():
                cursor.commit()
        with world.db.cursor(name, topic, checkpoint=connection) as cursor:
            assert [each.offset for each in cursor.poll_batch(9)] == [2]


def test_a_zombie_is_refused(world: World, name: str, connect: Callable[[], Effects]) -> None:
    topic = world.topic()
    world.send(topic, range(10))
    old, new = connect(), connect()
    with world.db.cursor(name, topic, checkpoint=old.connection) as zombie:
        zombie.poll_batch(5)
        with world.db.cursor(name, topic, checkpoint=new.connection, take_over=True) as owner:
            old.begin()
            with pytest.raises(CursorFenced, match="stored: epoch 2; expected: epoch 1"):
                zombie.commit()
            old.connection.rollback()
            batch = owner.poll_batch(5)
            new.begin()
            new.write(batch)
            owner.commit()
            new.connection.commit()
    assert new.written() == [0, 1, 2, 3, 4]


def test_taking_over_inside_of_a_transaction_is_refused(
    world: World, name: str, connect: Callable[[], Effects]
) -> None:
    topic = world.topic()
    effects = connect()
    effects.begin()
    with pytest.raises(CursorError, match="has a transaction open"):
        world.db.cursor(name, topic, checkpoint=effects.connection)
    effects.connection.rollback()


def test_another_region_and_a_damaged_row_are_refused(
    world: World, name: str, connect: Callable[[], Effects]
) -> None:
    topic = world.topic(2)
    effects = connect()
    world.db.cursor(name, topic, partitions=[0], checkpoint=effects.connection).close()
    with pytest.raises(CheckpointRegionMismatch, match="key_prefix None, not b'x'"):
        world.db.cursor(name, topic, partitions=[0], key_prefix="x", checkpoint=effects.connection)
    effects.begin()
    effects.run("UPDATE tidemill_cursors SET position = 5")
    effects.connection.commit()
    with pytest.raises(CheckpointCorrupt, match="stored: offset 5; expected: offset 0"):
        world.db.cursor(name, topic, partitions=[0], checkpoint=effects.connection)


def test_every_flipped_byte_of_a_row_is_refused(connect: Callable[[], Effects]) -> None:
    effects = connect()
    region = Region("orders", uuid4())
    DatabaseStore(effects.connection, "c", region).take_over_now({0: Position(5, 1, started=True)})
    (found,) = effects.run("SELECT checkpoint FROM tidemill_cursors").fetchall()
    effects.connection.rollback()
    whole = bytes(found[0])

    def replace(data: bytes) -> None:
        literal = f"'\\x{data.hex()}'" if effects.kind.startswith("postgres") else f"x'{data.hex()}'"
        effects.begin()
        effects.run(f"UPDATE tidemill_cursors SET checkpoint = {literal}")
        effects.connection.commit()

    broken = [whole[:at] + bytes([whole[at] ^ 0x5A]) + whole[at + 1 :] for at in range(len(whole))]
    for data in [*broken, b"", whole[:-1], whole + b"\0"]:
        replace(data)
        with pytest.raises(CheckpointCorrupt, match=r"cursor 'c'.*stored: .*expected: "):
            DatabaseStore(effects.connection, "c", region).take_over_now({0: Position(0)})
    replace(whole)
    taken = DatabaseStore(effects.connection, "c", region).take_over_now({0: Position(0)})
    # Nobody has become the owner in between.
    assert taken == {0: Entry(2, Position(5, 1, started=True))}


def test_lanes_finish_records_in_their_own_transactions(
    world: World, name: str, connect: Callable[[], Effects]
) -> None:
    topic = world.topic()
    world.send(topic, range(6))
    effects, lane = connect(), connect()
    with world.db.cursor(name, topic, checkpoint=effects.connection) as cursor:
        cursor.poll_batch(5)
        store = cursor._awaited.store
        for offset in (1, 3):
            lane.begin()
            store.finish(lane.connection, 0, offset)
            lane.connection.commit()
        lane.begin()
        store.finish(lane.connection, 0, 4)
        lane.connection.rollback()
        effects.begin()
        cursor.commit({0: 1})
        effects.connection.commit()
    with world.db.cursor(name, topic, checkpoint=effects.connection) as cursor:
        assert [each.offset for each in cursor.poll_batch(9)] == [2, 4, 5]
        lane.begin()
        with pytest.raises(CursorFenced):
            store.finish(lane.connection, 0, 2)
        lane.connection.rollback()


def test_notes_further_ahead_than_a_checkpoint_has_room_for_are_kept(
    world: World, name: str, connect: Callable[[], Effects]
) -> None:
    topic = world.topic()
    far = FINISHED_AHEAD_MAX + 50
    world.send(topic, range(far + 1))
    effects, lane = connect(), connect()
    with world.db.cursor(name, topic, checkpoint=effects.connection) as cursor:
        lane.begin()
        for offset in (2, far - 2, far):
            cursor._awaited.store.finish(lane.connection, 0, offset)
        lane.connection.commit()
    for upto in (0, 1, 49):
        with world.db.cursor(name, topic, checkpoint=effects.connection) as cursor:
            cursor.poll_batch(60)
            effects.begin()
            cursor.commit({0: upto}, finished={0: [upto + 2]})
            effects.connection.commit()
            effects.begin()
            with pytest.raises(ConfigError, match="1024 are the most"):
                cursor.commit({0: upto}, finished={0: [upto + FINISHED_AHEAD_MAX]})
            effects.connection.rollback()
    with world.db.cursor(name, topic, checkpoint=effects.connection) as cursor:
        found = []
        while batch := cursor.poll_batch(2_000, timeout_ms=2_000):
            found += [each.offset for each in batch]
    assert found == [each for each in range(49, far + 1) if each not in (51, far - 2, far)]


def test_rows_that_a_refused_commit_has_changed_are_taken_as_they_were_before(
    world: World, name: str, connect: Callable[[], Effects]
) -> None:
    topic = world.topic(2)
    for partition in (0, 1):
        world.send(topic, range(8), partition)
    effects, lane = connect(), connect()
    with world.db.cursor(name, topic, checkpoint=effects.connection) as cursor:
        cursor.poll_batch(16)
        lane.begin()
        cursor._awaited.store.finish(lane.connection, 0, 2)
        lane.connection.commit()
        effects.begin()
        cursor.commit({0: 1, 1: 1}, finished={0: [4]})
        effects.connection.commit()
        effects.begin()
        cursor.commit({1: 6})
        effects.connection.rollback()
        # Partition 0 is as it should be, and is changed; partition 1 is not.
        effects.begin()
        with pytest.raises(CursorMoved, match="partition 1"):
            cursor.commit({0: 6, 1: 7})
        effects.connection.rollback()
        assert {each: at.offset for each, at in cursor.committed.items()} == {0: 1, 1: 1}
        found = [(each.partition, each.offset) for each in cursor.poll_batch(99)]
        assert sorted(found) == [(0, each) for each in (1, 3, 5, 6, 7)] + [(1, each) for each in range(1, 8)]


def test_a_rollback_of_offsets_that_were_finished_ahead_is_noticed(
    world: World, name: str, connect: Callable[[], Effects]
) -> None:
    topic = world.topic()
    world.send(topic, range(6))
    effects = connect()
    with world.db.cursor(name, topic, checkpoint=effects.connection) as cursor:
        cursor.poll_batch(6)
        effects.begin()
        cursor.commit({0: 0}, finished={0: [4]})
        effects.connection.rollback()
        effects.begin()
        with pytest.raises(CursorMoved, match=r"stored: offset 0; expected: offset 0, and finished .* \[4\]"):
            cursor.commit({0: 1})
        effects.connection.rollback()
        # Offset 4 comes again: what was done with it is gone.
        assert [each.offset for each in cursor.poll_batch(9)] == [0, 1, 2, 3, 4, 5]
        for finished in ([4], [2]):
            effects.begin()
            cursor.commit({0: 1}, finished={0: finished})
            effects.connection.commit()
    with world.db.cursor(name, topic, checkpoint=effects.connection) as cursor:
        assert [each.offset for each in cursor.poll_batch(9)] == [1, 3, 5]


def test_a_seek_forgets_what_lanes_have_finished(
    world: World, name: str, connect: Callable[[], Effects]
) -> None:
    topic = world.topic()
    world.send(topic, range(6))
    effects, lane = connect(), connect()
    with world.db.cursor(name, topic, checkpoint=effects.connection) as cursor:
        cursor.poll_batch(6)
        lane.begin()
        cursor._awaited.store.finish(lane.connection, 0, 4)
        lane.connection.commit()
        effects.begin()
        cursor.commit({0: 2})
        effects.connection.commit()
        cursor.seek(0)
        effects.begin()
        cursor.commit()
        effects.connection.commit()
    with world.db.cursor(name, topic, checkpoint=effects.connection) as cursor:
        assert [each.offset for each in cursor.poll_batch(9)] == [0, 1, 2, 3, 4, 5]


def test_a_connection_of_another_kind_is_refused(world: World, name: str) -> None:
    topic = world.topic()
    with pytest.raises(ConfigError, match="sqlite3, psycopg or SQLAlchemy"):
        world.db.cursor(name, topic, checkpoint=object())
    with pytest.raises(ConfigError, match="needs a name"):
        world.db.cursor(None, topic, checkpoint=sqlite3.connect(":memory:"))
