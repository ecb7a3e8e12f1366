"""Records of the share state topic: Kafka's bytes, and ours in tags that others pass over."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.coordination.share_state import DeliveryState, StateBatch
from tidemill.coordination.stored import RecordType, RecordTypes, Struct
from tidemill.share.state.records import (
    RECORD_TYPES,
    CorruptShareRecord,
    ShareRecord,
    Snapshot,
    SnapshotRecord,
    Update,
    UpdateRecord,
    decode_record,
    encode_record,
)

KEY = ("g", UUID(int=7), 3)
PLAIN = StateBatch(5, 9, DeliveryState.ARCHIVED, 2)
OURS = StateBatch(12, 12, DeliveryState.ARCHIVING, 5, not_before_ms=99, reason="too old")

FORGOTTEN = SnapshotRecord(*KEY, None)
SNAPSHOT = SnapshotRecord(*KEY, Snapshot(1, 2, 3, 4, 5, 6, (PLAIN, OURS), 7))
IN_TRANSACTION = UpdateRecord(*KEY, Update(1, 3, 10, (OURS,), -1, 8, 2))


@pytest.mark.parametrize(
    "record",
    [
        FORGOTTEN,
        SNAPSHOT,
        UpdateRecord(*KEY, Update(1, 3, -1, (PLAIN,), 4)),
        IN_TRANSACTION,
    ],
)
def test_a_record_comes_back_as_it_was(record: ShareRecord) -> None:
    assert decode_record(*encode_record(record)) == record


def test_an_update_without_our_fields_has_kafkas_bytes() -> None:
    key, value = encode_record(UpdateRecord(*KEY, Update(1, 3, -1, (PLAIN,), 4)))
    assert key == b"\0\1" + b"\0\1g" + UUID(int=7).bytes + b"\0\0\0\3"
    assert value is not None
    batch = (5).to_bytes(8, "big") + (9).to_bytes(8, "big") + b"\4" + b"\0\2" + b"\0"
    fixed = (1).to_bytes(4, "big") + (3).to_bytes(4, "big") + b"\xff" * 8
    assert value == b"\0\0" + fixed + b"\2" + batch + b"\1" + b"\0\4" + (4).to_bytes(4, "big")


@pytest.mark.parametrize("state", [1, 9])
def test_a_state_that_is_never_stored_is_corruption(state: int) -> None:
    key, value = encode_record(UpdateRecord(*KEY, Update(1, 3, -1, (PLAIN,), 4)))
    assert value is not None
    broken = value.replace(b"\4\0\2\0", bytes([state]) + b"\0\2\0")
    with pytest.raises(CorruptShareRecord, match="delivery state"):
        decode_record(key, broken)


def declared_only(record: ShareRecord) -> tuple[bytes, bytes | None]:
    """The bytes that the declarations alone make of a record."""
    types = [
        RecordType(
            each.name,
            each.record,
            key_versions=each.key_versions,
            key=each.key,
            value=Struct(each.value.make, each.value.fields),
            versions=each.versions,
            written=each.written,
        )
        for each in RECORD_TYPES.types
    ]
    return RecordTypes[ShareRecord]("a record", CorruptShareRecord, *types).encode(record)


BATCHES = st.lists(
    st.builds(
        StateBatch,
        st.integers(0, 2**40),
        st.integers(2**40, 2**62),
        st.sampled_from([each for each in DeliveryState if each is not DeliveryState.ACQUIRED]),
        st.integers(0, 2**15 - 1),
        st.just(0) | st.integers(0, 2**62),
        st.just(-1),
        st.just(-1),
        st.just("") | st.text(max_size=300),
    ),
    max_size=200,
).map(tuple)


@given(BATCHES)
def test_batches_are_written_as_they_are_declared(batches: tuple[StateBatch, ...]) -> None:
    for record in (
        SnapshotRecord(*KEY, Snapshot(1, 2, 3, 4, 5, 6, batches, 7)),
        UpdateRecord(*KEY, Update(1, 3, 10, batches, -1, 8, 2)),
    ):
        assert encode_record(record) == declared_only(record)
        assert decode_record(*encode_record(record)) == record


@pytest.mark.parametrize(
    ("record", "key", "value"),
    [
        (FORGOTTEN, "00000001670000000000000000000000000000000700000003", None),
        (
            SNAPSHOT,
            "00000001670000000000000000000000000000000700000003",
            (
                "000000000001000000020000000300000000000000040000000000000005000000000000000603000000000000"
                "0005000000000000000904000200000000000000000c000000000000000c03000502e807080000000000000063"
                "e9070808746f6f206f6c6401000400000007"
            ),
        ),
        (
            IN_TRANSACTION,
            "00010001670000000000000000000000000000000700000003",
            (
                "00000000000100000003000000000000000a02000000000000000c000000000000000c03000502e80708000000"
                "0000000063e9070808746f6f206f6c6402e807020008e9070400000002"
            ),
        ),
    ],
)
def test_stored_bytes_stay_as_they_are(record: ShareRecord, key: str, value: str | None) -> None:
    raw_key, raw_value = encode_record(record)
    assert (raw_key.hex(), None if raw_value is None else raw_value.hex()) == (key, value)
    assert decode_record(bytes.fromhex(key), None if value is None else bytes.fromhex(value)) == record
