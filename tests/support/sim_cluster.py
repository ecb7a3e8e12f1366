"""Replicas of several nodes on a virtual loop: the product's partitions, fetchers and leader services.

``SimMessages`` carries encoded messages between nodes; each takes its own time, so they overtake each other,
and they can be dropped or cut off in one direction. ``SimMetadata`` stands for the store and the controller:
it elects, registers and takes proposals by the rules, and tells each node of every change in order, later.
``ReplicaNode`` is one process on one ``FaultyStorage``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Literal, TypeVar
from uuid import UUID

import msgspec

from support.faulty_storage import FaultyStorage
from support.virtual_loop import VirtualLoop
from tidemill.cluster.messages import (
    PROTOCOL_VERSION,
    ClusterRequest,
    ClusterResponse,
    FetchRequest,
    FetchResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    ReplicaStateAckResponse,
    ReplicaStateRequest,
    RequestHeader,
)
from tidemill.config.topic import TopicConfig
from tidemill.coordination.clock import LoopClock
from tidemill.errors import ApiError, ErrorCode, StorageError
from tidemill.replication.fetching.fetcher import ReplicaFetcher
from tidemill.replication.fetching.leader_service import LeaderService, ProposalRefused
from tidemill.replication.log_work.flusher import Flusher
from tidemill.replication.partition import Partition
from tidemill.replication.replicas import Placement, Replicas
from tidemill.replication.rules.assignment import NO_LEADER, PartitionAssignment
from tidemill.replication.rules.in_sync import IsrProposal

__all__ = ("TOPIC", "TOPIC_ID", "ReplicaNode", "SimMessages", "SimMetadata")

TOPIC, TOPIC_ID = "t", UUID(int=7)
_CONFIG = TopicConfig(segment_bytes=600, index_interval_bytes=200)
_REQUESTS = msgspec.msgpack.Decoder(FetchRequest | ReplicaStateRequest | HeartbeatRequest)
_RESPONSES = msgspec.msgpack.Decoder(FetchResponse | ReplicaStateAckResponse | HeartbeatResponse)
_START_MS = 1_700_000_000_000
_R = TypeVar("_R", bound=ClusterResponse)


class SimMessages:
    """The ways between nodes. A message that is held or cut is lost; its sender waits in vain."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.nodes: dict[int, ReplicaNode] = {}
        self.cuts: set[tuple[int, int]] = set()
        self.drop_share = 0.0
        #: How many of the messages take much longer than the others.
        self.slow_share = 0.0

    async def way(self, source: int, target: int) -> bool:
        """Travel from one node to another. False if the message is lost."""
        rng = self.loop.rng
        seconds = 0.005 * rng.random() ** 3
        if rng.random() < self.slow_share:
            seconds += 2 * rng.random() ** 2
        await asyncio.sleep(seconds)
        return (source, target) not in self.cuts and rng.random() >= self.drop_share

    async def exchange(self, source: int, target: int, request: bytes) -> bytes | None:
        """What ``target`` answers; None if the question or the answer is lost."""
        if not await self.way(source, target):
            return None
        node = self.nodes.get(target)
        if node is None or node.is_dead:
            return None
        answer = await node.process.run(node.answer(request))
        return answer if await self.way(target, source) else None


class _Peers:
    """Implements ``PeerRequests`` for one node."""

    def __init__(self, node: ReplicaNode) -> None:
        self._node = node

    async def request(
        self,
        node_id: int,
        make: Callable[[RequestHeader], ClusterRequest],
        answer: type[_R],
        *,
        timeout_ms: int,
        purpose: Literal["fetch", "control"] = "control",
    ) -> _R:
        node = self._node
        header = RequestHeader(PROTOCOL_VERSION, 1, node.node_id, timeout_ms, node.node_epoch)
        data = msgspec.msgpack.encode(make(header))
        # A message goes on when its sender waits no longer, or is gone.
        travelling = node.messages.loop.create_task(
            node.messages.exchange(node.node_id, node_id, data), context=node.outside.copy()
        )
        done, _ = await asyncio.wait([travelling], timeout=timeout_ms / 1000)
        found = travelling.result() if done and travelling.exception() is None else None
        if found is None:
            if done:
                await asyncio.sleep(0.05)
            raise ApiError(ErrorCode.request_timed_out, f"node {node_id} does not answer")
        response = _RESPONSES.decode(found)
        assert isinstance(response, answer)
        return response


