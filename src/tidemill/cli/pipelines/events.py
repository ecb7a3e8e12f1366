"""Events of a run, from what ``spark-pipelines`` prints.

Spark prints one line per event, ``2026-01-31 12:00:00: Flow spark_catalog.default.orders is RUNNING.``; an
error goes on over further lines. Rules:

- Lines go in with the time at which they came; events come out. Nothing here reads a clock or a file.
- Spark says of a flow that fails that it has completed, and a moment later that it has failed. So a flow
  counts as finished only when Spark has gone on to something else for a while, or when the run is over.
- What the pipeline's own code prints is handed on.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any, Final

from tidemill.cli.pipelines.errors import essence, short_name

__all__ = (
    "PROGRESS_MARK",
    "Event",
    "Failed",
    "Finished",
    "Refused",
    "RunCompleted",
    "Said",
    "Started",
    "Translator",
)

#: What precedes the progress of a streaming query, which is JSON on one line.
PROGRESS_MARK: Final = "Streaming query made progress: "
_EVENT: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d: (.*)")
_FLOW: Final = re.compile(r"Flow '?(?P<flow>[^']+?)'? (?:is|has) (?P<state>[A-Z]+)(?P<rest>.*)\.")
_UNRESOLVED: Final = re.compile(r"Failed to resolve flow: '(?P<flow>.+)'\.")
_LAST_TIME: Final = "will not be restarted"
_HELD_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True)
class Started:
    """A flow has started, for the ``attempt``-th time."""

    flow: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A flow is done. ``rows`` is what a stream has read; None for a view, of which Spark does not say it."""

    flow: str
    seconds: float
    rows: int | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A flow failed. ``final``: Spark does not start it again."""

    flow: str
    reason: str
    final: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A flow that cannot run as it is written."""

    flow: str
    reason: str


@dataclass(frozen=True, slots=True)
class Said:
    """A line that the pipeline's own code has printed."""

    text: str


@dataclass(frozen=True, slots=True)
class RunCompleted:
    """The whole run is over: every flow has ended."""


Event = Started | Finished | Failed | Refused | Said | RunCompleted


@dataclass(slots=True)
class _Flow:
    started: float = 0.0
    attempts: int = 0
    rows: int = 0
    completed: float | None = None
    #: Whether it is a view: streams are not planned.
    planned: bool = False
    #: Why this attempt failed; Spark may say it twice.
    reason: str | None = None


@dataclass(slots=True)
class _Trouble:
    """An error whose further lines are being collected."""

    flow: str
    unresolved: bool
    final: bool
    lines: list[str] = field(default_factory=list)

    def event(self) -> Failed | Refused:
        reason = essence("\n".join(self.lines).removeprefix("Error: "))
        if self.unresolved:
            return Refused(self.flow, reason)
        return Failed(self.flow, reason, self.final)


class Translator:
    """Translates lines into events."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}
        self._trouble: _Trouble | None = None

    def printed(self, line: str, now: float) -> list[Event]:
        """Translate a line of the standard output of ``spark-pipelines``."""
        found = _EVENT.fullmatch(line)
        if found is None:
            if self._trouble is not None:
                self._trouble.lines.append(line)
                return []
            return [Said(line)] if line.strip() else []
        events = self._end_trouble()
        message = found[1]
        if unresolved := _UNRESOLVED.fullmatch(message):
            self._trouble = _Trouble(short_name(unresolved["flow"]), unresolved=True, final=True)
        elif flow := _FLOW.fullmatch(message):
            events += self._flow(short_name(flow["flow"]), flow["state"], flow["rest"], now)
        elif message == "Run is COMPLETED.":
            events += [*self._release(now, _HELD_SECONDS), RunCompleted()]
        return [*self._release(now), *events]

    def logged(self, line: str) -> None:
        """Note a line of Spark's log: the progress of a streaming query counts rows."""
        _, mark, text = line.partition(PROGRESS_MARK)
        if not mark:
            return
        try:
            progress: Any = json.loads(text)
            name, rows = progress["name"], int(progress["numInputRows"])
        except (ValueError, KeyError, TypeError):
            return
        flow = self._flows.setdefault(short_name(str(name)), _Flow())
        flow.rows += rows

    def ended(self, now: float) -> list[Event]:
        """Give the last events: no more lines will come."""
        return [*self._end_trouble(), *self._release(now, _HELD_SECONDS)]

    def _flow(self, name: str, state: str, rest: str, now: float) -> list[Event]:
        flow = self._flows.setdefault(name, _Flow())
        match state:
            case "STARTING":
                flow.started, flow.completed, flow.reason = now, None, None
                flow.attempts += 1
                return [Started(name, flow.attempts)]
            case "PLANNING":
                flow.planned = True
            case "COMPLETED":
                flow.completed = now
            case "FAILED":
                flow.completed = None
                self._trouble = _Trouble(name, unresolved=False, final=_LAST_TIME in rest)
        return []

    def _end_trouble(self) -> list[Event]:
        trouble, self._trouble = self._trouble, None
        if trouble is None:
            return []
        event = trouble.event()
        if isinstance(event, Failed):
            flow = self._flows[event.flow]
            if flow.reason == event.reason and not event.final:
                return []
            flow.reason = event.reason
        return [event]

    def _release(self, now: float, grace_seconds: float = 0.0) -> list[Event]:
        """The events of flows that completed long enough ago."""
        events: list[Event] = []
        for name, flow in self._flows.items():
            if flow.completed is not None and now + grace_seconds - flow.completed >= _HELD_SECONDS:
                rows = None if flow.planned else flow.rows
                events.append(Finished(name, flow.completed - flow.started, rows))
                flow.completed = None
        return events
