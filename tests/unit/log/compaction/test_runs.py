"""What compaction leaves in a log, and what it leaves on disk when something goes wrong in the middle."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections.abc import Callable

import pytest
from crc32c import crc32c

from support.compacting import (
    ReadRecord,
    batches_of,
    clean,
    consume,
    end_transaction,
    flush,
    fold,
    keyed,
    no_pause,
    seal,
    swap,
    write,
)
from support.faulty_storage import FaultyStorage, PowerCut
from tidemill.config.topic import TopicConfig
from tidemill.errors import CorruptData, DiskFull, StorageError, SyncFailed
from tidemill.log.compaction.chunks import read_chunks
from tidemill.log.compaction.cleaner import CleaningRun, CleaningStopped
from tidemill.log.compaction.runs import begin_swap, carry_swap, end_swap, order_cleaning, roll_for_compaction
from tidemill.log.compaction.swap import CLEAN_POINT_NAME, list_swaps
from tidemill.log.log import PartitionLog
from tidemill.log.offline.inspect import verify
from tidemill.log.producer_state.producer_snapshots import list_snapshots, snapshot_name
from tidemill.log.recovery import open_log
from tidemill.records.batch import BatchHeader, parse_header
from tidemill.records.columns.fields import WINDOW_RECORDS
from tidemill.records.record import Record, build_batch

DIRECTORY = "t-0"
HOUR_MS = 3_600_000
CONFIG = TopicConfig(
    cleanup_policy=frozenset({"compact"}),
    segment_bytes=3_000,
    index_interval_bytes=200,
    delete_retention_ms=HOUR_MS,
)


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage(random.Random(1))


@pytest.fixture
def log(storage: FaultyStorage) -> PartitionLog:
    return open_again(storage)


def open_again(storage: FaultyStorage) -> PartitionLog:
    return open_log(storage, DIRECTORY, CONFIG)[0]


def found(log: PartitionLog, *, committed: bool = True) -> list[tuple[int, str | None]]:
    return [
        (record.offset, None if record.value is None else record.value.decode())
        for record in consume(log, committed=committed)
    ]


def headers(log: PartitionLog) -> list[BatchHeader]:
    return [
        header
        for data in log.read_batches(log.log_start_offset, log.durable_offset)
        for header, _ in batches_of(data)
    ]


# --- records


def test_the_last_record_of_every_key_stays_where_it_was(log: PartitionLog) -> None:
    write(log, keyed("a", "1"), keyed("b", "2"), keyed("a", "3"))
    write(log, keyed("c", "4"))
    write(log, keyed("b", "5"))
    seal(log)
    clean(log, 10)
    assert found(log) == [(2, "3"), (3, "4"), (4, "5")]


def test_records_of_the_active_segment_stay(log: PartitionLog) -> None:
    write(log, keyed("a", "1"))
    seal(log)
    write(log, keyed("a", "2"))
    write(log, keyed("a", "3"))
    flush(log)
    clean(log, 10)
    assert found(log) == [(0, "1"), (1, "2"), (2, "3")]


def test_a_batch_that_loses_nothing_stays_to_the_byte(log: PartitionLog) -> None:
    write(log, keyed("a", "1"), keyed("b", "2"), codec=4, producer=(7, 0, 0))
    write(log, keyed("c", "3"))
    seal(log)
    before = list(log.read_batches(0, log.durable_offset))
    clean(log, 10)
    assert list(log.read_batches(0, log.durable_offset)) == before


@pytest.mark.parametrize("codec", [1, 2, 3, 4])
def test_what_is_left_of_a_compressed_batch_is_compressed_as_before(log: PartitionLog, codec: int) -> None:
    write(log, keyed("a", "1" * 500), keyed("b", "2" * 500), codec=codec)
    write(log, keyed("a", "3"))
    seal(log)
    clean(log, 10)
    assert headers(log)[0].codec == codec
    assert found(log) == [(1, "2" * 500), (2, "3")]


def test_a_record_without_a_key_goes(log: PartitionLog) -> None:
    write(log, keyed("a", "1")._replace(key=None), keyed("b", "2"))
    seal(log)
    clean(log, 10)
    assert found(log) == [(1, "2")]


def test_reading_works_from_any_offset(log: PartitionLog) -> None:
    for number in range(40):
        write(log, keyed(f"k{number % 3}", str(number)), now_ms=number)
    seal(log)
    clean(log, 100)
    expected = [(37, "37"), (38, "38"), (39, "39")]
    for start in range(41):
        values = [record.offset for record in consume(log, committed=False, start=start, max_bytes=1)]
        assert values == [offset for offset, _ in expected if offset >= start]


def test_a_log_is_compacted_in_several_runs_if_its_keys_do_not_fit(log: PartitionLog) -> None:
    for number in range(200):
        write(log, keyed(f"k{number % 100}", str(number)))
    seal(log)
    runs = clean(log, 10, map_bytes=1)
    assert len(runs) > 5
    assert found(log) == [(number, str(number)) for number in range(100, 200)]


def test_small_segments_become_one(log: PartitionLog) -> None:
    for number in range(40):
        write(log, keyed(f"k{number}", "x" * 100))
        if number % 5 == 4:
            seal(log)
    assert len(log.segments) == 9
    clean(log, 10)
    assert 2 <= len(log.segments) < 9
    assert all(segment.size_bytes <= CONFIG.segment_bytes for segment in log.segments)
    assert len(found(log)) == 40


def write_odd(log: PartitionLog, *records: Record, change: Callable[[bytearray], None]) -> bytes:
    """Append a batch as only a strange producer sends it; returns its records' bytes."""
    data = bytearray(build_batch(records))
    change(data)
    data[17:21] = crc32c(bytes(data[21:])).to_bytes(4, "big")
    log.append(bytes(data), parse_header(data), 0, 1)
    return bytes(data[61:])


