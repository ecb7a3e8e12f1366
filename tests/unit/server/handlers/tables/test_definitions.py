"""Databases and tables: create, list, describe, alter, drop; what Kafka's admin API may do to their logs."""

from __future__ import annotations

import asyncio
import os
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from support.table_world import START_MS, TableWorld
from tidemill.errors import ErrorCode, TableCode
from tidemill.log.notes.inventory import INVENTORY_NAME
from tidemill.tables.definition import pack_schema, unpack_schema

COLUMNS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("day", pa.date32(), nullable=False),
        pa.field("name", pa.string()),
    ]
)


def pairs(**properties: str) -> list[dict[str, str]]:
    return [{"key": key.replace("_", "."), "value": value} for key, value in properties.items()]


async def create(world: TableWorld, **changes: Any) -> Any:
    """The answer to a CreateTable, whatever it says."""
    body = {
        "name": "shop.orders",
        "schema": pack_schema(COLUMNS),
        "primary_key": ["id"],
        "buckets": 2,
        "boundaries": [],
        "properties": [],
        "if_not_exists": False,
    }
    return await world.ask("CreateTable", **{**body, **changes})


async def alter(world: TableWorld, name: str = "shop.orders", **changes: Any) -> Any:
    return await world.ask("AlterTable", name=name, **changes)


def files(directory: Path) -> list[Path]:
    """What tables have brought: not the node's own lock and inventory."""
    # Unlike ``rglob``, this does not mind directories that go meanwhile.
    return [
        Path(folder).relative_to(directory) / name
        for folder, _, names in os.walk(directory)
        for name in names
        if name not in (INVENTORY_NAME, "lock")
    ]


# --- databases


async def test_a_database_is_created_listed_altered_and_dropped(world: TableWorld) -> None:
    created = await world.done("CreateDatabase", name="shop", comment="ours", properties=pairs(owner="ann"))
    assert created.created
    await world.create("zoo.animals")
    shop, zoo = (await world.done("ListDatabases")).databases
    assert (shop.name, shop.comment, shop.table_count, shop.created_ms) == ("shop", "ours", 0, START_MS)
    assert [(pair.key, pair.value) for pair in shop.properties] == [("owner", "ann")]
    assert (zoo.name, zoo.table_count) == ("zoo", 1)
    await world.done(
        "AlterDatabase",
        name="shop",
        comment="theirs",
        set_properties=pairs(team="b", owner="bob"),
        unset_properties=["absent"],
    )
    shop, _ = (await world.done("ListDatabases")).databases
    assert shop.comment == "theirs"
    assert [(pair.key, pair.value) for pair in shop.properties] == [("owner", "bob"), ("team", "b")]
    assert (await world.done("DropDatabase", name="shop")).dropped
    assert [each.name for each in (await world.done("ListDatabases")).databases] == ["zoo"]


async def test_a_database_that_is_there_already_is_refused_unless_that_is_fine(world: TableWorld) -> None:
    await world.done("CreateDatabase", name="shop")
    again = await world.ask("CreateDatabase", name="shop")
    assert again.error_code == TableCode.database_already_exists
    fine = await world.done("CreateDatabase", name="shop", if_not_exists=True)
    assert not fine.created


async def test_a_database_that_is_not_there_cannot_be_altered_or_dropped(world: TableWorld) -> None:
    for api in ("AlterDatabase", "DropDatabase"):
        assert (await world.ask(api, name="shop")).error_code == TableCode.database_not_found
    assert not (await world.done("DropDatabase", name="shop", if_exists=True)).dropped


async def test_a_database_with_tables_is_dropped_with_cascade_only(world: TableWorld) -> None:
    await world.create("shop.a")
    await world.create("shop.b")
    refused = await world.ask("DropDatabase", name="shop")
    assert refused.error_code == TableCode.database_not_empty
    assert "shop.a, shop.b" in refused.error_message
    assert (await world.done("DropDatabase", name="shop", cascade=True)).dropped
    assert not world.broker.image.tables
    assert not world.broker.image.topics


