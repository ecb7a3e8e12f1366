"""The child process of the Spark benchmarks: ``python -m bench.spark_client WHAT OPTIONS-AS-JSON``.

One local session does all of it. Every measurement takes both sides in turn, round by round, after both have
run once if the plan has a warm-up. A read ends in Spark's ``noop`` sink, which takes all columns of all rows.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

import tidemill
from bench.processes import ROOT, run_json
from bench.spark_memory import BATCH_ROWS, FORMAT, MemorySource, row_batches, save_sample
from bench.table_rows import COLUMNS, rows

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: Rows that the client sends in one call: more would only need more memory.
_CALL_ROWS = 300_000
_WARM_UP_ROWS = 1_000


class _World:
    """The session, the node, and the measurements of a run."""

    def __init__(self, servers: str, directory: str, tasks_max: int, rounds: int, warm_up: bool) -> None:
        self.servers = servers
        self.work = Path(directory)
        self.rounds = rounds
        self.warm_up = warm_up
        self.measured: list[dict[str, Any]] = []
        self.spark = _session(self.work, tasks_max)
        self.spark.dataSource.register(MemorySource)
        self.sample = str(self.work / "sample.arrow")
        save_sample(self.sample, _row_sample())

    def read(self, name: str | None = None, **options: str) -> DataFrame:
        return self.spark.read.format("tidemill").options(servers=self.servers, **options).load(name)

    def memory(self, reader: Any, schema: Any, sample: str, count: int, tasks: int, **options: object) -> Any:
        """The ceiling's rows, through ``spark.read`` or ``spark.readStream``."""
        options |= {"sample": sample, "rows": count, "tasks": tasks}
        return reader.format(FORMAT).schema(schema).options(**options).load()

    def compare(
        self, what: str, count: int, tasks: int, size_bytes: int, **sides: Callable[[int], Any]
    ) -> None:
        """Run the sides in turn; each is told the number of its run, and run 0 is not counted."""
        taken: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(0 if self.warm_up else 1, self.rounds + 1):
            for name, side in sides.items():
                seconds = _timed(lambda side=side, turn=turn: side(turn))
                if turn:
                    taken[name].append(seconds)
        self.measured.append({"what": what, "rows": count, "tasks": tasks, "bytes": size_bytes, **taken})


def _timed(call: Callable[[], Any]) -> float:
    """The seconds that a call took; or its result, if it measures itself."""
    started = time.perf_counter()
    said = call()
    return said if isinstance(said, float) else time.perf_counter() - started


def _session(work: Path, tasks_max: int) -> SparkSession:
    from tidemill.spark import session

    # The workers import the source above by its name.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return session(
        "bench",
        master=f"local[{tasks_max}]",
        conf={
            "spark.local.dir": str(work),
            "spark.sql.warehouse.dir": str(work / "warehouse"),
            "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={work}",
        },
    )


def _row_sample() -> pa.RecordBatch:
    return rows(BATCH_ROWS).combine_chunks().to_batches()[0]


