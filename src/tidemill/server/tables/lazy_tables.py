"""The services of tables, loaded when the node meets its first table.

Arrow and the engine of the state take longer to load than a node without tables takes to start.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from importlib import import_module
from typing import TYPE_CHECKING, Any
from uuid import UUID

if TYPE_CHECKING:
    from tidemill.control.tables.images import TableImage, TablePartition
    from tidemill.kv.contract import KvEngine, MakeKvEngine
    from tidemill.log.log import Appended
    from tidemill.replication.partition import Partition
    from tidemill.server.broker.bundle import Broker
    from tidemill.server.tables.node_tables import NodeTables
    from tidemill.tables.state.changes import Changes

__all__ = ("LazyTables",)


class LazyTables:
    """Loads ``NodeTables`` at its first use, and stands in for it until then."""

    def __init__(self, broker: Broker, make_engine: MakeKvEngine) -> None:
        self._broker = broker
        self._make_engine = make_engine
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[object]] = set()
        #: The services, once they are loaded.
        self.loaded: NodeTables | None = None
        broker.replicas.on_open = self._partition_opened

    async def load(self) -> NodeTables:
        """The services of tables, loaded now if they were not."""
        if self.loaded is None:
            async with self._lock:
                if self.loaded is None:
                    module, engine = await asyncio.to_thread(self._import)
                    self.loaded = module.NodeTables(self._broker, engine)
                    for partition in self._broker.replicas:
                        self.loaded.service.partition_opened(partition)
                    self.pause_compactions(self._broker.disk.growth_refusal is not None)
        assert self.loaded is not None
        return self.loaded

    def _import(self) -> tuple[Any, KvEngine]:
        """The module of the services, and the engine for the state; both take long to load."""
        from tidemill.kv.contract import KvLimits

        settings = self._broker.settings
        limits = KvLimits(settings.kv_block_cache_bytes, settings.kv_write_buffer_bytes)
        engine = self._make_engine(limits, self._broker.give_up_reserve)
        return import_module("tidemill.server.tables.node_tables"), engine

    def rows_appended(
        self,
        table: TableImage,
        table_partition: TablePartition,
        changes: Changes | None,
        partition: Partition,
        appended: Appended,
    ) -> None:
        """Tell the services that a batch with checked rows is in a table's log."""
        if changes is not None and self.loaded is not None and not appended.duplicate:
            self.loaded.rows_appended(
                table.id, table_partition.id, partition.index, appended.base_offset, changes
            )

    def _partition_opened(self, partition: Partition) -> None:
        if self._broker.image.table_of_topic(partition.topic_id) is not None:
            partition.retention_floor = lambda: self._retention_floor(partition)
            partition.as_follower.on_cut = self._log_cut
            if self.loaded is not None:
                self.loaded.service.partition_opened(partition)
            elif self._broker.image.replicated and _is_on_event_loop():
                # A follower may have to keep the state ready, although nobody asks it for rows.
                self._behind(self.load())

    async def remove_state(self, topic_id: UUID, index: int) -> None:
        """Remove the state of a partition that has moved to other nodes, if it is the log of a bucket."""
        if self._broker.image.table_of_topic(topic_id) is not None:
            await (await self.load()).service.remove_state(topic_id, index)

    def _log_cut(self, partition: Partition, end_offset: int) -> None:
        # Looked at now: the log grows again soon.
        anew = partition.log_start_offset == end_offset
        if self.loaded is not None:
            self.loaded.service.log_cut(partition, anew=anew)
        else:
            self._behind(self._load_and_cut(partition, anew=anew))

    async def _load_and_cut(self, partition: Partition, *, anew: bool) -> None:
        (await self.load()).service.log_cut(partition, anew=anew)

    def _behind(self, work: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _retention_floor(self, partition: Partition) -> int:
        if self.loaded is None:
            return 0  # Which records are needed is not known yet, so all are kept.
        return self.loaded.service.log_floor(partition)

    def pause_compactions(self, paused: bool) -> None:
        """Pause the engine's compactions while the disk has no space for them. Any thread may call it."""
        if self.loaded is not None:
            self.loaded.service.pause_compactions(paused)

    async def housekeep(self) -> None:
        """Do the chores of tables, if they are loaded."""
        if self.loaded is not None:
            await self.loaded.housekeep()

    async def close(self) -> None:
        """Close the state of every table."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.loaded is not None:
            await self.loaded.close()


def _is_on_event_loop() -> bool:
    """Whether this is not a thread that checks logs at the start, which loads the tables by itself."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
