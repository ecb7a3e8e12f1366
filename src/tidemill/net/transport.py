"""Transports: listening at an address, and connecting to one.

``TcpTransport`` is the real one. It binds without the help of the event loop where that is possible: uvloop
resolves even an address that is written out, and libuv does that on threads of its own, which it joins when
the process ends. A process that was forked from one with a node has no such threads, and crashed at its end.
"""

from __future__ import annotations

import asyncio
import os
import socket
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tidemill.config.values import Address

if TYPE_CHECKING:
    from ssl import SSLContext

__all__ = ("Listener", "TcpTransport", "Transport")

#: A connection is seen, and limited, by the node only after its TLS handshake, which may take this long.
_TLS_HANDSHAKE_SECONDS = 5.0


class Listener(Protocol):
    """A bound address that accepts connections once ``start_serving`` was called."""

    @property
    def address(self) -> Address:
        """The address at which it listens, with the real port."""

    async def start_serving(self) -> None:
        """Accept connections from now on."""

    def close(self) -> None:
        """Accept no more connections; those that are open stay."""


class Transport(Protocol):
    """Makes connections in both directions."""

    async def listen(
        self, address: Address, protocol: Callable[[], asyncio.BaseProtocol], backlog: int
    ) -> Listener:
        """Bind an address; connections are accepted once ``start_serving`` is called. Raises OSError."""

    async def connect(
        self, address: Address, protocol: Callable[[], asyncio.BaseProtocol]
    ) -> asyncio.Transport:
        """Connect to an address. Raises OSError."""


class TcpTransport:
    """The ``Transport`` over TCP sockets of the operating system, with TLS where it is given a context.

    ``server_tls`` is for connections that are accepted, ``client_tls`` for those that are opened.
    """

    def __init__(self, *, server_tls: SSLContext | None = None, client_tls: SSLContext | None = None) -> None:
        self._server_tls = server_tls
        self._client_tls = client_tls

    async def listen(
        self, address: Address, protocol: Callable[[], asyncio.BaseProtocol], backlog: int
    ) -> Listener:
        loop, bound, tls = asyncio.get_running_loop(), _bound_socket(address), self._server_tls
        deadline = _TLS_HANDSHAKE_SECONDS if tls is not None else None
        if bound is None:
            server = await loop.create_server(
                protocol,
                address.host,
                address.port,
                backlog=backlog,
                ssl=tls,
                ssl_handshake_timeout=deadline,
                start_serving=False,
            )
        else:
            server = await loop.create_server(
                protocol,
                sock=bound,
                backlog=backlog,
                ssl=tls,
                ssl_handshake_timeout=deadline,
                start_serving=False,
            )
        return _TcpListener(server)

    async def connect(
        self, address: Address, protocol: Callable[[], asyncio.BaseProtocol]
    ) -> asyncio.Transport:
        transport, _ = await asyncio.get_running_loop().create_connection(
            protocol, address.host, address.port, ssl=self._client_tls
        )
        return transport


class _TcpListener:
    """The ``Listener`` over a server of the event loop."""

    def __init__(self, server: asyncio.Server) -> None:
        self._server = server
        self.address = Address(*server.sockets[0].getsockname()[:2])
        self.start_serving = server.start_serving
        #: File descriptors of the listening sockets; none once they are closed.
        self.descriptors = [each.fileno() for each in server.sockets]
        _listeners.add(self)

    def close(self) -> None:
        self.descriptors = []
        self._server.close()


_listeners: weakref.WeakSet[_TcpListener] = weakref.WeakSet()


def _let_go_in_child() -> None:
    """Close the listening sockets in a forked child, or the port stays taken when the node has ended.

    The numbers stay in use, by something harmless: the child's copies of the sockets close them one day.
    """
    listeners = list(_listeners)
    if not listeners:
        return
    harmless = os.open(os.devnull, os.O_RDWR)
    for listener in listeners:
        for descriptor in listener.descriptors:
            os.dup2(harmless, descriptor, inheritable=False)
    os.close(harmless)


os.register_at_fork(after_in_child=_let_go_in_child)


def _bound_socket(address: Address) -> socket.socket | None:
    """A socket that is bound to an address in numbers; None for a name, which must be resolved.

    Raises ``OSError``.
    """
    try:
        found = socket.getaddrinfo(
            address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
    except socket.gaierror:
        return None
    family, kind, protocol, _, where = found[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # asyncio sets it for its own sockets, too: a port is free again as soon as its node has ended.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.setblocking(False)
        bound.bind(where)
    except BaseException:
        bound.close()
        raise
    return bound
