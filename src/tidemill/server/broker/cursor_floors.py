"""Retention and cursors: a warning before it deletes what a cursor has not read, or waiting for that cursor.

Before each retention the coordinators of cursors are asked where their cursors stand, also on other nodes. A
topic with ``tidemill.retention.waits.for.cursors`` keeps what its slowest cursor has not read; unless every
shard of ``__cursors`` was looked at by a coordinator that leads it, such a topic keeps everything until the
next time. For other topics there is a warning, some time before the records go, and a number among the
metrics.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple
from uuid import UUID

from tidemill.control.image import CURSORS_TOPIC
from tidemill.coordination.metrics import Metric, gauge
from tidemill.coordination.turns import pause_after
from tidemill.errors import TidemillError
from tidemill.net.answers import checked

if TYPE_CHECKING:
    from tidemill.replication.partition import Partition
    from tidemill.server.broker.bundle import Broker

__all__ = ("CURSOR_RETENTION_METRICS", "NO_FLOOR", "CursorFloors")

NO_FLOOR: Final = 2**63 - 1
#: A warning comes so much of a topic's retention before the records go.
_WARNED_AHEAD_PARTS: Final = 10
_CURSORS_PER_TURN: Final = 200
_WARNINGS_REMEMBERED: Final = 10_000

logger = logging.getLogger(__name__)


class _Slowest(NamedTuple):
    offset: int
    cursor: str


class CursorFloors:
    """The slowest cursor of each partition, as of the last time that they were asked for."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._slowest: dict[tuple[UUID, int], _Slowest] = {}
        #: Whether every shard was looked at.
        self._is_complete = True
        self._warned: set[tuple[object, ...]] = set()
        self._at_risk: set[tuple[UUID, int]] = set()

    @property
    def at_risk(self) -> int:
        """How many partitions have records that retention deletes soon, and a cursor has not read."""
        return len(self._at_risk)

    async def refresh(self) -> None:
        """Ask all coordinators where their cursors stand."""
        self._slowest, self._is_complete = {}, True
        self._at_risk.clear()
        topic = self._broker.image.topics.get(CURSORS_TOPIC)
        if topic is None:
            return
        # A node that does not lead a shard any more says nothing of it, and that is not an error.
        left = set(range(len(topic.partitions)))
        for node_id in sorted({each.leader for each in topic.partitions}):
            try:
                left -= await self._ask(node_id)
            except TidemillError as error:
                logger.info("where the cursors of node %d stand is not known: %s", node_id, error.message)
        self._is_complete = not left

    async def _ask(self, node_id: int) -> set[int]:
        """Note where the cursors of a node stand; gives the shards in which it has looked."""
        broker = self._broker
        if node_id == broker.node_id:
            listed = await broker.cursors.listing()
            for number, (name, about, held) in enumerate(listed.cursors, start=1):
                positions = ((partition, each.position.offset) for partition, each in held.items())
                self._note(name, about.topic_id, positions)
                await pause_after(number, _CURSORS_PER_TURN)
            return set(listed.shards)
        answer = checked(await broker.ask_node(node_id, "ListCursors", 0, {"topic": None}), "listing cursors")
        for number, cursor in enumerate(answer.cursors, start=1):
            self._note(
                cursor.name, cursor.topic_id, ((each.partition, each.offset) for each in cursor.partitions)
            )
            await pause_after(number, _CURSORS_PER_TURN)
        return set(answer.shards)

    def _note(self, cursor: str, topic_id: UUID, positions: Iterable[tuple[int, int]]) -> None:
        for partition, offset in positions:
            known = self._slowest.get((topic_id, partition))
            if known is None or offset < known.offset:
                self._slowest[topic_id, partition] = _Slowest(offset, cursor)

    def floor(self, partition: Partition, now_ms: int) -> int:
        """The offset from which retention has to keep everything for cursors; warns of what it deletes."""
        waits = partition.config.tidemill_retention_waits_for_cursors
        if waits and not self._is_complete:
            return partition.log_start_offset
        slowest = self._slowest.get((partition.topic_id, partition.index))
        if slowest is None:
            return NO_FLOOR
        if waits:
            return slowest.offset
        self._warn(partition, slowest, now_ms)
        return NO_FLOOR

    def _warn(self, partition: Partition, slowest: _Slowest, now_ms: int) -> None:
        config = partition.config
        ahead_ms = max(
            2 * self._broker.settings.log_retention_check_interval_ms,
            max(0, config.retention_ms) // _WARNED_AHEAD_PARTS,
        )
        start = partition.retention_start(now_ms + ahead_ms)
        if start is None or start <= slowest.offset:
            return
        self._at_risk.add((partition.topic_id, partition.index))
        warning = (slowest.cursor, partition.topic_id, partition.index, start)
        if warning in self._warned:
            return
        if len(self._warned) >= _WARNINGS_REMEMBERED:
            self._warned.clear()
        self._warned.add(warning)
        logger.warning(
            "retention deletes records of %s-%d soon that cursor %r has not read: it is at offset %d, and "
            "what goes ends at %d; let it catch up, raise retention.ms, or set "
            "tidemill.retention.waits.for.cursors",
            partition.topic,
            partition.index,
            slowest.cursor,
            slowest.offset,
            start,
        )


CURSOR_RETENTION_METRICS: Final[Sequence[Metric[CursorFloors]]] = (
    gauge(
        "tidemill_cursor_retention_risks",
        "Partitions in which retention soon deletes what a cursor has not read.",
        lambda floors: floors.at_risk,
    ),
)
