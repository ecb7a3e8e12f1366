"""The persister: reads and writes the state of share partitions, on whatever node their coordinator is.

``NodePersister`` is the ``Persister`` of a node. Rules:

- The coordinator is found by the metadata, with every attempt: a call if it is this node, else a request of
  Kafka's protocol to the node that leads the state partition, over the connection that nodes have anyway.
- What waits for one node goes there together: while a request of a kind is under way, those that come are
  collected, and then sent as one for each group.
- Calls for one share partition are carried out in the order in which they came, so that a write that is tried
  again cannot overtake a later one. Writes that wait for each other become one.
- Errors that pass are tried again: five attempts, with pauses of 1, 2, 4 and 8 seconds. An answer that says
  nothing about a partition is such an error: nobody knows what was done. Any other error is raised. A read
  that failed is an error, never an empty state.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from tidemill.coordination.clock import pause
from tidemill.coordination.share_state import (
    NO_CUT,
    NO_POSITION,
    NO_START,
    DeliveryState,
    LogPosition,
    SharePartitionKey,
    ShareState,
    ShareStateSummary,
    StateBatch,
)
from tidemill.coordination.shell import resolve
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.net.retry import RetryPolicy, retry
from tidemill.replication.rules.assignment import NO_LEADER
from tidemill.server.coordinators.share_state import SHARE_STATE
from tidemill.share.state.states import StateWrite

if TYPE_CHECKING:
    from tidemill.server.broker.bundle import Broker

__all__ = ("NodePersister", "Transaction", "write_here")

T = TypeVar("T")

#: The most share partitions in one request.
_PARTITIONS_MAX: Final = 1_000
#: What passes: the coordinator moves or loads, its node does not answer, metadata is late.
_PASSING: Final = frozenset(
    {
        ErrorCode.broker_not_available,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.leader_not_available,
        ErrorCode.network_exception,
        ErrorCode.not_coordinator,
        ErrorCode.not_leader_or_follower,
        ErrorCode.request_timed_out,
        ErrorCode.unknown_topic_or_partition,
    }
)
#: Kafka's: five attempts, 1 to 30 s apart.
_POLICY: Final = RetryPolicy(
    timeout_ms=None, first_pause_ms=1_000, longest_pause_ms=30_000, failures_max=5, transient=_PASSING
)


class Transaction(NamedTuple):
    """A producer's transaction that a write is to be part of."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


class _Kind(NamedTuple):
    """One kind of request between nodes: its API, and how an answer about a partition is read."""

    api: str
    version: int
    result: Callable[[Any], Any]


@dataclass(slots=True)
class _Asked:
    """A question about one share partition, on its way to another node."""

    key: SharePartitionKey
    body: Mapping[str, Any]
    answer: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class _Write:
    """A write that waits for its turn."""

    write: StateWrite
    done: asyncio.Future[None]


