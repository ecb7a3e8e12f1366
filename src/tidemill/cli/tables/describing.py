"""A table's definition as JSON and as text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from tidemill.cli.tables.keys import show_key
from tidemill.errors import TableError
from tidemill.tables.definition import TableDefinition
from tidemill.tables.keys.state_keys import decode_state_keys
from tidemill.tables.rows.types import COMMENT, describe_type

__all__ = ("boundary_texts", "table_value")


def table_value(table: TableDefinition) -> dict[str, Any]:
    """Everything about a table, as ``--format json`` shows it."""
    return {
        "table": table.name,
        "table_id": table.table_id,
        "comment": table.comment,
        "created_ms": table.created_ms,
        "columns": [_column(table, field) for field in table.schema],
        "primary_key": list(table.primary_key),
        "buckets": table.buckets,
        "routing": {
            "kind": table.bucket_map.kind,
            "version": table.bucket_map.version,
            "boundaries": boundary_texts(table),
        },
        "row_format": table.row_format,
        "key_format": table.key_format if table.primary_key else None,
        "partition_column": table.partition_column,
        "partitions": [{"partition": each.value, "topic": each.topic} for each in table.partitions],
        "properties": dict(table.properties),
        "schema_versions": [
            {"schema_id": number, "columns": schema.names} for number, schema in enumerate(table.schemas)
        ],
    }


def boundary_texts(table: TableDefinition) -> list[str]:
    """The boundaries of a table that is routed by ranges, as they are typed."""
    return [_boundary(each, table) for each in table.bucket_map.boundaries]


def _boundary(boundary: bytes, table: TableDefinition) -> str:
    """The text of a boundary, which may have only the first columns of a key: as many as can be read."""
    types = table.keys.types
    data, start, end = np.frombuffer(boundary, np.uint8), np.array([0]), np.array([len(boundary)])
    for count in range(len(types), 0, -1):
        try:
            columns = decode_state_keys(data, start, end, types[:count])
        except TableError:
            continue
        return show_key([column[0].as_py() for column in columns])
    return f"0x{boundary.hex()}"


def _column(table: TableDefinition, field: pa.Field) -> dict[str, Any]:
    comment = (field.metadata or {}).get(COMMENT)
    is_key = field.name in table.primary_key
    return {
        "name": field.name,
        "type": describe_type(field.type),
        "nullable": field.nullable,
        "key": table.primary_key.index(field.name) + 1 if is_key else None,
        "comment": None if comment is None else comment.decode(),
    }
