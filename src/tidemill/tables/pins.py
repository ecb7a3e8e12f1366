"""Pins: the state of all buckets of a table, held still under one id while many read it.

A pin is cheap and lives in memory only: RocksDB snapshots, one per bucket. It expires when nobody has used it
for its time; a session that reads it keeps it in use, and keeps its own view when the pin is released.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tidemill.errors import TableCode, TableError
from tidemill.tables.scanners import BucketKey

__all__ = ("UNUSED_MS", "Pin", "Pins", "SharedView")

#: A pin that nobody has used for so long makes room for a new one, if there is none else.
UNUSED_MS = 60_000


class SharedView:
    """A view with several users; the last one closes it."""

    def __init__(self, view: object, log_offset: int, close: Callable[[], None]) -> None:
        self.view = view
        self.log_offset = log_offset
        self._close = close
        self._users = 1

    def share(self) -> SharedView:
        self._users += 1
        return self

    def release(self) -> None:
        self._users -= 1
        if self._users == 0:
            self._close()


@dataclass(slots=True)
class Pin:
    """One pin. ``epochs`` are the leader epochs under which the views were taken."""

    id: str
    table_id: int
    views: dict[BucketKey, SharedView]
    epochs: dict[BucketKey, int]
    idle_ms: int
    used_ms: int


@dataclass(slots=True)
class Pins:
    """The pins of a node: no clock, no I/O."""

    limit: int
    _pins: dict[str, Pin] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._pins)

    def check_room(self, now_ms: int) -> None:
        """See to it that there is room for one more: the pin that was unused for longest may have to go.

        Clients let go of pins that they are done with, but not all can: Spark does not know when a DataFrame
        is not needed any more. Raises ``TableError`` if all are in use.
        """
        if len(self._pins) < self.limit:
            return
        oldest = min(self._pins.values(), key=lambda pin: pin.used_ms)
        if now_ms - oldest.used_ms < UNUSED_MS:
            raise TableError(
                TableCode.too_many_pins,
                f"{self.limit} scans of whole tables are under way on this node; try again later",
            )
        self.release(oldest.id)

    def add(self, pin: Pin) -> None:
        self._pins[pin.id] = pin

    def get(self, pin_id: str, now_ms: int) -> Pin:
        """The pin, which counts as used now. Raises ``TableError``."""
        pin = self._pins.get(pin_id)
        if pin is None:
            raise TableError(
                TableCode.pin_not_found,
                "this node holds no such pin: it expired, was released, or the node was started again; "
                "start the scan again",
            )
        pin.used_ms = now_ms
        return pin

    def release(self, pin_id: str) -> None:
        """Let go of a pin; one that is gone already is fine."""
        pin = self._pins.pop(pin_id, None)
        if pin is not None:
            for view in pin.views.values():
                view.release()

    def end_bucket(self, bucket: BucketKey) -> None:
        """Release every pin that holds the bucket: its views are about to go."""
        for pin in [pin for pin in self._pins.values() if bucket in pin.views]:
            self.release(pin.id)

    def sweep(self, now_ms: int) -> None:
        for pin in [pin for pin in self._pins.values() if now_ms - pin.used_ms >= pin.idle_ms]:
            self.release(pin.id)
