"""A view is the state of one moment; slices of any size give all of it, once, in order."""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidemill.errors import StorageError
from tidemill.kv.contract import KvRows, KvValues
from tidemill.kv.rocks import view as view_module
from tidemill.kv.rocks.resources import RocksResources
from tidemill.kv.rocks.store import RocksStore
from tidemill.kv.rocks.view import RocksView

KEYS = st.binary(max_size=6)
VALUES = st.binary(max_size=40)


def small_resources() -> RocksResources:
    return RocksResources(block_cache_bytes=1 << 20, write_buffer_bytes=8 << 20, store_buffer_bytes=64 << 10)


def slices(
    view: RocksView,
    start: bytes = b"",
    end: bytes | None = None,
    max_bytes: int = 1 << 20,
    max_rows: int = 1000,
) -> list[KvRows]:
    found = [view.read(start, end, max_bytes, max_rows)]
    while (next_start := found[-1].next_start) is not None:
        found.append(view.read(next_start, end, max_bytes, max_rows))
    return found


def rows(view: RocksView) -> dict[bytes, bytes]:
    return {key: value for piece in slices(view) for key, value in zip(piece.keys, piece.values, strict=True)}


@settings(max_examples=40, deadline=None)
@given(
    state=st.dictionaries(KEYS, VALUES, max_size=60),
    start=KEYS,
    end=st.none() | KEYS,
    max_bytes=st.integers(0, 200),
    max_rows=st.integers(1, 20),
    flush=st.booleans(),
)
def test_slices_of_any_size_give_every_row_once(
    state: dict[bytes, bytes], start: bytes, end: bytes | None, max_bytes: int, max_rows: int, flush: bool
) -> None:
    with (
        tempfile.TemporaryDirectory() as directory,
        RocksStore.open(directory, small_resources(), b"id") as store,
    ):
        store.write(list(state.keys()), list(state.values()), [], 1)
        if flush:
            store.flush()
        with store.view() as view:
            pieces = slices(view, start, end, max_bytes, max_rows)
        expected = sorted((key, state[key]) for key in state if key >= start and (end is None or key < end))
        assert [pair for piece in pieces for pair in zip(piece.keys, piece.values, strict=True)] == expected
        for piece in pieces:
            assert len(piece.keys) <= max_rows
            size = sum(map(len, piece.keys)) + sum(map(len, piece.values))
            assert size <= max_bytes or len(piece.keys) == 1
            if piece is not pieces[-1]:
                assert piece.keys
                # Nothing more would have fit.
                following = expected[[key for key, _ in expected].index(piece.keys[-1]) + 1]
                assert len(piece.keys) == max_rows or size + sum(map(len, following)) > max_bytes


@settings(max_examples=60, deadline=None)
@given(
    state=st.dictionaries(KEYS, VALUES, max_size=60),
    start=KEYS,
    end=st.none() | KEYS,
    max_bytes=st.integers(0, 400),
    max_rows=st.integers(1, 40),
    flush=st.booleans(),
)
def test_slices_without_keys_give_every_value_once(
    state: dict[bytes, bytes], start: bytes, end: bytes | None, max_bytes: int, max_rows: int, flush: bool
) -> None:
    expected = [state[key] for key in sorted(state) if key >= start and (end is None or key < end)]
    with (
        tempfile.TemporaryDirectory() as directory,
        RocksStore.open(directory, small_resources(), b"id") as store,
    ):
        store.write(list(state.keys()), list(state.values()), [], 1)
        if flush:
            store.flush()
        found: list[bytes] = []
        following: bytes | None = start
        with store.view() as view:
            while following is not None:
                piece = view.read_values(following, end, max_bytes, max_rows)
                assert len(piece.values) <= max_rows
                assert sum(map(len, piece.values)) <= max_bytes or len(piece.values) == 1
                assert piece.values or piece.next_start is None
                found += piece.values
                following = piece.next_start
    assert found == expected


