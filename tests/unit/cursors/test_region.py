"""Regions: one identity for each, and each identity of one region."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cursors.region import Region, header_match, key_prefix_of
from tidemill.errors import ConfigError

_HEADERS = st.lists(st.tuples(st.text(max_size=4), st.none() | st.binary(max_size=4)), max_size=4)
REGIONS = st.builds(
    Region,
    topic=st.text(st.characters(codec="utf-8"), max_size=5),
    topic_id=st.uuids(),
    partitions=st.none() | st.lists(st.integers(0, 300), min_size=1, max_size=5).map(tuple),
    key_prefix=st.none() | st.binary(min_size=1, max_size=5),
    headers=_HEADERS.map(lambda pairs: tuple((name, value) for name, value in pairs if name.isascii())),
    where=st.none() | st.binary(max_size=5),
)


@given(REGIONS)
def test_a_region_can_be_read_back_from_its_identity(region: Region) -> None:
    assert Region.from_identity(region.identity()) == region


@given(REGIONS, REGIONS)
def test_different_regions_have_different_identities(one: Region, other: Region) -> None:
    assert (one == other) == (one.identity() == other.identity())


@given(REGIONS, st.integers(0, 200), st.integers(1, 255))
def test_other_bytes_are_another_region_or_none(region: Region, at: int, flip: int) -> None:
    identity = bytearray(region.identity())
    identity[at % len(identity)] ^= flip
    try:
        other = Region.from_identity(bytes(identity))
    except ValueError:
        return
    assert other != region
    assert other.identity() == bytes(identity)


@given(st.binary(max_size=60))
def test_any_bytes_are_the_identity_of_one_region_or_none(data: bytes) -> None:
    try:
        region = Region.from_identity(data)
    except ValueError:
        return
    assert region.identity() == data


def test_order_and_repetition_make_no_difference() -> None:
    one = Region("t", UUID(int=1), (2, 0, 2), headers=(("b", b"1"), ("a", None), ("b", b"1")))
    other = Region("t", UUID(int=1), (0, 2), headers=(("a", None), ("b", b"1")))
    assert one == other
    assert one.identity() == other.identity()


def test_fields_do_not_run_into_each_other() -> None:
    assert (
        Region("t", UUID(int=1), key_prefix=b"ab").identity()
        != Region("t", UUID(int=1), where=b"ab").identity()
    )
    assert Region("t", UUID(int=1), None).identity() != Region("t", UUID(int=1), (0,)).identity()


def test_an_empty_prefix_and_no_partitions_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        Region("t", UUID(int=1), key_prefix=b"")
    with pytest.raises(ConfigError, match="at least one partition"):
        Region("t", UUID(int=1), ())


def test_limits_of_a_region() -> None:
    with pytest.raises(ConfigError, match="4096 are the most"):
        Region("t", UUID(int=1), key_prefix=b"x" * 4_097)
    with pytest.raises(ConfigError, match="32 are the most"):
        Region("t", UUID(int=1), headers=tuple((str(number), b"") for number in range(33)))


def test_text_is_utf8() -> None:
    assert key_prefix_of("é") == "é".encode()
    assert header_match({"type": "order", "none": None}) == (("type", b"order"), ("none", None))


def test_differences_name_the_fields() -> None:
    one, other = Region("t", UUID(int=1)), Region("t", UUID(int=1), key_prefix=b"x")
    assert one.differences(other) == "key_prefix None, not b'x'"
