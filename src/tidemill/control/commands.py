"""The commands: every change of the metadata is one of these, submitted to the controller.

A command is a value. What it does, and when it is refused, is in ``planning``. ``Command[R]`` gives an
``R`` when it has been committed.
"""

from __future__ import annotations

import base64
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar
from uuid import UUID

import msgspec

from tidemill.control.image import MetadataImage, NodeImage, PartitionImage, TopicImage
from tidemill.errors import ErrorCode

__all__ = (
    "PROPOSALS",
    "AdmitNode",
    "AllocateNodeNumber",
    "AllocateProducerIds",
    "AlterInSync",
    "AlterReassignment",
    "BumpLeaderEpochs",
    "Command",
    "CreatePartitions",
    "CreateTopic",
    "DeclareFit",
    "DeclareUnfit",
    "DeleteTopic",
    "ElectLeaders",
    "Election",
    "ForgetDeleted",
    "RaiseLeaderEpoch",
    "RegisterNode",
    "RemoveNode",
    "Resign",
    "SetClusterId",
    "SetGroupConfigs",
    "SetNodeConfigs",
    "SetNodeTags",
    "SetTopicConfigs",
    "SettlePartitions",
    "new_cluster_id",
)

R_co = TypeVar("R_co", covariant=True)

Assignments = tuple[tuple[int, ...], ...]
"""The replicas of each partition, in the partitions' order; the first one is the preferred leader."""


class Command(msgspec.Struct, Generic[R_co], frozen=True, tag=True, kw_only=True):
    """Base of the commands: a value that says what is to be changed."""

    #: Whether it may use the space that is kept for deletions and for starts on a full disk.
    may_use_reserve: ClassVar[bool] = False
    #: Whether a refusal of the second attempt means that the first one, whose answer was lost, was committed.
    refused_when_repeated: ClassVar[bool] = False

    def was_done(self, image: MetadataImage, before: Any) -> bool | None:
        """Whether an earlier attempt, whose answer was lost, committed this command, which is refused now.

        ``before`` is the result that the attempt would have had. None: ``image`` does not tell. False is
        final: it was not committed, and never will be.
        """
        return self.refused_when_repeated or None


class SetClusterId(Command[None], frozen=True, kw_only=True):
    """Name the cluster, once. Naming it again is refused unless the name is the same.

    ``replicated`` makes it a cluster of several nodes, for good, whose nodes prove ``secret`` to each other.
    """

    cluster_id: str
    replicated: bool = False
    secret: bytes = b""


class AllocateNodeNumber(Command[int], frozen=True, kw_only=True):
    """Give a node's name its number, for good; gives the number. Asked again, it is the same."""

    may_use_reserve: ClassVar[bool] = True

    name: str


class RegisterNode(Command[NodeImage], frozen=True, kw_only=True):
    """Register a node and its listener, at each of its starts. Numbers and names go together one to one.

    Attributes:
        clean_of: The incarnation that is named by the clean note of the data directory; None without a note.
        lost: Replicas that the directory should have and has not, or has repaired with loss.
        known_as: The incarnations that the directory knows of; the last that was registered is one of them,
            or the directory is older than it should be. Empty: it does not know.
        replace_directory: An operator says that the node goes on with another data directory, or with an
            older copy of it.
        seen_revision: The newest metadata revision that the directory has ever seen.
        cluster_tls: Whether the node uses TLS between nodes; None if that is not known.
    """

    may_use_reserve: ClassVar[bool] = True

    node_id: int
    name: str
    host: str
    port: int
    rack: str | None = None
    incarnation: UUID
    cluster_host: str = ""
    cluster_port: int = 0
    machine: str = ""
    directory_id: UUID | None = None
    clean_of: UUID | None = None
    lost: tuple[tuple[UUID, int], ...] = ()
    known_as: tuple[UUID, ...] = ()
    replace_directory: bool = False
    seen_revision: int = 0
    cluster_tls: bool | None = None


class AdmitNode(Command[None], frozen=True, kw_only=True):
    """Let the registered incarnation of a node count as live. By the controller, as the last step."""

    may_use_reserve: ClassVar[bool] = True

    node_id: int
    incarnation: UUID


class SetNodeTags(Command[None], frozen=True, kw_only=True):
    """Replace the tags of a node. ``PERMANENT_OFFLINE`` and ``TEMPORARY_OFFLINE`` keep new replicas away."""

    node_id: int
    tags: tuple[str, ...]


class RemoveNode(Command[None], frozen=True, kw_only=True):
    """Forget a node that is stopped and holds no replicas."""

    may_use_reserve: ClassVar[bool] = True

    node_id: int


class CreateTopic(Command[TopicImage], frozen=True, kw_only=True):
    """Create a topic, either with ``partitions`` and ``replication`` or with ``assignments``."""

    name: str
    topic_id: UUID
    partitions: int | None = None
    replication: int | None = None
    assignments: Assignments | None = None
    configs: dict[str, str] = {}

    def was_done(self, image: MetadataImage, before: TopicImage) -> bool | None:
        """Whether somebody has deleted the topic since."""
        return self.topic_id in image.deleted_topics or None


