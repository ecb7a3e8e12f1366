"""The coordinator against a model: clients of both kinds, crashes anywhere, lost answers, faults, timeouts.

What must hold:

- all that a transaction wrote has one fate, in every partition, and none of it stays open for ever;
- a producer that was told "committed" or "aborted" was told the truth;
- nothing is written outside of a transaction that its coordinator durably knows;
- a producer that another one has replaced writes nothing any more;
- no marker comes before its decision is durable.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from support.coordination import settle
from support.transaction_world import World, Write
from tidemill.errors import DiskFull, ErrorCode
from tidemill.transactions.messages import EndResult, InitResult, Producer
from tidemill.transactions.transaction import TransactionState

PLACES = (("t", 0), ("t", 1), ("u", 0))
IDS = ("a", "b")
TIMEOUT_MS = 1_000
FATAL = (ErrorCode.producer_fenced, ErrorCode.invalid_producer_id_mapping, ErrorCode.invalid_txn_state)


@dataclass
class Client:
    """A producer's client: one request under way at most, and repeated if its answer never came."""

    number: int
    transactional_id: str
    new_epochs: bool
    producer: Producer | None = None
    serial: int = 0
    generation: int = 0
    ending: bool | None = None
    request: asyncio.Task[Any] | None = None
    kind: str = ""
    told: dict[object, bool] = field(default_factory=dict)
    refused_commits: set[object] = field(default_factory=set)

    @property
    def tag(self) -> tuple[int, int]:
        return self.number, self.serial

    @property
    def idle(self) -> bool:
        return self.request is None

    def forget(self) -> None:
        self.producer = None
        self.ending = None
        self.serial += 1


