"""``tidemill cursor list | describe | lag | reset | pause | resume | delete | replay``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from tidemill.cli.session import ExecuteOption, Session, YesOption, command, confirm

if TYPE_CHECKING:
    from tidemill.client.cluster import Cluster
    from tidemill.client.cursors.admin import CursorInfo
    from tidemill.client.cursors.cursor import Start
    from tidemill.client.cursors.lag import Lag

__all__ = ("register",)

NameArgument = Annotated[str, typer.Argument(metavar="CURSOR", help="The name of the cursor.")]
TopicOption = Annotated[
    str | None, typer.Option("--topic", metavar="TOPIC", help="Only cursors over this topic or table.")
]
ForceOption = Annotated[
    bool, typer.Option("--force", help="Also while a process owns it; its next commit is refused.")
]


def register(app: typer.Typer) -> None:
    """Add the commands to ``app``."""
    command(app, "list")(list_cursors)
    command(app, "describe")(describe)
    command(app, "lag")(lag)
    command(app, "reset")(reset)
    command(app, "pause")(pause)
    command(app, "resume")(resume)
    command(app, "delete")(delete)
    command(app, "replay")(replay)


def list_cursors(session: Session, topic: TopicOption = None) -> None:
    """List the cursors that the cluster keeps."""
    from tidemill.cli.output import Table, show
    from tidemill.client.cursors import admin

    found = session.run(lambda cluster: admin.list_cursors(cluster, topic))
    rows = [(each.name, each.region, _state(each), len(each.partitions)) for each in found]
    show(session, [_value(each) for each in found], Table(("cursor", "region", "state", "partitions"), rows))


def describe(session: Session, name: NameArgument) -> None:
    """Show a cursor: its region, its owner, and where it stands in each partition."""
    from tidemill.cli.output import Table, show, write_line
    from tidemill.client.cursors import admin

    async def ask(cluster: Cluster) -> tuple[CursorInfo, Lag]:
        info = await admin.describe_cursor(cluster, name)
        return info, await admin.cursor_lag(cluster, info)

    info, behind = session.run(ask)
    rows = [
        (
            each.partition,
            each.position.offset,
            "yes" if each.position.started else "no",
            len(each.finished),
            behind.partitions[each.partition].records,
            each.epoch,
            each.owner if each.alive else "",
        )
        for each in info.partitions
    ]
    kept = _HOMES[info.home.name]
    title = f"cursor {info.name} over {info.region}: {_state(info)}; its position is kept {kept}"
    columns = ("partition", "position", "started", "finished ahead", "lag", "epoch", "owner")
    show(session, _value(info, behind), Table(columns, rows, title=title))
    if not session.as_json:
        for number, each in behind.partitions.items():
            if each.problem is not None:
                write_line(f"partition {number}: {each.problem}")


def lag(
    session: Session,
    names: Annotated[
        list[str] | None, typer.Argument(metavar="CURSOR", help="Which cursors. Default: all.")
    ] = None,
    topic: TopicOption = None,
) -> None:
    """Show how far each cursor is behind, in records and in seconds."""
    from tidemill.cli.output import Table, show
    from tidemill.client.cursors import admin

    async def ask(cluster: Cluster) -> list[tuple[CursorInfo, Lag]]:
        chosen = [await admin.describe_cursor(cluster, name) for name in names or ()]
        if not names:
            chosen = await admin.list_cursors(cluster, topic)
        return [
            (info, await admin.cursor_lag(cluster, info)) for info in chosen if topic in (None, info.topic)
        ]

    found = session.run(ask)
    rows = [
        (info.name, info.topic, behind.records, f"{behind.seconds:.1f}", _state(info, behind))
        for info, behind in found
    ]
    show(
        session,
        [_value(info, behind) for info, behind in found],
        Table(("cursor", "topic", "records", "seconds", "state"), rows),
    )


def reset(
    session: Session,
    name: NameArgument,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="WHERE",
            help="earliest, latest, an offset, a time like 2025-01-31T12:00, an age like -10m (10 minutes "
            "ago), or a shift of the position like -5 or +5.",
        ),
    ],
    partition: Annotated[
        list[int] | None, typer.Option("--partition", metavar="P", help="Only this partition; repeatable.")
    ] = None,
    execute: ExecuteOption = False,
    force: ForceOption = False,
) -> None:
    """Set the position of a cursor, so that it reads again or skips."""
    from tidemill.cli.output import Table, show, write_line
    from tidemill.cli.positions import PositionKind, position_argument
    from tidemill.client.cursors import admin

    wanted = position_argument(to, "--to")

    async def ask(cluster: Cluster) -> tuple[CursorInfo, dict[int, Any]]:
        info = await admin.describe_cursor(cluster, name)
        start: Start = to
        if wanted.kind is PositionKind.SHIFT:
            chosen = info.positions if partition is None else partition
            start = {
                each: info.positions[each].offset + wanted.value for each in chosen if each in info.positions
            }
        after = await admin.plan_reset(cluster, info, start, partition)
        if execute:
            await admin.reset_cursor(cluster, name, after, force=force)
        return info, after

    info, after = session.run(ask)
    before = info.positions
    value = {
        "cursor": name,
        "executed": execute,
        "partitions": [
            {"partition": each, "from": before[each].offset, "to": after[each].offset}
            for each in sorted(after)
        ],
    }
    rows = [(each, before[each].offset, after[each].offset) for each in sorted(after)]
    show(session, value, Table(("partition", "from", "to"), rows))
    if not session.as_json and not execute:
        write_line("nothing was changed; add --execute to do it")


def pause(session: Session, name: NameArgument) -> None:
    """Have a cursor deliver nothing until it is resumed."""
    _set_paused(session, name, paused=True)


def resume(session: Session, name: NameArgument) -> None:
    """Let a paused cursor go on."""
    _set_paused(session, name, paused=False)


def _set_paused(session: Session, name: str, *, paused: bool) -> None:
    from tidemill.client.cursors import admin

    session.run(lambda cluster: admin.pause_cursor(cluster, name, paused=paused))
    _tell(
        session, f"cursor {name} is {'paused' if paused else 'resumed'}", {"cursor": name, "paused": paused}
    )


def delete(session: Session, name: NameArgument, force: ForceOption = False, yes: YesOption = False) -> None:
    """Delete a cursor and its position. Opened again, it begins anew.

    A position in a file or in a database stays: the cluster only forgets that there is one.
    """
    from tidemill.client.cursors import admin

    async def ask(cluster: Cluster) -> CursorInfo:
        info = await admin.describe_cursor(cluster, name)
        await admin.delete_cursor(cluster, name, force=force)
        return info

    confirm(f"Delete cursor {name} and its position?", yes=yes)
    info = session.run(ask)
    told = f"deleted cursor {name}"
    if not info.is_position_kept:
        told = f"the cluster has forgotten cursor {name}; its position stays {_HOMES[info.home.name]}"
    _tell(session, told, {"cursor": name, "deleted": True})


def replay(
    session: Session,
    name: Annotated[str, typer.Argument(metavar="WORKER", help="The name of the worker that parked them.")],
    letters: Annotated[
        str, typer.Option("--from", metavar="TOPIC", help="The dead-letter topic that has the records.")
    ],
    execute: ExecuteOption = False,
    yes: YesOption = False,
) -> None:
    """Send the records that an ordered worker has parked back to their topics, each once.

    Without --execute it only shows what would be sent. Everything else that reads these topics sees the
    records again, too. A record that comes back has the header tidemill-redriven-for with the name of the
    worker.
    """
    from tidemill.cli.dead_letters import send_back, show_sent_back
    from tidemill.cli.output import write_line
    from tidemill.client.cursors.replay import Replayed
    from tidemill.client.cursors.replay import replay as replay_letters

    async def work(cluster: Cluster, execute: bool) -> Replayed:
        return await replay_letters(cluster, name, letters, execute=execute)

    done = send_back(session, work, execute=execute, yes=yes)
    others = {"parked_twice": done.parked_twice, "without_contents": done.without_contents}
    show_sent_back(session, {"worker": name}, done, others, executed=execute)
    if done.without_contents and not session.as_json:
        write_line(
            f"{done.without_contents} records were too large to be parked whole: the headers "
            "__dlq.errors.topic, .partition and .offset of their letters say where they are. Read them there "
            "(tidemill topic consume), and produce them again if they are to be handled"
        )


def _tell(session: Session, text: str, value: dict[str, Any]) -> None:
    from tidemill.cli.output import write_json, write_line

    if session.as_json:
        write_json(value)
    else:
        write_line(text)


_HOMES: Final = {
    "CLUSTER": "by the cluster",
    "TRANSACTIONS": "in its transactions",
    "FILE": "in a file",
    "DATABASE": "in a database",
    "UNKNOWN": "by the cluster or in its transactions",
}


def _state(info: CursorInfo, behind: Lag | None = None) -> str:
    state = "owned" if info.owners else "idle"
    if info.paused:
        state = f"paused, {state}"
    has_problem = behind is not None and any(each.problem for each in behind.partitions.values())
    return f"{state}, cannot go on (see describe)" if has_problem else state


def _value(info: CursorInfo, behind: Lag | None = None) -> dict[str, Any]:
    value: dict[str, Any] = {
        "cursor": info.name,
        "topic": info.topic,
        "region": info.region,
        "kept_in": info.home.name.lower(),
        "paused": info.paused,
        "owners": info.owners,
        "created_ms": info.created_ms,
        "committed_ms": info.committed_ms,
        "partitions": [
            {
                "partition": each.partition,
                "offset": each.position.offset,
                "leader_epoch": each.position.leader_epoch,
                "started": each.position.started,
                "finished": list(each.finished),
                "epoch": each.epoch,
                "owner": each.owner,
                "alive": each.alive,
                "committed_ms": each.committed_ms,
            }
            for each in info.partitions
        ],
    }
    if behind is not None:
        value |= {"lag_records": behind.records, "lag_seconds": behind.seconds}
        for each in value["partitions"]:
            found = behind.partitions[each["partition"]]
            each |= {"lag_records": found.records, "lag_seconds": found.seconds, "problem": found.problem}
    return value
