"""Writes whose batches are being looked at by the gate, before they go into their logs."""

from __future__ import annotations

import asyncio
import logging

__all__ = ("GatedWrites",)

#: How long a stop waits for batches that are being looked at.
_CLOSE_SECONDS = 5.0

logger = logging.getLogger(__name__)


class GatedWrites(dict[tuple[str, int], "asyncio.Task[None]"]):
    """The last write to each partition (topic and number) whose batches are being looked at."""

    async def finish(self) -> None:
        """Wait until the writes are done, but not for ever.

        No client was told that they are safe, and those of one client can take minutes.
        """
        loop = asyncio.get_running_loop()
        until = loop.time() + _CLOSE_SECONDS
        while self and (left := until - loop.time()) > 0:
            await asyncio.wait(self.values(), timeout=left)
        unfinished = set(self.values())
        if unfinished:
            logger.warning("%d writes that were not acknowledged are given up by the stop", len(unfinished))
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)
