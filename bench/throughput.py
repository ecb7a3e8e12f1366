"""Produce and consume at full speed."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

from bench.context import Bench
from bench.load import PARTITIONS_PER_TOPIC, partition_names
from bench.peers import MockCluster, disk_mb_per_second, touch_memory
from bench.processes import NodeProcess, cpu_seconds, run_json
from bench.raw import RawClient
from bench.report import Aim, Section
from bench.spread import Spread

__all__ = ("consume", "produce")

_PARTITION_COUNTS = (1, 16)
_AIM_BYTES = 1_000
_AIMS = {"1": 0.8, "all": 0.6}
_DISK_CHUNK_BYTES = 1_000_000

_PRODUCE_NOTE = (
    "Peer: the same client with the same configuration against librdkafka's mock cluster, which keeps a few "
    "megabytes in memory, checks no checksum and has no disk. 16 partitions are four topics of four, because "
    "four is how many the mock cluster makes; records go to the partitions in turn. The last row is one "
    "process that writes 1 MB and calls fdatasync, again and again. On one node acks=1 and acks=all wait for "
    "the same flush; the mock cluster waits for nothing with either."
)
_CONSUME_NOTE = (
    "Limit: one process sends the bytes of the same log files with sendfile through a loopback socket, "
    "another receives them and throws them away. The consumer makes a Python object of every record, so with "
    "small records its own CPU is the limit: 1,000 divided by the last column is about what it can take in, "
    "in MB/s. The log is in the page cache. How its records were acknowledged makes no difference to a "
    "reader: what it can see is on disk either way."
)


@dataclass(slots=True)
class _Rounds:
    """Measurements of one server and its clients, round by round."""

    mb_per_second: list[float] = field(default_factory=list)
    records_per_second: list[float] = field(default_factory=list)
    server_seconds_per_gb: list[float] = field(default_factory=list)
    client_seconds_per_gb: list[float] = field(default_factory=list)

    def run(self, bench: Bench, server_pid: int, job: str, **options: Any) -> None:
        before = cpu_seconds(server_pid)
        result = run_json(bench.work, "bench.load", job, **options)
        gigabytes = result["bytes"] / 1e9
        self.mb_per_second.append(result["bytes"] / 1e6 / result["seconds"])
        self.records_per_second.append(result["records"] / result["seconds"])
        self.server_seconds_per_gb.append((cpu_seconds(server_pid) - before) / gigabytes)
        self.client_seconds_per_gb.append(result["cpu_seconds"] / gigabytes)


def _size_name(record_bytes: int) -> str:
    return f"{record_bytes} B" if record_bytes < 1_000 else f"{record_bytes // 1_000} KB"


def _create_topics(node: NodeProcess, prefix: str, partitions: int) -> None:
    client = RawClient.of(node)
    for topic in sorted({topic for topic, _ in partition_names(prefix, partitions)}):
        client.create_topic(topic, PARTITIONS_PER_TOPIC)
    client.close()


def produce(bench: Bench) -> Section:
    """The same client against a node and against librdkafka's mock cluster, in turns."""
    section = Section(
        "Produce",
        (
            "records, acks, partitions",
            "MB/s",
            "records/s",
            "ratio to the mock cluster",
            "mock MB/s",
            "node CPU s/GB",
            "mock CPU s/GB",
            "client CPU s/GB",
        ),
        note=_PRODUCE_NOTE,
    )
    aim_ratios: dict[str, list[float]] = {"1": [], "all": []}
    for record_bytes, acks, partitions in product(bench.plan.record_bytes, ("1", "all"), _PARTITION_COUNTS):
        name = f"{_size_name(record_bytes)}, acks={acks}, {partitions}"
        bench.progress(f"produce: {name}")
        ours, theirs = _produce_in_turns(bench, record_bytes, acks, partitions)
        ratio = Spread(ours.mb_per_second).over(Spread(theirs.mb_per_second))
        if record_bytes == _AIM_BYTES:
            aim_ratios[acks].append(ratio.median)
        section.add(
            name,
            Spread(ours.mb_per_second),
            f"{Spread(ours.records_per_second).median:,.0f}",
            ratio,
            f"{Spread(theirs.mb_per_second).median:,.0f}",
            Spread(ours.server_seconds_per_gb),
            f"{Spread(theirs.server_seconds_per_gb).median:.2f}",
            f"{Spread(ours.client_seconds_per_gb).median:.2f}",
        )
    bench.progress("produce: the disk alone")
    section.add("the disk alone, 1 MB writes", _disk_alone(bench), *[""] * 6)
    for acks, wanted in _AIMS.items():
        measured = " and ".join(f"{ratio:.2f}" for ratio in aim_ratios[acks])
        section.aims.append(
            Aim(
                f"produce, 1 KB, acks={acks}: ratio to the mock cluster, with 1 and with 16 partitions",
                f"≥ {wanted}",
                measured,
                min(aim_ratios[acks]) >= wanted,
            )
        )
    return section


