"""Loading code at its first use: in a thread, while the event loop goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from importlib import import_module

__all__ = ("load_in_thread",)


async def load_in_thread(modules: Iterable[str]) -> None:
    """Import the modules with all that they need. It takes a turn of the loop also if they are loaded."""
    await asyncio.to_thread(_load, tuple(modules))


def _load(modules: Iterable[str]) -> None:
    for module in modules:
        import_module(module)
