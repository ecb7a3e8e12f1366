"""What the tests on real Spark share."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidemill.spark import session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery

__all__ = (
    "EVERY_TYPE",
    "EVERY_VALUE",
    "local_session",
    "progress_of",
    "read",
    "run_available",
    "source_progress",
    "stream",
)


#: A column of every type, and a value of each.
EVERY_TYPE = (
    "id bigint, b boolean, i1 tinyint, i2 smallint, i4 int, f float, d double, s string, bi binary, dt date, "
    "de decimal(10,2), ts timestamp, tn timestamp_ntz, l array<string>, m map<string,bigint>, "
    "st struct<x:int,y:array<double>>"
)
EVERY_VALUE: dict[str, Any] = {
    "id": 1,
    "b": True,
    "i1": -1,
    "i2": 300,
    "i4": -70_000,
    "f": 0.5,
    "d": 1e300,
    "s": "ä",
    "bi": b"\x00\xff",
    "dt": datetime(2026, 2, 28, tzinfo=UTC).date(),
    "de": Decimal("12345678.90"),
    "ts": datetime(2026, 2, 28, 12, 30, 0, 123456, tzinfo=UTC),
    "tn": datetime(2026, 2, 28, 12, 30),  # noqa: DTZ001
    "l": ["a", None],
    "m": {"k": 5},
    "st": {"x": 1, "y": [0.25]},
}


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
    loaded: DataFrame = _with_options(spark.read, servers, options).load(name)
    return loaded


def stream(spark: SparkSession, servers: str, name: str | None = None, **options: object) -> DataFrame:
    """``spark.readStream`` of a table or a topic."""
    loaded: DataFrame = _with_options(spark.readStream, servers, options).load(name)
    return loaded


def _with_options(reader: Any, servers: str, options: Mapping[str, object]) -> Any:
    reader = reader.format("tidemill").option("servers", servers)
    for key, value in options.items():
        reader = reader.option(key, value if isinstance(value, bool | int) else str(value))
    return reader


def run_available(query: Any, checkpoint: Path) -> StreamingQuery:
    """Run a ``writeStream`` until everything that is there now has been processed."""
    writer = query.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True)
    started: StreamingQuery = writer.start()
    started.awaitTermination()
    return started


def progress_of(query: StreamingQuery) -> list[dict[str, Any]]:
    """The batches that had something to do, as Spark reports them."""
    return [json.loads(each.json) for each in query.recentProgress]


def source_progress(query: StreamingQuery) -> dict[str, Any]:
    """What the last batch says about its source."""
    sources: list[dict[str, Any]] = progress_of(query)[-1]["sources"]
    (found,) = sources
    return found
