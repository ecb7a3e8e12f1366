"""Messages of the share coordinator with fields of our own: Kafka's layout, and tagged fields from 1000 on.

ReadShareGroupState v0 and WriteShareGroupState v1 say of a batch until when it is delayed and why it dies. A
write may be part of a transaction, and a reader is told which producer's. Both say how far the state tells of
the log, in which leader epoch the record below was written, and which epochs that log has; a write may say
that the log was cut. Kafka's nodes pass over such tags.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.read_share_group_state.v0.request import ReadShareGroupStateRequest
from kio.schema.request_header.v2.header import RequestHeader
from kio.schema.response_header.v1.header import ResponseHeader
from kio.schema.write_share_group_state.v1.response import WriteShareGroupStateResponse
from kio.static.constants import EntityType
from kio.static.primitive import i16

from tidemill.wire.declare import Field, declare

__all__ = (
    "ReadShareGroupStateRequest",
    "ReadShareGroupStateResponse",
    "WriteShareGroupStateRequest",
    "WriteShareGroupStateResponse",
)

_BATCH: Final[dict[str, Any]] = {
    "first_offset": "int64",
    "last_offset": "int64",
    "delivery_state": "int8",
    "delivery_count": "int16",
    "not_before_ms": Field("int64", tag=1_000, default=0),
    "reason": Field("string", tag=1_001, default=""),
}

WriteShareGroupStateRequest: Final = declare(
    "WriteShareGroupStateRequest",
    {
        "group_id": "string",
        "topics": [
            {
                "topic_id": "uuid",
                "partitions": [
                    {
                        "partition": "int32",
                        "state_epoch": "int32",
                        "leader_epoch": "int32",
                        "start_offset": "int64",
                        "delivery_complete_count": "int32",
                        "state_batches": [_BATCH],
                        "transactional_id": Field("string?", tag=1_000),
                        "producer_id": Field("int64", tag=1_001, default=-1),
                        "producer_epoch": Field("int16", tag=1_002, default=-1),
                        "log_offset": Field("int64", tag=1_003, default=-1),
                        "log_epoch": Field("int32", tag=1_004, default=-1),
                        "cut_offset": Field("int64", tag=1_005, default=-1),
                        "log_history": Field("bytes", tag=1_006, default=b""),
                    }
                ],
            }
        ],
    },
    version=1,
    kind=EntityType.request,
    constants={"__api_key__": i16(85), "__header_schema__": RequestHeader},
)

ReadShareGroupStateResponse: Final = declare(
    "ReadShareGroupStateResponse",
    {
        "results": [
            {
                "topic_id": "uuid",
                "partitions": [
                    {
                        "partition": "int32",
                        "error_code": "int16",
                        "error_message": "string?",
                        "state_epoch": "int32",
                        "start_offset": "int64",
                        "state_batches": [
                            _BATCH
                            | {
                                "producer_id": Field("int64", tag=1_002, default=-1),
                                "producer_epoch": Field("int16", tag=1_003, default=-1),
                            }
                        ],
                        "delivery_complete_count": Field("int32", tag=1_000, default=0),
                        "log_offset": Field("int64", tag=1_001, default=-1),
                        "log_epoch": Field("int32", tag=1_002, default=-1),
                        "log_history": Field("bytes", tag=1_003, default=b""),
                    }
                ],
            }
        ],
    },
    kind=EntityType.response,
    constants={"__api_key__": i16(84), "__header_schema__": ResponseHeader},
)
