"""Names and limits of databases, tables and leases. Pure.

The limits are chosen so that a table's record fits into one value of the store with all of them reached at
once: ``DESCRIPTION_BYTES_MAX`` for everything but schemas and partitions, ``SCHEMAS_BYTES_MAX`` for all
schemas together, and ``PARTITIONS_PER_TABLE_MAX`` partitions of the longest values and topic names.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from tidemill.config.topic_names import TOPIC_NAME_CHARACTERS_MAX
from tidemill.control.records import encode, normalised_name
from tidemill.errors import ApiError, ErrorCode, TableCode, TableError

if TYPE_CHECKING:
    from tidemill.control.image import MetadataImage
    from tidemill.control.placement import ControlLimits
    from tidemill.control.tables.images import Catalog, DatabaseImage, LeaseImage, TableImage

__all__ = (
    "PARTITIONS_PER_TABLE_MAX",
    "check_database",
    "check_database_count",
    "check_lease",
    "check_leases",
    "check_log_name",
    "check_partition",
    "check_table",
    "check_table_name",
)

PARTITIONS_PER_TABLE_MAX = 1_000
PARTITION_VALUE_CHARACTERS_MAX = 100
SCHEMA_BYTES_MAX = 256 * 1024
SCHEMAS_BYTES_MAX = 448 * 1024
DESCRIPTION_BYTES_MAX = 128 * 1024
PROPERTIES_MAX = 1_000
"""The most properties of a database or a table."""

DATABASES_MAX = 10_000
DATABASE_BYTES_MAX = 16 * 1024 * 1024
"""The most memory that all databases take with their comments and properties."""
TABLES_MAX = 50_000
TABLE_BYTES_MAX = 512 * 1024 * 1024
"""The most memory that the definitions of all tables take, without their partitions."""

LEASES_MAX = 10_000
LEASED_SNAPSHOTS_MAX = 300_000
"""The most snapshots of all leases: every node has them in memory."""
LEASES_PER_TABLE_MAX = 1_000
SNAPSHOTS_PER_LEASE_MAX = 30_000
"""The most snapshots of a lease, about 800 kB: every bucket of the largest table that a node can hold."""
HOLDER_CHARACTERS_MAX = 255

_NAME = re.compile(r"(?!__)[A-Za-z0-9_-]{1,100}")
_PARTITION_VALUE = re.compile(rf"[A-Za-z0-9._-]{{1,{PARTITION_VALUE_CHARACTERS_MAX}}}")
_LEASE_ID = re.compile(r"[A-Za-z0-9_-]{1,100}")
_NAME_RULE = "1 to 100 letters, digits, '_' and '-', and does not start with '__'"


def check_database(catalog: Catalog, database: DatabaseImage, old: DatabaseImage | None = None) -> None:
    """Raise ``ApiError`` unless the database is allowed, and there is room for it or for what it grows by.

    ``old`` is the one that it replaces: what makes a database smaller is always allowed.
    """
    if not _NAME.fullmatch(database.name):
        raise _invalid(f"{database.name[:120]!r} cannot be a database's name: that has {_NAME_RULE}")
    described = sum(len(key) + len(value) for key, value in database.properties.items())
    described += len(database.comment or "")
    if described > DESCRIPTION_BYTES_MAX:
        raise _invalid(
            f"the comment and properties of database {database.name!r} have {described} characters, over the"
            f" limit of {DESCRIPTION_BYTES_MAX}; shorten them"
        )
    _check_properties(f"database {database.name!r}", database, old)
    if old is None:
        check_database_count(catalog)
    before = 0 if old is None else old.size_bytes
    size = catalog.database_bytes - before + database.size_bytes
    if size > DATABASE_BYTES_MAX and database.size_bytes > before:
        raise ApiError(
            ErrorCode.policy_violation,
            f"with database {database.name!r}, all databases would have {size} bytes of comments and"
            f" properties, over the limit of {DATABASE_BYTES_MAX}; remove some that are not needed",
        )


def check_database_count(catalog: Catalog) -> None:
    """Raise ``ApiError`` unless there can be one more database."""
    if len(catalog.databases) >= DATABASES_MAX:
        raise ApiError(
            ErrorCode.policy_violation,
            f"there are {len(catalog.databases)} databases, which is the limit; drop some that are not"
            " needed",
        )


def _check_properties(
    what: str, described: DatabaseImage | TableImage, old: DatabaseImage | TableImage | None
) -> None:
    """Raise ``TableError`` if there are too many properties, and more than before."""
    count = len(described.properties)
    if count > PROPERTIES_MAX and (old is None or count > len(old.properties)):
        raise _invalid(f"{what} would have {count} properties, {PROPERTIES_MAX} are the most; unset some")


def check_table_name(name: str) -> None:
    """Raise ``TableError`` unless ``name`` can be a table's name."""
    parts = name.split(".")
    if len(parts) != 2:
        raise _invalid(f"{name[:240]!r} is not a table's name: give database and table, as in 'shop.orders'")
    for part in parts:
        if not _NAME.fullmatch(part):
            raise _invalid(f"{name[:240]!r} cannot be a table's name: each of its two parts has {_NAME_RULE}")


