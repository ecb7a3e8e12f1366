"""Cursors in files and databases are known to the cluster: listed, paused, waited for, never shown ahead."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tidemill import Ordered
from tidemill.client.cursors.admin import describe_cursor, list_cursors, pause_cursor, reset_cursor
from tidemill.cursors.errors import CheckpointRegionMismatch, CursorInUse
from tidemill.cursors.position import Position
from tidemill.cursors.stored import Home
from tidemill.errors import ApiError

World = Any


def shown(world: World, name: str) -> int:
    """The offset that the cluster shows of partition 0."""
    return int(world.db.run(describe_cursor(world.cluster, name)).positions[0].offset)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(tmp_path / "ledger.db", isolation_level=None)) as connection:
        yield connection


@contextmanager
def patience(world: World, timeout_ms: int) -> Iterator[None]:
    """Others are waited for no longer than that, or than their lease."""
    cluster = world.cluster
    before, cluster.timeout_ms = cluster.timeout_ms, timeout_ms
    try:
        yield
    finally:
        cluster.timeout_ms = before


def test_a_second_process_waits_for_the_lease_instead_of_fencing_the_first(
    world: World, name: str, ledger: sqlite3.Connection
) -> None:
    topic = world.topic()
    world.send(topic, range(5))
    with world.db.cursor(name, topic, checkpoint=ledger, lease_ms=2_000) as first:
        with patience(world, 3_000), pytest.raises(CursorInUse, match="one cursor in the whole cluster"):
            world.db.cursor(name, topic, checkpoint=ledger, lease_ms=2_000)
        first.poll_batch(2)
        ledger.execute("BEGIN")
        first.commit()
        ledger.execute("COMMIT")
    # It has given the lease up.
    with world.db.cursor(name, topic, checkpoint=ledger) as second:
        assert second.committed[0].offset == 2


def test_a_position_in_a_database_is_shown_once_it_is_certain(
    world: World, name: str, ledger: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.client.cursors.checkpoints.database._SETTLE_SECONDS", 0.0)
    topic = world.topic()
    world.send(topic, range(9))
    with world.db.cursor(name, topic, checkpoint=ledger, start=3) as cursor:
        store = cursor._awaited.store
        assert shown(world, name) == 3
        cursor.poll_batch(2)
        ledger.execute("BEGIN")
        cursor.commit()
        # Nobody knows yet whether it will be committed.
        cursor.poll(timeout_ms=0)
        world.db.run(store.show_now())
        assert shown(world, name) == 3
        ledger.execute("ROLLBACK")
        cursor.poll(timeout_ms=0)
        world.db.run(store.show_now())
        assert shown(world, name) == 3
        cursor.rollback()
    with world.db.cursor(name, topic, checkpoint=ledger) as cursor:
        store = cursor._awaited.store
        assert len(cursor.poll_batch(4)) == 4
        ledger.execute("BEGIN")
        cursor.commit()
        ledger.execute("COMMIT")
        cursor.poll(timeout_ms=0)
        world.db.run(store.show_now())
        assert shown(world, name) == 7
        cursor.poll_batch(9, timeout_ms=0)
        ledger.execute("BEGIN")
        cursor.commit()
        ledger.execute("COMMIT")
    assert shown(world, name) == 9


def test_a_worker_with_a_database_shows_how_far_it_is(world: World, name: str, tmp_path: Path) -> None:
    topic = world.topic()
    world.send(topic, range(9))

    def handle(record: Any, connection: sqlite3.Connection) -> None:
        connection.execute("CREATE TABLE IF NOT EXISTS effects (number INTEGER)")

    options = Ordered(checkpoint=lambda: sqlite3.connect(tmp_path / "effects.db", timeout=120))
    world.db.worker(name, topic, handle, ordered=options).run_until_empty()
    assert shown(world, name) == 9
    (found,) = [each for each in world.db.run(list_cursors(world.cluster, topic)) if each.name == name]
    assert (found.home, found.owners) == (Home.DATABASE, [])


def test_a_position_in_a_file_is_shown_and_not_reset(world: World, name: str, tmp_path: Path) -> None:
    topic = world.topic()
    world.send(topic, range(5))
    with world.db.cursor(name, topic, checkpoint=tmp_path / "c") as cursor:
        cursor.poll_batch(3)
        cursor.commit()
        found = world.db.run(describe_cursor(world.cluster, name))
        assert (found.home, len(found.owners)) == (Home.FILE, 1)
    assert shown(world, name) == 3
    with pytest.raises(ApiError, match="keeps its position in a file: open it and seek"):
        world.db.run(reset_cursor(world.cluster, name, {0: Position(0)}))
    with pytest.raises(CheckpointRegionMismatch, match="in a file, not in the cluster"):
        world.db.cursor(name, topic)


def test_a_position_that_is_deleted_can_be_begun_anew_over_another_region(
    world: World, name: str, tmp_path: Path
) -> None:
    topic, path = world.topic(), tmp_path / "c"
    world.send(topic, range(5))
    with world.db.cursor(name, topic, checkpoint=path) as cursor:
        cursor.poll_batch(3)
        cursor.commit()
    path.unlink()
    with world.db.cursor(name, topic, checkpoint=path, key_prefix="x"):
        assert shown(world, name) == 0


def test_opening_over_another_topic_by_mistake_leaves_what_the_cluster_knows(
    world: World, name: str, ledger: sqlite3.Connection
) -> None:
    topic, other = world.topic(), world.topic()
    world.db.cursor(name, topic, checkpoint=ledger).close()
    with pytest.raises(CheckpointRegionMismatch):
        world.db.cursor(name, other, checkpoint=ledger)
    assert world.db.run(describe_cursor(world.cluster, name)).topic == topic
    # Begun anew it is another cursor, also to the cluster.
    ledger.execute("DELETE FROM tidemill_cursors")
    with world.db.cursor(name, other, checkpoint=ledger):
        found = world.db.run(describe_cursor(world.cluster, name))
        assert (found.topic, len(found.owners)) == (other, 1)
        ledger.execute("DELETE FROM tidemill_cursors")
        with pytest.raises(CursorInUse):
            world.db.cursor(name, topic, checkpoint=ledger)


def test_a_cursor_in_a_file_can_be_paused(world: World, name: str, tmp_path: Path) -> None:
    topic = world.topic()
    world.send(topic, range(5))
    world.db.cursor(name, topic, checkpoint=tmp_path / "c").close()
    world.db.run(pause_cursor(world.cluster, name, paused=True))
    with world.db.cursor(name, topic, checkpoint=tmp_path / "c", lease_ms=300) as cursor:
        assert cursor.poll_batch(9, timeout_ms=0) == []
        world.db.run(pause_cursor(world.cluster, name, paused=False))
        # The next sign of life tells.
        assert len(cursor.poll_batch(9, timeout_ms=20_000)) == 5
