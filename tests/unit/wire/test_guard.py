"""The walk over untrusted bytes: what it refuses before the native decoder could act on it."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.errors import ProtocolError
from tidemill.wire.apis import request_class
from tidemill.wire.guard import read_uvarint, walk, write_uvarint
from tidemill.wire.requests import decode_entity

METADATA_V1 = request_class(3, 1)
METADATA_V9 = request_class(3, 9)
"""topics (compact array of name + tags), three booleans, tags."""
PRODUCE_V9 = request_class(0, 9)
FETCH_V12 = request_class(1, 12)
DESCRIBE_TOPICS = request_class(75, 0)
ONE_TOPIC = b"\x02" + b"\x02t\x00"
BOOLEANS = b"\x00\x00\x00"


def decode(entity: Any, body: bytes, max_elements: int = 1000) -> Any:
    return decode_entity(entity, body, 0, max_elements)


@given(st.integers(0, 2**35 - 1))
def test_varints_read_back(value: int) -> None:
    encoded = write_uvarint(value)
    assert read_uvarint(encoded, 0) == (value, len(encoded))


def test_a_varint_of_six_bytes_is_refused() -> None:
    with pytest.raises(ProtocolError, match="more than five bytes"):
        read_uvarint(b"\x80\x80\x80\x80\x80\x00", 0)


@pytest.mark.parametrize("count", [2, 1000, 2**31 - 1])
def test_a_legacy_count_is_believed_only_if_its_elements_can_be_there(count: int) -> None:
    with pytest.raises(ProtocolError, match=f"a count of {count} at byte 4 needs at least {2 * count} bytes"):
        decode(METADATA_V1, struct.pack(">i", count) + b"\0\1t")


@pytest.mark.parametrize("count", [3, 1000, 2**31 - 1, 2**32 - 1, 2**35 - 2])
def test_a_compact_count_is_believed_only_if_its_elements_can_be_there(count: int) -> None:
    # The native decoder alone aborts the process on the largest of these.
    with pytest.raises(ProtocolError, match=f"a count of {count} at byte"):
        decode(METADATA_V9, write_uvarint(count + 1) + b"\x02t\x00")


@pytest.mark.parametrize("count", [2, 2**32 - 1])
def test_a_count_inside_an_array_is_checked_too(count: int) -> None:
    topic = b"\x02t" + write_uvarint(count + 1) + b"\x00\x00\x00\x01\x00\x00"
    with pytest.raises(ProtocolError, match=f"a count of {count} at byte"):
        decode(PRODUCE_V9, b"\x00" + b"\xff\xff" + bytes(4) + b"\x02" + topic)


@pytest.mark.parametrize("count", [2, 2**32 - 1])
def test_a_count_of_tagged_fields_is_checked_too(count: int) -> None:
    with pytest.raises(ProtocolError, match=f"a count of {count} at byte"):
        decode(METADATA_V9, ONE_TOPIC + BOOLEANS + write_uvarint(count) + b"\x05\x00")


def test_all_arrays_together_have_a_limit() -> None:
    names = b"".join(b"\x02" + bytes([65 + n]) + b"\x00" for n in range(10))
    body = b"\x0b" + names + BOOLEANS + b"\x00"
    assert len(decode(METADATA_V9, body, max_elements=10).topics) == 10
    with pytest.raises(ProtocolError, match="more array elements than one message may have"):
        decode(METADATA_V9, body, max_elements=9)


def test_a_string_has_the_length_that_kafka_allows_and_no_more() -> None:
    def body(length: int) -> bytes:
        return b"\x02" + write_uvarint(length + 1) + b"t" * length + b"\x00" + BOOLEANS + b"\x00"

    assert len(decode(METADATA_V9, body(32_767)).topics[0].name) == 32_767
    with pytest.raises(ProtocolError, match="name has 32768 bytes; a string has 32767 at most"):
        decode(METADATA_V9, body(32_768))


@pytest.mark.parametrize("length", [3, 2**31 - 1, 2**35 - 2])
def test_a_string_longer_than_the_message_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match=r"cut short|32767 at most"):
        decode(METADATA_V9, b"\x02" + write_uvarint(length + 1) + b"t\x00")


@pytest.mark.parametrize("length", [-2, -(2**15)])
def test_a_negative_length_is_refused(length: int) -> None:
    with pytest.raises(ProtocolError, match=f"name has the length {length}"):
        decode(METADATA_V1, b"\0\0\0\1" + struct.pack(">h", length) + b"tt")


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ProtocolError, match="topics has the count -2"):
        decode(METADATA_V1, b"\xff\xff\xff\xfe")


@pytest.mark.parametrize(
    ("entity", "body", "name"),
    [
        (PRODUCE_V9, b"\x00" + b"\xff\xff" + bytes(4) + b"\x00" + b"\x00", "topic_data"),
        (request_class(0, 3), b"\xff\xff" + b"\xff\xff" + bytes(4) + b"\xff\xff\xff\xff", "topic_data"),
        (METADATA_V1, b"\0\0\0\1\xff\xff", "name"),
        (METADATA_V9, b"\x02" + b"\x00\x00" + BOOLEANS + b"\x00", "name"),
    ],
)
def test_null_is_refused_where_the_schema_has_no_null(entity: Any, body: bytes, name: str) -> None:
    with pytest.raises(ProtocolError, match=f"{name} is null"):
        decode(entity, body)


def test_null_is_read_where_the_schema_has_null() -> None:
    assert decode(METADATA_V1, b"\xff\xff\xff\xff").topics is None
    assert decode(METADATA_V9, b"\x00" + BOOLEANS + b"\x00").topics is None


def test_a_struct_is_null_or_there_and_nothing_else() -> None:
    before, after = b"\x01" + b"\0\0\0\1", b"\x00"
    assert decode(DESCRIBE_TOPICS, before + b"\xff" + after).cursor is None
    there = before + b"\x01" + b"\x02t\0\0\0\5\0" + after
    assert decode(DESCRIBE_TOPICS, there).cursor.partition_index == 5
    with pytest.raises(ProtocolError, match="whether a struct is null, and is 7"):
        decode(DESCRIBE_TOPICS, before + b"\x07" + after)


@pytest.mark.parametrize("extra", [b"\0", b"\0" * 1000])
def test_bytes_behind_the_message_are_refused(extra: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"followed by {len(extra)} bytes"):
        decode(METADATA_V9, ONE_TOPIC + BOOLEANS + b"\x00" + extra)


def test_every_cut_of_a_message_is_refused() -> None:
    body = ONE_TOPIC + BOOLEANS + b"\x00"
    for end in range(len(body)):
        with pytest.raises(ProtocolError):
            decode(METADATA_V9, body[:end])


def test_unknown_tagged_fields_are_skipped_at_every_level() -> None:
    topics = b"\x03" + b"\x02a" + b"\x01\x63\x03xyz" + b"\x02b" + b"\x02\x00\x00\x80\x01\x01?"
    value = decode(METADATA_V9, topics + b"\x01\x00\x01" + b"\x01\x05\x00")
    assert [topic.name for topic in value.topics] == ["a", "b"]
    assert (value.allow_auto_topic_creation, value.include_topic_authorized_operations) == (True, True)


def fetch_with_tags(tags: bytes) -> bytes:
    return bytes(4 * 4 + 1 + 4 + 4) + b"\x01" + b"\x01" + b"\x01" + tags


def test_unknown_tagged_fields_around_and_inside_known_ones_are_skipped() -> None:
    value = decode(FETCH_V12, fetch_with_tags(b"\x03" + b"\x00\x03\x03me" + b"\x07\x01x" + b"\x09\x00"))
    assert value.cluster_id == "me"
    fetch_v15 = request_class(1, 15)
    replica_state = struct.pack(">iq", 4, 5) + b"\x01\x63\x02xy"
    body = fetch_with_tags(b"\x01\x01" + bytes([len(replica_state)]) + replica_state)[4:]
    value = decode(fetch_v15, body)
    assert (value.replica_state.replica_id, value.replica_state.replica_epoch) == (4, 5)


@pytest.mark.parametrize("size", [2, 4])
def test_a_known_tagged_field_of_another_length_than_it_claims_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"tagged field 0 is not the {size} bytes long"):
        decode(FETCH_V12, fetch_with_tags(b"\x01" + b"\x00" + bytes([size]) + b"\x03meeee"))


@pytest.mark.parametrize("size", [2, 2**31 - 1, 2**35 - 1])
def test_a_tagged_field_longer_than_the_message_is_refused(size: int) -> None:
    with pytest.raises(ProtocolError, match=f"tagged field 99 claims {size} bytes, 1 are left"):
        decode(METADATA_V9, ONE_TOPIC + BOOLEANS + b"\x01\x63" + write_uvarint(size) + b"x")


def test_the_walk_needs_no_edits_for_a_message_of_known_fields() -> None:
    assert walk(METADATA_V9, ONE_TOPIC + BOOLEANS + b"\x00", 0, 10) == []
