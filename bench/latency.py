"""How long a producer waits for its acknowledgement, at a fixed rate that the node can bear."""

from __future__ import annotations

from typing import Any

from bench.context import Bench
from bench.peers import MockCluster, synced_writes_ms
from bench.processes import run_json
from bench.raw import RawClient
from bench.report import Section
from bench.spread import Spread, percentile

__all__ = ("latency",)

_RECORD_BYTES = 1_000
_PERCENTS = (50, 99)
_NOTE = (
    "{rate:,} records of 1 KB per second to one partition, `linger.ms=0`; from when a record was due to "
    "its delivery report in Python. Beside it the same client against the mock cluster, which has no disk: "
    "what the client and the way to it cost. And one process that writes a record of the same size and calls "
    "fdatasync, at the same rate on the same disk, timed from the start of each write. On one node acks=1 "
    "and acks=all wait for the same flush: they differ only by chance."
)


class _Times:
    """Percentiles of several rounds."""

    def __init__(self) -> None:
        self._rounds: list[list[float]] = []

    def add(self, milliseconds: list[float]) -> None:
        self._rounds.append(milliseconds)

    def at(self, percent: int) -> Spread:
        return Spread(percentile(times, percent) for times in self._rounds)


def latency(bench: Bench) -> Section:
    plan = bench.plan
    section = Section(
        "Latency",
        (
            "acks, percentile",
            "node ms",
            "mock cluster ms",
            "ratio to the mock cluster",
            "bare write + fdatasync ms",
            "ratio to the bare sync",
        ),
        note=_NOTE.format(rate=plan.latency_rate),
    )
    for acks in ("1", "all"):
        bench.progress(f"latency: acks={acks}")
        ours, mock_times, bare = _measure(bench, acks)
        for percent in _PERCENTS:
            node_ms, mock_ms, bare_ms = ours.at(percent), mock_times.at(percent), bare.at(percent)
            section.add(
                f"acks={acks}, p{percent}",
                node_ms,
                mock_ms,
                node_ms.over(mock_ms),
                bare_ms,
                node_ms.over(bare_ms),
            )
    return section


def _measure(bench: Bench, acks: str) -> tuple[_Times, _Times, _Times]:
    plan = bench.plan
    ours, mock_times, bare = _Times(), _Times(), _Times()
    options: dict[str, Any] = {
        "topic": "latency",
        "record_bytes": _RECORD_BYTES,
        "acks": acks,
        "rate": plan.latency_rate,
        "seconds": plan.latency_seconds,
    }
    with bench.node() as node, MockCluster(bench.work) as mock:
        client = RawClient.of(node)
        client.create_topic("latency", 1)
        for _ in range(plan.latency_rounds):
            for servers, times in ((node.bootstrap_servers, ours), (mock.bootstrap_servers, mock_times)):
                times.add(
                    run_json(bench.work, "bench.load", "latency", servers=servers, **options)["milliseconds"]
                )
            bare.add(synced_writes_ms(bench.work, _RECORD_BYTES, plan.latency_rate, plan.latency_seconds))
    return ours, mock_times, bare
