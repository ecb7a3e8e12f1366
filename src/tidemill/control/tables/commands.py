"""The commands about databases, tables and leases: values that are submitted to the controller.

Each is one transaction. A table of very many partitions is dropped or given other topic configs in several:
``steps.py`` does that.

``table_id``, where a command takes one, makes it hold only if the name still means that table.
"""

from __future__ import annotations

from typing import ClassVar
from uuid import UUID

import msgspec

from tidemill.control.commands import Command
from tidemill.control.tables.images import DatabaseImage, LeaseImage, TableImage, TablePartition

__all__ = (
    "AddTablePartition",
    "AlterDatabase",
    "AlterTable",
    "CreateDatabase",
    "CreateTable",
    "DropDatabase",
    "DropExpiredLeases",
    "DropLease",
    "DropTable",
    "DropTablePartition",
    "PutLease",
)


class CreateDatabase(Command[DatabaseImage], frozen=True, kw_only=True):
    """Create a database. With ``if_not_exists``, one that is there already is given as it is."""

    refused_when_repeated: ClassVar[bool] = True

    name: str
    comment: str | None = None
    properties: dict[str, str] = msgspec.field(default_factory=dict)
    created_ms: int
    if_not_exists: bool = False


class AlterDatabase(Command[DatabaseImage], frozen=True, kw_only=True):
    """Change properties (unset first, then set) and, unless it is None, the comment."""

    name: str
    set_properties: dict[str, str] = msgspec.field(default_factory=dict)
    unset_properties: tuple[str, ...] = ()
    comment: str | None = None


class DropDatabase(Command[DatabaseImage], frozen=True, kw_only=True):
    """Drop a database that has no tables; gives its last image."""

    may_use_reserve: ClassVar[bool] = True
    refused_when_repeated: ClassVar[bool] = True

    name: str


class CreateTable(Command[TableImage], frozen=True, kw_only=True):
    """Create a table, its log, and its database if that is missing.

    The log is a topic of the table's name with ``topic_id``, ``replication`` and ``topic_configs``. A table
    with a ``partition_column`` has no log before its first partition, and ``topic_id`` is not used.
    """

    name: str
    topic_id: UUID
    schema: bytes
    primary_key: tuple[str, ...] = ()
    buckets: int = 1
    bucket_map: bytes
    row_format: str
    key_format: str
    partition_column: str | None = None
    properties: dict[str, str] = msgspec.field(default_factory=dict)
    comment: str | None = None
    created_ms: int
    replication: int = 1
    topic_configs: dict[str, str] = msgspec.field(default_factory=dict)


class AlterTable(Command[TableImage], frozen=True, kw_only=True):
    """Add a schema, change properties (unset first, then set), and replace what is not None of the others.

    With ``base_schema_count``, only if the table still has that many schemas: else ``MetadataConflict``, and
    the caller, who made ``new_schema`` out of the last one, starts again from the image. ``topic_configs``
    replaces all overrides of all topics of the table.
    """

    name: str
    table_id: int | None = None
    base_schema_count: int | None = None
    new_schema: bytes | None = None
    set_properties: dict[str, str] = msgspec.field(default_factory=dict)
    unset_properties: tuple[str, ...] = ()
    comment: str | None = None
    topic_configs: dict[str, str] | None = None


class DropTable(Command[TableImage], frozen=True, kw_only=True):
    """Drop a table with its logs and leases; gives its last image."""

    may_use_reserve: ClassVar[bool] = True
    refused_when_repeated: ClassVar[bool] = True

    name: str
    table_id: int | None = None


class AddTablePartition(Command[TablePartition], frozen=True, kw_only=True):
    """Add the partition of ``value``, with a log of its own. One that is there already is given as it is."""

    table: str
    value: str
    topic_id: UUID
    table_id: int | None = None


class DropTablePartition(Command[TablePartition], frozen=True, kw_only=True):
    """Drop a table partition with its log; gives what it was."""

    may_use_reserve: ClassVar[bool] = True
    refused_when_repeated: ClassVar[bool] = True

    table: str
    value: str
    table_id: int | None = None


class PutLease(Command[LeaseImage], frozen=True, kw_only=True):
    """Create a lease or replace it by a later one. With ``renew``, only if it is still there.

    With ``add``, the lease keeps the snapshots that it has of other buckets: each node adds its own.
    """

    lease: LeaseImage
    renew: bool = False
    add: bool = False


class DropLease(Command[LeaseImage], frozen=True, kw_only=True):
    """Release a lease; gives its last image."""

    may_use_reserve: ClassVar[bool] = True
    refused_when_repeated: ClassVar[bool] = True

    lease_id: str


class DropExpiredLeases(Command[tuple[LeaseImage, ...]], frozen=True, kw_only=True):
    """Drop expired leases, the oldest first; gives them. There may be more: repeat until it gives none."""

    may_use_reserve: ClassVar[bool] = True

    now_ms: int
