"""What the controller must do, as a function of the image alone. Pure.

- A node that is not live leaves every in-sync set that has another member who can lead, all at once. Where
  there is none, it stays: it has every committed record.
- A partition whose leader is not live gets another, or none.
- A registered incarnation is admitted, which makes it live, once it has left what it may not keep. It cannot
  lead until then, so every leadership that it had is taken from it. After an unclean stop it stays in sync
  only where nobody else can lead; where its replica is lost, and anywhere with a new directory, it does not.
- Unclean nodes are admitted one at a time, after all others: what one of them has counts only where there is
  no better.
- A move of a partition is finished once every replica of its target is in sync. A leader that is to go is
  asked to resign first.
- ``min_isr`` follows the topic's configs.
- The record of a deleted topic goes when no node is left that may have files of it.

Each command may be done twice, and is planned anew from the newest image when it is committed. Whatever
``duties`` gives has been done when it gives no command more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from tidemill.control.commands import AdmitNode, Command, ForgetDeleted, SettlePartitions
from tidemill.control.insync import (
    LEADERLESS,
    advanced,
    candidate,
    elected,
    in_order,
    minimum_of,
    with_in_sync,
)
from tidemill.control.placement import OFFLINE_TAGS
from tidemill.control.records import PARTITIONS_PER_CHUNK, PartitionImage, chunk_count

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from uuid import UUID

    from tidemill.control.image import MetadataImage, NodeImage, TopicImage

__all__ = (
    "NodeView",
    "chunk_changes",
    "duties",
    "not_admitted",
    "settled",
)

_NOBODY: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class NodeView:
    """What an image says about its nodes, as far as in-sync sets and leaders depend on it.

    Attributes:
        live: May be in sync and lead.
        avoid: Should not become leaders: suspects, and nodes that an operator takes out.
        unclean: Not admitted yet, after a stop that was not orderly.
        renewed: Not admitted yet, with a new data directory.
        lost: Replicas that nodes which are not admitted yet have lost.
    """

    live: frozenset[int]
    avoid: frozenset[int]
    unclean: frozenset[int]
    renewed: frozenset[int]
    lost: Mapping[tuple[UUID, int], frozenset[int]]

    @classmethod
    def of(cls, image: MetadataImage, suspects: frozenset[int] = _NOBODY) -> NodeView:
        """View of the nodes of ``image``; ``suspects`` should not become leaders now."""
        tagged = {node_id for node_id, tags in image.node_tags.items() if OFFLINE_TAGS & {*tags}}
        waiting = not_admitted(image)
        lost: dict[tuple[UUID, int], frozenset[int]] = {}
        for node in waiting:
            for partition in node.lost:
                lost[partition] = lost.get(partition, _NOBODY) | {node.id}
        return cls(
            live=image.live_nodes,
            avoid=suspects | tagged,
            unclean=frozenset(node.id for node in waiting if not node.clean),
            renewed=frozenset(node.id for node in waiting if node.new_directory),
            lost=lost,
        )

    def forfeits(self, topic_id: UUID, index: int) -> frozenset[int]:
        """The nodes that lack records of a partition which they should have."""
        return self.renewed | self.lost.get((topic_id, index), _NOBODY)


def not_admitted(image: MetadataImage) -> list[NodeImage]:
    """The nodes whose registered incarnation the controller has not admitted."""
    return [node for node in image.nodes.values() if image.admitted.get(node.id) != node.incarnation]


def settled(
    partition: PartitionImage, view: NodeView, forfeits: frozenset[int], minimum: Callable[[int], int]
) -> PartitionImage:
    """The partition as it must be: itself if there is nothing to do.

    ``minimum`` is the least in-sync set for a number of replicas, ``forfeits`` are nodes without its records.
    """
    p, live = partition, view.live
    min_isr = minimum(len(p.replicas) - len(p.adding))
    as_it_must_be = p.leader in live and p.leader in p.isr and p.min_isr == min_isr and live.issuperset(p.isr)
    if as_it_must_be and not (p.elr or p.adding or p.removing or p.successor != LEADERLESS):
        return p
    members = frozenset(p.isr) - forfeits
    if candidate(p, members, live) is not None:
        members &= live
        forfeits |= view.unclean
    now = with_in_sync(p, members, forfeits=forfeits)
    if now.leader not in live or now.leader not in now.isr:
        now = elected(now, live, view.avoid, forfeits=view.unclean)
    now = with_in_sync(now, now.isr, min_isr=min_isr)
    now = _reassigned(now, view, minimum)
    if now.successor != LEADERLESS and (now.successor == now.leader or now.successor not in now.isr):
        now = replace(now, successor=LEADERLESS)
    return advanced(partition, now)


def _reassigned(p: PartitionImage, view: NodeView, minimum: Callable[[int], int]) -> PartitionImage:
    """The partition after the next step of its move, if there is one to make."""
    if not (p.adding or p.removing):
        return p
    target = tuple(node_id for node_id in p.replicas if node_id not in p.removing)
    if p.leader == LEADERLESS or not {*target} <= {*p.isr}:
        return p
    if p.leader in p.removing:
        successor = candidate(p, target, view.live, view.avoid)
        return p if successor is None else replace(p, successor=successor)
    moved = replace(p, replicas=target, adding=(), removing=(), unfit=in_order(p, {*p.unfit} & {*target}))
    return with_in_sync(moved, target, min_isr=minimum(len(target)))


@dataclass(frozen=True, slots=True)
class _ChunkDuty:
    """What is to be done for a chunk of partitions, and the nodes that stand in the changed ones."""

    command: SettlePartitions
    partitions: int
    nodes: frozenset[int]


def chunk_changes(
    image: MetadataImage, view: NodeView, topic: TopicImage, chunk: int
) -> dict[int, PartitionImage]:
    """The partitions of a chunk that must change, as they must be."""
    minimum = minimum_of(image, topic.configs)
    first = chunk * PARTITIONS_PER_CHUNK
    changes: dict[int, PartitionImage] = {}
    may_forfeit = bool(view.renewed or view.lost)
    for index, partition in enumerate(topic.partitions[first : first + PARTITIONS_PER_CHUNK], first):
        forfeits = view.forfeits(topic.id, index) if may_forfeit else _NOBODY
        now = settled(partition, view, forfeits, minimum)
        if now is not partition:
            changes[index] = now
    return changes


def _chunk_duties(
    image: MetadataImage, view: NodeView, topic: TopicImage, suspects: frozenset[int] = _NOBODY
) -> Iterator[_ChunkDuty | None]:
    """For each chunk of the topic what is to be done, or None: one short step at a time."""
    for chunk in range(chunk_count(len(topic.partitions))):
        changes = chunk_changes(image, view, topic, chunk)
        if not changes:
            yield None
            continue
        command = SettlePartitions(topic_id=topic.id, chunk=chunk, suspects=suspects)
        touched = (topic.partitions[index] for index in changes)
        nodes = frozenset(node_id for p in touched for node_id in (p.leader, *p.isr, *p.elr))
        size = min(PARTITIONS_PER_CHUNK, len(topic.partitions) - chunk * PARTITIONS_PER_CHUNK)
        yield _ChunkDuty(command, size, nodes)


def _admissions(image: MetadataImage, busy: frozenset[int]) -> list[AdmitNode]:
    """The nodes that are to be admitted; those in ``busy`` are in partitions that must change first.

    All partitions of this image must have been looked at for ``busy``.
    """
    waiting = [
        node
        for node in sorted(not_admitted(image), key=lambda node: node.id)
        if image.alive.get(node.id) == node.incarnation
    ]
    clean = [node for node in waiting if node.clean]
    return [
        AdmitNode(node_id=node.id, incarnation=node.incarnation)
        for node in clean or waiting[:1]
        if node.id not in busy
    ]


def _deletion_duties(image: MetadataImage) -> list[ForgetDeleted]:
    """Nodes that need not be waited for any more: they were removed from the cluster."""
    return [
        ForgetDeleted(topic_id=deleted.id, node_id=next(iter(gone), LEADERLESS))
        for deleted in image.deleted_topics.values()
        if (gone := [node_id for node_id in deleted.nodes if node_id not in image.nodes]) or not deleted.nodes
    ]


def duties(
    image: MetadataImage, suspects: frozenset[int] = _NOBODY, topics: Collection[str] | None = None
) -> Iterator[list[Command[Any]]]:
    """Look for what the controller must do now, one short step at a time.

    Gives the commands that are committed together, in their order: those of partitions, as many at once as a
    chunk has, then of deletions, then admissions. A step that completes none gives an empty list. With
    ``topics``, only their partitions are looked at and nobody is admitted: that needs a look at all.
    """
    view = NodeView.of(image, suspects)
    some: list[Command[Any]] = []
    partitions, busy = 0, set[int]()
    for name in sorted(image.topics if topics is None else topics):
        topic = image.topics.get(name)
        for duty in _chunk_duties(image, view, topic, suspects) if topic is not None else ():
            full: list[Command[Any]] = []
            if duty is not None:
                if some and partitions + duty.partitions > PARTITIONS_PER_CHUNK:
                    full, some, partitions = some, [], 0
                some.append(duty.command)
                partitions += duty.partitions
                busy |= duty.nodes
            yield full
    yield some
    yield [*_deletion_duties(image)]
    if topics is None:
        yield [*_admissions(image, frozenset(busy))]
