"""A view: the state as it was at one moment, read slice by slice while writes go on.

- A view is one RocksDB iterator that is never made anew: an iterator sees the database as of its creation,
  wherever it is sought to. (rocksdict's ``Snapshot`` is of no use: up to 0.3.29 the iterators that it makes
  ignore the snapshot and see later writes.) So a view pins the memtable and the files of that moment until it
  is closed: close it soon.
- Nobody calls ``next`` on an iterator that is not on a row: that ends the process. Nobody sets an upper
  bound: RocksDB keeps a pointer to its bytes, which rocksdict lets Python free.
- The end of the rows is believed only after the iterator's status said that it is no error.
- The loop holds Python's lock, and gives it up for a moment about every millisecond.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from itertools import islice
from typing import Any

from tidemill.errors import CorruptData, StorageError
from tidemill.kv.contract import KvExtent, KvRows, KvValues
from tidemill.kv.rocks.faults import RocksTranslated
from tidemill.kv.rocks.gate import Gate
from tidemill.kv.rocks.keyspace import APPLIED_KEY, STATE_END, STATE_PREFIX, unpack_offset

__all__ = ("RocksView",)

#: Rows between two checks of limits and clock.
_CHUNK_ROWS = 256
#: A read ends after about this long, whatever its limits.
_SLICE_SECONDS = 0.05
#: How long to work before another thread may take over, and how long the pause for that is.
_BREATH_INTERVAL_SECONDS = 0.001
_BREATH_SECONDS = 0.000_05
_NO_LIMIT = 2**62


class RocksView:
    """The state at one moment, in an iterator of RocksDB. Thread-safe; threads that read it take turns."""

    def __init__(
        self, make_iterator: Callable[[], Any], gate: Gate, path: str, forget: Callable[[RocksView], None]
    ) -> None:
        self._gate = gate
        self._path = path
        self._forget = forget
        self._lock = threading.Lock()
        self._closing = False
        #: The inner key (with its prefix) that the iterator stands on, if that is known.
        self._position: bytes | None = None
        self._reading = RocksTranslated("read", path)
        self._iterator: Any = None
        try:
            with self._reading:
                self._iterator = make_iterator()
                #: The log offset of the view: everything below it is in the view.
                self.applied_offset = self._read_applied_offset()
        except StorageError:
            self._iterator = None
            raise

    def read(self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int) -> KvRows:
        """Rows with ``start <= key < end``: at least one if there is one, even one larger than ``max_bytes``.

        Fewer than the limits allow if it takes long: only ``next_start`` says whether there are more.
        """
        assert max_rows > 0
        with self._gate:
            try:
                with self._lock, self._reading:
                    return self._read(STATE_PREFIX + start, end, max_bytes, max_rows)
            finally:
                self._drop_if_closing()

    def read_values(self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int) -> KvValues:
        """``read`` without the keys, which takes about two thirds of the time.

        It may stop a little before the limits. Keys are taken to be as long as the first of their chunk.
        """
        assert max_rows > 0
        with self._gate:
            try:
                with self._lock, self._reading:
                    inner_end = STATE_END if end is None else STATE_PREFIX + end
                    return self._read_values(STATE_PREFIX + start, inner_end, max_bytes, max_rows)
            finally:
                self._drop_if_closing()

    def measure(
        self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int, *, at_least_one: bool
    ) -> KvExtent:
        """Count rows with ``start <= key < end`` up to the limits, and the bytes of their keys and values.

        Ends early if it takes long, as ``read`` does. Takes no memory, and about two thirds of a ``read``'s
        time.
        """
        assert max_rows > 0
        with self._gate:
            try:
                with self._lock, self._reading:
                    inner_end = STATE_END if end is None else STATE_PREFIX + end
                    return self._measure(STATE_PREFIX + start, inner_end, max_bytes, max_rows, at_least_one)
            finally:
                self._drop_if_closing()

    def close(self) -> None:
        """Let go of what the view pins: at once, or when the reads under way end. Never waits."""
        self._closing = True
        self._drop_if_closing()
        self._forget(self)

    def drop(self) -> None:
        """Close, with the iterator gone on return. For the store, when nobody reads any more."""
        self._closing = True
        with self._lock:
            self._iterator = None

    def __enter__(self) -> RocksView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _drop_if_closing(self) -> None:
        # The thread that holds the lock calls this after releasing it, so nobody needs to wait here.
        if self._closing and self._lock.acquire(blocking=False):
            try:
                self._iterator = None
            finally:
                self._lock.release()

    def _opened(self) -> Any:
        if self._closing or self._iterator is None:
            raise StorageError(f"a view of {self._path} was closed; take another one")
        return self._iterator

    def _read_applied_offset(self) -> int:
        # Read through the iterator, so that the offset fits the rows even while somebody writes.
        self._iterator.seek(APPLIED_KEY)
        found = self._iterator.key()
        self._iterator.status()
        try:
            return unpack_offset(self._iterator.value() if found == APPLIED_KEY else b"")
        except ValueError as error:
            raise CorruptData(f"no applied offset: {error}", path=self._path, position=0) from error

    def _read(self, start: bytes, end: bytes | None, max_bytes: int, max_rows: int) -> KvRows:
        inner_end = None if end is None else STATE_PREFIX + end
        iterator = self._opened()
        try:
            if self._position != start:
                iterator.seek(start)
            self._position = None
            rows = _Slice(inner_end, max_bytes, max_rows, _Breath())
            current, value, advance = iterator.key, iterator.value, iterator.next
            while (wanted := rows.wanted()) > 0:
                keys: list[bytes] = []
                values: list[bytes] = []
                add_key, add_value = keys.append, values.append
                for key in islice(iter(current, None), wanted):
                    add_key(key)
                    add_value(value())
                    advance()
                if len(keys) < wanted:
                    iterator.status()
                rows.add(keys, values, wanted)
            if rows.next_key is None and not rows.ended:
                self._position = rows.stop_before(current())
                if self._position is None:
                    iterator.status()
            return rows.result()
        finally:
            # An error keeps this frame alive, and through it the iterator would keep the database open.
            iterator = current = value = advance = None

    def _read_values(self, start: bytes, end: bytes, max_bytes: int, max_rows: int) -> KvValues:
        iterator = self._opened()
        try:
            if self._position != start:
                iterator.seek(start)
            self._position = None
            breath, deadline = _Breath(), time.monotonic() + _SLICE_SECONDS
            values: list[bytes] = []
            size, wanted, following = 0, 1, iterator.key()
            while wanted > 0 and following is not None and following < end:
                # The first row is taken whatever its size.
                bytes_left = max_bytes - size if values else _NO_LIMIT
                chunk, chunk_bytes = _read_chunk(iterator, following, end, bytes_left, wanted)
                values += chunk
                size += chunk_bytes
                following = iterator.key()
                if len(chunk) < wanted or breath.take() > deadline:
                    break
                likely = max(max_bytes - size, 0) * len(values) // max(size, 1)
                wanted = min(_CHUNK_ROWS, likely, max_rows - len(values))
            if following is None:
                iterator.status()
            elif following < end:
                self._position = following
                return KvValues(values, size, following[1:])
            return KvValues(values, size, None)
        finally:
            # An error would keep the iterator, and with it the database, open: see ``_read``.
            iterator = None

    def _measure(
        self, start: bytes, end: bytes, max_bytes: int, max_rows: int, at_least_one: bool
    ) -> KvExtent:
        iterator = self._opened()
        try:
            if self._position != start:
                iterator.seek(start)
            self._position = None
            current, value, advance = iterator.key, iterator.value, iterator.next
            breath, deadline = _Breath(), time.monotonic() + _SLICE_SECONDS
            rows = size = 0
            is_full = False
            while True:
                wanted = min(_CHUNK_ROWS, max_rows - rows)
                left = wanted
                # One row per step, because rocksdict has no call for several.
                for key in islice(iter(current, None), wanted):
                    if key >= end:
                        break
                    # One byte of the inner key is the prefix.
                    grown = size + len(key) - 1 + len(value())
                    if grown > max_bytes and not at_least_one:
                        is_full = True
                        break
                    size, at_least_one = grown, False
                    left -= 1
                    advance()
                rows += wanted - left
                is_full = is_full or rows == max_rows
                if left or is_full or breath.take() > deadline:
                    break
            behind = current()
            if behind is None:
                iterator.status()
            elif behind < end:
                self._position = behind
                return KvExtent(rows, size, behind[1:], is_full)
            return KvExtent(rows, size, None, False)
        finally:
            # An error would keep the iterator, and with it the database, open: see ``_read``.
            iterator = current = value = advance = None


def _read_chunk(
    iterator: Any, first: bytes, end: bytes, max_bytes: int, wanted: int
) -> tuple[list[bytes], int]:
    """The values of rows from ``first`` on, on which the iterator stands, and their bytes with keys.

    Fewer than ``wanted`` if the end comes before, or the limit; the iterator is then on the row behind.
    """
    try:
        current, value, advance = iterator.key, iterator.value, iterator.next
        values: list[bytes] = []
        add = values.append
        for each in islice(iter(value, None), wanted):
            add(each)
            advance()
        size = sum(map(len, values)) + len(values) * (len(first) - 1)
        behind = current()
        is_inside = behind < end if behind is not None else end == STATE_END
        if is_inside and size <= max_bytes:
            return values, size
        # The chunk goes beyond the end or the limit: read it again, with a look at every key.
        iterator.seek(first)
        values, size = [], 0
        for key in islice(iter(current, None), wanted):
            each = value()
            grown = size + len(key) - 1 + len(each)
            if key >= end or grown > max_bytes:
                break
            values.append(each)
            size = grown
            advance()
        return values, size
    finally:
        # An error would keep the iterator, and with it the database, open: see ``_read``.
        iterator = current = value = advance = None


class _Breath:
    """Releases Python's lock from time to time, so that other threads can run."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = time.monotonic()

    def take(self) -> float:
        """Pause if the last pause was some time ago. Returns the time."""
        now = time.monotonic()
        if now - self._last >= _BREATH_INTERVAL_SECONDS:
            time.sleep(_BREATH_SECONDS)
            now = self._last = time.monotonic()
        return now


