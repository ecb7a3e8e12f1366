"""Ports for servers that are killed and come back at the same address.

The kernel gives ports of its ephemeral range to outgoing connections, too. One that a test has been given
there, and that nobody listens at for a moment, can be gone. So these are below that range.
"""

from __future__ import annotations

import contextlib
import random
import socket

__all__ = ("free_port", "free_ports")

_FIRST, _BEHIND = 12_000, 32_000


def free_ports(count: int) -> list[int]:
    """That many ports of this machine that nobody uses now, and no outgoing connection will."""
    chance = random.SystemRandom()  # Tests seed the common one, and two processes must not choose alike.
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            port = chance.randrange(_FIRST, _BEHIND)
            bound = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):
                bound.bind(("127.0.0.1", port))
                ports.append(port)
    return ports


def free_port() -> int:
    """A port of this machine that nobody uses now, and no outgoing connection will."""
    return free_ports(1)[0]
