"""The real disk keeps the same contract as the protocol says; the errors are ours."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from support.faulty_storage import FaultyStorage
from tidemill.errors import DiskFull, StorageError, SyncFailed, TooManyFiles
from tidemill.log.storage import LocalStorage, Storage, write_atomic


@pytest.fixture(params=["real", "faulty"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return LocalStorage(tmp_path) if request.param == "real" else FaultyStorage()


def test_a_file_is_written_and_read_at_positions(storage: Storage) -> None:
    storage.make_dir("a/b")
    file = storage.open("a/b/f", create=True)
    file.write(0, [b"hello", memoryview(b" "), bytearray(b"world")])
    file.write(20, [b"!"])
    file.sync()
    assert file.size() == 21
    assert file.read(0, 11) == b"hello world"
    assert file.read(11, 100) == bytes(9) + b"!"
    assert file.read(50, 10) == b""
    file.truncate(5)
    assert storage.read_file("a/b/f") == b"hello"
    file.close()
    file.close()


def test_opening_again_does_not_empty_a_file(storage: Storage) -> None:
    storage.make_dir("d")
    storage.open("d/f", create=True).write(0, [b"kept"])
    assert storage.open("d/f", create=True).read(0, 4) == b"kept"


def test_names_are_listed_renamed_and_removed(storage: Storage) -> None:
    assert storage.list_dir("nowhere") == []
    storage.make_dir("d")
    storage.make_dir("d")
    for name in ("b", "a"):
        storage.open(f"d/{name}", create=True).close()
    assert storage.list_dir("d") == ["a", "b"]
    storage.rename("d/a", "d/c")
    storage.remove("d/b")
    storage.sync_dir("d")
    assert (storage.list_dir("d"), storage.exists("d/c"), storage.exists("d/b")) == (["c"], True, False)
    storage.remove_tree("d")
    storage.remove_tree("d")
    assert not storage.exists("d")


def test_a_missing_file_is_a_storage_error_that_names_it(storage: Storage) -> None:
    for call in (storage.open, storage.read_file, storage.remove):
        with pytest.raises(StorageError, match="missing"):
            call("missing")


def test_atomic_writing_replaces_the_whole_content(storage: Storage) -> None:
    storage.make_dir("d")
    write_atomic(storage, "d/f", b"a long first content")
    write_atomic(storage, "d/f", b"short")
    assert storage.read_file("d/f") == b"short"
    assert storage.list_dir("d") == ["f"]


def test_more_buffers_than_one_system_call_takes(tmp_path: Path) -> None:
    file = LocalStorage(tmp_path).open("f", create=True)
    file.write(3, [b"%04d" % number for number in range(2000)])
    assert file.read(3, 8000) == b"".join(b"%04d" % number for number in range(2000))


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LocalStorage(tmp_path).open("f", create=True)

    def short(descriptor: int, buffers: list[bytes], position: int) -> int:
        return os.pwrite(descriptor, b"".join(buffers)[:3], position)

    monkeypatch.setattr(os, "pwritev", short)
    file.write(2, [b"abc", b"defg"])
    assert file.read(0, 10) == b"\0\0abcdefg"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_is_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    file = LocalStorage(tmp_path).open("f", create=True)

    def full(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(DiskFull, match="f: "):
        file.write(0, [b"x"])


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_a_file_that_cannot_be_opened_now_is_no_failed_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    storage = LocalStorage(tmp_path)

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "open", refuse)
    for attempt in (lambda: storage.open("f", create=True), lambda: storage.sync_dir("")):
        with pytest.raises(TooManyFiles, match="raise the limit of open files"):
            attempt()


def test_a_directory_that_is_gone_cannot_be_synced(tmp_path: Path) -> None:
    with pytest.raises(SyncFailed):
        LocalStorage(tmp_path).sync_dir("gone")


def test_a_failed_fsync_is_sync_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = LocalStorage(tmp_path)
    file = storage.open("f", create=True)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", broken)
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(SyncFailed, match="f failed"):
        file.sync()
    with pytest.raises(SyncFailed):
        storage.sync_dir("")
