"""A whole node under random crashes, over a disk that loses, tears and reorders what was not synced.

One seed is one story, on a virtual loop. Idempotent producers send Produce requests, several in flight;
transactional producers commit, abort, die and come back; readers, of everything and of committed data, fetch
what becomes visible; a worker commits offsets; messages and flushes take seeded times; the disk fills up, an
fsync fails, time passes, the power goes in the middle of a storage call. The node starts again on what is
left, the clients retry. At the end everything heals and fresh readers drain the log. Invariants 1 to 6 must
hold for the recorded history, and a committed offset, once acknowledged, never goes back.

Replay one with ``run_story(Story, seed)``; a seed gives the same trace every time.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from support.batches import plain_batch
from support.faulty_storage import FaultyStorage, PowerCut
from support.history import History, Violation, check
from support.memory_store import MemoryStore
from support.sim_network import SimNetwork
from support.sim_node import SimClient, SimNode
from support.sim_transactions import TransactionalProducer
from support.virtual_loop import current_loop, run_virtual
from tidemill.errors import ErrorCode, SyncFailed
from tidemill.log.producer_state.transactions import TransactionStates
from tidemill.records.batch import parse_header
from tidemill.records.control import read_marker
from tidemill.records.record import read_records
from tidemill.replication.partition import Partition, Waiter
from tidemill.transactions.shard import TransactionShard
from tidemill.transactions.transaction import TransactionState

SEEDS = 500
SEEDS_PER_TEST = 25
STEPS = 60
PARTITIONS = 2
IN_FLIGHT_MAX = 5
#: Far from those that the node gives to transactional producers.
FIRST_PRODUCER_ID = 1_000_000
TOPIC = "orders"
GROUP = "workers"
PRODUCE, FETCH, OFFSET_COMMIT, OFFSET_FETCH = 0, 1, 8, 9
CONFIGS = {"internal.segment.bytes": "2000", "index.interval.bytes": "200"}

#: Between two steps at most; flushes take up to a second in some stories, messages up to 5 ms in all.
STEP_SECONDS = 0.01
#: Long enough for every flush that is under way.
PAUSE_SECONDS = 2.0
#: Long enough for a question and its answer.
ANSWER_SECONDS = 0.02

#: A partition that cannot take more now; the client repeats.
RETRIABLE = {
    ErrorCode.kafka_storage_error,
    ErrorCode.out_of_order_sequence_number,
    ErrorCode.not_leader_or_follower,
    ErrorCode.request_timed_out,
}


class Producer:
    """An idempotent producer of one partition, with the retry rules of a real client."""

    def __init__(self, story: Story, producer_id: int, partition: int) -> None:
        self.story = story
        self.producer_id = producer_id
        self.partition = partition
        self.made = 0
        self.unacked: list[tuple[int, tuple[str, ...]]] = []  # (base sequence, values), oldest first
        self.sent = 0  # how many of them are on their way

    @property
    def name(self) -> str:
        return f"{TOPIC}-{self.partition}"

    def make(self) -> None:
        if len(self.unacked) >= IN_FLIGHT_MAX:
            return
        size = self.story.rng.randint(1, 4)
        values = tuple(f"p{self.producer_id}-{self.made + number}" for number in range(size))
        self.unacked.append((self.made, values))
        self.made += size
        for value in values:
            self.story.history.sent(self.name, value)

    def send_next(self, client: SimClient) -> None:
        if self.sent >= len(self.unacked):
            return
        sequence, values = self.unacked[self.sent]
        self.sent += 1
        batch = plain_batch(
            *values, timestamp_ms=self.story.node.now_ms, producer=(self.producer_id, 0, sequence)
        )
        body = {
            # Both promise the same on one node: what is acknowledged is never lost.
            "acks": self.story.rng.choice((1, -1)),
            "timeout": 60_000,
            "topic_data": [{"name": TOPIC, "partition_data": [{"index": self.partition, "records": batch}]}],
        }
        client.send(PRODUCE, 9, body, lambda answer: self.answered(sequence, values, answer))

    def answered(self, sequence: int, values: tuple[str, ...], answer: Any) -> None:
        result = answer.responses[0].partition_responses[0]
        if result.error_code in RETRIABLE:
            self.sent = 0
            return
        assert result.error_code == ErrorCode.none, result
        if (sequence, values) in self.unacked:
            place = self.unacked.index((sequence, values))
            del self.unacked[place]
            self.sent -= self.sent > place
            for number, value in enumerate(values):
                self.story.history.acked(self.name, value, result.base_offset + number)


class Reader:
    """Fetches a partition from its position, through restarts of the node.

    An ``isolated`` one reads committed data only, and leaves out what it is told was aborted.
    """

    def __init__(self, story: Story, name: str, partition: int, *, isolated: bool = False) -> None:
        self.story = story
        self.name = name
        self.partition = partition
        self.isolated = isolated
        self.position = 0
        self.waiting = False
        if isolated:
            story.history.isolated(name)

    def fetch(self, client: SimClient) -> None:
        if self.waiting:
            return
        self.waiting = True
        wanted = {"partition": self.partition, "fetch_offset": self.position, "partition_max_bytes": 100_000}
        body = {
            "max_wait": 0,
            "min_bytes": 0,
            "max_bytes": self.story.rng.choice((1, 500, 100_000)),
            "isolation_level": int(self.isolated),
            "topics": [{"topic": TOPIC, "partitions": [wanted]}],
        }
        client.send(FETCH, 11, body, self.answered)

    def answered(self, answer: Any) -> None:
        self.waiting = False
        result = answer.responses[0].partitions[0]
        if result.error_code in RETRIABLE:
            return
        assert result.error_code == ErrorCode.none, result
        aborted = sorted((each.first_offset, each.producer_id) for each in result.aborted_transactions or ())
        left_out: set[int] = set()
        data = result.records or b""
        while len(data) > 61 and (header := parse_header(data)).size_bytes <= len(data):
            batch, data = data[: header.size_bytes], data[header.size_bytes :]
            while aborted and aborted[0][0] <= header.last_offset:
                left_out.add(aborted.pop(0)[1])
            if header.is_control:
                marker = read_marker(batch)
                if marker is not None and not marker.commit:
                    left_out.discard(header.producer_id)
            elif not (header.is_transactional and header.producer_id in left_out):
                self.take(batch)
            self.position = max(self.position, header.next_offset)

    def take(self, batch: bytes) -> None:
        for record in read_records(batch):
            if record.offset >= self.position:
                value = (record.value or b"").decode()
                self.story.history.read(self.name, f"{TOPIC}-{self.partition}", record.offset, value)


class Committer:
    """Commits a rising offset; what was acknowledged must be found again."""

    def __init__(self) -> None:
        self.asked = 0
        self.acknowledged = 0
        self.found: int | None = None

    def commit(self, client: SimClient) -> None:
        self.asked += 1
        offset = self.asked
        partitions = [{"partition_index": 0, "committed_offset": offset}]
        body = {"group_id": GROUP, "topics": [{"name": TOPIC, "partitions": partitions}]}
        client.send(OFFSET_COMMIT, 8, body, lambda answer: self.answered(offset, answer))

    def answered(self, offset: int, answer: Any) -> None:
        if answer.topics[0].partitions[0].error_code == ErrorCode.none:
            self.acknowledged = max(self.acknowledged, offset)

    def fetch(self, client: SimClient) -> None:
        body = {"group_id": GROUP, "topics": [{"name": TOPIC, "partition_indexes": [0]}]}
        client.send(OFFSET_FETCH, 6, body, self.fetched)

    def fetched(self, answer: Any) -> None:
        if answer.error_code == ErrorCode.none:
            self.found = answer.topics[0].partitions[0].committed_offset


class Story:
    """One seed. Made and run on a virtual loop."""

    steps = STEPS
    transactional_ids: tuple[str, ...] = ("t1", "t2")

    def __init__(self, seed: int) -> None:
        self.loop = current_loop()
        self.network = SimNetwork(self.loop)
        self.configs = CONFIGS
        self.rng = random.Random(seed)
        self.history = History()
        self.store = MemoryStore(clock_ms=self.loop.now_ms)
        self.storage = FaultyStorage(self.rng)
        self.storage.on_call = lambda call, path: self.loop.note(f"{call} {path}")
        self.node: SimNode
        self.writing: SimClient
        self.reading: SimClient
        self.committing: SimClient
        self.transacting: list[SimClient]
        self.producers = [
            Producer(self, FIRST_PRODUCER_ID + number, number % PARTITIONS) for number in range(3)
        ]
        self.transactional = [
            TransactionalProducer(name, TOPIC, PARTITIONS, self.rng, self.history)
            for name in self.transactional_ids
        ]
        self.readers = [
            Reader(self, name, partition, isolated=isolated)
            for partition in range(PARTITIONS)
            for name, isolated in (("live", False), ("live committed", True))
        ]
        self.committer = Committer()
        self.crashes = 0
        #: Whether time has passed in which the node may have given up on its clients.
        self.was_away = False

    async def run(self) -> list[Violation]:
        await self._start()
        for _ in range(self.steps):
            try:
                await self._step()
            except PowerCut:
                await self._crash()
        await self._heal_and_drain()
        return check(self.history, "drain", "drain committed")

    async def _start(self) -> None:
        while not await self._starts():
            await self.node.crash()
            self.storage = self.storage.crash()
        await self._connect()

    async def _connect(self) -> None:
        # Answers leave in the order of a connection's requests: clients of different kinds have their own.
        self.writing, self.reading, self.committing = [await self.node.connect() for _ in range(3)]
        self.transacting = [await self.node.connect() for _ in self.transactional]
        for producer in self.producers:
            producer.sent = 0
        for transactional in self.transactional:
            transactional.reconnect()
        for reader in self.readers:
            reader.waiting = False

    async def _starts(self) -> bool:
        """Whether the node starts; if not, it is because the power went again."""
        self.node = SimNode(self.storage, self.store, self.network)
        try:
            await self.node.start({TOPIC: (PARTITIONS, self.configs)})
        except PowerCut:
            return False
        except Exception:
            if not self.storage.power_is_cut:
                raise
        return not self.storage.power_is_cut

    @property
    def _clients(self) -> tuple[SimClient, ...]:
        return self.writing, self.reading, self.committing, *self.transacting

    async def _receive(self) -> None:
        for client in self._clients:
            client.receive()
        if any(client.is_closed for client in self._clients):
            assert self.was_away, "the node closed a connection"
            for client in self._clients:
                client.close()
            await self._connect()

    async def _crash(self) -> None:
        self.crashes += 1
        await self.node.crash()
        self.storage = self.storage.crash(power_loss=self.rng.random() < 0.7)
        await self._start()

    async def _transact(self) -> None:
        for transactional, client in zip(self.transactional, self.transacting, strict=True):
            if self.rng.random() < 0.7:
                transactional.step(client, self.node.now_ms)
        # Every step of a transaction waits for the disk, often more than once.
        if self.transactional:
            await asyncio.sleep(self.rng.choice((0, 0.001, 0.005, 0.02)))
        # An operator makes room on a disk that is full.
        if self.transactional and self.rng.random() < 0.2:
            self.storage.capacity_bytes = None

    def _let_time_pass(self) -> None:
        for transactional in self.transactional:
            transactional.may_be_fenced = True
        # Hours: after a day the node forgets what an idempotent producer has sent, as Kafka does.
        self.loop.jump(self.rng.randint(1, 20_000))
        self.was_away = True

    def _notice_power_cut(self) -> None:
        """Raise ``PowerCut`` also if a task swallowed it: planning the next cut would switch the power on."""
        if self.storage.power_is_cut:
            raise PowerCut

    async def _step(self) -> None:
        await self._transact()
        self._notice_power_cut()
        rng, action = self.rng, self.rng.random()
        if action < 0.35:
            producer = rng.choice(self.producers)
            producer.make()
            producer.send_next(self.writing)
        elif action < 0.55:
            await asyncio.sleep(rng.choice((0.01, 0.05, 0.3)) * rng.random())
        elif action < 0.81:
            for reader in rng.sample(self.readers, 2):
                reader.fetch(self.reading)
        elif action < 0.87:
            self.committer.commit(self.committing)
        elif action < 0.90:
            self.storage.cut_power_after(rng.randint(1, 12))
        elif action < 0.92:
            await self._crash()
        elif action < 0.96:
            full = self.storage.used_bytes + rng.randint(0, 300)
            self.storage.capacity_bytes = None if self.storage.capacity_bytes else full
        elif action < 0.98:
            self.storage.fail_next("sync", "", SyncFailed("a failed fsync"))
        else:
            self._let_time_pass()
        await asyncio.sleep(rng.random() * STEP_SECONDS)
        self._notice_power_cut()
        await self._receive()
        if any(partition.local_log.failure for partition in self.node.broker.replicas):
            # An operator restarts a node that has stopped partitions; the power did not fail.
            await self.node.crash()
            self.storage = self.storage.crash(power_loss=rng.random() < 0.5)
            await self._start()

    async def _heal_and_drain(self) -> None:
        self.storage.capacity_bytes = None
        await self._crash()
        for _ in range(500):
            for producer in self.producers:
                producer.send_next(self.writing)
            for transactional, client in zip(self.transactional, self.transacting, strict=True):
                transactional.come_to_rest(client, self.node.now_ms)
            await asyncio.sleep(PAUSE_SECONDS)
            await self._receive()
            if self._producers_at_rest:
                break
        assert self._producers_at_rest, "producers do not come to an end"
        await asyncio.sleep(PAUSE_SECONDS)
        for partition in range(PARTITIONS):
            await self._drain_partition(partition)
        self.committer.fetch(self.committing)
        await asyncio.sleep(PAUSE_SECONDS)
        await self._receive()
        found = self.committer.found
        assert found is not None
        assert self.committer.acknowledged <= max(found, 0) <= self.committer.asked
        await self.node.crash()

    @property
    def _producers_at_rest(self) -> bool:
        return not any(producer.unacked for producer in self.producers) and all(
            transactional.at_rest for transactional in self.transactional
        )

    async def _drain_partition(self, partition: int) -> None:
        everything = Reader(self, "drain", partition)
        committed = Reader(self, "drain committed", partition, isolated=True)
        for reader in (everything, committed):
            await self._drain(reader)
        assert committed.position == everything.position, "a transaction that is over holds up readers"

    async def _drain(self, reader: Reader) -> None:
        position = -1
        while reader.position != position:
            position = reader.position
            reader.fetch(self.reading)
            await asyncio.sleep(ANSWER_SECONDS)
            await self._receive()


S = TypeVar("S", bound="Story")


def run_story(kind: Callable[[int], S], seed: int) -> tuple[S, list[Violation]]:
    """The story of a seed, and what it has broken."""

    async def tell() -> tuple[S, list[Violation]]:
        story = kind(seed)
        return story, await story.run()

    return run_virtual(tell, seed=seed)


@pytest.mark.parametrize("first_seed", range(0, SEEDS, SEEDS_PER_TEST))
def test_no_crash_loses_reorders_or_duplicates_anything(first_seed: int) -> None:
    crashes = committed = 0
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        story, violations = run_story(Story, seed)
        assert not violations, f"seed {seed}: {violations}"
        crashes += story.crashes
        committed += sum(transactional.committed for transactional in story.transactional)
    assert crashes >= SEEDS_PER_TEST, "the stories have too few crashes to show anything"
    assert committed >= SEEDS_PER_TEST // 2, "the stories have too few transactions to show anything"


def test_acknowledging_before_the_sync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: without waiting for the high watermark some story must break an invariant."""

    def at_once(self: Partition, offset: int, waiter: Waiter) -> None:
        waiter(self.local_log.failure)

    monkeypatch.setattr(Partition, "when_committed", at_once)
    assert _first_violating_seed(60) is not None


