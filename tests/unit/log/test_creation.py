"""The first files of a partition: made in a thread before the first append, or by the append itself."""

from __future__ import annotations

import random

import pytest

from support.batches import make_batch
from support.faulty_storage import FaultyStorage
from tidemill.config.topic import TopicConfig
from tidemill.errors import StorageError, SyncFailed
from tidemill.log.log import PartitionLog
from tidemill.log.recovery import open_log

DIRECTORY = "logs/t/1-0"


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage(random.Random(5))


def opened(storage: FaultyStorage) -> PartitionLog:
    return open_log(storage, DIRECTORY, TopicConfig())[0]


def append(log: PartitionLog) -> int:
    data, header = make_batch("v")
    return log.append(data, header, 0, 10).base_offset


def test_an_append_behind_the_creation_syncs_nothing(storage: FaultyStorage) -> None:
    log = opened(storage)
    creation = log.begin_creation()
    assert creation is not None
    assert not log.has_files
    creation.run()
    assert log.begin_creation() is None, "nothing is left to do"
    storage.fail_next("sync_dir")
    storage.fail_next("sync")
    assert append(log) == 0
    assert len(log.segments) == 1


def test_what_was_created_survives_a_power_loss_as_an_empty_log(storage: FaultyStorage) -> None:
    creation = opened(storage).begin_creation()
    assert creation is not None
    creation.run()
    log = opened(storage.crash())
    assert (log.end_offset, log.has_files) == (0, False)
    assert append(log) == 0


def test_a_checkpoint_without_segments_is_synced_before_the_append(storage: FaultyStorage) -> None:
    creation = opened(storage).begin_creation()
    assert creation is not None
    creation.run()
    storage = storage.crash(power_loss=False)
    log = opened(storage)
    creation = log.begin_creation()
    assert creation is not None
    creation.run()
    storage.fail_next("sync_dir")
    assert append(log) == 0


def test_a_creation_that_failed_is_tried_again(storage: FaultyStorage) -> None:
    log = opened(storage)
    creation = log.begin_creation()
    assert creation is not None
    storage.fail_next("sync_dir")
    with pytest.raises(SyncFailed):
        creation.run()
    assert log.begin_creation() is creation
    creation.run()
    assert append(log) == 0


def test_a_closed_log_creates_nothing(storage: FaultyStorage) -> None:
    log = opened(storage)
    creation = log.begin_creation()
    assert creation is not None
    log.abandon()
    creation.run()
    assert not storage.exists(DIRECTORY)
    with pytest.raises(StorageError, match="closed"):
        creation.take()


def test_a_log_that_takes_no_appends_gets_no_files(storage: FaultyStorage) -> None:
    log = opened(storage)
    log.refusal = StorageError("the disk is full")
    assert log.begin_creation() is None


def test_a_start_that_was_moved_meanwhile_is_kept(storage: FaultyStorage) -> None:
    log = opened(storage)
    creation = log.begin_creation()
    assert creation is not None
    creation.run()
    assert log.begin_starting_anew(7, now_ms=1) is None
    assert append(log) == 7
    job = log.begin_flush()
    assert job is not None
    job.run()
    log = opened(storage.crash())
    assert (log.log_start_offset, log.end_offset) == (7, 8)
