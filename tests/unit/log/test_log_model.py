"""The log with its indexes against a list of records.

The state machine appends, rolls, flushes, reads, deletes, restarts in every way that loses nothing, and
damages index files; after each step the log must answer every question as the list does.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from support.faulty_storage import FaultyStorage
from support.searching import searched
from tidemill.config.topic import TopicConfig
from tidemill.errors import ApiError, ErrorCode
from tidemill.log.offline.inspect import verify
from tidemill.log.recovery import open_log
from tidemill.log.segments.index import IndexCache
from tidemill.records.batch import HEADER_BYTES, parse_header
from tidemill.records.record import Record, build_batch, read_records

DIRECTORY = "t-0"


class LogModel(RuleBasedStateMachine):
    """``batches`` is the truth: (base offset, records); ``start`` and ``durable`` are offsets into it."""

    @initialize(segment_bytes=st.sampled_from((400, 800, 2000)), interval=st.sampled_from((1, 150, 4096)))
    def begin(self, segment_bytes: int, interval: int) -> None:
        self.storage = FaultyStorage(random.Random(0))
        self.config = TopicConfig(segment_bytes=segment_bytes, index_interval_bytes=interval, segment_ms=50)
        self.batches: list[tuple[int, list[Record]]] = []
        self.start = self.durable = self.end = 0
        self.now_ms = 1000
        self.damaged: set[str] = set()
        self.epoch = 0
        self.open()

    def open(self) -> None:
        # A cache that holds next to nothing, so that indexes are read back from their files.
        self.log, self.report = open_log(self.storage, DIRECTORY, self.config, IndexCache(max_bytes=1))
        self.durable = self.end

    # --- changes

    @rule(
        times=st.lists(st.integers(-1, 100), min_size=1, max_size=4),
        size=st.integers(0, 60),
        codec=st.integers(0, 4),
    )
    def append(self, times: list[int], size: int, codec: int) -> None:
        records = [Record(None, b"v" * size, timestamp) for timestamp in times]
        data = build_batch(records, codec=codec)
        appended = self.log.append(data, parse_header(data), self.epoch, self.now_ms)
        assert (appended.base_offset, appended.duplicate) == (self.end, False)
        stamped = [record._replace(offset=self.end + number) for number, record in enumerate(records)]
        self.batches.append((self.end, stamped))
        self.end += len(records)

    @rule(passed=st.integers(0, 60))
    def time_passes(self, passed: int) -> None:
        self.now_ms += passed

    @rule()
    def new_leader_epoch(self) -> None:
        self.epoch += 1

    @precondition(lambda self: self.log.segments)
    @rule()
    def roll(self) -> None:
        self.log.roll()

    @rule(late=st.booleans())
    def flush(self, late: bool) -> None:
        job = self.log.begin_flush()
        if job is None:
            assert self.durable == self.end
            return
        target = self.end
        if late:
            self.append([1], 1, 0)
        job.run()
        self.log.finish_flush(job)
        self.durable = target

    @rule(choice=st.integers(0, 1000))
    def delete(self, choice: int) -> None:
        offset = self.start + choice % (self.durable - self.start + 1)
        self.log.discard(self.log.move_start(offset))
        self.start = max(self.start, offset)

    @rule()
    def restart_in_order(self) -> None:
        self.log.close()
        self.open()
        assert self.report.clean

    @rule()
    def restart_after_kill(self) -> None:
        self.storage = self.storage.crash(power_loss=False)
        self.open()
        assert not self.report.cuts

    @rule(
        choice=st.integers(0, 1000),
        way=st.sampled_from(("remove", "truncate", "flip")),
        in_order=st.booleans(),
    )
    def restart_with_a_bad_index(self, choice: int, way: str, in_order: bool) -> None:
        if in_order:
            self.log.close()
        else:
            self.log.abandon()
        names = [name for name in self.storage.list_dir(DIRECTORY) if name.endswith((".index", ".producers"))]
        if names:
            path = f"{DIRECTORY}/{names[choice % len(names)]}"
            self.damaged.add(path)
            size = len(self.storage.read_file(path))
            if way == "remove" or not size:
                self.storage.remove(path)
            elif way == "truncate":
                self.storage.open(path).truncate(choice % size)
            else:
                self.storage.flip_bit(path, choice % size, choice % 8)
        self.open()

    # --- questions

    @rule(choice=st.integers(0, 1000), max_bytes=st.integers(0, 1500), at_least_one=st.booleans())
    def read(self, choice: int, max_bytes: int, at_least_one: bool) -> None:
        for upper in (self.durable, self.end):
            offset = self.start + choice % (upper - self.start + 1)
            data = bytes(self.log.read(offset, max_bytes, upper, at_least_one=at_least_one))
            expected = [batch for batch in self.batches if offset < batch[0] + len(batch[1]) <= upper]
            whole, rest = split(data)
            assert [list(read_records(batch)) for batch in whole] == [r for _, r in expected[: len(whole)]]
            assert len(data) <= max_bytes or (at_least_one and len(whole) == 1 and not rest)
            if at_least_one:
                assert bool(whole) == bool(expected)
            assert self.log.available_bytes(offset, upper, 2**62) == sum(
                len(batch) for batch in self.log.read_batches(offset, upper)
            )

    @rule(beyond=st.integers(1, 5))
    def read_outside(self, beyond: int) -> None:
        for offset in (self.start - beyond, self.end + beyond):
            with pytest.raises(ApiError) as caught:
                self.log.read(offset, 100, self.end)
            assert caught.value.code == ErrorCode.offset_out_of_range

    @rule(timestamp=st.integers(-1, 101))
    def find_time(self, timestamp: int) -> None:
        for upper in (self.durable, self.end):
            found = searched(self.log.find_time(timestamp, upper))
            expected = next((r for r in self.records(upper) if r.timestamp_ms >= timestamp), None)
            assert (found and (found.timestamp, found.offset)) == (
                expected and (expected.timestamp_ms, expected.offset)
            )

    @rule()
    def find_max_timestamp(self) -> None:
        for upper in (self.durable, self.end):
            found = searched(self.log.find_max_timestamp(upper))
            timed = [record for record in self.records(upper) if record.timestamp_ms >= 0]
            expected = max(timed, key=lambda record: (record.timestamp_ms, -record.offset), default=None)
            assert (found and (found.timestamp, found.offset)) == (
                expected and (expected.timestamp_ms, expected.offset)
            )

    def records(self, upper: int) -> list[Record]:
        """The readable records of whole batches below ``upper``."""
        return [
            record
            for base, records in self.batches
            if base + len(records) <= upper
            for record in records
            if record.offset >= self.start
        ]

    @invariant()
    def offsets_agree(self) -> None:
        log = self.log
        assert (log.log_start_offset, log.durable_offset, log.end_offset) == (
            self.start,
            self.durable,
            self.end,
        )
        for before, after in zip(log.segments, log.segments[1:], strict=False):
            assert before.next_offset == after.base_offset
            assert before.size_bytes <= self.config.segment_bytes

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.log.close()
            problems = verify(self.storage, DIRECTORY).problems
            # An old snapshot that nobody needed stays as damaged as it was made.
            assert not [problem for problem in problems if problem.path not in self.damaged]


def split(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole batches at the start of ``data``, and what is left."""
    whole = []
    while len(data) >= HEADER_BYTES and parse_header(data).size_bytes <= len(data):
        size = parse_header(data).size_bytes
        whole.append(data[:size])
        data = data[size:]
    return whole, data


TestLogModel = LogModel.TestCase
TestLogModel.settings = settings(settings(), max_examples=60, stateful_step_count=40)
