"""One segment: its index, and walking over its batches."""

from __future__ import annotations

import random

import pytest

from support.batches import make_batch
from support.faulty_storage import FaultyStorage
from tidemill.log.segments.index import IndexCache
from tidemill.log.segments.segment import Segment
from tidemill.log.segments.segment_walk import BrokenBatch, walk
from tidemill.records.batch import stamp_prefix


def built(batches: list[tuple[int, int]], interval: int, base: int = 100) -> tuple[FaultyStorage, Segment]:
    storage = FaultyStorage(random.Random(0))
    storage.make_dir("t")
    segment = Segment(storage, "t", base, interval, IndexCache())
    segment.create()
    for count, size in batches:
        data, header = make_batch(*("x" * size,) * count)
        prefix = stamp_prefix(header, segment.next_offset, 0)
        segment.append([prefix, data[16:]], header, segment.next_offset, header.max_timestamp)
    return storage, segment


def test_a_rebuilt_segment_equals_the_one_that_was_written() -> None:
    storage, written = built([(2, 100)] * 9, 300)
    rebuilt = Segment(storage, "t", 100, 300, IndexCache())
    assert len(list(rebuilt.rebuild(verify=True))) == 9
    assert list(rebuilt.index.entries()) == list(written.index.entries())
    for name in ("next_offset", "size_bytes", "max_timestamp", "max_timestamp_batch"):
        assert getattr(rebuilt, name) == getattr(written, name)


def test_a_sealed_segment_is_loaded_from_its_index_file_only_if_that_fits() -> None:
    storage, segment = built([(2, 100)] * 9, 300)
    file = storage.open(segment.index_path, create=True)
    file.write(0, [segment.seal()])
    loaded = Segment(storage, "t", 100, 300, IndexCache())
    assert loaded.load()
    assert (loaded.next_offset, loaded.size_bytes) == (segment.next_offset, segment.size_bytes)
    storage.open(segment.log_path).write(segment.size_bytes, [b"more"])
    assert not Segment(storage, "t", 100, 300, IndexCache()).load()
    storage.open(segment.log_path).truncate(segment.size_bytes)
    storage.flip_bit(segment.index_path, 30)
    assert not Segment(storage, "t", 100, 300, IndexCache()).load()


def test_an_index_that_was_let_go_is_read_back_or_built_again() -> None:
    storage, segment = built([(2, 100)] * 9, 300)
    entries = list(segment.index.entries())
    data = segment.seal()
    segment._cache.drop(segment.path)
    assert list(segment.index.entries()) == entries, "built from the segment"
    storage.open(segment.index_path, create=True).write(0, [data])
    segment._cache.drop(segment.path)
    storage.calls.clear()
    assert list(segment.index.entries()) == entries
    assert ("read_file", segment.index_path) in storage.calls


@pytest.mark.parametrize(("position", "what"), [(16, "record format"), (8, "needs"), (70, "checksum")])
def test_a_broken_batch_is_named_with_its_position(position: int, what: str) -> None:
    storage, segment = built([(1, 50)] * 3, 10_000)
    size = segment.size_bytes // 3
    storage.flip_bit(segment.log_path, size + position, bit=6 if position == 8 else 0)
    with pytest.raises(BrokenBatch, match=what) as caught:
        list(walk(segment.file, 0, segment.size_bytes, verify=True))
    assert caught.value.position == size


def test_batches_larger_than_the_read_ahead_are_walked() -> None:
    _, segment = built([(1, 10), (1, 700_000), (1, 10), (1, 300_000)], 4096)
    walked = [header.base_offset for _, header in walk(segment.file, 0, segment.size_bytes, verify=True)]
    assert walked == [100, 101, 102, 103]
    assert [header.base_offset for _, header in walk(segment.file, 0, segment.size_bytes)] == walked
