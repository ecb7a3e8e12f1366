"""A broker without sockets, and a way to ask it that goes through the wire format in both directions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pytest

from tidemill.config.settings import Settings
from tidemill.config.values import MIB, Address
from tidemill.control.commands import RegisterNode, SetClusterId
from tidemill.control.controller import Controller
from tidemill.control.memory import MemoryStore
from tidemill.coordination.clock import LoopClock
from tidemill.groups.coordinator import GroupCoordinator
from tidemill.groups.settings import GroupSettings
from tidemill.groups.topics import ImageTopics
from tidemill.log.storage import LocalStorage
from tidemill.replication.flusher import Flusher, wall_clock_ms
from tidemill.replication.replicas import Replicas
from tidemill.server.broker import Broker
from tidemill.server.budget import BudgetLimits, ByteBudget
from tidemill.server.call import Call, ReplyBuffers
from tidemill.server.handlers import (
    configs,
    consumer_groups,
    features,
    groups,
    jobs,
    log_dirs,
    metadata,
    offsets,
    producers,
    quorum,
    scans,
    splitting,
    tables,
    topics,
    transactions,
)
from tidemill.server.handlers.produce import produce
from tidemill.server.transaction_partitions import BrokerTransactionPartitions, TransactionLogs
from tidemill.transactions.coordinator import TransactionCoordinator
from tidemill.transactions.settings import TransactionSettings
from tidemill.wire.apis import APIS
from tidemill.wire.encode import encode_request, set_strict
from tidemill.wire.requests import decode_request, decode_response, parse_header

if TYPE_CHECKING:
    from support.table_world import ManualClock, TableWorld

MakeBroker = Callable[..., Awaitable[Broker]]

HANDLERS = {
    "Metadata": metadata.metadata,
    "DescribeCluster": metadata.describe_cluster,
    "DescribeTopicPartitions": metadata.describe_topic_partitions,
    "FindCoordinator": metadata.find_coordinator,
    "CreateTopics": topics.create_topics,
    "DeleteTopics": topics.delete_topics,
    "CreatePartitions": topics.create_partitions,
    "ElectLeaders": topics.elect_leaders,
    "DescribeConfigs": configs.describe_configs,
    "AlterConfigs": configs.alter_configs,
    "IncrementalAlterConfigs": configs.incremental_alter_configs,
    "ListConfigResources": configs.list_config_resources,
    "UpdateFeatures": features.update_features,
    "DescribeQuorum": quorum.describe_quorum,
    "DescribeLogDirs": log_dirs.describe_log_dirs,
    "InitProducerId": producers.init_producer_id,
    "JoinGroup": groups.join_group,
    "SyncGroup": groups.sync_group,
    "Heartbeat": groups.heartbeat,
    "LeaveGroup": groups.leave_group,
    "OffsetCommit": groups.offset_commit,
    "OffsetFetch": groups.offset_fetch,
    "OffsetDelete": groups.offset_delete,
    "ListGroups": groups.list_groups,
    "DescribeGroups": groups.describe_groups,
    "DeleteGroups": groups.delete_groups,
    "ConsumerGroupHeartbeat": consumer_groups.consumer_group_heartbeat,
    "ConsumerGroupDescribe": consumer_groups.consumer_group_describe,
    "AddPartitionsToTxn": transactions.add_partitions_to_txn,
    "AddOffsetsToTxn": transactions.add_offsets_to_txn,
    "EndTxn": transactions.end_txn,
    "WriteTxnMarkers": transactions.write_txn_markers,
    "TxnOffsetCommit": transactions.txn_offset_commit,
    "DescribeProducers": transactions.describe_producers,
    "DescribeTransactions": transactions.describe_transactions,
    "ListTransactions": transactions.list_transactions,
    "DeleteRecords": offsets.delete_records,
    "CreateDatabase": tables.create_database,
    "DropDatabase": tables.drop_database,
    "ListDatabases": tables.list_databases,
    "AlterDatabase": tables.alter_database,
    "CreateTable": tables.create_table,
    "DropTable": tables.drop_table,
    "DescribeTable": tables.describe_table,
    "ListTables": tables.list_tables,
    "AlterTable": tables.alter_table,
    "CreateTablePartition": tables.create_table_partition,
    "DropTablePartition": tables.drop_table_partition,
    "TableStats": scans.table_stats,
    "ListSnapshots": scans.list_snapshots,
    "CreateSnapshot": scans.create_snapshot,
    "AcquireLease": scans.acquire_lease,
    "ReleaseLease": scans.release_lease,
    "ListLeases": scans.list_leases,
    "LookupKv": scans.look_up_kv,
    "ScanKv": scans.scan_kv,
    "PinTable": scans.pin_table,
    "ReleasePin": scans.release_pin,
    "OpenAttempt": jobs.open_attempt,
    "PublishAttempts": jobs.publish_attempts,
    "AbortAttempts": jobs.abort_attempts,
    "KeepJob": jobs.keep_job,
    "ListJobs": jobs.list_jobs,
    "SplitBucket": splitting.split_bucket,
    "MeasureLog": splitting.measure_log,
}
KEYS = {api.name: api.key for api in APIS.values()}
CORRELATION_ID = 77


@pytest.fixture(autouse=True)
def _search_for_typos() -> Iterator[None]:
    set_strict(True)
    yield
    set_strict(False)


@pytest.fixture
async def make_broker(tmp_path: Path) -> AsyncIterator[MakeBroker]:
    """Makes brokers with other settings than the default; all of them share the directory."""
    opened: list[tuple[Broker, MemoryStore]] = []

    async def make(
        *,
        clock_ms: Callable[[], int] = wall_clock_ms,
        steady_ms: Callable[[], int] | None = None,
        **changes: Any,
    ) -> Broker:
        settings = Settings(
            data_dir=tmp_path, offsets_topic_partitions=2, transactions_topic_partitions=2, **changes
        )
        store = MemoryStore()
        controller = Controller(store)
        await controller.start()
        await controller.submit(SetClusterId(cluster_id="the-cluster"))
        await controller.submit(
            RegisterNode(node_id=1, name="node-1", host="registered", port=1, incarnation=uuid4())
        )
        if steady_ms is None and clock_ms is not wall_clock_ms:
            steady_ms = clock_ms
        flusher = Flusher(asyncio.get_running_loop(), 1)
        replicas = Replicas(LocalStorage(tmp_path), flusher.request, max_decompressed_bytes=MIB)
        budget = ByteBudget(BudgetLimits(settings.max_inflight_bytes, settings.max_frame_bytes))
        broker = Broker(
            settings, controller, replicas, flusher, budget, clock_ms=clock_ms, steady_ms=steady_ms
        )
        broker.advertised = Address("advertised", 9999)
        group_settings = GroupSettings(partitions=2, initial_rebalance_delay_ms=0)
        broker.groups = GroupCoordinator(
            broker, group_settings, LoopClock(), ImageTopics(lambda: broker.image)
        )
        broker.transactions = TransactionCoordinator(
            TransactionLogs(broker),
            BrokerTransactionPartitions(broker),
            TransactionSettings(partitions=2),
            LoopClock(),
            broker.next_producer_id,
        )
        opened.append((broker, store))
        return broker

    yield make
    for broker, store in opened:
        await broker.transactions.close()
        await broker.groups.close()
        await broker.close()
        await broker.controller.stop()
        await store.close()


@pytest.fixture
async def broker(make_broker: MakeBroker) -> Broker:
    return await make_broker()


@pytest.fixture
def ask() -> Callable[..., Awaitable[Any]]:
    """``await ask(broker, "Metadata", 12, topics=None)`` gives the decoded response."""

    async def send(broker: Broker, api: str, version: int, /, **body: Any) -> Any:
        frame = encode_request(KEYS[api], version, CORRELATION_ID, "the-client", body)[4:]
        header = parse_header(frame)
        sent: asyncio.Future[ReplyBuffers] = asyncio.get_running_loop().create_future()
        aborted = ConnectionError("the connection was closed")
        call = Call(
            header,
            decode_request(header, frame),
            "10.1.2.3",
            sent.set_result,
            lambda: sent.set_exception(aborted),
        )
        if api == "Produce":
            produce(broker, call)
        else:
            call.reply(await HANDLERS[api](broker, call))
        (response,) = await sent
        correlation_id, entity = decode_response(KEYS[api], version, bytes(response)[4:])
        assert correlation_id == CORRELATION_ID
        return entity

    return send


@pytest.fixture
def clock() -> ManualClock:
    """Time that passes when a test says so."""
    # Here, because most of the tests need neither Arrow nor RocksDB.
    from support.table_world import ManualClock

    return ManualClock()


@pytest.fixture
async def world(
    make_broker: MakeBroker, ask: Callable[..., Awaitable[Any]], clock: ManualClock
) -> TableWorld:
    """A broker with a manual clock, and short ways to ask it about tables."""
    from support.table_world import TableWorld

    broker = await make_broker(clock_ms=clock)
    return TableWorld(broker, ask, clock)
