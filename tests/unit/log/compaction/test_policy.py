"""Which part of a log may be compacted, and when."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.config.topic import TopicConfig
from tidemill.log.compaction.policy import Cleanable, find_cleanable, group_segments, is_due

COMPACT = frozenset({"compact"})


@dataclass
class Facts:
    """A segment."""

    base_offset: int
    next_offset: int
    size_bytes: int = 100
    max_timestamp: int = 1_000
    first_append_ms: int = 1_000


SEGMENTS = [Facts(0, 10), Facts(10, 20), Facts(20, 30), Facts(30, 40)]


def find(
    segments: list[Facts],
    config: TopicConfig | None = None,
    *,
    dirty: int = 0,
    upper: int = 10**9,
    now_ms: int = 5_000,
) -> Cleanable:
    config = config or TopicConfig(cleanup_policy=COMPACT)
    return find_cleanable(segments, config, first_dirty_offset=dirty, upper_offset=upper, now_ms=now_ms)


def test_the_active_segment_is_never_touched() -> None:
    found = find(SEGMENTS)
    assert (found.segment_count, found.end_offset) == (3, 30)
    assert find(SEGMENTS[:1]).segment_count == 0
    assert find([]).segment_count == 0


def test_only_whole_segments_below_the_upper_offset_are_touched() -> None:
    assert find(SEGMENTS, upper=30).segment_count == 3
    assert find(SEGMENTS, upper=29).segment_count == 2
    assert find(SEGMENTS, upper=9).segment_count == 0


def test_it_ends_at_the_first_segment_that_is_too_young() -> None:
    config = TopicConfig(cleanup_policy=COMPACT, min_compaction_lag_ms=1_000)
    segments = [Facts(0, 10), Facts(10, 20, max_timestamp=4_500), Facts(20, 30), Facts(30, 40)]
    assert find(segments, config).segment_count == 1
    assert find(segments, config, now_ms=5_500).segment_count == 3


def test_a_segment_without_timestamps_is_as_young_as_its_first_append() -> None:
    config = TopicConfig(cleanup_policy=COMPACT, min_compaction_lag_ms=1_000)
    segments = [Facts(0, 10, max_timestamp=-1, first_append_ms=4_500), Facts(10, 20)]
    assert find(segments, config).segment_count == 0
    assert find(segments, config, now_ms=5_500).segment_count == 1


def test_timestamps_of_the_future_do_not_keep_a_topic_without_lag_from_it() -> None:
    assert find([Facts(0, 10, max_timestamp=10**15), Facts(10, 20)]).segment_count == 1


def test_dirty_is_what_lies_behind_the_first_dirty_offset() -> None:
    found = find(SEGMENTS, dirty=10)
    assert (found.dirty_bytes, found.total_bytes) == (200, 300)
    assert find(SEGMENTS, dirty=15).dirty_bytes == 200
    assert find(SEGMENTS, dirty=30).dirty_bytes == 0


def test_it_is_due_from_the_dirty_ratio_on() -> None:
    config = TopicConfig(cleanup_policy=COMPACT, min_cleanable_dirty_ratio=0.5)
    assert not is_due(find(SEGMENTS, config, dirty=20), config, 5_000)
    assert is_due(find(SEGMENTS, config, dirty=10), config, 5_000)


def test_a_ratio_of_zero_still_needs_something_dirty() -> None:
    config = TopicConfig(cleanup_policy=COMPACT, min_cleanable_dirty_ratio=0.0)
    assert is_due(find(SEGMENTS, config, dirty=20), config, 5_000)
    assert not is_due(find(SEGMENTS, config, dirty=30), config, 5_000)


def test_it_is_due_when_something_has_waited_too_long() -> None:
    config = TopicConfig(cleanup_policy=COMPACT, min_cleanable_dirty_ratio=1.0, max_compaction_lag_ms=3_000)
    found = find(SEGMENTS, config, dirty=20)
    assert not is_due(found, config, 3_999)
    assert is_due(found, config, 4_000)


def test_after_the_clock_was_set_back_nothing_waits_until_it_is_there_again() -> None:
    config = TopicConfig(cleanup_policy=COMPACT, min_cleanable_dirty_ratio=1.0, max_compaction_lag_ms=3_000)
    assert is_due(find(SEGMENTS, config, dirty=20), config, 999)
    unlimited = TopicConfig(cleanup_policy=COMPACT, min_cleanable_dirty_ratio=1.0)
    assert not is_due(find(SEGMENTS, unlimited, dirty=20), unlimited, 999)


def test_another_policy_is_never_due() -> None:
    config = TopicConfig(min_cleanable_dirty_ratio=0.0)
    assert not is_due(find(SEGMENTS, config), config, 5_000)


def test_small_neighbours_become_one_segment() -> None:
    assert [len(group) for group in group_segments(SEGMENTS, 200)] == [2, 2]
    assert [len(group) for group in group_segments(SEGMENTS, 399)] == [3, 1]
    assert [len(group) for group in group_segments(SEGMENTS, 50)] == [1, 1, 1, 1]


def test_a_segment_never_spans_more_than_31_bits_of_offsets() -> None:
    segments = [Facts(0, 10), Facts(10, 2**31), Facts(2**31, 2**31 + 1)]
    assert [len(group) for group in group_segments(segments, 10**9)] == [2, 1]
