"""The disk that lies must lie as described, and no more."""

from __future__ import annotations

import random

import pytest

from support.faulty_storage import FaultyFile, FaultyStorage, PowerCut
from tidemill.errors import DiskFull, StorageError, SyncFailed

SEEDS = range(200)


def made(seed: int = 0) -> tuple[FaultyStorage, FaultyFile]:
    """A storage with a durable, empty file."""
    storage = FaultyStorage(random.Random(seed))
    storage.make_dir("d")
    file = storage.open("d/f", create=True)
    storage.sync_dir("")
    storage.sync_dir("d")
    return storage, file


def after_crash(storage: FaultyStorage, path: str = "d/f") -> bytes | None:
    survivor = storage.crash()
    return survivor.read_file(path) if survivor.exists(path) else None


def test_writes_are_visible_at_once_and_holes_read_as_zeros() -> None:
    storage, file = made()
    file.write(3, [b"ab", b"c"])
    assert file.read(0, 10) == b"\0\0\0abc"
    assert storage.read_file("d/f") == b"\0\0\0abc"
    file.truncate(4)
    assert (file.size(), file.read(2, 10)) == (4, b"\0a")


def test_what_was_synced_survives_every_crash() -> None:
    for seed in SEEDS:
        storage, file = made(seed)
        file.write(0, [b"synced"])
        file.sync()
        file.write(6, [b"not"])
        content = after_crash(storage)
        assert content is not None
        assert content.startswith(b"synced")


def test_unsynced_writes_are_kept_lost_torn_and_reordered() -> None:
    seen = set()
    for seed in SEEDS:
        storage, file = made(seed)
        file.write(0, [b"aa"])
        file.write(2, [b"bb"])
        seen.add(after_crash(storage))
    assert seen >= {b"", b"aa", b"aabb", b"\0\0bb", b"a"}


def test_large_writes_are_torn_in_sectors() -> None:
    torn = set()
    for seed in SEEDS:
        storage, file = made(seed)
        file.write(0, [b"x" * 2048])
        content = after_crash(storage) or b""
        torn.add(tuple(content[start : start + 1] for start in range(0, 2048, 512)))
    assert (b"\0", b"x", b"\0", b"x") in torn


def test_a_truncation_can_be_lost_while_a_later_write_is_kept() -> None:
    seen = set()
    for seed in SEEDS:
        storage, file = made(seed)
        file.write(0, [b"oldold"])
        file.sync()
        file.truncate(0)
        file.write(0, [b"new"])
        seen.add(after_crash(storage))
    assert seen >= {b"oldold", b"", b"new", b"newold"}


def test_names_need_their_directory_synced() -> None:
    outcomes = set()
    for seed in SEEDS:
        storage, _ = made(seed)
        storage.open("d/g", create=True).sync()
        storage.rename("d/f", "d/h")
        survivor = storage.crash()
        outcomes.add(tuple(survivor.list_dir("d")))
    assert outcomes == {("f",), ("f", "g"), ("h",), ("g", "h")}


def test_a_file_is_lost_with_its_directory() -> None:
    outcomes = set()
    for seed in SEEDS:
        storage = FaultyStorage(random.Random(seed))
        storage.make_dir("d")
        storage.open("d/f", create=True).sync()
        storage.sync_dir("d")
        outcomes.add(storage.crash().exists("d/f"))
    assert outcomes == {True, False}


def test_removal_can_be_undone_by_a_crash_until_the_directory_is_synced() -> None:
    outcomes = set()
    for seed in SEEDS:
        storage, _ = made(seed)
        storage.remove("d/f")
        outcomes.add(storage.crash().exists("d/f"))
    assert outcomes == {True, False}
    storage, _ = made()
    storage.remove("d/f")
    storage.sync_dir("d")
    assert not storage.crash().exists("d/f")


def test_a_kill_keeps_everything_visible_and_nothing_durable() -> None:
    lost = 0
    for seed in SEEDS:
        storage, file = made(seed)
        file.write(0, [b"data"])
        killed = storage.crash(power_loss=False)
        assert killed.read_file("d/f") == b"data"
        lost += after_crash(killed) != b"data"
    assert lost


