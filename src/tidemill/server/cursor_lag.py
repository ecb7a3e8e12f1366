"""Lag of cursors: how many offsets each is behind, and for how long it has stored nothing although it is.

Measured when somebody asks, for the cursors that this node coordinates, in short turns of the event loop.
Rules:

- A partition is not opened for it. The end of an open one is its last stable offset; of a closed one it is
  the high watermark, as with consumer groups (``HighWatermarks``).
- A cursor has no lag if the end of one of its partitions is not known here: this node does not hold it, or it
  is stopped. A sum over the others would look like the lag of all.
- The number of series is bounded. What is left out is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from tidemill.control.image import CURSORS_TOPIC
from tidemill.coordination.metrics import Metric, counters, gauge, gauges
from tidemill.coordination.turns import begin_slice, give_way
from tidemill.errors import TidemillError
from tidemill.server.lag import HighWatermarks

if TYPE_CHECKING:
    from tidemill.cursors.state import Held
    from tidemill.cursors.stored import StoredCursor
    from tidemill.replication.replicas import PartitionKey
    from tidemill.server.broker.bundle import Broker

__all__ = ("CURSOR_METRICS", "CursorLag", "CursorLagReport")


@dataclass(slots=True)
class CursorLagReport:
    """The lag of every cursor of this node at about one moment, at most ``series_max`` of them."""

    series_max: int
    cursors: int = 0
    paused: int = 0
    left_out: int = 0
    records: dict[tuple[str, str], int] = field(default_factory=dict)
    seconds: dict[tuple[str, str], float] = field(default_factory=dict)
    passed: dict[tuple[str, str], int] = field(default_factory=dict)

    def add(self, cursor: str, topic: str, lag: tuple[int, float] | None, passed: int) -> None:
        """Add a cursor with its lag in records and in seconds, or None if that is not known."""
        if len(self.passed) >= self.series_max:
            self.left_out += 1
            return
        self.passed[cursor, topic] = passed
        if lag is not None:
            self.records[cursor, topic], self.seconds[cursor, topic] = lag


CURSOR_METRICS: Final[Sequence[Metric[CursorLagReport]]] = (
    gauge("tidemill_cursors", "Cursors that this node coordinates.", lambda report: report.cursors),
    gauge("tidemill_cursors_paused", "Cursors that are paused.", lambda report: report.paused),
    gauge(
        "tidemill_cursor_lag_series_left_out",
        "Cursors whose lag is not shown: more than lag_series_max.",
        lambda report: report.left_out,
    ),
    gauges(
        "tidemill_cursor_lag_records",
        "Last stable offset minus stored position, over all partitions; none if an end is not known.",
        ("cursor", "topic"),
        lambda report: report.records.items(),
    ),
    gauges(
        "tidemill_cursor_lag_seconds",
        "Seconds since a cursor that is behind has stored its position; 0 for one that is not behind.",
        ("cursor", "topic"),
        lambda report: report.seconds.items(),
    ),
    counters(
        "tidemill_cursor_passed_total",
        "Offsets that a cursor's commits have passed, since this node coordinates it.",
        ("cursor", "topic"),
        lambda report: report.passed.items(),
    ),
)


class CursorLag:
    """Measures the lag of all cursors that this node coordinates."""

    def __init__(self, broker: Broker, series_max: int) -> None:
        self._broker = broker
        self._series_max = series_max
        self._watermarks = HighWatermarks(broker.replicas)

    async def measure(self) -> CursorLagReport:
        """Compare stored positions with the ends of partitions, now."""
        report = CursorLagReport(self._series_max)
        broker = self._broker
        if CURSORS_TOPIC not in broker.image.topics:
            return report
        try:
            listed = (await broker.cursors.listing()).cursors
        except TidemillError:
            return report  # Its damage is told elsewhere.
        await self._watermarks.look_up(self._held_here(listed))
        begin_slice()
        passed = broker.cursors.passed()
        for name, about, held in listed:
            report.cursors += 1
            report.paused += about.paused
            report.add(name, about.topic, self._lag(about, held), passed.get(name, 0))
            await give_way()
        return report

    def _held_here(
        self, listed: Iterable[tuple[str, StoredCursor, Mapping[int, Held]]]
    ) -> Iterator[tuple[PartitionKey, str]]:
        """The partitions of cursors of which this node is a replica, with the names of their topics."""
        for _, about, held in listed:
            for index in held:
                placement = self._broker.find.held_placement(about.topic_id, index)
                if placement is not None:
                    yield (about.topic_id, index), placement.topic

    def _lag(self, about: StoredCursor, held: Mapping[int, Held]) -> tuple[int, float] | None:
        """Records and seconds that a cursor is behind; None if the end of a partition is not known."""
        now_ms = self._broker.clock.now_ms()
        records, seconds = 0, 0.0
        for index, (position, _) in held.items():
            end = self._end((about.topic_id, index))
            if end is None:
                return None
            behind = max(0, end - position.offset)
            records += behind
            if behind:
                seconds = max(seconds, (now_ms - position.committed_ms) / 1000)
        return records, seconds

    def _end(self, key: PartitionKey) -> int | None:
        partition = self._broker.replicas.peek(*key)
        if partition is not None and partition.failure is None:
            return partition.last_stable_offset
        return self._watermarks.of(key)
