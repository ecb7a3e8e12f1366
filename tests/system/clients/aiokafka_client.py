"""What the tests do with aiokafka."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic, RecordsToDelete
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.coordinator.assignors.roundrobin import RoundRobinPartitionAssignor
from aiokafka.coordinator.assignors.sticky.sticky_assignor import StickyPartitionAssignor
from aiokafka.errors import KafkaError
from aiokafka.structs import OffsetAndMetadata

from system.clients.exchange import EXCHANGE_SECONDS, PAUSE_SECONDS, Told
from system.clients.worker import BOOTSTRAP, MemberState, scenario, serve

DEADLINE_SECONDS = 120.0
CREATE_TIME, APPEND_TIME = 0, 1

# --- tools


@asynccontextmanager
async def admin() -> AsyncIterator[AIOKafkaAdminClient]:
    client = AIOKafkaAdminClient(bootstrap_servers=BOOTSTRAP)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def create(topic: str, partitions: int = 1, **config: Any) -> list[int]:
    """Error codes of the answer."""
    config = {name.replace("_", "."): str(value) for name, value in config.items()}
    async with admin() as client:
        response = await client.create_topics([NewTopic(topic, partitions, 1, topic_configs=config)])
    return [error[1] for error in response.topic_errors]


async def produce(topic: str, records: list[Any], **config: Any) -> list[Any]:
    """Send values, or dictionaries of arguments; for each its metadata or its error's name, in order."""
    producer = AIOKafkaProducer(bootstrap_servers=BOOTSTRAP, **config)
    await producer.start()
    try:
        futures = []
        for record in records:
            arguments = record if isinstance(record, dict) else {"value": record, "partition": 0}
            arguments = {name: _encoded(value) for name, value in arguments.items()}
            futures.append(await producer.send(topic, **arguments))
        await producer.flush()
        return [await _outcome(future) for future in futures]
    finally:
        await producer.stop()


