"""Makes Arrow arrays from numpy's, and of one text many times, without loading pandas.

``pa.array`` and ``pa.scalar`` make them, too, but look first whether they were given something of pandas, and
for that import pandas wherever it is installed: a fifth of a second and tens of megabytes in processes that
never use it.

>>> from_numpy(np.array([1, 2, 3]), np.array([False, True, False])).to_pylist()
[1, None, 3]
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = ("from_numpy", "repeated")

_BYTES_MAX: Final = 2**31 - 1


def from_numpy(values: npt.NDArray[Any], nulls: npt.NDArray[np.bool_] | None = None) -> pa.Array:
    """An Arrow array of whole numbers, floats or booleans; null where ``nulls`` is true.

    Numbers that lie one behind the other are not copied: do not change them afterwards.
    """
    validity = None if nulls is None or not nulls.any() else _bits(~nulls)
    is_flag = values.dtype == np.bool_
    data = _bits(values) if is_flag else pa.py_buffer(np.ascontiguousarray(values))
    kind = pa.bool_() if is_flag else pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [validity, data])


def repeated(text: str, count: int) -> pa.StringArray:
    """The same text ``count`` times.

    >>> repeated("ä", 2).to_pylist()
    ['ä', 'ä']
    """
    data = text.encode()
    assert len(data) * count <= _BYTES_MAX, f"{count} texts of {len(data)} bytes do not fit into one array"
    ends = np.arange(count + 1, dtype=np.int32) * np.int32(len(data))
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(ends), pa.py_buffer(data * count)])


def _bits(flags: npt.NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(flags, bitorder="little"))
