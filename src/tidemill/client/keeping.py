"""Signs of life: what a client holds on a server expires unless the client says that it is still needed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import NoReturn

from tidemill.errors import TidemillError

__all__ = ("keep_alive",)


async def keep_alive(interval_seconds: float, sign: Callable[[], Awaitable[object]]) -> NoReturn:
    """Await ``sign()`` from time to time, until this is cancelled.

    A failure is tried again at the next time: the interval is so short that it takes more than one to lose
    what is held.
    """
    while True:
        await asyncio.sleep(interval_seconds)
        with contextlib.suppress(TidemillError, OSError):
            await sign()
