"""Finding partitions: by topic name or id and number, with Kafka's errors for those that are not here.

Every look-up asks the metadata image. An open log alone does not say that this node leads the partition.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Executor
from typing import TYPE_CHECKING
from uuid import UUID

from tidemill.config.topic import TopicConfig
from tidemill.errors import ApiError, ErrorCode
from tidemill.replication.replicas import PartitionKey, Placement, Replicas
from tidemill.replication.rules.assignment import NO_LEADER, PartitionAssignment
from tidemill.replication.rules.epochs import NO_EPOCH, check_leader_epoch
from tidemill.replication.rules.state import Role

if TYPE_CHECKING:
    from tidemill.config.settings import Settings
    from tidemill.control.controller import Controller
    from tidemill.control.image import MetadataDelta, MetadataImage, PartitionImage, TopicImage
    from tidemill.replication.partition import Partition

__all__ = ("PartitionFinder",)

_MAX_BYTES = "max.message.bytes"

logger = logging.getLogger(__name__)


class PartitionFinder:
    """Finds topics in the image, and the partitions that this node leads. Keeps open ones up to the image."""

    def __init__(
        self, settings: Settings, controller: Controller, replicas: Replicas, file_pool: Executor
    ) -> None:
        """``file_pool``: where the first files of partitions are made."""
        self._settings = settings
        self._controller = controller
        self._replicas = replicas
        self._file_pool = file_pool
        #: What this process registers as, in a cluster.
        self.own_incarnation: Callable[[], UUID] | None = None
        #: Whether this process was live by the last image that it has looked at.
        self._could_lead = False
        #: Partitions that this node leads unless it was replaced without hearing of it (``LapsedSession``).
        self.in_doubt: Collection[Partition] = ()
        #: Whether this node reaches nobody who could tell it what is new (``LapsedSession``).
        self.is_isolated = False
        #: Effective configs by topic id; they are asked for with every batch.
        self._configs: dict[UUID, TopicConfig] = {}
        controller.subscribe(self._metadata_changed)

    @property
    def image(self) -> MetadataImage:
        return self._controller.image

    def topic(self, name: str) -> TopicImage:
        """The topic of that name. Raises ``ApiError``."""
        found = self._controller.image.topics.get(name)
        if found is None:
            raise ApiError(ErrorCode.unknown_topic_or_partition, f"there is no topic {name!r}")
        return found

    def topic_by_id(self, topic_id: UUID | None) -> TopicImage:
        """The topic with that id. Raises ``ApiError``."""
        found = None if topic_id is None else self._controller.image.topic_by_id(topic_id)
        if found is None:
            raise ApiError(ErrorCode.unknown_topic_id, f"there is no topic with id {topic_id}")
        return found

    def topic_config(self, topic: TopicImage) -> TopicConfig:
        """The topic's own configs over the node's defaults."""
        config = self._configs.get(topic.id)
        if config is None:
            config = TopicConfig.from_overrides(topic.configs, self._settings.topic_defaults)
            self._configs[topic.id] = config
            if int(topic.configs.get(_MAX_BYTES, 0)) > config.max_message_bytes:
                logger.warning(
                    "topic %s: %s is %s, but no batch above %d bytes is accepted any more; lower it",
                    topic.name,
                    _MAX_BYTES,
                    topic.configs[_MAX_BYTES],
                    config.max_message_bytes,
                )
        return config

    def partition(self, topic: TopicImage, index: int, leader_epoch: int = NO_EPOCH) -> Partition:
        """The partition, if this node leads it, and at the leader epoch that the request names, if any.

        An open partition does not prove it, so the metadata is asked each time. Raises ``ApiError`` or
        ``StorageError``.
        """
        partition = self._replicas.peek(topic.id, index)
        if partition is not None and index < len(topic.partitions):
            placed = topic.partitions[index]
            leads = placed.leader == self._settings.node_id and partition.leads_at(placed.leader_epoch)
            if leads and partition not in self.in_doubt:
                if leader_epoch not in (NO_EPOCH, placed.leader_epoch):
                    check_leader_epoch(topic.name, index, placed.leader_epoch, leader_epoch)
                return partition
        if partition is not None:
            # The caller's image of the topic may be older than what the partition knows.
            topic = self.topic_by_id(topic.id)
        opened = self._replicas.open(self._placement(topic, index, self._led(topic, index, leader_epoch)))
        if opened.role is Role.FOLLOWER:
            # It knows of a newer leader than the metadata does, or is still cutting its log.
            raise opened.not_leader()
        if opened in self.in_doubt:
            raise ApiError(
                ErrorCode.not_leader_or_follower,
                f"node {self._settings.node_id} may not lead {topic.name}-{index} any more: it reaches "
                "neither etcd nor another replica; ask another node for the metadata",
            )
        return opened

    def leader_of(self, topic: TopicImage, index: int) -> tuple[int, int]:
        """Node and epoch of the leader that clients are sent to; ``NO_LEADER`` if there is none.

        It is the metadata's, unless this node has learnt that it does not lead any more, or cannot know
        whether it does (``LapsedSession``).
        """
        placed = topic.partitions[index]
        if placed.leader == self._settings.node_id:
            partition = self._replicas.peek(topic.id, index)
            if partition is not None and partition.leader_epoch > placed.leader_epoch:
                return partition.leader, partition.leader_epoch
            if partition in self.in_doubt:
                return NO_LEADER, placed.leader_epoch
        return placed.leader, placed.leader_epoch

    def follower(self, topic: TopicImage, index: int) -> Partition | None:
        """The partition, if this node is live, follows its leader, and clients may read from it here."""
        partition = self._replicas.peek(topic.id, index)
        if partition is None or index >= len(topic.partitions) or not self._may_lead():
            return None
        placed = topic.partitions[index]
        is_current = (partition.leader, partition.leader_epoch) == (placed.leader, placed.leader_epoch)
        is_replica = self._settings.node_id in placed.replicas
        return partition if is_current and is_replica and partition.as_follower.serves_clients else None

    def has_files(self, topic: TopicImage, index: int) -> bool:
        """Whether the partition is open, and has files that a batch can be appended to."""
        partition = self._replicas.peek(topic.id, index)
        return partition is not None and partition.has_files

    async def partition_with_files(self, topic_name: str, index: int) -> Partition:
        """The partition, with the files that its first append needs: they are made in a thread.

        Raises as ``partition`` does.
        """
        partition = self.partition(self.topic(topic_name), index)
        while not partition.has_files and (creation := partition.begin_creation()) is not None:
            await asyncio.get_running_loop().run_in_executor(self._file_pool, creation.run)
            # It may have been deleted meanwhile, and another of the same name created.
            partition = self.partition(self.topic(topic_name), index)
        return partition

    def held(self, topic: TopicImage, index: int) -> Partition | None:
        """The partition if it is open on this node, whichever node leads it."""
        return self._replicas.peek(topic.id, index)

    def placement(self, topic: TopicImage, index: int) -> Placement:
        """The placement of a partition that this node leads. Raises ``ApiError``."""
        return self._placement(topic, index, self._led(topic, index))

    def led_placements(self) -> Iterator[Placement]:
        """Every partition that this node leads, by the metadata; topics that are new meanwhile are left out.

        There may be very many: the caller lets others have their turn in between.
        """
        for name in self.image.topics:
            topic = self.image.topics.get(name)
            for index, placed in enumerate(() if topic is None else topic.partitions):
                if topic is not None and placed.leader == self._settings.node_id:
                    yield self._placement(topic, index, placed)

    def held_placements(self) -> Iterator[Placement]:
        """Every partition of which this node is a replica; as ``led_placements``."""
        for name in self.image.topics:
            topic = self.image.topics.get(name)
            for index, placed in enumerate(() if topic is None else topic.partitions):
                if topic is not None and self._settings.node_id in placed.replicas:
                    yield self._placement(topic, index, placed)

    def held_placement(self, topic_id: UUID, index: int) -> Placement | None:
        """The placement of a partition of which this node is a replica; None if it is not, or is gone."""
        topic = self.image.topic_by_id(topic_id)
        if topic is None or index >= len(topic.partitions):
            return None
        placed = topic.partitions[index]
        return self._placement(topic, index, placed) if self._settings.node_id in placed.replicas else None

    def kept_placement(self, key: PartitionKey) -> Placement | None:
        """The placement of a partition whose files this node looks after; None if it must not open it.

        In a cluster everything that a node holds is opened by ``HeldPartitions``, and stays open, because
        replication works on it.
        """
        if self.image.replicated and self._replicas.peek(*key) is None:
            return None
        return self.held_placement(*key)

    def _led(self, topic: TopicImage, index: int, leader_epoch: int = NO_EPOCH) -> PartitionImage:
        if not 0 <= index < len(topic.partitions):
            raise ApiError(
                ErrorCode.unknown_topic_or_partition,
                f"topic {topic.name!r} has {len(topic.partitions)} partitions, there is no partition {index}",
            )
        placed, node_id = topic.partitions[index], self._settings.node_id
        check_leader_epoch(topic.name, index, placed.leader_epoch, leader_epoch)
        if placed.leader != node_id:
            leader = "nobody" if placed.leader == NO_LEADER else f"node {placed.leader}"
            raise ApiError(
                ErrorCode.not_leader_or_follower,
                f"node {node_id} does not lead {topic.name}-{index}, {leader} does",
            )
        if not self._may_lead():
            raise ApiError(
                ErrorCode.not_leader_or_follower,
                f"node {node_id} is not admitted to the cluster yet: it does not lead {topic.name}-{index}",
            )
        return placed

    def _may_lead(self) -> bool:
        """Whether this process is live. A leadership from before its registration does not count any more.

        The session of the process before it may still live. Who took its leaderships for its own would have
        followers cut what is not on this disk, at an epoch that they know.
        """
        image, node_id = self.image, self._settings.node_id
        if not image.replicated:
            return True
        own = self.own_incarnation
        return image.live(node_id) and (own is None or image.nodes[node_id].incarnation == own())

    def _placement(self, topic: TopicImage, index: int, placed: PartitionImage) -> Placement:
        assignment = self._assignment(placed)
        return Placement(
            topic.name, topic.id, index, placed.leader_epoch, self.topic_config(topic), assignment
        )

    def _assignment(self, placed: PartitionImage) -> PartitionAssignment:
        if placed.leader == self._settings.node_id and not self._may_lead():
            return PartitionAssignment.led_elsewhere(NO_LEADER, placed.leader_epoch)
        return PartitionAssignment(
            placed.leader,
            placed.leader_epoch,
            placed.replicas,
            placed.isr,
            placed.elr,
            placed.min_isr,
            placed.partition_epoch,
            placed.adding,
        )

    def _metadata_changed(self, old: MetadataImage, new: MetadataImage, delta: MetadataDelta) -> None:
        for topic in delta.deleted:
            self._configs.pop(topic.id, None)
            self._replicas.stop_topic(topic.name, topic.id)
        for name in delta.config_changed:
            topic = new.topics[name]
            self._configs.pop(topic.id, None)
            config = self.topic_config(topic)
            for index in range(len(topic.partitions)):
                partition = self._replicas.peek(topic.id, index)
                if partition is not None:
                    partition.configure(config)
        for changed in (*delta.leader_changed, *delta.replicas_changed):
            topic = new.topics[changed.topic]
            partition = self._replicas.peek(topic.id, changed.partition)
            if partition is not None:
                self._apply(partition, topic)
        could_lead, self._could_lead = self._could_lead, self._may_lead()
        if self._could_lead and not could_lead:
            # While this node was not live, it did not take the records that name it as the leader.
            for partition in self._replicas:
                held = new.topic_by_id(partition.topic_id)
                if held is not None and partition.index < len(held.partitions):
                    self._apply(partition, held)

    def _apply(self, partition: Partition, topic: TopicImage) -> None:
        partition.apply(self._assignment(topic.partitions[partition.index]), self._settings.node_id)
