"""A table as the code that reads and writes it needs it: schema, keys, rows and routing in one object.

Made from the metadata, on the server and on the client alike, and never changed: a changed table gets a new
one.

Codecs are loaded when they are first used: code that only asks where the rows are never needs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from tidemill.tables.keys.routing import BucketMap

if TYPE_CHECKING:
    from tidemill.tables.keys.codec import KeyCodec
    from tidemill.tables.rows.binary import RowCodec, VersionedRows
    from tidemill.tables.rows.formats import RowFormat

__all__ = (
    "INDEX_COLUMN",
    "PartitionDefinition",
    "TableDefinition",
    "pack_bucket_map",
    "pack_schema",
    "unpack_schema",
)

#: Column of answers to look-ups: the index of the key that a row belongs to.
INDEX_COLUMN = "_tidemill_index"


def pack_schema(schema: pa.Schema) -> bytes:
    """Encode a schema as it is stored and sent: Arrow IPC."""
    return bytes(schema.serialize())


def unpack_schema(data: bytes) -> pa.Schema:
    """Decode a schema: the inverse of ``pack_schema``."""
    return pa.ipc.read_schema(pa.py_buffer(data))


def pack_bucket_map(bucket_map: BucketMap) -> bytes:
    """Encode a routing as it is stored and sent: MessagePack."""
    return msgspec.msgpack.encode(bucket_map.to_value())


@dataclass(frozen=True, slots=True)
class PartitionDefinition:
    """A table partition, or all of a table that has none, with its buckets: the partitions of ``topic``."""

    id: int
    value: str | None
    topic: str


@dataclass(frozen=True)
class TableDefinition:
    """A table with the codecs of its keys and rows. ``schemas[i]`` has the id ``i``, the newest is last."""

    name: str
    table_id: int
    schemas: tuple[pa.Schema, ...]
    primary_key: tuple[str, ...]
    buckets: int
    bucket_map: BucketMap
    row_format: str
    key_format: str
    partition_column: str | None
    partitions: tuple[PartitionDefinition, ...]
    properties: Mapping[str, str]
    comment: str | None
    created_ms: int

    @classmethod
    def unpack(cls, *, schemas: Sequence[bytes], bucket_map: bytes, **fields: object) -> TableDefinition:
        """A definition from the stored form of schemas and routing; the other fields are the class's."""
        return cls(
            schemas=tuple(map(unpack_schema, schemas)),
            bucket_map=BucketMap.from_value(msgspec.msgpack.decode(bucket_map)),
            **fields,  # type: ignore[arg-type]
        )

    @property
    def schema(self) -> pa.Schema:
        return self.schemas[-1]

    @property
    def schema_id(self) -> int:
        return len(self.schemas) - 1

    @property
    def has_primary_key(self) -> bool:
        return bool(self.primary_key)

    @cached_property
    def keys(self) -> KeyCodec:
        """The codec of keys. Only for tables with a primary key."""
        from tidemill.tables.keys.codec import KeyCodec

        return KeyCodec(self.schema, self.primary_key, self.key_format)

    @cached_property
    def rows(self) -> VersionedRows:
        """The reader of the ``row`` format, which is also the format of the state."""
        from tidemill.tables.rows.binary import VersionedRows

        return VersionedRows(dict(enumerate(self.schemas)), self.schema_id)

    @cached_property
    def codec(self) -> RowCodec:
        """The writer of the ``row`` format."""
        from tidemill.tables.rows.binary import RowCodec

        return RowCodec(self.schema, self.schema_id)

    @cached_property
    def format(self) -> RowFormat:
        """The reader and writer of the values of the log."""
        from tidemill.tables.rows.formats import make_format

        return make_format(self.row_format, dict(enumerate(self.schemas)), self.schema_id, self.primary_key)

    @cached_property
    def key_indexes(self) -> tuple[int, ...]:
        return tuple(self.schema.get_field_index(name) for name in self.primary_key)

    def key_columns(self, batch: pa.RecordBatch) -> list[pa.Array]:
        """The primary key's columns of rows in the newest schema."""
        return [batch.column(index) for index in self.key_indexes]

    @cached_property
    def _partitions_by_id(self) -> dict[int, PartitionDefinition]:
        return {each.id: each for each in self.partitions}

    def partition(self, partition_id: int) -> PartitionDefinition | None:
        return self._partitions_by_id.get(partition_id)
