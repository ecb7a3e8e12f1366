"""Checkpoints in the same Tidemill transaction as what the cursor's owner writes: exactly once.

    cursor = await db.cursor("billing", "orders", checkpoint=tidemill.IN_TRANSACTION)
    async with cursor.transaction() as transaction:
        for order in await cursor.poll_batch(64):
            await transaction.send("invoices", invoice(order))
    # The invoices and the cursor's position are visible together, or none of them is.

The position is committed as the offsets of a group that belongs to the cursor, which Kafka's protocol can do
in a transaction. Taking over starts the cursor's producer first: that ends what an earlier owner has left
open, and fences it. Only then the position is read. The cursor is registered with the coordinator of cursors
as well, for its region, its lease and its place in lists; the position that is shown there may be older. It
counts only if it was set since the last transaction, which its origin tells.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from tidemill.client.cluster import TRANSACTION_KEY, Cluster
from tidemill.client.cursors.checkpoints.cluster import ClusterStore
from tidemill.client.cursors.checkpoints.group_offsets import GroupOffsets
from tidemill.client.cursors.checkpoints.store import AwaitedStore, StoredElsewhere
from tidemill.client.process_bound import Unpicklable
from tidemill.client.producing.transaction_writes import TransactionWrites
from tidemill.cursors.checkpoint import Entry
from tidemill.cursors.errors import (
    CheckpointWriteFailed,
    CursorFenced,
    NoOpenTransaction,
)
from tidemill.cursors.machine import Step
from tidemill.cursors.position import Position
from tidemill.cursors.region import Region
from tidemill.cursors.stored import Home
from tidemill.errors import ApiError, ConfigError, ErrorCode, TidemillError
from tidemill.net.answers import check
from tidemill.net.connection import Versions
from tidemill.net.retry import is_transient
from tidemill.wire.jobs import AttemptId

if TYPE_CHECKING:
    from tidemill.client.cursors.cursor import AsyncCursor
    from tidemill.client.tables.table import AsyncTable

__all__ = ("IN_TRANSACTION", "AsyncCursorTransaction", "TransactionStore", "check_transactional_name")

_TIMEOUT_MS: Final = 60_000
_END_MS: Final = 60_000
# Newer versions name topics by id only.
_COMMIT_VERSIONS: Final[Versions] = (5, 5)
_END_VERSIONS: Final[Versions] = (5, 5)
_FENCED: Final = frozenset(
    {
        ErrorCode.producer_fenced,
        ErrorCode.invalid_producer_epoch,
        ErrorCode.invalid_producer_id_mapping,
        ErrorCode.unknown_producer_id,
    }
)


class _InTransaction:
    """The type of ``IN_TRANSACTION``."""

    def __repr__(self) -> str:
        return "tidemill.IN_TRANSACTION"


IN_TRANSACTION: Final = _InTransaction()
"""As a cursor's ``checkpoint``: the position is part of the transactions of ``cursor.transaction()``."""


def check_transactional_name(name: str) -> None:
    """Raise ``ConfigError`` for what cannot name a cursor in transactions."""
    if "#" in name:
        raise ConfigError(f"the name of a cursor in transactions has no '#': {name!r}")