def _produce_in_turns(bench: Bench, record_bytes: int, acks: str, partitions: int) -> tuple[_Rounds, _Rounds]:
    ours, theirs = _Rounds(), _Rounds()
    prefix = f"produce-{acks}-{partitions}"
    options: dict[str, Any] = {
        "prefix": prefix,
        "partitions": partitions,
        "record_bytes": record_bytes,
        "acks": acks,
        "seconds": bench.plan.produce_seconds,
    }
    with bench.node() as node, MockCluster(bench.work) as mock:
        _create_topics(node, prefix, partitions)
        for _ in range(bench.plan.rounds):
            touch_memory(bench.work, bench.plan.touched_bytes)
            ours.run(bench, node.pid, "produce", servers=node.bootstrap_servers, **options)
            theirs.run(bench, mock.pid, "produce", servers=mock.bootstrap_servers, **options)
    return ours, theirs


def consume(bench: Bench) -> Section:
    """A consumer, and beside it the same bytes through a bare socket, in turns."""
    section = Section(
        "Consume",
        (
            "records, partitions",
            "MB/s",
            "records/s",
            "ratio to a bare socket",
            "bare socket MB/s",
            "node CPU s/GB",
            "bare sender CPU s/GB",
            "client CPU s/GB",
        ),
        note=_CONSUME_NOTE,
    )
    for record_bytes, partitions in product(bench.plan.record_bytes, _PARTITION_COUNTS):
        name = f"{_size_name(record_bytes)}, {partitions}"
        bench.progress(f"consume: {name}")
        _consume_one(bench, section, name, record_bytes, partitions)
    return section


def _consume_one(bench: Bench, section: Section, name: str, record_bytes: int, partitions: int) -> None:
    ours, limit, sender = _Rounds(), [], []
    read: dict[str, Any] = {"prefix": "consume", "partitions": partitions, "record_bytes": record_bytes}
    write = {"acks": "1", "seconds": bench.plan.produce_seconds}
    with bench.node() as node:
        _create_topics(node, "consume", partitions)
        run_json(bench.work, "bench.load", "produce", servers=node.bootstrap_servers, **read, **write)
        files = sorted(str(path) for path in node.data_dir.glob("logs/consume-*/*/*.log"))
        for _ in range(bench.plan.rounds):
            ours.run(bench, node.pid, "consume", servers=node.bootstrap_servers, **read)
            streamed = run_json(bench.work, "bench.peers", "stream", files=files)
            limit.append(streamed["bytes"] / 1e6 / streamed["seconds"])
            sender.append(streamed["sender_cpu_seconds"] / streamed["bytes"] * 1e9)
    section.add(
        name,
        Spread(ours.mb_per_second),
        f"{Spread(ours.records_per_second).median:,.0f}",
        Spread(ours.mb_per_second).over(Spread(limit)),
        f"{Spread(limit).median:,.0f}",
        Spread(ours.server_seconds_per_gb),
        f"{Spread(sender).median:.2f}",
        f"{Spread(ours.client_seconds_per_gb).median:.2f}",
    )


def _disk_alone(bench: Bench) -> Spread:
    seconds = bench.plan.produce_seconds
    return Spread(
        disk_mb_per_second(bench.work, _DISK_CHUNK_BYTES, seconds) for _ in range(bench.plan.rounds)
    )
