"""Tables beside RocksDB itself: the same rows, written, looked up and read, through the same binding."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.context import Bench
from bench.launch import STALL, STALL_VARIABLE
from bench.processes import NodeProcess, memory_mb, run_json
from bench.report import Aim, Section
from bench.spread import Spread, number
from bench.table_rows import TABLE

__all__ = ("growth", "memory", "recovery", "tables")

_BUCKETS = 4
_LOOKUP_BATCH = 1_000
_WANTED_RATIO = 0.5
_WANTED_STALL_MS = 20


class _Stalls:
    """The longest time that the node's event loop was held up since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(STALL.pack(0.0, 0.0))

    def take_ms(self) -> tuple[float, float]:
        """By the clock, and the most processor time that the node used while it was held up once."""
        seconds, cpu_seconds = STALL.unpack(self.path.read_bytes())
        with self.path.open("r+b") as file:
            file.write(STALL.pack(0.0, 0.0))
        return seconds * 1000, cpu_seconds * 1000


@contextmanager
def _node(bench: Bench, path: Path) -> Iterator[tuple[NodeProcess, _Stalls]]:
    stalls = _Stalls(bench.work / "stalls")
    with NodeProcess(bench.work, path, {STALL_VARIABLE: str(stalls.path)}) as node:
        node.wait_ready().close()
        yield node, stalls


def _client(bench: Bench, what: str, node: NodeProcess, **options: object) -> dict[str, Any]:
    return run_json(bench.work, "bench.table_client", what, servers=node.bootstrap_servers, **options)


