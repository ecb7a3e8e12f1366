"""Rows into tables and out again: every source, every type, every way to give a key, every format."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import threading
import time
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tidemill
from support import table_values
from support.processes import ClientProcess, NodeProcess
from support.table_nodes import SOON, by_key, new_name, records_of, rows_of
from tidemill.client.cluster import Cluster
from tidemill.client.sync_client import Tidemill
from tidemill.client.sync_table import Table
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError
from tidemill.records.partitioner import partition_for_key
from tidemill.records.record import Record, build_batch

COLUMNS = "id bigint, region string, amount double"
ROWS = [{"id": n, "region": ("us", "eu", None)[n % 3], "amount": n / 2} for n in range(60)]
ARROW = pa.Table.from_pylist(ROWS)
UTC = dt.timezone.utc  # noqa: UP017 -- as users write it


@pytest.fixture(scope="module")
def table_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("tables") / "data", **SOON) as running:
        yield running


@pytest.fixture(scope="module")
def db(table_node: NodeProcess) -> Iterator[Tidemill]:
    with tidemill.connect(table_node.bootstrap_servers) as connected:
        yield connected


@pytest.fixture(scope="module")
def kafka(table_node: NodeProcess, start_shared_client: Any) -> ClientProcess:
    client: ClientProcess = start_shared_client("table_kafka", table_node)
    return client


def refusal(call: Any) -> TableError:
    with pytest.raises(TableError) as caught:
        call()
    return caught.value


# --- where rows come from

SOURCES = {
    "a dict": lambda: ROWS[0],
    "a list of dicts": lambda: ROWS,
    "a generator of dicts": lambda: (row for row in ROWS),
    "a pyarrow table": lambda: ARROW,
    "a chunked pyarrow table": lambda: pa.concat_tables([ARROW.slice(0, 7), ARROW.slice(7)]),
    "a record batch": lambda: ARROW.to_batches()[0],
    "a reader": lambda: ARROW.to_reader(max_chunksize=7),
    "a pandas frame": ARROW.to_pandas,
    "a pandas frame with an index": lambda: ARROW.to_pandas().set_index(pd.Index(range(100, 160))),
    "a polars frame": lambda: pl.from_arrow(ARROW),
    "a duckdb relation": lambda: duckdb.sql("SELECT * FROM ARROW"),
    "other types of the same kind": lambda: ARROW.cast(
        pa.schema([("id", pa.int32()), ("region", pa.large_string()), ("amount", pa.float64())])
    ),
    "a dictionary column": lambda: ARROW.set_column(1, "region", ARROW["region"].dictionary_encode()),
    "columns in another order": lambda: ARROW.select(["amount", "id", "region"]),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("row_format", ["row", "json"])
def test_rows_are_taken_from(db: Tidemill, source: str, row_format: str) -> None:
    table = db.create_table(new_name("source"), COLUMNS, primary_key="id", buckets=3, row_format=row_format)
    written = table.upsert(SOURCES[source]())
    expected = ROWS[:1] if source == "a dict" else ROWS
    assert written.rows == len(expected)
    assert by_key(table.scan().to_arrow().to_pylist(), ["id"]) == by_key(expected, ["id"])


@pytest.mark.parametrize(
    "empty",
    [[], (), iter([]), ARROW.slice(0, 0), pl.DataFrame(schema={"id": pl.Int64}), ARROW.to_pandas()[:0]],
)
def test_no_rows_are_fine(db: Tidemill, empty: Any) -> None:
    table = db.create_table(new_name("empty"), COLUMNS, primary_key="id")
    assert table.upsert(empty).rows == 0
    assert table.scan().to_arrow().schema == table.schema
    assert table.scan().count() == 0
    assert records_of(table.follow(until_now=True)) == []


def test_what_is_no_rows_is_refused(db: Tidemill) -> None:
    table = db.create_table(new_name("norows"), COLUMNS, primary_key="id")
    for rows in (5, "id", b"id", None, [1, 2], [("id", 1)]):
        assert refusal(lambda rows=rows: table.upsert(rows)).table_code == TableCode.row_refused
    assert table.scan().count() == 0


def test_a_refused_row_is_named_and_nothing_of_its_batch_is_written(db: Tidemill) -> None:
    table = db.create_table(
        new_name("refused"), "id bigint, n int not null, d decimal(4,2)", primary_key="id", buckets=3
    )
    good = [{"id": number, "n": number, "d": Decimal("1.50")} for number in range(5)]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"id": 9, "n": 2**31, "d": None}, "'n'"),
        ({"id": 9, "n": "x", "d": None}, "'n'"),
        ({"id": 9, "n": None, "d": None}, "n"),
        ({"id": 9, "d": None}, "n"),
        ({"id": None, "n": 1}, "id"),
        ({"id": 9, "n": 1, "d": Decimal("1.505")}, "d"),
        ({"id": 9, "n": 1, "other": 2}, "other"),
    ]
    for row, word in bad:
        error = refusal(lambda row=row: table.upsert([*good, row]))
        assert (error.table_code, error.index) == (TableCode.row_refused, 5), error.message
        assert "row 5" in error.message
        assert word in error.message
    assert table.scan().count() == 0


def test_batches_are_as_small_as_the_table_wants_them(db: Tidemill) -> None:
    table = db.create_table(
        new_name("small"), "id bigint, v string", primary_key="id", properties={"max.message.bytes": "5000"}
    )
    rows = [{"id": n, "v": "x" * 1_000} for n in range(200)]
    table.upsert(rows)
    table.delete(range(100))
    assert table.scan().count() == 100
    with pytest.raises(ApiError, match=r"max\.message\.bytes"):
        table.upsert({"id": 1, "v": "x" * 10_000})


# --- types

EXACT: dict[str, list[Any]] = {
    "boolean": [True, False],
    "tinyint": [-128, 127],
    "smallint": [-(2**15), 2**15 - 1],
    "int": [-(2**31), 2**31 - 1],
    "bigint": [-(2**63), 2**63 - 1],
    "float": [0.1, float("-inf")],
    "double": [0.1, 5e-324],
    "decimal(38,9)": [Decimal("-99999999999999999999999999999.999999999"), Decimal("0.000000001")],
    "string": ["", "a\0b \U0001f600 é"],
    "binary": [b"", bytes(range(256))],
    "date": [dt.date(1, 1, 1), dt.date(9999, 12, 31)],
    "timestamp": [dt.datetime(1900, 1, 1, tzinfo=UTC), dt.datetime(2999, 12, 31, 23, 59, 59, 999999, UTC)],
    "timestamp_ntz": [dt.datetime(1, 1, 1), dt.datetime(2024, 2, 29, 1, 2, 3, 4)],  # noqa: DTZ001
    "interval day to second": [dt.timedelta(days=-5), dt.timedelta(microseconds=1)],
    "array<int>": [[], [1, None, 3]],
    "map<string,double>": [[], [("a", 1.5), ("b", None)]],
    "map<int,array<string>>": [[(1, ["x", None])], []],
    "struct<a:int,b:struct<c:string,d:array<decimal(5,2)>>>": [
        {"a": 1, "b": {"c": "x", "d": [Decimal("1.25"), None]}},
        {"a": None, "b": None},
    ],
    "array<struct<k:string,v:map<string,date>>>": [
        [{"k": "a", "v": [("x", dt.date(2024, 1, 1))]}, None, {"k": None, "v": None}],
        [],
    ],
}


@pytest.mark.parametrize("row_format", ["row", "json"])
def test_every_type_is_exact_through_upsert_lookup_scan_and_follow(db: Tidemill, row_format: str) -> None:
    columns = ", ".join(f"c{number} {words}" for number, words in enumerate(EXACT))
    table = db.create_table(
        new_name("types"), f"id int, {columns}", primary_key="id", buckets=2, row_format=row_format
    )
    rows = [
        {"id": number} | {f"c{place}": values[number] for place, values in enumerate(EXACT.values())}
        for number in range(2)
    ] + [{"id": 2} | {f"c{place}": None for place in range(len(EXACT))}]
    table.upsert(rows)
    expected = pa.Table.from_pylist(rows, table.schema)
    assert table.lookup([0, 1, 2]) == expected
    assert rows_of(table.scan().to_arrow()) == rows_of(expected)
    assert table.lookup(1) == expected.to_pylist()[1]
    offsets = dict.fromkeys([(table.name, 0), (table.name, 1)], 0)
    changes = records_of(table.follow(snapshot=False, from_offsets=offsets, until_now=True))
    assert by_key([row for *_, row in changes], ["id"]) == by_key(expected.to_pylist(), ["id"])


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(drawn=table_values.tables(max_rows=8), fetch_max_bytes=st.sampled_from([1, 200, 4 << 20]))
def test_random_rows_of_random_types_come_back_exactly(
    db: Tidemill, drawn: tuple[pa.Schema, list[dict[str, Any]]], fetch_max_bytes: int
) -> None:
    schema, rows = drawn
    batch = table_values.to_batch(schema, rows)
    keys = pa.array(range(len(rows)), pa.int32())
    given_rows = pa.table([keys, *batch.columns], schema=pa.schema([pa.field("id", pa.int32()), *schema]))
    table = db.create_table(new_name("random"), given_rows.schema, primary_key="id", buckets=2)
    table.upsert(given_rows)
    # One row has one spelling in bytes, so NaN equals NaN, and dates beyond Python's are fine.
    encode = table.definition.codec.encode
    expected = encode(given_rows.cast(table.schema).combine_chunks().to_batches()[0]) if rows else None
    for found in (table.lookup(keys), table.scan(fetch_max_bytes=fetch_max_bytes).to_arrow().sort_by("id")):
        assert found.schema == table.schema
        assert found.num_rows == len(rows)
        assert not rows or encode(found.combine_chunks().to_batches()[0]) == expected
    table.drop()


# --- keys


def test_a_single_key_is_a_value_a_tuple_or_a_dict(db: Tidemill) -> None:
    table = db.create_table(new_name("single"), COLUMNS, primary_key="id", buckets=3)
    table.upsert(ROWS)
    for key in (7, (7,), {"id": 7}, np.int64(7)):
        assert table.lookup(key) == ROWS[7]
    for key in (70, (70,), {"id": 70}):
        assert table.lookup(key) is None
    table.delete(1)
    table.delete((2,))
    table.delete({"id": 3})
    table.delete([4, 5])
    assert table.lookup(range(1, 7)).column("id").to_pylist() == [6]
    assert table.lookup(8, columns=["amount"]) == {"amount": 4.0}


@pytest.mark.parametrize(
    "keys",
    [
        [3, 1, 70, 2, 3],
        [(3,), (1,), (70,), (2,), (3,)],
        [{"id": 3}, {"id": 1}, {"id": 70}, {"id": 2}, {"id": 3}],
        pa.array([3, 1, 70, 2, 3]),
        pa.table({"id": [3, 1, 70, 2, 3]}),
        pa.record_batch({"id": pa.array([3, 1, 70, 2, 3], pa.int8())}),
        pl.DataFrame({"id": [3, 1, 70, 2, 3]}),
        pd.DataFrame({"id": [3, 1, 70, 2, 3]}),
        np.array([3, 1, 70, 2, 3]),
    ],
    ids=lambda keys: type(keys).__name__,
)
def test_several_keys_give_rows_in_their_order(db: Tidemill, keys: Any) -> None:
    table = db.create_table(new_name("several"), COLUMNS, primary_key="id", buckets=3)
    table.upsert(ROWS)
    assert table.lookup(keys).to_pylist() == [ROWS[3], ROWS[1], ROWS[2], ROWS[3]]
    table.delete(keys)
    assert table.lookup([1, 2, 3, 4]).to_pylist() == [ROWS[4]]


def test_keys_of_several_columns_have_prefixes_and_ranges(db: Tidemill) -> None:
    table = db.create_table(
        new_name("composite"),
        "region string, day date, n int, v string",
        primary_key=["region", "day", "n"],
        buckets=3,
    )
    days = [dt.date(2024, 1, 31), dt.date(2024, 2, 1)]
    rows = [
        {"region": region, "day": day, "n": n, "v": f"{region}{n}"}
        for region in ("", "a", "a\0", "ab", "é")
        for day in days
        for n in (-1, 0, 300)
    ]
    table.upsert(rows)
    key = ("a", days[1], 300)
    assert table.lookup(key) == table.lookup(dict(zip(table.primary_key, key, strict=True)))
    assert (table.lookup(key) or {})["v"] == "a300"
    prefixes = [(("a",), 6), (("a", days[0]), 3), (("é",), 6), (key, 1), (("nobody",), 0)]
    for prefix, count in prefixes:
        found = table.lookup_prefix(prefix)
        assert found.num_rows == count
        assert all(tuple(row.values())[: len(prefix)] == prefix for row in found.to_pylist())
        named = dict(zip(table.primary_key, prefix, strict=False))
        assert rows_of(table.lookup_prefix(named)) == rows_of(found)
    assert rows_of(table.lookup_prefix("a")) == rows_of(table.lookup_prefix(("a",)))
    assert table.lookup_prefix("a", columns=["v"], limit=2).num_rows == 2
    between = table.scan(key_range=(("a", days[1]), ("ab", days[0], 0))).to_arrow()
    low, high = ("a", days[1]), ("ab", days[0], 0)
    expected = [r for r in rows if low <= (r["region"], r["day"]) and (r["region"], r["day"], r["n"]) < high]
    assert rows_of(between) == rows_of(pa.Table.from_pylist(expected, table.schema))
    table.delete([("a", days[1], 300), {"region": "é", "day": days[0], "n": 0}])
    assert table.scan().count() == len(rows) - 2


# --- routing


def test_a_table_routed_by_ranges_keeps_each_range_in_its_bucket(db: Tidemill) -> None:
    table = db.create_table(new_name("ranged"), COLUMNS, primary_key="id", boundaries=[10, 20, 50])
    assert table.buckets == 4
    table.upsert(ROWS)
    for bucket, ids in enumerate((range(10), range(10, 20), range(20, 50), range(50, 60))):
        with table.bucket_scanner(bucket) as scanner:
            found = [key for batch in scanner for key in batch.column("id").to_pylist()]
        assert found == list(ids)
    assert table.lookup([5, 10, 49, 50]).column("id").to_pylist() == [5, 10, 49, 50]
    scan = table.scan(key_range=(12, 15))
    assert sorted(scan.to_arrow().column("id").to_pylist()) == [12, 13, 14]
    assert table.scan(where="id >= 45 AND id < 55").count() == 10
    table.delete(range(15, 25))
    assert table.scan().count() == 50
    assert table.lookup_prefix(20).num_rows == 0


def test_a_table_routed_by_text_ranges_and_several_columns(db: Tidemill) -> None:
    table = db.create_table(
        new_name("ranged"),
        "region string, n int, v string",
        primary_key=["region", "n"],
        boundaries=["eu", ("eu", 5), {"region": "us"}],
    )
    table.upsert([{"region": r, "n": n, "v": f"{r}{n}"} for r in ("af", "eu", "us") for n in range(10)])
    counts = [each.log_end_offset for each in table.stats()]
    assert counts == [10, 5, 5, 10]
    assert table.lookup_prefix("eu").num_rows == 10
    assert table.scan(where="region = 'eu' AND n >= 4").count() == 6


# --- partitions

PARTITIONED = "day string, id bigint, v string"


def partitioned(db: Tidemill, **options: Any) -> Table:
    return db.create_table(
        new_name("parted"), PARTITIONED, primary_key=["day", "id"], partition_by="day", buckets=2, **options
    )


def day_rows(day: str, count: int) -> list[dict[str, Any]]:
    return [{"day": day, "id": n, "v": f"{day}/{n}"} for n in range(count)]


def test_partitions_come_with_their_rows_and_go_when_dropped(db: Tidemill) -> None:
    table = partitioned(db)
    assert table.scan().count() == 0
    table.upsert([*day_rows("mon", 5), *day_rows("tue", 3)])
    assert {each.value for each in table.definition.partitions} == {"mon", "tue"}
    assert (table.lookup(("tue", 2)) or {})["v"] == "tue/2"
    assert table.lookup([("mon", 1), ("wed", 1), ("tue", 1)]).column("v").to_pylist() == ["mon/1", "tue/1"]
    assert table.lookup_prefix("mon").num_rows == 5
    assert table.scan(where="day = 'tue'").count() == 3
    assert {each.partition for each in table.stats()} == {"mon", "tue"}
    table.drop_partition("mon")
    assert table.lookup(("mon", 1)) is None
    assert table.scan().count() == 3
    table.upsert(day_rows("mon", 2))
    assert (table.lookup(("mon", 1)) or {})["v"] == "mon/1"
    assert table.scan().count() == 5
    assert refusal(lambda: table.drop_partition("nope")).table_code == TableCode.partition_not_found
    assert refusal(lambda: table.upsert(day_rows("a/b", 1))).table_code == TableCode.row_refused
    assert refusal(lambda: table.lookup(("a/b", 1))).table_code == TableCode.row_refused


def test_partitions_that_another_client_adds_and_drops_are_noticed(
    table_node: NodeProcess, db: Tidemill
) -> None:
    table = partitioned(db)
    with tidemill.connect(table_node.bootstrap_servers) as other_db:
        other = other_db.table(table.name)
        for round_number in range(1, 4):
            table.upsert(day_rows("mon", round_number))
            assert other.lookup(("mon", 0)) == {"day": "mon", "id": 0, "v": "mon/0"}
            assert other.scan().count() == round_number
            assert other.lookup_prefix("mon").num_rows == round_number
            assert len(records_of(other.follow(until_now=True))) == round_number
            assert {each.partition for each in other.stats()} == {"mon"}
            other.upsert(day_rows("mon", 1))
            table.drop_partition("mon")
            assert other.lookup(("mon", 0)) is None
            assert other.scan().count() == 0
            assert records_of(other.follow(until_now=True)) == []
        other.upsert(day_rows("mon", 7))
        assert table.scan().count() == 7
        table.drop_partition("mon")
        other.delete(("mon", 1))
        other.upsert(day_rows("mon", 2))
        assert other.scan().count() == 2


def test_a_kafka_client_cannot_take_the_name_of_a_partition_that_is_not_there_yet(
    db: Tidemill, kafka: ClientProcess
) -> None:
    table = partitioned(db, row_format="json")
    row = {"day": "mon", "id": 1, "v": "x"}
    topic, change = f"{table.name}.mon", ('["mon",1]', row)
    (error,) = kafka.call("write", topic=topic, changes=[change], **{"message.timeout.ms": 3_000})
    assert error is not None
    table.create_partition("mon")
    assert kafka.call("write", topic=topic, changes=[change]) == [None]
    assert table.lookup(("mon", 1)) == row


def test_a_table_is_partitioned_by_numbers_dates_and_booleans(db: Tidemill) -> None:
    for words, values in (
        ("int", [-1, 5]),
        ("date", [dt.date(2024, 1, 1), dt.date(1999, 12, 31)]),
        ("boolean", [True, False]),
    ):
        table = db.create_table(
            new_name("parted"), f"p {words}, id int", primary_key=["p", "id"], partition_by="p"
        )
        table.upsert([{"p": value, "id": n} for value in values for n in range(3)])
        assert len(table.definition.partitions) == 2
        assert table.lookup((values[1], 2)) == {"p": values[1], "id": 2}
        assert table.lookup_prefix(values[0]).num_rows == 3
        assert table.scan().count() == 6


# --- tables without a primary key


def test_a_table_without_a_primary_key_is_a_typed_log(db: Tidemill) -> None:
    table = db.create_table(new_name("log"), "at timestamp_ntz, what string not null", buckets=3)
    noon = dt.datetime(2024, 1, 1, 12)  # noqa: DTZ001
    rows: list[dict[str, Any]] = [{"at": noon, "what": f"event {n}"} for n in range(50)]
    follow = table.follow(snapshot=False, from_offsets={(table.name, b): 0 for b in range(3)}, until_now=True)
    assert table.append(rows[:30]).rows == 30
    table.upsert(rows[30:])
    table.append(rows[:1])
    changes = records_of(follow)
    assert {op for *_, op, _ in changes} == {"insert"}
    assert sorted(row["what"] for *_, row in changes) == sorted([row["what"] for row in [*rows, rows[0]]])
    for call in (
        table.scan,
        lambda: table.lookup(1),
        lambda: table.lookup_prefix(1),
        lambda: table.delete([1]),
        table.lease,
        table.create_snapshot,
        table.snapshots,
        lambda: table.bucket_scanner(0),
    ):
        assert refusal(call).table_code == TableCode.not_a_primary_key_table
    assert refusal(lambda: table.append({"at": noon, "what": None})).table_code == TableCode.row_refused
    assert sum(each.log_end_offset for each in table.stats()) == 51


def test_rows_are_appended_only_where_there_is_no_primary_key(db: Tidemill) -> None:
    table = db.create_table(new_name("keyed"), COLUMNS, primary_key="id")
    assert refusal(lambda: table.append(ROWS)).table_code == TableCode.row_refused


# --- formats and Kafka clients


def test_a_kafka_client_writes_json_rows_and_reads_every_change(db: Tidemill, kafka: ClientProcess) -> None:
    table = db.create_table(new_name("json"), COLUMNS, primary_key="id", buckets=4, row_format="json")
    changes = [(str(row["id"]), row) for row in ROWS] + [("3", None), ("4", {"id": 4})]
    assert set(kafka.call("write", topic=table.name, changes=changes)) == {None}
    expected = {(row["id"],): row for row in ROWS if row["id"] != 3}
    expected[(4,)] = {"id": 4, "region": None, "amount": None}
    assert by_key(table.scan().to_arrow().to_pylist(), ["id"]) == expected
    table.upsert({"id": 100, "region": "é", "amount": 0.5})
    table.delete(5)
    records = kafka.call("read", topic=table.name, partitions=4)
    assert len(records) == len(changes) + 2
    folded: dict[str, Any] = {}
    for _, _, key, value in records:
        folded[key] = None if value is None else json.loads(value)
    live = {(int(key),): row for key, row in folded.items() if row is not None}
    scanned = by_key(table.scan().to_arrow().to_pylist(), ["id"])
    assert {key: {"region": None, "amount": None, **row} for key, row in live.items()} == scanned
    assert folded["100"] == {"id": 100, "region": "é", "amount": 0.5}
    assert folded["5"] is None


def test_the_default_partitioner_of_librdkafka_is_refused_with_the_remedy(
    db: Tidemill, kafka: ClientProcess
) -> None:
    table = db.create_table(new_name("crc32"), COLUMNS, primary_key="id", buckets=8, row_format="json")
    changes = [(str(n), {"id": n}) for n in range(20)]
    errors = kafka.call(
        "write", topic=table.name, changes=changes, partitioner="consistent_random", **{"linger.ms": 0}
    )
    refused = [error for error in errors if error is not None]
    assert len(refused) > 10
    # A good record that happened to be in one batch with a bad one is told so.
    kinds = ("INVALID_RECORD", "_INVALID_DIFFERENT_RECORD")
    assert all(error.startswith(kinds) for error in refused)
    assert table.scan().count() == len(errors) - len(refused)
    answer = produce(db, table.name, 0, [(str(n).encode(), json.dumps({"id": n}).encode()) for n in range(9)])
    wrong = [n for n in range(9) if partition_for_key(str(n).encode(), 8) != 0]
    assert answer.error_code == ErrorCode.invalid_record
    assert "partitioner=murmur2_random" in answer.error_message
    assert [(each.batch_index) for each in answer.record_errors] == wrong


def produce(db: Tidemill, topic: str, bucket: int, records: Sequence[tuple[bytes, bytes | None]]) -> Any:
    """Write one batch as it is, and give the server's answer for it."""

    async def send() -> Any:
        async with Cluster(db.bootstrap_servers) as cluster:
            data = build_batch([Record(key, value, time.time_ns() // 1_000_000) for key, value in records])
            entry = {"index": bucket, "records": data}
            body = {
                "transactional_id": None,
                "acks": -1,
                "timeout": 10_000,
                "topic_data": [{"name": topic, "partition_data": [entry]}],
            }
            response = await cluster.to_any("Produce", body, versions=(9, 12))
            return response.responses[0].partition_responses[0]

    return asyncio.run(send())


def test_a_refused_batch_changes_nothing_and_names_the_record(db: Tidemill) -> None:
    table = db.create_table(new_name("whole"), COLUMNS, primary_key="id", row_format="json")
    good = [(str(n).encode(), json.dumps({"id": n}).encode()) for n in range(5)]
    for bad in ((b"7", b'{"id":8}'), (b"7", b"{"), (b"07", None), (b"7", b'{"id":7,"amount":"x"}')):
        answer = produce(db, table.name, 0, [*good, bad, *good])
        assert answer.error_code == ErrorCode.invalid_record
        (fault,) = answer.record_errors
        assert fault.batch_index == 5
        assert fault.batch_index_error_message == answer.error_message
    assert [(each.log_end_offset, each.applied_offset) for each in table.stats()] == [(0, 0)]
    assert table.scan().count() == 0
    assert produce(db, table.name, 0, good).base_offset == 0
    assert table.scan().count() == 5


@pytest.mark.parametrize(
    ("key", "row"),
    [
        ("01", {"id": 1}),
        (" 1", {"id": 1}),
        ("+1", {"id": 1}),
        ("1.0", {"id": 1}),
        ("2", {"id": 1}),
        ("x", None),
        ("1", {"id": "1"}),
        ("1", {"id": 1, "nope": 1}),
        ("1", {"region": "eu"}),
        ("1", {"id": 1, "amount": "x"}),
        ("9223372036854775808", None),
    ],
)
def test_a_record_that_is_no_row_of_the_table_is_refused(
    db: Tidemill, kafka: ClientProcess, key: str, row: Any
) -> None:
    table = db.create_table(new_name("wrong"), COLUMNS, primary_key="id", row_format="json")
    (error,) = kafka.call("write", topic=table.name, changes=[(key, row)])
    assert error is not None
    assert [each.log_end_offset for each in table.stats()] == [0]
    assert table.scan().count() == 0


def test_raw_tables_hold_bytes_and_texts(db: Tidemill, kafka: ClientProcess) -> None:
    table = db.create_table(
        new_name("raw"), "id string, body binary", primary_key="id", buckets=3, row_format="raw"
    )
    rows = [{"id": f"k{n}", "body": bytes([n, 0, 255])} for n in range(20)] + [{"id": "", "body": b""}]
    table.upsert(rows)
    table.delete(["k3"])
    expected = by_key([row for row in rows if row["id"] != "k3"], ["id"])
    assert by_key(table.scan().to_arrow().to_pylist(), ["id"]) == expected
    assert table.lookup("k7") == rows[7]
    assert by_key([row for *_, row in records_of(table.follow(until_now=True))], ["id"]) == expected
    records = kafka.call("read", topic=text_table(db, kafka).name, partitions=1)
    assert [record[2:] for record in records] == [["a", '{"x":1}'], ["b", '{"y":2}'], ["a", None]]


def text_table(db: Tidemill, kafka: ClientProcess) -> Table:
    table = db.create_table(new_name("raw"), "id string, doc string", primary_key="id", row_format="raw")
    changes = [("a", {"x": 1}), ("b", {"y": 2}), ("a", None)]
    assert set(kafka.call("write", topic=table.name, changes=changes)) == {None}
    assert table.scan().to_arrow().to_pylist() == [{"id": "b", "doc": '{"y":2}'}]
    return table


# --- reading one's own writes


def test_a_client_sees_its_own_writes_while_others_write(table_node: NodeProcess, db: Tidemill) -> None:
    table = db.create_table(new_name("own"), COLUMNS, primary_key="id", buckets=4)
    stop = threading.Event()

    def load() -> None:
        with tidemill.connect(table_node.bootstrap_servers) as other:
            busy = other.table(table.name)
            numbers = np.arange(1_000_000, 1_005_000)
            while not stop.is_set():
                busy.upsert(pa.table({"id": numbers, "amount": np.random.default_rng(1).random(5_000)}))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for n in range(150):
            row = {"id": n % 20, "region": f"r{n}", "amount": float(n)}
            table.upsert(row)
            assert table.lookup(n % 20) == row
            if n % 10 == 0:
                assert table.scan(where=f"id = {n % 20}").to_arrow().to_pylist() == [row]
                table.delete(n % 20)
                assert table.lookup(n % 20) is None
                assert table.lookup_prefix(n % 20).num_rows == 0
    finally:
        stop.set()
        thread.join()


def test_256_buckets_on_one_node_work(db: Tidemill) -> None:
    table = db.create_table(new_name("many"), COLUMNS, primary_key="id", buckets=256)
    rows = pa.table({"id": range(10_000), "amount": np.arange(10_000) / 4})
    table.upsert(rows)
    scan = table.scan()
    assert scan.to_arrow().num_rows == 10_000
    assert len(scan.log_offsets) == 256
    assert table.lookup(range(0, 10_000, 7)).num_rows == len(range(0, 10_000, 7))
    table.delete(range(5_000))
    assert table.scan(where="amount >= 2000").count() == 2_000
    assert len(records_of(table.follow(until_now=True))) == 5_000
    assert len(table.create_snapshot()) == 256
