"""Renders the page of metrics in the text format of Prometheus.

What is on it is declared by the parts of the node (``coordination.metrics``). docs/monitoring.md has a row
for every name; ``tests/unit/test_monitoring.py`` compares.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from tidemill.coordination.metrics import Metrics, Sample
from tidemill.coordination.turns import begin_slice, give_way

__all__ = ("render",)

#: Samples between two looks at the clock, and lines after which a part of the page is given out.
_SAMPLES_PER_LOOK: Final = 64
_LINES_PER_PART: Final = 4_000


async def render(metrics: Metrics) -> AsyncIterator[str]:
    """The page in parts, made in short steps between which the event loop serves others."""
    begin_slice()
    for family in await metrics.families():
        name, kind, text = family.metric.name, family.metric.kind, family.metric.help
        # A metric without samples is left out.
        lines: list[str] = []
        for number, sample in enumerate(family.samples()):
            if number == 0:
                lines += (f"# HELP {name} {text}", f"# TYPE {name} {kind}")
            lines.append(_line(name, sample))
            if number % _SAMPLES_PER_LOOK == 0:
                await give_way()
            if len(lines) >= _LINES_PER_PART:
                yield "\n".join(lines) + "\n"
                lines = []
                await asyncio.sleep(0)
        if lines:
            yield "\n".join(lines) + "\n"
            await asyncio.sleep(0)


def _line(name: str, sample: Sample) -> str:
    """One sample in the text format.

    >>> _line("lag", Sample(3, (("group", "kitchen"),)))
    'lag{group="kitchen"} 3'
    """
    value, labels, suffix = sample
    if not labels:
        return f"{name}{suffix} {_number(value)}"
    written = ",".join([f'{label}="{_escape(said)}"' for label, said in labels])
    return f"{name}{suffix}{{{written}}} {_number(value)}"


def _number(value: float) -> str:
    # With all digits: offsets and byte counts are large, and rates are taken of their differences.
    return str(int(value)) if value == int(value) else repr(value)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
