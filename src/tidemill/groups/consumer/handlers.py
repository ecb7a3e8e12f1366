"""Handlers of requests to the consumer groups of one shard, and of time. Pure.

Every handler works out what it would do, appends that, and only then replays it into the group; if the
append raises, nothing has happened. Deadlines follow after that. What requests of the new protocol do is
worked out in ``heartbeats``, those of the classic protocol in ``classic_members``, and what makes a group of
one kind one of the other in ``migration``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.errors import ErrorCode
from tidemill.groups.classic.group import ClassicGroup
from tidemill.groups.consumer.classic_members import (
    assignment_for_sync,
    check_classic_heartbeat,
    must_join_again,
    plan_join,
    require_leaving,
)
from tidemill.groups.consumer.group import ConsumerGroup, Wait
from tidemill.groups.consumer.heartbeats import (
    check_heartbeat,
    plan_heartbeat,
    plan_static_leave,
    require_leaving_member,
)
from tidemill.groups.consumer.member import JOIN_EPOCH, STATIC_LEAVE_EPOCH, by_topic
from tidemill.groups.consumer.messages import (
    ConsumerGroupDescription,
    ConsumerHeartbeatReply,
    ConsumerMemberDescription,
    DescribedTopic,
    Refused,
)
from tidemill.groups.consumer.migration import can_downgrade, downgrade, upgrade_records
from tidemill.groups.consumer.records import ConsumerRecord, CurrentAssignment, EpochRecord
from tidemill.groups.consumer.target_assignment import raise_epoch
from tidemill.groups.messages import JoinReply, LeaveReply, LeftMember, Reply, SyncReply
from tidemill.groups.share.group import ShareGroup
from tidemill.wire.consumer_protocol import CONSUMER_PROTOCOL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tidemill.groups.consumer.member import ConsumerMember, Partitions
    from tidemill.groups.consumer.messages import ConsumerHeartbeatRequest
    from tidemill.groups.consumer.target_assignment import Advance
    from tidemill.groups.messages import HeartbeatRequest, JoinRequest, LeavingMember, SyncRequest
    from tidemill.groups.records import GroupRecord
    from tidemill.groups.settings import GroupSettings
    from tidemill.groups.topics import Topics

__all__ = ("ConsumerGroupHandlers", "Group", "Replies")

Group = ClassicGroup | ConsumerGroup | ShareGroup

Replies = tuple[Reply, ...]


class ConsumerGroupHandlers:
    """Handlers over the ``groups`` of a shard.

    If ``append_and_replay`` raises, nothing was appended.
    """

    def __init__(
        self,
        settings: GroupSettings,
        groups: dict[str, Group],
        append: Callable[[Sequence[GroupRecord]], None],
        append_and_replay: Callable[[Sequence[GroupRecord], int], None],
        topics: Topics,
    ) -> None:
        self._settings = settings
        self._groups = groups
        self._append = append
        self._append_and_replay = append_and_replay
        self._topics = topics

    def replay(self, record: ConsumerRecord) -> None:
        """Make one record that is in the log part of the state."""
        group = self._groups.get(record.group_id)
        if not isinstance(group, ConsumerGroup):
            if record.value is None:
                return
            group = self._groups[record.group_id] = ConsumerGroup(record.group_id, self._settings)
        if isinstance(record, EpochRecord) and record.value is None:
            del self._groups[record.group_id]
        else:
            group.replay(record)

    # -- ConsumerGroupHeartbeat ------------------------------------------------------------------------

    def heartbeat(
        self, request: ConsumerHeartbeatRequest, fresh_member_id: str, now_ms: int
    ) -> tuple[ConsumerHeartbeatReply, Replies]:
        """ConsumerGroupHeartbeat. The replies are for a classic group that it upgrades."""
        try:
            check_heartbeat(request)
            if request.member_epoch < JOIN_EPOCH:
                return self._leave_or_pause(request, now_ms)
            return self._join_or_stay(request, request.member_id or fresh_member_id, now_ms)
        except Refused as refusal:
            return ConsumerHeartbeatReply(refusal.code, refusal.message), ()

    def _join_or_stay(
        self, request: ConsumerHeartbeatRequest, member_id: str, now_ms: int
    ) -> tuple[ConsumerHeartbeatReply, Replies]:
        existing = self._groups.get(request.group_id)
        group, conversion = self._consumer_group_for(request, existing)
        before = group.members.get(member_id)
        plan = plan_heartbeat(group, self._topics, request, member_id, now_ms)
        replies = self._apply(existing, [*conversion, *plan.records], now_ms)
        group = self._require(request.group_id)
        group.seen_revision = plan.revision
        if conversion:
            group.start(now_ms)
        group.restart_session(plan.member, now_ms)
        group.deadlines.cancel((Wait.JOIN, member_id))
        group.deadlines.cancel((Wait.SYNC, member_id))
        if before is None or CurrentAssignment.of(before) != CurrentAssignment.of(plan.member):
            group.watch_revocation(plan.member, now_ms)
        return plan.reply, replies

    def _consumer_group_for(
        self, request: ConsumerHeartbeatRequest, existing: Group | None
    ) -> tuple[ConsumerGroup, list[GroupRecord]]:
        """The group, and the records that create it or that make a classic group one of the new protocol."""
        if isinstance(existing, ConsumerGroup):
            return existing, []
        if request.member_epoch != JOIN_EPOCH or isinstance(existing, ShareGroup):
            raise _not_found(request.group_id)
        if existing is None:
            return ConsumerGroup(request.group_id, self._settings), []
        return self.convert(existing)

    def convert(self, existing: ClassicGroup) -> tuple[ConsumerGroup, list[GroupRecord]]:
        """The consumer group that a classic one becomes, and the records of that. Changes nothing.

        Raises ``Refused`` if it cannot become one.
        """
        group = ConsumerGroup(existing.group_id, self._settings)
        if existing.is_empty:
            return group, [*existing.tombstones()]
        conversion = upgrade_records(existing, self._topics)
        for record in conversion:
            if isinstance(record, ConsumerRecord):
                group.replay(record)
        return group, conversion

    def _apply(self, existing: Group | None, records: Sequence[GroupRecord], now_ms: int) -> Replies:
        """Append and replay; then answer those who wait in a classic group that these records end."""
        if records:
            self._append_and_replay(records, now_ms)
        if isinstance(existing, ClassicGroup):
            return existing.die(ErrorCode.rebalance_in_progress)
        return ()

    def _require(self, group_id: str) -> ConsumerGroup:
        group = self._groups[group_id]
        assert isinstance(group, ConsumerGroup), group_id
        return group

    def _leave_or_pause(
        self, request: ConsumerHeartbeatRequest, now_ms: int
    ) -> tuple[ConsumerHeartbeatReply, Replies]:
        group = self._groups.get(request.group_id)
        if not isinstance(group, ConsumerGroup):
            raise _not_found(request.group_id)
        member = require_leaving_member(group, request)
        if request.member_epoch == STATIC_LEAVE_EPOCH:
            self._append_and_replay(plan_static_leave(group, member), now_ms)
            group.deadlines.cancel((Wait.REBALANCE, member.member_id))
        else:
            self._remove(group, [member], now_ms)
        return ConsumerHeartbeatReply(member_id=member.member_id, member_epoch=request.member_epoch), ()

    def _remove(self, group: ConsumerGroup, members: Sequence[ConsumerMember], now_ms: int) -> None:
        """Remove members. If only members of the classic protocol remain, the group becomes classic."""
        # The last one decides what the group becomes, so it is one of the new protocol if any of them is.
        *others, last = sorted(members, key=lambda member: member.classic is None)
        records: Sequence[ConsumerRecord] = ()
        without_others = group
        if others:
            records = raise_epoch(group, self._topics, [member.member_id for member in others])
            without_others = group.copy()
            for record in records:
                without_others.replay(record)
        if can_downgrade(without_others, last):
            conversion, classic = downgrade(without_others, self._topics, now_ms, leaving=last.member_id)
            self._append([*records, *conversion])
            self._groups[group.group_id] = classic
        else:
            gone = [member.member_id for member in members]
            self._append_and_replay(raise_epoch(group, self._topics, gone), now_ms)

    def tick(self, group: ConsumerGroup, now_ms: int) -> None:
        """Remove the members that are overdue."""
        overdue = [group.members[each] for each in group.overdue(now_ms) if each in group.members]
        if overdue:
            self._remove(group, overdue, now_ms)

    # -- the classic protocol --------------------------------------------------------------------------

    def join(
        self, group: ConsumerGroup, request: JoinRequest, token: object, fresh_member_id: str, now_ms: int
    ) -> Replies:
        """JoinGroup in a consumer group with members."""
        predecessor = group.static_member(request.instance_id) if not request.member_id else None
        try:
            step = plan_join(group, self._topics, request, fresh_member_id, now_ms)
        except Refused as refusal:
            asked_to_use = (
                fresh_member_id if refusal.code is ErrorCode.member_id_required else request.member_id
            )
            return (Reply(token, JoinReply(refusal.code, asked_to_use)),)
        if predecessor is not None and can_downgrade(group, predecessor, is_replaced=True):
            self._join_and_downgrade(group, step, now_ms)
        else:
            if step.records:
                self._append_and_replay(step.records, now_ms)
            self._watch_classic(group, step, now_ms)
        member, classic = step.member, step.member.classic
        assert classic is not None
        reply = JoinReply(
            member_id=member.member_id,
            generation=member.epoch,
            protocol_type=CONSUMER_PROTOCOL,
            protocol_name=classic.protocols[0].name,
        )
        return (Reply(token, reply),)

    def _join_and_downgrade(self, group: ConsumerGroup, step: Advance, now_ms: int) -> None:
        """Let a classic member replace the last member of the new protocol: the group becomes classic."""
        scratch = group.copy()
        for record in step.records:
            scratch.replay(record)
        records, classic = downgrade(scratch, self._topics, now_ms, leaving=None)
        self._append([*step.records, *records])
        self._groups[group.group_id] = classic

    def _watch_classic(self, group: ConsumerGroup, step: Advance, now_ms: int) -> None:
        group.seen_revision = step.revision
        member_id = step.member.member_id
        group.restart_session(step.member, now_ms)
        group.deadlines.cancel((Wait.JOIN, member_id))
        group.deadlines.set((Wait.SYNC, member_id), now_ms + step.member.rebalance_timeout_ms)

    def sync(self, group: ConsumerGroup, request: SyncRequest, token: object, now_ms: int) -> Replies:
        """SyncGroup in a consumer group. The server has computed the assignment already."""
        try:
            member, assignment = assignment_for_sync(group, self._topics, request)
        except Refused as refusal:
            if refusal.code is ErrorCode.rebalance_in_progress:
                self._await_join(group, group.members[request.member_id], now_ms)
            return (Reply(token, SyncReply(refusal.code)),)
        group.deadlines.cancel((Wait.SYNC, member.member_id))
        group.restart_session(member, now_ms)
        reply = SyncReply(ErrorCode.none, request.protocol_type, request.protocol_name, assignment)
        return (Reply(token, reply),)

    def classic_heartbeat(self, group: ConsumerGroup, request: HeartbeatRequest, now_ms: int) -> ErrorCode:
        """Heartbeat in a consumer group. Appends nothing."""
        try:
            member = check_classic_heartbeat(group, request)
        except Refused as refusal:
            return refusal.code
        group.restart_session(member, now_ms)
        if not must_join_again(group, member):
            return ErrorCode.none
        self._await_join(group, member, now_ms)
        return ErrorCode.rebalance_in_progress

    def _await_join(self, group: ConsumerGroup, member: ConsumerMember, now_ms: int) -> None:
        key = (Wait.JOIN, member.member_id)
        group.deadlines.set_if_absent(key, now_ms + member.rebalance_timeout_ms)

    def leave(self, group: ConsumerGroup, members: Sequence[LeavingMember], now_ms: int) -> LeaveReply:
        """LeaveGroup for several members at once: the epoch rises once for all of them."""
        left: list[LeftMember] = []
        gone: dict[str, ConsumerMember] = {}
        for each in members:
            try:
                member = require_leaving(group, each)
                if member.member_id in gone:
                    raise Refused(ErrorCode.unknown_member_id, "it is named twice")
            except Refused as refusal:
                left.append(LeftMember(each.member_id, each.instance_id, refusal.code))
            else:
                gone[member.member_id] = member
                left.append(LeftMember(each.member_id, each.instance_id))
        if gone:
            self._remove(group, list(gone.values()), now_ms)
        return LeaveReply(members=tuple(left))

    # -- views -----------------------------------------------------------------------------------------

    def describe(self, group_id: str) -> ConsumerGroupDescription:
        """ConsumerGroupDescribe for one group."""
        group = self._groups.get(group_id)
        if not isinstance(group, ConsumerGroup):
            refusal = _not_found(group_id)
            return ConsumerGroupDescription(group_id, refusal.code, refusal.message)
        return ConsumerGroupDescription(
            group_id,
            state=str(group.state),
            epoch=group.epoch,
            target_epoch=group.target_epoch,
            assignor=group.assignor,
            members=tuple(self._describe_member(group, member) for member in group.members.values()),
        )

    def _describe_member(self, group: ConsumerGroup, member: ConsumerMember) -> ConsumerMemberDescription:
        return ConsumerMemberDescription(
            member.member_id,
            member.instance_id,
            member.rack_id,
            member.epoch,
            member.client_id,
            member.client_host,
            tuple(sorted(member.topics)),
            member.regex or None,
            self._named(member.assigned),
            self._named(group.target_of(member.member_id)),
            member.classic is not None,
        )

    def _named(self, partitions: Partitions) -> tuple[DescribedTopic, ...]:
        """The partitions by topic, with the topics' names. Topics that do not exist any more are left out."""
        found = (
            DescribedTopic(topic_id, name, tuple(indexes))
            for topic_id, indexes in by_topic(partitions).items()
            if (name := self._topics.name_of(topic_id)) is not None
        )
        return tuple(sorted(found, key=lambda topic: topic.name))


def _not_found(group_id: str) -> Refused:
    return Refused(ErrorCode.group_id_not_found, f"there is no consumer group {group_id[:200]!r}")
