"""Checks the definitions of tables that clients ask for, and turns them into what the metadata stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from tidemill.control.tables.rules import SCHEMA_BYTES_MAX
from tidemill.errors import TableCode, TableError
from tidemill.tables.definition import pack_bucket_map, pack_schema, unpack_schema
from tidemill.tables.keys.codec import KEY_FORMATS, KeyCodec, check_key_columns, default_key_format
from tidemill.tables.keys.partition_values import check_partition_column
from tidemill.tables.keys.routing import BucketMap
from tidemill.tables.properties import topic_configs
from tidemill.tables.rows.formats import make_format
from tidemill.tables.rows.types import normalise_schema

if TYPE_CHECKING:
    from tidemill.config.settings import Settings
    from tidemill.control.tables.images import TableImage

__all__ = ("TableDefinitions", "schema_from_client")

_ROW_FORMATS = ("row", "json", "raw")


class TableDefinitions:
    """Plans new tables and changes of tables, with the node's defaults."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def plan(
        self,
        *,
        name: str,
        schema: bytes,
        primary_key: tuple[str, ...],
        buckets: int,
        boundaries: tuple[bytes, ...],
        row_format: str | None,
        key_format: str | None,
        partition_column: str | None,
        properties: dict[str, str],
    ) -> dict[str, Any]:
        """The fields of a ``CreateTable``. Raises ``TableError`` for a table that cannot be."""
        columns = schema_from_client(schema)
        row_format = row_format or "row"
        key_format = key_format or default_key_format(primary_key)
        _check_choice("row format", row_format, _ROW_FORMATS)
        _check_choice("key format", key_format, KEY_FORMATS)
        if primary_key:
            check_key_columns(columns, primary_key)
            # Made only to be checked: a key that cannot be encoded is refused now and not at the first row.
            KeyCodec(columns, primary_key, key_format)
        make_format(row_format, {0: columns}, 0, primary_key)
        if partition_column is not None:
            check_partition_column(columns, partition_column, primary_key)
        bucket_map = _routing(buckets, boundaries, primary_key)
        return {
            "schema": pack_schema(columns),
            "primary_key": primary_key,
            "buckets": bucket_map.buckets,
            "bucket_map": pack_bucket_map(bucket_map),
            "row_format": row_format,
            "key_format": key_format,
            "partition_column": partition_column,
            "properties": properties,
            "topic_configs": self.topic_configs(properties, keyed=bool(primary_key)),
        }

    def topic_configs(self, properties: Mapping[str, str], *, keyed: bool) -> dict[str, str]:
        """The configs that the topics of a table with these properties have."""
        return topic_configs(properties, self._settings, keyed=keyed)

    def widened_schema(self, table: TableImage, added: bytes) -> bytes:
        """The schema of ``table`` with more columns at its end, which must be nullable."""
        old, columns = unpack_schema(table.schemas[-1]), schema_from_client(added)
        rigid = [field.name for field in columns if not field.nullable]
        if rigid:
            raise TableError(
                TableCode.invalid_schema,
                f"column {rigid[0]!r} cannot be added as NOT NULL: rows that are there already have no "
                "value for it",
            )
        widened = normalise_schema(pa.schema([*old, *columns]))
        make_format(table.row_format, {0: old, 1: widened}, 1, table.primary_key)
        return pack_schema(widened)


def schema_from_client(data: bytes) -> pa.Schema:
    """The schema that a client sent. Raises ``TableError`` for one that a table cannot have."""
    # Checked before it is parsed; how many columns a table may have is decided with the metadata.
    if len(data) > SCHEMA_BYTES_MAX:
        raise TableError(
            TableCode.invalid_schema, f"a schema of {len(data)} bytes, {SCHEMA_BYTES_MAX} are the most"
        )
    try:
        # Checked in full, because Arrow accepts names that are not UTF-8.
        return normalise_schema(unpack_schema(data))
    except (pa.ArrowException, OSError, ValueError) as error:
        raise TableError(
            TableCode.invalid_schema, f"the schema is not an Arrow IPC schema: {error}"
        ) from error


def _check_choice(what: str, given: str, choices: Sequence[str]) -> None:
    if given not in choices:
        raise TableError(
            TableCode.invalid_schema, f"there is no {what} {given!r}; choose one of {', '.join(choices)}"
        )


def _routing(buckets: int, boundaries: tuple[bytes, ...], primary_key: tuple[str, ...]) -> BucketMap:
    if not boundaries:
        return BucketMap.hashed(max(buckets, 1))
    if not primary_key:
        raise TableError(
            TableCode.invalid_schema, "a table without a primary key cannot be routed by ranges of keys"
        )
    if buckets > 0 and buckets != len(boundaries) + 1:
        raise TableError(
            TableCode.invalid_schema,
            f"{len(boundaries)} boundaries make {len(boundaries) + 1} buckets, not {buckets}; leave the "
            "number out",
        )
    return BucketMap.ranged(boundaries)
