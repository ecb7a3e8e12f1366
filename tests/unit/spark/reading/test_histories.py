"""Leader epochs in the positions of a stream: a log that was cut and has grown again is noticed.

The reader is the one that Spark's driver has, without Spark; the node is a real one.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

import tidemill
from support.leadership import elect
from tidemill.client.admin.topics import create_topic, delete_records, delete_topic, list_offsets
from tidemill.client.cursors.admin import describe_cursor
from tidemill.client.producing.producer import Producer
from tidemill.embedded.node import EmbeddedNode
from tidemill.records.record import Record
from tidemill.replication.partition import Partition
from tidemill.replication.rules.following import FollowerStep
from tidemill.spark.errors import DataLost
from tidemill.spark.reading import histories
from tidemill.spark.reading.source import open_source
from tidemill.spark.reading.stream_reader import TidemillStreamReader

TOPIC = "orders"
EVERYTHING = ReadAllAvailable()


class World:
    """A node, and a topic with one partition."""

    def __init__(self, db: EmbeddedNode) -> None:
        self.db = db
        self.cluster = db._awaited.cluster
        self.create()

    def create(self) -> None:
        self.db.run(create_topic(self.cluster, TOPIC, partitions=1))

    def send(self, *values: str) -> None:
        """Write records, each in a batch of its own."""

        async def send(value: str) -> None:
            async with Producer(self.cluster) as producer:
                await producer.send(TOPIC, Record(None, value.encode(), 1_000), 0)

        for value in values:
            self.db.run(send(value))

    # --- what happens to the node

    def on_node(self, work: Callable[[], Awaitable[Any]]) -> Any:
        async def call() -> Any:
            return await work()

        assert self.db._loop is not None
        return asyncio.run_coroutine_threadsafe(call(), self.db._loop).result(120)

    @property
    def partition(self) -> Partition:
        broker = self.db._node.broker
        found = broker.find.held(broker.image.topics[TOPIC], 0)
        assert found is not None
        return found

    def lead_again(self) -> int:
        """Another node leads for a while, and writes nothing; gives the epoch of this node's next time."""
        controller = self.db._node.broker.controller
        self.on_node(lambda: elect(controller, TOPIC, 0, 2))
        epoch: int = self.on_node(lambda: elect(controller, TOPIC, 0, 1))
        self.cluster.forget()
        return epoch

    def cut(self, end_offset: int) -> None:
        """Another node was elected with fewer records, and this one has cut its log; then it leads again."""
        controller, partition = self.db._node.broker.controller, self.partition

        async def cut() -> None:
            await elect(controller, TOPIC, 0, 2)
            job = partition.as_follower.begin_cut(FollowerStep(cut_at=end_offset), partition.leader_epoch, 0)
            assert job is not None
            job.run()
            partition.as_follower.finish_cut(job)
            await elect(controller, TOPIC, 0, 1)

        self.on_node(cut)
        self.cluster.forget()
        assert partition.log_end_offset == end_offset

    # --- a query

    def reader(self, **options: str) -> TidemillStreamReader:
        """A reader as of a driver that was just started."""
        start = {} if "cursor" in options else {"startingOffsets": "earliest"}
        servers = {"bootstrap.servers": self.db.bootstrap_servers, "topic": TOPIC}
        source = open_source({**servers, **start, **options})
        return TidemillStreamReader(source, source.spark_schema)

    def batch(
        self, reader: TidemillStreamReader, start: dict[str, Any], limit: Any = EVERYTHING
    ) -> tuple[dict[str, Any], list[str]]:
        """The end of the next batch, and its values; the position goes through a checkpoint."""
        end = json.loads(json.dumps(reader.latestOffset(start, limit)))
        return end, self.values(reader, start, end)

    @staticmethod
    def values(reader: TidemillStreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[str]:
        return [
            value.decode()
            for task in reader.partitions(start, end)
            for batch in reader.read(task)
            for value in batch.column("value").to_pylist()
        ]


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedNode]:
    with tidemill.open() as db:
        assert isinstance(db, EmbeddedNode)
        yield db


@pytest.fixture
def world(node: EmbeddedNode) -> Iterator[World]:
    world = World(node)
    yield world
    world.db.run(delete_topic(world.cluster, TOPIC))


def epoch_of(position: dict[str, Any]) -> int:
    return int(position["epochs"][TOPIC]["0"])


def test_a_position_has_the_leader_epoch_of_the_last_record_that_was_read(world: World) -> None:
    reader = world.reader()
    world.send("a", "b")
    first = world.partition.leader_epoch
    one, _ = world.batch(reader, reader.initialOffset())
    assert (one["at"][TOPIC]["0"], epoch_of(one)) == (2, first)
    world.send("c")
    second = world.lead_again()
    world.send("d")
    two, values = world.batch(reader, one, ReadMaxRows(1))
    assert (values, epoch_of(two)) == (["c"], first), "not that of the present leader"
    three, values = world.batch(reader, two)
    assert (values, epoch_of(three)) == (["d"], second)
    assert reader.latestOffset(three, EVERYTHING) == three
    world.lead_again()
    world.lead_again()
    assert world.batch(world.reader(), three)[1] == [], "epochs without records part nothing"
    world.send("e")
    assert world.batch(world.reader(), three)[1] == ["e"]


