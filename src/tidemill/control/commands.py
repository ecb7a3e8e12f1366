"""The commands: every change of the metadata is one of these, submitted to the controller.

A command is a value. What it does, and when it is refused, is in ``planning``. ``Command[R]`` gives an
``R`` when it has been committed.
"""

from __future__ import annotations

import base64
from enum import Enum
from typing import ClassVar, Generic, TypeVar
from uuid import UUID

import msgspec

from tidemill.control.image import NodeImage, TopicImage
from tidemill.errors import ErrorCode

__all__ = (
    "AllocateProducerIds",
    "BumpLeaderEpochs",
    "Command",
    "CreatePartitions",
    "CreateTopic",
    "DeleteTopic",
    "ElectLeaders",
    "Election",
    "RegisterNode",
    "SetClusterId",
    "SetNodeConfigs",
    "SetTopicConfigs",
    "new_cluster_id",
)

R_co = TypeVar("R_co", covariant=True)

Assignments = tuple[tuple[int, ...], ...]
"""The replicas of each partition, in the partitions' order; the first one is the preferred leader."""


class Command(msgspec.Struct, Generic[R_co], frozen=True, tag=True, kw_only=True):
    """Base of the commands: a value that says what is to be changed."""

    #: Whether it may use the space that is kept for deletions and for starts on a full disk.
    may_use_reserve: ClassVar[bool] = False


class SetClusterId(Command[None], frozen=True, kw_only=True):
    """Name the cluster, once. Naming it again is refused unless the name is the same."""

    cluster_id: str


class RegisterNode(Command[NodeImage], frozen=True, kw_only=True):
    """Register a node and its listener, at each of its starts. Numbers and names go together one to one."""

    may_use_reserve: ClassVar[bool] = True

    node_id: int
    name: str
    host: str
    port: int
    rack: str | None = None
    incarnation: UUID


class CreateTopic(Command[TopicImage], frozen=True, kw_only=True):
    """Create a topic, either with ``partitions`` and ``replication`` or with ``assignments``."""

    name: str
    topic_id: UUID
    partitions: int | None = None
    replication: int | None = None
    assignments: Assignments | None = None
    configs: dict[str, str] = {}


class DeleteTopic(Command[TopicImage], frozen=True, kw_only=True):
    """Delete a topic; gives its last image. With ``topic_id``, only if the name still means that topic."""

    may_use_reserve: ClassVar[bool] = True

    name: str
    topic_id: UUID | None = None


class CreatePartitions(Command[TopicImage], frozen=True, kw_only=True):
    """Raise the number of partitions to ``new_count``. ``assignments`` is for the new partitions only."""

    name: str
    new_count: int
    assignments: Assignments | None = None


class SetTopicConfigs(Command[TopicImage], frozen=True, kw_only=True):
    """Replace all overrides of a topic; the values have been checked by the caller.

    With ``base``, only if the overrides are still ``base``: else ``MetadataConflict``, and the caller, who
    made ``configs`` out of ``base``, starts again from the image.
    """

    may_use_reserve: ClassVar[bool] = True

    name: str
    configs: dict[str, str]
    base: dict[str, str] | None = None


class SetNodeConfigs(Command[None], frozen=True, kw_only=True):
    """Replace the dynamic configs of a node, or of the whole cluster if ``node_id`` is None.

    ``base`` is as in ``SetTopicConfigs``.
    """

    node_id: int | None
    configs: dict[str, str]
    base: dict[str, str] | None = None


class AllocateProducerIds(Command[int], frozen=True, kw_only=True):
    """Reserve ``count`` producer ids; gives the first. No id is ever given twice."""

    #: They are small and rare, and without an id a producer would not learn why its records are refused.
    may_use_reserve: ClassVar[bool] = True

    count: int = 1_000


class BumpLeaderEpochs(Command[TopicImage], frozen=True, kw_only=True):
    """Start a new leader epoch with the same leader, whose log may have lost what it had not synced."""

    may_use_reserve: ClassVar[bool] = True

    name: str
    partitions: tuple[int, ...]


class Election(Enum):
    """How a leader is chosen: the preferred replica, or any replica of a partition that has no leader."""

    PREFERRED = "preferred"
    UNCLEAN = "unclean"


class ElectLeaders(Command[dict[int, ErrorCode]], frozen=True, kw_only=True):
    """Elect leaders of partitions of one topic; gives Kafka's code for each (``none``: elected)."""

    name: str
    partitions: tuple[int, ...]
    election: Election = Election.PREFERRED


def new_cluster_id(drawn: UUID) -> str:
    """An id in Kafka's form: 22 characters of URL-safe base64."""
    return base64.urlsafe_b64encode(drawn.bytes).decode().rstrip("=")
