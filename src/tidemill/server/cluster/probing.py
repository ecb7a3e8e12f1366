"""Asking other nodes whether they are well, for ``cluster.suspicion``."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from tidemill.cluster.messages import ProbeRequest, ProbeResponse
from tidemill.cluster.suspicion import PROBE_INTERVAL_MS, Suspicions
from tidemill.errors import TidemillError

if TYPE_CHECKING:
    from tidemill.cluster.peer import Peers
    from tidemill.control.image import MetadataImage

__all__ = ("Probing",)

_TIMEOUT_MS: Final = 500
_HELP_TIMEOUT_MS: Final = 1_500
_HELPERS: Final = 2


class Probing:
    """Asks one other node a second, and answers those that ask."""

    def __init__(
        self,
        node_id: int,
        peers: Peers,
        image: Callable[[], MetadataImage],
        *,
        seed: bytes,
        clock_ms: Callable[[], int],
        wall_ms: Callable[[], int],
        on_change: Callable[[], None],
    ) -> None:
        self._peers = peers
        self._image = image
        self._clock_ms = clock_ms
        self._wall_ms = wall_ms
        self._on_change = on_change
        self._suspicions = Suspicions(node_id, random.Random(seed))
        self._known: frozenset[int] = frozenset()
        #: Since when nobody that was asked has answered; None if the last one did.
        self._silent_since_ms: int | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Ask from now on."""
        self._task = asyncio.create_task(self._run(), name="probing")

    async def stop(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def silent_ms(self) -> int:
        """For how long nobody has answered; not counted is a time in which this process was stopped."""
        return 0 if self._silent_since_ms is None else self._clock_ms() - self._silent_since_ms

    def suspects(self) -> frozenset[int]:
        """The nodes that may be gone though their session is not over."""
        image = self._image()
        epochs = {node_id: image.node_epoch(node_id) for node_id in image.nodes}
        return self._suspicions.current(epochs, self._clock_ms())

    async def answer(self, request: ProbeRequest) -> ProbeResponse:
        """Answer a node that asks whether this one is well, or that wants it to ask another."""
        self._suspicions.told(request.suspects, self._clock_ms())
        reached = True
        if request.target is not None:
            reached = await self._ask(request.target, None, _TIMEOUT_MS)
        return ProbeResponse(
            request.header.answer(),
            reached=reached,
            suspects=self._suspicions.to_tell(self._clock_ms()),
            wall_ms=self._wall_ms(),
        )

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PROBE_INTERVAL_MS / 1000)
            image = self._image()
            target = self._suspicions.next_target(image.live_nodes)
            if target is not None:
                await self._probe(target, image)
            suspects = self.suspects()
            if suspects != self._known:
                self._known = suspects
                self._on_change()

    async def _probe(self, target: int, image: MetadataImage) -> None:
        if await self._ask(target, None, _TIMEOUT_MS):
            return
        helpers = self._suspicions.helpers(target, image.live_nodes, _HELPERS)
        answers = await asyncio.gather(*(self._ask(each, target, _HELP_TIMEOUT_MS) for each in helpers))
        if not any(answers):
            self._suspicions.not_reached(target, image.node_epoch(target), self._clock_ms())

    async def _ask(self, node_id: int, target: int | None, timeout_ms: int) -> bool:
        """Ask a node, or have it ask ``target``; whether the one in question has answered."""
        make = partial(ProbeRequest, target=target, suspects=self._suspicions.to_tell(self._clock_ms()))
        try:
            answer = await self._peers.request(node_id, make, ProbeResponse, timeout_ms=timeout_ms)
        except TidemillError:
            if self._silent_since_ms is None:
                self._silent_since_ms = self._clock_ms()
            return False
        self._silent_since_ms = None
        now_ms = self._clock_ms()
        self._suspicions.reached(node_id, now_ms)
        self._suspicions.told(answer.suspects, now_ms)
        if target is not None and answer.reached:
            self._suspicions.reached(target, now_ms)
        return target is None or answer.reached