def check_table(
    catalog: Catalog, table: TableImage, limits: ControlLimits, old: TableImage | None = None
) -> None:
    """Raise ``ApiError`` unless the table is within the limits. Its name has been checked.

    ``old`` is the one that it replaces.
    """
    if not 1 <= table.buckets <= limits.partitions_per_topic:
        raise _invalid(
            f"table {table.name!r} cannot have {table.buckets} buckets; ask for 1 to"
            f" {limits.partitions_per_topic}"
        )
    longest = max(map(len, table.schemas))
    if longest > SCHEMA_BYTES_MAX:
        raise _invalid(
            f"a schema of table {table.name!r} has {longest} bytes, over the limit of {SCHEMA_BYTES_MAX};"
            " use fewer columns or less field metadata"
        )
    total = sum(map(len, table.schemas))
    if total > SCHEMAS_BYTES_MAX:
        raise _invalid(
            f"the {len(table.schemas)} schemas of table {table.name!r} would have {total} bytes together,"
            f" over the limit of {SCHEMAS_BYTES_MAX}; create a table with the new schema and copy the rows"
        )
    described = len(encode(replace(table, schemas=(), partitions=()).to_record()))
    if described > DESCRIPTION_BYTES_MAX:
        raise _invalid(
            f"comment, properties, keys and routing of table {table.name!r} have {described} bytes, over the"
            f" limit of {DESCRIPTION_BYTES_MAX}; shorten them"
        )
    _check_properties(f"table {table.name!r}", table, old)
    if old is None and len(catalog.tables) >= TABLES_MAX:
        raise ApiError(
            ErrorCode.policy_violation,
            f"there are {len(catalog.tables)} tables, which is the limit; drop some that are not needed",
        )
    before = 0 if old is None else old.size_bytes
    size = catalog.table_bytes - before + table.size_bytes
    if size > TABLE_BYTES_MAX and table.size_bytes > before:
        raise ApiError(
            ErrorCode.policy_violation,
            f"with table {table.name!r}, all tables would have {size} bytes of schemas, comments and"
            f" properties, over the limit of {TABLE_BYTES_MAX}; drop some that are not needed",
        )


def check_partition(table: TableImage, value: str) -> None:
    """Raise ``ApiError`` unless the table can get one more partition, of ``value``."""
    if table.partition_column is None:
        raise _invalid(
            f"table {table.name!r} is not partitioned, so it cannot have a partition {value[:120]!r}"
        )
    if not _PARTITION_VALUE.fullmatch(value):
        raise _invalid(
            f"table {table.name!r} cannot have a partition {value[:120]!r}: it becomes a part of a topic's"
            f" name, so it has 1 to {PARTITION_VALUE_CHARACTERS_MAX} letters, digits, '.', '_' and '-'"
        )
    characters_left = TOPIC_NAME_CHARACTERS_MAX - len(table.name) - 1
    if len(value) > characters_left:
        raise _invalid(
            f"table {table.name!r} cannot have a partition {value!r}: its topic's name would be over"
            f" {TOPIC_NAME_CHARACTERS_MAX} characters; with this table's name, {characters_left} are left"
        )
    if len(table.partitions) >= PARTITIONS_PER_TABLE_MAX:
        raise ApiError(
            ErrorCode.policy_violation,
            f"table {table.name!r} has {len(table.partitions)} partitions, which is the limit; drop old ones"
            " or partition by something coarser",
        )


def check_log_name(image: MetadataImage, topic: str, what: str) -> None:
    """Raise ``TableError`` if ``topic`` cannot be the name of the log of ``what``."""
    normalised = normalised_name(topic)
    for kind, other in (
        ("table", image.catalog.table_names_by_normalised.get(normalised)),
        ("topic", image.topic_names_by_normalised.get(normalised)),
    ):
        if other == topic:
            raise TableError(
                TableCode.table_already_exists,
                f"{what} cannot be created: its log would be topic {topic!r}, and there is a {kind} of that"
                " name; remove that or choose another name",
            )
        if other is not None:
            raise _invalid(
                f"{what} cannot be created: its name collides with that of {kind} {other!r}; names may not"
                " differ by '.' and '_' only"
            )


def check_leases(catalog: Catalog, lease: LeaseImage, old: LeaseImage | None) -> None:
    """Raise ``ApiError`` unless there is room for the lease, or for what it has more than ``old``."""
    before = 0 if old is None else len(old.snapshots)
    snapshots = catalog.leased_snapshots - before + len(lease.snapshots)
    if old is None and len(catalog.leases) >= LEASES_MAX:
        problem = f"there are {len(catalog.leases)} leases"
    elif snapshots > LEASED_SNAPSHOTS_MAX and len(lease.snapshots) > before:
        problem = f"all leases would have {snapshots} snapshots, over the limit of {LEASED_SNAPSHOTS_MAX}"
    else:
        return
    raise ApiError(
        ErrorCode.policy_violation,
        f"lease {lease.lease_id[:120]!r} cannot be taken: {problem}; release some, or wait until they are"
        " over",
    )


def check_lease(lease: LeaseImage) -> None:
    """Raise ``ApiError`` unless the lease is within the limits."""
    if not _LEASE_ID.fullmatch(lease.lease_id):
        problem = "a lease's id has 1 to 100 letters, digits, '_' and '-'"
    elif len(lease.holder) > HOLDER_CHARACTERS_MAX:
        problem = f"its holder's name has {len(lease.holder)} characters, over {HOLDER_CHARACTERS_MAX}"
    elif len(lease.snapshots) > SNAPSHOTS_PER_LEASE_MAX:
        problem = (
            f"it names {len(lease.snapshots)} snapshots, over the limit of {SNAPSHOTS_PER_LEASE_MAX};"
            " take several leases, each of some partitions"
        )
    else:
        return
    raise ApiError(ErrorCode.invalid_request, f"lease {lease.lease_id[:120]!r} cannot be taken: {problem}")


def _invalid(message: str) -> TableError:
    return TableError(TableCode.invalid_schema, message)