def test_a_log_that_was_cut_and_has_grown_again_is_an_error(world: World) -> None:
    reader = world.reader()
    world.send("a", "b", "c")
    start, _ = world.batch(reader, reader.initialOffset())
    world.cut(1)
    world.send("B", "C", "D")
    for planning in (reader, world.reader()):
        with pytest.raises(DataLost, match=r"orders-0 was cut at offset 1, and the query has read up to 3"):
            planning.latestOffset(start, EVERYTHING)


def test_a_query_may_go_on_with_what_is_there_where_the_logs_part(world: World) -> None:
    reader = world.reader(failOnDataLoss="false")
    world.send("a", "b", "c")
    start, _ = world.batch(reader, reader.initialOffset())
    world.cut(1)
    world.send("B", "C", "D")
    half, values = world.batch(reader, start, ReadMaxRows(2))
    assert values == ["B", "C"]
    assert world.values(world.reader(failOnDataLoss="false"), start, half) == values, "and again"
    end, values = world.batch(reader, half)
    assert (values, epoch_of(end)) == (["D"], world.partition.leader_epoch)


def test_a_batch_that_is_run_again_finds_the_records_that_it_was_planned_with(world: World) -> None:
    reader = world.reader()
    world.send("a", "b", "c")
    start = reader.initialOffset()
    end = reader.latestOffset(start, EVERYTHING)
    assert world.values(world.reader(), start, end) == ["a", "b", "c"]
    world.cut(2)
    world.send("C")
    with pytest.raises(DataLost, match="was cut at offset 2"):
        world.reader().partitions(start, end)
    assert world.values(world.reader(failOnDataLoss="false"), start, end) == ["a", "b", "C"]


def test_a_checkpoint_of_an_older_version_goes_on_and_gets_epochs(world: World) -> None:
    reader = world.reader()
    world.send("a")
    start, _ = world.batch(reader, reader.initialOffset())
    del start["epochs"]
    assert reader.latestOffset(start, EVERYTHING) == start, "nothing is new"
    world.send("b")
    end, values = world.batch(reader, start)
    assert (values, epoch_of(end)) == (["b"], world.partition.leader_epoch)


def test_what_was_deleted_has_no_epoch(world: World) -> None:
    world.send("a", "b")
    world.db.run(delete_records(world.cluster, {(TOPIC, 0): 2}))
    reader = world.reader()
    start, values = world.batch(reader, reader.initialOffset())
    assert (values, start["at"], "epochs" in start) == ([], {TOPIC: {"0": 2}}, False)
    world.send("c")
    assert world.batch(reader, start)[1] == ["c"]


def test_a_topic_that_was_made_anew_is_read_from_its_beginning_if_that_is_allowed(world: World) -> None:
    reader = world.reader(failOnDataLoss="false")
    world.send("a", "b", "c")
    start, _ = world.batch(reader, reader.initialOffset())
    world.db.run(delete_topic(world.cluster, TOPIC))
    world.create()
    world.send("A", "B")
    with pytest.raises(DataLost, match="made anew"):
        world.reader().latestOffset(start, EVERYTHING)
    assert world.batch(reader, start)[1] == ["A", "B"]


def test_a_cursor_gives_its_epoch_to_a_query_and_gets_one_back(world: World) -> None:
    world.send("a", "b")
    with world.db.cursor("mine", TOPIC) as cursor:
        assert len(cursor.poll_batch(1)) == 1
        cursor.commit()
    reader = world.reader(cursor="mine")
    end, values = world.batch(reader, reader.initialOffset())
    assert values == ["b"]
    reader.commit(end)
    stored = world.db.run(describe_cursor(world.cluster, "mine")).positions[0]
    assert (stored.offset, stored.leader_epoch) == (2, world.partition.leader_epoch)

    world.cut(1)
    world.send("B", "C")
    another = world.reader(cursor="mine")
    with pytest.raises(DataLost, match="was cut at offset 1"):
        another.latestOffset(another.initialOffset(), EVERYTHING)


def test_an_epoch_that_no_leader_knows_is_waited_for_and_then_an_error(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that was replaced may answer for a while; and a cluster may be restored from an old image."""
    monkeypatch.setattr(histories, "_DEPOSED_MS", 100)
    reader = world.reader()
    world.send("a")
    start, _ = world.batch(reader, reader.initialOffset())
    start["epochs"][TOPIC]["0"] = 99
    asked = []

    async def counted(*args: Any, **more: Any) -> Any:
        asked.append(args)
        return await list_offsets(*args, **more)

    monkeypatch.setattr(histories, "list_offsets", counted)
    world.send("b")
    with pytest.raises(DataLost, match="was cut at offset 0"):
        reader.latestOffset(start, EVERYTHING)
    assert len(asked) > 1
