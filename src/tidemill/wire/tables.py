"""The messages of the table APIs: what Kafka does not have, in Kafka's own encoding.

Their keys, which ``apis`` has, are from 1000 up; all versions are flexible, and ``ApiVersions`` lists them
like any other. Codes in ``error_code`` are Kafka's or ``TableCode``'s. Rows travel as Arrow IPC streams, one
batch each; keys as state keys, whose encoding is in ``tidemill.tables.keys.state_keys``. The one partition of
a table that is not partitioned has the id 0.

``tidemill.wire.declare`` says how fields are written down, and makes the classes.
"""

from typing import Final

from tidemill.wire.declare import Field
from tidemill.wire.extensions import OUTCOME as _OUTCOME
from tidemill.wire.extensions import Fields as _Fields
from tidemill.wire.extensions import message_classes

__all__ = ()

_PROPERTIES: Final[_Fields] = {"key": "string", "value": "string"}
_BUCKET: Final[_Fields] = {"partition_id": "int64", "bucket": "int32"}
#: The buckets that a request is about, all of which the node must lead; none named means all of the table's.
_NAMED_BUCKETS: Final = Field([_BUCKET], tag=0, default=())
_PARTITION: Final[_Fields] = {"partition_id": "int64", "value": "string?", "topic": "string"}
_SNAPSHOT: Final[_Fields] = _BUCKET | {
    "snapshot_id": "int64",
    "log_offset": "int64",
    "created_ms": "int64",
    "size_bytes": "int64",
    "problem": "string?",
}
_LEASE: Final[_Fields] = {
    "lease_id": "string",
    "table": "string",
    "holder": "string",
    "expires_at_ms": "int64",
    "snapshots": [_BUCKET | {"snapshot_id": "int64", "log_offset": "int64"}],
}
_TOPIC_PARTITION: Final[_Fields] = {"topic": "string", "partition": "int32"}
_ATTEMPT: Final[_Fields] = {
    "transactional_id": "string",
    "producer_id": "int64",
    "producer_epoch": "int16",
}
_TABLE: Final[_Fields] = {
    "name": "string",
    "table_id": "int64",
    "schema": "bytes",
    "schema_id": "int32",
    "primary_key": ["string"],
    "buckets": "int32",
    "bucket_map": "bytes",
    "row_format": "string",
    "key_format": "string",
    "partition_column": "string?",
    "properties": [_PROPERTIES],
    "comment": "string?",
    "created_ms": "int64",
    "partitions": [_PARTITION],
    "older_schemas": ["bytes"],
}

