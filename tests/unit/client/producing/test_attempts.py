"""Attempts of a batch, against a node in this process: published as one, once, and never in part."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import tidemill
from support.attempts import delete_keys, write_records, write_rows
from tidemill.client.admin.topics import LATEST, create_topic, list_offsets
from tidemill.client.async_client import AsyncTidemill, connect_async
from tidemill.client.cluster import Cluster
from tidemill.client.consuming.record_reader import RecordReader
from tidemill.client.producing.attempts import Attempt, abort_attempts, keep_job, list_jobs, publish
from tidemill.client.producing.columns import Outgoing
from tidemill.client.tables.table import AsyncTable
from tidemill.client.tables.writer import prepare_changes, prepare_deletes, prepare_upserts
from tidemill.embedded.node import EmbeddedNode
from tidemill.errors import ApiError, ErrorCode, NodeUnavailable, TableError
from tidemill.records.compression import CODEC_NUMBERS

COLUMNS = "id bigint, text string"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedNode]:
    with tidemill.open(auto_create_topics=False) as running:
        yield running


@asynccontextmanager
async def a_table(node: EmbeddedNode, **options: Any) -> AsyncIterator[tuple[AsyncTidemill, AsyncTable]]:
    async with await connect_async(node.bootstrap_servers) as db:
        name = f"test.attempts_{next(_numbers)}"
        chosen: dict[str, Any] = {"primary_key": ["id"], "buckets": 3} | options
        yield db, await db.create_table(name, COLUMNS, **chosen)


def rows(*ids: int, text: str = "x") -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "text": [text] * len(ids)})


def new_job() -> str:
    return f"job-{next(_numbers)}"


async def opened(db: AsyncTidemill, job: str, batch: int = 0, **options: Any) -> Attempt:
    attempt = await Attempt.open(db.cluster, job, batch, **options)
    assert attempt is not None
    return attempt


async def ids(table: AsyncTable) -> list[int]:
    found = await table.scan(columns=["id"]).to_arrow()
    return sorted(found["id"].to_pylist())


async def is_over(cluster: Cluster, job: str) -> None:
    """Wait until nothing of the job is open."""
    async with asyncio.timeout(120):
        while any(info.open_attempts for info in await list_jobs(cluster) if info.job == job):
            continue


async def test_rows_of_all_listed_attempts_become_visible_at_once_and_of_no_other(
    node: EmbeddedNode,
) -> None:
    async with a_table(node) as (db, table):
        job = new_job()
        attempts = [await opened(db, job) for _ in range(3)]
        for number, attempt in enumerate(attempts):
            assert await write_rows(attempt, table, rows(*range(10 * number, 10 * number + 10))) == 10
        assert await ids(table) == []
        assert await publish(db.cluster, job, 0, [each.identity for each in attempts[:2]])
        assert await ids(table) == list(range(20))
        with pytest.raises(ApiError, match=f"this attempt of batch 0 of job '{job}' is over"):
            await write_rows(attempts[2], table, rows(99))


async def test_a_published_batch_is_neither_written_nor_published_again(node: EmbeddedNode) -> None:
    async with a_table(node) as (db, table):
        job = new_job()
        late = await opened(db, job, 4)
        attempt = await opened(db, job, 4)
        await write_rows(attempt, table, rows(1))
        assert await publish(db.cluster, job, 4, [attempt.identity])
        assert await Attempt.open(db.cluster, job, 4) is None
        assert await Attempt.open(db.cluster, job, 3) is None
        assert not await publish(db.cluster, job, 4, [late.identity])
        assert await Attempt.open(db.cluster, job, 5) is not None
        assert await ids(table) == [1]


async def test_a_lost_answer_to_a_publication_is_asked_for_again(
    node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_table(node) as (db, table):
        job = new_job()
        attempt = await opened(db, job)
        await write_rows(attempt, table, rows(1, 2))
        ask, lost = db.cluster.to_coordinator, list[str]()

        async def losing(key: str, name: str, *arguments: Any, **options: Any) -> Any:
            answer = await ask(key, name, *arguments, **options)
            if name == "PublishAttempts" and not lost:
                lost.append(name)
                raise NodeUnavailable("the answer was lost")
            return answer

        monkeypatch.setattr(db.cluster, "to_coordinator", losing)
        assert await publish(db.cluster, job, 0, [attempt.identity])
        assert lost
        assert await ids(table) == [1, 2]


async def test_a_batch_of_an_attempt_that_is_over_is_not_published(node: EmbeddedNode) -> None:
    async with a_table(node) as (db, table):
        job = new_job()
        good, bad = await opened(db, job), await opened(db, job)
        await write_rows(good, table, rows(1))
        await write_rows(bad, table, rows(2))
        await bad.abort()
        with pytest.raises(ApiError, match="attempt"):
            await publish(db.cluster, job, 0, [good.identity, bad.identity])
        assert await ids(table) == []
        assert await publish(db.cluster, job, 0, [good.identity])
        assert await ids(table) == [1]


async def test_all_attempts_of_a_job_can_be_aborted(node: EmbeddedNode) -> None:
    async with a_table(node) as (db, table):
        job = new_job()
        attempts = [await opened(db, job, batch) for batch in (1, 1, 2)]
        for attempt in attempts:
            await write_rows(attempt, table, rows(attempt.batch))
        assert await abort_attempts(db.cluster, job, 1) == 2
        assert await publish(db.cluster, job, 2, [attempts[2].identity])
        assert await ids(table) == [2]


async def test_an_attempt_without_signs_of_life_is_aborted(node: EmbeddedNode) -> None:
    async with a_table(node) as (db, table):
        job = new_job()
        attempt = await opened(db, job, timeout_ms=200)
        await write_rows(attempt, table, rows(1))
        await is_over(db.cluster, job)
        with pytest.raises(ApiError, match="gave no sign of life in time"):
            await write_rows(attempt, table, rows(2))


async def test_jobs_are_listed_with_what_they_published(node: EmbeddedNode) -> None:
    async with a_table(node) as (db, _):
        job = new_job()
        attempt = await opened(db, job, 7)
        await keep_job(db.cluster, attempt.job)
        await keep_job(db.cluster, job)
        (info,) = [each for each in await list_jobs(db.cluster) if each.job == job]
        assert (info.published_batch, info.open_attempts) == (-1, 1)
        assert await publish(db.cluster, job, 7, [attempt.identity])
        (info,) = [each for each in await list_jobs(db.cluster) if each.job == job]
        assert (info.published_batch, info.open_attempts) == (7, 0)
        assert info.published_ms > 0


# --- writing


async def test_writes_that_overlap_keep_their_order(node: EmbeddedNode) -> None:
    async with a_table(node, buckets=2) as (db, table):
        attempt = await opened(db, new_job())
        count = 3_000
        all_ids = pa.array(range(count), pa.int64())
        deleted = pa.array(range(0, count, 2), pa.int64())
        (first,) = prepare_upserts(table.definition, rows(*range(count), text="first"))
        (again,) = prepare_upserts(table.definition, rows(*range(count), text="again"))
        sendings = [
            attempt.send_rows(table, first),
            attempt.send_rows(table, prepare_deletes(table.definition, [all_ids])),
            attempt.send_rows(table, again),
            attempt.send_rows(table, prepare_deletes(table.definition, [deleted])),
        ]
        await asyncio.gather(*sendings)
        assert await publish(db.cluster, attempt.job, 0, [attempt.identity])
        found = await table.scan().to_arrow()
        assert sorted(found["id"].to_pylist()) == list(range(1, count, 2))
        assert set(found["text"].to_pylist()) == {"again"}


async def test_new_partitions_enter_the_transaction_in_one_request(
    node: EmbeddedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_table(node, buckets=4) as (db, table):
        ask, asked = db.cluster.to_coordinator, list[Any]()

        async def counting(key: str, name: str, body: Any, **options: Any) -> Any:
            if name == "AddPartitionsToTxn":
                asked.append(body["v3_and_below_topics"])
            return await ask(key, name, body, **options)

        attempt = await opened(db, new_job())
        monkeypatch.setattr(db.cluster, "to_coordinator", counting)
        for _ in range(2):
            await write_rows(attempt, table, rows(*range(100)))
        assert [[sorted(topic["partitions"]) for topic in topics] for topics in asked] == [[[0, 1, 2, 3]]]


async def test_changes_are_upserts_and_deletions_in_their_order(node: EmbeddedNode) -> None:
    async with a_table(node) as (db, table):
        attempt = await opened(db, new_job())
        keys = pa.table({"id": pa.array([1, 2, 1, 2, 3], pa.int64())})
        deletes = np.array([False, False, True, False, True])
        changes = prepare_changes(table.definition, keys, rows(1, 2, 2), deletes)
        assert [each.rows for each in changes] == [5]
        for prepared in changes:
            await attempt.send_rows(table, prepared)
        assert await publish(db.cluster, attempt.job, 0, [attempt.identity])
        assert await ids(table) == [2]


async def test_an_attempt_can_write_tables_without_keys_and_with_partitions(node: EmbeddedNode) -> None:
    async with a_table(node, primary_key=()) as (db, log):
        parted = await db.create_table(
            f"test.parted_{next(_numbers)}", COLUMNS, primary_key=["id", "text"], partition_by="text"
        )
        attempt = await opened(db, new_job(), codec=CODEC_NUMBERS["zstd"])
        await write_rows(attempt, log, rows(*range(10)))
        await write_rows(attempt, parted, rows(1, text="a"))
        await write_rows(attempt, parted, rows(2, text="b"))
        keys = [pa.array([1], pa.int64()), pa.array(["a"])]
        assert await delete_keys(attempt, parted, keys) == 1
        assert await publish(db.cluster, attempt.job, 0, [attempt.identity])
        assert await ids(parted) == [2]
        places = dict.fromkeys(log.topic_partitions(), 0)
        found = [
            change.row["id"]
            async for batch in log.follow(from_offsets=places, until_now=True)
            for change in batch
        ]
        assert sorted(found) == list(range(10))


async def test_a_row_that_does_not_fit_is_refused_by_number(node: EmbeddedNode) -> None:
    async with a_table(node) as (db, table):
        attempt = await opened(db, new_job())
        with pytest.raises(TableError, match="row 1"):
            await write_rows(attempt, table, pa.table({"id": pa.array([1, None], pa.int64())}))
        await attempt.abort()


async def test_records_do_not_overtake_those_that_wait_for_a_new_partition(node: EmbeddedNode) -> None:
    async with a_table(node) as (db, _):
        topic = f"order-{next(_numbers)}"
        await create_topic(db.cluster, topic, partitions=2)
        attempt = await opened(db, new_job())
        first, second, third, other = (Outgoing(None, pa.array([text])) for text in (b"1", b"2", b"3", b"x"))
        await attempt.send_records(topic, {0: first})
        await asyncio.gather(
            attempt.send_records(topic, {0: second, 1: other}), attempt.send_records(topic, {0: third})
        )
        assert await publish(db.cluster, attempt.job, 0, [attempt.identity])
        reader = RecordReader(db.cluster, {(topic, 0): 0})
        found: list[bytes | None] = []
        async with asyncio.timeout(120):
            while len(found) < 3:
                found += [message.record.value for message in await reader.poll()]
        await reader.close()
        assert found == [b"1", b"2", b"3"]


async def test_records_of_a_topic_are_published_too(node: EmbeddedNode) -> None:
    async with a_table(node) as (db, _):
        topic = f"records-{next(_numbers)}"
        await create_topic(db.cluster, topic, partitions=3)
        attempt = await opened(db, new_job())
        keyed: dict[str, Any] = {
            "partition": 2,
            "keys": [b"k"],
            "timestamps_ms": [5],
            "headers": [[("h", b"1")]],
        }
        assert await write_records(attempt, db.cluster, topic, [b"a", b"b"]) == 2
        assert await write_records(attempt, db.cluster, topic, [b"c"], turn=1) == 1
        assert await write_records(attempt, db.cluster, topic, [None], **keyed) == 1
        assert await publish(db.cluster, attempt.job, 0, [attempt.identity])
        # A marker of the publication is behind the records.
        ends = await list_offsets(db.cluster, {(topic, n): LATEST for n in range(3)}, committed=True)
        assert {place[1]: at.offset for place, at in ends.items()} == {0: 3, 1: 2, 2: 2}
        with pytest.raises(ApiError) as caught:
            await write_records(attempt, db.cluster, "nowhere", [b"a"])
        assert caught.value.code is ErrorCode.unknown_topic_or_partition
