"""Which part of a log may be compacted, and whether it is time to: pure decisions over segments.

Compaction works on whole segments from the start of the log. It never touches the active segment, nothing
from the last stable offset on, nothing that is younger than ``min.compaction.lag.ms``, and nothing from the
retention floor on, which is where somebody still needs every record. Below the first dirty offset the log was
compacted before: no key is there twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from tidemill.config.topic import TopicConfig
from tidemill.config.topic_keys import LONG_MAX
from tidemill.log.retention import SegmentFacts
from tidemill.log.segments.segment import RELATIVE_OFFSET_MAX

__all__ = ("NO_FLOOR", "Cleanable", "find_cleanable", "group_segments", "is_due")

#: The floor of a log of which nothing has to be kept for others.
NO_FLOOR = 2**63 - 1


class Cleanable(NamedTuple):
    """The part of a log that may be compacted: its first ``segment_count`` segments, up to ``end_offset``."""

    segment_count: int
    first_dirty_offset: int
    end_offset: int
    dirty_bytes: int
    total_bytes: int
    #: When the oldest record that was not compacted yet was written, as far as that is known.
    dirty_since_ms: int | None

    @property
    def dirty_ratio(self) -> float:
        return self.dirty_bytes / self.total_bytes if self.total_bytes else 0.0


def find_cleanable(
    segments: Sequence[SegmentFacts],
    config: TopicConfig,
    *,
    first_dirty_offset: int,
    upper_offset: int,
    now_ms: int,
) -> Cleanable:
    """The part of a log that may be compacted now, below ``upper_offset``."""
    count, dirty_bytes, total_bytes, end_offset = 0, 0, 0, first_dirty_offset
    dirty_since_ms = None
    for segment in segments[:-1]:
        newest_ms = segment.max_timestamp if segment.max_timestamp >= 0 else segment.first_append_ms
        is_young = 0 < config.min_compaction_lag_ms > now_ms - newest_ms
        if segment.next_offset > upper_offset or is_young:
            break
        count += 1
        end_offset = segment.next_offset
        total_bytes += segment.size_bytes
        if segment.next_offset > first_dirty_offset:
            dirty_bytes += segment.size_bytes
            if dirty_since_ms is None:
                dirty_since_ms = segment.first_append_ms or (newest_ms if newest_ms > 0 else None)
    return Cleanable(count, first_dirty_offset, end_offset, dirty_bytes, total_bytes, dirty_since_ms)


def is_due(cleanable: Cleanable, config: TopicConfig, now_ms: int) -> bool:
    """Whether it is time to compact: enough is dirty, or some record has waited too long."""
    if not config.compacts or not cleanable.dirty_bytes:
        return False
    if cleanable.dirty_ratio >= config.min_cleanable_dirty_ratio:
        return True
    since_ms = cleanable.dirty_since_ms
    if since_ms is None or config.max_compaction_lag_ms == LONG_MAX:
        return False
    # A time in the future means that the clock was set back. The real wait is unknown, so it counts as long.
    return since_ms > now_ms or now_ms - since_ms >= config.max_compaction_lag_ms


_S = TypeVar("_S", bound=SegmentFacts)


def group_segments(segments: Sequence[_S], segment_bytes: int) -> list[list[_S]]:
    """Groups of neighbours that become one segment each: none too large, even if nothing can be removed."""
    groups: list[list[_S]] = []
    size_bytes = 0
    for segment in segments:
        fits = (
            groups
            and size_bytes + segment.size_bytes <= segment_bytes
            and segment.next_offset - 1 - groups[-1][0].base_offset <= RELATIVE_OFFSET_MAX
        )
        if fits:
            groups[-1].append(segment)
            size_bytes += segment.size_bytes
        else:
            groups.append([segment])
            size_bytes = segment.size_bytes
    return groups
