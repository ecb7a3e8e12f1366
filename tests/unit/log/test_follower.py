"""Appending what was fetched from a leader, and cutting the end of a log: the rules one by one."""

from __future__ import annotations

import random

import pytest

from support.batches import make_batch
from support.compacting import batches_of, clean, flush, keyed, seal, write
from support.cutting import start_anew_at, truncate_to
from support.faulty_storage import FaultyStorage
from tidemill.config.topic import TopicConfig
from tidemill.errors import ApiError, DiskFull, ErrorCode, StorageError, SyncFailed
from tidemill.log.log import PartitionLog
from tidemill.log.notes.checkpoint import CheckpointFile
from tidemill.log.recovery import open_log
from tidemill.records.record import read_records

DIRECTORY = "t-0"
CONFIG = TopicConfig(segment_bytes=500, index_interval_bytes=150)


def opened(storage: FaultyStorage | None = None, config: TopicConfig = CONFIG) -> PartitionLog:
    return open_log(storage or FaultyStorage(random.Random(3)), DIRECTORY, config)[0]


def led(*epochs: int, size: int = 1) -> PartitionLog:
    """A log with a batch of ``size`` records for each epoch."""
    log = opened(config=TopicConfig())
    for number, epoch in enumerate(epochs):
        data, header = make_batch(*(f"{number}-{record}" for record in range(size)), timestamp_ms=number)
        log.append(data, header, epoch, 1)
    return log


def chunk_of(log: PartitionLog, start: int = 0) -> bytes:
    return b"".join(log.read_batches(start, log.end_offset))


def values(log: PartitionLog) -> list[str]:
    batches = log.read_batches(log.log_start_offset, log.end_offset)
    return [(record.value or b"").decode() for batch in batches for record in read_records(batch)]


def files(log: PartitionLog) -> dict[str, bytes]:
    names = log.storage.list_dir(DIRECTORY)
    return {name: log.storage.read_file(f"{DIRECTORY}/{name}") for name in names}


# --- appending as a follower


def test_a_chunk_is_written_by_one_call_per_segment() -> None:
    storage = FaultyStorage(random.Random(0))
    log = opened(storage)
    chunk = chunk_of(led(*([0] * 12)))
    log.append_as_follower(chunk, 0, 1)
    writes = [path for call, path in storage.calls if call == "write" and path.endswith(".log")]
    assert len(writes) == len(set(writes)) == len(log.segments) > 1
    assert all(segment.size_bytes <= CONFIG.segment_bytes for segment in log.segments)
    assert chunk_of(log) == chunk


@pytest.mark.parametrize(
    ("first", "code"),
    [(1, ErrorCode.offset_out_of_range), (3, ErrorCode.offset_out_of_range)],
    ids=["again", "with a gap"],
)
def test_offsets_go_on_exactly_at_the_log_end(first: int, code: ErrorCode) -> None:
    leader, log = led(*([0] * 5)), opened()
    log.append_as_follower(b"".join(leader.read_batches(0, 2)), 0, 1)
    before = files(log)
    with pytest.raises(ApiError) as caught:
        log.append_as_follower(chunk_of(leader, first), 0, 1)
    assert (caught.value.code, files(log), log.end_offset) == (code, before, 2)


def test_epochs_never_go_down_and_never_pass_the_leaders() -> None:
    leader, log = led(0, 2, 2), opened()
    with pytest.raises(ApiError) as caught:
        log.append_as_follower(chunk_of(leader), 1, 1)
    assert caught.value.code == ErrorCode.unknown_leader_epoch
    log.append_as_follower(chunk_of(leader), 2, 1)
    assert log.epochs.entries == ((0, 0), (2, 1))
    older = led(0, 0, 0, 1)
    with pytest.raises(ApiError) as caught:
        log.append_as_follower(chunk_of(older, 3), 5, 1)
    assert caught.value.code == ErrorCode.fenced_leader_epoch


@pytest.mark.parametrize("position", [0, 8, 16, 17, 30, 62])
def test_a_chunk_whose_last_batch_is_damaged_changes_nothing(position: int) -> None:
    chunk, log = bytearray(chunk_of(led(0, 0, 0))), opened()
    last = list(batches_of(bytes(chunk)))[-1][1]
    chunk[len(chunk) - len(last) + position] ^= 0x40
    with pytest.raises(ApiError):
        log.append_as_follower(bytes(chunk), 0, 1)
    assert (log.end_offset, files(log)) == (0, {})


def test_a_chunk_that_ends_inside_a_batch_is_refused() -> None:
    log = opened()
    with pytest.raises(ApiError) as caught:
        log.append_as_follower(chunk_of(led(0, 0))[:-1], 0, 1)
    assert caught.value.code == ErrorCode.corrupt_message
    assert log.append_as_follower(b"", 0, 1) is None


