"""Connections belong to the process that opened them: forked children and pickles are told so.

A forked child has neither the thread that a connection runs in nor its sockets to itself, so a call there
would wait for ever, or take the parent's answers. Nothing of a connection can be put into a pickle either.
Both get an error that says what to do instead.
"""

from __future__ import annotations

import os
from typing import NoReturn

from tidemill.errors import ConnectionClosed

__all__ = ("OpeningProcess", "Unpicklable", "opening_of_table")


def opening_of_table(servers: str, table: str) -> str:
    """The expression that opens a table in another process."""
    return f"tidemill.connect({servers!r}).table({table!r})"


class OpeningProcess:
    """The process in which a connection was opened: the one that makes this object."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_this(self) -> bool:
        """False in every process that was forked since."""
        return os.getpid() == self._pid

    def check(self, servers: object) -> None:
        """Raise ``ConnectionClosed`` in a forked process. ``servers`` says where it can connect to itself."""
        if not self.is_this:
            raise ConnectionClosed(
                f"this connection was opened by process {self._pid}; process {os.getpid()}, forked from it, "
                f"cannot use it. Open one of its own: tidemill.connect({str(servers)!r})"
            )


class Unpicklable:
    """Part of an open connection: pickling or copying it raises ``TypeError`` with what to send instead."""

    def _instead_of_a_pickle(self) -> str:
        """A sentence that says what another process does to get the same."""
        raise NotImplementedError

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled or copied: it belongs to a connection of this process. "
            f"{self._instead_of_a_pickle()}"
        )
