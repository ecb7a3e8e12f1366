"""Workers as programs: ``tidemill worker run`` in processes of their own, stopped, killed and reloaded; and
workers on a node inside the process.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

import tidemill
from support.processes import NodeProcess, process_environment, wait_until

#: Writes a line when it begins and one when it has ended; "slow" tasks take until the file ``go`` is there.
MODULE = """
import os, time
import tidemill

db = tidemill.connect(os.environ["TIDEMILL_SERVER"])

def say(*words):
    with open("said.txt", "a") as out:
        out.write(" ".join(words) + "\\n")

@db.worker({group!r}, topic={topic!r}, concurrency=2, retry_backoff=0.05)
def send(record):
    say("begin", record.text())
    while record.text().startswith("slow") and not os.path.exists("go"):
        time.sleep(0.01)
    if record.text().startswith("flaky") and record.delivery_count < 2:
        raise ValueError("not yet")
    say("end", record.text())
"""

#: Stores its position seldom, so that it is the stop that does.
ORDERED_MODULE = """
import os
import tidemill

db = tidemill.connect(os.environ["TIDEMILL_SERVER"])
options = tidemill.Ordered(every_records=1_000_000, lease_ms=600_000)

@db.worker({topic!r}, topic={topic!r}, ordered=options)
def send(record):
    with open("said.txt", "a") as out:
        out.write(record.text() + "\\n")
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    """The node that the tests of this module share."""
    settings = {"group_share_heartbeat_interval_ms": 500}
    with NodeProcess(tmp_path_factory.mktemp("node") / "data", **settings) as running:
        yield running


@pytest.fixture(scope="module")
def db(node: NodeProcess) -> Iterator[tidemill.Tidemill]:
    with tidemill.connect(node.bootstrap_servers) as connected:
        yield connected


