"""Small words of the commands about tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from tidemill.cli.output import plural
from tidemill.cli.tables.session import input_file, split_names, time_text
from tidemill.cli.tables.state_commands import parse_duration


@pytest.mark.parametrize(
    ("text", "duration_ms"),
    [("90s", 90_000), ("10m", 600_000), ("1d", 86_400_000), ("5ms", 5), ("2 hours", 7_200_000)],
)
def test_durations_have_a_number_and_a_unit(text: str, duration_ms: int) -> None:
    assert parse_duration(text) == duration_ms


@pytest.mark.parametrize("text", ["", "10", "0s", "-5m", "1y", "1.5h", "h"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="90s, 10m"):
        parse_duration(text)


def test_words_for_people() -> None:
    assert split_names(["a, b", "c", ","]) == ["a", "b", "c"]
    assert (plural(0, "row"), plural(1, "row"), plural(1234, "row")) == ("0 rows", "1 row", "1,234 rows")
    assert (time_text(0), time_text(-1)) == ("1970-01-01T00:00:00+00:00", None)


def test_input_is_a_file_that_can_be_read_or_stdin(tmp_path: Path) -> None:
    assert input_file("-", "FILE") == Path("-")
    for wrong in (tmp_path, tmp_path / "none"):
        with pytest.raises(typer.BadParameter):
            input_file(str(wrong), "FILE")
