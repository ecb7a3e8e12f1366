"""Producer ids: numbers for idempotent and transactional producers, each given once in a cluster's life."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tidemill.control.commands import AllocateProducerIds

if TYPE_CHECKING:
    from tidemill.control.controller import Controller

__all__ = ("ProducerIds",)

_BLOCK_SIZE = 1_000


class ProducerIds:
    """Gives ids out of blocks that the metadata has reserved for this node."""

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._block = range(0)
        self._lock = asyncio.Lock()

    async def next(self) -> int:
        """A producer id that was never given before."""
        async with self._lock:
            if not self._block:
                first = await self._controller.submit(AllocateProducerIds(count=_BLOCK_SIZE))
                self._block = range(first, first + _BLOCK_SIZE)
            producer_id, self._block = self._block[0], self._block[1:]
            return producer_id
