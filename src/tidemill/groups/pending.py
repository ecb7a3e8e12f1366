"""Offsets that were committed inside of transactions that are still open. Pure.

A transactional commit counts from the moment its transaction commits, and vanishes if that aborts. What was
written later wins: an offset committed outside of the transaction, or in another one, after the pending
commit was written makes that one void, whatever becomes of its transaction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.groups.records import OffsetCommitRecord

if TYPE_CHECKING:
    from collections.abc import Collection

    from tidemill.groups.messages import TopicPartition
    from tidemill.groups.records import OffsetCommit

__all__ = ("PendingOffsets",)

_OfProducers = dict[int, "OffsetCommit | None"]


class PendingOffsets:
    """Group and partition to the pending commit of each producer; None is one that is void already."""

    def __init__(self) -> None:
        # The producers of one partition stand in the order of their last commits.
        self._by_group: dict[str, dict[TopicPartition, _OfProducers]] = {}
        self._by_producer: dict[int, dict[tuple[str, TopicPartition], None]] = {}

    # -- change ----------------------------------------------------------------------------------------

    def add(self, producer_id: int, record: OffsetCommitRecord) -> None:
        """A commit inside of the producer's transaction is in the log."""
        place = (record.topic, record.partition)
        producers = self._by_group.setdefault(record.group_id, {}).setdefault(place, {})
        producers.pop(producer_id, None)
        producers[producer_id] = record.value
        self._by_producer.setdefault(producer_id, {})[record.group_id, place] = None

    def overtake(self, record: OffsetCommitRecord) -> None:
        """A commit, or a deletion, outside of any transaction is in the log."""
        place = (record.topic, record.partition)
        producers = self._by_group.get(record.group_id, {}).get(place, {})
        for producer_id in tuple(producers):
            if record.value is None:
                self._remove(producer_id, record.group_id, place)
            else:
                producers[producer_id] = None

    def end(self, producer_id: int, *, commit: bool) -> list[OffsetCommitRecord]:
        """The producer's transaction has ended; returns what is committed by that."""
        committed = []
        for group_id, place in tuple(self._by_producer.get(producer_id, ())):
            producers = self._by_group[group_id][place]
            value = producers[producer_id]
            if commit and value is not None:
                committed.append(OffsetCommitRecord(group_id, *place, value))
                for other_id in producers:
                    if other_id == producer_id:
                        break
                    producers[other_id] = None
            self._remove(producer_id, group_id, place)
        return committed

    def _remove(self, producer_id: int, group_id: str, place: TopicPartition) -> None:
        places = self._by_group[group_id]
        producers = places[place]
        del producers[producer_id]
        if not producers:
            del places[place]
            if not places:
                del self._by_group[group_id]
        of_producer = self._by_producer[producer_id]
        del of_producer[group_id, place]
        if not of_producer:
            del self._by_producer[producer_id]

    # -- read ------------------------------------------------------------------------------------------

    def has(self, group_id: str, place: TopicPartition) -> bool:
        """Whether an open transaction holds a commit of this group for this partition."""
        return place in self._by_group.get(group_id, ())

    def has_any(self, group_id: str) -> bool:
        """Whether an open transaction holds any commit of this group."""
        return group_id in self._by_group

    def of_group(self, group_id: str) -> list[TopicPartition]:
        """The partitions that open transactions hold commits of this group for."""
        return list(self._by_group.get(group_id, ()))

    def topics(self) -> set[str]:
        """All topics that open transactions hold commits for."""
        return {topic for places in self._by_group.values() for topic, _ in places}

    def of_topics(self, topics: Collection[str]) -> list[tuple[str, TopicPartition]]:
        """Groups and partitions of these topics that open transactions hold commits for."""
        return [
            (group_id, place)
            for group_id, places in self._by_group.items()
            for place in places
            if place[0] in topics
        ]
