"""Requests about the buckets of a table, each sent to the node that leads them: one request per node.

A request names the buckets that it is about, and the node must lead all of them. If it does not, the metadata
is read again and everything is asked once more. A cluster of one node is asked as ever: without names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from tidemill.net.answers import checked
from tidemill.net.connection import DEFAULT_TIMEOUT_MS
from tidemill.tables.definition import TableDefinition

if TYPE_CHECKING:
    from tidemill.client.cluster import Cluster

__all__ = ("PURPOSE", "ask_leaders", "buckets_by_leader")

#: The purpose of connections for such requests, some of which take long.
PURPOSE: Final = "tables"
#: They go through the buckets one after the other, and may have to wait for each.
_TIMEOUT_MS: Final = 600_000

Buckets = list[dict[str, int]]


async def buckets_by_leader(cluster: Cluster, table: TableDefinition) -> dict[int, Buckets]:
    """The buckets of a table, as requests name them, by the node that leads them.

    Raises ``ApiError`` if one has no leader now. On a cluster of one node nothing is named, and nobody looks
    for leaders: that node says best what is wrong with a bucket. Nor is anything named if there are none.
    """
    await cluster.know_nodes()
    named = {
        (each.topic, bucket): {"partition_id": each.id, "bucket": bucket}
        for each in table.partitions
        for bucket in range(table.buckets)
    }
    if not named or len(cluster.nodes) == 1:
        return {next(iter(cluster.nodes)): []}
    by_leader = await cluster.leaders(named)
    return {leader: [named[partition] for partition in led] for leader, led in by_leader.items()}


async def ask_leaders(
    cluster: Cluster, table: TableDefinition, name: str, body: Mapping[str, Any], what: str
) -> list[Any]:
    """Send a request to every node that leads buckets of the table, each for its own; gives the answers."""
    timeout_ms = max(DEFAULT_TIMEOUT_MS, cluster.timeout_ms, _TIMEOUT_MS)

    async def ask_one(leader: int, buckets: Buckets) -> Any:
        connection = await cluster.connection(leader, purpose=PURPOSE)
        named = {**body, "buckets": buckets} if buckets else body
        return checked(await connection.request(name, named, timeout_ms=timeout_ms), what)

    async def ask() -> list[Any]:
        by_leader = await buckets_by_leader(cluster, table)
        return await asyncio.gather(*(ask_one(*each) for each in sorted(by_leader.items())))

    return await cluster.retrying(ask)
