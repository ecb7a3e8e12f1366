"""Newest answers as a model: a register over three nodes, whose leader says what is newest.

Nodes write through the in-sync set, lose their sessions, register again before the controller acts, resign,
sleep, hear of elections late, and answer questions late. The rules are the product's: ``NewestQuestions``,
``InSyncReplicas.electable``, the time of a session, whose admission the leader has to know of, and that a
leader does not rely on it once it has resigned. A read that is answered has every write that was acknowledged
before it arrived. Each rule is switched off once, and then a schedule is found that breaks that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from tidemill.control.session import serving_until_ms
from tidemill.replication.rules.assignment import NO_LEADER, PartitionAssignment
from tidemill.replication.rules.in_sync import InSyncReplicas
from tidemill.replication.rules.newest import NewestCall, NewestQuestions, Question

NODES = (1, 2, 3)
TTL_MS = 6_000
STEPS = 400
SEEDS = 150
ABLATED_SEEDS = 1_500


@dataclass
class Rules:
    """What the ablations switch off."""

    lease_from_sending: bool = True
    knows_of_its_admission: bool = True
    asks_once_resigned: bool = True
    clock_goes_on: bool = True
    asks_after_arrival: bool = True
    asks_at_the_epoch: bool = True
    asks_the_eligible: bool = True
    asks_the_proposed: bool = True
    asks_everybody: bool = True


class WentBack(AssertionError):
    """A read was answered with less than what was acknowledged before."""


@dataclass(frozen=True)
class Version:
    """The store at one revision: the partition's record, and the admitted incarnation of each node."""

    record: PartitionAssignment
    admitted: dict[int, int]


@dataclass
class Read:
    """A read that waits to be answered."""

    node_id: int
    acknowledged: int
    value: int
    epoch: int
    call: NewestCall[str] | None = None


@dataclass
class Process:
    """One node: what it knows of the record, its log, its session."""

    id: int
    known: PartitionAssignment
    #: How many of the store's versions it has heard of, behind the first.
    heard: int = 0
    incarnation: int = 0
    #: Its own incarnation that was admitted, as far as it has heard.
    admitted_as: int = 0
    #: The epoch at which it has resigned last.
    resigned_epoch: int = -1
    in_sync: InSyncReplicas | None = None
    #: The last write that it has.
    end: int = 0
    followed_epoch: int = 0
    #: The last one that it knows to be committed, at the epoch that it leads in.
    committed: int = 0
    #: It has committed everything that it took over.
    serves: bool = False
    serving_until_ms: int = 0
    #: How long it has slept: a clock that stops meanwhile is behind by it.
    slept_ms: int = 0
    awake_at_ms: int = 0
    questions: NewestQuestions[str] = field(default_factory=NewestQuestions)
    #: What each in-sync member has confirmed to have, at this epoch.
    reached: dict[int, int] = field(default_factory=dict)
    last_answers: dict[int, int] = field(default_factory=dict)

    @property
    def leads(self) -> bool:
        return self.known.leader == self.id


