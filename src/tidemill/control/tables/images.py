"""The tables' part of the metadata image: databases, tables, and leases of snapshots.

The rules are the image's own: immutable, a fold of stored keys, the same whether it is read as a whole or
followed step by step.

The fold takes each record as it is, whatever the others say, so that nothing that is missing keeps a node
from starting. Two things can therefore be seen here: for a while, a lease of a table that was dropped just
when the lease was taken (it expires, and table ids are not used again); and a partition whose topic is gone.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from uuid import UUID

from tidemill.control.records import decode, normalised_name
from tidemill.control.sharedmap import SharedMap
from tidemill.control.tables.records import (
    DatabaseRecord,
    LeasedSnapshot,
    LeaseRecord,
    TableIdsRecord,
    TablePartition,
    TableRecord,
)
from tidemill.errors import TableCode, TableError

__all__ = (
    "Catalog",
    "CatalogFold",
    "DatabaseImage",
    "LeaseImage",
    "LeasedSnapshot",
    "TableImage",
    "TablePartition",
    "table_changes",
)

FIRST_TABLE_ID = 1

#: What a property takes besides its text, about; and what a database or table does.
_ENTRY_BYTES = 64


@dataclass(frozen=True, slots=True)
class DatabaseImage:
    """A database: a name space of tables, with properties."""

    name: str
    comment: str | None
    properties: Mapping[str, str]
    created_ms: int

    @property
    def size_bytes(self) -> int:
        """The memory of name, comment and properties, about."""
        return _ENTRY_BYTES + _text_bytes(self.name, self.comment or "") + _entries_bytes(self.properties)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableImage:
    """A table. ``name`` is ``database.table``; ``id`` is never given to another table.

    ``schemas[i]`` is the schema with id ``i``. ``partitions`` is in the order of their ids; a table that is
    not partitioned has exactly one.
    """

    name: str
    id: int
    primary_key: tuple[str, ...]
    buckets: int
    bucket_map: bytes
    row_format: str
    key_format: str
    partition_column: str | None
    schemas: tuple[bytes, ...]
    properties: Mapping[str, str]
    comment: str | None
    created_ms: int
    replication: int
    topic_configs: Mapping[str, str]
    next_partition_id: int
    partitions: tuple[TablePartition, ...]
    _by_value: Mapping[str | None, TablePartition] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_value", {part.value: part for part in self.partitions})

    @property
    def database(self) -> str:
        """Name of the database that the table is in."""
        return self.name.partition(".")[0]

    @property
    def size_bytes(self) -> int:
        """The memory of the definition, about. Partitions are not counted: each is a topic, too."""
        entries = _entries_bytes(self.properties) + _entries_bytes(self.topic_configs)
        texts = _text_bytes(self.name, self.comment or "", *self.primary_key)
        return _ENTRY_BYTES + texts + entries + sum(map(len, self.schemas)) + len(self.bucket_map)

    def partition(self, value: str | None) -> TablePartition | None:
        """The partition of that value; None is the value of a table that is not partitioned."""
        return self._by_value.get(value)

    @classmethod
    def from_record(cls, record: TableRecord) -> TableImage:
        """The table that is stored as ``record``."""
        return cls(
            name=record.name,
            id=record.table_id,
            primary_key=record.primary_key,
            buckets=record.buckets,
            bucket_map=record.bucket_map,
            row_format=record.row_format,
            key_format=record.key_format,
            partition_column=record.partition_column,
            schemas=record.schemas,
            properties=MappingProxyType(record.properties),
            comment=record.comment,
            created_ms=record.created_ms,
            replication=record.replication,
            topic_configs=MappingProxyType(record.topic_configs),
            next_partition_id=record.next_partition_id,
            partitions=record.partitions,
        )

    def to_record(self) -> TableRecord:
        """The record in which the table is stored."""
        return TableRecord(
            name=self.name,
            table_id=self.id,
            primary_key=self.primary_key,
            buckets=self.buckets,
            bucket_map=self.bucket_map,
            row_format=self.row_format,
            key_format=self.key_format,
            partition_column=self.partition_column,
            schemas=self.schemas,
            properties=dict(self.properties),
            comment=self.comment,
            created_ms=self.created_ms,
            replication=self.replication,
            topic_configs=dict(self.topic_configs),
            next_partition_id=self.next_partition_id,
            partitions=self.partitions,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseImage:
    """A lease: who keeps which snapshots of a table, and until when. ``holder`` is text for people."""

    lease_id: str
    table_id: int
    holder: str
    expires_at_ms: int
    snapshots: tuple[LeasedSnapshot, ...]


LeasedOffsets = Mapping[tuple[int, int], tuple[int, ...]]
"""The offsets of leased snapshots, sorted, by table partition and bucket."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """All databases, tables and leases of an image.

    ``log_owners`` has the name of the table and the partition for each topic that is a table's log.
    ``table_names`` has those of each database that has any, sorted. ``database_bytes`` and ``table_bytes``
    are the memory of all definitions. ``leases_by_table`` is sorted by lease id; ``leased_offsets`` has, by
    table and bucket, the offsets of all leased snapshots, sorted, and ``leased_snapshots`` is their number.
    """

    databases: SharedMap[str, DatabaseImage] = field(default_factory=SharedMap)
    database_bytes: int = 0
    tables: SharedMap[str, TableImage] = field(default_factory=SharedMap)
    table_names: SharedMap[str, tuple[str, ...]] = field(default_factory=SharedMap)
    table_bytes: int = 0
    tables_by_id: SharedMap[int, TableImage] = field(default_factory=SharedMap)
    table_names_by_normalised: SharedMap[str, str] = field(default_factory=SharedMap)
    log_owners: SharedMap[UUID, tuple[str, TablePartition]] = field(default_factory=SharedMap)
    next_table_id: int = FIRST_TABLE_ID
    leases: SharedMap[str, LeaseImage] = field(default_factory=SharedMap)
    leases_by_table: SharedMap[int, tuple[LeaseImage, ...]] = field(default_factory=SharedMap)
    leased_offsets: SharedMap[int, LeasedOffsets] = field(default_factory=SharedMap)
    leased_snapshots: int = 0

    def database(self, name: str) -> DatabaseImage:
        """The database of that name. Raises ``TableError`` if there is none."""
        database = self.databases.get(name)
        if database is None:
            raise TableError(TableCode.database_not_found, f"there is no database {name!r}")
        return database

    def table(self, name: str) -> TableImage:
        """The table of that name. Raises ``TableError`` if there is none."""
        table = self.tables.get(name)
        if table is None:
            raise TableError(TableCode.table_not_found, f"there is no table {name!r}")
        return table

    def tables_in(self, database: str) -> tuple[TableImage, ...]:
        """The tables of a database, by name. Raises ``TableError`` if there is no such database."""
        return tuple(self.tables[name] for name in self.table_names_in(database))

    def table_names_in(self, database: str) -> tuple[str, ...]:
        """The names of a database's tables, sorted. Raises ``TableError`` if there is no such database."""
        return self.table_names.get(self.database(database).name) or ()

    def leased_offsets_of(self, table_id: int, partition_id: int, bucket: int) -> tuple[int, ...]:
        """The offsets of a bucket's leased snapshots, sorted. Cheap: each fetch of a follower asks this."""
        of_table = self.leased_offsets.get(table_id)
        return () if of_table is None else of_table.get((partition_id, bucket), ())

    def table_of_topic(self, topic_id: UUID) -> tuple[TableImage, TablePartition] | None:
        """The table and the table partition whose log the topic is. Cheap: each Produce asks this."""
        owner = self.log_owners.get(topic_id)
        return None if owner is None else (self.tables[owner[0]], owner[1])


