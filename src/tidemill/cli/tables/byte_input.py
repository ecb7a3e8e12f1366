"""Bytes of a file or pipe that can be abandoned at any time, and work that runs ahead on a thread.

A program that waits for a pipe must still end at Ctrl-C, although Arrow reads with threads that it cannot
stop. So every read here waits for the pipe or for ``stop``, whichever comes first; after ``stop`` the input
is at its end.
"""

from __future__ import annotations

import asyncio
import io
import os
import select
import stat
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar

from tidemill.cli.session import tell_waiting

__all__ = ("STDIN", "Input", "run_ahead")

#: The name under which stdin is given as a file.
STDIN: Final = Path("-")
_AHEAD: Final = 2

_T = TypeVar("_T")


class Input(io.RawIOBase):
    """A file, or stdin, open for reading. ``bytes_read`` counts what was taken from it."""

    def __init__(self, path: Path) -> None:
        #: The descriptors that ``close`` closes.
        self._own: list[int] = []
        #: Guards against using a descriptor after it is closed, when it may be another file's.
        self._closing = threading.Lock()
        if path == STDIN:
            self._descriptor = sys.stdin.fileno()
            tell_waiting(self._descriptor, "type rows, in the format that was named")
        else:
            self._descriptor = os.open(path, os.O_RDONLY)
            self._own.append(self._descriptor)
        self._stopped, self._stop = os.pipe()
        self._own += [self._stopped, self._stop]
        self._is_stopped = False
        self.bytes_read = 0
        found = os.fstat(self._descriptor)
        #: The size of the file; None for a pipe.
        self.size: int | None = found.st_size if stat.S_ISREG(found.st_mode) else None

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if not self._is_stopped:
            select.select([self._descriptor, self._stopped], [], [])
        # Checked again, because it may have been stopped meanwhile.
        if self._is_stopped:
            return 0
        data = os.read(self._descriptor, len(buffer))
        buffer[: len(data)] = data
        self.bytes_read += len(data)
        return len(data)

    def stop(self) -> None:
        """End the input, also for a thread that waits for it."""
        self._is_stopped = True
        with self._closing:
            if not self.closed:
                os.write(self._stop, b"\0")

    def close(self) -> None:
        """Close the input. Nobody may be reading it any more."""
        with self._closing:
            if not self.closed:
                super().close()
                for descriptor in self._own:
                    os.close(descriptor)


async def run_ahead(items: Iterator[_T], stop: Callable[[], None]) -> AsyncGenerator[_T]:
    """The items of a blocking iterator, a few of which are made before they are asked for.

    They are made by a thread; ``stop`` makes the iterator end soon. The thread has ended when this has.
    """
    loop = asyncio.get_running_loop()
    made: asyncio.Queue[tuple[bool, Any]] = asyncio.Queue()
    capacity = threading.Semaphore(_AHEAD)
    left = threading.Event()

    def put(is_last: bool, value: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(made.put_nowait, (is_last, value))

    def make() -> None:
        end: Exception | None = None
        try:
            for item in items:
                capacity.acquire()
                if left.is_set():
                    break
                put(False, item)
        except Exception as error:  # noqa: BLE001 - raised again where the items are asked for
            end = error
        put(True, end)

    thread = threading.Thread(target=make, name="tidemill-input", daemon=True)
    thread.start()
    try:
        while True:
            is_last, value = await made.get()
            if is_last:
                break
            capacity.release()
            yield value
        if value is not None:
            raise value
    finally:
        left.set()
        stop()
        capacity.release()
        await asyncio.to_thread(thread.join)
