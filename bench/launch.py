"""Starts ``tidemill`` as it runs where only its own dependencies are installed.

kio imports hypothesis when it finds it. It finds it here, because the tests use it; a user who installs
tidemill does not have it, and pays neither the time nor the memory.

With ``BENCH_MODULES_FILE=FILE`` in the environment, the names of all modules loaded at the end are written to
that file, in the order of their loading. With ``BENCH_STALL_FILE=FILE`` the longest time for which the node's
event loop did not get its turn is kept in that file, and the most processor time that the whole node used
during one such time: two doubles in seconds. Whoever writes zeros to it starts anew. With
``BENCH_UNCHECKED=1`` the node does not look at the records of batches.
"""

from __future__ import annotations

import asyncio
import atexit
import mmap
import os
import sys
import time
from pathlib import Path
from struct import Struct

__all__ = ("MODULES_VARIABLE", "STALL", "STALL_VARIABLE", "UNCHECKED_VARIABLE")

MODULES_VARIABLE = "BENCH_MODULES_FILE"
STALL_VARIABLE = "BENCH_STALL_FILE"
UNCHECKED_VARIABLE = "BENCH_UNCHECKED"
STALL = Struct("dd")
_TICK_SECONDS = 0.001


def watch_stalls(path: Path) -> None:
    """Let every node of this process note in the file how long its loop was held up."""
    from tidemill.server.node import Node

    started = Node.start
    file = path.open("r+b")
    longest = mmap.mmap(file.fileno(), STALL.size)
    watchers: list[asyncio.Task[None]] = []

    async def watch() -> None:
        loop = asyncio.get_running_loop()
        last, cpu_last = loop.time(), time.process_time()
        while True:
            await asyncio.sleep(_TICK_SECONDS)
            now, cpu_now = loop.time(), time.process_time()
            stall = now - last - _TICK_SECONDS
            before, cpu_before = STALL.unpack_from(longest)
            # Several threads may have computed at the same time.
            cpu = min(stall, cpu_now - cpu_last)
            if stall > before or cpu > cpu_before:
                STALL.pack_into(longest, 0, max(stall, before), max(cpu, cpu_before))
            last, cpu_last = now, cpu_now

    async def start(node: Node) -> None:
        await started(node)
        watchers.append(asyncio.get_running_loop().create_task(watch()))

    Node.start = start  # type: ignore[method-assign]


def look_at_no_records() -> None:
    """Have nodes of this process take batches for their checksum alone, as they did once.

    To be called before the server is imported, whose modules take these functions by name.
    """
    from tidemill.log import incoming

    incoming.check_records = lambda header, *arguments: header.max_timestamp
    incoming._unpack = lambda *arguments: b""
    incoming.is_quick = lambda *arguments: True


if __name__ == "__main__":
    sys.modules["hypothesis"] = None  # type: ignore[assignment]
    if MODULES_VARIABLE in os.environ:
        modules_file = Path(os.environ[MODULES_VARIABLE])
        atexit.register(lambda: modules_file.write_text("\n".join(sys.modules)))
    if STALL_VARIABLE in os.environ:
        watch_stalls(Path(os.environ[STALL_VARIABLE]))
    if UNCHECKED_VARIABLE in os.environ:
        look_at_no_records()
    from tidemill.cli import main

    main()
