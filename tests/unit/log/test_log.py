"""Appending, flushing and deleting when something goes wrong, and the rules for rolling."""

from __future__ import annotations

import contextlib
import random
from dataclasses import replace

import pytest

from support.batches import make_batch
from support.faulty_storage import FaultyStorage, PowerCut
from support.searching import searched
from tidemill.config.topic import TopicConfig
from tidemill.errors import ApiError, DiskFull, ErrorCode, StorageError, SyncFailed
from tidemill.log.log import SMALL_SEGMENTS_MAX, PartitionLog
from tidemill.log.notes.checkpoint import CheckpointFile
from tidemill.log.recovery import open_log
from tidemill.records.batch import parse_header
from tidemill.records.compression import NONE, ZSTD
from tidemill.records.record import Record, build_batch, read_records

DIRECTORY = "t-0"
CONFIG = TopicConfig(segment_bytes=500, index_interval_bytes=150)
SEGMENT = f"{DIRECTORY}/{0:020d}.log"


def opened(
    storage: FaultyStorage | None = None, config: TopicConfig = CONFIG
) -> tuple[FaultyStorage, PartitionLog]:
    storage = storage or FaultyStorage(random.Random(3))
    return storage, open_log(storage, DIRECTORY, config)[0]


def append(
    log: PartitionLog, *values: str, sequence: int | None = None, now_ms: int = 10, epoch: int = 0
) -> int:
    producer = None if sequence is None else (1, 0, sequence)
    data, header = make_batch(*values, producer=producer)
    return log.append(data, header, epoch, now_ms).base_offset


def flush(log: PartitionLog) -> None:
    job = log.begin_flush()
    if job is not None:
        job.run()
        log.finish_flush(job)


def values(log: PartitionLog, upper: int | None = None) -> list[str]:
    end = log.end_offset if upper is None else upper
    batches = log.read_batches(log.log_start_offset, end)
    return [(record.value or b"").decode() for batch in batches for record in read_records(batch)]


# --- appending


def test_a_missing_directory_is_an_empty_log_and_is_made_by_the_first_append() -> None:
    storage, log = opened()
    assert (log.end_offset, log.begin_flush(), storage.list_dir("")) == (0, None, [])
    log.close()
    assert storage.list_dir("") == []
    _, log = opened(storage)
    append(log, "a")
    assert storage.exists(SEGMENT)


def test_a_batch_carries_its_offset_and_leader_epoch() -> None:
    _, log = opened()
    append(log, "a", "b", epoch=4)
    assert append(log, "c", epoch=5) == 2
    headers = [parse_header(batch) for batch in log.read_batches(0, 3)]
    assert [(header.base_offset, header.leader_epoch) for header in headers] == [(0, 4), (2, 5)]
    assert log.epochs.entries == ((4, 0), (5, 2))


def test_a_retry_is_answered_with_the_first_offset_and_written_once() -> None:
    _, log = opened()
    append(log, "x")
    data, header = make_batch("a", "b", producer=(1, 0, 0))
    first = log.append(data, header, 0, 10)
    again = log.append(data, header, 0, 11)
    assert (again.base_offset, again.last_offset, again.duplicate) == (1, 2, True)
    assert not first.duplicate
    assert values(log) == ["x", "a", "b"]


def test_a_refused_batch_changes_nothing() -> None:
    storage, log = opened()
    append(log, "a", sequence=0)
    before = storage.read_file(SEGMENT), log.producers.to_bytes(), log.end_offset
    with pytest.raises(ApiError) as caught:
        append(log, "b", sequence=5)
    assert caught.value.code == ErrorCode.out_of_order_sequence_number
    assert (storage.read_file(SEGMENT), log.producers.to_bytes(), log.end_offset) == before


@pytest.mark.parametrize("room", [0, 1, 16, 40])
def test_a_full_disk_refuses_an_append_and_it_works_again_when_there_is_room(room: int) -> None:
    storage, log = opened()
    append(log, "a", sequence=0)
    before = storage.read_file(SEGMENT), log.producers.to_bytes()
    storage.capacity_bytes = storage.used_bytes + room
    for _ in range(2):
        with pytest.raises(DiskFull):
            append(log, "b", sequence=1)
        assert (storage.read_file(SEGMENT), log.producers.to_bytes(), log.end_offset) == (*before, 1)
    assert values(log) == ["a"]
    storage.capacity_bytes = None
    assert append(log, "c", sequence=1) == 1
    flush(log)
    assert values(log) == ["a", "c"]