class CatalogFold:
    """The fold from stored keys to a catalog: collects changes, then makes the new catalog at once."""

    def __init__(self, catalog: Catalog) -> None:
        self._old = catalog
        self._databases: dict[str, DatabaseImage | None] = {}
        self._tables: list[tuple[TableImage | None, TableImage | None]] = []
        self._leases: dict[str, LeaseImage | None] = {}
        self._next_table_id = catalog.next_table_id
        self._touched = False

    def fold(self, key: str, value: bytes | None) -> bool:
        """Fold one key; False if it is not one of the catalog's."""
        kind, _, rest = key.partition("/")
        match kind:
            case "databases":
                self._databases[rest] = (
                    None if value is None else _database(decode(key, value, DatabaseRecord))
                )
            case "tables":
                name = self._old.table_names_by_normalised.get(rest)
                old = None if name is None else self._old.tables[name]
                record = None if value is None else decode(key, value, TableRecord)
                self._tables.append((old, None if record is None else TableImage.from_record(record)))
            case "leases":
                self._leases[rest] = None if value is None else _lease(decode(key, value, LeaseRecord))
            case "table-ids":
                counter = None if value is None else decode(key, value, TableIdsRecord)
                self._next_table_id = FIRST_TABLE_ID if counter is None else counter.next_table_id
            case _:
                return False
        self._touched = True
        return True

    def finish(self) -> Catalog:
        """Make the catalog with all that was folded."""
        old = self._old
        if not self._touched:
            return old
        tables: dict[str, TableImage | None] = {}
        by_id: dict[int, TableImage | None] = {}
        by_normalised: dict[str, str | None] = {}
        # Removals come first, so that what was created again in the same transaction stays.
        for before, _ in self._tables:
            if before is not None:
                tables[before.name] = by_id[before.id] = by_normalised[normalised_name(before.name)] = None
        for _, after in self._tables:
            if after is not None:
                tables[after.name] = by_id[after.id] = after
                by_normalised[normalised_name(after.name)] = after.name
        leases_by_table = self._changed_leases()
        return Catalog(
            databases=old.databases.update(self._databases),
            database_bytes=old.database_bytes
            + sum(_size(after) - _size(old.databases.get(name)) for name, after in self._databases.items()),
            tables=old.tables.update(tables),
            table_names=old.table_names.update(self._changed_names()),
            table_bytes=old.table_bytes + sum(_size(after) - _size(before) for before, after in self._tables),
            tables_by_id=old.tables_by_id.update(by_id),
            table_names_by_normalised=old.table_names_by_normalised.update(by_normalised),
            log_owners=old.log_owners.update(self._changed_owners()),
            next_table_id=self._next_table_id,
            leases=old.leases.update(self._leases),
            leases_by_table=old.leases_by_table.update(leases_by_table),
            leased_offsets=old.leased_offsets.update(self._changed_offsets(leases_by_table)),
            leased_snapshots=old.leased_snapshots
            + sum(
                len(_snapshots(after)) - len(_snapshots(old.leases.get(lease_id)))
                for lease_id, after in self._leases.items()
            ),
        )

    def _changed_names(self) -> dict[str, tuple[str, ...] | None]:
        """The changed entries of ``table_names``. A new schema changes none."""
        touched: dict[str, list[str]] = {}

        def names_in(database: str) -> list[str]:
            if database not in touched:
                touched[database] = list(self._old.table_names.get(database) or ())
            return touched[database]

        renamed = [
            (before, after)
            for before, after in self._tables
            if before is None or after is None or before.name != after.name
        ]
        for before, _ in renamed:
            if before is not None:
                names = names_in(before.database)
                del names[bisect_left(names, before.name)]
        for _, after in renamed:
            if after is not None:
                insort(names_in(after.database), after.name)
        return {database: tuple(names) or None for database, names in touched.items()}

    def _changed_owners(self) -> dict[UUID, tuple[str, TablePartition] | None]:
        """The changed entries of ``log_owners``. A new schema of a table of 1,000 partitions changes none."""
        gone: dict[UUID, tuple[str, TablePartition] | None] = {}
        come: dict[UUID, tuple[str, TablePartition] | None] = {}
        for before, after in self._tables:
            was, now = _owned(before), _owned(after)
            gone |= {was[key][1].topic_id: None for key in was.keys() - now.keys()}
            come |= {now[key][1].topic_id: now[key] for key in now.keys() - was.keys()}
        return gone | come

    def _changed_leases(self) -> dict[int, tuple[LeaseImage, ...] | None]:
        old = self._old
        touched: dict[int, dict[str, LeaseImage]] = {}

        def leases_of(table_id: int) -> dict[str, LeaseImage]:
            if table_id not in touched:
                touched[table_id] = {each.lease_id: each for each in old.leases_by_table.get(table_id) or ()}
            return touched[table_id]

        for lease_id, after in self._leases.items():
            before = old.leases.get(lease_id)
            if before is not None:
                del leases_of(before.table_id)[lease_id]
            if after is not None:
                leases_of(after.table_id)[lease_id] = after
        return {
            table_id: tuple(leases[lease_id] for lease_id in sorted(leases)) or None
            for table_id, leases in touched.items()
        }

    def _changed_offsets(
        self, leases_by_table: Mapping[int, tuple[LeaseImage, ...] | None]
    ) -> dict[int, LeasedOffsets | None]:
        """The changed entries of ``leased_offsets``. To renew a lease changes none."""
        old = self._old
        # What a table has that has no lease any more goes at once.
        changed: dict[int, LeasedOffsets | None] = {
            table_id: None for table_id, left in leases_by_table.items() if not left
        }
        drafts: dict[int, _OffsetsDraft] = {}

        def draft(table_id: int) -> _OffsetsDraft:
            if table_id not in drafts:
                drafts[table_id] = _OffsetsDraft(old.leased_offsets.get(table_id) or {})
            return drafts[table_id]

        for lease_id, after in self._leases.items():
            before = old.leases.get(lease_id)
            if before is not None and after is not None and _same_snapshots(before, after):
                continue
            if before is not None and before.table_id not in changed:
                draft(before.table_id).remove(before.snapshots)
            if after is not None:
                draft(after.table_id).add(after.snapshots)
        return changed | {table_id: each.finish() for table_id, each in drafts.items()}


