"""The replicas of internal topics, when nodes join one after the other."""

from __future__ import annotations

from support.product_cluster import ProductCluster
from support.virtual_loop import run_virtual
from tidemill.server.coordinators.groups import GROUPS


def test_internal_topics_rise_when_nodes_join_and_others_do_not() -> None:
    async def story() -> None:
        cluster = ProductCluster(3)
        await cluster.start(1)
        await cluster.ask(1, "FindCoordinator", 4, key_type=0, coordinator_keys=["g"])
        await cluster.create("t", partitions=1, replication=1)

        def replicas(topic: str) -> set[int]:
            (placed,) = cluster.broker(1).image.topics[topic].partitions
            is_moved = set(placed.replicas) == set(placed.isr) and not placed.adding
            return set(placed.isr) if is_moved else set()

        assert replicas(GROUPS.topic) == {1}
        await cluster.start(2)
        await cluster.until(lambda: replicas(GROUPS.topic) == {1, 2})
        await cluster.start(3)
        await cluster.until(lambda: replicas(GROUPS.topic) == {1, 2, 3})
        assert replicas("t") == {1}
        (placed,) = cluster.broker(1).image.topics[GROUPS.topic].partitions
        assert placed.min_isr == 2
        for node_id in (1, 2, 3):
            await cluster.kill(node_id)

    run_virtual(story, seed=1)
