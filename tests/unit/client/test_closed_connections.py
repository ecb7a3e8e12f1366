"""A connection that was closed, or belongs to another process or event loop, says so and what to do."""

from __future__ import annotations

import asyncio
import copy
import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tidemill
from tidemill.client.async_client import AsyncTidemill
from tidemill.client.sync_client import Tidemill
from tidemill.client.sync_table import Table
from tidemill.embedded.node import EmbeddedNode
from tidemill.errors import ConnectionClosed

# Said by Python 3.12 and later of every fork beside threads, which is what is tried here.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")

SOON_SECONDS = 60
ROWS = [{"id": number, "region": "eu"} for number in range(100)]


@pytest.fixture(scope="module")
def node() -> Iterator[EmbeddedNode]:
    with tidemill.open() as running:
        table = running.create_table("shop.orders", "id bigint, region string", primary_key="id", buckets=2)
        table.upsert(ROWS)
        yield running


def public_methods(kind: type) -> set[str]:
    return {
        name
        for name in dir(kind)
        if not name.startswith("_") and not isinstance(getattr(kind, name), property)
    }


# --- after close

#: A call of every method that asks a server. What is made without asking is used, too.
DATABASE_CALLS: dict[str, Callable[[Any], Any]] = {
    "alter_database": lambda db: db.alter_database("shop", comment="x"),
    "configure_share": lambda db: db.configure_share("group", lock=20),
    "create_database": lambda db: db.create_database("other"),
    "create_table": lambda db: db.create_table("shop.other", "id bigint"),
    "cursor": lambda db: db.cursor(None, "topic"),
    "databases": lambda db: db.databases(),
    "drop_database": lambda db: db.drop_database("shop"),
    "drop_table": lambda db: db.drop_table("shop.orders"),
    "leases": lambda db: db.leases(),
    "produce": lambda db: db.produce("topic", "value"),
    "produce_many": lambda db: db.produce_many("topic", ["value"]),
    "release_lease": lambda db: db.release_lease("x"),
    "share": lambda db: db.share("group", "topic").next(),
    "table": lambda db: db.table("shop.orders"),
    "tables": lambda db: db.tables(),
    "worker": lambda db: db.worker("group", "topic", print).start(),
}
TABLE_CALLS: dict[str, Callable[[Any], Any]] = {
    "alter": lambda table: table.alter(comment="x"),
    "append": lambda table: table.append({"id": 1}),
    "bucket_scanner": lambda table: table.bucket_scanner(0).next_batch(),
    "count": lambda table: table.count(),
    "create_partition": lambda table: table.create_partition("x"),
    "create_snapshot": lambda table: table.create_snapshot(),
    "delete": lambda table: table.delete(1),
    "drop": lambda table: table.drop(),
    "drop_partition": lambda table: table.drop_partition("x"),
    "head": lambda table: table.head(),
    "lease": lambda table: table.lease().acquire(),
    "leases": lambda table: table.leases(),
    "lookup": lambda table: table.lookup(1),
    "lookup_prefix": lambda table: table.lookup_prefix(1),
    "refresh": lambda table: table.refresh(),
    "scan": lambda table: table.scan().to_arrow(),
    "snapshots": lambda table: table.snapshots(),
    "stats": lambda table: table.stats(),
    "upsert": lambda table: table.upsert({"id": 1}),
}
PLAIN_TABLE_CALLS: dict[str, Callable[[Any], Any]] = {
    **TABLE_CALLS,
    "follow": lambda table: next(iter(table.follow())),
    "len": len,
    "iteration": lambda table: list(table.scan()),
    "scan.count": lambda table: table.scan().count(),
    "scan.head": lambda table: table.scan().head(),
    "scan.to_reader": lambda table: table.scan().to_reader().read_all(),
    "scan.to_pandas": lambda table: table.scan().to_pandas(),
    "scan.to_polars": lambda table: table.scan().to_polars(),
    "scan._repr_html_": lambda table: table.scan()._repr_html_(),
    "lease block": lambda table: table.lease().__enter__(),
}


@pytest.fixture(scope="module", params=["connect", "open"])
def closed(request: pytest.FixtureRequest, node: EmbeddedNode) -> tuple[Tidemill, Table, Table]:
    """A closed connection, a table of it with a primary key, and one without."""
    if request.param == "connect":
        db = tidemill.connect(node.bootstrap_servers)
        log = db.create_table("shop.log", "id bigint", if_not_exists=True)
    else:
        db = tidemill.open()
        db.create_table("shop.orders", "id bigint, region string", primary_key="id", buckets=2)
        log = db.create_table("shop.log", "id bigint")
    table = db.table("shop.orders")
    db.close()
    db.close()
    return db, table, log