def _encoded(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


async def _outcome(future: Any) -> Any:
    try:
        return await future
    except KafkaError as error:
        return type(error).__name__


@asynccontextmanager
async def consumer(*topics: str, **config: Any) -> AsyncIterator[AIOKafkaConsumer]:
    settings = {"enable_auto_commit": False, "auto_offset_reset": "earliest", **config}
    made = AIOKafkaConsumer(*topics, bootstrap_servers=BOOTSTRAP, **settings)
    await made.start()
    try:
        yield made
    finally:
        await made.stop()


async def take(source: AIOKafkaConsumer, count: int) -> list[Any]:
    async with asyncio.timeout(DEADLINE_SECONDS):
        return [await source.getone() for _ in range(count)]


async def read(topic: str, count: int, start: int = 0, partition: int = 0, **config: Any) -> list[Any]:
    async with consumer(**config) as source:
        place = TopicPartition(topic, partition)
        source.assign([place])
        source.seek(place, start)
        return await take(source, count)


def values(records: list[Any]) -> list[Any]:
    return [None if record.value is None else record.value.decode() for record in records]


async def watermarks(topic: str) -> tuple[int, int]:
    place = TopicPartition(topic, 0)
    async with consumer() as source:
        return (await source.beginning_offsets([place]))[place], (await source.end_offsets([place]))[place]


async def until_watermarks(topic: str, wanted: Any) -> tuple[int, int]:
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not wanted(*(found := await watermarks(topic))):
            pass
    return found


# --- producing and consuming


@scenario
async def every_codec_with_every_acks(topic: str, codec: str) -> None:
    await create(topic)
    sent: list[str] = []
    for acks in (0, 1, "all"):
        batch = [f"{codec} {acks} {number} {'ebb and flow ' * 20}" for number in range(50)]
        compression = None if codec == "none" else codec
        results = await produce(topic, batch, acks=acks, compression_type=compression, linger_ms=50)
        if acks != 0:
            assert [result.offset for result in results] == list(range(len(sent), len(sent) + 50))
        sent += batch
        assert values(await read(topic, len(sent))) == sent


@scenario
async def idempotent_producer_writes_everything_once_and_in_order(topic: str) -> None:
    await create(topic)
    sent = [f"v{number}" for number in range(1_000)]
    results = await produce(topic, sent, enable_idempotence=True, max_batch_size=500)
    assert [result.offset for result in results] == list(range(1_000))
    assert values(await read(topic, 1_000)) == sent


@scenario
async def keys_headers_null_values_and_timestamps_survive(topic: str) -> None:
    await create(topic, retention_ms=-1)
    records: list[dict[str, Any]] = [
        {"key": "k", "value": "v", "headers": [("a", b"1"), ("a", b"2")], "timestamp_ms": 1_000},
        {"key": "k", "value": None, "timestamp_ms": 2_000},
        {"key": None, "value": "", "timestamp_ms": 3_000},
        {"key": b"\x00\xff", "value": b"\x80" * 10, "headers": [("é", b"\x00")], "timestamp_ms": 4_000},
    ]
    await produce(topic, [record | {"partition": 0} for record in records])
    found = await read(topic, 4)
    assert [(record.key, record.value) for record in found] == [
        (b"k", b"v"),
        (b"k", None),
        (None, b""),
        (b"\x00\xff", b"\x80" * 10),
    ]
    assert list(found[0].headers) == [("a", b"1"), ("a", b"2")]
    assert list(found[3].headers) == [("é", b"\x00")]
    assert [(record.timestamp_type, record.timestamp) for record in found] == [
        (CREATE_TIME, time_ms) for time_ms in (1_000, 2_000, 3_000, 4_000)
    ]


@scenario
async def large_messages_up_to_the_topics_limit(topic: str) -> None:
    await create(topic, max_message_bytes=3_000_000)
    rng = random.Random(1)
    fits, too_large = rng.randbytes(2_900_000), rng.randbytes(3_100_000)
    sizes = {"max_request_size": 10_000_000, "max_batch_size": 10_000_000}
    results = [(await produce(topic, [value], **sizes))[0] for value in (fits, too_large, b"after")]
    assert results[1] == "MessageSizeTooLargeError"
    found = await read(topic, 2, max_partition_fetch_bytes=100_000)
    assert [record.value for record in found] == [fits, b"after"]


@scenario
async def reading_from_the_beginning_the_end_and_an_offset(topic: str) -> None:
    await create(topic)
    await produce(topic, [f"old{number}" for number in range(10)])
    assert values(await read(topic, 10)) == [f"old{number}" for number in range(10)]
    assert values(await read(topic, 3, 7)) == ["old7", "old8", "old9"]
    async with consumer() as source:
        place = TopicPartition(topic, 0)
        source.assign([place])
        await source.seek_to_end(place)
        assert await source.position(place) == 10
        await produce(topic, ["new"])
        assert values(await take(source, 1)) == ["new"]


@scenario
async def offsets_are_found_by_time(topic: str) -> None:
    await create(topic, retention_ms=-1)
    times = [1_000 * (number + 1) for number in range(20)]
    await produce(topic, [{"value": "v", "partition": 0, "timestamp_ms": time_ms} for time_ms in times])
    place = TopicPartition(topic, 0)
    async with consumer() as source:
        found = [
            (await source.offsets_for_times({place: time_ms}))[place] for time_ms in (0, 5_000, 5_001, 30_000)
        ]
    assert [one and (one.offset, one.timestamp) for one in found] == [
        (0, 1_000),
        (4, 5_000),
        (5, 6_000),
        None,
    ]


@scenario
async def reading_pauses_resumes_and_seeks(topic: str) -> None:
    await create(topic, partitions=2)
    for partition in (0, 1):
        await produce(
            topic, [{"value": f"p{partition} {number}", "partition": partition} for number in range(5)]
        )
    zero, one = TopicPartition(topic, 0), TopicPartition(topic, 1)
    async with consumer() as source:
        source.assign([zero, one])
        source.pause(zero)
        assert values(await take(source, 5)) == [f"p1 {number}" for number in range(5)]
        source.resume(zero)
        assert values(await take(source, 5)) == [f"p0 {number}" for number in range(5)]
        source.seek(zero, 3)
        assert values(await take(source, 2)) == ["p0 3", "p0 4"]
        assert (await source.position(zero), await source.position(one)) == (5, 5)


@scenario
async def an_offset_out_of_range_is_reset_or_reported(topic: str) -> None:
    await create(topic)
    await produce(topic, ["a", "b", "c"])
    place = TopicPartition(topic, 0)
    async with admin() as client:
        await client.delete_records({place: RecordsToDelete(before_offset=2)})
    assert values(await read(topic, 1)) == ["c"]
    try:
        await read(topic, 1, auto_offset_reset="none")
    except KafkaError as error:
        assert type(error).__name__ == "OffsetOutOfRangeError"
    else:
        raise AssertionError("no error")


@scenario
async def batches_are_stored_with_the_topics_codec(topic: str, codec: str) -> None:
    await create(topic, compression_type=codec)
    sent = [f"{number} {'high water ' * 30}" for number in range(100)]
    await produce(topic, sent, compression_type="gzip", linger_ms=100)
    await produce(topic, sent, compression_type=None, linger_ms=100)
    assert values(await read(topic, 200, check_crcs=True)) == sent * 2


@scenario
async def the_append_time_replaces_the_producers(topic: str) -> None:
    await create(topic, message_timestamp_type="LogAppendTime")
    before_ms = time.time_ns() // 1_000_000
    (report,) = await produce(topic, [{"value": "v", "partition": 0, "timestamp_ms": 1_000}])
    (record,) = await read(topic, 1)
    assert record.timestamp_type == APPEND_TIME
    assert before_ms <= record.timestamp <= time.time_ns() // 1_000_000
    assert (report.timestamp_type, report.timestamp) == (APPEND_TIME, record.timestamp)


# --- topics that are missing


@scenario
async def a_missing_topic_is_created_by_writing(topic: str) -> None:
    (result,) = await produce(topic, [{"value": "v"}])
    assert (result.partition, result.offset) == (0, 0)


@scenario
async def a_missing_topic_is_an_error(topic: str) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=BOOTSTRAP, request_timeout_ms=1_000)
    await producer.start()
    try:
        await producer.send_and_wait(topic, b"v")
    except KafkaError as error:
        # aiokafka asks for metadata until its request timeout is over, and then says which topic it wanted.
        assert type(error).__name__ in ("UnknownTopicOrPartitionError", "KafkaTimeoutError")
    else:
        raise AssertionError("no error")
    finally:
        await producer.stop()
    async with admin() as client:
        assert topic not in await client.list_topics()


