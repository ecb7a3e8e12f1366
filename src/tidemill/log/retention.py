"""Retention: which old segments may be deleted, decided by sizes and times. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tidemill.config.topic import TopicConfig

__all__ = ("SegmentFacts", "retained_start")


class SegmentFacts(Protocol):
    """The properties of a segment that retention decides by."""

    base_offset: int
    next_offset: int
    size_bytes: int
    max_timestamp: int
    first_append_ms: int


def retained_start(
    segments: Sequence[SegmentFacts], config: TopicConfig, *, high_watermark: int, now_ms: int
) -> int | None:
    """The offset that the log should start at, or None if all is kept.

    Whole segments go, oldest first, while they are too old or the log is too large; none above the high
    watermark.
    If that takes every segment, the result is the end of the last one: the caller rolls first.
    """
    if not config.deletes:
        return None
    excess = sum(segment.size_bytes for segment in segments) - config.retention_bytes
    start = None
    for segment in segments:
        if segment.next_offset > high_watermark or segment.size_bytes == 0:
            break
        newest = segment.max_timestamp if segment.max_timestamp >= 0 else segment.first_append_ms
        # Records without timestamps whose time of append was lost in a crash are of unknown age: kept.
        known = segment.max_timestamp >= 0 or segment.first_append_ms > 0
        too_old = config.retention_ms >= 0 and known and now_ms - newest > config.retention_ms
        too_much = config.retention_bytes >= 0 and excess >= segment.size_bytes
        if not too_old and not too_much:
            break
        excess -= segment.size_bytes
        start = segment.next_offset
    return start
