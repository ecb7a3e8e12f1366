"""One hook decides who may do what: each API asks it, answers with Kafka's code, and changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

import pyarrow as pa
import pytest

from support.batches import plain_batch
from support.served_apis import served_apis
from tidemill.client.admin.topics import create_topic
from tidemill.client.async_client import connect_async
from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.errors import ErrorCode
from tidemill.net.connection import Connection
from tidemill.records.record import Record, build_batch
from tidemill.server.node import Node
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
from tidemill.share.sessions import SessionKey
from tidemill.wire.apis import APIS_BY_NAME, request_class

TOPIC_FAILED = ErrorCode.topic_authorization_failed
GROUP_FAILED = ErrorCode.group_authorization_failed
CLUSTER_FAILED = ErrorCode.cluster_authorization_failed
TXN_FAILED = ErrorCode.transactional_id_authorization_failed

JOB = "__tidemill_job:"
NO_ID = UUID(int=0)
#: An operation on a kind of resource.
Kind = tuple[AclOperation, ResourceType]


class Ask(NamedTuple):
    """A question that the hook was asked."""

    operation: AclOperation
    resource: ResourceType
    name: str


class Hook:
    """Refuses what is in its three sets, and remembers what it was asked."""

    def __init__(self) -> None:
        #: Resources that nobody may do anything with, single operations, and operations on any resource.
        self.refused: set[tuple[ResourceType, str]] = set()
        self.refused_operations: set[Ask] = set()
        self.refused_kinds: set[Kind] = set()
        self.asked: list[Ask] = []
        self.hosts: set[tuple[Principal, str]] = set()

    def allows(
        self, principal: Principal, host: str, operation: AclOperation, resource: ResourceType, name: str
    ) -> bool:
        ask = Ask(operation, resource, name)
        self.asked.append(ask)
        self.hosts.add((principal, host))
        return (
            (resource, name) not in self.refused
            and ask not in self.refused_operations
            and (operation, resource) not in self.refused_kinds
        )

    def asked_kinds(self) -> set[Kind]:
        """What was asked, but for the names of the resources."""
        return {(each.operation, each.resource) for each in self.asked}


class Request(NamedTuple):
    """A request of an API, in the newest version unless it says otherwise."""

    api: str
    body: dict[str, Any]
    version: int | None = None


class World(NamedTuple):
    """A node with a hook, and a connection to it."""

    node: Node
    hook: Hook
    connection: Connection
    table_id: int

    @property
    def topic_id(self) -> UUID:
        return self.node.broker.image.topics["secret"].id

    async def ask(self, api: str, version: int | None = None, /, **body: Any) -> Any:
        versions = (version, version) if version is not None else (0, 99)
        return await self.connection.request(api, body, versions=versions)

    async def send(self, request: Request) -> Any:
        """Send a request; one that goes on with a share session finds it opened."""
        if request.body.get("share_session_epoch") == 1:
            self.node.broker.share.open_session(SessionKey("g", "m"), 1)
        self.hook.asked.clear()
        return await self.ask(request.api, request.version, **request.body)


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


def requests(table_id: int, lease_id: str = "", topic_id: UUID = NO_ID) -> dict[str, dict[str, Any]]:
    """A request of every API that names the topic ``secret``, the group ``g``, the transactional id ``t``,
    the job ``j`` or the table ``shop.stock``.

    An API that is not among the special ones gets the fields of its request whose names say what they hold.
    """
    known = {
        "name": "shop.stock",
        "table": "shop.stock",
        "table_id": table_id,
        "database": "shop",
        "lease_id": lease_id,
        "topic": "secret",
        "topic_id": topic_id,
        "group_id": "g",
        "transactional_id": "t",
        "job": "j",
    }
    special = special_requests(table_id, topic_id)
    bodies = {}
    for api in GUARDED:
        row = APIS_BY_NAME[api]
        names = {field.name for field in fields(request_class(row.key, row.max_version))}
        bodies[api] = special.get(api) or {name: value for name, value in known.items() if name in names}
    return bodies


def special_requests(table_id: int, topic_id: UUID = NO_ID) -> dict[str, dict[str, Any]]:
    """Requests that need more than their plain fields."""
    topic, part = {"name": "secret"}, {"partition_index": 0}
    producer = {"transactional_id": "t", "producer_id": 5, "producer_epoch": 0}
    table, bucket = {"table": "shop.stock"}, {"table_id": table_id, "bucket": 0, "partition_id": 0}
    attempt = {"job": "j", "batch": 1, "attempts": []}
    session = {"group_id": "g", "member_id": "m", "share_session_epoch": 1}
    settled = {"first_offset": 0, "last_offset": 0, "acknowledge_types": [1]}
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
        "LeaveGroup": {"group_id": "g", "members": []},
        "SyncGroup": {"group_id": "g", "member_id": "m", "protocol_type": "c", "protocol_name": "range"},
        "DescribeGroups": {"groups": ["g"]},
        "CreateTopics": {"topics": [{"name": "new", "num_partitions": 1, "replication_factor": 1}]},
        "DeleteTopics": {"topics": [topic]},
        "DeleteRecords": {"topics": [{**topic, "partitions": [{**part, "offset": 0}]}]},
        "InitProducerId": {"transactional_id": "t", "transaction_timeout": 600_000},
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
        "ConsumerGroupHeartbeat": {
            "group_id": "g",
            "member_id": "m",
            "member_epoch": 0,
            "rebalance_timeout": 10_000,
            "subscribed_topic_names": ["secret"],
            "topic_partitions": [],
        },
        "ConsumerGroupDescribe": {"group_ids": ["g"]},
        "ShareGroupHeartbeat": {
            "group_id": "g",
            "member_id": "m",
            "member_epoch": 0,
            "subscribed_topic_names": ["secret"],
        },
        "ShareGroupDescribe": {"group_ids": ["g"]},
        "DescribeShareGroupOffsets": {
            "groups": [{"group_id": "g", "topics": [{"topic_name": "secret", "partitions": [0]}]}]
        },
        "AlterShareGroupOffsets": {
            "group_id": "g",
            "topics": [{"topic_name": "secret", "partitions": [{"partition_index": 0, "start_offset": 3}]}],
        },
        "DeleteShareGroupOffsets": {"group_id": "g", "topics": [{"topic_name": "secret"}]},
        "DescribeTopicPartitions": {"topics": [topic], "response_partition_limit": 9},
        "CreateDatabase": {"name": "other"},
        "DropDatabase": {"name": "shop", "cascade": True},
        "AlterDatabase": {"name": "shop", "comment": "closed"},
        "CreateTable": {"name": "shop.new", "schema": schema, "primary_key": ["id"], "buckets": 1},
        "AlterTable": {"name": "shop.stock", "comment": "sold"},
        "CreateTablePartition": {**table, "value": "x"},
        "DropTablePartition": {**table, "value": "x"},
        "AcquireLease": {**table, "lease_id": "mine", "holder": "me", "duration_ms": 60_000},
        "ListLeases": {"table": None},
        "LookupKv": {**bucket, "keys": [], "leader_epoch": -1, "max_wait_ms": 1_000},
        "ScanKv": {**bucket, "batch_size_bytes": 1_000, "leader_epoch": -1},
        "PinTable": {"table_id": table_id, "max_wait_ms": 1_000},
        "SplitBucket": {**bucket, "leader_epoch": -1, "max_rows": 10, "max_bytes": 10, "max_pieces": 1},
        "MeasureLog": {"ranges": [{"topic": "secret", "partition": 0, "end_offset": -1, "max_bytes": -1}]},
        "OpenAttempt": {"job": "j", "batch": 1, "timeout_ms": 10_000},
        "PublishAttempts": attempt,
        "AbortAttempts": attempt,
        "DescribeReplicas": {"topics": []},
        "UnregisterBroker": {"broker_id": 1},
        "ElectReplica": {"topic": "secret", "partition": 0, "leader": 1},
        "SetNodeTags": {"node_id": 1, "tags": ["PERMANENT_OFFLINE"]},
        "ShareFetch": {
            "group_id": "g",
            "member_id": "m",
            "max_bytes": 99,
            "max_records": 9,
            "topics": [{"topic_id": topic_id, "partitions": [part]}],
        },
        "ShareAcknowledge": {
            **session,
            "topics": [
                {"topic_id": topic_id, "partitions": [{**part, "acknowledgement_batches": [settled]}]}
            ],
        },
        "ShareSettle": {
            **session,
            **producer,
            "topics": [{"topic_id": topic_id, "partitions": [{**part, "batches": []}]}],
        },
        "DescribeShareRecords": {"group_id": "g", "topic": "secret", "limit": 1},
        "TakeCursor": {"name": "g", "topic": "secret", "topic_id": topic_id},
        "CommitCursor": {"name": "g"},
        "KeepCursor": {"name": "g"},
        "DescribeCursor": {"name": "g"},
        "AlterCursor": {"name": "g", "paused": -1},
        "DeleteCursor": {"name": "g"},
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
    "ListCursors": "cursors",
}
SECRETS: tuple[tuple[ResourceType, str], ...] = (
    (TOPIC, "secret"),
    (TOPIC, "new"),
    (TOPIC, "shop.stock"),
    (TOPIC, "shop.new"),
    (GROUP, "g"),
    (GROUP, "readers"),
    (GROUP, "sharers"),
    (GROUP, "left"),
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


def test_the_special_requests_are_of_apis_that_need_a_permission() -> None:
    assert set(special_requests(1)) <= set(GUARDED)


def permissions(api: str) -> set[Kind]:
    """The permissions of the API's row."""
    row = served_apis()[APIS_BY_NAME[api].key]
    return {(each.operation, each.resource) for each in row.permissions}


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