class TransactionStore(AwaitedStore):
    """Keeps the positions of one cursor in its transactions."""

    can_be_reset = True

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        region: Region,
        *,
        take_over: bool,
        lease_ms: int,
        log_starts: Mapping[int, Position] | None = None,
    ) -> None:
        check_transactional_name(name)
        self._cluster = cluster
        self._name = name
        self._region = region
        self._registered = ClusterStore(
            cluster,
            name,
            region,
            take_over=take_over,
            lease_ms=lease_ms,
            home=Home.TRANSACTIONS,
            log_starts=log_starts,
        )
        self._offsets = GroupOffsets(cluster, name, region.topic, region.identity(), where=self.where)
        self._id = self._offsets.id
        self.identity: AttemptId | None = None
        #: Whether a transaction is open, into which commits go.
        self.is_open = False
        #: Whether something was written in it, so that it must be ended.
        self.has_written = False
        #: Whether its end was asked for, and nobody has heard that it has ended: the caller was cancelled.
        self.is_in_doubt = False
        self._fenced: CursorFenced | None = None
        #: By partition: the last time that its position was set, and what was shown since.
        self._origins: dict[int, UUID] = {}
        self._shown: dict[int, Position] = {}
        #: Where partitions begin of which nothing was committed when they were taken over.
        self._starts: dict[int, Entry] = {}

    @property
    def where(self) -> str:
        return f"cursor {self._name!r} (in its transactions)"

    @property
    def is_paused(self) -> bool:
        return self._registered.is_paused

    async def take_over(self, starts: Mapping[int, Position]) -> dict[int, Entry]:
        registered = await self._registered.take_over(starts)
        marks = {partition: self._registered.marks[partition] for partition in registered}
        self._shown |= {partition: entry.position for partition, entry in registered.items()}
        self._origins |= {partition: mark.origin for partition, mark in marks.items()}
        if self.identity is None:
            # Partitions that are added later are this producer's already, and may be in its transaction.
            self.identity = await self._start_producer()
        latest = await self._offsets.latest(registered, marks)
        self._starts |= {each: entry for each, entry in registered.items() if latest[each] is entry}
        return {each: entry._replace(epoch=registered[each].epoch) for each, entry in latest.items()}

    async def stored(self) -> dict[int, Entry]:
        """The positions that are committed, and where nothing is, those at which the cursor began."""
        return self._starts | await self._offsets.read(self._origins)

    async def again(self, error: BaseException) -> dict[int, Entry]:
        """Start the producer again and read the positions: after an outcome that is not known.

        If that fails, too, the cursor can only be opened again: nobody knows where it stands.
        """
        self.is_open = self.has_written = False
        try:
            # As the producer that it was: if another has taken over, this one is fenced, and not the other.
            self.identity = await self._start_producer(self.identity)
            self.is_in_doubt = False
            return await self.stored()
        except TidemillError as failure:
            self._fenced = CursorFenced(
                f"the outcome of its last transaction is not known ({error}): open the cursor again",
                where=self.where,
            )
            raise self._fenced from failure

    async def _start_producer(self, known: AttemptId | None = None) -> AttemptId:
        body = {
            "transactional_id": self._id,
            "transaction_timeout": _TIMEOUT_MS,
            "producer_id": -1 if known is None else known.producer_id,
            "producer_epoch": -1 if known is None else known.producer_epoch,
        }

        async def ask() -> AttemptId:
            answer = await self._ask_transactions("InitProducerId", body)
            check(answer.error_code, None, f"starting the producer of {self.where}")
            return AttemptId(self._id, answer.producer_id, answer.producer_epoch)

        try:
            return await self._cluster.retrying(ask)
        except ApiError as error:
            raise self.refused("the producer cannot be started", error) from error

    # --- commits

    async def commit(self, steps: Mapping[int, Step]) -> None:
        self.check()
        if not self.is_open or self.identity is None:
            raise NoOpenTransaction(
                "there is no open transaction: commit inside of 'with cursor.transaction():'",
                where=self.where,
            )
        partitions = [
            self._offsets.body(each, Entry(0, step.after, step.finished), self._origins[each])
            for each, step in steps.items()
        ]
        body = {
            "transactional_id": self._id,
            "group_id": self._id,
            "producer_id": self.identity.producer_id,
            "producer_epoch": self.identity.producer_epoch,
            "generation_id": -1,
            "member_id": "",
            "topics": [{"name": self._region.topic, "partitions": partitions}],
        }
        self.has_written = True

        async def ask() -> None:
            answer = await self._cluster.to_coordinator(
                self._id, "TxnOffsetCommit", body, versions=_COMMIT_VERSIONS
            )
            for each in (entry for topic in answer.topics for entry in topic.partitions):
                check(each.error_code, None, f"storing the position of {self.where}")

        try:
            await self._cluster.retrying(ask)
        except ApiError as error:
            raise self.refused("the position cannot be stored", error) from error

    async def commit_alone(self, steps: Mapping[int, Step]) -> None:
        self.is_open = True
        await self.commit(steps)
        await self.end(commit=True)
        await self.show({partition: step.after for partition, step in steps.items()})

    async def end(self, *, commit: bool) -> None:
        """End the open transaction. Raises ``CheckpointWriteFailed`` if it is not known whether it counts."""
        self.is_open = False
        if not self.has_written or self.identity is None:
            return
        self.has_written = False
        self.is_in_doubt = True
        body = {
            "transactional_id": self._id,
            "producer_id": self.identity.producer_id,
            "producer_epoch": self.identity.producer_epoch,
            "committed": commit,
        }

        async def ask() -> AttemptId:
            answer = await self._ask_transactions("EndTxn", body, versions=_END_VERSIONS)
            check(answer.error_code, None, f"ending a transaction of {self.where}")
            return AttemptId(self._id, answer.producer_id, answer.producer_epoch)

        try:
            self.identity = await self._cluster.retrying(ask, timeout_ms=_END_MS)
            self.is_in_doubt = False
        except ApiError as error:
            if error.code == ErrorCode.invalid_txn_state and not commit:
                self.is_in_doubt = False
                return  # What was to be written did not even get a transaction.
            raise self.refused("the transaction cannot be ended", error) from error

    def refused(self, what: str, error: ApiError) -> ApiError:
        """The error of a transaction that could not go on."""
        if error.code in _FENCED:
            self._fenced = CursorFenced(
                f"another process has taken the cursor over ({error.message})", where=self.where
            )
            return self._fenced
        if is_transient(error):
            return CheckpointWriteFailed(
                f"{what}, and it is not known whether it was: {error.message}", where=self.where
            )
        return CheckpointWriteFailed(f"{what}: {error.message}", where=self.where)

    async def show(self, positions: Mapping[int, Position]) -> None:
        """Tell the coordinator of cursors how far the cursor is, for people, if it can be told."""
        steps = {
            partition: Step(self._shown[partition], position)
            for partition, position in positions.items()
            if partition in self._shown and self._shown[partition] != position
        }
        if not steps:
            return
        try:
            await self._registered.commit(steps)
            self._shown |= {partition: step.after for partition, step in steps.items()}
        except StoredElsewhere as error:
            self._shown |= {partition: entry.position for partition, entry in error.entries.items()}
        except (TidemillError, OSError):
            return

    async def _ask_transactions(self, api: str, body: dict[str, Any], **options: Any) -> Any:
        return await self._cluster.to_coordinator(
            self._id, api, body, key_type=TRANSACTION_KEY, timeout_ms=_END_MS, **options
        )

    def check(self) -> None:
        if self._fenced is not None:
            raise self._fenced
        self._registered.check()

    async def close(self) -> None:
        if self.is_open:
            with contextlib.suppress(TidemillError):
                await self.end(commit=False)
        await self._registered.close()