def test_a_slice_without_keys_ends_exactly_where_its_range_does(
    tmp_path: Path, resources: RocksResources
) -> None:
    with RocksStore.open(tmp_path, resources, b"id") as store:
        keys = [b"%06d" % i for i in range(2_000)]
        store.write(keys, keys, [], 1)
        with store.view() as view:
            for count in (1, 255, 256, 257, 258, 600, 1_999, 2_000):
                end = keys[count] if count < len(keys) else None
                assert view.read_values(b"", end, 1 << 20, 10_000) == KvValues(keys[:count], 12 * count, None)
                assert view.read_values(b"", None, 1 << 20, count).values == keys[:count]
                rest = view.read_values(keys[count - 1], None, 1 << 20, 10_000)
                assert rest.values == keys[count - 1 :]


@pytest.mark.parametrize("value_bytes", [0, 10, 5_000, 300_000])
def test_slices_over_many_chunks_are_filled_to_their_limit(
    tmp_path: Path, resources: RocksResources, value_bytes: int
) -> None:
    with RocksStore.open(tmp_path, resources, b"id") as store:
        count = 2000 if value_bytes <= 10 else 20
        keys = [b"%06d" % i for i in range(count)]
        store.write(keys, [bytes(value_bytes)] * count, [], 1)
        fits = 7 * (6 + value_bytes) + 1
        with store.view() as view:
            assert [len(piece.keys) for piece in slices(view, max_bytes=fits, max_rows=7)][:2] == [7, 7]
            assert [len(piece.keys) for piece in slices(view, max_bytes=fits)][:2] == [7, 7]
            assert [key for piece in slices(view, max_rows=777) for key in piece.keys] == keys
            assert [key for piece in slices(view, max_bytes=10_000) for key in piece.keys] == keys


def test_a_read_of_a_range_does_not_go_far_beyond_it(tmp_path: Path, resources: RocksResources) -> None:
    with RocksStore.open(tmp_path, resources, b"id") as store:
        keys = [b"%06d" % i for i in range(2000)]
        store.write(keys, keys, [], 1)
        with store.view() as view:
            assert view.read(b"", b"000010", 1 << 20, 1000) == KvRows(keys[:10], keys[:10], None)
            assert view._iterator.key() < b"\x01000500"


def test_an_empty_range_is_an_empty_slice(tmp_path: Path, resources: RocksResources) -> None:
    with RocksStore.open(tmp_path, resources, b"id") as store, store.view() as nothing:
        assert nothing.read(b"", None, 100, 100) == KvRows([], [], None)
        store.write([b"b"], [b""], [], 1)
        with store.view() as view:
            assert view.read(b"a", b"b", 100, 100) == KvRows([], [], None)
            assert view.read(b"c", None, 100, 100) == KvRows([], [], None)
            assert view.read(b"b", b"a", 100, 100) == KvRows([], [], None)
            assert view.read(b"", b"", 100, 100) == KvRows([], [], None)
            assert view.read(b"b", None, 0, 1) == KvRows([b"b"], [b""], None)
        assert nothing.read(b"", None, 100, 100) == KvRows([], [], None)


