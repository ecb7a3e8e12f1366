"""``tidemill cluster status | nodes | partitions | controller``: how a cluster is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.session import Session

if TYPE_CHECKING:
    from tidemill.client.admin.replicas import ClusterView, NodeThrottle, Replica
    from tidemill.client.cluster import Cluster, TopicInfo, TopicPartition

__all__ = (
    "STATUS_EPILOG",
    "Overview",
    "controller",
    "follower_lags",
    "lag_text",
    "nodes",
    "overview",
    "partitions",
    "status",
)

STATUS_EPILOG = (
    "Exit codes: 0 GREEN, 1 YELLOW: every partition has a leader, and something is not as it should be, "
    "2 RED: a partition has no leader, 4 no node can be reached."
)


@dataclass(frozen=True, slots=True)
class Overview:
    """The cluster, and what its nodes say about themselves."""

    view: ClusterView
    topics: list[TopicInfo]
    problems: dict[int, tuple[str, ...]]
    unreachable: dict[int, str]
    throttles: dict[int, NodeThrottle]


async def overview(cluster: Cluster) -> Overview:
    """Ask one node about the cluster, and every node about itself."""
    from tidemill.client.admin.replicas import describe_nodes, describe_throttles
    from tidemill.errors import TidemillError

    topics = await cluster.all_topics()
    view = await describe_nodes(cluster)
    problems, unreachable = {view.node_id: view.problems}, {}
    for node_id in sorted(cluster.nodes.keys() - {view.node_id}):
        try:
            connection = await cluster.connection(node_id)
            answer = await connection.request("DescribeNodes", {})
        except TidemillError as error:
            unreachable[node_id] = error.message
        else:
            problems[node_id] = tuple(answer.problems)
    throttles = await describe_throttles(cluster, problems)
    return Overview(view, topics, problems, unreachable, throttles)


def status(session: Session) -> None:
    """Show how well the cluster is: GREEN, YELLOW or RED, with the reasons."""
    from dataclasses import asdict

    from tidemill.cli.cluster.health import assess, level_of
    from tidemill.cli.cluster.throttle import throttle_text
    from tidemill.cli.output import plural, write_json, write_line

    found = session.run(overview)
    findings = assess(found.view, found.topics, found.problems, found.unreachable)
    level = level_of(findings)
    live = sum(1 for node in found.view.nodes.values() if node.state == "live")
    drained = [node for node in found.view.nodes.values() if node.tags]
    count = sum(len(topic.partitions) for topic in found.topics)
    if session.as_json:
        write_json(
            {
                "health": level.name,
                "reasons": [{"level": each.level.name, "reason": each.reason} for each in findings],
                "replicated": found.view.replicated,
                "controller": found.view.controller_id,
                "nodes": len(found.view.nodes),
                "live_nodes": live,
                "drained_nodes": [node.node_id for node in drained],
                "topics": len(found.topics),
                "partitions": count,
                "throttles": [{"node": node_id, **asdict(each)} for node_id, each in found.throttles.items()],
            }
        )
    else:
        what = "a cluster" if found.view.replicated else "a single node"
        controller = _node_text(found.view, found.view.controller_id)
        write_line(
            f"{level.name}  {what}: {live} of {plural(len(found.view.nodes), 'node')} live, "
            f"{plural(len(found.topics), 'topic')}, {plural(count, 'partition')}, controller {controller}"
        )
        for each in findings:
            write_line(f"  {each.level.name:6}  {each.reason}")
        for node in drained:
            write_line(
                f"  node {node.node_id} ({node.name}) is drained: it gets no new replicas until "
                f"'tidemill cluster drain {node.node_id} --undo'"
            )
        text = throttle_text(found.throttles)
        if text is not None:
            write_line(f"  throttle of moves: {text}")
    if level:
        raise typer.Exit(int(level))


def _node_text(view: ClusterView, node_id: int) -> str:
    if node_id < 0:
        return "none"
    node = view.nodes.get(node_id)
    return str(node_id) if node is None else f"{node_id} ({node.name})"


def nodes(session: Session) -> None:
    """List the nodes: where they are, whether they are live, and what they lead and hold."""
    from tidemill.cli.output import Table, show

    found = session.run(overview)
    placed = [each for topic in found.topics for each in topic.partitions]
    value: list[dict[str, Any]] = [
        {
            "node": node.node_id,
            "name": node.name,
            "state": node.state,
            "tags": list(node.tags),
            "controller": node.node_id == found.view.controller_id,
            "address": str(node.address),
            "cluster_address": None if node.cluster_address is None else str(node.cluster_address),
            "rack": node.rack,
            "machine": node.machine or None,
            "leads": sum(1 for each in placed if each.leader == node.node_id),
            "replicas": sum(1 for each in placed if node.node_id in each.replicas),
            "not_in_sync": sum(
                1 for each in placed if node.node_id in each.replicas and node.node_id not in each.isr
            ),
            "problems": list(found.problems.get(node.node_id, ())),
        }
        for node in found.view.nodes.values()
    ]
    columns = (
        "node", "name", "state", "tags", "controller", "address", "rack", "leads", "replicas", "not in sync",
    )  # fmt: skip
    rows = [
        (
            each["node"],
            each["name"],
            each["state"],
            ", ".join(each["tags"]) or None,
            "yes" if each["controller"] else None,
            each["address"],
            each["rack"],
            each["leads"],
            each["replicas"],
            each["not_in_sync"],
        )
        for each in value
    ]
    show(session, value, Table(columns, rows))


def controller(session: Session) -> None:
    """Show which node is the controller, and since which epoch."""
    from tidemill.cli.output import write_json, write_line
    from tidemill.client.admin.replicas import describe_nodes

    view = session.run(describe_nodes)
    if session.as_json:
        node = view.nodes.get(view.controller_id)
        write_json(
            {
                "controller": view.controller_id,
                "name": None if node is None else node.name,
                "epoch": view.controller_epoch,
                "revision": view.revision,
            }
        )
    elif view.controller_id < 0:
        write_line("there is no controller now; look whether etcd answers")
    else:
        epoch = f", epoch {view.controller_epoch}" if view.replicated else ""
        write_line(f"{_node_text(view, view.controller_id)}{epoch}, metadata revision {view.revision}")


def partitions(
    session: Session,
    topics: Annotated[
        list[str] | None, typer.Argument(metavar="TOPIC", help="The topics. Default: all.")
    ] = None,
    bad: Annotated[
        bool, typer.Option("--bad", help="Only those without a leader, or with replicas not in sync.")
    ] = False,
    internal: Annotated[bool, typer.Option("--internal", help="Also those of internal topics.")] = False,
) -> None:
    """List partitions: leader, replicas, in-sync and eligible replicas, moves, and how far followers are."""
    from tidemill.cli.output import Table, show

    found = session.run(lambda cluster: _partitions(cluster, topics or [], internal=internal))
    if bad:
        found = [each for each in found if each["leader"] < 0 or len(each["in_sync"]) < len(each["replicas"])]
    rows = [
        (
            each["topic"],
            each["partition"],
            each["leader"] if each["leader"] >= 0 else "none",
            _numbers(each["replicas"]),
            _numbers(each["in_sync"]),
            _numbers(each["eligible"]),
            _numbers(each["adding"]),
            _numbers(each["removing"]),
            lag_text(each["lag"]),
        )
        for each in found
    ]
    columns = (
        "topic", "partition", "leader", "replicas", "in sync", "eligible", "adding", "removing", "lag",
    )  # fmt: skip
    show(session, found, Table(columns, rows))


def _numbers(nodes: list[int]) -> str | None:
    return ",".join(map(str, nodes)) or None


def lag_text(lags: dict[int, int | None]) -> str | None:
    """How many records each follower is behind, as ``node:records``; None if nobody is."""
    behind = {node_id: lag for node_id, lag in lags.items() if lag != 0}
    return ", ".join(f"{node}:{'?' if lag is None else lag}" for node, lag in behind.items()) or None


async def _partitions(cluster: Cluster, names: list[str], *, internal: bool) -> list[dict[str, Any]]:
    from tidemill.client.admin.replicas import eligible_leaders, list_reassignments

    if names:
        topics = [await cluster.topic(name) for name in names]
    else:
        topics = [topic for topic in await cluster.all_topics() if internal or not topic.internal]
    eligible = await eligible_leaders(cluster, [topic.name for topic in topics])
    moves = {(move.topic, move.partition): move for move in await list_reassignments(cluster)}
    lags = await follower_lags(cluster, names)
    found = []
    for topic in topics:
        for each in topic.partitions:
            key = topic.name, each.index
            move = moves.get(key)
            found.append(
                {
                    "topic": topic.name,
                    "partition": each.index,
                    "leader": each.leader,
                    "leader_epoch": each.leader_epoch,
                    "replicas": list(each.replicas),
                    "in_sync": list(each.isr),
                    "eligible": list(eligible.get(key, ())),
                    "adding": [] if move is None else list(move.adding),
                    "removing": [] if move is None else list(move.removing),
                    "lag": lags.get(key, {}),
                }
            )
    return found


async def follower_lags(cluster: Cluster, topics: list[str]) -> dict[TopicPartition, dict[int, int | None]]:
    """By partition, how many records each follower is behind its leader; None if the leader does not know."""
    from tidemill.client.admin.replicas import describe_replicas
    from tidemill.errors import TidemillError

    lags: dict[TopicPartition, dict[int, int | None]] = {}
    for replicas in (await describe_replicas(cluster, sorted(cluster.nodes), topics)).values():
        if isinstance(replicas, TidemillError):
            continue
        for replica in replicas:
            if replica.role == "leader":
                lags[replica.topic, replica.partition] = _lags_of(replica)
    return lags


def _lags_of(leader: Replica) -> dict[int, int | None]:
    return {
        follower.node_id: None
        if follower.log_end_offset < 0
        else max(0, leader.log_end_offset - follower.log_end_offset)
        for follower in leader.followers
    }
