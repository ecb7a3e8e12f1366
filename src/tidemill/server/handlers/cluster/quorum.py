"""DescribeQuorum: who decides about the cluster's metadata.

There is no quorum of controllers. A node that is alone keeps the metadata by itself: it is the only voter,
and leads. In a cluster etcd keeps it, and the answer says what a client can use: the leader is the
controller, its epoch the controller epoch, and the voters are the live nodes, each of which can become the
controller. Nodes that are down are observers. Offsets are revisions of the metadata; how far other nodes have
read is not known here (-1).
"""

from __future__ import annotations

from typing import Any, Final

from tidemill.errors import ApiError, ErrorCode
from tidemill.server.broker import Broker
from tidemill.server.handlers.outcome import outcome
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import DESCRIBE, for_cluster
from tidemill.server.requests.call import Call

__all__ = ("describe_quorum",)

#: The topic that holds the metadata of a Kafka cluster, which has one partition.
_METADATA_TOPIC: Final = "__cluster_metadata"
#: The first epoch, and the only one of a node that is alone: no other node has ever led.
_LEADER_EPOCH: Final = 1
_INT32_MAX: Final = 2**31 - 1
_LISTENER: Final = "PLAINTEXT"


@serves("DescribeQuorum", for_cluster(DESCRIBE))
async def describe_quorum(broker: Broker, call: Call) -> dict[str, Any]:
    """Describe the metadata's partition; there is no quorum for any other partition."""
    if not _asks_for_metadata(call.request.topics):
        code = ErrorCode.unknown_topic_or_partition
        return outcome(ApiError(code, f"only {_METADATA_TOPIC}-0 has a quorum; ask for it alone"))
    image = broker.image
    live = image.live_nodes if image.replicated else frozenset({broker.node_id})
    partition = {
        "partition_index": 0,
        **_leader(broker, live),
        "high_watermark": image.revision,
        "current_voters": [_replica(broker, node_id) for node_id in sorted(live)],
        "observers": [_replica(broker, node_id) for node_id in sorted(image.nodes.keys() - live)],
    }
    return {
        "error_code": ErrorCode.none,
        "topics": [{"topic_name": _METADATA_TOPIC, "partitions": [partition]}],
        "nodes": [_node(broker, node_id) for node_id in sorted(live)],
    }


def _leader(broker: Broker, live: frozenset[int]) -> dict[str, Any]:
    image = broker.image
    if not image.replicated:
        return {"error_code": ErrorCode.none, "leader_id": broker.node_id, "leader_epoch": _LEADER_EPOCH}
    if image.controller is None or image.controller.node_id not in live:
        error = ApiError(ErrorCode.leader_not_available, "the cluster has no controller at the moment")
        return {**outcome(error), "leader_id": -1, "leader_epoch": -1}
    # An epoch is a revision of the metadata, and Kafka's field for it is small.
    epoch = min(image.controller.epoch, _INT32_MAX)
    return {"error_code": ErrorCode.none, "leader_id": image.controller.node_id, "leader_epoch": epoch}


def _replica(broker: Broker, node_id: int) -> dict[str, Any]:
    is_here = node_id == broker.node_id
    return {
        "replica_id": node_id,
        "log_end_offset": broker.image.revision if is_here else -1,
        "last_fetch_timestamp": -1,
        "last_caught_up_timestamp": broker.clock_ms() if is_here else -1,
    }


def _node(broker: Broker, node_id: int) -> dict[str, Any]:
    if node_id == broker.node_id:
        host, port = broker.advertised.host, broker.advertised.port
    else:
        host, port = broker.image.nodes[node_id].host, broker.image.nodes[node_id].port
    return {"node_id": node_id, "listeners": [{"name": _LISTENER, "host": host, "port": port}]}


def _asks_for_metadata(topics: Any) -> bool:
    if len(topics) != 1 or topics[0].topic_name != _METADATA_TOPIC:
        return False
    indexes = [each.partition_index for each in topics[0].partitions[:2]]
    return indexes == [0]
