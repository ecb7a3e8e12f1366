"""Dead letters: one for each record, whole, wherever the leader of the share partition fails."""

from __future__ import annotations

import asyncio
import functools
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import tidemill
from support.broker_topics import create, leader, write
from support.product_cluster import ProductCluster
from support.virtual_loop import run_virtual
from tidemill.client.admin.share_groups import share_records
from tidemill.client.sync_client import Tidemill
from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.control.commands import SetGroupConfigs, SetTopicConfigs
from tidemill.coordination.share_state import NO_START, DeliveryState, SharePartitionKey, StateBatch
from tidemill.errors import ApiError, ConfigError, ErrorCode, TidemillError
from tidemill.records.batch import parse_header
from tidemill.records.record import Record, build_batch, read_records
from tidemill.replication.partition import Partition
from tidemill.server.broker import Broker
from tidemill.server.coordinators.internal_producer import InternalProducer
from tidemill.server.coordinators.share_state import SHARE_STATE
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.server.node import Node
from tidemill.server.share import dead_letters
from tidemill.server.share.dead_letters import NodeDeadLetters, transactional_id_of
from tidemill.share.letters import Letter, letter_record, read_letter, redriven_record
from tidemill.share.partition.values import DueLetter

Story = Callable[["World"], Awaitable[None]]
DLQ = "dlq.t"
HEADERS = (("colour", b"red"), ("empty", None))
#: What the values of records end with.
VALUE = b""
DUE = [DueLetter(1, 2, 5, "the delivery limit is reached"), DueLetter(4, 4, 1, "no such customer")]


class Crash(Exception):
    """The leader stops here."""


class World:
    """Three nodes; partition 0 of topic t has six records, of which a share group has given up three."""

    def __init__(self, cluster: ProductCluster) -> None:
        self.cluster = cluster
        self.key = SharePartitionKey("g", cluster.broker(cluster.some_id).image.topics["t"].id, 0)

    async def begin(self, **configs: str) -> None:
        await self.configure(**configs)
        records = [Record(f"k{number}".encode(), b"v%d" % number + VALUE, 7, HEADERS) for number in range(6)]
        data = {"name": "t", "partition_data": [{"index": 0, "records": build_batch(records)}]}
        answer = await self.cluster.ask(
            self.leader, "Produce", 9, transactional_id=None, acks=-1, timeout=9_000, topic_data=[data]
        )
        assert answer.responses[0].partition_responses[0].error_code is ErrorCode.none
        archiving = DeliveryState.ARCHIVING
        batches = [StateBatch(*each[:2], archiving, each[2], reason=each[3]) for each in DUE]
        await self.on(self.leader, self.broker.persister.initialize(self.key, 1, 0))
        await self.on(self.leader, self.broker.persister.read_state(self.key, self.epoch))
        await self.on(
            self.leader, self.broker.persister.write_state(self.key, 1, self.epoch, NO_START, 0, batches)
        )

    async def configure(self, **configs: str) -> None:
        wanted = {"errors.deadletterqueue.topic.name": DLQ}
        wanted |= {name.replace("_", "."): value for name, value in configs.items()}
        command = SetGroupConfigs(group_id="g", configs=wanted)
        await self.on(
            self.cluster.some_id, self.cluster.broker(self.cluster.some_id).controller.submit(command)
        )
        await self.cluster.until(
            lambda: all(
                node.broker.image.group_configs.get("g") == wanted for node in self.cluster.nodes.values()
            )
        )

    @property
    def leader(self) -> int:
        return self.cluster.leader("t")

    @property
    def broker(self) -> Broker:
        return self.cluster.broker(self.leader)

    @property
    def epoch(self) -> int:
        return self.broker.image.topics["t"].partitions[0].leader_epoch

    async def on(self, node_id: int, work: Awaitable[Any]) -> Any:
        return await self.cluster.run(node_id, work)

    async def write(self, letters: NodeDeadLetters | None = None) -> None:
        """The leader of the moment writes what is due, and tries until it has."""
        writer = letters or NodeDeadLetters(self.broker)
        for _ in range(20):
            try:
                await self.on(self.leader, writer.write(self.key, self.epoch, DUE))
                return
            except TidemillError:
                await asyncio.sleep(0.2)
        raise AssertionError("the letters were not written")

    async def state(self) -> list[tuple[int, int, DeliveryState]]:
        state = await self.on(self.leader, self.broker.persister.read_state(self.key, self.epoch))
        assert all(each.producer_id == -1 for each in state.batches)
        return [(each.first_offset, each.last_offset, each.state) for each in state.batches]

    def letters(self) -> list[Record]:
        """The letters that committed readers see, in all partitions of the dead-letter topic."""
        found: list[Record] = []
        for index in range(len(self.cluster.broker(self.cluster.some_id).image.topics[DLQ].partitions)):
            partition = self.cluster.led(DLQ, index)
            assert partition.last_stable_offset == partition.log_end_offset, "no transaction is left open"
            for batch in _committed(partition):
                found += read_records(batch)
        return found

    def check_written_once(self) -> None:
        said = [read_letter(record.headers) for record in self.letters()]
        assert sorted(each.offset for each in said if each) == [1, 2, 4], said


