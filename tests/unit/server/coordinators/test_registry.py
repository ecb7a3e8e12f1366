"""The registry: a third coordinator is one more row, and all that a node does with coordinators finds it."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from support.leadership import elect
from support.prometheus_text import parse_metrics
from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.control import image
from tidemill.control.commands import CreateTopic
from tidemill.coordination import loading
from tidemill.coordination.clock import Clock
from tidemill.coordination.coordinator import Coordinator
from tidemill.coordination.log import CoordinatorLog, LogAccess, ReplayedRecord
from tidemill.coordination.metrics import gauge
from tidemill.coordination.shards import ShardCounts, Shards
from tidemill.coordination.shell import ShardShell
from tidemill.errors import ApiError, ErrorCode
from tidemill.server.broker import Broker, bundle
from tidemill.server.coordinators import registry
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.coordinators.registry import CoordinatorRow
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.server.handlers.cluster import metadata
from tidemill.server.metrics import render
from tidemill.server.node import Node
from tidemill.server.requests.authorization import GROUP

Ask = Callable[..., Awaitable[Any]]
MakeBroker = Callable[..., Awaitable[Broker]]

WORDS_TOPIC = "__words"
WORDS_KEY_TYPE = 7
TWO = 2


class WordsShard(ShardShell):
    """Keeps the words of one partition of its log."""

    def __init__(
        self, partition: int, log: CoordinatorLog, clock: Clock, on_stop: Callable[[Any], None]
    ) -> None:
        super().__init__(WORDS_TOPIC, partition, log, clock, on_stop)
        self.words: list[str] = []

    def say(self, word: str) -> None:
        self._note_appended(self.log.append([(word.encode(), b"")]))
        self.words.append(word)

    def _replay_record(self, entry: ReplayedRecord, now_ms: int) -> bool:
        assert entry.key is not None
        self.words.append(entry.key.decode())
        return True

    def _loaded(self, now_ms: int) -> Iterable[str]:
        return ()

    def _next_deadline_ms(self, key: str) -> int | None:
        return None

    def _tick(self, key: str, now_ms: int) -> None:
        pass

    def _die(self, code: ErrorCode) -> None:
        pass


class WordsCoordinator(Coordinator[WordsShard]):
    """Words, each in the partition that it hashes to."""

    def __init__(self, logs: LogAccess, clock: Clock) -> None:
        super().__init__(
            Shards(
                WORDS_TOPIC,
                logs,
                clock,
                lambda partition, log, on_stop: WordsShard(partition, log, clock, on_stop),
            )
        )
        self.expired = asyncio.Event()
        self.deleted: list[str] = []
        self.closed = False

    async def say(self, word: str) -> None:
        shard = await self._shards.of(word)
        await shard.call(None, lambda _: shard.say(word))

    def words(self) -> set[str]:
        return {word for shard in self._shards.loaded() for word in shard.words}

    async def expire(self) -> None:
        self.expired.set()

    async def on_topics_deleted(self, topics: Collection[str]) -> None:
        self.deleted += topics

    async def close(self) -> None:
        await super().close()
        self.closed = True


WORDS = CoordinatorRow(
    name="words",
    topic=WORDS_TOPIC,
    key_type=WORDS_KEY_TYPE,
    resource=GROUP,
    partitions=lambda settings: TWO,
    make=lambda broker, logs: WordsCoordinator(logs, broker.clock),
    expire_interval_ms=5,
    compress_above_bytes=100,
    metrics=(gauge("tidemill_words", "Words.", lambda coordinator: len(coordinator.words())),),
)


@pytest.fixture
def with_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row stands in the list, as somebody who adds a coordinator writes it."""
    monkeypatch.setattr(bundle, "COORDINATORS", (*bundle.COORDINATORS, WORDS))
    for module in (image, bundle, metadata):
        monkeypatch.setattr(module, "INTERNAL_TOPICS", image.INTERNAL_TOPICS | {WORDS_TOPIC})


async def start(directory: Path) -> Node:
    node = Node(Settings(data_dir=directory, listen=Address("127.0.0.1", 0), http=None))
    await node.start()
    return node


