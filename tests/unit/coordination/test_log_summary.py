from __future__ import annotations

from logging import INFO, WARNING

from tidemill.coordination.log_summary import LogSummary


def test_nine_hundred_events_in_a_moment_make_two_lines() -> None:
    summary = LogSummary()
    logged = [
        summary.note("refused", f"10.0.0.{number % 10 // 9}", str(number), 0.0) for number in range(900)
    ]
    assert logged == [True] + [False] * 899
    assert summary.due(9.9) == []
    assert summary.due(10.0) == [
        (WARNING, "refused: 899 more in 10 s, most by 10.0.0.0 (809); the last one: 899")
    ]
    assert summary.due(20.0) == []


def test_a_flood_that_goes_on_makes_a_line_in_every_interval() -> None:
    summary = LogSummary()
    lines: list[tuple[int, str]] = []
    for second in range(60):
        for _ in range(100):
            assert summary.note("refused", "a", "x", second) == (second == 0 and not lines and _ == 0)
        lines += summary.due(second)
    assert len(lines) == 5


def test_after_a_quiet_interval_the_next_event_is_news_again() -> None:
    summary = LogSummary()
    assert summary.note("refused", "a", "x", 0)
    summary.due(10)
    assert summary.note("refused", "a", "x", 11)


def test_kinds_are_counted_apart_and_the_rest_is_told_at_the_end() -> None:
    summary = LogSummary()
    for kind in ("refused", "closed"):
        for number in range(2):
            summary.note(kind, "a", str(number), 0, INFO)
    assert [(level, line.split(":")[0]) for level, line in summary.rest(2)] == [
        (INFO, "refused"),
        (INFO, "closed"),
    ]
    assert summary.rest(2) == []


def test_endless_sources_take_bounded_memory() -> None:
    summary = LogSummary()
    for number in range(5_000):
        summary.note("refused", f"address {number}", "x", 0)
    assert len(summary._kinds["refused"].sources) == 1_000
    assert summary.due(10)[0][1].startswith("refused: 4999 more")
