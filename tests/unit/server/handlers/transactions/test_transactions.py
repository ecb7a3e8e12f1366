"""Transactions through the wire format, every version of every API, on real partitions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from tidemill.control.commands import CreateTopic
from tidemill.errors import ErrorCode
from tidemill.records.record import Record, build_batch
from tidemill.server.broker import Broker
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.wire.apis import APIS_BY_NAME
from tidemill.wire.requests import ms

Ask = Callable[..., Awaitable[Any]]
NONE = ErrorCode.none
VERSIONS = {name: api.versions for name, api in APIS_BY_NAME.items()}
TRANSACTIONAL = 0x10


def versions(api: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("version", VERSIONS[api])


@pytest.fixture
async def topic_id(broker: Broker) -> Any:
    topic = await broker.controller.submit(
        CreateTopic(name="t", topic_id=uuid4(), partitions=2, replication=1)
    )
    return topic.id


@pytest.fixture
async def producer(broker: Broker, ask: Ask, topic_id: Any) -> tuple[int, int]:
    return await start(broker, ask)


async def start(broker: Broker, ask: Ask, version: int = 4, **body: Any) -> tuple[int, int]:
    answer = await ask(
        broker, "InitProducerId", version, transactional_id="x", transaction_timeout=60_000, **body
    )
    assert answer.error_code is NONE
    return answer.producer_id, answer.producer_epoch


async def test_a_client_that_is_gone_does_not_fence_itself(
    broker: Broker, ask: Ask, producer: tuple[int, int]
) -> None:
    body = {"transactional_id": "x", "transaction_timeout": 60_000}
    answer = await ask(broker, "InitProducerId", 4, is_gone=True, **body)
    assert answer.error_code is ErrorCode.coordinator_not_available
    assert await start(broker, ask) == (producer[0], producer[1] + 1), "this is the first that fences"


async def add(broker: Broker, ask: Ask, producer: tuple[int, int], version: int = 3, **changes: Any) -> Any:
    topics = changes.pop("topics", [{"name": "t", "partitions": [0, 1]}])
    who = {"transactional_id": "x", "producer_id": producer[0], "producer_epoch": producer[1], **changes}
    if version >= 4:
        answer = await ask(broker, "AddPartitionsToTxn", version, transactions=[{**who, "topics": topics}])
        (transaction,) = answer.results_by_transaction
        assert transaction.transactional_id == who["transactional_id"]
        results = transaction.topic_results
    else:
        old = {f"v3_and_below_{name}": value for name, value in who.items()}
        answer = await ask(broker, "AddPartitionsToTxn", version, v3_and_below_topics=topics, **old)
        results = answer.results_by_topic_v3_and_below
    return {
        (topic.name, each.partition_index): each.partition_error_code
        for topic in results
        for each in topic.results_by_partition
    }


async def end(
    broker: Broker, ask: Ask, producer: tuple[int, int], version: int = 4, *, committed: bool = True
) -> Any:
    return await ask(
        broker,
        "EndTxn",
        version,
        transactional_id="x",
        producer_id=producer[0],
        producer_epoch=producer[1],
        committed=committed,
    )


def write(broker: Broker, producer: tuple[int, int], sequence: int = 0, partition: int = 0) -> None:
    batch = build_batch(
        [Record(None, b"v")],
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=sequence,
        attributes=TRANSACTIONAL,
    )
    broker.find.partition(broker.find.topic("t"), partition).append(batch, broker.clock_ms())


async def commit_offset(
    broker: Broker, ask: Ask, producer: tuple[int, int], topic_id: Any, version: int = 3, **changes: Any
) -> ErrorCode:
    entry = {"partition_index": 0, "committed_offset": 9, "committed_metadata": "m"}
    label = {"topic_id": topic_id} if version >= 6 else {"name": "t"}
    body = {
        "transactional_id": "x",
        "group_id": "g",
        "producer_id": producer[0],
        "producer_epoch": producer[1],
        "topics": [{**label, "partitions": [entry]}],
        **changes,
    }
    answer = await ask(broker, "TxnOffsetCommit", version, **body)
    ((partition,),) = (topic.partitions for topic in answer.topics)
    code: ErrorCode = partition.error_code
    return code


async def fetched_offset(broker: Broker, ask: Ask, *, stable: bool = False) -> tuple[int, ErrorCode]:
    answer = await ask(
        broker,
        "OffsetFetch",
        7,
        group_id="g",
        topics=[{"name": "t", "partition_indexes": [0]}],
        require_stable=stable,
    )
    (partition,) = answer.topics[0].partitions
    return partition.committed_offset, partition.error_code


class TestInitProducerId:
    @versions("InitProducerId")
    async def test_each_start_has_the_next_epoch(self, broker: Broker, ask: Ask, version: int) -> None:
        first = await start(broker, ask, version)
        assert await start(broker, ask, version) == (first[0], 1)

    @pytest.mark.parametrize("version", [3, 4, 5, 6])
    async def test_a_producer_goes_on_or_is_fenced(self, broker: Broker, ask: Ask, version: int) -> None:
        first = await start(broker, ask, version)
        known = {"producer_id": first[0], "producer_epoch": first[1]}
        assert await start(broker, ask, version, **known) == (first[0], 1)
        assert await start(broker, ask, version) == (first[0], 2)
        answer = await ask(
            broker, "InitProducerId", version, transactional_id="x", transaction_timeout=1_000, **known
        )
        fenced = ErrorCode.producer_fenced if version >= 4 else ErrorCode.invalid_producer_epoch
        assert (answer.error_code, answer.producer_id) == (fenced, -1)

    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({"transactional_id": ""}, ErrorCode.invalid_request),
            ({"producer_id": 5}, ErrorCode.invalid_request),
            ({"transaction_timeout": 900_001}, ErrorCode.invalid_transaction_timeout),
            ({"transaction_timeout": 0}, ErrorCode.invalid_transaction_timeout),
            ({"keep_prepared_txn": True}, ErrorCode.unsupported_version),
            ({"enable2_pc": True}, ErrorCode.transactional_id_authorization_failed),
        ],
    )
    async def test_what_makes_no_sense_is_refused(
        self, broker: Broker, ask: Ask, changes: dict[str, Any], code: ErrorCode
    ) -> None:
        body = {"transactional_id": "x", "transaction_timeout": 60_000, **changes}
        assert (await ask(broker, "InitProducerId", 6, **body)).error_code is code


@versions("AddPartitionsToTxn")
async def test_added_partitions_can_be_written(
    broker: Broker, ask: Ask, producer: tuple[int, int], version: int
) -> None:
    assert await add(broker, ask, producer, version) == {("t", 0): NONE, ("t", 1): NONE}
    write(broker, producer)


@versions("AddPartitionsToTxn")
async def test_one_missing_partition_keeps_all_out(
    broker: Broker, ask: Ask, producer: tuple[int, int], version: int
) -> None:
    codes = await add(broker, ask, producer, version, topics=[{"name": "t", "partitions": [0, 2]}])
    assert codes == {
        ("t", 0): ErrorCode.operation_not_attempted,
        ("t", 2): ErrorCode.unknown_topic_or_partition,
    }
    assert not broker.find.partition(broker.find.topic("t"), 0).may_write(*producer)


@versions("AddPartitionsToTxn")
async def test_a_fenced_producer_adds_nothing(
    broker: Broker, ask: Ask, producer: tuple[int, int], version: int
) -> None:
    await start(broker, ask)
    codes = await add(broker, ask, producer, version)
    fenced = ErrorCode.producer_fenced if version >= 2 else ErrorCode.invalid_producer_epoch
    assert set(codes.values()) == {fenced}


@pytest.mark.parametrize("version", [4, 5])
async def test_only_looking_adds_nothing(
    broker: Broker, ask: Ask, producer: tuple[int, int], version: int
) -> None:
    await add(broker, ask, producer, topics=[{"name": "t", "partitions": [1]}])
    assert await add(broker, ask, producer, version, verify_only=True) == {
        ("t", 0): ErrorCode.transaction_abortable,
        ("t", 1): NONE,
    }
    assert not broker.find.partition(broker.find.topic("t"), 0).may_write(*producer)


@versions("EndTxn")
@pytest.mark.parametrize("committed", [True, False])
async def test_an_end_reaches_every_partition(
    broker: Broker, ask: Ask, producer: tuple[int, int], version: int, *, committed: bool
) -> None:
    await add(broker, ask, producer)
    write(broker, producer, partition=0)
    write(broker, producer, partition=1)
    answer = await end(broker, ask, producer, version, committed=committed)
    assert answer.error_code is NONE
    for index in (0, 1):
        partition = broker.find.partition(broker.find.topic("t"), index)
        assert partition.last_stable_offset == partition.high_watermark == 2
        assert partition.local_log.producers.transactions.aborted_count == (0 if committed else 1)
    if version >= 5:
        assert (answer.producer_id, answer.producer_epoch) == (producer[0], 1)
        assert set((await add(broker, ask, (producer[0], 1))).values()) == {NONE}
    else:
        assert set((await add(broker, ask, producer)).values()) == {NONE}


@versions("EndTxn")
async def test_an_end_of_nothing_is_refused(broker: Broker, ask: Ask, version: int) -> None:
    unknown = await end(broker, ask, (1, 0), version)
    assert unknown.error_code is ErrorCode.invalid_producer_id_mapping
    producer = await start(broker, ask)
    assert (await end(broker, ask, producer, version)).error_code is ErrorCode.invalid_txn_state
    await start(broker, ask)
    fenced = ErrorCode.producer_fenced if version >= 2 else ErrorCode.invalid_producer_epoch
    assert (await end(broker, ask, producer, version)).error_code is fenced


async def test_the_end_of_a_deleted_topic_is_an_end(
    broker: Broker, ask: Ask, producer: tuple[int, int]
) -> None:
    await add(broker, ask, producer)
    write(broker, producer)
    await broker.catalogue.delete_topic(broker.find.topic("t"))
    assert (await end(broker, ask, producer)).error_code is NONE
    assert (await describe(broker, ask)).transaction_state == "CompleteCommit"


@versions("AddOffsetsToTxn")
async def test_offsets_are_pending_until_the_end(
    broker: Broker, ask: Ask, producer: tuple[int, int], topic_id: Any, version: int
) -> None:
    body = {
        "transactional_id": "x",
        "producer_id": producer[0],
        "producer_epoch": producer[1],
        "group_id": "g",
    }
    assert (await ask(broker, "AddOffsetsToTxn", version, **body)).error_code is NONE
    assert await commit_offset(broker, ask, producer, topic_id) is NONE
    assert await fetched_offset(broker, ask) == (-1, NONE)
    assert await fetched_offset(broker, ask, stable=True) == (-1, ErrorCode.unstable_offset_commit)
    assert (await end(broker, ask, producer)).error_code is NONE
    assert await fetched_offset(broker, ask, stable=True) == (9, NONE)


@versions("TxnOffsetCommit")
@pytest.mark.parametrize("committed", [True, False])
async def test_offsets_share_the_fate_of_the_transaction(
    broker: Broker, ask: Ask, producer: tuple[int, int], topic_id: Any, version: int, *, committed: bool
) -> None:
    if version < 5:
        refused = ErrorCode.transaction_abortable if version == 4 else ErrorCode.invalid_txn_state
        assert await commit_offset(broker, ask, producer, topic_id, version) is refused
        body = {"producer_id": producer[0], "producer_epoch": producer[1], "group_id": "g"}
        await ask(broker, "AddOffsetsToTxn", 3, transactional_id="x", **body)
    assert await commit_offset(broker, ask, producer, topic_id, version) is NONE
    assert (await end(broker, ask, producer, committed=committed)).error_code is NONE
    assert await fetched_offset(broker, ask) == ((9, NONE) if committed else (-1, NONE))


@versions("TxnOffsetCommit")
async def test_offsets_of_a_fenced_producer_have_an_old_epoch(
    broker: Broker, ask: Ask, producer: tuple[int, int], topic_id: Any, version: int
) -> None:
    await start(broker, ask, 4)
    code = await commit_offset(broker, ask, producer, topic_id, version)
    assert code is ErrorCode.invalid_producer_epoch


@versions("TxnOffsetCommit")
async def test_a_topic_that_is_missing_is_refused_for_itself(
    broker: Broker, ask: Ask, producer: tuple[int, int], version: int
) -> None:
    label = {"topic_id": uuid4()} if version >= 6 else {"name": "missing"}
    entry = {"partition_index": 0, "committed_offset": 9, "committed_metadata": None}
    code = await commit_offset(
        broker, ask, producer, None, version, topics=[{**label, "partitions": [entry]}]
    )
    expected = ErrorCode.unknown_topic_id if version >= 6 else ErrorCode.unknown_topic_or_partition
    assert code is expected


@pytest.mark.parametrize("version", [3, 4, 5, 6])
async def test_a_generation_of_an_unknown_group_is_refused(
    broker: Broker, ask: Ask, producer: tuple[int, int], topic_id: Any, version: int
) -> None:
    body = {"producer_id": producer[0], "producer_epoch": producer[1], "group_id": "g"}
    await ask(broker, "AddOffsetsToTxn", 3, transactional_id="x", **body)
    code = await commit_offset(broker, ask, producer, topic_id, version, generation_id=3, member_id="m")
    assert code is (ErrorCode.group_id_not_found if version >= 6 else ErrorCode.illegal_generation)


@versions("WriteTxnMarkers")
async def test_an_operator_can_end_what_hangs(
    broker: Broker, ask: Ask, producer: tuple[int, int], version: int
) -> None:
    await add(broker, ask, producer)
    write(broker, producer)
    marker = {
        "producer_id": producer[0],
        "producer_epoch": producer[1],
        "transaction_result": False,
        "topics": [{"name": "t", "partition_indexes": [0, 7]}],
        "coordinator_epoch": 0,
    }
    answer = await ask(broker, "WriteTxnMarkers", version, markers=[marker])
    (topic,) = answer.markers[0].topics
    codes = {each.partition_index: each.error_code for each in topic.partitions}
    assert codes == {0: NONE, 7: ErrorCode.unknown_topic_or_partition}
    partition = broker.find.partition(broker.find.topic("t"), 0)
    assert partition.last_stable_offset == partition.high_watermark == 2
    zombie = {**marker, "producer_epoch": producer[1] - 1}
    answer = await ask(broker, "WriteTxnMarkers", version, markers=[zombie])
    assert answer.markers[0].topics[0].partitions[0].error_code is ErrorCode.invalid_producer_epoch


@versions("WriteTxnMarkers")
async def test_a_client_cannot_commit_what_hangs(
    broker: Broker, ask: Ask, producer: tuple[int, int], version: int
) -> None:
    await add(broker, ask, producer)
    write(broker, producer)
    abort = {
        "producer_id": producer[0],
        "producer_epoch": producer[1],
        "transaction_result": False,
        "topics": [{"name": "t", "partition_indexes": [0]}],
        "coordinator_epoch": 0,
    }
    commit = {**abort, "transaction_result": True}
    answer = await ask(broker, "WriteTxnMarkers", version, markers=[commit])
    (refused,) = answer.markers[0].topics[0].partitions
    assert refused.error_code is ErrorCode.cluster_authorization_failed
    partition = broker.find.partition(broker.find.topic("t"), 0)
    assert (partition.last_stable_offset, partition.log_end_offset) == (0, 1), "it is still open"
    answer = await ask(broker, "WriteTxnMarkers", version, markers=[commit, abort])
    codes = [each.topics[0].partitions[0].error_code for each in answer.markers]
    assert codes == [ErrorCode.cluster_authorization_failed, NONE], "each marker has its own answer"
    assert partition.last_stable_offset == partition.high_watermark == 2


async def test_more_markers_than_a_coordinator_sends_are_refused(
    broker: Broker, ask: Ask, producer: tuple[int, int]
) -> None:
    marker = {"transaction_result": False, "coordinator_epoch": 0}
    marker |= dict(zip(("producer_id", "producer_epoch"), producer, strict=True))
    topics = [{"name": "t", "partition_indexes": [0] * 20_001}]
    answer = await ask(broker, "WriteTxnMarkers", 1, markers=[{**marker, "topics": topics}])
    codes = {each.error_code for each in answer.markers[0].topics[0].partitions}
    assert codes == {ErrorCode.invalid_request}
    assert broker.find.partition(broker.find.topic("t"), 0).high_watermark == 0


async def describe(broker: Broker, ask: Ask, transactional_id: str = "x") -> Any:
    answer = await ask(broker, "DescribeTransactions", 0, transactional_ids=[transactional_id])
    (described,) = answer.transaction_states
    return described


class TestLooking:
    async def test_a_transaction_is_described(
        self, broker: Broker, ask: Ask, producer: tuple[int, int]
    ) -> None:
        await add(broker, ask, producer)
        found = await describe(broker, ask)
        assert (found.error_code, found.transaction_state) == (NONE, "Ongoing")
        assert (found.producer_id, found.producer_epoch) == producer
        assert ms(found.transaction_timeout) == 60_000
        assert abs(found.transaction_start_time - broker.clock_ms()) < 60_000
        assert [(topic.topic, topic.partitions) for topic in found.topics] == [("t", (0, 1))]

    async def test_an_unknown_id_is_not_found(self, broker: Broker, ask: Ask) -> None:
        for _ in range(2):
            found = await describe(broker, ask)
            assert (found.error_code, found.transaction_start_time) == (
                ErrorCode.transactional_id_not_found,
                -1,
            )
            assert (await describe(broker, ask, "")).error_code is ErrorCode.invalid_request
            await broker.coordinators.ensure_topic(TRANSACTIONS)

    @versions("ListTransactions")
    async def test_transactions_are_listed_and_filtered(
        self, broker: Broker, ask: Ask, producer: tuple[int, int], version: int
    ) -> None:
        await add(broker, ask, producer)
        await ask(broker, "InitProducerId", 4, transactional_id="other", transaction_timeout=60_000)

        async def listed(**filters: Any) -> list[tuple[str, str]]:
            answer = await ask(broker, "ListTransactions", version, **filters)
            assert answer.error_code is NONE
            return sorted(
                (each.transactional_id, each.transaction_state) for each in answer.transaction_states
            )

        assert await listed() == [("other", "Empty"), ("x", "Ongoing")]
        assert await listed(state_filters=["Ongoing"]) == [("x", "Ongoing")]
        assert await listed(state_filters=["Nonsense"]) == []
        assert await listed(producer_id_filters=[producer[0]]) == [("x", "Ongoing")]
        if version >= 1:
            assert await listed(duration_filter=1_000_000, state_filters=["Ongoing"]) == []
        if version >= 2:
            assert await listed(transactional_id_pattern="o.*") == [("other", "Empty")]

    async def test_unknown_states_and_bad_patterns_are_named(
        self, broker: Broker, ask: Ask, producer: tuple[int, int]
    ) -> None:
        answer = await ask(broker, "ListTransactions", 2, state_filters=["Nonsense", "Empty"])
        assert answer.unknown_state_filters == ("Nonsense",)
        answer = await ask(broker, "ListTransactions", 2, transactional_id_pattern="(")
        assert answer.error_code is ErrorCode.invalid_regular_expression

    async def test_without_any_transaction_nothing_is_listed(self, broker: Broker, ask: Ask) -> None:
        assert (await ask(broker, "ListTransactions", 2)).transaction_states == ()

    async def test_producers_of_a_partition_are_described(
        self, broker: Broker, ask: Ask, producer: tuple[int, int]
    ) -> None:
        await add(broker, ask, producer)
        write(broker, producer)
        topics = [{"name": "t", "partition_indexes": [0, 1, 2]}, {"name": "u", "partition_indexes": [0]}]
        answer = await ask(broker, "DescribeProducers", 0, topics=topics)
        first, empty, missing = answer.topics[0].partitions
        (active,) = first.active_producers
        assert (active.producer_id, active.producer_epoch) == producer
        assert (active.last_sequence, active.current_txn_start_offset) == (0, 0)
        assert empty.active_producers == ()
        assert missing.error_code is ErrorCode.unknown_topic_or_partition
        assert answer.topics[1].partitions[0].error_code is ErrorCode.unknown_topic_or_partition


async def test_the_coordinator_of_an_id_is_found(broker: Broker, ask: Ask) -> None:
    answer = await ask(broker, "FindCoordinator", 3, key="x", key_type=1)
    assert (answer.error_code, answer.node_id) == (NONE, 1)
    assert "__transaction_state" in broker.image.topics
