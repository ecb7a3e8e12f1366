"""A gate that keeps a database open while calls into it are under way, and refuses calls once it closes.

rocksdict must not be trusted with this: a call during ``close`` meets a borrowed object, and an iterator that
outlives ``close`` keeps the database open and its lock file locked.
"""

from __future__ import annotations

import threading

from tidemill.errors import StorageError

__all__ = ("Gate",)


class Gate:
    """Counts the calls into a database: ``with gate:`` goes around each. Thread-safe."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._condition = threading.Condition()
        self._inside = 0
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def __enter__(self) -> None:
        with self._condition:
            self.check()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._condition:
            self._inside -= 1
            if not self._inside:
                self._condition.notify_all()

    def check(self) -> None:
        """Raise ``StorageError`` if the gate is closed."""
        if self._closed:
            raise StorageError(f"the store {self._path} is closed; open it again")

    def close(self) -> bool:
        """Refuse new calls and wait for those under way. False if it was closed before."""
        with self._condition:
            if self._closed:
                return False
            self._closed = True
            self._condition.wait_for(lambda: not self._inside)
            return True