def test_reading_above_the_high_watermark_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: a reader that sees what is not durable yet sees values change."""
    monkeypatch.setattr(Partition, "high_watermark", property(lambda self: self.local_log.end_offset))
    assert _first_violating_seed(60) is not None


def test_reading_above_the_last_stable_offset_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: a reader of committed data that does not wait for the end of transactions."""
    monkeypatch.setattr(TransactionStates, "last_stable_offset", lambda self, high_watermark: high_watermark)
    assert _first_violating_seed(60) is not None


def test_forgetting_open_transactions_at_a_restart_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ablation: what a coordinator does not know of it cannot end, and readers wait for it for ever."""
    serve = TransactionShard._loaded

    def forgetful(self: TransactionShard, now_ms: int) -> Iterable[str]:
        for name, value in self.state.transactions.items():
            if value.state is TransactionState.ONGOING:
                self.state.replay(name, replace(value, state=TransactionState.EMPTY, partitions=frozenset()))
        return serve(self, now_ms)

    monkeypatch.setattr(TransactionShard, "_loaded", forgetful)
    assert _first_violating_seed(60) is not None


def _first_violating_seed(seeds: int) -> int | None:
    for seed in range(seeds):
        try:
            if run_story(Story, seed)[1]:
                return seed
        except AssertionError:
            return seed
    return None


if __name__ == "__main__":
    import sys

    print(run_story(Story, int(sys.argv[1]))[1])  # noqa: T201
