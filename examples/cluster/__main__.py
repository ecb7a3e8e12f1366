"""Three nodes, of which one after the other is killed, under a stream that goes on: is every record there?

1. An etcd and three nodes are started on this machine, with a topic that has three replicas.
2. A Kafka producer writes numbers, a Kafka consumer reads them.
3. Each node in turn is killed with SIGKILL, and started again. The stream goes on.
4. Every record that was acknowledged is compared with what was read.

Run it with ``make cluster``, or with ``python examples/cluster``. It ends with 0 if every record is there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, NewTopic
from machines import CannotStart, Etcd, Node
from stream import Reader, Writer, compare

INTERRUPTED = 130
TOPIC = "numbers"
NAMES = ("n1", "n2", "n3")
PARTITIONS = 3
IN_SYNC_SECONDS = 180.0
LINE_SECONDS = 1.0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="cluster", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--rate", type=int, default=3_000, help="records per second (%(default)s)")
    add("--seconds", type=float, default=4, help="between a kill and the next step (%(default)s)")
    add("--etcd", metavar="URL", help="use this etcd, etcd://host:port[,...]; else one is started")
    add("--directory", type=Path, default=Path("cluster"), help="for data and logs (%(default)s)")
    return parser.parse_args()


def main() -> int:
    options = parse_arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with ExitStack() as running:
            try:
                is_right = Story(options, running).tell()
            finally:
                # What is running ends in an orderly way, whatever else is pressed.
                signal.signal(signal.SIGINT, signal.SIG_IGN)
    except KeyboardInterrupt:
        print("Stopped. The nodes and etcd have ended.")
        return INTERRUPTED
    except (CannotStart, KafkaException, TimeoutError) as error:
        print(f"Failed: {error}\nThe logs of the nodes are in {options.directory.resolve()}")
        return 1
    print("Every record is there." if is_right else "Some records are not as they must be: see above.")
    return 0 if is_right else 1


class Story:
    """One run, from the start of etcd to the comparison."""

    def __init__(self, options: argparse.Namespace, running: ExitStack) -> None:
        self._options = options
        self._running = running
        self._began = time.monotonic()
        self._nodes: list[Node] = []
        self._writer: Writer
        self._shown = (self._began, 0)

    def tell(self) -> bool:
        """Whether every record is there."""
        self.start_nodes()
        servers = ",".join(node.address for node in self._nodes)
        self._admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
        self._admin.create_topics([NewTopic(TOPIC, PARTITIONS, len(NAMES))])[TOPIC].result(30)
        self.say(f"topic {TOPIC}: {PARTITIONS} partitions, {len(NAMES)} replicas each")
        self._writer = Writer(servers, TOPIC, PARTITIONS, self._options.rate)
        reader = Reader(servers, TOPIC, PARTITIONS)
        self._writer.start()
        reader.start()
        self.say("rate, acknowledged records, and each partition with its leader (and its in-sync replicas)")
        self.watch(self._options.seconds)
        pauses = {node.name: self.kill_and_restart(node) for node in self._nodes}
        self._writer.finish()
        reader.finish(self._writer.acknowledged)
        self.say(f"{self._writer.count:,} records are acknowledged, {sum(map(len, reader.read)):,} were read")
        for name, pause in pauses.items():
            print(f"   longest pause of a partition when {name} was killed: {pause:.1f} s")
        for error in sorted(set(self._writer.failed)):
            print(f"   the producer gave up {self._writer.failed.count(error):,} records: {error}")
        problems = list(compare(self._writer.sent, self._writer.acknowledged, reader.read))
        for problem in problems:
            print(f"   {problem}")
        return not problems

    def start_nodes(self) -> None:
        directory = self._options.directory
        shutil.rmtree(directory, ignore_errors=True)
        url = self._options.etcd
        if url is None:
            etcd = Etcd(directory / "etcd")
            self._running.callback(etcd.stop)
            etcd.wait()
            url = etcd.url
        # An etcd that is there already may know a cluster of an earlier run.
        cluster = f"example-{os.getpid()}-{time.time_ns() // 1_000_000}"
        self._nodes = [Node(name, directory, url, cluster) for name in NAMES]
        for node in self._nodes:
            self._running.callback(node.stop)
            node.start()
        for node in self._nodes:
            node.wait()
        shown = ", ".join(f"{node.name} at {node.address} (node {node.node_id})" for node in self._nodes)
        self.say(f"etcd at {url}; {shown}")

    def kill_and_restart(self, node: Node) -> float:
        """Kill a node, bring it back, and wait until it has everything; the longest pause of a partition."""
        self._writer.forget_pauses()
        node.kill()
        self.say(f"{node.name} is killed (kill -9)")
        self.watch(self._options.seconds)
        node.start()
        node.wait()
        self.say(f"{node.name} is back")
        self.watch(IN_SYNC_SECONDS, until_in_sync=True)
        self.say("all replicas are in sync")
        pause = self._writer.pause
        self.watch(self._options.seconds / 2)
        return pause

    def watch(self, seconds: float, *, until_in_sync: bool = False) -> None:
        """Show how the stream goes, for so long, or until every replica is in sync."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(LINE_SECONDS, left))
            in_sync = self.show()
            if until_in_sync and in_sync:
                return
        if until_in_sync:
            raise TimeoutError(f"after {seconds:.0f} s not all replicas are in sync")

    def show(self) -> bool:
        """Show a line: the rate, and each partition's leader and in-sync set. Whether all are in sync."""
        now, count = time.monotonic(), self._writer.count
        then, before = self._shown
        rate = (count - before) / max(now - then, 0.001)
        self._shown = now, count
        try:
            found = self._admin.list_topics(TOPIC, timeout=5).topics[TOPIC].partitions
        except KafkaException as error:
            self.say(f"{rate:6,.0f}/s  {count:8,} acknowledged   (no answer: {error.args[0].str()})")
            return False
        names = {node.node_id: node.name for node in self._nodes}
        partitions = [
            f"{index}: {names.get(each.leader, 'none')} ({' '.join(sorted(names[n] for n in each.isrs))})"
            for index, each in sorted(found.items())
        ]
        self.say(f"{rate:6,.0f}/s  {count:8,} acknowledged   " + "   ".join(partitions))
        return all(len(each.isrs) == len(NAMES) for each in found.values())

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:5.1f} s  {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
