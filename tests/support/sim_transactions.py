"""A transactional producer against a simulated node, with the rules that real clients keep to.

- It asks for a commit only when all that it wrote is acknowledged, and for an abort only when nothing is on
  its way; otherwise it starts anew, which ends the transaction and makes its old self a zombie.
- Errors that pass are retried. Any other means that it has lost its place: it starts anew.
- It knows the outcome of a commit only from the answer. Without one, both outcomes are right.

One of two kinds: clients of transactions V1 say beforehand which partitions they write to and keep their
epoch; those of V2 leave that to the node and get a new epoch with every end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from support.history import History
from support.sim_node import SimClient
from tidemill.errors import ErrorCode
from tidemill.records.record import Record, build_batch

__all__ = ("TransactionalProducer",)

_PRODUCE, _INIT_PRODUCER_ID, _ADD_PARTITIONS, _END_TXN = 0, 22, 24, 26
_TRANSACTIONAL = 0x10
_IN_FLIGHT_MAX = 5
_TIMEOUT_MS = 60_000

_PASSES = {
    ErrorCode.concurrent_transactions,
    ErrorCode.coordinator_load_in_progress,
    ErrorCode.coordinator_not_available,
    ErrorCode.kafka_storage_error,
    ErrorCode.not_coordinator,
    ErrorCode.not_enough_replicas,
    ErrorCode.not_leader_or_follower,
    ErrorCode.out_of_order_sequence_number,
    ErrorCode.request_timed_out,
}
#: Its transaction has timed out, and was aborted without it.
_LOST_ITS_PLACE = {
    ErrorCode.invalid_producer_epoch,
    ErrorCode.invalid_txn_state,
    ErrorCode.producer_fenced,
    ErrorCode.transaction_abortable,
}


class InFlight:
    """Batches of one partition that are not acknowledged: (base sequence, values), oldest first."""

    def __init__(self) -> None:
        self.sequence = 0
        self.unacked: list[tuple[int, tuple[str, ...]]] = []
        self.sent = 0


class TransactionalProducer:
    """A client with one transactional id. Whatever it does, it notes in the history."""

    def __init__(
        self, transactional_id: str, topic: str, partitions: int, rng: random.Random, history: History
    ) -> None:
        self.transactional_id = transactional_id
        self.may_be_fenced = False
        self.committed = 0
        self._topic, self._partitions = topic, partitions
        self._rng, self._history = rng, history
        self._is_v2 = rng.random() < 0.5
        self._producer: tuple[int, int] | None = None
        self._in_flight: dict[int, InFlight] = {}
        self._added: set[int] = set()
        self._wanted: list[int] = []
        self._transaction = ""
        self._decision: bool | None = None
        self._waiting = False
        self._begun = 0
        self._made = 0
        self._zombies: list[dict[str, Any]] = []

    # -- what the story does with it -------------------------------------------------------------------

    @property
    def at_rest(self) -> bool:
        """Whether it has no transaction, and has found out what became of the last."""
        return self._producer is not None and not self._transaction

    def reconnect(self) -> None:
        """The node has crashed: nothing that was asked will be answered. It may take the client with it."""
        if self._rng.random() < 0.15:
            self._start_anew(0)
        self._waiting = False
        for in_flight in self._in_flight.values():
            in_flight.sent = 0

    def step(self, client: SimClient, now_ms: int) -> None:
        """Do one thing of what a client may do now."""
        chance = self._rng.random()
        if chance < 0.03:
            self._start_anew(now_ms)
        elif chance < 0.06 and self._zombies:
            client.send(_PRODUCE, 9, self._zombies.pop(), lambda answer: None)
        elif not self._go_on(client):
            if not self._transaction:
                self._begin()
            elif self._can_end and chance < 0.60:
                self._end(client, commit=self._rng.random() < 0.7)
            else:
                self._make()
                self._send(client, now_ms)

    def come_to_rest(self, client: SimClient, now_ms: int) -> None:
        """Begin nothing new."""
        if self._go_on(client) or self.at_rest:
            return
        if not self._in_flight_now:
            self._start_anew(now_ms)
        elif self._can_end:
            self._end(client, commit=self._rng.random() < 0.7)
        else:
            self._send(client, now_ms)

    def _go_on(self, client: SimClient) -> bool:
        """Whether there was something that must be done before anything else."""
        if self._waiting:
            return True
        if self._producer is None:
            self._initialize(client)
        elif self._decision is not None:
            self._end(client, commit=self._decision)
        elif not self._is_v2 and self._wanted and not self._added.issuperset(self._wanted):
            self._add_partitions(client)
        else:
            return False
        return True

    def _start_anew(self, now_ms: int) -> None:
        """As another process with the same transactional id; the one before lives on as a zombie."""
        if self._transaction and not self._decision:
            self._history.aborted(self._transaction)
        for partition, in_flight in self._in_flight.items():
            if in_flight.unacked:
                self._zombies.append(self._produce_body([(partition, *in_flight.unacked[0])], now_ms))
        self._producer, self._in_flight = None, {}
        self._forget_transaction()
        self._waiting = False

    def _forget_transaction(self) -> None:
        self._transaction, self._decision = "", None
        self._added, self._wanted = set(), []

    def _ask(
        self, client: SimClient, key: int, version: int, body: dict[str, Any], answered: Callable[[Any], None]
    ) -> None:
        """Send the one request that all else waits for."""
        self._waiting = True
        asker = self._producer, self._begun

        def receive(answer: Any) -> None:
            if asker == (self._producer, self._begun) and self._waiting:
                self._waiting = False
                answered(answer)

        client.send(key, version, body, receive)

    def _failed(self, code: int) -> bool:
        """Whether the answer was an error; starts anew if it is one that does not pass."""
        if code == ErrorCode.none:
            return False
        if code not in _PASSES:
            assert code in _LOST_ITS_PLACE, (self.transactional_id, ErrorCode(code).name)
            assert self.may_be_fenced, f"{self._transaction} was ended by somebody else"
            self._start_anew(0)
        return True

    # -- a producer ------------------------------------------------------------------------------------

    def _initialize(self, client: SimClient) -> None:
        body = {
            "transactional_id": self.transactional_id,
            "transaction_timeout": _TIMEOUT_MS,
            "producer_id": -1,
            "producer_epoch": -1,
        }
        self._begun += 1
        self._ask(client, _INIT_PRODUCER_ID, 4, body, self._initialized)

    def _initialized(self, answer: Any) -> None:
        if answer.error_code != ErrorCode.none:
            assert answer.error_code in _PASSES, answer
            return
        self._producer = (answer.producer_id, answer.producer_epoch)

    @property
    def _identity(self) -> dict[str, Any]:
        assert self._producer is not None
        producer_id, epoch = self._producer
        return {
            "transactional_id": self.transactional_id,
            "producer_id": producer_id,
            "producer_epoch": epoch,
        }

    # -- a transaction ---------------------------------------------------------------------------------

    def _begin(self) -> None:
        self._begun += 1
        self._transaction = f"{self.transactional_id}/{self._begun}"
        self.may_be_fenced = False
        self._want_another()

    def _want_another(self) -> None:
        partition = self._rng.randrange(self._partitions)
        if partition not in self._wanted:
            self._wanted.append(partition)

    def _add_partitions(self, client: SimClient) -> None:
        wanted = list(self._wanted)
        body = {f"v3_and_below_{name}": value for name, value in self._identity.items()}
        body["v3_and_below_topics"] = [{"name": self._topic, "partitions": wanted}]

        def answered(answer: Any) -> None:
            results = answer.results_by_topic_v3_and_below[0].results_by_partition
            if not any(self._failed(result.partition_error_code) for result in results):
                self._added.update(wanted)

        self._ask(client, _ADD_PARTITIONS, 3, body, answered)

    @property
    def _in_flight_now(self) -> list[InFlight]:
        return [self._in_flight[partition] for partition in self._wanted if partition in self._in_flight]

    @property
    def _can_end(self) -> bool:
        return bool(self._in_flight_now) and not any(
            in_flight.unacked for in_flight in self._in_flight.values()
        )

    def _end(self, client: SimClient, *, commit: bool) -> None:
        self._decision = commit
        if not commit:
            self._history.aborted(self._transaction)

        def answered(answer: Any) -> None:
            if self._failed(answer.error_code):
                return
            if commit:
                self._history.committed(self._transaction)
                self.committed += 1
            if self._is_v2:
                self._producer = (answer.producer_id, answer.producer_epoch)
                self._in_flight = {}
            self._forget_transaction()

        body = {**self._identity, "committed": commit}
        self._ask(client, _END_TXN, 5 if self._is_v2 else 3, body, answered)

    # -- records ---------------------------------------------------------------------------------------

    def _make(self) -> None:
        if self._rng.random() < 0.4:
            self._want_another()
        partition = self._rng.choice(self._wanted)
        if not self._is_v2 and partition not in self._added:
            return
        in_flight = self._in_flight.setdefault(partition, InFlight())
        if len(in_flight.unacked) >= _IN_FLIGHT_MAX:
            return
        values = tuple(
            f"{self._transaction}-{self._made + number}" for number in range(self._rng.randint(1, 3))
        )
        self._made += len(values)
        in_flight.unacked.append((in_flight.sequence, values))
        in_flight.sequence += len(values)
        for value in values:
            self._history.sent(f"{self._topic}-{partition}", value, self._transaction)

    def _send(self, client: SimClient, now_ms: int) -> None:
        """Send the next batch of every partition, in one request."""
        batches = []
        for partition, in_flight in self._in_flight.items():
            if in_flight.sent < len(in_flight.unacked):
                batches.append((partition, *in_flight.unacked[in_flight.sent]))
                in_flight.sent += 1
        if not batches:
            return
        sender = self._producer, self._begun

        def answered(answer: Any) -> None:
            results = {result.index: result for result in answer.responses[0].partition_responses}
            for partition, sequence, values in batches:
                if sender == (self._producer, self._begun):
                    self._take_ack(partition, sequence, values, results[partition])

        body = self._produce_body(batches, now_ms)
        client.send(_PRODUCE, 12 if self._is_v2 else 9, body, answered)

    def _produce_body(self, batches: list[tuple[int, int, tuple[str, ...]]], now_ms: int) -> dict[str, Any]:
        assert self._producer is not None
        producer_id, epoch = self._producer
        data = [
            {
                "index": partition,
                "records": build_batch(
                    [Record(None, value.encode(), now_ms) for value in values],
                    producer_id=producer_id,
                    producer_epoch=epoch,
                    base_sequence=sequence,
                    attributes=_TRANSACTIONAL,
                ),
            }
            for partition, sequence, values in batches
        ]
        return {
            "transactional_id": self.transactional_id,
            "acks": -1,
            "timeout": 60_000,
            "topic_data": [{"name": self._topic, "partition_data": data}],
        }

    def _take_ack(self, partition: int, sequence: int, values: tuple[str, ...], result: Any) -> None:
        in_flight = self._in_flight[partition]
        if self._failed(result.error_code):
            in_flight.sent = 0
        elif (sequence, values) in in_flight.unacked:
            place = in_flight.unacked.index((sequence, values))
            del in_flight.unacked[place]
            in_flight.sent -= in_flight.sent > place
            for number, value in enumerate(values):
                self._history.acked(f"{self._topic}-{partition}", value, result.base_offset + number)
