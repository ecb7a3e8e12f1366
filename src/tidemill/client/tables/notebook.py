"""A table's definition for notebooks."""

from __future__ import annotations

import html

from tidemill.tables.definition import TableDefinition
from tidemill.tables.types import describe_type

__all__ = ("describe_html",)


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
