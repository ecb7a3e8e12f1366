"""Checkpoints in the caller's own database: effect and position commit together.

``commit`` writes into the transaction that the caller has open on the same connection, so that both count or
neither does. SQLite and PostgreSQL, through DB-API (``sqlite3``, ``psycopg``, ``psycopg2``) or SQLAlchemy (a
``Connection`` or a ``Session``).

- Taking over raises the epoch of a row by compare-and-set, and commits that, before the position is read:
  from then on no earlier owner can change the position.
- A commit changes the row only if its epoch is this owner's, and its checkpoint the one that was last read or
  written. If not, the cursor goes to what is stored. So a COMMIT of the caller that failed is noticed by the
  next commit of the cursor.
- A lane of a worker that finishes records out of order notes each in its own transaction (``finish``), which
  holds the row against a take-over until it ends. The position follows later, and a process may end before:
  there can be notes further ahead of the position than a checkpoint has room for.

Everything is done in the caller's thread: connections belong to one. The cluster is shown the position later,
once it is certain that the caller's transaction was committed.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import time
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from tidemill.client.cursors.checkpoints.registration import Registration
from tidemill.client.cursors.checkpoints.store import StoredElsewhere, begin_added
from tidemill.cursors.checkpoint import Checkpoint, Entry
from tidemill.cursors.errors import (
    CheckpointCorrupt,
    CheckpointWriteFailed,
    CursorError,
    CursorFenced,
    NoOpenTransaction,
)
from tidemill.cursors.machine import Step
from tidemill.cursors.position import FINISHED_AHEAD_MAX, Position
from tidemill.cursors.region import Region
from tidemill.errors import ConfigError

__all__ = ("Database", "DatabaseStore", "database_of")

_CREATE: Final = (
    "CREATE TABLE IF NOT EXISTS tidemill_cursors (name TEXT NOT NULL, partition_id INTEGER NOT NULL, "
    "epoch BIGINT NOT NULL, position BIGINT NOT NULL, checkpoint {blob} NOT NULL, "
    "PRIMARY KEY (name, partition_id))",
    "CREATE TABLE IF NOT EXISTS tidemill_cursor_finished (name TEXT NOT NULL, partition_id INTEGER NOT NULL, "
    "record_offset BIGINT NOT NULL, PRIMARY KEY (name, partition_id, record_offset))",
)
_SELECT: Final = (
    "SELECT epoch, position, checkpoint FROM tidemill_cursors "
    "WHERE name = :name AND partition_id = :partition"
)
_SELECT_PARTITIONS: Final = "SELECT partition_id FROM tidemill_cursors WHERE name = :name"
_SELECT_EPOCH: Final = "SELECT epoch FROM tidemill_cursors WHERE name = :name AND partition_id = :partition"
_INSERT: Final = (
    "INSERT INTO tidemill_cursors (name, partition_id, epoch, position, checkpoint) "
    "VALUES (:name, :partition, 0, :position, :checkpoint)"
)
_TAKE: Final = (
    "UPDATE tidemill_cursors SET epoch = :next "
    "WHERE name = :name AND partition_id = :partition AND epoch = :epoch"
)
_COMMIT: Final = (
    "UPDATE tidemill_cursors SET position = :position, checkpoint = :checkpoint "
    "WHERE name = :name AND partition_id = :partition AND epoch = :epoch AND position = :before "
    "AND checkpoint = :stored"
)
_FINISHED: Final = (
    "SELECT record_offset FROM tidemill_cursor_finished "
    "WHERE name = :name AND partition_id = :partition AND record_offset >= :position ORDER BY record_offset"
)
_FINISH: Final = (
    "INSERT INTO tidemill_cursor_finished (name, partition_id, record_offset) "
    "VALUES (:name, :partition, :record_offset)"
)
_FORGET: Final = (
    "DELETE FROM tidemill_cursor_finished "
    "WHERE name = :name AND partition_id = :partition AND record_offset < :position"
)
_FORGET_ALL: Final = "DELETE FROM tidemill_cursor_finished WHERE name = :name AND partition_id = :partition"
_TAKE_TRIES: Final = 20
#: How often it is looked for what is stored, to show it.
_SETTLE_SECONDS: Final = 1.0
_NAMED: Final = re.compile(r":([a-z_]+)")
_IDLE, _ACTIVE, _IN_TRANSACTION, _IN_ERROR = 0, 1, 2, 3
#: sqlite3's mode of transactions that ``isolation_level`` decides.
_LEGACY: Final = -1


class Database:
    """A connection of the caller: statements with named parameters, and whether a transaction is open."""

    #: The type of a column of bytes, and how a row is held until the transaction ends.
    blob = "BLOB"
    hold = ""

    def execute(self, sql: str, **values: Any) -> tuple[list[Any], int]:
        """The rows of a query, and how many rows a change has changed."""
        raise NotImplementedError

    def begin(self) -> None:
        """Make sure that a transaction is open.

        In SQLite one that may write from the start: one that begins with a read is refused its first write,
        and without waiting, once another has written.
        """
        if not self.in_transaction():
            # Most drivers begin one with the first statement, sqlite3 with the first change only.
            self.execute("SELECT 1")
        sqlite = self.driver()
        if isinstance(sqlite, sqlite3.Connection) and not sqlite.in_transaction:
            sqlite.execute("BEGIN IMMEDIATE")
        if not self.in_transaction():
            self.execute("BEGIN")

    def driver(self) -> Any:
        """The connection of the database driver."""
        raise NotImplementedError

    def in_transaction(self) -> bool:
        raise NotImplementedError

    def is_autocommit(self) -> bool:
        """Whether every statement commits by itself, although ``in_transaction`` says that one is open."""
        return False

    def has_failed(self) -> bool:
        """Whether a transaction is open that can only be rolled back, because a statement has failed."""
        return False

    def commit(self) -> None:
        raise NotImplementedError

    def rollback(self) -> None:
        raise NotImplementedError

    def use_postgresql(self) -> None:
        """Speak PostgreSQL's dialect."""
        self.blob = "BYTEA"
        self.hold = " FOR SHARE"


