"""What the handlers share: metadata, partitions, groups, settings, and the questions they all ask."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from tidemill.config.settings import Settings
from tidemill.config.topic import TopicConfig
from tidemill.control.commands import AllocateProducerIds, Command, CreateTopic, DeleteTopic
from tidemill.control.controller import Controller
from tidemill.control.image import MetadataDelta, MetadataImage, TopicImage
from tidemill.control.table_commands import DropTable, DropTablePartition
from tidemill.control.table_images import TableImage, TablePartition
from tidemill.control.table_steps import drop_table
from tidemill.coordination.clock import LoopClock
from tidemill.coordination.moments import MomentGate
from tidemill.coordination.turns import give_way
from tidemill.errors import ApiError, ErrorCode, StorageError, TableCode, TableError, TidemillError
from tidemill.groups.coordinator import GroupCoordinator
from tidemill.groups.shard import GROUPS_TOPIC
from tidemill.log.log import Appended
from tidemill.log.segment import Segment
from tidemill.replication.compactor import Compactor
from tidemill.replication.coordinator_log import PartitionCoordinatorLog
from tidemill.replication.flusher import Flusher, wall_clock_ms
from tidemill.replication.partition import Partition
from tidemill.replication.replicas import PartitionKey, Placement, Replicas
from tidemill.replication.scrubber import Scrubber
from tidemill.server.budget import ByteBudget
from tidemill.server.fetch_sessions import FetchSessions
from tidemill.transactions.coordinator import TransactionCoordinator
from tidemill.transactions.shard import TRANSACTIONS_TOPIC

if TYPE_CHECKING:
    from tidemill.server.node_tables import NodeTables
    from tidemill.tables.changes import Changes

__all__ = ("OFFSETS_TOPIC", "TRANSACTIONS_TOPIC", "Broker")

OFFSETS_TOPIC = GROUPS_TOPIC
_INTERNAL_TOPIC_CONFIGS = {
    "cleanup.policy": "compact",
    "compression.type": "producer",
    "segment.bytes": str(100 * 1024 * 1024),
}
_PRODUCER_ID_BLOCK = 1_000
_WORKER_THREADS = 2
#: How long a stop waits for batches that are being looked at.
_GATE_CLOSE_SECONDS = 5.0
#: How long an idempotent producer that writes nothing is remembered (Kafka's producer.id.expiration.ms).
_PRODUCER_EXPIRATION_MS = 24 * 60 * 60 * 1000

logger = logging.getLogger(__name__)


class Broker:
    """The working parts of one node, without its sockets."""

    def __init__(
        self,
        settings: Settings,
        controller: Controller,
        replicas: Replicas,
        flusher: Flusher,
        budget: ByteBudget,
        *,
        clock_ms: Callable[[], int] = wall_clock_ms,
        steady_ms: Callable[[], int] | None = None,
    ) -> None:
        self.settings = settings
        self.controller = controller
        self.replicas = replicas
        self.flusher = flusher
        self.budget = budget
        #: The time of day, for stamps. It jumps when somebody sets the clock.
        self.clock_ms = clock_ms
        #: For intervals and deadlines: the time of day as of the start, which goes on evenly from there.
        self.steady_ms = LoopClock().now_ms if steady_ms is None else steady_ms
        self.fetch_sessions = FetchSessions(settings.max_fetch_sessions)
        self.groups: GroupCoordinator
        self.transactions: TransactionCoordinator
        #: Held while several partitions change together, and while a moment of several is taken.
        self.moments = MomentGate()
        #: The last transactional write of each producer that waits for the coordinator.
        self.transactional_writes: dict[int, asyncio.Task[None]] = {}
        #: Where clients find this node; known once it listens.
        self.advertised = settings.listen
        #: Threads for what would hold the event loop: looking at large batches, searching by time. Few, since
        #: each may unpack ``max_decompressed_bytes``.
        self.workers = ThreadPoolExecutor(_WORKER_THREADS, thread_name_prefix="tidemill-work")
        #: The last write to each partition whose batches are being looked at by the gate.
        self.gated_writes: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._tables: NodeTables | None = None
        self._tables_lock = asyncio.Lock()
        self._configs: dict[UUID, TopicConfig] = {}
        self._producer_ids = range(0)
        self._producer_id_lock = asyncio.Lock()
        self._internal_topic_lock = asyncio.Lock()
        self._deleter = ThreadPoolExecutor(1, thread_name_prefix="tidemill-delete")
        self.compactor = Compactor(
            replicas.storage,
            map_bytes=settings.compaction_map_bytes,
            bytes_per_second=settings.compaction_bytes_per_second,
            max_decompressed_bytes=settings.max_decompressed_bytes,
            clock_ms=clock_ms,
        )
        self.scrubber = Scrubber(
            replicas,
            self.led_placements,
            self._led_placement,
            bytes_per_second=settings.scrub_bytes_per_second,
            interval_ms=settings.scrub_interval_ms,
            clock_ms=clock_ms,
        )
        controller.subscribe(self._metadata_changed)
        replicas.on_open = self._partition_opened

    @property
    def image(self) -> MetadataImage:
        return self.controller.image

    @property
    def node_id(self) -> int:
        return self.settings.node_id

    # --- topics and partitions

    def topic(self, name: str) -> TopicImage:
        found = self.image.topics.get(name)
        if found is None:
            raise ApiError(ErrorCode.unknown_topic_or_partition, f"there is no topic {name!r}")
        return found

    def topic_by_id(self, topic_id: UUID | None) -> TopicImage:
        found = None if topic_id is None else self.image.topic_by_id(topic_id)
        if found is None:
            raise ApiError(ErrorCode.unknown_topic_id, f"there is no topic with id {topic_id}")
        return found

    def topic_config(self, topic: TopicImage) -> TopicConfig:
        config = self._configs.get(topic.id)
        if config is None:
            config = TopicConfig.from_overrides(topic.configs, self.settings.topic_defaults)
            self._configs[topic.id] = config
        return config

    def partition(self, topic: TopicImage, index: int) -> Partition:
        """The partition, if this node leads it. Raises ``ApiError`` or ``StorageError``."""
        partition = self.replicas.peek(topic.id, index)
        if partition is not None:
            return partition
        return self.replicas.open(self.placement(topic, index))

    def placement(self, topic: TopicImage, index: int) -> Placement:
        if not 0 <= index < len(topic.partitions):
            raise ApiError(
                ErrorCode.unknown_topic_or_partition,
                f"topic {topic.name!r} has {len(topic.partitions)} partitions, there is no partition {index}",
            )
        placed = topic.partitions[index]
        if placed.leader != self.node_id:
            raise ApiError(
                ErrorCode.not_leader_or_follower,
                f"node {self.node_id} does not lead {topic.name}-{index}, node {placed.leader} does",
            )
        return Placement(topic.name, topic.id, index, placed.leader_epoch, self.topic_config(topic))

    def led_placements(self) -> list[Placement]:
        """Every partition that the metadata gives to this node."""
        return [
            self.placement(topic, index)
            for topic in self.image.topics.values()
            for index, placed in enumerate(topic.partitions)
            if placed.leader == self.node_id
        ]

    def _led_placement(self, key: PartitionKey) -> Placement | None:
        """The placement of a partition by its topic's id; None if it is gone, or not this node's any more."""
        topic = self.image.topic_by_id(key[0])
        try:
            return None if topic is None else self.placement(topic, key[1])
        except ApiError:
            return None

    # --- tables

    async def tables(self) -> NodeTables:
        """The services of tables, loaded at their first use."""
        if self._tables is None:
            async with self._tables_lock:
                if self._tables is None:
                    module = await asyncio.to_thread(import_module, "tidemill.server.node_tables")
                    self._tables = module.NodeTables(self)
        assert self._tables is not None
        return self._tables

    @property
    def loaded_tables(self) -> NodeTables | None:
        """The services of tables, if they were needed so far."""
        return self._tables

    def rows_appended(
        self,
        table: TableImage,
        place: TablePartition,
        changes: Changes | None,
        partition: Partition,
        appended: Appended,
    ) -> None:
        """A batch for a table, whose rows were checked, is in its log."""
        if changes is not None and self._tables is not None and not appended.duplicate:
            self._tables.rows_appended(table.id, place.id, partition.index, appended.base_offset, changes)

    def _partition_opened(self, partition: Partition) -> None:
        if self.image.table_of_topic(partition.topic_id) is not None:
            partition.retention_floor = lambda: self._retention_floor(partition)

    def _retention_floor(self, partition: Partition) -> int:
        if self._tables is None:
            return 0  # Nobody knows yet what is needed, so everything is.
        return self._tables.service.keeper.floor(partition.topic_id, partition.index)

    async def drop_table(self, table: TableImage) -> None:
        """Drop a table, its logs and its state."""
        command = DropTable(name=table.name, table_id=table.id)
        await self._delete_logs(table.partitions, lambda: drop_table(self.controller, command))

    async def drop_table_partition(self, table: TableImage, value: str) -> None:
        """Drop one partition of a table with everything in it."""
        found = table.partition(value)
        if found is None:
            raise TableError(
                TableCode.partition_not_found, f"table {table.name!r} has no partition {value!r}"
            )
        command = DropTablePartition(table=table.name, table_id=table.id, value=value)
        await self._delete_logs((found,), lambda: self.controller.submit(command))

    async def _delete_logs(
        self, partitions: Sequence[TablePartition], drop: Callable[[], Awaitable[object]]
    ) -> None:
        for each in partitions:
            self.replicas.mark_deleting(each.topic, each.topic_id)
        try:
            await drop()
        finally:
            for each in partitions:
                if self.image.topic_by_id(each.topic_id) is not None:
                    self.replicas.unmark_deleting(each.topic, each.topic_id)
                else:
                    self.remove_files(each.topic, each.topic_id)
        await self.groups.on_topics_deleted([each.topic for each in partitions])

    def check_no_partition(self, name: str) -> None:
        """Refuse a topic with the name of a partition that a table may get.

        A client that writes to a partition too early would take its name for good.
        """
        table = self.image.tables.get(".".join(name.split(".")[:2]))
        if table is not None and table.partition_column is not None and name != table.name:
            raise ApiError(
                ErrorCode.invalid_topic_exception,
                f"topic {name!r} would be a partition that table {table.name!r} does not have; write a row "
                "of it with Tidemill's client, or create the partition ahead",
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
                    topic_id=uuid4(),
                    partitions=self.settings.default_partitions,
                    replication=self.settings.default_replication,
                )
            await give_way()
        results = await self.controller.submit_many(commands.values())
        for name, result in zip(commands, results, strict=True):
            if isinstance(result, TidemillError) and result.code != ErrorCode.topic_already_exists:
                refused[name] = ApiError(result.code, result.message)
        return refused

    async def delete_topic(self, topic: TopicImage) -> None:
        """Delete a topic and its data. Raises ``ApiError`` if it is refused."""
        # The marker goes first: only a directory that has one is ever removed, also after a crash.
        self.replicas.mark_deleting(topic.name, topic.id)
        try:
            await self.controller.submit(DeleteTopic(name=topic.name, topic_id=topic.id))
        except TidemillError:
            # Refused. After anything else the topic may yet go, and a marker too many does no harm: the next
            # start takes it off a topic that is still there.
            self.replicas.unmark_deleting(topic.name, topic.id)
            raise
        self.remove_files(topic.name, topic.id)
        await self.groups.on_topics_deleted([topic.name])

    def remove_files(self, topic: str, topic_id: UUID) -> None:
        """Remove a deleted topic's files behind the scenes: large files take long."""
        self._delete_behind(self._remove_files, topic, topic_id)

    def _remove_files(self, topic: str, topic_id: UUID) -> None:
        self.compactor.wait_until_off(topic_id)
        self.replicas.remove_files(topic, topic_id)

    def discard(self, partition: Partition, segments: list[Segment]) -> None:
        """Remove old segments behind the scenes."""
        self.replicas.damage.forget_below(partition.topic_id, partition.index, partition.log_start_offset)
        if segments:
            self._delete_behind(partition.log.discard, segments)

    def _delete_behind(self, remove: Callable[..., None], *what: object) -> None:
        self._deleter.submit(remove, *what).add_done_callback(_report_failed_deletion)

    def _metadata_changed(self, old: MetadataImage, new: MetadataImage, delta: MetadataDelta) -> None:
        for topic in delta.deleted:
            self._configs.pop(topic.id, None)
            self.replicas.stop_topic(topic.name, topic.id)
        for name in delta.config_changed:
            topic = new.topics[name]
            self._configs.pop(topic.id, None)
            config = self.topic_config(topic)
            for index in range(len(topic.partitions)):
                partition = self.replicas.peek(topic.id, index)
                if partition is not None:
                    partition.configure(config)
        for changed in delta.leader_changed:
            topic = new.topics[changed.topic]
            partition = self.replicas.peek(topic.id, changed.partition)
            if partition is not None:
                partition.leader_epoch = topic.partitions[changed.partition].leader_epoch

    # --- producer ids

    async def next_producer_id(self) -> int:
        """A producer id that was never given before; ids are reserved in blocks."""
        async with self._producer_id_lock:
            if not self._producer_ids:
                first = await self.controller.submit(AllocateProducerIds(count=_PRODUCER_ID_BLOCK))
                self._producer_ids = range(first, first + _PRODUCER_ID_BLOCK)
            producer_id, self._producer_ids = self._producer_ids[0], self._producer_ids[1:]
            return producer_id

    # --- groups

    async def ensure_offsets_topic(self) -> None:
        """Create the internal topic of groups and offsets at its first use."""
        await self._ensure_internal_topic(OFFSETS_TOPIC, self.settings.offsets_topic_partitions)

    async def ensure_transactions_topic(self) -> None:
        """Create the internal topic of transactional ids at its first use."""
        await self._ensure_internal_topic(TRANSACTIONS_TOPIC, self.settings.transactions_topic_partitions)

    async def _ensure_internal_topic(self, name: str, partitions: int) -> None:
        if name in self.image.topics:
            return
        async with self._internal_topic_lock:
            if name in self.image.topics:
                return
            await self.controller.submit(
                CreateTopic(
                    name=name,
                    topic_id=uuid4(),
                    partitions=partitions,
                    replication=self.settings.default_replication,
                    configs=dict(_INTERNAL_TOPIC_CONFIGS),
                )
            )

    def place_of_group(self, group_id: str) -> tuple[str, int]:
        """Topic and partition where a group's offsets are kept."""
        return OFFSETS_TOPIC, self.groups.partition_of(group_id)

    def coordinates_groups(self, topic: TopicImage) -> bool:
        """Whether the group coordinator must be told of what is written to the topic."""
        return topic.name == OFFSETS_TOPIC

    def open_log(self, partition: int) -> PartitionCoordinatorLog:
        """The log behind one shard of the group coordinator."""
        try:
            leader = self.partition(self.topic(OFFSETS_TOPIC), partition)
        except ApiError as error:
            raise ApiError(ErrorCode.not_coordinator, error.message) from error
        return PartitionCoordinatorLog(leader, self.clock_ms)

    # --- housekeeping

    async def apply_retention(self) -> None:
        """Delete what is too old, in every partition that has data.

        Partitions that were opened for it are closed again. One that fails does not keep the others from it.
        """
        for placement in self.led_placements():
            try:
                self._apply_retention_to(placement)
            except StorageError as error:
                logger.error("no retention for %s-%d: %s", placement.topic, placement.index, error)
            # One partition at a time, so that requests get their turn.
            await asyncio.sleep(0)

    def _apply_retention_to(self, placement: Placement) -> None:
        if self.image.topic_by_id(placement.topic_id) is None:
            return  # Deleted since the placements were listed.
        partition = self.replicas.peek(placement.topic_id, placement.index)
        opened_here = partition is None
        if partition is None:
            if not self.replicas.exists_on_disk(placement):
                return
            partition = self.replicas.open(placement)
        now_ms = self.clock_ms()
        self.discard(partition, partition.apply_retention(now_ms))
        partition.log.producers.expire(now_ms - _PRODUCER_EXPIRATION_MS)
        if opened_here and not partition.flush_scheduled and not partition.is_dirty:
            self.replicas.close_partition(partition)

    async def compact(self) -> None:
        """Compact every partition that is due; they are opened for it if they have data."""
        found = []
        for placement in self.led_placements():
            if not placement.config.compacts:
                continue
            try:
                partition = self.replicas.peek(placement.topic_id, placement.index)
                if partition is None and self.replicas.exists_on_disk(placement):
                    partition = self.replicas.open(placement)
            except StorageError:
                continue  # Noted and logged where it was opened.
            if partition is not None:
                found.append(partition)
        await self.compactor.compact(found)

    async def housekeep_tables(self) -> None:
        """What the tables need to be done from time to time."""
        if self._tables is not None:
            await self._tables.housekeep()

    async def _finish_gated_writes(self) -> None:
        """Let the batches that are being looked at come to their end, but not for ever: nobody was told that
        they are safe, and those of one client can take minutes.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _GATE_CLOSE_SECONDS
        while self.gated_writes and (left := until - loop.time()) > 0:
            await asyncio.wait(self.gated_writes.values(), timeout=left)
        unfinished = set(self.gated_writes.values())
        if unfinished:
            logger.warning("%d writes that were not acknowledged are given up by the stop", len(unfinished))
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)

    async def close(self) -> bool:
        """Stop in an orderly way: everything flushed and noted. False if some partition could not be."""
        if self.gated_writes:
            # Their batches go into the logs, which are still open.
            await self._finish_gated_writes()
        self.workers.shutdown(wait=False, cancel_futures=True)
        if self._tables is not None:
            await self._tables.close()
        self.compactor.close()
        self.scrubber.close()
        await self.flusher.drain(list(self.replicas))
        self._deleter.shutdown(wait=True)
        self.flusher.close()
        return self.replicas.close()


def _report_failed_deletion(done: Future[None]) -> None:
    error = done.exception()
    if error is not None:
        logger.error("old files could not be removed: %s", error)
