"""Files with rows: what is read, where errors are, and what goes out comes back."""

from __future__ import annotations

import datetime as dt
import gzip
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidemill.cli.tables.row_files import Piece, RowFile, file_format
from tidemill.cli.tables.row_writers import open_target, rows_as_table, writer_to
from tidemill.cli.tables.schema import schema_of, table_type
from tidemill.cli.tables.session import FileFormat
from tidemill.errors import TableError
from tidemill.tables.rows.types import describe_type, parse_columns

SCHEMA = parse_columns("id bigint, name string, amount double")
WIDE = parse_columns(
    "i int, s string, b binary, f double, m decimal(12,3), d date, t timestamp, n timestamp_ntz, c time, "
    "w interval day to second, o boolean, l array<int>, r struct<x:string,y:array<double>>, p map<string,int>"
)
STAMPS = st.datetimes(dt.datetime(1, 1, 1), dt.datetime(9999, 12, 31))  # noqa: DTZ001 - local time
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "i": st.integers(-(2**31), 2**31 - 1),
    "s": TEXT,
    "b": st.binary(max_size=6),
    "f": st.floats(allow_nan=False),
    "m": st.decimals(-(10**8), 10**8, places=3),
    "d": st.dates(),
    "t": STAMPS.map(lambda moment: moment.replace(tzinfo=dt.UTC)),
    "n": STAMPS,
    "c": st.times(),
    "w": st.timedeltas(dt.timedelta(-100_000), dt.timedelta(100_000)),
    "o": st.booleans(),
    "l": st.lists(st.none() | st.integers(0, 9), max_size=3),
    "r": st.fixed_dictionaries(
        {"x": st.none() | TEXT, "y": st.none() | st.lists(st.floats(0, 1), max_size=2)}
    ),
    "p": st.dictionaries(TEXT, st.none() | st.integers(0, 9), max_size=3).map(
        lambda value: list(value.items())
    ),
}
WIDE_ROWS = st.lists(
    st.fixed_dictionaries({name: st.none() | values for name, values in VALUES.items()}), max_size=5
)


def read(path: Path, schema: pa.Schema, **options: Any) -> list[Piece]:
    kind = file_format(path)
    assert kind is not None
    with RowFile(path, kind, schema, **options) as file:
        return list(file)


def rows_of(path: Path, schema: pa.Schema = SCHEMA, **options: Any) -> list[dict[str, Any]]:
    return [row for piece in read(path, schema, **options) for row in piece.rows.to_pylist()]


def file_with(directory: Path, name: str, data: str | bytes) -> Path:
    path = directory / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize("kind", list(FileFormat))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(rows=WIDE_ROWS)
def test_rows_that_are_written_out_are_read_back(tmp_path: Path, kind: FileFormat, rows: list[Any]) -> None:
    path = tmp_path / f"rows.{kind.value}"
    batch = pa.RecordBatch.from_pylist(rows, WIDE)
    with open_target(path) as target:
        writer = writer_to(target, kind, WIDE)
        writer.write(batch.slice(0, 2))
        writer.write(batch.slice(2))
        writer.close()
    assert rows_of(path, WIDE) == batch.to_pylist()


def test_csv_tells_null_from_the_empty_text(tmp_path: Path) -> None:
    path = file_with(tmp_path, "a.csv", 'name,id\n,1\n"",2\n"a\nb",3\n')
    assert [row["name"] for row in rows_of(path)] == [None, "", "a\nb"]


def test_nulls_of_every_type_are_empty_cells(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with open_target(path) as target:
        writer = writer_to(target, FileFormat.CSV, WIDE)
        writer.write(pa.RecordBatch.from_pylist([{}], WIDE))
        writer.close()
    assert path.read_text().splitlines()[1] == "," * (len(WIDE) - 1)


def test_compressed_and_tabbed_files_are_known_by_their_names(tmp_path: Path) -> None:
    packed = file_with(tmp_path, "a.csv.gz", gzip.compress(b"id\n1\n"))
    tabbed = file_with(tmp_path, "a.tsv", "id\tname\n1\tx,y\n")
    piped = file_with(tmp_path, "b.csv", "id|name\n1|x,y\n")
    assert rows_of(packed) == [{"id": 1}]
    assert rows_of(tabbed) == rows_of(piped, delimiter="|") == [{"id": 1, "name": "x,y"}]
    assert file_format(Path("rows.txt")) is None


def test_large_file_comes_in_pieces_that_know_their_place(tmp_path: Path) -> None:
    count = 100_000
    rows = "".join(f"{number},{'x' * 40}\n" for number in range(count))
    for path in (file_with(tmp_path, "a.csv", "id,name\n" + rows), tmp_path / "a.parquet"):
        if path.suffix == ".parquet":
            pa.parquet.write_table(pa.table({"id": range(count), "name": ["x" * 40] * count}), path)
        pieces = read(path, SCHEMA)
        assert len(pieces) > 3
        assert [piece.rows.column("id")[0].as_py() for piece in pieces] == [
            each.rows_before for each in pieces
        ]
        positions = [piece.bytes_read for piece in pieces]
        assert positions == sorted(positions)
        assert positions[0] < positions[-1] == path.stat().st_size


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.csv", "id,amount\n1,2\n\n2,two\n", "a.csv, row 2: column 'amount' (double): double: invalid"),
        ("a.csv", "id,name\n1\n", "a.csv, row 1: Expected 2 columns, got 1: 1"),
        ("a.csv", "", "a.csv: Empty CSV file"),
        (
            "a.csv",
            "id,w\n1,x\n",
            "a.csv, row 1: column 'w' (interval day to second): int64: invalid value 'x'",
        ),
        ("a.csv", "b\naGk=\nhi!\n", "a.csv, row 2: column 'b' (binary): 'hi!' is not base64"),
        ("a.csv", "l\n[1]\n[x]\n", "a.csv, row 2"),
        ("a.csv", "t\n2025-01-01T00:00:00\n", "expected a zone offset in '2025-01-01T00:00:00'"),
        ("a.json", '[{"i":1},{"i":true}]', "a.json, row 2"),
        ("a.jsonl", '{"i":1}\n{"i":1\n', "a.jsonl, row 2"),
        ("a.parquet", "PAR1 not", "a.parquet: this is no Parquet"),
        ("a.csv.gz", b"no gzip", "a.csv.gz: zlib inflate failed"),
    ],
)
def test_error_names_file_row_and_column(tmp_path: Path, name: str, data: str | bytes, said: str) -> None:
    path = file_with(tmp_path, name, data)
    schema = pa.unify_schemas([SCHEMA, WIDE])
    with pytest.raises(TableError) as caught:
        read(path, schema)
    assert caught.value.name == "ROW_REFUSED"
    assert said in caught.value.message


