"""The records of ``__transaction_state``: Kafka's bytes, round trips, hostile bytes."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.transactions.jobs import Publication
from tidemill.transactions.records import (
    CorruptTransactionRecord,
    StoredRecord,
    chunks,
    decode_record,
    encode_record,
    stored_bytes,
)
from tidemill.transactions.transaction import Transaction, TransactionState
from tidemill.wire.jobs import job_key

int64s = st.integers(-1, 2**63 - 1)
stored = [state for state in TransactionState if state.label not in ("Dead", "PrepareEpochFence")]
places = st.tuples(st.text(max_size=20), st.integers(0, 2**31 - 1))
transactions = st.builds(
    Transaction,
    producer_id=int64s,
    producer_epoch=st.integers(-1, 2**15 - 1),
    timeout_ms=st.integers(0, 2**31 - 1),
    state=st.sampled_from([state for state in stored if state is not TransactionState.EMPTY]),
    updated_ms=int64s,
    partitions=st.frozensets(places, max_size=300),
    started_ms=int64s,
    last_producer_epoch=st.integers(-1, 2**15 - 1),
    previous_producer_id=int64s,
    next_producer_id=int64s,
    client_version=st.sampled_from([0, 1, 2]),
    batch=int64s,
)


@given(st.text(max_size=50), transactions)
def test_what_is_written_is_read(transactional_id: str, value: Transaction) -> None:
    assert decode_record(*encode_record(transactional_id, value)) == (transactional_id, value)


def test_a_tombstone_forgets_the_id() -> None:
    key, value = encode_record("x", None)
    assert value is None
    assert decode_record(key, value) == ("x", None)


def test_the_bytes_are_kafkas() -> None:
    """Put together by hand from TransactionLogKey v0 and TransactionLogValue v1."""
    value = Transaction(
        7,
        3,
        60_000,
        TransactionState.ONGOING,
        1_111,
        frozenset({("ab", 1), ("ab", 0)}),
        1_000,
        client_version=2,
    )
    key, raw = encode_record("tx", value)
    assert key == b"\x00\x00" + b"\x00\x02tx"
    assert raw == (
        b"\x00\x01"
        + struct.pack(">qhib", 7, 3, 60_000, 1)
        + b"\x02"  # one topic
        + b"\x03ab"
        + b"\x03"  # two partitions
        + struct.pack(">ii", 0, 1)
        + b"\x00"  # no tagged fields in the topic
        + struct.pack(">qq", 1_111, 1_000)
        + b"\x01"  # one tagged field: the client's version
        + b"\x02\x02\x00\x02"
    )


def test_an_empty_transaction_has_no_list_of_partitions() -> None:
    value = Transaction(7, 3, 60_000, TransactionState.EMPTY, 1_111)
    _, raw = encode_record("tx", value)
    assert raw is not None
    assert raw[17] == 0
    assert decode_record(*encode_record("tx", value)) == ("tx", value)


def test_version_0_of_older_brokers_is_read() -> None:
    raw = (
        b"\x00\x00"
        + struct.pack(">qhib", 7, 3, 60_000, 2)
        + struct.pack(">i", 1)
        + b"\x00\x02ab"
        + struct.pack(">ii", 1, 5)
        + struct.pack(">qq", 1_111, 1_000)
    )
    expected = Transaction(
        7, 3, 60_000, TransactionState.PREPARE_COMMIT, 1_111, frozenset({("ab", 5)}), 1_000
    )
    assert decode_record(b"\x00\x00\x00\x02tx", raw) == ("tx", expected)


def test_an_unknown_tag_is_passed_over() -> None:
    value = Transaction(7, 3, 60_000, TransactionState.EMPTY, 1_111)
    key, raw = encode_record("tx", value)
    assert raw is not None
    assert raw.endswith(b"\x00")
    assert decode_record(key, raw[:-1] + b"\x01\x09\x03abc") == ("tx", value)


def test_an_unknown_kind_of_key_is_skipped() -> None:
    assert decode_record(b"\x00\x01\x00\x02tx", b"anything") is None


@pytest.mark.parametrize("state", [6, 7, 8, 255])
def test_a_state_that_is_never_stored_is_corruption(state: int) -> None:
    key, raw = encode_record("tx", Transaction(7, 3, 60_000, TransactionState.EMPTY, 1_111))
    assert raw is not None
    with pytest.raises(CorruptTransactionRecord, match=f"state {state}"):
        decode_record(key, raw[:16] + bytes([state]) + raw[17:])


@given(st.binary(max_size=60), st.none() | st.binary(max_size=80))
def test_any_bytes_decode_or_are_corruption(key: bytes, value: bytes | None) -> None:
    with contextlib.suppress(CorruptTransactionRecord):
        decode_record(key, value)


def test_a_record_without_a_key_is_corruption() -> None:
    with pytest.raises(CorruptTransactionRecord, match="no key"):
        decode_record(None, None)


@given(
    st.text(st.characters(exclude_characters="#", exclude_categories=["Cs"]), min_size=1, max_size=50),
    st.data(),
)
def test_what_a_job_has_published_survives_the_log(job: str, data: st.DataObject) -> None:
    numbers = st.integers(0, 2**63 - 1)
    publication = Publication(data.draw(numbers), data.draw(numbers))
    key, raw = encode_record(job_key(job), publication)
    assert key[:2] == (1_000).to_bytes(2, "big"), "a kind of its own"
    assert decode_record(key, raw) == (job_key(job), publication)
    assert decode_record(*encode_record(job_key(job), None)) == (job_key(job), None)
    assert raw is not None
    # What later versions add is passed over.
    assert decode_record(key, raw[:-1] + b"\x01\x09\x03abc") == (job_key(job), publication)


def test_a_publication_of_an_unknown_version_does_not_load() -> None:
    key, raw = encode_record(job_key("j"), Publication(1, 2))
    assert raw is not None
    with pytest.raises(CorruptTransactionRecord, match="value version 1 of Publication is unknown"):
        decode_record(key, b"\x00\x01" + raw[2:])


def test_records_are_parted_by_number_and_by_size() -> None:
    small: list[StoredRecord] = [(f"id-{number}", None) for number in range(500)]
    assert [len(chunk) for chunk in chunks(small)] == [200, 200, 100]
    places = frozenset((f"topic-{number:0200}", 0) for number in range(100))
    large = Transaction(1, 0, 1, TransactionState.ONGOING, 1, places)
    assert [len(chunk) for chunk in chunks([("a", large)] * 7)] == [2, 2, 2, 1]
    _, raw = encode_record("a", large)
    assert raw is not None
    assert len(raw) <= stored_bytes("a", large) <= 2 * len(raw)
