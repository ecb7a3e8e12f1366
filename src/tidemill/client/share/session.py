"""A share session: what a node and this consumer agree on between two requests, and its epoch.

The first request (epoch 0) names all partitions; later ones (1, 2, …, after 2**31 - 1 again 1) name those
that came and went. -1 closes the session: what this consumer holds goes back to the group. Requests of one
session must arrive in the order of their epochs, so all of them use one connection.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from tidemill.config.values import TopicPartition

__all__ = ("CLOSING_EPOCH", "ShareSession", "Step")

CLOSING_EPOCH: Final = -1
_EPOCH_MAX: Final = 2**31 - 1


class Step(NamedTuple):
    """The part of a fetch that is about the session."""

    epoch: int
    added: frozenset[TopicPartition]
    forgotten: frozenset[TopicPartition]


class ShareSession:
    """The session with one node, over one connection. A new connection begins a new session."""

    def __init__(self) -> None:
        self._epoch = 0
        self._partitions: frozenset[TopicPartition] = frozenset()

    @property
    def is_open(self) -> bool:
        """Whether the request that opens it was sent."""
        return self._epoch > 0

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        """The partitions that the node fetches from."""
        return self._partitions

    def fetch(self, wanted: AbstractSet[TopicPartition]) -> Step:
        """Begin a fetch of these partitions."""
        chosen = frozenset(wanted)
        step = Step(self._next_epoch(), chosen - self._partitions, self._partitions - chosen)
        self._partitions = chosen
        return step

    def acknowledge(self) -> int:
        """Begin an acknowledgement; gives its epoch. The session must be open."""
        assert self.is_open, "a session is opened by a fetch"
        return self._next_epoch()

    def _next_epoch(self) -> int:
        epoch = self._epoch
        self._epoch = 1 if epoch == _EPOCH_MAX else epoch + 1
        return epoch
