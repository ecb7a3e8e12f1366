"""Requests that are small themselves, about state that a client has made as large as it can be.

They are made as those of ``support.hostile``: by a function of the node's address that does what the request
needs first.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

from support.hostile import (
    NOW,
    Address,
    Throw,
    create,
    create_table,
    group_coordinator,
    table_client,
    table_of,
)
from support.raw import RawClient, produce_body
from tidemill.config.topic_keys import BATCH_BYTES_MAX
from tidemill.records.batch import TRANSACTIONAL_BIT
from tidemill.records.compression import ZSTD
from tidemill.records.record import Record, build_batch

__all__ = ("HOSTILE_STATE",)

_MEBIBYTE = 1024 * 1024


def open_transactions(client: RawClient, topic: str, count: int) -> list[tuple[int, int]]:
    """Open so many transactions, each with a record in partition 0; gives their producers' ids and epochs."""
    client.request("ApiVersions", 2, {})
    client.request("FindCoordinator", 2, {"key": topic, "key_type": 1})
    names = [f"{topic}-{number}" for number in range(count)]
    bodies = [{"transactional_id": name, "transaction_timeout": 600_000} for name in names]
    opened = client.request_many("InitProducerId", 2, bodies)
    producers = [(each.producer_id, each.producer_epoch) for each in opened]
    adding = [
        {"transactional_id": name, "producer_id": producer_id, "producer_epoch": epoch}
        | {"topics": [{"name": topic, "partitions": [0]}]}
        for name, (producer_id, epoch) in zip(names, producers, strict=True)
    ]
    old = [{f"v3_and_below_{key}": value for key, value in each.items()} for each in adding]
    client.request_many("AddPartitionsToTxn", 2, old)
    bodies = []
    for name, (producer_id, epoch) in zip(names, producers, strict=True):
        batch = build_batch(
            [Record(None, b"v", NOW)],
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=0,
            attributes=TRANSACTIONAL_BIT,
        )
        bodies.append(produce_body(topic, batch) | {"transactional_id": name})
    for answer in client.request_many("Produce", 9, bodies):
        assert answer.responses[0].partition_responses[0].error_code == 0, answer
    return producers


def abort_many_open_transactions(address: Address) -> Throw:
    """Ends of as many transactions as are written together, beside as many others that are open, too."""
    create(address, "many-open")
    with RawClient(address, 300) as client:
        producers = open_transactions(client, "many-open", 4_000)
    marker: dict[str, Any] = {"transaction_result": False, "coordinator_epoch": 0}
    marker["topics"] = [{"name": "many-open", "partition_indexes": [0]}]
    ends = [marker | {"producer_id": each[0], "producer_epoch": each[1]} for each in producers[:2_000]]
    return "WriteTxnMarkers", 1, {"markers": ends}


def describe_producers_of_many(address: Address) -> Throw:
    """A partition that very many producers write to."""
    create(address, "of-producers")
    with RawClient(address, 300) as client:
        open_transactions(client, "of-producers", 4_000)
    return "DescribeProducers", 0, {"topics": [{"name": "of-producers", "partition_indexes": [0]}]}


def publish_to_a_wide_table(address: Address) -> Throw:
    """As many attempts as there may be, in each of very many buckets whose state is open."""
    table_id = create_table(address, "published", buckets=100)
    topic = "hostile.published"
    with table_client(address) as client:
        pin = {"table_id": table_id, "min_offsets": [], "max_wait_ms": 60_000, "idle_ms": 1_000}
        assert client.request("PinTable", 0, pin).error_code == 0
        bodies = [{"job": topic, "batch": 1, "timeout_ms": 600_000}] * 1_000
        opened = client.request_many("OpenAttempt", 0, bodies)
        attempts = [
            {
                "transactional_id": each.transactional_id,
                "producer_id": each.producer_id,
                "producer_epoch": each.producer_epoch,
            }
            for each in opened
        ]
        topics = [{"name": topic, "partitions": list(range(100))}]
        asked = [each | {"topics": topics} for each in attempts]
        old = [{f"v3_and_below_{key}": value for key, value in each.items()} for each in asked]
        for answer in client.request_many("AddPartitionsToTxn", 2, old):
            results = answer.results_by_topic_v3_and_below[0].results_by_partition
            assert all(each.partition_error_code == 0 for each in results), answer
    return "PublishAttempts", 0, {"job": topic, "batch": 1, "attempts": attempts}


def rows_in_a_table(address: Address, name: str, *rows: bytes) -> tuple[int, bytes]:
    """A table that takes large batches of rows in JSON, and a small batch of these rows, from key 0 on."""
    configs = [{"key": "max.message.bytes", "value": str(BATCH_BYTES_MAX)}]
    table_id = create_table(address, name, row_format="json", properties=configs)
    records = [
        Record(b"%d" % number, b'{"id":%d,"v":"%b"}' % (number, row), NOW) for number, row in enumerate(rows)
    ]
    return table_id, build_batch(records, codec=ZSTD)


