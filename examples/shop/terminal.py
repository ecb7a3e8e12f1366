"""What the run says in the terminal: a line for each step, a live line meanwhile, the results at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

from events import OPENING, REGIONS, Truth
from report import Difference, Results
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from watching import Sample, Story

STYLES = dict(zip(REGIONS, ("yellow", "magenta", "cyan", "blue"), strict=True))
BARS = "▁▂▃▄▅▆▇█"
BAR_CHARACTERS = 24
LINE_SECONDS = 5.0
SHOWN_DIFFERENCES = 20
CHART_CHARACTERS = 40

console = Console(highlight=False)


@contextmanager
def live_line(total: int) -> Iterator[Callable[[Sample], None]]:
    """Gives what shows a sample: in place in a terminal, as a line every few seconds elsewhere."""
    if console.is_terminal:
        with Live(console=console, transient=True, refresh_per_second=8) as live:
            yield lambda sample: live.update(_progress(sample, total))
        return
    printed: list[Sample] = []

    def show(sample: Sample) -> None:
        last = printed[-1] if printed else None
        if last is not None and sample.seconds - last.seconds < LINE_SECONDS:
            return
        if last is None or (sample.sent, sample.done) != (last.sent, last.done):
            printed.append(sample)
            console.print(_progress(sample, total))

    yield show


def _progress(sample: Sample, total: int) -> Text:
    if not sample.is_warm:
        return Text(f"  {sample.seconds:6.1f} s the first minute's messages go through, and Spark gets warm")
    done = min(sample.done.values())
    filled, sent = BAR_CHARACTERS * done // total, BAR_CHARACTERS * sample.sent // total
    line = Text(f"  {sample.seconds:6.1f} s ")
    line.append("█" * filled, "green").append("░" * (sent - filled)).append(" " * (BAR_CHARACTERS - sent))
    return line.append(f" {sample.sent:>8,} sent  {done:>8,} done  {sample.lag:>7,} behind")


def show_results(results: Results, truth: Truth, story: Story) -> None:
    """The tables and charts."""
    console.print()
    console.print(_orders_grid(results, truth))
    console.print(_revenue_grid(results))
    console.print(_quarantine_grid(results))
    console.print(_numbers_grid(story))


def _grid(title: str, first: str, *columns: str) -> Table:
    grid = Table(title=title, title_justify="left", title_style="bold")
    grid.add_column(first)
    for name in columns:
        grid.add_column(name, justify="right")
    return grid


def _orders_grid(results: Results, truth: Truth) -> Table:
    grid = _grid("shop.orders", "status", *REGIONS, "all")
    for status, counts in sorted(results.by_status().items()):
        grid.add_row(status, *(f"{counts[region]:,}" for region in REGIONS), f"{counts.total():,}")
    paid = sum(row["paid_at"] is not None for row in results.orders)
    grid.caption = (
        f"{len(results.orders):,} orders, {paid:,} paid; {truth.cancelled:,} cancelled ones deleted"
    )
    grid.caption_justify = "left"
    return grid


def _revenue_grid(results: Results) -> Table:
    minutes = sorted({row["minute"] for row in results.revenue})
    grid = Table(title="shop.revenue", title_justify="left", title_style="bold")
    grid.add_column("region")
    span = f"{minutes[0]:%H:%M} to {minutes[-1]:%H:%M}, minute by minute" if minutes else "no minute"
    grid.add_column(span, no_wrap=True)
    for name in ("payments", "revenue"):
        grid.add_column(name, justify="right")
    by_key = {(row["region"], row["minute"]): row for row in results.revenue}
    largest = max((row["revenue"] for row in results.revenue), default=1)
    last = (minutes[-1] - OPENING) // timedelta(minutes=1) if minutes else -1
    for region in REGIONS:
        every_minute = [OPENING + timedelta(minutes=number) for number in range(last + 1)]
        rows = [by_key.get((region, minute)) for minute in every_minute]
        chart = bars([float(row["revenue"] / largest) if row else 0.0 for row in rows])
        payments = sum(row["payments"] for row in rows if row)
        revenue = sum(row["revenue"] for row in rows if row)
        grid.add_row(region, Text(chart, STYLES[region]), f"{payments:,}", f"{revenue:,.2f}")
    return grid


def _quarantine_grid(results: Results) -> Table:
    grid = _grid("shop.quarantine", "reason", "messages")
    for reason, count in results.reasons().most_common():
        grid.add_row(reason, f"{count:,}")
    return grid


def _numbers_grid(story: Story) -> Table:
    grid = Table(title="How it went", title_justify="left", title_style="bold", show_header=False)
    for justify in ("left", "right", "left"):
        grid.add_column(justify=justify)
    last = story.last
    messages_rate, megabytes_rate = story.sending_rates()
    grid.add_row("sent", f"{messages_rate:,.0f}", "messages a second")
    grid.add_row("", f"{megabytes_rate:.2f}", "MB a second, as JSON before compression")
    grid.add_row(
        "through Spark", f"{story.spark_rate():,.0f}", f"messages a second, {len(last.done)} queries together"
    )
    for name, batches in story.batches.items():
        seconds = sorted(batch.seconds for batch in batches.values())
        middle = seconds[len(seconds) // 2]
        grid.add_row(
            name, f"{len(batches)}", f"batches of {middle:.1f} s (median; longest {seconds[-1]:.1f} s)"
        )
    lags = [sample.lag for sample in story.samples]
    grid.add_row("lag", f"{last.lag:,}", f"messages at the end, {max(lags):,} at most")
    grid.add_row("", "", Text(bars(_shrunk(lags, CHART_CHARACTERS)), "red"))
    phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in story.phases.items())
    grid.add_row("seconds", f"{sum(story.phases.values()):.1f}", phases)
    return grid


def bars(shares: Sequence[float]) -> str:
    """Numbers as a line of bars. A full one is the largest, or 1 if that is larger."""
    scale = max((1.0, *shares))
    return "".join(" " if share <= 0 else BARS[min(7, int(share / scale * 8))] for share in shares)


def _shrunk(values: Sequence[float], length: int) -> list[float]:
    """At most ``length`` values: the largest of each stretch."""
    step = max(1, -(-len(values) // length))
    return [max(values[start : start + step]) for start in range(0, len(values), step)]


def show_verdict(results: Results, truth: Truth, differences: Iterable[Difference]) -> bool:
    """Say whether everything is as it must be, and show what is not."""
    differences = list(differences)
    wrong = {difference.table for difference in differences}
    for table, rows, what in (
        ("shop.orders", results.orders, f"orders; {truth.late:,} events came late"),
        ("shop.revenue", results.revenue, f"minutes; of {truth.copies:,} copies none was counted"),
        ("shop.quarantine", results.quarantine, "broken messages, each once, with its reason"),
    ):
        mark, style = ("✗", "red") if table in wrong else ("✓", "green")
        console.print(Text(f"   {mark} {table:<16} {len(rows):>7,} {what}", style))
    for difference in differences[:SHOWN_DIFFERENCES]:
        place, expected, found = difference.lines()
        console.print(Text(f"     {place}", "red"), soft_wrap=True)
        console.print(Text(f"       must be  {expected}"), soft_wrap=True)
        console.print(Text(f"       is       {found}"), soft_wrap=True)
    if len(differences) > SHOWN_DIFFERENCES:
        console.print(f"     and {len(differences) - SHOWN_DIFFERENCES:,} more rows that differ", style="red")
    return not differences
