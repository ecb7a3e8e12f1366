"""The encoder against kio's own encoder and decoder, for every served version."""

from __future__ import annotations

import io
import struct
from dataclasses import asdict, fields
from datetime import UTC, datetime, timedelta
from functools import cache
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.consumer_protocol_subscription.v3.data import ConsumerProtocolSubscription
from kio.serial import entity_reader, entity_writer

from support.api_versions import all_versions
from support.typos import refuse_typos
from tidemill.errors import ErrorCode
from tidemill.wire.apis import request_class, response_class, response_header_version
from tidemill.wire.encode import encode_entity, encode_request, encode_response
from tidemill.wire.requests import decode_request, decode_response, ms, parse_header
from tidemill.wire.schema import FieldSpec, fields_of

INT_BITS = {"int8": 8, "int16": 16, "int32": 32, "int64": 64}
UINT_BITS = {"uint8": 8, "uint16": 16, "uint32": 32, "uint64": 64}
VERSIONS = [pytest.param(api.key, version, id=f"{api.name}-v{version}") for api, version in all_versions()]

# Long enough for a length of two bytes, seldom enough to stay fast.
TEXT = st.one_of(st.text(max_size=6), st.text(max_size=6), st.just("ü" * 100))
BLOB = st.one_of(st.binary(max_size=6), st.just(b"\xff" * 20_000))


def primitives(kafka_type: str) -> st.SearchStrategy[Any]:
    if bits := INT_BITS.get(kafka_type):
        return st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    if bits := UINT_BITS.get(kafka_type):
        return st.integers(0, 2**bits - 1)
    return {
        "bool": st.booleans(),
        "float64": st.floats(allow_nan=False),
        "string": TEXT,
        "bytes": BLOB,
        "records": BLOB,
        "uuid": st.uuids(),
        "error_code": st.sampled_from(ErrorCode),
        "timedelta_i32": st.integers(-(2**31), 2**31 - 1).map(lambda n: timedelta(milliseconds=n)),
        "timedelta_i64": st.integers(-(10**14), 10**14).map(lambda n: timedelta(milliseconds=n)),
        "datetime_i64": st.integers(0, 10**10).map(lambda n: datetime.fromtimestamp(n, tz=UTC)),
    }[kafka_type]


def field_values(spec: FieldSpec) -> st.SearchStrategy[Any]:
    values = primitives(spec.kafka_type) if spec.struct is None else entities(spec.struct)
    if spec.is_array:
        values = st.lists(values, max_size=3).map(tuple)
    if spec.nullable or spec.kafka_type == "uuid":
        values = st.none() | values
    if spec.tag is not None and spec.default is not None:
        values = st.just(spec.default) | values
    return values


@cache
def entities(entity: Any) -> st.SearchStrategy[Any]:
    return st.builds(entity, **{spec.name: field_values(spec) for spec in fields_of(entity)})


def encoded_by_kio(value: Any) -> bytes:
    with io.BytesIO() as buffer:
        entity_writer(type(value))(buffer, value)
        return buffer.getvalue()


def encoded(entity: Any, body: dict[str, Any]) -> bytes:
    out = bytearray()
    encode_entity(entity, body, out)
    return bytes(out)


@pytest.fixture(autouse=True)
def strict() -> Any:
    refuse_typos(True)
    yield
    refuse_typos(False)


@pytest.mark.parametrize("load", [request_class, response_class])
@pytest.mark.parametrize(("api_key", "version"), VERSIONS)
@settings(max_examples=6)
@given(data=st.data())
def test_bytes_equal_those_of_kio_and_read_back_as_the_same_value(
    load: Any, api_key: int, version: int, data: st.DataObject
) -> None:
    entity = load(api_key, version)
    value = data.draw(entities(entity))
    ours = encoded(entity, asdict(value))
    assert ours == encoded_by_kio(value)
    assert entity_reader(entity)(ours, 0) == (value, len(ours))


@pytest.mark.parametrize(("api_key", "version"), VERSIONS)
def test_an_empty_body_is_the_message_of_defaults(api_key: int, version: int) -> None:
    for entity in (request_class(api_key, version), response_class(api_key, version)):
        value, size = entity_reader(entity)(encoded(entity, {}), 0)
        assert size == len(encoded(entity, {}))
        for field in fields(entity):
            if field.default is not field.default_factory:
                assert getattr(value, field.name) == field.default


def test_a_frame_of_a_request_reads_back() -> None:
    frame = encode_request(3, 9, 77, "me", {"topics": [{"name": "t"}], "allow_auto_topic_creation": False})
    assert struct.unpack(">i", frame[:4]) == (len(frame) - 4,)
    header = parse_header(frame[4:])
    assert (header.api_key, header.api_version, header.correlation_id, header.client_id) == (3, 9, 77, "me")
    body = decode_request(header, frame[4:])
    assert [topic.name for topic in body.topics] == ["t"]
    assert body.allow_auto_topic_creation is False


