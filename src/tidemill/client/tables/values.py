"""Plain values that a table's methods return: writes, pins, statistics, snapshots, leases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tidemill.tables.definition import TableDefinition

__all__ = (
    "DELETE",
    "INSERT",
    "SNAPSHOT",
    "UPSERT",
    "AnyLease",
    "BucketStats",
    "Lease",
    "PinnedTable",
    "Snapshot",
    "Written",
    "lease_from",
)

#: Operations: what happened to a row.
SNAPSHOT = "snapshot"
UPSERT = "upsert"
DELETE = "delete"
INSERT = "insert"


@dataclass(frozen=True, slots=True)
class Written:
    """The result of a write: the number of records, and the offset after the last one of each bucket."""

    rows: int
    offsets: Mapping[tuple[str, int], int]


@dataclass(frozen=True, slots=True)
class PinnedTable:
    """A pin of a table's state: its id, and the log offset of each bucket by topic and number.

    ``log_epochs`` has the leader epoch of the record right below each offset; -1 if it is not known.

    It ends when nobody has used it for ``idle_ms``. Each of ``nodes`` has the buckets that it leads, as of a
    moment of its own, under the same id.
    """

    pin_id: str
    log_offsets: Mapping[tuple[str, int], int]
    idle_ms: int
    nodes: tuple[int, ...] = ()
    log_epochs: Mapping[tuple[str, int], int] = field(default_factory=dict)


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
    """A lease of snapshots until ``expires_at_ms``. ``log_offsets`` says where later changes start."""

    lease_id: str
    table: str
    holder: str
    expires_at_ms: int
    snapshots: Mapping[tuple[str, int], int]
    log_offsets: Mapping[tuple[str, int], int]


class AnyLease(Protocol):
    """A lease: ``Lease``, or the object whose block keeps one."""

    @property
    def lease_id(self) -> str:
        """The id of the lease."""
        raise NotImplementedError


def lease_from(lease: Any, definition: TableDefinition | None) -> Lease:
    """The lease in an answer of the server."""
    topics = {} if definition is None else {each.id: each.topic for each in definition.partitions}
    by_bucket = {(topics.get(each.partition_id, lease.table), each.bucket): each for each in lease.snapshots}
    return Lease(
        lease.lease_id,
        lease.table,
        lease.holder,
        lease.expires_at_ms,
        {bucket: each.snapshot_id for bucket, each in by_bucket.items()},
        {bucket: each.log_offset for bucket, each in by_bucket.items()},
    )
