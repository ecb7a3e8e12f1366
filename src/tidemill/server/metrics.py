"""Counters of a node, and their text form for Prometheus.

docs/monitoring.md has a row for every name; ``tests/unit/test_monitoring.py`` compares.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tidemill.replication.compactor import CompactionCounts
from tidemill.replication.damage import DamageRegister
from tidemill.replication.partition import Partition
from tidemill.replication.scrubber import Scrubber
from tidemill.wire.apis import APIS

__all__ = (
    "ApiTraffic",
    "Histogram",
    "Metric",
    "RequestMetrics",
    "Turn",
    "compaction_metrics",
    "damage_metrics",
    "render_in_steps",
    "render_prometheus",
    "scrub_metrics",
    "topic_metrics",
)

#: The API key of Fetch.
_FETCH: Final = 1
#: Upper bounds of the buckets of a latency, in seconds; one more bucket has no bound.
_LATENCY_BOUNDS: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    10.0,
    30.0,
)
_BUCKET_LABELS: Final = (*(f"{bound:g}" for bound in _LATENCY_BOUNDS), "+Inf")

#: How long a turn on the event loop is, and how many steps there are between looks at the clock.
_TURN_SECONDS: Final = 0.004
_STEPS_PER_LOOK: Final = 64
_LINES_PER_PART: Final = 4_000


class Histogram:
    """Request latencies, counted by bucket as a Prometheus histogram wants them."""

    __slots__ = ("counts", "total_seconds")

    def __init__(self) -> None:
        #: How many fell into each bucket, not accumulated; the last is that of everything longer.
        self.counts = [0] * len(_BUCKET_LABELS)
        self.total_seconds = 0.0

    def observe(self, seconds: float) -> None:
        # A value equal to a bound belongs to its bucket.
        self.counts[bisect_left(_LATENCY_BOUNDS, seconds)] += 1
        self.total_seconds += seconds

    def collect(self, name: str, text: str, labels: Labels = ()) -> Iterator[Metric]:
        """The samples in Prometheus' form: each bucket holds those of all smaller ones, too."""
        count = 0
        for bound, here in zip(_BUCKET_LABELS, self.counts, strict=True):
            count += here
            yield Metric(name, "histogram", text, count, (*labels, ("le", bound)), "_bucket")
        yield Metric(name, "histogram", text, self.total_seconds, labels, "_sum")
        yield Metric(name, "histogram", text, count, labels, "_count")


@dataclass(slots=True)
class ApiTraffic:
    """What was answered of one API."""

    latency: Histogram = field(default_factory=Histogram)
    request_bytes: int = 0
    response_bytes: int = 0


