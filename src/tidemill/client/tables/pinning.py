"""Pins of a table whose buckets several nodes lead: one pin on each node, all under one id.

The id is the client's choice then, so that a reader of a bucket needs nothing but the id.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from tidemill.client.tables.leaders import PURPOSE, Buckets, buckets_by_leader
from tidemill.errors import TableCode, TableError, TidemillError
from tidemill.net.answers import checked
from tidemill.tables.definition import TableDefinition

if TYPE_CHECKING:
    from tidemill.client.cluster import Cluster

__all__ = ("pin_once", "release_pin")

_PIN_ID_BYTES: Final = 12


async def pin_once(
    cluster: Cluster, table: TableDefinition, min_offsets: Mapping[tuple[int, int], int], idle_ms: int
) -> dict[int, Any]:
    """Pin the state of every bucket at its leader, or none if one fails; gives the answers by node.

    ``min_offsets``, by partition id and bucket, are waited for.
    """
    by_leader = await buckets_by_leader(cluster, table)
    # A new id for each attempt: what is left of a failed one may still be there.
    pin_id = secrets.token_hex(_PIN_ID_BYTES) if len(by_leader) > 1 else None
    what = f"pinning table {table.name!r}"

    async def ask(leader: int, buckets: Buckets) -> Any:
        wanted = {(each["partition_id"], each["bucket"]) for each in buckets} or min_offsets.keys()
        body: dict[str, Any] = {
            "table_id": table.table_id,
            "min_offsets": [
                {"partition_id": partition_id, "bucket": bucket, "offset": offset}
                for (partition_id, bucket), offset in min_offsets.items()
                if (partition_id, bucket) in wanted
            ],
            "max_wait_ms": cluster.timeout_ms,
            "idle_ms": idle_ms,
        }
        body |= {"buckets": buckets} if buckets else {}
        body |= {} if pin_id is None else {"pin_id": pin_id}
        connection = await cluster.connection(leader, purpose=PURPOSE)
        return checked(await connection.request("PinTable", body), what)

    results = await asyncio.gather(*(ask(*each) for each in by_leader.items()), return_exceptions=True)
    answers = dict(zip(by_leader, results, strict=True))
    failed = [each for each in results if isinstance(each, BaseException)]
    if failed:
        pinned = {node: each for node, each in answers.items() if not isinstance(each, BaseException)}
        for node, answer in pinned.items():
            # One that cannot be released expires.
            with contextlib.suppress(TidemillError, OSError):
                await release_pin(cluster, answer.pin_id, [node], what, keep_alive=False)
        raise failed[0]
    return answers


async def release_pin(
    cluster: Cluster, pin_id: str, nodes: Collection[int], what: str, *, keep_alive: bool
) -> None:
    """Release a pin on these nodes, or on all if none are given; or keep it from expiring.

    Raises ``TidemillError`` if one of the given nodes does not have it or cannot be asked; without given
    nodes, if none has it.
    """
    body = {"pin_id": pin_id, "keep_alive": keep_alive}
    if not nodes and len(cluster.nodes) <= 1:
        checked(await cluster.to_any("ReleasePin", body), what)
        return

    async def ask(node: int) -> None:
        connection = await cluster.connection(node, purpose=PURPOSE)
        checked(await connection.request("ReleasePin", body), what)

    results = await asyncio.gather(*map(ask, nodes or cluster.nodes), return_exceptions=True)
    failed = [each for each in results if isinstance(each, BaseException)]
    if nodes:
        serious = failed
    else:
        elsewhere = [each for each in failed if _is_not_here(each)]
        serious = failed if len(elsewhere) == len(results) else [e for e in failed if not _is_not_here(e)]
    if serious:
        raise serious[0]


def _is_not_here(error: BaseException) -> bool:
    return isinstance(error, TableError) and error.table_code == TableCode.pin_not_found
