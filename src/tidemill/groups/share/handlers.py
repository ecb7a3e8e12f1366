"""Handlers of requests to the share groups of one shard, and of time. Pure.

Every handler works out what it would do, appends that, and only then replays it into the group; if the
append raises, nothing has happened. What takes the state of share partitions along (initializing, altering
and deleting it) has a handler for its beginning and one for its end; ``groups.share.coordinator`` calls the
persister in between.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tidemill.coordination.share_state import NO_START
from tidemill.errors import ErrorCode
from tidemill.groups.consumer.member import JOIN_EPOCH
from tidemill.groups.consumer.messages import Refused
from tidemill.groups.share import state_topics
from tidemill.groups.share.assignor import SIMPLE_ASSIGNOR
from tidemill.groups.share.group import ShareGroup
from tidemill.groups.share.heartbeats import check_heartbeat, plan_heartbeat, plan_removal, require_member
from tidemill.groups.share.messages import (
    AlteredPartition,
    DeletedTopic,
    Initialization,
    ShareGroupDescription,
    ShareHeartbeatReply,
)
from tidemill.groups.share.records import (
    ShareEpoch,
    ShareEpochRecord,
    ShareRecord,
    StateTopic,
    StateTopics,
    StateTopicsRecord,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence
    from uuid import UUID

    from tidemill.config.values import TopicPartition
    from tidemill.groups.settings import GroupSettings
    from tidemill.groups.share.heartbeats import Planned
    from tidemill.groups.share.messages import ShareHeartbeatRequest
    from tidemill.groups.topics import Topics

__all__ = ("ShareGroupHandlers",)

_NONE: Final[frozenset[int]] = frozenset()


class ShareGroupHandlers:
    """Handlers over the share groups among the ``groups`` of a shard, which has others as well.

    If ``append_and_replay`` raises, nothing was appended.
    """

    def __init__(
        self,
        settings: GroupSettings,
        find: Callable[[str], object],
        put: Callable[[str, ShareGroup | None], None],
        append_and_replay: Callable[[Sequence[ShareRecord], int], None],
        topics: Topics,
    ) -> None:
        self._settings = settings
        self._find = find
        self._put = put
        self._append_and_replay = append_and_replay
        self._topics = topics

    def replay(self, record: ShareRecord) -> None:
        """Make one record that is in the log part of the state."""
        group = self._find(record.group_id)
        if not isinstance(group, ShareGroup):
            if record.value is None:
                return
            group = ShareGroup(record.group_id, self._settings)
            self._put(record.group_id, group)
        if isinstance(record, ShareEpochRecord) and record.value is None:
            self._put(record.group_id, None)
        else:
            group.replay(record)

    # -- ShareGroupHeartbeat ---------------------------------------------------------------------------

    def heartbeat(
        self, request: ShareHeartbeatRequest, now_ms: int
    ) -> tuple[ShareHeartbeatReply, Initialization | None]:
        """ShareGroupHeartbeat: the answer, and state to begin once what this appends is committed.

        Raises ``Refused``.
        """
        check_heartbeat(request)
        if request.member_epoch < JOIN_EPOCH:
            return self._leave(request, now_ms), None
        plan = plan_heartbeat(self.group_for(request), self._topics, request, now_ms)
        if plan.records:
            self._append_and_replay(plan.records, now_ms)
        self.settle(request.group_id, plan, now_ms)
        return plan.reply, plan.initialization

    def group_for(self, request: ShareHeartbeatRequest) -> ShareGroup:
        """The group that a heartbeat is for; one that is not in the log yet if it is the first.

        Raises ``Refused`` if the name is another group's, or nobody's and the member does not join.
        """
        if request.member_epoch == JOIN_EPOCH and self._find(request.group_id) is None:
            return ShareGroup(request.group_id, self._settings)
        return self.require(request.group_id)

    def settle(self, group_id: str, plan: Planned, now_ms: int) -> None:
        """Note what a plan that is carried out found, and that its member is alive."""
        group = self.require(group_id)
        group.seen_revision, group.awaited = plan.revision, plan.awaited
        group.restart_session(plan.member.member_id, now_ms)

    def require(self, group_id: str) -> ShareGroup:
        """The share group. Raises ``Refused`` if there is none of that name."""
        group = self._find(group_id)
        if isinstance(group, ShareGroup):
            return group
        kind = "no share group" if group is None else "a group, but no share group,"
        raise Refused(ErrorCode.group_id_not_found, f"there is {kind} {group_id[:200]!r}")

    def _leave(self, request: ShareHeartbeatRequest, now_ms: int) -> ShareHeartbeatReply:
        group = self.require(request.group_id)
        member = require_member(group, request.member_id)
        self._append_and_replay(plan_removal(group, [member.member_id]), now_ms)
        return ShareHeartbeatReply(member_id=member.member_id, member_epoch=request.member_epoch)

    def tick(self, group: ShareGroup, now_ms: int) -> None:
        """Remove the members that were silent for too long."""
        overdue = [member_id for member_id in group.overdue(now_ms) if member_id in group.members]
        if overdue:
            self._append_and_replay(plan_removal(group, overdue), now_ms)

    def describe(self, group_id: str) -> ShareGroupDescription:
        """ShareGroupDescribe for one group."""
        try:
            group = self.require(group_id)
        except Refused as refusal:
            return ShareGroupDescription(group_id, refusal.code, refusal.message)
        return ShareGroupDescription(
            group_id,
            state=str(group.state),
            epoch=group.epoch,
            target_epoch=group.target_epoch,
            assignor=SIMPLE_ASSIGNOR,
            members=tuple(group.members.values()),
        )

    # -- initializing state ----------------------------------------------------------------------------

    def still_wanted(self, work: Initialization) -> Initialization | None:
        """The part of the planned initializations of state that is still needed; None if none is.

        The group may have been deleted, or another attempt been faster. State that is initialized must never
        be begun again: members may have read by it.
        """
        group = self._find(work.group_id)
        if not isinstance(group, ShareGroup):
            return None
        initializing = state_topics.by_id(group.topics.initializing)
        topics = {
            topic_id: starts
            for topic_id, starts in work.topics.items()
            if topic_id in initializing and initializing[topic_id].partitions == starts.keys()
        }
        return replace(work, topics=topics) if topics else None

    def initialized(
        self, work: Initialization, failed: Collection[tuple[UUID, int]], above_epoch: int, now_ms: int
    ) -> None:
        """Note how the initialization of state ended. A heartbeat begins topics of what has ``failed`` again.

        State may be left of an earlier group of that name, in a higher epoch. ``above_epoch`` is the highest
        of those; the group's own must be higher.
        """
        group = self._find(work.group_id)
        if not isinstance(group, ShareGroup):
            return
        # Before the append, which may fail: then a heartbeat begins all of it again.
        group.initialization_failed(now_ms)
        done = {
            topic_id: [index for index in indexes if (topic_id, index) not in failed]
            for topic_id, indexes in work.topics.items()
        }
        records = self._changed(group, state_topics.initialized(group.topics, done, now_ms))
        if above_epoch >= group.epoch:
            records.append(ShareEpochRecord(group.group_id, ShareEpoch(above_epoch + 1, group.topics_hash)))
        if records:
            self._append_and_replay(records, now_ms)

    def _changed(self, group: ShareGroup, topics: StateTopics) -> list[ShareRecord]:
        return [] if topics == group.topics else [StateTopicsRecord(group.group_id, topics)]

    # -- AlterShareGroupOffsets ------------------------------------------------------------------------

    def begin_alter(
        self, group_id: str, offsets: Mapping[TopicPartition, int], now_ms: int
    ) -> tuple[Initialization, dict[TopicPartition, AlteredPartition]]:
        """Begin to move where a group without members starts: what is to be written, and what is refused.

        The state of other partitions of a topic is begun along with the first one's. Raises ``Refused``.
        """
        group = self._require_empty(group_id)
        deleting = {topic.id for topic in group.topics.deleting}
        refused: dict[TopicPartition, AlteredPartition] = {}
        work: dict[UUID, dict[int, int]] = {}
        names: dict[UUID, str] = {}
        known = state_topics.by_id(group.topics.initialized)
        begun: dict[UUID, Collection[int]] = {}
        for (name, index), offset in offsets.items():
            topic = self._topics.find(name)
            error = _refusal(topic is not None and 0 <= index < topic.partitions, offset)
            if topic is not None and topic.id in deleting:
                error = AlteredPartition(ErrorCode.coordinator_not_available, "its state is being deleted")
            if error is not None or topic is None:
                refused[name, index] = error or AlteredPartition()
                continue
            names[topic.id] = name
            there = known[topic.id].partitions if topic.id in known else _NONE
            starts = work.setdefault(topic.id, {})
            if len(there) < topic.partitions and topic.id not in begun:
                missing = [each for each in range(topic.partitions) if each not in there]
                begun[topic.id] = missing
                starts |= {each: starts.get(each, 0 if there else NO_START) for each in missing}
            starts[index] = offset
        epoch = group.epoch + 1
        if work:
            records: list[ShareRecord] = [
                ShareEpochRecord(group_id, ShareEpoch(epoch, group.topics_hash)),
                *self._changed(group, state_topics.initialization_begun(group.topics, names, begun, now_ms)),
            ]
            self._append_and_replay(records, now_ms)
        return Initialization(group_id, epoch, work), refused

    def _require_empty(self, group_id: str) -> ShareGroup:
        group = self.require(group_id)
        if not group.is_empty:
            raise Refused(
                ErrorCode.non_empty_group,
                f"group {group_id!r} has {len(group.members)} members; stop them first",
            )
        return group

    # -- deleting state --------------------------------------------------------------------------------

    def begin_delete_group(self, group_id: str, now_ms: int) -> StateTopics:
        """Begin to delete all state of a group without members; gives the topics. Raises ``Refused``."""
        group = self._require_empty(group_id)
        self._begin_deletion(group, {topic.id for topic in _all_topics(group.topics)}, now_ms)
        return group.topics

    def begin_delete_offsets(
        self, group_id: str, names: Collection[str], now_ms: int
    ) -> tuple[StateTopics, dict[str, UUID], dict[str, DeletedTopic]]:
        """Begin to delete the state of topics of a group without members.

        Gives the topics of the group, the ids of those to delete, and those that are refused. Raises
        ``Refused``.
        """
        group = self._require_empty(group_id)
        refused: dict[str, DeletedTopic] = {}
        found: dict[str, UUID] = {}
        have_state = {topic.id for topic in _all_topics(group.topics)}
        for name in names:
            topic = self._topics.find(name)
            if topic is None:
                message = f"there is no topic {name[:200]!r}"
                refused[name] = DeletedTopic(ErrorCode.unknown_topic_or_partition, message)
            elif topic.id not in have_state:
                message = "There is no offset information to delete."
                refused[name] = DeletedTopic(ErrorCode.unknown_topic_or_partition, message)
            else:
                found[name] = topic.id
        self._begin_deletion(group, set(found.values()), now_ms)
        return group.topics, found, refused

    def forget_missing_topics(self, group: ShareGroup, now_ms: int) -> None:
        """Begin to delete the state of topics that do not exist any more. The group's deadline does it."""
        known = (*group.topics.initializing, *group.topics.initialized)
        missing = {topic.id for topic in known if self._topics.name_of(topic.id) is None}
        if missing:
            self._begin_deletion(group, missing, now_ms)
            group.delete_at_ms = now_ms

    def _begin_deletion(self, group: ShareGroup, gone: Collection[UUID], now_ms: int) -> None:
        records = self._changed(group, state_topics.deletion_begun(group.topics, gone))
        if records:
            self._append_and_replay(records, now_ms)
        group.retry_deletion_later(now_ms)

    def deleted(self, group_id: str, gone: Mapping[UUID, frozenset[int]], now_ms: int) -> None:
        """Note that the state of these partitions is deleted. What is left is tried again later."""
        group = self._find(group_id)
        if isinstance(group, ShareGroup):
            records = self._changed(group, state_topics.deleted(group.topics, gone))
            if records:
                self._append_and_replay(records, now_ms)
            group.retry_deletion_later(now_ms)


def _refusal(exists: bool, offset: int) -> AlteredPartition | None:
    if not exists:
        return AlteredPartition(ErrorCode.unknown_topic_or_partition, "there is no such partition")
    if offset < 0:
        return AlteredPartition(ErrorCode.invalid_request, f"a group cannot start at offset {offset}")
    return None


def _all_topics(topics: StateTopics) -> tuple[StateTopic, ...]:
    return (*topics.initializing, *topics.initialized, *topics.deleting)