@dataclass(slots=True)
class _Line:
    """The queue of calls about one share partition. ``users`` calls have the lock or wait for it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    writes: list[_Write] = field(default_factory=list)
    users: int = 0


async def write_here(
    broker: Broker, key: SharePartitionKey, write: StateWrite, transactional_id: str | None
) -> None:
    """Carry out a write at the coordinator, which is on this node; in a transaction, become a part of that.

    Raises ``ApiError``.
    """
    if write.producer is not None:
        # At its first use: entering a transaction is what the transactions' row is for.
        from tidemill.server.coordinators.transaction_entry import enter_transaction
        from tidemill.transactions.messages import Producer

        partition = broker.coordinators.partition_of(SHARE_STATE, str(key))
        codes = await enter_transaction(
            broker, transactional_id or "", Producer(*write.producer), [partition], add=True
        )
        code = codes[partition]
        if code is not ErrorCode.none:
            raise ApiError(
                code, f"share partition {key} cannot be part of transaction {transactional_id!r}: {code.name}"
            )
    await broker.share_states.write(key, write)


class NodePersister:
    """The ``Persister`` of a node."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lines: dict[SharePartitionKey, _Line] = {}
        #: What waits for a node, by node and kind; there is a task for each that sends it.
        self._waiting: dict[tuple[int, _Kind], list[_Asked]] = {}
        self._senders: dict[tuple[int, _Kind], asyncio.Task[None]] = {}

    # -- what others ask for ---------------------------------------------------------------------------

    async def initialize(self, key: SharePartitionKey, state_epoch: int, start_offset: int) -> None:
        """Begin the state, or begin it anew at a higher epoch."""
        body = {"state_epoch": state_epoch, "start_offset": start_offset}
        states = self._broker.share_states
        with self._line(key) as line:
            async with line.lock:
                await self._retried(
                    key, _INITIALIZE, lambda: body, lambda: states.initialize(key, state_epoch, start_offset)
                )

    async def read_state(self, key: SharePartitionKey, leader_epoch: int) -> ShareState:
        """The state, for the leader of the data partition at ``leader_epoch``."""
        states = self._broker.share_states
        with self._line(key) as line:
            async with line.lock:
                return await self._retried(
                    key, _READ, lambda: {"leader_epoch": leader_epoch}, lambda: states.read(key, leader_epoch)
                )

    async def write_state(
        self,
        key: SharePartitionKey,
        state_epoch: int,
        leader_epoch: int,
        start_offset: int,
        delivery_complete_count: int,
        batches: Sequence[StateBatch],
        log_position: LogPosition = NO_POSITION,
        cut_offset: int = NO_CUT,
    ) -> None:
        """Change the state of the records in ``batches``, and move the start unless it is ``NO_START``."""
        write = _Write(
            StateWrite(
                state_epoch,
                leader_epoch,
                start_offset,
                delivery_complete_count,
                batches,
                log_position=log_position,
                cut_offset=cut_offset,
            ),
            asyncio.get_running_loop().create_future(),
        )
        with self._line(key) as line:
            line.writes.append(write)
            try:
                async with line.lock:
                    while write in line.writes:
                        await self._write_waiting(key, line, _together(line.writes))
            finally:
                if write in line.writes:
                    line.writes.remove(write)
        if not write.done.done():
            raise ApiError(ErrorCode.request_timed_out, f"the write of {key} was given up")
        write.done.result()

    async def write_in_transaction(
        self,
        key: SharePartitionKey,
        state_epoch: int,
        leader_epoch: int,
        batches: Sequence[StateBatch],
        transaction: Transaction,
        log_position: LogPosition = NO_POSITION,
    ) -> None:
        """Change the state when the transaction commits; until it ends, readers see who decides.

        What fails is not tried again: whether it was carried out decides the end of the transaction.
        """
        producer = (transaction.producer_id, transaction.producer_epoch)
        write = StateWrite(state_epoch, leader_epoch, NO_START, -1, batches, producer, log_position)
        transactional_id = transaction.transactional_id
        with self._line(key) as line:
            async with line.lock:
                await self._attempt(
                    key,
                    _WRITE,
                    partial(_write_body, write, transactional_id),
                    lambda: write_here(self._broker, key, write, transactional_id),
                )

    async def delete(self, key: SharePartitionKey) -> None:
        """Forget the state."""
        with self._line(key) as line:
            async with line.lock:
                await self._retried(key, _DELETE, dict, lambda: self._broker.share_states.delete(key))

    async def read_summary(self, key: SharePartitionKey, leader_epoch: int) -> ShareStateSummary:
        """What describing the share partition needs; changes nothing, and waits for nobody."""
        states = self._broker.share_states
        return await self._retried(
            key, _SUMMARY, lambda: {"leader_epoch": leader_epoch}, lambda: states.summary(key)
        )

    async def close(self) -> None:
        """Stop sending. Calls that wait end with an error."""
        senders = list(self._senders.values())
        for sender in senders:
            sender.cancel()
        await asyncio.gather(*senders, return_exceptions=True)

    # -- one share partition ---------------------------------------------------------------------------

    @contextlib.contextmanager
    def _line(self, key: SharePartitionKey) -> Iterator[_Line]:
        line = self._lines.setdefault(key, _Line())
        line.users += 1
        try:
            yield line
        finally:
            line.users -= 1
            if not line.users:
                del self._lines[key]

    async def _write_waiting(self, key: SharePartitionKey, line: _Line, writes: list[_Write]) -> None:
        """Carry out writes as one, and tell all of them what became of it."""
        del line.writes[: len(writes)]
        error: TidemillError = ApiError(ErrorCode.request_timed_out, f"the write of {key} was given up")
        write = _joined([each.write for each in writes])
        try:
            await self._retried(
                key,
                _WRITE,
                partial(_write_body, write, None),
                lambda: write_here(self._broker, key, write, None),
            )
        except TidemillError as failure:
            error = failure
        else:
            for each in writes:
                resolve(each.done, None)
        finally:
            # Also reached when the call that does the work for all of them is cancelled.
            for each in writes:
                if not each.done.done():
                    each.done.set_exception(error)
                    # Read here, because nobody may wait for it any more: asyncio would log it.
                    each.done.exception()

    async def _retried(
        self,
        key: SharePartitionKey,
        kind: _Kind,
        body: Callable[[], Mapping[str, Any]],
        here: Callable[[], Awaitable[T]],
    ) -> T:
        """Ask the coordinator until it has answered; raises ``ApiError``.

        ``here`` carries it out if that is this node; ``body`` makes the request to another one.
        """
        return await retry(
            lambda: self._attempt(key, kind, body, here),
            _POLICY,
            jitter=lambda: 0.0,
            sleep=lambda seconds: pause(self._broker.clock, round(seconds * 1_000)),
        )

    async def _attempt(
        self,
        key: SharePartitionKey,
        kind: _Kind,
        body: Callable[[], Mapping[str, Any]],
        here: Callable[[], Awaitable[T]],
    ) -> T:
        broker = self._broker
        try:
            await broker.coordinators.ensure_topic(SHARE_STATE)
            node_id = await broker.coordinators.leader_of(SHARE_STATE, str(key))
            if node_id == NO_LEADER:
                raise ApiError(
                    ErrorCode.coordinator_not_available, f"the state of share partition {key} has no leader"
                )
            if node_id == broker.node_id:
                return await here()
            answer: T = await self._ask(node_id, kind, key, body())
            return answer
        except ApiError:
            raise
        except TidemillError as error:
            # A node that cannot be reached, a disk that is full: nothing is known of the state.
            raise ApiError(ErrorCode.coordinator_not_available, error.message) from error

    # -- other nodes -----------------------------------------------------------------------------------

    async def _ask(self, node_id: int, kind: _Kind, key: SharePartitionKey, body: Mapping[str, Any]) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault((node_id, kind), []).append(_Asked(key, body, answer))
        if (node_id, kind) not in self._senders:
            sender = asyncio.get_running_loop().create_task(self._send_all(node_id, kind))
            self._senders[node_id, kind] = sender
        return await answer

    async def _send_all(self, node_id: int, kind: _Kind) -> None:
        """Send what waits for a node until nothing does."""
        taken: list[_Asked] = []
        try:
            while taken := self._waiting.pop((node_id, kind), []):
                groups: dict[str, list[_Asked]] = {}
                for asked in taken:
                    groups.setdefault(asked.key.group_id, []).append(asked)
                await asyncio.gather(
                    *(
                        self._send(node_id, kind, group_id, some[start : start + _PARTITIONS_MAX])
                        for group_id, some in groups.items()
                        for start in range(0, len(some), _PARTITIONS_MAX)
                    )
                )
        finally:
            del self._senders[node_id, kind]
            for asked in (*taken, *self._waiting.pop((node_id, kind), [])):
                if not asked.answer.done():
                    asked.answer.set_exception(_no_answer(node_id, asked.key))

    async def _send(self, node_id: int, kind: _Kind, group_id: str, asked: Sequence[_Asked]) -> None:
        """Send one request, and give every part of the answer to the one who asked."""
        topics: dict[Any, list[dict[str, Any]]] = {}
        for each in asked:
            partitions = topics.setdefault(each.key.topic_id, [])
            partitions.append({"partition": each.key.partition, **each.body})
        body = {
            "group_id": group_id,
            "topics": [{"topic_id": topic_id, "partitions": some} for topic_id, some in topics.items()],
        }
        try:
            answer = await self._broker.ask_node(node_id, kind.api, kind.version, body)
        except TidemillError as error:
            for each in asked:
                _fail(each, ApiError(ErrorCode.coordinator_not_available, error.message))
            return
        results = {
            SharePartitionKey(group_id, result.topic_id, partition.partition): partition
            for result in answer.results
            for partition in result.partitions
        }
        for each in asked:
            found = results.get(each.key)
            # Without an answer it may have been carried out: the writer has to read the state again.
            code = ErrorCode.request_timed_out if found is None else ErrorCode(found.error_code)
            if found is None:
                _fail(each, ApiError(code, f"node {node_id} said nothing of share partition {each.key}"))
            elif code is not ErrorCode.none:
                _fail(each, ApiError(code, found.error_message or f"node {node_id}: {code.name}"))
            else:
                resolve(each.answer, kind.result(found))