@pytest.mark.parametrize("name", ["", "a b", "__mine", "a.b", "ü", "x" * 101])
async def test_a_name_that_no_database_can_have_is_refused(world: TableWorld, name: str) -> None:
    assert (await world.ask("CreateDatabase", name=name)).error_code == TableCode.invalid_schema


# --- creating


async def test_a_table_is_created_with_its_database_and_its_log(world: TableWorld) -> None:
    created = await create(world, comment="all orders", properties=pairs(user_owner="ann", retention_ms="5"))
    assert (created.error_code, created.created) == (0, True)
    table = (await world.done("DescribeTable", name="shop.orders")).table
    assert table.table_id == created.table_id
    assert unpack_schema(table.schema).equals(COLUMNS)
    assert (table.schema_id, table.older_schemas) == (0, ())
    assert (table.primary_key, table.buckets, table.row_format, table.key_format) == (
        ("id",),
        2,
        "row",
        "raw",
    )
    assert (table.partition_column, table.comment, table.created_ms) == (None, "all orders", START_MS)
    assert [(each.partition_id, each.value, each.topic) for each in table.partitions] == [
        (0, None, "shop.orders")
    ]
    assert [(pair.key, pair.value) for pair in table.properties] == [
        ("retention.ms", "5"),
        ("user.owner", "ann"),
    ]
    topic = world.broker.find.topic("shop.orders")
    assert len(topic.partitions) == 2
    assert dict(topic.configs) == {"cleanup.policy": "compact", "retention.ms": "5"}
    assert [each.name for each in (await world.done("ListDatabases")).databases] == ["shop"]


async def test_several_key_columns_are_spelt_in_json_by_default(world: TableWorld) -> None:
    await create(world, primary_key=["id", "day"])
    assert (await world.done("DescribeTable", name="shop.orders")).table.key_format == "json"


async def test_a_table_without_a_key_is_a_log_that_is_not_compacted(world: TableWorld) -> None:
    await create(world, primary_key=[], buckets=0)
    topic = world.broker.find.topic("shop.orders")
    assert (len(topic.partitions), dict(topic.configs)) == (1, {})


async def test_a_table_that_is_there_already_is_refused_unless_that_is_fine(world: TableWorld) -> None:
    first = await create(world)
    again = await create(world)
    assert again.error_code == TableCode.table_already_exists
    fine = await create(world, if_not_exists=True, primary_key=["day"])
    assert (fine.error_code, fine.created, fine.table_id) == (0, False, first.table_id)


