"""A confluent-kafka client that writes and reads tables of JSON rows, as programs in any language do."""

from __future__ import annotations

import base64
import itertools
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

from system.clients.worker import BOOTSTRAP, scenario, serve, until

DEADLINE_SECONDS = 120.0
BASE = {
    "bootstrap.servers": BOOTSTRAP,
    "log_level": 2,
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    # When the only node is away, librdkafka 2.16 would start over from the bootstrap list and lose its way.
    "metadata.recovery.strategy": "none",
}
#: Tables are written with the hash of Java's clients.
MURMUR2 = {"partitioner": "murmur2_random"}
#: Several batches, and small enough for tables whose segments are.
SMALL = {"batch.size": 4_000}

#: Errors after which a consumer goes on. Compaction leaves segments without a record, and librdkafka takes
#: some answers without a record in a row for messages that are too large; it goes on behind them.
PASSING = ("_TRANSPORT", "_ALL_BROKERS_DOWN", "MSG_SIZE_TOO_LARGE")

#: (key, row): a row of None deletes, a text is base64 of the value itself.
Change = tuple[str, dict[str, Any] | str | None]


def send(producer: Producer, topic: str, change: Change, delivered: Any) -> None:
    key, row = change
    value: bytes | None = None
    if isinstance(row, str):
        value = base64.b64decode(row)
    elif row is not None:
        value = json.dumps(row, separators=(",", ":"), ensure_ascii=False).encode()
    while True:
        try:
            producer.produce(topic, key=key, value=value, on_delivery=delivered)
            return
        except BufferError:
            producer.poll(0.1)


@scenario
def write(topic: str, changes: list[Change], **config: Any) -> list[str | None]:
    """Send records and wait for all of them; the error of each, None where there is none."""
    producer = Producer(BASE | MURMUR2 | SMALL | {"linger.ms": 5} | config)
    errors: dict[int, str | None] = {}
    for number, change in enumerate(changes):

        def delivered(error: Any, _: Message, number: int = number) -> None:
            errors[number] = None if error is None else f"{error.name()}: {error.str()}"

        send(producer, topic, change, delivered)
    assert producer.flush(DEADLINE_SECONDS) == 0
    return [errors[number] for number in range(len(changes))]


class Transactions:
    """One transactional producer per transactional id, which lives as long as this process."""

    def __init__(self) -> None:
        self._producers: dict[str, Producer] = {}

    def producer(self, transactional_id: str) -> Producer:
        if transactional_id not in self._producers:
            made = Producer(BASE | MURMUR2 | SMALL | {"transactional.id": transactional_id})
            retrying(lambda: made.init_transactions(DEADLINE_SECONDS))
            self._producers[transactional_id] = made
        return self._producers[transactional_id]


