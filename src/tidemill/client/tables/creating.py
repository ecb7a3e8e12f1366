"""The body of a CreateTable request, made from the arguments of ``create_table``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tidemill.client.tables.arguments import prefix_values, whole_number
from tidemill.errors import TableCode, TableError
from tidemill.tables.definition import pack_schema
from tidemill.tables.keys.codec import KeyCodec, check_key_columns, default_key_format
from tidemill.tables.rows.types import normalise_schema, parse_columns

__all__ = ("creation_body",)


def creation_body(
    name: str,
    schema: pa.Schema | str,
    *,
    primary_key: tuple[str, ...],
    buckets: int | None,
    boundaries: Sequence[Any],
    partition_by: str | None,
    row_format: str | None,
    key_format: str | None,
) -> dict[str, Any]:
    """The fields of a CreateTable request that say what rows look like and where they live."""
    if isinstance(schema, str):
        schema = parse_columns(schema)
    if not isinstance(schema, pa.Schema):
        raise TableError(
            TableCode.invalid_schema,
            f"a schema is a pyarrow.Schema or text like 'id bigint, name string', not {schema!r:.60}",
        )
    required = {*primary_key, *([partition_by] if partition_by else [])}
    schema = pa.schema(
        [field.with_nullable(field.nullable and field.name not in required) for field in schema]
    )
    if buckets is not None:
        buckets = whole_number("buckets", buckets, 1, TableCode.invalid_schema)
    encoded: list[bytes] = []
    if boundaries:
        columns = normalise_schema(schema)
        check_key_columns(columns, primary_key)
        keys = KeyCodec(columns, primary_key, key_format or default_key_format(primary_key))
        encoded = [keys.bound(prefix_values(each, primary_key)) for each in boundaries]
    return {
        "name": name,
        "schema": pack_schema(schema),
        "primary_key": list(primary_key),
        "buckets": buckets or 0,
        "boundaries": encoded,
        "row_format": row_format,
        "key_format": key_format,
        "partition_column": partition_by,
    }