def test_a_read_that_takes_long_ends_early_and_goes_on_where_it_stopped(
    tmp_path: Path, resources: RocksResources, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RocksStore.open(tmp_path, resources, b"id") as store:
        keys = [b"%06d" % i for i in range(50)]
        store.write(keys, keys, [], 1)
        monkeypatch.setattr(view_module, "_SLICE_SECONDS", -1.0)
        with store.view() as view:
            pieces = slices(view)
        assert len(pieces) == 50
        assert [key for piece in pieces for key in piece.keys] == keys


def test_later_writes_are_not_seen(tmp_path: Path, resources: RocksResources) -> None:
    with RocksStore.open(tmp_path, resources, b"id") as store:
        before = {b"%04d" % i: b"old" for i in range(0, 1000, 2)}
        store.write(list(before), list(before.values()), [], 10)
        view = store.view()
        half = view.read(b"", b"0500", 1 << 20, 1000)
        store.write([b"%04d" % i for i in range(1000)], [b"new"] * 1000, [], 20)
        store.write([], [], [b"%04d" % i for i in range(0, 1000, 4)], 30)
        store.flush()
        store._database.compact_range(None, None)
        assert (view.applied_offset, store.applied_offset) == (10, 30)
        assert view.read(b"", b"0500", 1 << 20, 1000) == half
        assert rows(view) == before
        with store.view() as later:
            assert later.applied_offset == 30
            assert rows(later) == {b"%04d" % i: b"new" for i in range(1000) if i % 4}
        view.close()


def test_views_taken_under_writes_fit_their_offset(tmp_path: Path, small_resources: RocksResources) -> None:
    with RocksStore.open(tmp_path, small_resources, b"id") as store:
        done = threading.Event()

        def write() -> None:
            # Write number n puts key n and takes away key n - 50.
            for number in range(3000):
                gone = [b"%06d" % (number - 50)] if number >= 50 else []
                store.write([b"%06d" % number], [b"%d" % number * 10], gone, number + 1)
            done.set()

        writer = threading.Thread(target=write)
        writer.start()
        taken = 0
        while not done.is_set() or not taken:
            with store.view() as view:
                reached = view.applied_offset
                expected = {b"%06d" % i: b"%d" % i * 10 for i in range(max(0, reached - 50), reached)}
                assert rows(view) == expected
                taken += 1
        writer.join()


def test_a_closed_view_is_an_error(tmp_path: Path, resources: RocksResources) -> None:
    with RocksStore.open(tmp_path, resources, b"id") as store:
        view = store.view()
        view.close()
        view.close()
        with pytest.raises(StorageError, match=r"view of .* was closed"):
            view.read(b"", None, 100, 100)


def test_closing_a_view_does_not_wait_for_its_readers(tmp_path: Path, resources: RocksResources) -> None:
    with RocksStore.open(tmp_path, resources, b"id") as store:
        view = store.view()
        # As if a read were under way in another thread.
        assert view._lock.acquire(blocking=False)
        view.close()
        assert view._iterator is not None
        view._lock.release()
        with pytest.raises(StorageError, match="closed"):
            view.read(b"", None, 100, 100)
        assert view._iterator is None, "whoever read last did not let go of the iterator"


class StoreMachine(RuleBasedStateMachine):
    """A store and its views against dictionaries."""

    @initialize()
    def open(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.resources = small_resources()
        self.store = RocksStore.open(self.directory.name, self.resources, b"id")
        self.model: dict[bytes, bytes] = {}
        self.offset = 0
        self.views: list[tuple[RocksView, dict[bytes, bytes], int]] = []

    @rule(
        puts=st.dictionaries(KEYS, VALUES, max_size=8),
        deletes=st.lists(KEYS, max_size=4),
        by=st.integers(0, 3),
    )
    def write(self, puts: dict[bytes, bytes], deletes: list[bytes], by: int) -> None:
        self.offset += by
        self.store.write(list(puts), list(puts.values()), deletes, self.offset)
        self.model = {key: value for key, value in (self.model | puts).items() if key not in deletes}

    @precondition(lambda self: len(self.views) < 4)
    @rule()
    def take_view(self) -> None:
        self.views.append((self.store.view(), dict(self.model), self.offset))

    @precondition(lambda self: self.views)
    @rule(data=st.data(), close=st.booleans())
    def read_view(self, data: st.DataObject, close: bool) -> None:
        number = data.draw(st.integers(0, len(self.views) - 1))
        view, model, offset = self.views[number]
        assert rows(view) == model
        assert view.applied_offset == offset
        if close:
            view.close()
            del self.views[number]

    @rule(keys=st.lists(KEYS, max_size=8))
    def look_up(self, keys: list[bytes]) -> None:
        assert self.store.get_many(keys) == [self.model.get(key) for key in keys]

    @rule()
    def flush(self) -> None:
        self.store.flush()

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.views = []
        self.store = RocksStore.open(self.directory.name, self.resources, b"id", first_offset=99)

    @invariant()
    def offset_is_known(self) -> None:
        assert self.store.applied_offset == self.offset

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.directory.cleanup()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
