"""Metrics: rows that each part of a node declares, and the registry that they are read through.

A part has its rows beside its code: name, kind, help, labels, and how a value is read off the part. The code
that makes the part registers it; ``server.metrics`` turns what is registered into a page. Rules:

- A name is registered once. Names stay: dashboards and alerts know them, and docs/monitoring.md lists them.
- Values are read when somebody asks. Reading is short and changes nothing. What takes longer, or needs a
  thread, is measured first: ``register_measured``.
- A row with labels gives a copy of its samples: others have their turn while the page is made.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar

__all__ = (
    "Family",
    "Histogram",
    "Metric",
    "Metrics",
    "Sample",
    "counter",
    "counters",
    "gauge",
    "gauges",
    "histogram",
    "histograms",
)

T = TypeVar("T")

Kind = Literal["counter", "gauge", "histogram"]

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


class Sample(NamedTuple):
    """One number of a metric. ``suffix`` follows the metric's name in the samples of a histogram."""

    value: float
    labels: tuple[tuple[str, str], ...] = ()
    suffix: str = ""


class Histogram:
    """Counts of latencies by bucket."""

    __slots__ = ("counts", "total_seconds")

    def __init__(self) -> None:
        #: How many fell into each bucket, not accumulated; the last one has no upper bound.
        self.counts = [0] * len(_BUCKET_LABELS)
        self.total_seconds = 0.0

    def observe(self, seconds: float) -> None:
        # A value equal to a bound belongs to its bucket.
        self.counts[bisect_left(_LATENCY_BOUNDS, seconds)] += 1
        self.total_seconds += seconds

    def samples(self, labels: tuple[tuple[str, str], ...] = ()) -> Iterator[Sample]:
        """The samples that Prometheus expects: each bucket also counts what is in all smaller ones."""
        count = 0
        for bound, here in zip(_BUCKET_LABELS, self.counts, strict=True):
            count += here
            yield Sample(count, (*labels, ("le", bound)), "_bucket")
        yield Sample(self.total_seconds, labels, "_sum")
        yield Sample(count, labels, "_count")


Labelled = Iterable[tuple[tuple[str, ...], T]]
"""Pairs of label values, in the order of the row's labels, and a value."""


@dataclass(frozen=True, slots=True)
class Metric(Generic[T]):
    """The row of one metric, which is read off a ``T``. The functions below make rows."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...]
    read: Callable[[T], Iterable[tuple[tuple[str, ...], float | Histogram]]]

    def samples(self, owner: T) -> Iterator[Sample]:
        """The metric's values, read off ``owner`` now."""
        for values, value in self.read(owner):
            labels = tuple(zip(self.labels, values, strict=True))
            if isinstance(value, Histogram):
                yield from value.samples(labels)
            else:
                yield Sample(value, labels)


def counter(name: str, text: str, read: Callable[[T], float | None]) -> Metric[T]:
    """Row of a number that only grows; None if it is not known."""
    return Metric(name, "counter", text, (), _single(read))


def gauge(name: str, text: str, read: Callable[[T], float | None]) -> Metric[T]:
    """Row of a number that goes up and down; None if it is not known."""
    return Metric(name, "gauge", text, (), _single(read))


def counters(
    name: str, text: str, labels: tuple[str, ...], read: Callable[[T], Labelled[float]]
) -> Metric[T]:
    """Row of numbers that only grow, one for each combination of labels."""
    return Metric(name, "counter", text, labels, read)


def gauges(name: str, text: str, labels: tuple[str, ...], read: Callable[[T], Labelled[float]]) -> Metric[T]:
    """Row of numbers that go up and down, one for each combination of labels."""
    return Metric(name, "gauge", text, labels, read)


def histogram(name: str, text: str, read: Callable[[T], Histogram]) -> Metric[T]:
    """Row of the distribution of one latency."""
    return Metric(name, "histogram", text, (), lambda owner: [((), read(owner))])


def histograms(
    name: str, text: str, labels: tuple[str, ...], read: Callable[[T], Labelled[Histogram]]
) -> Metric[T]:
    """Row of distributions of a latency, one for each combination of labels."""
    return Metric(name, "histogram", text, labels, read)


def _single(read: Callable[[T], float | None]) -> Callable[[T], list[tuple[tuple[str, ...], float]]]:
    def read_one(owner: T) -> list[tuple[tuple[str, ...], float]]:
        value = read(owner)
        return [] if value is None else [((), value)]

    return read_one


class Family(NamedTuple):
    """A metric and the owner that it is read off."""

    metric: Metric[Any]
    owner: Any

    def samples(self) -> Iterator[Sample]:
        return self.metric.samples(self.owner)


class Metrics:
    """Registry of the metrics of a node's parts."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._read: list[Family] = []
        self._measured: list[tuple[Callable[[], Awaitable[Any]], tuple[Metric[Any], ...]]] = []
        self._sections: list[tuple[Callable[[], bool], Metrics]] = []

    def register(self, owner: T, rows: Iterable[Metric[T]]) -> None:
        """Have ``rows`` read off ``owner``. Raises ``ValueError`` if a name is taken."""
        self._read += [Family(row, owner) for row in self._new(rows)]

    def register_measured(self, measure: Callable[[], Awaitable[T]], rows: Iterable[Metric[T]]) -> None:
        """Have ``rows`` read off the result of ``measure``, which is awaited for each page."""
        self._measured.append((measure, self._new(rows)))

    def section(self, is_shown: Callable[[], bool]) -> Metrics:
        """A registry whose metrics are on the page only while ``is_shown`` says so."""
        section = Metrics()
        section._names = self._names
        self._sections.append((is_shown, section))
        return section

    async def families(self) -> list[Family]:
        """All metrics that are shown now, by name. Awaits those that must be measured first."""
        found = list(self._read)
        for measure, rows in self._measured:
            measured = await measure()
            found += [Family(row, measured) for row in rows]
        for is_shown, section in self._sections:
            if is_shown():
                found += await section.families()
        return sorted(found, key=lambda family: family.metric.name)

    def _new(self, rows: Iterable[Metric[T]]) -> tuple[Metric[T], ...]:
        new = tuple(rows)
        for row in new:
            if row.name in self._names:
                raise ValueError(f"two metrics have the name {row.name}")
            self._names.add(row.name)
        return new
