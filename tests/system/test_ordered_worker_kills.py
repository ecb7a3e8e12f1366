"""Workers and nodes are killed with SIGKILL: nothing is lost, and effects in a database happen once.

The same holds for effects in Tidemill's transactions. ``WORKER_KILLS`` says how often; ``make test-long``
kills each of four workers 70 times, and nodes of a cluster as often.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

import tidemill
from support.etcd import NO_ETCD, has_etcd
from support.ordered_worker import BATCH
from support.real_cluster import RealCluster
from tidemill.client.admin.topics import create_topic
from tidemill.client.cursors.records import CursorRecord
from tidemill.client.cursors.sync_cursor import Cursor
from tidemill.client.producing.producer import Producer
from tidemill.client.sync_client import Tidemill
from tidemill.records.record import Record

_KILLS = int(os.environ.get("WORKER_KILLS", "3"))
_KEYS = 5
_ROOT = Path(__file__).parents[1]
_DEADLINE_SECONDS = 240

pytestmark = pytest.mark.timeout(600 + 30 * _KILLS)


@pytest.fixture(scope="module")
def db() -> Iterator[Tidemill]:
    with tidemill.open() as node:
        yield node


def _are_all(effects: Callable[[], list[int]], sent: int) -> bool:
    return len(set(effects())) >= sent


def _is_more(effects: Callable[[], int], before: int) -> bool:
    return effects() > before


class _Worker:
    """The process, its records, and how many of them had an effect."""

    def __init__(self, db: Tidemill, name: str, kind: str, path: Path | str, concurrency: int) -> None:
        self._db = db
        self.topic = f"{name}-records"
        self.sent = 0
        self._arguments = [db.bootstrap_servers, name, self.topic, kind, str(path), str(concurrency)]
        db.run(create_topic(db._awaited.cluster, self.topic, partitions=1))

    def send(self, count: int) -> None:
        async def send() -> None:
            async with Producer(self._db._awaited.cluster) as producer:
                now_ms = int(time.time() * 1000)  # Retention deletes what is old.
                sent = [
                    await producer.send(self.topic, Record(b"%d" % (number % _KEYS), b"x", now_ms), 0)
                    for number in range(self.sent, self.sent + count)
                ]
                await asyncio.gather(*sent)

        self._db.run(send())
        self.sent += count

    def start(self) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": f"{_ROOT}:{_ROOT.parent / 'src'}"}
        command = [sys.executable, "-m", "support.ordered_worker", *self._arguments]
        return subprocess.Popen(command, env=environment)

    def live_through_kills(self, effects: Callable[[], int], seed: int) -> None:
        """Kill the process somewhere in its work, as often as asked, and let the last one finish."""
        chance = random.Random(seed)
        for _ in range(_KILLS):
            before = effects()
            self.send(200)
            process = self.start()
            self.wait(partial(_is_more, effects, before), process)
            time.sleep(chance.random() * 0.02)  # Not for a state: to be somewhere in a batch.
            process.send_signal(signal.SIGKILL)
            process.wait()
        # The last one has work to do: once that is done it listens to signals.
        self.send(200)
        process = self.start()
        try:
            self.wait(lambda: effects() >= self.sent, process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
        finally:
            process.kill()
            process.wait()

    @staticmethod
    def wait(done: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while not done():
            assert process.poll() is None, f"the worker ended with {process.returncode}"
            assert time.monotonic() < deadline, "the worker does not get on"
            time.sleep(0.01)


def _make_database(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("CREATE TABLE effects (key TEXT, record INTEGER)")


def _in_database(path: Path) -> list[tuple[str, int]]:
    """Key and record of each effect, in order."""
    with contextlib.closing(sqlite3.connect(path, timeout=120)) as connection:
        return connection.execute("SELECT key, record FROM effects ORDER BY rowid").fetchall()


def _in_file(path: Path) -> list[int]:
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [int(line.split()[1]) for line in whole.splitlines()]


class _InTopic:
    """The effects in a topic, read as they come."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self.found: list[int] = []

    def read(self) -> list[int]:
        while batch := self._cursor.poll_batch(1_000, timeout_ms=0):
            self.found += [int(each.text().split()[1]) for each in batch if isinstance(each, CursorRecord)]
        return self.found


