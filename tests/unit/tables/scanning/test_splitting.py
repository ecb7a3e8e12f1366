"""Pieces cover the range without gap or overlap, and keep to their limits."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.kv.contract import KvView, WriteStalled
from tidemill.kv.rocks import view as view_module
from tidemill.kv.rocks.resources import RocksResources
from tidemill.kv.rocks.store import RocksStore, open_read_only
from tidemill.tables.scanning import splitting
from tidemill.tables.scanning.splitting import PIECES_MAX, Piece, SplitLimits, Walk

KEYS = st.binary(max_size=5)
LIMITS = st.builds(SplitLimits, st.integers(-1, 12), st.integers(-1, 150), st.integers(-1, 9))
ALL = SplitLimits(0, 0, 0)


def make_resources() -> RocksResources:
    return RocksResources(block_cache_bytes=1 << 20, write_buffer_bytes=8 << 20, store_buffer_bytes=64 << 10)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RocksStore]:
    with RocksStore.open(tmp_path / "state", make_resources(), b"id") as opened:
        yield opened


def fill(store: RocksStore, count: int, value: bytes = b"v") -> list[bytes]:
    keys = [b"%06d" % number for number in range(count)]
    for first in range(0, count, 1_000):
        piece = keys[first : first + 1_000]
        try:
            store.write(piece, [value] * len(piece), [], first + 1)
        except WriteStalled:
            store.flush()
            store.write(piece, [value] * len(piece), [], first + 1)
    return keys


def split_view(view: KvView, start: bytes, end: bytes | None, limits: SplitLimits) -> list[Piece]:
    """The pieces of a view, step by step, on a clock that stands still."""
    walk = Walk(start, end, limits, lambda: 0)
    while not walk.is_done:
        walk.go_on(view)
    return walk.finish()


def split(
    store: RocksStore, limits: SplitLimits, start: bytes = b"", end: bytes | None = None
) -> list[Piece]:
    with store.view() as view:
        return split_view(view, start, end, limits)


def check_pieces(
    pieces: list[Piece], rows: list[tuple[bytes, int]], limits: SplitLimits, end: bytes | None
) -> None:
    """Compare with ``rows``, the keys and sizes of the range in order."""
    position = 0
    for piece in pieces:
        taken = rows[position : position + piece.row_count]
        assert len(taken) == piece.row_count >= 1
        assert piece.size_bytes == sum(size for _, size in taken)
        position += len(taken)
        following = rows[position] if position < len(rows) else None
        assert piece.end_key == (following and following[0])
        if limits.max_rows > 0:
            assert piece.row_count <= limits.max_rows
        if limits.max_bytes > 0:
            assert piece.size_bytes <= limits.max_bytes or piece.row_count == 1
        if following is not None:
            # Nothing more would have fit.
            assert piece.row_count == limits.max_rows or (
                limits.max_bytes > 0 and piece.size_bytes + following[1] > limits.max_bytes
            )
    if position < len(rows):
        assert len(pieces) == limits.max_pieces
    elif limits.max_pieces > 0:
        assert len(pieces) <= limits.max_pieces


@settings(max_examples=60, deadline=None)
@given(
    state=st.dictionaries(KEYS, st.binary(max_size=30), max_size=60),
    start=KEYS,
    end=st.none() | KEYS,
    limits=LIMITS,
    is_snapshot=st.booleans(),
)
def test_pieces_are_those_of_a_sorted_dict(
    state: dict[bytes, bytes], start: bytes, end: bytes | None, limits: SplitLimits, is_snapshot: bool
) -> None:
    rows = [
        (key, len(key) + len(state[key]))
        for key in sorted(state)
        if key >= start and (end is None or key < end)
    ]
    resources = make_resources()
    with tempfile.TemporaryDirectory() as directory:
        with RocksStore.open(f"{directory}/state", resources, b"id") as store:
            store.write(list(state.keys()), list(state.values()), [], 1)
            if is_snapshot:
                store.checkpoint(f"{directory}/copy")
            else:
                check_pieces(split(store, limits, start, end), rows, limits, end)
        if is_snapshot:
            with open_read_only(f"{directory}/copy", resources, b"id") as reader:
                check_pieces(split_view(reader, start, end, limits), rows, limits, end)


@pytest.mark.parametrize("limits", [SplitLimits(777, 0, 0), SplitLimits(0, 7 * 777 + 3, 0)])
def test_pieces_of_many_chunks_are_filled(store: RocksStore, limits: SplitLimits) -> None:
    keys = fill(store, 5_000)
    pieces = split(store, limits)
    assert [piece.row_count for piece in pieces] == [777] * 6 + [338]
    assert [piece.end_key for piece in pieces] == [*keys[777::777], None]


def test_a_walk_that_is_interrupted_all_the_time_finds_the_same_pieces(
    store: RocksStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(store, 3_000)
    limits = SplitLimits(1_000, 7 * 900, 0)
    expected = split(store, limits)
    monkeypatch.setattr(view_module, "_SLICE_SECONDS", -1.0)
    monkeypatch.setattr(splitting, "_STEP_MS", -1)
    assert split(store, limits) == expected
    assert [piece.row_count for piece in expected] == [900, 900, 900, 300]


def test_a_split_sees_the_moment_of_its_view_and_leaves_it_readable(store: RocksStore) -> None:
    keys = fill(store, 600)
    with store.view() as view:
        store.write([b"later"], [b""], keys[:300], 1_000)
        assert split_view(view, b"", None, ALL) == [Piece(None, 600, 600 * 7)]
        # The position of the iterator is known to the next read, whoever moved it.
        half = view.measure(b"", None, 1 << 20, 300, at_least_one=True)
        assert half.next_start == keys[300]
        assert view.read(keys[300], None, 1 << 20, 2).keys == keys[300:302]
        assert view.read(b"", None, 1 << 20, 2).keys == keys[:2]
    assert split(store, ALL) == [Piece(None, 301, 300 * 7 + 5)]


def test_no_rows_are_no_pieces(store: RocksStore) -> None:
    assert split(store, ALL) == []
    fill(store, 3)
    assert split(store, ALL, b"000003") == []
    assert split(store, ALL, b"000002", b"000001") == []
    assert split(store, ALL, b"", b"") == []


def test_there_is_a_limit_to_the_pieces_of_an_answer(
    store: RocksStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = fill(store, PIECES_MAX + 5)
    pieces = split(store, SplitLimits(1, 0, 1_000_000))
    assert len(pieces) == PIECES_MAX
    assert pieces[-1].end_key == keys[PIECES_MAX]
    monkeypatch.setattr(splitting, "_KEY_BYTES_MAX", 100)
    assert len(split(store, SplitLimits(1, 0, 0))) == 17
