"""Kafka's consumer protocol: the subscriptions and assignments that members of classic groups exchange.

The bytes come from clients and are not checked by anybody else, so anything may be in them: any bytes either
parse or raise ProtocolError. Versions only ever add fields at the end: what a version does not have has a
default, and what comes after the fields of the newest version known here is not looked at.

| version | a subscription also has |
| --- | --- |
| 0 | the topics, user data |
| 1 | the partitions that the member owns |
| 2 | the generation in which it owned them |
| 3 | the rack |

An assignment has partitions and user data in every version.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from tidemill.errors import ProtocolError
from tidemill.wire.declare import declare
from tidemill.wire.encode import encode_entity
from tidemill.wire.requests import decode_entity

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tidemill.wire.schema import EntityClass

__all__ = (
    "CONSUMER_PROTOCOL",
    "Subscription",
    "pack_assignment",
    "pack_subscription",
    "parse_assignment",
    "parse_full_subscription",
    "parse_subscription",
    "protocol_version",
)

CONSUMER_PROTOCOL: Final = "consumer"
"""The protocol type of groups whose metadata is a consumer subscription."""

_NEWEST_VERSION: Final = 3
_VERSION_BYTES: Final = 2
_ANY: Final = 2**36
_pack_version: Final = Struct(">h").pack


@dataclass(frozen=True, slots=True)
class Subscription:
    """A whole subscription. A member of version 0 owns nothing when it joins: it gave all up before."""

    topics: frozenset[str]
    owned: tuple[tuple[str, int], ...] = ()
    rack_id: str | None = None


def pack_subscription(topics: Iterable[str]) -> bytes:
    """The metadata of a member that wants to read these topics: version 0, which every version can read."""
    return _pack("subscription", 0, {"topics": sorted(set(topics)), "user_data": b""})


def parse_subscription(metadata: bytes) -> frozenset[str]:
    """The topics of a subscription.

    >>> sorted(parse_subscription(pack_subscription(["a", "b"])))
    ['a', 'b']
    """
    _version_of(metadata)
    return frozenset(_parse(_entity("subscription", 0), metadata).topics)


def parse_full_subscription(metadata: bytes) -> Subscription:
    """A subscription with all its fields."""
    version = min(_version_of(metadata), _NEWEST_VERSION)
    found = _parse(_entity("subscription", version), metadata)
    owned = _partitions(found.owned_partitions) if version >= 1 else ()
    return Subscription(frozenset(found.topics), owned, found.rack_id if version >= 3 else None)


def pack_assignment(
    version: int, partitions: Mapping[str, Sequence[int]], user_data: bytes | None = None
) -> bytes:
    """The assignment of one member: its partitions by topic.

    >>> parse_assignment(pack_assignment(1, {"t": [0, 2]}))
    (('t', 0), ('t', 2))
    """
    assigned = [{"topic": topic, "partitions": indexes} for topic, indexes in partitions.items()]
    return _pack("assignment", version, {"assigned_partitions": assigned, "user_data": user_data})


def parse_assignment(assignment: bytes) -> tuple[tuple[str, int], ...]:
    """The partitions of an assignment."""
    _version_of(assignment)
    return _partitions(_parse(_assigned_partitions(), assignment).assigned)


def protocol_version(metadata: bytes) -> int:
    """The newest version that a member can read; the oldest if its metadata does not tell."""
    try:
        return min(_version_of(metadata), _NEWEST_VERSION)
    except ProtocolError:
        return 0


def _version_of(data: bytes) -> int:
    if len(data) < _VERSION_BYTES:
        raise ProtocolError(f"{len(data)} bytes are too few for a version of the consumer protocol")
    version = int.from_bytes(data[:_VERSION_BYTES], "big", signed=True)
    if version < 0:
        raise ProtocolError(f"consumer protocol version {version} does not exist")
    return version


def _parse(entity: EntityClass, data: bytes) -> Any:
    return decode_entity(entity, data, _VERSION_BYTES, _ANY, whole=False)


def _pack(kind: str, version: int, body: Mapping[str, Any]) -> bytes:
    out = bytearray(_pack_version(version))
    encode_entity(_entity(kind, version), body, out)
    return bytes(out)


def _partitions(topics: Iterable[Any]) -> tuple[tuple[str, int], ...]:
    return tuple((each.topic, index) for each in topics for index in each.partitions)


@cache
def _entity(kind: str, version: int) -> EntityClass:
    module = import_module(f"kio.schema.consumer_protocol_{kind}.v{version}.data")
    return getattr(module, f"ConsumerProtocol{kind.capitalize()}")


@cache
def _assigned_partitions() -> EntityClass:
    """The fields of an assignment up to the partitions. User data follows, which only clients read."""
    return declare(
        "AssignedPartitions",
        {"assigned": [{"topic": "string", "partitions": ["int32"]}]},
        flexible=False,
    )
