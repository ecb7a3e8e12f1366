"""What a node does for share groups: the share partitions that it leads, their state, their dead letters.

Nothing imports this module before ``LazyShare`` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.server.coordinators.persister import NodePersister
from tidemill.server.share.dead_letters import NodeDeadLetters
from tidemill.server.share.due_letters import DueLetters
from tidemill.server.share.metrics import SHARE_METRICS
from tidemill.server.share.service import ShareService

if TYPE_CHECKING:
    from tidemill.server.broker.bundle import Broker

__all__ = ("NodeShare",)


class NodeShare:
    """The services of a node that has to do with share groups."""

    def __init__(self, broker: Broker) -> None:
        #: Where the state of share partitions is kept.
        self.persister = NodePersister(broker)
        self.service = ShareService(broker, self.persister)
        self.service.dead_letters = NodeDeadLetters(broker)
        self.due_letters = DueLetters(broker)
        broker.metrics.register(self.service, SHARE_METRICS)
