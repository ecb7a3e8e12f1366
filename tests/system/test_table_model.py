"""Random stories of tables on a real node, against dicts: see ``support.table_story``.

``TABLE_STORY_SEEDS`` names seeds (``7,8,9``) or how many random ones (``x20``); ``TABLE_STORY_STEPS`` how
long each story is. A failure prints the seed and what has happened.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import tidemill
from support.processes import NodeProcess, wait_until
from support.table_damage import delete_everything, delete_live, flip_newest_snapshot, live_files
from support.table_story import SETTINGS, Story
from tidemill.client.sync_client import Tidemill
from tidemill.errors import TableCode, TableError

_STEPS = int(os.environ.get("TABLE_STORY_STEPS") or 30)


def _seeds() -> list[int]:
    text = os.environ.get("TABLE_STORY_SEEDS") or "1,2,3,4"
    if text.startswith("x"):
        return [random.randrange(2**32) for _ in range(int(text[1:]))]
    return [int(part) for part in text.split(",")]


@pytest.mark.parametrize("seed", _seeds())
def test_tables_equal_their_models_whatever_happens(tmp_path: Path, start_client: Any, seed: int) -> None:
    with (
        NodeProcess(tmp_path / "data", **SETTINGS) as node,
        tidemill.connect(node.bootstrap_servers) as db,
        tidemill.connect(node.bootstrap_servers) as reader,
    ):
        story = Story(seed, node, start_client("table_kafka", node), db, reader)
        try:
            story.tell(_STEPS)
        except BaseException:
            told = "\n".join(story.told)
            print(f"TABLE_STORY_SEEDS={seed} TABLE_STORY_STEPS={_STEPS}\n{told}\n{node.log_text()[-20_000:]}")  # noqa: T201
            raise


def big_rows(rng: random.Random, first: int, count: int) -> pa.Table:
    """Rows of a kilobyte that no compression makes smaller."""
    return pa.table(
        {
            "id": pa.array(range(first, first + count), pa.int64()),
            "n": pa.array([rng.randrange(1_000) for _ in range(count)], pa.int32()),
            "data": pa.array([rng.randbytes(1_000) for _ in range(count)], pa.binary()),
        }
    )


class BigTable:
    """A table of some ten megabytes on a node that has one for its cache and one for its writes."""

    def __init__(self, db: Tidemill, seed: int, rows: int, **options: Any) -> None:
        self.rng = random.Random(seed)
        self.table = db.create_table(
            "big.rows", "id bigint, n int, data binary", primary_key="id", buckets=2, **options
        )
        self.expected: dict[int, dict[str, Any]] = {}
        for first in range(0, rows, 2_000):
            self.upsert(first, 2_000)

    def upsert(self, first: int, count: int) -> None:
        rows = big_rows(self.rng, first, count)
        self.table.upsert(rows)
        self.expected |= {row["id"]: row for row in rows.to_pylist()}

    def delete(self, keys: Iterable[int]) -> None:
        keys = list(keys)
        self.table.delete(keys)
        for key in keys:
            self.expected.pop(key, None)

    def check(self) -> None:
        """Everything is there, whichever way it is asked for."""
        table, expected = self.table, self.expected
        keys = self.rng.sample(sorted(expected), 500)
        assert table.lookup(keys).to_pylist() == [expected[key] for key in keys]
        count = 0
        for batch in table.scan(fetch_max_bytes=300_000):
            count += batch.num_rows
            for row in batch.to_pylist():
                assert row == expected[row["id"]]
        assert count == len(expected)
        few = {key for key, row in expected.items() if row["n"] < 20}
        assert set(table.scan(columns=["id"], where="n < 20").to_arrow().column("id").to_pylist()) == few


def test_a_table_larger_than_memory_works(tmp_path: Path) -> None:
    settings = SETTINGS | {"kv_snapshot_log_bytes": 8 << 20}
    with NodeProcess(tmp_path / "data", **settings) as node, tidemill.connect(node.bootstrap_servers) as db:
        big = BigTable(db, 1, 24_000)
        big.delete(range(0, 24_000, 3))
        big.upsert(5_000, 2_000)
        big.check()
        assert sum(each.state_bytes for each in big.table.stats()) > 10 << 20
        node.kill()
        node.start()
        big.check()
        node.stop()
        for path in (node.data_dir / "kv").glob("*/live"):
            shutil.rmtree(path)
        node.start()
        big.check()


def damage_live_files(node: NodeProcess, rng: random.Random, *, first_part: float = 0.0) -> None:
    """Overwrite bytes here and there in every table file of the live states, under a node that runs.

    The metadata that every reader looks at is in the first part of a file; the rows are everywhere.
    """

    def damage() -> int:
        return sum(damage_file(path, rng, first_part) for path in live_files(node.data_dir / "kv", "*.sst"))

    # The node flushes and compacts as it likes: for a moment there may be none.
    wait_until(damage, "there is a table file to damage")


def damage_file(path: Path, rng: random.Random, first_part: float) -> bool:
    """Whether the file was still there, and had been written."""
    try:
        with path.open("r+b") as file:
            size = os.fstat(file.fileno()).st_size
            for _ in range(max(3, size // 20_000) if size else 0):
                file.seek(int(size * rng.uniform(first_part, 0.9)))
                file.write(rng.randbytes(4))
            return size > 0
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("reading", ["lookups", "scans", "writes"])
def test_damage_that_is_found_while_the_node_runs_is_repaired(tmp_path: Path, reading: str) -> None:
    """Table files are shared with the snapshots, so these are damaged too: the log has everything."""
    with NodeProcess(tmp_path / "data", **SETTINGS) as node, tidemill.connect(node.bootstrap_servers) as db:
        big = BigTable(db, 2, 6_000)
        big.table.create_snapshot()
        damage_live_files(node, big.rng)
        if reading == "lookups":
            for _ in range(10):
                keys = big.rng.sample(sorted(big.expected), 300)
                assert big.table.lookup(keys).to_pylist() == [big.expected[key] for key in keys]
        elif reading == "writes":
            for first in range(0, 6_000, 2_000):
                big.upsert(first, 2_000)
        assert big.table.scan().count() == len(big.expected)
        big.check()
        assert "is built again" in node.log_text()
        assert all(each.problem is None for each in big.table.stats())
        # It stays good, and so do its snapshots from now on.
        big.upsert(0, 100)
        big.table.create_snapshot()
        node.stop()
        for path in (node.data_dir / "kv").glob("*/live"):
            shutil.rmtree(path)
        node.start()
        big.check()


def test_a_snapshot_of_damaged_state_does_not_bring_the_damage_back(tmp_path: Path) -> None:
    """The snapshot's checksums are those of the damaged bytes: only reading the rows shows it."""
    settings = SETTINGS | {"kv_snapshot_log_bytes": 1 << 30}
    with NodeProcess(tmp_path / "data", **settings) as node, tidemill.connect(node.bootstrap_servers) as db:
        big = BigTable(db, 3, 6_000)
        damage_live_files(node, big.rng, first_part=0.3)
        assert len(big.table.create_snapshot()) == 2
        big.check()
        assert node.log_text().count("is built again") < 10
        assert all(each.problem is None for each in big.table.stats())
        big.table.create_snapshot()
        node.kill()
        node.start()
        big.check()


