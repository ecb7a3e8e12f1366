"""A stream that takes over from a durable cursor, and hands its progress back to it (option ``cursor``).

A new query begins where the cursor stands; one that goes on begins where its own checkpoint says. Every batch
that is done moves the cursor behind it. So work can go from a cursor to Spark and back, without a gap. What a
query goes on from stays its checkpoint: a cursor that cannot be moved is logged, and nothing else.

Partitions that the cursor's region has, and the cursor has not begun, begin where the query is; others are
not the cursor's. Records that a worker has finished out of order, above the position, are processed again by
the query: it begins at an offset. They stay finished for the cursor until its position is behind them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from tidemill.client.cursors.admin import (
    CursorInfo,
    add_partitions,
    describe_cursor,
    reset_cursor,
    stored_entries,
)
from tidemill.cursors.checkpoint import Entry
from tidemill.cursors.position import FINISHED_AHEAD_MAX, NO_EPOCH, Position
from tidemill.cursors.region import Region
from tidemill.errors import TidemillError
from tidemill.spark.errors import InvalidOption
from tidemill.spark.reading.edges import resolve
from tidemill.spark.reading.options import Edge
from tidemill.spark.reading.positions import TopicPartition

if TYPE_CHECKING:
    from tidemill.spark.connection import Connected

__all__ = ("StreamCursor",)

_logger = logging.getLogger(__name__)


class StreamCursor:
    """The cursor that a stream was given."""

    def __init__(self, link: Connected, name: str) -> None:
        self._link = link
        self._name = name
        self._moved: dict[int, int] = {}
        #: The cursor as it was before this query has moved it, and by partition what is finished.
        self._found: tuple[CursorInfo, dict[int, tuple[int, ...]]] | None = None

    async def begin(
        self, partitions: Collection[TopicPartition], now_ms: int
    ) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
        """Where the cursor stands in the partitions of the stream, and the leader epochs of its positions.

        Raises ``CursorNotFound``.
        """
        info, entries = await self._find()
        topics = {topic for topic, _ in partitions}
        if topics != {info.topic}:
            raise InvalidOption(
                f"cursor {self._name!r} is over {info.topic!r}, and this stream reads "
                f"{', '.join(sorted(topics)) or 'nothing'}: give it a cursor over the same topic"
            )
        if not info.is_position_kept:
            raise InvalidOption(
                f"cursor {self._name!r} keeps its position in a {info.home.name.lower()}, where a stream can "
                "neither read nor move it: give it one that the cluster keeps"
            )
        if info.owners:
            raise InvalidOption(
                f"cursor {self._name!r} is in use by {', '.join(info.owners)}; stop that first, so that "
                "nothing is processed twice"
            )
        again = sum(len(entry.finished) for entry in entries.values())
        if again:
            _logger.warning(
                "%d records ahead of the position of cursor %r are processed already, and will be again",
                again,
                self._name,
            )
        # Partitions that were added later are read from their beginning, as the cursor would.
        start = await resolve(self._link.cluster, list(partitions), Edge("earliest"), now_ms)
        stands = {
            (info.topic, number): entry.position
            for number, entry in entries.items()
            if (info.topic, number) in start
        }
        at = start | {partition: position.offset for partition, position in stands.items()}
        epochs = {partition: position.leader_epoch for partition, position in stands.items()}
        return at, {partition: epoch for partition, epoch in epochs.items() if epoch >= 0}

    async def _find(self) -> tuple[CursorInfo, dict[int, Entry]]:
        info = await describe_cursor(self._link.cluster, self._name)
        entries = await stored_entries(self._link.cluster, info)
        self._found = info, {number: entry.finished for number, entry in entries.items()}
        return info, entries

    def move(self, at: Mapping[TopicPartition, int], epochs: Mapping[TopicPartition, int]) -> None:
        """Move the cursor to where everything is processed; ``epochs`` of those positions, where known."""
        changed = {each: offset for each, offset in at.items() if self._moved.get(each[1]) != offset}
        if not changed:
            return
        try:
            self._link.run(self._move(changed, epochs))
        except (TidemillError, ValueError) as error:
            # It may be another one by now, with other partitions.
            self._found = None
            _logger.warning("the progress of the query is not handed to cursor %r: %s", self._name, error)
        else:
            self._moved |= {number: offset for (_, number), offset in changed.items()}

    async def _move(self, at: Mapping[TopicPartition, int], epochs: Mapping[TopicPartition, int]) -> None:
        cluster = self._link.cluster
        if self._found is None:
            await self._find()
        assert self._found is not None
        info, known = self._found
        region = Region.from_identity(info.identity)
        offsets = {
            number: offset
            for (topic, number), offset in at.items()
            if topic == info.topic and region.has_partition(number)
        }
        behind = {
            number: Position(offset, epochs.get((info.topic, number), NO_EPOCH), started=True)
            for number, offset in offsets.items()
        }
        new = {each: position for each, position in behind.items() if each not in known}
        if new:
            await add_partitions(cluster, info, new)
            self._found = None  # They are known now.
        set_anew = {each: position for each, position in behind.items() if each in known}
        if set_anew:
            finished = {each: _above(offsets[each], known[each]) for each in set_anew}
            await reset_cursor(cluster, self._name, set_anew, finished=finished)


def _above(offset: int, finished: Iterable[int]) -> list[int]:
    """What is still finished above a position that has moved to ``offset``."""
    return [each for each in finished if offset <= each < offset + FINISHED_AHEAD_MAX]
