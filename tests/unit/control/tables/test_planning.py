from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import msgspec
import pytest

from tidemill.control.commands import (
    Command,
    CreatePartitions,
    CreateTopic,
    DeleteTopic,
    RegisterNode,
    SetTopicConfigs,
)
from tidemill.control.image import MetadataImage
from tidemill.control.placement import ControlLimits
from tidemill.control.planning import plan
from tidemill.control.records import encode
from tidemill.control.stores.store import TXN_OPERATIONS_MAX, VALUE_BYTES_MAX, Change, ChangeBatch
from tidemill.control.tables import lease_planning, rules
from tidemill.control.tables.commands import (
    AddTablePartition,
    AlterDatabase,
    AlterTable,
    CreateDatabase,
    CreateTable,
    DropDatabase,
    DropExpiredLeases,
    DropLease,
    DropTable,
    DropTablePartition,
    PutLease,
)
from tidemill.control.tables.images import LeasedSnapshot, LeaseImage, TablePartition
from tidemill.control.tables.planning import partitions_per_drop_max
from tidemill.control.tables.records import UNPARTITIONED_ID, LeaseRecord, table_key
from tidemill.control.tables.rules import DESCRIPTION_BYTES_MAX, SNAPSHOTS_PER_LEASE_MAX
from tidemill.errors import ApiError, ErrorCode, MetadataConflict, TableCode, TableError

LIMITS = ControlLimits(partitions_per_topic=5_000, partitions_per_node=8_000)


def write(image: MetadataImage, writes: Any) -> MetadataImage:
    changes = tuple(Change(key, writes[key]) for key in sorted(writes))
    return image.apply(ChangeBatch(image.revision + 1, changes)) if changes else image


def run(image: MetadataImage, *commands: Command[Any]) -> MetadataImage:
    for command in commands:
        image = write(image, plan(image, command, LIMITS).writes)
    return image


def refused(image: MetadataImage, command: Command[Any]) -> TableCode:
    with pytest.raises(TableError) as caught:
        plan(image, command, LIMITS)
    return caught.value.table_code


def create(name: str = "shop.orders", **fields: Any) -> CreateTable:
    defaults = {
        "topic_id": UUID(int=sum(name.encode()) * 1_000 + len(name)),
        "schema": b"schema 0",
        "primary_key": ("id",),
        "buckets": 3,
        "bucket_map": b"map",
        "row_format": "row",
        "key_format": "raw",
        "created_ms": 7,
    }
    return CreateTable(name=name, **{**defaults, **fields})


def add(table: str, value: str) -> AddTablePartition:
    return AddTablePartition(table=table, value=value, topic_id=uuid4())


def lease(lease_id: str = "l1", table_id: int = 1, **fields: Any) -> LeaseImage:
    defaults = {"holder": "spark", "expires_at_ms": 100, "snapshots": (LeasedSnapshot(0, 2, 5, 900),)}
    return LeaseImage(lease_id=lease_id, table_id=table_id, **{**defaults, **fields})


ONE = run(MetadataImage(), RegisterNode(node_id=0, name="n0", host="h", port=1, incarnation=UUID(int=1)))
ORDERS = run(ONE, create(properties={"a": "1"}, comment="all orders", topic_configs={"retention.ms": "5"}))
EVENTS = run(
    ORDERS,
    create("shop.events", primary_key=(), partition_column="day", topic_configs={"x": "1"}),
    add("shop.events", "2024-01-01"),
    add("shop.events", "2024-01-02"),
)
LEASED = run(
    EVENTS, PutLease(lease=lease("l1", 1)), PutLease(lease=lease("l2", 2)), PutLease(lease=lease("l3", 2))
)


# --- databases


def test_a_database_is_created_changed_and_dropped() -> None:
    image = run(ONE, CreateDatabase(name="d", comment="c", properties={"a": "1", "b": "2"}, created_ms=5))
    database = image.databases["d"]
    assert (database.name, database.comment, database.created_ms) == ("d", "c", 5)
    assert database.properties == {"a": "1", "b": "2"}
    image = run(image, AlterDatabase(name="d", unset_properties=("a", "z"), set_properties={"c": "3"}))
    assert image.databases["d"].properties == {"b": "2", "c": "3"}
    assert image.databases["d"].comment == "c"
    image = run(image, AlterDatabase(name="d", comment=""))
    assert image.databases["d"].comment == ""
    image = run(image, DropDatabase(name="d"))
    assert not image.databases
    assert set(image.key_revisions) == {"nodes/0"}


