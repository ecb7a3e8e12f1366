"""Batch reads from real Spark: tables, changes, typed logs and plain topics, with every option."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import tidemill
from support.processes import NodeProcess
from support.spark import EVERY_TYPE, EVERY_VALUE, read
from support.table_nodes import SOON, new_name
from tidemill.client.sync_client import Tidemill

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    with NodeProcess(tmp_path_factory.mktemp("node") / "data", **SOON) as running:
        yield running


@pytest.fixture(scope="module")
def client(node: NodeProcess) -> Iterator[Tidemill]:
    with tidemill.connect(node.bootstrap_servers) as connected:
        yield connected


@pytest.fixture
def load(spark: SparkSession, node: NodeProcess) -> Any:
    def reading(name: str | None = None, **options: object) -> DataFrame:
        return read(spark, node.bootstrap_servers, name, **options)

    return reading


def orders(client: Tidemill, rows: int = 2_000, buckets: int = 3) -> str:
    name = new_name("orders")
    table = client.create_table(
        name, "id bigint, name string, price double", primary_key="id", buckets=buckets
    )
    table.upsert([{"id": i, "name": f"n{i % 10}", "price": i / 2} for i in range(rows)])
    return name


def message_of(error: pytest.ExceptionInfo[Exception]) -> str:
    """The last lines of Spark's words: those that people read."""
    return str(error.value)[-700:]


