"""Plans: what a command would write, and the revisions on which that was decided.

A plan names every key that it read to decide (``guards``) with the revision it saw, so that it cannot be
committed over somebody else's change. Keys that it writes are among them, except where another guarded key
vouches for them: a topic's record for its chunks, a table's record for its topics and its leases.

``planner`` is the dispatcher: modules register what they plan with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tidemill.control import records
from tidemill.control.records import chunk_count, chunk_key, encode, topic_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tidemill.control.commands import Command
    from tidemill.control.image import MetadataImage, TopicImage
    from tidemill.control.placement import ControlLimits

__all__ = ("Plan", "guards", "planner", "topic_deletes", "topic_write", "write_one")

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


def topic_deletes(topic: TopicImage) -> dict[str, bytes | None]:
    """The deletes of the topic's record and of all its partitions."""
    chunks = range(chunk_count(len(topic.partitions)))
    return dict.fromkeys([topic_key(topic.name), *(chunk_key(topic.id, chunk) for chunk in chunks)])
