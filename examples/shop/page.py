"""The report as one HTML file that needs nothing else: tables, plots, numbers, in light and in dark."""

from __future__ import annotations

import html
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import plots
import pyspark
from events import REGIONS, Truth
from report import Difference, Results
from watching import Story

import tidemill

SHOWN_DIFFERENCES, SHOWN_BROKEN = 50, 8

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #ffffff; --text: #1d2733;
  --soft: #5c6b7a; --grid: #dde3ea; --good: #1a7f4b; --bad: #c03434; }
@media (prefers-color-scheme: dark) { :root { --page: #12171d; --card: #1b222b; --text: #e4e9ef;
  --soft: #93a1b0; --grid: #313b47; --good: #4cc38a; --bad: #f07178; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 62rem; margin: 0 auto; padding: 2rem 1rem 3rem; }
h1 { font-size: 1.7rem; margin: 0; }
h2 { font-size: 1.05rem; margin: 0 0 .2rem; }
p { margin: 0 0 .8rem; color: var(--soft); }
section { background: var(--card); border: 1px solid var(--grid); border-radius: 10px; padding: 1.1rem 1.3rem;
  margin-top: 1rem; overflow-x: auto; }
.verdict { border-left: 6px solid var(--good); font-size: 1.1rem; }
.verdict.bad { border-left-color: var(--bad); }
.verdict strong { color: var(--good); }
.verdict.bad strong { color: var(--bad); }
.verdict p { margin: 0; font-size: .95rem; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: 1rem;
  margin-top: 1rem; }
.numbers section { margin: 0; }
.numbers b { display: block; font-size: 1.45rem; font-weight: 650; font-variant-numeric: tabular-nums; }
.numbers span { color: var(--soft); font-size: .88rem; }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 0 1rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: .88rem; }
th, td { padding: .3rem 1rem .3rem 0; border-bottom: 1px solid var(--grid); vertical-align: top;
  white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
tr:last-child td { border-bottom: 0; }
.right { text-align: right; }
code { font: .86rem/1.4 ui-monospace, monospace; white-space: normal; overflow-wrap: anywhere; }
svg { display: block; width: 100%; height: auto; color: var(--text); }
svg text { font-family: system-ui, sans-serif !important; }
footer { margin-top: 1.2rem; color: var(--soft); font-size: .88rem; }
"""


def write_page(
    path: Path, results: Results, truth: Truth, story: Story, differences: list[Difference]
) -> None:
    """Write the report to ``path``."""
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>Tidemill: half an hour in a shop</title><style>{STYLE}</style><main>",
        "<h1>Half an hour in a shop</h1>",
        "<p>Kafka producers send events, Spark keeps three results in Tidemill, and every row is compared "
        "with the truth.</p>",
        _verdict(results, truth, differences),
        _numbers(results, story),
        _section(
            "Revenue by region and minute",
            "shop.revenue, as it was scanned",
            plots.revenue_by_minute(results),
        ),
        _section(
            "Sent, and done", "each step is a batch that was published as one", plots.sent_and_done(story)
        ),
        _section("Lag", "messages that were sent and were not in a result yet", plots.lag(story)),
        "<div class=pair><div>",
        _section("Orders by status and region", "shop.orders", _orders(results, truth)),
        _section("Queries", "how many batches, and how long they took", _queries(story)),
        "</div><div>",
        _section("Quarantine", "shop.quarantine: messages that could not be read", _reasons(results)),
        "</div></div>",
        _section("Time", "from start to end", _phases(story)),
        _section("Broken messages", f"the first {SHOWN_BROKEN} in quarantine", _broken(results)),
        f"<footer>seed {story.seed} · Tidemill {tidemill.__version__} · Spark {pyspark.__version__} · Python "
        f"{platform.python_version()}</footer></main></html>",
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(parts), encoding="utf-8")


def _verdict(results: Results, truth: Truth, differences: list[Difference]) -> str:
    rows = len(results.orders) + len(results.revenue) + len(results.quarantine)
    if not differences:
        return (
            f"<section class=verdict><strong>All {rows:,} rows are right.</strong><p>{truth.late:,} late "
            f"events, {truth.copies:,} copies and {truth.broken.total():,} broken messages have left no "
            "trace where they must not.</p></section>"
        )
    shown = _table(
        ("row", "must be", "is"),
        ([_code(text) for text in each.lines()] for each in differences[:SHOWN_DIFFERENCES]),
        right_from=3,
    )
    return (
        f"<section class='verdict bad'><strong>Rows that differ from the truth: {len(differences):,}</strong>"
        f"{shown}</section>"
    )


def _numbers(results: Results, story: Story) -> str:
    last = story.last
    messages_rate, megabytes_rate = story.sending_rates()
    revenue = sum(row["revenue"] for row in results.revenue)
    tiles = (
        (f"{last.sent:,}", "messages sent"),
        (f"{messages_rate:,.0f}", f"messages a second ({megabytes_rate:.1f} MB/s)"),
        (f"{story.spark_rate():,.0f}", "messages a second through Spark"),
        (f"{story.lag_max:,}", f"messages behind at most, {last.lag:,} at the end"),
        (f"{revenue:,.0f}", f"revenue in {len(results.orders):,} orders"),
    )
    inner = "".join(
        f"<section><b>{value}</b><span>{html.escape(what)}</span></section>" for value, what in tiles
    )
    return f"<div class=numbers>{inner}</div>"


def _orders(results: Results, truth: Truth) -> str:
    rows = [
        (status, *(f"{counts[region]:,}" for region in REGIONS), f"{counts.total():,}")
        for status, counts in sorted(results.by_status().items())
    ]
    grid = _table(("status", *REGIONS, "all"), rows)
    return grid + f"<footer>{truth.cancelled:,} orders were cancelled, and deleted from the table.</footer>"


def _reasons(results: Results) -> str:
    rows = [(reason, f"{count:,}") for reason, count in results.reasons().most_common()]
    return _table(("reason", "messages"), rows)


def _queries(story: Story) -> str:
    rows = []
    for name, batches in story.batches.items():
        seconds = sorted(batch.seconds for batch in batches.values())
        rate = sum(batch.messages for batch in batches.values()) / sum(seconds)
        rows.append((name, len(batches), f"{seconds[len(seconds) // 2]:.1f} s", f"{rate:,.0f}"))
    return _table(("fills", "batches", "median", "messages/s"), rows)


def _phases(story: Story) -> str:
    names = (*story.phases, "all")
    seconds = (*story.phases.values(), sum(story.phases.values()))
    return _table(names, [[f"{each:.1f} s" for each in seconds]], right_from=len(names))


def _broken(results: Results) -> str:
    rows = (
        (row["reason"], f"{row['partition']}-{row['offset']}", _code(row["text"]))
        for row in results.quarantine[:SHOWN_BROKEN]
    )
    return _table(("reason", "partition-offset", "text"), rows, right_from=3)


class _Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def _code(value: object) -> _Html:
    return _Html("<i>nothing</i>" if value is None else f"<code>{html.escape(str(value))}</code>")


def _section(title: str, about: str, inner: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2><p>{html.escape(about)}</p>{inner}</section>"


def _table(names: Sequence[str], rows: Iterable[Sequence[object]], right_from: int = 1) -> str:
    """Columns from ``right_from`` on are numbers."""
    sides = ["" if column < right_from else " class=right" for column in range(len(names))]
    head = "".join(f"<th{side}>{html.escape(name)}</th>" for name, side in zip(names, sides, strict=True))
    body = "".join(
        "<tr>"
        + "".join(f"<td{side}>{_cell(cell)}</td>" for cell, side in zip(row, sides, strict=True))
        + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(cell: object) -> str:
    return cell if isinstance(cell, _Html) else html.escape(str(cell))
