"""Committed offsets of the groups of one shard. Pure.

Reading answers from memory. Changing is two steps: a function here says which records stand for the change,
and ``replay`` applies a record once it is in the log. Loading uses the same ``replay``.

An offset that is committed inside of a transaction is pending until that ends: it counts from then on, or
vanishes. What was written later wins: an offset committed outside of the transaction, or in another one,
after the pending commit was written makes that one void, whatever becomes of its transaction.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from tidemill.errors import ErrorCode
from tidemill.groups.memory import GROUP_BYTES, OFFSET_BYTES
from tidemill.groups.messages import CommittedOffset
from tidemill.groups.records import OffsetCommit, OffsetCommitRecord
from tidemill.wire.guard import MAX_STRING_BYTES
from tidemill.wire.jobs import CURSOR_GROUP_PREFIX

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator

    from tidemill.groups.consumer.handlers import Group
    from tidemill.groups.messages import OffsetCommitRequest, OffsetToCommit, TopicPartition
    from tidemill.groups.settings import GroupSettings

__all__ = ("NO_PRODUCER_ID", "OffsetStore", "PendingOffsets")

NO_PRODUCER_ID = -1
"""Stands for a producer id where a record is not part of any transaction."""


#: Offsets that one transaction may have in one partition of ``__consumer_offsets``. Its marker settles all.
_PENDING_MAX = 4_000


class OffsetStore:
    """The last committed offsets of one shard, by group, topic and partition."""

    def __init__(self) -> None:
        self._by_group: dict[str, dict[str, dict[int, OffsetCommit]]] = {}
        self.pending = PendingOffsets(self._resize)
        self._bytes_of: dict[str, int] = {}
        #: By group: the host of the client that committed last; not known before the first commit since the
        #: start.
        self._committer_hosts: dict[str, str] = {}
        self._resized: set[str] = set()

    # -- memory ----------------------------------------------------------------------------------------

    def bytes_by_host(self, group_id: str) -> dict[str, int]:
        """Estimate of the memory of a group's offsets; it counts for the client that committed last."""
        size = self._bytes_of.get(group_id)
        return {} if size is None else {self._committer_hosts.get(group_id, ""): size}

    def sized(self) -> Collection[str]:
        """The groups that have offsets, also in open transactions."""
        return self._bytes_of.keys()

    def is_resized(self, group_id: str) -> bool:
        """Whether ``bytes_by_host`` of a group may have changed since this was last asked."""
        is_resized = group_id in self._resized
        self._resized.discard(group_id)
        return is_resized

    def take_resized(self) -> set[str]:
        """The groups whose ``bytes_by_host`` may have changed since this was last asked."""
        resized, self._resized = self._resized, set()
        return resized

    def asked_bytes(self, request: OffsetCommitRequest, producer_id: int = NO_PRODUCER_ID) -> int:
        """Estimate of the memory that a commit needs beyond what it replaces."""
        group_id = request.group_id
        topics = self._by_group.get(group_id, {})
        asked = 0 if group_id in self._bytes_of else _group_bytes(group_id)
        asked += sum(
            _topic_bytes(name) for name in {entry.topic for entry in request.offsets} - topics.keys()
        )
        for entry in request.offsets:
            size = OFFSET_BYTES + len(entry.metadata or "")
            if producer_id == NO_PRODUCER_ID:
                known = topics.get(entry.topic, {}).get(entry.partition)
                asked += size - (0 if known is None else _offset_bytes(known))
            elif not self.pending.has(group_id, (entry.topic, entry.partition), producer_id):
                asked += OFFSET_BYTES + size
        return asked

    def is_too_much(self, request: OffsetCommitRequest, producer_id: int) -> bool:
        """Whether a transaction would have more offsets here than can be settled in one turn."""
        return self.pending.count(producer_id) + len(request.offsets) > _PENDING_MAX

    def note_committer(self, group_id: str, host: str) -> None:
        """Count a group's offsets as those of a client that commits."""
        if self._committer_hosts.get(group_id) != host:
            self._committer_hosts[group_id] = host
            self._resized.add(group_id)

    def _resize(self, group_id: str, change: int) -> None:
        size = self._bytes_of.get(group_id)
        if size is None:
            size = _group_bytes(group_id)
        size += change
        self._resized.add(group_id)
        if size > _group_bytes(group_id):
            self._bytes_of[group_id] = size
        else:
            # Nothing is left.
            self._bytes_of.pop(group_id, None)
            self._committer_hosts.pop(group_id, None)

    # -- change ----------------------------------------------------------------------------------------

    def replay(self, record: OffsetCommitRecord, producer_id: int = NO_PRODUCER_ID) -> None:
        """Apply a record that is in the log, as part of the producer's transaction if there is one."""
        if producer_id != NO_PRODUCER_ID:
            self.pending.add(producer_id, record)
        else:
            self.pending.overtake(record)
            self._apply(record)

    def replay_marker(self, producer_id: int, *, commit: bool) -> None:
        """Settle the offsets of a producer's transaction that has ended: they count now, or never will."""
        for record in self.pending.end(producer_id, commit=commit):
            self._apply(record)

    def _apply(self, record: OffsetCommitRecord) -> None:
        group_id, topic = record.group_id, record.topic
        topics = self._by_group.get(group_id, {})
        partitions = topics.get(topic, {})
        before = partitions.get(record.partition)
        change = 0 if before is None else -_offset_bytes(before)
        if record.value is not None:
            change += _offset_bytes(record.value) + (0 if topic in topics else _topic_bytes(topic))
            self._by_group.setdefault(group_id, topics).setdefault(topic, partitions)
            partitions[record.partition] = record.value
        elif before is not None:
            del partitions[record.partition]
            if not partitions:
                change -= _topic_bytes(topic)
                del topics[topic]
                if not topics:
                    del self._by_group[group_id]
        if change:
            self._resize(group_id, change)

    def commit(
        self, request: OffsetCommitRequest, settings: GroupSettings, now_ms: int
    ) -> tuple[list[OffsetCommitRecord], dict[TopicPartition, ErrorCode]]:
        """The records of a commit, and the result for each partition."""
        expire_at_ms = now_ms + request.retention_ms if request.retention_ms >= 0 else None
        records = []
        results: dict[TopicPartition, ErrorCode] = {}
        for entry in request.offsets:
            error = _check(entry, settings)
            results[entry.topic, entry.partition] = error
            if error is ErrorCode.none:
                commit = OffsetCommit(
                    entry.offset, entry.leader_epoch, entry.metadata or "", now_ms, expire_at_ms
                )
                records.append(OffsetCommitRecord(request.group_id, entry.topic, entry.partition, commit))
        return records, results

    def delete(
        self, group: Group, partitions: Iterable[TopicPartition]
    ) -> tuple[list[OffsetCommitRecord], dict[TopicPartition, ErrorCode]]:
        """The tombstones for these partitions; topics that members consume are refused."""
        records = []
        results: dict[TopicPartition, ErrorCode] = {}
        for topic, partition in partitions:
            if group.is_subscribed_to(topic):
                results[topic, partition] = ErrorCode.group_subscribed_to_topic
                continue
            exists = self.get(group.group_id, topic, partition) is not None
            exists = exists or self.pending.has(group.group_id, (topic, partition))
            if exists and (topic, partition) not in results:
                records.append(OffsetCommitRecord(group.group_id, topic, partition, None))
            results[topic, partition] = ErrorCode.none
        return records, results

    def tombstones_of_group(self, group_id: str) -> list[OffsetCommitRecord]:
        """Tombstones for all that the group has committed."""
        partitions = {(topic, partition): None for topic, partition, _ in self.of(group_id)}
        partitions |= dict.fromkeys(self.pending.of_group(group_id))
        return [OffsetCommitRecord(group_id, *partition, None) for partition in partitions]

    def tombstones_of_topics(
        self, group_id: str, is_gone: Callable[[str], bool], most: int
    ) -> list[OffsetCommitRecord]:
        """Tombstones for what a group has committed for topics that are gone: ``most`` at most."""
        found: dict[TopicPartition, None] = {}
        for topic, partitions in self._by_group.get(group_id, {}).items():
            if len(found) < most and is_gone(topic):
                found |= dict.fromkeys((topic, partition) for partition in partitions)
        if len(found) < most:
            found |= dict.fromkeys(each for each in self.pending.of_group(group_id) if is_gone(each[0]))
        return [OffsetCommitRecord(group_id, *partition, None) for partition in islice(found, most)]

    def expired(self, group: Group, settings: GroupSettings, now_ms: int) -> Iterator[OffsetCommitRecord]:
        """Tombstones for the group's offsets that are past their retention."""
        for topic, partitions in self._by_group.get(group.group_id, {}).items():
            if group.is_subscribed_to(topic):
                continue
            for partition, commit in partitions.items():
                is_pending = self.pending.has(group.group_id, (topic, partition))
                if not is_pending and _is_expired(group, commit, settings, now_ms):
                    yield OffsetCommitRecord(group.group_id, topic, partition, None)

    # -- read ------------------------------------------------------------------------------------------

    def of(self, group_id: str) -> Iterator[tuple[str, int, OffsetCommit]]:
        """Everything that the group has committed."""
        for topic, partitions in self._by_group.get(group_id, {}).items():
            for partition, commit in partitions.items():
                yield topic, partition, commit

    def groups(self) -> list[str]:
        """The groups that have committed anything."""
        return list(self._by_group)

    def topic_count(self, group_id: str) -> int:
        """The number of topics for which the group has committed."""
        return len(self._by_group.get(group_id, ()))

    def count(self, group_id: str) -> int:
        """The number of partitions for which the group has committed."""
        return sum(len(partitions) for partitions in self._by_group.get(group_id, {}).values())

    def get(self, group_id: str, topic: str, partition: int) -> OffsetCommit | None:
        """What the group committed for one partition."""
        return self._by_group.get(group_id, {}).get(topic, {}).get(partition)

    def fetch(
        self, group_id: str, partitions: Iterable[TopicPartition] | None, *, require_stable: bool = False
    ) -> dict[TopicPartition, CommittedOffset]:
        """The committed offsets of these partitions, or of all that have one if None.

        ``require_stable``: where an open transaction may change the offset, an error is given instead of it.
        """
        if partitions is None:
            partitions = [(topic, partition) for topic, partition, _ in self.of(group_id)]
        unstable = CommittedOffset(error=ErrorCode.unstable_offset_commit)
        return {
            partition: unstable
            if require_stable and self.pending.has(group_id, partition)
            else _shown(self.get(group_id, *partition))
            for partition in partitions
        }


