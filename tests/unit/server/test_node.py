"""Whole nodes on the test's event loop, with real sockets and a real disk."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from support.batches import plain_batch
from support.prometheus_text import scrape
from support.stream_client import StreamClient
from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.control.commands import CreateTopic
from tidemill.errors import (
    ConfigError,
    CorruptData,
    DataDirectoryInUse,
    ErrorCode,
    StorageError,
    SyncFailed,
)
from tidemill.groups.coordinator import GroupCoordinator
from tidemill.replication.coordinator_log import wait_committed
from tidemill.server.coordinators.groups import GROUPS
from tidemill.server.coordinators.registry import Coordinators
from tidemill.server.node import Node
from tidemill.server.requests import dispatch

LOCAL = Address("127.0.0.1", 0)
Make = Callable[..., Node]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    nodes: list[Node] = []

    def build(path: Path | None = None, **settings: Any) -> Node:
        node = Node(
            Settings(data_dir=path or tmp_path / "data", **{"listen": LOCAL, "http": None, **settings})
        )
        nodes.append(node)
        return node

    yield build
    for node in nodes:
        if node.ready:
            await node.stop()


async def create(node: Node, topic: str, partitions: int = 1) -> None:
    await node.broker.controller.submit(
        CreateTopic(name=topic, topic_id=uuid4(), partitions=partitions, replication=1)
    )


async def write(node: Node, topic: str, value: str, index: int = 0) -> None:
    partition = node.broker.find.partition(node.broker.find.topic(topic), index)
    await wait_committed(
        partition, partition.append(plain_batch(value), node.broker.clock_ms()).last_offset + 1
    )


def produce_body(topic: str, value: str) -> dict[str, Any]:
    part = {"name": topic, "partition_data": [{"index": 0, "records": plain_batch(value)}]}
    return {"acks": -1, "timeout": 30_000, "topic_data": [part]}


def crashed_copy(node: Node, tmp_path: Path) -> Path:
    """The files of a running node, as a process that is killed now would leave them."""
    copy = tmp_path / f"copy-{uuid4().hex}"
    # Files that are about to be renamed may be gone before they are copied.
    shutil.copytree(node.settings.data_dir, copy, ignore=shutil.ignore_patterns("*.tmp"))
    return copy


def epochs(node: Node, topic: str) -> list[int]:
    return [partition.leader_epoch for partition in node.broker.find.topic(topic).partitions]


# --- start and stop


async def test_a_node_keeps_its_data_and_its_identity_over_an_orderly_stop(make: Make) -> None:
    first = make()
    await first.start()
    await create(first, "t", 2)
    await write(first, "t", "a")
    before = first.broker.image.cluster_id, epochs(first, "t")
    await first.stop()
    second = make()
    await second.start()
    assert second.directory.stopped_cleanly
    assert (second.broker.image.cluster_id, epochs(second, "t")) == before
    assert second.broker.find.partition(second.broker.find.topic("t"), 0).high_watermark == 1


async def test_the_same_node_can_be_started_again(make: Make) -> None:
    node = make()
    for _ in range(3):
        await node.start()
        assert node.ready
        assert node.address.port != 0
        await node.stop()
        assert not node.ready


async def test_an_unclean_start_gives_new_leader_epochs_to_written_partitions_only(
    make: Make, tmp_path: Path
) -> None:
    first = make()
    await first.start()
    await create(first, "t", 3)
    await create(first, "never_written")
    await write(first, "t", "a", 1)
    before = epochs(first, "t")
    second = make(crashed_copy(first, tmp_path))
    await second.start()
    assert not second.directory.stopped_cleanly
    assert epochs(second, "t") == [before[0], before[1] + 1, before[2]]
    assert epochs(second, "never_written") == epochs(first, "never_written")
    assert second.broker.find.partition(second.broker.find.topic("t"), 1).leader_epoch == before[1] + 1


async def test_a_client_finds_what_it_was_just_acknowledged_with_acks_1(make: Make) -> None:
    """With a real disk, whose syncs take longer than the way from client to node."""
    node = make()
    await node.start()
    await create(node, "t")
    client = await StreamClient.connect(node.address)
    for offset in range(50):
        answer = await client.ask("Produce", 9, **{**produce_body("t", "v"), "acks": 1})
        assert answer.responses[0].partition_responses[0].base_offset == offset
        place = {"partition_index": 0, "timestamp": -1}
        latest = await client.ask("ListOffsets", 5, topics=[{"name": "t", "partitions": [place]}])
        assert latest.topics[0].partitions[0].offset == offset + 1
        entry = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 10**6}
        body = {"max_wait": 0, "min_bytes": 0, "max_bytes": 10**6}
        fetched = await client.ask("Fetch", 11, topics=[{"topic": "t", "partitions": [entry]}], **body)
        partition = fetched.responses[0].partitions[0]
        assert (partition.error_code, bool(partition.records)) == (ErrorCode.none, True)
    await client.close()


async def test_a_second_node_on_the_directory_is_told_of_the_first(make: Make) -> None:
    first, second = make(), make()
    await first.start()
    with pytest.raises(DataDirectoryInUse) as caught:
        await second.start()
    assert str(os.getpid()) in str(caught.value)
    assert str(first.address) in str(caught.value)
    assert first.problems() == []


async def test_a_port_in_use_leaves_nothing_behind(make: Make, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        node = make(listen=Address("127.0.0.1", port))
        before = set(os.listdir("/proc/self/fd"))
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*--listen"):
            await node.start()
        assert set(os.listdir("/proc/self/fd")) == before
    again = make()
    await again.start()
    assert again.directory.stopped_cleanly


async def test_a_start_that_fails_late_lets_go_of_everything(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make()
    await first.start()
    await create(first, "t")
    await write(first, "t", "a")
    await first.stop()
    second = make()

    async def fail(self: Coordinators, settle_ms: int) -> None:
        find = second.broker.find
        find.partition(find.topic("t"), 0)
        raise RuntimeError("on purpose")

    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(Coordinators, "start", fail)
        with pytest.raises(RuntimeError, match="on purpose"):
            await second.start()
    await asyncio.sleep(0)
    assert set(os.listdir("/proc/self/fd")) == before
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("tidemill-flush")]
    third = make()
    await third.start()
    assert third.directory.stopped_cleanly, "nothing was changed since the orderly stop"


async def test_logs_without_metadata_are_refused_and_kept(make: Make, tmp_path: Path) -> None:
    first = make()
    await first.start()
    await create(first, "t")
    await write(first, "t", "a")
    await first.stop()
    saved = (tmp_path / "data" / "metadata.db").rename(tmp_path / "saved.db")
    with pytest.raises(CorruptData, match=r"metadata\.db"):
        await make().start()
    saved.rename(tmp_path / "data" / "metadata.db")
    again = make()
    await again.start()
    assert again.broker.find.partition(again.broker.find.topic("t"), 0).high_watermark == 1


async def test_an_interrupted_deletion_is_finished_and_strangers_stay(make: Make, tmp_path: Path) -> None:
    first = make()
    await first.start()
    await create(first, "gone")
    await write(first, "gone", "a")
    topic = first.broker.find.topic("gone")
    first.broker.replicas.mark_deleting("gone", topic.id)
    first.broker.removal.remove_topic = lambda name, topic_id: None  # type: ignore[assignment, return-value, method-assign]
    await first.broker.catalogue.delete_topic(topic)
    stranger = tmp_path / "data" / "logs" / "stranger" / "0123-0"
    stranger.mkdir(parents=True)
    copy = crashed_copy(first, tmp_path)
    second = make(copy)
    await second.start()
    await asyncio.wrap_future(second.broker.removal._thread.submit(lambda: None))
    assert list((copy / "logs" / "gone").iterdir()) == []
    assert second.unknown_directories == ["logs/stranger/0123-0"]
    assert (copy / "logs" / "stranger" / "0123-0").exists()


async def test_topics_that_only_the_logs_know_are_told_and_what_was_committed_for_them_is_kept(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten = []

    async def forget(groups: GroupCoordinator, exists: object) -> None:
        forgotten.append(groups)

    monkeypatch.setattr(GroupCoordinator, "forget_missing_topics", forget)
    first = make()
    await first.start()
    await create(first, GROUPS.topic)
    well = make(crashed_copy(first, tmp_path))
    await well.start()
    assert (len(forgotten), well.problems()) == (1, [])
    # As the files are after metadata.db has lost the end of its journal.
    (tmp_path / "data" / "logs" / "orders" / "0123-0").mkdir(parents=True)
    await first.stop()
    again = make()
    await again.start()
    assert len(forgotten) == 1
    (problem,) = again.problems()
    assert problem.startswith("1 directories belong to no known topic, the first one is logs/orders/0123-0: ")


# --- clients


async def test_clients_are_served_and_see_a_stop(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make()
    await node.start()
    await create(node, "t")
    idle, polling = await StreamClient.connect(node.address), await StreamClient.connect(node.address)
    answer = await idle.ask("Produce", 9, **produce_body("t", "v"))
    assert answer.responses[0].partition_responses[0].error_code == ErrorCode.none
    entry = {"partition": 0, "fetch_offset": 1, "partition_max_bytes": 10**6}
    body = {"max_wait": 2**31 - 1, "min_bytes": 1, "max_bytes": 10**6}
    polling.send("Fetch", 11, topics=[{"topic": "t", "partitions": [entry]}], **body)
    subscribed = asyncio.Event()
    partition = node.broker.find.partition(node.broker.find.topic("t"), 0)
    subscribe = partition.subscribe

    def note(key: object, wake: Callable[[], None]) -> None:
        subscribe(key, wake)
        subscribed.set()

    monkeypatch.setattr(partition, "subscribe", note)
    await asyncio.wait_for(subscribed.wait(), 120)
    # Nobody is waited for until the time for it is over.
    monkeypatch.setattr(dispatch, "_CLOSE_TIMEOUT_SECONDS", 10_000)
    await asyncio.wait_for(node.stop(), 120)
    assert await idle.read_to_end() == b""
    last = await polling.receive("Fetch", 11)
    assert last.responses[0].partitions[0].error_code == ErrorCode.none
    assert await polling.read_to_end() == b""
    for client in (idle, polling):
        await client.close()


async def test_a_write_under_way_is_answered_at_a_stop(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    node = make()
    await node.start()
    await create(node, "t")
    await write(node, "t", "first")
    monkeypatch.setattr(dispatch, "_CLOSE_TIMEOUT_SECONDS", 10_000)
    begun, go_on = threading.Event(), threading.Event()
    file = node.broker.find.partition(node.broker.find.topic("t"), 0).local_log.segments[-1].file
    sync = file.sync

    def slow_sync() -> None:
        begun.set()
        assert go_on.wait(120)
        sync()

    monkeypatch.setattr(file, "sync", slow_sync)
    client = await StreamClient.connect(node.address)
    client.send("Produce", 9, **produce_body("t", "v"))
    assert await asyncio.to_thread(begun.wait, 120)
    stopping = asyncio.get_running_loop().create_task(node.stop())
    await asyncio.sleep(0.01)
    go_on.set()
    answer = await client.receive("Produce", 9)
    assert answer.responses[0].partition_responses[0].base_offset == 1
    await stopping
    await client.close()


async def test_two_nodes_in_one_process_do_not_share_their_read_buffers(make: Make, tmp_path: Path) -> None:
    """Each may run on a thread of its own; a shared buffer would mix up their clients' bytes."""
    nodes = [make(tmp_path / "one"), make(tmp_path / "two")]
    buffers = []
    for node in nodes:
        await node.start()
        client = await StreamClient.connect(node.address)
        await client.ask("Metadata", 9, topics=[])
        assert node._dispatcher is not None
        (connection,) = node._dispatcher.connections
        buffers.append(connection.get_buffer(-1).obj)
        await client.close()
    assert buffers[0] is not buffers[1]


