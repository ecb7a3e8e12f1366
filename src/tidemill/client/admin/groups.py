"""Consumer groups and their committed offsets, over the Kafka protocol: typed async functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from tidemill.client.cluster import Cluster, TopicPartition
from tidemill.client.consuming.assignment import parse_assignment
from tidemill.errors import ApiError, ErrorCode
from tidemill.net.answers import check
from tidemill.net.connection import Versions

__all__ = (
    "NO_MEMBER",
    "GroupDescription",
    "GroupMember",
    "Identity",
    "ListedGroup",
    "commit_offsets",
    "delete_group",
    "delete_offsets",
    "describe_group",
    "fetch_offsets",
    "list_groups",
)

# Newer versions name topics by id only.
_OFFSET_COMMIT_VERSIONS: Final[Versions] = (2, 9)
_OFFSET_FETCH_VERSIONS: Final[Versions] = (8, 9)
_DEAD: Final = "Dead"
_CLASSIC_MEMBER: Final = 0
_IDLE_STATES: Final = frozenset({"Empty", _DEAD})


class Identity(NamedTuple):
    """The member and generation in whose name offsets are committed."""

    member_id: str
    generation: int


NO_MEMBER: Final = Identity("", -1)
"""The identity of commits from outside the group; accepted only while it has no members."""


@dataclass(frozen=True, slots=True)
class ListedGroup:
    """A group as ListGroups shows it."""

    group: str
    state: str
    kind: str
    protocol_type: str


@dataclass(frozen=True, slots=True)
class GroupMember:
    """A member and the partitions that it reads. ``kind`` is the protocol that it speaks."""

    member_id: str
    instance_id: str | None
    client_id: str
    host: str
    assignment: tuple[TopicPartition, ...]
    kind: str = "classic"


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group and its members. ``protocol`` is how partitions are assigned."""

    group: str
    state: str
    protocol_type: str
    protocol: str
    members: tuple[GroupMember, ...]
    kind: str = "classic"

    @property
    def idle(self) -> bool:
        """Whether it has no members, so that its offsets may be changed from outside."""
        return self.state in _IDLE_STATES


async def list_groups(cluster: Cluster) -> list[ListedGroup]:
    """The groups of all nodes, by name."""

    async def ask() -> list[ListedGroup]:
        await cluster.all_topics()
        found: dict[str, ListedGroup] = {}
        for node_id in sorted(cluster.nodes):
            response = await (await cluster.connection(node_id)).request("ListGroups", {})
            check(response.error_code, None, f"listing the groups of node {node_id}")
            for entry in response.groups:
                found[entry.group_id] = ListedGroup(
                    entry.group_id,
                    getattr(entry, "group_state", ""),
                    getattr(entry, "group_type", "classic"),
                    entry.protocol_type,
                )
        return [found[name] for name in sorted(found)]

    return await cluster.retrying(ask)


async def describe_group(cluster: Cluster, group: str) -> GroupDescription:
    """The group. Raises ``ApiError`` GROUP_ID_NOT_FOUND if there is none."""

    async def ask() -> GroupDescription:
        response = await cluster.to_coordinator(group, "DescribeGroups", {"groups": [group]})
        (found,) = response.groups
        if found.error_code == ErrorCode.group_id_not_found or found.group_state == _DEAD:
            # Groups of the new protocol are unknown to this API.
            return await _describe_consumer_group(cluster, group)
        check(found.error_code, getattr(found, "error_message", None), f"describing group {group!r}")
        members = tuple(
            GroupMember(
                member.member_id,
                getattr(member, "group_instance_id", None),
                member.client_id,
                member.client_host,
                parse_assignment(member.member_assignment) if found.protocol_type == "consumer" else (),
            )
            for member in found.members
        )
        return GroupDescription(group, found.group_state, found.protocol_type, found.protocol_data, members)

    return await cluster.retrying(ask)


async def _describe_consumer_group(cluster: Cluster, group: str) -> GroupDescription:
    try:
        response = await cluster.to_coordinator(group, "ConsumerGroupDescribe", {"group_ids": [group]})
    except ApiError as error:
        if error.code is ErrorCode.unsupported_version:
            # A server without the new protocol has no such groups.
            raise _no_group(group) from error
        raise
    (found,) = response.groups
    if found.error_code == ErrorCode.group_id_not_found:
        raise await _not_such_a_group(cluster, group)
    check(found.error_code, found.error_message, f"describing group {group!r}")
    members = tuple(
        GroupMember(
            member.member_id,
            member.instance_id,
            member.client_id,
            member.client_host,
            tuple(
                (topic.topic_name, index)
                for topic in member.assignment.topic_partitions
                for index in topic.partitions
            ),
            "classic" if getattr(member, "member_type", -1) == _CLASSIC_MEMBER else "consumer",
        )
        for member in found.members
    )
    return GroupDescription(group, found.group_state, "consumer", found.assignor_name, members, "consumer")


