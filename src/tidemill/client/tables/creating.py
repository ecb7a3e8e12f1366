"""The body of a CreateTable request, made from the arguments of ``create_table``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from tidemill.client.arguments import optional_text, shown
from tidemill.client.tables.arguments import prefix_values, whole_number
from tidemill.errors import ConfigError, TableCode, TableError
from tidemill.tables.definition import pack_schema
from tidemill.tables.keys.codec import KeyCodec, check_key_columns, default_key_format
from tidemill.tables.rows.types import normalise_schema, parse_columns

__all__ = ("creation_body", "given_schema")


def given_schema(schema: pa.Schema | str) -> pa.Schema:
    """The Arrow schema that a caller gives as one, or in Spark's words. Raises ``TableError``."""
    if isinstance(schema, str):
        return parse_columns(schema)
    if not isinstance(schema, pa.Schema):
        raise TableError(
            TableCode.invalid_schema,
            f"a schema is a pyarrow.Schema or text like 'id bigint, name string', not {shown(schema)}",
        )
    return schema


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
    schema = given_schema(schema)
    optional_text("partition_by, a column's name,", partition_by)
    optional_text("row_format", row_format)
    optional_text("key_format", key_format)
    if isinstance(boundaries, str | bytes) or not isinstance(boundaries, Iterable):
        raise ConfigError(f"boundaries is a list of keys in rising order, not {shown(boundaries)}")
    boundaries = list(boundaries)
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
