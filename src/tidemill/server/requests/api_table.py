"""The APIs that a node serves: one row each, beside its handler.

``wire.apis`` has the half of a row that clients need, too: key, name, versions, messages. ``@serves`` above a
handler completes it: who handles it, whether requests of one connection may overlap, what permissions it
needs. Rules:

- Every API of the wire has exactly one handler, in a module of ``server.handlers``. What clients begin with
  is loaded with the node. ``LOADED_AT_FIRST_USE`` names the APIs of the other modules: a connection has them
  loaded in a thread when the first request comes. A node does not start if an API is in none of them; a
  second handler is refused where it is declared.
- A handler that is a coroutine function runs in a task and returns the body of the answer. A plain function
  runs at once, and answers through its call, then or later: Produce and Fetch, which are called most.
- Modules of handlers must not load Arrow or RocksDB: a node without tables starts without them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar

from tidemill.wire.apis import APIS, APIS_BY_NAME, Api, load_module

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tidemill.server.broker import Broker
    from tidemill.server.requests.authorization import Permission
    from tidemill.server.requests.call import Call

    Handler = Callable[[Broker, Call], Any]

__all__ = (
    "OVERLAPPING",
    "ServedApi",
    "is_loaded",
    "load",
    "load_first",
    "served_api",
    "serves",
)

H = TypeVar("H", bound="Handler")


@dataclass(frozen=True, slots=True)
class ServedApi:
    """An API and what a node does with its requests."""

    api: Api
    handler: Handler
    in_task: bool
    """Whether the handler is a coroutine function, whose result is the body of the answer."""
    overlaps: bool
    """Whether requests of one connection may run beside each other; others wait for all before them."""
    permissions: tuple[Permission, ...]


_HANDLERS: Final = "tidemill.server.handlers"
#: Modules that are loaded with the node.
LOADED_AT_START: Final = (
    "cluster.api_versions",
    "cluster.metadata",
    "records.fetch",
    "records.offsets",
    "records.produce",
)
#: Modules that are loaded when the first request of one of their APIs comes.
LOADED_AT_FIRST_USE: Final[Mapping[str, tuple[str, ...]]] = {
    "cluster.elections": ("ElectLeaders",),
    "cluster.quorum": ("DescribeQuorum",),
    "cluster.reassignments": ("AlterPartitionReassignments", "ListPartitionReassignments"),
    "cluster.replicas": (
        "DescribeNodes",
        "DescribeReplicas",
        "ElectReplica",
        "SetNodeTags",
        "UnregisterBroker",
    ),
    "cursors.fetch_region": ("FetchRegion",),
    "cursors.positions": (
        "TakeCursor",
        "CommitCursor",
        "KeepCursor",
        "ListCursors",
        "DescribeCursor",
        "AlterCursor",
        "DeleteCursor",
    ),
    "groups.classic": (
        "JoinGroup",
        "SyncGroup",
        "Heartbeat",
        "LeaveGroup",
        "ListGroups",
        "DescribeGroups",
        "DeleteGroups",
    ),
    "groups.committed_offsets": ("OffsetCommit", "OffsetFetch", "OffsetDelete"),
    "groups.consumer": ("ConsumerGroupHeartbeat", "ConsumerGroupDescribe"),
    "groups.share": ("ShareGroupHeartbeat", "ShareGroupDescribe"),
    "groups.share_offsets": (
        "DescribeShareGroupOffsets",
        "AlterShareGroupOffsets",
        "DeleteShareGroupOffsets",
    ),
    "share.acknowledging": ("ShareAcknowledge", "ShareSettle"),
    "share.describing": ("DescribeShareRecords",),
    "share.fetching": ("ShareFetch",),
    "share.state": (
        "InitializeShareGroupState",
        "ReadShareGroupState",
        "WriteShareGroupState",
        "DeleteShareGroupState",
        "ReadShareGroupStateSummary",
    ),
    "tables.definitions": (
        "CreateDatabase",
        "AlterDatabase",
        "DropDatabase",
        "ListDatabases",
        "CreateTable",
        "DropTable",
        "DescribeTable",
        "ListTables",
        "AlterTable",
        "CreateTablePartition",
        "DropTablePartition",
    ),
    "tables.scans": (
        "LookupKv",
        "ScanKv",
        "PinTable",
        "ReleasePin",
        "TableStats",
        "ListSnapshots",
        "CreateSnapshot",
        "AcquireLease",
        "ReleaseLease",
        "ListLeases",
    ),
    "tables.splits": ("SplitBucket", "MeasureLog"),
    "topics.catalogue": ("CreateTopics", "CreatePartitions", "DeleteTopics"),
    "topics.configs": (
        "DescribeConfigs",
        "ListConfigResources",
        "AlterConfigs",
        "IncrementalAlterConfigs",
    ),
    "topics.log_dirs": ("DescribeLogDirs",),
    "transactions.jobs": ("OpenAttempt", "PublishAttempts", "AbortAttempts", "KeepJob", "ListJobs"),
    "transactions.producers": ("InitProducerId",),
    "transactions.transactions": (
        "AddPartitionsToTxn",
        "AddOffsetsToTxn",
        "TxnOffsetCommit",
        "EndTxn",
        "WriteTxnMarkers",
        "ListTransactions",
        "DescribeTransactions",
        "DescribeProducers",
    ),
}
_MODULES: Final = {
    APIS_BY_NAME[name].key: module for module, names in LOADED_AT_FIRST_USE.items() for name in names
}

#: The rows of the modules that are loaded.
_rows: Final[dict[int, ServedApi]] = {}
#: The keys of those whose requests of one connection may overlap. It grows as modules are loaded.
OVERLAPPING: Final[set[int]] = set()
#: APIs of which everything is loaded.
_loaded: Final[set[int]] = set()


def serves(name: str, *permissions: Permission, overlaps: bool = False) -> Callable[[H], H]:
    """Declare the decorated function to be the handler of the API ``name``."""
    api = APIS_BY_NAME.get(name)
    if api is None:
        raise LookupError(f"there is no API {name!r} in tidemill.wire.apis: add its row there")

    def declare(handler: H) -> H:
        if api.key in _rows:
            raise ValueError(f"API {name} has two handlers: {_rows[api.key].handler} and {handler}")
        _rows[api.key] = ServedApi(api, handler, inspect.iscoroutinefunction(handler), overlaps, permissions)
        if overlaps:
            OVERLAPPING.add(api.key)
        return handler

    return declare


def load_first() -> None:
    """Load the handlers that a node begins with. Raises ``LookupError`` if an API of the wire has none."""
    for module in LOADED_AT_START:
        import_module(f"{_HANDLERS}.{module}")
    # Of Kafka's own APIs only the handlers are large.
    _loaded.update(key for key, row in _rows.items() if not row.api.is_extension)
    without = [api.name for key, api in APIS.items() if key not in _rows and key not in _MODULES]
    if without:
        raise LookupError(f"no handler in {_HANDLERS} serves {', '.join(without)}")


def is_loaded(api_key: int) -> bool:
    """Whether a request of this API can be worked on without loading anything large first."""
    return api_key in _loaded


def load(api_key: int) -> None:
    """Load the handler of a served API, and the module of its messages. It takes long: for a thread."""
    api = APIS[api_key]
    if api_key not in _rows:
        module = f"{_HANDLERS}.{_MODULES[api_key]}"
        import_module(module)
        if api_key not in _rows:
            raise LookupError(f"{module} has no handler that serves {api.name}")
    load_module(api)
    _loaded.add(api_key)


def served_api(api_key: int) -> ServedApi:
    """The row of an API that is loaded."""
    return _rows[api_key]
