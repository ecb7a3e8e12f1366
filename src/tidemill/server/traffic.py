"""Counters of requests and connections of a node."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from tidemill.coordination.metrics import Histogram, Metric, counter, counters, histogram, histograms
from tidemill.wire.apis import APIS

__all__ = ("TRAFFIC_METRICS", "ApiTraffic", "Traffic")

V = TypeVar("V")

#: The API key of Fetch.
_FETCH: Final = 1


@dataclass(slots=True)
class ApiTraffic:
    """Counters of the answers of one API."""

    latency: Histogram = field(default_factory=Histogram)
    request_bytes: int = 0
    response_bytes: int = 0


@dataclass(slots=True)
class Traffic:
    """Counters of requests and connections since the start of the node."""

    #: Requests that were begun, by API key.
    requests: dict[int, int] = field(default_factory=dict)
    failures: int = 0
    connections_refused: int = 0
    connections_closed: int = 0
    #: Counters of answers, by API key.
    answers: dict[int, ApiTraffic] = field(default_factory=dict)
    fetch_handling: Histogram = field(default_factory=Histogram)

    def count(self, api_key: int) -> None:
        self.requests[api_key] = self.requests.get(api_key, 0) + 1

    def answered(
        self, api_key: int, seconds: float, waited_seconds: float, request_bytes: int, response_bytes: int
    ) -> None:
        """Note a request whose answer has been handed to the transport.

        ``seconds``: since its frame was complete. ``waited_seconds``: how much of that it waited for records.
        """
        traffic = self.answers.get(api_key)
        if traffic is None:
            traffic = self.answers[api_key] = ApiTraffic()
        traffic.latency.observe(seconds)
        traffic.request_bytes += request_bytes
        traffic.response_bytes += response_bytes
        if api_key == _FETCH:
            self.fetch_handling.observe(seconds - waited_seconds)


def _by_api(values: dict[int, V]) -> Iterator[tuple[tuple[str], V]]:
    for key, value in sorted(values.items()):
        yield (APIS[key].name,), value


def _of_answers(read: Callable[[ApiTraffic], V]) -> Callable[[Traffic], list[tuple[tuple[str], V]]]:
    def by_api(traffic: Traffic) -> list[tuple[tuple[str], V]]:
        return [(name, read(answers)) for name, answers in _by_api(traffic.answers)]

    return by_api


TRAFFIC_METRICS: Final[Sequence[Metric[Traffic]]] = (
    counters(
        "tidemill_requests_total", "Requests by API.", ("api",), lambda traffic: _by_api(traffic.requests)
    ),
    counter(
        "tidemill_request_failures_total",
        "Requests that failed by a bug.",
        lambda traffic: traffic.failures,
    ),
    counter(
        "tidemill_connections_refused_total",
        "Connections over the limit.",
        lambda traffic: traffic.connections_refused,
    ),
    counter(
        "tidemill_connections_closed_total",
        "Connections closed for what their clients sent, or did not send or read in time.",
        lambda traffic: traffic.connections_closed,
    ),
    histograms(
        "tidemill_request_seconds",
        "Time from a whole request to its answer, by API; long polls wait in it.",
        ("api",),
        _of_answers(lambda answers: answers.latency),
    ),
    counters(
        "tidemill_request_bytes_total",
        "Bytes of answered requests, by API.",
        ("api",),
        _of_answers(lambda answers: answers.request_bytes),
    ),
    counters(
        "tidemill_response_bytes_total",
        "Bytes of answers, by API.",
        ("api",),
        _of_answers(lambda answers: answers.response_bytes),
    ),
    histogram(
        "tidemill_fetch_handling_seconds",
        "Time of Fetch requests without waiting for records.",
        lambda traffic: traffic.fetch_handling,
    ),
)
