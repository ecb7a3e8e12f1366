"""``share.transaction()``: accept records and write what came of them, all or nothing.

    async with db.share("billing", "orders") as share:
        async for order in share:
            async with share.transaction() as transaction:
                await transaction.send("invoices", invoice(order))
                transaction.accept(order)
    # The invoice is visible and the order is done, or neither is.

Rules:

- Leaving the ``with`` statement commits; an error aborts, and what was to be accepted is released.
- The nodes are told which records the transaction accepts when everything else is written. From then on the
  records are held for the transaction: neither the time of their locks nor the end of this member gives them
  to others. If a node refuses, its records and those of nodes that were not told are released.
- If the commit fails and the outcome is not known, the records are somebody's when the transaction is over:
  nobody's if it was committed, anybody's if it was not.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from tidemill.client.process_bound import Unpicklable
from tidemill.client.share.outbox import Entry
from tidemill.client.share.record import Acknowledge, Settlement
from tidemill.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidemill.client.cluster import TopicPartition
    from tidemill.client.producing.transactional import TransactionalProducer
    from tidemill.client.share.consumer import AsyncShare
    from tidemill.client.share.link import NodeLink
    from tidemill.client.share.record import ShareRecord
    from tidemill.client.sync_table import Table
    from tidemill.client.tables.table import AsyncTable
    from tidemill.records.record import Record

__all__ = ("AsyncShareTransaction",)

_ACCEPT: Final = Settlement(Acknowledge.ACCEPT)
_RELEASE: Final = Settlement(Acknowledge.RELEASE)


class AsyncShareTransaction(Unpicklable):
    """A transaction of a share group's member: what it writes and what it accepts count together."""

    def __init__(self, share: AsyncShare, producer: TransactionalProducer) -> None:
        self._share = share
        self._producer = producer
        self._accepted: list[ShareRecord] = []
        #: Those of them that nodes were told of: the transaction decides on them.
        self._told: list[ShareRecord] = []

    def __repr__(self) -> str:
        return f"<transaction of {self._share!r}, {len(self._accepted)} records accepted>"

    def _instead_of_a_pickle(self) -> str:
        return "Open the share group there"

    async def __aenter__(self) -> AsyncShareTransaction:
        await self.begin()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.end(commit=kind is None)

    async def begin(self) -> None:
        """Open the transaction; a member of a group has one at a time."""
        await self._producer.begin()

    # --- what belongs to it

    async def send(
        self,
        topic: str,
        value: Any,
        *,
        key: Any = None,
        headers: Mapping[str, Any] | None = None,
        partition: int | None = None,
    ) -> None:
        """Write a record to a topic. ``value``, ``key`` and headers are as ``db.produce`` takes them."""
        from tidemill.client.producing.values import as_record

        await self._producer.send(topic, as_record(value, key=key, headers=headers or {}), partition)

    async def send_record(self, topic: str, record: Record, partition: int | None = None) -> None:
        """Write a record as it is."""
        await self._producer.send(topic, record, partition)

    async def upsert(self, table: AsyncTable | Table, rows: Any) -> None:
        """Insert rows of a table, or replace those with the same key."""
        await self._producer.upsert(table, rows)

    async def delete(self, table: AsyncTable | Table, keys: Any) -> None:
        """Delete rows of a table by their keys."""
        await self._producer.delete(table, keys)

    def accept(self, *records: ShareRecord) -> None:
        """Accept records of this member, if the transaction commits."""
        self._producer.identity  # noqa: B018 - raises unless it is open
        for record in records:
            if record._settled is not None or record._keeper is not self._share:
                raise ApiError(
                    ErrorCode.invalid_record_state,
                    f"{record!r} cannot be accepted here: settle a record of this member once",
                )
            record._settled = _ACCEPT
            self._accepted.append(record)

    # --- its end

    async def end(self, *, commit: bool) -> None:
        """Commit or abort it. Raises ``ApiError`` if it could not be committed, or if that is not known."""
        if not commit:
            await self._abort()
            return
        try:
            await self._producer.flush()
            await self._tell()
            await self._producer.end(commit=True)
        except BaseException:
            await self._abort()
            raise
        self._share.ended_in_transaction(self._accepted, accepted=True)

    async def _abort(self) -> None:
        await self._producer.abort()
        if self._told:
            # The transaction decides: they are delivered again when it is aborted.
            self._share.ended_in_transaction(self._told, accepted=False)
        told = {id(record) for record in self._told}
        for record in self._accepted:
            if id(record) not in told:
                record._settled = None
                if not record._lost:
                    record.release()

    async def _tell(self) -> None:
        """Tell every node which of its records the transaction accepts. Raises ``ApiError``."""
        self._share.check_held(self._accepted)
        by_link: dict[NodeLink, list[ShareRecord]] = {}
        for record in sorted(self._accepted, key=lambda record: record.offset):
            by_link.setdefault(record._link, []).append(record)
        for link, records in by_link.items():
            self._share.hand_over(records)
            self._told += records
            self._producer.has_written = True
            parts: dict[TopicPartition, list[Entry]] = {}
            for record in records:
                entry = Entry(record.offset, record.offset, _ACCEPT)
                parts.setdefault((record.topic, record.partition), []).append(entry)
            await link.accept_in_transaction(parts, self._producer.identity)
