"""Fetcher and leader service of whole nodes on a virtual loop, without trouble: how soon, and how often."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from support.batches import plain_batch
from support.faulty_storage import FaultyStorage
from support.sim_cluster import TOPIC, TOPIC_ID, ReplicaNode, SimMessages, SimMetadata
from support.virtual_loop import current_loop, run_virtual
from tidemill.cluster.messages import (
    PROTOCOL_VERSION,
    FetchedPartition,
    FetchPartition,
    FetchRequest,
    HeartbeatRequest,
    PartitionId,
    ReplicaStateRequest,
    RequestHeader,
)
from tidemill.errors import DiskFull, StorageError
from tidemill.log.log import PartitionLog
from tidemill.replication import partition as partition_module
from tidemill.replication.fetching import fetcher, leader_service
from tidemill.replication.fetching.leader_service import LeaderService
from tidemill.replication.partition import Partition

A, B, C = 1, 2, 3
Answer = Callable[[bytes], Coroutine[Any, Any, bytes]]


class Cluster:
    """Three nodes; the first leads every partition."""

    def __init__(self, partitions: int = 2) -> None:
        self.loop = current_loop()
        self.loop.busy_seconds_max = 0.01
        self.messages = SimMessages(self.loop)
        self.metadata = SimMetadata(self.loop, (A, B, C), partitions, 2)
        self.nodes = {
            node_id: ReplicaNode(node_id, FaultyStorage(), self.messages, self.metadata)
            for node_id in (A, B, C)
        }

    async def start(self) -> None:
        for node_id, node in self.nodes.items():
            node.node_epoch = self.metadata.register(node_id, clean=True)
            await node.start()
        for index in range(len(self.metadata.records)):
            await self.until(partial(self._leads, index))
        await asyncio.sleep(3)

    def _leads(self, index: int) -> bool:
        partition = self.nodes[A].partition(index)
        return partition is not None and partition.as_leader.has_followers

    def at(self, node_id: int, index: int = 0) -> Partition:
        partition = self.nodes[node_id].partition(index)
        assert partition is not None
        return partition

    def append(self, value: str, index: int = 0) -> None:
        node = self.nodes[A]
        node.process.context.copy().run(self.at(A, index).append, plain_batch(value), 1)

    async def until(self, condition: Callable[[], bool], seconds: float = 60) -> float:
        """Let time pass until the condition holds; returns how much."""
        started = self.loop.time()
        while not condition():
            assert self.loop.time() - started < seconds, "it does not happen"
            await asyncio.sleep(0.005)
        return self.loop.time() - started

    def count(self) -> dict[type, int]:
        """Requests to the leader and the followers from now on, by kind; filled as they come."""
        counts: dict[type, int] = {}

        def counting(answer: Answer, data: bytes) -> Coroutine[Any, Any, bytes]:
            for kind, tag in ((FetchRequest, b"Fetch"), (HeartbeatRequest, b"Heartbeat")):
                if tag in data[:40]:
                    counts[kind] = counts.get(kind, 0) + 1
            if b"ReplicaState" in data[:40]:
                counts[ReplicaStateRequest] = counts.get(ReplicaStateRequest, 0) + 1
            return answer(data)

        for node in self.nodes.values():
            node.answer = partial(counting, node.answer)  # type: ignore[method-assign]
        return counts


def _has_reached(cluster: Cluster, offset: int) -> bool:
    return cluster.at(A).high_watermark == offset


def _is_out_of_sync(cluster: Cluster, node_id: int) -> bool:
    return node_id not in cluster.metadata.records[0].isr


def story(body: Callable[[Cluster], Awaitable[None]], partitions: int = 2) -> None:
    async def main() -> None:
        cluster = Cluster(partitions)
        await cluster.start()
        await body(cluster)

    run_virtual(main, seed=3)


def test_a_waiting_fetch_is_answered_by_an_append_and_everybody_learns_of_the_commit() -> None:
    async def body(cluster: Cluster) -> None:
        cluster.append("a")
        assert await cluster.until(lambda: cluster.at(A).high_watermark == 1) < 0.2
        assert (
            await cluster.until(lambda: cluster.at(B).high_watermark == cluster.at(C).high_watermark == 1)
            < 0.3
        )
        assert cluster.at(A, 1).log_end_offset == 0

    story(body)


def test_idle_followers_ask_about_twice_a_second() -> None:
    async def body(cluster: Cluster) -> None:
        counts = cluster.count()
        await asyncio.sleep(10)
        assert counts[FetchRequest] <= 2 * 2 * 10 * 2, "two followers, two partitions, half a second each"
        assert counts.get(HeartbeatRequest, 0) == counts.get(ReplicaStateRequest, 0) == 0

    story(body)


def test_many_idle_partitions_are_asked_for_less_often() -> None:
    async def body(cluster: Cluster) -> None:
        counts = cluster.count()
        await asyncio.sleep(4)
        assert counts[FetchRequest] <= 20, "two followers, two Fetches of a second each, and not of a half"
        cluster.append("a", 999)
        assert await cluster.until(lambda: cluster.at(C, 999).log_end_offset == 1) < 0.2

    story(body, partitions=1_000)


class _Named:
    """Counts the partitions that followers name in their Fetches to the leader."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        let_in = LeaderService._let_in_one

        def counted(service: LeaderService, *arguments: Any) -> None:
            self.count += 1
            let_in(service, *arguments)

        monkeypatch.setattr(LeaderService, "_let_in_one", counted)


