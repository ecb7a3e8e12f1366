"""What the tests do with confluent-kafka (librdkafka)."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    TIMESTAMP_CREATE_TIME,
    TIMESTAMP_LOG_APPEND_TIME,
    Consumer,
    ConsumerGroupTopicPartitions,
    ElectionType,
    IsolationLevel,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from system.clients.exchange import EXCHANGE_SECONDS, Exchange, serve_exchange
from system.clients.worker import BOOTSTRAP, MemberState, scenario, serve, until

DEADLINE_SECONDS = 120.0
BASE = {"bootstrap.servers": BOOTSTRAP, "log_level": 3, "reconnect.backoff.max.ms": 200}

# --- tools


@cache
def admin() -> AdminClient:
    """One for all calls: an admin client that nobody holds gives its calls up."""
    return AdminClient(BASE)


def done(futures: dict[Any, Any]) -> list[Any]:
    """The results of an admin call, in order; raises what any of them raises."""
    return [future.result(DEADLINE_SECONDS) for future in futures.values()]


def refusal(futures: dict[Any, Any]) -> str:
    """The name of the error that an admin call ends with."""
    try:
        done(futures)
    except KafkaException as error:
        return str(error.args[0].name())
    return "accepted"


def create(topic: str, partitions: int = 1, **config: Any) -> None:
    config = {name.replace("_", "."): str(value) for name, value in config.items()}
    done(
        admin().create_topics(
            [NewTopic(topic, partitions, 1, config=config)], operation_timeout=DEADLINE_SECONDS
        )
    )


def produce(topic: str, records: list[Any], **config: Any) -> list[Any]:
    """Send values, or dictionaries of arguments; for each its message or its error's name, in order."""
    producer = Producer(BASE | {name.replace("_", "."): value for name, value in config.items()})
    results: list[Any] = [None] * len(records)

    def reported(number: int) -> Any:
        def note(error: KafkaError | None, message: Message) -> None:
            results[number] = message if error is None else error.name()

        return note

    for number, record in enumerate(records):
        arguments = record if isinstance(record, dict) else {"value": record, "partition": 0}
        producer.produce(topic, on_delivery=reported(number), **arguments)
    assert producer.flush(DEADLINE_SECONDS) == 0
    return results


@contextmanager
def consumer(**config: Any) -> Iterator[Consumer]:
    settings = {"group.id": "none", "enable.auto.commit": False, "enable.partition.eof": False}
    made = Consumer(BASE | settings | {name.replace("_", "."): value for name, value in config.items()})
    try:
        yield made
    finally:
        made.close()


def take(source: Consumer, count: int) -> list[Message]:
    deadline = time.monotonic() + DEADLINE_SECONDS
    messages: list[Message] = []
    while len(messages) < count:
        for message in source.consume(count - len(messages), timeout=1.0):
            assert message.error() is None, message.error()
            messages.append(message)
        assert time.monotonic() < deadline, f"{len(messages)} of {count} messages"
    return messages


def read(
    topic: str, count: int, start: int = OFFSET_BEGINNING, partition: int = 0, **config: Any
) -> list[Message]:
    with consumer(**config) as source:
        source.assign([TopicPartition(topic, partition, start)])
        return take(source, count)


def values(messages: list[Message]) -> list[Any]:
    return [value.decode() if (value := message.value()) is not None else None for message in messages]


def watermarks(topic: str, partition: int = 0) -> tuple[int, int]:
    with consumer() as source:
        low, high = source.get_watermark_offsets(TopicPartition(topic, partition), timeout=DEADLINE_SECONDS)
        return low, high


# --- producing and consuming


@scenario
def every_codec_with_every_acks(topic: str, codec: str) -> None:
    create(topic)
    sent: list[str] = []
    for acks in ("0", "1", "all"):
        batch = [f"{codec} {acks} {number} {'ebb and flow ' * 20}" for number in range(50)]
        results = produce(topic, batch, acks=acks, compression_type=codec, linger_ms=50)
        if acks != "0":
            assert [result.offset() for result in results] == list(range(len(sent), len(sent) + 50))
        sent += batch
        # Without acknowledgements only the reader can tell that all of it has arrived.
        assert values(read(topic, len(sent))) == sent


