"""What the tests do with kafka-python."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import AlterConfigOp, ConfigResource, ConfigResourceType, MemberToRemove, OffsetSpec
from kafka.consumer.subscription_state import ConsumerRebalanceListener
from kafka.errors import KafkaError, NoError
from kafka.structs import OffsetAndMetadata

from system.clients.exchange import EXCHANGE_SECONDS, Exchange, serve_exchange
from system.clients.worker import BOOTSTRAP, MemberState, scenario, serve, until

DEADLINE_SECONDS = 120.0
CREATE_TIME, APPEND_TIME = 0, 1

# --- tools


@cache
def admin() -> KafkaAdminClient:
    return KafkaAdminClient(bootstrap_servers=BOOTSTRAP)


def refusal(function: Any, *arguments: Any, **named: Any) -> str:
    """The name of the error that a call ends with."""
    try:
        function(*arguments, **named)
    except KafkaError as error:
        return type(error).__name__
    return "accepted"


def create(topic: str, partitions: int = 1, **config: Any) -> None:
    config = {name.replace("_", "."): str(value) for name, value in config.items()}
    options = {"num_partitions": partitions, "replication_factor": 1, "configs": config}
    admin().create_topics({topic: options})


def produce(topic: str, records: list[Any], **config: Any) -> list[Any]:
    """Send values, or dictionaries of arguments; for each its metadata or its error's name, in order."""
    producer = KafkaProducer(bootstrap_servers=BOOTSTRAP, **config)
    try:
        futures = []
        for record in records:
            arguments = record if isinstance(record, dict) else {"value": record, "partition": 0}
            arguments = {name: _encoded(value) for name, value in arguments.items()}
            futures.append(producer.send(topic, **arguments))
        producer.flush(DEADLINE_SECONDS)
        return [_outcome(future) for future in futures]
    finally:
        producer.close()


