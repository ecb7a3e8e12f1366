"""Housekeeping: what a node does from time to time, as one list of names, intervals and actions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import NamedTuple

__all__ = ("Chore", "Housekeeping")

logger = logging.getLogger(__name__)


class Chore(NamedTuple):
    """One thing to do again and again. An action that fails is logged, and tried again an interval later."""

    name: str
    interval_ms: int
    action: Callable[[], Awaitable[None]]


class Housekeeping:
    """Runs chores side by side. Each waits for its interval, then for its action, and so on."""

    def __init__(self, chores: Iterable[Chore]) -> None:
        self.chores = list(chores)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start all chores; the first run of each comes after one interval."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(_repeat(chore), name=chore.name) for chore in self.chores]

    async def stop(self) -> None:
        """Cancel all chores, also those that run now."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()


async def _repeat(chore: Chore) -> None:
    while True:
        await asyncio.sleep(chore.interval_ms / 1000)
        try:
            await chore.action()
        except Exception:
            logger.exception("%s failed; it is tried again later", chore.name)