@scenario
def idempotent_producer_writes_everything_once_and_in_order(topic: str) -> None:
    create(topic, partitions=3)
    records = [{"value": f"v{number}", "partition": number % 3} for number in range(3_000)]
    results = produce(topic, records, enable_idempotence=True, batch_num_messages=50)
    assert all(isinstance(result, Message) for result in results)
    for partition in range(3):
        assert values(read(topic, 1_000, partition=partition)) == [
            f"v{n}" for n in range(partition, 3_000, 3)
        ]
        assert watermarks(topic, partition) == (0, 1_000)


@scenario
def keys_headers_null_values_and_timestamps_survive(topic: str) -> None:
    create(topic, retention_ms=-1)
    records: list[dict[str, Any]] = [
        {"key": "k", "value": "v", "headers": [("a", b"1"), ("a", b"2"), ("none", None)], "timestamp": 1_000},
        {"key": "k", "value": None, "timestamp": 2_000},
        {"key": None, "value": "", "timestamp": 3_000},
        {"key": b"\x00\xff", "value": b"\x80" * 10, "headers": [("é", b"\x00")], "timestamp": 4_000},
    ]
    produce(topic, [record | {"partition": 0} for record in records])
    first, tombstone, keyless, binary = read(topic, 4)
    assert (first.key(), first.value()) == (b"k", b"v")
    assert first.headers() == [("a", b"1"), ("a", b"2"), ("none", None)]
    assert (tombstone.key(), tombstone.value()) == (b"k", None)
    assert (keyless.key(), keyless.value()) == (None, b"")
    assert (binary.key(), binary.value(), binary.headers()) == (b"\x00\xff", b"\x80" * 10, [("é", b"\x00")])
    assert [message.timestamp() for message in (first, tombstone, keyless, binary)] == [
        (TIMESTAMP_CREATE_TIME, time_ms) for time_ms in (1_000, 2_000, 3_000, 4_000)
    ]


@scenario
def large_messages_up_to_the_topics_limit(topic: str) -> None:
    create(topic, max_message_bytes=3_000_000)
    rng = random.Random(1)
    fits, too_large = rng.randbytes(2_900_000), rng.randbytes(3_100_000)
    results = produce(topic, [fits, too_large, b"after"], message_max_bytes=10_000_000, linger_ms=0)
    assert results[1] == "MSG_SIZE_TOO_LARGE"
    assert [message.value() for message in read(topic, 2, fetch_message_max_bytes=100_000)] == [
        fits,
        b"after",
    ]


@scenario
def reading_from_the_beginning_the_end_and_an_offset(topic: str) -> None:
    create(topic)
    produce(topic, [f"old{number}" for number in range(10)])
    assert values(read(topic, 10, OFFSET_BEGINNING)) == [f"old{number}" for number in range(10)]
    assert values(read(topic, 3, 7)) == ["old7", "old8", "old9"]
    with consumer() as source:
        end = TopicPartition(topic, 0, OFFSET_END)
        source.assign([end])
        # A timed-out poll shows that the end is known: only then may the next record be sent.
        until(lambda: source.poll(0.1) is None and source.position([end])[0].offset in (10, -1001))
        until(lambda: source.get_watermark_offsets(end, cached=True)[1] == 10)
        produce(topic, ["new"])
        assert values(take(source, 1)) == ["new"]


@scenario
def offsets_are_found_by_time(topic: str) -> None:
    create(topic, retention_ms=-1)
    produce(
        topic, [{"value": "v", "partition": 0, "timestamp": 1_000 * (number + 1)} for number in range(20)]
    )
    with consumer() as source:
        wanted = [TopicPartition(topic, 0, time_ms) for time_ms in (0, 5_000, 5_001, 30_000)]
        found = [source.offsets_for_times([one], DEADLINE_SECONDS)[0].offset for one in wanted]
    assert found == [0, 4, 5, OFFSET_END]


