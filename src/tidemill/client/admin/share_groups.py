"""Share groups, where they start and what they hold, over the Kafka protocol: typed async functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tidemill.client.admin.groups import ListedGroup, list_groups
from tidemill.client.cluster import Cluster, TopicPartition
from tidemill.errors import ApiError, ErrorCode
from tidemill.net.answers import check

__all__ = (
    "ShareGroupDescription",
    "ShareGroupMember",
    "ShareOffset",
    "SharePartitionRecords",
    "ShareRecords",
    "alter_share_offsets",
    "delete_share_group",
    "delete_share_offsets",
    "describe_share_group",
    "list_share_groups",
    "share_offsets",
    "share_records",
)

_SHARE: Final = "share"


@dataclass(frozen=True, slots=True)
class ShareGroupMember:
    """A member and the partitions that it reads, which others may read as well."""

    member_id: str
    epoch: int
    client_id: str
    host: str
    rack_id: str | None
    topics: tuple[str, ...]
    assignment: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class ShareGroupDescription:
    """A share group and its members."""

    group: str
    state: str
    epoch: int
    assignment_epoch: int
    assignor: str
    members: tuple[ShareGroupMember, ...]


@dataclass(frozen=True, slots=True)
class ShareOffset:
    """Where a group starts in a partition, and how many records it has not finished.

    None: the group has not read there yet, or the lag is not known.
    """

    start_offset: int | None
    leader_epoch: int
    lag: int | None


@dataclass(frozen=True, slots=True)
class ShareRecords:
    """Records of a share partition that have one state, from the first to the last offset.

    ``until_ms`` is when a lock or a delay ends, in milliseconds since 1970; 0 if there is none. The age may
    be larger if ``is_age_minimum``: the leader does not know since when, as it has read the state later.
    """

    first_offset: int
    last_offset: int
    state: str
    delivery_count: int
    owner: str
    until_ms: int
    age_ms: int
    reason: str
    is_age_minimum: bool = False


@dataclass(frozen=True, slots=True)
class SharePartitionRecords:
    """What a group does with the records of a partition.

    ``is_stalled``: nothing new is handed out, as ``max_waiting`` records or more are delayed, blocked or due
    as dead letters. ``max_waiting`` is None if the node does not tell it.
    """

    topic: str
    partition: int
    start_offset: int
    end_offset: int
    acquired: int
    available: int
    delayed: int
    blocked: int
    dead_letters_due: int
    is_stalled: bool
    records: tuple[ShareRecords, ...]
    max_waiting: int | None = None

    @property
    def waiting(self) -> int:
        """How many records count towards ``max_waiting``."""
        return self.delayed + self.blocked + self.dead_letters_due


async def list_share_groups(cluster: Cluster) -> list[ListedGroup]:
    """The share groups of all nodes, by name."""
    return [group for group in await list_groups(cluster) if group.kind == _SHARE]


async def describe_share_group(cluster: Cluster, group: str) -> ShareGroupDescription:
    """The group. Raises ``ApiError`` GROUP_ID_NOT_FOUND if there is none."""

    async def ask() -> ShareGroupDescription:
        response = await cluster.to_coordinator(group, "ShareGroupDescribe", {"group_ids": [group]})
        (found,) = response.groups
        _check_group(found.error_code, found.error_message, group, f"describing share group {group!r}")
        members = tuple(
            ShareGroupMember(
                member.member_id,
                member.member_epoch,
                member.client_id,
                member.client_host,
                member.rack_id,
                tuple(member.subscribed_topic_names),
                tuple(
                    (topic.topic_name, index)
                    for topic in member.assignment.topic_partitions
                    for index in topic.partitions
                ),
            )
            for member in found.members
        )
        return ShareGroupDescription(
            group,
            found.group_state,
            found.group_epoch,
            found.assignment_epoch,
            found.assignor_name,
            members,
        )

    return await cluster.retrying(ask)


async def share_offsets(
    cluster: Cluster, group: str, partitions: Iterable[TopicPartition] | None = None
) -> dict[TopicPartition, ShareOffset]:
    """Where the group starts in these partitions, or in all that it has read or is to read."""
    topics = None
    if partitions is not None:
        by_topic: dict[str, list[int]] = {}
        for name, index in partitions:
            by_topic.setdefault(name, []).append(index)
        topics = [{"topic_name": name, "partitions": indexes} for name, indexes in by_topic.items()]
    body = {"groups": [{"group_id": group, "topics": topics}]}

    async def ask() -> dict[TopicPartition, ShareOffset]:
        response = await cluster.to_coordinator(group, "DescribeShareGroupOffsets", body)
        (found,) = response.groups
        _check_group(found.error_code, found.error_message, group, f"the offsets of share group {group!r}")
        offsets: dict[TopicPartition, ShareOffset] = {}
        for topic in found.topics:
            for entry in topic.partitions:
                what = f"the start of share group {group!r} in {topic.topic_name}-{entry.partition_index}"
                check(entry.error_code, entry.error_message, what)
                offsets[topic.topic_name, entry.partition_index] = ShareOffset(
                    _or_none(entry.start_offset), entry.leader_epoch, _or_none(getattr(entry, "lag", -1))
                )
        return offsets

    return await cluster.retrying(ask)


async def alter_share_offsets(cluster: Cluster, group: str, offsets: Mapping[TopicPartition, int]) -> None:
    """Let the group, which must have no members, start at these offsets."""
    topics: dict[str, list[dict[str, Any]]] = {}
    for (name, index), offset in offsets.items():
        topics.setdefault(name, []).append({"partition_index": index, "start_offset": offset})
    body = {
        "group_id": group,
        "topics": [{"topic_name": name, "partitions": entries} for name, entries in topics.items()],
    }

    async def ask() -> None:
        response = await cluster.to_coordinator(group, "AlterShareGroupOffsets", body)
        what = f"moving share group {group!r}"
        _check_group(response.error_code, response.error_message, group, what)
        for topic in response.responses:
            for entry in topic.partitions:
                where = f"{what} in {topic.topic_name}-{entry.partition_index}"
                check(entry.error_code, entry.error_message, where)

    await cluster.retrying(ask)


async def delete_share_offsets(cluster: Cluster, group: str, topics: Sequence[str]) -> None:
    """Let the group, which must have no members, forget topics: it starts anew when it reads them again."""
    body = {"group_id": group, "topics": [{"topic_name": name} for name in topics]}

    async def ask() -> None:
        response = await cluster.to_coordinator(group, "DeleteShareGroupOffsets", body)
        what = f"deleting the offsets of share group {group!r}"
        _check_group(response.error_code, response.error_message, group, what)
        for topic in response.responses:
            check(topic.error_code, topic.error_message, f"{what} in topic {topic.topic_name!r}")

    await cluster.retrying(ask)


async def delete_share_group(cluster: Cluster, group: str) -> None:
    """Delete a share group without members, and all that it knows of its records."""
    # The API deletes groups of all kinds.
    await describe_share_group(cluster, group)

    async def ask() -> None:
        response = await cluster.to_coordinator(group, "DeleteGroups", {"groups_names": [group]})
        (result,) = response.results
        _check_group(result.error_code, None, group, f"deleting share group {group!r}")

    await cluster.retrying(ask)


async def share_records(
    cluster: Cluster,
    group: str,
    partition: TopicPartition,
    *,
    states: Sequence[str] = (),
    limit: int = 100,
) -> SharePartitionRecords:
    """What the group does with the records of a partition: ``limit`` runs of those in these states, or all.

    States: acquired, available, delayed, blocked, dead-letter-due.
    """
    name, index = partition
    body = {"group_id": group, "topic": name, "partition": index, "states": list(states), "limit": limit}

    async def ask() -> SharePartitionRecords:
        (node_id,) = await cluster.leaders([partition])
        connection = await cluster.connection(node_id)
        found = await connection.request("DescribeShareRecords", body)
        _check_group(
            found.error_code, found.error_message, group, f"the records of share group {group!r} in {name}"
        )
        return SharePartitionRecords(
            name,
            index,
            found.start_offset,
            found.end_offset,
            found.acquired,
            found.available,
            found.delayed,
            found.blocked,
            found.dead_letters_due,
            found.is_stalled,
            tuple(
                ShareRecords(
                    each.first_offset,
                    each.last_offset,
                    each.state,
                    each.delivery_count,
                    each.owner,
                    each.until_ms,
                    each.age_ms,
                    each.reason,
                    is_age_minimum=0 <= found.known_for_ms <= each.age_ms,
                )
                for each in found.records
            ),
            _or_none(found.max_waiting),
        )

    return await cluster.retrying(ask)


def _or_none(number: int) -> int | None:
    return None if number < 0 else number


def _check_group(code: int, message: str | None, group: str, what: str) -> None:
    if code == ErrorCode.group_id_not_found:
        raise ApiError(
            ErrorCode.group_id_not_found,
            f"there is no share group {group!r}; 'tidemill share list' shows those that exist",
        )
    if code == ErrorCode.non_empty_group:
        raise ApiError(
            ErrorCode.non_empty_group,
            f"share group {group!r} has members; stop its consumers first "
            f"('tidemill share describe {group}' shows them)",
        )
    check(code, message, what)
