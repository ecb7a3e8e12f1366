"""Every row of the table of APIs, with all handlers loaded."""

from __future__ import annotations

from tidemill.server.requests import api_table
from tidemill.wire.apis import APIS

__all__ = ("served_apis",)


def served_apis() -> dict[int, api_table.ServedApi]:
    """Every row by API key: the table itself, in which a test can put another row."""
    api_table.load_first()
    for api_key in APIS:
        api_table.load(api_key)
    return api_table._rows