def add_a_byte(data: bytearray) -> None:
    data += b"\0"
    data[8:12] = (len(data) - 12).to_bytes(4, "big")


def claim_many_records(data: bytearray) -> None:
    data[23:27] = (2**30 - 1).to_bytes(4, "big")
    data[57:61] = (2**30).to_bytes(4, "big")


def give_one_offset_twice(data: bytearray) -> None:
    second = 61 + 1 + (data[61] >> 1)
    assert data[second + 3] == 2, "the relative offset, 1"
    data[second + 3] = 0


@pytest.mark.parametrize("change", [add_a_byte, claim_many_records, give_one_offset_twice])
@pytest.mark.parametrize("map_bytes", [1, 1 << 20])
def test_a_batch_that_is_not_understood_stays_and_its_neighbours_are_compacted(
    log: PartitionLog, change: Callable[[bytearray], None], map_bytes: int
) -> None:
    write(log, keyed("a", "1"), keyed("b", "2"))
    records = write_odd(log, keyed("a", "odd"), keyed("b", "odd"), change=change)
    write(log, keyed("a", "3"))
    seal(log)
    clean(log, 10, map_bytes=map_bytes)
    left = [
        (header.base_offset, header.record_count, batch[61:])
        for data in log.read_batches(0, log.durable_offset)
        for header, batch in batches_of(data)
        if header.record_count
    ]
    assert [entry[0] for entry in left] == [0, 2, log.durable_offset - 1]
    assert left[0][1] == 1, "the older record of a"
    assert left[1][2] == records


@pytest.mark.parametrize("codec", [0, 4])
def test_of_a_very_large_batch_the_last_records_stay(log: PartitionLog, codec: int) -> None:
    count = 2 * WINDOW_RECORDS + 100
    write(log, *(keyed(f"k{number % 1_000}", str(number)) for number in range(count)), codec=codec)
    write(log, keyed("k7", None))
    seal(log)
    clean(log, 10)
    values = [(offset, value) for offset, value in found(log) if value is not None]
    assert values == [(number, str(number)) for number in range(count - 1_000, count) if number % 1_000 != 7]


