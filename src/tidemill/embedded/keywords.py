"""The keyword arguments of ``tidemill.open``: one for each setting of a node.

Type checkers and editors read them here. ``config/settings.py`` says what each setting does; a test compares
the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from tidemill.config.values import Address

__all__ = ("SettingKeywords",)


class SettingKeywords(TypedDict, total=False):
    """The settings that ``tidemill.open`` takes beside ``path``, ``listen`` and ``http``.

    Sizes are numbers of bytes or text like ``"512 MiB"``, addresses are text like ``"127.0.0.1:9092"``.
    """

    advertised_listener: str | Address | None
    allow_unauthenticated: bool
    node_id: int
    node_name: str
    cluster: str | None
    cluster_name: str
    cluster_listen: str | Address
    cluster_advertised: str | Address | None
    cluster_secret_file: str | Path | None
    cluster_tls_ca: str | Path | None
    cluster_tls_cert: str | Path | None
    cluster_tls_key: str | Path | None
    etcd_tls_ca: str | Path | None
    etcd_tls_cert: str | Path | None
    etcd_tls_key: str | Path | None
    etcd_user: str | None
    etcd_password_file: str | Path | None
    rack: str | None
    machine: str | None
    replace_directory: bool
    session_timeout_ms: int
    replica_lag_ms: int
    move_bytes_per_second: int | str
    auto_create_topics: bool
    default_partitions: int
    default_replication: int
    max_partitions_per_topic: int
    flush_threads: int
    log_retention_check_interval_ms: int
    compaction_check_interval_ms: int
    compaction_map_bytes: int | str
    compaction_bytes_per_second: int | str
    scrub_interval_ms: int
    scrub_bytes_per_second: int | str
    disk_reserve_bytes: int | str
    max_connections: int
    max_connections_per_ip: int
    max_frame_bytes: int | str
    max_first_frame_bytes: int | str
    max_inflight_bytes: int | str
    max_in_flight_requests_per_connection: int
    max_decompressed_bytes: int | str
    handshake_deadline_ms: int
    frame_deadline_ms: int
    stall_timeout_ms: int
    idle_timeout_ms: int
    fetch_max_bytes: int | str
    max_fetch_sessions: int
    group_min_session_timeout_ms: int
    group_max_session_timeout_ms: int
    group_max_size: int
    group_initial_rebalance_delay_ms: int
    group_consumer_session_timeout_ms: int
    group_consumer_heartbeat_interval_ms: int
    group_consumer_max_size: int
    group_share_max_size: int
    group_share_session_timeout_ms: int
    group_share_heartbeat_interval_ms: int
    group_share_record_lock_duration_ms: int
    group_share_min_record_lock_duration_ms: int
    group_share_max_record_lock_duration_ms: int
    group_share_delivery_count_limit: int
    group_share_partition_max_record_locks: int
    group_share_max_share_sessions: int
    share_state_topic_partitions: int
    share_state_updates_per_snapshot: int
    offsets_topic_partitions: int
    offset_metadata_max_bytes: int | str
    offsets_retention_minutes: int
    lag_series_max: int
    cursors_topic_partitions: int
    transactions_topic_partitions: int
    transaction_max_timeout_ms: int
    transactional_id_expiration_ms: int
    job_publication_retention_ms: int
    kv_block_cache_bytes: int | str
    kv_write_buffer_bytes: int | str
    kv_snapshot_interval_ms: int
    kv_snapshot_log_bytes: int | str
    kv_snapshots_kept: int
    kv_check_interval_ms: int
    scan_max_bytes: int | str
    scan_sessions_per_bucket: int
    scan_sessions: int
    scan_idle_ms: int
    scan_pins: int
    topic_defaults: dict[str, str]
