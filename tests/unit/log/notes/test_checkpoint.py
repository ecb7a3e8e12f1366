"""Whatever a crash leaves of the slots, a checkpoint that was saved is never lost."""

from __future__ import annotations

import random
import struct

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from support.faulty_storage import FaultyStorage, PowerCut
from tidemill.errors import CorruptData, SyncFailed
from tidemill.log.notes.checkpoint import CHECKPOINT_NAME, Checkpoint, CheckpointFile, damaged_slots

PATH = f"t/{CHECKPOINT_NAME}"


def storage_with_dir(seed: int = 0) -> FaultyStorage:
    storage = FaultyStorage(random.Random(seed))
    storage.make_dir("t")
    storage.sync_dir("")
    return storage


def load(storage: FaultyStorage) -> Checkpoint:
    return CheckpointFile.load(storage, "t").current


def test_what_was_saved_is_loaded() -> None:
    storage = storage_with_dir()
    file = CheckpointFile.create(storage, "t", Checkpoint(3, 5))
    assert load(storage) == Checkpoint(3, 5)
    for number in range(5):
        file.save(Checkpoint(number, 10 + number, number == 4, 7, 99))
        assert load(storage) == file.current
    assert load(storage) == Checkpoint(4, 14, True, 7, 99)


def test_a_hint_moves_only_the_recovery_point_and_takes_the_clean_mark_away() -> None:
    storage = storage_with_dir()
    file = CheckpointFile.create(storage, "t", Checkpoint(3, 5, True, 3, 100))
    file.hint(9)
    assert load(storage) == Checkpoint(3, 9, False, 3, 100)
    file.save(Checkpoint(4, 12))
    assert load(storage) == Checkpoint(4, 12)


def test_a_hint_older_than_the_last_save_is_not_believed() -> None:
    storage = storage_with_dir()
    file = CheckpointFile.create(storage, "t", Checkpoint())
    file.hint(9)
    file.save(Checkpoint(0, 7))
    assert load(storage).recovery_point == 7


def test_log_start_and_recovery_point_move_independently() -> None:
    file = CheckpointFile.create(storage_with_dir(), "t", Checkpoint())
    file.save_recovery_point(10)
    file.save_log_start(4)
    assert file.current == Checkpoint(4, 10)
    file.save_recovery_point(12)
    assert file.current == Checkpoint(4, 12)
    file.save_log_start(20)
    assert file.current == Checkpoint(20, 20)


# --- the high watermark


def test_the_high_watermark_goes_with_whatever_is_written_next() -> None:
    storage = storage_with_dir()
    file = CheckpointFile.create(storage, "t", Checkpoint(0, 5))
    assert load(storage).high_watermark is None
    file.high_watermark = 4
    assert load(storage).high_watermark is None, "it costs no write of its own"
    file.hint(6)
    assert load(storage) == Checkpoint(0, 6, high_watermark=4)
    file.high_watermark = 6
    file.save_log_start(2)
    assert load(storage) == Checkpoint(2, 6, high_watermark=6)
    again = CheckpointFile.load(storage, "t")
    again.hint(7)
    assert load(storage).high_watermark == 6, "the next process keeps it until it knows better"


@pytest.mark.parametrize("slot", [0, 2])
def test_an_older_release_and_this_one_read_each_others_slots(slot: int) -> None:
    """The first part is byte for byte what the first release wrote, and is enough."""
    storage = storage_with_dir()
    file = CheckpointFile.create(storage, "t", Checkpoint(1, 2, high_watermark=2))
    file.hint(9)
    first_part = storage.read_file(PATH)[slot * 4096 :][:49]
    magic, sequence, start, point, *_ = struct.unpack(">4sQqqBqq", first_part[:-4])
    expected = (b"TMC1", 1, 1, 2) if slot == 0 else (b"TMC1", 2, 1, 9)
    assert (magic, sequence, start, point) == expected
    assert struct.unpack(">I", first_part[-4:])[0] == crc32c(first_part[:-4])
    # The older release goes on with the file: it writes the next hint and leaves what follows it in place.
    body = struct.pack(">4sQqqBqq", b"TMC1", 3, 1, 12, 0, 0, 0)
    storage.open(PATH).write(2 * 4096, [body + struct.pack(">I", crc32c(body))])
    assert load(storage) == Checkpoint(1, 12, high_watermark=2), "the hint's own one belongs to another hint"


