"""Headers and bodies from bytes."""

from __future__ import annotations

import struct
import sys
from typing import Any

import pytest

import tidemill.wire.requests as requests_module
from support.api_versions import all_versions
from tidemill.errors import ErrorCode, ProtocolError
from tidemill.wire.apis import is_served
from tidemill.wire.encode import encode_request, encode_response
from tidemill.wire.guard import write_uvarint
from tidemill.wire.requests import decode_request, decode_response, parse_header

VERSIONS = [pytest.param(api.key, version, id=f"{api.name}-v{version}") for api, version in all_versions()]


def start(api_key: int, version: int, correlation_id: int = 7) -> bytes:
    return struct.pack(">hhi", api_key, version, correlation_id)


@pytest.mark.parametrize(("api_key", "version"), VERSIONS)
@pytest.mark.parametrize("client_id", ["me", "", None, "ü" * 300])
def test_the_header_of_every_version_is_read(api_key: int, version: int, client_id: str | None) -> None:
    frame = encode_request(api_key, version, -5, client_id, {})[4:]
    header = parse_header(frame)
    assert (header.api_key, header.api_version, header.correlation_id) == (api_key, version, -5)
    assert header.client_id == client_id
    assert decode_request(header, frame).__version__ == version
    assert parse_header(memoryview(frame)) == header
    assert decode_request(header, memoryview(frame)) == decode_request(header, frame)


@pytest.mark.parametrize(("api_key", "version"), VERSIONS)
def test_every_cut_of_a_frame_is_refused(api_key: int, version: int) -> None:
    frame = encode_request(api_key, version, 1, "me", {})[4:]
    for end in range(len(frame)):
        with pytest.raises(ProtocolError):
            decode_request(parse_header(frame[:end]), frame[:end])


@pytest.mark.parametrize(("api_key", "version"), [(999, 0), (-1, 0), (0, 2), (0, 14), (3, -1), (1, 32767)])
@pytest.mark.parametrize("rest", [b"", b"\0\0", b"\xff" * 20])
def test_what_is_not_served_is_refused_with_its_key_and_version(
    api_key: int, version: int, rest: bytes
) -> None:
    with pytest.raises(ProtocolError, match=rf"API key {api_key}\b.*version {version}\b"):
        parse_header(start(api_key, version) + rest)


@pytest.mark.parametrize("version", [6, 99, -1])
@pytest.mark.parametrize("rest", [b"", b"\0", b"\xff" * 20, b"\x7f\xff"])
def test_api_versions_of_an_unknown_version_can_be_answered(version: int, rest: bytes) -> None:
    header = parse_header(start(18, version, 42) + rest)
    assert (header.api_key, header.api_version, header.correlation_id) == (18, version, 42)
    assert not is_served(header.api_key, header.api_version)
    answer = encode_response(18, 0, header.correlation_id, {"error_code": ErrorCode.unsupported_version})
    assert decode_response(18, 0, answer[4:])[1].error_code is ErrorCode.unsupported_version
    with pytest.raises(ProtocolError, match="ApiVersions"):
        decode_request(header, start(18, version) + rest)


def test_unknown_tagged_fields_of_a_header_are_skipped() -> None:
    tags = b"\x02" + b"\x00\x01x" + b"\x80\x01\x00"
    frame = start(18, 3) + b"\0\2me" + tags + b"\x02a\x02b\x00"
    header = parse_header(frame)
    assert header.client_id == "me"
    assert decode_request(header, frame).client_software_name == "a"