def _noop(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


# --- reading


def read(
    servers: str, directory: str, counts: list[int], tasks: list[int], rounds: int, warm_up: bool
) -> dict[str, Any]:
    """Tables, typed topics, Kafka's columns and streams, each beside the ceiling."""
    world = _World(servers, directory, max(tasks), rounds, warm_up)
    most = max(tasks)
    shapes = [(counts[0], number) for number in tasks] + [(count, most) for count in counts[1:]]
    for count, number in shapes:
        table, log = f"bench.table_{count}_{number}", f"bench.log_{count}_{number}"
        _load(world, table, log, count, number)
        _read_both(world, "table scan", partial(world.read, table), count, number)
        _read_both(world, "typed topic", partial(world.read, log), count, number)
        if (count, number) == shapes[-1]:
            _read_both(world, "topic, Kafka's columns", partial(world.read, topic=log), count, number)
            _stream_both(world, log, count, number)
    world.spark.stop()
    return {"measured": world.measured}


def _load(world: _World, table: str, log: str, count: int, buckets: int) -> None:
    with tidemill.connect(world.servers) as db:
        keyed = db.create_table(table, COLUMNS, primary_key=["id"], buckets=buckets)
        plain = db.create_table(log, COLUMNS, buckets=buckets)
        for rows_ in _calls(world.sample, count):
            keyed.upsert(rows_)
            plain.append(rows_)
        # Waits for the fold, which would otherwise be counted as reading.
        keyed.scan(limit=1).to_arrow()


def _calls(sample: str, count: int) -> Iterator[pa.Table]:
    for first in range(0, count, _CALL_ROWS):
        part = row_batches(sample, first, min(_CALL_ROWS, count - first), distinct=True)
        yield pa.Table.from_batches(list(part))


def _read_both(world: _World, what: str, make: Callable[[], DataFrame], count: int, tasks: int) -> None:
    """Compare batch reads with the ceiling, which gives the frame's own rows."""
    frame = make()
    sample, schema = _take_sample(world, frame), frame.schema
    world.compare(
        what,
        count,
        tasks,
        _size(sample, count),
        ours=lambda _: _noop(make()),
        peer=lambda _: _noop(world.memory(world.spark.read, schema, sample, count, tasks)),
    )


def _take_sample(world: _World, frame: DataFrame) -> str:
    path = str(world.work / f"sample-{len(world.measured)}.arrow")
    save_sample(path, frame.limit(BATCH_ROWS).toArrow().combine_chunks().to_batches()[0])
    return path


def _size(sample: str, count: int) -> int:
    batch = next(row_batches(sample, 0, BATCH_ROWS, distinct=False))
    return batch.nbytes * count // batch.num_rows


def _stream_both(world: _World, log: str, count: int, tasks: int) -> None:
    reading = world.spark.readStream
    frame = reading.format("tidemill").option("servers", world.servers)
    frame = frame.option("startingOffsets", "earliest")
    schema = frame.load(log).schema
    sample = _take_sample(world, world.read(log))
    ceiling = partial(world.memory, world.spark.readStream, schema, sample, count, tasks)
    world.compare(
        "stream of a typed topic",
        count,
        tasks,
        _size(sample, count),
        ours=lambda turn: _drain(world, frame.load(log), f"ours-{turn}", count),
        peer=lambda turn: _drain(world, ceiling(), f"peer-{turn}", count),
    )


def _drain(world: _World, stream: DataFrame, name: str, count: int) -> None:
    """Run a streaming query over all rows, from its start to its end."""
    query = (
        stream.writeStream.format("noop")
        .option("checkpointLocation", str(world.work / f"checkpoint-{name}"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    read_rows = sum(progress["numInputRows"] for progress in query.recentProgress)
    assert read_rows == count, f"{read_rows} of {count} rows"


# --- writing


def write(
    servers: str, directory: str, counts: list[int], tasks: list[int], rounds: int, warm_up: bool
) -> dict[str, Any]:
    """Appends and upserts from Spark, beside the same rows from the client in one process."""
    world = _World(servers, directory, max(tasks), rounds, warm_up)
    most = max(tasks)
    shapes = [(counts[0], number, rounds) for number in tasks] + [(count, most, 1) for count in counts[1:]]
    for count, number, turns in shapes:
        world.rounds = turns
        for what in ("append", "upsert"):
            _write_both(world, what, count, number)
    world.spark.stop()
    return {"measured": world.measured}


def _write_both(world: _World, what: str, count: int, tasks: int) -> None:
    schema = "id bigint, price double, amount int, note string, at timestamp"
    buckets = max(4, tasks)

    def frame(rows_now: int) -> DataFrame:
        return world.memory(world.spark.read, schema, world.sample, rows_now, tasks, distinct="true")

    def alone(turn: int) -> None:
        frame(count if turn else _WARM_UP_ROWS).write.format(FORMAT).mode("append").save()

    def from_spark(turn: int) -> float:
        rows_now = count if turn else _WARM_UP_ROWS
        table = _fresh(world, what, buckets)
        writer = (
            frame(rows_now).write.format("tidemill").option("servers", world.servers).option("table", table)
        )
        started = time.perf_counter()
        writer.mode("append").save()
        _until_readable(world.servers, table, what)
        seconds = time.perf_counter() - started
        _check_count(world, table, what, rows_now)
        return seconds

    def from_client(turn: int) -> float:
        rows_now = count if turn else _WARM_UP_ROWS
        table = _fresh(world, what, buckets)
        done = run_json(
            world.work,
            "bench.spark_client",
            "send",
            servers=world.servers,
            table=table,
            sample=world.sample,
            count=rows_now,
            what=what,
        )
        _check_count(world, table, what, rows_now)
        return float(done["seconds"])

    size = _size(world.sample, count)
    world.compare(what, count, tasks, size, ours=from_spark, peer=from_client, alone=alone)


def _fresh(world: _World, what: str, buckets: int) -> str:
    """A new empty table; the one before it is dropped."""
    name = f"bench.{what}"
    with tidemill.connect(world.servers) as db:
        db.drop_table(name, if_exists=True)
        db.create_table(name, COLUMNS, primary_key=["id"] if what == "upsert" else (), buckets=buckets)
    return name


def _until_readable(servers: str, table: str, what: str) -> None:
    """Wait until upserts are in the state: the fold is a part of the work."""
    if what == "upsert":
        with tidemill.connect(servers) as db:
            db.table(table).scan(limit=1).to_arrow()


def _check_count(world: _World, table: str, what: str, count: int) -> None:
    """Check that all rows were written."""
    with tidemill.connect(world.servers) as db:
        stats = db.table(table).stats()
        # Markers of transactions have offsets as well.
        written = sum(each.log_end_offset - each.log_start_offset for each in stats)
        assert written >= count, f"{what}: {written} of {count} rows"


def send(servers: str, table: str, sample: str, count: int, what: str) -> dict[str, Any]:
    """Send rows that are in memory already."""
    calls = list(_calls(sample, count))
    with tidemill.connect(servers) as db:
        opened = db.table(table)
        act = opened.upsert if what == "upsert" else opened.append
        started = time.perf_counter()
        for call in calls:
            act(call)
        _until_readable(servers, table, what)
        return {"seconds": time.perf_counter() - started}


if __name__ == "__main__":
    chosen = {"read": read, "write": write, "send": send}[sys.argv[1]]
    print(json.dumps(chosen(**json.loads(sys.argv[2]))))  # type: ignore[operator]
    sys.stdout.flush()