async def test_a_table_cannot_take_the_name_of_a_topic_nor_a_topic_that_of_a_table(world: TableWorld) -> None:
    topic = {"name": "shop.orders", "num_partitions": 1, "replication_factor": 1}
    (made,) = (await world.ask_kafka("CreateTopics", 7, topics=[topic])).topics
    assert made.error_code == 0
    refused = await create(world)
    assert refused.error_code == TableCode.table_already_exists
    assert "there is a topic of that name" in refused.error_message
    await create(world, name="shop.parts", partition_column="day", primary_key=["id", "day"])
    (taken,) = (await world.ask_kafka("CreateTopics", 7, topics=[{**topic, "name": "shop.parts"}])).topics
    assert taken.error_code == ErrorCode.topic_already_exists


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "orders"}, "give database and table"),
        ({"name": "a.b.c"}, "give database and table"),
        ({"name": "shop."}, "cannot be a table's name"),
        ({"schema": b""}, "is not an Arrow IPC schema"),
        ({"schema": b"\xff\xff\xff\xff\x40\x00\x00\x00rubbish"}, "is not an Arrow IPC schema"),
        ({"schema": pack_schema(COLUMNS).replace(b"name", b"na\xff\xfe")}, "can't decode byte 0xff"),
        ({"schema": pack_schema(pa.schema([])), "primary_key": []}, "column"),
        ({"schema": pack_schema(pa.schema([("a", pa.int8()), ("a", pa.int8())]))}, "'a'"),
        ({"schema": pack_schema(pa.schema([("id", pa.dense_union([]))]))}, "union"),
        ({"primary_key": ["absent"]}, "'absent'"),
        ({"primary_key": ["name"]}, "'name'"),
        ({"primary_key": ["id", "id"]}, "'id'"),
        ({"buckets": 100_001}, "100001 buckets"),
        ({"row_format": "avro"}, "there is no row format 'avro'; choose one of row, json, raw"),
        ({"key_format": "avro"}, "there is no key format 'avro'; choose one of raw, json"),
        ({"primary_key": ["id", "day"], "key_format": "raw"}, "a raw key has one column"),
        ({"row_format": "raw"}, "raw"),
        ({"partition_column": "absent"}, "'absent' is not in the schema"),
        ({"partition_column": "day"}, "must be part of the primary key"),
        ({"partition_column": "name", "primary_key": []}, "must not be nullable"),
        ({"primary_key": [], "boundaries": [b"a"], "buckets": 0}, "cannot be routed by ranges of keys"),
        ({"boundaries": [b"a"], "buckets": 3}, "1 boundaries make 2 buckets, not 3"),
        ({"boundaries": [b"b", b"a"], "buckets": 0}, "boundar"),
        ({"properties": pairs(snapshot_interval_ms="soon")}, "must be a whole number above 0"),
    ],
)
async def test_a_table_that_cannot_be_is_refused_and_leaves_nothing(
    world: TableWorld, changes: dict[str, Any], message: str
) -> None:
    refused = await create(world, **changes)
    assert refused.error_code == TableCode.invalid_schema, refused.error_message
    assert message in refused.error_message
    image = world.broker.image
    assert not image.tables
    assert not image.topics
    assert not image.databases


@pytest.mark.parametrize(
    ("properties", "code", "message"),
    [
        (pairs(retention_mss="5"), ErrorCode.invalid_config, "retention.mss"),
        (pairs(user_x="1") * 2, ErrorCode.invalid_request, "a property is given more than once"),
        (
            [{"key": f"user.{number}", "value": ""} for number in range(1_001)],
            ErrorCode.invalid_request,
            "1001 properties, 1000 are the most",
        ),
    ],
)
async def test_properties_that_no_table_has_are_refused(
    world: TableWorld, properties: list[dict[str, str]], code: ErrorCode, message: str
) -> None:
    refused = await create(world, properties=properties)
    assert refused.error_code == code
    assert message in refused.error_message
    assert not world.broker.image.tables


async def test_a_table_by_ranges_has_a_bucket_more_than_boundaries(world: TableWorld) -> None:
    await create(world, boundaries=[b"g", b"p"], buckets=0)
    table = await world.definition("shop.orders")
    assert (table.buckets, table.bucket_map.kind) == (3, "range")
    assert len(world.broker.find.topic("shop.orders").partitions) == 3


# --- listing


async def test_tables_are_listed_by_name_of_one_database_or_of_all(world: TableWorld) -> None:
    await create(world, name="shop.b", comment="second")
    await create(
        world, name="shop.a", primary_key=["id", "day"], partition_column="day", row_format="json", buckets=3
    )
    await create(world, name="zoo.c", primary_key=[])
    await world.done("CreateTablePartition", table="shop.a", value="2024-01-31")
    listed = (await world.done("ListTables", database="shop")).tables
    assert [(each.name, each.column_count, each.buckets, each.partition_count) for each in listed] == [
        ("shop.a", 3, 3, 1),
        ("shop.b", 3, 2, 0),
    ]
    assert [(each.primary_key, each.row_format, each.comment) for each in listed] == [
        (("id", "day"), "json", None),
        (("id",), "row", "second"),
    ]
    everything = (await world.done("ListTables", database=None)).tables
    assert [each.name for each in everything] == ["shop.a", "shop.b", "zoo.c"]
    missing = await world.ask("ListTables", database="absent")
    assert missing.error_code == TableCode.database_not_found


