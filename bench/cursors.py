"""Cursors: drain rate against a raw consumer, a selective cursor, cost by backlog, wake-up, checkpoints."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import Any

from bench.context import Bench
from bench.report import Aim, Section
from bench.spread import Spread, percentile

__all__ = ("cursors",)

_RECORD_BYTES = 200
_RECORDS_PER_BATCH = 500
_SELECTIVE = 100
_WAKE_UPS = 200
_WAKE_UP_PAUSE_SECONDS = 0.01
_COMMITS = 100


def cursors(bench: Bench) -> Section:
    """Everything about cursors, on one node, raw consumer and cursor in turns."""
    import tidemill

    section = Section(
        "Cursors",
        ("what", "value", "ratio"),
        note=f"Records of {_RECORD_BYTES} bytes in batches of {_RECORDS_PER_BATCH}, one partition. The raw "
        "consumer is the Python client's own reader of committed records; both give objects, in turns.",
    )
    with bench.node() as node, tidemill.connect(f"127.0.0.1:{node.port}") as db:
        _drain(bench, section, db)
        _worker(bench, section, db)
        _selective(bench, section, db)
        _backlogs(bench, section, db)
        _wake_up(bench, section, db)
        _checkpoints(bench, section, db)
    return section


def _fill(db: Any, topic: str, count: int) -> None:
    from tidemill.client.admin.topics import create_topic
    from tidemill.client.producing.sender import Encoded, Sender
    from tidemill.records.record import Record, build_batch

    cluster = db._awaited.cluster
    db.run(create_topic(cluster, topic, partitions=1))
    value = bytes(_RECORD_BYTES)
    now_ms = int(time.time() * 1000)  # Retention deletes what is old.

    async def fill() -> None:
        sender = Sender(cluster)
        for first in range(0, count, _RECORDS_PER_BATCH):
            records = [
                Record(b"key-%03d" % (number % _SELECTIVE), value, now_ms)
                for number in range(first, first + _RECORDS_PER_BATCH)
            ]

            async def encode(stamp: Any, records: list[Record] = records) -> list[Encoded]:
                data = build_batch(
                    records,
                    producer_id=stamp.producer_id,
                    producer_epoch=stamp.producer_epoch,
                    base_sequence=stamp.base_sequence,
                )
                return [Encoded(data, len(records))]

            await sender.send((topic, 0), encode)

    db.run(fill())


def _raw_rate(db: Any, topic: str, count: int, keep: Callable[[Any], bool] | None = None) -> float:
    """Records a second of the client's own reader."""
    from tidemill.client.consuming.record_reader import RecordReader

    async def drain() -> float:
        reader = RecordReader(db._awaited.cluster, {(topic, 0): 0}, committed=True)
        started, seen = time.perf_counter(), 0
        while seen < count:
            messages = await reader.poll()
            seen += len(messages)
            if keep is not None:
                messages = [each for each in messages if keep(each.record)]
        await reader.close()
        return count / (time.perf_counter() - started)

    rate: float = db.run(drain())
    return rate


def _cursor_rate(db: Any, topic: str, count: int, expected: int | None = None, **region: Any) -> float:
    """Records of the log a second that a cursor gets through."""

    async def drain() -> float:
        # Opening it fetches already.
        started, seen = time.perf_counter(), 0
        cursor = await db._awaited.cursor(None, topic, **region)
        while seen < (count if expected is None else expected):
            seen += len(await cursor.poll_batch(1_000))
        seconds = time.perf_counter() - started
        await cursor.close()
        return count / seconds

    rate: float = db.run(drain())
    return rate


def _drain(bench: Bench, section: Section, db: Any) -> None:
    count = bench.plan.cursor_records
    bench.progress("cursors: drain rate")
    _fill(db, "drain", count)
    raw, cursor = [], []
    for turn in range(bench.plan.rounds + 1):
        found = _raw_rate(db, "drain", count), _cursor_rate(db, "drain", count)
        if turn:
            raw.append(found[0])
            cursor.append(found[1])
    ratio = Spread(cursor).median / Spread(raw).median
    section.add("raw consumer, records/s", Spread(raw), "1")
    section.add("cursor, records/s", Spread(cursor), f"{ratio:.2f}")
    section.aims.append(
        Aim("drain rate of a cursor", "≥ 0.6 of a raw consumer", f"{ratio:.2f}", ratio >= 0.6)
    )


def _worker_rate(db: Any, name: str, topic: str, count: int, concurrency: int) -> float:
    """Records a second of an ordered worker that stores its position in the cluster."""
    from tidemill import Action, Ordered

    left = count

    def handle(_: Any) -> Action | None:
        nonlocal left
        left -= 1
        return Action.STOP if not left else None

    worker = db.worker(name, topic, handle, ordered=Ordered(batch_size=1_000), concurrency=concurrency)
    started = time.perf_counter()
    worker.start()
    worker.join()
    return count / (time.perf_counter() - started)


