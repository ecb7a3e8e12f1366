"""Values of single records: what a Python program may give, and the bytes that are written."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any, Final

from tidemill.records.record import Header, Record

__all__ = ("DELIVER_AT_HEADER", "as_bytes", "as_record")

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
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


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
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    made: list[Header] = [(name, as_bytes(each)) for name, each in pairs]
    if delay is not None:
        made.append((DELIVER_AT_HEADER, str(now_ms + round(delay * 1000)).encode()))
    return Record(as_bytes(key), as_bytes(value), timestamp_ms or now_ms, tuple(made))
