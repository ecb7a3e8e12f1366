from __future__ import annotations

from typing import Any
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from tidemill.control.sharedmap import SharedMap

KEYS = st.one_of(st.sampled_from(["a", "b", "c", "topic-1"]), st.text(max_size=3))


@given(st.lists(st.dictionaries(KEYS, st.none() | st.integers())))
def test_a_map_behaves_as_a_dict_and_its_ancestors_do_not_change(changes: Any) -> None:
    model: dict[str, int] = {}
    shared: SharedMap[str, int] = SharedMap()
    ancestors = []
    for change in changes:
        ancestors.append((shared, dict(model)))
        shared = shared.update(change)
        for key, value in change.items():
            if value is None:
                model.pop(key, None)
            else:
                model[key] = value
        assert dict(shared) == model
        assert len(shared) == len(model)
        assert all(shared[key] == shared.get(key) == value and key in shared for key, value in model.items())
        assert shared.get("absent key") is None
        assert "absent key" not in shared
    for ancestor, was in ancestors:
        assert dict(ancestor) == was


@given(st.dictionaries(KEYS, st.integers()), st.dictionaries(KEYS, st.none() | st.integers()))
def test_differing_keys_are_those_that_changed(start: Any, change: Any) -> None:
    old = SharedMap[str, int]().update(start)
    new = old.update(change)
    expected = {key for key in start.keys() | change.keys() if old.get(key) is not new.get(key)}
    assert new.differing_keys(old) == old.differing_keys(new) == expected


def test_an_update_shares_the_shards_that_it_does_not_touch() -> None:
    old = SharedMap[str, int]().update({str(i): i for i in range(10_000)})
    new = old.update({"5": -5})
    assert sum(a is not b for a, b in zip(old._shards, new._shards, strict=True)) == 1


def test_uuid_keys_and_equality_of_maps_with_different_histories() -> None:
    ids = [UUID(int=i * 7919) for i in range(500)]
    at_once = SharedMap[UUID, int]().update({key: i for i, key in enumerate(ids)})
    one_by_one: SharedMap[UUID, int] = SharedMap()
    for i, key in reversed(list(enumerate(ids))):
        one_by_one = one_by_one.update({key: i})
    assert at_once == one_by_one
    assert at_once != one_by_one.update({ids[0]: None})


def test_whole_numbers_are_keys_and_negative_ones_too() -> None:
    numbers = SharedMap[int, str]().update({key: str(key) for key in range(-300, 300)})
    assert all(numbers[key] == numbers.get(key) == str(key) and key in numbers for key in range(-300, 300))
    assert 300 not in numbers
    assert numbers.update({5: None}).differing_keys(numbers) == {5}
