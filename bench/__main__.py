"""``python -m bench``: run the benchmarks, show the tables, and with ``--write`` put them into the docs."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from bench import (
    checking,
    compacting,
    fetching,
    idle,
    latency,
    machine,
    rebalancing,
    spark,
    starting,
    tables,
    throughput,
    transactions,
)
from bench.context import Bench
from bench.plan import FULL, QUICK, Plan
from bench.processes import ROOT
from bench.report import Section, as_markdown, replace_between_markers, rich_table

PAGE = ROOT / "docs" / "benchmarks.md"

#: What there is to run, in the order of the page.
BENCHMARKS: dict[str, Callable[[Bench], Section]] = {
    "produce": throughput.produce,
    "checks": checking.checking,
    "consume": throughput.consume,
    "latency": latency.latency,
    "start": starting.start,
    "memory": idle.memory,
    "partitions": starting.partitions,
    "connections": idle.connections,
    "fetch": fetching.fetch,
    "transactions": transactions.writing,
    "committed": transactions.reading,
    "compaction": compacting.compaction,
    "rebalance": rebalancing.rebalancing,
    "tables": tables.tables,
    "table-growth": tables.growth,
    "table-memory": tables.memory,
    "table-recovery": tables.recovery,
    "spark-read": spark.reading,
    "spark-write": spark.writing,
}


def main() -> None:
    options = _options()
    names = options.only or list(BENCHMARKS)
    command = " ".join(["python -m bench", *sys.argv[1:]])
    preamble = machine.describe(command)
    console = Console(stderr=True)
    work = Path(tempfile.mkdtemp(prefix="tidemill-bench-", dir=options.directory))
    started = time.perf_counter()
    try:
        sections = _run(names, QUICK if options.quick else FULL, work, console)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    preamble.append(f"- the run took {time.perf_counter() - started:.0f} s")
    text = as_markdown(sections, preamble)
    print(text)
    if options.write:
        replace_between_markers(PAGE, text)
        console.print(f"wrote {PAGE.relative_to(ROOT)}")


def _run(names: list[str], plan: Plan, work: Path, console: Console) -> list[Section]:
    sections = []
    with console.status("") as status:
        bench = Bench(plan, work, status.update)
        bench.progress("a first start, which compiles the modules")
        with bench.node():
            pass
        for name in names:
            section = BENCHMARKS[name](bench)
            sections.append(section)
            console.print(rich_table(section))
    return sections


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, one round: shows only that all of it works"
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=BENCHMARKS,
        metavar="NAME",
        help=f"one of: {', '.join(BENCHMARKS)}; may be repeated",
    )
    parser.add_argument(
        "--write", action="store_true", help="put the tables of a whole run into docs/benchmarks.md"
    )
    parser.add_argument("--directory", help="where data is written: a directory on the disk to measure")
    options = parser.parse_args()
    if options.write and (options.quick or options.only):
        parser.error("--write takes a whole run: leave out --quick and --only")
    return options


if __name__ == "__main__":
    main()