@scenario
def the_offset_of_the_newest_timestamp_is_found(topic: str) -> None:
    create(topic, retention_ms=-1)
    for time_ms in (1_000, 9_000, 3_000):
        produce(topic, [{"value": "v", "partition": 0, "timestamp": time_ms}])
    at = TopicPartition(topic, 0)
    found = [
        done(admin().list_offsets({at: spec}, isolation_level=isolation))[0]
        for spec in (
            OffsetSpec.earliest(),
            OffsetSpec.latest(),
            OffsetSpec.max_timestamp(),
            OffsetSpec.for_timestamp(2_000),
        )
        for isolation in (IsolationLevel.READ_UNCOMMITTED, IsolationLevel.READ_COMMITTED)
    ]
    assert [one.offset for one in found] == [0, 0, 3, 3, 1, 1, 1, 1]
    assert found[4].timestamp == 9_000


@scenario
def reading_pauses_resumes_and_seeks(topic: str) -> None:
    create(topic, partitions=2)
    for partition in (0, 1):
        produce(topic, [{"value": f"p{partition} {number}", "partition": partition} for number in range(5)])
    both = [TopicPartition(topic, partition, 0) for partition in (0, 1)]
    with consumer() as source:
        source.assign(both)
        source.pause([both[0]])
        assert values(take(source, 5)) == [f"p1 {number}" for number in range(5)]
        source.resume([both[0]])
        assert values(take(source, 5)) == [f"p0 {number}" for number in range(5)]
        source.seek(TopicPartition(topic, 0, 3))
        assert values(take(source, 2)) == ["p0 3", "p0 4"]
        assert [place.offset for place in source.position(both)] == [5, 5]


@scenario
def an_offset_out_of_range_is_reset_or_reported(topic: str) -> None:
    create(topic)
    produce(topic, ["a", "b", "c"])
    done(admin().delete_records([TopicPartition(topic, 0, 2)]))
    assert values(read(topic, 1, 0, auto_offset_reset="earliest")) == ["c"]
    with consumer(auto_offset_reset="error") as source:
        source.assign([TopicPartition(topic, 0, 0)])
        error = until(lambda: source.poll(1.0)).error()
    assert error.code() == KafkaError._AUTO_OFFSET_RESET


@scenario
def batches_are_stored_with_the_topics_codec(topic: str, codec: str) -> None:
    create(topic, compression_type=codec)
    sent = [f"{number} {'high water ' * 30}" for number in range(100)]
    produce(topic, sent, compression_type="gzip", linger_ms=100)
    produce(topic, sent, compression_type="none", linger_ms=100)
    assert values(read(topic, 200, check_crcs=True)) == sent * 2


@scenario
def the_append_time_replaces_the_producers(topic: str) -> None:
    create(topic, message_timestamp_type="LogAppendTime")
    before_ms = time.time_ns() // 1_000_000
    (report,) = produce(topic, [{"value": "v", "partition": 0, "timestamp": 1_000}])
    kind, time_ms = read(topic, 1)[0].timestamp()
    assert kind == TIMESTAMP_LOG_APPEND_TIME
    assert before_ms <= time_ms <= time.time_ns() // 1_000_000
    assert report.timestamp() == (TIMESTAMP_LOG_APPEND_TIME, time_ms)


# --- topics that are missing


@scenario
def a_missing_topic_is_created_by_writing(topic: str) -> None:
    (result,) = produce(topic, [{"value": "v"}])
    assert (result.partition(), result.offset()) == (0, 0)


@scenario
def a_missing_topic_is_an_error(topic: str) -> None:
    (outcome,) = produce(topic, [{"value": "v"}], topic_metadata_propagation_max_ms=0)
    assert outcome == "UNKNOWN_TOPIC_OR_PART"
    with consumer(allow_auto_create_topics=True, topic_metadata_propagation_max_ms=0) as source:
        source.subscribe([topic])
        error = until(lambda: source.poll(1.0)).error()
    assert error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART
    assert topic not in admin().list_topics(timeout=DEADLINE_SECONDS).topics


# --- deletion of old data