def _fail(asked: _Asked, error: ApiError) -> None:
    if not asked.answer.done():
        asked.answer.set_exception(error)


def _no_answer(node_id: int, key: SharePartitionKey) -> ApiError:
    return ApiError(ErrorCode.request_timed_out, f"node {node_id} was not asked for share partition {key}")


def _together(writes: Sequence[_Write]) -> list[_Write]:
    """The first of the writes that can be one: those of one state epoch and one leader epoch.

    One that says that the log was cut begins anew: what came before it is not joined to it.
    """
    first = writes[0].write
    some: list[_Write] = []
    for each in writes:
        if each.write[:2] != first[:2] or (some and each.write.cut_offset != NO_CUT):
            break
        some.append(each)
    return some


def _joined(writes: Sequence[StateWrite]) -> StateWrite:
    """One write that does what the writes do one after the other."""
    last = writes[-1]
    starts = [each.start_offset for each in writes if each.start_offset != NO_START]
    batches = [batch for each in writes for batch in each.batches]
    known = [each.log_position for each in writes if each.log_position != NO_POSITION]
    histories = [each.history for each in known if each.history]
    return last._replace(
        start_offset=starts[-1] if starts else NO_START,
        batches=batches,
        log_position=known[-1]._replace(history=histories[-1] if histories else b"")
        if known
        else NO_POSITION,
        cut_offset=writes[0].cut_offset,
    )


