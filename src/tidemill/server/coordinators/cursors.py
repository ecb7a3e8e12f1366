"""The row of the coordinator of cursors: positions under names, in ``__cursors``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidemill.control.image import CURSORS_TOPIC
from tidemill.server.coordinators.registry import CoordinatorRow
from tidemill.server.requests.authorization import GROUP

if TYPE_CHECKING:
    from tidemill.coordination.log import LogAccess
    from tidemill.cursors.coordinator import CursorCoordinator
    from tidemill.server.broker.bundle import Broker

__all__ = ("CURSORS",)

_HOUR_MS: Final = 3_600_000
#: A cursor over very many partitions says nearly the same of each.
_COMPRESS_ABOVE_BYTES: Final = 64 * 1024


def _make(broker: Broker, logs: LogAccess) -> CursorCoordinator:
    from tidemill.cursors.coordinator import CursorCoordinator

    return CursorCoordinator(logs, broker.clock)


CURSORS: Final = CoordinatorRow(
    name="cursors",
    topic=CURSORS_TOPIC,
    key_type=100,
    resource=GROUP,
    partitions=lambda settings: settings.cursors_topic_partitions,
    make=_make,
    modules=("tidemill.cursors.coordinator",),
    expire_interval_ms=_HOUR_MS,
    compress_above_bytes=_COMPRESS_ABOVE_BYTES,
)
