"""How fast a log is compacted, beside a plain copy of its bytes, and how much memory that takes."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.context import Bench
from bench.processes import run_json
from bench.report import Section
from bench.spread import Spread, number

__all__ = ("compaction",)

_SEED = 20_240_602
_KEYS_SHARE = 10
_RECORDS_PER_BATCH = 64
_COPY_BYTES = 1024 * 1024
_NOW_MS = 1_700_000_000_000


def compaction(bench: Bench) -> Section:
    """Logs of two lengths and three record sizes, all of them dirty, without a limit on the rate."""
    plan = bench.plan
    section = Section(
        "Compaction",
        (
            "log",
            "MB/s",
            "ratio to a plain copy",
            "records/s",
            "left of the bytes",
            "memory above the start MB",
        ),
        note=f"One record in {_KEYS_SHARE} is the last of its key; batches of {_RECORDS_PER_BATCH} records, "
        f"uncompressed, in segments of {plan.segment_bytes // 1_000_000} MB. All of the log is dirty: it is "
        "read twice, checked, written, synced and read back. The peer reads, writes and syncs the same bytes "
        "through the same Storage. No rate limit.",
    )
    for record_bytes in plan.record_bytes:
        for log_bytes in plan.compacted_bytes:
            found = []
            for turn in range(plan.rounds):
                bench.progress(
                    f"compaction: {log_bytes // 1_000_000:,} MB of {record_bytes} B, round {turn + 1}"
                )
                with bench.data_dir() as path:
                    found.append(
                        run_json(
                            bench.work,
                            "bench.compacting",
                            str(path),
                            log_bytes=log_bytes,
                            record_bytes=record_bytes,
                            segment_bytes=plan.segment_bytes,
                        )
                    )
            rate = Spread(one["bytes"] / one["compaction_seconds"] / 1e6 for one in found)
            copied = Spread(one["bytes"] / one["copy_seconds"] / 1e6 for one in found)
            section.add(
                f"{log_bytes // 1_000_000:,} MB of {record_bytes:,} B",
                rate,
                rate.over(copied),
                number(Spread(one["records"] / one["compaction_seconds"] for one in found).median),
                number(Spread(one["bytes_left"] / one["bytes"] for one in found).median),
                Spread(one["memory_mb"] for one in found),
            )
    return section


# --- the child


def _measure(directory: str, log_bytes: int, record_bytes: int, segment_bytes: int) -> dict[str, float]:
    import tidemill.log.compaction.batch_filter  # noqa: F401 - a node imports this once, with its first run
    from tidemill.config.topic import TopicConfig
    from tidemill.log.compaction.cleaner import CleaningRun
    from tidemill.log.compaction.runs import begin_swap, carry_swap, end_swap, order_cleaning
    from tidemill.log.pace import Pace
    from tidemill.log.recovery import open_log
    from tidemill.log.storage import LocalStorage
    from tidemill.records.batch import parse_header

    Path(directory).mkdir()
    storage = LocalStorage(directory)
    config = TopicConfig(cleanup_policy=frozenset({"compact"}), segment_bytes=segment_bytes)
    log, _ = open_log(storage, "log", config)
    for data in _batches(log_bytes, record_bytes):
        log.append(data, parse_header(data), 0, _NOW_MS)
    log.roll()
    job = log.begin_flush()
    assert job is not None
    job.run()
    log.finish_flush(job)
    size, records = log.size_bytes, log.end_offset
    copy_seconds = _copy(storage, [segment.log_path for segment in log.segments])
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak that /proc reports
    memory_before = _status_mb("VmRSS")
    started = time.perf_counter()
    complete = False
    while not complete:
        order = order_cleaning(log, _NOW_MS, high_watermark=log.durable_offset)
        assert order is not None
        run = CleaningRun(storage, order, map_bytes=64 * 1024 * 1024, pace=Pace())
        run.map_keys()
        while (cleaned := run.next()) is not None:
            begin_swap(log, cleaned)
            carry_swap(storage, log.directory, cleaned)
            for file in end_swap(log, cleaned):
                file.close()
        run.finish()
        log.first_dirty_offset = run.mapped_to
        complete = run.is_complete
    seconds = time.perf_counter() - started
    return {
        "bytes": size,
        "bytes_left": log.size_bytes,
        "records": records,
        "compaction_seconds": seconds,
        "copy_seconds": copy_seconds,
        "memory_mb": _status_mb("VmHWM") - memory_before,
    }


def _status_mb(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise SystemExit(f"/proc/self/status has no {name}")


def _batches(log_bytes: int, record_bytes: int) -> Iterator[bytes]:
    from tidemill.records.record import Record, build_batch

    choose = random.Random(_SEED)
    keys = max(1, log_bytes // record_bytes // _KEYS_SHARE)
    written = 0
    while written < log_bytes:
        records = []
        for _ in range(_RECORDS_PER_BATCH):
            key = f"customer-{choose.randrange(keys):012d}".encode()
            value = choose.randbytes(max(0, record_bytes - len(key)))
            records.append(Record(key, value, timestamp_ms=_NOW_MS))
        data = build_batch(records)
        written += len(data)
        yield data


def _copy(storage: object, paths: list[str]) -> float:
    from tidemill.log.storage import LocalStorage

    assert isinstance(storage, LocalStorage)
    started = time.perf_counter()
    for path in paths:
        source, target = storage.open(path), storage.open(f"{path}.copy", create=True)
        position = 0
        while data := source.read(position, _COPY_BYTES):
            target.write(position, [data])
            position += len(data)
        target.sync()
        source.close()
        target.close()
    seconds = time.perf_counter() - started
    for path in paths:
        storage.remove(f"{path}.copy")
    return seconds


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], **json.loads(sys.argv[2]))))