def tables(bench: Bench) -> Section:
    """Upserts, look-ups and scans from another process, beside RocksDB in one process."""
    plan = bench.plan
    section = Section(
        "Tables",
        (
            "what",
            "rows/s",
            "ratio to RocksDB",
            "MB/s",
            "p99 ms",
            "longest stall ms",
            "processor ms of a stall",
        ),
        note=f"{plan.table_rows:,} rows of five columns and about 110 bytes, {_BUCKETS} buckets. "
        "The client is a process of its own. RocksDB: one process, the same bytes through the same binding "
        "with the same options, write batches of 1,000 rows without a log, get of 1,000 keys at once, an "
        "iterator that keeps keys and values as objects. Upserts are durable (synced) and counted until "
        "they can be read; 'RocksDB, durable' writes its own log and syncs it for every batch. Stall: the "
        "longest time for which the node's event loop did not get its turn meanwhile, by the clock, and the "
        "most processor time that the whole node used during one such time. Where that is much less, it "
        "waited for a core or a disk.",
    )
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ("raw", "load", "lookup", "one", "scan")}
    stalls: dict[str, list[tuple[float, float]]] = {name: [] for name in found}
    for turn in range(plan.rounds):
        bench.progress(f"tables: round {turn + 1}")
        sizes = {"count": plan.table_rows, "lookups": plan.table_lookups, "batch": _LOOKUP_BATCH}
        with bench.data_dir() as path:
            path.mkdir()
            raw = run_json(bench.work, "bench.table_client", "raw", path=str(path / "raw"), **sizes)
            found["raw"].append(raw)
        with bench.data_dir() as path, _node(bench, path) as (node, stalled):
            # Not measured: what a node loads with its first table holds it up once.
            _client(bench, "load", node, count=100, buckets=1)
            for name, options in (
                ("load", {"count": plan.table_rows, "buckets": _BUCKETS}),
                ("lookup", sizes),
                ("one", sizes | {"lookups": plan.table_lookups // 50, "batch": 1}),
                ("scan", {}),
            ):
                stalled.take_ms()
                what = "lookup" if name == "one" else name
                found[name].append(_client(bench, what, node, **options))
                stalls[name].append(stalled.take_ms())
    spreads = {
        name: (Spread(stall for stall, _ in each), Spread(cpu for _, cpu in each))
        for name, each in stalls.items()
        if each
    }
    _add_rows(section, bench, found, spreads)
    return section


def _add_rows(
    section: Section,
    bench: Bench,
    found: dict[str, list[dict[str, Any]]],
    stalls: dict[str, tuple[Spread, Spread]],
) -> None:
    plan = bench.plan

    def rate(name: str, seconds: str, count: int) -> Spread:
        return Spread(count / each[seconds] for each in found[name])

    rows, lookups = plan.table_rows, plan.table_lookups
    raw_write, raw_lookup = rate("raw", "write_s", rows), rate("raw", "lookup_s", lookups)
    raw_iterate = rate("raw", "iterate_s", rows)
    durable = rate("raw", "write_durable_s", rows)
    upsert, scan = rate("load", "readable_s", rows), rate("scan", "seconds", rows)
    lookup = rate("lookup", "seconds", lookups)
    one = rate("one", "seconds", lookups // 50)
    megabytes = Spread(each["bytes"] / 1e6 / each["seconds"] for each in found["scan"])
    p99, p99_one = (Spread(each["p99_s"] * 1000 for each in found[name]) for name in ("lookup", "one"))
    section.add("RocksDB: write", raw_write, "1", "", "", "", "")
    section.add("RocksDB, durable: write", durable, durable.over(raw_write), "", "", "", "")
    section.add("upsert, until it can be read", upsert, upsert.over(raw_write), "", "", *stalls["load"])
    section.add("upsert, until it is durable", rate("load", "durable_s", rows), "", "", "", "", "")
    section.add("RocksDB: get 1,000 keys", raw_lookup, "1", "", "", "", "")
    section.add("look-up of 1,000 keys", lookup, lookup.over(raw_lookup), "", p99, *stalls["lookup"])
    section.add("look-up of one key", one, "", "", p99_one, *stalls["one"])
    section.add("RocksDB: iterate", raw_iterate, "1", "", "", "", "")
    section.add("scan into columns", scan, scan.over(raw_iterate), megabytes, "", *stalls["scan"])
    for what, ratio in (
        ("upserts, ratio to RocksDB's writes", upsert.over(raw_write)),
        ("batched look-ups, ratio to RocksDB's", lookup.over(raw_lookup)),
        ("typed scan, ratio to RocksDB's iteration", scan.over(raw_iterate)),
    ):
        section.aims.append(Aim(what, f"≥ {_WANTED_RATIO}", str(ratio), ratio.median >= _WANTED_RATIO))
    worst = max(stall.median for stall, _ in stalls.values())
    section.aims.append(
        Aim(
            "longest stall of the event loop meanwhile",
            f"< {_WANTED_STALL_MS} ms",
            f"{worst:.0f} ms",
            worst < _WANTED_STALL_MS,
        )
    )


def growth(bench: Bench) -> Section:
    """Scans of tables of growing size: the time per row and the time to the first one."""
    section = Section(
        "Scans of growing tables",
        ("rows", "seconds", "µs per row", "first batch ms"),
        note="Linear if the third column stays what it is; the last one must not depend on the size.",
    )
    for count in bench.plan.table_growth_rows:
        bench.progress(f"table growth: {count:,} rows")
        with bench.data_dir() as path, _node(bench, path) as (node, _):
            _client(bench, "load", node, count=count, buckets=_BUCKETS)
            rounds = [_client(bench, "scan", node) for _ in range(bench.plan.rounds)]
        seconds = Spread(each["seconds"] for each in rounds)
        per_row = Spread(each["seconds"] / count * 1e6 for each in rounds)
        section.add(f"{count:,}", seconds, per_row, Spread(each["first_s"] * 1000 for each in rounds))
    return section


def memory(bench: Bench) -> Section:
    """Memory of client and node while a large table is scanned."""
    section = Section(
        "Memory of a scan",
        ("table", "MB of rows", "client grew by MB", "node before MB", "node after MB"),
        note="The client reads batches of at most 4 MiB and keeps none. One bucket.",
    )
    for count in bench.plan.table_memory_rows:
        bench.progress(f"table memory: {count:,} rows")
        with bench.data_dir() as path, _node(bench, path) as (node, _):
            _client(bench, "load", node, count=count, buckets=1)
            # The first scan fills the block cache, which has a size of its own.
            _client(bench, "scan", node)
            before, _ = memory_mb(node.pid)
            read = _client(bench, "scan", node)
            after, _ = memory_mb(node.pid)
        section.add(
            f"{count:,} rows",
            number(read["bytes"] / 1e6),
            number(read["grown_mb"]),
            number(before),
            number(after),
        )
    return section


def recovery(bench: Bench) -> Section:
    """From kill -9 to the first row: with the live state, a snapshot only, nothing but the log."""
    count = bench.plan.table_rows
    section = Section(
        "Recovery of a table",
        ("state on disk", "seconds to the first row", "µs per row"),
        note=f"{count:,} rows in one bucket; from the node's start, process included, to the first look-up.",
    )
    with bench.data_dir() as path:
        bench.progress("table recovery")
        with _node(bench, path) as (node, _):
            _client(bench, "load", node, count=count, buckets=1)
            _snapshot(node)
            node.kill()
        for what, remove in (
            ("live state", ()),
            ("snapshot", ("live",)),
            ("the log alone", ("live", "snapshots")),
        ):
            for directory in (path / "kv").glob("*"):
                for name in remove:
                    shutil.rmtree(directory / name, ignore_errors=True)
            started = time.perf_counter()
            with NodeProcess(bench.work, path) as node:
                node.wait_ready().close()
                _client(bench, "first-row", node)
                seconds = time.perf_counter() - started
                node.kill()
            section.add(what, number(seconds), number(seconds / count * 1e6))
    return section


def _snapshot(node: NodeProcess) -> None:
    import tidemill

    with tidemill.connect(node.bootstrap_servers) as db:
        db.table(TABLE).create_snapshot()
