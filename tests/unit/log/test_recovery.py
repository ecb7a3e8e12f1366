"""Opening after a crash: what is cut, what is kept, what is refused, and what is built again."""

from __future__ import annotations

import contextlib
import random

import pytest

from support.batches import make_batch
from support.faulty_storage import FaultyStorage, PowerCut
from tidemill.config.topic import TopicConfig
from tidemill.errors import CorruptData
from tidemill.log.log import PartitionLog
from tidemill.log.recovery import RecoveryReport, open_log
from tidemill.log.segments.torn import unused_name
from tidemill.records.record import read_records

DIRECTORY = "t-0"
CONFIG = TopicConfig(segment_bytes=500, index_interval_bytes=150)
BATCH_BYTES = make_batch("v0")[1].size_bytes


def path_of(base: int, ending: str = ".log") -> str:
    return f"{DIRECTORY}/{base:020d}{ending}"


def filled(flushed: int, more: int = 0, seed: int = 1) -> FaultyStorage:
    """A log with ``flushed`` durable batches and ``more`` that are only written; killed."""
    storage = FaultyStorage(random.Random(seed))
    log, _ = open_log(storage, DIRECTORY, CONFIG)
    for number in range(flushed + more):
        data, header = make_batch(f"v{number}", producer=(1, 0, number))
        log.append(data, header, number // 6, 1000)
        if number + 1 == flushed:
            job = log.begin_flush()
            assert job is not None
            job.run()
            log.finish_flush(job)
    return storage.crash(power_loss=False)


def reopened(storage: FaultyStorage) -> tuple[PartitionLog, RecoveryReport]:
    return open_log(storage, DIRECTORY, CONFIG)


def values(log: PartitionLog) -> list[str]:
    batches = log.read_batches(log.log_start_offset, log.durable_offset)
    return [(record.value or b"").decode() for batch in batches for record in read_records(batch)]


def expected(count: int) -> list[str]:
    return [f"v{number}" for number in range(count)]


def snapshot(storage: FaultyStorage) -> dict[str, bytes]:
    return {name: storage.read_file(f"{DIRECTORY}/{name}") for name in storage.list_dir(DIRECTORY)}


def bases(storage: FaultyStorage) -> list[int]:
    return [int(name[:20]) for name in storage.list_dir(DIRECTORY) if name.endswith(".log")]


def refused_unchanged(storage: FaultyStorage) -> CorruptData:
    before = snapshot(storage)
    with pytest.raises(CorruptData) as caught:
        reopened(storage)
    assert snapshot(storage) == before
    return caught.value


# --- torn tails


@pytest.mark.parametrize("cut", [1, 30, 60, 61, BATCH_BYTES - 1])
def test_a_torn_tail_is_cut_kept_beside_and_reported(cut: int) -> None:
    storage = filled(3)
    torn = make_batch("torn")[0][:cut]
    storage.open(path_of(0)).write(3 * BATCH_BYTES, [torn])
    log, report = reopened(storage)
    (found,) = report.cuts
    assert (found.path, found.position, found.size_bytes) == (path_of(0), 3 * BATCH_BYTES, len(torn))
    assert storage.read_file(found.kept_in) == torn
    assert (values(log), log.end_offset, report.clean) == (expected(3), 3, False)
    assert len(storage.read_file(path_of(0))) == 3 * BATCH_BYTES


def test_zeros_in_the_middle_of_unsynced_batches_cut_everything_behind_them() -> None:
    storage = filled(2, more=2)
    file = storage.open(path_of(0))
    file.write(2 * BATCH_BYTES, [bytes(BATCH_BYTES)])
    log, report = reopened(storage)
    assert values(log) == expected(2)
    assert [cut.size_bytes for cut in report.cuts] == [2 * BATCH_BYTES]


def test_segments_behind_a_cut_are_put_aside_whole() -> None:
    storage = filled(2, more=12)
    *_, last = bases(storage)
    content = storage.read_file(path_of(last))
    storage.flip_bit(path_of(0), 3 * BATCH_BYTES + 65)
    log, report = reopened(storage)
    assert values(log) == expected(3)
    assert content in [storage.read_file(cut.kept_in) for cut in report.cuts]
    assert bases(storage) == [0]
    data, header = make_batch("v3", producer=(1, 0, 3))
    assert log.append(data, header, 0, 1000).base_offset == 3


def test_kept_bytes_are_never_overwritten() -> None:
    storage = filled(3)
    for content in (b"first", b"second"):
        storage.open(path_of(0)).write(3 * BATCH_BYTES, [content])
        log, _ = reopened(storage)
        log.abandon()
    kept = [content for name, content in snapshot(storage).items() if ".cut-" in name]
    assert sorted(kept) == [b"first", b"second"]
    assert unused_name(storage, "nowhere/x") == "nowhere/x"


def test_a_first_segment_that_never_became_durable_takes_its_followers_along() -> None:
    storage = filled(0, more=12)
    storage.remove(path_of(0))
    log, report = reopened(storage)
    assert (log.end_offset, values(log)) == (0, [])
    assert report.cuts
    data, header = make_batch("again", producer=(1, 0, 0))
    assert log.append(data, header, 0, 1000).base_offset == 0


def test_after_recovery_everything_is_durable() -> None:
    for seed in range(30):
        log, _ = reopened(storage := filled(2, more=12, seed=seed))
        assert log.durable_offset == log.end_offset == 14
        again, report = reopened(storage.crash())
        assert values(again) == expected(14)
        assert not report.cuts


def test_what_a_failed_sync_left_in_the_cache_only_is_written_again() -> None:
    for seed in range(30):
        storage = FaultyStorage(random.Random(seed))
        log, _ = reopened(storage)
        log.append(*make_batch("v0"), 0, 1000)
        job = log.begin_flush()
        assert job is not None
        storage.fail_next("sync", ".log")
        with pytest.raises(Exception, match="on purpose"):
            job.run()
        storage = storage.crash(power_loss=False)
        log, _ = reopened(storage)
        assert values(log) == ["v0"]
        again, _ = reopened(storage.crash())
        assert values(again) == ["v0"]


def test_a_crash_inside_recovery_is_recovered_from() -> None:
    for calls in range(60):
        storage = filled(4, more=8, seed=calls)
        storage.flip_bit(path_of(bases(storage)[-1]), 65)
        whole = values(reopened(filled(4, more=8))[0])
        storage.cut_power_after(calls)
        with contextlib.suppress(PowerCut):
            reopened(storage)
        log, _ = reopened(storage.crash())
        found = values(log)
        assert found == whole[: len(found)]
        assert len(found) >= 4


# --- damage


def test_damage_below_the_recovery_point_is_refused_with_file_and_position_and_changes_nothing() -> None:
    storage = filled(5)
    storage.flip_bit(path_of(bases(storage)[-1]), 65)
    error = refused_unchanged(storage)
    assert (error.path, error.position) == (path_of(bases(storage)[-1]), 0)
    assert "log repair" in error.message


def test_a_shortened_segment_below_the_recovery_point_is_refused() -> None:
    storage = filled(12)
    first, second, *_ = bases(storage)
    storage.open(path_of(first)).truncate(BATCH_BYTES)
    error = refused_unchanged(storage)
    assert (error.path, error.position) == (path_of(first), BATCH_BYTES)
    assert f"offsets 1 … {second - 1} are missing" in error.message


@pytest.mark.parametrize("close", [True, False])
@pytest.mark.parametrize("which", [0, 1, -1])
def test_a_missing_segment_is_refused(which: int, close: bool) -> None:
    storage = filled(16)
    if close:
        reopened(storage)[0].close()
    storage.remove(path_of(bases(storage)[which]))
    refused_unchanged(storage)


def test_a_missing_checkpoint_is_refused() -> None:
    storage = filled(5)
    storage.remove(f"{DIRECTORY}/checkpoint")
    assert "no checkpoint" in refused_unchanged(storage).message


def test_a_damaged_checkpoint_is_refused() -> None:
    storage = filled(5)
    for slot in range(2):
        storage.flip_bit(f"{DIRECTORY}/checkpoint", slot * 4096 + 9)
    assert refused_unchanged(storage).path == f"{DIRECTORY}/checkpoint"


def test_an_offset_that_does_not_follow_on_is_damage_although_the_checksum_fits() -> None:
    storage = filled(4)
    storage.flip_bit(path_of(0), BATCH_BYTES + 6)
    error = refused_unchanged(storage)
    assert error.position == BATCH_BYTES
    assert "offset 257 where 1 must be" in error.message


# --- what is derived


def test_an_orderly_stop_is_believed_without_reading_the_segments() -> None:
    storage = filled(12)
    reopened(storage)[0].close()
    log, report = reopened(storage)
    assert (report.clean, report.scanned_bytes) == (True, 0)
    assert values(log) == expected(12)


def test_an_unclean_stop_reads_only_what_is_not_sealed_below_the_recovery_point() -> None:
    storage = filled(30)
    _, report = reopened(storage)
    assert report.scanned_bytes == len(storage.read_file(path_of(bases(storage)[-1])))


def test_lost_indexes_are_built_once_and_kept() -> None:
    storage = filled(30)
    for name in storage.list_dir(DIRECTORY):
        if name.endswith(".index"):
            storage.remove(f"{DIRECTORY}/{name}")
    log, report = reopened(storage)
    assert report.scanned_bytes == log.size_bytes
    log.close()
    log, report = reopened(storage)
    assert (report.clean, report.scanned_bytes, values(log)) == (True, 0, expected(30))


@pytest.mark.parametrize("damage", ["all", "newest"])
def test_producers_are_known_without_their_snapshots(damage: str) -> None:
    storage = filled(12)
    snapshots = [name for name in storage.list_dir(DIRECTORY) if name.endswith(".producers")]
    for name in snapshots if damage == "all" else snapshots[-1:]:
        storage.flip_bit(f"{DIRECTORY}/{name}", 13)
    log, report = reopened(storage)
    assert any("snapshot" in warning for warning in report.warnings)
    for number in range(7, 12):
        data, header = make_batch(f"v{number}", producer=(1, 0, number))
        assert log.append(data, header, 0, 1000).base_offset == number
    assert log.end_offset == 12
    assert not log.producers.forgetful


def test_a_producer_that_is_read_back_counts_as_active_now() -> None:
    storage = filled(3)
    log, _ = open_log(storage, DIRECTORY, CONFIG, now_ms=10**12)
    assert log.producers.expire(10**12 - 1000) == 0


@pytest.mark.parametrize("way", ["remove", "flip"])
def test_leader_epochs_are_built_again_and_kept(way: str) -> None:
    storage = filled(14)
    path = f"{DIRECTORY}/leader-epochs"
    if way == "remove":
        storage.remove(path)
    else:
        storage.flip_bit(path, 14)
    log, _ = reopened(storage)
    assert log.epochs.entries == ((0, 0), (1, 6), (2, 12))
    log.close()
    log, report = reopened(storage)
    assert (log.epochs.entries, report.warnings) == (((0, 0), (1, 6), (2, 12)), [])


def test_epochs_that_only_the_log_knows_are_kept_from_then_on() -> None:
    storage = filled(4, more=10)
    log, _ = reopened(storage)
    log.close()
    log, report = reopened(storage)
    assert report.clean
    assert log.epochs.entries == ((0, 0), (1, 6), (2, 12))


def test_left_overs_of_a_deletion_are_removed_whichever_of_them_come_back() -> None:
    for seed in range(60):
        storage = filled(20, seed=seed)
        log, _ = reopened(storage)
        log.discard(log.move_start(bases(storage)[-1]))
        start = log.log_start_offset
        storage = storage.crash()
        log, report = reopened(storage)
        assert (log.log_start_offset, values(log)) == (start, expected(20)[start:])
        assert (bases(storage), report.cuts) == ([start], [])


def test_a_log_that_never_got_its_first_segment_is_empty() -> None:
    for calls in range(14):
        for seed in range(6):
            storage = FaultyStorage(random.Random(seed))
            log, _ = reopened(storage)
            storage.cut_power_after(calls)
            with contextlib.suppress(PowerCut):
                log.append(*make_batch("v0"), 0, 1000)
            log, _ = reopened(storage.crash(power_loss=bool(seed % 3)))
            assert log.end_offset in (0, 1)
            base = log.append(*make_batch("next"), 0, 1000).base_offset
            assert base == log.end_offset - 1


def test_a_creation_that_was_killed_and_taken_up_again_survives_a_power_loss() -> None:
    for calls in range(14):
        for seed in range(10):
            storage = FaultyStorage(random.Random(seed))
            log, _ = reopened(storage)
            storage.cut_power_after(calls)
            with contextlib.suppress(PowerCut):
                log.append(*make_batch("v0"), 0, 1000)
            storage = storage.crash(power_loss=False)
            log, _ = reopened(storage)
            log.append(*make_batch("next"), 0, 1000)
            log, _ = reopened(storage.crash())
            assert log.end_offset <= 2


def test_a_leader_epoch_that_is_damaged_below_the_recovery_point_does_not_become_history() -> None:
    storage = filled(3, more=1)
    epoch_position = BATCH_BYTES + 12
    storage.flip_bit(path_of(0), epoch_position, bit=6)
    log, _ = reopened(storage)
    recovered = log.epochs.entries
    data, header = make_batch("v4", producer=(1, 0, 4))
    log.append(data, header, 1, 1000)
    assert (recovered, log.epochs.entries) == (((0, 0),), ((0, 0), (1, 4)))
