"""``tidemill share list | describe | lag | peek | reset-offsets | delete | redrive``."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tidemill.cli.session import ExecuteOption, Session, YesOption, command, confirm

if TYPE_CHECKING:
    from tidemill.cli.positions import Position
    from tidemill.client.admin.share_groups import ShareOffset, SharePartitionRecords, ShareRecords
    from tidemill.client.cluster import Cluster, TopicPartition

__all__ = ("register",)

GroupArgument = Annotated[str, typer.Argument(metavar="GROUP", help="The name of the share group.")]
TopicOption = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        metavar="TOPIC[:P,P]",
        help="Only this topic, or partitions of it like orders:0,2; repeatable.",
    ),
]

_COUNTS: Final = (
    *("topic", "partition", "start", "end"),
    *("acquired", "available", "delayed", "blocked", "letters due"),
    *("waiting", "stalled"),
)


class RecordState(StrEnum):
    """What a share group may be doing with a record."""

    ACQUIRED = "acquired"
    AVAILABLE = "available"
    DELAYED = "delayed"
    BLOCKED = "blocked"
    DEAD_LETTER_DUE = "dead-letter-due"
    DEAD = "dead"


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    command(app, "list")(list_groups)
    command(app, "describe")(describe)
    command(app, "lag")(lag)
    command(app, "peek")(peek)
    command(app, "reset-offsets")(reset_offsets)
    command(app, "delete")(delete)
    command(app, "redrive")(redrive_letters)


def list_groups(session: Session) -> None:
    """List the share groups."""
    from tidemill.cli.output import Table, show
    from tidemill.client.admin.share_groups import list_share_groups

    groups = session.run(list_share_groups)
    value = [{"group": each.group, "state": each.state} for each in groups]
    show(session, value, Table(("group", "state"), [(each.group, each.state) for each in groups]))


def describe(session: Session, group: GroupArgument) -> None:
    """Show a share group: its members, and where it starts and how far it is behind in each partition."""
    from tidemill.cli.output import Table, show

    found = session.run(lambda cluster: _describe(cluster, group))
    offsets = _offsets_table(
        found["offsets"],
        title=f"share group {group}: {found['state']}, {len(found['members'])} members, lag {found['lag']}",
    )
    members = Table(
        ("member", "client", "host", "epoch", "partitions"),
        [
            (each["member_id"], each["client_id"], each["host"], each["epoch"], _in_short(each["partitions"]))
            for each in found["members"]
        ],
    )
    show(session, found, offsets, *([members] if found["members"] else []))


def lag(session: Session, group: GroupArgument, topic: TopicOption = None) -> None:
    """Show how many records a share group has not finished, in each partition and in all."""
    from tidemill.cli.output import show

    async def work(cluster: Cluster) -> list[dict[str, Any]]:
        return _offset_rows(await _offsets(cluster, group, topic or []))

    rows = session.run(work)
    total = sum(row["lag"] or 0 for row in rows)
    value = {"group": group, "lag": total, "offsets": rows}
    show(session, value, _offsets_table(rows, title=f"share group {group}: lag {total}"))


def _offsets_table(rows: list[dict[str, Any]], title: str) -> Any:
    from tidemill.cli.output import Table

    return Table(
        ("topic", "partition", "start", "lag"),
        [(row["topic"], row["partition"], row["start_offset"], row["lag"]) for row in rows],
        title=title,
    )


def _offset_rows(offsets: dict[TopicPartition, ShareOffset]) -> list[dict[str, Any]]:
    return [
        {"topic": name, "partition": index, "start_offset": at.start_offset, "lag": at.lag}
        for (name, index), at in sorted(offsets.items())
    ]


def _in_short(partitions: list[dict[str, Any]]) -> str:
    """Partitions by topic in short, for a column: ``orders 0 1, users 4``."""
    by_topic: dict[str, list[str]] = {}
    for each in partitions:
        by_topic.setdefault(each["topic"], []).append(str(each["partition"]))
    return ", ".join(f"{topic} {' '.join(indexes)}" for topic, indexes in sorted(by_topic.items()))


async def _offsets(cluster: Cluster, group: str, topics: list[str]) -> dict[TopicPartition, ShareOffset]:
    """Where the group starts: in the partitions of these topics, or in all that it has."""
    from tidemill.cli.positions import topic_partitions
    from tidemill.client.admin.share_groups import share_offsets

    partitions = [each for text in topics for each in await topic_partitions(cluster, text)]
    return await share_offsets(cluster, group, partitions or None)


async def _describe(cluster: Cluster, name: str) -> dict[str, Any]:
    from tidemill.client.admin.share_groups import describe_share_group

    group = await describe_share_group(cluster, name)
    rows = _offset_rows(await _offsets(cluster, name, []))
    return {
        "group": name,
        "state": group.state,
        "epoch": group.epoch,
        "assignor": group.assignor,
        "lag": sum(row["lag"] or 0 for row in rows),
        "members": [
            {
                "member_id": member.member_id,
                "epoch": member.epoch,
                "client_id": member.client_id,
                "host": member.host,
                "topics": list(member.topics),
                "partitions": [
                    {"topic": topic, "partition": index} for topic, index in sorted(member.assignment)
                ],
            }
            for member in group.members
        ],
        "offsets": rows,
    }


def peek(
    session: Session,
    group: GroupArgument,
    topic: TopicOption = None,
    state: Annotated[
        list[RecordState] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help=f"Only records in this state: {', '.join(RecordState)}; repeatable.",
        ),
    ] = None,
    limit: Annotated[
        int,
        typer.Option(
            "--limit",
            metavar="N",
            min=1,
            max=1_000,
            help="The most lines for each partition, and the most dead letters.",
        ),
    ] = 20,
) -> None:
    """Show the records that a share group has not finished, without taking them.

    A line is a run of offsets in one state: acquired (a member holds them), available, delayed (they come
    back later), blocked (an earlier record of their key is not finished), dead-letter-due (they died, and
    their letters are not written yet), or dead: they block their key, as tidemill.share.on.dead says, or have
    a letter in the group's dead-letter topic that was not sent back. Of these the newest are shown. An age
    with ≥ may be larger: the partition's leader has read the group's state no longer ago.

    Waiting are the records that are delayed, blocked or due as dead letters. A partition in which as many
    wait as tidemill.share.max.waiting.records allows is stalled: it hands out nothing new.
    """
    from tidemill.cli.output import Table, show

    found = session.run(lambda cluster: _peek(cluster, group, topic or [], state or [], limit))
    counts = Table(
        _COUNTS,
        [
            (
                each.topic,
                each.partition,
                each.start_offset,
                each.end_offset,
                each.acquired,
                each.available,
                each.delayed,
                each.blocked,
                each.dead_letters_due,
                _waiting(each),
                "yes" if each.is_stalled else "no",
            )
            for each in found
        ],
        title=f"share group {group}",
    )
    records = Table(
        ("topic", "partition", "first", "last", "state", "deliveries", "owner", "age", "until", "reason"),
        [
            (
                each.topic,
                each.partition,
                run.first_offset,
                run.last_offset,
                run.state,
                run.delivery_count,
                run.owner or None,
                _age(run),
                _time(run.until_ms),
                run.reason or None,
            )
            for each in found
            for run in each.records
        ],
    )
    shown = [counts, records] if any(each.records for each in found) else [counts]
    show(session, {"group": group, "partitions": [_as_value(each) for each in found]}, *shown)


async def _peek(
    cluster: Cluster, group: str, topics: list[str], states: list[RecordState], limit: int
) -> list[SharePartitionRecords]:
    """What a group does with the records of its partitions, and which of them died."""
    from dataclasses import replace

    from tidemill.client.admin.share_groups import share_records
    from tidemill.client.share.dead_letters import newest_dead

    wanted = [each.value for each in states]
    found = {
        partition: await share_records(cluster, group, partition, states=wanted, limit=limit)
        for partition in sorted(await _offsets(cluster, group, topics))
    }
    if not states or RecordState.DEAD in states:
        for partition, dead in await newest_dead(cluster, group, limit):
            known = found.get(partition)
            # One that blocks its key was told by the leader already.
            if known is not None and not any(
                run.first_offset <= dead.first_offset <= run.last_offset for run in known.records
            ):
                found[partition] = replace(known, records=(*known.records, dead))
    return list(found.values())


def _as_value(found: SharePartitionRecords) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(found) | {"waiting": found.waiting}


def _waiting(found: SharePartitionRecords) -> str:
    """How many records wait, of how many that may: ``12 of 10000``."""
    return f"{found.waiting} of {'?' if found.max_waiting is None else found.max_waiting}"


def _age(records: ShareRecords) -> str:
    """How long records have been held or have waited, with "≥" if the leader took over meanwhile."""
    return f"{'≥ ' if records.is_age_minimum else ''}{records.age_ms / 1000:.1f} s"


def _time(at_ms: int) -> str | None:
    """A moment as people read it: local time, to the second."""
    from datetime import datetime

    return datetime.fromtimestamp(at_ms / 1000).astimezone().isoformat(timespec="seconds") if at_ms else None


def reset_offsets(
    session: Session,
    group: GroupArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="WHERE",
            help="earliest, latest, an offset, a time like 2025-01-31T12:00, an age like -10m (10 minutes "
            "ago), or a shift of the present start like -5 or +5.",
        ),
    ],
    topic: TopicOption = None,
    execute: ExecuteOption = False,
) -> None:
    """Set where a share group that has no members starts, so that it reads again or skips.

    Without --topic, all partitions that the group has read or was to read are moved.
    """
    from tidemill.cli.positions import position_argument, show_moves

    position = position_argument(to, "--to")
    before, after = session.run(lambda cluster: _reset(cluster, group, topic or [], position, execute))
    show_moves(session, group, before, after, executed=execute)


async def _reset(
    cluster: Cluster, group: str, topics: list[str], position: Position, execute: bool
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Reset offsets; gives those before and those after."""
    from tidemill.cli.positions import offsets_at
    from tidemill.client.admin.share_groups import alter_share_offsets, describe_share_group
    from tidemill.errors import ApiError, ErrorCode

    found = await describe_share_group(cluster, group)
    if found.members:
        raise ApiError(
            ErrorCode.non_empty_group,
            f"share group {group!r} has {len(found.members)} members; its offsets can be reset when its "
            f"consumers are stopped ('tidemill share describe {group}' shows them)",
        )
    offsets = await _offsets(cluster, group, topics)
    before = {each: at.start_offset for each, at in offsets.items() if at.start_offset is not None}
    after = await offsets_at(cluster, list(offsets), position, shift_from=before)
    if execute and after:
        await alter_share_offsets(cluster, group, after)
    return before, after


