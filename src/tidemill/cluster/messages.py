"""The messages between nodes: MessagePack maps, told apart by their ``type``. Values only, no I/O.

A frame is a 4-byte big-endian length and one message of at most 16 MiB. Every request has a header with the
correlation id that its answer repeats; every answer has a header with an error code (``ClusterErrorCode``, 0
is success). ``Error`` answers a request that was refused as a whole, whatever it was.

Requests that are about many partitions name them all in one message, and each is answered with a code of its
own, so that one partition's trouble does not hold up the others.

A field that is added later gets a default. Decoders leave out fields that they do not know.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final
from uuid import UUID

import msgspec

__all__ = (
    "BATCH_BYTES_MAX",
    "MESSAGE_BYTES_MAX",
    "PROTOCOL_VERSION",
    "REQUESTS",
    "RESPONSES",
    "AppendRequest",
    "AppendResponse",
    "BrokerMetadata",
    "ClusterErrorCode",
    "ClusterRequest",
    "ClusterResponse",
    "Diverging",
    "ElectLeaderRequest",
    "ElectLeaderResponse",
    "ErrorResponse",
    "FetchMetadataRequest",
    "FetchPartition",
    "FetchRequest",
    "FetchResponse",
    "FetchedPartition",
    "FindTransactionsRequest",
    "FindTransactionsResponse",
    "HeartbeatPartition",
    "HeartbeatRequest",
    "HeartbeatResponse",
    "HelloProof",
    "HelloProofResponse",
    "HelloRequest",
    "HelloResponse",
    "KafkaRequest",
    "KafkaResponse",
    "MetadataProposalResponse",
    "MetadataResponse",
    "OpenTransaction",
    "PartitionId",
    "PartitionMetadata",
    "ProbeRequest",
    "ProbeResponse",
    "ProposeMetadataRequest",
    "ReplicaEnd",
    "ReplicaEndsRequest",
    "ReplicaEndsResponse",
    "ReplicaProgress",
    "ReplicaStateAckResponse",
    "ReplicaStateRequest",
    "ReplicaStatus",
    "RequestHeader",
    "ResponseHeader",
    "TopicMetadata",
)

PROTOCOL_VERSION: Final = 1
#: Checked before any memory is taken for a message.
MESSAGE_BYTES_MAX: Final = 16 * 1024 * 1024
#: The largest record batch that fits into a message, with room for the rest of it.
BATCH_BYTES_MAX: Final = 15 * 1024 * 1024


class ClusterErrorCode(IntEnum):
    """Error codes between nodes. 0 to 20 belong to the original messages, the others came later."""

    NONE = 0
    UNKNOWN = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC = 3
    INVALID_PARTITION = 4
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_FOR_PARTITION = 6
    REQUEST_TIMED_OUT = 7
    NOT_ENOUGH_REPLICAS = 8
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 9
    INVALID_REQUIRED_ACKS = 10
    NOT_CONTROLLER = 11
    INVALID_REQUEST = 12
    UNSUPPORTED_VERSION = 13
    TOPIC_ALREADY_EXISTS = 14
    INVALID_REPLICATION_FACTOR = 15
    INELIGIBLE_REPLICA = 16
    OFFSET_OUT_OF_RANGE = 17
    NOT_REPLICA_FOR_PARTITION = 18
    GROUP_AUTHORIZATION_FAILED = 19
    UNKNOWN_MEMBER_ID = 20
    # Codes that this protocol has added.
    FENCED_LEADER_EPOCH = 32
    UNKNOWN_LEADER_EPOCH = 33
    STORAGE_ERROR = 34
    FENCED_NODE_EPOCH = 35
    WRONG_CLUSTER = 36
    WRONG_SECRET = 37
    STALE_PARTITION_EPOCH = 38

    @property
    def retriable(self) -> bool:
        """Whether the same request can succeed later, here or at another node."""
        return self in _RETRIABLE


_RETRIABLE: Final = frozenset(
    {
        ClusterErrorCode.LEADER_NOT_AVAILABLE,
        ClusterErrorCode.NOT_LEADER_FOR_PARTITION,
        ClusterErrorCode.REQUEST_TIMED_OUT,
        ClusterErrorCode.NOT_ENOUGH_REPLICAS,
        ClusterErrorCode.NOT_CONTROLLER,
        ClusterErrorCode.UNKNOWN_LEADER_EPOCH,
    }
)


class _Value(msgspec.Struct, frozen=True, gc=False):
    """Base of the parts of messages."""


class RequestHeader(_Value, frozen=True, gc=False):
    """What every request begins with."""

    version: int
    correlation_id: int
    #: The number of the node that asks.
    source: int
    timeout_ms: int
    #: The revision at which the asking node registered: answers to an older registration are no use.
    node_epoch: int = 0

    def answer(
        self, error: ClusterErrorCode = ClusterErrorCode.NONE, message: str | None = None
    ) -> ResponseHeader:
        """The header of the answer to this request."""
        return ResponseHeader(self.correlation_id, int(error), message)


class ResponseHeader(_Value, frozen=True, gc=False):
    """What every answer begins with."""

    correlation_id: int
    error_code: int = 0
    error_message: str | None = None


class PartitionId(_Value, frozen=True):
    """A partition: the topic by id, because a name can come to mean another topic."""

    topic_id: UUID
    index: int


class ClusterRequest(msgspec.Struct, frozen=True, tag_field="type"):
    """Base of the requests."""

    header: RequestHeader


class ClusterResponse(msgspec.Struct, frozen=True, tag_field="type"):
    """Base of the answers."""

    header: ResponseHeader


# --- opening a connection


class HelloRequest(ClusterRequest, frozen=True, tag="Hello"):
    """The first message of a connection: who asks, of which cluster, in which versions.

    ``nonce`` is a fresh random token of the asking side; both proofs cover it.
    """

    cluster_id: str
    oldest_version: int
    newest_version: int
    incarnation: UUID
    nonce: bytes


class HelloResponse(ClusterResponse, frozen=True, tag="Hello"):
    """Who answers, the version of this connection, and a nonce that both proofs cover.

    It proves nothing: anyone who connects gets it, and must not get anything to try secrets against.
    """

    node_id: int
    version: int
    nonce: bytes


class HelloProof(ClusterRequest, frozen=True, tag="HelloProof"):
    """The proof that the asking side has the secret."""

    proof: bytes


class HelloProofResponse(ClusterResponse, frozen=True, tag="HelloProof"):
    """The proof that the answering side has the secret; from here on requests are taken."""

    proof: bytes
    #: The time of day at the answering node, so that clocks that are off are noticed.
    wall_ms: int = 0


# --- metadata


class FetchMetadataRequest(ClusterRequest, frozen=True, tag="FetchMetadata"):
    """Ask what the node knows of topics; None asks for all of them."""

    topics: list[str] | None = None


class PartitionMetadata(_Value, frozen=True):
    """A partition, as the answering node's image has it."""

    partition_index: int
    leader_id: int | None
    leader_epoch: int
    replica_nodes: list[int]
    isr_nodes: list[int]
    offline_replicas: list[int]