def test_a_file_of_the_first_release_has_no_high_watermark() -> None:
    storage = storage_with_dir()
    body = struct.pack(">4sQqqBqq", b"TMC1", 1, 3, 7, 1, 0, 99)
    slot = body + struct.pack(">I", crc32c(body))
    storage.open(PATH, create=True).write(0, [slot.ljust(2 * 4096 + 49, b"\0")])
    assert load(storage) == Checkpoint(3, 7, True, 0, 99)
    file = CheckpointFile.load(storage, "t")
    file.high_watermark = 7
    file.hint(8)
    assert load(storage) == Checkpoint(3, 8, False, 0, 99, high_watermark=7)


@given(st.integers(49, 60), st.integers(0, 7))
def test_a_flipped_bit_in_the_high_watermark_costs_only_the_high_watermark(position: int, bit: int) -> None:
    storage = storage_with_dir()
    CheckpointFile.create(storage, "t", Checkpoint(0, 1, high_watermark=1))
    storage.flip_bit(PATH, position, bit)
    assert load(storage) == Checkpoint(0, 1)


@pytest.mark.parametrize("seed", range(300))
def test_after_any_crash_the_last_finished_save_or_a_later_write_is_found(seed: int) -> None:
    rng = random.Random(seed)
    storage = storage_with_dir(seed)
    file = CheckpointFile.create(storage, "t", Checkpoint(0, 0))
    saved, written = 0, {0}
    for _ in range(rng.randrange(1, 4)):
        storage.cut_power_after(rng.randrange(12))
        point, power_loss = file.current.recovery_point, rng.random() < 0.8
        try:
            while True:
                point += 1
                written.add(point)
                if rng.random() < 0.5:
                    file.save_recovery_point(point)
                    saved = point
                else:
                    file.hint(point)
        except PowerCut:
            storage = storage.crash(power_loss=power_loss)
        file = CheckpointFile.load(storage, "t")
        assert saved <= file.current.recovery_point
        assert file.current.recovery_point in written
        if power_loss:
            # What is found after that is on the platter; after a mere kill a hint may still be lost.
            saved = file.current.recovery_point


@pytest.mark.parametrize("calls", range(12))
@pytest.mark.parametrize("power_loss", [True, False])
def test_creation_leaves_a_whole_file_or_none(calls: int, power_loss: bool) -> None:
    for seed in range(10):
        storage = storage_with_dir(seed)
        storage.cut_power_after(calls)
        try:
            CheckpointFile.create(storage, "t", Checkpoint(1, 2))
        except PowerCut:
            created = False
        else:
            created = True
        storage = storage.crash(power_loss=power_loss)
        assert storage.exists(PATH) or not created
        if storage.exists(PATH):
            assert load(storage) == Checkpoint(1, 2)


def test_a_failed_sync_does_not_count_as_saved() -> None:
    storage = storage_with_dir()
    file = CheckpointFile.create(storage, "t", Checkpoint(1, 2))
    storage.fail_next("sync", CHECKPOINT_NAME)
    with pytest.raises(SyncFailed):
        file.save(Checkpoint(1, 50))
    assert file.current == Checkpoint(1, 2)


@given(st.integers(0, 52), st.integers(0, 7))
def test_a_flipped_bit_in_the_newest_slot_falls_back_to_the_other(position: int, bit: int) -> None:
    storage = storage_with_dir()
    file = CheckpointFile.create(storage, "t", Checkpoint(0, 1))
    file.save(Checkpoint(0, 2))
    storage.flip_bit(PATH, 4096 + position % 49, bit)
    assert load(storage) == Checkpoint(0, 1)
    assert damaged_slots(storage.open(PATH)) == [4096]


def test_without_a_whole_slot_it_is_corrupt_data_even_if_a_hint_is_whole() -> None:
    storage = storage_with_dir()
    file = CheckpointFile.create(storage, "t", Checkpoint(0, 1))
    file.save(Checkpoint(0, 2))
    file.hint(3)
    for slot in range(2):
        storage.flip_bit(PATH, slot * 4096 + 5)
    with pytest.raises(CorruptData) as caught:
        load(storage)
    assert caught.value.path == PATH


def test_after_a_failed_sync_beside_it_no_flush_moves_the_recovery_point() -> None:
    storage = storage_with_dir()
    checkpoint = CheckpointFile.create(storage, "t", Checkpoint(1, 2))
    data = storage.open("t/data", create=True)
    checkpoint.sync_beside_flushes(data)
    checkpoint.hint(3)
    storage.fail_next("sync", "data")
    with pytest.raises(SyncFailed):
        checkpoint.sync_beside_flushes(data)
    for advance in (checkpoint.hint, checkpoint.save_recovery_point):
        with pytest.raises(SyncFailed, match="restart the node"):
            advance(50)
    assert load(storage) == checkpoint.current == Checkpoint(1, 3)