def _committed(partition: Any) -> Iterator[bytes]:
    position = partition.log_start_offset
    while position < partition.last_stable_offset:
        data = partition.read(position, 1 << 20, at_least_one=True, committed=True)
        aborted = partition.aborted_in(data)
        while len(data):
            header = parse_header(data)
            is_aborted = any(
                each.producer_id == header.producer_id
                and each.first_offset <= header.base_offset <= each.last_offset
                for each in aborted
            )
            if not header.is_control and not is_aborted:
                yield bytes(data[: header.size_bytes])
            data = data[header.size_bytes :]
            position = header.last_offset + 1


def on_three_nodes(story: Story) -> Callable[[], None]:
    """Run a test on the virtual loop; the dead-letter topic is led by another node than the records."""

    @functools.wraps(story)
    def test() -> None:
        async def main() -> None:
            async with ProductCluster(3) as cluster:
                await cluster.create("t", partitions=1)
                await cluster.create(DLQ, partitions=1)
                while cluster.leader(DLQ) == cluster.leader("t"):
                    await cluster.move(DLQ)
                await story(World(cluster))

        run_virtual(main, seed=1)

    del test.__wrapped__
    return test


@on_three_nodes
async def test_a_letter_has_the_whole_record_and_says_where_it_was_and_why_it_died(world: World) -> None:
    await world.begin()
    await world.write()
    assert await world.state() == [(1, 2, DeliveryState.ARCHIVED), (4, 4, DeliveryState.ARCHIVED)]
    letters = world.letters()
    assert [(record.key, record.value) for record in letters] == [
        (b"k1", b"v1"),
        (b"k2", b"v2"),
        (b"k4", b"v4"),
    ]
    assert all(record.headers[:2] == HEADERS for record in letters)
    assert read_letter(letters[0].headers) == Letter("g", "t", 0, 1, 5, "the delivery limit is reached")
    assert read_letter(letters[2].headers) == Letter("g", "t", 0, 4, 1, "no such customer")
    assert letters[0].timestamp_ms != 7, "its time is that of its death"
    await world.write()
    world.check_written_once()


@on_three_nodes
async def test_a_group_may_have_letters_without_the_contents_of_records(world: World) -> None:
    await world.begin(errors_deadletterqueue_copy_record_enable="false")
    await world.write()
    world.check_written_once()
    assert {(record.key, record.value, len(record.headers)) for record in world.letters()} == {
        (None, None, 6)
    }


@pytest.mark.parametrize(
    ("headers", "left"),
    [
        pytest.param(HEADERS, (b"k1", len(HEADERS) + 7), id="the value is too large"),
        pytest.param((("h", bytes(3_000)),), (None, 7), id="the headers are, too"),
    ],
)
def test_a_record_that_is_too_large_for_the_topic_still_gets_a_letter(
    headers: Any, left: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "HEADERS", headers)
    monkeypatch.setattr(sys.modules[__name__], "VALUE", bytes(3_000))

    @on_three_nodes
    async def story(world: World) -> None:
        limit = SetTopicConfigs(name=DLQ, configs={"max.message.bytes": "2000"})
        await world.on(world.cluster.some_id, world.broker.controller.submit(limit))
        await world.begin()
        await world.write()
        world.check_written_once()
        letter = world.letters()[0]
        assert (letter.key, len(letter.headers)) == left
        assert letter.value is None
        assert dict(letter.headers)["tidemill-dlq-value-bytes"] == b"3002"

    story()


@on_three_nodes
async def test_a_group_without_a_dead_letter_topic_any_more_has_no_letters(world: World) -> None:
    await world.begin()
    await world.configure(errors_deadletterqueue_topic_name="")
    await world.write()
    assert world.letters() == []


