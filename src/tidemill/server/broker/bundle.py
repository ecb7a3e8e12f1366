"""The parts of a node in one object, which every handler gets."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tidemill.control.image import INTERNAL_TOPICS
from tidemill.coordination.metrics import Metrics
from tidemill.coordination.moments import MomentGate
from tidemill.errors import NodeUnavailable
from tidemill.replication.compactor import Compactor
from tidemill.replication.flusher import Flusher
from tidemill.replication.scrubber import Scrubber
from tidemill.server.broker.catalogue import TopicCatalogue
from tidemill.server.broker.fetch_sessions import FetchSessions
from tidemill.server.broker.finding import PartitionFinder
from tidemill.server.broker.gated_writes import GatedWrites
from tidemill.server.broker.housekeeping import Chore
from tidemill.server.broker.log_cleanup import LogCleanup
from tidemill.server.broker.producer_ids import ProducerIds
from tidemill.server.broker.removal import FileRemoval
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.coordinators.registry import CoordinatorRow, Coordinators
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.server.disk.open_files import OpenFiles
from tidemill.server.disk.space import DiskSpace
from tidemill.server.tables.lazy_tables import LazyTables

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from tidemill.config.settings import Settings
    from tidemill.control.commands import Command
    from tidemill.control.controller import Controller
    from tidemill.control.image import MetadataImage, TopicImage
    from tidemill.errors import DiskFull
    from tidemill.groups.coordinator import GroupCoordinator
    from tidemill.replication.partition import Partition
    from tidemill.replication.replicas import Placement, Replicas
    from tidemill.server.cluster.replica_ends import Ends
    from tidemill.server.connections.budget import ByteBudget
    from tidemill.server.runtime import Runtime
    from tidemill.transactions.coordinator import TransactionCoordinator

__all__ = ("COORDINATORS", "Broker")

#: The rows of all coordinators of a node. A coordinator may use those of rows before its own.
COORDINATORS: tuple[CoordinatorRow[Any], ...] = (GROUPS, TRANSACTIONS)
_WORKER_THREADS = 2
_FILE_THREADS = 8
#: How many files a partition has open: its checkpoint, its last segment, and one that is read.
_FILES_PER_PARTITION = 3


async def _no_ends(topic: TopicImage, indexes: Sequence[int]) -> Mapping[int, Ends]:
    """The ends that a node which is alone asks for: nobody else has a replica."""
    return {}


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
        self.log_cleanup = LogCleanup(
            self.find, replicas, self.removal, self.compactor, self.disk, self.clock_ms
        )
        self.scrubber = self._make_scrubber()
        self.producer_ids = ProducerIds(controller)
        self.tables = LazyTables(self, runtime.kv_engine)
        self.coordinators = Coordinators(self)
        for row in COORDINATORS:
            self.coordinators.add(row)
        self.groups: GroupCoordinator = self.coordinators.of(GROUPS)
        self.transactions: TransactionCoordinator = self.coordinators.of(TRANSACTIONS)
        self.catalogue = TopicCatalogue(
            settings, controller, replicas, self.removal, self.ids, self.disk, self.coordinators
        )
        #: Has the controller commit a command; on a node that is alone, that is this node.
        self.propose: Callable[[Command[Any]], Awaitable[Any]] = controller.submit
        #: Asks live nodes how far their replicas of a topic's partitions reach: by partition, by node.
        self.replica_ends: Callable[[TopicImage, Sequence[int]], Awaitable[Mapping[int, Ends]]] = _no_ends
        #: The node's problems in words, and how far the clocks of other nodes are ahead of this one's.
        self.problems: Callable[[], list[str]] = list
        self.clocks_ahead_ms: Callable[[], Mapping[int, int]] = dict
        #: Sends another node a request of Kafka's protocol that only nodes send: node, API, version, body.
        self.ask_node: Callable[[int, str, int, Mapping[str, Any]], Awaitable[Any]] = _ask_nobody
        #: Whether answers may say what is newest in a partition that this node leads; alone, it always may.
        self.may_answer_newest: Callable[[Partition], bool] = lambda partition: True
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

    @property
    def image(self) -> MetadataImage:
        return self.controller.image

    @property
    def node_id(self) -> int:
        return self.settings.node_id

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
            Chore("compaction", settings.compaction_check_interval_ms, self.log_cleanup.compact),
            Chore("the upkeep of tables", settings.kv_check_interval_ms, self.tables.housekeep),
            *self.coordinators.chores(),
        ]

    async def close(self) -> bool:
        """Stop in an orderly way: everything flushed and noted. False if some partition could not be."""
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