async def fill(world: World) -> dict[str, dict[str, Any]]:
    """Have something of everything; gives the requests about it."""
    bodies = requests(world.table_id, topic_id=world.topic_id)
    await world.ask("OffsetCommit", 9, **bodies["OffsetCommit"])
    given = await world.ask("InitProducerId", **bodies["InitProducerId"])
    assert given.error_code == 0, given
    added = await world.ask(
        "AddPartitionsToTxn",
        3,
        v3_and_below_transactional_id="t",
        v3_and_below_producer_id=given.producer_id,
        v3_and_below_producer_epoch=given.producer_epoch,
        v3_and_below_topics=[{"name": "secret", "partitions": [0]}],
    )
    assert not set(codes_in(added)), added
    assert (await world.ask("OpenAttempt", **bodies["OpenAttempt"])).error_code == 0
    taken = await world.ask("TakeCursor", **bodies["TakeCursor"], lease_ms=1)
    assert taken.error_code == 0, taken
    readers, sharers = "ConsumerGroupHeartbeat", "ShareGroupHeartbeat"
    for api, group, epoch in (
        (readers, "readers", 0),
        (sharers, "sharers", 0),
        (sharers, "left", 0),
        (sharers, "left", -1),
    ):
        joined = await world.ask(api, **(bodies[api] | {"group_id": group, "member_epoch": epoch}))
        assert joined.error_code == 0, joined
    leased = await world.ask("AcquireLease", table="shop.stock", holder="me", duration_ms=60_000)
    assert leased.error_code == 0, leased
    return requests(world.table_id, str(leased.lease.lease_id), world.topic_id)


