"""The messages about nodes and replicas that Kafka does not have. Their keys, in ``apis``, begin at 1080."""

from typing import Final

from tidemill.wire.extensions import Fields, message_classes

__all__ = ()

_NODE: Final[Fields] = {
    "node_id": "int32",
    "name": "string",
    "host": "string",
    "port": "int32",
    "cluster_host": "string",
    "cluster_port": "int32",
    "rack": "string?",
    "machine": "string",
    "state": "string",
    "clock_ahead_ms": "int64",
    "tags": ["string"],
}
_FOLLOWER: Final[Fields] = {
    "node_id": "int32",
    "in_sync": "bool",
    "log_end_offset": "int64",
    "durable_offset": "int64",
    "silent_ms": "int64",
}
_REPLICA: Final[Fields] = {
    "topic": "string",
    "partition": "int32",
    "role": "string",
    "leader_epoch": "int32",
    "last_epoch": "int32",
    "log_start_offset": "int64",
    "log_end_offset": "int64",
    "durable_offset": "int64",
    "high_watermark": "int64",
    "problem": "string?",
    "followers": [_FOLLOWER],
}

#: Fields of the request and of the response, by the API's name.
_MESSAGES: Final[dict[str, tuple[Fields, Fields]]] = {
    "DescribeNodes": (
        {},
        {
            "node_id": "int32",
            "replicated": "bool",
            "controller_id": "int32",
            "controller_epoch": "int64",
            "revision": "int64",
            "problems": ["string"],
            "nodes": [_NODE],
        },
    ),
    "DescribeReplicas": ({"topics": ["string"]}, {"replicas": [_REPLICA]}),
    "ElectReplica": ({"topic": "string", "partition": "int32", "leader": "int32"}, {}),
    "SetNodeTags": ({"node_id": "int32", "tags": ["string"]}, {}),
}

globals().update(message_classes(_MESSAGES))
