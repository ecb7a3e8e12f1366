"""The register of damage on this node: batches that did not check out when somebody read them.

A partition with damage goes on: its end is sound, so it takes records, and everything but the damaged offsets
is served. Each damaged batch is logged once. It stays here until the offsets are deleted, the topic goes, or
the node is started again after a repair.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from tidemill.coordination.metrics import Metric, gauge, gauges
from tidemill.errors import DamagedBatch

__all__ = ("DAMAGE_METRICS", "DamageRegister", "DamagedPartition")

logger = logging.getLogger(__name__)

#: Damaged batches of one partition that are remembered and logged; further ones are neither.
_BATCHES_MAX = 100

PartitionKey = tuple[UUID, int]


@dataclass(frozen=True, slots=True)
class DamagedPartition:
    """A partition of which some batches cannot be read."""

    topic: str
    topic_id: UUID
    index: int
    #: By path of the file and position in it.
    batches: dict[tuple[str, int], DamagedBatch]

    @property
    def first(self) -> DamagedBatch:
        """The damage with the lowest offset."""
        return min(self.batches.values(), key=lambda damage: damage.first_offset)

    def __str__(self) -> str:
        more = f" (and {len(self.batches) - 1} more places)" if len(self.batches) > 1 else ""
        return f"{self.topic}-{self.index}: {self.first}{more}; its other records are served"


class DamageRegister:
    """Damaged batches by partition. Used on the event loop only, but for partitions opened at the start."""

    def __init__(self) -> None:
        self._partitions: dict[PartitionKey, DamagedPartition] = {}

    def __iter__(self) -> Iterator[DamagedPartition]:
        return iter(list(self._partitions.values()))

    def note(self, topic: str, topic_id: UUID, index: int, damage: DamagedBatch) -> None:
        """Remember a damaged batch, and log it if it is news."""
        known = self._partitions.get((topic_id, index))
        if known is None:
            known = self._partitions[topic_id, index] = DamagedPartition(topic, topic_id, index, {})
        position = damage.path, damage.position
        if position in known.batches or len(known.batches) >= _BATCHES_MAX:
            return
        known.batches[position] = damage
        logger.error("%s-%d: %s", topic, index, damage)

    def forget_topic(self, topic_id: UUID) -> None:
        """Forget the damage of a deleted topic."""
        for key in [key for key in self._partitions if key[0] == topic_id]:
            del self._partitions[key]

    def forget_partition(self, topic_id: UUID, index: int) -> None:
        """Forget the damage of a partition that has moved to other nodes."""
        self._partitions.pop((topic_id, index), None)

    def forget_below(self, topic_id: UUID, index: int, log_start_offset: int) -> None:
        """Forget damage below a partition's new log start: those records are deleted."""
        known = self._partitions.get((topic_id, index))
        if known is None:
            return
        for position, damage in list(known.batches.items()):
            if damage.next_offset <= log_start_offset:
                del known.batches[position]
        if not known.batches:
            del self._partitions[topic_id, index]


_NOT_SERVED: Final = "Places in the logs that are damaged and not served."

DAMAGE_METRICS: Final[Sequence[Metric[DamageRegister]]] = (
    gauge("tidemill_damaged_batches", _NOT_SERVED, lambda damage: sum(len(each.batches) for each in damage)),
    gauges(
        "tidemill_partition_damaged_batches",
        _NOT_SERVED,
        ("topic", "partition"),
        lambda damage: [((each.topic, str(each.index)), len(each.batches)) for each in damage],
    ),
)
