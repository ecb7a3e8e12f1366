"""Arrays of numbers, whose short ones are packed together with their count."""

from __future__ import annotations

from typing import Any

import pytest

from tidemill.wire.schema import MISSING, FieldSpec
from tidemill.wire.values import array_writer, number_default, to_number


def spec(kafka_type: str, *, nullable: bool = False, default: Any = MISSING) -> FieldSpec:
    return FieldSpec("numbers", kafka_type, None, True, nullable, None, default)


def written(items: Any, *, flexible: bool, nullable: bool = False) -> bytes:
    out = bytearray()
    array_writer(spec("int16", nullable=nullable), flexible, None)(items, out)
    return bytes(out)


@pytest.mark.parametrize("count", [0, 1, 8, 9, 126, 127, 128, 300])
def test_arrays_of_any_length_have_their_count_in_front(count: int) -> None:
    items = list(range(count))
    numbers = b"".join(item.to_bytes(2, "big") for item in items)
    assert written(items, flexible=False) == count.to_bytes(4, "big") + numbers
    more = count + 1
    varint = bytes([more]) if more < 128 else bytes([more & 127 | 128, more >> 7])
    assert written(items, flexible=True) == varint + numbers


def test_null_is_written_only_where_it_is_allowed() -> None:
    assert written(None, flexible=True, nullable=True) == b"\0"
    assert written(None, flexible=False, nullable=True) == b"\xff\xff\xff\xff"
    with pytest.raises(TypeError, match="numbers is None"):
        written(None, flexible=True)


@pytest.mark.parametrize("items", [[1, 70_000], [0] * 20 + [70_000], ["1"]])
def test_an_item_that_does_not_fit_is_named(items: list[Any]) -> None:
    with pytest.raises(ValueError, match="numbers of type int16 cannot be"):
        written(items, flexible=True)


def test_a_missing_number_is_its_default_or_zero() -> None:
    assert number_default(spec("int32", default=7)) == 7
    assert number_default(spec("int32")) == 0
    assert number_default(spec("datetime_i64", nullable=True)) == -1
    assert to_number(None, spec("datetime_i64", nullable=True)) == -1