async def test_every_api_asks_for_the_permissions_of_its_row_and_changes_nothing_without_them(
    world: World,
) -> None:
    bodies = await fill(world)
    world.hook.refused = set(SECRETS)
    before = state(world.node)
    for api in GUARDED:
        answer = await world.send(Request(api, bodies[api], VERSIONS.get(api)))
        assert state(world.node) == before, api
        wanted, asked = permissions(api), world.hook.asked_kinds()
        assert asked, api
        assert asked <= wanted, f"the row of {api} says what is asked for"
        if api not in SILENT:
            found = set(codes_in(answer))
            assert found, api
            assert found <= {int(CODES[resource]) for _, resource in wanted}, api
    assert world.hook.hosts == {(ANONYMOUS, "127.0.0.1")}


async def test_a_listing_leaves_out_what_may_not_be_described(world: World) -> None:
    bodies = await fill(world)
    for api, field in SILENT.items():
        world.hook.refused = set()
        assert getattr(await world.ask(api, **bodies[api]), field), api
        world.hook.refused = {*SECRETS, (TRANSACTIONAL_ID, f"{JOB}j#0")}
        answer = await world.ask(api, **bodies[api])
        assert not getattr(answer, field), api
        assert not set(codes_in(answer)), api


OP = AclOperation
#: APIs for which one of several permissions is enough, and a request that asks for all of these.
ANY_OF: dict[str, tuple[set[Kind], dict[str, Any]]] = {
    "Metadata": ({(OP.CREATE, TOPIC), (OP.CREATE, CLUSTER)}, {"topics": [{"name": "nowhere"}]}),
    "CreateTopics": (
        {(OP.CREATE, TOPIC), (OP.CREATE, CLUSTER)},
        {"topics": [{"name": "new", "num_partitions": 1, "replication_factor": 1}]},
    ),
    "WriteTxnMarkers": (
        {(OP.CLUSTER_ACTION, CLUSTER), (OP.ALTER, CLUSTER)},
        {"markers": [{"producer_id": 5, "topics": [{"name": "secret", "partition_indexes": [0]}]}]},
    ),
    "InitProducerId": (
        {(OP.IDEMPOTENT_WRITE, CLUSTER), (OP.WRITE, TOPIC)},
        {"transactional_id": None, "transaction_timeout": 1_000},
    ),
    "ListGroups": ({(OP.DESCRIBE, CLUSTER), (OP.DESCRIBE, GROUP)}, {}),
}
#: The answer leaves out what may not be described, and has no code for it.
LEFT_OUT = {("DescribeTransactions", TOPIC)}


