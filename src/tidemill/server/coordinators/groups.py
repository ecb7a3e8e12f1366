"""The row of the group coordinator: groups and committed offsets, in ``__consumer_offsets``."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from tidemill.control.image import GROUPS_TOPIC
from tidemill.coordination.metrics import gauges
from tidemill.server.coordinators.registry import CoordinatorRow
from tidemill.server.requests.authorization import GROUP

if TYPE_CHECKING:
    from tidemill.config.settings import Settings
    from tidemill.coordination.log import LogAccess
    from tidemill.groups.coordinator import GroupCoordinator
    from tidemill.groups.settings import GroupSettings
    from tidemill.server.broker.bundle import Broker

__all__ = ("GROUPS",)

_MINUTE_MS = 60_000
#: One batch holds everything that a heartbeat changes. In a group of very many topics that is little but the
#: ids of the same topics, several times, and larger than a batch may be.
_COMPRESS_ABOVE_BYTES = 256 * 1024


def _make(broker: Broker, logs: LogAccess) -> GroupCoordinator:
    from tidemill.groups.coordinator import GroupCoordinator
    from tidemill.groups.topics import ImageTopics

    topics = ImageTopics(lambda: broker.image)
    settings = replace(
        _settings(broker.settings),
        overrides_of=lambda group_id: broker.image.group_configs.get(group_id) or {},
    )
    return GroupCoordinator(logs, settings, broker.clock, topics, broker.ids, lambda: broker.persister)


def _settings(settings: Settings) -> GroupSettings:
    from tidemill.groups.settings import GroupSettings

    return GroupSettings(
        initial_rebalance_delay_ms=settings.group_initial_rebalance_delay_ms,
        min_session_timeout_ms=settings.group_min_session_timeout_ms,
        max_session_timeout_ms=settings.group_max_session_timeout_ms,
        max_size=settings.group_max_size,
        consumer_session_timeout_ms=settings.group_consumer_session_timeout_ms,
        consumer_heartbeat_interval_ms=settings.group_consumer_heartbeat_interval_ms,
        consumer_max_size=settings.group_consumer_max_size,
        share_session_timeout_ms=settings.group_share_session_timeout_ms,
        share_heartbeat_interval_ms=settings.group_share_heartbeat_interval_ms,
        share_max_size=settings.group_share_max_size,
        max_offset_metadata_size=settings.offset_metadata_max_bytes,
        offsets_retention_ms=settings.offsets_retention_minutes * _MINUTE_MS,
    )


GROUPS: Final = CoordinatorRow(
    name="groups",
    topic=GROUPS_TOPIC,
    key_type=0,
    resource=GROUP,
    partitions=lambda settings: settings.offsets_topic_partitions,
    make=_make,
    modules=("tidemill.groups.coordinator",),
    expire_interval_ms=10 * _MINUTE_MS,
    metrics=(
        gauges(
            "tidemill_group_memory_bytes",
            "About the memory that groups take: of members, and of committed offsets.",
            ("of",),
            lambda groups: [
                (("members",), groups.member_memory.taken_bytes),
                (("offsets",), groups.committed_memory.taken_bytes),
            ],
        ),
        gauges(
            "tidemill_group_memory_limit_bytes",
            "The most memory that groups may take: of members, and of committed offsets.",
            ("of",),
            lambda groups: [
                (("members",), groups.member_memory.limit_bytes),
                (("offsets",), groups.committed_memory.limit_bytes),
            ],
        ),
    ),
    compress_above_bytes=_COMPRESS_ABOVE_BYTES,
)