# --- what it tells of itself


async def test_problems_and_the_unclean_stop_of_a_stopped_partition(make: Make) -> None:
    node = make()
    assert node.problems() == ["the node is starting or stopping"]
    await node.start()
    assert node.problems() == []
    await create(node, "t")
    await write(node, "t", "a")
    partition = node.broker.find.partition(node.broker.find.topic("t"), 0)
    partition.flush_failed(SyncFailed("a bad disk"))
    assert node.problems() == ["t-0 is stopped: a bad disk"]
    await node.stop()
    again = make()
    await again.start()
    assert not again.directory.stopped_cleanly


async def test_stopped_partitions_are_counted_apart_from_other_problems(make: Make) -> None:
    node = make()
    await node.start()
    await create(node, "t")
    await write(node, "t", "a")
    node.broker.compactor.counts.damaged[uuid4(), 0] = StorageError("a bad record")
    found = await scrape(node.metrics)
    assert (found["tidemill_partitions_stopped"].value(), found["tidemill_problems"].value()) == (0, 1)
    node.broker.find.partition(node.broker.find.topic("t"), 0).flush_failed(SyncFailed("a bad disk"))
    found = await scrape(node.metrics)
    assert (found["tidemill_partitions_stopped"].value(), found["tidemill_problems"].value()) == (1, 2)


async def test_metrics_are_there_before_and_after_the_start(make: Make) -> None:
    node = make()
    before = await scrape(node.metrics)
    assert before["tidemill_ready"].value() == 0
    assert "tidemill_topics" not in before
    await node.start()
    await create(node, "t")
    await write(node, "t", "a")
    found = await scrape(node.metrics)
    assert found["tidemill_ready"].value() == 1
    assert found["tidemill_high_watermark"].value(topic="t", partition="0") == 1
    assert found["tidemill_log_end_offset"].value(topic="t", partition="0") == 1
    assert found["tidemill_partitions_stopped"].value() == 0
    assert found["tidemill_inflight_bytes"].value() == 0
