"""What replication needs of the connections to other nodes: one question, one answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

from tidemill.cluster.messages import ClusterRequest, ClusterResponse, RequestHeader

__all__ = ("PeerRequests",)

_R = TypeVar("_R", bound=ClusterResponse)


class PeerRequests(Protocol):
    """Sends requests to other nodes. Implemented by ``cluster.peer.Peers``."""

    async def request(
        self,
        node_id: int,
        make: Callable[[RequestHeader], ClusterRequest],
        answer: type[_R],
        *,
        timeout_ms: int,
        purpose: Literal["fetch", "control"] = "control",
    ) -> _R:
        """Send what ``make`` builds and wait for the answer. Raises ``TidemillError`` if there is none."""
