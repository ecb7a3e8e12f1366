"""Running a node with its HTTP side: what the command line and ``tidemill.open`` share."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from contextlib import AsyncExitStack

from tidemill.server.connections.exposure import check_exposure
from tidemill.server.node import Node

__all__ = ("run_until", "tame_collector")

#: Thresholds of the garbage collector's three generations, as ``gc.set_threshold`` takes them.
_COLLECT_AFTER = (5_000, 3, 10_000)


def tame_collector() -> None:
    """Have the garbage collector look at what is new, and seldom at everything: for a process that is a node.

    A large answer is some hundred thousand objects. With Python's own thresholds they make it look at every
    object of the process, again and again, and the event loop stands still for that. A collection of the
    middle-aged looks at some 20,000 objects, which takes 2 to 3 ms.
    """
    # Objects made until now stay for good, so that collections need not look at them.
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


async def run_until(node: Node, stop: asyncio.Event, on_ready: Callable[[], None]) -> None:
    """Start ``node``, call ``on_ready``, and stop it in an orderly way when ``stop`` is set.

    HTTP comes first and goes last, so that health can be asked for while a long recovery runs; before it only
    the data directory is locked, because a node that runs there most likely has the HTTP port, too. If
    ``stop`` is set during the start, what was begun is undone and ``on_ready`` is not called.
    """
    await check_exposure(node.settings)
    async with AsyncExitStack() as stack:
        node.directory.lock()
        stack.callback(node.directory.release)
        if node.settings.http is not None:
            # HTTP costs an import of its own, so it is loaded only when it is wanted.
            from tidemill.server.http import HttpServer

            http = HttpServer(node)
            await http.start(node.settings.http)
            stack.push_async_callback(http.stop)
        if not await _started(node, stop):
            return
        stack.push_async_callback(node.stop)
        on_ready()
        await stop.wait()


async def _started(node: Node, stop: asyncio.Event) -> bool:
    """Wait for the start. False if ``stop`` came first: what was begun has been undone."""
    starting = asyncio.ensure_future(node.start())
    stopped = asyncio.ensure_future(stop.wait())
    await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
    if starting.cancelled():
        return False
    starting.result()
    return True