def test_a_database_that_is_there_is_given_or_refused_as_asked() -> None:
    image = run(ONE, CreateDatabase(name="d", comment="first", created_ms=5))
    again = CreateDatabase(name="d", comment="second", created_ms=6)
    assert refused(image, again) is TableCode.database_already_exists
    planned = plan(image, CreateDatabase(name="d", created_ms=6, if_not_exists=True), LIMITS)
    assert planned.result is image.databases["d"]
    assert not planned.writes


@pytest.mark.parametrize("name", ["", "a.b", "a b", "__a", "ä", "a/b", "x" * 101, "a\n"])
def test_names_that_no_database_can_have(name: str) -> None:
    assert refused(ONE, CreateDatabase(name=name, created_ms=1)) is TableCode.invalid_schema


def refusal(image: MetadataImage, command: Command[Any]) -> tuple[ErrorCode, str]:
    """Code and message of the refusal of a command."""
    with pytest.raises(ApiError) as caught:
        plan(image, command, LIMITS)
    return caught.value.code, caught.value.message


def test_there_are_only_so_many_databases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "DATABASES_MAX", 2)
    image = run(ORDERS, CreateDatabase(name="d", created_ms=1))
    for command in (CreateDatabase(name="e", created_ms=1), create("e.t")):
        code, message = refusal(image, command)
        assert (code, "2 databases" in message) == (ErrorCode.policy_violation, True)
    there = CreateDatabase(name="d", created_ms=1, if_not_exists=True)
    assert not plan(image, there, LIMITS).writes
    run(image, AlterDatabase(name="d", comment="c"), create("d.t"))


def test_databases_take_only_so_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "DATABASE_BYTES_MAX", 1_000)
    image = run(ONE, *(CreateDatabase(name=f"d{n}", comment="c" * 300, created_ms=1) for n in range(2)))
    for command in (
        CreateDatabase(name="e", comment="c" * 300, created_ms=1),
        # Each property takes memory, however short it is.
        AlterDatabase(name="d1", set_properties={f"{n}": "" for n in range(5)}),
    ):
        code, message = refusal(image, command)
        assert (code, "limit of 1000" in message) == (ErrorCode.policy_violation, True)
    # What makes it smaller is done, also if that was stored when there was no limit.
    monkeypatch.setattr(rules, "DATABASE_BYTES_MAX", 10)
    image = run(image, AlterDatabase(name="d1", comment="shorter"), DropDatabase(name="d0"))
    assert image.catalog.database_bytes == image.databases["d1"].size_bytes


