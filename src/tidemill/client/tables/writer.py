"""Writing rows and deletions of a table: columns to record batches, bucket by bucket.

Rules:

- Batches of one bucket go out in order, a few at a time, under an idempotent producer: what is tried again is
  never written twice.
- What a call has written is durable when it returns, and ``written`` knows up to which offset, so that later
  reads can wait for it.
- A refused batch raises, with the server's words. Rows of the same call that were sent before it stay
  written: a call is not a transaction.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import pyarrow as pa

from tidemill.client.cluster import Cluster, check
from tidemill.client.connection import Versions
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError
from tidemill.records.columns import build_batch_columns, split_by_bytes
from tidemill.tables.definition import TableDefinition
from tidemill.tables.partition_values import partition_texts

__all__ = ("PreparedRows", "TableWriter", "prepare_deletes", "prepare_upserts")

# Newer versions name topics by id only.
_PRODUCE_VERSIONS: Final[Versions] = (3, 12)
_ACKS_ALL: Final = -1
_BATCH_BYTES: Final = 384 * 1024
_SIZE_PROPERTIES: Final = ("max.message.bytes", "segment.bytes", "internal.segment.bytes")
#: Batches of one bucket under way. The server remembers the last five of a producer.
_WINDOW: Final = 4
_SEQUENCE_MODULUS: Final = 2**31
_ROWS_AT_ONCE: Final = 32_768


_Parts = dict[tuple[str | None, int], tuple[pa.BinaryArray | None, pa.BinaryArray]]
"""Records for some buckets: (partition value, bucket) → keys and values."""


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """Records by bucket, how many they are, and how large a batch of them may be."""

    parts: _Parts
    rows: int
    batch_bytes: int


@dataclass(slots=True)
class _Lane:
    """One bucket: its topic partition, and the producer that writes it."""

    topic: str
    index: int
    producer_id: int = -1
    epoch: int = -1
    next_sequence: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(slots=True)
class _Encoded:
    data: bytes
    count: int


class _OutOfOrder(ApiError):
    """A batch is missing in front of this one."""


class _ProducerForgotten(Exception):
    """The server does not know this producer's last batch any more, as after a day without writes."""


def prepare_upserts(table: TableDefinition, rows: pa.Table) -> list[PreparedRows]:
    """Rows, in exactly the table's schema, as records by bucket."""
    prepared = []
    for batch in rows.combine_chunks().to_batches(max_chunksize=_ROWS_AT_ONCE):
        values = table.format.from_batch(batch)
        texts = (
            None if table.partition_column is None else partition_texts(batch.column(table.partition_column))
        )
        keys = buckets = None
        if table.has_primary_key:
            columns = table.key_columns(batch)
            keys = table.keys.canonical(columns)
            buckets = table.bucket_map.route(keys, table.keys.state_keys(columns))
        else:
            # Without a key any bucket is right: in turn, so that all get their share.
            buckets = np.arange(batch.num_rows) * table.buckets // max(batch.num_rows, 1)
        parts = _by_bucket(keys, values, buckets, texts)
        prepared.append(PreparedRows(parts, batch.num_rows, _batch_bytes(table)))
    return prepared


def prepare_deletes(table: TableDefinition, key_columns: Sequence[pa.Array]) -> PreparedRows:
    """Deletions of the rows with these keys."""
    keys = table.keys.canonical(key_columns)
    buckets = table.bucket_map.route(keys, table.keys.state_keys(key_columns))
    texts = None
    if table.partition_column is not None:
        texts = partition_texts(key_columns[table.primary_key.index(table.partition_column)])
    values = pa.nulls(len(keys), pa.binary())
    return PreparedRows(_by_bucket(keys, values, buckets, texts), len(keys), _batch_bytes(table))


def _batch_bytes(table: TableDefinition) -> int:
    """How large a batch may be: topics can be set to take less than usual."""
    limits = [table.properties.get(name) for name in _SIZE_PROPERTIES]
    return min([_BATCH_BYTES, *(int(limit) for limit in limits if limit is not None and limit.isdecimal())])


