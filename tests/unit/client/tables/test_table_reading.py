"""``count``, ``len``, ``head``, and what tables, scans, follows and leases look like when they are shown."""

from __future__ import annotations

import datetime as dt
import itertools
import random
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

import tidemill
from tidemill.client.sync_table import Table
from tidemill.embedded.node import EmbeddedNode
from tidemill.errors import ConfigError, TableCode

COLUMNS = "id bigint, region string, amount double"
ROWS = [{"id": n, "region": ("us", "eu")[n % 2], "amount": n / 2} for n in range(100)]
_numbers = itertools.count()


@pytest.fixture(scope="module")
def db() -> Iterator[EmbeddedNode]:
    with tidemill.open() as node:
        yield node


@pytest.fixture(scope="module")
def orders(db: EmbeddedNode) -> Table:
    """A table that tests only read, written in no order."""
    table = db.create_table("shop.orders", COLUMNS, primary_key="id", buckets=4)
    table.upsert(random.Random(1).sample(ROWS, len(ROWS)))
    return table


# --- counting


def test_a_table_counts_its_rows(db: EmbeddedNode, orders: Table) -> None:
    assert orders.count() == len(orders) == orders.scan().count() == 100
    assert orders.count("region = 'eu'") == orders.count(where="region = 'eu'") == 50
    table = db.create_table("shop.empty", COLUMNS, primary_key="id", buckets=2)
    assert (len(table), bool(table)) == (0, True)
    table.upsert(ROWS[:10])
    table.delete([1, 2])
    assert len(table) == 8


def test_a_table_is_true_without_asking_the_server(db: EmbeddedNode) -> None:
    with tidemill.connect(db.bootstrap_servers) as client:
        table = client.create_table("shop.true", COLUMNS, primary_key="id")
    # It is closed now, so that whatever asks is refused.
    assert table
    with pytest.raises(tidemill.ConnectionClosed):
        len(table)


@pytest.mark.parametrize(
    ("key", "narrowest"),
    [
        (("name", "day", "id"), "day"),
        (("id", "price"), "id"),
        (("name",), "name"),
        (("name", "on"), "on"),
        (("price", "name"), "price"),
    ],
)
def test_a_count_reads_the_narrowest_column_of_the_key(
    db: EmbeddedNode, key: tuple[str, ...], narrowest: str
) -> None:
    columns = "name string, id bigint, day date, price decimal(30,2), on boolean"
    table = db.create_table(f"shop.wide{next(_numbers)}", columns, primary_key=key)
    table.upsert(
        {"name": "x", "id": n, "day": dt.date(2024, 5, 1 + n), "price": Decimal(n), "on": n > 0}
        for n in range(2)
    )
    assert table.scan()._awaited._narrowest_key_column() == narrowest
    assert table.count() == (1 if key == ("name",) else 2)


def test_a_table_without_a_key_cannot_be_counted_and_says_what_reads_it(db: EmbeddedNode) -> None:
    log = db.create_table("shop.log", "id bigint")
    for call in (log.count, log.head, lambda: len(log)):
        with pytest.raises(tidemill.TableError, match=r"has no primary key: follow\(\) reads it") as caught:
            call()
        assert caught.value.table_code == TableCode.not_a_primary_key_table


# --- the first rows


def test_iterators_that_are_closed_leave_room_for_others(orders: Table) -> None:
    kept = []
    for _ in range(40):  # more than one connection may have open
        rows = iter(orders.scan(fetch_max_bytes=20))
        next(rows)
        rows.close()
        kept.append(rows)
    assert all(next(rows, None) is None for rows in kept)


def test_head_gives_the_first_rows_by_key(orders: Table) -> None:
    assert orders.head(3).to_pylist() == ROWS[:3]
    assert orders.head().to_pylist() == ROWS[:10]
    assert orders.head(1_000).to_pylist() == ROWS
    assert orders.head(2, where="id >= 41 AND region = 'eu'").column("id").to_pylist() == [41, 43]
    found = orders.head(2, columns=["region"])
    assert found.schema.names == ["region"]
    assert found.to_pylist() == [{"region": "us"}, {"region": "eu"}]
    assert orders.head(2, columns=["amount", "id"]).schema.names == ["amount", "id"]


