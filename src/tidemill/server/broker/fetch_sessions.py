"""Incremental fetch sessions (KIP-227). Pure.

A client that polls many partitions names them once; later requests and answers speak only of what changed. A
session is a list of partitions with the fetch position of each, and an epoch that counts the requests.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from tidemill.coordination.metrics import Metric, gauge
from tidemill.errors import ApiError, ErrorCode

__all__ = (
    "FETCH_SESSION_METRICS",
    "FINAL_EPOCH",
    "INITIAL_EPOCH",
    "FetchSession",
    "FetchSessions",
    "SessionPartition",
)

INITIAL_EPOCH = 0
FINAL_EPOCH = -1
_EPOCH_MAX = 2**31 - 1

#: A topic by name (up to v12) or by id, and the partition.
PartitionName = tuple[str | UUID, int]


@dataclass(slots=True)
class SessionPartition:
    """A partition of a session: what the client wants of it, and what it was told last."""

    topic: str | UUID
    index: int
    fetch_offset: int
    max_bytes: int
    current_leader_epoch: int
    last_fetched_epoch: int
    told_high_watermark: int = -2
    told_log_start: int = -2


@dataclass(slots=True)
class FetchSession:
    """The fetch session of one client."""

    session_id: int
    epoch: int
    by_id: bool
    partitions: OrderedDict[PartitionName, SessionPartition] = field(default_factory=OrderedDict)

    def update(
        self, wanted: Iterable[SessionPartition], forgotten: Iterable[PartitionName]
    ) -> Iterator[None]:
        """Apply what a request adds to the session and removes from it, one partition at each step."""
        for name in forgotten:
            self.partitions.pop(name, None)
            yield
        for partition in wanted:
            known = self.partitions.get((partition.topic, partition.index))
            if known is None:
                self.partitions[partition.topic, partition.index] = partition
            else:
                known.fetch_offset = partition.fetch_offset
                known.max_bytes = partition.max_bytes
                known.current_leader_epoch = partition.current_leader_epoch
                known.last_fetched_epoch = partition.last_fetched_epoch
            yield

    def served(self, name: PartitionName) -> None:
        """Move a partition that gave records to the end, so that the others have their turn."""
        # A later request of the session may have forgotten it while this one waited.
        if name in self.partitions:
            self.partitions.move_to_end(name)


def next_epoch(epoch: int) -> int:
    """The epoch of the session's next request. 0 and -1 have meanings of their own and are left out."""
    return 1 if epoch == _EPOCH_MAX else epoch + 1


class FetchSessions:
    """All fetch sessions of a node; when there are too many, the one unused for longest is closed."""

    def __init__(self, limit: int, seed: int | None = None) -> None:
        self._limit = limit
        self._random = random.Random(seed)
        self._sessions: OrderedDict[int, FetchSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def open(self, *, by_id: bool) -> FetchSession | None:
        """A new session without partitions; None if sessions are switched off."""
        if self._limit == 0:
            return None
        while len(self._sessions) >= self._limit:
            self._sessions.popitem(last=False)
        session_id = self._random.randint(1, 2**31 - 1)
        while session_id in self._sessions:
            session_id = self._random.randint(1, 2**31 - 1)
        session = FetchSession(session_id, 1, by_id)
        self._sessions[session_id] = session
        return session

    def resume(self, session_id: int, epoch: int, *, by_id: bool) -> FetchSession:
        """The session of an incremental request. Raises ``ApiError`` if the client has to start over."""
        session = self._sessions.get(session_id)
        if session is None:
            raise ApiError(ErrorCode.fetch_session_id_not_found, f"there is no fetch session {session_id}")
        if session.epoch != epoch:
            raise ApiError(
                ErrorCode.invalid_fetch_session_epoch,
                f"fetch session {session_id} is at epoch {session.epoch}, the request says {epoch}",
            )
        if session.by_id != by_id:
            raise ApiError(
                ErrorCode.fetch_session_topic_id_error,
                f"fetch session {session_id} was opened with the other way of naming topics",
            )
        session.epoch = next_epoch(epoch)
        self._sessions.move_to_end(session_id)
        return session

    def close(self, session_id: int) -> None:
        self._sessions.pop(session_id, None)


FETCH_SESSION_METRICS: Final[Sequence[Metric[FetchSessions]]] = (
    gauge("tidemill_fetch_sessions", "Open fetch sessions.", len),
)
