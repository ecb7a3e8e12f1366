"""Control batches: the markers that end a transaction in a partition."""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

from tidemill.errors import ApiError, ErrorCode
from tidemill.records.batch import HEADER_BYTES, NO_SEQUENCE, pack_batch
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
    return pack_batch(
        _body(marker),
        base_offset=0,
        leader_epoch=leader_epoch,
        attributes=_TRANSACTIONAL_CONTROL,
        last_offset_delta=0,
        timestamps=(timestamp_ms, timestamp_ms),
        producer=(producer_id, producer_epoch, NO_SEQUENCE),
        record_count=1,
    )


@lru_cache(maxsize=64)
def _body(marker: Marker) -> bytes:
    """The record of a marker's batch. The ends of thousands of transactions have the same one."""
    key = _KEY.pack(0, _COMMIT if marker.commit else _ABORT)
    return build_batch([Record(key, _VALUE.pack(0, marker.coordinator_epoch), 0)])[HEADER_BYTES:]


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
