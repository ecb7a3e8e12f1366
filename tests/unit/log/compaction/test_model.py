"""Compaction against a dictionary: random keys, tombstones, transactions, codecs, rounds and restarts."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.compacting import ReadRecord, clean, consume, fold, keyed
from support.faulty_storage import FaultyStorage
from tidemill.config.topic import TopicConfig
from tidemill.log.log import PartitionLog
from tidemill.log.offline.inspect import verify
from tidemill.log.recovery import open_log
from tidemill.records.batch import parse_header
from tidemill.records.control import Marker
from tidemill.records.record import Record, build_batch

DIRECTORY = "t-0"
DELETE_RETENTION_MS = 1_000
KEYS = [f"key-{number}" for number in range(8)] + ["a key that is longer than sixteen bytes", ""]


class Model:
    """A log, and everything that was ever written to it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.storage = FaultyStorage(self.rng)
        self.config = TopicConfig(
            cleanup_policy=frozenset({"compact"}),
            segment_bytes=self.rng.choice((400, 1_500, 6_000)),
            index_interval_bytes=200,
            delete_retention_ms=DELETE_RETENTION_MS,
        )
        self.now_ms = 1_000_000
        self.log: PartitionLog
        self.log, _ = open_log(self.storage, DIRECTORY, self.config)
        #: Every record that is or may become visible to a reader of committed data, by offset.
        self.written: dict[int, ReadRecord] = {}
        self.pending: dict[int, dict[int, ReadRecord]] = {}
        self.sequences: dict[int, int] = {}
        self.made = 0

    # --- steps

    def write(self, producer: int | None, *, transactional: bool = False) -> None:
        records = [self._record() for _ in range(self.rng.randint(1, 5))]
        producer_id, epoch, sequence = -1, -1, -1
        if producer is not None:
            producer_id, epoch, sequence = producer, 0, self.sequences.get(producer, 0)
            self.sequences[producer] = sequence + len(records)
        data = build_batch(
            records,
            codec=self.rng.choice((0, 0, 1, 2, 3, 4)),
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            attributes=0x10 if transactional else 0,
        )
        base = self.log.append(
            data, parse_header(data), self.rng.choice((0, 0, 0, 1)), self.now_ms
        ).base_offset
        for delta, record in enumerate(records):
            offset = base + delta
            read = ReadRecord(offset, record.key, record.value, record.timestamp_ms)
            if transactional:
                assert producer is not None
                self.pending.setdefault(producer, {})[offset] = read
            else:
                self.written[offset] = read

    def _record(self) -> Record:
        self.made += 1
        value = None if self.rng.random() < 0.25 else f"value-{self.made}" * self.rng.randint(1, 3)
        return keyed(self.rng.choice(KEYS), value, self.now_ms - self.rng.randint(0, 50))

    def end_transaction(self, producer: int, *, commit: bool) -> None:
        self.log.append_markers([(producer, 0, Marker(commit, 0))], 0, self.now_ms)
        records = self.pending.pop(producer, {})
        if commit:
            self.written.update(records)

    def flush(self) -> None:
        job = self.log.begin_flush()
        if job is not None:
            job.run()
            self.log.finish_flush(job)

    def clean(self) -> None:
        if self.log.segments:
            self.log.roll()
        self.flush()
        before = self.committed()
        clean(self.log, self.now_ms, map_bytes=self.rng.choice((1, 1 << 20)))
        after = self.committed()
        assert set(after) <= set(before), "compaction invents nothing"
        assert fold(iter(after)) == fold(iter(before))
        self.check_last_of_each_key()

    def reopen(self) -> None:
        self.flush()
        remembered = self.log.producers.to_bytes() if self.rng.random() < 0.5 else None
        if self.rng.random() < 0.5:
            self.log.close()
        else:
            self.storage = self.storage.crash(power_loss=False)
        dirty = self.log.first_dirty_offset
        self.log, report = open_log(self.storage, DIRECTORY, self.config, now_ms=self.now_ms)
        assert not report.cuts
        assert self.log.first_dirty_offset == dirty
        if remembered is not None:
            self.check_producers()

    # --- checks

    def committed(self) -> list[ReadRecord]:
        size = self.rng.choice((1, 150, 1_000, 100_000))
        return list(consume(self.log, committed=True, max_bytes=size))

    def check_last_of_each_key(self) -> None:
        """Below the first dirty offset every key is there at most once, and with its last record."""
        found = self.committed()
        offsets = [record.offset for record in found]
        assert offsets == sorted(offsets)
        assert all(self.written[record.offset] == record for record in found)
        clean_part = [record for record in found if record.offset < self.log.first_dirty_offset]
        keys = [record.key for record in clean_part]
        assert len(keys) == len(set(keys))

    def check_fold(self) -> None:
        expected = fold(iter(sorted(self.written.values())))
        stable = self.log.last_stable_offset(self.log.durable_offset)
        if not self.pending:
            assert stable == self.log.end_offset
            assert fold(iter(self.committed())) == expected

    def check_producers(self) -> None:
        for producer, sequence in self.sequences.items():
            entry = self.log.producers.get(producer)
            assert entry is not None
            assert entry.last_sequence == sequence - 1
        assert set(self.log.producers.transactions.open) == set(self.pending)


