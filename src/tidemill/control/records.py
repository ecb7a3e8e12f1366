"""What the control plane stores: keys, and the records under them.

| key | record |
| --- | --- |
| ``cluster`` | ``ClusterRecord`` |
| ``nodes/<id>`` | ``NodeRecord`` |
| ``configs/cluster``, ``configs/nodes/<id>`` | ``NodeConfigsRecord`` |
| ``producer-ids`` | ``ProducerIdsRecord`` |
| ``topics/<name with '.' as '_'>`` | ``TopicRecord`` |
| ``partitions/<topic id>/<chunk>`` | ``PartitionsRecord``: up to 1,000 partitions |

Kafka refuses a topic whose name differs from another's only by '.' and '_'. Their key is the same, so two
writers cannot create both.

The topic's record guards the number of its partitions: whoever adds or deletes chunks writes it too. Who
changes a leader writes the chunk only.

Values are MessagePack maps with a format version ``v``. A newer version is refused, not guessed at.
"""

from __future__ import annotations

from typing import TypeVar
from uuid import UUID

import msgspec

from tidemill.errors import CorruptData, StorageError

__all__ = (
    "CLUSTER_KEY",
    "PARTITIONS_PER_CHUNK",
    "PRODUCER_IDS_KEY",
    "ClusterRecord",
    "NodeConfigsRecord",
    "NodeRecord",
    "PartitionImage",
    "PartitionsRecord",
    "ProducerIdsRecord",
    "TopicRecord",
    "chunk_count",
    "chunk_key",
    "decode",
    "encode",
    "node_configs_key",
    "node_key",
    "normalised_name",
    "topic_key",
)

PARTITIONS_PER_CHUNK = 1_000
CLUSTER_KEY = "cluster"
PRODUCER_IDS_KEY = "producer-ids"

_FORMAT_VERSION = 1


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the records, each of which is stored under one key."""

    v: int = _FORMAT_VERSION


class ClusterRecord(Record, frozen=True, kw_only=True):
    """The name of the whole cluster."""

    cluster_id: str


class NodeRecord(Record, frozen=True, kw_only=True):
    """A node; its number is in the key."""

    name: str
    host: str
    port: int
    rack: str | None
    incarnation: UUID


class NodeConfigsRecord(Record, frozen=True, kw_only=True):
    """Dynamic configs of one node or of the whole cluster."""

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

    ``leader_epoch`` rises with every change of the leader and never goes back. The first replica is the
    preferred leader.
    """

    leader: int
    leader_epoch: int
    replicas: tuple[int, ...]
    isr: tuple[int, ...]


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


def node_configs_key(node_id: int | None) -> str:
    """Key of a node's dynamic configs; None is the default of the whole cluster."""
    return "configs/cluster" if node_id is None else f"configs/nodes/{node_id}"
