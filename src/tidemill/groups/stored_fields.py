"""What the stored records of consumer groups and of share groups have in common: keys, partitions, versions.

All their values are version 0 and flexible. ``coordination.stored`` has the rules of stored records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

from tidemill.coordination.stored import Codec, RecordType, Struct
from tidemill.groups.consumer.member import Partitions, by_topic

if TYPE_CHECKING:
    from collections.abc import Callable

    from tidemill.wire.declare import Fields

__all__ = (
    "EPOCH",
    "GROUP_KEY",
    "MEMBER_KEY",
    "PARTITIONS",
    "SORTED_SET",
    "TARGET",
    "TOPIC_PARTITIONS",
    "record_type",
)

R = TypeVar("R")


def _by_topic(partitions: Partitions) -> list[dict[str, Any]]:
    return [
        {"topic_id": topic_id, "partitions": indexes} for topic_id, indexes in by_topic(partitions).items()
    ]


def _partitions(topics: tuple[Any, ...]) -> Partitions:
    return frozenset((topic.topic_id or UUID(int=0), index) for topic in topics for index in topic.partitions)


GROUP_KEY: Final[Fields] = {"group_id": "string"}
MEMBER_KEY: Final[Fields] = {"group_id": "string", "member_id": "string"}

#: A set, stored in the order of its values.
SORTED_SET: Final = Codec(unpack=frozenset, pack=sorted)
#: Partitions of several topics: the fields of one topic, and the codec of a list of those.
TOPIC_PARTITIONS: Final[Fields] = {"topic_id": "uuid", "partitions": ["int32"]}
PARTITIONS: Final = Codec(unpack=_partitions, pack=_by_topic)

EPOCH: Final = Struct(None, {"epoch": "int32"})
#: The target assignment of a member.
TARGET: Final = Struct(None, {"partitions": [TOPIC_PARTITIONS]}, {"partitions": PARTITIONS})


def record_type(key_version: int, record: Callable[..., R], key: Fields, value: Struct) -> RecordType[R]:
    """The type of records of class ``record``, whose values have one version."""
    return RecordType(
        record.__name__,
        record,
        key_versions=(key_version,),
        key=key,
        value=value,
        versions=range(1),
        written=0,
    )
