"""The sparse index against a scan of the list, and the cache."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.log.segments.index import IndexCache, SegmentSummary, SparseIndex

#: For each batch: offsets, bytes, timestamp.
BATCHES = st.lists(st.tuples(st.integers(1, 5), st.integers(61, 300), st.integers(-1, 50)), max_size=30)


def built(
    batches: list[tuple[int, int, int]], interval: int
) -> tuple[SparseIndex, list[tuple[int, int, int]]]:
    """An index, and (first offset, position, timestamp) of every batch."""
    index, placed, offset, position, newest = SparseIndex(), [], 0, 0, -1
    for count, size, timestamp in batches:
        if position - index.last_position >= interval:
            index.append(offset, position, newest)
        placed.append((offset, position, timestamp))
        newest, offset, position = max(newest, timestamp), offset + count, position + size
    return index, placed


@given(BATCHES, st.integers(1, 500), st.integers(0, 160))
def test_a_search_by_offset_starts_at_a_batch_not_behind_the_one_that_holds_it(
    batches: list[tuple[int, int, int]], interval: int, offset: int
) -> None:
    index, placed = built(batches, interval)
    _, start = index.entry_before_offset(offset)
    holding = max((position for first, position, _ in placed if first <= offset), default=0)
    assert start in {position for _, position, _ in placed} | {0}
    assert start <= holding
    assert holding - start < interval + 300


@given(BATCHES, st.integers(1, 500), st.integers(-1, 55))
def test_every_batch_before_the_start_of_a_search_by_time_is_older(
    batches: list[tuple[int, int, int]], interval: int, timestamp: int
) -> None:
    index, placed = built(batches, interval)
    _, start = index.entry_before_time(timestamp)
    assert start in {position for _, position, _ in placed} | {0}
    assert all(time < timestamp for _, position, time in placed if position < start)


@given(BATCHES, st.integers(1, 500))
def test_round_trip_through_bytes(batches: list[tuple[int, int, int]], interval: int) -> None:
    index, _ = built(batches, interval)
    summary = SegmentSummary(10, 2000, 50, 4, 99)
    again, told = SparseIndex.from_bytes(index.to_bytes(summary))
    assert told == summary
    assert list(again.entries()) == list(index.entries())


def index_of(entries: int) -> SparseIndex:
    index = SparseIndex()
    for number in range(entries):
        index.append(number, 100 * number, -1)
    return index


def test_the_cache_drops_the_least_recently_used_beyond_its_limit() -> None:
    cache = IndexCache(max_bytes=3 * index_of(10).memory_bytes)
    for key in "abc":
        cache.put(key, index_of(10))
    assert cache.get("a") is not None
    cache.put("d", index_of(10))
    assert [cache.get(key) is not None for key in "abcd"] == [True, False, True, True]
    cache.drop("a")
    assert cache.get("a") is None
    cache.put("e", index_of(10))
    assert cache.get("c") is not None


def test_the_cache_keeps_one_that_alone_is_too_large() -> None:
    cache = IndexCache(max_bytes=1)
    cache.put("a", index_of(10))
    assert cache.get("a") is not None
