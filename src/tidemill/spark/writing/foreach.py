"""Exactly-once writes inside ``foreachBatch``.

That is the way for output modes that Spark keeps from sinks in Python: update mode above all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from pyspark.errors import PySparkException

from tidemill.spark.errors import InvalidOption

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ("QUERY_PROPERTY", "each_batch")

#: Where Spark says which query a task or a thread works for.
QUERY_PROPERTY: Final = "sql.streaming.queryId"


def each_batch(target: str | None = None, **options: object) -> Callable[[DataFrame, int], None]:
    """A function for ``foreachBatch`` that writes every batch of a query once to a table or topic::

        totals.writeStream.outputMode("update").foreachBatch(each_batch("shop.totals", servers="host:9092"))

    ``options`` are those of a batch write. A batch that Spark runs again is recognised by the query and its
    number; a query that writes several frames to one target tells them apart with ``txnAppId``.
    """

    def write(frame: DataFrame, batch: int) -> None:
        given = {name: _text(value) for name, value in options.items()}
        app_id = given.pop("txnAppId", None)
        query = _query_of(frame)
        if query is None and app_id is None:
            raise InvalidOption(
                "Spark does not say which query this is, as over Spark Connect: give each_batch a txnAppId, "
                "a name that no other query has"
            )
        name = ":".join(part for part in (query, app_id) if part is not None)
        writer = frame.write.format("tidemill").mode("append")
        writer.options(**given).option("txnAppId", name).option("txnVersion", str(batch)).save(target)

    return write


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _query_of(frame: DataFrame) -> str | None:
    try:
        return frame.sparkSession.sparkContext.getLocalProperty(QUERY_PROPERTY)
    except PySparkException:
        return None
