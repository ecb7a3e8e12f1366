"""A transactional producer of a simulated cluster, with the rules that real clients keep to.

- It asks for a commit only when all that it wrote is acknowledged. Now and then it gives up and starts anew,
  as another process with its id would: that ends the transaction, and makes its old self a zombie, whose
  last batch arrives later.
- Errors that pass are retried. An error that means that it has lost its place makes it start anew; that may
  happen only when its transaction has taken longer than its timeout.
- It knows the outcome of a commit only from the answer. Without one, both outcomes are right.

Clients of transactions V1 say beforehand which partitions they write to, and keep their epoch; those of V2
leave that to the leaders, and get a new epoch with every end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from support.cluster_clients import OUT_OF_ORDER, PASSING, ClusterClient
from support.history import History
from tidemill.config.values import Address
from tidemill.errors import ErrorCode, TidemillError
from tidemill.records.record import Record, build_batch

__all__ = ("TRANSACTION_TIMEOUT_MS", "Coordinated", "LostPlace", "TransactionSteps", "TransactionalWriter")

TRANSACTION_TIMEOUT_MS = 20_000
TRANSACTIONAL = 0x10
_PASSES = PASSING | {ErrorCode.concurrent_transactions, OUT_OF_ORDER}
_LOST_ITS_PLACE = {
    ErrorCode.invalid_producer_epoch,
    ErrorCode.invalid_producer_id_mapping,
    ErrorCode.invalid_txn_state,
    ErrorCode.producer_fenced,
    ErrorCode.transaction_abortable,
    ErrorCode.unknown_producer_id,
}
#: How often a client gives up at an error that passes.
_GIVES_UP_SHARE = 0.03
#: The clock of a coordinator may be a little faster than that of others.
_TIMEOUT_SECONDS = TRANSACTION_TIMEOUT_MS / 1000 * 0.9


class LostPlace(Exception):
    """The client has no transaction any more."""


class Coordinated:
    """Asks the coordinator of one transactional id."""

    def __init__(self, client: ClusterClient, transactional_id: str) -> None:
        self._client = client
        self._id = transactional_id
        self._address: Address | None = None

    async def ask(self, name: str, body: Mapping[str, Any], version: int) -> Any:
        """The coordinator's answer; None if there is none, or nobody knows the coordinator."""
        try:
            if self._address is None:
                found = await self._client.ask_any("FindCoordinator", {"key": self._id, "key_type": 1}, 3)
                if found.error_code != ErrorCode.none:
                    return None
                self._address = Address(found.host, found.port)
            return await self._client.ask(self._address, name, body, version)
        except TidemillError:
            self._address = None
            return None

    def forget(self) -> None:
        """Ask anew who the coordinator is."""
        self._address = None


class TransactionSteps:
    """The requests of a transactional producer: each is repeated until it is answered for good.

    Attributes:
        producer: Its id and epoch; None until it is initialized.
    """

    def __init__(self, client: ClusterClient, transactional_id: str, *, is_v2: bool) -> None:
        self.client, self.rng = client, client.rng
        self.name, self.is_v2 = transactional_id, is_v2
        self.producer: tuple[int, int] | None = None
        self.doing = ""
        self._coordinator = Coordinated(client, transactional_id)
        self._sequences: dict[tuple[str, int], int] = {}
        self._began_at = 0.0

    # --- what it asks

    @property
    def _identity(self) -> dict[str, Any]:
        assert self.producer is not None
        producer_id, epoch = self.producer
        return {"transactional_id": self.name, "producer_id": producer_id, "producer_epoch": epoch}

    async def initialize(self) -> None:
        """Become the only one with this transactional id; it ends whatever transaction is open."""
        self.producer, self._sequences = None, {}
        body = {
            "transactional_id": self.name,
            "transaction_timeout": TRANSACTION_TIMEOUT_MS,
            "producer_id": -1,
            "producer_epoch": -1,
        }
        while self.producer is None:
            self.doing = "InitProducerId"
            answer = await self._coordinator.ask("InitProducerId", body, 4)
            if answer is not None and answer.error_code == ErrorCode.none:
                self.producer = (answer.producer_id, answer.producer_epoch)
            else:
                if answer is not None:
                    self.doing = f"InitProducerId: {ErrorCode(answer.error_code).name}"
                    if answer.error_code not in _PASSES:
                        self.client.note_strange(f"{self.name}: {self.doing}")
                await self._wait()

    def begin(self) -> None:
        self._began_at = self.client.network.loop.now

    async def add(self, place: tuple[str, int]) -> None:
        """Tell the coordinator of a partition, as V1 wants it."""
        body = {f"v3_and_below_{name}": value for name, value in self._identity.items()}
        body["v3_and_below_topics"] = [{"name": place[0], "partitions": [place[1]]}]
        while True:
            self.doing = f"AddPartitionsToTxn {place}"
            answer = await self._coordinator.ask("AddPartitionsToTxn", body, 3)
            if answer is not None:
                (topic,) = answer.results_by_topic_v3_and_below
                if self._is_done(topic.results_by_partition[0].partition_error_code):
                    return
            await self._wait()

    async def end(self, *, commit: bool) -> None:
        """Commit or abort."""
        body = {**self._identity, "committed": commit}
        while True:
            self.doing = f"EndTxn {commit}"
            answer = await self._coordinator.ask("EndTxn", body, 5 if self.is_v2 else 3)
            if answer is not None and self._is_done(answer.error_code):
                if self.is_v2:
                    self.producer = (answer.producer_id, answer.producer_epoch)
                    self._sequences = {}
                return
            await self._wait()

    def batch(self, place: tuple[str, int], records: Sequence[Record]) -> bytes:
        """The next batch of a partition."""
        assert self.producer is not None
        sequence = self._sequences.get(place, 0)
        self._sequences[place] = sequence + len(records)
        return build_batch(
            list(records),
            producer_id=self.producer[0],
            producer_epoch=self.producer[1],
            base_sequence=sequence,
            attributes=TRANSACTIONAL,
        )

    async def produce(self, place: tuple[str, int], batch: bytes) -> int:
        """Send a batch until it is acknowledged; returns its offset."""
        while True:
            self.doing = f"Produce {place}"
            code, offset = await self.produce_once(place, batch)
            if code is not None and self._is_done(code):
                return offset
            self.client.forget(*place)
            await self._wait()

    async def produce_once(self, place: tuple[str, int], batch: bytes) -> tuple[int | None, int]:
        """(error code, base offset); no code if there was no answer."""
        topic, partition = place
        body = {
            "transactional_id": self.name,
            "acks": -1,
            "timeout": 2_000,
            "topic_data": [{"name": topic, "partition_data": [{"index": partition, "records": batch}]}],
        }
        try:
            address, _ = await self.client.leader(topic, partition)
            answer = await self.client.ask(address, "Produce", body, 12 if self.is_v2 else 9)
        except TidemillError:
            return None, -1
        result = answer.responses[0].partition_responses[0]
        return result.error_code, result.base_offset

    # --- what it is told

    def _is_done(self, code: int) -> bool:
        """Whether it was done; raises ``LostPlace`` if it never will be."""
        if code == ErrorCode.none:
            return True
        self.doing += f": {ErrorCode(code).name}"
        if code not in _PASSES:
            passed = self.client.network.loop.now - self._began_at
            if code not in _LOST_ITS_PLACE or passed < _TIMEOUT_SECONDS:
                self.client.note_strange(f"{self.name} after {passed:.1f} s: {self.doing}")
            raise LostPlace(self.doing)
        self._coordinator.forget()
        return False

    async def _wait(self) -> None:
        self._coordinator.forget()
        await self.client.pause()

    def may_give_up(self) -> bool:
        return self.rng.random() < _GIVES_UP_SHARE