class _Sqlite(Database):
    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, sql: str, **values: Any) -> tuple[list[Any], int]:
        cursor = self._connection.execute(sql, values)
        return cursor.fetchall() if cursor.description else [], cursor.rowcount

    def driver(self) -> Any:
        return self._connection

    def in_transaction(self) -> bool:
        return self._connection.in_transaction

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()


class _Psycopg(Database):
    """A connection of psycopg 3 or of psycopg2."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self.use_postgresql()

    def execute(self, sql: str, **values: Any) -> tuple[list[Any], int]:
        with self._connection.cursor() as cursor:
            cursor.execute(_NAMED.sub(r"%(\1)s", sql), values)
            return cursor.fetchall() if cursor.description else [], cursor.rowcount

    def driver(self) -> Any:
        return self._connection

    def in_transaction(self) -> bool:
        return self._status() in (_ACTIVE, _IN_TRANSACTION)

    def has_failed(self) -> bool:
        return self._status() == _IN_ERROR

    def _status(self) -> int:
        connection = self._connection
        status = (
            connection.info.transaction_status
            if hasattr(connection, "info") and hasattr(connection.info, "transaction_status")
            else connection.get_transaction_status()
        )
        return int(status)

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()


class _Alchemy(Database):
    """A connection or a session of SQLAlchemy."""

    def __init__(self, connection: Any) -> None:
        from sqlalchemy import text

        self._connection = connection
        self._text = text
        bind = connection.get_bind() if hasattr(connection, "get_bind") else connection
        dialect = bind.dialect.name
        if dialect == "postgresql":
            self.use_postgresql()
        elif dialect != "sqlite":
            raise ConfigError(f"checkpoints are kept in SQLite and PostgreSQL, not in {dialect}")

    def execute(self, sql: str, **values: Any) -> tuple[list[Any], int]:
        result = self._connection.execute(self._text(sql), values)
        return list(result) if result.returns_rows else [], result.rowcount

    def driver(self) -> Any:
        pooled = self._connection.connection
        if callable(pooled):
            # A session has a method where a connection has a property.
            pooled = pooled().connection
        return pooled.dbapi_connection

    def in_transaction(self) -> bool:
        return bool(self._connection.in_transaction())

    def is_autocommit(self) -> bool:
        has_begun = self.in_transaction()
        if not has_begun:
            # Programs may begin the driver's transaction themselves when SQLAlchemy begins one.
            self.execute("SELECT 1")
        try:
            return _is_autocommit(self.driver())
        finally:
            if not has_begun:
                self.rollback()

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()


def _is_autocommit(driver: Any) -> bool:
    """Whether a statement on the connection of a driver commits by itself now."""
    if isinstance(driver, sqlite3.Connection):
        mode = getattr(driver, "autocommit", _LEGACY)  # Since Python 3.12.
        return not driver.in_transaction and (driver.isolation_level is None if mode == _LEGACY else mode > 0)
    if not getattr(driver, "autocommit", False):
        return False
    return not hasattr(driver, "info") or not _Psycopg(driver).in_transaction()


def database_of(connection: Any) -> Database:
    """The database behind a connection. Raises ``ConfigError`` for what is none."""
    if isinstance(connection, Database):
        return connection
    if isinstance(connection, sqlite3.Connection):
        return _Sqlite(connection)
    kind = type(connection)
    root = kind.__module__.partition(".")[0]
    if "Async" not in kind.__name__:
        if root in ("psycopg", "psycopg2") and hasattr(connection, "cursor"):
            return _Psycopg(connection)
        if root == "sqlalchemy" and hasattr(connection, "execute") and hasattr(connection, "in_transaction"):
            return _Alchemy(connection)
    raise ConfigError(
        "a checkpoint is a path, or a connection of sqlite3, psycopg or SQLAlchemy (not an async one), not a "
        f"{kind.__module__}.{kind.__qualname__}"
    )


class DatabaseStore:
    """Keeps the positions of one cursor in the table ``tidemill_cursors`` of the caller's database."""

    is_callers = True
    can_be_reset = False

    def __init__(
        self,
        connection: Any,
        name: str,
        region: Region,
        registration: Registration | None = None,
        *,
        log_starts: Mapping[int, Position] | None = None,
    ) -> None:
        self._database = database_of(connection)
        self._name = name
        self._region = region
        self._registration = registration
        self._log_starts = log_starts
        self._epochs: dict[int, int] = {}
        #: By partition, the checkpoint that was last read or written: a commit expects to find it. Its offset
        #: alone would not tell that a commit was rolled back which only added finished offsets.
        self._checkpoints: dict[int, bytes] = {}
        #: Partitions whose commits may still be rolled back with the caller's transaction.
        self._unsettled: set[int] = set()
        self._settle_again_at = 0.0

    @property
    def where(self) -> str:
        return f"cursor {self._name!r} (in table tidemill_cursors)"

    @property
    def is_paused(self) -> bool:
        return self._registration is not None and self._registration.is_paused

    # --- taking over

    async def register(self, starts: Mapping[int, Position]) -> None:
        if self._registration is not None:
            await self._registration.take(starts)

    async def show_now(self) -> None:
        if self._registration is not None:
            await self._registration.show_now()

    async def take_over(self, starts: Mapping[int, Position]) -> dict[int, Entry]:
        return self.take_over_now(starts)

    def take_over_now(self, starts: Mapping[int, Position]) -> dict[int, Entry]:
        try:
            taken = self._take_over(starts)
        except BaseException:
            if self._registration is not None:
                self._registration.close_soon()
            raise
        self._show({partition: entry.position for partition, entry in taken.items()})
        return taken

    def _take_over(self, starts: Mapping[int, Position]) -> dict[int, Entry]:
        database = self._database
        if database.in_transaction():
            raise CursorError(
                "the connection has a transaction open; open the cursor before, because taking over is "
                "committed at once",
                where=self.where,
            )
        try:
            self._check_autocommit(database)
            self._create()
            if self._log_starts is not None:
                rows, _ = database.execute(_SELECT_PARTITIONS, name=self._name)
                database.rollback()
                starts = begin_added(starts, {int(row[0]) for row in rows}, self._log_starts)
            return {partition: self._take(partition, start) for partition, start in starts.items()}
        except CursorError:
            database.rollback()
            raise
        except Exception as error:  # noqa: BLE001 - whatever the caller's driver raises
            self._failed("the cursor cannot be taken over", error)
        finally:
            if database.in_transaction():
                database.rollback()

    def _create(self) -> None:
        database = self._database
        for tries_left in (1, 0):
            try:
                for statement in _CREATE:
                    database.execute(statement.format(blob=database.blob))
                database.commit()
                return
            except Exception:
                # Two that create the same table at the same time get in each other's way in PostgreSQL.
                database.rollback()
                if not tries_left:
                    raise

    def _take(self, partition: int, start: Position) -> Entry:
        """Raise the epoch, commit that, and only then read the position."""
        for _ in range(_TAKE_TRIES):
            row = self._row(partition)
            if row is None:
                self._insert(partition, start)
                continue
            epoch = row[0] + 1
            self._decoded(partition, row)  # Another region is not to be fenced.
            _, changed = self._database.execute(
                _TAKE, name=self._name, partition=partition, epoch=row[0], next=epoch
            )
            self._database.commit()
            if changed == 1:
                row = self._row(partition)
                if row is not None and row[0] == epoch:
                    self._epochs[partition] = epoch
                    self._checkpoints[partition] = bytes(row[2])
                    entry = self._with_finished(partition, self._decoded(partition, row))
                    self._database.rollback()
                    return entry
        raise CursorFenced("others take it over again and again", where=self.where)

    def _insert(self, partition: int, start: Position) -> None:
        try:
            self._database.execute(
                _INSERT,
                name=self._name,
                partition=partition,
                position=start.offset,
                checkpoint=self._encoded(partition, start, ()),
            )
            self._database.commit()
        except Exception:
            self._database.rollback()
            if self._row(partition) is None:
                raise  # No other process has made the row, so the error has another reason.

    # --- commits

    async def commit(self, steps: Mapping[int, Step]) -> None:
        self.commit_now(steps)

    async def commit_alone(self, steps: Mapping[int, Step]) -> None:
        self.commit_alone_now(steps)

    def commit_alone_now(self, steps: Mapping[int, Step]) -> None:
        database = self._database
        try:
            database.begin()
            self.commit_now(steps)
            database.commit()
        except CursorError:
            database.rollback()
            raise
        except Exception as error:  # noqa: BLE001 - whatever the caller's driver raises
            with contextlib.suppress(Exception):
                database.rollback()
            self._failed("the position cannot be stored", error)
        self.committed(steps)

    def commit_now(self, steps: Mapping[int, Step]) -> None:
        self._check_transaction(self._database)
        changed: dict[int, Step] = {}
        written: dict[int, bytes] = {}
        for partition, step in steps.items():
            written[partition] = self._encoded(partition, step.after, step.finished)
            if not self._changed(partition, step, written[partition]):
                raise self._elsewhere(partition, step, changed)
            changed[partition] = step
        # Only after all rows are changed: an error above needs the rows of what was finished before.
        for partition, step in steps.items():
            self._forget(partition, step)
        self._checkpoints |= written
        self._unsettled.update(steps)

    def _check_transaction(self, database: Database) -> None:
        """Raise ``NoOpenTransaction`` unless what is written now can be rolled back."""
        if not database.in_transaction():
            raise NoOpenTransaction(
                "there is no open transaction on the connection, or it has failed: begin one, write the "
                "effect, commit the cursor, and commit the transaction",
                where=self.where,
            )
        self._check_autocommit(database)

    def _check_autocommit(self, database: Database) -> None:
        if database.is_autocommit():
            raise NoOpenTransaction(
                "the connection commits every statement by itself (isolation_level='AUTOCOMMIT'), so that "
                "effect and position cannot commit together: open it with another isolation level",
                where=self.where,
            )

    def _changed(self, partition: int, step: Step, checkpoint: bytes) -> bool:
        """Store a partition's position; False if its row is not as this owner has left it."""
        try:
            _, count = self._database.execute(
                _COMMIT,
                name=self._name,
                partition=partition,
                epoch=self._epochs[partition],
                before=step.before.offset,
                stored=self._checkpoints[partition],
                position=step.after.offset,
                checkpoint=checkpoint,
            )
        except Exception as error:  # noqa: BLE001 - whatever the caller's driver raises
            self._failed("the position cannot be stored", error)
        return count == 1

    def _forget(self, partition: int, step: Step) -> None:
        """Delete the rows about finished records that the new position covers."""
        try:
            if step.sought:
                self._database.execute(_FORGET_ALL, name=self._name, partition=partition)
            else:
                self._database.execute(
                    _FORGET, name=self._name, partition=partition, position=step.after.offset
                )
        except Exception as error:  # noqa: BLE001 - whatever the caller's driver raises
            self._failed("the position cannot be stored", error)

    def finish(self, connection: Any, partition: int, offset: int) -> None:
        """Note in the transaction that is open on ``connection`` that one record is done.

        For lanes of a worker, each with a connection of its own. The next owner does not deliver it again.
        """
        database = database_of(connection)
        self._check_transaction(database)
        mine = self._epochs[partition]
        try:
            # Held until the transaction ends: a new owner waits for that, and then sees what it did.
            rows, _ = database.execute(_SELECT_EPOCH + database.hold, name=self._name, partition=partition)
            if rows and rows[0][0] == mine:
                database.execute(_FINISH, name=self._name, partition=partition, record_offset=offset)
                return
        except Exception as error:  # noqa: BLE001 - whatever the caller's driver raises
            self._failed(f"that offset {offset} is done cannot be stored", error)
        raise CursorFenced(
            "another process has taken the cursor over",
            where=self.where,
            stored=f"epoch {rows[0][0]}" if rows else "nothing",
            expected=f"epoch {mine}",
        )

    def _elsewhere(self, partition: int, step: Step, changed: Mapping[int, Step]) -> CursorError:
        """The error of a commit whose row in the database is not as this owner has left it.

        Rows that this commit has ``changed`` are as the caller's transaction sees them, which can only be
        rolled back: what is stored is what they were before.
        """
        row = self._row(partition)
        mine = self._epochs[partition]
        if row is None or row[0] != mine:
            return CursorFenced(
                f"another process has taken partition {partition} over",
                where=self.where,
                stored="nothing" if row is None else f"epoch {row[0]}",
                expected=f"epoch {mine}",
            )
        expected = Entry(mine, step.before, step.finished_before)
        entries = {}
        for each, epoch in self._epochs.items():
            if each in changed:
                before = changed[each]
                entry = Entry(epoch, before.before, before.finished_before)
            elif (found := self._row(each)) is not None:
                entry = self._decoded(each, found)
                self._checkpoints[each] = bytes(found[2])
            else:
                continue
            entries[each] = self._with_finished(each, entry)
        return StoredElsewhere(
            f"partition {partition} is not where this batch begins: the transaction of the last commit was "
            "rolled back, or the row was changed; roll this one back and go on from what is stored",
            entries,
            where=self.where,
            stored=_told(entries[partition]),
            expected=_told(expected),
        )

    def check(self) -> None:
        """Do nothing: the epoch in the row is checked by the statement that writes it."""

    async def close(self) -> None:
        """The row stays, and so does the connection, which is the caller's."""
        if self._registration is not None:
            await self._registration.close()

    # --- what the cluster is shown

    def committed(self, steps: Mapping[int, Step]) -> None:
        """Note that the caller's transaction with these steps is committed, and show that to the cluster."""
        self._unsettled.difference_update(steps)
        self._show({partition: step.after for partition, step in steps.items()})

    def settle_now(self, *, closing: bool = False) -> None:
        now = time.monotonic()
        if self._registration is None or not self._unsettled or (now < self._settle_again_at and not closing):
            return
        database = self._database
        # A cursor works without being shown, whatever the caller's driver raises.
        with contextlib.suppress(Exception):
            if database.in_transaction() or database.has_failed():
                return
            self._settle_again_at = now + _SETTLE_SECONDS
            try:
                found = {each: row for each in self._unsettled if (row := self._row(each)) is not None}
                self._show({each: self._decoded(each, row).position for each, row in found.items()})
                self._unsettled.clear()
            finally:
                if database.in_transaction():
                    database.rollback()

    def _show(self, positions: Mapping[int, Position]) -> None:
        if self._registration is not None:
            self._registration.show(positions)

    # --- rows

    def _row(self, partition: int) -> Any:
        rows, _ = self._database.execute(_SELECT, name=self._name, partition=partition)
        return rows[0] if rows else None

    def _encoded(self, partition: int, position: Position, finished: tuple[int, ...]) -> bytes:
        # What is finished further ahead stays where lanes have noted it.
        near = tuple(each for each in finished if each - position.offset < FINISHED_AHEAD_MAX)
        # The epoch has a column of its own, because taking over changes nothing else.
        entry = Entry(0, position, near)
        return Checkpoint(self._name, self._region.identity(), {partition: entry}).encode()

    def _decoded(self, partition: int, row: Any) -> Entry:
        checkpoint = Checkpoint.decode(bytes(row[2]), self.where)
        checkpoint.check(self._name, self._region, self.where)
        entry = checkpoint.entries.get(partition)
        if entry is None or entry.position.offset != row[1]:
            raise CheckpointCorrupt(
                f"the row of partition {partition} does not fit its checkpoint",
                where=self.where,
                stored=f"offset {row[1]}",
                expected="nothing" if entry is None else f"offset {entry.position.offset}",
            )
        return entry._replace(epoch=int(row[0]))

    def _with_finished(self, partition: int, entry: Entry) -> Entry:
        rows, _ = self._database.execute(
            _FINISHED, name=self._name, partition=partition, position=entry.position.offset
        )
        return entry._replace(finished=tuple(sorted({*entry.finished, *(int(row[0]) for row in rows)})))

    def _failed(self, what: str, error: Exception) -> NoReturn:
        raise CheckpointWriteFailed(f"{what}: {error}", where=self.where) from error


def _told(entry: Entry) -> str:
    """A position in words, for errors."""
    offset = f"offset {entry.position.offset}"
    return f"{offset}, and finished above it {list(entry.finished)}" if entry.finished else offset
