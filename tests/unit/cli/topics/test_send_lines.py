"""Lines from files and pipes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidemill.cli.topics.send_lines import read_lines


async def lines_of(data: bytes, tmp_path: Path) -> list[bytes]:
    path = tmp_path / "input"
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return [line async for lines in read_lines(descriptor) for line in lines]
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\nb", [b"a", b"b"]),
        (b"\n\n", [b"", b""]),
        (b"x" * 700_000 + b"\ny", [b"x" * 700_000, b"y"]),
    ],
)
async def test_lines_come_without_their_ends(data: bytes, lines: list[bytes], tmp_path: Path) -> None:
    assert await lines_of(data, tmp_path) == lines


async def test_lines_of_a_pipe_come_before_it_is_closed() -> None:
    reading, writing = os.pipe()
    os.write(writing, b"first\nsec")
    source = read_lines(reading)
    assert await anext(source) == [b"first"]
    os.write(writing, b"ond\n")
    assert await anext(source) == [b"second"]
    os.close(writing)
    assert [lines async for lines in source] == []
    os.close(reading)


async def test_source_that_cannot_be_read_is_reported(tmp_path: Path) -> None:
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        with pytest.raises(IsADirectoryError):
            await anext(read_lines(descriptor))
    finally:
        os.close(descriptor)
