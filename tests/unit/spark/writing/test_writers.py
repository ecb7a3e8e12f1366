"""The writers without Spark: tasks, commit and abort called as Spark calls them, against a node here."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

import tidemill
from tidemill.client.producing.attempts import list_jobs
from tidemill.client.sync_table import Table
from tidemill.embedded.node import EmbeddedNode
from tidemill.errors import ApiError, TableError
from tidemill.spark.connection import connected
from tidemill.spark.errors import InvalidOption, SchemaMismatch
from tidemill.spark.writing import writers as writing
from tidemill.spark.writing.rows import gathered
from tidemill.spark.writing.writers import (
    TidemillStreamWriter,
    TidemillWriter,
    make_stream_writer,
    make_writer,
)

COLUMNS = "id bigint, text string"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedNode]:
    with tidemill.open(auto_create_topics=False) as running:
        yield running


@pytest.fixture
def table(node: EmbeddedNode) -> Table:
    return node.create_table(f"test.writing_{next(_numbers)}", COLUMNS, primary_key=["id"], buckets=2)


def rows(*ids: int, **more: Any) -> pa.Table:
    texts = pa.array([f"row {n}" for n in ids], pa.string())
    return pa.table({"id": pa.array(ids, pa.int64()), "text": texts, **more})


def ids_of(table: Table) -> list[int]:
    return sorted(table.scan(columns=["id"]).to_arrow()["id"].to_pylist())


def writer_for(node: EmbeddedNode, data: pa.Table, overwrite: bool = False, **options: str) -> TidemillWriter:
    made = make_writer(
        {"servers": node.bootstrap_servers, **options}, from_arrow_schema(data.schema), overwrite
    )
    sent: TidemillWriter = pickle.loads(pickle.dumps(made))  # It goes to the tasks.
    return sent


def stream_writer_for(
    node: EmbeddedNode, data: pa.Table, overwrite: bool = False, **options: str
) -> TidemillStreamWriter:
    given = {"servers": node.bootstrap_servers, **options}
    return make_stream_writer(given, from_arrow_schema(data.schema), overwrite)


def save(node: EmbeddedNode, data: pa.Table, tasks: int = 1, **options: Any) -> None:
    """What Spark does: split, write each part, commit."""
    writer = writer_for(node, data, **options)
    size = -(-max(data.num_rows, 1) // tasks)
    parts = [data.slice(n * size, size) for n in range(tasks)]
    writer.commit([writer.write(iter(part.to_batches(max_chunksize=7))) for part in parts])


def open_attempts(node: EmbeddedNode) -> int:
    link = connected(node.bootstrap_servers)
    return sum(info.open_attempts for info in link.run(list_jobs(link.cluster)))


class FakeTask:
    """A task of a streaming query, as Spark describes it to Python."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, query: str) -> None:
        self.properties = {"sql.streaming.queryId": query, "streaming.sql.batchId": "0"}
        found = SimpleNamespace(getLocalProperty=self.properties.get)
        monkeypatch.setattr(writing, "TaskContext", SimpleNamespace(get=lambda: found))

    def batch(self, number: int) -> None:
        self.properties["streaming.sql.batchId"] = str(number)


# --- tables


def test_rows_of_all_tasks_are_visible_after_the_commit_and_not_before(
    node: EmbeddedNode, table: Table
) -> None:
    data = rows(*range(100))
    writer = writer_for(node, data, table=table.name)
    messages = [writer.write(iter(data.slice(n * 50, 50).to_batches())) for n in range(2)]
    assert ids_of(table) == []
    assert [message.rows for message in messages] == [50, 50]
    assert messages[0].size_bytes > 0
    writer.commit(pickle.loads(pickle.dumps(messages)))
    assert ids_of(table) == list(range(100))


def test_a_task_without_rows_opens_nothing(node: EmbeddedNode, table: Table) -> None:
    writer = writer_for(node, rows(), table=table.name)
    message = writer.write(iter(()))
    assert message.attempt is None
    assert open_attempts(node) == 0
    writer.commit([message])


def test_of_two_operations_on_one_key_the_later_one_counts(node: EmbeddedNode, table: Table) -> None:
    words = ["upsert", "DELETE", "u", "Insert", "d", None, "snapshot", "delete"]
    data = rows(1, 1, 2, 3, 3, 3, 4, 4, _tidemill_op=words)
    save(node, data, table=table.name)
    assert ids_of(table) == [2, 3]


