"""``tidemill cluster elect``: give partitions their preferred leaders, or a leader at all."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.cluster.naming import named_node
from tidemill.cli.session import ExitCode, Session, YesOption, confirm

if TYPE_CHECKING:
    from tidemill.client.admin.replicas import Replica
    from tidemill.client.cluster import Cluster, TopicPartition

__all__ = ("elect",)


def elect(
    session: Session,
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="The topic. Default: all topics.")
    ] = None,
    partition: Annotated[
        int | None, typer.Argument(metavar="PARTITION", help="The partition. Default: all of the topic.")
    ] = None,
    unclean: Annotated[
        bool,
        typer.Option(
            "--unclean",
            help="Elect a replica of a partition that has no leader, although it may lack records: they are "
            "lost for good. Needs TOPIC and PARTITION.",
        ),
    ] = False,
    leader: Annotated[
        str | None,
        typer.Option(
            "--leader",
            metavar="NODE",
            help="With --unclean: the node, by number or name. Default: the one with the most.",
        ),
    ] = None,
    yes: YesOption = False,
) -> None:
    """Have the preferred replicas lead again: the first one of each partition, if it is in sync.

    With --unclean, a partition without a leader gets one, and loses what that one does not have.
    """
    if unclean and (topic is None or partition is None):
        raise typer.BadParameter("an unclean election names one partition: --unclean TOPIC PARTITION")
    if leader is not None and not unclean:
        raise typer.BadParameter(
            "--leader goes with --unclean; the preferred leader is the first replica, which "
            "'tidemill cluster reassign' changes"
        )
    if topic is not None and partition is not None and unclean:
        node = None if leader is None else session.run(lambda cluster: named_node(cluster, leader))
        _elect_uncleanly(session, topic, partition, node, yes=yes)
    else:
        _elect_preferred(session, topic, partition)


def _elect_preferred(session: Session, topic: str | None, partition: int | None) -> None:
    from tidemill.cli.output import Table, plural, show, write_line
    from tidemill.client.admin.replicas import elect_leaders

    async def work(cluster: Cluster) -> dict[TopicPartition, str | None]:
        wanted = None
        if topic is not None:
            known = await cluster.topic(topic)
            indexes = [each.index for each in known.partitions] if partition is None else [partition]
            wanted = [(topic, index) for index in indexes]
        return await elect_leaders(cluster, wanted)

    outcomes = session.run(work)
    # "Election not needed" is no failure: the partition has its preferred leader already.
    refused = {
        key: reason
        for key, reason in outcomes.items()
        if reason is not None and not reason.startswith("ELECTION_NOT_NEEDED")
    }
    elected = sum(1 for reason in outcomes.values() if reason is None)
    if session.as_json:
        value = [
            {"topic": name, "partition": index, "elected": reason is None, "reason": reason}
            for (name, index), reason in outcomes.items()
        ]
        show(session, value)
    else:
        write_line(f"{plural(elected, 'partition')} got the preferred leader")
        if refused:
            rows = [(name, index, reason) for (name, index), reason in refused.items()]
            show(session, None, Table(("topic", "partition", "why not"), rows))
    if refused:
        raise typer.Exit(ExitCode.ERROR)


def _elect_uncleanly(session: Session, topic: str, partition: int, leader: int | None, *, yes: bool) -> None:
    from tidemill.cli.output import Table, show, write_json, write_line
    from tidemill.errors import ApiError, ErrorCode

    replicas = session.run(lambda cluster: _ends(cluster, topic, partition))
    if not session.as_json:
        rows = [
            (each.node_id, each.last_epoch, each.log_end_offset, each.high_watermark, each.problem)
            for each in replicas
        ]
        columns = ("node", "last epoch", "end", "high watermark", "problem")
        show(session, None, Table(columns, rows, title=f"replicas of {topic}-{partition} on live nodes"))
    usable = [each for each in replicas if each.problem is None]
    if not usable:
        raise ApiError(
            ErrorCode.eligible_leaders_not_available,
            f"no live node has a replica of {topic}-{partition} that can be read; start one that has",
        )
    best = max(usable, key=lambda each: (each.last_epoch, each.log_end_offset, -each.node_id))
    chosen = next((each for each in usable if each.node_id == leader), None) if leader is not None else best
    if chosen is None:
        raise ApiError(
            ErrorCode.eligible_leaders_not_available,
            f"node {leader} has no replica of {topic}-{partition} that can be read; choose one of "
            f"{', '.join(str(each.node_id) for each in usable)}",
        )
    if not yes and not sys.stdin.isatty():
        raise typer.BadParameter("records may be lost: confirm with --yes")
    confirm(f"Elect node {chosen.node_id}, and lose what it does not have?", yes=yes)
    session.run(lambda cluster: _force(cluster, topic, partition, chosen.node_id))
    if session.as_json:
        ends: list[dict[str, Any]] = [
            {"node": each.node_id, "last_epoch": each.last_epoch, "end_offset": each.log_end_offset}
            for each in replicas
        ]
        write_json({"topic": topic, "partition": partition, "leader": chosen.node_id, "replicas": ends})
    else:
        write_line(f"node {chosen.node_id} leads {topic}-{partition}")


async def _force(cluster: Cluster, topic: str, partition: int, leader: int) -> None:
    from tidemill.client.admin.replicas import elect_replica

    await elect_replica(cluster, topic, partition, leader)


async def _ends(cluster: Cluster, topic: str, partition: int) -> list[Replica]:
    """The replicas of a partition without a leader, on the nodes that are live."""
    from tidemill.client.admin.replicas import describe_replicas
    from tidemill.errors import ApiError, ErrorCode, TidemillError

    known = await cluster.topic(topic)
    if not 0 <= partition < len(known.partitions):
        raise ApiError(
            ErrorCode.unknown_topic_or_partition,
            f"topic {topic!r} has {len(known.partitions)} partitions, there is no partition {partition}",
        )
    placed = known.partitions[partition]
    if placed.leader >= 0:
        raise ApiError(
            ErrorCode.election_not_needed,
            f"{topic}-{partition} is led by node {placed.leader}; an unclean election is for partitions "
            "without a leader",
        )
    found: list[Replica] = []
    holders = [node_id for node_id in placed.replicas if node_id in cluster.nodes]
    for node_id, replicas in (await describe_replicas(cluster, holders, [topic])).items():
        if isinstance(replicas, TidemillError):
            raise ApiError(
                ErrorCode.eligible_leaders_not_available,
                f"node {node_id} is live and does not answer ({replicas.message}); it may have the most "
                "records: ask again when it does, or stop it",
            )
        found += [each for each in replicas if each.partition == partition]
    return found