class TransactionalWriter:
    """Writes transactions of plain records. Whatever it does, it notes in the history."""

    def __init__(
        self,
        client: ClusterClient,
        history: History,
        name: str,
        places: Sequence[tuple[str, int]],
        *,
        is_v2: bool,
        pace: float = 1.0,
    ) -> None:
        self.client, self.history, self.rng = client, history, client.rng
        self.name, self.places, self.pace = name, places, pace
        self.steps = TransactionSteps(client, name, is_v2=is_v2)
        self.is_closing = False
        self.committed = 0
        self._begun = self._made = 0
        self._transaction = ""
        self._zombie: tuple[TransactionSteps, tuple[str, int], bytes] | None = None

    @property
    def at_rest(self) -> bool:
        return not self._transaction

    async def run(self) -> None:
        """Write transactions until ``is_closing``, then bring the last to its end."""
        while not self.is_closing:
            self._begun += 1
            self._transaction = f"{self.name}/{self._begun}"
            await self._tell()
            self._transaction = ""
            await asyncio.sleep(self.pace * self.rng.choice((0.02, 0.5, 2.0)) * self.rng.random())
            await self._let_zombie_speak()

    async def _tell(self) -> None:
        """One transaction, from its beginning to its end."""
        steps, asks_for_commit = self.steps, False
        try:
            if steps.producer is None:
                await steps.initialize()
            steps.begin()
            await self._write()
            commit = self.rng.random() < 0.7
            if commit:
                asks_for_commit = True
            else:
                self.history.aborted(self._transaction)
            await steps.end(commit=commit)
        except LostPlace:
            if not asks_for_commit:
                self.history.aborted(self._transaction)
            steps.producer = None
        else:
            if commit:
                self.history.committed(self._transaction)
                self.committed += 1

    async def _write(self) -> None:
        steps, added = self.steps, set[tuple[str, int]]()
        for _ in range(self.rng.randint(1, 4)):
            place = self.rng.choice(self.places)
            if not steps.is_v2 and place not in added:
                await steps.add(place)
                added.add(place)
            values = [
                f"{self._transaction}-{self._made + number}" for number in range(self.rng.randint(1, 3))
            ]
            self._made += len(values)
            where = f"{place[0]}-{place[1]}"
            for value in values:
                self.history.sent(where, value, self._transaction)
            batch = steps.batch(place, [Record(None, value.encode(), 1) for value in values])
            if steps.may_give_up():
                self._start_anew(place, batch)
            offset = await steps.produce(place, batch)
            for number, value in enumerate(values):
                self.history.acked(where, value, offset + number)
            await asyncio.sleep(self.pace * self.rng.choice((0, 0.1, 0.5)) * self.rng.random())

    def _start_anew(self, place: tuple[str, int], batch: bytes) -> None:
        """Another process takes over the id; the last batch of this one is still on its way."""
        zombie = TransactionSteps(self.client, self.name, is_v2=self.steps.is_v2)
        zombie.producer = self.steps.producer
        self._zombie = zombie, place, batch
        raise LostPlace("the process has ended")

    async def _let_zombie_speak(self) -> None:
        if self._zombie is not None and self.steps.producer is not None:
            (zombie, place, batch), self._zombie = self._zombie, None
            await zombie.produce_once(place, batch)

    def __repr__(self) -> str:
        return f"{self.name} in {self._transaction!r}: {self.steps.doing}"