@scenario
def retention_by_size_moves_the_start(topic: str) -> None:
    create(topic, **{"internal.segment.bytes": 2_000})
    produce(topic, [f"{number:03d}" + "x" * 500 for number in range(30)], batch_num_messages=1)
    # Only now, so that one look at the log decides what goes.
    limit = ConfigEntry("retention.bytes", "6000", incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[limit])
    done(admin().incremental_alter_configs([resource]))
    low = until(lambda: watermarks(topic)[0])
    kept = values(read(topic, 30 - low))
    assert [value[:3] for value in kept] == [f"{number:03d}" for number in range(low, 30)]
    assert sum(map(len, kept)) >= 3_000


@scenario
def retention_by_time_empties_the_topic(topic: str) -> None:
    create(topic, **{"retention.ms": 60_000})
    produce(topic, [{"value": "old", "partition": 0, "timestamp": 1_000}])
    until(lambda: watermarks(topic) == (1, 1))
    produce(topic, ["new"])
    assert [(message.offset(), message.value()) for message in read(topic, 1)] == [(1, b"new")]


@scenario
def records_are_deleted_up_to_an_offset(topic: str) -> None:
    create(topic)
    produce(topic, ["a", "b", "c"])
    (deleted,) = done(admin().delete_records([TopicPartition(topic, 0, 2)]))
    assert deleted.low_watermark == 2
    assert watermarks(topic) == (2, 3)
    assert values(read(topic, 1)) == ["c"]
    assert refusal(admin().delete_records([TopicPartition(topic, 0, 9)])) == "OFFSET_OUT_OF_RANGE"
    (deleted,) = done(admin().delete_records([TopicPartition(topic, 0, OFFSET_END)]))
    assert deleted.low_watermark == 3


# --- groups


