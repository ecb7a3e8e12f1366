"""Batch and stream writes from real Spark: tables, typed logs and topics, with every option, once each."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from pyspark.errors import PySparkException

import tidemill
from support.etcd import NO_ETCD, has_etcd
from support.processes import NodeProcess, wait_until
from support.real_cluster import RealCluster
from support.spark import EVERY_TYPE, EVERY_VALUE, read, run_available, stream
from support.table_nodes import SOON, new_name
from tidemill.client.admin.topics import create_topic
from tidemill.client.sync_client import Tidemill
from tidemill.spark import each_batch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = "id bigint, name string, price double"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    settings = {**SOON, "auto_create_topics": False}
    with NodeProcess(tmp_path_factory.mktemp("node") / "data", **settings) as running:
        yield running


@pytest.fixture(scope="module")
def client(node: NodeProcess) -> Iterator[Tidemill]:
    with tidemill.connect(node.bootstrap_servers) as connected:
        yield connected


@pytest.fixture
def save(node: NodeProcess) -> Any:
    def saving(frame: DataFrame, name: str | None = None, *, mode: str = "append", **options: object) -> None:
        writer = frame.write.format("tidemill").option("servers", node.bootstrap_servers).mode(mode)
        for key, value in options.items():
            writer = writer.option(key, str(value))
        writer.save(name)

    return saving


@pytest.fixture
def sink(node: NodeProcess) -> Any:
    def writing(frame: DataFrame, mode: str = "append", **options: object) -> Any:
        writer = frame.writeStream.format("tidemill").option("servers", node.bootstrap_servers)
        for key, value in options.items():
            writer = writer.option(key, str(value))
        return writer.outputMode(mode)

    return writing


@pytest.fixture
def new_topic(node: NodeProcess, topic: str) -> Any:
    """A topic of the test's own; called with its number of partitions."""

    def make(partitions: int, suffix: str = "") -> str:
        import asyncio

        from tidemill.client.cluster import Cluster

        async def create() -> None:
            async with Cluster(node.bootstrap_servers) as cluster:
                await create_topic(cluster, topic + suffix, partitions=partitions)

        asyncio.run(create())
        return topic + suffix

    return make


def orders(spark: SparkSession, start: int, end: int, parts: int = 2) -> DataFrame:
    return spark.range(start, end, 1, parts).selectExpr(
        "id", "concat('n', id % 10) AS name", "id / 2 AS price"
    )


def ids(client: Tidemill, name: str) -> list[int]:
    return sorted(client.table(name).scan(columns=["id"]).to_arrow()["id"].to_pylist())


def logged(client: Tidemill, name: str, column: str = "id") -> list[Any]:
    """The values in a table without a key, with repeats."""
    table = client.table(name)
    places = {(name, bucket): 0 for bucket in range(table.buckets)}
    changes = (change for batch in table.follow(from_offsets=places, until_now=True) for change in batch)
    return sorted(change.row[column] for change in changes)


def consumed(node: NodeProcess, topic: str, partitions: int) -> list[Any]:
    """All committed records, as a Kafka client sees them."""
    consumer = Consumer(
        {
            "bootstrap.servers": node.bootstrap_servers,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, n, OFFSET_BEGINNING) for n in range(partitions)])
    found, ends = [], 0
    try:
        while ends < partitions:
            message = consumer.poll(30)
            assert message is not None, "no record and no end within 30 s"
            if message.error() is None:
                found.append(message)
            else:
                assert message.error().name() == "_PARTITION_EOF", message.error()
                ends += 1
    finally:
        consumer.close()
    return found


def message_of(error: pytest.ExceptionInfo[PySparkException]) -> str:
    """What stands at the end of Spark's words, where people look."""
    return str(error.value)[-900:]


# --- batch writes to tables


def test_rows_are_written_with_all_their_types(spark: SparkSession, client: Tidemill, save: Any) -> None:
    name = new_name("types")
    table = client.create_table(name, EVERY_TYPE, primary_key="id")
    nothing = dict.fromkeys(EVERY_VALUE) | {"id": 2}
    save(spark.createDataFrame([EVERY_VALUE, nothing], EVERY_TYPE), name)
    found = {each["id"]: each for each in table.scan().to_arrow().to_pylist()}
    assert found == {1: EVERY_VALUE | {"m": [("k", 5)]}, 2: nothing}