def test_every_call_of_a_closed_connection_is_refused(closed: tuple[Tidemill, Table, Table]) -> None:
    db, table, log = closed
    assert public_methods(Tidemill) == {*DATABASE_CALLS, "close", "iterate", "ping", "run"}
    calls: dict[str, Callable[[Any], Any]] = {**DATABASE_CALLS, "ping": lambda db: db.ping()}
    for name, call in calls.items():
        with pytest.raises(ConnectionClosed, match="this connection is closed; open another one"):
            pytest.fail(f"{name} gave {call(db)!r}")
    assert public_methods(Table) == {*TABLE_CALLS, "follow"}
    for name, call in PLAIN_TABLE_CALLS.items():
        with pytest.raises(ConnectionClosed, match="this connection is closed; open another one"):
            pytest.fail(f"{name} gave {call(log if name == 'append' else table)!r}")


def test_what_a_closed_connection_knows_can_still_be_read(closed: tuple[Tidemill, Table, Table]) -> None:
    db, table, _ = closed
    assert table.name == "shop.orders"
    assert table.schema.names == ["id", "region"]
    assert bool(table) is True
    assert repr(table).startswith("<table shop.orders: ")
    assert repr(db).endswith(", closed>")
    table.bucket_scanner(0).close()


async def test_every_call_of_a_closed_async_connection_is_refused(node: EmbeddedNode) -> None:
    db = await tidemill.connect_async(node.bootstrap_servers)
    table = await db.table("shop.orders")
    log = await db.create_table("shop.log", "id bigint", if_not_exists=True)
    await db.close()
    await db.close()
    assert repr(db).endswith(", closed>")
    assert public_methods(AsyncTidemill) == {*DATABASE_CALLS, "close"}
    for name, call in DATABASE_CALLS.items():
        with pytest.raises(ConnectionClosed, match="this connection is closed; open another one"):
            pytest.fail(f"{name} gave {await call(db)!r}")
    for name, call in TABLE_CALLS.items():
        with pytest.raises(ConnectionClosed, match="this connection is closed; open another one"):
            pytest.fail(f"{name} gave {await call(log if name == 'append' else table)!r}")
    for batches in (table.scan(), table.follow()):
        with pytest.raises(ConnectionClosed, match="this connection is closed; open another one"):
            await anext(aiter(batches))


async def test_a_call_under_way_is_told_of_the_close_whenever_it_comes(node: EmbeddedNode) -> None:
    for turns in range(0, 40, 3):
        db = await tidemill.connect_async(node.bootstrap_servers)
        table = await db.table("shop.orders")
        waiting = asyncio.ensure_future(anext(aiter(table.follow(snapshot=False))))
        for _ in range(turns):
            await asyncio.sleep(0)
        await db.close()
        with pytest.raises(ConnectionClosed, match="closed"):
            await waiting


def test_leaving_the_block_of_a_lease_after_the_close_is_fine(node: EmbeddedNode) -> None:
    db = tidemill.connect(node.bootstrap_servers)
    with db.table("shop.orders").lease() as lease:
        db.close()
    node.release_lease(lease.lease_id)


def test_a_lease_that_has_not_begun_says_so(node: EmbeddedNode) -> None:
    with pytest.raises(tidemill.TableError, match=r"has not begun: use it in a with statement"):
        _ = node.table("shop.orders").lease().lease_id


# --- another event loop


def test_a_connection_of_another_event_loop_is_refused(node: EmbeddedNode) -> None:
    loop = asyncio.new_event_loop()
    db = loop.run_until_complete(tidemill.connect_async(node.bootstrap_servers))
    table = loop.run_until_complete(db.table("shop.orders"))
    with pytest.raises(ConnectionClosed, match=r"another event loop \(each asyncio.run"):
        asyncio.run(table.lookup(1))
    assert loop.run_until_complete(table.lookup(1)) == ROWS[1]
    loop.run_until_complete(db.close())
    loop.close()


# --- forked processes


