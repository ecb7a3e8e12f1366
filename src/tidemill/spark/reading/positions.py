"""Positions of a stream: what Spark stores as its offset, and what lies between two of them. Pure.

- ``at`` is the next offset of every topic partition. ``epochs`` has the leader epoch that wrote the record
  right below it, as far as that is known: by it a log that was cut is noticed (``histories``).
- Spark does not store where a query began: when the first batch is run again, it asks anew, and the answer
  may be another one. So the end of the first batch says by itself where it ``began``; and so does that of a
  batch that goes back, because a log was cut or made anew, and the option failOnDataLoss allows it.
- A stream of a table begins with the rows of a snapshot, which a lease keeps. ``left`` says from which key on
  each bucket still has to be read; a bucket that is not there is done. The offset at which the last rows of
  the snapshot have been read still names the lease, so that its batch can be run again. ``at`` does not move
  meanwhile: it is where the snapshot ends and the changes begin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tidemill.config.values import TopicPartition
from tidemill.spark.errors import InvalidOption

__all__ = ("BucketRange", "LogRange", "SnapshotPosition", "StreamPosition", "TopicPartition", "between")

#: A topic and the number of a partition.
_VERSION = 1


@dataclass(frozen=True, slots=True)
class SnapshotPosition:
    """The position in the snapshot of a lease: which keys are left to read."""

    lease: str
    left: Mapping[TopicPartition, bytes]


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """An offset of a stream. ``run`` names the query: it is made once and never changes."""

    run: str
    at: Mapping[TopicPartition, int] = field(default_factory=dict)
    began: Mapping[TopicPartition, int] | None = None
    snapshot: SnapshotPosition | None = None
    is_new: bool = False
    epochs: Mapping[TopicPartition, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The position as Spark stores it; equal positions give equal texts."""
        if self.is_new:
            return {"tidemill": _VERSION, "run": self.run}
        value: dict[str, Any] = {"tidemill": _VERSION, "run": self.run, "at": _nested(self.at)}
        if self.epochs:
            value["epochs"] = _nested(self.epochs)
        if self.began is not None:
            value["began"] = _nested(self.began)
        if self.snapshot is not None:
            left = {partition: key.hex() for partition, key in self.snapshot.left.items()}
            value["snapshot"] = {"lease": self.snapshot.lease, "left": _nested(left)}
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> StreamPosition:
        """Read a stored position. Raises ``InvalidOption`` if another source or a newer Tidemill made it."""
        if value.get("tidemill") != _VERSION or "run" not in value:
            raise InvalidOption(
                "the checkpoint holds offsets of another source, or of a newer Tidemill: start the query "
                "with a "
                "checkpoint folder of its own"
            )
        if "at" not in value:
            return cls(value["run"], is_new=True)
        snapshot = value.get("snapshot")
        return cls(
            value["run"],
            {partition: int(offset) for partition, offset in _flat(value["at"]).items()},
            None if "began" not in value else {p: int(o) for p, o in _flat(value["began"]).items()},
            None
            if snapshot is None
            else SnapshotPosition(
                snapshot["lease"], {p: bytes.fromhex(key) for p, key in _flat(snapshot["left"]).items()}
            ),
            # Checkpoints of older versions have none.
            epochs={p: int(epoch) for p, epoch in _flat(value.get("epochs", {})).items()},
        )


class LogRange(NamedTuple):
    """Records of one partition, from an offset up to another."""

    topic: str
    partition: int
    start: int
    end: int


class BucketRange(NamedTuple):
    """Rows of one bucket of a snapshot, from a state key up to another; None is its end."""

    topic: str
    bucket: int
    start_key: bytes
    end_key: bytes | None


def between(start: StreamPosition, end: StreamPosition) -> tuple[list[LogRange], list[BucketRange]]:
    """The ranges of logs and of buckets that a batch from ``start`` to ``end`` reads.

    >>> start, end = StreamPosition("r", {("t", 0): 3}), StreamPosition("r", {("t", 0): 5, ("t", 1): 2})
    >>> between(start, end)[0]
    [LogRange(topic='t', partition=0, start=3, end=5), LogRange(topic='t', partition=1, start=0, end=2)]
    """
    origin = start.at if end.began is None else end.began
    logs = [
        LogRange(*partition, origin.get(partition, 0), offset)
        for partition, offset in sorted(end.at.items())
        if offset > origin.get(partition, 0)
    ]
    return logs, _rows_between(start, end)


def _rows_between(start: StreamPosition, end: StreamPosition) -> list[BucketRange]:
    if end.snapshot is None:
        return []
    if end.began is None and start.snapshot is not None and start.snapshot.lease == end.snapshot.lease:
        before = start.snapshot.left
    else:
        before = dict.fromkeys(end.at, b"")
    after = end.snapshot.left
    return [
        BucketRange(*partition, key, after.get(partition))
        for partition, key in sorted(before.items())
        if after.get(partition) != key
    ]


def _nested(values: Mapping[TopicPartition, Any]) -> dict[str, dict[str, Any]]:
    topics: dict[str, dict[str, Any]] = {}
    for (topic, number), value in sorted(values.items()):
        topics.setdefault(topic, {})[str(number)] = value
    return topics


def _flat(topics: Mapping[str, Mapping[str, Any]]) -> dict[TopicPartition, Any]:
    return {
        (topic, int(number)): value for topic, entries in topics.items() for number, value in entries.items()
    }