class PendingOffsets:
    """Offsets that were committed inside of transactions that are still open.

    They are kept by group, partition and producer; None stands for a commit that is void already.
    """

    def __init__(self, resize: Callable[[str, int], None]) -> None:
        #: Is told by how many bytes a group grows or shrinks.
        self._resize = resize
        # The producers of one partition stand in the order of their last commits.
        self._by_group: dict[str, dict[TopicPartition, dict[int, OffsetCommit | None]]] = {}
        self._by_producer: dict[int, dict[tuple[str, TopicPartition], None]] = {}

    # -- change ----------------------------------------------------------------------------------------

    def add(self, producer_id: int, record: OffsetCommitRecord) -> None:
        """Note a commit inside of the producer's transaction that is in the log now."""
        partition = (record.topic, record.partition)
        producers = self._by_group.setdefault(record.group_id, {}).setdefault(partition, {})
        if producer_id in producers:
            self._resize(record.group_id, -_pending_bytes(producers.pop(producer_id)))
        producers[producer_id] = record.value
        self._resize(record.group_id, _pending_bytes(record.value))
        self._by_producer.setdefault(producer_id, {})[record.group_id, partition] = None

    def overtake(self, record: OffsetCommitRecord) -> None:
        """Note a commit or deletion outside of transactions: it voids what is pending for the partition."""
        partition = (record.topic, record.partition)
        producers = self._by_group.get(record.group_id, {}).get(partition, {})
        for producer_id in tuple(producers):
            if record.value is None:
                self._remove(producer_id, record.group_id, partition)
            else:
                self._void(record.group_id, producers, producer_id)

    def end(self, producer_id: int, *, commit: bool) -> list[OffsetCommitRecord]:
        """Remove what is pending in a transaction that has ended; gives the records that it commits."""
        committed = []
        for group_id, partition in tuple(self._by_producer.get(producer_id, ())):
            producers = self._by_group[group_id][partition]
            value = producers[producer_id]
            if commit and value is not None:
                committed.append(OffsetCommitRecord(group_id, *partition, value))
                for other_id in producers:
                    if other_id == producer_id:
                        break
                    self._void(group_id, producers, other_id)
            self._remove(producer_id, group_id, partition)
        return committed

    def _void(self, group_id: str, producers: dict[int, OffsetCommit | None], producer_id: int) -> None:
        self._resize(group_id, _pending_bytes(None) - _pending_bytes(producers[producer_id]))
        producers[producer_id] = None

    def _remove(self, producer_id: int, group_id: str, partition: TopicPartition) -> None:
        partitions = self._by_group[group_id]
        producers = partitions[partition]
        self._resize(group_id, -_pending_bytes(producers.pop(producer_id)))
        if not producers:
            del partitions[partition]
            if not partitions:
                del self._by_group[group_id]
        of_producer = self._by_producer[producer_id]
        del of_producer[group_id, partition]
        if not of_producer:
            del self._by_producer[producer_id]

    # -- read ------------------------------------------------------------------------------------------

    def count(self, producer_id: int) -> int:
        """How many offsets the open transaction of a producer holds, of all groups."""
        return len(self._by_producer.get(producer_id, ()))

    def has(self, group_id: str, partition: TopicPartition, producer_id: int | None = None) -> bool:
        """Whether an open transaction (of this producer, if one is given) holds the group's commit for it."""
        producers = self._by_group.get(group_id, {}).get(partition)
        return producers is not None and (producer_id is None or producer_id in producers)

    def has_any(self, group_id: str) -> bool:
        """Whether an open transaction holds any commit of this group."""
        return group_id in self._by_group

    def of_group(self, group_id: str) -> list[TopicPartition]:
        """The partitions that open transactions hold commits of this group for."""
        return list(self._by_group.get(group_id, ()))


