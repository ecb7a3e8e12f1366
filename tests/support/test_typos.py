"""Finding misspelt keys."""

from __future__ import annotations

from kio.schema.consumer_protocol_assignment.v0.data import ConsumerProtocolAssignment

from support.typos import typos
from tidemill.wire.apis import request_class, response_class


def test_keys_of_every_version_are_known() -> None:
    body = {
        "throttle_time": 0,
        "cluster_id": "c",
        "topics": [{"topic_id": None, "partitions": [{"leader_epoch": 1}]}],
    }
    assert typos(response_class(3, 0), body) == []
    assert typos(request_class(18, 4), {"node_id": 1}) == []


def test_unknown_keys_are_found_at_any_depth() -> None:
    body = {"topic": [], "topics": [{"partitions": ({"leader_epoch": 1, "isr": []},)}]}
    assert typos(response_class(3, 12), body) == ["topic", "topics.partitions.isr"]
    assert typos(response_class(75, 0), {"next_cursor": {"topic": "t"}}) == ["next_cursor.topic"]


def test_a_request_does_not_know_the_keys_of_its_response() -> None:
    assert typos(request_class(3, 12), {"brokers": []}) == ["brokers"]


def test_data_that_is_no_request_is_checked_too() -> None:
    assert typos(ConsumerProtocolAssignment, {"assigned_partitions": [], "user_dat": None}) == ["user_dat"]
