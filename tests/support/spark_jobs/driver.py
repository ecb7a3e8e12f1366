"""A Spark driver that takes calls: copies of numbers from a topic to topics and tables, until it is killed.

The rows of the story: a record of the source topic has a number as its value. A topic gets every number; a
table gets an upsert or a deletion of a key that comes again a thousand numbers later, so that what is written
late, twice or not at all shows in its rows.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, lit, when

from support.spark_jobs.points import Points
from support.spark_jobs.watched import WatchedSource
from system.clients.worker import BOOTSTRAP, scenario, serve
from tidemill.spark import session

KEYS = 1_000
DELETED_EVERY = 11
DELETED_REST = 3

running: dict[str, Any] = {}


class Writing(threading.Thread):
    """A batch write that the driver's main thread does not wait for."""

    def __init__(self, writer: Any, points: Points) -> None:
        super().__init__(daemon=True)
        self._writer = writer
        self._points = points
        self._session = spark()
        self.failure: str | None = None

    def run(self) -> None:
        # Sources are registered with a session, and a thread of Java's has none by itself.
        java: Any = self._session._jvm
        java.SparkSession.setActiveSession(self._session._jsparkSession)
        try:
            self._writer.save()
        except Exception as error:
            self.failure = str(error)
            self._points.note("failed", -1, error=self.failure)


def spark() -> SparkSession:
    found = SparkSession.getActiveSession()
    assert found is not None, "call open first"
    return found


def numbers(source: str, **options: Any) -> DataFrame:
    reader = spark().readStream.format("tidemill").option("servers", BOOTSTRAP)
    for name, value in options.items():
        reader = reader.option(name, value)
    return reader.load(source).select(col("value").cast("string").cast("bigint").alias("number"))


def shaped(frame: DataFrame, target: str) -> DataFrame:
    """Records for a topic, rows for a table, which has a dot in its name."""
    number = col("number")
    if "." not in target:
        return frame.select(number.cast("string").alias("value"), (number % 2).cast("int").alias("partition"))
    deleted = number % DELETED_EVERY == DELETED_REST
    return frame.select(
        (number % KEYS).alias("id"),
        number,
        when(deleted, lit("delete")).otherwise(lit("upsert")).alias("_tidemill_op"),
    )


def watched(writer: Any, target: str, points: str, options: dict[str, Any]) -> Any:
    writer = writer.format("watched").option("servers", BOOTSTRAP).option("points", points)
    for name, value in options.items():
        writer = writer.option(name, value)
    return writer.option("table" if "." in target else "topic", target)


@scenario
def open_session(folder: str, conf: dict[str, str], master: str) -> None:
    """A session whose driver, and all that it starts, works in ``folder``."""
    os.chdir(folder)
    small = {
        "spark.driver.memory": "512m",
        # A session that lives for seconds only: what makes Java start fast.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
        "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote",
    }
    session("exactly once", master=master, conf=small | conf).dataSource.register(WatchedSource)


@scenario
def copy(source: str, target: str, checkpoint: str, points: str, reading: dict[str, Any]) -> None:
    """Begin to copy all numbers that are there, in a streaming query."""
    rows = shaped(numbers(source, **reading), target)
    writer = watched(rows.writeStream, target, points, {})
    running[target] = (
        writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).queryName(target).start()
    )


@scenario
def copy_to_both(
    source: str, targets: list[str], checkpoint: str, points: str, reading: dict[str, Any], app: str
) -> None:
    """The same to two targets in ``foreachBatch``, with a point between them."""

    def both(frame: DataFrame, batch: int) -> None:
        once = {"txnAppId": app, "txnVersion": batch}
        first, second = targets
        watched(shaped(frame, first).write, first, f"{points}/first", once).mode("append").save()
        Points(Path(points)).reach("between", batch)
        watched(shaped(frame, second).write, second, f"{points}/second", once).mode("append").save()

    writer = numbers(source, **reading).writeStream.foreachBatch(both)
    running[app] = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()


@scenario
def write(name: str, target: str, points: str, first: int, end: int, options: dict[str, Any]) -> None:
    """Begin a batch write of these numbers, in two tasks."""
    rows = shaped(spark().range(first, end, 1, 2).withColumnRenamed("id", "number"), target)
    running[name] = Writing(watched(rows.write, target, points, options).mode("append"), Points(Path(points)))
    running[name].start()


@scenario
def stream_and_read(topic: str, table: str, folder: str) -> dict[str, Any]:
    """A stream to a table, as users write it, a batch read of it, and what workers see of a folder."""
    query = (
        spark()
        .readStream.format("tidemill")
        .options(servers=BOOTSTRAP, startingOffsets="earliest", minPartitions=4)
        .load(topic)
        .selectExpr("cast(cast(value as string) as bigint) as id", "offset", "partition")
        .writeStream.format("tidemill")
        .options(servers=BOOTSTRAP, checkpointLocation=f"{folder}/checkpoint")
        .trigger(availableNow=True)
        .start(table)
    )
    query.awaitTermination()
    found = spark().read.format("tidemill").options(servers=BOOTSTRAP, where="id >= 100").load(table)
    return {
        "count": found.count(),
        "sum": found.agg({"id": "sum"}).collect()[0][0],
        "driver": os.getpid(),
        "workers": found.rdd.mapPartitions(lambda _: [(os.getppid(), os.listdir(folder))]).collect(),
        "folder": os.listdir(folder),
    }


@scenario
def finish(name: str) -> dict[str, Any]:
    """Wait for the end; the error in words, or None. Of a stream also the numbers of its batches."""
    work = running.pop(name)
    if isinstance(work, Writing):
        work.join()
        return {"failure": work.failure}
    try:
        work.awaitTermination()
    except Exception as error:
        return {"failure": str(error), "batches": _batches(work)}
    return {"failure": None, "batches": _batches(work)}


def _batches(query: Any) -> list[int]:
    return [each.batchId for each in query.recentProgress]


serve()
