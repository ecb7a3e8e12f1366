"""Decoding of requests, and for our own client of responses, from bytes to kio's entities.

Rules:

- Any bytes either decode or raise ProtocolError, in time and memory that are bounded by the size of the
  bytes. The connection is closed on ProtocolError: there is no way to find the start of the next request
  that can be trusted.
- One exception is made by the protocol itself: an ApiVersions request of a version that is not served has
  a readable header, so that it can be answered with UNSUPPORTED_VERSION in the format of v0.
- Frames are read-only buffers without their 4-byte length. Entities do not keep a reference to the frame,
  but for the records of a large Produce request, which are views of it.
- kio gives times as ``timedelta`` or ``datetime`` and error codes as ``ErrorCode``; ``ms`` turns times
  into numbers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from tidemill.errors import ProtocolError
from tidemill.wire.apis import (
    API_VERSIONS_KEY,
    PRODUCE,
    Api,
    find_api,
    is_flexible,
    is_served,
    request_class,
    response_class,
    response_header_version,
)
from tidemill.wire.guard import (
    MAX_STRING_BYTES,
    Buffer,
    Edit,
    TooManyElements,
    find_arrays,
    read_uvarint,
    walk,
)
from tidemill.wire.schema import FieldSpec, fields_of

if TYPE_CHECKING:
    from tidemill.wire.schema import EntityClass

__all__ = (
    "MAX_REQUEST_ELEMENTS",
    "MAX_RESPONSE_ELEMENTS",
    "QUICK_REQUEST_ELEMENTS",
    "RequestHeader",
    "TooManyElements",
    "decode_entity",
    "decode_large_request",
    "decode_request",
    "decode_response",
    "load_messages",
    "ms",
    "parse_header",
)

MAX_REQUEST_ELEMENTS: Final = 100_000
"""The most array elements in one request, all arrays together.

Ten times what a fetch of ten thousand partitions has (which decodes in 3 ms).
"""
QUICK_REQUEST_ELEMENTS: Final = 4_000
"""The most array elements in a request that the event loop decodes, which takes at most about 10 ms.

One with more is decoded in a thread, in pieces.
"""
_FEWER_ELEMENTS: Final = {0: 20_000, 19: 20_000}
"""The most array elements for APIs (Produce, CreateTopics) whose elements are costly to decode."""
MAX_RESPONSE_ELEMENTS: Final = 4_000_000
"""The most array elements in a response to our own client."""

Decode = Callable[[Any, Buffer, int], tuple[Any, int]]
"""A decoder: takes a class, bytes and a position; gives the value and its size."""

_PREFIX_BYTES: Final = 8
#: No limit: more than any length can say.
_ANY_STRING_BYTES: Final = 2**36
_METADATA_KEY: Final = 3
#: From this size on, records of a Produce request are not copied but become views of the frame.
_LIFT_MIN_BYTES: Final = 16 * 1024
_CLIENT_ID_AT: Final = 10
_read_header: Final = Struct(">hhih").unpack_from
_read_prefix: Final = Struct(">hhi").unpack_from
_read_correlation_id: Final = Struct(">i").unpack_from


@dataclass(slots=True)
class RequestHeader:
    """The header of a request."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    body_offset: int
    """The position in the frame at which the body starts."""


def parse_header(frame: Buffer) -> RequestHeader:
    """Read the header of a request. Raises ProtocolError for an API or a version that is not served.

    ApiVersions alone is read whatever its version is: ask ``is_served``, and answer in the format of v0.
    """
    try:
        api_key, api_version, correlation_id, client_id_length = _read_header(frame, 0)
        if not is_served(api_key, api_version):
            return _header_of_unserved(api_key, api_version, correlation_id)
        position = _CLIENT_ID_AT
        client_id = None
        if client_id_length >= 0:
            position += client_id_length
            client_id = str(frame[_CLIENT_ID_AT:position], "utf-8")
        elif client_id_length != -1:
            raise ProtocolError(f"the client id has the length {client_id_length}")
        if is_flexible(api_key, api_version):
            if frame[position]:
                position = _skip_header_tags(frame, position)
            else:
                position += 1
    except struct.error:
        return _header_of_short_frame(frame)
    except IndexError:
        raise ProtocolError(f"a request header cut short in a frame of {len(frame)} bytes") from None
    except UnicodeDecodeError:
        raise ProtocolError("a client id that is not UTF-8") from None
    if position > len(frame):
        raise ProtocolError(f"a request header cut short in a frame of {len(frame)} bytes")
    return RequestHeader(api_key, api_version, correlation_id, client_id, position)


