"""Nodes with share groups, in memory, for tests of the client: a log per partition, locks, sessions.

They keep KIP-932's rules as far as a client sees them. Locks end when the test says so. A test can have the
next requests of an API answered with an error (``refuse``), or cut a connection (``drop``).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

from tidemill.client.cluster import PartitionInfo, TopicInfo
from tidemill.config.values import Address
from tidemill.errors import ApiError, ConnectionClosed, ErrorCode, NodeUnavailable, TidemillError
from tidemill.net.retry import is_transient
from tidemill.records.record import Record, build_batch

__all__ = ("PeerCluster", "PeerPartition")

LIMIT = 5
AVAILABLE, ACQUIRED, DONE, DEAD = "available", "acquired", "done", "dead"


@dataclass
class PeerPartition:
    """One partition as one share group reads it."""

    leader: int = 0
    leader_epoch: int = 1
    records: list[Record | None] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    delays_ms: dict[int, int] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)

    def write(self, *values: bytes | None, key: bytes | None = None) -> None:
        """Append records; None is an offset without one."""
        for value in values:
            self.records.append(None if value is None else Record(key, value, 1_000))
            self.states.append(AVAILABLE)
            self.counts.append(0)
            self.owners.append("")

    def release(self, member: str | None = None) -> None:
        """Locks end: those of one member, or all."""
        for offset, state in enumerate(self.states):
            if state == ACQUIRED and member in (None, self.owners[offset]):
                self.states[offset] = AVAILABLE

    def acquire(self, member: str, most: int) -> list[int]:
        taken = [offset for offset, state in enumerate(self.states) if state == AVAILABLE][:most]
        # The last attempt that Kafka's limit allows is made alone.
        last_attempts = [at for at, offset in enumerate(taken) if self.counts[offset] >= LIMIT - 1]
        if last_attempts:
            taken = taken[: max(1, last_attempts[0])]
        for offset in taken:
            self.states[offset], self.owners[offset] = ACQUIRED, member
            self.counts[offset] += 1
        return taken


class PeerConnection:
    """A connection to one of the nodes, with the session that it carries."""

    def __init__(self, cluster: PeerCluster, node_id: int) -> None:
        self.cluster = cluster
        self.node_id = node_id
        self.failed = False
        self.served = dict(cluster.served)
        self.epoch = 0
        self.member = ""
        self.partitions: set[tuple[UUID, int]] = set()

    def version_of(self, name: str, versions: Any = None) -> int:
        return self.cluster.version

    async def request(self, name: str, body: Any, **_: Any) -> Any:
        if self.failed:
            raise ConnectionClosed("closed")
        if name in ("ListOffsets", "DescribeShareRecords"):
            return self.look(name, body)
        self.cluster.requests.append((self.node_id, name, body))
        refusals = self.cluster.refusals[name]
        if refusals:
            refusal = refusals.popleft()
            if isinstance(refusal, TidemillError):
                raise refusal
            self.epoch += 1
            return SimpleNamespace(error_code=refusal, error_message=None)
        self.member = body["member_id"]
        if body["share_session_epoch"] == -1:
            self.end()
            return self.answer([])
        if body["share_session_epoch"] != self.epoch:
            return SimpleNamespace(error_code=ErrorCode.invalid_share_session_epoch, error_message=None)
        self.epoch += 1
        if name == "ShareFetch":
            return await self.fetch(body)
        await asyncio.sleep(0)
        answer = self.answer(self.acknowledge(body["topics"]))
        answer.topics = answer.responses
        return answer

    def look(self, name: str, body: Any) -> Any:
        """What the partitions have, for whoever asks for the lag."""
        if name == "DescribeShareRecords":
            states = self.cluster[body["topic"], body["partition"]].states
            counts = {"acquired": states.count(ACQUIRED), "available": states.count(AVAILABLE)}
            none = {"delayed": 0, "blocked": 0, "dead_letters_due": 0}
            ends = {"error_code": 0, "error_message": None, "end_offset": len(states)}
            return SimpleNamespace(**counts, **none, **ends)
        topics = []
        for topic in body["topics"]:
            name, entries = topic["name"], topic["partitions"]
            found = [
                SimpleNamespace(
                    partition_index=entry["partition_index"],
                    error_code=0,
                    offset=len(self.cluster[name, entry["partition_index"]].states),
                    timestamp=-1,
                )
                for entry in entries
            ]
            topics.append(SimpleNamespace(name=name, partitions=found))
        return SimpleNamespace(topics=topics)

    async def fetch(self, body: Any) -> Any:
        acknowledged = {
            (topic_id, index): error for topic_id, index, error in self.acknowledge_all(body["topics"])
        }
        for topic in body["topics"]:
            for part in topic["partitions"]:
                self.partitions.add((topic["topic_id"], part["partition_index"]))
        for topic in body["forgotten_topics_data"]:
            self.partitions -= {(topic["topic_id"], index) for index in topic["partitions"]}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + body["max_wait"] / 1000
        while True:
            parts = self.read(body["max_records"], acknowledged)
            if parts or loop.time() >= deadline:
                await self.cluster.answers.wait()
                return self.answer(parts)
            self.check()
            await asyncio.sleep(0.002)

    def answer(self, parts: list[tuple[UUID, Any]]) -> Any:
        return SimpleNamespace(
            error_code=ErrorCode.none,
            error_message=None,
            acquisition_lock_timeout=timedelta(milliseconds=self.cluster.lock_ms),
            responses=[SimpleNamespace(topic_id=topic_id, partitions=[each]) for topic_id, each in parts],
        )

    def check(self) -> None:
        if self.failed or self.node_id in self.cluster.dead:
            self.failed = True
            raise NodeUnavailable("the connection broke")

    def read(self, most: int, acknowledged: dict[tuple[UUID, int], int]) -> list[Any]:
        parts = []
        for topic_id, index in sorted(self.partitions, key=str):
            partition = self.cluster.partition(topic_id, index)
            was_acknowledged = (topic_id, index) in acknowledged
            ack_error = acknowledged.pop((topic_id, index), 0)
            if partition.leader != self.node_id:
                parts.append(part(topic_id, index, ErrorCode.not_leader_or_follower, ack_error))
                continue
            offsets = partition.acquire(self.member, most)
            if not offsets and not was_acknowledged:
                continue
            parts.append(part(topic_id, index, 0, ack_error, partition, offsets))
        return parts + [part(topic_id, index, 0, error) for (topic_id, index), error in acknowledged.items()]

    def acknowledge_all(self, topics: Any) -> list[tuple[UUID, int, int]]:
        return [
            (topic["topic_id"], each["partition_index"], self.acknowledge_part(topic["topic_id"], each))
            for topic in topics
            for each in topic["partitions"]
            if each.get("acknowledgement_batches") or each.get("batches")
        ]

    def acknowledge(self, topics: Any) -> list[Any]:
        return [part(topic_id, index, error, 0) for topic_id, index, error in self.acknowledge_all(topics)]

    def acknowledge_part(self, topic_id: UUID, each: Any) -> int:
        partition = self.cluster.partition(topic_id, each["partition_index"])
        if partition.leader != self.node_id:
            return ErrorCode.not_leader_or_follower
        if self.cluster.ack_refusals:
            return self.cluster.ack_refusals.popleft()
        changes: dict[int, tuple[int, int, str]] = {}
        for batch in each.get("acknowledgement_batches") or each.get("batches"):
            offsets = range(batch["first_offset"], batch["last_offset"] + 1)
            types = batch["acknowledge_types"]
            for at, offset in enumerate(offsets):
                kind = types[at if len(types) > 1 else 0]
                changes[offset] = kind, batch.get("delay_ms", -1), batch.get("reason", "")
        if any(
            partition.states[offset] != ACQUIRED or partition.owners[offset] != self.member
            for offset in changes
        ):
            return ErrorCode.invalid_record_state
        for offset, (kind, delay_ms, reason) in changes.items():
            if kind == 4:
                self.cluster.renewals += 1
                continue
            partition.states[offset] = {0: DEAD, 1: DONE, 2: AVAILABLE, 3: DEAD, 5: AVAILABLE}[kind]
            partition.counts[offset] -= kind == 5
            if delay_ms >= 0:
                partition.delays_ms[offset] = delay_ms
            if reason:
                partition.reasons[offset] = reason
        return 0

    def end(self) -> None:
        """The session ends: what it holds goes back."""
        for topic in self.cluster.topics.values():
            for partition in topic.parts:
                if partition.leader == self.node_id:
                    partition.release(self.member)

    async def close(self) -> None:
        if not self.failed:
            self.failed = True
            self.end()


@dataclass
class PeerTopic:
    topic_id: UUID
    parts: list[PeerPartition]


class PeerCluster:
    """What a ``Cluster`` is to a share consumer, with the nodes behind it."""

    def __init__(self, topics: dict[str, int], nodes: int = 1) -> None:
        self.closed = False
        self.timeout_ms = self.attempt_ms = 2_000
        self.servers = "peer:1"
        self.version = 2
        #: Versions of the nodes' extension APIs.
        self.served = {1090: (0, 1)}
        self.lock_ms = 30_000
        self.topics = {
            name: PeerTopic(uuid4(), [PeerPartition(leader=index % nodes) for index in range(count)])
            for name, count in topics.items()
        }
        self.nodes = {node: Address("peer", node + 1) for node in range(nodes)}
        self.dead: set[int] = set()
        self.members: dict[str, int] = {}
        self.left: list[str] = []
        self.heartbeats: list[Any] = []
        self.requests: list[tuple[int, str, Any]] = []
        self.refusals: dict[str, deque[Any]] = defaultdict(deque)
        self.ack_refusals: deque[int] = deque()
        self.renewals = 0
        #: Whether each transaction that ended was committed.
        self.ended: list[bool] = []
        #: Cleared while answers to fetches are on their way.
        self.answers = asyncio.Event()
        self.answers.set()
        self.connections: dict[tuple[int, str], PeerConnection] = {}
        self._seen: dict[str, TopicInfo] = {}

    def __getitem__(self, place: tuple[str, int]) -> PeerPartition:
        return self.topics[place[0]].parts[place[1]]

    def partition(self, topic_id: UUID, index: int) -> PeerPartition:
        return next(each for each in self.topics.values() if each.topic_id == topic_id).parts[index]

    def refuse(self, name: str, *refusals: Any) -> None:
        """Answer the next requests of an API with these codes, or raise these errors."""
        self.refusals[name].extend(refusals)

    def drop(self, node_id: int) -> None:
        """The connections to a node break."""
        for (node, _), connection in self.connections.items():
            if node == node_id:
                connection.failed = True
                connection.end()

    def move(self, topic: str, index: int, leader: int) -> None:
        """Another node leads the partition: locks are gone."""
        partition = self[topic, index]
        partition.leader = leader
        partition.leader_epoch += 1
        partition.release()

    # --- what a consumer calls

    def forget(self) -> None:
        self._seen.clear()

    async def topic(self, name: str, *, create: bool = False) -> TopicInfo:
        if name not in self.topics:
            raise ApiError(ErrorCode.unknown_topic_or_partition, name)
        topic = self.topics[name]
        partitions = tuple(
            PartitionInfo(index, each.leader, each.leader_epoch, (), (), ())
            for index, each in enumerate(topic.parts)
        )
        self._seen[name] = TopicInfo(name, topic.topic_id, False, partitions)
        return self._seen[name]

    async def leaders(self, partitions: Any) -> dict[int, list[tuple[str, int]]]:
        by_leader: dict[int, list[tuple[str, int]]] = {}
        for place in partitions:
            by_leader.setdefault(self[place].leader, []).append(place)
        return by_leader

    def known_topic(self, name: str) -> TopicInfo | None:
        return self._seen.get(name)

    async def connection(self, node_id: int, purpose: str = "") -> PeerConnection:
        if node_id in self.dead:
            raise NodeUnavailable(f"node {node_id} is dead")
        known = self.connections.get((node_id, purpose))
        if known is None or known.failed:
            known = self.connections[node_id, purpose] = PeerConnection(self, node_id)
        return known

    async def to_coordinator(self, key: str, name: str, body: Any, **_: Any) -> Any:
        if name in ("InitProducerId", "EndTxn"):
            if name == "EndTxn":
                self.ended.append(body["committed"])
            return SimpleNamespace(error_code=0, producer_id=7, producer_epoch=len(self.ended))
        self.heartbeats.append(body)
        if self.refusals[name]:
            refusal = self.refusals[name].popleft()
            if isinstance(refusal, TidemillError):
                raise refusal
            return SimpleNamespace(error_code=refusal, error_message=None)
        member = body["member_id"]
        if body["member_epoch"] == -1:
            self.members.pop(member, None)
            self.left.append(member)
        else:
            self.members[member] = 1
        names = body["subscribed_topic_names"]
        assignment = None if names is None else self._assignment(names)
        return SimpleNamespace(
            error_code=0,
            error_message=None,
            member_epoch=self.members.get(member, -1),
            heartbeat_interval=timedelta(milliseconds=20),
            assignment=assignment,
        )

    def _assignment(self, names: list[str]) -> Any:
        found = [self.topics[name] for name in names if name in self.topics]
        return SimpleNamespace(
            topic_partitions=[
                SimpleNamespace(topic_id=each.topic_id, partitions=range(len(each.parts))) for each in found
            ]
        )

    async def retrying(self, action: Callable[[], Awaitable[Any]], **options: Any) -> Any:
        for _ in range(50):
            try:
                return await action()
            except TidemillError as error:
                if not is_transient(error):
                    raise
                self.forget()
                await asyncio.sleep(0.001)
        raise NodeUnavailable("tried too often")


def part(
    topic_id: UUID,
    index: int,
    error: int,
    ack_error: int,
    partition: PeerPartition | None = None,
    offsets: list[int] | None = None,
) -> tuple[UUID, Any]:
    data, acquired = b"", []
    for offset in offsets or []:
        assert partition is not None
        record = partition.records[offset]
        if record is not None:
            data += build_batch([record], base_offset=offset)
        acquired.append(
            SimpleNamespace(first_offset=offset, last_offset=offset, delivery_count=partition.counts[offset])
        )
    return topic_id, SimpleNamespace(
        partition_index=index,
        error_code=ErrorCode(error),
        error_message=None,
        acknowledge_error_code=int(ack_error),
        current_leader=SimpleNamespace(
            leader_id=-1, leader_epoch=-1 if partition is None else partition.leader_epoch
        ),
        records=data,
        acquired_records=acquired,
    )
