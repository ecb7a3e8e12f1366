"""Share sessions: the partitions that each member of a share group fetches, between its requests.

Rules (KIP-932):

- A session belongs to a group and a member. Epoch 0 opens it, or opens it anew; then requests count 1, 2, …,
  and wrap to 1; -1 closes it.
- It ends with the connection that opened it: nobody would be left to acknowledge what the member holds.
- There are so many sessions at most; the next member is refused, none is thrown out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from tidemill.errors import ApiError, ErrorCode

__all__ = (
    "FINAL_EPOCH",
    "INITIAL_EPOCH",
    "PARTITIONS_MAX",
    "SessionKey",
    "SessionPartition",
    "ShareSession",
    "ShareSessions",
)

PARTITIONS_MAX: Final = 5_000
"""The most partitions of one session, which keeps them in memory."""
_PARTITIONS_OF_ALL_MAX: Final = 500_000
"""The most partitions of all sessions of a node together."""
INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
_EPOCH_MAX: Final = 2**31 - 1


class SessionKey(NamedTuple):
    """Key of a share session: the group and the member that it belongs to."""

    group_id: str
    member_id: str


class SessionPartition(NamedTuple):
    """A topic's partition that a share session fetches."""

    topic_id: UUID
    partition: int


class ShareSession:
    """A share session: the partitions that one member fetches, and the epoch of its next request."""

    __slots__ = ("connection", "epoch", "is_closed", "key", "partitions", "turn")

    def __init__(self, key: SessionKey, connection: int) -> None:
        self.key = key
        self.connection = connection
        #: The epoch that the next request must have.
        self.epoch = 1
        self.is_closed = False
        self.partitions: dict[SessionPartition, None] = {}
        #: How many fetches there were: each begins with another partition.
        self.turn = 0

    def update(self, wanted: Iterable[SessionPartition], forgotten: Iterable[SessionPartition]) -> None:
        """Add partitions, and take others out. Raises INVALID_REQUEST, and changes nothing, for too many."""
        partitions = {**self.partitions, **dict.fromkeys(wanted)}
        for partition in forgotten:
            partitions.pop(partition, None)
        if len(partitions) > PARTITIONS_MAX:
            raise ApiError(
                ErrorCode.invalid_request,
                f"a share session may have {PARTITIONS_MAX} partitions; use another member for more",
            )
        self.partitions = partitions

    def in_turn(self) -> list[SessionPartition]:
        """All partitions; each call begins with the one after that with which the last call began.

        >>> session = ShareSession(SessionKey("g", "m"), 1)
        >>> session.update([SessionPartition(UUID(int=1), number) for number in range(3)], ())
        >>> [[each.partition for each in session.in_turn()] for _ in range(2)]
        [[0, 1, 2], [1, 2, 0]]
        """
        partitions = list(self.partitions)
        if not partitions:
            return []
        first = self.turn % len(partitions)
        self.turn += 1
        return partitions[first:] + partitions[:first]


class ShareSessions:
    """All share sessions of a node."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: dict[SessionKey, ShareSession] = {}
        self._by_group: dict[str, int] = {}
        self._by_connection: dict[int, dict[SessionKey, None]] = {}
        #: Partitions of all sessions, each counted as often as it is in one.
        self.partition_count = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def has_group(self, group_id: str) -> bool:
        """Whether any member of the group has a session."""
        return group_id in self._by_group

    def open(self, key: SessionKey, connection: int) -> ShareSession:
        """Begin a session; one that the member has is replaced. Raises SHARE_SESSION_LIMIT_REACHED."""
        if key not in self._sessions and len(self._sessions) >= self._limit:
            raise ApiError(
                ErrorCode.share_session_limit_reached,
                f"{self._limit} share sessions are open, as many as may be; try again when members have left",
            )
        self.close(key)
        session = ShareSession(key, connection)
        self._sessions[key] = session
        self._by_group[key.group_id] = self._by_group.get(key.group_id, 0) + 1
        self._by_connection.setdefault(connection, {})[key] = None
        return session

    def resume(self, key: SessionKey, epoch: int) -> ShareSession:
        """The member's session, for a request of this epoch: the next one has to follow.

        Raises SHARE_SESSION_NOT_FOUND or INVALID_SHARE_SESSION_EPOCH.
        """
        session = self.find(key)
        if epoch != session.epoch:
            raise ApiError(
                ErrorCode.invalid_share_session_epoch,
                f"the share session of member {key.member_id!r} is at epoch {session.epoch}, not {epoch}; "
                "open another one",
            )
        session.epoch = 1 if epoch == _EPOCH_MAX else epoch + 1
        return session

    def update(
        self,
        session: ShareSession,
        wanted: Sequence[SessionPartition],
        forgotten: Iterable[SessionPartition],
    ) -> None:
        """Add partitions to a session, and take others out. Raises ``ApiError`` for too many."""
        if self.partition_count + len(wanted) > _PARTITIONS_OF_ALL_MAX:
            raise ApiError(
                ErrorCode.share_session_limit_reached,
                f"the share sessions of this node have {self.partition_count} partitions, about as many as "
                "they may have; try again when members have left",
            )
        before = len(session.partitions)
        session.update(wanted, forgotten)
        self.partition_count += len(session.partitions) - before

    def find(self, key: SessionKey) -> ShareSession:
        """The member's session. Raises SHARE_SESSION_NOT_FOUND."""
        session = self._sessions.get(key)
        if session is None:
            raise ApiError(
                ErrorCode.share_session_not_found,
                f"member {key.member_id!r} of group {key.group_id!r} has no share session; open one",
            )
        return session

    def close(self, key: SessionKey) -> ShareSession | None:
        """End a session. The session if there was one."""
        session = self._sessions.pop(key, None)
        if session is None:
            return None
        session.is_closed = True
        self.partition_count -= len(session.partitions)
        left = self._by_group[key.group_id] - 1
        if left:
            self._by_group[key.group_id] = left
        else:
            del self._by_group[key.group_id]
        of_connection = self._by_connection[session.connection]
        del of_connection[key]
        if not of_connection:
            del self._by_connection[session.connection]
        return session

    def of_connection(self, connection: int) -> list[SessionKey]:
        """The sessions that a connection has opened."""
        return list(self._by_connection.get(connection, ()))