class ReplicaNode:
    """One process that holds every partition."""

    def __init__(
        self, node_id: int, storage: FaultyStorage, messages: SimMessages, metadata: SimMetadata
    ) -> None:
        self.node_id = node_id
        self.storage = storage
        self.messages = messages
        self.metadata = metadata
        self.loop = messages.loop
        self.node_epoch = 0
        self.process = self.loop.process(f"node {node_id}")
        self.outside = metadata.process.context
        self.is_dead = False
        self.unfit: list[tuple[Partition | None, str]] = []
        #: The nodes that it takes for dead.
        self.suspected: set[int] = set()
        self.disk_is_full = False
        messages.nodes[node_id] = self

    async def start(self) -> None:
        """Open everything, and register: the metadata gives the roles."""
        await self.process.run(self._start())
        self.metadata.watch(self)

    async def _start(self) -> None:
        self.flusher = Flusher(self.loop, self.loop.pool("flush", 2), self._now_ms)
        self.replicas = Replicas(
            self.storage,
            self.flusher.request,
            max_decompressed_bytes=1 << 20,
            clock_ms=self._now_ms,
            pools=self.loop.pool,
            node_id=self.node_id,
        )
        clock, peers = LoopClock(lambda: _START_MS + int(self.loop.time() * 1000)), _Peers(self)
        self.fetcher = ReplicaFetcher(peers, clock, self.loop.pool("cut", 1))
        self.service = LeaderService(
            self.replicas,
            peers,
            clock,
            propose=self._propose,
            report_unfit=self._report_unfit,
            suspected=lambda: self.suspected,
            disk_is_full=lambda: self.disk_is_full,
        )
        self.replicas.role_listeners += [self.fetcher.update, self.service.update]
        self.service.start()

    def _now_ms(self) -> int:
        return _START_MS + int(self.loop.time() * 1000)

    async def _propose(self, partition: Partition, proposal: IsrProposal) -> None:
        await self.metadata.propose(self.node_id, partition.index, proposal)

    def _report_unfit(self, partition: Partition | None, reason: str) -> None:
        self.unfit.append((partition, reason))
        if self.metadata.node_epochs[self.node_id] == self.node_epoch:
            self.metadata.expire(self.node_id)

    def apply(self, index: int, assignment: PartitionAssignment) -> None:
        """The metadata has told a record."""
        if self.is_dead:
            return
        placement = Placement(TOPIC, TOPIC_ID, index, assignment.leader_epoch, _CONFIG, assignment)
        for _, error in self.process.context.copy().run(self.replicas.apply, [placement]):
            self._report_unfit(None, str(error))

    def partition(self, index: int) -> Partition | None:
        return self.replicas.peek(TOPIC_ID, index)

    async def answer(self, data: bytes) -> bytes:
        """Answer another node's request."""
        request = _REQUESTS.decode(data)
        response: ClusterResponse
        if isinstance(request, FetchRequest):
            response = self.service.fetch_at_once(request) or await self.service.fetch(request)
        elif isinstance(request, ReplicaStateRequest):
            response = self.service.replica_state_at_once(request) or await self.service.replica_state(
                request
            )
        else:
            response = self.fetcher.heartbeat(request, self.replicas.peek)
        return msgspec.msgpack.encode(response)

    async def crash(self, *, power_loss: bool) -> FaultyStorage:
        """The process ends at once; returns what the next one finds."""
        self.is_dead = True
        storage = self.storage.crash(power_loss=power_loss)
        await self.process.kill()
        return storage

    async def stop(self) -> FaultyStorage:
        """Stop in an orderly way; returns what the next process finds."""
        with suppress(StorageError):
            await self.process.run(self._stop())
        return await self.crash(power_loss=False)

    async def _stop(self) -> None:
        await self.fetcher.close()
        await self.service.close()
        await self.flusher.drain(list(self.replicas))
        self.replicas.close()


