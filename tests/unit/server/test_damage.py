"""Whole nodes whose files were damaged while they were stopped: what is served, what is not, who is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

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
from tidemill.errors import DamagedBatch, ErrorCode
from tidemill.groups.messages import OffsetCommitRequest, OffsetToCommit
from tidemill.log.offline.repair import apply_repair, plan_repair
from tidemill.log.storage import LocalStorage
from tidemill.records.batch import BatchHeader, parse_header
from tidemill.records.record import Record, build_batch, read_records
from tidemill.replication.coordinator_log import wait_committed
from tidemill.replication.partition import Partition
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.coordinators.transactions import TRANSACTIONS
from tidemill.server.http import HttpServer
from tidemill.server.node import Node
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


async def create(node: Node, topic: str) -> None:
    await node.broker.controller.submit(
        CreateTopic(name=topic, topic_id=uuid4(), partitions=1, replication=1)
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
    async with asyncio.timeout(60):
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
    async with asyncio.timeout(60):
        while not third.problems():  # noqa: ASYNC110 - a test waits for a state
            await asyncio.sleep(0.01)
    assert f"{path} at byte {position}" in third.problems()[0], "a restart does not make it forgotten"
