"""Databases, tables and errors, through the client that users have, on a node in another process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import tidemill
from support.ports import free_port
from support.processes import NodeProcess
from support.table_nodes import SOON, new_name, records_of, rows_of
from tidemill.client.sync_client import Tidemill
from tidemill.client.sync_table import Table
from tidemill.errors import ApiError, NodeUnavailable, TableCode, TableError, TidemillError

COLUMNS = "id bigint, region string, amount double"
ROWS: list[dict[str, Any]] = [{"id": n, "region": ("us", "eu")[n % 2], "amount": n / 2} for n in range(100)]


@pytest.fixture(scope="module")
def table_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("tables") / "data", **SOON) as running:
        yield running


@pytest.fixture(scope="module")
def db(table_node: NodeProcess) -> Iterator[Tidemill]:
    with tidemill.connect(table_node.bootstrap_servers) as connected:
        yield connected


@pytest.fixture(scope="module")
def orders(db: Tidemill) -> Table:
    """A table that tests only read."""
    table = db.create_table("shared.orders", COLUMNS, primary_key=["id"], buckets=3, comment="for reading")
    table.upsert(ROWS)
    return table


def refusal(call: Any) -> TableError:
    with pytest.raises(TableError) as caught:
        call()
    return caught.value


# --- databases and tables


def test_a_database_is_created_listed_altered_and_dropped(db: Tidemill) -> None:
    db.create_database("sales", comment="what we sell", properties={"owner": "ann"})
    (found,) = [each for each in db.databases() if each.name == "sales"]
    assert (found.comment, dict(found.properties), found.table_count) == (
        "what we sell",
        {"owner": "ann"},
        0,
    )
    db.alter_database("sales", set_properties={"tier": "gold"}, unset_properties=["owner"], comment="more")
    (found,) = [each for each in db.databases() if each.name == "sales"]
    assert (found.comment, dict(found.properties)) == ("more", {"tier": "gold"})
    table = db.create_table("sales.orders", COLUMNS, primary_key="id")
    assert refusal(lambda: db.drop_database("sales")).table_code == TableCode.database_not_empty
    db.drop_database("sales", cascade=True)
    assert "sales" not in [each.name for each in db.databases()]
    assert refusal(lambda: table.lookup(1)).table_code == TableCode.table_not_found
    assert refusal(lambda: db.drop_database("sales")).table_code == TableCode.database_not_found
    db.drop_database("sales", if_exists=True)


def test_a_database_that_exists_is_created_again_only_if_that_is_said_to_be_fine(db: Tidemill) -> None:
    db.create_database("twice")
    assert refusal(lambda: db.create_database("twice")).table_code == TableCode.database_already_exists
    db.create_database("twice", if_not_exists=True)


def test_a_table_tells_everything_that_was_said_about_it(db: Tidemill) -> None:
    name = new_name("described")
    made = db.create_table(
        name,
        "region string, id bigint, amount decimal(10,2)",
        primary_key=["region", "id"],
        buckets=3,
        properties={"segment.bytes": "1048576", "snapshot.interval.ms": "60000", "user.owner": "ann"},
        comment="a table",
    )
    found = db.table(name)
    for table in (made, found):
        assert (table.name, table.primary_key, table.buckets) == (name, ("region", "id"), 3)
        assert table.schema == pa.schema(
            [
                pa.field("region", pa.string(), nullable=False),
                pa.field("id", pa.int64(), nullable=False),
                pa.field("amount", pa.decimal128(10, 2)),
            ]
        )
        assert dict(table.properties) == {
            "segment.bytes": "1048576",
            "snapshot.interval.ms": "60000",
            "user.owner": "ann",
        }
        assert table.definition.comment == "a table"
    (listed,) = [each for each in db.tables("test") if each.name == name]
    assert (listed.primary_key, listed.column_count, listed.buckets) == (("region", "id"), 3, 3)
    assert (listed.row_format, listed.partition_count, listed.comment) == ("row", 0, "a table")
    assert name in [each.name for each in db.tables()]


def test_a_dropped_table_is_gone_and_its_name_is_free(db: Tidemill) -> None:
    name = new_name("dropped")
    old = db.create_table(name, COLUMNS, primary_key="id", buckets=2)
    old.upsert(ROWS)
    assert refusal(lambda: db.create_table(name, COLUMNS, primary_key="id")).table_code == (
        TableCode.table_already_exists
    )
    again = db.create_table(name, COLUMNS, primary_key="id", if_not_exists=True)
    assert again.lookup(1) == ROWS[1]
    old.drop()
    assert refusal(lambda: db.table(name)).table_code == TableCode.table_not_found
    assert refusal(lambda: db.drop_table(name)).table_code == TableCode.table_not_found
    db.drop_table(name, if_exists=True)
    new = db.create_table(name, "id bigint, other string", primary_key="id")
    assert new.scan().count() == 0
    new.upsert({"id": 1, "other": "x"})
    assert new.lookup(1) == {"id": 1, "other": "x"}


def test_a_handle_of_a_table_that_was_made_anew_works_after_a_refresh(db: Tidemill) -> None:
    name = new_name("anew")
    handle = db.create_table(name, COLUMNS, primary_key="id")
    handle.upsert(ROWS)
    db.drop_table(name)
    db.create_table(name, COLUMNS, primary_key="id", buckets=2)
    assert refusal(lambda: handle.lookup(1)).table_code == TableCode.table_not_found
    assert refusal(lambda: handle.scan().to_arrow()).table_code == TableCode.table_not_found
    handle.refresh()
    assert handle.lookup(1) is None
    handle.upsert(ROWS[:3])
    assert handle.lookup(1) == ROWS[1]
    assert handle.scan().count() == 3


def test_a_column_is_added_and_older_rows_have_null_in_it(db: Tidemill) -> None:
    name = new_name("altered")
    table = db.create_table(name, COLUMNS, primary_key="id", buckets=2)
    other = db.table(name)
    table.upsert(ROWS[:2])
    table.alter(add_columns="note string, tags array<string>", set_properties={"user.owner": "bob"})
    table.upsert({"id": 2, "region": "eu", "amount": 1.0, "note": "new", "tags": ["a", "b"]})
    assert table.lookup(0) == {**ROWS[0], "note": None, "tags": None}
    assert (table.lookup(2) or {})["tags"] == ["a", "b"]
    assert table.scan(where="note IS NULL").count() == 2
    assert dict(table.properties) == {"user.owner": "bob"}
    # Who does not know of the new column goes on as before, in both directions.
    assert other.lookup(2) == {"id": 2, "region": "eu", "amount": 1.0}
    other.upsert({"id": 3, "region": "us", "amount": 2.0})
    assert other.scan().to_arrow().schema.names == ["id", "region", "amount"]
    assert table.lookup(3) == {"id": 3, "region": "us", "amount": 2.0, "note": None, "tags": None}
    assert (other.refresh().lookup(2) or {})["note"] == "new"
    table.alter(unset_properties=["user.owner"], comment="changed")
    assert (dict(table.properties), table.definition.comment) == ({}, "changed")


def test_what_cannot_be_altered_is_refused_and_changes_nothing(db: Tidemill) -> None:
    table = db.create_table(new_name("rigid"), COLUMNS, primary_key="id")
    rigid = pa.schema([pa.field("n", pa.int32(), nullable=False)])
    for columns in ("region string", "REGION int", rigid, "_tidemill_x int"):
        assert refusal(lambda columns=columns: table.alter(add_columns=columns)).table_code == (
            TableCode.invalid_schema
        )
    with pytest.raises(ApiError, match=r"snapshot\.intervall\.ms"):
        table.alter(set_properties={"snapshot.intervall.ms": "1"})
    assert table.refresh().schema.names == ["id", "region", "amount"]
    assert dict(table.properties) == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"schema": "id bigint, id string"}, "one name"),
        ({"schema": "id uint64"}, "uint64"),
        ({"schema": "id bigint", "primary_key": "nope"}, "nope"),
        ({"schema": "id array<int>", "primary_key": "id"}, "id"),
        ({"schema": "id bigint", "primary_key": "id", "buckets": 0}, "bucket"),
        ({"schema": "id bigint", "primary_key": "id", "row_format": "xml"}, "xml"),
        ({"schema": "id bigint", "primary_key": "id", "key_format": "xml"}, "xml"),
        ({"schema": "id bigint, d string", "primary_key": "id", "partition_by": "d"}, "part of the primary"),
        ({"schema": "id bigint", "primary_key": "id", "boundaries": [5, 3]}, "not above"),
        ({"schema": "id bigint", "primary_key": "id", "boundaries": [3], "buckets": 5}, "2 buckets"),
        ({"schema": "id bigint", "primary_key": "id", "properties": {"nope": "1"}}, "nope"),
    ],
)
def test_a_table_that_cannot_be_is_refused_in_words(
    db: Tidemill, arguments: dict[str, Any], words: str
) -> None:
    name = new_name("impossible")
    with pytest.raises(ApiError, match=words):
        db.create_table(name, arguments.pop("schema"), **arguments)
    assert refusal(lambda: db.table(name)).table_code == TableCode.table_not_found


@pytest.mark.parametrize("name", ["nodatabase", "a.b.c", ".x", "x.", "", "a b.c", "../x.y"])
def test_a_name_that_no_table_can_have_is_refused(db: Tidemill, name: str) -> None:
    with pytest.raises(ApiError):
        db.create_table(name, "id bigint", primary_key="id")


# --- reading


def test_scans_filter_project_and_limit_on_the_server(orders: Table) -> None:
    def ids(**options: Any) -> list[int]:
        return sorted(orders.scan(columns=["id"], **options).to_arrow().column("id").to_pylist())

    assert ids() == list(range(100))
    assert ids(where="region = 'eu' AND amount > 45") == [91, 93, 95, 97, 99]
    assert ids(where=(pc.field("region") == "eu") & (pc.field("amount") > 45)) == [91, 93, 95, 97, 99]
    assert ids(key_range=(10, 15)) == [10, 11, 12, 13, 14]
    assert ids(key_range=(None, 3)) == [0, 1, 2]
    assert ids(key_range=(97, None)) == [97, 98, 99]
    assert ids(key_range=(10, 20), where="region = 'us' AND id <> 12") == [10, 14, 16, 18]
    assert ids(where="id IN (5, 500, 7)") == [5, 7]
    assert ids(where="id > 3 AND id < 3") == []
    assert len(ids(limit=7)) == 7
    assert ids(limit=0) == []
    assert len(set(ids(limit=1_000))) == 100
    assert orders.scan(where="region = 'eu'").count() == 50
    assert orders.scan(where="amount >= 10", limit=5).count() == 5
    assert orders.scan(columns=["amount", "id"]).to_arrow().schema.names == ["amount", "id"]


def test_a_scan_is_an_arrow_stream_for_polars_duckdb_and_pandas(orders: Table) -> None:
    scan = orders.scan(columns=["id", "amount"], where="region = 'eu'")
    expected = [{"id": row["id"], "amount": row["amount"]} for row in ROWS if row["region"] == "eu"]
    assert rows_of(pl.DataFrame(scan).to_arrow()) == rows_of(pa.Table.from_pylist(expected))
    assert scan.to_polars().height == 50
    total = sum(row["amount"] for row in expected)
    counted = duckdb.sql("SELECT count(*), sum(amount) FROM scan")
    assert counted is not None
    assert counted.fetchall() == [(50, total)]
    assert scan.to_pandas()["amount"].sum() == total
    assert pa.RecordBatchReader.from_stream(scan).read_all().num_rows == 50
    with scan.to_reader() as reader:
        assert reader.schema == scan.schema


def test_tables_and_scans_show_themselves_in_notebooks(db: Tidemill, orders: Table) -> None:
    table = db.create_table(new_name("html"), "id bigint, `a<b>` string", primary_key="id")
    table.upsert({"id": 1, "a<b>": "<script>"})
    assert "a&lt;b&gt;" in table._repr_html_()
    shown = table.scan()._repr_html_()
    assert "&lt;script&gt;" in shown
    assert "<script>" not in shown
    assert orders.scan()._repr_html_().count("<tr>") == 21
    assert repr(orders) == (
        "<table shared.orders: id bigint, region string, amount double, primary key (id), 3 buckets>"
    )


def test_a_scan_that_is_dropped_early_leaves_nothing_open(orders: Table) -> None:
    for _ in range(20):
        next(iter(orders.scan(fetch_max_bytes=1)))
    assert sum(each.scanner_count for each in orders.stats()) == 0


def test_an_iterator_may_outlive_its_connection(table_node: NodeProcess, orders: Table) -> None:
    with tidemill.connect(table_node.bootstrap_servers) as db:
        table = db.table(orders.name)
        scan, follow = iter(table.scan(fetch_max_bytes=1)), iter(table.follow())
        next(scan)
        next(follow)
    # Unraisable errors in what is dropped now are errors of this test.
    del scan, follow


def test_ctrl_c_ends_a_follow_and_the_connection_goes_on(table_node: NodeProcess, orders: Table) -> None:
    with tidemill.connect(table_node.bootstrap_servers) as db:
        table = db.table(orders.name)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 -- the interrupt comes in the loop
                for _ in table.follow():
                    # Again for each batch: behind the last one it waits.
                    signal.setitimer(signal.ITIMER_REAL, 0.3)
        finally:
            signal.signal(signal.SIGALRM, before)
        assert table.lookup(1) == ROWS[1]


def test_a_follow_ends_when_another_thread_closes_the_connection(
    table_node: NodeProcess, orders: Table
) -> None:
    db = tidemill.connect(table_node.bootstrap_servers)
    table, seen = db.table(orders.name), threading.Event()
    ended: list[BaseException] = []

    def follow() -> None:
        try:
            for _ in table.follow():
                seen.set()
        except tidemill.ConnectionClosed as error:
            ended.append(error)

    thread = threading.Thread(target=follow)
    thread.start()
    assert seen.wait(120)
    db.close()
    thread.join(120)
    (error,) = ended
    assert "closed" in str(error)


def test_stats_count_rows_and_offsets(db: Tidemill) -> None:
    table = db.create_table(new_name("stats"), COLUMNS, primary_key="id", buckets=2)
    table.upsert(ROWS)
    table.delete([{"id": n} for n in range(10)])
    table.scan().count()
    stats = table.stats()
    assert [each.bucket for each in stats] == [0, 1]
    assert sum(each.log_end_offset for each in stats) == 110
    assert all(each.applied_offset == each.log_end_offset for each in stats)
    assert all(each.problem is None and each.partition is None and each.log_bytes > 0 for each in stats)


# --- errors


def test_errors_have_codes_names_and_say_whether_to_try_again(orders: Table) -> None:
    error = refusal(lambda: orders.scan(columns=["nope"]))
    assert (error.table_code, error.name, error.retriable) == (
        TableCode.invalid_scan_request,
        "INVALID_SCAN_REQUEST",
        False,
    )
    assert "it has id, region, amount" in error.message
    assert isinstance(error, ApiError)
    assert isinstance(error, TidemillError)
    assert TableCode.state_damaged.retriable
    assert not TableCode.row_refused.retriable


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("nope = 1", "nope"),
        ("region = ", ""),
        ("region > 5", "region"),
        ("amount LIKE '%x'", ""),
        ("sum(amount) > 1", ""),
        ("region = 'eu'; DROP TABLE x", ""),
        (pc.field("nope") == 1, "nope"),
        (pc.field("amount") * 2 > 1, ""),
        (5, "not 5"),
    ],
)
def test_a_filter_that_does_not_fit_is_refused(orders: Table, where: Any, words: str) -> None:
    error = refusal(lambda: orders.scan(where=where).to_arrow())
    assert error.table_code == TableCode.invalid_predicate
    assert words in error.message


@pytest.mark.parametrize(
    "options",
    [
        {"parallel": 0},
        {"fetch_max_bytes": 0},
        {"limit": -1},
        {"columns": []},
        {"columns": ["id", "id"]},
        {"key_range": (1, 2, 3)},
    ],
)
def test_a_scan_that_cannot_be_is_refused(orders: Table, options: dict[str, Any]) -> None:
    error = refusal(lambda: orders.scan(**options).to_arrow())
    assert error.table_code in (TableCode.invalid_scan_request, TableCode.key_refused)


def test_what_is_no_key_is_refused(orders: Table) -> None:
    for key in ("1", 1.5, None, (1, 2), {"x": 1}, True, 2**63):
        assert refusal(lambda key=key: orders.lookup(key)).table_code == TableCode.key_refused
        assert refusal(lambda key=key: orders.delete([key])).table_code == TableCode.key_refused
    assert refusal(lambda: orders.lookup_prefix((1, 2))).table_code == TableCode.key_refused
    assert refusal(lambda: orders.scan(key_range=("a", None))).table_code == TableCode.key_refused
    assert orders.lookup(-1) is None
    assert orders.lookup({"id": 1, "region": "ignored"}) == ROWS[1]
    assert orders.lookup([]).num_rows == 0


def test_a_bucket_that_is_not_there_is_refused(orders: Table) -> None:
    assert refusal(lambda: orders.bucket_scanner(3)).table_code == TableCode.bucket_not_found
    assert refusal(lambda: orders.bucket_scanner(0, partition="x")).table_code == (
        TableCode.partition_not_found
    )


def test_no_node_is_an_error_at_once(free_address: str) -> None:
    with pytest.raises(NodeUnavailable):
        tidemill.connect(free_address)


@pytest.fixture
def free_address() -> str:
    return f"127.0.0.1:{free_port()}"


async def test_the_async_client_does_all_of_it(table_node: NodeProcess) -> None:
    async with await tidemill.connect_async(table_node.bootstrap_servers) as db:
        name = new_name("awaited")
        table = await db.create_table(name, COLUMNS, primary_key="id", buckets=2)
        written = await table.upsert(ROWS)
        assert written.rows == 100
        await table.delete([{"id": 5}])
        assert await table.lookup(4) == ROWS[4]
        assert await table.lookup(5) is None
        assert (await table.lookup([3, 5, 4])).column("id").to_pylist() == [3, 4]
        assert (await table.lookup_prefix(7)).num_rows == 1
        scan = table.scan(where="region = 'eu'")
        assert sum([batch.num_rows async for batch in scan]) == 49
        assert sum(scan.log_offsets.values()) == 101
        assert (await scan.to_arrow()).num_rows == await scan.count() == 49
        seen = [change async for batch in table.follow(until_now=True) for change in batch]
        assert len(seen) == 99
        async with table.lease(holder="me") as lease:
            assert [each.holder for each in await table.leases()] == ["me"]
            assert (await table.scan(lease=lease).to_arrow()).num_rows == 99
        assert await table.leases() == []
        assert len(await table.snapshots()) == 2
        assert len(await table.stats()) == 2
        await table.alter(add_columns="note string")
        assert (await table.lookup(4) or {})["note"] is None
        assert name in [each.name for each in await db.tables()]
        await db.drop_table(name)


def test_an_embedded_node_is_the_same_object() -> None:
    with tidemill.open() as db:
        table = db.create_table("shop.orders", COLUMNS, primary_key="id")
        table.upsert(ROWS)
        assert isinstance(db, Tidemill)
        assert table.scan().count() == 100
        assert len(records_of(table.follow(until_now=True))) == 100
