"""The APIs of the protocol: key, name, versions, where their message classes are, and who sends them.

Rules:

- A row in ``_ROWS`` is all that clients and servers need to speak another API or version: ranges, classes
  and header versions follow from it. A node completes the row beside the API's handler
  (``server.requests.api_table``).
- kio's modules are imported on first use, one per version: importing all of them would take longer than a
  node may take to start.
- The header of a response has the flexible form (v1) when its body is flexible, except for ApiVersions: a
  client that asks with a version the server does not know must still be able to read the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidemill.wire.schema import EntityClass

__all__ = (
    "ACKS_ALL",
    "APIS",
    "APIS_BY_NAME",
    "API_VERSIONS_KEY",
    "NODES_ONLY",
    "PRODUCE",
    "TABLES",
    "Api",
    "class_name",
    "find_api",
    "is_flexible",
    "is_served",
    "load_module",
    "request_class",
    "request_header_version",
    "response_class",
    "response_header_version",
)

API_VERSIONS_KEY: Final = 18
#: Keys from this one on are extensions of Tidemill; Kafka's are below.
_FIRST_EXTENSION: Final = 1_000
# Modules with messages of our own.
_EXTRA: Final = "tidemill.wire.extra"
_SHARE_STATE: Final = "tidemill.wire.share_state"
TABLES: Final = "tidemill.wire.tables"
_CLUSTER: Final = "tidemill.wire.cluster"
_SHARE: Final = "tidemill.wire.share"
_CURSORS: Final = "tidemill.wire.cursors"


@dataclass(frozen=True, slots=True)
class Api:
    """One API and the versions of it that are served, both ends included."""

    key: int
    name: str
    """Kafka's own name, in CamelCase."""
    schema: str
    """The name of kio's folder with its messages; for an extension, the name of their module."""
    min_version: int
    max_version: int
    extra: Mapping[int, str] = field(default_factory=dict, hash=False)
    """The modules of versions that kio does not have, has wrong, or without fields of our own."""
    between_nodes: bool = False
    """Whether nodes of a cluster send it to each other, as clients send it to them."""
    nodes_only: bool = False
    """Whether nodes alone send it, to each other; clients are not told of it, and refused."""

    @property
    def is_extension(self) -> bool:
        """Whether it is Tidemill's own, and not one of Kafka's."""
        return self.key >= _FIRST_EXTENSION

    @property
    def versions(self) -> range:
        """The served versions."""
        return range(self.min_version, self.max_version + 1)

    def serves(self, version: int) -> bool:
        """Whether ``version`` is in the served range."""
        return self.min_version <= version <= self.max_version


#: The key of the one API whose records are handled apart from its other fields.
PRODUCE: Final = 0
#: Its ``acks`` of those who wait until all in-sync replicas have the records.
ACKS_ALL: Final = -1

