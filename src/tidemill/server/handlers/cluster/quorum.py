"""DescribeQuorum: who decides about the cluster's metadata.

There is no quorum of controllers: this node keeps the metadata by itself, so it is the only voter, and leads.
Offsets are revisions of the metadata.
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
#: The first epoch, and the only one: no other node has ever led.
_LEADER_EPOCH: Final = 1
_LISTENER: Final = "PLAINTEXT"


@serves("DescribeQuorum", for_cluster(DESCRIBE))
async def describe_quorum(broker: Broker, call: Call) -> dict[str, Any]:
    """Describe the only voter of the metadata's partition; there is no quorum for any other partition."""
    if not _asks_for_metadata(call.request.topics):
        code = ErrorCode.unknown_topic_or_partition
        return outcome(ApiError(code, f"only {_METADATA_TOPIC}-0 has a quorum; ask for it alone"))
    revision = broker.image.revision
    voter = {
        "replica_id": broker.node_id,
        "log_end_offset": revision,
        "last_fetch_timestamp": -1,
        "last_caught_up_timestamp": broker.clock_ms(),
    }
    partition = {
        "partition_index": 0,
        "error_code": ErrorCode.none,
        "leader_id": broker.node_id,
        "leader_epoch": _LEADER_EPOCH,
        "high_watermark": revision,
        "current_voters": [voter],
        "observers": [],
    }
    address = broker.advertised
    listener = {"name": _LISTENER, "host": address.host, "port": address.port}
    return {
        "error_code": ErrorCode.none,
        "topics": [{"topic_name": _METADATA_TOPIC, "partitions": [partition]}],
        "nodes": [{"node_id": broker.node_id, "listeners": [listener]}],
    }


def _asks_for_metadata(topics: Any) -> bool:
    if len(topics) != 1 or topics[0].topic_name != _METADATA_TOPIC:
        return False
    indexes = [each.partition_index for each in topics[0].partitions[:2]]
    return indexes == [0]
