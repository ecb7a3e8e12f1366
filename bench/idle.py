"""Memory and processor time of an idle node."""

from __future__ import annotations

import subprocess
import sys
import time

from bench.context import Bench
from bench.processes import NodeProcess, cpu_seconds, memory_mb
from bench.raw import RawClient
from bench.report import Aim, Section
from bench.spread import number

__all__ = ("connections", "memory")

_WANTED_MB = 120


def memory(bench: Bench) -> Section:
    """Resident memory of an idle node."""
    section = Section(
        "Idle memory",
        ("node", "RSS MB", "ratio to a bare interpreter", "PSS MB", "idle CPU %"),
        note="From /proc/PID/smaps_rollup. PSS counts a page that several processes share only in part.",
    )
    bench.progress("memory: bare interpreter")
    interpreter = _interpreter_mb()
    with bench.node() as node:
        bench.progress("memory: no topics")
        resident, proportional, busy = _idle(bench, node)
        section.add(
            "no topics", number(resident), number(resident / interpreter), number(proportional), number(busy)
        )
        client = RawClient.of(node)
        bench.progress(f"memory: {bench.plan.idle_topics} topics")
        for topic_number in range(bench.plan.idle_topics):
            client.create_topic(f"idle-{topic_number}", 1)
        client.close()
        with_topics, proportional, busy = _idle(bench, node)
        section.add(
            f"{bench.plan.idle_topics} topics",
            number(with_topics),
            number(with_topics / interpreter),
            number(proportional),
            number(busy),
        )
    section.aims.append(
        Aim("idle memory (RSS)", f"< {_WANTED_MB} MB", f"{resident:.0f} MB", resident < _WANTED_MB)
    )
    return section


def _idle(bench: Bench, node: NodeProcess) -> tuple[float, float, float]:
    """(resident MB, proportional MB, percent of a core) over some idle seconds."""
    before, started = cpu_seconds(node.pid), time.perf_counter()
    time.sleep(bench.plan.idle_seconds)
    busy = (cpu_seconds(node.pid) - before) / (time.perf_counter() - started) * 100
    resident, proportional = memory_mb(node.pid)
    return resident, proportional, busy


def _interpreter_mb() -> float:
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        resident, _ = memory_mb(process.pid)
        process.communicate("\n")
    return resident


def connections(bench: Bench) -> Section:
    """Memory of connections that asked once and are silent since."""
    count = bench.plan.connections
    section = Section(
        "Idle connections",
        ("connections", "RSS MB", "ratio to no connections", "KB per connection", "idle CPU %"),
        note=f"Each has asked for ApiVersions once. CPU over {bench.plan.idle_seconds:g} s.",
    )
    with bench.node() as node:
        bench.progress("connections: none")
        resident, _, busy = _idle(bench, node)
        section.add("0", number(resident), 1, "", number(busy))
        bench.progress(f"connections: {count:,}")
        clients = [RawClient.of(node) for _ in range(count)]
        with_clients, _, busy = _idle(bench, node)
        section.add(
            f"{count:,}",
            number(with_clients),
            number(with_clients / resident),
            number((with_clients - resident) * 1000 / count),
            number(busy),
        )
        for client in clients:
            client.close()
    return section
