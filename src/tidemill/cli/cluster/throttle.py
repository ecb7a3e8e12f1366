"""``tidemill cluster throttle``: how fast moves may copy, also while they run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.cluster.naming import named_node
from tidemill.cli.session import Session

if TYPE_CHECKING:
    from tidemill.client.admin.replicas import NodeThrottle

__all__ = ("rate_of", "throttle", "throttle_text")


def throttle(
    session: Session,
    limit: Annotated[
        str | None, typer.Argument(metavar="BYTES", help="Bytes per second, for example 50MiB.")
    ] = None,
    node: Annotated[
        str | None,
        typer.Option(
            "--node", metavar="NODE", help="Only for this node, by number or name. Default: every node."
        ),
    ] = None,
    off: Annotated[bool, typer.Option("--off", help="Remove the limit.")] = False,
) -> None:
    """Limit how much each node sends and fetches in a second for replicas that are moved.

    It counts at once, also for moves that are under way, until it is removed. Without arguments: show it.
    """
    from tidemill.cli.output import Table, human_bytes, show
    from tidemill.client.admin.replicas import describe_throttles, set_throttle

    if limit is not None and off:
        raise typer.BadParameter("give either BYTES or --off")
    if limit is None and not off and node is not None:
        raise typer.BadParameter("give BYTES or --off for the node")
    if limit is not None or off:
        rate = None if limit is None else rate_of(limit)
        node_id = None if node is None else session.run(lambda cluster: named_node(cluster, node))
        session.run(lambda cluster: set_throttle(cluster, rate, node_id))
    found = session.run(describe_throttles)

    def shown(rate: int | None) -> str | None:
        return None if rate is None else f"{human_bytes(rate)}/s"

    rows = [(node_id, shown(each.send), shown(each.fetch)) for node_id, each in found.items()]
    value = [{"node": node_id, **asdict(each)} for node_id, each in found.items()]
    show(session, value, Table(("node", "sends", "fetches"), rows))


def rate_of(text: str) -> int:
    """The bytes per second in a text like 50MiB."""
    from tidemill.config.values import parse_size

    try:
        rate = parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} cannot be the throttle: it must be {error}") from None
    if rate < 1:
        raise typer.BadParameter("the throttle is at least 1 byte per second; '--off' removes it")
    return rate


def throttle_text(found: Mapping[int, NodeThrottle]) -> str | None:
    """The throttle of all nodes in words; None if no node has a limit.

    >>> from tidemill.client.admin.replicas import NodeThrottle
    >>> throttle_text({1: NodeThrottle(2048, None), 2: NodeThrottle(None, None), 3: NodeThrottle(2048, None)})
    'each of the nodes 1, 3 sends at most 2.0 KiB/s'
    """
    from tidemill.cli.output import human_bytes

    nodes: dict[tuple[int | None, int | None], list[int]] = {}
    for node_id, each in found.items():
        nodes.setdefault((each.send, each.fetch), []).append(node_id)
    said = []
    for (send, fetch), node_ids in nodes.items():
        limits = [
            f"{verb} at most {human_bytes(rate)}/s"
            for verb, rate in (("sends", send), ("fetches", fetch))
            if rate is not None
        ]
        if limits:
            listed = ", ".join(map(str, node_ids))
            some = f"node {listed}" if len(node_ids) == 1 else f"each of the nodes {listed}"
            who = "each node" if len(nodes) == 1 else some
            said.append(f"{who} {' and '.join(limits)}")
    return "; ".join(said) or None
