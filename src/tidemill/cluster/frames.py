"""Messages as bytes: a 4-byte big-endian length, then one MessagePack map of at most 16 MiB.

Records are neither copied nor looked at. They are sent from the buffers that they were read into, between
pieces of MessagePack; a received message holds views of the buffer that it was received into.

What was received can be anything: it decodes, or ``Undecodable`` says how to answer it, or ``ProtocolError``
means that the connection has to end.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from struct import Struct
from typing import Any, Final, cast

import msgspec

from tidemill.cluster.messages import (
    MESSAGE_BYTES_MAX,
    REQUESTS,
    RESPONSES,
    ClusterErrorCode,
    ClusterRequest,
    ClusterResponse,
    ErrorResponse,
    FetchResponse,
    RequestHeader,
)
from tidemill.errors import ApiError, ErrorCode, ProtocolError

__all__ = ("Buffers", "Undecodable", "decode_request", "decode_response", "encode")

Buffers = list[bytes | bytearray | memoryview]
"""The bytes of one frame, in pieces that are sent one after the other."""

_LENGTH: Final = Struct(">I")
_ARRAY_32: Final = Struct(">BI")
_BIN_32: Final = Struct(">BI")
#: Records of at least this size are sent from where they are. MessagePack's bin 32 begins here, too.
_SPLICED_BYTES: Final = 64 * 1024
_EMPTY_ARRAY: Final = b"\x90"
_EMPTY_BIN: Final = b"\xc4\x00"
_NO_RECORDS: Final = memoryview(b"")

_encoder: Final = msgspec.msgpack.Encoder(uuid_format="bytes")
_requests: Final = msgspec.msgpack.Decoder(cast(Any, reduce(or_, REQUESTS)))
_responses: Final = msgspec.msgpack.Decoder(cast(Any, reduce(or_, RESPONSES)))

#: What msgspec raises for bytes that are no message: also for text that is not UTF-8, and for deep nesting.
_REFUSALS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class _Envelope(msgspec.Struct):
    """What can be read of a request that cannot be understood."""

    header: RequestHeader
    type: str = ""


_envelopes: Final = msgspec.msgpack.Decoder(_Envelope)
_TAGS: Final = frozenset(request.__struct_config__.tag for request in REQUESTS)


class Undecodable(Exception):
    """A request that was not understood, and the answer to it."""

    def __init__(self, answer: ErrorResponse) -> None:
        super().__init__(answer.header.error_message)
        self.answer = answer


# --- sending


def encode(message: ClusterRequest | ClusterResponse) -> Buffers:
    """The frame of a message. Raises ``ApiError`` MESSAGE_TOO_LARGE.

    Large records in it are not copied: nobody may write to their buffer until it is sent.
    """
    frame = _spliced(message) if isinstance(message, FetchResponse) else None
    if frame is None:
        whole = bytearray(_LENGTH.size)
        _encoder.encode_into(message, whole, _LENGTH.size)
        frame = [whole]
    length = sum(map(len, frame)) - _LENGTH.size
    if length > MESSAGE_BYTES_MAX:
        raise ApiError(
            ErrorCode.message_too_large,
            f"a {type(message).__name__} of {length} bytes cannot be sent to another node: at most "
            f"{MESSAGE_BYTES_MAX} are allowed; ask for less at once",
        )
    _LENGTH.pack_into(cast(bytearray, frame[0]), 0, length)
    return frame


def _spliced(message: FetchResponse) -> Buffers | None:
    """The same bytes as the encoder's, with large records as pieces of their own; None if there are none.

    It relies on the order of fields: ``partitions`` ends a message, ``records`` end a partition.
    """
    if not any(len(fetched.records) >= _SPLICED_BYTES for fetched in message.partitions):
        return None
    head = bytearray(_LENGTH.size)
    _encoder.encode_into(FetchResponse(message.header, []), head, _LENGTH.size)
    assert head.endswith(_EMPTY_ARRAY)
    del head[-1:]
    head += _array_header(len(message.partitions))
    pieces: Buffers = [head]
    for fetched in message.partitions:
        if len(fetched.records) < _SPLICED_BYTES:
            _encoder.encode_into(fetched, head, -1)
            continue
        _encoder.encode_into(msgspec.structs.replace(fetched, records=_NO_RECORDS), head, -1)
        assert head.endswith(_EMPTY_BIN)
        del head[-2:]
        head += _BIN_32.pack(0xC6, len(fetched.records))
        head = bytearray()
        pieces += (fetched.records, head)
    return pieces if head else pieces[:-1]


def _array_header(count: int) -> bytes:
    if count < 16:
        return bytes((0x90 | count,))
    if count < 65_536:
        return b"\xdc" + count.to_bytes(2, "big")
    return _ARRAY_32.pack(0xDD, count)


# --- receiving


def decode_request(frame: memoryview) -> ClusterRequest:
    """The request in a frame, which must not be written to any more.

    Raises ``Undecodable`` if it can be answered, ``ProtocolError`` if not even its header can be read.
    """
    try:
        return cast(ClusterRequest, _requests.decode(frame))
    except _REFUSALS as error:
        raise _answerable(frame, error) from error


def decode_response(frame: memoryview) -> ClusterResponse:
    """The answer in a frame, which must not be written to any more. Raises ``ProtocolError``."""
    try:
        return cast(ClusterResponse, _responses.decode(frame))
    except _REFUSALS as error:
        raise ProtocolError(f"an answer that cannot be decoded: {error}") from error


def _answerable(frame: memoryview, problem: Exception) -> Undecodable:
    try:
        envelope = _envelopes.decode(frame)
    except _REFUSALS as error:
        raise ProtocolError(f"a request whose header cannot be read: {error}") from error
    if envelope.type in _TAGS:
        code, message = ClusterErrorCode.INVALID_REQUEST, f"{envelope.type} cannot be decoded: {problem}"
    else:
        code = ClusterErrorCode.UNSUPPORTED_VERSION
        message = f"the message {envelope.type[:40]!r} is not known here; update the older of the two nodes"
    return Undecodable(ErrorResponse(envelope.header.answer(code, message)))
