"""Load for the crash loop, and what its clients saw, written down as ``support.history`` events."""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from support.history import Event, Kind
from system.clients.worker import BOOTSTRAP, scenario, serve

#: Long, because a busy machine is slow: nothing waits for it that goes well.
DEADLINE_SECONDS = 300.0
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
    # A node that hangs with its connections open is given up after this long.
    "socket.timeout.ms": 6_000,
    # When the only node is away, librdkafka 2.16 would start over from the bootstrap list and lose its way.
    "metadata.recovery.strategy": "none",
}
TRANSACTION_BATCH_MAX = 8
TRANSACTION_PAUSE_SECONDS = 0.01


class Recorder:
    """A file of events; lines are written whole, by any thread."""

    def __init__(self, path: str) -> None:
        # Line by line: what a process has noted counts when it dies.
        self._file = Path(path).open("w", buffering=1)  # noqa: SIM115 -- open as long as the load runs
        self._lock = threading.Lock()

    def note(
        self,
        kind: Kind,
        partition: str = "",
        value: str = "",
        offset: int = -1,
        reader: str = "",
        transaction: str = "",
    ) -> None:
        line = json.dumps(asdict(Event(kind, partition, value, offset, reader, transaction)))
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


class TransactionalLoad(threading.Thread):
    """Small transactions over all partitions; some are aborted, and sometimes the producer is replaced."""

    def __init__(self, name: str, topic: str, partitions: int, path: str, transactional_id: str) -> None:
        super().__init__(daemon=True)
        self.recorder = Recorder(path)
        self.acked = 0  # committed transactions
        self._id = transactional_id
        self.aborted = 0
        self.rebuilt = 0
        self.unknown: list[str] = []
        self.failure: str | None = None
        self._prefix, self._topic, self._partitions = name, topic, partitions
        self._rng = random.Random(name)
        self._end = threading.Event()
        self._producer: Producer
        self.start()

    def run(self) -> None:
        try:
            self._new_producer()
            for number in itertools.count():
                if self._end.is_set():
                    break
                self._transact(f"{self._prefix}-{number}")
                time.sleep(TRANSACTION_PAUSE_SECONDS)
        except Exception as error:
            self.failure = repr(error)
        self.recorder.close()

    def _new_producer(self) -> None:
        """Whatever the one before has open is aborted by this."""
        config = {"transactional.id": self._id, "transaction.timeout.ms": 60_000, "linger.ms": 0}
        self._producer = Producer(BASE | config)
        self._retry(lambda: self._producer.init_transactions(DEADLINE_SECONDS))

    def _transact(self, name: str) -> None:
        chance, asked = self._rng.random(), False
        try:
            self._producer.begin_transaction()
            self._write(name)
            if chance < 0.02:
                self._replace(name)
            elif chance < 0.35:
                self._abort(name)
            else:
                self._producer.flush(DEADLINE_SECONDS)
                asked = True
                self._retry(lambda: self._producer.commit_transaction(DEADLINE_SECONDS))
                self.recorder.note("committed", transaction=name)
                self.acked += 1
        except KafkaException as error:
            # Once the commit was asked for, only an error that demands an abort says that it did not happen.
            if error.args[0].txn_requires_abort():
                self._abort(name)
            elif asked:
                self.unknown.append(error.args[0].name())
                self._new_producer()
            else:
                self._replace(name)

    def _write(self, transaction: str) -> None:
        for number in range(self._rng.randint(1, TRANSACTION_BATCH_MAX)):
            partition = self._rng.randrange(self._partitions)
            place, value = f"{self._topic}-{partition}", f"{transaction}-{number}"
            self.recorder.note("sent", place, value, transaction=transaction)

            def reported(
                error: KafkaError | None, message: Message, place: str = place, value: str = value
            ) -> None:
                if error is None:
                    self.recorder.note("acked", place, value, message.offset())

            self._producer.produce(self._topic, value, partition=partition, on_delivery=reported)

    def _abort(self, name: str) -> None:
        self.recorder.note("aborted", transaction=name)
        self.aborted += 1
        try:
            self._retry(lambda: self._producer.abort_transaction(DEADLINE_SECONDS))
        except KafkaException:
            self._new_producer()

    def _replace(self, name: str) -> None:
        """Leave the transaction as it is, as a process that dies does."""
        self.recorder.note("aborted", transaction=name)
        self.rebuilt += 1
        self._new_producer()

    def _retry(self, action: Callable[[], Any]) -> None:
        """Call until it works, as long as the error is one that passes."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            try:
                action()
                return
            except KafkaException as error:
                code = error.args[0]
                passes = code.retriable() or code.name() in ("_TIMED_OUT", "_TRANSPORT")
                if not passes or code.txn_requires_abort() or time.monotonic() > deadline:
                    raise

    def stop(self) -> dict[str, Any]:
        self._end.set()
        self.join()
        return {
            "acked": self.acked,
            "aborted": self.aborted,
            "rebuilt": self.rebuilt,
            "unknown": self.unknown,
            "failure": self.failure,
        }


class KeyedLoad(threading.Thread):
    """An idempotent producer that overwrites few keys; key and partition belong together."""

    def __init__(self, name: str, topic: str, partitions: int, keys: int) -> None:
        super().__init__(daemon=True)
        self.acked = 0
        self.unknown: list[str] = []
        self._prefix, self._topic, self._partitions, self._keys = name, topic, partitions, keys
        self._last: dict[str, str] = {}
        self._end = threading.Event()
        self._producer = Producer(
            BASE | {"linger.ms": 2, "enable.idempotence": True, "message.timeout.ms": 0}
        )
        self.start()

    def run(self) -> None:
        for number in itertools.count():
            if self._end.is_set():
                break
            self._send(number % self._keys, f"{self._prefix}-{number}")
            if number % BURST == 0:
                self._producer.poll(PAUSE_SECONDS)
                time.sleep(PAUSE_SECONDS)
            while len(self._producer) > MAX_WAITING and not self._end.is_set():
                self._producer.poll(0.05)
        assert self._producer.flush(DEADLINE_SECONDS) == 0, "records are still waiting"

    def _send(self, key: int, value: str) -> None:
        def reported(error: KafkaError | None, message: Message) -> None:
            if error is None:
                # In the order of the log: one partition's records are acknowledged in their order.
                self._last[f"{key}"] = value
                self.acked += 1
            else:
                self.unknown.append(error.name())

        self._producer.produce(
            self._topic, value, f"{key}", partition=key % self._partitions, on_delivery=reported
        )

    def stop(self) -> dict[str, Any]:
        self._end.set()
        self.join()
        return {"acked": self.acked, "unknown": sorted(set(self.unknown)), "last": self._last}


class Reader(threading.Thread):
    """Reads every partition from its start and notes each record; keeps errors that are not mere outages."""

    def __init__(self, name: str, topic: str, partitions: int, path: str, *, isolated: bool = False) -> None:
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
                "isolation.level": "read_committed" if isolated else "read_uncommitted",
                "enable.partition.eof": True,
            }
        )
        if isolated:
            self.recorder.note("isolated", reader=name)
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
        if error is not None and error.code() == KafkaError._PARTITION_EOF:
            # Its offset is behind markers and aborted records, which are not delivered.
            self._advance(message.partition(), message.offset())
            return
        if error is not None:
            if error.code() not in (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN):
                self.errors.append(f"{message.partition()}: {error}")
            return
        partition, value = message.partition(), message.value().decode()
        self.recorder.note("read", f"{self._topic}-{partition}", value, message.offset(), self._reader_name)
        self._advance(partition, message.offset() + 1)

    def _advance(self, partition: int, position: int) -> None:
        with self._changed:
            self.positions[partition] = position
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


loads: dict[str, Load | TransactionalLoad | KeyedLoad] = {}
readers: dict[str, Reader] = {}


@scenario
def start_load(name: str, topic: str, partitions: int, path: str, too_large_bytes: int) -> None:
    loads[name] = Load(name, topic, partitions, path, too_large_bytes)


@scenario
def start_transactions(
    name: str, topic: str, partitions: int, path: str, transactional_id: str | None = None
) -> None:
    """Several loads of one transactional id follow each other, under names of their own."""
    loads[name] = TransactionalLoad(name, topic, partitions, path, transactional_id or name)


@scenario
def start_keyed_load(name: str, topic: str, partitions: int, keys: int) -> None:
    loads[name] = KeyedLoad(name, topic, partitions, keys)


@scenario
def wait_for_acks(more: int) -> int:
    """Wait until every load has that many more acknowledgements; returns how many there are in all."""
    wanted = {name: load.acked + more for name, load in loads.items()}
    deadline = time.monotonic() + DEADLINE_SECONDS
    while any(loads[name].acked < count for name, count in wanted.items()):
        assert time.monotonic() < deadline, {name: load.acked for name, load in loads.items()}
        assert all(load.is_alive() for load in loads.values()), [vars(load) for load in loads.values()]
        time.sleep(0.01)
    return sum(load.acked for load in loads.values())


@scenario
def stop_load() -> dict[str, Any]:
    return {name: load.stop() for name, load in loads.items()}


@scenario
def start_reader(name: str, topic: str, partitions: int, path: str, isolated: bool = False) -> None:
    readers[name] = Reader(name, topic, partitions, path, isolated=isolated)


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


@scenario
def read_table(topic: str, partitions: int) -> dict[str, str]:
    """The last value of every key, from the start to the end as it is now."""
    consumer = Consumer(
        BASE
        | {
            "group.id": "table",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    table: dict[str, str] = {}
    ended: set[int] = set()
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(ended) < partitions:
        assert time.monotonic() < deadline, f"only {ended} were read to their ends"
        for message in consumer.consume(1_000, timeout=0.1):
            error = message.error()
            if error is None:
                table[message.key().decode()] = message.value().decode()
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
            else:
                raise AssertionError(str(error))
    consumer.close()
    return table


if __name__ == "__main__":
    serve()
