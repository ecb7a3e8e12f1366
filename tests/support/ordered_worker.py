"""A worker that is killed: ``python -m support.ordered_worker SERVERS NAME TOPIC KIND PATH CONCURRENCY``.

Handles records of TOPIC in order. KIND ``database``: each becomes a row of the SQLite file PATH, which also
keeps the position. KIND ``cluster``: each becomes a line of the file PATH; the cluster keeps the position.
KIND ``transaction``: each becomes a record of the topic PATH, in the transaction that stores the position.
"""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Callable
from typing import Any

import tidemill
from tidemill import Ordered
from tidemill.client.cursors.sync_cursor import CursorTransaction

BATCH = 16


def main(servers: str, name: str, topic: str, kind: str, path: str, concurrency: str) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(path, timeout=120)

    def write_row(record: Any, connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO effects VALUES (?, ?)", (record.key.decode(), record.offset))

    file = os.open(path, os.O_WRONLY | os.O_APPEND) if kind == "cluster" else -1

    def write_line(record: Any) -> None:
        os.write(file, b"%s %d\n" % (record.key, record.offset))

    def send(record: Any, transaction: CursorTransaction) -> None:
        transaction.send(path, b"%s %d" % (record.key, record.offset), key=record.key)

    handlers: dict[str, tuple[Callable[..., None], Any]] = {
        "cluster": (write_line, None),
        "database": (write_row, connect),
        "transaction": (send, tidemill.IN_TRANSACTION),
    }
    handler, checkpoint = handlers[kind]
    # A killed worker's lease is not waited for long.
    options = Ordered(batch_size=BATCH, lease_ms=1_000, checkpoint=checkpoint)
    with tidemill.connect(servers, timeout_ms=120_000) as db:
        db.worker(name, topic, handler, ordered=options, concurrency=int(concurrency)).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
