"""What was paid, by region: computed from the whole history whenever the pipeline runs."""

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()


@dp.materialized_view
def revenue_by_region() -> DataFrame:
    """Orders and revenue of every region."""
    paid = spark.read.table("order_history").where(f.col("status") == "paid")
    return paid.groupBy("region").agg(f.count("*").alias("orders"), f.sum("amount").alias("revenue"))
