"""The fetcher of a node: copies the partitions that it follows, with one loop for each leader.

- A partition is in at most one Fetch. An answer that comes behind a change of leader changes nothing.
- The next Fetch leaves when the last answer is in the log, not when it is flushed.
- Partitions that had records lately are in Fetches of their own: their records do not end the waiting of
  Fetches that name thousands of idle partitions, each of which would have to be named again.
- What is durable is reported at every flush, on a connection that no waiting Fetch holds up. One report is
  under way per leader; what comes meanwhile goes into the next one.
- A log that has diverged is cut in a thread. Its partition waits for that, the others go on.
- A partition with trouble waits a moment, twice as long each time; the others go on.
- Replicas that the throttle holds back are left out of a Fetch until it lets go.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final
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
    PartitionId,
    ReplicaStateAckResponse,
    ReplicaStateRequest,
    ResponseHeader,
)
from tidemill.coordination.clock import Clock
from tidemill.coordination.log_summary import LogSummary
from tidemill.coordination.turns import begin_slice, give_way
from tidemill.errors import StorageError, SyncFailed, TidemillError
from tidemill.log.truncation import TruncationJob
from tidemill.replication.fetching.peer_requests import PeerRequests
from tidemill.replication.partition import Partition
from tidemill.replication.rules.assignment import NO_LEADER
from tidemill.replication.rules.following import FollowerStep
from tidemill.replication.throttle import MoveThrottle, follower_side

__all__ = ("ReplicaFetcher",)

logger = logging.getLogger(__name__)

#: How long a Fetch without news waits: a millisecond for each partition, between these. Asking for many is
#: work for both sides, and most of them are idle: so it stays about the same work in a second.
_SHORTEST_WAIT_MS: Final = 500
_LONGEST_WAIT_MS: Final = 5_000
#: The most that one partition gives in one answer, so that one turn of the event loop stays short.
_PARTITION_BYTES: Final = 1024 * 1024
_PARTITIONS_PER_FETCH: Final = 2_000
#: A partition without records for so long is idle.
_IDLE_MS: Final = 10_000
#: How much longer than that a leader may take to answer.
_FETCH_TIMEOUT_MS: Final = 4_500
_REPORT_TIMEOUT_MS: Final = 2_000
_FIRST_PAUSE_MS: Final = 20
_LONGEST_PAUSE_MS: Final = 1_000
#: Before a Fetch is sent again that was answered at once and changed nothing.
_IDLE_PAUSE_MS: Final = 5
_NOT_TAKEN: Final = "records of leaders are not taken"
#: As long as that goes on, it is said so often.
_REFUSED_AGAIN_SECONDS: Final = 600.0


class ReplicaFetcher:
    """Everything that this node follows. ``update`` is told of every change of a partition's role."""

    def __init__(
        self, peers: PeerRequests, clock: Clock, cutting_pool: Executor, *, node_id: int = -1
    ) -> None:
        self.node_id = node_id
        self.throttle = MoveThrottle(0, node_id, follower_side)
        self.peers = peers
        self.clock = clock
        self.cutting_pool = cutting_pool
        #: Bytes of records that leaders have given.
        self.bytes_in = 0
        self._leaders: dict[int, _LeaderLink] = {}
        self._followed: dict[tuple[UUID, int], tuple[int, _Followed]] = {}
        #: Cuts of logs under way; they are not given up half-way.
        self._cuts: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._summary = LogSummary(_REFUSED_AGAIN_SECONDS)

    def update(self, partition: Partition) -> None:
        """Follow the partition's leader from now on, or nobody if this node leads or the disk has failed."""
        key = partition.topic_id, partition.index
        leader, epoch = partition.leader, partition.leader_epoch
        known = self._followed.get(key)
        if known is not None:
            old_leader, followed = known
            if (old_leader, followed.epoch) == (leader, epoch) and followed.partition is partition:
                return
            if followed.partition is not partition and partition.failure is not None:
                return  # The partition has moved away and back: this late call is about the object before.
            del self._followed[key]
            link = self._leaders[old_leader]
            link.remove(key)
            if not link.partitions:
                del self._leaders[old_leader]
                link.close()
        if leader == NO_LEADER or self._is_closed:
            return
        partition.as_follower.on_progress = self._report
        link = self._leaders.get(leader) or self._leaders.setdefault(leader, _LeaderLink(self, leader))
        followed = _Followed(partition, epoch)
        self._followed[key] = leader, followed
        link.add(key, followed)

    def set_rate(self, bytes_per_second: int) -> None:
        """Fetch at most so much in a second for replicas that are moved here; 0 is no limit."""
        self.throttle.set_rate(bytes_per_second, self.clock.now_ms() / 1000)
        for link in self._leaders.values():
            link.look_again()

    def warn_of_refused(self, partition: Partition, leader: int, error: TidemillError, now_ms: int) -> None:
        """Log that records of a leader cannot be taken: the first time, and then now and then for all.

        A full disk refuses every partition, once a second.
        """
        detail = f"{partition!r}, from node {leader}: {error}"
        if self._summary.note(_NOT_TAKEN, f"{partition.topic}-{partition.index}", detail, now_ms / 1000):
            logger.warning("%s: %s", _NOT_TAKEN, detail)
        for level, line in self._summary.due(now_ms / 1000):
            logger.log(level, line)

    def replace(self, key: tuple[UUID, int], followed: _Followed) -> None:
        """Follow a partition through the ``Partition`` object that has replaced its old one."""
        self._followed[key] = self._followed[key][0], followed

    def _report(self, partition: Partition) -> None:
        link = self._leaders.get(partition.leader)
        if link is not None:
            link.report(partition)

    def report_all(self) -> None:
        """Tell all leaders everything again: this node has registered anew, and they know nothing of it."""
        for leader, followed in self._followed.values():
            self._leaders[leader].report(followed.partition)

    def heartbeat(
        self, request: HeartbeatRequest, find: Callable[[UUID, int], Partition | None]
    ) -> HeartbeatResponse:
        """Answer a leader that tells high watermarks. ``find`` gives the partitions that are open here."""
        stale, confirmed, source = [], [], request.header.source
        for told in request.partitions:
            partition = find(told.partition.topic_id, told.partition.index)
            if partition is None:
                continue
            if not partition.as_follower.heartbeat(told, source):
                stale.append(told.partition)
            elif request.confirm and partition.as_follower.follows(source, told.leader_epoch):
                confirmed.append(told.partition)
        return HeartbeatResponse(ResponseHeader(request.header.correlation_id), stale, confirmed)

    def cut(self, followed: _Followed, step: FollowerStep, done: Callable[[], None]) -> None:
        """Cut a log in a thread; ``done`` is called when that is over."""
        task = asyncio.create_task(self._cut(followed, step))
        self._cuts.add(task)
        task.add_done_callback(self._cuts.discard)
        task.add_done_callback(lambda _: done())

    async def _cut(self, followed: _Followed, step: FollowerStep) -> None:
        partition, loop = followed.partition, asyncio.get_running_loop()
        job = await self._begin_cut(followed, step)
        if job is None:
            return
        running = loop.run_in_executor(self.cutting_pool, job.run)
        await asyncio.wait([running])
        error = running.exception()
        if error is None:
            partition.as_follower.finish_cut(job)
        elif isinstance(error, StorageError):
            partition.as_follower.cut_failed(job, error)
        else:
            partition.as_follower.cut_failed(job, SyncFailed(f"the cut of {partition!r} failed: {error!r}"))
        for cut in job.cuts:
            logger.warning(
                "%s: cut %d bytes at byte %d (%s); kept in %s",
                cut.path,
                cut.size_bytes,
                cut.position,
                cut.reason,
                cut.kept_in,
            )

    async def _begin_cut(self, followed: _Followed, step: FollowerStep) -> TruncationJob | None:
        """The job for a cut, once nothing else is at work on the log; None if there is nothing to cut."""
        partition, pause_ms = followed.partition, _FIRST_PAUSE_MS
        while partition.failure is None and not self._is_closed:
            idle: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            partition.when_not_flushing(partial(_set_once, idle))
            await idle
            try:
                return partition.as_follower.begin_cut(step, followed.epoch, self.clock.now_ms())
            except StorageError as error:
                logger.info("%r is not cut now, it is tried again: %s", partition, error)
            await asyncio.sleep(pause_ms / 1000)
            pause_ms = min(_LONGEST_PAUSE_MS, 2 * pause_ms)
        return None

    async def close(self) -> None:
        """Stop fetching, and wait for the cuts that are under way."""
        self._is_closed = True
        links, self._leaders, self._followed = self._leaders, {}, {}
        for link in links.values():
            link.close()
        for link in links.values():
            await link.ended()
        if self._cuts:
            await asyncio.wait(self._cuts)


