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
    cluster,
    compacting,
    comparing,
    cursors,
    fetching,
    idle,
    latency,
    machine,
    rebalancing,
    share,
    spark,
    starting,
    tables,
    throughput,
    transactions,
    workers,
)
from bench.context import Bench
from bench.plan import FULL, QUICK, Plan
from bench.processes import ROOT
from bench.report import Section, as_markdown, replace_generated_part, rich_table

PAGE = ROOT / "docs" / "benchmarks.md"

#: All benchmarks by name, in the order of the page.
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
    "share": share.share,
    "share-costs": share.share_costs,
    "cursors": cursors.cursors,
    "cluster": cluster.cluster,
    "tables": tables.tables,
    "table-growth": tables.growth,
    "table-memory": tables.memory,
    "table-recovery": tables.recovery,
    "workers": workers.workers,
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
        plan = QUICK if options.quick else FULL
        if options.against:
            before = Path(options.against).absolute()
            runs: list[Callable[[Bench], Section]] = [
                lambda bench: comparing.compare(bench, before, 1 if options.quick else options.rounds)
            ]
        else:
            runs = [BENCHMARKS[name] for name in names]
        sections = _run(runs, plan, work, console)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    preamble.append(f"- the run took {time.perf_counter() - started:.0f} s")
    text = as_markdown(sections, preamble)
    print(text)
    if options.write:
        replace_generated_part(PAGE, text)
        console.print(f"wrote {PAGE.relative_to(ROOT)}")


def _run(runs: list[Callable[[Bench], Section]], plan: Plan, work: Path, console: Console) -> list[Section]:
    sections = []
    with console.status("") as status:
        bench = Bench(plan, work, status.update)
        bench.progress("a first start, which compiles the modules")
        with bench.node():
            pass
        for run in runs:
            section = run(bench)
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
    parser.add_argument(
        "--against",
        metavar="CHECKOUT",
        help="compare another checkout of Tidemill (before) with this one (after), in interleaved rounds",
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds of --against")
    parser.add_argument("--directory", help="where data is written: a directory on the disk to measure")
    options = parser.parse_args()
    if options.write and (options.quick or options.only or options.against):
        parser.error("--write takes a whole run: leave out --quick, --only and --against")
    if options.against and not (Path(options.against) / "bench").is_dir():
        parser.error(f"{options.against} is no checkout of Tidemill")
    return options


if __name__ == "__main__":
    main()
