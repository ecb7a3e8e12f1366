"""Which transactions may write to a partition, as far as coordinators have told its leader. Pure."""

from __future__ import annotations

from collections.abc import Collection, Container

__all__ = ("TransactionPermits", "TransactionQuestion")


class TransactionQuestion:
    """A producer's transaction that a coordinator is being asked about, for one partition.

    The answer tells of a moment that is over: ``is_void`` once it may not be true any more.
    """

    __slots__ = ("is_void", "producer_id")

    def __init__(self, producer_id: int) -> None:
        self.producer_id = producer_id
        self.is_void = False


class TransactionPermits:
    """The permissions of one partition's leader, and its questions that are still out."""

    __slots__ = ("_allowed", "_questions")

    def __init__(self) -> None:
        #: Producer id → epoch of transactions that may write here.
        self._allowed: dict[int, int] = {}
        #: Questions to coordinators on other nodes.
        self._questions: set[TransactionQuestion] = set()

    def allow(self, producer_id: int, producer_epoch: int) -> None:
        """The producer's transaction may write here until ``ended``."""
        self._allowed[producer_id] = producer_epoch

    def allows(self, producer_id: int, producer_epoch: int) -> bool:
        """Whether the producer may write in that epoch."""
        return self._allowed.get(producer_id) == producer_epoch

    def ask_about(self, producer_id: int) -> TransactionQuestion:
        """A coordinator is asked about a producer's transaction; ``answer`` has to follow."""
        question = TransactionQuestion(producer_id)
        self._questions.add(question)
        return question

    def answer(self, question: TransactionQuestion, allowed_epoch: int | None, *, leads: bool) -> bool:
        """Take the coordinator's answer: ``allowed_epoch`` if the producer may write. False if it is void."""
        self._questions.discard(question)
        if allowed_epoch is None:
            return True
        if question.is_void or not leads:
            return False
        self.allow(question.producer_id, allowed_epoch)
        return True

    def void_questions(self, producer_ids: Container[int] | None = None) -> None:
        """The answers that are still out say nothing any more: of these producers, or of all."""
        for question in self._questions:
            if producer_ids is None or question.producer_id in producer_ids:
                question.is_void = True

    def ended(self, producer_ids: Collection[int]) -> None:
        """Markers of these producers were appended: what they may write has to be asked for again."""
        for producer_id in producer_ids:
            self._allowed.pop(producer_id, None)
        if self._questions:
            self.void_questions(frozenset(producer_ids))

    def clear(self) -> None:
        """This node leads no longer: forget what was allowed, and what is asked."""
        self._allowed.clear()
        self.void_questions()
