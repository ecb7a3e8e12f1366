"""Attempts over a node that is killed: while they write, while they are published, and in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.attempts import write_rows
from support.processes import NodeProcess
from support.table_nodes import new_name
from tidemill.client.async_client import AsyncTidemill, connect_async
from tidemill.client.producing.attempts import Attempt, publish
from tidemill.client.tables.table import AsyncTable

COLUMNS = "id bigint, text string"
ROUNDS, ROWS = 12, 4_000


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path / "data") as running:
        yield running


@asynccontextmanager
async def a_log(node: NodeProcess) -> AsyncIterator[tuple[AsyncTidemill, AsyncTable]]:
    async with await connect_async(node.bootstrap_servers) as db:
        yield db, await db.create_table(new_name("crash"), COLUMNS, buckets=2)


async def restart(node: NodeProcess) -> None:
    await asyncio.to_thread(node.kill)
    await asyncio.to_thread(node.start)


def rows(first: int) -> pa.Table:
    ids = range(first, first + ROWS)
    return pa.table({"id": pa.array(ids, pa.int64()), "text": [f"row {n} of some length" for n in ids]})


async def logged(table: AsyncTable) -> list[int]:
    places = dict.fromkeys(table.topic_partitions(), 0)
    found: list[int] = []
    async for batch in table.follow(from_offsets=places, until_now=True):
        found += [change.row["id"] for change in batch]
    return sorted(found)


async def test_rows_are_written_once_over_a_node_that_is_killed_under_them(node: NodeProcess) -> None:
    async with a_log(node) as (db, table):
        attempt = await Attempt.open(db.cluster, "job", 0)
        assert attempt is not None
        for number in range(ROUNDS):
            writing = asyncio.create_task(write_rows(attempt, table, rows(number * ROWS)))
            if number % 4 == 1:
                # The write is under way, or just over: both must do.
                await asyncio.sleep(0)
                await restart(node)
            assert await writing == ROWS
        assert await logged(table) == []
        assert await publish(db.cluster, "job", 0, [attempt.identity])
        assert await logged(table) == list(range(ROUNDS * ROWS))


async def test_a_publication_is_made_once_over_a_node_that_is_killed_under_it(node: NodeProcess) -> None:
    async with a_log(node) as (db, table):
        for batch in range(4):
            attempts = [await Attempt.open(db.cluster, "job", batch) for _ in range(3)]
            for number, attempt in enumerate(attempts):
                assert attempt is not None
                await write_rows(attempt, table, rows((3 * batch + number) * ROWS))
            identities = [attempt.identity for attempt in attempts if attempt is not None]
            publishing: asyncio.Task[Any] = asyncio.create_task(publish(db.cluster, "job", batch, identities))
            # The request is sent before the node is killed, some turns of the loop later each time.
            for _ in range(2 * batch):
                await asyncio.sleep(0)
            await restart(node)
            await publishing
            assert await logged(table) == list(range(3 * (batch + 1) * ROWS))
            assert await Attempt.open(db.cluster, "job", batch) is None
            assert not await publish(db.cluster, "job", batch, identities)


async def test_what_a_dead_process_left_open_is_undone_by_the_next_publication(node: NodeProcess) -> None:
    async with a_log(node) as (db, table):
        for _ in range(2):
            left = await Attempt.open(db.cluster, "job", 0)
            assert left is not None
            await write_rows(left, table, rows(0))
        await restart(node)
        attempt = await Attempt.open(db.cluster, "job", 0)
        assert attempt is not None
        await write_rows(attempt, table, rows(ROWS))
        assert await publish(db.cluster, "job", 0, [attempt.identity])
        assert await logged(table) == list(range(ROWS, 2 * ROWS))
