"""The log and the state of a table on every replica, in virtual time: compaction, snapshots, fail-over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from support.cluster_clients import produce
from support.cluster_story import ClusterStory
from support.cluster_tables import KEYS, SETTINGS, Refused, Row, TableUsers, deletes, upserts
from support.sim_node import START_MS
from support.virtual_loop import run_virtual
from tidemill.errors import ErrorCode, TidemillError
from tidemill.kv.recovery import recover
from tidemill.log.log import PartitionLog
from tidemill.records.columns.build import build_batch_columns
from tidemill.records.record import read_records
from tidemill.replication.partition import Partition
from tidemill.tables.state import bucket as bucket_module
from tidemill.tables.state.bucket import Bucket

UPDATES = 300
#: The updates take some 26,000 bytes; what is left is the active segment and little else.
COMPACTED_BYTES = 8_000


class World:
    """A cluster of three nodes, and a table with compacted logs. ``key`` and ``other`` are of one bucket."""

    def __init__(self, seed: int) -> None:
        self.users = TableUsers(compacted=True)
        self.story = ClusterStory(seed, [self.users], **SETTINGS)
        self.cluster, self.client = self.story.cluster, self.story.client

    async def start(self) -> None:
        await self.cluster.start_all()
        await self.users.prepare(self.story)
        self.key = KEYS[0]
        (self.bucket,) = deletes(self.users.table, [self.key])
        self.other = next(key for key in KEYS[1:] if self.bucket in deletes(self.users.table, [key]))
        self.number = 0

    # --- writing and reading

    async def update(self, key: str, times: int) -> None:
        for _ in range(times):
            self.number += 1
            await self.write(upserts(self.users.table, [{"id": key, "n": self.number}]))
            await asyncio.sleep(0.05)

    async def delete(self, key: str) -> int:
        return await self.write(deletes(self.users.table, [key]))

    async def write(self, changes: dict[int, tuple[Any, Any]]) -> int:
        """Write until it is acknowledged; gives the offset."""
        ((bucket, (keys, values)),) = changes.items()
        batch = build_batch_columns(keys, values, timestamp_ms=START_MS + self.story.loop.now_ms())
        while True:
            with suppress(TidemillError):
                address, _ = await self.client.leader(self.users.topic, bucket)
                code, base = await produce(self.client, address, self.users.topic, bucket, batch)
                if code is ErrorCode.none:
                    return base
            self.client.forget(self.users.topic, bucket)
            await self.client.pause()

    async def look_up(self, key: str) -> Row | None:
        async with asyncio.timeout(60):
            while True:
                with suppress(Refused):
                    return (await self.users.look_up(self.client, key)).rows.get(key)
                await self.client.pause()

    # --- what is where

    def placed(self) -> tuple[int, tuple[int, ...]]:
        """The leader, by a live node's metadata, and the replicas."""
        image = self.cluster.nodes[min(self.cluster.started)].broker.image
        found = image.topics[self.users.topic].partitions[self.bucket]
        return found.leader, found.replicas

    def logs(self) -> dict[int, Partition]:
        return {
            node_id: partition
            for node_id in sorted(self.cluster.started)
            for partition in self.cluster.nodes[node_id].broker.replicas
            if (partition.topic, partition.index) == (self.users.topic, self.bucket)
        }

    def folds(self) -> dict[int, Bucket]:
        found = {}
        for node_id in sorted(self.cluster.started):
            tables = self.cluster.nodes[node_id].broker.tables.loaded
            assert tables is not None
            for each in (*tables.service._buckets.values(), *tables.service._standbys.values()):
                if each.key.bucket == self.bucket:
                    found[node_id] = each
        return found

    def sizes(self) -> dict[int, int]:
        return {node_id: log.size_bytes for node_id, log in self.logs().items()}

    def ends(self) -> tuple[dict[int, int], dict[int, int]]:
        """Where the logs end, and how far the states are."""
        return (
            {node_id: log.log_end_offset for node_id, log in self.logs().items()},
            {node_id: bucket.folded_offset for node_id, bucket in self.folds().items()},
        )

    def is_at_rest(self) -> bool:
        """Whether all three logs end at one offset, and the states of leader and standby are there."""
        logs, folds = self.ends()
        return len(logs) == 3 and len(folds) == 2 and len({*logs.values(), *folds.values()}) == 1

    async def place(self, *order: int) -> None:
        """Have the first of these nodes lead, the second be its standby, and the third fold nothing."""
        partition = {"partition_index": self.bucket, "replicas": list(order)}
        topics = [{"name": self.users.topic, "partitions": [partition]}]
        await self.client.ask_any("AlterPartitionReassignments", {"timeout": 3_000, "topics": topics}, 0)
        await until(lambda: self.placed()[1] == order, self.placed)
        await self.story.elect_preferred()
        await until(lambda: self.placed()[0] == order[0], self.placed)
        await until(lambda: [*self.folds()] == sorted(order[:2]) and self.is_at_rest(), self.ends)


def offsets(log: PartitionLog) -> set[int]:
    """Those of the records that are left."""
    batches = log.read_batches(log.log_start_offset, log.end_offset)
    return {record.offset for batch in batches for record in read_records(batch)}


async def until(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    try:
        async with asyncio.timeout(120):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.5)
    except TimeoutError:
        raise AssertionError(what()) from None


async def update_one_row_for_ever(seed: int) -> None:
    world = World(seed)
    await world.start()
    await world.update(world.key, UPDATES)
    assert len(world.logs()) == 3
    await until(lambda: max(world.sizes().values()) < COMPACTED_BYTES, world.sizes)
    for _ in range(2):
        leader, _ = world.placed()
        await world.cluster.kill(leader, power_loss=True)
        await until(lambda: world.placed()[0] not in (-1, leader), world.placed)  # noqa: B023
        await world.update(world.key, 5)
        assert await world.look_up(world.key) == {"id": world.key, "n": world.number}
        world.cluster.start(leader)
        await world.cluster.wait_started(leader)
        await until(world.is_at_rest, world.ends)
        rows = [bucket._store._rows for bucket in world.folds().values()]  # type: ignore[union-attr]
        assert rows[0] == rows[1]


def test_every_replica_compacts_the_log_of_a_table_whose_row_is_updated_for_ever() -> None:
    run_virtual(lambda: update_one_row_for_ever(1), seed=1)


async def delete_a_row_while_a_node_does_not_fold(seed: int) -> Row | None:
    """The deleted row, as the node says that had it in its state and leads again; None if it does not."""
    world = World(seed)
    await world.start()
    await world.place(1, 2, 3)
    await world.update(world.key, 1)
    await until(world.is_at_rest, world.ends)
    await world.place(3, 1, 2)
    offset = await world.delete(world.key)
    # Each run of the compaction needs something new.
    while offset in offsets(world.logs()[2].local_log):
        await world.update(world.other, 20)
        assert world.number < 2_000, "the tombstone is not removed"
    await world.place(2, 3, 1)
    return await world.look_up(world.key)


def test_state_that_missed_deletions_is_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_virtual(lambda: delete_a_row_while_a_node_does_not_fold(1), seed=1) is None

    def trusting(*args: Any, removed_below: int, **more: Any) -> Any:
        return recover(*args, **more)

    monkeypatch.setattr(bucket_module, "recover", trusting)
    assert run_virtual(lambda: delete_a_row_while_a_node_does_not_fold(1), seed=1) is not None
