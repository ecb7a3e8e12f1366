"""The display of a run: a line per event for people, or a JSON document per event for programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tidemill.cli.output import write_json, write_line
from tidemill.cli.pipelines.events import Event, Failed, Finished, Refused, RunCompleted, Said, Started

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

__all__ = ("Screen",)

_WIDTH = 24


class Screen:
    """Shows events, and on a terminal also what is going on right now."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._console: Console | None = None
        self._status: Status | None = None
        self._running: list[str] = []

    @contextmanager
    def live(self) -> Iterator[None]:
        """A context in which a terminal has a line that says what is being done."""
        if self._as_json or not sys.stdout.isatty():
            yield
            return
        from rich.console import Console

        self._console = Console(no_color="NO_COLOR" in os.environ, highlight=False)
        with self._console.status("") as self._status:
            yield
        self._console = self._status = None

    def doing(self, text: str) -> None:
        """Say what is being done, until something else is."""
        if self._status is not None:
            self._status.update(text)

    def clear(self) -> None:
        """Remove the line that says what is being done, so that it does not cover other output."""
        if self._status is not None:
            self._status.stop()

    def say(self, text: str, **event: Any) -> None:
        """Show a line to people, or the event to programs."""
        if self._as_json:
            write_json(event or {"event": "output", "text": text})
        elif self._console is not None:
            from rich.text import Text

            self._console.print(Text(text), soft_wrap=True)
        else:
            write_line(text)

    def advise(self, text: str) -> None:
        """Show a line to people. Programs find the same in the events."""
        if not self._as_json:
            self.say(text)

    def show(self, event: Event) -> None:
        """Show one event."""
        self._follow(event)
        document = {"event": type(event).__name__.lower(), **asdict(event)}
        match event:
            case Said(text):
                self.say(text)
            case Started(flow, attempt):
                if attempt > 1:
                    self.say(f"  {flow:<{_WIDTH}} once more (attempt {attempt})", **document)
                elif self._as_json:
                    write_json(document)
            case Finished(flow, seconds, rows):
                done = "computed" if rows is None else f"{rows:,} rows" if rows else "nothing new"
                self.say(f"  {flow:<{_WIDTH}} {done} in {seconds:.1f} s", **document)
            case Failed(flow, reason, final):
                again = "" if final else "; Spark starts it again"
                self.say(f"  {flow:<{_WIDTH}} failed{again}: {reason}", **document)
            case Refused(flow):
                self.say(f"  {flow:<{_WIDTH}} cannot run as it is written", **document)
            case RunCompleted():
                pass

    def _follow(self, event: Event) -> None:
        if isinstance(event, Started):
            self._running.append(event.flow)
        elif isinstance(event, Finished | Failed) and event.flow in self._running:
            self._running.remove(event.flow)
        if self._running:
            self.doing(f"running: {', '.join(self._running)}")
