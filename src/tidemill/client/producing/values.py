"""Values of single records: what a Python program may give, and the bytes that are written."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from tidemill.client.arguments import millis, shown
from tidemill.errors import ConfigError
from tidemill.records.record import Header, Record

__all__ = ("DELIVER_AT_HEADER", "as_bytes", "as_record", "keys_and_values")

_PAIR: Final = 2

#: The header that names the time, in milliseconds, before which a share group does not hand a record out.
DELIVER_AT_HEADER: Final = "tidemill-deliver-at"


def as_bytes(value: Any) -> bytes | None:
    """Bytes and None as they are, text as UTF-8, everything else as JSON.

    >>> as_bytes("naïve"), as_bytes({"to": "ann"})
    (b'na\\xc3\\xafve', b'{"to":"ann"}')
    """
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str):
        return value.encode()
    try:
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{shown(value)} cannot be written: {error}. Give bytes, text, or what JSON can hold"
        ) from error


def as_record(
    value: Any,
    *,
    key: Any = None,
    headers: Mapping[str, Any] | Iterable[tuple[str, Any]] = (),
    timestamp_ms: int | None = None,
    delay: float | None = None,
) -> Record:
    """A record of the given parts. ``delay`` is in seconds from now, for share groups that heed it."""
    now_ms = int(time.time() * 1000)
    made = _headers(headers)
    if delay is not None:
        made.append((DELIVER_AT_HEADER, str(now_ms + millis("delay", delay)).encode()))
    return Record(as_bytes(key), as_bytes(value), timestamp_ms or now_ms, tuple(made))


def keys_and_values(values: Any) -> Iterator[tuple[Any, Any]]:
    """What ``produce_many`` is given: values, or pairs of key and value.

    >>> list(keys_and_values(["a", ("k", "b")]))
    [(None, 'a'), ('k', 'b')]
    """
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise ConfigError(f"several values are a list of them, not {shown(values)}")
    for each in values:
        if not isinstance(each, tuple):
            yield None, each
            continue
        if len(each) != _PAIR:
            raise ConfigError(f"a record is a value, or a pair of key and value, not {shown(each)}")
        yield each


def _headers(headers: Any) -> list[Header]:
    try:
        pairs = [
            (name, each) for name, each in (headers.items() if isinstance(headers, Mapping) else headers)
        ]
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"headers are values by name, as in {{'type': 'order'}}, not {shown(headers)}"
        ) from error
    for name, _ in pairs:
        if not isinstance(name, str):
            raise ConfigError(f"a header's name is text, not {shown(name)}")
    return [(name, as_bytes(each)) for name, each in pairs]
