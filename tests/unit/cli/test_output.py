"""Tables without a terminal, and sizes for people."""

from __future__ import annotations

import json

import pytest

from tidemill.cli.output import Table, human_bytes, progress, show
from tidemill.cli.session import Format, Session

TABLE = Table(("name", "count"), [("a", 5), ("longer", 1000), (None, 7)], title="things")


def test_without_a_terminal_a_table_is_aligned_text(capfd: pytest.CaptureFixture[str]) -> None:
    show(Session(), [], TABLE)
    assert capfd.readouterr().out == "things\nNAME    COUNT\na           5\nlonger   1000\n-           7\n"


def test_empty_table_shows_its_columns(capfd: pytest.CaptureFixture[str]) -> None:
    show(Session(), [], Table(("a", "b"), []))
    assert capfd.readouterr().out == "A  B\n"


def test_json_is_one_document_on_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    show(Session(format=Format.JSON), [{"name": "ü\n"}], TABLE)
    out = capfd.readouterr().out
    assert out.count("\n") == 1
    assert json.loads(out) == [{"name": "ü\n"}]


def test_progress_is_silent_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with progress("working", 2) as bar:
        bar.advance(2)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 * 1024**3, "5.0 GiB"), (3 * 1024**5, "3072.0 TiB")],
)
def test_sizes_are_written_for_people(size: int, text: str) -> None:
    assert human_bytes(size) == text
