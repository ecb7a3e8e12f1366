"""Where a cursor begins: the words for it."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta

import pytest

from tidemill.cursors.start import StartAt, parse_start
from tidemill.errors import ConfigError

NOW = 1_800_000_000_000


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("earliest", StartAt("earliest")),
        ("latest", StartAt("latest")),
        (7, StartAt("offset", 7)),
        ("7", StartAt("offset", 7)),
        ("-10 minutes", StartAt("time", NOW - 600_000)),
        ("-1h", StartAt("time", NOW - 3_600_000)),
        ("-2 days", StartAt("time", NOW - 172_800_000)),
        ("-90s", StartAt("time", NOW - 90_000)),
        ("-250ms", StartAt("time", NOW - 250)),
        ("-2w", StartAt("time", NOW - 1_209_600_000)),
        ("1970-01-01T00:00:01Z", StartAt("time", 1_000)),
        (datetime(1970, 1, 1, 0, 0, 2, tzinfo=UTC), StartAt("time", 2_000)),
        (timedelta(minutes=-1), StartAt("time", NOW - 60_000)),
    ],
)
def test_words(given: str | int | datetime | timedelta, meant: StartAt) -> None:
    assert parse_start(given, now_ms=NOW) == meant


def test_a_time_without_a_zone_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "EST5")
    time.tzset()
    try:
        assert parse_start("1970-01-01T00:00:01", now_ms=NOW) == StartAt("time", 18_001_000)
        naive = datetime(1970, 1, 1, 0, 0, 1)  # noqa: DTZ001 - local time
        assert parse_start(naive, now_ms=NOW) == StartAt("time", 18_001_000)
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize("given", ["1969-12-31T23:59:59.999Z", "0001-01-01", datetime(1, 1, 1, tzinfo=UTC)])
def test_a_time_before_there_were_records_is_refused(given: str | datetime) -> None:
    with pytest.raises(ConfigError, match="before 1970"):
        parse_start(given, now_ms=NOW)


@pytest.mark.parametrize("given", ["", "soon", "-10 parsecs", "10 minutes", -1, "-", timedelta(seconds=1)])
def test_words_that_mean_nothing_are_refused(given: str | int | timedelta) -> None:
    with pytest.raises(ConfigError):
        parse_start(given, now_ms=NOW)