class _OffsetsDraft:
    """The offsets of a table's leased snapshots while leases are changed: only what is touched is copied."""

    def __init__(self, old: LeasedOffsets) -> None:
        self._old = old
        self._touched: dict[tuple[int, int], list[int]] = {}

    def add(self, snapshots: Iterable[LeasedSnapshot]) -> None:
        for held in snapshots:
            insort(self._of_bucket(held), held.log_offset)

    def remove(self, snapshots: Iterable[LeasedSnapshot]) -> None:
        for held in snapshots:
            offsets = self._of_bucket(held)
            del offsets[bisect_left(offsets, held.log_offset)]

    def _of_bucket(self, held: LeasedSnapshot) -> list[int]:
        bucket = held.partition_id, held.bucket
        offsets = self._touched.get(bucket)
        if offsets is None:
            offsets = self._touched[bucket] = list(self._old.get(bucket, ()))
        return offsets

    def finish(self) -> LeasedOffsets | None:
        """What there is now; None if that is nothing."""
        new = dict(self._old)
        for bucket, offsets in self._touched.items():
            if offsets:
                new[bucket] = tuple(offsets)
            else:
                new.pop(bucket, None)
        return new or None


def table_changes(
    old: Catalog, new: Catalog
) -> tuple[tuple[TableImage, ...], tuple[TableImage, ...], tuple[TableImage, ...]]:
    """Tables that were created (as they are), dropped (as they were) and changed (as they are), by name."""
    created: list[TableImage] = []
    dropped: list[TableImage] = []
    changed: list[TableImage] = []
    for name in sorted(new.tables.differing_keys(old.tables)):
        before, after = old.tables.get(name), new.tables.get(name)
        if before is not None and after is not None and before.id == after.id:
            changed += [after] if after != before else []
            continue
        dropped += [before] if before is not None else []
        created += [after] if after is not None else []
    return tuple(created), tuple(dropped), tuple(changed)


