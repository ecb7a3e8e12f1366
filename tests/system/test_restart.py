"""What a node still knows after it was stopped, or killed, and started again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.processes import ClientProcess, NodeProcess
from support.raw import RawClient, batch_of
from support.stored import stored_batches
from tidemill.errors import ErrorCode

Restart = Callable[[NodeProcess], None]


@pytest.fixture(scope="module")
def client(node: NodeProcess, start_shared_client: Any) -> ClientProcess:
    started: ClientProcess = start_shared_client("confluent", node)
    return started


@pytest.fixture
def own_node(tmp_path: Path) -> Iterator[NodeProcess]:
    """A node that the test may damage."""
    with NodeProcess(tmp_path / "data") as running:
        yield running


def stop_and_start(node: NodeProcess) -> None:
    node.stop()
    node.start()


def kill_and_start(node: NodeProcess) -> None:
    node.kill()
    node.start()


both_ways = pytest.mark.parametrize("restart", [stop_and_start, kill_and_start])


def texts(start: int, end: int) -> list[str]:
    return [f"v{number}" for number in range(start, end)]


def values(records: list[list[Any]]) -> list[str]:
    return [value for _, _, value in records]


@both_ways
def test_topics_configs_records_and_committed_offsets_are_kept(
    node: NodeProcess, client: ClientProcess, topic: str, restart: Restart
) -> None:
    gone, group = f"{topic}-gone", f"{topic}-readers"
    client.call("create_with", topic=topic, partitions=3, retention_ms=123_456_789)
    client.call("create_with", topic=gone)
    client.call("write", topic=topic, texts=texts(0, 100))
    client.call("write", topic=gone, texts=["gone"])
    client.call("commit_offset", group=group, topic=topic, offset=42)
    client.call("delete_topic", topic=gone)
    with RawClient(node.address) as raw:
        before = raw.request("Metadata", 12, {"topics": None})
    restart(node)
    with RawClient(node.address) as raw:
        after = raw.request("Metadata", 12, {"topics": None})
    assert after.cluster_id == before.cluster_id
    assert {found.name: found.topic_id for found in after.topics} == {
        found.name: found.topic_id for found in before.topics
    }
    assert gone not in {found.name for found in after.topics}
    assert {found.name: len(found.partitions) for found in after.topics}[topic] == 3
    assert client.call("topic_config", topic=topic, name="retention.ms") == "123456789"
    assert values(client.call("read_back", topic=topic, count=100)) == texts(0, 100)
    assert client.call("committed_offset", group=group, topic=topic) == 42
    assert group in client.call("groups")
    assert client.call("write", topic=topic, texts=["next"]) == [100]


def test_a_topic_that_is_created_again_has_none_of_the_old_records(
    node: NodeProcess, client: ClientProcess, topic: str
) -> None:
    client.call("create_with", topic=topic)
    client.call("write", topic=topic, texts=["old"])
    client.call("delete_topic", topic=topic)
    kill_and_start(node)
    client.call("create_with", topic=topic)
    assert client.call("write", topic=topic, texts=["new"]) == [0]
    kill_and_start(node)
    assert values(client.call("read_back", topic=topic, count=1)) == ["new"]


@both_ways
def test_an_idempotent_producer_goes_on_without_loss_or_duplicates(
    node: NodeProcess, client: ClientProcess, topic: str, restart: Restart
) -> None:
    client.call("create_with", topic=topic)
    client.call("producer_open", name=topic)
    for number in range(3):
        # The node goes down in the middle of what was sent; the rest is sent while it is down or starting.
        client.call(
            "producer_send", name=topic, topic=topic, texts=texts(number * 2_000, number * 2_000 + 1_500)
        )
        client.begin(
            "producer_send",
            name=topic,
            topic=topic,
            texts=texts(number * 2_000 + 1_500, number * 2_000 + 2_000),
        )
        restart(node)
        client.finish()
    reports = client.call("producer_flush", name=topic)
    assert reports == [None] * 6_000
    assert values(client.call("read_back", topic=topic, count=6_000)) == texts(0, 6_000)
    with RawClient(node.address) as raw:
        assert raw.fetch(topic).high_watermark == 6_000


@both_ways
def test_a_batch_that_is_sent_again_after_the_restart_is_recognised(
    node: NodeProcess, topic: str, restart: Restart
) -> None:
    with RawClient(node.address) as raw:
        raw.request("Metadata", 12, {"topics": [{"name": topic}], "allow_auto_topic_creation": True})
        producer = raw.request("InitProducerId", 4, {"transaction_timeout": 60_000})
        identity = {"producer_id": producer.producer_id, "producer_epoch": producer.producer_epoch}
        batches = [batch_of(b"v", **identity, base_sequence=number) for number in range(7)]
        for number, batch in enumerate(batches[:6]):
            assert raw.produce(topic, batch).base_offset == number
    restart(node)
    with RawClient(node.address) as raw:
        for number in (1, 2, 3, 4, 5, 6):
            answer = raw.produce(topic, batches[number])
            assert (answer.error_code, answer.base_offset) == (ErrorCode.none, number)
        assert raw.fetch(topic).high_watermark == 7


@both_ways
def test_a_group_member_goes_on_reading(
    node: NodeProcess, client: ClientProcess, topic: str, restart: Restart
) -> None:
    client.call("create_with", topic=topic)
    client.call("member_join", name=topic, group=topic, topic=topic, session_timeout_ms=30_000)
    client.call("write", topic=topic, texts=texts(0, 10))
    client.call("member_wait", name=topic, partitions=1, values=10)
    restart(node)
    client.call("write", topic=topic, texts=texts(10, 20))
    assert sorted(set(client.call("member_wait", name=topic, values=20)["values"])) == sorted(texts(0, 20))
    client.call("member_leave", name=topic)


def test_only_an_unclean_stop_starts_a_new_leader_epoch(
    node: NodeProcess, client: ClientProcess, topic: str
) -> None:
    client.call("create_with", topic=topic)
    client.call("write", topic=topic, texts=["a"])
    stop_and_start(node)
    client.call("write", topic=topic, texts=["b"])
    kill_and_start(node)
    client.call("write", topic=topic, texts=["c"])
    kill_and_start(node)
    client.call("write", topic=topic, texts=["d"])
    epochs = [epoch for _, epoch, _ in client.call("read_back", topic=topic, count=4)]
    first = epochs[0]
    assert epochs == [first, first, first + 1, first + 2]
    assert [batch.leader_epoch for batch in stored_batches(node, topic)] == epochs
    with RawClient(node.address) as raw:
        found = [epoch_end(raw, topic, epoch) for epoch in (first, first + 1, first + 2)]
    assert found == [(first, 2), (first + 1, 3), (first + 2, 4)]


def epoch_end(raw: RawClient, topic: str, epoch: int) -> tuple[int, int]:
    wanted = {
        "topic": topic,
        "partitions": [{"partition": 0, "current_leader_epoch": -1, "leader_epoch": epoch}],
    }
    answer = raw.request("OffsetForLeaderEpoch", 4, {"replica_id": -1, "topics": [wanted]})
    partition = answer.topics[0].partitions[0]
    assert partition.error_code == ErrorCode.none
    return partition.leader_epoch, partition.end_offset


@pytest.mark.parametrize("whole_batch_first", [False, True])
def test_a_torn_tail_is_cut_kept_and_reported(
    node: NodeProcess, client: ClientProcess, topic: str, whole_batch_first: bool
) -> None:
    client.call("create_with", topic=topic)
    client.call("write", topic=topic, texts=texts(0, 50))
    node.kill()
    (segment,) = node.partition_dir(topic).glob("*.log")
    size = segment.stat().st_size
    # A batch that is whole but carries the wrong offset was not written by this log: it goes, too.
    garbage = (
        batch_of(b"stray") if whole_batch_first else b""
    ) + b"\x07 torn in the middle of a write \x08" * 20
    with segment.open("ab") as file:
        file.write(garbage)
    node.start()
    (kept,) = node.partition_dir(topic).glob("*.cut-*")
    assert kept.name == f"{segment.name}.cut-{size}"
    assert kept.read_bytes() == garbage
    assert segment.stat().st_size == size
    assert f"cut {len(garbage)} bytes that were never durable at byte {size}" in node.log_text()
    assert node.readiness() == {"ready": True, "problems": [], "problem_kinds": []}
    assert values(client.call("read_back", topic=topic, count=50)) == texts(0, 50)
    assert client.call("write", topic=topic, texts=["next"]) == [50]
    stop_and_start(node)
    assert values(client.call("read_back", topic=topic, count=51)) == [*texts(0, 50), "next"]


def test_damage_below_the_recovery_point_stops_that_partition_only(
    own_node: NodeProcess, start_client: Any
) -> None:
    node, client = own_node, start_client("confluent", own_node)
    for topic in ("damaged", "sound"):
        client.call("create_with", topic=topic)
        client.call("write", topic=topic, texts=texts(0, 50))
    node.kill()
    (segment,) = node.partition_dir("damaged").glob("*.log")
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    node.start()
    assert segment.read_bytes() == content, "corruption must be left as it was found"
    readiness = node.readiness()
    assert readiness["ready"] is True
    (problem,) = readiness["problems"]
    assert problem.startswith("damaged-0 is stopped: ")
    assert segment.name in problem
    assert "tidemill log repair" in problem
    with RawClient(node.address) as raw:
        assert raw.produce("damaged", batch_of(b"v")).error_code == ErrorCode.kafka_storage_error
        assert raw.fetch("damaged").error_code == ErrorCode.kafka_storage_error
        assert raw.produce("sound", batch_of(b"v50")).error_code == ErrorCode.none
    assert values(client.call("read_back", topic="sound", count=51)) == texts(0, 51)
    stop_and_start(node)
    assert node.readiness()["problems"] == [problem], "a restart must not make it look well"


def flip_a_bit(segment: Path, position: int) -> None:
    content = bytearray(segment.read_bytes())
    content[position] ^= 1
    segment.write_bytes(content)


def test_damage_found_by_a_reader_is_told_to_its_application_and_the_rest_is_served(
    tmp_path: Path, start_client: Any
) -> None:
    with NodeProcess(tmp_path / "data", offsets_topic_partitions=1) as node:
        client = start_client("confluent", node)
        client.call("create_with", topic="t")
        for number in range(4):
            client.call("write", topic="t", texts=[f"v{number}"])
        client.call("commit_offset", group="g", topic="t", offset=3)
        node.stop()
        (segment,) = node.partition_dir("t").glob("*.log")
        size = segment.stat().st_size
        flip_a_bit(segment, size // 2 + 66)
        (offsets,) = node.partition_dir("__consumer_offsets").glob("*.log")
        flip_a_bit(offsets, 80)
        node.start()
        assert client.call("read_up_to_an_error", topic="t") == [["v0", "v1"], "INVALID_MSG"]
        with RawClient(node.address) as raw:
            assert raw.fetch("t", offset=3).error_code == ErrorCode.none
        assert client.call("error_of_a_member", topic="t", group="g") == "UNKNOWN"
        coordinator, log = node.readiness()["problems"]
        assert coordinator.startswith("__consumer_offsets-0 is damaged")
        assert offsets.name in coordinator
        assert log.startswith("t-0: offset 2 is damaged")
        assert f"{segment.name} at byte {size // 2}" in log


def test_a_missing_segment_stops_that_partition_only(own_node: NodeProcess, start_client: Any) -> None:
    node, client = own_node, start_client("confluent", own_node)
    client.call("create_with", topic="damaged", **{"internal.segment.bytes": 500})
    client.call("create_with", topic="sound")
    for number in range(5):
        client.call("write", topic="damaged", texts=[f"v{number}" + "x" * 400])
    client.call("write", topic="sound", texts=["v"])
    node.kill()
    segments = sorted(node.partition_dir("damaged").glob("*.log"))
    assert len(segments) == 5
    segments[2].unlink()
    node.start()
    (problem,) = node.readiness()["problems"]
    assert problem.startswith("damaged-0 is stopped: ")
    assert values(client.call("read_back", topic="sound", count=1)) == ["v"]