def test_rows_are_counted_over_pieces(tmp_path: Path) -> None:
    lines = [f'{{"id":{number}}}\n' for number in range(200_000)]
    path = file_with(tmp_path, "a.jsonl", "".join([*lines, '{"id":"x"}\n']))
    with pytest.raises(TableError, match=r"row 200,001"):
        read(path, SCHEMA)
    path = file_with(tmp_path, "b.csv", "id\n" + "".join(f"{number}\n" for number in range(500_000)) + "x\n")
    with pytest.raises(TableError, match=r"row 500,001"):
        read(path, SCHEMA)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet", "a.jsonl"])
def test_only_the_wanted_columns_can_be_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    kind = file_format(path)
    assert kind is not None
    batch = pa.RecordBatch.from_pylist([{"name": "x", "id": 1, "other": True}])
    with open_target(path) as target:
        writer = writer_to(target, kind, batch.schema)
        writer.write(batch)
        writer.close()
    assert rows_of(path, pa.schema([SCHEMA.field("id")]), only=True) == [{"id": 1}]


def test_schema_is_told_from_each_kind_of_file(tmp_path: Path) -> None:
    csv = file_with(tmp_path, "a.csv.gz", gzip.compress(b"id,at,empty,price\n1,2025-01-01T00:00:00Z,,2.5\n"))
    lines = file_with(tmp_path, "a.json", '[{"id":1,\n"tags":["x"],"place":{"x":1.5}},{"id":2,"more":null}]')
    table = pa.table({"n": pa.array([1], pa.uint32()), "t": pa.array([1], pa.timestamp("ns"))})
    parquet = tmp_path / "a.parquet"
    pa.parquet.write_table(table, parquet)

    def words(path: Path, kind: FileFormat) -> str:
        return ", ".join(f"{field.name} {describe_type(field.type)}" for field in schema_of(path, kind))

    assert words(csv, FileFormat.CSV) == "id bigint, at timestamp, empty string, price double"
    assert words(lines, FileFormat.JSON) == (
        "id bigint, tags array<string>, place struct<x:double>, more string"
    )
    assert words(parquet, FileFormat.PARQUET) == "n bigint, t timestamp_ntz"
    empty = file_with(tmp_path, "b.json", "")
    with pytest.raises(TableError, match="cannot be told: it is empty"):
        schema_of(empty, FileFormat.JSON)


def test_types_that_no_table_has_become_wider_ones_inside_others_too() -> None:
    nested = pa.struct(
        [pa.field("a", pa.list_(pa.uint64())), pa.field("b", pa.map_(pa.string(), pa.uint8()))]
    )
    assert describe_type(table_type(nested)) == "struct<a:array<decimal(20,0)>,b:map<string,smallint>>"


def test_file_that_could_not_be_finished_is_not_there(tmp_path: Path) -> None:
    path = file_with(tmp_path, "a.csv", "old")

    def fail_within() -> None:
        with open_target(path) as target:
            target.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_within()
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"old"]


def test_cells_on_the_screen_have_no_control_characters() -> None:
    row = {
        "s": "a\x1b[31m\n",
        "b": b"hi",
        "l": [dt.date(2025, 1, 1)],
        "m": Decimal("1.50"),
        "n": None,
        "i": 7,
    }
    table = rows_as_table(pa.Table.from_pylist([row]))
    assert list(table.rows[0]) == ["a\\x1b[31m\\n", "aGk=", '["2025-01-01"]', "1.50", None, 7]
