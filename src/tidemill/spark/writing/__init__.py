"""Writing with Spark: exactly once, into topics and tables."""
