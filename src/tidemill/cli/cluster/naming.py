"""Nodes of a cluster as people name them: by number or by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidemill.client.admin.replicas import ClusterView
    from tidemill.client.cluster import Cluster

__all__ = ("named_node", "named_nodes", "node_number")


async def named_nodes(cluster: Cluster, texts: Sequence[str]) -> tuple[int, ...]:
    """The numbers of nodes that a user has named. Raises ``ApiError`` for one that is not registered."""
    from tidemill.client.admin.replicas import describe_nodes

    view = await describe_nodes(cluster)
    return tuple(node_number(view, text) for text in texts)


async def named_node(cluster: Cluster, text: str) -> int:
    """The number of the node that a user has named."""
    (node_id,) = await named_nodes(cluster, [text])
    return node_id


def node_number(view: ClusterView, text: str) -> int:
    """The number of the registered node with this number or this name; a number comes first."""
    from tidemill.errors import ApiError, ErrorCode

    text = text.strip()
    by_name = {node.name: node_id for node_id, node in view.nodes.items()}
    by_number = {str(node_id): node_id for node_id in view.nodes}
    if text in by_number or text in by_name:
        return by_number.get(text) or by_name[text]
    raise ApiError(
        ErrorCode.broker_id_not_registered,
        f"there is no node {text!r}: give the number or the name of one that 'tidemill cluster nodes' lists",
    )