#: Fields of the request and of the response, by the API's name.
_MESSAGES: Final[dict[str, tuple[_Fields, _Fields]]] = {
    "CreateDatabase": (
        {"name": "string", "comment": "string?", "properties": [_PROPERTIES], "if_not_exists": "bool"},
        {"created": "bool"},
    ),
    "DropDatabase": ({"name": "string", "cascade": "bool", "if_exists": "bool"}, {"dropped": "bool"}),
    "ListDatabases": (
        {},
        {
            "databases": [
                {
                    "name": "string",
                    "comment": "string?",
                    "properties": [_PROPERTIES],
                    "table_count": "int32",
                    "created_ms": "int64",
                }
            ]
        },
    ),
    "AlterDatabase": (
        {
            "name": "string",
            "comment": "string?",
            "set_properties": [_PROPERTIES],
            "unset_properties": ["string"],
        },
        {},
    ),
    "CreateTable": (
        {
            "name": "string",
            "schema": "bytes",
            "primary_key": ["string"],
            "buckets": "int32",
            "boundaries": ["bytes"],
            "row_format": "string?",
            "key_format": "string?",
            "partition_column": "string?",
            "properties": [_PROPERTIES],
            "comment": "string?",
            "if_not_exists": "bool",
        },
        {"created": "bool", "table_id": "int64"},
    ),
    "DropTable": ({"name": "string", "if_exists": "bool"}, {"dropped": "bool"}),
    "DescribeTable": ({"name": "string"}, {"table": _TABLE}),
    "ListTables": (
        {"database": "string?"},
        {
            "tables": [
                {
                    "name": "string",
                    "table_id": "int64",
                    "primary_key": ["string"],
                    "column_count": "int32",
                    "buckets": "int32",
                    "partition_count": "int32",
                    "row_format": "string",
                    "comment": "string?",
                }
            ]
        },
    ),
    "AlterTable": (
        {
            "name": "string",
            "add_columns": "bytes?",
            "set_properties": [_PROPERTIES],
            "unset_properties": ["string"],
            "comment": "string?",
        },
        {"schema_id": "int32"},
    ),
    "CreateTablePartition": ({"table": "string", "value": "string"}, {"partition": _PARTITION}),
    "DropTablePartition": ({"table": "string", "value": "string"}, {}),
    "TableStats": (
        {"table": "string", "buckets": _NAMED_BUCKETS},
        {
            "buckets": [
                _BUCKET
                | {
                    "row_count": "int64",
                    "state_bytes": "int64",
                    "log_start_offset": "int64",
                    "log_end_offset": "int64",
                    "applied_offset": "int64",
                    "log_bytes": "int64",
                    "snapshot_count": "int32",
                    "snapshot_offset": "int64",
                    "scanner_count": "int32",
                    "problem": "string?",
                }
            ]
        },
    ),
    "ListSnapshots": ({"table": "string", "buckets": _NAMED_BUCKETS}, {"snapshots": [_SNAPSHOT]}),
    "CreateSnapshot": ({"table": "string", "buckets": _NAMED_BUCKETS}, {"snapshots": [_SNAPSHOT]}),
    "AcquireLease": (
        {
            "table": "string",
            "lease_id": "string?",
            "holder": "string",
            "duration_ms": "int64",
            "fresh": "bool",
            "buckets": _NAMED_BUCKETS,
        },
        {"lease": _LEASE},
    ),
    "ReleaseLease": ({"lease_id": "string"}, {}),
    "ListLeases": ({"table": "string?"}, {"leases": [_LEASE]}),
    "LookupKv": (
        {
            "table_id": "int64",
            "partition_id": "int64",
            "bucket": "int32",
            "leader_epoch": "int32",
            "keys": ["bytes"],
            "columns": ["string"],
            "min_offset": "int64",
            "max_wait_ms": "int32",
        },
        {"log_offset": "int64", "records": "bytes?"},
    ),
    "ScanKv": (
        {
            "scanner_id": "bytes?",
            "table_id": "int64",
            "partition_id": "int64",
            "bucket": "int32",
            "leader_epoch": "int32",
            "pin_id": "string?",
            "lease_id": "string?",
            "limit": "int64",
            "columns": ["string"],
            "predicate": "bytes?",
            "start_key": "bytes?",
            "end_key": "bytes?",
            "call_sequence": "int32",
            "batch_size_bytes": "int32",
            "close": "bool",
            "keep_alive": "bool",
            "log_offset": Field("int64", tag=0, default=-1),
            "log_epoch": Field("int32", tag=1, default=-1),
        },
        {
            "scanner_id": "bytes?",
            "has_more": "bool",
            "log_offset": "int64",
            "next_key": "bytes?",
            "records": "bytes?",
        },
    ),
    "PinTable": (
        {
            "table_id": "int64",
            "min_offsets": [_BUCKET | {"offset": "int64"}],
            "max_wait_ms": "int32",
            "idle_ms": "int32",
            "buckets": _NAMED_BUCKETS,
            "pin_id": Field("string?", tag=1),
        },
        {
            "pin_id": "string",
            "expires_in_ms": "int64",
            "buckets": [
                _BUCKET
                | {
                    "leader_epoch": "int32",
                    "log_offset": "int64",
                    "log_epoch": Field("int32", tag=0, default=-1),
                }
            ],
        },
    ),
    "ReleasePin": ({"pin_id": "string", "keep_alive": "bool"}, {}),
    "SplitBucket": (
        {
            "table_id": "int64",
            "partition_id": "int64",
            "bucket": "int32",
            "leader_epoch": "int32",
            "pin_id": "string?",
            "lease_id": "string?",
            "start_key": "bytes?",
            "end_key": "bytes?",
            "max_rows": "int64",
            "max_bytes": "int64",
            "max_pieces": "int32",
        },
        {"pieces": [{"end_key": "bytes?", "row_count": "int64", "size_bytes": "int64"}]},
    ),
    "MeasureLog": (
        {
            "ranges": [
                _TOPIC_PARTITION | {"start_offset": "int64", "end_offset": "int64", "max_bytes": "int64"},
            ]
        },
        {
            "ranges": [
                _TOPIC_PARTITION
                | _OUTCOME
                | {"log_start_offset": "int64", "end_offset": "int64", "size_bytes": "int64"}
            ]
        },
    ),
    "OpenAttempt": (
        {"job": "string", "batch": "int64", "timeout_ms": "int32"},
        {"already_published": "bool"} | _ATTEMPT,
    ),
    "PublishAttempts": (
        {"job": "string", "batch": "int64", "attempts": [_ATTEMPT]},
        {"already_published": "bool"},
    ),
    "AbortAttempts": (
        {"job": "string", "batch": "int64", "attempts": [_ATTEMPT]},
        {"aborted_count": "int32"},
    ),
    "KeepJob": ({"job": "string"}, {}),
    "ListJobs": (
        {},
        {
            "jobs": [
                {
                    "job": "string",
                    "published_batch": "int64",
                    "published_ms": "int64",
                    "open_attempts": "int32",
                    "idle_ms": "int64",
                }
            ]
        },
    ),
}

# The classes, under the names by which ``apis`` looks them up.
globals().update(message_classes(_MESSAGES))
