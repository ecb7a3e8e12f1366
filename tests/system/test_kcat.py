"""kcat (librdkafka's command line) against a node; every call is a process of its own."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from support.processes import NodeProcess
from support.stored import stored_codecs

CLIENT = "kcat"

pytestmark = pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is missing: apt-get install kcat")
feature = pytest.mark.feature

_DEADLINE_SECONDS = 120

Kcat = Callable[..., str]


def run_kcat(node: NodeProcess, *arguments: str, send: str = "", succeeds: bool = True) -> str:
    """What kcat prints: its output, or if it has to fail, its errors."""
    done = subprocess.run(
        ["kcat", "-b", node.bootstrap_servers, *arguments],
        input=send,
        text=True,
        capture_output=True,
        timeout=_DEADLINE_SECONDS,
    )
    assert (done.returncode == 0) == succeeds, done.stderr
    return done.stdout if succeeds else done.stderr


@pytest.fixture
def kcat(node: NodeProcess) -> Kcat:
    return lambda *arguments, **options: run_kcat(node, *arguments, **options)


def read_all(kcat: Kcat, topic: str, *arguments: str) -> list[dict[str, Any]]:
    """Every record to the end, as kcat's JSON."""
    output = kcat("-C", "-t", topic, "-e", "-q", "-J", *arguments)
    return [json.loads(line) for line in output.splitlines()]


@feature("produce: every codec", "produce: acks 0, 1, all", "consume: from the earliest record")
@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_codec_with_every_acks(kcat: Kcat, node: NodeProcess, topic: str, codec: str) -> None:
    sent: list[str] = []
    # The acknowledged ones first: a client that waits for nothing may be gone before its topic is there.
    for acks in ("all", "1", "0"):
        lines = [f"{codec} {acks} {number} {'ebb and flow ' * 20}" for number in range(50)]
        settings = ["-X", f"acks={acks}", "-X", f"compression.type={codec}", "-X", "linger.ms=50"]
        kcat("-P", "-t", topic, "-p", "0", *settings, send="\n".join(lines))
        sent += lines
        count = str(len(sent))
        # By count, not to the end: without acknowledgements kcat is done before the node is.
        records = kcat("-C", "-t", topic, "-o", "beginning", "-c", count, "-q", "-f", "%s\n").splitlines()
        assert records == sent
    assert stored_codecs(node, topic) == {codec}


@feature("produce: idempotent")
def test_idempotent_producer_writes_everything_once_and_in_order(kcat: Kcat, topic: str) -> None:
    lines = [f"v{number}" for number in range(2_000)]
    settings = ["-X", "enable.idempotence=true", "-X", "batch.num.messages=50"]
    kcat("-P", "-t", topic, "-p", "0", *settings, send="\n".join(lines))
    assert [record["payload"] for record in read_all(kcat, topic)] == lines


@feature("records: keys, headers, null values, timestamps")
def test_keys_headers_null_values_and_timestamps_survive(kcat: Kcat, topic: str) -> None:
    before_ms = time.time_ns() // 1_000_000
    kcat("-P", "-t", topic, "-K:", "-H", "a=1", "-H", "b=2", send="k:v\n")
    kcat("-P", "-t", topic, "-K:", "-Z", send="k:\n")
    first, tombstone = read_all(kcat, topic)
    assert (first["key"], first["payload"], first["headers"]) == ("k", "v", ["a", "1", "b", "2"])
    assert (tombstone["key"], tombstone["payload"]) == ("k", None)
    assert first["tstype"] == "create"
    assert before_ms <= first["ts"] <= time.time_ns() // 1_000_000


@feature("produce: large messages", "produce: too large a message is refused")
def test_large_messages_up_to_the_topics_limit(kcat: Kcat, topic: str, tmp_path: Path) -> None:
    sizes = {"fits": 1_000_000, "too-large": 1_100_000}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(b"x" * size)
    settings = ["-P", "-t", topic, "-X", "message.max.bytes=10000000"]
    kcat(*settings, str(tmp_path / "fits"))
    assert "Message size too large" in kcat(*settings, str(tmp_path / "too-large"), succeeds=False)
    assert [len(record["payload"]) for record in read_all(kcat, topic)] == [sizes["fits"]]


@feature("consume: from the end", "consume: from an offset")
def test_reading_from_the_end_and_an_offset(kcat: Kcat, topic: str) -> None:
    kcat("-P", "-t", topic, send="\n".join(f"v{number}" for number in range(10)))
    assert [record["payload"] for record in read_all(kcat, topic, "-o", "7")] == ["v7", "v8", "v9"]
    assert [record["payload"] for record in read_all(kcat, topic, "-o", "-2")] == ["v8", "v9"]
    assert read_all(kcat, topic, "-o", "end") == []


@feature("consume: from a time", "admin: list offsets")
def test_offsets_are_found_by_time(kcat: Kcat, topic: str) -> None:
    for number in range(3):
        kcat("-P", "-t", topic, send=f"v{number}")
    times = [record["ts"] for record in read_all(kcat, topic)]
    assert times == sorted(times)
    assert [record["payload"] for record in read_all(kcat, topic, "-o", f"s@{times[1]}")][-2:] == ["v1", "v2"]
    assert [record["payload"] for record in read_all(kcat, topic, "-o", "beginning", "-o", f"e@{times[2]}")][
        :1
    ] == ["v0"]
    assert kcat("-Q", "-t", f"{topic}:0:{times[2]}").strip().endswith("offset 2")
    assert kcat("-Q", "-t", f"{topic}:0:-2").strip().endswith("offset 0")
    assert kcat("-Q", "-t", f"{topic}:0:-1").strip().endswith("offset 3")