class TopicMetadata(_Value, frozen=True):
    """A topic, as the answering node's image has it."""

    name: str
    topic_id: UUID
    partitions: list[PartitionMetadata]
    is_internal: bool


class BrokerMetadata(_Value, frozen=True):
    """A node and where Kafka clients reach it."""

    node_id: int
    host: str
    port: int
    rack: str | None
    alive: bool = True


class MetadataResponse(ClusterResponse, frozen=True, tag="Metadata"):
    """Metadata of topics, nodes and the controller, as of ``revision``."""

    cluster_id: str
    controller_id: int | None
    topics: list[TopicMetadata]
    brokers: list[BrokerMetadata]
    revision: int = 0


class ProposeMetadataRequest(ClusterRequest, frozen=True, tag="ProposeMetadata"):
    """Ask the controller for a change. ``command`` is an encoded metadata command.

    A node that is not the controller passes it on, unless ``forwarded`` says that one has done so already.
    """

    command: msgspec.Raw
    forwarded: bool = False


class MetadataProposalResponse(ClusterResponse, frozen=True, tag="MetadataProposal"):
    """The command's result, and the revision at which it is in the metadata."""

    result: Any = None
    revision: int = 0


# --- replication


class FetchPartition(_Value, frozen=True):
    """What a follower wants of one partition.

    Attributes:
        offset: Its log end: the next offset that it needs.
        max_bytes: The most bytes of records.
        leader_epoch: The epoch at which it follows.
        last_epoch: The epoch of its last batch; -1 if its log is empty.
        durable: Everything below it is on its disk; -1 until its log is known to be a part of the leader's.
    """

    partition: PartitionId
    offset: int
    max_bytes: int
    leader_epoch: int
    last_epoch: int
    durable: int


