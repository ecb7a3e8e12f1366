"""Taking records out of fetched bytes."""

from __future__ import annotations

import pytest

from tidemill.client.consuming.batch_reader import FetchedBatches, _wanted_batches
from tidemill.client.consuming.record_reader import _messages_of_batch
from tidemill.errors import ApiError, ErrorCode
from tidemill.records.record import Record, build_batch

FIRST = build_batch([Record(None, b"a"), Record(None, b"b"), Record(None, b"c")], base_offset=10)
SECOND = build_batch([Record(None, b"d")], base_offset=13)
CONTROL_BIT = 0x20


def values(data: bytes, offset: int) -> tuple[list[bytes | None], int]:
    """What a reader at ``offset`` gets of fetched bytes, and where it goes on."""
    found = list(_wanted_batches(data, [], "t-0"))
    next_offset = max((behind for behind, _ in found), default=offset)
    batches = [batch for _, batch in found if batch is not None]
    fetched = FetchedBatches(("t", 0), offset, batches, next_offset, -1)
    messages = [message for batch in batches for message in _messages_of_batch(fetched, batch)]
    return [message.record.value for message in messages], next_offset


def test_records_below_the_wanted_offset_are_left_out() -> None:
    assert values(FIRST + SECOND, 11) == ([b"b", b"c", b"d"], 14)


def test_batch_that_is_cut_short_is_left_for_the_next_fetch() -> None:
    assert values(FIRST + SECOND[:-1], 10) == ([b"a", b"b", b"c"], 13)


def test_nothing_fetched_leaves_the_position() -> None:
    assert values(b"", 10) == ([], 10)


def test_control_batches_move_the_position_and_give_no_records() -> None:
    # A kind of control record that nobody knows yet.
    control = build_batch([Record(b"\0\0\0\7", b"")], base_offset=13, attributes=CONTROL_BIT)
    assert values(FIRST + control, 10) == ([b"a", b"b", b"c"], 14)


def test_flipped_bit_is_reported_with_its_place() -> None:
    broken = bytearray(FIRST)
    broken[-1] ^= 1
    with pytest.raises(ApiError, match="t-0: the batch at offset 10") as caught:
        values(bytes(broken), 10)
    assert caught.value.code == ErrorCode.corrupt_message
