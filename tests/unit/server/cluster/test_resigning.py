"""A node that stops gives its leaderships away, many at a time."""

from __future__ import annotations

import pytest

from support.product_cluster import ProductCluster
from support.virtual_loop import run_virtual

_PARTITIONS = 240


@pytest.mark.parametrize("is_controller", [True, False])
def test_leaderships_are_given_away_side_by_side(is_controller: bool) -> None:
    async def story() -> None:
        async with ProductCluster(3) as cluster:
            await cluster.create("t", partitions=_PARTITIONS)
            await cluster.until(lambda: all(_in_sync(cluster, index) for index in range(_PARTITIONS)))
            image = cluster.broker(1).image
            assert image.controller is not None
            controller = image.controller.node_id
            node_id = next(each for each in cluster.nodes if (each == controller) is is_controller)
            led = [each for each in image.topics["t"].partitions if each.leader == node_id]
            assert len(led) >= _PARTITIONS // 4
            before = cluster.ways[controller].commits
            membership = cluster.nodes[node_id].node.membership
            assert membership is not None
            await cluster.run(node_id, membership.resign_all())
            leaders = {each.leader for each in cluster.broker(node_id).image.topics["t"].partitions}
            assert leaders == {1, 2, 3} - {node_id}
            assert cluster.ways[controller].commits - before <= 10, "they are committed together"

    run_virtual(story, seed=1)


def _in_sync(cluster: ProductCluster, index: int) -> bool:
    return len(cluster.broker(1).image.topics["t"].partitions[index].isr) == 3
