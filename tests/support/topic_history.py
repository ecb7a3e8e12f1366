"""What clients were told of topics by name, and whether one order of all that explains it (invariant 9).

Each effect lies between a call and its answer. A call that was refused has no effect, and what the refusal
says, that there is a topic or none, was true at some moment between; a call without an answer may have an
effect at any time. Of two who delete a topic, one is told that there is none. Now and then the stored
metadata is read: that is what was true at that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any, Final
from uuid import UUID

from support.linearizing import UNKNOWN, Operation, explains
from tidemill.errors import ErrorCode

__all__ = ("REFUSED", "Answer", "State", "TopicHistory")

#: Answers of calls that had no effect, because there is a topic or none.
REFUSED: Final = frozenset(
    {ErrorCode.topic_already_exists, ErrorCode.unknown_topic_or_partition, ErrorCode.unknown_topic_id}
)
_FIRST_VALUE = 1_000_000_000

#: A topic as it is: its id and its configs; None if there is none of that name.
State = tuple[UUID, tuple[tuple[str, str], ...]] | None


class Answer:
    """A call, and the code of its answer if there was one."""

    def __init__(self, called_at: float, answered_at: float, code: ErrorCode | None) -> None:
        self.called_at = called_at
        self.code = code
        #: Any other code says that the call may yet take effect.
        is_certain = code is ErrorCode.none or code in REFUSED
        self.answered_at = answered_at if is_certain else UNKNOWN

    @property
    def is_certain(self) -> bool:
        return self.answered_at != UNKNOWN


class TopicHistory:
    """The histories of all names. Each name has one of its own, and begins as that of no topic."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[Operation]] = {}
        self.acknowledged = 0
        self._values = 0

    def new_value(self) -> int:
        """A number that no config had before."""
        self._values += 1
        return _FIRST_VALUE + self._values

    def created(self, name: str, answer: Answer, topic_id: UUID | None) -> None:
        """A creation; ``topic_id`` is what its answer has named."""
        # Without an answer nobody knows the id that it would have.
        made = topic_id or UUID(int=self.new_value() - _FIRST_VALUE)

        def apply(state: Hashable) -> tuple[Hashable] | None:
            return ((made, ()),) if state is None else None

        self._note(name, answer, f"create {topic_id}", apply)

    def deleted(self, name: str, answer: Answer) -> None:
        self._note(name, answer, "delete", lambda state: None if state is None else (None,))

    def altered(self, name: str, answer: Answer, key: str, value: str) -> None:
        """One config was set to a value that nobody else gives."""

        def apply(state: Any) -> tuple[Hashable] | None:
            if state is None:
                return None
            return ((state[0], tuple(sorted({**dict(state[1]), key: value}.items()))),)

        self._note(name, answer, f"alter {key}={value}", apply)

    def read(self, name: str, called_at: float, answered_at: float, found: State) -> None:
        """What is stored under a name."""

        def apply(state: Any) -> tuple[Hashable] | None:
            return (found,) if _is_like(state, found) else None

        operation = Operation(called_at, answered_at, apply, f"read {found}")
        self.by_name.setdefault(name, []).append(operation)

    def _note(
        self, name: str, answer: Answer, what: str, apply: Callable[[Any], tuple[Hashable] | None]
    ) -> None:
        if answer.code in REFUSED:
            is_there = answer.code is ErrorCode.topic_already_exists
            what = f"refused {what}: {'there is one' if is_there else 'there is none'}"
            operation = Operation(answer.called_at, answer.answered_at, _says(is_there), what)
        else:
            self.acknowledged += answer.code is ErrorCode.none
            operation = Operation(answer.called_at, answer.answered_at, apply, what)
        self.by_name.setdefault(name, []).append(operation)

    # --- the check

    def problems(self) -> list[str]:
        """The histories that nothing explains."""
        found = []
        for name, whole in self.by_name.items():
            history = _relevant(whole)
            if not explains(history, None):
                told = "\n".join(
                    f"{each.called_at:.3f} to {each.answered_at:.3f}: {each.name}" for each in history
                )
                found.append(f"nothing explains what became of topic {name}:\n{told}")
        return found

    def with_one_lost(self, kind: str) -> Iterator[TopicHistory]:
        """What would be known if the effect of one acknowledged operation had been lost: for each of them."""
        for name, whole in self.by_name.items():
            for lost in whole:
                if lost.name.startswith(kind) and lost.answered_at != UNKNOWN:
                    other = TopicHistory()
                    other.by_name = {name: [each for each in whole if each is not lost]}
                    yield other


def _relevant(whole: list[Operation]) -> list[Operation]:
    """Without alterations that were not answered and that nobody has seen: they explain nothing."""
    seen = "".join(each.name for each in whole if each.name.startswith("read"))
    return [
        each
        for each in whole
        if each.answered_at != UNKNOWN or each.name.split("=")[-1] in seen or "=" not in each.name
    ]


def _says(is_there: bool) -> Callable[[Any], tuple[Hashable] | None]:
    """A refusal changes nothing, and is possible if it is true."""
    return lambda state: (state,) if (state is not None) is is_there else None


def _is_like(state: State, found: State) -> bool:
    """Whether a topic is the one that was read. One that an unanswered call made has any id."""
    if state is None or found is None:
        return state is found
    return state[1] == found[1] and (state[0] == found[0] or state[0].int < _FIRST_VALUE)