@dataclass(slots=True)
class RequestMetrics:
    """What the server counts while it works; everything else is read off when asked for."""

    requests: dict[int, int] = field(default_factory=dict)
    failures: int = 0
    connections_refused: int = 0
    connections_closed: int = 0
    #: By API key.
    traffic: dict[int, ApiTraffic] = field(default_factory=dict)
    fetch_handling: Histogram = field(default_factory=Histogram)

    def count(self, api_key: int) -> None:
        self.requests[api_key] = self.requests.get(api_key, 0) + 1

    def answered(
        self, api_key: int, seconds: float, waited_seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Note a request whose answer has been handed to the transport.

        ``seconds``: since its frame was complete. ``waited_seconds``: how much of that it waited for records.
        """
        traffic = self.traffic.get(api_key)
        if traffic is None:
            traffic = self.traffic[api_key] = ApiTraffic()
        traffic.latency.observe(seconds)
        traffic.request_bytes += request_bytes
        traffic.response_bytes += response_bytes
        if api_key == _FETCH:
            self.fetch_handling.observe(seconds - waited_seconds)

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
        yield from self._collect_traffic()

    def _collect_traffic(self) -> Iterator[Metric]:
        for key, traffic in sorted(self.traffic.items()):
            labels = (("api", APIS[key].name),)
            yield from traffic.latency.collect(
                "tidemill_request_seconds",
                "Time from a whole request to its answer, by API; long polls wait in it.",
                labels,
            )
            yield Metric(
                "tidemill_request_bytes_total",
                "counter",
                "Bytes of answered requests, by API.",
                traffic.request_bytes,
                labels,
            )
            yield Metric(
                "tidemill_response_bytes_total",
                "counter",
                "Bytes of answers, by API.",
                traffic.response_bytes,
                labels,
            )
        yield from self.fetch_handling.collect(
            "tidemill_fetch_handling_seconds", "Time of Fetch requests without waiting for records."
        )


Labels = tuple[tuple[str, str], ...]


class Metric(NamedTuple):
    """One sample. ``suffix`` is what a histogram's samples have behind the name that they share."""

    name: str
    kind: str
    help: str
    value: float
    labels: Labels = ()
    suffix: str = ""


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


def topic_metrics(partitions: Iterable[Partition]) -> Iterator[Metric]:
    """What clients have written to each topic and read from it, since its partitions were opened."""
    bytes_by_topic: dict[str, tuple[int, int]] = {}
    for partition in partitions:
        bytes_in, bytes_out = bytes_by_topic.get(partition.topic, (0, 0))
        bytes_by_topic[partition.topic] = bytes_in + partition.bytes_in, bytes_out + partition.bytes_out
    for topic, (bytes_in, bytes_out) in bytes_by_topic.items():
        labels = (("topic", topic),)
        yield Metric(
            "tidemill_topic_bytes_in_total", "counter", "Bytes of batches produced.", bytes_in, labels
        )
        yield Metric(
            "tidemill_topic_bytes_out_total", "counter", "Bytes of batches fetched.", bytes_out, labels
        )


def render_prometheus(samples: Iterable[Metric]) -> str:
    """The text format that Prometheus scrapes. Samples of one name come together.

    >>> print(render_prometheus([Metric("up", "gauge", "Whether it runs.", 1)]), end="")
    # HELP up Whether it runs.
    # TYPE up gauge
    up 1
    """
    page = _Page()
    for sample in samples:
        page.add(sample)
    return "".join(page.parts())


async def render_in_steps(samples: Iterable[Metric]) -> AsyncIterator[str]:
    """The same in parts, made in short steps between which the event loop serves others."""
    page = _Page()
    turn = Turn()
    for sample in samples:
        page.add(sample)
        if turn.is_over():
            await turn.pause()
    for part in page.parts():
        yield part
        await turn.pause()


class Turn:
    """The time that a long piece of work has on the event loop until it lets others go on."""

    def __init__(self) -> None:
        self._calls = 0
        self._began = time.perf_counter()

    def is_over(self) -> bool:
        """Whether to ``pause`` now. Asked after every small step: it looks at the clock now and then."""
        self._calls += 1
        return self._calls % _STEPS_PER_LOOK == 0 and time.perf_counter() - self._began > _TURN_SECONDS

    async def pause(self) -> None:
        """Let others go on."""
        await asyncio.sleep(0)
        self._began = time.perf_counter()


class _Page:
    """Lines by the name of their metric."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def add(self, sample: Metric) -> None:
        name, kind, text, value, labels, suffix = sample
        lines = self._lines.get(name)
        if lines is None:
            lines = self._lines[name] = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        if labels:
            written = ",".join([f'{label}="{_escape(said)}"' for label, said in labels])
            lines.append(f"{name}{suffix}{{{written}}} {_number(value)}")
        else:
            lines.append(f"{name}{suffix} {_number(value)}")

    def parts(self) -> Iterator[str]:
        """The text, in parts of bounded size."""
        for name in sorted(self._lines):
            lines = self._lines[name]
            for start in range(0, len(lines), _LINES_PER_PART):
                yield "\n".join(lines[start : start + _LINES_PER_PART]) + "\n"


def _number(value: float) -> str:
    # All digits: offsets and byte counts are large, and a rate is taken of their differences.
    return str(int(value)) if value == int(value) else repr(value)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
