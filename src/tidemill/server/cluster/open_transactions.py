"""Open transactions of a new leader: it asks the coordinators about them, and aborts those that nobody knows.

A coordinator forgets a transaction when its markers are committed, and then every later leader has them. So a
transaction that is open in a log, while no coordinator knows it, has lost its marker or its coordinator in an
unclean election. Nothing would ever end it, and no reader of committed data would get past it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from tidemill.cluster.messages import FindTransactionsRequest, FindTransactionsResponse, OpenTransaction
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.replication.rules.assignment import NO_LEADER
from tidemill.replication.rules.state import Role
from tidemill.server.coordinators.transaction_partitions import LocalTransactionPartitions
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.transactions.messages import Producer, TransactionEnd

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidemill.cluster.peer import Peers
    from tidemill.replication.partition import Partition
    from tidemill.server.broker import Broker

__all__ = ("OpenTransactions",)

logger = logging.getLogger(__name__)

_TIMEOUT_MS: Final = 10_000
_RETRY_S: Final = 1.0
#: So many transactions are asked about at a time.
_ASKED_AT_ONCE: Final = 5_000


class _Open(NamedTuple):
    """A transaction that is open in a partition of this leader."""

    partition: Partition
    leader_epoch: int
    producer: Producer
    coordinator_epoch: int
    start_offset: int

    @property
    def question(self) -> OpenTransaction:
        return OpenTransaction(self.producer.id, self.partition.topic, self.partition.index)


class OpenTransactions:
    """Looks after the open transactions of partitions that this node has begun to lead."""

    def __init__(self, broker: Broker, peers: Peers) -> None:
        self._broker = broker
        self._peers = peers
        #: The leader epoch in which each partition's transactions were asked about, or are to be.
        self._looked_at: dict[Partition, int] = {}
        self._due: dict[Partition, None] = {}
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to ask."""
        self._task = asyncio.create_task(self._run(), name="open-transactions")

    async def stop(self) -> None:
        """Stop; a later leader asks again."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def update(self, partition: Partition) -> None:
        """Take note that the role of a partition may have changed: a new leader asks, others do not."""
        if partition.role is not Role.LEADER:
            self._looked_at.pop(partition, None)
            self._due.pop(partition, None)
        elif self._looked_at.get(partition) != partition.leader_epoch:
            self._looked_at[partition] = partition.leader_epoch
            if partition.has_open_transactions:
                self._due[partition] = None
                self._news.set()

    async def _run(self) -> None:
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                await self._look_at(list(self._due))
            except TidemillError as error:
                logger.debug("open transactions are asked about again: %s", error.message)
                await asyncio.sleep(_RETRY_S)
                self._news.set()

    async def _look_at(self, partitions: Sequence[Partition]) -> None:
        found = [each for partition in partitions for each in _open_in(partition)]
        for start in range(0, len(found), _ASKED_AT_ONCE):
            some = found[start : start + _ASKED_AT_ONCE]
            for each, known in zip(some, await self._ask([each.question for each in some]), strict=True):
                if not known:
                    await self._abort(each)
        for partition in partitions:
            self._due.pop(partition, None)

    async def _ask(self, questions: list[OpenTransaction]) -> list[bool]:
        """Whether any coordinator knows each transaction. Raises unless all of them have answered."""
        known = [False] * len(questions)
        for node_id, shards in self._coordinators().items():
            if node_id == self._broker.node_id:
                asked = [(each.producer_id, (each.topic, each.index)) for each in questions]
                found = await self._broker.transactions.find_under_way(shards, asked)
            else:
                make = partial(FindTransactionsRequest, shards=shards, transactions=questions)
                answer = await self._peers.request(
                    node_id, make, FindTransactionsResponse, timeout_ms=_TIMEOUT_MS
                )
                found = answer.known
            known = [before or now for before, now in zip(known, found, strict=True)]
        return known

    def _coordinators(self) -> dict[int, list[int]]:
        """The partitions of the transactions' topic by leader. Raises if one has none."""
        topic = self._broker.image.topics.get(TRANSACTIONS.topic)
        found: dict[int, list[int]] = {}
        for index, placed in enumerate(() if topic is None else topic.partitions):
            found.setdefault(placed.leader, []).append(index)
        if NO_LEADER in found or not found:
            raise ApiError(
                ErrorCode.coordinator_not_available, "a coordinator of transactions has no leader now"
            )
        return found

    async def _abort(self, each: _Open) -> None:
        """Abort a transaction that nobody knows, if it is still the one that was asked about."""
        partition = each.partition
        if partition.leader_epoch != each.leader_epoch or each not in _open_in(partition):
            return
        logger.warning(
            "%s-%d: the transaction of producer %d epoch %d, open since offset %d, is aborted: no "
            "coordinator knows it",
            partition.topic,
            partition.index,
            *each.producer,
            each.start_offset,
        )
        marker = TransactionEnd(each.producer, commit=False, coordinator_epoch=each.coordinator_epoch)
        # It is in the log at once. That it is committed may take until other nodes are back.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_TIMEOUT_MS / 1000):
                local = LocalTransactionPartitions.of(self._broker)
                await local.write_markers((partition.topic, partition.index), [marker])


def _open_in(partition: Partition) -> list[_Open]:
    return [
        _Open(
            partition,
            partition.leader_epoch,
            Producer(each.producer_id, each.epoch),
            each.coordinator_epoch,
            each.transaction_start_offset,
        )
        for each in partition.producers()
        if each.transaction_start_offset >= 0
    ]