def test_upserts_replace_and_the_operation_column_deletes(
    spark: SparkSession, client: Tidemill, save: Any
) -> None:
    name = new_name("orders")
    table = client.create_table(name, COLUMNS, primary_key="id", buckets=3)
    save(orders(spark, 0, 30_000), table=name, compression="zstd")
    save(orders(spark, 100, 200).selectExpr("id", "'new' AS name", "price"), table=name)
    save(orders(spark, 0, 100, 1).selectExpr("id", "'Delete' AS op"), name, operationColumn="op")
    assert ids(client, name) == list(range(100, 30_000))
    assert (table.lookup(150) or {})["name"] == "new"
    both = spark.createDataFrame(
        [(500, "upsert"), (500, "delete"), (501, "delete"), (501, "upsert")], "id bigint, _tidemill_op string"
    )
    save(both.coalesce(1), name)
    assert table.lookup(500) is None
    assert table.lookup(501) == {"id": 501, "name": None, "price": None}


def test_a_log_is_appended_to(spark: SparkSession, client: Tidemill, save: Any) -> None:
    name = new_name("log")
    client.create_table(name, COLUMNS, buckets=2)
    for _ in range(2):
        save(orders(spark, 0, 3_000), name, compression="lz4")
    assert Counter(logged(client, name)) == dict.fromkeys(range(3_000), 2)


def test_a_missing_table_is_created_if_that_is_wanted(
    spark: SparkSession, client: Tidemill, save: Any
) -> None:
    name = new_name("created")
    save(orders(spark, 0, 10), name, createTable=True, primaryKey="id", buckets=2)
    table = client.table(name)
    assert (table.primary_key, table.buckets) == (("id",), 2)
    assert ids(client, name) == list(range(10))


def test_a_version_of_an_application_is_written_once(
    spark: SparkSession, client: Tidemill, save: Any
) -> None:
    name = new_name("versions")
    client.create_table(name, COLUMNS, buckets=2)
    for version in (1, 1, 2, 1, 2):
        save(orders(spark, 0, 1_000), name, txnAppId="nightly", txnVersion=version)
    assert Counter(logged(client, name)) == dict.fromkeys(range(1_000), 2)


def test_an_empty_frame_is_written_too(spark: SparkSession, client: Tidemill, save: Any) -> None:
    name = new_name("empty")
    client.create_table(name, COLUMNS, primary_key="id")
    save(orders(spark, 0, 10).where("id < 0"), name)
    save(orders(spark, 0, 10).where("id < 0"), name, txnAppId="empty", txnVersion=0)
    assert ids(client, name) == []


# --- what is refused


def test_a_frame_that_does_not_fit_is_refused_on_the_driver(
    spark: SparkSession, client: Tidemill, save: Any
) -> None:
    name = new_name("strict")
    client.create_table(name, "id bigint, n int, must string not null", primary_key="id")
    with pytest.raises(PySparkException) as caught:
        save(orders(spark, 0, 10).selectExpr("id", "'x' AS n", "name AS other"), name)
    message = message_of(caught)
    for problem in (
        f"does not fit table {name!r}",
        "column 'n' is string, and the table has int",
        "column 'other' is not in the table",
        "column 'must' is missing, and it is not nullable",
        '.selectExpr("id", "CAST(n AS int) AS n", "... AS must")',
    ):
        assert problem in message


def test_missing_targets_and_overwriting_are_refused_on_the_driver(
    spark: SparkSession, client: Tidemill, save: Any
) -> None:
    frame = orders(spark, 0, 10)
    with pytest.raises(PySparkException) as caught:
        save(frame, table="nix.da")
    assert "there is no table 'nix.da'" in message_of(caught)
    assert 'tidemill table create nix.da --columns "id bigint' in message_of(caught)
    with pytest.raises(PySparkException) as caught:
        save(frame.selectExpr("name AS value"), topic="nix")
    assert "there is no topic 'nix'; create it with: tidemill topic create nix" in message_of(caught)
    name = new_name("kept")
    client.create_table(name, COLUMNS, primary_key="id")
    with pytest.raises(PySparkException) as caught:
        save(frame, name, mode="overwrite")
    assert 'use mode("append")' in message_of(caught)


def test_a_row_that_fails_leaves_nothing_of_the_write(
    spark: SparkSession, client: Tidemill, save: Any
) -> None:
    name = new_name("failing")
    client.create_table(name, COLUMNS, primary_key="id")
    frame = orders(spark, 0, 40_000).selectExpr("*", "if(id = 39999, 'merge', 'upsert') AS _tidemill_op")
    with pytest.raises(PySparkException) as caught:
        save(frame, name)
    assert "an operation is 'merge'" in message_of(caught)
    save(orders(spark, 0, 5), name)
    assert ids(client, name) == list(range(5))


