"""Transactions whose coordinator, partitions and groups are on several nodes, in one process."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from support.product_cluster import ProductCluster
from support.virtual_loop import run_virtual
from tidemill.errors import ErrorCode, NodeUnavailable
from tidemill.records.batch import parse_header
from tidemill.records.record import Record, build_batch
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.coordinators.transactions import TRANSACTIONS

NONE = ErrorCode.none
TRANSACTIONAL = 0x10
VERIFIED, ADDED = 9, 12
"""Versions of Produce: the client has added the partition, and the leader adds it."""

Story = Callable[[ProductCluster], Awaitable[None]]


def on_three_nodes(story: Story) -> Callable[[], None]:
    """Run a test on the virtual loop, with a topic ``t`` whose three partitions have three leaders."""

    @functools.wraps(story)
    def test() -> None:
        async def main() -> None:
            async with ProductCluster(3) as cluster:
                await cluster.create("t")
                assert {cluster.leader("t", index) for index in range(3)} == {1, 2, 3}
                await story(cluster)

        run_virtual(main, seed=1)

    # Not those of the story: pytest would look for fixtures.
    del test.__wrapped__
    return test


class Transactional:
    """A producer with the transactional id ``x`` that asks the nodes by hand."""

    def __init__(self, cluster: ProductCluster) -> None:
        self.cluster = cluster
        self.name = "x"
        self.id = self.epoch = -1
        self.sequences = [0] * 3

    @property
    def coordinator(self) -> int:
        return self.cluster.leader(TRANSACTIONS.topic)

    @property
    def who(self) -> dict[str, Any]:
        return {"transactional_id": self.name, "producer_id": self.id, "producer_epoch": self.epoch}

    async def start(self) -> None:
        cluster = self.cluster
        await cluster.ask(cluster.some_id, "FindCoordinator", 4, key_type=1, coordinator_keys=["x"])
        await cluster.until(lambda: self.coordinator != -1)
        answer = await cluster.ask(
            self.coordinator, "InitProducerId", 4, transactional_id="x", transaction_timeout=60_000
        )
        assert answer.error_code is NONE
        self.id, self.epoch = answer.producer_id, answer.producer_epoch
        self.sequences = [0] * 3

    async def add(self, *indexes: int) -> set[ErrorCode]:
        old = {f"v3_and_below_{name}": value for name, value in self.who.items()}
        topics = [{"name": "t", "partitions": indexes}]
        answer = await self.cluster.ask(
            self.coordinator, "AddPartitionsToTxn", 3, v3_and_below_topics=topics, **old
        )
        (topic,) = answer.results_by_topic_v3_and_below
        return {each.partition_error_code for each in topic.results_by_partition}

    async def write(self, index: int, version: int = VERIFIED) -> ErrorCode:
        """Write one batch to the leader of a partition."""
        return await self.write_to(self.cluster.leader("t", index), index, version)

    async def write_to(self, node_id: int, index: int, version: int = VERIFIED) -> ErrorCode:
        batch = build_batch(
            [Record(None, b"v")],
            producer_id=self.id,
            producer_epoch=self.epoch,
            base_sequence=self.sequences[index],
            attributes=TRANSACTIONAL,
        )
        data = {"name": "t", "partition_data": [{"index": index, "records": batch}]}
        answer = await self.cluster.ask(
            node_id,
            "Produce",
            version,
            transactional_id=self.name,
            acks=-1,
            timeout=30_000,
            topic_data=[data],
        )
        (result,) = answer.responses[0].partition_responses
        if result.error_code is NONE:
            self.sequences[index] += 1
        return ErrorCode(result.error_code)

    async def end(self, *, committed: bool = True, version: int = 3) -> ErrorCode:
        answer = await self.cluster.ask(self.coordinator, "EndTxn", version, committed=committed, **self.who)
        if version >= 5 and answer.error_code is NONE:
            self.id, self.epoch = answer.producer_id, answer.producer_epoch
            self.sequences = [0] * 3
        return ErrorCode(answer.error_code)

    async def commit_offset(self, version: int) -> ErrorCode:
        """Commit an offset of the group ``g`` in the transaction."""
        entry = {"partition_index": 0, "committed_offset": 9, "committed_metadata": ""}
        answer = await self.cluster.ask(
            self.cluster.leader(GROUPS.topic),
            "TxnOffsetCommit",
            version,
            group_id="g",
            topics=[{"name": "t", "partitions": [entry]}],
            **self.who,
        )
        ((partition,),) = (topic.partitions for topic in answer.topics)
        return ErrorCode(partition.error_code)


def ended(cluster: ProductCluster, index: int) -> bool:
    """Whether no transaction is open in a partition, as far as readers see."""
    if cluster.leader("t", index) not in cluster.nodes:
        return False
    partition = cluster.led("t", index)
    return partition.last_stable_offset == partition.log_end_offset


async def committed_offset(cluster: ProductCluster) -> int:
    answer = await cluster.ask(
        cluster.leader(GROUPS.topic),
        "OffsetFetch",
        7,
        group_id="g",
        topics=[{"name": "t", "partition_indexes": [0]}],
        require_stable=True,
    )
    offset: int = answer.topics[0].partitions[0].committed_offset
    return offset


def requests_of(cluster: ProductCluster, node_id: int, api: str) -> list[tuple[int, Any]]:
    """The requests of one API that a node sends to others from now on."""
    seen: list[tuple[int, Any]] = []
    broker = cluster.broker(node_id)
    ask = broker.ask_node

    async def noting(target: int, name: str, version: int, body: Mapping[str, Any]) -> Any:
        if name == api:
            seen.append((target, body))
        return await ask(target, name, version, body)

    broker.ask_node = noting
    return seen


async def unreachable(*request: Any) -> Any:
    """Stands for a way to other nodes that is broken."""
    raise NodeUnavailable("the test says so")


# --- one transaction, three leaders


@on_three_nodes
async def test_a_transaction_over_three_nodes_ends_in_all_of_them(cluster: ProductCluster) -> None:
    producer = Transactional(cluster)
    await producer.start()
    markers = requests_of(cluster, producer.coordinator, "WriteTxnMarkers")
    for committed in (True, False):
        assert await producer.add(0, 1, 2) == {NONE}
        for index in (0, 1, 2, 0, 1, 2):
            assert await producer.write(index) is NONE
        assert not any(ended(cluster, index) for index in range(3))
        assert await producer.end(committed=committed) is NONE
        await cluster.until(lambda: all(ended(cluster, index) for index in range(3)))
    assert sorted(target for target, _ in markers) == sorted([*({1, 2, 3} - {producer.coordinator})] * 2)
    for index in range(3):
        aborted = cluster.led("t", index).local_log.producers.transactions.aborted_between(0, 9)
        assert [(each.first_offset, each.last_offset) for each in aborted] == [(3, 5)]


@on_three_nodes
async def test_all_markers_of_a_decision_for_one_node_travel_together(cluster: ProductCluster) -> None:
    producer = Transactional(cluster)
    await producer.start()
    while cluster.leader("t", 1) != cluster.leader("t", 2) or cluster.leader("t", 1) == producer.coordinator:
        await cluster.move("t", 1)
    markers = requests_of(cluster, producer.coordinator, "WriteTxnMarkers")
    assert await producer.add(1, 2) == {NONE}
    assert [await producer.write(index) for index in (1, 2)] == [NONE, NONE]
    assert await producer.end() is NONE
    ((target, body),) = markers
    assert target == cluster.leader("t", 1)
    assert body["markers"][0]["topics"] == [{"name": "t", "partition_indexes": [1, 2]}]


@on_three_nodes
async def test_leaders_add_partitions_for_clients_that_leave_it_to_them(cluster: ProductCluster) -> None:
    producer = Transactional(cluster)
    await producer.start()
    for _ in range(2):
        for index in range(3):
            assert await producer.write(index, ADDED) is NONE
        assert await producer.end(version=5) is NONE
        await cluster.until(lambda: all(ended(cluster, index) for index in range(3)))


@on_three_nodes
async def test_a_partition_that_is_no_part_of_the_transaction_takes_nothing(cluster: ProductCluster) -> None:
    producer = Transactional(cluster)
    await producer.start()
    elsewhere = next(index for index in range(3) if cluster.leader("t", index) != producer.coordinator)
    assert await producer.write(elsewhere) is ErrorCode.invalid_txn_state
    assert await producer.add(elsewhere) == {NONE}
    assert await producer.write(elsewhere) is NONE
    producer.epoch += 1
    assert await producer.write(elsewhere) is ErrorCode.invalid_producer_epoch


@on_three_nodes
async def test_other_nodes_say_that_they_do_not_coordinate_the_id(cluster: ProductCluster) -> None:
    producer = Transactional(cluster)
    await producer.start()
    for node_id in {1, 2, 3} - {producer.coordinator}:
        answer = await cluster.ask(node_id, "EndTxn", 3, committed=True, **producer.who)
        assert answer.error_code is ErrorCode.not_coordinator
        answer = await cluster.ask(
            node_id, "InitProducerId", 4, transactional_id="x", transaction_timeout=60_000
        )
        assert answer.error_code is ErrorCode.not_coordinator


@pytest.mark.parametrize("version", [3, 5])
def test_offsets_of_a_group_on_another_node_are_part_of_the_transaction(version: int) -> None:
    @on_three_nodes
    async def story(cluster: ProductCluster) -> None:
        producer = Transactional(cluster)
        await producer.start()
        await cluster.ask(1, "FindCoordinator", 4, key_type=0, coordinator_keys=["g"])
        await cluster.until(lambda: cluster.leader(GROUPS.topic) != -1)
        while cluster.leader(GROUPS.topic) == producer.coordinator:
            await cluster.move(GROUPS.topic)
        if version < 5:
            answer = await cluster.ask(
                producer.coordinator, "AddOffsetsToTxn", 3, group_id="g", **producer.who
            )
            assert answer.error_code is NONE
        assert await producer.commit_offset(version) is NONE
        assert await committed_offset(cluster) == -1
        assert await producer.end(version=version) is NONE
        assert await committed_offset(cluster) == 9

    story()


@on_three_nodes
async def test_attempts_on_several_nodes_are_published_as_one(cluster: ProductCluster) -> None:
    producer = Transactional(cluster)
    await producer.start()
    attempts = []
    for _ in range(2):
        opened = await cluster.ask(
            producer.coordinator, "OpenAttempt", 0, job="j", batch=0, timeout_ms=60_000
        )
        assert opened.error_code == NONE
        attempts.append(opened)
        producer.id, producer.epoch = opened.producer_id, opened.producer_epoch
        producer.name, producer.sequences = opened.transactional_id, [0] * 3
        for index in range(3):
            assert await producer.write(index, ADDED) is NONE
    markers = requests_of(cluster, producer.coordinator, "WriteTxnMarkers")
    listed = [
        {name: getattr(each, name) for name in ("transactional_id", "producer_id", "producer_epoch")}
        for each in attempts
    ]
    answer = await cluster.ask(producer.coordinator, "PublishAttempts", 0, job="j", batch=0, attempts=listed)
    assert (answer.error_code, answer.already_published) == (NONE, False)
    assert all(ended(cluster, index) for index in range(3))
    assert [len(body["markers"]) for _, body in markers] == [2, 2], "both attempts in one request per node"
    for index in range(3):
        log = cluster.led("t", index).local_log
        kinds = [parse_header(batch).is_control for batch in log.read_batches(0, 4)]
        assert kinds == [False, False, True, True], "their markers are written together"


@on_three_nodes
async def test_a_coordinator_that_cannot_be_asked_is_trouble_that_passes(cluster: ProductCluster) -> None:
    producer = Transactional(cluster)
    await producer.start()
    await cluster.ask(1, "FindCoordinator", 4, key_type=0, coordinator_keys=["g"])
    await cluster.until(lambda: cluster.leader(GROUPS.topic) != -1)
    while cluster.leader(GROUPS.topic) == producer.coordinator:
        await cluster.move(GROUPS.topic)
    index = next(index for index in range(3) if cluster.leader("t", index) != producer.coordinator)
    for node_id in {cluster.leader(GROUPS.topic), cluster.leader("t", index)}:
        cluster.broker(node_id).ask_node = unreachable
    assert await producer.commit_offset(3) is ErrorCode.coordinator_not_available
    assert await producer.write(index) is ErrorCode.not_enough_replicas, "which old clients try again"
    assert await producer.write(index, ADDED) is ErrorCode.coordinator_not_available


# --- an answer that comes late


@on_three_nodes
async def test_a_yes_that_a_marker_has_overtaken_opens_nothing(cluster: ProductCluster) -> None:
    producer = Transactional(cluster)
    await producer.start()
    index = next(index for index in range(3) if cluster.leader("t", index) != producer.coordinator)
    assert await producer.add(index) == {NONE}
    partition, broker = cluster.led("t", index), cluster.broker(cluster.leader("t", index))
    ask = broker.ask_node

    async def overtaken(*request: Any) -> Any:
        answer = await ask(*request)
        partition.write_marker(
            producer.id, producer.epoch, commit=True, coordinator_epoch=0, now_ms=broker.clock_ms()
        )
        return answer

    broker.ask_node = overtaken
    # The client tries again, as older ones do with this code.
    assert await producer.write(index) is ErrorCode.not_enough_replicas
    assert not partition.may_write(producer.id, producer.epoch)
    broker.ask_node = ask
    assert await producer.write(index) is NONE


@on_three_nodes
async def test_a_yes_opens_nothing_in_a_later_leadership(cluster: ProductCluster) -> None:
    producer = Transactional(cluster)
    await producer.start()
    index = next(index for index in range(3) if cluster.leader("t", index) != producer.coordinator)
    assert await producer.add(index) == {NONE}
    node_id, broker = cluster.leader("t", index), cluster.broker(cluster.leader("t", index))
    partition, ask = cluster.led("t", index), broker.ask_node

    async def moved_meanwhile(*request: Any) -> Any:
        answer = await ask(*request)
        while True:
            if await cluster.move("t", index) == node_id:
                return answer

    broker.ask_node = moved_meanwhile
    assert await producer.write_to(node_id, index) is not NONE
    assert not partition.may_write(producer.id, producer.epoch)


# --- nodes that die


@on_three_nodes
async def test_a_decision_reaches_partitions_whose_leader_has_died(cluster: ProductCluster) -> None:
    producer = Transactional(cluster)
    await producer.start()
    assert await producer.add(0, 1, 2) == {NONE}
    for index in range(3):
        assert await producer.write(index) is NONE
    await cluster.kill(next(iter({1, 2, 3} - {producer.coordinator})))
    assert await producer.end() is NONE
    await cluster.until(lambda: all(ended(cluster, index) for index in range(3)))


@on_three_nodes
async def test_the_next_coordinator_carries_on_a_decision(cluster: ProductCluster) -> None:
    producer = Transactional(cluster)
    await producer.start()
    assert await producer.add(0, 1, 2) == {NONE}
    for index in range(3):
        assert await producer.write(index) is NONE
    first = producer.coordinator

    cluster.broker(first).ask_node = unreachable
    assert await producer.end() is NONE, "it is decided"
    others = [index for index in range(3) if cluster.leader("t", index) != first]
    assert not any(ended(cluster, index) for index in others)
    await cluster.kill(first)
    await cluster.until(lambda: all(ended(cluster, index) for index in range(3)))
    await cluster.until(lambda: producer.coordinator not in (first, -1))
    await cluster.until(lambda: cluster.broker(producer.coordinator).transactions.open_count() == 0)
    await producer.start()
    assert producer.epoch == 1, "what the first one knew, the next one knows"


@on_three_nodes
async def test_an_open_transaction_goes_on_behind_a_fail_over(cluster: ProductCluster) -> None:
    producer = Transactional(cluster)
    await producer.start()
    index = next(index for index in range(3) if cluster.leader("t", index) != producer.coordinator)
    assert await producer.add(index) == {NONE}
    assert await producer.write(index) is NONE
    before = cluster.leader("t", index)
    await cluster.kill(before)
    await cluster.until(lambda: cluster.leader("t", index) not in (before, -1))
    assert await producer.write(index) is NONE
    assert await producer.end() is NONE
    await cluster.until(lambda: ended(cluster, index))
    assert cluster.led("t", index).log_end_offset == 3


@on_three_nodes
async def test_a_batch_that_is_sent_again_behind_a_fail_over_keeps_its_offset(
    cluster: ProductCluster,
) -> None:
    answer = await cluster.ask(1, "InitProducerId", 4, transactional_id=None, transaction_timeout=0)

    async def send(sequence: int) -> tuple[ErrorCode, int]:
        batch = build_batch(
            [Record(None, b"v")],
            producer_id=answer.producer_id,
            producer_epoch=0,
            base_sequence=sequence,
        )
        data = {"name": "t", "partition_data": [{"index": 0, "records": batch}]}
        sent = await cluster.ask(
            cluster.leader("t"), "Produce", 9, acks=-1, timeout=30_000, topic_data=[data]
        )
        (result,) = sent.responses[0].partition_responses
        return ErrorCode(result.error_code), result.base_offset

    assert [await send(number) for number in range(3)] == [(NONE, 0), (NONE, 1), (NONE, 2)]
    before = cluster.leader("t")
    await cluster.kill(before)
    await cluster.until(lambda: cluster.leader("t") not in (before, -1))
    assert [await send(number) for number in (2, 1, 3)] == [(NONE, 2), (NONE, 1), (NONE, 3)]


@on_three_nodes
async def test_every_node_gives_producer_ids_that_no_other_gives(cluster: ProductCluster) -> None:
    given = [
        (await cluster.ask(node_id, "InitProducerId", 4, transactional_id=None)).producer_id
        for node_id in (1, 2, 3)
        for _ in range(2)
    ]
    assert len(set(given)) == 6


# --- topics that are deleted


@on_three_nodes
async def test_a_topic_that_any_node_deletes_takes_its_committed_offsets_along(
    cluster: ProductCluster,
) -> None:
    await cluster.ask(1, "FindCoordinator", 4, key_type=0, coordinator_keys=["g"])
    await cluster.until(lambda: cluster.leader(GROUPS.topic) != -1)
    coordinator = cluster.leader(GROUPS.topic)
    entry = {"partition_index": 0, "committed_offset": 9, "committed_metadata": ""}
    answer = await cluster.ask(
        coordinator,
        "OffsetCommit",
        7,
        group_id="g",
        generation_id_or_member_epoch=-1,
        member_id="",
        topics=[{"name": "t", "partitions": [entry]}],
    )
    assert answer.topics[0].partitions[0].error_code is NONE
    assert await committed_offset(cluster) == 9
    other = next(iter({1, 2, 3} - {coordinator}))
    answer = await cluster.ask(other, "DeleteTopics", 5, topic_names=["t"], timeout=10_000)
    assert answer.responses[0].error_code is NONE
    groups = cluster.broker(coordinator).groups
    await cluster.until(lambda: not dict(groups.committed_offsets()).get("g"))


@on_three_nodes
async def test_a_marker_is_not_waited_for_where_the_topic_was_deleted(cluster: ProductCluster) -> None:
    producer = Transactional(cluster)
    await producer.start()
    index = next(index for index in range(3) if cluster.leader("t", index) != producer.coordinator)
    assert await producer.add(index) == {NONE}
    assert await producer.write(index) is NONE
    answer = await cluster.ask(1, "DeleteTopics", 5, topic_names=["t"], timeout=10_000)
    assert answer.responses[0].error_code is NONE
    assert await producer.end() is NONE
    transactions = cluster.broker(producer.coordinator).transactions
    await cluster.until(lambda: transactions.open_count() == 0)


# --- transactions that nobody knows


def open_in(cluster: ProductCluster, index: int) -> set[int]:
    return set(cluster.led("t", index).local_log.producers.transactions.open)


@on_three_nodes
async def test_a_new_leader_aborts_what_no_coordinator_knows_and_nothing_else(
    cluster: ProductCluster,
) -> None:
    producer = Transactional(cluster)
    await producer.start()
    index = next(index for index in range(3) if cluster.leader("t", index) != producer.coordinator)
    assert await producer.add(index) == {NONE}
    assert await producer.write(index) is NONE
    stranger = producer.id + 1
    partition, broker = cluster.led("t", index), cluster.broker(cluster.leader("t", index))
    partition.begin_transaction(stranger, 0)
    batch = build_batch(
        [Record(None, b"v")],
        producer_id=stranger,
        producer_epoch=0,
        base_sequence=0,
        attributes=TRANSACTIONAL,
    )
    partition.append(batch, broker.clock_ms())
    await cluster.until(lambda: partition.high_watermark == partition.log_end_offset)
    assert open_in(cluster, index) == {producer.id, stranger}
    await cluster.move("t", index)
    await cluster.until(lambda: stranger not in open_in(cluster, index))
    assert open_in(cluster, index) == {producer.id}
    assert await producer.end() is NONE
    await cluster.until(lambda: ended(cluster, index))


@on_three_nodes
async def test_nothing_is_aborted_while_a_coordinator_cannot_be_asked(cluster: ProductCluster) -> None:
    producer = Transactional(cluster)
    await producer.start()
    index = next(index for index in range(3) if cluster.leader("t", index) != producer.coordinator)
    assert await producer.add(index) == {NONE}
    assert await producer.write(index) is NONE
    await cluster.kill(producer.coordinator)
    if cluster.leader("t", index) != -1:
        await cluster.move("t", index)
    await cluster.until(lambda: producer.coordinator != -1)
    await asyncio.sleep(5)
    assert open_in(cluster, index) == {producer.id}
    assert await producer.end() is NONE
    await cluster.until(lambda: ended(cluster, index))


@pytest.mark.parametrize("committed", [True, False])
def test_the_sequence_of_a_producer_goes_on_behind_a_fail_over_and_an_end(committed: bool) -> None:
    @on_three_nodes
    async def story(cluster: ProductCluster) -> None:
        producer = Transactional(cluster)
        await producer.start()
        index = next(index for index in range(3) if cluster.leader("t", index) != producer.coordinator)
        for _ in range(2):
            assert await producer.add(index) == {NONE}
            assert await producer.write(index) is NONE
            assert await producer.end(committed=committed) is NONE
        assert await producer.add(index) == {NONE}
        assert await producer.write(index) is NONE
        before = cluster.leader("t", index)
        await cluster.kill(before)
        await cluster.until(lambda: cluster.leader("t", index) not in (before, -1))
        assert await producer.end(committed=committed) is NONE
        await cluster.until(lambda: ended(cluster, index))
        assert await producer.add(index) == {NONE}
        end_offset = cluster.led("t", index).log_end_offset
        producer.sequences[index] -= 1
        again = await producer.write(index)
        assert again is NONE, "it is known from the transaction before"
        assert cluster.led("t", index).log_end_offset == end_offset, "it is not written again"
        assert await producer.write(index) is NONE
        assert cluster.led("t", index).log_end_offset == end_offset + 1

    story()