async def _not_such_a_group(cluster: Cluster, group: str) -> ApiError:
    """The error for a consumer group that does not exist; it says so if the name is a share group's."""
    try:
        response = await cluster.to_coordinator(group, "ShareGroupDescribe", {"group_ids": [group]})
    except ApiError as error:
        if error.code is not ErrorCode.unsupported_version:
            raise
        return _no_group(group)
    if response.groups[0].error_code != ErrorCode.none:
        return _no_group(group)
    return ApiError(
        ErrorCode.group_id_not_found,
        f"group {group!r} is a share group; 'tidemill share describe {group}' shows it",
    )


async def delete_group(cluster: Cluster, group: str) -> None:
    """Delete a group without members, and its offsets."""

    async def ask() -> None:
        response = await cluster.to_coordinator(group, "DeleteGroups", {"groups_names": [group]})
        (result,) = response.results
        if result.error_code == ErrorCode.group_id_not_found:
            raise _no_group(group)
        if result.error_code == ErrorCode.non_empty_group:
            raise ApiError(
                ErrorCode.non_empty_group,
                f"group {group!r} has members; stop its consumers first "
                f"('tidemill group describe {group}' shows them)",
            )
        check(result.error_code, None, f"deleting group {group!r}")

    await cluster.retrying(ask)


async def fetch_offsets(
    cluster: Cluster,
    group: str,
    partitions: Iterable[TopicPartition] | None = None,
    *,
    require_stable: bool = False,
) -> dict[TopicPartition, int]:
    """The committed offsets of the group: of these partitions, or all; those without a commit are absent.

    ``require_stable``: wait for transactions that may change them.
    """
    topics = None if partitions is None else _indexes_by_topic(partitions)
    body = {"groups": [{"group_id": group, "topics": topics}], "require_stable": require_stable}

    async def ask() -> dict[TopicPartition, int]:
        response = await cluster.to_coordinator(group, "OffsetFetch", body, versions=_OFFSET_FETCH_VERSIONS)
        (found,) = response.groups
        check(found.error_code, None, f"the offsets of group {group!r}")
        offsets: dict[TopicPartition, int] = {}
        for topic in found.topics:
            for entry in topic.partitions:
                check(entry.error_code, None, f"the offset of {topic.name}-{entry.partition_index}")
                if entry.committed_offset >= 0:
                    offsets[topic.name, entry.partition_index] = entry.committed_offset
        return offsets

    return await cluster.retrying(ask)


async def commit_offsets(
    cluster: Cluster,
    group: str,
    offsets: Mapping[TopicPartition, int],
    identity: Identity = NO_MEMBER,
) -> None:
    """Commit offsets. Raises ``ApiError`` UNKNOWN_MEMBER_ID if the group has members, but not this one."""
    topics: dict[str, list[dict[str, Any]]] = {}
    for (topic, index), offset in offsets.items():
        topics.setdefault(topic, []).append({"partition_index": index, "committed_offset": offset})
    body = {
        "group_id": group,
        "generation_id_or_member_epoch": identity.generation,
        "member_id": identity.member_id,
        "topics": [{"name": name, "partitions": entries} for name, entries in topics.items()],
    }

    async def ask() -> None:
        response = await cluster.to_coordinator(group, "OffsetCommit", body, versions=_OFFSET_COMMIT_VERSIONS)
        for topic in response.topics:
            for entry in topic.partitions:
                check(
                    entry.error_code,
                    None,
                    f"committing {topic.name}-{entry.partition_index} for group {group!r}",
                )

    await cluster.retrying(ask)


async def delete_offsets(cluster: Cluster, group: str, partitions: Iterable[TopicPartition]) -> None:
    """Forget the committed offsets of these partitions."""
    topics = [
        {
            "name": entry["name"],
            "partitions": [{"partition_index": index} for index in entry["partition_indexes"]],
        }
        for entry in _indexes_by_topic(partitions)
    ]

    async def ask() -> None:
        response = await cluster.to_coordinator(group, "OffsetDelete", {"group_id": group, "topics": topics})
        check(response.error_code, None, f"deleting offsets of group {group!r}")
        for topic in response.topics:
            for entry in topic.partitions:
                check(entry.error_code, None, f"the offset of {topic.name}-{entry.partition_index}")

    await cluster.retrying(ask)


def _indexes_by_topic(partitions: Iterable[TopicPartition]) -> list[dict[str, Any]]:
    topics: dict[str, list[int]] = {}
    for topic, index in partitions:
        topics.setdefault(topic, []).append(index)
    return [{"name": name, "partition_indexes": indexes} for name, indexes in topics.items()]


def _no_group(group: str) -> ApiError:
    return ApiError(
        ErrorCode.group_id_not_found,
        f"there is no group {group!r}; 'tidemill group list' shows those that exist",
    )