def test_head_of_a_scan_keeps_what_the_scan_was_asked_for(orders: Table) -> None:
    assert orders.scan(["id"], key_range=(90, None)).head(2).to_pylist() == [{"id": 90}, {"id": 91}]
    assert orders.scan(limit=2).head(5).num_rows == 2
    with orders.lease(fresh=True) as lease:
        assert orders.scan(lease=lease).head(1).to_pylist() == ROWS[:1]


def test_head_of_nothing_has_the_columns(db: EmbeddedNode, orders: Table) -> None:
    assert orders.head(0).schema == orders.schema
    assert orders.head(0).num_rows == 0
    empty = db.create_table("shop.none", COLUMNS, primary_key="id", buckets=3)
    assert empty.head().schema == empty.schema
    with pytest.raises(tidemill.TableError, match="n is a whole number of at least 0, not -1"):
        orders.head(-1)


KEYS: dict[str, list[Any]] = {
    "string": ["", "B", "a", "a\0", "ab", "ä", "日本", "\U0001f30a"],
    "binary": [b"", b"\0", b"\0\xff", b"a", b"\xff"],
    "boolean": [False, True],
    "int": [-(2**31), -1, 0, 1, 2**31 - 1],
    "decimal(9,2)": [Decimal("-2.50"), Decimal("0.00"), Decimal("2.49")],
    "date": [dt.date(1900, 1, 1), dt.date(1970, 1, 1), dt.date(2024, 5, 31)],
}


@pytest.mark.parametrize("kind", KEYS)
def test_head_has_the_order_of_keys_of_every_type(db: EmbeddedNode, kind: str) -> None:
    columns = f"key {kind}, n int"
    table = db.create_table(f"shop.ordered{next(_numbers)}", columns, primary_key=("key", "n"), buckets=5)
    rows = [{"key": key, "n": n} for key in KEYS[kind] for n in range(3)]
    table.upsert(random.Random(2).sample(rows, len(rows)))
    assert table.head(len(rows)).to_pylist() == rows
    assert table.head(2).to_pylist() == rows[:2]


def test_head_goes_through_all_partitions(db: EmbeddedNode) -> None:
    table = db.create_table(
        "shop.parts", "id bigint, part string", primary_key=["id", "part"], partition_by="part", buckets=2
    )
    table.upsert({"id": n, "part": f"p{n % 5}"} for n in range(50))
    assert table.head(7).column("id").to_pylist() == list(range(7))
    assert len(table) == 50


async def test_the_async_table_counts_and_gives_its_first_rows(db: EmbeddedNode, orders: Table) -> None:
    async with await tidemill.connect_async(db.bootstrap_servers) as client:
        table = await client.table(orders.name)
        assert await table.count() == 100
        assert await table.count("id < 10") == 10
        found = await table.head(2, columns=["id"])
        assert isinstance(found, pa.Table)
        assert found.to_pylist() == [{"id": 0}, {"id": 1}]
        assert (await table.scan(where="id > 5").head(1)).to_pylist() == [ROWS[6]]


# --- arguments that cannot be meant


