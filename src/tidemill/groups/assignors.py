"""Server-side assignors: who shall have which partition. Pure and deterministic.

| name | what it gives |
| --- | --- |
| uniform (the default) | equally many partitions for everybody, by as few moves as that takes |
| range | of each topic, a contiguous range for each subscriber |

With range, topics that have equally many partitions and the same subscribers are divided alike, so that
records that belong together meet at one member.

An assignor gets all members and the topics that exist. It gives every partition of a subscribed topic to
exactly one of the topic's subscribers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping
    from uuid import UUID

    from tidemill.groups.consumer_member import Partitions, TopicIdPartition

__all__ = ("ASSIGNORS", "DEFAULT_ASSIGNOR", "AssignedMember", "assign_range", "assign_uniform")


@dataclass(frozen=True, slots=True)
class AssignedMember:
    """A member as an assignor sees it: what it subscribes to, and its target so far."""

    subscribed: frozenset[UUID]
    target: Partitions
    instance_id: str | None = None


def assign_uniform(
    members: Mapping[str, AssignedMember], partition_counts: Mapping[UUID, int]
) -> dict[str, Partitions]:
    """Keep what can be kept, give the rest to whoever has least, then even out.

    The result is balanced: no partition could move to another subscriber of its topic that has at least two
    fewer than its owner. If all subscribe to the same topics, no two members differ by more than one.
    """
    balance = _Balance(members, partition_counts)
    balance.keep()
    balance.fill()
    balance.even_out()
    return balance.result()


class _Balance:
    """The work of the uniform assignor: ``_owned[topic][member]`` are the partitions given so far."""

    def __init__(self, members: Mapping[str, AssignedMember], partition_counts: Mapping[UUID, int]) -> None:
        self._members = members
        self._counts = partition_counts
        self._load = dict.fromkeys(sorted(members), 0)
        self._subscribers: dict[UUID, list[str]] = {}
        for member_id in self._load:
            for topic_id in members[member_id].subscribed & partition_counts.keys():
                self._subscribers.setdefault(topic_id, []).append(member_id)
        # The order of topics decides between equal choices, so it must not depend on hashes.
        self._topics = sorted(self._subscribers)
        self._owned: dict[UUID, dict[str, list[int]]] = {topic_id: {} for topic_id in self._topics}

    def keep(self) -> None:
        """Let everybody keep what it has and may have."""
        taken: set[TopicIdPartition] = set()
        for member_id in self._load:
            member = self._members[member_id]
            for topic_id, index in sorted(member.target - taken):
                if topic_id in member.subscribed and index < self._counts.get(topic_id, 0):
                    taken.add((topic_id, index))
                    self._give(topic_id, member_id, index)

    def fill(self) -> None:
        """Give what nobody has to the subscriber with the least; the most sought-after topics come last."""
        for topic_id in sorted(self._topics, key=lambda each: (len(self._subscribers[each]), each)):
            taken = {index for indexes in self._owned[topic_id].values() for index in indexes}
            subscribers = self._subscribers[topic_id]
            for index in range(self._counts[topic_id]):
                if index not in taken:
                    self._give(topic_id, min(subscribers, key=self._load.__getitem__), index)

    def even_out(self) -> None:
        """Move partitions to lighter members until none can move. Each move makes loads more equal."""
        moved = True
        while moved:
            moved = False
            for topic_id in self._topics:
                moved = self._even_out_topic(topic_id) or moved

    def _even_out_topic(self, topic_id: UUID) -> bool:
        load, owned = self._load, self._owned[topic_id]
        moved = False
        while owned:
            lightest = min(self._subscribers[topic_id], key=load.__getitem__)
            heaviest = max(sorted(owned), key=load.__getitem__)
            if load[heaviest] - load[lightest] < 2:
                break
            index = owned[heaviest].pop()
            load[heaviest] -= 1
            if not owned[heaviest]:
                del owned[heaviest]
            self._give(topic_id, lightest, index)
            moved = True
        return moved

    def _give(self, topic_id: UUID, member_id: str, index: int) -> None:
        self._owned[topic_id].setdefault(member_id, []).append(index)
        self._load[member_id] += 1

    def result(self) -> dict[str, Partitions]:
        found: dict[str, set[TopicIdPartition]] = {member_id: set() for member_id in self._load}
        for topic_id, owned in self._owned.items():
            for member_id, indexes in owned.items():
                found[member_id].update((topic_id, index) for index in indexes)
        return {member_id: frozenset(partitions) for member_id, partitions in found.items()}


def assign_range(
    members: Mapping[str, AssignedMember], partition_counts: Mapping[UUID, int]
) -> dict[str, Partitions]:
    """Per topic, ranges in the order of the subscribers; the first ones get one more if it does not divide.

    Static members come first, by instance id, so that their ranges stay when they return with another id.
    """
    found: dict[str, set[TopicIdPartition]] = {member_id: set() for member_id in members}
    ordered = sorted(
        members, key=lambda each: (members[each].instance_id is None, members[each].instance_id or each)
    )
    for topic_id, count in partition_counts.items():
        subscribers = [member_id for member_id in ordered if topic_id in members[member_id].subscribed]
        start = 0
        for position, member_id in enumerate(subscribers):
            share, left_over = divmod(count, len(subscribers))
            end = start + share + (position < left_over)
            found[member_id].update((topic_id, index) for index in range(start, end))
            start = end
    return {member_id: frozenset(partitions) for member_id, partitions in found.items()}


ASSIGNORS: Final = {"uniform": assign_uniform, "range": assign_range}
DEFAULT_ASSIGNOR: Final = "uniform"
