"""Checking batches as they are read from a log: every one that leaves it has been through here.

A checksum covers a batch from its attributes on. What stands before is checked by what the log knows: the
length leads to the next batch, and the base offset follows on from the batch before. The leader epoch is
known twice, here and in the history of epochs, which has a checksum: where the two differ the history is
right, and the batch is to leave with what that says. It takes a step of a loop per batch and none per record:
a microsecond for a small batch.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from tidemill.log.epochs import NO_END, EpochHistory
from tidemill.records.batch import CRC_START, HEADER_BYTES, LENGTH_PREFIX_BYTES
from tidemill.records.checksum import crc32c

__all__ = ("CheckedBatches", "check_batches", "restamp")

#: Base offset, batch length, leader epoch, magic, checksum, attributes, last offset delta.
_CHECKED_FIELDS = struct.Struct(">qiibIhi")
_MAGIC = 2
_EPOCH = struct.Struct(">i")
_EPOCH_POSITION = 12
_LENGTH_MIN = HEADER_BYTES - LENGTH_PREFIX_BYTES


class CheckedBatches(NamedTuple):
    """How many of the checked bytes are whole, sound batches, and what is wrong behind them."""

    size_bytes: int
    batch_count: int
    #: The base offset that the next batch must have.
    next_offset: int
    #: What is wrong with the next batch; empty if it is just cut short, or not asked for.
    defect: str
    #: Batches with a wrong leader epoch: (position, leader epoch that it should have).
    misstamped: Sequence[tuple[int, int]] = ()


def check_batches(
    data: memoryview,
    expected_offset: int,
    epochs: EpochHistory,
    *,
    stop_offset: int = NO_END,
    max_batches: int = NO_END,
) -> CheckedBatches:
    """Check the batches that ``data`` begins with, the first of which must have ``expected_offset``.

    Ends at the first one that is not sound or not whole, at ``max_batches``, and before the batch that holds
    ``stop_offset``; of that one everything in front of the checksum has been checked.
    """
    unpack, checksum = _CHECKED_FIELDS.unpack_from, crc32c
    position, end, count, defect = 0, len(data), 0, ""
    misstamped: list[tuple[int, int]] = []
    epoch, epoch_end = epochs.span_at(expected_offset)
    while count < max_batches and end - position >= HEADER_BYTES:
        base_offset, length, found_epoch, magic, crc, _, delta = unpack(data, position)
        if base_offset >= epoch_end:
            epoch, epoch_end = epochs.span_at(base_offset)
        if base_offset != expected_offset or magic != _MAGIC or length < _LENGTH_MIN or delta < 0:
            defect = _defect(base_offset, expected_offset, magic, length, delta)
            break
        if base_offset + delta >= stop_offset:
            break
        behind = position + LENGTH_PREFIX_BYTES + length
        if behind > end:
            break
        if checksum(data[position + CRC_START : behind]) != crc:
            defect = "the checksum does not fit the bytes"
            break
        if found_epoch != epoch and epoch >= 0:
            misstamped.append((position, epoch))
        position, expected_offset = behind, base_offset + delta + 1
        count += 1
    return CheckedBatches(position, count, expected_offset, defect, misstamped)


def restamp(data: memoryview, checked: CheckedBatches) -> memoryview:
    """The sound batches of ``checked``, with the leader epochs that they should have."""
    if not checked.misstamped:
        return data[: checked.size_bytes]
    copy = bytearray(data[: checked.size_bytes])
    for position, epoch in checked.misstamped:
        _EPOCH.pack_into(copy, position + _EPOCH_POSITION, epoch)
    return memoryview(copy)


def _defect(base_offset: int, expected_offset: int, magic: int, length: int, delta: int) -> str:
    if magic != _MAGIC:
        return f"record format {magic} instead of {_MAGIC}"
    if length < _LENGTH_MIN:
        return f"a batch length of {length} is too short"
    if delta < 0:
        return f"a negative last offset delta of {delta}"
    return f"offset {base_offset} where {expected_offset} must be"
