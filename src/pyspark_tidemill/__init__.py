"""What makes ``format("tidemill")`` work without registering it.

Spark looks for top-level modules whose names begin with ``pyspark_`` and takes the class ``DefaultSource`` of
each. It imports them in every session that uses any Python data source, so that this one loads little.
"""

from tidemill.spark.source import TidemillSource as DefaultSource

__all__ = ("DefaultSource",)
