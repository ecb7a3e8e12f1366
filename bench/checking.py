"""The cost of checking every record of a producer's batch, beside the same without the checks."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.context import Bench
from bench.launch import UNCHECKED_VARIABLE
from bench.load import partition_names
from bench.processes import NodeProcess, cpu_seconds, run_json
from bench.raw import RawClient
from bench.report import Section
from bench.spread import Spread, number

__all__ = ("checking",)

_SEED = 20_260_117
_BATCH_BYTES = 1_000_000
_SMALL_BATCH_RECORDS = 10
_NOW_MS = 1_700_000_000_000

_NOTE = (
    "The first rows are one process that prepares the same batch again and again, as a node does before it "
    "writes: header, size and checksum alone, and with every record looked at. Values differ in length, "
    "which is the dearer case. The last rows are the whole way of a producer with acks=all to one partition, "
    "to a node and to one from which the check was taken out, in turns."
)


def checking(bench: Bench) -> Section:
    """Batches of two sizes and several codecs, then produce with and without the checks."""
    section = Section(
        "Produce, with and without the checks of records",
        ("what", "without", "with", "ratio", "ns/record"),
        note=_NOTE,
    )
    for size in bench.plan.record_bytes:
        for codec in ("uncompressed", "lz4", "zstd"):
            for count in (_BATCH_BYTES // size, _SMALL_BATCH_RECORDS):
                bench.progress(f"checking: {count:,} records of {size} B, {codec}")
                result = run_json(
                    bench.work, "bench.checking", "prepare", size=size, codec=codec, count=count
                )
                section.add(
                    f"{count:,} records of {size:,} B, {codec}: µs per batch",
                    number(result["without"] * 1e6),
                    number(result["with"] * 1e6),
                    number(result["with"] / result["without"]),
                    number((result["with"] - result["without"]) / count * 1e9),
                )
    for size in bench.plan.record_bytes:
        bench.progress(f"checking: produce records of {size} B")
        _add_produce(bench, section, size)
    return section


def _add_produce(bench: Bench, section: Section, size: int) -> None:
    """Produce to a node and to one without the checks, in turns."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    cpu: dict[bool, list[float]] = {True: [], False: []}
    with (
        bench.data_dir() as first,
        bench.data_dir() as second,
        NodeProcess(bench.work, first) as checked,
        NodeProcess(bench.work, second, {UNCHECKED_VARIABLE: "1"}) as unchecked,
    ):
        nodes = {True: checked, False: unchecked}
        for node in nodes.values():
            node.wait_ready().close()
            client = RawClient.of(node)
            for topic in sorted({topic for topic, _ in partition_names("checking", 1)}):
                client.create_topic(topic, 1)
            client.close()
        for _ in range(bench.plan.rounds):
            for is_checked, node in nodes.items():
                before = cpu_seconds(node.pid)
                result = run_json(
                    bench.work,
                    "bench.load",
                    "produce",
                    servers=node.bootstrap_servers,
                    prefix="checking",
                    partitions=1,
                    record_bytes=size,
                    acks="all",
                    seconds=bench.plan.produce_seconds,
                )
                rates[is_checked].append(result["bytes"] / 1e6 / result["seconds"])
                cpu[is_checked].append((cpu_seconds(node.pid) - before) / (result["bytes"] / 1e9))
    with_checks, without = Spread(rates[True]), Spread(rates[False])
    section.add(f"produce {size:,} B: MB/s", without, with_checks, with_checks.over(without), "")
    with_checks, without = Spread(cpu[True]), Spread(cpu[False])
    section.add(f"produce {size:,} B: node CPU s/GB", without, with_checks, with_checks.over(without), "")


# --- in a process of its own


def _prepare(size: int, codec: str, count: int) -> dict[str, Any]:
    from tidemill.config.topic import TopicConfig
    from tidemill.log.incoming import prepare_batch
    from tidemill.records.compression import CODEC_NUMBERS
    from tidemill.records.record import Record, build_batch

    rng = random.Random(_SEED)
    records = [
        Record(b"%08d" % number, rng.randbytes(max(1, size - 24 + rng.randrange(16))), _NOW_MS + number % 50)
        for number in range(count)
    ]
    batch = build_batch(records, codec=CODEC_NUMBERS[codec])
    config = TopicConfig(max_message_bytes=1 << 30)
    return {
        "without": _seconds(lambda: prepare_batch(batch, config, _NOW_MS, records_checked=True)),
        "with": _seconds(lambda: prepare_batch(batch, config, _NOW_MS)),
    }


def _seconds(work: Callable[[], object]) -> float:
    """The shortest of a few times, of about a twentieth of a second each."""
    work()
    started = time.perf_counter()
    work()
    times = max(1, min(2_000, int(0.05 / max(time.perf_counter() - started, 1e-6))))
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(times):
            work()
        best = min(best, (time.perf_counter() - started) / times)
    return best


if __name__ == "__main__":
    print(json.dumps(_prepare(**json.loads(sys.argv[2]))))
