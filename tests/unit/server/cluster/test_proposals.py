"""Proposals: which errors say for certain that the controller has not committed a command."""

from __future__ import annotations

import pytest

from tidemill.cluster.codes import cluster_code, error_of, message_of
from tidemill.control.stores.store import OutcomeUnknown, StoreClosed, StoreUnavailable
from tidemill.errors import ApiError, ErrorCode, MetadataConflict, NodeUnavailable, TidemillError
from tidemill.server.cluster.proposals import is_certain_refusal


def as_another_node_hears(error: TidemillError) -> TidemillError:
    return error_of(int(cluster_code(error)), message_of(error))


@pytest.mark.parametrize(
    "error",
    [
        OutcomeUnknown("no answer"),
        StoreClosed("stopped"),
        StoreUnavailable("away"),
        MetadataConflict("too often"),
        NodeUnavailable("unreachable"),
        ApiError(ErrorCode.not_controller, "not any more"),
        ApiError(ErrorCode.request_timed_out, "no answer"),
    ],
    ids=lambda error: type(error).__name__ if not isinstance(error, ApiError) else error.code.name,
)
def test_what_can_go_wrong_after_a_commit_is_no_certain_refusal(error: TidemillError) -> None:
    assert not is_certain_refusal(error)
    assert not is_certain_refusal(as_another_node_hears(error))


@pytest.mark.parametrize(
    "code",
    [
        ErrorCode.fenced_leader_epoch,
        ErrorCode.invalid_update_version,
        ErrorCode.ineligible_replica,
        ErrorCode.stale_broker_epoch,
        ErrorCode.unknown_topic_id,
        ErrorCode.invalid_request,
    ],
)
def test_what_planning_refuses_with_is_certain(code: ErrorCode) -> None:
    error = ApiError(code, "refused")
    assert is_certain_refusal(error)
    assert is_certain_refusal(as_another_node_hears(error))