@pytest.mark.parametrize(
    ("made", "alter"),
    [
        (CreateDatabase(name="d", properties={"a": "", "b": ""}, created_ms=1), AlterDatabase(name="d")),
        (create("d.t", properties={"a": "", "b": ""}), AlterTable(name="d.t")),
    ],
)
def test_properties_are_limited_also_if_they_come_one_after_the_other(
    made: Command[Any], alter: Command[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = run(ONE, made)
    monkeypatch.setattr(rules, "PROPERTIES_MAX", 1)
    more = msgspec.structs.replace(alter, set_properties={"c": ""})
    assert refused(image, more) is TableCode.invalid_schema
    assert refused(ONE, made) is TableCode.invalid_schema
    # One that has too many since there was no limit can be changed otherwise.
    run(
        image,
        msgspec.structs.replace(alter, set_properties={"a": "1"}),
        msgspec.structs.replace(alter, unset_properties=("a",)),
    )


def test_tables_are_limited_and_so_is_the_memory_of_their_definitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rules, "TABLES_MAX", 2)
    code, message = refusal(EVENTS, create("shop.more", partition_column="day"))
    assert (code, "2 tables" in message) == (ErrorCode.policy_violation, True)
    monkeypatch.undo()
    monkeypatch.setattr(rules, "TABLE_BYTES_MAX", EVENTS.catalog.table_bytes + 100)
    run(EVENTS, AlterTable(name="shop.events", new_schema=b"s" * 100))
    for command in (
        create("shop.more", schema=b"s" * 101),
        AlterTable(name="shop.events", new_schema=b"s" * 101),
    ):
        code, message = refusal(EVENTS, command)
        assert (code, "all tables would have" in message) == (ErrorCode.policy_violation, True)


def test_a_database_with_tables_is_not_dropped() -> None:
    with pytest.raises(TableError, match=r"shop\.events, shop\.orders") as caught:
        plan(EVENTS, DropDatabase(name="shop"), LIMITS)
    assert caught.value.table_code is TableCode.database_not_empty
    # Its name is only the beginning of another's.
    assert plan(
        run(EVENTS, CreateDatabase(name="sho", created_ms=1)), DropDatabase(name="sho"), LIMITS
    ).writes


@pytest.mark.parametrize("command", [DropDatabase(name="no"), AlterDatabase(name="no")])
def test_a_database_that_is_not_there_is_not_found(command: Command[Any]) -> None:
    assert refused(EVENTS, command) is TableCode.database_not_found
    with pytest.raises(TableError, match="no database 'no'"):
        EVENTS.catalog.tables_in("no")


def test_the_tables_of_a_database_are_listed_by_name() -> None:
    image = run(EVENTS, create("shop2.z"), create("shop.a"))
    assert [table.name for table in image.catalog.tables_in("shop")] == [
        "shop.a",
        "shop.events",
        "shop.orders",
    ]


def test_a_database_described_at_too_great_length_is_refused() -> None:
    long = {"a": "x" * DESCRIPTION_BYTES_MAX}
    assert refused(ONE, CreateDatabase(name="d", properties=long, created_ms=1)) is TableCode.invalid_schema
    image = run(ONE, CreateDatabase(name="d", created_ms=1))
    assert refused(image, AlterDatabase(name="d", set_properties=long)) is TableCode.invalid_schema


# --- tables


def test_a_created_table_has_its_database_its_log_and_a_number() -> None:
    table = ORDERS.tables["shop.orders"]
    command = create(properties={"a": "1"}, comment="all orders", topic_configs={"retention.ms": "5"})
    assert plan(ONE, command, LIMITS).result == table
    assert ORDERS.tables_by_id[table.id] is table
    assert (table.database, table.schemas, table.bucket_map) == ("shop", (b"schema 0",), b"map")
    topic = ORDERS.topics["shop.orders"]
    assert (topic.id, len(topic.partitions), topic.configs) == (command.topic_id, 3, {"retention.ms": "5"})
    assert table.partitions == (TablePartition(UNPARTITIONED_ID, None, topic.id, "shop.orders"),)
    assert ORDERS.table_of_topic(topic.id) == (table, table.partitions[0])
    assert ORDERS.databases["shop"].created_ms == 7


def test_a_table_in_a_database_that_is_there_leaves_it_as_it_is_but_guards_it() -> None:
    image = run(ONE, CreateDatabase(name="shop", comment="c", created_ms=5))
    planned = plan(image, create(), LIMITS)
    assert write(image, planned.writes).databases == image.databases
    # A drop of the database as an empty one, planned before, cannot be committed after.
    assert "databases/shop" in planned.writes
    assert "databases/shop" in plan(image, DropDatabase(name="shop"), LIMITS).guards


def test_table_numbers_are_not_used_again() -> None:
    image = run(ORDERS, DropTable(name="shop.orders"), create())
    assert image.tables["shop.orders"].id == ORDERS.tables["shop.orders"].id + 1
    assert ORDERS.tables["shop.orders"].id not in image.tables_by_id


def test_a_partitioned_table_has_no_log_before_its_first_partition() -> None:
    image = run(ONE, create("shop.events", partition_column="day"))
    assert image.tables["shop.events"].partitions == ()
    assert not image.topics
    table = EVENTS.tables["shop.events"]
    assert [(part.id, part.value, part.topic) for part in table.partitions] == [
        (0, "2024-01-01", "shop.events.2024-01-01"),
        (1, "2024-01-02", "shop.events.2024-01-02"),
    ]
    for part in table.partitions:
        topic = EVENTS.topics[part.topic]
        assert (topic.id, len(topic.partitions), topic.configs) == (part.topic_id, 3, {"x": "1"})
        assert EVENTS.table_of_topic(topic.id) == (table, part)


@pytest.mark.parametrize(
    "name", ["orders", "a.b.c", ".b", "a.", "a b.c", "__a.b", "a.__b", "a.ä", "a." + "x" * 101, "a.b\n", ""]
)
def test_names_that_no_table_can_have(name: str) -> None:
    assert refused(ONE, create(name)) is TableCode.invalid_schema


@pytest.mark.parametrize("partition_column", [None, "day"])
def test_table_names_that_are_taken(partition_column: str | None) -> None:
    def refusal(image: MetadataImage, name: str) -> TableCode:
        return refused(image, create(name, partition_column=partition_column, topic_id=uuid4()))

    assert refusal(EVENTS, "shop.orders") is TableCode.table_already_exists
    assert refusal(EVENTS, "shop.events") is TableCode.table_already_exists
    image = run(
        EVENTS,
        create("a.b_c", partition_column="x"),
        CreateTopic(name="plain.topic", topic_id=uuid4()),
        CreateTopic(name="under_score", topic_id=uuid4()),
        add("shop.events", "x"),
    )
    assert refusal(image, "a_b.c") is TableCode.invalid_schema
    assert refusal(image, "plain.topic") is TableCode.table_already_exists
    assert refusal(image, "under.score") is TableCode.invalid_schema
    assert refusal(image, "shop.events_x") is TableCode.invalid_schema


def test_a_topic_cannot_have_the_name_of_a_table() -> None:
    image = run(EVENTS, create("a.b", partition_column="x"))
    for name, code in (
        ("shop.orders", ErrorCode.topic_already_exists),
        ("shop_orders", ErrorCode.invalid_topic_exception),
        ("a.b", ErrorCode.topic_already_exists),
        ("a_b", ErrorCode.invalid_topic_exception),
        ("shop.events.2024-01-01", ErrorCode.topic_already_exists),
    ):
        with pytest.raises(ApiError) as caught:
            plan(image, CreateTopic(name=name, topic_id=uuid4()), LIMITS)
        assert caught.value.code is code


@pytest.mark.parametrize(
    "fields",
    [
        {"buckets": 0},
        {"buckets": -1},
        {"buckets": 5_001},
        {"schema": b"x" * (256 * 1024 + 1)},
        {"comment": "x" * DESCRIPTION_BYTES_MAX},
        {"bucket_map": b"x" * DESCRIPTION_BYTES_MAX},
        {"properties": {"a": "x" * DESCRIPTION_BYTES_MAX}},
    ],
)
@pytest.mark.parametrize("partition_column", [None, "day"])
def test_tables_over_a_limit(fields: Any, partition_column: str | None) -> None:
    assert refused(ONE, create(partition_column=partition_column, **fields)) is TableCode.invalid_schema


def test_what_no_topic_can_be_no_log_can_be() -> None:
    for fields, code in (
        ({"replication": 2}, ErrorCode.invalid_replication_factor),
        ({"topic_id": UUID(int=0)}, ErrorCode.invalid_request),
    ):
        with pytest.raises(ApiError) as caught:
            plan(ONE, create(**fields), LIMITS)
        assert caught.value.code is code
    full = run(ONE, *(create(f"d.t{i}", buckets=4_000) for i in range(2)))
    with pytest.raises(ApiError, match="do not fit on node 0"):
        plan(full, create(buckets=1), LIMITS)


def test_the_log_of_a_table_is_not_deleted_or_grown_as_a_topic() -> None:
    for topic, advice in (
        ("shop.orders", "use 'tidemill table drop shop.orders'"),
        ("shop.events.2024-01-01", "drop that partition"),
    ):
        with pytest.raises(ApiError, match=advice) as caught:
            plan(EVENTS, DeleteTopic(name=topic), LIMITS)
        assert caught.value.code is ErrorCode.policy_violation
        with pytest.raises(ApiError, match="more buckets") as caught:
            plan(EVENTS, CreatePartitions(name=topic, new_count=9), LIMITS)
        assert caught.value.code is ErrorCode.policy_violation
    plain = run(EVENTS, CreateTopic(name="plain", topic_id=uuid4()))
    assert plan(plain, DeleteTopic(name="plain"), LIMITS).writes
    assert plan(plain, CreatePartitions(name="plain", new_count=2), LIMITS).writes


def test_an_altered_table_keeps_what_was_not_altered() -> None:
    image = run(ORDERS, AlterTable(name="shop.orders", base_schema_count=1, new_schema=b"schema 1"))
    table = image.tables["shop.orders"]
    assert table.schemas == (b"schema 0", b"schema 1")
    assert (table.properties, table.comment) == ({"a": "1"}, "all orders")
    assert table.partitions == ORDERS.tables["shop.orders"].partitions
    image = run(image, AlterTable(name="shop.orders", set_properties={"b": "2"}, unset_properties=("a",)))
    assert image.tables["shop.orders"].properties == {"b": "2"}
    assert image.tables["shop.orders"].schemas == table.schemas
    image = run(image, AlterTable(name="shop.orders", comment="some"))
    assert image.tables["shop.orders"].comment == "some"
    assert image.topics["shop.orders"] == ORDERS.topics["shop.orders"]


def test_a_schema_made_from_an_old_one_is_a_conflict() -> None:
    image = run(ORDERS, AlterTable(name="shop.orders", new_schema=b"schema 1"))
    with pytest.raises(MetadataConflict, match=r"shop\.orders.*2 schemas"):
        plan(image, AlterTable(name="shop.orders", base_schema_count=1, new_schema=b"x"), LIMITS)


def test_topic_configs_of_a_table_are_replaced_on_all_its_logs_and_on_later_ones() -> None:
    image = run(
        EVENTS,
        SetTopicConfigs(name="shop.events.2024-01-02", configs={"y": "2"}),
        AlterTable(name="shop.events", topic_configs={"y": "2"}),
        add("shop.events", "2024-01-03"),
    )
    topics = [image.topics[part.topic] for part in image.tables["shop.events"].partitions]
    assert [topic.configs for topic in topics] == [{"y": "2"}] * 3
    assert [len(topic.partitions) for topic in topics] == [3] * 3
    assert image.topics["shop.orders"].configs == {"retention.ms": "5"}
    # A log that was set apart is set back, even if the table itself has the configs already.
    apart = run(image, SetTopicConfigs(name="shop.events.2024-01-01", configs={}))
    planned = plan(apart, AlterTable(name="shop.events", topic_configs={"y": "2"}), LIMITS)
    assert set(planned.writes) == {"topics/shop_events_2024-01-01"}
    assert set(planned.guards) == {"tables/shop_events"}


def test_a_dropped_table_leaves_no_key_of_its_own() -> None:
    image = run(LEASED, DropTable(name="shop.events"))
    assert (
        plan(LEASED, DropTable(name="shop.events", table_id=2), LIMITS).result == LEASED.tables["shop.events"]
    )
    assert set(image.topics) == {"shop.orders"}
    assert set(image.leases) == {"l1"}
    assert image.replica_counts == {0: 3}
    image = run(image, DropTable(name="shop.orders"), DropDatabase(name="shop"))
    assert set(image.key_revisions) == {"nodes/0", "table-ids"}
    assert not image.catalog.log_owners
    assert not image.catalog.leases_by_table
    assert not image.catalog.table_names_by_normalised


@pytest.mark.parametrize(
    "command",
    [
        DropTable(name="shop.no"),
        DropTable(name="shop_orders"),
        DropTable(name="shop.orders", table_id=9),
        AlterTable(name="shop.no", comment="c"),
        AlterTable(name="shop.orders", table_id=9, comment="c"),
        AddTablePartition(table="shop.no", value="x", topic_id=UUID(int=5)),
        AddTablePartition(table="shop.events", value="x", topic_id=UUID(int=5), table_id=9),
        DropTablePartition(table="shop.no", value="x"),
        DropTablePartition(table="shop.events", value="2024-01-01", table_id=9),
        PutLease(lease=lease("new", table_id=9)),
    ],
)
def test_a_table_that_is_not_there_is_not_found(command: Command[Any]) -> None:
    assert refused(EVENTS, command) is TableCode.table_not_found


def test_a_table_whose_topic_is_gone_can_still_be_dropped() -> None:
    # As an older Tidemill leaves it, which knew no tables and deleted the topic.
    topic = ORDERS.topics["shop.orders"]
    image = write(ORDERS, {"topics/shop_orders": None, f"partitions/{topic.id.hex}/000": None})
    assert not image.topics
    assert set(run(image, DropTable(name="shop.orders")).key_revisions) == {
        "nodes/0",
        "databases/shop",
        "table-ids",
    }


# --- partitions


def test_adding_a_partition_that_is_there_gives_it() -> None:
    planned = plan(EVENTS, add("shop.events", "2024-01-02"), LIMITS)
    assert planned.result is EVENTS.tables["shop.events"].partition("2024-01-02")
    assert not planned.writes


def test_a_dropped_partition_takes_its_log_along_and_its_number_is_not_used_again() -> None:
    image = run(EVENTS, DropTablePartition(table="shop.events", value="2024-01-02"))
    assert set(image.topics) == {"shop.orders", "shop.events.2024-01-01"}
    assert image.tables["shop.events"].partition("2024-01-02") is None
    image = run(image, add("shop.events", "2024-01-02"), add("shop.events", "2024-01-03"))
    assert [part.id for part in image.tables["shop.events"].partitions] == [0, 2, 3]


def test_partitions_that_cannot_be_dropped() -> None:
    for table in ("shop.events", "shop.orders"):
        command = DropTablePartition(table=table, value="no")
        assert refused(EVENTS, command) is TableCode.partition_not_found


@pytest.mark.parametrize("value", ["", "a b", "a/b", "ä", "x" * 101, "a\n"])
def test_values_that_no_partition_can_have(value: str) -> None:
    assert refused(EVENTS, add("shop.events", value)) is TableCode.invalid_schema


def test_partitions_that_cannot_be_added() -> None:
    assert refused(EVENTS, add("shop.orders", "x")) is TableCode.invalid_schema
    image = run(EVENTS, add("shop.events", "a.b"), CreateTopic(name="shop.events.taken", topic_id=uuid4()))
    assert refused(image, add("shop.events", "a_b")) is TableCode.invalid_schema
    assert refused(image, add("shop.events", "taken")) is TableCode.table_already_exists
    image = run(image, create("shop.events_y", partition_column="x"))
    assert refused(image, add("shop.events", "y")) is TableCode.invalid_schema
    long = run(ONE, create("d" * 100 + "." + "t" * 100, partition_column="x"))
    with pytest.raises(TableError, match="47 are left"):
        plan(long, add("d" * 100 + "." + "t" * 100, "x" * 48), LIMITS)
    assert plan(long, add("d" * 100 + "." + "t" * 100, "x" * 47), LIMITS).writes


# --- limits of the store


def partitioned(count: int, **fields: Any) -> MetadataImage:
    """A table of that many partitions with the longest names, as adding them one by one would leave it."""
    name = "d" * 74 + "." + "t" * 73
    image = run(ONE, create(name, partition_column="day", **{"buckets": 1, **fields}))
    record = image.tables[name].to_record()
    parts = []
    writes: dict[str, bytes | None] = {}
    for i in range(count):
        value = f"{i:0100d}"
        parts.append(TablePartition(2**31 + i, value, UUID(int=i + 10), f"{name}.{value}"))
        topic = CreateTopic(name=parts[-1].topic, topic_id=parts[-1].topic_id, partitions=record.buckets)
        writes |= plan(image, topic, LIMITS).writes
    grown = msgspec.structs.replace(record, partitions=tuple(parts), next_partition_id=2**31 + count)
    return write(image, writes | {table_key(name): encode(grown)})


def test_a_table_at_all_its_limits_fits_into_one_value_and_can_be_grown_no_further() -> None:
    schemas = b"x" * (224 * 1024)
    image = partitioned(999, schema=schemas, comment="c" * (DESCRIPTION_BYTES_MAX - 1_000), replication=1)
    (name,) = image.tables
    image = run(image, AlterTable(name=name, new_schema=schemas), add(name, "9" * 100))
    (table,) = image.tables.values()
    assert len(table.partitions) == 1_000
    assert 900_000 < len(encode(table.to_record())) <= VALUE_BYTES_MAX
    with pytest.raises(ApiError, match="1000 partitions, which is the limit") as caught:
        plan(image, add(name, "more"), LIMITS)
    assert caught.value.code is ErrorCode.policy_violation
    assert refused(image, AlterTable(name=name, new_schema=b"y")) is TableCode.invalid_schema
    assert plan(image, add(name, "0" * 100), LIMITS).result.id == 2**31


@pytest.mark.parametrize(("buckets", "most"), [(1, 63), (1_001, 42)])
def test_a_table_is_dropped_at_once_up_to_the_operations_of_a_transaction(buckets: int, most: int) -> None:
    image = partitioned(most, buckets=buckets)
    (name,) = image.tables
    assert partitions_per_drop_max(image, image.tables[name]) == most
    planned = plan(image, DropTable(name=name), LIMITS)
    assert TXN_OPERATIONS_MAX - 3 < len(planned.writes) + len(planned.guards) <= TXN_OPERATIONS_MAX
    with pytest.raises(ApiError, match="drop partitions of it first"):
        plan(partitioned(most + 1, buckets=buckets), DropTable(name=name), LIMITS)


def test_more_leases_than_fit_beside_the_logs_are_left_to_expire() -> None:
    image = run(partitioned(60), *(PutLease(lease=lease(f"l{i:02}")) for i in range(10)))
    (name,) = image.tables
    planned = plan(image, DropTable(name=name), LIMITS)
    assert len(planned.writes) + len(planned.guards) == TXN_OPERATIONS_MAX
    after = write(image, planned.writes)
    assert sorted(after.leases) == ["l06", "l07", "l08", "l09"]
    assert not run(after, DropExpiredLeases(now_ms=100)).leases


def test_configs_of_too_many_logs_are_not_changed_at_once() -> None:
    image = partitioned(101)
    (name,) = image.tables
    with pytest.raises(ApiError, match="101 logs"):
        plan(image, AlterTable(name=name, topic_configs={"a": "1"}), LIMITS)
    image = run(image, SetTopicConfigs(name=f"{name}.{0:0100d}", configs={"a": "1"}))
    planned = plan(image, AlterTable(name=name, topic_configs={"a": "1"}), LIMITS)
    assert len(planned.writes) + len(planned.guards) <= TXN_OPERATIONS_MAX
    # Other changes do not touch the logs, however many there are.
    assert len(plan(image, AlterTable(name=name, comment="c"), LIMITS).writes) == 1


# --- leases


def test_a_lease_is_taken_renewed_and_released() -> None:
    taken = lease(expires_at_ms=100)
    image = run(ORDERS, PutLease(lease=taken))
    assert image.leases["l1"] == taken
    assert image.leases_of(1) == (taken,)
    renewed = lease(expires_at_ms=200, snapshots=(LeasedSnapshot(0, 2, 6, 950),))
    image = run(image, PutLease(lease=renewed, renew=True))
    assert image.leases_of(1) == (renewed,)
    assert plan(image, DropLease(lease_id="l1"), LIMITS).result == renewed
    assert not run(image, DropLease(lease_id="l1")).leases


def test_a_lease_that_is_gone_is_neither_renewed_nor_released() -> None:
    assert refused(ORDERS, PutLease(lease=lease("l1"), renew=True)) is TableCode.lease_not_found
    assert refused(ORDERS, DropLease(lease_id="l1")) is TableCode.lease_not_found
    moved = PutLease(lease=lease("l2", table_id=1), renew=True)
    assert refused(LEASED, moved) is TableCode.lease_not_found


def test_leases_that_cannot_be_taken() -> None:
    snapshots = (LeasedSnapshot(0, 0, 1, 1),) * (SNAPSHOTS_PER_LEASE_MAX + 1)
    for bad in (
        lease("a b"),
        lease(""),
        lease("x" * 101),
        lease("a/b"),
        lease("new", holder="x" * 1_001),
        lease("new", snapshots=snapshots),
        lease("l2", table_id=1),
    ):
        with pytest.raises(ApiError) as caught:
            plan(LEASED, PutLease(lease=bad), LIMITS)
        assert caught.value.code is ErrorCode.invalid_request


def test_the_largest_lease_fits_into_one_value() -> None:
    snapshots = (LeasedSnapshot(2**31, 49_999, 2**62, 2**62),) * SNAPSHOTS_PER_LEASE_MAX
    record = LeaseRecord(
        lease_id="x" * 100, table_id=2**40, holder="ä" * 1_000, expires_at_ms=2**60, snapshots=snapshots
    )
    assert len(encode(record)) < VALUE_BYTES_MAX


def test_a_table_has_only_so_many_leases() -> None:
    writes: dict[str, bytes | None] = {}
    for i in range(1_000):
        writes |= plan(ORDERS, PutLease(lease=lease(f"l{i}")), LIMITS).writes
    image = write(ORDERS, writes)
    with pytest.raises(ApiError, match="1000 leases"):
        plan(image, PutLease(lease=lease("more")), LIMITS)
    assert plan(image, PutLease(lease=lease("l5")), LIMITS).writes


def test_leases_that_are_over_are_dropped_the_oldest_first_and_no_other() -> None:
    commands = [PutLease(lease=lease(f"l{i:03}", expires_at_ms=1_000 - i)) for i in range(100)]
    image = run(ORDERS, *commands)
    assert not plan(image, DropExpiredLeases(now_ms=900), LIMITS).writes
    planned = plan(image, DropExpiredLeases(now_ms=990), LIMITS)
    assert [each.lease_id for each in planned.result] == [f"l{i:03}" for i in range(99, 35, -1)]
    assert len(planned.writes) + len(planned.guards) == TXN_OPERATIONS_MAX
    image = write(image, planned.writes)
    image = run(image, DropExpiredLeases(now_ms=990))
    assert sorted(image.leases) == [f"l{i:03}" for i in range(10)]
    assert not plan(image, DropExpiredLeases(now_ms=990), LIMITS).writes


def test_all_leases_together_have_only_so_many_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "LEASED_SNAPSHOTS_MAX", 4)
    two = (LeasedSnapshot(0, 0, 5, 900), LeasedSnapshot(0, 1, 5, 900))
    added = PutLease(lease=lease("l1", snapshots=two), add=True)
    for command in (PutLease(lease=lease("new", snapshots=two)), added):
        code, message = refusal(LEASED, command)
        assert (code, "5 snapshots" in message) == (ErrorCode.policy_violation, True)
    run(LEASED, PutLease(lease=lease("new")), PutLease(lease=lease("new", expires_at_ms=300), renew=True))
    monkeypatch.setattr(rules, "LEASES_MAX", 3)
    assert refusal(LEASED, PutLease(lease=lease("new")))[0] is ErrorCode.policy_violation
    assert plan(LEASED, PutLease(lease=lease("l1", expires_at_ms=300), renew=True), LIMITS).writes


