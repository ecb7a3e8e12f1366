"""What the control plane stores: keys, and the records under them.

| key | record |
| --- | --- |
| ``cluster`` | ``ClusterRecord`` |
| ``nodes/<id>`` | ``NodeRecord``; the revision that wrote it is the node epoch |
| ``node-numbers`` | ``NodeNumbersRecord`` |
| ``alive/<id>`` | ``AliveRecord``, bound to the node's session |
| ``admitted/<id>`` | ``AdmittedRecord`` |
| ``tags/<id>`` | ``NodeTagsRecord``; apart from the node, because tags must not change the node epoch |
| ``controller`` | ``ControllerRecord``, bound to the controller's session |
| ``deleted/<topic id>`` | ``DeletedTopicRecord`` |
| ``configs/cluster``, ``configs/nodes/<id>`` | ``NodeConfigsRecord`` |
| ``group-configs/<group id>`` | ``GroupConfigsRecord`` |
| ``producer-ids`` | ``ProducerIdsRecord`` |
| ``topics/<name with '.' as '_'>`` | ``TopicRecord`` |
| ``partitions/<topic id>/<chunk>`` | ``PartitionsRecord``: up to 1,000 partitions |

Kafka refuses a topic whose name differs from another's only by '.' and '_'. Their key is the same, so two
writers cannot create both.

The topic's record guards the number of its partitions: a command that adds or deletes chunks writes it, too.
One that changes a leader writes the chunk only.

Values are MessagePack maps with a format version ``v``. A newer version is refused, not guessed at.
"""

from __future__ import annotations

from typing import TypeVar
from uuid import UUID

import msgspec

from tidemill.errors import CorruptData, StorageError

__all__ = (
    "CLUSTER_KEY",
    "CONTROLLER_KEY",
    "NODE_NUMBERS_KEY",
    "PARTITIONS_PER_CHUNK",
    "PRODUCER_IDS_KEY",
    "AdmittedRecord",
    "AliveRecord",
    "ClusterRecord",
    "ControllerRecord",
    "DeletedTopicRecord",
    "GroupConfigsRecord",
    "NodeConfigsRecord",
    "NodeNumbersRecord",
    "NodeRecord",
    "NodeTagsRecord",
    "PartitionImage",
    "PartitionsRecord",
    "ProducerIdsRecord",
    "TopicRecord",
    "admitted_key",
    "alive_key",
    "chunk_count",
    "chunk_key",
    "decode",
    "deleted_topic_key",
    "encode",
    "group_configs_key",
    "node_configs_key",
    "node_key",
    "node_tags_key",
    "normalised_name",
    "topic_key",
)

PARTITIONS_PER_CHUNK = 1_000
CLUSTER_KEY = "cluster"
CONTROLLER_KEY = "controller"
NODE_NUMBERS_KEY = "node-numbers"
PRODUCER_IDS_KEY = "producer-ids"

_FORMAT_VERSION = 1


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the records, each of which is stored under one key."""

    v: int = _FORMAT_VERSION


class ClusterRecord(Record, frozen=True, kw_only=True):
    """The name of the whole cluster."""

    cluster_id: str
    #: Whether nodes have sessions, and leaders are elected. A node that is alone needs neither.
    replicated: bool = False
    #: What nodes prove to each other, unless they are given another secret. Who reads the store is trusted.
    secret: bytes = b""


class NodeRecord(Record, frozen=True, kw_only=True):
    """A node; its number is in the key."""

    name: str
    host: str
    port: int
    rack: str | None
    incarnation: UUID
    #: Where other nodes connect; empty on a node that is alone.
    cluster_host: str = ""
    cluster_port: int = 0
    #: The machine that it runs on: replicas are spread over machines.
    machine: str = ""
    #: The id of its data directory; another one has none of the records of the last one.
    directory_id: UUID | None = None
    #: Whether the last incarnation stopped in an orderly way, so that its disk has all that it ever reported.
    clean: bool = False
    #: Whether the directory is another one than that of the last admitted incarnation.
    new_directory: bool = False
    #: Replicas that the directory should have and has not, or has repaired with loss: (topic id, index).
    lost: tuple[tuple[UUID, int], ...] = ()
    #: Whether it uses TLS between nodes; None if it was registered by a version that does not say so.
    cluster_tls: bool | None = None


class NodeTagsRecord(Record, frozen=True, kw_only=True):
    """What an operator says about a node: ``PERMANENT_OFFLINE`` or ``TEMPORARY_OFFLINE``."""

    tags: tuple[str, ...]


class AliveRecord(Record, frozen=True, kw_only=True):
    """Bound to a node's session (a store lease): the node runs, as that incarnation."""

    incarnation: UUID


class AdmittedRecord(Record, frozen=True, kw_only=True):
    """Written by the controller: this incarnation has left what it may not keep, and counts as live."""

    incarnation: UUID


class ControllerRecord(Record, frozen=True, kw_only=True):
    """Bound to the session of the node that is the controller. Its revision is the controller epoch."""

    node_id: int
    #: Tells an earlier session of the same node from this one.
    incarnation: UUID | None = None


class NodeNumbersRecord(Record, frozen=True, kw_only=True):
    """The numbers of nodes by their names; a number is never given to another name."""

    numbers: dict[str, int]


