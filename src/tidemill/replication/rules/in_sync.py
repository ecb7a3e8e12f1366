"""The in-sync set of a partition as its leader keeps it: the followers' progress, and who joins or leaves.

Pure. The rules:

- What a follower counts for is the least of what it says is durable and of the offset up to which its log was
  found to be a part of the leader's. Neither is known at first, nor behind a restart of the follower's node.
- The committed in-sync set, and every member that was proposed and may have been committed, hold the high
  watermark back. Proposed members do not count as members when the set is compared with ``min_isr``.
- A member that leaves counts until the metadata says that it has left.
- Nothing is committed while the committed set is smaller than ``min_isr``, and no deletion is answered:
  replicas outside of the set can be elected then.
- Who joins has everything that may be committed, and has deleted what the leader has deleted.
- One proposal at a time. Each names the partition epoch that it was made from; the metadata takes none that
  was made from an older one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from tidemill.replication.rules.assignment import PartitionAssignment

__all__ = (
    "REPLICA_LAG_MS",
    "SUSPECTED_LAG_MS",
    "FollowerProgress",
    "InSyncReplicas",
    "IsrProposal",
    "StaleNodeEpoch",
)

#: A member that was not caught up for this long leaves the in-sync set, unless a setting says otherwise.
REPLICA_LAG_MS = 10_000
#: The same for a member that is suspected to be dead.
SUSPECTED_LAG_MS = 3_000


class StaleNodeEpoch(Exception):
    """A message was sent under an earlier registration of its node."""


class IsrProposal(NamedTuple):
    """A change of the in-sync set that the leader asks the metadata for.

    Taken only while the record is at ``leader_epoch`` and ``partition_epoch``, and if each added node is
    still registered as in ``node_epochs``. A proposal that is taken raises the partition epoch, also if it
    names the set that is there already: that is how a leader ends a proposal of unknown outcome.
    """

    isr: tuple[int, ...]
    #: The registration of each member, but for the leader, as it last spoke to the leader.
    node_epochs: dict[int, int]
    leader_epoch: int
    partition_epoch: int


@dataclass(slots=True)
class FollowerProgress:
    """How far a follower is, as it has told this leader in this epoch; -1 for what is not known.

    Attributes:
        matched_end: Its log up to here is a part of the leader's.
        durable: Everything below it is on its disk.
        log_start: The log start that is durable there.
        heard_ms: When it last fetched or reported.
        caught_up_ms: The last time at which it had everything that the leader had.
    """

    node_epoch: int = -1
    matched_end: int = -1
    durable: int = -1
    log_start: int = -1
    heard_ms: int | None = None
    caught_up_ms: int | None = None
    #: The leader's log end at ``mark_ms``: who reaches it was caught up then.
    mark_end: int = 0
    mark_ms: int | None = None

    @property
    def counts_to(self) -> int:
        """The offset that this follower counts for."""
        return min(self.durable, self.matched_end)

    def note_time(self, now_ms: int, log_end: int) -> None:
        """Note that the follower has spoken, and how far it was caught up."""
        self.heard_ms = now_ms
        reached = self.counts_to
        if reached >= log_end:
            self.caught_up_ms = now_ms
        if self.mark_ms is None or reached >= self.mark_end:
            if self.mark_ms is not None:
                self.caught_up_ms = max(self.caught_up_ms or 0, self.mark_ms)
            self.mark_end, self.mark_ms = log_end, now_ms


class InSyncReplicas:
    """The followers of a partition that this node leads, in one leader epoch."""

    __slots__ = ("_counted", "_proposal", "_uncertain", "assignment", "followers", "has_enough")

    def __init__(self, assignment: PartitionAssignment) -> None:
        self.assignment = assignment
        self.followers: dict[int, FollowerProgress] = {}
        #: The proposal that waits for its outcome.
        self._proposal: IsrProposal | None = None
        #: Additions of proposals at this partition epoch whose outcome nobody knows.
        self._uncertain: frozenset[int] = frozenset()
        #: Those who hold the high watermark back.
        self._counted: tuple[FollowerProgress, ...] = ()
        #: Whether the committed set is large enough to commit anything.
        self.has_enough = False
        self._take(assignment)

    def _take(self, assignment: PartitionAssignment) -> None:
        self.assignment = assignment
        members = {*assignment.replicas, *assignment.isr} - {assignment.leader}
        self.followers = {node: self.followers.get(node) or FollowerProgress() for node in sorted(members)}
        self.has_enough = len(assignment.isr) >= assignment.min_isr
        self._recount()

    def _recount(self) -> None:
        self._counted = tuple(self.followers[node] for node in sorted(self.holding_back()))

    def holding_back(self) -> set[int]:
        """The followers that hold the high watermark back: committed members, and proposed ones."""
        assignment = self.assignment
        return ({*assignment.isr, *self.proposed_additions()} & set(self.followers)) - {assignment.leader}

    def proposed_additions(self) -> frozenset[int]:
        """Nodes outside of the committed set that may have become members without this leader's knowing."""
        if self._proposal is None:
            return self._uncertain
        return self._uncertain | (frozenset(self._proposal.isr) - frozenset(self.assignment.isr))

    def electable(self) -> frozenset[int]:
        """The followers that the metadata may make the leader, by any record that it can have by now.

        A member joins by a proposal of this leader only, so nobody else can have been added meanwhile.
        """
        assignment = self.assignment
        known = {*assignment.isr, *assignment.elr, *self.proposed_additions()}
        return frozenset(known - {assignment.leader})

    def least(self, own_durable: int) -> int | None:
        """The offset up to which all replicas that count are durable; None while nothing may be committed."""
        if not self.has_enough:
            return None
        reached = own_durable
        for follower in self._counted:
            reached = min(reached, follower.counts_to)
        return reached

    def least_log_start(self, own_log_start: int) -> int:
        """The log start that is durable on this leader and on every replica that could be elected; or -1.

        While the set is too small, replicas outside of it can be elected, too.
        """
        if not self.has_enough:
            return -1
        return min([own_log_start, *(follower.log_start for follower in self._counted)])

    # --- what followers say

    def fetched(
        self, node_id: int, node_epoch: int, offset: int, durable: int, now_ms: int, log_end: int
    ) -> None:
        """A follower asks for ``offset``, and its log below is a part of this leader's."""
        follower = self._follower(node_id, node_epoch)
        follower.matched_end = offset
        follower.durable = max(follower.durable, durable)
        follower.note_time(now_ms, log_end)

    def reported(
        self, node_id: int, node_epoch: int, durable: int, log_start: int, now_ms: int, log_end: int
    ) -> None:
        """A follower says how far it is durable. A report that is older than another changes nothing."""
        follower = self._follower(node_id, node_epoch)
        follower.durable = max(follower.durable, durable)
        follower.log_start = max(follower.log_start, log_start)
        follower.note_time(now_ms, log_end)

    def _follower(self, node_id: int, node_epoch: int) -> FollowerProgress:
        """The progress of a replica of this partition; it begins anew with a new registration."""
        follower = self.followers[node_id]
        if node_epoch < follower.node_epoch:
            raise StaleNodeEpoch
        if node_epoch > follower.node_epoch:
            first = follower.node_epoch < 0
            follower = FollowerProgress(node_epoch, caught_up_ms=follower.caught_up_ms if first else None)
            self.followers[node_id] = follower
            self._recount()
        return follower

    # --- who is in sync

    def is_complete(self, log_end: int) -> bool:
        """Whether all replicas are members, no proposal is open, and all have everything: nobody moves."""
        if len(self._counted) != len(self.followers) or self._proposal is not None or self._uncertain:
            return False
        return all(follower.counts_to >= log_end for follower in self._counted)

    def proposal(
        self,
        now_ms: int,
        *,
        log_end: int,
        high_watermark: int,
        epoch_start_offset: int,
        log_start: int,
        suspected: Collection[int] = (),
        lag_ms: int = REPLICA_LAG_MS,
    ) -> IsrProposal | None:
        """The in-sync set as it should be; None if it is so, or if a proposal waits for its outcome.

        A member that has not caught up for ``lag_ms`` leaves, and does not come back before it has; one that
        is suspected leaves sooner.
        """
        if self._proposal is not None:
            return None
        required = max(high_watermark, epoch_start_offset)
        committed, uncertain = self.assignment.isr, self._uncertain
        wanted = {self.assignment.leader}
        for node, follower in self.followers.items():
            may_lag_ms = min(SUSPECTED_LAG_MS, lag_ms) if node in suspected else lag_ms
            if node in committed:
                if self._is_caught_up(follower, now_ms, log_end, may_lag_ms):
                    wanted.add(node)
            elif (
                node not in suspected
                and self._would_stay(follower, now_ms, log_end, lag_ms)
                and self._can_join(follower, now_ms, required, log_start)
            ):
                wanted.add(node)
        if wanted == set(committed) and not uncertain:
            return None
        order = [*self.assignment.replicas, *committed]
        isr = tuple(sorted(wanted, key=order.index))
        epochs = {node: follower.node_epoch for node, follower in self.followers.items() if node in wanted}
        return IsrProposal(isr, epochs, self.assignment.leader_epoch, self.assignment.partition_epoch)

    @staticmethod
    def _is_caught_up(follower: FollowerProgress, now_ms: int, log_end: int, lag_ms: int) -> bool:
        if follower.counts_to >= log_end:
            return True
        if follower.caught_up_ms is None:
            # Nothing is known yet of this member: its time begins now.
            follower.caught_up_ms = now_ms
        return now_ms - follower.caught_up_ms <= lag_ms

    @staticmethod
    def _would_stay(follower: FollowerProgress, now_ms: int, log_end: int, lag_ms: int) -> bool:
        """Whether a follower would not have to leave again at once.

        One whose disk is full, for instance, would: the high watermark waits for a set that is large enough.
        """
        if follower.counts_to >= log_end:
            return True
        return follower.caught_up_ms is not None and now_ms - follower.caught_up_ms <= lag_ms

    @staticmethod
    def _can_join(follower: FollowerProgress, now_ms: int, required: int, log_start: int) -> bool:
        is_there = follower.heard_ms is not None and now_ms - follower.heard_ms <= SUSPECTED_LAG_MS
        # With a lower log start, deleted records would come back once it leads.
        return is_there and follower.counts_to >= required and follower.log_start >= log_start

    def proposed(self, proposal: IsrProposal) -> bool:
        """Note that ``proposal`` is on its way. False if it is of an older record, and must not be sent."""
        if proposal.partition_epoch != self.assignment.partition_epoch or self._proposal is not None:
            return False
        self._proposal = proposal
        self._recount()
        return True

    def proposal_ended(self, proposal: IsrProposal, *, refused: bool) -> bool:
        """End the proposal. ``refused``: it was not accepted and never will be; else its outcome is unknown.

        The members that it adds count on if the outcome is not known, until a newer record says who is in
        sync. True if the high watermark may move.
        """
        if self._proposal is not proposal:
            return False  # A newer record has come meanwhile.
        self._proposal = None
        if not refused:
            self._uncertain |= frozenset(proposal.isr) - frozenset(self.assignment.isr)
        self._recount()
        return refused

    def committed(self, assignment: PartitionAssignment) -> bool:
        """The metadata has a newer record at this leader epoch. False if it is not newer."""
        if assignment.partition_epoch <= self.assignment.partition_epoch:
            return False
        self._proposal, self._uncertain = None, frozenset()
        self._take(assignment)
        return True