def _encoded(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def _outcome(future: Any) -> Any:
    try:
        return future.get(DEADLINE_SECONDS)
    except KafkaError as error:
        return type(error).__name__


@contextmanager
def consumer(**config: Any) -> Iterator[KafkaConsumer]:
    made = KafkaConsumer(bootstrap_servers=BOOTSTRAP, **{"enable_auto_commit": False, **config})
    try:
        yield made
    finally:
        made.close()


def take(source: KafkaConsumer, count: int) -> list[Any]:
    deadline = time.monotonic() + DEADLINE_SECONDS
    records: list[Any] = []
    while len(records) < count:
        for batch in source.poll(1_000, max_records=count - len(records)).values():
            records += batch
        assert time.monotonic() < deadline, f"{len(records)} of {count} records"
    return records


def read(topic: str, count: int, start: int | None = None, partition: int = 0, **config: Any) -> list[Any]:
    with consumer(**config) as source:
        place = TopicPartition(topic, partition)
        source.assign([place])
        if start is None:
            source.seek_to_beginning(place)
        else:
            source.seek(place, start)
        return take(source, count)


def values(records: list[Any]) -> list[Any]:
    return [None if record.value is None else bytes(record.value).decode() for record in records]


def watermarks(topic: str) -> tuple[int, int]:
    place = TopicPartition(topic, 0)
    with consumer() as source:
        return source.beginning_offsets([place])[place], source.end_offsets([place])[place]


# --- producing and consuming


@scenario
def every_codec_with_every_acks(topic: str, codec: str) -> None:
    create(topic)
    sent: list[str] = []
    for acks in (0, 1, "all"):
        batch = [f"{codec} {acks} {number} {'ebb and flow ' * 20}" for number in range(50)]
        compression = None if codec == "none" else codec
        config = {"acks": acks, "compression_type": compression, "linger_ms": 50, "enable_idempotence": False}
        results = produce(topic, batch, **config)
        if acks != 0:
            assert [result.offset for result in results] == list(range(len(sent), len(sent) + 50))
        sent += batch
        assert values(read(topic, len(sent))) == sent


@scenario
def idempotent_producer_writes_everything_once_and_in_order(topic: str) -> None:
    create(topic)
    sent = [f"v{number}" for number in range(1_000)]
    results = produce(topic, sent, enable_idempotence=True, batch_size=500)
    assert [result.offset for result in results] == list(range(1_000))
    assert values(read(topic, 1_000)) == sent


@scenario
def keys_headers_null_values_and_timestamps_survive(topic: str) -> None:
    create(topic, retention_ms=-1)
    records: list[dict[str, Any]] = [
        {"key": "k", "value": "v", "headers": [("a", b"1"), ("a", b"2")], "timestamp_ms": 1_000},
        {"key": "k", "value": None, "timestamp_ms": 2_000},
        {"key": None, "value": "", "timestamp_ms": 3_000},
        {"key": b"\x00\xff", "value": b"\x80" * 10, "headers": [("é", b"\x00")], "timestamp_ms": 4_000},
    ]
    produce(topic, [record | {"partition": 0} for record in records])
    found = read(topic, 4)
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
def large_messages_up_to_the_topics_limit(topic: str) -> None:
    create(topic, max_message_bytes=3_000_000)
    rng = random.Random(1)
    fits, too_large = rng.randbytes(2_900_000), rng.randbytes(3_100_000)
    results = [
        produce(topic, [value], max_request_size=10_000_000)[0] for value in (fits, too_large, b"after")
    ]
    assert results[1] == "MessageSizeTooLargeError"
    assert [bytes(record.value) for record in read(topic, 2, max_partition_fetch_bytes=100_000)] == [
        fits,
        b"after",
    ]


@scenario
def reading_from_the_beginning_the_end_and_an_offset(topic: str) -> None:
    create(topic)
    produce(topic, [f"old{number}" for number in range(10)])
    assert values(read(topic, 10)) == [f"old{number}" for number in range(10)]
    assert values(read(topic, 3, 7)) == ["old7", "old8", "old9"]
    with consumer() as source:
        place = TopicPartition(topic, 0)
        source.assign([place])
        source.seek_to_end(place)
        assert source.position(place) == 10
        produce(topic, ["new"])
        assert values(take(source, 1)) == ["new"]


@scenario
def offsets_are_found_by_time(topic: str) -> None:
    create(topic, retention_ms=-1)
    produce(
        topic, [{"value": "v", "partition": 0, "timestamp_ms": 1_000 * (number + 1)} for number in range(20)]
    )
    place = TopicPartition(topic, 0)
    with consumer() as source:
        found = [source.offsets_for_times({place: time_ms})[place] for time_ms in (0, 5_000, 5_001, 30_000)]
    assert [one and (one.offset, one.timestamp) for one in found] == [
        (0, 1_000),
        (4, 5_000),
        (5, 6_000),
        None,
    ]


@scenario
def the_offset_of_the_newest_timestamp_is_found(topic: str) -> None:
    create(topic, retention_ms=-1)
    for time_ms in (1_000, 9_000, 3_000):
        produce(topic, [{"value": "v", "partition": 0, "timestamp_ms": time_ms}])
    place = TopicPartition(topic, 0)
    found = [
        admin().list_partition_offsets({place: spec})[place]
        for spec in (OffsetSpec.EARLIEST, OffsetSpec.LATEST, OffsetSpec.MAX_TIMESTAMP, 2_000)
    ]
    assert [one.offset for one in found] == [0, 3, 1, 1]
    assert found[2].timestamp == 9_000


@scenario
def reading_pauses_resumes_and_seeks(topic: str) -> None:
    create(topic, partitions=2)
    for partition in (0, 1):
        produce(topic, [{"value": f"p{partition} {number}", "partition": partition} for number in range(5)])
    zero, one = TopicPartition(topic, 0), TopicPartition(topic, 1)
    with consumer(auto_offset_reset="earliest") as source:
        source.assign([zero, one])
        source.pause(zero)
        assert values(take(source, 5)) == [f"p1 {number}" for number in range(5)]
        source.resume(zero)
        assert values(take(source, 5)) == [f"p0 {number}" for number in range(5)]
        source.seek(zero, 3)
        assert values(take(source, 2)) == ["p0 3", "p0 4"]
        assert (source.position(zero), source.position(one)) == (5, 5)


@scenario
def an_offset_out_of_range_is_reset_or_reported(topic: str) -> None:
    create(topic)
    produce(topic, ["a", "b", "c"])
    place = TopicPartition(topic, 0)
    admin().delete_records({place: 2})
    assert values(read(topic, 1, 0, auto_offset_reset="earliest")) == ["c"]
    with consumer(auto_offset_reset="none") as source:
        source.assign([place])
        source.seek(place, 0)
        error = until(lambda: (name := refusal(source.poll, 1_000)) != "accepted" and name)
    assert error in ("OffsetOutOfRangeError", "NoOffsetForPartitionError")


@scenario
def batches_are_stored_with_the_topics_codec(topic: str, codec: str) -> None:
    create(topic, compression_type=codec)
    sent = [f"{number} {'high water ' * 30}" for number in range(100)]
    produce(topic, sent, compression_type="gzip", linger_ms=100)
    produce(topic, sent, compression_type=None, linger_ms=100)
    assert values(read(topic, 200, check_crcs=True)) == sent * 2


@scenario
def the_append_time_replaces_the_producers(topic: str) -> None:
    create(topic, message_timestamp_type="LogAppendTime")
    before_ms = time.time_ns() // 1_000_000
    (report,) = produce(topic, [{"value": "v", "partition": 0, "timestamp_ms": 1_000}])
    (record,) = read(topic, 1)
    assert record.timestamp_type == APPEND_TIME
    assert before_ms <= record.timestamp <= time.time_ns() // 1_000_000
    assert report.timestamp == record.timestamp


# --- topics that are missing


@scenario
def a_missing_topic_is_created_by_writing(topic: str) -> None:
    (result,) = produce(topic, [{"value": "v"}])
    assert (result.partition, result.offset) == (0, 0)


@scenario
def a_missing_topic_is_an_error(topic: str) -> None:
    producer = KafkaProducer(bootstrap_servers=BOOTSTRAP, max_block_ms=1_000)
    try:
        assert refusal(lambda: producer.send(topic, b"v").get(DEADLINE_SECONDS)) in (
            "KafkaTimeoutError",
            "UnknownTopicOrPartitionError",
        )
    finally:
        producer.close()
    assert topic not in admin().list_topics()
    (described,) = admin().describe_topics([topic])
    assert described["error_code"] == 3


# --- deletion of old data


@scenario
def retention_by_size_moves_the_start(topic: str) -> None:
    create(topic, **{"internal.segment.bytes": 2_000})
    produce(topic, [f"{number:03d}" + "x" * 500 for number in range(30)], batch_size=0)
    # Only now, so that one look at the log decides what goes.
    admin().alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, {"retention.bytes": "6000"})])
    low = until(lambda: watermarks(topic)[0])
    assert [value[:3] for value in values(read(topic, 30 - low))] == [
        f"{number:03d}" for number in range(low, 30)
    ]


