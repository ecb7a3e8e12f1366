"""Scripted days of three whole nodes, in virtual time, each with a safeguard and without it.

- An unclean election takes the replica with the highest (last epoch, end), and loses no more than it must.
- A replica whose files are missing is registered as lost, so it cannot be elected.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence

import pytest

from support.faulty_storage import FaultyStorage
from support.product_cluster import ProductCluster
from support.virtual_loop import run_virtual
from tidemill.control.records import PartitionImage
from tidemill.errors import ErrorCode
from tidemill.records.record import Record, build_batch, read_records
from tidemill.replication.replicas import PartitionKey, Replicas, partition_directory
from tidemill.server.cluster.replica_ends import Ends
from tidemill.server.handlers.cluster import elections

_UNCLEAN = 1
#: After that the session of a node that was killed is over.
_OVER_S = 12.0


async def produce(cluster: ProductCluster, values: Sequence[str], *, acks: int = -1) -> None:
    """Write a batch for each value, at the leader that all nodes agree on."""
    await cluster.until(lambda: cluster.leader("t") != -1)
    for value in values:
        records = build_batch([Record(None, value.encode(), 0)])
        data = {"name": "t", "partition_data": [{"index": 0, "records": records}]}
        body = {"transactional_id": None, "acks": acks, "timeout": 30_000, "topic_data": [data]}
        answer = await cluster.ask(cluster.leader("t"), "Produce", 9, **body)
        assert answer.responses[0].partition_responses[0].error_code is ErrorCode.none


def placed(cluster: ProductCluster) -> PartitionImage:
    return cluster.broker(cluster.some_id).image.topics["t"].partitions[0]


def values(cluster: ProductCluster) -> list[str]:
    """The records of the leader."""
    log = cluster.led("t").local_log
    return [
        (record.value or b"").decode()
        for batch in log.read_batches(log.log_start_offset, log.end_offset)
        for record in read_records(batch)
    ]


async def kill(cluster: ProductCluster, node_id: int) -> None:
    """The process ends, and then its session."""
    await cluster.kill(node_id)
    await asyncio.sleep(_OVER_S)


# --- unclean elections


async def what_an_unclean_election_leaves() -> list[str]:
    """One replica has more records, of an old epoch, and the other has newer ones that were committed.

    The third one had everything, and is gone.
    """
    async with ProductCluster(3) as cluster:
        await cluster.create("t", partitions=1)
        await cluster.until(lambda: cluster.leader("t") != -1)
        old, lacking, complete = placed(cluster).replicas
        await produce(cluster, ["all have it"])
        for other in (lacking, complete):
            cluster.network.cut(f"n{old}", f"n{other}")
            cluster.network.cut(f"n{other}", f"n{old}")
        await produce(cluster, [f"never committed {number}" for number in range(5)], acks=1)
        await kill(cluster, old)
        cluster.network.heal()
        await produce(cluster, ["committed"])
        await kill(cluster, lacking)
        image = _copied(cluster, lacking)
        await cluster.start(lacking)
        await cluster.until(lambda: {*placed(cluster).isr} == {lacking, complete})
        await produce(cluster, ["committed last"])
        await kill(cluster, lacking)
        await kill(cluster, complete)
        # Restored from an old image, which an operator accepts: it is not known to have everything.
        cluster.disks[lacking] = image
        await cluster.start(lacking, replace_directory=True)
        await cluster.start(old)
        assert placed(cluster).leader == -1
        asked = [{"topic": "t", "partitions": [0]}]
        body = {"topic_partitions": asked, "election_type": _UNCLEAN, "timeout": 30_000}
        answer = await cluster.ask(old, "ElectLeaders", 2, **body)
        assert answer.replica_election_results[0].partition_result[0].error_code is ErrorCode.none
        await cluster.until(lambda: cluster.leader("t") != -1)
        return values(cluster)


def _copied(cluster: ProductCluster, node_id: int) -> FaultyStorage:
    disk = cluster.disks[node_id]
    disk.on_call, disk.on_full = lambda call, path: None, lambda error: None
    return copy.deepcopy(disk)


def _longest(ends: Ends) -> int | None:
    known = {node_id: end for node_id, end in ends.items() if end is not None and not end.error}
    return max(sorted(known), key=lambda node_id: known[node_id].log_end)


def test_an_unclean_election_by_length_alone_would_lose_more_than_it_must(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = run_virtual(what_an_unclean_election_leaves, seed=1)
    assert left == ["all have it", "committed"], "only what nobody has any more is lost"
    monkeypatch.setattr(elections, "furthest", _longest)
    left = run_virtual(what_an_unclean_election_leaves, seed=1)
    assert left == ["all have it", *(f"never committed {number}" for number in range(5))]


# --- missing files


async def who_leads_after_files_were_missing() -> str:
    """The last replica that is in sync comes back, after an orderly stop, without its files.

    Another one that has everything comes back later.
    """
    async with ProductCluster(3) as cluster:
        await cluster.create("t", partitions=1)
        await cluster.until(lambda: cluster.leader("t") != -1)
        leader, eligible, last = placed(cluster).replicas
        await produce(cluster, ["a", "b"])
        topic = cluster.broker(leader).image.topics["t"]
        await kill(cluster, leader)
        await kill(cluster, eligible)
        assert (placed(cluster).isr, placed(cluster).elr) == ((last,), (eligible,))
        await cluster.nodes[last].stop()
        await cluster.kill(last)
        cluster.disks[last].remove_tree(partition_directory("t", topic.id, 0))
        await cluster.start(last)
        await cluster.start(eligible)
        await asyncio.sleep(_OVER_S)
        return {-1: "nobody", last: "the one without files", eligible: "the one with records"}[
            placed(cluster).leader
        ]


def _nothing_is_lost(replicas: Replicas) -> Iterator[PartitionKey]:
    return iter(())


def test_a_replica_whose_files_are_missing_would_lead_if_it_were_not_registered_as_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert run_virtual(who_leads_after_files_were_missing, seed=1) == "the one with records"
    monkeypatch.setattr(Replicas, "lost", _nothing_is_lost)
    assert run_virtual(who_leads_after_files_were_missing, seed=1) == "the one without files"
