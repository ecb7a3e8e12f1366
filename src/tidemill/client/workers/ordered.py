"""Options of ordered workers, and what their handlers can answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from tidemill.client.arguments import millis, whole
from tidemill.cursors.restarts import Once, RestartPolicy
from tidemill.errors import ApiError, ConfigError, ErrorCode

if TYPE_CHECKING:
    from tidemill.client.cursors.cursor import IfLost, Start

__all__ = ("Action", "Cadence", "Ordered", "WorkerFailed")


class Action(Enum):
    """What a handler answers. None, which a handler without ``return`` answers, is ``CONTINUE``."""

    CONTINUE = "continue"
    #: The record is done. Store that, and end.
    STOP = "stop"
    #: End at the position that was stored last: this record, and all since then, come again.
    STOP_WITH_ROLLBACK = "stop with rollback"


class WorkerFailed(ApiError):
    """The handler has failed more often than the worker's restart budget allows.

    ``__cause__`` is the handler's last error.
    """

    def __init__(self, message: str) -> None:
        super().__init__(ErrorCode.unknown_server_error, message)


def _ignore(_: Any) -> None:
    """Do nothing: the value of a callback that was not given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """How a worker reads in order, keeps its position, and goes on after an error.

    Attributes:
        batch_size: the most records that are polled at a time.
        checkpoint: where the position is kept: None for the cluster, a path for a file, a function that opens
            a database connection, or ``tidemill.IN_TRANSACTION``. With the last two the handler is called
            with the record and the connection, or an open transaction of the cursor; what it writes there
            commits together with the position. It ends no transaction itself.
        every_records: store the position after so many records, at the end of a batch; without this and
            ``every_seconds``, after each batch. Also when no more records have come for a while.
        every_seconds: store it after so many seconds; with both, whichever comes first. With a database or
            ``IN_TRANSACTION`` the position commits with what handlers write, so a worker without
            ``concurrency`` refuses both: there ``batch_size`` says how often.
        restart: how often the worker may go back to the stored position after its handler raised.
        attempts: with a dead-letter topic, how often a record is tried before it is parked.
        partitions: the partitions to read; None: all.
        own: of these, the ones that this process owns, when several share a name.
        key_prefix: only records whose key begins so.
        headers: only records that have these headers.
        where: only rows of a table that fit.
        start: where to begin if no position is stored.
        if_lost: where to go on in a partition whose log does not have the stored position any more:
            ``"earliest"`` or ``"latest"``; None: that ends the worker with an error.
        lease_ms: how long after the last sign of life of a process another may take over.
        standby: whether a worker that finds another process at its cursor waits for as long as that lives,
            and goes on when it ends or dies. Without it, it waits for the connection's timeout, or
            ``lease_ms`` if that is longer, and then ends with ``CursorInUse``.
        on_restart: called with the handler's error before the worker goes back.
        on_park: called with the record that goes to the dead-letter topic.
        on_failure: called with the error that ends the worker, which ``join`` raises.
    """

    batch_size: int = 64
    checkpoint: Any = None
    every_records: int | None = None
    every_seconds: float | None = None
    restart: RestartPolicy = field(default_factory=Once)
    attempts: int = 3
    partitions: Iterable[int] | None = None
    own: Iterable[int] | None = None
    key_prefix: bytes | str | None = None
    headers: Mapping[str, bytes | str | None] | None = None
    where: Any = None
    start: Start = "earliest"
    if_lost: IfLost | None = None
    lease_ms: int = 10_000
    standby: bool = False
    on_restart: Callable[[BaseException], None] = _ignore
    on_park: Callable[[Any], None] = _ignore
    on_failure: Callable[[BaseException], None] = _ignore

    def __post_init__(self) -> None:
        for name in ("batch_size", "attempts", "every_records"):
            value = getattr(self, name)
            if value is not None:
                whole(name, value, least=1)
        if not isinstance(self.restart, RestartPolicy):
            raise ConfigError(
                f"restart is tidemill.Once() or tidemill.Bounded(max_restarts, within_seconds=…), not "
                f"{self.restart!r}"
            )
        if self.every_seconds is not None and not millis("every_seconds", self.every_seconds):
            raise ConfigError(f"every_seconds is at least 0.001, not {self.every_seconds}")


class Cadence:
    """When a position is stored: after each batch, after so many records, after so much time. Pure.

    Side by side there are no batches: ``batch_size`` records are one.
    """

    def __init__(self, options: Ordered, now: float, *, side_by_side: bool = False) -> None:
        by_batch = options.every_records is None and options.every_seconds is None
        self._every_records = options.batch_size if by_batch and side_by_side else options.every_records
        self._every_seconds = options.every_seconds
        self._records = 0
        self._stored_at = now

    @property
    def is_pending(self) -> bool:
        """Whether records are done that are not stored."""
        return self._records > 0

    def done(self, records: int) -> None:
        """Count records that were handled since the position was last stored."""
        self._records += records

    def is_due(self, now: float, *, is_idle: bool = False) -> bool:
        """Whether the position is to be stored now, at the end of a batch, or because nothing has come."""
        if not self._records:
            return False
        if is_idle or (self._every_records is None and self._every_seconds is None):
            return True
        by_count = self._every_records is not None and self._records >= self._every_records
        return by_count or (self._every_seconds is not None and now - self._stored_at >= self._every_seconds)

    def seconds_left(self, now: float) -> float | None:
        """How long until it is due by time; None if it is not by time, or nothing is to be stored."""
        if not self._records or self._every_seconds is None:
            return None
        return max(0.0, self._stored_at + self._every_seconds - now)

    def stored(self, now: float) -> None:
        """Start counting anew: the position was stored at ``now``."""
        self._records = 0
        self._stored_at = now
