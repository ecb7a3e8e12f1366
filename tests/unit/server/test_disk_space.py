"""A full disk: what is told of it, and what waits for room."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest

from support.batches import plain_batch
from tidemill.config.settings import Settings
from tidemill.config.values import Address
from tidemill.control import sqlite
from tidemill.control.commands import CreateTopic
from tidemill.control.store import Txn
from tidemill.errors import DiskFull, StorageError
from tidemill.log.storage import LocalStorage
from tidemill.replication.coordinator_log import wait_committed
from tidemill.server.disk_space import DiskSpace
from tidemill.server.node import Node


class Disk:
    """Whether there is room for the metadata and for the probe."""

    full = False


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    commit, fallocate = sqlite._SqliteEngine.commit, os.posix_fallocate

    def commit_if_room(engine: sqlite._SqliteEngine, txn: Txn) -> int:
        if disk.full:
            raise DiskFull("no room for metadata")
        return commit(engine, txn)

    def allocate_if_room(descriptor: int, offset: int, size: int) -> None:
        if disk.full:
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(descriptor, offset, size)

    monkeypatch.setattr(sqlite._SqliteEngine, "commit", commit_if_room)
    monkeypatch.setattr(os, "posix_fallocate", allocate_if_room)
    return disk


async def test_a_write_without_room_is_told_until_there_is_some(tmp_path: Path, disk: Disk) -> None:
    space = DiskSpace(tmp_path)
    assert space.problem() is None
    disk.full = True
    space.note(DiskFull("cannot write x"))
    await space.check()
    problem = space.problem()
    assert problem is not None
    assert problem.startswith("disk full: ")
    assert f"bytes are free at {tmp_path}; writes are refused until there is room" in problem
    disk.full = False
    await space.check()
    assert space.problem() is None
    assert os.listdir(tmp_path) == []


async def test_what_waits_for_room_is_done_before_writes_are_taken(tmp_path: Path, disk: Disk) -> None:
    space, done = DiskSpace(tmp_path), []

    async def work() -> None:
        done.append(space.is_full)
        if len(done) == 1:
            raise DiskFull("taken by somebody else")

    space.note(DiskFull("cannot write x"))
    space.when_room(work)
    await space.check()
    assert space.is_full
    await space.check()
    assert not space.is_full
    await space.check()
    assert done == [True, True]


def test_the_storage_tells_of_every_write_that_finds_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[DiskFull] = []
    storage = LocalStorage(tmp_path, told.append)
    file = storage.open("x", create=True)

    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", no_room)
    with pytest.raises(DiskFull):
        file.write(0, [b"a"])
    assert len(told) == 1


# --- a node


def node_on(path: Path) -> Node:
    return Node(Settings(data_dir=path, listen=Address("127.0.0.1", 0), http=None))


async def append(node: Node, value: str) -> None:
    partition = node.broker.partition(node.broker.topic("t"), 0)
    end = partition.append(plain_batch(value), node.broker.clock_ms()).last_offset + 1
    await wait_committed(partition, end)


@pytest.fixture
async def crashed(tmp_path: Path) -> AsyncIterator[Path]:
    """The files of a node with one record that was killed."""
    node = node_on(tmp_path / "data")
    await node.start()
    await node.broker.controller.submit(CreateTopic(name="t", topic_id=uuid4(), partitions=1, replication=1))
    await append(node, "a")
    # Files that are about to be renamed may be gone before they are copied.
    shutil.copytree(tmp_path / "data", tmp_path / "copy", ignore=shutil.ignore_patterns("*.tmp"))
    yield tmp_path / "copy"
    await node.stop()


async def test_after_a_crash_nothing_is_written_under_the_old_leader_epoch(crashed: Path, disk: Disk) -> None:
    disk.full = True
    node = node_on(crashed)
    await node.start()
    try:
        partition = node.broker.partition(node.broker.topic("t"), 0)
        assert partition.read(0, 1_000, at_least_one=True)
        assert node.problems()[0].startswith("disk full: ")
        # The logs have room; what is missing is the epoch.
        with pytest.raises(DiskFull):
            await append(node, "b")
        await node.disk.check()
        assert partition.leader_epoch == 0
        disk.full = False
        await node.disk.check()
        await append(node, "b")
        assert partition.leader_epoch == 1
        assert node.problems() == []
    finally:
        await node.stop()


async def test_a_new_node_does_not_start_without_room_for_its_metadata(tmp_path: Path, disk: Disk) -> None:
    disk.full = True
    with pytest.raises(DiskFull):
        await node_on(tmp_path / "new").start()


async def test_topics_that_were_deleted_to_make_room_keep_nobody_waiting(crashed: Path, disk: Disk) -> None:
    disk.full = True
    node = node_on(crashed)
    await node.start()
    try:
        disk.full = False
        await node.broker.delete_topic(node.broker.topic("t"))
        await node.disk.check()
        assert node.problems() == []
    finally:
        await node.stop()


async def test_nothing_is_written_under_the_old_epoch_whatever_keeps_the_new_one_from_being_noted(
    crashed: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.full = True
    node = node_on(crashed)
    await node.start()

    async def fail(commands: object) -> list[StorageError]:
        return [StorageError("the metadata cannot be written")] * 2

    try:
        disk.full = False
        with monkeypatch.context() as patch:
            patch.setattr(node.broker.controller, "submit_many", fail)
            await node.disk.check()
        with pytest.raises(DiskFull):
            await append(node, "b")
        await node.disk.check()
        await append(node, "b")
        assert node.broker.partition(node.broker.topic("t"), 0).leader_epoch == 1
    finally:
        await node.stop()


async def test_an_error_that_nobody_thought_of_does_not_end_the_watch(tmp_path: Path, disk: Disk) -> None:
    space, tries = DiskSpace(tmp_path), []

    async def work() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("a surprise")

    space.note(DiskFull("cannot write x"))
    space.when_room(work)
    await space.check()
    assert space.is_full
    await space.check()
    assert not space.is_full
