"""The rules of every change of a partition's in-sync set and leader, whichever command asks. Pure.

- A member of ``isr`` or ``elr`` has every committed record. Nothing is committed while fewer than ``min_isr``
  replicas are in sync. So a replica that leaves below that minimum still has everything, and goes to ``elr``;
  the change that brings the in-sync set back to the minimum empties it. Lowering the minimum does so, too.
- A replica whose records are lost or in doubt forfeits its place in both sets.
- A leader is a member of ``isr``, or of ``elr`` if no other can lead. Its epoch is new.
- Every change raises the partition epoch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from tidemill.control.records import PartitionImage

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Set

    from tidemill.control.image import MetadataImage

__all__ = (
    "LEADERLESS",
    "MIN_ISR_CONFIG",
    "advanced",
    "candidate",
    "elected",
    "in_order",
    "led_by",
    "minimum_of",
    "new_partition",
    "with_in_sync",
)

LEADERLESS = -1
MIN_ISR_CONFIG = "min.insync.replicas"


def minimum_of(image: MetadataImage, configs: Mapping[str, str]) -> Callable[[int], int]:
    """From a number of replicas to the least size of the in-sync set, for a topic with these overrides."""
    text = configs.get(MIN_ISR_CONFIG) or image.node_configs.get(None, {}).get(MIN_ISR_CONFIG)

    def minimum(replicas: int) -> int:
        wanted = int(text) if text else (2 if replicas >= 3 else 1)
        return max(1, min(wanted, replicas))

    return minimum


def new_partition(
    replicas: tuple[int, ...], live: Collection[int], minimum: Callable[[int], int]
) -> PartitionImage:
    """A partition without records: every live replica is in sync."""
    isr = tuple(node_id for node_id in replicas if node_id in live)
    return PartitionImage(isr[0], 0, replicas, isr, min_isr=minimum(len(replicas)))


def advanced(before: PartitionImage, after: PartitionImage) -> PartitionImage:
    """``after`` with the next partition epoch, or ``before`` if nothing has changed."""
    return before if after == before else replace(after, partition_epoch=before.partition_epoch + 1)


def in_order(partition: PartitionImage, members: Collection[int]) -> tuple[int, ...]:
    """The members in the order of the replicas."""
    return tuple(node_id for node_id in partition.replicas if node_id in members)


def with_in_sync(
    partition: PartitionImage,
    isr: Collection[int],
    *,
    forfeits: Set[int] = frozenset(),
    min_isr: int | None = None,
) -> PartitionImage:
    """The partition with another in-sync set, and with ``elr`` as the rules above make it.

    ``forfeits`` are nodes that may be in neither; ``min_isr`` is the minimum from now on.
    """
    least = partition.min_isr if min_isr is None else min_isr
    kept = in_order(partition, isr)
    elr: tuple[int, ...] = ()
    if len(kept) < least and least >= partition.min_isr:
        elr = in_order(partition, {*partition.isr, *partition.elr} - {*kept} - forfeits)
    return replace(partition, isr=kept, elr=elr, min_isr=least)


def led_by(partition: PartitionImage, leader: int) -> PartitionImage:
    """The partition with that leader, -1 for none, at the next leader epoch."""
    return replace(partition, leader=leader, leader_epoch=partition.leader_epoch + 1, successor=LEADERLESS)


def candidate(
    partition: PartitionImage,
    members: Collection[int],
    live: Collection[int],
    avoid: Collection[int] = frozenset(),
) -> int | None:
    """The first member in the order of replicas that can lead, if possible none of ``avoid``."""
    fit = [
        node_id
        for node_id in partition.replicas
        if node_id in members and node_id in live and node_id not in partition.unfit
    ]
    return next((node_id for node_id in fit if node_id not in avoid), fit[0] if fit else None)


def elected(
    partition: PartitionImage,
    live: Collection[int],
    avoid: Collection[int] = frozenset(),
    *,
    forfeits: Set[int] = frozenset(),
) -> PartitionImage:
    """The partition with a new leader out of ``isr``, else out of ``elr``, else without one.

    ``forfeits`` leave ``elr`` if a member of it is elected.
    """
    chosen = candidate(partition, partition.isr, live, avoid)
    if chosen is None:
        chosen = candidate(partition, partition.elr, live, avoid)
        if chosen is not None:
            partition = with_in_sync(partition, (chosen,), forfeits=forfeits - {chosen})
    if chosen is None:
        return partition if partition.leader == LEADERLESS else led_by(partition, LEADERLESS)
    return led_by(partition, chosen)