def test_remains_of_a_refused_write_cannot_come_back_behind_durable_batches() -> None:
    for seed in range(40):
        storage, log = opened(FaultyStorage(random.Random(seed)))
        append(log, "a")
        flush(log)
        storage.capacity_bytes = storage.used_bytes + 50
        with pytest.raises(DiskFull):
            append(log, "b")
        storage.capacity_bytes = None
        log.roll()
        append(log, "c")
        flush(log)
        _, log = opened(storage.crash())
        assert values(log) == ["a", "c"]


def test_a_full_disk_on_roll_refuses_the_append_and_the_log_goes_on_later() -> None:
    storage, log = opened()
    append(log, "a" * 300)
    storage.fail_next("open", ".log", DiskFull("no room for another file"))
    with pytest.raises(DiskFull):
        append(log, "b" * 300)
    assert (log.end_offset, len(log.segments)) == (1, 1)
    append(log, "b" * 300)
    flush(log)
    assert [segment.base_offset for segment in log.segments] == [0, 1]
    assert values(log) == ["a" * 300, "b" * 300]


@pytest.mark.parametrize("name", [".index", ".producers", "leader-epochs"])
def test_a_side_file_without_room_does_not_fail_the_flush_and_is_written_by_the_next(name: str) -> None:
    storage, log = opened()
    append(log, "a" * 300, sequence=0)
    append(log, "b" * 300, sequence=1)
    storage.fail_next("write", f"{name}.tmp", DiskFull("no room"))
    flush(log)
    assert log.durable_offset == 2
    assert not any(path.endswith(name) for path in storage.list_dir(DIRECTORY))
    assert log.begin_flush() is None, "a side file alone is no reason to try again at once"
    append(log, "c", sequence=2)
    flush(log)
    assert any(path.endswith(name) for path in storage.list_dir(DIRECTORY))
    assert CheckpointFile.load(storage, DIRECTORY).current.recovery_point == 3


def test_without_room_for_side_files_the_recovery_point_stays_behind_and_nothing_is_forgotten() -> None:
    storage, log = opened()
    append(log, "a" * 300, sequence=0, epoch=0)
    append(log, "b" * 300, sequence=1, epoch=1)
    storage.fail_next("write", "leader-epochs.tmp", DiskFull("no room"))
    flush(log)
    assert CheckpointFile.load(storage, DIRECTORY).current.recovery_point < 2
    _, log = opened(storage.crash())
    assert values(log) == ["a" * 300, "b" * 300]
    assert log.epochs.entries == ((0, 0), (1, 1))


def test_an_orderly_stop_without_room_loses_nothing() -> None:
    storage, log = opened()
    append(log, "a", sequence=0)
    flush(log)
    storage.capacity_bytes = storage.used_bytes
    log.close()
    storage.capacity_bytes = None
    _, log = opened(storage)
    assert values(log) == ["a"]
    assert append(log, "b", sequence=1) == 1


def test_if_even_undoing_a_write_fails_the_log_stops() -> None:
    storage, log = opened()
    append(log, "a")
    storage.fail_next("write", ".log", DiskFull("no room"))
    storage.fail_next("truncate", ".log")
    with pytest.raises(DiskFull):
        append(log, "b")
    assert log.failure is not None
    with pytest.raises(StorageError, match="truncate failed"):
        append(log, "c")


def test_a_flush_that_overlaps_a_failed_sync_does_not_move_the_recovery_point() -> None:
    """The kernel tells a failed write-back once: the flush's own sync succeeds, and proves nothing."""
    storage, log = opened()
    append(log, "a")
    job = log.begin_flush()
    assert job is not None
    before = job.checkpoint.current
    storage.fail_next("write", ".log", DiskFull("no room"))
    storage.fail_next("sync", ".log")
    with pytest.raises(DiskFull):
        append(log, "b")
    with pytest.raises(SyncFailed):
        job.run()
    assert job.checkpoint.current == before


