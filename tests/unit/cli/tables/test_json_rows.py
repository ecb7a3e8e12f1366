"""JSON input in pieces of any size, and JSON output."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cli.tables.json_rows import cut_objects, json_column, json_objects, json_rows
from tidemill.errors import TableError

SCHEMA = pa.schema([pa.field("id", pa.int64(), False), pa.field("v", pa.string())])


class InPieces:
    """A source whose reads give so many bytes each."""

    def __init__(self, data: bytes, size: int = 1_000_000) -> None:
        self._data = data
        self._size = size

    def read(self, size: int) -> bytes:
        part, self._data = self._data[: min(size, self._size)], self._data[min(size, self._size) :]
        return part


def objects(data: bytes, size: int = 1_000_000) -> list[Any]:
    return [json.loads(text) for piece in cut_objects(InPieces(data, size)) for text in piece.to_pylist()]


def rows(data: bytes, **options: Any) -> list[dict[str, Any]]:
    return [row for batch in json_rows(InPieces(data), SCHEMA, **options) for row in batch.to_pylist()]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=3), VALUES, max_size=3), max_size=6)


@given(ROWS, st.sampled_from([None, 1]), st.booleans(), st.integers(1, 40))
def test_array_is_cut_the_same_however_it_arrives(
    given_rows: list[Any], indent: int | None, ascii_only: bool, size: int
) -> None:
    data = json.dumps(given_rows, indent=indent, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
    try:
        data.decode()
    except UnicodeDecodeError:
        return
    assert objects(b" \n" + data + b"\n ", size) == given_rows


@given(ROWS, st.sampled_from([b"\n", b"\r\n", b"\n\n"]), st.booleans(), st.integers(1, 40))
def test_lines_are_cut_the_same_however_they_arrive(
    given_rows: list[Any], end: bytes, is_last_ended: bool, size: int
) -> None:
    lines = [json.dumps(row).encode() for row in given_rows]
    data = end.join(lines) + (end if is_last_ended else b"")
    assert objects(data, size) == given_rows


@pytest.mark.parametrize("data", [b"", b" \n\t", b"\xef\xbb\xbf", b"\xef\xbb\xbf []", b"[]", b"[ ]\n"])
def test_input_without_rows_has_none(data: bytes) -> None:
    assert objects(data) == []
    assert objects(data, 1) == []


@pytest.mark.parametrize(
    ("data", "index", "said"),
    [
        (b'[{"id":1}, 7]', 1, "is not an object: it begins with '7'"),
        (b'[{"id":1} {"id":2}]', 1, "has no comma before it"),
        (b'[{"id":1},]', 1, "begins with ']'"),
        (b'[{"id":1}', 1, "ends before the array's ']'"),
        (b"[", 0, "ends before the array's ']'"),
        (b'[{"id":1}]]', 1, "is behind the array's ']'"),
        (b'[{"id":tru}]', 0, "is not JSON"),
        (b'[{"id":"\xff"}]', 0, "is not UTF-8"),
        (b'[{"a":' + b"[" * 100_000 + b"]}]", 0, "nested too deeply"),
    ],
)
def test_array_that_is_none_is_refused_at_its_row(data: bytes, index: int, said: str) -> None:
    before = 0
    with pytest.raises(TableError) as caught:  # noqa: PT012 - what comes before it counts
        for piece in cut_objects(InPieces(data)):
            before += len(piece)
    assert caught.value.index is not None
    assert (before + caught.value.index, caught.value.name) == (index, "ROW_REFUSED")
    assert said in caught.value.message


@pytest.mark.parametrize(("start", "said"), [(b"{", "one object per line"), (b'[{"', "is not JSON")])
def test_row_without_end_is_refused_before_it_fills_the_memory(start: bytes, said: str) -> None:
    class Endless:
        given = 0

        def read(self, size: int) -> bytes:
            assert self.given < 32 * 1024 * 1024
            self.given += size
            return start + b"x" * (size - len(start)) if self.given == size else b"x" * size

    with pytest.raises(TableError, match=said):
        list(cut_objects(Endless()))


def test_fields_that_are_not_wanted_are_refused_or_left_out() -> None:
    data = b'{"id":1,"other":{"v":2}}\n{"v":"x","id":2}\n'
    with pytest.raises(TableError, match="other"):
        rows(data)
    assert rows(data, only=True) == [{"id": 1, "v": None}, {"id": 2, "v": "x"}]
    with pytest.raises(TableError) as caught:
        rows(b'{"id":1}\n[2]\n', only=True)
    assert caught.value.index == 1


def test_cells_of_json_become_a_column_and_name_the_one_that_is_wrong() -> None:
    field = pa.field("tags", pa.list_(pa.field("element", pa.string())))
    assert json_column(pa.array(['["a"]', None, "[]"]), field).to_pylist() == [["a"], None, []]
    with pytest.raises(TableError) as caught:
        json_column(pa.array(["[]", "{}"]), field)
    assert caught.value.index == 1


def test_rows_are_written_as_objects() -> None:
    batch = pa.RecordBatch.from_pylist([{"id": 1, "v": "ü"}, {"id": 2}], SCHEMA)
    assert [json.loads(text) for text in json_objects(batch).to_pylist()] == [
        {"id": 1, "v": "ü"},
        {"id": 2, "v": None},
    ]
