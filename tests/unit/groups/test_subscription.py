from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.coordination.binary import MalformedBytes, pack_bytes, pack_string
from tidemill.groups.subscription import parse_subscription


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
    with contextlib.suppress(MalformedBytes):
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
    with pytest.raises(MalformedBytes):
        parse_subscription(bytes.fromhex(raw))
