"""Nodes that die by kill -9 while many members of a share group work: nothing is lost, nothing comes twice
after it was accepted, the order of each key holds, and dead letters are written and sent back once.

``SHARE_KILLS`` says how many kills there are; ``SHARE_SEED`` repeats the choices of a run.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from support.processes import NodeProcess
from support.real_cluster import RealCluster
from support.seeds import choose_seed
from support.share_load import ShareLoad

_KILLS = int(os.environ.get("SHARE_KILLS") or 0)

pytestmark = pytest.mark.timeout(600 + 60 * _KILLS)


@pytest.fixture
def seed(record_property: Callable[[str, object], None]) -> int:
    """Chooses what happens; a failed run names it."""
    chosen = choose_seed("SHARE_SEED")
    record_property("SHARE_SEED", chosen)
    return chosen


async def test_a_node_is_killed_and_started_again_under_load(tmp_path: Path, seed: int) -> None:
    settings = {"group_share_heartbeat_interval_ms": 1_000, "default_partitions": 3}
    with NodeProcess(tmp_path / "data", **settings) as node:
        load = ShareLoad(node.bootstrap_servers, "tasks", members=12, seed=seed)
        async with load.running():
            for _ in range(_KILLS or 2):
                await load.until_accepted(400)
                await asyncio.to_thread(node.kill)
                await asyncio.to_thread(node.start)
            await load.until_accepted(400)
    assert load.problems == [], f"SHARE_SEED={seed}"
    assert load.accepted >= 400


async def test_nodes_of_a_cluster_are_killed_one_after_the_other_under_load(
    tmp_path: Path, seed: int
) -> None:
    choices = random.Random(seed)
    with RealCluster(tmp_path, nodes=3, group_share_heartbeat_interval_ms=1_000) as cluster:
        cluster.create_topic("tasks", partitions=3)
        cluster.create_topic("dead", partitions=3)
        load = ShareLoad(cluster.bootstrap_servers, "tasks", members=12, seed=seed, dead_letters="dead")
        async with load.running():
            for _ in range(_KILLS or 2):
                await load.until_accepted(300)
                victim = choices.choice(list(cluster))
                await asyncio.to_thread(victim.kill)
                if choices.random() < 0.5:
                    await load.until_accepted(50)
                await asyncio.to_thread(victim.start)
                await asyncio.to_thread(cluster.wait_in_sync, "tasks", 3)
            await load.until_accepted(300)
    assert load.problems == [], f"SHARE_SEED={seed}"
    assert load.redriven >= 50
