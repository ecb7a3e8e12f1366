"""Tidemill's topics and tables as DataFrames and streams: ``format("tidemill")``.

``session`` gives a Spark session that has what the connector needs. With a session of your own everything
works as well; only the option ``pushFilters`` needs ``spark.sql.python.filterPushdown.enabled``.

| module | idea |
| --- | --- |
| ``data_source`` | what Spark finds: which reader and writer an option asks for |
| ``connection`` | one connection per process and address |
| ``sessions``, ``worker_python`` | a Spark session, and the Python that its processes run |
| ``reading.options``, ``reading.source`` | the options of reading, checked, and what they ask for |
| ``reading.schemas``, ``reading.filters`` | Arrow's types and Spark's; Spark's filters as predicates |
| ``reading.positions``, ``reading.advancing`` | pure: what a stream's offset says, how far a batch goes |
| ``reading.edges`` | where reading begins and ends, as offsets |
| ``reading.reader``, ``reading.stream_reader`` | planning on the driver |
| ``reading.tasks``, ``reading.decoding`` | reading in tasks |
| ``writing.writers``, ``writing.foreach`` | exactly-once writers, and their use in ``foreachBatch`` |
| ``writing.options``, ``writing.targets``, ``writing.schemas``, ``writing.rows`` | what they write, and how |
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tidemill.spark.sessions import session
    from tidemill.spark.writing.foreach import each_batch

__all__ = ("each_batch", "session")


def __getattr__(name: str) -> Any:
    # Late: Spark imports this package in processes that never need a session.
    if name == "session":
        from tidemill.spark.sessions import session

        return session
    if name == "each_batch":
        from tidemill.spark.writing.foreach import each_batch

        return each_batch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