@scenario
def retention_by_time_empties_the_topic(topic: str) -> None:
    create(topic, **{"retention.ms": 60_000})
    produce(topic, [{"value": "old", "partition": 0, "timestamp_ms": 1_000}])
    until(lambda: watermarks(topic) == (1, 1))
    produce(topic, ["new"])
    assert [(record.offset, record.value) for record in read(topic, 1)] == [(1, b"new")]


@scenario
def records_are_deleted_up_to_an_offset(topic: str) -> None:
    create(topic)
    produce(topic, ["a", "b", "c"])
    place = TopicPartition(topic, 0)
    assert admin().delete_records({place: 2})[place]["low_watermark"] == 2
    assert watermarks(topic) == (2, 3)
    assert values(read(topic, 1)) == ["c"]
    assert refusal(admin().delete_records, {place: 9}) == "OffsetOutOfRangeError"


# --- groups


class Member(threading.Thread, ConsumerRebalanceListener):  # type: ignore[misc]
    """A member of a group, polling until it is told to leave."""

    def __init__(self, group: str, topic: str, config: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self.state = MemberState()
        self._leave = threading.Event()
        settings = {
            "auto_offset_reset": "earliest",
            "session_timeout_ms": 45_000,
            "heartbeat_interval_ms": 200,
        }
        self._consumer = KafkaConsumer(bootstrap_servers=BOOTSTRAP, group_id=group, **(settings | config))
        self._consumer.subscribe([topic], listener=self)
        # A leader that learns of the partitions only after it joined joins again; kafka-python 3.0.12 loses
        # the answer to that when a poll's time is up in between, and then stays without partitions.
        self._consumer.partitions_for_topic(topic)
        self.start()

    def on_partitions_revoked(self, revoked: Any) -> None:
        pass

    def on_partitions_assigned(self, assigned: Any) -> None:
        self.state.assign({place.partition for place in assigned})

    def run(self) -> None:
        while not self._leave.is_set():
            for batch in self._consumer.poll(100).values():
                for record in batch:
                    self.state.read(bytes(record.value).decode())
        self._consumer.close()

    def leave(self) -> None:
        self._leave.set()
        self.join()


members: dict[str, Member] = {}


@scenario
def member_join(name: str, group: str, topic: str, **config: Any) -> None:
    members[name] = Member(group, topic, config)


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
    produce(topic, [{"value": text, "partition": number % partitions} for number, text in enumerate(texts)])


@scenario
def offsets_are_committed_and_fetched(topic: str) -> None:
    create(topic, partitions=2)
    produce(topic, [f"v{number}" for number in range(10)])
    group, zero, one = f"{topic}-group", TopicPartition(topic, 0), TopicPartition(topic, 1)
    with consumer(group_id=group, auto_offset_reset="earliest") as source:
        source.assign([zero])
        take(source, 4)
        source.commit()
        source.commit({one: OffsetAndMetadata(77, "a note", -1)})
    with consumer(group_id=group) as source:
        assert source.committed(zero) == 4
        assert source.committed(one, metadata=True).metadata == "a note"
        source.assign([zero])
        assert values(take(source, 6)) == [f"v{number}" for number in range(4, 10)]
    with consumer(group_id=f"{group}-unknown") as source:
        assert source.committed(zero) is None


@scenario
def a_pattern_subscribes_to_the_topics_it_matches(topic: str) -> None:
    for name in (f"{topic}-a", f"{topic}-b", f"other-{topic}"):
        create(name)
        produce(name, [name])
    with consumer(group_id=topic, auto_offset_reset="earliest") as source:
        source.subscribe(pattern=f"^{topic}-.*")
        assert sorted(values(take(source, 2))) == [f"{topic}-a", f"{topic}-b"]


@scenario
def groups_are_listed_described_and_deleted(topic: str) -> None:
    create(topic, partitions=2)
    group = f"{topic}-group"
    member = Member(group, topic, {"client_id": "tester"})
    member.state.wait(2, 0)
    client = admin()
    listed = {one["group_id"]: one["group_state"] for one in client.list_groups()}
    assert listed[group] == "Stable"
    described = client.describe_groups([group])[group]
    assert described["group_state"] == "Stable"
    (described_member,) = described["members"]
    assert described_member["client_id"] == "tester"
    refused = client.delete_groups([group])
    assert "NonEmptyGroupError" in str(refused)
    member.leave()
    assert client.describe_groups([group])[group]["group_state"] == "Empty"
    client.delete_groups([group])
    assert group not in {one["group_id"] for one in client.list_groups()}


@scenario
def group_offsets_are_listed_altered_and_deleted(topic: str) -> None:
    create(topic)
    produce(topic, ["v"] * 10)
    group, place = f"{topic}-group", TopicPartition(topic, 0)
    client = admin()
    assert client.alter_group_offsets(group, {place: OffsetAndMetadata(5, "", -1)}) == {place: NoError}
    assert client.list_group_offsets({group: None})[group][place].offset == 5
    client.reset_group_offsets(group, {place: OffsetSpec.LATEST})
    assert client.list_group_offsets({group: [place]})[group][place].offset == 10
    assert client.delete_group_offsets(group, [place]) == {place: NoError}
    assert place not in client.list_group_offsets({group: None}).get(group, {})


@scenario
def a_member_is_removed_by_its_instance_id(topic: str) -> None:
    create(topic, partitions=2)
    group = f"{topic}-group"
    settings = {"session_timeout_ms": 30_000}
    first = Member(group, topic, settings | {"group_instance_id": "first"})
    first.state.wait(2, 0)
    second = Member(group, topic, settings | {"group_instance_id": "second"})
    first.state.wait(1, 0)
    second.state.wait(1, 0)
    second.leave()
    admin().remove_group_members(group, [MemberToRemove(group_instance_id="second")])
    first.state.wait(2, 0)
    first.leave()


# --- administration


@scenario
def topics_are_created_described_and_deleted(topic: str) -> None:
    client = admin()
    create(topic, 3, retention_ms=1_000_000)
    assert refusal(create, topic) == "TopicAlreadyExistsError"
    assert refusal(create, "no/slash") == "InvalidTopicError"
    assert refusal(create, f"{topic}-2", **{"retention.mss": "1"}) == "InvalidConfigurationError"
    client.create_topics([f"{topic}-2"], validate_only=True)
    assert f"{topic}-2" not in client.list_topics()
    (described,) = client.describe_topics([topic])
    assert (described["name"], described["is_internal"], len(described["partitions"])) == (topic, False, 3)
    paged = client.describe_topic_partitions([topic], response_partition_limit=2)
    assert [place["partition_index"] for place in paged["topics"][0]["partitions"]] == [0, 1]
    rest = client.describe_topic_partitions([topic], cursor=paged["next_cursor"])
    assert [place["partition_index"] for place in rest["topics"][0]["partitions"]] == [2]
    client.delete_topics([topic])
    assert topic not in client.list_topics()
    assert refusal(client.delete_topics, [topic]) == "UnknownTopicOrPartitionError"


@scenario
def partitions_are_added(topic: str) -> None:
    create(topic)
    admin().create_partitions({topic: 3})
    assert len(admin().describe_topics([topic])[0]["partitions"]) == 3
    assert refusal(admin().create_partitions, {topic: 2}) == "InvalidPartitionsError"
    produce(topic, [{"value": "v", "partition": 2}])
    assert values(read(topic, 1, partition=2)) == ["v"]


@scenario
def configs_are_described_and_altered(topic: str) -> None:
    create(topic, retention_ms=1_000_000)
    client = admin()

    def resource(configs: Any = None) -> ConfigResource:
        return ConfigResource(ConfigResourceType.TOPIC, topic, configs)

    def current(kind: str = "modified") -> dict[str, str]:
        (by_name,) = client.describe_configs([resource()], config_filter=kind).values()
        return {name: entry["value"] for name, entry in by_name[topic].items()}

    assert current() == {"retention.ms": "1000000"}
    assert current("all")["cleanup.policy"] == "delete"
    changes = {
        "retention.bytes": "5000",
        "cleanup.policy": (AlterConfigOp.APPEND, "compact"),
        "retention.ms": (AlterConfigOp.DELETE, None),
    }
    client.alter_configs([resource(changes)], incremental=True)
    assert current() == {"retention.bytes": "5000", "cleanup.policy": "delete,compact"}
    client.alter_configs([resource({"max.message.bytes": "2000"})], incremental=False)
    assert current()["max.message.bytes"] == "2000"
    client.reset_configs([resource(["max.message.bytes"])])
    assert "max.message.bytes" not in current()


@scenario
def the_cluster_is_described(topic: str) -> None:
    create(topic)
    described = admin().describe_cluster()
    (broker,) = described["brokers"]
    assert f"{broker['host']}:{broker['port']}" == BOOTSTRAP
    assert described["controller_id"] == 1
    assert topic in admin().list_topics()


@scenario
def leaders_are_elected(topic: str) -> None:
    create(topic)
    answer = admin().elect_leaders(0, {topic: [0]}, raise_errors=False)
    assert "error_code=84" in str(answer) or "'error_code': 84" in str(answer), "ELECTION_NOT_NEEDED"


@scenario
def log_directories_show_the_size_of_partitions(topic: str) -> None:
    create(topic)
    produce(topic, ["x" * 1_000])
    (broker,) = admin().describe_log_dirs({topic: [0]})
    (directory,) = broker["log_dirs"] if "log_dirs" in broker else broker["results"]
    (described,) = directory["topics"]
    (partition,) = described["partitions"]
    assert partition["partition_size"] >= 1_000


# --- over changes of a cluster


class KafkaPythonExchange(Exchange):
    """A producer and a consumer that live as long as the process."""

    def __init__(self, topic: str, partitions: int) -> None:
        super().__init__(partitions)
        self._topic = topic
        settings = {
            "bootstrap_servers": BOOTSTRAP,
            "request_timeout_ms": 10_000,
            "metadata_max_age_ms": 1_000,
        }
        self._producer = KafkaProducer(
            **settings,
            enable_idempotence=True,
            delivery_timeout_ms=int(1_000 * EXCHANGE_SECONDS),
            max_block_ms=int(1_000 * EXCHANGE_SECONDS),
        )
        self._consumer = KafkaConsumer(**settings, enable_auto_commit=False, auto_offset_reset="none")
        self._consumer.assign([TopicPartition(topic, partition) for partition in range(partitions)])
        for partition in range(partitions):
            self._consumer.seek(TopicPartition(topic, partition), 0)
        self._sent: list[Any] = []

    def send(self, partition: int, value: str) -> None:
        self._sent.append(self._producer.send(self._topic, value.encode(), partition=partition))

    def flush(self) -> None:
        for each in self._sent:
            each.get(EXCHANGE_SECONDS)
        self._sent.clear()

    def poll(self) -> list[tuple[int, str]]:
        try:
            found = self._consumer.poll(100)
        except KafkaError as error:
            if not error.retriable:
                raise
            return []
        return [(each.partition, each.value.decode()) for records in found.values() for each in records]


serve_exchange(KafkaPythonExchange)


if __name__ == "__main__":
    serve()
