"""Tables and rows as notebooks show them."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any, Final

from tidemill.tables.definition import TableDefinition
from tidemill.tables.rows.types import describe_type

__all__ = ("describe_html", "rows_html")

_SHOWN_ROWS: Final = 20


def describe_html(definition: TableDefinition) -> str:
    """A table's definition for notebooks."""
    rows = "".join(
        f"<tr><td>{html.escape(field.name)}</td><td>{html.escape(describe_type(field.type))}</td>"
        f"<td>{'' if field.nullable else 'not null'}</td>"
        f"<td>{'key' if field.name in definition.primary_key else ''}</td></tr>"
        for field in definition.schema
    )
    return (
        f"<b>{html.escape(definition.name)}</b> · {definition.buckets} buckets · "
        f"{html.escape(definition.row_format)}"
        f"<table><thead><tr><th>column</th><th>type</th><th></th><th></th></tr></thead><tbody>{rows}</tbody></table>"
    )


def rows_html(names: Sequence[str], batches: Iterable[Any]) -> str:
    """The first rows of some batches, for notebooks."""
    rows: list[dict[str, Any]] = []
    for batch in batches:
        rows += batch.to_pylist()
        if len(rows) >= _SHOWN_ROWS:
            break
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(row[name]))}</td>" for name in names) + "</tr>"
        for row in rows[:_SHOWN_ROWS]
    )
    note = f"<i>the first {_SHOWN_ROWS} rows</i>" if len(rows) >= _SHOWN_ROWS else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{note}"
