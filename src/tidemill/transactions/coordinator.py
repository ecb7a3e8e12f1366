"""The transaction coordinator: which shard an id lives in, producer ids, and Kafka's error codes.

Every public function that serves a client answers with error codes; none raises for what a client sends or
a disk does. A partition is opened to a transaction only after the log holds that it is part of it, and in a
step in which that is still true: an end that came in between keeps it closed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.coordination.binary import LONGEST_STRING
from tidemill.coordination.shards import Shards, client_error
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.transactions.attempts import JOB_PREFIX, routing_key
from tidemill.transactions.job_coordinator import JobCoordinator, with_producer_id
from tidemill.transactions.messages import EndResult, InitResult, ListResult, Producer, TransactionDescription
from tidemill.transactions.shard import TRANSACTIONS_TOPIC, TransactionShard
from tidemill.transactions.state import parse_states
from tidemill.transactions.transaction import CLIENT_V1, CLIENT_V2

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from tidemill.coordination.clock import Clock
    from tidemill.coordination.log import LogAccess
    from tidemill.errors import CorruptData
    from tidemill.transactions.messages import (
        TopicPartition,
        TransactionListing,
        TransactionPartitions,
    )
    from tidemill.transactions.settings import TransactionSettings

__all__ = ("TransactionCoordinator",)


class TransactionCoordinator:
    """The transactional ids of the partitions of ``__transaction_state`` that this node leads."""

    def __init__(
        self,
        logs: LogAccess,
        partitions: TransactionPartitions,
        settings: TransactionSettings,
        clock: Clock,
        next_producer_id: Callable[[], Awaitable[int]],
    ) -> None:
        self._settings = settings
        self._partitions = partitions
        self._clock = clock
        self._next_producer_id = next_producer_id
        self._shards: Shards[TransactionShard] = Shards(
            TRANSACTIONS_TOPIC,
            settings.partitions,
            clock,
            lambda partition, on_stop: TransactionShard(
                partition, logs.open_log(partition), partitions, settings, clock, on_stop
            ),
        )
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

    async def close(self) -> None:
        """Answer whoever waits with COORDINATOR_NOT_AVAILABLE and stop all work."""
        await self._shards.close()

    def damaged(self) -> dict[TopicPartition, CorruptData]:
        """The partitions that are not served because their log is damaged."""
        return self._shards.damaged()

    def partition_of(self, transactional_id: str) -> int:
        """The partition that decides which node coordinates ``transactional_id``."""
        return self._shards.partition_of(routing_key(transactional_id))

    # -- producers -------------------------------------------------------------------------------------

    async def init_producer_id(
        self, transactional_id: str, timeout_ms: int, known: Producer | None = None
    ) -> InitResult:
        """InitProducerId with a transactional id. ``known``: who the producer thinks it is (v3 and later)."""
        if transactional_id.startswith(JOB_PREFIX):
            # Of the coordinator's own: an attempt is opened, by OpenAttempt.
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
        self, transactional_id: str, producer: Producer, places: Collection[TopicPartition]
    ) -> ErrorCode:
        """Make partitions part of the producer's transaction, and let it write to those led here."""
        try:
            for topic, _ in places:
                _check_length("a topic name", topic)
            shard = await self._shard_of(transactional_id)
            await shard.call(
                transactional_id,
                lambda now_ms: shard.state.add_partitions(transactional_id, producer, places, now_ms),
            )
            self._allow(shard, transactional_id, producer, places)
        except TidemillError as failure:
            return client_error(failure)
        return ErrorCode.none

    async def verify(
        self, transactional_id: str, producer_id: int, producer_epoch: int, topic: str, partition: int
    ) -> ErrorCode:
        """Whether a partition is part of the producer's transaction; if so, lets it write there."""
        place = (topic, partition)
        codes = await self.verify_all(transactional_id, Producer(producer_id, producer_epoch), [place])
        return codes[place]

    async def verify_all(
        self, transactional_id: str, producer: Producer, places: Collection[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode]:
        """The same for several partitions."""
        try:
            shard = await self._shard_of(transactional_id)
            # What is not durable yet must not let anybody write.
            await shard.barrier()
            return self._allow(shard, transactional_id, producer, places)
        except TidemillError as failure:
            return dict.fromkeys(places, client_error(failure))

    def _allow(
        self,
        shard: TransactionShard,
        transactional_id: str,
        producer: Producer,
        places: Collection[TopicPartition],
    ) -> dict[TopicPartition, ErrorCode]:
        """Let the producer write wherever it has a transaction at this moment."""
        codes = shard.call_now(None, lambda _: shard.state.verify(transactional_id, producer, places))
        for place, code in codes.items():
            if code is ErrorCode.none:
                self._partitions.allow_writes(place, producer)
        return codes

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
        found: list[TransactionListing] = []

        def collect(shard: TransactionShard, now_ms: int) -> None:
            found.extend(shard.state.listing(wanted, producer_ids, longer_than_ms, now_ms))

        failures = await self._shards.on_all(collect)
        error = client_error(failures[0]) if failures else ErrorCode.none
        return ListResult(error, unknown, tuple(found))

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
        """How many transactions are under way in the shards that are loaded."""
        return sum(
            not value.is_idle
            for shard in self._shards.loaded()
            for value in shard.state.transactions.values()
        )

    # -- housekeeping ----------------------------------------------------------------------------------

    async def expire(self) -> None:
        """Forget ids that nobody has used for long. Call it now and then.

        Raises the first error that kept a shard from doing so; the call can be repeated.
        """
        await self._shards.keep_up(lambda shard, now_ms: shard.state.expire(now_ms))

    async def _shard_of(self, transactional_id: str) -> TransactionShard:
        if not transactional_id:
            raise ApiError(ErrorCode.invalid_request, "the transactional id is empty")
        _check_length("a transactional id", transactional_id)
        return await self._shards.of(routing_key(transactional_id))


def _check_length(what: str, text: str) -> None:
    if len(text.encode()) > LONGEST_STRING:
        raise ApiError(
            ErrorCode.invalid_request, f"{what} of {len(text)} characters is too long to be stored"
        )
