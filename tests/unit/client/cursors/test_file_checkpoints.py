"""Checkpoints in files: whole after a kill at any step, refused when damaged, owned by one process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tidemill.client.async_client import connect_async
from tidemill.client.cursors.checkpoints import file as file_checkpoints
from tidemill.client.cursors.checkpoints.file import write_checkpoint
from tidemill.cursors.errors import (
    CheckpointAheadOfLog,
    CheckpointCorrupt,
    CheckpointRegionMismatch,
    CheckpointWriteFailed,
    CursorInUse,
)
from tidemill.cursors.position import Position

World = Any
STEPS = ("handled", "temp", "fsync", "rename", "directory fsync")


def offsets(records: list[Any]) -> list[int]:
    return [each.offset for each in records]


def test_a_cursor_goes_on_where_its_file_says(world: World, name: str, tmp_path: Path) -> None:
    topic, path = world.topic(), tmp_path / "billing.cursor"
    world.send(topic, range(10))
    with world.db.cursor(name, topic, checkpoint=path) as cursor:
        cursor.poll_batch(4)
        cursor.commit()
        cursor.poll_batch(3)
    with world.db.cursor(name, topic, checkpoint=str(path)) as cursor:
        assert cursor.positions == {0: Position(4, 0, started=True)}
        assert offsets(cursor.poll_batch(99)) == [4, 5, 6, 7, 8, 9]


def test_every_flipped_byte_of_the_file_is_refused(world: World, name: str, tmp_path: Path) -> None:
    topic, path = world.topic(), tmp_path / "c"
    world.send(topic, range(3))
    with world.db.cursor(name, topic, checkpoint=path) as cursor:
        cursor.poll_batch(2)
        cursor.commit()
    whole = path.read_bytes()
    for at in range(len(whole)):
        broken = bytearray(whole)
        broken[at] ^= 0x5A
        path.write_bytes(broken)
        with pytest.raises(CheckpointCorrupt, match=str(path)):
            world.db.cursor(name, topic, checkpoint=path)
        assert path.read_bytes() == broken
    for size in (0, 1, 13, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointCorrupt):
            world.db.cursor(name, topic, checkpoint=path)
    path.write_bytes(whole)
    with world.db.cursor(name, topic, checkpoint=path) as cursor:
        assert cursor.positions[0].offset == 2


def test_a_file_that_cannot_be_read_is_told_with_what_was_expected(
    world: World, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "a directory"
    path.mkdir()
    with pytest.raises(CheckpointCorrupt, match=r"stored: something that.*expected: a file of a checkpoint"):
        world.db.cursor(name, world.topic(), checkpoint=path)


def test_another_region_or_name_is_refused(world: World, name: str, tmp_path: Path) -> None:
    topic, path = world.topic(), tmp_path / "c"
    world.db.cursor(name, topic, checkpoint=path).close()
    with pytest.raises(CheckpointRegionMismatch, match="headers"):
        world.db.cursor(name, topic, headers={"a": "b"}, checkpoint=path)
    with pytest.raises(CheckpointRegionMismatch, match="another cursor"):
        world.db.cursor("somebody", topic, checkpoint=path)


def test_a_position_ahead_of_the_log_is_refused(world: World, name: str, tmp_path: Path) -> None:
    topic, path = world.topic(), tmp_path / "c"
    world.send(topic, range(3))
    with world.db.cursor(name, topic, checkpoint=path) as cursor:
        cursor.poll_batch(3)
        # As if the log had lost its end in a power failure.
        cursor._awaited._machine.seek(0, Position(7, -1, started=True))
        cursor.commit()
    with pytest.raises(CheckpointAheadOfLog, match=r"offset 7.*at most offset 3"):
        world.db.cursor(name, topic, checkpoint=path)


def test_one_process_at_a_time_owns_a_file(world: World, name: str, tmp_path: Path) -> None:
    topic, path = world.topic(), tmp_path / "c"
    with (
        world.db.cursor(name, topic, checkpoint=path),
        pytest.raises(CursorInUse, match=f"process {os.getpid()}"),
    ):
        world.db.cursor(name, topic, checkpoint=path)
    world.db.cursor(name, topic, checkpoint=path).close()


def test_a_file_that_cannot_be_written_fails_the_commit_and_keeps_the_position(
    world: World, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, path = world.topic(), tmp_path / "c"
    world.send(topic, range(5))
    with world.db.cursor(name, topic, checkpoint=path) as cursor:
        cursor.poll_batch(2)
        cursor.commit()
        cursor.poll_batch(2)

        def full(file: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(CheckpointWriteFailed, match="No space left"):
                cursor.commit()
        assert cursor.committed[0].offset == 2
        cursor.rollback()
        assert offsets(cursor.poll_batch(9)) == [2, 3, 4]
        cursor.commit()
    with pytest.raises(CheckpointWriteFailed, match="cannot be opened"):
        world.db.cursor(name, topic, checkpoint=tmp_path / "missing" / "c")


async def test_the_lock_is_kept_until_a_cancelled_commit_has_ended(
    world: World, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic, path = world.topic(), tmp_path / "c"
    world.send(topic, range(5))
    reached, go_on = threading.Event(), threading.Event()

    def write_slowly(to: Path, data: bytes) -> None:
        reached.set()
        go_on.wait(120)
        write_checkpoint(to, data)

    async with await connect_async(world.db.bootstrap_servers) as db:
        cursor = await db.cursor(name, topic, checkpoint=path)
        store: Any = cursor.store
        await cursor.poll_batch(3)
        monkeypatch.setattr(file_checkpoints, "write_checkpoint", write_slowly)
        commit = asyncio.ensure_future(cursor.commit())
        await asyncio.to_thread(reached.wait, 120)
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        closing = asyncio.ensure_future(store.close())
        await asyncio.sleep(0)
        try:
            with pytest.raises(CursorInUse):
                await db.cursor(name, topic, checkpoint=path)
        finally:
            go_on.set()
        await closing
        await cursor.close()
        # What was under way is stored: once the lock is free nobody changes it behind the next owner's back.
        again = await db.cursor(name, topic, checkpoint=path)
        assert again.committed == {0: Position(3, 0, started=True)}
        await again.close()


_WORKER = """
import os, pathlib, signal, stat, sys
import tidemill

