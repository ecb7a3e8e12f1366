"""All tables of a node: definitions from the metadata, buckets opened at their first use, housekeeping.

Leases (``leases.py``) and scans (``scanning/``) build on it. Everything here runs on the event loop; what
takes long runs in threads.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from uuid import UUID

from tidemill.config.settings import Settings
from tidemill.control.controller import Controller
from tidemill.control.image import MetadataDelta, MetadataImage, TopicImage
from tidemill.control.records import PartitionImage
from tidemill.control.tables.images import LeasedSnapshot, TableImage
from tidemill.coordination.ids import Ids
from tidemill.coordination.moments import MomentGate
from tidemill.coordination.pools import Pools
from tidemill.coordination.turns import TurnQueue, give_way
from tidemill.errors import (
    ApiError,
    ErrorCode,
    StorageError,
    TableCode,
    TableError,
    TidemillError,
    without_traceback,
)
from tidemill.kv.contract import KvEngine
from tidemill.kv.files import Files
from tidemill.kv.snapshots import SnapshotInfo, SnapshotStore
from tidemill.records.batch import NO_TIMESTAMP, BatchHeader, check_batch
from tidemill.records.columns.read import read_columns
from tidemill.replication.partition import Partition
from tidemill.replication.replicas import LOGS
from tidemill.replication.rules.epochs import NO_EPOCH
from tidemill.replication.rules.newest import Alone, NewestAnswers
from tidemill.replication.rules.state import Role
from tidemill.tables.definition import PartitionDefinition, TableDefinition
from tidemill.tables.properties import TableProperties
from tidemill.tables.scanning.sessions import BucketKey
from tidemill.tables.state.bucket import Bucket
from tidemill.tables.state.changes import Changes, prepare_checked
from tidemill.tables.state.rebuilding import rebuild
from tidemill.tables.state.snapshot_keeping import SnapshotKeeper, is_snapshot_due

__all__ = ("KV_FOLDER", "CheckedRows", "TableHost", "TableService", "definition_of", "is_standby")

logger = logging.getLogger(__name__)

KV_FOLDER = "kv"
_TOPIC_ID = re.compile(r"[0-9a-f]{32}")
_THREADS = 4
#: Each begins by reading its log, which takes up to a millisecond.
_FOLDS_PER_TURN = 3
#: How many files the engine has open for the state of a bucket, about.
_FILES_PER_BUCKET = 6
#: Less than clients wait for an answer: otherwise they would give up the connection.
_READY_SECONDS = 20.0
#: Columns of records take some 150 bytes for each record while they are made, however small it is. To make a
#: list of a column holds Python's lock.
_BATCH_RECORDS_MAX = 200_000


class LogFinder(Protocol):
    """Finds the partition that is a bucket's log."""

    def partition(self, topic: TopicImage, index: int, leader_epoch: int = NO_EPOCH) -> Partition:
        """The partition, if this node leads it at that epoch. Raises ``ApiError`` or ``StorageError``."""

    def held(self, topic: TopicImage, index: int) -> Partition | None:
        """The partition if it is open on this node, whichever node leads it."""


class TableHost(Protocol):
    """The parts of a node that the service of tables uses."""

    @property
    def settings(self) -> Settings: ...
    @property
    def controller(self) -> Controller: ...
    @property
    def image(self) -> MetadataImage: ...
    @property
    def clock_ms(self) -> Callable[[], int]:
        """The time of day, for timestamps only."""

    @property
    def steady_ms(self) -> Callable[[], int]:
        """Milliseconds for intervals and deadlines, which setting the clock does not change."""

    @property
    def ids(self) -> Ids: ...
    @property
    def pools(self) -> Pools:
        """Makes pools for work that would hold up the event loop."""

    def check_open_files(self, count: int) -> None:
        """Raise ``TooManyFiles`` if so many more files must not be opened now."""

    @property
    def moments(self) -> MomentGate:
        """Gate by which several buckets are read at a moment: no transaction over them is half visible."""

    @property
    def find(self) -> LogFinder: ...
    @property
    def newest(self) -> NewestAnswers:
        """Whether nobody else can have become the leader of a partition that this node leads by its image."""


def is_standby(placed: PartitionImage, node_id: int) -> bool:
    """Whether this node is the one that keeps the state ready: the first in-sync replica after the leader.

    >>> is_standby(PartitionImage(2, 0, (1, 2, 3), (2, 3)), 3)
    True
    """
    behind = (each for each in placed.replicas if each != placed.leader and each in placed.isr)
    return next(behind, None) == node_id


