"""Where blocking work runs: in pools of threads on a real node, at seeded times in a simulation.

What runs seldom goes through ``asyncio.to_thread``, that is to the default executor of the event loop; the
loop of a simulation has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

__all__ = ("Pools", "thread_pool")

Pools = Callable[[str, int], Executor]
"""A function that makes a pool: its purpose, and how many calls run side by side (1: in order)."""


def thread_pool(purpose: str, threads: int) -> Executor:
    """A pool of real threads, which are started when they are needed."""
    return ThreadPoolExecutor(threads, thread_name_prefix=f"tidemill-{purpose}")
