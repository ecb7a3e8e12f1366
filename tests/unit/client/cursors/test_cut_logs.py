"""A log that was cut and has grown again: a cursor that has read what was cut off says so.

Two nodes have the topic under the same id, as before and after a leader was lost with records that nobody
else had. In the second log other records are at the offsets that were read in the first.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from support.batches import make_batch
from tidemill import IN_TRANSACTION
from tidemill.client.async_client import AsyncTidemill, connect_async
from tidemill.client.cursors.admin import reset_cursor
from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.control.commands import CreateTopic
from tidemill.cursors.errors import CheckpointDiverged
from tidemill.cursors.position import Position
from tidemill.server.node import Node
from tidemill.spark.reading.histories import epochs_at

SAID = r"t-0 was cut below.*stored: offset 4, leader epoch 0; expected: leader epoch 0 up to offset 2"


@asynccontextmanager
async def serving(data_dir: Path, topic_id: UUID, *batches: tuple[int, str]) -> AsyncIterator[AsyncTidemill]:
    """A node whose topic ``t`` has these batches, of a leader epoch each, and a record for each letter."""
    node = Node(Settings(data_dir=data_dir, listen=Address("127.0.0.1", 0), http=None))
    await node.start()
    try:
        broker = node.broker
        await broker.controller.submit(CreateTopic(name="t", topic_id=topic_id, partitions=1, replication=1))
        partition = broker.find.partition(broker.find.topic("t"), 0)
        for epoch, letters in batches:
            partition.local_log.append(*make_batch(*letters), epoch, 1)
        broker.flusher.request(partition)
        await broker.flusher.drain([partition])
        async with await connect_async(str(node.address)) as db:
            yield db
    finally:
        await node.stop()


@pytest.mark.parametrize("kind", ["file", "database"])
async def test_a_checkpoint_of_the_callers_is_of_another_log(tmp_path: Path, kind: str) -> None:
    topic_id = uuid4()
    with closing(sqlite3.connect(tmp_path / "effects.db")) as connection:
        checkpoint: Any = tmp_path / "checkpoint" if kind == "file" else connection
        async with serving(tmp_path / "before", topic_id, (0, "abcd")) as db:
            cursor = await db.cursor("c", "t", checkpoint=checkpoint)
            assert len(await cursor.poll_batch(9)) == 4
            connection.execute("BEGIN")
            await cursor.commit()
            connection.commit()
            await cursor.close()
        async with serving(tmp_path / "after", topic_id, (0, "ab"), (1, "wxyz")) as db:
            with pytest.raises(CheckpointDiverged, match=SAID):
                await db.cursor("c", "t", checkpoint=checkpoint)
            await _go_on(db, checkpoint)


@pytest.mark.parametrize("checkpoint", [None, IN_TRANSACTION])
async def test_a_checkpoint_of_the_clusters_is_of_another_log(tmp_path: Path, checkpoint: Any) -> None:
    async with serving(tmp_path, uuid4(), (0, "ab"), (1, "wxyz")) as db:
        cursor = await db.cursor("c", "t", checkpoint=checkpoint)
        await cursor.close()
        # As it was stored while the first log was there.
        await reset_cursor(db.cluster, "c", {0: Position(4, 0, started=True)})
        with pytest.raises(CheckpointDiverged, match=SAID):
            await db.cursor("c", "t", checkpoint=checkpoint)
        await _go_on(db, checkpoint)


async def _go_on(db: AsyncTidemill, checkpoint: Any) -> None:
    """Go on at the beginning of the log that there is now, for good."""
    cursor = await db.cursor("c", "t", checkpoint=checkpoint, if_lost="earliest")
    await cursor.close()
    cursor = await db.cursor("c", "t", checkpoint=checkpoint)
    assert [each.offset for each in await cursor.poll_batch(9)] == list(range(6))
    await cursor.close()


async def test_the_leader_epoch_of_an_offset_is_found(tmp_path: Path) -> None:
    async with serving(tmp_path, uuid4(), (0, "ab"), (1, "wxyz")) as db:
        # As after the election of one more leader, which has written nothing.
        leading = {("t", 0): 2}
        found = [await epochs_at(db.cluster, {("t", 0): offset}, leading) for offset in range(1, 7)]
        assert [each["t", 0] for each in found] == [0, 0, 1, 1, 1, 1]


async def test_a_cursor_that_reads_while_the_log_is_cut_is_told_with_its_next_poll(tmp_path: Path) -> None:
    async with serving(tmp_path, uuid4(), (0, "ab"), (1, "wxyz")) as db:
        cursor = await db.cursor(None, "t")
        cursor._machine.seek(0, Position(4, 0, started=True))
        with pytest.raises(CheckpointDiverged, match=SAID):
            await cursor.poll()
        # What to do is the caller's to decide.
        await cursor.seek(2)
        assert [each.offset for each in await cursor.poll_batch(9)] == [2, 3, 4, 5]
        await cursor.close()