def words_of(node: Node) -> WordsCoordinator:
    return node.broker.coordinators.of(WORDS)


async def find(ask: Ask, broker: Broker, key: str) -> Any:
    answer = await ask(broker, "FindCoordinator", 4, key_type=WORDS_KEY_TYPE, coordinator_keys=[key])
    return answer.coordinators[0]


async def test_a_row_is_all_that_a_coordinator_needs(tmp_path: Path, ask: Ask, with_words: None) -> None:
    node = await start(tmp_path)
    assert WORDS_TOPIC not in node.broker.image.topics
    found = await find(ask, node.broker, "hello")
    assert (found.error_code, found.node_id) == (ErrorCode.none, node.broker.node_id)
    topic = node.broker.image.topics[WORDS_TOPIC]
    assert (len(topic.partitions), topic.internal, topic.configs["cleanup.policy"]) == (TWO, True, "compact")
    words = words_of(node)
    for word in ("hello", "world", "again"):
        await words.say(word)
    async with asyncio.timeout(120):
        await words.expired.wait()
    await node.broker.coordinators.on_topics_deleted(["t"])
    assert words.deleted == ["t"]
    await node.stop()
    assert words.closed

    again = await start(tmp_path)
    assert words_of(again).words() == {"hello", "world", "again"}, "loaded before anybody asks"
    assert again.broker.coordinators.shard_counts()["words"] == ShardCounts(TWO, 0, 0)
    page = parse_metrics("".join([part async for part in again.metrics_page()]))
    assert page["tidemill_words"].value() == 3
    assert page["tidemill_coordinator_shards"].value(coordinator="words", state="serving") == TWO
    await again.stop()


