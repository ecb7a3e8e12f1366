"""All partitions of this node: opened at their first use, kept open, closed in an orderly way.

Where they are: ``logs/<topic>/<topic id>-<partition>``. A topic that is being deleted has a marker beside its
partitions; only a directory with such a marker is ever removed. A directory that no metadata speaks of is
left alone and reported.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from uuid import UUID

from tidemill.config.topic import TopicConfig
from tidemill.errors import DiskFull, ErrorCode, StorageError
from tidemill.log.checkpoint import CHECKPOINT_NAME
from tidemill.log.index import IndexCache
from tidemill.log.inspect import read_checkpoint
from tidemill.log.inventory import INVENTORY_NAME, OFFSETS_AHEAD, Inventory
from tidemill.log.recovery import RecoveryReport, open_log
from tidemill.log.storage import Storage
from tidemill.replication.damage import DamageRegister
from tidemill.replication.flusher import wall_clock_ms
from tidemill.replication.partition import Partition

__all__ = ("LOGS", "PartitionKey", "Placement", "Replicas", "partition_directory")

LOGS = "logs"
_MARKER_ENDING = ".deleting"
_CLOSING_THREADS = 16

logger = logging.getLogger(__name__)

PartitionKey = tuple[UUID, int]


@dataclass(frozen=True, slots=True)
class Placement:
    """What the metadata says of a partition that this node leads."""

    topic: str
    topic_id: UUID
    index: int
    leader_epoch: int
    config: TopicConfig


def partition_directory(topic: str, topic_id: UUID, index: int) -> str:
    """Where a partition is, below the storage's root."""
    return f"{LOGS}/{topic}/{topic_id.hex}-{index}"