async def test_a_node_without_tables_lists_none(world: TableWorld) -> None:
    assert (await world.done("ListTables", database=None)).tables == ()
    assert (await world.done("ListDatabases")).databases == ()


@pytest.mark.parametrize("api", ["DescribeTable", "DropTable", "AlterTable"])
async def test_a_table_that_is_not_there_is_not_found(world: TableWorld, api: str) -> None:
    response = await world.ask(api, name="shop.absent")
    assert response.error_code == TableCode.table_not_found
    assert "'tidemill table list' shows those that exist" in response.error_message


# --- altering


async def test_a_nullable_column_can_be_added_and_old_rows_have_none_of_it(world: TableWorld) -> None:
    table = await world.create(buckets=1)
    await world.upsert(table, [{"id": 1, "region": "eu", "amount": 0.5}])
    added = pack_schema(pa.schema([pa.field("note", pa.string())]))
    assert (await alter(world, add_columns=added)).schema_id == 1
    wider = await world.definition("shop.orders")
    assert wider.schema.names == ["id", "region", "amount", "note"]
    assert len(wider.schemas) == 2
    await world.upsert(wider, [{"id": 2, "note": "new"}])
    # A writer that does not know of it yet still writes.
    await world.upsert(table, [{"id": 3, "region": "us", "amount": None}])
    (rows,) = await world.scan(wider)
    assert rows == [
        {"id": 1, "region": "eu", "amount": 0.5, "note": None},
        {"id": 2, "region": None, "amount": None, "note": "new"},
        {"id": 3, "region": "us", "amount": None, "note": None},
    ]


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.field("note", pa.string(), nullable=False), "cannot be added as NOT NULL"),
        (pa.field("region", pa.string()), "'region'"),
        (pa.field("REGION", pa.string()), "REGION"),
    ],
)
async def test_a_column_that_cannot_be_added_is_refused(
    world: TableWorld, column: pa.Field, message: str
) -> None:
    await world.create()
    refused = await alter(world, add_columns=pack_schema(pa.schema([column])))
    assert refused.error_code == TableCode.invalid_schema
    assert message in refused.error_message
    assert len((await world.definition("shop.orders")).schemas) == 1


@pytest.mark.parametrize("rubbish", [b"rubbish", pack_schema(COLUMNS).replace(b"name", b"na\xff\xfe")])
async def test_rubbish_is_no_column(world: TableWorld, rubbish: bytes) -> None:
    await world.create()
    refused = await alter(world, add_columns=rubbish)
    assert refused.error_code == TableCode.invalid_schema
    assert "is not an Arrow IPC schema" in refused.error_message


async def test_properties_are_set_and_taken_back_on_the_table_and_its_topics(world: TableWorld) -> None:
    await world.create(properties={"retention.ms": "5", "user.owner": "ann"})
    changes = pairs(segment_bytes="1048576", snapshot_interval_ms="7", user_owner="bob")
    await alter(world, set_properties=changes, unset_properties=["retention.ms"], comment="new")
    table = await world.definition("shop.orders")
    assert table.comment == "new"
    assert table.properties == {
        "segment.bytes": "1048576",
        "snapshot.interval.ms": "7",
        "user.owner": "bob",
    }
    topic = world.broker.find.topic("shop.orders")
    assert dict(topic.configs) == {"cleanup.policy": "compact", "segment.bytes": "1048576"}
    assert table.schema_id == 0


async def test_a_property_that_cannot_be_set_changes_nothing(world: TableWorld) -> None:
    before = await world.create()
    refused = await alter(world, set_properties=pairs(user_x="1", segment_bytes="many"), comment="new")
    assert refused.error_code == ErrorCode.invalid_config
    after = await world.definition("shop.orders")
    assert (after.properties, after.comment) == (before.properties, None)


