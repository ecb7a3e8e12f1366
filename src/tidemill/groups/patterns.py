"""Subscriptions by pattern: a regular expression in RE2's dialect, which is Kafka's, matched on the server.

RE2 matches in time that grows with the length of the name only, whatever the pattern; a backtracking engine
could be stopped dead by one client. The pattern's length and the memory for its automaton are bounded too.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from tidemill.errors import ErrorCode
from tidemill.groups.consumer.messages import Refused

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ("check_pattern", "matching_topics")

_LONGEST_PATTERN: Final = 2_048
_AUTOMATON_BYTES_MAX: Final = 4 * 1024 * 1024


def check_pattern(pattern: str) -> None:
    """Raise ``Refused`` INVALID_REGULAR_EXPRESSION if the pattern cannot be used."""
    if len(pattern) > _LONGEST_PATTERN:
        raise Refused(
            ErrorCode.invalid_regular_expression,
            f"a pattern of {len(pattern)} characters is too long; {_LONGEST_PATTERN} are allowed",
        )
    _compiled(pattern)


def matching_topics(pattern: str, names: Iterable[str]) -> frozenset[str]:
    """The names that the whole pattern matches. Raises ``Refused`` like ``check_pattern``."""
    matches = _compiled(pattern).fullmatch
    return frozenset(name for name in names if matches(name) is not None)


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> Any:
    # Loaded on first use: most nodes never meet a pattern.
    import re2  # type: ignore[import-untyped]

    options = re2.Options()
    options.log_errors = False
    options.max_mem = _AUTOMATON_BYTES_MAX
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode(errors="replace") if error.args else "it cannot be compiled"
        raise Refused(
            ErrorCode.invalid_regular_expression,
            f"the pattern {pattern[:200]!r} is not valid in RE2's syntax: {reason}",
        ) from error
