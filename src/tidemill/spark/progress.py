"""A stream's progress as the offsets of a group, so that its lag is seen where all lags are seen.

It is for people: what a query goes on from is its checkpoint. So a failure is logged and nothing else.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from tidemill.errors import ErrorCode, TidemillError
from tidemill.spark.connection import Connected
from tidemill.spark.positions import Place

__all__ = ("Progress",)

_logger = logging.getLogger(__name__)


class Progress:
    """Commits offsets of one group, those that have moved."""

    def __init__(self, link: Connected) -> None:
        self._link = link
        self._published: dict[Place, int] = {}
        self._is_foreign = False

    def publish(self, group: str, at: Mapping[Place, int]) -> None:
        """Everything before these offsets has been processed."""
        moved = {place: offset for place, offset in at.items() if self._published.get(place) != offset}
        if not moved or self._is_foreign:
            return
        # Late: most queries show no progress.
        from tidemill.client.group_admin import commit_offsets

        try:
            self._link.run(commit_offsets(self._link.cluster, group, moved))
        except TidemillError as error:
            self._is_foreign = error.code is ErrorCode.unknown_member_id
            reason = (
                "it has members of its own; give option groupId another name" if self._is_foreign else error
            )
            _logger.warning("the progress of the query is not shown as group %r: %s", group, reason)
        else:
            self._published |= moved
