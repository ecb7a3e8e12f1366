"""Ranges of keys instead of whole buckets, where more tasks are wanted than there are buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from tidemill.client.splitting import split_bucket
from tidemill.client.tables.scanner import BucketScan

if TYPE_CHECKING:
    from tidemill.client.tables.table import AsyncTable

__all__ = ("split_scans",)


async def split_scans(table: AsyncTable, scans: Sequence[BucketScan], min_parts: int) -> list[BucketScan]:
    """The same rows in about ``min_parts`` scans, or as they are if there are so many."""
    if not scans or len(scans) >= min_parts:
        return list(scans)
    rows = sum(each.row_count for each in await table.stats())
    max_rows = max(1, -(-rows // min_parts))
    parts = []
    for scan in scans:
        pieces = await split_bucket(table.cluster, scan, max_rows=max_rows)
        parts += [replace(scan, start_key=each.start_key, end_key=each.end_key) for each in pieces]
    return parts