# --- rolling


def test_a_segment_rolls_before_it_would_grow_beyond_its_limit() -> None:
    _, log = opened()
    size = make_batch("x" * 50)[1].size_bytes
    for _ in range(10):
        append(log, "x" * 50)
    assert all(segment.size_bytes == 500 // size * size for segment in log.segments[:-1])


def test_a_segment_rolls_when_it_is_old_enough() -> None:
    _, log = opened(config=replace(CONFIG, segment_ms=100))
    append(log, "a", now_ms=1000)
    append(log, "b", now_ms=1099)
    append(log, "c", now_ms=1100)
    append(log, "d", now_ms=1199)
    assert [segment.base_offset for segment in log.segments] == [0, 2]


def test_a_segment_rolls_at_its_age_after_the_clock_was_set_back() -> None:
    _, log = opened(config=replace(CONFIG, segment_ms=100))
    append(log, "a", now_ms=10_000)
    append(log, "b", now_ms=1_000)
    append(log, "c", now_ms=1_099)
    append(log, "d", now_ms=1_100)
    assert [segment.base_offset for segment in log.segments] == [0, 3]


def test_a_compacted_topic_rolls_early_enough_for_its_compaction_lag() -> None:
    policy = frozenset({"compact"})
    _, log = opened(
        config=replace(CONFIG, cleanup_policy=policy, segment_ms=10_000, max_compaction_lag_ms=100)
    )
    append(log, "a", now_ms=1000)
    append(log, "b", now_ms=1100)
    assert len(log.segments) == 2


@pytest.mark.parametrize("config", [replace(CONFIG, segment_bytes=1), replace(CONFIG, segment_ms=1)])
def test_a_log_with_very_many_segments_goes_on_with_larger_ones(config: TopicConfig) -> None:
    _, log = opened(config=config)
    for number in range(SMALL_SEGMENTS_MAX + 5):
        append(log, "x", now_ms=10 + number)
    assert len(log.segments) == SMALL_SEGMENTS_MAX
    append(log, "y" * 1024 * 1024, now_ms=10 + SMALL_SEGMENTS_MAX)
    assert len(log.segments) == SMALL_SEGMENTS_MAX + 1, "a segment of a megabyte is full"
    append(log, "z", now_ms=10**6)
    assert len(log.segments) == SMALL_SEGMENTS_MAX + 2, "and one of some minutes is old"
    flush(log)
    log.move_start(log.segments[-2].base_offset)
    append(log, "a", now_ms=10**6 + 1)
    assert len(log.segments) == 3, "it has few again"


def test_a_restart_after_a_crash_does_not_roll_the_active_segment() -> None:
    storage, log = opened()
    append(log, "a", now_ms=10**12)
    flush(log)
    _, log = opened(storage.crash(power_loss=False))
    append(log, "b", now_ms=10**12 + 5)
    assert len(log.segments) == 1


def test_rolling_an_empty_segment_changes_nothing() -> None:
    _, log = opened()
    append(log, "a")
    assert log.roll() is log.roll()
    assert [segment.base_offset for segment in log.segments] == [0, 1]


# --- flushing


def test_reads_at_the_durable_offset_do_not_see_what_is_not_durable() -> None:
    _, log = opened()
    append(log, "a")
    job = log.begin_flush()
    assert job is not None
    append(log, "b")
    assert log.durable_offset == 0
    job.run()
    log.finish_flush(job)
    assert (log.durable_offset, log.end_offset) == (1, 2)
    assert values(log, upper=log.durable_offset) == ["a"]


def test_a_flush_syncs_names_before_data_and_data_before_the_note() -> None:
    storage, log = opened()
    for number in range(4):
        append(log, str(number) * 300)
    job = log.begin_flush()
    assert job is not None
    storage.calls.clear()
    job.run()
    syncs = [(call, path) for call, path in storage.calls if call in ("sync", "sync_dir")]
    logs = [("sync", segment.log_path) for segment in log.segments]
    assert syncs[: 1 + len(logs)] == [("sync_dir", DIRECTORY), *logs]
    assert syncs[-1] == ("sync", f"{DIRECTORY}/checkpoint")


def test_a_failed_sync_leaves_the_note_untouched_and_stops_the_log_for_good() -> None:
    storage, log = opened()
    append(log, "a")
    flush(log)
    noted = CheckpointFile.load(storage, DIRECTORY).current
    append(log, "b")
    job = log.begin_flush()
    assert job is not None
    storage.fail_next("sync", ".log")
    with pytest.raises(SyncFailed) as caught:
        job.run()
    log.fail(caught.value)
    assert CheckpointFile.load(storage, DIRECTORY).current == noted
    assert log.durable_offset == 1
    storage.calls.clear()
    assert log.begin_flush() is None
    with pytest.raises(SyncFailed):
        append(log, "c")
    log.fail(StorageError("a later failure does not replace the first"))
    assert log.failure is caught.value
    log.close()
    assert not [call for call in storage.calls if call[0] in ("sync", "write")], "it is never tried again"


def test_a_deletion_during_a_flush_is_not_undone_by_its_note() -> None:
    storage, log = opened()
    for number in range(4):
        append(log, str(number) * 300)
    flush(log)
    append(log, "x" * 300)
    job = log.begin_flush()
    assert job is not None
    storage.before_next("rename", ".producers", lambda: log.discard(log.move_start(2)))
    job.run()
    log.finish_flush(job)
    assert CheckpointFile.load(storage, DIRECTORY).current.log_start_offset == 2
    _, log = opened(storage.crash())
    assert log.log_start_offset == 2


# --- deleting


def test_deleting_moves_the_start_and_removes_whole_segments() -> None:
    storage, log = opened()
    for number in range(6):
        append(log, str(number) * 200, str(number))
    flush(log)
    assert [segment.base_offset for segment in log.segments] == [0, 2, 4, 6, 8, 10]
    log.discard(log.move_start(5))
    assert [segment.base_offset for segment in log.segments] == [4, 6, 8, 10]
    assert log.log_start_offset == 5
    assert (
        sorted(name for name in storage.list_dir(DIRECTORY) if name[:20] in (f"{0:020d}", f"{2:020d}")) == []
    )
    with pytest.raises(ApiError):
        log.read(4, 100, 12)
    log.discard(log.move_start(3))
    assert log.log_start_offset == 5


def test_what_is_not_durable_cannot_be_deleted() -> None:
    _, log = opened()
    append(log, "a")
    with pytest.raises(AssertionError):
        log.discard(log.move_start(1))


def test_a_deletion_whose_note_fails_changes_nothing() -> None:
    storage, log = opened()
    append(log, "a" * 300)
    append(log, "b" * 300)
    flush(log)
    storage.fail_next("sync", "checkpoint")
    with pytest.raises(SyncFailed):
        log.discard(log.move_start(1))
    assert log.log_start_offset == 0
    assert storage.exists(SEGMENT)


def test_everything_can_be_deleted_and_offsets_go_on() -> None:
    for seed in range(40):
        storage, log = opened(FaultyStorage(random.Random(seed)))
        for number in range(4):
            append(log, str(number) * 300, sequence=number)
        flush(log)
        log.roll()
        log.discard(log.move_start(4))
        survivor = storage.crash(power_loss=bool(seed % 4))
        _, log = opened(survivor)
        assert (log.log_start_offset, log.end_offset, values(log)) == (4, 4, [])
        data, header = make_batch("3" * 300, producer=(1, 0, 3))
        assert log.append(data, header, 0, 10).duplicate, "its state outlives its batches"
        assert append(log, "next", sequence=4) == 4


def test_a_crash_anywhere_in_a_deletion_leaves_the_old_or_the_new_start() -> None:
    for calls in range(30):
        for seed in range(6):
            storage, log = opened(FaultyStorage(random.Random(seed)))
            for number in range(4):
                append(log, str(number) * 300, sequence=number)
            flush(log)
            log.roll()
            storage.cut_power_after(calls)
            with contextlib.suppress(PowerCut):
                log.discard(log.move_start(4))
            _, log = opened(storage.crash())
            assert log.log_start_offset in (0, 4)
            assert log.end_offset == 4
            assert append(log, "next", sequence=4) == 4


def test_deleting_makes_room_on_a_full_disk_and_survives_a_crash() -> None:
    for seed in range(60):
        storage, log = opened(FaultyStorage(random.Random(seed)))
        for number in range(4):
            append(log, str(number) * 300)
        flush(log)
        log.roll()
        storage.capacity_bytes = storage.used_bytes
        log.discard(log.move_start(4))
        assert storage.used_bytes < storage.capacity_bytes - 4 * 300
        storage.capacity_bytes = None
        _, log = opened(storage.crash())
        assert (log.log_start_offset, log.end_offset) == (4, 4)


# --- by time


def test_a_batch_that_nobody_can_decode_does_not_break_the_search_by_time() -> None:
    _, log = opened()
    good = build_batch([Record(None, b"a", 5)])
    log.append(good, parse_header(good), 0, 10)
    poisoned = build_batch([Record(None, b"b", 7)], attributes=0x01)
    log.append(poisoned, parse_header(poisoned), 0, 10)
    later = build_batch([Record(None, b"c", 9)])
    log.append(later, parse_header(later), 0, 10)
    found = [searched(log.find_time(timestamp, 3)) for timestamp in (5, 6, 8)]
    assert [each and each.offset for each in found] == [0, 1, 2]


def test_the_largest_timestamp_may_be_in_a_batch_of_which_a_part_is_deleted() -> None:
    _, log = opened()
    data = build_batch([Record(None, b"a", 10), Record(None, b"b", 5), Record(None, b"c", 7)])
    log.append(data, parse_header(data), 0, 10)
    flush(log)
    log.discard(log.move_start(1))
    found = searched(log.find_max_timestamp(3))
    assert found is not None
    assert (found.timestamp, found.offset) == (7, 2)


@pytest.mark.parametrize("codec", [NONE, ZSTD])
def test_a_record_of_a_large_batch_is_found_by_its_time(codec: int) -> None:
    _, log = opened()
    times = [100 + (number * 7919) % 20_011 for number in range(20_000)]
    data = build_batch([Record(None, b"v", time) for time in times], codec=codec)
    log.append(data, parse_header(data), 0, 10)
    flush(log)
    log.discard(log.move_start(5))
    for wanted in (0, 5_000, max(times)):
        expected = next(number for number, time in enumerate(times) if number >= 5 and time >= wanted)
        found = searched(log.find_time(wanted, 20_000))
        assert found is not None
        assert (found.offset, found.timestamp) == (expected, times[expected])
    largest = searched(log.find_max_timestamp(20_000))
    assert largest is not None
    assert largest.offset == times.index(max(times))


def test_a_batch_that_unpacks_to_too_much_is_found_by_its_header() -> None:
    _, log = opened()
    data = build_batch([Record(None, bytes(100_000), time) for time in (5, 9)], codec=ZSTD)
    log.append(data, parse_header(data), 0, 10)
    found = searched(log.find_time(6, 2), max_bytes=10_000)
    assert found is not None
    assert (found.offset, found.timestamp) == (0, 9)


# --- the high watermark in the checkpoint


def test_the_owners_high_watermark_is_there_after_a_restart() -> None:
    storage = FaultyStorage()
    log, _ = open_log(storage, DIRECTORY, TopicConfig())
    assert log.high_watermark_checkpoint is None
    append(log, "a", "b")
    log.note_high_watermark(1)
    flush(log)
    log.abandon()
    again, _ = open_log(storage.crash(power_loss=False), DIRECTORY, TopicConfig())
    assert (again.high_watermark_checkpoint, again.durable_offset) == (1, 2)


def test_a_high_watermark_above_what_a_crash_has_left_ends_at_the_log_end() -> None:
    storage = FaultyStorage()
    log, _ = open_log(storage, DIRECTORY, TopicConfig())
    append(log, "a")
    log.note_high_watermark(5)
    flush(log)
    again, _ = open_log(storage.crash(power_loss=False), DIRECTORY, TopicConfig())
    assert again.high_watermark_checkpoint == again.end_offset == 1
