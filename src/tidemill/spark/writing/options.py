"""The options of writing, checked: every wrong one is refused with what is right.

Names are without regard to case.

| option | meaning |
| --- | --- |
| ``servers`` | some nodes, ``host:port,host:port``; also ``kafka.bootstrap.servers`` |
| ``table`` | a table ``database.name``: rows are upserted, or appended if it has no primary key |
| ``topic`` | a topic: columns as Kafka's sink takes them |
| path (``save("x")``) | a table of that name, or else a topic |
| none of these | topics named by the column ``topic`` |
| ``operationColumn`` | says whether a row is upserted or deleted (``_tidemill_op`` if there is one) |
| ``createTable`` | create a missing table from the DataFrame's columns |
| ``primaryKey``, ``buckets`` | of the table that is created |
| ``txnAppId``, ``txnVersion`` | a name and a rising number: a batch write of that version happens once |
| ``transactionTimeout`` | how long a write may show no sign of life before it is undone (``10 minutes``) |
| ``compression`` | ``none``, ``gzip``, ``snappy``, ``lz4`` or ``zstd`` |
| ``timeout`` | how long a node may be away (``2 minutes``) |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from tidemill.client.producing.attempts import DEFAULT_TIMEOUT_MS as TRANSACTION_TIMEOUT_MS
from tidemill.records.compression import CODEC_NUMBERS, NONE
from tidemill.spark.connection import DEFAULT_TIMEOUT_MS
from tidemill.spark.errors import InvalidOption
from tidemill.spark.reading.options import SERVER_NAMES, duration_ms, flag, refuse_misspelt, servers_of, whole

__all__ = ("WriteOptions",)

_NAMES: Final = (
    *SERVER_NAMES,
    "table",
    "topic",
    "operationColumn",
    "createTable",
    "primaryKey",
    "buckets",
    "txnAppId",
    "txnVersion",
    "transactionTimeout",
    "compression",
    "timeout",
)
_SHORTEST_TRANSACTION_MS: Final = 1_000


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """The options of a write, checked."""

    servers: str
    path: str | None
    table: str | None
    topic: str | None
    operation_column: str | None
    create_table: bool
    primary_key: tuple[str, ...]
    buckets: int | None
    txn_app_id: str | None
    txn_version: int
    transaction_timeout_ms: int
    codec: int
    timeout_ms: int

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        """Parse and check what was given to Spark's ``option``. Raises ``InvalidOption``."""
        given = {name.lower(): value for name, value in options.items()}
        refuse_misspelt(given, _NAMES)
        write = cls(
            servers=servers_of(given),
            path=given.get("path"),
            table=given.get("table"),
            topic=given.get("topic"),
            operation_column=given.get("operationcolumn"),
            create_table=flag(given, "createTable", False),
            primary_key=_names(given.get("primarykey")),
            buckets=whole(given, "buckets", None),
            txn_app_id=given.get("txnappid"),
            txn_version=_version(given),
            transaction_timeout_ms=duration_ms(given, "transactionTimeout", TRANSACTION_TIMEOUT_MS),
            codec=_codec(given.get("compression")),
            timeout_ms=duration_ms(given, "timeout", DEFAULT_TIMEOUT_MS),
        )
        write._check()
        return write

    def _check(self) -> None:
        if sum(target is not None for target in (self.path, self.table, self.topic)) > 1:
            raise InvalidOption(
                'say once where to write: save("database.table"), or one of the options table and topic'
            )
        if not self.create_table and (self.primary_key or self.buckets):
            raise InvalidOption(
                "options primaryKey and buckets are for createTable=true: set it, or leave them out"
            )
        if self.create_table and self.table is None and self.path is None:
            raise InvalidOption(
                'option createTable needs the table\'s name: .option("table", "database.name")'
            )
        if not _SHORTEST_TRANSACTION_MS <= self.transaction_timeout_ms < 2**31:
            raise InvalidOption("option transactionTimeout is between 1 second and 24 days")

    @property
    def table_name(self) -> str | None:
        """The name to look for among tables first, if the options have one."""
        return self.table or self.path


def _names(text: str | None) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    if not all(names) or len(set(names)) < len(names):
        raise InvalidOption(f"option primaryKey is {text!r}; it is a list of different columns: a,b")
    return names


def _version(given: Mapping[str, str]) -> int:
    text = given.get("txnversion")
    if (text is None) != (given.get("txnappid") is None):
        raise InvalidOption(
            "options txnAppId and txnVersion go together: a name of the application, and a number that rises "
            "with every write of it"
        )
    if text is None:
        return 0
    if not text.strip().isascii() or not text.strip().isdecimal() or int(text) >= 2**63:
        raise InvalidOption(f"option txnVersion is {text!r}; it is a whole number, at least zero")
    return int(text)


def _codec(text: str | None) -> int:
    if text is None:
        return NONE
    known = {"none": NONE, **CODEC_NUMBERS}
    if text.strip().lower() not in known:
        raise InvalidOption(f"option compression is {text!r}; it is one of none, gzip, snappy, lz4 and zstd")
    return known[text.strip().lower()]
