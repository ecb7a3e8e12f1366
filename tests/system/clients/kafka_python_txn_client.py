"""Transactions with kafka-python: named producers, driven step by step."""

from __future__ import annotations

from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError
from kafka.structs import OffsetAndMetadata

from system.clients.worker import BOOTSTRAP, scenario, serve

DEADLINE_SECONDS = 120.0
_producers: dict[str, KafkaProducer] = {}


def outcome(function: Any, *arguments: Any) -> str:
    """ "ok", or the name of the error that a call ends with."""
    try:
        function(*arguments)
    except KafkaError as error:
        return type(error).__name__
    return "ok"


@scenario
def create(topic: str, partitions: int) -> None:
    admin = KafkaAdminClient(bootstrap_servers=BOOTSTRAP)
    admin.create_topics({topic: {"num_partitions": partitions, "replication_factor": 1}})
    admin.close()


@scenario
def start(name: str, transactional_id: str, timeout_ms: int = 60_000) -> str:
    _producers[name] = KafkaProducer(
        bootstrap_servers=BOOTSTRAP,
        transactional_id=transactional_id,
        transaction_timeout_ms=timeout_ms,
        delivery_timeout_ms=35_000,
        max_block_ms=40_000,
    )
    return outcome(_producers[name].init_transactions)


@scenario
def begin(name: str) -> str:
    return outcome(_producers[name].begin_transaction)


@scenario
def send(name: str, topic: str, texts: list[str], partition: int = 0) -> str:
    """Write, and wait for the acknowledgements."""
    try:
        futures = [_producers[name].send(topic, text.encode(), partition=partition) for text in texts]
        for future in futures:
            future.get(DEADLINE_SECONDS)
    except KafkaError as error:
        return type(error).__name__
    return "ok"


@scenario
def send_offsets(name: str, group: str, topic: str, offset: int) -> str:
    consumer = KafkaConsumer(bootstrap_servers=BOOTSTRAP, group_id=group, enable_auto_commit=False)
    try:
        offsets = {TopicPartition(topic, 0): OffsetAndMetadata(offset, "", -1)}
        return outcome(_producers[name].send_offsets_to_transaction, offsets, consumer.group_metadata())
    finally:
        consumer.close()


@scenario
def commit(name: str) -> str:
    return outcome(_producers[name].commit_transaction)


@scenario
def abort(name: str) -> str:
    return outcome(_producers[name].abort_transaction)


@scenario
def drop(name: str) -> None:
    """Let go of a producer without ending anything."""
    del _producers[name]


@scenario
def write_plain(topic: str, texts: list[str], partition: int = 0) -> None:
    producer = KafkaProducer(bootstrap_servers=BOOTSTRAP)
    for text in texts:
        producer.send(topic, text.encode(), partition=partition).get(DEADLINE_SECONDS)
    producer.close()


@scenario
def read(topic: str, level: str, partition: int = 0) -> list[str]:
    """Everything up to the end that this isolation level sees."""
    consumer = KafkaConsumer(
        bootstrap_servers=BOOTSTRAP, isolation_level=level, auto_offset_reset="earliest", group_id=None
    )
    place = TopicPartition(topic, partition)
    found: list[str] = []
    try:
        consumer.assign([place])
        end = consumer.end_offsets([place])[place]
        while consumer.position(place) < end:
            for records in consumer.poll(timeout_ms=1_000).values():
                found += [record.value.decode() for record in records]
        return found
    finally:
        consumer.close()


@scenario
def committed(group: str, topic: str) -> int:
    consumer = KafkaConsumer(bootstrap_servers=BOOTSTRAP, group_id=group, enable_auto_commit=False)
    try:
        offset = consumer.committed(TopicPartition(topic, 0))
        return -1001 if offset is None else int(getattr(offset, "offset", offset))
    finally:
        consumer.close()


if __name__ == "__main__":
    serve()
