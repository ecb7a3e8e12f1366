"""Pins: the state of the buckets of a table on this node, kept as it is under one id while many read it.

A pin is cheap and lives in memory only: views, one per bucket. If several nodes lead the buckets, each has a
pin of its own under the same id, which the client has chosen. It expires when nobody has used it for its
time; a session that reads it keeps it in use, and keeps its own view when the pin is released. The client
that pinned has a share of the pins (``coordination/fair_shares.py``); any client may use a pin that it knows
the id of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tidemill.coordination.fair_shares import NOBODY, Client, Shares
from tidemill.errors import TableCode, TableError
from tidemill.tables.scanning.sessions import BucketKey

__all__ = ("UNUSED_MS", "Pin", "Pins", "SharedView")

#: A pin that nobody has used for so long may be dropped for a new one, if there is no other way.
UNUSED_MS = 60_000


class SharedView:
    """A view with several users. The last one closes it."""

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
    """Views of buckets of a table, with the leader epochs under which they were taken.

    ``log_epochs`` are those of the records right below the offsets of the views: by them another node knows
    whether the state at such an offset is the same there.
    """

    id: str
    table_id: int
    views: dict[BucketKey, SharedView]
    epochs: dict[BucketKey, int]
    log_epochs: dict[BucketKey, int]
    idle_ms: int
    used_ms: int
    #: The client that took the pin.
    client: Client = NOBODY


@dataclass(slots=True)
class Pins:
    """The pins of a node: no clock, no I/O."""

    limit: int
    _pins: dict[str, Pin] = field(default_factory=dict)
    _shares: Shares = field(init=False)

    def __post_init__(self) -> None:
        self._shares = Shares(self.limit)

    def __len__(self) -> int:
        return len(self._pins)

    def check_capacity(self, now_ms: int, client: Client = NOBODY) -> None:
        """Make sure that one more pin may be taken; drops the pin that was unused for longest if it must.

        Clients release pins that they are done with, but not all can: Spark does not know when a DataFrame is
        not needed any more. A client's own pins go before those of others. Raises ``TableError`` if none can.
        """
        while (refusal := self._shares.refusal(client)) is not None:
            oldest = min(self._may_go(client), key=lambda pin: pin.used_ms)
            if now_ms - oldest.used_ms < UNUSED_MS:
                raise TableError(
                    TableCode.too_many_pins,
                    f"this node keeps {self.limit} pins of tables at most (scan_pins), and "
                    f"{refusal}; close scans that are not needed any more, or try again later",
                )
            self.release(oldest.id)

    def _may_go(self, client: Client) -> list[Pin]:
        pins = list(self._pins.values())
        own = [pin for pin in pins if pin.client == client]
        address = client.address
        if not self._shares.of_address(address):
            address = max((pin.client.address for pin in pins), key=self._shares.of_address)
        return own or [pin for pin in pins if pin.client.address == address]

    def check_unused(self, pin_id: str) -> None:
        """Raise ``TableError`` if there is a pin of that id: its readers rely on its moment."""
        if pin_id in self._pins:
            raise TableError(
                TableCode.invalid_scan_request, "there is a pin of that id already; choose another one"
            )

    def add(self, pin: Pin) -> None:
        self._pins[pin.id] = pin
        self._shares.take(pin.client)

    def get(self, pin_id: str, now_ms: int) -> Pin:
        """The pin, which counts as used now. Raises ``TableError`` if there is none."""
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
        """Release a pin. One that is gone already is fine."""
        pin = self._pins.pop(pin_id, None)
        if pin is not None:
            self._shares.give_back(pin.client)
            for view in pin.views.values():
                view.release()

    def end_bucket(self, bucket: BucketKey) -> None:
        """Release every pin that holds the bucket, because the bucket's views are about to be closed."""
        for pin in [pin for pin in self._pins.values() if bucket in pin.views]:
            self.release(pin.id)

    def sweep(self, now_ms: int) -> None:
        for pin in [pin for pin in self._pins.values() if now_ms - pin.used_ms >= pin.idle_ms]:
            self.release(pin.id)
