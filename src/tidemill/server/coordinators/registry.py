"""The registry of coordinators: one row each, and everything that a node does with all of them.

A row says which internal topic a coordinator keeps its state in, which FindCoordinator keys it answers for,
how its logs are written, and how it is made. FindCoordinator, the creation of internal topics, loading at
start, expiry, changes of leadership, metrics and the orderly stop walk the rows; none of them names a
coordinator.

A coordinator is made, and its code loaded, when its topic is there or somebody asks for it: a node on which
nobody uses it goes without. So a row imports what it needs in ``make``, and names those modules: a caller
that can wait has them loaded in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from tidemill.coordination.coordinator import Coordinator
from tidemill.coordination.loading import load_in_thread
from tidemill.coordination.metrics import Metric, Metrics, gauges
from tidemill.coordination.shards import ShardCounts
from tidemill.errors import ApiError, DiskFull, ErrorCode, TidemillError
from tidemill.replication.coordinator_log import PartitionCoordinatorLog
from tidemill.replication.rules.assignment import NO_LEADER
from tidemill.server.broker.housekeeping import Chore

if TYPE_CHECKING:
    from tidemill.config.settings import Settings
    from tidemill.control.image import MetadataDelta, MetadataImage, TopicImage
    from tidemill.coordination.log import LogAccess
    from tidemill.errors import CorruptData
    from tidemill.server.broker.bundle import Broker
    from tidemill.server.requests.authorization import ResourceType

__all__ = ("COORDINATOR_METRICS", "CoordinatorRow", "Coordinators", "InternalTopic")

logger = logging.getLogger(__name__)

_TRACES_RETRY_S: Final = 1.0
_NO_SHARDS: Final = ShardCounts(0, 0, 0)

C = TypeVar("C", bound=Coordinator[Any])


@dataclass(frozen=True, slots=True)
class CoordinatorRow(Generic[C]):
    """The declaration of one coordinator.

    Attributes:
        name: what it coordinates, as people, logs and metrics say it: "groups".
        topic: the internal topic that its state is kept in; ``control/image.py`` has those that are internal.
        key_type: FindCoordinator's number for its keys.
        resource: the kind of resource that its keys name, which permissions are for.
        partitions: how many partitions the topic is created with. Once it exists, the image says so.
        make: the coordinator over the logs of its topic. It imports the coordinator's code.
        modules: what ``make`` imports that takes long.
        expire_interval_ms: how often what is past its retention is looked for.
        compress_above_bytes: larger batches of its records are compressed; None: never.
        metrics: what is read off it beside what all coordinators have.
        topic_configs: configs of its topic beside those of all internal topics.
        resource_of: the name of the resource that a key of FindCoordinator stands for; raises ``ApiError``.
    """

    name: str
    topic: str
    key_type: int
    resource: ResourceType
    partitions: Callable[[Settings], int]
    make: Callable[[Broker, LogAccess], C]
    expire_interval_ms: int
    modules: Sequence[str] = ()
    compress_above_bytes: int | None = None
    metrics: Sequence[Metric[C]] = ()
    topic_configs: Mapping[str, str] = field(default_factory=dict)
    resource_of: Callable[[str], str] = str


class InternalTopic:
    """The internal topic of a coordinator; implements ``LogAccess``."""

    def __init__(self, broker: Broker, row: CoordinatorRow[Any]) -> None:
        self._broker = broker
        self._row = row

    @property
    def image(self) -> TopicImage | None:
        """The topic, if it exists by now."""
        return self._broker.image.topics.get(self._row.topic)

    def partition_count(self) -> int:
        """The number of partitions in the image; before the topic exists, what it would be created with."""
        topic = self.image
        return self._row.partitions(self._broker.settings) if topic is None else len(topic.partitions)

    def leads(self, partition: int) -> bool:
        topic = self.image
        return (
            topic is not None
            and partition < len(topic.partitions)
            and self._broker.find.leader_of(topic, partition)[0] == self._broker.node_id
        )

    async def ensure(self) -> None:
        """Create the topic if it does not exist. Raises ``TidemillError``."""
        await self._broker.catalogue.ensure_internal_topic(
            self._row.topic, self.partition_count(), self._row.topic_configs
        )

    def open_log(self, partition: int) -> PartitionCoordinatorLog:
        """The log behind one shard. Raises NOT_COORDINATOR if this node does not lead it."""
        find = self._broker.find
        try:
            leader = find.partition(find.topic(self._row.topic), partition)
        except ApiError as error:
            raise ApiError(ErrorCode.not_coordinator, error.message) from error
        return PartitionCoordinatorLog(
            leader,
            self._broker.clock_ms,
            compress_above_bytes=self._row.compress_above_bytes,
            give_up_reserve=self._broker.disk.give_up_reserve,
            discard=self._broker.removal.discard,
            newest=self._broker.newest,
        )

    async def prepare_append(self, partition: int) -> None:
        with contextlib.suppress(TidemillError):
            await self._broker.find.partition_with_files(self._row.topic, partition)


@dataclass(slots=True)
class _Entry:
    row: CoordinatorRow[Any]
    topic: InternalTopic
    coordinator: Coordinator[Any] | None = None
    """None: not made yet."""
    loading: asyncio.Task[None] | None = None
    """While its code is being loaded."""

    async def expire(self) -> None:
        if self.coordinator is not None:
            await self.coordinator.expire()


class Coordinators:
    """The coordinators of a node, in the order of their rows.

    A coordinator may use those of rows above its own; they are closed in the reverse order.
    """

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._entries: dict[str, _Entry] = {}
        self._started = False
        self._tasks: dict[asyncio.Task[None], None] = {}
        #: Topics that were deleted, and whose traces in this node's shards are still to be removed.
        self._deleted: set[str] = set()
        self._may_have_traces = asyncio.Event()
        broker.controller.subscribe(self._metadata_changed)

    def add(self, row: CoordinatorRow[Any]) -> None:
        """Add one more row. Its coordinator is made at its first use."""
        if row.topic in self._entries or self.of_key_type(row.key_type) is not None:
            raise ValueError(f"{row.name}: another coordinator has this topic or key type")
        self._entries[row.topic] = _Entry(row, InternalTopic(self._broker, row))

    # --- finding one

    @property
    def rows(self) -> Sequence[CoordinatorRow[Any]]:
        return [entry.row for entry in self._entries.values()]

    def of(self, row: CoordinatorRow[C]) -> C:
        """The coordinator of a row, made now if it was not."""
        entry = self._entries[row.topic]
        if entry.coordinator is None:
            entry.coordinator = row.make(self._broker, entry.topic)
            self._broker.metrics.register(entry.coordinator, row.metrics)
        return cast("C", entry.coordinator)

    async def load(self, row: CoordinatorRow[C]) -> C:
        """The coordinator of a row; its code is loaded in a thread if this is its first use.

        Callers that wait for that go on in the order in which they came: of two requests to initialize a
        producer, the later one must win.
        """
        entry = self._entries[row.topic]
        if entry.coordinator is None:
            loading = entry.loading
            if loading is None:
                loading = entry.loading = asyncio.create_task(load_in_thread(row.modules))
            try:
                await asyncio.shield(loading)
            finally:
                if entry.loading is loading and loading.done():
                    entry.loading = None
        return self.of(row)

    def _made(self) -> list[Coordinator[Any]]:
        """The coordinators that were made, in the order of their rows."""
        return [each.coordinator for each in self._entries.values() if each.coordinator is not None]

    def of_key_type(self, key_type: int) -> CoordinatorRow[Any] | None:
        """The row with this key type of FindCoordinator, if there is one."""
        return next((row for row in self.rows if row.key_type == key_type), None)

    def partition_of(self, row: CoordinatorRow[Any], key: str) -> tuple[str, int]:
        """Topic and partition in which the state of ``key`` is kept."""
        return row.topic, self.of(row).partition_of(key)

    async def leader_of(self, row: CoordinatorRow[Any], key: str) -> int:
        """The node that coordinates ``key`` by the metadata; ``NO_LEADER`` if there is none at the moment."""
        index = (await self.load(row)).partition_of(key)
        topic = self._broker.image.topics.get(row.topic)
        if topic is None or index >= len(topic.partitions):
            return NO_LEADER
        return self._broker.find.leader_of(topic, index)[0]

    # --- their topics

    def has_topic(self, row: CoordinatorRow[Any]) -> bool:
        """Whether the internal topic exists; if not, no key of this coordinator can be known."""
        return row.topic in self._broker.image.topics

    async def ensure_topic(self, row: CoordinatorRow[Any]) -> None:
        """Create the internal topic at its first use. Raises ``TidemillError``."""
        await self.load(row)
        await self._entries[row.topic].topic.ensure()

    async def prepare(self, row: CoordinatorRow[Any]) -> ErrorCode:
        """Make sure that this coordinator can write; returns the error for its client if it cannot."""
        try:
            await self.ensure_topic(row)
        except DiskFull:
            # Clients would retry the usual code silently and for ever; this one reaches the application.
            return ErrorCode.unknown_server_error
        except TidemillError:
            return ErrorCode.coordinator_not_available
        return ErrorCode.none

    # --- their lives

    async def start(self, settle_ms: int = 0) -> None:
        """Load what this node leads, one coordinator after the other.

        Waits up to ``settle_ms`` for decisions that a crash has interrupted.
        """
        for entry in self._entries.values():
            if entry.topic.image is not None:
                await self.of(entry.row).start(settle_ms)
        self._started = True
        if self._broker.image.replicated:
            self._run(self._remove_traces())

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def forget_missing_topics(self) -> None:
        """Forget what is kept about topics that do not exist.

        A crash may have come between the deletion of a topic and that of what was committed for it. Not to
        be called while there are files of topics that nobody knows: then the metadata has lost them.
        Raises ``TidemillError``; the call can be repeated.
        """
        topics = self._broker.image.topics
        for entry in self._entries.values():
            if entry.topic.image is not None:
                await (await self.load(entry.row)).forget_missing_topics(lambda name: name in topics)

    async def on_topics_deleted(self, topics: Sequence[str]) -> None:
        """Forget what is kept about topics that were deleted. Raises ``TidemillError``."""
        for entry in self._entries.values():
            if entry.coordinator is not None or entry.topic.image is not None:
                await (await self.load(entry.row)).on_topics_deleted(topics)

    def chores(self) -> list[Chore]:
        """One chore for each coordinator: its expiry."""
        return [
            Chore(f"the expiry of {each.row.name}", each.row.expire_interval_ms, each.expire)
            for each in self._entries.values()
        ]

    async def close(self) -> None:
        """Answer all callers that wait and stop, in the reverse order of the rows."""
        self._started = False
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for coordinator in reversed(self._made()):
            await coordinator.close()

    def _metadata_changed(self, old: MetadataImage, new: MetadataImage, delta: MetadataDelta) -> None:
        """Load shards that this node leads now. Those that it no longer leads are told by their logs."""
        if not self._started:
            return
        if new.replicated and delta.deleted:
            self._deleted.update(topic.name for topic in delta.deleted)
            self._may_have_traces.set()
        for changed in delta.leader_changed:
            entry = self._entries.get(changed.topic)
            if entry is not None and entry.topic.leads(changed.partition):
                self._run(self._take_over(entry, changed.partition))

    async def _take_over(self, entry: _Entry, partition: int) -> None:
        await (await self.load(entry.row)).take_over(partition)
        # Its last leader may have failed between the deletion of a topic and that of what it kept about it.
        # This node knows every topic that the last leader knew.
        self._may_have_traces.set()

    async def _remove_traces(self) -> None:
        """Forget what this node's shards keep about topics that were deleted, on whatever node."""
        while True:
            await self._may_have_traces.wait()
            self._may_have_traces.clear()
            deleted, self._deleted = self._deleted, set()
            try:
                if deleted:
                    await self.on_topics_deleted(sorted(deleted))
                await self.forget_missing_topics()
            except DiskFull:
                self._broker.disk.when_writable(self.forget_missing_topics)
            except TidemillError as error:
                logger.info("what is kept about deleted topics is removed later: %s", error.message)
                await asyncio.sleep(_TRACES_RETRY_S)
                self._may_have_traces.set()

    # --- what they tell of themselves

    def damaged(self) -> dict[tuple[str, int], CorruptData]:
        """The partitions of internal topics that are not served because their log is damaged."""
        found: dict[tuple[str, int], CorruptData] = {}
        for coordinator in self._made():
            found |= coordinator.damaged()
        return found

    def shard_counts(self) -> dict[str, ShardCounts]:
        """By name of the coordinator, how many of its shards are in which state."""
        return {
            each.row.name: _NO_SHARDS if each.coordinator is None else each.coordinator.shard_counts()
            for each in self._entries.values()
        }

    def register_metrics(self, metrics: Metrics) -> None:
        """Register what all have. What one has beside is registered when it is made."""
        metrics.register(self, COORDINATOR_METRICS)


COORDINATOR_METRICS: Final[Sequence[Metric[Coordinators]]] = (
    gauges(
        "tidemill_coordinator_shards",
        "Partitions of internal topics that this node coordinates, by state.",
        ("coordinator", "state"),
        lambda coordinators: [
            ((name, state), count)
            for name, counts in coordinators.shard_counts().items()
            for state, count in counts._asdict().items()
        ],
    ),
)
