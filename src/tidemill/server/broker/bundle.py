"""The parts of a node in one object, which every handler gets."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tidemill.config.group_keys import GroupConfig
from tidemill.control.image import INTERNAL_TOPICS
from tidemill.coordination.metrics import Metrics
from tidemill.coordination.moments import MomentGate
from tidemill.errors import NodeUnavailable
from tidemill.replication.log_work.compactor import Compactor
from tidemill.replication.log_work.flusher import Flusher
from tidemill.replication.log_work.scrubber import Scrubber
from tidemill.replication.rules.newest import Alone, NewestAnswers
from tidemill.server.broker.catalogue import TopicCatalogue
from tidemill.server.broker.cursor_floors import CursorFloors
from tidemill.server.broker.fetch_sessions import FetchSessions
from tidemill.server.broker.finding import PartitionFinder
from tidemill.server.broker.gated_writes import GatedWrites
from tidemill.server.broker.housekeeping import Chore
from tidemill.server.broker.log_cleanup import LogCleanup
from tidemill.server.broker.producer_ids import ProducerIds
from tidemill.server.broker.removal import FileRemoval
from tidemill.server.coordinators.cursors import CURSORS
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.coordinators.registry import CoordinatorRow, Coordinators
from tidemill.server.coordinators.share_state import SHARE_STATE
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.server.disk.open_files import OpenFiles
from tidemill.server.disk.space import DiskSpace
from tidemill.server.share.lazy_share import LazyShare
from tidemill.server.tables.lazy_tables import LazyTables
from tidemill.share.letters import REDRIVE_PREFIX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from tidemill.cluster.messages import PartitionId
    from tidemill.config.settings import Settings
    from tidemill.control.commands import Command
    from tidemill.control.controller import Controller
    from tidemill.control.image import MetadataImage, TopicImage
    from tidemill.cursors.coordinator import CursorCoordinator
    from tidemill.errors import DiskFull
    from tidemill.groups.coordinator import GroupCoordinator
    from tidemill.replication.replicas import Placement, Replicas
    from tidemill.server.cluster.replica_ends import Ends
    from tidemill.server.connections.budget import ByteBudget
    from tidemill.server.coordinators.persister import NodePersister
    from tidemill.server.runtime import Runtime
    from tidemill.server.share.service import ShareService
    from tidemill.share.state.coordinator import ShareStateCoordinator
    from tidemill.transactions.coordinator import TransactionCoordinator

__all__ = ("COORDINATORS", "Broker")

#: The rows of all coordinators of a node. A coordinator may use those of rows before its own.
COORDINATORS: tuple[CoordinatorRow[Any], ...] = (GROUPS, SHARE_STATE, TRANSACTIONS, CURSORS)
_WORKER_THREADS = 2
#: As often as a delivery can be counted.
_REDRIVE_DELIVERIES = 2**15 - 1
#: A redrive holds what it does not choose until its end. The state machine bounds what that costs.
_REDRIVE_LOCKS = 2**31 - 1
_REDRIVE_LOCK_MS = 60 * 60 * 1_000
_DUE_LETTERS_INTERVAL_MS = 5_000
_FILE_THREADS = 8
#: How many files a partition has open: its checkpoint, its last segment, and one that is read.
_FILES_PER_PARTITION = 3


async def _no_ends(topic: TopicImage, indexes: Sequence[int]) -> Mapping[int, Ends]:
    """No ends: a node that is alone has no others to ask for theirs."""
    return {}


async def _no_leaders(topic: TopicImage, indexes: Sequence[int]) -> None:
    """No leaders: a node that is alone has no others to ask to resign."""


async def _append_at_nobody(
    node_id: int, where: PartitionId, leader_epoch: int, batch: bytes, transactional_id: str
) -> int:
    raise NodeUnavailable(f"node {node_id} cannot be asked to append: this node is not part of a cluster")


async def _ask_nobody(node_id: int, api: str, version: int, body: Mapping[str, Any]) -> Any:
    raise NodeUnavailable(f"node {node_id} cannot be asked for {api}: this node is not part of a cluster")


class Broker:
    """The working parts of one node, without its sockets."""

    def __init__(
        self,
        settings: Settings,
        controller: Controller,
        replicas: Replicas,
        flusher: Flusher,
        budget: ByteBudget,
        runtime: Runtime,
        *,
        disk: DiskSpace | None = None,
        metrics: Metrics | None = None,
    ) -> None:
        self.settings = settings
        self.controller = controller
        self.replicas = replicas
        self.flusher = flusher
        self.budget = budget
        #: Where parts that are loaded later register their metrics.
        self.metrics = Metrics() if metrics is None else metrics
        self.disk = disk or DiskSpace(settings.data_dir)
        #: The time of day, for timestamps. It jumps when somebody sets the clock.
        self.clock_ms = runtime.wall_ms
        #: The clock for intervals, deadlines and timers: it starts at the time of day and never jumps.
        self.clock = runtime.steady_clock(self.clock_ms)
        self.steady_ms = self.clock.now_ms
        self.ids = runtime.ids
        self.pools = runtime.pools
        self.pace = runtime.pace
        #: Where clients find this node; known once it listens.
        self.advertised = settings.listen
        self.fetch_sessions = FetchSessions(
            settings.max_fetch_sessions, int.from_bytes(self.ids.token(8), "big")
        )
        #: Held while several partitions change together, and while somebody takes a moment of several.
        self.moments = MomentGate()
        #: The last transactional write of each producer that waits for the coordinator.
        self.transactional_writes: dict[int, asyncio.Task[None]] = {}
        self.gated_writes = GatedWrites()
        #: Threads for what would hold the event loop: looking at large batches, searching by time. Few, since
        #: each may unpack ``max_decompressed_bytes``.
        self.workers = self.pools("work", _WORKER_THREADS)

        #: Threads for the first files of partitions, which wait for the disk.
        self._file_pool = self.pools("create", _FILE_THREADS)

        self.find = PartitionFinder(settings, controller, replicas, self._file_pool)
        self.compactor = self._make_compactor()
        self.removal = FileRemoval(replicas, self.compactor, self.pools("delete", 1))
        self.cursor_floors = CursorFloors(self)
        self.log_cleanup = LogCleanup(
            self.find, replicas, self.removal, self.compactor, self.disk, self.clock_ms, self.cursor_floors
        )
        self.scrubber = self._make_scrubber()
        self.producer_ids = ProducerIds(controller)
        self._default_group_config = GroupConfig.from_overrides({}, settings)
        #: Letters that a redrive does not choose are given back, any number of times and all at once.
        self._redrive_group_config = replace(
            self._default_group_config,
            share_auto_offset_reset="earliest",
            share_isolation_level="read_committed",
            share_delivery_count_limit=_REDRIVE_DELIVERIES,
            share_partition_max_record_locks=_REDRIVE_LOCKS,
            share_record_lock_duration_ms=_REDRIVE_LOCK_MS,
        )
        #: What ``group_config`` has worked out, by the stored overrides that it was made of.
        self._group_configs: dict[str, tuple[Mapping[str, str], GroupConfig]] = {}
        self.tables = LazyTables(self, runtime.kv_engine)
        self.coordinators = Coordinators(self)
        for row in COORDINATORS:
            self.coordinators.add(row)
        self.sharing = LazyShare(self)
        self.catalogue = TopicCatalogue(
            settings, controller, replicas, self.removal, self.ids, self.disk, self.coordinators
        )
        #: Has the controller commit a command; on a node that is alone, that is this node.
        self.propose: Callable[[Command[Any]], Awaitable[Any]] = controller.submit
        #: Asks live nodes how far their replicas of a topic's partitions reach: by partition, by node.
        self.replica_ends: Callable[[TopicImage, Sequence[int]], Awaitable[Mapping[int, Ends]]] = _no_ends
        #: Asks the leaders of partitions of a topic to resign in favour of their successors.
        self.ask_to_resign: Callable[[TopicImage, Sequence[int]], Awaitable[None]] = _no_leaders
        #: The node's problems in words, and how far the clocks of other nodes are ahead of this one's.
        self.problems: Callable[[], list[str]] = list
        self.clocks_ahead_ms: Callable[[], Mapping[int, int]] = dict
        #: Sends another node a request of Kafka's protocol that only nodes send: node, API, version, body.
        self.ask_node: Callable[[int, str, int, Mapping[str, Any]], Awaitable[Any]] = _ask_nobody
        #: Has another node, which leads a partition, append a transactional batch with acks=all: node,
        #: partition, leader epoch, batch, transactional id; gives the batch's offset.
        self.append_at: Callable[[int, PartitionId, int, bytes, str], Awaitable[int]] = _append_at_nobody
        #: Whether answers may say what is newest in a partition that this node leads; alone, it always may.
        self.newest: NewestAnswers = Alone()
        # Last: a full disk may be noticed in any thread, and stops what is made above.
        self.give_up_reserve = self.disk.give_up_reserve
        self.open_files = OpenFiles()
        replicas.check_open = self._check_open
        controller.give_up_reserve = replicas.give_up_reserve = self.give_up_reserve
        self.disk.on_growth_refused = self._refuse_growth

    def _make_compactor(self) -> Compactor:
        settings = self.settings
        return Compactor(
            self.replicas.storage,
            self.pools("compact", 1),
            map_bytes=settings.compaction_map_bytes,
            bytes_per_second=settings.compaction_bytes_per_second,
            max_decompressed_bytes=settings.max_decompressed_bytes,
            clock_ms=self.clock_ms,
            pace=self.pace,
        )

    def _make_scrubber(self) -> Scrubber:
        return Scrubber(
            self.replicas,
            self.find.held_placements,
            self.find.kept_placement,
            self.pools("scrub", 1),
            bytes_per_second=self.settings.scrub_bytes_per_second,
            interval_ms=self.settings.scrub_interval_ms,
            clock_ms=self.clock_ms,
            steady_ms=self.steady_ms,
            pace=self.pace,
        )

    # --- parts that are loaded and made at their first use

    @property
    def groups(self) -> GroupCoordinator:
        return self.coordinators.of(GROUPS)

    @property
    def share_states(self) -> ShareStateCoordinator:
        return self.coordinators.of(SHARE_STATE)

    @property
    def transactions(self) -> TransactionCoordinator:
        return self.coordinators.of(TRANSACTIONS)

    @property
    def cursors(self) -> CursorCoordinator:
        return self.coordinators.of(CURSORS)

    @property
    def share(self) -> ShareService:
        """The share partitions that this node leads."""
        return self.sharing.get().service

    @property
    def persister(self) -> NodePersister:
        """Where the state of share partitions is kept."""
        return self.sharing.get().persister

    # --- what they all ask for

    @property
    def image(self) -> MetadataImage:
        return self.controller.image

    @property
    def node_id(self) -> int:
        return self.settings.node_id

    def group_config(self, group_id: str) -> GroupConfig:
        """The configs of a group, as they are now."""
        if group_id.startswith(REDRIVE_PREFIX):
            return self._redrive_group_config
        overrides = self.image.group_configs.get(group_id)
        if overrides is None:
            self._group_configs.pop(group_id, None)
            return self._default_group_config
        known = self._group_configs.get(group_id)
        if known is None or known[0] is not overrides:
            known = overrides, GroupConfig.from_overrides(overrides, self.settings)
            self._group_configs[group_id] = known
        return known[1]

    def _refuse_growth(self, refusal: DiskFull | None) -> None:
        """Refuse whatever makes the data grow, until this is called with None. Any thread may call it.

        Not the little that members of groups write when they come and go: without it nobody could read with
        a group. Commits of offsets to the same topic are refused by their handlers.
        """
        self.replicas.refuse_appends(refusal, but={GROUPS.topic})
        self.controller.growth_refusal = refusal
        self.tables.pause_compactions(refusal is not None)

    def _check_open(self, placement: Placement) -> None:
        self.open_files.check(_FILES_PER_PARTITION, internal=placement.topic in INTERNAL_TOPICS)

    def check_open_files(self, count: int) -> None:
        """Raise ``TooManyFiles`` if so many more files must not be opened now."""
        self.open_files.check(count)

    def chores(self) -> list[Chore]:
        """The chores of the housekeeping."""
        settings = self.settings
        return [
            Chore("retention", settings.log_retention_check_interval_ms, self.log_cleanup.apply_retention),
            Chore("share groups", settings.log_retention_check_interval_ms, self.sharing.check_log_starts),
            Chore("dead letters that are due", _DUE_LETTERS_INTERVAL_MS, self.sharing.look_after_due_letters),
            Chore("compaction", settings.compaction_check_interval_ms, self.log_cleanup.compact),
            Chore("the upkeep of tables", settings.kv_check_interval_ms, self.tables.housekeep),
            *self.coordinators.chores(),
        ]

    async def close(self) -> bool:
        """Stop in an orderly way: everything flushed and noted. False if some partition could not be."""
        await self.sharing.close()
        # First, because their batches go into the logs, which must be open for that.
        await self.gated_writes.finish()
        for pool in (self.workers, self._file_pool):
            pool.shutdown(wait=False, cancel_futures=True)
        await self.tables.close()
        self.compactor.close()
        self.scrubber.close()
        await self.flusher.drain(list(self.replicas))
        self.removal.close()
        self.flusher.close()
        return self.replicas.close()
