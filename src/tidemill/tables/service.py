"""All tables of a node: definitions from the metadata, buckets opened at their first use, housekeeping.

``scans`` and ``leases`` build on it. Everything here runs on the event loop; what takes long runs in threads.
"""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import UUID

from tidemill.config.settings import Settings
from tidemill.control.controller import Controller
from tidemill.control.image import MetadataDelta, MetadataImage, TopicImage
from tidemill.control.table_images import TableImage
from tidemill.coordination.moments import MomentGate
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError, TidemillError
from tidemill.kv.resources import KvResources
from tidemill.records.batch import check_batch
from tidemill.records.columns import read_columns
from tidemill.replication.partition import Partition as LogPartition
from tidemill.replication.replicas import LOGS
from tidemill.tables.bucket import Bucket
from tidemill.tables.changes import Changes, prepare_checked
from tidemill.tables.definition import Partition, TableDefinition
from tidemill.tables.properties import TableProperties
from tidemill.tables.scanners import BucketKey
from tidemill.tables.snapshot_keeping import SnapshotKeeper, is_snapshot_due

__all__ = ("KV_FOLDER", "TableHost", "TableService", "definition_of")

logger = logging.getLogger(__name__)

KV_FOLDER = "kv"
_TOPIC_ID = re.compile(r"[0-9a-f]{32}")
_THREADS = 4
#: Less than clients wait for an answer: else they take the node for gone.
_READY_SECONDS = 20.0
#: Columns of records take some 150 bytes for each while they are made, whatever the record has.
_BATCH_RECORDS_MAX = 1_000_000


class TableHost(Protocol):
    """What tables need of the node they are on."""

    @property
    def settings(self) -> Settings: ...
    @property
    def controller(self) -> Controller: ...
    @property
    def image(self) -> MetadataImage: ...
    @property
    def clock_ms(self) -> Callable[[], int]:
        """The time of day, for stamps only."""

    @property
    def steady_ms(self) -> Callable[[], int]:
        """Milliseconds for intervals and deadlines, which no change of the clock moves."""

    @property
    def moments(self) -> MomentGate:
        """No transaction that wrote to several buckets is half visible while its ``still`` is held."""

    def partition(self, topic: TopicImage, index: int) -> LogPartition:
        """The partition, if this node leads it. Raises ``ApiError`` or ``StorageError``."""


def definition_of(table: TableImage) -> TableDefinition:
    """The metadata of a table as code needs it."""
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
        partitions=tuple(Partition(each.id, each.value, each.topic) for each in table.partitions),
        properties=dict(table.properties),
        comment=table.comment,
        created_ms=table.created_ms,
    )


