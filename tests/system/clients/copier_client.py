"""Read, transform, write, commit the position: all in one transaction, over and over, through any failure."""

from __future__ import annotations

import threading
import time
from typing import Any

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition

from system.clients.worker import BOOTSTRAP, scenario, serve, until

BASE = {
    "bootstrap.servers": BOOTSTRAP,
    "log_level": 2,
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    # When the only node is away, librdkafka 2.16 would start over from the bootstrap list, and then waits in
    # send_offsets_to_transaction for a node object that it has let go itself.
    "metadata.recovery.strategy": "none",
}
GROUP = "copier"
DEADLINE_SECONDS = 240.0


class Copier(threading.Thread):
    """Copies ``source`` to ``target``; ``committed`` counts records of committed transactions."""

    def __init__(self, source: str, target: str, total: int, batch: int) -> None:
        super().__init__(daemon=True)
        self._source, self._target, self._total, self._batch = source, target, total, batch
        self.committed = 0
        self.aborted = 0
        self.rebuilt = 0
        self.failure: str | None = None
        self._consumer: Consumer
        self._producer: Producer

    def run(self) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        try:
            self._build()
            while not self._is_done() and time.monotonic() < deadline:
                self._copy_once()
            self._consumer.close()
        except Exception as error:
            self.failure = repr(error)

    def _build(self) -> None:
        self._consumer = Consumer(
            BASE
            | {
                "group.id": GROUP,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "session.timeout.ms": 45_000,
            }
        )
        self._consumer.subscribe([self._source])
        self._new_producer()

    def _new_producer(self) -> None:
        self._producer = Producer(BASE | {"transactional.id": "copier-1", "transaction.timeout.ms": 60_000})
        self._retrying(self._producer.init_transactions)

    def _is_done(self) -> bool:
        if self.committed < self._total:
            return False
        # What was counted may have been counted wrongly; what the group has committed is the truth.
        assignment = self._consumer.assignment()
        ends = {place.partition: self._consumer.get_watermark_offsets(place, 10)[1] for place in assignment}
        positions = self._consumer.committed(assignment, 10)
        return bool(assignment) and all(ends[place.partition] == place.offset for place in positions)

    def _copy_once(self) -> None:
        messages = [m for m in self._consumer.consume(self._batch, 0.5) if m.error() is None]
        if not messages:
            return
        self._producer.begin_transaction()
        try:
            self._write(messages)
            self._retrying(
                lambda: self._producer.send_offsets_to_transaction(
                    self._positions(messages), self._consumer.consumer_group_metadata(), 30
                )
            )
            self._retrying(lambda: self._producer.commit_transaction(30))
            self.committed += len(messages)
        except KafkaException as error:
            self._give_up(error)

    def _write(self, messages: list[Message]) -> None:
        for message in messages:
            value = message.value().decode()
            while True:
                try:
                    self._producer.produce(self._target, key=message.key(), value=f"copy of {value}")
                    break
                except BufferError:
                    self._producer.poll(0.1)

    def _positions(self, messages: list[Message]) -> list[TopicPartition]:
        last: dict[int, int] = {}
        for message in messages:
            last[message.partition()] = message.offset() + 1
        return [TopicPartition(self._source, partition, offset) for partition, offset in last.items()]

    def _give_up(self, error: KafkaException) -> None:
        """Abort, and go back to where the group stands: nothing of this transaction happened."""
        if error.args[0].txn_requires_abort():
            self.aborted += 1
            try:
                self._retrying(lambda: self._producer.abort_transaction(30))
            except KafkaException:
                self._replace_producer()
        else:
            self._replace_producer()
        for place in self._retrying(lambda: self._consumer.committed(self._consumer.assignment(), 30)):
            place.offset = max(place.offset, 0)
            self._consumer.seek(place)

    def _replace_producer(self) -> None:
        self.rebuilt += 1
        self._new_producer()

    def _retrying(self, action: Any) -> Any:
        """Call until it works, as long as the error is one that passes."""
        deadline = time.monotonic() + 60
        while True:
            try:
                return action()
            except KafkaException as error:
                passes = error.args[0].retriable() or error.args[0].name() in ("_TIMED_OUT", "_TRANSPORT")
                if not passes or error.args[0].txn_requires_abort() or time.monotonic() > deadline:
                    raise


copiers: dict[str, Copier] = {}


@scenario
def fill(topic: str, records: int) -> None:
    producer = Producer(BASE | {"enable.idempotence": True})
    for number in range(records):
        while True:
            try:
                producer.produce(topic, key=str(number), value=str(number))
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(120) == 0


@scenario
def start(source: str, target: str, total: int, batch: int) -> None:
    copiers["one"] = Copier(source, target, total, batch)
    copiers["one"].start()


@scenario
def progress(at_least: int) -> dict[str, Any]:
    """Wait until so many records are copied, or the copier has come to its end."""
    copier = copiers["one"]
    until(lambda: copier.committed >= at_least or not copier.is_alive(), 120)
    return {
        "committed": copier.committed,
        "aborted": copier.aborted,
        "rebuilt": copier.rebuilt,
        "alive": copier.is_alive(),
        "failure": copier.failure,
    }


@scenario
def finish() -> dict[str, Any]:
    copiers["one"].join(DEADLINE_SECONDS)
    return progress(0)


@scenario
def read_all(topic: str, partitions: int, isolation: str) -> list[str]:
    """Every value of a topic, partition by partition, up to its end."""
    consumer = Consumer(
        BASE | {"group.id": "reader", "isolation.level": isolation, "enable.partition.eof": True}
    )
    consumer.assign([TopicPartition(topic, index, 0) for index in range(partitions)])
    values, ended = [], 0
    deadline = time.monotonic() + 120
    while ended < partitions and time.monotonic() < deadline:
        for message in consumer.consume(1000, 1.0):
            if message.error() is not None:
                ended += message.error().name() == "_PARTITION_EOF"
            else:
                values.append(message.value().decode())
    consumer.close()
    assert ended >= partitions, "a partition did not come to its end"
    return values


serve()
