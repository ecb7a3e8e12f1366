"""A group changes its protocol while it is in use: classic to consumer and back. Pure.

Upwards: the first member of the new protocol joins a classic ``consumer`` group. Its members stay members,
each with the partitions of its last assignment, and are told to join again. Downwards: the last member of
the new protocol goes and members of the classic one remain. Committed offsets are not touched either way.

In the log both are one batch: the tombstones of the one kind of group, then the records of the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tidemill.errors import ErrorCode, ProtocolError
from tidemill.groups.classic.group import ClassicGroup
from tidemill.groups.classic.roster import Member
from tidemill.groups.consumer.member import ClassicMetadata, ConsumerMember, by_topic
from tidemill.groups.consumer.messages import Refused
from tidemill.groups.consumer.records import (
    CurrentAssignment,
    CurrentAssignmentRecord,
    EpochRecord,
    MemberMetadata,
    MemberMetadataRecord,
    TargetEpochRecord,
    TargetRecord,
)
from tidemill.groups.records import GroupMetadataRecord
from tidemill.wire.consumer_protocol import (
    CONSUMER_PROTOCOL,
    pack_assignment,
    parse_assignment,
    parse_full_subscription,
    protocol_version,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tidemill.groups.consumer.group import ConsumerGroup
    from tidemill.groups.consumer.member import Partitions, TopicIdPartition
    from tidemill.groups.messages import TopicPartition
    from tidemill.groups.records import GroupRecord
    from tidemill.groups.topics import Topics

__all__ = ("assignment_bytes", "by_id", "can_downgrade", "downgrade", "upgrade_records")


def by_id(partitions: Iterable[TopicPartition], topics: Topics) -> Partitions:
    """The partitions by the ids of their topics; those that do not exist are left out."""
    found: set[TopicIdPartition] = set()
    for name, index in partitions:
        topic = topics.find(name)
        if topic is not None and 0 <= index < topic.partitions:
            found.add((topic.id, index))
    return frozenset(found)


def assignment_bytes(partitions: Partitions, reader: ClassicMetadata, topics: Topics) -> bytes:
    """An assignment as a member of the classic protocol reads it. Topics that are gone are left out."""
    named = {
        name: indexes
        for topic_id, indexes in by_topic(partitions).items()
        if (name := topics.name_of(topic_id)) is not None
    }
    return pack_assignment(protocol_version(reader.protocols[0].metadata), named)


def upgrade_records(group: ClassicGroup, topics: Topics) -> list[GroupRecord]:
    """The records that make a classic group with members a consumer group. May raise ``Refused``."""
    if group.protocol_type != CONSUMER_PROTOCOL:
        raise _not_a_consumer_group(group, f"its members speak {group.protocol_type!r}")
    if len(group.members) > group.settings.consumer_max_size:
        raise _not_a_consumer_group(group, "it is too large to become one")
    try:
        members = _consumer_members(group, topics)
    except ProtocolError as error:
        raise _not_a_consumer_group(group, f"what its members say cannot be read: {error}") from error
    group_id, epoch = group.group_id, group.generation
    records: list[GroupRecord] = [GroupMetadataRecord(group_id, None)]
    records += (MemberMetadataRecord(group_id, each.member_id, MemberMetadata.of(each)) for each in members)
    records.append(EpochRecord(group_id, epoch))
    records += (TargetRecord(group_id, each.member_id, each.assigned) for each in members)
    records.append(TargetEpochRecord(group_id, epoch))
    records += (
        CurrentAssignmentRecord(group_id, each.member_id, CurrentAssignment.of(each)) for each in members
    )
    return records


def _not_a_consumer_group(group: ClassicGroup, why: str) -> Refused:
    return Refused(
        ErrorCode.group_id_not_found,
        f"group {group.group_id!r} is a classic group and cannot become a consumer group: {why}",
    )


def _consumer_members(group: ClassicGroup, topics: Topics) -> list[ConsumerMember]:
    taken: set[TopicIdPartition] = set()
    members = []
    for member in group.members:
        # In the middle of a rebalance a member's protocols may no longer include the group's.
        metadata = member.metadata(group.protocol_name) or member.protocols[0].metadata
        subscription = parse_full_subscription(metadata)
        assigned = by_id(parse_assignment(member.assignment), topics) if member.assignment else frozenset()
        # Leaders of classic groups may assign what they like, also one partition to two members.
        assigned -= taken
        taken |= assigned
        members.append(
            ConsumerMember(
                member.member_id,
                epoch=group.generation,
                previous_epoch=group.generation,
                instance_id=member.instance_id,
                rack_id=subscription.rack_id,
                client_id=member.client_id,
                client_host=member.client_host,
                topics=subscription.topics,
                rebalance_timeout_ms=member.rebalance_timeout_ms,
                classic=ClassicMetadata(member.session_timeout_ms, member.protocols),
                assigned=assigned,
            )
        )
    return members


def can_downgrade(group: ConsumerGroup, leaving: ConsumerMember, *, is_replaced: bool = False) -> bool:
    """Whether ``leaving`` is the last member of the new protocol, and others remain.

    ``is_replaced``: a member of the classic protocol takes its place.
    """
    if leaving.classic is not None:
        return False
    remaining = len(group.members) - (0 if is_replaced else 1)
    others = len(group.members) - 1
    return 0 < remaining <= group.settings.max_size and len(group.classic_members) == others


def downgrade(
    group: ConsumerGroup, topics: Topics, now_ms: int, *, leaving: str | None
) -> tuple[list[GroupRecord], ClassicGroup]:
    """The classic group that a consumer group becomes, and the records of that.

    ``leaving`` is the last member of the new protocol; the others are told to join again. None if it was
    replaced already: then nobody's partitions change.
    """
    members, assignments = [], {}
    for member in group.members.values():
        if member.member_id == leaving:
            continue
        assert member.classic is not None, member
        members.append(
            Member(
                member.member_id,
                member.instance_id,
                member.client_id,
                member.client_host,
                member.rebalance_timeout_ms,
                member.classic.session_timeout_ms,
                member.classic.protocols,
            )
        )
        target = group.target_of(member.member_id)
        assignments[member.member_id] = assignment_bytes(target, member.classic, topics)
    classic = ClassicGroup(group.group_id, group.settings, now_ms)
    stored = classic.adopt(members, group.epoch, assignments, now_ms, rebalance=leaving is not None)
    return [*group.tombstones(), GroupMetadataRecord(group.group_id, stored)], classic
