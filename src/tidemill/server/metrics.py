"""Counters of a node, and their text form for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from tidemill.replication.compactor import CompactionCounts
from tidemill.replication.damage import DamageRegister
from tidemill.replication.scrubber import Scrubber
from tidemill.wire.apis import APIS

__all__ = (
    "Metric",
    "RequestMetrics",
    "compaction_metrics",
    "damage_metrics",
    "render_prometheus",
    "scrub_metrics",
)


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


def scrub_metrics(scrubber: Scrubber) -> Iterator[Metric]:
    """What the scrubber has done since the start, and where it is."""
    counts, progress = scrubber.counts, scrubber.progress
    for name, kind, text, value in (
        ("read_bytes_total", "counter", "Bytes of the logs read by the scrubber.", counts.bytes_read),
        ("batches_total", "counter", "Batches that the scrubber found to be sound.", counts.batches),
        ("damaged_total", "counter", "Damaged batches that the scrubber met.", counts.damaged_batches),
        ("errors_total", "counter", "Segments that the scrubber could not read.", counts.errors),
        ("interval_ms", "gauge", "How often a pass begins; 0 is never.", scrubber.interval_ms),
        ("last_pass_timestamp_ms", "gauge", "When the last whole pass ended.", progress.pass_ended_ms),
        ("progress_ratio", "gauge", "Partitions read by the present pass, of all.", scrubber.progress_ratio),
    ):
        yield Metric(f"tidemill_scrub_{name}", kind, text, value)


def damage_metrics(damage: DamageRegister) -> Iterator[Metric]:
    """Batches that cannot be read: of the node, and of each partition that has some."""
    text = "Places in the logs that are damaged and not served."
    total = 0
    for each in damage:
        total += len(each.places)
        labels = (("topic", each.topic), ("partition", str(each.index)))
        yield Metric("tidemill_partition_damaged_batches", "gauge", text, len(each.places), labels)
    yield Metric("tidemill_damaged_batches", "gauge", text, total)


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
