"""The fold of a log: the changes that a leader keeps for it, and the size of its steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest

from support.batches import plain_batch
from support.faulty_storage import FaultyStorage
from support.leadership import led
from tidemill.config.topic import TopicConfig
from tidemill.kv.contract import KvStore
from tidemill.log.recovery import open_log
from tidemill.records.batch import BatchHeader, parse_header
from tidemill.records.record import Record, build_batch
from tidemill.replication.partition import Partition
from tidemill.tables.state import folding
from tidemill.tables.state.changes import Changes
from tidemill.tables.state.folding import PreparedChanges, apply, read_for_fold


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


class _Written:
    """A store that keeps the sizes of its writes, and what they leave."""

    def __init__(self, applied_offset: int = 0) -> None:
        self.applied_offset = applied_offset
        self.sizes: list[tuple[int, int]] = []
        self.rows: dict[bytes, bytes] = {}

    def write(
        self,
        keys: Collection[bytes],
        values: Collection[bytes],
        deletes: Collection[bytes],
        applied_offset: int,
        leader_epoch: int,
    ) -> None:
        self.sizes.append((len(keys) + len(deletes), sum(map(len, values))))
        self.rows.update(zip(keys, values, strict=True))
        for key in deletes:
            self.rows.pop(key, None)
        self.applied_offset = applied_offset


def folded(rows: Sequence[bytes | None], applied_offset: int = 0) -> _Written:
    """The writes of a batch with a change of each of so many keys, from the offset that the state has."""
    keys = pa.array([b"%d" % number for number in range(len(rows))], pa.binary())
    changes = Changes(np.arange(len(rows), dtype=np.int64), keys, pa.array(rows, pa.binary()))
    store = _Written(applied_offset)
    apply(cast("KvStore", store), changes, len(rows))
    return store


def test_many_rows_are_written_some_at_a_time() -> None:
    store = folded([*[b"v"] * 1_999, None])
    assert len(store.rows) == 1_999
    assert store.applied_offset == 2_000
    assert max(count for count, _ in store.sizes) <= 500


def test_large_rows_are_written_a_megabyte_at_a_time_or_each_alone() -> None:
    store = folded([bytes(300_000)] * 7 + [b"small", bytes(3_000_000), b"small", None])
    assert [count for count, _ in store.sizes] == [3, 3, 2, 1, 2]
    assert len(store.rows) == 10


def test_a_fold_that_was_interrupted_goes_on_behind_what_it_has_written() -> None:
    store = folded([b"%d" % number for number in range(600)], applied_offset=400)
    # In front of each row is its offset.
    assert [value[8:] for value in store.rows.values()] == [b"%d" % number for number in range(400, 600)]


def test_a_step_reads_a_bounded_number_of_batches() -> None:
    log, _ = open_log(FaultyStorage(), "logs/t/0", TopicConfig())
    more: dict[str, Any] = {"request_flush": lambda _: None, "max_decompressed_bytes": 10**6}
    partition = Partition("t", UUID(int=1), 0, log, assignment=led(3), **more)
    for _ in range(folding._STEP_BATCHES + 10):
        partition.append(plain_batch("v"), 1_000)
    job = partition.begin_flush()
    assert job is not None
    job.run()
    partition.flushed(job)
    data, _ = read_for_fold(partition, 0)
    assert len(data) == folding._STEP_BATCHES * len(plain_batch("v"))
