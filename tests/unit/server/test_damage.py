"""Whole nodes whose files were damaged while they were stopped: what is served, what is not, who is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from crc32c import crc32c

from support.batches import plain_batch
from support.prometheus_text import scrape
from support.searching import searched
from support.stream_client import StreamClient
from tidemill.cli import doctor
from tidemill.cli.doctor import Finding, Verdict
from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.control.commands import CreateTopic
from tidemill.coordination.share_state import DeliveryState, SharePartitionKey, StateBatch
from tidemill.cursors.state import Given, Next
from tidemill.cursors.stored import CorruptCursorRecord, StoredCursor, StoredPosition
from tidemill.cursors.stored import decode_record as decode_cursor_record
from tidemill.cursors.stored import encode_record as encode_cursor_record
from tidemill.errors import ApiError, DamagedBatch, ErrorCode
from tidemill.groups.messages import OffsetCommitRequest, OffsetToCommit
from tidemill.log.offline.repair import apply_repair, plan_repair
from tidemill.log.storage import LocalStorage
from tidemill.records.batch import BatchHeader, parse_header
from tidemill.records.record import Record, build_batch, read_records
from tidemill.replication.coordinator_log import wait_committed
from tidemill.replication.partition import Partition
from tidemill.server.coordinators.cursors import CURSORS
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.coordinators.share_state import SHARE_STATE
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.server.http import HttpServer
from tidemill.server.node import Node
from tidemill.share.state.records import Update, UpdateRecord
from tidemill.share.state.records import encode_record as encode_share_record
from tidemill.transactions.messages import Producer

Start = Callable[..., Awaitable[Node]]
RECORDS_START = 61


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    nodes: list[Node] = []

    async def begin(**settings: Any) -> Node:
        node = Node(
            Settings(
                data_dir=tmp_path,
                listen=Address("127.0.0.1", 0),
                http=None,
                offsets_topic_partitions=2,
                transactions_topic_partitions=2,
                share_state_topic_partitions=2,
                cursors_topic_partitions=2,
                **settings,
            )
        )
        nodes.append(node)
        await node.start()
        return node

    yield begin
    for node in nodes:
        if node.ready:
            await node.stop()


async def create(node: Node, topic: str, **configs: str) -> None:
    await node.broker.controller.submit(
        CreateTopic(name=topic, topic_id=uuid4(), partitions=1, replication=1, configs=configs)
    )


def partition_of(node: Node, topic: str, index: int = 0) -> Partition:
    return node.broker.find.partition(node.broker.find.topic(topic), index)


async def write(node: Node, topic: str, *values: str) -> None:
    partition = partition_of(node, topic)
    for value in values:
        appended = partition.append(plain_batch(value), node.broker.clock_ms())
        await wait_committed(partition, appended.last_offset + 1)


def flip(node: Node, path: str, position: int, bit: int = 0) -> None:
    file = node.settings.data_dir / path
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


def only_log(node: Node, topic: str, index: int) -> str:
    """Path of the one segment of a partition."""
    (path,) = (node.settings.data_dir / "logs" / topic).glob(f"*-{index}/*.log")
    return str(path.relative_to(node.settings.data_dir))


async def fetch(node: Node, offset: int, *, committed: bool = False) -> Any:
    client = await StreamClient.connect(node.address)
    wanted = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
    answer = await client.ask(
        "Fetch",
        4,
        replica_id=-1,
        max_wait=0,
        min_bytes=1,
        max_bytes=1 << 20,
        isolation_level=int(committed),
        topics=[{"topic": "t", "partitions": [wanted]}],
    )
    await client.close()
    return answer.responses[0].partitions[0]


def values(part: Any) -> list[str]:
    data, found = bytes(part.records or b""), []
    while data:
        size = int.from_bytes(data[8:12], "big") + 12
        assert size <= len(data), "only whole batches leave"
        found += [(record.value or b"").decode() for record in read_records(data[:size])]
        data = data[size:]
    return found


# --- Fetch


async def test_flipped_bits_are_not_served_and_everything_else_still_is(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    node = await start()
    await create(node, "t")
    await write(node, "t", "a", "b", "c", "d")
    path, position = partition_of(node, "t").local_log.position_of(2)
    await node.stop()
    flip(node, path, position + RECORDS_START + 6)

    again = await start()
    assert again.problems() == [], "nobody has read it yet"
    with caplog.at_level(logging.ERROR):
        assert values(await fetch(again, 0)) == ["a", "b"]
        for _ in range(3):
            part = await fetch(again, 2)
            assert (part.error_code, part.records or b"") == (ErrorCode.corrupt_message, b"")
        assert values(await fetch(again, 3)) == ["d"]
    assert len(caplog.records) == 1, "it is logged once, not once per Fetch"
    (problem,) = again.problems()
    for part_of_it in (
        "t-0",
        "offset 2 is damaged",
        f"{path} at byte {position}",
        "log verify",
        "log repair",
    ):
        assert part_of_it in problem
        assert part_of_it in caplog.text
    metrics = await scrape(again.metrics)
    assert metrics["tidemill_damaged_batches"].value() == 1
    assert metrics["tidemill_partition_damaged_batches"].value(topic="t", partition="0") == 1
    assert metrics["tidemill_partitions_stopped"].value() == 0

    await write(again, "t", "e")
    assert values(await fetch(again, 3)) == ["d", "e"], "writing goes on"
    again.broker.removal.discard(partition_of(again, "t"), partition_of(again, "t").delete_records(3))
    assert again.problems() == [], "what was deleted is no damage any more"


async def test_after_a_repair_readers_pass_over_what_was_damaged(start: Start) -> None:
    node = await start()
    await create(node, "t")
    await write(node, "t", "a", "b", "c", "d")
    path, position = partition_of(node, "t").local_log.position_of(2)
    await node.stop()
    flip(node, path, position + RECORDS_START + 6)
    damaged = await start()
    assert (await fetch(damaged, 2)).error_code == ErrorCode.corrupt_message
    await damaged.stop()
    storage, directory = LocalStorage(node.settings.data_dir), path.rpartition("/")[0]
    apply_repair(plan_repair(storage, directory))

    repaired = await start()
    assert values(await fetch(repaired, 0)) == ["a", "b", "d"]
    assert (await fetch(repaired, 2)).error_code == ErrorCode.none
    assert repaired.problems() == []


async def test_a_search_by_time_that_meets_damage_says_so(start: Start) -> None:
    node = await start()
    await create(node, "t")
    await write(node, "t", "a", "b")
    path, position = partition_of(node, "t").local_log.position_of(0)
    await node.stop()
    # The largest timestamp of the first batch: an unchecked header would send the search past it.
    flip(node, path, position + 35, 7)
    again = await start()
    with pytest.raises(DamagedBatch):
        searched(partition_of(again, "t").local_log.find_time(0, 2))
    assert len(again.problems()) == 1


async def test_a_fetch_of_very_many_tiny_batches_is_answered_in_parts(start: Start) -> None:
    node = await start()
    await create(node, "t")
    partition = partition_of(node, "t")
    batch = build_batch([Record(None, None)])
    for _ in range(20_000):
        partition.append(batch, 1)
    await wait_committed(partition, 20_000)
    offset, answers = 0, 0
    while offset < 20_000:
        read = values(await fetch(node, offset))
        assert 0 < len(read) < 5_000
        offset, answers = offset + len(read), answers + 1
    assert answers == 5


# --- coordinators


async def commit(node: Node, group: str, offset: int) -> ErrorCode:
    request = OffsetCommitRequest(group, [OffsetToCommit("t", 0, offset)])
    return (await node.broker.groups.commit_offsets(request))["t", 0]


async def committed(node: Node, group: str) -> int | ErrorCode:
    result = await node.broker.groups.fetch_offsets(group, [("t", 0)])
    return result.offsets["t", 0].offset if result.error is ErrorCode.none else result.error


def name_in(node: Node, shard: int, partition_of_name: Callable[[str], int]) -> str:
    return next(name for number in range(99) if partition_of_name(name := f"name-{number}") == shard)


async def test_whatever_bit_of_a_committed_offset_flips_it_is_never_another_offset(start: Start) -> None:
    node = await start()
    await create(node, "t")
    await node.broker.coordinators.ensure_topic(GROUPS)
    bad, good = (name_in(node, shard, node.broker.groups.partition_of) for shard in (0, 1))
    for group in (bad, good):
        assert await commit(node, group, 77) is ErrorCode.none
    await node.stop()
    path = only_log(node, GROUPS.topic, 0)
    size = (node.settings.data_dir / path).stat().st_size
    for position in range(7, size, max(1, size // 12)):
        flip(node, path, position, 2)
        node = await start()
        assert await committed(node, bad) is ErrorCode.unknown_server_error
        assert await commit(node, bad, 78) is ErrorCode.unknown_server_error
        assert await committed(node, good) == 77
        problems = " ".join(node.problems())
        assert f"{GROUPS.topic}-0 is damaged" in problems
        assert f"{path} at byte 0" in problems
        await node.stop()
        flip(node, path, position, 2)
    node = await start()
    assert await committed(node, bad) == 77
    assert node.problems() == []


async def test_a_record_that_checks_out_and_cannot_be_decoded_stops_its_shard_only(start: Start) -> None:
    node = await start()
    await create(node, "t")
    await node.broker.coordinators.ensure_topic(GROUPS)
    bad, good = (name_in(node, shard, node.broker.groups.partition_of) for shard in (0, 1))
    for group in (bad, good):
        await commit(node, group, 77)
    partition = partition_of(node, GROUPS.topic, 0)
    garbage = bytearray(build_batch([Record(b"k", b"v" * 40)]))
    garbage[RECORDS_START:] = b"\xff" * (len(garbage) - RECORDS_START)
    appended = partition.local_log.append(*restamped(garbage), 0, 1)
    await wait_committed(partition, appended.last_offset + 1)
    await node.stop()
    again = await start()
    assert await committed(again, bad) is ErrorCode.unknown_server_error
    assert await committed(again, good) == 77
    (problem,) = again.problems()
    assert "cannot be decoded" in problem
    assert f"{only_log(again, GROUPS.topic, 0)} at byte" in problem


def restamped(batch: bytearray) -> tuple[bytes, BatchHeader]:
    """The batch with the checksum of what is in it now, and its header."""
    batch[17:21] = crc32c(memoryview(batch)[21:]).to_bytes(4, "big")
    return bytes(batch), parse_header(bytes(batch))


async def test_a_damaged_log_of_transactions_ends_no_transaction_and_serves_the_other_ids(
    start: Start,
) -> None:
    node = await start()
    await create(node, "t")
    await node.broker.coordinators.ensure_topic(TRANSACTIONS)
    transactions = node.broker.transactions
    bad, good = (name_in(node, shard, transactions.partition_of) for shard in (0, 1))
    producer = (await transactions.init_producer_id(bad, 60_000)).producer
    assert producer is not None
    assert await transactions.add_partitions(bad, producer, [("t", 0)]) is ErrorCode.none
    partition = partition_of(node, "t")
    batch = build_batch(
        [Record(None, b"x")],
        producer_id=producer.id,
        producer_epoch=producer.epoch,
        base_sequence=0,
        attributes=0x10,
    )
    await wait_committed(partition, partition.append(batch, 1).last_offset + 1)
    await node.stop()
    path = only_log(node, TRANSACTIONS.topic, 0)
    flip(node, path, RECORDS_START + 20)

    again = await start()
    transactions = again.broker.transactions
    code = (await transactions.init_producer_id(bad, 60_000, producer)).error
    assert code is ErrorCode.unknown_server_error
    ended = await transactions.end(bad, producer, commit=True, new_epoch=False)
    assert ended.error is ErrorCode.unknown_server_error
    assert (await transactions.init_producer_id(good, 60_000)).error is ErrorCode.none
    assert any(f"{TRANSACTIONS.topic}-0 is damaged" in each and path in each for each in again.problems())
    assert [shard.partition for shard in transactions._shards.loaded()] == [1], "no timer runs for the other"
    await transactions.expire()
    partition = partition_of(again, "t")
    assert (partition.last_stable_offset, partition.local_log.end_offset) == (0, 1)
    assert (
        await transactions.add_partitions(bad, Producer(1, 0), [("t", 0)]) is ErrorCode.unknown_server_error
    )


# --- share groups


async def begin_sharing(node: Node, group: str) -> SharePartitionKey:
    """Give a group's share partition of t-0 a state in which offset 0 is done."""
    key = SharePartitionKey(group, node.broker.find.topic("t").id, 0)
    persister = node.broker.persister
    await persister.initialize(key, 1, 0)
    await persister.read_state(key, 0)
    await persister.write_state(key, 1, 0, 0, 1, [StateBatch(0, 0, DeliveryState.ACKNOWLEDGED, 1)])
    return key


