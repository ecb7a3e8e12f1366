"""Plans: what a command would write, and the revisions on which that was decided.

A plan names every key that it read to decide (``guards``) with the revision it saw, so that it cannot be
committed over somebody else's change. Keys that it writes are among them, except where another guarded key
vouches for them: a topic's record for its chunks, a table's record for its topics and its leases.

``planner`` is the dispatcher: modules register what they plan with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import singledispatch
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tidemill.control import records
from tidemill.control.records import (
    PARTITIONS_PER_CHUNK,
    PartitionImage,
    chunk_count,
    chunk_key,
    deleted_topic_key,
    encode,
    topic_key,
)
from tidemill.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

    from tidemill.control.commands import Command
    from tidemill.control.image import MetadataImage, TopicImage
    from tidemill.control.placement import ControlLimits

__all__ = (
    "Plan",
    "change_partitions",
    "chunk_writes",
    "guards",
    "planner",
    "topic_deletes",
    "topic_named",
    "topic_write",
    "unknown_partition",
    "write_one",
)

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Plan(Generic[R]):
    """The writes of a command (None deletes), the revisions that they depend on, and the command's result."""

    writes: Mapping[str, bytes | None]
    guards: Mapping[str, int]
    result: R


@singledispatch
def planner(command: Command[Any], image: MetadataImage, limits: ControlLimits) -> Plan[Any]:
    """Plan what ``command`` writes to ``image``. Raises ``ApiError`` if it is refused."""
    raise TypeError(f"{type(command).__name__} is not a metadata command")


def write_one(image: MetadataImage, key: str, value: bytes | None, result: R) -> Plan[R]:
    """A plan that writes one key and depends on no other."""
    return Plan({key: value}, guards(image, (key,)), result)


def guards(image: MetadataImage, keys: Iterable[str]) -> dict[str, int]:
    """The revisions of ``keys`` in ``image``."""
    return {key: image.key_revision(key) for key in keys}


def topic_write(topic: TopicImage) -> dict[str, bytes | None]:
    """The write of the topic's record, without its partitions."""
    record = records.TopicRecord(
        name=topic.name, topic_id=topic.id, partition_count=len(topic.partitions), configs=dict(topic.configs)
    )
    return {topic_key(topic.name): encode(record)}


def topic_deletes(
    image: MetadataImage, topic: TopicImage, deleted_by: UUID | None = None
) -> dict[str, bytes | None]:
    """The deletes of the topic's record and of all its partitions.

    In a replicated cluster a record of the nodes that have files to remove stays, because one may be away.
    """
    chunks = range(chunk_count(len(topic.partitions)))
    writes: dict[str, bytes | None] = dict.fromkeys(
        [topic_key(topic.name), *(chunk_key(topic.id, chunk) for chunk in chunks)]
    )
    if image.replicated:
        nodes = sorted({node_id for partition in topic.partitions for node_id in partition.replicas})
        record = records.DeletedTopicRecord(name=topic.name, nodes=tuple(nodes), deleted_by=deleted_by)
        writes[deleted_topic_key(topic.id)] = encode(record)
    return writes


def change_partitions(
    image: MetadataImage, topic: TopicImage, changes: Mapping[int, PartitionImage]
) -> Plan[TopicImage]:
    """A plan that replaces partitions of a topic; it depends on their chunks."""
    partitions = list(topic.partitions)
    for index, partition in changes.items():
        partitions[index] = partition
    changed = replace(topic, partitions=tuple(partitions))
    chunks = sorted({index // PARTITIONS_PER_CHUNK for index in changes})
    return Plan(
        chunk_writes(changed, chunks),
        guards(image, (chunk_key(topic.id, chunk) for chunk in chunks)),
        changed,
    )


def chunk_writes(topic: TopicImage, chunks: Iterable[int]) -> dict[str, bytes | None]:
    """The writes of some chunks of the topic's partitions."""
    return {
        chunk_key(topic.id, chunk): encode(
            records.PartitionsRecord(
                partitions=topic.partitions[chunk * PARTITIONS_PER_CHUNK : (chunk + 1) * PARTITIONS_PER_CHUNK]
            )
        )
        for chunk in chunks
    }


def topic_named(image: MetadataImage, name: str) -> TopicImage:
    """The topic called ``name``; ApiError UNKNOWN_TOPIC_OR_PARTITION if there is none."""
    topic = image.topics.get(name)
    if topic is None:
        raise ApiError(ErrorCode.unknown_topic_or_partition, f"there is no topic {name!r}")
    return topic


def unknown_partition(topic: TopicImage, index: int) -> ApiError:
    """The refusal of a partition that the topic does not have."""
    return ApiError(
        ErrorCode.unknown_topic_or_partition,
        f"topic {topic.name!r} has partitions 0 to {len(topic.partitions) - 1}, not {index}",
    )
