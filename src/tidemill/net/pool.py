"""Open connections by address and purpose: opened at first use, replaced after a failure.

What may hold up others, such as a long poll, has a purpose and so a connection of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from tidemill.config.values import Address
from tidemill.errors import ConnectionClosed, NodeUnavailable, ProtocolError, TidemillError
from tidemill.net.connection import Connection
from tidemill.net.transport import Transport

__all__ = ("ConnectionPool",)

_Key = tuple[Address, str]


class ConnectionPool:
    """Connections of one process and one event loop to any number of nodes.

    ``client_id`` is the name that nodes know it by, ``transport`` the way to them: TCP unless it is given.
    """

    def __init__(self, *, client_id: str, transport: Transport | None = None) -> None:
        self._client_id = client_id
        self._transport = transport
        self._connections: dict[_Key, Connection] = {}
        #: Two callers that need the same connection open it once; others need not wait for them.
        self._opening: dict[_Key, asyncio.Lock] = {}
        self._closed = False

    @property
    def was_connected(self) -> bool:
        """Whether a node has answered at least once."""
        return bool(self._connections)

    async def get(self, address: Address, purpose: str = "") -> Connection:
        """The connection to a node for this purpose. Raises ``NodeUnavailable`` or ``ProtocolError``."""
        key = address, purpose
        if (connection := self._usable(key)) is not None:
            return connection
        async with self._opening.setdefault(key, asyncio.Lock()):
            if (connection := self._usable(key)) is None:
                connection = await Connection.open(
                    address, client_id=self._client_id, transport=self._transport
                )
                if self._closed:
                    await connection.close()
                    raise ConnectionClosed(f"the connection to {address} was closed while it was opened")
                self._connections[key] = connection
        return connection

    async def get_any(self, addresses: Iterable[Address], purpose: str = "") -> Connection:
        """A connection that is open to one of these addresses, or else to the first that answers."""
        wanted = list(dict.fromkeys(addresses))
        for address in wanted:
            if (connection := self._usable((address, purpose))) is not None:
                return connection
        failure: TidemillError | None = None
        for address in wanted:
            try:
                return await self.get(address, purpose)
            except (NodeUnavailable, ProtocolError) as error:
                failure = failure or error
        assert failure is not None, "there is always an address"
        raise failure

    async def drop(self, purpose: str) -> None:
        """Close the connections for this purpose, with whatever is under way; they can be opened again."""
        dropped = [key for key in self._connections if key[1] == purpose]
        for key in dropped:
            self._opening.pop(key, None)
        for connection in [self._connections.pop(key) for key in dropped]:
            await connection.close()

    async def close(self) -> None:
        """Close every connection. Nothing can be opened afterwards."""
        self._closed = True
        connections, self._connections = self._connections, {}
        for connection in connections.values():
            await connection.close()

    def _usable(self, key: _Key) -> Connection | None:
        if self._closed:
            raise ConnectionClosed(f"the connection to {key[0]} is closed")
        connection = self._connections.get(key)
        return None if connection is None or connection.failed else connection
