"""The module by which Spark finds ``format("tidemill")`` without any registration.

Spark looks for top-level modules whose names begin with ``pyspark_`` and takes the class ``DefaultSource`` of
each. It imports them in every session that uses any Python data source, so that this one loads little.
"""

from tidemill.spark.data_source import TidemillSource as DefaultSource

__all__ = ("DefaultSource",)