WRONG: dict[str, tuple[Callable[[Table], object], TableCode, str]] = {
    "limit text": (
        lambda table: table.scan(limit="3"),  # type: ignore[arg-type]
        TableCode.invalid_scan_request,
        "limit is a whole number of at least 0, not '3'",
    ),
    "limit negative": (
        lambda table: table.scan(limit=-1),
        TableCode.invalid_scan_request,
        "limit is a whole number of at least 0, not -1",
    ),
    "limit of a prefix": (
        lambda table: table.lookup_prefix(1, limit=1.5),  # type: ignore[arg-type]
        TableCode.invalid_scan_request,
        "limit is a whole number of at least 0, not 1.5",
    ),
    "head of text": (
        lambda table: table.head("3"),  # type: ignore[arg-type]
        TableCode.invalid_scan_request,
        "n is a whole number of at least 0, not '3'",
    ),
    "parallel": (
        lambda table: table.scan(parallel=0),
        TableCode.invalid_scan_request,
        "parallel is a whole number of at least 1, not 0",
    ),
    "bucket": (
        lambda table: table.bucket_scanner("1"),  # type: ignore[arg-type]
        TableCode.bucket_not_found,
        "bucket is a whole number of at least 0, not '1'",
    ),
    "key range": (
        lambda table: table.scan(key_range=5),  # type: ignore[arg-type]
        TableCode.key_refused,
        "a range of keys is a pair: from a key, up to but without another, None is open; it cannot be 5",
    ),
    "offsets": (
        lambda table: table.follow(from_offsets={"shop.orders": 0}),  # type: ignore[dict-item]
        TableCode.bucket_not_found,
        "offsets are by (topic, bucket), as log_offsets of a scan or a lease has them, not by 'shop.orders'",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_argument_that_cannot_be_meant_is_refused_with_what_can(orders: Table, what: str) -> None:
    call, code, message = WRONG[what]
    with pytest.raises(tidemill.TableError) as caught:
        call(orders)
    assert caught.value.table_code == code
    assert caught.value.message == message


def test_a_table_has_a_whole_number_of_buckets(db: EmbeddedNode) -> None:
    for buckets in ("2", 0, 1.5):
        with pytest.raises(
            tidemill.TableError, match=f"buckets is a whole number of at least 1, not {buckets!r}"
        ):
            db.create_table("shop.wrong", "id bigint", primary_key="id", buckets=buckets)  # type: ignore[arg-type]


def test_servers_that_are_no_text_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the servers are text like '127.0.0.1:9092'.*, not 9092"):
        tidemill.connect(9092)  # type: ignore[arg-type]


# --- how they look


def test_everything_shows_what_it_is(db: EmbeddedNode, orders: Table) -> None:
    shown = {
        repr(
            orders
        ): "<table shop.orders: id bigint, region string, amount double, primary key (id), 4 buckets>",
        repr(orders.scan()): "<scan of shop.orders: id, region, amount>",
        repr(orders.scan(["id"], "region = 'eu'", limit=5)): (
            "<scan of shop.orders: id; where \"region\" = 'eu'; limit 5>"
        ),
        repr(orders.scan(key_range=(1, 5), lease="abc")): (
            "<scan of shop.orders: id, region, amount; in a range of keys; of lease abc>"
        ),
        repr(orders.follow()): "<follow of shop.orders: rows, then changes>",
        repr(orders.follow(snapshot=False)): "<follow of shop.orders: changes from now on>",
        repr(orders.follow(from_offsets={("shop.orders", 0): 1}, until_now=True)): (
            "<follow of shop.orders: changes from given offsets on, until now>"
        ),
        repr(orders.lease()): "<lease of shop.orders: not acquired>",
        repr(db): f"<tidemill node at {db.bootstrap_servers}, data in {db.data_dir}>",
    }
    for actual, expected in shown.items():
        assert actual == expected
    with tidemill.connect(db.bootstrap_servers) as client:
        assert repr(client) == f"<tidemill at {db.bootstrap_servers}>"
    assert repr(client) == f"<tidemill at {db.bootstrap_servers}, closed>"


def test_a_long_filter_is_shown_in_part(orders: Table) -> None:
    scan = orders.scan(where=f"id IN ({', '.join(map(str, range(5_000)))})")
    assert len(repr(scan)) < 300
    assert repr(scan).endswith("…>")


def test_a_lease_shows_who_holds_it_and_until_when(orders: Table) -> None:
    with orders.lease(holder="nightly report", duration_ms=60_000) as lease:
        assert lease.lease_id in repr(lease)
        assert "of shop.orders, held by 'nightly report': until 20" in repr(lease)
    assert repr(lease).endswith("held by 'nightly report': released>")
    assert lease.acquire().lease_id in repr(lease)
    assert "released" not in repr(lease)
    lease.release()


def test_a_scanner_shows_its_bucket_and_where_it_is(orders: Table) -> None:
    with orders.bucket_scanner(2) as scanner:
        assert repr(scanner) == "<scanner of bucket 2 of shop.orders: pending>"
        assert scanner.topic_partition == ("shop.orders", 2)
        for _ in scanner:
            pass
        assert repr(scanner) == "<scanner of bucket 2 of shop.orders: done>"


def test_a_table_of_one_bucket_and_one_with_partitions_are_shown(db: EmbeddedNode) -> None:
    one = db.create_table("shop.single", "id bigint", primary_key="id")
    assert repr(one).endswith("primary key (id), 1 bucket>")
    many = db.create_table("shop.days", "id bigint, day date", primary_key=["id", "day"], partition_by="day")
    assert repr(many).endswith("primary key (id, day), partitioned by day, 1 bucket>")
