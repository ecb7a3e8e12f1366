"""A leader's side of replication: answers its followers, keeps the in-sync sets, and watches the disk.

- A Fetch without news waits, without polling, until a log has grown or ``max_wait_ms`` is over. An answer is
  at most ``_ANSWER_BYTES`` large, but for a single batch that is larger.
- What a Fetch of few partitions finds, and a report about few, is answered in the turn in which it came.
- A large batch is kept in memory when it is written, and given to the followers from there: what was checked
  a moment ago is neither read nor checked again. What one follower was given from the disk is kept for the
  others, too. One that is further behind gets as much as an answer holds, not the others' small pieces.
- What goes to replicas that a reassignment adds, or that configs name, is throttled. While it is, their
  partitions are answered without records.
- A high watermark that has moved and that no Fetch has told is told by a Heartbeat, a little later and for
  all partitions together, so that a busy partition needs none.
- In-sync sets are proposed as soon as a follower can join, and by a timer when one has to leave.
- A replica whose disk has failed, is full or hangs is reported as unfit, whoever leads, again and again until
  it is well.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator
from functools import partial
from typing import Any, Final, NamedTuple
from uuid import UUID

from tidemill.cluster.messages import (
    ClusterErrorCode,
    FetchedPartition,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    HeartbeatPartition,
    HeartbeatRequest,
    HeartbeatResponse,
    ReplicaProgress,
    ReplicaStateAckResponse,
    ReplicaStateRequest,
    ReplicaStatus,
    ResponseHeader,
)
from tidemill.coordination.clock import Clock, Timer
from tidemill.coordination.turns import begin_slice, give_way
from tidemill.errors import TidemillError
from tidemill.log.segments.segment_reader import ReadBudget
from tidemill.replication.fetching.peer_requests import PeerRequests
from tidemill.replication.fetching.recent_reads import RecentReads
from tidemill.replication.partition import Partition
from tidemill.replication.replicas import Replicas
from tidemill.replication.rules.fitness import unfit_reason
from tidemill.replication.rules.in_sync import REPLICA_LAG_MS, IsrProposal
from tidemill.replication.rules.state import Role
from tidemill.replication.throttle import MoveThrottle, MoveWatch

__all__ = ("LeaderService", "ProposalRefused", "Propose", "ReportUnfit")

logger = logging.getLogger(__name__)

_ANSWER_BYTES: Final = 8 * 1024 * 1024
#: About half of what a follower asks for of a partition.
_LARGE_READ_BYTES: Final = 512 * 1024
#: A request about more partitions is served in a task, which gives way to others.
_AT_ONCE_MAX: Final = 8
_TICK_MS: Final = 500
#: How many partitions a tick looks at between two looks at the clock.
_TICKED_AT_ONCE: Final = 50
#: A tick that comes this late says that this node stood still; nobody else is to blame for that.
_LATE_MS: Final = 1_500
_PROPOSAL_PAUSE_MS: Final = 500
#: How long the metadata may take to show a proposal that was taken.
_RECORD_WAIT_S: Final = 2.0
_HEARTBEAT_DELAY_MS: Final = 50
_HEARTBEAT_TIMEOUT_MS: Final = 2_000
#: What was told longer ago is told again: the answer may not have arrived.
_TOLD_MS: Final = 30_000
_UNFIT_AGAIN_S: Final = 5.0
_NAMED_MAX: Final = 5


class ProposalRefused(TidemillError):
    """A proposal was refused for good: no attempt to send it was accepted, and none will be."""


Propose = Callable[[Partition, IsrProposal], Awaitable[None]]
"""Has the metadata take a proposal. Returns when it was taken; raises ``ProposalRefused`` only if it is
certain that it was not and never will be. Any other error means that nobody knows."""

ReportUnfit = Callable[[Partition, str], None]
"""Told that this node's replica should not lead, and why: its owner resigns, and keeps it from elections."""


_Found = tuple[Partition, FetchPartition, FetchedPartition]
"""A partition, what a follower wants of it, and what there is."""


class _Told(NamedTuple):
    """The offsets of a partition that a follower was last sent, and when."""

    leader_epoch: int
    high_watermark: int
    log_start_offset: int
    at_ms: int


