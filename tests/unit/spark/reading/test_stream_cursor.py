"""A stream's cursor, without Spark: where the query begins, and what is handed back with each batch."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import tidemill
from tidemill.client.admin.topics import create_partitions, create_topic
from tidemill.client.cluster import Cluster
from tidemill.client.cursors.admin import describe_cursor, pause_cursor
from tidemill.client.cursors.checkpoints.transaction import TransactionStore
from tidemill.client.producing.producer import Producer
from tidemill.client.sync_client import Tidemill
from tidemill.cursors.position import Position
from tidemill.records.record import Record
from tidemill.spark.reading.stream_cursor import StreamCursor


@pytest.fixture(scope="module")
def db() -> Iterator[Tidemill]:
    with tidemill.open() as node:
        yield node


def cluster_of(db: Tidemill) -> Cluster:
    return db._awaited.cluster


def fill(db: Tidemill, topic: str, partitions: int, count: int = 9) -> None:
    cluster = cluster_of(db)

    async def work() -> None:
        await create_topic(cluster, topic, partitions=partitions)
        async with Producer(cluster) as producer:
            for number in range(count):
                for partition in range(partitions):
                    await producer.send(topic, Record(None, b"%d" % number, 1_000), partition)

    db.run(work())


def stream(db: Tidemill, name: str) -> StreamCursor:
    link: Any = SimpleNamespace(cluster=cluster_of(db), run=db.run)
    return StreamCursor(link, name)


def positions(db: Tidemill, name: str) -> dict[int, Position]:
    return db.run(describe_cursor(cluster_of(db), name)).positions


def test_partitions_that_were_added_are_handed_back_too(db: Tidemill) -> None:
    fill(db, "grown", 1)
    db.cursor("grown", "grown").close()
    db.run(create_partitions(cluster_of(db), "grown", 2))
    query = stream(db, "grown")
    query.move({("grown", 0): 4, ("grown", 1): 0}, {("grown", 0): 0})
    query.move({("grown", 0): 7, ("grown", 1): 0}, {("grown", 0): 0})
    assert positions(db, "grown") == {0: Position(7, 0, started=True), 1: Position(0, -1, started=True)}
    # A cursor goes on from there, without waiting for anybody.
    with db.cursor("grown", "grown") as cursor:
        assert [each.offset for each in cursor.poll_batch(9)] == [7, 8]


def test_partitions_that_are_not_the_cursors_are_left_out(
    db: Tidemill, caplog: pytest.LogCaptureFixture
) -> None:
    fill(db, "some", 2)
    db.cursor("some", "some", partitions=[1]).close()
    with caplog.at_level(logging.WARNING):
        stream(db, "some").move({("some", 0): 3, ("some", 1): 5}, {("some", 1): 0})
    assert caplog.records == []
    assert positions(db, "some") == {1: Position(5, 0, started=True)}


def test_what_is_finished_above_the_position_stays_so(db: Tidemill) -> None:
    fill(db, "ahead", 1)
    with db.cursor("ahead", "ahead") as cursor:
        cursor.poll_batch(9)
        cursor.commit({0: 1}, finished={0: [2, 5]})
    query = stream(db, "ahead")
    assert db.run(query.begin([("ahead", 0)], 0)) == ({("ahead", 0): 1}, {("ahead", 0): 0})
    query.move({("ahead", 0): 4}, {})
    with db.cursor("ahead", "ahead") as cursor:
        assert [each.offset for each in cursor.poll_batch(9)] == [4, 6, 7, 8]


def test_a_query_begins_where_the_transactions_of_a_cursor_have_ended(
    db: Tidemill, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(db, "exact", 1)
    with db.cursor("exact", "exact", checkpoint=tidemill.IN_TRANSACTION) as cursor:
        with cursor.transaction():
            cursor.poll_batch(2)

        async def unreachable(self: TransactionStore, positions: object) -> None:
            """The coordinator of cursors is not told."""

        with monkeypatch.context() as patched:
            patched.setattr(TransactionStore, "show", unreachable)
            with cursor.transaction():
                cursor.poll_batch(3)
    assert positions(db, "exact")[0].offset == 2
    query = stream(db, "exact")
    assert db.run(query.begin([("exact", 0)], 0)) == ({("exact", 0): 5}, {("exact", 0): 0})
    query.move({("exact", 0): 8}, {})
    with db.cursor("exact", "exact", checkpoint=tidemill.IN_TRANSACTION) as cursor:
        assert [each.offset for each in cursor.poll_batch(9)] == [8]


def test_a_cursor_that_cannot_be_moved_is_logged_and_moved_with_the_next_batch(
    db: Tidemill, caplog: pytest.LogCaptureFixture
) -> None:
    fill(db, "busy", 1)
    query = stream(db, "busy")
    with db.cursor("busy", "busy"), caplog.at_level(logging.WARNING):
        query.move({("busy", 0): 4}, {("busy", 0): 0})
    assert "is not handed to cursor 'busy'" in caplog.text
    db.run(pause_cursor(cluster_of(db), "busy", paused=False))
    query.move({("busy", 0): 4}, {("busy", 0): 0})
    assert positions(db, "busy") == {0: Position(4, 0, started=True)}
