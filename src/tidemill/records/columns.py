"""Record batches to and from columns: what the code for tables uses instead of one object for each record.

batch ── read_columns ──► RecordColumns ── keys(), values() ──► Arrow
batch ◄── build_batch_columns ── split_by_bytes ──────────────── Arrow
"""

from __future__ import annotations

from tidemill.records.columns_build import build_batch_columns, encode_headers, split_by_bytes
from tidemill.records.columns_read import RecordColumns, read_columns

__all__ = ("RecordColumns", "build_batch_columns", "encode_headers", "read_columns", "split_by_bytes")
