"""Writes a compacted topic with confluent-kafka, and reads it as a table with any of three clients."""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, NewTopic

from system.clients.worker import BOOTSTRAP, scenario, serve

DEADLINE_SECONDS = 120.0

Table = dict[str, str]


@scenario
def create(topic: str, config: dict[str, str]) -> None:
    admin = AdminClient({"bootstrap.servers": BOOTSTRAP})
    for future in admin.create_topics([NewTopic(topic, 1, 1, config=config)]).values():
        future.result(DEADLINE_SECONDS)


@scenario
def alter(topic: str, config: dict[str, str]) -> None:
    entries = [
        ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        for name, value in config.items()
    ]
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
    admin = AdminClient({"bootstrap.servers": BOOTSTRAP})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(DEADLINE_SECONDS)


def flushed(producer: Producer) -> None:
    assert producer.flush(DEADLINE_SECONDS) == 0


@scenario
def write_plain(topic: str, name: str, records: int, keys: int, seed: int, codec: str = "none") -> Table:
    """Write values and tombstones under keys of this writer; returns what must be left."""
    rng = random.Random(seed)
    producer = Producer(
        {
            "bootstrap.servers": BOOTSTRAP,
            "enable.idempotence": True,
            "linger.ms": 1,
            "compression.type": codec,
        }
    )
    table: Table = {}
    for number in range(records):
        key = f"{name}-{rng.randrange(keys)}"
        if rng.random() < 0.1:
            producer.produce(topic, key=key, value=None, partition=0)
            table.pop(key, None)
        else:
            table[key] = f"{name}-value-{number}"
            producer.produce(topic, key=key, value=table[key], partition=0)
        producer.poll(0)
        if number % 50 == 49:
            flushed(producer)  # so that there are many batches
    flushed(producer)
    return table


@scenario
def delete_keys(topic: str, name: str, keys: int) -> None:
    """Write a tombstone for every key of a writer."""
    producer = Producer({"bootstrap.servers": BOOTSTRAP, "linger.ms": 0})
    for number in range(keys):
        producer.produce(topic, key=f"{name}-{number}", value=None, partition=0)
    flushed(producer)


@scenario
def write_in_transactions(topic: str, name: str, transactions: int, keys: int, seed: int) -> Table:
    """Commit some transactions and abort others; returns what must be left."""
    rng = random.Random(seed)
    producer = Producer(
        {"bootstrap.servers": BOOTSTRAP, "transactional.id": f"{topic}-{name}", "linger.ms": 0}
    )
    producer.init_transactions(DEADLINE_SECONDS)
    table: Table = {}
    for number in range(transactions):
        commit = rng.random() < 0.6
        producer.begin_transaction()
        written = {f"{name}-{rng.randrange(keys)}": f"{name}-{number}-{commit}" for _ in range(5)}
        for key, value in written.items():
            producer.produce(topic, key=key, value=value, partition=0)
        flushed(producer)
        if commit:
            producer.commit_transaction(DEADLINE_SECONDS)
            table |= written
        else:
            producer.abort_transaction(DEADLINE_SECONDS)
    return table


@scenario
def abort_one(topic: str) -> None:
    """Write something in a transaction that is aborted."""
    producer = Producer({"bootstrap.servers": BOOTSTRAP, "transactional.id": f"{topic}-aborter"})
    producer.init_transactions(DEADLINE_SECONDS)
    producer.begin_transaction()
    producer.produce(topic, key="aborted", value="x", partition=0)
    flushed(producer)
    producer.abort_transaction(DEADLINE_SECONDS)


def apply(table: Table, key: bytes, value: bytes | None) -> None:
    if value is None:
        table.pop(key.decode(), None)
    else:
        table[key.decode()] = value.decode()


@scenario
def read_with_confluent(topic: str) -> Table:
    """The table, from the earliest offset to the end as it is now."""
    consumer = Consumer(
        {
            "bootstrap.servers": BOOTSTRAP,
            "group.id": "not used",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
        }
    )
    try:
        _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=DEADLINE_SECONDS)
        consumer.assign([TopicPartition(topic, 0, 0)])
        table: Table = {}
        deadline = time.monotonic() + DEADLINE_SECONDS
        while time.monotonic() < deadline:
            message = consumer.poll(1.0)
            if message is None:
                continue
            if message.error() is not None:
                # The end of the partition, which is told also behind batches without records.
                assert message.offset() >= end, (message.error(), message.offset(), end)
                return table
            apply(table, message.key(), message.value())
        raise AssertionError(f"the end {end} was not reached")
    finally:
        consumer.close()


@scenario
def read_with_kafka_python(topic: str) -> Table:
    from kafka import KafkaConsumer
    from kafka import TopicPartition as Place

    consumer = KafkaConsumer(
        bootstrap_servers=BOOTSTRAP, isolation_level="read_committed", enable_auto_commit=False
    )
    place = Place(topic, 0)
    consumer.assign([place])
    try:
        end = consumer.end_offsets([place])[place]
        consumer.seek(place, 0)
        table: Table = {}
        deadline = time.monotonic() + DEADLINE_SECONDS
        while consumer.position(place) < end:
            assert time.monotonic() < deadline, (consumer.position(place), end)
            for records in consumer.poll(200).values():
                for record in records:
                    apply(table, record.key, record.value)
        return table
    finally:
        consumer.close()


@scenario
async def read_with_aiokafka(topic: str) -> Table:
    from aiokafka import AIOKafkaConsumer
    from aiokafka import TopicPartition as Place

    consumer: Any = AIOKafkaConsumer(
        bootstrap_servers=BOOTSTRAP, isolation_level="read_committed", enable_auto_commit=False
    )
    await consumer.start()
    try:
        place = Place(topic, 0)
        consumer.assign([place])
        end = (await consumer.end_offsets([place]))[place]
        consumer.seek(place, 0)
        table: Table = {}
        async with asyncio.timeout(DEADLINE_SECONDS):
            while await consumer.position(place) < end:
                for records in (await consumer.getmany(place, timeout_ms=200)).values():
                    for record in records:
                        apply(table, record.key, record.value)
        return table
    finally:
        await consumer.stop()


@scenario
def commit_offsets_in_transactions(topic: str, group: str, rounds: int) -> int:
    """Commit a rising offset inside of transactions, aborting every third; returns what must be found."""
    producer = Producer({"bootstrap.servers": BOOTSTRAP, "transactional.id": f"{group}-copier"})
    producer.init_transactions(DEADLINE_SECONDS)
    consumer = Consumer({"bootstrap.servers": BOOTSTRAP, "group.id": group})
    committed = -1
    try:
        for number in range(1, rounds + 1):
            producer.begin_transaction()
            producer.send_offsets_to_transaction(
                [TopicPartition(topic, 0, number)], consumer.consumer_group_metadata(), DEADLINE_SECONDS
            )
            if number % 3:
                producer.commit_transaction(DEADLINE_SECONDS)
                committed = number
            else:
                producer.abort_transaction(DEADLINE_SECONDS)
    finally:
        consumer.close()
    return committed


@scenario
def committed_offset(topic: str, group: str) -> int:
    consumer = Consumer({"bootstrap.servers": BOOTSTRAP, "group.id": group})
    try:
        (found,) = consumer.committed([TopicPartition(topic, 0)], timeout=DEADLINE_SECONDS)
        return int(found.offset)
    finally:
        consumer.close()


if __name__ == "__main__":
    serve()
