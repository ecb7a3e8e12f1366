"""Workers over cursors that are killed again and again: every record has its effect exactly once.

The position is in the effect's own database (SQLite, a real PostgreSQL), or in the transaction that writes
the effect to another topic. ``CURSOR_KILLS`` says how many kills of each; ``make test-long`` asks for more.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import tidemill
from support.postgres import find_postgres, running_postgres
from tidemill.client.admin.topics import create_topic
from tidemill.client.producing.producer import Producer
from tidemill.client.sync_client import Tidemill
from tidemill.records.record import Record

KILLS = int(os.environ.get("CURSOR_KILLS", "2"))
RECORDS = 300 * max(KILLS, 1)

_WORKER = """
import sys, time
import tidemill

servers, kind, where = sys.argv[1:]
with tidemill.connect(servers) as db:
    if kind == "transaction":
        checkpoint = tidemill.IN_TRANSACTION
    elif kind == "sqlite":
        import sqlite3
        checkpoint = sqlite3.connect(where, isolation_level=None)
    else:
        import psycopg
        checkpoint = psycopg.connect(where)
    with db.cursor("killed-" + kind, "in", checkpoint=checkpoint, take_over=True) as cursor:
        print("open", flush=True)
        while True:
            if kind == "transaction":
                with cursor.transaction() as transaction:
                    batch = cursor.poll_batch(20, timeout_ms=1_000)
                    for record in batch:
                        transaction.send("out", record.value)
            else:
                batch = cursor.poll_batch(20, timeout_ms=1_000)
                mark = "?" if kind == "sqlite" else "%s"
                if kind == "sqlite":
                    checkpoint.execute("BEGIN IMMEDIATE")
                for record in batch:
                    checkpoint.execute(f"INSERT INTO effects VALUES ({mark})", (int(record.value),))
                if batch:
                    cursor.commit()
                checkpoint.commit()
            # On a busy machine nothing may come for a while although something is there.
            if not batch and not cursor.lag().records:
                break
"""


@pytest.fixture(scope="module")
def db() -> Iterator[Tidemill]:
    with tidemill.open() as node:
        cluster = node._awaited.cluster

        async def fill() -> None:
            await create_topic(cluster, "in", partitions=2)
            await create_topic(cluster, "out", partitions=1)
            async with Producer(cluster) as producer:
                now_ms = int(time.time() * 1000)  # Retention deletes what is old.
                sent = [
                    await producer.send("in", Record(None, b"%d" % number, now_ms), number % 2)
                    for number in range(RECORDS)
                ]
                await asyncio.gather(*sent)

        node.run(fill())
        yield node


def kill_again_and_again(db: Tidemill, kind: str, where: str) -> None:
    choose = random.Random(kind)
    kills = 0
    while True:
        command = [sys.executable, "-c", _WORKER, db.bootstrap_servers, kind, where]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert worker.stdout is not None
        with worker.stdout as output:
            assert output.readline().strip() == b"open"
            if kills >= KILLS:
                assert worker.wait(120) == 0
                return
            time.sleep(choose.uniform(0, 0.15))
            worker.send_signal(signal.SIGKILL)
            worker.wait(120)
        kills += 1


@pytest.mark.timeout(600 + 15 * KILLS)
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_effects_in_a_database_happen_exactly_once(db: Tidemill, kind: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        if kind == "sqlite":
            import sqlite3

            where = str(tmp_path / "effects.db")
            connection = sqlite3.connect(where)
        else:
            if find_postgres() is None:
                pytest.skip("there is no PostgreSQL server: apt-get install postgresql")
            import psycopg

            where = stack.enter_context(running_postgres())
            connection = stack.enter_context(psycopg.connect(where))  # type: ignore[assignment]
        connection.execute("CREATE TABLE effects (number BIGINT)")
        connection.commit()
        kill_again_and_again(db, kind, where)
        found = connection.execute("SELECT number FROM effects ORDER BY number").fetchall()
        assert [row[0] for row in found] == list(range(RECORDS))
        connection.close()


@pytest.mark.timeout(600 + 15 * KILLS)
def test_records_written_in_the_cursors_transactions_are_there_exactly_once(db: Tidemill) -> None:
    kill_again_and_again(db, "transaction", "")
    with db.cursor(None, "out") as cursor:
        found: list[int] = []
        # On a busy machine nothing may come for a while although something is there.
        while (batch := cursor.poll_batch(1_000, timeout_ms=1_000)) or cursor.lag().records:
            records: Any = batch
            found += [int(each.value) for each in records]
    assert sorted(found) == list(range(RECORDS))
