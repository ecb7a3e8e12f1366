"""Workers: tasks a second, and for each second of processor time of the worker's process."""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from bench.context import Bench
from bench.processes import run_json
from bench.report import Aim, Section
from bench.spread import Spread, number

__all__ = ("workers",)

_TOPIC = "tasks"
_KEYS = 1_000
_TASK_BYTES = 100
_WANTED_PER_CORE = 5_000
#: How the handler is run: its kind, how many side by side, and options of the worker.
_KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "plain function, 1 thread": ("plain", 1, {}),
    "plain function, 16 threads": ("plain", 16, {}),
    "async function, 16 at a time": ("async", 16, {}),
    "plain function, 16 threads, order per key": ("plain", 16, {"order": "key"}),
    "for record in db.share": ("loop", 1, {}),
}


def workers(bench: Bench) -> Section:
    """Handlers that do nothing, so that the worker is what is measured."""
    section = Section(
        "Workers",
        ("handler", "tasks/s", "tasks per second of a core", "ratio to reading the same records"),
        note=f"Tasks of {_TASK_BYTES} bytes with {_KEYS:,} keys, one partition, each accepted. The node is a "
        "process of its own; the processor time is that of the worker's process, with fetching, decoding, "
        "threads and acknowledging. The peer is the Python client's own reader, which acknowledges nothing, "
        "in the same process.",
    )
    with bench.node() as node:
        found: dict[str, list[dict[str, float]]] = {name: [] for name in _KINDS}
        for _ in range(bench.plan.rounds):
            for name, (kind, concurrency, options) in _KINDS.items():
                bench.progress(f"workers: {name}")
                found[name].append(
                    run_json(
                        bench.work,
                        "bench.workers",
                        servers=node.bootstrap_servers,
                        count=bench.plan.worker_tasks,
                        kind=kind,
                        concurrency=concurrency,
                        options=options,
                    )
                )
    slowest = Spread([0.0])
    for name, rounds in found.items():
        per_core = Spread(one["per_core"] for one in rounds)
        if slowest.median == 0 or per_core.median < slowest.median:
            slowest = per_core
        section.add(
            name,
            Spread(one["rate"] for one in rounds),
            per_core,
            Spread(one["rate"] / one["reading_rate"] for one in rounds),
        )
    section.aims.append(
        Aim(
            "a worker's tasks for each second of a core",
            f"≥ {_WANTED_PER_CORE:,}",
            f"{number(slowest.median)} (the slowest kind of handler)",
            slowest.median >= _WANTED_PER_CORE,
        )
    )
    return section


# --- the child


def _measure(
    servers: str, count: int, kind: str, concurrency: int, options: dict[str, Any]
) -> dict[str, float]:
    import tidemill

    with tidemill.connect(servers) as db:
        topic = f"{_TOPIC}-{uuid.uuid4()}"
        value = bytes(_TASK_BYTES)
        db.produce_many(topic, ((f"key-{at % _KEYS}", value) for at in range(count)))
        reading_rate = _reading_rate(db, topic, count)
        done, seen = threading.Event(), 0

        def note() -> None:
            nonlocal seen
            seen += 1
            if seen == count:
                done.set()

        run: Callable[[], None]
        if kind == "loop":
            run = _loop(db, topic, note, done)
        else:
            run = _worker(db, topic, note, done, kind, concurrency, options)
        started, cpu = time.perf_counter(), time.process_time()
        run()
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {"rate": count / seconds, "per_core": count / cpu, "reading_rate": reading_rate}


def _worker(
    db: Any,
    topic: str,
    note: Callable[[], None],
    done: threading.Event,
    kind: str,
    concurrency: int,
    options: dict[str, Any],
) -> Callable[[], None]:
    def handle(record: Any) -> None:
        note()

    async def handle_async(record: Any) -> None:
        note()

    handler = handle_async if kind == "async" else handle
    worker = db.worker(topic, topic, handler, concurrency=concurrency, **options)

    def run() -> None:
        with worker:
            done.wait()

    return run


def _loop(db: Any, topic: str, note: Callable[[], None], done: threading.Event) -> Callable[[], None]:
    def run() -> None:
        for record in db.share(topic, topic):
            note()
            record.accept()
            if done.is_set():
                break

    return run


def _reading_rate(db: Any, topic: str, count: int) -> float:
    """Records a second of the client's own reader."""
    from tidemill.client.consuming.record_reader import RecordReader

    async def read() -> float:
        reader = RecordReader(db._awaited.cluster, {(topic, 0): 0}, committed=True)
        started, left = time.perf_counter(), count
        while left > 0:
            left -= len(await reader.poll())
        await reader.close()
        return count / (time.perf_counter() - started)

    rate: float = db.run(read())
    return rate


if __name__ == "__main__":
    print(json.dumps(_measure(**json.loads(sys.argv[1]))))
