"""RocksDB's texts become Tidemill's errors; mistakes of our own code stay what they are."""

from __future__ import annotations

import errno

import pytest
from rocksdict import DbClosedError

from tidemill.errors import CorruptData, DiskFull, StorageError, SyncFailed
from tidemill.kv.contract import WriteStalled
from tidemill.kv.rocks.faults import RocksTranslated, translate


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "IO error: No space left on device: While appending to file: /d/000012.sst",
            DiskFull,
        ),
        ("IO error: Disk quota exceeded", DiskFull),
        (
            "Corruption: block checksum mismatch: stored = 1 in /d/000008.sst offset 4 size 9",
            CorruptData,
        ),
        ("Corruption: CURRENT file does not end with newline", CorruptData),
        ("IO error: No such file or directory: While opening: /d/MANIFEST-000005: No such file", CorruptData),
        ("bad block type", CorruptData),
        ("IO error: lock hold by current process, acquire time 1: /d/LOCK: No locks available", StorageError),
        ("IO error: Input/output error: While fdatasync", StorageError),
        ("Invalid argument: something", StorageError),
    ],
)
def test_the_text_decides(text: str, kind: type[StorageError]) -> None:
    error = translate(Exception(text), "read", "/d")
    assert type(error) is kind
    assert "cannot read /d" in str(error)
    assert text in str(error)


def test_a_place_in_the_text_is_the_place_of_the_error() -> None:
    error = translate(
        Exception("Corruption: mismatch in /d/live/000008.sst offset 4095 size 9"), "read", "/d/live"
    )
    assert isinstance(error, CorruptData)
    assert (error.path, error.position) == ("/d/live/000008.sst", 4095)
    error = translate(
        Exception("Corruption: x\n  The file /d/live/MANIFEST-000005 may be corrupted."), "open", "/d"
    )
    assert isinstance(error, CorruptData)
    assert (error.path, error.position) == ("/d/live/MANIFEST-000005", 0)
    assert "\n" not in str(error)
    error = translate(Exception("Corruption: x"), "open", "/d")
    assert isinstance(error, CorruptData)
    assert (error.path, error.position) == ("/d", 0)


def test_errors_of_the_operating_system() -> None:
    assert type(translate(OSError(errno.ENOSPC, "No space left"), "write", "/d")) is DiskFull
    assert type(translate(OSError(errno.ENOSPC, "No space left"), "sync", "/d")) is DiskFull
    assert type(translate(OSError(errno.EIO, "Input/output error"), "sync", "/d")) is SyncFailed
    assert type(translate(OSError(errno.EACCES, "Permission denied"), "write", "/d")) is StorageError


def test_a_closed_database_is_said_to_be_closed() -> None:
    assert "closed" in str(translate(DbClosedError("DB instance already closed"), "read", "/d"))


def test_other_errors_pass_unchanged() -> None:
    for error in (
        ValueError("raw mode only support bytes"),
        KeyError("k"),
        AssertionError("a"),
        StorageError("s"),
    ):
        with pytest.raises(type(error)) as caught, RocksTranslated("read", "/d"):
            raise error
        assert caught.value is error


def test_the_cause_is_kept() -> None:
    cause = Exception("Corruption: x")
    with pytest.raises(CorruptData) as caught, RocksTranslated("read", "/d"):
        raise cause
    assert caught.value.__cause__ is cause


def test_a_stall_is_told_from_other_errors() -> None:
    found = translate(Exception("Result incomplete: Write stall"), "write to", "/d")
    assert isinstance(found, WriteStalled)
    assert "/d" in found.message
    assert "disk is too slow" in found.message
    assert not isinstance(translate(Exception("Corruption: x"), "write to", "/d"), WriteStalled)
