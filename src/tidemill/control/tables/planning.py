"""Planning of databases and tables: from an image and a command to the keys to write, or to an error. Pure.

- Creating a table writes its database's record too, so that nobody drops the database at the same moment as
  an empty one.
- The logs of a table are changed and deleted under the guard of the table's record alone (see ``plans``).
  That leaves more of a transaction's operations for logs, of which a table can have 1,000.
- What does not fit into one transaction is refused; ``steps.py`` does it in several.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from tidemill.control.commands import CreateTopic
from tidemill.control.plans import Plan, guards, planner, topic_deletes, topic_write, write_one
from tidemill.control.records import chunk_count, encode, topic_key
from tidemill.control.stores.store import TXN_OPERATIONS_MAX
from tidemill.control.tables.commands import (
    AddTablePartition,
    AlterDatabase,
    AlterTable,
    CreateDatabase,
    CreateTable,
    DropDatabase,
    DropTable,
    DropTablePartition,
)
from tidemill.control.tables.images import DatabaseImage, TableImage, TablePartition
from tidemill.control.tables.lease_planning import first_leases
from tidemill.control.tables.records import (
    TABLE_IDS_KEY,
    UNPARTITIONED_ID,
    DatabaseRecord,
    TableIdsRecord,
    database_key,
    lease_key,
    table_key,
)
from tidemill.control.tables.rules import (
    check_database,
    check_database_count,
    check_log_name,
    check_partition,
    check_table,
    check_table_name,
)
from tidemill.errors import ApiError, ErrorCode, MetadataConflict, TableCode, TableError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tidemill.control.image import MetadataImage, TopicImage
    from tidemill.control.placement import ControlLimits

__all__ = ("LOGS_PER_ALTER_MAX", "logs_to_alter", "partitions_per_drop_max")

_LOG_DELETES_MAX = TXN_OPERATIONS_MAX - 2
"""The most keys of logs that are deleted together with a table, whose own guard and delete count too."""

LOGS_PER_ALTER_MAX = 100
"""The most topics that get other configs together with their table. Each is one operation."""


# -- databases -------------------------------------------------------------------------------------------


@planner.register(CreateDatabase)
def _(command: CreateDatabase, image: MetadataImage, limits: ControlLimits) -> Plan[DatabaseImage]:
    there = image.databases.get(command.name)
    if there is not None:
        if command.if_not_exists:
            return Plan({}, {}, there)
        raise TableError(TableCode.database_already_exists, f"database {command.name!r} already exists")
    database = DatabaseImage(
        command.name, command.comment, MappingProxyType(dict(command.properties)), command.created_ms
    )
    check_database(image.catalog, database)
    return _write_database(image, database)


@planner.register(AlterDatabase)
def _(command: AlterDatabase, image: MetadataImage, limits: ControlLimits) -> Plan[DatabaseImage]:
    old = image.catalog.database(command.name)
    changed = replace(
        old,
        properties=_altered(old.properties, command.unset_properties, command.set_properties),
        comment=old.comment if command.comment is None else command.comment,
    )
    if changed == old:
        return Plan({}, {}, old)
    check_database(image.catalog, changed, old)
    return _write_database(image, changed)


@planner.register(DropDatabase)
def _(command: DropDatabase, image: MetadataImage, limits: ControlLimits) -> Plan[DatabaseImage]:
    tables = image.catalog.table_names_in(command.name)
    if tables:
        names = ", ".join(tables[:3]) + (", ..." if len(tables) > 3 else "")
        raise TableError(
            TableCode.database_not_empty,
            f"database {command.name!r} has {len(tables)} tables ({names}); drop them first",
        )
    return write_one(image, database_key(command.name), None, image.databases[command.name])


# -- tables ----------------------------------------------------------------------------------------------


@planner.register(CreateTable)
def _(command: CreateTable, image: MetadataImage, limits: ControlLimits) -> Plan[TableImage]:
    name = command.name
    check_table_name(name)
    there = image.tables.get(name)
    if there is not None:
        if command.topic_id in [partition.topic_id for partition in there.partitions]:
            return Plan({}, {}, there)
        raise TableError(TableCode.table_already_exists, f"table {name!r} already exists")
    check_log_name(image, name, f"table {name!r}")
    table = _new_table(command, image.catalog.next_table_id)
    check_table(image.catalog, table, limits)
    database = image.databases.get(table.database)
    if database is None:
        check_database_count(image.catalog)
        database = DatabaseImage(table.database, None, MappingProxyType({}), command.created_ms)
    own = {
        table_key(name): encode(table.to_record()),
        TABLE_IDS_KEY: encode(TableIdsRecord(next_table_id=table.id + 1)),
        database_key(database.name): encode(_database_record(database)),
    }
    # A partitioned table has no topic of its own name; the guard keeps others from making one meanwhile.
    seen = guards(image, (*own, topic_key(name)))
    logs = [_plan_log(table, partition, image, limits) for partition in table.partitions]
    return Plan({**own, **_merged(log.writes for log in logs)}, seen, table)


@planner.register(AlterTable)
def _(command: AlterTable, image: MetadataImage, limits: ControlLimits) -> Plan[TableImage]:
    table = _table(image, command.name, command.table_id)
    if command.base_schema_count not in (None, len(table.schemas)):
        raise MetadataConflict(
            f"table {table.name!r} has {len(table.schemas)} schemas by now, and the change was made for one"
            f" with {command.base_schema_count}; read the table again and retry"
        )
    configs = command.topic_configs
    changed = replace(
        table,
        schemas=table.schemas if command.new_schema is None else (*table.schemas, command.new_schema),
        properties=_altered(table.properties, command.unset_properties, command.set_properties),
        comment=table.comment if command.comment is None else command.comment,
        topic_configs=table.topic_configs if configs is None else MappingProxyType(dict(configs)),
    )
    check_table(image.catalog, changed, limits, table)
    logs = [] if configs is None else logs_to_alter(image, table, configs)
    if len(logs) > LOGS_PER_ALTER_MAX:
        raise _too_many_at_once(table, f"the configs of {len(logs)} logs of it cannot be changed at once")
    writes = _merged(topic_write(replace(log, configs=changed.topic_configs)) for log in logs)
    if changed != table:
        writes[table_key(table.name)] = encode(changed.to_record())
    return Plan(writes, guards(image, (table_key(table.name),)) if writes else {}, changed)


@planner.register(DropTable)
def _(command: DropTable, image: MetadataImage, limits: ControlLimits) -> Plan[TableImage]:
    table = _table(image, command.name, command.table_id)
    logs = _merged(topic_deletes(image, log) for log in _logs(image, table.partitions))
    deletes_left = _LOG_DELETES_MAX - len(logs)
    if deletes_left < 0:
        raise _too_many_at_once(table, "it cannot be dropped at once; drop partitions of it first")
    # Leases beyond that expire by themselves: the table's id is not used again.
    there = image.leases_of(table.id)
    dropped = there if len(there) <= deletes_left else first_leases(there, deletes_left)
    leases = {lease_key(lease.lease_id): None for lease in dropped}
    return Plan(
        {table_key(table.name): None, **logs, **leases}, guards(image, (table_key(table.name),)), table
    )


@planner.register(AddTablePartition)
def _(command: AddTablePartition, image: MetadataImage, limits: ControlLimits) -> Plan[TablePartition]:
    table = _table(image, command.table, command.table_id)
    there = table.partition(command.value)
    if there is not None:
        return Plan({}, {}, there)
    check_partition(table, command.value)
    topic = f"{table.name}.{command.value}"
    check_log_name(image, topic, f"partition {command.value!r} of table {table.name!r}")
    added = TablePartition(table.next_partition_id, command.value, command.topic_id, topic)
    changed = replace(
        table, partitions=(*table.partitions, added), next_partition_id=table.next_partition_id + 1
    )
    log = _plan_log(table, added, image, limits)
    key = table_key(table.name)
    return Plan(
        {key: encode(changed.to_record()), **log.writes}, {**guards(image, (key,)), **log.guards}, added
    )


@planner.register(DropTablePartition)
def _(command: DropTablePartition, image: MetadataImage, limits: ControlLimits) -> Plan[TablePartition]:
    table = _table(image, command.table, command.table_id)
    gone = table.partition(command.value)
    if gone is None:
        raise TableError(
            TableCode.partition_not_found, f"table {table.name!r} has no partition {command.value[:120]!r}"
        )
    changed = replace(table, partitions=tuple(each for each in table.partitions if each.id != gone.id))
    log = _merged(topic_deletes(image, log) for log in _logs(image, (gone,)))
    key = table_key(table.name)
    return Plan({key: encode(changed.to_record()), **log}, guards(image, (key,)), gone)


def partitions_per_drop_max(image: MetadataImage, table: TableImage) -> int:
    """How many partitions the table may have to be dropped in one transaction."""
    # In a replicated cluster the drop of a log also writes which nodes have files of it.
    return _LOG_DELETES_MAX // (1 + chunk_count(table.buckets) + image.replicated)


def logs_to_alter(image: MetadataImage, table: TableImage, configs: Mapping[str, str]) -> list[TopicImage]:
    """The table's topics whose configs are not ``configs``."""
    return [log for log in _logs(image, table.partitions) if log.configs != configs]


