"""Where blocking work runs: in pools of threads on a real node, at seeded times in a simulation.

What runs seldom goes through ``asyncio.to_thread``, that is to the default executor of the event loop; the
loop of a simulation has its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TypeVar

__all__ = ("Pools", "run_to_end", "thread_pool")

_T = TypeVar("_T")

Pools = Callable[[str, int], Executor]
"""A function that makes a pool: its purpose, and how many calls run side by side (1: in order)."""


def thread_pool(purpose: str, threads: int) -> Executor:
    """A pool of real threads, which are started when they are needed."""
    return ThreadPoolExecutor(threads, thread_name_prefix=f"tidemill-{purpose}")


async def run_to_end(threads: Executor, work: Callable[[], _T]) -> _T:
    """The result of work in a thread. A caller that is cancelled waits for its end: nothing can stop it."""
    running = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        # An error is looked at, or asyncio reports it: nobody is left to be told of it.
        running.exception()
        raise
