"""What is counted of requests, and how it is told."""

from __future__ import annotations

from support.prometheus_text import Family, scrape
from tidemill.coordination.metrics import Metrics
from tidemill.server.traffic import TRAFFIC_METRICS, Traffic


async def told(traffic: Traffic) -> dict[str, Family]:
    metrics = Metrics()
    metrics.register(traffic, TRAFFIC_METRICS)
    return await scrape(metrics)


async def test_requests_are_counted_by_the_name_of_their_api() -> None:
    traffic = Traffic()
    for key in (0, 1, 1, 18):
        traffic.count(key)
    traffic.failures = 2
    found = await told(traffic)
    assert found["tidemill_requests_total"].value(api="Fetch") == 2
    assert found["tidemill_requests_total"].value(api="ApiVersions") == 1
    assert found["tidemill_request_failures_total"].value() == 2
    assert found["tidemill_connections_refused_total"].value() == 0


async def test_latencies_and_bytes_are_kept_by_api() -> None:
    traffic = Traffic()
    traffic.answered(0, 0.002, 0.0, 1_000, 50)
    traffic.answered(0, 0.003, 0.0, 2_000, 60)
    traffic.answered(1, 0.5, 0.499, 100, 70_000)
    found = await told(traffic)
    assert found["tidemill_request_bytes_total"].value(api="Produce") == 3_000
    assert found["tidemill_response_bytes_total"].value(api="Fetch") == 70_000
    assert found["tidemill_request_seconds"].value("_count", api="Produce") == 2
    assert found["tidemill_request_seconds"].value("_bucket", api="Fetch", le="0.25") == 0
    assert found["tidemill_fetch_handling_seconds"].value("_bucket", le="0.0025") == 1, "without its wait"