_NOTHING_TOLD: Final = _Told(-1, -1, -1, -_TOLD_MS)


class LeaderService:
    """Serves the followers of everything that this node leads."""

    def __init__(
        self,
        replicas: Replicas,
        peers: PeerRequests,
        clock: Clock,
        *,
        propose: Propose,
        report_unfit: ReportUnfit,
        suspected: Callable[[], Collection[int]] = tuple,
        disk_is_full: Callable[[], bool] = lambda: False,
        replica_lag_ms: int = REPLICA_LAG_MS,
        throttle: MoveThrottle | None = None,
    ) -> None:
        """``suspected`` names the nodes that are dead or seem to be.

        They cannot join in-sync sets, leave them sooner, and get no Heartbeats.
        """
        self._disk_is_full = disk_is_full
        self.replica_lag_ms = replica_lag_ms
        self._replicas = replicas
        self._peers = peers
        self._clock = clock
        self._propose = propose
        self._report_unfit = report_unfit
        self._suspected = suspected
        self.throttle = throttle or MoveThrottle(0)
        #: Fetches that wait until the throttle lets go.
        self._held: set[asyncio.Future[bool]] = set()
        self._moves = MoveWatch()
        self._recent = RecentReads()
        self._loop = asyncio.get_running_loop()
        #: Bytes of records that followers were given.
        self.bytes_out = 0
        #: Led partitions that have followers.
        self._led: dict[Partition, None] = {}
        #: By follower, by partition.
        self._told: dict[int, dict[tuple[UUID, int], _Told]] = {}
        #: Led partitions whose high watermark has moved since the last heartbeats.
        self._moved: dict[Partition, None] = {}
        self._heartbeats: dict[int, asyncio.Task[None]] = {}
        self._heartbeat_timer: Timer | None = None
        #: Followers that did not answer their last Heartbeat: said in the log once.
        self._silent: set[int] = set()
        #: When the next proposal of a partition may be made.
        self._propose_after_ms: dict[Partition, int] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._refused_since_s: float | None = None
        self._unfit_at_s: dict[Partition, float] = {}
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin with the checks by time."""
        self._ticking = asyncio.create_task(self._tick_loop())

    async def close(self) -> None:
        """Stop everything that runs; a proposal under way has an unknown outcome."""
        if self._heartbeat_timer is not None:
            self._heartbeat_timer.cancel()
        tasks = [*self._tasks, *([] if self._ticking is None else [self._ticking])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def update(self, partition: Partition) -> None:
        """Take note of a partition's role, its followers or its in-sync set."""
        self._recent.forget(partition)
        if partition.as_leader.has_followers:
            if partition not in self._led:
                self._led[partition] = None
                partition.subscribe(self, partial(self._high_watermark_moved, partition))
                partition.as_leader.on_written = partial(self._written, partition)
            self._consider(partition)
        elif partition in self._led:
            del self._led[partition]
            partition.unsubscribe(self)
            partition.as_leader.on_written = None
            self._propose_after_ms.pop(partition, None)
            self._moved.pop(partition, None)
            for told in self._told.values():
                told.pop((partition.topic_id, partition.index), None)

    def set_rate(self, bytes_per_second: int) -> None:
        """Send at most so much in a second to replicas that are throttled; 0 is no limit."""
        self.throttle.set_rate(bytes_per_second, self._loop.time())
        for waiting in list(self._held):
            _resolve(waiting, True)

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    # --- Fetch

    def fetch_at_once(self, request: FetchRequest) -> FetchResponse | None:
        """Answer a follower's Fetch of few partitions that finds records; None if it may have to wait."""
        if len(request.partitions) > _AT_ONCE_MAX or not any(map(self._has_records, request.partitions)):
            return None
        answers, readable = list[FetchedPartition](), list[tuple[Partition, FetchPartition]]()
        for wanted in request.partitions:
            self._let_in_one(request, wanted, answers, readable)
        left, found = _ANSWER_BYTES, list[_Found]()
        for partition, wanted in readable:
            fetched = self._read_one(request.header.source, partition, wanted, left)
            found.append((partition, wanted, fetched))
            left -= len(fetched.records)
        if not answers and _ANSWER_BYTES - left < request.min_bytes:
            return None
        return self._answer(request, answers, found)

    def _has_records(self, wanted: FetchPartition) -> bool:
        partition = self._replicas.peek(wanted.partition.topic_id, wanted.partition.index)
        return partition is not None and partition.as_leader.has_news_at(wanted.offset)

    async def fetch(self, request: FetchRequest) -> FetchResponse:
        """Answer a follower's Fetch, at the latest when it has waited as long as it wants to."""
        begin_slice()
        # A follower that waits here longer would seem to lag as soon as the next record comes.
        until = self._loop.time() + min(request.max_wait_ms, self.replica_lag_ms // 2) / 1000
        answers, readable = await self._let_in(request)
        found = await self._read(request, readable)
        while not answers and sum(len(each.records) for _, _, each in found) < request.min_bytes:
            if any(self._must_answer(request.header.source, *each) for each in readable):
                break
            left = until - self._loop.time()
            if left <= 0 or not await self._next_tail(request.header.source, readable, left):
                found = await self._read(request, readable)
                break
            begin_slice()
            found = await self._read(request, readable)
            if any(each.error for _, _, each in found):
                break
        return self._answer(request, answers, found)

    def _answer(
        self,
        request: FetchRequest,
        answers: list[FetchedPartition],
        found: list[_Found],
    ) -> FetchResponse:
        answers += self._with_news(request, found)
        self.bytes_out += sum(len(answer.records) for answer in answers)
        return FetchResponse(ResponseHeader(request.header.correlation_id), answers)

    async def _let_in(
        self, request: FetchRequest
    ) -> tuple[list[FetchedPartition], list[tuple[Partition, FetchPartition]]]:
        """Note how far a follower is; gives answers for what it cannot read now, and what to read."""
        answers, readable = list[FetchedPartition](), list[tuple[Partition, FetchPartition]]()
        for wanted in request.partitions:
            self._let_in_one(request, wanted, answers, readable)
            await give_way()
        return answers, readable

    def _let_in_one(
        self,
        request: FetchRequest,
        wanted: FetchPartition,
        answers: list[FetchedPartition],
        readable: list[tuple[Partition, FetchPartition]],
    ) -> None:
        source, node_epoch = request.header.source, request.header.node_epoch
        partition = self._replicas.peek(wanted.partition.topic_id, wanted.partition.index)
        if partition is None:
            answers.append(FetchedPartition(wanted.partition, -1, -1, error=ClusterErrorCode.UNKNOWN_TOPIC))
            return
        refused = partition.as_leader.fetch(wanted, source, node_epoch, self._clock.now_ms())
        if refused is None:
            readable.append((partition, wanted))
            self._may_join(partition, source)
        else:
            answers.append(refused)

    async def _read(
        self, request: FetchRequest, readable: list[tuple[Partition, FetchPartition]]
    ) -> list[_Found]:
        """An answer for each partition with news, with records as long as there is room for them."""
        left, found, source = _ANSWER_BYTES, list[_Found](), request.header.source
        for partition, wanted in readable:
            if self._has_news(source, partition, wanted):
                fetched = self._read_one(source, partition, wanted, left)
                found.append((partition, wanted, fetched))
                left -= len(fetched.records)
            await give_way()
        return found

    def _has_news(self, source: int, partition: Partition, wanted: FetchPartition) -> bool:
        """Whether a follower may have to hear of a partition. Most are idle, and need no closer look."""
        return (
            wanted.durable < 0
            or partition.as_leader.has_news_at(wanted.offset)
            or not partition.leads_at(wanted.leader_epoch)
            or partition.failure is not None
            or not self._is_told(source, partition, partition.high_watermark, partition.log_start_offset)
        )

    def _is_told(self, source: int, partition: Partition, high_watermark: int, log_start: int) -> bool:
        """Whether a follower was sent these offsets, and not so long ago that it may lack them."""
        told = self._told_to(source, partition)
        is_same = told.high_watermark == high_watermark and told.log_start_offset == log_start
        return is_same and self._clock.now_ms() - told.at_ms <= _TOLD_MS

    def _read_one(
        self, source: int, partition: Partition, wanted: FetchPartition, left: int
    ) -> FetchedPartition:
        """The answer for one partition, if there is still room for ``left`` bytes of records."""
        is_throttled = self.throttle.applies_to(partition, source)
        is_held = is_throttled and self.throttle.wait_s(self._loop.time()) > 0
        known = None if is_held else self._recent.find(partition, wanted.offset, min(left, wanted.max_bytes))
        fetched = partition.as_leader.read(
            wanted,
            0 if is_held else left,
            at_least_one=left == _ANSWER_BYTES and not is_held,
            budget=ReadBudget(),
            known=known,
        )
        if known is None and len(fetched.records) and left >= wanted.max_bytes:
            self._keep(partition, wanted.offset, fetched.records, len(partition.as_leader.followers) - 1)
        if is_throttled:
            self.throttle.sent(len(fetched.records), self._loop.time())
        return fetched

    def _written(self, partition: Partition, offset: int, records: memoryview) -> None:
        self._keep(partition, offset, records, len(partition.as_leader.followers))

    def _keep(self, partition: Partition, offset: int, records: memoryview, wanted_by: int) -> None:
        is_large = len(records) >= _LARGE_READ_BYTES
        self._recent.keep(partition, offset, records, wanted_by, is_large=is_large)

    async def _next_tail(
        self, source: int, readable: list[tuple[Partition, FetchPartition]], seconds: float
    ) -> bool:
        """Wait until one of the logs has grown, or its leader has changed. False if the time was over.

        What the throttle holds back does not count as grown before it lets go.
        """
        woken: asyncio.Future[bool] = self._loop.create_future()
        wake = partial(_resolve, woken, True)
        timers = [self._loop.call_later(seconds, _resolve, woken, False)]
        held_s = self.throttle.wait_s(self._loop.time())
        try:
            for partition, wanted in readable:
                is_held = held_s > 0 and self.throttle.applies_to(partition, source)
                if is_held:
                    self._held.add(woken)
                    timers.append(self._loop.call_later(held_s, wake))
                elif partition.as_leader.has_news_at(wanted.offset):
                    wake()
                if not partition.leads_at(wanted.leader_epoch):
                    wake()
                if not is_held:
                    partition.as_leader.on_next_tail(woken, wake)
            return await woken
        finally:
            self._held.discard(woken)
            for timer in timers:
                timer.cancel()
            for partition, _ in readable:
                partition.as_leader.forget_tail(woken)

    def _must_answer(self, source: int, partition: Partition, wanted: FetchPartition) -> bool:
        """Whether the follower has to hear of a partition at once, though there is nothing to read.

        It asks whether its log is a part of this one, or has not been told the log start.
        """
        if wanted.durable < 0:
            return True
        told = self._told_to(source, partition)
        return told.log_start_offset != partition.log_start_offset and told.leader_epoch >= 0

    def _told_to(self, source: int, partition: Partition) -> _Told:
        told = self._told.get(source, {}).get((partition.topic_id, partition.index), _NOTHING_TOLD)
        return told if told.leader_epoch == partition.leader_epoch else _NOTHING_TOLD

    def _note_told(self, source: int, partition: Partition, answer: FetchedPartition, now_ms: int) -> None:
        self._told.setdefault(source, {})[partition.topic_id, partition.index] = _Told(
            partition.leader_epoch, answer.high_watermark, answer.log_start_offset, now_ms
        )

    def _with_news(self, request: FetchRequest, found: list[_Found]) -> list[FetchedPartition]:
        """The answers that tell the follower something new."""
        source, now_ms, news = request.header.source, self._clock.now_ms(), []
        for partition, wanted, answer in found:
            is_told = self._is_told(source, partition, answer.high_watermark, answer.log_start_offset)
            if wanted.durable < 0 or answer.error or len(answer.records) or not is_told:
                news.append(answer)
                if not answer.error:
                    self._note_told(source, partition, answer, now_ms)
        return news

    # --- ReplicaState

    def replica_state_at_once(self, request: ReplicaStateRequest) -> ReplicaStateAckResponse | None:
        """Take a follower's report about few partitions; None if it is about more."""
        if len(request.partitions) > _AT_ONCE_MAX:
            return None
        answers = [self._take_report(request, progress) for progress in request.partitions]
        return ReplicaStateAckResponse(ResponseHeader(request.header.correlation_id), answers)

    async def replica_state(self, request: ReplicaStateRequest) -> ReplicaStateAckResponse:
        """Take a follower's reports of what is durable there."""
        begin_slice()
        answers = []
        for progress in request.partitions:
            answers.append(self._take_report(request, progress))
            await give_way()
        return ReplicaStateAckResponse(ResponseHeader(request.header.correlation_id), answers)

    def _take_report(self, request: ReplicaStateRequest, progress: ReplicaProgress) -> ReplicaStatus:
        source, node_epoch, where = request.header.source, request.header.node_epoch, progress.partition
        partition = self._replicas.peek(where.topic_id, where.index)
        if partition is None:
            return ReplicaStatus(where, in_sync=False, error=ClusterErrorCode.UNKNOWN_TOPIC)
        status = partition.as_leader.replica_state(progress, source, node_epoch, self._clock.now_ms())
        if not status.error and not status.in_sync:
            self._may_join(partition, source)
        return status

    # --- Heartbeat

    def _high_watermark_moved(self, partition: Partition) -> None:
        self._moved[partition] = None
        if self._heartbeat_timer is None:
            when_ms = self._clock.now_ms() + _HEARTBEAT_DELAY_MS
            self._heartbeat_timer = self._clock.call_at(when_ms, self._send_heartbeats)

    def _send_heartbeats(self) -> None:
        """Tell each follower the high watermarks that it was not told otherwise."""
        self._heartbeat_timer = None
        moved, self._moved = self._moved, {}
        by_node: dict[int, list[Partition]] = {}
        suspected = self._suspected()
        for partition in moved:
            for node_id in partition.as_leader.followers:
                if node_id in suspected:
                    continue  # Its next Fetch tells it.
                if self._told_to(node_id, partition).high_watermark < partition.high_watermark:
                    by_node.setdefault(node_id, []).append(partition)
        for node_id, partitions in by_node.items():
            if node_id in self._heartbeats:
                # Told with the next ones, which are sent when these were answered.
                self._moved.update(dict.fromkeys(partitions))
            else:
                self._heartbeats[node_id] = self._run(self._send_heartbeat(node_id, partitions))

    async def _send_heartbeat(self, node_id: int, partitions: list[Partition]) -> None:
        sent = {each: (each.leader_epoch, each.high_watermark) for each in partitions}
        told = [HeartbeatPartition(each.id, *sent[each]) for each in partitions]
        try:
            await self._peers.request(
                node_id,
                partial(HeartbeatRequest, partitions=told),
                HeartbeatResponse,
                timeout_ms=_HEARTBEAT_TIMEOUT_MS,
            )
        except TidemillError as error:
            # The follower's next Fetch tells it.
            if node_id not in self._silent:
                self._silent.add(node_id)
                logger.info("no answer to Heartbeats from node %d: %s", node_id, error)
            return
        finally:
            del self._heartbeats[node_id]
            for partition in list(self._moved):
                self._high_watermark_moved(partition)
        if node_id in self._silent:
            self._silent.discard(node_id)
            logger.info("node %d answers Heartbeats again", node_id)
        for partition, (epoch, high_watermark) in sent.items():
            known = self._told_to(node_id, partition)
            if known.leader_epoch == epoch and known.high_watermark < high_watermark:
                key = partition.topic_id, partition.index
                self._told[node_id][key] = known._replace(high_watermark=high_watermark)

    # --- in-sync sets

    def _may_join(self, partition: Partition, node_id: int) -> None:
        """See whether a follower that has spoken can join the in-sync set."""
        assignment = partition.assignment
        if assignment is not None and node_id not in assignment.isr:
            self._consider(partition)

    def _consider(self, partition: Partition) -> None:
        """Propose another in-sync set if there should be one."""
        now_ms = self._clock.now_ms()
        if now_ms < self._propose_after_ms.get(partition, 0):
            return
        proposal = partition.as_leader.next_proposal(now_ms, self._suspected(), self.replica_lag_ms)
        if proposal is not None:
            self._run(self._send_proposal(partition, proposal))

    async def _send_proposal(self, partition: Partition, proposal: IsrProposal) -> None:
        refused = was_taken = False
        logger.info("%r: in-sync set %s is proposed", partition, proposal.isr)
        try:
            await self._propose(partition, proposal)
            # The record is on its way. Until it is here the proposal counts as outstanding.
            await asyncio.sleep(_RECORD_WAIT_S)
            was_taken = True
        except ProposalRefused as error:
            logger.info("%r: in-sync set %s was refused: %s", partition, proposal.isr, error)
            refused = True
        except TidemillError as error:
            logger.warning("%r: in-sync set %s may not be known: %s", partition, proposal.isr, error)
        finally:
            if partition in self._led and not was_taken:
                self._propose_after_ms[partition] = self._clock.now_ms() + _PROPOSAL_PAUSE_MS
            partition.as_leader.proposal_ended(proposal, refused=refused)

    # --- by time

    async def _tick_loop(self) -> None:
        while True:
            began_ms = self._clock.now_ms()
            await asyncio.sleep(_TICK_MS / 1000)
            begin_slice()
            is_late = self._clock.now_ms() - began_ms > _TICK_MS + _LATE_MS
            await self._tick(shrink=not is_late)

    async def _tick(self, *, shrink: bool) -> None:
        now_s = self._loop.time()
        if self._replicas.refusal is None and not self._disk_is_full():
            self._refused_since_s = None
        elif self._refused_since_s is None:
            self._refused_since_s = now_s
        lags: dict[str, int] = {}
        suspected, is_throttled = self._suspected(), self.throttle.bytes_per_second > 0
        for number, partition in enumerate(self._replicas):
            self._check_fitness(partition, now_s)
            if partition in self._led:
                if is_throttled:
                    lags.update(self._throttled_lags(partition, suspected))
                if shrink and partition.as_leader.may_have_proposal:
                    self._consider(partition)
            if number % _TICKED_AT_ONCE == 0:
                await give_way()
        self._moves.note(lags, self._clock.now_ms())
        if self._unfit_at_s:
            held = {*self._replicas}
            self._unfit_at_s = {each: at_s for each, at_s in self._unfit_at_s.items() if each in held}

    def _throttled_lags(self, partition: Partition, suspected: Collection[int]) -> Iterator[tuple[str, int]]:
        """How many offsets each replica lacks that is throttled. Of nodes that are down, others tell."""
        for node_id, follower in partition.as_leader.followers.items():
            if node_id not in suspected and self.throttle.applies_to(partition, node_id):
                reached = max(follower.matched_end, partition.log_start_offset)
                name = f"{partition.topic}-{partition.index} to node {node_id}"
                yield name, partition.log_end_offset - reached

    def problems(self) -> list[str]:
        """Moves that do not come closer to their end, in words."""
        stalled = self._moves.stalled
        if not stalled:
            return []
        shown = ", ".join(stalled[:_NAMED_MAX]) + (", ..." if len(stalled) > _NAMED_MAX else "")
        return [
            f"{len(stalled)} moves do not come closer to their end ({shown}): producers write faster than "
            f"the throttle of {self.throttle.bytes_per_second} bytes per second lets records be copied; "
            "raise it with 'tidemill cluster throttle BYTES', or cancel the move"
        ]

    def is_fit(self, partition: Partition) -> bool:
        """Whether nothing keeps this replica from leading, as of the last look at its disk."""
        return partition not in self._unfit_at_s and partition.failure is None

    def _check_fitness(self, partition: Partition, now_s: float) -> None:
        started_s, refused_s = partition.flush_started_s, self._refused_since_s
        if started_s is None and refused_s is None and partition.failure is None:
            self._unfit_at_s.pop(partition, None)
            return
        reason = unfit_reason(
            partition.failure,
            refused_for_s=None if refused_s is None else now_s - refused_s,
            flushing_for_s=None if started_s is None else now_s - started_s,
        )
        if reason is None:
            self._unfit_at_s.pop(partition, None)
        elif now_s - self._unfit_at_s.get(partition, -_UNFIT_AGAIN_S) >= _UNFIT_AGAIN_S:
            self._unfit_at_s[partition] = now_s
            if partition.role is not Role.FOLLOWER:
                logger.error("%r is not fit to lead: %s", partition, reason)
            self._report_unfit(partition, reason)


def _resolve(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
