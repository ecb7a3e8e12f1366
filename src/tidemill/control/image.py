"""The metadata image: everything the cluster has agreed on, immutable, as of one revision.

An image is a fold of stored keys. Folding a full read and folding the transactions one after the other give
equal images. Applying a transaction shares everything that it did not touch.

``MetadataDelta`` tells what differs between two images, whatever lies between them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from operator import itemgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from uuid import UUID

from tidemill.control.records import (
    CONTROLLER_KEY,
    PARTITIONS_PER_CHUNK,
    AdmittedRecord,
    AliveRecord,
    ClusterRecord,
    ControllerRecord,
    DeletedTopicRecord,
    GroupConfigsRecord,
    NodeConfigsRecord,
    NodeNumbersRecord,
    NodeRecord,
    NodeTagsRecord,
    PartitionImage,
    PartitionsRecord,
    ProducerIdsRecord,
    TopicRecord,
    decode,
    node_key,
    normalised_name,
)
from tidemill.control.sharedmap import SharedMap
from tidemill.control.tables.images import Catalog, CatalogFold, table_changes
from tidemill.errors import CorruptData

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tidemill.control.stores.store import ChangeBatch, StoredKeys
    from tidemill.control.tables.images import DatabaseImage, LeaseImage, TableImage, TablePartition

__all__ = (
    "CURSORS_TOPIC",
    "GROUPS_TOPIC",
    "INTERNAL_TOPICS",
    "SHARE_STATE_TOPIC",
    "TRANSACTIONS_TOPIC",
    "ControllerImage",
    "DeletedTopicImage",
    "MetadataDelta",
    "MetadataImage",
    "NodeImage",
    "PartitionImage",
    "TopicImage",
    "TopicPartition",
)

K = TypeVar("K")
V = TypeVar("V")

#: The internal topics: each keeps the state of one coordinator.
GROUPS_TOPIC: Final = "__consumer_offsets"
TRANSACTIONS_TOPIC: Final = "__transaction_state"
SHARE_STATE_TOPIC: Final = "__share_group_state"
CURSORS_TOPIC: Final = "__cursors"
INTERNAL_TOPICS: Final = frozenset({GROUPS_TOPIC, TRANSACTIONS_TOPIC, SHARE_STATE_TOPIC, CURSORS_TOPIC})


class TopicPartition(NamedTuple):
    """A partition by its topic's name and its index."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class NodeImage:
    """A registered node. ``incarnation`` differs with each start of its process.

    Fields that only a node of a cluster has are explained in ``NodeRecord``, with their defaults.
    """

    id: int
    name: str
    host: str
    port: int
    rack: str | None
    incarnation: UUID
    cluster_host: str = ""
    cluster_port: int = 0
    machine: str = ""
    directory_id: UUID | None = None
    clean: bool = False
    new_directory: bool = False
    lost: tuple[tuple[UUID, int], ...] = ()
    cluster_tls: bool | None = None


@dataclass(frozen=True, slots=True)
class ControllerImage:
    """The node that is the controller. ``epoch`` is the revision at which it became that."""

    node_id: int
    epoch: int
    incarnation: UUID | None = None


@dataclass(frozen=True, slots=True)
class DeletedTopicImage:
    """A deleted topic, the nodes that may still have files of it, and the command that has deleted it."""

    id: UUID
    name: str
    nodes: tuple[int, ...]
    deleted_by: UUID | None = None


@dataclass(frozen=True, slots=True)
class TopicImage:
    """A topic. ``configs`` holds the overrides only; ``partitions[i]`` is partition ``i``."""

    name: str
    id: UUID
    partitions: tuple[PartitionImage, ...]
    configs: Mapping[str, str]

    @property
    def internal(self) -> bool:
        """Whether the cluster itself writes this topic."""
        return self.name in INTERNAL_TOPICS


