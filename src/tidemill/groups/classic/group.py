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

Invariants: joins wait only while a rebalance is prepared; syncs wait only while it completes; every member
has a session deadline or a waiting request; the rebalance has a deadline exactly while it is prepared.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from tidemill.errors import ErrorCode, ProtocolError
from tidemill.groups.classic.roster import Member, Roster
from tidemill.groups.memory import GROUP_BYTES, MEMBER_BYTES
from tidemill.groups.messages import (
    GroupDescription,
    GroupListing,
    JoinProtocol,
    JoinReply,
    LeaveReply,
    LeftMember,
    MemberDescription,
    Reply,
    SyncReply,
)
from tidemill.groups.records import GroupMetadata, GroupMetadataRecord, StoredMember
from tidemill.wire.consumer_protocol import CONSUMER_PROTOCOL, parse_subscription

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tidemill.groups.messages import HeartbeatRequest, JoinRequest, LeavingMember, SyncRequest
    from tidemill.groups.settings import GroupSettings

__all__ = ("GROUP_METADATA_BYTES_MAX", "ClassicGroup", "Effects", "GroupState")

_LARGEST_GENERATION: Final = 0x7FFFFFFF
_POSTPONE_MIN_MS: Final = 1_000
#: Member ids of one group that were given out and have not joined yet; all may time out together.
_PENDING_JOIN_MAX: Final = 5_000

GroupCheckpoint = dict[str, object]
"""State of a group before an event, which ``ClassicGroup.restore`` brings back."""


#: Limit on the metadata of all members of one group together, for all protocols. The part that belongs to the
#: chosen protocol must fit into one record of the offsets topic.
GROUP_METADATA_BYTES_MAX: Final = 4 * 1024 * 1024


class GroupState(StrEnum):
    """The states of a classic group, by the names that Kafka shows."""

    EMPTY = "Empty"
    PREPARING_REBALANCE = "PreparingRebalance"
    COMPLETING_REBALANCE = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


@dataclass(frozen=True, slots=True)
class Effects:
    """What an event caused: replies to send and, before them, group metadata to persist."""

    replies: tuple[Reply, ...] = ()
    records: tuple[GroupMetadata, ...] = ()


class _Event:
    """An event that is being worked on: its time, and its effects so far."""

    def __init__(self, now_ms: int) -> None:
        self.now_ms = now_ms
        self._replies: list[Reply] = []
        self.records: list[GroupMetadata] = []

    def reply(self, token: object, body: JoinReply | SyncReply) -> None:
        """Answer the request that was given ``token``."""
        self._replies.append(Reply(token, body))

    def effects(self) -> Effects:
        """The replies and records that the event has caused."""
        return Effects(tuple(self._replies), tuple(self.records))


