"""Input that can be left at any time, and work that runs ahead."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from tidemill.cli.tables.byte_input import Input, run_ahead


def test_input_counts_what_it_gives(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    with Input(path) as file:
        assert (file.size, file.read(4), file.bytes_read) == (6, b"abcd", 4)
        assert (file.read(4), file.read(4), file.bytes_read) == (b"ef", b"", 6)


def test_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Input(tmp_path / "none")


def test_thread_that_waits_for_a_pipe_is_let_go(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    # Open for writing too, else opening it would wait.
    held = os.open(path, os.O_RDWR)
    with Input(path) as file:
        assert file.size is None
        read: list[bytes] = []
        thread = threading.Thread(target=lambda: read.append(file.read(10) or b""))
        thread.start()
        file.stop()
        thread.join(120)
        assert read == [b""]
        os.write(held, b"late")
        assert file.read(10) == b""
    file.stop()
    os.close(held)


async def test_items_come_in_order_and_only_a_few_are_made_ahead() -> None:
    made = 0

    def make() -> Iterator[int]:
        nonlocal made
        for number in range(20):
            made += 1
            yield number

    seen = []
    async with aclosing(run_ahead(make(), lambda: None)) as items:
        async for item in items:
            await asyncio.sleep(0)
            # Two are waiting, and one waits for room.
            assert made <= item + 4
            seen.append(item)
    assert seen == list(range(20))


async def test_error_comes_behind_the_items_before_it() -> None:
    def make() -> Iterator[int]:
        yield 1
        raise LookupError

    items = run_ahead(make(), lambda: None)
    assert await anext(items) == 1
    with pytest.raises(LookupError):
        await anext(items)


async def test_leaving_early_stops_the_work_and_ends_its_thread() -> None:
    stopped = threading.Event()

    def make() -> Iterator[int]:
        yield 1
        assert stopped.wait(120)
        yield 2

    async with aclosing(run_ahead(make(), stopped.set)) as items:
        assert await anext(items) == 1
    assert stopped.is_set()
    assert "tidemill-input" not in [thread.name for thread in threading.enumerate()]
