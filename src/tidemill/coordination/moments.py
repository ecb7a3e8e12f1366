"""Moments: a gate that keeps readers of several partitions away from half-done changes of them.

Markers that carry one decision to several partitions become durable one after the other. A reader who looked
at all the partitions in between would see a part of the decision. So readers wait for a *moment*: an instant
at which no such change is half done. Several changes go on side by side, and a moment is given when there is
none. First come, first served, so neither side starves the other. A change that takes too long, say because
of a disk, is not waited for any longer: a torn read is better than none.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

__all__ = ("MomentGate",)

_logger = logging.getLogger(__name__)

_CHANGE_SECONDS_MAX = 10.0


class _Ticket:
    """A queued or admitted user of the gate."""

    def __init__(self, *, wants_moment: bool) -> None:
        self.wants_moment = wants_moment
        self.admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class MomentGate:
    """Gate between changes of several partitions and reads of them, on one event loop."""

    def __init__(self, change_seconds_max: float = _CHANGE_SECONDS_MAX) -> None:
        self._change_seconds_max = change_seconds_max
        self._inside: set[_Ticket] = set()
        self._queue: deque[_Ticket] = deque()

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Admit a change of several partitions: no moment is given until it is over."""
        async with self._admission(wants_moment=False) as ticket:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(self._change_seconds_max, self._give_up, ticket)
            try:
                yield
            finally:
                timer.cancel()

    @asynccontextmanager
    async def moment(self) -> AsyncIterator[None]:
        """Give a moment: no change is half done inside of it. Keep it short, because all changes wait."""
        async with self._admission(wants_moment=True):
            yield

    @asynccontextmanager
    async def _admission(self, *, wants_moment: bool) -> AsyncIterator[_Ticket]:
        ticket = _Ticket(wants_moment=wants_moment)
        self._queue.append(ticket)
        self._let_in()
        try:
            await ticket.admitted
            yield ticket
        finally:
            if ticket in self._queue:
                self._queue.remove(ticket)
            self._leave(ticket)

    def _let_in(self) -> None:
        while self._queue and self._is_open_to(self._queue[0]):
            ticket = self._queue.popleft()
            # It counts as inside before its task goes on: that may take a while.
            self._inside.add(ticket)
            if not ticket.admitted.done():
                ticket.admitted.set_result(None)

    def _is_open_to(self, ticket: _Ticket) -> bool:
        if ticket.wants_moment:
            return not self._inside
        return not any(each.wants_moment for each in self._inside)

    def _leave(self, ticket: _Ticket) -> None:
        self._inside.discard(ticket)
        self._let_in()

    def _give_up(self, ticket: _Ticket) -> None:
        _logger.warning(
            "a change of several partitions takes longer than %.0f s; readers do not wait for it any more, "
            "and may see a part of it",
            self._change_seconds_max,
        )
        self._leave(ticket)
