"""Planning of leaders, in-sync sets and moves of partitions. Pure.

In a replicated cluster only the controller commits these. What must hold after each is in ``insync``, what
the controller does by itself in ``duties``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from tidemill.control.commands import (
    AlterInSync,
    AlterReassignment,
    BumpLeaderEpochs,
    DeclareFit,
    DeclareUnfit,
    Election,
    ElectLeaders,
    RaiseLeaderEpoch,
    Resign,
    SettlePartitions,
)
from tidemill.control.duties import NodeView, chunk_changes
from tidemill.control.insync import (
    LEADERLESS,
    advanced,
    candidate,
    elected,
    in_order,
    led_by,
    with_in_sync,
)
from tidemill.control.placement import check_assignments, check_node_limits
from tidemill.control.plans import (
    Plan,
    change_partitions,
    guards,
    planner,
    topic_named,
    unknown_partition,
)
from tidemill.control.records import PartitionImage, alive_key, node_key
from tidemill.errors import ApiError, ErrorCode

if TYPE_CHECKING:
    from uuid import UUID

    from tidemill.control.image import MetadataImage, TopicImage
    from tidemill.control.placement import ControlLimits

__all__ = ()

#: More leader epochs than lost metadata can have given behind the last one that a log knows.
_LOST_EPOCHS = 100_000


@planner.register(SettlePartitions)
def _(command: SettlePartitions, image: MetadataImage, limits: ControlLimits) -> Plan[int]:
    topic = image.topic_by_id(command.topic_id)
    if topic is None:
        return Plan({}, {}, 0)
    changes = chunk_changes(image, NodeView.of(image, command.suspects), topic, command.chunk)
    planned = change_partitions(image, topic, changes)
    return Plan(planned.writes, planned.guards, len(changes))


@planner.register(BumpLeaderEpochs)
def _(command: BumpLeaderEpochs, image: MetadataImage, limits: ControlLimits) -> Plan[TopicImage]:
    if image.replicated:
        raise ApiError(
            ErrorCode.invalid_request, "in a cluster of several nodes the controller gives leader epochs"
        )
    topic = topic_named(image, command.name)
    changes: dict[int, PartitionImage] = {}
    for index in command.partitions:
        if not 0 <= index < len(topic.partitions):
            raise unknown_partition(topic, index)
        partition = topic.partitions[index]
        changes[index] = advanced(partition, led_by(partition, partition.leader))
    return change_partitions(image, topic, changes)


@planner.register(RaiseLeaderEpoch)
def _(command: RaiseLeaderEpoch, image: MetadataImage, limits: ControlLimits) -> Plan[PartitionImage]:
    topic, partition = _partition_of(image, command.topic_id, command.index)
    if partition.leader_epoch >= command.above:
        return Plan({}, {}, partition)
    now = replace(partition, leader_epoch=command.above + _LOST_EPOCHS)
    return _change(image, topic, command.index, advanced(partition, now))


# -- in-sync sets ----------------------------------------------------------------------------------------


@planner.register(AlterInSync)
def _(command: AlterInSync, image: MetadataImage, limits: ControlLimits) -> Plan[PartitionImage]:
    topic, partition = _partition_of(image, command.topic_id, command.index)
    where = f"{topic.name}-{command.index}"
    _check_leader(where, partition, command.leader, command.leader_epoch)
    wanted = {*command.isr}
    if wanted == {*partition.isr}:
        if command.partition_epoch != partition.partition_epoch:
            return Plan({}, {}, partition)
        # The leader wants to be sure that an earlier proposal, whose outcome it does not know, is over: no
        # proposal of this partition epoch can be committed any more.
        now = replace(partition, partition_epoch=partition.partition_epoch + 1)
        return _change(image, topic, command.index, now)
    if command.partition_epoch != partition.partition_epoch:
        raise ApiError(
            ErrorCode.invalid_update_version,
            f"{where} is at partition epoch {partition.partition_epoch}, and the proposal was made at"
            f" {command.partition_epoch}; look at the newer one and propose again",
        )
    if command.leader not in wanted or not wanted <= {*partition.replicas}:
        raise ApiError(
            ErrorCode.invalid_request,
            f"the in-sync set {sorted(wanted)} of {where} must have the leader {command.leader}, and replicas"
            f" of {list(partition.replicas)} only",
        )
    if not image.live(command.leader):
        raise ApiError(ErrorCode.stale_broker_epoch, f"the session of {where}'s leader is over")
    added = wanted - {*partition.isr}
    for node_id in sorted(added):
        if not image.live(node_id) or command.node_epochs.get(node_id) != image.node_epoch(node_id):
            raise ApiError(
                ErrorCode.ineligible_replica,
                f"node {node_id} cannot join the in-sync set of {where}: it is not live, or has registered"
                " anew since; wait until it has caught up again",
            )
    now = with_in_sync(partition, wanted)
    # A node that registers meanwhile is another incarnation than the one that caught up.
    seen = guards(image, (key(node_id) for node_id in added for key in (node_key, alive_key)))
    return _change(image, topic, command.index, advanced(partition, now), seen)


@planner.register(Resign)
def _(command: Resign, image: MetadataImage, limits: ControlLimits) -> Plan[PartitionImage]:
    topic, partition = _partition_of(image, command.topic_id, command.index)
    if partition.leader_epoch > command.leader_epoch:
        # It leads no more at that epoch, which is what it asked for.
        return Plan({}, {}, partition)
    _check_leader(f"{topic.name}-{command.index}", partition, command.node_id, command.leader_epoch)
    view = NodeView.of(image)
    others = view.live - {command.node_id}
    now = partition
    if candidate(now, now.isr, others) is not None:
        now = _succeeded(now, others, view.avoid)
    return _change(image, topic, command.index, advanced(partition, now))


@planner.register(DeclareUnfit)
def _(command: DeclareUnfit, image: MetadataImage, limits: ControlLimits) -> Plan[PartitionImage]:
    topic, partition = _partition_of(image, command.topic_id, command.index)
    node_id, own = command.node_id, frozenset({command.node_id})
    if command.node_epoch != image.node_epoch(node_id):
        raise ApiError(
            ErrorCode.stale_broker_epoch,
            f"node {node_id} has registered anew since it found its replica of {topic.name}-{command.index}"
            " unfit to lead",
        )
    view = NodeView.of(image)
    resigns = (node_id, command.leader_epoch) == (partition.leader, partition.leader_epoch)
    now = replace(partition, unfit=in_order(partition, own.union(partition.unfit)))
    if resigns or now.leader == LEADERLESS:
        now = _succeeded(now, view.live, view.avoid)
    if (resigns or command.failed) and now.leader not in (LEADERLESS, node_id):
        now = with_in_sync(now, {*now.isr} - own, forfeits=own if command.failed else frozenset())
    # What a process says that has been replaced meanwhile is not true of the next one.
    seen = guards(image, (node_key(node_id),))
    return _change(image, topic, command.index, advanced(partition, now), seen)


def _succeeded(partition: PartitionImage, live: frozenset[int], avoid: frozenset[int]) -> PartitionImage:
    """The partition with another leader: the successor that is wanted, if it can lead."""
    successor = candidate(partition, (partition.successor,), live.intersection(partition.isr), avoid)
    return elected(partition, live, avoid) if successor is None else led_by(partition, successor)


@planner.register(DeclareFit)
def _(command: DeclareFit, image: MetadataImage, limits: ControlLimits) -> Plan[PartitionImage]:
    topic, partition = _partition_of(image, command.topic_id, command.index)
    now = replace(partition, unfit=in_order(partition, {*partition.unfit} - {command.node_id}))
    return _change(image, topic, command.index, advanced(partition, now))


def _check_leader(where: str, partition: PartitionImage, leader: int, leader_epoch: int) -> None:
    if (leader, leader_epoch) != (partition.leader, partition.leader_epoch):
        raise ApiError(
            ErrorCode.fenced_leader_epoch,
            f"node {leader} does not lead {where} at leader epoch {leader_epoch}: its leader is"
            f" {partition.leader} at {partition.leader_epoch}",
        )


# -- moves -----------------------------------------------------------------------------------------------


@planner.register(AlterReassignment)
def _(command: AlterReassignment, image: MetadataImage, limits: ControlLimits) -> Plan[PartitionImage]:
    topic = topic_named(image, command.name)
    if not 0 <= command.index < len(topic.partitions):
        raise unknown_partition(topic, command.index)
    partition = topic.partitions[command.index]
    if command.replicas is None:
        now = _cancelled(partition, f"{topic.name}-{command.index}")
    else:
        now = _moving(partition, command.replicas, f"{topic.name}-{command.index}")
        check_assignments((command.replicas,), image.nodes)
        added = tuple(node_id for node_id in now.adding if node_id not in partition.adding)
        check_node_limits(topic.name, (added,), image, limits)
    # A node must not be removed from the cluster while it gets a replica.
    seen = guards(image, (node_key(node_id) for node_id in now.adding))
    return _change(image, topic, command.index, advanced(partition, now), seen)


def _moving(partition: PartitionImage, target: tuple[int, ...], where: str) -> PartitionImage:
    """The partition with a move to ``target`` begun: its order is that of ``replicas`` when it is done."""
    removing = tuple(node_id for node_id in partition.replicas if node_id not in target)
    begun = replace(partition, replicas=(*target, *removing), removing=removing)
    if partition.adding or partition.removing:
        if (begun.replicas, begun.removing) == (partition.replicas, partition.removing):
            return partition
        raise ApiError(
            ErrorCode.reassignment_in_progress,
            f"{where} is being moved to other replicas already; cancel that first, or wait until it is done",
        )
    adding = tuple(node_id for node_id in target if node_id not in partition.replicas)
    # The in-sync set stays as it is, in the new order.
    return with_in_sync(replace(begun, adding=adding), partition.isr)


def _cancelled(partition: PartitionImage, where: str) -> PartitionImage:
    """The partition with its move cancelled, or turned round if it cannot go without the added replicas."""
    if not (partition.adding or partition.removing):
        raise ApiError(ErrorCode.no_reassignment_in_progress, f"{where} is not being moved")
    added = {*partition.adding}
    before = tuple(node_id for node_id in partition.replicas if node_id not in added)
    stay = {*partition.isr} - added
    if partition.leader in added or not stay:
        turned = replace(
            partition, replicas=(*before, *partition.adding), adding=(), removing=partition.adding
        )
        return with_in_sync(turned, partition.isr)
    back = replace(
        partition,
        replicas=before,
        adding=(),
        removing=(),
        unfit=in_order(partition, {*partition.unfit} - added),
        successor=LEADERLESS,
    )
    return with_in_sync(back, stay)


# -- elections that somebody asks for --------------------------------------------------------------------


@planner.register(ElectLeaders)
def _(command: ElectLeaders, image: MetadataImage, limits: ControlLimits) -> Plan[dict[int, ErrorCode]]:
    topic = topic_named(image, command.name)
    live = image.live_nodes
    changes: dict[int, PartitionImage] = {}
    codes: dict[int, ErrorCode] = {}
    for index in command.partitions:
        if not 0 <= index < len(topic.partitions):
            codes[index] = ErrorCode.unknown_topic_or_partition
            continue
        partition = topic.partitions[index]
        if command.election is Election.PREFERRED:
            outcome = _prefer(partition, live, image.replicated)
        else:
            outcome = _elect_uncleanly(partition, live, command.leader)
        codes[index] = outcome if isinstance(outcome, ErrorCode) else ErrorCode.none
        if isinstance(outcome, PartitionImage) and outcome != partition:
            changes[index] = advanced(partition, outcome)
    changed = change_partitions(image, topic, changes)
    return Plan(changed.writes, changed.guards, codes)


def _prefer(partition: PartitionImage, live: frozenset[int], replicated: bool) -> PartitionImage | ErrorCode:
    preferred = partition.replicas[0]
    if partition.leader == preferred:
        return ErrorCode.election_not_needed
    if preferred not in partition.isr or preferred not in live or preferred in partition.unfit:
        return ErrorCode.preferred_leader_not_available
    if replicated and partition.leader in live:
        return replace(partition, successor=preferred)
    return led_by(partition, preferred)


def _elect_uncleanly(
    partition: PartitionImage, live: frozenset[int], leader: int | None
) -> PartitionImage | ErrorCode:
    if partition.leader != LEADERLESS:
        return ErrorCode.election_not_needed
    if leader is None or leader not in live or leader not in partition.replicas:
        return ErrorCode.eligible_leaders_not_available
    unfit = in_order(partition, {*partition.unfit} - {leader})
    # Records that the others have beyond its end are given up, so nobody else has a claim.
    return led_by(replace(partition, isr=(leader,), elr=(), unfit=unfit), leader)


def _partition_of(image: MetadataImage, topic_id: UUID, index: int) -> tuple[TopicImage, PartitionImage]:
    topic = image.topic_by_id(topic_id)
    if topic is None:
        raise ApiError(ErrorCode.unknown_topic_id, f"there is no topic with the id {topic_id}")
    if not 0 <= index < len(topic.partitions):
        raise unknown_partition(topic, index)
    return topic, topic.partitions[index]


def _change(
    image: MetadataImage,
    topic: TopicImage,
    index: int,
    now: PartitionImage,
    seen: dict[str, int] | None = None,
) -> Plan[PartitionImage]:
    """A plan that makes one partition ``now``, and depends on ``seen`` as well."""
    if now is topic.partitions[index]:
        return Plan({}, {}, now)
    planned = change_partitions(image, topic, {index: now})
    return Plan(planned.writes, {**planned.guards, **(seen or {})}, now)