class AsyncCursorTransaction(Unpicklable):
    """An open transaction of a cursor: what is written in it, and the position, count together or not at all.

    Leaving its ``with`` statement commits it, with everything that was delivered so far; an error aborts it,
    and the cursor goes back.
    """

    def __init__(self, cluster: Cluster, cursor: AsyncCursor, store: TransactionStore) -> None:
        self._cursor = cursor
        self._store = store
        self._writes = TransactionWrites(cluster, self._note_written)

    def __repr__(self) -> str:
        return f"<transaction of {self._store.where}>"

    def _instead_of_a_pickle(self) -> str:
        return "Open the cursor there"

    async def __aenter__(self) -> AsyncCursorTransaction:
        await self.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end(commit=kind is None)

    async def begin(self) -> None:
        """Open the transaction; a cursor has one at a time."""
        self._store.check()
        if self._store.is_open:
            raise NoOpenTransaction("a transaction of this cursor is open already", where=self._store.where)
        if self._store.is_in_doubt:
            # What is written now would count together with what was taken back. If that has ended after all,
            # nothing is aborted, and what is stored tells.
            self._store.has_written = True
            await self._abort()
        self._writes.begin(self._store.identity)
        self._store.is_open = True

    async def end(self, *, commit: bool) -> None:
        """Commit or abort it. If that fails the cursor is where the cluster says it is."""
        if not commit:
            await self._abort()
            return
        try:
            await self.flush()
            await self._cursor.commit()
        except CursorFenced:
            raise
        except BaseException as error:
            if isinstance(error, ApiError) and error.code in _FENCED:
                raise self._store.refused("the transaction cannot go on", error) from error
            await self._abort()
            raise
        try:
            await self._store.end(commit=True)
        except CursorFenced:
            raise
        except BaseException as error:
            await self._cursor.go_to(await self._store.again(error))
            raise
        await self._store.show(self._cursor.committed)

    async def _abort(self) -> None:
        """Take back what was written, and go to what is stored."""
        try:
            await self._store.end(commit=False)
            entries = await self._store.stored()
        except CursorFenced:
            raise
        except TidemillError as error:
            entries = await self._store.again(error)
        await self._cursor.go_to(entries)

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Sequence[tuple[str, bytes | None]] = (),
        partition: int | None = None,
    ) -> None:
        """Write a record to a topic."""
        self._check()
        self._writes.gather(topic, key, value, tuple(headers), partition=partition)

    async def upsert(self, table: AsyncTable, rows: Any) -> None:
        """Insert rows of a table, or replace those with the same key."""
        self._check()
        await self._writes.upsert(table, rows)

    async def delete(self, table: AsyncTable, keys: Any) -> None:
        """Delete rows of a table by their keys."""
        self._check()
        await self._writes.delete(table, keys)

    def _note_written(self) -> None:
        self._store.has_written = True

    def _check(self) -> None:
        if not self._store.is_open:
            raise NoOpenTransaction("the transaction is not open", where=self._store.where)

    async def flush(self) -> None:
        """Send the records that were gathered. Committing does that, too."""
        await self._writes.flush()