def requests_for(kind: Kind) -> dict[str, Request]:
    """Requests that need a permission which the usual request of the API does not need."""
    _, resource = kind
    if resource == TRANSACTIONAL_ID:
        records = [{"index": 0, "records": transactional_batch(5, 0)}]
        data = {"transactional_id": "t", "topic_data": [{"name": "secret", "partition_data": records}]}
        return {
            "FindCoordinator": Request("FindCoordinator", {"key_type": 1, "coordinator_keys": ["t"]}),
            "Produce": Request("Produce", {"acks": -1, "timeout": 1_000, **data}, 12),
        }
    if resource == TOPIC:
        offsets = {"group_id": "sharers", "topics": [{"topic_name": "secret", "partitions": [0]}]}
        return {
            "DescribeShareGroupOffsets": Request("DescribeShareGroupOffsets", {"groups": [offsets]}),
            "ConsumerGroupDescribe": Request("ConsumerGroupDescribe", {"group_ids": ["readers"]}),
            "ShareGroupDescribe": Request("ShareGroupDescribe", {"group_ids": ["sharers"]}),
            **{
                api: Request(api, special_requests(0)[api] | {"group_id": "left"})
                for api in ("AlterShareGroupOffsets", "DeleteShareGroupOffsets")
            },
        }
    config = {
        "resource_type": 32 if resource == GROUP else 4,
        "resource_name": "g" if resource == GROUP else "1",
    }
    configs = ("DescribeConfigs", "AlterConfigs", "IncrementalAlterConfigs")
    found = {api: Request(api, {"resources": [config]}) for api in configs}
    if resource == CLUSTER:
        found["AddPartitionsToTxn"] = Request("AddPartitionsToTxn", {"transactions": []}, 5)
    return found


def transactional_batch(producer_id: int, epoch: int) -> bytes:
    return build_batch(
        [Record(None, b"v", 1)],
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=0,
        attributes=0x10,  # Transactional.
    )


async def test_each_permission_of_a_row_is_needed(world: World) -> None:
    bodies = await fill(world)
    before = state(world.node)
    for api in GUARDED:
        for kind in permissions(api) - ANY_OF.get(api, (set(), {}))[0]:
            usual = Request(api, bodies[api], VERSIONS.get(api))
            world.hook.refused_kinds = {kind}
            answer = await world.send(requests_for(kind).get(api, usual))
            assert kind in world.hook.asked_kinds(), (api, kind)
            assert state(world.node) == before, (api, kind)
            if api not in SILENT and (api, kind[1]) not in LEFT_OUT:
                assert CODES[kind[1]] in set(codes_in(answer)), (api, kind)


async def test_permissions_of_which_one_is_enough_are_all_asked_for_before_it_is_refused(
    world: World,
) -> None:
    await fill(world)
    before = state(world.node)
    for api, (kinds, body) in ANY_OF.items():
        world.hook.refused_kinds = kinds
        answer = await world.send(Request(api, body))
        assert kinds <= world.hook.asked_kinds() <= permissions(api), api
        assert api in SILENT or set(codes_in(answer)), api
        assert state(world.node) == before, api


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
    batch = transactional_batch(given.producer_id, given.producer_epoch)
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