class DeletedTopicRecord(Record, frozen=True, kw_only=True):
    """A deleted topic of which some nodes may still have files."""

    name: str
    nodes: tuple[int, ...]
    #: The id of the command that has deleted it, if it had one.
    deleted_by: UUID | None = None


class NodeConfigsRecord(Record, frozen=True, kw_only=True):
    """Dynamic configs of one node or of the whole cluster."""

    configs: dict[str, str]


class GroupConfigsRecord(Record, frozen=True, kw_only=True):
    """The configs of one group that are not the node's."""

    configs: dict[str, str]


class ProducerIdsRecord(Record, frozen=True, kw_only=True):
    """The next producer id: all ids below it have been given away."""

    next_producer_id: int


class TopicRecord(Record, frozen=True, kw_only=True):
    """A topic without its partitions."""

    name: str
    topic_id: UUID
    partition_count: int
    configs: dict[str, str]


class PartitionImage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The replicas of a partition. ``leader`` is one of ``isr``, which is a part of ``replicas``.

    Attributes:
        leader: A node's number; -1 if there is none.
        leader_epoch: Rises with every change of the leader and never goes back.
        replicas: The nodes that hold it. The first one is the preferred leader.
        isr: The in-sync replicas: each has every committed record on its disk.
        elr: Replicas outside of ``isr`` that have every committed record, too, because nothing was committed
            since they left (KIP-966).
        adding: Replicas that a reassignment adds; part of ``replicas``.
        removing: Replicas that a reassignment removes; part of ``replicas``.
        partition_epoch: Rises with every change of this record. Proposals name it.
        min_isr: Nothing is committed while fewer replicas are in sync: min.insync.replicas, or fewer if there
            are not that many replicas.
        unfit: Replicas whose disk has failed, is full or hangs: they are not elected until they say that
            they can lead again.
        successor: The replica that is wanted as the leader; -1 if there is no such wish. The leader resigns
            in its favour: leadership is not taken from a node whose session lives.
    """

    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    elr: tuple[int, ...] = ()
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()
    partition_epoch: int = 0
    min_isr: int = 1
    unfit: tuple[int, ...] = ()
    successor: int = -1


class PartitionsRecord(Record, frozen=True, kw_only=True):
    """A chunk of a topic's partitions, in order from partition ``chunk * 1000`` on."""

    partitions: tuple[PartitionImage, ...]


RecordType = TypeVar("RecordType", bound=Record)


def encode(record: Record) -> bytes:
    """The stored form of ``record``."""
    return msgspec.msgpack.encode(record)


def decode(key: str, value: bytes, record_type: type[RecordType]) -> RecordType:
    """The record under ``key``, which must be of ``record_type`` and of a version that this program knows."""
    try:
        record = msgspec.msgpack.decode(value, type=record_type)
    except msgspec.MsgspecError as error:
        _check_version(key, _version_of(value))
        raise CorruptData(f"the metadata record cannot be decoded: {error}", path=key, position=0) from error
    _check_version(key, record.v)
    return record


def _version_of(value: bytes) -> int:
    """The version of a record that is not of the expected type; 0 if it is no record at all."""
    try:
        return msgspec.msgpack.decode(value, type=Record).v
    except msgspec.MsgspecError:
        return 0


def _check_version(key: str, version: int) -> None:
    if version > _FORMAT_VERSION:
        raise StorageError(
            f"metadata key {key!r} has format version {version}, this program knows up to"
            f" {_FORMAT_VERSION}; start the newer Tidemill that wrote it"
        )


def normalised_name(topic: str) -> str:
    """The name with '.' as '_': two topics whose normalised names are equal collide, as in Kafka."""
    return topic.replace(".", "_")


def topic_key(topic: str) -> str:
    """Key of a topic's record."""
    return "topics/" + normalised_name(topic)


def chunk_key(topic_id: UUID, chunk: int) -> str:
    """Key of a chunk of a topic's partitions."""
    return f"partitions/{topic_id.hex}/{chunk:03d}"


def chunk_count(partition_count: int) -> int:
    """How many chunks hold that many partitions."""
    return -(-partition_count // PARTITIONS_PER_CHUNK)


def node_key(node_id: int) -> str:
    """Key of a node's record."""
    return f"nodes/{node_id}"


def alive_key(node_id: int) -> str:
    """Key of a node's session."""
    return f"alive/{node_id}"


def admitted_key(node_id: int) -> str:
    """Key of what the controller has written about a node's incarnation."""
    return f"admitted/{node_id}"


def node_tags_key(node_id: int) -> str:
    """Key of a node's tags."""
    return f"tags/{node_id}"


def deleted_topic_key(topic_id: UUID) -> str:
    """Key of a deleted topic whose files are not gone everywhere."""
    return f"deleted/{topic_id.hex}"


def node_configs_key(node_id: int | None) -> str:
    """Key of a node's dynamic configs; None is the default of the whole cluster."""
    return "configs/cluster" if node_id is None else f"configs/nodes/{node_id}"


def group_configs_key(group_id: str) -> str:
    """Key of a group's configs."""
    return f"group-configs/{group_id}"