def upsert_large_rows(address: Address) -> Throw:
    """A small batch of few rows that are as large as rows can be."""
    _, batch = rows_in_a_table(address, "large-rows", *[b"x" * (15 * _MEBIBYTE)] * 8)
    return "Produce", 9, produce_body("hostile.large-rows", batch)


def upsert_rows_that_are_too_large(address: Address) -> Throw:
    _, batch = rows_in_a_table(address, "too-large-rows", b"x" * (120 * _MEBIBYTE))
    return "Produce", 9, produce_body("hostile.too-large-rows", batch)


def upsert_a_row_of_very_many_values(address: Address) -> Throw:
    """A row in JSON with as many values as fit into one; more than a row may have."""
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.list_(pa.int64()))])
    with table_client(address) as client:
        table = table_of(schema, "hostile.many-values") | {"row_format": "json"}
        assert client.request("CreateTable", 0, table).error_code == 0
    row = b'{"id":0,"v":[' + b"1," * (7 * _MEBIBYTE) + b"1]}"
    batch = build_batch([Record(b"0", row, NOW)], codec=ZSTD)
    return "Produce", 9, produce_body("hostile.many-values", batch)


def upsert_very_many_rows(address: Address) -> Throw:
    """As many rows as a batch may have."""
    _, batch = rows_in_a_table(address, "many-rows", *[b""] * 200_000)
    return "Produce", 9, produce_body("hostile.many-rows", batch)


def look_up_a_large_row_often(address: Address) -> Throw:
    """A row of a megabyte, behind keys that have none, as often as a request may ask for it."""
    table_id, batch = rows_in_a_table(address, "often", b"x" * _MEBIBYTE)
    with RawClient(address, 300) as client:
        client.request("ApiVersions", 2, {})
        assert client.produce("hostile.often", batch).error_code == 0
    keys = [bytes([n % 256, n // 256]) for n in range(1_000)] + [b"\x80" + bytes(7)] * 9_000
    body: dict[str, Any] = {"table_id": table_id, "partition_id": 0, "bucket": 0, "leader_epoch": -1}
    return "LookupKv", 0, body | {"keys": keys, "columns": [], "min_offset": -1, "max_wait_ms": 60_000}


def describe_a_fat_group(address: Address) -> Throw:
    """A classic group whose members say as much as they may, and have large assignments."""
    group_coordinator(address)
    body = {"group_id": "fat-members", "session_timeout": 600_000, "rebalance_timeout": 600_000}
    body |= {"member_id": "", "protocol_type": "consumer"}
    body["protocols"] = [{"name": "p", "metadata": bytes(_MEBIBYTE - 1_000)}]
    with ExitStack() as clients:
        # A connection's requests wait for each other.
        leading, *others = (clients.enter_context(RawClient(address, 300)) for _ in range(4))
        for client in (leading, *others):
            client.request("ApiVersions", 2, {})
        leader = leading.request("JoinGroup", 3, body).member_id
        for client in others:
            client.send(client.encode("JoinGroup", 3, body))
        while len(leading.request("DescribeGroups", 4, {"groups": ["fat-members"]}).groups[0].members) < 4:
            pass
        generation = leading.request("JoinGroup", 3, body | {"member_id": leader}).generation_id
        syncing = {"group_id": "fat-members", "generation_id": generation, "member_id": leader}
        assignments = [{"member_id": leader, "assignment": bytes(2_000_000)}]
        answer = leading.request(
            "SyncGroup", 3, syncing | {"group_instance_id": None, "assignments": assignments}
        )
        assert answer.error_code == 0, answer
    return "DescribeGroups", 4, {"groups": ["fat-members"]}


def join_with_long_names(address: Address) -> Throw:
    """Names of protocols, which take as much as a request may: more than a member may."""
    group_coordinator(address)
    protocols = [{"name": f"p{n}".ljust(32_000), "metadata": b""} for n in range(500)]
    body = {"group_id": "named", "session_timeout": 10_000, "rebalance_timeout": 10_000, "member_id": ""}
    return "JoinGroup", 3, body | {"protocol_type": "consumer", "protocols": protocols}


def subscribe_to_a_wide_topic_by_a_pattern(address: Address) -> Throw:
    """One name that a pattern matches, with very many partitions."""
    group_coordinator(address)
    create(address, "matched-and-wide", partitions=2_500)
    body = {"group_id": "of-a-pattern", "member_id": "m", "member_epoch": 0, "rebalance_timeout": 60_000}
    body |= {"subscribed_topic_regex": "matched-and-wide", "topic_partitions": []}
    return "ConsumerGroupHeartbeat", 1, body


HOSTILE_STATE: dict[str, Callable[[Address], Throw]] = {
    each.__name__: each
    for each in (
        abort_many_open_transactions,
        describe_producers_of_many,
        publish_to_a_wide_table,
        upsert_large_rows,
        upsert_rows_that_are_too_large,
        upsert_a_row_of_very_many_values,
        upsert_very_many_rows,
        look_up_a_large_row_often,
        describe_a_fat_group,
        join_with_long_names,
        subscribe_to_a_wide_topic_by_a_pattern,
    )
}
