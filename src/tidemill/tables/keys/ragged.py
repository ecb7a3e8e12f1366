"""Byte strings of many lengths, as Arrow holds them: one buffer and offsets into it.

Everything here works on whole arrays. Arrow's offsets are 32 bits wide, so the bytes of one array stay under
2 GiB; batches are far smaller, and the functions that make arrays state it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from tidemill.records.columns.arrays import from_numpy

__all__ = (
    "ByteArray",
    "Positions",
    "as_bytes",
    "binary_array",
    "bytes_of",
    "fixed_width",
    "gather",
    "search_first",
    "spans",
    "values_of",
)

_BYTES_MAX: Final = 2**31 - 1

ByteArray = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.int64]


def as_bytes(buffer: Any) -> ByteArray:
    """The bytes of any buffer, without a copy; empty if there is no buffer."""
    if buffer is None:
        return np.empty(0, np.uint8)
    return np.frombuffer(buffer, np.uint8)


def spans(array: pa.Array) -> tuple[ByteArray, npt.NDArray[np.int32]]:
    """The buffer of a string or binary array, and the n + 1 offsets of its values."""
    assert array.type in (pa.binary(), pa.string()), f"{array.type} has no 32-bit offsets"
    _, offsets, data = array.buffers()
    if offsets is None or not len(array):
        return as_bytes(data), np.zeros(1, np.int32)
    begin = array.offset
    return as_bytes(data), np.frombuffer(offsets, np.int32)[begin : begin + len(array) + 1]


def bytes_of(array: pa.Array) -> ByteArray:
    """The bytes of all values of a string or binary array, one after the other, without a copy."""
    data, offsets = spans(array)
    return data[offsets[0] : offsets[-1]]


def values_of(array: pa.Array, dtype: Any) -> npt.NDArray[Any]:
    """The values of a fixed-width array without a copy: each is a row of as many ``dtype`` as fill it."""
    width = array.type.byte_width
    begin = array.offset * width
    values: npt.NDArray[Any] = as_bytes(array.buffers()[1])[begin : begin + len(array) * width].view(dtype)
    return values.reshape(len(array), width // values.itemsize)


def binary_array(data: ByteArray, offsets: npt.NDArray[np.int32]) -> pa.Array:
    """A binary array over these bytes, without a copy."""
    return pa.Array.from_buffers(
        pa.binary(), len(offsets) - 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)], null_count=0
    )


def fixed_width(rows: ByteArray) -> pa.Array:
    """A binary array of the rows of a matrix of bytes."""
    count, width = rows.shape
    assert count * width <= _BYTES_MAX, f"{count} values of {width} bytes do not fit into one array"
    offsets = (
        np.arange(0, (count + 1) * width, width, dtype=np.int32) if width else np.zeros(count + 1, np.int32)
    )
    return binary_array(np.ascontiguousarray(rows).reshape(-1), offsets)


def gather(data: ByteArray, starts: Positions, ends: Positions) -> pa.Array:
    """A binary array of the slices of ``data``, in any order."""
    lengths = ends - starts
    offsets = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    total = int(offsets[-1])
    assert total <= _BYTES_MAX, f"{total} bytes do not fit into one array"
    if len(starts) and len(data) <= _BYTES_MAX and bool((starts[1:] >= ends[:-1]).all()):
        # Slices that are in order are every second value of an array over the same buffer.
        edges = np.empty(2 * len(starts), np.int32)
        edges[::2], edges[1::2] = starts, ends
        return binary_array(data, edges).take(from_numpy(np.arange(0, len(edges) - 1, 2)))
    positions = np.arange(total) + np.repeat(starts - offsets[:-1], lengths)
    return binary_array(data[positions], offsets.astype(np.int32))


def search_first(count: int, is_fine: Callable[[int, int], bool]) -> int:
    """The index of the first row at fault; ``is_fine(start, stop)`` says whether a run has no fault.

    For whole-array functions that say no without saying where. At least one row must be at fault.

    >>> search_first(10, lambda start, stop: not (start <= 7 < stop or start <= 4 < stop))
    4
    """
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        if is_fine(low, middle):
            low = middle
        else:
            high = middle
    return low
