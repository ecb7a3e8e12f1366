"""What a program passes that makes no sense is refused with words that say what does."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import tidemill
from tidemill import Ordered, Retry
from tidemill.client.cursors.admin import describe_cursor
from tidemill.cursors.errors import CursorNotFound
from tidemill.errors import ConfigError, TableError


@pytest.fixture(scope="module")
def db() -> Iterator[tidemill.Tidemill]:
    with tidemill.open() as node:
        node.produce_many("orders", ["a", "b", "c"])
        node.create_table("shop.orders", "id bigint", primary_key="id")
        yield node


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"partitions": 0}, "partitions is a list of partitions like [0, 2], not 0"),
        ({"partitions": "0"}, "partitions is a list of partitions like [0, 2], not '0'"),
        ({"partitions": [0.5]}, "partitions is a list of partitions like [0, 2], not [0.5]"),
        ({"partitions": [1]}, "topic 'orders' has 1 partition, numbered from 0: there is no partition 1"),
        ({"own": ["a"]}, "own is a list of partitions like [0, 2], not ['a']"),
        ({"own": []}, "own names no partition: there is nothing to read"),
        ({"headers": ["type"]}, "headers are values by name, as in {'type': 'order'}, not ['type']"),
        ({"headers": {1: b"x"}}, "a header's name is text, not 1"),
        ({"lease_ms": "10s"}, "lease_ms is a whole number from 1 to 600000, not '10s'"),
        ({"lease_ms": 1.5}, "lease_ms is a whole number from 1 to 600000, not 1.5"),
        ({"gaps_kept": None}, "gaps_kept is a whole number of at least 0, not None"),
        ({"start": {"0": 1}}, "there is no partition '0' to start at offset 1"),
        ({"start": None}, "'earliest', 'latest', an offset"),
        ({"checkpoint": ""}, "checkpoint is an empty path: name the file that keeps the position"),
    ],
)
def test_options_of_a_cursor(db: tidemill.Tidemill, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        db.cursor("wrong", "orders", **options)
    with pytest.raises(CursorNotFound):
        db.run(describe_cursor(db._awaited.cluster, "wrong"))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda cursor: cursor.poll_batch("x"), "limit is a whole number of at least 1, not 'x'"),
        (lambda cursor: cursor.poll_batch(0), "limit is a whole number of at least 1, not 0"),
        (lambda cursor: cursor.poll(timeout_ms=None), "timeout_ms is a number of milliseconds, not None"),
        (lambda cursor: cursor.commit(5), "upto is offsets by partition, as in {0: 17}, not 5"),
        (lambda cursor: cursor.commit({0: "x"}), "upto is offsets by partition, as in {0: 17}"),
        (lambda cursor: cursor.seek(0, partitions=0), "partitions is a list of partitions like [0, 2]"),
    ],
)
def test_calls_of_a_cursor(db: tidemill.Tidemill, call: Callable[[Any], None], said: str) -> None:
    with db.cursor(None, "orders") as cursor, pytest.raises(ConfigError, match=re.escape(said)):
        call(cursor)


def _handler(record: Any) -> None:
    """A handler that is never called."""


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda db: db.share("", "orders"), "the name of a share group is text of at least one character"),
        (lambda db: db.share("g", 5), "a topic is its name, a table, or a list of them, not 5"),
        (lambda db: db.share("g", []), "a topic is its name, a table, or a list of them, not []"),
        (lambda db: db.share("g", "orders", lock="x"), "lock is a number of seconds of at least 0, not 'x'"),
        (lambda db: db.share("g", "orders", lock=-1), "lock is a number of seconds of at least 0, not -1"),
        (lambda db: db.share("g", "orders", order="x"), "order is 'none' or 'key', not 'x'"),
        (
            lambda db: db.share("g", "orders", start="x"),
            "start is 'earliest', 'latest' or so many seconds ago",
        ),
        (lambda db: db.share("g", "orders", max_deliveries="x"), "max_deliveries is a whole number"),
        (lambda db: db.share("g", "orders", deliver_at="x"), "deliver_at is True or False, not 'x'"),
        (lambda db: db.share("g", "orders", dead_letter=5), "the topic of dead records, is text"),
        (
            lambda db: db.share("g", "orders").poll("x"),
            "max_records is a whole number of at least 1, not 'x'",
        ),
        (lambda db: db.share("g", "orders").poll(timeout="x"), "timeout is a number of seconds, not 'x'"),
        (lambda db: db.worker("w", 5, _handler), "a topic is its name, a table"),
        (lambda db: db.worker("", "orders", _handler), "a worker's name is text of at least one character"),
        (lambda db: db.worker("w", "orders", _handler, concurrency="x"), "a whole number of at least 1"),
        (lambda db: db.worker("w", "orders", _handler, timeout=0), "more than 0 seconds"),
        (lambda db: db.worker("w", "orders", _handler, stop_timeout=-1), "stop_timeout is a number of"),
        (
            lambda db: Ordered(batch_size="x"),  # type: ignore[arg-type]
            "batch_size is a whole number of at least 1, not 'x'",
        ),
        (
            lambda db: Ordered(every_seconds="x"),  # type: ignore[arg-type]
            "every_seconds is a number of seconds",
        ),
        (
            lambda db: Retry(delay="soon"),  # type: ignore[arg-type]
            "delay is a number of seconds of at least 0, not 'soon'",
        ),
        (lambda db: db.produce(5, "x"), "a topic's name is text of at least one character, not 5"),
        (lambda db: db.produce("orders", {1, 2}), "{1, 2} cannot be written: Object of type set is not JSON"),
        (lambda db: db.produce("orders", "x", headers=["a"]), "headers are values by name"),
        (lambda db: db.produce("orders", "x", headers={5: "a"}), "a header's name is text, not 5"),
        (lambda db: db.produce("orders", "x", delay="x"), "delay is a number of seconds of at least 0"),
        (lambda db: db.produce("orders", "x", partition="0"), "partition is a whole number of at least 0"),
        (lambda db: db.produce_many("orders", "abc"), "several values are a list of them, not 'abc'"),
        (
            lambda db: db.produce_many("orders", [(1, 2, 3)]),
            "a value, or a pair of key and value, not (1, 2, 3)",
        ),
    ],
)
def test_everything_else(db: tidemill.Tidemill, call: Callable[[Any], None], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        call(db)


_SCHEMA = "id bigint"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda db: tidemill.connect(5), "the servers are text like '127.0.0.1:9092'"),  # type: ignore[arg-type]
        (
            lambda db: tidemill.connect(db.bootstrap_servers, client_id=5),  # type: ignore[arg-type]
            "client_id is text, not 5",
        ),
        (
            lambda db: tidemill.connect(db.bootstrap_servers, timeout_ms="x"),  # type: ignore[arg-type]
            "timeout_ms is a whole number of at least 0, not 'x'",
        ),
        (lambda db: db.create_database(5), "a database's name is text, not 5"),
        (lambda db: db.create_database("d", comment=5), "comment is text or None, not 5"),
        (
            lambda db: db.create_database("d", properties=5),
            "properties is values by name, as in {'user.owner'",
        ),
        (lambda db: db.create_database("d", if_not_exists=5), "if_not_exists is True or False, not 5"),
        (lambda db: db.alter_database("d", set_properties=["a"]), "set_properties is values by name"),
        (
            lambda db: db.alter_database("d", unset_properties=5),
            "unset_properties is a name or a list of names",
        ),
        (lambda db: db.drop_database("d", cascade="x"), "cascade is True or False, not 'x'"),
        (lambda db: db.create_table(5, _SCHEMA), "a table's name is text, not 5"),
        (lambda db: db.create_table("a.b", _SCHEMA, comment=5), "comment is text or None, not 5"),
        (
            lambda db: db.create_table("a.b", _SCHEMA, properties={5: "x"}),
            "a name in properties is text, not 5",
        ),
        (
            lambda db: db.create_table("a.b", _SCHEMA, primary_key=5),
            "primary_key is a name or a list of names",
        ),
        (
            lambda db: db.create_table("a.b", _SCHEMA, primary_key=[5]),
            "primary_key is a name or a list of names",
        ),
        (
            lambda db: db.create_table("a.b", _SCHEMA, boundaries=5),
            "boundaries is a list of keys in rising order",
        ),
        (
            lambda db: db.create_table("a.b", _SCHEMA, partition_by=5),
            "partition_by, a column's name, is text",
        ),
        (lambda db: db.create_table("a.b", _SCHEMA, row_format=5), "row_format is text or None, not 5"),
        (lambda db: db.create_table("a.b", _SCHEMA, key_format=5), "key_format is text or None, not 5"),
        (lambda db: db.table(5), "a table's name is text, not 5"),
        (lambda db: db.tables(5), "database, a name, is text or None, not 5"),
        (lambda db: db.drop_table("a.b", if_exists=5), "if_exists is True or False, not 5"),
        (lambda db: db.release_lease(5), "lease_id is text, not 5"),
        (lambda db: db.configure_share(5), "the name of a share group is text of at least one character"),
        (lambda db: tidemill.run_workers([5]), "a worker is what @db.worker(…) makes, not [5]"),  # type: ignore[arg-type]
    ],
)
def test_databases_and_tables(db: tidemill.Tidemill, call: Callable[[Any], None], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        call(db)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda table: table.upsert([{"id": 9}], progress=5), "progress is a function of the number of rows"),
        (lambda table: table.lookup(1, columns=5), "columns is a name or a list of names, not 5"),
        (lambda table: table.scan([5]), "columns is a name or a list of names, not [5]"),
        (lambda table: table.scan(lease=5), "lease, a lease or its id, is text or None, not 5"),
        (lambda table: table.bucket_scanner(0, predicate="x"), "predicate is bytes or None, not 'x'"),
        (lambda table: table.bucket_scanner(0, start_key=5), "start_key is bytes or None, not 5"),
        (lambda table: table.bucket_scanner(0, limit="x"), "limit is a whole number of at least 0, not 'x'"),
        (lambda table: table.bucket_scanner(0, pin_id=5), "pin_id is text or None, not 5"),
        (lambda table: table.follow(snapshot="x"), "snapshot is True or False, not 'x'"),
        (lambda table: table.follow(until_now=5), "until_now is True or False, not 5"),
        (lambda table: table.follow(from_offsets=5), "from_offsets is offsets by (topic, bucket)"),
        (
            lambda table: table.follow(from_offsets={("shop.orders", 0): "x"}),
            "the offset of ('shop.orders', 0) in from_offsets is a whole number of at least 0, not 'x'",
        ),
        (lambda table: table.lease(duration_ms="x"), "duration_ms is a whole number of at least 1, not 'x'"),
        (lambda table: table.lease(holder=5), "holder is text, not 5"),
        (lambda table: table.lease(fresh="x"), "fresh is True or False, not 'x'"),
        (lambda table: table.alter(add_columns=5), "a schema is a pyarrow.Schema or text like"),
        (lambda table: table.alter(set_properties=5), "set_properties is values by name"),
        (lambda table: table.alter(unset_properties=[5]), "unset_properties is a name or a list of names"),
        (lambda table: table.alter(comment=5), "comment is text or None, not 5"),
        (lambda table: table.create_partition(5), "value, which names the partition, is text, not 5"),
        (lambda table: table.drop_partition(5), "value, which names the partition, is text, not 5"),
    ],
)
def test_calls_of_a_table(db: tidemill.Tidemill, call: Callable[[Any], None], said: str) -> None:
    with pytest.raises((ConfigError, TableError), match=re.escape(said)):
        call(db.table("shop.orders"))
    assert db.table("shop.orders").lookup(9) is None


def test_a_rejection_has_a_reason_that_is_text(db: tidemill.Tidemill) -> None:
    with db.share("reasons", "orders") as share:
        record = share.next()
        with pytest.raises(ConfigError, match="the reason for a rejection is text, not 5"):
            record.reject(5)  # type: ignore[arg-type]
        record.accept()
        share.flush()


def test_share_groups_and_workers_take_a_table_for_its_topic(db: tidemill.Tidemill) -> None:
    table = db.table("shop.orders")
    table.upsert({"id": 7})
    with db.share("rows", table) as share:
        assert share.next().row == {"id": 7}
    seen = []
    worker = db.worker("row-workers", table, lambda record: seen.append(record.row))
    assert worker.run_until_empty().accepted == 1
    assert seen == [{"id": 7}]


def test_a_start_behind_the_end_is_refused_and_not_stored(db: tidemill.Tidemill) -> None:
    for start in (5, {0: 5}):
        with pytest.raises(ConfigError, match="start is offset 5 of orders-0, which ends at offset 3"):
            db.cursor("eager", "orders", start=start)
    with db.cursor("eager", "orders", start=3) as cursor:
        assert cursor.positions[0].offset == 3
