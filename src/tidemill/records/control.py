"""Control batches: the markers that end a transaction in a partition."""

from __future__ import annotations

import struct
from typing import NamedTuple

from tidemill.errors import ApiError, ErrorCode
from tidemill.records.record import Record, build_batch, read_records

__all__ = ("Marker", "build_marker", "read_marker")

_TRANSACTIONAL_CONTROL = 0x10 | 0x20
_KEY = struct.Struct(">hh")  # version, type
_VALUE = struct.Struct(">hi")  # version, coordinator epoch
_ABORT = 0
_COMMIT = 1


class Marker(NamedTuple):
    """A transaction marker: whether the transaction was committed, and its coordinator's epoch."""

    commit: bool
    coordinator_epoch: int


def build_marker(
    marker: Marker, *, producer_id: int, producer_epoch: int, timestamp_ms: int, leader_epoch: int = -1
) -> bytes:
    """Build a control batch with one marker.

    >>> batch = build_marker(Marker(True, 3), producer_id=7, producer_epoch=0, timestamp_ms=1)
    >>> read_marker(batch)
    Marker(commit=True, coordinator_epoch=3)
    """
    record = Record(
        _KEY.pack(0, _COMMIT if marker.commit else _ABORT),
        _VALUE.pack(0, marker.coordinator_epoch),
        timestamp_ms=timestamp_ms,
    )
    return build_batch(
        [record],
        leader_epoch=leader_epoch,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        attributes=_TRANSACTIONAL_CONTROL,
    )


def read_marker(data: bytes | memoryview) -> Marker | None:
    """The marker in a control batch; None for a control record of another kind."""
    record = next(iter(read_records(data)))
    if record.key is None or len(record.key) < _KEY.size:
        raise ApiError(ErrorCode.corrupt_message, "a control record has no type")
    _, kind = _KEY.unpack_from(record.key)
    if kind not in (_ABORT, _COMMIT):
        return None
    if record.value is None or len(record.value) < _VALUE.size:
        raise ApiError(ErrorCode.corrupt_message, "a transaction marker has no coordinator epoch")
    return Marker(kind == _COMMIT, _VALUE.unpack_from(record.value)[1])
