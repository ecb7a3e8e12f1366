from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.groups.records import (
    CorruptGroupRecord,
    GroupMetadata,
    GroupMetadataRecord,
    GroupRecord,
    OffsetCommit,
    OffsetCommitRecord,
    StoredMember,
    decode_record,
    encode_record,
)

TEXT = st.text(max_size=20)
INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
TIMEOUT = st.integers(0, 2**31 - 1)


@st.composite
def offset_commits(draw: st.DrawFn) -> OffsetCommit:
    expire_at_ms = draw(st.none() | st.integers(0, 2**62))
    # Only the form without an expiry has room for a leader epoch.
    leader_epoch = draw(INT32) if expire_at_ms is None else -1
    return OffsetCommit(draw(INT64), leader_epoch, draw(TEXT), draw(INT64), expire_at_ms)


@st.composite
def group_metadata(draw: st.DrawFn) -> GroupMetadata:
    ids = draw(st.lists(TEXT, unique=True, max_size=4))
    members = tuple(
        StoredMember(
            member_id,
            draw(st.sampled_from([None, f"static-{index}"])),
            draw(TEXT),
            draw(TEXT),
            draw(TIMEOUT),
            draw(TIMEOUT),
            draw(st.binary(max_size=20)),
            draw(st.binary(max_size=20)),
        )
        for index, member_id in enumerate(ids)
    )
    return GroupMetadata(
        draw(TEXT),
        draw(INT32),
        draw(TEXT) if ids else None,
        draw(st.sampled_from(ids)) if ids else None,
        draw(st.none() | st.integers(0, 2**62)),
        members,
    )


RECORDS: st.SearchStrategy[GroupRecord] = st.one_of(
    st.builds(OffsetCommitRecord, TEXT, TEXT, INT32, st.none() | offset_commits()),
    st.builds(GroupMetadataRecord, TEXT, st.none() | group_metadata()),
)


@given(RECORDS)
def test_records_survive_the_log(record: GroupRecord) -> None:
    assert decode_record(*encode_record(record)) == record


@given(RECORDS, st.data())
def test_damaged_records_are_reported_and_nothing_else(record: GroupRecord, data: st.DataObject) -> None:
    key, value = encode_record(record)
    part = data.draw(st.sampled_from([key] if value is None else [key, value]))
    at = data.draw(st.integers(0, len(part) - 1))
    damage = data.draw(st.sampled_from(["cut", "flip", "extend"]))
    if damage == "cut":
        damaged = part[:at]
    elif damage == "flip":
        damaged = part[:at] + bytes([part[at] ^ data.draw(st.integers(1, 255))]) + part[at + 1 :]
    else:
        damaged = part + b"\x00"
    try:
        decoded = decode_record(damaged if part is key else key, damaged if part is value else value)
    except CorruptGroupRecord:
        return
    assert damage == "flip", decoded


@given(st.binary(max_size=80), st.none() | st.binary(max_size=80))
def test_any_bytes_decode_or_are_reported(key: bytes, value: bytes | None) -> None:
    try:
        decode_record(key, value)
    except CorruptGroupRecord as error:
        assert "cannot be decoded" in error.message


def test_an_offset_commit_has_kafka_s_bytes() -> None:
    key, value = encode_record(OffsetCommitRecord("g", "t", 7, OffsetCommit(42, 3, "m", 99)))
    assert key == bytes.fromhex("0001 0001 67 0001 74 00000007")
    assert value == bytes.fromhex("0003 000000000000002a 00000003 0001 6d 0000000000000063")


