"""What the control plane stores about databases, tables and leases of snapshots.

| key | record |
| --- | --- |
| ``databases/<name>`` | ``DatabaseRecord`` |
| ``tables/<name with '.' as '_'>`` | ``TableRecord`` |
| ``table-ids`` | ``TableIdsRecord`` |
| ``leases/<lease id>`` | ``LeaseRecord`` |

A table's log is a topic, or one topic for each partition, under the topic's own keys. The table's record
guards them: they come and go only together with a write of it. A table's key is spelt like a topic's, so that
two tables whose logs would collide have the same key.

Schemas (Arrow IPC) and bucket maps are bytes that this layer keeps and never reads.
"""

from __future__ import annotations

from uuid import UUID

import msgspec

from tidemill.control.records import Record, normalised_name

__all__ = (
    "TABLE_IDS_KEY",
    "UNPARTITIONED_ID",
    "DatabaseRecord",
    "LeaseRecord",
    "LeasedSnapshot",
    "TableIdsRecord",
    "TablePartition",
    "TableRecord",
    "database_key",
    "lease_key",
    "table_key",
)

TABLE_IDS_KEY = "table-ids"

UNPARTITIONED_ID = 0
"""Number of the one partition of a table that is not partitioned."""


class DatabaseRecord(Record, frozen=True, kw_only=True):
    """A database. Its tables are those whose names begin with its name."""

    name: str
    comment: str | None
    properties: dict[str, str]
    created_ms: int


class TablePartition(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A part of a table with buckets of its own: the Kafka partitions of ``topic``.

    ``id`` is never given to another partition of the table. ``value`` is None if the table is not
    partitioned: then this is all of it.
    """

    id: int
    value: str | None
    topic_id: UUID
    topic: str


class TableRecord(Record, frozen=True, kw_only=True):
    """A table. The schema's id is its position in ``schemas``; the last one is the present one.

    ``replication`` and ``topic_configs`` are what the topic of the next partition gets.
    """

    name: str
    table_id: int
    primary_key: tuple[str, ...]
    buckets: int
    bucket_map: bytes
    row_format: str
    key_format: str
    partition_column: str | None
    schemas: tuple[bytes, ...]
    properties: dict[str, str]
    comment: str | None
    created_ms: int
    replication: int
    topic_configs: dict[str, str]
    next_partition_id: int
    partitions: tuple[TablePartition, ...]


class TableIdsRecord(Record, frozen=True, kw_only=True):
    """The next table id: all ids below it have been given away."""

    next_table_id: int


class LeasedSnapshot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A snapshot of a bucket that must be kept, and the log behind it from ``log_offset`` on.

    Numbers of snapshots are a node's own: ``node_id`` has it under ``snapshot_id``. Everywhere else it is the
    state at ``log_offset``, whose last record was written in ``leader_epoch``. -1: not known.
    """

    partition_id: int
    bucket: int
    snapshot_id: int
    log_offset: int
    leader_epoch: int = -1
    node_id: int = -1


class LeaseRecord(Record, frozen=True, kw_only=True):
    """A lease: who keeps which snapshots of a table, and until when. ``holder`` is text for people."""

    lease_id: str
    table_id: int
    holder: str
    expires_at_ms: int
    snapshots: tuple[LeasedSnapshot, ...]


def database_key(name: str) -> str:
    """Key of a database's record."""
    return "databases/" + name


def table_key(name: str) -> str:
    """Key of a table's record."""
    return "tables/" + normalised_name(name)


def lease_key(lease_id: str) -> str:
    """Key of a lease's record."""
    return "leases/" + lease_id
