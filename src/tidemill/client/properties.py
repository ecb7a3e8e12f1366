"""Properties of databases and tables on their way into requests."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ("pairs",)


def pairs(properties: Mapping[str, str] | None) -> list[dict[str, str]]:
    """Properties as requests have them."""
    return [{"key": name, "value": str(value)} for name, value in (properties or {}).items()]
