"""Those who use a cluster in a story: plain records, transactions, tables. Each implements ``User``.

``pace`` is how calm its clients are: 1 is busy, more is calmer.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from support.cluster_clients import Committer, IdempotentProducer, LooseProducer, Reader
from support.cluster_story import ClusterStory, insist, newest_records
from support.cluster_transactions import TransactionalWriter
from support.history import History, check
from tidemill.replication.rules.state import Role

__all__ = (
    "COMPACTED",
    "LATEST",
    "LATEST_PRODUCER",
    "PARTITIONS",
    "SMALL_SEGMENTS",
    "TOPIC",
    "RecordUsers",
    "TransactionUsers",
)

TOPIC, LATEST, PARTITIONS = "orders", "latest", 2
SMALL_SEGMENTS = {"internal.segment.bytes": "2000", "index.interval.bytes": "200"}
COMPACTED = {
    **SMALL_SEGMENTS,
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.01",
    "internal.segment.bytes": "300",
}
_FIRST_PRODUCER_ID = 1_000_000
#: Writes the compacted topic; its keys are named after it.
LATEST_PRODUCER = _FIRST_PRODUCER_ID + 99
_LOOKS_PER_FOLD = 4


class RecordUsers:
    """Idempotent producers and one without sequences, readers old and new, a group that commits offsets.

    One topic is compacted: the newest acknowledged record of a key must stay, or one behind it.
    """

    def __init__(self, pace: float = 1.0, producers: int = 3) -> None:
        self.pace = pace
        self.history = History()
        self.newest_acked: dict[str, tuple[int, str]] = {}
        self._producer_count = producers
        #: By key, the offset of its newest record that was ever seen below a high watermark.
        self._newest_committed: dict[bytes, int] = {}
        self._looks = 0

    async def prepare(self, story: ClusterStory) -> None:
        await story.create_kept(TOPIC, PARTITIONS, SMALL_SEGMENTS)
        await story.create_kept(LATEST, 1, COMPACTED)
        self.story, client, old_client = story, story.client, story.client.another()
        self.producers = [
            IdempotentProducer(
                client, self.history, TOPIC, number % PARTITIONS, _FIRST_PRODUCER_ID + number, pace=self.pace
            )
            for number in range(self._producer_count)
        ]
        self.producers.append(
            IdempotentProducer(
                client,
                History(),
                LATEST,
                0,
                LATEST_PRODUCER,
                keys=8,
                on_acked=self._note_newest,
                pace=self.pace,
            )
        )
        self.loose = LooseProducer(client, self.history, TOPIC, 0, "loose", pace=self.pace)
        self.readers = [
            Reader(
                old_client if is_old else client,
                self.history,
                name,
                TOPIC,
                partition,
                isolated=isolated,
                knows_epochs=not is_old,
                pace=self.pace,
            )
            for partition in range(PARTITIONS)
            for name, isolated, is_old in (
                ("live", False, False),
                ("live committed", True, False),
                ("old client", False, True),
            )
        ]
        self.committer = Committer(client, "workers", TOPIC, pace=self.pace)
        self.drains = [
            Reader(client, self.history, name, TOPIC, partition, isolated=isolated)
            for partition in range(PARTITIONS)
            for name, isolated in (("drain", False), ("drain committed", True))
        ]
        self.newest = Reader(client, History(), "drain", LATEST, 0)

    def _note_newest(self, key: str, value: str, offset: int) -> None:
        if offset > self.newest_acked.get(key, (-1, ""))[0]:
            self.newest_acked[key] = (offset, value)

    @property
    def _clients(self) -> list[Any]:
        return [*self.producers, self.loose, *self.readers, self.committer]

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [each.run() for each in self._clients]

    def close(self) -> None:
        for each in self._clients:
            each.is_closing = True

    @property
    def at_rest(self) -> bool:
        return not any(each.unacked for each in self.producers)

    async def drain(self) -> bool:
        for reader in (*self.drains, self.newest):
            if not await reader.drain():
                return False
        return await self.committer.fetch()

    def observe(self) -> None:
        """Every replica has the newest record of each key, or one behind it, below its high watermark.

        A follower may lack it while it copies a log that is compacted already, until it gets the record
        behind it, which was committed when it took the other one's place.
        """
        self._looks += 1
        if self._looks % _LOOKS_PER_FOLD:
            return
        replicas = [
            (node_id, partition)
            for node_id, partition in self.story.cluster.partitions(LATEST)
            if partition.failure is None and not partition.local_log.is_truncating
        ]
        for _, partition in replicas:
            for encoded, (offset, _) in newest_records(partition.local_log, partition.high_watermark).items():
                self._newest_committed[encoded] = max(offset, self._newest_committed.get(encoded, -1))
        for node_id, partition in replicas:
            newest = newest_records(partition.local_log)
            for key, (offset, value) in self.newest_acked.items():
                found = newest.get(key.encode(), (-1, b""))[0]
                is_behind = (
                    partition.role is Role.FOLLOWER
                    and self._newest_committed.get(key.encode(), -1) >= partition.log_end_offset
                )
                insist(
                    found >= offset or offset >= partition.high_watermark or is_behind,
                    f"{value} of {key} was acknowledged at {offset}, and node {node_id} has {found}",
                )

    def check(self) -> None:
        violations = check(self.history, "drain", "drain committed")
        insist(not violations, f"{violations[:5]}")
        insist(not self.committer.violations, f"{self.committer.violations}")
        found = {key: (offset, value) for offset, key, value in self.newest.records}
        for key, (offset, value) in self.newest_acked.items():
            newer = found.get(key, (-1, ""))
            insist(newer[0] >= offset, f"{value} of {key} was acknowledged at {offset}, and {newer} is left")
            insist(newer[0] > offset or newer[1] == value, f"{key} at {offset} was {value}, and is {newer}")

    @property
    def acknowledged(self) -> int:
        return sum(1 for _ in self.history.of("acked"))

    def __repr__(self) -> str:
        unacked = {each.name: each.unacked for each in self.producers if each.unacked}
        return f"producers {unacked}, committer {self.committer.refusal}"


class TransactionUsers:
    """Transactional writers over two partitions, of both protocols, beside an idempotent producer."""

    def __init__(self, pace: float = 1.0, writers: int = 3) -> None:
        self.pace = pace
        self.history = History()
        self._writer_count = writers

    async def prepare(self, story: ClusterStory) -> None:
        await story.create_kept(TOPIC, PARTITIONS, SMALL_SEGMENTS)
        client, history = story.client, self.history
        self.producer = IdempotentProducer(client, history, TOPIC, 0, _FIRST_PRODUCER_ID, pace=self.pace)
        places = [(TOPIC, partition) for partition in range(PARTITIONS)]
        self.writers = [
            TransactionalWriter(client, history, f"t{number}", places, is_v2=bool(number % 2), pace=self.pace)
            for number in range(self._writer_count)
        ]
        self.readers = [
            Reader(client, history, name, TOPIC, partition, isolated=isolated, pace=self.pace)
            for partition in range(PARTITIONS)
            for name, isolated in (("live", False), ("live committed", True))
        ]
        self.drains = [
            Reader(client, history, name, TOPIC, partition, isolated=isolated)
            for partition in range(PARTITIONS)
            for name, isolated in (("drain", False), ("drain committed", True))
        ]

    @property
    def _clients(self) -> list[Any]:
        return [self.producer, *self.writers, *self.readers]

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        return [each.run() for each in self._clients]

    def close(self) -> None:
        for each in self._clients:
            each.is_closing = True

    def observe(self) -> None:
        pass

    @property
    def at_rest(self) -> bool:
        return not self.producer.unacked and all(writer.at_rest for writer in self.writers)

    async def drain(self) -> bool:
        for reader in self.drains:
            if not await reader.drain():
                return False
        return True

    def check(self) -> None:
        violations = check(self.history, "drain", "drain committed")
        insist(not violations, f"{violations[:5]}")
        ends = {(reader.partition, reader.position) for reader in self.drains}
        insist(len(ends) == PARTITIONS, f"a transaction that is over holds up readers: {sorted(ends)}")

    @property
    def acknowledged(self) -> int:
        return sum(1 for _ in self.history.of("acked"))

    @property
    def committed(self) -> int:
        return sum(writer.committed for writer in self.writers)

    def __repr__(self) -> str:
        return f"producer {self.producer.unacked}, " + ", ".join(map(repr, self.writers))
