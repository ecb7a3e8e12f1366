"""What a node of a cluster sees of it: replicas that are behind, and changes of leaders and in-sync sets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from tidemill.replication.rules.state import Role

if TYPE_CHECKING:
    from tidemill.control.image import MetadataDelta, MetadataImage, PartitionImage
    from tidemill.server.broker import Broker

__all__ = ("ClusterWatch",)

_NO_LEADER: Final = -1
_NAMED_MAX: Final = 5


class ClusterWatch:
    """Counts what changes in the cluster, and knows whether this node has caught up since it started.

    Attributes:
        leader_changes: Changes of leaders and leader epochs that this node has seen, of all partitions.
        shrinks: Times that the in-sync set of a partition led here became smaller.
        expands: Times that it became larger.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.leader_changes = 0
        self.shrinks = 0
        self.expands = 0
        self._has_caught_up = False

    def metadata_changed(self, old: MetadataImage, new: MetadataImage, delta: MetadataDelta) -> None:
        """Count the changes of leaders and in-sync sets between two images."""
        self.leader_changes += len(delta.leader_changed)
        # A partition can be in both.
        for topic, index in {*delta.leader_changed, *delta.replicas_changed}:
            before, now = old.topics[topic].partitions[index], new.topics[topic].partitions[index]
            if now.leader == self._broker.node_id:
                self.shrinks += len(now.isr) < len(before.isr)
                self.expands += len(now.isr) > len(before.isr)

    def led(self) -> Iterator[PartitionImage]:
        """The partitions that this node leads."""
        node_id = self._broker.node_id
        for topic in self._broker.image.topics.values():
            for placed in topic.partitions:
                if placed.leader == node_id:
                    yield placed

    def under_replicated(self) -> int:
        """How many partitions that this node leads have replicas that are not in sync."""
        return sum(1 for placed in self.led() if len(placed.isr) < len(placed.replicas))

    def below_minimum(self) -> int:
        """How many partitions that this node leads refuse acks=all, because too few replicas are in sync."""
        return sum(1 for placed in self.led() if len(placed.isr) < placed.min_isr)

    def leaderless(self) -> int:
        """How many partitions of the cluster have no leader."""
        return sum(
            1
            for topic in self._broker.image.topics.values()
            for placed in topic.partitions
            if placed.leader == _NO_LEADER
        )

    def lag_records_max(self) -> int:
        """How many records the furthest follower of a partition that this node leads lacks."""
        return max(
            (
                partition.log_end_offset - max(follower.matched_end, partition.log_start_offset)
                for partition in self._broker.replicas
                if partition.role is Role.LEADER
                for follower in partition.as_leader.followers.values()
            ),
            default=0,
        )

    def behind(self) -> list[str]:
        """The replicas of this node that could be in sync and are not."""
        broker, node_id = self._broker, self._broker.node_id
        stopped = {(topic, index) for topic, index, _ in broker.replicas.stopped()}
        return [
            f"{topic.name}-{index}"
            for topic in broker.image.topics.values()
            for index, placed in enumerate(topic.partitions)
            if node_id in placed.replicas
            and node_id not in placed.isr
            and placed.leader not in (_NO_LEADER, node_id)
            and (topic.name, index) not in stopped
        ]

    def is_catching_up(self) -> bool:
        """Whether replicas of this node have not been in sync since it started.

        Once they were, one that falls behind is a problem, and no reason to keep clients away.
        """
        if not self._has_caught_up and self._broker.image.live(self._broker.node_id):
            self._has_caught_up = not self.behind()
        return not self._has_caught_up

    def problems(self) -> list[str]:
        """What is wrong with replicas held and led here, in words."""
        found = []
        behind = self.behind()
        if behind:
            shown = ", ".join(behind[:_NAMED_MAX]) + (", ..." if len(behind) > _NAMED_MAX else "")
            found.append(f"{len(behind)} replicas of this node are catching up with their leaders ({shown})")
        if count := self.below_minimum():
            found.append(
                f"{count} partitions that this node leads have fewer replicas in sync than "
                "min.insync.replicas: records with acks=all are refused until more are"
            )
        return found
