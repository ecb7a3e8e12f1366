"""Which segments go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tidemill.config.topic import TopicConfig
from tidemill.log.retention import retained_start


@dataclass
class Facts:
    base_offset: int
    next_offset: int
    size_bytes: int
    max_timestamp: int
    first_append_ms: int = 1


SEGMENTS = [Facts(0, 10, 100, 1000), Facts(10, 20, 100, 2000), Facts(20, 30, 100, 3000)]


def start(
    now_ms: int = 3000, durable: int = 30, segments: list[Facts] = SEGMENTS, **config: Any
) -> int | None:
    values: dict[str, Any] = {"retention_ms": -1, "retention_bytes": -1, **config}
    topic = TopicConfig(**values)
    return retained_start(segments, topic, high_watermark=durable, now_ms=now_ms)


@pytest.mark.parametrize(
    ("now_ms", "expected"), [(1500, None), (1501, 10), (2500, 10), (2501, 20), (3501, 30)]
)
def test_segments_go_when_their_newest_record_is_older_than_the_limit(
    now_ms: int, expected: int | None
) -> None:
    assert start(now_ms, retention_ms=500) == expected


@pytest.mark.parametrize(
    ("limit", "expected"), [(300, None), (299, None), (201, None), (200, 10), (99, 20), (0, 30)]
)
def test_segments_go_while_the_rest_is_still_as_large_as_the_limit(limit: int, expected: int | None) -> None:
    assert start(retention_bytes=limit) == expected


def test_nothing_goes_that_is_not_durable() -> None:
    assert start(10_000, durable=19, retention_ms=0) == 10
    assert start(10_000, durable=9, retention_ms=0) is None


def test_nothing_goes_without_the_delete_policy() -> None:
    assert start(10_000, retention_ms=0, cleanup_policy=frozenset({"compact"})) is None
    assert start(10_000, retention_ms=0, cleanup_policy=frozenset({"compact", "delete"})) == 30


def test_a_young_segment_protects_those_behind_it() -> None:
    segments = [Facts(0, 10, 100, 9000), Facts(10, 20, 100, 1000)]
    assert start(9500, segments=segments, retention_ms=1000) is None


def test_records_without_timestamps_age_by_the_time_of_their_append() -> None:
    segments = [Facts(0, 10, 100, -1, first_append_ms=2000), Facts(10, 20, 100, -1, first_append_ms=3000)]
    assert start(2600, segments=segments, durable=20, retention_ms=500) == 10


def test_records_of_unknown_age_are_kept() -> None:
    segments = [Facts(0, 10, 100, -1, first_append_ms=0)]
    assert start(10**12, segments=segments, retention_ms=1) is None


def test_an_empty_segment_is_kept() -> None:
    assert start(10_000, segments=[Facts(0, 0, 0, -1)], retention_ms=0) is None
