"""What a leader has read for one follower is given to the others, once each, and never more than fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tidemill.replication.fetching.recent_reads import RecentReads

DATA = memoryview(b"0123456789")


class _Led(SimpleNamespace):
    __hash__ = object.__hash__  # type: ignore[assignment]


def led(epoch: int = 5) -> Any:
    """A partition, as far as it matters here."""
    return _Led(leader_epoch=epoch, log_end_offset=9)


def test_each_other_follower_gets_it_once_and_then_it_is_gone() -> None:
    reads, partition = RecentReads(), led()
    reads.keep(partition, 7, DATA, wanted_by=2, is_large=True)
    reads.keep(partition, 8, DATA, wanted_by=2, is_large=True)
    assert reads.size_bytes == 20
    assert reads.find(partition, 7, 10) is DATA
    assert reads.find(partition, 7, 10) is DATA
    assert reads.find(partition, 7, 10) is None
    assert reads.find(partition, 8, 10) is DATA
    assert reads.size_bytes == 10


def test_another_offset_less_room_another_epoch_or_partition_finds_nothing() -> None:
    reads, partition = RecentReads(), led()
    reads.keep(partition, 7, DATA, wanted_by=1, is_large=True)
    assert reads.find(partition, 8, 10) is None
    assert reads.find(partition, 7, 9) is None
    assert reads.find(led(), 7, 10) is None
    partition.leader_epoch = 6
    assert reads.find(partition, 7, 10) is None
    reads.forget(led())
    assert reads.size_bytes == 10
    reads.forget(partition)
    assert reads.size_bytes == 0


def test_nothing_is_kept_that_nobody_wants() -> None:
    reads = RecentReads()
    reads.keep(led(), 7, DATA, wanted_by=0, is_large=True)
    assert reads.size_bytes == 0


def test_the_oldest_goes_when_there_is_too_much_and_an_offset_has_one_read() -> None:
    reads, partitions = RecentReads(bytes_max=25), [led() for _ in range(3)]
    for partition in (*partitions, partitions[2]):
        reads.keep(partition, 2, DATA, wanted_by=1, is_large=True)
        assert reads.size_bytes <= 20
    assert [reads.find(each, 2, 10) for each in partitions] == [None, DATA, DATA]
    reads.keep(partitions[0], 1, memoryview(bytes(26)), wanted_by=1, is_large=True)
    assert reads.size_bytes == 0


def test_a_small_read_is_not_given_once_there_is_more_than_twice_as_much() -> None:
    reads, partition = RecentReads(), led()
    reads.keep(partition, 7, DATA, wanted_by=2, is_large=False)
    partition.log_end_offset = 11
    assert reads.find(partition, 7, 10) is DATA
    partition.log_end_offset = 12
    assert reads.find(partition, 7, 10) is None
    reads.keep(partition, 7, DATA, wanted_by=2, is_large=True)
    assert reads.find(partition, 7, 10) is DATA
