from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tidemill.errors import CorruptData, DataDirectoryInUse, StorageError
from tidemill.server.disk.data_directory import DataDirectory


@pytest.fixture
def held(tmp_path: Path) -> Iterator[DataDirectory]:
    directory = DataDirectory(tmp_path / "data")
    directory.acquire()
    yield directory
    directory.release()


def used(directory: DataDirectory) -> None:
    directory.metadata_path.touch()


def test_a_second_owner_is_refused_and_told_of_the_first(held: DataDirectory) -> None:
    held.note_owner("127.0.0.1:9092")
    second = DataDirectory(held.path)
    with pytest.raises(DataDirectoryInUse) as caught:
        second.acquire()
    for part in (str(held.path), str(os.getpid()), socket.gethostname(), "127.0.0.1:9092", "--data"):
        assert part in str(caught.value)
    second.release()
    with pytest.raises(DataDirectoryInUse):
        second.acquire()


@pytest.mark.parametrize("note", [b"", b"not json", b"[]", b'{"pid": 1}'])
def test_an_owner_who_left_no_readable_note_is_still_respected(held: DataDirectory, note: bytes) -> None:
    (held.path / "lock").write_bytes(note)
    with pytest.raises(DataDirectoryInUse, match="another process"):
        DataDirectory(held.path).acquire()


def test_a_released_directory_can_be_taken(held: DataDirectory) -> None:
    held.release()
    held.release()
    second = DataDirectory(held.path)
    second.acquire()
    second.release()


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot use .*file/data"):
        DataDirectory(tmp_path / "file" / "data").acquire()


def test_a_new_directory_counts_as_cleanly_stopped(held: DataDirectory) -> None:
    assert held.stopped_cleanly


def test_only_an_orderly_stop_is_remembered_and_only_once(held: DataDirectory) -> None:
    used(held)
    held.note_clean_stop()
    held.release()
    states = []
    for _ in range(2):
        held.acquire()
        states.append(held.stopped_cleanly)
        held.release()
    assert states == [True, False], "the second owner did not say goodbye"


def test_logs_without_metadata_are_refused(held: DataDirectory) -> None:
    held.check_metadata_present()
    (held.path / "logs").mkdir()
    held.check_metadata_present()
    (held.path / "logs" / "orders").mkdir()
    with pytest.raises(CorruptData, match=r"metadata\.db"):
        held.check_metadata_present()
    used(held)
    held.check_metadata_present()


def test_logs_whose_metadata_was_lost_do_not_count_as_cleanly_stopped(held: DataDirectory) -> None:
    (held.path / "logs" / "orders").mkdir(parents=True)
    held.release()
    held.acquire()
    assert not held.stopped_cleanly