def play(seed: int) -> Model:
    model = Model(seed)
    rng = model.rng
    for _ in range(rng.randint(20, 90)):
        model.now_ms += rng.choice((1, 10, 600))
        step = rng.random()
        if step < 0.35:
            model.write(rng.choice((None, 1, 2)))
        elif step < 0.65:
            model.write(rng.choice((11, 12)), transactional=True)
        elif step < 0.78:
            # Also one without any batch, as a coordinator writes it where nothing was sent.
            model.end_transaction(rng.choice((11, 12)), commit=rng.random() < 0.5)
        elif step < 0.92:
            model.clean()
        else:
            model.reopen()
    for producer in list(model.pending):
        model.end_transaction(producer, commit=True)
    model.flush()
    model.check_fold()
    return model


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32))
def test_the_fold_of_the_log_never_changes(seed: int) -> None:
    model = play(seed)
    model.clean()
    model.now_ms += 2 * DELETE_RETENTION_MS
    model.write(None)
    model.clean()
    model.check_fold()
    report = verify(model.storage, DIRECTORY)
    assert report.ok, report.problems


@pytest.mark.parametrize("seed", range(25))
def test_what_is_known_of_producers_can_be_read_from_a_compacted_log_alone(seed: int) -> None:
    model = play(seed)
    model.clean()
    for name in model.storage.list_dir(DIRECTORY):
        if name.endswith(".producers"):
            model.storage.remove(f"{DIRECTORY}/{name}")
    known = {
        producer: [(batch.base_offset, batch.last_sequence) for batch in entry.batches]
        for producer, entry in model.log.producers
    }
    model.storage = model.storage.crash(power_loss=False)
    model.log, _ = open_log(model.storage, DIRECTORY, model.config)
    model.check_producers()
    assert known == {
        producer: [(batch.base_offset, batch.last_sequence) for batch in entry.batches]
        for producer, entry in model.log.producers
    }
    model.check_fold()


@pytest.mark.parametrize("seed", range(25))
def test_in_the_end_only_the_last_values_are_left(seed: int) -> None:
    model = play(seed)
    for _ in range(3):
        # Aborted data goes, then the marker is marked, then it goes; and so with tombstones.
        model.now_ms += 2 * DELETE_RETENTION_MS
        model.write(None)
        model.clean()
    left = model.committed()
    assert {record.offset for record in left if record.value is not None} == {
        record.offset for record in fold(iter(left)).values()
    }
    everything = list(consume(model.log, committed=False))
    assert everything == left, "nothing of an aborted transaction is left"
    tombstones = [record for record in left if record.value is None]
    assert all(record.timestamp_ms > model.now_ms - 2 * DELETE_RETENTION_MS - 100 for record in tombstones)
