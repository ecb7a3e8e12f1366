"""Scan sessions of one node as a state machine: no clock, no I/O.

Rules:

- A session is opened by call 0. The next call has the number of the last one plus one; the last number again
  gives the same batch again, because it is read again from its first key, so a lost answer costs nothing.
- At most ``per_bucket`` sessions read one bucket and ``per_node`` all of them, and a client has a share of
  either (``coordination/fair_shares.py``), so that others can open some. A session whose last batch has been
  read gives its share back at once, and lingers until it is swept, so that even that batch can be asked for
  again. At most ``lingering`` do: what they read is held as long.
- A session that nobody asked for ``idle_ms`` has expired. Its id is remembered for twice that time, and so
  are those that a change of leader has ended: "it is over" and "it never was" are different answers.
- The caller that ends a session gets it back, and has to close what it reads (``resource``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tidemill.coordination.fair_shares import NOBODY, Client, Shares
from tidemill.errors import TableCode, TableError

__all__ = ("BucketKey", "ReadPlan", "ScanLimits", "ScanSession", "ScanSessions")

_IDS_REMEMBERED_MAX = 10_000


class BucketKey(NamedTuple):
    """A bucket by its stable numbers. The one table partition of an unpartitioned table has the number 0."""

    table_id: int
    partition_id: int
    bucket: int


@dataclass(frozen=True, slots=True)
class ScanLimits:
    """Limits of the number of sessions, and of their times."""

    per_bucket: int = 16
    per_node: int = 200
    idle_ms: int = 600_000
    #: How long the last batch of a finished session can be repeated, and how many such sessions there may be.
    linger_ms: int = 30_000
    lingering: int = 200


class ReadPlan(NamedTuple):
    """What one call reads: state keys from ``start`` on, at most ``rows_max`` rows (None: no limit).

    ``end`` is set when a batch is repeated: it ends exactly there.
    """

    start: bytes
    end: bytes | None
    rows_max: int | None
    is_repeat: bool


@dataclass(slots=True)
class ScanSession:
    """One scan of one bucket, as its server keeps it."""

    id: bytes
    bucket: BucketKey
    resource: Any
    used_ms: int
    #: The state key at which the next batch starts; None at the end.
    next_start: bytes | None
    rows_left: int | None
    last_sequence: int = -1
    batch_start: bytes = b""
    batch_end: bytes | None = None
    batch_rows_max: int | None = None
    #: The client that opened it.
    client: Client = NOBODY

    @property
    def is_drained(self) -> bool:
        return self.last_sequence >= 0 and self.next_start is None

    def plan(self, sequence: int) -> ReadPlan:
        """The plan of call ``sequence``. Raises ``TableError``, and then the session is as before."""
        if sequence == self.last_sequence:
            return ReadPlan(self.batch_start, self.batch_end, self.batch_rows_max, True)
        if self.is_drained:
            raise TableError(
                TableCode.unknown_scanner_id,
                f"the scan came to its end with call {self.last_sequence}; there is no call {sequence}",
            )
        if sequence != self.last_sequence + 1:
            raise TableError(
                TableCode.invalid_scan_request,
                f"the next call of this scan has number {self.last_sequence + 1}, not {sequence}; "
                f"{max(self.last_sequence, 0)} gives the last batch again",
            )
        assert self.next_start is not None
        return ReadPlan(self.next_start, None, self.rows_left, False)

    def advance(self, plan: ReadPlan, read_to: bytes | None, rows: int) -> None:
        """Note that the batch of ``plan`` went up to ``read_to`` (None: the end) and had that many rows."""
        if plan.is_repeat:
            return
        self.last_sequence += 1
        self.batch_start, self.batch_end, self.batch_rows_max = plan.start, read_to, plan.rows_max
        if self.rows_left is not None:
            self.rows_left -= rows
        self.next_start = None if self.rows_left == 0 else read_to


@dataclass(slots=True)
class _Ended:
    when_ms: int
    why: str


@dataclass(slots=True)
class ScanSessions:
    """All scan sessions of a node."""

    limits: ScanLimits = field(default_factory=ScanLimits)
    _sessions: dict[bytes, ScanSession] = field(default_factory=dict)
    #: The sessions that count towards the limits.
    _active: set[bytes] = field(default_factory=set)
    _shares: Shares = field(init=False)
    _bucket_shares: dict[BucketKey, Shares] = field(default_factory=dict)
    #: The sessions that have finished, the oldest first.
    _lingering: dict[bytes, None] = field(default_factory=dict)
    _ended: dict[bytes, _Ended] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._shares = Shares(self.limits.per_node)

    def __len__(self) -> int:
        return len(self._active)

    def count(self, bucket: BucketKey) -> int:
        """The number of the bucket's sessions that count towards the limits."""
        return len(self._bucket_shares.get(bucket, ()))

    def check_capacity(self, bucket: BucketKey, client: Client = NOBODY) -> None:
        """Raise ``TableError`` if the client may not open another session of ``bucket``."""
        of_bucket = self._bucket_shares.get(bucket) or Shares(self.limits.per_bucket)
        for shares, what, setting in (
            (of_bucket, f"of bucket {bucket.bucket}", "scan_sessions_per_bucket"),
            (self._shares, "on this node", "scan_sessions"),
        ):
            refusal = shares.refusal(client)
            if refusal is not None:
                raise TableError(
                    TableCode.too_many_scanners,
                    f"{shares.limit} scans {what} can be open at a time ({setting}), and {refusal}; "
                    "close one, or try again later",
                )

    def open(self, session: ScanSession) -> None:
        """Add a session. Raises ``TableError`` if the client may not open it."""
        self.check_capacity(session.bucket, session.client)
        self._sessions[session.id] = session
        self._active.add(session.id)
        self._shares.take(session.client)
        shares = self._bucket_shares.setdefault(session.bucket, Shares(self.limits.per_bucket))
        shares.take(session.client)

    def get(self, scanner_id: bytes, now_ms: int) -> ScanSession:
        """The session, which counts as used now. Raises ``TableError`` if there is none."""
        session = self._sessions.get(scanner_id)
        if session is not None:
            session.used_ms = now_ms
            return session
        ended = self._ended.get(scanner_id)
        if ended is not None:
            raise TableError(TableCode.scanner_expired, f"the scan is over: {ended.why}; start it again")
        raise TableError(
            TableCode.unknown_scanner_id, "this node knows no such scan; it may have been started again since"
        )

    def answered(self, session: ScanSession) -> list[ScanSession]:
        """Let a session that has finished give its share back and linger. Called after ``advance``.

        Gives the sessions that cannot linger any longer because of it.
        """
        if not session.is_drained or session.id not in self._sessions:
            return []
        self._give_share_back(session)
        self._lingering.setdefault(session.id)
        excess = list(self._lingering)[: max(0, len(self._lingering) - self.limits.lingering)]
        return [gone for gone in map(self._remove, excess) if gone is not None]

    def close(self, scanner_id: bytes) -> ScanSession | None:
        """End a session; gives it, or None if there is none."""
        return self._remove(scanner_id)

    def end_bucket(self, bucket: BucketKey, why: str, now_ms: int) -> list[ScanSession]:
        """End all sessions of a bucket, and remember why."""
        return self._end([s for s in self._sessions.values() if s.bucket == bucket], why, now_ms)

    def sweep(self, now_ms: int) -> list[ScanSession]:
        """End sessions that have been idle for too long, and forget ids that ended long ago."""
        limits = self.limits
        drained = [
            session.id
            for session in self._sessions.values()
            if session.is_drained and now_ms - session.used_ms >= limits.linger_ms
        ]
        gone = [session for session in map(self._remove, drained) if session is not None]
        idle = [s for s in self._sessions.values() if now_ms - s.used_ms >= limits.idle_ms]
        gone += self._end(idle, f"it was idle for {limits.idle_ms} ms", now_ms)
        for scanner_id, ended in list(self._ended.items()):
            if now_ms - ended.when_ms < 2 * limits.idle_ms and len(self._ended) <= _IDS_REMEMBERED_MAX:
                break
            del self._ended[scanner_id]
        return gone

    def _end(self, sessions: list[ScanSession], why: str, now_ms: int) -> list[ScanSession]:
        for session in sessions:
            self._remove(session.id)
            self._ended[session.id] = _Ended(now_ms, why)
        return sessions

    def _remove(self, scanner_id: bytes) -> ScanSession | None:
        session = self._sessions.pop(scanner_id, None)
        self._lingering.pop(scanner_id, None)
        if session is not None:
            self._give_share_back(session)
        return session

    def _give_share_back(self, session: ScanSession) -> None:
        if session.id in self._active:
            self._active.remove(session.id)
            self._shares.give_back(session.client)
            shares = self._bucket_shares[session.bucket]
            shares.give_back(session.client)
            if not len(shares):
                del self._bucket_shares[session.bucket]
