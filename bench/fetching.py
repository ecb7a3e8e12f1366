"""Whether a fetch costs the same in a short and in a long log."""

from __future__ import annotations

import random
import time

from bench.context import Bench
from bench.processes import cpu_seconds
from bench.raw import RawClient, batch_of
from bench.report import Section
from bench.spread import Spread, number, percentile

__all__ = ("fetch",)

_RECORD_BYTES = 1_000
_RECORDS_PER_BATCH = 64
_FETCH_BYTES = 64 * 1024
_SEED = 20_240_601


def fetch(bench: Bench) -> Section:
    """Fetches at random offsets and at the end, from logs of growing length, in turns."""
    plan = bench.plan
    section = Section(
        "Fetch cost by log size",
        (
            "log",
            "random place µs, p50",
            "ratio to the shortest",
            "tail µs, p50",
            "ratio to the shortest",
            "node CPU µs per random fetch",
        ),
        note=f"One fetch of at most {_FETCH_BYTES // 1024} KB at a time over one connection, logs in the "
        f"page cache, in segments of {plan.segment_bytes // 1_000_000} MB. Flat means ratios near 1.",
    )
    with bench.node() as node:
        client = RawClient.of(node)
        ends = {}
        for size in plan.log_bytes:
            bench.progress(f"fetch: writing a log of {size // 1_000_000:,} MB")
            ends[size] = _fill(client, f"log-{size}", size, plan.segment_bytes)
        random_us: dict[int, list[float]] = {size: [] for size in ends}
        tail_us: dict[int, list[float]] = {size: [] for size in ends}
        node_us: dict[int, list[float]] = {size: [] for size in ends}
        choose = random.Random(_SEED)
        for turn in range(plan.rounds + 1):
            bench.progress(f"fetch: round {turn} of {plan.rounds}")
            for size, end in ends.items():
                topic = f"log-{size}"
                before = cpu_seconds(node.pid)
                places = [choose.randrange(end) for _ in range(plan.fetches)]
                at_random = _timed_us(client, topic, places)
                cpu_us = (cpu_seconds(node.pid) - before) / plan.fetches * 1e6
                at_tail = _timed_us(client, topic, [end - 1] * plan.fetches)
                if turn == 0:
                    continue  # the first round brings indexes and pages into memory
                random_us[size].append(percentile(at_random, 50))
                tail_us[size].append(percentile(at_tail, 50))
                node_us[size].append(cpu_us)
        client.close()
    shortest = plan.log_bytes[0]
    for size in ends:
        section.add(
            f"{size // 1_000_000:,} MB, {size // shortest} times",
            Spread(random_us[size]),
            Spread(random_us[size]).over(Spread(random_us[shortest])),
            Spread(tail_us[size]),
            Spread(tail_us[size]).over(Spread(tail_us[shortest])),
            number(Spread(node_us[size]).median),
        )
    return section


def _fill(client: RawClient, topic: str, size: int, segment_bytes: int) -> int:
    """Write ``size`` bytes; returns the end offset when all of it is readable."""
    client.create_topic(topic, 1, {"segment.bytes": str(segment_bytes)})
    batch = batch_of(_RECORD_BYTES, _RECORDS_PER_BATCH)
    for _ in range(size // len(batch)):
        client.produce(topic, range(1), batch, acks=0)
    client.produce(topic, range(1), batch, acks=-1)
    return client.end_offset(topic)


def _timed_us(client: RawClient, topic: str, offsets: list[int]) -> list[float]:
    found = []
    for offset in offsets:
        frame = client.fetch_frame(topic, offset, _FETCH_BYTES)
        started = time.perf_counter()
        client.exchange(frame)
        found.append((time.perf_counter() - started) * 1e6)
    return found
