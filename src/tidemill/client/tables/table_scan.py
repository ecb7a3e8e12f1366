"""A scan of a whole table: all buckets are pinned, and some of them read side by side.

Each node that leads buckets pins them at a moment of its own; the pins have one id.

Memory is bounded: each bucket that is read has one batch in hand and one on its way. The order of rows is
that of their keys within a bucket; rows of different buckets come as they arrive.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import pyarrow as pa

from tidemill.client.keeping import keep_alive
from tidemill.client.process_bound import Unpicklable, opening_of_table
from tidemill.client.tables.arguments import whole_number
from tidemill.client.tables.bucket_reading import LOST, LOST_MAX, BucketReading
from tidemill.client.tables.bucket_scanner import DEFAULT_FETCH_BYTES, BucketScan
from tidemill.errors import TableError, TidemillError
from tidemill.records.columns import compute as pc

if TYPE_CHECKING:
    from tidemill.client.tables.table import AsyncTable

__all__ = ("AsyncScan", "ScanOptions")

_T = TypeVar("_T")
_PARALLEL: Final = 4
_KEEP_ALIVE_SECONDS_MAX: Final = 60.0
_HEAD_ROWS: Final = 10
#: The width that text and bytes are taken to have when columns are compared.
_VARIABLE_WIDTH_BITS: Final = 256


@dataclass(frozen=True, slots=True)
class ScanOptions:
    """The options of a scan: which rows and columns it reads, and how."""

    columns: tuple[str, ...] = ()
    predicate: bytes | None = None
    start_key: bytes | None = None
    end_key: bytes | None = None
    limit: int | None = None
    lease_id: str | None = None
    fetch_max_bytes: int = DEFAULT_FETCH_BYTES
    parallel: int = _PARALLEL


class _Held(NamedTuple):
    """A scan's pin (None if a lease holds the state), its buckets, and how often to keep it alive.

    The buckets have the offsets of their logs, and the leader epochs below those as far as they are known.
    ``has_many_moments``: several nodes have pinned the buckets, each at a moment of its own.
    """

    pin_id: str | None
    offsets: Mapping[tuple[str, int], int]
    epochs: Mapping[tuple[str, int], int]
    keep_alive_seconds: float
    has_many_moments: bool


class AsyncScan(Unpicklable):
    """Rows of a table as of one moment: ``async for batch in scan``, or ``await scan.to_arrow()``.

    Each iteration is a new scan, of a new moment.
    """

    def __init__(self, table: AsyncTable, options: ScanOptions) -> None:
        self._table = table
        self._options = options
        self._offsets: dict[tuple[str, int], int] = {}

    @property
    def schema(self) -> pa.Schema:
        """The schema of the batches."""
        schema = self._table.schema
        columns = self._options.columns
        return pa.schema([schema.field(name) for name in columns]) if columns else schema

    @property
    def log_offsets(self) -> dict[tuple[str, int], int]:
        """The log offset that the last iteration's rows stand for, by topic and bucket."""
        return dict(self._offsets)

    def __repr__(self) -> str:
        options = self._options
        parts = [", ".join(self.schema.names)]
        if options.predicate is not None:
            from tidemill.tables.predicates.literals import shorten
            from tidemill.tables.predicates.predicate import decode

            parts.append(f"where {shorten(str(decode(options.predicate)))}")
        elif options.start_key is not None or options.end_key is not None:
            parts.append("in a range of keys")
        if options.limit is not None:
            parts.append(f"limit {options.limit}")
        if options.lease_id is not None:
            parts.append(f"of lease {options.lease_id}")
        return f"<scan of {self._table.name}: {'; '.join(parts)}>"

    def _instead_of_a_pickle(self) -> str:
        opening = opening_of_table(self._table.cluster.servers, self._table.name)
        return f"Send its rows, scan.to_arrow(), or scan there: {opening}.scan()"

    def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        return self.batches()

    async def to_arrow(self) -> pa.Table:
        """All rows as one Arrow table."""
        return pa.Table.from_batches(await self._again_if_lost(self._collected), self.schema)

    async def to_pandas(self) -> Any:
        """All rows as a pandas frame."""
        return (await self.to_arrow()).to_pandas()

    async def to_polars(self) -> Any:
        """All rows as a polars frame."""
        import polars as pl

        return pl.from_arrow(await self.to_arrow())

    async def count(self) -> int:
        """The exact number of rows. Only the narrowest column of the key is sent."""
        scan = AsyncScan(self._table, replace(self._options, columns=(self._narrowest_key_column(),)))
        return await scan._again_if_lost(scan._summed)

    async def head(self, n: int = _HEAD_ROWS) -> pa.Table:
        """The first ``n`` rows in the order of their keys, as one Arrow table."""
        n = whole_number("n", n, 0)
        limit = n if self._options.limit is None else min(n, self._options.limit)
        columns = dict.fromkeys((*self.schema.names, *self._table.primary_key))
        scan = AsyncScan(self._table, replace(self._options, columns=tuple(columns), limit=limit))
        return (await scan._again_if_lost(scan._first_by_key)).select(self.schema.names)

    async def _first_by_key(self) -> pa.Table:
        """The first rows, up to the limit, of all buckets together, each of which gives as many at most."""
        first, limit = self.schema.empty_table(), self._options.limit
        if limit == 0:
            return first
        definition = self._table.definition
        async with contextlib.aclosing(self._of_all_buckets()) as batches:
            async for batch in batches:
                together = pa.concat_tables([first, pa.Table.from_batches([batch])]).combine_chunks()
                keys = [together.column(name).combine_chunks() for name in definition.primary_key]
                order = pc.sort_indices(definition.keys.state_keys(keys))
                first = together.take(order[:limit])
        return first

    def _narrowest_key_column(self) -> str:
        schema = self._table.schema

        def width_bits(name: str) -> int:
            try:
                return int(schema.field(name).type.bit_width)
            except ValueError:
                return _VARIABLE_WIDTH_BITS

        return min(self._table.primary_key, key=width_bits)

    async def _summed(self) -> int:
        total = 0
        async for batch in self._limited():
            total += batch.num_rows
        return total

    async def batches(self) -> AsyncGenerator[pa.RecordBatch]:
        """The rows, some thousand at a time. Closing the iterator early closes everything on the server.

        It goes on when a node fails, if the rows that are still to come can be had; else it raises
        ``TableError``. In a cluster, a bucket of which no row was given yet is read as of a later moment.
        """
        given, lost_count = False, 0
        while True:
            try:
                async with contextlib.aclosing(self._limited(goes_on=True)) as batches:
                    async for batch in batches:
                        given = True
                        yield batch
                return
            except TableError as error:
                lost_count += 1
                if given or error.table_code not in LOST or lost_count > LOST_MAX:
                    raise

    async def _limited(self, *, goes_on: bool = False) -> AsyncGenerator[pa.RecordBatch]:
        """The rows up to the scan's limit."""
        options, self._offsets = self._options, {}
        left = options.limit
        if left == 0:
            return
        async with contextlib.aclosing(self._of_all_buckets(goes_on=goes_on)) as batches:
            async for batch in batches:
                if left is not None and batch.num_rows >= left:
                    yield batch.slice(0, left)
                    return
                if left is not None:
                    left -= batch.num_rows
                yield batch

    async def _of_all_buckets(self, *, goes_on: bool = False) -> AsyncGenerator[pa.RecordBatch]:
        """The rows of all buckets as of one moment; the limit holds for each bucket.

        ``goes_on``: if a node is lost, its buckets are read on elsewhere, once any row was given. Those that
        were not begun may be read as of a later moment, where the table has not one for all of them anyway.
        """
        async with self._held() as held:
            merged = self._merged(
                self._buckets(held),
                held.keep_alive_seconds,
                goes_on=goes_on,
                later=held.has_many_moments,
            )
            async with contextlib.aclosing(merged) as batches:
                async for batch in batches:
                    yield batch

    async def _collected(self) -> list[pa.RecordBatch]:
        return [batch async for batch in self._limited()]

    async def _again_if_lost(self, read: Callable[[], Awaitable[_T]]) -> _T:
        """Await ``read()``; start over if the server has lost the scan, as after a restart."""
        for _ in range(LOST_MAX):
            try:
                return await read()
            except TableError as error:
                if error.table_code not in LOST:
                    raise
        return await read()

    # --- parts

    @contextlib.asynccontextmanager
    async def _held(self) -> AsyncIterator[_Held]:
        """Pin the state of all buckets while a block runs, unless a lease holds it."""
        if self._options.lease_id is not None:
            lease = await self._table.held_by(self._options.lease_id)
            yield _Held(None, lease.log_offsets, {}, _KEEP_ALIVE_SECONDS_MAX, has_many_moments=False)
            return
        pin = await self._table.pin()
        pause_seconds = min(_KEEP_ALIVE_SECONDS_MAX, pin.idle_ms / 3000)
        keeping = partial(self._table.release_pin, pin.pin_id, keep_alive=True, nodes=pin.nodes)
        keeper = asyncio.get_running_loop().create_task(keep_alive(pause_seconds, keeping))
        self._offsets = dict(pin.log_offsets)
        try:
            has_many = len(pin.nodes) > 1
            yield _Held(pin.pin_id, pin.log_offsets, pin.log_epochs, pause_seconds, has_many)
        finally:
            keeper.cancel()
            with contextlib.suppress(TidemillError, OSError):
                await self._table.release_pin(pin.pin_id, nodes=pin.nodes)

    def _buckets(self, held: _Held) -> list[BucketScan]:
        definition, options = self._table.definition, self._options
        start, end = options.start_key or b"", options.end_key
        numbers = definition.bucket_map.buckets_for_range(start, end)
        return [
            BucketScan(
                table_id=definition.table_id,
                partition_id=partition.id,
                topic=partition.topic,
                bucket=bucket,
                pin_id=held.pin_id,
                lease_id=options.lease_id,
                limit=options.limit or 0,
                # All columns are named, too: the table may have more than the definition that this client
                # has.
                columns=options.columns or tuple(self._table.schema.names),
                predicate=options.predicate,
                start_key=options.start_key,
                end_key=options.end_key,
                log_offset=held.offsets[partition.topic, bucket],
                log_epoch=held.epochs.get((partition.topic, bucket), -1),
            )
            for partition in definition.partitions
            for bucket in numbers
            if (partition.topic, bucket) in held.offsets
        ]

    async def _merged(
        self, buckets: list[BucketScan], keep_alive_seconds: float, *, goes_on: bool, later: bool
    ) -> AsyncGenerator[pa.RecordBatch]:
        """Batches of all buckets as they come; the next bucket is opened when one is done."""
        waiting = list(reversed(buckets))
        running: dict[asyncio.Task[Any], BucketReading] = {}
        cluster, fetch_max_bytes = self._table.cluster, self._options.fetch_max_bytes
        loop, is_begun = asyncio.get_running_loop(), False

        def may_go_on() -> bool:
            # While nothing was given it is cheaper to start over, and nobody notices.
            return goes_on and is_begun

        keeper = loop.create_task(keep_alive(keep_alive_seconds, partial(_keep_all, running)))
        try:
            while waiting or running:
                while waiting and len(running) < self._options.parallel:
                    reading = BucketReading(
                        cluster, waiting.pop(), fetch_max_bytes, may_go_on=may_go_on, later=later
                    )
                    running[loop.create_task(reading.next_batch())] = reading
                done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    reading = running[task]
                    batch = task.result()
                    del running[task]
                    self._note_offset(reading)
                    if batch is not None:
                        running[loop.create_task(reading.next_batch())] = reading
                        is_begun = True
                        yield batch
        finally:
            keeper.cancel()
            for task in running:
                task.cancel()
            # Closed side by side: each of them may have to wait for the server once.
            await asyncio.gather(*running, return_exceptions=True)
            await asyncio.gather(*(each.close() for each in running.values()), return_exceptions=True)

    def _note_offset(self, reading: BucketReading) -> None:
        if reading.log_offset is not None:
            self._offsets[reading.topic_partition] = reading.log_offset


async def _keep_all(running: Mapping[asyncio.Task[Any], BucketReading]) -> None:
    """Tell the server that the scans are needed, however long the caller works on a batch."""
    for reading in list(running.values()):
        await reading.keep_alive()
