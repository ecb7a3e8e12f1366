"""Lines from a file or a pipe, read by a thread of their own so that the event loop never waits for them."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from typing import Final

__all__ = ("read_lines",)

_CHUNK_BYTES: Final = 256 * 1024
_CHUNKS_AHEAD: Final = 8


async def read_lines(descriptor: int) -> AsyncIterator[list[bytes]]:
    """The lines of an open file, in lists, without their ends; the last one need not have an end.

    A thread that waits for a terminal cannot be stopped, so it is a daemon: it ends with the process.
    """
    loop = asyncio.get_running_loop()
    chunks: asyncio.Queue[bytes | OSError] = asyncio.Queue()
    room = threading.Semaphore(_CHUNKS_AHEAD)

    def read() -> None:
        chunk: bytes | OSError = b"-"
        while chunk and not isinstance(chunk, OSError):
            room.acquire()
            try:
                chunk = os.read(descriptor, _CHUNK_BYTES)
            except OSError as error:
                chunk = error
            if loop.is_closed():
                return
            loop.call_soon_threadsafe(chunks.put_nowait, chunk)

    threading.Thread(target=read, name="tidemill-input", daemon=True).start()
    rest = b""
    while chunk := await chunks.get():
        room.release()
        if isinstance(chunk, OSError):
            raise chunk
        *lines, rest = (rest + chunk).split(b"\n")
        yield lines
    if rest:
        yield [rest]
