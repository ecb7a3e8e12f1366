"""The messages about cursors, which Kafka does not have. Their keys, in ``apis``, begin at 1100."""

from typing import Final

from tidemill.wire.extensions import OUTCOME, Fields, message_classes

__all__ = ()

_POSITION: Final[Fields] = {
    "offset": "int64",
    "leader_epoch": "int32",
    "started": "bool",
    "finished": "bytes",
}
_STORED: Final[Fields] = {
    "partition": "int32",
    "epoch": "int64",
    **_POSITION,
    "owner": "string",
    "lease_left_ms": "int64",
    "committed_ms": "int64",
    "origin": "uuid",
    "moved": "bool",
}
_CURSOR: Final[Fields] = {
    "name": "string",
    "topic": "string",
    "topic_id": "uuid",
    "region": "bytes",
    "shown": "string",
    "paused": "bool",
    "created_ms": "int64",
    "home": "int8",
    "partitions": [_STORED],
}

#: Fields of the request and of the response, by the API's name.
_MESSAGES: Final[dict[str, tuple[Fields, Fields]]] = {
    "FetchRegion": (
        {
            "topic": "string",
            "topic_id": "uuid",
            "key_prefix": "bytes?",
            "headers": [{"name": "string", "value": "bytes?"}],
            "predicate": "bytes?",
            "max_wait_ms": "int32",
            "max_bytes": "int32",
            "partitions": [
                {
                    "partition": "int32",
                    "offset": "int64",
                    "leader_epoch": "int32",
                    "current_leader_epoch": "int32",
                }
            ],
        },
        {
            "partitions": [
                {
                    "partition": "int32",
                    **OUTCOME,
                    "next_offset": "int64",
                    "leader_epoch": "int32",
                    "log_start_offset": "int64",
                    "last_stable_offset": "int64",
                    "log_end_offset": "int64",
                    "diverging_epoch": "int32",
                    "diverging_offset": "int64",
                    "records": "bytes?",
                    "skipped": [{"first_offset": "int64", "last_offset": "int64", "reason": "int8"}],
                    "skipped_dropped": "int32",
                }
            ]
        },
    ),
    "TakeCursor": (
        {
            "name": "string",
            "topic": "string",
            "topic_id": "uuid",
            "region": "bytes",
            "shown": "string",
            "owner": "string",
            "lease_ms": "int32",
            "force": "bool",
            "home": "int8",
            "partitions": [{"partition": "int32", **_POSITION}],
        },
        {"paused": "bool", "partitions": [_STORED]},
    ),
    "CommitCursor": (
        {
            "name": "string",
            "partitions": [
                {"partition": "int32", "epoch": "int64", "previous_offset": "int64", **_POSITION},
            ],
        },
        {"paused": "bool", "partitions": [_STORED]},
    ),
    "KeepCursor": (
        {
            "name": "string",
            "lease_ms": "int32",
            "release": "bool",
            "partitions": [{"partition": "int32", "epoch": "int64"}],
        },
        {"paused": "bool"},
    ),
    "ListCursors": (
        {"topic": "string?"},
        {"cursors": [_CURSOR], "shards": ["int32"], "shard_count": "int32"},
    ),
    "DescribeCursor": ({"name": "string"}, {"cursor": _CURSOR}),
    "AlterCursor": (
        {
            "name": "string",
            "paused": "int8",
            "force": "bool",
            "partitions": [{"partition": "int32", **_POSITION}],
        },
        {"cursor": _CURSOR},
    ),
    "DeleteCursor": ({"name": "string", "force": "bool"}, {}),
}

globals().update(message_classes(_MESSAGES))
