"""The records of consumer groups, byte for byte and back."""

from __future__ import annotations

import contextlib
import struct
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.groups.consumer.member import ClassicMetadata, MemberState
from tidemill.groups.consumer.records import (
    ConsumerRecord,
    CurrentAssignment,
    CurrentAssignmentRecord,
    EpochRecord,
    MemberMetadata,
    MemberMetadataRecord,
    PatternRecord,
    ResolvedPattern,
    SubscribedTopicsRecord,
    TargetEpochRecord,
    TargetRecord,
)
from tidemill.groups.messages import JoinProtocol
from tidemill.groups.records import CorruptGroupRecord, decode_record, encode_record
from tidemill.groups.topics import SubscribedTopic

TOPIC = UUID(hex="000102030405060708090a0b0c0d0e0f")

GOLDEN: list[tuple[ConsumerRecord, str, str]] = [
    (EpochRecord("g", 7), "0003 0001 67", "0000 00000007 00"),
    (
        SubscribedTopicsRecord("g", (SubscribedTopic(TOPIC, "t", 3),)),
        "0004 0001 67",
        f"0000 02 {TOPIC.hex} 02 74 00000003 01 00 00",
    ),
    (
        MemberMetadataRecord(
            "g", "m", MemberMetadata("i", None, "c", "h", frozenset({"u", "t"}), "r", 5, "range", None)
        ),
        "0005 0001 67 0001 6d",
        "0000 02 69 00 02 63 02 68 03 02 74 02 75 02 72 00000005 06 72616e6765 00",
    ),
    (
        MemberMetadataRecord(
            "g",
            "m",
            MemberMetadata(
                None,
                "k",
                "",
                "",
                frozenset(),
                "",
                -1,
                None,
                ClassicMetadata(9, (JoinProtocol("p", b"\xaa\xbb"),)),
            ),
        ),
        "0005 0001 67 0001 6d",
        "0000 00 02 6b 01 01 01 01 ffffffff 00 01 00 0d 01 00000009 02 02 70 03 aabb 00 00",
    ),
    (TargetEpochRecord("g", 8), "0006 0001 67", "0000 00000008 00"),
    (
        TargetRecord("g", "m", frozenset({(TOPIC, 2), (TOPIC, 0)})),
        "0007 0001 67 0001 6d",
        f"0000 02 {TOPIC.hex} 03 00000000 00000002 00 00",
    ),
    (
        CurrentAssignmentRecord(
            "g",
            "m",
            CurrentAssignment(4, 3, MemberState.UNREVOKED_PARTITIONS, frozenset(), frozenset({(TOPIC, 1)})),
        ),
        "0008 0001 67 0001 6d",
        f"0000 00000004 00000003 01 01 02 {TOPIC.hex} 02 00000001 00 00",
    ),
    (
        PatternRecord("g", "t.*", ResolvedPattern(frozenset({"t1"}), 5, 6)),
        "0010 0001 67 0003 742e2a",
        "0000 02 03 7431 0000000000000005 0000000000000006 00",
    ),
]


@pytest.mark.parametrize(("record", "key", "value"), GOLDEN)
def test_records_have_kafkas_format(record: ConsumerRecord, key: str, value: str) -> None:
    assert encode_record(record) == (bytes.fromhex(key), bytes.fromhex(value))
    assert decode_record(bytes.fromhex(key), bytes.fromhex(value)) == record


@pytest.mark.parametrize(("record", "key", "value"), GOLDEN)
def test_a_tombstone_has_no_value(record: ConsumerRecord, key: str, value: str) -> None:
    del value
    tombstone = decode_record(bytes.fromhex(key), None)
    assert type(tombstone) is type(record)
    assert tombstone is not None
    assert tombstone.value is None
    assert encode_record(tombstone) == (bytes.fromhex(key), None)


@pytest.mark.parametrize(("record", "key", "value"), GOLDEN)
def test_every_cut_and_every_surplus_is_a_defect(record: ConsumerRecord, key: str, value: str) -> None:
    del record
    whole = bytes.fromhex(value)
    for end in range(len(whole)):
        with pytest.raises(CorruptGroupRecord):
            decode_record(bytes.fromhex(key), whole[:end])
    with pytest.raises(CorruptGroupRecord):
        decode_record(bytes.fromhex(key), whole + b"\x00")
    with pytest.raises(CorruptGroupRecord):
        decode_record(bytes.fromhex(key) + b"\x00", whole)
    with pytest.raises(CorruptGroupRecord):
        decode_record(bytes.fromhex(key), b"\x00\x01" + whole[2:])


def test_tagged_fields_of_newer_writers_are_passed_over() -> None:
    hashed = bytes.fromhex("0000 00000007 01 00 08 0102030405060708")
    assert decode_record(bytes.fromhex("0003 0001 67"), hashed) == EpochRecord("g", 7)


def test_an_unknown_member_state_is_a_defect() -> None:
    _, key, value = GOLDEN[6]
    raw = bytearray.fromhex(value)
    raw[10] = 9
    with pytest.raises(CorruptGroupRecord, match="state 9"):
        decode_record(bytes.fromhex(key), bytes(raw))


texts = st.text(max_size=20)
partitions = st.frozensets(st.tuples(st.uuids(), st.integers(0, 2**31 - 1)), max_size=5)
metadata = st.builds(
    MemberMetadata,
    st.none() | texts,
    st.none() | texts,
    texts,
    texts,
    st.frozensets(texts, max_size=4),
    texts,
    st.integers(-1, 2**31 - 1),
    st.none() | texts,
    st.none()
    | st.builds(
        ClassicMetadata,
        st.integers(0, 2**31 - 1),
        st.lists(st.builds(JoinProtocol, texts, st.binary(max_size=200)), min_size=1, max_size=3).map(tuple),
    ),
)
current = st.builds(
    CurrentAssignment,
    st.integers(-2, 2**31 - 1),
    st.integers(-2, 2**31 - 1),
    st.sampled_from(MemberState),
    partitions,
    partitions,
)
records = st.one_of(
    st.builds(MemberMetadataRecord, texts, texts, metadata),
    st.builds(CurrentAssignmentRecord, texts, texts, current),
    st.builds(TargetRecord, texts, texts, partitions),
    st.builds(
        SubscribedTopicsRecord,
        texts,
        st.lists(st.builds(SubscribedTopic, st.uuids(), texts, st.integers(0, 2**31 - 1)), max_size=4).map(
            tuple
        ),
    ),
    st.builds(
        PatternRecord,
        texts,
        texts,
        st.builds(
            ResolvedPattern, st.frozensets(texts, max_size=4), st.integers(0, 2**62), st.integers(0, 2**62)
        ),
    ),
)


@given(records)
def test_records_come_back_as_they_went(record: ConsumerRecord) -> None:
    assert decode_record(*encode_record(record)) == record


@given(st.sampled_from([3, 4, 5, 6, 7, 8, 16]), st.binary(max_size=40), st.none() | st.binary(max_size=200))
def test_any_bytes_decode_or_end_in_the_defined_error(version: int, key: bytes, value: bytes | None) -> None:
    names = b"\x00\x01g" + (b"" if version in (3, 4, 6) else b"\x00\x01m")
    for raw_key in (key, names):
        with contextlib.suppress(CorruptGroupRecord):
            decode_record(struct.pack(">h", version) + raw_key, value)
        with contextlib.suppress(CorruptGroupRecord):
            decode_record(struct.pack(">h", version) + raw_key, b"\x00\x00" + (value or b""))
