"""The changes that a leader keeps for the fold: only those of the very batch that is folded."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from tidemill.records.batch import BatchHeader, parse_header
from tidemill.records.record import Record, build_batch
from tidemill.tables.state.changes import Changes
from tidemill.tables.state.folding import PreparedChanges


def changes_at(base_offset: int, count: int = 2, size_bytes: int = 10) -> Changes:
    nothing = pa.array([b""] * count, pa.binary())
    return Changes(np.arange(base_offset, base_offset + count, dtype=np.int64), nothing, nothing, size_bytes)


def header_at(base_offset: int, leader_epoch: int, count: int = 2) -> BatchHeader:
    records = [Record(key=b"k", value=b"v")] * count
    return parse_header(build_batch(records, base_offset=base_offset, leader_epoch=leader_epoch))


def test_the_changes_of_a_batch_are_taken_once() -> None:
    prepared = PreparedChanges(100)
    prepared.put(changes := changes_at(5), leader_epoch=3)
    assert prepared.take(header_at(5, 3)) is changes
    assert prepared.take(header_at(5, 3)) is None


@pytest.mark.parametrize(("leader_epoch", "count"), [(4, 2), (3, 3)])
def test_a_batch_of_another_leader_at_the_same_offset_is_not_folded_from_them(
    leader_epoch: int, count: int
) -> None:
    prepared = PreparedChanges(100)
    prepared.put(changes_at(5), leader_epoch=3)
    assert prepared.take(header_at(5, leader_epoch, count)) is None


def test_what_is_put_again_after_the_log_was_cut_takes_memory_once() -> None:
    prepared = PreparedChanges(20)
    prepared.put(other := changes_at(1), leader_epoch=3)
    for epoch in (3, 5):
        prepared.put(changes_at(5), leader_epoch=epoch)
    assert prepared.take(header_at(1, 3)) is other
