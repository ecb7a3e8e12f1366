"""Reading with Spark: batches and streams of topics and tables."""