def delete(
    session: Session,
    groups: Annotated[list[str], typer.Argument(metavar="GROUP", help="The share groups to delete.")],
    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", metavar="TOPIC", help="Forget only this topic, not the group; repeatable."),
    ] = None,
    yes: YesOption = False,
) -> None:
    """Delete share groups that have no members, or only what they know of some topics.

    A group that is made again, or reads a topic again, starts where share.auto.offset.reset says.
    """
    from tidemill.cli.output import write_json, write_line
    from tidemill.client.admin.share_groups import delete_share_group, delete_share_offsets

    async def work(cluster: Cluster) -> None:
        for group in groups:
            if topic:
                await delete_share_offsets(cluster, group, topic)
            else:
                await delete_share_group(cluster, group)

    names = ", ".join(groups)
    what = f"what share group {names} knows of {', '.join(topic)}" if topic else f"share group {names}"
    confirm(f"Delete {what}?", yes=yes)
    session.run(work)
    if session.as_json:
        write_json({"groups": groups, "topics": topic, "deleted": "offsets" if topic else "groups"})
    else:
        for group in groups:
            done = f"topics of share group {group} forgotten" if topic else f"share group {group} deleted"
            write_line(done)


def redrive_letters(
    session: Session,
    group: GroupArgument,
    reason: Annotated[
        str | None, typer.Option("--reason", metavar="TEXT", help="Only letters whose reason has this text.")
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", metavar="TIME", help="Only records that died since then: 2025-01-31T12:00, or -10m."
        ),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Only records that died before then.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="TOPIC", help="The dead-letter topic; without it, that of the group's configs."
        ),
    ] = None,
    execute: ExecuteOption = False,
    yes: YesOption = False,
) -> None:
    """Send dead letters of a share group back to the topics that they came from, each once.

    Without --execute it only shows what would be sent. Every other group that reads these topics sees the
    records again, too. A record that comes back has the header tidemill-redriven-for with the name of this
    group.
    """
    from tidemill.cli.dead_letters import send_back, show_sent_back
    from tidemill.client.share.redrive import Choice, Redriven, redrive
    from tidemill.errors import TidemillError

    choice = Choice(group, reason, _moment(since, "--since"), _moment(until, "--until"))

    async def work(cluster: Cluster, execute: bool) -> Redriven:
        return await redrive(cluster, choice, dead_letters=source, execute=execute)

    done = send_back(session, work, execute=execute, yes=yes)
    others = {
        "not_chosen": done.not_chosen,
        "without_contents": done.without_contents,
        "topic_is_gone": done.topic_is_gone,
        "not_looked_at": done.not_looked_at,
    }
    show_sent_back(session, {"group": group}, done, others, executed=execute)
    if done.not_looked_at:
        raise TidemillError(
            f"{done.not_looked_at} offsets of the dead-letter topic were not looked at: too many letters "
            "before them are kept. Send some of these back, or delete them (tidemill topic trim), and run "
            "this again"
        )


def _moment(text: str | None, option: str) -> int | None:
    """A time in milliseconds as people write it; a mistake is a usage error."""
    from tidemill.cli.positions import PositionKind, position_argument

    if text is None:
        return None
    position = position_argument(text, option)
    if position.kind is not PositionKind.TIME:
        raise typer.BadParameter(f"{text!r} is no time like 2025-01-31T12:00 or -10m", param_hint=option)
    return position.value
