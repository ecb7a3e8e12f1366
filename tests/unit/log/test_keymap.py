"""The key map against a dictionary, and its limits."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.log.keymap import KeyMap

_keys = st.binary(max_size=3) | st.binary(min_size=14, max_size=18)


@given(st.lists(_keys, max_size=300), st.lists(_keys, max_size=20))
def test_it_answers_as_a_dictionary(keys: list[bytes], others: list[bytes]) -> None:
    expected: dict[bytes, int] = {}
    keymap = KeyMap(1 << 20, len(keys))
    for offset, key in enumerate(keys):
        keymap.put(key, offset)
        expected[key] = offset
    assert len(keymap) == len(expected)
    for key in [*keys, *others]:
        assert keymap.get(key) == expected.get(key, -1)


def test_it_stays_within_its_budget() -> None:
    keymap = KeyMap(10_000, 1_000_000)
    assert keymap.memory_bytes <= 10_000
    assert keymap.has_room(100)
    assert not keymap.has_room(10_000 // 24)


def test_it_is_no_larger_than_the_number_of_keys_needs() -> None:
    assert KeyMap(64 << 20, 100).memory_bytes < 10_000


def test_one_batch_always_fits() -> None:
    keymap = KeyMap(1, 10_000)
    assert not keymap.has_room(5_000)
    keymap.make_room(5_000)
    for number in range(5_000):
        keymap.put(str(number).encode(), number)
    assert all(keymap.get(str(number).encode()) == number for number in range(5_000))


def test_a_short_key_is_not_taken_for_a_longer_one_with_zeros() -> None:
    keymap = KeyMap(1 << 20, 10)
    keymap.put(b"a", 1)
    keymap.put(b"a\0", 2)
    assert (keymap.get(b"a"), keymap.get(b"a\0"), keymap.get(b"a\0\0")) == (1, 2, -1)
