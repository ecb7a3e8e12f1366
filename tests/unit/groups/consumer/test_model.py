"""Random histories of a consumer group against a model that only knows what each client was told.

A client reads what it was told to read and, until it lets go, what it was told before. Two clients that the
group counts as members must never read the same partition. Answers get lost, disks fill up, the node
restarts, topics come and go, and clients of the classic protocol, eager and cooperative, take part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.consumer_groups import ConsumerScript, FakeTopics
from tidemill.errors import DiskFull, ErrorCode
from tidemill.groups.classic.group import ClassicGroup
from tidemill.groups.consumer.group import ConsumerGroup
from tidemill.groups.consumer.member import Partitions
from tidemill.groups.messages import LeavingMember
from tidemill.groups.settings import GroupSettings

SETTINGS = GroupSettings(
    consumer_session_timeout_ms=10_000, min_session_timeout_ms=1_000, initial_rebalance_delay_ms=0
)
NAMES = ["t", "u", "v"]
SUBSCRIPTIONS: list[dict[str, Any]] = [
    {"topics": frozenset("t")},
    {"topics": frozenset("tu")},
    {"topics": frozenset("uv")},
    {"topics": None, "regex": "t|u"},
    {"topics": frozenset("v"), "regex": ".*"},
]


@dataclass
class Client:
    """``told`` is what it shall read, ``reading`` what it may be reading."""

    member_id: str
    instance_id: str | None = None
    epoch: int = 0
    told: Partitions = frozenset()
    reading: Partitions = frozenset()
    must_say_all: bool = False
    subscribed: dict[str, Any] = field(default_factory=dict)
    classic: str | None = None

    def hear(self, assignment: Partitions) -> None:
        self.told = assignment
        self.reading |= assignment

    def let_go(self) -> None:
        self.reading = self.told


class ConsumerGroupHistories(RuleBasedStateMachine):
    on_drafts = False

    def __init__(self) -> None:
        super().__init__()
        self.script = ConsumerScript(FakeTopics(t=4, u=3), SETTINGS, on_drafts=self.on_drafts)
        self.clients: dict[str, Client] = {}
        self.counter = 0
        self.group_epoch = 0
        self.member_epochs: dict[str, int] = {}

    @property
    def group(self) -> ConsumerGroup | None:
        group = self.script.state.groups.get("g")
        return group if isinstance(group, ConsumerGroup) else None

    def members(self) -> list[Client]:
        """The clients that the group counts as members; others learn of that when they next speak."""
        known = self.group.members if self.group is not None else {}
        return [client for client in self.clients.values() if client.member_id in known]

    def attempt(self, act: Any) -> Any:
        try:
            return act()
        except DiskFull:
            return None

    def forget(self, client: Client) -> None:
        self.clients.pop(client.member_id, None)
        self.member_epochs.pop(client.member_id, None)

    # -- clients of the new protocol -------------------------------------------------------------------

    @initialize(count=st.integers(0, 3))
    def some_members_join(self, count: int) -> None:
        for _ in range(count):
            self.join(subscribed=SUBSCRIPTIONS[1], instance=None, answered=True, assignor=None)

    @rule(
        subscribed=st.sampled_from(SUBSCRIPTIONS),
        instance=st.sampled_from([None, None, None, "i", "j"]),
        answered=st.booleans(),
        assignor=st.sampled_from([None, "uniform", "range"]),
    )
    def join(
        self, subscribed: dict[str, Any], instance: str | None, answered: bool, assignor: str | None
    ) -> None:
        if len(self.clients) >= 6:
            return
        self.counter += 1
        client = Client(f"m{self.counter}", instance, subscribed=subscribed)
        reply = self.attempt(
            lambda: self.script.join(
                client.member_id,
                instance_id=instance,
                rebalance_timeout_ms=6_000,
                assignor=assignor,
                **subscribed,
            )
        )
        if reply is None:
            return
        if reply.error is not ErrorCode.none:
            assert reply.error is ErrorCode.unreleased_instance_id
            return
        for other in list(self.clients.values()):
            if instance is not None and other.instance_id == instance:
                self.forget(other)
        self.clients[client.member_id] = client
        if answered:
            self.take(client, reply)

    def take(self, client: Client, reply: Any) -> None:
        """The answer arrives."""
        if reply.error in (ErrorCode.unknown_member_id, ErrorCode.fenced_member_epoch):
            self.forget(client)
            return
        assert reply.error is ErrorCode.none, reply
        assert reply.member_epoch >= client.epoch
        client.epoch = reply.member_epoch
        client.must_say_all = False
        if reply.assignment is not None:
            client.hear(reply.assignment)

    @precondition(lambda self: any(client.classic is None for client in self.clients.values()))
    @rule(data=st.data(), answered=st.sampled_from([True, True, True, False]), lets_go=st.booleans())
    def heartbeat(self, data: Any, answered: bool, lets_go: bool) -> None:
        names = sorted(each for each, client in self.clients.items() if client.classic is None)
        self.beat(self.clients[data.draw(st.sampled_from(names))], answered=answered, lets_go=lets_go)

    def beat(self, client: Client, *, answered: bool = True, lets_go: bool = True) -> None:
        if lets_go:
            client.let_go()
        fields: dict[str, Any] = {"owned": client.reading, "instance_id": client.instance_id}
        if client.must_say_all or client.epoch == 0:
            fields |= {"rebalance_timeout_ms": 6_000, **client.subscribed}
        if client.epoch == 0 and client.reading:
            fields["owned"] = client.reading = frozenset()
        reply = self.attempt(lambda: self.script.send(client.member_id, client.epoch, **fields))
        if reply is not None and reply.error is ErrorCode.group_id_not_found:
            self.forget(client)
        elif reply is not None and answered:
            self.take(client, reply)
        else:
            client.must_say_all = True

    @precondition(lambda self: any(client.classic is None for client in self.clients.values()))
    @rule(data=st.data(), subscribed=st.sampled_from(SUBSCRIPTIONS))
    def subscribe_anew(self, data: Any, subscribed: dict[str, Any]) -> None:
        names = sorted(each for each, client in self.clients.items() if client.classic is None)
        client = self.clients[data.draw(st.sampled_from(names))]
        topics = subscribed["topics"] or frozenset()
        client.subscribed = {"topics": topics, "regex": subscribed.get("regex", "")}
        client.must_say_all = True
        self.beat(client)

    @precondition(lambda self: any(client.classic is None for client in self.clients.values()))
    @rule(data=st.data(), for_a_while=st.booleans())
    def leave(self, data: Any, for_a_while: bool) -> None:
        names = sorted(each for each, client in self.clients.items() if client.classic is None)
        client = self.clients[data.draw(st.sampled_from(names))]
        epoch = -2 if for_a_while and client.instance_id is not None else -1
        client.reading = client.told = frozenset()
        self.attempt(lambda: self.script.send(client.member_id, epoch, instance_id=client.instance_id))
        self.forget(client)

    # -- clients of the classic protocol ---------------------------------------------------------------

    @precondition(lambda self: self.group is not None and self.group.members)
    @rule(kind=st.sampled_from(["eager", "cooperative"]), topics=st.sampled_from(["t", "tu"]))
    def classic_join(self, kind: str, topics: str) -> None:
        if len(self.clients) < 6:
            self.enter(Client("", classic=kind, subscribed={"names": list(topics)}))

    def enter(self, client: Client) -> None:
        """JoinGroup and SyncGroup. Eager clients give all up before, cooperative ones say what they have."""
        if client.classic == "eager":
            client.reading = client.told = frozenset()
        owned = None if client.classic == "eager" else self.script.topics.named(client.reading)
        reply = self.attempt(
            lambda: self.script.classic_join(
                client.member_id,
                client.subscribed["names"],
                owned,
                session_timeout_ms=8_000,
                rebalance_timeout_ms=6_000,
            )
        )
        if reply is None:
            return
        assert reply.error is ErrorCode.none, reply
        client.member_id, client.epoch = reply.member_id, reply.generation
        self.clients[client.member_id] = client
        synced = self.script.classic_sync(client.member_id, client.epoch)
        if synced.error is ErrorCode.none:
            client.hear(self.script.topics.ids(self.script.told(synced)))
        else:
            assert synced.error is ErrorCode.rebalance_in_progress

    @precondition(lambda self: any(client.classic for client in self.clients.values()))
    @rule(data=st.data(), rejoins=st.booleans())
    def classic_heartbeat(self, data: Any, rejoins: bool) -> None:
        names = sorted(each for each, client in self.clients.items() if client.classic)
        self.classic_beat(self.clients[data.draw(st.sampled_from(names))], rejoins=rejoins)

    def classic_beat(self, client: Client, *, rejoins: bool = True) -> None:
        error = self.script.classic_beat(client.member_id, client.epoch)
        if error is ErrorCode.rebalance_in_progress:
            if rejoins:
                client.let_go()
                self.enter(client)
        elif error is not ErrorCode.none:
            assert error is ErrorCode.unknown_member_id, error
            self.forget(client)

    @precondition(lambda self: any(client.classic for client in self.clients.values()))
    @rule(data=st.data())
    def classic_leave(self, data: Any) -> None:
        names = sorted(each for each, client in self.clients.items() if client.classic)
        client = self.clients[data.draw(st.sampled_from(names))]
        left = self.attempt(lambda: self.script.classic_leave(LeavingMember(client.member_id)))
        if left is not None:
            self.forget(client)

    # -- the world -------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), partitions=st.integers(1, 5))
    def topics_change(self, name: str, partitions: int) -> None:
        topic = self.script.topics.find(name)
        if topic is None:
            self.script.topics.create(name, partitions)
        elif partitions > topic.partitions:
            self.script.topics.grow(name, partitions)
        elif partitions == 1:
            self.script.topics.delete(name)

    @rule(duration_ms=st.sampled_from([500, 2_000, 5_000, 7_000]))
    def time_passes(self, duration_ms: int) -> None:
        if self.script.fail_append_with is not None:
            self.script.now_ms += duration_ms
            self.attempt(self.script.tick)
        else:
            self.script.wait(duration_ms)
        self.clear_classic_group()

    def clear_classic_group(self) -> None:
        """What classic groups do is modelled elsewhere: once the group is one, everybody goes."""
        if isinstance(self.script.state.groups.get("g"), ClassicGroup):
            self.script.fail_append_with = None
            for client in [each for each in self.clients.values() if each.classic]:
                self.script.state.leave("g", [LeavingMember(client.member_id)], self.script.now_ms)
            self.clients.clear()
            self.member_epochs.clear()
            self.group_epoch = 0
            group = self.script.state.groups["g"]
            assert isinstance(group, ClassicGroup)
            for member in group.members:
                self.script.state.leave("g", [LeavingMember(member.member_id)], self.script.now_ms)
            self.script.wait(60_000)

    @rule(full=st.sampled_from([False, False, True]))
    def disk_fills_or_empties(self, full: bool) -> None:
        self.script.fail_append_with = DiskFull("no room") if full else None

    @rule(really=st.sampled_from([False, False, True]))
    def node_restarts(self, really: bool) -> None:
        if really:
            self.script.restart()

    # -- what must hold --------------------------------------------------------------------------------

    @invariant()
    def nothing_is_read_twice(self) -> None:
        self.clear_classic_group()
        seen: dict[Any, str] = {}
        for client in self.members():
            for partition in client.reading:
                other = seen.setdefault(partition, client.member_id)
                assert other == client.member_id, f"{other} and {client.member_id} read {partition}"

    @invariant()
    def epochs_never_go_back(self) -> None:
        if self.group is None:
            return
        assert self.group.epoch >= self.group_epoch
        self.group_epoch = self.group.epoch
        for client in self.members():
            epoch = self.group.members[client.member_id].epoch
            assert epoch >= self.member_epochs.get(client.member_id, epoch)
            self.member_epochs[client.member_id] = epoch

    @invariant()
    def the_log_tells_the_same(self) -> None:
        replayed = self.script.reloaded().groups.get("g")
        if self.group is None:
            assert not isinstance(replayed, ConsumerGroup)
            return
        assert isinstance(replayed, ConsumerGroup)
        for name in (
            "epoch",
            "target_epoch",
            "members",
            "targets",
            "subscribed_topics",
            "_holders",
            "_static",
        ):
            assert getattr(replayed, name) == getattr(self.group, name), name
        resolved = {pattern: found.topics for pattern, found in self.group.patterns.items()}
        assert {pattern: found.topics for pattern, found in replayed.patterns.items()} == resolved

    def teardown(self) -> None:
        """After the last fault everything is read by a subscriber, and the group is stable."""
        self.script.fail_append_with = None
        for _ in range(12):
            self.script.wait(1_100)
            self.clear_classic_group()
            for client in list(self.clients.values()):
                if client.classic:
                    self.classic_beat(client)
                else:
                    self.beat(client)
            self.nothing_is_read_twice()
        group = self.group
        if group is None or not self.members():
            return
        assert str(group.state) == "Stable", group.members
        names = {
            name for member in group.members.values() for name in group.topics_of(member, group.patterns)
        }
        wanted = self.script.topics.ids(self.script.topics.all(*names))
        assert frozenset[Any]().union(*(client.reading for client in self.members())) == wanted


class ConsumerGroupHistoriesOnDrafts(ConsumerGroupHistories):
    """The same, as if the group were large."""

    on_drafts = True


ConsumerGroupHistories.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


class TestConsumerGroupHistories(ConsumerGroupHistories.TestCase):  # type: ignore[misc, valid-type]
    """Run by pytest."""


ConsumerGroupHistoriesOnDrafts.TestCase.settings = ConsumerGroupHistories.TestCase.settings


class TestConsumerGroupHistoriesOnDrafts(ConsumerGroupHistoriesOnDrafts.TestCase):  # type: ignore[misc, valid-type]
    """Run by pytest."""