def test_deletions_need_only_keys_and_a_column_of_any_name(node: EmbeddedNode, table: Table) -> None:
    save(node, rows(*range(10)), table=table.name)
    save(node, pa.table({"id": [2, 3], "what": ["delete"] * 2}), table=table.name, operationColumn="what")
    assert ids_of(table) == [0, 1, 4, 5, 6, 7, 8, 9]


def test_many_changes_of_few_keys_end_as_a_dict_does(node: EmbeddedNode, table: Table) -> None:
    count = 40_000
    deletes = [n % 7 == 3 or n % 11 == 5 for n in range(count)]
    model: dict[int, str] = {}
    for n, is_delete in enumerate(deletes):
        if is_delete:
            model.pop(n % 101, None)
        else:
            model[n % 101] = f"row {n}"
    data = pa.table(
        {
            "id": [n % 101 for n in range(count)],
            "text": [f"row {n}" for n in range(count)],
            "_tidemill_op": ["delete" if is_delete else "upsert" for is_delete in deletes],
        }
    )
    save(node, data, table=table.name)
    assert {row["id"]: row["text"] for row in table.scan().to_arrow().to_pylist()} == model


def test_an_operation_that_means_nothing_fails_the_task_and_leaves_nothing(
    node: EmbeddedNode, table: Table
) -> None:
    data = rows(1, 2, _tidemill_op=["upsert", "merge"])
    writer = writer_for(node, data, table=table.name)
    with pytest.raises(SchemaMismatch, match="an operation is 'merge'"):
        writer.write(iter(data.to_batches()))
    assert open_attempts(node) == 0
    assert ids_of(table) == []


def test_a_log_takes_rows_and_refuses_deletions(node: EmbeddedNode) -> None:
    log = node.create_table(f"test.log_{next(_numbers)}", COLUMNS, buckets=2)
    save(node, rows(1, 2, _tidemill_op=["insert", None]), table=log.name)
    with pytest.raises(TableError, match="has no primary key: its rows are only appended"):
        save(node, rows(3, _tidemill_op=["delete"]), table=log.name)
    offsets = dict.fromkeys([(log.name, 0), (log.name, 1)], 0)
    found = [
        change.row["id"] for batch in log.follow(from_offsets=offsets, until_now=True) for change in batch
    ]
    assert sorted(found) == [1, 2]


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_rows_are_compressed_in_every_way(node: EmbeddedNode, table: Table, codec: str) -> None:
    save(node, rows(*range(2_000)), tasks=2, table=table.name, compression=codec)
    assert ids_of(table) == list(range(2_000))


def test_a_value_that_does_not_fit_fails_the_task(node: EmbeddedNode) -> None:
    narrow = node.create_table(f"test.narrow_{next(_numbers)}", "id int", primary_key=["id"])
    with pytest.raises(TableError, match="which int cannot hold exactly"):
        save(node, pa.table({"id": [1, 2**40]}), table=narrow.name)
    assert open_attempts(node) == 0


# --- what is written to


def test_a_path_is_a_table_or_else_a_topic(node: EmbeddedNode, table: Table) -> None:
    save(node, rows(5), path=table.name)
    assert ids_of(table) == [5]
    with pytest.raises(TableError, match="no table and no topic 'test_none'") as caught:
        save(node, rows(5), path="test_none")
    assert 'tidemill table create test_none --columns "id bigint, text string"' in str(caught.value)
    with pytest.raises(
        ApiError, match="no table and no topic 'nix'; create it with: tidemill topic create nix"
    ):
        save(node, pa.table({"value": ["x"]}), path="nix")


def test_a_missing_table_is_named_with_what_creates_it(node: EmbeddedNode) -> None:
    with pytest.raises(TableError, match=r"there is no table 'test\.none'.*--primary-key COLUMN"):
        writer_for(node, rows(), table="test.none")
    with pytest.raises(ApiError, match="there is no topic 'nix'"):
        writer_for(node, pa.table({"value": ["x"]}), topic="nix")


def test_a_missing_table_is_created_if_that_is_wanted(node: EmbeddedNode) -> None:
    name = f"fresh.created_{next(_numbers)}"
    options: dict[str, Any] = {"table": name, "createTable": "true", "primaryKey": "id", "buckets": "3"}
    for _ in range(2):
        save(node, rows(1, 2, _tidemill_op=["upsert"] * 2), **options)
    table = node.table(name)
    assert (table.primary_key, table.buckets, table.schema.names) == (("id",), 3, ["id", "text"])
    assert ids_of(table) == [1, 2]
    with pytest.raises(InvalidOption, match=r"another one: \(id\)"):
        writer_for(node, rows(), **(options | {"primaryKey": "text"}))
    with pytest.raises(SchemaMismatch, match="primaryKey names 'nix'"):
        writer_for(node, rows(), **(options | {"primaryKey": "nix", "table": "fresh.other"}))


