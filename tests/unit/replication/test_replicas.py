"""All partitions of a node, over a disk in memory."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from support.batches import plain_batch
from support.faulty_storage import FaultyStorage, PowerCut
from tidemill.config.topic import TopicConfig
from tidemill.errors import (
    CorruptData,
    DiskFull,
    ErrorCode,
    StorageError,
    SyncFailed,
    TidemillError,
    TooManyFiles,
)
from tidemill.log.notes.checkpoint import CHECKPOINT_NAME
from tidemill.log.notes.inventory import INVENTORY_NAME
from tidemill.log.storage import LocalStorage, Storage
from tidemill.replication.partition import Partition
from tidemill.replication.replicas import LOGS, Placement, Replicas, partition_directory
from tidemill.replication.rules.assignment import PartitionAssignment
from tidemill.replication.rules.state import Role

ID, OTHER = UUID(int=1), UUID(int=2)
NOW = 1_000_000


def placement(index: int = 0, *, topic: str = "t", topic_id: UUID = ID) -> Placement:
    return Placement(topic, topic_id, index, 0, TopicConfig())


def replicas_on(storage: Storage) -> Replicas:
    return Replicas(storage, lambda partition: None, max_decompressed_bytes=10**6, clock_ms=lambda: NOW)


def write(partition: Partition, *values: str, producer: tuple[int, int, int] | None = None) -> None:
    partition.append(plain_batch(*values, producer=producer), NOW)
    job = partition.begin_flush()
    assert job is not None
    job.run()
    partition.flushed(job)


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage()


# --- opening and closing


def test_a_partition_is_opened_at_its_first_use_and_kept(storage: FaultyStorage) -> None:
    replicas = replicas_on(storage)
    assert replicas.peek(ID, 0) is None
    assert [call for call in storage.calls if call[1].startswith("logs")] == []
    partition = replicas.open(placement())
    assert replicas.open(placement()) is partition
    assert replicas.peek(ID, 0) is partition
    assert list(replicas) == [partition]
    assert not replicas.exists_on_disk(placement()), "an empty partition has no files"
    write(partition, "a")
    assert replicas.exists_on_disk(placement())


def test_a_partition_needs_file_descriptors_once_it_is_written_to(storage: FaultyStorage) -> None:
    asked: list[int] = []
    is_refused = False

    def check(placement: Placement) -> None:
        if is_refused:
            raise TooManyFiles("999 of 1000 files are open")
        asked.append(placement.index)

    replicas = replicas_on(storage)
    replicas.check_open = check
    partitions = [replicas.open(placement(index)) for index in range(2)]
    assert asked == [], "it has no files yet"
    write(partitions[1], "a")
    write(partitions[1], "b")
    assert asked == [1]
    is_refused = True
    with pytest.raises(TooManyFiles):
        partitions[0].append(plain_batch("a"), NOW)
    with pytest.raises(TooManyFiles):
        partitions[0].begin_creation()
    restarted = replicas_on(storage)
    restarted.check_open = check
    with pytest.raises(TooManyFiles):
        restarted.open(placement(1))
    is_refused = False
    write(partitions[0], "a")
    assert partitions[0].log_end_offset == 1


def test_partitions_take_the_roles_that_the_metadata_gives_and_listeners_hear_of_it(
    storage: FaultyStorage,
) -> None:
    replicas = replicas_on(storage)
    heard: list[tuple[int, Role, int]] = []
    replicas.role_listeners.append(lambda each: heard.append((each.index, each.role, each.leader)))
    here, other = 0, 2
    follows = PartitionAssignment(other, 3, (other, here), (other, here))
    leads = PartitionAssignment(here, 4, (other, here), (other, here), partition_epoch=1)
    assert replicas.apply([replace(placement(), assignment=follows)]) == []
    assert replicas.apply([replace(placement(), assignment=leads)]) == []
    assert replicas.apply([replace(placement(), assignment=follows)]) == [], "older news"
    assert heard == [(0, Role.FOLLOWER, other), (0, Role.LEADER, -1)]
    partition = replicas.peek(ID, 0)
    assert partition is not None
    assert list(partition.as_leader.followers) == [other]


def test_a_partition_that_cannot_be_opened_is_reported_and_the_others_are_applied(
    storage: FaultyStorage,
) -> None:
    write(replicas_on(storage).open(placement()), "a")
    replicas = replicas_on(storage)
    storage.fail_next("open", "-0/")
    failed = replicas.apply([placement(0), placement(1)])
    assert [placed.index for placed, _ in failed] == [0]
    assert replicas.peek(ID, 1) is not None


def test_a_partition_that_was_closed_is_opened_again(storage: FaultyStorage) -> None:
    replicas = replicas_on(storage)
    write(replicas.open(placement()), "a", "b")
    replicas.close_partition(replicas.open(placement()))
    assert len(replicas) == 0
    again = replicas.open(placement())
    assert (again.high_watermark, again.local_log.end_offset) == (2, 2)


def test_the_high_watermark_of_a_closed_partition_is_read_from_its_checkpoint(storage: FaultyStorage) -> None:
    replicas = replicas_on(storage)
    assert replicas.closed_high_watermark("t", ID, 0) == 0, "it was never written to"
    partition = replicas.open(placement())
    write(partition, "a", "b", "c")
    replicas.close_partition(partition)
    assert replicas.closed_high_watermark("t", ID, 0) == 3
    partition = replicas.open(placement())
    # As of a replica that has more on its disk than the others.
    partition.local_log.note_high_watermark(2)
    replicas.close_partition(partition)
    assert replicas.closed_high_watermark("t", ID, 0) == 2
    path = f"{partition_directory('t', ID, 0)}/{CHECKPOINT_NAME}"
    storage.open(path).truncate(0)
    assert replicas.closed_high_watermark("t", ID, 0) is None
    assert replicas.peek(ID, 0) is None, "nothing was opened"


def damaged(storage: FaultyStorage) -> None:
    """Flip a bit in the middle of what was durable."""
    replicas = replicas_on(storage)
    write(replicas.open(placement()), "a" * 100)
    write(replicas.open(placement()), "b" * 100)
    replicas.close()
    directory = partition_directory("t", ID, 0)
    for name in storage.list_dir(directory):
        if not name.endswith((".log", "checkpoint")):
            storage.remove(f"{directory}/{name}")
    storage.flip_bit(f"{directory}/00000000000000000000.log", 80)


def test_a_partition_that_cannot_be_opened_is_remembered_with_the_reason(storage: FaultyStorage) -> None:
    damaged(storage)
    replicas = replicas_on(storage)
    with pytest.raises(CorruptData) as caught:
        replicas.open(placement())
    calls = len(storage.calls)
    with pytest.raises(CorruptData) as again:
        replicas.open(placement())
    assert again.value is caught.value
    assert len(storage.calls) == calls, "the disk is not asked again"
    assert replicas.offline[ID, 0] == (placement(), caught.value)
    assert len(replicas) == 0
    write(replicas.open(placement(1)), "the others go on")


def test_a_torn_end_that_cannot_be_kept_for_want_of_room_is_cut_before_the_next_append(
    storage: FaultyStorage,
) -> None:
    replicas = replicas_on(storage)
    partition = replicas.open(placement())
    write(partition, "a")
    partition.append(plain_batch("never durable"), NOW)
    crashed = storage.crash(power_loss=False)
    path = f"{partition_directory('t', ID, 0)}/00000000000000000000.log"
    file = crashed.open(path)
    file.truncate(file.size() - 3)
    torn_bytes = file.size() - len(plain_batch("a"))
    crashed.capacity_bytes = crashed.used_bytes
    again = replicas_on(crashed)
    opened = again.open(placement())
    assert opened.high_watermark == 1
    assert len(list(opened.local_log.read_batches(0, 1))) == 1
    with pytest.raises(DiskFull):
        opened.append(plain_batch("b"), NOW)
    assert not [name for name in crashed.list_dir(path.rpartition("/")[0]) if ".cut-" in name]
    crashed.capacity_bytes = None
    write(opened, "b")
    (kept,) = [name for name in crashed.list_dir(path.rpartition("/")[0]) if ".cut-" in name]
    assert len(crashed.read_file(f"{path.rpartition('/')[0]}/{kept}")) == torn_bytes
    last = replicas_on(crashed.crash(power_loss=True)).open(placement())
    assert last.high_watermark == 2


def test_while_appends_are_refused_reads_go_on(storage: FaultyStorage) -> None:
    write(replicas_on(storage).open(placement()), "a")
    replicas = replicas_on(storage)
    opened = replicas.open(placement())
    replicas.refuse_appends(DiskFull("full"))
    for partition in (opened, replicas.open(placement(1))):
        with pytest.raises(DiskFull):
            partition.append(plain_batch("b"), NOW)
    assert opened.read(0, 100, at_least_one=True)
    replicas.refuse_appends(None)
    write(opened, "b")
    write(replicas.open(placement(1)), "b")


def test_some_topics_take_appends_while_others_are_refused_but_none_while_all_are_held(
    storage: FaultyStorage,
) -> None:
    replicas = replicas_on(storage)
    opened = replicas.open(placement())
    replicas.refuse_appends(DiskFull("full"), but={opened.topic})
    write(opened, "a")
    replicas.hold_appends(DiskFull("no leader epoch yet"))
    replicas.refuse_appends(DiskFull("full"), but={opened.topic})
    for partition in (opened, replicas.open(placement(1))):
        with pytest.raises(DiskFull, match="no leader epoch yet"):
            partition.append(plain_batch("b"), NOW)
    replicas.hold_appends(None)
    write(opened, "b")


def test_producers_read_back_after_a_crash_count_as_active_now(storage: FaultyStorage) -> None:
    """Their batches may carry old times; to expire them would let their retries in twice."""
    replicas = replicas_on(storage)
    write(replicas.open(placement()), "a", producer=(9, 0, 0))
    partition = replicas_on(storage.crash(power_loss=False)).open(placement())
    (known,) = partition.producers()
    assert known.last_timestamp_ms == NOW
    assert partition.local_log.producers.expire(NOW - 1) == 0


def test_closing_goes_on_after_a_partition_that_fails(storage: FaultyStorage) -> None:
    replicas = replicas_on(storage)
    for index in range(3):
        write(replicas.open(placement(index)), "a")
        replicas.open(placement(index)).append(plain_batch("b"), NOW)
    storage.fail_next("sync", partition_directory("t", ID, 1), SyncFailed("on purpose"))
    assert replicas.close() is False
    assert len(replicas) == 0
    again = replicas_on(storage.crash(power_loss=True))
    assert [again.open(placement(index)).high_watermark for index in (0, 2)] == [2, 2]


def test_closing_says_that_all_went_well(storage: FaultyStorage) -> None:
    replicas = replicas_on(storage)
    write(replicas.open(placement()), "a")
    assert replicas.close() is True


# --- deletion


def test_a_deleted_topic_answers_who_waits_and_lets_go_of_its_files(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    replicas = replicas_on(LocalStorage(tmp_path))
    partition = replicas.open(placement())
    write(partition, "a")
    partition.append(plain_batch("b"), NOW)
    told: list[TidemillError | None] = []
    partition.when_committed(2, told.append)
    replicas.mark_deleting("t", ID)
    replicas.stop_topic("t", ID)
    (error,) = told
    assert isinstance(error, StorageError)
    assert error.code == ErrorCode.unknown_topic_or_partition
    assert len(replicas) == 0
    replicas.remove_files("t", ID)
    assert os.listdir(tmp_path / LOGS / "t") == []
    replicas.inventory.close()
    assert len(os.listdir("/proc/self/fd")) == before, "an open file would keep its room on the disk"


def test_a_deleted_topic_is_not_offline_any_more(storage: FaultyStorage) -> None:
    damaged(storage)
    replicas = replicas_on(storage)
    with pytest.raises(CorruptData):
        replicas.open(placement())
    replicas.stop_topic("t", ID)
    assert not replicas.offline


def test_removing_files_takes_only_the_topic_that_is_meant(storage: FaultyStorage) -> None:
    replicas = replicas_on(storage)
    write(replicas.open(placement()), "old")
    write(replicas.open(placement(topic_id=OTHER)), "a new topic of the same name")
    replicas.mark_deleting("t", ID)
    replicas.stop_topic("t", ID)
    replicas.remove_files("t", ID)
    assert storage.list_dir(f"{LOGS}/t") == [f"{OTHER.hex}-0"]


def marked(storage: FaultyStorage) -> Replicas:
    replicas = replicas_on(storage)
    for index in range(3):
        write(replicas.open(placement(index)), "a")
    replicas.mark_deleting("t", ID)
    return replicas


def test_a_crash_before_the_metadata_commit_keeps_the_topic(storage: FaultyStorage) -> None:
    marked(storage)
    again = replicas_on(storage.crash(power_loss=True))
    assert again.leftovers([ID]) == ([], [])
    assert again.leftovers([]) == ([], [f"{LOGS}/t/{ID.hex}-{index}" for index in range(3)]), "unmarked"
    assert [again.open(placement(index)).high_watermark for index in range(3)] == [1, 1, 1]


def test_a_crash_behind_the_metadata_commit_is_finished_at_the_next_start(storage: FaultyStorage) -> None:
    marked(storage)
    crashed = storage.crash(power_loss=True)
    again = replicas_on(crashed)
    assert again.leftovers([OTHER]) == ([("t", ID)], [])
    again.remove_files("t", ID)
    assert crashed.list_dir(f"{LOGS}/t") == []


@pytest.mark.parametrize("seed", range(30))
def test_a_crash_while_files_are_removed_never_forgets_the_marker_first(seed: int) -> None:
    storage = FaultyStorage()
    storage.rng.seed(seed)
    replicas = marked(storage)
    replicas.stop_topic("t", ID)
    replicas.remove_files("t", ID)
    crashed = storage.crash(power_loss=True)
    again = replicas_on(crashed)
    interrupted, unknown = again.leftovers([])
    assert unknown == []
    for topic, topic_id in interrupted:
        again.remove_files(topic, topic_id)
    assert crashed.list_dir(f"{LOGS}/t") == []


def test_a_refused_deletion_takes_the_marker_back(storage: FaultyStorage) -> None:
    replicas = marked(storage)
    replicas.unmark_deleting("t", ID)
    replicas.unmark_deleting("t", ID)
    assert replicas.leftovers([]) == ([], [f"{LOGS}/t/{ID.hex}-{index}" for index in range(3)])


def test_a_topic_without_files_needs_no_marker(storage: FaultyStorage) -> None:
    replicas = replicas_on(storage)
    replicas.mark_deleting("never written", ID)
    replicas.remove_files("never written", ID)
    assert replicas.leftovers([]) == ([], [])


def test_what_nobody_knows_is_reported_and_left_alone(tmp_path: Path) -> None:
    replicas = replicas_on(LocalStorage(tmp_path))
    write(replicas.open(placement()), "a")
    (tmp_path / LOGS / "t" / "notes.txt").touch()
    (tmp_path / LOGS / "t" / "odd.deleting").touch()
    (tmp_path / LOGS / "strangers" / "deadbeef-0").mkdir(parents=True)
    (tmp_path / LOGS / "a file").touch()
    everything = sorted(tmp_path.rglob("*"))
    interrupted, unknown = replicas.leftovers([ID])
    assert interrupted == []
    assert sorted(unknown) == [
        f"{LOGS}/a file",
        f"{LOGS}/strangers/deadbeef-0",
        f"{LOGS}/t/notes.txt",
        f"{LOGS}/t/odd.deleting",
    ]
    assert sorted(tmp_path.rglob("*")) == everything


# --- partitions that have moved to other nodes


def moved_away(storage: FaultyStorage, index: int = 1) -> Replicas:
    """Partition ``index`` of many has moved to other nodes; its files are still there."""
    replicas = replicas_on(storage)
    for each in (0, 1, 10):
        write(replicas.open(placement(each)), "a")
    replicas.begin_removal("t", ID, index)
    return replicas


def test_a_partition_that_has_moved_away_goes_alone(storage: FaultyStorage) -> None:
    replicas = moved_away(storage)
    replicas.remove_partition("t", ID, 1)
    assert storage.list_dir(f"{LOGS}/t") == [f"{ID.hex}-0", f"{ID.hex}-10"]
    assert sorted(replicas.inventory) == [partition_directory("t", ID, index) for index in (0, 10)]
    assert replicas.peek(ID, 1) is None
    assert {each.index for each in replicas} == {0, 10}
    assert replicas.found_on_disk() == [("t", ID, 0), ("t", ID, 10)]


def test_who_waits_for_a_partition_that_moves_away_is_sent_elsewhere(storage: FaultyStorage) -> None:
    replicas = replicas_on(storage)
    partition = replicas.open(placement())
    partition.append(plain_batch("b"), NOW)
    told: list[TidemillError | None] = []
    partition.when_committed(2, told.append)
    replicas.begin_removal("t", ID, 0)
    (error,) = told
    assert error is not None
    assert error.code is ErrorCode.not_leader_or_follower


def test_nothing_is_removed_without_a_note(storage: FaultyStorage) -> None:
    replicas = replicas_on(storage)
    write(replicas.open(placement()), "a")
    replicas.remove_partition("t", ID, 0)
    replicas.finish_removals()
    assert storage.list_dir(f"{LOGS}/t") == [f"{ID.hex}-0"]
    replicas.begin_removal("t", ID, 7)
    assert storage.list_dir(f"{LOGS}/t") == [f"{ID.hex}-0"], "what has no files needs no note"


def test_a_partition_cannot_come_back_before_its_old_files_are_gone(storage: FaultyStorage) -> None:
    replicas = moved_away(storage)
    with pytest.raises(StorageError, match="being removed"):
        replicas.open(placement(1))
    replicas.remove_partition("t", ID, 1)
    assert replicas.open(placement(1)).log_end_offset == 0


@pytest.mark.parametrize("calls", range(14))
@pytest.mark.parametrize("seed", range(4))
def test_power_lost_while_a_partition_is_removed_leaves_it_whole_or_gone(calls: int, seed: int) -> None:
    storage = FaultyStorage()
    storage.rng.seed(seed)
    replicas = replicas_on(storage)
    for index in (0, 1, 10):
        write(replicas.open(placement(index)), "a")
    storage.cut_power_after(calls)
    try:
        replicas.begin_removal("t", ID, 1)
        replicas.remove_partition("t", ID, 1)
    except PowerCut:
        pass
    again = replicas_on(storage.crash(power_loss=True))
    again.finish_removals()
    again.take_inventory([placement(index) for index in (0, 1, 10)])
    assert not again.offline, "it may be a replica again, and what was removed on purpose is not lost"
    assert again.open(placement(1)).log_end_offset in (0, 1)
    assert [again.open(placement(index)).log_end_offset for index in (0, 10)] == [1, 1]


@pytest.mark.parametrize("seed", range(10))
def test_a_partition_that_has_come_back_is_not_removed_by_an_old_note(seed: int) -> None:
    storage = FaultyStorage()
    storage.rng.seed(seed)
    replicas = moved_away(storage)
    replicas.remove_partition("t", ID, 1)
    storage = storage.crash(power_loss=True)
    assert storage.list_dir(f"{LOGS}/t") == [f"{ID.hex}-0", f"{ID.hex}-10"], "the note is gone for good"
    replicas = replicas_on(storage)
    write(replicas.open(placement(1)), "new")
    again = replicas_on(storage.crash(power_loss=True))
    again.finish_removals()
    assert again.open(placement(1)).log_end_offset == 1


def test_the_note_of_a_partition_goes_with_its_topic(storage: FaultyStorage) -> None:
    replicas = moved_away(storage)
    replicas.mark_deleting("t", ID)
    replicas.stop_topic("t", ID)
    replicas.remove_files("t", ID)
    assert storage.list_dir(f"{LOGS}/t") == []


# --- the inventory


def test_a_partition_whose_files_are_gone_is_stopped_at_the_start(storage: FaultyStorage) -> None:
    replicas = replicas_on(storage)
    for index in (0, 1):
        write(replicas.open(placement(index=index)), "a")
    replicas.close()
    storage.remove_tree(partition_directory("t", ID, 1))
    again = replicas_on(storage)
    again.take_inventory([placement(index=index) for index in (0, 1, 2)])
    assert list(again.offline) == [(ID, 1)]
    with pytest.raises(StorageError, match="log repair t:1 --accept-loss"):
        again.open(placement(index=1))
    assert again.open(placement(index=0)).high_watermark == 1
    assert again.open(placement(index=2)).high_watermark == 0, "never written to, so nothing is missing"


def test_a_deleted_topic_leaves_the_inventory(storage: FaultyStorage) -> None:
    replicas = replicas_on(storage)
    write(replicas.open(placement()), "a")
    replicas.mark_deleting("t", ID)
    replicas.stop_topic("t", ID)
    replicas.remove_files("t", ID)
    assert list(replicas_on(storage).inventory) == []


def test_a_line_of_a_topic_that_a_crash_kept_from_being_forgotten_goes_at_the_start(
    storage: FaultyStorage,
) -> None:
    replicas = replicas_on(storage)
    write(replicas.open(placement()), "a")
    storage.remove_tree(partition_directory("t", ID, 0))
    again = replicas_on(storage)
    again.take_inventory([])
    assert not again.offline
    assert list(replicas_on(storage).inventory) == []


def test_the_files_of_an_older_release_are_listed_at_the_first_start(storage: FaultyStorage) -> None:
    replicas = replicas_on(storage)
    write(replicas.open(placement()), "a")
    replicas.close()
    storage.remove(INVENTORY_NAME)
    replicas_on(storage).take_inventory([placement()])
    after = storage.crash(power_loss=True)
    after.remove_tree(partition_directory("t", ID, 0))
    again = replicas_on(after)
    again.take_inventory([placement()])
    assert list(again.offline) == [(ID, 0)]


def test_files_are_listed_only_once_their_names_are_durable(storage: FaultyStorage) -> None:
    directory = partition_directory("t", ID, 0)
    storage.fail_next("sync_dir", directory, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write(replicas_on(storage).open(placement()), "a")
    assert storage.exists(f"{directory}/{CHECKPOINT_NAME}"), "killed before its name was synced"
    killed = storage.crash(power_loss=False)
    replicas_on(killed).take_inventory([placement()])
    for seed in range(10):
        killed.rng.seed(seed)
        again = replicas_on(killed.crash(power_loss=True))
        again.take_inventory([placement()])
        assert not again.offline, "nothing was lost, so nothing is missing"
