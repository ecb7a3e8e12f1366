"""``tidemill pipeline``: Spark's declarative pipelines."""
