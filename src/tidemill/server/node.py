"""The assembly of a node: its parts are made, started and stopped here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.control.commands import (
    AllocateNodeNumber,
    BumpLeaderEpochs,
    Command,
    RegisterNode,
    SetClusterId,
    new_cluster_id,
)
from tidemill.control.controller import CONTROLLER_METRICS, Controller
from tidemill.control.placement import ControlLimits
from tidemill.control.stores.store import MetadataStore
from tidemill.coordination.metrics import Metric, Metrics, gauge
from tidemill.errors import ApiError, DiskFull, ErrorCode, StorageError, TidemillError
from tidemill.net.errors import cannot_listen
from tidemill.net.transport import Listener
from tidemill.replication.log_work.compactor import COMPACTION_METRICS
from tidemill.replication.log_work.damage import DAMAGE_METRICS
from tidemill.replication.log_work.flusher import FLUSH_METRICS, Flusher
from tidemill.replication.log_work.scrubber import SCRUB_METRICS
from tidemill.replication.replicas import REPLICA_METRICS, Placement, Replicas
from tidemill.server.broker import Broker
from tidemill.server.broker.cursor_floors import CURSOR_RETENTION_METRICS
from tidemill.server.broker.fetch_sessions import FETCH_SESSION_METRICS
from tidemill.server.broker.housekeeping import Chore, Housekeeping
from tidemill.server.cluster.kind import check_kind
from tidemill.server.connections.budget import BUDGET_METRICS, BudgetLimits, ByteBudget
from tidemill.server.connections.connection import Connection
from tidemill.server.connections.frame_buffers import FrameBuffers
from tidemill.server.cursor_lag import CURSOR_METRICS, CursorLag
from tidemill.server.disk.space import DISK_METRICS
from tidemill.server.lag import LAG_METRICS, ConsumerLag
from tidemill.server.metrics import render
from tidemill.server.problems import Problem, ProblemKind
from tidemill.server.process_metrics import PROCESS_METRICS, measure_process
from tidemill.server.requests.authorization import Authorizer
from tidemill.server.requests.dispatch import CONNECTION_METRICS, BrokerDispatcher
from tidemill.server.runtime import Runtime
from tidemill.server.share.lag import SHARE_LAG_METRICS, ShareLag
from tidemill.server.traffic import TRAFFIC_METRICS, Traffic
from tidemill.server.watchdog import WATCHDOG_METRICS, LoopWatchdog

if TYPE_CHECKING:
    from tidemill.server.cluster.membership import Membership

__all__ = ("Node",)

logger = logging.getLogger(__name__)

_LISTEN_BACKLOG = 1024
_SECRET_BYTES = 32
_CONNECTION_CHECK_INTERVAL_MS = 1_000
#: How long the start waits until what a crash has interrupted is visible everywhere.
_DECISIONS_WAIT_MS = 10_000


class Node:
    """A node. It runs on the current event loop between ``start`` and ``stop``."""

    def __init__(
        self,
        settings: Settings,
        runtime: Runtime | None = None,
        authorizer: Authorizer | None = None,
        on_lease: Callable[[int], None] | None = None,
    ) -> None:
        if settings.cluster is None and settings.default_replication == 0:
            # A node that is alone has one replica of everything, and clients are told that number.
            settings = replace(settings, default_replication=1)
        self.settings = settings
        #: Decides who may do what; None lets everybody do everything.
        self.authorizer = authorizer
        #: Told of the lease of the node's session whenever it changes.
        self._on_lease = on_lease
        self.runtime = runtime or Runtime()
        self.directory = self.runtime.directory(settings.data_dir)
        self.disk = self.runtime.disk_space(settings.data_dir, settings.disk_reserve_bytes)
        self.traffic = Traffic()
        self.watchdog = LoopWatchdog()
        self._started_ms = 0
        self.ready = False
        self._broker: Broker | None = None
        #: Where the node listens, with the real port.
        self.address = settings.listen
        self.http_address: Address | None = None
        self.unknown_directories: list[str] = []
        self._store: MetadataStore | None = None
        self._controller: Controller | None = None
        #: Its part in a cluster; None on a node that is alone.
        self.membership: Membership | None = None
        self._dispatcher: BrokerDispatcher | None = None
        self._listener: Listener | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._housekeeping = Housekeeping([])
        #: Commands that the start had no disk space to commit; nothing is appended before they are.
        self._deferred: list[Command[Any]] = []
        self.metrics = self._own_metrics()

    @property
    def broker(self) -> Broker:
        """The working parts, which exist from early in ``start`` on."""
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
        settings, runtime = self.settings, self.runtime
        controller = await self._open_metadata()
        settings = self.settings
        flusher = Flusher(loop, runtime.pools("flush", settings.flush_threads), runtime.wall_ms)
        replicas = Replicas(
            runtime.storage(settings.data_dir, self.disk.note),
            flusher.request,
            max_decompressed_bytes=settings.max_decompressed_bytes,
            clock_ms=runtime.wall_ms,
            pools=runtime.pools,
            node_id=settings.node_id,
        )
        budget = ByteBudget(_budget_limits(settings))
        # Made anew, because a node can be started again, with new parts.
        self.metrics = self._own_metrics()
        self._broker = broker = Broker(
            settings,
            controller,
            replicas,
            flusher,
            budget,
            runtime,
            disk=self.disk,
            metrics=self.metrics.section(lambda: self.ready),
        )
        broker.problems = self.problems
        self._started_ms = broker.steady_ms()
        await self.disk.open_reserve()
        await self._open_listener(loop, budget)
        broker.advertised = settings.advertised_listener or self.address
        if settings.cluster is None:
            await self._start_alone()
        else:
            await self._start_in_cluster()
        self._register_metrics_of_parts()
        if broker.image.tables:
            await (await broker.tables.load()).prepare()
        assert self._listener is not None
        await self._listener.start_serving()
        self.directory.note_owner(str(self.address))
        self._tasks = [
            loop.create_task(self.disk.watch()),
            loop.create_task(self.watchdog.beat()),
            loop.create_task(self._scrub()),
        ]
        connections = Chore("connections", _CONNECTION_CHECK_INTERVAL_MS, self._look_after_connections)
        chores = [*broker.chores(), connections]
        if self.membership is not None:
            chores += self.membership.chores()
        self._housekeeping = Housekeeping(chores)
        self._housekeeping.start()

    async def _open_metadata(self) -> Controller:
        """Read the metadata; name the cluster if it is new, and learn this node's number in it."""
        runtime, settings = self.runtime, self.settings
        alone = settings.cluster is None
        if alone:
            self.directory.check_alone()
            self.directory.check_metadata_present()
        self._store = runtime.metadata_store(settings, self.directory.metadata_path, runtime.pools)
        limits = ControlLimits(partitions_per_topic=settings.max_partitions_per_topic)
        self._controller = controller = Controller(self._store, limits=limits)
        await controller.start()
        check_kind(settings, controller.image)
        if not alone:
            # Loaded by nodes of a cluster only.
            from tidemill.server.cluster.joining import check_identity, check_seen

            identity = check_identity(self.directory, controller.image, settings.node_name)
            if identity is not None:
                await check_seen(identity, self._store)
        if controller.image.cluster_id is None:
            await self._name_cluster(controller)
        if not alone:
            number = await controller.submit(AllocateNodeNumber(name=settings.node_name))
            self.settings = replace(settings, node_id=number)
        return controller

    async def _name_cluster(self, controller: Controller) -> None:
        name = new_cluster_id(self.runtime.ids.uuid())
        command = SetClusterId(cluster_id=name)
        if self.settings.cluster is not None:
            secret = self.runtime.ids.token(_SECRET_BYTES)
            command = SetClusterId(cluster_id=name, replicated=True, secret=secret)
        try:
            await controller.submit(command)
        except ApiError as error:
            # Another node was first, and its name counts.
            if error.code is not ErrorCode.inconsistent_cluster_id:
                raise

    async def _start_alone(self) -> None:
        """Register as the only node, recover, and load the coordinators."""
        broker, settings = self.broker, self.settings
        register = RegisterNode(
            node_id=settings.node_id,
            name=settings.node_name,
            host=broker.advertised.host,
            port=broker.advertised.port,
            incarnation=self.runtime.ids.uuid(),
        )
        await self._commit_or_defer([register])
        self._finish_deletions()
        broker.replicas.take_inventory(broker.find.led_placements())
        if not self.directory.stopped_cleanly:
            await self._recover()
        await broker.coordinators.start(settle_ms=_DECISIONS_WAIT_MS)
        if not self.unknown_directories:
            await self._forget_missing_topics()

    async def _start_in_cluster(self) -> None:
        """Check the logs, join, and load the coordinators of what this node leads then."""
        # Loaded by nodes of a cluster only.
        from tidemill.server.cluster.joining import identify
        from tidemill.server.cluster.membership import Membership
        from tidemill.server.cluster.successions import ask_to_resign

        broker, runtime = self.broker, self.runtime
        identity = identify(self.directory, broker.image, self.settings.node_name, runtime.ids.uuid)
        assert self._store is not None
        self.membership = membership = Membership(
            broker, self._store, runtime, self.directory, identity, self._on_lease
        )
        broker.propose = membership.proposals.propose
        broker.replica_ends = membership.replica_ends.of
        broker.ask_to_resign = partial(ask_to_resign, membership.peers)
        broker.clocks_ahead_ms = membership.peers.clocks_ahead_ms
        broker.ask_node = membership.node_requests.ask
        broker.append_at = membership.node_requests.append
        broker.newest = membership.newest
        await membership.listen()
        await asyncio.to_thread(broker.replicas.finish_removals)
        self._finish_deletions()
        held = list(broker.find.held_placements())
        broker.replicas.take_inventory(held)
        if not self.directory.stopped_cleanly:
            logger.info("the last stop was not orderly: checking %d partitions", len(held))
        await asyncio.to_thread(self._open_all, held)
        await broker.coordinators.start()
        await membership.join()

    async def _open_listener(self, loop: asyncio.AbstractEventLoop, budget: ByteBudget) -> None:
        """Bind the port, so that a port in use is found before anything is changed; serving starts later."""
        self._dispatcher = dispatcher = BrokerDispatcher(
            self.broker, self.traffic, self.watchdog, self.authorizer
        )
        listen = self.settings.listen
        buffers = FrameBuffers()
        try:
            self._listener = await self.runtime.transport.listen(
                listen, lambda: Connection(loop, dispatcher, budget, self.settings, buffers), _LISTEN_BACKLOG
            )
        except OSError as error:
            raise cannot_listen("listen", listen, error, "--listen") from error
        self.address = self._listener.address

    def _finish_deletions(self) -> None:
        known = [topic.id for topic in self.broker.image.topics.values()]
        interrupted, self.unknown_directories = self.broker.replicas.leftovers(known)
        for topic, topic_id in interrupted:
            self.broker.removal.remove_topic(topic, topic_id)
        for directory in self.unknown_directories:
            logger.warning("%s belongs to no known topic; it is left alone, see 'tidemill doctor'", directory)

    async def _recover(self) -> None:
        """After a crash: a new leader epoch for every partition, every log read from its recovery point."""
        broker = self.broker
        written: dict[str, set[int]] = {}
        for placement in broker.find.led_placements():
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
            for placement in broker.find.led_placements()
            if placement.index in written.get(placement.topic, ())
        ]
        logger.info("the last stop was not orderly: checking %d partitions", len(placements))
        # In a thread, because reading large logs takes long, and /healthz is asked meanwhile.
        await asyncio.to_thread(self._open_all, placements)

    async def _commit_or_defer(self, commands: Sequence[Command[Any]]) -> None:
        """Commit commands of the start; without disk space, commit them later, and refuse appends until then.

        Reads go on with the metadata as it was. A write under the old leader epoch could not be told apart
        from one that the crash has lost.
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
            self.broker.replicas.hold_appends(
                DiskFull("the disk is full; writes are taken again when there is room")
            )
            self.disk.when_space(self._commit_deferred)

    async def _commit_deferred(self) -> None:
        deferred, self._deferred = self._deferred, []
        try:
            await self._commit_or_defer(deferred)
        except BaseException:
            # All of them again: one more new epoch does no harm, but going on without one would.
            self._deferred = deferred
            raise
        if self._deferred:
            raise DiskFull("no room for the metadata of the start")
        self.broker.replicas.hold_appends(None)

    def _open_all(self, placements: list[Placement]) -> None:
        for placement in placements:
            # A partition that is damaged is noted and logged: the others go on.
            with contextlib.suppress(StorageError):
                self.broker.replicas.open(placement)

    async def _forget_missing_topics(self) -> None:
        try:
            await self.broker.coordinators.forget_missing_topics()
        except TidemillError as error:
            logger.warning("what is kept about topics that are gone stays for now: %s", error.message)

    async def _look_after_connections(self) -> None:
        assert self._dispatcher is not None
        self._dispatcher.tick()
        await self._dispatcher.leave_to_others()

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
        if self.membership is not None:
            # While it still serves: clients find the new leaders before the old one is gone.
            await self.membership.resign_all()
        await self._housekeeping.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        assert self._listener is not None
        assert self._dispatcher is not None
        self._listener.close()
        self.broker.sharing.stop()
        await self.broker.coordinators.close()
        await self._dispatcher.close()
        if self.membership is not None:
            await self.membership.stop_replication()
        all_well = not any(self._stopped_partitions())
        all_well = await self.broker.close() and all_well
        if self.membership is not None:
            await self.membership.leave(clean=all_well)
        elif all_well:
            self.directory.note_clean_stop()
        await self._close_metadata()
        self.directory.release()

    async def _close_metadata(self) -> None:
        if self._controller is not None:
            await self._controller.stop()
        if self._store is not None:
            await self._store.close()

    async def _abandon(self) -> None:
        """Undo a start that failed half-way."""
        await self._housekeeping.stop()
        for task in self._tasks:
            task.cancel()
        if self._listener is not None:
            self._listener.close()
        orderly = True
        if self._broker is not None:
            self._broker.sharing.stop()
            await self._broker.coordinators.close()
            if self.membership is not None:
                await self.membership.stop_replication()
            orderly = await self._broker.close()
        orderly = orderly and self.directory.stopped_cleanly
        if self.membership is not None:
            await self.membership.leave(clean=orderly)
        elif orderly:
            self.directory.note_clean_stop()
        await self._close_metadata()
        self.directory.release()

    # --- what it tells of itself

    @property
    def takes_requests(self) -> bool:
        """Whether to send requests here: not while it starts, stops, is not admitted, or catches up at first.

        A node of a cluster serves what it leads meanwhile. An operator who restarts nodes one after the other
        waits for this, so that no partition is left with too few replicas.
        """
        if not self.ready or self.membership is None:
            return self.ready
        image, node_id = self.broker.image, self.broker.node_id
        return image.live(node_id) and not self.membership.watch.is_catching_up()

    def problems(self) -> list[str]:
        """The node's problems, for people; none if it is well."""
        return [problem.text for problem in self.kinds_of_problems()]

    def kinds_of_problems(self) -> list[Problem]:
        """The node's problems, each with its kind."""
        cluster = [] if self.membership is None else self.membership.problems()
        of_cluster = [Problem(ProblemKind.CLUSTER, text) for text in cluster]
        if not self.ready:
            # A node that waits for its admission says so.
            return [Problem(ProblemKind.STARTING, "the node is starting or stopping"), *of_cluster]
        return [*(Problem(kind, text) for kind, text in self._own_problems()), *of_cluster]

    def _own_problems(self) -> Iterator[tuple[ProblemKind, str]]:
        """What is wrong with the files and the memory of this node, whatever other nodes are like."""
        if (full := self.disk.problem()) is not None:
            yield ProblemKind.DISK_FULL, full
        if (refusal := self.broker.open_files.problem()) is not None:
            yield ProblemKind.OPEN_FILES, refusal
        for stopped in self._stopped_partitions():
            yield ProblemKind.STOPPED, stopped
        for damage in self._damage():
            yield ProblemKind.DAMAGE, damage
        if self.unknown_directories:
            yield (
                ProblemKind.UNKNOWN_DIRECTORIES,
                f"{len(self.unknown_directories)} directories belong to no known topic, the first one is "
                f"{self.unknown_directories[0]}: the metadata is older than the logs, or somebody has put "
                "them there; restore metadata.db, or move them away",
            )
        for (topic_id, index), error in self.broker.compactor.counts.damaged.items():
            yield ProblemKind.DAMAGE, f"partition {index} of topic {topic_id} is not compacted: {error}"
        if self.broker.tables.loaded is not None:
            for state in self.broker.tables.loaded.service.problems():
                yield ProblemKind.TABLE_STATE, state
        # In a cluster the membership reports problems of the metadata.
        if self.membership is None and self.broker.controller.failure is not None:
            yield ProblemKind.METADATA, f"metadata: {self.broker.controller.failure}"

    def _damage(self) -> Iterator[str]:
        """The known damage in partitions that are not stopped."""
        coordinators = self.broker.coordinators.damaged()
        stopped = {(each.topic, each.index) for each, _ in self.broker.replicas.offline.values()}
        for (topic, index), damage in coordinators.items():
            if (topic, index) not in stopped:
                yield f"{topic}-{index} is damaged, and what is kept in it is not served: {damage}"
        for each in self.broker.replicas.damage:
            if (each.topic, each.index) not in coordinators:
                yield str(each)

    def _stopped_partitions(self) -> Iterator[str]:
        """The partitions that are out of service, and why."""
        for topic, index, error in self.broker.replicas.stopped():
            yield f"{topic}-{index} is stopped: {error}"

    def metrics_page(self) -> AsyncIterator[str]:
        """The page of metrics in parts, made in short turns of the loop and in a thread."""
        return render(self.metrics)

    def _own_metrics(self) -> Metrics:
        """A registry with the metrics that exist also before the parts are made, and when they are gone."""
        metrics = Metrics()
        metrics.register(self.traffic, TRAFFIC_METRICS)
        metrics.register(self.watchdog, WATCHDOG_METRICS)
        metrics.register(self, NODE_METRICS)
        metrics.register_measured(measure_process, PROCESS_METRICS)
        metrics.register_measured(self.disk.measure, DISK_METRICS)
        return metrics

    def _register_metrics_of_parts(self) -> None:
        broker, metrics = self.broker, self.broker.metrics
        assert self._dispatcher is not None
        metrics.register(self, PROBLEM_METRICS)
        metrics.register(self._dispatcher, CONNECTION_METRICS)
        metrics.register(broker.budget, BUDGET_METRICS)
        metrics.register(broker.controller, CONTROLLER_METRICS)
        metrics.register(broker.replicas, REPLICA_METRICS)
        metrics.register(broker.replicas.damage, DAMAGE_METRICS)
        metrics.register(broker.flusher, FLUSH_METRICS)
        metrics.register(broker.compactor.counts, COMPACTION_METRICS)
        metrics.register(broker.scrubber, SCRUB_METRICS)
        metrics.register(broker.fetch_sessions, FETCH_SESSION_METRICS)
        broker.coordinators.register_metrics(metrics)
        if self.membership is not None:
            # Loaded by nodes of a cluster only.
            from tidemill.server.cluster.metrics import CLUSTER_METRICS

            metrics.register(self.membership, CLUSTER_METRICS)
        lag = ConsumerLag(broker, self.settings.lag_series_max)
        metrics.register_measured(lag.measure, LAG_METRICS)
        share_lag = ShareLag(broker, self.settings.lag_series_max)
        metrics.register_measured(share_lag.measure, SHARE_LAG_METRICS)
        cursor_lag = CursorLag(broker, self.settings.lag_series_max)
        metrics.register_measured(cursor_lag.measure, CURSOR_METRICS)
        metrics.register(broker.cursor_floors, CURSOR_RETENTION_METRICS)

    @property
    def up_seconds(self) -> float:
        """Seconds since the parts were made; 0 before."""
        return 0 if self._broker is None else (self._broker.steady_ms() - self._started_ms) / 1000


NODE_METRICS: Final[Sequence[Metric[Node]]] = (
    gauge("tidemill_ready", "Whether requests are taken.", lambda node: node.ready),
    gauge("tidemill_up_seconds", "Seconds since the start.", lambda node: node.up_seconds),
)
PROBLEM_METRICS: Final[Sequence[Metric[Node]]] = (
    gauge("tidemill_problems", "Problems that /readyz names.", lambda node: len(node.problems())),
)


def _budget_limits(settings: Settings) -> BudgetLimits:
    return BudgetLimits(
        settings.max_inflight_bytes,
        settings.max_frame_bytes,
        stall_seconds=settings.stall_timeout_ms / 1000,
        frame_seconds=settings.frame_deadline_ms / 1000,
        answer_seconds=settings.idle_timeout_ms / 1000,
    )


def _is_of_deleted_topic(failure: TidemillError) -> bool:
    """Whether an error only says that a topic is gone: it may be deleted while work waits for disk space."""
    return failure.code is ErrorCode.unknown_topic_or_partition


def raise_open_files_limit() -> None:
    """Raise the limit of open files as far as the system allows: every segment in use is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
