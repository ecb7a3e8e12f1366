"""Where the handlers of an ordered worker run, and where its position is stored.

``Workspace`` is for positions that the cluster, a file or memory keeps. ``DatabaseWorkspace`` is for a
database of the handler's: what a handler writes and the position commit together. ``TransactionWorkspace``
(``transaction_workspace.py``) is the same for what handlers write to topics and tables.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from tidemill.client.cursors.checkpoints.database import DatabaseStore, database_of
from tidemill.client.cursors.checkpoints.store import StoredElsewhere
from tidemill.client.workers.handling import is_async_handler
from tidemill.client.workers.ordered import Action
from tidemill.client.workers.threads import Threads
from tidemill.cursors.errors import CheckpointWriteFailed, CursorFenced, NoOpenTransaction
from tidemill.errors import ConfigError

if TYPE_CHECKING:
    from tidemill.client.cursors.cursor import AsyncCursor, Delivery

__all__ = ("BatchEnd", "DatabaseWorkspace", "Progress", "Workspace")

T = TypeVar("T")


class BatchEnd(NamedTuple):
    """How the work on some records ended.

    Attributes:
        done: how many of them are done, from the first on.
        action: what the handler of the last of these said.
        error: what the handler of the next one raised.
        redo: how many records in front of that one were done, and were taken back with it.
    """

    done: int
    action: Action = Action.CONTINUE
    error: BaseException | None = None
    redo: int = 0


class Progress:
    """How many records are done, also if the caller stops waiting for the others."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = 0


def _ends(action: Any) -> bool:
    return action is Action.STOP or action is Action.STOP_WITH_ROLLBACK


