"""What the metadata says about the replicas of a partition, as the replicas need it. A value."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("NO_LEADER", "PartitionAssignment")

#: Stands for the leader of a partition that has none.
NO_LEADER = -1


@dataclass(frozen=True, slots=True)
class PartitionAssignment:
    """The replicas of a partition, as one version of its metadata record has them.

    Attributes:
        leader: A node's number, or ``NO_LEADER``.
        leader_epoch: Rises with every change of the leader.
        replicas: The nodes that hold it; ``adding`` is a part of them.
        isr: The committed in-sync set, the leader included.
        elr: Replicas outside of ``isr`` that have every committed record, too.
        min_isr: Nothing is committed while fewer replicas are in sync.
        partition_epoch: Rises with every change of the record.
    """

    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    elr: tuple[int, ...] = ()
    min_isr: int = 1
    partition_epoch: int = 0
    adding: tuple[int, ...] = ()

    @classmethod
    def alone(cls, node_id: int, leader_epoch: int) -> PartitionAssignment:
        """The assignment of a partition that has one replica.

        >>> PartitionAssignment.alone(1, 4).isr
        (1,)
        """
        return cls(node_id, leader_epoch, (node_id,), (node_id,))

    @classmethod
    def led_elsewhere(cls, leader: int, leader_epoch: int) -> PartitionAssignment:
        """The assignment of which only the leader is known; this node is not the leader."""
        return cls(leader, leader_epoch, (), ())
