"""Spark through Tidemill's source and sink, beside what Spark and the client can do at most."""

from __future__ import annotations

from typing import Any

from bench.context import Bench
from bench.processes import run_json
from bench.report import Aim, Section
from bench.spread import Spread

__all__ = ("reading", "writing")

_WANTED_READING = 0.6
_WANTED_WRITING = 0.8
_COLUMNS = ("what", "rows", "tasks", "rows/s", "MB/s")


def reading(bench: Bench) -> Section:
    """Batch and stream reads beside a source that has the same batches in memory."""
    section = Section(
        "Spark: reading",
        (*_COLUMNS, "ceiling rows/s", "ratio"),
        note="Rows of five columns and about 110 bytes, from a node in a process of its own on the same "
        "machine, read by one local Spark into its noop sink; the clock runs from the call to its end, with "
        "planning. The ceiling is a Python data source whose workers have the same batches in memory, with "
        "as many tasks. A table has a bucket for every task. MB are those of the Arrow batches. Stream: a "
        "query with AvailableNow, from its start to its end.",
    )
    measured = _run(bench, "read")
    _add_rows(section, measured)
    _add_aims(section, measured, "reads", "the ceiling", _WANTED_READING)
    return section


def writing(bench: Bench) -> Section:
    """Appends and upserts beside the client's."""
    section = Section(
        "Spark: writing",
        (*_COLUMNS, "client rows/s", "ratio", "Spark alone rows/s"),
        note="The same rows, from the source that has them in memory, exactly once into an empty table of at "
        "least four buckets. The client: one process that has the rows in memory and calls append or upsert "
        "with up to 300,000 of them. Both until all rows are durable, and upserts until they can be read. "
        "Spark alone: the same rows into a Python sink that keeps none of them.",
    )
    measured = _run(bench, "write")
    _add_rows(section, measured)
    _add_aims(section, measured, "writes", "the client", _WANTED_WRITING)
    return section


def _run(bench: Bench, what: str) -> list[dict[str, Any]]:
    plan = bench.plan
    bench.progress(f"spark: {what}")
    with bench.node() as node, bench.data_dir() as work:
        work.mkdir()
        found = run_json(
            bench.work,
            "bench.spark_client",
            what,
            servers=node.bootstrap_servers,
            directory=str(work),
            counts=plan.spark_rows,
            tasks=plan.spark_tasks,
            rounds=plan.rounds,
            warm_up=plan.spark_warm_up,
        )
    measured: list[dict[str, Any]] = found["measured"]
    return measured


def _rates(each: dict[str, Any], side: str) -> Spread:
    return Spread(each["rows"] / seconds for seconds in each[side])


def _add_rows(section: Section, measured: list[dict[str, Any]]) -> None:
    for each in measured:
        ours, peer = _rates(each, "ours"), _rates(each, "peer")
        megabytes = Spread(each["bytes"] / 1e6 / seconds for seconds in each["ours"])
        cells = [each["what"], f"{each['rows']:,}", each["tasks"], ours, megabytes, peer, ours.over(peer)]
        section.add(*cells, *([_rates(each, "alone")] if "alone" in each else []))


def _add_aims(section: Section, measured: list[dict[str, Any]], verb: str, peer: str, wanted: float) -> None:
    """Add the aims, for the largest size only: there the start of a query counts least."""
    most = max(each["rows"] for each in measured)
    for each in measured:
        if each["rows"] == most:
            ratio = _rates(each, "ours").over(_rates(each, "peer"))
            what = f"Spark {verb}, {each['what']}: ratio to {peer}"
            section.aims.append(Aim(what, f"≥ {wanted}", str(ratio), ratio.median >= wanted))
