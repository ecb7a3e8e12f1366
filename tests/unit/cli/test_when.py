"""Places in a log as people write them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.cli.when import Place, PlaceKind, parse_place

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("earliest", Place(PlaceKind.EARLIEST)),
        ("latest", Place(PlaceKind.LATEST)),
        ("0", Place(PlaceKind.OFFSET, 0)),
        (" 1234 ", Place(PlaceKind.OFFSET, 1234)),
        ("-10m", Place(PlaceKind.TIME, NOW_MS - 600_000)),
        ("-250ms", Place(PlaceKind.TIME, NOW_MS - 250)),
        ("-2w", Place(PlaceKind.TIME, NOW_MS - 14 * 86_400_000)),
        ("-5", Place(PlaceKind.SHIFT, -5)),
        ("+5", Place(PlaceKind.SHIFT, 5)),
        ("2025-01-31T12:00:00Z", Place(PlaceKind.TIME, 1_738_324_800_000)),
        ("2025-01-31T13:00:00.250+01:00", Place(PlaceKind.TIME, 1_738_324_800_250)),
    ],
)
def test_every_form_is_understood(text: str, place: Place) -> None:
    assert parse_place(text, NOW_MS) == place


def test_time_without_a_zone_is_local() -> None:
    local = datetime(2025, 1, 31, 12, tzinfo=UTC).astimezone().replace(tzinfo=None)
    assert parse_place(local.isoformat(), NOW_MS).value == 1_738_324_800_000


def test_age_that_reaches_before_1970_is_the_beginning_of_time() -> None:
    assert parse_place("-999999999w", NOW_MS) == Place(PlaceKind.TIME, 0)


@pytest.mark.parametrize("text", ["", "first", "-10y", "2025-13-01", "1.5", "--5", "10m"])
def test_anything_else_is_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="earliest, latest, an offset"):
        parse_place(text, NOW_MS)


def test_time_before_1970_is_refused() -> None:
    with pytest.raises(ValueError, match="1970"):
        parse_place("1969-12-31T00:00:00Z", NOW_MS)


@given(st.text(max_size=20))
def test_any_text_is_a_place_or_a_value_error(text: str) -> None:
    try:
        parse_place(text, NOW_MS)
    except ValueError as error:
        assert str(error)
