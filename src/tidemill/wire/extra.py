"""Message versions that kio does not have yet, in kio's shape: the same machinery reads and writes them.

ApiVersions v5 (KIP-1242): the request may name the cluster and the node that the client believes it is
talking to; the response is that of v4.

DescribeTransactions v0: a start time of -1 says that there was no transaction yet; kio's reader refuses
it. Here it is a plain number.

TxnOffsetCommit v6 (KIP-1319): topics go by id instead of by name, in the request and in the response.

This module must not postpone the evaluation of annotations: kio reads the types of the dataclass fields.
"""

from dataclasses import dataclass, field
from typing import ClassVar
from uuid import UUID

from kio.schema.api_versions.v4 import response as _response_v4
from kio.schema.describe_transactions.v0.request import DescribeTransactionsRequest
from kio.schema.describe_transactions.v0.response import TopicData
from kio.schema.errors import ErrorCode
from kio.schema.request_header.v2.header import RequestHeader
from kio.schema.response_header.v1.header import ResponseHeader
from kio.schema.types import BrokerId, GroupId, ProducerId, TransactionalId
from kio.static.constants import EntityType
from kio.static.primitive import i16, i32, i32Timedelta, i64

__all__ = (
    "ApiVersionsRequest",
    "ApiVersionsResponse",
    "DescribeTransactionsRequest",
    "DescribeTransactionsResponse",
    "TxnOffsetCommitRequest",
    "TxnOffsetCommitResponse",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiVersionsRequest:
    """ApiVersions request v5."""

    __type__: ClassVar = EntityType.request
    __version__: ClassVar[i16] = i16(5)
    __flexible__: ClassVar[bool] = True
    __api_key__: ClassVar[i16] = i16(18)
    __header_schema__: ClassVar[type[RequestHeader]] = RequestHeader
    client_software_name: str = field(metadata={"kafka_type": "string"})
    """The name of the client."""
    client_software_version: str = field(metadata={"kafka_type": "string"})
    """The version of the client."""
    cluster_id: str | None = field(metadata={"kafka_type": "string"}, default=None)
    """The cluster that the client means to reach, or null if it does not know."""
    node_id: BrokerId = field(metadata={"kafka_type": "int32"}, default=BrokerId(-1))
    """The node that the client means to reach, or -1 if it does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiVersionsResponse(_response_v4.ApiVersionsResponse):
    """ApiVersions response v5: the fields of v4."""

    __version__: ClassVar[i16] = i16(5)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransactionState:
    """One transactional id of a DescribeTransactions response v0."""

    __type__: ClassVar = EntityType.nested
    __version__: ClassVar[i16] = i16(0)
    __flexible__: ClassVar[bool] = True
    __api_key__: ClassVar[i16] = i16(65)
    __header_schema__: ClassVar[type[ResponseHeader]] = ResponseHeader
    error_code: ErrorCode = field(metadata={"kafka_type": "error_code"})
    """Error code: whether the id is known."""
    transactional_id: TransactionalId = field(metadata={"kafka_type": "string"})
    """The transactional id."""
    transaction_state: str = field(metadata={"kafka_type": "string"})
    """The name of the transaction's state."""
    transaction_timeout: i32Timedelta = field(metadata={"kafka_type": "timedelta_i32"})
    """The time after which a transaction is aborted."""
    transaction_start_time: i64 = field(metadata={"kafka_type": "int64"})
    """When the transaction began, in milliseconds; -1 if there was none."""
    producer_id: ProducerId = field(metadata={"kafka_type": "int64"})
    """The producer's id."""
    producer_epoch: i16 = field(metadata={"kafka_type": "int16"})
    """The producer's epoch."""
    topics: tuple[TopicData, ...]
    """The partitions of the transaction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DescribeTransactionsResponse:
    """DescribeTransactions response v0."""

    __type__: ClassVar = EntityType.response
    __version__: ClassVar[i16] = i16(0)
    __flexible__: ClassVar[bool] = True
    __api_key__: ClassVar[i16] = i16(65)
    __header_schema__: ClassVar[type[ResponseHeader]] = ResponseHeader
    throttle_time: i32Timedelta = field(metadata={"kafka_type": "timedelta_i32"})
    """How long the client should pause."""
    transaction_states: tuple[TransactionState, ...]
    """The transactional ids that were asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnOffsetCommitRequestPartition:
    """One partition of a TxnOffsetCommit request v6."""

    __type__: ClassVar = EntityType.nested
    __version__: ClassVar[i16] = i16(6)
    __flexible__: ClassVar[bool] = True
    __api_key__: ClassVar[i16] = i16(28)
    __header_schema__: ClassVar[type[RequestHeader]] = RequestHeader
    partition_index: i32 = field(metadata={"kafka_type": "int32"})
    """The number of the partition."""
    committed_offset: i64 = field(metadata={"kafka_type": "int64"})
    """The offset to commit."""
    committed_leader_epoch: i32 = field(metadata={"kafka_type": "int32"}, default=i32(-1))
    """The leader epoch of the last record that was consumed, or -1."""
    committed_metadata: str | None = field(metadata={"kafka_type": "string"})
    """A note that the client keeps with the offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnOffsetCommitRequestTopic:
    """One topic of a TxnOffsetCommit request v6."""

    __type__: ClassVar = EntityType.nested
    __version__: ClassVar[i16] = i16(6)
    __flexible__: ClassVar[bool] = True
    __api_key__: ClassVar[i16] = i16(28)
    __header_schema__: ClassVar[type[RequestHeader]] = RequestHeader
    topic_id: UUID | None = field(metadata={"kafka_type": "uuid"})
    """The topic's id."""
    partitions: tuple[TxnOffsetCommitRequestPartition, ...]
    """The topic's partitions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnOffsetCommitRequest:
    """TxnOffsetCommit request v6."""

    __type__: ClassVar = EntityType.request
    __version__: ClassVar[i16] = i16(6)
    __flexible__: ClassVar[bool] = True
    __api_key__: ClassVar[i16] = i16(28)
    __header_schema__: ClassVar[type[RequestHeader]] = RequestHeader
    transactional_id: TransactionalId = field(metadata={"kafka_type": "string"})
    """The transactional id."""
    group_id: GroupId = field(metadata={"kafka_type": "string"})
    """The group whose offsets are committed."""
    producer_id: ProducerId = field(metadata={"kafka_type": "int64"})
    """The producer's id."""
    producer_epoch: i16 = field(metadata={"kafka_type": "int16"})
    """The producer's epoch."""
    generation_id: i32 = field(metadata={"kafka_type": "int32"}, default=i32(-1))
    """The generation of the member, or its epoch in a group of the newer protocol."""
    member_id: str = field(metadata={"kafka_type": "string"}, default="")
    """The member on whose behalf offsets are committed."""
    group_instance_id: str | None = field(metadata={"kafka_type": "string"}, default=None)
    """The member's name if it is static."""
    topics: tuple[TxnOffsetCommitRequestTopic, ...]
    """The offsets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnOffsetCommitResponsePartition:
    """One partition of a TxnOffsetCommit response v6."""

    __type__: ClassVar = EntityType.nested
    __version__: ClassVar[i16] = i16(6)
    __flexible__: ClassVar[bool] = True
    __api_key__: ClassVar[i16] = i16(28)
    __header_schema__: ClassVar[type[ResponseHeader]] = ResponseHeader
    partition_index: i32 = field(metadata={"kafka_type": "int32"})
    """The number of the partition."""
    error_code: ErrorCode = field(metadata={"kafka_type": "error_code"})
    """The result for the partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnOffsetCommitResponseTopic:
    """One topic of a TxnOffsetCommit response v6."""

    __type__: ClassVar = EntityType.nested
    __version__: ClassVar[i16] = i16(6)
    __flexible__: ClassVar[bool] = True
    __api_key__: ClassVar[i16] = i16(28)
    __header_schema__: ClassVar[type[ResponseHeader]] = ResponseHeader
    topic_id: UUID | None = field(metadata={"kafka_type": "uuid"})
    """The topic's id."""
    partitions: tuple[TxnOffsetCommitResponsePartition, ...]
    """The topic's partitions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnOffsetCommitResponse:
    """TxnOffsetCommit response v6."""

    __type__: ClassVar = EntityType.response
    __version__: ClassVar[i16] = i16(6)
    __flexible__: ClassVar[bool] = True
    __api_key__: ClassVar[i16] = i16(28)
    __header_schema__: ClassVar[type[ResponseHeader]] = ResponseHeader
    throttle_time: i32Timedelta = field(metadata={"kafka_type": "timedelta_i32"})
    """How long the client should pause."""
    topics: tuple[TxnOffsetCommitResponseTopic, ...]
    """The results by topic."""
