"""The benchmarks run, and every row of their tables is there. No time is asserted."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SPARK_CONF = ROOT / "tests" / "support" / "spark_conf"

HAS_ETCD = shutil.which("etcd") is not None

ROWS = {
    "Aims": 24 if HAS_ETCD else 21,
    "Produce": [f"1 KB, acks={acks}, {count}" for acks in ("1", "all") for count in (1, 16)]
    + ["the disk alone, 1 MB writes"],
    "Produce, with and without the checks of records": [
        *(
            f"{count} records of 1,000 B, {codec}: µs per batch"
            for codec in ("uncompressed", "lz4", "zstd")
            for count in ("1,000", "10")
        ),
        "produce 1,000 B: MB/s",
        "produce 1,000 B: node CPU s/GB",
    ],
    "Consume": ["1 KB, 1", "1 KB, 16"],
    "Latency": ["acks=1, p50", "acks=1, p99", "acks=all, p50", "acks=all, p99"],
    "Start": ["bare import done", "node takes connections", "first record acknowledged"],
    "Idle memory": ["no topics", "10 topics"],
    "Start with many partitions": ["0, never started", "20, orderly", "20, kill -9"],
    "Idle connections": ["0", "50"],
    "Fetch cost by log size": ["1 MB, 1 times", "5 MB, 5 times"],
    "Transactional produce": ["100"],
    "Reading committed data": [
        "read_committed, nothing aborted",
        "read_committed, half aborted",
        "read_uncommitted, half aborted",
    ],
    "Compaction": ["5 MB of 1,000 B"],
    "Rebalance when a member joins": ["classic, 2", "consumer, 2"],
    "Share groups": ["1", "1, accept each", "1, order per key"],
    "What share groups cost": [
        "backlog of 1,000",
        "accept each",
        "acknowledgement of one record",
        "memory per 1,000 in flight",
    ],
    "Cursors": [
        "raw consumer, records/s",
        "cursor, records/s",
        "ordered worker, in order, records/s",
        "ordered worker, 4 keys side by side, records/s",
        "1 % of the records, filtered in the client, records passed/s",
        "1 % of the records, cursor with a key prefix, records passed/s",
        *(f"backlog of {count}, µs per record" for count in ("500", "5,000", "50,000")),
        "append to handler of an ordered worker, ms p50",
        "append to handler of an ordered worker, ms p99",
        *(f"durable checkpoint, {where}, ms p50" for where in ("cluster", "file", "SQLite", "transaction")),
    ],
    "Cluster of three nodes": [
        "produce, acks=all: MB/s",
        "leader: CPU s/GB",
        "leader: CPU s/GB for each follower",
        "follower: CPU s/GB",
        "latency, p50 ms, 50 records/s",
        "latency, p99 ms, 50 records/s",
        "rolling restart, p50 ms",
        "rolling restart, p99 ms",
        "rolling restart, longest ms",
        "kill -9 to the first acknowledged record: s",
        "the same with confluent-kafka: s",
        "kill -9 to the first look-up: s",
        "a follower catches up: MB/s",
        "change of the controller, 100 partitions: s",
        "an idle node, 100 partitions: % of a CPU",
        "an idle node, 100 partitions: MB of memory",
    ]
    if HAS_ETCD
    else [],
    "Tables": [
        "RocksDB: write",
        "RocksDB, durable: write",
        "upsert, until it can be read",
        "upsert, until it is durable",
        "RocksDB: get 1,000 keys",
        "look-up of 1,000 keys",
        "look-up of one key",
        "RocksDB: iterate",
        "scan into columns",
    ],
    "Scans of growing tables": ["1,000"],
    "Memory of a scan": ["2,000 rows"],
    "Recovery of a table": ["live state", "snapshot", "the log alone"],
    "Workers": [
        "plain function, 1 thread",
        "plain function, 16 threads",
        "async function, 16 at a time",
        "plain function, 16 threads, order per key",
        "for record in db.share",
    ],
    "Spark: reading": [
        "table scan",
        "typed topic",
        "topic, Kafka's columns",
        "stream of a typed topic",
    ],
    "Spark: writing": ["append", "upsert"],
}


def test_a_quick_run_of_the_benchmarks_fills_every_row(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--quick", "--directory", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "SPARK_CONF_DIR": str(SPARK_CONF)},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    tables = _tables(done.stdout)
    assert list(tables) == list(ROWS)
    for title, wanted in ROWS.items():
        names = [row[0] for row in tables[title]]
        assert len(names) == wanted if isinstance(wanted, int) else names == wanted
    assert list(tmp_path.iterdir()) == [], "a run leaves nothing behind"


def test_two_checkouts_are_compared_measure_by_measure(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(ROOT)
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--quick", "--against", str(other), "--directory", str(work)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    rows = _tables(done.stdout)["Before and after"]
    names = " ".join(row[0] for row in rows)
    assert all(
        what in names for what in ("produce", "consume", "upsert", "look-up", "scan", "start", "memory")
    )
    for _, before, after, ratio in rows:
        assert all(float(cell.replace(",", "")) > 0 for cell in (before, after, ratio))
    assert list(work.iterdir()) == [], "a run leaves nothing behind"


def test_a_partial_run_does_not_replace_the_published_tables() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench", "--quick", "--write"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
    )

    assert done.returncode == 2
    assert "--write takes a whole run" in done.stderr


def _tables(markdown: str) -> dict[str, list[list[str]]]:
    """The cells of every table below its heading, without the two lines that head it."""
    found: dict[str, list[list[str]]] = {}
    for part in markdown.split("\n## ")[1:]:
        title, _, text = part.partition("\n")
        rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
        found[title] = rows[2:]
    return found
