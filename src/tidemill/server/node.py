"""A whole node: directory, metadata, logs, coordinator, listener. Started and stopped in one place."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any
from uuid import uuid4

from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.control.commands import BumpLeaderEpochs, Command, RegisterNode, SetClusterId, new_cluster_id
from tidemill.control.controller import Controller
from tidemill.control.placement import ControlLimits
from tidemill.control.sqlite import SqliteStore
from tidemill.coordination.clock import LoopClock
from tidemill.errors import DiskFull, ErrorCode, StorageError, TidemillError
from tidemill.groups.coordinator import GroupCoordinator
from tidemill.groups.settings import GroupSettings
from tidemill.groups.topics import ImageTopics
from tidemill.log.storage import LocalStorage
from tidemill.replication.flusher import Flusher
from tidemill.replication.replicas import Placement, Replicas
from tidemill.server.broker import OFFSETS_TOPIC, TRANSACTIONS_TOPIC, Broker
from tidemill.server.budget import BudgetLimits, ByteBudget
from tidemill.server.connection import Connection
from tidemill.server.data_directory import DataDirectory
from tidemill.server.disk_space import DiskSpace
from tidemill.server.dispatch import BrokerDispatcher
from tidemill.server.frame_buffers import FrameBuffers
from tidemill.server.lag import ConsumerLag
from tidemill.server.listening import bound_server
from tidemill.server.metrics import (
    Metric,
    RequestMetrics,
    compaction_metrics,
    damage_metrics,
    render_in_steps,
    scrub_metrics,
    topic_metrics,
)
from tidemill.server.network_errors import cannot_listen
from tidemill.server.process_metrics import measure_machine
from tidemill.server.transaction_partitions import BrokerTransactionPartitions, TransactionLogs
from tidemill.server.watchdog import LoopWatchdog
from tidemill.transactions.coordinator import TransactionCoordinator
from tidemill.transactions.settings import TransactionSettings

__all__ = ("Node",)

logger = logging.getLogger(__name__)

_MINUTE_MS = 60_000
_OFFSET_EXPIRY_INTERVAL_MS = 10 * _MINUTE_MS
_TRANSACTIONAL_ID_EXPIRY_INTERVAL_MS = 60 * _MINUTE_MS
_LISTEN_BACKLOG = 1024
_CONNECTION_CHECK_INTERVAL_MS = 1_000
#: How long the start waits until what a crash has interrupted is visible everywhere.
_DECISIONS_WAIT_MS = 10_000


class Node:
    """Runs on the current event loop between ``start`` and ``stop``."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.directory = DataDirectory(settings.data_dir)
        self.disk = DiskSpace(settings.data_dir)
        self.metrics = RequestMetrics()
        self.watchdog = LoopWatchdog()
        self.started_at = time.monotonic()
        self.ready = False
        self._broker: Broker | None = None
        #: Where the node listens, with the real port.
        self.address = settings.listen
        self.http_address: Address | None = None
        self.unknown_directories: list[str] = []
        self._store: SqliteStore | None = None
        self._controller: Controller | None = None
        self._dispatcher: BrokerDispatcher | None = None
        self._lag: ConsumerLag | None = None
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        #: What the start had no room to commit; nothing is appended before it is.
        self._deferred: list[Command[Any]] = []

    @property
    def broker(self) -> Broker:
        """The working parts; there from early in ``start``."""
        assert self._broker is not None, "the node is not started"
        return self._broker

    # --- starting

    async def start(self) -> None:
        """Lock, recover, listen. After a failure nothing is left behind."""
        raise_open_files_limit()
        self.directory.acquire()
        try:
            await self._start_parts()
        except BaseException:
            await self._abandon()
            raise
        self.ready = True

    async def _start_parts(self) -> None:
        loop = asyncio.get_running_loop()
        settings = self.settings
        self.directory.check_metadata_present()
        self._store = SqliteStore(self.directory.metadata_path)
        limits = ControlLimits(partitions_per_topic=settings.max_partitions_per_topic)
        self._controller = controller = Controller(self._store, limits=limits)
        await controller.start()
        if controller.image.cluster_id is None:
            await controller.submit(SetClusterId(cluster_id=new_cluster_id()))
        flusher = Flusher(loop, settings.flush_threads)
        replicas = Replicas(
            LocalStorage(settings.data_dir, self.disk.note),
            flusher.request,
            max_decompressed_bytes=settings.max_decompressed_bytes,
        )
        budget = ByteBudget(_budget_limits(settings))
        self._broker = broker = Broker(settings, controller, replicas, flusher, budget)
        await self._open_listener(loop, budget)
        broker.advertised = settings.advertised_listener or self.address
        register = RegisterNode(
            node_id=settings.node_id,
            name=settings.node_name,
            host=broker.advertised.host,
            port=broker.advertised.port,
            incarnation=uuid4(),
        )
        await self._commit_or_defer([register])
        self._finish_deletions()
        broker.replicas.take_inventory(broker.led_placements())
        if not self.directory.stopped_cleanly:
            await self._recover()
        await self._start_groups()
        await self._start_transactions()
        self._lag = ConsumerLag(broker)
        if broker.image.tables:
            await (await broker.tables()).prepare()
        assert self._server is not None
        await self._server.start_serving()
        self.directory.note_owner(str(self.address))
        self._tasks = [
            loop.create_task(self.disk.watch()),
            loop.create_task(self.watchdog.beat()),
            loop.create_task(self._every(settings.log_retention_check_interval_ms, broker.apply_retention)),
            loop.create_task(self._every(settings.compaction_check_interval_ms, broker.compact)),
            loop.create_task(self._every(_OFFSET_EXPIRY_INTERVAL_MS, broker.groups.expire)),
            loop.create_task(self._every(_TRANSACTIONAL_ID_EXPIRY_INTERVAL_MS, broker.transactions.expire)),
            loop.create_task(self._every(settings.kv_check_interval_ms, broker.housekeep_tables)),
            loop.create_task(self._every(_CONNECTION_CHECK_INTERVAL_MS, self._look_after_connections)),
            loop.create_task(self._scrub()),
        ]

    async def _open_listener(self, loop: asyncio.AbstractEventLoop, budget: ByteBudget) -> None:
        """Take the port now, so that a port in use is found before anything is changed; serve later."""
        self._dispatcher = dispatcher = BrokerDispatcher(self.broker, self.metrics, self.watchdog)
        listen = self.settings.listen
        buffers = FrameBuffers()
        try:
            self._server = await bound_server(
                lambda: Connection(loop, dispatcher, budget, self.settings, buffers), listen, _LISTEN_BACKLOG
            )
        except OSError as error:
            raise cannot_listen("listen", listen, error, "--listen") from error
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = Address(host, port)

    def _finish_deletions(self) -> None:
        known = [topic.id for topic in self.broker.image.topics.values()]
        interrupted, self.unknown_directories = self.broker.replicas.leftovers(known)
        for topic, topic_id in interrupted:
            self.broker.remove_files(topic, topic_id)
        for directory in self.unknown_directories:
            logger.warning("%s belongs to no known topic; it is left alone, see 'tidemill doctor'", directory)

    async def _recover(self) -> None:
        """After a crash: a new leader epoch for every partition, every log read from its recovery point."""
        broker = self.broker
        written: dict[str, set[int]] = {}
        for placement in broker.led_placements():
            if broker.replicas.exists_on_disk(placement):
                written.setdefault(placement.topic, set()).add(placement.index)
        await self._commit_or_defer(
            [
                BumpLeaderEpochs(name=topic, partitions=tuple(sorted(indexes)))
                for topic, indexes in written.items()
            ]
        )
        placements = [
            placement
            for placement in broker.led_placements()
            if placement.index in written.get(placement.topic, ())
        ]
        logger.info("the last stop was not orderly: checking %d partitions", len(placements))
        # In a thread, because reading large logs takes long, and /healthz is asked meanwhile.
        await asyncio.to_thread(self._open_all, placements)

    async def _commit_or_defer(self, commands: Sequence[Command[Any]]) -> None:
        """Commit what a start has to; what finds no room is committed later, and nothing is written before.

        Reads go on with the metadata as it was. A write under the old leader epoch would not be told apart
        from one that the crash has taken.
        """
        deferred = []
        for command, result in zip(commands, await self.broker.controller.submit_many(commands), strict=True):
            if isinstance(result, DiskFull):
                self.disk.note(result)
                deferred.append(command)
            elif isinstance(result, TidemillError) and not _is_of_deleted_topic(result):
                raise result
        if deferred:
            self._deferred += deferred
            self.broker.replicas.refuse_appends(
                DiskFull("the disk is full; writes are taken again when there is room")
            )
            self.disk.when_room(self._commit_deferred)

    async def _commit_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        try:
            await self._commit_or_defer(deferred)
        except BaseException:
            # All of them again: another new epoch does no harm, and to go on without one would.
            self._deferred = deferred
            raise
        if self._deferred:
            raise DiskFull("no room for the metadata of the start")
        self.broker.replicas.refuse_appends(None)

    def _open_all(self, placements: list[Placement]) -> None:
        for placement in placements:
            # A partition that is damaged is noted and logged: the others go on.
            with contextlib.suppress(StorageError):
                self.broker.replicas.open(placement)

    async def _start_groups(self) -> None:
        settings, broker = self.settings, self.broker
        topic = broker.image.topics.get(OFFSETS_TOPIC)
        broker.groups = GroupCoordinator(
            broker,
            GroupSettings(
                partitions=len(topic.partitions) if topic else settings.offsets_topic_partitions,
                initial_rebalance_delay_ms=settings.group_initial_rebalance_delay_ms,
                min_session_timeout_ms=settings.group_min_session_timeout_ms,
                max_session_timeout_ms=settings.group_max_session_timeout_ms,
                max_size=settings.group_max_size,
                consumer_session_timeout_ms=settings.group_consumer_session_timeout_ms,
                consumer_heartbeat_interval_ms=settings.group_consumer_heartbeat_interval_ms,
                consumer_max_size=settings.group_consumer_max_size,
                max_offset_metadata_size=settings.offset_metadata_max_bytes,
                offsets_retention_ms=settings.offsets_retention_minutes * _MINUTE_MS,
            ),
            LoopClock(),
            ImageTopics(lambda: broker.image),
        )
        if topic:
            await broker.groups.start()
            if not self.unknown_directories:
                await self._forget_offsets_of_missing_topics()

    async def _forget_offsets_of_missing_topics(self) -> None:
        """A crash may have come between the deletion of a topic and that of what was committed for it.

        Not while there are files of topics that nobody knows: then it is the metadata that has lost them.
        """
        topics = self.broker.image.topics
        try:
            await self.broker.groups.forget_missing_topics(lambda name: name in topics)
        except TidemillError as error:
            logger.warning("offsets of topics that are gone are kept for now: %s", error.message)

    async def _start_transactions(self) -> None:
        settings, broker = self.settings, self.broker
        topic = broker.image.topics.get(TRANSACTIONS_TOPIC)
        broker.transactions = TransactionCoordinator(
            TransactionLogs(broker),
            BrokerTransactionPartitions(broker),
            TransactionSettings(
                partitions=len(topic.partitions) if topic else settings.transactions_topic_partitions,
                max_timeout_ms=settings.transaction_max_timeout_ms,
                expiration_ms=settings.transactional_id_expiration_ms,
                publication_retention_ms=settings.job_publication_retention_ms,
            ),
            LoopClock(),
            broker.next_producer_id,
        )
        if topic:
            await broker.transactions.start(settle_ms=_DECISIONS_WAIT_MS)

    async def _look_after_connections(self) -> None:
        assert self._dispatcher is not None
        self._dispatcher.tick()

    async def _every(self, interval_ms: int, action: Callable[[], Awaitable[None]]) -> None:
        while True:
            await asyncio.sleep(interval_ms / 1000)
            try:
                await action()
            except Exception:
                logger.exception("housekeeping failed; it is tried again later")

    async def _scrub(self) -> None:
        try:
            await self.broker.scrubber.run()
        except Exception:
            logger.exception("the scrubber has failed; nothing is read on its own until the next start")

    # --- stopping

    async def stop(self) -> None:
        """Answer what runs, flush everything, and note that the stop was orderly.

        It is not noted while a partition is stopped: the next start then looks at every log, and says so
        again.
        """
        self.ready = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._server is not None
        assert self._dispatcher is not None
        self._server.close()
        # First those who write markers through the groups.
        await self.broker.transactions.close()
        await self.broker.groups.close()
        await self._dispatcher.close()
        all_well = not any(self._stopped_partitions())
        all_well = await self.broker.close() and all_well
        await self._close_metadata()
        if all_well:
            self.directory.note_clean_stop()
        self.directory.release()

    async def _close_metadata(self) -> None:
        if self._controller is not None:
            await self._controller.stop()
        if self._store is not None:
            await self._store.close()

    async def _abandon(self) -> None:
        """Undo a start that failed half-way."""
        for task in self._tasks:
            task.cancel()
        if self._server is not None:
            self._server.close()
        orderly = True
        if self._broker is not None:
            orderly = await self._broker.close()
        await self._close_metadata()
        if self.directory.stopped_cleanly and orderly:
            self.directory.note_clean_stop()
        self.directory.release()

    # --- what it tells of itself

    def problems(self) -> list[str]:
        """What keeps the node from being wholly well, in words."""
        if not self.ready:
            return ["the node is starting or stopping"]
        full = self.disk.problem()
        found = [] if full is None else [full]
        found += self._stopped_partitions()
        found += self._damage()
        if self.unknown_directories:
            found.append(
                f"{len(self.unknown_directories)} directories belong to no known topic, the first one is "
                f"{self.unknown_directories[0]}: the metadata is older than the logs, or somebody has put "
                "them there; restore metadata.db, or move them away"
            )
        found += [
            f"partition {index} of topic {topic_id} is not compacted: {error}"
            for (topic_id, index), error in self.broker.compactor.counts.damaged.items()
        ]
        if self.broker.loaded_tables is not None:
            found += self.broker.loaded_tables.service.problems()
        if self.broker.controller.failure is not None:
            found.append(f"metadata: {self.broker.controller.failure}")
        return found

    def _damage(self) -> Iterator[str]:
        """What was found damaged in partitions that are not stopped."""
        coordinators = self.broker.groups.damaged() | self.broker.transactions.damaged()
        stopped = {(each.topic, each.index) for each, _ in self.broker.replicas.offline.values()}
        for (topic, index), damage in coordinators.items():
            if (topic, index) not in stopped:
                yield f"{topic}-{index} is damaged, and what is kept in it is not served: {damage}"
        for each in self.broker.replicas.damage:
            if (each.topic, each.index) not in coordinators:
                yield str(each)

    def _stopped_partitions(self) -> Iterator[str]:
        """The partitions that are out of service, and why."""
        for placement, error in self.broker.replicas.offline.values():
            yield f"{placement.topic}-{placement.index} is stopped: {error}"
        for partition in self.broker.replicas:
            if partition.log.failure is not None:
                yield f"{partition.topic}-{partition.index} is stopped: {partition.log.failure}"

    async def metrics_page(self) -> AsyncIterator[str]:
        """What /metrics answers, in parts. Made in short turns of the loop, and in a thread."""
        machine = await asyncio.to_thread(measure_machine, self.settings.data_dir)
        lag: Iterable[Metric] = ()
        if self.ready and self._lag is not None:
            lag = (await self._lag.measure()).collect()
        async for part in render_in_steps(chain(self.collect_metrics(), machine, lag)):
            yield part

    def collect_metrics(self) -> Iterator[Metric]:
        """What can be read off at once."""
        yield from self.metrics.collect()
        yield from self.watchdog.collect()
        yield Metric("tidemill_ready", "gauge", "Whether requests are taken.", self.ready)
        yield Metric(
            "tidemill_up_seconds", "gauge", "Seconds since the start.", time.monotonic() - self.started_at
        )
        if not self.ready:
            return
        broker = self.broker
        connections = len(self._dispatcher.connections) if self._dispatcher else 0
        yield Metric("tidemill_connections", "gauge", "Open client connections.", connections)
        yield Metric(
            "tidemill_inflight_bytes",
            "gauge",
            "Bytes of requests and answers under way.",
            broker.budget.used_bytes,
        )
        yield Metric(
            "tidemill_connections_waiting",
            "gauge",
            "Connections that are not read until there is memory for their requests.",
            broker.budget.waiting,
        )
        yield Metric("tidemill_topics", "gauge", "Topics.", len(broker.image.topics))
        yield Metric("tidemill_partitions_open", "gauge", "Partitions with open files.", len(broker.replicas))
        yield Metric(
            "tidemill_partitions_stopped",
            "gauge",
            "Partitions out of service.",
            sum(1 for _ in self._stopped_partitions()),
        )
        yield Metric("tidemill_problems", "gauge", "Problems that /readyz names.", len(self.problems()))
        yield Metric("tidemill_flushes_total", "counter", "Flushes to disk.", broker.flusher.flush_count)
        yield Metric(
            "tidemill_flush_seconds_total", "counter", "Time spent in flushes.", broker.flusher.flush_seconds
        )
        yield Metric(
            "tidemill_transactions_open", "gauge", "Transactions under way.", broker.transactions.open_count()
        )
        yield Metric("tidemill_fetch_sessions", "gauge", "Open fetch sessions.", len(broker.fetch_sessions))
        yield from compaction_metrics(broker.compactor.counts)
        yield from scrub_metrics(broker.scrubber)
        yield from damage_metrics(broker.replicas.damage)
        yield from topic_metrics(broker.replicas)
        for partition in broker.replicas:
            labels = (("topic", partition.topic), ("partition", str(partition.index)))
            log = partition.log
            yield Metric("tidemill_log_end_offset", "gauge", "Next offset.", log.end_offset, labels)
            yield Metric(
                "tidemill_high_watermark", "gauge", "Durable offset.", partition.high_watermark, labels
            )
            yield Metric("tidemill_log_start_offset", "gauge", "Oldest offset.", log.log_start_offset, labels)
            yield Metric("tidemill_log_bytes", "gauge", "Bytes on disk.", log.size_bytes, labels)


def _budget_limits(settings: Settings) -> BudgetLimits:
    return BudgetLimits(
        settings.max_inflight_bytes,
        settings.max_frame_bytes,
        stall_seconds=settings.stall_timeout_ms / 1000,
        frame_seconds=settings.frame_deadline_ms / 1000,
        answer_seconds=settings.idle_timeout_ms / 1000,
    )


def _is_of_deleted_topic(failure: TidemillError) -> bool:
    """Deleting topics is how room is made, so some of what waits for room may have nothing left to do."""
    return failure.code is ErrorCode.unknown_topic_or_partition


def raise_open_files_limit() -> None:
    """Every segment in use is an open file, so take as many as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
