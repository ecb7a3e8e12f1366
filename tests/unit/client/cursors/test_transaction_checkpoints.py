"""Positions in Tidemill's own transactions: what is written and how far was read count together."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tidemill import IN_TRANSACTION
from tidemill.client.admin.groups import delete_group
from tidemill.client.admin.topics import create_partitions
from tidemill.client.cursors.admin import delete_cursor, reset_cursor
from tidemill.client.cursors.checkpoints.cluster import ask_coordinator
from tidemill.cursors.errors import (
    CheckpointCorrupt,
    CheckpointRegionMismatch,
    CursorFenced,
    NoOpenTransaction,
)
from tidemill.cursors.position import Gap, Position, Reason
from tidemill.errors import ApiError, ConfigError
from tidemill.wire.jobs import CURSOR_GROUP_PREFIX

World = Any


class _Oops(Exception):
    """What a handler raises."""


def test_what_an_abort_that_was_cancelled_has_left_open_does_not_count_with_the_next_transaction(
    world: World, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, out = world.topic(), world.topic()
    world.send(topic, range(4))

    async def run() -> None:
        cursor = await world.db._awaited.cursor(name, topic, checkpoint=IN_TRANSACTION)
        transaction = cursor.transaction()
        await transaction.begin()
        await cursor.poll_batch(4)
        await transaction.send(out, b"never")
        await transaction.flush()
        asked = asyncio.Event()

        async def hang(*_: Any, **__: Any) -> None:
            asked.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patched:
            patched.setattr(cursor.store, "_ask_transactions", hang)
            ending = asyncio.ensure_future(transaction.end(commit=False))
            await asked.wait()
            ending.cancel()
            await asyncio.wait([ending])
        async with cursor.transaction() as transaction:
            for record in await cursor.poll_batch(4):
                await transaction.send(out, record.value)
        await cursor.close()

    world.db.run(run())
    assert values(world, out) == [b"0", b"1", b"2", b"3"]


def values(world: World, topic: str) -> list[bytes]:
    """What readers of committed data see."""
    with world.db.cursor(None, topic) as cursor:
        return [each.value for each in cursor.poll_batch(1_000, timeout_ms=500)]


def test_what_is_written_and_the_position_count_together(world: World, name: str) -> None:
    topic, out = world.topic(), world.topic()
    table = world.db.create_table(
        f"copies.{name.replace('-', '_')}", "id bigint, v string", primary_key=["id"]
    )
    world.send(topic, range(10))
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as cursor:
        for _ in range(2):
            with cursor.transaction() as transaction:
                for record in cursor.poll_batch(4):
                    transaction.send(out, record.value, key=b"k", headers=[("h", b"1")])
                    transaction.upsert(table, {"id": record.offset, "v": record.value.decode()})
        with pytest.raises(_Oops), cursor.transaction() as transaction:  # noqa: PT012 - the block is aborted
            assert [each.offset for each in cursor.poll_batch(2)] == [8, 9]
            transaction.send(out, b"never")
            transaction.upsert(table, {"id": 99, "v": "never"})
            transaction.delete(table, [0])
            raise _Oops
        assert cursor.positions == {0: Position(8, 0, started=True)}
        assert [each.offset for each in cursor.poll_batch(9)] == [8, 9]
    assert values(world, out) == [str(number).encode() for number in range(8)]
    assert table.scan().count() == 8
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as cursor:
        with cursor.transaction() as transaction:
            transaction.delete(table, [each.offset - 8 for each in cursor.poll_batch(9)])
        assert table.scan().count() == 6
        assert cursor.positions[0].offset == 10


def test_a_transaction_that_is_opened_again_does_not_send_what_was_aborted(world: World, name: str) -> None:
    topic, out = world.topic(), world.topic()
    world.send(topic, range(2))
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as cursor:
        transaction = cursor.transaction()
        transaction.begin()
        transaction.send(out, b"never")
        transaction.end(commit=False)
        transaction.begin()
        transaction.send(out, b"yes")
        transaction.end(commit=True)
    assert values(world, out) == [b"yes"]


def test_the_first_transaction_that_is_aborted_skips_nothing(world: World, name: str) -> None:
    topic = world.topic()
    world.send(topic, range(3))
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as cursor:
        with pytest.raises(_Oops), cursor.transaction():  # noqa: PT012 - the block is aborted
            assert len(cursor.poll_batch(2)) == 2
            cursor.commit()
            raise _Oops
        assert cursor.committed[0].offset == 0
        assert [each.offset for each in cursor.poll_batch(9)] == [0, 1, 2]


def test_an_aborted_transaction_is_a_gap_with_its_marker(world: World, name: str) -> None:
    topic, out = world.topic(), world.topic()
    world.send(topic, range(2))
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as cursor:
        with pytest.raises(_Oops), cursor.transaction() as transaction:  # noqa: PT012 - the block is aborted
            transaction.send(out, b"never")
            world.db.run(transaction._awaited.flush())
            raise _Oops
        with cursor.transaction() as transaction:
            transaction.send(out, b"yes")
    with world.db.cursor(None, out) as reader:
        assert [each.value for each in reader.poll_batch(9)] == [b"yes"]
        assert reader.poll_batch(9, timeout_ms=0) == []
        assert reader.gaps().ranges == (
            Gap(0, 0, 0, Reason.ABORTED),
            Gap(0, 1, 1, Reason.CONTROL),
            Gap(0, 3, 3, Reason.CONTROL),
        )


def test_records_of_an_open_transaction_are_not_delivered(world: World, name: str) -> None:
    topic, out = world.topic(), world.topic()
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as cursor:
        with cursor.transaction() as transaction:
            transaction.send(out, b"later")
            world.db.run(transaction._awaited.flush())
            assert values(world, out) == []
        assert values(world, out) == [b"later"]


def test_a_zombie_cannot_commit(world: World, name: str) -> None:
    topic, out = world.topic(), world.topic()
    world.send(topic, range(6))
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as zombie:
        transaction = zombie.transaction()
        transaction.begin()
        zombie.poll_batch(3)
        transaction.send(out, b"zombie")
        with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION, take_over=True) as owner:
            with pytest.raises(CursorFenced, match="taken the cursor over"):
                transaction.end(commit=True)
            with owner.transaction() as own:
                for record in owner.poll_batch(3):
                    own.send(out, record.value)
            with pytest.raises(CursorFenced):
                zombie.poll()
    assert values(world, out) == [b"0", b"1", b"2"]


def test_what_cannot_be_written_aborts_and_can_be_tried_again(world: World, name: str) -> None:
    topic, out = world.topic(), world.topic()
    world.send(topic, range(3))
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as cursor:
        transaction = cursor.transaction()
        transaction.begin()
        cursor.poll_batch(2)
        transaction.send(out, b"never")
        transaction.send(out, b"never", partition=7)
        with pytest.raises(ApiError, match="there is no partition 7"):
            transaction.end(commit=True)
        assert cursor.positions == {0: Position(0, 0)}
        with cursor.transaction() as transaction:
            for record in cursor.poll_batch(2):
                transaction.send(out, record.value)
    assert values(world, out) == [b"0", b"1"]


def test_a_commit_needs_a_transaction(world: World, name: str) -> None:
    topic = world.topic()
    world.send(topic, range(3))
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as cursor:
        cursor.poll_batch(1)
        with pytest.raises(NoOpenTransaction, match=r"with cursor\.transaction"):
            cursor.commit()
        with cursor.transaction(), pytest.raises(NoOpenTransaction, match="open already"):
            cursor.transaction().begin()
    with world.db.cursor(None, topic) as cursor, pytest.raises(ConfigError, match="IN_TRANSACTION"):
        cursor.transaction()


def test_it_is_listed_with_its_position_and_a_lost_one_is_an_error(world: World, name: str) -> None:
    topic = world.topic()
    world.send(topic, range(3))
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as cursor:
        with cursor.transaction():
            cursor.poll_batch(2)
        found = world.db.run(ask_coordinator(world.cluster, name, "DescribeCursor", {"name": name}))
        assert found.cursor.partitions[0].offset == 2
    world.db.run(delete_group(world.cluster, CURSOR_GROUP_PREFIX + name))
    with pytest.raises(CheckpointCorrupt, match="position of partition 0 is gone"):
        world.db.cursor(name, topic, checkpoint=IN_TRANSACTION)


def copy(cursor: Any, out: str, count: int) -> list[int]:
    """Copy records to a topic in one transaction; gives their offsets."""
    with cursor.transaction() as transaction:
        batch = cursor.poll_batch(count)
        for record in batch:
            transaction.send(out, record.value)
    return [each.offset for each in batch]


def test_a_reset_counts_against_what_earlier_transactions_have_stored(world: World, name: str) -> None:
    topic, out = world.topic(), world.topic()
    world.send(topic, range(9))
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as cursor:
        assert copy(cursor, out, 4) == [0, 1, 2, 3]
    world.db.run(reset_cursor(world.cluster, name, {0: Position(1)}))
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as cursor:
        assert cursor.committed[0].offset == 1
        with pytest.raises(_Oops), cursor.transaction():  # noqa: PT012 - the block is aborted
            cursor.poll_batch(2)
            raise _Oops
        assert cursor.committed[0].offset == 1
    # Nobody has committed since: it still counts. From then on the transactions do.
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as cursor:
        assert copy(cursor, out, 2) == [1, 2]
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as cursor:
        assert copy(cursor, out, 1) == [3]
    # As Spark hands back how far it has come.
    world.db.run(reset_cursor(world.cluster, name, {0: Position(7, 0, started=True)}))
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as cursor:
        assert copy(cursor, out, 9) == [7, 8]
    assert [int(each) for each in values(world, out)] == [0, 1, 2, 3, 1, 2, 3, 7, 8]


def test_a_reset_counts_against_a_transaction_that_ends_after_it(world: World, name: str) -> None:
    topic, out = world.topic(), world.topic()
    world.send(topic, range(9))
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as zombie:
        with zombie.transaction() as transaction:
            zombie.poll_batch(4)
            transaction.send(out, b"late")
            world.db.run(reset_cursor(world.cluster, name, {0: Position(2)}, force=True))
        with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as owner:
            assert copy(owner, out, 2) == [2, 3]
            with pytest.raises(CursorFenced):
                copy(zombie, out, 1)


def test_a_deleted_cursor_begins_anew_also_over_another_region(world: World, name: str) -> None:
    topic, out = world.topic(), world.topic()
    world.send(topic, range(5))
    for options in ({}, {}, {"partitions": [0]}):
        with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION, **options) as cursor:
            assert copy(cursor, out, 3) == [0, 1, 2]
        world.db.run(delete_cursor(world.cluster, name))


def test_a_cursor_in_transactions_is_not_opened_as_one_of_the_cluster(world: World, name: str) -> None:
    topic = world.topic()
    world.db.cursor(name, topic, checkpoint=IN_TRANSACTION).close()
    with pytest.raises(CheckpointRegionMismatch, match=r"in its transactions, not in the cluster.*delete it"):
        world.db.cursor(name, topic)


def test_a_partition_that_is_added_while_a_transaction_is_open_joins_it(world: World, name: str) -> None:
    topic, out = world.topic(), world.topic()
    world.send(topic, range(3))
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as cursor:
        with cursor.transaction() as transaction:
            for record in cursor.poll_batch(3):
                transaction.send(out, record.value)
            # From here on the node knows of the transaction.
            cursor.commit()
            world.db.run(create_partitions(world.cluster, topic, 2))
            world.send(topic, ["new"], partition=1)
            cursor._awaited._look_again_at = 0
            record = cursor.poll(timeout_ms=20_000)
            assert (record.partition, record.value) == (1, b"new")
            transaction.send(out, record.value)
        shown = world.db.run(ask_coordinator(world.cluster, name, "DescribeCursor", {"name": name}))
        assert [each.offset for each in shown.cursor.partitions] == [3, 1]
    assert values(world, out) == [b"0", b"1", b"2", b"new"]
    with world.db.cursor(name, topic, checkpoint=IN_TRANSACTION) as cursor:
        assert cursor.poll_batch(9, timeout_ms=0) == []
