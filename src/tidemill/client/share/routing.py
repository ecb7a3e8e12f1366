"""Which node each assigned partition is fetched from. Leaders that move are followed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Final
from uuid import UUID

from tidemill.client.cluster import TopicPartition
from tidemill.client.share.link import LinkOwner, NodeLink
from tidemill.client.share.membership import Assigned
from tidemill.errors import ApiError, TidemillError

__all__ = ("Routing",)

_log = logging.getLogger(__name__)

_AGAIN_SECONDS: Final = 0.25


class Routing:
    """The links to all nodes that lead assigned partitions. ``run`` keeps them as the metadata says."""

    def __init__(self, owner: LinkOwner) -> None:
        self._owner = owner
        #: The topics of the assignment, by name.
        self.topics: tuple[str, ...] = ()
        self.links: dict[int, NodeLink] = {}
        self._assignment: Assigned = frozenset()
        self._changed = asyncio.Event()

    def __iter__(self) -> Iterator[NodeLink]:
        return iter(self.links.values())

    def assign(self, assignment: Assigned) -> None:
        """Fetch from these partitions, and no others."""
        self._assignment = assignment
        self._changed.set()

    def moved(self) -> None:
        """Have the metadata read again: other nodes may lead the partitions now."""
        self._owner.cluster.forget()
        self._changed.set()

    def wake(self) -> None:
        """Have all links look again at what is wanted and what is to be told."""
        for link in self.links.values():
            link.wake()

    async def run(self) -> None:
        """Follow assignment and leaders until this is cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                is_complete = await self._route()
            except TidemillError as error:
                _log.info("group %r: finding leaders again: %s", self._owner.group, error.message)
                is_complete = False
            if not is_complete:
                await asyncio.sleep(_AGAIN_SECONDS)
                self.moved()

    async def close(self) -> None:
        """Close all links: nodes release what they hold for this consumer."""
        links, self.links = list(self.links.values()), {}
        await asyncio.gather(*(link.close() for link in links), return_exceptions=True)

    async def _route(self) -> bool:
        """Give each node its partitions. False if some have no leader now, or are not known yet."""
        owner = self._owner
        for name in self.topics:
            with contextlib.suppress(ApiError):
                info = await owner.cluster.topic(name)
                if info.topic_id is not None:
                    owner.topic_ids[name] = info.topic_id
                    owner.topic_names[info.topic_id] = name
        by_node: dict[int, set[TopicPartition]] = {}
        is_complete = True
        for topic_id, index in self._assignment:
            leader = self._leader(topic_id, index)
            if leader is None:
                is_complete = False
            else:
                by_node.setdefault(leader, set()).add((owner.topic_names[topic_id], index))
        await self._apply(by_node)
        return is_complete

    def _leader(self, topic_id: UUID, index: int) -> int | None:
        cluster = self._owner.cluster
        name = self._owner.topic_names.get(topic_id)
        info = None if name is None else cluster.known_topic(name)
        if info is None or info.topic_id != topic_id or index >= len(info.partitions):
            return None
        leader = info.partitions[index].leader
        return leader if leader in cluster.nodes else None

    async def _apply(self, by_node: Mapping[int, set[TopicPartition]]) -> None:
        idle: list[NodeLink] = []
        for node_id, link in list(self.links.items()):
            wanted = by_node.get(node_id, set())
            elsewhere = set().union(*(parts for node, parts in by_node.items() if node != node_id))
            # What another node leads now is lost; what the group gave to another member is not.
            if moved := link.partitions & elsewhere:
                link.gone(moved, "another node leads them")
            link.assign(wanted)
            if not wanted and not link.outbox and not self._owner.holds_of(link):
                idle.append(self.links.pop(node_id))
        for node_id, partitions in by_node.items():
            if node_id not in self.links:
                link = self.links[node_id] = NodeLink(self._owner, node_id)
                link.assign(partitions)
                link.start()
        for link in idle:
            await link.close()