def _due(db: Tidemill) -> int:
    """How many letters of the group's records are due."""
    return db.run(share_records(db._awaited.cluster, "g", ("orders", 0))).dead_letters_due


@pytest.mark.parametrize("topic", ["orders", "shop.dead"])
def test_letters_that_cannot_go_to_their_topic_stay_due_until_the_group_has_another(
    topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The topic that they come from, or one that became a table's after the group was configured."""
    with tidemill.open() as db:
        db.produce("orders", "bad")
        db.configure_share("g", dead_letter=topic)
        db.create_table("shop.dead", "id bigint", primary_key=["id"])
        with db.share("g", "orders") as records:
            records.next().reject("no such customer")
            records.flush()
            until(lambda: "cannot take the dead letters of group 'g'" in caplog.text)
            assert _due(db) == 1
            db.configure_share("g", dead_letter=DLQ)
            until(lambda: _due(db) == 0)
        with db.share("looks", DLQ) as letters:
            assert letters.next().value == b"bad"


def until(condition: Callable[[], bool]) -> None:
    """Wait for a state of a node that runs beside this thread."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_letters_cannot_be_sent_to_a_table_or_to_where_their_records_come_from() -> None:
    with tidemill.open() as db:
        db.create_table("shop.dead", "id bigint", primary_key=["id"])
        with pytest.raises(ConfigError, match=r"is the log of table 'shop\.dead'"):
            db.configure_share("g", dead_letter="shop.dead")
        with pytest.raises(ConfigError, match="which the records come from"):
            db.share("g", "orders", dead_letter="orders")
        with pytest.raises(ConfigError, match="which the records come from"):
            db.worker("g", "orders", print, dead_letter="orders")


@on_three_nodes
async def test_letters_go_on_with_the_same_producer(world: World) -> None:
    await world.begin()
    letters = NodeDeadLetters(world.broker)
    for each in DUE:
        await world.on(world.leader, letters.write(world.key, world.epoch, [each]))
    world.check_written_once()


# --- crashes

POINTS = (
    "after begin",
    "before append",
    "after append",
    "before end",
    "after end",
    "before commit",
    "after commit",
)


def crash_at(broker: Broker, point: str, patch: pytest.MonkeyPatch) -> None:
    """Have the next writer of dead letters on this node stop at a point."""
    when, what = point.split()

    def stopping(original: Callable[..., Awaitable[Any]], mine: Callable[..., bool]) -> Any:
        async def step(*arguments: Any, **named: Any) -> Any:
            if not mine(*arguments):
                return await original(*arguments, **named)
            if when == "before":
                raise Crash(point)
            await original(*arguments, **named)
            raise Crash(point)

        return step

    if what == "end":
        write = broker.persister.write_in_transaction
        patch.setattr(broker.persister, "write_in_transaction", stopping(write, lambda *_: True))
    else:
        original = getattr(InternalProducer, what)
        patch.setattr(InternalProducer, what, stopping(original, lambda self, *_: self._broker is broker))


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("next_leader", ["another node", "the same node"])
def test_one_letter_is_written_wherever_the_leader_fails(
    point: str, next_leader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    @on_three_nodes
    async def story(world: World) -> None:
        await world.begin()
        with monkeypatch.context() as patch:
            crash_at(world.broker, point, patch)
            with pytest.raises(Crash):
                await world.on(world.leader, NodeDeadLetters(world.broker).write(world.key, world.epoch, DUE))
        if next_leader == "another node":
            await world.cluster.move("t")
        await world.write()
        world.check_written_once()
        assert await world.state() == [(1, 2, DeliveryState.ARCHIVED), (4, 4, DeliveryState.ARCHIVED)]

    story()


@on_three_nodes
async def test_a_commit_that_is_decided_and_not_carried_out_is_waited_for(world: World) -> None:
    """The next leader comes between the decision and the marker in the state."""
    await world.begin()
    await world.cluster.until(lambda: world.cluster.leader(SHARE_STATE.topic) != -1)
    states = world.cluster.broker(world.cluster.leader(SHARE_STATE.topic)).share_states
    complete = states.complete_transaction
    stuck = True

    async def stuck_marker(*arguments: Any, **named: Any) -> None:
        if stuck:
            raise ApiError(ErrorCode.coordinator_not_available, "not now")
        await complete(*arguments, **named)

    states.complete_transaction = stuck_marker  # type: ignore[method-assign]
    first = asyncio.ensure_future(
        world.on(world.leader, NodeDeadLetters(world.broker).write(world.key, world.epoch, DUE[:1]))
    )
    await asyncio.sleep(2)
    await world.cluster.move("t")
    second = asyncio.ensure_future(world.write())
    await asyncio.sleep(3)
    assert not second.done()
    stuck = False
    await second
    with suppress(TidemillError):
        await first
    world.check_written_once()


@on_three_nodes
async def test_a_former_leader_that_wakes_up_writes_nothing(world: World) -> None:
    await world.begin()
    old = world.broker
    goes_on = asyncio.Event()
    write = old.persister.write_in_transaction

    async def slow(*arguments: Any, **named: Any) -> None:
        await goes_on.wait()
        await write(*arguments, **named)

    old.persister.write_in_transaction = slow  # type: ignore[method-assign]
    late = asyncio.ensure_future(
        world.on(world.leader, NodeDeadLetters(old).write(world.key, world.epoch, DUE))
    )
    await asyncio.sleep(1)
    await world.cluster.move("t")
    await world.write()
    goes_on.set()
    with pytest.raises(TidemillError):
        await late
    world.check_written_once()


@pytest.mark.parametrize("after_ms", [2, 5, 10, 20, 40, 80])
@pytest.mark.parametrize("topic", ["t", DLQ, SHARE_STATE.topic, TRANSACTIONS.topic])
def test_a_node_that_is_killed_leaves_one_letter(topic: str, after_ms: int) -> None:
    """The process of a leader ends at some moment while letters are written."""

    @on_three_nodes
    async def story(world: World) -> None:
        await world.begin()
        # The second time on, when everything has leaders.
        await world.on(world.leader, NodeDeadLetters(world.broker).write(world.key, world.epoch, DUE[1:]))
        writing = asyncio.ensure_future(
            world.on(world.leader, NodeDeadLetters(world.broker).write(world.key, world.epoch, DUE))
        )
        await asyncio.sleep(after_ms / 1_000)
        await world.cluster.kill(world.cluster.leader(topic))
        with suppress(BaseException):
            await asyncio.wait_for(writing, 20)
        topics = ("t", DLQ, SHARE_STATE.topic, TRANSACTIONS.topic)
        cluster = world.cluster
        await cluster.until(lambda: {cluster.leader(each) for each in topics} <= set(cluster.nodes))
        await world.write()
        await asyncio.sleep(1)
        world.check_written_once()
        assert await world.state() == [(1, 2, DeliveryState.ARCHIVED), (4, 4, DeliveryState.ARCHIVED)]

    try:
        story()
    except AssertionError as error:
        # A flush that ended in the very moment in which its process did, which the loop calls a failure.
        if "_ProcessGone" not in str(error):
            raise


@pytest.mark.parametrize("topic", ["t", SHARE_STATE.topic])
def test_letters_are_written_after_a_failover_also_if_no_member_comes_back(topic: str) -> None:
    """The leader dies after it has confirmed that records are rejected, before it writes their letters."""

    @on_three_nodes
    async def story(world: World) -> None:
        await world.begin()
        cluster = world.cluster
        await cluster.kill(cluster.leader(topic))
        topics = ("t", DLQ, SHARE_STATE.topic)
        await cluster.until(lambda: {cluster.leader(each) for each in topics} <= set(cluster.nodes))
        dlq = cluster.led(DLQ)
        await cluster.until(lambda: sum(len(list(read_records(each))) for each in _committed(dlq)) == 3)
        await cluster.until(lambda: not any(len(node.broker.share) for node in cluster.nodes.values()))
        world.check_written_once()

    story()


async def test_letters_are_written_after_a_restart_also_if_no_member_comes_back(tmp_path: Path) -> None:
    node = Node(Settings(data_dir=tmp_path, listen=Address("127.0.0.1", 0), http=None))
    await node.start()
    broker = node.broker
    topic_id = await create(broker, "t")
    await create(broker, DLQ)
    configs = {"errors.deadletterqueue.topic.name": DLQ}
    await broker.controller.submit(SetGroupConfigs(group_id="g", configs=configs))
    await write(broker, "t", "bad")
    key, epoch = SharePartitionKey("g", topic_id, 0), leader(broker, "t").leader_epoch
    await broker.persister.initialize(key, 1, 0)
    await broker.persister.read_state(key, epoch)
    due = StateBatch(0, 0, DeliveryState.ARCHIVING, 1, reason="no such customer")
    await broker.persister.write_state(key, 1, epoch, NO_START, 0, [due])
    await node.stop()

    node = Node(Settings(data_dir=tmp_path, listen=Address("127.0.0.1", 0), http=None))
    await node.start()
    broker = node.broker
    assert broker.sharing.look_after_due_letters in [chore.action for chore in broker.chores()]
    await broker.sharing.look_after_due_letters()
    async with asyncio.timeout(30):
        while len(broker.share):  # noqa: ASYNC110 - it ends when everything is written
            await asyncio.sleep(0.01)
    (batch,) = _committed(leader(broker, DLQ))
    (letter,) = read_records(batch)
    assert (letter.value, read_letter(letter.headers)) == (
        b"bad",
        Letter("g", "t", 0, 0, 1, "no such customer"),
    )
    assert (await broker.persister.read_summary(key, -1)).start_offset == 1
    # Nobody looks after them any more.
    assert broker.share_states.with_due_letters(10) == []
    await node.stop()


@on_three_nodes
async def test_no_client_gets_the_transactional_id_of_a_share_partition(world: World) -> None:
    await world.begin()
    await world.write()
    name = transactional_id_of(world.key)
    answer = await world.cluster.ask(
        world.leader, "InitProducerId", 4, transactional_id=name, transaction_timeout=60_000
    )
    assert answer.error_code is ErrorCode.invalid_request


# --- pure


def test_a_record_that_dies_again_tells_of_its_last_death_and_one_that_is_sent_back_of_none() -> None:
    first = Letter("g", "t", 0, 1, 5, "once")
    again = Letter("g", "t", 0, 9, 2, "twice")
    record = Record(b"k", b"v", 7, HEADERS)
    letter = letter_record(letter_record(record, first, copy=True, now_ms=8), again, copy=True, now_ms=9)
    assert read_letter(letter.headers) == again
    sent = redriven_record(letter, again)
    assert read_letter(sent.headers) is None
    assert sent.headers == (*HEADERS, ("tidemill-redriven-for", b"g"))
    large = letter_record(record, first, copy=True, now_ms=8, left_out=True)
    assert (large.key, large.value) == (b"k", None)
    assert read_letter(HEADERS) is None


def test_a_leader_that_cannot_read_the_records_yet_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new leader's high watermark is late. Nothing to read is no reason to end records without a letter."""
    upper_offset = Partition.upper_offset
    is_late = False

    def late(self: Partition, *, committed: bool) -> int:
        return 2 if is_late and self.topic == "t" else upper_offset(self, committed=committed)

    monkeypatch.setattr(Partition, "upper_offset", late)

    @on_three_nodes
    async def story(world: World) -> None:
        nonlocal is_late
        await world.begin()
        is_late = True
        writing = asyncio.ensure_future(world.write())
        await asyncio.sleep(0.5)
        is_late = False
        await writing
        world.check_written_once()

    story()


def test_records_that_die_one_by_one_are_not_decoded_with_their_whole_batch_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise a batch of thousands, each of them rejected by itself, would hold the event loop."""
    decode = dead_letters._Writer._decode
    decoded: list[int] = []

    async def counted(writer: Any, batch: memoryview) -> list[Record]:
        decoded.append(parse_header(batch).base_offset)
        return await decode(writer, batch)

    @on_three_nodes
    async def story(world: World) -> None:
        await world.begin()
        one_by_one = [DueLetter(offset, offset, 1, "no") for offset in (1, 2, 4)]
        letters = NodeDeadLetters(world.broker)
        await world.on(world.leader, letters.write(world.key, world.epoch, one_by_one))
        world.check_written_once()
        assert decoded == [0]

    monkeypatch.setattr(dead_letters._Writer, "_decode", counted)
    story()


@pytest.mark.parametrize(("records_max", "transactions"), [(200, 1), (2, 2), (1, 3)])
def test_letters_share_transactions(
    records_max: int, transactions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, ends = InternalProducer.commit, []

    async def counted(producer: InternalProducer) -> None:
        ends.append(producer)
        await commit(producer)

    @on_three_nodes
    async def story(world: World) -> None:
        await world.begin()
        await world.write()
        world.check_written_once()
        assert await world.state() == [(1, 2, DeliveryState.ARCHIVED), (4, 4, DeliveryState.ARCHIVED)]

    monkeypatch.setattr(dead_letters, "_RECORDS_MAX", records_max)
    monkeypatch.setattr(InternalProducer, "commit", counted)
    story()
    assert len(ends) == transactions
