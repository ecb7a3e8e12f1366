"""The metrics of a node of a cluster, which are read off its membership."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from tidemill.coordination.metrics import Metric, counter, gauge
from tidemill.server.cluster.membership import Membership

__all__ = ("CLUSTER_METRICS",)

CLUSTER_METRICS: Final[Sequence[Metric[Membership]]] = (
    gauge(
        "tidemill_cluster_nodes",
        "Registered nodes.",
        lambda member: len(member.image.nodes),
    ),
    gauge(
        "tidemill_cluster_live_nodes",
        "Nodes that are live.",
        lambda member: len(member.image.live_nodes),
    ),
    gauge(
        "tidemill_cluster_is_controller",
        "Whether this node is the controller.",
        lambda member: member.elected.epoch is not None,
    ),
    gauge(
        "tidemill_cluster_controller_epoch",
        "Epoch of the controller that this node knows.",
        lambda member: 0 if member.image.controller is None else member.image.controller.epoch,
    ),
    gauge(
        "tidemill_cluster_session_trouble",
        "Whether the last renewal of this node's session failed.",
        lambda member: member.session.trouble is not None,
    ),
    gauge(
        "tidemill_cluster_leaderless_partitions",
        "Partitions of the cluster without a leader.",
        lambda member: member.watch.leaderless(),
    ),
    counter(
        "tidemill_cluster_leader_changes_total",
        "Changes of leaders that this node has seen.",
        lambda member: member.watch.leader_changes,
    ),
    gauge(
        "tidemill_replication_under_replicated_partitions",
        "Partitions led here with replicas that are not in sync.",
        lambda member: member.watch.under_replicated(),
    ),
    gauge(
        "tidemill_replication_below_min_isr_partitions",
        "Partitions led here that refuse acks=all.",
        lambda member: member.watch.below_minimum(),
    ),
    gauge(
        "tidemill_replication_catching_up_replicas",
        "Replicas of this node that are not in sync.",
        lambda member: len(member.watch.behind()),
    ),
    gauge(
        "tidemill_replication_follower_lag_max",
        "Records that the furthest follower lacks.",
        lambda member: member.watch.lag_records_max(),
    ),
    counter(
        "tidemill_replication_isr_shrinks_total",
        "In-sync sets led here that became smaller.",
        lambda member: member.watch.shrinks,
    ),
    counter(
        "tidemill_replication_isr_expands_total",
        "In-sync sets led here that became larger.",
        lambda member: member.watch.expands,
    ),
    counter(
        "tidemill_replication_bytes_in_total",
        "Bytes of records copied from leaders.",
        lambda member: member.fetcher.bytes_in,
    ),
    counter(
        "tidemill_replication_bytes_out_total",
        "Bytes of records given to followers.",
        lambda member: member.leaders.bytes_out,
    ),
)
