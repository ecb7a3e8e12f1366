"""Routing: one map decides, exactly as Kafka's clients hash, or by ordered boundaries."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.key_vectors import VECTORS, bytes_in
from tidemill.errors import TableCode, TableError
from tidemill.records.partitioner import murmur2, partition_for_key
from tidemill.tables.keys.routing import BUCKETS_MAX, BucketMap, murmur2_many


def binary(keys: list[bytes]) -> pa.Array:
    return pa.array(keys, pa.binary())


#: Few enough that keys are often boundaries.
STATE_KEYS = st.lists(st.sampled_from([0, 1, 0xFF]), max_size=3).map(bytes)
BOUNDARIES = st.sets(STATE_KEYS.filter(bool), max_size=9).map(sorted)


def test_vectors_hash_and_route_as_listed() -> None:
    keys = binary([bytes_in(case, "canonical") for case in VECTORS["cases"]])
    assert murmur2_many(keys).tolist() == [case["murmur2"] for case in VECTORS["cases"]]
    routed = BucketMap.hashed(16).route(keys, None)
    assert routed.dtype == np.int32
    assert routed.tolist() == [case["bucket_of_16"] for case in VECTORS["cases"]]


@given(st.lists(st.binary(max_size=40), max_size=60), st.integers(0, 60))
def test_many_hashes_are_those_of_single_keys(keys: list[bytes], skipped: int) -> None:
    expected = [murmur2(key) for key in keys]
    assert murmur2_many(binary(keys)).tolist() == expected
    assert murmur2_many(binary(keys)[skipped:]).tolist() == expected[skipped:]


@given(st.lists(st.integers(0, 40), min_size=25, max_size=80), st.integers(0, 2**32), st.integers(0, 4096))
def test_long_keys_among_short_ones_hash_the_same(sizes: list[int], seed: int, long: int) -> None:
    random = np.random.default_rng(seed)
    keys = [random.bytes(size) for size in [*sizes, long]]
    assert murmur2_many(binary(keys)).tolist() == [murmur2(key) for key in keys]


def test_more_keys_than_one_step_takes_hash_the_same() -> None:
    keys = [b"%d" % (number * 7919) for number in range(20_000)]
    assert murmur2_many(binary(keys)).tolist() == [murmur2(key) for key in keys]


@given(st.lists(st.binary(max_size=20), max_size=40), st.integers(1, BUCKETS_MAX))
def test_hashed_keys_go_where_kafka_clients_send_them(keys: list[bytes], buckets: int) -> None:
    routed = BucketMap.hashed(buckets).route(binary(keys), None)
    assert routed.tolist() == [partition_for_key(key, buckets) for key in keys]


@given(BOUNDARIES, st.lists(STATE_KEYS, max_size=20))
def test_ranged_keys_go_to_the_range_that_holds_them(boundaries: list[bytes], keys: list[bytes]) -> None:
    bucket_map = BucketMap.ranged(boundaries)
    assert bucket_map.buckets == len(boundaries) + 1
    keys += boundaries
    routed = bucket_map.route(None, binary(keys))
    assert routed.dtype == np.int32
    assert routed.tolist() == [bisect_right(boundaries, key) for key in keys]
    for key, bucket in zip(keys, routed.tolist(), strict=True):
        low, high = bucket_map.key_range(bucket)
        assert low <= key
        assert high is None or key < high


@given(BOUNDARIES, STATE_KEYS, st.none() | STATE_KEYS)
def test_buckets_for_a_range_are_those_that_share_a_key_with_it(
    boundaries: list[bytes], low: bytes, high: bytes | None
) -> None:
    bucket_map = BucketMap.ranged(boundaries)

    def shares(bucket: int) -> bool:
        first, after = bucket_map.key_range(bucket)
        smallest = max(first, low)
        return (after is None or smallest < after) and (high is None or smallest < high)

    assert bucket_map.buckets_for_range(low, high) == list(filter(shares, range(bucket_map.buckets)))


def test_any_bucket_by_hash_can_hold_any_key() -> None:
    bucket_map = BucketMap.hashed(3)
    assert bucket_map.key_range(2) == (b"", None)
    assert bucket_map.buckets_for_range(b"a", b"b") == [0, 1, 2]
    assert bucket_map.buckets_for_range(b"b", b"b") == []


def test_bucket_that_is_not_there_has_no_range() -> None:
    for bucket in (-1, 2):
        with pytest.raises(TableError) as caught:
            BucketMap.ranged([b"m"]).key_range(bucket)
        assert caught.value.table_code is TableCode.bucket_not_found


@given(BOUNDARIES, st.integers(1, 2**31))
def test_stored_maps_are_read_back(boundaries: list[bytes], version: int) -> None:
    for bucket_map in (
        BucketMap.ranged(boundaries, version=version),
        BucketMap.hashed(len(boundaries) + 1, version=version),
    ):
        stored = msgspec.msgpack.encode(bucket_map.to_value())
        assert BucketMap.from_value(msgspec.msgpack.decode(stored)) == bucket_map


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        {},
        {"version": 1, "kind": "hash"},
        {"version": 1, "kind": "modulo", "buckets": 4},
        {"version": 0, "kind": "hash", "buckets": 4},
        {"version": 1, "kind": "hash", "buckets": 0},
        {"version": 1, "kind": "hash", "buckets": "4"},
        {"version": 1, "kind": "range", "buckets": 2},
        {"version": 1, "kind": "range", "buckets": 3, "boundaries": [b"a"]},
        {"version": 1, "kind": "range", "buckets": 2, "boundaries": ["a"]},
        {"version": 1, "kind": "range", "buckets": 3, "boundaries": [b"b", b"a"]},
    ],
)
def test_what_is_no_map_is_refused(value: Any) -> None:
    with pytest.raises(TableError) as caught:
        BucketMap.from_value(value)
    assert caught.value.table_code is TableCode.invalid_schema


@pytest.mark.parametrize("boundaries", [[b"b", b"a"], [b"a", b"a"], [b""], [b"", b"a"]])
def test_boundaries_increase_and_leave_no_bucket_empty(boundaries: list[bytes]) -> None:
    with pytest.raises(TableError, match="boundary"):
        BucketMap.ranged(boundaries)


@pytest.mark.parametrize("buckets", [0, -1, BUCKETS_MAX + 1])
def test_number_of_buckets_is_bounded(buckets: int) -> None:
    with pytest.raises(TableError, match="buckets"):
        BucketMap.hashed(buckets)
