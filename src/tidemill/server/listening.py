"""The socket that Kafka clients connect to, bound without the help of the event loop where that is possible.

uvloop resolves even an address that is written out, and libuv does that on threads of its own, which it joins
when the process ends: a process that was forked from one with a node has no such threads, and crashed at its
end.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from tidemill.config.values import Address

__all__ = ("bound_server",)


async def bound_server(
    protocol: Callable[[], asyncio.BaseProtocol], address: Address, backlog: int
) -> asyncio.Server:
    """A server that has taken its port and does not serve yet. Raises OSError."""
    loop, bound = asyncio.get_running_loop(), _bound_socket(address)
    if bound is None:
        return await loop.create_server(
            protocol, address.host, address.port, backlog=backlog, start_serving=False
        )
    return await loop.create_server(protocol, sock=bound, backlog=backlog, start_serving=False)


def _bound_socket(address: Address) -> socket.socket | None:
    """A socket that is bound to an address in numbers; None for a name, which must be resolved. Raises
    OSError.
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
        # As event loops set it: a port is free again as soon as its node has ended.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.setblocking(False)
        bound.bind(where)
    except BaseException:
        bound.close()
        raise
    return bound
