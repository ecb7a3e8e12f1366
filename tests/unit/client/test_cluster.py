"""Which errors a client waits out, and which it reports."""

from __future__ import annotations

import pytest

from tidemill.client.cluster import Cluster, check, passes_by_itself
from tidemill.errors import ApiError, ConfigError, ErrorCode, NodeUnavailable, TidemillError


@pytest.mark.parametrize(
    "error",
    [
        NodeUnavailable("gone"),
        ApiError(ErrorCode.not_leader_or_follower, ""),
        ApiError(ErrorCode.coordinator_load_in_progress, ""),
    ],
)
def test_moves_and_lost_connections_are_waited_out(error: TidemillError) -> None:
    assert passes_by_itself(error)


@pytest.mark.parametrize(
    "code",
    [ErrorCode.unknown_topic_or_partition, ErrorCode.kafka_storage_error, ErrorCode.invalid_config],
)
def test_missing_topics_broken_disks_and_refusals_are_reported_at_once(code: ErrorCode) -> None:
    assert not passes_by_itself(ApiError(code, ""))


def test_check_gives_the_servers_words_or_else_says_what_was_tried() -> None:
    check(0, None, "anything")
    with pytest.raises(ApiError, match="no such luck"):
        check(ErrorCode.invalid_request, "no such luck", "trying")
    with pytest.raises(ApiError, match="trying: the server answered INVALID_REQUEST") as caught:
        check(ErrorCode.invalid_request, None, "trying")
    assert caught.value.code == ErrorCode.invalid_request


async def test_bootstrap_takes_several_addresses_and_refuses_nonsense() -> None:
    assert [address.port for address in Cluster("a:1,[::1]:2").bootstrap] == [1, 2]
    with pytest.raises(ConfigError, match="host:port"):
        Cluster("nowhere")
