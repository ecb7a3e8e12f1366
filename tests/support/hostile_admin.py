"""The largest requests of administrators and about definitions, and why other APIs need none.

They are made as those of ``support.hostile``. ``SMALL`` has the APIs whose requests are small by
construction, each with the reason; ``tests/unit/test_hostile_requests.py`` finds an API that is neither there
nor thrown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pyarrow as pa

from support.hostile import SMALL_SCHEMA, Address, Throw, create, create_table, table_client, table_of
from support.raw import RawClient

__all__ = ("HOSTILE_ADMIN", "SMALL")

_ONE_THING: Final = "it names one thing, and its handler does a bounded piece of work for it"
_NODES_ONLY: Final = "only nodes may send it, with the cluster's secret"

SMALL: Final[dict[str, str]] = {
    "AddOffsetsToTxn": _ONE_THING,
    "ApiVersions": "it asks for a table that never changes",
    "CreateTablePartition": "it adds one topic, as CreateTopics does",
    "DeleteShareGroupState": _NODES_ONLY,
    "DescribeCluster": "it asks for the nodes, of which there are few",
    "DescribeNodes": "it asks for the nodes, of which there are few",
    "DescribeTable": "one table, whose columns and properties are limited",
    "DropTablePartition": "it deletes one topic, as DropTable does several",
    "ElectReplica": _ONE_THING,
    "Heartbeat": _ONE_THING,
    "InitProducerId": _ONE_THING,
    "InitializeShareGroupState": _NODES_ONLY,
    "KeepJob": _ONE_THING,
    "OpenAttempt": _ONE_THING,
    "ReadShareGroupState": _NODES_ONLY,
    "ReadShareGroupStateSummary": _NODES_ONLY,
    "ReleaseLease": _ONE_THING,
    "ReleasePin": _ONE_THING,
    "SplitBucket": "one bucket, measured in a thread",
    "UnregisterBroker": _ONE_THING,
    "WriteShareGroupState": _NODES_ONLY,
}
"""APIs of which no request is large, and why."""


def alter_all_configs(address: Address) -> Throw:
    """Old AlterConfigs of very many topics that do not exist."""
    configs = [{"name": "retention.ms", "value": "5"}]
    resources = [
        {"resource_type": 2, "resource_name": f"none-{n}", "configs": configs} for n in range(40_000)
    ]
    return "AlterConfigs", 1, {"resources": resources, "validate_only": False}


def alter_many_configs_of_one(address: Address) -> Throw:
    create(address, "reconfigured")
    configs = [{"name": f"no.such.config.{n}", "value": "5"} for n in range(90_000)]
    resources = [{"resource_type": 2, "resource_name": "reconfigured", "configs": configs}]
    return "AlterConfigs", 1, {"resources": resources, "validate_only": False}


def update_many_features(address: Address) -> Throw:
    updates = [{"feature": f"f{n}", "max_version_level": 1, "upgrade_type": 1} for n in range(90_000)]
    return "UpdateFeatures", 1, {"timeout": 60_000, "feature_updates": updates, "validate_only": False}


def describe_many_quorums(address: Address) -> Throw:
    topics = [{"topic_name": f"t{n}", "partitions": [{"partition_index": 0}]} for n in range(30_000)]
    return "DescribeQuorum", 1, {"topics": topics}


def tag_with_many(address: Address) -> Throw:
    return "SetNodeTags", 0, {"node_id": 1, "tags": [f"tag-{n}" for n in range(90_000)]}


def many_transactions(address: Address, name: str, count: int, length: int) -> None:
    """Have so many transactional ids, each of so many characters."""
    with RawClient(address, 300) as client:
        client.request("FindCoordinator", 2, {"key": "t", "key_type": 1})
        client.request("InitProducerId", 2, {"transactional_id": "t", "transaction_timeout": 60_000})
        for start in range(0, count, 50):
            ids = [f"{name}-{n}".ljust(length, "a") for n in range(start, start + 50)]
            client.send(
                b"".join(
                    client.encode(
                        "InitProducerId", 2, {"transactional_id": each, "transaction_timeout": 60_000}
                    )
                    for each in ids
                )
            )
            for _ in ids:
                client.read_frame()


def list_transactions_of_many_producers(address: Address) -> Throw:
    """As many filters as a request may have, for each of many transactional ids."""
    many_transactions(address, "listed", 2_000, 10)
    body: dict[str, Any] = {"state_filters": [], "producer_id_filters": list(range(10**9, 10**9 + 90_000))}
    return "ListTransactions", 2, body | {"duration_filter": -1, "transactional_id_pattern": None}


def list_transactions_by_a_pattern(address: Address) -> Throw:
    """A long pattern for many long transactional ids."""
    many_transactions(address, "matched", 1_000, 20_000)
    body: dict[str, Any] = {"state_filters": [], "producer_id_filters": [], "duration_filter": -1}
    return "ListTransactions", 2, body | {"transactional_id_pattern": "(a|b|c)*" * 50 + "x"}


def do_many(client: RawClient, api: str, bodies: Sequence[dict[str, Any]]) -> None:
    """Send requests about definitions or jobs, none of which may be refused."""
    refusals = {answer.error_message for answer in client.request_many(api, 0, bodies)}
    assert refusals == {None}, (api, refusals)


def list_many_jobs(address: Address) -> Throw:
    def publish(numbers: range) -> None:
        with RawClient(address, 300) as client:
            client.request("ApiVersions", 2, {})
            jobs = [f"job-{number}" for number in numbers]
            do_many(client, "PublishAttempts", [{"job": job, "batch": 1, "attempts": []} for job in jobs])

    publish(range(1))
    with ThreadPoolExecutor(10) as threads:
        # Each waits for the disk, so they go side by side.
        list(threads.map(publish, (range(start, start + 2_000) for start in range(1, 20_000, 2_000))))
    return "ListJobs", 0, {}


def list_many_databases(address: Address) -> Throw:
    """Nearly as many databases, and properties of all, as there can be; some have as many as one can have."""
    small = [(f"of-many-{number}", 20) for number in range(7_000)]
    fat = [(f"of-many-properties-{number}", 1_000) for number in range(60)]
    common: dict[str, Any] = {"comment": None, "if_not_exists": True}
    with RawClient(address, 300) as client:
        client.request("ApiVersions", 2, {})
        made = [{"name": name, "properties": properties(count), **common} for name, count in small + fat]
        do_many(client, "CreateDatabase", made)
    return "ListDatabases", 0, {}


def properties(count: int) -> list[dict[str, str]]:
    return [{"key": f"user.k{n}", "value": "v"} for n in range(count)]


def create_database_with_many_properties(address: Address) -> Throw:
    body = {"name": "of-properties", "comment": "c" * 32_000, "if_not_exists": False}
    return "CreateDatabase", 0, body | {"properties": properties(45_000)}


def alter_a_database_with_many_properties(address: Address) -> Throw:
    table_client(address).close()
    body: dict[str, Any] = {"name": "hostile", "comment": None, "set_properties": properties(1_000)}
    return "AlterDatabase", 0, body | {"unset_properties": [f"y{n}" for n in range(40_000)]}


def many_tables(address: Address, database: str, count: int) -> None:
    """Have so many tables in a database of their own."""
    with table_client(address) as client:
        client.request(
            "CreateDatabase", 0, {"name": database, "comment": None, "properties": [], "if_not_exists": True}
        )
        for number in range(count):
            answer = client.request("CreateTable", 0, table_of(SMALL_SCHEMA, f"{database}.t{number}"))
            assert answer.error_code == 0, answer


def list_many_tables(address: Address) -> Throw:
    """Definitions that nobody has read yet, of tables that have no log."""
    with table_client(address) as client:
        schema = SMALL_SCHEMA.append(pa.field("day", pa.string(), nullable=False))
        body = table_of(schema, "") | {"partition_column": "day", "primary_key": []}
        do_many(client, "CreateTable", [body | {"name": f"hostile.of-many-{n}"} for n in range(3_000)])
    return "ListTables", 0, {"database": None}


def drop_a_database_of_many(address: Address) -> Throw:
    many_tables(address, "dropped", 200)
    return "DropDatabase", 0, {"name": "dropped", "cascade": True, "if_exists": False}


def drop_a_wide_table(address: Address) -> Throw:
    create_table(address, "wide-dropped", buckets=500)
    return "DropTable", 0, {"name": "hostile.wide-dropped", "if_exists": False}


def named_buckets() -> list[dict[str, int]]:
    """As many as a request may name, each of a table's 100 buckets very often."""
    return [{"partition_id": 0, "bucket": n % 100} for n in range(30_000)]


