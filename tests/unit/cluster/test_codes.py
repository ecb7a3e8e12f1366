"""Error codes keep their meaning on the way to another node and back."""

from __future__ import annotations

import pytest

from tidemill.cluster.codes import cluster_code, error_of, message_of, raise_for
from tidemill.cluster.messages import ClusterErrorCode, ResponseHeader
from tidemill.errors import ApiError, ErrorCode, NodeUnavailable, SyncFailed


@pytest.mark.parametrize("code", ClusterErrorCode)
def test_an_error_of_an_answer_has_the_same_code_when_it_is_answered_again(code: ClusterErrorCode) -> None:
    assert cluster_code(error_of(code, "words")) is code


def test_what_a_handler_raises_has_a_code_between_nodes() -> None:
    assert cluster_code(SyncFailed("no")) is ClusterErrorCode.STORAGE_ERROR
    assert cluster_code(NodeUnavailable("no")) is ClusterErrorCode.LEADER_NOT_AVAILABLE
    assert cluster_code(ApiError(ErrorCode.unknown_topic_id, "no")) is ClusterErrorCode.UNKNOWN_TOPIC


def test_a_code_that_nodes_do_not_have_is_named_in_the_message() -> None:
    error = ApiError(ErrorCode.policy_violation, "not allowed here")
    assert cluster_code(error) is ClusterErrorCode.UNKNOWN
    assert message_of(error) == "POLICY_VIOLATION: not allowed here"
    assert message_of(ApiError(ErrorCode.not_controller, "ask node 2")) == "ask node 2"


@pytest.mark.parametrize("code", ErrorCode)
def test_every_code_of_kafka_survives_the_way_or_comes_near(code: ErrorCode) -> None:
    error = ApiError(code, "why: so")
    back = error_of(cluster_code(error), message_of(error))
    assert back.message == "why: so"
    assert back.code is code or cluster_code(back) is cluster_code(error) is not ClusterErrorCode.UNKNOWN


def test_words_that_only_look_like_a_code_stay() -> None:
    for words in ("NOT_A_CODE: x", "NOT_CONTROLLER: x", "no code"):
        error = error_of(ClusterErrorCode.UNKNOWN, words)
        assert (error.code, error.message) == (ErrorCode.unknown_server_error, words)


def test_a_code_of_a_newer_node_is_an_error_all_the_same() -> None:
    error = error_of(4711, "something new")
    assert error.code is ErrorCode.unknown_server_error
    assert "4711" in error.message
    assert "something new" in error.message


def test_only_errors_are_raised() -> None:
    raise_for(ResponseHeader(1), "trying")
    with pytest.raises(ApiError, match="trying: error 6") as caught:
        raise_for(ResponseHeader(1, 6), "trying")
    assert caught.value.code is ErrorCode.not_leader_or_follower
    with pytest.raises(ApiError, match="gone"):
        raise_for(ResponseHeader(1, 6, "gone"), "trying")