@pytest.mark.parametrize(
    ("after_correlation_id", "message"),
    [
        (b"\xff\xfe", "client id has the length -2"),
        (b"\0\2\xff\xff\0", "not UTF-8"),
        (b"\0\7me", "cut short"),
        (b"\x7f\xff", "cut short"),
        (b"\0\0" + b"\x01", "1 tagged fields in a header with 0 bytes left"),
        (b"\0\0" + b"\xff\xff\xff\xff\x0f" + b"\0" * 50, "4294967295 tagged fields"),
        (b"\0\0" + b"\x01\x00\xff\xff\xff\xff\x7f" + b"\0" * 50, "cut short"),
        (b"\0\0" + b"\x80\x80\x80\x80\x80\x00", "varint"),
    ],
)
def test_a_broken_header_is_refused(after_correlation_id: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        parse_header(start(18, 3) + after_correlation_id)


def test_a_time_beyond_what_python_can_say_is_refused() -> None:
    frame = bytearray(encode_request(8, 2, 1, "me", {"retention_time": 5})[4:])
    at = bytes(frame).index(struct.pack(">q", 5))
    frame[at : at + 8] = struct.pack(">q", 2**63 - 1)
    with pytest.raises(ProtocolError, match="OffsetCommitRequest v2"):
        decode_request(parse_header(bytes(frame)), bytes(frame))


def test_an_unknown_error_code_in_a_response_is_refused() -> None:
    frame = encode_response(12, 4, 1, {"error_code": 9999})[4:]
    with pytest.raises(ProtocolError, match="9999"):
        decode_response(12, 4, frame)


@pytest.mark.parametrize("body", [b"\x02\x02\xff\x00\0\0\0\0", b"\x01\x02\x00\x00\x00"])
def test_text_that_is_not_utf_8_and_booleans_that_are_not_are_refused(body: bytes) -> None:
    frame = start(3, 9) + b"\0\0\0" + body
    with pytest.raises(ProtocolError, match="MetadataRequest v9"):
        decode_request(parse_header(frame), frame)


@pytest.mark.parametrize("version", [11, 12, 13])
def test_librdkafkas_way_to_ask_for_all_topics_is_understood(version: int) -> None:
    frame = start(3, version) + b"\0\2me\0" + bytes(4) + b"\1\1" + b"\0"
    request = decode_request(parse_header(frame), frame)
    assert request.topics is None
    assert request.allow_auto_topic_creation
    assert request.include_topic_authorized_operations
    with pytest.raises(ProtocolError):
        decode_request(parse_header(frame), frame + b"\0")


class PanicException(BaseException):
    """What a panic in native code looks like from Python."""


@pytest.mark.parametrize("error", [PanicException("index out of bounds"), OverflowError("x"), KeyError("x")])
def test_any_failure_of_the_decoder_is_a_protocol_error(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(buffer: Any, offset: int) -> Any:
        raise error

    monkeypatch.setattr(requests_module, "_reader", lambda entity: fail)
    frame = encode_request(3, 9, 1, "me", {})[4:]
    with pytest.raises(ProtocolError, match="MetadataRequest v9"):
        decode_request(parse_header(frame), frame)


def test_an_interrupt_during_decoding_is_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(buffer: Any, offset: int) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(requests_module, "_reader", lambda entity: fail)
    frame = encode_request(3, 9, 1, "me", {})[4:]
    with pytest.raises(KeyboardInterrupt):
        decode_request(parse_header(frame), frame)


@pytest.mark.parametrize("cut", range(5))
def test_a_cut_response_header_is_refused(cut: int) -> None:
    frame = encode_response(3, 9, 1, {})[4 : 4 + cut]
    with pytest.raises(ProtocolError, match="response header cut short"):
        decode_response(3, 9, frame)


def test_unknown_tagged_fields_of_a_response_header_are_skipped() -> None:
    frame = bytes(encode_response(12, 4, 6, {"throttle_time": 9})[4:])
    with_tag = frame[:4] + b"\x01\x07" + write_uvarint(2) + b"xy" + frame[5:]
    assert decode_response(12, 4, with_tag) == decode_response(12, 4, frame)


def test_a_decoded_entity_does_not_keep_the_frame_alive() -> None:
    frame = memoryview(
        encode_request(0, 9, 1, "me", {"topic_data": [{"partition_data": [{"records": b"r" * 99}]}]})[4:]
    )
    before = sys.getrefcount(frame)
    body = decode_request(parse_header(frame), frame)
    assert body.topic_data[0].partition_data[0].records == b"r" * 99
    assert sys.getrefcount(frame) == before
    frame.release()
