"""The leader's append hook: what it refuses, which record it names, and what it makes of what it takes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.errors import ErrorCode, TableCode, TableError
from tidemill.records.columns.read import RecordColumns, read_columns
from tidemill.records.record import Record, build_batch
from tidemill.tables.definition import PartitionDefinition, TableDefinition
from tidemill.tables.keys.codec import default_key_format
from tidemill.tables.keys.routing import BucketMap
from tidemill.tables.rows.types import parse_columns
from tidemill.tables.state import changes as changes_module
from tidemill.tables.state import service
from tidemill.tables.state.changes import OFFSET_BYTES, Changes, prepare, prepare_checked, state_values

KeyValue = tuple[bytes | None, bytes | None]


def define(
    columns: str = "id bigint not null, name string",
    *,
    primary_key: tuple[str, ...] = ("id",),
    bucket_map: BucketMap | None = None,
    row_format: str = "row",
    key_format: str | None = None,
    partition_column: str | None = None,
    older: str | None = None,
) -> TableDefinition:
    """A table; partitioned ones have the partitions ``eu`` and ``us``."""
    bucket_map = bucket_map or BucketMap.hashed(1)
    places: tuple[PartitionDefinition, ...] = (PartitionDefinition(0, None, "shop.orders"),)
    if partition_column is not None:
        places = tuple(
            PartitionDefinition(i, text, f"shop.orders.{text}") for i, text in enumerate(("eu", "us"), 1)
        )
    return TableDefinition(
        name="shop.orders",
        table_id=7,
        schemas=tuple(parse_columns(text) for text in (older, columns) if text is not None),
        primary_key=primary_key,
        buckets=bucket_map.buckets,
        bucket_map=bucket_map,
        row_format=row_format,
        key_format=key_format or default_key_format(primary_key),
        partition_column=partition_column,
        partitions=places,
        properties={},
        comment=None,
        created_ms=0,
    )


def columns_of(*records: KeyValue, codec: int = 0) -> RecordColumns:
    batch = build_batch([Record(key, value, 1_000) for key, value in records], codec=codec)
    return read_columns(batch, 1 << 20)


def upsert(table: TableDefinition, **row: Any) -> KeyValue:
    """The record of one row, as a writer makes it."""
    batch = pa.RecordBatch.from_pylist([row], table.schema)
    value = table.format.from_batch(batch)[0].as_py()
    if not table.has_primary_key:
        return None, value
    return table.keys.canonical(table.key_columns(batch))[0].as_py(), value


def check(table: TableDefinition, *records: KeyValue, bucket: int = 0, place: int = 0) -> Changes | None:
    return prepare_checked(table, columns_of(*records), table.partitions[place], bucket)


def refused(table: TableDefinition, *records: KeyValue, bucket: int = 0, place: int = 0) -> TableError:
    with pytest.raises(TableError) as error:
        check(table, *records, bucket=bucket, place=place)
    # Whatever is wrong with a record, Kafka's clients are told that it is the record.
    assert error.value.code is ErrorCode.invalid_record
    assert not error.value.retriable
    return error.value


def content(table: TableDefinition, *batches: Changes) -> list[dict[str, Any]]:
    """The rows that the state has after these changes, in the order of their keys."""
    state: dict[bytes, bytes] = {}
    for changes in batches:
        for key, value in zip(changes.state_keys.to_pylist(), changes.rows.to_pylist(), strict=True):
            if value is None:
                state.pop(key, None)
            else:
                state[key] = value
    rows = []
    for key in sorted(state):
        rows += table.rows.decode(state[key], np.array([0]), np.array([len(state[key])])).to_pylist()
    return rows


FORMATS = ["row", "json", "raw"]


@pytest.fixture(params=FORMATS)
def table(request: pytest.FixtureRequest) -> TableDefinition:
    return define(row_format=request.param)


# --- what is taken


def test_rows_and_deletions_become_changes_in_their_order(table: TableDefinition) -> None:
    changes = check(
        table,
        upsert(table, id=1, name="one"),
        (b"2", None),
        upsert(table, id=3, name="three"),
        (b"1", None),
        upsert(table, id=1, name="uno"),
    )
    assert changes is not None
    assert changes.offsets.tolist() == [0, 1, 2, 3, 4]
    assert [row is None for row in changes.rows.to_pylist()] == [False, True, False, True, False]
    keys = table.keys.state_keys([pa.array([1, 2, 3, 1, 1])])
    assert changes.state_keys.equals(keys)
    assert content(table, changes) == [{"id": 1, "name": "uno"}, {"id": 3, "name": "three"}]


def test_a_batch_of_deletions_alone_is_taken(table: TableDefinition) -> None:
    changes = check(table, (b"1", None), (b"-5", None))
    assert changes is not None
    assert changes.rows.to_pylist() == [None, None]
    assert changes.state_keys.equals(table.keys.state_keys([pa.array([1, -5])]))


@pytest.mark.parametrize("codec", range(5))
def test_compressed_batches_are_read_as_any_other(table: TableDefinition, codec: int) -> None:
    records = [upsert(table, id=number, name="x" * number) for number in range(20)] + [(b"3", None)]
    columns = columns_of(*records, codec=codec)
    changes = prepare_checked(table, columns, table.partitions[0], 0)
    assert changes is not None
    assert [row["id"] for row in content(table, changes)] == [i for i in range(20) if i != 3]


def test_what_is_read_again_from_the_log_makes_the_same_changes(table: TableDefinition) -> None:
    columns = columns_of(upsert(table, id=1, name="one"), (b"2", None), upsert(table, id=3, name=""))
    checked = prepare_checked(table, columns, table.partitions[0], 0)
    again = prepare(table, columns)
    assert checked is not None
    assert checked.state_keys.equals(again.state_keys)
    assert checked.rows.equals(again.rows)
    assert checked.offsets.tolist() == again.offsets.tolist()


def test_a_raw_row_has_its_key_in_the_key_alone() -> None:
    table = define(row_format="raw")
    changes = check(table, (b"1", b"any text"), (b"-2", b""))
    assert changes is not None
    assert content(table, changes) == [{"id": -2, "name": ""}, {"id": 1, "name": "any text"}]


def test_json_rows_may_have_their_fields_in_any_order_and_spelling() -> None:
    table = define(row_format="json")
    changes = check(table, (b"1", b' { "name" : "\\u00e9", "id": 1 } '), (b"2", b'{"id":2}'))
    assert changes is not None
    assert content(table, changes) == [{"id": 1, "name": "é"}, {"id": 2, "name": None}]


def test_rows_of_an_older_schema_are_taken() -> None:
    old = define("id bigint not null")
    table = define("id bigint not null, name string", older="id bigint not null")
    changes = check(table, upsert(old, id=1), upsert(table, id=2, name="two"))
    assert changes is not None
    assert content(table, changes) == [{"id": 1, "name": None}, {"id": 2, "name": "two"}]


def test_a_table_without_a_key_has_no_state_to_change() -> None:
    table = define(primary_key=())
    assert check(table, upsert(table, id=1, name="x"), (b"any key", upsert(table, id=1, name="y")[1])) is None


def test_a_state_row_is_the_offset_and_the_row(table: TableDefinition) -> None:
    changes = check(table, upsert(table, id=1, name="x"), (b"2", None), upsert(table, id=3, name=""))
    assert changes is not None
    moved = changes.shifted(1_000)
    assert moved.offsets.tolist() == [1_000, 1_001, 1_002]
    values = state_values(moved).to_pylist()
    assert values[1] is None
    rows = changes.rows.to_pylist()
    for number in (0, 2):
        assert values[number] == (1_000 + number).to_bytes(OFFSET_BYTES, "little") + rows[number]


@settings(max_examples=40)
@given(data=st.data(), row_format=st.sampled_from(FORMATS))
def test_batches_of_any_changes_fold_into_what_a_dict_has(data: st.DataObject, row_format: str) -> None:
    table = define(row_format=row_format)
    change = st.tuples(st.integers(-3, 3), st.none() | st.text(max_size=3))
    model: dict[int, str] = {}
    batches = []
    for changes in data.draw(st.lists(st.lists(change, min_size=1, max_size=6), min_size=1, max_size=4)):
        records: list[KeyValue] = []
        for number, name in changes:
            if name is None:
                model.pop(number, None)
                records.append((str(number).encode(), None))
            else:
                model[number] = name
                records.append(upsert(table, id=number, name=name))
        made = check(table, *records)
        assert made is not None
        batches.append(made)
    assert content(table, *batches) == [{"id": number, "name": model[number]} for number in sorted(model)]


# --- what is refused, and by which record


def test_a_record_without_a_key_is_refused(table: TableDefinition) -> None:
    good = upsert(table, id=1, name="x")
    error = refused(table, good, (None, good[1]), (None, None))
    assert (error.table_code, error.index) == (TableCode.key_refused, 1)
    assert error.message == "a record for table 'shop.orders' has no key; the key is the text of id"


@pytest.mark.parametrize("key", [b"", b"01", b"+1", b"1.0", b" 1", b"x", b"9223372036854775808"])
@pytest.mark.parametrize("is_deletion", [True, False])
def test_a_key_in_another_spelling_is_refused(table: TableDefinition, key: bytes, is_deletion: bool) -> None:
    good = upsert(table, id=1, name="x")
    error = refused(table, good, (b"7", None), (key, None if is_deletion else good[1]))
    assert (error.table_code, error.index) == (TableCode.key_refused, 2)
    assert "of record" not in error.message


@pytest.mark.parametrize("key", [b'[ "a",1]', b'["a",1.0]', b'["\\u0061",1]', b'["a"]', b'["a",1,2]', b"a"])
def test_a_json_key_in_another_spelling_is_refused(key: bytes) -> None:
    table = define("name string not null, id bigint not null", primary_key=("name", "id"))
    good = upsert(table, name="a", id=1)
    assert good[0] == b'["a",1]'
    for value in (None, good[1]):
        error = refused(table, good, (key, value))
        assert (error.table_code, error.index) == (TableCode.key_refused, 1)


def test_a_key_that_is_not_that_of_its_row_is_refused() -> None:
    for row_format in ("row", "json"):
        table = define(row_format=row_format)
        one, two = upsert(table, id=1, name="x"), upsert(table, id=2, name="y")
        error = refused(table, one, (b"5", None), (b"1", two[1]))
        assert (error.table_code, error.index) == (TableCode.key_refused, 2)
        assert error.message == (
            "the key '1' of a record for table 'shop.orders' is not that of its row, '2'; "
            "the key is the text of id"
        )


@pytest.mark.parametrize(
    ("row_format", "value"),
    [
        ("row", b""),
        ("row", b"\x00\x00"),
        ("row", b'{"id": 1}'),
        ("json", b""),
        ("json", b"[1]"),
        ("json", b'{"id": 1'),
        ("json", b'{"id": "1"}'),
        ("json", b'{"id": 1, "colour": 2}'),
        ("json", b'{"id": 1, "id": 1}'),
        ("json", b'{"id": null}'),
        ("json", b'{"name": "x"}'),
        ("json", b'{"id": 1, "name": 5}'),
        ("json", b'{"id": 1, "name": "\xff"}'),
        ("raw", b"\xff"),
    ],
)
def test_a_value_that_is_no_row_is_refused_with_its_place_among_all_records(
    row_format: str, value: bytes
) -> None:
    table = define(row_format=row_format)
    good = upsert(table, id=1, name="x")
    # Deletions in front of it are counted too.
    error = refused(table, (b"8", None), good, (b"9", None), (b"1", value), (b"1", value))
    assert (error.table_code, error.index) == (TableCode.row_refused, 3)


@pytest.mark.parametrize(
    "value", [b'{"id":1,"price":"1\x83","price":"1"}', b'{"id":1,"price":"1","price":"\xff"}']
)
def test_a_field_that_is_there_twice_is_refused_whatever_is_in_it(value: bytes) -> None:
    table = define("id bigint not null, price decimal(10,2), tags array<string>", row_format="json")
    error = refused(table, (b"1", None), (b"1", value))
    assert (error.table_code, error.index) == (TableCode.row_refused, 1)


def test_a_row_of_a_schema_that_the_table_does_not_have_is_refused() -> None:
    newer = define("id bigint not null, name string", older="id bigint not null")
    table = define("id bigint not null")
    error = refused(table, upsert(table, id=1), upsert(newer, id=2, name="two"))
    assert (error.table_code, error.index) == (TableCode.row_refused, 1)


def test_a_key_in_the_wrong_bucket_is_refused_with_the_setting_that_librdkafka_needs() -> None:
    table = define(bucket_map=BucketMap.hashed(4))
    records = [upsert(table, id=number, name="x") for number in range(8)]
    routed = table.bucket_map.route(pa.array([key for key, _ in records], pa.binary()), None).tolist()
    right = [record for record, bucket in zip(records, routed, strict=True) if bucket == routed[0]]
    wrong = next(record for record, bucket in zip(records, routed, strict=True) if bucket != routed[0])
    assert check(table, *right, bucket=routed[0]) is not None
    for value in (wrong[1], None):
        error = refused(table, *right, (wrong[0], value), bucket=routed[0])
        assert (error.table_code, error.index) == (TableCode.wrong_bucket, len(right))
        other = routed[records.index(wrong)]
        assert f"belongs to bucket {other} of table 'shop.orders', not to {routed[0]}" in error.message
        assert "partitioner=murmur2_random" in error.message


def test_a_key_outside_the_range_of_its_bucket_is_refused() -> None:
    keys = define().keys
    table = define(bucket_map=BucketMap.ranged([keys.bound([0]), keys.bound([10])]))
    for bucket, inside in enumerate((-1, 0, 10)):
        assert check(table, upsert(table, id=inside, name=None), bucket=bucket) is not None
        assert check(table, (str(inside).encode(), None), bucket=bucket) is not None
    error = refused(table, upsert(table, id=9, name="x"), upsert(table, id=10, name="x"), bucket=1)
    assert (error.table_code, error.index) == (TableCode.wrong_bucket, 1)
    assert "routed by ranges of keys" in error.message


@pytest.mark.parametrize("row_format", ["row", "json", "raw"])
def test_a_row_or_a_deletion_in_the_wrong_partition_is_refused(row_format: str) -> None:
    table = define(
        "region string not null, id bigint not null, name string",
        primary_key=("region", "id"),
        partition_column="region",
        row_format=row_format,
    )
    eu, us = upsert(table, region="eu", id=1, name="x"), upsert(table, region="us", id=1, name="x")
    assert check(table, eu, (eu[0], None)) is not None
    assert check(table, us, place=1) is not None
    for record in (us, (us[0], None)):
        error = refused(table, (eu[0], None), eu, record)
        assert (error.table_code, error.index) == (TableCode.wrong_bucket, 2)
        assert error.message == (
            "a row of partition 'us' of table 'shop.orders' was sent to the topic of partition 'eu'"
        )


def test_a_row_whose_value_cannot_name_a_partition_is_refused() -> None:
    table = define(
        "region string not null, id bigint not null",
        primary_key=("region", "id"),
        partition_column="region",
    )
    error = refused(table, upsert(table, region="eu", id=1), upsert(table, region="e u", id=1))
    assert (error.table_code, error.index) == (TableCode.row_refused, 1)
    assert "'e u' cannot name a partition" in error.message


def test_a_log_takes_rows_of_its_partition_only() -> None:
    table = define("region string not null", primary_key=(), partition_column="region")
    eu, us = upsert(table, region="eu"), upsert(table, region="us")
    assert check(table, eu) is None
    error = refused(table, eu, us)
    assert (error.table_code, error.index) == (TableCode.wrong_bucket, 1)


def test_a_log_takes_neither_deletions_nor_what_is_no_row() -> None:
    table = define(primary_key=(), row_format="json")
    good = (b"k", json.dumps({"id": 1}).encode())
    error = refused(table, good, (b"k", None))
    assert (error.table_code, error.index) == (TableCode.row_refused, 1)
    assert "there is nothing to delete" in error.message
    error = refused(table, good, (b"k", b"{}"))
    assert (error.table_code, error.index) == (TableCode.row_refused, 1)


def test_a_long_key_is_not_repeated_whole_in_the_message() -> None:
    table = define("id string not null, name string", primary_key=("id",))
    wrong = (b"x" * 5_000, upsert(table, id="y", name=None)[1])
    assert len(refused(table, wrong).message) < 400


def test_a_record_that_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    table = define()
    records = [upsert(table, id=number, name="x" * (number * 10)) for number in range(20)]
    sizes = [len(key or b"") + len(value or b"") for key, value in records]
    monkeypatch.setattr(changes_module, "_RECORD_BYTES_MAX", sizes[10])
    assert prepare_checked(table, columns_of(*records[:11]), table.partitions[0], 0) is not None
    with pytest.raises(TableError, match=f"has {sizes[11]} bytes, {sizes[10]} are the most") as error:
        prepare_checked(table, columns_of(*records), table.partitions[0], 0)
    assert error.value.table_code is TableCode.row_refused
    assert [number for number, _ in error.value.record_errors] == list(range(11, 20))
    assert len(prepare(table, columns_of(*records)).offsets) == 20, "what is in a log already is taken"


def test_what_a_refused_batch_holds_is_not_kept_by_its_error() -> None:
    """It would be freed on the event loop, which takes long if it is large."""
    table = define()
    batch = build_batch([Record(None, b"no row", 1_000)])
    error = service._checked(table, table.partitions[0], 0, batch, 1 << 20)
    assert isinstance(error, TableError)
    assert error.__traceback__ is None


def test_a_row_in_json_with_very_many_values_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes_module, "_COMMAS_MAX", 100)
    table = define("id bigint not null, v array<bigint>, name string", row_format="json")
    records = [
        (b"1", b'{"id":1,"v":[%b]}' % b",".join([b"1"] * 100)),
        (b"2", b'{"id":2,"v":[%b]}' % b",".join([b"1"] * 101)),
        (b"3", b'{"id":3,"name":"%b"}' % (b"x" * 10_000)),
    ]
    with pytest.raises(TableError, match="more than 100 commas") as error:
        prepare_checked(table, columns_of(*records), table.partitions[0], 0)
    assert [number for number, _ in error.value.record_errors] == [1]
    assert prepare_checked(table, columns_of(records[0], records[2]), table.partitions[0], 0) is not None
    assert len(prepare(table, columns_of(*records)).offsets) == 3, "what is in a log already is taken"