class _Followed:
    """A partition that this node follows at one leader epoch."""

    __slots__ = ("epoch", "failures", "partition", "records_ms", "retry_ms")

    def __init__(self, partition: Partition, epoch: int) -> None:
        self.partition = partition
        self.epoch = epoch
        self.failures = 0
        self.retry_ms = 0
        #: When the last records came; None before the first.
        self.records_ms: int | None = None

    @property
    def key(self) -> tuple[UUID, int]:
        return self.partition.topic_id, self.partition.index

    def is_idle(self, now_ms: int) -> bool:
        """Whether no records have come for a while."""
        return self.records_ms is None or now_ms - self.records_ms > _IDLE_MS

    def failed(self, now_ms: int) -> None:
        """Note a failure: the next attempt waits a little longer than the last one."""
        self.retry_ms = now_ms + min(_LONGEST_PAUSE_MS, _FIRST_PAUSE_MS << min(self.failures, 10))
        self.failures += 1


class _LeaderLink:
    """The fetch loop and the reports to one leader."""

    def __init__(self, fetcher: ReplicaFetcher, node_id: int) -> None:
        self._fetcher = fetcher
        self._peers, self._clock = fetcher.peers, fetcher.clock
        self._node_id = node_id
        self.partitions: dict[tuple[UUID, int], _Followed] = {}
        #: Those of them that are in no Fetch and are not being cut.
        self._unasked: dict[tuple[UUID, int], _Followed] = {}
        self._reports: dict[tuple[UUID, int], Partition] = {}
        self._has_work, self._has_reports = asyncio.Event(), asyncio.Event()
        #: Fetches under way, and whether each is one of idle partitions.
        self._fetches: dict[asyncio.Task[None], bool] = {}
        self._tasks: list[asyncio.Task[None]] = [
            asyncio.create_task(self._fetch_loop()),
            asyncio.create_task(self._report_loop()),
        ]
        for task in self._tasks:
            task.add_done_callback(_log_defect)

    def add(self, key: tuple[UUID, int], followed: _Followed) -> None:
        self.partitions[key] = self._unasked[key] = followed
        self._has_work.set()

    def look_again(self) -> None:
        """See what is due now: the throttle has changed."""
        self._has_work.set()

    def remove(self, key: tuple[UUID, int]) -> None:
        self.partitions.pop(key, None)
        self._unasked.pop(key, None)
        self._reports.pop(key, None)

    def close(self) -> None:
        for task in (*self._tasks, *self._fetches):
            task.cancel()

    async def ended(self) -> None:
        """Wait until nothing of this link runs, behind ``close``."""
        await asyncio.gather(*self._tasks, *self._fetches, return_exceptions=True)

    # --- fetching

    async def _fetch_loop(self) -> None:
        while True:
            self._has_work.clear()
            active, idle, wait_ms = self._due()
            for due, are_idle in ((active, False), (idle, True)):
                if due and self._may_fetch(are_idle=are_idle):
                    for followed in due:
                        del self._unasked[followed.key]
                    self._start(self._fetch(due), are_idle=are_idle)
                    self._has_work.set()
            try:
                async with asyncio.timeout(None if wait_ms is None else wait_ms / 1000):
                    await self._has_work.wait()
            except TimeoutError:
                continue

    def _may_fetch(self, *, are_idle: bool) -> bool:
        """Whether another Fetch of this kind may be under way.

        One waits at the leader, and one is for partitions that have come since. Idle partitions may need
        several: none of them waits for its turn, or the others would have to be asked for more often.
        """
        parts = math.ceil(len(self.partitions) / _PARTITIONS_PER_FETCH) if are_idle else 1
        return sum(kind == are_idle for kind in self._fetches.values()) < 1 + parts

    def _due(self) -> tuple[list[_Followed], list[_Followed], int | None]:
        """The active and the idle partitions to ask for now, and how long to wait for others."""
        now_ms, wait_ms = self._clock.now_ms(), None
        due: dict[bool, list[_Followed]] = {False: [], True: []}
        throttle, node_id = self._fetcher.throttle, self._fetcher.node_id
        held_s = throttle.wait_s(now_ms / 1000)
        for followed in self._unasked.values():
            if held_s and throttle.applies_to(followed.partition, node_id):
                held_ms = min(_LONGEST_PAUSE_MS, math.ceil(held_s * 1000))
                wait_ms = held_ms if wait_ms is None else min(held_ms, wait_ms)
            elif followed.retry_ms <= now_ms:
                of_kind = due[followed.is_idle(now_ms)]
                if len(of_kind) < _PARTITIONS_PER_FETCH:
                    of_kind.append(followed)
            else:
                wait_ms = min(followed.retry_ms - now_ms, _LONGEST_PAUSE_MS if wait_ms is None else wait_ms)
        return due[False], due[True], wait_ms

    def _start(self, fetch: Coroutine[Any, Any, None], *, are_idle: bool) -> None:
        task = asyncio.create_task(fetch)
        self._fetches[task] = are_idle
        task.add_done_callback(self._fetched)

    def _fetched(self, task: asyncio.Task[None]) -> None:
        _log_defect(task)
        self._fetches.pop(task, None)
        self._has_work.set()

    async def _fetch(self, asked: list[_Followed]) -> None:
        begin_slice()
        wanted: dict[PartitionId, tuple[_Followed, FetchPartition]] = {}
        now_ms = self._clock.now_ms()
        for followed in asked:
            position = followed.partition.as_follower.fetch_position(_PARTITION_BYTES)
            if position is None or followed.epoch != position.leader_epoch:
                followed.failed(now_ms)
            else:
                wanted[position.partition] = followed, position
            await give_way()
        try:
            if wanted:
                await self._ask(wanted)
        except Exception:
            # A defect: it is logged, and must not be met again at once.
            for followed in asked:
                followed.failed(self._clock.now_ms())
            raise
        finally:
            # The first of these is asked for last the next time: an answer has room for some of them only.
            for followed in (*asked[1:], *asked[:1]):
                self._release(followed)

    def _release(self, followed: _Followed) -> None:
        """Let a partition be fetched again, unless another object has replaced it."""
        if self.partitions.get(followed.key) is followed:
            self._unasked[followed.key] = followed
            self._has_work.set()

    async def _ask(self, wanted: dict[PartitionId, tuple[_Followed, FetchPartition]]) -> None:
        positions = [position for _, position in wanted.values()]
        wait_ms = self._wait_ms()
        make = partial(FetchRequest, partitions=positions, max_wait_ms=wait_ms)
        try:
            response = await self._peers.request(
                self._node_id, make, FetchResponse, timeout_ms=wait_ms + _FETCH_TIMEOUT_MS, purpose="fetch"
            )
        except TidemillError as error:
            logger.info("no answer to a Fetch from node %d: %s", self._node_id, error)
            now_ms = self._clock.now_ms()
            for followed, _ in wanted.values():
                followed.failed(now_ms)
            return
        begin_slice()
        has_changed = not response.partitions
        for answer in response.partitions:
            found = wanted.get(answer.partition)
            if found is not None:
                has_changed |= self._take(*found, answer)
            await give_way()
        if not has_changed:
            pause_until_ms = self._clock.now_ms() + _IDLE_PAUSE_MS
            for followed, _ in wanted.values():
                followed.retry_ms = max(followed.retry_ms, pause_until_ms)

    def _wait_ms(self) -> int:
        return min(_LONGEST_WAIT_MS, max(_SHORTEST_WAIT_MS, len(self.partitions)))

    def _take(self, followed: _Followed, wanted: FetchPartition, answer: FetchedPartition) -> bool:
        """Take the answer for one partition; True if anything came of it."""
        partition, now_ms = followed.partition, self._clock.now_ms()
        if answer.error:
            logger.info("%r: node %d answers %s", partition, self._node_id, _name(answer.error))
            followed.failed(now_ms)
            return False
        watermark, start = partition.high_watermark, partition.log_start_offset
        try:
            step = partition.as_follower.take_answer(wanted, answer, now_ms)
        except TidemillError as error:
            self._fetcher.warn_of_refused(partition, self._node_id, error, now_ms)
            if partition.local_log.failure is not None:
                partition.flush_failed(partition.local_log.failure)
            followed.failed(now_ms)
            return False
        followed.failures = 0
        self._fetcher.bytes_in += len(answer.records)
        if len(answer.records):
            followed.records_ms = now_ms
        if self._fetcher.throttle.applies_to(partition, self._fetcher.node_id):
            self._fetcher.throttle.sent(len(answer.records), now_ms / 1000)
        if step.cut_at is not None or step.start_anew_at is not None:
            self._cut(followed, step)
            return True
        is_new = wanted.durable < 0 or len(answer.records) > 0
        return is_new or (watermark, start) != (partition.high_watermark, partition.log_start_offset)

    def _cut(self, followed: _Followed, step: FollowerStep) -> None:
        # A new object takes the place of ``followed``, which the end of the Fetch would ask for again.
        cutting, key = _Followed(followed.partition, followed.epoch), followed.key
        if self.partitions.get(key) is not followed:
            return
        self.partitions[key] = cutting
        self._fetcher.replace(key, cutting)
        self._fetcher.cut(cutting, step, partial(self._release, cutting))

    # --- reporting

    def report(self, partition: Partition) -> None:
        """Tell the leader how far the partition is, as soon as the last report was answered."""
        self._reports[partition.topic_id, partition.index] = partition
        self._has_reports.set()

    async def _report_loop(self) -> None:
        pause_ms = _FIRST_PAUSE_MS
        while True:
            await self._has_reports.wait()
            self._has_reports.clear()
            reports, self._reports = self._reports, {}
            if await self._send_reports(reports):
                pause_ms = _FIRST_PAUSE_MS
                continue
            self._reports = {**reports, **self._reports}
            self._reports = {key: each for key, each in self._reports.items() if key in self.partitions}
            await asyncio.sleep(pause_ms / 1000)
            pause_ms = min(_LONGEST_PAUSE_MS, 2 * pause_ms)
            if self._reports:
                self._has_reports.set()

    async def _send_reports(self, reports: dict[tuple[UUID, int], Partition]) -> bool:
        """Send one report. False if the leader did not answer."""
        begin_slice()
        progress = {}
        for partition in reports.values():
            said = partition.as_follower.progress() if partition.leader == self._node_id else None
            if said is not None:
                progress[said.partition] = partition, said
            await give_way()
        if not progress:
            return True
        make = partial(ReplicaStateRequest, partitions=[said for _, said in progress.values()])
        try:
            answer = await self._peers.request(
                self._node_id, make, ReplicaStateAckResponse, timeout_ms=_REPORT_TIMEOUT_MS
            )
        except TidemillError as error:
            logger.info("no answer to a ReplicaState from node %d: %s", self._node_id, error)
            return False
        begin_slice()
        for status in answer.partitions:
            found = progress.get(status.partition)
            if found is not None and not status.error:
                partition, said = found
                told = HeartbeatPartition(status.partition, said.leader_epoch, status.high_watermark)
                partition.as_follower.heartbeat(told, self._node_id)
            await give_way()
        return True


def _log_defect(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("following failed, which is a defect; please report it", exc_info=task.exception())


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _name(code: int) -> str:
    try:
        return ClusterErrorCode(code).name
    except ValueError:
        return f"error {code}"