def test_overwriting_is_refused_with_what_to_do_instead(node: EmbeddedNode, table: Table) -> None:
    with pytest.raises(InvalidOption, match=r'use mode\("append"\), which replaces the rows'):
        writer_for(node, rows(), overwrite=True, table=table.name)


def test_nothing_to_write_to_is_an_error(node: EmbeddedNode) -> None:
    with pytest.raises(InvalidOption, match="say where to write"):
        writer_for(node, rows())


def test_a_table_that_was_replaced_meanwhile_is_not_written(node: EmbeddedNode, table: Table) -> None:
    writer = writer_for(node, rows(1), table=table.name)
    node.drop_table(table.name)
    node.create_table(table.name, COLUMNS, primary_key=["id"])
    with pytest.raises(TableError, match="was dropped during the write, and is another one now"):
        writer.write(iter(rows(1).to_batches()))


# --- once


def test_a_version_is_written_once(node: EmbeddedNode, table: Table) -> None:
    again: dict[str, Any] = {"table": table.name, "txnAppId": "nightly", "txnVersion": "3"}
    save(node, rows(1), **again)
    save(node, rows(2), **again)
    save(node, rows(3), **(again | {"txnVersion": "2"}))
    assert ids_of(table) == [1]
    save(node, rows(4), **(again | {"txnVersion": "4"}))
    assert ids_of(table) == [1, 4]


def test_one_version_can_be_written_to_two_targets(node: EmbeddedNode, table: Table) -> None:
    other = node.create_table(f"test.other_{next(_numbers)}", COLUMNS, primary_key=["id"])
    for name in (table.name, other.name):
        save(node, rows(1), table=name, txnAppId="two", txnVersion="0")
    assert ids_of(table) == ids_of(other) == [1]


def test_a_commit_that_comes_twice_is_fine(node: EmbeddedNode, table: Table) -> None:
    writer = writer_for(node, rows(1), table=table.name)
    messages = [writer.write(iter(rows(1).to_batches())), None]
    writer.commit(messages)
    writer.commit(messages)
    assert ids_of(table) == [1]


def test_an_aborted_write_leaves_nothing_and_is_closed_for_late_tasks(
    node: EmbeddedNode, table: Table
) -> None:
    writer = writer_for(node, rows(1), table=table.name)
    message = writer.write(iter(rows(1).to_batches()))
    writer.abort([message, None])
    late = writer.write(iter(rows(2).to_batches()))
    assert late.attempt is None
    assert (ids_of(table), open_attempts(node)) == ([], 0)