def test_a_group_has_kafka_s_bytes() -> None:
    member = StoredMember("i", None, "c", "h", 2, 1, b"s", b"a")
    key, value = encode_record(GroupMetadataRecord("g", GroupMetadata("consumer", 5, "r", "i", 6, (member,))))
    assert key == bytes.fromhex("0002 0001 67")
    assert value == bytes.fromhex(
        "0003 0008 636f6e73756d6572 00000005 0001 72 0001 69 0000000000000006 00000001"
        "0001 69 ffff 0001 63 0001 68 00000002 00000001 00000001 73 00000001 61"
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0000 000000000000002a 0001 6d 0000000000000063", OffsetCommit(42, -1, "m", 99)),
        (
            "0001 000000000000002a 0001 6d 0000000000000063 0000000000000064",
            OffsetCommit(42, -1, "m", 99, 100),
        ),
        ("0002 000000000000002a 0001 6d 0000000000000063", OffsetCommit(42, -1, "m", 99)),
        ("0004 000000000000002a 00000003 02 6d 0000000000000063 00", OffsetCommit(42, 3, "m", 99)),
        ("0004 000000000000002a 00000003 02 6d 0000000000000063 01 05 02 abcd", OffsetCommit(42, 3, "m", 99)),
    ],
)
def test_offset_commits_of_all_versions_are_read(value: str, expected: OffsetCommit) -> None:
    key = bytes.fromhex("0001 0001 67 0001 74 00000007")
    assert decode_record(key, bytes.fromhex(value)) == OffsetCommitRecord("g", "t", 7, expected)


def test_groups_of_the_oldest_and_the_flexible_version_are_read() -> None:
    key = bytes.fromhex("0002 0001 67")
    oldest = (
        "0000 0001 74 00000005 0001 72 0001 69 00000001"
        "0001 69 0001 63 0001 68 00000009 00000001 73 00000001 61"
    )
    flexible = (
        "0004 02 74 00000005 02 72 02 69 0000000000000006 02"
        "02 69 00 02 63 02 68 00000002 00000009 02 73 02 61 00 00"
    )
    member = StoredMember("i", None, "c", "h", 9, 9, b"s", b"a")
    assert decode_record(key, bytes.fromhex(oldest)) == GroupMetadataRecord(
        "g", GroupMetadata("t", 5, "r", "i", None, (member,))
    )
    newer = decode_record(key, bytes.fromhex(flexible))
    assert isinstance(newer, GroupMetadataRecord)
    assert newer.value is not None
    assert (newer.value.state_since_ms, newer.value.members[0].rebalance_timeout_ms) == (6, 2)


@pytest.mark.parametrize("version", [9, 17, 18, 100])
def test_a_key_of_an_unknown_kind_is_left_to_the_caller(version: int) -> None:
    assert decode_record(struct.pack(">h", version) + b"whatever", b"whatever") is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, b""),
        (b"", b""),
        (b"\x00", None),
        (bytes.fromhex("0001 0001 67 0001 74 00000007"), b""),
        (bytes.fromhex("0001 0001 67 0001 74 00000007"), b"\x00\x05"),
        (bytes.fromhex("0001 ffff 0001 74 00000007"), None),
        (bytes.fromhex("0002 0001 ff"), None),
    ],
)
def test_defects_are_reported(key: bytes | None, value: bytes | None) -> None:
    with pytest.raises(CorruptGroupRecord):
        decode_record(key, value)


def test_a_group_that_contradicts_itself_is_reported() -> None:
    def member(member_id: str, instance_id: str | None = None) -> StoredMember:
        return StoredMember(member_id, instance_id, "", "", 1, 1, b"", b"")

    twice = (member("a"), member("a"))
    one_instance = (member("a", "x"), member("b", "x"))
    for bad in (
        GroupMetadata("t", 1, None, "a", 1, (member("a"),)),
        GroupMetadata("t", 1, "p", "z", 1, (member("a"),)),
        GroupMetadata("t", 1, "p", "a", 1, twice),
        GroupMetadata("t", 1, "p", "a", 1, one_instance),
    ):
        with pytest.raises(CorruptGroupRecord):
            decode_record(*encode_record(GroupMetadataRecord("g", bad)))
