"""The replication state of a replica: who leads, and how far the in-sync replicas have come."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.leadership import LEADER, led
from tidemill.replication.rules.assignment import PartitionAssignment
from tidemill.replication.rules.in_sync import REPLICA_LAG_MS, InSyncReplicas, IsrProposal, StaleNodeEpoch
from tidemill.replication.rules.state import ReplicationState, Role

OTHER = 9


def leading(*followers: int, end: int = 10, durable: int = 10, watermark: int = 0) -> ReplicationState:
    state = ReplicationState(high_watermark=watermark, durable_offset=durable)
    state.become_leader(led(1, followers), end)
    return state


def followers(state: ReplicationState) -> InSyncReplicas:
    assert state.in_sync is not None
    return state.in_sync


def report(state: ReplicationState, node: int, offset: int, *, node_epoch: int = 1) -> bool:
    """A follower has everything up to the offset, on its disk."""
    followers(state).fetched(node, node_epoch, offset, offset, 0, offset)
    return state.advance()


def change_in_sync(state: ReplicationState, *members: int) -> bool:
    known = followers(state).assignment
    replicas = tuple(dict.fromkeys((*known.replicas, *members)))
    changed = replace(
        known, replicas=replicas, isr=(LEADER, *members), partition_epoch=known.partition_epoch + 1
    )
    assert state.committed(changed)
    return state.advance()


def test_alone_in_the_in_sync_set_a_leader_follows_its_own_disk() -> None:
    state = leading(durable=10)
    assert (state.role, state.leader_epoch, state.high_watermark) == (Role.LEADER, 1, 10)
    assert state.flushed(12)
    assert not state.flushed(12), "nothing moved"
    assert state.high_watermark == 12


def test_a_lagging_follower_holds_the_high_watermark_back() -> None:
    state = leading(2, 3, durable=10)
    assert state.high_watermark == 0, "nobody has reported yet"
    assert not report(state, 2, 8)
    assert report(state, 3, 5)
    assert state.high_watermark == 5
    assert not state.flushed(20)
    assert report(state, 3, 9)
    assert state.high_watermark == 8


def test_who_leaves_the_in_sync_set_holds_nobody_back_and_who_joins_takes_nothing_back() -> None:
    state = leading(2, durable=10)
    assert change_in_sync(state)
    assert state.high_watermark == 10
    assert not change_in_sync(state, 3)
    assert state.high_watermark == 10
    assert not state.flushed(12), "the new member has reported nothing"
    assert report(state, 3, 11)
    assert state.high_watermark == 11


def test_an_older_report_does_not_count() -> None:
    state = leading(2, durable=10)
    assert report(state, 2, 6)
    followers(state).reported(2, 1, 4, 0, 0, 10)
    assert (state.advance(), followers(state).followers[2].durable) == (False, 6)


def test_a_registration_that_is_over_is_fenced() -> None:
    state = leading(2, durable=10)
    report(state, 2, 6, node_epoch=4)
    with pytest.raises(StaleNodeEpoch):
        report(state, 2, 7, node_epoch=3)
    report(state, 2, 0, node_epoch=5)
    assert followers(state).followers[2].durable == 0, "it begins anew"


def test_what_was_reported_to_the_leader_of_another_epoch_does_not_count() -> None:
    state = leading(2, durable=10)
    report(state, 2, 7)
    state.become_follower(2, OTHER)
    state.flushed(20)
    assert state.high_watermark == 7, "a follower moves nothing by itself"
    assert not state.become_leader(led(3, (2,)), 20)
    assert state.high_watermark == 7
    assert report(state, 2, 9)
    assert state.high_watermark == 9


def test_a_new_leader_does_not_know_the_end_until_the_high_watermark_has_reached_its_take_over() -> None:
    state = leading(2, end=10, durable=10)
    reached = [state.has_reached_epoch_start]
    for offset in (9, 10):
        report(state, 2, offset)
        reached.append(state.has_reached_epoch_start)
    assert reached == [False, False, True]
    alone = leading(end=10, durable=10)
    assert alone.has_reached_epoch_start


def test_an_epoch_has_one_leader() -> None:
    state = leading()
    with pytest.raises(AssertionError):
        state.become_follower(1, OTHER)
    state.become_follower(2, OTHER)
    with pytest.raises(AssertionError):
        state.become_leader(led(2), 10)


def test_a_replica_that_its_storage_has_stopped_never_leads_again() -> None:
    state = leading(durable=10)
    state.go_offline()
    assert not state.become_leader(led(5), 20)
    assert (state.role, state.leader_epoch, state.high_watermark) == (Role.OFFLINE, 5, 10)
    state.become_follower(6, OTHER)
    assert state.role is Role.OFFLINE


def test_a_follower_that_is_always_a_little_behind_is_caught_up() -> None:
    state = leading(2)
    in_sync, end = followers(state), 10
    for now_ms in range(0, 60_000, 100):
        end += 10
        in_sync.fetched(2, 1, end, end - 30, now_ms, end)
        assert propose(state, now_ms, end) is None
    assert propose(state, now_ms + REPLICA_LAG_MS + 400, end) is not None


def test_who_left_because_it_was_behind_for_too_long_does_not_come_back_before_it_has_caught_up() -> None:
    state, lag_ms, end = ReplicationState(high_watermark=10, durable_offset=20), 2_000, 20
    state.become_leader(led(1, (2,), min_isr=2), 10)
    in_sync = followers(state)
    in_sync.fetched(2, 1, 10, 10, 0, 10)
    in_sync.reported(2, 1, 10, 0, 0, 10)
    # Its disk is full: it asks on, and keeps nothing.
    for now_ms in range(100, 9_000, 100):
        in_sync.fetched(2, 1, 10, 10, now_ms, end)
        proposal = propose(state, now_ms, end, lag_ms)
        assert (proposal is not None) == (in_sync.assignment.isr == (LEADER, 2) and now_ms > lag_ms), now_ms
        if proposal is not None:
            assert proposal.isr == (LEADER,)
            change_in_sync(state)
    assert state.high_watermark == 10, "the set is too small: it would have all that is committed"
    in_sync.fetched(2, 1, end, end, 9_000, end)
    proposal = propose(state, 9_000, end, lag_ms)
    assert proposal is not None
    assert proposal.isr == (LEADER, 2)


def propose(
    state: ReplicationState, now_ms: int, end: int, lag_ms: int = REPLICA_LAG_MS
) -> IsrProposal | None:
    return followers(state).proposal(
        now_ms,
        lag_ms=lag_ms,
        log_end=end,
        high_watermark=state.high_watermark,
        epoch_start_offset=state.epoch_start_offset,
        log_start=0,
    )


NODES = st.integers(2, 4)


@dataclass
class Model:
    """The same, by the definition: a minimum over a set, and never less than it was."""

    durable: int = 0
    end: int = 0
    epoch: int = -1
    leads: bool = False
    isr: set[int] = field(default_factory=set)
    min_isr: int = 1
    partition_epoch: int = 0
    #: Additions that may be committed without the leader's knowing.
    additions: set[int] = field(default_factory=set)
    matched: dict[int, int] = field(default_factory=dict)
    reported: dict[int, int] = field(default_factory=dict)
    watermark: int = 0

    def least(self) -> int:
        counted = [
            min(self.matched.get(node, -1), self.reported.get(node, -1)) for node in self.isr | self.additions
        ]
        return min([self.durable, *counted])

    def advance(self) -> None:
        if self.leads and 1 + len(self.isr) >= self.min_isr:
            self.watermark = max(self.watermark, self.least())


class Replica(RuleBasedStateMachine):
    """Random flushes, reports, proposals, records and elections, against the model."""

    def __init__(self) -> None:
        super().__init__()
        self.state = ReplicationState(high_watermark=0, durable_offset=0)
        self.model = Model()
        self.seen = 0
        self.now_ms = 0
        self.proposal: IsrProposal | None = None

    @rule(count=st.integers(1, 5))
    def append(self, count: int) -> None:
        self.model.end += count

    @rule(share=st.floats(0, 1))
    def flush(self, share: float) -> None:
        model = self.model
        model.durable += round((model.end - model.durable) * share)
        self.state.flushed(model.durable)
        model.advance()

    @precondition(lambda self: self.model.leads)
    @rule(node=NODES, behind=st.integers(0, 8))
    def fetch(self, node: int, behind: int) -> None:
        """Positions can go down: a log was built again."""
        model, offset = self.model, max(0, self.model.end - behind)
        model.matched[node] = offset
        followers(self.state).fetched(node, 1, offset, -1, self.now_ms, model.end)
        self.state.advance()
        model.advance()

    @precondition(lambda self: self.model.leads)
    @rule(node=NODES, behind=st.integers(0, 8))
    def report(self, node: int, behind: int) -> None:
        model, offset = self.model, max(0, self.model.end - behind)
        model.reported[node] = max(offset, model.reported.get(node, -1))
        followers(self.state).reported(node, 1, offset, 0, self.now_ms, model.end)
        self.state.advance()
        model.advance()

    @rule(nodes=st.sets(NODES), skip=st.integers(1, 3), min_isr=st.integers(1, 3))
    def lead(self, nodes: set[int], skip: int, min_isr: int) -> None:
        model = self.model
        model.epoch += skip
        model.leads, model.isr, model.min_isr, model.partition_epoch = True, nodes, min_isr, 0
        model.additions, model.matched, model.reported = set(), {}, {}
        self.proposal = None
        self.state.become_leader(self.record(), model.end)
        model.advance()
        assert self.state.epoch_start_offset == model.end

    def record(self) -> PartitionAssignment:
        model = self.model
        return PartitionAssignment(
            LEADER,
            model.epoch,
            (LEADER, 2, 3, 4),
            (LEADER, *sorted(model.isr)),
            min_isr=model.min_isr,
            partition_epoch=model.partition_epoch,
        )

    @rule(skip=st.integers(1, 3))
    def follow(self, skip: int) -> None:
        model = self.model
        model.epoch += skip
        model.leads = False
        self.state.become_follower(model.epoch, OTHER)

    @rule(ms=st.sampled_from((10, 1_000, 20_000)))
    def pass_time(self, ms: int) -> None:
        self.now_ms += ms

    @precondition(lambda self: self.model.leads and self.proposal is None)
    @rule()
    def propose(self) -> None:
        model = self.model
        proposal = propose(self.state, self.now_ms, model.end)
        if proposal is None:
            return
        assert followers(self.state).proposed(proposal)
        assert propose(self.state, self.now_ms, model.end) is None, "one at a time"
        self.proposal = proposal
        added = set(proposal.isr) - model.isr - {LEADER}
        for node in added:
            counts = min(model.matched[node], model.reported[node])
            assert counts >= max(model.watermark, self.state.epoch_start_offset)
        model.additions |= added
        assert LEADER in proposal.isr

    @precondition(lambda self: self.model.leads and self.proposal is not None)
    @rule()
    def lose_the_outcome(self) -> None:
        assert self.proposal is not None
        self.state.proposal_ended(self.proposal, refused=False)
        self.proposal = None

    @precondition(lambda self: self.model.leads and self.proposal is not None)
    @rule()
    def take_the_proposal(self) -> None:
        assert self.proposal is not None
        self._commit(set(self.proposal.isr) - {LEADER})

    @precondition(lambda self: self.model.leads)
    @rule(nodes=st.sets(NODES))
    def commit_another_record(self, nodes: set[int]) -> None:
        self._commit(nodes)

    def _commit(self, isr: set[int]) -> None:
        model = self.model
        old = self.record()
        model.isr, model.additions = isr, set()
        model.partition_epoch += 1
        assert self.state.committed(self.record())
        assert not self.state.committed(old), "older"
        if self.proposal is not None:
            assert not self.state.proposal_ended(self.proposal, refused=True), "a newer record has decided"
        self.proposal = None
        self.state.advance()
        model.advance()

    @invariant()
    def agrees(self) -> None:
        state, model = self.state, self.model
        assert state.high_watermark == model.watermark
        assert state.high_watermark >= self.seen, "the high watermark never goes back"
        if state.high_watermark > self.seen:
            assert state.high_watermark <= model.least()
        assert (state.role is Role.LEADER, state.leader_epoch) == (model.leads, model.epoch)
        self.seen = state.high_watermark


TestReplica = Replica.TestCase
TestReplica.settings = settings(max_examples=200)
