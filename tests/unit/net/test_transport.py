"""Listening: what a forked child has of it."""

from __future__ import annotations

import asyncio
import os
import signal

from tidemill.config.values import Address
from tidemill.net.transport import TcpTransport


async def test_a_forked_child_does_not_keep_the_port() -> None:
    transport = TcpTransport()
    listener = await transport.listen(Address("127.0.0.1", 0), asyncio.Protocol, 10)
    await listener.start_serving()
    ours, childs = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(childs, b"x")
        signal.pause()
    try:
        assert os.read(ours, 1) == b"x"
        _, writer = await asyncio.open_connection(listener.address.host, listener.address.port)
        writer.close()
        listener.close()
        again = await transport.listen(listener.address, asyncio.Protocol, 10)
        await again.start_serving()
        again.close()
    finally:
        os.kill(child, signal.SIGKILL)
        await asyncio.to_thread(os.waitpid, child, 0)
        os.close(ours)
        os.close(childs)
