"""Checkpoints in bytes: what was written comes back, and nothing else is taken for one."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cursors.checkpoint import Checkpoint, Entry, pack_finished, unpack_finished
from tidemill.cursors.errors import CheckpointCorrupt, CheckpointRegionMismatch
from tidemill.cursors.position import Position
from tidemill.cursors.region import Region

_OFFSETS = st.integers(0, 2**62)
_ENTRIES = st.builds(
    lambda epoch, offset, leader, started, ahead: Entry(
        epoch, Position(offset, leader, started), tuple(sorted(offset + each for each in ahead))
    ),
    st.integers(0, 2**40),
    _OFFSETS,
    st.integers(-1, 1000),
    st.booleans(),
    st.sets(st.integers(0, 1023), max_size=5),
)
REGION = Region("orders", UUID(int=7))
CHECKPOINT = Checkpoint(
    "billing",
    REGION.identity(),
    {0: Entry(3, Position(17, 2, True), (18, 20)), 4: Entry(1, Position(0, -1, False))},
)


@given(st.text(max_size=5), st.binary(max_size=20), st.dictionaries(st.integers(0, 99), _ENTRIES, max_size=4))
def test_a_checkpoint_comes_back(name: str, identity: bytes, entries: dict[int, Entry]) -> None:
    checkpoint = Checkpoint(name, identity, entries)
    assert Checkpoint.decode(checkpoint.encode(), "here") == checkpoint


def test_every_flipped_byte_is_refused() -> None:
    data = CHECKPOINT.encode()
    for at in range(len(data)):
        for flip in (0x01, 0x80, 0xFF):
            broken = bytearray(data)
            broken[at] ^= flip
            with pytest.raises(CheckpointCorrupt, match="cursor 'billing'"):
                Checkpoint.decode(bytes(broken), "cursor 'billing'")


def test_every_truncation_and_anything_behind_is_refused() -> None:
    data = CHECKPOINT.encode()
    for size in range(len(data)):
        with pytest.raises(CheckpointCorrupt):
            Checkpoint.decode(data[:size], "a file")
    with pytest.raises(CheckpointCorrupt):
        Checkpoint.decode(data + b"\0", "a file")


@given(st.binary(max_size=80))
def test_any_bytes_are_refused_or_a_checkpoint(data: bytes) -> None:
    try:
        found = Checkpoint.decode(data, "a file")
    except CheckpointCorrupt:
        return
    assert found.encode() == data


def test_another_name_or_region_is_told_with_both() -> None:
    CHECKPOINT.check("billing", REGION, "here")
    with pytest.raises(CheckpointRegionMismatch, match=r"stored: billing; expected: other"):
        CHECKPOINT.check("other", REGION, "here")
    other = Region("orders", UUID(int=7), key_prefix=b"eu-")
    with pytest.raises(CheckpointRegionMismatch) as caught:
        CHECKPOINT.check("billing", other, "/tmp/x")
    assert caught.value.where == "/tmp/x"
    assert caught.value.stored == REGION
    assert caught.value.expected == other
    assert "key_prefix None, not b'eu-'" in caught.value.message


def test_finished_offsets_are_a_bitmap_of_at_most_1024() -> None:
    assert unpack_finished(10, pack_finished(10, [10, 12, 1033])) == (10, 12, 1033)
    with pytest.raises(ValueError, match="within 1024"):
        pack_finished(10, [1034])
    with pytest.raises(ValueError, match="as they are written"):
        unpack_finished(0, b"\1\0")
