"""Whether this node's metadata is as new as that of the others.

A watch of the metadata can hang without an error. So each node asks the others in turn which revision they
have. If it has not got there itself by the next look, it reads everything, and says so in its health.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from tidemill.cluster.messages import FetchMetadataRequest, MetadataResponse
from tidemill.errors import TidemillError

if TYPE_CHECKING:
    from tidemill.control.image import MetadataImage
    from tidemill.replication.fetching.peer_requests import PeerRequests

__all__ = ("MetadataFreshness",)

_TIMEOUT_MS = 2_000


class MetadataFreshness:
    """Compares the revision of this node's metadata with another node's, one at each look."""

    def __init__(
        self,
        node_id: int,
        peers: PeerRequests,
        image: Callable[[], MetadataImage],
        reread: Callable[[int], Awaitable[None]],
    ) -> None:
        """``reread`` has the metadata read from the store, in which somebody has seen the given revision.

        It may raise ``TidemillError``, also because the store does not have that revision.
        """
        self._node_id = node_id
        self._peers = peers
        self._image = image
        self._reread = reread
        #: The node that was asked last, and the revision that it had.
        self._asked = (node_id, 0)
        #: What was asked before that, if this node had still not reached that revision at the next look.
        self._behind: tuple[int, int] | None = None

    async def look(self) -> None:
        """See whether the revision of the last look was reached, and ask the next node."""
        self._behind = self._asked if self._image().revision < self._asked[1] else None
        if self._behind is not None:
            try:
                await self._reread(self._behind[1])
            except TidemillError:
                # The store does not answer, or was restored: asking another node would tell the same.
                return
        # If none is live: in an etcd that was restored nobody is, and those that run know better.
        others = sorted((self._image().live_nodes or self._image().nodes.keys()) - {self._node_id})
        if others:
            await self._ask(next((each for each in others if each > self._asked[0]), others[0]))

    async def _ask(self, node_id: int) -> None:
        make = partial(FetchMetadataRequest, topics=[])
        try:
            answer = await self._peers.request(node_id, make, MetadataResponse, timeout_ms=_TIMEOUT_MS)
        except TidemillError:
            self._asked = node_id, 0
        else:
            self._asked = node_id, answer.revision

    def problems(self) -> list[str]:
        """That this node's metadata is old, in words."""
        if self._behind is None:
            return []
        node_id, revision = self._behind
        return [
            f"the metadata of node {self._node_id} is behind revision {revision}, which node {node_id} has: "
            "changes in etcd reach this node late; check its connection to etcd"
        ]
