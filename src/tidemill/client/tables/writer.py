"""Writing rows and deletions of a table: columns to record batches, bucket by bucket.

Rules:

- A ``ColumnProducer`` carries the batches of each bucket, in order, and writes nothing twice.
- What a call has written is durable when it returns, and ``written`` knows up to which offset, so that later
  reads can wait for it.
- A refused batch raises, with the server's words. Rows of the same call that were sent before it stay
  written, unless the producer is in a transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.client.producing.columns import BATCH_BYTES, ColumnProducer, Outgoing
from tidemill.errors import ApiError, ErrorCode
from tidemill.records.columns.arrays import from_numpy
from tidemill.tables.definition import TableDefinition
from tidemill.tables.keys.partition_values import partition_texts

__all__ = ("PreparedRows", "TableWriter", "prepare_changes", "prepare_deletes", "prepare_upserts")

_SIZE_PROPERTIES: Final = ("max.message.bytes", "segment.bytes", "internal.segment.bytes")
_ROWS_AT_ONCE: Final = 32_768


_Parts = dict[tuple[str | None, int], Outgoing]
"""Records for some buckets: by partition value and bucket."""


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """Records by bucket, how many they are, and how large a batch of them may be."""

    parts: _Parts
    rows: int
    batch_bytes: int


def prepare_upserts(table: TableDefinition, rows: pa.Table) -> list[PreparedRows]:
    """Encode rows, in exactly the table's schema, as records by bucket."""
    prepared = []
    for batch in rows.combine_chunks().to_batches(max_chunksize=_ROWS_AT_ONCE):
        values = table.format.from_batch(batch)
        if table.has_primary_key:
            prepared.append(_keyed(table, table.key_columns(batch), values))
            continue
        texts = (
            None if table.partition_column is None else partition_texts(batch.column(table.partition_column))
        )
        # Without a key any bucket is right: each gets an equal share.
        buckets = np.arange(batch.num_rows) * table.buckets // max(batch.num_rows, 1)
        parts = _by_bucket(None, values, buckets, texts)
        prepared.append(PreparedRows(parts, batch.num_rows, _batch_bytes(table)))
    return prepared


def prepare_deletes(table: TableDefinition, key_columns: Sequence[pa.Array]) -> PreparedRows:
    """Encode deletions of the rows with these keys as records by bucket."""
    return _keyed(table, key_columns, pa.nulls(len(key_columns[0]), pa.binary()))


def prepare_changes(
    table: TableDefinition, keys: pa.Table, upserts: pa.Table, deletes: npt.NDArray[np.bool_]
) -> list[PreparedRows]:
    """Encode upserts and deletions, in the order of ``deletes``, as records by bucket.

    ``keys`` has the key columns of every change. ``deletes`` says which changes are deletions; ``upserts``
    has the full rows of the others, in the same order and the table's schema.
    """
    prepared: list[PreparedRows] = []
    rows = upserts.combine_chunks()
    done = 0
    for batch in keys.combine_chunks().to_batches(max_chunksize=_ROWS_AT_ONCE):
        start = sum(each.rows for each in prepared)
        here = deletes[start : start + batch.num_rows]
        kept = int(np.count_nonzero(~here))
        values = pa.nulls(len(here), pa.binary())
        if kept:
            (piece,) = rows.slice(done, kept).combine_chunks().to_batches()
            values = table.format.from_batch(piece).take(from_numpy(np.cumsum(~here) - 1, here))
        done += kept
        prepared.append(_keyed(table, batch.columns, values))
    return prepared


def _keyed(table: TableDefinition, key_columns: Sequence[pa.Array], values: pa.BinaryArray) -> PreparedRows:
    """Records by the buckets of their keys."""
    keys = table.keys.canonical(key_columns)
    state_keys = table.keys.state_keys(key_columns) if table.bucket_map.is_ranged else None
    buckets = table.bucket_map.route(keys, state_keys)
    texts = None
    if table.partition_column is not None:
        texts = partition_texts(key_columns[table.primary_key.index(table.partition_column)])
    return PreparedRows(_by_bucket(keys, values, buckets, texts), len(keys), _batch_bytes(table))


