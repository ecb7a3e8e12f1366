"""The catalogue of topics: how they are created, auto-created and deleted, with their files and offsets.

Tables are dropped here too, because their logs are topics. What a client may ask for is checked by handlers
and by the commands themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tidemill.control.commands import Command, CreateTopic, DeleteTopic
from tidemill.control.tables.commands import DropTable, DropTablePartition
from tidemill.control.tables.steps import drop_table
from tidemill.coordination.turns import give_way
from tidemill.errors import ApiError, DiskFull, ErrorCode, TableCode, TableError, TidemillError

if TYPE_CHECKING:
    from tidemill.config.settings import Settings
    from tidemill.control.controller import Controller
    from tidemill.control.image import TopicImage
    from tidemill.control.tables.images import TableImage, TablePartition
    from tidemill.coordination.ids import Ids
    from tidemill.replication.replicas import Replicas
    from tidemill.server.broker.removal import FileRemoval
    from tidemill.server.coordinators.registry import Coordinators
    from tidemill.server.disk.space import DiskSpace

__all__ = ("TopicCatalogue",)

logger = logging.getLogger(__name__)

#: One replica may be gone, and an acknowledged record is still on two disks.
_REPLICAS_DEFAULT = 3
_INTERNAL_TOPIC_CONFIGS = {
    "cleanup.policy": "compact",
    "compression.type": "producer",
    "segment.bytes": str(100 * 1024 * 1024),
}


class TopicCatalogue:
    """Creates and deletes topics. Coordinators forget what they keep about those that are deleted."""

    def __init__(
        self,
        settings: Settings,
        controller: Controller,
        replicas: Replicas,
        removal: FileRemoval,
        ids: Ids,
        disk: DiskSpace,
        coordinators: Coordinators,
    ) -> None:
        self._settings = settings
        self._controller = controller
        self._replicas = replicas
        self._removal = removal
        self._ids = ids
        self._disk = disk
        self._coordinators = coordinators
        self._internal_topic_lock = asyncio.Lock()

    # --- creating

    @property
    def default_replication(self) -> int:
        """Replicas of a topic whose creator names no number."""
        return self._settings.default_replication or min(
            _REPLICAS_DEFAULT, len(self._controller.image.live_nodes)
        )

    async def auto_create(self, names: list[str]) -> dict[str, ApiError]:
        """Create missing topics with the node's defaults; gives the names that were refused, and why."""
        refused: dict[str, ApiError] = {}
        commands: dict[str, Command[TopicImage]] = {}
        for name in names:
            try:
                self.check_no_partition(name)
            except ApiError as error:
                refused[name] = error
            else:
                commands[name] = CreateTopic(
                    name=name,
                    topic_id=self._ids.uuid(),
                    partitions=self._settings.default_partitions,
                    replication=self.default_replication,
                )
            await give_way()
        results = await self._controller.submit_many(commands.values())
        for name, result in zip(commands, results, strict=True):
            if isinstance(result, TidemillError) and result.code != ErrorCode.topic_already_exists:
                refused[name] = ApiError(result.code, result.message)
        return refused

    def check_no_partition(self, name: str) -> None:
        """Refuse a topic with the name of a partition that a table may get.

        A client that writes to a partition too early would take its name for good.
        """
        table = self._controller.image.tables.get(".".join(name.split(".")[:2]))
        if table is not None and table.partition_column is not None and name != table.name:
            raise ApiError(
                ErrorCode.invalid_topic_exception,
                f"topic {name!r} would be a partition that table {table.name!r} does not have; write a row "
                "of it with Tidemill's client, or create the partition ahead",
            )

    async def ensure_internal_topic(self, name: str, partitions: int, configs: Mapping[str, str]) -> None:
        """Create the internal topic of a coordinator at its first use."""
        if name in self._controller.image.topics:
            return
        async with self._internal_topic_lock:
            if name in self._controller.image.topics:
                return
            command = CreateTopic(
                name=name,
                topic_id=self._ids.uuid(),
                partitions=partitions,
                replication=self.default_replication,
                configs={**_INTERNAL_TOPIC_CONFIGS, **configs},
            )
            try:
                await self._controller.submit(command)
            except ApiError as error:
                # Another node was first. Its number of partitions counts.
                if error.code != ErrorCode.topic_already_exists:
                    raise

    # --- deleting

    async def delete_topic(self, topic: TopicImage) -> None:
        """Delete a topic and its data. Raises ``TidemillError`` if it is not known to be deleted."""
        command = DeleteTopic(name=topic.name, topic_id=topic.id, command_id=self._ids.uuid())
        # The deletion note comes first: only a directory that has one is ever removed, also after a crash.
        self._replicas.mark_deleting(topic.name, topic.id)
        try:
            await self._controller.submit(command)
        except TidemillError:
            # The deletion was refused. After any other error the topic may be deleted yet, and the note
            # stays: the next start removes it from a topic that exists.
            self._replicas.unmark_deleting(topic.name, topic.id)
            raise
        try:
            self._removal.remove_topic(topic.name, topic.id)
            await self._forget([topic.name])
        except TidemillError as error:
            logger.warning("topic %s is deleted; cleaning up after it failed: %s", topic.name, error.message)

    async def _forget(self, topics: Sequence[str]) -> None:
        if self._controller.image.replicated:
            return  # The coordinators of every node hear of it from the metadata.
        try:
            await self._coordinators.on_topics_deleted(topics)
        except DiskFull:
            # Deleting frees space, so it must work on a full disk. Committed offsets are removed once there
            # is space.
            self._disk.when_writable(self._coordinators.forget_missing_topics)

    async def drop_table(self, table: TableImage) -> None:
        """Drop a table, its logs and its state."""
        command = DropTable(name=table.name, table_id=table.id)
        await self._delete_logs(table.partitions, lambda: drop_table(self._controller, command))

    async def drop_table_partition(self, table: TableImage, value: str) -> None:
        """Drop one table partition with everything in it."""
        found = table.partition(value)
        if found is None:
            raise TableError(
                TableCode.partition_not_found, f"table {table.name!r} has no partition {value!r}"
            )
        command = DropTablePartition(table=table.name, table_id=table.id, value=value)
        await self._delete_logs((found,), lambda: self._controller.submit(command))

    async def _delete_logs(
        self, partitions: Sequence[TablePartition], drop: Callable[[], Awaitable[object]]
    ) -> None:
        for each in partitions:
            self._replicas.mark_deleting(each.topic, each.topic_id)
        try:
            await drop()
        finally:
            for each in partitions:
                if self._controller.image.topic_by_id(each.topic_id) is not None:
                    self._replicas.unmark_deleting(each.topic, each.topic_id)
                else:
                    self._removal.remove_topic(each.topic, each.topic_id)
        await self._forget([each.topic for each in partitions])