@pytest.mark.parametrize("sizes", [(1,), (1, 2, 3), (300, 1)])
def test_many_small_batches_are_looked_at_in_groups(log: PartitionLog, sizes: tuple[int, ...]) -> None:
    number, expected = 0, {}
    for turn in range(900):
        records = []
        for _ in range(sizes[turn % len(sizes)]):
            expected[f"k{number % 1_117}"] = (number, str(number))
            records.append(keyed(f"k{number % 1_117}", str(number)))
            number += 1
        write(log, *records)
    seal(log)
    clean(log, 10)
    assert found(log) == sorted(expected.values())


def test_every_group_of_batches_comes_with_its_position(storage: FaultyStorage) -> None:
    batch = build_batch([keyed("a", "1")])
    numbers = [*range(600), 700]
    file = storage.open("many", create=True)
    file.write(0, [number.to_bytes(8, "big") + batch[8:] for number in numbers])
    groups = list(read_chunks(file, len(batch) * len(numbers), no_pause(), lambda: None))
    assert len(groups) > 1
    for position, batches in groups:
        assert position == numbers.index(batches[0][0].base_offset) * len(batch)
    assert sum(len(batches) for _, batches in groups) == len(numbers)


def test_what_is_heavy_to_import_is_imported_by_the_first_run() -> None:
    script = (
        "import sys, tidemill.replication.log_work.compactor\n"
        "print([name for name in ('numpy', 'pyarrow') if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"


# --- tombstones


def test_a_tombstone_stays_for_its_time_after_it_was_first_compacted(log: PartitionLog) -> None:
    write(log, keyed("a", "1"))
    write(log, keyed("a", None, 5), keyed("b", "2", 6))
    seal(log)
    clean(log, 1_000)
    assert found(log) == [(1, None), (2, "2")]
    assert [record.timestamp_ms for record in consume(log, committed=True)] == [5, 6]
    write(log, keyed("c", "3"))
    seal(log)
    clean(log, 1_000 + HOUR_MS - 1)
    assert found(log) == [(1, None), (2, "2"), (3, "3")]
    write(log, keyed("d", "4"))
    seal(log)
    clean(log, 1_000 + HOUR_MS)
    assert found(log) == [(2, "2"), (3, "3"), (4, "4")]


# --- transactions


def test_what_was_aborted_goes_and_does_not_take_older_records_along(log: PartitionLog) -> None:
    write(log, keyed("a", "old"))
    write(log, keyed("a", "aborted"), producer=(7, 0, 0), transactional=True)
    end_transaction(log, 7, commit=False)
    write(log, keyed("b", "1"))
    seal(log)
    clean(log, 10)
    assert found(log, committed=False) == [(0, "old"), (3, "1")]


def test_nothing_of_an_open_transaction_is_touched(log: PartitionLog) -> None:
    write(log, keyed("a", "1"))
    seal(log)
    write(log, keyed("a", "2"), producer=(7, 0, 0), transactional=True)
    seal(log)
    write(log, keyed("a", "3"))
    seal(log)
    clean(log, 10)
    assert log.first_dirty_offset == 1
    assert found(log, committed=False) == [(0, "1"), (1, "2"), (2, "3")]


def test_a_marker_stays_as_long_as_its_transaction_has_records(log: PartitionLog) -> None:
    write(log, keyed("a", "1"), producer=(7, 0, 0), transactional=True)
    end_transaction(log, 7, commit=True)
    log.producers.expire(10**15)
    for round_number in range(4):
        write(log, keyed("b", str(round_number)))
        seal(log)
        clean(log, 10 + round_number * 2 * HOUR_MS)
    assert [header.base_offset for header in headers(log) if header.is_control] == [1]


def test_a_marker_goes_when_nothing_of_its_transaction_is_left_and_its_time_has_passed(
    log: PartitionLog,
) -> None:
    write(log, keyed("a", "1"), producer=(7, 0, 0), transactional=True)
    end_transaction(log, 7, commit=False)
    log.producers.expire(10**15)
    markers = []
    for round_number in range(4):
        write(log, keyed("b", str(round_number)))
        seal(log)
        clean(log, 10 + round_number * HOUR_MS)
        markers.append(any(header.is_control for header in headers(log)))
    # The data goes; the marker gets its delete horizon; that has passed; it is gone.
    assert markers == [True, True, False, False]
    assert log.producers.transactions.aborted_count == 0


def test_a_snapshot_from_before_the_compaction_hides_nothing_that_was_committed_later(
    storage: FaultyStorage, log: PartitionLog
) -> None:
    """It speaks of an aborted transaction whose marker is gone: nothing would end the leaving out."""
    write(log, keyed("a", "aborted"), producer=(7, 0, 0), transactional=True)
    end_transaction(log, 7, commit=False)
    # In the next epoch no batch of the aborted transaction can be sent again, so none has to stay.
    write(log, keyed("a", "committed"), producer=(7, 1, 0), transactional=True)
    end_transaction(log, 7, commit=True, epoch=1)
    for round_number in range(3):
        write(log, keyed("b", str(round_number)))
        seal(log)
        clean(log, 10 + round_number * HOUR_MS)
    assert not any(header.base_offset == 1 and header.is_control for header in headers(log))
    assert (2, "committed") in found(log)
    again = open_again(storage.crash(power_loss=False))
    assert again.producers.transactions.aborted_count == 1, "the snapshot is as old as it should be"
    assert (2, "committed") in found(again)


def test_no_transaction_is_open_again_when_newer_snapshots_are_damaged(
    storage: FaultyStorage, log: PartitionLog
) -> None:
    write(log, keyed("a", "1"), producer=(7, 0, 0), transactional=True)
    seal(log)  # with a snapshot that says that it is open
    end_transaction(log, 7, commit=False)
    log.producers.expire(10**15)
    for round_number in range(4):
        write(log, keyed("b", str(round_number)))
        seal(log)
        clean(log, 10 + round_number * HOUR_MS)
    assert not any(header.is_control for header in headers(log))
    for offset in list_snapshots(storage, DIRECTORY):
        if offset > 1:
            storage.flip_bit(f"{DIRECTORY}/{snapshot_name(offset)}", 13)
    again = open_again(storage.crash(power_loss=False))
    assert again.last_stable_offset(again.durable_offset) == again.end_offset


# --- producers


def test_the_last_batches_of_a_producer_stay_without_their_records(log: PartitionLog) -> None:
    for sequence in range(8):
        write(log, keyed("a", str(sequence)), producer=(7, 0, sequence))
    write(log, keyed("a", "last"))
    seal(log)
    clean(log, 10)
    kept = [header for header in headers(log) if header.producer_id == 7]
    assert [(header.base_offset, header.record_count) for header in kept] == [
        (offset, 0) for offset in range(3, 8)
    ]
    assert found(log) == [(8, "last")]


def test_a_forgotten_producer_leaves_nothing(log: PartitionLog) -> None:
    write(log, keyed("a", "1"), producer=(7, 0, 0))
    write(log, keyed("a", "2"))
    seal(log)
    log.producers.expire(10**15)
    clean(log, 10)
    assert [(header.producer_id, header.record_count) for header in headers(log)] == [(-1, 0), (-1, 1)]


def test_a_fenced_epoch_stays_fenced_without_a_snapshot(storage: FaultyStorage, log: PartitionLog) -> None:
    write(log, keyed("a", "1"), producer=(7, 0, 0), transactional=True)
    end_transaction(log, 7, commit=False, epoch=1)
    for round_number in range(4):
        write(log, keyed("b", str(round_number)))
        seal(log)
        clean(log, 10 + round_number * 2 * HOUR_MS)
    for offset in list_snapshots(storage, DIRECTORY):
        storage.remove(f"{DIRECTORY}/{snapshot_name(offset)}")
    entry = open_again(storage.crash(power_loss=False)).producers.get(7)
    assert entry is not None
    assert entry.epoch == 1


# --- the bounds


def test_nothing_at_or_above_the_floor_is_touched(log: PartitionLog) -> None:
    for number in range(3):
        write(log, keyed("a", str(number)))
        seal(log)
    clean(log, 10, floor_offset=2)
    assert found(log) == [(1, "1"), (2, "2")]
    assert log.first_dirty_offset == 2


def test_nothing_is_touched_until_a_snapshot_of_the_producers_is_behind_it(
    storage: FaultyStorage, log: PartitionLog
) -> None:
    write(log, keyed("a", "1"))
    write(log, keyed("a", "2"))
    seal(log)
    for offset in list_snapshots(storage, DIRECTORY):
        storage.remove(f"{DIRECTORY}/{snapshot_name(offset)}")
    assert order_cleaning(log, 10, high_watermark=log.durable_offset) is None


def test_an_active_segment_rolls_when_its_records_have_waited_long_enough(storage: FaultyStorage) -> None:
    config = TopicConfig(cleanup_policy=frozenset({"compact"}), max_compaction_lag_ms=1_000)
    log, _ = open_log(storage, DIRECTORY, config)
    assert not roll_for_compaction(log, 10**12)
    write(log, keyed("a", "1"), now_ms=5_000)
    assert not roll_for_compaction(log, 5_999)
    assert roll_for_compaction(log, 6_000)
    assert len(log.segments) == 2
    assert not roll_for_compaction(log, 10**12), "an empty segment need not roll"


def test_the_clean_part_is_known_after_a_restart(storage: FaultyStorage, log: PartitionLog) -> None:
    write(log, keyed("a", "1"))
    seal(log)
    clean(log, 10)
    log.close()
    assert open_again(storage).first_dirty_offset == 1
    storage.flip_bit(f"{DIRECTORY}/{CLEAN_POINT_NAME}", 14)
    assert open_again(storage).first_dirty_offset == 0


# --- faults


def busy_log(storage: FaultyStorage) -> tuple[PartitionLog, dict[bytes, ReadRecord]]:
    """A log with something of every kind in several segments, compacted once before, and its fold."""
    log = open_again(storage)
    sequence = 0
    for number in range(60):
        records = [
            keyed(f"k{number % 7}", f"v{number}" * 5),
            keyed(f"l{number % 11}", None if number % 4 else "w"),
        ]
        kind = number % 5
        if kind < 2:
            write(log, *records, codec=number % 3)
        else:
            write(log, *records, producer=(7, 0, sequence), transactional=True)
            sequence += 2
            if kind == 4:
                end_transaction(log, 7, commit=number % 10 == 4)
        if number == 30:
            seal(log)
            clean(log, 50)
    seal(log)
    return log, fold(consume(log, committed=True))


def calls_of_a_cleaning() -> list[tuple[str, str]]:
    storage = FaultyStorage(random.Random(0))
    log, _ = busy_log(storage)
    before = len(storage.calls)
    clean(log, 100)
    return storage.calls[before:]


CALLS = calls_of_a_cleaning()


def crash_and_look(calls: int, seed: int, *, power_loss: bool) -> None:
    where = f"call {calls}, seed {seed}"
    storage = FaultyStorage(random.Random(seed))
    log, expected = busy_log(storage)
    storage.cut_power_after(calls)
    with pytest.raises(PowerCut):
        clean(log, 100)
    storage = storage.crash(power_loss=power_loss)
    log, report = open_log(storage, DIRECTORY, CONFIG)
    assert not report.cuts, where
    assert fold(consume(log, committed=True)) == expected, where
    assert verify(storage, DIRECTORY).ok, where
    clean(log, 200)
    assert fold(consume(log, committed=True)) == expected, where
    leftovers = [name for name in storage.list_dir(DIRECTORY) if name.endswith((".cleaned", ".swap", ".tmp"))]
    assert not leftovers, where


@pytest.mark.parametrize("power_loss", [True, False])
def test_a_crash_at_any_step_leaves_the_old_or_the_new(power_loss: bool) -> None:
    for calls in range(len(CALLS)):
        crash_and_look(calls, calls, power_loss=power_loss)


def test_no_order_in_which_names_become_durable_loses_anything() -> None:
    """The old segments must not go before the new one is there for certain."""
    behind_removals = [
        number + 1 for number, (call, path) in enumerate(CALLS) if call == "remove" and path.endswith(".log")
    ]
    assert behind_removals
    for calls in behind_removals:
        for seed in range(60):
            crash_and_look(calls, seed, power_loss=True)


def interrupted_swap(calls: int) -> tuple[FaultyStorage, dict[bytes, ReadRecord]]:
    storage = FaultyStorage(random.Random(calls))
    log, expected = busy_log(storage)
    storage.cut_power_after(calls)
    with pytest.raises(PowerCut):
        clean(log, 100)
    return storage.crash(), expected


def test_a_crash_while_an_interrupted_swap_is_carried_out_is_no_harm() -> None:
    interrupted = 0
    for first in range(len(CALLS)):
        for second in range(12):
            storage, expected = interrupted_swap(first)
            if not list_swaps(storage.list_dir(DIRECTORY)):
                break
            interrupted += 1
            found = verify(storage, DIRECTORY)
            assert found.ok, f"calls {first}: {found.problems}"
            assert found.notes
            storage.cut_power_after(second)
            with contextlib.suppress(PowerCut):
                open_again(storage)
            again = open_again(storage.crash())
            assert fold(consume(again, committed=True)) == expected, f"calls {first}, {second}"
    assert interrupted >= 50


def test_a_full_disk_changes_nothing(storage: FaultyStorage) -> None:
    log, expected = busy_log(storage)
    names = set(storage.list_dir(DIRECTORY))
    for room in range(0, 6_000, 300):
        storage.capacity_bytes = storage.used_bytes + room
        segments = log.segments
        try:
            clean(log, 100)
        except DiskFull:
            assert log.failure is None
            if log.segments == segments:
                assert set(storage.list_dir(DIRECTORY)) == names
            assert not any(name.endswith(".cleaned") for name in storage.list_dir(DIRECTORY))
            assert fold(consume(log, committed=True)) == expected
    storage.capacity_bytes = None
    clean(log, 100)
    assert fold(consume(log, committed=True)) == expected


def test_damage_stops_the_run_and_removes_nothing(storage: FaultyStorage) -> None:
    log, _ = busy_log(storage)
    path = log.segments[1].log_path
    storage.flip_bit(path, 100)
    names = storage.list_dir(DIRECTORY)
    with pytest.raises(CorruptData, match=path):
        clean(log, 100)
    assert storage.list_dir(DIRECTORY) == names


def test_a_failed_sync_of_the_swap_stops_the_log_and_a_restart_finds_all(storage: FaultyStorage) -> None:
    log, expected = busy_log(storage)
    order = order_cleaning(log, 100, high_watermark=log.durable_offset)
    assert order is not None
    run = CleaningRun(storage, order, map_bytes=1 << 20, pace=no_pause())
    run.map_keys()
    cleaned = run.next()
    assert cleaned is not None
    for offset in list_snapshots(storage, DIRECTORY)[:-1]:
        storage.remove(f"{DIRECTORY}/{snapshot_name(offset)}")
    storage.fail_next("sync_dir", DIRECTORY)
    with pytest.raises(SyncFailed):
        swap(log, cleaned)
    assert log.failure is not None
    assert fold(consume(open_again(storage.crash()), committed=True)) == expected


def test_a_rename_that_fails_leaves_the_log_at_work(storage: FaultyStorage) -> None:
    log, expected = busy_log(storage)
    storage.fail_next("rename", ".cleaned")
    with pytest.raises(StorageError):
        clean(log, 100)
    assert log.failure is None
    assert fold(consume(log, committed=True)) == expected


def test_segments_that_were_deleted_meanwhile_are_not_brought_back(storage: FaultyStorage) -> None:
    log, _ = busy_log(storage)
    order = order_cleaning(log, 100, high_watermark=log.durable_offset)
    assert order is not None
    run = CleaningRun(storage, order, map_bytes=1 << 20, pace=no_pause())
    run.map_keys()
    cleaned = run.next()
    assert cleaned is not None
    start = log.segments[-1].base_offset
    log.discard(log.move_start(start))
    with pytest.raises(StorageError, match="deleted"):
        swap(log, cleaned)
    assert log.log_start_offset == start
    assert found(log) == []


def test_a_run_that_is_told_to_stop_leaves_nothing(storage: FaultyStorage) -> None:
    log, _ = busy_log(storage)
    names = storage.list_dir(DIRECTORY)
    order = order_cleaning(log, 100, high_watermark=log.durable_offset)
    assert order is not None
    stopped = False
    run = CleaningRun(storage, order, map_bytes=1 << 20, pace=no_pause(), is_stopped=lambda: stopped)
    run.map_keys()
    stopped = True
    with pytest.raises(CleaningStopped):
        run.next()
    assert storage.list_dir(DIRECTORY) == names


def test_reading_is_right_between_two_swaps_and_while_more_is_written(storage: FaultyStorage) -> None:
    log, expected = busy_log(storage)
    order = order_cleaning(log, 100, high_watermark=log.durable_offset)
    assert order is not None
    run = CleaningRun(storage, order, map_bytes=1 << 20, pace=no_pause())
    run.map_keys()
    while (cleaned := run.next()) is not None:
        write(log, keyed("new", "x"))
        swap(log, cleaned)
        assert fold(consume(log, committed=True)).items() >= expected.items()
        flush(log)
        assert fold(consume(log, committed=True)).items() >= expected.items()
    run.finish()


def test_while_names_change_the_log_is_read_and_nothing_is_removed_by_name(
    storage: FaultyStorage,
) -> None:
    """The names change in another thread; here every step of that is followed by a look at the log."""
    log, expected = busy_log(storage)
    order = order_cleaning(log, 100, high_watermark=log.durable_offset)
    assert order is not None
    run = CleaningRun(storage, order, map_bytes=1 << 20, pace=no_pause())
    run.map_keys()
    cleaned = run.next()
    assert cleaned is not None
    begin_swap(log, cleaned)
    looks = []

    def look() -> None:
        looks.append(fold(consume(log, committed=True)) == expected)

    for call in ("rename", "remove", "remove", "remove", "rename", "rename", "sync_dir"):
        storage.before_next(call, DIRECTORY, look)
    carry_swap(storage, DIRECTORY, cleaned)
    look()
    assert len(looks) >= 6
    assert all(looks)
    log.discard(log.move_start(cleaned.end_offset))
    assert log.segments[0] is cleaned.old[0], "its name belongs to another file now"
    end_swap(log, cleaned)
    look()
    log.discard(log.move_start(cleaned.end_offset))
    assert log.segments[0].base_offset == cleaned.end_offset


def test_the_log_reads_to_its_end_if_that_lies_in_what_was_compacted(
    storage: FaultyStorage, log: PartitionLog
) -> None:
    write(log, keyed("a", "1"))
    write(log, keyed("a", "2"))
    flush(log)
    log.close()  # leaves a snapshot at the end, so that nothing needs a flush before the compaction
    log = open_again(storage)
    log.roll()
    clean(log, 10)
    assert found(log) == [(1, "2")]
    assert log.available_bytes(0, log.durable_offset, 10**9) == log.size_bytes
    write(log, keyed("a", "3"))
    assert found(log) == [(1, "2")], "not durable yet"
    flush(log)
    assert found(log) == [(1, "2"), (2, "3")]


def test_a_read_passes_over_what_compaction_has_emptied(log: PartitionLog) -> None:
    for number in range(200):
        write(log, keyed("same", f"{number:0100}"))
    last = write(log, keyed("other", "x"))
    seal(log)
    clean(log, HOUR_MS)
    assert len(log.segments) > 3, "there must be several emptied segments"
    for start in range(199):
        headers = [header for header, _ in batches_of(log.read_on(start, 100, log.durable_offset))]
        assert headers[0].record_count == 1, f"a read from {start} gives nothing"
    # At the end there is nothing to pass over to, and a reader must still get on.
    write(log, keyed("other", "y"))
    seal(log)
    clean(log, HOUR_MS)
    assert [value for _, value in found(log)][-1] == "y"
    (header,) = (header for header, _ in batches_of(log.read_on(last, 1, last + 1)))
    assert (header.record_count, header.next_offset) == (0, last + 1)