async def test_a_coordinator_is_made_at_its_first_use_and_its_code_is_loaded_in_a_thread(
    broker: Broker, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    loaded: list[tuple[str, ...]] = []

    def make(broker: Broker, logs: LogAccess) -> WordsCoordinator:
        made.append(threading.current_thread().name)
        assert loaded == [("json.tool",)]
        return WordsCoordinator(logs, broker.clock)

    async def load_in_thread(modules: Iterable[str]) -> None:
        loaded.append(tuple(modules))
        await loading.load_in_thread(modules)

    monkeypatch.setattr(registry, "load_in_thread", load_in_thread)
    coordinators = broker.coordinators
    coordinators.add(_changed(make=make, modules=("json.tool",)))
    await coordinators.start()
    await coordinators.on_topics_deleted(["t"])
    await coordinators.forget_missing_topics()
    for chore in coordinators.chores():
        await chore.action()
    assert coordinators.shard_counts()["words"] == ShardCounts(0, 0, 0)
    assert (coordinators.damaged(), made) == ({}, []), "nobody has asked for it"

    assert (await find(ask, broker, "hello")).error_code == ErrorCode.none
    await find(ask, broker, "world")
    assert made == [threading.main_thread().name]
    assert "json.tool" in sys.modules
    page = parse_metrics("".join([part async for part in render(broker.metrics)]))
    assert page["tidemill_words"].value() == 0


async def test_requests_that_wait_for_the_code_go_on_in_the_order_in_which_they_came(
    monkeypatch: pytest.MonkeyPatch, broker: Broker
) -> None:
    is_loaded, order, loads = asyncio.Event(), list[int](), 0

    async def load_in_thread(modules: Iterable[str]) -> None:
        nonlocal loads
        loads += 1
        if loads == 1:
            await is_loaded.wait()

    async def use(number: int) -> None:
        await broker.coordinators.load(TRANSACTIONS)
        order.append(number)

    monkeypatch.setattr(registry, "load_in_thread", load_in_thread)
    using = [asyncio.create_task(use(number)) for number in range(3)]
    for _ in range(5):
        await asyncio.sleep(0)
    is_loaded.set()
    await asyncio.gather(*using)
    assert (order, loads) == ([0, 1, 2], 1)


async def test_metadata_that_is_asked_for_the_topic_of_a_row_creates_it(
    tmp_path: Path, ask: Ask, with_words: None
) -> None:
    node = await start(tmp_path)
    answer = await ask(node.broker, "Metadata", 12, topics=[{"name": WORDS_TOPIC, "topic_id": None}])
    assert (answer.topics[0].error_code, len(answer.topics[0].partitions)) == (ErrorCode.none, TWO)
    await node.stop()


async def test_a_key_type_of_no_row_is_refused_with_those_that_there_are(broker: Broker, ask: Ask) -> None:
    found = await find(ask, broker, "hello")
    assert found.error_code == ErrorCode.invalid_request
    assert "0 is for groups, 2 is for share states, 1 is for transactions" in found.error_message


async def test_two_rows_cannot_have_one_topic_or_one_key_type(broker: Broker) -> None:
    add = broker.coordinators.add
    with pytest.raises(ValueError, match="words: another coordinator has this topic or key type"):
        add(_changed(topic=GROUPS.topic))
    with pytest.raises(ValueError, match="another coordinator"):
        add(_changed(key_type=TRANSACTIONS.key_type))


async def test_coordinators_close_in_the_reverse_order_of_their_rows(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transactions write markers through groups until they are closed."""
    closed: list[str] = []

    async def close(name: str) -> None:
        closed.append(name)

    for row in broker.coordinators.rows:
        monkeypatch.setattr(broker.coordinators.of(row), "close", partial(close, row.name))
    await broker.coordinators.close()
    assert closed == [row.name for row in reversed(broker.coordinators.rows)]
    assert closed.index("transactions") < closed.index("groups")


# --- the internal topic


@pytest.mark.parametrize("row", [GROUPS, TRANSACTIONS], ids=lambda row: row.name)
async def test_the_number_of_partitions_is_that_of_the_image_once_the_topic_exists(
    make_broker: MakeBroker, row: CoordinatorRow[Any]
) -> None:
    broker = await make_broker()
    before = {key: broker.coordinators.of(row).partition_of(key) for key in map(str, range(50))}
    assert set(before.values()) == {0, 1}, "the node would create it with two"
    await broker.catalogue.ensure_internal_topic(row.topic, 7, {})
    after = {broker.coordinators.of(row).partition_of(key) for key in map(str, range(50))}
    assert after == set(range(7)), "somebody has created it with seven"
    assert broker.coordinators.partition_of(row, "k") == (
        row.topic,
        broker.coordinators.of(row).partition_of("k"),
    )


async def test_a_topic_that_another_node_creates_meanwhile_is_as_good(broker: Broker) -> None:
    theirs = CreateTopic(name=GROUPS.topic, topic_id=uuid4(), partitions=5, replication=1)
    ours = [broker.coordinators.ensure_topic(GROUPS) for _ in range(3)]
    await asyncio.gather(broker.controller.submit(theirs), *ours)
    assert len(broker.image.topics[GROUPS.topic].partitions) == 5
    assert await broker.coordinators.prepare(GROUPS) == ErrorCode.none


# --- leadership


async def test_a_shard_is_not_served_while_another_node_leads_and_loaded_when_this_one_does_again(
    broker: Broker, ask: Ask
) -> None:
    broker.coordinators.add(WORDS)
    words = broker.coordinators.of(WORDS)
    await broker.coordinators.ensure_topic(WORDS)
    await broker.coordinators.start()
    await words.say("hello")
    index = words.partition_of("hello")
    await elect(broker.controller, WORDS_TOPIC, index, leader=2)
    assert words.words() == set()
    with pytest.raises(ApiError) as caught:
        await words.say("hello")
    assert caught.value.code == ErrorCode.not_coordinator
    await elect(broker.controller, WORDS_TOPIC, index, leader=broker.node_id)
    async with asyncio.timeout(120):
        while broker.coordinators.shard_counts()["words"].serving < TWO:  # noqa: ASYNC110 - the state itself
            await asyncio.sleep(0)
    assert words.words() == {"hello"}, "nobody had to ask"


def _changed(**changes: Any) -> CoordinatorRow[Any]:
    fields = {name: getattr(WORDS, name) for name in WORDS.__dataclass_fields__}
    return CoordinatorRow(**(fields | changes))
