"""The messages of the table APIs: what Kafka does not have, in Kafka's own encoding.

Keys are from 1000 up, all versions are flexible, and ``ApiVersions`` lists them like any other. Codes in
``error_code`` are Kafka's or ``TableCode``'s. Rows travel as Arrow IPC streams, one batch each; keys as state
keys, whose encoding is in ``tidemill.tables.state_keys``. The one partition of a table that is not
partitioned has the id 0.

``_message`` makes a class in kio's shape out of a list of fields. A field's type is a Kafka primitive,
another message of this module, ``[x]`` for an array of it, or ``x?`` where null is allowed.
"""

import dataclasses
from typing import Any, Final

from kio.schema.request_header.v2.header import RequestHeader
from kio.schema.response_header.v1.header import ResponseHeader
from kio.static.constants import EntityType
from kio.static.primitive import i8, i16, i32, i64

__all__ = ("TABLE_APIS",)

_PRIMITIVES: Final[dict[str, Any]] = {
    "bool": bool,
    "int8": i8,
    "int16": i16,
    "int32": i32,
    "int64": i64,
    "string": str,
    "bytes": bytes,
}

#: API key → (Kafka-style name, fields of the request, fields of the response).
_Fields = dict[str, Any]
_PROPERTIES: Final[_Fields] = {"key": "string", "value": "string"}
_OUTCOME: Final[_Fields] = {"error_code": "int16", "error_message": "string?"}
_BUCKET: Final[_Fields] = {"partition_id": "int64", "bucket": "int32"}
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
_PLACE: Final[_Fields] = {"topic": "string", "partition": "int32"}
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

_APIS: Final[dict[int, tuple[str, _Fields, _Fields]]] = {
    1001: (
        "CreateDatabase",
        {"name": "string", "comment": "string?", "properties": [_PROPERTIES], "if_not_exists": "bool"},
        {"created": "bool"},
    ),
    1002: ("DropDatabase", {"name": "string", "cascade": "bool", "if_exists": "bool"}, {"dropped": "bool"}),
    1003: (
        "ListDatabases",
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
    1004: (
        "AlterDatabase",
        {
            "name": "string",
            "comment": "string?",
            "set_properties": [_PROPERTIES],
            "unset_properties": ["string"],
        },
        {},
    ),
    1005: (
        "CreateTable",
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
    1006: ("DropTable", {"name": "string", "if_exists": "bool"}, {"dropped": "bool"}),
    1007: ("DescribeTable", {"name": "string"}, {"table": _TABLE}),
    1008: (
        "ListTables",
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
    1009: (
        "AlterTable",
        {
            "name": "string",
            "add_columns": "bytes?",
            "set_properties": [_PROPERTIES],
            "unset_properties": ["string"],
            "comment": "string?",
        },
        {"schema_id": "int32"},
    ),
    1010: ("CreateTablePartition", {"table": "string", "value": "string"}, {"partition": _PARTITION}),
    1011: ("DropTablePartition", {"table": "string", "value": "string"}, {}),
    1012: (
        "TableStats",
        {"table": "string"},
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
    1020: ("ListSnapshots", {"table": "string"}, {"snapshots": [_SNAPSHOT]}),
    1021: ("CreateSnapshot", {"table": "string"}, {"snapshots": [_SNAPSHOT]}),
    1022: (
        "AcquireLease",
        {
            "table": "string",
            "lease_id": "string?",
            "holder": "string",
            "duration_ms": "int64",
            "fresh": "bool",
        },
        {"lease": _LEASE},
    ),
    1023: ("ReleaseLease", {"lease_id": "string"}, {}),
    1024: ("ListLeases", {"table": "string?"}, {"leases": [_LEASE]}),
    1060: (
        "LookupKv",
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
    1061: (
        "ScanKv",
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
        },
        {
            "scanner_id": "bytes?",
            "has_more": "bool",
            "log_offset": "int64",
            "next_key": "bytes?",
            "records": "bytes?",
        },
    ),
    1062: (
        "PinTable",
        {
            "table_id": "int64",
            "min_offsets": [_BUCKET | {"offset": "int64"}],
            "max_wait_ms": "int32",
            "idle_ms": "int32",
        },
        {
            "pin_id": "string",
            "expires_in_ms": "int64",
            "buckets": [_BUCKET | {"leader_epoch": "int32", "log_offset": "int64"}],
        },
    ),
    1063: ("ReleasePin", {"pin_id": "string", "keep_alive": "bool"}, {}),
    1064: (
        "SplitBucket",
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
    1065: (
        "MeasureLog",
        {
            "ranges": [
                _PLACE | {"start_offset": "int64", "end_offset": "int64", "max_bytes": "int64"},
            ]
        },
        {
            "ranges": [
                _PLACE
                | _OUTCOME
                | {"log_start_offset": "int64", "end_offset": "int64", "size_bytes": "int64"}
            ]
        },
    ),
    1070: (
        "OpenAttempt",
        {"job": "string", "batch": "int64", "timeout_ms": "int32"},
        {"already_published": "bool"} | _ATTEMPT,
    ),
    1071: (
        "PublishAttempts",
        {"job": "string", "batch": "int64", "attempts": [_ATTEMPT]},
        {"already_published": "bool"},
    ),
    1072: (
        "AbortAttempts",
        {"job": "string", "batch": "int64", "attempts": [_ATTEMPT]},
        {"aborted_count": "int32"},
    ),
    1073: ("KeepJob", {"job": "string"}, {}),
    1074: (
        "ListJobs",
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


def _message(name: str, key: int, kind: EntityType, fields: _Fields) -> type[Any]:
    """A class in kio's shape; nested messages get classes of their own."""
    made = [_field(name, key, kind, field, spec) for field, spec in fields.items()]
    is_request = name.endswith("Request") or "Request" in name
    entity = dataclasses.make_dataclass(
        name,
        made,
        frozen=True,
        slots=True,
        kw_only=True,
        namespace={
            "__type__": kind,
            "__version__": i16(0),
            "__flexible__": True,
            "__api_key__": i16(key),
            "__header_schema__": RequestHeader if is_request else ResponseHeader,
            "__doc__": f"{name} v0: {', '.join(fields) or 'nothing'}.",
        },
    )
    entity.__module__ = __name__
    return entity


def _field(name: str, key: int, kind: EntityType, field: str, spec: Any) -> tuple[str, Any, Any]:
    is_array = isinstance(spec, list)
    if is_array:
        (spec,) = spec
    if isinstance(spec, dict):
        title = "".join(word.capitalize() for word in field.split("_"))
        inner = _message(f"{name}{title}", key, EntityType.nested, spec)
        return field, tuple[inner, ...] if is_array else inner, dataclasses.field()  # type: ignore[valid-type]
    nullable = spec.endswith("?")
    value_type: Any = _PRIMITIVES[spec.rstrip("?")]
    if is_array:
        value_type = tuple[value_type, ...]
    if nullable:
        value_type |= None
    return field, value_type, dataclasses.field(metadata={"kafka_type": spec.rstrip("?")})


#: API key → name.
TABLE_APIS: Final[dict[int, str]] = {key: name for key, (name, _, _) in _APIS.items()}

# The classes, under the names by which ``apis`` finds them.
for _key, (_name, _request, _response) in _APIS.items():
    globals()[f"{_name}Request"] = _message(f"{_name}Request", _key, EntityType.request, _request)
    globals()[f"{_name}Response"] = _message(
        f"{_name}Response", _key, EntityType.response, _OUTCOME | _response
    )
