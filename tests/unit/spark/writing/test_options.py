"""The options of writing: what they mean, and what is refused with which words."""

from __future__ import annotations

import pytest

from tidemill.records.compression import CODEC_NUMBERS
from tidemill.spark.errors import InvalidOption
from tidemill.spark.writing.options import WriteOptions

SERVERS = {"servers": "host:9092"}


def parsed(**options: str) -> WriteOptions:
    return WriteOptions.parse(SERVERS | options)


def test_names_are_read_without_regard_to_case() -> None:
    options = parsed(TABLE="shop.orders", TRANSACTIONTIMEOUT="5 minutes", Compression="ZSTD", buckets="3",
                     createTable="TRUE", primarykey="a, b")  # fmt: skip
    assert options.table == options.table_name == "shop.orders"
    assert options.transaction_timeout_ms == 300_000
    assert options.codec == CODEC_NUMBERS["zstd"]
    assert (options.create_table, options.buckets, options.primary_key) == (True, 3, ("a", "b"))


def test_defaults_are_those_of_the_page() -> None:
    options = parsed(path="shop.orders")
    assert options.table_name == "shop.orders"
    assert (options.transaction_timeout_ms, options.timeout_ms, options.codec) == (600_000, 120_000, 0)
    assert (options.txn_app_id, options.txn_version, options.operation_column) == (None, 0, None)


def test_kafkas_name_of_the_servers_is_understood() -> None:
    assert WriteOptions.parse({"kafka.bootstrap.servers": "a:1"}).servers == "a:1"
    assert WriteOptions.parse({"bootstrap.servers": "a:1"}).servers == "a:1"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"table": "a.b", "topic": "c"}, "say once where to write"),
        ({"path": "a.b", "table": "a.b"}, "say once where to write"),
        ({"table": "a.b", "primaryKey": "id"}, "for createTable=true"),
        ({"table": "a.b", "buckets": "4"}, "for createTable=true"),
        ({"topic": "t", "createTable": "true"}, "needs the table's name"),
        ({"table": "a.b", "createTable": "yes"}, "createTable is 'yes'; it is true or false"),
        ({"table": "a.b", "createTable": "true", "primaryKey": "a,,b"}, "list of different columns"),
        ({"table": "a.b", "txnAppId": "nightly"}, "txnAppId and txnVersion go together"),
        ({"table": "a.b", "txnVersion": "1"}, "txnAppId and txnVersion go together"),
        ({"table": "a.b", "txnAppId": "nightly", "txnVersion": "-1"}, "whole number, at least zero"),
        ({"table": "a.b", "compression": "brotli"}, "one of none, gzip, snappy, lz4 and zstd"),
        ({"table": "a.b", "transactionTimeout": "soon"}, "a time such as '10 minutes'"),
        ({"table": "a.b", "transactionTimeout": "10 ms"}, "between 1 second and 24 days"),
        ({"table": "a.b", "transactionTimout": "1 minute"}, "did you mean 'transactionTimeout'"),
    ],
)
def test_what_cannot_be_done_is_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        parsed(**options)
    assert words in str(caught.value)


def test_without_servers_nothing_is_tried() -> None:
    with pytest.raises(InvalidOption, match="say where the nodes are"):
        WriteOptions.parse({"table": "a.b"})
