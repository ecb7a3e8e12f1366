"""What is known to be damaged on this node: batches that did not check out when somebody read them.

A partition with damage goes on: its end is sound, so it takes records, and everything but the damaged offsets
is served. Each place is logged once. It stays here until the offsets are deleted, the topic goes, or the node
is started again after a repair.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

from tidemill.errors import DamagedBatch

__all__ = ("DamageRegister", "DamagedPartition")

logger = logging.getLogger(__name__)

#: Places that are remembered and logged of one partition; one that has more is beyond counting.
_PLACES_MAX = 100

PartitionKey = tuple[UUID, int]


@dataclass(frozen=True, slots=True)
class DamagedPartition:
    """A partition of which some batches cannot be read."""

    topic: str
    topic_id: UUID
    index: int
    #: By file and position.
    places: dict[tuple[str, int], DamagedBatch]

    @property
    def first(self) -> DamagedBatch:
        """The damage with the lowest offset."""
        return min(self.places.values(), key=lambda damage: damage.first_offset)

    def __str__(self) -> str:
        more = f" (and {len(self.places) - 1} more places)" if len(self.places) > 1 else ""
        return f"{self.topic}-{self.index}: {self.first}{more}; its other records are served"


class DamageRegister:
    """Damaged batches by partition. Used on the event loop only, but for partitions opened at the start."""

    def __init__(self) -> None:
        self._partitions: dict[PartitionKey, DamagedPartition] = {}

    def __iter__(self) -> Iterator[DamagedPartition]:
        return iter(list(self._partitions.values()))

    def note(self, topic: str, topic_id: UUID, index: int, damage: DamagedBatch) -> None:
        """Remember a damaged batch, and log it if it is news."""
        found = self._partitions.get((topic_id, index))
        if found is None:
            found = self._partitions[topic_id, index] = DamagedPartition(topic, topic_id, index, {})
        place = damage.path, damage.position
        if place in found.places or len(found.places) >= _PLACES_MAX:
            return
        found.places[place] = damage
        logger.error("%s-%d: %s", topic, index, damage)

    def forget_topic(self, topic_id: UUID) -> None:
        """The topic is deleted."""
        for key in [key for key in self._partitions if key[0] == topic_id]:
            del self._partitions[key]

    def forget_below(self, topic_id: UUID, index: int, log_start_offset: int) -> None:
        """Records below that offset are deleted."""
        found = self._partitions.get((topic_id, index))
        if found is None:
            return
        for place, damage in list(found.places.items()):
            if damage.next_offset <= log_start_offset:
                del found.places[place]
        if not found.places:
            del self._partitions[topic_id, index]
