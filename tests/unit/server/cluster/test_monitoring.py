"""What a node sees of its cluster: replicas that are behind, and what changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from tidemill.control.image import MetadataDelta, MetadataImage, NodeImage, TopicImage, TopicPartition
from tidemill.control.records import PartitionImage
from tidemill.control.sharedmap import SharedMap
from tidemill.server.cluster.monitoring import ClusterWatch

NODE = 1


def image(*partitions: PartitionImage, live: bool = True) -> MetadataImage:
    """A replicated cluster with one topic; this node is live or not."""
    incarnation = UUID(int=1)
    node = NodeImage(id=NODE, name="n1", host="h", port=1, rack=None, incarnation=incarnation)
    topic = TopicImage("t", UUID(int=7), partitions, {})
    return MetadataImage(
        replicated=True,
        nodes={NODE: node},
        topics=SharedMap[str, TopicImage]().update({"t": topic}),
        alive={NODE: incarnation},
        admitted={NODE: incarnation} if live else {},
    )


def placed(
    leader: int, isr: tuple[int, ...], replicas: tuple[int, ...] = (1, 2, 3), min_isr: int = 2
) -> PartitionImage:
    return PartitionImage(leader, 1, replicas, isr, min_isr=min_isr)


@dataclass
class FakeReplicas:
    out_of_service: list[tuple[str, int, str]] = field(default_factory=list)

    def stopped(self) -> list[tuple[str, int, str]]:
        return self.out_of_service


@dataclass
class FakeBroker:
    image: MetadataImage
    replicas: FakeReplicas = field(default_factory=FakeReplicas)
    node_id: int = NODE


def watch(of: MetadataImage, **options: Any) -> tuple[ClusterWatch, FakeBroker]:
    broker = FakeBroker(of, **options)
    return ClusterWatch(broker), broker  # type: ignore[arg-type]


def test_partitions_led_here_are_counted_by_what_they_lack() -> None:
    seen, _ = watch(image(placed(1, (1,)), placed(1, (1, 2)), placed(2, (2,)), placed(-1, (3,))))
    assert (seen.under_replicated(), seen.below_minimum(), seen.leaderless()) == (2, 1, 1)
    assert any("acks=all are refused" in problem for problem in seen.problems())


def test_a_replica_that_could_be_in_sync_is_behind() -> None:
    seen, broker = watch(image(placed(2, (2, 3)), placed(2, (1, 2)), placed(-1, (3,)), placed(2, (2,), (2,))))
    assert seen.behind() == ["t-0"]
    assert "1 replicas of this node are catching up with their leaders (t-0)" in seen.problems()
    broker.replicas.out_of_service.append(("t", 0, "a failed disk"))
    assert seen.behind() == []


def test_a_node_catches_up_once_after_its_start() -> None:
    seen, broker = watch(image(placed(2, (2, 3))))
    assert seen.is_catching_up()
    broker.image = image(placed(2, (1, 2, 3)), live=False)
    assert seen.is_catching_up(), "it is not admitted"
    broker.image = image(placed(2, (1, 2, 3)))
    assert not seen.is_catching_up()
    broker.image = image(placed(2, (2, 3)))
    assert not seen.is_catching_up(), "to fall behind later is a problem, and no start"


def test_changes_of_leaders_and_of_in_sync_sets_led_here_are_counted() -> None:
    seen, _ = watch(image())
    old = image(placed(1, (1, 2, 3)), placed(1, (1,)), placed(2, (2, 3)), placed(2, (1, 2)))
    new = image(placed(1, (1, 2)), placed(1, (1, 2)), placed(2, (2,)), placed(1, (1,)))
    delta = MetadataDelta.between(old, new)
    assert TopicPartition("t", 3) in delta.leader_changed
    seen.metadata_changed(old, new, delta)
    assert (seen.leader_changes, seen.shrinks, seen.expands) == (1, 2, 1)
