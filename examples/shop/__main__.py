"""Half an hour in a shop, in about a minute: Kafka producers, a Spark pipeline, and the truth.

1. A node is started inside this process, with a topic and three tables.
2. Spark is started, and the queries of pipeline.py.
3. Three Kafka producers send the shop's events, and the queries work beside them until nothing is left.
4. The results are read back and compared with the truth, row by row; a report is written.

Run it with ``make run``, or with ``python examples/shop``. It ends with 0 if every row is right.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic
from events import make_day
from page import write_page
from pipeline import TOPIC, TOPIC_PARTITIONS, create_tables, start
from producers import Senders
from report import compare, read_results
from terminal import console, live_line, show_results, show_verdict
from watching import Story, watch

import tidemill
import tidemill.spark

INTERRUPTED = 130


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="shop", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--events", type=int, default=200_000, help="how many messages are sent (default: %(default)s)")
    add("--seconds", type=float, default=25, help="over how many seconds (default: %(default)s)")
    add("--seed", type=int, default=42, help="another seed is another day (default: %(default)s)")
    add("--keep", type=Path, metavar="DIR", help="keep the node's data there; default: nothing is kept")
    add("--report", type=Path, metavar="FILE", default=Path("shop.html"), help="where the HTML report goes")
    add("--master", default=None, help="Spark's master; default: this machine")
    return parser.parse_args()


def run(options: argparse.Namespace, work: Path, cleanup: ExitStack) -> bool:
    """The whole story; whether every row is right."""
    story = Story(options.seed)
    with story.phase("node"):
        db = cleanup.enter_context(tidemill.open(work / "node"))
        create_topic(db.bootstrap_servers)
        create_tables(db)
    console.print(f"[bold]1.[/] {db.bootstrap_servers} is a node, with a topic and three tables")
    with story.phase("Spark"), ThreadPoolExecutor(1) as pool:
        day = pool.submit(make_day, options.events, options.seed)
        spark = tidemill.spark.session("shop", master=options.master)
        cleanup.callback(spark.stop)
        messages, truth = day.result()
    with story.phase("queries"):
        queries = start(spark, db.bootstrap_servers, work / "checkpoints")
        for query in queries.values():
            cleanup.callback(query.stop)
    console.print(f"[bold]2.[/] Spark {spark.version} runs {len(queries)} queries: {', '.join(queries)}")
    senders = Senders(db.bootstrap_servers, TOPIC, messages, options.seconds)
    cleanup.callback(senders.stop)
    console.print(
        f"[bold]3.[/] {len(messages):,} messages are sent over {options.seconds:g} s by three Kafka producers"
    )
    with story.phase("stream"), live_line(len(messages)) as show:
        senders.start()
        watch(senders, queries, story, show)
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


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="tidemill-shop-") as temporary, ExitStack() as cleanup:
        try:
            is_right = run(options, options.keep or Path(temporary), cleanup)
        except KeyboardInterrupt:
            console.print("[bold]stopped[/]: the node, Spark and the producers are shut down")
            return INTERRUPTED
        finally:
            # What is under way ends in an orderly way, whatever else is pressed.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
    if is_right:
        console.print("[bold green]Every row is right.[/]")
        return 0
    console.print("[bold red]Some rows are not what they must be; they are shown above.[/]")
    return 1


if __name__ == "__main__":
    sys.exit(main())
