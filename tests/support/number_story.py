"""Numbers that go from a topic to topics and tables, each exactly once: what is written, and what is seen.

Number n is record n // 2 of partition n % 2 of the source, so that a query that takes ``BATCH`` rows at a
time has the numbers from ``BATCH * b`` on in its batch b. What Kafka clients see of a topic is a recorded
history in which every batch is a transaction; what a table has to be follows from the numbers that count.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import tidemill
from support.history import History, check
from support.processes import NodeProcess
from support.table_nodes import records_of
from tidemill.client.admin.transactions import list_transactions
from tidemill.client.cluster import Cluster
from tidemill.client.producing.attempts import list_jobs

__all__ = ("BATCH", "NumberStory")

BATCH = 400
PARTITIONS = 2
# As in spark_jobs/driver.py: a key comes again after so many numbers, and some numbers are deletions.
KEYS = 1_000
DELETED_EVERY = 11
DELETED_REST = 3
_DEADLINE_SECONDS = 120.0


class NumberStory:
    """A source, and what was seen of its copies. A target with a dot in its name is a table."""

    def __init__(self, node: NodeProcess, source: str = "numbers") -> None:
        self._node = node
        self.source = source
        self.history = History()
        self._drains = 0
        self._expected: dict[str, int] = {}
        self._create_topic(source)

    @property
    def servers(self) -> str:
        return self._node.bootstrap_servers

    def fill(self, batches: int) -> None:
        """All numbers of so many batches, into the source."""
        self.append(self.source, range(batches * BATCH))

    def append(self, topic: str, numbers: Iterable[int]) -> None:
        """As any Kafka producer does it, without transactions."""
        producer = Producer({"bootstrap.servers": self.servers, "enable.idempotence": True, "log_level": 2})
        for number in numbers:
            producer.produce(topic, str(number), partition=number % PARTITIONS)
        assert producer.flush(_DEADLINE_SECONDS) == 0

    def add_target(self, name: str) -> str:
        if "." in name:
            with tidemill.connect(self.servers) as client:
                client.create_table(name, "id bigint, number bigint", primary_key="id", buckets=PARTITIONS)
        else:
            self._create_topic(name)
        return name

    def expect(self, topic: str, numbers: Iterable[int], transaction: str) -> None:
        """These numbers are being written, and become visible as one if at all."""
        for number in numbers:
            self.history.sent(f"{topic}-{number % PARTITIONS}", str(number), transaction)

    def _create_topic(self, name: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.servers, "log_level": 2})
        for future in admin.create_topics([NewTopic(name, PARTITIONS, 1)]).values():
            future.result(_DEADLINE_SECONDS)

    # --- what is there

    def check(self, target: str, batches: int) -> None:
        """Exactly these batches of the source are there: one copy of every number, nothing of any other."""
        if "." in target:
            self.check_table(target, batches)
            return
        for batch in range(self._expected.get(target, 0), batches):
            self.expect(target, range(batch * BATCH, (batch + 1) * BATCH), f"{target}:{batch}")
            self.history.committed(f"{target}:{batch}")
        self._expected[target] = max(batches, self._expected.get(target, 0))
        self.check_topic(target, range(batches * BATCH))

    def check_topic(self, topic: str, numbers: Iterable[int]) -> None:
        """A client that reads committed records finds exactly these, and the history stays right."""
        self._drains += 1
        drain = f"drain-{self._drains}"
        self.history.isolated(drain)
        seen: Counter[int] = Counter()
        for partition, offset, number in self.records(topic):
            self.history.read(drain, f"{topic}-{partition}", offset, str(number))
            seen[number] += 1
        expected = set(numbers)
        assert not expected - seen.keys(), f"{topic}: {_some(expected - seen.keys())} are missing"
        assert not seen.keys() - expected, f"{topic}: {_some(seen.keys() - expected)} must not be seen yet"
        twice = [number for number, count in seen.items() if count > 1]
        assert not twice, f"{topic}: {_some(twice)} are there more than once"
        assert check(self._of(topic), drain) == []

    def _of(self, topic: str) -> History:
        """What the history says of one topic; ends of transactions have no partition."""
        return History(
            [event for event in self.history.events if event.partition.rpartition("-")[0] in ("", topic)]
        )

    def records(self, topic: str, isolation: str = "read_committed") -> list[tuple[int, int, int]]:
        """Partition, offset and number of what a Kafka client finds up to the end."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": "not used",
                "isolation.level": isolation,
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,
                "log_level": 2,
            }
        )
        consumer.assign([TopicPartition(topic, index, 0) for index in range(PARTITIONS)])
        found: list[Any] = []
        ended: set[int] = set()
        deadline = time.monotonic() + _DEADLINE_SECONDS
        while len(ended) < PARTITIONS:
            assert time.monotonic() < deadline, f"{topic}: no end of partitions in sight, {ended} ended"
            for message in consumer.consume(1000, 0.1):
                if message.error() is None:
                    found.append((message.partition(), message.offset(), int(message.value())))
                elif message.error().name() == "_PARTITION_EOF":
                    ended.add(message.partition())
        consumer.close()
        return found

    def check_table(self, table: str, batches: int) -> None:
        """The rows are right, and so is every change that led to them."""
        numbers = range(batches * BATCH)
        with tidemill.connect(self.servers) as client:
            handle = client.table(table)
            scan = handle.scan()
            rows = {row["id"]: row["number"] for row in scan.to_arrow().to_pylist()}
            starts = dict.fromkeys(scan.log_offsets, 0)
            changes = records_of(handle.follow(snapshot=False, from_offsets=starts, until_now=True))
        wrong = rows.items() ^ expected_rows(numbers).items()
        assert not wrong, f"{table}: {len(wrong)} rows differ, such as {sorted(wrong)[:5]}"
        # A change that came twice, or late, may leave the right rows.
        found = Counter((row["id"], row["number"]) for *_, row in changes)
        expected = Counter((number % KEYS, None if is_delete(number) else number) for number in numbers)
        for word, more in (("missing", expected - found), ("too many", found - expected)):
            assert not more, f"{table}: {more.total()} changes are {word}, such as {more.most_common(5)}"

    # --- transactions

    def open_transactions(self, *targets: str) -> list[str]:
        """The transactional ids of jobs that write there and have something open."""

        async def ask() -> list[str]:
            async with Cluster(self.servers) as cluster:
                listed = await list_transactions(cluster)
            over = ("Empty", "CompleteCommit", "CompleteAbort", "Dead")
            ids = [each.transactional_id for each in listed if each.state not in over]
            return [each for each in ids if each.rpartition("#")[0].rpartition(":")[2] in targets]

        return asyncio.run(ask())

    def open_attempts(self, target: str) -> int:
        """How many attempts of jobs that write there are open, as their coordinator knows it."""

        async def ask() -> int:
            async with Cluster(self.servers) as cluster:
                jobs = await list_jobs(cluster)
            return sum(each.open_attempts for each in jobs if each.job.endswith(f":{target}"))

        return asyncio.run(ask())


def is_delete(number: int) -> bool:
    return number % DELETED_EVERY == DELETED_REST


def expected_rows(numbers: Iterable[int]) -> dict[int, int]:
    """The table after these numbers, in order."""
    rows: dict[int, int] = {}
    for number in numbers:
        if is_delete(number):
            rows.pop(number % KEYS, None)
        else:
            rows[number % KEYS] = number
    return rows


def _some(numbers: Iterable[int]) -> str:
    found = sorted(numbers)
    return f"{len(found)} numbers, such as {found[:5]},"
