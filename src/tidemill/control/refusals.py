"""Refusals that rest on what there is: told only by an image that is as new as the store.

A node's image is a little older than the store. Somebody who has seen another node create a topic would be
told by this one that there is none. So before such a refusal the image is caught up, once for a request, and
what was asked is looked at again. Whatever happens on the way, the refusal was true at some moment between
the question and the answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from tidemill.errors import ApiError, ErrorCode, TableCode, TableError, TidemillError

__all__ = ("CatchUp", "rests_on_existence")

R = TypeVar("R")

_CODES: Final = frozenset(
    {
        ErrorCode.topic_already_exists,
        ErrorCode.unknown_topic_or_partition,
        ErrorCode.unknown_topic_id,
        ErrorCode.invalid_partitions,
    }
)
_TABLE_CODES: Final = frozenset(
    {
        TableCode.database_not_found,
        TableCode.database_already_exists,
        TableCode.database_not_empty,
        TableCode.table_not_found,
        TableCode.table_already_exists,
        TableCode.partition_not_found,
        TableCode.lease_not_found,
    }
)


def rests_on_existence(result: object) -> bool:
    """Whether an error is a refusal because something exists, or does not."""
    if isinstance(result, TableError):
        return result.table_code in _TABLE_CODES
    return isinstance(result, ApiError) and result.code in _CODES


class CatchUp:
    """Catches the image up for one request: when it is first needed, and not again."""

    def __init__(self, catch_up: Callable[[], Awaitable[None]]) -> None:
        self._catch_up = catch_up
        self._is_done = False
        self._failure: TidemillError | None = None

    async def once(self) -> bool:
        """Whether the image was caught up by this call. Raises ``TidemillError`` if it cannot be."""
        if self._failure is not None:
            raise self._failure
        if self._is_done:
            return False
        try:
            await self._catch_up()
        except TidemillError as error:
            self._failure = error
            raise
        self._is_done = True
        return True

    async def check(self, check: Callable[[], R]) -> R:
        """What ``check`` gives, or raises, by an image that is new enough for that."""
        try:
            return check()
        except ApiError as error:
            if not rests_on_existence(error) or not await self.once():
                raise
        return check()
