"""The transaction coordinator: which shard an id lives in, producer ids, and Kafka's error codes.

Every public function that serves a client answers with error codes; none raises for what a client sends or
a disk does. A partition is opened to a transaction only after the log holds that it is part of it, and in a
step in which that is still true: an end that came in between keeps it closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from tidemill.control.image import TRANSACTIONS_TOPIC
from tidemill.coordination.coordinator import Coordinator
from tidemill.coordination.shards import Shards, client_error
from tidemill.coordination.turns import give_way, in_chunks
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.transactions.attempts import routing_key
from tidemill.transactions.job_coordinator import JobCoordinator, with_producer_id
from tidemill.transactions.messages import EndResult, InitResult, ListResult, Producer, TransactionDescription
from tidemill.transactions.shard import TransactionShard
from tidemill.transactions.state import listing, parse_states
from tidemill.transactions.transaction import CLIENT_V1, CLIENT_V2, Transaction
from tidemill.wire.guard import MAX_STRING_BYTES
from tidemill.wire.jobs import JOB_PREFIX

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from tidemill.coordination.clock import Clock
    from tidemill.coordination.log import LogAccess
    from tidemill.transactions.messages import (
        TopicPartition,
        TransactionListing,
        TransactionPartitions,
    )
    from tidemill.transactions.settings import TransactionSettings

__all__ = ("TransactionCoordinator",)


#: So many transactions are filtered between two looks at the clock.
_LISTED_AT_ONCE: Final = 1_000


class TransactionCoordinator(Coordinator[TransactionShard]):
    """The transactional ids of the partitions of ``__transaction_state`` that this node leads."""

    def __init__(
        self,
        logs: LogAccess,
        partitions: TransactionPartitions,
        settings: TransactionSettings,
        clock: Clock,
        next_producer_id: Callable[[], Awaitable[int]],
    ) -> None:
        one_draft = asyncio.Lock()
        super().__init__(
            Shards(
                TRANSACTIONS_TOPIC,
                logs,
                clock,
                lambda partition, log, on_stop: TransactionShard(
                    partition, log, partitions, settings, clock, on_stop, one_draft
                ),
            )
        )
        self._settings = settings
        self._partitions = partitions
        self._clock = clock
        self._next_producer_id = next_producer_id
        #: Attempts of jobs and their publications.
        self.jobs = JobCoordinator(self._shards, settings, next_producer_id)

    async def start(self, settle_ms: int = 0) -> None:
        """Load all shards that this node leads, so that timeouts run and decisions are carried out.

        Waits as long as ``settle_ms`` for decisions that a crash has interrupted, so that nobody sees a part
        of one.
        """
        shards, _ = await self._shards.all()
        deadline_ms = self._clock.now_ms() + settle_ms
        for shard in shards if settle_ms > 0 else ():
            await shard.settled(max(0, deadline_ms - self._clock.now_ms()))

    def partition_of(self, key: str) -> int:
        """The partition that decides which node coordinates a transactional id."""
        return self._shards.partition_of(routing_key(key))

    # -- producers -------------------------------------------------------------------------------------

    async def init_producer_id(
        self, transactional_id: str, timeout_ms: int, known: Producer | None = None
    ) -> InitResult:
        """InitProducerId with a transactional id. ``known``: who the producer thinks it is (v3 and later)."""
        if transactional_id.startswith(JOB_PREFIX):
            # The coordinator gives out these ids itself: an attempt is opened by OpenAttempt.
            return InitResult(ErrorCode.invalid_request)
        try:
            shard = await self._shard_of(transactional_id)

            def handler(fresh_id: int | None, now_ms: int) -> Producer:
                return shard.state.init_producer_id(transactional_id, known, timeout_ms, fresh_id, now_ms)

            producer = await with_producer_id(self._next_producer_id, shard, transactional_id, handler)
            return InitResult(producer=producer)
        except TidemillError as failure:
            return InitResult(client_error(failure))

    # -- partitions ------------------------------------------------------------------------------------

    async def add_partitions(
        self, transactional_id: str, producer: Producer, partitions: Collection[TopicPartition]
    ) -> ErrorCode:
        """Make partitions part of the producer's transaction, and let it write to those led here."""
        try:
            for topic, _ in partitions:
                _check_length("a topic name", topic)
            shard = await self._shard_of(transactional_id)
            await shard.call(
                transactional_id,
                lambda now_ms: shard.state.add_partitions(transactional_id, producer, partitions, now_ms),
            )
            self._allow(shard, transactional_id, producer, partitions)
        except TidemillError as failure:
            return client_error(failure)
        return ErrorCode.none

    async def verify_all(
        self, transactional_id: str, producer: Producer, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode]:
        """Which of the partitions are part of the producer's transaction; it may write to those."""
        try:
            shard = await self._shard_of(transactional_id)
            # What is not durable yet must not allow writes: a crash could take it back.
            await shard.barrier()
            await shard.confirm_newest()
            return self._allow(shard, transactional_id, producer, partitions)
        except TidemillError as failure:
            return dict.fromkeys(partitions, client_error(failure))

    def _allow(
        self,
        shard: TransactionShard,
        transactional_id: str,
        producer: Producer,
        partitions: Collection[TopicPartition],
    ) -> dict[TopicPartition, ErrorCode]:
        """Allow writes to those of the partitions that are part of the producer's transaction right now."""
        codes = shard.call_now(None, lambda _: shard.state.verify(transactional_id, producer, partitions))
        for partition, code in codes.items():
            if code is ErrorCode.none:
                self._partitions.allow_writes(partition, producer)
        return codes

    async def find_under_way(
        self, shards: Collection[int], transactions: Sequence[tuple[int, TopicPartition]]
    ) -> list[bool]:
        """Which transactions, each as (producer id, partition), are under way in these shards.

        A transaction that is open in its partition, and is under way in no shard, will never be ended: a
        coordinator forgets one only when its markers are committed. Raises ``TidemillError`` if one of the
        shards is not served here.
        """
        known: set[int] = set()
        for number in shards:
            shard = await self._shards.get(number)
            await shard.barrier()
            found = shard.call_now(None, lambda _, shard=shard: shard.state.under_way())  # type: ignore[misc]
            for position, (producer_id, partition) in enumerate(transactions):
                if partition in found.get(producer_id, ()):
                    known.add(position)
                await give_way()
            await shard.confirm_newest()
        return [position in known for position in range(len(transactions))]

    # -- the end ---------------------------------------------------------------------------------------

    async def end(
        self, transactional_id: str, producer: Producer, *, commit: bool, new_epoch: bool
    ) -> EndResult:
        """EndTxn. ``new_epoch``: the client is of transactions V2 and takes a new epoch with every end.

        The decision is durable when this returns; the markers are too unless they take very long.
        """
        if commit and transactional_id.startswith(JOB_PREFIX):
            # What an attempt wrote becomes visible with its batch, by PublishAttempts.
            return EndResult(ErrorCode.invalid_request)
        try:
            shard = await self._shard_of(transactional_id)
            client_version = CLIENT_V2 if new_epoch else CLIENT_V1

            def handler(fresh_id: int | None, now_ms: int) -> Producer:
                return shard.state.end(
                    transactional_id,
                    producer,
                    commit=commit,
                    client_version=client_version,
                    fresh_id=fresh_id,
                    now_ms=now_ms,
                )

            result = await with_producer_id(self._next_producer_id, shard, transactional_id, handler)
            await shard.finished([transactional_id], self._settings.end_wait_ms)
            return EndResult(producer=result)
        except TidemillError as failure:
            return EndResult(client_error(failure))

    # -- looking ---------------------------------------------------------------------------------------

    async def list_transactions(
        self,
        states: Collection[str] = (),
        producer_ids: Collection[int] = (),
        longer_than_ms: int = -1,
    ) -> ListResult:
        """ListTransactions over all shards of this node."""
        wanted, unknown = parse_states(states)
        found: list[tuple[int, tuple[tuple[str, Transaction], ...]]] = []
        failures = await self._shards.read_all(
            lambda shard, now_ms: found.append((now_ms, tuple(shard.state.transactions.items())))
        )
        listed: list[TransactionListing] = []
        for now_ms, transactions in found:
            for some in in_chunks(transactions, _LISTED_AT_ONCE):
                listed += listing(some, wanted, producer_ids, longer_than_ms, now_ms)
                await give_way()
        error = client_error(failures[0]) if failures else ErrorCode.none
        return ListResult(error, unknown, tuple(listed))

    async def describe_transactions(self, transactional_ids: Sequence[str]) -> list[TransactionDescription]:
        """DescribeTransactions, in the order asked for."""
        return [await self._describe(transactional_id) for transactional_id in transactional_ids]

    async def _describe(self, transactional_id: str) -> TransactionDescription:
        try:
            shard = await self._shard_of(transactional_id)
            return await shard.call(None, lambda _: shard.state.describe(transactional_id))
        except TidemillError as failure:
            return TransactionDescription(transactional_id, client_error(failure))

    def open_count(self) -> int:
        """The number of transactions under way in the shards that are loaded."""
        return sum(shard.state.open_count for shard in self._shards.loaded())

    # -- housekeeping ----------------------------------------------------------------------------------

    async def expire(self) -> None:
        """Forget transactional ids that nobody has used for long. Called now and then.

        Raises the first error that kept a shard from doing so; the call can be repeated.
        """
        await self._shards.keep_up(lambda shard, now_ms: shard.state.expire(now_ms))

    async def _shard_of(self, transactional_id: str) -> TransactionShard:
        if not transactional_id:
            raise ApiError(ErrorCode.invalid_request, "the transactional id is empty")
        _check_length("a transactional id", transactional_id)
        return await self._shards.of(routing_key(transactional_id))


def _check_length(what: str, text: str) -> None:
    if len(text.encode()) > MAX_STRING_BYTES:
        raise ApiError(
            ErrorCode.invalid_request, f"{what} of {len(text)} characters is too long to be stored"
        )
