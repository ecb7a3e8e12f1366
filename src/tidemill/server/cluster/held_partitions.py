"""The partitions of which this node is a replica: opened when they come, removed when they go.

Followers have to be open to fetch, and leaders to be fetched from. So a node of a cluster opens everything
that it holds, a few partitions at a time. What a reassignment or a deletion has taken from it is removed from
its disk; of a deletion, the metadata is told when that is done.

A partition is removed while its topic exists and this node is none of its replicas. A node that a move
removes is a replica until the move is complete. The image never goes back, and a node whose image is older
than its directory does not start. If this node is a replica again at a newer revision than its image's, it
has not begun to follow there, so nobody counts on what is removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final
from uuid import UUID

from tidemill.control.commands import ForgetDeleted
from tidemill.coordination.turns import begin_slice, give_way
from tidemill.errors import StorageError, TidemillError

if TYPE_CHECKING:
    from tidemill.control.image import MetadataDelta, MetadataImage
    from tidemill.server.broker import Broker

__all__ = ("HeldPartitions",)

logger = logging.getLogger(__name__)

_RETRY_S: Final = 1.0
#: How often partitions are tried again that could not be opened, for want of space or of descriptors.
_OPEN_AGAIN_S: Final = 5.0


class HeldPartitions:
    """Opens and removes what the metadata gives to this node and takes from it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        #: To be looked at: opened if this node is a replica, removed if it is not any more.
        self._due: dict[tuple[UUID, int], None] = {}
        #: Could not be opened, and why; tried again.
        self._unopened: dict[tuple[UUID, int], str] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, on_disk: Iterable[tuple[UUID, int]] = ()) -> None:
        """Look at everything once, also at what is ``on_disk``, and at what changes from then on."""
        self._due.update(dict.fromkeys(on_disk))
        # Opened by the start, from metadata that may have changed since; it may have no files yet.
        self._due.update(dict.fromkeys((each.topic_id, each.index) for each in self._broker.replicas))
        self._due.update(
            dict.fromkeys((each.topic_id, each.index) for each in self._broker.find.held_placements())
        )
        self._news.set()
        self._task = asyncio.create_task(self._run(), name="held-partitions")

    async def stop(self) -> None:
        """Stop; what is half done is done at the next start."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def metadata_changed(self, new: MetadataImage, delta: MetadataDelta) -> None:
        """Take note of partitions that may have come to this node, or gone from it."""
        for topic in delta.created:
            self._due.update(dict.fromkeys((topic.id, index) for index in range(len(topic.partitions))))
        for name, added in delta.new_partitions.items():
            self._due.update(dict.fromkeys((new.topics[name].id, index) for index in added))
        for changed in (*delta.replicas_changed, *delta.leader_changed):
            self._due[new.topics[changed.topic].id, changed.partition] = None
        if self._due or delta.deleted_topics_changed or delta.deleted:
            self._news.set()

    async def _run(self) -> None:
        while True:
            await self._wait_for_work()
            try:
                await self._look_at_due()
                await self._remove_deleted()
            except TidemillError as error:
                logger.warning("partitions of this node are looked at again: %s", error.message)
                await asyncio.sleep(_RETRY_S)
                self._news.set()

    async def _wait_for_work(self) -> None:
        """Wait for news; not for long while something could not be opened."""
        try:
            async with asyncio.timeout(_OPEN_AGAIN_S if self._unopened else None):
                await self._news.wait()
        except TimeoutError:
            self._due.update(dict.fromkeys(self._unopened))
        self._news.clear()

    async def _look_at_due(self) -> None:
        begin_slice()
        while self._due:
            key = next(iter(self._due))
            del self._due[key]
            try:
                if self._broker.find.held_placement(*key) is None:
                    await self._remove(*key)
                else:
                    self._open(*key)
            except TidemillError:
                self._due[key] = None
                raise
            await give_way()

    def _open(self, topic_id: UUID, index: int) -> None:
        """Have the partition open, as the newest metadata says.

        One that is open may know of less: the metadata changed while the start was opening it in a thread.
        """
        broker, key = self._broker, (topic_id, index)
        placement = broker.find.held_placement(topic_id, index)
        was_unopened = bool(self._unopened)
        self._unopened.pop(key, None)
        if placement is None:
            return
        try:
            broker.replicas.open(placement).configure(placement.config)
        except StorageError as error:
            # One whose files are damaged is stopped, and was logged: this replica stays behind. Others wait
            # for space, descriptors, or the removal of old files.
            if key not in broker.replicas.offline:
                self._unopened[key] = error.message
                if not was_unopened:
                    logger.warning(
                        "%s-%d cannot be opened now, and is tried again: %s",
                        placement.topic,
                        index,
                        error.message,
                    )

    async def _remove(self, topic_id: UUID, index: int) -> None:
        """Remove the files of a partition that has moved to other nodes. Raises ``StorageError``."""
        broker = self._broker
        topic = broker.image.topic_by_id(topic_id)
        # The files of a deleted topic go with the topic.
        if topic is None or index >= len(topic.partitions):
            return
        replicas = broker.replicas
        self._unopened.pop((topic_id, index), None)
        is_here = replicas.peek(topic_id, index) is not None
        if not is_here and not replicas.has_files(topic.name, topic_id, index):
            return
        placed = topic.partitions[index]
        logger.info("%s-%d is on nodes %s now; it is removed here", topic.name, index, placed.replicas)
        replicas.begin_removal(topic.name, topic_id, index)
        await broker.tables.remove_state(topic_id, index)
        await asyncio.wrap_future(broker.removal.remove_partition(topic.name, topic_id, index))
        # It may have come back meanwhile.
        self._open(topic_id, index)

    async def _remove_deleted(self) -> None:
        """Remove the files of topics that were deleted, and say so."""
        broker, node_id = self._broker, self._broker.node_id
        for topic_id, deleted in list(broker.image.deleted_topics.items()):
            if node_id not in deleted.nodes:
                continue
            broker.replicas.mark_deleting(deleted.name, topic_id)
            await asyncio.wrap_future(broker.removal.remove_topic(deleted.name, topic_id))
            await broker.propose(ForgetDeleted(topic_id=topic_id, node_id=node_id))

    def problems(self) -> list[str]:
        """Partitions of this node that have no leader, or cannot be opened."""
        found = self._leaderless()
        if self._unopened:
            reason = next(iter(self._unopened.values()))
            found.append(f"{len(self._unopened)} partitions cannot be opened, and are tried again: {reason}")
        return found

    def _leaderless(self) -> list[str]:
        image, node_id = self._broker.image, self._broker.node_id
        leaderless = [
            f"{topic.name}-{index}"
            for topic in image.topics.values()
            for index, placed in enumerate(topic.partitions)
            if placed.leader == -1 and node_id in placed.replicas
        ]
        if not leaderless:
            return []
        shown = ", ".join(leaderless[:5]) + (", ..." if len(leaderless) > 5 else "")
        return [
            f"{len(leaderless)} partitions of this node have no leader ({shown}): no live node has all their "
            "records; start the nodes that are down, or see 'tidemill cluster elect --help'"
        ]
