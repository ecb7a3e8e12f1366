from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.errors import ProtocolError
from tidemill.wire.consumer_protocol import (
    Subscription,
    pack_assignment,
    parse_assignment,
    parse_full_subscription,
    parse_subscription,
    protocol_version,
)


def pack_string(text: str) -> bytes:
    raw = text.encode()
    return len(raw).to_bytes(2, "big") + raw


def pack_bytes(raw: bytes) -> bytes:
    return len(raw).to_bytes(4, "big") + raw


@given(
    st.integers(0, 2**15 - 1),
    st.frozensets(st.text(max_size=10), max_size=5),
    st.none() | st.binary(max_size=10),
    st.binary(max_size=10),
)
def test_topics_are_read_whatever_the_version_and_what_follows(
    version: int, topics: frozenset[str], user_data: bytes | None, newer_fields: bytes
) -> None:
    raw = version.to_bytes(2, "big") + len(topics).to_bytes(4, "big")
    raw += b"".join(pack_string(topic) for topic in topics)
    raw += b"\xff\xff\xff\xff" if user_data is None else pack_bytes(user_data)
    assert parse_subscription(raw + newer_fields) == topics


@given(st.binary(max_size=200))
def test_any_bytes_parse_or_end_in_the_defined_error(raw: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(parse_subscription(raw), frozenset)


@pytest.mark.parametrize(
    "raw",
    [
        "",
        "00",
        "ffff 00000000 ffffffff",
        "0000 7fffffff",
        "0000 ffffffff ffffffff",
        "0000 00000001 ffff ffffffff",
        "0000 00000001 0001 ff ffffffff",
        "0000 00000001 0001 61",
        "0000 00000001 0001 61 00000002 00",
    ],
)
def test_defects_are_refused(raw: str) -> None:
    with pytest.raises(ProtocolError):
        parse_subscription(bytes.fromhex(raw))


PARTITIONS = "00000002 0001 61 00000002 00000000 00000003 0001 62 00000000"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("0000 00000001 0001 61 ffffffff", Subscription(frozenset({"a"}))),
        (f"0001 00000000 ffffffff {PARTITIONS}", Subscription(frozenset(), (("a", 0), ("a", 3)))),
        (f"0002 00000000 ffffffff {PARTITIONS} 00000005", Subscription(frozenset(), (("a", 0), ("a", 3)))),
        (
            "0003 00000000 ffffffff 00000000 00000005 0001 72",
            Subscription(frozenset(), (), "r"),
        ),
        ("0009 00000000 ffffffff 00000000 00000005 ffff 1234", Subscription(frozenset())),
    ],
)
def test_whole_subscriptions_are_read_in_every_version(raw: str, expected: Subscription) -> None:
    assert parse_full_subscription(bytes.fromhex(raw)) == expected


@given(st.binary(max_size=200))
def test_any_bytes_are_a_whole_subscription_or_the_defined_error(raw: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        parse_full_subscription(raw)
    with contextlib.suppress(ProtocolError):
        parse_assignment(raw)
    assert 0 <= protocol_version(raw) <= 3


@given(st.integers(0, 3), st.dictionaries(st.text(max_size=9), st.lists(st.integers(0, 99), min_size=1)))
def test_assignments_come_back_as_they_went(version: int, partitions: dict[str, list[int]]) -> None:
    raw = pack_assignment(version, partitions)
    assert parse_assignment(raw) == tuple((name, each) for name, all_ in partitions.items() for each in all_)
    assert protocol_version(raw) == version
