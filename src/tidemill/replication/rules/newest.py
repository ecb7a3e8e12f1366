"""Newest answers: who has to confirm that a leader still leads, and when they have. Pure.

A leader that was replaced may not know of it, and what it has is not the newest any more. So it says what is
newest (look-ups, pins, the reads of coordinators) only if no other node can have become the leader before the
call arrived:

- its session was renewed in time (``control/session.py``), it has heard that this session was admitted, and
  it has not resigned: leadership leaves a live session only by its own resignation, and a session that
  follows a lost one is admitted only after the leaderships of the lost one were taken; or
- every other replica that could have been elected (in-sync, eligible, or about to join) has answered, at this
  leader epoch, a question that was asked after the call arrived. Who follows this leader then had not been
  elected before. That is what ``NewestQuestions`` keeps count of; or
- it is the only replica.

An operator's unclean election of another replica is not covered by the second: it gives up records anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Hashable, Iterable
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from tidemill.replication.partition import Partition

__all__ = ("Alone", "NewestAnswers", "NewestCall", "NewestQuestions", "Question")

K = TypeVar("K", bound=Hashable)


class NewestAnswers(Protocol):
    """Says whether what a leader has just read is the newest that anybody can have seen."""

    def may_answer(self, partition: Partition) -> bool:
        """Whether that is certain without asking anybody."""

    async def confirm(self, partitions: Collection[Partition]) -> None:
        """Return if it is certain of all partitions, which may take a question to other nodes.

        Called after the state was read and before the answer leaves. Raises ``ApiError``
        NOT_LEADER_OR_FOLLOWER if it is not certain of one.
        """


class Alone:
    """``NewestAnswers`` of a node without a cluster."""

    def may_answer(self, partition: Partition) -> bool:
        """Always true: no other node can lead the partition."""
        return True

    async def confirm(self, partitions: Collection[Partition]) -> None:
        """Return at once: no other node can lead the partitions."""


class NewestCall(Generic[K]):
    """A call about one partition that waits for the replicas that could lead.

    Attributes:
        outcome: Whether all of them follow this leader; None while one has not answered.
    """

    __slots__ = ("_unanswered", "key", "leader_epoch", "outcome")

    def __init__(self, key: K, leader_epoch: int, electable: Iterable[int]) -> None:
        self.key = key
        self.leader_epoch = leader_epoch
        self._unanswered = set(electable)
        self.outcome: bool | None = None if self._unanswered else True

    def heard(self, node_id: int, *, follows: bool) -> bool:
        """A replica has answered, or will not. True if that settles the call."""
        if self.outcome is not None:
            return False
        self._unanswered.discard(node_id)
        if not follows:
            self.outcome = False
        elif not self._unanswered:
            self.outcome = True
        return self.outcome is not None


class Question(Generic[K]):
    """A question to one node: does it follow this leader, in these partitions at these leader epochs?"""

    __slots__ = ("calls", "node_id")

    def __init__(self, node_id: int, calls: dict[tuple[K, int], list[NewestCall[K]]]) -> None:
        self.node_id = node_id
        self.calls = calls


class NewestQuestions(Generic[K]):
    """The calls that wait, and the questions that are due.

    One question to a node is on its way at a time, for all partitions. Calls that arrive meanwhile wait for
    the next one: the answer to an earlier question says nothing about them.
    """

    def __init__(self, partitions_max: int = 1_000) -> None:
        self._partitions_max = partitions_max
        #: By node: calls that no question was sent for yet.
        self._waiting: dict[int, dict[tuple[K, int], list[NewestCall[K]]]] = {}
        self._under_way: set[int] = set()

    def ask(self, key: K, leader_epoch: int, electable: Collection[int]) -> NewestCall[K]:
        """A call has arrived whose answer every ``electable`` replica has to confirm."""
        call = NewestCall(key, leader_epoch, electable)
        for node_id in electable:
            waiting = self._waiting.setdefault(node_id, {})
            waiting.setdefault((key, leader_epoch), []).append(call)
        return call

    def due(self) -> list[Question[K]]:
        """The questions to send now; ``answered`` or ``failed`` has to follow each."""
        questions = []
        for node_id in [each for each in self._waiting if each not in self._under_way]:
            waiting = self._waiting.pop(node_id)
            asked = dict(list(waiting.items())[: self._partitions_max])
            left = dict(list(waiting.items())[self._partitions_max :])
            if left:
                self._waiting[node_id] = left
            self._under_way.add(node_id)
            questions.append(Question(node_id, asked))
        return questions

    def answered(self, question: Question[K], follows: Container[tuple[K, int]]) -> list[NewestCall[K]]:
        """A node follows this leader in those of the partitions; gives the calls that are settled now."""
        self._under_way.discard(question.node_id)
        return [
            call
            for asked, calls in question.calls.items()
            for call in calls
            if call.heard(question.node_id, follows=asked in follows)
        ]

    def failed(self, question: Question[K]) -> list[NewestCall[K]]:
        """A node has not answered; gives the calls that are settled now."""
        return self.answered(question, ())
