"""Metadata without a store: an image that commands and sessions change, for tests of plans and duties."""

from __future__ import annotations

from typing import Any, TypeVar
from uuid import UUID

from tidemill.control.commands import Command, CreateTopic, RegisterNode, SetClusterId
from tidemill.control.duties import duties
from tidemill.control.image import MetadataImage, PartitionImage, TopicImage
from tidemill.control.placement import ControlLimits
from tidemill.control.planning import plan
from tidemill.control.records import (
    AliveRecord,
    PartitionsRecord,
    Record,
    alive_key,
    chunk_key,
    encode,
)
from tidemill.control.stores.store import Change, ChangeBatch

__all__ = ("LIMITS", "TOPIC_ID", "World", "directory", "duties_of", "register")

R = TypeVar("R")

LIMITS = ControlLimits()
TOPIC_ID = UUID(int=77)


def directory(number: int) -> UUID:
    """The id of a data directory."""
    return UUID(int=10_000 + number)


def duties_of(image: MetadataImage, suspects: frozenset[int] = frozenset()) -> list[Command[Any]]:
    """Everything that the controller must do now. Empty if the image is as it must be."""
    return [command for commands in duties(image, suspects) for command in commands]


def register(node_id: int, incarnation: int, **fields: Any) -> RegisterNode:
    """The registration of a node in its own directory."""
    return RegisterNode(
        **{
            "node_id": node_id,
            "name": f"n{node_id}",
            "host": "h",
            "port": 1,
            "incarnation": UUID(int=incarnation),
            "directory_id": directory(node_id),
            **fields,
        }
    )


class World:
    """The metadata of a cluster with as many live nodes as asked for, numbered from 1."""

    def __init__(self, nodes: int = 0, *, replicated: bool = True) -> None:
        self.image = MetadataImage()
        self.do(SetClusterId(cluster_id="c", replicated=replicated))
        self.last_incarnation = 0
        for node_id in range(1, nodes + 1):
            self.start(node_id)
        self.settle()

    def write(self, **writes: Record | None) -> None:
        """Write records, or delete their keys."""
        self._apply({key: None if record is None else encode(record) for key, record in writes.items()})

    def do(self, command: Command[R]) -> R:
        """Do a command; raises what refuses it."""
        planned = plan(self.image, command, LIMITS)
        self._apply(dict(planned.writes))
        return planned.result

    def start(self, node_id: int, **fields: Any) -> UUID:
        """Register a new incarnation of a node and begin its session; the controller has not looked yet."""
        self.last_incarnation += 1
        self.do(register(node_id, self.last_incarnation, **fields))
        incarnation = UUID(int=self.last_incarnation)
        self.begin_session(node_id, incarnation)
        return incarnation

    def begin_session(self, node_id: int, incarnation: UUID) -> None:
        """Write ``alive/<id>``."""
        self.write(**{alive_key(node_id): AliveRecord(incarnation=incarnation)})

    def end_session(self, *node_ids: int) -> None:
        """The leases of nodes are over."""
        self._apply({alive_key(node_id): None for node_id in node_ids})

    def settle(self, suspects: frozenset[int] = frozenset()) -> None:
        """Do all duties until there are none."""
        for _ in range(100):
            found = duties_of(self.image, suspects)
            if not found:
                return
            for command in found:
                self.do(command)
        raise AssertionError(f"the duties have no end: {duties_of(self.image, suspects)}")

    def create(self, *replicas: int, partitions: int = 1, name: str = "t", **configs: str) -> TopicImage:
        """A topic whose partitions all have these replicas."""
        return self.do(
            CreateTopic(
                name=name,
                topic_id=TOPIC_ID if name == "t" else UUID(int=sum(name.encode())),
                assignments=(replicas,) * partitions,
                configs={key.replace("_", "."): value for key, value in configs.items()},
            )
        )

    def partition(self, index: int = 0, name: str = "t") -> PartitionImage:
        """A partition as it is."""
        return self.image.topics[name].partitions[index]

    def set_partition(self, partition: PartitionImage) -> None:
        """Replace the only partition of topic ``t``."""
        self.write(**{chunk_key(TOPIC_ID, 0): PartitionsRecord(partitions=(partition,))})

    def _apply(self, writes: dict[str, bytes | None]) -> None:
        if writes:
            changes = tuple(Change(key, writes[key]) for key in sorted(writes))
            self.image = self.image.apply(ChangeBatch(self.image.revision + 1, changes))