# --- topics


def test_records_are_written_as_kafkas_sink_writes_them(
    spark: SparkSession, node: NodeProcess, save: Any, new_topic: Any
) -> None:
    topic = new_topic(3)
    at = datetime(2026, 2, 28, 12, 30, tzinfo=UTC)
    frame = spark.createDataFrame(
        [
            ("a", b"1", [("h", b"x"), ("h", None)], 2, at),
            (None, b"2", [], 1, at),
            ("c", None, None, 0, None),
        ],
        "key string, value binary, headers array<struct<key:string,value:binary>>, partition int, "
        "timestamp timestamp",
    )
    save(frame, topic)
    found = {record.partition(): record for record in consumed(node, topic, 3)}
    assert {n: (record.key(), record.value()) for n, record in found.items()} == {
        2: (b"a", b"1"),
        1: (None, b"2"),
        0: (b"c", None),
    }
    assert found[2].headers() == [("h", b"x"), ("h", None)]
    assert found[1].headers() is None
    assert found[2].timestamp()[1] == int(at.timestamp() * 1000)
    assert found[0].timestamp()[1] > found[2].timestamp()[1]


def test_keys_choose_partitions_as_in_java_and_a_column_chooses_topics(
    spark: SparkSession, node: NodeProcess, save: Any, new_topic: Any
) -> None:
    from tidemill.records.partitioner import partition_for_key

    first, second = new_topic(4, "-even"), new_topic(4, "-odd")
    frame = spark.range(0, 2_000, 1, 2).selectExpr(
        "concat('k', id) AS key",
        "cast(id AS string) AS value",
        f"if(id % 2 = 0, '{first}', '{second}') AS topic",
    )
    save(frame)
    for topic, rest in ((first, 0), (second, 1)):
        found = consumed(node, topic, 4)
        assert sorted(int(record.value()) for record in found) == list(range(rest, 2_000, 2))
        assert all(partition_for_key(record.key(), 4) == record.partition() for record in found)


def test_records_without_keys_are_spread_over_the_partitions(
    spark: SparkSession, node: NodeProcess, save: Any, new_topic: Any
) -> None:
    topic = new_topic(2)
    save(spark.range(0, 200_000, 1, 1).selectExpr("repeat(cast(id AS string), 20) AS value"), topic=topic)
    found = Counter(record.partition() for record in consumed(node, topic, 2))
    assert found.total() == 200_000
    assert set(found) == {0, 1}


# --- streams


