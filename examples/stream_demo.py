"""A stream of orders through a Tidemill node that is killed in the middle: nothing is lost.

What it does, in about fifteen seconds:

1. starts a node as a process of its own (``tidemill up``) in a fresh data directory;
2. sends orders with an ordinary Kafka producer (confluent-kafka, idempotent, acks=all) and reads them with
   an ordinary consumer group at the same time;
3. kills the node with SIGKILL while both are at work, and starts it again on the same directory;
4. compares what was acknowledged with what was read: every order once, in order.

Run it with ``python examples/stream_demo.py``; ``--orders 5000`` makes it shorter.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import Consumer, KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console
from rich.table import Table

TOPIC = "orders"
PARTITIONS = 3
REGIONS = ("eu", "us", "asia", "africa")
READY_TIMEOUT_SECONDS = 30.0
DRAIN_TIMEOUT_SECONDS = 60.0

console = Console(highlight=False)


class NodeProcess:
    """A node in a process of its own, on a port that stays the same over restarts."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{probe.getsockname()[1]}"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> float:
        """Start and wait until it listens; returns the seconds that took."""
        began = time.perf_counter()
        command = [sys.executable, "-m", "tidemill", "up", "--data", str(self.data_dir)]
        self.process = subprocess.Popen(
            [*command, "--listen", self.address, "--http", ""],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        host, port = self.address.split(":")
        while time.perf_counter() - began < READY_TIMEOUT_SECONDS:
            if self.process.poll() is not None:
                raise SystemExit(f"the node ended at once:\n{self.process.communicate()[1]}")
            with socket.socket() as probe:
                if probe.connect_ex((host, int(port))) == 0:
                    return time.perf_counter() - began
            time.sleep(0.01)
        raise SystemExit(f"the node does not listen on {self.address} after {READY_TIMEOUT_SECONDS:.0f} s")

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.communicate()

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=30)
        return self.process.returncode


@dataclass
class Ledger:
    """What was promised and what was seen."""

    acknowledged: dict[int, tuple[int, int]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    read: Counter[int] = field(default_factory=Counter)
    out_of_order: int = 0
    revenue: Counter[str] = field(default_factory=Counter)
    last_offset: dict[int, int] = field(default_factory=dict)
    done_sending = threading.Event()

    def on_delivery(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.failed.append(str(error))
        else:
            order = json.loads(message.value())
            self.acknowledged[order["id"]] = (message.partition(), message.offset())

    def on_read(self, message: Message) -> None:
        order = json.loads(message.value())
        partition, offset = message.partition(), message.offset()
        self.out_of_order += offset <= self.last_offset.get(partition, -1)
        self.last_offset[partition] = offset
        if not self.read[order["id"]]:
            self.revenue[order["region"]] += order["cents"]
        self.read[order["id"]] += 1


def send(address: str, ledger: Ledger, orders: int) -> None:
    producer = Producer(
        {
            "bootstrap.servers": address,
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": 5,
            "log_level": 0,
        }
    )
    rng = random.Random(42)
    for number in range(orders):
        order = {"id": number, "region": rng.choice(REGIONS), "cents": rng.randint(100, 99_999)}
        producer.produce(TOPIC, key=str(number), value=json.dumps(order), on_delivery=ledger.on_delivery)
        producer.poll(0)
        if number % 20 == 0:
            time.sleep(0.01)  # a stream, not a flood: about 2,000 orders a second
    producer.flush(DRAIN_TIMEOUT_SECONDS)
    ledger.done_sending.set()


def receive(address: str, ledger: Ledger) -> None:
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "demo",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "log_level": 0,
        }
    )
    consumer.subscribe([TOPIC])
    deadline = None
    while deadline is None or time.monotonic() < deadline:
        message = consumer.poll(0.2)
        if message is not None and message.error() is None:
            ledger.on_read(message)
        if ledger.done_sending.is_set():
            deadline = deadline or time.monotonic() + DRAIN_TIMEOUT_SECONDS
            if ledger.acknowledged.keys() <= ledger.read.keys():
                break
    consumer.close()


def watch(ledger: Ledger, share: float, orders: int) -> None:
    """Print a line a second until the given share of the orders is acknowledged."""
    printed = 0.0
    while len(ledger.acknowledged) < orders * share and not ledger.done_sending.is_set():
        if time.monotonic() - printed >= 1:
            printed = time.monotonic()
            show_progress(ledger, orders)
        time.sleep(0.02)


def show_progress(ledger: Ledger, orders: int) -> None:
    acknowledged, read = len(ledger.acknowledged), len(ledger.read)
    bar = "█" * (30 * acknowledged // orders)
    console.print(f"  {bar:<30} {acknowledged:>6,} acknowledged {read:>6,} read")


def verdict(ledger: Ledger, orders: int) -> bool:
    lost = ledger.acknowledged.keys() - ledger.read.keys()
    duplicates = sum(count - 1 for count in ledger.read.values())
    table = Table(title="Revenue by region", title_justify="left")
    table.add_column("region")
    table.add_column("revenue", justify="right")
    table.add_column("")
    largest = max(ledger.revenue.values(), default=1)
    for region, cents in ledger.revenue.most_common():
        table.add_row(region, f"{cents / 100:,.2f}", "▇" * (40 * cents // largest))
    console.print(table)
    for name, value, good in (
        ("sent", orders, True),
        ("acknowledged", len(ledger.acknowledged), len(ledger.acknowledged) == orders),
        ("read", len(ledger.read), len(ledger.read) == orders),
        ("lost", len(lost), not lost),
        ("read twice", duplicates, not duplicates),
        ("out of order", ledger.out_of_order, not ledger.out_of_order),
        ("failed sends", len(ledger.failed), not ledger.failed),
    ):
        console.print(f"  {'✓' if good else '✗'} {name:<13} {value:>7,}", style="green" if good else "red")
    return not (lost or duplicates or ledger.out_of_order or ledger.failed) and len(ledger.read) == orders


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--orders", type=int, default=20_000)
    parser.add_argument("--data", type=Path, help="data directory (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tidemill-demo-") as temporary:
        return run(options.orders, options.data or Path(temporary))


def run(orders: int, data_dir: Path) -> int:
    node = NodeProcess(data_dir)
    console.print(f"[bold]1.[/] a node starts at {node.address} … {node.start() * 1000:.0f} ms")
    admin = AdminClient({"bootstrap.servers": node.address, "log_level": 0})
    admin.create_topics([NewTopic(TOPIC, PARTITIONS)])[TOPIC].result(10)
    ledger = Ledger()
    workers = [
        threading.Thread(target=send, args=(node.address, ledger, orders)),
        threading.Thread(target=receive, args=(node.address, ledger)),
    ]
    console.print(f"[bold]2.[/] {orders:,} orders are sent and read by Kafka clients")
    for worker in workers:
        worker.start()
    watch(ledger, 0.5, orders)
    node.kill()
    console.print(f"[bold red]3.[/] kill -9 after {len(ledger.acknowledged):,} acknowledged orders")
    console.print(f"   … the node is back in {node.start() * 1000:.0f} ms, on the same directory")
    watch(ledger, 1.0, orders)
    for worker in workers:
        worker.join()
    show_progress(ledger, orders)
    node.stop()
    console.print("[bold]4.[/] what was acknowledged against what was read")
    if verdict(ledger, orders):
        console.print("[bold green]Nothing was lost.[/]")
        return 0
    console.print("[bold red]Something went wrong; see the lines with ✗.[/]")
    return 1


if __name__ == "__main__":
    sys.exit(main())