def _size(described: DatabaseImage | TableImage | None) -> int:
    return 0 if described is None else described.size_bytes


def _snapshots(lease: LeaseImage | None) -> tuple[LeasedSnapshot, ...]:
    return () if lease is None else lease.snapshots


def _same_snapshots(one: LeaseImage, other: LeaseImage) -> bool:
    return one.table_id == other.table_id and one.snapshots == other.snapshots


def _text_bytes(*texts: str) -> int:
    return sum(len(text.encode()) for text in texts)


def _entries_bytes(properties: Mapping[str, str]) -> int:
    return sum(_ENTRY_BYTES + _text_bytes(key, value) for key, value in properties.items())


def _owned(table: TableImage | None) -> dict[tuple[str, int, int], tuple[str, TablePartition]]:
    """The table's partitions by numbers that change whenever the partition does: these compare cheaply."""
    if table is None:
        return {}
    name = table.name
    return {(name, table.id, partition.id): (name, partition) for partition in table.partitions}


def _database(record: DatabaseRecord) -> DatabaseImage:
    return DatabaseImage(record.name, record.comment, MappingProxyType(record.properties), record.created_ms)


def _lease(record: LeaseRecord) -> LeaseImage:
    return LeaseImage(
        lease_id=record.lease_id,
        table_id=record.table_id,
        holder=record.holder,
        expires_at_ms=record.expires_at_ms,
        snapshots=record.snapshots,
    )
