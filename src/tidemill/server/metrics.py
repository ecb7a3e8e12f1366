"""Counters of a node, and their text form for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tidemill.replication.compactor import CompactionCounts
from tidemill.wire.apis import APIS

__all__ = ("Metric", "RequestMetrics", "compaction_metrics", "render_prometheus")


@dataclass(slots=True)
class RequestMetrics:
    """What the server counts while it works; everything else is read off when asked for."""

    requests: dict[int, int] = field(default_factory=dict)
    failures: int = 0
    connections_refused: int = 0
    connections_closed: int = 0

    def count(self, api_key: int) -> None:
        self.requests[api_key] = self.requests.get(api_key, 0) + 1

    def collect(self) -> Iterator[Metric]:
        for key, count in sorted(self.requests.items()):
            yield Metric(
                "tidemill_requests_total", "counter", "Requests by API.", count, (("api", APIS[key].name),)
            )
        yield Metric(
            "tidemill_request_failures_total", "counter", "Requests that failed by a bug.", self.failures
        )
        yield Metric(
            "tidemill_connections_refused_total",
            "counter",
            "Connections over the limit.",
            self.connections_refused,
        )
        yield Metric(
            "tidemill_connections_closed_total",
            "counter",
            "Connections closed for what their clients sent, or did not send or read in time.",
            self.connections_closed,
        )


class Metric(NamedTuple):
    """One sample."""

    name: str
    kind: str
    help: str
    value: float
    labels: tuple[tuple[str, str], ...] = ()


def compaction_metrics(counts: CompactionCounts) -> Iterator[Metric]:
    """What compaction has done since the start."""
    for name, kind, text, value in (
        ("runs_total", "counter", "Compactions of a partition.", counts.runs),
        ("given_up_total", "counter", "Compactions given up, to be tried again.", counts.runs_given_up),
        ("read_bytes_total", "counter", "Bytes read for compaction.", counts.bytes_in),
        ("written_bytes_total", "counter", "Bytes written by compaction.", counts.bytes_out),
        ("records_total", "counter", "Records looked at by compaction.", counts.records_in),
        ("records_kept_total", "counter", "Records that compaction left in place.", counts.records_kept),
        ("seconds_total", "counter", "Time spent in compaction.", counts.seconds),
        ("last_run_timestamp_ms", "gauge", "When the last compaction began.", counts.last_run_ms),
        ("last_ratio", "gauge", "Bytes that the last compaction left, of each byte.", counts.last_ratio),
        ("damaged_partitions", "gauge", "Partitions that cannot be compacted.", len(counts.damaged)),
    ):
        yield Metric(f"tidemill_compaction_{name}", kind, text, value)


def render_prometheus(samples: Iterator[Metric]) -> str:
    """The text format that Prometheus scrapes. Samples of one name come together.

    >>> print(render_prometheus(iter([Metric("up", "gauge", "Whether it runs.", 1)])), end="")
    # HELP up Whether it runs.
    # TYPE up gauge
    up 1
    """
    lines: list[str] = []
    seen: set[str] = set()
    for sample in sorted(samples, key=lambda sample: sample.name):
        if sample.name not in seen:
            seen.add(sample.name)
            lines += [f"# HELP {sample.name} {sample.help}", f"# TYPE {sample.name} {sample.kind}"]
        labels = ",".join(f'{name}="{_escape(value)}"' for name, value in sample.labels)
        place = f"{sample.name}{{{labels}}}" if labels else sample.name
        lines.append(f"{place} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    # All digits: offsets and byte counts are large, and a rate is taken of their differences.
    return str(int(value)) if value == int(value) else repr(value)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
