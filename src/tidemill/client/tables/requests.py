"""Asking for tables: the error of an answer as an exception, and definitions from answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tidemill.client.cluster import Cluster, passes_by_itself
from tidemill.client.connection import DEFAULT_TIMEOUT_MS
from tidemill.errors import ApiError, ErrorCode, TableError, TidemillError
from tidemill.errors.table_codes import table_code
from tidemill.tables.definition import Partition, TableDefinition

__all__ = (
    "ask_controller",
    "checked",
    "definition_from",
    "is_worth_another_try",
)

_FIRST_TABLE_CODE = 1_000
#: What goes through all buckets of a table, one after the other, has more time.
_LONG = frozenset({"AcquireLease", "CreateSnapshot", "ListSnapshots", "TableStats"})
_LONG_MS = 600_000


def checked(response: Any, what: str) -> Any:
    """The response, unless it is a refusal: that is raised as ``TableError`` or ``ApiError``."""
    code = response.error_code
    if code == ErrorCode.none:
        return response
    if code >= _FIRST_TABLE_CODE:
        known = table_code(code)
        raise TableError(known, response.error_message or f"{what}: the server answered {known.name.upper()}")
    error = ErrorCode(code)
    raise ApiError(error, response.error_message or f"{what}: the server answered {error.name.upper()}")


def is_worth_another_try(error: TidemillError) -> bool:
    """Whether the same request may succeed a moment later."""
    return error.retriable if isinstance(error, TableError) else passes_by_itself(error)


async def ask_controller(cluster: Cluster, name: str, body: Mapping[str, Any], what: str) -> Any:
    """Ask for something about databases and tables; tried again while that can help."""
    timeout_ms = max(DEFAULT_TIMEOUT_MS, cluster.timeout_ms, _LONG_MS if name in _LONG else 0)

    async def attempt() -> Any:
        return checked(await cluster.to_controller(name, body, timeout_ms=timeout_ms), what)

    return await cluster.retrying(attempt, passes=is_worth_another_try)


def definition_from(table: Any) -> TableDefinition:
    """The table of a DescribeTable answer."""
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
        partitions=tuple(Partition(each.partition_id, each.value, each.topic) for each in table.partitions),
        properties={pair.key: pair.value for pair in table.properties},
        comment=table.comment,
        created_ms=table.created_ms,
    )
