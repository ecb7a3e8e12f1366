"""The replication state of a replica: who leads, and how far the in-sync replicas have come."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tidemill.replication.state import ReplicationState, Role


def leading(*followers: int, end: int = 10, durable: int = 10, watermark: int = 0) -> ReplicationState:
    state = ReplicationState(high_watermark=watermark, durable_offset=durable)
    state.become_leader(1, end, followers)
    return state


def test_alone_in_the_in_sync_set_a_leader_follows_its_own_disk() -> None:
    state = leading(durable=10)
    assert (state.role, state.leader_epoch, state.high_watermark) == (Role.LEADER, 1, 10)
    assert state.flushed(12)
    assert not state.flushed(12), "nothing moved"
    assert state.high_watermark == 12


def test_a_lagging_follower_holds_the_high_watermark_back() -> None:
    state = leading(2, 3, durable=10)
    assert state.high_watermark == 0, "nobody has reported yet"
    assert not state.follower_flushed(2, 8)
    assert state.follower_flushed(3, 5)
    assert state.high_watermark == 5
    assert not state.flushed(20)
    assert state.follower_flushed(3, 9)
    assert state.high_watermark == 8


def test_who_leaves_the_in_sync_set_holds_nobody_back_and_who_joins_takes_nothing_back() -> None:
    state = leading(2, durable=10)
    assert state.change_in_sync(())
    assert state.high_watermark == 10
    assert not state.change_in_sync((3,))
    assert state.high_watermark == 10
    assert not state.flushed(12), "the new member has reported nothing"
    assert state.follower_flushed(3, 11)
    assert state.high_watermark == 11


def test_reports_of_strangers_and_older_reports_do_not_count() -> None:
    state = leading(2, durable=10)
    assert not state.follower_flushed(7, 10)
    assert state.follower_flushed(2, 6)
    assert not state.follower_flushed(2, 4)
    assert state.high_watermark == 6


def test_what_was_reported_to_the_leader_of_another_epoch_does_not_count() -> None:
    state = leading(2, durable=10)
    state.follower_flushed(2, 7)
    state.become_follower(2)
    state.flushed(20)
    assert state.high_watermark == 7, "a follower moves nothing by itself"
    assert not state.become_leader(3, 20, (2,))
    assert state.high_watermark == 7
    assert state.follower_flushed(2, 9)
    assert state.high_watermark == 9


def test_a_new_leader_does_not_know_the_end_until_the_high_watermark_has_reached_its_take_over() -> None:
    state = leading(2, end=10, durable=10)
    reached = [state.has_reached_epoch_start]
    for offset in (9, 10):
        state.follower_flushed(2, offset)
        reached.append(state.has_reached_epoch_start)
    assert reached == [False, False, True]
    alone = leading(end=10, durable=10)
    assert alone.has_reached_epoch_start


def test_an_epoch_has_one_leader() -> None:
    state = leading()
    with pytest.raises(AssertionError):
        state.become_follower(1)
    state.become_follower(2)
    with pytest.raises(AssertionError):
        state.become_leader(2, 10)


def test_a_replica_that_its_storage_has_stopped_never_leads_again() -> None:
    state = leading(durable=10)
    state.go_offline()
    assert not state.become_leader(5, 20)
    assert (state.role, state.leader_epoch, state.high_watermark) == (Role.OFFLINE, 5, 10)
    state.become_follower(6)
    assert state.role is Role.OFFLINE


NODES = st.integers(2, 4)


@dataclass
class Model:
    """The same, by the definition: a minimum over a set, and never less than it was."""

    durable: int = 0
    end: int = 0
    epoch: int = -1
    leads: bool = False
    followers: dict[int, int] = field(default_factory=dict)
    watermark: int = 0

    def advance(self) -> None:
        if self.leads:
            self.watermark = max(self.watermark, min([self.durable, *self.followers.values()]))


class Replica(RuleBasedStateMachine):
    """Random flushes, appends and elections, against the model."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ReplicationState(high_watermark=0, durable_offset=0)
        self.model = Model()
        self.seen = 0

    @rule(count=st.integers(1, 5))
    def append(self, count: int) -> None:
        self.model.end += count

    @rule(share=st.floats(0, 1))
    def flush(self, share: float) -> None:
        model = self.model
        model.durable += round((model.end - model.durable) * share)
        self.state.flushed(model.durable)
        model.advance()

    @rule(node=NODES, offset=st.integers(0, 60))
    def report(self, node: int, offset: int) -> None:
        model = self.model
        offset = min(offset, model.end)
        if node in model.followers:
            model.followers[node] = max(model.followers[node], offset)
        self.state.follower_flushed(node, offset)
        model.advance()

    @rule(nodes=st.sets(NODES), skip=st.integers(1, 3))
    def lead(self, nodes: set[int], skip: int) -> None:
        model = self.model
        model.epoch += skip
        model.leads, model.followers = True, dict.fromkeys(nodes, 0)
        self.state.become_leader(model.epoch, model.end, nodes)
        model.advance()
        assert self.state.epoch_start_offset == model.end

    @rule(skip=st.integers(1, 3))
    def follow(self, skip: int) -> None:
        model = self.model
        model.epoch += skip
        model.leads, model.followers = False, {}
        self.state.become_follower(model.epoch)

    @rule(nodes=st.sets(NODES))
    def change_in_sync(self, nodes: set[int]) -> None:
        model = self.model
        if model.leads:
            model.followers = {node: model.followers.get(node, 0) for node in nodes}
            self.state.change_in_sync(nodes)
            model.advance()

    @invariant()
    def agrees(self) -> None:
        state, model = self.state, self.model
        assert state.high_watermark == model.watermark
        assert state.high_watermark >= self.seen, "the high watermark never goes back"
        if state.high_watermark > self.seen:
            assert state.high_watermark <= min([model.durable, *model.followers.values()])
        assert (state.role is Role.LEADER, state.leader_epoch) == (model.leads, model.epoch)
        self.seen = state.high_watermark


TestReplica = Replica.TestCase