_ROWS: Final = (
    Api(0, "Produce", "produce", 3, 13, between_nodes=True),
    Api(1, "Fetch", "fetch", 4, 18),
    Api(2, "ListOffsets", "list_offsets", 1, 11, between_nodes=True),
    Api(3, "Metadata", "metadata", 0, 13),
    Api(8, "OffsetCommit", "offset_commit", 2, 10),
    Api(9, "OffsetFetch", "offset_fetch", 1, 10),
    Api(10, "FindCoordinator", "find_coordinator", 0, 6),
    Api(11, "JoinGroup", "join_group", 0, 9),
    Api(12, "Heartbeat", "heartbeat", 0, 4),
    Api(13, "LeaveGroup", "leave_group", 0, 5),
    Api(14, "SyncGroup", "sync_group", 0, 5),
    Api(15, "DescribeGroups", "describe_groups", 0, 6),
    Api(16, "ListGroups", "list_groups", 0, 5),
    Api(API_VERSIONS_KEY, "ApiVersions", "api_versions", 0, 5, {5: _EXTRA}),
    Api(19, "CreateTopics", "create_topics", 2, 7),
    Api(20, "DeleteTopics", "delete_topics", 1, 6),
    Api(21, "DeleteRecords", "delete_records", 0, 2),
    Api(22, "InitProducerId", "init_producer_id", 0, 6, between_nodes=True),
    Api(23, "OffsetForLeaderEpoch", "offset_for_leader_epoch", 2, 4),
    Api(24, "AddPartitionsToTxn", "add_partitions_to_txn", 0, 5, between_nodes=True),
    Api(25, "AddOffsetsToTxn", "add_offsets_to_txn", 0, 4),
    Api(26, "EndTxn", "end_txn", 0, 5, between_nodes=True),
    Api(27, "WriteTxnMarkers", "write_txn_markers", 1, 2, between_nodes=True),
    Api(28, "TxnOffsetCommit", "txn_offset_commit", 0, 6, {6: _EXTRA}),
    Api(32, "DescribeConfigs", "describe_configs", 1, 4),
    Api(33, "AlterConfigs", "alter_configs", 0, 2),
    Api(35, "DescribeLogDirs", "describe_log_dirs", 1, 5),
    Api(37, "CreatePartitions", "create_partitions", 0, 3),
    Api(42, "DeleteGroups", "delete_groups", 0, 2),
    Api(43, "ElectLeaders", "elect_leaders", 0, 2),
    Api(44, "IncrementalAlterConfigs", "incremental_alter_configs", 0, 1),
    Api(45, "AlterPartitionReassignments", "alter_partition_reassignments", 0, 1),
    Api(46, "ListPartitionReassignments", "list_partition_reassignments", 0, 0),
    Api(47, "OffsetDelete", "offset_delete", 0, 0),
    Api(55, "DescribeQuorum", "describe_quorum", 0, 2),
    Api(57, "UpdateFeatures", "update_features", 0, 2),
    Api(60, "DescribeCluster", "describe_cluster", 0, 2),
    Api(61, "DescribeProducers", "describe_producers", 0, 0),
    Api(64, "UnregisterBroker", "unregister_broker", 0, 0),
    Api(65, "DescribeTransactions", "describe_transactions", 0, 0, {0: _EXTRA}),
    Api(66, "ListTransactions", "list_transactions", 0, 2),
    Api(68, "ConsumerGroupHeartbeat", "consumer_group_heartbeat", 0, 1),
    Api(69, "ConsumerGroupDescribe", "consumer_group_describe", 0, 1),
    Api(74, "ListConfigResources", "list_config_resources", 0, 1),
    Api(75, "DescribeTopicPartitions", "describe_topic_partitions", 0, 0),
    Api(76, "ShareGroupHeartbeat", "share_group_heartbeat", 1, 1),
    Api(77, "ShareGroupDescribe", "share_group_describe", 1, 1),
    Api(78, "ShareFetch", "share_fetch", 1, 2),
    Api(79, "ShareAcknowledge", "share_acknowledge", 1, 2),
    Api(83, "InitializeShareGroupState", "initialize_share_group_state", 0, 0, nodes_only=True),
    Api(84, "ReadShareGroupState", "read_share_group_state", 0, 0, {0: _SHARE_STATE}, nodes_only=True),
    Api(85, "WriteShareGroupState", "write_share_group_state", 0, 1, {1: _SHARE_STATE}, nodes_only=True),
    Api(86, "DeleteShareGroupState", "delete_share_group_state", 0, 0, nodes_only=True),
    Api(87, "ReadShareGroupStateSummary", "read_share_group_state_summary", 0, 1, nodes_only=True),
    Api(90, "DescribeShareGroupOffsets", "describe_share_group_offsets", 0, 1),
    Api(91, "AlterShareGroupOffsets", "alter_share_group_offsets", 0, 0),
    Api(92, "DeleteShareGroupOffsets", "delete_share_group_offsets", 0, 0),
    Api(1001, "CreateDatabase", TABLES, 0, 0),
    Api(1002, "DropDatabase", TABLES, 0, 0),
    Api(1003, "ListDatabases", TABLES, 0, 0),
    Api(1004, "AlterDatabase", TABLES, 0, 0),
    Api(1005, "CreateTable", TABLES, 0, 0),
    Api(1006, "DropTable", TABLES, 0, 0),
    Api(1007, "DescribeTable", TABLES, 0, 0),
    Api(1008, "ListTables", TABLES, 0, 0),
    Api(1009, "AlterTable", TABLES, 0, 0),
    Api(1010, "CreateTablePartition", TABLES, 0, 0),
    Api(1011, "DropTablePartition", TABLES, 0, 0),
    Api(1012, "TableStats", TABLES, 0, 0),
    Api(1020, "ListSnapshots", TABLES, 0, 0),
    Api(1021, "CreateSnapshot", TABLES, 0, 0),
    Api(1022, "AcquireLease", TABLES, 0, 0),
    Api(1023, "ReleaseLease", TABLES, 0, 0),
    Api(1024, "ListLeases", TABLES, 0, 0),
    Api(1060, "LookupKv", TABLES, 0, 0),
    Api(1061, "ScanKv", TABLES, 0, 0),
    Api(1062, "PinTable", TABLES, 0, 0),
    Api(1063, "ReleasePin", TABLES, 0, 0),
    Api(1064, "SplitBucket", TABLES, 0, 0),
    Api(1065, "MeasureLog", TABLES, 0, 0),
    Api(1070, "OpenAttempt", TABLES, 0, 0),
    Api(1071, "PublishAttempts", TABLES, 0, 0),
    Api(1072, "AbortAttempts", TABLES, 0, 0),
    Api(1073, "KeepJob", TABLES, 0, 0),
    Api(1074, "ListJobs", TABLES, 0, 0),
    Api(1080, "DescribeNodes", _CLUSTER, 0, 0),
    Api(1081, "DescribeReplicas", _CLUSTER, 0, 0),
    Api(1082, "ElectReplica", _CLUSTER, 0, 0),
    Api(1083, "SetNodeTags", _CLUSTER, 0, 0),
    Api(1090, "ShareSettle", _SHARE, 0, 1),
    Api(1091, "DescribeShareRecords", _SHARE, 0, 0, between_nodes=True),
    Api(1100, "FetchRegion", _CURSORS, 0, 0),
    Api(1101, "TakeCursor", _CURSORS, 0, 0),
    Api(1102, "CommitCursor", _CURSORS, 0, 0),
    Api(1103, "KeepCursor", _CURSORS, 0, 0),
    Api(1104, "ListCursors", _CURSORS, 0, 0, between_nodes=True),
    Api(1105, "DescribeCursor", _CURSORS, 0, 0),
    Api(1106, "AlterCursor", _CURSORS, 0, 0),
    Api(1107, "DeleteCursor", _CURSORS, 0, 0),
)

