"""Running a node with its HTTP side, from start to stop, for the command line and ``tidemill.open``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

from tidemill.server.node import Node

__all__ = ("run_until",)


async def run_until(node: Node, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
    """Start ``node``, call ``on_ready``, and stop it in an orderly way when ``stop`` is set.

    HTTP comes first and goes last, so that health can be asked for while a long recovery runs.
    """
    async with AsyncExitStack() as stack:
        if node.settings.http is not None:
            # HTTP costs an import of its own, so it is loaded only when it is wanted.
            from tidemill.server.http import HttpServer

            http = HttpServer(node)
            await http.start(node.settings.http)
            stack.push_async_callback(http.stop)
        await node.start()
        stack.push_async_callback(node.stop)
        on_ready()
        await stop.wait()
