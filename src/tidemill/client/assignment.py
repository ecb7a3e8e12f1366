"""Who reads what in a consumer group: the range assignor, and the bytes that members exchange.

The bytes are Kafka's consumer protocol, version 0, which every client reads.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Final

from tidemill.coordination.binary import MalformedBytes, Reader, pack_bytes, pack_string

__all__ = ("pack_assignment", "pack_subscription", "parse_assignment", "range_assignment")

_VERSION_0: Final = b"\0\0"
_pack_int32: Final = struct.Struct(">i").pack


def pack_subscription(topics: Iterable[str]) -> bytes:
    """The topics that a member wants to read, as it tells them when it joins."""
    names = sorted(set(topics))
    packed = b"".join(pack_string(name) for name in names)
    return _VERSION_0 + _pack_int32(len(names)) + packed + pack_bytes(b"")


def pack_assignment(partitions: Iterable[tuple[str, int]]) -> bytes:
    """The partitions that the leader gives to one member."""
    topics: dict[str, list[int]] = {}
    for topic, index in sorted(partitions):
        topics.setdefault(topic, []).append(index)
    out = bytearray(_VERSION_0 + _pack_int32(len(topics)))
    for topic, indexes in topics.items():
        out += pack_string(topic) + struct.pack(f">i{len(indexes)}i", len(indexes), *indexes)
    return bytes(out + pack_bytes(b""))


def parse_assignment(data: bytes) -> tuple[tuple[str, int], ...]:
    """The partitions in an assignment; none in the empty one of a group that is still rebalancing.

    Bytes that are no assignment give none either: they come from other clients, and only they can read them.

    >>> parse_assignment(pack_assignment([("a", 1), ("a", 0)]))
    (('a', 0), ('a', 1))
    """
    if not data:
        return ()
    reader = Reader(data)
    partitions: list[tuple[str, int]] = []
    try:
        reader.int16()
        for _ in range(reader.count(smallest_element=6)):
            topic = reader.string()
            partitions += [(topic, reader.int32()) for _ in range(reader.count(smallest_element=4))]
    except MalformedBytes:
        return ()
    return tuple(partitions)


def range_assignment(
    subscriptions: Mapping[str, Iterable[str]], partition_counts: Mapping[str, int]
) -> dict[str, list[tuple[str, int]]]:
    """Member to partitions: each topic is cut into ranges that differ by one at most, in the members' order.

    >>> range_assignment({"m1": ["t"], "m2": ["t"]}, {"t": 3})
    {'m1': [('t', 0), ('t', 1)], 'm2': [('t', 2)]}
    """
    assignment: dict[str, list[tuple[str, int]]] = {member: [] for member in sorted(subscriptions)}
    wanted = {member: set(topics) for member, topics in subscriptions.items()}
    for topic in sorted(set().union(*wanted.values())):
        readers = [member for member in assignment if topic in wanted[member]]
        each, more = divmod(partition_counts.get(topic, 0), len(readers))
        start = 0
        for place, member in enumerate(readers):
            end = start + each + (place < more)
            assignment[member] += [(topic, index) for index in range(start, end)]
            start = end
    return assignment
