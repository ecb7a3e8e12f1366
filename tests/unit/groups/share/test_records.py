"""The records of share groups, byte for byte and back."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.groups.records import decode_record, encode_record
from tidemill.groups.share.records import (
    ShareAssignment,
    ShareAssignmentRecord,
    ShareEpoch,
    ShareEpochRecord,
    ShareMemberMetadata,
    ShareMemberRecord,
    ShareRecord,
    ShareTargetEpochRecord,
    ShareTargetRecord,
    StateTopic,
    StateTopics,
    StateTopicsRecord,
)

TOPIC = UUID(hex="000102030405060708090a0b0c0d0e0f")

GOLDEN: list[tuple[ShareRecord, str, str]] = [
    (
        ShareMemberRecord("g", "m", ShareMemberMetadata("r", "c", "h", frozenset({"u", "t"}))),
        "000a 0001 67 0001 6d",
        "0000 02 72 02 63 02 68 03 02 74 02 75 00",
    ),
    (ShareEpochRecord("g", ShareEpoch(7, -2)), "000b 0001 67", "0000 00000007 fffffffffffffffe 00"),
    (ShareTargetEpochRecord("g", 5), "000c 0001 67", "0000 00000005 00"),
    (
        ShareTargetRecord("g", "m", frozenset({(TOPIC, 2), (TOPIC, 1)})),
        "000d 0001 67 0001 6d",
        f"0000 02 {TOPIC.hex} 03 00000001 00000002 00 00",
    ),
    (
        ShareAssignmentRecord("g", "m", ShareAssignment(3, 2, 0, frozenset({(TOPIC, 1)}))),
        "000e 0001 67 0001 6d",
        f"0000 00000003 00000002 00 02 {TOPIC.hex} 02 00000001 00 00",
    ),
    (
        StateTopicsRecord(
            "g",
            StateTopics(
                (StateTopic(TOPIC, "t", frozenset({1}), 9),),
                (StateTopic(TOPIC, "t", frozenset({0}), 8),),
                (StateTopic(UUID(int=1), "u", frozenset({0, 3})),),
            ),
        ),
        "000f 0001 67",
        f"0000 02 {TOPIC.hex} 02 74 02 00000001 0000000000000009 00"
        f" 02 {TOPIC.hex} 02 74 02 00000000 0000000000000008 00"
        # The partitions of a topic that is deleted are a tagged field, which Kafka passes over.
        f" 02 {UUID(int=1).hex} 02 75 01 00 09 03 00000000 00000003 00",
    ),
]


@pytest.mark.parametrize(("record", "key", "value"), GOLDEN, ids=lambda each: type(each).__name__)
def test_records_have_kafkas_bytes(record: ShareRecord, key: str, value: str) -> None:
    raw_key, raw_value = encode_record(record)
    assert raw_key.hex() == key.replace(" ", "")
    assert raw_value is not None
    assert raw_value.hex() == value.replace(" ", "")
    assert decode_record(raw_key, raw_value) == record


def test_kafkas_record_of_a_topic_that_is_deleted_has_no_partitions() -> None:
    value = bytes.fromhex(f"0000 01 01 02 {TOPIC.hex} 02 74 00 00")
    record = decode_record(bytes.fromhex("000f 0001 67"), value)
    assert record == StateTopicsRecord("g", StateTopics(deleting=(StateTopic(TOPIC, "t", frozenset()),)))


TEXT = st.text(max_size=10)
INT32 = st.integers(-(2**31), 2**31 - 1)
IDS = st.integers(1, 2**128 - 1).map(lambda number: UUID(int=number))
PARTITIONS = st.frozensets(st.tuples(IDS, st.integers(0, 2**31 - 1)), max_size=5)
INDEXES = st.frozensets(st.integers(0, 2**31 - 1), max_size=5)
TOPICS = st.lists(st.builds(StateTopic, IDS, TEXT, INDEXES, st.integers(0, 2**63 - 1)), max_size=3)
DELETED = st.lists(st.builds(StateTopic, IDS, TEXT, INDEXES), max_size=3)
RECORDS: st.SearchStrategy[ShareRecord] = st.one_of(
    st.builds(
        ShareMemberRecord,
        TEXT,
        TEXT,
        st.none() | st.builds(ShareMemberMetadata, st.none() | TEXT, TEXT, TEXT, st.frozensets(TEXT)),
    ),
    st.builds(
        ShareEpochRecord,
        TEXT,
        st.none() | st.builds(ShareEpoch, INT32, st.integers(-(2**63), 2**63 - 1)),
    ),
    st.builds(ShareTargetEpochRecord, TEXT, st.none() | INT32),
    st.builds(ShareTargetRecord, TEXT, TEXT, st.none() | PARTITIONS),
    st.builds(
        ShareAssignmentRecord,
        TEXT,
        TEXT,
        st.none() | st.builds(ShareAssignment, INT32, INT32, st.just(0), PARTITIONS),
    ),
    st.builds(
        StateTopicsRecord,
        TEXT,
        st.none() | st.builds(StateTopics, TOPICS.map(tuple), TOPICS.map(tuple), DELETED.map(tuple)),
    ),
)


@given(RECORDS)
def test_records_survive_the_log(record: ShareRecord) -> None:
    assert decode_record(*encode_record(record)) == record
