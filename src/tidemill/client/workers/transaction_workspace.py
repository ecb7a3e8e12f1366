"""Where handlers write to topics and tables in the transaction that also stores the worker's position.

- Each batch has a transaction of its own. The handler gets it beside the record, and what it sends, upserts
  and deletes there counts together with the position, or not at all.
- A handler that raises takes the whole batch back; the engine has the others handled again.
- If it is not known whether a transaction has ended, the cursor is opened again: that ends the transaction,
  and what is stored tells.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from tidemill.client.cursors.checkpoints.transaction import AsyncCursorTransaction, TransactionStore
from tidemill.client.cursors.sync_cursor import CursorTransaction
from tidemill.client.workers.handling import is_async_handler
from tidemill.client.workers.ordered import Action
from tidemill.client.workers.workspace import BatchEnd, Progress, Workspace
from tidemill.cursors.errors import CheckpointWriteFailed, CursorFenced, NoOpenTransaction
from tidemill.errors import ApiError, TidemillError
from tidemill.net.retry import is_transient

if TYPE_CHECKING:
    from tidemill.client.cursors.cursor import AsyncCursor, Delivery

__all__ = ("TransactionWorkspace",)

T = TypeVar("T")


class TransactionWorkspace(Workspace):
    """Runs handlers, one after the other, with a transaction of the cursor."""

    stores_at_once = True

    def __init__(self, cursor: AsyncCursor, handler: Any) -> None:
        super().__init__(cursor, self._with_transaction(handler), 1)
        assert isinstance(cursor.store, TransactionStore)
        self._store: TransactionStore = cursor.store
        self._transaction: AsyncCursorTransaction | None = None
        #: The transaction as the handler gets it: a handler in a thread does not await.
        self._given: AsyncCursorTransaction | CursorTransaction | None = None
        #: Whether a handler is in the transaction, waited for or not.
        self._is_handling = False

    def _with_transaction(self, handler: Any) -> Any:
        """The handler, called with the record and the transaction."""

        def call(record: Delivery) -> Any:
            action = handler(record, self._given)
            self._check_open(record)
            return action

        async def call_async(record: Delivery) -> Any:
            action = await handler(record, self._given)
            self._check_open(record)
            return action

        return call_async if is_async_handler(handler) else call

    def _check_open(self, record: Delivery) -> None:
        if not self._store.is_open:
            raise NoOpenTransaction(
                f"the handler of {record.topic}-{record.partition} offset {record.offset} has ended the "
                "transaction: the worker does that, and stores the position with it. Raise an error instead",
                where=self._store.where,
            )

    async def handle(
        self, records: Sequence[Delivery], halt: threading.Event, progress: Progress
    ) -> BatchEnd:
        """Handle records in one transaction, which stays open for ``store``; if one fails, none is done."""
        transaction = await self._begin()
        handled = Progress()
        self._is_handling = True
        # After a cancellation the handler may go on in its thread: its transaction stays its own.
        end = await super().handle(records, halt, handled)
        self._is_handling = False
        if end.error is None and end.action is not Action.STOP_WITH_ROLLBACK:
            end = await self._flushed(transaction, end)
        if end.error is not None:
            await self._abort()
            if isinstance(end.error, NoOpenTransaction | CursorFenced):
                raise end.error
            return BatchEnd(0, error=end.error, redo=end.done)
        progress.done = end.done
        return end

    async def _flushed(self, transaction: AsyncCursorTransaction, end: BatchEnd) -> BatchEnd:
        """Send what was written. What a node refuses is an error of the last record: perhaps it is another's.

        Then handling the others again fails as well, and no record is blamed.
        """
        try:
            await transaction.flush()
        except ApiError as error:
            if is_transient(error):
                raise
            refused = self._store.refused("the transaction cannot go on", error)
            if isinstance(refused, CursorFenced):
                raise refused from error
            return BatchEnd(max(0, end.done - 1), error=error)
        return end

    async def _begin(self) -> AsyncCursorTransaction:
        """The open transaction, or a new one."""
        if self._transaction is None:
            transaction = self.cursor.transaction()
            await transaction.begin()
            self._transaction = transaction
            calls: Any = _LoopCalls(asyncio.get_running_loop())
            self._given = transaction if self._threads is None else CursorTransaction(calls, transaction)
        return self._transaction

    async def _abort(self) -> None:
        """Take back what was written. The cursor stays where it is: its records are handled again."""
        self._transaction = None
        await self._end(commit=False)

    async def _end(self, *, commit: bool) -> None:
        try:
            await self._store.end(commit=commit)
        except CheckpointWriteFailed as error:
            raise _cause(error) from error

    async def store(
        self, upto: Mapping[int, int] | None = None, finished: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """Store the position in the open transaction, and commit that.

        Not while a handler is in it that was given up: ``close`` takes that back.
        """
        if self._is_handling or (self._transaction is None and not self.cursor.plan_commit(upto, finished)):
            return
        await self._begin()
        self._transaction = None
        try:
            await self.cursor.commit(upto, finished=finished)
        except CheckpointWriteFailed as error:
            raise _cause(error) from error
        await self._end(commit=True)
        await self._store.show(self.cursor.committed)

    async def rollback(self) -> None:
        if self._is_handling:
            return
        await self._abort()
        await self.cursor.rollback()


class _LoopCalls:
    """Runs what a handler in a thread calls on the event loop of the worker."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _cause(error: CheckpointWriteFailed) -> TidemillError:
    """The error's cause if that may pass, after which the worker opens its cursor again; else the error."""
    cause = error.__cause__
    return cause if isinstance(cause, TidemillError) and is_transient(cause) else error
