"""What a node does for share groups, loaded and made at its first use: a node that has none goes without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidemill.coordination.loading import load_in_thread
from tidemill.server.coordinators.share_state import SHARE_STATE

if TYPE_CHECKING:
    from tidemill.server.broker.bundle import Broker
    from tidemill.server.share.node_share import NodeShare

__all__ = ("LazyShare",)

_CODE: Final = ("tidemill.server.share.node_share",)


class LazyShare:
    """Makes ``NodeShare`` at its first use, and stands in for it until then."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        #: The services, once they are made.
        self.made: NodeShare | None = None

    def get(self) -> NodeShare:
        """The services, made now if they were not. Handlers that need them have loaded their code."""
        if self.made is None:
            from tidemill.server.share.node_share import NodeShare

            self.made = NodeShare(self._broker)
        return self.made

    async def look_after_due_letters(self) -> None:
        """Have dead letters written that are due, if this node may have noted any."""
        if self.made is None:
            if not self._broker.coordinators.has_topic(SHARE_STATE):
                return
            await load_in_thread(_CODE)
        await self.get().due_letters.look_after()

    async def check_log_starts(self) -> None:
        """Notice that retention has passed records that wait."""
        if self.made is not None:
            await self.made.service.check_log_starts()

    def connection_closed(self, connection: int) -> None:
        """Release what the members of a closed connection hold."""
        if self.made is not None:
            self.made.service.connection_closed(connection)

    def stop(self) -> None:
        """Stop writing the state of share partitions, because the node stops."""
        if self.made is not None:
            self.made.service.close()

    async def close(self) -> None:
        """Answer everybody who waits for state to be read or written."""
        if self.made is not None:
            await self.made.persister.close()
