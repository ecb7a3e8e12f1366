"""Two checkouts side by side: the same work for each, round by round in turns, on one machine.

``python -m bench --against CHECKOUT`` compares the code in CHECKOUT (before) with this one (after). Each side
runs its own node and its own clients. The order within a round changes from round to round, so that neither
side always comes first.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from bench.context import Bench
from bench.load import PARTITIONS_PER_TOPIC, partition_names
from bench.processes import ROOT, NodeProcess, cpu_seconds, memory_mb, run_json
from bench.raw import RawClient
from bench.report import Section
from bench.spread import Spread

__all__ = ("compare",)

#: (record bytes, partitions) of what is produced and consumed.
_LOADS = ((100, 1), (1_000, 1), (1_000, 16))
_BUCKETS = 4
_LOOKUP_BATCH = 1_000
_IDLE_SECONDS = 1.0


class _Measure(NamedTuple):
    """A measure: a rate, of which more is better, or a cost, of which less is better."""

    name: str
    is_cost: bool = False


#: The results of one side in one round.
_Results = dict[_Measure, float]


def compare(bench: Bench, before: Path, rounds: int) -> Section:
    """Every measure of both sides, and the ratios of the rounds: above 1, this checkout is the better one."""
    section = Section(
        "Before and after",
        ("what", "before", "after", "ratio, of which more is better"),
        note=f"{rounds} rounds in turns. A ratio is that of one round, after to before for rates, before to "
        "after for costs; the median speaks, the extremes say how far to trust it.",
    )
    for work in (_Kafka(bench), _Tables(bench), _Starts(bench)):
        found: dict[Path, list[_Results]] = {before: [], ROOT: []}
        with ExitStack() as stack:
            runs = {root: work.open(stack, root) for root in found}
            for turn in range(rounds):
                for root in (before, ROOT) if turn % 2 == 0 else (ROOT, before):
                    bench.progress(f"{work.name}: round {turn + 1} of {rounds}, {root.name}")
                    found[root].append(runs[root]())
        _add(section, found[before], found[ROOT])
    return section


def _add(section: Section, before: list[_Results], after: list[_Results]) -> None:
    for measure in before[0]:
        was, now = (Spread(found[measure] for found in side) for side in (before, after))
        section.add(measure.name, was, now, was.over(now) if measure.is_cost else now.over(was))


class _Kafka:
    """Produce and consume with librdkafka, on a node that lives through all rounds."""

    name = "produce and consume"

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def open(self, stack: ExitStack, root: Path) -> Callable[[], _Results]:
        path = stack.enter_context(self._bench.data_dir())
        node = stack.enter_context(NodeProcess(self._bench.work, path, root=root))
        client = RawClient.of(node)
        numbers = iter(range(1_000_000))

        def run() -> _Results:
            found: _Results = {}
            for record_bytes, partitions in _LOADS:
                prefix = f"compare-{next(numbers)}"
                for topic in sorted({topic for topic, _ in partition_names(prefix, partitions)}):
                    client.create_topic(topic, PARTITIONS_PER_TOPIC)
                read = {"prefix": prefix, "partitions": partitions, "record_bytes": record_bytes}
                write = read | {"acks": "all", "seconds": self._bench.plan.produce_seconds}
                for job, options in (("produce", write), ("consume", read)):
                    found |= self._one(node, root, job, options)
            return found

        return run

    def _one(self, node: NodeProcess, root: Path, job: str, options: dict[str, Any]) -> _Results:
        spent = cpu_seconds(node.pid)
        result = run_json(
            self._bench.work, "bench.load", job, root=root, servers=node.bootstrap_servers, **options
        )
        spent = cpu_seconds(node.pid) - spent
        name = f"{job}, {options['record_bytes']} B, {options['partitions']} partitions"
        return {
            _Measure(f"{name}: MB/s"): result["bytes"] / 1e6 / result["seconds"],
            _Measure(f"{name}: node CPU s/GB", is_cost=True): spent / result["bytes"] * 1e9,
        }


class _Tables:
    """Upserts, look-ups and scans with Tidemill's client, on a fresh node in every round."""

    name = "tables"

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def open(self, stack: ExitStack, root: Path) -> Callable[[], _Results]:
        return lambda: self._run(root)

    def _run(self, root: Path) -> _Results:
        plan, work = self._bench.plan, self._bench.work
        lookups = plan.table_lookups
        with self._bench.data_dir() as path, NodeProcess(work, path, root=root) as node:
            node.wait_ready().close()

            def client(what: str, **options: object) -> dict[str, Any]:
                return run_json(
                    work, "bench.table_client", what, root=root, servers=node.bootstrap_servers, **options
                )

            # Not measured: what a node loads with its first table.
            client("load", count=100, buckets=1)
            load = client("load", count=plan.table_rows, buckets=_BUCKETS)
            many = client("lookup", count=plan.table_rows, lookups=lookups, batch=_LOOKUP_BATCH)
            one = client("lookup", count=plan.table_rows, lookups=lookups // 50, batch=1)
            scan = client("scan")
        return {
            _Measure("upsert, until it can be read: rows/s"): plan.table_rows / load["readable_s"],
            _Measure("upsert, until it is durable: rows/s"): plan.table_rows / load["durable_s"],
            _Measure("look-up of 1,000 keys: rows/s"): lookups / many["seconds"],
            _Measure("look-up of one key: rows/s"): lookups // 50 / one["seconds"],
            _Measure("scan: rows/s"): plan.table_rows / scan["seconds"],
        }


class _Starts:
    """The time to the first connection, and the memory of an idle node."""

    name = "start and idle memory"

    def __init__(self, bench: Bench) -> None:
        self._bench = bench

    def open(self, stack: ExitStack, root: Path) -> Callable[[], _Results]:
        self._run(root)  # once without counting, so that compiled modules are there
        return lambda: self._run(root)

    def _run(self, root: Path) -> _Results:
        with self._bench.data_dir() as path, NodeProcess(self._bench.work, path, root=root) as node:
            node.wait_ready().close()
            started = time.perf_counter() - node.spawned_at
            time.sleep(_IDLE_SECONDS)
            resident, _ = memory_mb(node.pid)
        return {
            _Measure("start until it takes connections: ms", is_cost=True): started * 1000,
            _Measure("idle memory: RSS MB", is_cost=True): resident,
        }
