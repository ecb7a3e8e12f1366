"""Checkpoints that the cluster keeps: resumed exactly, one owner at a time, never of another region."""

from __future__ import annotations

import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tidemill import IN_TRANSACTION
from tidemill.client.admin.topics import create_topic, delete_topic
from tidemill.client.cursors.admin import reset_cursor
from tidemill.client.cursors.checkpoints.cluster import ask_coordinator
from tidemill.cursors.errors import CheckpointRegionMismatch, CursorFenced, CursorInUse, CursorMoved
from tidemill.cursors.position import Position

World = Any


def offsets(records: list[Any]) -> list[int]:
    return [each.offset for each in records]


def test_a_cursor_goes_on_exactly_where_its_last_commit_ended(world: World, name: str) -> None:
    topic = world.topic()
    world.send(topic, range(20))
    with world.db.cursor(name, topic) as cursor:
        assert offsets(cursor.poll_batch(7)) == list(range(7))
        cursor.commit()
        cursor.poll_batch(5)  # Not committed: comes again.
    with world.db.cursor(name, topic) as cursor:
        assert cursor.positions == {0: Position(7, 0, started=True)}
        assert offsets(cursor.poll_batch(5)) == [7, 8, 9, 10, 11]
        cursor.commit()
    with world.db.cursor(name, topic) as cursor:
        assert offsets(cursor.poll_batch(99)) == list(range(12, 20))


def test_where_it_started_counts_from_the_first_opening_on(world: World, name: str) -> None:
    topic = world.topic()
    world.send(topic, range(3))
    with world.db.cursor(name, topic, start="latest") as cursor:
        assert cursor.positions[0].offset == 3
    world.send(topic, range(3, 5))
    # Nothing was ever committed, and yet nothing is skipped.
    with world.db.cursor(name, topic, start="latest") as cursor:
        assert offsets(cursor.poll_batch(9)) == [3, 4]
        assert cursor.committed == {0: Position(3, 0, started=False)}


def test_whoever_takes_over_fences_the_other(world: World, name: str) -> None:
    topic = world.topic()
    world.send(topic, range(10))
    with world.db.cursor(name, topic) as zombie:
        zombie.poll_batch(4)
        with world.db.cursor(name, topic, take_over=True) as owner:
            assert offsets(owner.poll_batch(2)) == [0, 1]
            owner.commit()
            with pytest.raises(CursorFenced, match=f"cursor '{name}' .*taken over"):
                zombie.commit()
            with pytest.raises(CursorFenced):
                zombie.poll()
            assert owner.committed[0].offset == 2
            owner.poll_batch(2)
            owner.commit()
            assert owner.committed[0].offset == 4


def test_a_cursor_that_is_in_use_is_waited_for(world: World, name: str) -> None:
    topic = world.topic()
    began = time.monotonic()
    first = world.db.cursor(name, topic, lease_ms=600)
    # Its process dies: no more signs of life, and no release.
    store = first._awaited.store
    world.db._opened.thread.run(_cancel(store._signs))
    store._signs = None
    with world.db.cursor(name, topic, lease_ms=600) as second:
        assert time.monotonic() - began >= 0.6
        assert second.positions[0].offset == 0
    first.close()


async def _cancel(task: Any) -> None:
    task.cancel()


def test_an_owner_that_lives_keeps_the_cursor(world: World, name: str) -> None:
    topic = world.topic()
    with world.db.cursor(name, topic, lease_ms=2_000):
        cluster = world.cluster
        before, cluster.timeout_ms = cluster.timeout_ms, 3_000
        try:
            with pytest.raises(CursorInUse, match="is owned by"):
                world.db.cursor(name, topic, lease_ms=2_000)
        finally:
            cluster.timeout_ms = before


def test_another_region_is_refused_with_both(world: World, name: str) -> None:
    topic = world.topic(2)
    with world.db.cursor(name, topic, partitions=[0]):
        pass
    with pytest.raises(CheckpointRegionMismatch) as caught:
        world.db.cursor(name, topic, partitions=[0, 1])
    assert "partitions (0,), not (0, 1)" in caught.value.message
    assert f"cursor '{name}'" in caught.value.where


def test_a_topic_that_was_created_again_is_another_region(world: World, name: str) -> None:
    topic = world.topic()
    world.send(topic, range(5))
    with world.db.cursor(name, topic) as cursor:
        cursor.poll_batch(5)
        cursor.commit()
    world.db.run(delete_topic(world.cluster, topic))
    world.cluster.forget()
    world.db.run(create_topic(world.cluster, topic, partitions=1))
    world.cluster.forget()
    with pytest.raises(CheckpointRegionMismatch, match="topic_id"):
        world.db.cursor(name, topic)


