"""What members of the classic ``consumer`` protocol tell each other: subscriptions and assignments.

The bytes come from clients and are not checked by anybody else, so anything may be in them. Versions only
ever add fields at the end: what a version does not have has a default, and what comes after the fields of
the newest version known here is not looked at.

| version | a subscription also has |
| --- | --- |
| 0 | the topics, user data |
| 1 | the partitions that the member owns |
| 2 | the generation in which it owned them |
| 3 | the rack |

An assignment has partitions and user data in every version.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tidemill.coordination.binary import MalformedBytes, Reader, pack_string

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidemill.groups.messages import TopicPartition

__all__ = (
    "CONSUMER_PROTOCOL",
    "Subscription",
    "pack_assignment",
    "parse_assignment",
    "parse_full_subscription",
    "parse_subscription",
    "protocol_version",
)

CONSUMER_PROTOCOL: Final = "consumer"
"""The protocol type of groups whose metadata is a consumer subscription."""

_NEWEST_VERSION: Final = 3


@dataclass(frozen=True, slots=True)
class Subscription:
    """A whole subscription. Members of version 0 own nothing when they join: they gave all up before."""

    topics: frozenset[str]
    owned: tuple[TopicPartition, ...] = ()
    rack_id: str | None = None


def parse_subscription(metadata: bytes) -> frozenset[str]:
    """The subscribed topics. Any bytes either parse or raise ``MalformedBytes``.

    >>> sorted(parse_subscription(bytes.fromhex("0000 00000001 0001 61 ffffffff")))
    ['a']
    """
    return _read_topics(_open(metadata)[1])


def parse_full_subscription(metadata: bytes) -> Subscription:
    """The whole subscription. Any bytes either parse or raise ``MalformedBytes``."""
    version, reader = _open(metadata)
    topics = _read_topics(reader)
    owned = _read_partitions(reader) if version >= 1 else ()
    if version >= 2:
        reader.int32()
    rack_id = reader.nullable_string() if version >= 3 else None
    return Subscription(topics, owned, rack_id)


def parse_assignment(assignment: bytes) -> tuple[TopicPartition, ...]:
    """The assigned partitions. Any bytes either parse or raise ``MalformedBytes``."""
    _, reader = _open(assignment)
    return _read_partitions(reader)


def protocol_version(metadata: bytes) -> int:
    """The version in which a member can read; the oldest if its metadata does not tell."""
    try:
        return min(_open(metadata)[0], _NEWEST_VERSION)
    except MalformedBytes:
        return 0


def pack_assignment(version: int, partitions: Mapping[str, list[int]]) -> bytes:
    """An assignment without user data.

    >>> parse_assignment(pack_assignment(1, {"t": [0, 2]}))
    (('t', 0), ('t', 2))
    """
    parts = [struct.pack(">hi", version, len(partitions))]
    for topic, indexes in partitions.items():
        parts += (pack_string(topic), struct.pack(f">i{len(indexes)}i", len(indexes), *indexes))
    parts.append(struct.pack(">i", -1))
    return b"".join(parts)


def _open(data: bytes) -> tuple[int, Reader]:
    reader = Reader(data)
    version = reader.int16()
    if version < 0:
        raise MalformedBytes(f"consumer protocol version {version} does not exist")
    return version, reader


def _read_topics(reader: Reader) -> frozenset[str]:
    topics = frozenset(reader.string() for _ in range(reader.count(smallest_element=2)))
    reader.nullable_bytes()
    return topics


def _read_partitions(reader: Reader) -> tuple[TopicPartition, ...]:
    found: list[TopicPartition] = []
    for _ in range(reader.count(smallest_element=6)):
        topic = reader.string()
        found += ((topic, reader.int32()) for _ in range(reader.count(smallest_element=4)))
    return tuple(found)
