"""The inventory of partitions: what it remembers, and what a crash or a full disk does to it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support.batches import make_batch
from support.faulty_storage import FaultyStorage, PowerCut
from tidemill.config.topic import TopicConfig
from tidemill.errors import DiskFull, StorageError, SyncFailed
from tidemill.log.log import PartitionLog
from tidemill.log.notes.checkpoint import CHECKPOINT_NAME
from tidemill.log.notes.inventory import INVENTORY_NAME, OFFSETS_AHEAD, Inventory
from tidemill.log.recovery import open_log
from tidemill.log.storage import LocalStorage

ORDERS, ITEMS = "logs/orders/aa-0", "logs/items/bb-0"
CONFIG = TopicConfig()


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage(random.Random(1))


def listed(storage: FaultyStorage | LocalStorage) -> list[str]:
    return sorted(Inventory(storage, read_only=True))


def opened(storage: FaultyStorage, directory: str = ORDERS) -> PartitionLog:
    return open_log(storage, directory, CONFIG, inventory=Inventory(storage))[0]


def append(log: PartitionLog, value: str = "v", *, flush: bool = True) -> None:
    data, header = make_batch(value)
    log.append(data, header, 0, 1_000)
    if flush:
        job = log.begin_flush()
        assert job is not None
        job.run()
        log.finish_flush(job)


def test_what_was_added_and_not_removed_is_read_back(storage: FaultyStorage) -> None:
    inventory = Inventory(storage)
    inventory.add([(ORDERS, 5), (ITEMS, 7), ("logs/orders/aa-1", 9)])
    inventory.add([(ITEMS, 70)])
    inventory.remove("logs/orders", "aa-0")
    again = Inventory(storage)
    assert sorted(again) == [ITEMS, "logs/orders/aa-1"]
    assert (again.listed_below(ITEMS), again.listed_below(ORDERS)) == (70, 0)
    assert ORDERS not in again


def test_a_torn_last_line_is_left_out_and_the_next_one_takes_its_place(storage: FaultyStorage) -> None:
    inventory = Inventory(storage)
    inventory.add([(ORDERS, 5)])
    inventory.add([(ITEMS, 7)])
    storage.open(INVENTORY_NAME).truncate(len(storage.read_file(INVENTORY_NAME)) - 3)
    again = Inventory(storage)
    assert list(again) == [ORDERS]
    again.add([(ITEMS, 8)])
    assert listed(storage) == [ITEMS, ORDERS]


def test_a_damaged_line_is_reported_and_costs_no_other(
    storage: FaultyStorage, caplog: pytest.LogCaptureFixture
) -> None:
    inventory = Inventory(storage)
    inventory.add([(ORDERS, 5)])
    inventory.add([(ITEMS, 7)])
    storage.flip_bit(INVENTORY_NAME, 12)
    assert list(Inventory(storage)) == [ITEMS]
    assert "1 lines do not check out, the first one at byte 0" in caplog.text
    assert listed(storage) == [ITEMS]


def test_a_file_of_stale_lines_is_written_anew(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    inventory = Inventory(storage)
    for bound in range(1, 1_200):
        inventory.add([(ORDERS, bound)])
    assert Inventory(storage).listed_below(ORDERS) == 1_199
    assert (tmp_path / INVENTORY_NAME).read_bytes().count(b"\n") == 1


def test_without_room_nothing_is_noted_and_the_next_attempt_works(storage: FaultyStorage) -> None:
    inventory = Inventory(storage)
    inventory.add([(ORDERS, 5)])
    storage.fail_next("write", INVENTORY_NAME, DiskFull("no room"))
    with pytest.raises(DiskFull):
        inventory.add([(ITEMS, 7)])
    assert ITEMS not in inventory
    inventory.add([(ITEMS, 8)])
    assert listed(storage) == [ITEMS, ORDERS]


def test_after_a_failed_sync_no_sync_succeeds(storage: FaultyStorage) -> None:
    inventory = Inventory(storage)
    inventory.add([(ORDERS, 5)])
    storage.fail_next("sync", INVENTORY_NAME)
    for _ in range(2):
        with pytest.raises(SyncFailed):
            inventory.sync()


def test_several_that_wait_share_one_sync(storage: FaultyStorage) -> None:
    inventory = Inventory(storage)
    inventory.add([(ORDERS, 5)])
    inventory.add([(ITEMS, 5)])
    for _ in range(3):
        inventory.sync()
    assert sum(call == ("sync", INVENTORY_NAME) for call in storage.calls) == 1


# --- with a log


def test_a_partition_is_listed_durably_before_its_first_record_is(storage: FaultyStorage) -> None:
    log = opened(storage)
    append(log)
    after = storage.crash(power_loss=True)
    assert listed(after) == [ORDERS]
    assert Inventory(after).listed_below(ORDERS) > OFFSETS_AHEAD
    assert opened(after).end_offset == 1


def test_what_a_killed_process_had_not_synced_is_synced_by_the_next(storage: FaultyStorage) -> None:
    append(opened(storage), flush=False)
    killed = storage.crash(power_loss=False)
    append(opened(killed))
    assert listed(killed.crash(power_loss=True)) == [ORDERS]


def test_a_log_that_outgrows_its_bound_moves_it_before_the_record_is_durable(storage: FaultyStorage) -> None:
    inventory = Inventory(storage)
    log, _ = open_log(storage, ORDERS, CONFIG, inventory=inventory)
    append(log)
    log._listed_below = 2
    append(log)
    append(log)
    assert Inventory(storage.crash(power_loss=True)).listed_below(ORDERS) >= 3 + OFFSETS_AHEAD


def test_an_append_that_cannot_be_listed_is_refused_and_the_next_one_works(storage: FaultyStorage) -> None:
    log = opened(storage)
    storage.fail_next("write", INVENTORY_NAME, DiskFull("no room"))
    with pytest.raises(DiskFull):
        append(log)
    assert log.end_offset == 0
    append(log)
    assert listed(storage.crash(power_loss=True)) == [ORDERS]


@pytest.mark.parametrize("gone", ["the directory", "its files"])
def test_a_listed_partition_without_files_is_not_an_empty_log(storage: FaultyStorage, gone: str) -> None:
    append(opened(storage))
    if gone == "the directory":
        storage.remove_tree(ORDERS)
    else:
        for name in storage.list_dir(ORDERS):
            storage.remove(f"{ORDERS}/{name}")
    with pytest.raises(StorageError, match=r"logs/orders/aa-0 are gone.*log repair orders:0 --accept-loss"):
        opened(storage)


@pytest.mark.parametrize("seed", range(60))
def test_no_crash_makes_an_unfinished_start_look_like_lost_files(seed: int) -> None:
    rng = random.Random(seed)
    storage = FaultyStorage(rng)
    storage.cut_power_after(rng.randrange(1, 40))
    try:
        for number in range(3):
            append(opened(storage, f"logs/t{number}/aa-0"), flush=rng.random() < 0.7)
    except PowerCut:
        pass
    after = storage.crash(power_loss=rng.random() < 0.7)
    for directory in listed(after):
        assert after.exists(f"{directory}/{CHECKPOINT_NAME}")
        opened(after, directory)


def test_a_list_that_cannot_be_read_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / INVENTORY_NAME).mkdir()
    with pytest.raises(StorageError, match="restore it from a backup, or move it away"):
        Inventory(LocalStorage(tmp_path))


def test_a_list_full_of_garbage_is_one_line_in_the_log(
    storage: FaultyStorage, caplog: pytest.LogCaptureFixture
) -> None:
    storage.open(INVENTORY_NAME, create=True).write(0, [b"garbage\n" * 1_000])
    assert list(Inventory(storage)) == []
    assert len(caplog.records) == 1
