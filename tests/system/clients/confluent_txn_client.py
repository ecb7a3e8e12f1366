"""Transactions with confluent-kafka: named producers, driven step by step."""

from __future__ import annotations

from typing import Any

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from system.clients.worker import BOOTSTRAP, scenario, serve

DEADLINE_SECONDS = 120.0
_producers: dict[str, Producer] = {}


def outcome(function: Any, *arguments: Any) -> str:
    """ "ok", or the name of the error that a call ends with."""
    try:
        function(*arguments)
    except KafkaException as error:
        return str(error.args[0].name())
    return "ok"


@scenario
def create(topic: str, partitions: int) -> None:
    admin = AdminClient({"bootstrap.servers": BOOTSTRAP})
    for future in admin.create_topics([NewTopic(topic, partitions, 1)]).values():
        future.result(DEADLINE_SECONDS)


@scenario
def start(name: str, transactional_id: str, timeout_ms: int = 60_000) -> str:
    _producers[name] = Producer(
        {
            "bootstrap.servers": BOOTSTRAP,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": timeout_ms,
            "message.timeout.ms": min(timeout_ms, 30_000),
            "linger.ms": 0,
        }
    )
    return outcome(_producers[name].init_transactions, DEADLINE_SECONDS)


@scenario
def begin(name: str) -> str:
    return outcome(_producers[name].begin_transaction)


@scenario
def send(name: str, topic: str, texts: list[str], partition: int = 0) -> str:
    """Write, and wait for the acknowledgements."""
    errors: list[str] = []

    def delivered(error: Any, message: Any) -> None:
        if error is not None:
            errors.append(error.name())

    for text in texts:
        _producers[name].produce(topic, text.encode(), partition=partition, on_delivery=delivered)
    _producers[name].flush(DEADLINE_SECONDS)
    return errors[0] if errors else "ok"


@scenario
def send_offsets(name: str, group: str, topic: str, offset: int) -> str:
    consumer = Consumer({"bootstrap.servers": BOOTSTRAP, "group.id": group})
    try:
        metadata = consumer.consumer_group_metadata()
        offsets = [TopicPartition(topic, 0, offset)]
        return outcome(_producers[name].send_offsets_to_transaction, offsets, metadata, DEADLINE_SECONDS)
    finally:
        consumer.close()


@scenario
def commit(name: str) -> str:
    return outcome(_producers[name].commit_transaction, DEADLINE_SECONDS)


@scenario
def abort(name: str) -> str:
    return outcome(_producers[name].abort_transaction, DEADLINE_SECONDS)


@scenario
def fatal_error_of_sending(name: str, topic: str, text: str) -> str | None:
    """The error after which the producer can only be closed, if sending ends with one."""
    _producers[name].produce(topic, text.encode(), partition=0)
    try:
        _producers[name].flush(DEADLINE_SECONDS)
        _producers[name].commit_transaction(DEADLINE_SECONDS)
    except KafkaException as error:
        return str(error.args[0].name()) if error.args[0].fatal() else None
    return None


@scenario
def drop(name: str) -> None:
    """Let go of a producer without ending anything."""
    del _producers[name]


@scenario
def write_plain(topic: str, texts: list[str], partition: int = 0) -> None:
    producer = Producer({"bootstrap.servers": BOOTSTRAP})
    for text in texts:
        producer.produce(topic, text.encode(), partition=partition)
    assert producer.flush(DEADLINE_SECONDS) == 0


@scenario
def read(topic: str, level: str, partition: int = 0) -> list[str]:
    """Everything up to the end that this isolation level sees."""
    consumer = Consumer(
        {
            "bootstrap.servers": BOOTSTRAP,
            "group.id": "nobody",
            "isolation.level": level,
            "enable.partition.eof": True,
        }
    )
    found: list[str] = []
    try:
        consumer.assign([TopicPartition(topic, partition, 0)])
        while True:
            message = consumer.poll(DEADLINE_SECONDS)
            assert message is not None, f"neither a message nor the end after {found}"
            if message.error():
                return found
            found.append(message.value().decode())
    finally:
        consumer.close()


@scenario
def committed(group: str, topic: str) -> int:
    consumer = Consumer({"bootstrap.servers": BOOTSTRAP, "group.id": group})
    try:
        return int(consumer.committed([TopicPartition(topic, 0)], timeout=DEADLINE_SECONDS)[0].offset)
    finally:
        consumer.close()


if __name__ == "__main__":
    serve()