# --- deletion of old data


@scenario
async def retention_by_size_moves_the_start(topic: str) -> None:
    small_segments: dict[str, Any] = {"internal.segment.bytes": "2000"}
    await create(topic, **small_segments)
    sent = [f"{number:03d}" + "x" * 500 for number in range(30)]
    await produce(topic, sent, max_batch_size=600)
    # Only now, so that one look at the log decides what goes.
    limits = small_segments | {"retention.bytes": "6000"}
    async with admin() as client:
        await client.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, configs=limits)])
    low, high = await until_watermarks(topic, lambda low, high: low > 0)
    assert high == 30
    assert values(await read(topic, 30 - low, low)) == sent[low:]


@scenario
async def retention_by_time_empties_the_topic(topic: str) -> None:
    await create(topic, **{"retention.ms": 60_000})
    await produce(topic, [{"value": "old", "partition": 0, "timestamp_ms": 1_000}])
    await until_watermarks(topic, lambda low, high: (low, high) == (1, 1))
    await produce(topic, ["new"])
    assert [(record.offset, record.value) for record in await read(topic, 1)] == [(1, b"new")]


@scenario
async def records_are_deleted_up_to_an_offset(topic: str) -> None:
    await create(topic)
    await produce(topic, ["a", "b", "c"])
    place = TopicPartition(topic, 0)
    async with admin() as client:
        assert await client.delete_records({place: RecordsToDelete(before_offset=2)}) == {place: 2}
    assert await watermarks(topic) == (2, 3)
    assert values(await read(topic, 1, 2)) == ["c"]


