"""The messages of share groups that Kafka does not have. Their keys, in ``apis``, begin at 1090."""

from typing import Final

from tidemill.wire.declare import Field
from tidemill.wire.extensions import Fields, message_classes

__all__ = ()

#: As in ShareAcknowledge; and how long released records wait (-1: as the group says), why they are rejected.
#: Version 1 has the same fields, and one more type: records that nobody has looked at.
_BATCH: Final[Fields] = {
    "first_offset": "int64",
    "last_offset": "int64",
    "acknowledge_types": ["int8"],
    "delay_ms": "int64",
    "reason": "string?",
}
_SETTLED: Final[Fields] = {
    "partition_index": "int32",
    "error_code": "int16",
    "error_message": "string?",
    "leader_id": "int32",
    "leader_epoch": "int32",
}
_RECORDS: Final[Fields] = {
    "first_offset": "int64",
    "last_offset": "int64",
    "state": "string",
    "delivery_count": "int16",
    "owner": "string",
    "until_ms": "int64",
    "age_ms": "int64",
    "reason": "string",
}

#: Fields of the request and of the response, by the API's name.
_MESSAGES: Final[dict[str, tuple[Fields, Fields]]] = {
    "ShareSettle": (
        {
            "group_id": "string",
            "member_id": "string",
            "share_session_epoch": "int32",
            "transactional_id": "string?",
            "producer_id": "int64",
            "producer_epoch": "int16",
            "topics": [
                {"topic_id": "uuid", "partitions": [{"partition_index": "int32", "batches": [_BATCH]}]}
            ],
        },
        {
            "lock_duration_ms": "int32",
            "topics": [{"topic_id": "uuid", "partitions": [_SETTLED]}],
        },
    ),
    "DescribeShareRecords": (
        {
            "group_id": "string",
            "topic": "string",
            "partition": "int32",
            "states": ["string"],
            "limit": "int32",
        },
        {
            "leader_epoch": "int32",
            "state_epoch": "int32",
            "start_offset": "int64",
            "end_offset": "int64",
            "acquired": "int64",
            "available": "int64",
            "delayed": "int64",
            "blocked": "int64",
            "dead_letters_due": "int64",
            "is_stalled": "bool",
            "records": [_RECORDS],
            "known_for_ms": Field("int64", tag=0, default=-1),
            "max_waiting": Field("int64", tag=1, default=-1),
        },
    ),
}

globals().update(message_classes(_MESSAGES))
