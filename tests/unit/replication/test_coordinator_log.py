"""A partition as a coordinator's log."""

from __future__ import annotations

from uuid import UUID

import pytest

from support.faulty_storage import FaultyStorage
from tidemill.config.topic import TopicConfig
from tidemill.coordination.log import ReplayedMarker, ReplayedRecord
from tidemill.errors import ApiError, ErrorCode, SyncFailed
from tidemill.replication.coordinator_log import PartitionCoordinatorLog
from tidemill.replication.partition import Partition
from tidemill.replication.replicas import Placement, Replicas

NOW = 1_000_000


@pytest.fixture
def storage() -> FaultyStorage:
    return FaultyStorage()


def opened(storage: FaultyStorage) -> tuple[Partition, PartitionCoordinatorLog]:
    config = TopicConfig(cleanup_policy=frozenset({"compact"}))
    replicas = Replicas(storage, lambda partition: None, max_decompressed_bytes=10**6)
    partition = replicas.open(Placement("__consumer_offsets", UUID(int=1), 0, 4, config))
    return partition, PartitionCoordinatorLog(partition, lambda: NOW)


def flush(partition: Partition) -> None:
    job = partition.begin_flush()
    assert job is not None
    job.run()
    partition.flushed(job)


async def test_records_are_replayed_to_the_log_end_whether_they_are_committed_or_not(
    storage: FaultyStorage,
) -> None:
    partition, log = opened(storage)
    assert log.leader_epoch == 4
    assert log.append([(b"a", b"1"), (b"b", None)]) == log.end_offset == 2
    committed = log.committed(2)
    assert not committed.done()
    expected = [ReplayedRecord(0, b"a", b"1", -1), ReplayedRecord(1, b"b", None, -1)]
    assert list(log.replay(2)) == expected
    flush(partition)
    await committed
    assert log.append([(b"c", b"3")]) == 3
    assert list(log.replay(2)) == expected, "what comes later is not part of the replay"


async def test_another_leader_fails_who_waits_and_is_told_to_who_depends_on_it(
    storage: FaultyStorage,
) -> None:
    partition, log = opened(storage)
    told: list[str] = []
    log.depend("stays", lambda: told.append("stays"))
    log.depend("goes", lambda: told.append("goes"))
    log.release("goes")
    committed = log.committed(log.append([(b"a", b"1")]))
    partition.become_follower(5)
    with pytest.raises(ApiError) as caught:
        await committed
    assert caught.value.code == ErrorCode.not_leader_or_follower
    assert told == ["stays"]


async def test_a_failed_flush_fails_who_waits(storage: FaultyStorage) -> None:
    partition, log = opened(storage)
    committed = log.committed(log.append([(b"a", b"1")]))
    partition.flush_failed(SyncFailed("on purpose"))
    with pytest.raises(SyncFailed):
        await committed


async def test_who_has_stopped_waiting_is_not_disturbed(storage: FaultyStorage) -> None:
    partition, log = opened(storage)
    committed = log.committed(log.append([(b"a", b"1")]))
    committed.cancel()
    flush(partition)
    assert committed.cancelled()


def test_transactional_batches_follow_what_the_producer_has(storage: FaultyStorage) -> None:
    partition, log = opened(storage)
    partition.begin_transaction(9, 0)
    assert log.append_transactional([(b"a", b"1"), (b"b", b"2")], 9, 0) == 2
    assert log.append_transactional([(b"c", b"3")], 9, 0) == 3
    assert log.append_marker(9, 0, commit=True, coordinator_epoch=1) == 4
    partition.begin_transaction(9, 0)
    assert log.append_transactional([(b"d", b"4")], 9, 0) == 5
    assert log.append_marker(9, 1, commit=False, coordinator_epoch=1) == 6
    partition.begin_transaction(9, 1)
    assert log.append_transactional([(b"e", b"5")], 9, 1) == 7
    flush(partition)
    assert list(log.replay(log.end_offset)) == [
        ReplayedRecord(0, b"a", b"1", 9),
        ReplayedRecord(1, b"b", b"2", 9),
        ReplayedRecord(2, b"c", b"3", 9),
        ReplayedMarker(3, 9, True),
        ReplayedRecord(4, b"d", b"4", 9),
        ReplayedMarker(5, 9, False),
        ReplayedRecord(6, b"e", b"5", 9),
    ]


def test_a_refused_append_writes_nothing(storage: FaultyStorage) -> None:
    partition, log = opened(storage)
    with pytest.raises(ApiError) as caught:
        log.append_transactional([(b"a", b"1")], 9, 0)
    assert caught.value.code == ErrorCode.invalid_txn_state
    assert partition.local_log.end_offset == 0


def test_a_replay_after_a_restart_gives_the_same(storage: FaultyStorage) -> None:
    partition, log = opened(storage)
    log.append([(b"a", b"1")])
    flush(partition)
    log.append([(b"never", b"durable")])
    _, again = opened(storage.crash(power_loss=True))
    assert next(iter(again.replay(again.end_offset))) == ReplayedRecord(0, b"a", b"1", -1)