class ClassicGroup:
    """One classic group: a member list, a generation, and the rebalance that leads to the next one."""

    def __init__(self, group_id: str, settings: GroupSettings, now_ms: int) -> None:
        self.group_id = group_id
        self.settings = settings
        self.state = GroupState.EMPTY
        self.state_since_ms: int | None = now_ms
        self.generation = 0
        self.protocol_type: str | None = None
        self.protocol_name: str | None = None
        #: What the members subscribe to; None if that cannot be read from their metadata.
        self.subscribed_topics: frozenset[str] | None = None
        self._roster = Roster()
        #: JoinGroup requests that wait, by member. Only while a rebalance is prepared.
        self._joining: dict[str, object] = {}
        #: SyncGroup requests that wait, by member. Only while a rebalance completes.
        self._syncing: dict[str, object] = {}
        #: Member ids that were given out and have not joined yet. None of them is a member.
        self._pending_join: set[str] = set()
        #: The host of the client that joined last; empty if nobody has since the group was loaded.
        self._last_host = ""
        #: The members of the generation that have not asked for their assignment yet.
        self._pending_sync: set[str] = set()
        #: When sessions end. Members have one unless a request of theirs waits; announced ids have one, too.
        self._deadlines: dict[str, int] = {}
        #: A lower bound of these deadlines, so that ``tick`` is cheap while none is due.
        self._earliest_deadline_ms: int | None = None
        #: When the wait for joins ends. Set exactly while a rebalance is prepared.
        self._join_deadline_ms: int | None = None
        #: When the wait for syncs ends. Set exactly while any are pending.
        self._sync_deadline_ms: int | None = None
        #: Whether the rebalance is that of a group that was empty: it waits longer with each new member.
        self._is_initial_rebalance = False
        self._initial_delay_ms = 0
        self._initial_delay_left_ms = 0
        self._member_added_in_delay = False

    # -- undo, load, persist -----------------------------------------------------------------------------

    def checkpoint(self) -> GroupCheckpoint:
        """The whole state, for ``restore``. Costs a shallow copy of the member tables."""
        return {
            name: value.copy() if isinstance(value, dict | set | Roster) else value
            for name, value in vars(self).items()
        }

    def restore(self, checkpoint: GroupCheckpoint) -> None:
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
        event = _Event(now_ms)
        for member in self._roster.members:
            self._restart_session(event, member)
        if len(self._roster) > self.settings.max_size:
            self._prepare_rebalance(event)

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
            self._prepare_rebalance(_Event(now_ms))
        return stored

    @property
    def has_waiting(self) -> bool:
        """Whether requests wait in the group."""
        return bool(self._joining or self._syncing)

    def die(self, error: ErrorCode) -> tuple[Reply, ...]:
        """Stop for good; gives the replies that tell ``error`` to every waiting request."""
        event = _Event(0)
        for member_id, token in self._joining.items():
            event.reply(token, JoinReply(error, member_id))
        for token in self._syncing.values():
            event.reply(token, SyncReply(error))
        self._joining.clear()
        self._syncing.clear()
        self._pending_sync.clear()
        self._deadlines.clear()
        self._earliest_deadline_ms = self._join_deadline_ms = self._sync_deadline_ms = None
        self.state = GroupState.DEAD
        return event.effects().replies

    def _persist(self, event: _Event, stored: GroupMetadata) -> None:
        self.apply(stored)
        event.records.append(stored)

    def _read_subscriptions(self) -> frozenset[str] | None:
        if self.protocol_type != CONSUMER_PROTOCOL:
            return None
        try:
            return frozenset[str]().union(
                *(parse_subscription(m.metadata(self.protocol_name) or b"") for m in self._roster.members)
            )
        except ProtocolError:
            return None

    # -- JoinGroup ---------------------------------------------------------------------------------------

    def join(self, request: JoinRequest, token: object, fresh_member_id: str, now_ms: int) -> Effects:
        """JoinGroup. ``fresh_member_id``, which nobody has ever had, is for a request without an id."""
        event = _Event(now_ms)
        member_id = request.member_id
        self._last_host = request.client_host
        if not self._has_capacity_for(member_id) or not self._has_memory_for(request):
            self._turn_away(event, member_id)
            event.reply(token, JoinReply(ErrorCode.group_max_size_reached))
        elif self.state is GroupState.DEAD:
            event.reply(token, JoinReply(ErrorCode.coordinator_not_available, member_id))
        elif not self._supports(request):
            event.reply(token, JoinReply(ErrorCode.inconsistent_group_protocol, member_id))
        elif not member_id:
            self._join_without_id(event, request, token, fresh_member_id)
        elif member_id in self._pending_join and request.instance_id is None:
            self._add_member(event, request, token, member_id)
        elif (error := self._check_member(member_id, request.instance_id)) is not ErrorCode.none:
            event.reply(token, JoinReply(error, member_id))
        else:
            self._join_again(event, request, token)
        return event.effects()

    def _has_capacity_for(self, member_id: str) -> bool:
        if not member_id and len(self._pending_join) >= _PENDING_JOIN_MAX:
            return False
        if self.state in (GroupState.EMPTY, GroupState.DEAD):
            return True
        if self.state is GroupState.PREPARING_REBALANCE:
            # Only those who wait are counted: if the limit was lowered, the last ones to come back are
            # refused.
            return member_id in self._joining or len(self._joining) < self.settings.max_size
        return member_id in self._roster or len(self._roster) < self.settings.max_size

    def _has_memory_for(self, request: JoinRequest) -> bool:
        """Whether the metadata of all members stays within bounds with this request's."""
        known = self._roster.get(request.member_id)
        before = self._roster.metadata_bytes - (0 if known is None else known.metadata_bytes)
        return before + request.metadata_bytes <= GROUP_METADATA_BYTES_MAX

    @property
    def bytes_by_host(self) -> Mapping[str, int]:
        """Estimate of the group's memory by client host; empty if the group never had a member.

        The group itself and announced member ids count for the client that joined last.
        """
        sizes = self._roster.bytes_by_host.copy()
        if sizes or self._last_host or self.protocol_type is not None:
            own = GROUP_BYTES + len(self.group_id) + MEMBER_BYTES * len(self._pending_join)
            sizes[self._last_host] += own
        return sizes

    def said_bytes_of(self, member_id: str) -> int:
        """Estimate of the memory for a member's own data; 0 if there is no such member."""
        known = self._roster.get(member_id)
        if known is None:
            return MEMBER_BYTES if member_id in self._pending_join else 0
        return MEMBER_BYTES + known.metadata_bytes

    def client_host_of(self, member_id: str) -> str:
        """The host of a member's client; empty if there is no such member."""
        known = self._roster.get(member_id)
        return "" if known is None else known.client_host

    @property
    def assignment_bytes(self) -> int:
        """The size of the assignments of all members."""
        return sum(len(member.assignment) for member in self._roster.members)

    def _turn_away(self, event: _Event, member_id: str) -> None:
        if member_id in self._pending_join:
            self._pending_join.discard(member_id)
            self._deadlines.pop(member_id, None)
        elif member_id in self._roster:
            self._drop(event, member_id)
        else:
            return
        if not self._is_initial_rebalance:
            self._complete_if_all_joined(event)

    def _supports(self, request: JoinRequest) -> bool:
        names = [protocol.name for protocol in request.protocols]
        if self.state is GroupState.EMPTY:
            return bool(request.protocol_type) and bool(names)
        return self.protocol_type == request.protocol_type and self._roster.supported_by_all(names)

    def _join_without_id(
        self, event: _Event, request: JoinRequest, token: object, fresh_member_id: str
    ) -> None:
        if request.instance_id is not None:
            if self._roster.static_member_id(request.instance_id) is not None:
                self._replace_static_member(event, request, token, fresh_member_id)
            else:
                self._add_member(event, request, token, fresh_member_id)
        elif request.must_know_member_id:
            # The client joins again with this id, so a client that gives up leaves no member behind.
            self._pending_join.add(fresh_member_id)
            self._set_deadline(fresh_member_id, event.now_ms + request.session_timeout_ms)
            event.reply(token, JoinReply(ErrorCode.member_id_required, fresh_member_id))
        else:
            self._add_member(event, request, token, fresh_member_id)

    def _add_member(self, event: _Event, request: JoinRequest, token: object, member_id: str) -> None:
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
        self._await_join(event, member_id, token)
        # It cannot heartbeat before its first reply, and its client may be gone unnoticed.
        self._set_deadline(member_id, event.now_ms + self.settings.new_member_join_timeout_ms)
        self._rebalance(event)

    def _join_again(self, event: _Event, request: JoinRequest, token: object) -> None:
        member = self._roster[request.member_id]
        unchanged = member.protocols == request.protocols
        leads = request.member_id == self._roster.leader
        # A stable group's leader joins again to force a rebalance: it saw a change outside the group.
        if (self.state is GroupState.COMPLETING_REBALANCE and unchanged) or (
            self.state is GroupState.STABLE and unchanged and not leads
        ):
            event.reply(token, self._generation_reply(request.member_id))
            return
        self._update_member(member, request)
        self._await_join(event, request.member_id, token)
        self._rebalance(event)

    def _update_member(self, member: Member, request: JoinRequest) -> None:
        self._roster.update(
            replace(
                member,
                protocols=request.protocols,
                rebalance_timeout_ms=_rebalance_timeout_ms(request),
                session_timeout_ms=request.session_timeout_ms,
            )
        )

    # -- static members ----------------------------------------------------------------------------------

    def _replace_static_member(self, event: _Event, request: JoinRequest, token: object, new_id: str) -> None:
        """Replace a static member that came back under a new id; a client that uses the old id is fenced.

        A stable group takes it back without a rebalance if nothing changes for the others: then its old
        assignment is still right.
        """
        assert request.instance_id is not None
        old_leader = self._roster.leader
        old = self._roster[self._roster.static_member_id(request.instance_id) or ""]
        self._answer_waiting(event, old.member_id, ErrorCode.fenced_instance_id, told_member_id=old.member_id)
        self._deadlines.pop(old.member_id, None)
        if old.member_id in self._pending_sync:
            self._pending_sync.remove(old.member_id)
            self._pending_sync.add(new_id)
        self._update_member(self._roster.rename_static(request.instance_id, new_id), request)
        member = self._roster[new_id]
        self._restart_session(event, member)
        if self.state is GroupState.STABLE and self._changes_nothing(old, member):
            assignments = {each.member_id: each.assignment for each in self._roster.members}
            self._persist(event, self.persisted_view(self.state_since_ms, assignments))
            event.reply(token, self._resume_reply(request, new_id, old_leader))
        else:
            self._await_join(event, new_id, token)
            self._rebalance(event)

    def _changes_nothing(self, old: Member, member: Member) -> bool:
        """Whether the group's protocol, and the subscription where it can be read, stay the same."""
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

    # -- SyncGroup, Heartbeat, LeaveGroup ----------------------------------------------------------------

    def sync(self, request: SyncRequest, token: object, now_ms: int) -> Effects:
        """SyncGroup: the leader brings the assignments, everybody else waits for them."""
        event = _Event(now_ms)
        member_id = request.member_id
        error = self._check_sync(request)
        if error is not ErrorCode.none:
            event.reply(token, SyncReply(error))
            return event.effects()
        self._pending_sync.discard(member_id)
        if not self._pending_sync:
            self._sync_deadline_ms = None
        if self.state is GroupState.STABLE:
            event.reply(token, self._assignment_reply(member_id))
            return event.effects()
        self._await_sync(event, member_id, token)
        if member_id == self._roster.leader:
            self._complete_sync(event, request.assignments)
        return event.effects()

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
        """Restart the session of a member that showed that it is alive."""
        self._restart_session(_Event(now_ms), self._roster[member_id])

    def leave(self, leaving: Sequence[LeavingMember], now_ms: int) -> tuple[LeaveReply, Effects]:
        """LeaveGroup for several members at once: one rebalance for all of them."""
        event = _Event(now_ms)
        if self.state is GroupState.DEAD:
            return LeaveReply(ErrorCode.coordinator_not_available), event.effects()
        left = tuple(
            LeftMember(member.member_id, member.instance_id, self._remove(event, member))
            for member in leaving
        )
        anybody_left = any(member.error is ErrorCode.none for member in left)
        if anybody_left and self.state is not GroupState.EMPTY:
            self._rebalance(event)
        return LeaveReply(members=left), event.effects()

    def _remove(self, event: _Event, leaving: LeavingMember) -> ErrorCode:
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
        self._drop(event, member_id)
        return ErrorCode.none

    # -- rebalance ---------------------------------------------------------------------------------------

    def _rebalance(self, event: _Event) -> None:
        """Start a rebalance or, if one is being prepared, see whether it can go on."""
        if self.state is not GroupState.PREPARING_REBALANCE:
            self._prepare_rebalance(event)
        elif not self._is_initial_rebalance:
            self._complete_if_all_joined(event)

    def _prepare_rebalance(self, event: _Event) -> None:
        if self.state is GroupState.COMPLETING_REBALANCE:
            for member in self._roster.members:
                self._roster.update(replace(member, assignment=b""))
            self._answer_syncs(event, ErrorCode.rebalance_in_progress)
        self._pending_sync.clear()
        self._sync_deadline_ms = None
        self._is_initial_rebalance = self.state is GroupState.EMPTY
        self._enter(event, GroupState.PREPARING_REBALANCE)
        if self._is_initial_rebalance:
            delay_ms = self.settings.initial_rebalance_delay_ms
            self._member_added_in_delay = False
            self._initial_delay_ms = delay_ms
            self._initial_delay_left_ms = max(self._roster.rebalance_timeout_ms - delay_ms, 0)
            self._join_deadline_ms = event.now_ms + delay_ms
        else:
            self._join_deadline_ms = event.now_ms + self._roster.rebalance_timeout_ms
            self._complete_if_all_joined(event)

    def _complete_if_all_joined(self, event: _Event) -> None:
        all_joined = len(self._joining) == len(self._roster) and not self._pending_join
        if self.state is GroupState.PREPARING_REBALANCE and all_joined:
            self._complete_join(event)

    def _complete_join(self, event: _Event) -> None:
        """Close the member list, begin the next generation and tell everybody who waits."""
        for member in self._roster.members:
            if member.member_id not in self._joining and member.instance_id is None:
                self._drop(event, member.member_id)
        if len(self._roster) and not self._roster.elect_among(self._joining):
            # Only static members are left and none came back. Their sessions decide; look again later.
            self._join_deadline_ms = event.now_ms + max(self._roster.rebalance_timeout_ms, _POSTPONE_MIN_MS)
            return
        self._join_deadline_ms = None
        self._is_initial_rebalance = False
        self.generation = (self.generation + 1) & _LARGEST_GENERATION
        if not len(self._roster):
            self.protocol_name = None
            self._persist(event, self.persisted_view(event.now_ms, {}))
            return
        self.protocol_name = self._roster.select_protocol()
        self.subscribed_topics = self._read_subscriptions()
        self._enter(event, GroupState.COMPLETING_REBALANCE)
        self._sync_deadline_ms = event.now_ms + self._roster.rebalance_timeout_ms
        for member in self._roster.members:
            self._roster.update(replace(member, is_new=False))
            self._restart_session(event, member)
            self._pending_sync.add(member.member_id)
            if (token := self._joining.pop(member.member_id, None)) is not None:
                event.reply(token, self._generation_reply(member.member_id))

    def _complete_sync(self, event: _Event, assignments: Mapping[str, bytes]) -> None:
        """Persist the generation with the leader's assignments and answer every waiting SyncGroup."""
        self._persist(event, self.persisted_view(event.now_ms, assignments))
        self._answer_syncs(event, ErrorCode.none)

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

    def _answer_syncs(self, event: _Event, error: ErrorCode) -> None:
        for member_id, token in self._syncing.items():
            body = SyncReply(error) if error is not ErrorCode.none else self._assignment_reply(member_id)
            event.reply(token, body)
            self._restart_session(event, self._roster[member_id])
        self._syncing.clear()

    # -- members -----------------------------------------------------------------------------------------

    def _await_join(self, event: _Event, member_id: str, token: object) -> None:
        """Park a JoinGroup. A member that asks again has given up on its earlier request."""
        if (earlier := self._joining.get(member_id)) is not None:
            event.reply(earlier, JoinReply(ErrorCode.rebalance_in_progress, member_id))
        self._joining[member_id] = token

    def _await_sync(self, event: _Event, member_id: str, token: object) -> None:
        if (earlier := self._syncing.get(member_id)) is not None:
            event.reply(earlier, SyncReply(ErrorCode.rebalance_in_progress))
        self._syncing[member_id] = token

    def _drop(self, event: _Event, member_id: str) -> None:
        """Remove a member and answer what it waits for."""
        self._answer_waiting(event, member_id, ErrorCode.unknown_member_id, told_member_id="")
        self._roster.remove(member_id)
        self._pending_sync.discard(member_id)
        self._deadlines.pop(member_id, None)

    def _answer_waiting(self, event: _Event, member_id: str, error: ErrorCode, told_member_id: str) -> None:
        if (token := self._joining.pop(member_id, None)) is not None:
            event.reply(token, JoinReply(error, told_member_id))
        if (token := self._syncing.pop(member_id, None)) is not None:
            event.reply(token, SyncReply(error))

    def _enter(self, event: _Event, state: GroupState) -> None:
        self.state = state
        self.state_since_ms = event.now_ms

    # -- time --------------------------------------------------------------------------------------------

    def next_deadline_ms(self) -> int | None:
        """When ``tick`` is needed next. May be early, because heartbeats do not recompute it; never late."""
        times = (self._earliest_deadline_ms, self._join_deadline_ms, self._sync_deadline_ms)
        return min((time for time in times if time is not None), default=None)

    def tick(self, now_ms: int) -> Effects:
        """Do what is due at ``now_ms``."""
        event = _Event(now_ms)
        for member_id, deadline_ms in tuple(self._deadlines.items()):
            # A session that was restarted by an earlier step of this tick is not over.
            if deadline_ms <= now_ms and self._deadlines.get(member_id) == deadline_ms:
                self._expire_session(event, member_id)
        if self._join_deadline_ms is not None and self._join_deadline_ms <= now_ms:
            self._end_join_wait(event)
        if self._sync_deadline_ms is not None and self._sync_deadline_ms <= now_ms:
            for member_id in tuple(self._pending_sync):
                self._drop(event, member_id)
            self._prepare_rebalance(event)
        self._earliest_deadline_ms = min(self._deadlines.values(), default=None)
        return event.effects()

    def _set_deadline(self, member_id: str, deadline_ms: int) -> None:
        self._deadlines[member_id] = deadline_ms
        if self._earliest_deadline_ms is None or deadline_ms < self._earliest_deadline_ms:
            self._earliest_deadline_ms = deadline_ms

    def _restart_session(self, event: _Event, member: Member) -> None:
        self._set_deadline(member.member_id, event.now_ms + member.session_timeout_ms)

    def _expire_session(self, event: _Event, member_id: str) -> None:
        del self._deadlines[member_id]
        if member_id in self._pending_join:
            self._pending_join.discard(member_id)
            self._complete_if_all_joined(event)
            return
        waits = member_id in self._joining or member_id in self._syncing
        if waits and not self._roster[member_id].is_new:
            return  # A member whose request waits cannot heartbeat; its session restarts with the reply.
        self._drop(event, member_id)
        if self.state in (GroupState.STABLE, GroupState.COMPLETING_REBALANCE):
            self._prepare_rebalance(event)
        else:
            self._complete_if_all_joined(event)

    def _end_join_wait(self, event: _Event) -> None:
        if self._is_initial_rebalance and self._member_added_in_delay and self._initial_delay_left_ms:
            delay_ms = min(self.settings.initial_rebalance_delay_ms, self._initial_delay_left_ms)
            self._member_added_in_delay = False
            self._initial_delay_left_ms = max(self._initial_delay_left_ms - self._initial_delay_ms, 0)
            self._initial_delay_ms = delay_ms
            self._join_deadline_ms = event.now_ms + delay_ms
        else:
            self._complete_join(event)

    # -- checks ------------------------------------------------------------------------------------------

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
        """Whether the group has no members."""
        return self.state is GroupState.EMPTY

    @property
    def is_idle(self) -> bool:
        """Whether the group has neither members nor announced member ids."""
        return self.state is GroupState.EMPTY and not self._pending_join

    def expiry_base_ms(self, committed_at_ms: int) -> int | None:
        """When the retention of an offset committed at that time starts; None while the group may need it."""
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

    # -- views -------------------------------------------------------------------------------------------

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
    """Rebalance timeout of a JoinGroup; the session timeout for versions that do not have one."""
    return request.rebalance_timeout_ms if request.rebalance_timeout_ms >= 0 else request.session_timeout_ms


def _topics(member: Member, protocol_name: str | None) -> frozenset[str] | None:
    try:
        return parse_subscription(member.metadata(protocol_name) or b"")
    except ProtocolError:
        return None
