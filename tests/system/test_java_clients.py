"""Java's own clients against a node: producer, both consumers, admin, transactions V2, Streams.

What is done is in ``java/src/main/java/tidemill``; one JVM runs most of it. What Java's transactions have in
common with those of other clients is in ``test_transactions.py``. Without a JDK, Maven or the libraries every
test is skipped, and says so.
"""

from __future__ import annotations

import re
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tidemill
from support.group_stories import (
    SHORT_SESSION_MS,
    end_sessions_soon,
    killed_member_is_replaced,
    share_and_take_over,
    static_member_returns,
)
from support.processes import ClientProcess, NodeProcess, wait_until
from support.stored import stored_codecs

CLIENT = "Java"
CLIENT_SCRIPT = "java"

#: Members speak often, so that tests are quick; in the new protocol the server decides.
SETTINGS = {
    "log_retention_check_interval_ms": 200,
    "group_min_session_timeout_ms": 500,
    "group_consumer_heartbeat_interval_ms": 100,
    "group_share_heartbeat_interval_ms": 500,
}
RANGE = "org.apache.kafka.clients.consumer.RangeAssignor"
COOPERATIVE = "org.apache.kafka.clients.consumer.CooperativeStickyAssignor"

feature = pytest.mark.feature

Play = Callable[..., Any]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """The node that the tests of this module share."""
    with NodeProcess(tmp_path_factory.mktemp("node") / "data", **SETTINGS) as running:
        yield running


# --- producing and consuming


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


@feature("consume: offset out of range")
def test_an_offset_out_of_range_is_reset_or_reported(play: Play) -> None:
    play()


@feature("consume: pause, resume, seek")
def test_reading_pauses_resumes_and_seeks(play: Play) -> None:
    play()


# --- topics


@feature("topic config: recompression")
@pytest.mark.parametrize("codec", ["uncompressed", "zstd"])
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
def test_a_missing_topic_is_an_error(play: Play, strict_node: NodeProcess) -> None:
    play(servers=strict_node.bootstrap_servers)


@feature("topic config: retention by size")
def test_retention_by_size_moves_the_start(play: Play) -> None:
    play()


@feature("topic config: retention by time")
def test_retention_by_time_empties_the_topic(play: Play) -> None:
    play()


@feature("admin: delete records")
def test_records_are_deleted_up_to_an_offset(play: Play) -> None:
    play()


# --- groups


@feature("groups: members share partitions", "groups: rebalance when a member leaves")
@pytest.mark.parametrize(
    "config",
    [
        {"partition_assignment_strategy": RANGE},
        {"partition_assignment_strategy": COOPERATIVE},
        {"group_protocol": "consumer"},
    ],
    ids=["range", "cooperative", "consumer-protocol"],
)
def test_members_share_partitions_and_take_over_when_one_leaves(
    client: ClientProcess, other_client: ClientProcess, topic: str, config: dict[str, str]
) -> None:
    share_and_take_over(client, other_client, topic, **config)


@feature("groups: rebalance when a member dies")
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_killed_members_partitions_go_to_the_others(
    node: NodeProcess, client: ClientProcess, other_client: ClientProcess, topic: str, protocol: str
) -> None:
    config: dict[str, Any] = {"group_protocol": protocol}
    if protocol == "consumer":
        end_sessions_soon(node, topic, "consumer")
    else:
        config["session_timeout_ms"] = SHORT_SESSION_MS
    killed_member_is_replaced(client, other_client, topic, **config)


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
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_pattern_subscribes_to_the_topics_it_matches(play: Play, protocol: str) -> None:
    play(group_protocol=protocol)


@feature("admin: list and describe groups", "admin: delete groups")
@pytest.mark.parametrize(("protocol", "assignor"), [("classic", "range"), ("consumer", "uniform")])
def test_groups_are_listed_described_and_deleted(play: Play, protocol: str, assignor: str) -> None:
    play(group_protocol=protocol, type=protocol, assignor=assignor)


@feature("admin: remove group members")
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_member_is_removed_by_its_instance_id(play: Play, protocol: str) -> None:
    play(group_protocol=protocol)


@feature("admin: list and alter a group's offsets", "admin: delete a group's offsets")
def test_group_offsets_are_listed_altered_and_deleted(play: Play) -> None:
    play()


# --- administration


@feature("admin: create, describe, delete topics", "admin: describe topic partitions")
def test_topics_are_created_described_and_deleted(play: Play) -> None:
    play()


@feature("admin: create partitions")
def test_partitions_are_added(play: Play) -> None:
    play()


@feature("admin: describe and alter configs", "admin: incremental alter configs")
def test_configs_are_described_and_altered(play: Play) -> None:
    play()


@feature("admin: list offsets", "admin: newest timestamp")
def test_the_offset_of_the_newest_timestamp_is_found(play: Play) -> None:
    play()


@feature("admin: describe cluster")
def test_the_cluster_is_described(play: Play, node: NodeProcess) -> None:
    assert play() == {"1": node.bootstrap_servers}


@feature("admin: authorized operations")
def test_authorized_operations_are_shown(play: Play) -> None:
    play()


@feature("admin: quorum, features, config resources")
def test_the_quorum_features_and_config_resources_answer_what_is_true(play: Play) -> None:
    play()


@feature("admin: elect leaders")
def test_leaders_are_elected(play: Play) -> None:
    play()


@feature("admin: describe log directories")
def test_log_directories_show_the_size_of_partitions(play: Play) -> None:
    play()


# --- transactions