def test_so_many_idle_partitions_that_they_need_several_fetches_are_not_asked_for_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetcher, "_PARTITIONS_PER_FETCH", 450)

    async def body(cluster: Cluster) -> None:
        named = _Named(cluster, monkeypatch)
        await asyncio.sleep(6)
        assert named.count <= 2 * 1_000 * 8, "two followers, each partition once a second, and twice to spare"

    story(body, partitions=1_000)


def test_the_records_of_one_partition_do_not_have_the_idle_ones_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(cluster: Cluster) -> None:
        cluster.append("first", 7)
        await asyncio.sleep(0.2)
        named = _Named(cluster, monkeypatch)
        for number in range(20):
            cluster.append(str(number), 7)
            await asyncio.sleep(0.01)
        assert named.count < 2 * 200

    story(body, partitions=200)


def test_many_appends_share_fetches_reports_and_heartbeats() -> None:
    async def body(cluster: Cluster) -> None:
        counts = cluster.count()
        for number in range(1_000):
            cluster.append(str(number), number % 20)
        await cluster.until(
            lambda: all(
                cluster.at(node, index).high_watermark == 50 for node in (A, B, C) for index in range(20)
            )
        )
        assert counts[FetchRequest] < 100
        assert counts[ReplicaStateRequest] < 100
        assert counts.get(HeartbeatRequest, 0) < 40

    story(body, partitions=20)


def test_a_leader_reads_once_what_both_followers_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = PartitionLog.read

    def counted(log: PartitionLog, offset: int, *rest: Any, **named: Any) -> memoryview:
        reads.append(offset)
        return read(log, offset, *rest, **named)

    async def body(cluster: Cluster) -> None:
        monkeypatch.setattr(PartitionLog, "read", counted)
        for number in range(20):
            cluster.append(str(number))
            await cluster.until(partial(_has_reached, cluster, number + 1))
        assert reads == [*range(20)]
        for node in (B, C):
            assert cluster.at(node).log_end_offset == 20

    story(body, partitions=1)


def test_a_large_batch_is_given_to_followers_as_it_is_on_the_disk_without_reading_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reads: list[int] = []
    monkeypatch.setattr(partition_module, "_LARGE_BATCH_BYTES", 200)

    async def body(cluster: Cluster) -> None:
        read = PartitionLog.read

        def counted(log: PartitionLog, offset: int, *rest: Any, **named: Any) -> memoryview:
            reads.append(offset)
            return read(log, offset, *rest, **named)

        monkeypatch.setattr(PartitionLog, "read", counted)
        cluster.append("small")
        await cluster.until(partial(_has_reached, cluster, 1))
        for number in range(1, 6):
            cluster.append("x" * 300)
            await cluster.until(partial(_has_reached, cluster, number + 1))
        assert reads == [0]
        whole = [
            [bytes(read(cluster.at(node).local_log, at, 1_000, 6, at_least_one=True)) for at in range(1, 6)]
            for node in (A, B, C)
        ]
        assert all(len(each) > 300 for each in whole[0])
        assert whole[0] == whole[1] == whole[2]

    story(body, partitions=1)


