"""Who leads now, for clients that asked the wrong node or with an old epoch (KIP-951).

They go on at the leader at once, instead of asking for the metadata first. Only live leaders are named.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from uuid import UUID

from tidemill.errors import ErrorCode
from tidemill.wire.hot import NodeEndpoint

if TYPE_CHECKING:
    from tidemill.server.broker import Broker

__all__ = ("CurrentLeaders",)

_CODES: Final = frozenset({ErrorCode.not_leader_or_follower, ErrorCode.fenced_leader_epoch})


class CurrentLeaders:
    """The leaders that one answer names, and where they are."""

    __slots__ = ("_broker", "_endpoints")

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._endpoints: dict[int, NodeEndpoint] = {}

    @property
    def endpoints(self) -> list[NodeEndpoint]:
        """The addresses of all leaders that ``of`` has given."""
        return list(self._endpoints.values())

    def of(self, topic: str | UUID, index: int, code: int) -> tuple[int, int] | None:
        """(node, leader epoch) of a leader, for an answer with ``code``; None if that would not help."""
        if code not in _CODES:
            return None
        image = self._broker.image
        found = image.topics.get(topic) if isinstance(topic, str) else image.topic_by_id(topic)
        if found is None or not 0 <= index < len(found.partitions):
            return None
        leader, epoch = self._broker.find.leader_of(found, index)
        is_here = leader == self._broker.node_id
        # A node that has just refused as "not the leader" must not send the client back to itself.
        if not image.live(leader) or (is_here and code == ErrorCode.not_leader_or_follower):
            return None
        if leader not in self._endpoints:
            node = image.nodes[leader]
            address = self._broker.advertised if is_here else node
            self._endpoints[leader] = NodeEndpoint(leader, address.host, address.port, node.rack)
        return leader, epoch