@contextmanager
def worker_process(node: NodeProcess, directory: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """``tidemill worker run tasks:db`` in a directory; its log is there, in ``log.txt``."""
    command = [sys.executable, "-m", "tidemill.cli", "--server", node.bootstrap_servers]
    command += ["worker", "run", "tasks:db", "--format", "json", *options]
    with (directory / "log.txt").open("a") as log:
        process = subprocess.Popen(
            command, cwd=directory, stderr=log, stdin=subprocess.DEVNULL, text=True, env=process_environment()
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def said(directory: Path) -> list[str]:
    path = directory / "said.txt"
    return path.read_text().splitlines() if path.exists() else []


def write_module(directory: Path, topic: str, group: str | None = None) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "tasks.py").write_text(MODULE.format(group=group or topic, topic=topic))


def test_a_worker_process_works_until_sigterm_and_finishes_what_it_has_begun(
    node: NodeProcess, db: tidemill.Tidemill, topic: str, tmp_path: Path
) -> None:
    write_module(tmp_path, topic)
    db.produce_many(topic, ["a", "flaky", "b"])
    with worker_process(node, tmp_path) as process:
        wait_until(lambda: {"end a", "end flaky", "end b"} <= set(said(tmp_path)), "three tasks are done")
        db.produce(topic, "slow")
        wait_until(lambda: "begin slow" in said(tmp_path), "the slow task has begun")
        process.send_signal(signal.SIGTERM)
        # It waits for its handler.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        (tmp_path / "go").touch()
        assert process.wait(120) == 0
    assert said(tmp_path)[-1] == "end slow"
    with db.share(topic, topic) as share:
        wait_until(lambda: share.lag() == 0, "nothing is left")
    lines = [json.loads(line) for line in (tmp_path / "log.txt").read_text().splitlines()]
    (failed,) = [line for line in lines if line.get("outcome") == "released"]
    assert (failed["worker"], failed["delivery_count"]) == (topic, 1)
    assert "ValueError: not yet" in failed["exception"]
    assert lines[-1]["message"] == f"worker {topic}: stopped after 5 records"


def test_an_ordered_worker_process_ends_on_sigterm_and_stores_its_position(
    node: NodeProcess, db: tidemill.Tidemill, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "tasks.py").write_text(ORDERED_MODULE.format(topic=topic))
    db.produce_many(topic, ["a", "b", "c"])
    with worker_process(node, tmp_path) as process:
        wait_until(lambda: said(tmp_path) == ["a", "b", "c"], "three records are handled")
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
    with db.cursor(topic, topic) as cursor:
        assert sum(position.offset for position in cursor.committed.values()) == 3
        # This one waits for the lease of the cursor, for ten minutes.
        with worker_process(node, tmp_path) as process:
            log = tmp_path / "log.txt"
            started = f"worker {topic}: started on"
            wait_until(lambda: log.read_text().count(started) == 2, "the second has started")
            process.send_signal(signal.SIGTERM)
            assert process.wait(120) == 0
    assert said(tmp_path) == ["a", "b", "c"]


def test_what_a_killed_worker_process_held_is_done_by_another(
    node: NodeProcess, db: tidemill.Tidemill, topic: str, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for directory in (first, second):
        write_module(directory, topic)
    texts = [f"slow-{number}" for number in range(2)] + [f"v{number}" for number in range(50)]
    db.produce_many(topic, texts)
    (second / "go").touch()
    with worker_process(node, first) as victim:
        wait_until(lambda: len(said(first)) == 2, "both handlers have begun")
        with worker_process(node, second) as other:
            wait_until(lambda: len(said(second)) >= 100, "the other has done the rest")
            victim.kill()
            wait_until(
                lambda: {f"end {text}" for text in texts} <= set(said(second)), "the other has done all", 60
            )
            other.send_signal(signal.SIGTERM)
            assert other.wait(120) == 0
    assert Counter(said(second)).most_common(1)[0][1] == 1


def test_reload_starts_again_with_what_has_changed(
    node: NodeProcess, db: tidemill.Tidemill, topic: str, tmp_path: Path
) -> None:
    write_module(tmp_path, topic)
    with worker_process(node, tmp_path, "--reload") as process:
        db.produce(topic, "a")
        wait_until(lambda: "end a" in said(tmp_path), "the first task is done")
        changed = (tmp_path / "tasks.py").read_text().replace('say("end"', 'say("newly"')
        (tmp_path / "tasks.py").write_text(changed)
        wait_until(lambda: "tasks.py changed" in (tmp_path / "log.txt").read_text(), "the change is seen")
        db.produce(topic, "b")
        wait_until(lambda: "newly b" in said(tmp_path), "the new code is at work")
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 0


def _is_logged_twice(caplog: pytest.LogCaptureFixture, words: str) -> bool:
    return caplog.text.count(words) >= 2


def test_workers_that_are_started_while_their_node_is_away_wait_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        NodeProcess(tmp_path / "data") as node,
        tidemill.connect(node.bootstrap_servers, timeout_ms=300) as db,
    ):
        db.produce("tasks", "x")
        node.kill()
        handled = {ordered: threading.Event() for ordered in (True, False)}
        workers = [
            db.worker(f"ordered-{ordered}", "tasks", lambda _, event=event: event.set(), ordered=ordered)
            for ordered, event in handled.items()
        ]
        starting = [threading.Thread(target=worker.start) for worker in workers]
        for each in starting:
            each.start()
        for worker in workers:
            again = f"worker {worker.name}: cannot reach the node"
            wait_until(partial(_is_logged_twice, caplog, again), "it tries again")
        node.start()
        for event in handled.values():
            assert event.wait(120)
        for each in starting:
            each.join()
        for worker in workers:
            worker.stop_and_join()


def test_a_program_that_is_started_while_no_node_answers_ends_with_that_error(
    node: NodeProcess, topic: str, tmp_path: Path
) -> None:
    write_module(tmp_path, topic)
    command = [sys.executable, "-m", "tidemill.cli", "--server", "127.0.0.1:1", "worker", "run", "tasks:db"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=process_environment())
    assert done.returncode == 4
    assert "cannot reach the node at 127.0.0.1:1" in done.stderr


def test_a_target_that_is_not_there_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tidemill.cli", "worker", "run", "nothing_here:app"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=process_environment())
    assert done.returncode == 2
    assert "there is no module 'nothing_here'" in done.stderr


def test_workers_on_a_node_inside_the_process(tidemill_node: tidemill.EmbeddedNode) -> None:
    db, lock = tidemill_node, threading.Lock()
    orders = db.create_table("shop.orders", "id bigint, item string", primary_key=["id"], buckets=2)
    orders.upsert([{"id": number, "item": f"item {number}"} for number in range(20)])
    orders.delete(3)
    rows: list[tuple[str | None, int]] = []

    @db.worker("labels", topic="shop.orders", concurrency=3, retry_backoff=0.01, dead_letter=None)
    def label(record: tidemill.ShareRecord) -> None:
        assert record.row is not None
        if record.row["id"] == 5 and record.delivery_count < 3:
            raise ValueError("not yet")
        if record.row["id"] == 7:
            raise tidemill.Reject("nobody wants it")
        with lock:
            rows.append((record.op, record.row["id"]))

    counts = label.run_until_empty(timeout=120)
    assert sorted(rows) == [("delete", 3)] + [("upsert", number) for number in range(20) if number != 7]
    assert (counts.accepted, counts.rejected, counts.released, counts.lost) == (20, 1, 2, 0)


def test_stops_use_up_no_deliveries_of_records_that_no_handler_has_seen(
    tidemill_node: tidemill.EmbeddedNode,
) -> None:
    tidemill_node.produce_many("tasks", [str(number) for number in range(400)])
    seen: set[int] = set()
    go = threading.Event()

    def runs(hangs_at: int) -> tuple[tidemill.Worker, threading.Event]:
        calls, hangs = itertools.count(1), threading.Event()

        def handle(record: tidemill.ShareRecord) -> None:
            seen.add(record.offset)
            if next(calls) == hangs_at:
                hangs.set()
                go.wait(120)

        return tidemill_node.worker("hasty", topic="tasks", handler=handle, stop_timeout=0.05), hangs

    for _ in range(5):
        worker, hangs = runs(hangs_at=3)
        worker.start()
        assert hangs.wait(120)
        worker.stop_and_join()
    assert len(seen) <= 15
    worker, _ = runs(hangs_at=-1)
    worker.run_until_empty(timeout=120)
    go.set()
    assert seen == set(range(400))


def test_table_partitions_that_come_later_are_read_too(db: tidemill.Tidemill) -> None:
    table = db.create_table(
        "shop.events",
        "id bigint, day string",
        primary_key=["id", "day"],
        partition_by="day",
        if_not_exists=True,
    )
    table.upsert({"id": 1, "day": "mon"})
    with db.share("diary", "shop.events") as share:
        first = share.next()
        table.upsert({"id": 2, "day": "tue"})
        second = share.next()
        assert [first.row, second.row] == [{"id": 1, "day": "mon"}, {"id": 2, "day": "tue"}]


async def test_the_async_client_runs_async_handlers_on_its_loop(node: NodeProcess, topic: str) -> None:
    async with await tidemill.connect_async(node.bootstrap_servers) as db:
        await db.produce_many(topic, [(f"k{number % 5}", {"n": number}) for number in range(100)])
        seen: dict[bytes | None, list[int]] = {}
        loop = asyncio.get_running_loop()

        @db.worker(topic, topic=topic, concurrency=8, order="key")
        async def collect(record: tidemill.ShareRecord) -> None:
            assert asyncio.get_running_loop() is loop
            seen.setdefault(record.key, []).append(record.json()["n"])
            await asyncio.sleep(0.001)

        counts = await collect.run_until_empty(timeout=120)
        assert counts.accepted == 100
        assert all(numbers == sorted(numbers) for numbers in seen.values())
        assert sum(map(len, seen.values())) == 100


def test_configs_that_contradict_the_group_are_refused(db: tidemill.Tidemill, topic: str) -> None:
    db.produce(topic, "a")
    with db.share(topic, topic, retry_backoff=1) as share:
        share.next().accept()
    with pytest.raises(
        tidemill.TidemillError, match=r"has tidemill.share.retry.backoff.ms=1000.*asks for 2000"
    ):
        db.share(topic, topic, retry_backoff=2).next()
    db.configure_share(topic, retry_backoff=2)
    db.produce(topic, "b")
    with db.share(topic, topic, retry_backoff=2) as share:
        assert share.next().text() == "b"
