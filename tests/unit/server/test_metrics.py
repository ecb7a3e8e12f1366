from __future__ import annotations

import re

from tidemill.server.metrics import Metric, RequestMetrics, render_prometheus

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
