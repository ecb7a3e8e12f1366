"""What Spark finds under the name ``tidemill``: readers and writers of topics and tables.

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
    """``spark.read.format("tidemill").option("servers", "host:9092").load("shop.orders")``."""

    @classmethod
    def name(cls) -> str:
        return "tidemill"

    def schema(self) -> StructType:
        from tidemill.spark.reading import open_source

        return open_source(self.options, patient=False).spark_schema

    def reader(self, schema: StructType) -> DataSourceReader:
        from tidemill.spark.batch_reading import TidemillReader
        from tidemill.spark.reading import open_source

        return TidemillReader(open_source(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from tidemill.spark.reading import open_source
        from tidemill.spark.streaming import TidemillStreamReader

        return TidemillStreamReader(open_source(self.options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from tidemill.spark.writing import make_writer

        return make_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from tidemill.spark.writing import make_stream_writer

        return make_stream_writer(self.options, schema, overwrite)
