"""Messages come out as they went in; bytes that are no message are refused in words, and never otherwise."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import Any
from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.cluster_messages import any_of, any_request, any_response
from tidemill.cluster.frames import Undecodable, decode_request, decode_response, encode
from tidemill.cluster.messages import (
    MESSAGE_BYTES_MAX,
    REQUESTS,
    RESPONSES,
    AppendRequest,
    ClusterErrorCode,
    FetchedPartition,
    FetchResponse,
    HeartbeatRequest,
    PartitionId,
    RequestHeader,
    ResponseHeader,
)
from tidemill.errors import ApiError, ErrorCode, ProtocolError

HEADER = RequestHeader(1, 7, 2, 1_000)
PARTITION = PartitionId(UUID(int=5), 3)


def framed(message: Any) -> memoryview:
    """The body of a message's frame, whose length is right."""
    frame = b"".join(encode(message))
    assert int.from_bytes(frame[:4], "big") == len(frame) - 4
    return memoryview(frame)[4:]


@pytest.mark.parametrize("request_class", REQUESTS, ids=lambda each: each.__name__)
def test_every_request_comes_out_as_it_went_in(request_class: type[Any]) -> None:
    @given(any_of(request_class))
    def check(request: Any) -> None:
        assert decode_request(framed(request)) == request

    check()


@pytest.mark.parametrize("response_class", RESPONSES, ids=lambda each: each.__name__)
def test_every_answer_comes_out_as_it_went_in(response_class: type[Any]) -> None:
    @given(any_of(response_class))
    def check(response: Any) -> None:
        assert decode_response(framed(response)) == response

    check()


def fetched(*records: bytes) -> FetchResponse:
    partitions = [FetchedPartition(PARTITION, 9, 0, records=memoryview(each)) for each in records]
    return FetchResponse(ResponseHeader(7), partitions)


@given(st.lists(st.sampled_from((0, 10, 65_535, 65_536, 100_000)), max_size=20))
def test_records_that_are_not_copied_give_the_same_bytes(sizes: list[int]) -> None:
    response = fetched(*map(bytes, sizes))
    plain = msgspec.msgpack.Encoder(uuid_format="bytes").encode(response)
    assert framed(response) == plain


def test_many_partitions_around_large_records_give_the_same_bytes() -> None:
    response = fetched(*([b""] * 70_000), bytes(65_536))
    assert framed(response) == msgspec.msgpack.Encoder(uuid_format="bytes").encode(response)


def test_large_records_are_sent_from_where_they_are() -> None:
    records = bytes(100_000)
    pieces = encode(fetched(b"small", records, records))
    assert [len(piece) for piece in pieces if isinstance(piece, memoryview)] == [100_000, 100_000]
    assert all(piece.obj is records for piece in pieces if isinstance(piece, memoryview))


def test_records_are_views_of_what_was_received() -> None:
    received = bytearray(framed(fetched(b"r" * 100)))
    response = decode_response(memoryview(received).toreadonly())
    assert isinstance(response, FetchResponse)
    records = response.partitions[0].records
    assert records.obj is received
    assert records.readonly
    assert bytes(records) == b"r" * 100


def test_a_message_that_is_too_large_is_not_sent() -> None:
    for message in (
        AppendRequest(HEADER, PARTITION, memoryview(bytes(MESSAGE_BYTES_MAX)), -1, 0),
        fetched(bytes(MESSAGE_BYTES_MAX)),
    ):
        with pytest.raises(ApiError, match="at most 16777216 are allowed") as caught:
            encode(message)
        assert caught.value.code is ErrorCode.message_too_large


# --- what is no message


def refusal(body: bytes) -> tuple[int, ClusterErrorCode, str]:
    with pytest.raises(Undecodable) as caught:
        decode_request(memoryview(body))
    header = caught.value.answer.header
    return header.correlation_id, ClusterErrorCode(header.error_code), header.error_message or ""


def spoilt(**fields: Any) -> bytes:
    """A Heartbeat with other fields."""
    whole = msgspec.msgpack.decode(framed(HeartbeatRequest(HEADER, [])))
    return msgspec.msgpack.encode(whole | fields)


def test_an_unknown_message_is_answered_with_its_number() -> None:
    assert refusal(spoilt(type="FetchEverything")) == (
        7,
        ClusterErrorCode.UNSUPPORTED_VERSION,
        "the message 'FetchEverything' is not known here; update the older of the two nodes",
    )


def test_a_known_message_that_is_malformed_is_answered_with_its_number() -> None:
    number, code, message = refusal(spoilt(partitions=7))
    assert (number, code) == (7, ClusterErrorCode.INVALID_REQUEST)
    assert message.startswith("Heartbeat cannot be decoded: ")
    assert "partitions" in message


def test_a_field_that_is_not_known_is_left_out() -> None:
    assert decode_request(memoryview(spoilt(of_the_future=[1, 2]))) == HeartbeatRequest(HEADER, [])


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00",
        spoilt(header=None),
        spoilt(header={"correlation_id": -(2**63)}),
        b"\xdd\xff\xff\xff\xff",
        b"GET / HTTP/1.1",
    ],
)
def test_a_request_without_a_header_ends_the_connection(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="header cannot be read"):
        decode_request(memoryview(body))


def test_an_answer_that_is_none_ends_the_connection() -> None:
    for body in (b"", spoilt(type="ReplicaState"), framed(fetched())[:-1]):
        with pytest.raises(ProtocolError, match="an answer that cannot be decoded"):
            decode_response(memoryview(body))


@pytest.mark.parametrize("hostile", [b"\x91" * 100_000, b"\x81\x01" * 100_000, b"\xa1\xff", b"\xd4\xff\x00"])
def test_what_is_nested_too_deep_or_is_no_text_is_refused(hostile: bytes) -> None:
    head = spoilt(type="MetadataProposal")
    body = bytes((head[0] + 1,)) + head[1:] + b"\xa6result" + hostile
    with pytest.raises((Undecodable, ProtocolError)):
        decode_request(memoryview(body))
    with pytest.raises(ProtocolError):
        decode_response(memoryview(body))


@pytest.mark.parametrize(
    "length", [b"\xdd\x7f\xff\xff\xff", b"\xdf\x7f\xff\xff\xff", b"\xc6\x7f\xff\xff\xff"]
)
def test_lengths_that_are_not_there_take_no_memory(length: bytes) -> None:
    head = framed(fetched())
    assert bytes(head[-1:]) == b"\x90"
    body = memoryview(bytes(head[:-1]) + length)
    tracemalloc.start()
    with pytest.raises(ProtocolError):
        decode_response(body)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1024 * 1024


def parsed_or_refused(body: bytes) -> None:
    with suppress(Undecodable, ProtocolError):
        decode_request(memoryview(body))
    with suppress(ProtocolError):
        decode_response(memoryview(body))


@given(st.binary(max_size=200))
def test_any_bytes_parse_or_are_refused(body: bytes) -> None:
    parsed_or_refused(body)


@given(any_request() | any_response(), st.data())
def test_any_wound_parses_or_is_refused(message: Any, data: st.DataObject) -> None:
    body = bytearray(framed(message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(body), 400)))
        body[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=6))
    parsed_or_refused(bytes(body))
