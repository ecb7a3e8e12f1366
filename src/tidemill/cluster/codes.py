"""Error codes between nodes and Kafka's: what a handler raises, and what the asking side raises again.

Every cluster code has a Kafka code of its own, so that an error keeps its code on its way to another node and
back. Kafka has many more: some come near a cluster code, the rest become UNKNOWN, with their name in the
message, by which the asking side knows them.
"""

from __future__ import annotations

from typing import Final

from tidemill.cluster.messages import ClusterErrorCode, ResponseHeader
from tidemill.errors import ApiError, ErrorCode, TidemillError

__all__ = ("cluster_code", "error_of", "message_of", "raise_for")

_KAFKA: Final[dict[ClusterErrorCode, ErrorCode]] = {
    ClusterErrorCode.NONE: ErrorCode.none,
    ClusterErrorCode.UNKNOWN: ErrorCode.unknown_server_error,
    ClusterErrorCode.CORRUPT_MESSAGE: ErrorCode.corrupt_message,
    ClusterErrorCode.UNKNOWN_TOPIC: ErrorCode.unknown_topic_or_partition,
    ClusterErrorCode.INVALID_PARTITION: ErrorCode.invalid_partitions,
    ClusterErrorCode.LEADER_NOT_AVAILABLE: ErrorCode.leader_not_available,
    ClusterErrorCode.NOT_LEADER_FOR_PARTITION: ErrorCode.not_leader_or_follower,
    ClusterErrorCode.REQUEST_TIMED_OUT: ErrorCode.request_timed_out,
    ClusterErrorCode.NOT_ENOUGH_REPLICAS: ErrorCode.not_enough_replicas,
    ClusterErrorCode.NOT_ENOUGH_REPLICAS_AFTER_APPEND: ErrorCode.not_enough_replicas_after_append,
    ClusterErrorCode.INVALID_REQUIRED_ACKS: ErrorCode.invalid_required_acks,
    ClusterErrorCode.NOT_CONTROLLER: ErrorCode.not_controller,
    ClusterErrorCode.INVALID_REQUEST: ErrorCode.invalid_request,
    ClusterErrorCode.UNSUPPORTED_VERSION: ErrorCode.unsupported_version,
    ClusterErrorCode.TOPIC_ALREADY_EXISTS: ErrorCode.topic_already_exists,
    ClusterErrorCode.INVALID_REPLICATION_FACTOR: ErrorCode.invalid_replication_factor,
    ClusterErrorCode.INELIGIBLE_REPLICA: ErrorCode.ineligible_replica,
    ClusterErrorCode.OFFSET_OUT_OF_RANGE: ErrorCode.offset_out_of_range,
    ClusterErrorCode.NOT_REPLICA_FOR_PARTITION: ErrorCode.replica_not_available,
    ClusterErrorCode.GROUP_AUTHORIZATION_FAILED: ErrorCode.group_authorization_failed,
    ClusterErrorCode.UNKNOWN_MEMBER_ID: ErrorCode.unknown_member_id,
    ClusterErrorCode.FENCED_LEADER_EPOCH: ErrorCode.fenced_leader_epoch,
    ClusterErrorCode.UNKNOWN_LEADER_EPOCH: ErrorCode.unknown_leader_epoch,
    ClusterErrorCode.STORAGE_ERROR: ErrorCode.kafka_storage_error,
    ClusterErrorCode.FENCED_NODE_EPOCH: ErrorCode.stale_broker_epoch,
    ClusterErrorCode.WRONG_CLUSTER: ErrorCode.inconsistent_cluster_id,
    ClusterErrorCode.WRONG_SECRET: ErrorCode.sasl_authentication_failed,
    ClusterErrorCode.STALE_PARTITION_EPOCH: ErrorCode.invalid_update_version,
}

#: Kafka's codes that are no cluster code's own, and come near one.
_NEAR: Final[dict[ErrorCode, ClusterErrorCode]] = {
    ErrorCode.unknown_topic_id: ClusterErrorCode.UNKNOWN_TOPIC,
    ErrorCode.inconsistent_topic_id: ClusterErrorCode.UNKNOWN_TOPIC,
    ErrorCode.invalid_topic_exception: ClusterErrorCode.UNKNOWN_TOPIC,
    ErrorCode.broker_not_available: ClusterErrorCode.LEADER_NOT_AVAILABLE,
    ErrorCode.network_exception: ClusterErrorCode.LEADER_NOT_AVAILABLE,
    ErrorCode.coordinator_not_available: ClusterErrorCode.LEADER_NOT_AVAILABLE,
    ErrorCode.coordinator_load_in_progress: ClusterErrorCode.LEADER_NOT_AVAILABLE,
    ErrorCode.preferred_leader_not_available: ClusterErrorCode.LEADER_NOT_AVAILABLE,
    ErrorCode.eligible_leaders_not_available: ClusterErrorCode.LEADER_NOT_AVAILABLE,
    ErrorCode.not_coordinator: ClusterErrorCode.NOT_LEADER_FOR_PARTITION,
    ErrorCode.stale_controller_epoch: ClusterErrorCode.NOT_CONTROLLER,
    ErrorCode.message_too_large: ClusterErrorCode.INVALID_REQUEST,
    ErrorCode.invalid_record: ClusterErrorCode.CORRUPT_MESSAGE,
}

_CLUSTER: Final = {kafka: code for code, kafka in _KAFKA.items()} | _NEAR


def cluster_code(error: TidemillError) -> ClusterErrorCode:
    """The code with which a node answers when a handler has raised ``error``.

    >>> cluster_code(ApiError(ErrorCode.not_leader_or_follower, "moved")).name
    'NOT_LEADER_FOR_PARTITION'
    """
    return _CLUSTER.get(error.code, ClusterErrorCode.UNKNOWN)


def message_of(error: TidemillError) -> str:
    """The words of an answer; with the name of the code, if the code itself does not arrive.

    >>> message_of(ApiError(ErrorCode.policy_violation, "not here"))
    'POLICY_VIOLATION: not here'
    """
    known = error.code in _CLUSTER
    return error.message if known else f"{error.name}: {error.message}"


def error_of(code: int, message: str) -> ApiError:
    """The exception for a code of an answer; one that is not known here is as UNKNOWN.

    >>> error_of(6, "it has moved").code.name
    'not_leader_or_follower'
    >>> error_of(1, "POLICY_VIOLATION: not here").code.name
    'policy_violation'
    """
    try:
        known = ClusterErrorCode(code)
    except ValueError:
        return ApiError(ErrorCode.unknown_server_error, f"error {code}, which is not known here: {message}")
    if known is ClusterErrorCode.UNKNOWN:
        name, _, text = message.partition(": ")
        named = ErrorCode.__members__.get(name.lower())
        if named is not None and named not in _CLUSTER:
            return ApiError(named, text)
    return ApiError(_KAFKA[known], message)


def raise_for(header: ResponseHeader, what: str) -> None:
    """Raise ``ApiError`` unless the answer is a success. ``what`` was tried, if the answer has no words."""
    if header.error_code:
        raise error_of(header.error_code, header.error_message or f"{what}: error {header.error_code}")
