"""confluent-kafka (librdkafka) against a node. What is done is in ``clients/confluent_client.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from support.group_stories import (
    SHORT_SESSION_MS,
    killed_member_is_replaced,
    share_and_take_over,
    static_member_returns,
)
from support.processes import ClientProcess, NodeProcess
from support.stored import stored_codecs

CLIENT = "confluent-kafka"
CLIENT_SCRIPT = "confluent"

Play = Callable[..., Any]
feature = pytest.mark.feature


@feature("produce: every codec", "produce: acks 0, 1, all", "consume: from the earliest record")
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_codec_with_every_acks(play: Play, node: NodeProcess, topic: str, codec: str) -> None:
    play(codec=codec)
    assert stored_codecs(node, topic) == {codec}


@feature("produce: idempotent")
def test_idempotent_producer_writes_everything_once_and_in_order(play: Play) -> None:
    play()


@feature("records: keys, headers, null values, timestamps")
def test_keys_headers_null_values_and_timestamps_survive(play: Play) -> None:
    play()


@feature("produce: large messages", "produce: too large a message is refused")
def test_large_messages_up_to_the_topics_limit(play: Play) -> None:
    play()


@feature("consume: from the earliest record", "consume: from the end", "consume: from an offset")
def test_reading_from_the_beginning_the_end_and_an_offset(play: Play) -> None:
    play()


@feature("consume: from a time")
def test_offsets_are_found_by_time(play: Play) -> None:
    play()


@feature("admin: list offsets", "admin: newest timestamp")
def test_the_offset_of_the_newest_timestamp_is_found(play: Play) -> None:
    play()


@feature("consume: pause, resume, seek")
def test_reading_pauses_resumes_and_seeks(play: Play) -> None:
    play()


@feature("consume: offset out of range")
def test_an_offset_out_of_range_is_reset_or_reported(play: Play) -> None:
    play()


@feature("topic config: recompression")
@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_batches_are_stored_with_the_topics_codec(
    play: Play, node: NodeProcess, topic: str, codec: str
) -> None:
    play(codec=codec)
    assert stored_codecs(node, topic) == {"none" if codec == "uncompressed" else codec}


@feature("topic config: append time")
def test_the_append_time_replaces_the_producers(play: Play) -> None:
    play()


@feature("topics: created by use")
def test_a_missing_topic_is_created_by_writing(play: Play) -> None:
    play()


@feature("topics: unknown topic error")
def test_a_missing_topic_is_an_error(strict_node: NodeProcess, start_client: Any, topic: str) -> None:
    start_client(CLIENT_SCRIPT, strict_node).call("a_missing_topic_is_an_error", topic=topic)


@feature("topic config: retention by size")
def test_retention_by_size_moves_the_start(play: Play) -> None:
    play()


@feature("topic config: retention by time")
def test_retention_by_time_empties_the_topic(play: Play) -> None:
    play()


@feature("admin: delete records")
def test_records_are_deleted_up_to_an_offset(play: Play) -> None:
    play()


@feature("groups: members share partitions", "groups: rebalance when a member leaves")
@pytest.mark.parametrize("strategy", ["range", "roundrobin", "cooperative-sticky"])
def test_members_share_partitions_and_take_over_when_one_leaves(
    client: ClientProcess, other_client: ClientProcess, topic: str, strategy: str
) -> None:
    share_and_take_over(client, other_client, topic, partition_assignment_strategy=strategy)


@feature("groups: rebalance when a member dies")
def test_a_killed_members_partitions_go_to_the_others(
    client: ClientProcess, other_client: ClientProcess, topic: str
) -> None:
    killed_member_is_replaced(client, other_client, topic, session_timeout_ms=SHORT_SESSION_MS)


@feature("groups: static members")
def test_a_static_member_returns_without_a_rebalance(
    client: ClientProcess, other_client: ClientProcess, start_client: Any, node: NodeProcess, topic: str
) -> None:
    start_another = partial(start_client, CLIENT_SCRIPT, node)
    static_member_returns(client, other_client, start_another, topic, session_timeout_ms=30_000)


@feature("groups: commit and fetch offsets")
def test_offsets_are_committed_and_fetched(play: Play) -> None:
    play()


@feature("groups: subscribe by pattern")
def test_a_pattern_subscribes_to_the_topics_it_matches(play: Play) -> None:
    play()


@feature("admin: list and describe groups", "admin: delete groups")
def test_groups_are_listed_described_and_deleted(play: Play) -> None:
    play()


@feature("admin: list and alter a group's offsets")
def test_group_offsets_are_listed_and_altered(play: Play) -> None:
    play()


@feature("admin: create, describe, delete topics")
def test_topics_are_created_described_and_deleted(play: Play) -> None:
    play()


@feature("admin: create partitions")
def test_partitions_are_added(play: Play) -> None:
    play()


@feature("admin: describe and alter configs", "admin: incremental alter configs")
def test_configs_are_described_and_altered(play: Play) -> None:
    play()


@feature("admin: describe cluster")
def test_the_cluster_is_described(play: Play) -> None:
    play()


@feature("admin: elect leaders")
def test_leaders_are_elected(play: Play) -> None:
    play()
