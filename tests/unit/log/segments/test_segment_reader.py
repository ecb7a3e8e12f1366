"""Reading a segment: whole and checked batches, whatever is damaged, and everything that is not damaged."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.batches import make_batch
from support.faulty_storage import FaultyStorage
from tidemill.errors import DamagedBatch, ErrorCode, StorageError
from tidemill.log.epochs import EpochHistory
from tidemill.log.segments.index import IndexCache
from tidemill.log.segments.segment import Segment
from tidemill.log.segments.segment_reader import ReadBudget, SegmentReader
from tidemill.log.storage import StorageFile
from tidemill.records.batch import HEADER_BYTES, parse_header, stamp_prefix

#: Records per batch, and bytes per record.
BATCHES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 400)), min_size=1, max_size=12)
INTERVAL = st.integers(1, 2000)
BASE = 100


class Made(NamedTuple):
    """A segment and what was written to it."""

    storage: FaultyStorage
    segment: Segment
    #: (position, first offset, next offset) of each batch.
    places: list[tuple[int, int, int]]
    content: bytes
    noted: list[DamagedBatch]

    def reader(self) -> SegmentReader:
        segment = self.segment
        return SegmentReader(
            segment, segment.size_bytes, segment.next_offset, EpochHistory([(7, 0)]), self.noted.append
        )

    def read(self, offset: int, max_bytes: int = 10**6, *, at_least_one: bool = True) -> bytes | None:
        data = self.reader().read(offset, max_bytes, ReadBudget(), at_least_one=at_least_one)
        return None if data is None else bytes(data)


def made(batches: list[tuple[int, int]], interval: int) -> Made:
    storage = FaultyStorage(random.Random(0))
    storage.make_dir("t")
    segment = Segment(storage, "t", BASE, interval, IndexCache())
    segment.create()
    places = []
    for count, size in batches:
        data, header = make_batch(*("x" * size,) * count)
        places.append((segment.size_bytes, segment.next_offset, segment.next_offset + count))
        prefix = stamp_prefix(header, segment.next_offset, 7)
        segment.append([prefix, data[16:]], header, segment.next_offset, header.max_timestamp)
    return Made(storage, segment, places, storage.read_file(segment.log_path), [])


@given(BATCHES, INTERVAL, st.integers(0, 60))
def test_find_gives_the_batch_that_holds_the_offset(
    batches: list[tuple[int, int]], interval: int, ahead: int
) -> None:
    log = made(batches, interval)
    found = log.reader().find(BASE + ahead)
    places = [place[:2] for place in log.places if place[1] <= BASE + ahead < place[2]]
    assert places == ([] if found is None else [(found[0], found[1].base_offset)])


@given(BATCHES, INTERVAL, st.integers(0, 60), st.integers(0, 30_000), st.booleans())
def test_read_gives_the_whole_batches_that_fit_from_that_one_on(
    batches: list[tuple[int, int]], interval: int, ahead: int, max_bytes: int, at_least_one: bool
) -> None:
    log = made(batches, interval)
    data = log.read(BASE + ahead, max_bytes, at_least_one=at_least_one)
    starts = [place[0] for place in log.places if place[2] > BASE + ahead]
    if not starts:
        assert data is None
        return
    ends = [*starts[1:], len(log.content)]
    fitting = [end for end in ends if end - starts[0] <= max_bytes] or (ends[:1] if at_least_one else [])
    assert data == log.content[starts[0] : fitting[-1] if fitting else starts[0]]


@given(BATCHES, INTERVAL, st.data())
def test_whatever_bit_flips_no_wrong_byte_is_read_and_sound_batches_still_are(
    batches: list[tuple[int, int]], interval: int, data: st.DataObject
) -> None:
    log = made(batches, interval)
    damaged = data.draw(st.integers(0, len(batches) - 1), label="batch")
    start, first, behind = log.places[damaged]
    end = log.places[damaged + 1][0] if damaged + 1 < len(batches) else len(log.content)
    byte = data.draw(st.integers(start, end - 1), label="byte")
    log.storage.flip_bit(log.segment.log_path, byte, data.draw(st.integers(0, 7), label="bit"))
    for position, base, next_offset in log.places:
        for offset in range(base, next_offset):
            try:
                read = log.read(offset)
            except DamagedBatch as damage:
                assert (damage.position, damage.first_offset) == (start, first)
                assert damage.code is ErrorCode.corrupt_message
                assert first <= offset < damage.next_offset
                # Beyond the batch itself only what lies before the next entry of the index is lost, and
                # that only if its length or its end is what is damaged.
                entry = log.segment.index.entry_behind_position(start)
                assert damage.next_offset == behind or byte - start in (*range(8, 12), *range(23, 27))
                assert damage.next_offset <= (BASE + entry[0] if entry else log.segment.next_offset)
                continue
            assert read is not None
            if byte - start in range(12, 16):
                assert read == log.content[position:], "the history of epochs has what was here"
                continue
            assert not first <= offset < behind, "the damaged batch is not served"
            assert read == log.content[position : position + len(read)]
            assert position >= end or position + len(read) <= start, "a read ends in front of the damage"
    assert {damage.position for damage in log.noted} <= {start}


def test_a_damaged_batch_is_named_with_file_position_and_offsets_and_what_to_do() -> None:
    log = made([(2, 50)] * 4, 10_000)
    position = log.places[1][0]
    log.storage.flip_bit(log.segment.log_path, position + 80)
    assert log.read(BASE) == log.content[:position], "what is good comes first"
    with pytest.raises(DamagedBatch, match=r"offsets 102 … 103 .*'tidemill log repair'") as caught:
        log.read(BASE + 2)
    assert (caught.value.path, caught.value.position) == (log.segment.log_path, position)
    assert log.read(BASE + 4) == log.content[log.places[2][0] :]


def test_a_leader_epoch_that_did_not_write_there_is_put_right_by_the_history() -> None:
    log = made([(1, 50)] * 3, 10_000)
    log.storage.flip_bit(log.segment.log_path, log.places[1][0] + 15)
    for _, first, _ in log.places:
        assert log.read(first) == log.content[log.places[first - BASE][0] :]
    assert [header.leader_epoch for _, header in log.reader().batches_from(BASE, 0)] == [7, 7, 7]


def test_a_damaged_length_takes_no_more_memory_than_up_to_the_next_known_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = made([(1, 200)] * 2_000, 100)
    position = log.places[3][0]
    log.storage.flip_bit(log.segment.log_path, position + 9, 2)
    assert parse_header(log.segment.file.read(position, HEADER_BYTES)).size_bytes > 2**18, (
        "it fits the segment"
    )
    sizes: list[int] = []
    file_type = type(log.segment.file)
    real = file_type.read

    def read(self: StorageFile, at: int, size: int) -> bytes:
        sizes.append(size)
        return real(self, at, size)

    monkeypatch.setattr(file_type, "read", read)
    with pytest.raises(DamagedBatch, match="needs"):
        log.read(BASE + 3, 0)
    assert max(sizes) < 10_000


def test_a_file_that_was_cut_is_damage_and_not_the_end() -> None:
    log = made([(1, 200)] * 3, 10_000)
    for cut in (log.places[2][0] + HEADER_BYTES + 10, log.places[2][0] + 10):
        log.storage.open(log.segment.log_path).truncate(cut)
        assert log.read(BASE) == log.content[: log.places[2][0]]
        with pytest.raises(DamagedBatch, match="the file ends inside a batch"):
            log.read(BASE + 2)


def test_a_sector_that_the_disk_cannot_read_is_damage_and_the_rest_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = made([(1, 200)] * 40, 100)
    bad = log.places[20][0] + 100
    file_type = type(log.segment.file)
    real = file_type.read

    def read(self: StorageFile, at: int, size: int) -> bytes:
        if at <= bad < at + size:
            raise StorageError("cannot read: Input/output error")
        return real(self, at, size)

    monkeypatch.setattr(file_type, "read", read)
    offset = BASE
    while offset < BASE + 20:
        data = log.read(offset)
        assert data is not None
        assert data == log.content[log.places[offset - BASE][0] :][: len(data)]
        offset += sum(
            place[0] < log.places[offset - BASE][0] + len(data) for place in log.places[offset - BASE :]
        )
    assert offset == BASE + 20
    with pytest.raises(DamagedBatch, match="Input/output error") as caught:
        log.read(offset)
    assert (caught.value.position, caught.value.next_offset) == (log.places[20][0], BASE + 21)
    assert log.read(BASE + 21) == log.content[log.places[21][0] :]


def test_a_turn_of_the_loop_reads_no_more_than_its_budget() -> None:
    log = made([(1, 10)] * 30, 10_000)
    size = log.places[1][0]
    budget = ReadBudget(batches=10)
    reader = log.reader()
    first = reader.read(BASE, 10**6, budget, at_least_one=True)
    assert first is not None
    assert len(first) == 10 * size

    def read(offset: int, max_bytes: int, budget: ReadBudget, *, at_least_one: bool) -> bytes:
        found = reader.read(offset, max_bytes, budget, at_least_one=at_least_one)
        assert found is not None
        return bytes(found)

    assert read(BASE + 10, 10**6, budget, at_least_one=False) == b""
    assert read(BASE + 10, 10**6, budget, at_least_one=True) == log.content[10 * size : 11 * size]
    assert read(BASE, 5 * size + 3, ReadBudget(), at_least_one=True) == log.content[: 5 * size]


def test_walking_stops_at_damage() -> None:
    log = made([(1, 50)] * 3, 10_000)
    log.storage.flip_bit(log.segment.log_path, log.places[1][0] + 70)
    walk = log.reader().batches_from(BASE, 0)
    assert next(walk)[1].base_offset == BASE
    with pytest.raises(DamagedBatch) as caught:
        next(walk)
    assert caught.value.position == log.places[1][0]


def test_batches_larger_than_what_is_read_at_a_time_are_walked_and_passed_over() -> None:
    log = made([(1, 10), (1, 700_000), (1, 10), (1, 300_000)], 2**30)
    walked = [header.base_offset for _, header in log.reader().batches_from(BASE, 0)]
    assert walked == [100, 101, 102, 103]
    for place in log.places:
        data = log.read(place[1], 1)
        assert data is not None
        assert parse_header(data).base_offset == place[1]