def _worker(bench: Bench, section: Section, db: Any) -> None:
    count = bench.plan.cursor_records
    bench.progress("cursors: ordered workers")
    for concurrency in (1, 4):
        # Side by side every record is a hop to a thread and back: a tenth of them is enough.
        records = count if concurrency == 1 else count // 10
        raw, worker = [], []
        for turn in range(bench.plan.rounds + 1):
            found = (
                _raw_rate(db, "drain", records),
                _worker_rate(db, f"drain-{concurrency}-{turn}", "drain", records, concurrency),
            )
            if turn:
                raw.append(found[0])
                worker.append(found[1])
        ratio = Spread(worker).median / Spread(raw).median
        name = "in order" if concurrency == 1 else f"{concurrency} keys side by side"
        section.add(f"ordered worker, {name}, records/s", Spread(worker), f"{ratio:.2f}")
        if concurrency == 1:
            section.aims.append(
                Aim(
                    "drain rate of an ordered worker", "≥ 0.6 of a raw consumer", f"{ratio:.2f}", ratio >= 0.6
                )
            )


def _selective(bench: Bench, section: Section, db: Any) -> None:
    count = bench.plan.cursor_records
    bench.progress("cursors: a selective one")
    raw, cursor = [], []
    for turn in range(bench.plan.rounds + 1):
        client_side = _raw_rate(db, "drain", count, lambda record: record.key.startswith(b"key-007"))
        server_side = _cursor_rate(db, "drain", count, count // _SELECTIVE, key_prefix=b"key-007")
        if turn:
            raw.append(client_side)
            cursor.append(server_side)
    ratio = Spread(cursor).median / Spread(raw).median
    section.add("1 % of the records, filtered in the client, records passed/s", Spread(raw), "1")
    section.add(
        "1 % of the records, cursor with a key prefix, records passed/s", Spread(cursor), f"{ratio:.1f}"
    )
    section.aims.append(
        Aim("selective cursor (1 %)", "≥ 5 times filtering in the client", f"{ratio:.1f}", ratio >= 5)
    )


def _backlogs(bench: Bench, section: Section, db: Any) -> None:
    base = bench.plan.cursor_records // 100
    base -= base % _RECORDS_PER_BATCH
    base = max(base, _RECORDS_PER_BATCH)
    costs: dict[int, float] = {}
    for times in (1, 10, 100):
        count = base * times
        bench.progress(f"cursors: a backlog of {count:,}")
        _fill(db, f"backlog-{times}", count)
        rates = [_cursor_rate(db, f"backlog-{times}", count) for _ in range(bench.plan.rounds)]
        costs[times] = 1e6 / Spread(rates).median
        section.add(
            f"backlog of {count:,}, µs per record", f"{costs[times]:.2f}", f"{costs[times] / costs[1]:.2f}"
        )
    ratio = costs[100] / costs[1]
    section.aims.append(
        Aim(
            "cost per record of a cursor, 100 times the backlog",
            "≤ 1.5 times that of the small one",
            f"{ratio:.2f}",
            ratio <= 1.5,
        )
    )


def _wake_up(bench: Bench, section: Section, db: Any) -> None:
    """From an append to the handler of an ordered worker in another connection, which waits for it."""
    import tidemill
    from tidemill.client.admin.topics import create_topic
    from tidemill.client.producing.producer import Producer
    from tidemill.records.record import Record

    bench.progress("cursors: wake-up")
    cluster = db._awaited.cluster
    db.run(create_topic(cluster, "wake", partitions=1))
    sent: list[float] = []
    found: list[float] = []
    got = threading.Event()

    def handle(_: Any) -> None:
        found.append(time.perf_counter())
        got.set()

    async def send() -> None:
        async with Producer(cluster, linger_ms=0) as producer:
            for _ in range(_WAKE_UPS):
                # The worker has stored its position by then, and waits.
                await asyncio.sleep(_WAKE_UP_PAUSE_SECONDS)
                now_ms = int(time.time() * 1000)
                sent.append(time.perf_counter())
                await (await producer.send("wake", Record(None, b"x", now_ms)))
                await asyncio.to_thread(got.wait)
                got.clear()

    with (
        tidemill.connect(db.bootstrap_servers) as other,
        other.worker("wake", "wake", handle, ordered=True),
    ):
        db.run(send())
    waits_ms = [(end - start) * 1000 for start, end in zip(sent, found, strict=True)]
    section.add("append to handler of an ordered worker, ms p50", f"{percentile(waits_ms, 50):.2f}", "")
    section.add("append to handler of an ordered worker, ms p99", f"{percentile(waits_ms, 99):.2f}", "")


def _checkpoints(bench: Bench, section: Section, db: Any) -> None:
    import tidemill

    bench.progress("cursors: checkpoints")
    path = bench.work / "checkpoint"
    connection = sqlite3.connect(bench.work / "effects.db")
    kinds: dict[str, Any] = {
        "cluster": None,
        "file": path,
        "SQLite": connection,
        "transaction": tidemill.IN_TRANSACTION,
    }
    for kind, checkpoint in kinds.items():
        with db.cursor(f"cost-{kind}", "drain", checkpoint=checkpoint) as cursor:
            times_ms = []
            for _ in range(_COMMITS):
                if kind == "transaction":
                    transaction = cursor.transaction()
                    transaction.begin()
                cursor.poll()
                started = time.perf_counter()
                if kind == "SQLite":
                    connection.execute("BEGIN")
                    cursor.commit()
                    connection.commit()
                elif kind == "transaction":
                    transaction.end(commit=True)
                else:
                    cursor.commit()
                times_ms.append((time.perf_counter() - started) * 1000)
        section.add(f"durable checkpoint, {kind}, ms p50", f"{percentile(times_ms, 50):.2f}", "")
    connection.close()
