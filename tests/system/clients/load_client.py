"""Load for the crash loop, and what its clients saw, written down as ``support.history`` events."""

from __future__ import annotations

import itertools
import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from worker import BOOTSTRAP, scenario, serve

from support.history import Event, Kind

DEADLINE_SECONDS = 60.0
MAX_WAITING = 500
PAUSE_SECONDS = 0.002
BURST = 4
TOO_LARGE_EVERY = 100
BASE = {
    "bootstrap.servers": BOOTSTRAP,
    "log_level": 2,
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    "topic.metadata.refresh.interval.ms": 1_000,
}


class Recorder:
    """A file of events; lines are written whole, by any thread."""

    def __init__(self, path: str) -> None:
        self._file = Path(path).open("w")  # noqa: SIM115 -- it stays open as long as the load runs
        self._lock = threading.Lock()

    def note(self, kind: Kind, partition: str, value: str, offset: int = -1, reader: str = "") -> None:
        line = json.dumps(asdict(Event(kind, partition, value, offset, reader)))
        with self._lock:
            self._file.write(line + "\n")

    def close(self) -> None:
        with self._lock:
            self._file.close()


class Load(threading.Thread):
    """An idempotent producer that sends without pause, and beside it one whose records are always refused."""

    def __init__(self, name: str, topic: str, partitions: int, path: str, too_large_bytes: int) -> None:
        super().__init__(daemon=True)
        self.recorder = Recorder(path)
        self.acked = 0
        self.refused = 0
        self.unknown: list[str] = []
        self._prefix, self._topic, self._partitions = name, topic, partitions
        self._too_large = "x" * too_large_bytes
        self._end = threading.Event()
        config = BASE | {"linger.ms": 2, "batch.num.messages": 100}
        self._producer = Producer(config | {"enable.idempotence": True, "message.timeout.ms": 0})
        self._refused_producer = Producer(config | {"acks": "all", "message.max.bytes": 10 * too_large_bytes})
        self.start()

    def run(self) -> None:
        for number in itertools.count():
            if self._end.is_set():
                break
            partition = number % self._partitions
            self._send(f"{self._prefix}-{number}", partition)
            if number % TOO_LARGE_EVERY == 0:
                self._send_refused(f"{self._prefix}-refused-{number}", partition)
            if number % BURST == 0:
                self._producer.poll(PAUSE_SECONDS)
                time.sleep(PAUSE_SECONDS)
            while len(self._producer) > MAX_WAITING and not self._end.is_set():
                self._producer.poll(0.05)
        for producer in (self._producer, self._refused_producer):
            assert producer.flush(DEADLINE_SECONDS) == 0, "records are still waiting"
        self.recorder.close()

    def _send(self, value: str, partition: int) -> None:
        place = f"{self._topic}-{partition}"
        self.recorder.note("sent", place, value)

        def reported(error: KafkaError | None, message: Message) -> None:
            if error is None:
                self.recorder.note("acked", place, value, message.offset())
                self.acked += 1
            else:
                # librdkafka does not say whether it may have been written, so its fate is unknown.
                self.unknown.append(error.name())

        self._producer.produce(self._topic, value, partition=partition, on_delivery=reported)

    def _send_refused(self, value: str, partition: int) -> None:
        place = f"{self._topic}-{partition}"
        self.recorder.note("sent", place, value)

        def reported(error: KafkaError | None, message: Message) -> None:
            assert error is not None, "a record that is too large was taken"
            if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
                self.recorder.note("failed", place, value)
                self.refused += 1

        self._refused_producer.produce(
            self._topic, value + self._too_large, partition=partition, on_delivery=reported
        )
        self._refused_producer.poll(0)

    def stop(self) -> dict[str, Any]:
        self._end.set()
        self.join()
        return {"acked": self.acked, "refused": self.refused, "unknown": sorted(set(self.unknown))}


class Reader(threading.Thread):
    """Reads every partition from its start and notes each record; keeps errors that are not mere outages."""

    def __init__(self, name: str, topic: str, partitions: int, path: str) -> None:
        super().__init__(daemon=True)
        self.recorder = Recorder(path)
        self.errors: list[str] = []
        self.positions = [0] * partitions
        self._reader_name, self._topic = name, topic
        self._changed = threading.Condition()
        self._end = threading.Event()
        # A reader that is out of range must say so: starting over would hide lost records.
        self._consumer = Consumer(
            BASE
            | {
                "group.id": name,
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 50,
            }
        )
        self._consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
        self.start()

    def run(self) -> None:
        while not self._end.is_set():
            for message in self._consumer.consume(1_000, timeout=0.1):
                self._take(message)
        self._consumer.close()
        self.recorder.close()

    def _take(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            if error.code() not in (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
                self.errors.append(f"{message.partition()}: {error}")
            return
        partition, value = message.partition(), message.value().decode()
        self.recorder.note("read", f"{self._topic}-{partition}", value, message.offset(), self._reader_name)
        with self._changed:
            self.positions[partition] = message.offset() + 1
            self._changed.notify_all()

    def stop(self, ends: list[int]) -> list[str]:
        """Read to these offsets and end; the errors on the way."""
        with self._changed:
            arrived = self._changed.wait_for(
                lambda: all(map(int.__ge__, self.positions, ends)), timeout=DEADLINE_SECONDS
            )
        assert arrived, f"read to {self.positions} of {ends}; {self.errors}"
        self._end.set()
        self.join()
        return self.errors


loads: dict[str, Load] = {}
readers: dict[str, Reader] = {}


@scenario
def start_load(name: str, topic: str, partitions: int, path: str, too_large_bytes: int) -> None:
    loads[name] = Load(name, topic, partitions, path, too_large_bytes)


@scenario
def wait_for_acks(more: int) -> int:
    """Wait until every load has that many more acknowledgements; returns how many there are in all."""
    wanted = {name: load.acked + more for name, load in loads.items()}
    deadline = time.monotonic() + DEADLINE_SECONDS
    while any(loads[name].acked < count for name, count in wanted.items()):
        assert time.monotonic() < deadline, {name: load.acked for name, load in loads.items()}
        assert all(load.is_alive() for load in loads.values())
        time.sleep(0.01)
    return sum(load.acked for load in loads.values())


@scenario
def stop_load() -> dict[str, Any]:
    return {name: load.stop() for name, load in loads.items()}


@scenario
def start_reader(name: str, topic: str, partitions: int, path: str) -> None:
    readers[name] = Reader(name, topic, partitions, path)


@scenario
def stop_reader(name: str, ends: list[int]) -> list[str]:
    return readers.pop(name).stop(ends)


@scenario
def end_offsets(topic: str, partitions: int) -> list[int]:
    source = Consumer(BASE | {"group.id": "none"})
    try:
        return [
            source.get_watermark_offsets(TopicPartition(topic, partition), timeout=DEADLINE_SECONDS)[1]
            for partition in range(partitions)
        ]
    finally:
        source.close()


if __name__ == "__main__":
    serve()
