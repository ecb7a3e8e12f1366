"""Half an hour in a shop, in about a minute: Kafka producers, a Spark pipeline, and the truth.

1. A node is started inside this process, with a topic and three tables.
2. Spark is started, and the queries of pipeline.py.
3. Three Kafka producers send the shop's events, and the queries work beside them until nothing is left.
4. The results are read back and compared with the truth, row by row; a report is written.

Run it with ``make run``, or with ``python examples/shop``. It ends with 0 if every row is right.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic
from events import make_day
from page import write_page
from pipeline import TOPIC, TOPIC_PARTITIONS, create_tables, start
from producers import Senders
from pyspark.errors import PySparkException
from report import compare, read_results
from terminal import console, live_line, show_results, show_verdict
from watching import Story, Watcher

import tidemill
import tidemill.spark

INTERRUPTED = 130


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="shop", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--events", type=int, default=200_000, help="how many messages are sent (%(default)s)")
    add("--seconds", type=float, default=25, help="over how many seconds (%(default)s)")
    add("--seed", type=int, default=42, help="another seed is another day (%(default)s)")
    add(
        "--keep",
        type=Path,
        metavar="DIR",
        help="keep the node's data in this new folder; else nothing is kept",
    )
    add(
        "--report", type=Path, metavar="FILE", default=Path("shop.html"), help="the HTML report (%(default)s)"
    )
    add("--master", default=None, help="Spark's master (all cores of this machine)")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    if options.keep is not None and options.keep.exists():
        console.print(f"{options.keep} is there already: --keep needs a new folder", soft_wrap=True)
        return 2
    spark_log = options.report.with_suffix(".spark.log")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="tidemill-shop-") as temporary:
            is_right = run(options, options.keep or Path(temporary), spark_log)
    except KeyboardInterrupt:
        console.print("[bold]Stopped.[/] The producers, Spark and the node have ended.")
        return INTERRUPTED
    except (PySparkException, KafkaException, tidemill.TidemillError, TimeoutError) as error:
        # Behind this line Spark describes the query, in hundreds of lines.
        reason = str(error).split("=== Streaming Query ===")[0].strip()
        console.print(f"[bold red]Failed:[/] {reason}", soft_wrap=True)
        console.print(f"Spark's own log is {spark_log.resolve()}", soft_wrap=True)
        return 1
    if is_right:
        console.print("[bold green]Every row is right.[/]")
        return 0
    console.print("[bold red]Some rows are not what they must be; they are shown above.[/]")
    return 1


def run(options: argparse.Namespace, work: Path, spark_log: Path) -> bool:
    """The whole story, with everything stopped at its end; whether every row is right."""
    with ExitStack() as running:
        try:
            return tell(options, work, spark_log, running)
        finally:
            # What is running ends in an orderly way, whatever else is pressed.
            signal.signal(signal.SIGINT, signal.SIG_IGN)


def tell(options: argparse.Namespace, work: Path, spark_log: Path, running: ExitStack) -> bool:
    story = Story(options.seed)
    with story.phase("node"):
        db = running.enter_context(tidemill.open(work / "node"))
        create_topic(db.bootstrap_servers)
        create_tables(db)
    console.print(f"[bold]1.[/] a node at {db.bootstrap_servers}, with a topic and three tables")
    with story.phase("Spark"), ThreadPoolExecutor(1) as pool:
        day = pool.submit(make_day, options.events, options.seed)
        with stderr_to(spark_log):
            spark = tidemill.spark.session("shop", master=options.master)
        running.callback(spark.stop)
        messages, truth = day.result()
    interrupted = catch_interrupts()
    with story.phase("queries"):
        queries = start(spark, db.bootstrap_servers, work / "checkpoints")
        for query in queries.values():
            running.callback(query.stop)
    console.print(f"[bold]2.[/] Spark {spark.version} with three queries: {', '.join(queries)}")
    senders = Senders(db.bootstrap_servers, TOPIC, messages, options.seconds)
    running.callback(senders.stop)
    console.print(
        f"[bold]3.[/] {len(messages):,} messages from three Kafka producers, over {options.seconds:g} s"
    )
    watcher = Watcher(senders, queries, story, interrupted)
    with live_line(len(messages)) as show:
        senders.start()
        with story.phase("first batches"):
            watcher.watch(lambda sample: sample.is_warm, show)
        senders.go_on()
        with story.phase("stream"):
            watcher.watch(lambda sample: sample.is_over, show)
    with story.phase("comparison"):
        results = read_results(db)
        differences = compare(results, truth, senders.broken)
    show_results(results, truth, story)
    console.print("[bold]4.[/] what the tables say, against what is true")
    is_right = show_verdict(results, truth, differences)
    write_page(options.report, results, truth, story, differences)
    console.print(f"   the report: {options.report.resolve()}", soft_wrap=True)
    return is_right


def create_topic(servers: str) -> None:
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    admin.create_topics([NewTopic(TOPIC, TOPIC_PARTITIONS)])[TOPIC].result(10)


def catch_interrupts() -> threading.Event:
    """Set by Ctrl-C from now on: an exception in the middle of a call to Spark would leave it in disorder."""
    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    return interrupted


@contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """What is started meanwhile complains to a file: Spark's Java is never quiet by itself."""
    path.parent.mkdir(parents=True, exist_ok=True)
    saved = os.dup(sys.stderr.fileno())
    try:
        with path.open("wb") as log:
            os.dup2(log.fileno(), sys.stderr.fileno())
        yield
    finally:
        os.dup2(saved, sys.stderr.fileno())
        os.close(saved)


if __name__ == "__main__":
    sys.exit(main())
