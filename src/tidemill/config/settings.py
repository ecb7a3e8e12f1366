"""The settings of a node: one table, with type, default, range and purpose of each.

``load_settings`` (in ``loading``) fills it from flags, ``TIDEMILL_*`` variables and a toml file. A
``Settings`` made directly is checked just the same, so no layer meets a value out of range.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, get_type_hints

from tidemill.config.schema import Kind, SettingInfo, Spec
from tidemill.config.topic import check_overrides
from tidemill.config.values import KIB, MIB, Address
from tidemill.errors import ApiError, ConfigError

__all__ = ("SETTINGS", "Settings")

_INT_MAX = 2**31 - 1


def _bytes(doc: str, minimum: int = 1, maximum: int = 2**63 - 1) -> Spec:
    return Spec(Kind.BYTES, doc, minimum, maximum)


def _count(doc: str, minimum: int = 1, maximum: int = _INT_MAX) -> Spec:
    return Spec(Kind.COUNT, doc, minimum, maximum)


def _ms(doc: str, minimum: int = 1, maximum: int = 2**63 - 1) -> Spec:
    return Spec(Kind.MS, doc, minimum, maximum)


def _file(doc: str) -> Spec:
    return Spec(Kind.FILE, doc, optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything that can be set on a node. Each field's purpose and range is in its annotation."""

    # Who and where.
    data_dir: Annotated[
        Path,
        Spec(Kind.PATH, "The directory that holds everything this node keeps."),
    ] = Path("tidemill-data")
    listen: Annotated[
        Address,
        Spec(Kind.ADDRESS, "Where Kafka clients connect. Port 0 takes any free port."),
    ] = Address("127.0.0.1", 9092)
    advertised_listener: Annotated[
        Address | None,
        Spec(
            Kind.ADDRESS,
            "The address that clients are told to use. Empty: the one the node listens on.",
            optional=True,
        ),
    ] = None
    http: Annotated[
        Address | None,
        Spec(Kind.ADDRESS, "Where /healthz, /readyz and /metrics are served. Empty: nowhere.", optional=True),
    ] = Address("127.0.0.1", 9080)
    allow_unauthenticated: Annotated[
        bool,
        Spec(
            Kind.FLAG,
            "Whether to listen on addresses that other machines can reach. There is no TLS, authentication "
            "or ACL yet: set it on a trusted network only.",
        ),
    ] = False
    node_id: Annotated[
        int,
        _count(
            "The node's number in Kafka's protocol. In a cluster it goes with the name, and is given out at "
            "the first start.",
            0,
        ),
    ] = 1
    node_name: Annotated[
        str,
        Spec(Kind.NAME, "The node's name in logs and in the cluster."),
    ] = "node-1"

    # Several nodes.
    cluster: Annotated[
        str | None,
        Spec(
            Kind.TEXT,
            "The etcd that holds the cluster's metadata, as etcd://host:port[,host:port...]. Empty: this "
            "node is alone and keeps its metadata in its data directory.",
            optional=True,
        ),
    ] = None
    cluster_name: Annotated[
        str,
        Spec(Kind.NAME, "The name of the cluster: several can use one etcd."),
    ] = "tidemill"
    cluster_listen: Annotated[
        Address,
        Spec(Kind.ADDRESS, "Where other nodes of the cluster connect. Port 0 takes any free port."),
    ] = Address("127.0.0.1", 9093)
    cluster_advertised: Annotated[
        Address | None,
        Spec(
            Kind.ADDRESS,
            "The address that other nodes are told to use. Empty: the one the node listens on.",
            optional=True,
        ),
    ] = None
    cluster_secret_file: Annotated[
        Path | None,
        _file("A file with the secret that nodes prove to each other. Empty: the one that is kept in etcd."),
    ] = None
    cluster_tls_ca: Annotated[
        Path | None,
        _file(
            "Certificates of the authorities that other nodes' certificates are checked with. Turns on TLS."
        ),
    ] = None
    cluster_tls_cert: Annotated[
        Path | None,
        _file("This node's certificate for connections between nodes."),
    ] = None
    cluster_tls_key: Annotated[
        Path | None,
        _file("The private key of cluster_tls_cert."),
    ] = None
    etcd_tls_ca: Annotated[
        Path | None,
        _file("Certificates of the authorities that etcd's certificate is checked with. Turns on TLS."),
    ] = None
    etcd_tls_cert: Annotated[
        Path | None,
        _file("This node's certificate for etcd."),
    ] = None
    etcd_tls_key: Annotated[
        Path | None,
        _file("The private key of etcd_tls_cert."),
    ] = None
    etcd_user: Annotated[
        str | None,
        Spec(Kind.TEXT, "The user that this node is for etcd. Empty: none.", optional=True),
    ] = None
    etcd_password_file: Annotated[
        Path | None,
        _file("A file with the password of etcd_user."),
    ] = None
    rack: Annotated[
        str | None,
        Spec(
            Kind.NAME,
            "The rack or zone of this node: replicas of a partition are spread over racks.",
            optional=True,
        ),
    ] = None
    machine: Annotated[
        str | None,
        Spec(
            Kind.NAME,
            "The machine of this node: replicas are spread over machines. Empty: the host's name.",
            optional=True,
        ),
    ] = None
    replace_directory: Annotated[
        bool,
        Spec(
            Kind.FLAG,
            "Whether the node goes on with another, empty data directory than it had: its replicas are made "
            "anew from those of other nodes. Set it for one start, when the old directory is lost.",
        ),
    ] = False
    session_timeout_ms: Annotated[
        int,
        _ms("A node that etcd has not heard of for this long is taken for dead.", 2_000, 600_000),
    ] = 6_000
    replica_lag_ms: Annotated[
        int,
        _ms("A replica that has not caught up with its leader for this long leaves the in-sync set.", 500),
    ] = 10_000
    move_bytes_per_second: Annotated[
        int,
        _bytes(
            "How much a leader sends in a second to replicas that a reassignment adds, all together. "
            "0: no limit. 'tidemill cluster throttle' comes first, and needs no restart.",
            0,
        ),
    ] = 0

    # Topics.
    auto_create_topics: Annotated[
        bool,
        Spec(Kind.FLAG, "Whether a topic comes into being when a client first asks for it."),
    ] = True
    default_partitions: Annotated[
        int,
        _count("Partitions of a topic whose creator names no number.", 1, 10_000),
    ] = 1
    default_replication: Annotated[
        int,
        _count(
            "Replicas of a topic whose creator names no number. 0: three, or as many as there are nodes.",
            0,
            32767,
        ),
    ] = 0
    max_partitions_per_topic: Annotated[
        int,
        _count("The most partitions that one topic may have."),
    ] = 10_000

    # The log.
    flush_threads: Annotated[
        int,
        _count("Threads that sync files to disk side by side.", 1, 256),
    ] = 4
    log_retention_check_interval_ms: Annotated[
        int,
        _ms("How often retention looks for work."),
    ] = 300_000
    compaction_check_interval_ms: Annotated[
        int,
        _ms("How often compaction looks for work."),
    ] = 15_000
    compaction_map_bytes: Annotated[
        int,
        _bytes(
            "Memory for the keys of the log that is being compacted, some 34 bytes each. A log with more new "
            "keys is compacted in several runs.",
            KIB,
        ),
    ] = 64 * MIB
    compaction_bytes_per_second: Annotated[
        int,
        _bytes("How much compaction may read and write in a second. 0: no limit.", 0),
    ] = 64 * MIB

    scrub_interval_ms: Annotated[
        int,
        _ms("How often every batch is read and checked, whether anybody asks for it or not. 0: never.", 0),
    ] = 7 * 24 * 60 * 60 * 1000
    scrub_bytes_per_second: Annotated[
        int,
        _bytes("How much of the logs is read in a second for that. 0: no limit.", 0),
    ] = 8 * MIB

    disk_reserve_bytes: Annotated[
        int,
        _bytes(
            "Room that is kept for reads and deletions on a full disk, at most a sixteenth of the disk. "
            "0: none; a full disk then serves topics only.",
            0,
        ),
    ] = 64 * MIB

    # Limits, checked before memory is taken.
    max_connections: Annotated[
        int,
        _count("The most client connections at a time."),
    ] = 4_096
    max_connections_per_ip: Annotated[
        int,
        _count("The most connections from one address. 0: no limit but max_connections.", 0),
    ] = 0
    max_frame_bytes: Annotated[
        int,
        _bytes("The largest request.", KIB, _INT_MAX),
    ] = 100 * MIB
    max_first_frame_bytes: Annotated[
        int,
        _bytes("The largest request of a client that has not had an answer yet.", KIB, _INT_MAX),
    ] = 512 * KIB
    max_inflight_bytes: Annotated[
        int,
        _bytes(
            "Bytes of requests and answers in memory over all connections. Above it, connections are not "
            "read until there is room. An eighth of it is kept for connections that hold little, and one "
            "address gets a part of the rest."
        ),
    ] = 512 * MIB
    max_in_flight_requests_per_connection: Annotated[
        int,
        _count("Requests of one connection that are read ahead of its oldest unanswered one.", 1, 100_000),
    ] = 64
    max_decompressed_bytes: Annotated[
        int,
        _bytes("The most bytes that one record batch may unpack to."),
    ] = 128 * MIB
    handshake_deadline_ms: Annotated[
        int,
        _ms("The time a new connection has for its first complete request."),
    ] = 10_000
    frame_deadline_ms: Annotated[
        int,
        _ms("The time from a request's first byte to its last."),
    ] = 60_000
    stall_timeout_ms: Annotated[
        int,
        _ms(
            "While others wait for memory (max_inflight_bytes), a client that sends its request, or reads "
            "its answers, too slowly to be done in time (frame_deadline_ms, idle_timeout_ms) is closed after "
            "this.",
            100,
        ),
    ] = 5_000
    idle_timeout_ms: Annotated[
        int,
        _ms("A connection that is silent for longer is closed."),
    ] = 600_000
    fetch_max_bytes: Annotated[
        int,
        _bytes(
            "The most bytes in a fetch response. A first batch that is larger still goes out whole. They are "
            "read and checked at once, while nobody else is served: a megabyte takes up to a millisecond.",
            KIB,
            _INT_MAX,
        ),
    ] = 8 * MIB
    max_fetch_sessions: Annotated[
        int,
        _count("Incremental fetch sessions kept. Above it, clients send full fetches.", 0),
    ] = 1_000

    # Groups and offsets.
    group_min_session_timeout_ms: Annotated[
        int,
        _ms("The shortest session timeout a group member may ask for.", 1, _INT_MAX),
    ] = 6_000
    group_max_session_timeout_ms: Annotated[
        int,
        _ms("The longest session timeout a group member may ask for.", 1, _INT_MAX),
    ] = 1_800_000
    group_max_size: Annotated[
        int,
        _count("The most members of one group."),
    ] = 10_000
    group_initial_rebalance_delay_ms: Annotated[
        int,
        _ms(
            "How long an empty group waits for more members before its first assignment. Kafka waits "
            "3000; here testers and single consumers start at once, and a later member costs one more "
            "rebalance.",
            0,
            _INT_MAX,
        ),
    ] = 0
    group_consumer_session_timeout_ms: Annotated[
        int,
        _ms("How long a group member of the new consumer protocol may be silent.", 1, _INT_MAX),
    ] = 45_000
    group_consumer_heartbeat_interval_ms: Annotated[
        int,
        _ms("How often a group member of the new consumer protocol is asked to speak.", 1, _INT_MAX),
    ] = 5_000
    group_consumer_max_size: Annotated[
        int,
        _count("The most members of one group of the new consumer protocol."),
    ] = 10_000
    group_share_max_size: Annotated[
        int,
        _count("The most members of one share group.", 1, 1_000),
    ] = 200
    group_share_session_timeout_ms: Annotated[
        int,
        _ms(
            "How long a member of a share group may be silent, unless its group says otherwise.", 1, _INT_MAX
        ),
    ] = 45_000
    group_share_heartbeat_interval_ms: Annotated[
        int,
        _ms(
            "How often a member of a share group is asked to speak, unless its group says otherwise.",
            1,
            _INT_MAX,
        ),
    ] = 5_000
    group_share_record_lock_duration_ms: Annotated[
        int,
        _ms(
            "How long a member of a share group may hold a record, unless its group says otherwise.",
            1,
            3_600_000,
        ),
    ] = 30_000
    group_share_min_record_lock_duration_ms: Annotated[
        int,
        _ms("The shortest share.record.lock.duration.ms that a group may have.", 1, 3_600_000),
    ] = 15_000
    group_share_max_record_lock_duration_ms: Annotated[
        int,
        _ms("The longest share.record.lock.duration.ms that a group may have.", 1, 3_600_000),
    ] = 60_000
    group_share_delivery_count_limit: Annotated[
        int,
        _count("How often a share group is handed a record at most, unless the group says otherwise.", 2, 10),
    ] = 5
    group_share_partition_max_record_locks: Annotated[
        int,
        _count(
            "How many records of a partition a share group may have in flight, unless the group says"
            " otherwise.",
            100,
            4_000,
        ),
    ] = 2_000
    group_share_max_share_sessions: Annotated[
        int,
        _count("The most members of share groups that fetch from this node."),
    ] = 2_000
    share_state_topic_partitions: Annotated[
        int,
        _count(
            "Partitions of the internal topic for the state of share groups, fixed when it is created.",
            1,
            10_000,
        ),
    ] = 50
    share_state_updates_per_snapshot: Annotated[
        int,
        _count(
            "After so many changes of a share partition its whole state is written once, so that it can be "
            "read without those changes.",
            1,
            100_000,
        ),
    ] = 500
    offsets_topic_partitions: Annotated[
        int,
        _count(
            "Partitions of the internal topic for groups and offsets, fixed when it is created. Kafka "
            "has 50, to spread coordinators over many brokers; each one costs files and start-up time.",
            1,
            10_000,
        ),
    ] = 8
    offset_metadata_max_bytes: Annotated[
        int,
        _bytes("The largest note that a client may store with a committed offset.", 0, _INT_MAX),
    ] = 4_096
    offsets_retention_minutes: Annotated[
        int,
        _count("How long offsets of a group without members are kept, in minutes."),
    ] = 10_080
    lag_series_max: Annotated[
        int,
        _count(
            "The most partitions whose consumer lag /metrics shows one by one. With more of them it shows "
            "only the sums over the partitions of a topic.",
            0,
        ),
    ] = 10_000

    # Cursors.
    cursors_topic_partitions: Annotated[
        int,
        _count(
            "Partitions of the internal topic for the positions of cursors, fixed when it is created.",
            1,
            10_000,
        ),
    ] = 8

    # Transactions.
    transactions_topic_partitions: Annotated[
        int,
        _count(
            "Partitions of the internal topic for transactional ids, fixed when it is created. Kafka has 50, "
            "to spread coordinators over many brokers; each one costs files and start-up time.",
            1,
            10_000,
        ),
    ] = 8
    transaction_max_timeout_ms: Annotated[
        int,
        _ms("The longest transaction timeout that a producer may ask for.", 1, _INT_MAX),
    ] = 900_000
    transactional_id_expiration_ms: Annotated[
        int,
        _ms("How long a transactional id that nobody uses is remembered."),
    ] = 604_800_000
    job_publication_retention_ms: Annotated[
        int,
        _ms(
            "How long after its last publication a job is remembered. A batch that it writes again later is "
            "not recognised, and published twice."
        ),
    ] = 7_776_000_000

    # Tables.
    kv_block_cache_bytes: Annotated[
        int,
        _bytes("Memory for what is read of the state of tables, shared by all of them.", MIB),
    ] = 256 * MIB
    kv_write_buffer_bytes: Annotated[
        int,
        _bytes(
            "Memory for what is written to the state of tables before it goes to disk, shared by all.", MIB
        ),
    ] = 256 * MIB
    kv_snapshot_interval_ms: Annotated[
        int,
        _ms("How long after a snapshot of a bucket the next one is taken, if it was written to."),
    ] = 600_000
    kv_snapshot_log_bytes: Annotated[
        int,
        _bytes("How much the log of a bucket may grow before the next snapshot is taken.", KIB),
    ] = 256 * MIB
    kv_snapshots_kept: Annotated[
        int,
        _count("Snapshots of a bucket that are kept; leased ones are kept besides.", 1, 100),
    ] = 2
    kv_check_interval_ms: Annotated[
        int,
        _ms("How often snapshots that are due, scans that are idle and leases that are over are looked for."),
    ] = 30_000
    scan_max_bytes: Annotated[
        int,
        _bytes("The largest batch of a scan; a client may ask for smaller ones.", 1, 64 * MIB),
    ] = 10 * MIB
    scan_sessions_per_bucket: Annotated[
        int,
        _count("Scans that may read one bucket at a time, of which one client gets a part."),
    ] = 16
    scan_sessions: Annotated[
        int,
        _count("Scans of buckets that may be open on the node at a time, of which one client gets a part."),
    ] = 200
    scan_idle_ms: Annotated[
        int,
        _ms("A scan that is not asked for longer is closed."),
    ] = 600_000
    scan_pins: Annotated[
        int,
        _count(
            "Pins at a time, of which one client gets a part. A pin keeps the state of a table for scans."
        ),
    ] = 100

    #: Defaults of topic configs on this node, under Kafka's names; the table ``[topic]`` of the file.
    topic_defaults: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for info in SETTINGS:
            info.check(getattr(self, info.name), "the program")
        self._check_pairs()
        self._check_topic_defaults()

    def _check_topic_defaults(self) -> None:
        given: object = self.topic_defaults
        if not isinstance(given, dict) or not all(
            isinstance(each, str) for each in (*given, *given.values())
        ):
            raise ConfigError(
                "setting topic_defaults is texts by the names of topic configs, as in "
                f"{{'retention.ms': '3600000'}}, not {repr(given)[:200]}"
            )
        try:
            check_overrides(self.topic_defaults)
        except ApiError as error:
            raise ConfigError(f"setting topic: {error.message}") from error

    def _check_pairs(self) -> None:
        """Raise ConfigError for values that are allowed alone and make no sense together."""
        for low, high, why in (
            (
                "max_first_frame_bytes",
                "max_frame_bytes",
                "the first answer must not shrink what a client may send",
            ),
            ("max_frame_bytes", "max_inflight_bytes", "the largest request could never be read"),
            (
                "group_min_session_timeout_ms",
                "group_max_session_timeout_ms",
                "no session timeout would be allowed",
            ),
            (
                "group_consumer_heartbeat_interval_ms",
                "group_consumer_session_timeout_ms",
                "members could not speak in time",
            ),
            (
                "group_share_heartbeat_interval_ms",
                "group_share_session_timeout_ms",
                "members of share groups could not speak in time",
            ),
            (
                "group_share_min_record_lock_duration_ms",
                "group_share_record_lock_duration_ms",
                "the default of groups would be out of range",
            ),
            (
                "group_share_record_lock_duration_ms",
                "group_share_max_record_lock_duration_ms",
                "the default of groups would be out of range",
            ),
            ("default_partitions", "max_partitions_per_topic", "no topic could be created with the default"),
        ):
            below, above = getattr(self, low), getattr(self, high)
            if below > above:
                raise ConfigError(f"setting {low} ({below}) must not be above {high} ({above}): {why}")
        for name, who in (("advertised_listener", "clients"), ("cluster_advertised", "other nodes")):
            address = getattr(self, name)
            if address is not None and address.port == 0:
                raise ConfigError(f"setting {name} cannot be {address}: {who} need a real port")
        for ca, cert, key in (
            ("cluster_tls_ca", "cluster_tls_cert", "cluster_tls_key"),
            ("etcd_tls_ca", "etcd_tls_cert", "etcd_tls_key"),
        ):
            if (getattr(self, cert) is None) != (getattr(self, key) is None):
                raise ConfigError(f"settings {cert} and {key} go together: set both or neither")
            if getattr(self, cert) is not None and getattr(self, ca) is None:
                raise ConfigError(f"setting {cert} needs {ca}: nodes check each other's certificates")
        if self.cluster_tls_ca is not None and self.cluster_tls_cert is None:
            raise ConfigError("setting cluster_tls_ca needs cluster_tls_cert and cluster_tls_key, too")
        if self.etcd_password_file is not None and self.etcd_user is None:
            raise ConfigError("setting etcd_password_file needs etcd_user")


def _settings_table() -> tuple[SettingInfo, ...]:
    hints = get_type_hints(Settings, include_extras=True)
    return tuple(
        SettingInfo(item.name, item.default, hints[item.name].__metadata__[0])
        for item in fields(Settings)
        if item.name != "topic_defaults"
    )


#: Every setting in the order of the reference page.
SETTINGS: tuple[SettingInfo, ...] = _settings_table()
