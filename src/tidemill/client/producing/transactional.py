"""A transactional producer: one transaction after the other under one transactional id.

    producer = TransactionalProducer(cluster, "my-id")
    await producer.begin()
    await producer.send("invoices", record)
    await producer.upsert(table, rows)
    await producer.end(commit=True)

What one transaction writes counts together or not at all. Another producer that starts under the same id
fences this one, and what it left open is aborted. After a failure the transaction is aborted; if that fails
too, the next ``begin`` starts the producer anew, which aborts it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from tidemill.client.cluster import TRANSACTION_KEY, Cluster
from tidemill.client.producing.transaction_writes import TransactionWrites
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.net.answers import check
from tidemill.net.connection import Versions
from tidemill.wire.jobs import AttemptId

if TYPE_CHECKING:
    from tidemill.client.sync_table import Table
    from tidemill.client.tables.table import AsyncTable
    from tidemill.records.record import Record

__all__ = ("TransactionalProducer",)

_TRANSACTION_MS: Final = 60_000
_ANSWER_MS: Final = 60_000
#: The version of EndTxn whose answer brings a new producer epoch for the next transaction.
_END_VERSIONS: Final[Versions] = (5, 5)


class TransactionalProducer:
    """Writes in transactions. One task uses it at a time."""

    def __init__(self, cluster: Cluster, transactional_id: str) -> None:
        self._cluster = cluster
        self._id = transactional_id
        self._identity: AttemptId | None = None
        self._is_open = False
        #: Whether the coordinator may know of the transaction: an empty one need not be ended.
        self.has_written = False
        self._writes = TransactionWrites(cluster, self._note_written)

    @property
    def identity(self) -> AttemptId:
        """Transactional id, producer id and epoch of the transaction that is open."""
        if self._identity is None or not self._is_open:
            raise ApiError(
                ErrorCode.invalid_txn_state, f"no transaction of {self._id!r} is open: call begin first"
            )
        return self._identity

    @property
    def is_open(self) -> bool:
        """Whether a transaction is open."""
        return self._is_open

    async def begin(self) -> None:
        """Open a transaction; a producer has one at a time."""
        if self._is_open:
            raise ApiError(ErrorCode.invalid_txn_state, f"a transaction of {self._id!r} is open already")
        if self._identity is None:
            self._identity = await self._start()
        self._writes.begin(self._identity)
        self._is_open, self.has_written = True, False

    async def _start(self) -> AttemptId:
        body = {
            "transactional_id": self._id,
            "transaction_timeout": _TRANSACTION_MS,
            "producer_id": -1,
            "producer_epoch": -1,
        }

        async def ask() -> AttemptId:
            answer = await self._ask("InitProducerId", body)
            check(answer.error_code, None, f"starting the producer {self._id!r}")
            return AttemptId(self._id, answer.producer_id, answer.producer_epoch)

        return await self._cluster.retrying(ask)

    # --- writing

    def _note_written(self) -> None:
        self.has_written = True

    async def send(self, topic: str, record: Record, partition: int | None = None) -> None:
        """Write a record to a topic. It is sent with the others when the transaction is about to end."""
        self.identity  # noqa: B018 - raises unless a transaction is open
        self._writes.gather(
            topic,
            record.key,
            record.value,
            record.headers,
            partition=partition,
            timestamp_ms=record.timestamp_ms,
        )

    async def upsert(self, table: AsyncTable | Table, rows: Any) -> None:
        """Insert rows of a table, or replace those with the same key."""
        self.identity  # noqa: B018
        await self._writes.upsert(table, rows)

    async def delete(self, table: AsyncTable | Table, keys: Any) -> None:
        """Delete rows of a table by their keys."""
        self.identity  # noqa: B018
        await self._writes.delete(table, keys)

    async def flush(self) -> None:
        """Send the records that were gathered; returns when the nodes have them."""
        await self._writes.flush()

    # --- the end

    async def end(self, *, commit: bool) -> None:
        """Commit or abort. Raises ``ApiError`` if it is refused, or if the outcome is not known."""
        identity = self.identity
        self._is_open = False
        if not self.has_written:
            return
        # Until the answer comes nobody knows under which epoch it could go on.
        self._identity = None
        body = {
            "transactional_id": self._id,
            "producer_id": identity.producer_id,
            "producer_epoch": identity.producer_epoch,
            "committed": commit,
        }

        async def ask() -> AttemptId:
            answer = await self._ask("EndTxn", body, versions=_END_VERSIONS)
            check(answer.error_code, None, f"ending a transaction of {self._id!r}")
            return AttemptId(self._id, answer.producer_id, answer.producer_epoch)

        self._identity = await self._cluster.retrying(ask, timeout_ms=_ANSWER_MS)

    async def abort(self) -> None:
        """Abort what is open, if it can be. If not, it times out, or the next ``begin`` aborts it."""
        if not self._is_open:
            return
        try:
            await self.end(commit=False)
        except TidemillError:
            self._identity = None

    async def _ask(self, api: str, body: dict[str, Any], **options: Any) -> Any:
        return await self._cluster.to_coordinator(
            self._id, api, body, key_type=TRANSACTION_KEY, timeout_ms=_ANSWER_MS, **options
        )
