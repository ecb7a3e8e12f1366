"""Batches out of columns: the same bytes as out of records, and cuts that keep to a size."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.records.batch import check_batch
from tidemill.records.columns import build as columns_build
from tidemill.records.columns.build import build_batch_columns, split_by_bytes
from tidemill.records.compression import CODEC_NAMES
from tidemill.records.record import Record, build_batch, read_records

CODECS = sorted(CODEC_NAMES)
NULLABLE = st.none() | st.binary(max_size=80)
TIMES = st.integers(0, 300) | st.integers(-(2**50), 2**50)


def binary(values: list[bytes | None], before: int = 0) -> pa.BinaryArray:
    """An Arrow array, as a slice of a longer one."""
    return pa.array([b"not this"] * before + values + [b"nor this"] * before, pa.binary())[
        before : before + len(values)
    ]


@given(
    st.lists(st.tuples(NULLABLE, NULLABLE), min_size=1, max_size=8),
    st.integers(1, 60),
    st.none() | TIMES | st.lists(TIMES, min_size=1, max_size=8),
    st.sampled_from(CODECS),
    st.booleans(),
    st.sampled_from([2, columns_build._SMALL_BATCH_RECORDS]),
    st.integers(0, 3),
)
def test_columns_are_built_as_records_are(
    pairs: list[tuple[bytes | None, bytes | None]],
    repeats: int,
    times: int | list[int] | None,
    codec: int,
    has_keys: bool,
    threshold: int,
    before: int,
) -> None:
    pairs = pairs * repeats
    count = len(pairs)
    if not isinstance(times, list):
        times = [times or 0]
    times = (times * count)[:count]
    keys = [key if has_keys else None for key, _ in pairs]
    values = [value for _, value in pairs]
    records = list(map(Record, keys, values, times))
    one_time = len(set(times)) == 1
    fields = {
        "base_offset": 9,
        "leader_epoch": 3,
        "codec": codec,
        "producer_id": 77,
        "producer_epoch": 2,
        "base_sequence": 5,
        "attributes": 0x10,
    }
    with patch.object(columns_build, "_SMALL_BATCH_RECORDS", threshold):
        built = build_batch_columns(
            binary(keys, before) if has_keys else None,
            binary(values, before),
            timestamp_ms=times[0] if one_time else np.array(times, np.int64),
            **fields,
        )
    assert built == build_batch(records, **fields)
    check_batch(built)


def same_bytes(keys: list[bytes | None], values: list[bytes | None], times: list[int]) -> bool:
    built = build_batch_columns(binary(keys), binary(values), timestamp_ms=np.array(times, np.int64))
    return built == build_batch(list(map(Record, keys, values, times)))


@pytest.mark.parametrize("size", [0, 1, 63, 64, 127, 128, 8191, 8192, 70000])
def test_values_at_the_limits_of_their_lengths_are_built(size: int) -> None:
    count = 300
    assert same_bytes([b"k"] * count, [b"v" * size] * count, [5] * count)
    assert same_bytes([b"k" * size] * count, [None] * count, list(range(count)))


def test_offsets_of_three_bytes_are_built() -> None:
    count = 20_000
    assert same_bytes([None] * count, [b""] * count, list(range(count)))


@pytest.mark.parametrize(
    "spread", [63, 64, 8191, 2**27, 2**34, 2**41, 2**48 - 1, 2**48, 2**48 + 1, 2**55, 2**62, 2**63 - 1]
)
def test_timestamps_however_far_apart_are_built(spread: int) -> None:
    times = [0, spread, spread // 2, -spread // 3] * 100
    assert same_bytes([b"k" * 8200] * 400, [b"v"] * 400, times)
    assert same_bytes([b"k"] * 400, [b"v" * 200] * 400, times)


def test_bytes_under_a_null_are_not_built_in() -> None:
    count = 300
    data = pa.py_buffer(b"abc" * count)
    cuts = pa.py_buffer(np.arange(0, 3 * count + 1, 3, dtype=np.int32))
    valid = pa.py_buffer(np.packbits(np.arange(count + 4) % 2 == 0, bitorder="little"))
    values = pa.BinaryArray.from_buffers(pa.binary(), count, [valid, cuts, data])
    expected = [b"abc" if i % 2 == 0 else None for i in range(count)]
    built = build_batch_columns(values, values, timestamp_ms=1)
    assert [(found.key, found.value) for found in read_records(built)] == list(
        zip(expected, expected, strict=True)
    )


def test_columns_that_do_not_fit_each_other_are_refused() -> None:
    two, three = binary([b"a"] * 2), binary([b"b"] * 3)
    with pytest.raises(ValueError, match="2 keys do not fit 3 values"):
        build_batch_columns(two, three, timestamp_ms=0)
    with pytest.raises(ValueError, match="1 timestamps do not fit 3 values"):
        build_batch_columns(None, three, timestamp_ms=np.zeros(1, np.int64))
    with pytest.raises(ValueError, match="at least one record"):
        build_batch_columns(None, binary([]), timestamp_ms=0)
    with pytest.raises(ValueError, match="2 keys do not fit 3 values"):
        split_by_bytes(two, three, 100)


def test_a_batch_that_is_too_large_is_refused_before_it_is_built() -> None:
    values = binary([b"v" * 1000] * 300)
    with (
        patch.object(columns_build, "_BODY_BYTES_MAX", 300_000),
        pytest.raises(ValueError, match="split_by_bytes"),
    ):
        build_batch_columns(None, values, timestamp_ms=0)


# --- cutting


@given(
    st.lists(st.tuples(NULLABLE, NULLABLE), min_size=1, max_size=8),
    st.integers(1, 60),
    st.integers(0, 3000),
    st.booleans(),
    st.lists(st.integers(-(2**60), 2**60), max_size=4),
)
def test_every_slice_makes_a_batch_that_fits_or_holds_one_record(
    pairs: list[tuple[bytes | None, bytes | None]],
    repeats: int,
    max_bytes: int,
    has_keys: bool,
    times: list[int],
) -> None:
    pairs = pairs * repeats
    count = len(pairs)
    keys = binary([key for key, _ in pairs], 1) if has_keys else None
    values = binary([value for _, value in pairs], 1)
    stamps = np.array((times * count)[:count], np.int64) if times else np.zeros(count, np.int64)
    slices = split_by_bytes(keys, values, max_bytes, timestamp_ms=stamps if times else 0)

    def size(part: slice) -> int:
        part_keys = None if keys is None else keys[part]
        return len(build_batch_columns(part_keys, values[part], timestamp_ms=stamps[part]))

    assert [index for part in slices for index in range(count)[part]] == list(range(count))
    for part in slices:
        assert part.stop - part.start == 1 or size(part) <= max_bytes
    for part in slices[:-1]:
        # One more would have been too many, but for what numbers were overestimated by.
        more = slice(part.start, part.stop + 1)
        assert size(more) > max_bytes - 12 * (more.stop - more.start)


def test_no_records_make_no_slices() -> None:
    assert split_by_bytes(None, binary([]), 100) == []


def test_slices_are_as_large_as_may_be() -> None:
    values = binary([b"v" * 100] * 1000)
    whole = len(build_batch_columns(None, values, timestamp_ms=7))
    assert len(split_by_bytes(None, values, whole + 64)) == 1
    assert len(split_by_bytes(None, values, whole // 2 + 200)) == 2
