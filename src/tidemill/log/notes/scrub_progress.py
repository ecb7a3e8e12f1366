"""The progress of the scrubber: how far it has come, and when it begins again. Pure.

A pass goes through the partitions of the node in the order of their keys, and through each by offset. Its
position can be stored and taken up after a restart. Whatever is deleted or created meanwhile, the pass goes
on with the first partition that is not before that position.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple
from uuid import UUID

__all__ = ("PartitionKey", "ScrubProgress", "Suspect")

PartitionKey = tuple[UUID, int]

_SUSPECTS_MAX = 1_000


class Suspect(NamedTuple):
    """An offset whose batch did not check out; it is read again after the next start."""

    topic_id: UUID
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class ScrubProgress:
    """The position of the present pass, and when passes began and ended."""

    #: When the present pass began, or the last one; before the first pass, when the scrubber first ran.
    pass_began_ms: int = 0
    #: When the last whole pass ended; 0 if there was none.
    pass_ended_ms: int = 0
    #: The partition that is being read; None between two passes.
    partition: PartitionKey | None = None
    #: Everything below it in that partition has been read.
    offset: int = 0
    suspects: tuple[Suspect, ...] = ()

    def due_in_ms(self, interval_ms: int, now_ms: int) -> int:
        """The time until there is something to read: 0 in the middle of a pass."""
        if self.partition is not None:
            return 0
        return max(0, self.pass_began_ms + interval_ms - now_ms)

    def seen(self, now_ms: int) -> ScrubProgress:
        """The progress with a beginning that is neither in the future nor unset.

        A beginning in the future means that the clock was set back. Then the interval counts from the time at
        which that is seen first, so the result has to be kept.
        """
        began_ms = min(self.pass_began_ms, now_ms) or now_ms
        return self if began_ms == self.pass_began_ms else replace(self, pass_began_ms=began_ms)

    def next_partition(self, partitions: Sequence[PartitionKey]) -> int:
        """The index in the sorted ``partitions`` at which the pass goes on; their number if it is over."""
        return 0 if self.partition is None else bisect_left(partitions, self.partition)

    def resumed(self, now_ms: int) -> ScrubProgress:
        """The progress in the pass that is under way, or in a new one that begins now."""
        return replace(self, pass_began_ms=now_ms) if self.partition is None else self

    def at(self, partition: PartitionKey) -> ScrubProgress:
        """The progress at a partition: where the pass was in it, or at its beginning."""
        return self if self.partition == partition else replace(self, partition=partition, offset=0)

    def read_to(self, offset: int) -> ScrubProgress:
        return replace(self, offset=offset)

    def ended(self, now_ms: int) -> ScrubProgress:
        """The progress after the pass has ended."""
        return replace(self, pass_ended_ms=now_ms, partition=None, offset=0)

    def with_suspects(self, suspects: Sequence[Suspect]) -> ScrubProgress:
        return replace(self, suspects=tuple(suspects[:_SUSPECTS_MAX]))

    def to_bytes(self) -> bytes:
        partition = None if self.partition is None else [self.partition[0].hex, self.partition[1]]
        suspects = [[topic_id.hex, index, offset] for topic_id, index, offset in self.suspects]
        fields = [self.pass_began_ms, self.pass_ended_ms, partition, self.offset, suspects]
        return json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> ScrubProgress:
        began_ms, ended_ms, partition, offset, suspects = json.loads(data)
        return cls(
            began_ms,
            ended_ms,
            None if partition is None else (UUID(hex=partition[0]), partition[1]),
            offset,
            tuple(Suspect(UUID(hex=topic_id), index, offset) for topic_id, index, offset in suspects),
        )