def retrying(action: Any) -> Any:
    """Call until it works, as long as the error is one that passes."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            return action()
        except KafkaException as error:
            passes = error.args[0].retriable() or error.args[0].name() in ("_TIMED_OUT", "_TRANSPORT")
            if not passes or error.args[0].txn_requires_abort() or time.monotonic() > deadline:
                raise


transactions = Transactions()


@scenario
def transact(transactional_id: str, parts: list[tuple[str, list[Change]]], end: str) -> None:
    """Write changes to topics in one transaction and ``end`` it: commit, abort, or leave it open."""
    producer = transactions.producer(transactional_id)
    producer.begin_transaction()
    errors: list[str] = []

    def delivered(error: Any, _: Message) -> None:
        if error is not None:
            errors.append(error.str())

    for topic, changes in parts:
        for change in changes:
            send(producer, topic, change, delivered)
    assert producer.flush(DEADLINE_SECONDS) == 0
    assert errors == [], errors
    if end != "open":
        finish(transactional_id, end)


@scenario
def finish(transactional_id: str, end: str) -> None:
    """End a transaction that was left open."""
    producer = transactions.producer(transactional_id)
    if end == "commit":
        retrying(lambda: producer.commit_transaction(DEADLINE_SECONDS))
    else:
        retrying(lambda: producer.abort_transaction(DEADLINE_SECONDS))


class Changes(threading.Thread):
    """Upserts and deletes rows without pause, some of it in transactions, of which some are aborted."""

    def __init__(self, topic: str, name: str, keys: int, seed: int, pause_seconds: float) -> None:
        super().__init__(daemon=True)
        self._topic, self._name, self._keys, self._pause_seconds = topic, name, keys, pause_seconds
        self._rng = random.Random(seed)
        self._numbers = itertools.count()
        self._end = threading.Event()
        self._plain = Producer(BASE | MURMUR2 | {"enable.idempotence": True, "message.timeout.ms": 0})
        self._transactional = transactions.producer(f"changes-{name}")
        self.sent = self.committed = self.aborted = 0
        self.failures: list[str] = []

    def run(self) -> None:
        try:
            while not self._end.is_set():
                if self._rng.random() < 0.5:
                    self._write_plain()
                else:
                    self._write_transaction()
                time.sleep(self._pause_seconds)
            assert self._plain.flush(DEADLINE_SECONDS) == 0
        except Exception as error:
            self.failures.append(repr(error))

    def stop(self) -> None:
        self._end.set()
        self.join(DEADLINE_SECONDS)

    def _change(self) -> Change:
        key = f"{self._name}-{self._rng.randrange(self._keys)}"
        self.sent += 1
        if self._rng.random() < 0.2:
            return key, None
        return key, {"id": key, "writer": self._name, "n": next(self._numbers)}

    def _note(self, error: Any, _: Message) -> None:
        if error is not None:
            self.failures.append(error.str())

    def _write_plain(self) -> None:
        for _ in range(self._rng.randrange(1, 20)):
            send(self._plain, self._topic, self._change(), self._note)
        self._plain.poll(0)

    def _write_transaction(self) -> None:
        producer = self._transactional
        producer.begin_transaction()
        try:
            for _ in range(self._rng.randrange(1, 20)):
                send(producer, self._topic, self._change(), None)
            # What is aborted must have been in the log.
            producer.flush(DEADLINE_SECONDS)
            if self._rng.random() < 0.4:
                retrying(lambda: producer.abort_transaction(DEADLINE_SECONDS))
                self.aborted += 1
            else:
                retrying(lambda: producer.commit_transaction(DEADLINE_SECONDS))
                self.committed += 1
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
            retrying(lambda: producer.abort_transaction(DEADLINE_SECONDS))
            self.aborted += 1


running: dict[str, Changes] = {}


@scenario
def start_changes(topic: str, name: str, keys: int, seed: int, pause_seconds: float = 0.002) -> None:
    running[name] = Changes(topic, name, keys, seed, pause_seconds)
    running[name].start()


@scenario
def wait_for_changes(name: str, more: int) -> None:
    """Wait until so many more transactions have been committed and as many aborted as 1 in 5 of those."""
    changes = running[name]
    committed, aborted = changes.committed + more, changes.aborted + more // 5
    until(
        lambda: (
            (changes.committed >= committed and changes.aborted >= aborted)
            or changes.failures
            or not changes.is_alive()
        ),
        DEADLINE_SECONDS,
    )


@scenario
def stop_changes(name: str) -> dict[str, Any]:
    changes = running.pop(name)
    changes.stop()
    return {
        "sent": changes.sent,
        "committed": changes.committed,
        "aborted": changes.aborted,
        "failures": changes.failures,
        "alive": changes.is_alive(),
    }


class Reader:
    """A consumer of whole topics, which lives as long as this process."""

    def __init__(self, isolation: str) -> None:
        self._ends: dict[int, int] = {}
        self._consumer = Consumer(
            BASE
            | {
                "group.id": "reader",
                "isolation.level": isolation,
                "enable.partition.eof": True,
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": 20,
            }
        )

    def records(self, topic: str, partitions: int) -> Iterator[Message]:
        """Every record up to the end of each partition."""
        self._consumer.assign([TopicPartition(topic, index, 0) for index in range(partitions)])
        ended: dict[int, int] = {}
        self._ends = ended
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(ended) < partitions:
            assert time.monotonic() < deadline, f"only {ended} of {partitions} partitions came to their end"
            for message in self._consumer.consume(1_000, 0.05):
                error = message.error()
                if error is None:
                    yield message
                elif error.name() == "_PARTITION_EOF":
                    ended[message.partition()] = message.offset()
                elif not error.retriable() and error.name() not in PASSING:
                    raise KafkaException(error)

    def ends(self) -> list[int]:
        """Where each partition of the last topic ends for this reader."""
        return [self._ends[index] for index in sorted(self._ends)]


readers: dict[str, Reader] = {}


def reader(isolation: str) -> Reader:
    if isolation not in readers:
        readers[isolation] = Reader(isolation)
    return readers[isolation]


@scenario
def read(topic: str, partitions: int, isolation: str = "read_committed") -> list[list[Any]]:
    """Every record of a topic up to its end: [partition, offset, key, value], by partition and offset."""
    found = [
        [
            message.partition(),
            message.offset(),
            message.key().decode(),
            None if message.value() is None else message.value().decode(),
        ]
        for message in reader(isolation).records(topic, partitions)
    ]
    return sorted(found, key=lambda record: record[:2])


@scenario
def fold(topic: str, partitions: int) -> dict[str, Any]:
    """The last committed value of every key that has one, in base64, and where each partition ends."""
    state: dict[str, str] = {}
    for message in reader("read_committed").records(topic, partitions):
        if message.value() is None:
            state.pop(message.key().decode(), None)
        else:
            state[message.key().decode()] = base64.b64encode(message.value()).decode()
    return {"state": state, "ends": reader("read_committed").ends()}


serve()
