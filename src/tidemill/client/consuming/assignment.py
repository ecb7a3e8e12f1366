"""Who reads what in a consumer group: the range assignor, and assignments as its members exchange them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tidemill.errors import ProtocolError
from tidemill.wire import consumer_protocol

__all__ = ("pack_assignment", "parse_assignment", "range_assignment")


def pack_assignment(partitions: Iterable[tuple[str, int]]) -> bytes:
    """Encode the partitions of one member, in version 0, which every client reads."""
    topics: dict[str, list[int]] = {}
    for topic, index in sorted(partitions):
        topics.setdefault(topic, []).append(index)
    return consumer_protocol.pack_assignment(0, topics, user_data=b"")


def parse_assignment(data: bytes) -> tuple[tuple[str, int], ...]:
    """The partitions in an assignment; none in the empty one of a group that is still rebalancing.

    Bytes that are no assignment give none either: they come from other clients, and only they can read them.

    >>> parse_assignment(pack_assignment([("a", 1), ("a", 0)]))
    (('a', 0), ('a', 1))
    """
    try:
        return consumer_protocol.parse_assignment(data)
    except ProtocolError:
        return ()


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
        for position, member in enumerate(readers):
            end = start + each + (position < more)
            assignment[member] += [(topic, index) for index in range(start, end)]
            start = end
    return assignment