class TableService:
    """See the module. Made when the node meets its first table."""

    def __init__(self, host: TableHost) -> None:
        self._host = host
        settings = host.settings
        self.resources = KvResources(
            block_cache_bytes=settings.kv_block_cache_bytes, write_buffer_bytes=settings.kv_write_buffer_bytes
        )
        self.threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tidemill-tables")
        #: By table id, with the image that it was made from: threads may still look at an old one.
        self._definitions: dict[int, tuple[TableImage, TableDefinition]] = {}
        self._buckets: dict[BucketKey, Bucket] = {}
        self._removals: set[asyncio.Task[None]] = set()
        self._closed = False
        self.keeper = SnapshotKeeper(
            lambda: host.image, self.directory, self.threads, settings.kv_snapshots_kept
        )
        #: Called with a bucket whose sessions and pins must end, and why.
        self.on_bucket_ends: list[Callable[[BucketKey, str], None]] = []
        self._unsubscribe = host.controller.subscribe(self._metadata_changed)
        self._remove_behind(self._remove_leftovers())

    @property
    def host(self) -> TableHost:
        return self._host

    # --- finding things

    def named(self, name: str) -> TableDefinition:
        """The table of that name. Raises ``TableError``."""
        table = self._host.image.tables.get(name)
        if table is None:
            raise TableError(
                TableCode.table_not_found,
                f"there is no table {name!r}; 'tidemill table list' shows those that exist",
            )
        return self._definition(table)

    def by_id(self, table_id: int) -> TableDefinition:
        """The table of that number. Raises ``TableError``."""
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
        """The table of that number, which must have a primary key."""
        table = self.by_id(table_id)
        if not table.has_primary_key:
            raise TableError(
                TableCode.not_a_primary_key_table,
                f"table {table.name!r} has no primary key, and so no state to read; consume its topic "
                "instead",
            )
        return table

    def bucket_keys(self, table: TableDefinition) -> Iterator[BucketKey]:
        for partition in table.partitions:
            for number in range(table.buckets):
                yield BucketKey(table.table_id, partition.id, number)

    def log(self, key: BucketKey) -> LogPartition:
        """The log of a bucket that this node leads. Raises ``ApiError`` or ``StorageError``."""
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
        return self._host.partition(topic, key.bucket)

    def bucket(self, key: BucketKey) -> Bucket:
        """The bucket, opened and folding. Raises as ``log`` does; it may not be ready yet."""
        bucket = self._buckets.get(key)
        if bucket is None:
            if self._closed:
                raise TableError(TableCode.state_not_ready, "the node stops; try again")
            log = self.log(key)
            bucket = self._buckets[key] = Bucket(
                key,
                partial(self.by_id, key.table_id),
                log,
                self.directory(log.topic_id, log.index),
                self.resources,
                self.threads,
                self._host.clock_ms,
                self._host.steady_ms,
                max_decompressed_bytes=self._host.settings.max_decompressed_bytes,
            )
            bucket.start()
        return bucket

    def peek(self, key: BucketKey) -> Bucket | None:
        """The bucket if it is open."""
        return self._buckets.get(key)

    async def ready_bucket(
        self, key: BucketKey, min_offset: int = -1, max_wait_ms: int | None = None
    ) -> Bucket:
        """The bucket with its state recovered, and with everything below ``min_offset`` in it."""
        bucket = self.bucket(key)
        seconds = _READY_SECONDS if max_wait_ms is None else min(_READY_SECONDS, max(0, max_wait_ms) / 1000)
        await bucket.ready(min_offset, seconds)
        return bucket

    def directory(self, topic_id: UUID, index: int) -> Path:
        return self._host.settings.data_dir / KV_FOLDER / f"{topic_id.hex}-{index}"

    # --- the leader's append hook

    async def check(self, table: TableImage, place_id: int, index: int, records: bytes) -> Changes | None:
        """Refuse a batch with a wrong row, key or bucket, or give the changes that it makes."""
        definition = self._definition(table)
        place = definition.partition(place_id)
        assert place is not None, "the partition was found by its topic"
        work = partial(_check, definition, place, index, records, self._host.settings.max_decompressed_bytes)
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    async def room(self, key: BucketKey) -> None:
        """Wait while the state of a bucket is far behind its log."""
        bucket = self._buckets.get(key)
        if bucket is not None:
            await bucket.room()

    def appended(self, key: BucketKey, base_offset: int, changes: Changes) -> None:
        """A batch that ``check`` passed is in the log at ``base_offset``."""
        try:
            self.bucket(key).appended(changes.shifted(base_offset))
        except TidemillError as error:
            # The batch is in the log all the same, and folded from there.
            logger.warning("bucket %d of table %d is not folded now: %s", key.bucket, key.table_id, error)

    # --- housekeeping

    async def take_due_snapshots(self) -> None:
        """Take the snapshots that time or the growth of the log ask for, one after the other.

        Those that were kept only because somebody read them go.
        """
        let_go = self.keeper.take_let_go()
        for bucket in list(self._buckets.values()):
            if self._buckets.get(bucket.key) is not bucket:
                continue  # Dropped while it waited for its turn.
            try:
                properties = TableProperties.of(
                    self.by_id(bucket.key.table_id).properties, self._host.settings
                )
                if is_snapshot_due(bucket, properties, self._host.steady_ms()):
                    await bucket.snapshot()
                    await self.keeper.prune(bucket)
                elif bucket.key in let_go:
                    await self.keeper.prune(bucket)
            except TidemillError as error:
                logger.warning("no snapshot of %s now, it is tried again later: %s", bucket.name, error)

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

    def _topic_deleted(self, topic: TopicImage) -> None:
        gone = [bucket for bucket in self._buckets.values() if bucket.log.topic_id == topic.id]
        for bucket in gone:
            del self._buckets[bucket.key]
            self._end_readers(bucket.key, f"the table of topic {topic.name!r} was dropped")
        self.keeper.forget(topic.id)
        self._remove_behind(self._remove_state(topic, gone))

    def _remove_behind(self, work: Coroutine[Any, Any, None]) -> None:
        removal = asyncio.get_running_loop().create_task(work)
        self._removals.add(removal)
        removal.add_done_callback(self._removals.discard)

    async def _remove_leftovers(self) -> None:
        """Remove the state of tables that were dropped just before the node went down."""
        work = partial(_remove_unknown, self._host.settings.data_dir, lambda: self._host.image)
        await asyncio.get_running_loop().run_in_executor(self.threads, work)

    async def _remove_state(self, topic: TopicImage, buckets: list[Bucket]) -> None:
        """Remove what a dropped table leaves on disk, once nobody has it open."""
        for result in await asyncio.gather(*(each.close() for each in buckets), return_exceptions=True):
            if isinstance(result, Exception):
                logger.warning("a bucket of the dropped topic %s: %s", topic.name, result)
        work = partial(_remove_directories, self._host.settings.data_dir / KV_FOLDER, topic.id)
        await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def _end_readers(self, key: BucketKey, why: str) -> None:
        for ended in self.on_bucket_ends:
            ended(key, why)

    def problems(self) -> Iterator[str]:
        """What is wrong with the state of buckets, in words."""
        for bucket in self._buckets.values():
            if bucket.problem is not None:
                yield f"the state of {bucket.name} cannot be read: {bucket.problem}"

    def buckets(self) -> list[Bucket]:
        """Those that are open."""
        return list(self._buckets.values())

    async def close(self) -> None:
        """Close all buckets; one that cannot be closed keeps nobody else from it. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._unsubscribe()
        buckets, self._buckets = list(self._buckets.values()), {}
        for bucket in buckets:
            self._end_readers(bucket.key, "the node stops")
        results = await asyncio.gather(
            *(bucket.close() for bucket in buckets),
            *self._removals,
            self.keeper.close(),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, Exception):
                logger.error("the state of a table was not closed in an orderly way: %s", result)
        await asyncio.to_thread(self.threads.shutdown)


def _check(
    table: TableDefinition, place: Partition, index: int, records: bytes, max_decompressed_bytes: int
) -> Changes | None:
    # Before anything is said of its rows: a batch that was damaged on the way is sent again.
    header = check_batch(records)
    if header.record_count > _BATCH_RECORDS_MAX:
        raise TableError(
            TableCode.row_refused,
            f"a batch of {header.record_count} records for table {table.name!r} is too large; send "
            f"{_BATCH_RECORDS_MAX} at most",
        )
    return prepare_checked(table, read_columns(records, max_decompressed_bytes), place, index)


def _remove_unknown(data_dir: Path, image: Callable[[], MetadataImage]) -> None:
    """Where there is a log without metadata, something else is wrong, and nothing is removed."""
    folder = data_dir / KV_FOLDER
    known = {path.name.partition("-")[0] for path in data_dir.glob(f"{LOGS}/*/*")}
    for directory in folder.iterdir() if folder.exists() else ():
        topic = directory.name.partition("-")[0]
        if _TOPIC_ID.fullmatch(topic) and topic not in known and image().topic_by_id(UUID(topic)) is None:
            logger.info("%s is the state of a table that was dropped; it is removed", directory)
            shutil.rmtree(directory, ignore_errors=True)


def _remove_directories(folder: Path, topic_id: UUID) -> None:
    if folder.exists():
        for directory in folder.glob(f"{topic_id.hex}-*"):
            shutil.rmtree(directory, ignore_errors=True)
