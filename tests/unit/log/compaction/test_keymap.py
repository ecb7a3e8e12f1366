"""The key map against a dictionary, and its limits."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tidemill.log.compaction.keymap import KeyHash, KeyMap
from tidemill.records.columns.fields import BODY_MARGIN_BYTES, Int64s

_keys = st.binary(max_size=3) | st.binary(min_size=7, max_size=18) | st.binary(min_size=60, max_size=70)


def column(keys: Sequence[bytes]) -> tuple[bytes, Int64s, Int64s]:
    """Keys in a body, with something between them, and where they are."""
    body, starts = bytearray(), []
    for key in keys:
        body += b"\x55between"
        starts.append(len(body))
        body += key
    places = np.array(starts, np.int64)
    return (
        bytes(body) + bytes(BODY_MARGIN_BYTES),
        places,
        places + np.array([len(key) for key in keys], np.int64),
    )


def put(keymap: KeyMap, keys: Sequence[bytes], first_offset: int = 0) -> None:
    keymap.put(*column(keys), np.arange(first_offset, first_offset + len(keys)))


def get(keymap: KeyMap, keys: Sequence[bytes]) -> list[int]:
    return [int(offset) for offset in keymap.get(*column(keys))]


@given(st.lists(st.lists(_keys, max_size=100), max_size=5), st.lists(_keys, max_size=20))
def test_it_answers_as_a_dictionary(calls: list[list[bytes]], others: list[bytes]) -> None:
    expected: dict[bytes, int] = {}
    keymap = KeyMap(1 << 20, sum(map(len, calls)))
    offset = 0
    for keys in calls:
        put(keymap, keys, offset)
        for key in keys:
            expected[key] = offset
            offset += 1
    assert len(keymap) == len(expected)
    asked = [*expected, *others]
    assert get(keymap, asked) == [expected.get(key, -1) for key in asked]


def test_a_map_that_is_as_full_as_it_may_be_knows_all_its_keys() -> None:
    choose = random.Random(5)
    keymap = KeyMap(64 * 24, 1 << 20)
    expected: dict[bytes, int] = {}
    offset = 0
    while keymap.has_capacity(1):
        key = str(choose.randrange(1_000)).encode()
        keymap.put(*column([key]), np.array([offset]))
        expected[key] = offset
        offset += 1
    assert len(keymap) == len(expected) == 44
    asked = [str(number).encode() for number in range(1_000)]
    assert get(keymap, asked) == [expected.get(key, -1) for key in asked]


def test_of_a_key_that_is_there_often_the_largest_offset_stays() -> None:
    keymap = KeyMap(1 << 20, 10_000)
    put(keymap, [b"a", b"b", b"a"] * 1_000)
    put(keymap, [b"b"], 5_000)
    assert get(keymap, [b"a", b"b"]) == [2_999, 5_000]
    assert len(keymap) == 2


def test_it_stays_within_its_budget() -> None:
    keymap = KeyMap(10_000, 1_000_000)
    assert keymap.memory_bytes <= 10_000
    assert keymap.has_capacity(100)
    assert not keymap.has_capacity(10_000 // 24)


def test_it_is_no_larger_than_the_number_of_keys_needs() -> None:
    assert KeyMap(64 << 20, 100).memory_bytes < 10_000


def test_one_batch_always_fits() -> None:
    keymap = KeyMap(1, 10_000)
    assert not keymap.has_capacity(5_000)
    keymap.ensure_capacity(5_000)
    keys = [str(number).encode() for number in range(5_000)]
    put(keymap, keys)
    assert get(keymap, keys) == list(range(5_000))


def test_a_short_key_is_not_taken_for_a_longer_one_with_zeros() -> None:
    keymap = KeyMap(1 << 20, 10)
    put(keymap, [b"a", b"a\0", b""], 1)
    assert get(keymap, [b"a", b"a\0", b"a\0\0", b"", b"\0"]) == [1, 2, -1, 3, -1]


@given(st.lists(_keys, min_size=1, max_size=50))
def test_hashes_of_keys_are_the_same_wherever_the_keys_are(keys: list[bytes]) -> None:
    hashed = KeyHash()
    first, second = hashed(*column(keys))
    for number, key in enumerate(keys):
        alone = hashed(*column([key]))
        assert (first[number], second[number]) == (alone[0][0], alone[1][0])


def test_hashes_differ_in_all_their_bits() -> None:
    """Digests of keys that differ in one bit, and of one key under other random numbers."""
    keys = [b"customer-%012d" % number for number in range(4_000)]
    first, second = KeyHash()(*column(keys))
    for word in (first, second):
        for bit in range(64):
            ones = int(((word >> np.uint64(bit)) & np.uint64(1)).sum())
            assert 0 < ones < len(keys)
    assert KeyHash()(*column(keys[:1]))[0][0] != first[0]
