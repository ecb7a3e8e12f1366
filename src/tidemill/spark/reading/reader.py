"""Planning a batch read on the driver: which task reads what.

A table's rows are read through one pin, so that all tasks see one moment; it ends when no task has used it
for ``pinIdle``. Logs are read between offsets that are fixed at the same time. Spark plans a DataFrame once,
when it is first used, and keeps the plan: whatever is made of one ``load`` sees one moment.

That is also why filters are only taken from Spark on request: Spark 4.3 keeps the plan of the last filter for
every other use of the same DataFrame, so that ``df.count()`` after ``df.where(...).count()`` counts what the
filter left. The option ``where`` filters on the server without that.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition

from tidemill.client.tables.bucket_scanner import BucketScan
from tidemill.spark.errors import InvalidOption
from tidemill.spark.reading.advancing import split_ranges
from tidemill.spark.reading.edges import checked_start, committed_ends, log_starts, resolve
from tidemill.spark.reading.options import Edge
from tidemill.spark.reading.positions import LogRange
from tidemill.spark.reading.schemas import requested_schema
from tidemill.spark.reading.source import Source
from tidemill.spark.reading.tasks import BucketTask, LogTask, read_task, split_scans

if TYPE_CHECKING:
    from pyspark.sql.datasource import Filter
    from pyspark.sql.types import StructType

    from tidemill.tables.predicates.predicate import Predicate

__all__ = ("TidemillReader",)


class TidemillReader(DataSourceReader):
    """Spark's batch reader of a ``Source``. It is sent to the tasks, so it holds plain values only."""

    def __init__(self, source: Source, schema: StructType) -> None:
        self._source = source
        self._schema = requested_schema(schema, source.schema, source.name)
        _refuse_options_of_streams(source)
        self._predicate = None if source.options.where is None else _parsed(source.options.where)

    @property
    def pushFilters(self) -> _PushFilters:
        return _PushFilters(self)

    def push(self, filters: list[Filter]) -> Iterable[Filter]:
        """Let the server check what it can, if that was asked for; Spark checks all of it again."""
        if self._source.shape == "rows" and self._source.options.push_filters:
            from tidemill.spark.reading.filters import to_predicate
            from tidemill.tables.predicates.predicate import all_of

            table = self._source.connected().run(self._source.opened())
            pushed = to_predicate(filters, table.schema)
            if pushed is not None:
                self._predicate = pushed if self._predicate is None else all_of([self._predicate, pushed])
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        link = self._source.connected()
        if self._source.shape == "rows":
            return link.run(self._bucket_tasks())
        return link.run(self._log_tasks())

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_task(self._source, self._schema, partition)

    # --- a table's rows

    async def _bucket_tasks(self) -> list[InputPartition]:
        source = self._source
        table = await source.opened()
        definition, predicate, start, end = table.definition, None, None, None
        if self._predicate is not None:
            # Imported late: most queries have no filter.
            from tidemill.client.tables.arguments import key_bounds
            from tidemill.tables.predicates.predicate import encode

            start, end = key_bounds(definition, self._predicate)
            predicate = encode(self._predicate)
        pin = await table.pin(idle_ms=source.options.pin_idle_ms)
        numbers = set(definition.bucket_map.buckets_for_range(start or b"", end))
        scans = [
            BucketScan(
                table_id=definition.table_id,
                partition_id=partition.id,
                topic=partition.topic,
                bucket=bucket,
                pin_id=pin.pin_id,
                columns=tuple(table.schema.names),
                predicate=predicate,
                start_key=start,
                end_key=end,
            )
            # Read after the pin was made: the pin may hold a table partition that was added meanwhile.
            for partition in table.definition.partitions
            for bucket in sorted(numbers)
            if (partition.topic, bucket) in pin.log_offsets
        ]
        scans = await split_scans(table, scans, source.options.min_partitions)
        return [BucketTask(scan) for scan in scans]

    # --- logs

    async def _log_tasks(self) -> list[InputPartition]:
        source = self._source
        cluster, options, partitions = source.connected().cluster, source.options, await source.partitions()
        now_ms = time.time_ns() // 1_000_000
        starts = await resolve(cluster, partitions, options.start or Edge("earliest"), now_ms)
        ends = await resolve(cluster, partitions, options.end or Edge("latest"), now_ms)
        first, last = await log_starts(cluster, partitions), await committed_ends(cluster, partitions)
        fail = options.fail_on_data_loss
        ranges = []
        for partition in partitions:
            start = checked_start(partition, starts[partition], first[partition], last[partition], fail=fail)
            end = min(ends[partition], last[partition])
            if end > start:
                ranges.append(LogRange(*partition, start, end))
        return [LogTask(part) for part in split_ranges(ranges, options.min_partitions)]


def _parsed(where: str) -> Predicate:
    # Imported late: the parser takes a tenth of a second to load, in every one of Spark's processes.
    from tidemill.tables.predicates.sql import parse_sql

    return parse_sql(where)


class _PushFilters:
    """The method ``pushFilters``: it can be called, but Spark takes it for not implemented.

    Spark fails the reads of a reader that implements it unless ``spark.sql.python.filterPushdown.enabled`` is
    set, and calls it without looking if that is set. So a session without that setting can read, too.
    """

    def __init__(self, reader: TidemillReader) -> None:
        self._reader = reader
        self.__func__ = DataSourceReader.pushFilters

    def __call__(self, filters: list[Any]) -> Iterable[Any]:
        return self._reader.push(filters)


def _refuse_options_of_streams(source: Source) -> None:
    options = source.options
    if options.where is not None and source.shape != "rows":
        raise InvalidOption(
            f"option where is for rows of tables with a primary key; filter {source.name} with .where(...)"
        )
    if source.shape == "rows" and (options.start is not None or options.end is not None):
        raise InvalidOption(
            f"the rows of {source.name} are read as they are now, without starting or ending offsets; set "
            "option "
            "changes to read its changes between two points"
        )
    if options.start is not None and options.start.kind == "snapshot":
        raise InvalidOption(
            "startingOffsets=snapshot is for streams; leave option changes out to read the rows"
        )
