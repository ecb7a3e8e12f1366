"""Rows and records written through an attempt as Spark's writers do it, in one call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from tidemill.client.cluster import Cluster
from tidemill.client.producing.attempts import Attempt
from tidemill.client.producing.topic_rows import records_by_partition
from tidemill.client.tables.rows_in import as_tables
from tidemill.client.tables.table import AsyncTable
from tidemill.client.tables.writer import prepare_deletes, prepare_upserts

__all__ = ("delete_keys", "write_records", "write_rows")


async def write_rows(attempt: Attempt, table: AsyncTable, rows: Any) -> int:
    """Upsert rows, or append them to a table without a primary key; gives their number."""
    done = 0
    for piece in as_tables(rows, table.schema):
        for prepared in await asyncio.to_thread(prepare_upserts, table.definition, piece):
            await attempt.send_rows(table, prepared)
            done += prepared.rows
    return done


async def delete_keys(attempt: Attempt, table: AsyncTable, key_columns: Sequence[pa.Array]) -> int:
    """Delete the rows with these keys; gives their number."""
    prepared = prepare_deletes(table.definition, key_columns)
    await attempt.send_rows(table, prepared)
    return prepared.rows


async def write_records(
    attempt: Attempt, cluster: Cluster, topic: str, values: Any, *, turn: int = 0, **columns: Any
) -> int:
    """Append records, given as columns, to a topic; gives their number."""
    count = len((await cluster.topic(topic)).partitions)
    given = {"partition": None, "keys": None, "timestamps_ms": None, "headers": None} | columns
    await attempt.send_records(topic, records_by_partition(topic, count, turn, values=values, **given))
    return len(values)
