"""The shop's report: every row that is wrong is found and shown."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import terminal
from events import Message, Truth, make_day
from page import write_page
from pipeline import ORDERS, QUARANTINE, REVENUE
from report import Results, compare
from watching import Batch, Sample, Story

Place = tuple[int, int]


@pytest.fixture(scope="module")
def day() -> tuple[Truth, dict[Place, Message]]:
    messages, truth = make_day(1_000, seed=3)
    return truth, {(0, offset): each for offset, each in enumerate(messages) if each.broken}


@pytest.fixture
def results(day: tuple[Truth, dict[Place, Message]]) -> Results:
    """Results as they must be, free to be spoilt."""
    truth, broken = day
    quarantine = [
        {"partition": partition, "offset": offset, "reason": each.broken, "text": each.text}
        for (partition, offset), each in broken.items()
    ]
    rows = (list(truth.orders.values()), list(truth.revenue.values()), quarantine)
    return Results(*copy.deepcopy(rows))


@pytest.fixture
def story() -> Story:
    queries = (ORDERS, REVENUE, QUARANTINE)
    story = Story(seed=3, phases={"node": 1.0, "stream": 2.0})
    story.samples = [
        Sample(seconds, done < sent, sent, 170 * sent, dict.fromkeys(queries, done))
        for seconds, sent, done in ((0.5, 400, 0), (1.0, 900, 400), (2.0, 1_000, 1_000))
    ]
    story.batches = {name: {0: Batch(400, 0.4), 1: Batch(600, 0.6)} for name in queries}
    return story


def test_results_that_are_right_have_no_difference(
    day: tuple[Truth, dict[Place, Message]], results: Results
) -> None:
    assert compare(results, *day) == []


@pytest.mark.parametrize("table", ["orders", "revenue", "quarantine"])
def test_a_row_that_is_missing_twice_there_wrong_or_too_many_is_a_difference(
    day: tuple[Truth, dict[Place, Message]], results: Results, table: str
) -> None:
    rows: list[dict[str, Any]] = getattr(results, table)
    missing = rows.pop(0)
    twice = rows[0]
    rows.append(dict(twice))
    changed = {"orders": "amount", "revenue": "payments", "quarantine": "reason"}[table]
    rows[1][changed] = None
    differences = compare(results, *day)
    assert {difference.table for difference in differences} == {f"shop.{table}"}
    found = [(difference.expected, difference.found) for difference in differences]
    assert (missing, None) in found
    assert (None, twice) in found
    assert any(row is not None and row[changed] is None for _, row in found)
    assert len(found) == 3


def test_the_verdict_shows_rows_that_differ(
    day: tuple[Truth, dict[Place, Message]], results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    truth, broken = day
    assert terminal.show_verdict(results, truth, compare(results, truth, broken))
    results.orders[0]["status"] = "lost on the way"
    assert not terminal.show_verdict(results, truth, compare(results, truth, broken))
    output = capsys.readouterr().out
    assert "✗ shop.orders" in output
    assert "lost on the way" in output


def test_all_tables_are_shown(
    day: tuple[Truth, dict[Place, Message]],
    results: Results,
    story: Story,
    capsys: pytest.CaptureFixture[str],
) -> None:
    terminal.show_results(results, day[0], story)
    output = capsys.readouterr().out
    assert f"{len(results.orders):,} orders" in output
    assert "messages at the end, 500 at most" in output
    assert all(reason in output for reason in day[0].broken)


def test_results_without_a_row_are_shown_as_well(story: Story, tmp_path: Path) -> None:
    terminal.show_results(Results([], [], []), Truth(), story)
    write_page(tmp_path / "report.html", Results([], [], []), Truth(), story, [])


@pytest.mark.parametrize(
    ("values", "shown"), [([0, 0.1, 0.5, 1], " ▁▅█"), ([0, 50, 100], " ▅█"), ([], "")], ids=str
)
def test_numbers_are_shown_as_bars(values: list[float], shown: str) -> None:
    assert terminal.bars(values) == shown


def test_the_page_needs_nothing_else_and_says_that_all_is_right(
    day: tuple[Truth, dict[Place, Message]], results: Results, story: Story, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "report.html"
    write_page(path, results, day[0], story, [])
    page = path.read_text()
    assert "rows are right." in page
    assert page.count("<svg") == 3
    assert "src=" not in page
    assert "@import" not in page
    assert 'href="http' not in page


def test_what_strangers_have_sent_is_text_on_the_page(
    day: tuple[Truth, dict[Place, Message]], results: Results, story: Story, tmp_path: Path
) -> None:
    truth, broken = day
    results.quarantine[0]["text"] = "<script>alert(1)</script>"
    path = tmp_path / "report.html"
    write_page(path, results, truth, story, compare(results, truth, broken))
    page = path.read_text()
    assert "Rows that differ from the truth: 1<" in page
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