class DeleteTopic(Command[TopicImage], frozen=True, kw_only=True):
    """Delete a topic; gives its last image. With ``topic_id``, only if the name still means that topic.

    ``command_id`` tells this deletion from that of somebody else, if etcd's answer is lost.
    """

    may_use_reserve: ClassVar[bool] = True
    refused_when_repeated: ClassVar[bool] = True

    name: str
    topic_id: UUID | None = None
    command_id: UUID | None = None

    def was_done(self, image: MetadataImage, before: TopicImage) -> bool | None:
        """Whether it was this command that has deleted the topic."""
        if not image.replicated:
            return True  # Nobody else writes.
        deleted = image.deleted_topics.get(before.id)
        return None if deleted is None else deleted.deleted_by == self.command_id


class ForgetDeleted(Command[None], frozen=True, kw_only=True):
    """Say that a node has no files of a deleted topic any more."""

    may_use_reserve: ClassVar[bool] = True

    topic_id: UUID
    node_id: int


class CreatePartitions(Command[TopicImage], frozen=True, kw_only=True):
    """Raise the number of partitions to ``new_count``. ``assignments`` is for the new partitions only."""

    refused_when_repeated: ClassVar[bool] = True

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


class SetGroupConfigs(Command[None], frozen=True, kw_only=True):
    """Replace all overrides of a group; the values have been checked by the caller.

    ``base`` is as in ``SetTopicConfigs``. The group itself need not exist.
    """

    group_id: str
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


class RaiseLeaderEpoch(Command[PartitionImage], frozen=True, kw_only=True):
    """Go on far above ``above``, the leader epoch of records that lost metadata had given.

    Other replicas may have records of later epochs that are lost, too. None of these is given again: records
    of one epoch would be taken for the same. Who leads stays as it is.
    """

    may_use_reserve: ClassVar[bool] = True

    topic_id: UUID
    index: int
    above: int


class AlterInSync(Command[PartitionImage], frozen=True, kw_only=True):
    """Change the in-sync set of a partition, as its leader proposes; gives the partition as it is then.

    ``node_epochs`` has the epochs under which the leader knows the members.
    """

    may_use_reserve: ClassVar[bool] = True

    topic_id: UUID
    index: int
    leader: int
    leader_epoch: int
    partition_epoch: int
    isr: tuple[int, ...]
    node_epochs: dict[int, int] = {}


class Resign(Command[PartitionImage], frozen=True, kw_only=True):
    """Give up the leadership of ``leader_epoch``; gives the partition as it is then.

    Another live member of the in-sync set takes over. If there is none, the leader stays.
    """

    may_use_reserve: ClassVar[bool] = True

    topic_id: UUID
    index: int
    node_id: int
    leader_epoch: int


class DeclareUnfit(Command[PartitionImage], frozen=True, kw_only=True):
    """Say that a replica must not lead because of its disk, until ``DeclareFit``; gives the partition then.

    If it leads at ``leader_epoch``, it gives that up: another replica takes over, or none, and it leaves the
    in-sync set in the same step, because nobody should wait for it. If its storage has ``failed``, nobody
    knows what it has: whatever it names as the leader epoch, it is neither in sync nor eligible once another
    replica leads. ``node_epoch`` is that of the registration that says so.
    """

    may_use_reserve: ClassVar[bool] = True

    topic_id: UUID
    index: int
    node_id: int
    node_epoch: int
    leader_epoch: int
    failed: bool = False


class DeclareFit(Command[PartitionImage], frozen=True, kw_only=True):
    """Say that an unfit replica can lead again: it was restarted, or disk space was freed."""

    may_use_reserve: ClassVar[bool] = True

    topic_id: UUID
    index: int
    node_id: int


class AlterReassignment(Command[PartitionImage], frozen=True, kw_only=True):
    """Move a partition to ``replicas``, in the order of preference; None cancels a move."""

    name: str
    index: int
    replicas: tuple[int, ...] | None


class SettlePartitions(Command[int], frozen=True, kw_only=True):
    """Do the controller's duties for a chunk of a topic's partitions; gives how many were changed.

    ``suspects`` are nodes that should not become leaders now.
    """

    may_use_reserve: ClassVar[bool] = True

    topic_id: UUID
    chunk: int
    suspects: frozenset[int] = frozenset()


class Election(Enum):
    """How a leader is chosen: the preferred replica, or any replica of a partition that has no leader."""

    PREFERRED = "preferred"
    UNCLEAN = "unclean"


class ElectLeaders(Command[dict[int, ErrorCode]], frozen=True, kw_only=True):
    """Elect leaders of partitions of one topic; gives Kafka's code for each (``none``: elected).

    In a replicated cluster a preferred leader is a wish (``none``: noted) that the present leader, if it is
    live, obeys by resigning. An unclean election names the replica that shall lead: what other replicas have
    beyond its end is lost. ``who`` asked for it, for the log.
    """

    name: str
    partitions: tuple[int, ...]
    election: Election = Election.PREFERRED
    leader: int | None = None
    who: str = ""


PROPOSALS = (
    AlterInSync
    | Resign
    | DeclareUnfit
    | DeclareFit
    | AlterReassignment
    | ElectLeaders
    | SetNodeTags
    | RemoveNode
    | ForgetDeleted
)
"""The commands that other nodes send to the controller, as a type that msgspec decodes."""


def new_cluster_id(drawn: UUID) -> str:
    """An id in Kafka's form: 22 characters of URL-safe base64."""
    return base64.urlsafe_b64encode(drawn.bytes).decode().rstrip("=")
