"""What a worker needs of its engine. There is one on share groups, and one on cursors."""

from __future__ import annotations

import asyncio
from typing import Protocol

from tidemill.client.workers.handling import WorkerCounts

__all__ = ("Engine",)


class Engine(Protocol):
    """Takes records from somewhere and has them handled."""

    @property
    def counts(self) -> WorkerCounts:
        """Counters of the records that were handled so far."""

    @property
    def description(self) -> str:
        """One line for logs that names what the worker reads."""

    async def run(self, stop: asyncio.Event, ready: asyncio.Event) -> None:
        """Work until ``stop`` is set, then finish or give back what is held. Sets ``ready`` once it works.

        Raises ``TidemillError`` if there is no going on.
        """

    async def is_empty(self) -> bool:
        """Whether all records are done that are there to be done."""

    def pause(self) -> None:
        """Take no more records, until ``resume``. Handlers that run end as ever."""

    def resume(self) -> None:
        """Take records again, after ``pause``."""