APIS: Final[dict[int, Api]] = {api.key: api for api in _ROWS}
"""The served APIs by key, in the order of their keys."""
APIS_BY_NAME: Final[dict[str, Api]] = {api.name: api for api in _ROWS}
NODES_ONLY: Final = frozenset(api.key for api in _ROWS if api.nodes_only)
"""The keys of APIs that clients are not told of."""


def find_api(api_key: int) -> Api | None:
    """The API with this key, or None if it is not served."""
    return APIS.get(api_key)


def is_served(api_key: int, api_version: int) -> bool:
    """Whether this version of this API is in the table."""
    api = APIS.get(api_key)
    return api is not None and api.serves(api_version)


@cache
def request_class(api_key: int, api_version: int) -> EntityClass:
    """kio's class of the request body. Raises LookupError if the version is not served."""
    return _load(api_key, api_version, "request")


@cache
def response_class(api_key: int, api_version: int) -> EntityClass:
    """kio's class of the response body. Raises LookupError if the version is not served."""
    return _load(api_key, api_version, "response")


@cache
def is_flexible(api_key: int, api_version: int) -> bool:
    """Whether the version uses compact lengths and tagged fields (KIP-482)."""
    if api_key >= _FIRST_EXTENSION and is_served(api_key, api_version):
        return True  # All extensions are; their messages take long to load, and may not be needed.
    return bool(request_class(api_key, api_version).__flexible__)


def load_module(api: Api) -> None:
    """Load the module of an extension's messages, which is large. Kafka's are loaded one by one."""
    if api.is_extension:
        import_module(api.schema)


def request_header_version(api_key: int, api_version: int) -> int:
    """Version of the request's header: 2 (with tagged fields) for a flexible version, else 1."""
    return 2 if is_flexible(api_key, api_version) else 1


def response_header_version(api_key: int, api_version: int) -> int:
    """Version of the response's header: 1 (with tagged fields) if flexible, else 0; 0 for ApiVersions."""
    return 1 if api_key != API_VERSIONS_KEY and is_flexible(api_key, api_version) else 0


def _load(api_key: int, api_version: int, side: str) -> EntityClass:
    api = APIS.get(api_key)
    if api is None or not api.serves(api_version):
        raise LookupError(f"API key {api_key} version {api_version} is not served: see tidemill.wire.apis")
    module = import_module(_module_name(api, api_version, side))
    name = f"{api.name}{side.capitalize()}"
    entity: EntityClass = getattr(module, class_name(name, api_version) if api.is_extension else name)
    return entity


def class_name(message: str, version: int) -> str:
    """The name of an extension's message in its module, which has all versions.

    >>> class_name("ShareSettleRequest", 0), class_name("ShareSettleRequest", 1)
    ('ShareSettleRequest', 'ShareSettleRequestV1')
    """
    return f"{message}V{version}" if version else message


def _module_name(api: Api, api_version: int, side: str) -> str:
    if api.is_extension:
        return api.schema
    return api.extra.get(api_version) or f"kio.schema.{api.schema}.v{api_version}.{side}"