class SimMetadata:
    """The store and the controller in one: elections, registrations and in-sync sets by the rules."""

    def __init__(self, loop: VirtualLoop, nodes: tuple[int, ...], partitions: int, min_isr: int) -> None:
        self.loop = loop
        self.process = loop.process("metadata")
        self.live: set[int] = set()
        self.node_epochs: dict[int, int] = {}
        self._next_epoch = 1
        self.records = [
            PartitionAssignment(
                NO_LEADER,
                0,
                nodes[index % len(nodes) :] + nodes[: index % len(nodes)],
                nodes[index % len(nodes) :] + nodes[: index % len(nodes)],
                min_isr=min_isr,
            )
            for index in range(partitions)
        ]
        self._watchers: dict[ReplicaNode, asyncio.Queue[tuple[int, PartitionAssignment]]] = {}
        #: How many of the answers to proposals are lost, and how long things take at most.
        self.lost_share = 0.0
        self.seconds_max = 0.01
        #: Nodes to which no news get through for now.
        self.cut_off: set[int] = set()
        #: Set for a moment when nobody is cut off any more.
        self.healed = asyncio.Event()

    def watch(self, node: ReplicaNode) -> None:
        """Tell a node of everything, from now on."""
        queue: asyncio.Queue[tuple[int, PartitionAssignment]] = asyncio.Queue()
        self._watchers[node] = queue
        for index, record in enumerate(self.records):
            queue.put_nowait((index, record))
        self.process.start(self._tell(node, queue))

    async def _tell(self, node: ReplicaNode, queue: asyncio.Queue[tuple[int, PartitionAssignment]]) -> None:
        while not node.is_dead:
            index, record = await queue.get()
            await self._pass_time()
            while node.node_id in self.cut_off:
                await self.healed.wait()
            node.apply(index, record)

    async def _pass_time(self) -> None:
        await asyncio.sleep(self.seconds_max * self.loop.rng.random() ** 2)

    def heal(self) -> None:
        """Nobody is cut off any more."""
        self.cut_off.clear()
        self.healed.set()
        self.healed.clear()

    def _commit(self, index: int, record: PartitionAssignment) -> None:
        known = self.records[index]
        if replace(record, partition_epoch=known.partition_epoch) == known:
            return
        self._put(index, record)

    def _put(self, index: int, record: PartitionAssignment) -> None:
        record = replace(record, partition_epoch=self.records[index].partition_epoch + 1)
        self.records[index] = record
        self.loop.note(f"{index}: {record}")
        for node in [node for node in self._watchers if node.is_dead]:
            del self._watchers[node]
        for queue in self._watchers.values():
            queue.put_nowait((index, record))

    # --- nodes

    def register(self, node_id: int, *, clean: bool = False, lost: bool = False) -> int:
        """A process of the node begins; returns its node epoch. ``lost``: on a new, empty disk."""
        self._next_epoch += 1
        self.node_epochs[node_id] = self._next_epoch
        for index, record in enumerate(self.records):
            if record.leader == node_id:
                record = replace(record, leader=NO_LEADER, leader_epoch=record.leader_epoch + 1)
            if lost:
                record = self.without_lost(record, node_id)
            elif not clean:
                record = self._without(record, node_id)
            self._commit(index, record)
        self.live.add(node_id)
        self._elect_all()
        return self._next_epoch

    def expire(self, node_id: int) -> None:
        """The node's lease is over."""
        self.live.discard(node_id)
        for index, record in enumerate(self.records):
            self._commit(index, self._without(record, node_id))
        self._elect_all()

    def without_lost(self, record: PartitionAssignment, node_id: int) -> PartitionAssignment:
        """The record without a replica that has lost its data."""
        isr = tuple(node for node in record.isr if node != node_id)
        elr = tuple(node for node in record.elr if node != node_id)
        assert isr or elr, "a story must not lose the last copy"
        return replace(record, isr=isr, elr=elr)

    def _without(self, record: PartitionAssignment, node_id: int) -> PartitionAssignment:
        """The record without a member, unless it is the last one."""
        isr = tuple(node for node in record.isr if node != node_id)
        if node_id not in record.isr or not any(node in self.live for node in isr):
            return record
        elr = (*record.elr, node_id) if len(isr) < record.min_isr else record.elr
        return replace(record, isr=isr, elr=elr)

    def _elect_all(self) -> None:
        for index, record in enumerate(self.records):
            if record.leader in self.live and record.leader in record.isr:
                continue
            candidates = [node for node in record.replicas if node in record.isr and node in self.live]
            from_elr = [node for node in record.elr if node in self.live]
            if candidates:
                elected = replace(record, leader=candidates[0])
            elif from_elr:
                # Members that are not live stay eligible: they have everything, too.
                members = tuple(dict.fromkeys((*record.elr, *record.isr)))
                elr = tuple(node for node in members if node != from_elr[0])
                elected = replace(record, leader=from_elr[0], isr=(from_elr[0],), elr=elr)
                if len(elected.isr) >= record.min_isr:
                    elected = replace(elected, elr=())
            elif record.leader != NO_LEADER:
                elected = replace(record, leader=NO_LEADER)
            else:
                continue
            self._commit(index, replace(elected, leader_epoch=record.leader_epoch + 1))

    # --- in-sync sets

    async def propose(self, source: int, index: int, proposal: IsrProposal) -> None:
        """A leader's proposal arrives, is decided, and the answer may be lost."""
        answer: asyncio.Future[bool] = self.loop.create_future()
        self.process.start(self._decide(source, index, proposal, answer))
        try:
            async with asyncio.timeout(1.0):
                taken = await asyncio.shield(answer)
        except TimeoutError:
            raise ApiError(ErrorCode.request_timed_out, "no answer from the controller") from None
        if not taken:
            raise ProposalRefused("the record has changed, or a member is not live")

    async def _decide(
        self, source: int, index: int, proposal: IsrProposal, answer: asyncio.Future[bool]
    ) -> None:
        await self._pass_time()
        record = self.records[index]
        taken = self.may_take(record, source, proposal)
        if taken:
            left = tuple(node for node in record.isr if node not in proposal.isr)
            elr = tuple(node for node in (*record.elr, *left) if node not in proposal.isr)
            if len(proposal.isr) >= record.min_isr:
                elr = ()
            self._put(index, replace(record, isr=proposal.isr, elr=elr))
        await self._pass_time()
        if self.loop.rng.random() >= self.lost_share and not answer.done():
            answer.set_result(taken)

    def may_take(self, record: PartitionAssignment, source: int, proposal: IsrProposal) -> bool:
        """Whether a proposal is taken."""
        added = set(proposal.isr) - set(record.isr)
        return (
            record.leader == source
            and record.leader_epoch == proposal.leader_epoch
            and record.partition_epoch == proposal.partition_epoch
            and all(node in self.live for node in added)
            and all(proposal.node_epochs[node] == self.node_epochs.get(node) for node in added)
        )
