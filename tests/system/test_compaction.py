"""Compacted topics under load, with real clients in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from support.processes import ClientProcess, NodeProcess, wait_until
from support.stored import stored_batches
from tidemill.errors import StorageError
from tidemill.log.segments.segment_walk import BrokenBatch

StartClient = Callable[..., ClientProcess]

CONFIG = {
    "cleanup.policy": "compact",
    "internal.segment.bytes": "60000",
    "min.cleanable.dirty.ratio": "0.1",
    "max.compaction.lag.ms": "300",
}
READERS = ("read_with_confluent", "read_with_kafka_python", "read_with_aiokafka")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """A node that looks for something to compact all the time."""
    settings = {
        "compaction_check_interval_ms": 50,
        "offsets_topic_partitions": 1,
        "transactions_topic_partitions": 1,
    }
    with NodeProcess(tmp_path_factory.mktemp("node") / "data", **settings) as running:
        yield running


def is_compacted(node: NodeProcess, topic: str, records: int) -> bool:
    """Whether no more than so many records are left, markers not counted."""
    try:
        batches = stored_batches(node, topic)
    except (StorageError, BrokenBatch):
        return False  # Files came and went while they were looked at.
    return sum(header.record_count for header in batches if not header.is_control) <= records


def has_empty_batches(node: NodeProcess, topic: str) -> bool:
    """Whether compaction has been there."""
    try:
        return any(header.record_count == 0 for header in stored_batches(node, topic))
    except (StorageError, BrokenBatch):
        return False


def test_every_reader_at_any_time_ends_up_with_the_same_table(
    node: NodeProcess, start_client: StartClient, topic: str
) -> None:
    writers = [start_client("table", node) for _ in range(2)]
    readers: list[ClientProcess] = [start_client("table", node) for _ in READERS]
    writers[0].call("create", topic=topic, config=CONFIG)
    runs_before = node.metric("tidemill_compaction_runs_total")
    writers[0].begin("write_plain", topic=topic, name="plain", records=15_000, keys=40, seed=1, codec="lz4")
    writers[1].begin("write_in_transactions", topic=topic, name="txn", transactions=150, keys=20, seed=2)
    for _ in range(3):  # while it is written and compacted
        for reader, scenario in zip(readers, READERS, strict=True):
            reader.begin(scenario, topic=topic)
        for reader in readers:
            reader.finish()
    expected = writers[0].finish() | writers[1].finish()
    for reader, scenario in zip(readers, READERS, strict=True):
        assert reader.call(scenario, topic=topic) == expected, scenario
    assert node.metric("tidemill_compaction_runs_total") > runs_before + 3
    # When nothing is written any more, the last segment is compacted as well: nothing is left twice.
    wait_until(lambda: is_compacted(node, topic, 60), "the topic is compacted")
    for reader, scenario in zip(readers, READERS, strict=True):
        assert reader.call(scenario, topic=topic) == expected, scenario


@pytest.mark.parametrize("scenario", READERS)
def test_a_reader_comes_to_the_end_of_a_log_without_records(
    node: NodeProcess, start_client: StartClient, topic: str, scenario: str
) -> None:
    client = start_client("table", node)
    client.call("create", topic=topic, config={**CONFIG, "delete.retention.ms": "0"})
    client.call("write_plain", topic=topic, name="gone", records=300, keys=3, seed=3)
    client.call("delete_keys", topic=topic, name="gone", keys=3)
    wait_until(lambda: is_compacted(node, topic, 3), "the tombstones are compacted")
    # They go in the next compaction, for which something must be written: something that goes as well.
    client.call("abort_one", topic=topic)
    wait_until(lambda: is_compacted(node, topic, 0), "no record is left")
    assert client.call(scenario, topic=topic) == {}


def test_offsets_committed_in_transactions_survive_the_compaction_of_their_topic(
    node: NodeProcess, start_client: StartClient, topic: str
) -> None:
    client = start_client("table", node)
    client.call("create", topic=topic, config=CONFIG)
    client.call("write_plain", topic=topic, name="x", records=10, keys=3, seed=4)
    group = f"group-of-{topic}"
    expected = client.call("commit_offsets_in_transactions", topic=topic, group=group, rounds=40)
    for internal in ("__consumer_offsets", "__transaction_state"):
        client.call("alter", topic=internal, config={"max.compaction.lag.ms": "300"})
        wait_until(
            partial(has_empty_batches, node, internal),
            f"{internal} is compacted",
        )
    for stop in (node.stop, node.kill):
        stop()
        node.start()
        assert client.call("committed_offset", topic=topic, group=group) == expected
    assert client.call("commit_offsets_in_transactions", topic=topic, group=group, rounds=50) == 50
    assert client.call("committed_offset", topic=topic, group=group) == 50
