"""The time from the start of a node to its first acknowledged record: empty, and with many partitions."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bench.context import Bench
from bench.peers import bare_import_seconds
from bench.processes import NodeProcess, memory_mb, node_modules
from bench.raw import RawClient, batch_of
from bench.report import Aim, Section
from bench.spread import Spread, number

__all__ = ("partitions", "start")

_WANTED_RATIO = 3.0
_WRITTEN_ONE_IN = 10


def start(bench: Bench) -> Section:
    """An empty node against an interpreter that imports the same libraries."""
    bench.progress("start: which libraries a node loads")
    with bench.data_dir() as path:
        libraries = [name for name in node_modules(bench.work, path) if _is_library(name)]
    bare, listening, acknowledged = [], [], []
    bare_import_seconds(bench.work, libraries)  # once without counting, so that compiled modules are there
    for turn in range(bench.plan.starts):
        bench.progress(f"start: {turn + 1} of {bench.plan.starts}")
        bare.append(bare_import_seconds(bench.work, libraries) * 1000)
        with bench.data_dir() as path, NodeProcess(bench.work, path) as node:
            client = RawClient.of(node)
            listening.append((time.perf_counter() - node.spawned_at) * 1000)
            acknowledged.append(_first_acknowledged(node, client) * 1000)
    ratio = Spread(acknowledged).over(Spread(bare))
    section = Section(
        "Start",
        ("from the start of the process to …", "ms", "ratio to the bare import"),
        note="Limit: an interpreter that imports the same third-party libraries, module by module, and ends. "
        "The first record is sent with acks=all by a client that waits for the port, to a topic that is "
        "created for it.",
    )
    section.add("bare import done", Spread(bare), 1)
    section.add("node takes connections", Spread(listening), Spread(listening).over(Spread(bare)))
    section.add("first record acknowledged", Spread(acknowledged), ratio)
    section.aims.append(
        Aim(
            "start to the first acknowledged record, ratio to a bare import of the same libraries",
            f"≤ {_WANTED_RATIO:g}",
            f"{ratio.median:.2f}",
            ratio.median <= _WANTED_RATIO,
        )
    )
    return section


def _is_library(module: str) -> bool:
    top = module.partition(".")[0]
    return top not in sys.stdlib_module_names and top not in (
        "tidemill",
        "bench",
        "hypothesis",
        "__mp_main__",
    )


def _first_acknowledged(node: NodeProcess, client: RawClient) -> float:
    """Seconds from the spawn to the first acknowledged record."""
    client.auto_create("first")
    client.produce("first", range(1), batch_of(100, 1))
    seconds = time.perf_counter() - node.spawned_at
    client.close()
    return seconds


def partitions(bench: Bench) -> Section:
    """Start with many partitions, after an orderly stop and after kill -9."""
    section = Section(
        "Start with many partitions",
        (
            "partitions, last stop",
            "first record acknowledged s",
            "ratio to an empty node",
            "RSS MB",
            "PSS MB",
        ),
        note=f"Topics of {bench.plan.partitions_per_topic} partitions; every {_WRITTEN_ONE_IN}th topic was "
        "written to, in all its partitions, before the stop. A partition's files are opened at its first "
        "use; after an unclean stop, every partition that was ever used is checked first.",
    )
    bench.progress("partitions: empty node")
    starts = []
    for _ in range(bench.plan.rounds):
        with bench.data_dir() as path, NodeProcess(bench.work, path) as node:
            starts.append(_measure(node))
    empty = Spread(seconds for seconds, *_ in starts).median
    section.add("0, never started", number(empty), 1, *map(number, starts[-1][1:]))
    for count in bench.plan.partition_counts:
        with bench.data_dir() as path:
            _create(bench, path, count)
            bench.progress(f"partitions: start with {count:,} after an orderly stop")
            with NodeProcess(bench.work, path) as node:
                orderly = _measure(node)
                # Written again, so that the next start has something to check.
                _write(bench, node, count)
                node.kill()
            bench.progress(f"partitions: start with {count:,} after kill -9")
            with NodeProcess(bench.work, path) as node:
                killed = _measure(node)
        for last_stop, (seconds, *memory) in (("orderly", orderly), ("kill -9", killed)):
            section.add(
                f"{count:,}, {last_stop}", number(seconds), number(seconds / empty), *map(number, memory)
            )
    return section


def _create(bench: Bench, path: Path, count: int) -> None:
    bench.progress(f"partitions: creating {count:,}")
    with NodeProcess(bench.work, path) as node:
        client = RawClient.of(node)
        for number_of_topic in range(count // bench.plan.partitions_per_topic):
            client.create_topic(f"many-{number_of_topic}", bench.plan.partitions_per_topic)
        client.close()
        _write(bench, node, count)


def _write(bench: Bench, node: NodeProcess, count: int) -> None:
    client = RawClient.of(node)
    batch = batch_of(1_000, 10)
    for number_of_topic in range(0, count // bench.plan.partitions_per_topic, _WRITTEN_ONE_IN):
        client.produce(f"many-{number_of_topic}", range(bench.plan.partitions_per_topic), batch)
    client.close()


def _measure(node: NodeProcess) -> tuple[float, float, float]:
    """(seconds to the first acknowledged record, resident MB, proportional MB)."""
    seconds = _first_acknowledged(node, RawClient.of(node))
    return seconds, *memory_mb(node.pid)