class Replicas:
    """The partitions of this node by topic id and index."""

    def __init__(
        self,
        storage: Storage,
        request_flush: Callable[[Partition], None],
        *,
        max_decompressed_bytes: int,
        clock_ms: Callable[[], int] = wall_clock_ms,
    ) -> None:
        self._storage = storage
        self._clock_ms = clock_ms
        self._request_flush = request_flush
        self._max_decompressed_bytes = max_decompressed_bytes
        self._cache = IndexCache()
        self.inventory = Inventory(storage)
        self._partitions: dict[PartitionKey, Partition] = {}
        #: Partitions that could not be opened, and why.
        self.offline: dict[PartitionKey, tuple[Placement, StorageError]] = {}
        self.reports: list[RecoveryReport] = []
        #: Batches that did not check out when they were read.
        self.damage = DamageRegister()
        #: Why no partition takes appends now; None if they do.
        self._refusal: StorageError | None = None
        #: Told of every partition that is opened.
        self.on_open: Callable[[Partition], None] = lambda partition: None

    def __iter__(self) -> Iterator[Partition]:
        return iter(list(self._partitions.values()))

    @property
    def storage(self) -> Storage:
        return self._storage

    def __len__(self) -> int:
        return len(self._partitions)

    def peek(self, topic_id: UUID, index: int) -> Partition | None:
        """The partition if it is open."""
        return self._partitions.get((topic_id, index))

    def open(self, placement: Placement) -> Partition:
        """The partition, opened and recovered now if it was not. Raises ``StorageError`` if it is stopped."""
        key = placement.topic_id, placement.index
        partition = self._partitions.get(key)
        if partition is not None:
            return partition
        if key in self.offline:
            raise self.offline[key][1]
        directory = partition_directory(placement.topic, placement.topic_id, placement.index)
        try:
            log, report = open_log(
                self._storage,
                directory,
                placement.config,
                self._cache,
                now_ms=self._clock_ms(),
                inventory=self.inventory,
            )
        except DiskFull:
            # Recovery had something to keep and no room for it: tried again at the next request.
            raise
        except StorageError as error:
            self.offline[key] = placement, error
            logger.error("%s-%d is stopped: %s", placement.topic, placement.index, error)
            raise
        self._note(report)
        log.on_damage = partial(self.damage.note, placement.topic, placement.topic_id, placement.index)
        log.refusal = self._refusal
        partition = self._partitions[key] = Partition(
            placement.topic,
            placement.topic_id,
            placement.index,
            log,
            leader_epoch=placement.leader_epoch,
            request_flush=self._request_flush,
            max_decompressed_bytes=self._max_decompressed_bytes,
        )
        self.on_open(partition)
        return partition

    def _note(self, report: RecoveryReport) -> None:
        for cut in report.cuts:
            logger.warning(
                "%s: cut %d bytes that were never durable at byte %d (%s); kept in %s",
                cut.path,
                cut.size_bytes,
                cut.position,
                cut.reason,
                cut.kept_in,
            )
        for warning in report.warnings:
            logger.warning("%s: %s", report.directory, warning)
        if not report.clean:
            self.reports.append(report)

    def take_inventory(self, placements: Iterable[Placement]) -> None:
        """Compare the inventory with what is on disk, once at the start.

        A partition that had data and has no files is stopped, so that it is reported before anybody asks for
        it. Files that are not listed yet are: a crash has come in between, or an older release wrote them.
        """
        expected = set()
        unlisted = []
        for placement in placements:
            directory = partition_directory(placement.topic, placement.topic_id, placement.index)
            expected.add(directory)
            has_checkpoint = self._storage.exists(f"{directory}/{CHECKPOINT_NAME}")
            if has_checkpoint and directory not in self.inventory:
                unlisted.append(directory)
            elif not has_checkpoint and directory in self.inventory:
                with contextlib.suppress(StorageError):
                    self.open(placement)
        for directory in self.inventory:
            if directory not in expected and not self._storage.exists(directory):
                # Of a deleted topic; the crash came before the line could go.
                parent, _, name = directory.rpartition("/")
                self.inventory.remove(parent, name)
        self._list(unlisted)

    def _list(self, directories: list[str]) -> None:
        if not directories:
            return
        bounds = []
        try:
            for directory in directories:
                # What was found may be the work of a process that was killed before it synced the name.
                self._storage.sync_dir(directory)
                checkpoint = read_checkpoint(self._storage, directory)
                bounds.append((directory, (checkpoint.recovery_point if checkpoint else 0) + OFFSETS_AHEAD))
            self.inventory.add(bounds)
            self.inventory.sync()
        except StorageError as error:
            logger.warning("%s is brought up to date with the next write: %s", INVENTORY_NAME, error)
            return
        if not self.inventory.existed:
            logger.info("%s: %d partitions that are there are listed", INVENTORY_NAME, len(bounds))

    def refuse_appends(self, refusal: StorageError | None) -> None:
        """Take no appends to any partition, until this is called with None. Reads go on."""
        self._refusal = refusal
        for partition in self:
            partition.log.refusal = refusal

    def exists_on_disk(self, placement: Placement) -> bool:
        return self._storage.exists(partition_directory(placement.topic, placement.topic_id, placement.index))

    def close_partition(self, partition: Partition) -> None:
        """Close one partition that nobody uses; it is opened again when asked for."""
        del self._partitions[partition.topic_id, partition.index]
        partition.close()

    def close(self) -> bool:
        """Close all in an orderly way. False if some could not be: the next start has to look at them."""
        # Each is a handful of syncs, which the disk takes side by side.
        with ThreadPoolExecutor(_CLOSING_THREADS, thread_name_prefix="tidemill-close") as pool:
            orderly = all(list(pool.map(_close_and_report, self)))
        self._partitions.clear()
        self.inventory.close()
        return orderly

    # --- deletion

    def mark_deleting(self, topic: str, topic_id: UUID) -> None:
        """Before the metadata forgets a topic: note that its directories are meant to go."""
        if self._storage.exists(f"{LOGS}/{topic}"):
            self._storage.open(self._marker(topic, topic_id), create=True).close()
            self._storage.sync_dir(f"{LOGS}/{topic}")

    def unmark_deleting(self, topic: str, topic_id: UUID) -> None:
        if self._storage.exists(self._marker(topic, topic_id)):
            self._storage.remove(self._marker(topic, topic_id))

    def stop_topic(self, topic: str, topic_id: UUID) -> None:
        """Answer everybody who waits for a partition of a deleted topic, and let go of its files."""
        for key in [key for key in self._partitions if key[0] == topic_id]:
            partition = self._partitions.pop(key)
            partition.stop(
                StorageError(f"topic {topic} was deleted", code=ErrorCode.unknown_topic_or_partition)
            )
        for key in [key for key in self.offline if key[0] == topic_id]:
            del self.offline[key]
        self.damage.forget_topic(topic_id)

    def remove_files(self, topic: str, topic_id: UUID) -> None:
        """Remove what a deleted topic left on disk. Slow: runs in a thread."""
        folder = f"{LOGS}/{topic}"
        for name in self._storage.list_dir(folder):
            if name.startswith(topic_id.hex) and not name.endswith(_MARKER_ENDING):
                self._storage.remove_tree(f"{folder}/{name}")
        if self._storage.exists(folder):
            # The marker outlives what it speaks of, also in a crash.
            self._storage.sync_dir(folder)
        self.inventory.remove(folder, f"{topic_id.hex}-")
        self.unmark_deleting(topic, topic_id)

    def leftovers(self, known: Iterable[UUID]) -> tuple[list[tuple[str, UUID]], list[str]]:
        """(topics whose deletion was interrupted, directories that no metadata speaks of)."""
        known_ids = {topic_id.hex for topic_id in known}
        interrupted: list[tuple[str, UUID]] = []
        unknown: list[str] = []
        for topic in self._storage.list_dir(LOGS):
            try:
                names = self._storage.list_dir(f"{LOGS}/{topic}")
            except StorageError:
                # Something that is no directory, and so none of ours.
                unknown.append(f"{LOGS}/{topic}")
                continue
            marked = {found.hex for found in map(_marked_id, names) if found is not None}
            for hex_id in sorted(marked):
                if hex_id in known_ids:
                    self.unmark_deleting(topic, UUID(hex_id))
                else:
                    interrupted.append((topic, UUID(hex_id)))
            unknown += [
                f"{LOGS}/{topic}/{name}"
                for name in names
                if name.partition("-")[0] not in known_ids | marked and _marked_id(name) is None
            ]
        return interrupted, unknown

    def _marker(self, topic: str, topic_id: UUID) -> str:
        return f"{LOGS}/{topic}/{topic_id.hex}{_MARKER_ENDING}"


def _marked_id(name: str) -> UUID | None:
    """The topic that a deletion marker speaks of; None if the file is no marker."""
    if not name.endswith(_MARKER_ENDING):
        return None
    try:
        return UUID(hex=name.removesuffix(_MARKER_ENDING))
    except ValueError:
        return None


def _close_and_report(partition: Partition) -> bool:
    try:
        partition.close()
    except StorageError as error:
        logger.error("%s-%d did not stop cleanly: %s", partition.topic, partition.index, error)
        return False
    return partition.log.failure is None