def test_old_records_of_a_log_go_only_when_snapshots_have_what_they_said(tmp_path: Path) -> None:
    """A table whose log is deleted rather than compacted: then the snapshots are part of the truth."""
    settings = SETTINGS | {"kv_snapshot_log_bytes": 1 << 30, "log_retention_check_interval_ms": 100}
    properties = {"cleanup.policy": "delete", "retention.ms": "1", "internal.segment.bytes": "100000"}
    with NodeProcess(tmp_path / "data", **settings) as node, tidemill.connect(node.bootstrap_servers) as db:
        big = BigTable(db, 4, 2_000, properties=properties)
        assert [each.log_start_offset for each in big.table.stats()] == [0, 0]
        for first in (500, 100):
            big.table.create_snapshot()
            big.upsert(first, 200)
            big.delete(range(first + 50))

        def oldest() -> list[int]:
            snapshots = big.table.snapshots()
            return [min(each.log_offset for each in snapshots if each.bucket == bucket) for bucket in (0, 1)]

        wait_until(lambda: all(each.log_start_offset > 0 for each in big.table.stats()), "deleted records")
        assert all(
            each.log_start_offset <= floor for each, floor in zip(big.table.stats(), oldest(), strict=True)
        )
        big.check()
        for damage in (delete_live, flip_newest_snapshot):
            node.kill()
            damage(big.rng, node.data_dir / "kv")
            node.start()
            big.check()
        node.kill()
        delete_everything(big.rng, node.data_dir / "kv")
        node.start()
        # What is gone is gone: better no answer than half of one.
        with pytest.raises(TableError, match="cannot be rebuilt") as caught:
            tidemill.connect(node.bootstrap_servers, timeout_ms=1_000).table("big.rows").lookup(1_999)
        assert caught.value.table_code == TableCode.state_damaged
        assert all("cannot be rebuilt" in (each.problem or "") for each in big.table.stats())