async def two_share_partitions(node: Node) -> tuple[SharePartitionKey, SharePartitionKey]:
    """Share partitions with a state in partition 0, and in partition 1, of ``__share_group_state``."""
    await create(node, "t")
    await write(node, "t", "done", "next")
    await node.broker.coordinators.ensure_topic(SHARE_STATE)
    topic_id = node.broker.find.topic("t").id

    def home(group: str) -> int:
        return node.broker.share_states.partition_of(str(SharePartitionKey(group, topic_id, 0)))

    bad, good = [await begin_sharing(node, name_in(node, shard, home)) for shard in (0, 1)]
    return bad, good


async def share_fetch(node: Node, key: SharePartitionKey) -> tuple[ErrorCode, list[tuple[int, int]]]:
    """The error, and the first and last offsets of what a new member is given."""
    client = await StreamClient.connect(node.address)
    answer = await client.ask(
        "ShareFetch",
        1,
        group_id=key.group_id,
        member_id=str(uuid4()),
        share_session_epoch=0,
        max_wait=10_000,
        min_bytes=1,
        max_bytes=1 << 20,
        max_records=10,
        batch_size=10,
        topics=[{"topic_id": key.topic_id, "partitions": [{"partition_index": 0}]}],
    )
    await client.close()
    part = answer.responses[0].partitions[0]
    given = [(each.first_offset, each.last_offset) for each in part.acquired_records]
    return ErrorCode(part.error_code), given