def test_workers_import_the_installed_pyspark_and_not_the_archive(spark: SparkSession) -> None:
    def where(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyspark

        for _ in batches:
            yield pa.record_batch({"at": [pyspark.__file__]})

    ((found,),) = spark.range(0, 1, 1, 1).mapInArrow(where, "at string").collect()
    assert ".zip" not in found


def test_a_table_is_read_whole_with_its_types(client: Tidemill, load: Any) -> None:
    name = new_name("types")
    table = client.create_table(name, EVERY_TYPE, primary_key="id")
    nothing = dict.fromkeys(EVERY_VALUE) | {"id": 2}
    table.upsert([EVERY_VALUE, nothing])
    found = {each["id"]: each.asDict(recursive=True) for each in load(name).collect()}
    expected = EVERY_VALUE | {"bi": bytearray(b"\x00\xff"), "ts": EVERY_VALUE["ts"].replace(tzinfo=None)}
    assert found == {1: expected, 2: nothing}
    schema = load(name).schema
    assert not schema["id"].nullable
    assert schema["de"].dataType.simpleString() == "decimal(10,2)"


def test_each_bucket_is_a_task_and_more_are_made_if_they_are_wanted(client: Tidemill, load: Any) -> None:
    name = orders(client, rows=3_000, buckets=2)
    assert load(name).rdd.getNumPartitions() == 2
    wanted = load(name, minPartitions=7)
    assert wanted.rdd.getNumPartitions() >= 7
    assert sorted(row["id"] for row in wanted.collect()) == list(range(3_000))


def test_only_the_columns_that_are_named_are_read(client: Tidemill, load: Any) -> None:
    name = orders(client, rows=100)
    assert load(name, columns="price,id").columns == ["price", "id"]
    assert load(name, columns="price").count() == 100
    with pytest.raises(Exception, match="no column 'prize'"):
        load(name, columns="prize")


def sent_rows(node: NodeProcess, filters: list[Any], **options: str) -> int:
    """How many rows come from the server, before Spark leaves any out."""
    from tidemill.spark.reading.reader import TidemillReader
    from tidemill.spark.reading.source import open_source

    source = open_source({"servers": node.bootstrap_servers, **options})
    reader = TidemillReader(source, source.spark_schema)
    assert list(reader.pushFilters(filters)) == filters
    return sum(batch.num_rows for task in reader.partitions() for batch in reader.read(task))


def test_the_option_where_filters_on_the_server(client: Tidemill, load: Any, node: NodeProcess) -> None:
    name = orders(client)
    assert load(name, where="name = 'n3' and price < 100").count() == 20
    assert sent_rows(node, [], path=name, where="name = 'n3' and price < 100") == 20
    with pytest.raises(Exception, match="nothing"):
        load(name, where="nothing > 1").count()


def test_filters_of_spark_are_checked_on_the_server_on_request(
    client: Tidemill, load: Any, node: NodeProcess
) -> None:
    from pyspark.sql.datasource import EqualTo, GreaterThanOrEqual

    name = orders(client)
    found = load(name, pushFilters=True).where("id between 10 and 12").collect()
    assert sorted(row["id"] for row in found) == [10, 11, 12]
    filters = [EqualTo(("name",), "n3"), GreaterThanOrEqual(("id",), 1_000)]
    assert sent_rows(node, filters, path=name, pushFilters="true") == 100
    assert sent_rows(node, filters, path=name) == 2_000


def test_a_frame_can_be_used_again_after_it_was_filtered(client: Tidemill, load: Any) -> None:
    # Spark 4.3 keeps what a filter was planned to for every other use of the frame.
    frame = load(orders(client))
    assert frame.where("id < 5").count() == 5
    assert frame.count() == 2_000
    assert frame.where("id < 7").union(frame.where("id >= 1990")).count() == 17


def test_a_session_without_the_pushdown_setting_reads_as_well(
    client: Tidemill, load: Any, spark: SparkSession
) -> None:
    name = orders(client, rows=50)
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
    try:
        assert load(name).where("id < 5").count() == 5
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")


def test_a_frame_shows_one_moment_of_the_table(client: Tidemill, load: Any) -> None:
    name = orders(client, rows=1_000, buckets=4)
    frame = load(name)
    assert frame.count() == 1_000
    client.table(name).delete([{"id": i} for i in range(500)])
    assert frame.count() == 1_000
    assert load(name).count() == 500


def test_the_changes_of_a_table_can_be_read_between_two_points(client: Tidemill, load: Any) -> None:
    name = new_name("changes")
    table = client.create_table(name, "id bigint, name string", primary_key="id")
    table.upsert([{"id": i, "name": "a"} for i in range(5)])
    table.delete([{"id": 3}])
    rows = load(name, changes=True).orderBy("_tidemill_offset").collect()
    assert [row["_tidemill_op"] for row in rows] == ["upsert"] * 5 + ["delete"]
    assert rows[-1]["id"] == 3
    assert rows[-1]["name"] is None
    assert [row["_tidemill_offset"] for row in rows] == list(range(6))
    part = load(
        name,
        changes=True,
        startingOffsets=json.dumps({name: {"0": 2}}),
        endingOffsets=json.dumps({name: {"0": 4}}),
    )
    assert sorted(row["id"] for row in part.collect()) == [2, 3]
    assert load(name, changes=True, columns="_tidemill_op,id").columns == ["_tidemill_op", "id"]


def test_a_typed_log_is_read_with_its_columns(client: Tidemill, load: Any) -> None:
    name = new_name("log")
    table = client.create_table(name, "at bigint, text string", buckets=2)
    table.append([{"at": i, "text": f"t{i}"} for i in range(100)])
    assert sorted(row["at"] for row in load(name).collect()) == list(range(100))
    described = load(name, includeMetadata=True)
    assert {row["_tidemill_op"] for row in described.collect()} == {"insert"}
    assert {row["_tidemill_bucket"] for row in described.collect()} == {0, 1}


def test_a_topic_is_read_as_kafkas_source_shows_it(
    node: NodeProcess, load: Any, topic: str, tmp_path: Any
) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": node.bootstrap_servers})
    for index in range(10):
        producer.produce(
            topic,
            key=f"k{index}",
            value=None if index == 3 else f"v{index}",
            timestamp=1_700_000_000_000 + index,
            headers=[("h", b"x"), ("none", None)] if index == 5 else None,
        )
    assert producer.flush(120) == 0
    plain = load(topic=topic)
    assert plain.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    rows = {bytes(row["key"]).decode(): row for row in load(topic=topic, includeHeaders=True).collect()}
    assert len(rows) == 10
    assert rows["k3"]["value"] is None
    assert bytes(rows["k4"]["value"]) == b"v4"
    assert rows["k4"]["topic"] == topic
    assert rows["k4"]["timestamp"] == datetime(2023, 11, 14, 22, 13, 20, 4_000)  # noqa: DTZ001
    assert rows["k4"]["timestampType"] == 0
    assert rows["k4"]["headers"] is None
    assert [(each["key"], each["value"]) for each in rows["k5"]["headers"]] == [("h", b"x"), ("none", None)]
    assert load(topic).count() == 10  # By its name alone.


def test_times_and_offsets_bound_what_is_read_of_a_topic(node: NodeProcess, load: Any, topic: str) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": node.bootstrap_servers})
    start_ms = 1_700_000_000_000
    for index in range(100):
        producer.produce(topic, value=str(index), partition=0, timestamp=start_ms + 1_000 * index)
    assert producer.flush(120) == 0

    def offsets(**options: object) -> list[int]:
        return sorted(row["offset"] for row in load(topic=topic, **options).collect())

    assert offsets(startingTime=str(start_ms + 90_000)) == list(range(90, 100))
    assert offsets(startingTime="2023-11-14T22:14:50Z") == list(range(90, 100))
    assert offsets(endingTime=str(start_ms + 5_000)) == list(range(5))
    assert offsets(startingTime="-10 minutes") == []
    by_time = json.dumps({topic: {"0": start_ms + 98_000}})
    assert offsets(startingOffsetsByTimestamp=by_time) == [98, 99]
    assert offsets(startingOffsets=json.dumps({topic: {"0": 97}})) == [97, 98, 99]
    assert offsets(startingOffsets="latest") == []
    parts = load(topic=topic, minPartitions=4)
    assert parts.rdd.getNumPartitions() == 4
    assert parts.count() == 100


def test_several_topics_and_patterns_are_read_together(node: NodeProcess, load: Any, topic: str) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": node.bootstrap_servers})
    for index in range(3):
        producer.produce(f"{topic}.{index}", value=b"x")
    assert producer.flush(120) == 0
    assert load(topic=f"{topic}.0,{topic}.2").count() == 2
    assert load(topicPattern=topic.replace("-", "[-]") + r"\.\d").count() == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"path": "test.missing"}, "there is no table or topic 'test.missing'"),
        ({"table": "test.missing"}, "missing"),
        ({"topic": "missing"}, "there is no topic 'missing'"),
        ({}, "say what to read"),
        ({"path": "x", "table": "y.z"}, "say what to read"),
        ({"path": "x", "minPartition": "4"}, "did you mean 'minPartitions'"),
        ({"path": "x", "minPartitions": "none"}, "a whole number above zero"),
        ({"path": "x", "failOnDataLoss": "maybe"}, "true or false"),
        ({"path": "x", "startingOffsets": "soon"}, "earliest, latest, or offsets"),
        ({"path": "x", "startingTime": "soon"}, "relative to now"),
        ({"path": "x", "startingTime": "1", "startingOffsets": "latest"}, "exclude each other"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:20],
)
def test_what_cannot_be_read_is_refused_on_the_driver(load: Any, options: dict[str, str], said: str) -> None:
    given = dict(options)
    with pytest.raises(Exception) as error:  # noqa: PT011
        load(given.pop("path", None), **given)
    assert said in message_of(error)