def _write_body(write: StateWrite, transactional_id: str | None) -> dict[str, Any]:
    body: dict[str, Any] = {
        "state_epoch": write.state_epoch,
        "leader_epoch": write.leader_epoch,
        "start_offset": write.start_offset,
        "delivery_complete_count": write.delivery_complete_count,
        "log_offset": write.log_position.offset,
        "log_epoch": write.log_position.leader_epoch,
        "log_history": write.log_position.history,
        "cut_offset": write.cut_offset,
        "state_batches": [
            {
                "first_offset": batch.first_offset,
                "last_offset": batch.last_offset,
                "delivery_state": int(batch.state),
                "delivery_count": batch.delivery_count,
                "not_before_ms": batch.not_before_ms,
                "reason": batch.reason,
            }
            for batch in write.batches
        ],
    }
    if write.producer is not None:
        body["transactional_id"] = transactional_id
        body["producer_id"], body["producer_epoch"] = write.producer
    return body


def _state(answer: Any) -> ShareState:
    batches = tuple(
        StateBatch(
            each.first_offset,
            each.last_offset,
            DeliveryState(each.delivery_state),
            each.delivery_count,
            each.not_before_ms,
            each.producer_id,
            each.producer_epoch,
            each.reason,
        )
        for each in answer.state_batches
    )
    return ShareState(
        answer.state_epoch,
        answer.start_offset,
        batches,
        answer.delivery_complete_count,
        LogPosition(answer.log_offset, answer.log_epoch, bytes(answer.log_history)),
    )


def _summary(answer: Any) -> ShareStateSummary:
    return ShareStateSummary(
        answer.state_epoch, answer.leader_epoch, answer.start_offset, answer.delivery_complete_count
    )


def _nothing(answer: Any) -> None:
    del answer


_INITIALIZE: Final = _Kind("InitializeShareGroupState", 0, _nothing)
_READ: Final = _Kind("ReadShareGroupState", 0, _state)
_WRITE: Final = _Kind("WriteShareGroupState", 1, _nothing)
_DELETE: Final = _Kind("DeleteShareGroupState", 0, _nothing)
_SUMMARY: Final = _Kind("ReadShareGroupStateSummary", 1, _summary)
