"""A store of checkpoints, as a cursor uses it, and the one that keeps nothing.

Rules of every store:

- Taking over is a committed compare-and-set of the fencing epoch, and comes before the position is read.
- A commit counts only if the epoch is still this owner's and the stored position is where the batch begins.
- Whatever else is found is an error that names the checkpoint. Nothing is rewound or skipped in silence.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Protocol

from tidemill.cursors.checkpoint import Entry
from tidemill.cursors.errors import CursorMoved
from tidemill.cursors.machine import Step
from tidemill.cursors.position import Position

__all__ = ("AwaitedStore", "CheckpointStore", "MemoryStore", "StoredElsewhere", "begin_added")


def begin_added(
    starts: Mapping[int, Position], known: Container[int], log_starts: Mapping[int, Position]
) -> dict[int, Position]:
    """Where the partitions begin of a cursor over all of them, of which its store has the ``known`` ones.

    If it has any, the others were added to the topic since, and are read from the start of their logs:
    ``start`` is where the cursor began, not where it is opened again.
    """
    if not any(partition in known for partition in starts):
        return dict(starts)
    return {each: start if each in known else log_starts.get(each, start) for each, start in starts.items()}


class StoredElsewhere(CursorMoved):
    """``CursorMoved`` with what is stored: the cursor goes there before the error reaches its caller."""

    def __init__(
        self, message: str, entries: Mapping[int, Entry], *, where: str, stored: object, expected: object
    ) -> None:
        super().__init__(message, where=where, stored=stored, expected=expected)
        self.entries = dict(entries)


class CheckpointStore(Protocol):
    """Keeps the positions of one cursor, for one owner."""

    @property
    def where(self) -> str:
        """The checkpoint in words, for errors."""
        ...

    @property
    def is_callers(self) -> bool:
        """Whether it uses something of the caller's, a database connection: only in the caller's thread."""
        ...

    @property
    def can_be_reset(self) -> bool:
        """Whether ``tidemill cursor reset`` can set the position."""
        ...

    @property
    def is_paused(self) -> bool:
        """Whether somebody has paused the cursor."""
        ...

    async def take_over(self, starts: Mapping[int, Position]) -> dict[int, Entry]:
        """Become the owner of these partitions; gives what is stored, or the starts where nothing was."""
        ...

    async def commit(self, steps: Mapping[int, Step]) -> None:
        """Store positions. Raises ``CursorFenced``, ``StoredElsewhere`` or ``CheckpointWriteFailed``."""
        ...

    async def commit_alone(self, steps: Mapping[int, Step]) -> None:
        """``commit`` apart from the caller's work: in a transaction of its own, if it is part of one."""
        ...

    def take_over_now(self, starts: Mapping[int, Position]) -> dict[int, Entry]:
        """``take_over`` in the caller's thread, if it ``is_callers``."""
        ...

    def commit_now(self, steps: Mapping[int, Step]) -> None:
        """``commit`` in the caller's thread, if it ``is_callers``."""
        ...

    def commit_alone_now(self, steps: Mapping[int, Step]) -> None:
        """``commit_alone`` in the caller's thread, if it ``is_callers``."""
        ...

    async def register(self, starts: Mapping[int, Position]) -> None:
        """Make the cursor known to the cluster, before ``take_over_now``. Raises ``CursorInUse``."""
        ...

    async def show_now(self) -> None:
        """Show the cluster the position that was taken over, if it is kept elsewhere."""
        ...

    def settle_now(self, *, closing: bool = False) -> None:
        """Find out what is stored for certain, if it ``is_callers``; in the caller's thread."""
        ...

    def check(self) -> None:
        """Raise ``CursorFenced`` if it is known that another has taken over."""
        ...

    async def close(self) -> None:
        """Give the ownership up."""
        ...


class AwaitedStore:
    """Base of the stores that are not the caller's: they have nothing to do in the caller's thread."""

    is_callers = False
    can_be_reset = False

    async def commit(self, steps: Mapping[int, Step]) -> None:
        raise NotImplementedError

    async def commit_alone(self, steps: Mapping[int, Step]) -> None:
        await self.commit(steps)

    def take_over_now(self, starts: Mapping[int, Position]) -> dict[int, Entry]:
        raise NotImplementedError

    def commit_now(self, steps: Mapping[int, Step]) -> None:
        raise NotImplementedError

    def commit_alone_now(self, steps: Mapping[int, Step]) -> None:
        raise NotImplementedError

    async def register(self, starts: Mapping[int, Position]) -> None:
        """Does nothing: ``take_over`` has registered the cursor already."""

    async def show_now(self) -> None:
        """Does nothing: the cluster knows the position already."""

    def settle_now(self, *, closing: bool = False) -> None:
        """Does nothing: a commit that has returned is stored."""


class MemoryStore(AwaitedStore):
    """The store of a cursor without a name: its position ends with it."""

    where = "a cursor without a name"
    is_paused = False

    async def take_over(self, starts: Mapping[int, Position]) -> dict[int, Entry]:
        return {partition: Entry(0, position) for partition, position in starts.items()}

    async def commit(self, steps: Mapping[int, Step]) -> None:
        pass

    def check(self) -> None:
        pass

    async def close(self) -> None:
        pass