def _group_bytes(group_id: str) -> int:
    return GROUP_BYTES + len(group_id)


def _topic_bytes(topic: str) -> int:
    return OFFSET_BYTES + len(topic)


def _offset_bytes(commit: OffsetCommit) -> int:
    return OFFSET_BYTES + len(commit.metadata)


def _pending_bytes(commit: OffsetCommit | None) -> int:
    return 2 * OFFSET_BYTES + (0 if commit is None else len(commit.metadata))


def _check(entry: OffsetToCommit, settings: GroupSettings) -> ErrorCode:
    metadata = entry.metadata or ""
    too_large = len(metadata) > settings.max_offset_metadata_size or len(metadata.encode()) > MAX_STRING_BYTES
    return ErrorCode.offset_metadata_too_large if too_large else ErrorCode.none


def _is_expired(group: Group, commit: OffsetCommit, settings: GroupSettings, now_ms: int) -> bool:
    if group.group_id.startswith(CURSOR_GROUP_PREFIX):
        return False  # The position of a cursor: only its owner may delete it.
    base_ms = group.expiry_base_ms(commit.committed_at_ms)
    if base_ms is None:
        return False
    if commit.expire_at_ms is not None:
        return now_ms >= commit.expire_at_ms
    return now_ms - base_ms >= settings.offsets_retention_ms


def _shown(commit: OffsetCommit | None) -> CommittedOffset:
    if commit is None:
        return CommittedOffset()
    return CommittedOffset(commit.offset, commit.leader_epoch, commit.metadata)