class Member(threading.Thread):
    """A member of a group, polling until it is told to leave."""

    def __init__(self, group: str, topic: str, config: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.state = MemberState()
        self._leave = threading.Event()
        self._consumer = Consumer(
            BASE
            | {"group.id": group, "auto.offset.reset": "earliest", "session.timeout.ms": 45_000}
            | {"heartbeat.interval.ms": 200}
            | config
        )
        self._incremental = config.get("partition.assignment.strategy") == "cooperative-sticky"
        self._consumer.subscribe(
            [topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked
        )
        self.start()

    def _assigned(self, source: Consumer, partitions: list[TopicPartition]) -> None:
        (source.incremental_assign if self._incremental else source.assign)(partitions)
        self._note()

    def _revoked(self, source: Consumer, partitions: list[TopicPartition]) -> None:
        if self._incremental:
            source.incremental_unassign(partitions)
        else:
            source.unassign()
        self._note()

    def _note(self) -> None:
        self.state.assign({place.partition for place in self._consumer.assignment()})

    def run(self) -> None:
        while not self._leave.is_set():
            message = self._consumer.poll(0.1)
            if message is not None and message.error() is None:
                self.state.read(message.value().decode())
        self._consumer.close()

    def leave(self) -> None:
        self._leave.set()
        self.join()


members: dict[str, Member] = {}


@scenario
def member_join(name: str, group: str, topic: str, **config: Any) -> None:
    members[name] = Member(group, topic, {key.replace("_", "."): value for key, value in config.items()})


@scenario
def member_wait(name: str, partitions: int | None = None, values: int = 0) -> dict[str, Any]:
    return members[name].state.wait(partitions, values)


@scenario
def member_leave(name: str) -> None:
    members.pop(name).leave()


@scenario
def create_topic(topic: str, partitions: int) -> None:
    create(topic, partitions)


@scenario
def produce_to_partitions(topic: str, texts: list[str], partitions: int) -> None:
    records = [{"value": text, "partition": number % partitions} for number, text in enumerate(texts)]
    assert all(isinstance(result, Message) for result in produce(topic, records))


@scenario
def offsets_are_committed_and_fetched(topic: str) -> None:
    create(topic, partitions=2)
    produce(topic, [f"v{number}" for number in range(10)])
    group = f"{topic}-group"
    with consumer(group_id=group) as source:
        source.assign([TopicPartition(topic, 0, 0)])
        messages = take(source, 4)
        source.commit(message=messages[-1], asynchronous=False)
        source.commit(offsets=[TopicPartition(topic, 1, 77, "a note")], asynchronous=False)
    with consumer(group_id=group) as source:
        places = source.committed([TopicPartition(topic, 0), TopicPartition(topic, 1)], DEADLINE_SECONDS)
        assert [(place.offset, place.metadata or None) for place in places] == [(4, None), (77, "a note")]
        source.assign([TopicPartition(topic, 0)])
        assert values(take(source, 6)) == [f"v{number}" for number in range(4, 10)]
    with consumer(group_id=f"{group}-unknown") as source:
        (place,) = source.committed([TopicPartition(topic, 0)], DEADLINE_SECONDS)
        assert place.offset == -1001


@scenario
def a_pattern_subscribes_to_the_topics_it_matches(topic: str) -> None:
    for name in (f"{topic}-a", f"{topic}-b", f"other-{topic}"):
        create(name)
        produce(name, [name])
    with consumer(group_id=topic, auto_offset_reset="earliest") as source:
        source.subscribe([f"^{topic}-.*"])
        assert sorted(values(take(source, 2))) == [f"{topic}-a", f"{topic}-b"]


@scenario
def groups_are_listed_described_and_deleted(topic: str) -> None:
    create(topic, partitions=2)
    group = f"{topic}-group"
    member = Member(group, topic, {"client.id": "tester"})
    member.state.wait(2, 0)
    client = admin()
    listing = client.list_consumer_groups(request_timeout=DEADLINE_SECONDS).result()
    assert {one.group_id: one.state.name for one in listing.valid}[group] == "STABLE"
    (described,) = done(client.describe_consumer_groups([group]))
    assert (described.state.name, described.partition_assignor) == ("STABLE", "range")
    (described_member,) = described.members
    assert (described_member.client_id, described_member.host.strip("/")) == ("tester", "127.0.0.1")
    assert {place.partition for place in described_member.assignment.topic_partitions} == {0, 1}
    assert refusal(client.delete_consumer_groups([group])) == "NON_EMPTY_GROUP"
    member.leave()
    (described,) = done(client.describe_consumer_groups([group]))
    assert described.state.name == "EMPTY"
    done(client.delete_consumer_groups([group]))
    assert refusal(client.delete_consumer_groups([group])) == "GROUP_ID_NOT_FOUND"
    listing = client.list_consumer_groups(request_timeout=DEADLINE_SECONDS).result()
    assert group not in {one.group_id for one in listing.valid}


@scenario
def group_offsets_are_listed_and_altered(topic: str) -> None:
    create(topic)
    group = f"{topic}-group"
    client = admin()
    wanted = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 5)])
    (altered,) = done(client.alter_consumer_group_offsets([wanted]))
    assert altered.topic_partitions[0].error is None
    (listed,) = done(client.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)]))
    assert [(place.topic, place.partition, place.offset) for place in listed.topic_partitions] == [
        (topic, 0, 5)
    ]


# --- administration


@scenario
def topics_are_created_described_and_deleted(topic: str) -> None:
    client = admin()
    create(topic, 3, retention_ms=1_000_000)
    assert refusal(client.create_topics([NewTopic(topic, 1, 1)])) == "TOPIC_ALREADY_EXISTS"
    assert refusal(client.create_topics([NewTopic("no/slash", 1, 1)])) == "TOPIC_EXCEPTION"
    assert refusal(client.create_topics([NewTopic(f"{topic}-2", 1, 3)])) == "INVALID_REPLICATION_FACTOR"
    bad_config = NewTopic(f"{topic}-2", 1, 1, config={"retention.mss": "1"})
    assert refusal(client.create_topics([bad_config])) == "INVALID_CONFIG"
    done(client.create_topics([NewTopic(f"{topic}-2", 1, 1)], validate_only=True))
    assert f"{topic}-2" not in client.list_topics(timeout=DEADLINE_SECONDS).topics
    (described,) = done(client.describe_topics(TopicCollection([topic])))
    assert (described.name, described.is_internal) == (topic, False)
    assert [(place.id, place.leader.id, len(place.isr)) for place in described.partitions] == [
        (number, 1, 1) for number in range(3)
    ]
    done(client.delete_topics([topic], operation_timeout=DEADLINE_SECONDS))
    assert topic not in client.list_topics(timeout=DEADLINE_SECONDS).topics
    assert refusal(client.delete_topics([topic])) == "UNKNOWN_TOPIC_OR_PART"
    create(topic)
    assert watermarks(topic) == (0, 0)