class World:
    """Three nodes, the metadata store, and messages that take their time."""

    def __init__(self, seed: int, rules: Rules) -> None:
        self.rng = random.Random(seed)
        self.rules = rules
        self.now_ms = 0
        first = self.rng.choice(
            [
                PartitionAssignment(1, 0, NODES, NODES, min_isr=1),
                PartitionAssignment(1, 0, NODES, NODES, min_isr=2),
                PartitionAssignment(1, 0, NODES, (1,), elr=(2, 3), min_isr=2),
            ]
        )
        self.record = first
        self.admitted = dict.fromkeys(NODES, 0)
        self.history = [Version(first, self.admitted)]
        self.lease_until_ms = dict.fromkeys(NODES, TTL_MS)
        self.nodes = {node_id: Process(node_id, first) for node_id in NODES}
        self.nodes[1].in_sync = InSyncReplicas(first)
        self.nodes[1].serves = True
        for node in self.nodes.values():
            node.serving_until_ms = serving_until_ms(0, TTL_MS)
        self.messages: list[tuple[int, Callable[[], None]]] = []
        #: Nodes that cannot reach the store.
        self.cut_off: set[int] = set()
        #: Nodes whose watch hangs.
        self.deaf: set[int] = set()
        self.acknowledged = 0
        self.answered = 0
        self.by_question = 0
        self.waiting: list[Read] = []
        often = [self.write, self.write, self.read]
        self.actions = [*often, *often, self.shrink, self.extend]

    # --- time and messages

    def send(self, to: int | None, call: Callable[[], None]) -> None:
        """Have something arrive later, once its node is awake; some messages are lost."""
        if self.rng.random() < 0.1:
            return
        delay = self.rng.choice((1, 1, 5, 5, 50, 800, 4_000))
        self.messages.append((self.now_ms + delay, lambda: self.arrive(to, call)))

    def arrive(self, to: int | None, call: Callable[[], None]) -> None:
        if to is not None and self.nodes[to].awake_at_ms > self.now_ms:
            self.messages.append((self.nodes[to].awake_at_ms + 1, lambda: self.arrive(to, call)))
        else:
            call()

    def pass_time(self) -> None:
        self.now_ms += self.rng.choice((1, 20, 200, 600))
        while due := [each for each in self.messages if each[0] <= self.now_ms]:
            first = min(due, key=lambda each: each[0])
            self.messages.remove(first)
            first[1]()

    def clock_ms(self, node: Process) -> int:
        return self.now_ms if self.rules.clock_goes_on else self.now_ms - node.slept_ms

    # --- the store

    def renew(self, node: Process) -> None:
        sent_ms = self.clock_ms(node)

        def at_store() -> None:
            if self.lease_until_ms[node.id] > self.now_ms:
                self.lease_until_ms[node.id] = self.now_ms + TTL_MS
                self.send(node.id, answered)

        def answered() -> None:
            since = sent_ms if self.rules.lease_from_sending else self.clock_ms(node)
            node.serving_until_ms = max(node.serving_until_ms, serving_until_ms(since, TTL_MS))

        self.send(None, at_store)

    def register(self, node: Process) -> None:
        """A node whose session is over begins another one, perhaps before the controller has seen that."""
        if self.lease_until_ms[node.id] <= self.now_ms:
            self.lease_until_ms[node.id] = self.now_ms + TTL_MS
            node.incarnation += 1
            node.serving_until_ms = serving_until_ms(self.clock_ms(node), TTL_MS)

    def write_record(self, record: PartitionAssignment) -> None:
        self.record = replace(record, partition_epoch=self.record.partition_epoch + 1)
        self.history.append(Version(self.record, self.admitted))

    def is_live(self, node_id: int) -> bool:
        runs = self.lease_until_ms[node_id] > self.now_ms
        return runs and self.admitted[node_id] == self.nodes[node_id].incarnation

    def control(self) -> None:
        """The controller: who is not live leaves, and another member leads; then nodes are admitted."""
        record = self.record
        live = {node_id for node_id in NODES if self.is_live(node_id)}
        if record.leader not in live:
            self.elect(live)
        runs = [each for each in NODES if self.lease_until_ms[each] > self.now_ms]
        admitted = self.admitted | {each: self.nodes[each].incarnation for each in runs}
        if self.record is record and admitted != self.admitted:
            self.admitted = admitted
            self.history.append(Version(record, admitted))

    def elect(self, live: set[int]) -> None:
        record = self.record
        able = [each for each in record.isr if each in live] or [each for each in record.elr if each in live]
        if not able:
            if record.leader != NO_LEADER:
                self.write_record(replace(record, leader=NO_LEADER, leader_epoch=record.leader_epoch + 1))
            return
        isr = tuple(each for each in record.isr if each in live) or (able[0],)
        left = {*record.elr, *record.isr} - set(isr)
        elr = () if len(isr) >= record.min_isr else tuple(sorted(left))
        self.write_record(
            replace(record, leader=able[0], leader_epoch=record.leader_epoch + 1, isr=isr, elr=elr)
        )

    def learn(self, node: Process) -> None:
        """A node hears of the next version of the store."""
        if node.heard + 1 == len(self.history) or node.id in self.deaf:
            return
        node.heard += 1
        version, old = self.history[node.heard], node.known
        node.known, node.admitted_as = version.record, version.admitted[node.id]
        if node.known.leader_epoch == old.leader_epoch:
            if node.in_sync is not None:
                node.in_sync.committed(node.known)
            return
        node.reached, node.serves, node.last_answers = {}, False, {}
        node.in_sync = InSyncReplicas(node.known) if node.leads else None

    def resign(self, leader: Process) -> None:
        epoch = leader.known.leader_epoch
        leader.resigned_epoch = epoch

        def at_store() -> None:
            record = self.record
            able = [each for each in record.isr if each != leader.id and self.is_live(each)]
            if able and (record.leader, record.leader_epoch) == (leader.id, epoch):
                self.write_record(replace(record, leader=able[-1], leader_epoch=epoch + 1))

        self.send(None, at_store)

    # --- the in-sync set

    def shrink(self, leader: Process) -> None:
        # Mostly one that does not follow.
        silent = [each for each in leader.known.isr if each not in leader.reached and each != leader.id]
        member = self.rng.choice((*NODES, *silent, *silent, *silent))
        if member == leader.id or member not in leader.known.isr or leader.in_sync is None:
            return
        known = leader.known

        def at_store() -> None:
            record = self.record
            if (record.leader_epoch, record.partition_epoch) != (known.leader_epoch, known.partition_epoch):
                return
            if not self.is_live(leader.id):
                return
            isr = tuple(each for each in record.isr if each != member)
            elr = () if len(isr) >= record.min_isr else tuple({*record.elr, member})
            self.write_record(replace(record, isr=isr, elr=elr))

        self.send(None, at_store)

    def extend(self, leader: Process) -> None:
        known, in_sync = leader.known, leader.in_sync
        joining = [
            each
            for each in NODES
            if each not in known.isr and leader.reached.get(each, -1) >= leader.end and self.is_live(each)
        ]
        if not joining or in_sync is None:
            return
        for node_id in NODES:
            if node_id in in_sync.followers and node_id in (*known.isr, *joining):
                follower = in_sync.followers[node_id]
                follower.matched_end = follower.durable = leader.end
                follower.log_start, follower.heard_ms = 0, self.now_ms
        proposal = in_sync.proposal(
            self.now_ms, log_end=leader.end, high_watermark=0, epoch_start_offset=0, log_start=0
        )
        if proposal is None or not in_sync.proposed(proposal):
            return

        def at_store() -> None:
            record = self.record
            if (record.leader_epoch, record.partition_epoch) != (known.leader_epoch, known.partition_epoch):
                return
            if not self.is_live(leader.id):
                return
            elr = () if len(proposal.isr) >= record.min_isr else record.elr
            self.write_record(replace(record, isr=proposal.isr, elr=elr))

        self.send(None, at_store)

    # --- writes

    def write(self, leader: Process) -> None:
        if leader.serves and leader.committed == leader.end:
            leader.end += 1
        self.replicate(leader)

    def replicate(self, leader: Process) -> None:
        epoch, end = leader.known.leader_epoch, leader.end
        for node_id in NODES:
            if node_id == leader.id:
                continue
            follower = self.nodes[node_id]

            def at_follower(follower: Process = follower) -> None:
                if follower.known.leader_epoch == epoch and follower.known.leader == leader.id:
                    # What an earlier leader's log had beyond this one's is cut.
                    is_first = follower.followed_epoch < epoch
                    follower.end = end if is_first else max(follower.end, end)
                    follower.followed_epoch = epoch
                    self.send(leader.id, lambda: self.confirmed(leader, follower.id, epoch, end))

            self.send(node_id, at_follower)
        self.commit(leader)

    def confirmed(self, leader: Process, node_id: int, epoch: int, end: int) -> None:
        if leader.known.leader_epoch == epoch and leader.leads:
            leader.reached[node_id] = max(leader.reached.get(node_id, 0), end)
            self.commit(leader)

    def commit(self, leader: Process) -> None:
        in_sync = leader.in_sync
        if in_sync is None or not in_sync.has_enough:
            return
        if all(leader.reached.get(each, -1) >= leader.end for each in in_sync.holding_back()):
            leader.serves = True
            leader.committed = leader.end
            self.acknowledged = max(self.acknowledged, leader.end)

    # --- reads

    def read(self, leader: Process) -> None:
        if not leader.serves or leader.in_sync is None:
            return
        read = Read(leader.id, self.acknowledged, leader.committed, leader.known.leader_epoch)
        if self.may_answer(leader):
            self.answer(read)
            return
        read.call = leader.questions.ask("p", read.epoch, self.electable(leader))
        if read.call.outcome:
            self.answer(read)
            return
        self.waiting.append(read)
        if not self.rules.asks_after_arrival:
            # What a member has answered some time ago is taken for an answer.
            for node_id, epoch in leader.last_answers.items():
                if epoch == read.epoch and read.call.heard(node_id, follows=True):
                    self.settle([read.call])
        self.ask(leader)

    def may_answer(self, leader: Process) -> bool:
        """Whether the session is proof enough."""
        if self.rules.knows_of_its_admission and leader.admitted_as != leader.incarnation:
            return False
        if self.rules.asks_once_resigned and leader.resigned_epoch == leader.known.leader_epoch:
            return False
        return self.clock_ms(leader) < leader.serving_until_ms

    def electable(self, leader: Process) -> frozenset[int]:
        in_sync = leader.in_sync
        assert in_sync is not None
        able = in_sync.electable()
        if not self.rules.asks_the_eligible:
            able -= frozenset(leader.known.elr)
        if not self.rules.asks_the_proposed:
            able -= in_sync.proposed_additions() - frozenset(leader.known.isr)
        return able if self.rules.asks_everybody else frozenset(sorted(able)[:1])

    def ask(self, leader: Process) -> None:
        for question in leader.questions.due():
            self.send_question(leader, question)

    def send_question(self, leader: Process, question: Question[str]) -> None:
        """Ask; an answer that does not come in time counts as none."""
        done: list[bool] = []
        follower = self.nodes[question.node_id]

        def at_follower() -> None:
            known = follower.known
            follows = {
                (key, epoch)
                for key, epoch in question.calls
                if (known.leader_epoch == epoch and known.leader == leader.id)
                or not self.rules.asks_at_the_epoch
            }
            self.send(leader.id, lambda: end(follows))

        def end(follows: set[tuple[str, int]]) -> None:
            if not done:
                done.append(True)
                for _, epoch in follows:
                    leader.last_answers[follower.id] = epoch
                self.settle(leader.questions.answered(question, follows))
                self.ask(leader)

        self.send(follower.id, at_follower)
        self.messages.append((self.now_ms + 1_000, lambda: self.arrive(leader.id, lambda: end(set()))))

    def settle(self, calls: list[NewestCall[str]]) -> None:
        for read in [each for each in self.waiting if each.call in calls]:
            self.waiting.remove(read)
            assert read.call is not None
            if read.call.outcome and self.nodes[read.node_id].known.leader_epoch == read.epoch:
                self.by_question += 1
                self.answer(read)

    def answer(self, read: Read) -> None:
        self.answered += 1
        if read.value < read.acknowledged:
            raise WentBack(f"{read.value} was read, and {read.acknowledged} was acknowledged before")

    # --- a schedule

    def run(self) -> None:
        for _ in range(STEPS):
            leading = [node.id for node in self.nodes.values() if node.leads]
            self.step(self.nodes[self.rng.choice((*NODES, *leading, *leading))])
            if self.rng.random() < 0.5:
                self.pass_time()

    def step(self, node: Process) -> None:
        chance = self.rng.random()
        if chance < 0.1:
            self.control()
        elif chance < 0.12:
            # Its way to the store is cut, or mended.
            self.cut_off ^= {node.id}
        elif node.awake_at_ms > self.now_ms:
            return
        elif chance < 0.125:
            duration = self.rng.choice((500, 7_000, 20_000))
            node.awake_at_ms = self.now_ms + duration
            node.slept_ms += duration
        elif chance < 0.4:
            if node.id not in self.cut_off:
                self.rng.choice((self.learn, self.learn, self.renew, self.renew, self.register))(node)
        elif chance < 0.42:
            if node.leads:
                self.resign(node)
        elif chance < 0.425:
            self.deaf ^= {node.id}
        elif node.leads:
            self.rng.choice(self.actions)(node)


def test_what_is_newest_never_goes_back() -> None:
    answered = by_question = acknowledged = elections = 0
    for seed in range(SEEDS):
        world = World(seed, Rules())
        world.run()
        answered += world.answered
        by_question += world.by_question
        acknowledged += world.acknowledged
        elections += world.record.leader_epoch
    assert min(answered, by_question, acknowledged, elections) > SEEDS // 2, (
        "the schedules show too little",
        answered,
        by_question,
        acknowledged,
        elections,
    )


@pytest.mark.parametrize(
    "switched_off",
    [
        "lease_from_sending",
        "knows_of_its_admission",
        "asks_once_resigned",
        "clock_goes_on",
        "asks_after_arrival",
        "asks_at_the_epoch",
        "asks_the_eligible",
        "asks_the_proposed",
        "asks_everybody",
    ],
)
def test_each_rule_is_needed(switched_off: str) -> None:
    rules = Rules(**{switched_off: False})
    for seed in range(ABLATED_SEEDS):
        try:
            World(seed, rules).run()
        except WentBack:
            return
    pytest.fail(f"no schedule needs the rule {switched_off}")
