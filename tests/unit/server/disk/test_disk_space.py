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
from tidemill.control.commands import CreateTopic
from tidemill.control.stores import sqlite
from tidemill.control.stores.store import Txn
from tidemill.errors import DiskFull, StorageError
from tidemill.log.storage import LocalStorage
from tidemill.replication.coordinator_log import wait_committed
from tidemill.server.disk.reserve import RESERVE_NAME, ReserveFile
from tidemill.server.disk.space import DiskSpace
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
    space.when_space(work)
    full = []
    for _ in range(3):
        await space.check()
        full.append(space.is_full)
    assert full == [True, False, False]
    assert done == [True, True]


# --- the reserve


class FakeReserve:
    """A reserve in memory; ``room`` says whether it can be made."""

    wanted_bytes = 1_000

    def __init__(self, held: int = 1_000) -> None:
        self.held = held
        self.room = True

    def held_bytes(self) -> int:
        return self.held

    def make(self) -> None:
        if not self.room:
            raise DiskFull("no room for the reserve")
        self.held = self.wanted_bytes

    def release(self) -> int:
        freed, self.held = self.held, 0
        return freed


class Story:
    """A disk space with a reserve, and what it has told of growth: True for refused."""

    def __init__(self, path: Path, held: int = 1_000) -> None:
        self.reserve = FakeReserve(held)
        self.space = DiskSpace(path, self.reserve)
        self.refused: list[bool] = []
        self.space.on_growth_refused = lambda refusal: self.refused.append(refusal is not None)


async def test_a_write_that_finds_no_room_leaves_the_reserve_alone(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.space.note(DiskFull("an append"))
    assert story.reserve.held == 1_000
    assert story.space.growth_refusal is None
    await story.space.check()
    assert not story.space.is_full
    assert story.refused == []


async def test_growth_is_refused_before_the_reserve_is_given_up_and_until_it_is_made_again(
    tmp_path: Path,
) -> None:
    story = Story(tmp_path)
    held_when_refused = []
    story.space.on_growth_refused = lambda refusal: held_when_refused.append(story.reserve.held)
    assert story.space.give_up_reserve(DiskFull("a deletion"))
    assert held_when_refused == [1_000]
    refusal = story.space.growth_refusal
    assert isinstance(refusal, DiskFull)
    problem = story.space.problem()
    assert problem is not None
    assert f"{1_000 + 1024 * 1024} bytes must be free to go on" in problem
    assert not story.space.give_up_reserve(DiskFull("another deletion")), "there is nothing left to give up"
    story.reserve.room = False
    await story.space.check()
    refused_without_room = story.space.growth_refusal is not None
    story.reserve.room = True
    await story.space.check()
    assert held_when_refused == [1_000, 1_000], "writes are taken again only beside a whole reserve"
    assert (refused_without_room, story.space.growth_refusal) == (True, None)
    assert not story.space.is_full


async def test_the_reserve_is_not_tried_out_while_less_than_it_needs_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = Story(tmp_path)
    story.space.give_up_reserve(DiskFull("a read"))
    monkeypatch.setattr(story.space, "free_bytes", lambda: 1_000)
    await story.space.check()
    assert story.reserve.held == 0
    assert story.space.growth_refusal is not None


async def test_a_start_without_a_reserve_and_without_room_for_one_refuses_growth(tmp_path: Path) -> None:
    story = Story(tmp_path, held=0)
    story.reserve.room = False
    await story.space.open_reserve()
    assert story.refused == [True]
    assert story.space.is_full
    story.reserve.room = True
    await story.space.check()
    assert story.refused == [True, False]


async def test_what_needs_the_reserve_before_writes_are_taken_keeps_them_refused(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.space.give_up_reserve(DiskFull("a read"))
    works: list[str] = []

    async def needs_it_again() -> None:
        works.append("before")
        story.space.give_up_reserve(DiskFull("the metadata of the start"))

    async def afterwards() -> None:
        assert not story.space.is_full
        works.append("after")

    story.space.when_space(needs_it_again)
    story.space.when_writable(afterwards)
    await story.space.check()
    assert works == ["before"]
    assert story.space.growth_refusal is not None
    await story.space.check()
    assert works == ["before", "after"]
    assert story.space.growth_refusal is None


def test_the_reserve_is_a_file_with_blocks_of_its_own(tmp_path: Path) -> None:
    reserve = ReserveFile(tmp_path, 300_000)
    reserve.make()
    file = tmp_path / RESERVE_NAME
    assert file.stat().st_size == 300_000
    assert file.stat().st_blocks * 512 >= 300_000, "not sparse"
    assert reserve.release() == 300_000
    assert os.listdir(tmp_path) == []
    assert reserve.release() == 0


def test_the_reserve_follows_its_setting(tmp_path: Path) -> None:
    ReserveFile(tmp_path, 300_000).make()
    ReserveFile(tmp_path, 100_000).make()
    assert (tmp_path / RESERVE_NAME).stat().st_size == 100_000
    ReserveFile(tmp_path, 0).make()
    assert os.listdir(tmp_path) == []
    disk_bytes = shutil.disk_usage(tmp_path).total
    assert ReserveFile(tmp_path, 2 * disk_bytes).wanted_bytes == disk_bytes // 16


def test_a_reserve_that_finds_no_room_leaves_nothing_behind(tmp_path: Path, disk: Disk) -> None:
    disk.full = True
    reserve = ReserveFile(tmp_path, 300_000)
    with pytest.raises(DiskFull):
        reserve.make()
    assert os.listdir(tmp_path) == []
    # A crash while it was made.
    (tmp_path / "disk-reserve.tmp").write_bytes(b"x")
    disk.full = False
    reserve.make()
    assert os.listdir(tmp_path) == [RESERVE_NAME]


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
    partition = node.broker.find.partition(node.broker.find.topic("t"), 0)
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
        partition = node.broker.find.partition(node.broker.find.topic("t"), 0)
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
        await node.broker.catalogue.delete_topic(node.broker.find.topic("t"))
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
        assert node.broker.find.partition(node.broker.find.topic("t"), 0).leader_epoch == 1
    finally:
        await node.stop()


async def test_an_error_that_nobody_thought_of_does_not_end_the_watch(tmp_path: Path, disk: Disk) -> None:
    space, tries = DiskSpace(tmp_path), []

    async def work() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("a surprise")

    space.note(DiskFull("cannot write x"))
    space.when_space(work)
    await space.check()
    assert space.is_full
    await space.check()
    assert not space.is_full