@scenario
def partitions_are_added(topic: str) -> None:
    create(topic)
    client = admin()
    done(client.create_partitions([NewPartitions(topic, 3)]))
    assert len(client.list_topics(topic, timeout=DEADLINE_SECONDS).topics[topic].partitions) == 3
    assert refusal(client.create_partitions([NewPartitions(topic, 2)])) == "INVALID_PARTITIONS"
    produce(topic, [{"value": "v", "partition": 2}])
    assert values(read(topic, 1, partition=2)) == ["v"]


@scenario
def configs_are_described_and_altered(topic: str) -> None:
    create(topic, retention_ms=1_000_000)
    client = admin()

    def resource(*entries: ConfigEntry, **replaced: str) -> ConfigResource:
        config = {name.replace("_", "."): value for name, value in replaced.items()}
        return ConfigResource(ResourceType.TOPIC, topic, set_config=config, incremental_configs=list(entries))

    def current() -> dict[str, Any]:
        (entries,) = done(client.describe_configs([resource()]))
        return {name: (entry.value, entry.is_default) for name, entry in entries.items()}

    assert current()["retention.ms"] == ("1000000", False)
    assert current()["cleanup.policy"] == ("delete", True)
    done(
        client.incremental_alter_configs(
            [
                resource(
                    ConfigEntry("retention.bytes", "5000", incremental_operation=AlterConfigOpType.SET),
                    ConfigEntry("cleanup.policy", "compact", incremental_operation=AlterConfigOpType.APPEND),
                    ConfigEntry("retention.ms", None, incremental_operation=AlterConfigOpType.DELETE),
                )
            ]
        )
    )
    changed = current()
    assert changed["retention.bytes"] == ("5000", False)
    assert changed["cleanup.policy"] == ("delete,compact", False)
    assert changed["retention.ms"] == ("604800000", True)
    done(client.alter_configs([resource(max_message_bytes="2000")]))
    assert current()["max.message.bytes"] == ("2000", False)
    assert current()["retention.bytes"] == ("-1", True)
    bad = ConfigEntry("retention.ms", "soon", incremental_operation=AlterConfigOpType.SET)
    assert refusal(client.incremental_alter_configs([resource(bad)])) == "INVALID_CONFIG"
    (broker,) = done(client.describe_configs([ConfigResource(ResourceType.BROKER, "1")]))
    assert broker


@scenario
def the_cluster_is_described(topic: str) -> None:
    create(topic)
    client = admin()
    described = client.describe_cluster(request_timeout=DEADLINE_SECONDS).result()
    assert [(node.id, f"{node.host}:{node.port}") for node in described.nodes] == [(1, BOOTSTRAP)]
    assert described.controller.id == 1
    metadata = client.list_topics(timeout=DEADLINE_SECONDS)
    assert metadata.cluster_id == described.cluster_id
    assert topic in metadata.topics


@scenario
def leaders_are_elected(topic: str) -> None:
    create(topic)
    future = admin().elect_leaders(ElectionType.PREFERRED, [TopicPartition(topic, 0)])
    (error,) = future.result(DEADLINE_SECONDS).values()
    assert error is None or error.name() == "ELECTION_NOT_NEEDED"


# --- for the restart tests


@scenario
def write(topic: str, texts: list[str]) -> list[int]:
    """Offsets of the written values."""
    return [result.offset() for result in produce(topic, list(texts), enable_idempotence=True)]


@scenario
def read_back(topic: str, count: int) -> list[list[Any]]:
    """(offset, leader epoch, value) of the first records."""
    return [
        [message.offset(), message.leader_epoch(), message.value().decode()] for message in read(topic, count)
    ]


