"""Databases and tables: create, list, describe, alter, drop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

from tidemill.control.refusals import CatchUp
from tidemill.control.tables.commands import (
    AddTablePartition,
    AlterDatabase,
    AlterTable,
    CreateDatabase,
    CreateTable,
    DropDatabase,
)
from tidemill.control.tables.images import TableImage, TablePartition
from tidemill.control.tables.steps import alter_table as alter_steps
from tidemill.coordination.turns import give_way, in_slices, sorted_in_slices
from tidemill.errors import ErrorCode, MetadataConflict, TableCode, TableError, TidemillError
from tidemill.server.broker import Broker
from tidemill.server.handlers.outcome import refused
from tidemill.server.requests.api_table import serves
from tidemill.server.requests.authorization import (
    ALTER,
    CREATE,
    DELETE,
    DESCRIBE,
    TOPIC,
    WRITE,
    for_cluster,
    for_each,
    for_one,
)
from tidemill.server.requests.call import Call

__all__ = (
    "alter_database",
    "alter_table",
    "create_database",
    "create_table",
    "create_table_partition",
    "describe_table",
    "drop_database",
    "drop_table",
    "drop_table_partition",
    "list_databases",
    "list_tables",
    "table_handler",
)

_MESSAGE_CHARACTERS_MAX = 4_000
_ALTER_ATTEMPTS = 5
_PROPERTIES_MAX = 1_000

Handler = Callable[[Broker, Call], Awaitable[dict[str, Any]]]


def table_handler(handler: Handler) -> Handler:
    """Wrap the handler of a table API: an error becomes the code and message of its answer."""

    @wraps(handler)
    async def answer(broker: Broker, call: Call) -> dict[str, Any]:
        try:
            return {"error_code": ErrorCode.none, "error_message": None, **await handler(broker, call)}
        except TableError as error:
            return {
                "error_code": int(error.table_code),
                "error_message": error.message[:_MESSAGE_CHARACTERS_MAX],
            }
        except TidemillError as error:
            return {"error_code": int(error.code), "error_message": error.message[:_MESSAGE_CHARACTERS_MAX]}

    return answer


# --- databases


@serves("CreateDatabase", for_cluster(CREATE))
@table_handler
async def create_database(broker: Broker, call: Call) -> dict[str, Any]:
    """Create a database."""
    request = call.request
    exists = request.name in broker.image.databases
    await broker.controller.submit(
        CreateDatabase(
            name=request.name,
            comment=request.comment,
            properties=_properties(request.properties),
            created_ms=broker.clock_ms(),
            if_not_exists=request.if_not_exists,
        )
    )
    return {"created": not exists}


@serves("AlterDatabase", for_cluster(ALTER))
@table_handler
async def alter_database(broker: Broker, call: Call) -> dict[str, Any]:
    """Change properties and comment of a database."""
    request = call.request
    await broker.controller.submit(
        AlterDatabase(
            name=request.name,
            comment=request.comment,
            set_properties=_properties(request.set_properties),
            unset_properties=_unset(request.unset_properties),
        )
    )
    return {}


@serves("DropDatabase", for_cluster(ALTER), for_each(DELETE, TOPIC))
@table_handler
async def drop_database(broker: Broker, call: Call) -> dict[str, Any]:
    """Drop a database, with its tables if that is asked for."""
    request = call.request
    if request.if_exists and request.name not in broker.image.databases:
        await broker.controller.catch_up()
        if request.name not in broker.image.databases:
            return {"dropped": False}
    if request.cascade:
        # All are checked before the first is dropped: a request that is refused changes nothing.
        # A table that is created meanwhile is not dropped, and keeps the database from it.
        names = broker.image.catalog.table_names_in(request.name)
        for name in names:
            call.authorize(DELETE, TOPIC, name)
            await give_way()
        for name in names:
            # Somebody else may be dropping them, too.
            table = broker.image.tables.get(name)
            if table is not None:
                await broker.catalogue.drop_table(table)
    await broker.controller.submit(DropDatabase(name=request.name))
    return {"dropped": True}


@serves("ListDatabases", for_cluster(DESCRIBE))
@table_handler
async def list_databases(broker: Broker, call: Call) -> dict[str, Any]:
    """List every database."""
    catalog = broker.image.catalog
    found = []
    for name in await sorted_in_slices(tuple(catalog.databases)):
        database = catalog.databases[name]
        found.append(
            {
                "name": name,
                "comment": database.comment,
                "properties": await _pairs(database.properties),
                "table_count": len(catalog.table_names_in(name)),
                "created_ms": database.created_ms,
            }
        )
        await give_way()
    return {"databases": found}


# --- tables


@serves("CreateTable", for_one(CREATE, TOPIC, "name"))
@table_handler
async def create_table(broker: Broker, call: Call) -> dict[str, Any]:
    """Create a table."""
    request = call.request
    tables = await broker.tables.load()
    existing = broker.image.tables.get(request.name)
    if existing is not None and request.if_not_exists:
        return {"created": False, "table_id": existing.id}
    shape = tables.definitions.plan(
        name=request.name,
        schema=request.schema,
        primary_key=tuple(request.primary_key),
        buckets=request.buckets,
        boundaries=tuple(request.boundaries),
        row_format=request.row_format,
        key_format=request.key_format,
        partition_column=request.partition_column,
        properties=_properties(request.properties),
    )
    command = CreateTable(
        name=request.name,
        topic_id=broker.ids.uuid(),
        comment=request.comment,
        created_ms=broker.clock_ms(),
        replication=broker.catalogue.default_replication,
        **shape,
    )
    try:
        created = await broker.controller.submit(command)
    except TableError:
        # Somebody else may have been faster.
        existing = broker.image.tables.get(request.name)
        if existing is None or not request.if_not_exists:
            raise
        return {"created": False, "table_id": existing.id}
    return {"created": True, "table_id": created.id}


@serves("DropTable", for_one(DELETE, TOPIC, "name"))
@table_handler
async def drop_table(broker: Broker, call: Call) -> dict[str, Any]:
    """Drop a table with everything in it."""
    try:
        await broker.catalogue.drop_table(await _newest_table(broker, call.request.name))
    except TableError as error:
        # It was not there, or somebody else was faster.
        if call.request.if_exists and error.table_code == TableCode.table_not_found:
            return {"dropped": False}
        raise
    return {"dropped": True}


@serves("DescribeTable", for_one(DESCRIBE, TOPIC, "name"))
@table_handler
async def describe_table(broker: Broker, call: Call) -> dict[str, Any]:
    """Describe everything that is known about a table."""
    return {"table": await _described(_table(broker, call.request.name))}


@serves("ListTables", for_each(DESCRIBE, TOPIC))
@table_handler
async def list_tables(broker: Broker, call: Call) -> dict[str, Any]:
    """List the tables of a database, or all."""
    database, catalog = call.request.database, broker.image.catalog
    names = (
        catalog.table_names_in(database)
        if database is not None
        else await sorted_in_slices(tuple(catalog.tables))
    )
    if not names:
        return {"tables": ()}
    tables = await broker.tables.load()
    found = []
    for name in names:
        # As it is by now: it may be another one, or gone.
        table = broker.image.tables.get(name)
        if table is not None and call.may(DESCRIBE, TOPIC, name):
            found.append(
                {
                    "name": name,
                    "table_id": table.id,
                    "primary_key": table.primary_key,
                    # The first time, the definition is parsed for this.
                    "column_count": len(tables.service.by_id(table.id).schema),
                    "buckets": table.buckets,
                    "partition_count": len(table.partitions) if table.partition_column else 0,
                    "row_format": table.row_format,
                    "comment": table.comment,
                }
            )
        await give_way()
    return {"tables": found}


@serves("AlterTable", for_one(ALTER, TOPIC, "name"))
@table_handler
async def alter_table(broker: Broker, call: Call) -> dict[str, Any]:
    """Add columns, change properties and comment."""
    request = call.request
    tables = await broker.tables.load()
    for attempt in range(1, _ALTER_ATTEMPTS + 1):
        table = await _newest_table(broker, request.name)
        set_properties, unset = _properties(request.set_properties), _unset(request.unset_properties)
        kept = table.properties.keys() - unset
        properties = {name: value for name, value in table.properties.items() if name in kept}
        definitions, columns = tables.definitions, request.add_columns
        configs = definitions.topic_configs({**properties, **set_properties}, keyed=bool(table.primary_key))
        added = None if columns is None else definitions.widened_schema(table, columns)
        try:
            altered = await alter_steps(
                broker.controller,
                AlterTable(
                    name=table.name,
                    table_id=table.id,
                    base_schema_count=len(table.schemas),
                    new_schema=added,
                    set_properties=set_properties,
                    unset_properties=unset,
                    comment=request.comment,
                    topic_configs=configs if configs != dict(table.topic_configs) else None,
                ),
            )
        except MetadataConflict:
            if attempt == _ALTER_ATTEMPTS:
                raise
            continue
        return {"schema_id": len(altered.schemas) - 1}
    raise AssertionError("the last attempt returns or raises")


@serves("CreateTablePartition", for_one(WRITE, TOPIC, "table"))
@table_handler
async def create_table_partition(broker: Broker, call: Call) -> dict[str, Any]:
    """Add a table partition; one that exists already is fine."""
    from tidemill.tables.keys.partition_values import check_partition_value

    table = await _newest_table(broker, call.request.table)
    definition = (await broker.tables.load()).service.by_id(table.id)
    if definition.partition_column is not None:
        column = definition.schema.field(definition.partition_column)
        check_partition_value(call.request.value, column.type)
    made = await broker.controller.submit(
        AddTablePartition(
            table=table.name, table_id=table.id, value=call.request.value, topic_id=broker.ids.uuid()
        )
    )
    return {"partition": _partition(made)}


@serves("DropTablePartition", for_one(DELETE, TOPIC, "table"))
@table_handler
async def drop_table_partition(broker: Broker, call: Call) -> dict[str, Any]:
    """Drop a table partition with everything in it."""
    table = await _newest_table(broker, call.request.table)
    if table.partition(call.request.value) is None:
        await broker.controller.catch_up()
        table = _table(broker, call.request.table)
    await broker.catalogue.drop_table_partition(table, call.request.value)
    return {}


# --- values


async def _newest_table(broker: Broker, name: str) -> TableImage:
    """The table that is to be changed, also if another node has created it a moment ago."""
    return await CatchUp(broker.controller.catch_up).check(partial(_table, broker, name))


def _table(broker: Broker, name: str) -> TableImage:
    found = broker.image.tables.get(name)
    if found is None:
        raise TableError(
            TableCode.table_not_found,
            f"there is no table {name!r}; 'tidemill table list' shows those that exist",
        )
    return found


def _properties(pairs: Sequence[Any]) -> dict[str, str]:
    if len(pairs) > _PROPERTIES_MAX:
        raise refused(f"{len(pairs)} properties, {_PROPERTIES_MAX} are the most")
    if len({pair.key for pair in pairs}) != len(pairs):
        raise refused("a property is given more than once")
    return {pair.key: pair.value for pair in pairs}


def _unset(names: Sequence[str]) -> tuple[str, ...]:
    if len(names) > _PROPERTIES_MAX:
        raise refused(f"{len(names)} properties to unset, {_PROPERTIES_MAX} are the most")
    return tuple(names)


async def _pairs(properties: Mapping[str, str]) -> list[dict[str, str]]:
    names = await sorted_in_slices(tuple(properties))
    return await in_slices({"key": name, "value": properties[name]} for name in names)


def _partition(partition: TablePartition) -> dict[str, Any]:
    return {"partition_id": partition.id, "value": partition.value, "topic": partition.topic}


async def _described(table: TableImage) -> dict[str, Any]:
    return {
        "name": table.name,
        "table_id": table.id,
        "schema": table.schemas[-1],
        "schema_id": len(table.schemas) - 1,
        "older_schemas": table.schemas[:-1],
        "primary_key": table.primary_key,
        "buckets": table.buckets,
        "bucket_map": table.bucket_map,
        "row_format": table.row_format,
        "key_format": table.key_format,
        "partition_column": table.partition_column,
        "properties": await _pairs(table.properties),
        "comment": table.comment,
        "created_ms": table.created_ms,
        "partitions": [_partition(each) for each in table.partitions],
    }
