"""One hook decides who may do what: each API asks it, answers with Kafka's code, and changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pytest

from support.batches import plain_batch
from tidemill.client.admin.topics import create_topic
from tidemill.client.async_client import connect_async
from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.errors import ErrorCode
from tidemill.net.connection import Connection
from tidemill.records.record import Record, build_batch
from tidemill.server.node import Node
from tidemill.server.requests.api_table import served_apis
from tidemill.server.requests.authorization import (
    ANONYMOUS,
    CLUSTER,
    CLUSTER_NAME,
    GROUP,
    TOPIC,
    TRANSACTIONAL_ID,
    AclOperation,
    Principal,
    ResourceType,
)
from tidemill.wire.apis import APIS_BY_NAME

TOPIC_FAILED = ErrorCode.topic_authorization_failed
GROUP_FAILED = ErrorCode.group_authorization_failed
CLUSTER_FAILED = ErrorCode.cluster_authorization_failed
TXN_FAILED = ErrorCode.transactional_id_authorization_failed

JOB = "__tidemill_job:"


class Ask(NamedTuple):
    """A question that the hook was asked."""

    operation: AclOperation
    resource: ResourceType
    name: str


class Hook:
    """Refuses whatever is named in ``refused``, and remembers what it was asked."""

    def __init__(self) -> None:
        #: Resources that nobody may do anything with, and single operations.
        self.refused: set[tuple[ResourceType, str]] = set()
        self.refused_operations: set[Ask] = set()
        self.asked: list[Ask] = []
        self.hosts: set[tuple[Principal, str]] = set()

    def allows(
        self, principal: Principal, host: str, operation: AclOperation, resource: ResourceType, name: str
    ) -> bool:
        ask = Ask(operation, resource, name)
        self.asked.append(ask)
        self.hosts.add((principal, host))
        return (resource, name) not in self.refused and ask not in self.refused_operations


class World(NamedTuple):
    """A node with a hook, and a connection to it."""

    node: Node
    hook: Hook
    connection: Connection
    table_id: int

    async def ask(self, api: str, version: int | None = None, /, **body: Any) -> Any:
        versions = (version, version) if version is not None else (0, 99)
        return await self.connection.request(api, body, versions=versions)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    hook = Hook()
    settings = Settings(
        data_dir=tmp_path,
        listen=Address("127.0.0.1", 0),
        http=None,
        offsets_topic_partitions=1,
        transactions_topic_partitions=1,
        group_initial_rebalance_delay_ms=0,
    )
    node = Node(settings, authorizer=hook)
    await node.start()
    async with await connect_async(str(node.address)) as db:
        table = await db.create_table("shop.stock", "id bigint, count int", primary_key=["id"])
        await table.upsert([{"id": 1, "count": 2}])
        await create_topic(db.cluster, "secret")
        await create_topic(db.cluster, "open")
        table_id = node.broker.image.tables["shop.stock"].id
    connection = await Connection.open(node.address)
    # So that everything that a request could change is there to be changed.
    await connection.request("FindCoordinator", {"key_type": 0, "coordinator_keys": ["g"]})
    await connection.request("FindCoordinator", {"key_type": 1, "coordinator_keys": ["t"]})
    hook.asked.clear()
    yield World(node, hook, connection, table_id)
    await connection.close()
    await node.stop()


def codes_in(value: Any) -> Iterator[int]:
    """Every error code in an answer, but for zeros."""
    if isinstance(value, tuple):
        for each in value:
            yield from codes_in(each)
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            inner = getattr(value, name)
            if name in ("error_code", "partition_error_code") and inner != 0:
                yield int(inner)
            else:
                yield from codes_in(inner)


def requests(table_id: int, lease_id: str = "") -> dict[str, dict[str, Any]]:
    """A request of every API that names the topic ``secret``, the group ``g``, the transactional id ``t``,
    the job ``j`` or the table ``shop.stock``.
    """
    topic, part = {"name": "secret"}, {"partition_index": 0}
    producer = {"transactional_id": "t", "producer_id": 5, "producer_epoch": 0}
    table, bucket = {"table": "shop.stock"}, {"table_id": table_id, "bucket": 0, "partition_id": 0}
    attempt = {"job": "j", "batch": 1, "attempts": []}
    records = [{"index": 0, "records": plain_batch("v")}]
    config = {"resource_type": 2, "resource_name": "secret"}
    change = {"name": "retention.ms", "config_operation": 0, "value": "5"}
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False)]).serialize().to_pybytes()
    return {
        "Produce": {"acks": -1, "timeout": 1_000, "topic_data": [{**topic, "partition_data": records}]},
        "Fetch": {"max_bytes": 99, "topics": [{"topic": "secret", "partitions": [{"partition": 0}]}]},
        "ListOffsets": {"topics": [{**topic, "partitions": [{**part, "timestamp": -1}]}]},
        "Metadata": {"topics": [topic]},
        "OffsetCommit": {
            "group_id": "g",
            "generation_id_or_member_epoch": -1,
            "topics": [{**topic, "partitions": [{**part, "committed_offset": 1}]}],
        },
        "OffsetFetch": {"groups": [{"group_id": "g", "topics": [{**topic, "partition_indexes": [0]}]}]},
        "FindCoordinator": {"key_type": 0, "coordinator_keys": ["g"]},
        "JoinGroup": {
            "group_id": "g",
            "session_timeout": 10_000,
            "rebalance_timeout": 10_000,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b""}],
        },
        "Heartbeat": {"group_id": "g", "member_id": "m"},
        "LeaveGroup": {"group_id": "g", "members": []},
        "SyncGroup": {"group_id": "g", "member_id": "m", "protocol_type": "c", "protocol_name": "range"},
        "DescribeGroups": {"groups": ["g"]},
        "ListGroups": {},
        "CreateTopics": {"topics": [{"name": "new", "num_partitions": 1, "replication_factor": 1}]},
        "DeleteTopics": {"topics": [topic]},
        "DeleteRecords": {"topics": [{**topic, "partitions": [{**part, "offset": 0}]}]},
        "InitProducerId": {"transactional_id": "t", "transaction_timeout": 1_000},
        "OffsetForLeaderEpoch": {
            "topics": [{"topic": "secret", "partitions": [{"partition": 0, "leader_epoch": 0}]}]
        },
        "AddPartitionsToTxn": {
            "v3_and_below_transactional_id": "t",
            "v3_and_below_producer_id": 5,
            "v3_and_below_topics": [{**topic, "partitions": [0]}],
        },
        "AddOffsetsToTxn": {**producer, "group_id": "g"},
        "EndTxn": {**producer, "committed": True},
        "WriteTxnMarkers": {"markers": [{"producer_id": 5, "topics": [{**topic, "partition_indexes": [0]}]}]},
        "TxnOffsetCommit": {
            **producer,
            "group_id": "g",
            "topics": [{**topic, "partitions": [{**part, "committed_offset": 1}]}],
        },
        "DescribeConfigs": {"resources": [config]},
        "AlterConfigs": {"resources": [{**config, "configs": [{"name": "retention.ms", "value": "5"}]}]},
        "IncrementalAlterConfigs": {"resources": [{**config, "configs": [change]}]},
        "DescribeLogDirs": {"topics": None},
        "CreatePartitions": {"topics": [{**topic, "count": 3}], "timeout": 1_000},
        "DeleteGroups": {"groups_names": ["g"]},
        "ElectLeaders": {"topic_partitions": [{"topic": "secret", "partitions": [0]}]},
        "AlterPartitionReassignments": {
            "topics": [{**topic, "partitions": [{**part, "replicas": [1]}]}],
            "timeout": 1_000,
        },
        "ListPartitionReassignments": {"topics": None, "timeout": 1_000},
        "OffsetDelete": {"group_id": "g", "topics": [{**topic, "partitions": [part]}]},
        "DescribeQuorum": {"topics": [{"topic_name": "__cluster_metadata", "partitions": [part]}]},
        "UpdateFeatures": {"feature_updates": []},
        "DescribeProducers": {"topics": [{**topic, "partition_indexes": [0]}]},
        "DescribeTransactions": {"transactional_ids": ["t"]},
        "ListTransactions": {},
        "ConsumerGroupHeartbeat": {
            "group_id": "g",
            "member_id": "m",
            "member_epoch": 0,
            "rebalance_timeout": 10_000,
            "subscribed_topic_names": ["secret"],
            "topic_partitions": [],
        },
        "ConsumerGroupDescribe": {"group_ids": ["g"]},
        "ListConfigResources": {},
        "DescribeTopicPartitions": {"topics": [topic], "response_partition_limit": 9},
        "CreateDatabase": {"name": "other"},
        "DropDatabase": {"name": "shop", "cascade": True},
        "ListDatabases": {},
        "AlterDatabase": {"name": "shop", "comment": "closed"},
        "CreateTable": {"name": "shop.new", "schema": schema, "primary_key": ["id"], "buckets": 1},
        "DropTable": {"name": "shop.stock"},
        "DescribeTable": {"name": "shop.stock"},
        "ListTables": {"database": "shop"},
        "AlterTable": {"name": "shop.stock", "comment": "sold"},
        "CreateTablePartition": {**table, "value": "x"},
        "DropTablePartition": {**table, "value": "x"},
        "TableStats": table,
        "ListSnapshots": table,
        "CreateSnapshot": table,
        "AcquireLease": {**table, "lease_id": "mine", "holder": "me", "duration_ms": 60_000},
        "ReleaseLease": {"lease_id": lease_id},
        "ListLeases": {"table": None},
        "LookupKv": {**bucket, "keys": [], "leader_epoch": -1, "max_wait_ms": 1_000},
        "ScanKv": {**bucket, "batch_size_bytes": 1_000, "leader_epoch": -1},
        "PinTable": {"table_id": table_id, "max_wait_ms": 1_000},
        "SplitBucket": {**bucket, "leader_epoch": -1, "max_rows": 10, "max_bytes": 10, "max_pieces": 1},
        "MeasureLog": {"ranges": [{"topic": "secret", "partition": 0, "end_offset": -1, "max_bytes": -1}]},
        "OpenAttempt": {"job": "j", "batch": 1, "timeout_ms": 10_000},
        "PublishAttempts": attempt,
        "AbortAttempts": attempt,
        "KeepJob": {"job": "j"},
        "ListJobs": {},
        "DescribeNodes": {},
        "DescribeReplicas": {"topics": []},
        "UnregisterBroker": {"broker_id": 1},
        "ElectReplica": {"topic": "secret", "partition": 0, "leader": 1},
    }


#: The version that the request above is of, where it is not the newest.
VERSIONS = {
    "Produce": 12,
    "Fetch": 12,
    "OffsetCommit": 9,
    "OffsetFetch": 9,
    "AddPartitionsToTxn": 3,
    "TxnOffsetCommit": 5,
}
#: Listings, and the field with what is listed: who may not see something does not learn of it.
SILENT = {
    "ListGroups": "groups",
    "ListTransactions": "transaction_states",
    "ListTables": "tables",
    "ListLeases": "leases",
    "ListJobs": "jobs",
}
SECRETS: tuple[tuple[ResourceType, str], ...] = (
    (TOPIC, "secret"),
    (TOPIC, "new"),
    (TOPIC, "shop.stock"),
    (TOPIC, "shop.new"),
    (GROUP, "g"),
    (TRANSACTIONAL_ID, "t"),
    (TRANSACTIONAL_ID, f"{JOB}j"),
    (CLUSTER, CLUSTER_NAME),
)
CODES = {
    TOPIC: TOPIC_FAILED,
    GROUP: GROUP_FAILED,
    CLUSTER: CLUSTER_FAILED,
    TRANSACTIONAL_ID: TXN_FAILED,
}
GUARDED = sorted(row.api.name for row in served_apis().values() if row.permissions)


def test_there_is_a_request_of_every_api_that_needs_a_permission() -> None:
    assert sorted(requests(1)) == GUARDED


def state(node: Node) -> Any:
    """All that a request could have changed."""
    broker = node.broker
    return (
        broker.image.revision,
        sorted(broker.image.topics),
        {(each.topic, each.index): each.log_end_offset for each in broker.replicas if each.log_end_offset},
        [(group, list(offsets)) for group, offsets in broker.groups.committed_offsets()],
        broker.transactions.open_count(),
    )


async def fill(world: World) -> str:
    """Have something of everything; gives the id of a lease."""
    bodies = requests(world.table_id)
    await world.ask("OffsetCommit", 9, **bodies["OffsetCommit"])
    assert (await world.ask("InitProducerId", **bodies["InitProducerId"])).error_code == 0
    assert (await world.ask("OpenAttempt", **bodies["OpenAttempt"])).error_code == 0
    leased = await world.ask("AcquireLease", table="shop.stock", holder="me", duration_ms=60_000)
    assert leased.error_code == 0, leased
    return str(leased.lease.lease_id)


async def test_every_api_asks_for_the_permissions_of_its_row_and_changes_nothing_without_them(
    world: World,
) -> None:
    bodies = requests(world.table_id, await fill(world))
    world.hook.refused = set(SECRETS)
    before = state(world.node)
    for api in GUARDED:
        row = served_apis()[APIS_BY_NAME[api].key]
        world.hook.asked.clear()
        answer = await world.ask(api, VERSIONS.get(api), **bodies[api])
        assert state(world.node) == before, api
        wanted = {(each.operation, each.resource) for each in row.permissions}
        asked = {(each.operation, each.resource) for each in world.hook.asked}
        assert asked, api
        assert asked <= wanted, f"the row of {api} says what is asked for"
        if api not in SILENT:
            found = set(codes_in(answer))
            assert found, api
            assert found <= {int(CODES[resource]) for _, resource in wanted}, api
    assert world.hook.hosts == {(ANONYMOUS, "127.0.0.1")}


async def test_a_listing_leaves_out_what_may_not_be_described(world: World) -> None:
    bodies = requests(world.table_id, await fill(world))
    for api, field in SILENT.items():
        world.hook.refused = set()
        assert getattr(await world.ask(api, **bodies[api]), field), api
        world.hook.refused = {*SECRETS, (TRANSACTIONAL_ID, f"{JOB}j#0")}
        answer = await world.ask(api, **bodies[api])
        assert not getattr(answer, field), api
        assert not set(codes_in(answer)), api


#: Requests that need several permissions: without this one alone, the answer has this code.
ALONE = [
    ("Produce", (TOPIC, "secret"), TOPIC_FAILED),
    ("OffsetCommit", (TOPIC, "secret"), TOPIC_FAILED),
    ("OffsetCommit", (GROUP, "g"), GROUP_FAILED),
    ("OffsetFetch", (TOPIC, "secret"), TOPIC_FAILED),
    ("OffsetFetch", (GROUP, "g"), GROUP_FAILED),
    ("OffsetDelete", (TOPIC, "secret"), TOPIC_FAILED),
    ("OffsetDelete", (GROUP, "g"), GROUP_FAILED),
    ("ConsumerGroupHeartbeat", (TOPIC, "secret"), TOPIC_FAILED),
    ("ConsumerGroupHeartbeat", (GROUP, "g"), GROUP_FAILED),
    ("AddPartitionsToTxn", (TOPIC, "secret"), TOPIC_FAILED),
    ("AddPartitionsToTxn", (TRANSACTIONAL_ID, "t"), TXN_FAILED),
    ("AddOffsetsToTxn", (GROUP, "g"), GROUP_FAILED),
    ("AddOffsetsToTxn", (TRANSACTIONAL_ID, "t"), TXN_FAILED),
    ("TxnOffsetCommit", (TOPIC, "secret"), TOPIC_FAILED),
    ("TxnOffsetCommit", (GROUP, "g"), GROUP_FAILED),
    ("TxnOffsetCommit", (TRANSACTIONAL_ID, "t"), TXN_FAILED),
    ("DropDatabase", (TOPIC, "shop.stock"), TOPIC_FAILED),
    ("DropDatabase", (CLUSTER, CLUSTER_NAME), CLUSTER_FAILED),
]


async def test_each_of_several_permissions_is_needed(world: World) -> None:
    bodies = requests(world.table_id, await fill(world))
    before = state(world.node)
    for api, secret, code in ALONE:
        world.hook.refused = {secret}
        answer = await world.ask(api, VERSIONS.get(api), **bodies[api])
        assert code in set(codes_in(answer)), (api, secret)
        assert state(world.node) == before, (api, secret)


async def test_the_other_topics_of_a_request_are_served(world: World) -> None:
    world.hook.refused = {(TOPIC, "secret")}
    data = [{"index": 0, "records": plain_batch("v")}]
    both = [{"name": name, "partition_data": data} for name in ("secret", "open")]
    written = await world.ask("Produce", 9, acks=-1, timeout=5_000, topic_data=both)
    results = {each.name: each.partition_responses[0].error_code for each in written.responses}
    assert results == {"secret": TOPIC_FAILED, "open": ErrorCode.none}
    wanted = [{"topic": name, "partitions": [{"partition": 0}]} for name in ("secret", "open")]
    read = await world.ask("Fetch", 11, max_bytes=10**6, topics=wanted)
    parts = {each.topic: each.partitions[0] for each in read.responses}
    assert parts["secret"].error_code == TOPIC_FAILED
    assert not parts["secret"].records
    assert parts["open"].error_code == ErrorCode.none


@pytest.mark.parametrize("version", [12, 13])
async def test_a_topic_is_refused_by_its_id_as_by_its_name(world: World, version: int) -> None:
    world.hook.refused = {(TOPIC, "secret")}
    topic_id = world.node.broker.image.topics["secret"].id
    by_id = {"topic_id": topic_id} if version == 13 else {"name": "secret", "topic": "secret"}
    part = {**by_id, "partition_data": [{"index": 0, "records": plain_batch("v")}]}
    part.pop("topic", None)
    written = await world.ask("Produce", version, acks=-1, timeout=5_000, topic_data=[part])
    assert written.responses[0].partition_responses[0].error_code == TOPIC_FAILED
    wanted = {**by_id, "partitions": [{"partition": 0}]}
    wanted.pop("name", None)
    read = await world.ask("Fetch", version, max_bytes=10**6, topics=[wanted])
    assert read.responses[0].partitions[0].error_code == TOPIC_FAILED


async def test_offsets_of_a_topic_are_refused_by_its_id_and_left_out_of_all(world: World) -> None:
    await world.ask("OffsetCommit", 9, **requests(world.table_id)["OffsetCommit"])
    before = state(world.node)
    assert (await world.ask("OffsetFetch", 9, groups=[{"group_id": "g", "topics": None}])).groups[0].topics
    world.hook.refused = {(TOPIC, "secret")}
    by_id = {"topic_id": world.node.broker.image.topics["secret"].id}
    commit = {**by_id, "partitions": [{"partition_index": 0, "committed_offset": 1}]}
    answer = await world.ask(
        "OffsetCommit", 10, group_id="g", generation_id_or_member_epoch=-1, topics=[commit]
    )
    assert set(codes_in(answer)) == {TOPIC_FAILED}
    wanted = {"group_id": "g", "topics": [{**by_id, "partition_indexes": [0]}]}
    assert set(codes_in(await world.ask("OffsetFetch", 10, groups=[wanted]))) == {TOPIC_FAILED}
    (group,) = (await world.ask("OffsetFetch", 9, groups=[{"group_id": "g", "topics": None}])).groups
    assert (group.error_code, group.topics) == (ErrorCode.none, ())
    assert state(world.node) == before


async def test_who_may_not_know_a_topic_does_not_learn_its_name(world: World) -> None:
    world.hook.refused = {(TOPIC, "secret")}
    topic_id = world.node.broker.image.topics["secret"].id
    (told,) = (await world.ask("Metadata", topics=[{"topic_id": topic_id}])).topics
    assert (told.error_code, told.name) == (TOPIC_FAILED, None)
    (deleted,) = (await world.ask("DeleteTopics", topics=[{"topic_id": topic_id}])).responses
    assert (deleted.error_code, deleted.name) == (TOPIC_FAILED, None)
    everything = await world.ask("Metadata", topics=None)
    assert "secret" not in {each.name for each in everything.topics}
    described = await world.ask("DescribeTopicPartitions", topics=[], response_partition_limit=99)
    assert "secret" not in {each.name for each in described.topics}


async def test_a_topic_that_does_not_exist_is_refused_like_one_that_does(world: World) -> None:
    world.hook.refused = {(TOPIC, "nowhere")}
    (told,) = (await world.ask("Metadata", topics=[{"name": "nowhere"}])).topics
    assert told.error_code == TOPIC_FAILED
    assert "nowhere" not in world.node.broker.image.topics


@pytest.mark.parametrize(
    "refused",
    [
        {Ask(AclOperation.DESCRIBE, TOPIC, "nowhere")},
        {Ask(AclOperation.CREATE, TOPIC, "nowhere"), Ask(AclOperation.CREATE, CLUSTER, CLUSTER_NAME)},
    ],
    ids=["describe", "create"],
)
async def test_a_topic_comes_into_being_by_being_asked_for_only_with_permission(
    world: World, refused: set[Ask]
) -> None:
    world.hook.refused_operations = refused
    (told,) = (await world.ask("Metadata", topics=[{"name": "nowhere"}])).topics
    assert told.error_code == TOPIC_FAILED
    assert "nowhere" not in world.node.broker.image.topics
    world.hook.refused_operations = set()
    (told,) = (await world.ask("Metadata", topics=[{"name": "nowhere"}])).topics
    assert told.error_code == ErrorCode.none


async def test_configs_of_groups_are_the_groups_and_those_of_nodes_the_clusters(world: World) -> None:
    world.hook.refused = {(GROUP, "g"), (CLUSTER, CLUSTER_NAME)}
    resources = [{"resource_type": 32, "resource_name": "g"}, {"resource_type": 4, "resource_name": "1"}]
    described = await world.ask("DescribeConfigs", resources=resources)
    assert [each.error_code for each in described.results] == [GROUP_FAILED, CLUSTER_FAILED]
    altered = await world.ask("IncrementalAlterConfigs", resources=resources)
    assert [each.error_code for each in altered.responses] == [GROUP_FAILED, CLUSTER_FAILED]


async def test_a_group_whose_members_read_a_secret_topic_is_not_described(world: World) -> None:
    joined = await world.ask("ConsumerGroupHeartbeat", **requests(1)["ConsumerGroupHeartbeat"])
    assert joined.error_code == ErrorCode.none, joined
    (group,) = (await world.ask("ConsumerGroupDescribe", group_ids=["g"])).groups
    assert (group.error_code, len(group.members)) == (ErrorCode.none, 1)
    world.hook.refused = {(TOPIC, "secret")}
    (group,) = (await world.ask("ConsumerGroupDescribe", group_ids=["g"])).groups
    assert (group.error_code, group.members) == (TOPIC_FAILED, ())


@pytest.mark.parametrize(
    ("secret", "code"), [((TRANSACTIONAL_ID, "t"), TXN_FAILED), ((TOPIC, "secret"), TOPIC_FAILED)]
)
async def test_a_transactional_write_that_is_refused_is_no_part_of_the_transaction(
    world: World, secret: tuple[ResourceType, str], code: ErrorCode
) -> None:
    given = await world.ask("InitProducerId", **requests(1)["InitProducerId"])
    world.hook.refused = {secret}
    before = state(world.node)
    batch = build_batch(
        [Record(None, b"v", 1)],
        producer_id=given.producer_id,
        producer_epoch=given.producer_epoch,
        base_sequence=0,
        attributes=0x10,  # Transactional.
    )
    part = {"name": "secret", "partition_data": [{"index": 0, "records": batch}]}
    body = {"transactional_id": "t", "acks": -1, "timeout": 5_000, "topic_data": [part]}
    answer = await world.ask("Produce", 12, **body)
    assert set(codes_in(answer)) == {code}
    assert state(world.node) == before
    world.hook.refused = set()
    (told,) = (await world.ask("DescribeTransactions", transactional_ids=["t"])).transaction_states
    assert (told.transaction_state, told.topics) == ("Empty", ())
    written = await world.ask("Produce", 12, **body)
    assert not set(codes_in(written))
    (told,) = (await world.ask("DescribeTransactions", transactional_ids=["t"])).transaction_states
    assert [each.topic for each in told.topics] == ["secret"]
    world.hook.refused = {(TOPIC, "secret")}
    (told,) = (await world.ask("DescribeTransactions", transactional_ids=["t"])).transaction_states
    assert (told.transaction_state, told.topics) == ("Ongoing", ())


async def test_brokers_alone_may_add_partitions_for_others(world: World) -> None:
    world.hook.refused = {(CLUSTER, CLUSTER_NAME)}
    answer = await world.ask("AddPartitionsToTxn", 5, transactions=[])
    assert answer.error_code == CLUSTER_FAILED


async def test_who_may_create_in_the_cluster_may_create_any_topic(world: World) -> None:
    world.hook.refused = {(TOPIC, "new")}
    (created,) = (await world.ask("CreateTopics", **requests(1)["CreateTopics"])).topics
    assert created.error_code == ErrorCode.none


async def test_who_may_write_somewhere_gets_a_producer_id(world: World) -> None:
    world.hook.refused = {(CLUSTER, CLUSTER_NAME)}
    given = await world.ask("InitProducerId", transactional_id=None, transaction_timeout=1)
    assert given.error_code == ErrorCode.none
    world.hook.refused |= {(TOPIC, name) for name in world.node.broker.image.topics}
    refused = await world.ask("InitProducerId", transactional_id=None, transaction_timeout=1)
    assert (refused.error_code, refused.producer_id) == (CLUSTER_FAILED, -1)


async def test_authorized_operations_are_what_the_hook_says(world: World) -> None:
    async def told() -> tuple[int, int]:
        answer = await world.ask(
            "Metadata", 12, topics=[{"name": "open"}], include_topic_authorized_operations=True
        )
        cluster = await world.ask("DescribeCluster", include_cluster_authorized_operations=True)
        return answer.topics[0].topic_authorized_operations, cluster.cluster_authorized_operations

    def bits(operations: Iterable[AclOperation]) -> int:
        return sum(1 << each for each in operations)

    op = AclOperation
    configs = (op.DESCRIBE_CONFIGS, op.ALTER_CONFIGS)
    of_topic = bits((op.READ, op.WRITE, op.CREATE, op.DELETE, op.ALTER, op.DESCRIBE, *configs))
    of_cluster = bits((op.CREATE, op.ALTER, op.DESCRIBE, op.CLUSTER_ACTION, op.IDEMPOTENT_WRITE, *configs))
    assert await told() == (of_topic, of_cluster)
    world.hook.refused = {(CLUSTER, CLUSTER_NAME)}
    assert await told() == (of_topic, 0)


async def test_without_a_hook_nobody_is_asked(world: World) -> None:
    world.node._dispatcher.authorizer = None  # type: ignore[union-attr]
    world.hook.refused = set(SECRETS)
    for api in ("Produce", "Fetch", "Metadata", "JoinGroup", "LookupKv"):
        await world.ask(api, VERSIONS.get(api), **requests(world.table_id)[api])
    assert not world.hook.asked
