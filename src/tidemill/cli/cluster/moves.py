"""``tidemill cluster reassign | drain | remove``: move replicas and leaderships, and take nodes away."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.cluster.naming import named_node, named_nodes
from tidemill.cli.session import ExitCode, Session, YesOption, confirm

if TYPE_CHECKING:
    from tidemill.cli.cluster.draining import DrainPlan
    from tidemill.client.cluster import Cluster, TopicPartition

__all__ = ("drain", "reassign", "remove")

_POLL_SECONDS = 0.3
_WAIT_SECONDS = 600.0

NodeArgument = Annotated[str, typer.Argument(metavar="NODE", help="The node, by its number or its name.")]
TimeoutOption = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="How long to wait until it is done.")
]


def reassign(
    session: Session,
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="The topic.")] = None,
    partition: Annotated[int | None, typer.Argument(metavar="PARTITION", help="The partition.")] = None,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="NODE,NODE...",
            help="The nodes that shall hold it, by number or name; the first one shall lead.",
        ),
    ] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Cancel the move that is under way.")] = False,
    throttle: Annotated[
        str | None,
        typer.Option(
            "--throttle",
            metavar="BYTES",
            help="How much each node sends and fetches in a second for moves, for example 50MiB. It stays "
            "until 'tidemill cluster throttle' changes it.",
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the move is done.")] = False,
    timeout: TimeoutOption = _WAIT_SECONDS,
) -> None:
    """Move a partition to other nodes, under load. Without arguments: list the moves that are under way.

    New replicas copy the partition first. When they are in sync, the old ones are removed.
    """
    if topic is None and throttle is None:
        _list_moves(session)
        return
    if topic is None or partition is None or (to is None) == (not cancel):
        raise typer.BadParameter("give TOPIC PARTITION, and either --to NODE,NODE or --cancel")
    target = None if to is None else session.run(lambda cluster: named_nodes(cluster, to.split(",")))
    if throttle is not None:
        _set_throttle(session, throttle)
    key = topic, partition
    reason = session.run(lambda cluster: _begin(cluster, key, target))
    if reason is not None:
        _fail(reason)
    if wait and target is not None:
        session.run(lambda cluster: _wait_for(cluster, {key: target}, timeout))
    _say(
        session,
        {"topic": topic, "partition": partition, "replicas": target, "waited": wait},
        f"the move of {topic}-{partition} is "
        + ("cancelled" if target is None else "done" if wait else "under way: 'tidemill cluster reassign'"),
    )


def _list_moves(session: Session) -> None:
    from dataclasses import asdict

    from tidemill.cli.cluster.throttle import throttle_text
    from tidemill.cli.output import Table, show, write_line
    from tidemill.client.admin.replicas import describe_throttles, list_reassignments

    moves = session.run(list_reassignments)
    rows = [
        (
            each.topic,
            each.partition,
            *(",".join(map(str, nodes)) or None for nodes in (each.replicas, each.adding, each.removing)),
        )
        for each in moves
    ]
    columns = ("topic", "partition", "replicas", "adding", "removing")
    show(session, [asdict(each) for each in moves], Table(columns, rows))
    text = None if session.as_json else throttle_text(session.run(describe_throttles))
    if text is not None:
        write_line(f"throttle: {text}")


def _set_throttle(session: Session, limit: str) -> None:
    from tidemill.cli.cluster.throttle import rate_of
    from tidemill.client.admin.replicas import set_throttle

    rate = rate_of(limit)
    session.run(lambda cluster: set_throttle(cluster, rate))


async def _begin(cluster: Cluster, key: TopicPartition, target: tuple[int, ...] | None) -> str | None:
    from tidemill.client.admin.replicas import alter_reassignments

    return (await alter_reassignments(cluster, {key: target}))[key]


def drain(
    session: Session,
    node: NodeArgument,
    replicas: Annotated[
        bool,
        typer.Option(
            "--replicas",
            help="Also move its replicas, so that the node can be removed. It gets no new ones from then on.",
        ),
    ] = False,
    undo: Annotated[
        bool,
        typer.Option("--undo", help="Let the node get new replicas again. Nothing moves back."),
    ] = False,
    timeout: TimeoutOption = _WAIT_SECONDS,
) -> None:
    """Move the leaderships of a node to other nodes, and with --replicas everything it holds.

    It can be interrupted: what was begun goes on, and the same command shows how far it is. What cannot be
    moved is listed with the reason, and the exit code is 1.
    """
    from tidemill.cli.output import Table, plural, show, write_json, write_line

    if undo and replicas:
        raise typer.BadParameter("give either --replicas or --undo")
    node_id = session.run(lambda cluster: named_node(cluster, node))
    if undo:
        session.run(lambda cluster: _close(cluster, node_id, closed=False))
        _say(session, {"node": node_id, "tags": []}, f"node {node} gets new replicas again")
        return
    if replicas:
        session.run(lambda cluster: _close(cluster, node_id, closed=True))
    plan, refused = session.run(lambda cluster: _drain(cluster, node_id, replicas=replicas, wait_s=timeout))
    stuck = {**plan.stuck, **refused}
    moved = len(plan.targets.keys() - stuck.keys())
    value: dict[str, Any] = {
        "node": node_id,
        "moved": moved,
        "stuck": [{"topic": name, "partition": index, "reason": why} for (name, index), why in stuck.items()],
    }
    if session.as_json:
        write_json(value)
    else:
        what = plural(moved, "replica" if replicas else "leadership")
        write_line(f"moved {what} of node {node}" + (f"; {len(stuck)} cannot be moved" if stuck else ""))
        if replicas:
            write_line(f"it gets no new replicas until 'tidemill cluster drain {node} --undo'")
        if stuck:
            rows = [(name, index, why) for (name, index), why in stuck.items()]
            show(session, None, Table(("topic", "partition", "why not"), rows))
    if stuck:
        raise typer.Exit(ExitCode.ERROR)


def remove(session: Session, node: NodeArgument, yes: YesOption = False) -> None:
    """Have the cluster forget a node that is stopped and holds nothing: drain it with --replicas first."""
    from tidemill.client.admin.replicas import remove_node

    node_id = session.run(lambda cluster: named_node(cluster, node))
    confirm(f"Have the cluster forget node {node}?", yes=yes)
    session.run(lambda cluster: remove_node(cluster, node_id))
    _say(session, {"removed": node_id}, f"node {node} is removed")


async def _close(cluster: Cluster, node_id: int, *, closed: bool) -> None:
    """Tag a node so that it gets no new replicas, or take the tag away."""
    from tidemill.cli.cluster.draining import DRAINED
    from tidemill.client.admin.replicas import describe_nodes, set_node_tags

    tags = {*(await describe_nodes(cluster)).nodes[node_id].tags}
    await set_node_tags(cluster, node_id, tags | {DRAINED} if closed else tags - {DRAINED})


async def _drain(
    cluster: Cluster, node_id: int, *, replicas: bool, wait_s: float
) -> tuple[DrainPlan, dict[TopicPartition, str]]:
    from tidemill.cli.cluster.draining import plan_leaderships, plan_replicas
    from tidemill.client.admin.replicas import alter_reassignments, describe_nodes, elect_leaders

    view = await describe_nodes(cluster)
    topics = await cluster.all_topics()
    live = frozenset(each.node_id for each in view.nodes.values() if each.state == "live")
    if replicas:
        racks = {each.node_id: each.rack for each in view.nodes.values()}
        drained = frozenset(each.node_id for each in view.nodes.values() if each.tags)
        plan = plan_replicas(topics, node_id, live, racks, drained=drained)
    else:
        plan = plan_leaderships(topics, node_id, live)
    refused: dict[TopicPartition, str] = {}
    if plan.targets:
        outcomes = await alter_reassignments(cluster, plan.targets)
        refused = {key: reason for key, reason in outcomes.items() if reason is not None}
        going = {key: target for key, target in plan.targets.items() if key not in refused}
        led = [
            (topic.name, each.index)
            for topic in topics
            for each in topic.partitions
            if each.leader == node_id and (topic.name, each.index) in going
        ]
        if led and not replicas:
            await elect_leaders(cluster, led)
        await _wait_for(cluster, going, wait_s, left=None if replicas else node_id)
    return plan, refused


async def _wait_for(
    cluster: Cluster,
    targets: dict[TopicPartition, tuple[int, ...]],
    wait_s: float,
    *,
    left: int | None = None,
) -> None:
    """Wait until partitions have these replicas, and ``left`` leads none of them; tells how many are not."""
    import asyncio

    from tidemill.cli.output import plural
    from tidemill.errors import ApiError, ErrorCode

    deadline, told = time.monotonic() + wait_s, -1
    while True:
        placed = {
            (topic.name, each.index): each
            for topic in await cluster.all_topics()
            for each in topic.partitions
        }
        waiting = [
            key
            for key, target in targets.items()
            if key in placed and ({*placed[key].replicas} != {*target} or placed[key].leader == left)
        ]
        if not waiting:
            return
        if time.monotonic() > deadline:
            raise ApiError(
                ErrorCode.request_timed_out,
                f"{len(waiting)} moves are not done after {wait_s:.0f} s, the first is {waiting[0][0]}-"
                f"{waiting[0][1]}; they go on: 'tidemill cluster reassign' shows them",
            )
        if len(waiting) != told:
            told = len(waiting)
            sys.stderr.write(f"{told} of {plural(len(targets), 'partition')} still to be moved\n")
            sys.stderr.flush()
        await asyncio.sleep(_POLL_SECONDS)


def _say(session: Session, value: dict[str, Any], text: str) -> None:
    from tidemill.cli.output import write_json, write_line

    if session.as_json:
        write_json(value)
    else:
        write_line(text)


def _fail(reason: str) -> None:
    from tidemill.cli.session import fail

    fail(reason)
    raise typer.Exit(ExitCode.ERROR)