def test_a_dead_storage_and_its_files_refuse_everything() -> None:
    storage, file = made()
    storage.crash()
    with pytest.raises(StorageError):
        file.read(0, 1)
    with pytest.raises(StorageError):
        storage.list_dir("d")


def test_after_a_failed_sync_reads_show_what_no_later_sync_makes_durable() -> None:
    contents = set()
    for seed in SEEDS:
        storage, file = made(seed)
        file.write(0, [b"data"])
        storage.fail_next("sync", "d/f")
        with pytest.raises(SyncFailed):
            file.sync()
        file.sync()
        assert file.read(0, 4) == b"data"
        contents.add(after_crash(storage))
    assert contents == {b"", b"data"}


def test_a_full_disk_takes_what_fits_and_says_so() -> None:
    storage, file = made()
    storage.capacity_bytes = 10
    file.write(0, [b"12345678"])
    with pytest.raises(DiskFull):
        file.write(8, [b"abcd"])
    assert file.read(0, 20) == b"12345678ab"
    file.truncate(8)
    storage.capacity_bytes = 12
    file.write(8, [b"abcd"])
    file.write(0, [b"overwriting needs no room"[:12]])


def test_a_planned_fault_hits_the_next_matching_call_only() -> None:
    storage, file = made()
    storage.fail_next("write", "other")
    storage.fail_next("read", "f", DiskFull("planned"))
    file.write(0, [b"x"])
    with pytest.raises(DiskFull, match="planned"):
        file.read(0, 1)
    assert file.read(0, 1) == b"x"


def test_something_can_be_run_in_the_middle_of_a_call() -> None:
    storage, file = made()
    storage.before_next("sync", "f", lambda: file.write(0, [b"raced"]))
    file.sync()
    assert after_crash(storage) == b"raced"


def test_the_power_goes_after_the_given_number_of_calls() -> None:
    storage, file = made()
    storage.cut_power_after(2)
    file.size()
    file.size()
    with pytest.raises(PowerCut):
        file.size()


def test_a_flipped_bit_is_seen_now_and_after_a_crash() -> None:
    storage, file = made()
    file.write(0, [b"\0\0"])
    file.sync()
    storage.flip_bit("d/f", 1, bit=3)
    assert file.read(0, 2) == b"\0\x08"
    assert after_crash(storage) == b"\0\x08"


def test_the_same_seed_gives_the_same_crash() -> None:
    def outcome(seed: int) -> bytes | None:
        storage, file = made(seed)
        file.write(0, [b"x" * 3000])
        file.write(3000, [b"y" * 3000])
        return after_crash(storage)

    assert [outcome(seed) for seed in range(20)] == [outcome(seed) for seed in range(20)]


def test_a_directory_is_renamed_with_what_is_in_it() -> None:
    storage, file = made()
    file.write(0, [b"x"])
    storage.rename("d", "e")
    assert storage.list_dir("") == ["e"]
    assert storage.read_file("e/f") == b"x"
    with pytest.raises(StorageError):
        storage.read_file("d/f")


def test_a_renamed_directory_is_under_one_of_its_names_after_a_crash_with_what_was_synced() -> None:
    seen = set()
    for seed in SEEDS:
        storage, file = made(seed)
        file.write(0, [b"synced"])
        file.sync()
        storage.open("d/not-synced", create=True)
        storage.rename("d", "e")
        storage.open("e/later", create=True)
        left = storage.crash()
        (name,) = left.list_dir("")
        assert left.read_file(f"{name}/f") == b"synced"
        seen.add((name, *left.list_dir(name)))
    assert {("d", "f"), ("e", "f"), ("e", "f", "later"), ("e", "f", "not-synced")} <= seen


def test_a_file_with_two_names_is_one_file() -> None:
    storage, file = made()
    storage.link("d/f", "d/g")
    file.write(0, [b"abc"])
    assert storage.read_file("d/g") == b"abc"
    assert storage.used_bytes == 3
    file.sync()
    storage.sync_dir("d")
    left = storage.crash()
    assert left.file_number("d/f") == left.file_number("d/g")
    left.remove("d/f")
    assert left.read_file("d/g") == b"abc"
