"""From state to Arrow batches: real RocksDB, any limits, any filters, and every batch read twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidemill.errors import TableCode, TableError
from tidemill.kv.rocks.resources import RocksResources
from tidemill.kv.rocks.store import RocksStore
from tidemill.tables.definition import INDEX_COLUMN, PartitionDefinition, TableDefinition
from tidemill.tables.keys.routing import BucketMap
from tidemill.tables.predicates.predicate import Compare, bind
from tidemill.tables.rows.types import parse_columns
from tidemill.tables.scanning import reading
from tidemill.tables.scanning.reading import (
    ScanShape,
    check_columns,
    decode_values,
    look_up,
    pack_batches,
    read_batch,
)
from tidemill.tables.scanning.sessions import BucketKey, ReadPlan, ScanSession
from tidemill.tables.state.changes import Changes, state_values

ROW_COUNT = 40
NO_LIMIT = 1 << 30
ALL = ScanShape(None, None, None)


def define(*columns: str) -> TableDefinition:
    return TableDefinition(
        name="shop.orders",
        table_id=7,
        schemas=tuple(map(parse_columns, columns)),
        primary_key=("id",),
        buckets=1,
        bucket_map=BucketMap.hashed(1),
        row_format="row",
        key_format="raw",
        partition_column=None,
        partitions=(PartitionDefinition(0, None, "shop.orders"),),
        properties={},
        comment=None,
        created_ms=0,
    )


TABLE = define("id bigint not null, name string, amount double")
#: Texts of all lengths, so that rows have all sizes.
ROWS: list[dict[str, Any]] = [
    {"id": i, "name": "x" * (i * 13 % 90), "amount": float(i % 4)} for i in range(ROW_COUNT)
]


def store_rows(store: RocksStore, table: TableDefinition, rows: list[dict[str, Any]], offset: int) -> None:
    batch = pa.RecordBatch.from_pylist(rows, table.schema)
    offsets = pa.array(range(offset, offset + len(rows)), pa.int64()).to_numpy()
    changes = Changes(offsets, table.keys.state_keys(table.key_columns(batch)), table.codec.encode(batch))
    keys, values = changes.state_keys.to_pylist(), state_values(changes).to_pylist()
    store.write(keys, values, [], offset + len(rows))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocksStore]:
    """The rows above in RocksDB."""
    resources = RocksResources(block_cache_bytes=1 << 20, write_buffer_bytes=8 << 20)
    with RocksStore.open(tmp_path_factory.mktemp("kv") / "live", resources, b"id") as store:
        store_rows(store, TABLE, ROWS, 100)
        yield store


def key(number: int) -> bytes:
    return TABLE.keys.bound([number])


def drain(
    store: RocksStore, shape: ScanShape, max_bytes: int, *, start: bytes = b"", limit: int | None = None
) -> list[list[dict[str, Any]]]:
    """All batches of a scan. Each is read a second time, with another limit, and must be the same."""
    session = ScanSession(b"id", BucketKey(7, 0, 0), None, 0, start, limit)
    batches: list[list[dict[str, Any]]] = []
    with store.view() as view:
        while not session.is_drained:
            sequence = len(batches)
            plan = session.plan(sequence)
            read = read_batch(TABLE, view, shape, plan, max_bytes)
            session.advance(plan, read.next_key, read.rows)
            again = read_batch(TABLE, view, shape, session.plan(sequence), 1)
            rows = [row for batch in read.batches for row in batch.to_pylist()]
            assert [row for batch in again.batches for row in batch.to_pylist()] == rows
            assert read.rows == len(rows)
            batches.append(rows)
    return batches


def flat(batches: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch]


# --- scans


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_scan_gives_what_a_list_gives_in_batches_of_any_size(
    store: RocksStore, data: st.DataObject
) -> None:
    max_bytes = data.draw(st.sampled_from([1, 40, 128, 500, 3_000, 1 << 20]), "max_bytes")
    columns = data.draw(
        st.none() | st.lists(st.sampled_from(["id", "name", "amount"]), min_size=1, unique=True).map(tuple),
        "columns",
    )
    low, high = (data.draw(st.none() | st.integers(-2, ROW_COUNT + 2)) for _ in range(2))
    limit = data.draw(st.none() | st.integers(1, ROW_COUNT + 2), "limit")
    amount = data.draw(st.none() | st.sampled_from([0.0, 2.0, 9.0]), "amount")
    predicate = None if amount is None else bind(Compare(("amount",), "=", amount), TABLE.schema)
    shape = ScanShape(columns, predicate, None if high is None else key(high))
    wanted = [
        {name: row[name] for name in columns or row}
        for row in ROWS
        if (low is None or row["id"] >= low)
        and (high is None or row["id"] < high)
        and (amount is None or row["amount"] == amount)
    ][:limit]
    start = b"" if low is None else key(low)
    batches = drain(store, shape, max_bytes, start=start, limit=limit)
    assert flat(batches) == wanted
    assert all(batches[:-1]), "only the last batch may be empty"


@pytest.mark.parametrize("max_bytes", [1, 60, 128, 150, 300, 1_000])
def test_a_batch_is_within_its_limit_unless_it_is_a_single_row(store: RocksStore, max_bytes: int) -> None:
    with store.view() as view:
        sizes = {row["id"]: view.read_values(key(row["id"]), None, 1, 1).size_bytes for row in ROWS}
    batches = drain(store, ALL, max_bytes)
    assert flat(batches) == ROWS
    for number, batch in enumerate(batches):
        size = sum(sizes[row["id"]] for row in batch)
        assert len(batch) == 1 or size <= max_bytes
        if number + 1 < len(batches):
            assert size + sizes[batches[number + 1][0]["id"]] > max_bytes, "there was room for one more"


def test_columns_are_read_in_the_order_in_which_they_are_asked_for(store: RocksStore) -> None:
    (batch, *_) = drain(store, ScanShape(("amount", "id"), None, None), 1 << 20)
    assert list(batch[0]) == ["amount", "id"]


def test_a_filter_with_nothing_to_show_gives_up_after_some_bytes_and_goes_on(
    store: RocksStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "_SCANNED_BYTES_MAX", 200)
    monkeypatch.setattr(reading, "_PIECE_ROWS", 4)
    last = bind(Compare(("id",), "=", ROW_COUNT - 1), TABLE.schema)
    batches = drain(store, ScanShape(None, last, None), 1 << 20)
    assert flat(batches) == ROWS[-1:]
    assert len(batches) > 4


def test_large_batches_are_read_in_pieces(store: RocksStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PIECE_ROWS", 7)
    with store.view() as view:
        read = read_batch(TABLE, view, ALL, ReadPlan(b"", None, None, False), 1 << 20)
    assert [batch.num_rows for batch in read.batches] == [7, 7, 7, 7, 7, 5]
    assert (read.rows, read.next_key) == (ROW_COUNT, None)


def test_rows_of_an_older_schema_have_nulls_for_what_came_later(tmp_path: Path) -> None:
    old, new = "id bigint not null", "id bigint not null, name string"
    older, table = define(old), define(old, new)
    resources = RocksResources(block_cache_bytes=1 << 20, write_buffer_bytes=8 << 20)
    with RocksStore.open(tmp_path / "live", resources, b"id") as store:
        store_rows(store, older, [{"id": 1}], 0)
        store_rows(store, table, [{"id": 2, "name": "two"}], 1)
        with store.view() as view:
            read = read_batch(table, view, ALL, ReadPlan(b"", None, None, False), 1 << 20)
            named = ScanShape(("name",), None, None)
            names = read_batch(table, view, named, ReadPlan(b"", None, None, False), 1 << 20)
    assert [row for batch in read.batches for row in batch.to_pylist()] == [
        {"id": 1, "name": None},
        {"id": 2, "name": "two"},
    ]
    assert [row for batch in names.batches for row in batch.to_pylist()] == [{"name": None}, {"name": "two"}]


# --- look-ups


def test_rows_are_found_by_key_each_with_the_number_of_its_key(store: RocksStore) -> None:
    batch = look_up(lambda: TABLE, store, [key(5), key(99), key(0), key(5), b""], ["id"], NO_LIMIT)
    assert batch is not None
    assert batch.to_pylist() == [
        {"id": 5, INDEX_COLUMN: 0},
        {"id": 0, INDEX_COLUMN: 2},
        {"id": 5, INDEX_COLUMN: 3},
    ]


def test_nothing_found_is_no_batch(store: RocksStore) -> None:
    assert look_up(lambda: TABLE, store, [key(99)], None, NO_LIMIT) is None
    assert look_up(lambda: TABLE, store, [], None, NO_LIMIT) is None


def test_a_look_up_without_columns_gives_all_of_them(store: RocksStore) -> None:
    batch = look_up(lambda: TABLE, store, [key(7)], None, 1)
    assert batch is not None
    assert batch.to_pylist() == [{**ROWS[7], INDEX_COLUMN: 0}]


def test_more_rows_than_fit_into_an_answer_are_refused_and_fewer_are_given(store: RocksStore) -> None:
    keys = [key(number) for number in range(ROW_COUNT)]
    sizes = [len(value or b"") for value in store.get_many(keys)]
    batch = look_up(lambda: TABLE, store, keys, None, sum(sizes))
    assert batch is not None
    assert batch.num_rows == ROW_COUNT
    with pytest.raises(TableError, match="the rows of 40 keys have more than") as error:
        look_up(lambda: TABLE, store, keys, None, sum(sizes) - 1)
    assert error.value.table_code is TableCode.answer_too_large
    assert not error.value.retriable


class _Asked:
    """A store with rows of some size, which keeps how many keys it was asked for at a time."""

    def __init__(self, size: int) -> None:
        self.asked: list[int] = []
        self._row = bytes(size)

    def get_many(self, keys: list[bytes]) -> list[bytes | None]:
        self.asked.append(len(keys))
        return [self._row if key.startswith(b"row") else None for key in keys]


def test_a_key_that_is_named_often_is_looked_up_once() -> None:
    store: Any = _Asked(1_000)
    with pytest.raises(TableError, match="the rows of 10000 keys have more than"):
        look_up(lambda: TABLE, store, [b"row"] * 10_000, None, 1_000_000)
    assert store.asked == [1]


def test_large_rows_are_looked_up_a_few_at_a_time() -> None:
    store: Any = _Asked(4 * 1024 * 1024)
    # Keys without rows say nothing of the size of the others'.
    keys = [b"%d" % number for number in range(32)] + [b"row%d" % number for number in range(1_000)]
    with pytest.raises(TableError, match="have more than"):
        look_up(lambda: TABLE, store, keys, None, 36 * 4 * 1024 * 1024)
    assert store.asked == [32, 32, 2, 2, 2]


# --- parts


def test_the_offset_in_front_of_a_state_row_is_no_part_of_it(store: RocksStore) -> None:
    values = [value for value in store.get_many([key(1), key(2)]) if value is not None]
    assert [int.from_bytes(value[:8], "little") for value in values] == [101, 102]
    assert decode_values(TABLE, values, None).to_pylist() == ROWS[1:3]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (["id", "colour"], "has no column 'colour'; it has id, name, amount"),
        (["ID"], "has no column 'ID'"),
        (["id", "name", "id"], "a column is asked for twice"),
    ],
)
def test_columns_that_there_are_not_or_twice_are_refused(columns: list[str], message: str) -> None:
    with pytest.raises(TableError, match=message) as error:
        check_columns(TABLE, columns)
    assert error.value.table_code is TableCode.invalid_scan_request


def test_batches_are_packed_as_one_stream_and_none_as_nothing() -> None:
    batches = [pa.RecordBatch.from_pylist([row], TABLE.schema) for row in ROWS[:3]]
    packed = pack_batches(batches)
    assert packed is not None
    assert pa.ipc.open_stream(packed).read_all().to_pylist() == ROWS[:3]
    assert pack_batches([]) is None