def snapshot_many_buckets(address: Address) -> Throw:
    create_table(address, "snapped", buckets=100)
    return "CreateSnapshot", 0, {"table": "hostile.snapped", "buckets": named_buckets()}


def list_snapshots_of_many_buckets(address: Address) -> Throw:
    create_table(address, "shown", buckets=100)
    return "ListSnapshots", 0, {"table": "hostile.shown", "buckets": named_buckets()}


def lease_many_buckets(address: Address) -> Throw:
    create_table(address, "leased", buckets=100)
    body = {"lease_id": "of-many", "holder": "h" * 30_000, "duration_ms": 60_000, "fresh": True}
    return "AcquireLease", 0, body | {"table": "hostile.leased", "buckets": named_buckets()}


def list_many_leases(address: Address) -> Throw:
    """Half as many leased snapshots as there can be: to take leases takes long."""
    create_table(address, "of-leases", buckets=256)
    taking = {"lease_id": None, "holder": "h", "duration_ms": 86_400_000, "fresh": False}
    with table_client(address) as client:
        body = taking | {"table": "hostile.of-leases", "buckets": []}
        client.request("AcquireLease", 0, body)
        for _ in range(500):
            assert client.request("AcquireLease", 0, body).error_code == 0
    return "ListLeases", 0, {"table": None}


def pin_behind_many_offsets(address: Address) -> Throw:
    table_id = create_table(address, "pinned-late")
    offset = {"partition_id": 0, "bucket": 0, "offset": 0}
    body = {"table_id": table_id, "min_offsets": [offset] * 30_000, "max_wait_ms": 0, "idle_ms": 1_000}
    return "PinTable", 0, body | {"buckets": [{"partition_id": 0, "bucket": 0}] * 30_000}


HOSTILE_ADMIN: dict[str, Callable[[Address], Throw]] = {
    each.__name__: each
    for each in (
        alter_all_configs,
        alter_many_configs_of_one,
        update_many_features,
        describe_many_quorums,
        tag_with_many,
        list_transactions_of_many_producers,
        list_transactions_by_a_pattern,
        list_many_jobs,
        create_database_with_many_properties,
        alter_a_database_with_many_properties,
        list_many_tables,
        list_many_databases,
        list_many_leases,
        drop_a_database_of_many,
        drop_a_wide_table,
        snapshot_many_buckets,
        list_snapshots_of_many_buckets,
        lease_many_buckets,
        pin_behind_many_offsets,
    )
}