def _new_table(command: CreateTable, table_id: int) -> TableImage:
    partitions: tuple[TablePartition, ...] = ()
    if command.partition_column is None:
        partitions = (TablePartition(UNPARTITIONED_ID, None, command.topic_id, command.name),)
    return TableImage(
        name=command.name,
        id=table_id,
        primary_key=command.primary_key,
        buckets=command.buckets,
        bucket_map=command.bucket_map,
        row_format=command.row_format,
        key_format=command.key_format,
        partition_column=command.partition_column,
        schemas=(command.schema,),
        properties=MappingProxyType(dict(command.properties)),
        comment=command.comment,
        created_ms=command.created_ms,
        replication=command.replication,
        topic_configs=MappingProxyType(dict(command.topic_configs)),
        next_partition_id=UNPARTITIONED_ID + 1 if partitions else 0,
        partitions=partitions,
    )


def _plan_log(
    table: TableImage, partition: TablePartition, image: MetadataImage, limits: ControlLimits
) -> Plan[TopicImage]:
    command = CreateTopic(
        name=partition.topic,
        topic_id=partition.topic_id,
        partitions=table.buckets,
        replication=table.replication,
        configs=dict(table.topic_configs),
    )
    return planner(command, image, limits)


def _logs(image: MetadataImage, partitions: Iterable[TablePartition]) -> list[TopicImage]:
    """The topics of the partitions, without those that do not exist any more."""
    found = (image.topic_by_id(partition.topic_id) for partition in partitions)
    return [topic for topic in found if topic is not None]