def definition_of(table: TableImage) -> TableDefinition:
    """The definition of a table, from its metadata."""
    return TableDefinition.unpack(
        schemas=table.schemas,
        bucket_map=table.bucket_map,
        name=table.name,
        table_id=table.id,
        primary_key=tuple(table.primary_key),
        buckets=table.buckets,
        row_format=table.row_format,
        key_format=table.key_format,
        partition_column=table.partition_column,
        partitions=tuple(PartitionDefinition(each.id, each.value, each.topic) for each in table.partitions),
        properties=dict(table.properties),
        comment=table.comment,
        created_ms=table.created_ms,
    )


class CheckedRows(NamedTuple):
    """A batch whose rows were checked."""

    header: BatchHeader
    #: None if the table has no primary key.
    changes: Changes | None
    #: Whether the largest timestamp is the one that the header says.
    is_timed: bool


class TableService:
    """All tables of a node. Made when the node meets its first table."""

    def __init__(self, host: TableHost, engine: KvEngine) -> None:
        self._host = host
        settings = host.settings
        self.engine = engine
        self.threads = host.pools("tables", _THREADS)
        #: The one thread that checks batches, and folds them. Both need Python's lock nearly all the time. If
        #: several threads did so, the event loop would wait for all of them whenever it wants the lock.
        self.fold_thread = host.pools("fold", 1)
        #: Definitions by table id, each with the image that it was made from. Threads may use an old one.
        self._definitions: dict[int, tuple[TableImage, TableDefinition]] = {}
        self._buckets: dict[BucketKey, Bucket] = {}
        #: Buckets that another node leads, whose state is kept ready here.
        self._standbys: dict[BucketKey, Bucket] = {}
        #: Buckets that another node leads now, until their files are closed.
        self._resigning: dict[BucketKey, asyncio.Task[None]] = {}
        #: A pin wakes the folds of all buckets of a table at once.
        self._folds = TurnQueue(_FOLDS_PER_TURN)
        self._removals: set[asyncio.Task[None]] = set()
        self._closed = False
        self.keeper = SnapshotKeeper(
            lambda: host.image, self._snapshots, self.threads, settings.kv_snapshots_kept
        )
        #: Called with a bucket whose sessions and pins must end, and the reason.
        self.on_bucket_ends: list[Callable[[BucketKey, str], None]] = []
        self._unsubscribe = host.controller.subscribe(self._metadata_changed)
        self._remove_behind(self._remove_leftovers())

    def pause_compactions(self, paused: bool) -> None:
        """Pause compactions, so that they do not take the last space of a full disk, or resume them."""
        if not self._closed:
            self.engine.compactions_paused = paused
            self.threads.submit(self.engine.tell_stores_of_pause)

    @property
    def host(self) -> TableHost:
        return self._host

    # -- finding things ------------------------------------------------------------------------------------

    def named(self, name: str) -> TableDefinition:
        """The table of that name. Raises ``TableError`` if there is none."""
        table = self._host.image.tables.get(name)
        if table is None:
            raise TableError(
                TableCode.table_not_found,
                f"there is no table {name!r}; 'tidemill table list' shows those that exist",
            )
        return self._definition(table)

    def by_id(self, table_id: int) -> TableDefinition:
        """The table with that id. Raises ``TableError`` if there is none."""
        table = self._host.image.tables_by_id.get(table_id)
        if table is None:
            raise TableError(
                TableCode.table_not_found, f"there is no table with id {table_id}; it may have been dropped"
            )
        return self._definition(table)

    def _definition(self, table: TableImage) -> TableDefinition:
        found = self._definitions.get(table.id)
        if found is None or found[0] is not table:
            found = self._definitions[table.id] = table, definition_of(table)
        return found[1]

    def keyed(self, table_id: int) -> TableDefinition:
        """The table with that id, which must have a primary key."""
        table = self.by_id(table_id)
        if not table.has_primary_key:
            raise TableError(
                TableCode.not_a_primary_key_table,
                f"table {table.name!r} has no primary key, and so no state to read; consume its topic "
                "instead",
            )
        return table

    def led_keys(self, table: TableDefinition) -> Iterator[BucketKey]:
        """The buckets that this node leads, by the metadata."""
        for key in self.bucket_keys(table):
            partition = table.partition(key.partition_id)
            topic = None if partition is None else self._host.image.topics.get(partition.topic)
            if topic is not None and key.bucket < len(topic.partitions) and self._leads(topic, key.bucket):
                yield key

    def bucket_keys(self, table: TableDefinition) -> Iterator[BucketKey]:
        for partition in table.partitions:
            for number in range(table.buckets):
                yield BucketKey(table.table_id, partition.id, number)

    def chosen_keys(self, table: TableDefinition, named: Iterable[BucketKey]) -> list[BucketKey]:
        """The buckets that a request names, each once; all buckets of the table if it names none."""
        return list(dict.fromkeys(named)) or list(self.bucket_keys(table))

    def log(self, key: BucketKey, leader_epoch: int = NO_EPOCH) -> Partition:
        """The log of a bucket that this node leads, at the epoch that a request names if it does.

        Raises ``ApiError`` or ``StorageError``.
        """
        table = self.by_id(key.table_id)
        partition = table.partition(key.partition_id)
        if partition is None:
            raise TableError(
                TableCode.partition_not_found,
                f"table {table.name!r} has no partition with number {key.partition_id}",
            )
        if not 0 <= key.bucket < table.buckets:
            raise TableError(
                TableCode.bucket_not_found,
                f"table {table.name!r} has buckets 0 to {table.buckets - 1}, not {key.bucket}",
            )
        topic = self._host.image.topics.get(partition.topic)
        if topic is None:
            raise ApiError(ErrorCode.unknown_topic_or_partition, f"there is no topic {partition.topic!r}")
        return self._host.find.partition(topic, key.bucket, leader_epoch)

    async def confirm_newest(self, epochs: Mapping[BucketKey, int]) -> None:
        """Return if state that was just read as of now is the newest that anybody has seen.

        For right before the answer. ``epochs`` are those in which this node led the buckets when the call
        came. Raises ``ApiError`` if it has not led since, or another node may lead by now.
        """
        newest = self._host.newest
        if isinstance(newest, Alone) and all(self._has_led(key, epoch) for key, epoch in epochs.items()):
            return
        logs = [self.log(key, epoch) for key, epoch in epochs.items()]
        if not all(newest.may_answer(log) for log in logs):
            await newest.confirm(logs)
            for key, epoch in epochs.items():
                self.log(key, epoch)

    def _has_led(self, key: BucketKey, epoch: int) -> bool:
        """Whether the bucket is open and its log is still led in that epoch, as far as this node knows."""
        bucket = self._buckets.get(key)
        return bucket is not None and bucket.log.leads_at(epoch)

    def bucket(self, key: BucketKey) -> Bucket:
        """The bucket, which is opened if it is not. Raises what ``log`` raises; it may not be ready yet."""
        bucket = self._buckets.get(key)
        if bucket is None:
            if self._closed:
                raise TableError(TableCode.state_not_ready, "the node stops; try again")
            log = self.log(key)
            bucket = self._promoted(key) or self._opened(key, log)
            self._show(key, bucket)
        return bucket

    def _show(self, key: BucketKey, bucket: Bucket) -> None:
        """Keep a bucket that this node leads, as long as its log is led here.

        The log may hear of another leader before the metadata does. What was prepared for it is void then: it
        would be taken for the records that the other leader has given the same offsets.
        """
        self._buckets[key] = bucket
        bucket.log.depend(self, partial(self._leadership_lost, key, bucket))

    def _leadership_lost(self, key: BucketKey, bucket: Bucket) -> None:
        if self._buckets.get(key) is bucket and not self._closed:
            self._end_readers(key, f"another node leads {bucket.name} now")
            self._resign(key)

    def _opened(self, key: BucketKey, log: Partition, *, standby: bool = False) -> Bucket:
        self._host.check_open_files(_FILES_PER_BUCKET)
        bucket = Bucket(
            key,
            partial(self.by_id, key.table_id),
            log,
            self.directory(log.topic_id, log.index),
            self.engine,
            self.threads,
            self.fold_thread,
            self._host.clock_ms,
            self._host.steady_ms,
            max_decompressed_bytes=self._host.settings.max_decompressed_bytes,
            turns=self._folds,
            standby=standby,
        )
        bucket.start(after=self._resigning.get(key))
        return bucket

    async def rebuild_leased(self, bucket: Bucket, held: LeasedSnapshot) -> SnapshotInfo:
        """Build a leased state, of which this node has no snapshot, from the log. Raises ``TableError``.

        That is how a lease outlives the node that took its snapshot. Hold the bucket's ``snapshots_turn``.
        """
        refusal = self._host.controller.growth_refusal
        if refusal is not None:
            raise refusal
        await bucket.ready(held.log_offset, _READY_SECONDS)
        sound = await bucket.sound_snapshots()
        info = await rebuild(
            bucket.log,
            held,
            table=partial(self.by_id, bucket.key.table_id),
            engine=self.engine,
            snapshots=bucket.snapshots,
            older=[each for each in sound if each.log_offset <= held.log_offset],
            threads=self.threads,
            fold_thread=self.fold_thread,
            created_ms=self._host.clock_ms(),
            max_decompressed_bytes=self._host.settings.max_decompressed_bytes,
        )
        self.keeper.forget_floor(bucket)
        return info

    def peek(self, key: BucketKey) -> Bucket | None:
        """The bucket if it is open, else None."""
        return self._buckets.get(key)

    async def ready_bucket(
        self, key: BucketKey, min_offset: int = -1, max_wait_ms: int | None = None
    ) -> Bucket:
        """The bucket with its state recovered, and with everything below ``min_offset`` in it."""
        bucket = self.bucket(key)
        seconds = _READY_SECONDS if max_wait_ms is None else min(_READY_SECONDS, max(0, max_wait_ms) / 1000)
        await bucket.ready(min_offset, seconds)
        return bucket

    async def ready_buckets(self, min_offsets: Mapping[BucketKey, int], max_wait_ms: int) -> list[Bucket]:
        """Many buckets, each as ``ready_bucket`` gives it; all of them have the same time to get there."""
        until_ms = self._host.steady_ms() + max_wait_ms
        for key in min_offsets:
            # All are opened before any is waited for, so that they recover side by side.
            self.bucket(key)
            await give_way()
        ready = []
        for key, min_offset in min_offsets.items():
            ready.append(await self.ready_bucket(key, min_offset, until_ms - self._host.steady_ms()))
            await give_way()
        return ready

    def directory(self, topic_id: UUID, index: int) -> Path:
        return self._host.settings.data_dir / KV_FOLDER / f"{topic_id.hex}-{index}"

    def _snapshots(self, topic_id: UUID, index: int) -> SnapshotStore:
        return SnapshotStore(self.directory(topic_id, index), self.engine.files)

    # -- the leader's append hook --------------------------------------------------------------------------

    async def check(self, table: TableImage, partition_id: int, index: int, records: bytes) -> CheckedRows:
        """Check a batch before its append; gives its header and the changes that it makes.

        Raises for a wrong row, key or bucket. The batch has then passed ``check_batch``.
        """
        definition = self._definition(table)
        partition = definition.partition(partition_id)
        assert partition is not None, "the partition was found by its topic"
        work = partial(
            _checked, definition, partition, index, records, self._host.settings.max_decompressed_bytes
        )
        result = await asyncio.get_running_loop().run_in_executor(self.fold_thread, work)
        if isinstance(result, TidemillError):
            raise result
        return result

    async def wait_for_fold(self, key: BucketKey) -> None:
        """Let a writer wait while the state of a bucket is far behind its log."""
        bucket = self._buckets.get(key)
        if bucket is not None:
            await bucket.wait_for_fold()

    def appended(self, key: BucketKey, base_offset: int, changes: Changes) -> None:
        """Note that a batch that ``check`` accepted is in the log at ``base_offset``."""
        try:
            self.bucket(key).appended(changes.shifted(base_offset))
        except TidemillError as error:
            # The batch is in the log, and the fold reads it from there.
            logger.warning("bucket %d of table %d is not folded now: %s", key.bucket, key.table_id, error)

    # -- housekeeping --------------------------------------------------------------------------------------

    async def take_due_snapshots(self) -> None:
        """Take the snapshots that are due by time or by growth of the log, one after the other.

        Standbys take theirs, too. Also removes snapshots that were kept only because somebody read them.
        """
        let_go = self.keeper.take_let_go()
        for bucket in [*self._buckets.values(), *self._standbys.values()]:
            if self._folding(bucket.key) is not bucket:
                continue  # The table was dropped, or moved, while this waited for its turn.
            try:
                properties = TableProperties.of(
                    self.by_id(bucket.key.table_id).properties, self._host.settings
                )
                if is_snapshot_due(bucket, properties, self._host.steady_ms()):
                    await bucket.snapshot(shows=False)
                    await self.keeper.prune(bucket)
                elif bucket.key in let_go:
                    await self.keeper.prune(bucket)
            except TidemillError as error:
                logger.warning("no snapshot of %s now, it is tried again later: %s", bucket.name, error)

    def log_floor(self, log: Partition) -> int:
        """The offset from which on this replica may need every record of its log again.

        One that folds needs what follows its oldest snapshot, and what it has not folded yet. One that does
        not fold needs nothing for itself: state that is left here is built again if it turns out to be older
        than what is compacted. Its leader's floor bounds it (``Partition``), and leases do on every replica.
        """
        key = self._key_of(log.topic_id, log.index)
        folding = None if key is None else self._folding(key)
        if folding is not None:
            return min(self.keeper.floor(log.topic_id, log.index), max(0, folding.folded_offset))
        if key is not None and log.role is Role.FOLLOWER:
            return self.keeper.leased_floor(key)
        return self.keeper.floor(log.topic_id, log.index)

    def _folding(self, key: BucketKey) -> Bucket | None:
        """The bucket if its state is kept here, as the leader's or a standby's."""
        return self._buckets.get(key) or self._standbys.get(key)

    def _metadata_changed(self, old: MetadataImage, new: MetadataImage, delta: MetadataDelta) -> None:
        for table in [*delta.tables_changed, *delta.tables_dropped]:
            self._definitions.pop(table.id, None)
        for topic in delta.deleted:
            self._topic_deleted(topic)
        for changed in delta.leader_changed:
            topic = new.topics[changed.topic]
            found = new.table_of_topic(topic.id)
            if found is not None:
                key = BucketKey(found[0].id, found[1].id, changed.partition)
                self._end_readers(
                    key, f"bucket {changed.partition} of table {found[0].name!r} has a new leader epoch"
                )
                if not self._leads(topic, changed.partition):
                    self._resign(key)
        for changed in {*delta.leader_changed, *delta.replicas_changed}:
            topic = new.topics[changed.topic]
            self._take_role(topic, changed.partition, self._host.find.held(topic, changed.partition))
        if delta.leases_changed:
            self._leases_ended(old, new)

    def _leases_ended(self, old: MetadataImage, new: MetadataImage) -> None:
        """Have snapshots looked at that may have been kept for a lease only."""
        for lease_id in new.leases.differing_keys(old.leases):
            lease, now = old.leases.get(lease_id), new.leases.get(lease_id)
            if lease is None or (now is not None and now.snapshots == lease.snapshots):
                continue
            if lease.table_id in new.tables_by_id:
                for held in lease.snapshots:
                    self.keeper.look_again(BucketKey(lease.table_id, held.partition_id, held.bucket))

    def _resign(self, key: BucketKey) -> None:
        """Close a bucket that another node leads; it is opened again if this node leads it again."""
        bucket = self._buckets.pop(key, None)
        if bucket is not None:
            bucket.resign()
            self._close_behind(key, bucket)

    def _close_behind(self, key: BucketKey, bucket: Bucket | None, void: Path | None = None) -> None:
        """Close a bucket, and remove a directory of state that is ``void``; the next opening waits."""
        closing = self._resigning[key] = asyncio.get_running_loop().create_task(
            self._close_resigned(bucket, void, self._resigning.get(key))
        )
        self._removals.add(closing)
        closing.add_done_callback(partial(self._resigned, key))

    async def _close_resigned(
        self, bucket: Bucket | None, void: Path | None, before: asyncio.Task[None] | None
    ) -> None:
        if before is not None:
            await asyncio.wait([before])
        if bucket is not None:
            try:
                await bucket.close()
            except TidemillError as error:
                logger.warning("the state of %s was not closed in an orderly way: %s", bucket.name, error)
        if void is not None:
            work = partial(self.engine.files.remove_tree, void)
            await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def _resigned(self, key: BucketKey, closing: asyncio.Task[None]) -> None:
        self._removals.discard(closing)
        if self._resigning.get(key) is closing:
            del self._resigning[key]

    # -- standbys ------------------------------------------------------------------------------------------

    def partition_opened(self, partition: Partition) -> None:
        """Take note of a log of a table that was opened: this node may be the standby."""
        topic = self._host.image.topic_by_id(partition.topic_id)
        if topic is None or partition.index >= len(topic.partitions) or self._closed:
            return
        key = self._key_of(partition.topic_id, partition.index)
        is_new = partition.log_end_offset == 0 and key not in self._standbys
        if key is not None and is_new and not self._leads(topic, partition.index):
            # A replica that was here before may have left its state, and this log comes from elsewhere.
            self._close_behind(key, None, self.directory(partition.topic_id, partition.index))
        self._take_role(topic, partition.index, partition)

    async def remove_state(self, topic_id: UUID, index: int) -> None:
        """Remove the state of a bucket that has moved to other nodes."""
        key = self._key_of(topic_id, index)
        if key is None or self._closed:
            return
        bucket = self._buckets.pop(key, None) or self._standbys.pop(key, None)
        if bucket is not None:
            self._end_readers(key, "the bucket has moved to another node")
        self._close_behind(key, bucket, self.directory(topic_id, index))
        await asyncio.wait([self._resigning[key]])

    def log_cut(self, partition: Partition, *, anew: bool) -> None:
        """Have state looked at again whose log was cut, as a follower's may be.

        If the log was started ``anew``, records may be missing from it that would have undone what is in
        older state: then all of the state is void. Otherwise its leader epoch tells what is.
        """
        key = self._key_of(partition.topic_id, partition.index)
        if key is None or self._closed:
            return
        standby = self._standbys.pop(key, None)
        if standby is not None or anew:
            void = self.directory(partition.topic_id, partition.index) if anew else None
            self._close_behind(key, standby, void)
        self.partition_opened(partition)

    def _leads(self, topic: TopicImage, index: int) -> bool:
        return topic.partitions[index].leader == self._host.settings.node_id

    def _key_of(self, topic_id: UUID, index: int) -> BucketKey | None:
        """The bucket of which a partition is the log; None if it is not one of a table with state."""
        found = self._host.image.table_of_topic(topic_id)
        if found is None or not found[0].primary_key:
            return None
        return BucketKey(found[0].id, found[1].id, index)

    def _take_role(self, topic: TopicImage, index: int, log: Partition | None) -> None:
        """Begin or end to keep a bucket's state ready, or show it, as the metadata says."""
        key = self._key_of(topic.id, index)
        if key is None or log is None or self._closed:
            return
        if self._leads(topic, index):
            if key not in self._buckets and (bucket := self._promoted(key)) is not None:
                self._show(key, bucket)
        elif is_standby(topic.partitions[index], self._host.settings.node_id):
            if key not in self._standbys:
                self._standbys[key] = self._opened(key, log, standby=True)
        elif (unneeded := self._standbys.pop(key, None)) is not None:
            self._close_behind(key, unneeded)

    def _promoted(self, key: BucketKey) -> Bucket | None:
        """The standby of a bucket that this node leads now, if it has one that works."""
        standby = self._standbys.pop(key, None)
        if standby is None:
            return None
        if standby.problem is not None:
            # What a follower could not do a leader may: it is opened anew.
            self._close_behind(key, standby)
            return None
        standby.promote()
        return standby

    def _topic_deleted(self, topic: TopicImage) -> None:
        standbys = [bucket for bucket in self._standbys.values() if bucket.log.topic_id == topic.id]
        for bucket in standbys:
            del self._standbys[bucket.key]
        gone = [bucket for bucket in self._buckets.values() if bucket.log.topic_id == topic.id]
        for bucket in gone:
            del self._buckets[bucket.key]
            self._end_readers(bucket.key, f"the table of topic {topic.name!r} was dropped")
        self.keeper.forget(topic.id)
        self._remove_behind(self._remove_state(topic, [*gone, *standbys]))

    def _remove_behind(self, work: Coroutine[Any, Any, None]) -> None:
        removal = asyncio.get_running_loop().create_task(work)
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _remove_leftovers(self) -> None:
        """Remove the state of tables that were dropped just before the node went down."""
        settings = self._host.settings
        work = partial(
            _remove_unknown,
            self.engine.files,
            settings.data_dir,
            lambda: self._host.image,
            settings.node_id,
        )
        await asyncio.get_running_loop().run_in_executor(self.threads, work)

    async def _remove_state(self, topic: TopicImage, buckets: list[Bucket]) -> None:
        """Remove the files of a dropped table, once nobody has them open."""
        closing = [*(each.close() for each in buckets), *self._resigning.values()]
        for result in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(result, Exception):
                logger.warning("a bucket of the dropped topic %s: %s", topic.name, result)
        work = partial(
            _remove_directories, self.engine.files, self._host.settings.data_dir / KV_FOLDER, topic.id
        )
        await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def _end_readers(self, key: BucketKey, why: str) -> None:
        for ended in self.on_bucket_ends:
            ended(key, why)

    def problems(self) -> Iterator[str]:
        """What is wrong with the state of buckets, in words for people."""
        for bucket in self._buckets.values():
            if bucket.problem is not None:
                yield f"the state of {bucket.name} cannot be read: {bucket.problem}"

    def buckets(self) -> list[Bucket]:
        """The buckets that are open."""
        return list(self._buckets.values())

    async def close(self) -> None:
        """Close all buckets, also if one of them fails to close. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._unsubscribe()
        buckets, self._buckets = list(self._buckets.values()), {}
        for bucket in buckets:
            self._end_readers(bucket.key, "the node stops")
        standbys, self._standbys = list(self._standbys.values()), {}
        results = await asyncio.gather(
            *(bucket.close() for bucket in [*buckets, *standbys]),
            *self._removals,
            self.keeper.close(),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, Exception):
                logger.error("the state of a table was not closed in an orderly way: %s", result)
        for threads in (self.fold_thread, self.threads):
            await asyncio.to_thread(threads.shutdown)


def _checked(
    table: TableDefinition,
    partition: PartitionDefinition,
    index: int,
    records: bytes,
    max_decompressed_bytes: int,
) -> CheckedRows | TidemillError:
    """The result of ``_check``. What an error holds is freed here: up to 128 MiB take long to free."""
    try:
        return _check(table, partition, index, records, max_decompressed_bytes)
    except TidemillError as error:
        return without_traceback(error)


def _check(
    table: TableDefinition,
    partition: PartitionDefinition,
    index: int,
    records: bytes,
    max_decompressed_bytes: int,
) -> CheckedRows:
    # The checksum first, because a batch that was damaged on its way is sent again.
    header = check_batch(records)
    if header.record_count > _BATCH_RECORDS_MAX:
        raise TableError(
            TableCode.row_refused,
            f"a batch of {header.record_count} records for table {table.name!r} is too large; send "
            f"{_BATCH_RECORDS_MAX} at most",
        )
    columns = read_columns(records, max_decompressed_bytes)
    is_timed = max(NO_TIMESTAMP, int(columns.timestamps.max())) == header.max_timestamp
    return CheckedRows(header, prepare_checked(table, columns, partition, index), is_timed)


def _remove_unknown(files: Files, data_dir: Path, image: Callable[[], MetadataImage], node_id: int) -> None:
    """Remove state without metadata, or that has moved away. If there is also a log, nothing is removed."""
    logs, folder = data_dir / LOGS, data_dir / KV_FOLDER
    held_logs = {name for topic in files.names(logs) for name in files.names(logs / topic)}
    known = {name.partition("-")[0] for name in held_logs}
    for name in files.names(folder):
        topic_id, _, index = name.partition("-")
        if not _TOPIC_ID.fullmatch(topic_id):
            continue
        topic = image().topic_by_id(UUID(topic_id))
        if topic is None and topic_id not in known:
            logger.info("%s is the state of a table that was dropped; it is removed", folder / name)
            _remove(files, folder / name)
        elif topic is not None and name not in held_logs and _is_elsewhere(topic, index, node_id):
            logger.info("%s is the state of a bucket that has moved away; it is removed", folder / name)
            _remove(files, folder / name)


def _is_elsewhere(topic: TopicImage, index: str, node_id: int) -> bool:
    """Whether other nodes, and not this one, hold the bucket."""
    if not index.isdecimal() or int(index) >= len(topic.partitions):
        return False
    return node_id not in topic.partitions[int(index)].replicas


def _remove_directories(files: Files, folder: Path, topic_id: UUID) -> None:
    for name in files.names(folder):
        if name.startswith(f"{topic_id.hex}-"):
            _remove(files, folder / name)


def _remove(files: Files, directory: Path) -> None:
    try:
        files.remove_tree(directory)
    except StorageError as error:
        logger.warning("the state of a dropped table stays until the next start: %s", error)
