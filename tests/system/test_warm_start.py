"""What a node has loaded by the time it says that it is ready."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import tidemill
from support.processes import NodeProcess, process_environment

ENGINES = {"numpy", "pyarrow", "rocksdict"}
#: Modules and packages that an idle node without topics, which is alone, has no use for.
NOT_IDLE = (
    *ENGINES,
    "aetcd",
    "crc32c",
    "google.protobuf",
    "grpc",
    "pydantic",
    "re2",
    "rich",
    "sqlglot",
    "tidemill.client",
    "tidemill.cursors",
    "tidemill.groups.coordinator",
    "tidemill.groups.classic",
    "tidemill.groups.consumer",
    "tidemill.kv.rocks",
    "tidemill.log.offline",
    "tidemill.replication.fetching",
    "tidemill.server.cluster.membership",
    "tidemill.server.coordinators.persister",
    "tidemill.server.coordinators.transaction_partitions",
    "tidemill.server.handlers.cursors",
    "tidemill.server.handlers.groups",
    "tidemill.server.handlers.share",
    "tidemill.server.handlers.tables",
    "tidemill.server.handlers.transactions",
    "tidemill.server.share.node_share",
    "tidemill.server.tables.node_tables",
    "tidemill.share.partition",
    "tidemill.share.state",
    "tidemill.tables",
    "tidemill.transactions.coordinator",
    "tidemill.wire.cursors",
    "tidemill.wire.share",
    "tidemill.wire.tables",
)


def of(names: Iterable[str], modules: Iterable[str]) -> set[str]:
    """Those of the modules that have one of the names, or are in a package of that name."""
    return {each for each in modules if any(each == name or each.startswith(f"{name}.") for name in names)}


def test_an_idle_node_has_loaded_nothing_that_it_has_no_use_for(tmp_path: Path) -> None:
    with NodeProcess(tmp_path / "data") as node:
        assert of(NOT_IDLE, node.modules()) == set()
    ours = [name for name in NOT_IDLE if name.startswith("tidemill.")]
    assert [name for name in ours if find_spec(name) is None] == [], "a module has another name now"


#: ``tidemill``, which says at its end what it has loaded.
_UP = "import atexit, sys, tidemill.cli; atexit.register(lambda: print(*sys.modules)); tidemill.cli.main()"


@contextmanager
def _running(directory: Path) -> Iterator[tuple[str, list[str]]]:
    """The address of a node of the command line; behind the block, the names of what it had loaded."""
    loaded: list[str] = []
    arguments = ["up", "--data", str(directory / "data"), "--listen", "127.0.0.1:0", "--http", ""]
    with subprocess.Popen(
        [sys.executable, "-c", _UP, *arguments],
        stdout=subprocess.PIPE,
        env=process_environment(),
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        (address,) = [line.split()[-1] for line in takewhile(_is_not_last, lines) if "Kafka clients" in line]
        try:
            yield address, loaded
        finally:
            process.send_signal(signal.SIGTERM)
        *_, last = lines
        assert process.wait(120) == 0
        loaded += last.split()


def _is_not_last(line: str) -> bool:
    return "Ctrl-C stops it" not in line


def test_an_idle_node_of_the_command_line_has_loaded_neither_that_nor_more(tmp_path: Path) -> None:
    with _running(tmp_path) as (_, loaded):
        pass
    assert "tidemill.server.node" in loaded
    assert of((*NOT_IDLE, "argparse", "importlib.metadata", "starlette", "uvicorn"), loaded) == set()


def test_a_node_of_the_command_line_never_loads_pandas(tmp_path: Path) -> None:
    """pyarrow would do so while the first row is written: a third of a second, and 40 MB."""
    assert find_spec("pandas") is not None, "where it is not installed nothing is shown"
    with _running(tmp_path) as (address, loaded), tidemill.connect(address) as db:
        table = db.create_table("shop.orders", "id bigint, v string", primary_key="id")
        table.upsert([{"id": 1, "v": "a"}])
        assert table.lookup(1) == {"id": 1, "v": "a"}
        assert table.scan(where="v = 'a'").count() == 1
    assert set(loaded) >= ENGINES
    assert not of(["pandas.core"], loaded)


def test_what_groups_need_is_loaded_before_a_node_that_has_groups_is_ready(tmp_path: Path) -> None:
    coordinator = "tidemill.groups.coordinator"
    with NodeProcess(tmp_path / "data") as node:
        assert coordinator not in node.modules()
        with tidemill.connect(node.bootstrap_servers) as db, db.share("workers", "orders"):
            assert coordinator in node.modules(), "its first use has loaded it"
        node.stop()
        node.start()
        assert coordinator in node.modules()


def test_a_node_with_tables_has_loaded_what_their_first_use_needs_before_it_is_ready(tmp_path: Path) -> None:
    with NodeProcess(tmp_path / "data") as node:
        assert not node.modules() & ENGINES, "a node without tables starts without them"
        with tidemill.connect(node.bootstrap_servers) as db:
            table = db.create_table("shop.orders", "id bigint, v string", primary_key="id", buckets=2)
            table.upsert([{"id": 1, "v": "a"}])
        node.stop()
        node.start()
        loaded = node.modules()
        assert loaded >= ENGINES
        with tidemill.connect(node.bootstrap_servers) as db:
            table = db.table("shop.orders")
            table.upsert([{"id": 2, "v": "b"}])
            table.lookup([{"id": 1}])
            assert table.scan(where="v = 'b'").count() == 1
        assert node.modules() - loaded == set()


def test_the_first_page_of_metrics_loads_nothing_large(tmp_path: Path) -> None:
    """What is loaded then holds the event loop, and so everybody."""
    with NodeProcess(tmp_path / "data") as node:
        before = node.modules()
        with urllib.request.urlopen(f"{node.http_url}/metrics", timeout=120) as response:
            assert b"tidemill_" in response.read()
        loaded = node.modules() - before
        assert not [name for name in loaded if name.startswith("anyio")]
        assert len(loaded) < 20, loaded
