"""The plots of the report, as SVG that takes the colours of text and lines from the page: light or dark."""

from __future__ import annotations

import io
from datetime import timedelta
from typing import Any

import matplotlib as mpl
from events import OPENING, REGIONS
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from report import Results
from watching import Story

#: Told apart by people who do not see all colours, on light and on dark.
REGION_COLOURS = dict(zip(REGIONS, ("#c9a227", "#d1495b", "#2a9d8f", "#4c78c9"), strict=True))
QUERY_COLOURS = ("#4c78c9", "#d1495b", "#c9a227")

# Colours that appear nowhere else: they become the page's own.
_TEXT, _GRID = "#010203", "#040506"
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "svg.fonttype": "none",
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _GRID,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "grid.color": _GRID,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "legend.frameon": False,
}


def revenue_by_minute(results: Results) -> str:
    """Stacked bars: a minute each, by region."""
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(3.4)
        by_key = {(row["region"], row["minute"]): float(row["revenue"]) for row in results.revenue}
        last = max((minute for _, minute in by_key), default=OPENING)
        minutes = [
            OPENING + timedelta(minutes=n) for n in range((last - OPENING) // timedelta(minutes=1) + 1)
        ]
        below = [0.0] * len(minutes)
        for region, colour in REGION_COLOURS.items():
            heights = [by_key.get((region, minute), 0.0) for minute in minutes]
            axes.bar(
                range(len(minutes)), heights, 0.86, bottom=below, color=colour, label=region, linewidth=0
            )
            below = [low + height for low, height in zip(below, heights, strict=True)]
        ticks = range(0, len(minutes), 5)
        axes.set_xticks(ticks, [f"{minutes[tick]:%H:%M}" for tick in ticks])
        axes.set_xlim(-0.7, len(minutes) - 0.3)
        axes.set_ylabel("revenue a minute")
        _legend(axes, len(REGIONS))
        return _svg(figure, "revenue")


def sent_and_done(story: Story) -> str:
    """How many messages were sent, and how many each query was done with, over time."""
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(3.0)
        seconds = [sample.seconds for sample in story.samples]
        axes.fill_between(
            seconds,
            [sample.sent for sample in story.samples],
            color="#888888",
            alpha=0.25,
            linewidth=0,
            label="sent",
        )
        for name, colour in zip(story.batches, QUERY_COLOURS, strict=False):
            done = [sample.done[name] for sample in story.samples]
            axes.step(seconds, done, where="post", color=colour, linewidth=1.8, label=f"in {name}")
        _time_axis(axes, seconds, "messages")
        return _svg(figure, "sent")


def lag(story: Story) -> str:
    """How far each query was behind the senders, over time."""
    with mpl.rc_context(_STYLE):
        figure, axes = _figure(2.4)
        seconds = [sample.seconds for sample in story.samples]
        for name, colour in zip(story.batches, QUERY_COLOURS, strict=False):
            behind = [sample.sent - sample.done[name] for sample in story.samples]
            axes.plot(seconds, behind, color=colour, linewidth=1.8, label=name)
        _time_axis(axes, seconds, "messages behind")
        return _svg(figure, "lag")


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(9.2, height), layout="constrained")
    axes = figure.add_subplot()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    return figure, axes


def _time_axis(axes: Axes, seconds: list[float], label: str) -> None:
    axes.set_xlim(0, seconds[-1])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds since the shop opened")
    axes.set_ylabel(label)
    _legend(axes, 4)


def _legend(axes: Axes, columns: int) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, borderaxespad=0.2, handlelength=1.2)


def _svg(figure: Figure, name: str) -> str:
    # Two figures on a page must not use the same ids.
    with mpl.rc_context({"svg.hashsalt": name}):
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :].replace(_TEXT, "currentColor").replace(_GRID, "var(--grid)")