@pytest.mark.parametrize("concurrency", [1, 3])
def test_effects_in_the_database_of_the_position_happen_once(
    db: Tidemill, tmp_path: Path, concurrency: int
) -> None:
    path = tmp_path / "effects.db"
    _make_database(path)
    worker = _Worker(db, f"database-{concurrency}", "database", path, concurrency)
    worker.live_through_kills(lambda: len({record for _, record in _in_database(path)}), concurrency)
    rows = _in_database(path)
    assert sorted(record for _, record in rows) == list(range(worker.sent))
    for key in {key for key, _ in rows}:
        of_key = [record for each, record in rows if each == key]
        assert of_key == sorted(of_key), "the order of a key is broken"


def test_effects_in_the_transactions_of_the_position_happen_once(db: Tidemill) -> None:
    db.run(create_topic(db._awaited.cluster, "effects", partitions=1))
    worker = _Worker(db, "transaction", "transaction", "effects", 1)
    with db.cursor(None, "effects") as cursor:
        effects = _InTopic(cursor)
        worker.live_through_kills(lambda: len(set(effects.read())), 1)
        assert effects.read() == list(range(worker.sent))


def test_nothing_is_lost_and_at_most_a_batch_comes_again_after_each_kill(
    db: Tidemill, tmp_path: Path
) -> None:
    path = tmp_path / "effects.txt"
    path.touch()
    worker = _Worker(db, "cluster", "cluster", path, 1)
    worker.live_through_kills(lambda: len(set(_in_file(path))), 1)
    _check_at_least_once(_in_file(path), worker.sent, _KILLS)


def _check_at_least_once(seen: list[int], sent: int, kills: int) -> None:
    assert sorted(set(seen)) == list(range(sent))
    # In order, but for what came again: that is right behind where the last commit was.
    steps = [after - before for before, after in pairwise(seen)]
    assert sum(step != 1 for step in steps) <= kills
    assert all(step == 1 or -BATCH < step <= 0 for step in steps)


@pytest.mark.skipif(not has_etcd(), reason=NO_ETCD)
@pytest.mark.timeout(600 + 60 * _KILLS)
def test_workers_go_on_when_nodes_of_the_cluster_are_killed(tmp_path: Path) -> None:
    kills = _KILLS if "WORKER_KILLS" in os.environ else 2
    chance = random.Random(kills)
    file, database = tmp_path / "effects.txt", tmp_path / "effects.db"
    file.touch()
    _make_database(database)
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(RealCluster(tmp_path / "cluster"))
        db = stack.enter_context(tidemill.connect(cluster.bootstrap_servers, timeout_ms=120_000))
        cluster.create_topic("effects")
        in_topic = _InTopic(stack.enter_context(db.cursor(None, "effects")))
        effects: dict[str, Callable[[], list[int]]] = {
            "cluster": lambda: _in_file(file),
            "database": lambda: [record for _, record in _in_database(database)],
            "transaction": in_topic.read,
        }
        where: dict[str, Path | str] = {"cluster": file, "database": database, "transaction": "effects"}
        workers = {kind: _Worker(db, kind, kind, where[kind], 1) for kind in effects}
        processes = {kind: worker.start() for kind, worker in workers.items()}
        for process in processes.values():
            stack.callback(process.kill)
        stack.callback(lambda: print(cluster.logs()))  # noqa: T201

        def handle(count: int) -> None:
            for worker in workers.values():
                worker.send(count)
            for kind, worker in workers.items():
                worker.wait(partial(_are_all, effects[kind], worker.sent), processes[kind])

        handle(20)
        for _ in range(kills):
            for worker in workers.values():
                worker.send(300)
            victim = chance.choice(list(cluster))
            victim.kill()
            handle(20)
            victim.start()
            for topic in ("effects", *(worker.topic for worker in workers.values())):
                cluster.wait_in_sync(topic, 3)
        for process in processes.values():
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
        _check_at_least_once(effects["cluster"](), workers["cluster"].sent, kills)
        for kind in ("database", "transaction"):
            assert effects[kind]() == list(range(workers[kind].sent))
