"""Tidemill's topics and tables as DataFrames and streams: ``format("tidemill")``.

``session`` gives a Spark session that has what the connector needs. With a session of your own everything
works as well; only the option ``pushFilters`` needs ``spark.sql.python.filterPushdown.enabled``.

| module | idea |
| --- | --- |
| ``source`` | what Spark finds: which reader and writer an option asks for |
| ``options`` | the options of reading, checked |
| ``schemas``, ``filters`` | Arrow's types and Spark's; Spark's filters as predicates |
| ``positions``, ``advancing`` | pure: what a stream's offset says, and how far the next batch goes |
| ``batch_reading``, ``streaming`` | planning on the driver |
| ``tasks``, ``batches``, ``decoding``, ``splits`` | reading in tasks, and how tasks are cut |
| ``writing``, ``foreach`` | exactly-once writers, and their use in ``foreachBatch`` |
| ``write_options``, ``write_schemas``, ``write_targets``, ``write_rows`` | what they write, and how |
| ``connection``, ``sessions`` | the way to the nodes, and to Spark |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.spark.foreach import each_batch
    from tidemill.spark.sessions import session

__all__ = ("each_batch", "session")


def __getattr__(name: str) -> Any:
    # Late: Spark imports this package in processes that never need a session.
    if name == "session":
        from tidemill.spark.sessions import session

        return session
    if name == "each_batch":
        from tidemill.spark.foreach import each_batch

        return each_batch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
