r"""The output of ``topic consume``: messages by a template, or as JSON objects.

=====  =====================================  =====  ==============================
%t     topic                                  %T     timestamp, milliseconds
%p     partition                              %h     headers: name=value,name=value
%o     offset                                 %s     size of the value in bytes
%k     key                                    %%     a percent sign
%v     value
=====  =====================================  =====  ==============================

``\n``, ``\t``, ``\r``, ``\0``, ``\\`` and ``\xHH`` are understood. A null is written as nothing.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from tidemill.client.consuming.record_reader import Message

__all__ = (
    "compile_template",
    "message_as_json",
    "text_or_base64",
)

_Part = Callable[["Message"], bytes]

_ESCAPES: Final = {"n": b"\n", "t": b"\t", "r": b"\r", "0": b"\0", "\\": b"\\"}
_TOKEN = re.compile(r"%(.?)|\\x([0-9A-Fa-f]{2})|\\(.?)|[^%\\]+", re.DOTALL)


def _headers(message: Message) -> bytes:
    return b",".join(name.encode() + b"=" + (value or b"") for name, value in message.record.headers)


_FIELDS: Final[dict[str, _Part]] = {
    "t": lambda message: message.topic.encode(),
    "p": lambda message: b"%d" % message.partition,
    "o": lambda message: b"%d" % message.record.offset,
    "k": lambda message: message.record.key or b"",
    "v": lambda message: message.record.value or b"",
    "T": lambda message: b"%d" % message.record.timestamp_ms,
    "h": _headers,
    "s": lambda message: b"%d" % len(message.record.value or b""),
}


def compile_template(template: str) -> Callable[[Message], bytes]:
    """Compile a template to a function that writes a message. Raises ValueError for an unknown part."""
    parts: list[bytes | _Part] = []
    for match in _TOKEN.finditer(template):
        field, hexadecimal, escape = match[1], match[2], match[3]
        if field is not None:
            parts.append(b"%" if field == "%" else _field(field))
        elif hexadecimal is not None:
            parts.append(bytes.fromhex(hexadecimal))
        elif escape is not None:
            parts.append(_escape(escape))
        else:
            parts.append(match[0].encode("utf-8", "surrogateescape"))

    def write(message: Message) -> bytes:
        return b"".join([part if isinstance(part, bytes) else part(message) for part in parts])

    return write


def _field(name: str) -> _Part:
    if name not in _FIELDS:
        known = " ".join(f"%{each}" for each in _FIELDS)
        raise ValueError(f"%{name} has no meaning in a template: use {known} or %%")
    return _FIELDS[name]


def _escape(name: str) -> bytes:
    if name not in _ESCAPES:
        raise ValueError(f"\\{name} has no meaning in a template: use \\n \\t \\r \\0 \\xHH or \\\\")
    return _ESCAPES[name]


def message_as_json(message: Message) -> dict[str, Any]:
    """The message as an object that ``topic produce --json`` reads. Bytes that are no UTF-8 become base64."""
    record = message.record
    return {
        "topic": message.topic,
        "partition": message.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
        **text_or_base64("key", record.key),
        **text_or_base64("value", record.value),
        "headers": [{"name": name, **text_or_base64("value", value)} for name, value in record.headers],
    }


def text_or_base64(name: str, data: bytes | None) -> dict[str, str | None]:
    """``{name: text}``, or ``{name: base64, name_encoding: "base64"}``.

    >>> text_or_base64("key", b"\\xff")
    {'key': '/w==', 'key_encoding': 'base64'}
    """
    if data is None:
        return {name: None}
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        return {name: base64.b64encode(data).decode(), f"{name}_encoding": "base64"}
