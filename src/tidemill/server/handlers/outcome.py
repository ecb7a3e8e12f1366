"""The outcome of one item of a request, as the two fields that most responses have for it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any, TypeVar

from tidemill.errors import ApiError, ErrorCode, TidemillError

__all__ = ("outcome", "refused", "repeated")

K = TypeVar("K", bound=Hashable)

#: Names in messages come from clients, and the old string format ends at 32767 bytes.
_MESSAGE_CHARACTERS_MAX = 1_000


def outcome(error: TidemillError | None) -> dict[str, Any]:
    """``error_code`` and ``error_message`` of an item that failed with ``error``, or that did not fail.

    >>> outcome(refused("no partition is named"))["error_message"]
    'no partition is named'
    """
    if error is None:
        return {"error_code": ErrorCode.none, "error_message": None}
    return {"error_code": error.code, "error_message": error.message[:_MESSAGE_CHARACTERS_MAX]}


def refused(message: str) -> ApiError:
    """The error of an item that makes no sense: INVALID_REQUEST."""
    return ApiError(ErrorCode.invalid_request, message)


def repeated(names: Iterable[K]) -> set[K]:
    """The names that occur more than once."""
    once: set[K] = set()
    twice: set[K] = set()
    for name in names:
        (twice if name in once else once).add(name)
    return twice
