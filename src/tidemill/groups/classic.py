"""A classic consumer group as a state machine: requests and the time in, effects out.

::

    EMPTY -> PREPARING_REBALANCE -> COMPLETING_REBALANCE -> STABLE
      ^              |   ^                  |                 |
      +--------------+   +------------------+-----------------+         any -> DEAD

- PREPARING_REBALANCE collects joins. It ends when all members have joined again, or when time is up.
- COMPLETING_REBALANCE is a new generation whose leader has not yet sent the assignments.
- STABLE has assignments, and these are persisted. EMPTY has no members; that too is persisted.

The machine never awaits or reads a clock. Every request that must wait is known by an opaque token, and every
token gets exactly one reply. Records in the effects are already applied here, by ``apply``, which loading
uses as well; if they cannot be appended the caller goes back with ``restore``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tidemill.coordination.binary import MalformedBytes
from tidemill.errors import ErrorCode
from tidemill.groups.effects import Effects, GroupState, Turn
from tidemill.groups.messages import (
    GroupDescription,
    GroupListing,
    JoinReply,
    LeaveReply,
    LeftMember,
    MemberDescription,
    SyncReply,
)
from tidemill.groups.rebalance import RebalanceMachine
from tidemill.groups.records import GroupMetadataRecord
from tidemill.groups.roster import Member
from tidemill.groups.subscription import CONSUMER_PROTOCOL, parse_subscription

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tidemill.groups.messages import HeartbeatRequest, JoinRequest, LeavingMember, SyncRequest

__all__ = ("ClassicGroup",)


class ClassicGroup(RebalanceMachine):
    """One classic group. See the module's docstring for the states."""

    # -- JoinGroup -------------------------------------------------------------------------------------

    def join(self, request: JoinRequest, token: object, fresh_member_id: str, now_ms: int) -> Effects:
        """JoinGroup. ``fresh_member_id`` is for a request without an id; nobody may ever have had it."""
        turn = Turn(now_ms)
        member_id = request.member_id
        if not self._has_room_for(member_id):
            self._turn_away(turn, member_id)
            turn.reply(token, JoinReply(ErrorCode.group_max_size_reached))
        elif self.state is GroupState.DEAD:
            turn.reply(token, JoinReply(ErrorCode.coordinator_not_available, member_id))
        elif not self._supports(request):
            turn.reply(token, JoinReply(ErrorCode.inconsistent_group_protocol, member_id))
        elif not member_id:
            self._join_without_id(turn, request, token, fresh_member_id)
        elif member_id in self._pending_join and request.instance_id is None:
            self._add_member(turn, request, token, member_id)
        elif (error := self._check_member(member_id, request.instance_id)) is not ErrorCode.none:
            turn.reply(token, JoinReply(error, member_id))
        else:
            self._join_again(turn, request, token)
        return turn.effects()

    def _has_room_for(self, member_id: str) -> bool:
        if self.state in (GroupState.EMPTY, GroupState.DEAD):
            return True
        if self.state is GroupState.PREPARING_REBALANCE:
            # Counting those who wait turns away the last to come back, should the limit have been lowered.
            return member_id in self._joining or len(self._joining) < self.settings.max_size
        return member_id in self._roster or len(self._roster) < self.settings.max_size

    def _turn_away(self, turn: Turn, member_id: str) -> None:
        if member_id in self._pending_join:
            self._pending_join.discard(member_id)
            self._deadlines.pop(member_id, None)
        elif member_id in self._roster:
            self._drop(turn, member_id)
        else:
            return
        if not self._is_initial_rebalance:
            self._complete_if_all_joined(turn)

    def _supports(self, request: JoinRequest) -> bool:
        names = [protocol.name for protocol in request.protocols]
        if self.state is GroupState.EMPTY:
            return bool(request.protocol_type) and bool(names)
        return self.protocol_type == request.protocol_type and self._roster.supported_by_all(names)

    def _join_without_id(self, turn: Turn, request: JoinRequest, token: object, fresh_member_id: str) -> None:
        if request.instance_id is not None:
            if self._roster.static_member_id(request.instance_id) is not None:
                self._replace_static_member(turn, request, token, fresh_member_id)
            else:
                self._add_member(turn, request, token, fresh_member_id)
        elif request.must_know_member_id:
            # The client joins again with this id, so a client that gives up leaves no ghost behind.
            self._pending_join.add(fresh_member_id)
            self._set_deadline(fresh_member_id, turn.now_ms + request.session_timeout_ms)
            turn.reply(token, JoinReply(ErrorCode.member_id_required, fresh_member_id))
        else:
            self._add_member(turn, request, token, fresh_member_id)

    def _add_member(self, turn: Turn, request: JoinRequest, token: object, member_id: str) -> None:
        if not len(self._roster):
            self.protocol_type = request.protocol_type
        self._member_added_in_delay = self._member_added_in_delay or self._is_initial_rebalance
        self._pending_join.discard(member_id)
        self._roster.add(
            Member(
                member_id,
                request.instance_id,
                request.client_id,
                request.client_host,
                _rebalance_timeout_ms(request),
                request.session_timeout_ms,
                request.protocols,
                is_new=True,
            )
        )
        self._await_join(turn, member_id, token)
        # It cannot heartbeat before its first reply, and its client may be gone unnoticed.
        self._set_deadline(member_id, turn.now_ms + self.settings.new_member_join_timeout_ms)
        self._rebalance(turn)

    def _join_again(self, turn: Turn, request: JoinRequest, token: object) -> None:
        member = self._roster[request.member_id]
        unchanged = member.protocols == request.protocols
        leads = request.member_id == self._roster.leader
        # A stable group's leader joins again to force a rebalance: it saw a change outside the group.
        if (self.state is GroupState.COMPLETING_REBALANCE and unchanged) or (
            self.state is GroupState.STABLE and unchanged and not leads
        ):
            turn.reply(token, self._generation_reply(request.member_id))
            return
        self._update_member(member, request)
        self._await_join(turn, request.member_id, token)
        self._rebalance(turn)

    def _update_member(self, member: Member, request: JoinRequest) -> None:
        self._roster.update(
            replace(
                member,
                protocols=request.protocols,
                rebalance_timeout_ms=_rebalance_timeout_ms(request),
                session_timeout_ms=request.session_timeout_ms,
            )
        )

    # -- static members --------------------------------------------------------------------------------

    def _replace_static_member(self, turn: Turn, request: JoinRequest, token: object, new_id: str) -> None:
        """A static member came back under a new id. Whoever still uses the old id is fenced off.

        A stable group takes it back without a rebalance if nothing changes for the others: then its old
        assignment is still right.
        """
        assert request.instance_id is not None
        old_leader = self._roster.leader
        old = self._roster[self._roster.static_member_id(request.instance_id) or ""]
        self._answer_waiting(turn, old.member_id, ErrorCode.fenced_instance_id, told_member_id=old.member_id)
        self._deadlines.pop(old.member_id, None)
        if old.member_id in self._pending_sync:
            self._pending_sync.remove(old.member_id)
            self._pending_sync.add(new_id)
        self._update_member(self._roster.rename_static(request.instance_id, new_id), request)
        member = self._roster[new_id]
        self._restart_session(turn, member)
        if self.state is GroupState.STABLE and self._changes_nothing(old, member):
            assignments = {each.member_id: each.assignment for each in self._roster.members}
            self._persist(turn, self.persisted_view(self.state_since_ms, assignments))
            turn.reply(token, self._resume_reply(request, new_id, old_leader))
        else:
            self._await_join(turn, new_id, token)
            self._rebalance(turn)

    def _changes_nothing(self, old: Member, member: Member) -> bool:
        """Whether the protocol stays, and with it the subscription where that can be read."""
        if self._roster.select_protocol() != self.protocol_name:
            return False
        if self.protocol_type != CONSUMER_PROTOCOL:
            return True
        return _topics(old, self.protocol_name) == _topics(member, self.protocol_name)

    def _resume_reply(self, request: JoinRequest, member_id: str, old_leader: str | None) -> JoinReply:
        reply = self._generation_reply(member_id)
        if request.can_skip_assignment:
            return replace(reply, skip_assignment=member_id == self._roster.leader)
        # An older client that leads would assign anew; told of the former leader, it only syncs.
        return replace(reply, leader=old_leader or "", members=())

    # -- SyncGroup, Heartbeat, LeaveGroup --------------------------------------------------------------

    def sync(self, request: SyncRequest, token: object, now_ms: int) -> Effects:
        """SyncGroup: the leader brings the assignments, everybody else waits for them."""
        turn = Turn(now_ms)
        member_id = request.member_id
        error = self._check_sync(request)
        if error is not ErrorCode.none:
            turn.reply(token, SyncReply(error))
            return turn.effects()
        self._pending_sync.discard(member_id)
        if not self._pending_sync:
            self._sync_deadline_ms = None
        if self.state is GroupState.STABLE:
            turn.reply(token, self._assignment_reply(member_id))
            return turn.effects()
        self._await_sync(turn, member_id, token)
        if member_id == self._roster.leader:
            self._complete_sync(turn, request.assignments)
        return turn.effects()

    def _check_sync(self, request: SyncRequest) -> ErrorCode:
        error = self._check_generation(request.member_id, request.instance_id, request.generation)
        if error is not ErrorCode.none:
            return error
        if request.protocol_type not in (None, self.protocol_type):
            return ErrorCode.inconsistent_group_protocol
        if request.protocol_name not in (None, self.protocol_name):
            return ErrorCode.inconsistent_group_protocol
        if self.state is GroupState.PREPARING_REBALANCE:
            return ErrorCode.rebalance_in_progress
        return ErrorCode.none

    def heartbeat(self, request: HeartbeatRequest, now_ms: int) -> ErrorCode:
        """Heartbeat: keeps the session alive and tells of a rebalance."""
        error = self._check_generation(request.member_id, request.instance_id, request.generation)
        if error is not ErrorCode.none:
            return error
        self.touch(request.member_id, now_ms)
        if self.state is GroupState.PREPARING_REBALANCE:
            return ErrorCode.rebalance_in_progress
        return ErrorCode.none

    def touch(self, member_id: str, now_ms: int) -> None:
        """The member showed that it is alive."""
        self._restart_session(Turn(now_ms), self._roster[member_id])

    def leave(self, leaving: Sequence[LeavingMember], now_ms: int) -> tuple[LeaveReply, Effects]:
        """LeaveGroup for several members at once: one rebalance for all of them."""
        turn = Turn(now_ms)
        if self.state is GroupState.DEAD:
            return LeaveReply(ErrorCode.coordinator_not_available), turn.effects()
        left = tuple(
            LeftMember(member.member_id, member.instance_id, self._remove(turn, member)) for member in leaving
        )
        anybody_left = any(member.error is ErrorCode.none for member in left)
        if anybody_left and self.state is not GroupState.EMPTY:
            self._rebalance(turn)
        return LeaveReply(members=left), turn.effects()

    def _remove(self, turn: Turn, leaving: LeavingMember) -> ErrorCode:
        member_id: str | None = leaving.member_id
        if not member_id:
            if leaving.instance_id is not None:
                member_id = self._roster.static_member_id(leaving.instance_id)
            if not member_id:
                return ErrorCode.unknown_member_id
        elif member_id in self._pending_join:
            self._pending_join.discard(member_id)
            self._deadlines.pop(member_id, None)
            return ErrorCode.none
        elif (error := self._check_member(member_id, leaving.instance_id)) is not ErrorCode.none:
            return error
        self._drop(turn, member_id)
        return ErrorCode.none

    # -- checks ----------------------------------------------------------------------------------------

    def _check_member(self, member_id: str, instance_id: str | None) -> ErrorCode:
        if instance_id is not None:
            holder = self._roster.static_member_id(instance_id)
            if holder is None:
                return ErrorCode.unknown_member_id
            if holder != member_id:
                return ErrorCode.fenced_instance_id
        return ErrorCode.none if member_id in self._roster else ErrorCode.unknown_member_id

    def _check_generation(self, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        if self.state is GroupState.DEAD:
            return ErrorCode.coordinator_not_available
        error = self._check_member(member_id, instance_id)
        if error is ErrorCode.none and generation != self.generation:
            return ErrorCode.illegal_generation
        return error

    def check_commit(self, member_id: str, instance_id: str | None, generation: int) -> ErrorCode:
        """Whether this member, or a client outside the group (generation -1), may commit offsets."""
        if self.state is GroupState.EMPTY and generation < 0:
            return ErrorCode.none
        error = self._check_generation(member_id, instance_id, generation)
        if error is ErrorCode.none and self.state is GroupState.COMPLETING_REBALANCE:
            # The member knows the new generation, so it is about to sync: it can commit after that.
            return ErrorCode.rebalance_in_progress
        return error

    def check_transactional_commit(
        self, member_id: str, instance_id: str | None, generation: int
    ) -> ErrorCode:
        """Whether offsets may be committed in a transaction. Old producers do not say for which member."""
        anonymous = generation < 0 and not member_id and instance_id is None
        if anonymous or (self.state is GroupState.EMPTY and generation < 0):
            return ErrorCode.none
        return self._check_generation(member_id, instance_id, generation)

    def is_subscribed_to(self, topic: str) -> bool:
        """Whether members consume ``topic``. If their subscription cannot be read, they might."""
        if self.subscribed_topics is None:
            return self.protocol_type == CONSUMER_PROTOCOL
        return topic in self.subscribed_topics

    @property
    def members(self) -> tuple[Member, ...]:
        """All members, oldest first."""
        return self._roster.members

    @property
    def is_empty(self) -> bool:
        """No members."""
        return self.state is GroupState.EMPTY

    @property
    def is_idle(self) -> bool:
        """No members, and none announced."""
        return self.state is GroupState.EMPTY and not self._pending_join

    def expiry_base_ms(self, committed_at_ms: int) -> int | None:
        """From when on an offset committed at that time grows old; None while it must not."""
        if self.protocol_type is None:
            return committed_at_ms
        if self.state is GroupState.EMPTY:
            return committed_at_ms if self.state_since_ms is None else self.state_since_ms
        if self.state is GroupState.STABLE and self.subscribed_topics is not None:
            return committed_at_ms
        return None

    def tombstones(self) -> list[GroupMetadataRecord]:
        """The records that delete the group."""
        return [GroupMetadataRecord(self.group_id, None)]

    # -- views -----------------------------------------------------------------------------------------

    def listing(self) -> GroupListing:
        """The group's line in ListGroups."""
        return GroupListing(self.group_id, self.protocol_type or "", str(self.state))

    def describe(self) -> GroupDescription:
        """The group in DescribeGroups."""
        stable = self.state is GroupState.STABLE
        members = tuple(
            MemberDescription(
                member.member_id,
                member.instance_id,
                member.client_id,
                member.client_host,
                (member.metadata(self.protocol_name) or b"") if stable else b"",
                member.assignment,
            )
            for member in self._roster.members
        )
        return GroupDescription(
            self.group_id,
            state=str(self.state),
            protocol_type=self.protocol_type or "",
            protocol_name=(self.protocol_name or "") if stable else "",
            members=members,
        )


def _rebalance_timeout_ms(request: JoinRequest) -> int:
    """The oldest requests have no rebalance timeout; the session timeout stands in for it."""
    return request.rebalance_timeout_ms if request.rebalance_timeout_ms >= 0 else request.session_timeout_ms


def _topics(member: Member, protocol_name: str | None) -> frozenset[str] | None:
    try:
        return parse_subscription(member.metadata(protocol_name) or b"")
    except MalformedBytes:
        return None