def _table(image: MetadataImage, name: str, table_id: int | None) -> TableImage:
    table = image.catalog.table(name)
    if table_id is not None and table.id != table_id:
        raise TableError(
            TableCode.table_not_found,
            f"table {name!r} has the number {table.id}, not {table_id}: that one was dropped",
        )
    return table


def _altered(
    properties: Mapping[str, str], unset: Iterable[str], put: Mapping[str, str]
) -> Mapping[str, str]:
    gone = set(unset)
    return MappingProxyType({k: v for k, v in properties.items() if k not in gone} | dict(put))


def _write_database(image: MetadataImage, database: DatabaseImage) -> Plan[DatabaseImage]:
    return write_one(image, database_key(database.name), encode(_database_record(database)), database)


def _database_record(database: DatabaseImage) -> DatabaseRecord:
    return DatabaseRecord(
        name=database.name,
        comment=database.comment,
        properties=dict(database.properties),
        created_ms=database.created_ms,
    )


def _merged(writes: Iterable[Mapping[str, bytes | None]]) -> dict[str, bytes | None]:
    return {key: value for each in writes for key, value in each.items()}


def _too_many_at_once(table: TableImage, problem: str) -> ApiError:
    return ApiError(
        ErrorCode.policy_violation,
        f"table {table.name!r} has {len(table.partitions)} partitions of {table.buckets} buckets: {problem}",
    )
