"""Random histories of a share group against clients that only know what they were told.

Answers get lost, disks fill up, the persister fails, leaders change, topics come, grow and go, offsets are
altered and deleted. At any time: epochs never go back, a member that says what it was told last is never
fenced, and another leader would find exactly what is in memory. Once all is quiet: every partition of every
subscribed topic is read by somebody, nobody is told of a partition that has no state, and no partition is
initialized twice unless a failure or another leader came between.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.consumer_groups import FakeTopics
from support.share_groups import ShareScript, stored
from tidemill.coordination.share_state import NO_START
from tidemill.errors import DiskFull, ErrorCode
from tidemill.groups.consumer.member import Partitions
from tidemill.groups.consumer.messages import Refused
from tidemill.groups.settings import GroupSettings
from tidemill.groups.share.group import ShareGroup

SETTINGS = GroupSettings(share_session_timeout_ms=10_000, share_max_size=5)
NAMES = ["t", "u", "v"]
SUBSCRIPTIONS = [frozenset("t"), frozenset("tu"), frozenset("uv"), frozenset("tuv")]


@dataclass
class Client:
    member_id: str
    topics: frozenset[str]
    epoch: int = 0
    told: Partitions = frozenset()


class ShareGroupHistories(RuleBasedStateMachine):
    on_drafts = False

    def __init__(self) -> None:
        super().__init__()
        self.script = ShareScript(FakeTopics(t=3, u=1), SETTINGS, on_drafts=self.on_drafts)
        self.clients: dict[str, Client] = {}
        self.counter = 0
        self.group_epoch = 0
        #: The start of every partition that has state, as the persister has it.
        self.states: dict[tuple[Any, int], tuple[int, int]] = {}

    @property
    def group(self) -> ShareGroup | None:
        group = self.script.state.groups.get("g")
        assert group is None or isinstance(group, ShareGroup)
        return group

    def attempt(self, act: Any) -> Any:
        try:
            return act()
        except DiskFull:
            return None

    def hear(self, client: Client, reply: Any) -> None:
        """The answer arrives."""
        lost = (ErrorCode.unknown_member_id, ErrorCode.group_id_not_found)
        if reply.error in lost:
            assert self.group is None or client.member_id not in self.group.members
            client.epoch, client.told = 0, frozenset()
            return
        assert reply.error is ErrorCode.none, reply
        assert reply.member_epoch >= client.epoch
        client.epoch = reply.member_epoch
        if reply.assignment is not None:
            client.told = reply.assignment
        assert self.group is not None
        member = self.group.members[client.member_id]
        assert (member.epoch, member.assigned) == (client.epoch, client.told)

    # -- clients -----------------------------------------------------------------------------------------

    @initialize(count=st.integers(0, 3))
    def some_join(self, count: int) -> None:
        for _ in range(count):
            self.join(frozenset("tu"), answered=True)

    @rule(topics=st.sampled_from(SUBSCRIPTIONS), answered=st.booleans())
    def join(self, topics: frozenset[str], answered: bool) -> None:
        if len(self.clients) >= 6:
            return
        self.counter += 1
        client = Client(f"m{self.counter}", topics)
        reply = self.attempt(lambda: self.script.join(client.member_id, *topics))
        if reply is None:
            return
        if reply.error is ErrorCode.group_max_size_reached:
            assert self.group is not None
            assert len(self.group.members) == SETTINGS.share_max_size
            return
        self.clients[client.member_id] = client
        if answered:
            self.hear(client, reply)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), answered=st.sampled_from([True, True, True, False]))
    def heartbeat(self, data: Any, answered: bool) -> None:
        self.beat(self.clients[data.draw(st.sampled_from(sorted(self.clients)))], answered=answered)

    def beat(self, client: Client, *, answered: bool = True) -> None:
        topics = client.topics if client.epoch == 0 else None
        reply = self.attempt(lambda: self.script.send(client.member_id, client.epoch, topics=topics))
        if reply is None or not answered or reply.error is ErrorCode.group_max_size_reached:
            return
        if reply.error is ErrorCode.fenced_member_epoch:
            # Only one who missed two answers in a row is fenced, and it knows what to do.
            assert self.group is not None
            assert client.epoch < self.group.members[client.member_id].previous_epoch
            client.epoch, client.told = 0, frozenset()
            return
        self.hear(client, reply)

    @precondition(lambda self: self.clients)
    @rule(data=st.data(), topics=st.sampled_from(SUBSCRIPTIONS))
    def subscribe_anew(self, data: Any, topics: frozenset[str]) -> None:
        client = self.clients[data.draw(st.sampled_from(sorted(self.clients)))]
        reply = self.attempt(lambda: self.script.send(client.member_id, client.epoch, topics=topics))
        if reply is not None and reply.error is ErrorCode.none:
            client.topics = topics
            self.hear(client, reply)

    @precondition(lambda self: self.clients)
    @rule(data=st.data())
    def leave(self, data: Any) -> None:
        client = self.clients.pop(data.draw(st.sampled_from(sorted(self.clients))))
        self.attempt(lambda: self.script.send(client.member_id, -1))

    @rule(duration_ms=st.sampled_from([1_000, 5_000, 11_000, 31_000]))
    def time_passes(self, duration_ms: int) -> None:
        self.attempt(lambda: self.script.wait(duration_ms))

    # -- topics, state, leaders --------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), partitions=st.integers(1, 4))
    def change_topics(self, name: str, partitions: int) -> None:
        found = self.script.topics.find(name)
        if found is None:
            self.script.topics.create(name, partitions)
        elif partitions > found.partitions:
            self.script.topics.grow(name, partitions)
        elif partitions == 1:
            self.script.topics.delete(name)
            self.attempt(lambda: list(self.script.state.forget_topics(name.__eq__, self.script.now_ms)))

    def in_use(self) -> Partitions:
        """The partitions that members may read."""
        topics = self.group.topics.initialized if self.group is not None else ()
        return frozenset((topic.id, index) for topic in topics for index in topic.partitions)

    def persist(self, work: Any, failed: frozenset[Any], *, altering: bool = False) -> frozenset[Any]:
        """What the persister does, and the partitions for which it failed."""
        lost = set()
        for topic_id, starts in work.topics.items():
            for index, start in starts.items():
                known = self.states.get((topic_id, index))
                if topic_id in failed and index:
                    lost.add((topic_id, index))
                    continue
                assert known is None or known[0] <= work.state_epoch, "an epoch went back"
                assert altering or (topic_id, index) not in self.in_use(), "what is read was begun again"
                if known is None or known[0] < work.state_epoch:
                    self.states[topic_id, index] = (work.state_epoch, start)
        return frozenset(lost)

    @rule(fails=st.sampled_from([None, None, "t", "u"]))
    def state_is_initialized(self, fails: str | None) -> None:
        topic = self.script.topics.find(fails) if fails else None
        failed = frozenset({topic.id} if topic is not None else ())
        work, self.script.work = self.script.work, []
        for begun in work:
            each = self.script.state.shares.still_wanted(begun)
            if each is not None:
                lost = self.persist(each, failed)
                self.attempt(
                    lambda each=each, lost=lost: self.script.state.shares.initialized(
                        each, lost, -1, self.script.now_ms
                    )
                )

    @precondition(lambda self: self.group is not None and self.group.topics.deleting)
    @rule()
    def state_is_deleted(self) -> None:
        self.delete_states()

    def delete_states(self) -> None:
        assert self.group is not None
        gone = {topic.id: topic.partitions for topic in self.group.topics.deleting}
        for topic_id, indexes in gone.items():
            for index in indexes:
                self.states.pop((topic_id, index), None)
        self.attempt(lambda: self.script.state.shares.deleted("g", gone, self.script.now_ms))

    @rule(offset=st.integers(0, 9), name=st.sampled_from(NAMES), fails=st.booleans())
    def alter(self, offset: int, name: str, fails: bool) -> None:
        self.state_is_initialized(None)  # On one node, operations of a group wait for each other.
        try:
            planned, _ = self.script.state.shares.begin_alter("g", {(name, 0): offset}, self.script.now_ms)
        except (Refused, DiskFull):
            return
        lost = self.persist(planned, frozenset(planned.topics if fails else ()), altering=True)
        self.attempt(lambda: self.script.state.shares.initialized(planned, lost, -1, self.script.now_ms))
        for topic_id in planned.topics:
            assert self.states[topic_id, 0] == (planned.state_epoch, offset)

    @rule(whole=st.booleans())
    def delete(self, whole: bool) -> None:
        self.state_is_initialized(None)
        try:
            if whole:
                self.script.state.shares.begin_delete_group("g", self.script.now_ms)
            else:
                self.script.state.shares.begin_delete_offsets("g", ["t"], self.script.now_ms)
        except (Refused, DiskFull):
            return
        self.delete_states()
        if whole:
            code = self.attempt(lambda: self.script.state.delete_group("g", self.script.now_ms))
            if code is ErrorCode.none:
                assert self.group is None
                assert not self.states
                self.group_epoch = 0

    @rule()
    def another_node_leads(self) -> None:
        self.script.restart()

    @rule(full=st.booleans())
    def disk(self, full: bool) -> None:
        self.script.fail_append_with = DiskFull("full") if full else None

    # -- what holds --------------------------------------------------------------------------------------

    @invariant()
    def epochs_never_go_back(self) -> None:
        epoch = self.group.epoch if self.group is not None else 0
        assert self.group is None or epoch >= self.group_epoch
        self.group_epoch = epoch

    @invariant()
    def another_leader_would_find_the_same(self) -> None:
        group, found = self.group, self.script.reload(start=False).groups.get("g")
        if group is None:
            assert found is None
        else:
            assert isinstance(found, ShareGroup)
            assert stored(found) == stored(group)

    @invariant()
    def what_is_told_has_state(self) -> None:
        if self.group is not None:
            for topic in self.group.topics.initialized:
                assert all((topic.id, index) in self.states for index in topic.partitions)

    def teardown(self) -> None:
        """Once all is quiet, everything is read."""
        script = self.script
        script.fail_append_with = None
        for _ in range(4):
            if self.group is not None and self.group.topics.deleting:
                self.delete_states()
            for client in self.clients.values():
                self.beat(client)
            self.state_is_initialized(None)
            script.wait(2_000)
        members = self.group.members if self.group is not None else {}
        clients = [client for client in self.clients.values() if client.member_id in members]
        subscribed = frozenset[str]().union(*(client.topics for client in clients))
        for client in clients:
            self.beat(client)
            assert {name for name, _ in script.topics.named(client.told)} <= client.topics
        told = frozenset[Any]().union(*(client.told for client in clients))
        stays = set(members) == {client.member_id for client in clients}
        if stays:
            assert script.topics.named(told) == script.topics.all(*subscribed)
            assert all(each in self.states for each in told)


class OnDrafts(ShareGroupHistories):
    """The same when every heartbeat is worked out on a draft."""

    on_drafts = True


ShareGroupHistories.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
OnDrafts.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


class TestShareGroupHistories(ShareGroupHistories.TestCase):  # type: ignore[misc, valid-type]
    """Run by pytest."""


class TestShareGroupHistoriesOnDrafts(OnDrafts.TestCase):  # type: ignore[misc, valid-type]
    """Run by pytest."""


def test_added_partitions_and_first_ones_are_told_apart_whatever_fails() -> None:
    """The first attempt fails in part; only a partition that is added after it starts at 0."""
    script = ShareScript(FakeTopics(t=2), SETTINGS)
    script.join("m", "t")
    script.initialize(failed=["t"])
    script.topics.grow("t", 3)
    script.wait(1_000)
    script.beat("m")
    (work,) = script.initialize()
    assert script.starts(work) == {"t": dict.fromkeys(range(3), NO_START)}
    script.topics.grow("t", 4)
    script.beat("m")
    (work,) = script.initialize()
    assert script.starts(work) == {"t": {3: 0}}
