"""Newest answers in a cluster: by this node's session, or by asking the replicas that could lead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Final

from tidemill.cluster.messages import HeartbeatPartition, HeartbeatRequest, HeartbeatResponse
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.replication.rules.newest import NewestCall, NewestQuestions, Question

if TYPE_CHECKING:
    from tidemill.control.image import MetadataImage
    from tidemill.control.session import Session
    from tidemill.replication.fetching.peer_requests import PeerRequests
    from tidemill.replication.partition import Partition

__all__ = ("ClusterNewestAnswers",)

#: A node that takes longer is not waited for: the client tries again, perhaps elsewhere.
_ANSWER_TIMEOUT_MS: Final = 1_000


class ClusterNewestAnswers:
    """``NewestAnswers`` of a node in a cluster.

    ``clock_ms`` is the session's clock, which goes on while the machine sleeps. ``image`` gives the newest
    metadata that this node knows.
    """

    def __init__(
        self,
        node_id: int,
        session: Session,
        peers: PeerRequests,
        clock_ms: Callable[[], int],
        image: Callable[[], MetadataImage],
    ) -> None:
        self._node_id = node_id
        self._session = session
        self._peers = peers
        self._clock_ms = clock_ms
        self._image = image
        self._questions: NewestQuestions[Partition] = NewestQuestions()
        self._futures: dict[NewestCall[Partition], asyncio.Future[None]] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._is_stopped = False

    def may_answer(self, partition: Partition) -> bool:
        """Whether no other node can have become the leader yet of a partition that this one leads.

        Leadership leaves a session that lives only by its own resignation; and where there is no other
        replica there is nobody to go to.
        """
        assignment = partition.assignment
        if assignment is not None and len(assignment.replicas) == 1:
            return True
        if partition.as_leader.is_resigning or self._clock_ms() >= self._session.serving_until_ms:
            return False
        return self._knows_of_its_admission()

    def _knows_of_its_admission(self) -> bool:
        """Whether the metadata that this node knows is not older than the beginning of its session.

        A session that follows a lost one begins before the controller takes the node's leaderships. The
        controller admits it afterwards; so who has heard of that has heard of those changes, too.
        """
        image, session = self._image(), self._session
        own = image.nodes.get(self._node_id)
        return image.live(self._node_id) and own is not None and own.incarnation == session.incarnation

    async def confirm(self, partitions: Collection[Partition]) -> None:
        """Ask the replicas that could lead, unless the session is proof enough."""
        doubtful = [each for each in partitions if not self.may_answer(each)]
        if not doubtful:
            return
        calls = []
        for partition in doubtful:
            partition.check_leads()
            call = self._questions.ask(partition, partition.leader_epoch, partition.as_leader.electable)
            calls.append(call)
            if call.outcome is None:
                self._futures[call] = asyncio.get_running_loop().create_future()
        self._send()
        if self._is_stopped:
            raise self._not_certain(doubtful[0])
        waiting = [self._futures[call] for call in calls if call in self._futures]
        try:
            for future in waiting:
                await future
        finally:
            for call in calls:
                self._futures.pop(call, None)
        for call in calls:
            if not call.outcome or not call.key.leads_at(call.leader_epoch):
                raise self._not_certain(call.key)

    def _not_certain(self, partition: Partition) -> ApiError:
        return ApiError(
            ErrorCode.not_leader_or_follower,
            f"node {self._node_id} may not lead {partition.topic}-{partition.index} any more: its session "
            "could not be renewed in time, and its in-sync replicas have not confirmed it; try again",
        )

    def _send(self) -> None:
        for question in () if self._is_stopped else self._questions.due():
            task = asyncio.create_task(self._ask(question))
            self._tasks[task] = None
            task.add_done_callback(self._tasks.pop)

    async def _ask(self, question: Question[Partition]) -> None:
        # The high watermark of one that leads no more is another epoch's: it would go beyond what the
        # followers have of this one. It is not asked about, and so not confirmed.
        asked = {
            partition.id: HeartbeatPartition(partition.id, epoch, partition.high_watermark)
            for partition, epoch in question.calls
            if partition.leads_at(epoch)
        }
        make = partial(HeartbeatRequest, partitions=list(asked.values()), confirm=True)
        settled: list[NewestCall[Partition]] = []
        try:
            answer = await self._peers.request(
                question.node_id, make, HeartbeatResponse, timeout_ms=_ANSWER_TIMEOUT_MS
            )
            followed = {(each, asked[each].leader_epoch) for each in answer.confirmed if each in asked}
            follows = {key for key in question.calls if (key[0].id, key[1]) in followed}
            settled = self._questions.answered(question, follows)
        except TidemillError:
            settled = self._questions.failed(question)
        finally:
            for call in settled:
                future = self._futures.get(call)
                if future is not None and not future.done():
                    future.set_result(None)
            self._send()

    async def stop(self) -> None:
        """Give up the questions that are under way; callers that wait for one get an error."""
        self._is_stopped = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for future in self._futures.values():
            if not future.done():
                future.set_result(None)
