"""Places in a log as people write them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cli.positions import Position, PositionKind, parse_position

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("earliest", Position(PositionKind.EARLIEST)),
        ("latest", Position(PositionKind.LATEST)),
        ("0", Position(PositionKind.OFFSET, 0)),
        (" 1234 ", Position(PositionKind.OFFSET, 1234)),
        ("-10m", Position(PositionKind.TIME, NOW_MS - 600_000)),
        ("-250ms", Position(PositionKind.TIME, NOW_MS - 250)),
        ("-10 minutes", Position(PositionKind.TIME, NOW_MS - 600_000)),
        ("-2w", Position(PositionKind.TIME, NOW_MS - 14 * 86_400_000)),
        ("-5", Position(PositionKind.SHIFT, -5)),
        ("+5", Position(PositionKind.SHIFT, 5)),
        ("2025-01-31T12:00:00Z", Position(PositionKind.TIME, 1_738_324_800_000)),
        ("2025-01-31T13:00:00.250+01:00", Position(PositionKind.TIME, 1_738_324_800_250)),
    ],
)
def test_every_form_is_understood(text: str, place: Position) -> None:
    assert parse_position(text, NOW_MS) == place


def test_time_without_a_zone_is_local() -> None:
    local = datetime(2025, 1, 31, 12, tzinfo=UTC).astimezone().replace(tzinfo=None)
    assert parse_position(local.isoformat(), NOW_MS).value == 1_738_324_800_000


def test_age_that_reaches_before_1970_is_the_beginning_of_time() -> None:
    assert parse_position("-999999999w", NOW_MS) == Position(PositionKind.TIME, 0)


@pytest.mark.parametrize("text", ["", "first", "-10y", "2025-13-01", "1.5", "--5", "10m"])
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="earliest, latest, an offset"):
        parse_position(text, NOW_MS)


def test_time_before_1970_is_refused() -> None:
    with pytest.raises(ValueError, match="1970"):
        parse_position("1969-12-31T00:00:00Z", NOW_MS)


@given(st.text(max_size=20))
def test_any_text_is_a_place_or_a_value_error(text: str) -> None:
    try:
        parse_position(text, NOW_MS)
    except ValueError as error:
        assert str(error)