def test_a_full_disk_leaves_whole_batches_from_which_the_follower_goes_on() -> None:
    storage = FaultyStorage(random.Random(0))
    leader, log = led(*([0] * 20)), opened(storage)
    log.append_as_follower(b"".join(leader.read_batches(0, 1)), 0, 1)
    storage.capacity_bytes = storage.used_bytes + 700
    with pytest.raises(DiskFull):
        log.append_as_follower(chunk_of(leader, 1), 0, 1)
    assert 1 <= log.end_offset < 20
    assert chunk_of(log) == b"".join(leader.read_batches(0, log.end_offset))
    storage.capacity_bytes = None
    log.append_as_follower(chunk_of(leader, log.end_offset), 0, 1)
    assert chunk_of(log) == chunk_of(leader)


def test_the_first_batch_of_an_empty_log_may_begin_below_its_start() -> None:
    leader, storage = led(0, 0, size=3), FaultyStorage(random.Random(0))
    log = opened(storage)
    start_anew_at(log, 4, 1)
    log.append_as_follower(chunk_of(leader, 4), 0, 1)
    assert (log.log_start_offset, log.end_offset, log.segments[0].base_offset) == (4, 6, 3)
    flush(log)
    again = opened(storage.crash(power_loss=False))
    assert (again.log_start_offset, again.end_offset) == (4, 6)
    assert again.producers.forgetful, "what wrote below the start is not known"


def test_what_compaction_has_joined_is_taken_from_the_log_end_on() -> None:
    """The leader has emptied a stretch that the follower has the first half of."""
    config = TopicConfig(cleanup_policy=frozenset({"compact"}), min_cleanable_dirty_ratio=0.0)
    leader, log = opened(config=config), opened()
    for _ in range(4):
        write(leader, keyed("k", "v"))
    log.append_as_follower(b"".join(leader.read_batches(0, 2)), 0, 1)
    write(leader, keyed("k", "last"))
    seal(leader)
    assert clean(leader, 100)
    chunk = bytes(leader.read(2, 1000, leader.end_offset))
    assert [(h.base_offset, h.last_offset, h.record_count) for h, _ in batches_of(chunk)] == [
        (0, 3, 0),
        (4, 4, 1),
    ]
    log.append_as_follower(chunk, 0, 1)
    spans = [(header.base_offset, header.last_offset) for header, _ in batches_of(chunk_of(log))]
    assert spans == [
        (0, 0),
        (1, 1),
        (2, 3),
        (4, 4),
    ]
    assert log.producers.forgetful, "a producer that was let go may have been in what is gone"


# --- cutting the end


