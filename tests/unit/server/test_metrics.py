"""The page of metrics: what a scraper reads, and that nobody waits for it."""

from __future__ import annotations

import asyncio
import re

from support.prometheus_text import parse_metrics
from tidemill.coordination.metrics import Metric, Metrics, gauge, gauges
from tidemill.server.metrics import render

SAMPLE = re.compile(
    r'^[a-z_]+(\{[a-z_]+="(?:[^"\\]|\\.)*"(?:,[a-z_]+="(?:[^"\\]|\\.)*")*\})? -?[0-9][0-9.e+-]*$'
)


async def page(*rows: Metric[None]) -> str:
    metrics = Metrics()
    metrics.register(None, rows)
    return "".join([part async for part in render(metrics)])


async def rendered(*rows: Metric[None]) -> list[str]:
    text = await page(*rows)
    assert text.endswith("\n")
    return text.splitlines()


async def test_samples_come_under_one_header_by_name_and_without_samples_there_is_none() -> None:
    lines = await rendered(
        gauges("b", "Second.", ("topic", "partition"), lambda _: [(("x", "1"), 1), (("y", "0"), 3)]),
        gauge("a", "First.", lambda _: 2),
        gauges("c", "Third.", ("topic",), lambda _: []),
    )
    assert lines == [
        "# HELP a First.",
        "# TYPE a gauge",
        "a 2",
        "# HELP b Second.",
        "# TYPE b gauge",
        'b{topic="x",partition="1"} 1',
        'b{topic="y",partition="0"} 3',
    ]


async def test_large_numbers_keep_all_their_digits() -> None:
    values = (1234567890123, 2**62, 0.125, 1700000000.25, True, 3.0)
    numbered: Metric[None] = gauges(
        "v", "V.", ("n",), lambda _: [((str(n),), value) for n, value in enumerate(values)]
    )
    shown = [line.split()[1] for line in (await rendered(numbered))[2:]]
    assert shown == ["1234567890123", str(2**62), "0.125", "1700000000.25", "1", "3"]


async def test_labels_are_escaped() -> None:
    (line,) = (await rendered(gauges("v", "V.", ("name",), lambda _: [(('a"b\\c\nd',), 1)])))[2:]
    assert line == 'v{name="a\\"b\\\\c\\nd"} 1'
    assert SAMPLE.match(line)


async def test_a_page_of_fifty_thousand_samples_lets_the_loop_go_on() -> None:
    rows: list[Metric[None]] = [
        gauges(
            name,
            "G.",
            ("topic", "partition"),
            lambda _: ((("t", str(number)), number) for number in range(10_000)),
        )
        for name in "abcde"
    ]
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    metrics = Metrics()
    metrics.register(None, rows)
    task = asyncio.get_running_loop().create_task(others())
    parts = [part async for part in render(metrics)]
    task.cancel()
    # At one microsecond a sample it is fifty milliseconds of work, and 15 parts are written.
    assert turns > 20
    assert len(parts) >= 15
    assert len(parse_metrics("".join(parts))["e"].samples) == 10_000
