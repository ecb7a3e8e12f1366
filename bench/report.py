"""The report of a run: tables and aims, for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.table import Table as RichTable

__all__ = ("Aim", "Section", "as_markdown", "replace_generated_part", "rich_table")

BEGIN = "<!-- begin: python -m bench --write -->"
END = "<!-- end: python -m bench --write -->"


@dataclass(frozen=True, slots=True)
class Aim:
    """A promise, and what was measured for it."""

    what: str
    wanted: str
    measured: str
    met: bool


@dataclass(slots=True)
class Section:
    """The table of one benchmark. The first column names the row."""

    title: str
    columns: Sequence[str]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    note: str = ""
    aims: list[Aim] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        row = tuple(str(cell) for cell in cells)
        assert len(row) == len(self.columns), f"{row} does not fit the columns {self.columns}"
        self.rows.append(row)


def rich_table(section: Section) -> RichTable:
    table = RichTable(title=section.title, title_justify="left")
    for place, column in enumerate(section.columns):
        table.add_column(column, justify="left" if place == 0 else "right")
    for row in section.rows:
        table.add_row(*row)
    return table


def as_markdown(sections: Sequence[Section], preamble: Sequence[str]) -> str:
    """The page as Markdown: the aims first, then every table."""
    lines = [*preamble, ""]
    aims = [aim for section in sections for aim in section.aims]
    if aims:
        lines += ["## Aims", ""]
        lines += _table(
            ("aim", "wanted", "measured", ""),
            [(aim.what, aim.wanted, aim.measured, "met" if aim.met else "**not met**") for aim in aims],
        )
    for section in sections:
        lines += [f"## {section.title}", ""]
        if section.note:
            lines += [section.note, ""]
        lines += _table(section.columns, section.rows)
    return "\n".join(lines)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---"] + ["---:"] * (len(columns) - 1)
    return ["| " + " | ".join(row) + " |" for row in (columns, rule, *rows)] + [""]


def replace_generated_part(page: Path, text: str) -> None:
    """Put ``text`` between the two comment lines of ``page`` that enclose generated text; the rest stays."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{page} has no lines {BEGIN!r} and {END!r} to write between; put them back")
    page.write_text(f"{before}{BEGIN}\n\n{text.strip()}\n\n{END}{after}")
