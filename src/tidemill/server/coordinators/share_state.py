"""The row of the share coordinator: the state of share partitions, in ``__share_group_state``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidemill.control.image import SHARE_STATE_TOPIC
from tidemill.coordination.metrics import gauge
from tidemill.coordination.share_state import SharePartitionKey
from tidemill.server.coordinators.registry import CoordinatorRow
from tidemill.server.requests.authorization import GROUP

if TYPE_CHECKING:
    from tidemill.coordination.log import LogAccess
    from tidemill.server.broker.bundle import Broker
    from tidemill.share.state.coordinator import ShareStateCoordinator

__all__ = ("SHARE_STATE",)

#: Kafka's share.coordinator.state.topic.prune.interval.ms.
_PRUNE_INTERVAL_MS: Final = 5 * 60_000
_COMPRESS_ABOVE_BYTES: Final = 64 * 1024
_MIB: Final = 1024 * 1024


def _make(broker: Broker, logs: LogAccess) -> ShareStateCoordinator:
    from tidemill.share.state.coordinator import ShareStateCoordinator

    return ShareStateCoordinator(
        logs,
        broker.settings.share_state_updates_per_snapshot,
        broker.clock,
        lambda topic_id: topic_id in broker.image.topic_names_by_id,
    )


SHARE_STATE: Final = CoordinatorRow(
    name="share states",
    topic=SHARE_STATE_TOPIC,
    key_type=2,
    resource=GROUP,
    partitions=lambda settings: settings.share_state_topic_partitions,
    make=_make,
    modules=("tidemill.share.state.coordinator",),
    expire_interval_ms=_PRUNE_INTERVAL_MS,
    compress_above_bytes=_COMPRESS_ABOVE_BYTES,
    metrics=(
        gauge(
            "tidemill_share_states",
            "Share partitions whose state this node keeps.",
            lambda coordinator: coordinator.count(),
        ),
    ),
    resource_of=lambda key: SharePartitionKey.parse(key).group_id,
    # The last record of a key is not all of it, since updates are changes: the coordinator prunes the log.
    topic_configs={
        "cleanup.policy": "delete",
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "segment.bytes": str(16 * _MIB),
        "max.message.bytes": str(8 * _MIB),
    },
)
