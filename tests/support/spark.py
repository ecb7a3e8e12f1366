"""What the tests on real Spark share."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.spark import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

__all__ = ("local_session", "progress_of", "read", "run_available", "source_progress", "stream")


@contextlib.contextmanager
def local_session(directory: Path, master: str = "local[2]", **conf: str) -> Iterator[SparkSession]:
    """A session whose files are all below ``directory``."""
    settings = {
        "spark.sql.warehouse.dir": str(directory / "warehouse"),
        "spark.local.dir": str(directory / "local"),
        "spark.sql.streaming.checkpointLocation": str(directory / "checkpoints"),
        "spark.driver.memory": "1g",
        "spark.sql.shuffle.partitions": "2",
    }
    with warnings.catch_warnings():
        # PySpark leaves its sockets to the garbage collector.
        warnings.simplefilter("ignore")
        spark = session("tests", master=master, conf=settings | conf)
        try:
            yield spark
        finally:
            spark.stop()


def read(spark: SparkSession, servers: str, name: str | None = None, **options: object) -> DataFrame:
    """``spark.read`` of a table or a topic."""
    return _with_options(spark.read, servers, options).load(name)


def stream(spark: SparkSession, servers: str, name: str | None = None, **options: object) -> DataFrame:
    """``spark.readStream`` of a table or a topic."""
    return _with_options(spark.readStream, servers, options).load(name)


def _with_options(reader: Any, servers: str, options: Mapping[str, object]) -> Any:
    reader = reader.format("tidemill").option("servers", servers)
    for key, value in options.items():
        reader = reader.option(key, value if isinstance(value, bool | int) else str(value))
    return reader


def run_available(query: Any, checkpoint: Path) -> StreamingQuery:
    """Run a ``writeStream`` until everything that is there now has been processed."""
    started = query.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    started.awaitTermination()
    return started


def progress_of(query: StreamingQuery) -> list[dict[str, Any]]:
    """The batches that had something to do, as Spark reports them."""
    return [json.loads(each.json) for each in query.recentProgress]


def source_progress(query: StreamingQuery) -> dict[str, Any]:
    """What the last batch says about its source."""
    (found,) = progress_of(query)[-1]["sources"]
    return found