async def test_changes_at_once_are_all_made(world: TableWorld) -> None:
    await world.create()
    added = [pack_schema(pa.schema([pa.field(f"c{number}", pa.int8())])) for number in range(4)]
    answers = await asyncio.gather(*(alter(world, add_columns=each) for each in added))
    assert [answer.error_code for answer in answers] == [0] * 4
    assert sorted(answer.schema_id for answer in answers) == [1, 2, 3, 4]
    assert set((await world.definition("shop.orders")).schema.names) >= {"c0", "c1", "c2", "c3"}


# --- partitions


async def test_a_partition_is_created_once_and_has_buckets_of_its_own(world: TableWorld) -> None:
    await create(world, primary_key=["id", "day"], partition_column="day", buckets=3)
    assert not world.broker.image.topics
    made = (await world.done("CreateTablePartition", table="shop.orders", value="2024-01-31")).partition
    again = (await world.done("CreateTablePartition", table="shop.orders", value="2024-01-31")).partition
    assert made == again
    other = (await world.done("CreateTablePartition", table="shop.orders", value="2024-02-01")).partition
    assert other.partition_id != made.partition_id
    assert len(world.broker.find.topic(made.topic).partitions) == 3
    listed = (await world.definition("shop.orders")).partitions
    assert [(each.value, each.topic) for each in listed] == [
        ("2024-01-31", made.topic),
        ("2024-02-01", other.topic),
    ]


async def test_a_partition_is_dropped_with_its_rows_and_others_stay(world: TableWorld) -> None:
    table = await world.create(
        columns="id bigint, day date", primary_key=["id", "day"], partition_by="day", buckets=1
    )
    for value in ("2024-01-31", "2024-02-01"):
        await world.done("CreateTablePartition", table=table.name, value=value)
    table = await world.definition(table.name)
    await world.upsert(table, [{"id": 1, "day": date(2024, 1, 31)}, {"id": 2, "day": date(2024, 2, 1)}])
    first, second = table.partitions
    await world.done("DropTablePartition", table=table.name, value="2024-01-31")
    assert (await world.definition(table.name)).partitions == (second,)
    assert first.topic not in world.broker.image.topics
    gone = await world.open_scan(table, partition_id=first.id)
    assert gone.error_code == TableCode.partition_not_found
    (rows,) = await world.scan(table, partition_id=second.id)
    assert [row["id"] for row in rows] == [2]
    refused = await world.ask("DropTablePartition", table=table.name, value="2024-01-31")
    assert refused.error_code == TableCode.partition_not_found


@pytest.mark.parametrize("value", ["", "a b", "a.b", "x" * 81])
async def test_a_value_that_cannot_name_a_partition_is_refused(world: TableWorld, value: str) -> None:
    await create(world, primary_key=["id", "day"], partition_column="day")
    refused = await world.ask("CreateTablePartition", table="shop.orders", value=value)
    assert refused.error_code == TableCode.row_refused
    assert not world.broker.image.topics


async def test_a_table_that_is_not_partitioned_has_no_partitions(world: TableWorld) -> None:
    await create(world)
    refused = await world.ask("CreateTablePartition", table="shop.orders", value="eu")
    assert refused.error_code == TableCode.invalid_schema
    assert "is not partitioned" in refused.error_message
    absent = await world.ask("CreateTablePartition", table="shop.absent", value="eu")
    assert absent.error_code == TableCode.table_not_found


# --- dropping


async def test_a_dropped_table_takes_its_log_its_state_and_its_leases_with_it(
    world: TableWorld, tmp_path: Path
) -> None:
    table = await world.create(buckets=2)
    await world.upsert(table, [{"id": number} for number in range(10)])
    lease = {"table": table.name, "holder": "me", "duration_ms": 60_000, "fresh": True}
    await world.done("AcquireLease", **lease)
    assert {path.parts[0] for path in files(tmp_path)} == {"kv", "logs"}
    assert (await world.done("DropTable", name=table.name)).dropped
    image = world.broker.image
    assert (len(image.tables), len(image.topics), len(image.leases)) == (0, 0, 0)
    assert (await world.done("ListDatabases")).databases[0].name == "shop"
    assert not (await world.done("DropTable", name=table.name, if_exists=True)).dropped
    async with asyncio.timeout(120):
        while files(tmp_path):  # noqa: ASYNC110 - they go in threads that tell nobody
            await asyncio.sleep(0.01)