def decode_request(
    header: RequestHeader,
    frame: Buffer,
    max_elements: int = MAX_REQUEST_ELEMENTS,
    decode: Decode | None = None,
) -> Any:
    """The body of a request as kio's entity.

    Raises ProtocolError for anything that is not exactly such a body, and ``TooManyElements`` for one that
    may be well-formed but has more than ``max_elements``.
    """
    api_key, api_version = header.api_key, header.api_version
    if not is_served(api_key, api_version):
        raise _not_served(api_key, api_version)
    entity = request_class(api_key, api_version)
    if api_key == PRODUCE and len(frame) >= _LIFT_MIN_BYTES:
        return _decode_large_produce(entity, frame, header.body_offset, max_elements, decode)
    try:
        return decode_entity(entity, frame, header.body_offset, max_elements, decode=decode)
    except ProtocolError:
        if not _asks_for_all_topics_like_librdkafka(header, frame):
            raise
        return decode_entity(entity, frame, header.body_offset + 3, max_elements, decode=decode)


def decode_large_request(header: RequestHeader, frame: Buffer, breathe: Callable[[], None]) -> Any:
    """``decode_request`` for a thread: structs are decoded one by one.

    A call of the native decoder keeps all other threads waiting. ``breathe`` is called between structs, so
    that they have their turn.
    """

    def decode(entity: EntityClass, body: Buffer, offset: int) -> tuple[Any, int]:
        breathe()
        if not any(spec.is_array and spec.struct is not None for spec in fields_of(entity)):
            value, size = _reader(entity)(body, offset)
            return value, size
        arrays: dict[str, tuple[Any, ...]] = {}
        parts: list[Buffer] = []
        behind = offset

        def take_array(spec: FieldSpec, start: int, first: int, count: int) -> int:
            nonlocal behind
            # The native decoder sees an empty array; its structs are decoded below.
            parts.extend((body[behind:start], b"\x01" if entity.__flexible__ else bytes(4)))
            elements = []
            behind = first
            for _ in range(count):
                element, size = decode(spec.struct, body, behind)
                elements.append(element)
                behind += size
            arrays[spec.name] = tuple(elements)
            return behind

        end = find_arrays(entity, body, offset, take_array)
        parts.append(body[behind:end])
        value, _ = _reader(entity)(b"".join(parts), 0)
        for name, elements in arrays.items():
            object.__setattr__(value, name, elements)
        return value, end - offset

    limit = _FEWER_ELEMENTS.get(header.api_key, MAX_REQUEST_ELEMENTS)
    return decode_request(header, frame, limit, decode)


def _asks_for_all_topics_like_librdkafka(header: RequestHeader, frame: Buffer) -> bool:
    """Whether the request has librdkafka's three stray zero bytes behind a null list of topics.

    librdkafka keeps four bytes for the count of topics, and in flexible versions forgets to take three of
    them back when the list is null, which is how it asks for all topics. Kafka does not notice.
    """
    start = header.body_offset
    return (
        header.api_key == _METADATA_KEY
        and is_flexible(header.api_key, header.api_version)
        and frame[start : start + 4] == bytes(4)
    )


def _decode_large_produce(
    entity: EntityClass, frame: Buffer, offset: int, max_elements: int, decode: Decode | None
) -> Any:
    """Decode a Produce request whose records become views of the frame instead of copies."""
    lifted: list[tuple[int, int]] = []
    request = decode_entity(entity, frame, offset, max_elements, lifted, decode)
    view = memoryview(frame)
    slices = iter(lifted)
    for topic in request.topic_data:
        for partition in topic.partition_data:
            if partition.records is not None:
                start, end = next(slices)
                object.__setattr__(partition, "records", view[start:end])
    return request


def decode_response(api_key: int, api_version: int, frame: Buffer) -> tuple[int, Any]:
    """The correlation id and the body of a response.

    Raises ProtocolError for anything that is not exactly such a response.
    """
    try:
        correlation_id: int = _read_correlation_id(frame, 0)[0]
        offset = 4
        if response_header_version(api_key, api_version) == 1:
            offset = _skip_header_tags(frame, offset)
    except (struct.error, IndexError):
        raise ProtocolError(f"a response header cut short in a frame of {len(frame)} bytes") from None
    entity = response_class(api_key, api_version)
    # A node may send longer strings than it would accept.
    return correlation_id, decode_entity(
        entity, frame, offset, MAX_RESPONSE_ELEMENTS, max_string_bytes=_ANY_STRING_BYTES
    )