async def assert_share_state_is_not_served(node: Node, key: SharePartitionKey) -> None:
    persister = node.broker.persister
    for call in (
        persister.read_state(key, 0),
        persister.read_summary(key, 0),
        # Whoever began it anew would have every record delivered again.
        persister.initialize(key, 2, 0),
        persister.delete(key),
        persister.write_state(key, 1, 0, 1, 0, ()),
    ):
        with pytest.raises(ApiError) as refused:
            await call
        assert refused.value.code is ErrorCode.unknown_server_error
    assert await share_fetch(node, key) == (ErrorCode.unknown_server_error, [])


async def test_whatever_bit_of_a_share_state_flips_no_record_is_delivered_by_it(start: Start) -> None:
    node = await start()
    bad, good = await two_share_partitions(node)
    await node.stop()
    path = only_log(node, SHARE_STATE.topic, 0)
    size = (node.settings.data_dir / path).stat().st_size
    for position in range(7, size, max(1, size // 5)):
        flip(node, path, position, 2)
        node = await start()
        await assert_share_state_is_not_served(node, bad)
        assert await share_fetch(node, good) == (ErrorCode.none, [(1, 1)])
        problems = " ".join(node.problems())
        assert f"{SHARE_STATE.topic}-0 is damaged" in problems
        assert f"{path} at byte" in problems
        await node.broker.share_states.expire()
        await node.stop()
        flip(node, path, position, 2)
    node = await start()
    assert await share_fetch(node, bad) == (ErrorCode.none, [(1, 1)])
    assert node.problems() == []


async def test_a_share_state_that_checks_out_and_cannot_be_decoded_stops_its_shard_only(start: Start) -> None:
    node = await start()
    bad, good = await two_share_partitions(node)
    key, value = encode_share_record(
        UpdateRecord(*bad, Update(0, 0, -1, [StateBatch(1, 1, DeliveryState.ARCHIVED, 1)]))
    )
    assert value is not None
    await append_record(node, SHARE_STATE.topic, key, value[:-3])
    await node.stop()
    again = await start()
    await assert_share_state_is_not_served(again, bad)
    assert await share_fetch(again, good) == (ErrorCode.none, [(1, 1)])
    (problem,) = again.problems()
    assert "cannot be decoded" in problem
    assert f"{only_log(again, SHARE_STATE.topic, 0)} at byte" in problem


# --- cursors


async def append_record(node: Node, topic: str, key: bytes, value: bytes) -> None:
    """Append one record to partition 0 of a topic, with a checksum that fits."""
    partition = partition_of(node, topic)
    batch = bytearray(build_batch([Record(key, value)]))
    appended = partition.local_log.append(*restamped(batch), 0, 1)
    await wait_committed(partition, appended.last_offset + 1)


async def two_cursors(node: Node) -> tuple[str, str]:
    """Cursors at offset 3 of t-0 that are kept in partition 0, and in partition 1, of ``__cursors``."""
    await create(node, "t", **{"tidemill.retention.waits.for.cursors": "true"})
    await node.broker.coordinators.ensure_topic(CURSORS)
    cursors = node.broker.cursors
    bad, good = (name_in(node, shard, cursors.partition_of) for shard in (0, 1))
    for name in (bad, good):
        epoch = await take_cursor(node, name)
        given = Given(3, 0, True, b"")
        await cursors.commit(name, {0: Next(epoch, 0, given)})
    return bad, good


async def take_cursor(node: Node, name: str) -> int:
    """Become its owner; gives the epoch."""
    about = StoredCursor("t", node.broker.find.topic("t").id, b"region", "all of t", False, 1)
    starts = {0: Given(0, 0, False, b"")}
    _, held = await node.broker.cursors.take(
        name, about, starts, owner="somebody", lease_ms=60_000, force=True, origin=UUID(int=1)
    )
    return held[0].position.epoch


async def cursor_offset(node: Node, name: str) -> int:
    _, held = await node.broker.cursors.describe(name)
    return held[0].position.offset


async def assert_cursor_is_not_served(node: Node, name: str) -> None:
    cursors = node.broker.cursors
    for call in (
        cursors.describe(name),
        # Whoever took it would begin at its start again.
        take_cursor(node, name),
        cursors.commit(name, {0: Next(1, 3, Given(4, 0, True, b""))}),
        cursors.keep(name, {0: 1}, lease_ms=1_000, release=False),
        cursors.alter(name, paused=True, positions={}, force=True, origin=UUID(int=1)),
        cursors.delete(name, force=True),
        # A part of the cursors must not look like all of them.
        cursors.listing(),
    ):
        with pytest.raises(ApiError) as refused:
            await call
        assert refused.value.code is ErrorCode.unknown_server_error
    await node.broker.cursor_floors.refresh()
    partition = partition_of(node, "t")
    assert node.broker.cursor_floors.floor(partition, 1) == partition.log_start_offset, "all of t is kept"


async def test_whatever_bit_of_a_cursor_flips_it_is_never_somewhere_else(start: Start) -> None:
    node = await start()
    bad, good = await two_cursors(node)
    await node.stop()
    path = only_log(node, CURSORS.topic, 0)
    size = (node.settings.data_dir / path).stat().st_size
    for position in range(7, size, max(1, size // 5)):
        flip(node, path, position, 2)
        node = await start()
        await assert_cursor_is_not_served(node, bad)
        assert await cursor_offset(node, good) == 3
        problems = " ".join(node.problems())
        assert f"{CURSORS.topic}-0 is damaged" in problems
        assert f"{path} at byte" in problems
        await node.stop()
        flip(node, path, position, 2)
    node = await start()
    assert await cursor_offset(node, bad) == 3
    assert node.problems() == []


async def test_a_cursor_record_that_checks_out_and_cannot_be_decoded_stops_its_shard_only(
    start: Start,
) -> None:
    node = await start()
    bad, good = await two_cursors(node)
    key, value = encode_cursor_record(bad, 0, StoredPosition(1, 4, 0, True, b"", "somebody", 1))
    assert value is not None
    with pytest.raises(CorruptCursorRecord):
        decode_cursor_record(key, value[:-3])
    await append_record(node, CURSORS.topic, key, value[:-3])
    await node.stop()
    again = await start()
    await assert_cursor_is_not_served(again, bad)
    assert await cursor_offset(again, good) == 3
    (problem,) = again.problems()
    assert "cannot be decoded" in problem
    assert f"{only_log(again, CURSORS.topic, 0)} at byte" in problem


# --- the scrubber


async def doctor_of(node: Node) -> list[Finding]:
    """What ``tidemill doctor`` finds over HTTP."""
    server = HttpServer(node)
    address = await server.start(Address("127.0.0.1", 0))
    found = await asyncio.to_thread(lambda: list(doctor._http(replace(node.settings, http=address))))
    await server.stop()
    return found


async def test_a_node_reads_what_nobody_reads_and_tells_of_it(start: Start) -> None:
    node = await start()
    await create(node, "t")
    await write(node, "t", "a", "b")
    path, position = partition_of(node, "t").local_log.position_of(1)
    await node.stop()
    flip(node, path, position + RECORDS_START + 6)
    again = await start(scrub_interval_ms=1, scrub_bytes_per_second=0)
    async with asyncio.timeout(120):
        while not again.broker.scrubber.progress.pass_ended_ms:  # noqa: ASYNC110 - a thread reads
            await asyncio.sleep(0.01)
    (problem,) = again.problems()
    assert f"{path} at byte {position}" in problem
    metrics = await scrape(again.metrics)
    assert metrics["tidemill_scrub_damaged_total"].value() >= 1
    assert metrics["tidemill_scrub_batches_total"].value() >= 1
    assert metrics["tidemill_scrub_last_pass_timestamp_ms"].value() > 0
    findings = {each.check: each for each in await doctor_of(again)}
    assert f"{path} at byte {position}" in findings["health"].detail
    assert findings["scrub"].verdict is Verdict.FAIL
    assert "1 damaged batches are known; all data was last read through at 2" in findings["scrub"].detail
    assert "'tidemill log repair'" in findings["scrub"].advice
    await again.stop()

    third = await start(scrub_interval_ms=0)
    async with asyncio.timeout(120):
        while not third.problems():  # noqa: ASYNC110 - a test waits for a state
            await asyncio.sleep(0.01)
    assert f"{path} at byte {position}" in third.problems()[0], "a restart does not make it forgotten"