class Transactions(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.world = self.run(self._make())
        # Two that share an id, one of each kind, and one of the new kind for itself.
        self.clients = [Client(0, "a", False), Client(1, "a", True), Client(2, "b", True)]
        #: The last generation of a producer that each id was given to.
        self.generations = dict.fromkeys(IDS, 0)

    async def _make(self) -> World:
        world = World(*PLACES, end_wait_ms=200)
        await world.coordinator.start()
        return world

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def go(self) -> None:
        self.run(settle())
        answered = []
        for client in self.clients:
            if client.request is not None and client.request.done():
                task, client.request = client.request, None
                answered.append((client, client.kind, task.result()))
        # Answers may come together: who replaced whom is in the producers' epochs, not in the clients' order.
        answered.sort(
            key=lambda each: each[2].producer if isinstance(each[2], InitResult) else Producer(-1, -1)
        )
        for answer in answered:
            self._answered(*answer)

    def send(self, client: Client, kind: str, work: Any) -> None:
        client.kind = kind
        client.request = self.loop.create_task(work)
        self.go()

    def _answered(self, client: Client, kind: str, result: Any) -> None:
        if isinstance(result, InitResult):
            if result.error is ErrorCode.none:
                client.forget()
                client.producer = result.producer
                self.generations[client.transactional_id] += 1
                client.generation = self.generations[client.transactional_id]
            elif result.error in FATAL:
                client.forget()
        elif isinstance(result, EndResult):
            self._ended(client, result)
        elif result in FATAL:
            client.forget()

    def _ended(self, client: Client, result: EndResult) -> None:
        assert client.ending is not None
        if result.error is ErrorCode.none:
            client.told[client.tag] = client.ending
            client.ending = None
            client.serial += 1
            if client.new_epochs:
                client.producer = result.producer
        elif result.error in FATAL:
            if result.error is ErrorCode.invalid_txn_state and client.ending:
                client.refused_commits.add(client.tag)
            client.forget()

    clients_drawn = st.integers(0, 2)

    # --- clients

    @rule(number=clients_drawn, known=st.booleans())
    def init(self, number: int, known: bool) -> None:
        client = self.clients[number]
        if client.idle:
            who = client.producer if known and client.ending is None else None
            self.send(
                client,
                "init",
                self.world.coordinator.init_producer_id(client.transactional_id, TIMEOUT_MS, who),
            )

    @rule(number=clients_drawn, places=st.sets(st.sampled_from(PLACES), min_size=1))
    def add(self, number: int, places: set[tuple[str, int]]) -> None:
        client = self.clients[number]
        if client.idle and client.producer is not None and client.ending is None:
            self.send(
                client,
                "add",
                self.world.coordinator.add_partitions(client.transactional_id, client.producer, places),
            )

    @rule(number=clients_drawn, place=st.sampled_from(PLACES))
    def write(self, number: int, place: tuple[str, int]) -> None:
        client = self.clients[number]
        if not client.idle or client.producer is None or client.ending is not None:
            return
        partition = self.world.partitions[place]
        if not partition.may_write(client.producer):
            self.send(
                client,
                "verify",
                self.world.verify(client.transactional_id, *client.producer, *place),
            )
            return
        newest = self.generations[client.transactional_id]
        assert client.generation == newest, f"{client} writes, but it was replaced"
        stored = self.world.stored()[client.transactional_id]
        assert place in stored.partitions, "a write outside of any transaction"
        assert stored.state is not TransactionState.EMPTY
        partition.write(Write(client.producer, client.tag))

    @rule(number=clients_drawn, commit=st.booleans())
    def end(self, number: int, commit: bool) -> None:
        client = self.clients[number]
        if client.idle and client.producer is not None:
            if client.ending is None:
                client.ending = commit
            self.send(
                client,
                "end",
                self.world.coordinator.end(
                    client.transactional_id,
                    client.producer,
                    commit=client.ending,
                    new_epoch=client.new_epochs,
                ),
            )

    @rule(number=clients_drawn, commit=st.booleans())
    def a_late_copy_of_an_old_end_arrives(self, number: int, commit: bool) -> None:
        """With an epoch of the past. Its answer goes nowhere."""
        client = self.clients[number]
        if client.producer is not None and client.producer.epoch > 0:
            old = client.producer._replace(epoch=client.producer.epoch - 1)
            before = self.world.stored().get(client.transactional_id)
            self.run(self._late(client, old, commit=commit))
            after = self.world.stored().get(client.transactional_id)
            quiet = all(each.idle for each in self.clients)
            if quiet and before is not None and before.state is TransactionState.ONGOING:
                assert after == before, "it touched a later transaction"

    async def _late(self, client: Client, old: Producer, *, commit: bool) -> None:
        task = asyncio.create_task(
            self.world.coordinator.end(
                client.transactional_id, old, commit=commit, new_epoch=client.new_epochs
            )
        )
        await settle()
        task.cancel()
        await settle()

    @rule(number=clients_drawn, places=st.sets(st.sampled_from(PLACES), min_size=1))
    def work(self, number: int, places: set[tuple[str, int]]) -> None:
        """What clients mostly do, so that the rest finds something to disturb."""
        if self.clients[number].producer is None:
            self.init(number, known=False)
        self.add(number, places)
        for place in sorted(places):
            self.write(number, place)

    # --- time and faults

    @rule(duration_ms=st.sampled_from([50, 300, 1_200]))
    def time_passes(self, duration_ms: int) -> None:
        self.run(self.world.clock.advance(duration_ms))
        self.go()

    @rule(slow=st.booleans())
    def syncs_become_slow_or_fast(self, slow: bool) -> None:
        self.world.log.syncs_at_once = not slow

    @rule()
    def the_log_is_synced(self) -> None:
        self.world.log.sync()
        self.go()

    @rule(place=st.sampled_from(PLACES), slow=st.booleans())
    def markers_become_slow_or_fast(self, place: tuple[str, int], slow: bool) -> None:
        self.world.partitions[place].syncs_at_once = not slow

    @rule(place=st.sampled_from(PLACES))
    def a_partition_is_synced(self, place: tuple[str, int]) -> None:
        self.world.partitions[place].sync()
        self.go()

    @rule(place=st.sampled_from(PLACES), count=st.integers(1, 3))
    def markers_fail(self, place: tuple[str, int], count: int) -> None:
        self.world.partitions[place].failures_left = count

    @rule(full=st.booleans())
    def the_disk_fills_up_or_empties(self, full: bool) -> None:
        self.world.log.refuse_with = DiskFull("no room") if full else None

    @rule()
    def crash(self) -> None:
        for client in self.clients:
            if client.request is not None:
                client.request.cancel()
                client.request = None
                if client.kind == "init":
                    client.forget()
        self.run(self.world.crash())
        self.go()

    @rule()
    def fsync_fails(self) -> None:
        if self.world.log.high_watermark < len(self.world.log.entries):
            self.world.log.fail_sync()
            self.go()

    # --- what must hold

    @invariant()
    def markers_follow_durable_decisions(self) -> None:
        assert not self.world.premature

    def teardown(self) -> None:
        try:
            self.run(self.world.heal())
            self.go()
            self._check_fates()
        finally:
            self.run(self.world.coordinator.close())
            self.loop.close()

    def _check_fates(self) -> None:
        for value in self.world.stored().values():
            assert not value.is_prepared, value
            assert value.state is not TransactionState.ONGOING, value
        fates: dict[object, set[bool | None]] = {}
        for partition in self.world.partitions.values():
            for tag, decisions in partition.decisions().items():
                fates.setdefault(tag, set()).update(decisions)
        for tag, fate in fates.items():
            assert len(fate) == 1, f"{tag} is torn: {fate}"
            assert None not in fate, f"{tag} hangs"
            for client in self.clients:
                assert fate == {client.told.get(tag, *fate)}, f"{client} was told {client.told[tag]}"
                assert fate == {False} or tag not in client.refused_commits, tag


TestTransactions = Transactions.TestCase
TestTransactions.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
