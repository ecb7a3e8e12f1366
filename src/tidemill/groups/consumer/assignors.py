"""Server-side assignors: which member gets which partition. Pure and deterministic.

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
from heapq import heapify, heapreplace
from operator import attrgetter
from typing import TYPE_CHECKING, Final

from tidemill.groups.consumer.member import by_topic

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from uuid import UUID

    from tidemill.groups.consumer.member import Partitions, TopicIdPartition

__all__ = ("ASSIGNORS", "DEFAULT_ASSIGNOR", "AssignedMember", "assign_range", "assign_uniform")


#: Sort key of topic ids: comparing the ids themselves is slow, because it runs Python code.
_number = attrgetter("int")


@dataclass(frozen=True, slots=True)
class AssignedMember:
    """A member as an assignor sees it: what it subscribes to, and its target so far."""

    subscribed: frozenset[UUID]
    target: Partitions
    instance_id: str | None = None


def assign_uniform(
    members: Mapping[str, AssignedMember], partition_counts: Mapping[UUID, int]
) -> dict[str, Partitions]:
    """The uniform assignor: keep what can be kept, give the rest to those with least, then even out.

    The result is balanced: no partition could move to another subscriber of its topic that has at least two
    fewer than its owner. If all subscribe to the same topics, no two members differ by more than one.
    """
    balance = _Balance(members, partition_counts)
    balance.keep()
    balance.fill()
    balance.even_out()
    return balance.result()


def _subscribers(
    members: Mapping[str, AssignedMember], ordered: Iterable[str], partition_counts: Mapping[UUID, int]
) -> dict[UUID, tuple[str, ...]]:
    """The subscribers of each topic that exists, in order; topics with the same ones share one tuple."""
    alike: dict[frozenset[UUID], list[str]] = {}
    for member_id in ordered:
        alike.setdefault(members[member_id].subscribed, []).append(member_id)
    subscriptions = list(alike.items())
    found: dict[UUID, list[int]] = {}
    for number, (subscribed, _) in enumerate(subscriptions):
        for topic_id in subscribed:
            if topic_id in partition_counts:
                found.setdefault(topic_id, []).append(number)
    merged: dict[tuple[int, ...], tuple[str, ...]] = {}
    for numbers in map(tuple, found.values()):
        if numbers not in merged:
            merged[numbers] = tuple(sorted(each for number in numbers for each in subscriptions[number][1]))
    return {topic_id: merged[tuple(numbers)] for topic_id, numbers in found.items()}


class _Balance:
    """The work of the uniform assignor: ``_owned[topic][member]`` are the partitions given so far."""

    def __init__(self, members: Mapping[str, AssignedMember], partition_counts: Mapping[UUID, int]) -> None:
        self._members = members
        self._counts = partition_counts
        self._load = dict.fromkeys(sorted(members), 0)
        self._subscribers = _subscribers(members, self._load, partition_counts)
        # The order of topics decides between equal choices, so it must not depend on hashes.
        self._topics = sorted(self._subscribers, key=_number)
        self._owned: dict[UUID, dict[str, list[int]]] = {topic_id: {} for topic_id in self._topics}

    def keep(self) -> None:
        """Let each member keep the partitions of its last target that it may still have."""
        taken: set[TopicIdPartition] = set()
        for member_id in self._load:
            member = self._members[member_id]
            for topic_id, indexes in by_topic(member.target - taken).items():
                if topic_id in member.subscribed:
                    count = self._counts.get(topic_id, 0)
                    for index in indexes:
                        if index < count:
                            taken.add((topic_id, index))
                            self._give(topic_id, member_id, index)

    def fill(self) -> None:
        """Give each free partition to the subscriber with fewest; topics with most subscribers come last."""
        heaps: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for topic_id in sorted(self._topics, key=lambda each: (len(self._subscribers[each]), each.int)):
            taken = {index for indexes in self._owned[topic_id].values() for index in indexes}
            if len(taken) == self._counts[topic_id]:
                continue
            subscribers = self._subscribers[topic_id]
            if subscribers not in heaps:
                heaps[subscribers] = [(self._load[each], order) for order, each in enumerate(subscribers)]
                heapify(heaps[subscribers])
            for index in range(self._counts[topic_id]):
                if index not in taken:
                    self._give(topic_id, self._take_lightest(subscribers, heaps[subscribers]), index)

    def _take_lightest(self, subscribers: tuple[str, ...], heap: list[tuple[int, int]]) -> str:
        """The subscriber with the fewest partitions (the first of several), which is about to get one more.

        Loads only rise here, so an outdated entry is too low; it is corrected when it is seen.
        """
        while True:
            load, order = heap[0]
            actual = self._load[subscribers[order]]
            if actual == load:
                heapreplace(heap, (load + 1, order))
                return subscribers[order]
            heapreplace(heap, (actual, order))

    def even_out(self) -> None:
        """Move partitions to lighter members until none can move. Each move makes loads more equal."""
        moved = True
        while moved:
            moved = False
            # Moves only make loads more equal, so nobody ever has less than this.
            least = min(self._load.values(), default=0)
            for topic_id in self._topics:
                if any(self._load[owner] >= least + 2 for owner in self._owned[topic_id]):
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
        assignment: dict[str, set[TopicIdPartition]] = {member_id: set() for member_id in self._load}
        for topic_id, owned in self._owned.items():
            for member_id, indexes in owned.items():
                assignment[member_id].update((topic_id, index) for index in indexes)
        return {member_id: frozenset(partitions) for member_id, partitions in assignment.items()}


def assign_range(
    members: Mapping[str, AssignedMember], partition_counts: Mapping[UUID, int]
) -> dict[str, Partitions]:
    """The range assignor: per topic, ranges in the order of the subscribers; the first may get one more.

    Static members come first, by instance id, so that their ranges stay when they return with another id.
    """
    assignment: dict[str, set[TopicIdPartition]] = {member_id: set() for member_id in members}
    ordered = sorted(
        members, key=lambda each: (members[each].instance_id is None, members[each].instance_id or each)
    )
    for topic_id, count in partition_counts.items():
        subscribers = [member_id for member_id in ordered if topic_id in members[member_id].subscribed]
        start = 0
        for position, member_id in enumerate(subscribers):
            share, left_over = divmod(count, len(subscribers))
            end = start + share + (position < left_over)
            assignment[member_id].update((topic_id, index) for index in range(start, end))
            start = end
    return {member_id: frozenset(partitions) for member_id, partitions in assignment.items()}


ASSIGNORS: Final = {"uniform": assign_uniform, "range": assign_range}
DEFAULT_ASSIGNOR: Final = "uniform"