def _batch_bytes(table: TableDefinition) -> int:
    """The largest size of a batch: the table's topics may take less than usual."""
    limits = [table.properties.get(name) for name in _SIZE_PROPERTIES]
    return min([BATCH_BYTES, *(int(limit) for limit in limits if limit is not None and limit.isdecimal())])


def _by_bucket(
    keys: pa.BinaryArray | None, values: pa.BinaryArray, buckets: Any, texts: pa.StringArray | None
) -> _Parts:
    parts = _Parts()
    for value, in_partition in _rows_by_partition(texts, len(values)):
        chosen = buckets if in_partition is None else buckets[in_partition]
        for bucket in np.flatnonzero(np.bincount(chosen)).tolist():
            inside = np.flatnonzero(chosen == bucket)
            rows = inside if in_partition is None else in_partition[inside]
            if len(rows) == len(values):
                parts[value, bucket] = Outgoing(keys, values)
            else:
                indexes = from_numpy(rows)
                parts[value, bucket] = Outgoing(
                    None if keys is None else keys.take(indexes), values.take(indexes)
                )
    return parts


def _rows_by_partition(texts: pa.StringArray | None, count: int) -> Any:
    if texts is None:
        if count:
            yield None, None
        return
    encoded = texts.dictionary_encode()
    codes = encoded.indices.to_numpy()
    for code, value in enumerate(encoded.dictionary.to_pylist()):
        yield value, np.flatnonzero(codes == code)


class TableWriter:
    """Writes one table through one cluster connection, or some tables in one transaction.

    What a call writes to a bucket comes behind what calls before it wrote there, also while those are still
    under way.
    """

    def __init__(self, producer: ColumnProducer) -> None:
        self._producer = producer
        #: Held while sends are begun: a call that comes first is first in every bucket.
        self._order = asyncio.Lock()

    async def write(
        self,
        topic_of: Callable[[str | None], Awaitable[str]],
        rows: PreparedRows,
        renew: Callable[[], Awaitable[None]],
    ) -> dict[tuple[str, int], int]:
        """Send records and wait until they are durable; gives the offset behind the last of each bucket.

        ``renew`` is awaited when a topic is gone: then ``topic_of`` is asked again, once. In a transaction
        that is an error, for what was written before is gone with the topic.
        """
        offsets, gone = await self._write_parts(topic_of, rows.parts, rows.batch_bytes)
        if gone and not self._producer.in_transaction:
            self._producer.cluster.forget()
            await renew()
            more, gone = await self._write_parts(topic_of, gone, rows.batch_bytes)
            offsets |= more
        if gone:
            raise ApiError(
                ErrorCode.unknown_topic_or_partition,
                f"{sum(len(records.values) for records in gone.values())} rows were not written: their "
                "partition was dropped, or is being dropped again and again",
            )
        return offsets

    async def _write_parts(
        self, topic_of: Callable[[str | None], Awaitable[str]], parts: _Parts, batch_bytes: int
    ) -> tuple[dict[tuple[str, int], int], _Parts]:
        """The offsets of the parts that were written, and the parts whose topics are gone."""
        async with self._order:
            buckets = {part: (await topic_of(part[0]), part[1]) for part in parts}
            by_bucket = {buckets[part]: records for part, records in parts.items()}
            tasks = await self._producer.begin(by_bucket, batch_bytes)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        offsets, gone, failure = dict[tuple[str, int], int](), _Parts(), None
        for part, result in zip(parts, results, strict=True):
            if isinstance(result, int):
                offsets[buckets[part]] = result
            elif isinstance(result, ApiError) and result.code == ErrorCode.unknown_topic_or_partition:
                gone[part] = parts[part]
            else:
                failure = failure or result
        if failure is not None:
            raise failure
        return offsets, gone

    def forget(self, topic: str) -> None:
        """Start over in all buckets of a topic that was deleted and created again."""
        self._producer.forget(topic)
