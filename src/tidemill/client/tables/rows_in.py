"""Brings rows that callers give (plain dicts, or anything that speaks Arrow) to a table's schema."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyarrow as pa

from tidemill.errors import TableCode, TableError
from tidemill.tables.rows.types import conform

__all__ = ("as_tables",)

_DICTS_AT_ONCE = 16_384


def as_tables(rows: Any, schema: pa.Schema) -> Iterator[pa.Table]:
    """``rows`` in pieces, each in exactly ``schema``. Raises ``TableError`` where they do not fit.

    Takes a dict, an iterable of dicts, a pyarrow table, batch or reader, and whatever has an Arrow C stream:
    frames of pandas and polars, relations of DuckDB.
    """
    if isinstance(rows, Mapping):
        rows = [rows]
    if isinstance(rows, pa.Table | pa.RecordBatch):
        yield _table(conform(rows, schema), schema)
    elif hasattr(rows, "__arrow_c_stream__"):
        for batch in pa.RecordBatchReader.from_stream(rows):
            if batch.num_rows:
                yield _table(conform(_without_index(batch), schema), schema)
    elif hasattr(rows, "__arrow_c_array__"):
        yield _table(conform(pa.record_batch(rows), schema), schema)
    elif isinstance(rows, Iterable) and not isinstance(rows, str | bytes):
        yield from _from_dicts(iter(rows), schema)
    else:
        raise TableError(
            TableCode.row_refused,
            f"rows cannot be {rows!r:.60}; give a dict, dicts, or something that speaks Arrow "
            "(pyarrow, pandas, polars, DuckDB)",
        )


def _from_dicts(rows: Iterator[Any], schema: pa.Schema) -> Iterator[pa.Table]:
    names = frozenset(schema.names)
    first = 0
    while True:
        piece: list[Mapping[str, Any]] = []
        for row in rows:
            if not isinstance(row, Mapping):
                raise TableError(
                    TableCode.row_refused,
                    f"row {first + len(piece)} is {row!r:.60}, not a dict",
                    index=first + len(piece),
                )
            unknown = row.keys() - names
            if unknown:
                raise TableError(
                    TableCode.row_refused,
                    f"row {first + len(piece)} has {', '.join(sorted(map(repr, unknown)))}, which the table "
                    "has not; "
                    f"its columns are {', '.join(schema.names)}",
                    index=first + len(piece),
                )
            piece.append(row)
            if len(piece) == _DICTS_AT_ONCE:
                break
        if not piece:
            return
        yield _table(conform(_columns(piece, schema, first), schema), schema)
        first += len(piece)


def _columns(piece: list[Mapping[str, Any]], schema: pa.Schema, first: int) -> pa.Table:
    # Nullable on the way: what is missing where it must not be is found, and named, by ``conform``.
    lenient = pa.schema([field.with_nullable(True) for field in schema])
    try:
        return pa.Table.from_pylist(piece, schema=lenient)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        for number, row in enumerate(piece):
            for field in lenient:
                try:
                    pa.array([row.get(field.name)], field.type)
                except (pa.ArrowException, OverflowError, TypeError, ValueError) as error:
                    raise TableError(
                        TableCode.row_refused,
                        f"row {first + number}: {row.get(field.name)!r} is no value for column "
                        f"{field.name!r} of type "
                        f"{field.type}: {error}",
                        index=first + number,
                    ) from error
        raise


def _without_index(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Drop the index that pandas sends along as a column with a reserved name."""
    kept = [name for name in batch.schema.names if not name.startswith("__index_level_")]
    return batch if len(kept) == batch.num_columns else batch.select(kept)


def _table(conformed: Any, schema: pa.Schema) -> pa.Table:
    if isinstance(conformed, pa.Table):
        return conformed
    batches = conformed if isinstance(conformed, list) else [conformed]
    return pa.Table.from_batches(batches, schema)
