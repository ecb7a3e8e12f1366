"""Parsing of input lines into records, for ``topic produce``."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from tidemill.errors import ApiError, ErrorCode
from tidemill.records.record import Header, Record

__all__ = (
    "LineParser",
    "ToSend",
    "json_line",
    "plain_line",
)

_JSON_FIELDS: Final = frozenset(
    {
        "headers",
        "key",
        "key_encoding",
        "offset",
        "partition",
        "timestamp",
        "topic",
        "value",
        "value_encoding",
    }
)


class ToSend(NamedTuple):
    """A record to send, and the partition that its line names."""

    record: Record
    partition: int | None = None


LineParser = Callable[[bytes, int], ToSend]
"""Parses a line without its end, at the time now; raises ``ApiError`` INVALID_RECORD."""


def plain_line(separator: bytes | None, headers: Sequence[Header]) -> LineParser:
    """The parser of lines that are a value, or a key and a value with ``separator`` between them."""

    def parse(line: bytes, now_ms: int) -> ToSend:
        key: bytes | None = None
        value = line
        if separator is not None:
            key, found, value = line.partition(separator)
            if not found:
                raise _invalid(f"there is no key separator {separator!r} in {_shown(line)}")
        return ToSend(Record(key, value, now_ms, tuple(headers)))

    return parse


def json_line(headers: Sequence[Header]) -> LineParser:
    """The parser of lines that are JSON objects, as ``consume`` writes them.

    Key, value, headers, partition and timestamp are used; the record gets a new topic and offset.
    """

    def parse(line: bytes, now_ms: int) -> ToSend:
        try:
            given = json.loads(line)
        except ValueError as error:
            raise _invalid(f"{_shown(line)} is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise _invalid(f"{_shown(line)} is not a JSON object")
        if unknown := sorted(given.keys() - _JSON_FIELDS):
            raise _invalid(f"unknown field {unknown[0]!r}; known are {', '.join(sorted(_JSON_FIELDS))}")
        record = Record(
            _content(given, "key"),
            _content(given, "value"),
            _whole(given, "timestamp", now_ms),
            (*headers, *_headers(given.get("headers"))),
        )
        return ToSend(record, _whole(given, "partition", None))

    return parse


def _content(given: dict[str, Any], name: str) -> bytes | None:
    value, encoding = given.get(name), given.get(f"{name}_encoding")
    if value is None:
        return None
    if encoding not in (None, "base64"):
        raise _invalid(f"{name}_encoding can be 'base64' only, not {encoding!r}")
    if not isinstance(value, str):
        if encoding is not None:
            raise _invalid(f"{name} in base64 must be a string")
        # A value that is not text is sent as its JSON.
        return json.dumps(value, ensure_ascii=False).encode()
    if encoding is None:
        return value.encode("utf-8", "surrogatepass")
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise _invalid(f"{name} is not base64: {error}") from None


def _whole(given: dict[str, Any], name: str, default: Any) -> Any:
    value = given.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise _invalid(f"{name} must be a whole number, not {value!r}")
    return value


def _headers(given: Any) -> list[Header]:
    if given is None:
        return []
    if isinstance(given, dict):
        given = [{"name": name, "value": value} for name, value in given.items()]
    if not isinstance(given, list):
        raise _invalid("headers must be an object, or a list of objects with name and value")
    headers: list[Header] = []
    for header in given:
        if not isinstance(header, dict) or not isinstance(header.get("name"), str):
            raise _invalid("each header must be an object with a name and a value")
        headers.append((header["name"], _content(header, "value")))
    return headers


def _invalid(what: str) -> ApiError:
    return ApiError(ErrorCode.invalid_record, what)


def _shown(line: bytes) -> str:
    return repr(line[:60].decode("utf-8", "backslashreplace"))