@feature("admin: describe cluster", "topics: created by use")
def test_metadata_lists_brokers_and_topics(kcat: Kcat, node: NodeProcess, topic: str) -> None:
    kcat("-P", "-t", topic, send="v")
    listing = json.loads(kcat("-L", "-J"))
    assert listing["brokers"] == [{"id": 1, "name": node.bootstrap_servers}]
    assert listing["controllerid"] == 1
    (found,) = [entry for entry in listing["topics"] if entry["topic"] == topic]
    assert [(place["partition"], place["leader"]) for place in found["partitions"]] == [(0, 1)]


@feature("topics: unknown topic error")
def test_a_missing_topic_is_an_error(strict_node: NodeProcess, topic: str) -> None:
    errors = run_kcat(strict_node, "-C", "-t", topic, "-e", succeeds=False)
    assert "Unknown topic or partition" in errors


class GroupReader:
    """kcat as a member of a group, printing partition and value of every record at once."""

    def __init__(self, node: NodeProcess, group: str, topic: str, *settings: str) -> None:
        config = [
            "auto.offset.reset=earliest",
            "session.timeout.ms=6000",
            "heartbeat.interval.ms=200",
            *settings,
        ]
        options = [part for setting in config for part in ("-X", setting)]
        self.process = subprocess.Popen(
            ["kcat", "-b", node.bootstrap_servers, *options, "-u", "-f", "%p %s\n", "-G", group, topic],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    @property
    def errors(self) -> IO[str]:
        assert self.process.stderr is not None
        return self.process.stderr

    def take(self, count: int) -> list[str]:
        assert self.process.stdout is not None
        return [self.process.stdout.readline().strip() for _ in range(count)]

    def wait_for_rebalance(self, marker: str) -> str:
        """The line in which kcat tells what it was assigned."""
        for line in self.errors:
            if "rebalanced" in line and marker in line:
                return line
        raise AssertionError("kcat ended")

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=_DEADLINE_SECONDS)


@pytest.fixture
def group_reader(node: NodeProcess) -> Iterator[Callable[..., GroupReader]]:
    started: list[GroupReader] = []

    def start(*arguments: str) -> GroupReader:
        started.append(GroupReader(node, *arguments))
        return started[-1]

    yield start
    for reader in started:
        if reader.process.poll() is None:
            reader.process.kill()
        reader.process.communicate()


@feature("groups: members share partitions", "groups: rebalance when a member leaves")
def test_members_share_partitions_and_take_over_when_one_leaves(
    kcat: Kcat, node: NodeProcess, group_reader: Callable[..., GroupReader], topic: str, start_client: Any
) -> None:
    start_client("confluent", node).call("create_topic", topic=topic, partitions=2)
    first = group_reader(topic, topic)
    assert f"{topic} [0], {topic} [1]" in first.wait_for_rebalance("assigned")
    second = group_reader(topic, topic)
    second.wait_for_rebalance("assigned")
    first.wait_for_rebalance("assigned")
    for partition in ("0", "1"):
        kcat("-P", "-t", topic, "-p", partition, send=f"to{partition}")
    assert sorted(first.take(1) + second.take(1)) == ["0 to0", "1 to1"]
    second.close()
    assert f"{topic} [0], {topic} [1]" in first.wait_for_rebalance("assigned")


@feature("groups: commit and fetch offsets")
def test_a_group_goes_on_where_it_left_off(
    kcat: Kcat, group_reader: Callable[..., GroupReader], topic: str
) -> None:
    kcat("-P", "-t", topic, send="one\ntwo")
    first = group_reader(topic, topic)
    assert first.take(2) == ["0 one", "0 two"]
    first.close()
    kcat("-P", "-t", topic, send="three")
    assert group_reader(topic, topic).take(1) == ["0 three"]


@feature("topic config: recompression")
@pytest.mark.parametrize("codec", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_batches_are_stored_with_the_topics_codec(
    kcat: Kcat, node: NodeProcess, topic: str, codec: str, start_client: Any
) -> None:
    start_client("confluent", node).call("create_with", topic=topic, compression_type=codec)
    lines = [f"{number} {'high water ' * 30}" for number in range(100)]
    for sent_as in ("gzip", "none"):
        settings = ["-X", f"compression.type={sent_as}", "-X", "linger.ms=100"]
        kcat("-P", "-t", topic, *settings, send="\n".join(lines))
    assert [record["payload"] for record in read_all(kcat, topic, "-X", "check.crcs=true")] == lines * 2
    assert stored_codecs(node, topic) == {"none" if codec == "uncompressed" else codec}


@feature("topic config: append time")
def test_the_append_time_is_shown(kcat: Kcat, node: NodeProcess, topic: str, start_client: Any) -> None:
    start_client("confluent", node).call("create_with", topic=topic, message_timestamp_type="LogAppendTime")
    kcat("-P", "-t", topic, send="v")
    (record,) = read_all(kcat, topic)
    assert record["tstype"] == "logappend"