# --- groups


class Member(ConsumerRebalanceListener):  # type: ignore[misc]
    """A member of a group, reading until it is told to leave."""

    def __init__(self, group: str, config: dict[str, Any]) -> None:
        self.state = MemberState()
        settings = {
            "auto_offset_reset": "earliest",
            "session_timeout_ms": 45_000,
            "heartbeat_interval_ms": 200,
        }
        self._consumer = AIOKafkaConsumer(bootstrap_servers=BOOTSTRAP, group_id=group, **(settings | config))

    async def join(self, topic: str) -> Member:
        self._consumer.subscribe([topic], listener=self)
        await self._consumer.start()
        self._task = asyncio.create_task(self._read())
        return self

    def on_partitions_revoked(self, revoked: Any) -> None:
        pass

    def on_partitions_assigned(self, assigned: Any) -> None:
        self.state.assign({place.partition for place in assigned})

    async def _read(self) -> None:
        async for record in self._consumer:
            self.state.read(record.value.decode())

    async def leave(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._consumer.stop()


members: dict[str, Member] = {}
ASSIGNORS = {"roundrobin": RoundRobinPartitionAssignor, "sticky": StickyPartitionAssignor}


@scenario
async def member_join(name: str, group: str, topic: str, assignor: str | None = None, **config: Any) -> None:
    if assignor is not None:
        config["partition_assignment_strategy"] = [ASSIGNORS[assignor]]
    members[name] = await Member(group, config).join(topic)


@scenario
async def member_wait(name: str, partitions: int | None = None, values: int = 0) -> dict[str, Any]:
    return await asyncio.to_thread(members[name].state.wait, partitions, values)


@scenario
async def member_leave(name: str) -> None:
    await members.pop(name).leave()


@scenario
async def create_topic(topic: str, partitions: int) -> None:
    await create(topic, partitions)


@scenario
async def produce_to_partitions(topic: str, texts: list[str], partitions: int) -> None:
    records = [{"value": text, "partition": number % partitions} for number, text in enumerate(texts)]
    await produce(topic, records)


@scenario
async def offsets_are_committed_and_fetched(topic: str) -> None:
    await create(topic, partitions=2)
    await produce(topic, [f"v{number}" for number in range(10)])
    group, zero, one = f"{topic}-group", TopicPartition(topic, 0), TopicPartition(topic, 1)
    async with consumer(group_id=group) as source:
        source.assign([zero, one])
        await take(source, 4)
        await source.commit({zero: 4, one: OffsetAndMetadata(77, "a note")})
    async with consumer(group_id=group) as source:
        source.assign([zero])
        assert (await source.committed(zero), await source.committed(one)) == (4, 77)
        assert values(await take(source, 6)) == [f"v{number}" for number in range(4, 10)]
    async with admin() as client:
        assert (await client.list_consumer_group_offsets(group))[one] == OffsetAndMetadata(77, "a note")
    async with consumer(group_id=f"{group}-unknown") as source:
        source.assign([zero])
        assert await source.committed(zero) is None


@scenario
async def a_pattern_subscribes_to_the_topics_it_matches(topic: str) -> None:
    for name in (f"{topic}-a", f"{topic}-b", f"other-{topic}"):
        await create(name)
        await produce(name, [name])
    async with consumer(group_id=topic) as source:
        source.subscribe(pattern=f"^{topic}-.*")
        assert sorted(values(await take(source, 2))) == [f"{topic}-a", f"{topic}-b"]


@scenario
async def groups_are_listed_and_described(topic: str) -> None:
    await create(topic, partitions=2)
    group = f"{topic}-group"
    member = await Member(group, {"client_id": "tester"}).join(topic)
    await asyncio.to_thread(member.state.wait, 2, 0)
    async with admin() as client:
        assert (group, "consumer") in await client.list_consumer_groups()
        assert (await client.find_coordinator(group)) == 1
        (response,) = await client.describe_consumer_groups([group])
        (described,) = response.groups
        code, name, state, protocol_type = described[:4]
        assert (code, name, state, protocol_type) == (0, group, "Stable", "consumer")
        assert [described_member[1] for described_member in described[5]] == ["tester"]
    await member.leave()


# --- administration


@scenario
async def topics_are_created_described_and_deleted(topic: str) -> None:
    assert await create(topic, 3, retention_ms=1_000_000) == [0]
    assert await create(topic) == [36]
    assert await create("no/slash") == [17]
    assert await create(f"{topic}-2", retention_mss=1) == [40]
    async with admin() as client:
        assert f"{topic}-2" not in await client.list_topics()
        (described,) = await client.describe_topics([topic])
        assert (described["topic"], len(described["partitions"])) == (topic, 3)
        response = await client.delete_topics([topic])
        assert [code for _, code in response.topic_error_codes] == [0]
        assert topic not in await client.list_topics()
        response = await client.delete_topics([topic])
        assert [code for _, code in response.topic_error_codes] == [3]


@scenario
async def partitions_are_added(topic: str) -> None:
    await create(topic)
    async with admin() as client:
        response = await client.create_partitions({topic: NewPartitions(3)})
        assert [error[1] for error in response.topic_errors] == [0]
        (described,) = await client.describe_topics([topic])
        assert len(described["partitions"]) == 3
    await produce(topic, [{"value": "v", "partition": 2}])
    assert values(await read(topic, 1, partition=2)) == ["v"]


@scenario
async def configs_are_described_and_altered(topic: str) -> None:
    await create(topic, retention_ms=1_000_000)

    async def current(client: AIOKafkaAdminClient) -> dict[str, str]:
        (response,) = await client.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
        (resource,) = response.resources
        return {entry[0]: entry[1] for entry in resource[4]}

    async with admin() as client:
        assert (await current(client))["retention.ms"] == "1000000"
        change = ConfigResource(ConfigResourceType.TOPIC, topic, configs={"max.message.bytes": "2000"})
        await client.alter_configs([change])
        changed = await current(client)
        assert (changed["max.message.bytes"], changed["retention.ms"]) == ("2000", "604800000")


@scenario
async def the_cluster_is_described(topic: str) -> None:
    await create(topic)
    async with admin() as client:
        described = await client.describe_cluster()
        (broker,) = described["brokers"]
        assert f"{broker['host']}:{broker['port']}" == BOOTSTRAP
        assert described["controller_id"] == 1
        assert topic in await client.list_topics()


# --- over changes of a cluster


class AiokafkaExchange:
    """A producer and a consumer that live as long as the process."""

    def __init__(self, topic: str, partitions: int) -> None:
        self._topic, self._told = topic, Told(partitions)
        self._places = [TopicPartition(topic, partition) for partition in range(partitions)]
        settings = {
            "bootstrap_servers": BOOTSTRAP,
            "request_timeout_ms": 10_000,
            "metadata_max_age_ms": 1_000,
        }
        self._producer = AIOKafkaProducer(**settings, enable_idempotence=True)
        self._consumer = AIOKafkaConsumer(**settings, enable_auto_commit=False, auto_offset_reset="none")

    async def start(self) -> None:
        await self._producer.start()
        await self._consumer.start()
        self._consumer.assign(self._places)
        for place in self._places:
            self._consumer.seek(place, 0)

    async def run(self, count: int) -> None:
        sent = []
        for _ in range(count):
            partition, value = self._told.next()
            sent.append(await self._producer.send(self._topic, value.encode(), partition=partition))
            await asyncio.sleep(PAUSE_SECONDS)
        async with asyncio.timeout(EXCHANGE_SECONDS):
            await asyncio.gather(*sent)
            while not self._told.is_complete:
                found = await self._consumer.getmany(timeout_ms=100)
                for records in found.values():
                    for each in records:
                        self._told.read(each.partition, each.value.decode())


_exchanges: list[AiokafkaExchange] = []


@scenario
async def start_exchange(topic: str, partitions: int) -> None:
    _exchanges.append(AiokafkaExchange(topic, partitions))
    await _exchanges[-1].start()


@scenario
async def exchange(count: int) -> None:
    await _exchanges[-1].run(count)


if __name__ == "__main__":
    serve()
