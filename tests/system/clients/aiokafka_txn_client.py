"""Transactions with aiokafka: named producers, driven step by step."""

from __future__ import annotations

from collections.abc import Awaitable

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError

from system.clients.worker import BOOTSTRAP, scenario, serve

_producers: dict[str, AIOKafkaProducer] = {}


async def outcome(work: Awaitable[object]) -> str:
    """ "ok", or the name of the error that a call ends with."""
    try:
        await work
    except KafkaError as error:
        return type(error).__name__
    return "ok"


@scenario
async def create(topic: str, partitions: int) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=BOOTSTRAP)
    await admin.start()
    await admin.create_topics([NewTopic(topic, partitions, 1)])
    await admin.close()


@scenario
async def start(name: str, transactional_id: str, timeout_ms: int = 60_000) -> str:
    _producers[name] = AIOKafkaProducer(
        bootstrap_servers=BOOTSTRAP, transactional_id=transactional_id, transaction_timeout_ms=timeout_ms
    )
    return await outcome(_producers[name].start())


@scenario
async def begin(name: str) -> str:
    return await outcome(_producers[name].begin_transaction())


@scenario
async def send(name: str, topic: str, texts: list[str], partition: int = 0) -> str:
    """Write, and wait for the acknowledgements."""
    try:
        futures = [await _producers[name].send(topic, text.encode(), partition=partition) for text in texts]
        for future in futures:
            await future
    except KafkaError as error:
        return type(error).__name__
    return "ok"


@scenario
async def send_offsets(name: str, group: str, topic: str, offset: int) -> str:
    offsets = {TopicPartition(topic, 0): offset}
    return await outcome(_producers[name].send_offsets_to_transaction(offsets, group))


@scenario
async def commit(name: str) -> str:
    return await outcome(_producers[name].commit_transaction())


@scenario
async def abort(name: str) -> str:
    return await outcome(_producers[name].abort_transaction())


@scenario
async def drop(name: str) -> None:
    """Let go of a producer without ending anything."""
    producer = _producers.pop(name)
    producer._sender._sender_task.cancel()  # ``stop`` would commit or abort
    await producer.client.close()


@scenario
async def write_plain(topic: str, texts: list[str], partition: int = 0) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=BOOTSTRAP)
    await producer.start()
    for text in texts:
        await producer.send_and_wait(topic, text.encode(), partition=partition)
    await producer.stop()


@scenario
async def read(topic: str, level: str, partition: int = 0) -> list[str]:
    """Everything up to the end that this isolation level sees."""
    consumer = AIOKafkaConsumer(
        bootstrap_servers=BOOTSTRAP, isolation_level=level, auto_offset_reset="earliest", group_id=None
    )
    await consumer.start()
    place = TopicPartition(topic, partition)
    found: list[str] = []
    try:
        consumer.assign([place])
        end = (await consumer.end_offsets([place]))[place]
        while await consumer.position(place) < end:
            for records in (await consumer.getmany(timeout_ms=200)).values():
                found += [record.value.decode() for record in records]
        return found
    finally:
        await consumer.stop()


@scenario
async def committed(group: str, topic: str) -> int:
    consumer = AIOKafkaConsumer(bootstrap_servers=BOOTSTRAP, group_id=group, enable_auto_commit=False)
    await consumer.start()
    try:
        place = TopicPartition(topic, 0)
        consumer.assign([place])
        offset = await consumer.committed(place)
        return -1001 if offset is None else int(offset)
    finally:
        await consumer.stop()


if __name__ == "__main__":
    serve()
