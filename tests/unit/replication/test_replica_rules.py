"""Replicas whose messages, flushes and elections the test makes by hand: the rules, one by one.

Most of these are schedules that lose or double records if a rule is missing. Those that end in ``ablation``
switch the rule off, and then the loss must show.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import pytest

from support.batches import plain_batch
from support.faulty_storage import FaultyStorage
from tidemill.cluster.messages import (
    ClusterErrorCode,
    FetchedPartition,
    HeartbeatPartition,
    ReplicaProgress,
)
from tidemill.config.topic import TopicConfig
from tidemill.errors import ApiError, ErrorCode, TidemillError
from tidemill.log.recovery import open_log
from tidemill.records.record import read_records
from tidemill.replication.partition import Partition
from tidemill.replication.rules.assignment import PartitionAssignment
from tidemill.replication.rules.following import FollowerStep, FollowingState
from tidemill.replication.rules.in_sync import FollowerProgress, InSyncReplicas, IsrProposal

if TYPE_CHECKING:
    from _typeshed import SupportsLenAndGetItem

_T = TypeVar("_T")

NOW = 1_000_000
PLENTY = 1 << 20
A, B, C, D = 1, 2, 3, 4


class Node:
    """One replica on its own disk."""

    def __init__(self, node_id: int, storage: FaultyStorage | None = None, **config: Any) -> None:
        self.id = node_id
        self.storage = storage or FaultyStorage()
        self.config = config
        log, _ = open_log(self.storage, "logs/t/0", TopicConfig(**config))
        self.partition = Partition(
            "t", UUID(int=1), 0, log, request_flush=lambda _: None, max_decompressed_bytes=10**6
        )
        self.epoch = 1
        self.told: list[TidemillError | None] = []

    def append(self, *values: str) -> None:
        """Write a batch for each value, and wait as a producer with acks=all."""
        for value in values:
            appended = self.partition.append(plain_batch(value), NOW)
            self.partition.when_acknowledged(appended.last_offset + 1, self.told.append)

    def flush(self) -> None:
        job = self.partition.begin_flush()
        if job is not None:
            job.run()
            self.partition.flushed(job)

    def cut(self, step: FollowerStep) -> None:
        job = self.partition.as_follower.begin_cut(step, self.partition.leader_epoch, NOW)
        if job is not None:
            job.run()
            self.partition.as_follower.finish_cut(job)

    @property
    def values(self) -> list[str]:
        log = self.partition.local_log
        return [
            (record.value or b"").decode()
            for batch in log.read_batches(log.log_start_offset, log.end_offset)
            for record in read_records(batch)
        ]

    @property
    def offsets(self) -> tuple[int, int]:
        """(log end, high watermark)"""
        return self.partition.log_end_offset, self.partition.high_watermark


class NothingSurvives(random.Random):
    """The luck of a disk that loses everything that was not synced."""

    def choice(self, seq: SupportsLenAndGetItem[_T]) -> _T:
        return seq[0]


class Cluster:
    """Nodes, and the record of their one partition."""

    def __init__(
        self,
        nodes: Iterable[int] = (A, B, C),
        *,
        isr: tuple[int, ...] | None = None,
        min_isr: int = 1,
        **config: Any,
    ) -> None:
        self.nodes = {node: Node(node, **config) for node in nodes}
        members = tuple(self.nodes)
        self.record = PartitionAssignment(A, 1, members, isr or members, min_isr=min_isr)
        self.now_ms = NOW
        self.tell()

    def __getitem__(self, node_id: int) -> Node:
        return self.nodes[node_id]

    def tell(self, *nodes: int, **changes: Any) -> None:
        """The record changes, and ``nodes`` hear of it; all of them if none is named."""
        if changes:
            changes.setdefault("partition_epoch", self.record.partition_epoch + 1)
        self.record = replace(self.record, **changes)
        for node_id in nodes or self.nodes:
            self.nodes[node_id].partition.apply(self.record, node_id)

    def elect(self, leader: int, isr: tuple[int, ...], *nodes: int) -> None:
        self.tell(*nodes, leader=leader, leader_epoch=self.record.leader_epoch + 1, isr=isr)

    def ask(self, follower: int, leader: int) -> FetchedPartition:
        """A follower fetches; the answer is on its way."""
        position = self[follower].partition.as_follower.fetch_position(PLENTY)
        assert position is not None
        self.position = position
        serving = self[leader].partition
        refused = serving.as_leader.fetch(position, follower, self[follower].epoch, self.now_ms)
        return refused or serving.as_leader.read(position, PLENTY, at_least_one=True)

    def fetch(self, follower: int, leader: int) -> FollowerStep:
        answer = self.ask(follower, leader)
        return self[follower].partition.as_follower.take_answer(self.position, answer, self.now_ms)

    def report(self, follower: int, leader: int) -> None:
        progress = self[follower].partition.as_follower.progress()
        if progress is not None:
            self[leader].partition.as_leader.replica_state(
                progress, follower, self[follower].epoch, self.now_ms
            )

    def follow(self, *followers: int, leader: int) -> None:
        """Fetch, cut, flush and report until nothing is left."""
        for follower in followers:
            for _ in range(6):
                step = self.fetch(follower, leader)
                if step != FollowerStep():
                    self[follower].cut(step)
                self[follower].flush()
                self.report(follower, leader)

    def lose_power(self, node_id: int) -> None:
        """The node has lost what was not synced, and starts again, with another registration."""
        old = self[node_id]
        old.storage.rng = NothingSurvives()
        node = self.nodes[node_id] = Node(node_id, old.storage.crash(power_loss=True), **old.config)
        node.epoch = old.epoch + 1

    def write(self, *values: str) -> None:
        """Write at the leader, on every disk; the followers know that it is committed."""
        leader = self.record.leader
        followers = [node for node in self.record.isr if node != leader]
        self[leader].append(*values)
        self[leader].flush()
        self.follow(*followers, leader=leader)
        self.follow(*followers, leader=leader)


def refused(call: Any, *arguments: object) -> ErrorCode:
    with pytest.raises(ApiError) as caught:
        call(*arguments)
    return caught.value.code


# --- the high watermark


def test_a_record_is_committed_when_it_is_on_every_disk_of_the_in_sync_set() -> None:
    cluster = Cluster()
    cluster[A].append("a")
    for follower in (B, C):
        cluster.fetch(follower, A)
        cluster.fetch(follower, A)
    assert [cluster[node].offsets for node in (A, B, C)] == [(1, 0), (1, 0), (1, 0)]
    cluster[A].flush()
    cluster[B].flush()
    cluster.report(B, A)
    assert cluster[A].offsets == (1, 0), "C has it in memory only"
    cluster[C].flush()
    cluster.report(C, A)
    assert cluster[A].offsets == (1, 1)
    assert cluster[A].told == [None]
    cluster.fetch(B, A)
    assert cluster[B].offsets == (1, 1), "a follower learns it with the next answer"
    told = HeartbeatPartition(cluster[C].partition.id, 1, 1)
    assert cluster[C].partition.as_follower.heartbeat(told, A)
    assert cluster[C].offsets == (1, 1), "or by a heartbeat"


def test_followers_read_above_the_high_watermark_and_clients_do_not() -> None:
    cluster = Cluster((A, B))
    cluster[A].append("a", "b")
    cluster.fetch(B, A)
    assert cluster[B].values == ["a", "b"]
    assert bytes(cluster[A].partition.read(0, PLENTY, at_least_one=True)) == b""
    with pytest.raises(ApiError) as caught:
        cluster[B].partition.as_follower.read(1, PLENTY, at_least_one=True)
    assert caught.value.code == ErrorCode.offset_not_available
    cluster.follow(B, leader=A)
    cluster[A].flush()
    cluster.follow(B, leader=A)
    assert cluster[B].partition.as_follower.read(1, PLENTY, at_least_one=True)


def test_nothing_is_committed_while_the_in_sync_set_is_too_small() -> None:
    cluster = Cluster((A, B), min_isr=2)
    cluster.write("a")
    cluster[A].append("b")
    cluster.tell(isr=(A,))
    codes = [None if error is None else error.code for error in cluster[A].told]
    assert codes == [None, ErrorCode.not_enough_replicas_after_append]
    assert refused(cluster[A].partition.as_leader.check_enough_replicas) == ErrorCode.not_enough_replicas
    cluster[A].flush()
    assert cluster[A].offsets == (2, 1)
    cluster[A].append("c")
    assert cluster[A].told[-1] is not None, "told at once"
    cluster.tell(isr=(A, B))
    cluster[A].partition.as_leader.check_enough_replicas()
    cluster.follow(B, leader=A)
    cluster[A].flush()
    cluster.follow(B, leader=A)
    assert cluster[A].offsets == (3, 3)


def test_a_proposed_member_holds_the_high_watermark_back_and_is_no_member() -> None:
    cluster = Cluster((A, B), isr=(A,), min_isr=2)
    cluster.follow(B, leader=A)
    proposal = cluster[A].partition.as_leader.next_proposal(cluster.now_ms)
    assert proposal is not None
    assert (proposal.isr, proposal.node_epochs, proposal.partition_epoch) == ((A, B), {B: 1}, 0)
    assert cluster[A].partition.as_leader.next_proposal(cluster.now_ms) is None, "one at a time"
    cluster[A].append("a")
    cluster[A].flush()
    assert cluster[A].offsets == (1, 0), "one member is committed, two are needed"
    cluster.tell(isr=(A, B))
    assert cluster[A].offsets == (1, 0)
    cluster.follow(B, leader=A)
    assert cluster[A].offsets == (1, 1)


def proposing(cluster: Cluster) -> IsrProposal:
    proposal = cluster[A].partition.as_leader.next_proposal(cluster.now_ms)
    assert proposal is not None
    return proposal


def test_a_proposal_of_unknown_outcome_counts_until_a_newer_record_comes() -> None:
    cluster = Cluster((A, B), isr=(A,))
    cluster.follow(B, leader=A)
    lost = proposing(cluster)
    cluster[A].partition.as_leader.proposal_ended(lost, refused=False)
    cluster[A].append("a")
    cluster[A].flush()
    assert cluster[A].offsets == (1, 0), "B may be a member"
    cluster.now_ms += 60_000
    again = proposing(cluster)
    assert again.isr == (A,), "B is silent, so the leader asks for the old set, which ends the other question"
    cluster.tell(partition_epoch=1)
    assert cluster[A].offsets == (1, 1)


def test_a_refused_proposal_counts_no_more() -> None:
    cluster = Cluster((A, B), isr=(A,))
    cluster.follow(B, leader=A)
    proposal = proposing(cluster)
    cluster[A].append("a")
    cluster[A].flush()
    assert cluster[A].offsets == (1, 0)
    cluster[A].partition.as_leader.proposal_ended(proposal, refused=True)
    assert cluster[A].offsets == (1, 1)


def test_how_long_a_member_may_lag_is_a_setting() -> None:
    cluster = Cluster((A, B))
    cluster.write("a")
    cluster[A].append("b")
    cluster[A].flush()
    assert cluster[A].partition.as_leader.next_proposal(cluster.now_ms, lag_ms=700) is None
    cluster.now_ms += 701
    proposal = cluster[A].partition.as_leader.next_proposal(cluster.now_ms, lag_ms=700)
    assert proposal is not None
    assert proposal.isr == (A,)


def test_who_leaves_counts_until_the_record_says_so() -> None:
    cluster = Cluster((A, B))
    cluster.write("a")
    cluster[A].append("b")
    cluster[A].flush()
    assert cluster[A].partition.as_leader.next_proposal(cluster.now_ms) is None
    cluster.now_ms += 9_000
    assert cluster[A].partition.as_leader.next_proposal(cluster.now_ms) is None
    assert cluster[A].partition.as_leader.next_proposal(cluster.now_ms, {B}) is not None, (
        "3 s if it is suspected"
    )
    assert cluster[A].offsets == (2, 1), "it was asked for, and is not committed"
    cluster.tell(isr=(A,))
    assert cluster[A].offsets == (2, 2)


def test_who_could_not_stay_does_not_join() -> None:
    """While the set is too small the high watermark stands: who stopped below the end has reached it."""
    cluster = Cluster((A, B), isr=(A,), min_isr=2)
    cluster.follow(B, leader=A)
    cluster[A].append("a")
    cluster[A].flush()
    cluster.now_ms += 60_000
    # It asks, and cannot write what it gets: its disk is full.
    cluster.ask(B, leader=A)
    assert cluster[A].partition.as_leader.next_proposal(cluster.now_ms) is None, (
        "it would be asked to leave at once"
    )
    cluster.follow(B, leader=A)
    cluster.follow(B, leader=A)
    assert proposing(cluster).isr == (A, B)


def member_that_the_leader_has_not_heard_of() -> tuple[list[TidemillError | None], list[str]]:
    """The proposal that adds B was taken, A does not know it, and B is elected."""
    cluster = Cluster((A, B), isr=(A,))
    cluster.follow(B, leader=A)
    proposing(cluster)
    cluster[A].append("a")
    cluster[A].flush()
    told = list(cluster[A].told)
    cluster.elect(B, (B,))
    return told, cluster[B].values


def test_nothing_is_acknowledged_without_a_member_that_may_have_joined() -> None:
    assert member_that_the_leader_has_not_heard_of() == ([], [])


def test_ablation_without_proposed_members_an_acknowledged_record_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InSyncReplicas, "proposed_additions", lambda self: frozenset())
    assert member_that_the_leader_has_not_heard_of() == ([None], [])


def test_an_idle_member_stays_and_one_with_a_hanging_disk_leaves() -> None:
    cluster = Cluster((A, B, C))
    cluster.write("a")
    cluster.now_ms += 60_000
    assert cluster[A].partition.as_leader.next_proposal(cluster.now_ms) is None
    cluster[A].append("b")
    for _ in range(30):
        cluster.now_ms += 500
        cluster.fetch(B, A)
        cluster.follow(C, leader=A)
    proposal = proposing(cluster)
    assert proposal.isr == (A, C), "B fetches, and flushes nothing"


def joining_below_the_epoch_start() -> list[str]:
    """A leader that does not know yet how far it was committed, and a replica that ends a little lower."""
    cluster = Cluster((A, B, C, D), isr=(A, B, C))
    cluster.write("a")
    cluster.follow(D, leader=A)
    cluster[A].append("b")
    cluster[A].flush()
    for follower in (B, C):
        cluster.fetch(follower, A)
        cluster[follower].flush()
        cluster.ask(follower, A)
    assert cluster[A].told == [None, None]
    assert cluster[B].offsets == (2, 1), "the news of the commit are lost with A"
    cluster.elect(B, (B, C))
    answer = cluster.ask(D, B)
    cluster[D].partition.as_follower.take_answer(cluster.position, replace_records(answer), cluster.now_ms)
    cluster.report(D, B)
    proposal = cluster[B].partition.as_leader.next_proposal(cluster.now_ms)
    if proposal is not None:
        cluster.elect(D, (D,))
    return cluster[cluster.record.leader].values


def replace_records(answer: FetchedPartition) -> FetchedPartition:
    """The answer as if there had been no room for records in it."""
    return FetchedPartition(answer.partition, answer.high_watermark, answer.log_start_offset)


def test_nobody_joins_below_the_start_of_the_leaders_epoch() -> None:
    assert joining_below_the_epoch_start() == ["a", "b"]


def test_ablation_without_the_epochs_start_a_committed_record_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proposal = InSyncReplicas.proposal

    def at_high_watermark(self: InSyncReplicas, now_ms: int, **facts: Any) -> IsrProposal | None:
        # With a log end that the replica has reached, too: it must also have been caught up lately.
        return proposal(self, now_ms, **{**facts, "epoch_start_offset": 0, "log_end": 1})

    monkeypatch.setattr(InSyncReplicas, "proposal", at_high_watermark)
    assert joining_below_the_epoch_start() == ["a"]


# --- divergence


def parted() -> Cluster:
    """A wrote what only C has; B leads now. "c" is committed, and C does not know it."""
    cluster = Cluster()
    cluster.write("a")
    cluster[A].append("c")
    cluster[A].flush()
    cluster.fetch(B, A)
    cluster.fetch(C, A)
    cluster[A].append("x", "y")
    cluster.fetch(C, A)
    for follower in (C, B):
        cluster[follower].flush()
        cluster.ask(follower, A)
    assert cluster[A].told == [None, None]
    assert (cluster[B].values, cluster[C].values) == (["a", "c"], ["a", "c", "x", "y"])
    assert cluster[C].offsets == (4, 1)
    cluster.elect(B, (B, C))
    return cluster


def test_a_follower_cuts_its_log_where_the_epochs_part() -> None:
    cluster = parted()
    step = cluster.fetch(C, B)
    assert step == FollowerStep(cut_at=2)
    assert cluster[C].partition.as_follower.progress() is None
    cluster[C].cut(step)
    assert cluster[C].values == ["a", "c"]
    cluster[B].append("d")
    cluster.follow(C, leader=B)
    cluster[B].flush()
    cluster.follow(C, leader=B)
    assert (cluster[C].values, cluster[C].offsets) == (["a", "c", "d"], (3, 3))


def test_a_cut_by_epochs_keeps_what_is_committed_and_one_by_the_high_watermark_does_not() -> None:
    cluster = parted()
    cluster[C].cut(cluster.fetch(C, B))
    cluster.elect(C, (C,))
    assert cluster[C].values == ["a", "c"]
    by_watermark = parted()
    by_watermark.fetch(C, B)
    by_watermark[C].cut(FollowerStep(cut_at=by_watermark[C].partition.high_watermark))
    by_watermark.elect(C, (C,))
    assert by_watermark[C].values == ["a"], "an acknowledged record is gone"


def acknowledged_before_the_disk() -> tuple[list[TidemillError | None], list[str]]:
    """C flushes before it has heard from its new leader, and loses power later."""
    cluster = parted()
    cluster.report(C, B)
    cluster[C].cut(cluster.fetch(C, B))
    cluster[B].append("d", "e")
    cluster[B].flush()
    cluster.fetch(C, B)
    cluster.ask(C, B)
    told = list(cluster[B].told)
    cluster.lose_power(C)
    cluster.elect(C, (C,))
    return told, cluster[C].values


def test_what_was_durable_before_the_logs_were_matched_does_not_count() -> None:
    assert acknowledged_before_the_disk() == ([], ["a", "c"])


def test_ablation_reports_before_the_match_lose_acknowledged_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FollowingState, "may_report", property(lambda self: True))
    assert acknowledged_before_the_disk() == ([None, None], ["a", "c"])


def counted_without_a_match() -> int:
    cluster = parted()
    said = ReplicaProgress(cluster[C].partition.id, 4, 1, 4, cluster.record.leader_epoch)
    cluster[B].partition.as_leader.replica_state(said, C, 1, NOW)
    cluster[B].append("d")
    cluster[B].flush()
    return cluster[B].partition.high_watermark


def test_the_leader_counts_nothing_above_the_matched_end_whatever_it_is_told() -> None:
    assert counted_without_a_match() == 1


def test_ablation_durable_above_the_matched_end_commits_what_one_replica_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FollowerProgress, "counts_to", property(lambda self: self.durable))
    assert counted_without_a_match() == 3


def test_no_flush_no_fetch_and_no_role_while_the_end_is_cut() -> None:
    cluster = parted()
    partition = cluster[C].partition
    step = cluster.fetch(C, B)
    job = partition.as_follower.begin_cut(step, partition.leader_epoch, NOW)
    assert job is not None
    assert partition.as_follower.fetch_position(PLENTY) is None
    assert partition.begin_flush() is None
    cluster.elect(C, (C,))
    assert partition.leader_epoch == cluster.record.leader_epoch - 1, "later"
    job.run()
    partition.as_follower.finish_cut(job)
    assert partition.leads_at(cluster.record.leader_epoch)
    assert (partition.log_end_offset, partition.epochs.latest_epoch) == (2, cluster.record.leader_epoch)


def test_a_cut_waits_for_the_flush() -> None:
    cluster = Cluster((A, B))
    cluster[A].append("a")
    cluster.fetch(B, A)
    job = cluster[B].partition.begin_flush()
    assert job is not None
    called: list[int] = []
    cluster[B].partition.when_not_flushing(lambda: called.append(1))
    assert not called
    job.run()
    cluster[B].partition.flushed(job)
    assert called == [1]


def test_a_late_answer_changes_nothing() -> None:
    cluster = Cluster((A, B))
    cluster[A].append("a")
    answer = cluster.ask(B, A)
    cluster.elect(A, (A, B), B)
    assert cluster[B].partition.as_follower.take_answer(cluster.position, answer, NOW) == FollowerStep()
    assert cluster[B].values == []


# --- epochs of leaders and nodes


def test_messages_of_other_epochs_are_refused() -> None:
    cluster = Cluster((A, B))
    cluster.elect(A, (A, B), A)
    assert cluster.ask(B, A).error == ClusterErrorCode.FENCED_LEADER_EPOCH
    said = ReplicaProgress(cluster[A].partition.id, 0, 0, 0, 9)
    assert (
        cluster[A].partition.as_leader.replica_state(said, B, 1, NOW).error
        == ClusterErrorCode.UNKNOWN_LEADER_EPOCH
    )
    cluster.tell(B)
    assert cluster.ask(B, A).error == 0
    position = cluster.position
    stranger = cluster[A].partition.as_leader.fetch(position, 9, 1, NOW)
    assert stranger is not None
    assert stranger.error == ClusterErrorCode.NOT_REPLICA_FOR_PARTITION
    told = HeartbeatPartition(cluster[B].partition.id, 1, 5)
    assert not cluster[B].partition.as_follower.heartbeat(told, A), "that leadership is over"
    cluster.elect(B, (A, B), A)
    assert cluster[A].partition.as_leader.fetch(position, B, 1, NOW) is not None


def test_a_new_registration_of_a_node_begins_without_progress_and_an_old_one_is_fenced() -> None:
    cluster = Cluster((A, B))
    cluster.write("a")
    cluster[A].append("b")
    cluster[A].flush()
    cluster.fetch(B, A)
    cluster[B].flush()
    late = cluster[B].partition.as_follower.progress()
    assert late is not None
    cluster[B].epoch = 2
    cluster.report(B, A)
    assert cluster[A].offsets == (2, 1), "nothing is matched with this registration"
    assert (
        cluster[A].partition.as_leader.replica_state(late, B, 1, NOW).error
        == ClusterErrorCode.FENCED_NODE_EPOCH
    )
    cluster.follow(B, leader=A)
    assert cluster[A].offsets == (2, 2)


def test_older_records_of_the_metadata_change_nothing() -> None:
    cluster = Cluster((A, B))
    old = cluster.record
    cluster.tell(isr=(A,))
    cluster[A].partition.apply(old, A)
    cluster[A].append("a")
    cluster[A].flush()
    assert cluster[A].offsets == (1, 1), "B is not in sync any more"


# --- the log start, and compaction


def test_records_are_deleted_once_every_in_sync_replica_has_the_start() -> None:
    cluster = Cluster((A, B))
    cluster.write("a", "b", "c")
    answered: list[TidemillError | None] = []
    cluster[A].partition.delete_records(2)
    cluster[A].partition.as_leader.when_start_durable(2, answered.append)
    assert not answered
    cluster.fetch(B, A)
    assert cluster[B].partition.log_start_offset == 2
    assert not answered
    cluster.report(B, A)
    assert answered == [None]


def test_no_deletion_is_answered_while_a_replica_outside_of_the_set_can_be_elected() -> None:
    cluster = Cluster((A, B), min_isr=2)
    cluster.write("a", "b")
    cluster.tell(isr=(A,), elr=(B,))
    answered: list[TidemillError | None] = []
    cluster[A].partition.delete_records(1)
    cluster[A].partition.as_leader.when_start_durable(1, answered.append)
    assert not answered
    cluster.follow(B, leader=A)
    cluster.tell(isr=(A, B), elr=())
    assert answered == [None]


def test_nobody_joins_with_a_lower_log_start() -> None:
    cluster = Cluster((A, B), isr=(A,))
    cluster[A].append("a", "b")
    cluster[A].flush()
    cluster.follow(B, leader=A)
    cluster[A].partition.delete_records(1)
    assert cluster[A].partition.as_leader.next_proposal(cluster.now_ms) is None
    cluster.follow(B, leader=A)
    assert proposing(cluster).isr == (A, B)


def test_who_waits_for_the_start_hears_when_leadership_goes() -> None:
    cluster = Cluster((A, B))
    cluster.write("a")
    answered: list[TidemillError | None] = []
    cluster[A].partition.delete_records(1)
    cluster[A].partition.as_leader.when_start_durable(1, answered.append)
    cluster.elect(B, (A, B))
    assert [error.code for error in answered if error] == [ErrorCode.not_leader_or_follower]


def test_a_log_that_ends_below_the_leaders_start_begins_anew_there() -> None:
    cluster = Cluster((A, B, C), isr=(A, B))
    cluster.write("a", "b", "c")
    cluster[A].partition.delete_records(2)
    step = cluster.fetch(C, A)
    assert step == FollowerStep(start_anew_at=2)
    cluster[C].cut(step)
    cluster.follow(C, leader=A)
    assert (cluster[C].values, cluster[C].offsets) == (["c"], (3, 3))
    assert cluster[C].partition.log_start_offset == 2


def test_a_log_that_ends_where_tombstones_were_removed_is_built_again_once() -> None:
    cluster = Cluster((A, B, C), isr=(A, B))
    cluster[A].append("a")
    cluster.follow(C, leader=A)
    cluster.write("b", "c", "d")
    cluster.now_ms += TopicConfig().delete_retention_ms
    cluster[A].partition.local_log.first_dirty_offset = 3
    step = cluster.fetch(C, A)
    assert step == FollowerStep(start_anew_at=0)
    cluster[C].cut(step)
    assert cluster[C].values == []
    first = cluster.ask(C, A)
    assert (
        cluster[C].partition.as_follower.take_answer(cluster.position, first, cluster.now_ms)
        == FollowerStep()
    )
    cluster.follow(C, leader=A)
    assert cluster[C].values == ["a", "b", "c", "d"]


def test_a_copy_of_a_compacted_log_knows_what_was_removed_and_tells_it_when_it_leads() -> None:
    """B was away when a key was deleted. C has copied the log since, when the tombstone was gone."""
    cluster = Cluster((A, B, C), isr=(A,))
    cluster[A].append("a")
    cluster.follow(B, leader=A)
    cluster[A].append("b", "c", "d")
    cluster[A].flush()
    cluster[A].partition.local_log.first_dirty_offset = 3
    cluster.follow(C, leader=A)
    assert cluster[C].values == ["a", "b", "c", "d"]
    assert cluster[C].partition.compacted_offset == 3
    cluster.lose_power(C)
    assert cluster[C].values == ["a", "b", "c", "d"]
    assert cluster[C].partition.compacted_offset == 3, "also behind a crash"
    cluster.elect(C, (C,))
    assert cluster.fetch(B, C) == FollowerStep(start_anew_at=0)


def test_a_copy_that_was_interrupted_begins_anew() -> None:
    cluster = Cluster((A, B), isr=(A,))
    cluster[A].append("a", "b")
    cluster[A].flush()
    cluster[A].partition.local_log.first_dirty_offset = 2
    cluster.fetch(B, A)
    assert cluster[B].partition.compacted_offset == 2
    cluster.lose_power(B)
    assert (cluster[B].values, cluster[B].partition.compacted_offset) == ([], 0), "nothing was durable"
    cluster.tell()
    cluster.follow(B, leader=A)
    assert (cluster[B].values, cluster[B].partition.compacted_offset) == (["a", "b"], 2)


def test_a_follower_compacts_nothing_that_its_leader_wants_kept() -> None:
    cluster = Cluster((A, B))
    cluster[A].partition.retention_floor = lambda: 2
    assert cluster[B].partition._compaction_floor() == 0, "nothing is known yet"
    cluster.write("a", "b", "c")
    assert cluster[B].partition._compaction_floor() == 2
    cluster[B].partition.retention_floor = lambda: 1
    assert cluster[B].partition._compaction_floor() == 1
    assert cluster[B].partition.apply_retention(NOW * 10) == [], "the leader decides the log start"
