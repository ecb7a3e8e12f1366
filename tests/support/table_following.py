"""A ``follow()`` in a thread of its own that writes down everything it gives, until it is told to end."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import tidemill
from support.processes import wait_until

__all__ = ("Follower", "Seen")


class Seen(NamedTuple):
    """One change as the follower got it."""

    topic: str
    bucket: int
    offset: int
    op: str
    row: dict[str, Any]


class Follower:
    """Use it in ``with``: it connects by itself, and leaving ends it."""

    def __init__(self, bootstrap_servers: str, table: str, **options: Any) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._table, self._options = table, options
        self.snapshot: list[dict[str, Any]] = []
        self.changes: list[Seen] = []
        #: Behind the last change of each bucket, by topic and number.
        self.positions: dict[tuple[str, int], int] = {}
        self.failure: BaseException | None = None
        self._db = tidemill.connect(bootstrap_servers)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._begun = threading.Event()
        self._closing = False

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._closing = True
        self._db.close()
        self._thread.join(120)
        if exc[0] is None and self.failure is not None:
            raise self.failure

    def wait_for(self, ends: dict[tuple[str, int], int], deadline_seconds: float = 120.0) -> None:
        """Wait until everything below these offsets has been seen, or the follow has failed."""

        def reached() -> bool:
            if self.failure is not None:
                raise self.failure
            return all(self.positions.get(place, 0) >= end for place, end in ends.items())

        wait_until(reached, f"changes up to {ends}; at {self.positions}", deadline_seconds)

    def of(self, topic: str, bucket: int) -> list[Seen]:
        """The changes of one bucket, in the order in which they came."""
        return [seen for seen in self.changes if (seen.topic, seen.bucket) == (topic, bucket)]

    def _run(self) -> None:
        try:
            for batch in self._db.table(self._table).follow(**self._options):
                for change in batch:
                    if change.op == "snapshot":
                        self.snapshot.append(change.row)
                    else:
                        self.changes.append(
                            Seen(batch.topic, change.bucket, change.offset, change.op, change.row)
                        )
                if batch.bucket >= 0:
                    self.positions[batch.topic, batch.bucket] = batch.next_offset
        except BaseException as error:
            if not self._closing:
                self.failure = error