class FetchRequest(ClusterRequest, frozen=True, tag="Fetch"):
    """Ask a leader for the records of many partitions; it waits for ``min_bytes`` up to ``max_wait_ms``."""

    partitions: list[FetchPartition]
    max_wait_ms: int = 500
    min_bytes: int = 1


class Diverging(_Value, frozen=True):
    """The largest epoch that both logs can have in common, and where it ends in the leader's log."""

    epoch: int
    end_offset: int


class FetchedPartition(_Value, frozen=True):
    """What a leader gives of one partition: whole batches, or an error, or where the logs part.

    Attributes:
        high_watermark: The leader's, as of this answer.
        log_start_offset: The leader's. A follower that ends below it starts anew there.
        compaction_floor: No replica compacts at or above it.
        removed_below: Below it, tombstones and markers may be gone from the leader's log. A follower that
            ends below it throws its log away.
        diverging: Where the follower has to cut its log; nothing else of the answer counts then.
    """

    partition: PartitionId
    high_watermark: int
    log_start_offset: int
    error: int = 0
    diverging: Diverging | None = None
    compaction_floor: int = 2**63 - 1
    removed_below: int = 0
    records: memoryview = memoryview(b"")


class FetchResponse(ClusterResponse, frozen=True, tag="Fetch"):
    """The answer to a Fetch; partitions without news are left out."""

    partitions: list[FetchedPartition]


class ReplicaProgress(_Value, frozen=True):
    """How far a follower is in one partition; sent at every flush, never behind a waiting Fetch."""

    partition: PartitionId
    log_end: int
    high_watermark: int
    durable: int
    leader_epoch: int
    #: The log start that is durable at the follower: DeleteRecords waits for it.
    log_start: int = 0


class ReplicaStateRequest(ClusterRequest, frozen=True, tag="ReplicaState"):
    """A follower's progress in many partitions."""

    partitions: list[ReplicaProgress]


class ReplicaStatus(_Value, frozen=True):
    """Whether a follower is in the in-sync set of one partition."""

    partition: PartitionId
    in_sync: bool
    error: int = 0
    high_watermark: int = -1


class ReplicaStateAckResponse(ClusterResponse, frozen=True, tag="ReplicaStateAck"):
    """The answer to ReplicaState, partition by partition."""

    partitions: list[ReplicaStatus]


class AppendRequest(ClusterRequest, frozen=True, tag="Append"):
    """Write a batch to a partition as its leader would for a producer. For internal writers.

    ``required_acks``: 1 or -1, as in Kafka's Produce. ``transactional_id`` is that of a transactional batch,
    whose partition the leader adds to the transaction.
    """

    partition: PartitionId
    records: memoryview
    required_acks: int
    leader_epoch: int
    transactional_id: str | None = None


class AppendResponse(ClusterResponse, frozen=True, tag="Append"):
    """The offset of the first record, and the time of the append (-1: the records' own)."""

    base_offset: int
    log_append_time: int = -1