def test_a_wrong_address_is_said_at_once(spark: SparkSession) -> None:
    with pytest.raises(Exception) as error:  # noqa: PT011
        read(spark, "127.0.0.1:1", "test.orders")
    assert "127.0.0.1:1" in message_of(error)


def test_a_schema_that_does_not_fit_is_refused_with_the_differences(
    client: Tidemill, spark: SparkSession, node: NodeProcess
) -> None:
    name = orders(client, rows=10)
    reader = spark.read.format("tidemill").option("servers", node.bootstrap_servers)
    assert reader.schema("price double").load(name).count() == 10
    with pytest.raises(Exception) as error:  # noqa: PT011
        reader.schema("price string, more int").load(name).count()
    assert "column 'price' is double, not string" in message_of(error)
    assert "no column 'more'" in message_of(error)


def test_records_that_were_deleted_stop_a_read_unless_that_is_allowed(
    node: NodeProcess, load: Any, topic: str
) -> None:
    from confluent_kafka import Producer, TopicPartition
    from confluent_kafka.admin import AdminClient

    producer = Producer({"bootstrap.servers": node.bootstrap_servers})
    for index in range(10):
        producer.produce(topic, value=str(index), partition=0)
    assert producer.flush(120) == 0
    admin = AdminClient({"bootstrap.servers": node.bootstrap_servers})
    for done in admin.delete_records([TopicPartition(topic, 0, 4)]).values():
        done.result()
    start = json.dumps({topic: {"0": 2}})
    with pytest.raises(Exception) as error:  # noqa: PT011
        load(topic=topic, startingOffsets=start).count()
    assert "offsets 2 to 3 were deleted" in message_of(error)
    assert "failOnDataLoss" in message_of(error)
    assert load(topic=topic, startingOffsets=start, failOnDataLoss=False).count() == 6
