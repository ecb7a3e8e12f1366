"""murmur2 must agree with Java's clients to the bit."""

from __future__ import annotations

import pytest
from aiokafka.partitioner import murmur2 as reference
from hypothesis import given
from hypothesis import strategies as st

from tidemill.records.partitioner import murmur2, partition_for_key

# What Kafka's own tests expect, as signed numbers.
JAVA_VECTORS = [
    (b"21", -973932308),
    (b"foobar", -790332482),
    (b"a-little-bit-long-string", -985981536),
    (b"a-little-bit-longer-string", -1486304829),
    (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
    (b"abc", 479470107),
]


@pytest.mark.parametrize(("data", "signed"), JAVA_VECTORS)
def test_hash_is_javas(data: bytes, signed: int) -> None:
    assert murmur2(data) == signed % 2**32


@given(st.binary(max_size=64))
def test_hash_agrees_with_aiokafka(data: bytes) -> None:
    assert murmur2(data) == reference(data) % 2**32


@given(st.binary(), st.integers(1, 10_000))
def test_partition_is_always_one_of_the_topic(key: bytes, count: int) -> None:
    assert 0 <= partition_for_key(key, count) < count


def test_sign_bit_is_cleared_not_negated() -> None:
    assert partition_for_key(b"21", 7) == (-973932308 & 0x7FFFFFFF) % 7