def test_partitions_of_one_name_can_be_shared_out(world: World, name: str) -> None:
    topic = world.topic(2)
    for partition in (0, 1):
        world.send(topic, range(3), partition)
    with (
        world.db.cursor(name, topic, own=[0]) as first,
        world.db.cursor(name, topic, own=[1]) as second,
    ):
        assert [each.partition for each in first.poll_batch(9)] == [0, 0, 0]
        assert [each.partition for each in second.poll_batch(9)] == [1, 1, 1]
        first.commit()
        second.commit()
    with world.db.cursor(name, topic) as whole:
        assert whole.poll_batch(9, timeout_ms=0) == []


def test_a_prefix_and_what_is_finished_above_it_are_kept(world: World, name: str) -> None:
    topic = world.topic()
    world.send(topic, range(10))
    with world.db.cursor(name, topic) as cursor:
        cursor.poll_batch(8)
        cursor.commit({0: 2}, finished={0: [3, 6]})
    with world.db.cursor(name, topic) as cursor:
        assert offsets(cursor.poll_batch(99)) == [2, 4, 5, 7, 8, 9]


def test_new_partitions_are_read_from_their_beginning(world: World, name: str) -> None:
    from tidemill.client.admin.topics import create_partitions

    topic = world.topic()
    with world.db.cursor(name, topic, start="latest") as cursor:
        world.db.run(create_partitions(world.cluster, topic, 2))
        world.send(topic, ["new"], partition=1)
        cursor._awaited._look_again_at = 0
        record = cursor.poll(timeout_ms=20_000)
        assert (record.partition, record.value) == (1, b"new")
        cursor.commit()
    with world.db.cursor(name, topic) as cursor:
        assert cursor.positions[1] == Position(1, 0, started=True)


@pytest.mark.parametrize("kind", ["cluster", "file", "database", "transactions"])
def test_partitions_that_were_added_while_nobody_read_are_read_from_their_beginning(
    world: World, name: str, tmp_path: Path, kind: str
) -> None:
    from tidemill.client.admin.topics import create_partitions

    topic = world.topic()
    world.send(topic, ["old"])
    with closing(sqlite3.connect(tmp_path / "effects.db", isolation_level=None)) as connection:
        checkpoints = {
            "file": tmp_path / "checkpoint",
            "database": connection,
            "transactions": IN_TRANSACTION,
        }
        options = {"start": "latest", "checkpoint": checkpoints.get(kind)}
        world.db.cursor(name, topic, **options).close()
        world.db.run(create_partitions(world.cluster, topic, 2))
        world.send(topic, ["new"], partition=1)
        with world.db.cursor(name, topic, **options) as cursor:
            assert [each.value for each in cursor.poll_batch(9)] == [b"new"]


def test_a_paused_cursor_delivers_nothing_until_it_is_resumed(world: World, name: str) -> None:
    topic = world.topic()
    world.send(topic, range(3))

    def pause(paused: int) -> None:
        body = {"name": name, "paused": paused, "force": False, "partitions": []}
        world.db.run(ask_coordinator(world.cluster, name, "AlterCursor", body))

    with world.db.cursor(name, topic, lease_ms=300) as cursor:
        cursor.poll_batch(1)
        pause(1)
        cursor.commit()
        assert cursor.is_paused
        assert cursor.poll_batch(9, timeout_ms=50) == []
        pause(0)
        # The next sign of life tells.
        assert offsets(cursor.poll_batch(9, timeout_ms=20_000)) == [1, 2]


def test_a_position_that_somebody_set_is_gone_to(world: World, name: str) -> None:
    topic = world.topic()
    world.send(topic, range(9))
    with world.db.cursor(name, topic) as cursor:
        cursor.poll_batch(3)
        cursor.commit()
        # As if a commit of this owner had been rolled back behind its back.
        cursor._awaited._machine.confirm(cursor._awaited._machine.plan_commit())
        cursor.poll_batch(2)
        cursor._awaited._machine.confirm(cursor._awaited._machine.plan_commit())
        cursor.poll_batch(2)
        with pytest.raises(CursorMoved, match="is at offset 3, not at 5"):
            cursor.commit()
        assert offsets(cursor.poll_batch(2)) == [3, 4]
        cursor.commit()


def test_a_cursor_over_more_partitions_than_a_request_may_have_can_be_reset(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = world.topic(3)
    with world.db.cursor(name, topic):
        pass
    # As if there were 501 of them.
    monkeypatch.setattr("tidemill.client.cursors.checkpoints.cluster._PARTITIONS_PER_REQUEST", 2)
    monkeypatch.setattr("tidemill.server.handlers.cursors.positions.CURSOR_PARTITIONS_MAX", 2)
    targets = {partition: Position(partition + 1) for partition in range(3)}
    info = world.db.run(reset_cursor(world.cluster, name, targets))
    assert {each: at.offset for each, at in info.positions.items()} == {0: 1, 1: 2, 2: 3}
