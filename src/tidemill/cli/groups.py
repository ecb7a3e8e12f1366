"""``tidemill group list | describe | reset-offsets | delete``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.session import ExecuteOption, Session, YesOption, command, confirm

if TYPE_CHECKING:
    from tidemill.cli.positions import Position
    from tidemill.client.cluster import Cluster, TopicPartition

__all__ = ("register",)

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The name of the group.")]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    command(app, "list")(list_groups)
    command(app, "describe")(describe)
    command(app, "reset-offsets")(reset_offsets)
    command(app, "delete")(delete)


def list_groups(session: Session) -> None:
    """List the consumer groups."""
    from tidemill.cli.output import Table, show
    from tidemill.client.admin import groups as group_admin

    groups = session.run(group_admin.list_groups)
    value = [
        {"group": each.group, "state": each.state, "kind": each.kind, "protocol_type": each.protocol_type}
        for each in groups
    ]
    rows = [(each.group, each.state, each.kind) for each in groups]
    show(session, value, Table(("group", "state", "kind"), rows))


def describe(session: Session, group: GroupArgument) -> None:
    """Show a group: its members, and the committed offset and lag of each partition."""
    from tidemill.cli.output import Table, show

    found = session.run(lambda cluster: _describe(cluster, group))
    offsets = Table(
        ("topic", "partition", "committed", "end", "lag", "member"),
        [
            (
                entry["topic"],
                entry["partition"],
                entry["committed_offset"],
                entry["end_offset"],
                entry["lag"],
                entry["member_id"],
            )
            for entry in found["offsets"]
        ],
        title=f"group {group} ({found['kind']}): {found['state']}, {len(found['members'])} members, "
        f"lag {found['lag']}",
    )
    members = Table(
        ("member", "instance", "client", "host", "protocol", "partitions"),
        [
            (
                each["member_id"],
                each["instance_id"],
                each["client_id"],
                each["host"],
                each["kind"],
                _in_short(each["partitions"]),
            )
            for each in found["members"]
        ],
    )
    show(session, found, offsets, *([members] if found["members"] else []))


def _in_short(partitions: list[dict[str, Any]]) -> str:
    """Partitions by topic in short, for a column: ``orders 0 1, users 4``."""
    by_topic: dict[str, list[str]] = {}
    for each in partitions:
        by_topic.setdefault(each["topic"], []).append(str(each["partition"]))
    return ", ".join(f"{topic} {' '.join(indexes)}" for topic, indexes in sorted(by_topic.items()))


async def _describe(cluster: Cluster, name: str) -> dict[str, Any]:
    from tidemill.client.admin.groups import describe_group, fetch_offsets

    group = await describe_group(cluster, name)
    committed = await fetch_offsets(cluster, name)
    readers = {partition: member.member_id for member in group.members for partition in member.assignment}
    ends = await _ends(cluster, {*committed, *readers})
    offsets = []
    for partition in sorted({*committed, *readers}):
        offset, end = committed.get(partition), ends.get(partition)
        offsets.append(
            {
                "topic": partition[0],
                "partition": partition[1],
                "committed_offset": offset,
                "end_offset": end,
                "lag": None if offset is None or end is None else max(0, end - offset),
                "member_id": readers.get(partition),
            }
        )
    return {
        "group": name,
        "state": group.state,
        "kind": group.kind,
        "protocol_type": group.protocol_type,
        "protocol": group.protocol,
        "lag": sum(entry["lag"] or 0 for entry in offsets),
        "members": [
            {
                "member_id": member.member_id,
                "instance_id": member.instance_id,
                "client_id": member.client_id,
                "host": member.host,
                "kind": member.kind,
                "partitions": [{"topic": topic, "partition": index} for topic, index in member.assignment],
            }
            for member in group.members
        ],
        "offsets": offsets,
    }


async def _ends(cluster: Cluster, partitions: set[TopicPartition]) -> dict[TopicPartition, int]:
    """The end offsets of the partitions. Those of a deleted topic, which may have offsets, are left out."""
    from tidemill.client.admin.topics import LATEST, list_offsets

    existing = {
        (topic.name, partition.index)
        for topic in await cluster.all_topics()
        for partition in topic.partitions
    }
    found = await list_offsets(cluster, dict.fromkeys(partitions & existing, LATEST))
    return {partition: at.offset for partition, at in found.items()}


def reset_offsets(
    session: Session,
    group: GroupArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="WHERE",
            help="earliest, latest, an offset, a time like 2025-01-31T12:00, an age like -10m (10 minutes "
            "ago), or a shift of the committed offset like -5 or +5.",
        ),
    ],
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "--topic", metavar="TOPIC[:P,P]", help="The topic, or partitions like orders:0,2; repeatable."
        ),
    ] = None,
    execute: ExecuteOption = False,
) -> None:
    """Set the committed offsets of a group that has no members, so that it reads again or skips.

    Without --topic, all partitions for which the group has offsets are moved.
    """
    from tidemill.cli.positions import position_argument, show_moves

    position = position_argument(to, "--to")
    before, after = session.run(lambda cluster: _reset(cluster, group, topic or [], position, execute))
    show_moves(session, group, before, after, executed=execute)


async def _reset(
    cluster: Cluster, group: str, topics: list[str], position: Position, execute: bool
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Reset offsets; gives those before and those after."""
    from tidemill.cli.positions import offsets_at, topic_partitions
    from tidemill.client.admin.groups import commit_offsets, describe_group, fetch_offsets
    from tidemill.errors import ApiError, ErrorCode

    found = await _or_none(describe_group(cluster, group))
    if found is not None and not found.idle:
        raise ApiError(
            ErrorCode.non_empty_group,
            f"group {group!r} is {found.state} with {len(found.members)} members; "
            "its offsets can be reset when its consumers are stopped "
            f"('tidemill group describe {group}' shows them)",
        )
    if found is None and not topics:
        raise ApiError(
            ErrorCode.group_id_not_found,
            f"there is no group {group!r}; name a --topic to give it first offsets",
        )
    before = {} if found is None else await fetch_offsets(cluster, group)
    partitions = [each for text in topics for each in await topic_partitions(cluster, text)] or list(before)
    after = await offsets_at(cluster, partitions, position, shift_from=before)
    if execute and after:
        await commit_offsets(cluster, group, after)
    return before, after


