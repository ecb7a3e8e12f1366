"""Publications on a real node: all of a batch or nothing is seen, also when the node dies in the middle."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition

from support.attempts import write_records, write_rows
from support.dying import POINTS
from support.processes import NodeProcess
from tidemill.client.admin.topics import create_topic
from tidemill.client.async_client import AsyncTidemill, connect_async
from tidemill.client.producing.attempts import Attempt, list_jobs, publish
from tidemill.client.tables.table import AsyncTable

BUCKETS = 2
KEYS = 40
JOB = "the job"
TOPIC = "lines"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("publications") / "data") as running:
        yield running


def rows(keys: range, batch: int) -> pa.Table:
    return pa.table({"id": pa.array(keys, pa.int64()), "batch": pa.array([batch] * len(keys), pa.int64())})


async def write_batch(
    db: AsyncTidemill, table: AsyncTable, batch: int, *, job: str = JOB, tasks: int = 4, topic: str | None
) -> list[Attempt]:
    """Attempts that have written every key of the table once, and one that has failed."""
    attempts = []
    for task in range(tasks + 1):
        attempt = await Attempt.open(db.cluster, job, batch)
        assert attempt is not None
        mine = range(KEYS) if task == tasks else range(task * KEYS // tasks, (task + 1) * KEYS // tasks)
        await write_rows(attempt, table, rows(mine, -1 if task == tasks else batch))
        if topic is not None:
            word = "failed" if task == tasks else f"{batch}/{task}"
            await write_records(
                attempt, db.cluster, topic, pa.array([word.encode()], pa.binary()), partition=0
            )
        attempts.append(attempt)
    return attempts[:-1]


async def seen(table: AsyncTable) -> set[int]:
    """The batches that the rows of the table are of."""
    found = await table.scan().to_arrow()
    assert found.num_rows in (0, KEYS)
    return set(found["batch"].to_pylist())


def lines(node: NodeProcess) -> list[str]:
    """What a consumer of committed records finds in the topic."""
    consumer = Consumer(
        {
            "bootstrap.servers": node.bootstrap_servers,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "auto.offset.reset": "earliest",
        }
    )
    found: list[str] = []
    try:
        consumer.assign([TopicPartition(TOPIC, 0, 0)])
        while True:
            message = consumer.poll(30.0)
            assert message is not None, "the end of the partition never came"
            if message.error() is not None:
                return found
            found.append(message.value().decode())
    finally:
        consumer.close()


@pytest.mark.parametrize("point", POINTS)
def test_a_node_that_dies_while_it_publishes_has_published_all_or_nothing(tmp_path: Path, point: str) -> None:
    node = NodeProcess(tmp_path / "data")
    node.die_at = point
    # The first publication is the one that is cut short; the batch before it is written plainly.
    node.start()
    try:
        asyncio.run(_cut_short(node))
        assert Counter(lines(node)) == Counter(f"1/{task}" for task in range(4))
    finally:
        node.stop()


async def _cut_short(node: NodeProcess) -> None:
    async with await connect_async(node.bootstrap_servers) as db:
        table = await db.create_table("test.t", "id bigint, batch bigint", primary_key="id", buckets=BUCKETS)
        await create_topic(db.cluster, TOPIC, partitions=1)
        await table.upsert(rows(range(KEYS), 0))
        attempts = await write_batch(db, table, 1, topic=TOPIC)
        assert await seen(table) == {0}
        publishing = asyncio.create_task(
            publish(db.cluster, JOB, 1, [attempt.identity for attempt in attempts])
        )
        await asyncio.to_thread(node.wait_for_death)
        await asyncio.to_thread(node.start)
        # Nobody has asked again for sure, or it was answered: in any case all of it or nothing.
        assert await seen(table) in ({0}, {1})
        assert await asyncio.to_thread(lambda: len(lines(node))) in (0, 4)
        assert await publishing
        assert await seen(table) == {1}
        assert await Attempt.open(db.cluster, JOB, 1) is None
        assert not await publish(db.cluster, JOB, 1, ())
        (job,) = await list_jobs(db.cluster)
        assert (job.job, job.published_batch, job.open_attempts) == (JOB, 1, 0)


async def test_scans_see_every_batch_whole_while_it_is_published(node: NodeProcess) -> None:
    batches = 25
    async with (
        await connect_async(node.bootstrap_servers) as db,
        await connect_async(node.bootstrap_servers) as other,
    ):
        table = await db.create_table("test.moments", "id bigint, batch bigint", primary_key="id", buckets=6)
        reading = await other.table("test.moments")
        found: list[set[int]] = []
        done = asyncio.Event()

        async def read() -> None:
            while not done.is_set():
                found.append(await seen(reading))

        readers = [asyncio.create_task(read()) for _ in range(2)]
        for batch in range(batches):
            attempts = await write_batch(db, table, batch, job="moments", topic=None)
            assert await publish(db.cluster, "moments", batch, [each.identity for each in attempts])
        done.set()
        await asyncio.gather(*readers)
    assert {len(each) for each in found} <= {0, 1}, "a scan has seen parts of two batches"
    newest = [max(each, default=-1) for each in found]
    assert len(set(newest)) > batches // 3, "the readers were there while it happened"


async def test_leased_snapshots_hold_every_batch_whole(node: NodeProcess) -> None:
    async with await connect_async(node.bootstrap_servers) as db:
        table = await db.create_table("test.leased", "id bigint, batch bigint", primary_key="id", buckets=4)
        done = asyncio.Event()
        found: list[set[int]] = []

        async def lease() -> None:
            while not done.is_set():
                async with table.lease(duration_ms=60_000, fresh=True) as held:
                    scanned = await table.scan(lease=held).to_arrow()
                    found.append(set(scanned["batch"].to_pylist()))

        reader = asyncio.create_task(lease())
        for batch in range(10):
            attempts = await write_batch(db, table, batch, job="leased", topic=None)
            assert await publish(db.cluster, "leased", batch, [each.identity for each in attempts])
        done.set()
        await reader
    assert found
    assert {len(each) for each in found} <= {0, 1}


async def test_a_transaction_larger_than_what_writers_may_be_ahead_neither_waits_nor_takes_memory(
    node: NodeProcess,
) -> None:
    count, step = 300_000, 50_000
    async with await connect_async(node.bootstrap_servers) as db:
        table = await db.create_table("test.large", "id bigint, batch bigint", primary_key="id", buckets=1)
        await table.upsert(rows(range(10), 0))
        attempt = await Attempt.open(db.cluster, "large", 0)
        assert attempt is not None
        before = node.resident_bytes()
        async with asyncio.timeout(120):
            for first in range(0, count, step):
                await write_rows(attempt, table, rows(range(first, first + step), 1))
        assert (await table.scan(columns=["id"]).to_arrow()).num_rows == 10
        assert await publish(db.cluster, "large", 0, [attempt.identity])
        assert (await table.scan(columns=["id"]).to_arrow()).num_rows == count
        grown: Any = node.resident_bytes() - before
    assert grown < 256 * 1024 * 1024, f"{grown >> 20} MiB more"


def command_line(node: NodeProcess, *arguments: str) -> str:
    command = [sys.executable, "-m", "tidemill.cli", "--server", node.bootstrap_servers, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_jobs_are_shown_and_their_attempts_aborted_on_the_command_line(node: NodeProcess) -> None:
    async with await connect_async(node.bootstrap_servers) as db:
        table = await db.create_table("test.shown", "id bigint, batch bigint", primary_key="id", buckets=1)
        (left,) = await write_batch(db, table, 7, job="shown", tasks=1, topic=None)
        shown = json.loads(await asyncio.to_thread(command_line, node, "--format", "json", "txn", "jobs"))
        (job,) = (each for each in shown if each["job"] == "shown")
        assert (job["published_batch"], job["open_attempts"]) == (-1, 2)
        assert "OPEN ATTEMPTS" in await asyncio.to_thread(command_line, node, "txn", "jobs")
        said = await asyncio.to_thread(command_line, node, "txn", "abort", left.identity.transactional_id)
        assert "is aborted in 1 partitions" in said
        (info,) = (each for each in await list_jobs(db.cluster) if each.job == "shown")
        assert info.open_attempts == 1
