"""Positions of streams: their JSON, and that batches between them cover everything once."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.spark.errors import InvalidOption
from tidemill.spark.reading.advancing import furthest, shares, split_ranges
from tidemill.spark.reading.positions import (
    BucketRange,
    LogRange,
    SnapshotPosition,
    StreamPosition,
    between,
)

places = st.tuples(st.sampled_from(["a", "b.c", "ä"]), st.integers(0, 20))
offsets = st.dictionaries(places, st.integers(0, 2**62), max_size=6)
snapshots = st.builds(SnapshotPosition, st.text(max_size=5), st.dictionaries(places, st.binary(max_size=6)))
epochs = st.dictionaries(places, st.integers(0, 2**31 - 1), max_size=6)
positions = st.builds(
    StreamPosition,
    st.text(max_size=5),
    offsets,
    st.none() | offsets,
    st.none() | snapshots,
    epochs=epochs,
) | st.builds(lambda run: StreamPosition(run, is_new=True), st.text(max_size=5))


@given(positions)
def test_a_position_is_the_same_after_its_way_through_a_checkpoint(position: StreamPosition) -> None:
    assert StreamPosition.from_json(json.loads(json.dumps(position.to_json()))) == position


@given(positions)
def test_equal_positions_have_one_spelling(position: StreamPosition) -> None:
    again = StreamPosition.from_json(json.loads(json.dumps(position.to_json())))
    assert json.dumps(again.to_json()) == json.dumps(position.to_json())


def test_a_position_of_an_older_version_has_no_epochs() -> None:
    stored = {"tidemill": 1, "run": "r", "at": {"t": {"0": 5}}}
    assert StreamPosition.from_json(stored) == StreamPosition("r", {("t", 0): 5})


@pytest.mark.parametrize("value", [{}, {"topic": {"0": 5}}, {"tidemill": 2, "run": "x"}, {"tidemill": 1}])
def test_offsets_of_another_source_are_refused(value: dict[str, object]) -> None:
    with pytest.raises(InvalidOption, match="checkpoint"):
        StreamPosition.from_json(value)


def test_the_first_batch_is_the_same_wherever_the_query_would_begin_now() -> None:
    end = StreamPosition("r", {("t", 0): 9}, began={("t", 0): 4})
    for start in (StreamPosition("r", is_new=True), StreamPosition("s", {("t", 0): 7}, began={("t", 0): 7})):
        assert between(start, end) == ([LogRange("t", 0, 4, 9)], [])


def test_a_partition_that_is_new_is_read_from_its_beginning() -> None:
    start, end = StreamPosition("r", {("t", 0): 3}), StreamPosition("r", {("t", 0): 3, ("t", 1): 5})
    assert between(start, end) == ([LogRange("t", 1, 0, 5)], [])


def test_a_snapshot_is_read_bucket_by_bucket_from_key_to_key() -> None:
    at = {("t", 0): 10, ("t", 1): 20, ("t", 2): 0}
    new = StreamPosition("r", is_new=True)
    one = StreamPosition("r", at, at, SnapshotPosition("L", {("t", 0): b"k", ("t", 1): b""}))
    two = StreamPosition("r", at, None, SnapshotPosition("L", {("t", 1): b"m"}))
    three = StreamPosition("r", at, None, SnapshotPosition("L", {}))
    after = StreamPosition("r", at | {("t", 1): 25})
    assert between(new, one)[1] == [BucketRange("t", 0, b"", b"k"), BucketRange("t", 2, b"", None)]
    assert between(one, two)[1] == [BucketRange("t", 0, b"k", None), BucketRange("t", 1, b"", b"m")]
    assert between(two, three) == ([], [BucketRange("t", 1, b"m", None)])
    assert between(three, after) == ([LogRange("t", 1, 20, 25)], [])


@given(st.dictionaries(places, st.integers(0, 1_000), max_size=8), st.integers(1, 3_000))
def test_shares_use_the_limit_up_and_take_no_more_than_there_is(
    sizes: dict[tuple[str, int], int], limit: int
) -> None:
    taken = shares(sizes, limit)
    assert taken.keys() == sizes.keys()
    assert sum(taken.values()) == min(limit, sum(sizes.values()))
    assert all(0 <= taken[place] <= sizes[place] for place in sizes)
    waiting = [place for place, size in sizes.items() if size]
    if len(waiting) <= limit and sum(sizes.values()) > limit:
        # Whoever has most gives way: nobody is left out while another gets a second one.
        left_out = [place for place in waiting if not taken[place]]
        assert not left_out or max(taken.values()) <= max(
            1, -(-max(sizes.values()) * limit // sum(sizes.values()))
        )


@given(offsets, offsets, st.none() | st.integers(1, 10**9))
def test_a_batch_never_goes_back_and_never_past_the_end(
    at: dict[tuple[str, int], int], ends: dict[tuple[str, int], int], limit: int | None
) -> None:
    ends = {place: max(end, at.get(place, 0)) for place, end in ends.items()}
    found = furthest(at, ends, limit)
    assert found.keys() == ends.keys()
    assert all(at.get(place, 0) <= found[place] <= ends[place] for place in ends)
    if limit is not None:
        assert sum(found[place] - at.get(place, 0) for place in ends) <= limit


ranges = st.lists(
    st.builds(
        lambda number, start, size: LogRange("t", number, start, start + size),
        st.integers(0, 5),
        st.integers(0, 100),
        st.integers(1, 50),
    ),
    max_size=6,
)


@given(ranges, st.integers(1, 40))
def test_tasks_cover_every_offset_once(parts: list[LogRange], minimum: int) -> None:
    pieces = split_ranges(parts, minimum)
    wanted = [(p.partition, offset) for p in parts for offset in range(p.start, p.end)]
    assert [(p.partition, offset) for p in pieces for offset in range(p.start, p.end)] == wanted
    assert len(pieces) >= min(minimum, len(wanted), sum(p.end - p.start for p in parts))
    assert len(pieces) <= max(minimum, len(parts))