def _by_bucket(
    keys: pa.BinaryArray | None, values: pa.BinaryArray, buckets: Any, texts: pa.StringArray | None
) -> _Parts:
    parts = _Parts()
    for value, places in _places_by_partition(texts, len(values)):
        chosen = buckets if places is None else buckets[places]
        for bucket in np.unique(chosen).tolist():
            inside = np.flatnonzero(chosen == bucket)
            rows = inside if places is None else places[inside]
            if len(rows) == len(values):
                parts[value, bucket] = keys, values
            else:
                indexes = pa.array(rows)
                parts[value, bucket] = None if keys is None else keys.take(indexes), values.take(indexes)
    return parts


def _places_by_partition(texts: pa.StringArray | None, count: int) -> Any:
    if texts is None:
        if count:
            yield None, None
        return
    encoded = texts.dictionary_encode()
    codes = encoded.indices.to_numpy()
    for code, value in enumerate(encoded.dictionary.to_pylist()):
        yield value, np.flatnonzero(codes == code)


class TableWriter:
    """Writes one table through one cluster connection."""

    def __init__(self, cluster: Cluster, *, delivery_timeout_ms: int = 120_000) -> None:
        self._cluster = cluster
        self._delivery_timeout_ms = delivery_timeout_ms
        self._lanes: dict[tuple[str, int], _Lane] = {}

    async def write(
        self,
        topic_of: Callable[[str | None], Awaitable[str]],
        rows: PreparedRows,
        renew: Callable[[], Awaitable[None]],
    ) -> dict[tuple[str, int], int]:
        """Send records and wait until they are durable; gives the offset behind the last of each bucket.

        ``renew`` is awaited when a topic is gone: then ``topic_of`` is asked again, once.
        """
        offsets, gone = await self._write_parts(topic_of, rows.parts, rows.batch_bytes)
        if gone:
            self._cluster.forget()
            await renew()
            more, gone = await self._write_parts(topic_of, gone, rows.batch_bytes)
            offsets |= more
        if gone:
            raise ApiError(
                ErrorCode.unknown_topic_or_partition,
                f"{sum(len(values) for _, values in gone.values())} rows were not written: their partition "
                "is being dropped again and again",
            )
        return offsets

    async def _write_parts(
        self, topic_of: Callable[[str | None], Awaitable[str]], parts: _Parts, batch_bytes: int
    ) -> tuple[dict[tuple[str, int], int], _Parts]:
        """The offsets of the parts that were written, and the parts whose topics are gone."""
        lanes = {place: self._lane(await topic_of(place[0]), place[1]) for place in parts}
        results = await asyncio.gather(
            *(self._write_lane(lanes[place], *parts[place], batch_bytes) for place in parts),
            return_exceptions=True,
        )
        offsets, gone, failure = dict[tuple[str, int], int](), _Parts(), None
        for place, result in zip(parts, results, strict=True):
            if isinstance(result, int):
                offsets[lanes[place].topic, place[1]] = result
            elif isinstance(result, ApiError) and result.code == ErrorCode.unknown_topic_or_partition:
                gone[place] = parts[place]
            else:
                failure = failure or result
        if failure is not None:
            raise failure
        return offsets, gone

    def forget(self, topic: str) -> None:
        """The topic is not the one that it was: begin anew in all its buckets."""
        for place in [place for place in self._lanes if place[0] == topic]:
            del self._lanes[place]

    def _lane(self, topic: str, bucket: int) -> _Lane:
        lane = self._lanes.get((topic, bucket))
        if lane is None:
            lane = self._lanes[topic, bucket] = _Lane(topic, bucket)
        return lane

    async def _write_lane(
        self, lane: _Lane, keys: pa.BinaryArray | None, values: pa.BinaryArray, batch_bytes: int
    ) -> int:
        """Send everything of one bucket, a window at a time."""
        pieces = split_by_bytes(keys, values, batch_bytes)
        behind = -1
        async with lane.turn:
            for first in range(0, len(pieces), _WINDOW):
                encode = partial(_encode_window, lane, keys, values, pieces[first : first + _WINDOW])
                try:
                    written = await self._write_window(lane, encode)
                except _ProducerForgotten:
                    lane.producer_id = -1
                    written = await self._write_window(lane, encode)
                behind = max(behind, written)
        return behind

    async def _write_window(self, lane: _Lane, encode: Callable[[], list[_Encoded]]) -> int:
        if lane.producer_id < 0:
            await self._identify(lane)
        window = await asyncio.to_thread(encode)
        try:
            behind = await self._send_window(lane, window)
        except BaseException:
            # What became of it may be unknown: go on under another producer, whose sequences start anew.
            lane.producer_id = -1
            raise
        lane.next_sequence = (lane.next_sequence + sum(each.count for each in window)) % _SEQUENCE_MODULUS
        return behind

    async def _identify(self, lane: _Lane) -> None:
        async def ask() -> Any:
            response = await self._cluster.to_any(
                "InitProducerId", {"transactional_id": None, "transaction_timeout": 60_000}
            )
            check(response.error_code, None, "asking for a producer id")
            return response

        response = await self._cluster.retrying(ask)
        lane.producer_id, lane.epoch, lane.next_sequence = response.producer_id, response.producer_epoch, 0

    async def _send_window(self, lane: _Lane, window: list[_Encoded]) -> int:
        """Send batches one behind the other, again from the first that failed, until all are durable."""
        left = list(window)
        behind, is_first = -1, lane.next_sequence > 0

        async def attempt() -> None:
            nonlocal behind, is_first
            (leader,) = await self._cluster.leaders([(lane.topic, lane.index)])
            connection = await self._cluster.connection(leader, purpose="produce")
            answers = await asyncio.gather(
                *(self._produce(connection, lane, each) for each in left), return_exceptions=True
            )
            if is_first and isinstance(answers[0], _OutOfOrder):
                # Nothing of this window was sent before, and all windows before it are written.
                raise _ProducerForgotten
            is_first = False
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
                behind = max(behind, answer)
                del left[0]

        await self._cluster.retrying(attempt, timeout_ms=self._delivery_timeout_ms)
        return behind

    async def _produce(self, connection: Any, lane: _Lane, encoded: _Encoded) -> int:
        body = {
            "transactional_id": None,
            "acks": _ACKS_ALL,
            "timeout": self._cluster.timeout_ms,
            "topic_data": [
                {"name": lane.topic, "partition_data": [{"index": lane.index, "records": encoded.data}]}
            ],
        }
        # The server gives up first, so that its answer can still arrive.
        response = await connection.request(
            "Produce", body, versions=_PRODUCE_VERSIONS, timeout_ms=self._cluster.timeout_ms + 5_000
        )
        ((result,),) = (entry.partition_responses for entry in response.responses)
        if result.error_code == ErrorCode.duplicate_sequence_number:
            return -1
        _check(result, f"writing to bucket {lane.index} of {lane.topic}")
        return int(result.base_offset) + encoded.count


def _check(result: Any, what: str) -> None:
    if result.error_code == ErrorCode.out_of_order_sequence_number:
        # A batch in front of this one has failed, and is about to be tried again.
        raise _OutOfOrder(
            ErrorCode.not_enough_replicas, f"{what}: a batch before this one is not written yet"
        )
    if result.error_code == ErrorCode.invalid_record:
        raise TableError(
            TableCode.row_refused, getattr(result, "error_message", None) or f"{what}: a row was refused"
        )
    check(result.error_code, getattr(result, "error_message", None), what)


def _encode_window(
    lane: _Lane, keys: pa.BinaryArray | None, values: pa.BinaryArray, pieces: Sequence[slice]
) -> list[_Encoded]:
    now_ms, sequence = time.time_ns() // 1_000_000, lane.next_sequence
    window = []
    for piece in pieces:
        count = piece.stop - piece.start
        data = build_batch_columns(
            None if keys is None else keys[piece],
            values[piece],
            timestamp_ms=now_ms,
            producer_id=lane.producer_id,
            producer_epoch=lane.epoch,
            base_sequence=sequence,
        )
        sequence = (sequence + count) % _SEQUENCE_MODULUS
        window.append(_Encoded(data, count))
    return window
