"""The side of a client process that ``support.processes.ClientProcess`` talks to.

A client script marks functions with ``@scenario`` and ends with ``serve()``. Each call runs one of them, in
order; an assertion that fails travels back with the local variables of its frame. Coroutines run on one event
loop that lives as long as the process.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ("BOOTSTRAP", "MemberState", "scenario", "serve", "until")

#: Where the node is; the first argument of every client script.
BOOTSTRAP = sys.argv[1] if len(sys.argv) > 1 else ""

_F = TypeVar("_F", bound=Callable[..., Any])
_scenarios: dict[str, Callable[..., Any]] = {}


def scenario(function: _F) -> _F:
    """Make a function callable from the tests, under its name."""
    _scenarios[function.__name__] = function
    return function


def until(condition: Callable[[], Any], deadline_seconds: float = 120.0) -> Any:
    """What ``condition`` returns once it is true, asked again and again."""
    deadline = time.monotonic() + deadline_seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"still not true: {inspect.getsource(condition).strip()}"
        time.sleep(0.02)
    return found


class MemberState:
    """What a member of a consumer group has seen so far. Any thread may write or wait."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.assigned: set[int] = set()
        self.rebalances = 0
        self.values: list[str] = []

    def assign(self, partitions: set[int]) -> None:
        with self._changed:
            self.assigned = partitions
            self.rebalances += 1
            self._changed.notify_all()

    def read(self, value: str) -> None:
        with self._changed:
            self.values.append(value)
            self._changed.notify_all()

    def wait(self, partitions: int | None, values: int) -> dict[str, Any]:
        """Wait for that many partitions and at least that many values."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: (
                    (partitions is None or len(self.assigned) == partitions) and len(self.values) >= values
                ),
                timeout=120,
            )
            assert arrived, f"wanted {partitions} partitions and {values} values: {vars(self)}"
            return {
                "assigned": sorted(self.assigned),
                "rebalances": self.rebalances,
                "values": sorted(self.values),
            }


def _describe(error: Exception) -> str:
    """The traceback below this module, with local variables."""
    below = error.__traceback__.tb_next if error.__traceback__ else None
    shown = traceback.TracebackException(type(error), error, below, capture_locals=True)
    return "".join(part[:2_000] for part in shown.format())


def serve() -> None:
    """Answer calls until the input ends."""
    # Libraries may print; the answers keep the real standard output for themselves.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    for line in sys.stdin:
        call = json.loads(line)
        try:
            result = _scenarios[call["name"]](**call["arguments"])
            if inspect.iscoroutine(result):
                result = asyncio.run_coroutine_threadsafe(result, loop).result()
            answer = {"result": result}
        except Exception as error:
            answer = {"error": _describe(error)}
        answers.write(json.dumps(answer) + "\n")
    # Threads of a client that hangs must not keep the process.
    os._exit(0)
