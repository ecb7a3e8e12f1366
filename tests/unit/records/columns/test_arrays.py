"""Arrow's arrays from numpy's are those that pyarrow itself makes, without pandas."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.records.columns.arrays import from_numpy, repeated


@pytest.mark.parametrize("dtype", ["b1", "i1", "i2", "i4", "i8", "u1", "u4", "u8", "f4", "f8"])
@given(data=st.data())
def test_arrays_are_those_of_pyarrow(dtype: str, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, 40))
    values = np.frombuffer(data.draw(st.binary(min_size=count, max_size=count)), "u1").astype(dtype)
    nulls = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)), "b1")
    step = data.draw(st.sampled_from([1, 2, -1]))
    values, nulls = values[::step], nulls[::step]
    for made, expected in (
        (from_numpy(values), pa.array(values)),
        (from_numpy(values, nulls), pa.array(values, mask=nulls)),
    ):
        made.validate(full=True)
        assert made.type == expected.type
        assert made.equals(expected)
        assert made.null_count == expected.null_count


@pytest.mark.parametrize("text", ["", "upsert", "größer"])
@pytest.mark.parametrize("count", [0, 1, 1000])
def test_a_text_is_repeated(text: str, count: int) -> None:
    made = repeated(text, count)
    made.validate(full=True)
    assert made.equals(pa.array([text] * count, pa.string()))


def test_pandas_is_not_loaded() -> None:
    program = (
        "import sys, numpy as np\n"
        "from tidemill.records.columns.arrays import from_numpy, repeated\n"
        "from_numpy(np.arange(3), np.arange(3) > 1), from_numpy(np.arange(3) > 1), repeated('a', 3)\n"
        "print('pandas' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
