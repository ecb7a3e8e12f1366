"""The pipeline: one topic of events in, three results out, each by a streaming query of its own.

| result | what it is | how it stays right |
| --- | --- | --- |
| ``shop.orders`` | a table: every order as it is now | the highest version wins, whenever it comes |
| ``shop.revenue`` | a table: what was paid, by region and minute | a copy of a payment is not counted |
| ``shop.quarantine`` | a log: messages that nobody can read, and why | nothing is dropped in silence |

Every function takes a DataFrame and gives one, so each can be tried in a notebook on ``spark.read`` as well.
Tidemill writes each batch of a query exactly once: a query that is killed and started again goes on where it
was, with nothing lost and nothing twice.
"""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery

import tidemill
from tidemill.spark import each_batch

TOPIC, ORDERS, REVENUE, QUARANTINE = "shop.events", "shop.orders", "shop.revenue", "shop.quarantine"
TOPIC_PARTITIONS = 2

EVENT = """
    event_id string, kind string, order_id string, time timestamp, region string, amount decimal(10,2),
    status string, version int, unreadable string
"""
NEEDED = ("event_id", "order_id", "time", "region", "amount")
KINDS = ("order", "payment", "update")

TRIGGER = "2 seconds"
WATERMARK = "10 minutes"
"""How long Spark waits for late payments. The shop sends nothing later than five minutes after it happened,
and the three senders are less than a minute of the shop's time apart, so that no payment comes too late."""


def create_tables(db: tidemill.Tidemill) -> None:
    """Make the tables that the pipeline fills."""
    db.create_table(
        ORDERS,
        """order_id string, region string, status string, amount decimal(10,2), version int,
           updated_at timestamp, paid_at timestamp""",
        primary_key="order_id",
        buckets=2,
        comment="every order as it is now; cancelled ones are gone",
    )
    db.create_table(
        REVENUE,
        "region string, minute timestamp, payments bigint, revenue decimal(20,2)",
        primary_key=["region", "minute"],
        comment="what was paid, by region and minute",
    )
    db.create_table(
        QUARANTINE,
        "partition int, offset bigint, reason string, text string",
        comment="messages of shop.events that could not be read, and why",
    )


def parse(messages: DataFrame) -> DataFrame:
    """Kafka's messages as events. ``reason`` says what is wrong with a message, and is NULL if it is good."""
    text = f.make_valid_utf8(f.col("value").cast("string"))
    options = {"mode": "PERMISSIVE", "columnNameOfCorruptRecord": "unreadable"}
    parsed = messages.select(
        "partition", "offset", text.alias("text"), f.from_json(text, EVENT, options).alias("event")
    )
    return parsed.select("partition", "offset", "text", "event.*").withColumn("reason", _reason())


def _reason() -> Column:
    """The first rule that a message breaks."""
    is_order = f.col("kind") != "payment"
    rules = [
        (f.col("text").isNull(), "empty message"),
        # Of a message with a wrong field Spark gives the others; of one that is no JSON it gives nothing.
        (f.col("unreadable").isNotNull() & f.coalesce("event_id", "kind", "order_id").isNull(), "not JSON"),
        (f.col("unreadable").isNotNull(), "wrong type"),
        (f.col("kind").isNull() | ~f.col("kind").isin(*KINDS), "unknown kind"),
        *((f.col(name).isNull(), f"missing {name}") for name in NEEDED),
        *((is_order & f.col(name).isNull(), f"missing {name}") for name in ("status", "version")),
    ]
    return f.coalesce(*(f.when(broken, f.lit(reason)) for broken, reason in rules))


def good(events: DataFrame) -> DataFrame:
    """The events that can be used."""
    return events.where("reason IS NULL").drop("reason", "unreadable", "text")


def orders(events: DataFrame) -> DataFrame:
    """Every order that has changed, as it is now; cancelled ones are to be deleted.

    Events carry the whole order and its version. So the highest version is the order, in whatever sequence
    events come, and an event that comes twice changes nothing. A payment only says when it was paid.
    """
    order = f.struct("region", "status", "amount", "version", f.col("time").alias("updated_at"))
    latest = (
        good(events)
        .groupBy("order_id")
        .agg(
            f.max_by(order, "version").alias("latest"),
            f.max(f.when(f.col("kind") == "payment", f.col("time"))).alias("paid_at"),
        )
    )
    # A payment may come before its order: the row is written when the order is there.
    known = latest.where("latest IS NOT NULL").select("order_id", "latest.*", "paid_at")
    operation = f.when(f.col("status") == "cancelled", "delete").otherwise("upsert")
    return known.withColumn("_tidemill_op", operation)


def revenue(events: DataFrame) -> DataFrame:
    """What was paid, by region and minute: the minutes to which something was added.

    A copy of a payment has the time of the payment. Either Spark still remembers the first one, or the
    watermark has passed that time and the copy is too late to count: in both cases it is counted once.
    """
    payments = good(events).where("kind = 'payment'").withWatermark("time", WATERMARK)
    once = payments.dropDuplicatesWithinWatermark(["event_id"])
    minutes = once.groupBy("region", f.window("time", "1 minute").alias("window"))
    totals = minutes.agg(f.count("*").alias("payments"), f.sum("amount").alias("revenue"))
    return totals.select("region", f.col("window.start").alias("minute"), "payments", "revenue")


def quarantine(events: DataFrame) -> DataFrame:
    """Messages that could not be read: where they are in the topic, and why."""
    return events.where("reason IS NOT NULL").select("partition", "offset", "reason", "text")


def start(spark: SparkSession, servers: str, checkpoints: Path) -> dict[str, StreamingQuery]:
    """Start the three queries; by the name of what they fill."""

    def read(table: str) -> DataFrame:
        messages = spark.readStream.format("tidemill").option("servers", servers)
        # Under this name `tidemill group describe` shows how far the query is.
        return parse(messages.option("groupId", table).option("startingOffsets", "earliest").load(TOPIC))

    def query(rows: DataFrame, table: str, mode: str) -> DataStreamWriter:
        writer = rows.writeStream.queryName(table).outputMode(mode).trigger(processingTime=TRIGGER)
        return writer.option("checkpointLocation", str(checkpoints / table))

    def into(table: str, writer: DataStreamWriter) -> DataStreamWriter:
        return writer.format("tidemill").option("servers", servers).option("table", table)

    # Of the orders only those that have changed. Spark gives such updates to foreachBatch alone.
    changed = query(orders(read(ORDERS)), ORDERS, "update").foreachBatch(each_batch(ORDERS, servers=servers))
    # Of the revenue all minutes with every batch: they are few.
    minutes = into(REVENUE, query(revenue(read(REVENUE)), REVENUE, "complete"))
    broken = into(QUARANTINE, query(quarantine(read(QUARANTINE)), QUARANTINE, "append"))
    return {ORDERS: begun(changed), REVENUE: begun(minutes), QUARANTINE: begun(broken)}


def begun(writer: DataStreamWriter) -> StreamingQuery:
    """Start a query, and wait for its first batch, which is empty.

    One after the other: a cold Spark 4.3 has been seen to trip over two that begin at the same moment.
    """
    query = writer.start()
    while query.isActive and query.lastProgress is None:
        query.awaitTermination(0.1)  # type: ignore[arg-type]  # Parts of seconds are taken, too.
    return query
