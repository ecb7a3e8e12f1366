"""Share groups for programs that do not await: the async client's names, on the thread of ``Tidemill``."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from types import TracebackType

from tidemill.client.blocking import Blocking, blocking, wrapping
from tidemill.client.share.consumer import AsyncShare
from tidemill.client.share.holdings import ShareCounts
from tidemill.client.share.record import ShareRecord
from tidemill.client.share.transaction import AsyncShareTransaction
from tidemill.errors import ConnectionClosed

__all__ = ("Share", "ShareTransaction")


class ShareTransaction(Blocking[AsyncShareTransaction]):
    """A transaction of a share group's member: what it writes and what it accepts count together.

    Leaving its ``with`` statement commits it; an error aborts it, and the records are released.
    """

    def __enter__(self) -> ShareTransaction:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(commit=kind is None)

    def accept(self, *records: ShareRecord) -> None:
        """Accept records of this member, if the transaction commits."""
        self._awaited.accept(*records)

    begin = blocking(AsyncShareTransaction.begin)
    end = blocking(AsyncShareTransaction.end)
    send = blocking(AsyncShareTransaction.send)
    send_record = blocking(AsyncShareTransaction.send_record)
    upsert = blocking(AsyncShareTransaction.upsert)
    delete = blocking(AsyncShareTransaction.delete)


class Share(Blocking[AsyncShare]):
    """A member of a share group: ``for record in db.share("emails", "outbox")``.

    It joins the group when the first record is asked for, and leaves it when the loop is left; in a ``with``
    statement, at its end. A record that is not settled when the next one is asked for stays locked for this
    member until its lock ends, or until it leaves: then it is delivered again.
    """

    _entered = False

    def __enter__(self) -> Share:
        self._entered = True
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Generator[ShareRecord]:
        try:
            while True:
                yield self.take() or self.next()
        finally:
            if not self._entered:
                # The connection may have been closed before, and this with it.
                with contextlib.suppress(ConnectionClosed):
                    self.close()

    @property
    def counts(self) -> ShareCounts:
        """What this member has seen and done so far."""
        return self._awaited.counts

    def take(self) -> ShareRecord | None:
        """A record that is here already; None if there is none. Any thread may call it."""
        return self._awaited.take()

    start = blocking(AsyncShare.start)
    next = blocking(AsyncShare.next)
    poll = blocking(AsyncShare.poll)
    lag = blocking(AsyncShare.lag)
    flush = blocking(AsyncShare.flush)
    close = blocking(AsyncShare.close)
    transaction = wrapping(AsyncShare.transaction, ShareTransaction)
