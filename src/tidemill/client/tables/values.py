"""What tables tell about themselves: changes, writes, pins, numbers, snapshots and leases as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tidemill.tables.definition import TableDefinition

__all__ = (
    "DELETE",
    "INSERT",
    "SNAPSHOT",
    "UPSERT",
    "BucketStats",
    "Lease",
    "PinnedTable",
    "Snapshot",
    "Written",
    "lease_from",
)

#: What happened to a row.
SNAPSHOT = "snapshot"
UPSERT = "upsert"
DELETE = "delete"
INSERT = "insert"


@dataclass(frozen=True, slots=True)
class Written:
    """What a write did: how many records, and the offset behind the last one of each bucket."""

    rows: int
    offsets: Mapping[tuple[str, int], int]


@dataclass(frozen=True, slots=True)
class PinnedTable:
    """State held still on the server: its id, and the log offset of each bucket by topic and number.

    It ends when nobody has used it for ``idle_ms``.
    """

    pin_id: str
    log_offsets: Mapping[tuple[str, int], int]
    idle_ms: int


@dataclass(frozen=True, slots=True)
class BucketStats:
    """Numbers of one bucket. ``row_count`` is an estimate while the bucket is written to."""

    partition: str | None
    bucket: int
    row_count: int
    state_bytes: int
    log_start_offset: int
    log_end_offset: int
    applied_offset: int
    log_bytes: int
    snapshot_count: int
    snapshot_offset: int
    scanner_count: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A durable snapshot of one bucket. ``problem`` says why it cannot be used, if it cannot."""

    partition: str | None
    bucket: int
    snapshot_id: int
    log_offset: int
    created_ms: int
    size_bytes: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class Lease:
    """Snapshots that are kept until ``expires_at_ms``. ``log_offsets``: where changes go on behind them."""

    lease_id: str
    table: str
    holder: str
    expires_at_ms: int
    snapshots: Mapping[tuple[str, int], int]
    log_offsets: Mapping[tuple[str, int], int]


def lease_from(lease: Any, definition: TableDefinition | None) -> Lease:
    """The lease of an answer."""
    topics = {} if definition is None else {each.id: each.topic for each in definition.partitions}
    places = {(topics.get(each.partition_id, lease.table), each.bucket): each for each in lease.snapshots}
    return Lease(
        lease.lease_id,
        lease.table,
        lease.holder,
        lease.expires_at_ms,
        {place: each.snapshot_id for place, each in places.items()},
        {place: each.log_offset for place, each in places.items()},
    )