class ElectLeaderRequest(ClusterRequest, frozen=True, tag="ElectLeader"):
    """Ask for another leader.

    ``mode``: ``preferred``; ``unclean``, which may lose records and is an operator's decision; ``resign``, by
    which the leader that gets it gives up, in favour of ``preferred_leader``.
    """

    partition: PartitionId
    preferred_leader: int | None = None
    mode: str = "preferred"


class ElectLeaderResponse(ClusterResponse, frozen=True, tag="ElectLeader"):
    """The leader and its epoch now."""

    leader: int | None
    epoch: int


class ReplicaEndsRequest(ClusterRequest, frozen=True, tag="ReplicaEnds"):
    """Ask a node how far its replicas reach, leader or not, before an unclean election."""

    partitions: list[PartitionId]


class ReplicaEnd(_Value, frozen=True):
    """How far a replica reaches. The last epoch counts first: of two logs, it tells which was led later."""

    partition: PartitionId
    error: int = 0
    last_epoch: int = -1
    log_end: int = -1
    high_watermark: int = -1


class ReplicaEndsResponse(ClusterResponse, frozen=True, tag="ReplicaEnds"):
    """The ends, in the order of the request."""

    partitions: list[ReplicaEnd]


class HeartbeatPartition(_Value, frozen=True):
    """The high watermark of a partition that its follower may have nothing to fetch from."""

    partition: PartitionId
    leader_epoch: int
    high_watermark: int


class HeartbeatRequest(ClusterRequest, frozen=True, tag="Heartbeat"):
    """A leader tells a follower the high watermarks that have moved and that no Fetch has told it.

    With ``confirm`` it also asks in which partitions the follower still follows it.
    """

    partitions: list[HeartbeatPartition]
    confirm: bool = False


class HeartbeatResponse(ClusterResponse, frozen=True, tag="Heartbeat"):
    """The answer to a Heartbeat. ``stale``: partitions that the asking node does not lead, as known here.

    ``confirmed``, if it was asked for: those in which this node follows the asking one at the named epoch.
    """

    stale: list[PartitionId] = []
    confirmed: list[PartitionId] = []


# --- liveness, and Kafka's own requests between brokers


class ProbeRequest(ClusterRequest, frozen=True, tag="Probe"):
    """Ask whether a node is well, or ask it to ask ``target``; carries suspicions of the asking node."""

    target: int | None = None
    suspects: dict[int, int] = {}


class ProbeResponse(ClusterResponse, frozen=True, tag="Probe"):
    """The answer to a Probe: the node is well. It carries the suspicions of the answering node."""

    reached: bool = True
    suspects: dict[int, int] = {}
    wall_ms: int = 0


class OpenTransaction(_Value, frozen=True):
    """A producer's transaction that is open in a partition, by the name under which coordinators know it."""

    producer_id: int
    topic: str
    index: int


class FindTransactionsRequest(ClusterRequest, frozen=True, tag="FindTransactions"):
    """Ask the coordinator of some partitions of ``__transaction_state`` which transactions it knows there."""

    shards: list[int]
    transactions: list[OpenTransaction]


class FindTransactionsResponse(ClusterResponse, frozen=True, tag="FindTransactions"):
    """Whether each is under way, in the order of the request. An error if one of the shards is not served."""

    known: list[bool]


class KafkaRequest(ClusterRequest, frozen=True, tag="Kafka"):
    """A whole Kafka request, without its length, that only nodes may send: WriteTxnMarkers and the like."""

    frame: memoryview


class KafkaResponse(ClusterResponse, frozen=True, tag="Kafka"):
    """The whole Kafka answer, without its length."""

    frame: memoryview


class ErrorResponse(ClusterResponse, frozen=True, tag="Error"):
    """The request was not understood, or not taken; the header says why."""


#: Every request, and every answer: what a decoder expects.
REQUESTS: Final = tuple(ClusterRequest.__subclasses__())
RESPONSES: Final = tuple(ClusterResponse.__subclasses__())
