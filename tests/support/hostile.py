"""Requests that once held the event loop for long, or could: the largest that the limits allow.

Each is made by a function of the node's address that does what it needs first, and gives the frame to throw.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any
from uuid import UUID

import pyarrow as pa
from crc32c import crc32c

from support.raw import RawClient, produce_body
from tidemill.config.topic_keys import BATCH_BYTES_MAX, INDEX_INTERVAL_BYTES_MAX
from tidemill.records.compression import ZSTD, compress
from tidemill.records.record import Record, build_batch
from tidemill.records.varints import to_varint
from tidemill.tables.predicates.predicate import Compare, In, Or, Predicate, encode

__all__ = ("HOSTILE", "Address", "batch_of_many")

Address = tuple[str, int]
Throw = tuple[str, int, dict[str, Any]]
"""API, version, body."""

MANY = 100_000
NOW = 1_700_000_000_000
#: Almost as many topics as fit on a node (20,000 partitions); internal topics need room, too.
VERY_MANY = [f"very-many-{number}" for number in range(19_000)]


def batch_of_many(count: int, codec: int) -> bytes:
    """A sound batch of so many smallest records, with a key each."""
    parts = bytearray()
    for number in range(count):
        inner = b"\x00\x00" + to_varint(number) + b"\x02k\x01\x00"
        parts += to_varint(len(inner)) + inner
    checked = struct.pack(">hiqqqhii", codec, count - 1, NOW, NOW, -1, -1, -1, count)
    checked += compress(codec, bytes(parts))
    return struct.pack(">qiibI", 0, len(checked) + 9, -1, 2, crc32c(checked)) + checked


def create(address: Address, name: str, partitions: int = 1, **configs: str) -> None:
    topic = {"name": name, "num_partitions": partitions, "replication_factor": 1}
    topic["configs"] = [{"name": key.replace("_", "."), "value": value} for key, value in configs.items()]
    with RawClient(address) as client:
        answer = client.request("CreateTopics", 5, {"topics": [topic], "timeout": 60_000})
        assert answer.topics[0].error_code == 0, answer


def search_by_time(address: Address) -> Throw:
    """ListOffsets in a batch that unpacks to a million records."""
    create(address, "packed")
    with RawClient(address, 300) as client:
        client.request("ApiVersions", 2, {})
        answer = client.produce("packed", batch_of_many(1_000_000, ZSTD))
        assert answer.error_code == 0, answer
    asked = {"partition_index": 0, "timestamp": -3}
    return "ListOffsets", 7, {"replica_id": -1, "topics": [{"name": "packed", "partitions": [asked]}]}


def to_a_compacted_topic(address: Address) -> Throw:
    """A batch of a million records for a topic whose records are looked at for keys."""
    create(address, "compacted", cleanup_policy="compact")
    return "Produce", 9, produce_body("compacted", batch_of_many(1_000_000, ZSTD))


def to_a_plain_topic(address: Address) -> Throw:
    create(address, "plain")
    return "Produce", 9, produce_body("plain", batch_of_many(1_000_000, ZSTD))


def to_be_recompressed(address: Address) -> Throw:
    """A megabyte that the topic wants to have in another codec."""
    create(address, "recompressed", compression_type="gzip")
    words = [f"value-{number * 7919 % 100_003}".encode() * 5 for number in range(15_000)]
    return (
        "Produce",
        9,
        produce_body("recompressed", build_batch([Record(None, word, NOW) for word in words])),
    )


def names(count: int) -> list[dict[str, Any]]:
    return [{"name": f"no-such-topic-{number}"} for number in range(count)]


def metadata_of_many(address: Address) -> Throw:
    return "Metadata", 9, {"topics": names(90_000), "allow_auto_topic_creation": False}


def metadata_that_creates(address: Address) -> Throw:
    """Names of all the topics of ``very_many_topics``, before there are any."""
    topics = [{"name": name} for name in VERY_MANY]
    return "Metadata", 9, {"topics": topics, "allow_auto_topic_creation": True}


def create_many(address: Address) -> Throw:
    topics = [
        {"name": f"made-{number}", "num_partitions": 1, "replication_factor": 1} for number in range(1_500)
    ]
    return "CreateTopics", 5, {"topics": topics, "timeout": 60_000}


def validate_many(address: Address) -> Throw:
    topics = [
        {"name": f"might-{number}", "num_partitions": 1, "replication_factor": 1} for number in range(9_000)
    ]
    return "CreateTopics", 5, {"topics": topics, "timeout": 60_000, "validate_only": True}


def create_with_many_partitions(address: Address) -> Throw:
    topics = [
        {"name": f"wide-{number}", "num_partitions": 2_500, "replication_factor": 1} for number in range(2)
    ]
    return "CreateTopics", 5, {"topics": topics, "timeout": 60_000}


def delete_many(address: Address) -> Throw:
    return "DeleteTopics", 5, {"topic_names": [f"gone-{n}" for n in range(90_000)], "timeout": 60_000}


def partitions(**fields: Any) -> list[dict[str, Any]]:
    return [{**fields, "partition": n, "partition_index": n, "index": n} for n in range(90_000)]


def only(keys: str, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    wanted = keys.split()
    return [{key: entry[key] for key in wanted} for entry in entries]


def fetch_many(address: Address) -> Throw:
    create(address, "read", partitions=10)
    entries = [
        {"partition": n % 10, "fetch_offset": 0, "partition_max_bytes": 1_000_000} for n in range(90_000)
    ]
    body = {"max_bytes": 10_000_000, "max_wait": 0, "session_epoch": -1}
    return "Fetch", 12, body | {"topics": [{"topic": "read", "partitions": entries}]}


def fetch_behind_a_sparse_index(address: Address) -> Throw:
    """Many reads of a batch that is as far behind an entry of the index as it can be, in smallest batches."""
    create(address, "sparse", index_interval_bytes=str(INDEX_INTERVAL_BYTES_MAX))
    smallest = build_batch([Record(None, None, NOW)])
    count = INDEX_INTERVAL_BYTES_MAX // len(smallest)
    written = [{"index": 0, "records": smallest}] * count
    with RawClient(address, 300) as client:
        client.request("ApiVersions", 2, {})
        topics = [{"name": "sparse", "partition_data": written}]
        client.request("Produce", 9, {"acks": -1, "timeout": 60_000, "topic_data": topics})
    # None of them has room for a second batch, and all but the first have none for a first.
    asked = [{"partition": 0, "fetch_offset": count - 1, "partition_max_bytes": 1}] * 400
    body = {"max_bytes": 10_000_000, "max_wait": 0, "session_epoch": -1}
    return "Fetch", 12, body | {"topics": [{"topic": "sparse", "partitions": asked}]}


def region_of_many_partitions(address: Address) -> Throw:
    """As many positions as one request may have, none of which has anything."""
    create(address, "region", partitions=10)
    positions = [
        {"partition": n % 10, "offset": 0, "leader_epoch": 0, "current_leader_epoch": -1}
        for n in range(1_000)
    ]
    return "FetchRegion", 0, {"topic": "region", "max_bytes": 10_000_000, "partitions": positions}


def region_through_a_filter(address: Address) -> Throw:
    """A filter over very many small records, which a small batch has."""
    create(address, "filtered", max_message_bytes=str(BATCH_BYTES_MAX))
    with RawClient(address, 300) as client:
        client.request("Produce", 9, produce_body("filtered", batch_of_many(500_000, ZSTD)))
    position = {"partition": 0, "offset": 0, "leader_epoch": 0, "current_leader_epoch": -1}
    region = {"topic": "filtered", "key_prefix": b"x", "headers": [{"name": "h", "value": b"v"}]}
    return "FetchRegion", 0, region | {"max_bytes": 10_000_000, "partitions": [position]}


def fetch_many_topics(address: Address) -> Throw:
    entry = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1_000_000}
    topics = [{"topic": f"t{n}", "partitions": [entry]} for n in range(45_000)]
    return "Fetch", 12, {"max_bytes": 10_000_000, "max_wait": 100, "min_bytes": 1, "topics": topics}


def produce_many(address: Address) -> Throw:
    create(address, "written", partitions=100)
    records = build_batch([Record(None, b"v", NOW)])
    entries = [{"index": n % 100, "records": records} for n in range(9_000)]
    body = {"acks": -1, "timeout": 60_000, "topic_data": [{"name": "written", "partition_data": entries}]}
    return "Produce", 9, body


def produce_to_unknown(address: Address) -> Throw:
    records = build_batch([Record(None, b"v", NOW)])
    entries = [{"index": n, "records": records} for n in range(15_000)]
    body = {"acks": -1, "timeout": 60_000, "topic_data": [{"name": "nowhere", "partition_data": entries}]}
    return "Produce", 9, body


def list_many(address: Address) -> Throw:
    create(address, "listed", partitions=10)
    entries = [{"partition_index": n % 10, "timestamp": -1} for n in range(90_000)]
    return "ListOffsets", 5, {"replica_id": -1, "topics": [{"name": "listed", "partitions": entries}]}


def epochs_of_many(address: Address) -> Throw:
    create(address, "epochs", partitions=10)
    entries = [{"partition": n % 10, "leader_epoch": 0, "current_leader_epoch": -1} for n in range(90_000)]
    return (
        "OffsetForLeaderEpoch",
        3,
        {"replica_id": -1, "topics": [{"topic": "epochs", "partitions": entries}]},
    )


def group_coordinator(address: Address) -> None:
    with RawClient(address) as client:
        client.request("FindCoordinator", 2, {"key": "g", "key_type": 0})


def commit_many(address: Address) -> Throw:
    group_coordinator(address)
    create(address, "committed", partitions=1_000)
    entries = [
        {"partition_index": n % 1_000, "committed_offset": 1, "committed_metadata": "m"}
        for n in range(90_000)
    ]
    body = {"group_id": "g", "generation_id_or_member_epoch": -1, "member_id": ""}
    return "OffsetCommit", 7, body | {"topics": [{"name": "committed", "partitions": entries}]}


def fetch_many_offsets(address: Address) -> Throw:
    group_coordinator(address)
    asked = [{"name": "committed", "partition_indexes": list(range(90_000))}]
    return "OffsetFetch", 5, {"group_id": "g", "topics": asked}


def fetch_offsets_of_many_groups(address: Address) -> Throw:
    group_coordinator(address)
    return "OffsetFetch", 8, {"groups": [{"group_id": f"g{n}", "topics": None} for n in range(90_000)]}


def delete_many_offsets(address: Address) -> Throw:
    group_coordinator(address)
    entries = [{"partition_index": n} for n in range(90_000)]
    return "OffsetDelete", 0, {"group_id": "g", "topics": [{"name": "committed", "partitions": entries}]}


def describe_many_groups(address: Address) -> Throw:
    group_coordinator(address)
    return "DescribeGroups", 4, {"groups": [f"g{n}" for n in range(90_000)]}


def delete_many_groups(address: Address) -> Throw:
    group_coordinator(address)
    return "DeleteGroups", 1, {"groups_names": [f"g{n}" for n in range(90_000)]}


def describe_many_consumer_groups(address: Address) -> Throw:
    group_coordinator(address)
    return "ConsumerGroupDescribe", 0, {"group_ids": [f"g{n}" for n in range(90_000)]}


def join_with_many_protocols(address: Address) -> Throw:
    group_coordinator(address)
    protocols = [{"name": f"p{n}", "metadata": b""} for n in range(90_000)]
    body = {"group_id": "j", "session_timeout": 10_000, "rebalance_timeout": 10_000, "member_id": ""}
    return "JoinGroup", 3, body | {"protocol_type": "consumer", "protocols": protocols}


def find_many_coordinators(address: Address) -> Throw:
    return "FindCoordinator", 4, {"key_type": 0, "coordinator_keys": [f"g{n}" for n in range(90_000)]}


def describe_many_configs(address: Address) -> Throw:
    create(address, "configured")
    resources = [{"resource_type": 2, "resource_name": "configured", "configuration_keys": None}] * 3_000
    return "DescribeConfigs", 2, {"resources": resources}


def alter_many_configs(address: Address) -> Throw:
    configs = [{"name": "retention.ms", "config_operation": 0, "value": "5"}]
    resources = [
        {"resource_type": 2, "resource_name": f"none-{n}", "configs": configs} for n in range(40_000)
    ]
    return "IncrementalAlterConfigs", 1, {"resources": resources}


def describe_many_log_dirs(address: Address) -> Throw:
    topics = [{"topic": f"t{n}", "partitions": [0]} for n in range(45_000)]
    return "DescribeLogDirs", 1, {"topics": topics}


def delete_many_records(address: Address) -> Throw:
    create(address, "shortened", partitions=10)
    entries = [{"partition_index": n % 10, "offset": 0} for n in range(90_000)]
    return "DeleteRecords", 1, {"timeout": 60_000, "topics": [{"name": "shortened", "partitions": entries}]}


def grow_many(address: Address) -> Throw:
    topics = [{"name": f"none-{n}", "count": 3, "assignments": None} for n in range(90_000)]
    return "CreatePartitions", 1, {"topics": topics, "timeout": 60_000}


def elect_many(address: Address) -> Throw:
    create(address, "elected")
    topics = [{"topic": "elected", "partitions": list(range(90_000))}]
    return "ElectLeaders", 1, {"election_type": 0, "topic_partitions": topics, "timeout": 60_000}


def describe_partitions_of_many(address: Address) -> Throw:
    return "DescribeTopicPartitions", 0, {"topics": names(90_000), "response_partition_limit": 2_000}


def describe_many_producers(address: Address) -> Throw:
    create(address, "produced", partitions=10)
    topics = [{"name": "produced", "partition_indexes": [n % 10 for n in range(90_000)]}]
    return "DescribeProducers", 0, {"topics": topics}


def describe_many_transactions(address: Address) -> Throw:
    with RawClient(address) as client:
        client.request("FindCoordinator", 2, {"key": "t", "key_type": 1})
    return "DescribeTransactions", 0, {"transactional_ids": [f"t{n}" for n in range(90_000)]}


def add_many_partitions(address: Address) -> Throw:
    create(address, "added", partitions=2_000)
    with RawClient(address) as client:
        client.request("FindCoordinator", 2, {"key": "adder", "key_type": 1})
        body = {"transactional_id": "adder", "transaction_timeout": 60_000}
        opened = client.request("InitProducerId", 2, body)
    body = {
        "transactional_id": "adder",
        "producer_id": opened.producer_id,
        "producer_epoch": opened.producer_epoch,
    }
    asked = [{"name": "added", "partitions": [n % 2_000 for n in range(90_000)]}]
    old = {f"v3_and_below_{key}": value for key, value in (body | {"topics": asked}).items()}
    return "AddPartitionsToTxn", 2, old


def fetch_many_in_a_session(address: Address) -> Throw:
    create(address, "in-session", partitions=10)
    entries = [{"partition": n, "fetch_offset": 0, "partition_max_bytes": 1_000_000} for n in range(90_000)]
    body = {"max_bytes": 10_000_000, "max_wait": 0, "session_id": 0, "session_epoch": 0}
    return "Fetch", 12, body | {"topics": [{"topic": "in-session", "partitions": entries}]}


def fetch_all_offsets_again_and_again(address: Address) -> Throw:
    """Everything that one group has committed, 20,000 times: two gigabytes if it were answered."""
    group_coordinator(address)
    create(address, "widely-committed", partitions=1_000)
    entries = [
        {"partition_index": n, "committed_offset": 1, "committed_metadata": "m" * 50} for n in range(1_000)
    ]
    body = {"group_id": "wide", "generation_id_or_member_epoch": -1, "member_id": ""}
    body["topics"] = [{"name": "widely-committed", "partitions": entries}]
    with RawClient(address) as client:
        client.request("OffsetCommit", 7, body)
    return "OffsetFetch", 8, {"groups": [{"group_id": "wide", "topics": None}] * 20_000}


def leave_with_many(address: Address) -> Throw:
    group_coordinator(address)
    with RawClient(address) as client:
        protocols = [{"name": "p", "metadata": b""}]
        body = {"group_id": "left", "session_timeout": 60_000, "rebalance_timeout": 60_000, "member_id": ""}
        client.request("JoinGroup", 3, body | {"protocol_type": "consumer", "protocols": protocols})
    members = [{"member_id": f"m{n}", "group_instance_id": None} for n in range(90_000)]
    return "LeaveGroup", 4, {"group_id": "left", "members": members}


def subscribe_to_many(address: Address) -> Throw:
    group_coordinator(address)
    body = {"group_id": "subscribed", "member_id": "m", "member_epoch": 0, "rebalance_timeout": 60_000}
    body["subscribed_topic_names"] = [f"topic-{n}" for n in range(90_000)]
    return "ConsumerGroupHeartbeat", 1, body | {"topic_partitions": []}


def own_many(address: Address) -> Throw:
    group_coordinator(address)
    body = {"group_id": "owned", "member_id": "m", "member_epoch": 0, "rebalance_timeout": 60_000}
    owned = [{"topic_id": UUID(int=1), "partitions": list(range(90_000))}]
    return "ConsumerGroupHeartbeat", 1, body | {"subscribed_topic_names": ["t"], "topic_partitions": owned}


def attempts_of_many_partitions(address: Address, job: str, count: int) -> list[dict[str, Any]]:
    """Open so many attempts of batch 1 of a job, each of 100 partitions and hardly two of the same ones."""
    create(address, job, partitions=120)
    with RawClient(address, 300) as client:
        client.request("ApiVersions", 2, {})
        attempts = []
        for number in range(count):
            opened = client.request("OpenAttempt", 0, {"job": job, "batch": 1, "timeout_ms": 600_000})
            attempt = {
                "transactional_id": opened.transactional_id,
                "producer_id": opened.producer_id,
                "producer_epoch": opened.producer_epoch,
            }
            attempts.append(attempt)
            partitions = [(number + each) % 120 for each in range(100)]
            asked = attempt | {"topics": [{"name": job, "partitions": partitions}]}
            client.request(
                "AddPartitionsToTxn", 2, {f"v3_and_below_{key}": value for key, value in asked.items()}
            )
    return attempts


def publish_many(address: Address) -> Throw:
    """A publication of as many attempts as there may be, beside others that it aborts."""
    attempts = attempts_of_many_partitions(address, "published", 1_200)
    return "PublishAttempts", 0, {"job": "published", "batch": 1, "attempts": attempts[:1_000]}


def abort_many_attempts(address: Address) -> Throw:
    attempts_of_many_partitions(address, "aborted", 1_000)
    return "AbortAttempts", 0, {"job": "aborted", "batch": 1, "attempts": []}


def find_coordinators_of_long_keys(address: Address) -> Throw:
    """As many keys of nearly the greatest length as a request may hold."""
    keys = [f"{number:06}".ljust(30_000, "k") for number in range(550)]
    return "FindCoordinator", 4, {"key_type": 0, "coordinator_keys": keys}


def join_with_large_metadata(address: Address) -> Throw:
    """A member whose subscription takes as much as a request may: more than a member may."""
    group_coordinator(address)
    protocols = [{"name": f"p{n}", "metadata": bytes(1_000_000)} for n in range(15)]
    body = {"group_id": "fat", "session_timeout": 10_000, "rebalance_timeout": 10_000, "member_id": ""}
    return "JoinGroup", 3, body | {"protocol_type": "consumer", "protocols": protocols}


def table_of(schema: pa.Schema, name: str) -> dict[str, Any]:
    fields: dict[str, Any] = {"row_format": None, "key_format": None, "partition_column": None}
    fields |= {"name": name, "schema": bytes(schema.serialize()), "primary_key": ["id"], "buckets": 1}
    return fields | {"boundaries": [], "properties": [], "comment": None, "if_not_exists": False}


def table_client(address: Address) -> RawClient:
    client = RawClient(address, 300)
    client.request("ApiVersions", 2, {})
    client.request(
        "CreateDatabase", 0, {"name": "hostile", "comment": None, "properties": [], "if_not_exists": True}
    )
    return client


def create_table_with_many_columns(address: Address) -> Throw:
    """A schema of nearly the greatest size."""
    table_client(address).close()
    columns = [pa.field("id", pa.int64(), nullable=False)]
    columns += [pa.field(f"c{number}", pa.string()) for number in range(20_000)]
    return "CreateTable", 0, table_of(pa.schema(columns), "hostile.wide")


def create_table_with_deep_columns(address: Address) -> Throw:
    """Columns of structs in structs, of which a small schema can have very many."""
    table_client(address).close()
    inner: pa.DataType = pa.string()
    for _ in range(20):
        inner = pa.struct([pa.field("a", inner), pa.field("b", pa.list_(pa.int64()))])
    columns = [pa.field("id", pa.int64(), nullable=False)]
    columns += [pa.field(f"c{number}", inner) for number in range(120)]
    return "CreateTable", 0, table_of(pa.schema(columns), "hostile.deep")


def scan_with(address: Address, name: str, predicate: Predicate) -> Throw:
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])
    with table_client(address) as client:
        created = client.request("CreateTable", 0, table_of(schema, f"hostile.{name}"))
        assert created.error_code == 0, created
    fields: dict[str, Any] = {
        "scanner_id": None,
        "table_id": created.table_id,
        "partition_id": 0,
        "bucket": 0,
    }
    fields |= {"leader_epoch": -1, "pin_id": None, "lease_id": None, "limit": -1, "columns": []}
    fields |= {"predicate": encode(predicate), "start_key": None, "end_key": None, "call_sequence": 0}
    return "ScanKv", 0, fields | {"batch_size_bytes": 1_000_000, "close": False, "keep_alive": False}


def scan_with_many_values(address: Address) -> Throw:
    return scan_with(address, "values", In(("v",), tuple(f"value-{n}" for n in range(9_999))))


def scan_with_many_comparisons(address: Address) -> Throw:
    terms = tuple(Compare(("v",), "=", f"value-{n}") for n in range(4_999))
    return scan_with(address, "comparisons", Or(terms))


def metadata_of_all(address: Address) -> Throw:
    """Every topic of a node that has very many."""
    very_many_topics(address)
    return "Metadata", 9, {"topics": None, "allow_auto_topic_creation": False}


def describe_all_partitions(address: Address) -> Throw:
    very_many_topics(address)
    return "DescribeTopicPartitions", 0, {"topics": [], "response_partition_limit": 2_000}


def describe_all_log_dirs(address: Address) -> Throw:
    very_many_topics(address)
    return "DescribeLogDirs", 1, {"topics": None}


def list_all_configs(address: Address) -> Throw:
    very_many_topics(address)
    return "ListConfigResources", 1, {"resource_types": []}


def delete_one_of_all(address: Address) -> Throw:
    very_many_topics(address)
    return "DeleteTopics", 5, {"topic_names": ["very-many-7"], "timeout": 60_000}


def create_one_more(address: Address) -> Throw:
    very_many_topics(address)
    topic = {"name": "one-more", "num_partitions": 1, "replication_factor": 1}
    return "CreateTopics", 5, {"topics": [topic], "timeout": 60_000}


def subscribe_by_a_pattern(address: Address) -> Throw:
    """A regular expression that matches every topic of a node that has very many."""
    group_coordinator(address)
    very_many_topics(address)
    return "ConsumerGroupHeartbeat", 1, joining("matched", "m")


def subscribe_by_a_pattern_beside_another(address: Address) -> Throw:
    """The second member of such a group: half of everything moves."""
    group_coordinator(address)
    very_many_topics(address)
    with RawClient(address, 300) as client:
        answer = client.request("ConsumerGroupHeartbeat", 1, joining("shared", "m1"))
        assert answer.error_code == 0, answer
    return "ConsumerGroupHeartbeat", 1, joining("shared", "m2")


def leave_with_everything(address: Address) -> Throw:
    subscribe_by_a_pattern_beside_another(address)
    leaving = {"group_id": "shared", "member_id": "m1", "member_epoch": -1, "rebalance_timeout": -1}
    return "ConsumerGroupHeartbeat", 1, leaving | {"topic_partitions": None}


def describe_a_large_group(address: Address) -> Throw:
    subscribe_by_a_pattern_beside_another(address)
    return "ConsumerGroupDescribe", 0, {"group_ids": ["shared"]}


def join_a_group_of_many(address: Address) -> Throw:
    """One more of many members, each of which names as many topics as it may."""
    group_coordinator(address)
    very_many_topics(address)
    with RawClient(address, 300) as client:
        client.request("ApiVersions", 2, {})
        for number in range(30):
            answer = client.request("ConsumerGroupHeartbeat", 1, joining_by_name(f"m{number}"))
            assert answer.error_code == 0, answer
    return "ConsumerGroupHeartbeat", 1, joining_by_name("one-more")


def joining(group_id: str, member_id: str) -> dict[str, Any]:
    body = {"group_id": group_id, "member_id": member_id, "member_epoch": 0, "rebalance_timeout": 60_000}
    return body | {"subscribed_topic_regex": "very-many-.*", "topic_partitions": []}


def joining_by_name(member_id: str) -> dict[str, Any]:
    body = {"group_id": "of-many", "member_id": member_id, "member_epoch": 0, "rebalance_timeout": 60_000}
    names = [f"very-many-{number}" for number in range(1_500)]
    return body | {"subscribed_topic_names": names, "topic_partitions": []}


def very_many_topics(address: Address) -> None:
    """Have very many topics, unless there are."""
    with RawClient(address, 300) as client:
        client.request("ApiVersions", 2, {})
        for start in range(0, len(VERY_MANY), 2_000):
            topics = [
                {"name": name, "num_partitions": 1, "replication_factor": 1}
                for name in VERY_MANY[start : start + 2_000]
            ]
            client.request("CreateTopics", 5, {"topics": topics, "timeout": 60_000})


def share_joining(group_id: str, member_id: str, *names: str) -> dict[str, Any]:
    body = {"group_id": group_id, "member_id": member_id, "member_epoch": 0, "rack_id": None}
    return body | {"subscribed_topic_names": list(names)}


def join_a_wide_share_group(address: Address) -> Throw:
    """A share group of very many partitions: all of them get state, and are assigned."""
    create(address, "share-wide", partitions=2_000)
    return "ShareGroupHeartbeat", 1, share_joining("share-wide", "m", "share-wide")


def in_a_wide_share_group(address: Address, member_epoch: int) -> None:
    """Join the group of ``join_a_wide_share_group``, or leave it with epoch -1."""
    body = share_joining("share-wide", "m", "share-wide") | {"member_epoch": member_epoch}
    with RawClient(address, 300) as client:
        client.request("ShareGroupHeartbeat", 1, body)


def describe_a_wide_share_group(address: Address) -> Throw:
    in_a_wide_share_group(address, 0)
    return "DescribeShareGroupOffsets", 1, {"groups": [{"group_id": "share-wide", "topics": None}]}


def describe_many_share_groups(address: Address) -> Throw:
    group_coordinator(address)
    return "ShareGroupDescribe", 1, {"group_ids": [f"g{n}" for n in range(10_000)]}


def describe_many_share_offsets(address: Address) -> Throw:
    group_coordinator(address)
    groups = [{"group_id": f"g{n}", "topics": None} for n in range(10_000)]
    return "DescribeShareGroupOffsets", 1, {"groups": groups}


def alter_many_share_offsets(address: Address) -> Throw:
    in_a_wide_share_group(address, -1)
    partitions = [{"partition_index": n, "start_offset": 0} for n in range(2_000)]
    topics = [{"topic_name": "share-wide", "partitions": partitions}]
    return "AlterShareGroupOffsets", 0, {"group_id": "share-wide", "topics": topics}


def share_fetch_of(partitions: list[dict[str, Any]], topic_id: Any) -> dict[str, Any]:
    return {
        "group_id": "fetching",
        "member_id": "m",
        "share_session_epoch": 0,
        "max_wait": 0,
        "min_bytes": 1,
        "max_bytes": 1_000_000,
        "max_records": 500,
        "batch_size": 500,
        "topics": [{"topic_id": topic_id, "partitions": partitions}],
        "forgotten_topics_data": [],
    }


def share_fetch_of_unknown_partitions(address: Address) -> Throw:
    entries = [{"partition_index": n, "acknowledgement_batches": []} for n in range(5_000)]
    return "ShareFetch", 1, share_fetch_of(entries, UUID(int=7))


def share_fetch_of_partitions_without_state(address: Address) -> Throw:
    create(address, "share-fetched", partitions=500)
    with RawClient(address, 300) as client:
        topics = client.request(
            "Metadata", 12, {"topics": [{"name": "share-fetched", "topic_id": None}]}
        ).topics
    entries = [{"partition_index": n, "acknowledgement_batches": []} for n in range(500)]
    return "ShareFetch", 1, share_fetch_of(entries, topics[0].topic_id)


def open_transaction(address: Address, name: str, count: int) -> dict[str, Any]:
    """Begin a transaction over all partitions of a topic; gives how its producer names itself."""
    with RawClient(address, 300) as client:
        client.request("FindCoordinator", 2, {"key": name, "key_type": 1})
        body = {"transactional_id": name, "transaction_timeout": 600_000}
        opened = client.request("InitProducerId", 2, body)
        producer = {
            "transactional_id": name,
            "producer_id": opened.producer_id,
            "producer_epoch": opened.producer_epoch,
        }
        asked = producer | {"topics": [{"name": name, "partitions": list(range(count))}]}
        client.request(
            "AddPartitionsToTxn", 2, {f"v3_and_below_{key}": value for key, value in asked.items()}
        )
    return producer


def end_transaction_of_new_partitions(address: Address) -> Throw:
    """A transaction over many partitions that nobody has ever written to."""
    create(address, "never-written", partitions=1_000)
    return "EndTxn", 3, open_transaction(address, "never-written", 1_000) | {"committed": True}


def write_once(address: Address, name: str, count: int) -> None:
    records = build_batch([Record(None, b"v", NOW)])
    with RawClient(address, 300) as client:
        client.request("ApiVersions", 2, {})
        for start in range(0, count, 500):
            entries = [{"index": n, "records": records} for n in range(start, min(count, start + 500))]
            topics = [{"name": name, "partition_data": entries}]
            client.request("Produce", 9, {"acks": -1, "timeout": 60_000, "topic_data": topics})


def end_transaction_of_many_partitions(address: Address) -> Throw:
    create(address, "written-before", partitions=1_000)
    write_once(address, "written-before", 1_000)
    return "EndTxn", 3, open_transaction(address, "written-before", 1_000) | {"committed": True}


def write_to_new_partitions(address: Address) -> Throw:
    create(address, "first-written", partitions=500)
    records = build_batch([Record(None, b"v", NOW)])
    entries = [{"index": n, "records": records} for n in range(500)]
    body = {
        "acks": -1,
        "timeout": 60_000,
        "topic_data": [{"name": "first-written", "partition_data": entries}],
    }
    return "Produce", 9, body


def attempts(count: int) -> list[dict[str, Any]]:
    return [{"transactional_id": f"t{n}", "producer_id": 1, "producer_epoch": 0} for n in range(count)]


def publish_too_many(address: Address) -> Throw:
    return "PublishAttempts", 0, {"job": "too-many", "batch": 1, "attempts": attempts(90_000)}


def abort_too_many(address: Address) -> Throw:
    with RawClient(address) as client:
        client.request("FindCoordinator", 2, {"key": "t", "key_type": 1})
    return "AbortAttempts", 0, {"job": "too-many", "batch": 1, "attempts": attempts(90_000)}


def first_use_of_tables(address: Address) -> Throw:
    """A request that makes the node load all that tables need; only the first one to a node does."""
    return "ListDatabases", 0, {}


SMALL_SCHEMA = pa.schema([pa.field("id", pa.int64(), nullable=False), pa.field("v", pa.string())])


def create_table(address: Address, name: str, **fields: Any) -> int:
    with table_client(address) as client:
        answer = client.request("CreateTable", 0, table_of(SMALL_SCHEMA, f"hostile.{name}") | fields)
        assert answer.error_code == 0, answer
        table_id: int = answer.table_id
    return table_id


def unset_many_properties(address: Address) -> Throw:
    create_table(address, "described", properties=[{"key": f"user.k{n}", "value": "v"} for n in range(1_000)])
    body: dict[str, Any] = {
        "name": "hostile.described",
        "add_columns": None,
        "set_properties": [],
        "comment": None,
    }
    return "AlterTable", 0, body | {"unset_properties": [f"y{n}" for n in range(90_000)]}


def pin_many_buckets(address: Address) -> Throw:
    table_id = create_table(address, "pinned", buckets=500)
    body = {"table_id": table_id, "min_offsets": [], "max_wait_ms": 60_000, "idle_ms": 1_000}
    with table_client(address) as client:
        # The state of every bucket is open then. rocksdict keeps Python's lock while it opens a database, so
        # that everybody waits for the disk; that is no request's doing (docs/limits.md).
        assert client.request("PinTable", 0, body).error_code == 0
    return "PinTable", 0, body


def stats_of_many_buckets(address: Address) -> Throw:
    create_table(address, "measured", buckets=500, primary_key=[])
    return "TableStats", 0, {"table": "hostile.measured"}


def sync_with_a_large_assignment(address: Address) -> Throw:
    group_coordinator(address)
    with RawClient(address) as client:
        protocols = [{"name": "p", "metadata": b""}]
        body = {"group_id": "synced", "session_timeout": 60_000, "rebalance_timeout": 60_000, "member_id": ""}
        joined = client.request("JoinGroup", 3, body | {"protocol_type": "consumer", "protocols": protocols})
    entries = [{"member_id": joined.member_id, "assignment": bytes(15_000_000)}]
    body = {"group_id": "synced", "generation_id": joined.generation_id, "member_id": joined.member_id}
    return "SyncGroup", 3, body | {"group_instance_id": None, "assignments": entries}


def list_groups_with_many_states(address: Address) -> Throw:
    group_coordinator(address)
    return "ListGroups", 4, {"states_filter": [f"s{n}" for n in range(90_000)]}


def list_many_groups(address: Address) -> Throw:
    create(address, "of-groups")
    group_coordinator(address)
    partition = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
    topics = [{"name": "of-groups", "partitions": [partition]}]
    body: dict[str, Any] = {"generation_id_or_member_epoch": -1, "member_id": "", "topics": topics}
    with RawClient(address, 300) as client:
        client.request("ApiVersions", 2, {})
        for start in range(0, 10_000, 50):
            ids = [f"listed-{number}" for number in range(start, start + 50)]
            client.send(
                b"".join(client.encode("OffsetCommit", 7, {"group_id": each, **body}) for each in ids)
            )
            for _ in ids:
                client.read_frame()
    return "ListGroups", 4, {"states_filter": []}


def largest_batch(address: Address, name: str) -> bytes:
    """A batch as large as a topic can be configured to take."""
    create(address, name, max_message_bytes=str(BATCH_BYTES_MAX))
    return build_batch([Record(None, bytes(BATCH_BYTES_MAX - 200), NOW)])


def produce_the_largest_batch(address: Address) -> Throw:
    return "Produce", 9, produce_body("largest", largest_batch(address, "largest"))


def fetch_the_largest_batch(address: Address) -> Throw:
    with RawClient(address, 300) as client:
        client.request("ApiVersions", 2, {})
        assert client.produce("largest-read", largest_batch(address, "largest-read")).error_code == 0
    entry = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 100_000_000}
    body = {"max_bytes": 100_000_000, "max_wait": 0, "session_epoch": -1}
    return "Fetch", 12, body | {"topics": [{"topic": "largest-read", "partitions": [entry]}]}


def delete_many_of_all(address: Address) -> Throw:
    very_many_topics(address)
    return "DeleteTopics", 5, {"topic_names": VERY_MANY[:500], "timeout": 60_000}


HOSTILE: dict[str, Callable[[Address], Throw]] = {
    each.__name__: each
    for each in (
        first_use_of_tables,
        search_by_time,
        to_a_compacted_topic,
        to_a_plain_topic,
        to_be_recompressed,
        metadata_of_many,
        create_many,
        validate_many,
        create_with_many_partitions,
        delete_many,
        fetch_many,
        fetch_behind_a_sparse_index,
        region_of_many_partitions,
        region_through_a_filter,
        fetch_many_topics,
        produce_many,
        produce_to_unknown,
        list_many,
        epochs_of_many,
        commit_many,
        fetch_many_offsets,
        fetch_offsets_of_many_groups,
        delete_many_offsets,
        describe_many_groups,
        delete_many_groups,
        describe_many_consumer_groups,
        join_with_many_protocols,
        find_many_coordinators,
        describe_many_configs,
        alter_many_configs,
        describe_many_log_dirs,
        delete_many_records,
        grow_many,
        elect_many,
        describe_partitions_of_many,
        describe_many_producers,
        describe_many_transactions,
        add_many_partitions,
        fetch_many_in_a_session,
        fetch_all_offsets_again_and_again,
        leave_with_many,
        subscribe_to_many,
        own_many,
        publish_many,
        abort_many_attempts,
        find_coordinators_of_long_keys,
        join_with_large_metadata,
        create_table_with_many_columns,
        create_table_with_deep_columns,
        scan_with_many_values,
        scan_with_many_comparisons,
        end_transaction_of_new_partitions,
        end_transaction_of_many_partitions,
        write_to_new_partitions,
        publish_too_many,
        abort_too_many,
        unset_many_properties,
        pin_many_buckets,
        stats_of_many_buckets,
        sync_with_a_large_assignment,
        list_groups_with_many_states,
        list_many_groups,
        produce_the_largest_batch,
        fetch_the_largest_batch,
        join_a_wide_share_group,
        describe_a_wide_share_group,
        describe_many_share_groups,
        describe_many_share_offsets,
        alter_many_share_offsets,
        share_fetch_of_unknown_partitions,
        share_fetch_of_partitions_without_state,
        # From here on there are very many topics.
        metadata_that_creates,
        metadata_of_all,
        describe_all_partitions,
        describe_all_log_dirs,
        list_all_configs,
        delete_one_of_all,
        create_one_more,
        subscribe_by_a_pattern,
        subscribe_by_a_pattern_beside_another,
        leave_with_everything,
        describe_a_large_group,
        join_a_group_of_many,
        delete_many_of_all,
    )
}
