"""What is on disk stays readable: keys, values and whole segments that an earlier version wrote.

``tests/vectors/stored_segments`` and most of ``tests/vectors/stored_records.json`` were made by commit
49ca9a9, before stored records were declared. The vectors of record types that came later, those of share
groups and cursors, were made by the code that declared them. None is ever made again: bytes like these are on
disks. A new record type, or a new version of one, gets vectors of its own.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest

from support.consumer_groups import FakeTopics
from support.group_invariants import check_groups
from tidemill.control.image import INTERNAL_TOPICS
from tidemill.coordination.share_state import StateBatch
from tidemill.coordination.stored import RecordTypes
from tidemill.cursors import stored as cursor_records
from tidemill.errors import ErrorCode, StorageError
from tidemill.groups import records as group_records
from tidemill.groups.classic.group import ClassicGroup
from tidemill.groups.consumer.group import ConsumerGroup
from tidemill.groups.settings import GroupSettings
from tidemill.groups.state import ShardState
from tidemill.records.batch import parse_header
from tidemill.records.control import read_marker
from tidemill.records.record import Record, read_records
from tidemill.share.state import records as share_records
from tidemill.transactions import records as transaction_records
from tidemill.transactions.settings import TransactionSettings
from tidemill.transactions.state import TransactionsState
from tidemill.transactions.transaction import TransactionState

VECTORS = Path(__file__).parents[1] / "vectors"
GROUPS_TOPIC = "__consumer_offsets"
TRANSACTIONS_TOPIC = "__transaction_state"
SHARE_STATE_TOPIC = "__share_group_state"
CURSORS_TOPIC = "__cursors"
#: Tuples whose fields have names in the vectors.
NAMED = (
    share_records.SnapshotRecord,
    share_records.UpdateRecord,
    share_records.Snapshot,
    share_records.Update,
    StateBatch,
)
#: Fields that came after the first vectors, and what a record means that was written without them. Vectors
#: name them only where they have another value.
LATER: dict[type, dict[str, int | bytes]] = {
    share_records.Snapshot: {"log_offset": -1, "log_epoch": -1, "log_history": b""},
    share_records.Update: {"log_offset": -1, "log_epoch": -1, "log_history": b"", "cut_offset": -1},
}
_REPEATED = re.compile(r"\{(.+?)\*(\d+)\}", re.DOTALL)


def plain(value: Any) -> Any:
    """A stored value as JSON has it: "" holds the name of its class, sets are sorted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"": type(value).__name__, **fields}
    if isinstance(value, msgspec.Struct):
        fields = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        return {"": type(value).__name__, **fields}
    if isinstance(value, NAMED):
        later = LATER.get(type(value), {})
        known = {
            name: plain(each)
            for name, each in value._asdict().items()
            if name not in later or each != later[name]
        }
        return {"": type(value).__name__, **known}
    if isinstance(value, frozenset):
        return sorted(plain(each) for each in value)
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, UUID):
        return str(value)
    return int(value) if isinstance(value, enum.IntEnum) else value


def expand(value: Any) -> Any:
    """``{78*3}`` stands for ``787878`` in the vectors."""
    if isinstance(value, str):
        return _REPEATED.sub(lambda found: found[1] * int(found[2]), value)
    if isinstance(value, list):
        return [expand(each) for each in value]
    return {key: expand(each) for key, each in value.items()} if isinstance(value, dict) else value


RECORD_MODULES: dict[str, Any] = {
    GROUPS_TOPIC: group_records,
    TRANSACTIONS_TOPIC: transaction_records,
    SHARE_STATE_TOPIC: share_records,
    CURSORS_TOPIC: cursor_records,
}
"""The module that declares the records of each internal topic."""
RECORD_TYPES: dict[str, RecordTypes[Any]] = {
    topic: module.RECORD_TYPES for topic, module in RECORD_MODULES.items()
}


def decode(topic: str, key: bytes | None, value: bytes | None) -> Any:
    return RECORD_TYPES[topic].decode(key, value)


def encode(topic: str, record: Any) -> tuple[bytes, bytes | None]:
    """Key and value of a record: one of a class, or the plain tuple of what ``encode_record`` takes."""
    parts = record if type(record) is tuple else (record,)
    encoded: tuple[bytes, bytes | None] = RECORD_MODULES[topic].encode_record(*parts)
    return encoded


def to_hex(raw: bytes | None) -> str | None:
    return None if raw is None else raw.hex()


def from_hex(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)


RECORDS: list[dict[str, Any]] = json.loads((VECTORS / "stored_records.json").read_text())["vectors"]


def _name(vector: dict[str, Any]) -> str:
    return f"{vector['topic']}-{str(vector['key'])[:40]}-{str(vector['value'])[:40]}-{vector['outcome']}"


