"""All partitions of this node: opened at their first use, kept open, closed in an orderly way.

Where they are: ``logs/<topic>/<topic id>-<partition>``. A topic that is being deleted has a deletion note, a
file beside its partitions; so has a single partition that has moved to other nodes. Only a directory with
such a note is ever removed. A partition's note is kept until its files are gone, whatever the metadata says
by then: half of a log is no log. A directory that no metadata speaks of is left alone and reported.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final
from uuid import UUID

from tidemill.config.topic import TopicConfig
from tidemill.coordination.clock import wall_clock_ms
from tidemill.coordination.metrics import Metric, counters, gauge, gauges
from tidemill.coordination.pools import Pools, thread_pool
from tidemill.errors import DiskFull, ErrorCode, StorageError, TooManyFiles
from tidemill.log.notes.checkpoint import CHECKPOINT_NAME, read_checkpoint, read_high_watermark
from tidemill.log.notes.inventory import INVENTORY_NAME, OFFSETS_AHEAD, Inventory
from tidemill.log.recovery import RecoveryReport, open_log
from tidemill.log.segments.index import IndexCache
from tidemill.log.storage import Storage
from tidemill.replication.log_work.damage import DamageRegister
from tidemill.replication.partition import Partition
from tidemill.replication.rules.assignment import PartitionAssignment

__all__ = ("LOGS", "REPLICA_METRICS", "PartitionKey", "Placement", "Replicas", "partition_directory")

LOGS = "logs"
_NOTE_SUFFIX = ".deleting"
_CLOSING_THREADS = 16
#: The name of a partition's directory, or of its removal note.
_PARTITION_NAME: Final = re.compile(rf"([0-9a-f]{{32}})-(0|[1-9][0-9]{{0,5}})({re.escape(_NOTE_SUFFIX)})?")

logger = logging.getLogger(__name__)

PartitionKey = tuple[UUID, int]


@dataclass(frozen=True, slots=True)
class Placement:
    """A partition that this node holds, as the metadata describes it.

    Without an ``assignment`` this node is the only replica, and leads at ``leader_epoch``.
    """

    topic: str
    topic_id: UUID
    index: int
    leader_epoch: int
    config: TopicConfig
    assignment: PartitionAssignment | None = None


def partition_directory(topic: str, topic_id: UUID, index: int) -> str:
    """The directory of a partition, below the storage's root."""
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
        pools: Pools = thread_pool,
        node_id: int = 0,
    ) -> None:
        self._storage = storage
        self._node_id = node_id
        self._pools = pools
        self._clock_ms = clock_ms
        self._request_flush = request_flush
        self._max_decompressed_bytes = max_decompressed_bytes
        self._cache = IndexCache()
        self.inventory = Inventory(storage)
        self._partitions: dict[PartitionKey, Partition] = {}
        #: Partitions that could not be opened, and why.
        self.offline: dict[PartitionKey, tuple[Placement, StorageError]] = {}
        #: Partitions whose files are being removed: they cannot be opened before that is done.
        self._removing: set[PartitionKey] = set()
        self.reports: list[RecoveryReport] = []
        #: Batches that did not check out when they were read.
        self.damage = DamageRegister()
        #: Why partitions take no appends now, but for those of some topics; None if they do.
        self._refusal: StorageError | None = None
        self._not_refused: Collection[str] = ()
        #: Why no partition at all takes appends now; None if they do.
        self._hold: StorageError | None = None
        #: Called when a deletion found no space on the disk; returns whether there is more space now.
        self.give_up_reserve: Callable[[DiskFull], bool] = lambda error: False
        #: Asked before a partition is opened; raises if too many files are open.
        self.check_open: Callable[[Placement], None] = lambda placement: None
        #: Told of every partition that is opened.
        self.on_open: Callable[[Partition], None] = lambda partition: None
        #: Each is told of every change of a partition's role, leader or in-sync set.
        self.role_listeners: list[Callable[[Partition], None]] = []

    def __iter__(self) -> Iterator[Partition]:
        return iter(list(self._partitions.values()))

    @property
    def storage(self) -> Storage:
        return self._storage

    def __len__(self) -> int:
        return len(self._partitions)

    def stopped(self) -> Iterator[tuple[str, int, StorageError]]:
        """Topic and index of the partitions that are out of service, and why."""
        for placement, error in self.offline.values():
            yield placement.topic, placement.index, error
        for partition in self:
            if partition.failure is not None:
                yield partition.topic, partition.index, partition.failure

    def lost(self) -> Iterator[PartitionKey]:
        """The partitions that had data and whose files are gone, or that were repaired with loss."""
        for key, (placement, _) in self.offline.items():
            if not self.exists_on_disk(placement):
                yield key
        for key, partition in self._partitions.items():
            if partition.local_log.is_repaired:
                yield key

    def peek(self, topic_id: UUID, index: int) -> Partition | None:
        """The partition if it is open."""
        return self._partitions.get((topic_id, index))

    def open(self, placement: Placement) -> Partition:
        """The partition, in the role that the placement says. It is opened and recovered now if it was not.

        Raises ``StorageError`` if it is stopped.
        """
        key = placement.topic_id, placement.index
        partition = self._partitions.get(key)
        if partition is not None:
            partition.apply(self._assignment(placement), self._node_id)
            return partition
        if key in self.offline:
            raise self.offline[key][1]
        if self.exists_on_disk(placement):
            self.check_open(placement)
        if key in self._removing:
            raise StorageError(
                f"the old files of {placement.topic}-{placement.index} are being removed; try again soon"
            )
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
        except (DiskFull, TooManyFiles):
            # No fault of the partition's files: tried again at the next request.
            raise
        except StorageError as error:
            self.offline[key] = placement, error
            logger.error("%s-%d is stopped: %s", placement.topic, placement.index, error)
            raise
        self._note(report)
        log.on_damage = partial(self.damage.note, placement.topic, placement.topic_id, placement.index)
        log.check_first_files = partial(self.check_open, placement)
        log.refusal = self._refusal_of(placement.topic)
        partition = self._partitions[key] = Partition(
            placement.topic,
            placement.topic_id,
            placement.index,
            log,
            request_flush=self._request_flush,
            max_decompressed_bytes=self._max_decompressed_bytes,
        )
        partition.on_role_change = self._role_changed
        partition.apply(self._assignment(placement), self._node_id)
        self.on_open(partition)
        return partition

    def apply(self, placements: Iterable[Placement]) -> list[tuple[Placement, StorageError]]:
        """Open the partitions that this node holds, and give each its role. Returns those that failed.

        Called with what has changed in the metadata, and with everything at the start. Opening recovers, so
        a caller with many partitions gives them in small parts.
        """
        failed = []
        for placement in placements:
            try:
                self.open(placement)
            except StorageError as error:
                failed.append((placement, error))
        return failed

    def _assignment(self, placement: Placement) -> PartitionAssignment:
        return placement.assignment or PartitionAssignment.alone(self._node_id, placement.leader_epoch)

    def _role_changed(self, partition: Partition) -> None:
        for listener in self.role_listeners:
            listener(partition)

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
                # Its topic was deleted, and a crash came before the line was removed.
                parent, _, name = directory.rpartition("/")
                self.inventory.remove(parent, name)
        self._list(unlisted)

    def _list(self, directories: list[str]) -> None:
        if not directories:
            return
        bounds = []
        try:
            for directory in directories:
                # The directory may have been made by a process that was killed before it synced the name.
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

    @property
    def refusal(self) -> StorageError | None:
        """Why no partition takes appends now; None if they do."""
        return self._refusal

    def refuse_appends(self, refusal: StorageError | None, *, but: Collection[str] = ()) -> None:
        """Take no appends to any partition, ``but`` to those of some topics, until this is called with None.

        Reads go on.
        """
        self._refusal, self._not_refused = refusal, but
        self._tell_refusals()

    def hold_appends(self, refusal: StorageError | None) -> None:
        """Take no appends to any partition at all, until this is called with None. Reads go on."""
        self._hold = refusal
        self._tell_refusals()

    def _tell_refusals(self) -> None:
        for partition in self:
            partition.local_log.refusal = self._refusal_of(partition.topic)

    def _refusal_of(self, topic: str) -> StorageError | None:
        return self._hold or (None if topic in self._not_refused else self._refusal)

    def exists_on_disk(self, placement: Placement) -> bool:
        return self.has_files(placement.topic, placement.topic_id, placement.index)

    def has_files(self, topic: str, topic_id: UUID, index: int) -> bool:
        """Whether the partition has a directory."""
        return self._storage.exists(partition_directory(topic, topic_id, index))

    def closed_high_watermark(self, topic: str, topic_id: UUID, index: int) -> int | None:
        """The high watermark of a partition that is not open, as its checkpoint has it. Slow.

        0 if the partition was never written to, None if its checkpoint is damaged.
        """
        return read_high_watermark(self._storage, partition_directory(topic, topic_id, index))

    def close_partition(self, partition: Partition) -> None:
        """Close one partition that nobody uses; it is opened again when asked for."""
        del self._partitions[partition.topic_id, partition.index]
        partition.close()

    def close(self) -> bool:
        """Close all in an orderly way. False if some could not be: the next start has to look at them."""
        # Closing a partition takes a few syncs, which the disk can do side by side.
        with self._pools("close", _CLOSING_THREADS) as pool:
            orderly = all(list(pool.map(_close_and_report, self)))
        self._partitions.clear()
        self.inventory.close()
        return orderly

    # --- deletion

    def mark_deleting(self, topic: str, topic_id: UUID) -> None:
        """Before the metadata forgets a topic: note that its directories are meant to go."""
        if not self._storage.exists(f"{LOGS}/{topic}"):
            return
        self._make_note(topic, self._deletion_note(topic, topic_id))

    def unmark_deleting(self, topic: str, topic_id: UUID) -> None:
        if self._storage.exists(self._deletion_note(topic, topic_id)):
            self._storage.remove(self._deletion_note(topic, topic_id))

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
        names = [name for name in self._storage.list_dir(folder) if name.startswith(topic_id.hex)]
        for name in names:
            if not name.endswith(_NOTE_SUFFIX):
                self._storage.remove_tree(f"{folder}/{name}")
        for name in names:
            # Those of partitions that had moved away; the topic's own covers all of them.
            if name.endswith(_NOTE_SUFFIX) and _noted_topic(name) is None:
                self._storage.remove(f"{folder}/{name}")
        if self._storage.exists(folder):
            # The note must outlive the files that it covers, also in a crash.
            self._storage.sync_dir(folder)
        self.inventory.remove(folder, f"{topic_id.hex}-")
        self.unmark_deleting(topic, topic_id)

    # --- partitions that have moved to other nodes

    def begin_removal(self, topic: str, topic_id: UUID, index: int) -> None:
        """Stop a partition of which this node is no replica any more, and note that its files are to go.

        ``remove_partition`` has to follow. Raises ``StorageError`` if the note cannot be written: then the
        partition is closed, and nothing else has changed.
        """
        key = topic_id, index
        partition = self._partitions.pop(key, None)
        if partition is not None:
            partition.stop(
                StorageError(
                    f"{topic}-{index} has moved to other nodes", code=ErrorCode.not_leader_or_follower
                )
            )
        self.offline.pop(key, None)
        self.damage.forget_partition(topic_id, index)
        if not self._storage.exists(partition_directory(topic, topic_id, index)):
            return
        self._make_note(topic, self._removal_note(topic, topic_id, index))
        self._removing.add(key)

    def remove_partition(self, topic: str, topic_id: UUID, index: int) -> None:
        """Remove the files of a partition that has a note, and of no other. Slow: runs in a thread."""
        note = self._removal_note(topic, topic_id, index)
        if self._storage.exists(note):
            directory = partition_directory(topic, topic_id, index)
            self._storage.remove_tree(directory)
            # The note must outlive the files that it covers, also in a crash.
            self._storage.sync_dir(f"{LOGS}/{topic}")
            # Durable before the note goes: if the partition comes back, its files must not count as lost.
            self.inventory.remove_one(directory)
            self.inventory.sync()
            self._storage.remove(note)
            # Should the partition come back, its new files must not find the old note beside them.
            self._storage.sync_dir(f"{LOGS}/{topic}")
        self._removing.discard((topic_id, index))

    def finish_removals(self) -> None:
        """Finish what a crash has interrupted; before anything is opened. Slow: runs in a thread."""
        for topic, topic_id, index, is_noted in self._on_disk():
            if is_noted:
                self.remove_partition(topic, topic_id, index)

    def found_on_disk(self) -> list[tuple[str, UUID, int]]:
        """Topic, topic id and index of every directory of a partition. Slow: runs in a thread."""
        return [
            (topic, topic_id, index) for topic, topic_id, index, is_noted in self._on_disk() if not is_noted
        ]

    def _on_disk(self) -> Iterator[tuple[str, UUID, int, bool]]:
        """Directories of partitions and, with True, removal notes."""
        for topic in self._storage.list_dir(LOGS):
            try:
                names = self._storage.list_dir(f"{LOGS}/{topic}")
            except StorageError:
                continue  # A file and not a directory, so it is not ours.
            for name in names:
                found = _PARTITION_NAME.fullmatch(name)
                if found is not None:
                    yield topic, UUID(hex=found[1]), int(found[2]), found[3] is not None

    def _removal_note(self, topic: str, topic_id: UUID, index: int) -> str:
        return f"{partition_directory(topic, topic_id, index)}{_NOTE_SUFFIX}"

    def _make_note(self, topic: str, note: str) -> None:
        try:
            self._storage.open(note, create=True).close()
        except DiskFull as error:
            if not self.give_up_reserve(error):
                raise
            self._storage.open(note, create=True).close()
        self._storage.sync_dir(f"{LOGS}/{topic}")

    def leftovers(self, known: Iterable[UUID]) -> tuple[list[tuple[str, UUID]], list[str]]:
        """(topics whose deletion was interrupted, directories that no metadata speaks of)."""
        known_ids = {topic_id.hex for topic_id in known}
        interrupted: list[tuple[str, UUID]] = []
        unknown: list[str] = []
        for topic in self._storage.list_dir(LOGS):
            try:
                names = self._storage.list_dir(f"{LOGS}/{topic}")
            except StorageError:
                # A file and not a directory, so it is not ours.
                unknown.append(f"{LOGS}/{topic}")
                continue
            noted = {found.hex for found in map(_noted_topic, names) if found is not None}
            for hex_id in sorted(noted):
                if hex_id in known_ids:
                    self.unmark_deleting(topic, UUID(hex_id))
                else:
                    interrupted.append((topic, UUID(hex_id)))
            unknown += [
                f"{LOGS}/{topic}/{name}"
                for name in names
                if name.partition("-")[0] not in known_ids | noted and _noted_topic(name) is None
            ]
        return interrupted, unknown

    def _deletion_note(self, topic: str, topic_id: UUID) -> str:
        return f"{LOGS}/{topic}/{topic_id.hex}{_NOTE_SUFFIX}"


