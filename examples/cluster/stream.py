"""The stream of the example: a Kafka producer, a Kafka consumer, and the comparison of what they saw.

Every record is a number: 0, 1, 2 and so on, in each partition. So a record that is missing, doubled or in
the wrong place is easy to see.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, Producer, TopicPartition

TICK_SECONDS = 0.02
FLUSH_SECONDS = 180.0
READ_SECONDS = 180.0
SHOWN = 5


class Writer(threading.Thread):
    """An idempotent producer (so acks=all) that sends at an even pace, with librdkafka's own settings.

    Attributes:
        sent: How many records were given to the producer, by partition.
        acknowledged: The numbers that the cluster has acknowledged, by partition.
        failed: Errors of records that the producer gave up.
        pause: The longest time without an acknowledgement in any partition, in seconds.
    """

    def __init__(self, servers: str, topic: str, partitions: int, rate: int) -> None:
        super().__init__(name="writer", daemon=True)
        self._topic = topic
        self._rate = rate
        self._producer = Producer(
            {"bootstrap.servers": servers, "enable.idempotence": True, "linger.ms": 5, "log_level": 0}
        )
        self.sent = [0] * partitions
        self.acknowledged: list[list[int]] = [[] for _ in range(partitions)]
        self.failed: list[str] = []
        self.pause = 0.0
        self._heard = [time.monotonic()] * partitions
        self._ending = threading.Event()

    def run(self) -> None:
        began, total = time.monotonic(), 0
        while not self._ending.is_set():
            due = int((time.monotonic() - began) * self._rate)
            for number in range(total, due):
                self._send(number % len(self.sent))
            total = max(total, due)
            self._producer.poll(TICK_SECONDS)
            self._note_pauses()
        self._producer.flush(FLUSH_SECONDS)

    def finish(self) -> None:
        """Stop sending, and wait until everything sent is acknowledged."""
        self._ending.set()
        self.join()

    @property
    def count(self) -> int:
        """How many records are acknowledged."""
        return sum(map(len, self.acknowledged))

    def forget_pauses(self) -> None:
        """Measure ``pause`` from now on."""
        self.pause = 0.0

    def _send(self, partition: int) -> None:
        number = self.sent[partition]

        def delivered(error: KafkaError | None, _: Message) -> None:
            self._heard[partition] = time.monotonic()
            if error is None:
                self.acknowledged[partition].append(number)
            else:
                self.failed.append(str(error))

        while True:
            try:
                self._producer.produce(
                    self._topic, str(number).encode(), partition=partition, on_delivery=delivered
                )
            except BufferError:
                # The cluster has not answered for so long that the buffer is full.
                self._producer.poll(TICK_SECONDS)
                self._note_pauses()
            else:
                self.sent[partition] += 1
                return

    def _note_pauses(self) -> None:
        now = time.monotonic()
        self.pause = max(self.pause, *(now - heard for heard in self._heard))


class Reader(threading.Thread):
    """A consumer that reads every partition from its beginning, while the nodes come and go."""

    def __init__(self, servers: str, topic: str, partitions: int) -> None:
        super().__init__(name="reader", daemon=True)
        self._consumer = Consumer(
            {
                "bootstrap.servers": servers,
                "group.id": "example",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "log_level": 0,
            }
        )
        self._consumer.assign([TopicPartition(topic, each, OFFSET_BEGINNING) for each in range(partitions)])
        self.read: list[list[int]] = [[] for _ in range(partitions)]
        self._ending = threading.Event()

    def run(self) -> None:
        while not self._ending.is_set():
            for message in self._consumer.consume(1000, timeout=TICK_SECONDS):
                if message.error() is None:
                    self.read[message.partition()].append(int(message.value()))
        self._consumer.close()

    def finish(self, acknowledged: Sequence[Sequence[int]]) -> None:
        """Read until every acknowledged record was seen; not longer than a minute."""
        deadline = time.monotonic() + READ_SECONDS
        while time.monotonic() < deadline and any(
            set(wanted) - set(found) for wanted, found in zip(acknowledged, self.read, strict=True)
        ):
            time.sleep(0.2)
        self._ending.set()
        self.join()


def compare(
    sent: Sequence[int], acknowledged: Sequence[Sequence[int]], read: Sequence[Sequence[int]]
) -> Iterator[str]:
    """Compare what was read with how many were sent and which were acknowledged; tells what is wrong."""
    for partition, (count, wanted, found) in enumerate(zip(sent, acknowledged, read, strict=True)):
        times = Counter(found)
        wrong = {
            "acknowledged and missing": sorted(set(wanted) - times.keys()),
            "there more than once": sorted(number for number, how_often in times.items() if how_often > 1),
            "behind a later one": [later for earlier, later in pairwise(found) if later < earlier],
            "there and never sent": sorted(number for number in times if not 0 <= number < count),
        }
        for what, numbers in wrong.items():
            if numbers:
                shown = ", ".join(map(str, numbers[:SHOWN])) + (" ..." if len(numbers) > SHOWN else "")
                yield f"partition {partition}: {len(numbers):,} records are {what}: {shown}"
