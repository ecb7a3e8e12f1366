"""Worker processes that share the partitions of one name: one dies, another takes over, a third joins.

Nothing is lost, partitions stay in order, and at most a batch of each comes again; with the position in the
effect's database nothing does.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

import tidemill
from support.postgres import find_postgres, running_postgres
from support.processes import wait_until
from support.sharing_worker import BATCH
from tidemill.client.admin.topics import create_topic
from tidemill.client.producing.producer import Producer
from tidemill.client.sync_client import Tidemill
from tidemill.records.record import Record

_ROOT = Path(__file__).parents[1]
_PARTITIONS = range(4)
_LOW, _HIGH = "0,1", "2,3"
#: Also for a machine that is busy with other things: a lease of ten seconds is waited for.
_DEADLINE_SECONDS = 120.0

pytestmark = pytest.mark.timeout(400)


class _Effect(NamedTuple):
    pid: int
    partition: int
    offset: int


Effects = Callable[[], list[_Effect]]


class _Shared:
    """A topic, and the processes that share its partitions."""

    def __init__(self, db: Tidemill, kind: str, where: str, effects: Effects) -> None:
        self._db = db
        self._topic = f"{kind}-records"
        self._arguments = [db.bootstrap_servers, kind, self._topic, kind, where]
        self.effects = effects
        #: Records of each partition.
        self.sent = 0
        self.processes: list[subprocess.Popen[bytes]] = []
        db.run(create_topic(db._awaited.cluster, self._topic, partitions=len(_PARTITIONS)))

    def start(self, *shares: str) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": f"{_ROOT}:{_ROOT.parent / 'src'}"}
        command = [sys.executable, "-m", "support.sharing_worker", *self._arguments, *shares]
        process = subprocess.Popen(command, env=environment)
        self.processes.append(process)
        return process

    def send(self, count: int) -> None:
        """Write so many records to each partition."""

        async def send() -> None:
            async with Producer(self._db._awaited.cluster) as producer:
                now_ms = int(time.time() * 1000)  # Retention deletes what is old.
                sent = [
                    await producer.send(self._topic, Record(None, b"x", now_ms), partition)
                    for _ in range(count)
                    for partition in _PARTITIONS
                ]
                await asyncio.gather(*sent)

        self._db.run(send())
        self.sent += count

    def wait_for_all(self) -> None:
        self._wait(lambda: self._done() == self._all(), "all records have their effect")

    def wait_for_share(self, process: subprocess.Popen[bytes], *partitions: int) -> None:
        """Write records until this process handles those of exactly these partitions."""

        def handles() -> bool:
            before = len(self.effects())
            self.send(1)
            self.wait_for_all()
            mine = {each.partition for each in self.effects()[before:] if each.pid == process.pid}
            return mine == set(partitions)

        self._wait(handles, f"process {process.pid} handles {partitions}")

    def _all(self) -> set[tuple[int, int]]:
        return {(partition, offset) for partition in _PARTITIONS for offset in range(self.sent)}

    def _done(self) -> set[tuple[int, int]]:
        return {(each.partition, each.offset) for each in self.effects()}

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        def is_done() -> bool:
            ended = [each.returncode for each in self.processes if each.poll() not in (None, -signal.SIGKILL)]
            assert not ended, f"a process has ended with {ended}"
            return done()

        wait_until(is_done, what, _DEADLINE_SECONDS)


@pytest.fixture(scope="module")
def db() -> Iterator[Tidemill]:
    with tidemill.open() as node:
        yield node


@pytest.fixture(params=["cluster", "sqlite", "postgres"])
def shared(request: pytest.FixtureRequest, db: Tidemill, tmp_path: Path) -> Iterator[_Shared]:
    kind = str(request.param)
    with contextlib.ExitStack() as stack:
        if kind == "cluster":
            file = tmp_path / "effects.txt"
            file.touch()
            made = _Shared(db, kind, str(file), lambda: _in_file(file))
        elif kind == "sqlite":
            path = tmp_path / "effects.db"
            with contextlib.closing(sqlite3.connect(path)) as connection:
                connection.execute("PRAGMA journal_mode = WAL")
                connection.execute(
                    "CREATE TABLE effects (number INTEGER PRIMARY KEY, pid INT, part INT, record INT)"
                )
            made = _Shared(db, kind, str(path), lambda: _in_sqlite(path))
        else:
            if find_postgres() is None:
                pytest.skip("there is no PostgreSQL server: apt-get install postgresql")
            server = stack.enter_context(running_postgres())
            import psycopg

            with psycopg.connect(server) as opened:
                opened.execute(
                    "CREATE TABLE effects (number BIGSERIAL PRIMARY KEY, pid INT, part INT, record BIGINT)"
                )
            made = _Shared(db, kind, server, lambda: _in_postgres(server))
        try:
            yield made
        finally:
            for process in made.processes:
                process.kill()
                process.wait()


_SELECT = "SELECT pid, part, record FROM effects ORDER BY number"


def _in_file(path: Path) -> list[_Effect]:
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    return [_Effect(*map(int, line.split())) for line in whole.splitlines()]


def _in_sqlite(path: Path) -> list[_Effect]:
    with contextlib.closing(sqlite3.connect(path, timeout=60)) as connection:
        return [_Effect(*row) for row in connection.execute(_SELECT)]


def _in_postgres(server: str) -> list[_Effect]:
    import psycopg

    with psycopg.connect(server) as connection:
        return [_Effect(*row) for row in connection.execute(_SELECT)]


def test_processes_share_partitions_take_over_and_hand_over(
    shared: _Shared, request: pytest.FixtureRequest
) -> None:
    first = shared.start(_LOW, _HIGH)
    shared.wait_for_share(first, 0, 1, 2, 3)
    # Each stands by for what the other has.
    second = shared.start(_HIGH, _LOW)
    first.send_signal(signal.SIGUSR1)
    shared.wait_for_share(second, 2, 3)
    shared.wait_for_share(first, 0, 1)

    shared.send(2_000)
    before = len(shared.effects())
    wait_until(lambda: len(shared.effects()) > before, "both are at work", _DEADLINE_SECONDS)
    first.send_signal(signal.SIGKILL)
    first.wait()
    shared.wait_for_all()
    shared.wait_for_share(second, 0, 1, 2, 3)

    third = shared.start(_LOW)
    second.send_signal(signal.SIGUSR1)
    shared.wait_for_share(third, 0, 1)
    shared.wait_for_share(second, 2, 3)
    shared.send(200)
    shared.wait_for_all()
    for process in (second, third):
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0

    effects = shared.effects()
    for partition in _PARTITIONS:
        offsets = [each.offset for each in effects if each.partition == partition]
        steps = [after - before for before, after in pairwise(offsets)]
        again = [step for step in steps if step != 1]
        if "cluster" in request.node.name and partition in (0, 1):
            # The batch that the first process was at when it was killed.
            assert len(again) <= 1
            assert all(-BATCH < step <= 0 for step in again)
        else:
            assert not again
        assert (offsets[0], offsets[-1]) == (0, shared.sent - 1)