def in_a_fork(work: Callable[[], list[str]]) -> list[str]:
    """What ``work`` gives in a forked process, which must come to its end."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run() -> None:
        theirs.send(work())

    process = context.Process(target=run)
    process.start()
    try:
        assert ours.poll(SOON_SECONDS), "the forked process waits for ever"
        return list(ours.recv())
    finally:
        process.kill()
        process.join()


def refusals(calls: dict[str, Callable[[], Any]]) -> list[str]:
    said = []
    for name, call in calls.items():
        try:
            said.append(f"{name} gave {call()!r}")
        except ConnectionClosed as error:
            said.append(error.message)
    return said


@pytest.mark.parametrize("kind", ["connect", "open"])
def test_a_forked_process_is_told_to_open_a_connection_of_its_own(node: EmbeddedNode, kind: str) -> None:
    db = node if kind == "open" else tidemill.connect(node.bootstrap_servers)
    table = db.table("shop.orders")
    started = iter(table.scan(fetch_max_bytes=100))
    next(started)

    def child() -> list[str]:
        calls = {name: (lambda call=call: call(db)) for name, call in DATABASE_CALLS.items()}
        calls |= {
            name: (lambda call=call: call(table))
            for name, call in PLAIN_TABLE_CALLS.items()
            if name != "append"
        }
        said = refusals({**calls, "an iterator": lambda: next(started)})
        # The child leaves everything alone that is its parent's.
        db.close()
        gc.collect()
        return said

    said = in_a_fork(child)
    assert len(said) > 30
    own = f"tidemill.connect('{node.bootstrap_servers}')"
    for line in said:
        assert f"was opened by process {os.getpid()}; process " in line
        assert line.endswith(f"Open one of its own: {own}")
    # And the parent goes on.
    assert table.lookup(7) == ROWS[7]
    assert sum(batch.num_rows for batch in started) < len(ROWS)
    if db is not node:
        db.close()


def test_a_forked_process_with_a_connection_of_its_own_is_served(node: EmbeddedNode) -> None:
    def child() -> list[str]:
        with tidemill.connect(node.bootstrap_servers) as db:
            return [str(db.table("shop.orders").lookup(3))]

    assert in_a_fork(child) == [str(ROWS[3])]


async def test_a_forked_process_cannot_await_its_parents_connection(node: EmbeddedNode) -> None:
    db = await tidemill.connect_async(node.bootstrap_servers)
    table = await db.table("shop.orders")

    def child() -> list[str]:
        def call() -> Any:
            # On a thread of its own: the forked one has its parent's running loop.
            given: list[Any] = []

            async def ask() -> None:
                try:
                    given.append(await table.lookup(1))
                except ConnectionClosed as error:
                    given.append(error)
                await db.close()

            thread = threading.Thread(target=asyncio.run, args=(ask(),))
            thread.start()
            thread.join()
            if isinstance(given[0], ConnectionClosed):
                raise given[0]
            return given[0]

        return refusals({"lookup": call})

    (said,) = await asyncio.to_thread(in_a_fork, child)
    assert "Open one of its own" in said
    assert await table.lookup(1) == ROWS[1]
    await db.close()


# A child that leaves by the usual way runs what is registered for the end of a program.
FORKING = """
import os, sys, tidemill
from pathlib import Path

with tidemill.open({path!r}) as node:
    table = node.create_table("shop.orders", "id bigint", primary_key="id")
    table.upsert({{"id": 1}})
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        sys.exit(7)  # through the with statement, atexit and all
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    stays = os.fork()
    if stays == 0:
        os.close(write)
        os.read(read, 1)  # until the parent has ended
        os._exit(0)
    assert node.data_dir.is_dir()
    table.upsert({{"id": 2}})
    print(table.lookup(1), len(table))
if {path!r}:
    with tidemill.open({path!r}) as again:  # although a child has inherited the lock file
        print(again.table("shop.orders").lookup(2))
"""


@pytest.mark.parametrize("kept", [False, True])
def test_a_forked_process_takes_nothing_of_the_node_along(kept: bool, tmp_path: Path) -> None:
    program = FORKING.format(path=str(tmp_path / "data") if kept else None)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=SOON_SECONDS,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["{'id': 1} 2", *(["{'id': 2}"] if kept else [])]
    assert [path.name for path in tmp_path.iterdir()] == (["data"] if kept else [])


# --- pickles


def test_pickling_says_what_to_do_instead(node: EmbeddedNode) -> None:
    table = node.table("shop.orders")
    servers = node.bootstrap_servers
    opening = f"tidemill.connect('{servers}').table('shop.orders')"
    spark = f'spark.read.format("tidemill").option("servers", "{servers}").load("shop.orders")'
    for thing, instead in (
        (node, f"tidemill.connect('{servers}')"),
        (table, opening),
        (table, spark),
        (table.scan(), f"{opening}.scan()"),
        (table.follow(), f"{opening}.follow()"),
        (table.lease(), f"{opening}.scan(lease=lease_id)"),
        (table.bucket_scanner(0), "start_key=scanner.next_key"),
    ):
        with pytest.raises(TypeError) as caught:
            pickle.dumps(thing)
        assert instead in str(caught.value)
        assert str(caught.value).startswith(repr(thing))
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            copy.deepcopy(thing)


async def test_pickling_an_async_table_says_what_to_do_instead(node: EmbeddedNode) -> None:
    async with await tidemill.connect_async(node.bootstrap_servers) as db:
        table = await db.table("shop.orders")
        for thing in (db, table, table.scan(), table.follow(), table.lease(), table.bucket_scanner(0)):
            with pytest.raises(TypeError, match="cannot be pickled or copied: it belongs to a connection"):
                pickle.dumps(thing)


def test_what_a_table_gives_can_be_pickled(node: EmbeddedNode) -> None:
    table = node.table("shop.orders")
    given = (table.lookup(1), table.head(2), table.schema, table.stats(), node.tables())
    assert pickle.loads(pickle.dumps(given)) == given