@pytest.mark.parametrize("vector", RECORDS, ids=_name)
def test_a_record_means_what_it_meant_and_is_written_as_it_was(vector: dict[str, Any]) -> None:
    vector = expand(vector)
    topic, key, value = vector["topic"], from_hex(vector["key"]), from_hex(vector["value"])
    if vector["outcome"] == "corrupt":
        with pytest.raises(StorageError, match="cannot be decoded"):
            decode(topic, key, value)
        return
    record = decode(topic, key, value)
    if vector["outcome"] == "unknown":
        assert record is None
        return
    assert plain(record) == vector["decoded"]
    # Values of older versions and with tagged fields of newer writers are written anew without those.
    written = vector.get("rewritten", [vector["key"], vector["value"]])
    assert [to_hex(part) for part in encode(topic, record)] == written


def test_the_vectors_have_every_outcome() -> None:
    outcomes = {(vector["topic"], vector["outcome"]) for vector in RECORDS}
    assert set(RECORD_TYPES) == INTERNAL_TOPICS
    assert outcomes == {(t, o) for t in RECORD_TYPES for o in ("same", "rewritten", "corrupt", "unknown")}


def test_every_record_type_has_vectors_of_a_value_and_of_a_tombstone() -> None:
    covered = {
        (vector["topic"], int(vector["key"][:4], 16), vector["value"] is None)
        for vector in RECORDS
        if vector["outcome"] == "same"
    }
    for topic, types in RECORD_TYPES.items():
        for each in types.types:
            for is_tombstone in (False, True):
                assert (topic, each.key_versions[0], is_tombstone) in covered, each.name


# -- whole segments --------------------------------------------------------------------------------------


def entries(topic: str) -> Iterator[tuple[int, Record | bool]]:
    """(producer id, record) of each record, and (producer id, whether it commits) of each marker."""
    raw = (VECTORS / "stored_segments" / f"{topic}.log").read_bytes()
    position = 0
    while position < len(raw):
        header = parse_header(raw, position)
        batch = raw[position : position + header.size_bytes]
        position += header.size_bytes
        if header.is_control:
            marker = read_marker(batch)
            assert marker is not None
            yield header.producer_id, marker.commit
        else:
            for record in read_records(batch):
                yield header.producer_id, record


@pytest.mark.parametrize("topic", [GROUPS_TOPIC, TRANSACTIONS_TOPIC])
def test_a_segment_of_an_earlier_node_reads_as_it_did(topic: str) -> None:
    expected = json.loads((VECTORS / "stored_segments" / "decoded.json").read_text())["topics"][topic]
    found: list[Any] = []
    for producer_id, entry in entries(topic):
        if isinstance(entry, bool):
            found.append(["marker", producer_id, entry])
            continue
        record = decode(topic, entry.key, entry.value)
        assert encode(topic, record) == (entry.key, entry.value)
        found.append(["record", producer_id, plain(record)])
    assert found == [row[1:] for row in expected]


def _refuse(*_: object, **__: object) -> None:
    raise AssertionError("loading appends nothing")


def test_groups_of_an_earlier_node_are_loaded() -> None:
    state = ShardState(GroupSettings(), _refuse, FakeTopics())
    for producer_id, entry in entries(GROUPS_TOPIC):
        if isinstance(entry, bool):
            state.replay_marker(producer_id, commit=entry)
        else:
            state.replay(decode(GROUPS_TOPIC, entry.key, entry.value), 0, producer_id)
    assert set(state.start(0)) >= set(state.groups)
    assert set(state.groups) == {"classic", "neue", "offsets-only"}
    classic, new = state.groups["classic"], state.groups["neue"]
    assert isinstance(classic, ClassicGroup)
    assert isinstance(new, ConsumerGroup)
    check_groups(state)
    assert classic.listing().state == "Stable"
    assert {member.instance_id for member in classic.describe().members} == {None, "static-a"}
    assert [member.classic is not None for member in new.members.values()] == [False, True]
    offsets = {(topic, partition): commit.offset for topic, partition, commit in state.offsets.of("classic")}
    assert offsets == {("orders", 0): 5, ("orders", 1): 6, ("orders", 2): 22}
    pending = state.offsets.fetch("classic", [("orders", 1)], require_stable=True)
    assert pending["orders", 1].error is ErrorCode.unstable_offset_commit


def test_transactions_of_an_earlier_node_are_loaded() -> None:
    state = TransactionsState(TransactionSettings(), _refuse)
    for _, entry in entries(TRANSACTIONS_TOPIC):
        assert isinstance(entry, Record)
        state.replay(*decode(TRANSACTIONS_TOPIC, entry.key, entry.value))
    state.loaded(0)
    assert {name: value.state for name, value in state.transactions.items()} == {
        "tx-commit": TransactionState.COMPLETE_COMMIT,
        "tx-abort": TransactionState.COMPLETE_ABORT,
        "tx-empty": TransactionState.EMPTY,
        "tx-pending": TransactionState.ONGOING,
        "__tidemill_job:nightly#0": TransactionState.EMPTY,
        "__tidemill_job:nightly#1": TransactionState.COMPLETE_ABORT,
        "__tidemill_job:other#0": TransactionState.EMPTY,
    }
    assert (state.transactions["__tidemill_job:nightly#0"].batch, state.published["nightly"].batch) == (1, 0)
    assert set(state.jobs) == {"nightly", "other"}
