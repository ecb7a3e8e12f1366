"""``Cursor``: a durable cursor for programs that do not await, run by the thread of ``Tidemill``.

What is kept in the caller's database is written in the caller's own thread, because database connections
belong to one; everything else is done by the client's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tidemill.client.blocking import Blocking, blocking, wrapping
from tidemill.client.cluster import Cluster
from tidemill.client.cursors.checkpoints.store import StoredElsewhere
from tidemill.client.cursors.checkpoints.transaction import AsyncCursorTransaction
from tidemill.client.cursors.cursor import AsyncCursor, Delivery
from tidemill.client.cursors.opening import begin_cursor, open_cursor, plan_cursor
from tidemill.cursors.position import Gaps, Position
from tidemill.cursors.region import Region
from tidemill.errors import ConnectionClosed

if TYPE_CHECKING:
    from tidemill.client.sync_client import Tidemill

__all__ = ("Cursor", "CursorTransaction", "open_blocking")


class CursorTransaction(Blocking[AsyncCursorTransaction]):
    """An open transaction of a cursor: what is written in it, and the position, count together or not at all.

    Leaving its ``with`` statement commits it, with everything that was delivered so far; an error aborts it,
    and the cursor goes back.
    """

    def __enter__(self) -> CursorTransaction:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(commit=kind is None)

    begin = blocking(AsyncCursorTransaction.begin)
    end = blocking(AsyncCursorTransaction.end)
    send = blocking(AsyncCursorTransaction.send)
    upsert = blocking(AsyncCursorTransaction.upsert)
    delete = blocking(AsyncCursorTransaction.delete)


class Cursor(Blocking[AsyncCursor]):
    """A durable cursor over a region of a topic or a table. Use it in a ``with`` statement, or close it.

    One thread uses it at a time.
    """

    def __enter__(self) -> Cursor:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Delivery]:
        """Records as they come, without an end. Commit as often as you like in between."""
        while True:
            # One at a time: a commit in between is for what the caller has seen, and for nothing else.
            record = self.poll()
            if record is not None:
                yield record

    @property
    def name(self) -> str | None:
        """The name under which its position is kept; None: in memory only."""
        return self._awaited.name

    @property
    def region(self) -> Region:
        """The region that the cursor reads: topic, partitions and filter."""
        return self._awaited.region

    @property
    def positions(self) -> dict[int, Position]:
        """By partition, the position behind what was delivered."""
        return self._awaited.positions

    @property
    def committed(self) -> dict[int, Position]:
        """By partition, the position that is stored."""
        return self._awaited.committed

    @property
    def is_paused(self) -> bool:
        """Whether somebody has paused it: it delivers nothing until it is resumed."""
        return self._awaited.is_paused

    @property
    def delivered_per_second(self) -> float:
        """Records delivered a second, since it was opened."""
        return self._awaited.delivered_per_second

    def poll(self, *, timeout_ms: int = 500) -> Delivery | None:
        """The next record; None if none came within ``timeout_ms``."""
        records = self.poll_batch(1, timeout_ms=timeout_ms)
        return records[0] if records else None

    def poll_batch(self, limit: int = 64, *, timeout_ms: int = 500) -> list[Delivery]:
        """The next records, at most ``limit``; an empty list if none came within ``timeout_ms``.

        It waits for the first one only, and is woken by its append.
        """
        cursor = self._awaited
        cursor.store.settle_now()
        return self._db.run(cursor.poll_batch(limit, timeout_ms=timeout_ms))

    rollback = blocking(AsyncCursor.rollback)
    seek = blocking(AsyncCursor.seek)
    lag = blocking(AsyncCursor.lag)
    transaction = wrapping(AsyncCursor.transaction, CursorTransaction)

    def commit(
        self,
        upto: Mapping[int, int] | None = None,
        *,
        finished: Mapping[int, Iterable[int]] | None = None,
    ) -> None:
        """Store that everything delivered so far is done; see ``AsyncCursor.commit``."""
        cursor = self._awaited
        if not cursor.store.is_callers:
            self._db.run(cursor.commit(upto, finished=finished))
            return
        steps = cursor.plan_commit(upto, finished)
        if steps:
            try:
                cursor.store.commit_now(steps)
            except StoredElsewhere as error:
                self._db.run(cursor.go_to_stored(error))
                raise
            cursor.confirm(steps)

    def gaps(self) -> Gaps:
        """The offsets that were passed over since the last call, and why."""
        return self._awaited.gaps()

    def close(self) -> None:
        """Give the cursor up for others. What was not committed comes again. Closing twice is fine."""
        cursor = self._awaited
        cursor.store.settle_now(closing=True)
        with contextlib.suppress(ConnectionClosed):
            self._db.run(cursor.close())


def open_blocking(db: Tidemill, cluster: Cluster, name: str | None, source: Any, **options: Any) -> Cursor:
    """Open a cursor for a caller that blocks. The options are those of ``plan_cursor``."""
    plan = db.run(plan_cursor(cluster, name, source, **options))
    if not plan.store.is_callers:
        return Cursor(db, db.run(open_cursor(cluster, plan)))
    entries = plan.store.take_over_now(plan.starts)
    cursor = Cursor(db, db.run(begin_cursor(cluster, plan, entries)))
    try:
        cursor._awaited.store_lost_now()
    except BaseException:
        cursor.close()
        raise
    return cursor