def test_a_silent_follower_is_named_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    async def body(cluster: Cluster) -> None:
        caplog.set_level(logging.INFO)
        cluster.messages.cuts = {(A, C), (C, A)}
        for number in range(20):
            cluster.append(str(number))
            await cluster.until(partial(_has_reached, cluster, number + 1))
            await asyncio.sleep(3)
        assert C not in cluster.metadata.records[0].isr
        assert caplog.text.count("no answer to Heartbeats from node 3") == 1
        cluster.messages.cuts.clear()
        await cluster.until(lambda: C in cluster.metadata.records[0].isr)

    story(body)


def test_a_node_that_is_taken_for_dead_gets_no_heartbeats_and_joins_no_in_sync_set() -> None:
    async def body(cluster: Cluster) -> None:
        counts = cluster.count()
        cluster.messages.cuts = {(C, A)}
        cluster.append("missing")
        await cluster.until(lambda: C not in cluster.metadata.records[0].isr)
        cluster.nodes[A].suspected = {C}
        await asyncio.sleep(3)
        before = counts.get(HeartbeatRequest, 0)
        for number in range(5):
            cluster.append(str(number))
            await asyncio.sleep(3)
        cluster.messages.cuts.clear()
        await cluster.until(lambda: cluster.at(C).log_end_offset == 6)
        await asyncio.sleep(3)
        assert counts.get(HeartbeatRequest, 0) - before <= 5, "those of the other follower"
        assert C not in cluster.metadata.records[0].isr
        cluster.nodes[A].suspected = set()
        await cluster.until(lambda: C in cluster.metadata.records[0].isr)

    story(body, partitions=1)


def test_a_node_that_registers_anew_is_in_sync_again_without_new_records() -> None:
    async def body(cluster: Cluster) -> None:
        cluster.append("a")
        await cluster.until(lambda: cluster.at(C).high_watermark == 1)
        await asyncio.sleep(5)
        node = cluster.nodes[C]
        node.node_epoch = cluster.metadata.register(C)
        assert C not in cluster.metadata.records[0].isr
        node.process.context.copy().run(node.fetcher.report_all)
        await cluster.until(lambda: C in cluster.metadata.records[0].isr)

    story(body, partitions=1)


def test_the_end_of_a_partition_that_has_moved_away_and_back_is_not_that_of_its_successor() -> None:
    async def body(cluster: Cluster) -> None:
        cluster.append("a")
        await cluster.until(lambda: cluster.at(C).high_watermark == 1)
        node, before = cluster.nodes[C], cluster.at(C)
        node.replicas.begin_removal(TOPIC, TOPIC_ID, 0)
        node.replicas.remove_partition(TOPIC, TOPIC_ID, 0)
        node.apply(0, cluster.metadata.records[0])
        assert cluster.at(C) is not before
        await cluster.until(lambda: cluster.at(C).log_end_offset == 1)
        # A flush of the files that are gone ends late.
        node.process.context.copy().run(node.fetcher.update, before)
        cluster.append("b")
        await cluster.until(lambda: cluster.at(C).log_end_offset == 2)

    story(body, partitions=1)


def test_a_partition_that_its_follower_cannot_take_holds_nobody_up() -> None:
    async def body(cluster: Cluster) -> None:
        cluster.at(B, 0).local_log.refusal = DiskFull("no room")
        for index in (0, 1):
            cluster.append("a", index)
        await cluster.until(lambda: cluster.at(B, 1).high_watermark == 1)
        assert cluster.at(B, 0).log_end_offset == 0
        await cluster.until(lambda: B not in cluster.metadata.records[0].isr)
        await cluster.until(lambda: cluster.at(A, 0).high_watermark == 1)
        cluster.at(B, 0).local_log.refusal = None
        await cluster.until(lambda: B in cluster.metadata.records[0].isr)

    story(body)


