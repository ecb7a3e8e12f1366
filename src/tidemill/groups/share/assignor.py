"""Kafka's ``simple`` assignor: which members of a share group read which partitions. Pure.

Any number of members may read a partition, so there is no partition too few for a member. With more members
than partitions, each partition is shared by equally many of them; with fewer, each member has equally many
partitions. Beyond that everybody keeps what it had.

If all members subscribe to the same topics, partitions of all topics are spread together; if not, each topic
is spread by itself among its subscribers, as Kafka does it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidemill.groups.consumer.member import NO_PARTITIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from uuid import UUID

    from tidemill.groups.consumer.member import Partitions, TopicIdPartition

__all__ = ("SIMPLE_ASSIGNOR", "assign_partitions")

SIMPLE_ASSIGNOR: Final = "simple"


def assign_partitions(
    subscriptions: Mapping[str, frozenset[UUID]],
    partitions: Mapping[UUID, Iterable[int]],
    current: Mapping[str, Partitions],
) -> dict[str, Partitions]:
    """The partitions of each member of ``subscriptions``. Every partition of a subscribed topic has a member.

    ``partitions`` are those of each topic that can be read; ``current`` is what members have now.
    """
    found: dict[str, set[TopicIdPartition]] = {member: set() for member in subscriptions}
    for members, pool in _pools(subscriptions, partitions):
        for member, taken in _spread(members, pool, current).items():
            found[member] |= taken
    return {member: frozenset(taken) for member, taken in found.items()}


def _pools(
    subscriptions: Mapping[str, frozenset[UUID]], partitions: Mapping[UUID, Iterable[int]]
) -> list[tuple[list[str], list[TopicIdPartition]]]:
    """Pools of members and the partitions that are spread over them: one, or one for each topic."""
    topics = sorted(partitions, key=lambda topic_id: topic_id.int)
    if len(set(subscriptions.values())) == 1:
        (subscribed,) = set(subscriptions.values())
        pool = [(each, index) for each in topics if each in subscribed for index in sorted(partitions[each])]
        return [(sorted(subscriptions), pool)]
    pools = []
    for topic_id in topics:
        members = sorted(member for member, subscribed in subscriptions.items() if topic_id in subscribed)
        pools.append((members, [(topic_id, index) for index in sorted(partitions[topic_id])]))
    return pools


def _spread(
    members: Sequence[str], pool: Sequence[TopicIdPartition], current: Mapping[str, Partitions]
) -> dict[str, set[TopicIdPartition]]:
    """Spread partitions over members.

    There are as many places for members as for partitions: a member with a free place and a partition with
    one can always be brought together unless they are together already. So no partition stays without a
    member, and no member without a partition.
    """
    if not members or not pool:
        return {}
    readable = frozenset(pool)
    held = {member: set(current.get(member, NO_PARTITIONS) & readable) for member in members}
    readers: dict[TopicIdPartition, list[str]] = {partition: [] for partition in pool}
    for member, taken in held.items():
        for partition in taken:
            readers[partition].append(member)
    readers_max = -(-len(members) // len(pool))
    # Those that have most may have one more, so that they need not give it up.
    fewest, extra = divmod(readers_max * len(pool), len(members))
    by_size = sorted(members, key=lambda member: (-len(held[member]), member))
    limit = {member: fewest + (rank < extra) for rank, member in enumerate(by_size)}
    _give_up(held, readers, readers_max, limit)
    _take_up(held, readers, readers_max, limit)
    return held


def _give_up(
    held: Mapping[str, set[TopicIdPartition]],
    readers: Mapping[TopicIdPartition, list[str]],
    readers_max: int,
    limit: Mapping[str, int],
) -> None:
    """Take surplus readers from partitions, and surplus partitions from members."""
    for partition, reading in readers.items():
        reading.sort(key=lambda member: (len(held[member]) - limit[member], member))
        while len(reading) > readers_max:
            held[reading.pop()].remove(partition)
    for member, taken in held.items():
        if len(taken) > limit[member]:
            shared_most_first = sorted(taken, key=lambda each: (-len(readers[each]), each[0].int, each[1]))
            for partition in shared_most_first[: len(taken) - limit[member]]:
                taken.remove(partition)
                readers[partition].remove(member)


def _take_up(
    held: Mapping[str, set[TopicIdPartition]],
    readers: Mapping[TopicIdPartition, list[str]],
    readers_max: int,
    limit: Mapping[str, int],
) -> None:
    """Give partitions with free places to members with free places."""
    free = [member for member, taken in held.items() if len(taken) < limit[member]]
    # Partitions without any reader first: each must have one.
    for partition, reading in sorted(readers.items(), key=lambda item: len(item[1])):
        at = 0
        while free and len(reading) < readers_max and at < len(free):
            member = free[at]
            if partition in held[member]:
                at += 1
                continue
            held[member].add(partition)
            reading.append(member)
            del free[at]
            if len(held[member]) < limit[member]:
                # To the end of the list, so that every member gets one before any gets another.
                free.append(member)