@scenario
def read_up_to_an_error(topic: str, start: int = 0) -> tuple[list[str], str]:
    """The values that come before an error, and the error's name."""
    found: list[str] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    with consumer() as source:
        source.assign([TopicPartition(topic, 0, start)])
        while time.monotonic() < deadline:
            message = source.poll(1.0)
            if message is not None and (error := message.error()) is not None:
                return found, str(error.name())
            if message is not None:
                found += values([message])
    raise AssertionError(f"no error behind {found}")


@scenario
def error_of_a_member(topic: str, group: str) -> str:
    """The name of the error that a member of a group is told."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    with consumer(group_id=group) as source:
        source.subscribe([topic])
        while time.monotonic() < deadline:
            message = source.poll(1.0)
            if message is not None and (error := message.error()) is not None:
                return str(error.name())
    raise AssertionError("a member was told of no error")


@scenario
def write_outcomes(topic: str, texts: list[str], **config: Any) -> list[str]:
    """What becomes of each value: "ok" or the name of the error."""
    return [
        result if isinstance(result, str) else "ok"
        for result in produce(topic, list(texts), **{"message_timeout_ms": 3_000, **config})
    ]


open_producers: dict[str, tuple[Producer, list[Any]]] = {}


@scenario
def producer_open(name: str) -> None:
    """An idempotent producer that stays, with its sequence numbers, until the process ends."""
    open_producers[name] = Producer(BASE | {"enable.idempotence": True, "linger.ms": 5}), []


@scenario
def producer_send(name: str, topic: str, texts: list[str]) -> None:
    """Hand values to the producer without waiting for their acknowledgements."""
    producer, reports = open_producers[name]
    for text in texts:
        producer.produce(
            topic,
            text,
            partition=0,
            on_delivery=lambda error, message: reports.append(error and error.name()),
        )
    producer.poll(0)


@scenario
def producer_flush(name: str) -> list[str | None]:
    """Wait for every acknowledgement; the errors, None where there was none."""
    producer, reports = open_producers[name]
    assert producer.flush(DEADLINE_SECONDS) == 0
    return reports


@scenario
def committed_offset(group: str, topic: str) -> int:
    with consumer(group_id=group) as source:
        return int(source.committed([TopicPartition(topic, 0)], DEADLINE_SECONDS)[0].offset)


@scenario
def commit_offset(group: str, topic: str, offset: int) -> None:
    with consumer(group_id=group) as source:
        source.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)


@scenario
def topic_config(topic: str, name: str) -> str:
    (entries,) = done(admin().describe_configs([ConfigResource(ResourceType.TOPIC, topic)]))
    return str(entries[name].value)


@scenario
def create_with(topic: str, partitions: int = 1, **config: Any) -> None:
    create(topic, partitions, **config)


@scenario
def delete_topic(topic: str) -> None:
    done(admin().delete_topics([topic]))


@scenario
def groups() -> list[str]:
    listing = admin().list_consumer_groups(request_timeout=DEADLINE_SECONDS).result()
    return sorted(one.group_id for one in listing.valid)


# --- over changes of a cluster


class ConfluentExchange(Exchange):
    """A producer and a consumer that live as long as the process."""

    def __init__(self, topic: str, partitions: int) -> None:
        super().__init__(partitions)
        self._topic = topic
        settings = BASE | {"socket.timeout.ms": 6_000, "topic.metadata.refresh.interval.ms": 1_000}
        self._producer = Producer(settings | {"enable.idempotence": True, "linger.ms": 0})
        self._consumer = Consumer(
            settings | {"group.id": "none", "enable.auto.commit": False, "auto.offset.reset": "error"}
        )
        self._consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
        self._failures: list[str] = []

    def _reported(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failures.append(error.name())

    def send(self, partition: int, value: str) -> None:
        self._producer.produce(self._topic, value, partition=partition, on_delivery=self._reported)
        self._producer.poll(0)

    def flush(self) -> None:
        assert self._producer.flush(EXCHANGE_SECONDS) == 0, "records are still waiting"
        assert self._failures == []

    def poll(self) -> list[tuple[int, str]]:
        found = self._consumer.consume(1_000, timeout=0.1)
        return [(each.partition(), each.value().decode()) for each in found if each.error() is None]


serve_exchange(ConfluentExchange)


if __name__ == "__main__":
    serve()
