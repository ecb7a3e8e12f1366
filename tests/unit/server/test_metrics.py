from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Iterator

from support.prometheus_text import parse_metrics
from tidemill.server.metrics import Histogram, Metric, RequestMetrics, render_in_steps, render_prometheus

SAMPLE = re.compile(
    r'^[a-z_]+(\{[a-z_]+="(?:[^"\\]|\\.)*"(?:,[a-z_]+="(?:[^"\\]|\\.)*")*\})? -?[0-9][0-9.e+-]*$'
)


def rendered(*samples: Metric) -> list[str]:
    text = render_prometheus(iter(samples))
    assert text.endswith("\n")
    return text.splitlines()


def test_samples_of_one_name_come_together_under_one_header() -> None:
    lines = rendered(
        Metric("b", "gauge", "Second.", 1, (("topic", "x"),)),
        Metric("a", "counter", "First.", 2),
        Metric("b", "gauge", "Second.", 3, (("topic", "y"), ("partition", "0"))),
    )
    assert lines == [
        "# HELP a First.",
        "# TYPE a counter",
        "a 2",
        "# HELP b Second.",
        "# TYPE b gauge",
        'b{topic="x"} 1',
        'b{topic="y",partition="0"} 3',
    ]


def test_large_numbers_keep_all_their_digits() -> None:
    values = (1234567890123, 2**62, 0.125, 1700000000.25, True, 3.0)
    shown = [
        line.split()[1] for line in rendered(*(Metric("v", "gauge", "V.", value) for value in values))[2:]
    ]
    assert shown == ["1234567890123", str(2**62), "0.125", "1700000000.25", "1", "3"]


def test_labels_are_escaped() -> None:
    (line,) = rendered(Metric("v", "gauge", "V.", 1, (("name", 'a"b\\c\nd'),)))[2:]
    assert line == 'v{name="a\\"b\\\\c\\nd"} 1'
    assert SAMPLE.match(line)


def test_requests_are_counted_by_the_name_of_their_api() -> None:
    metrics = RequestMetrics()
    for key in (0, 1, 1, 18):
        metrics.count(key)
    metrics.failures = 2
    lines = rendered(*metrics.collect())
    assert 'tidemill_requests_total{api="Fetch"} 2' in lines
    assert 'tidemill_requests_total{api="ApiVersions"} 1' in lines
    assert "tidemill_request_failures_total 2" in lines
    assert "tidemill_connections_refused_total 0" in lines


def test_a_latency_counts_in_its_bucket_and_all_larger_ones() -> None:
    histogram = Histogram()
    for seconds in (0.0001, 0.0005, 0.0006, 0.3, 99.0):
        histogram.observe(seconds)
    family = parse_metrics(render_prometheus(histogram.collect("h", "H.", (("api", "Fetch"),))))["h"]
    assert family.kind == "histogram"
    assert family.value("_bucket", api="Fetch", le="0.0005") == 2, "a bound belongs to its bucket"
    assert family.value("_bucket", api="Fetch", le="0.001") == 3
    assert family.value("_bucket", api="Fetch", le="0.25") == 3
    assert family.value("_bucket", api="Fetch", le="0.5") == 4
    assert family.value("_bucket", api="Fetch", le="30") == 4
    assert family.value("_bucket", api="Fetch", le="+Inf") == 5
    assert family.value("_count", api="Fetch") == 5
    assert math.isclose(family.value("_sum", api="Fetch"), 99.3012)


def test_latencies_and_bytes_are_kept_by_api() -> None:
    metrics = RequestMetrics()
    metrics.answered(0, 0.002, 0.0, 1_000, 50)
    metrics.answered(0, 0.003, 0.0, 2_000, 60)
    metrics.answered(1, 0.5, 0.499, 100, 70_000)
    found = parse_metrics(render_prometheus(metrics.collect()))
    assert found["tidemill_request_bytes_total"].value(api="Produce") == 3_000
    assert found["tidemill_response_bytes_total"].value(api="Fetch") == 70_000
    assert found["tidemill_request_seconds"].value("_count", api="Produce") == 2
    assert found["tidemill_request_seconds"].value("_bucket", api="Fetch", le="0.25") == 0
    assert found["tidemill_fetch_handling_seconds"].value("_bucket", le="0.0025") == 1, "without its wait"


async def test_a_page_of_fifty_thousand_samples_lets_the_loop_go_on() -> None:
    def samples() -> Iterator[Metric]:
        for number in range(10_000):
            labels = (("topic", "t"), ("partition", str(number)))
            for name in "abcde":
                yield Metric(name, "gauge", "G.", number, labels)

    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    task = asyncio.get_running_loop().create_task(others())
    text = "".join([part async for part in render_in_steps(samples())])
    task.cancel()
    # At one microsecond a sample it is fifty milliseconds of work, and 15 parts are written.
    assert turns > 20
    assert text == render_prometheus(samples())
    assert len(parse_metrics(text)["e"].samples) == 10_000