def test_leases_of_many_snapshots_are_dropped_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_planning, "_SNAPSHOTS_PER_DROP", 4)
    three = tuple(LeasedSnapshot(0, bucket, 5, 900) for bucket in range(3))
    image = run(ORDERS, *(PutLease(lease=lease(f"l{n}", snapshots=three * 2)) for n in range(3)))
    for left in (2, 1, 0):
        image = run(image, DropExpiredLeases(now_ms=100))
        assert len(image.leases) == left
        assert image.catalog.leased_offsets_of(1, 0, 2) == (900, 900) * left
    # The index of a table goes as a whole, so all of its leases may go with it.
    image = run(ORDERS, *(PutLease(lease=lease(f"l{n}", snapshots=three * 2)) for n in range(3)))
    image = run(image, DropTable(name="shop.orders"))
    assert (len(image.leases), len(image.catalog.leased_offsets)) == (0, 0)


# --- guards


@pytest.mark.parametrize(
    "command",
    [
        CreateDatabase(name="new", created_ms=1),
        AlterDatabase(name="shop", comment="c"),
        create("shop.new"),
        create("shop.new", partition_column="x"),
        AlterTable(name="shop.orders", comment="c"),
        AlterTable(name="shop.events", topic_configs={}),
        DropTable(name="shop.events"),
        add("shop.events", "new"),
        DropTablePartition(table="shop.events", value="2024-01-01"),
        PutLease(lease=lease("new")),
        PutLease(lease=lease("l1", expires_at_ms=5), renew=True),
        DropLease(lease_id="l1"),
        DropExpiredLeases(now_ms=10_000),
    ],
)
def test_every_plan_is_guarded_by_the_revisions_that_it_saw(command: Command[Any]) -> None:
    planned = plan(LEASED, command, LIMITS)
    assert planned.guards
    assert all(LEASED.key_revision(key) == revision for key, revision in planned.guards.items())
    vouched: tuple[str, ...] = ("partitions/",)
    if any(key.startswith("tables/") for key in planned.guards):
        vouched += ("topics/shop_events_", "leases/")
    assert all(key.startswith(vouched) for key in planned.writes.keys() - planned.guards.keys())


def test_a_lease_is_guarded_by_its_table() -> None:
    assert "tables/shop_orders" in plan(LEASED, PutLease(lease=lease("new")), LIMITS).guards


@pytest.mark.parametrize(
    "command",
    [
        AlterDatabase(name="shop", unset_properties=("no",)),
        AlterTable(name="shop.orders", set_properties={"a": "1"}, topic_configs={"retention.ms": "5"}),
        DropExpiredLeases(now_ms=0),
    ],
)
def test_a_command_that_changes_nothing_writes_nothing(command: Command[Any]) -> None:
    planned = plan(LEASED, command, LIMITS)
    assert not planned.writes
    assert not planned.guards