async def test_a_table_of_the_same_name_starts_empty(world: TableWorld) -> None:
    table = await world.create()
    await world.upsert(table, [{"id": 1}])
    await world.done("DropTable", name=table.name)
    again = await world.create()
    assert again.table_id != table.table_id
    assert (await world.open_scan(again)).scanner_id is None
    await world.upsert(again, [{"id": 2}])
    (rows,) = await world.scan(again)
    assert [row["id"] for row in rows] == [2]


# --- Kafka's admin API on the log of a table


@pytest.fixture
async def log(world: TableWorld) -> str:
    """The topic of a table with a row, whose cleanup policy lets old records go."""
    table = await world.create(properties={"cleanup.policy": "compact,delete"})
    await world.upsert(table, [{"id": 1}])
    return table.partitions[0].topic


async def test_more_partitions_for_a_table_are_refused(world: TableWorld, log: str) -> None:
    asked = [{"name": log, "count": 5, "assignments": None}]
    for validate_only in (True, False):
        (result,) = (
            await world.ask_kafka("CreatePartitions", 3, topics=asked, validate_only=validate_only)
        ).results
        assert result.error_code == ErrorCode.policy_violation
        assert result.error_message == (
            f"topic '{log}' is the log of table 'shop.orders', whose keys are spread over 1 buckets for good:"
            " create a table with more buckets and copy the rows"
        )
    assert len(world.broker.find.topic(log).partitions) == 1


@pytest.mark.parametrize("keyed", [True, False])
async def test_deleting_records_of_a_table_is_refused(world: TableWorld, log: str, keyed: bool) -> None:
    if not keyed:
        clicks = await world.create("shop.clicks", primary_key=())
        await world.upsert(clicks, [{"id": 1}])
        log = clicks.partitions[0].topic
    asked = [{"name": log, "partitions": [{"partition_index": 0, "offset": 1}]}]
    (topic,) = (await world.ask_kafka("DeleteRecords", 2, topics=asked, timeout=1_000)).topics
    (result,) = topic.partitions
    assert (result.error_code, result.low_watermark) == (ErrorCode.policy_violation, -1)
    assert world.broker.find.partition(world.broker.find.topic(log), 0).log_start_offset == 0


async def test_deleting_the_topic_of_a_table_is_refused(world: TableWorld, log: str) -> None:
    topic_id = world.broker.find.topic(log).id
    for asked in ({"name": log, "topic_id": None}, {"name": None, "topic_id": topic_id}):
        (result,) = (await world.ask_kafka("DeleteTopics", 6, topics=[asked], timeout=1_000)).responses
        assert result.error_code == ErrorCode.policy_violation
        assert result.error_message == (
            f"topic '{log}' is the log of table 'shop.orders': use 'tidemill table drop shop.orders'"
        )
    (rows,) = await world.scan(await world.definition("shop.orders"))
    assert [row["id"] for row in rows] == [1]


@pytest.mark.parametrize("api", ["AlterConfigs", "IncrementalAlterConfigs"])
async def test_configs_of_a_tables_topic_are_changed_through_the_table(
    world: TableWorld, log: str, api: str
) -> None:
    before = dict(world.broker.find.topic(log).configs)
    config: dict[str, Any] = {"name": "cleanup.policy", "value": "delete"}
    if api == "IncrementalAlterConfigs":
        config["config_operation"] = 0
    asked = [{"resource_type": 2, "resource_name": log, "configs": [config]}]
    (result,) = (await world.ask_kafka(api, 1, resources=asked, validate_only=False)).responses
    assert result.error_code == ErrorCode.policy_violation
    assert "tidemill table alter shop.orders --set" in result.error_message
    assert dict(world.broker.find.topic(log).configs) == before