def _noted_topic(name: str) -> UUID | None:
    """The id of the topic that a deletion note is for; None if the file is no such note."""
    if not name.endswith(_NOTE_SUFFIX):
        return None
    try:
        return UUID(hex=name.removesuffix(_NOTE_SUFFIX))
    except ValueError:
        return None


def _close_and_report(partition: Partition) -> bool:
    try:
        partition.close()
    except StorageError as error:
        logger.error("%s-%d did not stop cleanly: %s", partition.topic, partition.index, error)
        return False
    return partition.local_log.failure is None


_Samples = list[tuple[tuple[str, ...], float]]


def _by_partition(read: Callable[[Partition], float]) -> Callable[[Replicas], _Samples]:
    """Samples of a metric: one for every open partition."""

    def samples(replicas: Replicas) -> _Samples:
        return [((each.topic, str(each.index)), read(each)) for each in replicas]

    return samples


def _by_topic(read: Callable[[Partition], float]) -> Callable[[Replicas], _Samples]:
    """Samples of a metric: one for every topic, the sum over its open partitions."""

    def samples(replicas: Replicas) -> _Samples:
        sums: dict[str, float] = {}
        for each in replicas:
            sums[each.topic] = sums.get(each.topic, 0) + read(each)
        return [((topic,), total) for topic, total in sums.items()]

    return samples


