"""What a topic may be called: Kafka's rules. Clients check names by them, too, to say what is wrong."""

from __future__ import annotations

import re
from typing import Final

from tidemill.errors import ApiError, ErrorCode

__all__ = ("TOPIC_NAME_CHARACTERS_MAX", "check_topic_name")

TOPIC_NAME_CHARACTERS_MAX: Final = 249

_TOPIC_NAME = re.compile(r"[a-zA-Z0-9._-]+")


def check_topic_name(name: str) -> None:
    """Raise ``ApiError`` (INVALID_TOPIC_EXCEPTION) unless ``name`` can be a topic's name."""
    if not name:
        problem = "a topic name may not be empty"
    elif name in (".", ".."):
        problem = f"a topic may not be called {name!r}"
    elif len(name) > TOPIC_NAME_CHARACTERS_MAX:
        problem = f"topic name {name[:40]!r}... has {len(name)} characters, over {TOPIC_NAME_CHARACTERS_MAX}"
    elif not _TOPIC_NAME.fullmatch(name):
        problem = f"topic name {name!r} has characters other than letters, digits, '.', '_' and '-'"
    else:
        return
    raise ApiError(ErrorCode.invalid_topic_exception, problem)
