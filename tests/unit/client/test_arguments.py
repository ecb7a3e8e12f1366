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
from tidemill.errors import ConfigError


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