def served(node: NodeProcess) -> Counter[str]:
    """How many requests of each API the node has had."""
    with urllib.request.urlopen(f"http://{node.http}/metrics", timeout=120) as response:
        text = response.read().decode()
    found = re.findall(r'^tidemill_requests_total\{api="(\w+)"\} (\d+)', text, re.MULTILINE)
    return Counter({api: int(count) for api, count in found})


@feature("transactions: of the second kind (KIP-890)")
def test_transactions_are_of_the_second_kind(client: ClientProcess, node: NodeProcess, topic: str) -> None:
    """In those of KIP-890 a write is enough for a partition to join, and each has an epoch of its own."""
    assert client.call("features_are_described")["transaction.version"] == 2
    client.call("create", topic=topic, partitions=2)
    before = served(node)
    assert client.call("start", name=topic, transactional_id=topic) == "ok"
    epochs = []
    for end in ("commit", "abort", "commit"):
        assert client.call("begin", name=topic) == "ok"
        for partition in (0, 1):
            assert client.call("send", name=topic, topic=topic, texts=[end], partition=partition) == "ok"
        assert client.call("send_offsets", name=topic, group=topic, topic=topic, offset=5) == "ok"
        ongoing = client.call("describe", transactional_id=topic)
        assert ongoing["state"] == "Ongoing"
        assert {f"{topic}-0", f"{topic}-1"} < set(ongoing["partitions"])
        epochs.append(ongoing["epoch"])
        assert client.call(end, name=topic) == "ok"
    asked = served(node) - before
    assert asked["EndTxn"] == 3
    assert not asked["AddPartitionsToTxn"]
    assert not asked["AddOffsetsToTxn"]
    assert epochs == [epochs[0], epochs[0] + 1, epochs[0] + 2]
    for partition in (0, 1):
        read = client.call("read", topic=topic, level="read_committed", partition=partition)
        assert read == ["commit", "commit"]


@feature("admin: list transactions, describe producers")
def test_open_transactions_are_listed_and_producers_described(play: Play) -> None:
    play()


@feature("admin: fence producers")
def test_a_fenced_producer_cannot_commit(play: Play) -> None:
    play(error="ProducerFencedException")


# --- Streams


@pytest.fixture
def own_node(tmp_path: Path) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path / "data", **SETTINGS) as running:
        yield running


@feature("streams: exactly_once_v2")
def test_streams_counts_every_word_exactly_once_across_kills(
    own_node: NodeProcess, start_client: Any, tmp_path: Path
) -> None:
    """Every word's counts are 1, 2, 3 and so on: nothing is lost and nothing counted twice."""
    writer: ClientProcess = start_client(CLIENT_SCRIPT, own_node)
    for topic in ("lines", "counts"):
        writer.call("create_topic", topic=topic, partitions=2)

    def start_counting(state: str) -> ClientProcess:
        application: ClientProcess = start_client(CLIENT_SCRIPT, own_node)
        where: dict[str, Any] = {"source": "lines", "target": "counts", "state_dir": str(tmp_path / state)}
        application.call("start_word_count", application="word-count", **where)
        return application

    def wait_for_progress() -> None:
        end = writer.call("committed_end", topic="counts")
        wait_until(lambda: writer.call("committed_end", topic="counts") > end + 100, "100 more counts")

    def counted() -> list[str]:
        return [
            count
            for index in (0, 1)
            for count in writer.call("read", topic="counts", level="read_committed", partition=index)
        ]

    # Lines are written and words counted all the time, so each kill comes in the middle of something.
    first = start_counting("state-1")
    lines = [f"ebb tide{number}" for number in range(7)]
    writer.call("start_writing", topic="lines", lines=lines)
    wait_for_progress()
    own_node.kill()
    own_node.start()
    wait_for_progress()
    first.kill()
    # Its state is elsewhere, so all of it comes from the changelog.
    second = start_counting("state-2")
    wait_for_progress()
    written = writer.call("stop_writing")
    words = Counter(word for number in range(written) for word in lines[number % len(lines)].split())
    wait_until(lambda: len(counted()) >= words.total(), "everything is counted")
    assert sorted(counted()) == sorted(
        f"{word}={count}" for word, total in words.items() for count in range(1, total + 1)
    )
    second.kill()
    writer.kill()


# --- share groups


@feature("share groups: described, moved and deleted by an admin client")
def test_a_share_group_is_described_moved_and_deleted(
    client: ClientProcess, node: NodeProcess, topic: str
) -> None:
    with tidemill.connect(node.bootstrap_servers) as db:
        db.configure_share(topic, start="earliest")
        db.produce_many(topic, [f"v{number}" for number in range(10)])
    named: dict[str, Any] = {"group": topic, "topic": topic}
    client.call("share_join", name=topic, mode="explicit", **named)
    client.call("share_wait", name=topic, deliveries=10)
    seen = client.call("share_admin_sees", **named)
    assert (seen["state"], seen["members"], seen["assigned"]) == ("Stable", 1, 1)
    assert (seen["start"], seen["lag"]) == (10, 0)
    client.call("share_leave", name=topic)
    assert client.call("share_admin_moves", offset=4, **named) == [4, 6]
    client.call("share_join", name=topic, mode="explicit", **named)
    again = client.call("share_wait", name=topic, deliveries=6)
    assert sorted(value for value, _, _ in again) == [f"v{number}" for number in range(4, 10)]
    client.call("share_leave", name=topic)
    assert client.call("share_admin_deletes", **named) == "GroupIdNotFoundException"