servers, topic, path, effects, step, batch = sys.argv[1:]
batches = 0
with tidemill.connect(servers) as db, db.cursor("killed", topic, checkpoint=path) as cursor:
    open_file, sync, rename = os.open, os.fsync, pathlib.Path.rename

    def reached(now):
        if batches == int(batch) and now == step:
            os.kill(os.getpid(), signal.SIGKILL)

    def open_or_die(path, *rest, **named):
        if str(path).endswith(".new"):
            reached("handled")
        return open_file(path, *rest, **named)

    def sync_or_die(file):
        is_directory = stat.S_ISDIR(os.fstat(file).st_mode)
        if not is_directory:
            reached("temp")
        sync(file)
        reached("directory fsync" if is_directory else "fsync")

    def rename_or_die(path, target):
        rename(path, target)
        reached("rename")

    os.open, os.fsync, pathlib.Path.rename = open_or_die, sync_or_die, rename_or_die
    while found := cursor.poll_batch(5, timeout_ms=200):
        batches += 1
        with open(effects, "a") as file:
            file.write("".join(f"{each.offset}\\n" for each in found))
        cursor.commit()
"""


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_at_any_step_loses_nothing_and_repeats_at_most_one_batch(
    world: World, tmp_path: Path, step: str
) -> None:
    topic = world.topic()
    world.send(topic, range(20))
    path, effects = tmp_path / "c", tmp_path / "effects"

    def run(batch: int) -> int:
        command = [
            sys.executable,
            "-c",
            _WORKER,
            world.db.bootstrap_servers,
            topic,
            str(path),
            str(effects),
            step,
        ]
        return subprocess.run([*command, str(batch)], check=False, timeout=120).returncode

    assert run(2) == -9
    before = [int(line) for line in effects.read_text().split()]
    assert before == list(range(10))
    assert run(0) == 0
    after = [int(line) for line in effects.read_text().split()][10:]
    # The second batch was written before the kill: it comes again unless its checkpoint took its place.
    again = range(5, 10) if step in ("handled", "temp", "fsync") else range(0)
    assert after == [*again, *range(10, 20)]
