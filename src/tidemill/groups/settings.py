"""Settings of the group coordinator. Those that a node can set have the node's defaults.

``tidemill.config.settings`` holds these defaults, and says where they are not Kafka's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tidemill.config.settings import Settings

__all__ = ("GroupSettings",)

_NODE: Final = Settings()
_MINUTE_MS: Final = 60_000
_NO_OVERRIDES: Final[Mapping[str, str]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Limits and times of groups. All times are in milliseconds; names in ``code`` are Kafka's.

    Attributes:
        initial_rebalance_delay_ms: ``group.initial.rebalance.delay.ms``: how long the first rebalance of an
            empty group waits for more members.
        min_session_timeout_ms: ``group.min.session.timeout.ms``.
        max_session_timeout_ms: ``group.max.session.timeout.ms``.
        max_size: ``group.max.size``: members per group.
        new_member_join_timeout_ms: how long a member that has never been in a generation may wait in a
            rebalance before it is dropped; its client may be gone without anybody noticing.
        max_offset_metadata_size: ``offset.metadata.max.bytes``: characters of text beside a committed offset.
        consumer_session_timeout_ms: ``group.consumer.session.timeout.ms``: how long a member of the new
            protocol may be silent.
        consumer_heartbeat_interval_ms: ``group.consumer.heartbeat.interval.ms``: how often it shall speak.
        consumer_max_size: ``group.consumer.max.size``: members per group of the new protocol.
        share_session_timeout_ms: ``group.share.session.timeout.ms``: how long a member of a share group may
            be silent.
        share_heartbeat_interval_ms: ``group.share.heartbeat.interval.ms``: how often it shall speak.
        share_max_size: ``group.share.max.size``: members per share group.
        offsets_retention_ms: how long offsets of a group without members are kept.
        overrides_of: the configs of a group that are not the node's, as text. Any thread may call it.
    """

    initial_rebalance_delay_ms: int = _NODE.group_initial_rebalance_delay_ms
    min_session_timeout_ms: int = _NODE.group_min_session_timeout_ms
    max_session_timeout_ms: int = _NODE.group_max_session_timeout_ms
    max_size: int = _NODE.group_max_size
    new_member_join_timeout_ms: int = 300_000
    max_offset_metadata_size: int = _NODE.offset_metadata_max_bytes
    consumer_session_timeout_ms: int = _NODE.group_consumer_session_timeout_ms
    consumer_heartbeat_interval_ms: int = _NODE.group_consumer_heartbeat_interval_ms
    consumer_max_size: int = _NODE.group_consumer_max_size
    share_session_timeout_ms: int = _NODE.group_share_session_timeout_ms
    share_heartbeat_interval_ms: int = _NODE.group_share_heartbeat_interval_ms
    share_max_size: int = _NODE.group_share_max_size
    offsets_retention_ms: int = _NODE.offsets_retention_minutes * _MINUTE_MS
    overrides_of: Callable[[str], Mapping[str, str]] = lambda group_id: _NO_OVERRIDES

    def session_timeout_ms_of(self, group_id: str) -> int:
        """How long a member of this group of the new protocol may be silent."""
        text = self.overrides_of(group_id).get("consumer.session.timeout.ms")
        return self.consumer_session_timeout_ms if text is None else int(text)

    def heartbeat_interval_ms_of(self, group_id: str) -> int:
        """How often a member of this group of the new protocol shall speak."""
        text = self.overrides_of(group_id).get("consumer.heartbeat.interval.ms")
        return self.consumer_heartbeat_interval_ms if text is None else int(text)

    def share_session_timeout_ms_of(self, group_id: str) -> int:
        """How long a member of this share group may be silent."""
        text = self.overrides_of(group_id).get("share.session.timeout.ms")
        return self.share_session_timeout_ms if text is None else int(text)

    def share_heartbeat_interval_ms_of(self, group_id: str) -> int:
        """How often a member of this share group shall speak."""
        text = self.overrides_of(group_id).get("share.heartbeat.interval.ms")
        return self.share_heartbeat_interval_ms if text is None else int(text)