class _Slice:
    """The rows that one read has collected, and its limits. Takes inner keys, gives state keys."""

    __slots__ = (
        "_breath",
        "_bytes_left",
        "_deadline",
        "_end",
        "_max_rows",
        "_size",
        "ended",
        "keys",
        "next_key",
        "values",
    )

    def __init__(self, end: bytes | None, max_bytes: int, max_rows: int, breath: _Breath) -> None:
        self.keys: list[bytes] = []
        self.values: list[bytes] = []
        self.next_key: bytes | None = None
        self.ended = False
        self._end = end
        self._max_rows = max_rows
        self._bytes_left = max_bytes
        self._size = 0
        self._breath = breath
        self._deadline = time.monotonic() + _SLICE_SECONDS

    def wanted(self) -> int:
        """How many rows to read next: as many as probably fit, at most a chunk; 0 at a limit."""
        if self.ended or self.next_key is not None:
            return 0
        rows = len(self.keys)
        if not rows:
            return 1
        if self._breath.take() > self._deadline:
            return 0
        likely = max(self._bytes_left, 0) * rows // max(self._size, 1) + 1
        return min(_CHUNK_ROWS, likely, self._max_rows - rows)

    def add(self, keys: list[bytes], values: list[bytes], wanted: int) -> None:
        """Take those rows that are before the end and within the limits."""
        if len(keys) < wanted:
            self.ended = True
        if self._end is not None and keys and keys[-1] >= self._end:
            cut = bisect_left(keys, self._end)
            del keys[cut:], values[cut:]
            self.ended = True
        # One byte of each inner key is the prefix.
        size = sum(map(len, keys)) + sum(map(len, values)) - len(keys)
        # The first chunk is one row, which is taken whatever its size.
        if size > self._bytes_left and self.keys:
            size = self._cut(keys, values)
        self.keys += [key[1:] for key in keys]
        self.values += values
        self._size += size
        self._bytes_left -= size

    def _cut(self, keys: list[bytes], values: list[bytes]) -> int:
        taken = 0
        for number, (key, value) in enumerate(zip(keys, values, strict=True)):
            size = len(key) - 1 + len(value)
            if taken + size > self._bytes_left:
                self.next_key, self.ended = key, False
                del keys[number:], values[number:]
                break
            taken += size
        return taken

    def stop_before(self, key: bytes | None) -> bytes | None:
        """End the read. ``key`` is the inner key behind the last row, None if there is none."""
        if key is None or (self._end is not None and key >= self._end):
            self.ended = True
            return None
        self.next_key = key
        return key

    def result(self) -> KvRows:
        return KvRows(self.keys, self.values, None if self.next_key is None else self.next_key[1:])