@pytest.mark.parametrize("offset", range(13))
def test_the_cut_is_at_the_batch_that_holds_the_offset(offset: int) -> None:
    leader = led(*([0] * 6), size=2)
    log = opened()
    log.append_as_follower(chunk_of(leader), 0, 1)
    flush(log)
    kept = b"".join(data for header, data in batches_of(chunk_of(leader)) if header.last_offset < offset)
    cuts = truncate_to(log, offset, 1)
    assert (chunk_of(log), log.end_offset) == (kept, offset // 2 * 2 if offset < 12 else 12)
    assert sum(cut.size_bytes for cut in cuts) == len(chunk_of(leader)) - len(kept)
    newest = max((header.max_timestamp for header, _ in batches_of(kept)), default=-1)
    assert max((segment.max_timestamp for segment in log.segments), default=-1) == newest
    log.append_as_follower(chunk_of(leader, log.end_offset), 0, 1)
    assert chunk_of(log) == chunk_of(leader)


def test_below_the_log_start_the_log_is_empty_at_that_offset() -> None:
    storage = FaultyStorage(random.Random(0))
    log = opened(storage)
    log.append_as_follower(chunk_of(led(*([0] * 8))), 0, 1)
    flush(log)
    log.discard(log.move_start(6))
    log.note_high_watermark(6)
    assert truncate_to(log, 4, 1)
    for found in (log, opened(storage.crash())):
        assert (found.log_start_offset, found.end_offset, found.durable_offset) == (4, 4, 4)
        assert (found.segments, found.epochs.entries, found.high_watermark_checkpoint) == ((), (), 4)


def test_a_log_can_start_anew_behind_its_end() -> None:
    storage = FaultyStorage(random.Random(0))
    log = opened(storage)
    log.append_as_follower(chunk_of(led(0, 1)), 1, 1)
    flush(log)
    start_anew_at(log, 100, 1)
    data, header = make_batch("x")
    log.append(data, header, 3, 1)
    flush(log)
    again = opened(storage.crash())
    assert (again.log_start_offset, again.end_offset, again.epochs.entries) == (100, 101, ((3, 100),))


def test_the_recovery_point_and_the_high_watermark_go_down_before_anything_is_cut() -> None:
    storage = FaultyStorage(random.Random(0))
    log = opened(storage)
    log.append_as_follower(chunk_of(led(*([0] * 8))), 0, 1)
    log.note_high_watermark(8)
    flush(log)
    log.note_high_watermark(8)
    seen: list[tuple[int, int | None]] = []

    def look() -> None:
        found = CheckpointFile.load(storage, DIRECTORY).current
        seen.append((found.recovery_point, found.high_watermark))

    storage.before_next("truncate", ".log", look)
    truncate_to(log, 5, 1)
    assert seen == [(5, 5)]


def test_the_cut_does_not_run_beside_a_flush() -> None:
    log = opened()
    log.append_as_follower(chunk_of(led(0, 0, 0)), 0, 1)
    job = log.begin_flush()
    assert job is not None
    assert log.is_flushing
    with pytest.raises(StorageError, match="a flush is under way"):
        truncate_to(log, 1, 1)
    job.run()
    log.finish_flush(job)
    assert truncate_to(log, 1, 1)


def test_while_the_end_is_cut_nothing_else_changes_the_log() -> None:
    log = opened()
    log.append_as_follower(chunk_of(led(*([0] * 8))), 0, 1)
    flush(log)
    job = log.begin_truncation(3, 1)
    assert job is not None
    data, header = make_batch("x")
    for change in (
        lambda: log.append(data, header, 0, 1),
        lambda: log.append_as_follower(data, 0, 1),
        lambda: log.move_start(1),
        log.roll,
        lambda: log.begin_truncation(2, 1),
    ):
        with pytest.raises(StorageError, match="is being cut"):
            change()
    assert log.begin_flush() is None
    assert len(list(batches_of(log.read(0, 1000, 3)))) > 0, "what stays can be read"
    job.run()
    log.finish_truncation(job)
    assert values(log) == ["0-0", "1-0", "2-0"]


def test_without_room_for_the_bytes_nothing_is_cut() -> None:
    storage = FaultyStorage(random.Random(0))
    leader, log = led(*([0] * 8)), opened(storage, TopicConfig())
    log.append_as_follower(chunk_of(leader), 0, 1)
    flush(log)
    storage.fail_next("write", ".cut-", DiskFull("no room"))
    with pytest.raises(DiskFull):
        truncate_to(log, 3, 1)
    assert (log.failure, chunk_of(log)) == (None, chunk_of(leader))
    assert truncate_to(log, 3, 1)
    assert log.end_offset == 3


@pytest.mark.parametrize(("call", "path"), [("sync", ".log"), ("rename", ".log"), ("sync_dir", "")])
def test_an_error_behind_the_cut_stops_the_log_and_a_start_finishes_it(call: str, path: str) -> None:
    storage = FaultyStorage(random.Random(0))
    leader, log = led(*([0] * 20)), opened(storage)
    log.append_as_follower(chunk_of(leader), 0, 1)
    flush(log)
    job = log.begin_truncation(5, 1)
    assert job is not None
    storage.before_next("truncate", ".log", lambda: storage.fail_next(call, path, SyncFailed("on purpose")))
    with pytest.raises(SyncFailed) as caught:
        job.run()
    log.truncation_failed(job, caught.value)
    assert log.failure is caught.value
    log.abandon()
    assert opened(storage).end_offset == 5


def test_an_index_of_the_old_length_is_not_taken_for_the_new_batches() -> None:
    """Cut and grown again to its old length, a segment is another one than its index speaks of."""
    storage = FaultyStorage(random.Random(0))
    config = TopicConfig(segment_bytes=10_000, index_interval_bytes=1)
    log = opened(storage, config)
    log.append_as_follower(chunk_of(led(0, 0, 0, 0, size=1)), 0, 1)
    log.roll()
    flush(log)
    size_bytes = log.segments[0].size_bytes
    truncate_to(log, 1, 1)
    assert not storage.exists(f"{DIRECTORY}/{0:020d}.index")
    data, header = make_batch("x" * (size_bytes - log.segments[0].size_bytes - 70))
    log.append(data, header, 1, 1)
    assert log.segments[0].size_bytes == size_bytes
    flush(log)
    again = opened(storage.crash(power_loss=False), config)
    assert [header.base_offset for header, _ in batches_of(chunk_of(again))] == [0, 1]
