"""Control batches: the markers that end a transaction in a partition."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from functools import lru_cache
from typing import Final, NamedTuple

from tidemill.errors import ApiError, ErrorCode
from tidemill.records.batch import HEADER_BYTES, NO_SEQUENCE, pack_batch
from tidemill.records.record import Record, build_batch, read_records

__all__ = ("MARKER_BATCH_BYTES", "Marker", "MarkerEnd", "build_markers", "read_marker")

_TRANSACTIONAL_CONTROL = 0x10 | 0x20
_KEY = struct.Struct(">hh")  # version, type
_VALUE = struct.Struct(">hi")  # version, coordinator epoch
_ABORT = 0
_COMMIT = 1


class Marker(NamedTuple):
    """A transaction marker: whether the transaction was committed, and its coordinator's epoch."""

    commit: bool
    coordinator_epoch: int


MarkerEnd = tuple[int, int, Marker]
"""The end of a transaction: its producer's id and epoch, and the marker."""


def build_markers(
    ends: Iterable[MarkerEnd], *, timestamp_ms: int, base_offset: int, leader_epoch: int
) -> bytes:
    """Build control batches of ``MARKER_BATCH_BYTES`` each, with offsets from ``base_offset`` on.

    >>> batch = build_markers([(7, 0, Marker(True, 3))], timestamp_ms=1, base_offset=40, leader_epoch=0)
    >>> read_marker(batch)
    Marker(commit=True, coordinator_epoch=3)
    """
    return b"".join(
        pack_batch(
            _body(marker),
            base_offset=offset,
            leader_epoch=leader_epoch,
            attributes=_TRANSACTIONAL_CONTROL,
            last_offset_delta=0,
            timestamps=(timestamp_ms, timestamp_ms),
            producer=(producer_id, producer_epoch, NO_SEQUENCE),
            record_count=1,
        )
        for offset, (producer_id, producer_epoch, marker) in enumerate(ends, base_offset)
    )


@lru_cache(maxsize=64)
def _body(marker: Marker) -> bytes:
    """The record of a marker's batch. The ends of thousands of transactions have the same one."""
    key = _KEY.pack(0, _COMMIT if marker.commit else _ABORT)
    return build_batch([Record(key, _VALUE.pack(0, marker.coordinator_epoch), 0)])[HEADER_BYTES:]


#: The size of a marker's batch: all are of the same size.
MARKER_BATCH_BYTES: Final = HEADER_BYTES + len(_body(Marker(commit=True, coordinator_epoch=0)))


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