@dataclass(frozen=True, slots=True)
class MetadataImage:
    """The whole metadata at ``revision``. Immutable: a change makes a new image.

    ``key_revisions`` is the revision that last wrote each stored key: what a writer compares.
    ``replica_counts`` is how many replicas each node holds. ``node_configs`` has the cluster's default
    under None. ``group_configs`` has the overrides of groups that have any, by group id. ``catalog`` is all
    about tables; what is asked most can be asked of the image itself.

    In a cluster that is ``replicated``, ``alive`` has the incarnation of every node with a session, and
    ``admitted`` the one that the controller has admitted last. ``node_numbers`` has the number of every name
    that a node ever had. ``cluster_secret`` is what nodes prove to each other.
    """

    revision: int = 0
    cluster_id: str | None = None
    replicated: bool = False
    cluster_secret: bytes = field(default=b"", repr=False)
    nodes: Mapping[int, NodeImage] = field(default_factory=lambda: MappingProxyType({}))
    topics: SharedMap[str, TopicImage] = field(default_factory=SharedMap)
    topic_names_by_id: SharedMap[UUID, str] = field(default_factory=SharedMap)
    topic_names_by_normalised: SharedMap[str, str] = field(default_factory=SharedMap)
    node_configs: Mapping[int | None, Mapping[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    group_configs: SharedMap[str, Mapping[str, str]] = field(default_factory=SharedMap)
    next_producer_id: int = 0
    replica_counts: Mapping[int, int] = field(default_factory=lambda: MappingProxyType({}))
    alive: Mapping[int, UUID] = field(default_factory=lambda: MappingProxyType({}))
    admitted: Mapping[int, UUID] = field(default_factory=lambda: MappingProxyType({}))
    controller: ControllerImage | None = None
    node_numbers: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    node_tags: Mapping[int, tuple[str, ...]] = field(default_factory=lambda: MappingProxyType({}))
    deleted_topics: Mapping[UUID, DeletedTopicImage] = field(default_factory=lambda: MappingProxyType({}))
    catalog: Catalog = field(default_factory=Catalog)
    key_revisions: SharedMap[str, int] = field(default_factory=SharedMap)

    @classmethod
    def from_stored(cls, stored: StoredKeys) -> MetadataImage:
        """The image of everything that is stored."""
        items = ((key, entry.value, entry.mod_revision) for key, entry in stored.entries.items())
        return _Fold(cls()).finish(stored.revision, items)

    def apply(self, batch: ChangeBatch) -> MetadataImage:
        """The image after one more transaction, which must be newer than this image."""
        if batch.revision <= self.revision:
            raise ValueError(
                f"metadata revision {batch.revision} is not newer than the image's {self.revision}"
            )
        items = ((change.key, change.value, batch.revision) for change in batch.changes)
        return _Fold(self).finish(batch.revision, items)

    def topic_by_id(self, topic_id: UUID) -> TopicImage | None:
        """The topic with that id, if there is one."""
        name = self.topic_names_by_id.get(topic_id)
        return None if name is None else self.topics[name]

    def live(self, node_id: int) -> bool:
        """Whether the node may be in sync and lead: it is registered, and its session is admitted."""
        node = self.nodes.get(node_id)
        if node is None or not self.replicated:
            return node is not None
        return self.alive.get(node_id) == node.incarnation == self.admitted.get(node_id)

    @property
    def live_nodes(self) -> frozenset[int]:
        """The ids of the nodes that are live."""
        if not self.replicated:
            return frozenset(self.nodes)
        return frozenset(node_id for node_id in self.nodes if self.live(node_id))

    def node_epoch(self, node_id: int) -> int:
        """The revision of the node's registration; 0 if it is not registered."""
        return self.key_revision(node_key(node_id))

    @property
    def databases(self) -> Mapping[str, DatabaseImage]:
        """The databases by name."""
        return self.catalog.databases

    @property
    def tables(self) -> SharedMap[str, TableImage]:
        """The tables by name, which is ``database.table``."""
        return self.catalog.tables

    @property
    def tables_by_id(self) -> SharedMap[int, TableImage]:
        """The tables by their number."""
        return self.catalog.tables_by_id

    @property
    def leases(self) -> SharedMap[str, LeaseImage]:
        """The leases of snapshots by lease id, also those that have expired and are not dropped yet."""
        return self.catalog.leases

    def leases_of(self, table_id: int) -> tuple[LeaseImage, ...]:
        """The leases of a table's snapshots, by lease id."""
        return self.catalog.leases_by_table.get(table_id) or ()

    def table_of_topic(self, topic_id: UUID) -> tuple[TableImage, TablePartition] | None:
        """The table and the table partition whose log the topic is; None if it is no table's."""
        return self.catalog.table_of_topic(topic_id)

    def key_revision(self, key: str) -> int:
        """The revision that last wrote ``key``, 0 if it is absent."""
        return self.key_revisions.get(key) or 0

    def newest_key(self) -> tuple[str, int]:
        """The key that was written last, and the revision that wrote it; empty and 0 if there is none."""
        return max(self.key_revisions.items(), key=itemgetter(1), default=("", 0))


class _Fold:
    """The fold from stored keys to an image: collects changes, then makes the new image at once."""

    def __init__(self, image: MetadataImage) -> None:
        self._image = image
        self._nodes = dict(image.nodes)
        self._node_configs = dict(image.node_configs)
        self._replica_counts = dict(image.replica_counts)
        self._cluster_id = image.cluster_id
        self._replicated = image.replicated
        self._cluster_secret = image.cluster_secret
        self._node_numbers = image.node_numbers
        self._alive = dict(image.alive)
        self._admitted = dict(image.admitted)
        self._tags = dict(image.node_tags)
        self._deleted = dict(image.deleted_topics)
        self._controller = image.controller
        self._next_producer_id = image.next_producer_id
        self._group_configs: dict[str, Mapping[str, str] | None] = {}
        self._topics: dict[UUID, TopicImage | None] = {}
        self._chunks: dict[UUID, dict[int, tuple[PartitionImage, ...]]] = {}
        self._counts: dict[UUID, int] = {}
        self._catalog = CatalogFold(image.catalog)
        self._key_revisions: dict[str, int | None] = {}

    def finish(self, revision: int, items: Iterable[tuple[str, bytes | None, int]]) -> MetadataImage:
        for key, value, mod_revision in items:
            if self._fold_key(key, value, mod_revision):
                self._key_revisions[key] = None if value is None else mod_revision
        self._assemble_partitions()
        old = self._image
        topics: dict[str, TopicImage | None] = {}
        names_by_id: dict[UUID, str | None] = {}
        names_by_normalised: dict[str, str | None] = {}
        # Removals come first, so that a topic recreated in the same transaction is not removed again.
        for topic_id, topic in sorted(self._topics.items(), key=lambda item: item[1] is not None):
            old_name = old.topic_names_by_id.get(topic_id)
            if topic is None:
                assert old_name is not None
                topics[old_name] = names_by_id[topic_id] = names_by_normalised[normalised_name(old_name)] = (
                    None
                )
            else:
                topics[topic.name] = topic
                if old_name is None:
                    names_by_id[topic_id] = names_by_normalised[normalised_name(topic.name)] = topic.name
        return MetadataImage(
            revision=revision,
            cluster_id=self._cluster_id,
            replicated=self._replicated,
            cluster_secret=self._cluster_secret,
            node_numbers=self._node_numbers,
            nodes=MappingProxyType(self._nodes) if self._nodes != old.nodes else old.nodes,
            alive=MappingProxyType(self._alive),
            admitted=MappingProxyType(self._admitted),
            controller=self._controller,
            node_tags=MappingProxyType(self._tags),
            deleted_topics=MappingProxyType(self._deleted),
            topics=old.topics.update(topics),
            topic_names_by_id=old.topic_names_by_id.update(names_by_id),
            topic_names_by_normalised=old.topic_names_by_normalised.update(names_by_normalised),
            node_configs=MappingProxyType(self._node_configs),
            group_configs=old.group_configs.update(self._group_configs),
            next_producer_id=self._next_producer_id,
            replica_counts=MappingProxyType({n: count for n, count in self._replica_counts.items() if count}),
            catalog=self._catalog.finish(),
            key_revisions=old.key_revisions.update(self._key_revisions),
        )

    def _fold_key(self, key: str, value: bytes | None, mod_revision: int) -> bool:
        """Fold one key; False if it is not one of the image's."""
        kind, _, rest = key.partition("/")
        match kind:
            case "topics":
                self._fold_topic(key, rest, value)
            case "partitions":
                self._fold_chunk(key, rest, value)
            case "nodes":
                self._fold_node(key, int(rest), value)
            case "configs":
                node_id = None if rest == "cluster" else int(rest.removeprefix("nodes/"))
                if value is None:
                    self._node_configs.pop(node_id, None)
                else:
                    self._node_configs[node_id] = MappingProxyType(
                        decode(key, value, NodeConfigsRecord).configs
                    )
            case "group-configs":
                self._group_configs[rest] = (
                    None
                    if value is None
                    else MappingProxyType(decode(key, value, GroupConfigsRecord).configs)
                )
            case "cluster":
                cluster = None if value is None else decode(key, value, ClusterRecord)
                self._cluster_id = None if cluster is None else cluster.cluster_id
                self._replicated = cluster is not None and cluster.replicated
                self._cluster_secret = b"" if cluster is None else cluster.secret
            case "producer-ids":
                self._next_producer_id = (
                    0 if value is None else decode(key, value, ProducerIdsRecord).next_producer_id
                )
            case "node-numbers":
                self._node_numbers = {} if value is None else decode(key, value, NodeNumbersRecord).numbers
            case "alive" | "admitted" | "tags" | "deleted" | "controller":
                self._fold_cluster_state(key, kind, rest, value, mod_revision)
            case _:
                return self._catalog.fold(key, value)
        return True

    def _fold_cluster_state(
        self, key: str, kind: str, rest: str, value: bytes | None, mod_revision: int
    ) -> None:
        """Fold what only a cluster of several nodes has."""
        if key == CONTROLLER_KEY:
            record = None if value is None else decode(key, value, ControllerRecord)
            self._controller = (
                None if record is None else ControllerImage(record.node_id, mod_revision, record.incarnation)
            )
        elif kind == "alive":
            alive = None if value is None else decode(key, value, AliveRecord).incarnation
            _put(self._alive, int(rest), alive)
        elif kind == "admitted":
            admitted = None if value is None else decode(key, value, AdmittedRecord).incarnation
            _put(self._admitted, int(rest), admitted)
        elif kind == "tags":
            tags = None if value is None else decode(key, value, NodeTagsRecord).tags
            _put(self._tags, int(rest), tags)
        else:
            topic_id = UUID(hex=rest)
            deleted = None
            if value is not None:
                stored = decode(key, value, DeletedTopicRecord)
                deleted = DeletedTopicImage(topic_id, stored.name, stored.nodes, stored.deleted_by)
            _put(self._deleted, topic_id, deleted)

    def _fold_node(self, key: str, node_id: int, value: bytes | None) -> None:
        if value is None:
            self._nodes.pop(node_id, None)
            return
        record = decode(key, value, NodeRecord)
        self._nodes[node_id] = NodeImage(
            id=node_id,
            name=record.name,
            host=record.host,
            port=record.port,
            rack=record.rack,
            incarnation=record.incarnation,
            cluster_host=record.cluster_host,
            cluster_port=record.cluster_port,
            machine=record.machine,
            directory_id=record.directory_id,
            clean=record.clean,
            new_directory=record.new_directory,
            lost=record.lost,
            cluster_tls=record.cluster_tls,
        )

    def _fold_topic(self, key: str, normalised: str, value: bytes | None) -> None:
        old_name = self._image.topic_names_by_normalised.get(normalised)
        old = None if old_name is None else self._image.topics[old_name]
        record = None if value is None else decode(key, value, TopicRecord)
        if old is not None and (record is None or record.topic_id != old.id):
            self._topics[old.id] = None
            self._count_replicas(old.partitions, -1)
        if record is not None:
            partitions = old.partitions if old is not None and old.id == record.topic_id else ()
            configs = MappingProxyType(record.configs)
            self._topics[record.topic_id] = TopicImage(record.name, record.topic_id, partitions, configs)
            self._counts[record.topic_id] = record.partition_count

    def _fold_chunk(self, key: str, rest: str, value: bytes | None) -> None:
        # A chunk is deleted only together with its topic, which takes the partitions along.
        if value is not None:
            topic_id, _, chunk = rest.partition("/")
            partitions = decode(key, value, PartitionsRecord).partitions
            self._chunks.setdefault(UUID(hex=topic_id), {})[int(chunk)] = partitions

    def _assemble_partitions(self) -> None:
        for topic_id, chunks in self._chunks.items():
            topic = self._topics[topic_id] if topic_id in self._topics else self._image.topic_by_id(topic_id)
            if topic is None:
                raise CorruptData(
                    "partitions of a topic that does not exist", path=f"topic {topic_id}", position=0
                )
            partitions = list(topic.partitions)
            for chunk in sorted(chunks):
                window = slice(chunk * PARTITIONS_PER_CHUNK, (chunk + 1) * PARTITIONS_PER_CHUNK)
                self._count_replicas(partitions[window], -1)
                partitions[window] = chunks[chunk]
                self._count_replicas(chunks[chunk], 1)
            self._topics[topic_id] = replace(topic, partitions=tuple(partitions))
        for topic_id, count in self._counts.items():
            topic = self._topics[topic_id]
            if topic is not None and len(topic.partitions) != count:
                raise CorruptData(
                    f"topic {topic.name!r} should have {count} partitions and has {len(topic.partitions)}",
                    path=f"topic {topic_id}",
                    position=0,
                )

    def _count_replicas(self, partitions: Iterable[PartitionImage], sign: int) -> None:
        counts = self._replica_counts
        for partition in partitions:
            for node_id in partition.replicas:
                counts[node_id] = counts.get(node_id, 0) + sign


@dataclass(frozen=True, slots=True)
class MetadataDelta:
    """What differs between two images, sorted by topic name.

    A topic that was deleted and created again is in both ``deleted`` (the old one) and ``created`` (the new
    one). ``new_partitions`` (name to the range of added partitions), ``config_changed`` and
    ``leader_changed`` speak of topics that are in both images. ``leader_changed`` names partitions with
    another leader or leader epoch, ``replicas_changed`` those with anything else changed.

    ``live_changed`` is true when a node became live, is live no more, or is live as another incarnation.

    Tables are told in the same way, sorted by table name. ``tables_changed`` has the new images of those with
    another schema, property, comment or partition.
    """

    created: tuple[TopicImage, ...]
    deleted: tuple[TopicImage, ...]
    new_partitions: Mapping[str, range]
    config_changed: tuple[str, ...]
    leader_changed: tuple[TopicPartition, ...]
    replicas_changed: tuple[TopicPartition, ...]
    nodes_changed: bool
    live_changed: bool
    controller_changed: bool
    deleted_topics_changed: bool
    node_configs_changed: bool
    tables_created: tuple[TableImage, ...]
    tables_dropped: tuple[TableImage, ...]
    tables_changed: tuple[TableImage, ...]
    leases_changed: bool

    @classmethod
    def between(cls, old: MetadataImage, new: MetadataImage) -> MetadataDelta:
        """The difference of two images."""
        created: list[TopicImage] = []
        deleted: list[TopicImage] = []
        new_partitions: dict[str, range] = {}
        config_changed: list[str] = []
        leader_changed: list[TopicPartition] = []
        replicas_changed: list[TopicPartition] = []
        for name in sorted(new.topics.differing_keys(old.topics)):
            before, after = old.topics.get(name), new.topics.get(name)
            if before is None or after is None or before.id != after.id:
                deleted += [before] if before is not None else []
                created += [after] if after is not None else []
                continue
            if len(after.partitions) > len(before.partitions):
                new_partitions[name] = range(len(before.partitions), len(after.partitions))
            if after.configs != before.configs:
                config_changed.append(name)
            for index, (was, now) in enumerate(zip(before.partitions, after.partitions, strict=False)):
                if was is now:
                    continue
                if has_new_leader := (was.leader, was.leader_epoch) != (now.leader, now.leader_epoch):
                    leader_changed.append(TopicPartition(name, index))
                # A record may differ in its epoch alone, and the leader's next proposal has to name that one.
                is_new_record = was.partition_epoch != now.partition_epoch and not has_new_leader
                if is_new_record or _beside_leader(was) != _beside_leader(now):
                    replicas_changed.append(TopicPartition(name, index))
        tables_created, tables_dropped, tables_changed = table_changes(old.catalog, new.catalog)
        return cls(
            created=tuple(created),
            deleted=tuple(deleted),
            new_partitions=new_partitions,
            config_changed=tuple(config_changed),
            leader_changed=tuple(leader_changed),
            replicas_changed=tuple(replicas_changed),
            nodes_changed=new.nodes != old.nodes or new.node_tags != old.node_tags,
            live_changed=_live_incarnations(old) != _live_incarnations(new),
            controller_changed=new.controller != old.controller,
            deleted_topics_changed=new.deleted_topics != old.deleted_topics,
            node_configs_changed=new.node_configs != old.node_configs,
            tables_created=tables_created,
            tables_dropped=tables_dropped,
            tables_changed=tables_changed,
            leases_changed=new.leases != old.leases,
        )


def _put(entries: dict[K, V], key: K, value: V | None) -> None:
    if value is None:
        entries.pop(key, None)
    else:
        entries[key] = value


def _beside_leader(partition: PartitionImage) -> tuple[object, ...]:
    return (
        partition.replicas,
        partition.isr,
        partition.elr,
        partition.adding,
        partition.removing,
        partition.min_isr,
        partition.unfit,
        partition.successor,
    )


def _live_incarnations(image: MetadataImage) -> dict[int, UUID]:
    return {node_id: node.incarnation for node_id, node in image.nodes.items() if image.live(node_id)}
