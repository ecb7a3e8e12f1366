"""Cleaning up the logs that this node holds: retention by age and size, compaction by key.

Leaders decide where a log starts, and followers go after them. Each replica compacts by itself, and forgets
producers by itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from tidemill.coordination.turns import pause_after
from tidemill.errors import StorageError

if TYPE_CHECKING:
    from tidemill.replication.log_work.compactor import Compactor
    from tidemill.replication.partition import Partition
    from tidemill.replication.replicas import Placement, Replicas
    from tidemill.server.broker.cursor_floors import CursorFloors
    from tidemill.server.broker.finding import PartitionFinder
    from tidemill.server.broker.removal import FileRemoval
    from tidemill.server.disk.space import DiskSpace

__all__ = ("LogCleanup",)

#: How long an idempotent producer that writes nothing is remembered (Kafka's producer.id.expiration.ms).
_PRODUCER_EXPIRATION_MS = 24 * 60 * 60 * 1000
#: Partitions of the metadata, and those that have data and may be opened, in one turn of the event loop.
_LOOKED_AT_PER_TURN = 200
_OPENED_PER_TURN = 5

logger = logging.getLogger(__name__)


class LogCleanup:
    """Applies ``cleanup.policy`` to every partition that this node holds."""

    def __init__(
        self,
        find: PartitionFinder,
        replicas: Replicas,
        removal: FileRemoval,
        compactor: Compactor,
        disk: DiskSpace,
        clock_ms: Callable[[], int],
        cursor_floors: CursorFloors,
    ) -> None:
        self._find = find
        self._replicas = replicas
        self._removal = removal
        self._compactor = compactor
        self._disk = disk
        self._clock_ms = clock_ms
        self._cursor_floors = cursor_floors

    async def apply_retention(self) -> None:
        """Delete what is too old, in every partition that has data.

        Partitions that were opened for it are closed again. If one fails, the others are still cleaned up.
        """
        await self._cursor_floors.refresh()
        placements = []
        for number, listed in enumerate(self._find.held_placements(), start=1):
            placements.append(listed)
            await pause_after(number, _LOOKED_AT_PER_TURN)
        for listed in placements:
            # The partition was deleted, or has moved to other nodes, since they were listed.
            if (placement := self._find.kept_placement((listed.topic_id, listed.index))) is None:
                continue
            try:
                self._apply_retention_to(placement)
            except StorageError as error:
                logger.error("no retention for %s-%d: %s", placement.topic, placement.index, error)
            # One partition at a time, so that requests get their turn.
            await asyncio.sleep(0)

    def _apply_retention_to(self, placement: Placement) -> None:
        partition = self._replicas.peek(placement.topic_id, placement.index)
        opened_here = partition is None
        if partition is None:
            if not self._replicas.exists_on_disk(placement):
                return
            partition = self._replicas.open(placement)
        now_ms = self._clock_ms()
        floor = self._cursor_floors.floor(partition, now_ms)
        self._removal.discard(partition, partition.apply_retention(now_ms, floor))
        partition.expire_producers(now_ms - _PRODUCER_EXPIRATION_MS)
        if opened_here and not partition.flush_scheduled and not partition.is_dirty:
            self._replicas.close_partition(partition)

    async def compact(self) -> None:
        """Compact every partition that is due; they are opened for it if they have data.

        Not while the disk's reserve is given up: the new segment is written before the old ones go.
        """
        if self._disk.growth_refusal is not None:
            return
        found = []
        for number, listed in enumerate(self._find.held_placements(), start=1):
            placement = self._find.kept_placement((listed.topic_id, listed.index))
            compacts = placement is not None and placement.config.compacts
            if placement is not None and compacts and (partition := self._with_data(placement)) is not None:
                found.append(partition)
                await pause_after(len(found), _OPENED_PER_TURN)
            await pause_after(number, _LOOKED_AT_PER_TURN)
        await self._compactor.compact(found)

    def _with_data(self, placement: Placement) -> Partition | None:
        """The partition if it has data and can be used. An error was noted and logged when it was opened."""
        partition = self._replicas.peek(placement.topic_id, placement.index)
        try:
            if partition is None and self._replicas.exists_on_disk(placement):
                partition = self._replicas.open(placement)
        except StorageError:
            return None
        return partition
