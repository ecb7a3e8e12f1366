"""The registry of metrics: who registers what, and what is read off it."""

from __future__ import annotations

import math

import pytest

from tidemill.coordination.metrics import (
    Histogram,
    Metric,
    Metrics,
    Sample,
    counter,
    gauge,
    gauges,
    histograms,
)


class Kitchen:
    """A part of a node."""

    def __init__(self) -> None:
        self.plates = 3
        self.orders = {"soup": 1, "fish": 2}
        self.stove: float | None = None


PLATES: Metric[Kitchen] = counter("plates_total", "Plates.", lambda kitchen: kitchen.plates)
STOVE: Metric[Kitchen] = gauge("stove", "Heat.", lambda kitchen: kitchen.stove)
ORDERS: Metric[Kitchen] = gauges(
    "orders",
    "Orders by dish.",
    ("dish",),
    lambda kitchen: [((dish,), count) for dish, count in kitchen.orders.items()],
)


async def shown(metrics: Metrics) -> dict[str, list[Sample]]:
    return {family.metric.name: list(family.samples()) for family in await metrics.families()}


async def test_rows_are_read_off_their_owner_when_somebody_asks_and_come_by_name() -> None:
    metrics, kitchen = Metrics(), Kitchen()
    metrics.register(kitchen, [PLATES, STOVE, ORDERS])
    kitchen.plates = 4
    found = await shown(metrics)
    assert list(found) == ["orders", "plates_total", "stove"]
    assert found["plates_total"] == [Sample(4)]
    assert found["orders"] == [Sample(1, (("dish", "soup"),)), Sample(2, (("dish", "fish"),))]
    assert found["stove"] == [], "nobody knows"


async def test_what_has_to_be_measured_is_measured_for_each_page() -> None:
    metrics, asked = Metrics(), 0

    async def measure() -> Kitchen:
        nonlocal asked
        asked += 1
        kitchen = Kitchen()
        kitchen.stove = asked * 100
        return kitchen

    metrics.register_measured(measure, [STOVE])
    assert asked == 0
    assert (await shown(metrics))["stove"] == [Sample(100)]
    assert (await shown(metrics))["stove"] == [Sample(200)]


async def test_a_section_is_shown_while_it_should_be() -> None:
    metrics, is_open = Metrics(), False
    metrics.section(lambda: is_open).register(Kitchen(), [PLATES])
    assert not await shown(metrics)
    is_open = True
    assert list(await shown(metrics)) == ["plates_total"]


def test_a_name_is_registered_once_in_all_sections() -> None:
    metrics = Metrics()
    metrics.section(lambda: True).register(Kitchen(), [PLATES])
    for register in (metrics.register, metrics.section(lambda: False).register):
        with pytest.raises(ValueError, match="two metrics have the name plates_total"):
            register(Kitchen(), [PLATES])


def test_a_latency_counts_in_its_bucket_and_all_larger_ones() -> None:
    histogram = Histogram()
    for seconds in (0.0001, 0.0005, 0.0006, 0.3, 99.0):
        histogram.observe(seconds)
    row: Metric[Histogram] = histograms("h", "H.", ("api",), lambda read: [(("Fetch",), read)])
    found = {
        (sample.suffix, dict(sample.labels).get("le")): sample.value for sample in row.samples(histogram)
    }
    assert all(("api", "Fetch") in sample.labels for sample in row.samples(histogram))
    assert found["_bucket", "0.0005"] == 2, "a bound belongs to its bucket"
    assert found["_bucket", "0.001"] == 3
    assert found["_bucket", "0.25"] == 3
    assert found["_bucket", "0.5"] == 4
    assert found["_bucket", "30"] == 4
    assert found["_bucket", "+Inf"] == 5
    assert found["_count", None] == 5
    assert math.isclose(found["_sum", None], 99.3012)
