"""What a node has loaded by the time it says that it is ready."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import tidemill
from support.processes import NodeProcess

ENGINES = {"numpy", "pyarrow", "rocksdict"}


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
