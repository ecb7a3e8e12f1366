"""ListOffsets, OffsetForLeaderEpoch, DeleteRecords and ApiVersions through the wire format."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.batches import plain_batch
from support.exchange import Answer, Exchange, produce_part
from support.leadership import change_in_sync, follower_flushed
from tidemill.cluster.messages import ReplicaProgress
from tidemill.control.commands import BumpLeaderEpochs
from tidemill.errors import ErrorCode, SyncFailed
from tidemill.records.record import Record, build_batch
from tidemill.wire.apis import APIS, NODES_ONLY

LIST_VERSIONS = APIS[2].versions
LATEST, EARLIEST, MAX_TIMESTAMP, EARLIEST_LOCAL, LATEST_TIERED, EARLIEST_PENDING = -1, -2, -3, -4, -5, -6
READ_COMMITTED = 1
TOPICS = {"t": (1, {}), "keyed": (1, {"cleanup.policy": "compact"})}


@pytest.fixture
async def node() -> AsyncIterator[Exchange]:
    async with Exchange(TOPICS) as started:
        yield started


async def listed(
    node: Exchange, version: int, timestamp: int, *, topic: str = "t", index: int = 0, **more: Any
) -> Any:
    fields = {"partition_index": index, "timestamp": timestamp}
    if "current_leader_epoch" in more:
        fields["current_leader_epoch"] = more.pop("current_leader_epoch")
    answer = await node.ask(
        "ListOffsets", version, replica_id=-1, topics=[{"name": topic, "partitions": [fields]}], **more
    )
    return answer.topics[0].partitions[0]


async def filled(node: Exchange) -> None:
    """Records with the times 100, 300, 200 and 300, of which the first is deleted."""
    for time_ms in (100, 300, 200, 300):
        await node.write("t", "v", timestamp_ms=time_ms)
    node.partition("t").delete_records(1)


@pytest.mark.parametrize("version", LIST_VERSIONS)
async def test_the_start_and_the_end_of_a_log(node: Exchange, version: int) -> None:
    await filled(node)
    node.produce(9, produce_part("t", plain_batch("not durable")), acks=0)
    latest, earliest = await listed(node, version, LATEST), await listed(node, version, EARLIEST)
    assert (latest.error_code, latest.offset) == (ErrorCode.none, 4), "the end is where readers stop"
    assert (earliest.error_code, earliest.offset) == (ErrorCode.none, 1)
    assert (latest.timestamp, earliest.timestamp) == (-1, -1)
    if version >= 4:
        assert latest.leader_epoch == node.partition("t").leader_epoch
        assert earliest.leader_epoch == node.partition("t").leader_epoch


@pytest.mark.parametrize("version", LIST_VERSIONS)
@pytest.mark.parametrize(
    ("wanted_ms", "expected"),
    [(0, (1, 300)), (100, (1, 300)), (150, (1, 300)), (300, (1, 300)), (301, (-1, -1))],
)
async def test_the_first_record_at_or_after_a_time(
    node: Exchange, version: int, wanted_ms: int, expected: tuple[int, int]
) -> None:
    await filled(node)
    found = await listed(node, version, wanted_ms)
    assert (found.offset, found.timestamp) == expected


@pytest.mark.parametrize("version", [version for version in LIST_VERSIONS if version >= 7])
async def test_the_record_with_the_largest_timestamp(node: Exchange, version: int) -> None:
    empty = await listed(node, version, MAX_TIMESTAMP)
    assert (empty.error_code, empty.offset) == (ErrorCode.none, -1)
    await filled(node)
    node.produce(9, produce_part("t", plain_batch("not durable", timestamp_ms=999)), acks=0)
    found = await listed(node, version, MAX_TIMESTAMP)
    assert (found.offset, found.timestamp) == (1, 300)


@pytest.mark.parametrize(
    ("timestamp", "since"),
    [(MAX_TIMESTAMP, 7), (EARLIEST_LOCAL, 8), (LATEST_TIERED, 9), (EARLIEST_PENDING, 11)],
)
@pytest.mark.parametrize("version", LIST_VERSIONS)
async def test_special_timestamps_have_a_first_version(
    node: Exchange, timestamp: int, since: int, version: int
) -> None:
    found = await listed(node, version, timestamp)
    assert found.error_code == (ErrorCode.none if version >= since else ErrorCode.unsupported_version)
    assert found.offset == (0 if timestamp == EARLIEST_LOCAL and version >= since else -1)


async def test_a_negative_timestamp_without_a_meaning_is_refused(node: Exchange) -> None:
    assert (await listed(node, 11, -7)).error_code == ErrorCode.invalid_request


@pytest.mark.parametrize("version", [version for version in LIST_VERSIONS if version >= 2])
async def test_read_committed_ends_at_the_last_stable_offset(node: Exchange, version: int) -> None:
    await filled(node)
    partition = node.partition("t")
    partition.begin_transaction(1, 0)
    records = [Record(None, b"open", timestamp_ms=900)]
    partition.append(
        build_batch(records, producer_id=1, producer_epoch=0, base_sequence=0, attributes=0x10), 1
    )
    await node.flush()
    for isolation, end, late in ((0, 5, 4), (READ_COMMITTED, 4, -1)):
        assert (await listed(node, version, LATEST, isolation_level=isolation)).offset == end
        assert (await listed(node, version, 900, isolation_level=isolation)).offset == late


async def test_list_offsets_refusals(node: Exchange) -> None:
    assert (await listed(node, 5, LATEST, topic="no")).error_code == ErrorCode.unknown_topic_or_partition
    assert (await listed(node, 5, LATEST, index=1)).error_code == ErrorCode.unknown_topic_or_partition
    epoch = node.partition("t").leader_epoch
    older = await listed(node, 5, LATEST, current_leader_epoch=epoch + 1)
    assert older.error_code == ErrorCode.unknown_leader_epoch
    await node.node.controller.submit(BumpLeaderEpochs(name="t", partitions=(0,)))
    newer = await listed(node, 5, LATEST, current_leader_epoch=epoch)
    assert newer.error_code == ErrorCode.fenced_leader_epoch


@pytest.mark.parametrize("timestamp", [LATEST, EARLIEST, EARLIEST_LOCAL])
async def test_an_empty_log_has_the_epoch_of_its_leader(node: Exchange, timestamp: int) -> None:
    for power_loss in (False, True):
        found = await listed(node, 11, timestamp)
        assert (found.offset, found.leader_epoch) == (0, node.partition("t").leader_epoch)
        await node.restart(power_loss=power_loss)


@pytest.mark.parametrize("timestamp", [EARLIEST, EARLIEST_LOCAL])
async def test_the_start_of_a_log_has_the_epoch_that_wrote_it(node: Exchange, timestamp: int) -> None:
    await filled(node)
    wrote = node.partition("t").leader_epoch
    await node.restart(power_loss=False)
    found = await listed(node, 11, timestamp)
    assert (found.offset, found.leader_epoch) == (1, wrote)
    node.partition("t").delete_records(4)
    emptied = await listed(node, 11, timestamp)
    assert (emptied.offset, emptied.leader_epoch) == (4, node.partition("t").leader_epoch)


@pytest.mark.parametrize("timestamp", [LATEST_TIERED, EARLIEST_PENDING])
async def test_nothing_is_tiered_and_nothing_waits_for_it(node: Exchange, timestamp: int) -> None:
    await filled(node)
    found = await listed(node, 11, timestamp)
    assert (found.error_code, found.offset, found.leader_epoch) == (ErrorCode.none, -1, -1)


# --- OffsetForLeaderEpoch


async def epoch_end(
    node: Exchange, epoch: int, *, current: int = -1, version: int = 4, index: int = 0
) -> Any:
    entry = {"partition": index, "current_leader_epoch": current, "leader_epoch": epoch}
    body: dict[str, Any] = {"topics": [{"topic": "t", "partitions": [entry]}]}
    if version >= 3:
        body["replica_id"] = -1
    return (await node.ask("OffsetForLeaderEpoch", version, **body)).topics[0].partitions[0]


@pytest.mark.parametrize("version", range(2, 5))
async def test_where_a_leader_epoch_ended(node: Exchange, version: int) -> None:
    await node.write("t", "a", "b", "c")
    first = node.partition("t").leader_epoch
    for _ in range(2):
        await node.node.controller.submit(BumpLeaderEpochs(name="t", partitions=(0,)))
    await node.write("t", "d")
    found = [await epoch_end(node, first + step, version=version) for step in range(4)]
    assert [(each.leader_epoch, each.end_offset) for each in found] == [
        (first, 3),
        (first, 3),
        (first + 2, 4),
        (-1, -1),
    ]


async def test_an_epoch_ends_where_the_log_does_also_if_that_is_not_durable(node: Exchange) -> None:
    """A reader behind the high watermark must not take itself for cut off."""
    await node.write("t", "a")
    first = node.partition("t").leader_epoch
    node.produce(9, produce_part("t", plain_batch("b", "c")), acks=0)
    await node.settle()
    await node.node.controller.submit(BumpLeaderEpochs(name="t", partitions=(0,)))
    node.produce(9, produce_part("t", plain_batch("d")), acks=0)
    await node.settle()
    assert node.partition("t").high_watermark == 1
    assert (await epoch_end(node, first)).end_offset == 3
    assert (await epoch_end(node, first + 1)).end_offset == 4


async def test_an_epoch_without_records_is_known_after_restarts(node: Exchange) -> None:
    """Else a consumer that was told this epoch takes its log for cut off, and resets its position."""
    await node.write("t", "a", "b")
    first = node.partition("t").leader_epoch
    await node.restart(power_loss=False)
    latest = await listed(node, 5, LATEST)
    assert (latest.offset, latest.leader_epoch) == (2, first + 1)
    present = await epoch_end(node, latest.leader_epoch)
    assert (present.leader_epoch, present.end_offset) == (first + 1, 2)
    await node.restart(power_loss=False)
    passed = await epoch_end(node, latest.leader_epoch)
    assert (passed.leader_epoch, passed.end_offset) == (first, 2)
    await node.write("t", "c")
    assert (await epoch_end(node, latest.leader_epoch)).end_offset == 2
    assert (await epoch_end(node, first + 2)).end_offset == 3


async def test_offset_for_leader_epoch_refusals(node: Exchange) -> None:
    epoch = node.partition("t").leader_epoch
    assert (await epoch_end(node, 0, index=4)).error_code == ErrorCode.unknown_topic_or_partition
    assert (await epoch_end(node, 0, current=epoch + 1)).error_code == ErrorCode.unknown_leader_epoch


# --- DeleteRecords


async def deleted(node: Exchange, offset: int, *, topic: str = "t", index: int = 0, version: int = 2) -> Any:
    partitions = [{"partition_index": index, "offset": offset}]
    answer = await node.ask(
        "DeleteRecords", version, topics=[{"name": topic, "partitions": partitions}], timeout=1_000
    )
    return answer.topics[0].partitions[0]


@pytest.mark.parametrize("version", range(3))
async def test_deleting_moves_the_start_and_survives_a_crash(node: Exchange, version: int) -> None:
    await node.write("t", "a", "b", "c")
    result = await deleted(node, 2, version=version)
    assert (result.error_code, result.low_watermark) == (ErrorCode.none, 2)
    await node.restart(power_loss=True)
    assert (await listed(node, 5, EARLIEST)).offset == 2
    again = await deleted(node, 1)
    assert (again.error_code, again.low_watermark) == (ErrorCode.none, 2), "what is gone stays gone"


async def test_minus_one_deletes_up_to_the_high_watermark(node: Exchange) -> None:
    await node.write("t", "a", "b", "c")
    node.produce(9, produce_part("t", plain_batch("not durable")), acks=0)
    assert (await deleted(node, -1)).low_watermark == 3
    await node.flush()
    assert (await listed(node, 5, LATEST)).offset == 4


async def test_deleting_what_is_written_but_not_durable_waits_for_the_flush(node: Exchange) -> None:
    node.produce(9, produce_part("t", plain_batch("a", "b", "c")), acks=0)

    def delete_before(offset: int, timeout_ms: int) -> Answer:
        topics = [{"name": "t", "partitions": [{"partition_index": 0, "offset": offset}]}]
        return node.send("DeleteRecords", 2, timeout=timeout_ms, topics=topics)

    answer = delete_before(2, 60_000)
    await node.settle()
    assert not answer.arrived
    await node.flush()
    assert answer.value.topics[0].partitions[0].low_watermark == 2

    node.produce(9, produce_part("t", plain_batch("d")), acks=0)
    late = delete_before(4, 1)
    async with asyncio.timeout(120):
        while not late.arrived:
            await asyncio.sleep(0.001)
            await node.settle()
    assert late.value.topics[0].partitions[0].error_code == ErrorCode.request_timed_out
    assert node.partition("t").log_start_offset == 2


async def test_deleting_is_answered_when_every_in_sync_replica_has_the_start(node: Exchange) -> None:
    await node.write("t", "a", "b", "c")
    partition = node.partition("t")
    change_in_sync(partition, [2])
    follower_flushed(partition, 2, 3)
    topics = [{"name": "t", "partitions": [{"partition_index": 0, "offset": 2}]}]
    answer = node.send("DeleteRecords", 2, timeout=60_000, topics=topics)
    await node.settle()
    assert (partition.log_start_offset, answer.arrived) == (2, False)
    told = ReplicaProgress(partition.id, 3, 3, 3, partition.leader_epoch, log_start=2)
    partition.as_leader.replica_state(told, 2, 1, 0)
    await node.settle()
    assert answer.value.topics[0].partitions[0].low_watermark == 2


async def test_a_replica_that_does_not_delete_in_time_is_told(node: Exchange) -> None:
    await node.write("t", "a", "b", "c")
    change_in_sync(node.partition("t"), [2])
    follower_flushed(node.partition("t"), 2, 3)
    topics = [{"name": "t", "partitions": [{"partition_index": 0, "offset": 2}]}]
    answer = await node.ask("DeleteRecords", 2, timeout=0, topics=topics)
    assert answer.topics[0].partitions[0].error_code == ErrorCode.request_timed_out


@pytest.mark.parametrize("offset", [4, -2, 2**62])
async def test_deleting_more_than_there_is_is_refused(node: Exchange, offset: int) -> None:
    await node.write("t", "a", "b", "c")
    result = await deleted(node, offset)
    assert (result.error_code, result.low_watermark) == (ErrorCode.offset_out_of_range, -1)
    assert node.partition("t").log_start_offset == 0


async def test_delete_records_refusals(node: Exchange) -> None:
    assert (await deleted(node, 0, topic="no")).error_code == ErrorCode.unknown_topic_or_partition
    assert (await deleted(node, 0, index=1)).error_code == ErrorCode.unknown_topic_or_partition
    assert (await deleted(node, 0, topic="keyed")).error_code == ErrorCode.policy_violation
    assert (await deleted(node, 0, topic="__consumer_offsets")).error_code == ErrorCode.policy_violation


async def test_a_stopped_partition_answers_none_of_the_three(node: Exchange) -> None:
    await node.write("t", "a")
    node.produce(9, produce_part("t", plain_batch("b")), acks=0)
    node.storage.fail_next("sync", ".log", SyncFailed("on purpose"))
    await node.flush()
    answers = [await listed(node, 5, LATEST), await epoch_end(node, 0), await deleted(node, 0)]
    assert [answer.error_code for answer in answers] == [ErrorCode.kafka_storage_error] * 3


# --- ApiVersions


@pytest.mark.parametrize("version", range(APIS[18].max_version + 1))
async def test_api_versions_lists_every_api(node: Exchange, version: int) -> None:
    software = {"client_software_name": "test", "client_software_version": "1"} if version >= 3 else {}
    answer = await node.ask("ApiVersions", version, **software)
    assert answer.error_code == ErrorCode.none
    ranges = {api.api_key: (api.min_version, api.max_version) for api in answer.api_keys}
    assert ranges.pop(0) == (0, APIS[0].max_version), "librdkafka compresses only if Produce begins early"
    served = {key: (api.min_version, api.max_version) for key, api in APIS.items() if key}
    assert ranges == {key: each for key, each in served.items() if key not in NODES_ONLY}


async def test_an_api_versions_request_from_the_future_gets_the_oldest_format(
    node: Exchange,
) -> None:
    frame = b"\0\x12\x7f\xff" + (42).to_bytes(4, "big") + b"\xff\xffwhatever comes then"
    connection, transport = node.client.connection, node.client.stream
    data = len(frame).to_bytes(4, "big") + frame
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))
    answer = bytes(transport.sent)
    transport.sent.clear()
    assert int.from_bytes(answer[4:8], "big") == 42
    assert int.from_bytes(answer[8:10], "big") == ErrorCode.unsupported_version
    told = len(APIS.keys() - NODES_ONLY)
    assert int.from_bytes(answer[10:14], "big") == told
    assert len(answer) == 14 + 6 * told