_PARTITION: Final = ("topic", "partition")

REPLICA_METRICS: Final[Sequence[Metric[Replicas]]] = (
    gauge("tidemill_partitions_open", "Partitions with open files.", len),
    gauge(
        "tidemill_partitions_stopped",
        "Partitions out of service.",
        lambda replicas: sum(1 for _ in replicas.stopped()),
    ),
    gauges(
        "tidemill_log_end_offset", "Next offset.", _PARTITION, _by_partition(lambda each: each.log_end_offset)
    ),
    gauges(
        "tidemill_high_watermark",
        "First offset that consumers do not see yet.",
        _PARTITION,
        _by_partition(lambda each: each.high_watermark),
    ),
    gauges(
        "tidemill_log_start_offset",
        "Oldest offset.",
        _PARTITION,
        _by_partition(lambda each: each.log_start_offset),
    ),
    gauges("tidemill_log_bytes", "Bytes on disk.", _PARTITION, _by_partition(lambda each: each.size_bytes)),
    counters(
        "tidemill_topic_bytes_in_total",
        "Bytes of batches produced.",
        ("topic",),
        _by_topic(lambda each: each.bytes_in),
    ),
    counters(
        "tidemill_topic_bytes_out_total",
        "Bytes of batches fetched.",
        ("topic",),
        _by_topic(lambda each: each.bytes_out),
    ),
)
