"""Produce, in every version, through the wire format; the test decides when a flush happens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable
from typing import Any
from uuid import UUID

import pytest
from crc32c import crc32c

from support.batches import plain_batch
from support.exchange import Answer, Exchange, fetch_part, produce_part
from tidemill.control.commands import DeleteTopic, SetTopicConfigs
from tidemill.errors import DiskFull, ErrorCode, SyncFailed
from tidemill.log.incoming import PreparedBatch
from tidemill.records import batch as batch_module
from tidemill.records.batch import BatchHeader, parse_header
from tidemill.records.compression import ZSTD
from tidemill.records.record import Record, build_batch
from tidemill.replication.partition import Partition
from tidemill.wire.apis import APIS

VERSIONS = APIS[0].versions
ALL, LEADER, NONE = -1, 1, 0
BATCH = plain_batch("a", "b")
PRODUCER = 4000


def numbered(sequence: int, *values: str, epoch: int = 0) -> bytes:
    return plain_batch(*(values or ("x",)), producer=(PRODUCER, epoch, sequence))


@pytest.fixture
async def node() -> AsyncIterator[Exchange]:
    topics = {
        "t": (2, {}),
        "stamped": (1, {"message.timestamp.type": "LogAppendTime"}),
        "small": (1, {"max.message.bytes": "200"}),
        "keyed": (1, {"cleanup.policy": "compact"}),
        "lazy": (1, {"flush.ms": "3600000"}),
        "recent": (1, {"message.timestamp.before.max.ms": "5000"}),
    }
    async with Exchange(topics) as started:
        yield started


def result(answer: Answer, topic: int = 0, partition: int = 0) -> Any:
    return answer.value.responses[topic].partition_responses[partition]


async def code(node: Exchange, answer: Answer) -> ErrorCode:
    await node.flush()
    return ErrorCode(result(answer).error_code)


# --- what a batch costs


@pytest.mark.parametrize("codec", [0, ZSTD])
async def test_a_batchs_header_is_parsed_once_and_its_checksum_computed_once(
    node: Exchange, monkeypatch: pytest.MonkeyPatch, codec: int
) -> None:
    parsed: list[object] = []
    summed: list[int] = []
    make, checksum = batch_module.BatchHeader._make, crc32c

    def count_header(fields: Iterable[Any]) -> BatchHeader:
        parsed.append(fields)
        return make(fields)

    def count_checksum(data: bytes) -> int:
        summed.append(len(data))
        return checksum(data)

    data = plain_batch("a", "b", codec=codec)
    monkeypatch.setattr(batch_module.BatchHeader, "_make", count_header)
    monkeypatch.setattr(batch_module, "crc32c", count_checksum)
    assert await code(node, node.produce(9, produce_part("t", data))) == ErrorCode.none
    assert (len(parsed), len(summed)) == (1, 1)


# --- acks


@pytest.mark.parametrize("acks", [ALL, LEADER])
@pytest.mark.parametrize("version", VERSIONS)
async def test_an_acknowledgement_comes_after_the_flush_and_not_before(
    node: Exchange, version: int, acks: int
) -> None:
    await node.write("t", "before")
    answer = node.produce(version, produce_part("t", BATCH), acks=acks)
    await node.settle()
    assert not answer.arrived
    await node.flush()
    assert (result(answer).error_code, result(answer).base_offset) == (ErrorCode.none, 1)
    assert node.partition("t").high_watermark == 3


@pytest.mark.parametrize("acks", [ALL, LEADER])
async def test_what_was_acknowledged_is_read_at_once(node: Exchange, acks: int) -> None:
    """With a disk that takes its time: a client asks the moment it has its answer."""
    for round_number in range(5):
        answer = node.produce(9, produce_part("t", BATCH), acks=acks)
        await node.settle()
        while not answer.arrived:
            assert node.node.flusher.busy
            node.node.flusher.step()
            await node.settle()
        base = result(answer).base_offset
        assert base == 2 * round_number
        fetched = node.fetch(11, fetch_part("t", base + 1))
        asked = {"name": "t", "partitions": [{"partition_index": 0, "timestamp": -1}]}
        latest = await node.ask("ListOffsets", 5, replica_id=-1, topics=[asked])
        partition = fetched.value.responses[0].partitions[0]
        assert (partition.error_code, len(partition.records)) == (ErrorCode.none, len(BATCH))
        assert latest.topics[0].partitions[0].offset == base + 2


async def test_acks_1_survives_a_power_failure(node: Exchange) -> None:
    answer = node.produce(9, produce_part("t", BATCH), acks=LEADER)
    await node.flush()
    assert result(answer).error_code == ErrorCode.none
    await node.restart(power_loss=True)
    assert node.partition("t").high_watermark == 2


async def test_acks_1_is_told_of_a_failed_flush(node: Exchange) -> None:
    answer = node.produce(9, produce_part("t", BATCH), acks=LEADER)
    node.storage.fail_next("sync", ".log", SyncFailed("on purpose"))
    assert await code(node, answer) == ErrorCode.kafka_storage_error


async def test_only_a_producer_that_waits_brings_a_lazy_flush_forward(node: Exchange) -> None:
    """``flush.ms`` lets appends with acks=0 gather, and no others."""
    node.produce(9, produce_part("lazy", BATCH), acks=NONE)
    await node.settle()
    assert node.partition("lazy").flush_due_ms() > 0
    answer = node.produce(9, produce_part("lazy", BATCH), acks=LEADER)
    await node.settle()
    assert node.partition("lazy").flush_due_ms() == 0
    assert await code(node, answer) == ErrorCode.none
    assert node.partition("lazy").high_watermark == 4


@pytest.mark.parametrize("version", VERSIONS)
async def test_acks_0_is_not_answered_and_the_next_request_is(node: Exchange, version: int) -> None:
    silent = node.produce(version, produce_part("t", BATCH), acks=NONE)
    loud = node.produce(version, produce_part("t", BATCH), acks=LEADER)
    await node.flush()
    assert not silent.arrived
    assert result(loud).base_offset == 2


async def test_a_refused_write_with_acks_0_ends_the_connection(node: Exchange) -> None:
    node.produce(9, produce_part("missing", BATCH), acks=NONE)
    with pytest.raises(AssertionError, match="closed the connection"):
        await node.settle()


@pytest.mark.parametrize("acks", [2, -2, 100])
async def test_other_acks_are_refused(node: Exchange, acks: int) -> None:
    answer = node.produce(9, produce_part("t", BATCH), acks=acks)
    assert await code(node, answer) == ErrorCode.invalid_required_acks
    assert node.partition("t").local_log.end_offset == 0


# --- the records at fault


@pytest.mark.parametrize("version", [version for version in VERSIONS if version >= 8])
async def test_ten_bad_records_of_a_hundred_are_named_and_the_batch_is_refused(
    node: Exchange, version: int
) -> None:
    bad = range(5, 100, 10)
    records = [Record(None if number in bad else b"k", b"v") for number in range(100)]
    answer = node.produce(version, produce_part("keyed", build_batch(records)))
    assert await code(node, answer) == ErrorCode.invalid_record
    faults = result(answer).record_errors
    assert [fault.batch_index for fault in faults] == list(bad)
    assert {fault.batch_index_error_message for fault in faults} == {result(answer).error_message}
    assert "without a key" in result(answer).error_message
    assert node.partition("keyed").local_log.end_offset == 0


async def test_old_timestamps_are_named(node: Exchange) -> None:
    now = node.node.now_ms
    records = [Record(b"k", b"v", timestamp_ms=time_ms) for time_ms in (now, now - 10_000, now, now - 9_000)]
    answer = node.produce(9, produce_part("recent", build_batch(records)))
    assert await code(node, answer) == ErrorCode.invalid_timestamp
    assert [fault.batch_index for fault in result(answer).record_errors] == [1, 3]
    message = result(answer).record_errors[1].batch_index_error_message
    assert "message.timestamp.before.max.ms" in message


async def test_an_answer_names_a_thousand_records_at_most(node: Exchange) -> None:
    batch = build_batch([Record(None, b"v")] * 700)
    answer = node.produce(9, produce_part("keyed", batch), produce_part("keyed", batch))
    await node.flush()
    counts = [len(result(answer, topic).record_errors) for topic in range(2)]
    assert counts == [700, 300]
    assert [result(answer, topic).error_code for topic in range(2)] == [ErrorCode.invalid_record] * 2


# --- refusals


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


REFUSED: dict[str, tuple[str, int, bytes | None, ErrorCode]] = {
    "no records": ("t", 0, None, ErrorCode.invalid_record),
    "empty records": ("t", 0, b"", ErrorCode.invalid_record),
    "a checksum that does not fit": ("t", 0, flipped(numbered(0)), ErrorCode.corrupt_message),
    "a header cut short": ("t", 0, numbered(0)[:40], ErrorCode.corrupt_message),
    "a batch cut short": ("t", 0, numbered(0)[:-3], ErrorCode.corrupt_message),
    "two batches": ("t", 0, numbered(0) + numbered(1), ErrorCode.invalid_record),
    "an unknown topic": ("missing", 0, numbered(0), ErrorCode.unknown_topic_or_partition),
    "an unknown partition": ("t", 2, numbered(0), ErrorCode.unknown_topic_or_partition),
    "a negative partition": ("t", -1, numbered(0), ErrorCode.unknown_topic_or_partition),
    "too large a batch": ("small", 0, numbered(0, "x" * 300), ErrorCode.message_too_large),
    "no key for a compacted topic": ("keyed", 0, numbered(0), ErrorCode.invalid_record),
    "a gap in the sequence": ("t", 0, numbered(5), ErrorCode.out_of_order_sequence_number),
    "a transactional batch outside of a transaction": (
        "t",
        0,
        build_batch([Record(None, b"v")], producer_id=9, producer_epoch=0, base_sequence=0, attributes=0x10),
        ErrorCode.invalid_txn_state,
    ),
    "a control batch": (
        "t",
        0,
        build_batch([Record(None, b"v")], producer_id=9, producer_epoch=0, base_sequence=0, attributes=0x20),
        ErrorCode.invalid_record,
    ),
    "a timestamp from the future": (
        "t",
        0,
        plain_batch("v", timestamp_ms=2**60, producer=(PRODUCER, 0, 0)),
        ErrorCode.invalid_timestamp,
    ),
    "an internal topic": ("__consumer_offsets", 0, numbered(0), ErrorCode.invalid_topic_exception),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_a_refused_batch_changes_nothing(node: Exchange, what: str) -> None:
    topic, index, records, expected = REFUSED[what]
    assert await code(node, node.produce(9, produce_part(topic, records, index))) == expected
    refusal = node.produce(9, produce_part(topic, records, index), acks=LEADER)
    assert await code(node, refusal) == expected
    assert (result(refusal).base_offset, result(refusal).log_start_offset) == (-1, -1)
    assert result(refusal).error_message
    for partition in node.node.broker.replicas:
        assert partition.local_log.end_offset == 0
        assert len(partition.local_log.producers) == 0


async def test_a_refused_batch_uses_no_sequence_number(node: Exchange) -> None:
    await node.write("t", "x", producer=(PRODUCER, 0, 0))
    broken = node.produce(9, produce_part("t", flipped(numbered(1))))
    assert await code(node, broken) == ErrorCode.corrupt_message
    ahead = node.produce(9, produce_part("t", numbered(2)))
    assert await code(node, ahead) == ErrorCode.out_of_order_sequence_number
    good = node.produce(9, produce_part("t", numbered(1)))
    assert await code(node, good) == ErrorCode.none
    assert result(good).base_offset == 1


async def test_an_old_epoch_of_a_producer_is_fenced(node: Exchange) -> None:
    await node.write("t", "x", producer=(PRODUCER, 3, 0))
    old = node.produce(9, produce_part("t", numbered(0, epoch=2)))
    assert await code(node, old) == ErrorCode.invalid_producer_epoch
    assert node.partition("t").local_log.end_offset == 1


@pytest.mark.parametrize("version", VERSIONS)
async def test_zstd_needs_version_7(node: Exchange, version: int) -> None:
    answer = node.produce(version, produce_part("t", plain_batch("v" * 100, codec=ZSTD)))
    expected = ErrorCode.unsupported_compression_type if version < 7 else ErrorCode.none
    assert await code(node, answer) == expected


@pytest.mark.parametrize("topic_id", [UUID(int=0), UUID(int=77)])
async def test_an_unknown_topic_id_is_refused(node: Exchange, topic_id: UUID) -> None:
    answer = node.produce(13, produce_part(topic_id, BATCH))
    assert await code(node, answer) == ErrorCode.unknown_topic_id


@pytest.mark.parametrize("version", [8, 9])
async def test_a_very_long_name_is_refused_with_a_message_that_fits(node: Exchange, version: int) -> None:
    answer = node.produce(version, produce_part("\x01" * 30_000, BATCH))
    assert await code(node, answer) == ErrorCode.unknown_topic_or_partition
    assert len(result(answer).error_message) <= 1_000


async def test_partitions_succeed_and_fail_beside_each_other(node: Exchange) -> None:
    answer = node.produce(
        9,
        {
            "topic": "t",
            "partition_data": [
                {"index": 0, "records": BATCH},
                {"index": 1, "records": flipped(BATCH)},
                {"index": 9, "records": BATCH},
            ],
        },
        produce_part("missing", BATCH),
        produce_part("stamped", BATCH),
    )
    await node.flush()
    codes = [
        [ErrorCode(partition.error_code) for partition in topic.partition_responses]
        for topic in answer.value.responses
    ]
    assert codes == [
        [ErrorCode.none, ErrorCode.corrupt_message, ErrorCode.unknown_topic_or_partition],
        [ErrorCode.unknown_topic_or_partition],
        [ErrorCode.none],
    ]
    assert [topic.name for topic in answer.value.responses] == ["t", "missing", "stamped"]


# --- waiting for durability


async def test_a_timeout_is_told_and_the_retry_gets_the_same_offset(node: Exchange) -> None:
    await node.write("t", "before")
    answer = node.produce(9, produce_part("t", numbered(0)), timeout=0)
    await node.until_answered(answer)
    assert result(answer).error_code == ErrorCode.request_timed_out
    retry = node.produce(9, produce_part("t", numbered(0)))
    await node.settle()
    assert not retry.arrived, "what is there twice must be durable once"
    await node.flush()
    assert (result(retry).error_code, result(retry).base_offset) == (ErrorCode.none, 1)
    assert node.partition("t").local_log.end_offset == 2


async def test_a_timeout_is_told_only_of_partitions_that_are_late(node: Exchange) -> None:
    await node.write("t", "x", producer=(PRODUCER, 0, 0))
    parts = [{"index": 0, "records": numbered(0)}, {"index": 1, "records": BATCH}]
    answer = node.produce(9, {"topic": "t", "partition_data": parts}, timeout=0)
    await node.until_answered(answer)
    codes = [result(answer, 0, place).error_code for place in range(2)]
    assert codes == [ErrorCode.none, ErrorCode.request_timed_out]
    assert result(answer, 0, 0).base_offset == 0, "the duplicate was durable already"


async def test_a_flush_after_the_timeout_sends_nothing_more(node: Exchange) -> None:
    answer = node.produce(9, produce_part("t", BATCH), timeout=0)
    await node.until_answered(answer)
    await node.flush()
    assert result(answer).error_code == ErrorCode.request_timed_out
    assert (await node.ask("Metadata", 9, topics=[])).topics == ()


async def test_a_topic_deleted_while_a_producer_waits_is_told_as_unknown(node: Exchange) -> None:
    answer = node.produce(9, produce_part("t", BATCH))
    await node.settle()
    await node.node.controller.submit(DeleteTopic(name="t"))
    await node.settle()
    assert result(answer).error_code == ErrorCode.unknown_topic_or_partition


async def test_a_failed_fsync_fails_everybody_who_waits_and_everybody_after(node: Exchange) -> None:
    await node.write("t", "before")
    waiting = [node.produce(9, produce_part("t", BATCH)) for _ in range(2)]
    node.storage.fail_next("sync", ".log", SyncFailed("on purpose"))
    await node.flush()
    later = node.produce(9, produce_part("t", BATCH), acks=LEADER)
    other = node.produce(9, produce_part("t", BATCH, 1))
    await node.flush()
    assert [result(answer).error_code for answer in waiting] == [ErrorCode.kafka_storage_error] * 2
    assert result(later).error_code == ErrorCode.kafka_storage_error
    assert result(other).error_code == ErrorCode.none, "other partitions go on"
    assert node.partition("t").high_watermark == 1


async def test_a_full_disk_fails_the_write_until_there_is_room(node: Exchange) -> None:
    await node.write("t", "before")
    node.storage.fail_next("write", ".log", DiskFull("on purpose"))
    full = node.produce(9, produce_part("t", BATCH))
    assert await code(node, full) == ErrorCode.kafka_storage_error
    room = node.produce(9, produce_part("t", BATCH))
    assert await code(node, room) == ErrorCode.none
    assert result(room).base_offset == 1


# --- what the answer says


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_answer_tells_the_append_time_only_if_the_topic_uses_it(
    node: Exchange, version: int
) -> None:
    node.node.now_ms = 1_700_000_123_456
    answer = node.produce(version, produce_part("stamped", BATCH), produce_part("t", BATCH))
    await node.flush()
    stamped, plain = result(answer, 0), result(answer, 1)
    assert stamped.log_append_time.timestamp() == pytest.approx(1_700_000_123.456)
    assert plain.log_append_time is None


async def test_the_append_time_that_is_told_is_that_of_the_records_also_if_they_were_looked_at_in_a_thread(
    node: Exchange,
) -> None:
    node.node.now_ms = 1_700_000_000_000
    large = build_batch([Record(None, b"v", 1)] * 5_000)
    answer = node.produce(9, produce_part("stamped", large))
    assert node.node.broker.gated_writes
    await asyncio.sleep(0)
    # Time goes on while it is looked at.
    node.node.now_ms += 1_000
    await node.settle()
    await node.flush()
    told_ms = result(answer).log_append_time.timestamp() * 1000
    fetched = node.fetch(11, fetch_part("stamped"))
    await node.settle()
    stored = parse_header(fetched.value.responses[0].partitions[0].records)
    assert round(told_ms) == stored.max_timestamp


@pytest.mark.parametrize(
    ("count", "expected"), [(5_000, ErrorCode.leader_not_available), (60, ErrorCode.none)]
)
async def test_a_large_batch_is_not_looked_at_again_by_the_loop_if_the_topic_changed_meanwhile(
    node: Exchange, monkeypatch: pytest.MonkeyPatch, count: int, expected: ErrorCode
) -> None:
    looked, changed = threading.Semaphore(0), threading.Event()
    prepare = Partition.prepare

    def prepare_and_wait(partition: Partition, data: bytes, now_ms: int, **options: Any) -> PreparedBatch:
        prepared = prepare(partition, data, now_ms, **options)
        if threading.current_thread() is not threading.main_thread():
            looked.release()
            assert changed.wait(120), "the topic was not changed"
        return prepared

    monkeypatch.setattr(Partition, "prepare", prepare_and_wait)
    batch = build_batch([Record(b"k", b"v" * 40, 1)] * count, codec=ZSTD)
    part = produce_part("t", batch)
    # Whatever comes behind a batch that waits goes through the gate, too.
    node.produce(9, produce_part("t", build_batch([Record(None, b"v", 1)] * 5_000)))
    answer = node.produce(9, part)
    try:
        for _ in range(2):
            assert await asyncio.to_thread(looked.acquire, timeout=120)
        await node.node.broker.controller.submit(SetTopicConfigs(name="t", configs={"retention.ms": "5000"}))
    finally:
        changed.set()
    await node.settle()
    assert await code(node, answer) == expected
    again = node.produce(9, part)
    await node.settle()
    assert await code(node, again) == ErrorCode.none


async def test_the_answer_tells_where_the_log_starts(node: Exchange) -> None:
    await node.write("t", "a", "b", "c")
    node.partition("t").delete_records(2)
    answer = node.produce(9, produce_part("t", BATCH))
    await node.flush()
    assert (result(answer).base_offset, result(answer).log_start_offset) == (3, 2)
