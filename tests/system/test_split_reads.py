"""Sharing out tables and logs through the client, on a node of its own that is killed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidemill
from support.processes import NodeProcess
from support.table_nodes import SOON, new_name
from tidemill.client.cluster import Cluster
from tidemill.client.consuming.splitting import Measured, Piece, measure, split_bucket
from tidemill.client.sync_client import Tidemill
from tidemill.client.sync_table import Table
from tidemill.client.tables.bucket_scanner import BucketScan
from tidemill.errors import ErrorCode

ROWS = 2_000


@pytest.fixture(scope="module")
def table_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("splitting") / "data", **SOON) as running:
        yield running


@pytest.fixture(scope="module")
def db(table_node: NodeProcess) -> Iterator[Tidemill]:
    with tidemill.connect(table_node.bootstrap_servers) as connected:
        yield connected


@pytest.fixture
def table(db: Tidemill) -> Table:
    table = db.create_table(new_name("split"), "id bigint, v string", primary_key="id", buckets=2)
    table.upsert([{"id": number, "v": f"v{number}"} for number in range(ROWS)])
    return table


def bucket_of(table: Table, bucket: int, lease_id: str | None = None) -> BucketScan:
    definition = table.definition
    place = definition.partitions[0]
    return BucketScan(definition.table_id, place.id, place.topic, bucket, lease_id=lease_id)


def pieces_of(node: NodeProcess, scan: BucketScan, **limits: Any) -> list[Piece]:
    async def ask() -> list[Piece]:
        async with Cluster(node.bootstrap_servers) as cluster:
            return await split_bucket(cluster, scan, **limits)

    return asyncio.run(ask())


def rows_of(table: Table, piece: Piece, bucket: int, lease_id: str | None = None) -> list[int]:
    found: list[int] = []
    with table.bucket_scanner(
        bucket, start_key=piece.start_key, end_key=piece.end_key, lease_id=lease_id
    ) as scanner:
        while (batch := scanner.next_batch()) is not None:
            found += batch.column("id").to_pylist()
    return found


def test_every_piece_can_be_scanned_on_its_own(table_node: NodeProcess, table: Table) -> None:
    found: list[int] = []
    for bucket in range(2):
        pieces = pieces_of(table_node, bucket_of(table, bucket), max_rows=150)
        assert pieces[0].start_key is None
        assert pieces[-1].end_key is None
        assert all(a.end_key == b.start_key for a, b in itertools.pairwise(pieces))
        for piece in pieces:
            ids = rows_of(table, piece, bucket)
            assert len(ids) == piece.rows <= 150
            found += ids
    assert sorted(found) == list(range(ROWS))


def test_pieces_of_a_piece_stay_within_it(table_node: NodeProcess, table: Table) -> None:
    scan = bucket_of(table, 0)
    outer = pieces_of(table_node, scan, max_pieces=3, max_rows=200)
    assert len(outer) == 3
    assert outer[-1].end_key is not None
    inner = pieces_of(
        table_node,
        BucketScan(
            scan.table_id,
            scan.partition_id,
            scan.topic,
            0,
            start_key=outer[1].start_key,
            end_key=outer[1].end_key,
        ),
        max_rows=60,
    )
    assert [piece.rows for piece in inner] == [60, 60, 60, 20]
    assert (inner[0].start_key, inner[-1].end_key) == (outer[1].start_key, outer[1].end_key)


def test_a_lease_is_split_the_same_after_the_node_was_killed(table_node: NodeProcess, table: Table) -> None:
    lease = table.lease(duration_ms=600_000).acquire()
    before = pieces_of(table_node, bucket_of(table, 0, lease.lease_id), max_rows=300)
    table.delete(range(ROWS))
    table_node.kill()
    table_node.start()
    assert pieces_of(table_node, bucket_of(table, 0)) == []
    after = pieces_of(table_node, bucket_of(table, 0, lease.lease_id), max_rows=300)
    assert after == before
    assert sum(piece.rows for piece in after) == sum(
        len(rows_of(table, piece, 0, lease.lease_id)) for piece in after
    )


def test_logs_are_measured_together_and_missing_ones_named(table_node: NodeProcess, table: Table) -> None:
    topic = table.definition.partitions[0].topic

    async def ask() -> dict[tuple[str, int], Measured]:
        async with Cluster(table_node.bootstrap_servers) as cluster:
            return await measure(
                cluster,
                {
                    (topic, 0): (0, -1, -1),
                    (topic, 1): (0, -1, 1_000),
                    ("nowhere", 0): (0, -1, -1),
                    (topic, 9): (0, -1, -1),
                },
            )

    found = asyncio.run(ask())
    assert found[topic, 0].error is None
    assert found[topic, 0].size_bytes > 0
    assert found[topic, 0].end_offset + found[topic, 1].end_offset <= ROWS
    for place in (("nowhere", 0), (topic, 9)):
        error = found[place].error
        assert error is not None
        assert error.code == ErrorCode.unknown_topic_or_partition


def test_measuring_waits_for_a_node_that_comes_back(tmp_path: Path) -> None:
    async def ask(node: NodeProcess) -> Measured:
        async with Cluster(node.bootstrap_servers) as cluster:
            await cluster.topic("t", create=True)
            node.kill()
            asking = asyncio.create_task(measure(cluster, {("t", 0): (0, -1, -1)}))
            await asyncio.to_thread(node.start)
            return (await asking)["t", 0]

    with NodeProcess(tmp_path / "data") as node:
        assert asyncio.run(ask(node)) == Measured(0, 0, 0)