def test_a_request_without_a_client_id_says_null() -> None:
    assert parse_header(encode_request(3, 1, 1, None, {"topics": None})[4:]).client_id is None


@pytest.mark.parametrize("version", [0, 8, 9, 13])
def test_a_frame_of_a_response_reads_back(version: int) -> None:
    body = {"topics": [{"name": "t", "topic_id": UUID(int=5), "partitions": [{"partition_index": 4}]}]}
    frame = encode_response(3, version, 9, body)
    assert struct.unpack(">ii", frame[:8]) == (len(frame) - 4, 9)
    correlation_id, entity = decode_response(3, version, frame[4:])
    assert correlation_id == 9
    assert entity.topics[0].partitions[0].partition_index == 4


@pytest.mark.parametrize("version", range(6))
def test_the_header_of_an_api_versions_response_is_never_flexible(version: int) -> None:
    frame = encode_response(18, version, 1, {"error_code": ErrorCode.unsupported_version})
    assert frame[8:10] == struct.pack(">h", 35)
    assert response_header_version(18, version) == 0


def test_times_may_be_numbers_or_times() -> None:
    entity = response_class(0, 9)

    def response(throttle: Any, appended: Any) -> bytes:
        partition = {"index": 1, "log_append_time": appended}
        topic = {"name": "t", "partition_responses": [partition]}
        return encoded(entity, {"throttle_time": throttle, "responses": [topic]})

    assert response(1500, 2000) == response(timedelta(seconds=1.5), datetime.fromtimestamp(2, tz=UTC))
    assert response(0, None) == response(0, -1)


def test_error_codes_may_be_numbers() -> None:
    entity = response_class(12, 4)
    assert encoded(entity, {"error_code": 25}) == encoded(entity, {"error_code": ErrorCode.unknown_member_id})


def test_a_missing_uuid_is_the_zero_uuid() -> None:
    entity = response_class(3, 12)
    assert encoded(entity, {"topics": [{"topic_id": None}]}) == encoded(
        entity, {"topics": [{"topic_id": UUID(int=0)}]}
    )


def test_buffers_are_written_as_their_bytes() -> None:
    entity = response_class(1, 12)

    def response(records: Any) -> bytes:
        return encoded(entity, {"responses": [{"topic": "t", "partitions": [{"records": records}]}]})

    assert response(b"abc") == response(bytearray(b"abc")) == response(memoryview(b"xabcx")[1:4])


def test_a_tagged_field_with_its_default_is_left_out() -> None:
    entity = request_class(1, 15)
    assert encoded(entity, {"replica_state": {"replica_id": -1}, "cluster_id": None}) == encoded(entity, {})
    assert len(encoded(entity, {"replica_state": {"replica_id": 1}})) > len(encoded(entity, {}))


def test_a_struct_that_may_be_null_is_null_when_missing() -> None:
    entity = response_class(75, 0)
    assert encoded(entity, {"next_cursor": None}) == encoded(entity, {})
    with_cursor = encoded(entity, {"next_cursor": {"topic_name": "t", "partition_index": 3}})
    assert entity_reader(entity)(with_cursor, 0)[0].next_cursor.partition_index == 3


def test_data_that_is_no_request_is_encoded_too() -> None:
    subscription = {"topics": ["a", "b"], "generation_id": 4}
    value = entity_reader(ConsumerProtocolSubscription)(
        encoded(ConsumerProtocolSubscription, subscription), 0
    )[0]
    assert (value.topics, value.generation_id, value.user_data) == (("a", "b"), 4, None)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error_code": 40_000}, "error_code"),
        ({"throttle_time": timedelta(days=1000)}, "throttle_time of type timedelta_i32"),
        ({"error_code": "none"}, "error_code of type error_code cannot be 'none'"),
        ({"members": None}, "members is None"),
        ({"members": [{"member_id": None}]}, "member_id is None"),
        ({"members": [{"member_id": "x" * 40_000}]}, "member_id has 40000 bytes"),
    ],
)
def test_a_value_that_does_not_fit_is_named(body: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        encoded(response_class(11, 5), body)


def test_a_key_of_another_version_is_ignored() -> None:
    entity = response_class(3, 0)
    assert encoded(entity, {"cluster_id": "c"}) == encoded(entity, {})


def test_a_key_of_no_version_is_refused_when_strict() -> None:
    with pytest.raises(TypeError, match=r"no version of MetadataResponse has topics\.partitions\.leader"):
        encoded(response_class(3, 12), {"topics": [{"partitions": [{"leader": 1}]}]})
    refuse_typos(False)
    encoded(response_class(3, 12), {"topics": [{"partitions": [{"leader": 1}]}]})


def test_ms_is_exact_for_whole_milliseconds() -> None:
    assert ms(timedelta(milliseconds=-(2**31))) == -(2**31)
    assert ms(timedelta(milliseconds=10**16 + 1)) == 10**16 + 1
    assert ms(datetime(1970, 1, 2, tzinfo=UTC)) == 86_400_000
    assert ms(None) == -1
