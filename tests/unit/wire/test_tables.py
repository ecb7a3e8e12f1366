"""The messages of the table APIs: their numbers, their layout, and that nothing is lost on the way."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.typos import refuse_typos
from tidemill.errors import ProtocolError, TableCode
from tidemill.server.handlers.cluster.api_versions import api_versions_body
from tidemill.wire.apis import APIS, is_flexible, request_class, response_class
from tidemill.wire.encode import encode_request, encode_response
from tidemill.wire.requests import decode_request, decode_response, parse_header
from tidemill.wire.schema import EntityClass, FieldSpec, fields_of

# docs/protocol.md has the numbers that clients know; ``test_reference_pages`` compares.
NUMBERS = {key: api.name for key, api in APIS.items() if key >= 1000}
TABLE_KEYS = [pytest.param(key, id=name) for key, name in NUMBERS.items()]
#: The newest version of APIs that have more than version 0.
NEWEST = {"ShareSettle": 1}
BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}


def values(spec: FieldSpec) -> st.SearchStrategy[Any]:
    if spec.struct is not None:
        one: st.SearchStrategy[Any] = bodies(spec.struct)
    elif spec.kafka_type in BITS:
        top = 2 ** (BITS[spec.kafka_type] - 1)
        one = st.integers(-top, top - 1)
    else:
        one = {
            "bool": st.booleans(),
            "string": st.text(max_size=8),
            "bytes": st.binary(max_size=8),
            "uuid": st.uuids(),
        }[spec.kafka_type]
    if spec.is_array:
        one = st.lists(one, max_size=3)
    return st.none() | one if spec.nullable else one


def bodies(entity: EntityClass) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({spec.name: values(spec) for spec in fields_of(entity)})


def plain(value: Any) -> Any:
    """An entity as the body that it was made of."""
    if hasattr(value, "__type__"):
        entity: EntityClass = type(value)
        return {spec.name: plain(getattr(value, spec.name)) for spec in fields_of(entity)}
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    return bytes(value) if isinstance(value, memoryview) else value


@pytest.fixture(autouse=True)
def _search_for_typos() -> Any:
    refuse_typos(True)
    yield
    refuse_typos(False)


@pytest.mark.parametrize("key", TABLE_KEYS)
def test_every_table_api_is_listed_and_flexible(key: int) -> None:
    listed = {entry["api_key"]: entry for entry in api_versions_body()["api_keys"]}
    newest = NEWEST.get(APIS[key].name, 0)
    assert listed[key] == {"api_key": key, "min_version": 0, "max_version": newest}
    assert all(is_flexible(key, version) for version in range(newest + 1))


def test_the_listing_reaches_clients_of_every_version() -> None:
    for version in range(6):
        _, answer = decode_response(18, version, encode_response(18, version, 1, api_versions_body())[4:])
        assert NUMBERS.keys() <= {entry.api_key for entry in answer.api_keys}


@pytest.mark.parametrize("key", TABLE_KEYS)
@settings(max_examples=15)
@given(data=st.data())
def test_a_request_arrives_as_it_was_sent(key: int, data: st.DataObject) -> None:
    body = data.draw(bodies(request_class(key, 0)))
    frame = encode_request(key, 0, 5, "client", body)[4:]
    header = parse_header(frame)
    assert (header.api_key, header.api_version, header.correlation_id) == (key, 0, 5)
    assert plain(decode_request(header, frame)) == body


@pytest.mark.parametrize("key", TABLE_KEYS)
@settings(max_examples=15)
@given(data=st.data())
def test_a_response_arrives_as_it_was_sent(key: int, data: st.DataObject) -> None:
    body = data.draw(bodies(response_class(key, 0)))
    correlation_id, answer = decode_response(key, 0, encode_response(key, 0, 6, body)[4:])
    assert (correlation_id, plain(answer)) == (6, body)


@pytest.mark.parametrize("key", TABLE_KEYS)
def test_every_answer_has_room_for_an_error_of_ours(key: int) -> None:
    for code in TableCode:
        body = {"error_code": int(code), "error_message": "what happened, to what, what to do"}
        _, answer = decode_response(key, 0, encode_response(key, 0, 6, body)[4:])
        assert (answer.error_code, answer.error_message) == (code, body["error_message"])


def test_the_layout_of_a_scan_is_fixed() -> None:
    body = {
        "scanner_id": b"\xaa",
        "table_id": 1,
        "partition_id": 2,
        "bucket": 3,
        "leader_epoch": -1,
        "pin_id": None,
        "lease_id": "l",
        "limit": 4,
        "columns": ["c", ""],
        "predicate": None,
        "start_key": b"",
        "end_key": b"\xff",
        "call_sequence": 5,
        "batch_size_bytes": 6,
        "close": True,
        "keep_alive": False,
    }
    fields = (
        "02aa" "0000000000000001" "0000000000000002" "00000003" "ffffffff" "00" "026c" "0000000000000004"
        "03026301" "00" "01" "02ff" "00000005" "00000006" "01" "00" "00"
    )  # fmt: skip
    header = "0425" "0000" "00000007" "0001" "6d" "00"  # fmt: skip
    assert encode_request(1061, 0, 7, "m", body)[4:].hex() == header + fields
    answer = {
        "error_code": 1069,
        "error_message": "full",
        "scanner_id": b"\xaa",
        "has_more": True,
        "log_offset": 9,
        "next_key": None,
        "records": b"rows",
    }
    fields = "042d" "0566756c6c" "02aa" "01" "0000000000000009" "00" "05726f7773" "00"  # fmt: skip
    assert encode_response(1061, 0, 7, answer)[4:].hex() == "00000007" "00" + fields  # fmt: skip


@pytest.mark.parametrize("key", TABLE_KEYS)
def test_a_message_that_is_cut_anywhere_is_refused(key: int) -> None:
    frame = encode_request(key, 0, 5, "client", {})[4:]
    header = parse_header(frame)
    for end in range(header.body_offset, len(frame)):
        with pytest.raises(ProtocolError):
            decode_request(header, frame[:end])


def test_more_keys_than_there_are_bytes_are_refused_before_memory_is_taken() -> None:
    frame = bytes(encode_request(1060, 0, 5, "c", {"keys": [b"k"]})[4:])
    keys_at = frame.index(b"\x02\x02k")
    hostile = frame[:keys_at] + b"\xff\xff\xff\xff\x07" + frame[keys_at + 1 :]
    with pytest.raises(ProtocolError, match=r"a count of 2147483646 .* 16 are left"):
        decode_request(parse_header(hostile), hostile)
