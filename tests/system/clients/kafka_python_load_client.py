"""Load and readers of kafka-python beside those of ``load_client``, written down in the same way."""

from __future__ import annotations

import itertools
import threading
import time
from functools import partial
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError

from system.clients.load_client import DEADLINE_SECONDS, Recorder, loads
from system.clients.worker import BOOTSTRAP, scenario, serve

SERVERS = BOOTSTRAP.split(",")
PAUSE_SECONDS = 0.01


class KafkaPythonLoad(threading.Thread):
    """An idempotent producer that sends a record every ten milliseconds."""

    def __init__(self, name: str, topic: str, partitions: int, path: str) -> None:
        super().__init__(daemon=True)
        self.recorder = Recorder(path)
        self.acked = 0
        self.unknown: list[str] = []
        self._prefix, self._topic, self._partitions = name, topic, partitions
        self._end = threading.Event()
        self._producer = KafkaProducer(
            bootstrap_servers=SERVERS,
            enable_idempotence=True,
            linger_ms=2,
            delivery_timeout_ms=600_000,
            request_timeout_ms=10_000,
            max_block_ms=600_000,
        )
        self.start()

    def run(self) -> None:
        for number in itertools.count():
            if self._end.is_set():
                break
            self._send(f"{self._prefix}-{number}", number % self._partitions)
            time.sleep(PAUSE_SECONDS)
        self._producer.flush(DEADLINE_SECONDS)
        self._producer.close(DEADLINE_SECONDS)
        self.recorder.close()

    def _send(self, value: str, partition: int) -> None:
        place = f"{self._topic}-{partition}"
        self.recorder.note("sent", place, value)
        sending = self._producer.send(self._topic, value.encode(), partition=partition)
        sending.add_callback(partial(self._acknowledged, place, value))
        sending.add_errback(lambda error: self.unknown.append(repr(error)))

    def _acknowledged(self, place: str, value: str, stored: Any) -> None:
        self.recorder.note("acked", place, value, stored.offset)
        self.acked += 1

    def stop(self) -> dict[str, Any]:
        self._end.set()
        self.join()
        return {"acked": self.acked, "unknown": sorted(set(self.unknown))}


@scenario
def start_kafka_python_load(name: str, topic: str, partitions: int, path: str) -> None:
    loads[name] = KafkaPythonLoad(name, topic, partitions, path)  # type: ignore[assignment]


@scenario
def read_to_ends(name: str, topic: str, path: str, ends: list[int]) -> None:
    """Read every partition from its start to the given end into a history."""
    recorder = Recorder(path)
    consumer = KafkaConsumer(bootstrap_servers=SERVERS, enable_auto_commit=False, auto_offset_reset="none")
    partitions = [TopicPartition(topic, index) for index in range(len(ends))]
    consumer.assign(partitions)
    for partition in partitions:
        consumer.seek(partition, 0)
    deadline = time.monotonic() + DEADLINE_SECONDS
    positions = [0] * len(ends)
    while any(map(int.__lt__, positions, ends)):
        assert time.monotonic() < deadline, f"read to {positions} of {ends}"
        try:
            found = consumer.poll(timeout_ms=200)
        except KafkaError as error:
            if not error.retriable:
                raise
            continue
        for partition, records in found.items():
            for record in records:
                place = f"{topic}-{partition.partition}"
                recorder.note("read", place, record.value.decode(), record.offset, name)
                positions[partition.partition] = record.offset + 1
    consumer.close()
    recorder.close()


if __name__ == "__main__":
    serve()