def decode_entity(
    entity: EntityClass,
    frame: Buffer,
    offset: int,
    max_elements: int,
    lifted: list[tuple[int, int]] | None = None,
    decode: Decode | None = None,
    max_string_bytes: int = MAX_STRING_BYTES,
    *,
    whole: bool = True,
) -> Any:
    """Decode one value of kio's class ``entity`` from ``frame``, from ``offset`` to the end.

    Anything may follow a value that is not the ``whole``.

    With a list ``lifted``, fields of records come out empty and their positions are put into the list.
    ``decode`` is used instead of the native decoder, on bytes that were walked.
    """
    try:
        edits = walk(entity, frame, offset, max_elements, lifted, max_string_bytes, whole=whole)
    except ProtocolError as error:
        raise type(error)(f"{_title(entity)}: {error.message}") from None
    except (IndexError, struct.error):
        raise ProtocolError(f"{_title(entity)}: the message is cut short") from None
    if edits:
        frame, offset = _apply(edits, frame, offset), 0
    try:
        value, size = decode(entity, frame, offset) if decode else _reader(entity)(frame, offset)
    except Exception as error:
        raise ProtocolError(f"{_title(entity)}: {error}") from error
    except BaseException as error:
        # A panic in the native reader is no subclass of Exception, and its class cannot be imported.
        if type(error).__name__ != "PanicException":
            raise
        raise ProtocolError(f"{_title(entity)}: the decoder failed: {error}") from None
    if whole and offset + size != len(frame):
        raise ProtocolError(f"{_title(entity)}: the decoder read {size} bytes of {len(frame) - offset}")
    return value


def load_messages(api: Api) -> None:
    """Import all that reads and writes an API's messages, so that the first request need not wait for it."""
    for version in api.versions:
        entity: EntityClass = request_class(api.key, version)
        _reader(entity)
        response_class(api.key, version)


def ms(value: timedelta | datetime | None) -> int:
    """A time as kio gives it, in milliseconds. None, which is how kio gives a missing time, is -1.

    >>> ms(timedelta(seconds=1.5)), ms(None)
    (1500, -1)
    """
    if value is None:
        return -1
    if isinstance(value, datetime):
        value = value - _EPOCH
    return (value.days * 86_400 + value.seconds) * 1_000 + round(value.microseconds / 1_000)


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@cache
def _reader(entity: EntityClass) -> Any:
    from kio.serial import entity_reader

    return entity_reader(entity)


def _skip_header_tags(frame: Buffer, position: int) -> int:
    """The position behind the tagged fields of a header. None of them are known, so all are skipped."""
    count, position = read_uvarint(frame, position)
    if count * 2 > len(frame) - position:
        raise ProtocolError(f"{count} tagged fields in a header with {len(frame) - position} bytes left")
    for _ in range(count):
        _, position = read_uvarint(frame, position)
        size, position = read_uvarint(frame, position)
        position += size
    return position


def _apply(edits: list[Edit], frame: Buffer, offset: int) -> bytes:
    """The body with the edits made.

    Sizes of tagged fields around an edit stay as they are: kio ignores them.
    """
    parts: list[Buffer] = []
    for start, end, replacement in edits:
        parts += (frame[offset:start], replacement)
        offset = end
    parts.append(frame[offset:])
    return b"".join(parts)


def _header_of_unserved(api_key: int, api_version: int, correlation_id: int) -> RequestHeader:
    if api_key != API_VERSIONS_KEY:
        raise _not_served(api_key, api_version)
    return RequestHeader(api_key, api_version, correlation_id, None, _PREFIX_BYTES)


def _header_of_short_frame(frame: Buffer) -> RequestHeader:
    """The header of a frame that is too short for a client id.

    It is enough for an ApiVersions request of an unknown version; all others raise ``ProtocolError``.
    """
    try:
        api_key, api_version, correlation_id = _read_prefix(frame, 0)
    except struct.error:
        raise ProtocolError(f"a frame of {len(frame)} bytes, too short for a request header") from None
    if is_served(api_key, api_version):
        raise ProtocolError(f"a request header cut short in a frame of {len(frame)} bytes")
    return _header_of_unserved(api_key, api_version, correlation_id)


def _not_served(api_key: int, api_version: int) -> ProtocolError:
    api = find_api(api_key)
    if api is None:
        return ProtocolError(f"API key {api_key} (version {api_version}) is not served")
    return ProtocolError(
        f"{api.name} (API key {api_key}) version {api_version} is not served: "
        f"{api.min_version} to {api.max_version} are"
    )


def _title(entity: EntityClass) -> str:
    return f"{entity.__name__} v{entity.__version__}"
