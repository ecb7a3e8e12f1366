"""Kafka's names for the settings of a node, for tools that look for those.

Only what means the same here as in a Kafka broker, in the same unit, has a line. DescribeConfigs of a node
shows these names beside its own; nothing is set by them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from tidemill.config.topic_keys import ConfigKind

__all__ = ("BROKER_CONFIGS", "BROKER_CONFIGS_OF_TOPICS", "KafkaName")

_K = ConfigKind
_INT_MAX_TEXT = str(2**31 - 1)


@dataclass(frozen=True, slots=True)
class KafkaName:
    """A config of Kafka, and the setting of this node that stands for it."""

    name: str
    kind: ConfigKind
    setting: str
    #: How Kafka writes values that are written otherwise here.
    spellings: Mapping[str, str] = field(default_factory=dict)


#: Configs of a broker.
BROKER_CONFIGS: Final = (
    KafkaName("auto.create.topics.enable", _K.BOOLEAN, "auto_create_topics"),
    KafkaName("broker.id", _K.INT, "node_id"),
    KafkaName("connections.max.idle.ms", _K.LONG, "idle_timeout_ms"),
    KafkaName("default.replication.factor", _K.INT, "default_replication"),
    KafkaName("fetch.max.bytes", _K.INT, "fetch_max_bytes"),
    KafkaName("group.consumer.heartbeat.interval.ms", _K.INT, "group_consumer_heartbeat_interval_ms"),
    KafkaName("group.consumer.max.size", _K.INT, "group_consumer_max_size"),
    KafkaName("group.share.max.size", _K.INT, "group_share_max_size"),
    KafkaName("group.consumer.session.timeout.ms", _K.INT, "group_consumer_session_timeout_ms"),
    KafkaName("group.initial.rebalance.delay.ms", _K.INT, "group_initial_rebalance_delay_ms"),
    KafkaName("group.max.session.timeout.ms", _K.INT, "group_max_session_timeout_ms"),
    KafkaName("group.max.size", _K.INT, "group_max_size"),
    KafkaName("group.min.session.timeout.ms", _K.INT, "group_min_session_timeout_ms"),
    KafkaName("group.share.delivery.count.limit", _K.INT, "group_share_delivery_count_limit"),
    KafkaName("group.share.heartbeat.interval.ms", _K.INT, "group_share_heartbeat_interval_ms"),
    KafkaName("group.share.max.record.lock.duration.ms", _K.INT, "group_share_max_record_lock_duration_ms"),
    KafkaName("group.share.max.share.sessions", _K.INT, "group_share_max_share_sessions"),
    KafkaName("group.share.min.record.lock.duration.ms", _K.INT, "group_share_min_record_lock_duration_ms"),
    KafkaName("group.share.partition.max.record.locks", _K.INT, "group_share_partition_max_record_locks"),
    KafkaName("group.share.record.lock.duration.ms", _K.INT, "group_share_record_lock_duration_ms"),
    KafkaName("group.share.session.timeout.ms", _K.INT, "group_share_session_timeout_ms"),
    KafkaName("log.cleaner.backoff.ms", _K.LONG, "compaction_check_interval_ms"),
    KafkaName("log.cleaner.dedupe.buffer.size", _K.LONG, "compaction_map_bytes"),
    KafkaName("log.retention.check.interval.ms", _K.LONG, "log_retention_check_interval_ms"),
    KafkaName("max.connections", _K.INT, "max_connections"),
    KafkaName("max.connections.per.ip", _K.INT, "max_connections_per_ip", {"0": _INT_MAX_TEXT}),
    KafkaName("max.incremental.fetch.session.cache.slots", _K.INT, "max_fetch_sessions"),
    KafkaName("node.id", _K.INT, "node_id"),
    KafkaName("num.partitions", _K.INT, "default_partitions"),
    KafkaName("offset.metadata.max.bytes", _K.INT, "offset_metadata_max_bytes"),
    KafkaName("offsets.retention.minutes", _K.INT, "offsets_retention_minutes"),
    KafkaName("offsets.topic.num.partitions", _K.INT, "offsets_topic_partitions"),
    KafkaName("queued.max.request.bytes", _K.LONG, "max_inflight_bytes"),
    KafkaName(
        "share.coordinator.snapshot.update.records.per.snapshot", _K.INT, "share_state_updates_per_snapshot"
    ),
    KafkaName("share.coordinator.state.topic.num.partitions", _K.INT, "share_state_topic_partitions"),
    KafkaName("socket.request.max.bytes", _K.INT, "max_frame_bytes"),
    KafkaName("transaction.max.timeout.ms", _K.INT, "transaction_max_timeout_ms"),
    KafkaName("transaction.state.log.num.partitions", _K.INT, "transactions_topic_partitions"),
    KafkaName("transactional.id.expiration.ms", _K.INT, "transactional_id_expiration_ms"),
)

#: Configs of a broker that are the defaults of topic configs → the topic config. Of these, ``flush.ms`` and
#: ``flush.messages`` are left out: they mean something else here.
BROKER_CONFIGS_OF_TOPICS: Final[Mapping[str, str]] = {
    "compression.type": "compression.type",
    "log.cleaner.delete.retention.ms": "delete.retention.ms",
    "log.cleaner.max.compaction.lag.ms": "max.compaction.lag.ms",
    "log.cleaner.min.cleanable.ratio": "min.cleanable.dirty.ratio",
    "log.cleaner.min.compaction.lag.ms": "min.compaction.lag.ms",
    "log.cleanup.policy": "cleanup.policy",
    "log.index.interval.bytes": "index.interval.bytes",
    "log.message.timestamp.after.max.ms": "message.timestamp.after.max.ms",
    "log.message.timestamp.before.max.ms": "message.timestamp.before.max.ms",
    "log.message.timestamp.type": "message.timestamp.type",
    "log.retention.bytes": "retention.bytes",
    "log.retention.ms": "retention.ms",
    "log.roll.ms": "segment.ms",
    "log.segment.bytes": "segment.bytes",
    "message.max.bytes": "max.message.bytes",
    "min.insync.replicas": "min.insync.replicas",
}
