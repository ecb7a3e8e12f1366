"""Which share partitions have state in ``__share_group_state``, and what is to be done about it. Pure.

State of a topic is begun (``initializing``), there (``initialized``), or being deleted (``deleting``). A
topic goes from one to the next as a whole: it is initialized once all partitions of one attempt are. So a
partition that comes on top of initialized ones was added to the topic later, and starts at its first record;
any other starts where ``share.auto.offset.reset`` says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tidemill.coordination.share_state import NO_START
from tidemill.groups.share.records import StateTopic, StateTopics

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from uuid import UUID

    from tidemill.groups.share.group import ShareGroup
    from tidemill.groups.topics import SubscribedTopic

__all__ = ("by_id", "deleted", "deletion_begun", "due", "initialization_begun", "initialized")

_NONE: frozenset[int] = frozenset()


def by_id(topics: Iterable[StateTopic]) -> dict[UUID, StateTopic]:
    """The topics by their ids."""
    return {topic.id: topic for topic in topics}


def due(group: ShareGroup, subscribed: Iterable[SubscribedTopic], now_ms: int) -> dict[UUID, dict[int, int]]:
    """The partitions of subscribed topics whose state is to be begun now, with the offset they start at.

    A topic of which state is being deleted, or is begun by somebody, waits until that is over.
    """
    topics = group.topics
    deleting = {topic.id for topic in topics.deleting}
    begun = by_id(topics.initializing)
    known = by_id(topics.initialized)
    found: dict[UUID, dict[int, int]] = {}
    for topic in subscribed:
        initializing = begun.get(topic.id)
        if topic.id in deleting or (initializing and group.is_initializing(initializing, now_ms)):
            continue
        there = known[topic.id].partitions if topic.id in known else _NONE
        missing = [index for index in range(topic.partitions) if index not in there]
        if missing:
            found[topic.id] = dict.fromkeys(missing, 0 if there else NO_START)
    return found


def initialization_begun(
    topics: StateTopics, names: Mapping[UUID, str], begun: Mapping[UUID, Collection[int]], now_ms: int
) -> StateTopics:
    """The topics after the initialization of these partitions began."""
    initializing = by_id(topics.initializing)
    for topic_id, indexes in begun.items():
        initializing[topic_id] = StateTopic(topic_id, names[topic_id], frozenset(indexes), now_ms)
    return replace(topics, initializing=_in_order(initializing))


def initialized(topics: StateTopics, done: Mapping[UUID, Collection[int]], now_ms: int) -> StateTopics:
    """The topics after these partitions were initialized, as far as that was still wanted."""
    initializing, known = by_id(topics.initializing), by_id(topics.initialized)
    for topic_id, indexes in done.items():
        begun = initializing.get(topic_id)
        if begun is None or not begun.partitions <= frozenset(indexes):
            continue
        del initializing[topic_id]
        before = known[topic_id].partitions if topic_id in known else _NONE
        known[topic_id] = StateTopic(topic_id, begun.name, before | begun.partitions, now_ms)
    return replace(topics, initializing=_in_order(initializing), initialized=_in_order(known))


def deletion_begun(topics: StateTopics, gone: Collection[UUID]) -> StateTopics:
    """The topics after the deletion of all state of those in ``gone`` began."""
    initializing, known = by_id(topics.initializing), by_id(topics.initialized)
    deleting = by_id(topics.deleting)
    for topic_id in gone:
        for topic in (initializing.pop(topic_id, None), known.pop(topic_id, None)):
            if topic is not None:
                before = deleting[topic_id].partitions if topic_id in deleting else _NONE
                deleting[topic_id] = StateTopic(topic_id, topic.name, before | topic.partitions)
    return StateTopics(_in_order(initializing), _in_order(known), _in_order(deleting))


def deleted(topics: StateTopics, gone: Mapping[UUID, frozenset[int]]) -> StateTopics:
    """The topics after the state of these partitions was deleted."""
    left = {
        topic.id: topic
        for topic in topics.deleting
        if not topic.partitions <= gone.get(topic.id, _NONE) or topic.id not in gone
    }
    return replace(topics, deleting=_in_order(left))


def _in_order(topics: Mapping[UUID, StateTopic]) -> tuple[StateTopic, ...]:
    return tuple(topics[topic_id] for topic_id in sorted(topics, key=lambda each: each.int))
