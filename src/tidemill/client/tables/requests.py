"""Requests about databases and tables, and the values in their answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from tidemill.client.arguments import values_by_name
from tidemill.client.cluster import Cluster
from tidemill.net.answers import checked
from tidemill.net.connection import DEFAULT_TIMEOUT_MS
from tidemill.net.retry import RetryPolicy
from tidemill.tables.definition import PartitionDefinition, TableDefinition

__all__ = (
    "ask_controller",
    "ask_soon_again",
    "definition_from",
    "pairs",
)

_T = TypeVar("_T")
#: Requests that go through all buckets of a table, one after the other: they have more time.
_LONG = frozenset({"AcquireLease", "CreateSnapshot", "ListSnapshots", "TableStats"})
_LONG_MS = 600_000
_FIRST_PAUSE_MS = 10
_LONGEST_PAUSE_MS = 500


async def ask_controller(cluster: Cluster, name: str, body: Mapping[str, Any], what: str) -> Any:
    """Send a request about databases or tables to the controller, again after transient errors."""
    timeout_ms = max(DEFAULT_TIMEOUT_MS, cluster.timeout_ms, _LONG_MS if name in _LONG else 0)

    async def ask() -> Any:
        return checked(await cluster.to_controller(name, body, timeout_ms=timeout_ms), what)

    return await cluster.retrying(ask)


async def ask_soon_again(cluster: Cluster, action: Callable[[], Awaitable[_T]]) -> _T:
    """Await ``action()`` until it succeeds, fails for good, or the time is over; with short pauses.

    What a bucket has to do first, such as a fold, is often done within milliseconds.
    """
    policy = RetryPolicy(cluster.timeout_ms, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)
    return await cluster.retrying(action, policy=policy)


def pairs(properties: Mapping[str, str] | None, argument: str = "properties") -> list[dict[str, str]]:
    """Properties as the list of names and values that requests have; ``argument`` is where they come from."""
    given = values_by_name(argument, properties)
    return [{"key": name, "value": str(value)} for name, value in given.items()]


def definition_from(table: Any) -> TableDefinition:
    """The table definition in an answer to DescribeTable."""
    return TableDefinition.unpack(
        schemas=(*table.older_schemas, table.schema),
        bucket_map=table.bucket_map,
        name=table.name,
        table_id=table.table_id,
        primary_key=tuple(table.primary_key),
        buckets=table.buckets,
        row_format=table.row_format,
        key_format=table.key_format,
        partition_column=table.partition_column,
        partitions=tuple(
            PartitionDefinition(each.partition_id, each.value, each.topic) for each in table.partitions
        ),
        properties={pair.key: pair.value for pair in table.properties},
        comment=table.comment,
        created_ms=table.created_ms,
    )