def test_aborting_does_not_wait_for_a_node_that_is_away(
    node: EmbeddedNode, table: Table, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def unanswered(*_: object) -> bool:
        return await asyncio.Event().wait()

    writer = writer_for(node, rows(1), table=table.name)
    monkeypatch.setattr(writing, "_ABORT_SECONDS", 0.01)
    monkeypatch.setattr(writing, "publish", unanswered)
    writer.abort([])
    assert "is undone when its transactions time out, after 600 s" in caplog.text


def test_an_aborted_version_can_be_written_again(node: EmbeddedNode, table: Table) -> None:
    options: dict[str, Any] = {"table": table.name, "txnAppId": "again", "txnVersion": "0"}
    writer = writer_for(node, rows(1), **options)
    writer.abort([writer.write(iter(rows(1).to_batches()))])
    save(node, rows(2), **options)
    assert ids_of(table) == [2]


def test_rows_that_fail_on_their_way_leave_nothing(node: EmbeddedNode, table: Table) -> None:
    def failing() -> Iterator[pa.RecordBatch]:
        yield from rows(*range(100_000)).to_batches()
        raise RuntimeError("upstream")

    writer = writer_for(node, rows(1), table=table.name)
    with pytest.raises(RuntimeError, match="upstream"):
        writer.write(failing())
    assert (ids_of(table), open_attempts(node)) == ([], 0)


def test_a_write_stays_open_while_its_rows_are_slow_to_come(node: EmbeddedNode, table: Table) -> None:
    timeout_seconds = 1.0

    def slow() -> Iterator[pa.RecordBatch]:
        yield from rows(1).to_batches()
        deadline = time.monotonic() + 2.5 * timeout_seconds
        while time.monotonic() < deadline:
            assert open_attempts(node) == 1
        yield from rows(2).to_batches()

    writer = writer_for(node, rows(1), table=table.name, transactionTimeout="1 second")
    writer.commit([writer.write(slow())])
    assert ids_of(table) == [1, 2]


# --- streams


def test_a_batch_of_a_stream_is_published_once_however_often_it_runs(
    node: EmbeddedNode, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = node.create_table(f"test.stream_{next(_numbers)}", COLUMNS)
    task = FakeTask(monkeypatch, "query-1")
    for batch in (0, 1, 1, 0, 2):
        task.batch(batch)
        writer = stream_writer_for(node, rows(1), table=log.name)
        message = writer.write(iter(rows(batch).to_batches()))
        stream_writer_for(node, rows(1), table=log.name).commit([message, None], batch)
    found = [
        change.row["id"]
        for batch in log.follow(from_offsets={(log.name, 0): 0}, until_now=True)
        for change in batch
    ]
    assert found == [0, 1, 2]


def test_a_batch_that_was_published_reads_no_more_than_its_first_rows(
    node: EmbeddedNode, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeTask(monkeypatch, "query-2")
    writer = stream_writer_for(node, rows(1), table=table.name)
    writer.commit([writer.write(iter(rows(1).to_batches()))], 0)
    big, pulled = rows(*range(200_000)).to_batches(max_chunksize=10_000), list[int]()

    def counted() -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(big):
            pulled.append(number)
            yield batch

    assert writer.write(counted()).attempt is None
    assert len(pulled) == 1


def test_an_empty_batch_undoes_what_an_earlier_run_left(
    node: EmbeddedNode, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeTask(monkeypatch, "query-3")
    writer = stream_writer_for(node, rows(1), table=table.name)
    writer.write(iter(rows(1).to_batches()))
    assert open_attempts(node) == 1
    writer.commit([writer.write(iter(()))], 0)
    assert (ids_of(table), open_attempts(node)) == ([], 0)


def test_an_aborted_batch_of_a_stream_can_run_again(
    node: EmbeddedNode, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    FakeTask(monkeypatch, "query-4")
    writer = stream_writer_for(node, rows(1), table=table.name)
    writer.abort([writer.write(iter(rows(1).to_batches())), None], 0)
    writer.commit([writer.write(iter(rows(2).to_batches()))], 0)
    assert ids_of(table) == [2]


def test_complete_mode_needs_a_key(node: EmbeddedNode, table: Table) -> None:
    stream_writer_for(node, rows(1), overwrite=True, table=table.name)
    log = node.create_table(f"test.complete_{next(_numbers)}", COLUMNS)
    with pytest.raises(InvalidOption, match="write to a table with a primary key"):
        stream_writer_for(node, rows(1), overwrite=True, table=log.name)


def test_a_stream_has_no_versions_of_its_own(node: EmbeddedNode, table: Table) -> None:
    with pytest.raises(InvalidOption, match="for batch writes"):
        stream_writer_for(node, rows(1), table=table.name, txnAppId="a", txnVersion="1")


# --- topics


def test_topics_are_named_by_a_column_or_else_missing(node: EmbeddedNode) -> None:
    data = pa.table({"topic": ["nix"], "value": ["x"]})
    with pytest.raises(ApiError, match="there is no topic 'nix'"):
        save(node, data)
    with pytest.raises(SchemaMismatch, match="column 'topic' is null in a row"):
        save(node, pa.table({"topic": pa.array([None], pa.string()), "value": ["x"]}))
    assert open_attempts(node) == 0


def test_an_operation_column_is_not_for_topics(node: EmbeddedNode) -> None:
    with pytest.raises(InvalidOption, match="is for tables"):
        writer_for(node, pa.table({"topic": ["a"], "value": ["x"]}), operationColumn="op")


# --- gathering


def test_batches_are_gathered_to_chunks() -> None:
    batches = rows(*range(100)).to_batches(max_chunksize=10)
    empty = batches[0].slice(0, 0)
    chunks = list(gathered([empty, *batches], chunk_bytes=3 * batches[0].nbytes))
    assert [chunk.num_rows for chunk in chunks] == [30, 30, 30, 10]
    assert list(gathered([empty])) == []
