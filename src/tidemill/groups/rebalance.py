"""The inside of a classic group: its state, its deadlines, and how a rebalance starts and ends.

``ClassicGroup`` (classic.py) is the door for requests; this module is what requests, time and loading share.
See there for the states. Invariants, checked by ``validate_state``: joins wait only while a rebalance is
prepared; syncs wait only while it completes; every member has a session deadline or a waiting request; the
rebalance has a deadline exactly while it is prepared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tidemill.coordination.binary import MalformedBytes
from tidemill.errors import ErrorCode
from tidemill.groups.effects import Effects, GroupState, Turn
from tidemill.groups.messages import JoinProtocol, JoinReply, SyncReply
from tidemill.groups.records import GroupMetadata, StoredMember
from tidemill.groups.roster import Member, Roster
from tidemill.groups.subscription import CONSUMER_PROTOCOL, parse_subscription

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tidemill.groups.settings import GroupSettings

__all__ = ("Checkpoint", "RebalanceMachine")

_LARGEST_GENERATION = 0x7FFFFFFF
_POSTPONE_MIN_MS = 1_000

Checkpoint = dict[str, object]


class RebalanceMachine:
    """State, deadlines and rebalances of one classic group."""

    def __init__(self, group_id: str, settings: GroupSettings, now_ms: int) -> None:
        self.group_id = group_id
        self.settings = settings
        self.state = GroupState.EMPTY
        self.state_since_ms: int | None = now_ms
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol_name: str | None = None
        self.subscribed_topics: frozenset[str] | None = None
        self._roster = Roster()
        self._joining: dict[str, object] = {}
        self._syncing: dict[str, object] = {}
        self._pending_join: set[str] = set()
        self._pending_sync: set[str] = set()
        self._deadlines: dict[str, int] = {}
        self._earliest_deadline_ms: int | None = None
        self._join_deadline_ms: int | None = None
        self._sync_deadline_ms: int | None = None
        self._is_initial_rebalance = False
        self._initial_delay_ms = 0
        self._initial_delay_left_ms = 0
        self._member_added_in_delay = False

    # -- undo, load, persist ---------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """Everything there is to know, for ``restore``. Costs a shallow copy of the member tables."""
        return {
            name: value.copy() if isinstance(value, dict | set | Roster) else value
            for name, value in vars(self).items()
        }

    def restore(self, checkpoint: Checkpoint) -> None:
        """Become again what the group was at ``checkpoint``, which must not be used a second time."""
        vars(self).update(checkpoint)

    def apply(self, stored: GroupMetadata) -> None:
        """Make the group what a record says. Live operation and loading both come through here.

        A record holds each member's metadata for the chosen protocol only; a member that is known already
        keeps its other protocols, and its waiting requests.
        """
        members = []
        for entry in stored.members:
            known = self._roster.get(entry.member_id)
            protocols: tuple[JoinProtocol, ...] = (
                JoinProtocol(stored.protocol_name or "", entry.subscription),
            )
            if known is not None and known.metadata(stored.protocol_name) == entry.subscription:
                protocols = known.protocols
            members.append(
                Member(
                    entry.member_id,
                    entry.instance_id,
                    entry.client_id,
                    entry.client_host,
                    entry.rebalance_timeout_ms,
                    entry.session_timeout_ms,
                    protocols,
                    entry.assignment,
                )
            )
        self._roster = Roster(members, leader=stored.leader)
        self.state = GroupState.STABLE if members else GroupState.EMPTY
        self.state_since_ms = stored.state_since_ms
        self.generation = stored.generation
        self.protocol_type = stored.protocol_type or None
        self.protocol_name = stored.protocol_name
        self.subscribed_topics = self._read_subscriptions()

    def persisted_view(self, since_ms: int | None, assignments: Mapping[str, bytes]) -> GroupMetadata:
        """The record that stands for the current generation with these assignments."""
        return GroupMetadata(
            self.protocol_type or "",
            self.generation,
            self.protocol_name,
            self._roster.leader,
            since_ms,
            tuple(
                StoredMember(
                    member.member_id,
                    member.instance_id,
                    member.client_id,
                    member.client_host,
                    member.rebalance_timeout_ms,
                    member.session_timeout_ms,
                    member.metadata(self.protocol_name) or b"",
                    assignments.get(member.member_id, b""),
                )
                for member in self._roster.members
            ),
        )

    def start(self, now_ms: int) -> None:
        """Begin to serve after loading: sessions start anew; a group that is too large now rebalances."""
        turn = Turn(now_ms)
        for member in self._roster.members:
            self._restart_session(turn, member)
        if len(self._roster) > self.settings.max_size:
            self._prepare_rebalance(turn)

    def adopt(
        self,
        members: Iterable[Member],
        generation: int,
        assignments: Mapping[str, bytes],
        now_ms: int,
        *,
        rebalance: bool,
    ) -> GroupMetadata:
        """Begin to serve members that come from a consumer group; returns the record that stands for that.

        ``rebalance``: they must join again, because their assignments do not cover everything any more.
        """
        self._roster = Roster(members)
        self.generation, self.protocol_type = generation, CONSUMER_PROTOCOL
        self.protocol_name = self._roster.select_protocol()
        stored = self.persisted_view(now_ms, assignments)
        self.apply(stored)
        self.start(now_ms)
        if rebalance and self.state is GroupState.STABLE:
            self._prepare_rebalance(Turn(now_ms))
        return stored

    def die(self, error: ErrorCode) -> Effects:
        """Stop for good; whoever waits is told ``error``."""
        turn = Turn(0)
        for member_id, token in self._joining.items():
            turn.reply(token, JoinReply(error, member_id))
        for token in self._syncing.values():
            turn.reply(token, SyncReply(error))
        self._joining.clear()
        self._syncing.clear()
        self._pending_sync.clear()
        self._deadlines.clear()
        self._earliest_deadline_ms = self._join_deadline_ms = self._sync_deadline_ms = None
        self.state = GroupState.DEAD
        return turn.effects()

    def _persist(self, turn: Turn, stored: GroupMetadata) -> None:
        self.apply(stored)
        turn.records.append(stored)

    def _read_subscriptions(self) -> frozenset[str] | None:
        if self.protocol_type != CONSUMER_PROTOCOL:
            return None
        try:
            return frozenset[str]().union(
                *(parse_subscription(m.metadata(self.protocol_name) or b"") for m in self._roster.members)
            )
        except MalformedBytes:
            return None

    # -- time ------------------------------------------------------------------------------------------

    def next_deadline_ms(self) -> int | None:
        """When ``tick`` is needed next. May be early, because heartbeats do not recompute it; never late."""
        times = (self._earliest_deadline_ms, self._join_deadline_ms, self._sync_deadline_ms)
        return min((time for time in times if time is not None), default=None)

    def tick(self, now_ms: int) -> Effects:
        """Do what is due at ``now_ms``."""
        turn = Turn(now_ms)
        for member_id, deadline_ms in tuple(self._deadlines.items()):
            # A session that was restarted by an earlier step of this tick is not over.
            if deadline_ms <= now_ms and self._deadlines.get(member_id) == deadline_ms:
                self._expire_session(turn, member_id)
        if self._join_deadline_ms is not None and self._join_deadline_ms <= now_ms:
            self._end_join_wait(turn)
        if self._sync_deadline_ms is not None and self._sync_deadline_ms <= now_ms:
            for member_id in tuple(self._pending_sync):
                self._drop(turn, member_id)
            self._prepare_rebalance(turn)
        self._earliest_deadline_ms = min(self._deadlines.values(), default=None)
        return turn.effects()

    def _set_deadline(self, member_id: str, deadline_ms: int) -> None:
        self._deadlines[member_id] = deadline_ms
        if self._earliest_deadline_ms is None or deadline_ms < self._earliest_deadline_ms:
            self._earliest_deadline_ms = deadline_ms

    def _restart_session(self, turn: Turn, member: Member) -> None:
        self._set_deadline(member.member_id, turn.now_ms + member.session_timeout_ms)

    def _expire_session(self, turn: Turn, member_id: str) -> None:
        del self._deadlines[member_id]
        if member_id in self._pending_join:
            self._pending_join.discard(member_id)
            self._complete_if_all_joined(turn)
            return
        waits = member_id in self._joining or member_id in self._syncing
        if waits and not self._roster[member_id].is_new:
            return  # A member whose request waits here cannot heartbeat; its session restarts with the reply.
        self._drop(turn, member_id)
        if self.state in (GroupState.STABLE, GroupState.COMPLETING_REBALANCE):
            self._prepare_rebalance(turn)
        else:
            self._complete_if_all_joined(turn)

    def _end_join_wait(self, turn: Turn) -> None:
        if self._is_initial_rebalance and self._member_added_in_delay and self._initial_delay_left_ms:
            delay_ms = min(self.settings.initial_rebalance_delay_ms, self._initial_delay_left_ms)
            self._member_added_in_delay = False
            self._initial_delay_left_ms = max(self._initial_delay_left_ms - self._initial_delay_ms, 0)
            self._initial_delay_ms = delay_ms
            self._join_deadline_ms = turn.now_ms + delay_ms
        else:
            self._complete_join(turn)

    # -- rebalance -------------------------------------------------------------------------------------

    def _rebalance(self, turn: Turn) -> None:
        """Start a rebalance or, if one is being prepared, see whether it can go on."""
        if self.state is not GroupState.PREPARING_REBALANCE:
            self._prepare_rebalance(turn)
        elif not self._is_initial_rebalance:
            self._complete_if_all_joined(turn)

    def _prepare_rebalance(self, turn: Turn) -> None:
        if self.state is GroupState.COMPLETING_REBALANCE:
            for member in self._roster.members:
                self._roster.update(replace(member, assignment=b""))
            self._answer_syncs(turn, ErrorCode.rebalance_in_progress)
        self._pending_sync.clear()
        self._sync_deadline_ms = None
        self._is_initial_rebalance = self.state is GroupState.EMPTY
        self._enter(turn, GroupState.PREPARING_REBALANCE)
        if self._is_initial_rebalance:
            delay_ms = self.settings.initial_rebalance_delay_ms
            self._member_added_in_delay = False
            self._initial_delay_ms = delay_ms
            self._initial_delay_left_ms = max(self._roster.rebalance_timeout_ms - delay_ms, 0)
            self._join_deadline_ms = turn.now_ms + delay_ms
        else:
            self._join_deadline_ms = turn.now_ms + self._roster.rebalance_timeout_ms
            self._complete_if_all_joined(turn)

    def _complete_if_all_joined(self, turn: Turn) -> None:
        all_joined = len(self._joining) == len(self._roster) and not self._pending_join
        if self.state is GroupState.PREPARING_REBALANCE and all_joined:
            self._complete_join(turn)

    def _complete_join(self, turn: Turn) -> None:
        """Close the member list, begin the next generation and tell everybody who waits."""
        for member in self._roster.members:
            if member.member_id not in self._joining and member.instance_id is None:
                self._drop(turn, member.member_id)
        if len(self._roster) and not self._roster.elect_among(self._joining):
            # Only static members are left and none came back. Their sessions decide; look again later.
            self._join_deadline_ms = turn.now_ms + max(self._roster.rebalance_timeout_ms, _POSTPONE_MIN_MS)
            return
        self._join_deadline_ms = None
        self._is_initial_rebalance = False
        self.generation = (self.generation + 1) & _LARGEST_GENERATION
        if not len(self._roster):
            self.protocol_name = None
            self._persist(turn, self.persisted_view(turn.now_ms, {}))
            return
        self.protocol_name = self._roster.select_protocol()
        self.subscribed_topics = self._read_subscriptions()
        self._enter(turn, GroupState.COMPLETING_REBALANCE)
        self._sync_deadline_ms = turn.now_ms + self._roster.rebalance_timeout_ms
        for member in self._roster.members:
            self._roster.update(replace(member, is_new=False))
            self._restart_session(turn, member)
            self._pending_sync.add(member.member_id)
            if (token := self._joining.pop(member.member_id, None)) is not None:
                turn.reply(token, self._generation_reply(member.member_id))

    def _complete_sync(self, turn: Turn, assignments: Mapping[str, bytes]) -> None:
        """The leader has decided: persist the generation and give everybody who waits its part."""
        self._persist(turn, self.persisted_view(turn.now_ms, assignments))
        self._answer_syncs(turn, ErrorCode.none)

    def _generation_reply(self, member_id: str) -> JoinReply:
        """The current generation, as told to ``member_id``."""
        is_leader = member_id == self._roster.leader
        return JoinReply(
            ErrorCode.none,
            member_id,
            self.generation,
            self.protocol_type,
            self.protocol_name,
            self._roster.leader or "",
            members=self._roster.as_seen_by_leader(self.protocol_name) if is_leader else (),
        )

    def _assignment_reply(self, member_id: str) -> SyncReply:
        assignment = self._roster[member_id].assignment
        return SyncReply(ErrorCode.none, self.protocol_type, self.protocol_name, assignment)

    def _answer_syncs(self, turn: Turn, error: ErrorCode) -> None:
        for member_id, token in self._syncing.items():
            body = SyncReply(error) if error is not ErrorCode.none else self._assignment_reply(member_id)
            turn.reply(token, body)
            self._restart_session(turn, self._roster[member_id])
        self._syncing.clear()

    # -- members ---------------------------------------------------------------------------------------

    def _await_join(self, turn: Turn, member_id: str, token: object) -> None:
        """Park a JoinGroup. A member that asks again has given up on its earlier request."""
        if (earlier := self._joining.get(member_id)) is not None:
            turn.reply(earlier, JoinReply(ErrorCode.rebalance_in_progress, member_id))
        self._joining[member_id] = token

    def _await_sync(self, turn: Turn, member_id: str, token: object) -> None:
        if (earlier := self._syncing.get(member_id)) is not None:
            turn.reply(earlier, SyncReply(ErrorCode.rebalance_in_progress))
        self._syncing[member_id] = token

    def _drop(self, turn: Turn, member_id: str) -> None:
        """Remove a member and answer what it waits for."""
        self._answer_waiting(turn, member_id, ErrorCode.unknown_member_id, told_member_id="")
        self._roster.remove(member_id)
        self._pending_sync.discard(member_id)
        self._deadlines.pop(member_id, None)

    def _answer_waiting(self, turn: Turn, member_id: str, error: ErrorCode, told_member_id: str) -> None:
        if (token := self._joining.pop(member_id, None)) is not None:
            turn.reply(token, JoinReply(error, told_member_id))
        if (token := self._syncing.pop(member_id, None)) is not None:
            turn.reply(token, SyncReply(error))

    def _enter(self, turn: Turn, state: GroupState) -> None:
        self.state = state
        self.state_since_ms = turn.now_ms

    # -- invariants ------------------------------------------------------------------------------------

    def validate_state(self) -> None:
        """Raise AssertionError if an invariant is broken. For a group that serves (``start`` was called)."""
        state, members = self.state, {member.member_id for member in self._roster.members}
        self._roster.validate_state()
        preparing, completing = (
            state is GroupState.PREPARING_REBALANCE,
            state is GroupState.COMPLETING_REBALANCE,
        )
        in_generation = completing or state is GroupState.STABLE
        self._require(
            self._joining.keys() <= members and (preparing or not self._joining), "joins wait wrongly"
        )
        self._require(
            self._syncing.keys() <= members and (completing or not self._syncing), "syncs wait wrongly"
        )
        self._require(not self._pending_join & members, "a pending member is a member")
        self._require(self._pending_sync <= members, "a sync is expected from a stranger")
        self._require(in_generation or not self._pending_sync, "syncs are expected outside a generation")
        self._require(state is not GroupState.EMPTY or not members, "an empty group has members")
        self._require(not in_generation or bool(members), "a generation has no members")
        if in_generation:
            self._require(
                self._roster.supported_by_all([self.protocol_name or ""]), "a protocol is not shared"
            )
        self._require((self._join_deadline_ms is not None) == preparing, "the join deadline is wrong")
        self._require(
            (self._sync_deadline_ms is not None) == bool(self._pending_sync), "the sync deadline is wrong"
        )
        if state is not GroupState.DEAD:
            waiting = self._joining.keys() | self._syncing.keys()
            self._require(
                self._pending_join | (members - waiting) <= self._deadlines.keys(), "no session deadline"
            )
        self._require(self._deadlines.keys() <= members | self._pending_join, "a stranger has a deadline")
        earliest_ms = min(self._deadlines.values(), default=None)
        if earliest_ms is not None:
            self._require((self._earliest_deadline_ms or 0) <= earliest_ms, "the next deadline is late")

    def _require(self, holds: bool, broken: str) -> None:
        assert holds, f"group {self.group_id!r} in {self.state}: {broken}: {vars(self)}"