def test_a_stream_is_written_once_also_if_a_batch_runs_again(
    spark: SparkSession, client: Tidemill, sink: Any, tmp_path: Path
) -> None:
    source, name = tmp_path / "in", new_name("once")
    client.create_table(name, COLUMNS, buckets=2)
    schema = orders(spark, 0, 1).schema

    def run() -> None:
        frame = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(source))
        run_available(sink(frame, table=name, transactionTimeout="1 minute"), tmp_path / "checkpoint")

    orders(spark, 0, 2_000, 3).write.parquet(str(source))
    run()
    assert logged(client, name) == list(range(2_000))
    # As after a driver that died between its commit and Spark's note of it: the last batch runs again.
    commits = sorted((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda path: int(path.name))
    commits[-1].unlink()
    commits[-1].with_name(f".{commits[-1].name}.crc").unlink(missing_ok=True)
    orders(spark, 2_000, 3_000, 1).write.mode("append").parquet(str(source))
    run()
    assert logged(client, name) == list(range(3_000))


def test_the_changes_of_a_table_can_be_written_to_another(
    spark: SparkSession, client: Tidemill, node: NodeProcess, sink: Any, tmp_path: Path
) -> None:
    first, second = new_name("origin"), new_name("copy")
    origin = client.create_table(first, COLUMNS, primary_key="id", buckets=2)
    client.create_table(second, COLUMNS, primary_key="id", buckets=3)
    origin.upsert([{"id": n, "name": "a", "price": 1.0} for n in range(100)])

    def run() -> None:
        changes = stream(spark, node.bootstrap_servers, first, changes=True)
        run_available(sink(changes, table=second), tmp_path / "checkpoint")

    run()
    assert ids(client, second) == list(range(100))
    origin.delete([{"id": n} for n in range(50)])
    origin.upsert([{"id": 60, "name": "b", "price": 2.0}])
    run()
    assert ids(client, second) == list(range(50, 100))
    assert (client.table(second).lookup(60) or {})["name"] == "b"


def test_aggregates_are_upserted_in_complete_mode(
    spark: SparkSession, client: Tidemill, sink: Any, tmp_path: Path
) -> None:
    source, name = tmp_path / "in", new_name("totals")
    client.create_table(name, "name string, count bigint", primary_key="name")
    orders(spark, 0, 1_000).write.parquet(str(source))
    frame = spark.readStream.schema(orders(spark, 0, 1).schema).parquet(str(source))
    run_available(sink(frame.groupBy("name").count(), "complete", table=name), tmp_path / "checkpoint")
    found = {row["name"]: row["count"] for row in client.table(name).scan().to_arrow().to_pylist()}
    assert found == {f"n{n}": 100 for n in range(10)}


def test_each_batch_writes_updates_once(
    spark: SparkSession, client: Tidemill, node: NodeProcess, tmp_path: Path
) -> None:
    source, name = tmp_path / "in", new_name("each")
    client.create_table(name, "name string, count bigint")
    orders(spark, 0, 500).write.parquet(str(source))
    write = each_batch(name, servers=node.bootstrap_servers, compression="zstd")

    def twice(frame: DataFrame, batch: int) -> None:
        # As if the batch were run again after it was written.
        write(frame, batch)
        write(frame, batch)

    frame = spark.readStream.schema(orders(spark, 0, 1).schema).parquet(str(source))
    counts = frame.groupBy("name").count().writeStream.outputMode("update")
    run_available(counts.foreachBatch(twice), tmp_path / "checkpoint")
    assert logged(client, name, "name") == sorted(f"n{n}" for n in range(10))


def test_a_stream_that_does_not_fit_stops_with_what_to_do(
    spark: SparkSession, client: Tidemill, sink: Any, tmp_path: Path
) -> None:
    source, name = tmp_path / "in", new_name("unfit")
    client.create_table(name, "id bigint", primary_key="id")
    orders(spark, 0, 10).write.parquet(str(source))
    frame = spark.readStream.schema(orders(spark, 0, 1).schema).parquet(str(source))
    with pytest.raises(PySparkException) as caught:
        run_available(sink(frame, table=name), tmp_path / "checkpoint")
    assert "column 'name' is not in the table (id are)" in str(caught.value)


@pytest.mark.skipif(not has_etcd(), reason=NO_ETCD)
def test_a_stream_and_a_batch_go_on_over_the_death_of_a_node_exactly_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    with RealCluster(tmp_path / "cluster") as cluster, tidemill.connect(cluster.bootstrap_servers) as client:
        try:
            check_fail_over(spark, cluster, client, tmp_path / "checkpoint")
        finally:
            print(cluster.logs())  # noqa: T201 - pytest shows it if the test fails


def check_fail_over(spark: SparkSession, cluster: RealCluster, client: Tidemill, checkpoint: Path) -> None:
    """Copy a topic with a stream, and write a table with a batch, while the leaders of both are killed."""
    for topic in ("numbers", "copy"):
        cluster.create_topic(topic, partitions=2)
    client.create_database("test", if_not_exists=True)
    name = new_name("batch")
    client.create_table(name, COLUMNS, buckets=2)  # without a key, so that a repeat shows
    cluster.produce("numbers", *map(str, range(400)))
    servers = cluster.bootstrap_servers
    source = stream(spark, servers, topic="numbers", startingOffsets="earliest", maxRowsPerTrigger=100)
    copying = source.select("value").writeStream.format("tidemill").option("servers", servers)
    query = copying.option("topic", "copy").option("checkpointLocation", str(checkpoint)).start()
    try:
        wait_until(lambda: query.lastProgress, "a batch is written", 120)
        dead = cluster.leader("copy")
        dead.kill()
        cluster.produce("numbers", *map(str, range(400, 600)), partition=1)
        query.processAllAvailable()
        assert query.exception() is None
    finally:
        query.stop()
    copied = read(spark, servers, topic="copy").collect()
    assert sorted(int(each.value) for each in copied) == [*range(600)]
    dead.start()
    for topic in ("copy", "__transaction_state"):
        cluster.wait_in_sync(topic, 3)

    victim = cluster.leader(client.table(name).definition.partitions[0].topic)
    killing = threading.Timer(0.5, victim.kill)
    killing.start()
    writer = orders(spark, 0, 20_000, 6).write.format("tidemill").option("servers", servers)
    writer.option("table", name).mode("append").save()
    killing.join()
    assert logged(client, name) == [*range(20_000)]