async def _or_none(question: Any) -> Any:
    """The answer, or None if there is no such group."""
    from tidemill.errors import ApiError, ErrorCode

    try:
        return await question
    except ApiError as error:
        if error.code != ErrorCode.group_id_not_found:
            raise
        return None


def delete(
    session: Session,
    groups: Annotated[list[str], typer.Argument(metavar="GROUP", help="The groups to delete.")],
    topic: Annotated[
        list[str] | None,
        typer.Option(
            "--topic", metavar="TOPIC[:P,P]", help="Delete only the offsets of this topic, not the group."
        ),
    ] = None,
    yes: YesOption = False,
) -> None:
    """Delete groups that have no members, or only their committed offsets of some topics."""
    from tidemill.cli.output import write_json, write_line
    from tidemill.cli.positions import topic_partitions
    from tidemill.client.admin.groups import delete_group, delete_offsets

    async def work(cluster: Cluster) -> None:
        partitions = [each for text in topic or () for each in await topic_partitions(cluster, text)]
        for group in groups:
            if topic:
                await delete_offsets(cluster, group, partitions)
            else:
                await delete_group(cluster, group)

    what = f"the offsets of {', '.join(topic)} of group" if topic else "group"
    confirm(f"Delete {what} {', '.join(groups)}?", yes=yes)
    session.run(work)
    if session.as_json:
        write_json({"groups": groups, "topics": topic, "deleted": "offsets" if topic else "groups"})
    else:
        for group in groups:
            write_line(f"offsets of group {group} forgotten" if topic else f"group {group} deleted")
