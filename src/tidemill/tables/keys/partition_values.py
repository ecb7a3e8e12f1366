"""Values of a partition column as text: they name table partitions, and with them topics."""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa

from tidemill.errors import TableCode, TableError
from tidemill.records.columns import compute as pc

__all__ = ("check_partition_column", "check_partition_value", "partition_texts")

_VALUE = re.compile(r"[A-Za-z0-9_-]{1,80}")
_PATTERN = r"^[A-Za-z0-9_-]{1,80}$"


def check_partition_column(schema: pa.Schema, name: str, primary_key: tuple[str, ...]) -> None:
    """Raise the error for a column that a table cannot be partitioned by."""
    index = schema.get_field_index(name)
    if index < 0:
        raise TableError(TableCode.invalid_schema, f"the partition column {name!r} is not in the schema")
    field = schema.field(index)
    kind = field.type
    if not (
        pa.types.is_string(kind)
        or pa.types.is_integer(kind)
        or pa.types.is_date32(kind)
        or pa.types.is_boolean(kind)
    ):
        raise TableError(
            TableCode.invalid_schema,
            f"a table cannot be partitioned by {name!r} of type {kind}; use a string, an integer, a date or "
            "a boolean",
        )
    if field.nullable:
        raise TableError(
            TableCode.invalid_schema,
            f"the partition column {name!r} must not be nullable: every row has a partition",
        )
    if primary_key and name not in primary_key:
        raise TableError(
            TableCode.invalid_schema,
            f"the partition column {name!r} must be part of the primary key: else one key could live in two "
            "partitions",
        )


def partition_texts(column: pa.Array) -> pa.StringArray:
    """The texts of the table partitions of rows. Raises ``TableError`` for a value that has no text."""
    texts = column if pa.types.is_string(column.type) else column.cast(pa.string())
    fits = pc.match_substring_regex(texts, _PATTERN).to_numpy(zero_copy_only=False)
    if not fits.all():
        index = int(np.argmin(fits))
        raise TableError(
            TableCode.row_refused,
            f"{texts[index].as_py()!r} cannot name a partition: 1 to 80 letters, digits, '_' and '-' can",
            index=index,
        )
    return texts


def check_partition_value(value: str, data_type: pa.DataType) -> None:
    """Refuse a text that cannot name a table partition: no value of the column's type has that text."""
    if _VALUE.fullmatch(value) is None:
        raise TableError(
            TableCode.row_refused,
            f"{value!r} cannot name a partition: 1 to 80 letters, digits, '_' and '-' can",
        )
    if _spelling(value, data_type) != value:
        raise TableError(
            TableCode.row_refused,
            f"{value!r} is not how a value of type {data_type} is spelt in a partition's name",
        )


def _spelling(value: str, data_type: pa.DataType) -> str | None:
    try:
        spelt: str = pa.array([value]).cast(data_type).cast(pa.string())[0].as_py()
    except pa.ArrowException:
        return None
    return spelt
