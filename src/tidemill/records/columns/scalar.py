"""Finds the fields of a batch's records in a loop, one record after the other.

``columns.read`` asks this for small batches and for whatever it cannot judge with whole columns. The rules
are those of ``read_records``; what is found is numbers for columns, not records.
"""

from __future__ import annotations

from array import array

import numpy as np
import numpy.typing as npt

from tidemill.records.batch import BatchHeader
from tidemill.records.record import Header, corrupt, read_bounded_varint

__all__ = ("Body", "Int64s", "read_headers", "read_one_by_one")

#: Uncompressed records.
Body = bytes | memoryview
Int64s = npt.NDArray[np.int64]

_COLUMNS = 9


def read_one_by_one(header: BatchHeader, body: Body) -> Int64s:
    """Read the nine columns of a batch. Raises ``ApiError`` where bytes do not fit.

    The columns: where a record starts and ends, start and length of key and value (-1 for none), absolute
    offset, timestamp, number of headers.
    """
    flat = array("q")
    position = 0
    for _ in range(header.record_count):
        start = position
        try:
            position = _read_record(header, body, start, flat)
        except OverflowError:
            raise corrupt("an offset or a timestamp does not fit in 64 bits") from None
    if position != len(body):
        raise corrupt(f"{len(body) - position} bytes follow the last record")
    return np.array(flat, np.int64).reshape(-1, _COLUMNS).T.copy()


def _read_record(header: BatchHeader, body: Body, start: int, out: array[int]) -> int:
    """Add the fields of the record at ``start`` to ``out``; returns where it ends.

    Raises ``OverflowError`` for what does not fit into a column.
    """
    length, position = read_bounded_varint(body, start)
    end = position + length
    if length < 0 or end > len(body):
        raise corrupt(f"a record of {length} bytes does not fit in the batch")
    timestamp_delta, position = read_bounded_varint(
        body, position + 1
    )  # behind the attributes, which mean nothing
    offset_delta, position = read_bounded_varint(body, position)
    key_length, key_start = read_bounded_varint(body, position)
    if key_length < 0:
        key_length, position = -1, key_start
    else:
        position = key_start + key_length
    value_length, value_start = read_bounded_varint(body, position)
    if value_length < 0:
        value_length, position = -1, value_start
    else:
        position = value_start + value_length
    headers, position = read_headers(body, position, end)
    if position != end:
        raise corrupt("a record's length does not fit its fields")
    if not 0 <= offset_delta <= header.last_offset_delta:
        raise corrupt(f"an offset delta of {offset_delta} lies outside the batch")
    timestamp = header.max_timestamp if header.is_append_time else header.base_timestamp + timestamp_delta
    offset = header.base_offset + offset_delta
    out.extend(
        (start, end, key_start, key_length, value_start, value_length, offset, timestamp, len(headers))
    )
    return end


def read_headers(body: Body, position: int, end: int) -> tuple[tuple[Header, ...], int]:
    """The headers whose count is at ``position`` in a record that ends at ``end``, and where they end."""
    count, position = read_bounded_varint(body, position)
    if not count:
        return (), position
    if count < 0 or count * 2 > end - position:
        raise corrupt(f"{count} headers do not fit in a record")
    headers: list[Header] = []
    for _ in range(count):
        name, position = _read_bytes(body, position)
        if name is None:
            raise corrupt("a header has no name")
        try:
            text = name.decode()
        except UnicodeDecodeError:
            raise corrupt("a header's name is not UTF-8") from None
        value, position = _read_bytes(body, position)
        headers.append((text, value))
    return tuple(headers), position


def _read_bytes(body: Body, position: int) -> tuple[bytes | None, int]:
    length, start = read_bounded_varint(body, position)
    if length < 0:
        return None, start
    end = start + length
    if end > len(body):
        raise corrupt(f"a field of {length} bytes does not fit in the batch")
    return bytes(body[start:end]), end
