"""Settings of the group coordinator, with Kafka's defaults and, in each docstring, Kafka's name."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ("GroupSettings",)


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Limits and times. All times are in milliseconds.

    Attributes:
        partitions: ``offsets.topic.num.partitions``; must not change while the topic exists.
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
        offsets_retention_ms: how long offsets of a group without members are kept.
    """

    partitions: int = 50
    initial_rebalance_delay_ms: int = 3_000
    min_session_timeout_ms: int = 6_000
    max_session_timeout_ms: int = 1_800_000
    max_size: int = 0x7FFFFFFF
    new_member_join_timeout_ms: int = 300_000
    max_offset_metadata_size: int = 4_096
    consumer_session_timeout_ms: int = 45_000
    consumer_heartbeat_interval_ms: int = 5_000
    consumer_max_size: int = 0x7FFFFFFF
    offsets_retention_ms: int = 7 * 24 * 60 * 60 * 1_000