def test_a_follower_that_comes_back_is_in_sync_again() -> None:
    async def body(cluster: Cluster) -> None:
        cluster.messages.cuts |= {(B, A), (A, B)}
        for number in range(50):
            cluster.append(str(number))
        await cluster.until(lambda: B not in cluster.metadata.records[0].isr)
        await cluster.until(lambda: cluster.at(A).high_watermark == 50)
        cluster.messages.cuts.clear()
        await cluster.until(lambda: B in cluster.metadata.records[0].isr)
        assert cluster.at(B).log_end_offset == 50

    story(body)


def test_a_follower_that_is_behind_does_not_get_the_small_pieces_that_another_one_got() -> None:
    async def body(cluster: Cluster) -> None:
        cluster.messages.cuts |= {(B, A), (A, B)}
        cluster.append("0")
        await cluster.until(lambda: B not in cluster.metadata.records[0].isr)
        for number in range(1, 200):
            cluster.append(str(number))
            await cluster.until(partial(_has_reached, cluster, number + 1))
        counts = cluster.count()
        cluster.messages.cuts.clear()
        await cluster.until(lambda: cluster.at(B).log_end_offset == 200)
        assert counts[FetchRequest] < 50

    story(body, partitions=1)


def test_a_follower_that_lags_leaves_after_the_time_of_the_setting() -> None:
    async def body(cluster: Cluster) -> None:
        for node_id in (B, C):
            cluster.messages.cuts |= {(A, node_id), (node_id, A)}
            cluster.append("missing")
            waited = await cluster.until(partial(_is_out_of_sync, cluster, node_id))
            assert (waited < 5) == (node_id == C)
            cluster.messages.cuts.clear()
            await cluster.until(lambda: len(cluster.metadata.records[0].isr) == 3)
            cluster.nodes[A].service.replica_lag_ms = 2_000

    story(body, partitions=1)


@pytest.mark.parametrize("trouble", ["hung", "full", "writes find no space", "failed"])
def test_a_disk_that_hangs_is_full_or_has_failed_is_reported_as_unfit(trouble: str) -> None:
    async def body(cluster: Cluster) -> None:
        node, partition = cluster.nodes[A], cluster.at(A)
        if trouble == "hung":
            partition.flush_started_s = cluster.loop.time()
        elif trouble == "full":
            node.replicas.refuse_appends(DiskFull("no room"))
        elif trouble == "writes find no space":
            node.disk_is_full = True
        else:
            partition.flush_failed(StorageError("gone"))
        waited = await cluster.until(lambda: bool(node.unfit))
        assert (waited < 1) == (trouble == "failed")
        await cluster.until(lambda: cluster.metadata.records[0].leader in (B, C))

    story(body)


def test_an_answer_has_room_for_so_many_bytes_and_for_one_batch_in_any_case(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(leader_service, "_ANSWER_BYTES", 400)

    async def body(cluster: Cluster) -> None:
        for index in range(4):
            cluster.append("x" * 100, index)
        cluster.append("y" * 450, 4)
        whole = await sizes(cluster, (0, 1, 2, 3))
        assert sum(whole) <= 400
        assert [size > 0 for size in whole] == [True, True, False, False]
        assert (await sizes(cluster, (4,)))[0] > 400

    story(body, partitions=5)


async def sizes(cluster: Cluster, indexes: tuple[int, ...]) -> list[int]:
    """Bytes of records of each partition, in one answer."""
    node = cluster.nodes[A]
    epochs = [cluster.at(A, index).leader_epoch for index in indexes]
    wanted = [
        FetchPartition(PartitionId(TOPIC_ID, index), 0, 1 << 20, epoch, -1, -1)
        for index, epoch in zip(indexes, epochs, strict=True)
    ]
    header = RequestHeader(PROTOCOL_VERSION, 1, C, 1_000, cluster.nodes[C].node_epoch)
    answer = await node.process.run(node.service.fetch(FetchRequest(header, wanted)))
    found: dict[int, FetchedPartition] = {each.partition.index: each for each in answer.partitions}
    return [len(found[index].records) for index in indexes]
