"""Order events come in as a stream: they are kept as history, and the latest of every order in a table."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

spark = SparkSession.active()
SERVERS = str(spark.conf.get("spark.tidemill.servers"))


@dp.temporary_view
def order_events() -> DataFrame:
    """The order events as a stream. Each flow that reads it goes on where its last run ended."""
    return (
        spark.readStream.format("tidemill")
        .option("servers", SERVERS)
        .option("startingOffsets", "earliest")
        .load("shop.order_events")
    )


@dp.table
def order_history() -> DataFrame:
    """Every event, once, in Spark's own table."""
    return spark.readStream.table("order_events")


dp.create_sink("latest_orders", format="tidemill", options={"servers": SERVERS, "table": "shop.orders"})


@dp.append_flow(target="latest_orders")
def keep_latest_orders() -> DataFrame:
    """Upserts by the table's primary key, exactly once; events of one order stay in their order."""
    return spark.readStream.table("order_events")