class Workspace:
    """Runs handlers, on the event loop or in threads, and stores positions through the cursor."""

    #: Whether the position must be stored as soon as handlers have returned.
    stores_at_once = False
    #: False once a connection is lost: it is to be opened again.
    is_usable = True

    def __init__(self, cursor: AsyncCursor, handler: Any, concurrency: int) -> None:
        self.cursor = cursor
        self._handler = handler
        self._threads = None if is_async_handler(handler) else Threads(concurrency)

    async def handle(
        self, records: Sequence[Delivery], halt: threading.Event, progress: Progress
    ) -> BatchEnd:
        """Call the handler with one record after the other, until one fails or says stop, or ``halt``."""
        if self._threads is not None:
            return await self._threads.run(self._handle_now, records, halt, progress)
        for record in records:
            if halt.is_set():
                break
            try:
                action = await self._handler(record)
            except (Exception, SystemExit, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                if isinstance(error, asyncio.CancelledError) and (task is None or task.cancelling()):
                    raise  # Not of something that the handler waited for: this is about the handler itself.
                return BatchEnd(progress.done, error=error)
            if action is Action.STOP_WITH_ROLLBACK:
                return BatchEnd(progress.done, action)
            progress.done += 1
            if action is Action.STOP:
                return BatchEnd(progress.done, action)
        return BatchEnd(progress.done)

    def _handle_now(self, records: Sequence[Delivery], halt: threading.Event, progress: Progress) -> BatchEnd:
        handler = self._handler
        for record in records:
            if halt.is_set():
                break
            try:
                action = handler(record)
            except BaseException as error:  # noqa: BLE001 - whatever a handler raises is its answer
                return BatchEnd(progress.done, error=error)
            if action is Action.STOP_WITH_ROLLBACK:
                return BatchEnd(progress.done, action)
            progress.done += 1
            if action is Action.STOP:
                return BatchEnd(progress.done, action)
        return BatchEnd(progress.done)

    async def handle_one(self, record: Delivery, progress: Progress) -> BatchEnd:
        """Call the handler with a record, beside others."""
        return await self.handle([record], _NEVER, progress)

    async def note_parked(self, record: Delivery) -> None:
        """Note that a record which was handled beside others is parked, where handlers note what is done."""

    async def store(
        self, upto: Mapping[int, int] | None = None, finished: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """Store the position: everything that was delivered is done, or what lies below these offsets."""
        await self.cursor.commit(upto, finished=finished)

    async def rollback(self) -> None:
        """Go back to the stored position."""
        await self.cursor.rollback()

    async def close(self) -> None:
        """Give the cursor up. Handlers that still run in threads are left alone."""
        if self._threads is not None:
            self._threads.close()
        await self.cursor.close()


_NEVER = threading.Event()


class _ConnectionThread:
    """A thread with a database connection of its own: connections belong to one thread."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._thread = Threads(1)
        self._connect = connect
        self.connection: Any = None

    async def open(self) -> None:
        self.connection = await self.run(self._connect)

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        return await self._thread.run(call, *args)

    def close(self) -> None:
        self._thread.close(None if self.connection is None else self._close)

    def _close(self) -> None:
        # What is not committed is taken back; a connection that is broken is closed already.
        with contextlib.suppress(Exception):
            self.connection.rollback()
        with contextlib.suppress(Exception):
            self.connection.close()


class DatabaseWorkspace(Workspace):
    """Runs handlers with a database connection; their writes and the position are one transaction.

    One after the other they share the first connection, and a transaction for each batch. Side by side each
    has a connection and a transaction of its own, in which it also notes that its record is done.
    """

    stores_at_once = True

    def __init__(
        self, cursor: AsyncCursor, store: DatabaseStore, handler: Any, threads: Sequence[_ConnectionThread]
    ) -> None:
        self.cursor = cursor
        self._handler = handler
        self._threads = None
        self._store = store
        self._main = threads[0]
        self._connection_threads = threads
        #: Whether a handler is in the transaction of the first connection, waited for or not.
        self._is_handling = False
        self._free: asyncio.Queue[_ConnectionThread] = asyncio.Queue()
        for thread in threads[1:]:
            self._free.put_nowait(thread)

    @classmethod
    async def open(
        cls,
        connect: Callable[[], Any],
        open_cursor: Callable[[Any, Callable[..., Awaitable[Any]]], Awaitable[AsyncCursor]],
        handler: Any,
        concurrency: int,
    ) -> DatabaseWorkspace:
        """Open the connections and the cursor, whose position the first connection keeps."""
        if is_async_handler(handler):
            raise ConfigError(
                "a worker with a database checkpoint calls its handler with the connection, in a thread: "
                "give it a handler that is not async"
            )
        threads = [_ConnectionThread(connect) for _ in range(1 if concurrency == 1 else concurrency + 1)]
        try:
            for thread in threads:
                await thread.open()
            cursor = await open_cursor(threads[0].connection, threads[0].run)
        except BaseException:
            for thread in threads:
                thread.close()
            raise
        assert isinstance(cursor.store, DatabaseStore)
        return cls(cursor, cursor.store, handler, threads)

    async def handle(
        self, records: Sequence[Delivery], halt: threading.Event, progress: Progress
    ) -> BatchEnd:
        self._is_handling = True
        try:
            end = await self._main.run(self._handle_in_transaction, records, halt)
        except Exception:
            self._is_handling = False
            raise
        # After a cancellation the handler goes on in its thread: its transaction stays its own.
        self._is_handling = False
        progress.done = end.done
        return end

    def _handle_in_transaction(self, records: Sequence[Delivery], halt: threading.Event) -> BatchEnd:
        """Handle records in one transaction, which stays open for ``store``; if one fails, none is done."""
        connection = self._main.connection
        done = 0
        database_of(connection).begin()
        for record in records:
            if halt.is_set():
                break
            try:
                action = self._handler(record, connection)
                if action is not Action.STOP_WITH_ROLLBACK:
                    self._check_open(connection, record)
            except BaseException as error:
                self._take_back(connection)
                if isinstance(error, NoOpenTransaction) or self._is_lost_with(error):
                    raise
                return BatchEnd(0, error=error, redo=done)
            done += 1
            if _ends(action):
                return BatchEnd(done, action)
        return BatchEnd(done)

    async def handle_one(self, record: Delivery, progress: Progress) -> BatchEnd:
        thread = await self._free.get()
        try:
            end = await thread.run(self._handle_alone, thread.connection, record)
        finally:
            self._free.put_nowait(thread)
        progress.done = end.done
        return end

    def _handle_alone(self, connection: Any, record: Delivery) -> BatchEnd:
        """Handle a record in a transaction of its own, which notes that it is done."""
        database_of(connection).begin()
        try:
            action = self._handler(record, connection)
            if action is Action.STOP_WITH_ROLLBACK:
                connection.rollback()
                return BatchEnd(0, action)
            self._check_open(connection, record)
            self._store.finish(connection, record.partition, record.offset)
            connection.commit()
        except CheckpointWriteFailed as error:
            self._take_back(connection)
            raise _drivers(error) from None
        except BaseException as error:
            self._take_back(connection)
            if isinstance(error, CursorFenced | NoOpenTransaction) or self._is_lost_with(error):
                # The record is another owner's now, its effect is in the database already, or there is no
                # database: it is neither tried again nor parked.
                raise
            return BatchEnd(0, error=error)
        return BatchEnd(1, action if _ends(action) else Action.CONTINUE)

    async def note_parked(self, record: Delivery) -> None:
        thread = await self._free.get()
        try:
            await thread.run(self._note_alone, thread.connection, record)
        finally:
            self._free.put_nowait(thread)

    def _note_alone(self, connection: Any, record: Delivery) -> None:
        """Note in a transaction of its own that a record is done, without an effect."""
        try:
            database_of(connection).begin()
            self._store.finish(connection, record.partition, record.offset)
            connection.commit()
        except CursorFenced:
            self._take_back(connection)
            raise
        except Exception:  # noqa: BLE001 - whatever a driver raises
            self._take_back(connection)
            # The position follows all the same. Should the process end before, the record is parked again.

    async def store(
        self, upto: Mapping[int, int] | None = None, finished: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        """Store the position in the open transaction, and commit that.

        Not while a handler is in it that was given up: ``close`` takes that back when the handler ends.
        """
        if self._is_handling:
            return
        steps = self.cursor.plan_commit(upto, finished)
        try:
            await self._main.run(self._commit, steps)
        except StoredElsewhere as error:
            await self.cursor.go_to_stored(error)
            raise
        self.cursor.confirm(steps)
        self._store.committed(steps)

    def _commit(self, steps: Any) -> None:
        connection = self._main.connection
        try:
            if steps:
                database_of(connection).begin()
                self._store.commit_now(steps)
            connection.commit()
        except CheckpointWriteFailed as error:
            self._take_back(connection)
            raise _drivers(error) from None
        except BaseException:
            self._take_back(connection)
            raise

    def _check_open(self, connection: Any, record: Delivery) -> None:
        """Raise ``NoOpenTransaction`` if a handler has ended the transaction: its effect is on its own."""
        database = database_of(connection)
        if database.has_failed():
            raise ConfigError(
                f"a statement of the handler of {record.topic}-{record.partition} offset {record.offset} has "
                "failed, and so has the transaction that it belongs to: let its error out of the handler, or "
                "use a savepoint"
            )
        if not database.in_transaction():
            raise NoOpenTransaction(
                f"the handler of {record.topic}-{record.partition} offset {record.offset} has ended the "
                "transaction: the worker commits what is written, together with the position. Leave commit, "
                "rollback and 'with connection' out, and raise an error instead",
                where=self._store.where,
            )

    def _take_back(self, connection: Any) -> None:
        try:
            connection.rollback()
        except Exception:  # noqa: BLE001 - whatever a driver raises whose connection is lost
            self.is_usable = False

    def _is_lost_with(self, error: BaseException) -> bool:
        """Whether an error is one of a connection that is lost, and not one of the record."""
        return isinstance(error, Exception) and not self.is_usable

    async def rollback(self) -> None:
        if self._is_handling:
            return
        await self._main.run(self._take_back, self._main.connection)
        await self.cursor.rollback()

    async def close(self) -> None:
        for thread in self._connection_threads:
            thread.close()
        await self.cursor.close()


def _drivers(error: CheckpointWriteFailed) -> BaseException:
    """The driver's error because of which a position was not stored.

    The worker treats it like one of COMMIT, which comes right behind: it opens the connections again, within
    its budget.
    """
    return error.__cause__ or error
