"""Spark's data source ``tidemill``: makes readers and writers of topics and tables.

Everything is imported where it is needed: Spark loads this module in sessions that never use it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceReader,
        DataSourceStreamReader,
        DataSourceStreamWriter,
        DataSourceWriter,
    )
    from pyspark.sql.types import StructType

__all__ = ("TidemillSource",)


class TidemillSource(DataSource):
    """Spark's data source ``tidemill``.

    ``spark.read.format("tidemill").option("servers", "host:9092").load("shop.orders")`` reads a table.
    """

    @classmethod
    def name(cls) -> str:
        return "tidemill"

    def schema(self) -> StructType:
        from tidemill.spark.reading.source import open_source

        return open_source(self.options, patient=False).spark_schema

    def reader(self, schema: StructType) -> DataSourceReader:
        from tidemill.spark.reading.reader import TidemillReader
        from tidemill.spark.reading.source import open_source

        return TidemillReader(open_source(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from tidemill.spark.reading.source import open_source
        from tidemill.spark.reading.stream_reader import TidemillStreamReader

        return TidemillStreamReader(open_source(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from tidemill.spark.writing.writers import make_writer

        return make_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from tidemill.spark.writing.writers import make_stream_writer

        return make_stream_writer(self.options, schema, overwrite)
